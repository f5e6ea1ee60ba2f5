"""Writes the paper's splits once, from the hub or from files given by hand, in WHALE's own jsonl form.

    bash run.sh data math --out data/math                   from the hub (pip install datasets==5.2.0)
    bash run.sh data chess --out data/chess --from lichess=lichess_db_puzzle.csv.zst          from a file

A file may have any published form that its environment reads (envs.py), packed as .gz or .zst too; with a file for each
source the hub is not asked. train and harness, and for chess test, are drawn from one pool, each question once; other
tests are data sets of their own. A manifest beside each split holds sources, hashes, seed, counts, and what was dropped
and why. A malformed row stops with file, line and field; one whose reference no reply could meet is dropped.

Differs from the paper:
- math: its 17,917 problems are the distinct ids of DAPO-Math-17K; by others' count about 730 of them repeat another's
  question, and its harness set is drawn from the same rows. Here a question occurs once and harness questions are not
  in train, so train is all that remains, about 16,900 problems: 66 steps an epoch, not 70.
- search: which 18,946 of the 169,615 questions the paper trained on is not published; ours are drawn with the seed.
- chess: drawn from another state of a growing database; the hub revision below is of January 2025, 4.6 million puzzles.
"""

import argparse
import hashlib
import heapq
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from envs import ENVS
from files import UsageError, naming, read_json, refuse_special
from screen import Screen
from tasks import DataError, Row, Task, check_disjoint, question_key, read_rows, read_task

VERSION = 1                                             # another: the same sources and seed give other files
MAX_PLIES = 9                                           # of a chess solution: own moves and replies after the trigger


@dataclass(frozen=True)
class Source:
    """A data set on the hub."""
    hub: str
    revision: str
    split: str
    config: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Which source becomes which split, and the paper's sizes."""
    pool: str
    tests: tuple[str, ...]                              # none: test is drawn from the pool too
    n_train: int
    n_harness: int
    n_test: int                                         # of each test set
    takes_rest: bool = False                            # train is all that the pool has left, unless --n-train is given


FLASHRAG = ("RUC-NLPIR/FlashRAG_datasets", "bcafb8dd07d453be3cbeeeb3f78be1841bddf92c")
SOURCES = {
    "dapo": Source("BytedTsinghua-SIA/DAPO-Math-17k", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", "train"),
    "aime2024": Source("HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train"),
    "aime2025": Source("math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test"),
    "nq_hotpotqa": Source("PeterJinGo/nq_hotpotqa_train", "b7d80abfee334a7a91cb377544f09180d58b34f6", "train"),
    **{name: Source(*FLASHRAG, "test", name) for name in ("nq", "triviaqa", "popqa", "bamboogle")},
    **{name: Source(*FLASHRAG, "dev", name) for name in ("hotpotqa", "2wikimultihopqa", "musique")},    # test: secret
    "lichess": Source("Lichess/chess-puzzles", "725847bd23205470e1c44e558a669a6b42508a0c", "train"),
}
RECIPES = {
    "math": Recipe("dapo", ("aime2024", "aime2025"), 17_917, 256, 30, takes_rest=True),
    "search": Recipe("nq_hotpotqa", ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"),
                     18_946, 256, 100),
    "chess": Recipe("lichess", (), 16_384, 256, 1_024),
}


@dataclass
class Drawn:
    """What became of the rows of one source."""
    rows: list[dict] = field(default_factory=list)      # in WHALE's form, in the order of the draw
    n_read: int = 0
    dropped: dict[str, dict] = field(default_factory=dict)      # by reason: {"n": count, "examples": the first ids}

    def drop(self, reason: str, task_id: str) -> None:
        entry = self.dropped.setdefault(reason, {"n": 0, "examples": []})
        entry["n"] += 1
        if len(entry["examples"]) < 5:
            entry["examples"].append(task_id)


def read_source(name: str, files: list[Path]) -> Iterator[Row]:
    """The rows of a source, numbered through all of its files; from the hub if there are none."""
    rows = (row for path in files for row in read_rows(path)) if files else read_hub(name)
    for number, row in enumerate(rows, start=1):
        yield Row(row.where, number, row.cells)


def read_hub(name: str) -> Iterator[Row]:
    source, by_hand = SOURCES[name], f"give the file by hand: --from {name}=FILE"
    try:
        import datasets  # only here: files need no hub
    except ImportError:
        raise UsageError(f"reading {source.hub} from the hub: pip install datasets==5.2.0; or {by_hand}") from None
    where = f"{source.hub}@{source.revision[:7]}{f' {source.config}' if source.config else ''} {source.split}"
    try:
        table = datasets.load_dataset(source.hub, source.config, split=source.split, revision=source.revision,
                                      streaming=True)
        for number, cells in enumerate(table, start=1):
            yield Row(f"{where}, row {number}", number, cells)
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: cannot be read from the hub: {error}; {by_hand}") from error


def look(env, row: Row, name: str) -> tuple[str, str, Task | None, str]:
    """-> id, the question's key, the task, and why the row is not wanted ("": it is)."""
    if env.name == "chess":                             # no task yet: five million boards would take an hour
        n_plies = len(row.text("Moves").split()) - 1
        unwanted = "" if 1 <= n_plies <= MAX_PLIES else f"solution not of 1 to {MAX_PLIES} plies"
        return row.text("PuzzleId"), row.text("FEN"), None, unwanted
    task = read_task(env, row, name)
    return task.id, question_key(task), task, ""


def own_form(env, row: Row, name: str, task: Task) -> dict:
    """A row in WHALE's form. Ids begin with their source: FlashRAG numbers each of its sets from test_0."""
    task_id = task.id if task.id.startswith((name, task.source)) else f"{task.source}-{task.id}"
    if env.name == "chess":
        return {"id": task_id, "fen": row.text("FEN"), "moves": row.text("Moves"), "source": task.source}
    answer = list(task.answers) if env.name == "search" else task.answer
    return {"id": task_id, "question": task.fields["question"], "answer": answer, "source": task.source}


def draw(env, name: str, rows: Iterator[Row], n: int | None, seed: int, leave_out: Container[str],
         advance: Callable[[], None]) -> Drawn:
    """The `n` questions whose hash under the seed is lowest, in that order, but for the keys in `leave_out`; None: all.

    So which are drawn depends neither on the order of the rows nor on how often one is repeated, a smaller draw is
    the beginning of a larger one, and only `n` rows are held.
    """
    drawn, kept = Drawn(), {}                           # kept: by key, a row in WHALE's form
    ranks: list[tuple[int, str]] = []                   # a heap of (-rank, key): the highest rank on top
    for drawn.n_read, row in enumerate(rows, start=1):
        if drawn.n_read % 1000 == 0:
            advance()
        task_id, key, task, unwanted = look(env, row, name)
        if unwanted:
            drawn.drop(unwanted, task_id)
        elif key in leave_out:
            drawn.drop("asked by a test task too", task_id)
        elif key in kept:
            differs = task and own_form(env, row, name, task)["answer"] != kept[key]["answer"]
            drawn.drop("repeated question" + " with another answer" * bool(differs), task_id)
        else:
            text = f"{seed}\n{key}".encode("utf-8", "surrogatepass")
            rank = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
            if len(ranks) == n and rank > -ranks[0][0]:
                continue
            task = task or read_task(env, row, name)
            if env.find_fault(task):
                drawn.drop("no usable reference", task_id)
                continue
            kept[key] = own_form(env, row, name, task)
            heapq.heappush(ranks, (-rank, key))
            if n is not None and len(ranks) > n:
                del kept[heapq.heappop(ranks)[1]]
    drawn.rows = [kept[key] for _, key in sorted(ranks, reverse=True)]
    return drawn


def draw_splits(domain: str, files: dict[str, list[Path]], sizes: dict[str, int | None], seed: int, drop_overlap: bool,
                screen: Screen) -> tuple[dict[str, list[dict]], dict[str, Drawn]]:
    """-> rows by split, and what became of each source. DataError or UsageError if they cannot be used as they are."""
    env, recipe, draws = ENVS[domain](), RECIPES[domain], {}

    def draw_from(name: str, n: int | None, leave_out: Container[str] = ()) -> list[dict]:
        with screen.bar(f"{name}, thousands of rows", None) as advance:
            draws[name] = draw(env, name, read_source(name, files[name]), n, seed, leave_out, advance)
        return draws[name].rows

    def tasks_of(split: str) -> list[Task]:
        return [env.read(Row(f"{split}.jsonl, line {n}", n, row), split) for n, row in enumerate(splits[split], 1)]

    def asked_in_test() -> set[str]:
        return {question_key(task) for task in tasks_of("test")}

    splits: dict[str, list[dict]] = {"train": [], "harness": [], "test": []}
    for name in recipe.tests:
        splits["test"] += draw_from(name, sizes["test"], asked_in_test())
        if (n := len(draws[name].rows)) < sizes["test"]:
            raise UsageError(f"{name} has {n:,} usable questions; lower --n-test {sizes['test']:,} (rows of each set)")
    wanted = {split: sizes[split] for split in ("harness", "test", "train") if split != "test" or not recipe.tests}
    rows = draw_from(recipe.pool, None if wanted["train"] is None else sum(wanted.values()),
                     asked_in_test() if drop_overlap else ())
    if len(rows) < sum(n or 1 for n in wanted.values()):
        raise UsageError(f"{recipe.pool} has {len(rows):,} usable questions; lower " + " or ".join(
            f"--n-{split} {n:,}" for split, n in wanted.items() if n))
    for split, n in wanted.items():                     # train comes last: --n-train does not change the others
        splits[split], rows = rows[:n], rows[n or len(rows):]
    for split, rows in splits.items():
        if twice := [task_id for task_id, n in Counter(row["id"] for row in rows).items() if n > 1]:
            raise DataError(f"{split}: different questions have the same id: {', '.join(twice[:5])}")
    try:
        check_disjoint(**{split: tasks_of(split) for split in splits})
    except DataError as error:
        raise DataError(f"{error}; --drop-overlap leaves such questions out of train and harness") from None
    return splits, draws


def is_written(out: Path, inputs: dict) -> bool:
    """True if `out` holds the splits of these inputs, unchanged; UsageError if it holds any others."""
    paths = {split: (out / f"{split}.jsonl", out / f"{split}.manifest.json") for split in ("train", "harness", "test")}
    present = [path.name for pair in paths.values() for path in pair if path.exists()]
    wrong = []
    for path, manifest_path in paths.values() if present else ():
        if not path.exists() or not manifest_path.exists():
            wrong.append(f"  {path.name} or its manifest is missing")
            continue
        try:
            manifest = read_json(manifest_path)
            wrong += [f"  {key}: {manifest['inputs'].get(key)!r} then, {value!r} now"
                      for key, value in inputs.items() if manifest["inputs"].get(key) != value]
            if file_sha256(path) != manifest["sha256"]:
                wrong.append(f"  {path.name} was changed after it was written")
        except (UsageError, LookupError, TypeError, AttributeError):
            wrong.append(f"  {manifest_path.name} is no manifest")
    if wrong:
        raise UsageError("\n".join([f"{out} holds other splits than these:", *dict.fromkeys(wrong),
                                    f"Remove {', '.join(present)}, or give another --out."]))
    return bool(present)


def write_splits(out: Path, splits: dict[str, list[dict]], draws: dict[str, Drawn], inputs: dict) -> None:
    """Everything is written aside and then renamed, the manifests last."""
    recipe, texts, manifests = RECIPES[inputs["domain"]], {}, {}
    for split, rows in splits.items():
        texts[f"{split}.jsonl"] = text = "".join(json.dumps(row) + "\n" for row in rows)
        names = recipe.tests if split == "test" and recipe.tests else (recipe.pool,)
        manifests[f"{split}.manifest.json"] = json.dumps({
            "split": split, "rows_written": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "sources": {name: {"rows_read": draws[name].n_read, "rows_drawn": len(draws[name].rows),
                               "dropped": draws[name].dropped} for name in names}, "inputs": inputs}, indent=1) + "\n"
    texts |= manifests
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name, text in texts.items():
            with naming(out / name), open(out / f"{name}.part", "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for name in texts:
            (out / f"{name}.part").replace(out / name)
    finally:
        for name in texts:
            (out / f"{name}.part").unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("domain", choices=RECIPES)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the three splits and their manifests go")
    parser.add_argument("--from", dest="files", action="append", default=[], metavar="NAME=FILE",
                        help="read a source from a file, not from the hub; again for each source, or for more files of "
                        "one. Names: " + "; ".join(f"{domain}: {', '.join((recipe.pool, *recipe.tests))}"
                                                   for domain, recipe in RECIPES.items()))
    parser.add_argument("--seed", type=int, default=42)
    for split in ("train", "harness", "test"):
        sizes = ", ".join(f"{domain} " + ("all that remain" if split == "train" and recipe.takes_rest else
                          f"{getattr(recipe, f'n_{split}'):,}") for domain, recipe in RECIPES.items())
        parser.add_argument(f"--n-{split}", type=int,
                            help=f"rows{' of each test set' if split == 'test' else ''}; default: {sizes}")
    parser.add_argument("--drop-overlap", action="store_true",
                        help="leave questions of the test sets out of train and harness; without it they are an error")


def files_by_source(given: list[str], recipe: Recipe) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {name: [] for name in (recipe.pool, *recipe.tests)}
    for value in given:
        name, _, path = value.partition("=")
        if name not in files or not path:
            raise UsageError(f"--from {value}: give NAME=FILE, where NAME is one of {', '.join(files)}")
        files[name].append(Path(path))
    return files


def command_data(args: argparse.Namespace) -> int:
    recipe, screen, out = RECIPES[args.domain], Screen(), Path(args.out)
    files = files_by_source(args.files, recipe)
    sizes = {"train": None if recipe.takes_rest else recipe.n_train, "harness": recipe.n_harness, "test": recipe.n_test}
    for split in sizes:
        if (n := getattr(args, f"n_{split}")) is not None:
            if n < 1:
                raise UsageError(f"--n-{split} {n}: must be at least 1")
            sizes[split] = n
    inputs = {"version": VERSION, "domain": args.domain, "seed": args.seed, "sizes": sizes,
              "drop_overlap": args.drop_overlap,
              "sources": {name: [{"file": path.name, "sha256": file_sha256(path)} for path in paths]
                          or asdict(SOURCES[name]) for name, paths in files.items()}}
    if is_written(out, inputs):
        screen.say(f"{out} already holds these splits; nothing to do")
    else:
        splits, draws = draw_splits(args.domain, files, sizes, args.seed, args.drop_overlap, screen)
        write_splits(out, splits, draws, inputs)
        show_splits(screen, splits, draws, recipe)
    head = "[0:256]" if args.domain == "chess" else ""  # the paper tests on 256 of its 1,024
    screen.say(shlex.join(["bash", "run.sh", args.domain, "--train", f"{out}/train.jsonl", "--harness-set",
                           f"{out}/harness.jsonl", "--test", f"{out}/test.jsonl{head}"]))
    return 0


def show_splits(screen: Screen, splits: dict[str, list[dict]], draws: dict[str, Drawn], recipe: Recipe) -> None:
    written, read = Table("split", "rows", "in the paper"), Table("source", "rows read", "drawn", "dropped")
    for split, rows in splits.items():
        n_paper = getattr(recipe, f"n_{split}") * (len(recipe.tests) if split == "test" and recipe.tests else 1)
        written.add_row(split, f"{len(rows):,}", f"{n_paper:,}")
    for name, drawn in draws.items():
        dropped = "; ".join(f"{entry['n']:,} x {reason}" for reason, entry in drawn.dropped.items())
        read.add_row(name, f"{drawn.n_read:,}", f"{len(drawn.rows):,}", dropped)
    screen.console.print(read, written)
