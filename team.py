"""What every rank has (environment, sandbox, engine; trainer, if there is training) and what all do together with it.

Rank 0's call of a method marked `@together` is an order: the other ranks, which wait in `follow`, get its name and
arguments and call it too. On one rank it is a plain call. Draws are seeded by their coordinates (task, sample, call),
so a rollout does not depend on which rank makes it.
"""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import wraps
from pathlib import Path

import torch
from transformers.utils.logging import set_verbosity_error

import rollout
from config import Config, make_env, rollout_config, train_config
from ranks import Ranks
from rft import StepStats, Trainer, Trajectory
from rollout import Trace
from files import UsageError
from sandbox import Sandbox
from server_engine import ServerEngine
from stop import SIGNALS
from tasks import Task
from transformers_engine import TransformersEngine
from vllm_engine import VllmEngine


def together(method: Callable) -> Callable:
    """Rank 0's call is everyone's. Positional arguments are sent; what is given by keyword stays on rank 0."""
    @wraps(method)
    def order(self: "Team", *args, **kwargs):
        if self.ranks.rank == 0:
            self.ranks.broadcast((method.__name__, args))
        return method(self, *args, **kwargs)
    return order


class Team:
    """The parts of this rank. All ranks make theirs at the same time: see `lead` and `follow`."""

    def __init__(self, cfg: Config, env, ranks: Ranks):
        self.env, self.ranks, self.rollout_cfg = env, ranks, rollout_config(cfg)
        if cfg.device.startswith("cuda") and ranks.local_world > torch.cuda.device_count():
            raise UsageError(f"{ranks.local_world} ranks for {torch.cuda.device_count()} GPUs: set WHALE_RANKS")
        env.open()
        n_cores = len(os.sched_getaffinity(0)) // ranks.local_world     # the ranks of a machine share them
        self.sandbox = Sandbox(cfg.waived_layers, max_jobs=max(1, n_cores))
        if ranks.local_world % cfg.tp:
            raise UsageError(f"--tp {cfg.tp}: does not divide the {ranks.local_world} ranks of this machine")
        device = ranks.device(cfg.device)
        self.tp = cfg.tp                                                # ranks that have one engine in common
        self.engine = open_engine(cfg, device) if ranks.rank % self.tp == 0 else None
        if self.tp > 1:                         # until it has measured its GPUs, nobody else may use their memory
            ranks.gather(None)
            ranks.broadcast(None)
        self.served = 0                         # the version of the weights that all engines have
        if cfg.method != "harness" and self.engine and not self.engine.takes_weights:
            raise UsageError(f"--urls {cfg.urls}: these servers take no weights, so they serve --method harness only; "
                             "vLLM servers with VLLM_SERVER_DEV_MODE=1 take them")
        self.trainer = Trainer(cfg.theta, train_config(cfg), device, ranks) if cfg.method != "harness" else None

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.trainer.version if self.trainer else 0

    @together
    def roll_out(self, source: str, tasks: list[Task], n: int, seed: tuple[int | str, ...], *,
                 on_finish: Callable[[Trace], None] | None = None) -> list[Trace]:
        """rollout.run, each rank on its share of the tasks -> on rank 0 all traces, in the order of (task, sample).

        `on_finish` gets those of rank 0.
        """
        own, judge = self.share(tasks), self.env.judge
        traces = rollout.run(self.engine, self.env, self.sandbox, source, own, n, seed, self.rollout_cfg,
                             on_finish) if own else []
        news = judge.tell() if judge and self.ranks.rank else None
        of_ranks = self.ranks.gather((traces, news))
        for _, news in of_ranks[1:]:
            if judge:
                judge.hear(news)
        found = {(trace.task_id, trace.sample): trace for traces, _ in of_ranks for trace in traces}
        if stale := {trace.version for trace in found.values()} - {self.version}:
            raise RuntimeError(f"rollouts of weights {sorted(stale)}, and the trainer is at {self.version}")
        return [found[task.id, sample] for task in tasks for sample in range(n)] if found else []

    def share(self, items: Sequence) -> Sequence:
        """This rank's part of what is to be sampled, dealt like cards to the ranks that have an engine: neighbours
        (tasks of one source) are often alike in length."""
        return items[self.ranks.rank // self.tp::self.ranks.world // self.tp] if self.engine else items[:0]

    @together
    def train(self, trajectories: list[Trajectory], seed: int) -> StepStats:
        if self.engine:
            self.engine.sleep()                                         # the GPU is the trainer's
        return self.trainer.step(trajectories, seed)

    @together
    def serve_weights(self) -> None:
        """Each engine, awake, serves the trainer's weights, bit for bit in its own dtype, or the run stops."""
        if self.engine:
            self.engine.wake()
        if self.served != self.trainer.version:
            if self.engine:
                self.engine.load_weights(self.trainer.weights(), self.trainer.version)
            else:
                for _ in self.trainer.weights():                        # gathering them takes all ranks
                    pass
            self.served = self.trainer.version
        if self.engine and self.engine.version != self.trainer.version:
            raise RuntimeError("the engine does not serve the weights that were trained")

    @together
    def save(self, folder: Path) -> None:
        self.trainer.save(folder, self.engine and self.engine.tokenizer)

    @together
    def load(self, folder: Path) -> None:
        self.trainer.load(folder)

    def close(self) -> None:
        if self.engine:
            self.engine.close()
        self.sandbox.close()


def open_engine(cfg: Config, device: str | None = None):
    """The engine that --engine names: TransformersEngine, VllmEngine or ServerEngine."""
    device = device or cfg.device
    if cfg.engine == "server":
        share = Path(cfg.share or cfg.run_dir / "serving").resolve()
        return ServerEngine(cfg.theta, cfg.urls, share, cfg.n_rows, cfg.max_len)
    if cfg.engine == "vllm":
        return VllmEngine(cfg.theta, cfg.n_rows, cfg.max_len, device, cfg.tp, cfg.gpu_memory_frac)
    return TransformersEngine(cfg.theta, cfg.n_rows, cfg.max_len, device)


def lead(cfg: Config, env, ranks: Ranks) -> Team:
    """Rank 0's team. The others make theirs of the same settings, and know what the judge has said in this run."""
    ranks.broadcast((cfg, env.judge and env.judge.verdicts))
    return Team(cfg, env, ranks)


def follow(ranks: Ranks) -> None:
    """What every rank but 0 does: carries out orders until there are no more."""
    for number in SIGNALS:                              # rank 0 says that it was stopped,
        signal.signal(number, signal.SIG_DFL)
    set_verbosity_error()                               # and what transformers thinks of the model
    begin = ranks.broadcast()
    if begin is None:                                   # rank 0 found nothing to share
        return
    cfg, verdicts = begin
    env = make_env(cfg)
    if verdicts:
        env.judge.verdicts.update(verdicts)
    with closing(Team(cfg, env, ranks)) as team:
        while (order := ranks.broadcast()) is not None:
            name, args = order
            getattr(team, name)(*args)
