"""WHALE (Weight-Harness Alternating LEarning, arXiv:2609.00196): the loop of the paper, the presets, the commands.

An agent is its weights theta and its harness h. Coordinate ascent on J(theta, h) = E[R(x, tau)] (section 3):

    theta <- weight_phase(theta, h)     online rejection-sampling fine-tuning under the current harness   (rft.py)
    h     <- harness_phase(theta, h)    a proposer rewrites the harness file, real rollouts score it      (harness_search.py)

Differs from the paper:
- Evaluation: the test split is measured at the start and after every phase, always with the same seeds.
- The `tiny` preset is the same loop at a size that a laptop CPU runs in minutes; only the numbers in PRESETS differ.

    bash run.sh math                                         the whole loop on the embedded model
    bash run.sh math --method weight --seed 1                one phase switched off
    bash run.sh eval math --harness FILE --model DIR         mean@8 of one harness and one model
    bash run.sh check-harness math FILE | sandbox FILE.py | verify math --cases FILE.jsonl
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from harness_search import write_atomically
from screen import Screen

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"


@dataclass(frozen=True)
class Config:
    """Every knob, each a flag. The defaults are the `paper` preset for math; PRESETS overrides them."""
    domain: str
    preset: str = "tiny"
    method: str = "whale"                   # whale, adaptive, weight, harness, stagewise
    seed: int = 0
    cycles: int = 2                         # of one weight and one harness phase
    rollouts: int = 0                       # training rollouts to spend; 0: what `cycles` cycles of WHALE would take
    name: str = ""                          # of the run; "": from domain, method and seed
    out: str = str(ROOT / "runs")
    # theta, D_weight, D_harness, D_test
    model: str = "Qwen/Qwen3.5-2B"
    train: str = ""                         # FILE or FILE[a:b], rows a to b
    harness_set: str = ""
    test: str = ""
    # schedule (E, I) and its adaptive form
    epochs: float = 0.6                     # E: epochs of weight updates a cycle
    iterations: int = 6                     # I: harness iterations a cycle; the first scores the incoming harness
    candidates: int = 3                     # M
    patience_epochs: float = 0.2            # adaptive weight phase: window, patience and least length
    patience_iterations: int = 2            # adaptive harness phase
    min_iterations: int = 6
    max_iterations: int = 16
    stagewise_phases: int = 2               # weight phases before the harness phases of `stagewise`
    # rollouts
    prompt_batch: int = 256
    group_size: int = 8                     # G
    n_eval: int = 8                         # mean@n on D_test
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    max_assistant_tok: int = 8192           # a rollout
    max_calls: int = 16                     # model calls a rollout, hard cap
    max_len: int = 16384                    # tokens of context
    n_rows: int = 256                       # rollouts at once
    tool_s: float = 30.0
    tool_mb: int = 1024
    harness_s: float = 5.0                  # between two requests of a harness program
    harness_mb: int = 512
    n_workers: int = 1                      # sandbox processes that run harness programs; changes no result
    max_failed_frac: float = 0.5            # a weight step with more failed programs than this stops the run
    max_empty_steps: int = 5                # weight steps in a row without an accepted rollout
    # rejection-sampling fine-tuning
    lr: float = 1e-7
    minibatch: int = 64                     # trajectories
    micro_tok: int = 16384
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    head_chunk_tok: int = 1024
    autocast_bf16: bool = True
    # machinery
    device: str = "cpu"
    proposer: str = "rules"
    waive: str = ""                         # sandbox layers to do without, comma-separated; said in the summary

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / (self.name or f"{self.domain}-{self.method}-seed{self.seed}")

    @property
    def waived_layers(self) -> tuple[str, ...]:
        return tuple(filter(None, self.waive.split(",")))


PRESETS = {
    "paper": {},
    "tiny": dict(
        model=str(ROOT / "embedded" / "model"), epochs=0.2, iterations=3, prompt_batch=32, max_assistant_tok=160,
        max_calls=8, max_len=1024, tool_s=2.0, tool_mb=256, harness_s=2.0, harness_mb=256, lr=1e-3, minibatch=64,
        micro_tok=8192, autocast_bf16=False),
}
CHOICES = {"domain": ("math",), "preset": tuple(PRESETS), "proposer": ("rules",),
           "method": ("whale", "adaptive", "weight", "harness", "stagewise")}
FREE_ON_RESUME = {"out", "name", "n_workers"}     # fields that change no result


class UsageError(ValueError):
    """Something the user asked for cannot be done; the message says what to change."""


# ---- the loop -------------------------------------------------------------------------------------------------------


def train_whale(run: "Run") -> None:
    """Algorithm 1 of the paper. `run` holds what a resumed run must know and gives it back here."""
    import harness_search
    import rollout
    import sched

    cfg, state = run.cfg, run.state
    run.evaluate("base")                                                        # mean@8 of (theta_0, h_0)
    for phase in sched.phases(cfg.method, run.fixed_schedule(), run.adaptive_schedule(), cfg.stagewise_phases,
                              start=state.phase):
        if run.spent(phase):
            break
        run.begin_phase(phase)
        for signal in state.signals:                                            # recorded before we were stopped
            phase.rule.record(signal)
        if phase.kind == "weight":
            while phase.rule.goes_on and not run.spent(phase):
                tasks = sample_tasks(run.train, cfg.seed, state.n_drawn, cfg.prompt_batch)
                traces = run.roll_out("weight", tasks, cfg.group_size, state.weight_step)      # tau ~ pi_{theta,h}
                accepted = [trace.sequences() for trace in traces if trace.accepted]           # S+
                stats = run.trainer.step(accepted, rollout.derive_seed(cfg.seed, "sft", state.weight_step))
                run.serve_weights()                                             # the next rollouts are on-policy
                phase.rule.record(run.finish_weight_step(phase, traces, stats))
        else:
            search = harness_search.Search(**run.search_arguments(phase))
            while phase.rule.goes_on and not run.spent(phase):
                outcomes = search.iterate()                                     # propose M, gate, score on D_harness
                phase.rule.record(run.finish_iteration(phase, outcomes, search.best()))
            run.adopt(phase, search)                                            # h <- the archive's best
        run.evaluate(f"cycle {phase.cycle}, after the {phase.kind} phase")
        run.finish_phase()
    run.finish()


def sample_tasks(tasks: list, seed: int, n_drawn: int, n: int) -> list:
    """The next n prompts of an endless sequence of shuffled epochs: nothing twice before all once, over all phases."""
    import random

    from rollout import derive_seed

    picked = []
    for i in range(n_drawn, n_drawn + n):
        epoch, position = divmod(i, len(tasks))
        if position == 0 or not picked:
            order = random.Random(derive_seed(seed, "epoch", epoch)).sample(range(len(tasks)), len(tasks))
        picked.append(tasks[order[position]])
    return picked


# ---- a run on disk --------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a resumed run must know beside the weights; state.json, written last after every step."""
    phase: int = 0                          # index of the running phase
    signals: list[float] = field(default_factory=list)          # of the running phase, as its rule saw them
    weight_step: int = 0
    n_drawn: int = 0                        # prompts drawn from D_weight so far
    empty_steps: int = 0                    # weight steps in a row without an accepted rollout
    harness: dict = field(default_factory=dict)                 # the current candidate
    evals: list[dict] = field(default_factory=list)
    accepted: list[dict] = field(default_factory=list)
    ledger: dict[str, dict[str, float]] = field(default_factory=dict)
    harness_iterations: int = 0
    metrics_bytes: int = 0                  # rows after these belong to a step that was not finished
    complete: bool = False


class Run:
    """One run: its directory, its parts, its ledger. The loop calls its methods in the order in which they stand."""

    LEDGER = ("setup", "weight", "harness", "gates", "eval")

    def __init__(self, cfg: Config):
        self.cfg, self.dir = cfg, cfg.run_dir
        self.screen = Screen()
        self.mark = time.monotonic()                # every second from here is charged to one entry of the ledger
        self.env, splits = load_splits(cfg)
        self.train, self.harness_tasks, self.test = splits["train"], splits["harness"], splits["test"]
        self.identity = {"config": {k: v for k, v in asdict(cfg).items() if k not in FREE_ON_RESUME},
                         "data_sha256": {k: hash_tasks(v) for k, v in splits.items()},
                         "model_sha256": hash_model(cfg.model),
                         "h0_sha256": hashlib.sha256(self.env.h0.read_bytes()).hexdigest()}
        self._open_directory()
        if not self.state.complete:
            self._load_parts()

    def _open_directory(self) -> None:
        check_disk(self.cfg)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.dir / ".lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{self.dir} is in use by another run; give this one another --name") from None
        path = self.dir / "config.json"
        if path.exists():
            before = json.loads(path.read_text())
            changes = [f"{group}.{key}: {before[group].get(key)!r} then, {value!r} now" for group in ("config", "data_sha256")
                       for key, value in self.identity[group].items() if before[group].get(key) != value]
            changes += [f"{key} changed" for key in ("model_sha256", "h0_sha256") if before[key] != self.identity[key]]
            if changes:
                raise UsageError(f"{self.dir} holds a run with other settings:\n  " + "\n  ".join(changes)
                                 + "\nGive this run another --name, or remove that directory.")
        else:
            write_atomically(path, json.dumps(self.identity, indent=1) + "\n")
        state = self.dir / "state.json"
        self.state = State(**json.loads(state.read_text())) if state.exists() else State()
        self.resumed = state.exists()
        with open(self.dir / "metrics.jsonl", "ab") as metrics:
            metrics.truncate(self.state.metrics_bytes)
        self.screen.log_path = self.dir / "log.txt"

    def _load_parts(self) -> None:
        from engine import TransformersEngine
        from harness_search import Candidate, ForbiddenText
        from rft import TrainConfig, Trainer
        from sandbox import Sandbox

        cfg, state = self.cfg, self.state
        for line in describe_config(cfg) if not self.resumed else []:
            self.screen.say(line)
        self.sandbox = Sandbox(waive=cfg.waived_layers)
        self.screen.say(f"sandbox layers on: {', '.join(self.sandbox.layers['on'])}"
                        + "".join(f"; {name} off: {why}" for name, why in self.sandbox.layers["off"].items())
                        + (f"; WAIVED: {', '.join(self.sandbox.layers['waived'])}" if self.sandbox.layers["waived"] else ""))
        self.engine = TransformersEngine(cfg.model, cfg.n_rows, cfg.max_len, cfg.device)
        if self.engine.tokenizer.chat_template is None:
            self.screen.say(f"{cfg.model} has no chat template: turns are written as labelled paragraphs (User:, Assistant:)")
        self.trainer = Trainer(cfg.model, TrainConfig(**{f.name: getattr(cfg, f.name) for f in fields(TrainConfig)}), cfg.device)
        self.rollout_cfg = rollout_config(cfg)
        self.forbidden = ForbiddenText(self.train + self.harness_tasks + self.test)
        if state.weight_step:
            self.trainer.load(self._weights_dir(state.weight_step))
            self.serve_weights()
        self.harness = Candidate("h0", "", "the starting point", (), self.env.h0.read_text(), 0)
        if state.harness:
            self.harness = Candidate(**{**state.harness, "mechanisms": tuple(state.harness["mechanisms"])})
        if self.resumed:
            self.screen.say(f"resumed after weight step {state.weight_step}, phase {state.phase + 1}")
        self._clock("setup")

    # -- what the loop asks for --

    def fixed_schedule(self) -> tuple[int, int]:
        from sched import steps
        return steps(self.cfg.epochs, len(self.train), self.cfg.prompt_batch), self.cfg.iterations

    def adaptive_schedule(self) -> tuple[int, int, int, int]:
        from sched import steps
        c = self.cfg
        return (steps(c.patience_epochs, len(self.train), c.prompt_batch), c.patience_iterations, c.min_iterations,
                c.max_iterations)

    def budget(self) -> int:
        from sched import planned_rollouts
        c, (n_steps, n_iterations) = self.cfg, self.fixed_schedule()
        return c.rollouts or planned_rollouts(
            n_steps, c.prompt_batch, c.group_size, n_iterations, c.candidates, len(self.harness_tasks), c.cycles)

    def training_rollouts(self) -> int:
        return int(sum(self.state.ledger.get(phase, {}).get("rollouts", 0) for phase in ("weight", "harness")))

    def spent(self, phase) -> bool:
        """WHALE runs its cycles; all methods stop at the budget, so that arms compare at equal training rollouts."""
        if self.cfg.method in ("whale", "adaptive") and not self.cfg.rollouts:
            return phase.cycle > self.cfg.cycles
        return self.training_rollouts() >= self.budget()

    def begin_phase(self, phase) -> None:
        self.screen.say(f"cycle {phase.cycle}: {phase.kind} phase under {self.harness.name} "
                        f"({phase.rule.why}); {self.training_rollouts()} of {self.budget()} training rollouts spent")

    def roll_out(self, kind: str, tasks: list, n: int, index: int) -> list:
        """Rollouts of the current harness, charged to `kind`; seeds by (run, kind, index)."""
        import rollout

        started = time.monotonic()
        with self.screen.bar(f"{kind} rollouts", len(tasks) * n) as advance:
            traces = rollout.run(self.engine, self.env, self.sandbox, self.harness.source, tasks, n,
                                 (self.cfg.seed, kind, index), self.rollout_cfg, lambda trace: advance())
        self.rollouts_per_s = len(traces) / (time.monotonic() - started)
        self._charge(kind, rollouts=len(traces), model_calls=sum(len(trace.calls) for trace in traces),
                     prompt_tok=sum(trace.n_prompt_tok for trace in traces),
                     completion_tok=sum(trace.n_tok for trace in traces),
                     tool_calls=sum(trace.n_tool_calls for trace in traces))
        return traces

    def serve_weights(self) -> None:
        """The engine serves the trainer's weights, bit for bit, or the run stops."""
        from engine import weights_checksum

        if self.engine.version != self.trainer.version:
            self.engine.load_weights(self.trainer.weights(), self.trainer.version)
            if self.engine.checksum() != weights_checksum(self.trainer.weights()):
                raise RuntimeError("the engine does not serve the weights that were trained")

    def finish_weight_step(self, phase, traces: list, stats) -> float:
        """Logs and saves a weight step; returns its signal, the mean reward."""
        from rollout import summarise

        state, cfg = self.state, self.cfg
        reward = sum(trace.reward for trace in traces) / len(traces)
        accepted = [trace for trace in traces if trace.accepted]
        state.weight_step += 1
        state.n_drawn += cfg.prompt_batch
        state.signals.append(reward)
        state.empty_steps = 0 if accepted else state.empty_steps + 1
        self._clock("weight")
        self.log("weight_step", f"step {state.weight_step}: reward {reward:.3f}, accepted {len(accepted)} of {len(traces)}, "
                 f"loss {'none' if stats.loss is None else format(stats.loss, '.3f')}, {self.rollouts_per_s:.0f} rollouts/s",
                 cycle=phase.cycle, step=state.weight_step, harness=self.harness.name, version=self.trainer.version,
                 reward=reward, accepted_frac=len(accepted) / len(traces),
                 n_unique_accepted=len({trace.task_id for trace in accepted}), **asdict(stats), **summarise(traces),
                 rule=phase.rule.why, rollouts_per_s=self.rollouts_per_s)
        self.trainer.save(self._weights_dir(state.weight_step), self.engine.tokenizer)
        self._save()
        n_failed = sum(trace.status != "ok" for trace in traces)
        if n_failed > cfg.max_failed_frac * len(traces):
            reason = next(trace.end for trace in traces if trace.status != "ok")
            raise UsageError(f"{n_failed} of {len(traces)} programs of {self.harness.name} failed (--max-failed-frac "
                             f"{cfg.max_failed_frac}), for example: {reason}")
        if state.empty_steps >= cfg.max_empty_steps:
            raise UsageError(f"no rollout was accepted in {state.empty_steps} weight steps in a row (--max-empty-steps): "
                             f"the model solves nothing under {self.harness.name}, so there is nothing to train on")
        return reward

    def search_arguments(self, phase) -> dict:
        from harness_search import propose_by_rules

        self.screen.say(f"scoring {self.harness.name} and its rivals on {len(self.harness_tasks)} D_harness tasks")
        return dict(folder=self.dir / "harness" / f"cycle_{phase.cycle:02d}", engine=self.engine, env=self.env,
                    sandbox=self.sandbox, incumbent=self.harness, tasks=self.harness_tasks, forbidden=self.forbidden,
                    seed=(self.cfg.seed, "harness", phase.cycle), rollout_cfg=self.rollout_cfg,
                    n_candidates=self.cfg.candidates, proposer={"rules": propose_by_rules}[self.cfg.proposer],
                    on_candidate=self.screen.bar, n_done=len(self.state.signals))

    def finish_iteration(self, phase, outcomes: list, best: tuple) -> float:
        """Logs the candidates of one iteration; returns its signal, the archive's best score."""
        for outcome in outcomes:
            candidate, score = outcome.candidate, outcome.score
            said = f"refused: {outcome.refused}" if score is None else \
                f"{score.mean:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}]"
            self.log("candidate", f"{candidate.name} (from {candidate.parent or 'before'}) {said}  {candidate.hypothesis}",
                     cycle=phase.cycle, candidate=candidate.name, parent=candidate.parent, refused=outcome.refused,
                     hypothesis=candidate.hypothesis, mechanisms=list(candidate.mechanisms),
                     **({} if score is None else {
                         k: v for k, v in asdict(score).items() if k not in ("seconds", "key")}))
            self._charge("gates", rollouts=outcome.gate_rollouts, seconds=outcome.gate_seconds)
            if score is not None:
                self._charge("harness", rollouts=score.n, model_calls=score.n_model_calls, prompt_tok=score.n_prompt_tok,
                             completion_tok=score.n_completion_tok, tool_calls=score.n_tool_calls, seconds=score.seconds)
        self.mark = time.monotonic()
        self.state.harness_iterations += 1
        self.state.signals.append(best[1].mean)
        self.log("iteration", f"best of cycle {phase.cycle} so far: {best[0].name} with {best[1].mean:.3f}",
                 cycle=phase.cycle, iteration=len(self.state.signals), best=best[0].name, best_score=best[1].mean,
                 rule=phase.rule.why)
        self._save()
        return best[1].mean

    def adopt(self, phase, search) -> None:
        """The archive's best becomes the harness of the next phases."""
        candidate, score = search.best()
        search.accept()
        self.harness = candidate
        self.state.harness = asdict(candidate)
        self.state.accepted.append({"cycle": phase.cycle, "name": candidate.name, "parent": candidate.parent,
                                    "hypothesis": candidate.hypothesis, "score": score.mean})
        self.screen.say(f"accepted {candidate.name} of cycle {phase.cycle}: {candidate.hypothesis}")

    def evaluate(self, label: str) -> None:
        """mean@n on D_test with a 95 % interval over tasks; evaluation rollouts are no training rollouts."""
        from harness_search import bootstrap_ci
        from rollout import derive_seed, summarise

        state, n = self.state, self.cfg.n_eval
        if label in {row["label"] for row in state.evals}:
            return
        traces = self.roll_out("eval", self.test, n, 0)                         # the same seeds at every evaluation
        means = [sum(trace.reward for trace in traces[i:i + n]) / n for i in range(0, len(traces), n)]
        mean, ci95 = sum(means) / len(means), bootstrap_ci(means, derive_seed(self.cfg.seed, "bootstrap"))
        failures = Counter(trace.failure for trace in traces)
        self._clock("eval")
        path = self.dir / "eval" / f"{len(state.evals):02d}_step_{state.weight_step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, "".join(
            json.dumps(trace.to_json(with_ids=True) if trace.sample == 0 else
                       {"task_id": trace.task_id, "sample": trace.sample, "reward": trace.reward, "failure": trace.failure,
                        "end": trace.end, "n_tok": trace.n_tok}) + "\n" for trace in traces))
        state.evals.append({"label": label, "mean": mean, "ci95": list(ci95), "weight_step": state.weight_step,
                            "training_rollouts": self.training_rollouts()})
        self.log("eval", f"test mean@{n} {mean:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]  {label}; "
                 f"{self.rollouts_per_s:.0f} rollouts/s; " + ", ".join(f"{k} {v}" for k, v in failures.most_common(5)),
                 label=label, mean=mean, ci95=list(ci95), step=state.weight_step, harness=self.harness.name,
                 training_rollouts=self.training_rollouts(), rollouts_per_s=self.rollouts_per_s, **summarise(traces),
                 **{f"failure_{k}": v for k, v in sorted(failures.items())})
        if label == "base":
            self._save()

    def finish_phase(self) -> None:
        self.state.phase += 1
        self.state.signals = []
        self._save()
        self._write_summary()

    def finish(self) -> None:
        self.state.complete = True
        (self.dir / "final_harness.py").write_text(self.harness.source)
        self._save()
        self._write_summary()

    # -- records --

    def log(self, kind: str, text: str, **metrics) -> None:
        """The one door: a line on the screen and in log.txt, a row in metrics.jsonl."""
        self.screen.say(text)
        with open(self.dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **metrics, "seconds": round(self._seconds(), 1)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _seconds(self) -> float:
        return sum(entry.get("seconds", 0) for entry in self.state.ledger.values())

    def _charge(self, kind: str, **amounts: float) -> None:
        entry = self.state.ledger.setdefault(kind, {})
        for key, amount in amounts.items():
            entry[key] = entry.get(key, 0) + amount

    def _clock(self, kind: str) -> None:
        """Charges the time since the last reading to `kind`, so that every second is charged once."""
        now = time.monotonic()
        self._charge(kind, seconds=now - self.mark)
        self.mark = now

    def _weights_dir(self, step: int) -> Path:
        return self.dir / "weights" / f"step_{step:06d}"

    def _save(self) -> None:
        """Ends a step: state.json is the marker, written last. Then old checkpoints go, but for the best and the last."""
        self.state.metrics_bytes = (self.dir / "metrics.jsonl").stat().st_size
        write_atomically(self.dir / "state.json", json.dumps(asdict(self.state), indent=1) + "\n")
        best = max(self.state.evals, key=lambda row: row["mean"])["weight_step"] if self.state.evals else 0
        keep = {self._weights_dir(step).name for step in (best, self.state.weight_step)}
        for folder in (self.dir / "weights").glob("step_*"):
            if folder.name not in keep:
                shutil.rmtree(folder)

    def _write_summary(self) -> None:
        cfg, state = self.cfg, self.state
        point = lambda row: {"mean": round(row["mean"], 4), "ci95": [round(x, 4) for x in row["ci95"]]}     # noqa: E731
        best = max(state.evals, key=lambda row: row["mean"])
        summary = {
            "domain": cfg.domain, "method": cfg.method, "preset": cfg.preset, "seed": cfg.seed, "model": cfg.model,
            "complete": state.complete, "base_mean8": point(state.evals[0]), "best_mean8": point(best),
            "final_mean8": point(state.evals[-1]),
            "rollouts": {kind: int(state.ledger.get(kind, {}).get("rollouts", 0)) for kind in self.LEDGER},
            "seconds": {kind: round(state.ledger.get(kind, {}).get("seconds", 0), 1) for kind in self.LEDGER},
            "cycles": len(state.accepted) or state.phase, "weight_steps": state.weight_step,
            "harness_iterations": state.harness_iterations, "accepted": state.accepted,
            "final_harness": "final_harness.py" if state.complete else None, "sandbox": self.sandbox.layers,
            "version": code_version()}
        write_atomically(self.dir / "summary.json", json.dumps(summary, indent=1) + "\n")


# ---- checks before a model is loaded --------------------------------------------------------------------------------


def load_split(env, value: str) -> list:
    """Tasks of FILE or FILE[a:b] (rows a to b, as in Hugging Face's split notation)."""
    path, start, end = re.fullmatch(r"(.*?)(?:\[(\d*):(\d*)\])?", value).groups()
    tasks = env.load(Path(path))[slice(int(start) if start else None, int(end) if end else None)]
    if not tasks:
        raise UsageError(f"{value}: no rows")
    return tasks


def load_splits(cfg: Config) -> tuple:
    """-> the environment and its splits {"train", "harness", "test"}, checked to be disjoint."""
    from envs import ENVS, check_disjoint

    env = ENVS[cfg.domain]()
    embedded = ROOT / "embedded" / cfg.domain
    splits = {split: load_split(env, given or str(embedded / f"{split}.jsonl"))
              for split, given in (("train", cfg.train), ("harness", cfg.harness_set), ("test", cfg.test))}
    check_disjoint(**splits)
    return env, splits


def rollout_config(cfg: Config):
    from rollout import RolloutConfig
    from sandbox import Limits

    return RolloutConfig(cfg.temperature, cfg.top_k, cfg.top_p, cfg.max_assistant_tok, cfg.max_calls, cfg.n_rows,
                         cfg.n_workers, Limits(cfg.tool_s, cfg.tool_mb), Limits(cfg.harness_s, cfg.harness_mb))


def hash_tasks(tasks: list) -> str:
    return hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()


def hash_model(model: str) -> str:
    """sha256 over a local model's files; a hub name stands for itself."""
    path = Path(model)
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256(b"" if files else model.encode())
    for file in files:
        if file.is_file():
            with open(file, "rb") as handle:
                digest.update(file.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def check_disk(cfg: Config) -> None:
    """Two checkpoints are kept and a third is written: fp32 weights and two AdamW moments, from at most bf16 files."""
    path = Path(cfg.model)
    model_bytes = sum(f.stat().st_size for f in (path.glob("*.safetensors") if path.is_dir() else [path]) if f.is_file())
    needed = 3 * 6 * model_bytes + (200 << 20)
    existing = next(p for p in [Path(cfg.out).absolute(), *Path(cfg.out).absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UsageError(f"{existing} has {free >> 20} MiB free and this run may need {needed >> 20} MiB; "
                         "make room or choose another place with --out")


def code_version() -> str:
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() if git.returncode == 0 else VERSION


def describe_config(cfg: Config) -> list[str]:
    pairs = [f"{key}={value}" for key, value in asdict(cfg).items() if value != ""]
    return ["settings: " + " ".join(pairs)]
