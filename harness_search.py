"""The harness phase: Meta-Harness (paper, section 3), a search over whole harness files by real rollouts.

An iteration asks a proposer for M candidates; each passes the gates or is refused, then gets one rollout on every
D_harness task, on seeds that all share. Which one is accepted is said in acceptance.py; the paper's rule is the best
score, ties go to fewer model calls, then to the earlier. The incoming harness is scored first, as iteration 1. The
archive on disk is all that a proposer needs:

    h0/ h1/ ...         harness.py, proposal.json, traces.jsonl; then score.json or refused.json, which ends it;
                        in between gates.json and, in a race, rounds.json: what was done is not done again
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
from acceptance import FINALISTS, Confirmed, confirm, cuts_of, mean_of, still_racing
from candidates import (
    Bill, Candidate, Outcome, ProposalRequest, Score, archive_text, earlier_findings, history_row, rank, select_best)
from tasks import Task
from gates import Probe, check_harness, check_traces
from lint import ForbiddenText, beyond_prompts, program_of
from rollout import RolloutConfig, cost_of, derive_seed
from files import Damaged, fingerprint, read_sealed, read_text, sha256, sha256_of_lines, write_atomically, write_sealed
from rundir import scorer_paths
from sandbox import Sandbox
from stats import bootstrap_ci
from task_text import task_text

AGAIN = "Remove it: then it is made again"           # of a record of rollouts that is damaged


class SearchError(RuntimeError):
    """The search cannot go on; nothing is recorded as done that was not."""


@dataclass(frozen=True)
class Accepted:
    candidate: Candidate
    mean: float                         # its score; where it was confirmed, that on fresh seeds
    why: str
    confirmed: tuple[Confirmed, ...] = ()
    cost: dict[str, int] = field(default_factory=dict)          # of confirming
    seconds: float = 0.0


@dataclass(frozen=True)
class GateBill:
    gate_cost: dict[str, int] = field(default_factory=dict)     # rollouts of the model, in the words of the ledger
    gate_seconds: float = 0.0


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


@dataclass
class Entrant:
    """A candidate that passed the gates, while it is scored."""
    candidate: Candidate
    tally: Tally
    gates: GateBill

    def rewards_on(self, tasks: list[Task]) -> dict[str, float]:
        return {task.id: self.tally.rewards[task.id] for task in tasks}


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

    def iterate(self, at_most: int | None = None, usd_left: float | None = None, proposals_left: int | None = None,
                replay: bool = False) -> list[Outcome]:
        """One iteration: the first scores the incumbent, later ones propose M candidates, or at most so many, gate and
        score them. `replay`: all of it was done and paid for, so it must be there; else SearchError. `usd_left` and
        `proposals_left`: what the proposer may cost; None: no limit."""
        if self.engine.version != self.version:
            raise SearchError(f"the engine serves weights {self.engine.version}, this phase began on {self.version}")
        number = self.n_iterations + 1
        if replay and number > 1 and not self._marker(number).exists():
            raise SearchError(f"{self._marker(number)} is gone: what was proposed is not known. Put it back from a "
                              "copy, or give another --name")
        n_candidates = min(self.n_candidates, at_most or self.n_candidates)
        self.bill = Bill(0, 0)
        candidates = self._propose(number, n_candidates, usd_left, proposals_left) if number > 1 else \
            self._write([self.incumbent])
        outcomes: list[Outcome] = []
        for group in [candidates] if self.rule == "race" else [[candidate] for candidate in candidates]:
            found = {candidate.name: self._load(candidate) for candidate in group}
            if replay and not all(found.values()):
                gone = next(name for name, outcome in found.items() if not outcome)
                raise SearchError(f"{self.folder / gone}: the score of this finished candidate is gone or of other "
                                  "settings. Put it back from a copy, or give another --name")
            found |= self._finish([c for c in group if not found[c.name]], candidates)
            outcomes += [found[candidate.name] for candidate in group]
            if not replay:                                                      # a reader meanwhile sees all of it
                self._write_history(self.outcomes + outcomes)
        self.outcomes, self.n_iterations = self.outcomes + outcomes, number
        return outcomes

    def best(self) -> tuple[Candidate, Score]:
        outcome = select_best(self.outcomes)
        return outcome.candidate, outcome.score

    def accept(self, phase: int = 0) -> Accepted:
        """Ends a phase: h <- what the rule accepts. The marker is the last file that a phase writes.

        The incumbent is what came into the phase: h0, or in a later phase of this archive what the one before accepted.
        """
        path = self.folder / "acceptance.json"
        before = read_sealed(path) if path.exists() else {"phase": phase, "incumbent": "h0"}
        name = before["incumbent" if before["phase"] == phase else "name"]      # of this phase, if it was stopped here
        incumbent = next(o for o in self.outcomes if o.candidate.name == name)
        if self.rule == "confirm":
            accepted = self._confirm(incumbent, phase)
        else:
            best = select_best(self.outcomes)
            accepted = Accepted(best.candidate, best.score.mean,
                                "nothing was better" if best is incumbent else "the best score")
        write_sealed(path, {
            "name": accepted.candidate.name, "rule": self.rule, "why": accepted.why, "phase": phase, "incumbent": name,
            "n_candidates": len(self.outcomes), "history": sha256("".join(map(history_row, self.outcomes))),
            "confirmed": [asdict(row) for row in accepted.confirmed]})
        write_atomically(self.folder / "accepted.txt", accepted.candidate.name + "\n")
        return accepted

    def _confirm(self, incumbent: Outcome, phase: int) -> Accepted:
        """The incumbent and the best of those with a higher score, once more on the same tasks and fresh seeds. A
        candidate is confirmed once: one that an earlier phase did not accept is none of them."""
        better = [o for o in rank(self.outcomes) if o.score.mean > incumbent.score.mean
                  and self._fresh(o).get("phase", phase) == phase][:FINALISTS]
        if not better:
            return Accepted(incumbent.candidate, incumbent.score.mean, "nothing was better")
        fresh, cost, seconds, refused = {}, Counter(), 0.0, []
        for outcome in [incumbent, *better]:
            candidate = outcome.candidate
            record = self._fresh(outcome)
            if not record:
                tally = Tally()
                why = self._play(candidate, self.tasks, tally, "confirm", "confirming")
                record = {"key": self.score_key(candidate), "phase": phase, "refused": why, **vars(tally)}
                write_sealed(self.folder / candidate.name / "confirmed.json", record)
            if record["phase"] == phase:                                        # else an earlier phase has paid for it
                cost.update(record["cost"])
                seconds += record["seconds"]
            if record["refused"] and outcome is not incumbent:
                refused.append(f"; {candidate.name} is refused: {record['refused']}")
            else:
                fresh[candidate.name] = record["rewards"]
        of_incumbent = fresh.pop(incumbent.candidate.name)
        rows = confirm(fresh, of_incumbent, len(better), derive_seed(*self.seed, "confirm"))
        winner = next((row for row in rows if row.is_better), None)
        chosen = next(o for o in better if o.candidate.name == winner.name) if winner else incumbent
        why = "; ".join(f"{row.name} {row.mean:.3f}, {row.difference:+.3f} [{row.ci[0]:+.3f}, {row.ci[1]:+.3f}]"
                        for row in rows)
        why = f"on fresh seeds {incumbent.candidate.name} {mean_of(of_incumbent):.3f}; {why}{''.join(refused)}"
        mean = winner.mean if winner else mean_of(of_incumbent)
        return Accepted(chosen.candidate, mean, why, tuple(rows), dict(cost), seconds)

    def _fresh(self, outcome: Outcome) -> dict:
        """The record of its confirming, if it was made under these settings; else {}."""
        path = self.folder / outcome.candidate.name / "confirmed.json"
        record = read_sealed(path, AGAIN) if path.exists() else {}
        return record if record.get("key") == self.score_key(outcome.candidate) else {}

    def _propose(self, number: int, n_candidates: int, usd_left: float | None,
                 proposals_left: int | None) -> list[Candidate]:
        """The candidates of an iteration: those on disk, else the proposer's."""
        marker = self._marker(number)
        if marker.exists():
            record = read_sealed(marker)
            self.bill = Bill(**record["bill"])
            return [self._read(name, sha) for name, sha in record["candidates"].items()]
        slots = tuple(f"h{len(self.outcomes) + i}" for i in range(n_candidates))
        self._write_task(slots)
        before = self._fingerprint()
        request = ProposalRequest(
            self.folder, tuple(self.outcomes), slots, (*self.seed, "propose", number), self.env.name,
            self.folder / "sessions" / f"iteration_{number:02d}",
            bool(self.fst_h0), usd_left, proposals_left)
        self.bill = request.bill                                    # also of a proposer that raises
        proposed = self.proposer(request)
        after = self._fingerprint()
        changed = [str(path) for path in sorted(before | after) if before.get(path) != after.get(path)]
        if changed:
            raise SearchError(f"the proposer changed {', '.join(changed)}: archive and scorer are not its to write")
        if len(proposed) > n_candidates:
            raise SearchError(f"the proposer returned {len(proposed)} candidates, not at most {n_candidates}")
        if not proposed and number == 2 and usd_left is proposals_left is None:     # else it tried all, or spent all
            raise SearchError("the proposer returned no candidate")
        candidates = self._write([
            replace(candidate, name=f"h{len(self.outcomes) + i}", iteration=number,
                    hypothesis=" ".join(candidate.hypothesis.split()),
                    source=candidate.source.encode("utf-8", "replace").decode())        # a lone surrogate is no source
            for i, candidate in enumerate(proposed)])
        self.bill.proposals = max(self.bill.proposals, len(candidates))
        write_sealed(marker, {"candidates": {c.name: sha256(c.source) for c in candidates}, "bill": asdict(self.bill)})
        return candidates

    def _write_task(self, slots: tuple[str, ...]) -> None:
        write_atomically(self.folder / "task.md", task_text(
            self.env, self.tasks, self.cfg, len(slots) or self.n_candidates, bool(self.fst_h0),
            earlier_findings(self.folder), slots, self.engine.max_len, self.rule))

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
            write_sealed(folder / "proposal.json", proposal)
        return candidates

    def _read(self, name: str, sha: str) -> Candidate:
        source = read_text(self.folder / name / "harness.py")
        if sha256(source) != sha:
            raise SearchError(f"{self.folder / name / 'harness.py'} was changed after it was proposed. Put it "
                              "back from a copy")
        proposal = read_sealed(self.folder / name / "proposal.json")
        return Candidate(**proposal | {"mechanisms": tuple(proposal["mechanisms"]), "source": source})

    def _finish(self, group: list[Candidate], siblings: list[Candidate]) -> dict[str, Outcome]:
        """Gates and scores the candidates of a group, together if they race -> their outcomes. Of each, the marker is
        written last."""
        outcomes, entrants = {}, []
        for candidate in group:
            refused, gates = self._gate(candidate, siblings)
            if refused:
                outcomes[candidate.name] = self._refuse(candidate, refused, gates)
            else:
                entrants.append(Entrant(candidate, self._tally_so_far(candidate), gates))
        best = select_best(self.outcomes).score.rewards if self.outcomes else None
        order = random.Random(derive_seed(*self.seed, "order")).sample(self.tasks, len(self.tasks)) \
            if self.rule == "race" else self.tasks                              # the same for all of an archive
        for cut in cuts_of(len(order), self.rule) if best else [len(order)]:
            entrants = self._play_round(entrants, order[:cut], outcomes)
            if cut < len(order):
                entrants = self._stop_some(entrants, order[:cut], best, outcomes)
        return outcomes | {entrant.candidate.name: self._score(entrant) for entrant in entrants}

    def _play_round(self, entrants: list[Entrant], tasks: list[Task], outcomes: dict[str, Outcome]) -> list[Entrant]:
        """Each plays what it has not yet played of these tasks -> those that their rollouts do not refuse."""
        left = []
        for entrant in entrants:
            tally, gates, name = entrant.tally, entrant.gates, entrant.candidate.name
            ahead = tasks[len(tally.rewards):]
            why = self._play(entrant.candidate, ahead, tally, "score", "scoring") if ahead else ""
            if why and name != "h0":                            # its rollouts score nothing, so the gates pay for them
                cost = dict(Counter(gates.gate_cost) + tally.cost)
                gates = GateBill(cost, gates.gate_seconds + tally.seconds)
                outcomes[name] = self._refuse(entrant.candidate, why, gates)
            else:
                left.append(entrant)
        return left

    def _stop_some(self, entrants: list[Entrant], tasks: list[Task], best: dict[str, float],
                   outcomes: dict[str, Outcome]) -> list[Entrant]:
        """After a round of a race over the first `tasks` -> those that go on. What was played beyond them, by a process
        that was stopped, changes no decision."""
        rewards = {entrant.candidate.name: entrant.rewards_on(tasks) for entrant in entrants}
        racing = still_racing(rewards, best, len(self.tasks)) if entrants else {}
        for entrant in entrants:
            if entrant.candidate.name not in racing:
                why = f"stopped after {len(tasks)} of {len(self.tasks)} tasks: it would hardly end above the best"
                outcomes[entrant.candidate.name] = self._score(entrant, why)
        return [entrant for entrant in entrants if entrant.candidate.name in racing]

    def _gate(self, candidate: Candidate, siblings: list[Candidate]) -> tuple[str, GateBill]:
        """-> why it is refused, "" if it is not; and what it took to tell. What has passed is not asked again."""
        path, key = self.folder / candidate.name / "gates.json", self.score_key(candidate)
        record = read_sealed(path, AGAIN) if path.exists() else {}
        if candidate.name == "h0" or record.get("key") == key:
            return "", GateBill(record.get("gate_cost", {}), record.get("gate_seconds", 0.0))
        started = time.monotonic()
        why, cost = self._probe(candidate, siblings)
        bill = GateBill(cost, time.monotonic() - started)
        if not why:
            write_sealed(path, {"key": key, **asdict(bill)})
        return why, bill

    def _probe(self, candidate: Candidate, siblings: list[Candidate]) -> tuple[str, dict[str, int]]:
        if not any(o.score and o.candidate.name == candidate.parent for o in self.outcomes):
            return f"its parent {candidate.parent!r} is no scored candidate of an earlier iteration", {}
        for other in [o.candidate for o in self.outcomes] + siblings[:siblings.index(candidate)]:
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

    def _refuse(self, candidate: Candidate, why: str, gates: GateBill) -> Outcome:
        record = {"refused": why, "key": self.score_key(candidate), **asdict(gates)}
        write_sealed(self.folder / candidate.name / "refused.json", record)
        return Outcome(candidate, None, why, **asdict(gates))

    def _play(self, candidate: Candidate, tasks: list[Task], tally: Tally, seeds: str, title: str) -> str:
        """One rollout on each task, added to the tally and to the candidate's traces -> what in them refuses it."""
        started, folder = time.monotonic(), self.folder / candidate.name
        with self.on_candidate(f"{title} {candidate.name}", len(tasks)) as advance:
            traces = self.roll_out(candidate.source, tasks, 1, (*self.seed, seeds), on_finish=lambda trace: advance())
        path = folder / ("traces.jsonl" if seeds == "score" else f"{seeds}_traces.jsonl")
        rows = path.read_text(encoding="utf-8").splitlines()[:len(tally.rewards)] if tally.rewards else []
        rows += [json.dumps(trace.to_json()) for trace in traces]
        write_atomically(path, "\n".join(rows) + "\n")
        tally.add(traces, time.monotonic() - started)
        why = said_against(check_traces(traces, tasks, self.env, self.engine.tokenizer))
        if self.rule == "race" and not why:
            record = {"key": self.score_key(candidate), "traces": sha256_of_lines(path, len(rows)), **vars(tally)}
            write_sealed(folder / "rounds.json", record)
        return why

    def _tally_so_far(self, candidate: Candidate) -> Tally:
        """Of the rounds that a process which was stopped has played."""
        path = self.folder / candidate.name / "rounds.json"
        record = read_sealed(path, AGAIN) if path.exists() else {}
        if record.pop("key", None) != self.score_key(candidate):
            return Tally()
        traces = self.folder / candidate.name / "traces.jsonl"
        if sha256_of_lines(traces, len(record["rewards"])) != record.pop("traces", ""):
            raise Damaged(f"{traces} is cut or changed. Remove {path}: then it is played again")
        return Tally(**record | {name: Counter(record[name]) for name in ("statuses", "failures", "cost")})

    def _score(self, entrant: Entrant, stopped: str = "") -> Outcome:
        candidate, tally, n = entrant.candidate, entrant.tally, len(entrant.tally.rewards)
        score = Score(
            mean=mean_of(tally.rewards), n=n,
            ci95=bootstrap_ci(list(tally.rewards.values()), derive_seed(*self.seed, "bootstrap")),
            n_ok=tally.statuses["ok"], n_error=tally.statuses["error"], n_killed=tally.statuses["killed"],
            calls_a_rollout=tally.cost["model_calls"] / n, tok_a_rollout=tally.cost["completion_tok"] / n,
            failures=dict(sorted(tally.failures.items())), cost=dict(tally.cost), seconds=tally.seconds,
            harness_sha=sha256(candidate.source), version=self.version, key=self.score_key(candidate),
            rewards=tally.rewards, stopped=stopped)
        path = self.folder / candidate.name / "score.json"
        write_sealed(path, asdict(score) | asdict(entrant.gates))
        return Outcome(candidate, score, **asdict(entrant.gates))

    def score_key(self, candidate: Candidate) -> str:
        settings = {key: value for key, value in asdict(self.cfg).items() if key != "n_workers"}    # changes no result
        tasks = [[task.id, task.fields, task.answer] for task in self.tasks]
        rule = [self.rule] if self.rule == "race" else []                       # the others score alike
        return sha256(json.dumps([candidate.source, self.version, self.env.name, tasks, self.seed, settings, *rule]))

    def _load(self, candidate: Candidate) -> Outcome | None:
        """A finished candidate's outcome, if it was made from this source under these settings."""
        for path in (self.folder / candidate.name / "score.json", self.folder / candidate.name / "refused.json"):
            record = read_sealed(path, AGAIN) if path.exists() else {}
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
