"""Packed files; the splits that `data` writes, from files by hand and from a hub that is not there."""
import argparse
import csv
import gzip
import hashlib
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest
import zstandard

import data
from envs import ENVS
from files import UsageError
from tasks import DataError, check_disjoint, load_tasks, read_rows

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real samples are not part of the project")
PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def run(domain: str, out: Path, *flags: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_flags(parser)
    return data.command_data(parser.parse_args([domain, "--out", str(out), *map(str, flags)]))


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(out: Path, split: str) -> list[dict]:
    return [row.cells for row in read_rows(out / f"{split}.jsonl")]


def manifest(out: Path, split: str) -> dict:
    return json.loads((out / f"{split}.manifest.json").read_text())


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {}


@pytest.fixture
def flags(tmp_path, monkeypatch) -> list[object]:
    """Three small files for math: 40 pool questions, two test sets of 3; no hub."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    pool = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    files = {"dapo": write(tmp_path / "pool.jsonl", *pool)}
    for year in (2024, 2025):
        rows = ({"id": n, "problem": f"Problem {n} of {year}?", "answer": f"02{n}"} for n in range(3))
        files[f"aime{year}"] = write(tmp_path / f"{year}.jsonl", *rows)
    sizes = ["--n-harness", 10, "--n-test", 3]
    return sizes + [part for name, path in files.items() for part in ("--from", f"{name}={path}")]


# ---- packed files ----

ROWS = [{"question": f"{n} = \u00bd, \"or\"\nnot?", "answer": str(n)} for n in range(2000)]


def plain(kind: str) -> bytes:
    if kind == ".csv":
        quoted = ('"' + row["question"].replace('"', '""') + '"' for row in ROWS)
        return "\ufeffquestion,answer\r\n".encode() + "".join(
            f"{question},{row['answer']}\r\n" for question, row in zip(quoted, ROWS, strict=True)).encode()
    return (json.dumps(ROWS) if kind == ".json" else "\n".join(map(json.dumps, ROWS))).encode()


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_a_packed_file_equals_the_plain_one(tmp_path, kind, packing):
    plain_file, packed = tmp_path / f"a{kind}", tmp_path / f"packed/a{kind}{packing}"
    plain_file.write_bytes(plain(kind))
    packed.parent.mkdir()
    packed.write_bytes(PACK[packing](plain(kind)))
    assert [row.cells for row in read_rows(packed)] == [row.cells for row in read_rows(plain_file)] == ROWS
    tasks = load_tasks(packed, ENVS["math"]())
    assert tasks == load_tasks(plain_file, ENVS["math"]()) and (tasks[0].id, tasks[0].source) == ("a-1", "a")


@pytest.mark.parametrize("packing", PACK)
def test_members_after_the_first_are_read(tmp_path, packing):
    """Lichess's own files are several zstd frames, one after the other."""
    path, content = tmp_path / f"a.csv{packing}", plain(".csv")
    path.write_bytes(b"".join(PACK[packing](content[start:start + 7777]) for start in range(0, len(content), 7777)))
    assert [row.cells for row in read_rows(path)] == ROWS


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("n_cut", [1, 100, -3])
def test_a_file_that_was_cut_off_is_named(tmp_path, kind, packing, n_cut):
    """At its end, before its end, after its first bytes; also where what is left would be whole rows."""
    path = tmp_path / f"a{kind}{packing}"
    path.write_bytes(PACK[packing](plain(kind))[:-n_cut])
    with pytest.raises(DataError, match=f"a{kind}{packing}: cannot be read: "):
        list(read_rows(path))


@pytest.mark.parametrize(("name", "said"), [
    ("a.jsonl.gz", "cannot be read"), ("a.jsonl.zst", "is not zstd"), ("a.parquet.gz", "unknown kind of file"),
    ("a.zst", "unknown kind of file"), ("a.txt.gz", "unknown kind of file")])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"not packed at all")
    with pytest.raises(DataError, match=f"{name}: {said}"):
        list(read_rows(tmp_path / name))


def test_gzip_with_a_broken_middle_is_named(tmp_path):
    packed = bytearray(gzip.compress(plain(".jsonl"), 0))
    packed[30_000] ^= 1
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match="a.jsonl.gz"):
        list(read_rows(tmp_path / "a.jsonl.gz"))


def test_only_zst_needs_zstandard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for packing in PACK:
        (tmp_path / f"a.jsonl{packing}").write_bytes(PACK[packing](plain(".jsonl")))
    assert len(list(read_rows(tmp_path / "a.jsonl.gz"))) == len(ROWS)
    with pytest.raises(DataError, match="pip install zstandard"):
        list(read_rows(tmp_path / "a.jsonl.zst"))


# ---- splits ----

def test_what_is_written_is_what_a_run_loads(tmp_path, flags, capsys):
    out = tmp_path / "out"
    assert run("math", out, *flags) == 0
    splits = {split: ENVS["math"]().load(out / f"{split}.jsonl") for split in ("train", "harness", "test")}
    check_disjoint(**splits)
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 30, "harness": 10, "test": 6}
    questions = {task.fields["question"]: task.answer for task in splits["train"] + splits["harness"]}
    assert questions == {f"What is {n} + {n}?": str(2 * n) for n in range(40)}
    assert {task.id: (task.source, task.answer) for task in splits["test"]} == {
        f"aime{year}-{n}": (f"aime{year}", f"02{n}") for year in (2024, 2025) for n in range(3)}
    printed = capsys.readouterr().out
    assert f"bash run.sh math --train {out}/train.jsonl --harness-set {out}/harness.jsonl" in printed and "17,917" in printed
    assert sorted(contents(out)) == [f"{split}{end}" for split in ("harness", "test", "train")
                                     for end in (".jsonl", ".manifest.json")]


def test_manifests(tmp_path, flags):
    out = tmp_path / "out"
    run("math", out, *flags)
    for split, names in {"train": ["dapo"], "harness": ["dapo"], "test": ["aime2024", "aime2025"]}.items():
        written = manifest(out, split)
        assert written["sha256"] == hashlib.sha256((out / f"{split}.jsonl").read_bytes()).hexdigest()
        assert written["rows_written"] == len(read(out, split)) and written["split"] == split
        assert list(written["sources"]) == names
        assert written["sources"][names[0]] == {"rows_read": 40 if names == ["dapo"] else 3,
                                                "rows_drawn": 40 if names == ["dapo"] else 3, "dropped": {}}
        assert written["inputs"]["seed"] == 42 and written["inputs"]["version"] == data.VERSION
        assert written["inputs"]["sources"]["dapo"] == [{
            "file": "pool.jsonl", "sha256": hashlib.sha256((tmp_path / "pool.jsonl").read_bytes()).hexdigest()}]


def test_the_seed_decides(tmp_path, flags):
    outs = [tmp_path / name for name in "abc"]
    for out, seed in zip(outs, (42, 42, 43), strict=True):
        run("math", out, *flags, "--seed", seed)
    same, again, other = map(contents, outs)
    assert same == again
    assert same["harness.jsonl"] != other["harness.jsonl"] and same["train.jsonl"] != other["train.jsonl"]


def test_a_draw_depends_on_no_order_and_grows_at_its_end(tmp_path, flags):
    run("math", tmp_path / "a", *flags, "--n-train", 12)
    run("math", tmp_path / "b", *flags, "--n-train", 20)
    pool = (tmp_path / "pool.jsonl").read_text().splitlines()
    write(tmp_path / "pool.jsonl", *reversed(pool))
    run("math", tmp_path / "c", *flags, "--n-train", 12)
    train = [[row["question"] for row in read(tmp_path / name, "train")] for name in "abc"]
    assert train[0] == train[1][:12] == train[2] and len(train[1]) == 20
    assert read(tmp_path / "a", "harness") == read(tmp_path / "b", "harness")
    assert set(train[0]) != {json.loads(line)["question"] for line in pool[:12]}         # a draw, not the first rows


def test_a_draw_is_uniform(tmp_path, flags):
    """Each of 40 questions in a harness set of 10 about as often; 100 seeds, so 25 +- 4.3 times."""
    counts = dict.fromkeys(range(40), 0)
    env = ENVS["math"]()
    for seed in range(100):
        drawn = data.draw(env, "dapo", read_rows(tmp_path / "pool.jsonl"), 10, seed, (), lambda: None)
        assert len(drawn.rows) == 10 and drawn.n_read == 40
        for row in drawn.rows:
            counts[int(row["id"].removeprefix("dapo-")) - 1] += 1
    assert 8 < min(counts.values()) and max(counts.values()) < 42


def test_only_what_is_drawn_is_held(tmp_path, flags):
    rows = [*read_rows(tmp_path / "pool.jsonl")] * 2
    drawn = data.draw(ENVS["math"](), "dapo", iter(rows), 10, 42, (), lambda: None)
    assert drawn.dropped["repeated question"]["n"] == 10


def test_again_does_nothing(tmp_path, flags, capsys, monkeypatch):
    out = tmp_path / "out"
    run("math", out, *flags)
    before = contents(out)
    monkeypatch.setattr(data, "write_splits", None)
    assert run("math", out, *flags) == 0
    assert "already holds these splits; nothing to do" in capsys.readouterr().out and contents(out) == before


def test_other_splits_are_not_overwritten(tmp_path, flags):
    out = tmp_path / "out"
    run("math", out, *flags)
    before = contents(out)
    with pytest.raises(UsageError, match="seed: 42 then, 7 now\nRemove train.jsonl"):
        run("math", out, *flags, "--seed", 7)
    write(tmp_path / "2024.jsonl", *({"problem": f"New {n}?", "answer": "1"} for n in range(3)))
    with pytest.raises(UsageError, match="sources: "):
        run("math", out, *flags)
    assert contents(out) == before


@pytest.mark.parametrize(("name", "text", "said"), [
    ("test.jsonl", "", "test.jsonl was changed after it was written"), ("train.jsonl", None, "train.jsonl or its manifest"),
    ("harness.manifest.json", None, "harness.jsonl or its manifest is missing"),
    ("test.manifest.json", "{", "test.manifest.json is no manifest")])
def test_splits_that_were_tampered_with_are_refused(tmp_path, flags, name, text, said):
    out = tmp_path / "out"
    run("math", out, *flags)
    (out / name).unlink() if text is None else (out / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        run("math", out, *flags)


@pytest.mark.parametrize(("file", "row", "said"), [
    ("pool.jsonl", {"question": "What?"}, "pool.jsonl, line 41: field 'answer' is missing"),
    ("pool.jsonl", '{"question": "Wh', "pool.jsonl, line 41: is not JSON"),
    ("2025.jsonl", {"problem": "", "answer": "1"}, "2025.jsonl, line 4: field 'problem' is empty"),
    ("2024.jsonl", "7", "2024.jsonl, line 4: is not one value for each column")])
def test_a_malformed_row_stops_before_anything_is_written(tmp_path, flags, file, row, said):
    with open(tmp_path / file, "a") as rows:
        rows.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(DataError, match=said):
        run("math", tmp_path / "out", *flags)
    assert not contents(tmp_path / "out")


@pytest.mark.parametrize(("more", "said"), [
    (["--n-harness", 40], "dapo has 40 usable questions; lower --n-harness 40"),
    (["--n-train", 31], "dapo has 40 usable questions; lower --n-harness 10 or --n-train 31"),
    (["--n-test", 4], "aime2024 has 3 usable questions; lower --n-test 4"),
    (["--n-test", 0], "--n-test 0: must be at least 1"), (["--n-train", -1], "--n-train -1: must be at least 1"),
    (["--from", "aime2024"], "--from aime2024: give NAME=FILE, where NAME is one of dapo, aime2024, aime2025"),
    (["--from", "nq=x.jsonl"], "--from nq=x.jsonl: give NAME=FILE")])
def test_what_cannot_be_done_is_said_and_nothing_is_written(tmp_path, flags, more, said):
    with pytest.raises(UsageError, match=said):
        run("math", tmp_path / "out", *flags, *more)
    assert not contents(tmp_path / "out")


def test_a_missing_file_is_named(tmp_path, flags):
    with pytest.raises(DataError, match="nothing.jsonl: cannot be read"):
        run("math", tmp_path / "out", *flags, "--from", f"dapo={tmp_path}/nothing.jsonl")


def test_a_full_disk_leaves_nothing(tmp_path, flags, monkeypatch):
    calls = []

    def full_at_the_third(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_at_the_third)
    with pytest.raises(OSError, match="No space"):
        run("math", tmp_path / "out", *flags)
    assert not contents(tmp_path / "out")
    assert run("math", tmp_path / "out", *flags) == 0 and len(contents(tmp_path / "out")) == 6


def test_a_kill_between_two_files_is_seen(tmp_path, flags, monkeypatch):
    calls, rename = [], Path.replace

    def killed_at_the_fourth(path: Path, target: Path) -> Path:
        calls.append(target.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run("math", tmp_path / "out", *flags)
    assert sorted(contents(tmp_path / "out")) == ["harness.jsonl", "test.jsonl", "train.jsonl"]
    with pytest.raises(UsageError, match="train.jsonl or its manifest is missing"):
        run("math", tmp_path / "out", *flags)


def test_overlap_with_a_test_set_is_refused_or_left_out(tmp_path, flags):
    write(tmp_path / "more.jsonl", {"question": "PROBLEM 2  of 2025?", "answer": "22"})
    flags += ["--from", f"dapo={tmp_path / 'more.jsonl'}"]
    with pytest.raises(DataError, match="'aime2025-2' and (train|harness) 'dapo-41' have the same question.*--drop-overlap"):
        run("math", tmp_path / "out", *flags)
    assert not contents(tmp_path / "out")
    run("math", tmp_path / "out", *flags, "--drop-overlap")
    assert len(read(tmp_path / "out", "train")) == 30 and len(read(tmp_path / "out", "test")) == 6
    for split in ("train", "harness"):
        assert manifest(tmp_path / "out", split)["sources"]["dapo"] == {
            "rows_read": 41, "rows_drawn": 40, "dropped": {"asked by a test task too": {"n": 1, "examples": ["dapo-41"]}}}


def test_a_question_of_two_test_sets_is_asked_once(tmp_path, flags):
    with open(tmp_path / "2025.jsonl", "a") as rows:
        rows.write(json.dumps({"id": 9, "problem": "problem 0 OF 2024?", "answer": "20"}))
    run("math", tmp_path / "out", *flags)
    assert len(ENVS["math"]().load(tmp_path / "out" / "test.jsonl")) == 6
    assert manifest(tmp_path / "out", "test")["sources"]["aime2025"]["dropped"] == {
        "asked by a test task too": {"n": 1, "examples": ["aime2025-9"]}}


def test_repeats_and_unusable_references_are_dropped_and_counted(tmp_path, flags):
    write(tmp_path / "more.jsonl", {"question": "what IS  3 + 3?", "answer": "6"}, {"question": "What is 3 + 3?", "answer": "7"},
          *[{"question": "Which?", "answer": "{"}] * 2)
    run("math", tmp_path / "out", *flags, "--from", f"dapo={tmp_path / 'more.jsonl'}")
    assert manifest(tmp_path / "out", "train")["sources"]["dapo"] == {"rows_read": 44, "rows_drawn": 40, "dropped": {
        "repeated question": {"n": 1, "examples": ["dapo-41"]},
        "repeated question with another answer": {"n": 1, "examples": ["dapo-42"]},
        "no usable reference": {"n": 2, "examples": ["dapo-43", "dapo-44"]}}}
    assert {"question": "What is 3 + 3?", "answer": "6", "id": "dapo-4", "source": "dapo"} in [
        *read(tmp_path / "out", "train"), *read(tmp_path / "out", "harness")]


def test_two_questions_of_one_id_are_refused(tmp_path, flags):
    write(tmp_path / "more.jsonl", *({"id": "x", "question": f"Q{n}?", "answer": "1"} for n in range(2)))
    with pytest.raises(DataError, match="train: different questions have the same id: dapo-x"):
        run("math", tmp_path / "out", *flags[:1], 1, *flags[2:], "--from", f"dapo={tmp_path / 'more.jsonl'}", "--seed", 1)


# ---- the hub, which is not there: its library is a stand-in ----

@pytest.fixture
def hub(monkeypatch) -> dict:
    """Rows by (hub name, config, split); what was asked for is kept under "asked"."""
    tables: dict = {"asked": []}

    def load_dataset(path, name=None, *, split, revision, streaming):
        tables["asked"].append((path, name, split, revision, streaming))
        if (path, name, split) not in tables:
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return iter(tables[path, name, split])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return tables


def test_math_from_the_hub(tmp_path, hub):
    prompt = ENVS["math"].foreign_instructions[0] + "\n\nWhat is {0} + {0}?\n\n" + ENVS["math"].foreign_instructions[1]
    hub["BytedTsinghua-SIA/DAPO-Math-17k", None, "train"] = [
        {"data_source": "math_dapo", "prompt": [{"content": prompt.format(n), "role": "user"}], "ability": "MATH",
         "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": f"uuid-{n}"}}
        for n in range(300)] * 3
    hub["HuggingFaceH4/aime_2024", None, "train"] = [
        {"id": 60 + n, "problem": f"P{n}?", "solution": "s", "answer": f"0{n + 10}", "url": "u", "year": "2024"} for n in range(30)]
    hub["math-ai/aime25", None, "test"] = [{"problem": f"R{n}?", "answer": r"336^\circ", "id": str(n)} for n in range(30)]
    assert run("math", tmp_path / "out") == 0
    assert len(read(tmp_path / "out", "harness")) == 256 and len(read(tmp_path / "out", "train")) == 44
    assert {row["id"] for row in read(tmp_path / "out", "train")} < {f"math_dapo-uuid-{n}" for n in range(300)}
    assert {row["id"] for row in read(tmp_path / "out", "test")} == {
        *(f"aime2024-{60 + n}" for n in range(30)), *(f"aime2025-{n}" for n in range(30))}
    written = manifest(tmp_path / "out", "train")
    assert written["sources"]["dapo"]["dropped"]["repeated question"]["n"] == 600
    assert written["inputs"]["sources"]["dapo"] == {
        "hub": "BytedTsinghua-SIA/DAPO-Math-17k", "revision": data.SOURCES["dapo"].revision, "split": "train", "config": None}
    assert all(len(revision) == 40 and streaming for *_, revision, streaming in hub["asked"]) and len(hub["asked"]) == 3


def test_search_from_the_hub(tmp_path, hub):
    """FlashRAG numbers the rows of each of its sets from 0, and so does each half of Search-R1's mix."""
    recipe = data.RECIPES["search"]
    for name in recipe.tests:
        hub["RUC-NLPIR/FlashRAG_datasets", name, data.SOURCES[name].split] = [
            {"id": f"test_{n}", "question": f"{name} {n}?", "golden_answers": [f"a{n}", "b"], "metadata": {}} for n in range(5)]
    hub["PeterJinGo/nq_hotpotqa_train", None, "train"] = [
        {"id": f"train_{n}", "question": f"train {source} {n}?", "golden_answers": [f"c{n}"], "data_source": source,
         "prompt": [{"content": "Answer the given question.", "role": "user"}], "ability": "fact-reasoning",
         "reward_model": {"ground_truth": {"target": [f"c{n}"]}, "style": "rule"}, "extra_info": {"index": n, "split": "train"}}
        for source in ("nq", "hotpotqa") for n in range(20)]
    run("search", tmp_path / "out", "--n-test", 4, "--n-harness", 8, "--n-train", 20)
    splits = {split: ENVS["search"]().load(tmp_path / "out" / f"{split}.jsonl") for split in ("train", "harness", "test")}
    check_disjoint(**splits)
    assert [len(tasks) for tasks in splits.values()] == [20, 8, 28]
    assert {task.source for task in splits["test"]} == set(recipe.tests)
    assert {task.source for task in splits["train"]} == {"nq", "hotpotqa"}
    for row in [*read(tmp_path / "out", "test"), *read(tmp_path / "out", "train")]:
        source, number = row["id"].split("-")[0], row["id"].split("_")[-1]
        assert row["source"] == source and row["answer"] in ([f"a{number}", "b"], [f"c{number}"])


def test_a_hub_that_does_not_answer(tmp_path, flags, monkeypatch):
    def no_route(*args, **kwargs):
        raise ConnectionError("no route")

    by_hand = flags[:4] + flags[6:]                     # all but the pool
    with pytest.raises(UsageError, match="pip install datasets==.*--from dapo=FILE"):
        run("math", tmp_path / "out", *by_hand)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=no_route))
    with pytest.raises(DataError, match="DAPO-Math-17k@6587709 train: cannot be read from the hub: no route.*--from dapo=FILE"):
        run("math", tmp_path / "out", *by_hand)
    assert not contents(tmp_path / "out")


# ---- chess ----

def puzzles(n: int) -> list[dict]:
    """Lichess rows of legal moves; lines of 1, 3, ..., 11 plies after the trigger, in turn."""
    rows = []
    for number in range(n):
        board, rng, moves = chess.Board(), random.Random(number), []
        for _ in range(20):
            board.push(rng.choice(sorted(board.legal_moves, key=str)))
        fen = board.fen()
        for _ in range(2 + 2 * (number % 6)):
            moves.append(rng.choice(sorted(board.legal_moves, key=str)).uci())
            board.push_uci(moves[-1])
        rows.append({"PuzzleId": f"p{number:03}", "FEN": fen, "Moves": " ".join(moves), "Rating": "1500",
                     "Themes": "long", "GameUrl": "u"})
    return rows


def test_chess_splits(tmp_path):
    rows = puzzles(60)
    with open(tmp_path / "plain.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "lichess.csv.zst").write_bytes(PACK[".zst"]((tmp_path / "plain.csv").read_bytes()))
    sizes = ["--n-train", 20, "--n-harness", 5, "--n-test", 10]
    run("chess", tmp_path / "a", "--from", f"lichess={tmp_path}/lichess.csv.zst", *sizes)
    splits = {split: ENVS["chess"]().load(tmp_path / "a" / f"{split}.jsonl") for split in ("train", "harness", "test")}
    check_disjoint(**splits)
    assert [len(tasks) for tasks in splits.values()] == [20, 5, 10]
    by_id = {f"lichess-{row['PuzzleId']}": row for row in rows}
    for split in splits:
        for row in read(tmp_path / "a", split):
            given = by_id[row["id"]]
            assert row == {"id": row["id"], "fen": given["FEN"], "moves": given["Moves"], "source": "lichess"}
            assert 1 <= len(row["moves"].split()) - 1 <= 9
    assert manifest(tmp_path / "a", "test")["sources"]["lichess"] == {"rows_read": 60, "rows_drawn": 35, "dropped": {
        "solution not of 1 to 9 plies": {"n": 10, "examples": ["p005", "p011", "p017", "p023", "p029"]}}}
    run("chess", tmp_path / "b", "--from", f"lichess={tmp_path}/plain.csv", *sizes[2:], "--n-train", 30)
    assert [read(tmp_path / "a", split) for split in splits] == [read(tmp_path / "b", "train")[:20],
                                                                 read(tmp_path / "b", "harness"), read(tmp_path / "b", "test")]


def test_most_boards_are_never_set_up(tmp_path, monkeypatch):
    """3 of 60 puzzles: some 12 are among the best 3 when they come, and 3 are read back."""
    n_read, read_puzzle = [], ENVS["chess"].read
    monkeypatch.setattr(ENVS["chess"], "read", lambda *args: n_read.append(1) or read_puzzle(*args))
    run("chess", tmp_path / "out", "--from", f"lichess={write(tmp_path / 'p.jsonl', *puzzles(60))}",
        "--n-train", 1, "--n-harness", 1, "--n-test", 1)
    assert 3 < len(n_read) < 30


@pytest.mark.parametrize(("column", "value", "said"), [
    ("Moves", "", "'Moves' is empty"), ("FEN", "", "'FEN' is empty"), ("FEN", "8/8/8/8 w - - 0 1", "FEN"),
    ("Moves", "a1a1 e2e4", "a1a1")])
def test_a_malformed_puzzle_is_named(tmp_path, column, value, said):
    rows = puzzles(5)
    rows[3] |= {column: value}
    with pytest.raises(DataError, match=f"p.jsonl, line 4: .*{said}"):
        run("chess", tmp_path / "out", "--from", f"lichess={write(tmp_path / 'p.jsonl', *rows)}",
            "--n-train", 3, "--n-harness", 1, "--n-test", 1)
    assert not contents(tmp_path / "out")


# ---- real samples ----

@needs_shared
def test_dapo_with_each_row_a_hundred_times(tmp_path):
    rows = (SHARED / "dapo_16.jsonl").read_text()
    (tmp_path / "dapo.jsonl.gz").write_bytes(gzip.compress((rows.rstrip("\n") + "\n").encode() * 100))
    aime = [part for year in (2024, 2025) for part in ("--from", f"aime{year}={SHARED}/aime_2024.jsonl")]
    aime[3] = f"aime2025={write(tmp_path / 'aime25.jsonl', {'problem': 'Which angle?', 'answer': '336^' + chr(92) + 'circ'})}"
    flags = ["--n-harness", 6, "--n-test", 1, *aime]
    run("math", tmp_path / "a", "--from", f"dapo={tmp_path}/dapo.jsonl.gz", *flags)
    run("math", tmp_path / "b", "--from", f"dapo={SHARED}/dapo_16.parquet", *flags)
    for split in ("train", "harness", "test"):
        assert read(tmp_path / "a", split) == read(tmp_path / "b", split)
    drawn = read(tmp_path / "a", "train") + read(tmp_path / "a", "harness")
    tasks = {f"math_dapo-{task.id}": task for task in ENVS["math"]().load(SHARED / "dapo_16.jsonl")}
    assert {row["id"]: (row["question"], row["answer"]) for row in drawn} == {
        task_id: (task.fields["question"], task.answer) for task_id, task in tasks.items()}
    assert manifest(tmp_path / "a", "train")["sources"]["dapo"]["dropped"]["repeated question"]["n"] == 1584


@needs_shared
def test_aime_by_hand(tmp_path, flags):
    run("math", tmp_path / "out", *flags, "--n-test", 33, "--from", f"aime2024={SHARED}/aime_2024.jsonl",
        "--from", f"aime2025={SHARED}/math500.jsonl")
    env, tasks = ENVS["math"](), ENVS["math"]().load(tmp_path / "out" / "test.jsonl")
    padded = [task for task in tasks if task.answer == "025"]
    assert len(tasks) == 66 and len(padded) == 1 and env.verify(padded[0], r"\boxed{25}").reward == 1


@needs_shared
def test_the_published_forms_of_search_by_hand(tmp_path):
    files = {"nq": "nq_open_dev.jsonl", "popqa": "popqa.json", "hotpotqa": "hotpotqa_dev.json", "musique": "musique_dev.jsonl",
             "2wikimultihopqa": "2wiki_dev.json", "bamboogle": "bamboogle.jsonl", "nq_hotpotqa": "mini_wiki_questions.jsonl"}
    trivia = ({"question_id": f"tc_{n}", "question": f"Trivia {n}?", "answer": {"value": "x", "aliases": ["x", "y"]}} for n in range(41))
    flags = [part for name, file in files.items() for part in ("--from", f"{name}={SHARED / file}")]
    flags += ["--from", f"triviaqa={write(tmp_path / 'trivia.jsonl', *trivia)}", "--n-test", 41]
    with pytest.raises(UsageError, match="nq_hotpotqa has .* usable questions; lower --n-harness 256 or --n-train 18,946"):
        run("search", tmp_path / "out", *flags, "--drop-overlap")
    flags += ["--n-train", 100, "--n-harness", 30]
    with pytest.raises(DataError, match="splits overlap, .* times: test '"):
        run("search", tmp_path / "out", *flags)
    run("search", tmp_path / "out", *flags, "--drop-overlap")
    splits = {split: ENVS["search"]().load(tmp_path / "out" / f"{split}.jsonl") for split in ("train", "harness", "test")}
    check_disjoint(**splits)
    assert [len(tasks) for tasks in splits.values()] == [100, 30, 287]


@needs_shared
def test_the_published_form_of_chess_by_hand(tmp_path):
    run("chess", tmp_path / "out", "--from", f"lichess={SHARED}/lichess_puzzles.csv", "--n-train", 100, "--n-test", 30,
        "--n-harness", 20)
    assert len(ENVS["chess"]().load(tmp_path / "out" / "train.jsonl")) == 100
    dropped = manifest(tmp_path / "out", "train")["sources"]["lichess"]["dropped"]
    assert list(dropped) == ["solution not of 1 to 9 plies"] and dropped["solution not of 1 to 9 plies"]["n"] == 19
