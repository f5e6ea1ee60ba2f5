"""What a run survives: damaged files, signals, a full disk, a stopped machine. Slow: tests/slow_kills.py."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from rft import read_checkpoint_record
from rundir import RunDir, read_sealed
from small import SMALL, call, rows


def end_of(folder: Path) -> tuple:
    """What must be equal, whatever happened on the way: metrics but for times, harness, every byte of the last weights."""
    last = max((folder / "weights").glob("step_*"))
    return rows(folder), (folder / "final_harness.py").read_text(), {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in last.iterdir() if path.name != "state.json"}


def go_on(folder: Path, *flags) -> tuple[int, str]:
    return call("math", *SMALL, "--out", folder.parent, "--name", folder.name, *flags)


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory) -> Path:
    """A run that stopped in its harness phase, after two weight steps; to copy."""
    out = tmp_path_factory.mktemp("halfway")
    with pytest.MonkeyPatch.context() as stopped:
        stopped.setattr("whale.Run.finish_iteration", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert call("math", *SMALL, "--out", out, "--name", "run")[0] == 130
    return out / "run"


# ---- damaged files ---------------------------------------------------------------------------------------------------


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


DAMAGE = {"cut in half": lambda content: content[:len(content) // 2], "flipped": flip, "emptied": lambda content: b"",
          "zeros": lambda content: bytes(len(content))}
CHECKPOINT = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
              "trainer.json", "trainer.safetensors", "chat_template.jinja"]


def damage(path: Path, how: str) -> None:
    path.unlink() if how == "missing" else path.write_bytes(DAMAGE[how](path.read_bytes()))


def test_the_list_of_checkpoint_files_is_complete(finished):
    assert {path.name for path in (finished / "weights/step_000002").iterdir()} - {"state.json"} == set(CHECKPOINT)


@pytest.mark.parametrize("name, how", [(name, how) for name in CHECKPOINT for how in ("flipped", "missing")] + [
    ("model.safetensors", "cut in half"), ("trainer.safetensors", "zeros"), ("trainer.json", "emptied"), ("trainer.json", "zeros")])
def test_damage_to_any_file_of_a_checkpoint_is_seen(halfway, tmp_path, name, how):
    """Seen, said, and gone back from, to the state before; nothing is trained here, so that all files can be tried."""
    folder = Path(shutil.copytree(halfway, tmp_path / "run"))
    damage(folder / "weights/step_000002" / name, how)
    identity = json.loads((folder / "config.json").read_text())
    identity.pop("format")
    run = RunDir(folder, identity, 2, read_checkpoint_record)
    run.close()
    assert run.state.weight_step == 1 and len(rows(folder)) == 2
    said = (folder / "log.txt").read_text()
    assert f"DAMAGED: {folder}/weights/step_000002/{name}" in said and "goes back to weights/step_000001/state.json" in said
    assert {str(path.relative_to(folder)) for path in folder.glob("set_aside/*/*")} == {
        "set_aside/weights/step_000002", "set_aside/harness/cycle_01", "set_aside/rollouts/step_000002.jsonl",
        "set_aside/eval/01_step_000002.jsonl"}
    assert not list(folder.glob("harness/*")) and RunDir(folder, identity, 2, read_checkpoint_record).state == run.state


@pytest.mark.parametrize("what", ["the last checkpoint and the state", "the last row"])
def test_after_damage_a_run_ends_as_if_nothing_had_been(finished, halfway, tmp_path, what):
    folder = Path(shutil.copytree(halfway, tmp_path / "run"))
    if what == "the last row":
        state = read_sealed(folder / "state.json")
        os.truncate(folder / "metrics.jsonl", state["metrics_bytes"] - 5)
    else:
        damage(folder / "weights/step_000002/model.safetensors", "flipped")
        damage(folder / "state.json", "flipped")
    code, output = go_on(folder)
    assert code == 0 and output.count("DAMAGED") == len(what.split(" and ")) and "goes back to" in output, output
    assert end_of(folder) == end_of(finished)


@pytest.mark.parametrize("name, how", [("state.json", how) for how in (*DAMAGE, "missing")] + [
    (name, how) for name in ("metrics.jsonl", "config.json") for how in ("emptied", "zeros", "missing")])
def test_records_of_a_finished_run(finished, copied, name, how):
    """Of the state there is a copy beside the checkpoint; without its settings nobody can say what run it is; of a row
    that is changed, nobody knows what it was."""
    damage(copied / name, how)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    code, output = go_on(copied)
    assert "Traceback" not in output
    if name == "state.json":
        assert code == 0 and "DAMAGED" in output and "complete" in output and end_of(copied) == end_of(finished)
        assert (copied / "state.json").read_bytes() == (finished / "state.json").read_bytes()
    else:
        assert code == 2 and name in output and "--name" in output, output
        assert all(path.read_bytes() == content for path, content in before.items() if path.name != "log.txt")


@pytest.mark.parametrize("name, how", [("summary.json", how) for how in (*DAMAGE, "missing")] + [
    ("final_harness.py", "flipped"), ("final_harness.py", "missing"), ("report.html", "emptied"), ("report.html", "missing"),
    ("harness/cycle_01/h0/score.json", "zeros"), ("harness/cycle_01/h1/traces.jsonl", "missing")])
def test_other_files_of_a_finished_run(finished, copied, name, how):
    """The command repairs what it can make of the rest, and is not misled by what it does not need."""
    damage(copied / name, how)
    code, output = go_on(copied)
    assert code == (2 if name == "summary.json" else 0) and "Traceback" not in output, output
    assert code == 0 or "summary.json" in output
    if name in ("final_harness.py", "report.html"):
        assert (copied / name).read_bytes() == (finished / name).read_bytes()
