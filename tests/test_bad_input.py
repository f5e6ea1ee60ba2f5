"""Whatever stands in a file, a flag, a server's answer or a model's reply: a verdict, or a refusal that names the file, the line or the
flag. Never a traceback, never a hang, never a silently wrong result. hypothesis draws the examples, the same ones in every run."""

import copy
import gzip
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import chess_game
import cli
import config
import export
import math_answer
import report
import retriever
import rollout
import search_answer
import server_call
import whale
import wire
from chat_endpoint import check_settings_api
from compare import write_comparison
from config import ROOT, Config, load_split, load_splits, make_env
from costs import describe, plan_search
from engine import Completion, ModelError, SamplingParams, load_model, load_tokenizer
from envs import ENVS, verify_cases
from harness_api import is_plain, said_moves
from lint import ForbiddenText, beyond_prompts, find_literals, lint, parse_harness, program_of
from retriever import read_answer, read_request
from rft import CheckpointError, read_checkpoint_record
from rollout import RolloutConfig, parse_tool_calls
from files import UsageError, sha256, write_sealed
from sandbox import Limits, Sandbox
from screen import UNSAFE, Screen
from search_index import Bm25Index, RetrieverError
from server_call import ServerFailed
from server_chat import Chat
from server_engine import Server, ServerEngine
from sessions import ProposerConfig
from small import call
from tasks import DataError, Task
from test_rollout import Scripted

MODEL = str(ROOT / "embedded" / "model")
EMBEDDED = {name: ROOT / "embedded" / name for name in ENVS}
HANGS_S = int(os.environ.get("HANGS_S", 300))


def drawn(n: int, **strategies):
    """A property over n examples."""
    def decorate(test):
        fixed = settings(max_examples=n * int(os.environ.get("TIMES", 1)), derandomize=True, deadline=None, database=None,
                         phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
        return fixed(given(**strategies)(test))
    return decorate


@contextmanager
def within(seconds: float = HANGS_S):
    """What hangs fails, and the other tests go on."""
    def stop(*_):
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _no_hang():
    with within():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder for the examples of a property: hypothesis and tmp_path do not go together."""
    return tmp_path_factory.mktemp("bad")


ODD_TEXTS = ["", " ", "\0", "\ud800", "\u202e", "\x1b[2J", "####", "\\boxed{", "{question}", "9" * 500, "1e999", "<think>", "\ufeff", "é" * 9]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(10**300, 10**301), st.floats(), st.text(max_size=12),
                    st.sampled_from(ODD_TEXTS))
JUNK = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
DEEP = "[" * 100_000
DOMAINS = st.sampled_from(sorted(ENVS))


def refused(result: tuple[int, str], *words: str) -> str:
    """The refusal of a command; asserts that it is one, with these words in it."""
    code, output = result
    assert code in (1, 2) and "Traceback" not in output, output
    for word in words:
        assert str(word) in output, output
    return output


# ---- 1. task files, corpora, case files -------------------------------------------------------------------------------


@cache
def real_rows(domain: str) -> tuple[str, ...]:
    return tuple((EMBEDDED[domain] / "test.jsonl").read_text().splitlines()[:4])


@cache
def env_of(domain: str):
    return ENVS[domain]()


def perfect(env, task: Task) -> float:
    """The reward of what must be right."""
    if not env.by_state:
        return env.verify(task, env.perfect_reply(task)).reward
    game, _ = env.start(task)
    for turn, move in enumerate(task.answer.split()[::2]):
        game.play(move, move, turn)
    return env.verify(task, move, game).reward


def check_tasks(env, tasks: list[Task]) -> None:
    """What was read can be asked, answered, graded and written."""
    assert tasks and len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        assert perfect(env, task) == 1.0
        json.dumps(asdict(task), allow_nan=False, ensure_ascii=False).encode()
        assert all(isinstance(value, str) for value in task.fields.values()) and task.answers


CELLS = st.sampled_from(("id", "question", "answer", "fen", "moves", "source", "prompt", "reward_model", "extra_info", "Body", "golden_answers"))


@drawn(150, domain=DOMAINS, row=st.integers(0, 3), field=CELLS, value=JUNK, how=st.sampled_from(("set", "drop", "rename", "twice", "copy id")))
def test_a_changed_cell_is_read_or_refused_by_line(place, domain, row, field, value, how):
    """And the other rows of the file are what they were."""
    env, rows = env_of(domain), [json.loads(line) for line in real_rows(domain)]
    lines = list(real_rows(domain))
    if how == "set":
        lines[row] = json.dumps(rows[row] | {field: value})
    elif how == "copy id":
        lines[row] = json.dumps(rows[row] | {"id": rows[(row + 1) % 4]["id"]})
    elif field in rows[row]:
        found = rows[row].pop(field)
        lines[row] = json.dumps(rows[row] | ({field + "s": found} if how == "rename" else {}))
        if how == "twice":
            lines[row] = f'{{"{field}": {json.dumps(value)}, ' + json.dumps(rows[row] | {field: found})[1:]
    path = place / "cell.jsonl"
    path.write_text("\n".join(lines))
    try:
        tasks = env.load(path)
    except DataError as error:
        assert f"{path}, line " in str(error) and len(str(error)) < 1000
        return
    check_tasks(env, tasks)
    assert how not in ("copy id", "twice") or lines[row] == real_rows(domain)[row]
    whole = {task.id: task for task in env.load(EMBEDDED[domain] / "test.jsonl")[:4]}
    expected = [task for number, task in enumerate(whole.values()) if number != row]
    assert [task for task in tasks if whole.get(task.id) == task and task in expected] == expected


BYTES = st.one_of(st.sampled_from((b"\xef\xbb\xbf", b"\r\n", b"\n\n", b"\0", b"\xff", b"\xc3", b"NaN", b"Infinity", b"9" * 5000, b'"', b"}",
                                   b"{", b"[", b"\\ud800", b"\\", b",", b"1e999", DEEP.encode(), b"\x1f\x8b", b"PAR1")), st.binary(max_size=4))


@drawn(150, domain=DOMAINS, at=st.integers(0, 600), piece=BYTES, n_cut=st.sampled_from((0, 0, 1, 7, 300)),
       ending=st.sampled_from((".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".jsonl.zst", ".txt")), packed=st.booleans())
def test_changed_bytes_are_read_or_refused_by_file(place, domain, at, piece, n_cut, ending, packed):
    content = "\n".join(real_rows(domain)).encode()
    content = content[:at] + piece + content[at + n_cut:]
    path = place / f"bytes{ending}"
    path.write_bytes(gzip.compress(content, mtime=0)[:-3 * n_cut or None] if packed else content)
    try:
        check_tasks(env_of(domain), env_of(domain).load(path))
    except DataError as error:
        assert str(path) in str(error) and len(str(error)) < 1000


def make_special(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.jsonl"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "unreadable":
            path.write_text("x")
            path.chmod(0)
    return path


DOORS = {
    "train": ["math", "--train"], "harness set": ["math", "--harness-set"], "test": ["chess", "--test"], "slice": ["math", "--train"],
    "harness": ["math", "--harness"], "check-harness": ["check-harness", "math"], "cases": ["verify", "math", "--cases"],
    "reply": ["verify", "math", "--reference", "1", "--reply-file"], "corpus": ["search", "--retriever"], "served": ["retriever", "--corpus"],
    "snippet": ["sandbox"], "data": ["data", "math", "--out", "OUT", "--from"],
}


@pytest.mark.parametrize("kind", ("pipe", "device", "folder", "loop", "missing", "unreadable"))
@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_file_is_refused_at_every_door(tmp_path, door, kind):
    if kind == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = make_special(kind, tmp_path)
    given = f"{path}[0:2]" if door == "slice" else f"dapo={path}" if door == "data" else path
    words = [tmp_path / "out" if word == "OUT" else word for word in DOORS[door]]
    out = ["--out", tmp_path / "out"] if words[0] in ("math", "search", "chess") else []
    refused(call(*words, given, *out), path)


@pytest.mark.parametrize("words", (["check-harness", "math"], ["sandbox"], ["verify", "math", "--reference", "1", "--reply-file"], ["math", "--harness"]),
                         ids=" ".join)
def test_a_file_that_would_fill_the_memory_is_refused_by_name(tmp_path, words):
    path = tmp_path / "huge.py"
    path.touch()
    os.truncate(path, 1 << 40)                          # takes no room on disk
    refused(call(*words, path, *(["--out", tmp_path / "out"] if words[0] == "math" else [])), path, "is larger than")


def test_a_huge_file_of_a_run_is_refused_by_name(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for name in ("final_harness.py", "config.json", "summary.json", "metrics.jsonl", "state.json"):
        content = (tmp_path / "run" / name).read_bytes()
        os.truncate(tmp_path / "run" / name, 1 << 40)
        refused(call("report", tmp_path / "run"), name, "is larger than")
        (tmp_path / "run" / name).write_bytes(content)


def test_packed_cases_are_read_and_a_reference_has_a_limit(tmp_path):
    """To parse one of a megabyte would take hours; of the same length in a data file, it does not verify against itself."""
    row = {"id": "a", "reply": "\\boxed{1}", "reference": "1", "expected": 1}
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert verify_cases("math", path)["as_expected"] == 1 and call("verify", "math", "--cases", path)[0] == 0
    endless = "\\boxed{" * 100_000 + "1" + "}" * 100_000
    path.write_bytes(gzip.compress(json.dumps(row | {"reference": endless}).encode()))
    refused(call("verify", "math", "--cases", path), path, "line 1", "reference", "is longer than")
    (tmp_path / "reply").write_text("\\boxed{1}")
    refused(call("verify", "math", "--reply-file", tmp_path / "reply", "--reference", endless[:3000]), "reference", "is longer than")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a", "question": "q", "answer": endless}))
    refused(call("math", "--train", tasks, "--out", tmp_path / "out"), tasks, "line 1")


MANIFESTS = {"a list": b"[1]", "a number": b"5", "null": b"null", "deep": DEEP.encode(), "inputs": b'{"inputs": [1], "sha256": 1}', "no UTF-8": b"\xff"}


@pytest.mark.parametrize("kind", (*MANIFESTS, "pipe", "folder"))
def test_a_manifest_that_is_none_is_refused(tmp_path, kind):
    """Of splits, of an index, and of a checkpoint."""
    folder = tmp_path / "made"
    folder.mkdir()
    for name in ("train.manifest.json", "manifest.json", "trainer.json"):
        match kind:
            case "pipe":
                os.mkfifo(folder / name)
            case "folder":
                (folder / name).mkdir()
            case _:
                (folder / name).write_bytes(MANIFESTS[kind])
    (folder / "train.jsonl").touch()
    sources = [f"--from={name}={EMBEDDED['math'] / split}.jsonl" for name, split in (("dapo", "train"), ("aime2024", "harness"), ("aime2025", "test"))]
    refused(call("data", "math", "--out", folder, *sources), folder, "train.manifest.json")
    for more in ((), ("--build",)):
        refused(call("retriever", "--corpus", EMBEDDED["search"] / "corpus.jsonl", "--index", folder, *more), f"--index {folder}")
    with pytest.raises(CheckpointError, match="trainer.json"):
        read_checkpoint_record(folder)


@pytest.mark.parametrize("record", (5, [], {}, {"sha256": []}, {"sha256": {"x": 1}}), ids=str)
def test_a_checkpoint_record_of_another_kind_is_refused(tmp_path, record):
    """Its seal fits: whoever makes a folder can seal it."""
    (tmp_path / "trainer.json").write_text(json.dumps({"record": record, "sha256": sha256(json.dumps(record, sort_keys=True))}))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_checkpoint_record(tmp_path)


FILES = {
    "empty": b"", "blank": b"\n \n\r\n", "deep": DEEP.encode(), "cut": b'{"id": "a", "question": "b"', "a long line": b'{"id": "' + b"a" * 10_000_000,
    "not UTF-8": b"\xff\xfe{}", "a number": b"5", "a list": b"[1]", "null": b"null", "a huge number": b'{"id": "a", "question": "q", "answer": '
    + b"9" * 5000 + b"}", "NaN": b'{"id": "a", "question": "q", "answer": NaN}', "no answer": b'{"id": "a", "question": "q", "answer": ""}',
    "gzip": gzip.compress(b"{}"), "parquet": b"PAR1" + b"\0" * 64 + b"PAR1", "NUL": b"\0" * 100,
    "a list as answer": b'{"id": "a", "question": "q", "answer": ["1"]}', "half a character": b'{"id": "a", "question": "q \\ud800", "answer": "1"}',
    "an answer twice": b'{"id": "a", "question": "q", "answer": "1", "answer": "2"}',
}


@pytest.mark.parametrize("door", ("train", "cases", "data"))
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_refused_by_name(tmp_path, door, name):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FILES[name])
    words = [tmp_path / "out" if word == "OUT" else word for word in DOORS[door]]
    if door == "data":
        words = [*words[:-1], *(f"--from={source}={path}" for source in ("dapo", "aime2024", "aime2025"))]
        refused(call(*words), path)
        return
    output = refused(call(*words, path, *(["--out", tmp_path / "out"] if door == "train" else [])), path)
    assert len(output) < 2000


@pytest.mark.parametrize("rows", ("[0:5]", "[4:]", "[5:]", "[:99]", "[2:2]", "[3:1]", "[-2:]", "[:-1]", "[0:1:2]", "[a:b]", "[999999999999999999999:]",
                                  "[:" + "9" * 5000 + "]", "[]", "[1]"))
def test_rows_that_are_not_there_are_refused(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(real_rows("math")))
    assert len(load_split(env_of("math"), f"{path}[1:4]")) == 3 and len(load_split(env_of("math"), f"{path}[:]")) == 4
    refused(call("math", "--train", f"{path}{rows}", "--out", tmp_path / "out"), "rows.jsonl")


@drawn(100, field=st.sampled_from(("id", "contents", "title", "text")), value=JUNK, at=st.integers(0, 200), piece=BYTES, cut=st.booleans())
def test_a_corpus_is_indexed_or_refused_by_line(place, field, value, at, piece, cut):
    lines = (EMBEDDED["search"] / "corpus.jsonl").read_text().splitlines()[:3]
    lines[1] = json.dumps(json.loads(lines[1]) | {field: value})
    content = "\n".join(lines).encode()
    path = place / "corpus.jsonl"
    path.write_bytes(content[:at] + piece + content[at:] if cut else content)
    try:
        index = Bm25Index.open(path, None)
    except RetrieverError as error:
        assert str(path) in str(error) and len(str(error)) < 1000
        return
    for hits in index.search(["town river mayor", "\ud800", "", "\0"], 5):
        json.dumps([asdict(hit) for hit in hits], ensure_ascii=False).encode()


@drawn(100, domain=DOMAINS, field=st.sampled_from(("id", "reply", "reference", "expected", "fen", "domain")), value=JUNK, drop=st.booleans())
def test_a_case_is_graded_or_refused_by_line(place, domain, field, value, drop):
    row = {"id": "a", "reply": "x", "reference": "a7a8" if domain == "chess" else "1", "expected": 0, "fen": "5k2/RN6/5K2/8/8/8/8/8 w - - 0 1"}
    path = place / "cases.jsonl"
    row = {key: cell for key, cell in row.items() if not drop or key != field} | ({} if drop else {field: value})
    path.write_text("\n" + json.dumps(row))
    try:
        result = verify_cases(domain, path)
        assert result["n"] == 1 and len(result["misses"]) + result["as_expected"] == 1
    except DataError as error:
        assert str(path) in str(error) and ("line 2" in str(error) or f"no case of {domain}" in str(error))


# ---- 2. harness files -------------------------------------------------------------------------------------------------


H0 = {name: env.h0.read_text() for name, env in ENVS.items()}
WORDS = sorted(set(re.findall(r"\w+|[^\w\s]|\n +", "".join(H0.values())))) + [
    "lambda", ":=", "match", "async", "await", "@", "f'{", "'''", "\\", "**", "<<", "9" * 4999, "0x" + "f" * 5000, "1e999", "\f", "\t", "...", "type X = int"]
FORBIDDEN = ForbiddenText([Task("a", {"question": "How many eggs are in nine boxes and five bags, said Mia?"}, "844", "nano-math")])


def check_source(source: str) -> str:
    """All that reads a harness as text -> why it is refused."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tree, why = parse_harness(source)
        assert isinstance(program_of(source), str)
        for h0 in H0.values():
            assert isinstance(beyond_prompts(source, h0), str)
        why = why or lint(tree) or find_literals(tree, FORBIDDEN)
    assert not warned and isinstance(why, str) and len(why) < 1000 and not UNSAFE.search(why)
    return why


@drawn(120, words=st.lists(st.sampled_from(WORDS), max_size=60), glue=st.sampled_from(("", " ")))
def test_token_soup_is_no_harness(words, glue):
    assert check_source(glue.join(words))


@drawn(100, source=st.text(max_size=300) | st.binary(max_size=300).map(lambda content: content.decode("latin-1")))
def test_noise_is_no_harness(source):
    assert check_source(source)


@drawn(150, domain=DOMAINS, at=st.integers(0, 60), how=st.sampled_from(("delete", "twice", "swap", "cut")), piece=st.sampled_from(
    ["", "\t", "\f", "\0", "\ufeff", "\u202e", "\u2066", "\ud800", "\r", "\x1b[2J", "x" * 20_001, "(" * 300, "[" * 3000, "-" * 5000 + "1", "1+" * 4000 + "1",
     "f'{" * 100, "a." * 4000 + "b", "'" + "\\N{DASH}" * 10, "9" * 4301, "0x" + "f" * 9000, "'\\d'", "x is 1", "print 'a'", "type X = int", "\\"]))
def test_a_changed_h0_is_a_harness_or_refused(domain, at, how, piece):
    lines = H0[domain].splitlines()
    at %= len(lines)
    if how == "delete":
        lines[at:at + 1] = [piece] * bool(piece)
    elif how == "twice":
        lines[at:at] = [lines[at], piece]
    elif how == "swap":
        lines[at], lines[-1] = lines[-1] + piece, lines[at]
    else:
        lines[at] = lines[at][:len(lines[at]) // 2] + piece
    why = check_source("\n".join(lines))
    if re.search("[\0\u202e\u2066\ud800\x1b]", piece):
        assert re.search(r"line \d+: the character U\+", why), why


@pytest.mark.parametrize("code", (0x202E, 0x2066, 0x200F, 0x061C, 0x1B, 0x9B, 0x08, 0x00, 0xD800, 0x0D))
@pytest.mark.parametrize("place", ("comment", "string", "name"))
def test_what_reads_as_something_else_is_refused_with_its_line(code, place):
    text = {"comment": f"# no {chr(code)} harm", "string": f"A = 'a{chr(code)}b'", "name": f"a{chr(code)}b = 1"}[place]
    assert check_source(f"{H0['math']}\n\n{text}\n").startswith(f"line {len(H0['math'].splitlines()) + 3}: the character U+{code:04X} ")
    assert check_source(H0["math"].replace("\n", "\r\n") + "\r\n") == ""                      # Windows' line ends are not hidden


def test_check_harness_refuses_every_file_that_is_none(tmp_path, monkeypatch):
    """As a command: the engine is never asked, so it is none."""
    monkeypatch.setattr(cli, "open_engine", lambda cfg: nullcontext())
    monkeypatch.setattr(cli, "closing", lambda thing: nullcontext())
    splits = load_splits(Config("math"))
    monkeypatch.setattr(cli, "load_splits", lambda cfg: splits)
    monkeypatch.setattr(whale, "load_splits", lambda cfg: splits)
    contents = {
        "empty": b"", "other encoding": "# é".encode("utf-16"), "latin-1": b"# \xe9", "too long": b"#" * 20_001, "words": b"This is no Python.",
        "newer": b"type X = int\ndef run[T](task): yield", "nested": b"(" * 10_000, "sums": b"x = " + b"1+" * 9000 + b"1", "BOM": b"\xef\xbb\xbf" + H0["math"].encode(),
        "NUL": b"\0", "elf": b"\x7fELF" + bytes(range(256)), "syntax": b"def run(task):\n  yield 1\n yield 2", "escape": H0["math"].encode() + b"# \x1b[2J"}
    for name, content in contents.items():
        path = tmp_path / f"{name}.py"
        path.write_bytes(content)
        output = refused(call("check-harness", "math", path))
        assert str(path) in output or "contract" in output, (name, output)
        assert not UNSAFE.search(output), (name, output)
        refused(call("math", "--harness", path, "--out", tmp_path / "out"), path)


# ---- 3. run directories -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worn(finished, tmp_path_factory) -> Path:
    """A copy of a finished run that a test may damage and must mend."""
    folder = tmp_path_factory.mktemp("worn") / "arms" / "a"
    shutil.copytree(finished, folder)
    (folder.parent.parent / "compare.json").write_text(json.dumps({
        "arms": {"a": "whale"}, "machines": {"a": "m"}, "varies": ["method", "seed"], "commands": ["c"], "domain": "math", "rollouts": 1}))
    return folder


def readers(run: Path, out: Path) -> dict:
    """All that reads a run which is not its own."""
    return {"report": lambda: report.write_report(run), "compare": lambda: write_comparison(run.parent.parent),
            "export": lambda: export.export_run(run, out, "best", "float32")}


class Page(HTMLParser):
    """Every element of a page is closed, and it has no script and no way out."""
    VOID = {"meta", "br", "hr", "img", "link", "input", "path", "circle", "line", "rect", "use", "polyline", "polygon"}

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], self.open[-5:]

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "iframe", "object", "base", "form", "img") and not any(name.startswith("on") for name, _ in attributes), tag
        assert all(name != "href" or value.startswith("#") for name, value in attributes if name in ("href", "src")), attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, tag


def check_reader(reader: str, worn: Path, out: Path) -> None:
    try:
        readers(worn, out)[reader]()
    except (UsageError, ModelError) as error:
        assert str(worn.parent.parent) in str(error) and len(str(error)) < 3000, error
    shutil.rmtree(out, ignore_errors=True)


DAMAGES = ("removed", "empty", "half", "flipped", "null", "list", "object", "number", "deep", "folder", "loop", "pipe")


READERS = st.sampled_from(("report", "report", "report", "compare", "export"))


@drawn(30, reader=READERS, number=st.integers(0, 10_000), damage=st.sampled_from(DAMAGES))
def test_a_damaged_run_is_reported_or_refused_by_name(worn, place, without_weights, reader, number, damage):
    files = sorted(path for path in worn.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".txt", ".py", ".md"))
    path = files[number % len(files)]
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "removed":
            pass
        case _:
            flipped = bytes([*content[:number % max(1, len(content))], number % 256])
            path.write_bytes({"empty": b"", "half": content[:len(content) // 2], "null": b"null\n", "list": b"[]\n", "object": b"{}\n", "number": b"5\n",
                              "deep": DEEP.encode(), "flipped": flipped + content[len(flipped):]}[damage])
    try:
        check_reader(reader, worn, place / "out")
    finally:
        path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)
        path.write_bytes(content)


@pytest.fixture
def without_weights(monkeypatch):
    """No weights are exported here: what is read before them is looked at."""
    def export_model(checkpoint, base, out, dtype):
        out.mkdir()
        return 0.5

    monkeypatch.setattr(export, "export_model", export_model)


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    """The places in a JSON value, itself among them."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in items for place in leaves(part, (*path, key)))]


def put(value: object, path: tuple, new: object) -> object:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


NAMES = ("config.json", "state.json", "summary.json", "metrics.jsonl", "*/*/history.jsonl", "*/*/acceptance.json", "*/*/*/score.json", "eval/*.jsonl",
         "rollouts/*.jsonl")


@drawn(40, reader=READERS, name=st.sampled_from(NAMES), which=st.integers(0, 10**6), value=JUNK | st.sampled_from((-1, 10**400, float("inf"), "/etc/passwd", "<script>")))
def test_a_run_with_another_value_is_reported_or_refused(worn, place, without_weights, reader, name, which, value):
    paths = sorted(worn.glob(name))
    path = paths[which % len(paths)]
    content = path.read_text()
    lines = content.splitlines() if path.suffix == ".jsonl" else [content]
    line = which % len(lines)
    record = json.loads(lines[line])
    places = leaves(record)
    record = put(record, places[which % len(places)], value)
    if isinstance(record, dict) and record.pop("sha256", None):
        record["sha256"] = sha256(json.dumps(record))               # else all that is found is that it does not fit
    lines[line] = json.dumps(record)
    changed = "\n".join(lines) + "\n"
    kept = (worn / "state.json").read_text()
    path.write_text(changed)
    if name == "metrics.jsonl":
        state = json.loads(kept) | {"metrics_bytes": len(changed.encode()), "metrics_sha256": sha256(changed)}
        state.pop("sha256")
        write_sealed(worn / "state.json", state)
    try:
        check_reader(reader, worn, place / "out")
        if (worn / "report.html").exists():
            Page((worn / "report.html").read_text())
    finally:
        (worn / "state.json").write_text(kept)
        path.write_text(content)
        report.rewards_of.cache_clear()


@pytest.mark.parametrize("words", (["report"], ["export", "--out", "OUT"], ["eval", "math", "--model"]))
@pytest.mark.parametrize("kind", ("missing", "empty", "file", "pipe", "other"))
def test_what_is_no_run_is_refused(tmp_path, words, kind):
    path = tmp_path / "run"
    {"missing": lambda: None, "empty": path.mkdir, "file": path.touch, "pipe": lambda: os.mkfifo(path), "other": path.mkdir}[kind]()
    if kind == "other":
        (path / "config.json").write_text("[]")
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    out = [] if words[0] != "eval" else ["--out", tmp_path / "out", "--test", f"{EMBEDDED['math']}/test.jsonl[:1]"]
    refused(call(*words, path, *out), path)


@pytest.mark.parametrize("name", ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"))
@pytest.mark.parametrize("damage", ("removed", "half", "null", "noise"))
def test_a_damaged_model_is_loaded_or_refused_by_name(tmp_path, name, damage):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    (folder / name).unlink(missing_ok=True)
    if damage != "removed":
        (folder / name).write_bytes({"half": content[:len(content) // 2], "null": b"null", "noise": b"\xff" * 64}[damage])
    try:
        load_tokenizer(str(folder))
        load_model(str(folder))
    except ModelError as error:
        assert str(folder) in str(error)


# ---- 4. flags ---------------------------------------------------------------------------------------------------------


NUMBERS = ("0", "-1", "1", "1e30", "1" + "0" * 30, "9" * 5000, "nan", "inf", "-inf", "-0.0", "0.5", "1e-300", "2", "x", "", " ", "1_000", "0x10", "٣", "1,5", "None")
TEXTS = ("", " ", "../..", "a/b", "/", ".", "..", "a\nb", "\x1b[2J", "\u202e", "é", "x" * 5000, "-", "--seed", "a,b", ",", "{}", "%s", "\udcff", "http://", "file:///etc/passwd",
         "http://a:b@c", "https://[", "http://127.0.0.1:99999", "1,2", "nan,nan", "landlock", "whale", "~", "$HOME", "x" * 300)
KNOBS = [knob for knob in fields(Config) if knob.name not in ("domain", "out")]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Accepted(Exception):
    """A run has passed all that is checked before a model is loaded."""


embedded_splits = cache(lambda domain: load_splits(Config(domain)))
parser = cache(cli.build_parser)


@pytest.fixture
def begin(tmp_path_factory, monkeypatch):
    """Runs a command up to the loading of a model -> its settings, or what it said when it refused."""
    def lead(cfg, env, ranks):
        raise Accepted(cfg)

    def load(cfg):
        for value in filter(None, (cfg.train, cfg.harness_set, cfg.test)):
            load_split(env_of(cfg.domain), value)
        env, splits = embedded_splits(cfg.domain)
        return make_env(cfg) if cfg.retriever or cfg.judge_url else env, splits

    def run(*words: str) -> tuple[Config | None, str]:
        try:
            return None, refused(call(*words, "--out", tmp_path_factory.mktemp("flags")))
        except Accepted as accepted:
            return accepted.args[0], ""

    monkeypatch.setattr(whale.team, "lead", lead)
    monkeypatch.setattr(cli, "build_parser", parser)
    monkeypatch.setattr(whale, "code_version", lambda: "a test")
    monkeypatch.setattr(config, "hash_model", lambda model: "")
    monkeypatch.setattr(config, "find_commit", lambda name, revision, ask_hub: "")         # no test asks the hub
    monkeypatch.setattr(config, "hash_tasks", lambda tasks: "")
    monkeypatch.setattr(whale, "load_splits", load)
    return run


def check_settings(cfg: Config) -> None:
    """What was accepted can be run."""
    for knob in KNOBS:
        value = getattr(cfg, knob.name)
        if isinstance(value, float | int):
            assert math.isfinite(value) and 0 <= value < 2**63, (knob.name, value)
        else:
            assert not UNSAFE.search(value) and "\n" not in value
    assert 0 < cfg.top_p <= 1 and cfg.temperature <= 100 and 0 < cfg.lr <= 1 and cfg.beta1 < 1 and cfg.beta2 < 1 and cfg.max_grad_norm > 0
    assert cfg.max_len >= 16 and cfg.max_calls and cfg.group_size and cfg.n_eval and cfg.n_rows <= 1 << 16 and cfg.tool_s <= 3600
    assert re.fullmatch("cpu|cuda(:[0-9]+)?", cfg.device) and cfg.run_dir.resolve().parent == Path(cfg.out).resolve()
    assert describe(plan_search(cfg, 1024, 256, 256), cfg)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_flag_refuses_what_makes_no_sense(begin, knob):
    """Or the run begins with a value that does. Every field of Config, so that a new one is met here too."""
    values = NUMBERS if knob.type in (int, float, "int", "float") else (*TEXTS, "0", "nan")
    for value in values:
        cfg, output = begin("math", f"{flag(knob.name)}={value}")
        if cfg is None:
            assert "--" in output or value and (value[:9] in output or str(Path(value))[:9] in output), (value, output)
        else:
            check_settings(cfg)


@drawn(60, domain=DOMAINS, method=st.sampled_from(("whale", "adaptive", "weight", "harness", "fst", "stagewise")), pairs=st.lists(st.tuples(
    st.sampled_from([knob.name for knob in KNOBS if knob.type in (int, float, "int", "float")]), st.sampled_from(("0", "1", "2", "3", "0.5", "100", "1e6"))),
    min_size=1, max_size=3))
def test_settings_that_contradict_each_other_are_refused(begin, domain, method, pairs):
    cfg, output = begin(domain, "--method", method, *(f"{flag(name)}={value}" for name, value in pairs))
    if cfg is None:
        assert "--" in output
    else:
        check_settings(cfg)


@pytest.mark.parametrize("words", (
    ["math", "--sed", "1"], ["math", "--seed"], ["math", "extra"], ["math", "--cases", "x"], ["verify", "math", "--seed", "1"], ["verify", "math"],
    ["verify", "math", "--cases", "x", "--reply-file", "y"], ["verify", "chess", "--reply-file", "/dev/null", "--reference", "e4"], ["eval", "math", "--n", "0"],
    ["eval", "math", "--n", "1" + "0" * 30], ["eval", "poker"], ["poker"], [], ["compare", "math", "--seeds", "0"], ["compare", "math", "--seeds", "1" + "0" * 12],
    ["compare", "math", "--methods", ""], ["compare", "math", "--methods", "whale,whale"], ["compare", "math", "--schedules", "nan:2"],
    ["compare", "math", "--schedules", "inf:2"], ["compare", "math", "--schedules", "1:" + "9" * 5000], ["compare", "math", "--schedules", ""],
    ["compare", "math", "--methods", "whale", "--schedules", "1:2"], ["compare", "math", "--jobs", "-1"], ["sandbox", "/etc/hostname", "--seconds", "nan"],
    ["sandbox", "/etc/hostname", "--mb", "-5"], ["sandbox", "/etc/hostname", "--waive", "walls"], ["report"], ["export", "x"], ["export", "x", "--out", "/tmp"],
    ["retriever", "--corpus", "x", "--port", "-1"], ["retriever", "--corpus", "x", "--port", "70000"], ["retriever", "--corpus", "x", "--topk", "0"],
    ["data", "math", "--out", "x", "--n-train", "0"], ["data", "math", "--out", "x", "--from", "dapo"], ["data", "math", "--out", "x", "--from", "=x"],
    ["bench", "--only", "speed"], ["gpu-check", "--device", "tpu"], ["search-harness", "math", "--method", "weight"], ["math", "--model", "no/where/at/all"],
    ["math", "--judge-url", "http://localhost"], ["math", "--engine", "server"], ["math", "--urls", "http://localhost"], ["math", "--proposer", "api"]),
    ids=lambda words: " ".join(words)[:60])
def test_words_that_make_no_command_are_refused(tmp_path, words):
    assert refused(call(*words, *(["--out", tmp_path / "out"] if words[:1] in (["math"], ["compare"], ["eval"]) else []))).count("\n") < 60


WORDS_WITH_PATHS = (["export", "RUN", "--out"], ["report"], ["sandbox"], ["verify", "math", "--cases"], ["data", "math", "--out"], ["retriever", "--corpus"],
                    ["check-harness", "math"], ["math", "--out"], ["math", "--name"], ["gpu-check", "--out"], ["bench", "--quick", "--out"])


@pytest.mark.parametrize("words", WORDS_WITH_PATHS, ids=" ".join)
def test_a_name_that_is_no_text_is_refused(finished, words):
    """As Linux allows and this program's own records and libraries' do not."""
    refused(call(*(finished if word == "RUN" else word for word in words), "caf\udce9"), r"'caf\udce9'", "UTF-8")


@pytest.mark.parametrize("host", ("x" * 70, "a..b", "\u2488com"))
def test_a_host_that_cannot_be_is_refused(tmp_path, monkeypatch, host):
    """Python's codec for names of hosts raises neither OSError nor what a library has for it."""
    monkeypatch.setattr(retriever, "BACKOFF_S", 0.0)
    monkeypatch.setattr(search_answer, "BACKOFF_S", 0.0)
    refused(call("retriever", "--corpus", EMBEDDED["search"] / "corpus.jsonl", "--port", "0", "--host", host), f"--host {host}")
    url = f"http://{host}:9/v1"
    with pytest.raises(retriever.RetrieverDown, match=url):
        retriever.open_retriever(url).search(["a"], 1)
    with pytest.raises(ServerFailed, match=url):
        server_call.Client().call(url, "GET", "/models")
    with pytest.raises(search_answer.JudgeDown):
        search_answer.Judge(url, "m").check()
    with pytest.raises(UsageError, match=url):
        check_settings_api(ProposerConfig(proposer_url=url))


def fall(tmp_path: Path, code: str, **changes) -> str:
    """What the program says, as it is started, where this happens in it."""
    (tmp_path / "broken.py").write_text(f"import stop, sys, threading\nstop.listen()\n{code}\n")
    env = os.environ | {"PYTHONPATH": str(ROOT), "SOME_KEY": "canary-in-a-key", "TMPDIR": str(tmp_path)} | changes
    done = subprocess.run([sys.executable, tmp_path / "broken.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "TypeError" in done.stderr and "canary" not in done.stderr
    return done.stderr


def test_what_nobody_foresaw_is_one_line_without_secrets(tmp_path):
    """The whole is kept in a file, or shown where it is asked for; without secrets too."""
    code = "raise TypeError('no such canary-in-a-key')"
    line = fall(tmp_path, code, WHALE_TRACEBACK="")
    kept, = tmp_path.glob("whale-fault-*.txt")
    assert "no such [SOME_KEY]" in line and line.count("\n") == 1 and line.endswith(f"{kept}\n")
    assert kept.read_text() == fall(tmp_path, code, WHALE_TRACEBACK="1") and 'broken.py", line 3' in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [
    "raise TypeError('x' * 995 + ' canary-in-a-key')", r"raise TypeError('CUDA\nerror\x1b[2J \udcff \u202e')",
    "thread = threading.Thread(target=len, args=[5]); thread.start(); thread.join(); sys.exit(1)"])
def test_a_fault_is_one_line_whatever_it_says(tmp_path, code):
    line = fall(tmp_path, code, WHALE_TRACEBACK="")
    assert line.startswith("run.sh: unexpected TypeError") and line.count("\n") == 1 and not re.search("\x1b|\u202e", line)


# ---- 5. what servers answer ---------------------------------------------------------------------------------------------


def answers_like(*shapes: dict):
    """A right answer with one of its places changed, or anything."""
    return st.one_of(JUNK, st.tuples(st.sampled_from(shapes), st.integers(0, 99), JUNK | st.sampled_from((-1, 1e999, 2**70, [], {}, "x" * 5_000_000, json.loads(
        "[" * 900 + "]" * 900)))).map(lambda drawn: put(drawn[0], (places := leaves(drawn[0]))[drawn[1] % len(places)], drawn[2])))


TOKENS = {"choices": [{"token_ids": [5, 6, 2], "finish_reason": "stop", "weight_versions": [{"version": "0-a"}]}]}
TEXT = {"choices": [{"text": "It is \\boxed{1}.", "finish_reason": "stop"}]}
CHAT = {"choices": [{"message": {"content": "It is", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "1"}'}}]},
                     "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
PARAMS = SamplingParams(max_tokens=64, seed=1, temperature=1.0, top_k=20, top_p=1.0, stop=())


@pytest.fixture(scope="module")
def engine():
    """A ServerEngine without servers."""
    engine = object.__new__(ServerEngine)
    engine.tokenizer, engine.stop_ids, engine.max_len, engine.stamp, engine.n_words = load_tokenizer(MODEL), {2}, 512, "0-a", 512
    engine._give_weights = lambda server: None
    return engine


SERVER = Server("http://a", {"m": 512}, {}, "m", "float32")


def check_completion(done: Completion, tokenizer) -> None:
    """One that a rollout can take: read as text, counted, resumed."""
    assert done.finish in ("stop", "length") and all(type(token) is int and token >= 0 for token in done.ids) and (done.ids or done.finish == "length")
    text = tokenizer.decode(done.ids)
    text.encode()
    json.dumps(parse_tool_calls(text))
    if done.usage:
        assert all(type(count) is int and 0 <= count < 10**9 for count in done.usage)


@drawn(120, answer=answers_like(TOKENS) | answers_like(TEXT) | answers_like(CHAT))
@example(answer={"choices": [{"token_ids": [10**6], "finish_reason": "stop", "weight_versions": [{"version": "0-a"}]}]})
@example(answer={"choices": [{"token_ids": [1] * 65, "finish_reason": "stop", "weight_versions": [{"version": "0-a"}]}]})
@example(answer={"choices": [{"token_ids": [1], "finish_reason": "stop", "weight_versions": [{"version": 1}, {"version": "a"}]}]})
@example(answer={"choices": [{"text": None, "finish_reason": "stop"}]})
@example(answer={"choices": [{"message": {"content": None}, "finish_reason": None}]})
@example(answer=CHAT | {"usage": {"prompt_tokens": 10**400, "completion_tokens": 3}})
@example(answer=CHAT | {"usage": {"prompt_tokens": 7, "completion_tokens": -1}})
def test_an_engines_answer_is_a_completion_or_a_failed_try(engine, answer):
    answer = answer if isinstance(answer, dict) else {"choices": answer}
    engine._call = lambda *args, **kwargs: answer
    for ask in (engine._sample_tokens, engine._sample_text):
        try:
            check_completion(ask(SERVER, "a", [1, 2], PARAMS), engine.tokenizer)
        except ServerFailed as failure:
            assert "http://a" in str(failure) and len(str(failure)) < 2000
    chat = Chat(engine._call, lambda note: None)
    try:
        check_completion(chat.sample("http://a", "m", "a", chat.tokenizer("Hello").input_ids, PARAMS, 1.0), chat.tokenizer)
    except ServerFailed as failure:
        assert "http://a" in str(failure) and len(str(failure)) < 2000


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WIRE = {
    "no HTTP": b"\xff" * 40 + b"\r\n\r\n", "HTML": HEAD + b"Content-Length: 13\r\n\r\n<html></html>", "no UTF-8": HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\xfd{",
    "nonsense in chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", "no gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "cut": HEAD + b"Content-Length: 99\r\n\r\n{", "a bad length": HEAD + b"Content-Length: -5\r\n\r\n[1]", "deep": HEAD + b"\r\n" + DEEP.encode(), "a list": HEAD + b"\r\n[]",
    "too much": HEAD + b"\r\n" + b" " * 200_000, "nothing": b"", "headers for ever": HEAD + b"A: b\r\n" * 500, "drips": HEAD + b"Content-Length: 99999\r\n\r\n"}


@pytest.mark.parametrize("name", WIRE)
def test_what_comes_over_the_wire_is_an_object_or_a_failed_try(monkeypatch, name):
    monkeypatch.setattr(server_call, "MAX_ANSWER_BYTES", 100_001)

    def serve() -> None:
        with suppress(OSError):                             # the client may leave
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(WIRE[name])
                while name == "drips":
                    peer.sendall(b" ")
                    time.sleep(0.05)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(server_call.ServerFailed, match="http://127.0.0.1"):
            server_call.Client().call(f"http://127.0.0.1:{listener.getsockname()[1]}", "GET", "/v1/models", limit_s=1)


@drawn(80, answer=answers_like({"data": [{"id": "m", "max_model_len": 512, "root": "/m"}]}), info=answers_like({"vllm_config": {"model_config": {"dtype": "torch.float32"}}}))
def test_what_a_server_says_of_itself_is_checked(engine, answer, info):
    def ask(url, method, path, body=None, limit_s=None):
        found = answer if path == "/v1/models" else info if path.startswith("/server_info") else {}
        if not isinstance(found, dict):
            raise ServerFailed("no JSON object")
        return found

    engine._call = ask
    try:
        server = engine._meet("http://a")
        assert min(server.max_len, 5) >= 1 and server.dtype in ("", *(str(d).removeprefix("torch.") for d in vars(__import__("torch")).values()
                                                                   if isinstance(d, __import__("torch").dtype)))
        assert all(isinstance(name, str) for name in (*server.lengths, *server.roots.values()))
    except ModelError as error:
        assert "--urls: http://a" in str(error) and len(str(error)) < 2000


@drawn(60, checksums=answers_like({"checksums": {"a:model.norm.weight": "0" * 64}}))
def test_weights_that_a_server_does_not_prove_are_not_taken_for_loaded(engine, checksums):
    engine.digests = {"model.norm.weight": "1" * 64}
    engine._call = lambda *args: checksums if isinstance(checksums, dict) else {}
    try:
        assert engine._holds(SERVER) is False
    except ServerFailed as failure:
        assert "http://a" in str(failure)


@drawn(100, answer=answers_like({"result": [[{"score": 1.5, "document": {"id": "0", "contents": '"T"\ntext'}}]]}))
def test_a_retrievers_answer_is_passages_or_an_error(answer):
    try:
        for hits in read_answer(answer, 1, 3):
            for hit in hits:
                assert math.isfinite(hit.score)
                (hit.title + hit.text).encode()
    except RetrieverError as error:
        assert len(str(error)) < 1000


@drawn(100, body=st.one_of(answers_like({"queries": ["a"], "topk": 3, "return_scores": True, "max_doc_tokens": 5, "tokenizer_name": None}).map(
    lambda value: json.dumps(value).encode()), st.binary(max_size=50), st.just(DEEP.encode())))
def test_a_retrievers_request_is_read_or_refused_by_field(body):
    try:
        request = read_request(body, 3)
        assert all(isinstance(query, str) for query in request.queries) and 1 <= request.topk
    except RetrieverError as error:
        assert "the body" in str(error) or "'" in str(error)


@drawn(60, content=JUNK)
def test_a_judges_answer_is_a_verdict_or_none(scripted_judge, content):
    judge, box = scripted_judge
    box[0] = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
    assert judge._ask("case") in (None, True, False)
    box[0] = json.dumps(content).encode()
    assert judge._ask("case") is None


@pytest.fixture(scope="module")
def scripted_judge():
    judge, box = search_answer.Judge("http://127.0.0.1:1", "m"), [b""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire.Session, "exchange", lambda self, *args, **kwargs: (SimpleNamespace(status_code=200), box[0]))
        yield judge, box


# ---- 6. verifiers -----------------------------------------------------------------------------------------------------


TASKS = {name: Task("t", {"question": "What is 6 times 7?"}, answer, "test") for name, answer in (("math", "42"), ("search", ("42", "the Zana")))}
TASKS["chess"] = Task("t", {"fen": "5k2/RN6/5K2/8/8/8/8/8 w - - 0 1", "trigger": ""}, "a7a8", "test")
SOUP = ("\\frac", "\\boxed", "\\boxed{", "{", "}", "^", "_", "\\left", "\\right", "$", "\\sqrt", "\\pm", "\\text{", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "(", ")",
        "[", "]", ",", "=", "<", "|", "4", "2", "42", "1/2", "0.5", "1e999", "9" * 80, " ", "\n", "x", "\\pi", "%", "°", "and", "<answer>", "</answer>", "<ANSWER>", "<think>",
        "</think>", "<tool_call>", "</tool_call>", "Zana", "the", "-", "+", "#", "½", "²", "İ", "ﷺ", "\ud800", "\0", "\u202e", "<move>", "</move>", "<Move>", "a7a8", "e2e4", "Ra8", "Ra8#",
        "O-O", "0-0-0", "a7-a8", "@", "=Q", "K", "e", "8", "/")
REPLIES = st.text(max_size=60) | st.lists(st.sampled_from(SOUP), max_size=40).map("".join)


@drawn(600, domain=DOMAINS, reply=REPLIES)
def test_any_reply_gets_a_verdict(domain, reply):
    """The same for the same text, writable, and never right without the answer's form and the answer."""
    env, task = env_of(domain), TASKS[domain]
    verdict = env.verify(task, reply)
    assert verdict == env.verify(task, reply) and verdict.reward in (0.0, 1.0)
    json.dumps(asdict(verdict), ensure_ascii=False).encode()
    assert "\n" not in verdict.why and len(verdict.why) < 200 and len(verdict.extracted or "") <= 500
    if verdict.reward:
        assert {"math": "\\boxed", "search": "</answer>", "chess": "8"}[domain] in reply and verdict.extracted
    assert not env.verify(task, reply.replace("\\boxed", "").replace("answer", "").replace("8", "7")).reward


@drawn(300, reference=st.lists(st.sampled_from(SOUP), max_size=12).map("".join) | st.text(max_size=20))
def test_a_text_is_the_same_as_itself(reference):
    """Whatever it is, for each way in which answers are compared; and equality has no direction to fail in."""
    assert math_answer.same_answer(reference, reference) in (True, False)
    assert search_answer.same_answer([reference], reference) == bool(search_answer.plain(reference)[:1] and len(reference) <= 500)
    golds = search_answer.read_golds(reference)
    assert all(isinstance(gold, str) and gold for gold in golds)
    assert isinstance(chess_game.check_line(reference, None, [reference]), str)
    for said in said_moves(reference):
        assert chess_game.read_move(chess_game.chess.Board(), said).kind in ("move", "illegal", "malformed")


@pytest.mark.parametrize("domain", ENVS)
@pytest.mark.parametrize("unit", SOUP[:2] + SOUP[3:5] + ("\\boxed{", "<tool_call>", "<answer>", "</answer>", "<think>", "<move>", "b7b8 ", "1,", "½", "-", "a-", "<answer>4", "(", "\\frac1",
                                                        "<tool_call><function=a><parameter=a>", "<tool_call>{", "\\left("))
def test_a_reply_of_megabytes_takes_no_more_than_its_length(domain, unit):
    """What takes the square of it would not be done within the hours that this is given: 400,000 times 400,000."""
    reply = unit * (800_000 // len(unit))
    env, task = env_of(domain), TASKS[domain]
    for text in (reply, f"\\boxed{{{reply}}}", f"<answer>{reply}</answer>", f"<move>{reply}</move>"):
        assert env.verify(task, text).reward == 0.0
    assert len(parse_tool_calls(reply)) <= rollout.MAX_TOOL_CALLS


CALL = "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}}) + "\n</tool_call>"
XML_CALL = "<tool_call>\n<function=python>\n<parameter=code>\nprint(6 * 7)\n</parameter>\n</function>\n</tool_call>"


def parse_slowly(content: str) -> list[dict]:
    """As `parse_tool_calls`, by the patterns that say what it reads."""
    calls = []
    for block in re.findall(r"<tool_call>(.*?)</tool_call>", content.rpartition("</think>")[2], re.DOTALL)[:rollout.MAX_TOOL_CALLS]:
        if function := re.fullmatch(r"\s*<function=([\w.-]+)>(.*)</function>\s*", block, re.DOTALL):
            if "<parameter=" not in function[2].rpartition("</parameter>")[2]:
                calls.append({"name": function[1], "arguments": dict(re.findall(
                    r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL))})
            continue
        try:
            found = json.loads(block)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict) and is_plain(found["arguments"]):
            calls.append({"name": found["name"], "arguments": found["arguments"]})
    return calls


CALL_SOUP = ("<tool_call>", "</tool_call>", "<function=a>", "<function=b c>", "</function>", "<parameter=x>", "<parameter=y>", "</parameter>", "\n", " ", "<think>", "</think>", "a", "{", "}",
             '{"name": "a", "arguments": {}}', '{"name": "a", "arguments": {"b": "</tool_call>"}}', '{"name": 1, "arguments": {}}', CALL, XML_CALL)


@drawn(400, content=st.lists(st.sampled_from(CALL_SOUP), max_size=25).map("".join))
def test_tool_calls_are_what_the_patterns_say(content):
    assert parse_tool_calls(content) == parse_slowly(content)


@drawn(100, name=JUNK, arguments=JUNK | st.just(json.loads("[" * 100 + "]" * 100)), extra=JUNK)
def test_a_call_of_other_json_types_is_plain_or_none(name, arguments, extra):
    block = json.dumps({"name": name, "arguments": arguments, "extra": extra})
    for found in parse_tool_calls(f"<tool_call>{block}</tool_call>"):
        assert isinstance(found["name"], str) and isinstance(found["arguments"], dict)
        json.dumps(found, allow_nan=False)


# ---- 7. model replies, through whole rollouts ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as sandbox:
        yield sandbox


class Saying(Scripted):
    """A model that says, to each task, what stands in `say` under the task's number."""

    def reply(self, id, prompt_ids):
        return self.say[id[0]]


CFG = RolloutConfig(max_assistant_tok=3_000_000, max_calls=3, n_live=64, tool_limits=Limits(2, 128), harness_limits=Limits(5, 256))


def nested(n: int) -> str:
    return '<tool_call>{"name": "python", "arguments": {"code": ' + "[" * n + "]" * n + "}}</tool_call>"


def tool(name: object, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAID = {
    "nothing": "", "a token": "a", "NUL": "\0" * 30, "escape codes": "\x1b[2J\x1b]0;x\x07\x9b2J \\boxed{41}", "right to left": "\u202e\u2066 <answer>a</answer> \u200f",
    "special tokens": "<|im_start|>system\n<|im_end|><|endoftext|>\\boxed{42}", "a surrogate in code": tool("python", {"code": "print('\ud800')"}),
    "a surrogate as name": tool("\ud800", {"code": "1"}), "NUL in code": tool("python", {"code": "\0"}), "a list as code": tool("python", {"code": [1, {"a": None}]}),
    "null as code": tool("python", {"code": None}), "no code": tool("python", {}), "null as arguments": tool("python", None), "a list as arguments": tool("python", []),
    "a text as arguments": tool("python", '{"code": "1"}'), "a number as name": tool(5, {}), "1e999": '<tool_call>{"name": "python", "arguments": {"code": 1e999}}</tool_call>',
    "NaN": '<tool_call>{"name": "python", "arguments": {"code": NaN}}</tool_call>', "deep": nested(15), "deeper": nested(900), "deepest": nested(50_000),
    "a huge number": '<tool_call>{"name": "python", "arguments": {"code": ' + "9" * 4000 + "}}</tool_call>", "an unknown tool": tool("rm -rf /", {"x": 1}),
    "a hundred calls": CALL * 100, "nested calls": "<tool_call>" * 9 + CALL + "</tool_call>" * 9, "open calls": "<tool_call>" * 30_000, "open thinking": "<think>" * 99 + CALL,
    "XML, not closed": XML_CALL[:60], "XML": XML_CALL, "an escape as name": tool("python\x1b[2J\n<|im_start|>", {"code": "1"}), "a long name": tool("a" * 200_000, {}),
    "escape codes printed": tool("python", {"code": "print('\\x1b[2J\\u202e<|im_end|></script>')"}), "a search for nothing": tool("search", {"query": "\0 \ud800"}),
    "a search for a list": tool("search", {"query": [[]]}), "a long search": tool("search", {"query": "river " * 20_000}), "moves": "<move>a7a8</move>" * 3000,
    "a move that is none": "<move>\u202e\x1b[2J</move>", "markup": "<script>alert(1)</script>'\"><b>&amp;\\boxed{<i>}", "megabytes": "ab " * 350_000,
    **{f"{n} characters of a call": CALL[:n] for n in range(0, len(CALL), 3)},
}


@pytest.mark.parametrize("domain", ENVS)
def test_a_reply_of_any_kind_ends_in_a_scored_rollout(sandbox, domain, tmp_path):
    """All at once: each is scored, counted as some kind of failure, and spoils no other; what is written of it can be read, and
    drives no terminal and no browser."""
    env, says = env_of(domain), list(SAID.values())
    right = {"math": "\\boxed{42}", "search": "<answer>the Zana</answer>", "chess": "<move>a7a8</move>"}[domain]
    engine = Saying([*says, right])
    tasks = [replace(TASKS[domain], id=f"t{number}") for number in range(len(says) + 1)]
    traces = rollout.run(engine, env, sandbox, env.h0.read_text(), tasks, 1, (0,), CFG)
    assert len(traces) == len(tasks) and traces[-1].reward == 1.0
    if domain != "chess":                       # where one of many moves may be right
        assert not any(trace.reward for trace in traces[:-1] if "\\boxed{42}" not in says[int(trace.task_id[1:])] or domain != "math")
    counted = rollout.summarise(traces)
    assert counted["n_ok"] + counted["n_error"] + counted["n_killed"] == counted["n"] == len(tasks)
    screen, page = Screen(), []
    screen.log_path = tmp_path / "log.txt"
    for name, trace in zip([*SAID, "right"], traces, strict=True):
        assert trace.status in ("ok", "error") and trace.failure and trace.end, name
        assert trace.failure in ("solved", "error", "token_limit", "call_limit", "malformed_call", "no_answer", "no_answer_after_tool", "no_tool_wrong_answer", "wrong_answer", "tool_error",
                                 "no_move", "malformed_move", "illegal_move", "unsaid_move", "unfinished", "wrong_move", "not_retrieved"), name
        said = [*engine.tokenizer(engine.say[int(trace.task_id[1:])], add_special_tokens=False).input_ids, 2]
        assert [list(call.completion_ids) for call in trace.calls] == [said] * len(trace.calls), name
        rows = trace.sequences()
        assert sum(sum(row.mask) for row in rows) == trace.n_tok == sum(len(call.completion_ids) for call in trace.calls), name
        row = json.loads(json.dumps(trace.to_json(engine.tokenizer), allow_nan=False))
        screen.say(f"{trace.end} {trace.why} {(trace.last_reply or {}).get('content', '')[:2000]}")
        page.append({"id": trace.task_id, "n": 1, "right": (0, 0), "views": [report.view_of(row)] * 2})
    assert not UNSAFE.search((tmp_path / "log.txt").read_text())
    shown = report.jinja2.Environment(autoescape=True).from_string("{% for t in g %}<p>{{ t }}</p>{% endfor %}").render(g=page)
    assert "<script>" not in shown


def test_a_page_shows_what_a_model_said_as_text(finished, tmp_path):
    """A run whose models, tools and proposers said the worst that we know."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    worst = "</pre></details><script>alert(1)</script><img src=x onerror=y>\x1b[2J\u202e\u2066\0\x9b \ud800 <b>&lt;"

    def spoil(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: spoil(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [spoil(part, key) for part in value]
        return worst + value if isinstance(value, str) and key in ("content", "output", "code", "why", "end", "texts") else value

    for path in [*folder.glob("eval/*.jsonl"), *folder.glob("rollouts/*.jsonl")]:
        path.write_text("".join(json.dumps(spoil(json.loads(line))) + "\n" for line in path.read_text().splitlines()))
    for path in folder.glob("harness/*/*/harness.py"):
        path.write_bytes(path.read_bytes() + b"# " + worst.encode("utf-8", "replace"))
    page = report.write_report(folder).read_text()
    Page(page)
    assert page.count("alert(1)") > 20 and not UNSAFE.search(page)
