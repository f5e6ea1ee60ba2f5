"""WHALE (Weight-Harness Alternating LEarning, arXiv:2609.00196): the loop of the paper.

An agent is its weights theta and its harness h. Coordinate ascent on J(theta, h) = E[R(x, tau)] (section 3):

    theta <- weight_phase(theta, h)     rft.py: online rejection-sampling fine-tuning under the current harness
    h     <- harness_phase(theta, h)    harness_search.py: a proposer rewrites the file, real rollouts score it

Differs from the paper:
- Evaluation: the test split is measured at the start and after every phase, always with the same seeds.
- The `tiny` preset is the same loop at a size that a laptop CPU runs in minutes; only the numbers in config.py differ.
- The budget is met to the rollout where it can be: the last step or iteration is cut to what is left of it.

    bash run.sh math | search | chess                        the whole loop on the embedded model
    bash run.sh math --method weight --seed 1                one phase switched off
    bash run.sh search-harness math                          one harness search, no training
    bash run.sh eval math --harness FILE --model DIR         mean@8 of one harness and one model
    bash run.sh check-harness math FILE | sandbox FILE.py | verify math --cases FILE.jsonl
"""

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import torch

import rollout
import sched
import team
from acceptance import kept_rollouts
from config import (
    ALTERNATING, N_SHOWN, PRESETS, Config, check_disk, check_schedule, code_version, describe_model, guarded_paths,
    identity_of, least_search, least_weight_step, load_splits, n_steps, n_weights_of, open_judge, pin_model, plan_disk,
    proposer_config, read_file, rollout_budget, secret_paths)
from costs import Budget, describe, plan_search
from lint import ForbiddenText, beyond_prompts, parse_harness
from candidates import Candidate, Outcome
from harness_search import Search, SearchError
from jail import LIBC
from proposers import make_proposer
from ranks import ALONE, Ranks
from report import REFRESH_S, report_mark, write_report
from rft import StepStats, read_checkpoint_record
from rollout import Trace, cost_of, derive_seed
from files import UsageError, read_text, sha256, write_atomically
from rundir import LEDGER, RunDir
from sandbox import Sandbox
from stats import bootstrap_ci
from tasks import Task
from track import open_tracker

UNBOUNDED = 1 << 62         # training rollouts
PAGE_S = 5                  # phases that end within so many seconds share a page


# ---- the loop -------------------------------------------------------------------------------------------------------


def train_whale(run: "Run") -> None:
    """The paper's algorithm: alternate the two phases until the budget is spent, evaluate after each."""
    cfg, state = run.cfg, run.state
    run.evaluate("base")                                                        # mean@8 of (theta_0, h_0)
    for phase in run.phases():                                                  # sched.py: weight, harness, weight ...
        if run.is_spent(phase) and not state.signals:                           # a phase that has begun is ended well
            if run.skip(phase):                                                 # a cap on the search ends no training
                continue
            break
        run.begin_phase(phase)
        for signal in state.signals:                                            # recorded before we were stopped
            phase.rule.record(signal)
        if phase.kind == "weight":
            while phase.rule.goes_on and not run.is_spent(phase):
                run.evaluate_within(phase)                                      # if asked for, every 0.1 epoch or so
                tasks = sample_tasks(run.train, cfg.seed, state.n_drawn, run.n_prompts(phase))     # x ~ D_weight
                traces = run.roll_out("weight", tasks, cfg.group_size, state.weight_step)      # tau ~ pi_{theta,h}
                accepted = [trace.sequences() for trace in traces if trace.accepted]           # S+
                stats = run.team.train(accepted, derive_seed(cfg.seed, "sft", state.weight_step))
                run.team.serve_weights()                                        # so the next rollouts are on-policy
                run.finish_weight_step(phase, traces, stats)
        else:
            search = run.open_search(phase)                                     # iteration 1 scores the incoming h
            while phase.rule.goes_on and not run.is_spent(phase):
                outcomes = run.iterate(phase, search)                           # propose M, gate, score on D_harness
                run.finish_iteration(phase, outcomes, search)
            run.adopt(phase, search)                                            # h <- the archive's best
        run.evaluate(f"cycle {phase.cycle}, after the {phase.kind} phase")
        run.finish_phase(phase)
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
    """The parts of a run, and what the loop asks of them, in the order in which it asks. With several ranks, only rank
    0 has one: it decides and writes, and what `self.team` does all do."""

    def __init__(self, cfg: Config, ranks: Ranks = ALONE):
        self.cfg, self.ranks = cfg, ranks
        self.env, splits = load_splits(cfg)
        self.h0 = read_file(cfg.harness or str(self.env.h0))
        if why := parse_harness(self.h0)[1]:
            raise UsageError(f"--harness {cfg.harness}: {why}")
        self.train, self.harness_tasks, self.test = splits["train"], splits["harness"], splits["test"]
        check_schedule(cfg, len(self.train), len(self.harness_tasks))
        if cfg.method == "fst" and cfg.proposer == "rules" and beyond_prompts(self.h0, read_file(str(self.env.h0))):
            raise UsageError(f"--harness {cfg.harness}: under fst, the rules proposer rewords {self.env.h0.name} only")
        self.proposer = cfg.method != "weight" and make_proposer(
            proposer_config(cfg), secret_paths(cfg), guarded_paths(cfg), cfg.waived, lambda line: self.say(line))
        check_disk(cfg, plan_disk(cfg, n_weights_of(cfg.model), *self.sizes, len(self.test)))
        self.cfg = cfg = pin_model(cfg, cfg.run_dir / "config.json")
        if not cfg.run_dir.exists():
            Sandbox(cfg.waived_layers, max_jobs=1).close()      # a missing layer is refused before there is a run
        self.version, self.shown_at, self.capped = code_version(), time.monotonic(), ""
        self.dir = RunDir(cfg.run_dir, identity_of(cfg, self.env, splits, self.h0), cfg.keep, read_checkpoint_record)
        self.state, self.say = self.dir.state, self.dir.screen.say
        self.harness = self.first_harness = Candidate("h0", "", "the starting point", (), self.h0, 0)
        if harness := self.state.harness:
            self.harness = Candidate(**{**harness, "mechanisms": tuple(harness["mechanisms"])})
        if not self.state.complete:
            self._load_parts()

    def _load_parts(self) -> None:
        cfg, state = self.cfg, self.state
        self.dir.track = open_tracker(cfg.track, self.dir.path, asdict(cfg))
        if not self.dir.resumed:
            self.say("settings: " + " ".join(f"{key}={value}" for key, value in asdict(cfg).items() if value != ""))
        for line in describe_model(cfg):
            self.say(line, style="bold" * cfg.trust_remote_code)
        tiny = PRESETS["tiny"]
        if cfg.model != tiny["model"] and (cfg.preset, cfg.max_assistant_tok) == ("tiny", tiny["max_assistant_tok"]):
            self.say(f"--max-assistant-tok {cfg.max_assistant_tok} a rollout: this, --max-len, --tool-s and "
                     "--harness-s are sized for the embedded model")
        if cfg.judge_url:
            self.env.judge = open_judge(cfg, self.dir.path / "judge.jsonl")     # a resumed run decides alike
        self.team = team.lead(cfg, self.env, self.ranks)
        self.sandbox, self.engine, self.trainer = self.team.sandbox, self.team.engine, self.team.trainer
        layers = self.layers
        self.say("sandbox layers on: " + ", ".join(layers["on"])
                 + "".join(f"; {name} off: {why}" for name, why in layers["off"].items())
                 + "".join(f"; {name} WAIVED" for name in layers["waived"]))
        n_threads = torch.get_num_threads()
        state.n_threads = state.n_threads or n_threads
        if state.n_threads != n_threads:
            self.say(f"this run began with {state.n_threads} torch threads and goes on with {n_threads}: it differs in "
                     f"the last bits, and so in what it samples; OMP_NUM_THREADS={state.n_threads} repeats it exactly")
        if self.ranks.world > 1:
            self.say(f"{self.ranks.world} ranks, {self.ranks.world // cfg.tp} engines"
                     + "; the trainer is sharded over all" * (cfg.method != "harness"))
        if self.engine.tokenizer.chat_template is None:
            self.say(f"{cfg.model} has no chat template: turns are labelled paragraphs (User: ..., Assistant: ...)")
        self.tell_notes()
        self.forbidden = ForbiddenText([*self.train, *self.harness_tasks, *self.test])
        if state.weight_step:
            self.team.load(self.dir.weights_dir(state.weight_step))             # step n + 1 starts from step n
            self.team.serve_weights()
        n_weights = sum(p.numel() for p in self.trainer.model.parameters()) if self.trainer else 0
        self.say(check_disk(cfg, plan_disk(cfg, n_weights, *self.sizes, len(self.test))))
        if cfg.method != "weight":
            self.say(describe(plan_search(cfg, *self.sizes, len(self.test)), cfg))
        if self.dir.resumed:
            self.say(f"resumed after weight step {state.weight_step}, in phase {state.phase + 1}")
        gc.collect()
        gc.freeze()                             # what was loaded stays: looking through it again takes 0.2 s each time
        self.dir.clock("setup")

    @property
    def layers(self) -> dict:
        """Of the sandbox; what was waived for the proposer beside them."""
        layers, cfg = self.sandbox.layers, self.cfg
        return layers | {"waived": [*layers["waived"], *(name for name in cfg.waived if name not in cfg.waived_layers)]}

    # -- schedule --

    def n_steps(self, flag: str, epochs: float) -> int:
        return n_steps(flag, epochs, self.cfg, len(self.train))

    def phases(self) -> Iterator[sched.Phase]:
        cfg = self.cfg
        fixed = (0 if cfg.one_search else self.n_steps("--epochs", cfg.epochs), cfg.iterations)
        window = self.n_steps("--patience-epochs", cfg.patience_epochs) if cfg.method == "adaptive" else 1
        adaptive = (window, cfg.patience_iterations, cfg.min_iterations, cfg.max_iterations)
        n_cycles = round(self.budget / rollout_budget(replace(cfg, cycles=1, rollouts=0), *self.sizes))     # of WHALE
        return sched.phases(cfg.method, fixed, adaptive, cfg.stagewise_phases or max(1, n_cycles), self.state.phase)

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.train), len(self.harness_tasks)

    @property
    def budget(self) -> int:
        return rollout_budget(self.cfg, *self.sizes)

    def left(self, phase: sched.Phase) -> int:
        """Training rollouts that a phase may still spend. An alternating method runs its cycles, search-harness its
        one search; with --rollouts, and for all other methods, the budget decides."""
        if (self.cfg.method in ALTERNATING or self.cfg.one_search) and not self.cfg.rollouts:
            return UNBOUNDED if phase.cycle <= self.cfg.cycles else 0
        if self.cfg.finish == "harness" and phase.kind == "harness" and self.untried_weights and (
                self.budget - self.state.phase_start < least_search(self.cfg, len(self.harness_tasks))):   # extra
            return UNBOUNDED
        return max(0, self.budget - self.dir.training_rollouts())

    @property
    def untried_weights(self) -> bool:
        """Whether weights were trained since the last harness phase ended."""
        return self.state.weight_step > (self.state.accepted[-1]["weight_step"] if self.state.accepted else 0)

    def is_spent(self, phase: sched.Phase) -> bool:
        """Whether what is left is not enough for half a batch or for one candidate (and its incumbent), or a search has
        nothing more to try."""
        if phase.kind == "weight":
            return self.left(phase) < least_weight_step(self.cfg)
        if self.state.idle:                             # the phase before was of the same search and spent nothing
            return True
        n = self.n_iterations(phase)
        if n and (self.archive_dir(phase) / f"iteration_{n + 1:02d}.json").exists():      # stopped after it was paid
            return False
        return self.n_candidates(phase) < 1

    def skip(self, phase: sched.Phase) -> bool:
        """Whether an alternating method goes on without this search, which a cap forbids."""
        if phase.kind == "weight" or not self.capped or self.cfg.method not in ALTERNATING or self.left(phase) <= 0:
            return False
        self.state.phase = phase.index + 1
        return True

    def archive_dir(self, phase: sched.Phase) -> Path:
        return self.dir.path / "harness" / f"cycle_{phase.archive:02d}"

    @property
    def caps(self) -> Budget:
        return Budget(self.cfg, self.state.ledger, len(self.harness_tasks), len(self.test))

    def n_prompts(self, phase: sched.Phase) -> int:
        return min(self.cfg.prompt_batch, self.left(phase) // self.cfg.group_size)

    def n_candidates(self, phase: sched.Phase) -> int:
        """How many the budget and the caps still allow, beside the incoming harness where that is not scored yet."""
        first, n_tasks = not self.n_iterations(phase), len(self.harness_tasks)
        kept = kept_rollouts(self.cfg.accept, n_tasks)
        n, cap = self.caps.n_candidates(first)
        self.capped = cap if n < 1 else self.capped
        n_in_budget = (self.left(phase) - kept) // n_tasks - first
        return min(self.cfg.candidates, n, n_in_budget)

    def begin_phase(self, phase: sched.Phase) -> None:
        of = f" of {self.budget:,}" if self.left(phase) < UNBOUNDED else ""
        if phase.kind == "harness" and (usd := self.caps.rollout_usd):
            self.say(f"a rollout has cost ${usd:.5f} so far, so scoring a harness costs about "
                     f"${usd * len(self.harness_tasks):.2f}")
        self.say(f"cycle {phase.cycle}: {phase.kind} phase from {self.harness.name} ({phase.rule.why}); "
                 f"{self.dir.training_rollouts():,}{of} training rollouts spent", style="bold")

    # -- weight phase --

    def roll_out(self, kind: str, tasks: list[Task], n: int, index: int | str) -> list[Trace]:
        """n rollouts a task of the current harness, charged to `kind`; seeds by (run, kind, index)."""
        with self.bar(f"{kind} rollouts", len(tasks) * n) as advance:
            traces = self.team.roll_out(self.harness.source, tasks, n, (self.cfg.seed, kind, index),
                                        on_finish=lambda trace: advance())
        self.dir.charge(kind, **cost_of(traces))
        self.tell_judge()
        self.tell_notes()
        return traces

    def bar(self, title: str, n_rollouts: int) -> AbstractContextManager[Callable[[], None]]:
        """A progress bar: what this rank has done of its share stands for all."""
        return self.dir.screen.bar(title, len(self.team.share(range(n_rollouts))))

    def tell_judge(self) -> None:
        """Says what the judge did since the last time: an unanswered question was decided by exact match."""
        judge = self.env.judge
        if judge and (judge.n_asked or judge.n_cached):
            failure = f"; last failure: {judge.last_error}" if judge.n_failed else ""
            self.dir.log("judge", f"judge: asked {judge.n_asked}, of which without a verdict {judge.n_failed}; "
                         f"remembered {judge.n_cached}{failure}",
                         asked=judge.n_asked, failed=judge.n_failed, cached=judge.n_cached)
            judge.n_asked = judge.n_failed = judge.n_cached = 0

    def tell_notes(self) -> None:
        """Says what the engine has found out about its servers."""
        while self.engine.notes:
            self.say(self.engine.notes.pop(0))

    def finish_weight_step(self, phase: sched.Phase, traces: list[Trace], stats: StepStats) -> None:
        """Records the signal (mean reward), logs, saves. Stops a run that has nothing to learn from."""
        state, cfg = self.state, self.cfg
        reward = sum(trace.reward for trace in traces) / len(traces)
        accepted = [trace for trace in traces if trace.accepted]
        phase.rule.record(reward)
        state.signals.append(reward)
        state.weight_step += 1
        state.n_drawn += len(traces) // cfg.group_size
        state.empty_steps = 0 if accepted else state.empty_steps + 1
        started = self.dir.spent("weight", "seconds")
        self.dir.clock("weight")
        per_s = len(traces) / (self.dir.spent("weight", "seconds") - started)
        loss = "no update" if stats.loss is None else f"loss {stats.loss:.3f}"
        self.dir.log(
            "weight_step", f"step {state.weight_step}: reward {reward:.3f}, accepted {len(accepted)} of {len(traces)}, "
            f"{loss} on {stats.n_supervised_tok:,} tokens, {per_s:.0f} rollouts/s with training",
            cycle=phase.cycle, step=state.weight_step, harness=self.harness.name, version=self.team.version,
            reward=reward, accepted_frac=len(accepted) / len(traces), rollouts_per_s=per_s, rule=phase.rule.why,
            n_unique_accepted=len({trace.task_id for trace in accepted}), **asdict(stats), **rollout.summarise(traces))
        self.dir.write_traces("rollouts", f"step_{state.weight_step:06d}",
                              [trace.to_json(self.engine.tokenizer) for trace in pick_shown(traces)])
        self.team.save(self.dir.weights_dir(state.weight_step))
        self.dir.clock("weight")
        self.dir.save()
        self._show(least_s=REFRESH_S)
        failed = [trace for trace in traces if trace.status != "ok"]
        if len(failed) > cfg.max_failed_frac * len(traces):
            raise UsageError(f"{len(failed)} of {len(traces)} programs of {self.harness.name} failed "
                             f"(--max-failed-frac {cfg.max_failed_frac}), for example: {failed[0].end}")
        if state.empty_steps >= cfg.max_empty_steps:
            raise UsageError(f"no rollout was accepted in {state.empty_steps} weight steps in a row "
                             f"(--max-empty-steps): the model solves nothing under {self.harness.name}, so there is "
                             "nothing to train on")

    # -- harness phase --

    def n_iterations(self, phase: sched.Phase) -> int:
        """Of the phase's archive, in this phase and in earlier ones."""
        return self.state.archive_iterations.get(str(phase.archive), 0)

    def open_search(self, phase: sched.Phase) -> Search:
        goes_on = self.n_iterations(phase) > len(self.state.signals)        # the archive of the harness phase before
        return Search(
            folder=self.archive_dir(phase), engine=self.engine, env=self.env,
            sandbox=self.sandbox, incumbent=self.first_harness if goes_on else self.harness, tasks=self.harness_tasks,
            forbidden=self.forbidden, seed=(self.cfg.seed, "harness", phase.archive),
            rollout_cfg=self.team.rollout_cfg, roll_out=self.team.roll_out,
            n_candidates=self.cfg.candidates, proposer=self.proposer, on_candidate=self.bar,
            n_done=self.n_iterations(phase), rule=self.cfg.accept, fst_h0=self.h0 if self.cfg.method == "fst" else "")

    def iterate(self, phase: sched.Phase, search: Search) -> list[Outcome]:
        """One iteration. What a proposer took that failed is charged too."""
        n = max(1, self.n_candidates(phase))
        try:
            return search.iterate(n, self.caps.usd_left(n), self.caps.proposals_left)
        except SearchError:
            self.charge_bill(search)
            self.dir.save()
            raise

    def charge_bill(self, search: Search) -> None:
        """What the proposer took in the running iteration, less what was charged before: it may have failed, and the
        same command has gone on."""
        bill = asdict(search.bill)
        self.dir.charge("harness", **{what: n - self.state.billed.get(what, 0) for what, n in bill.items()})
        self.state.billed = bill

    def finish_iteration(self, phase: sched.Phase, outcomes: list[Outcome], search: Search) -> None:
        """Logs the candidates, charges their rollouts, records the signal (the archive's best score), saves."""
        best, best_score = search.best()
        measured_s = 0.0
        self.tell_notes()
        self.charge_bill(search)
        self.state.billed = {}
        for outcome in outcomes:
            candidate, score = outcome.candidate, outcome.score
            self.dir.charge("gates", **outcome.gate_cost, seconds=outcome.gate_seconds)
            measured_s += outcome.gate_seconds
            if score is not None:
                self.dir.charge("harness", **score.cost, seconds=score.seconds)
                measured_s += score.seconds
            said = f"refused: {outcome.refused}" if not score else (
                f"{score.mean:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}]"
                + f" ({score.stopped})" * bool(score.stopped)
                + f", {score.n_error} failed, {score.n_killed} killed" * bool(score.n_error + score.n_killed))
            numbers = asdict(score) if score else {}
            numbers = {key: value for key, value in numbers.items() if key not in ("seconds", "key", "rewards")}
            self.dir.log("candidate", f"{candidate.name} {said}  {candidate.hypothesis}", cycle=phase.cycle,
                         candidate=candidate.name, parent=candidate.parent, hypothesis=candidate.hypothesis,
                         mechanisms=list(candidate.mechanisms), refused=outcome.refused, **numbers)
        self.dir.clock("harness", already_s=measured_s)
        phase.rule.record(best_score.mean)
        self.state.signals.append(best_score.mean)
        self.state.harness_iterations += 1
        self.state.archive_iterations[str(phase.archive)] = self.n_iterations(phase) + 1
        self.dir.log("iteration", f"best of cycle {phase.cycle} so far: {best.name} with {best_score.mean:.3f}",
                     cycle=phase.cycle, iteration=self.n_iterations(phase), best=best.name, best_score=best_score.mean,
                     rule=phase.rule.why)
        self.dir.save()
        self._show(least_s=REFRESH_S)

    def adopt(self, phase: sched.Phase, search: Search) -> None:
        """What the archive accepts is the harness from here on."""
        accepted = search.accept(phase.index)
        self.dir.charge("harness", **accepted.cost, seconds=accepted.seconds)
        self.dir.clock("harness", already_s=accepted.seconds)
        self.harness, state = accepted.candidate, self.state
        state.harness = asdict(self.harness)
        state.accepted.append({"cycle": phase.cycle, "name": self.harness.name, "parent": self.harness.parent,
                               "hypothesis": self.harness.hypothesis, "score": accepted.mean,
                               "archive": phase.archive, "weight_step": state.weight_step, "why": accepted.why})
        self.say(f"accepted {self.harness.name} of cycle {phase.cycle}: {accepted.why}", style="bold")

    # -- evaluation and end --

    def evaluate_within(self, phase: sched.Phase) -> None:
        """Inside a weight phase, every --eval-epochs."""
        step = self.state.weight_step
        if self.cfg.eval_epochs and self.state.signals and \
                step % self.n_steps("--eval-epochs", self.cfg.eval_epochs) == 0:
            self.evaluate(f"cycle {phase.cycle}, weight step {step}")

    def evaluate(self, label: str) -> None:
        """mean@n on D_test with a 95 % interval over tasks, on the same seeds each time; no training rollouts."""
        state, n = self.state, self.cfg.n_eval
        if label in {row["label"] for row in state.evals}:
            return
        what = {"harness_sha": sha256(self.harness.source), "version": self.team.version}
        if state.evals and {key: state.evals[-1][key] for key in what} == what:     # the same rollouts once more
            state.evals.append({**state.evals[-1], "label": label, "training_rollouts": self.dir.training_rollouts()})
            mean = state.evals[-1]["mean"]
            return self.dir.log("eval", f"test mean@{n} {mean:.3f} {label}: same weights and harness as before", **what,
                                label=label, mean=mean, repeated=True)
        traces = self.roll_out("eval", self.test, n, 0)
        means = task_means(traces, n)
        mean, ci95 = sum(means) / len(means), bootstrap_ci(means, derive_seed(self.cfg.seed, "bootstrap"))
        failures, chosen = Counter(trace.failure for trace in traces), {}
        if self.cfg.select == "harness-set":                    # one rollout a task, as the harness phase scores
            chosen["select_mean"] = sum(task_means(self.roll_out("eval", self.harness_tasks, 1, "select"), 1)) / len(
                self.harness_tasks)
        name = f"{len(state.evals):02d}_step_{state.weight_step:06d}"
        self.dir.write_traces("eval", name, [
            trace.brief() if trace.sample else trace.to_json(self.engine.tokenizer) for trace in traces])
        self.dir.clock("eval")
        state.evals.append({"label": label, "mean": mean, "ci95": list(ci95), "weight_step": state.weight_step, **what,
                            **chosen, "traces": f"eval/{name}.jsonl", "task_means": means,
                            "training_rollouts": self.dir.training_rollouts()})
        self.dir.log("eval", f"test mean@{n} {mean:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}] {label}; "
                     + ", ".join(f"{word} {count}" for word, count in failures.most_common(5)),
                     label=label, mean=mean, ci95=list(ci95), step=state.weight_step, harness=self.harness.name,
                     **chosen, **rollout.summarise(traces),
                     **{f"failure_{word}": count for word, count in sorted(failures.items())})
        if label == "base":
            self._save_all()
            self.say(f"to watch: {self.dir.path / 'report.html'}")

    def finish_phase(self, phase: sched.Phase) -> None:
        """Notes the ledger, all of it from the run's start, and writes summary and report."""
        spent = {kind: self.dir.spent(kind) for kind in LEDGER[1:]}
        self.dir.log("ledger", "rollouts so far: " + ", ".join(f"{kind} {n:,}" for kind, n in spent.items()),
                     phase=phase.index + 1,
                     **{f"{kind}_{what}": n for kind in LEDGER for what, n in self.state.ledger[kind].items()})
        state, n_training = self.state, self.dir.training_rollouts()
        state.idle = n_training == state.phase_start and phase.kind == "harness"
        state.phase, state.phase_start, state.signals = phase.index + 1, n_training, []
        self._save_all()
        gc.collect()
        LIBC.malloc_trim(0)                             # it would keep what the longest batch so far has taken

    def finish(self) -> None:
        if self.capped:
            self.say(f"the harness search ended at {self.capped}")
        if self.state.idle:
            self.say("the proposer has nothing more to try, so the search ends before the budget does")
        if self.cfg.method != "weight" and self.untried_weights and not self.capped:
            self.say("the budget ended after a weight phase, so no harness was sought for the last weights"
                     + "; --finish harness adds that phase" * (self.cfg.method in ALTERNATING
                                                               and self.cfg.finish != "harness"))
        unspent = self.budget - self.dir.training_rollouts() if self.cfg.rollouts else 0
        if unspent > 0:
            self.say(f"{unspent:,} of {self.budget:,} training rollouts are left: too few for what came next")
        self.state.complete = True
        self._save_all()

    def close(self) -> None:
        """Ends engine and sandbox with their processes, and gives the run directory free."""
        gc.unfreeze()
        self.team.close()
        self.dir.close()
        if self.state.evals and not self.state.complete:                        # stopped: the page says so
            self._show(least_s=0)

    def show_again(self) -> None:
        """Of a complete run: writes again what it was killed before, or what is damaged."""
        page, harness = self.dir.path / "report.html", self.dir.path / "final_harness.py"
        if not harness.exists() or read_text(harness) != self.harness.source:
            write_atomically(harness, self.harness.source)
        if not page.exists() or report_mark(self.dir.path) not in read_text(page):
            write_report(self.dir.path)

    def _save_all(self) -> None:
        write_atomically(self.dir.path / "final_harness.py", self.harness.source)
        cfg, caps = self.cfg, self.caps
        self.dir.write_summary(domain=cfg.domain, method=cfg.method, preset=cfg.preset, seed=cfg.seed,
                               model=cfg.model, n_eval=cfg.n_eval,
                               verifier=f"judge {cfg.judge_model}" if cfg.judge_url else "exact match",
                               select=cfg.select, cycles=len(self.state.accepted),
                               sandbox=self.layers,
                               version=self.version, accept=cfg.accept, proposer=cfg.proposer, stopped_by=self.capped,
                               usd=caps.money())
        self.dir.save()
        self._show(least_s=0 if self.state.complete or len(self.state.evals) == 1 else PAGE_S)

    def _show(self, least_s: float) -> None:
        """Writes report.html, if the last time is so long ago."""
        if time.monotonic() - self.shown_at < least_s:
            return
        try:
            write_report(self.dir.path)
        except (UsageError, OSError) as error:                  # no reason to stop the run
            self.say(f"no report.html: {error}")
        self.shown_at = time.monotonic()
        self.dir.clock("eval")


def pick_shown(traces: list[Trace]) -> list[Trace]:
    """A few accepted rollouts and a few others, each of another task, to look at."""
    first: dict[tuple[bool, str], Trace] = {}
    for trace in traces:
        first.setdefault((trace.accepted, trace.task_id), trace)
    return [trace for verdict in (True, False)
            for trace in [trace for (accepted, _), trace in first.items() if accepted == verdict][:N_SHOWN]]


def task_means(traces: list[Trace], n: int) -> list[float]:
    """Traces in the order of (task, sample), n samples a task -> the mean reward of each task."""
    return [sum(trace.reward for trace in traces[i:i + n]) / n for i in range(0, len(traces), n)]
