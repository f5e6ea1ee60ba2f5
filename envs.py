r"""The environments: tasks, their data files, and the verifiers that decide the binary reward R(x, tau).

A domain is one Env class (name, h0, tools, field_names, load, read, perfect_reply, verify) and one h0 file.

The math verifier: the last `\boxed{}` of the model's last message equals the reference (math_answer.py says when two
answers are the same), or the reward is 0.
"""

import csv
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from math_answer import MAX_ANSWER_CHARS, last_box, same_answer

log = logging.getLogger("whale")


class DataError(ValueError):
    """A data file that cannot be used; the message names file, row and field."""


@dataclass(frozen=True)
class Task:
    id: str
    fields: dict[str, str]                              # all that a harness sees
    answer: str                                         # never leaves the host process
    source: str


@dataclass(frozen=True)
class Verdict:
    reward: float                                       # 0 or 1
    why: str                                            # one sentence read by proposers too: never holds the reference
    extracted: str | None                               # what was graded


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


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a jsonl, json, csv or parquet file, one at a time (DAPO has 1.8 million)."""
    n_rows = 0
    try:
        for n_rows, (place, cells) in enumerate(_read_cells(Path(path)), start=1):
            if not isinstance(cells, dict) or None in cells or str(path).endswith(".csv") and None in cells.values():
                raise DataError(f"{path}, {place}: is not one value for each column")    # csv: None marks a misfit
            yield Row(f"{path}, {place}", n_rows, cells)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not n_rows:
        raise DataError(f"{path}: holds no rows")


def _read_cells(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix not in (".jsonl", ".json", ".csv", ".parquet"):
        raise DataError(f"{path}: unknown kind of file; known are .jsonl, .json, .csv and .parquet")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # only here: the other formats do not need it
        try:
            rows = (row for batch in pyarrow.parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
            yield from ((f"row {n}", row) for n, row in enumerate(rows, start=1))
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: is not parquet: {error}") from error
        return
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from ((f"line {reader.line_num}", row) for reader in [csv.DictReader(file)] for row in reader)
        elif path.suffix == ".json":
            rows = _parse_json(file.read(), str(path))
            if not isinstance(rows, list):
                raise DataError(f"{path}: must hold a list of rows, not {type(rows).__name__}")
            yield from ((f"row {n}", row) for n, row in enumerate(rows, start=1))
        else:
            for n, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {n}", _parse_json(line, f"{path}, line {n}")


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:       # RecursionError: "[" * 100000
        raise DataError(f"{where}: is not JSON: {error}") from error


def question_key(task: Task) -> str:
    """The same for two tasks that ask the same, whatever the case and the white space."""
    return " ".join(" ".join(task.fields.values()).casefold().split())


def load_tasks(path: str | Path, env) -> list[Task]:
    """The tasks of one file, each question once; a broken row is a DataError, and nothing is returned.

    Dropped, counted and logged: repeated questions (DAPO has each a hundred times); in files with verl columns also
    references that no reply could meet (DeepScaleR has an empty one, and one that lacks a brace); elsewhere an error.
    """
    tasks: dict[str, Task | None] = {}                  # by question; None: no usable reference
    places: dict[str, str] = {}                         # by id
    dropped: Counter[str] = Counter()
    for row in read_rows(path):
        task = env.read(row, Path(path).stem)
        key = question_key(task)
        if key in tasks:
            other_answer = tasks[key] and tasks[key].answer != task.answer
            dropped["repeated question" + " with another answer" * bool(other_answer)] += 1
        elif not env.verify(task, env.perfect_reply(task)).reward:
            if "reward_model" not in row.cells:
                raise row.error("answer", f"{task.answer[:80]!r} does not verify against itself")
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


def verify_cases(domain: str, path: str | Path) -> dict:
    """Verdicts on a file of cases (`id`, `reply`, `reference`, `expected`); rows of another `domain` are skipped."""
    n, misses = 0, []
    for row in read_rows(path):
        if row.cells.get("domain", domain) == domain:
            n, reply, expected = n + 1, row.cells.get("reply"), row.get("expected")
            if not isinstance(reply, str | None) or expected not in (0, 1):
                raise row.error("reply", "must be text or null, and field 'expected' 0 or 1")
            case = Task(row.text("id", or_number=True), {}, row.text("reference", or_number=True), "case")
            verdict = ENVS[domain].verify(case, reply)
            if verdict.reward != expected:
                misses.append({"id": case.id, "expected": expected, "got": int(verdict.reward), "why": verdict.why})
    if not n:
        raise DataError(f"{path}: holds no case of {domain}")
    return {"n": n, "as_expected": n - len(misses), "misses": misses}


class MathEnv:
    """Word and competition problems; a stateless Python tool; the answer in a box."""
    name = "math"
    h0 = Path(__file__).parent / "harnesses" / "h0_math.py"
    tools = ("python",)
    field_names = ("question",)
    foreign_instructions = (                            # of DAPO, DAPO, DeepScaleR; a harness words its own format line
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.",
        'Remember to put your answer on its own line after "Answer:".',
        r"Let's think step by step and output the final answer within \boxed{}.",
    )

    @staticmethod
    def load(path: str | Path) -> list[Task]:
        return load_tasks(path, MathEnv)

    @staticmethod
    def read(row: Row, stem: str) -> Task:
        """One row; its columns tell the format: verl (DAPO, DeepScaleR), SVAMP, MATH, AIME, or WHALE, GSM8K, MAWPS."""
        task_id = next((row.cells[k] for k in ("id", "ID", "unique_id") if row.cells.get(k) is not None), None)
        if "prompt" in row.cells:
            match row.get("prompt"):
                case [{"content": str(question)}]:
                    for sentence in MathEnv.foreign_instructions:
                        question = question.removeprefix(sentence).removesuffix(sentence).strip()
                case _:
                    raise row.error("prompt", "must be a list of one message with a text as content")
            answer = row.text("reward_model.ground_truth", or_number=True, or_empty=True)
            extra = row.cells.get("extra_info")
            task_id = extra.get("index") if isinstance(extra, dict) else None
        elif "Body" in row.cells:
            question, answer = f"{row.text('Body')} {row.text('Question')}", row.text("Answer", or_number=True)
        else:
            question = row.text("problem" if "problem" in row.cells else "question")
            answer = row.text("answer", or_number=True).rpartition("####")[2].strip()    # GSM8K's mark
        if not question or not answer and "prompt" not in row.cells:
            raise row.error("answer" if question else "prompt", "is empty but for the format")
        if type(task_id) is int or task_id is None:     # a bare number would collide with those of other files
            task_id = f"{stem}-{row.number if task_id is None else task_id}"
        source = row.cells.get("source") or row.cells.get("data_source") or stem
        for field, value in (("id", task_id), ("source", source)):
            if not isinstance(value, str) or not value:
                raise row.error(field, f"must be text, not {value!r}")
        return Task(task_id, {"question": question}, answer, source)

    @staticmethod
    def perfect_reply(task: Task) -> str:
        return rf"\boxed{{{task.answer}}}"

    @staticmethod
    def verify(task: Task, reply: str | None) -> Verdict:
        """Grades the model's last message, raw text; None if there is none. The rules are at the top of this file."""
        if not reply:
            return Verdict(0.0, "there is no reply", None)
        reply = reply.encode("utf-8", "backslashreplace").decode()                       # no lone surrogate into a log
        reply = reply.rpartition("</think>")[2].partition("<think>")[0]
        boxed = last_box(re.sub(r"<tool_call>.*?(?:</tool_call>|\Z)", " ", reply, flags=re.DOTALL))
        if boxed is None:
            return Verdict(0.0, r"no \boxed{} outside of thinking and tool calls, or the last one is not closed", None)
        if not boxed.strip() or len(boxed) > MAX_ANSWER_CHARS:
            return Verdict(0.0, f"the last box is empty or longer than {MAX_ANSWER_CHARS} characters", boxed[:200])
        if same_answer(task.answer, boxed):
            return Verdict(1.0, "the boxed answer is right", boxed[:200])
        return Verdict(0.0, f"boxed {boxed.strip()[:60]!r}, which is not the reference", boxed[:200])


ENVS = {"math": MathEnv}
