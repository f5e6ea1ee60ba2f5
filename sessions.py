"""One session of a proposer that is an agent: what it gets to see, what is taken from it, what becomes of its failures.

It works in a copy of the archive, in a temporary folder that is removed afterwards:

    task.md  harness_api.py             what it is told
    archive/cycle_01/ cycle_02/ ...     all that was tried in this run: sources, scores, traces, reports of earlier
                                        sessions; references nowhere
    h4.py h5.py h6.py                   the slots: the new harness files
    proposal.json  report.md            parent, hypothesis and mechanisms of each slot; what the agent looked at

Only the slots, proposal.json and report.md are taken. What else it changed is thrown away and reported. Beside the
archive, in `sessions/iteration_02/`, stay the record of each session (session_1.json), its transcript and its report.

Who the agent is, is a function from `Workplace` to `Session`: a command (agent_cmd.py) or our own (agent_api.py).
"""

import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness_search import Bill, Candidate, ProposalRequest, SearchError, select_best
from rundir import write_atomically

ROOT = Path(__file__).resolve().parent
PREFIX = "whale-proposer-"
N_TRIES = 5                     # of a session that failed for a reason that passes
PAUSE_S = 5.0                   # before the second try; doubled before each further one
MAX_SLOT_BYTES = 1_000_000      # of a file that is taken; the gates allow far less, and say so
N_STRAYS = 20                   # paths that a report names


class ProposerFailed(SearchError):
    """The proposer gave nothing, again and again; the message ends with its own words."""


@dataclass(frozen=True)
class ProposerConfig:
    """The knobs of a proposer, each a flag of the run with the same name."""
    proposer: str = "rules"             # rules, cmd, api
    proposer_cmd: str = "claude"        # cmd: claude, codex, opencode, or a command with {dir}, {prompt_file}, {model}
    proposer_model: str = ""            # the name that the command or the endpoint knows it by
    proposer_url: str = ""              # api: an OpenAI-compatible endpoint; its key is in WHALE_PROPOSER_KEY
    proposer_price: str = ""            # "IN,OUT": $ a million tokens, where the proposer does not report its cost
    proposer_s: float = 2400.0          # wall limit of a session
    proposer_usd: float = 0.0           # money limit of a session; 0: none
    proposer_env: str = ""              # cmd: more environment variables that it may see, comma-separated
    max_proposer_failures: int = 3      # sessions in a row without a candidate that stop the run


@dataclass(frozen=True)
class Workplace:
    """What an agent is given for one session."""
    folder: Path                        # the working copy, its current directory
    slots: tuple[str, ...]              # "h4", ...: it writes h4.py
    transcript: Path                    # a file to which its transcript goes, whatever becomes of the session
    settings: ProposerConfig
    usd: float | None                   # it may cost so much; None: no limit
    seed: int = 0                       # for an agent that draws
    closed: tuple[Path, ...] = ()       # it must not read below these: they hold references and the run's own files


@dataclass(frozen=True)
class Session:
    """What an agent came to. `None` means not known, which is not 0."""
    end: str                            # "done"; "transient": worth another try; "failed"
    words: str = ""                     # its own last words, or why it was ended
    model: str = ""
    version: str = ""                   # of the command
    prompt_tok: int | None = None
    completion_tok: int | None = None
    usd: float | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()         # what was unusual: processes that it left, output that was cut, ...


def propose_by_agent(request: ProposalRequest, settings: ProposerConfig, run_agent: Callable[[Workplace], Session],
                     closed: tuple[Path, ...] = (), pause: Callable[[float], None] = time.sleep) -> list[Candidate]:
    """Sessions until one leaves a candidate -> the candidates. ProposerFailed after max_proposer_failures without."""
    request.notes.mkdir(parents=True, exist_ok=True)
    if earned := sweep_up(request):
        return earned
    failures = []
    while len(failures) < settings.max_proposer_failures:
        for attempt in range(N_TRIES):
            if attempt:
                pause(PAUSE_S * 2 ** (attempt - 1))
            candidates, session = hold_session(request, settings, run_agent, closed)
            if candidates:
                return candidates
            if session.end != "transient":
                break
        failures.append(session.words.strip() or f"the session ended ({session.end}) and no slot was written")
    raise ProposerFailed(f"the proposer left no candidate in {len(failures)} sessions in a row "
                         f"(--max-proposer-failures); see {request.notes}. Its last words: {failures[-1][-2000:]}")


def hold_session(request: ProposalRequest, settings: ProposerConfig, run_agent: Callable[[Workplace], Session],
                 closed: tuple[Path, ...]) -> tuple[list[Candidate], Session]:
    """One session -> what it left, and how it ended. Its record is there while it runs, so that none is forgotten."""
    number = 1 + len(list(request.notes.glob("session_*.json")))
    record = request.notes / f"session_{number}.json"
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    write_atomically(record, json.dumps({"end": "running", "folder": str(folder)}) + "\n")
    try:
        fill_folder(folder, request)
        before = hashes_of(folder)
        limits = [usd for usd in (settings.proposer_usd or None, request.usd_left) if usd is not None]
        session = run_agent(Workplace(
            folder, request.slots, request.notes / f"transcript_{number}.txt", settings, min(limits, default=None),
            closed))
        after = hashes_of(folder)
        own = {f"{slot}.py" for slot in request.slots} | {"proposal.json", "report.md"}
        strays = sorted(path for path in before.keys() | after.keys()
                        if path not in own and before.get(path) != after.get(path))
        candidates = take_slots(folder, request)
        report = read_plain(folder / "report.md")
        if report:
            write_atomically(request.notes / "report.md", report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if session.usd is None and settings.proposer_price and session.prompt_tok is not None:
        session = replace(session, usd=price_of(settings.proposer_price, session.prompt_tok, session.completion_tok))
    write_atomically(record, json.dumps(asdict(session) | {
        "n_strays": len(strays), "strays": strays[:N_STRAYS],
        "candidates": [asdict(candidate) for candidate in candidates]}, indent=1) + "\n")
    add_up(request.bill, request.notes)
    return candidates, session


def fill_folder(folder: Path, request: ProposalRequest) -> None:
    """The working copy. The archives of a run lie side by side, so earlier cycles are those before this one."""
    shutil.copy(ROOT / "harness_api.py", folder)
    shutil.copy(request.folder / "task.md", folder)
    for archive in sorted(request.folder.parent.glob("cycle_*")) if request.folder.name.startswith("cycle_") else \
            [request.folder]:
        if archive.name <= request.folder.name:
            copy = folder / "archive" / archive.name
            shutil.copytree(archive, copy, ignore=shutil.ignore_patterns("sessions", "task.md", "*.tmp"))
            for report in sorted(archive.glob("sessions/*/report.md")):
                (copy / "reports").mkdir(exist_ok=True)
                shutil.copy(report, copy / "reports" / f"{report.parent.name}.md")


def hashes_of(folder: Path) -> dict[str, str]:
    """Of every file below it; a link is what it points to, never followed."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            with open(path, "rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        elif not path.is_dir():
            found[name] = "no plain file"
    return found


def read_plain(path: Path) -> str | None:
    """The text of a plain file of moderate size; None for anything else (a link to /etc/passwd, a pipe)."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_SLOT_BYTES:
        return None
    return path.read_bytes().decode("utf-8", "replace")


def take_slots(folder: Path, request: ProposalRequest) -> list[Candidate]:
    """The slots that were written. One that proposal.json does not explain, or not well, is taken all the same: its
    parent is the best so far, and its note says so."""
    told = read_proposals(read_plain(folder / "proposal.json") or "")
    best = select_best(list(request.history)).candidate.name
    candidates = []
    for slot in request.slots:
        source = read_plain(folder / f"{slot}.py")
        if not source or not source.strip():
            continue
        entry = told.get(slot, {})
        parent, hypothesis = entry.get("parent"), entry.get("hypothesis")
        whole = isinstance(parent, str) and isinstance(hypothesis, str) and bool(hypothesis.strip())
        mechanisms = entry.get("mechanisms") if isinstance(entry.get("mechanisms"), list) else []
        candidates.append(Candidate(
            slot, parent if isinstance(parent, str) else best,
            hypothesis[:2000] if isinstance(hypothesis, str) else "",
            tuple(str(name)[:100] for name in mechanisms[:20]), source, 0,
            "" if whole else "recovered: proposal.json does not explain this file"))
    return candidates


def read_proposals(text: str) -> dict[str, dict]:
    """slot -> its entry, of a list of entries with "slot", or of an object by slot; {} where it cannot be read."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(rows, dict):
        rows = [{"slot": slot, **entry} for slot, entry in rows.items() if isinstance(entry, dict)]
    rows = rows if isinstance(rows, list) else []
    return {str(row.get("slot")).removesuffix(".py"): row for row in rows if isinstance(row, dict)}


def parse_price(text: str) -> tuple[float, float]:
    """"IN,OUT", $ a million tokens of prompt and of completion."""
    prices = text.split(",")
    if len(prices) != 2 or not all(re.fullmatch(r"\s*\d+(\.\d+)?\s*", price) for price in prices):
        raise ValueError("give IN,OUT: $ a million tokens of prompt and of completion, such as 3,15")
    return float(prices[0]), float(prices[1])


def price_of(prices: str, prompt_tok: float, completion_tok: float | None) -> float:
    """$ of so many tokens."""
    of_prompt, of_completion = parse_price(prices)
    return (of_prompt * prompt_tok + of_completion * (completion_tok or 0)) / 1e6


def add_up(bill: Bill, notes: Path) -> None:
    """All sessions of an iteration, those of a process that was killed included."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(notes.glob("session_*.json"))]
    bill.proposer_calls = len(records)
    bill.proposer_usd = sum(record.get("usd") or 0.0 for record in records)
    bill.proposer_unpriced = sum(record.get("usd") is None for record in records)
    bill.proposer_tok = sum((record.get("prompt_tok") or 0) + (record.get("completion_tok") or 0) for record in records)


def sweep_up(request: ProposalRequest) -> list[Candidate]:
    """After a process that was killed: its working copy goes, its session is known to have been; and if the session had
    ended, here are its candidates, so that it is not held again."""
    earned = []
    for path in sorted(request.notes.glob("session_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["end"] == "running":
            folder = Path(record["folder"])
            if folder.name.startswith(PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
            write_atomically(path, json.dumps({"end": "killed", "words": "the run was stopped", "usd": None}) + "\n")
        earned = [Candidate(**candidate | {"mechanisms": tuple(candidate["mechanisms"])})
                  for candidate in record.get("candidates", [])] or earned
    add_up(request.bill, request.notes)
    return earned
