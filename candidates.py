"""The candidates of a harness search: the records that proposers and the search share, and the archive in words."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from acceptance import pareto_front
from files import Damaged, in_order, iter_jsonl, read_sealed, sha256_of_lines
from task_text import Finding

N_CYCLES = 10           # earlier ones that a proposer is told of: with all, what it reads would grow without end


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
    """What one request to a proposer cost so far; a proposer that pays adds to it."""
    proposals: int = 0                  # candidates, and sessions that gave none
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
    usd_left: float | None = None       # what --max-cost leaves for the proposer; None: no limit
    proposals_left: int | None = None   # what --max-proposals leaves; None: no limit
    bill: Bill = field(default_factory=Bill)

    @property
    def n_candidates(self) -> int:
        return len(self.slots)


def rank(outcomes: list[Outcome]) -> list[Outcome]:
    """Those with a complete score, highest mean first; ties to fewer model calls, then to the earlier one."""
    return sorted((o for o in outcomes if o.score and not o.score.stopped),
                  key=lambda o: (-o.score.mean, o.score.calls_a_rollout))


def select_best(outcomes: list[Outcome]) -> Outcome:
    return rank(outcomes)[0]


def history_row(outcome: Outcome) -> str:
    """A candidate's row of history.jsonl. No seconds, so that a resumed search writes the same rows."""
    row = asdict(outcome.candidate) | (asdict(outcome.score) if outcome.score else {}) | {"refused": outcome.refused}
    left_out = ("source", "seconds", "key", "rewards")
    return json.dumps({key: value for key, value in row.items() if key not in left_out}) + "\n"


def earlier_findings(folder: Path) -> list[Finding]:
    """What the last archives before this one in the same run found, against each candidate's parent."""
    found = []
    archives = in_order(folder.parent.glob("cycle_*")) if folder.name.startswith("cycle_") else []
    archives = archives[:archives.index(folder)] if folder in archives else archives
    for archive in [path for path in archives if (path / "acceptance.json").exists()][-N_CYCLES:]:
        record, rows = read_sealed(archive / "acceptance.json"), list(iter_jsonl(archive / "history.jsonl"))
        if sha256_of_lines(archive / "history.jsonl", record["n_candidates"]) != record["history"]:
            raise Damaged(f"{archive / 'history.jsonl'} is damaged: it is not what was written of its "
                          f"{record['n_candidates']} candidates. Put it back from a copy")
        means = {row["name"]: row["mean"] for row in rows if "mean" in row and not row["stopped"]}
        found += [Finding(int(archive.name.removeprefix("cycle_")), row["name"], row["mean"], tuple(row["ci95"]),
                          means[row["parent"]], row["hypothesis"], row["name"] == record["name"])
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
