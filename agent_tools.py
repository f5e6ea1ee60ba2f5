"""What the agent of agent_api.py can do: list files, read a range, search, write a slot, end. Nothing else.

It sees its working copy only: no absolute path, no "..", no link. Whatever it asks for, it gets a bounded text, an
error in words too; nothing here raises. What it sees is a function of what it asked: no clock, no order of a disk.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lint import MAX_SOURCE_BYTES, lint, parse_harness, program_of
from files import in_order

MAX_ANSWER = 12_000             # characters of an answer: a quarter of the context of a small local model
MAX_LINE = 1_500                # of a line, where several are read
MAX_LINES, MAX_ENTRIES, MAX_HITS = 200, 200, 100
MAX_GREP_BYTES = 300_000_000    # searched by one call
AROUND_HIT = (100, 200)         # characters shown before and after where a hit begins
MAX_REPORT = 20_000
NEEDED = object()

# name -> what it does; argument -> (type, default, what it is)
TOOLS = {
    "list_files": ("List one folder: names, and sizes in bytes.", {
        "path": (str, ".", "a folder, relative to the working copy")}),
    "read_file": (f"Read lines of a text file, at most {MAX_LINES}. Lines longer than {MAX_LINE} characters are cut; "
                  "to read on in one, ask for that line alone (n_lines 1) from start_char.", {
        "path": (str, NEEDED, "a file, relative to the working copy"),
        "start_line": (int, 1, "the first line, counted from 1"),
        "n_lines": (int, 100, "how many lines"),
        "start_char": (int, 0, "with n_lines 1: where in the line to begin")}),
    "grep": ("Find lines that hold a fixed text; upper and lower case are the same. No regular expressions, but "
             "several texts may be given, with | between them.", {
        "pattern": (str, NEEDED, "a text, or texts with | between them"),
        "path": (str, ".", "a file, or a folder with all that is below it"),
        "max_hits": (int, 30, f"how many hits to show, at most {MAX_HITS}")}),
    "write_slot": ("Write one of your new harness files, whole. May be called again for the same slot: the last one "
                   "counts.", {
        "slot": (str, NEEDED, "the name of the slot, as h4"),
        "source": (str, NEEDED, "the complete Python file"),
        "parent": (str, NEEDED, "the scored candidate that it was made from, as h0"),
        "hypothesis": (str, NEEDED, "one line that counted failures could prove wrong"),
        "mechanisms": (list, [], "short names of what it does differently")}),
    "finish": ("End your work, when all slots are written.", {
        "report": (str, "", "what you looked at, what you learned: read by whoever comes next")}),
}
JSON_TYPES = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {"type": "string"}}}


def tool_schemas() -> list[dict]:
    """The tools as an OpenAI-compatible endpoint wants them."""
    return [{"type": "function", "function": {"name": name, "description": what, "parameters": {
        "type": "object",
        "properties": {arg: JSON_TYPES[kind] | {"description": words} for arg, (kind, _, words) in arguments.items()},
        "required": [arg for arg, (_, default, _) in arguments.items() if default is NEEDED]}}}
        for name, (what, arguments) in TOOLS.items()]


class BadCall(ValueError):
    """The call cannot be done; the message is for the model."""


def clean(text: str) -> str:
    """Without what no JSON body or file can hold: NUL and lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def check_arguments(name: str, given: object) -> dict:
    """The arguments of a call, with defaults, each of its type. BadCall says what is wrong."""
    if name not in TOOLS:
        raise BadCall(f"there is no tool {name[:80]!r}; there are {', '.join(TOOLS)}")
    if not isinstance(given, dict):
        raise BadCall("the arguments are no JSON object")
    wanted = TOOLS[name][1]
    if unknown := [str(key) for key in given if key not in wanted]:
        raise BadCall(f"{name} has no argument {unknown[0][:80]!r}; it has {', '.join(wanted)}")
    arguments = {}
    for key, (kind, default, words) in wanted.items():
        value = given.get(key)
        if value is None:
            if default is NEEDED:
                raise BadCall(f"{name} needs {key}: {words}")
            value = default
        elif kind is int and isinstance(value, str) and value.strip().isdecimal():      # of a model without JSON types
            value = int(value[:20])
        elif kind is list and isinstance(value, str):
            value = [part.strip(" []\"'") for part in value.split(",")]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadCall(f"{name}: {key} must be {JSON_TYPES[kind]['type']}, not {type(value).__name__}")
        if kind is list:
            value = [clean(str(part))[:100] for part in value[:20] if part]
        arguments[key] = clean(value) if kind is str else value
    return arguments


class Workbench:
    """The tools over one working copy. `verdicts`: of each slot that was written, what is wrong with it, or ""."""

    def __init__(self, folder: Path, slots: tuple[str, ...]):
        self.folder, self.slots = folder.resolve(), slots
        self.verdicts: dict[str, str] = {}
        self.proposals: dict[str, dict] = {}
        self.report: str | None = None          # set by `finish`, which
        self.warned = False                     # is asked to be called again, once, when slots are left
        archives = in_order(self.folder.glob("archive/*/history.jsonl"))
        self.archive = archives[-1].parent if archives else self.folder

    @property
    def left(self) -> list[str]:
        """Slots that are unwritten, or that a gate would refuse as they are."""
        return [slot for slot in self.slots if self.verdicts.get(slot, "unwritten")]

    def run(self, name: str, given: object) -> tuple[str, dict | None]:
        """One call -> the answer, and the arguments as they were understood; None if it could not be done."""
        try:
            arguments = check_arguments(name, given)
            return shorten(getattr(self, name)(**arguments)), arguments
        except BadCall as wrong:
            return f"Error: {wrong}", None
        except (OSError, ValueError, RuntimeError) as error:        # a name that is too long, a file that is no text
            return f"Error: {type(error).__name__}: {getattr(error, 'strerror', None) or 'that cannot be done'}", None

    def find(self, path: str) -> Path:
        """A path of the working copy. BadCall for any other, and for one that is not there."""
        parts = Path(path.strip() or ".")
        if parts.is_absolute() or ".." in parts.parts:
            raise BadCall("paths are relative to the working copy, without '..'")
        place = self.folder / parts
        if place.resolve() != place:
            raise BadCall(f"{path[:200]!r} is a link, and links are not followed")
        if not place.is_dir() and not place.is_file():
            raise BadCall(f"there is no {path[:200]!r}; list_files shows what there is")
        return place

    def name_of(self, place: Path) -> str:
        return clean(str(place.relative_to(self.folder)))

    def files_below(self, place: Path) -> Iterator[Path]:
        for entry in sorted(place.iterdir()) if place.is_dir() else [place]:
            if not entry.is_symlink():
                yield from self.files_below(entry) if entry.is_dir() else [entry] if entry.is_file() else []

    def list_files(self, path: str) -> str:
        place = self.find(path)
        if not place.is_dir():
            raise BadCall(f"{path[:200]!r} is a file; read_file reads it")
        entries = sorted(entry for entry in place.iterdir() if not entry.is_symlink())
        lines = [f"{self.name_of(entry)}/" if entry.is_dir() else f"{self.name_of(entry)}  {entry.stat().st_size}"
                 for entry in entries[:MAX_ENTRIES]]
        more = len(entries) - len(lines)
        return "\n".join(lines + [f"({more} more)"] * (more > 0)) or "(nothing)"

    def read_file(self, path: str, start_line: int, n_lines: int, start_char: int) -> str:
        place = self.find(path)
        if place.is_dir():
            raise BadCall(f"{path[:200]!r} is a folder; list_files lists it")
        if start_line < 1 or n_lines < 1 or start_char < 0:
            raise BadCall("start_line and n_lines begin at 1, start_char at 0")
        with open(place, encoding="utf-8", errors="replace", newline="\n") as file:
            lines = list(islice(file, start_line - 1, start_line - 1 + min(n_lines, MAX_LINES)))
            n_all = start_line - 1 + len(lines) + sum(1 for _ in file) if lines else None
        if n_all is None:
            return f"(the file has no line {start_line})"
        if n_lines == 1:
            line = lines[0].rstrip("\n")
            part = line[start_char:start_char + MAX_ANSWER - 300]
            end = start_char + len(part)
            return (f"(line {start_line} of {n_all}, characters {start_char} to {end} of {len(line)}"
                    f"{f'; go on with start_char {end}' if end < len(line) else ''})\n{part}")
        shown, n_chars = [], 0
        for number, line in enumerate(lines, start=start_line):
            line = line.rstrip("\n")
            if len(line) > MAX_LINE:
                line = f"{line[:MAX_LINE]} ... ({len(line)} characters in this line)"
            n_chars += len(line) + 12
            if shown and n_chars > MAX_ANSWER - 300:
                break
            shown.append(f"{number}: {line}")
        return f"(lines {start_line} to {start_line + len(shown) - 1} of {n_all})\n" + "\n".join(shown)

    def grep(self, pattern: str, path: str, max_hits: int) -> str:
        texts = [text.lower() for text in pattern.split("|") if text]
        if not texts or len(pattern) > 1000 or max_hits < 1:
            raise BadCall("grep needs a text to look for, of at most 1000 characters, and max_hits of 1 or more")
        hits, n_hits, n_bytes, n_skipped = [], 0, 0, 0
        for file in self.files_below(self.find(path)):
            n_bytes += file.stat().st_size
            if n_bytes > MAX_GREP_BYTES:
                n_skipped += 1
                continue
            with open(file, encoding="utf-8", errors="replace", newline="\n") as lines:
                for number, line in enumerate(lines, start=1):
                    folded = line.lower()
                    at = min((found for text in texts if (found := folded.find(text)) >= 0), default=-1)
                    if at >= 0:
                        n_hits += 1
                        if len(hits) < min(max_hits, MAX_HITS):
                            part = line[max(0, at - AROUND_HIT[0]):at + AROUND_HIT[1]].strip()
                            hits.append(f"{self.name_of(file)}:{number}: (character {at}) {part}")
        notes = [f"({n_hits} lines, {len(hits)} shown)"]
        notes += [f"({n_skipped} files were not searched: too much; give a narrower path)"] * bool(n_skipped)
        return "\n".join(notes + hits)

    def write_slot(self, slot: str, source: str, parent: str, hypothesis: str, mechanisms: list[str]) -> str:
        """The file, its entry in proposal.json, and what the cheap gates say of it."""
        slot, parent = slot.removesuffix(".py"), parent.strip()
        if slot not in self.slots:
            raise BadCall(f"there is no slot {slot[:80]!r}; your slots are {', '.join(self.slots)}")
        if (n_bytes := len(source.encode())) > MAX_SOURCE_BYTES:
            raise BadCall(f"not written: {n_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed")
        tree, why = parse_harness(source)
        why = why or lint(tree)
        if not why and not self.is_scored(parent):
            why = f"its parent {parent[:80]!r} is no scored candidate of {self.name_of(self.archive)}"
        if not why and (same := self.same_program(slot, source)):
            why = f"it is the same program as {same}"
        if not why and not hypothesis.strip():
            why = "it has no hypothesis"
        (self.folder / f"{slot}.py").write_text(source, encoding="utf-8")
        self.verdicts[slot] = why
        self.proposals[slot] = {"slot": slot, "parent": parent, "hypothesis": hypothesis, "mechanisms": mechanisms}
        (self.folder / "proposal.json").write_text(
            json.dumps([self.proposals[name] for name in sorted(self.proposals)], indent=1) + "\n", encoding="utf-8")
        verdict = f"Written, but it would be refused: {why}. Write {slot} again." if why else "Written; it looks right."
        return f"{verdict} Still to do: {', '.join(self.left) or 'nothing; call finish'}."

    def is_scored(self, name: str) -> bool:
        return name.isalnum() and (self.archive / name / "score.json").is_file()

    def same_program(self, slot: str, source: str) -> str:
        """The candidate, or another slot, that holds the same program; "" if none does."""
        tried = {path.parent.name: path for path in sorted(self.archive.glob("*/harness.py"))}
        tried |= {other: self.folder / f"{other}.py" for other in self.verdicts if other != slot}
        return next((name for name, path in tried.items()
                     if program_of(path.read_text("utf-8", "replace")) == program_of(source)), "")

    def finish(self, report: str) -> str:
        if self.left and not self.warned:
            self.warned = True
            return f"Not yet: {', '.join(self.left)} unwritten, or not right. Call finish again to leave it so."
        self.report = report[:MAX_REPORT]
        (self.folder / "report.md").write_text(self.report, encoding="utf-8")
        return "The end."


def shorten(text: str, limit: int = MAX_ANSWER) -> str:
    return text if len(text) <= limit else f"{text[:limit - 60]}\n(cut: {len(text)} characters)"
