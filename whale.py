"""WHALE (Weight-Harness Alternating LEarning, arXiv:2609.00196): the loop of the paper, the presets, the commands.

An agent is its weights theta and its harness h. Coordinate ascent on J(theta, h) = E[R(x, tau)] (section 3):

    theta <- weight_phase(theta, h)     rft.py: online rejection-sampling fine-tuning under the current harness
    h     <- harness_phase(theta, h)    harness_search.py: a proposer rewrites the file, real rollouts score it

Differs from the paper:
- Evaluation: the test split is measured at the start and after every phase, always with the same seeds.
- The `tiny` preset is the same loop at a size that a laptop CPU runs in minutes; only the numbers in PRESETS differ.

    bash run.sh math | search | chess                        the whole loop on the embedded model
    bash run.sh math --method weight --seed 1                one phase switched off
    bash run.sh eval math --harness FILE --model DIR         mean@8 of one harness and one model
    bash run.sh check-harness math FILE | sandbox FILE.py | verify math --cases FILE.jsonl
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import rollout
import sched
from engine import TransformersEngine, weights_checksum
from envs import ENVS
from tasks import Task, check_disjoint
from gates import ForbiddenText
from harness_search import Candidate, Outcome, Search, bootstrap_ci, sha256, write_atomically
from proposers import propose_by_rules
from rft import StepStats, TrainConfig, Trainer
from rollout import RolloutConfig, Trace, derive_seed
from rundir import RunDir, UsageError
from sandbox import Limits, Sandbox
from search_answer import Judge

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
    harness: str = ""                       # the harness to start from; "": h0 of the domain
    retriever: str = ""                     # search: URLs of retriever servers, or a corpus file; "": the embedded one
    judge_url: str = ""                     # search: asked where exact match says no; its key is in WHALE_JUDGE_KEY
    judge_model: str = ""
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
    "paper": {},                            # the table of the paper; the defaults of Config are its column for math
    "tiny": dict(
        model=str(ROOT / "embedded" / "model"), epochs=0.0625, iterations=3, prompt_batch=32, max_assistant_tok=160,
        max_calls=8, max_len=1024, tool_s=2.0, tool_mb=256, harness_s=2.0, harness_mb=256, lr=1e-3, minibatch=64,
        micro_tok=4096, autocast_bf16=False),
}
DOMAIN_PRESETS = {                          # where a domain differs
    ("paper", "chess"): dict(model="Qwen/Qwen3.5-4B", max_assistant_tok=8129, max_calls=18),
    ("tiny", "search"): dict(epochs=0.3125, prompt_batch=64, lr=5e-4),
    ("tiny", "chess"): dict(epochs=1.25, prompt_batch=64, lr=5e-4, max_calls=12, max_len=1536),
}
CHOICES = {"domain": tuple(ENVS), "preset": tuple(PRESETS), "proposer": ("rules",),
           "method": ("whale", "adaptive", "weight", "harness", "stagewise")}
PROPOSERS = {"rules": propose_by_rules}
FREE_ON_RESUME = {"out", "name", "n_workers"}     # fields that change no result, as does the address of a server


# ---- the loop -------------------------------------------------------------------------------------------------------


def train_whale(run: "Run") -> None:
    """The paper's algorithm: alternate the two phases until the budget is spent, evaluate after each."""
    cfg, state = run.cfg, run.state
    run.evaluate("base")                                                        # mean@8 of (theta_0, h_0)
    for phase in run.phases():                                                  # sched.py: weight, harness, weight ...
        if run.is_spent(phase):
            break
        run.begin_phase(phase)
        for signal in state.signals:                                            # recorded before we were stopped
            phase.rule.record(signal)
        if phase.kind == "weight":
            while phase.rule.goes_on and not run.is_spent(phase):
                tasks = sample_tasks(run.train, cfg.seed, state.n_drawn, cfg.prompt_batch)     # x ~ D_weight
                traces = run.roll_out("weight", tasks, cfg.group_size, state.weight_step)      # tau ~ pi_{theta,h}
                accepted = [trace.sequences() for trace in traces if trace.accepted]           # S+
                stats = run.trainer.step(accepted, derive_seed(cfg.seed, "sft", state.weight_step))
                run.serve_weights()                                             # so the next rollouts are on-policy
                run.finish_weight_step(phase, traces, stats)
        else:
            search = run.open_search(phase)                                     # iteration 1 scores the incoming h
            while phase.rule.goes_on and not run.is_spent(phase):
                outcomes = search.iterate()                                     # propose M, gate, score on D_harness
                run.finish_iteration(phase, outcomes, search)
            run.adopt_best(phase, search)                                       # h <- the archive's best
        run.evaluate(f"cycle {phase.cycle}, after the {phase.kind} phase")
        run.finish_phase()
    run.finish()


def sample_tasks(tasks: list[Task], seed: int, n_drawn: int, n: int) -> list[Task]:
    """The next n prompts of an endless row of shuffled epochs: none twice before all once, through all phases."""
    picked, order = [], []
    for i in range(n_drawn, n_drawn + n):
        epoch, position = divmod(i, len(tasks))
        if position == 0 or not order:
            order = random.Random(derive_seed(seed, "epoch", epoch)).sample(range(len(tasks)), len(tasks))
        picked.append(tasks[order[position]])
    return picked


class Run:
    """The parts of a run, and what the loop asks of them, in the order in which it asks."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.env, splits = load_splits(cfg)
        self.h0 = read_file(cfg.harness or str(self.env.h0))
        self.train, self.harness_tasks, self.test = splits["train"], splits["harness"], splits["test"]
        self.budget()                                                           # refuses a schedule of no steps
        check_disk(cfg)
        self.dir = RunDir(cfg.run_dir, identity={
            "config": {key: value for key, value in asdict(cfg).items()
                       if key not in FREE_ON_RESUME and not str(value).startswith(("http://", "https://"))},
            "sha256": {**{split: hash_tasks(tasks) for split, tasks in splits.items()},
                       "model": hash_model(cfg.model), "h0": sha256(self.h0),
                       **{path.name: hash_model(str(path)) for path in self.env.files}}})
        self.state, self.say = self.dir.state, self.dir.screen.say
        if not self.state.complete:
            self._load_parts()

    def _load_parts(self) -> None:
        cfg, state = self.cfg, self.state
        if not self.dir.resumed:
            self.say("settings: " + " ".join(f"{key}={value}" for key, value in asdict(cfg).items() if value != ""))
        if cfg.judge_url:
            self.env.judge = open_judge(cfg, self.dir.path / "judge.jsonl")     # a resumed run decides alike
        self.env.open()
        self.sandbox = Sandbox(waive=cfg.waived_layers)
        layers = self.sandbox.layers
        self.say("sandbox layers on: " + ", ".join(layers["on"])
                 + "".join(f"; {name} off: {why}" for name, why in layers["off"].items())
                 + "".join(f"; {name} WAIVED" for name in layers["waived"]))
        self.engine = TransformersEngine(cfg.model, cfg.n_rows, cfg.max_len, cfg.device)
        if self.engine.tokenizer.chat_template is None:
            self.say(f"{cfg.model} has no chat template: turns are labelled paragraphs (User: ..., Assistant: ...)")
        self.trainer = Trainer(cfg.model, train_config(cfg), cfg.device)
        self.rollout_cfg = rollout_config(cfg)
        self.forbidden = ForbiddenText([*self.train, *self.harness_tasks, *self.test])
        self.harness = Candidate("h0", "", "the starting point", (), self.h0, 0)
        if state.harness:
            self.harness = Candidate(**{**state.harness, "mechanisms": tuple(state.harness["mechanisms"])})
        if state.weight_step:
            self.trainer.load(self.dir.weights_dir(state.weight_step))          # step n + 1 starts from step n
            self.serve_weights()
        if self.dir.resumed:
            self.say(f"resumed after weight step {state.weight_step}, in phase {state.phase + 1}")
        self.dir.clock("setup")

    # -- schedule --

    def n_steps(self, flag: str, epochs: float) -> int:
        try:
            return sched.steps(epochs, len(self.train), self.cfg.prompt_batch)
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None

    def phases(self) -> Iterator[sched.Phase]:
        cfg = self.cfg
        fixed = (self.n_steps("--epochs", cfg.epochs), cfg.iterations)
        window = self.n_steps("--patience-epochs", cfg.patience_epochs) if cfg.method == "adaptive" else 1
        adaptive = (window, cfg.patience_iterations, cfg.min_iterations, cfg.max_iterations)
        return sched.phases(cfg.method, fixed, adaptive, cfg.stagewise_phases, start=self.state.phase)

    def budget(self) -> int:
        """Training rollouts: what was asked for, or what `cycles` cycles of WHALE take."""
        cfg = self.cfg
        return cfg.rollouts or sched.planned_rollouts(
            self.n_steps("--epochs", cfg.epochs), cfg.prompt_batch, cfg.group_size, cfg.iterations, cfg.candidates,
            len(self.harness_tasks), cfg.cycles)

    def is_spent(self, phase: sched.Phase) -> bool:
        """WHALE runs its cycles; with --rollouts, and for all other methods, the budget decides."""
        if self.cfg.method in ("whale", "adaptive") and not self.cfg.rollouts:
            return phase.cycle > self.cfg.cycles
        return self.dir.training_rollouts() >= self.budget()

    def begin_phase(self, phase: sched.Phase) -> None:
        self.say(f"cycle {phase.cycle}: {phase.kind} phase from {self.harness.name} ({phase.rule.why}); "
                 f"{self.dir.training_rollouts():,} of {self.budget():,} training rollouts spent", style="bold")

    # -- weight phase --

    def roll_out(self, kind: str, tasks: list[Task], n: int, index: int) -> list[Trace]:
        """n rollouts a task of the current harness, charged to `kind`; seeds by (run, kind, index)."""
        with self.dir.screen.bar(f"{kind} rollouts", len(tasks) * n) as advance:
            traces = rollout.run(self.engine, self.env, self.sandbox, self.harness.source, tasks, n,
                                 (self.cfg.seed, kind, index), self.rollout_cfg, lambda trace: advance())
        self.dir.charge(kind, rollouts=len(traces), model_calls=sum(len(trace.calls) for trace in traces),
                        prompt_tok=sum(trace.n_prompt_tok for trace in traces),
                        completion_tok=sum(trace.n_tok for trace in traces),
                        tool_calls=sum(trace.n_tool_calls for trace in traces))
        self.tell_judge()
        return traces

    def tell_judge(self) -> None:
        """Says what the judge did since the last time: an unanswered question was decided by exact match."""
        judge = self.env.judge
        if judge and (judge.n_asked or judge.n_cached):
            failure = f"; last failure: {judge.last_error}" if judge.n_failed else ""
            self.dir.log("judge", f"judge: asked {judge.n_asked}, of which without a verdict {judge.n_failed}; "
                         f"remembered {judge.n_cached}{failure}",
                         asked=judge.n_asked, failed=judge.n_failed, cached=judge.n_cached)
            judge.n_asked = judge.n_failed = judge.n_cached = 0

    def serve_weights(self) -> None:
        """The engine serves the trainer's weights, bit for bit, or the run stops."""
        if self.engine.version != self.trainer.version:
            self.engine.load_weights(self.trainer.weights(), self.trainer.version)
        if self.engine.checksum() != weights_checksum(self.trainer.weights()):
            raise RuntimeError("the engine does not serve the weights that were trained")

    def finish_weight_step(self, phase: sched.Phase, traces: list[Trace], stats: StepStats) -> None:
        """Records the signal (mean reward), logs, saves. Stops a run that has nothing to learn from."""
        state, cfg = self.state, self.cfg
        reward = sum(trace.reward for trace in traces) / len(traces)
        accepted = [trace for trace in traces if trace.accepted]
        phase.rule.record(reward)
        state.signals.append(reward)
        state.weight_step += 1
        state.n_drawn += cfg.prompt_batch
        state.empty_steps = 0 if accepted else state.empty_steps + 1
        started = self.dir.spent("weight", "seconds")
        self.dir.clock("weight")
        per_s = len(traces) / (self.dir.spent("weight", "seconds") - started)
        loss = "no update" if stats.loss is None else f"loss {stats.loss:.3f}"
        self.dir.log(
            "weight_step", f"step {state.weight_step}: reward {reward:.3f}, accepted {len(accepted)} of {len(traces)}, "
            f"{loss} on {stats.n_supervised_tok:,} tokens, {per_s:.0f} rollouts/s with training",
            cycle=phase.cycle, step=state.weight_step, harness=self.harness.name, version=self.trainer.version,
            reward=reward, accepted_frac=len(accepted) / len(traces), rollouts_per_s=per_s, rule=phase.rule.why,
            n_unique_accepted=len({trace.task_id for trace in accepted}), **asdict(stats), **rollout.summarise(traces))
        self.trainer.save(self.dir.weights_dir(state.weight_step), self.engine.tokenizer)
        self.dir.save()
        failed = [trace for trace in traces if trace.status != "ok"]
        if len(failed) > cfg.max_failed_frac * len(traces):
            raise UsageError(f"{len(failed)} of {len(traces)} programs of {self.harness.name} failed "
                             f"(--max-failed-frac {cfg.max_failed_frac}), for example: {failed[0].end}")
        if state.empty_steps >= cfg.max_empty_steps:
            raise UsageError(f"no rollout was accepted in {state.empty_steps} weight steps in a row "
                             f"(--max-empty-steps): the model solves nothing under {self.harness.name}, so there is "
                             "nothing to train on")

    # -- harness phase --

    def open_search(self, phase: sched.Phase) -> Search:
        return Search(
            folder=self.dir.path / "harness" / f"cycle_{phase.cycle:02d}", engine=self.engine, env=self.env,
            sandbox=self.sandbox, incumbent=self.harness, tasks=self.harness_tasks, forbidden=self.forbidden,
            seed=(self.cfg.seed, "harness", phase.cycle), rollout_cfg=self.rollout_cfg,
            n_candidates=self.cfg.candidates, proposer=PROPOSERS[self.cfg.proposer],
            on_candidate=self.dir.screen.bar, n_done=len(self.state.signals))

    def finish_iteration(self, phase: sched.Phase, outcomes: list[Outcome], search: Search) -> None:
        """Logs the candidates, charges their rollouts, records the signal (the archive's best score), saves."""
        best, best_score = search.best()
        measured_s = 0.0
        for outcome in outcomes:
            candidate, score = outcome.candidate, outcome.score
            self.dir.charge("gates", rollouts=outcome.gate_rollouts, seconds=outcome.gate_seconds)
            measured_s += outcome.gate_seconds
            if score is not None:
                self.dir.charge("harness", rollouts=score.n, model_calls=score.n_model_calls, seconds=score.seconds,
                                prompt_tok=score.n_prompt_tok, completion_tok=score.n_completion_tok,
                                tool_calls=score.n_tool_calls)
                measured_s += score.seconds
            said = f"{score.mean:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}]" if score else \
                f"refused: {outcome.refused}"
            numbers = asdict(score) if score else {}
            numbers = {key: value for key, value in numbers.items() if key not in ("seconds", "key")}
            self.dir.log("candidate", f"{candidate.name} {said}  {candidate.hypothesis}", cycle=phase.cycle,
                         candidate=candidate.name, parent=candidate.parent, hypothesis=candidate.hypothesis,
                         mechanisms=list(candidate.mechanisms), refused=outcome.refused, **numbers)
        self.dir.clock("harness", already_s=measured_s)
        phase.rule.record(best_score.mean)
        self.state.signals.append(best_score.mean)
        self.state.harness_iterations += 1
        self.dir.log("iteration", f"best of cycle {phase.cycle} so far: {best.name} with {best_score.mean:.3f}",
                     cycle=phase.cycle, iteration=len(self.state.signals), best=best.name, best_score=best_score.mean,
                     rule=phase.rule.why)
        self.dir.save()

    def adopt_best(self, phase: sched.Phase, search: Search) -> None:
        """The archive's best is the harness from here on."""
        search.accept()
        self.harness, score = search.best()
        self.state.harness = asdict(self.harness)
        self.state.accepted.append({"cycle": phase.cycle, "name": self.harness.name, "parent": self.harness.parent,
                                    "hypothesis": self.harness.hypothesis, "score": score.mean})
        self.say(f"accepted {self.harness.name} of cycle {phase.cycle}", style="bold")

    # -- evaluation and end --

    def evaluate(self, label: str) -> None:
        """mean@n on D_test with a 95 % interval over tasks, on the same seeds each time; no training rollouts."""
        state, n = self.state, self.cfg.n_eval
        if label in {row["label"] for row in state.evals}:
            return
        what = {"harness_sha": sha256(self.harness.source), "version": self.trainer.version}
        if state.evals and {key: state.evals[-1][key] for key in what} == what:     # the same rollouts once more
            state.evals.append({**state.evals[-1], "label": label, "training_rollouts": self.dir.training_rollouts()})
            mean = state.evals[-1]["mean"]
            return self.dir.log("eval", f"test mean@{n} {mean:.3f} {label}: same weights and harness as before", **what,
                                label=label, mean=mean, training_rollouts=self.dir.training_rollouts(), repeated=True)
        traces = self.roll_out("eval", self.test, n, 0)
        means = task_means(traces, n)
        mean, ci95 = sum(means) / len(means), bootstrap_ci(means, derive_seed(self.cfg.seed, "bootstrap"))
        failures = Counter(trace.failure for trace in traces)
        self.dir.clock("eval")
        folder = self.dir.path / "eval"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{len(state.evals):02d}_step_{state.weight_step:06d}.jsonl", "".join(
            json.dumps(trace.brief() if trace.sample else trace.to_json(with_ids=True)) + "\n" for trace in traces))
        state.evals.append({"label": label, "mean": mean, "ci95": list(ci95), "weight_step": state.weight_step, **what,
                            "training_rollouts": self.dir.training_rollouts()})
        self.dir.log("eval", f"test mean@{n} {mean:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}] {label}; "
                     + ", ".join(f"{word} {count}" for word, count in failures.most_common(5)),
                     label=label, mean=mean, ci95=list(ci95), step=state.weight_step, harness=self.harness.name,
                     training_rollouts=self.dir.training_rollouts(), **rollout.summarise(traces),
                     **{f"failure_{word}": count for word, count in sorted(failures.items())})
        if label == "base":
            self._save_all()

    def finish_phase(self) -> None:
        self.state.phase += 1
        self.state.signals = []
        self._save_all()

    def finish(self) -> None:
        self.state.complete = True
        self._save_all()

    def close(self) -> None:
        """Ends the sandbox's processes and gives the run directory free."""
        self.sandbox.close()
        self.dir.lock.close()

    def _save_all(self) -> None:
        write_atomically(self.dir.path / "final_harness.py", self.harness.source)
        cfg = self.cfg
        self.dir.write_summary(domain=cfg.domain, method=cfg.method, preset=cfg.preset, seed=cfg.seed,
                               model=cfg.model, n_eval=cfg.n_eval,
                               verifier=f"judge {cfg.judge_model}" if cfg.judge_url else "exact match",
                               cycles=len(self.state.accepted), sandbox=self.sandbox.layers, version=code_version())
        self.dir.save()


def task_means(traces: list[Trace], n: int) -> list[float]:
    """Traces in the order of (task, sample), n samples a task -> the mean reward of each task."""
    return [sum(trace.reward for trace in traces[i:i + n]) / n for i in range(0, len(traces), n)]


def train_config(cfg: Config) -> TrainConfig:
    return TrainConfig(**{knob.name: getattr(cfg, knob.name) for knob in fields(TrainConfig)})


def rollout_config(cfg: Config) -> RolloutConfig:
    return RolloutConfig(cfg.temperature, cfg.top_k, cfg.top_p, cfg.max_assistant_tok, cfg.max_calls, cfg.n_rows,
                         cfg.n_workers, Limits(cfg.tool_s, cfg.tool_mb), Limits(cfg.harness_s, cfg.harness_mb))


# ---- checks before a model is loaded --------------------------------------------------------------------------------


def read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UsageError(f"{path}: {why}") from None


def load_split(env, value: str) -> list[Task]:
    """Tasks of FILE or FILE[a:b] (rows a to b, in Hugging Face's split notation)."""
    path, start, end = re.fullmatch(r"(.*?)(?:\[(\d*):(\d*)\])?", value).groups()
    tasks = env.load(Path(path))[slice(int(start) if start else None, int(end) if end else None)]
    if not tasks:
        raise UsageError(f"{value}: no rows")
    return tasks


def load_splits(cfg: Config) -> tuple:
    """-> the environment and its splits {"train", "harness", "test"}, checked to be disjoint."""
    if cfg.domain != "search" and (cfg.retriever or cfg.judge_url):
        raise UsageError(f"--judge-url and --retriever are for search; {cfg.domain} has no use for them")
    try:
        env = ENVS[cfg.domain](cfg.retriever, open_judge(cfg)) if cfg.domain == "search" else ENVS[cfg.domain]()
    except (ValueError, OSError) as error:
        raise UsageError(f"--retriever {cfg.retriever}: {error}") from None
    embedded = ROOT / "embedded" / cfg.domain
    splits = {split: load_split(env, given or str(embedded / f"{split}.jsonl"))
              for split, given in (("train", cfg.train), ("harness", cfg.harness_set), ("test", cfg.test))}
    check_disjoint(**splits)
    return env, splits


def open_judge(cfg: Config, cache_path: Path | None = None) -> Judge | None:
    """The judge that the flags name, with the key that only the environment holds."""
    if bool(cfg.judge_url) != bool(cfg.judge_model):
        raise UsageError("--judge-url and --judge-model go together")
    try:
        key = os.environ.get("WHALE_JUDGE_KEY") or None
        return Judge(cfg.judge_url, cfg.judge_model, key, cache_path=cache_path) if cfg.judge_url else None
    except ValueError as error:
        raise UsageError(f"--judge-url: {error}") from None


def hash_tasks(tasks: list[Task]) -> str:
    return hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()


def hash_model(model: str) -> str:
    """sha256 over a local model's files; a hub name stands for itself."""
    path = Path(model)
    files = [f for f in sorted(path.glob("*")) if f.is_file()] if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256(b"" if files else model.encode())
    for file in files:
        with open(file, "rb") as handle:
            digest.update(file.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def check_disk(cfg: Config) -> None:
    """Two checkpoints are kept while a third is written, each of fp32 weights and two AdamW moments."""
    path, out = Path(cfg.model), Path(cfg.out).absolute()
    files = list(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    needed = 3 * 6 * sum(file.stat().st_size for file in files) + (200 << 20)          # files of bf16, 2 bytes a weight
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UsageError(f"{existing} has {free >> 20:,} MiB free and this run may need {needed >> 20:,} MiB; make "
                         "room or choose another place with --out")


def code_version() -> str:
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() if git.returncode == 0 else VERSION
