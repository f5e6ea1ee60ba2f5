"""Tasks and the files they come from: reading rows of any published format, and what makes a set of tasks usable.

Files are jsonl, json, csv or parquet; the text formats also gzip (.gz) or zstd (.zst). A row that is broken stops the
load with the file, the row and the field; nothing is skipped in silence.
"""

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from files import refuse_special

log = logging.getLogger("whale")

MAX_LINE_CHARS, MAX_JSON_CHARS = 64 << 20, 2 << 30      # of a row, and of a .json file, which is read whole
MAX_TOKEN_CHARS = 64    # of a token, on average over a text: rows of one mark are among the longest
KINDS, PACKINGS = (".jsonl", ".json", ".csv", ".parquet"), (".gz", ".zst")


class DataError(ValueError):
    """A data file that cannot be used; the message names file, row and field."""


@dataclass(frozen=True)
class Task:
    id: str
    fields: dict[str, str]                              # all that a harness sees
    answer: str | tuple[str, ...]                       # never leaves the host process; several: any of them is right
    source: str

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer,) if isinstance(self.answer, str) else self.answer


@dataclass(frozen=True)
class Verdict:
    reward: float                                       # 0 or 1
    why: str                                            # one sentence read by proposers too: never holds the reference
    extracted: str | None                               # what was graded
    kind: str = ""                                      # why it was not solved, in one word; "": the trace tells


@dataclass(frozen=True)
class ToolUse:
    """One request of a harness to a tool of its environment."""
    state: object                                       # what Env.start gave to this rollout
    request: dict
    reply: str                                          # the model's last reply; "" if there is none or it was cut
    turn: int                                           # model calls so far


@dataclass(frozen=True)
class Row:
    """One row of a data file; knows its place, for error messages."""
    where: str
    number: int
    cells: dict

    def error(self, field: str, problem: str) -> DataError:
        return DataError(f"{self.where}: field {field!r} {problem}")

    def get(self, field: str):
        """The value in a column; 'a.b' is entry b of the object in column a."""
        value = self.cells
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            raise self.error(field, "is missing")
        return value

    def text(self, field: str, or_number: bool = False, or_empty: bool = False) -> str:
        value = self.get(field)
        if or_number and type(value) in (int, float) and math.isfinite(value):
            value = str(int(value)) if value == int(value) else repr(value)              # SVAMP's 51.0 is "51"
        if not isinstance(value, str):
            raise self.error(field, f"must be text, not {type(value).__name__} {str(value)[:40]!r}")
        if not value.strip() and not or_empty:
            raise self.error(field, "is empty")
        return value.strip()


def stem_and_kind(path: Path) -> tuple[str, str]:
    """("dev", ".jsonl") of dev.jsonl and of dev.jsonl.gz."""
    unpacked = path.with_suffix("") if path.suffix in PACKINGS else path
    return unpacked.stem, unpacked.suffix


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a jsonl, json, csv or parquet file, one at a time (DAPO has 1.8 million)."""
    n_rows, path = 0, Path(path)
    is_csv = stem_and_kind(path)[1] == ".csv"
    try:
        for n_rows, (place, cells) in enumerate(_read_cells(path), start=1):
            if not isinstance(cells, dict) or None in cells or is_csv and None in cells.values():
                raise DataError(f"{path}, {place}: is not one value for each column")    # csv: None marks a misfit
            yield Row(f"{path}, {place}", n_rows, cells)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not n_rows:
        raise DataError(f"{path}: holds no rows")


def _read_cells(path: Path) -> Iterator[tuple[str, object]]:
    kind = stem_and_kind(path)[1]
    if kind not in KINDS or kind == ".parquet" != path.suffix:
        raise DataError(f"{path}: unknown kind of file; known are {', '.join(KINDS)}, and all but the last packed as "
                        + " or ".join(PACKINGS))
    refuse_special(path)
    if kind == ".parquet":
        import pyarrow.parquet  # only here: the other formats do not need it
        try:
            rows = (row for batch in pyarrow.parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
            yield from ((f"row {n}", row) for n, row in enumerate(rows, start=1))
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise DataError(f"{path}: is not parquet: {error}") from error
        return
    with _open_text(path) as file:
        if kind == ".csv":
            reader = csv.DictReader(_lines(file, path))
            if len(set(reader.fieldnames or ())) < len(reader.fieldnames or ()):
                raise DataError(f"{path}, line 1: names a column twice")
            yield from ((f"line {reader.line_num}", row) for row in reader)
        elif kind == ".json":
            text = file.read(MAX_JSON_CHARS + 1)
            if len(text) > MAX_JSON_CHARS:
                raise DataError(f"{path}: is longer than {MAX_JSON_CHARS >> 20} MiB; make it jsonl, a line a row")
            rows = _parse_json(text, str(path))
            if not isinstance(rows, list):
                raise DataError(f"{path}: must hold a list of rows, not {type(rows).__name__}")
            yield from ((f"row {n}", row) for n, row in enumerate(rows, start=1))
        else:
            for n, line in enumerate(_lines(file, path), start=1):
                if line.strip():
                    yield f"line {n}", _parse_json(line, f"{path}, line {n}")


def _lines(file: io.TextIOBase, path: Path) -> Iterator[str]:
    """The lines, none of which fills the memory: a packed file of megabytes may hold one of gigabytes."""
    for n, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARS + 1), ""), start=1):
        if len(line) > MAX_LINE_CHARS:
            raise DataError(f"{path}, line {n}: is longer than {MAX_LINE_CHARS >> 20} MiB; a row is one line")
        yield line


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    if path.suffix == ".zst":
        return io.TextIOWrapper(io.BufferedReader(_ZstdFile(path), 1 << 20), encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


class _ZstdFile(io.RawIOBase):
    """A .zst file, unpacked as it is read. zstandard's own reader takes a file that was cut off for a whole one."""

    def __init__(self, path: Path):
        self.pieces, self.piece = self._unpack(path), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.piece and (piece := next(self.pieces, None)) is not None:
            self.piece = memoryview(piece)                              # slices of it are not copies
        n_bytes = min(len(buffer), len(self.piece))
        buffer[:n_bytes], self.piece = self.piece[:n_bytes], self.piece[n_bytes:]
        return n_bytes

    @staticmethod
    def _unpack(path: Path) -> Iterator[bytes]:
        try:
            import zstandard  # only here: the other formats do not need it
        except ImportError:
            raise DataError(f"{path}: needs a library that is not installed: pip install zstandard==0.25.0") from None
        frame = None                                    # a file may hold several frames, one after the other
        with open(path, "rb") as file:
            while packed := file.read(1 << 10):         # these may unpack to thirty thousand times as many bytes
                while packed:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    try:
                        yield frame.decompress(packed)
                    except zstandard.ZstdError as error:
                        raise DataError(f"{path}: is not zstd: {error}") from error
                    packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame:
            raise EOFError("its end is missing")


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_dict_of)
    except (ValueError, RecursionError) as error:       # RecursionError: "[" * 100000
        raise DataError(f"{where}: is not JSON: {error}"[:500]) from error


def _dict_of(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object. ValueError where a key stands twice: json.loads would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} stands twice in one object")
    return found


def question_key(task: Task) -> str:
    """The same for two tasks that ask the same, whatever the case and the white space. Of a position: all but its move
    counters; its case tells white from black."""
    if "fen" in task.fields:
        return " ".join([*task.fields["fen"].split()[:4], *list(task.fields.values())[1:]]).strip()
    return " ".join(" ".join(task.fields.values()).casefold().split())


def read_task(env, row: Row, stem: str) -> Task:
    """A row as its environment reads it. An escape such as \\ud800 is half a character, which no tokenizer takes."""
    task = env.read(row, stem)
    if re.search("[\ud800-\udfff]", "".join([task.id, task.source, *task.fields.values(), *task.answers])):
        raise DataError(f"{row.where}: holds half a character, as the escape \\ud800 is")
    return task


def load_tasks(path: str | Path, env) -> list[Task]:
    """The tasks of one file, each question once; a broken row is a DataError, and nothing is returned.

    Dropped, counted and logged: repeated questions (DAPO has each a hundred times); in files with verl columns also
    references that no reply could meet (DeepScaleR has an empty one, and one that lacks a brace); elsewhere an error.
    """
    tasks: dict[str, Task | None] = {}                  # by question; None: no usable reference
    places: dict[str, str] = {}                         # by id
    dropped: Counter[str] = Counter()
    for row in read_rows(path):
        task = read_task(env, row, stem_and_kind(Path(path))[0])
        key = question_key(task)
        if key in tasks:
            other_answer = tasks[key] and tasks[key].answer != task.answer
            dropped["repeated question" + " with another answer" * bool(other_answer)] += 1
        elif why := env.find_fault(task):
            if "reward_model" not in row.cells:
                raise row.error("answer", why)
            tasks[key] = None
            dropped[f"no usable reference in {row.where.rpartition(', ')[2]}"] += 1
        elif task.id in places:
            raise row.error("id", f"{task.id!r} is that of {places[task.id]} too")
        else:
            tasks[key], places[task.id] = task, row.where
    kept = [task for task in tasks.values() if task]
    if dropped:
        what = "; ".join(f"{n} x {reason}" for reason, n in dropped.items())
        log.warning("%s: %d tasks; dropped: %s", path, len(kept), what)
    return kept


def check_disjoint(**splits: list[Task]) -> None:
    """Raises DataError if two splits share an id or a question."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    overlaps = []
    for split_name, tasks in splits.items():
        for task in tasks:
            for key in (("id", task.id), ("question", question_key(task))):
                other, other_id = seen.setdefault(key, (split_name, task.id))
                if other != split_name:
                    overlaps.append(f"{split_name} {task.id!r} and {other} {other_id!r} have the same {key[0]}")
    if overlaps:
        raise DataError(f"splits overlap, {len(overlaps)} times: " + "; ".join(overlaps[:5]))
