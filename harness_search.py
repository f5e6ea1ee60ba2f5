"""The harness phase: Meta-Harness (paper, section 3), a search over whole harness files by real rollouts.

An iteration asks a proposer for M candidates; each passes the gates or is refused, then gets one rollout on every
D_harness task, on seeds that all share. The best score is accepted; ties go to fewer model calls, then to the earlier.
The incoming harness is scored first, as iteration 1. The archive on disk is all that a proposer needs:

    h0/ h1/ ...         harness.py, proposal.json, traces.jsonl; then score.json or refused.json, which ends a candidate
    iteration_02.json   what was proposed, so that nothing is proposed twice
    history.jsonl       one row a candidate;  task.md: what a proposer is told;  accepted.txt: written last of all

Under the rule of FST (Fast-Slow Training, a baseline of the paper) a candidate may differ from the run's h0 in its two
prompts only; any other is refused.

The denominator is fixed before the run: `error` and `killed` count as 0, `infra` is run again. The gates stop mistakes
and plain cheating; what a harness cannot do at all is the business of the sandbox, which is the wall.

Differs from the paper:
- Who proposes is a function from `ProposalRequest` to candidates (proposers.py); the embedded one is no coding agent.
- The paper names no gates (gates.py). Ours take two rollouts a candidate, counted apart from the training rollouts.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import harness_api
import rollout
from tasks import Task
from gates import check_harness
from lint import MAX_SOURCE_BYTES, ForbiddenText, beyond_prompts, program_of
from rollout import RolloutConfig, cost_of, derive_seed
from rundir import sha256, write_atomically
from sandbox import Sandbox
from stats import bootstrap_ci


class SearchError(RuntimeError):
    """The search cannot go on; nothing is recorded as done that was not."""


@dataclass(frozen=True)
class Candidate:
    name: str                           # "h0" is the incoming harness; names are an archive's own
    parent: str                         # the candidate that it was made from; "" for the incoming harness
    hypothesis: str                     # one falsifiable line
    mechanisms: tuple[str, ...]         # by name, where the proposer knows them
    source: str
    iteration: int


@dataclass(frozen=True)
class Score:
    mean: float
    ci95: tuple[float, float]           # bootstrap over tasks
    n: int
    n_ok: int
    n_error: int
    n_killed: int
    calls_a_rollout: float
    tok_a_rollout: float
    failures: dict[str, int]            # Trace.failure -> rollouts
    cost: dict[str, int]                # what scoring took, in the words of the ledger
    seconds: float
    harness_sha: str
    version: int                        # of the weights
    key: str                            # all that the score depends on; it is used again only where this is equal


@dataclass(frozen=True)
class Outcome:
    candidate: Candidate
    score: Score | None
    refused: str = ""                   # why a gate refused it
    gate_cost: dict[str, int] = field(default_factory=dict)     # of the model; a scripted model costs no sampling
    gate_seconds: float = 0.0


@dataclass
class Bill:
    """What one request to a proposer cost; a proposer that pays adds to it."""
    proposer_calls: int = 1
    proposer_usd: float = 0.0


@dataclass(frozen=True)
class ProposalRequest:
    folder: Path                        # the archive
    history: tuple[Outcome, ...]        # of this archive, oldest first
    n_candidates: int                   # M
    seed: tuple[int | str, ...]
    domain: str
    prompts_only: bool = False          # the rule of FST: a candidate changes SYSTEM_PROMPT and USER_PROMPT alone
    bill: Bill = field(default_factory=Bill)


def select_best(outcomes: list[Outcome]) -> Outcome:
    """Highest mean; ties to fewer model calls, then to the earlier one."""
    return min((o for o in outcomes if o.score), key=lambda o: (-o.score.mean, o.score.calls_a_rollout))


# ---- the search -----------------------------------------------------------------------------------------------------


class Search:
    """One archive on disk, of a harness phase or of several in a row. What is complete there is taken from there, so a
    resumed search repeats nothing.

    proposer: request -> 1 to M candidates, whose names and iterations are set here; what it raises is not caught.
    roll_out(source, tasks, n, seed, on_finish=f): traces in the order of (task, sample), as rollout.run makes them.
    on_candidate(title, n_rollouts): a context manager that yields a function to call after each rollout.
    n_done: iterations whose outcomes the caller has already; `iterate` goes on after them.
    fst_h0: the file that candidates may differ from in their prompts only; "": they may differ in anything.
    """

    def __init__(self, folder: Path, engine, env, sandbox: Sandbox, incumbent: Candidate, tasks: list[Task],
                 forbidden: ForbiddenText, seed: tuple[int | str, ...], rollout_cfg: RolloutConfig, n_candidates: int,
                 proposer: Callable[[ProposalRequest], list[Candidate]], roll_out: Callable[..., list[rollout.Trace]],
                 on_candidate: Callable | None = None, n_done: int = 0, fst_h0: str = ""):
        self.folder, self.engine, self.env, self.sandbox = Path(folder), engine, env, sandbox
        self.tasks, self.forbidden, self.seed, self.cfg = tasks, forbidden, seed, rollout_cfg
        self.n_candidates, self.proposer, self.roll_out, self.fst_h0 = n_candidates, proposer, roll_out, fst_h0
        self.bill = Bill(0)                                     # of the last iteration
        self.on_candidate = on_candidate or (lambda title, n_rollouts: nullcontext(lambda: None))
        self.incumbent = replace(incumbent, name="h0", parent="", iteration=1)
        self.version = engine.version                           # a phase scores one version of the weights
        self.outcomes: list[Outcome] = []
        self.n_iterations = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "task.md", task_text(env, tasks, rollout_cfg, n_candidates, bool(fst_h0)))
        for _ in range(n_done):
            self.iterate(replay=True)

    def iterate(self, at_most: int | None = None, replay: bool = False) -> list[Outcome]:
        """One iteration: the first scores the incumbent, later ones propose M candidates, or at most so many, gate and
        score them. `replay`: all of it was done and paid for, so it must be there; else SearchError."""
        if self.engine.version != self.version:
            raise SearchError(f"the engine serves weights {self.engine.version}, this phase began on {self.version}")
        number = self.n_iterations + 1
        if replay and number > 1 and not self._marker(number).exists():
            raise SearchError(f"{self._marker(number)} is gone: what was proposed is not known. Give another --name")
        candidates = self._propose(number, min(self.n_candidates, at_most or self.n_candidates)) if number > 1 else \
            self._write([self.incumbent])
        outcomes = []
        for candidate in candidates:
            outcome = self._load(candidate)
            if replay and not outcome:
                raise SearchError(f"{self.folder / candidate.name}: the score of this finished candidate is gone or of "
                                  "other settings. Give another --name")
            outcomes.append(outcome or self._finish(candidate, self.outcomes + outcomes))
            rows = [history_row(outcome) for outcome in self.outcomes + outcomes]
            write_atomically(self.folder / "history.jsonl", "".join(rows))
        self.outcomes, self.n_iterations = self.outcomes + outcomes, number
        return outcomes

    def best(self) -> tuple[Candidate, Score]:
        outcome = select_best(self.outcomes)
        return outcome.candidate, outcome.score

    def accept(self) -> Candidate:
        """Ends a phase: h <- the archive's best. The marker is the last file that a phase writes."""
        candidate, _ = self.best()
        write_atomically(self.folder / "accepted.txt", candidate.name + "\n")
        return candidate

    def _propose(self, number: int, n_candidates: int) -> list[Candidate]:
        """The candidates of an iteration: those on disk, else the proposer's."""
        marker = self._marker(number)
        if marker.exists():
            record = json.loads(marker.read_text())
            self.bill = Bill(**record["bill"])
            return [self._read(name, sha) for name, sha in record["candidates"].items()]
        before = self._fingerprint()
        request = ProposalRequest(self.folder, tuple(self.outcomes), n_candidates, (*self.seed, "propose", number),
                                  self.env.name, bool(self.fst_h0))
        proposed = self.proposer(request)
        after = self._fingerprint()
        changed = [str(path) for path in sorted(before | after) if before.get(path) != after.get(path)]
        if changed:
            raise SearchError(f"the proposer changed {', '.join(changed)}: archive and scorer are not its to write")
        if len(proposed) > n_candidates:
            raise SearchError(f"the proposer returned {len(proposed)} candidates, not at most {n_candidates}")
        if not proposed and number == 2:                            # later on it may have tried all that it knows
            raise SearchError("the proposer returned no candidate")
        candidates = self._write([
            replace(candidate, name=f"h{len(self.outcomes) + i}", iteration=number,
                    hypothesis=" ".join(candidate.hypothesis.split()),
                    source=candidate.source.encode("utf-8", "replace").decode())        # a lone surrogate is no source
            for i, candidate in enumerate(proposed)])
        self.bill = request.bill
        write_atomically(marker, json.dumps({"candidates": {c.name: sha256(c.source) for c in candidates},
                                             "bill": asdict(self.bill)}) + "\n")
        return candidates

    def _marker(self, number: int) -> Path:
        return self.folder / f"iteration_{number:02d}.json"

    def _fingerprint(self) -> dict[Path, str]:
        """What a proposer must leave alone: our own code and the archive so far."""
        paths = [*Path(__file__).parent.glob("*.py"), *self.folder.rglob("*.*")]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}

    def _write(self, candidates: list[Candidate]) -> list[Candidate]:
        for candidate in candidates:
            folder, proposal = self.folder / candidate.name, asdict(candidate)
            folder.mkdir(exist_ok=True)
            write_atomically(folder / "harness.py", proposal.pop("source"))
            write_atomically(folder / "proposal.json", json.dumps(proposal, indent=1) + "\n")
        return candidates

    def _read(self, name: str, sha: str) -> Candidate:
        source = (self.folder / name / "harness.py").read_bytes().decode("utf-8", "replace")
        if sha256(source) != sha:
            raise SearchError(f"{self.folder / name / 'harness.py'} was changed after it was proposed")
        proposal = json.loads((self.folder / name / "proposal.json").read_text(encoding="utf-8"))
        return Candidate(**proposal | {"mechanisms": tuple(proposal["mechanisms"]), "source": source})

    def _finish(self, candidate: Candidate, earlier: list[Outcome]) -> Outcome:
        """Gates and scores a candidate, and writes what came of it with the marker last."""
        started, folder = time.monotonic(), self.folder / candidate.name
        refused, cost = ("", {}) if candidate.name == "h0" else self._gate(candidate, earlier)
        gates = {"gate_cost": cost, "gate_seconds": time.monotonic() - started}
        if refused:
            record = {"refused": refused, "key": self.score_key(candidate), **gates}
            write_atomically(folder / "refused.json", json.dumps(record, indent=1) + "\n")
            return Outcome(candidate, None, refused, **gates)
        with self.on_candidate(f"scoring {candidate.name}", len(self.tasks)) as advance:
            started = time.monotonic()
            traces = self.roll_out(candidate.source, self.tasks, 1, (*self.seed, "score"),
                                   on_finish=lambda trace: advance())
        score = self._score(candidate, traces, time.monotonic() - started)
        write_atomically(folder / "traces.jsonl", "".join(json.dumps(trace.to_json()) + "\n" for trace in traces))
        write_atomically(folder / "score.json", json.dumps(asdict(score) | gates, indent=1) + "\n")
        return Outcome(candidate, score, **gates)

    def _gate(self, candidate: Candidate, earlier: list[Outcome]) -> tuple[str, dict[str, int]]:
        """-> why it is refused, "" if it is not; and what rollouts of the model it took to tell."""
        if not any(o.score and o.candidate.name == candidate.parent for o in earlier):
            return f"its parent {candidate.parent!r} is no scored candidate of this archive", {}
        for outcome in earlier:
            if program_of(outcome.candidate.source) == program_of(candidate.source):
                return f"it is the same program as {outcome.candidate.name}", {}
        if self.fst_h0 and (why := beyond_prompts(candidate.source, self.fst_h0)):
            return f"prompts only (FST): {why}", {}
        probes = check_harness(candidate.source, self.env, self.engine, self.sandbox, self.tasks, self.forbidden,
                               self.cfg, (*self.seed, "gate"))
        cost = Counter()
        for probe in probes:
            cost.update(probe.cost)
        return "; ".join(f"{p.name}: {p.why}" for p in probes if not p.passed), dict(cost)

    def _score(self, candidate: Candidate, traces: list[rollout.Trace], seconds: float) -> Score:
        n, rewards = len(self.tasks), [trace.reward for trace in traces]
        statuses = Counter(trace.status for trace in traces)
        cost = cost_of(traces)
        failures = Counter(trace.failure for trace in traces if trace.failure != "solved")
        return Score(
            mean=sum(rewards) / n, ci95=bootstrap_ci(rewards, derive_seed(*self.seed, "bootstrap")), n=n,
            n_ok=statuses["ok"], n_error=statuses["error"], n_killed=statuses["killed"],
            calls_a_rollout=cost["model_calls"] / n, tok_a_rollout=cost["completion_tok"] / n,
            failures=dict(sorted(failures.items())), cost=cost, seconds=seconds, harness_sha=sha256(candidate.source),
            version=self.version, key=self.score_key(candidate))

    def score_key(self, candidate: Candidate) -> str:
        settings = {key: value for key, value in asdict(self.cfg).items() if key != "n_workers"}    # changes no result
        tasks = [[task.id, task.fields, task.answer] for task in self.tasks]
        return sha256(json.dumps([candidate.source, self.version, self.env.name, tasks, self.seed, settings]))

    def _load(self, candidate: Candidate) -> Outcome | None:
        """A finished candidate's outcome, if it was made from this source under these settings."""
        for path in (self.folder / candidate.name / "score.json", self.folder / candidate.name / "refused.json"):
            record = json.loads(path.read_text()) if path.exists() else {}
            if record.get("key") == self.score_key(candidate):
                gates = {key: record.pop(key) for key in ("gate_cost", "gate_seconds")}
                if "refused" in record:
                    return Outcome(candidate, None, record["refused"], **gates)
                return Outcome(candidate, Score(**record | {"ci95": tuple(record["ci95"])}), **gates)
        return None


def history_row(outcome: Outcome) -> str:
    """A candidate's row of history.jsonl. No seconds, so that a resumed search writes the same rows."""
    row = asdict(outcome.candidate) | (asdict(outcome.score) if outcome.score else {}) | {"refused": outcome.refused}
    return json.dumps({key: value for key, value in row.items() if key not in ("source", "seconds", "key")}) + "\n"


def task_text(env, tasks: list[Task], cfg: RolloutConfig, n_candidates: int, prompts_only: bool = False) -> str:
    rule = ("\nThis search is restricted: a candidate may differ from h0 in the text of SYSTEM_PROMPT and USER_PROMPT "
            "only,\neach one plain string. Any other difference is refused.\n" if prompts_only else "")
    return f"""# Your task: better harnesses for `{env.name}`

A harness is the program around a fixed model. Write {n_candidates} new ones: complete Python files, each with the name
of its parent and a hypothesis, one line that counted failures could prove wrong. Each is scored by one rollout on each
of {len(tasks)} tasks. The best mean reward is kept, ties go to fewer model calls.

Read `history.jsonl` (one row a candidate) and, of each candidate, `harness.py`, `score.json` or `refused.json` (why a
gate refused it), and `traces.jsonl`: a row a rollout, with every request and result, the verdict and one word for the
kind of failure. Write to none of these files, nor to the program that runs you.

What is graded: {env.__doc__}
Budgets, which no harness can raise: {cfg.max_calls} model calls and {cfg.max_assistant_tok} sampled tokens a rollout,
{cfg.harness_limits.seconds:g} s between two requests, {MAX_SOURCE_BYTES:,} bytes of source.

Refused before scoring: files that hold questions, answers or names of data sets, that branch on a question's text or
solve the task themselves, that score with a model that knows nothing, that fail on the first tasks, and any program
that was tried before.
{rule}
The contract:

{harness_api.__doc__}"""
