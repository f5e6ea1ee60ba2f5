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

import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from candidates import Bill, Candidate, ProposalRequest, select_best
from harness_search import SearchError
from keys import redact
from rollout import derive_seed
from files import fingerprint, in_order, read_sealed, write_atomically, write_sealed
from screen import plain

ROOT = Path(__file__).resolve().parent
PREFIX = "whale-proposer-"
N_TRIES = 5                     # of a session that failed for a reason that passes
PAUSE_S = 5.0                   # before the second try; doubled before each further one
MAX_SLOT_BYTES = 1_000_000      # of a file that is taken; the gates allow far less, and say so
N_STRAYS = 20                   # paths that a report names
N_LOOKED_AT = 100_000           # files of a working copy that are compared


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
    waived: tuple[str, ...] = ()        # layers of the wall around it that the user does without


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
                     closed: tuple[Path, ...] = (), guarded: tuple[Path, ...] = (), waived: tuple[str, ...] = (),
                     say: Callable[[str], None] = lambda line: None,
                     pause: Callable[[float], None] = time.sleep) -> list[Candidate]:
    """Sessions until one leaves a candidate -> the candidates; none where a cap ends it before. ProposerFailed after
    max_proposer_failures in a row without one; a failure that passes is one when it has not passed after N_TRIES.

    closed: what the agent must not read. guarded: what decides a score, so a session that changes it stops the search;
    the archive always is. waived: layers of the wall to do without. say: for a person who waits."""
    request.notes.mkdir(parents=True, exist_ok=True)
    if earned := sweep_up(request):
        return earned[:request.n_candidates]
    failures = []
    while len(failures) < settings.max_proposer_failures:
        for attempt in range(N_TRIES):
            if attempt:
                say(f"once more after {PAUSE_S * 2 ** (attempt - 1):.0f} s")
                pause(PAUSE_S * 2 ** (attempt - 1))
            if spent_all(request):
                return []
            candidates, session = hold_session(request, settings, run_agent, closed, guarded, waived, say)
            if candidates:
                return candidates
            if session.end != "transient":
                break
        failures.append(session.words.strip() or f"the session ended ({session.end}) and no slot was written")
    raise ProposerFailed(f"the proposer left no candidate {len(failures)} times in a row (--max-proposer-failures); "
                         f"see {request.notes}. Its last words: {plain(failures[-1])[-2000:]}")


def spent_all(request: ProposalRequest) -> bool:
    """Whether a cap of the run forbids one more session: with a cap on money, also after one of unknown cost."""
    bill = request.bill
    return (request.usd_left is not None and (bill.proposer_usd >= request.usd_left or bill.proposer_unpriced > 0)
            or request.proposals_left is not None and bill.proposals + request.n_candidates > request.proposals_left)


def hold_session(request: ProposalRequest, settings: ProposerConfig, run_agent: Callable[[Workplace], Session],
                 closed: tuple[Path, ...], guarded: tuple[Path, ...], waived: tuple[str, ...],
                 say: Callable[[str], None]) -> tuple[list[Candidate], Session]:
    """One session -> what it left, and how it ended. Its record is there while it runs, so that none is forgotten."""
    records = [read_sealed(path) for path in request.notes.glob("session_*.json")]
    number, n_ended = 1 + len(records), sum(record["end"] != "killed" for record in records)
    record = request.notes / f"session_{number}.json"
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))              # only this user can look into it
    copy = folder / "work"
    write_sealed(record, {"end": "running", "folder": str(folder)})
    transcript = request.notes / f"transcript_{number}.txt"
    say(f"asking the proposer for {', '.join(request.slots)}, for {settings.proposer_s:,.0f} s at most; {transcript}")
    limits = [usd for usd in (settings.proposer_usd or None, request.usd_left and
                              request.usd_left - request.bill.proposer_usd) if usd is not None]
    try:
        fill_folder(copy, request)
        sealed, before = fingerprint((request.folder, *guarded), request.notes.parent), stamps_of(copy)
        session = run_agent(Workplace(copy, request.slots, transcript, settings, min(limits, default=None),
                                      derive_seed(*request.seed, n_ended), closed, waived))
        own = {f"{slot}.py" for slot in request.slots} | {"proposal.json", "report.md"}
        strays = [path for path in changes(before, stamps_of(copy)) if path not in own]
        candidates, notes = take_slots(copy, request)
        session = replace(session, notes=(*session.notes, *notes))
        report = read_plain(copy / "report.md")
        if report:
            write_atomically(request.notes / "report.md", plain(report))
        tampered = changes(sealed, fingerprint((request.folder, *guarded), request.notes.parent))
    finally:
        remove_tree(folder)
    if session.usd is None and settings.proposer_price and session.prompt_tok is not None:
        session = replace(session, usd=price_of(settings.proposer_price, session.prompt_tok, session.completion_tok))
    write_sealed(record, asdict(session) | {
        "n_strays": len(strays), "strays": strays[:N_STRAYS], "tampered": tampered[:N_STRAYS],
        "candidates": [asdict(candidate) for candidate in candidates if not tampered]})
    add_up(request.bill, request.notes)
    usd = "unknown cost" if session.usd is None else f"${session.usd:.2f}"
    say(f"session {number} ({session.end}, {session.seconds:.0f} s, {usd}): {', '.join(c.name for c in candidates)}"
        + (f"nothing; {plain(session.words)[-300:]}" if not candidates else "")
        + (f"; changed {len(strays)} other paths, thrown away: {', '.join(strays[:3])}" if strays else "")
        + (f"; {' '.join(plain('; '.join(session.notes)).split())[:500]}" if session.notes else ""))
    if tampered:
        raise SearchError(f"the proposer, or somebody else while it worked, changed {', '.join(tampered[:N_STRAYS])}: "
                          "what decides a score is not its to write. Nothing of this session was taken")
    return candidates, session


def prompt_for(workplace: Workplace) -> str:
    """What an agent is told first; all else is in task.md."""
    slots = ", ".join(f"{slot}.py" for slot in workplace.slots)
    return f"""Your working copy is {workplace.folder}. Read task.md there, whole, and do what it says.

The files that you write are {slots}, each a complete harness, then proposal.json, with an entry for each of them, and
report.md; all in the working copy itself. You work alone: nobody answers a question. End when they are written.
"""


def fill_folder(folder: Path, request: ProposalRequest) -> None:
    """The working copy. The archives of a run lie side by side, so earlier cycles are those before this one."""
    folder.mkdir()
    shutil.copy(ROOT / "harness_api.py", folder)
    shutil.copy(request.folder / "task.md", folder)
    archives = [request.folder]
    if request.folder.name.startswith("cycle_"):
        archives = in_order(request.folder.parent.glob("cycle_*"))
        archives = archives[:archives.index(request.folder) + 1]
    for archive in archives:
        copy = folder / "archive" / archive.name
        shutil.copytree(archive, copy, ignore=shutil.ignore_patterns("sessions", "task.md", "*.tmp"))
        for report in archive.glob("sessions/*/report.md"):
            (copy / "reports").mkdir(exist_ok=True)
            shutil.copy(report, copy / "reports" / f"{report.parent.name}.md")


# ---- what an agent leaves: all of it is hostile ---------------------------------------------------------------------


def stamps_of(folder: Path) -> dict[str, str]:
    """path -> what no write leaves as it was, of all below `folder` but plain directories. Links are not followed,
    nothing is opened, and after N_LOOKED_AT entries it stops, which is an entry too."""
    found, open_ends, n_seen = {}, [""], 0
    while open_ends:
        below = open_ends.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    path, seen = os.path.join(below, entry.name), entry.stat(follow_symlinks=False)
                    if n_seen == N_LOOKED_AT:
                        return found | {f"(more than {N_LOOKED_AT:,} files)": ""}
                    n_seen += 1
                    if stat.S_ISDIR(seen.st_mode):
                        open_ends.append(path)
                    else:
                        found[path] = f"{seen.st_mode} {seen.st_size} {seen.st_ino} {seen.st_ctime_ns}"
        except OSError as error:                                # a folder that is closed, or too deep for a path
            found[below] = f"a folder that cannot be listed: {error.strerror}"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Paths, in order and fit to be shown, that are new, gone or other."""
    return sorted(plain(path)[:300] for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def read_plain(path: Path) -> str | None:
    """The text of a plain file of moderate size, secrets blotted out; None for anything else (a link, a pipe)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_SLOT_BYTES:
            return None
        return redact(os.read(descriptor, MAX_SLOT_BYTES).decode("utf-8", "replace"))      # it may write what it sees
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Removes what an agent could make: folders without rights, deeper than a path can name. Follows no link."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
                       env={"PATH": os.environ.get("PATH", os.defpath)})


def take_slots(folder: Path, request: ProposalRequest) -> tuple[list[Candidate], list[str]]:
    """-> the slots that were written, and what was not taken and why. One that proposal.json does not explain, or not
    well, is taken all the same: its parent is the best so far, and its note says so."""
    told, notes, not_plain = {}, [], f"is no plain file of at most {MAX_SLOT_BYTES:,} bytes"
    if os.path.lexists(folder / "proposal.json"):
        text = read_plain(folder / "proposal.json")
        told, why = ({}, f"it {not_plain}") if text is None else read_proposals(text)
        notes += [f"proposal.json could not be read: {why}"] if why else []
    best = select_best(list(request.history)).candidate.name
    scored = {outcome.candidate.name for outcome in request.history if outcome.score}
    candidates = []
    for slot in request.slots:
        source = read_plain(folder / f"{slot}.py")
        if not source or not source.strip():
            if os.path.lexists(folder / f"{slot}.py"):
                notes.append(f"{slot}.py {not_plain if source is None else 'is empty'}, so it was not taken")
            continue
        entry = told.get(slot, {})
        parent, hypothesis = (plain(entry[key])[:2000].strip() if isinstance(entry.get(key), str) else ""
                              for key in ("parent", "hypothesis"))
        mechanisms = entry.get("mechanisms") if isinstance(entry.get("mechanisms"), list) else []
        note = "" if parent and hypothesis else "recovered: proposal.json does not explain this file"
        if parent and parent not in scored:
            note, parent = f"recovered: its parent {parent[:40]!r} is no scored candidate", best
        candidates.append(Candidate(
            slot, parent or best, hypothesis,
            tuple(plain(name)[:100] for name in mechanisms[:20] if isinstance(name, str)), source, 0, note))
    return candidates, notes


def read_proposals(text: str) -> tuple[dict[str, dict], str]:
    """-> slot -> its entry, of a list of entries with "slot", or of an object by slot; and why it could not be read."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, str(error)
    if isinstance(rows, dict):
        rows = [{"slot": slot, **entry} for slot, entry in rows.items() if isinstance(entry, dict)]
    if not isinstance(rows, list):
        return {}, "it holds neither a list nor an object"
    return {row["slot"].removesuffix(".py"): row for row in rows
            if isinstance(row, dict) and isinstance(row.get("slot"), str)}, ""


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
    records = [read_sealed(path) for path in in_order(notes.glob("session_*.json"))]
    bill.proposals = sum(max(1, len(record.get("candidates", []))) for record in records)
    bill.proposer_calls = len(records)
    bill.proposer_usd = sum(record.get("usd") or 0.0 for record in records)
    bill.proposer_unpriced = sum(record.get("usd") is None for record in records)
    bill.proposer_tok = sum((record.get("prompt_tok") or 0) + (record.get("completion_tok") or 0) for record in records)


def sweep_up(request: ProposalRequest) -> list[Candidate]:
    """After a process that was killed: its working copy goes, its session is known to have been; and if the session had
    ended, here are its candidates, so that it is not held again."""
    earned = []
    for path in in_order(request.notes.glob("session_*.json")):
        record = read_sealed(path)
        if record["end"] == "running":
            folder = Path(record["folder"])
            if folder.name.startswith(PREFIX):
                remove_tree(folder)
            write_sealed(path, {"end": "killed", "words": "the run was stopped", "usd": None})
        earned = [Candidate(**candidate | {"mechanisms": tuple(candidate["mechanisms"])})
                  for candidate in record.get("candidates", [])] or earned
    add_up(request.bill, request.notes)
    return earned
