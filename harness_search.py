"""The harness phase: Meta-Harness (paper, section 3), a search over whole harness files by real rollouts.

An iteration asks a proposer for M candidates; each passes the gates or is refused, then gets one rollout on every
D_harness task, on seeds that all share. Which one is accepted is said in acceptance.py; the paper's rule is the best
score, ties go to fewer model calls, then to the earlier. The incoming harness is scored first, as iteration 1. The
archive on disk is all that a proposer needs:

    h0/ h1/ ...         harness.py, proposal.json, traces.jsonl; then score.json or refused.json, which ends a candidate
    history.jsonl       one row a candidate;  archive.md: the same as a table;  task.md: what a proposer is told
    iteration_02.json   what was proposed, so that nothing is proposed twice;  sessions/: the proposer's own notes
    acceptance.json     why which one was accepted;  accepted.txt: its name, written last of all

Under the rule of FST (Fast-Slow Training, a baseline of the paper) a candidate may differ from the run's h0 in its two
prompts only; any other is refused.

The denominator is fixed before the run: `error` and `killed` count as 0, `infra` is run again. The gates stop mistakes
and plain cheating; what a harness cannot do at all is the business of the sandbox, which is the wall.

Differs from the paper:
- Who proposes is a function from `ProposalRequest` to candidates (proposers.py); the embedded one is no coding agent.
- The paper names no gates (gates.py). Ours take a few rollouts a candidate, counted apart from the training rollouts.
- A search may also race its candidates or confirm the best (acceptance.py).
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rollout
from acceptance import FINALISTS, Confirmed, confirm, cuts_of, mean_of, pareto_front, still_racing
from tasks import Task
from gates import Probe, check_harness, check_traces
from lint import ForbiddenText, beyond_prompts, program_of
from rollout import RolloutConfig, cost_of, derive_seed
from rundir import fingerprint, scorer_paths, sha256, write_atomically
from sandbox import Sandbox
from stats import bootstrap_ci
from task_text import Finding, task_text


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
    note: str = ""                      # what is unusual about how it came here


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
    rewards: dict[str, float]           # by task id
    stopped: str = ""                   # why a race ended before all tasks were played; then it is no complete score


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
    proposals: int = 0                  # candidates
    proposer_calls: int = 1
    proposer_tok: int = 0
    proposer_usd: float = 0.0
    proposer_unpriced: int = 0          # calls whose cost is not known, which is not 0


@dataclass(frozen=True)
class ProposalRequest:
    folder: Path                        # the archive
    history: tuple[Outcome, ...]        # of this archive, oldest first
    slots: tuple[str, ...]              # the names of the M candidates
    seed: tuple[int | str, ...]
    domain: str
    notes: Path                         # a folder in the archive that is the proposer's own
    prompts_only: bool = False          # the rule of FST: a candidate changes SYSTEM_PROMPT and USER_PROMPT alone
    usd_left: float | None = None       # what --max-cost leaves; None: no limit
    bill: Bill = field(default_factory=Bill)

    @property
    def n_candidates(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Accepted:
    candidate: Candidate
    score: Score
    why: str
    confirmed: tuple[Confirmed, ...] = ()
    cost: dict[str, int] = field(default_factory=dict)          # of confirming
    seconds: float = 0.0


def rank(outcomes: list[Outcome]) -> list[Outcome]:
    """Those with a complete score, highest mean first; ties to fewer model calls, then to the earlier one."""
    return sorted((o for o in outcomes if o.score and not o.score.stopped),
                  key=lambda o: (-o.score.mean, o.score.calls_a_rollout))


def select_best(outcomes: list[Outcome]) -> Outcome:
    return rank(outcomes)[0]


@dataclass
class Tally:
    """What the rollouts of a candidate came to so far."""
    rewards: dict[str, float] = field(default_factory=dict)     # by task id
    statuses: Counter = field(default_factory=Counter)
    failures: Counter = field(default_factory=Counter)
    cost: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, traces: list[rollout.Trace], seconds: float) -> None:
        self.rewards |= {trace.task_id: trace.reward for trace in traces}
        self.statuses.update(trace.status for trace in traces)
        self.failures.update(trace.failure for trace in traces if trace.failure != "solved")
        self.cost.update(cost_of(traces))
        self.seconds += seconds


# ---- the search -----------------------------------------------------------------------------------------------------


class Search:
    """One archive on disk, of a harness phase or of several in a row. What is complete there is taken from there, so a
    resumed search repeats nothing.

    proposer: request -> 1 to M candidates, whose names and iterations are set here; what it raises is not caught.
    roll_out(source, tasks, n, seed, on_finish=f): traces in the order of (task, sample), as rollout.run makes them.
    on_candidate(title, n_rollouts): a context manager that yields a function to call after each rollout.
    n_done: iterations whose outcomes the caller has already; `iterate` goes on after them.
    rule: how the accepted one is chosen (acceptance.ACCEPT).
    fst_h0: the file that candidates may differ from in their prompts only; "": they may differ in anything.
    """

    def __init__(self, folder: Path, engine, env, sandbox: Sandbox, incumbent: Candidate, tasks: list[Task],
                 forbidden: ForbiddenText, seed: tuple[int | str, ...], rollout_cfg: RolloutConfig, n_candidates: int,
                 proposer: Callable[[ProposalRequest], list[Candidate]], roll_out: Callable[..., list[rollout.Trace]],
                 on_candidate: Callable | None = None, n_done: int = 0, rule: str = "best", fst_h0: str = ""):
        self.folder, self.engine, self.env, self.sandbox = Path(folder), engine, env, sandbox
        self.tasks, self.forbidden, self.seed, self.cfg = tasks, forbidden, seed, rollout_cfg
        self.n_candidates, self.proposer, self.roll_out, self.fst_h0 = n_candidates, proposer, roll_out, fst_h0
        self.rule = rule
        self.bill = Bill(0, 0)                                     # of the last iteration
        self.on_candidate = on_candidate or (lambda title, n_rollouts: nullcontext(lambda: None))
        self.incumbent = replace(incumbent, name="h0", parent="", iteration=1)
        self.version = engine.version                           # a phase scores one version of the weights
        self.outcomes: list[Outcome] = []
        self.n_iterations = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "task.md").exists():
            self._write_task(())
        for _ in range(n_done):
            self.iterate(replay=True)

    def iterate(self, at_most: int | None = None, replay: bool = False, usd_left: float | None = None) -> list[Outcome]:
        """One iteration: the first scores the incumbent, later ones propose M candidates, or at most so many, gate and
        score them. `replay`: all of it was done and paid for, so it must be there; else SearchError. `usd_left`: what
        the proposer may cost; None: no limit."""
        if self.engine.version != self.version:
            raise SearchError(f"the engine serves weights {self.engine.version}, this phase began on {self.version}")
        number = self.n_iterations + 1
        if replay and number > 1 and not self._marker(number).exists():
            raise SearchError(f"{self._marker(number)} is gone: what was proposed is not known. Give another --name")
        n_candidates = min(self.n_candidates, at_most or self.n_candidates)
        candidates = self._propose(number, n_candidates, usd_left) if number > 1 else self._write([self.incumbent])
        outcomes: list[Outcome] = []
        for group in [candidates] if self.rule == "race" else [[candidate] for candidate in candidates]:
            found = {candidate.name: self._load(candidate) for candidate in group}
            if replay and not all(found.values()):
                gone = next(name for name, outcome in found.items() if not outcome)
                raise SearchError(f"{self.folder / gone}: the score of this finished candidate is gone or of other "
                                  "settings. Give another --name")
            found |= self._finish([c for c in group if not found[c.name]], candidates)
            outcomes += [found[candidate.name] for candidate in group]
            self._write_history(self.outcomes + outcomes)
        self.outcomes, self.n_iterations = self.outcomes + outcomes, number
        return outcomes

    def best(self) -> tuple[Candidate, Score]:
        outcome = select_best(self.outcomes)
        return outcome.candidate, outcome.score

    def accept(self) -> Accepted:
        """Ends a phase: h <- what the rule accepts. The marker is the last file that a phase writes."""
        best, incumbent = select_best(self.outcomes), self.outcomes[0]
        better = rank(self.outcomes)[:rank(self.outcomes).index(incumbent)]
        finalists = better[:FINALISTS]
        if self.rule == "confirm" and finalists:
            accepted = self._confirm(finalists, incumbent)
        else:
            accepted = Accepted(best.candidate, best.score, "the best score" if better else "nothing was better")
        write_atomically(self.folder / "acceptance.json", json.dumps({
            "name": accepted.candidate.name, "rule": self.rule, "why": accepted.why, "n_candidates": len(self.outcomes),
            "confirmed": [asdict(row) for row in accepted.confirmed]}, indent=1) + "\n")
        write_atomically(self.folder / "accepted.txt", accepted.candidate.name + "\n")
        return accepted

    def _confirm(self, finalists: list[Outcome], incumbent: Outcome) -> Accepted:
        """The finalists and the incumbent once more, on the same tasks and fresh seeds."""
        fresh, cost, seconds = {}, Counter(), 0.0
        for outcome in [incumbent, *finalists]:
            path, key = self.folder / outcome.candidate.name / "confirmed.json", self.score_key(outcome.candidate)
            record = json.loads(path.read_text()) if path.exists() else {}
            if record.get("key") != key:
                tally = Tally()
                self._play(outcome.candidate, self.tasks, tally, "confirm", "confirming")
                record = {"key": key, "n_iterations": self.n_iterations, "rewards": tally.rewards,
                          "cost": dict(tally.cost), "seconds": tally.seconds}
                write_atomically(path, json.dumps(record) + "\n")
            fresh[outcome.candidate.name] = record["rewards"]
            if record["n_iterations"] == self.n_iterations:                     # else an earlier phase has paid for it
                cost.update(record["cost"])
                seconds += record["seconds"]
        of_incumbent = fresh.pop(incumbent.candidate.name)
        rows = confirm(fresh, of_incumbent, derive_seed(*self.seed, "confirm"))
        winner = next((row for row in rows if row.is_better), None)
        chosen = next(o for o in finalists if o.candidate.name == winner.name) if winner else incumbent
        tops = winner or rows[0]
        why = (f"on fresh seeds {tops.name} {tops.mean:.3f}, the incoming harness {tops.incumbent_mean:.3f}: "
               f"{tops.difference:+.3f} [{tops.ci[0]:+.3f}, {tops.ci[1]:+.3f}]" + "; it stays" * (winner is None))
        return Accepted(chosen.candidate, chosen.score, why, tuple(rows), dict(cost), seconds)

    def _propose(self, number: int, n_candidates: int, usd_left: float | None) -> list[Candidate]:
        """The candidates of an iteration: those on disk, else the proposer's."""
        marker = self._marker(number)
        if marker.exists():
            record = json.loads(marker.read_text())
            self.bill = Bill(**record["bill"])
            return [self._read(name, sha) for name, sha in record["candidates"].items()]
        slots = tuple(f"h{len(self.outcomes) + i}" for i in range(n_candidates))
        self._write_task(slots)
        before = self._fingerprint()
        request = ProposalRequest(
            self.folder, tuple(self.outcomes), slots, (*self.seed, "propose", number), self.env.name,
            self.folder / "sessions" / f"iteration_{number:02d}",
            bool(self.fst_h0), usd_left)
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
        self.bill = replace(request.bill, proposals=len(candidates))
        write_atomically(marker, json.dumps({"candidates": {c.name: sha256(c.source) for c in candidates},
                                             "bill": asdict(self.bill)}) + "\n")
        return candidates

    def _write_task(self, slots: tuple[str, ...]) -> None:
        write_atomically(self.folder / "task.md", task_text(
            self.env, self.tasks, self.cfg, len(slots) or self.n_candidates, bool(self.fst_h0),
            earlier_findings(self.folder), slots, self.engine.max_len))

    def _marker(self, number: int) -> Path:
        return self.folder / f"iteration_{number:02d}.json"

    def _fingerprint(self) -> dict[str, str]:
        """What a proposer must leave alone: what decides a score, and the archive so far but for its own notes."""
        return fingerprint((self.folder, *scorer_paths()), self.folder / "sessions")

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

    def _finish(self, group: list[Candidate], siblings: list[Candidate]) -> dict[str, Outcome]:
        """Gates and scores the candidates of a group, together if they race -> their outcomes. Of each, the marker is
        written last."""
        outcomes, racing = {}, {}
        for candidate in group:
            started, cost, refused = time.monotonic(), {}, ""
            if candidate.name != "h0":
                refused, cost = self._gate(candidate, siblings)
            gates = {"gate_cost": cost, "gate_seconds": time.monotonic() - started}
            if refused:
                outcomes[candidate.name] = self._refuse(candidate, refused, gates)
            else:
                racing[candidate.name] = (candidate, self._tally_so_far(candidate), gates)
        best = select_best(self.outcomes).score.rewards if self.outcomes else {}
        order = random.Random(derive_seed(*self.seed, "order")).sample(self.tasks, len(self.tasks)) \
            if self.rule == "race" else self.tasks                              # the same for all of an archive
        for cut in cuts_of(len(order), self.rule if best else "best"):
            for name, (candidate, tally, gates) in list(racing.items()):
                ahead = order[len(tally.rewards):cut]
                if ahead and (why := self._play(candidate, ahead, tally, "score", "scoring")):
                    cost = dict(Counter(gates["gate_cost"]) + tally.cost)               # rollouts that score nothing
                    gates = {"gate_cost": cost, "gate_seconds": gates["gate_seconds"] + tally.seconds}
                    outcomes[name] = self._refuse(racing.pop(name)[0], why, gates)
            if cut < len(order) and racing:
                rewards = {name: tally.rewards for name, (_, tally, _) in racing.items()}
                for name in rewards.keys() - still_racing(rewards, best, len(order)):
                    why = f"stopped after {cut} of {len(order)} tasks: it would hardly end above the best"
                    outcomes[name] = self._score(*racing.pop(name), why)
        return outcomes | {name: self._score(*entry) for name, entry in racing.items()}

    def _gate(self, candidate: Candidate, siblings: list[Candidate]) -> tuple[str, dict[str, int]]:
        """-> why it is refused, "" if it is not; and what rollouts of the model it took to tell."""
        if not any(o.score and o.candidate.name == candidate.parent for o in self.outcomes):
            return f"its parent {candidate.parent!r} is no scored candidate of an earlier iteration", {}
        ahead = [o.candidate for o in self.outcomes] + siblings[:siblings.index(candidate)]
        for other in ahead:
            if program_of(other.source) == program_of(candidate.source):
                return f"it is the same program as {other.name}", {}
        if self.fst_h0 and (why := beyond_prompts(candidate.source, self.fst_h0)):
            return f"prompts only (FST): {why}", {}
        probes = check_harness(candidate.source, self.env, self.engine, self.sandbox, self.tasks, self.forbidden,
                               self.cfg, (*self.seed, "gate"))
        cost = Counter()
        for probe in probes:
            cost.update(probe.cost)
        return said_against(probes), dict(cost)

    def _refuse(self, candidate: Candidate, why: str, gates: dict) -> Outcome:
        record = {"refused": why, "key": self.score_key(candidate), **gates}
        write_atomically(self.folder / candidate.name / "refused.json", json.dumps(record, indent=1) + "\n")
        return Outcome(candidate, None, why, **gates)

    def _play(self, candidate: Candidate, tasks: list[Task], tally: Tally, seeds: str, title: str) -> str:
        """One rollout on each task, added to the tally and to the candidate's traces -> what in them refuses it."""
        started = time.monotonic()
        with self.on_candidate(f"{title} {candidate.name}", len(tasks)) as advance:
            traces = self.roll_out(candidate.source, tasks, 1, (*self.seed, seeds), on_finish=lambda trace: advance())
        if seeds == "score":
            path = self.folder / candidate.name / "traces.jsonl"
            rows = path.read_text(encoding="utf-8").splitlines()[:len(tally.rewards)] if tally.rewards else []
            rows += [json.dumps(trace.to_json()) for trace in traces]
            write_atomically(path, "\n".join(rows) + "\n")
        tally.add(traces, time.monotonic() - started)
        why = said_against(check_traces(traces, tasks, self.env, self.engine.tokenizer))
        if why and candidate.name != "h0":
            return why
        if self.rule == "race":                                     # a round is never played twice
            record = {"key": self.score_key(candidate), "tally": vars(tally)}
            write_atomically(self.folder / candidate.name / "rounds.json", json.dumps(record) + "\n")
        return ""

    def _tally_so_far(self, candidate: Candidate) -> Tally:
        path = self.folder / candidate.name / "rounds.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        if record.get("key") != self.score_key(candidate):
            return Tally()
        counters = {name: Counter(record["tally"][name]) for name in ("statuses", "failures", "cost")}
        return Tally(**record["tally"] | counters)

    def _score(self, candidate: Candidate, tally: Tally, gates: dict, stopped: str = "") -> Outcome:
        n = len(tally.rewards)
        score = Score(
            mean=mean_of(tally.rewards), n=n,
            ci95=bootstrap_ci(list(tally.rewards.values()), derive_seed(*self.seed, "bootstrap")),
            n_ok=tally.statuses["ok"], n_error=tally.statuses["error"], n_killed=tally.statuses["killed"],
            calls_a_rollout=tally.cost["model_calls"] / n, tok_a_rollout=tally.cost["completion_tok"] / n,
            failures=dict(sorted(tally.failures.items())), cost=dict(tally.cost), seconds=tally.seconds,
            harness_sha=sha256(candidate.source), version=self.version, key=self.score_key(candidate),
            rewards=tally.rewards, stopped=stopped)
        path = self.folder / candidate.name / "score.json"
        write_atomically(path, json.dumps(asdict(score) | gates, indent=1) + "\n")
        return Outcome(candidate, score, **gates)

    def score_key(self, candidate: Candidate) -> str:
        settings = {key: value for key, value in asdict(self.cfg).items() if key != "n_workers"}    # changes no result
        tasks = [[task.id, task.fields, task.answer] for task in self.tasks]
        rule = [self.rule] if self.rule == "race" else []                       # the others score alike
        return sha256(json.dumps([candidate.source, self.version, self.env.name, tasks, self.seed, settings, *rule]))

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

    def _write_history(self, outcomes: list[Outcome]) -> None:
        write_atomically(self.folder / "history.jsonl", "".join(map(history_row, outcomes)))
        write_atomically(self.folder / "archive.md", archive_text(outcomes))


def said_against(probes: list[Probe]) -> str:
    return "; ".join(f"{probe.name}: {probe.why}" for probe in probes if not probe.passed)


def history_row(outcome: Outcome) -> str:
    """A candidate's row of history.jsonl. No seconds, so that a resumed search writes the same rows."""
    row = asdict(outcome.candidate) | (asdict(outcome.score) if outcome.score else {}) | {"refused": outcome.refused}
    left_out = ("source", "seconds", "key", "rewards")
    return json.dumps({key: value for key, value in row.items() if key not in left_out}) + "\n"


def earlier_findings(folder: Path) -> list[Finding]:
    """What the archives before this one in the same run found, against each candidate's parent."""
    found = []
    for archive in sorted(folder.parent.glob("cycle_*")) if folder.name.startswith("cycle_") else []:
        if archive.name >= folder.name or not (archive / "acceptance.json").exists():
            continue
        kept = json.loads((archive / "acceptance.json").read_text())["name"]
        rows = [json.loads(line) for line in (archive / "history.jsonl").read_text().splitlines()]
        means = {row["name"]: row["mean"] for row in rows if "mean" in row and not row["stopped"]}
        found += [Finding(int(archive.name.removeprefix("cycle_")), row["name"], row["mean"], tuple(row["ci95"]),
                          means[row["parent"]], row["hypothesis"], row["name"] == kept)
                  for row in rows if row["name"] in means and row["parent"] in means]
    return found


def archive_text(outcomes: list[Outcome]) -> str:
    """The archive as a table, the best first, then those that were stopped or refused."""
    whole = rank(outcomes)
    front = pareto_front((o.candidate.name, o.score.mean, o.score.tok_a_rollout) for o in whole)
    rows = []
    for outcome in whole + [o for o in outcomes if o not in whole]:
        candidate, score = outcome.candidate, outcome.score
        numbers = [f"{score.mean:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}]",
                   f"{score.n_ok} / {score.n_error} / {score.n_killed}", f"{score.calls_a_rollout:.2f}",
                   f"{score.tok_a_rollout:.0f}"] if score else ["", "", "", ""]
        verdict = outcome.refused and f"refused: {outcome.refused}" or score.stopped or (
            "on the front" if candidate.name in front else "")
        cells = [candidate.name, candidate.parent, *numbers, verdict, candidate.hypothesis, candidate.note]
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n")
    return ("A row a harness. Front: no other has a higher score and takes no more sampled tokens (Pareto).\n\n"
            "| name | parent | score, 95 % interval | ok / error / killed | calls a rollout | tokens a rollout "
            "| verdict | hypothesis | note |\n|" + " --- |" * 9 + "\n" + "".join(rows))
