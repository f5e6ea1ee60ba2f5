"""What a run survives: damaged files, signals, a full disk, a stopped machine. Slow: tests/slow_kills.py."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import ROOT
from rft import read_checkpoint_record
from rundir import RunDir, read_sealed
from small import SMALL, call, rows
from warden import descendants


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


# ---- signals ---------------------------------------------------------------------------------------------------------

# the real program, with one thing changed before it begins: what the environment's PLANT says
PROGRAM = """
import os, runpy, sys
sys.argv = ["cli.py", *sys.argv[1:]]
sys.path.insert(0, os.path.dirname(os.environ["CLI"]))
exec(os.environ["PLANT"])
runpy.run_path(os.environ["CLI"], run_name="__main__")
"""
# says where it is, once it is there, and stays for a minute
HOLD = """
import time
def hold(module, name, how="time.sleep(60)"):
    import importlib
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    def held(*args, **kwargs):
        print("HELD", flush=True)
        exec(how)
    setattr(owner, last, held)
"""
SWALLOW = """
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


def start_planted(plant: str, *args, ignored: tuple[int, ...] = ()) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, args)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PLANT": HOLD + plant, "CLI": str(ROOT / "cli.py")}, start_new_session=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
                            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])


def read_until(process: subprocess.Popen, word: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(f"{word!r} was never said: {said}")


def assert_stopped(process: subprocess.Popen, number: int, below: list[int]) -> str:
    """By this signal, in one sentence, and nothing is left."""
    output = process.stdout.read()                                   # to its end: no child holds it open
    assert process.wait() == 128 + number and "Traceback" not in output, output
    assert output.count("run.sh: stopped by ") == 1 and signal.Signals(number).name in output
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.02)
    return output


MOMENTS = {
    "imports": """
class Slow:
    def find_spec(self, name, *_):
        if name == "torch":
            print("HELD", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())""",
    "base evaluation": "hold('rollout', 'Batch._take_completion')",
    "save": "hold('rft', 'save_file')",
    "swallowed": f"hold('rft', 'Trainer.clip_grads', {SWALLOW!r})",
    "report while stopping": f"hold('rollout', 'Batch._take_completion'); hold('whale', 'Run.close', {SWALLOW!r})",
}


@pytest.mark.parametrize("moment, number", [
    ("imports", signal.SIGINT), ("save", signal.SIGINT), ("swallowed", signal.SIGHUP), ("report while stopping", signal.SIGTERM)])
def test_a_signal_ends_a_run(finished, tmp_path, moment, number):
    process = start_planted(MOMENTS[moment], "math", *SMALL, "--out", tmp_path, "--name", "run")
    read_until(process, "HELD")
    below = descendants(process.pid)
    assert bool(below) == (moment != "imports")
    os.kill(process.pid, number)
    assert_stopped(process, number, below)
    if moment == "save":
        folder = tmp_path / "run"
        assert not (folder / "weights/step_000001").exists() and read_sealed(folder / "state.json")["weight_step"] == 0
        assert go_on(folder)[0] == 0 and end_of(folder) == end_of(finished) and not list(folder.rglob("*.tmp"))


def test_the_second_signal_means_now(tmp_path):
    process = start_planted("import stop; stop.LIMIT_S = 600\n" + MOMENTS["swallowed"], "math", *SMALL, "--out", tmp_path)
    read_until(process, "HELD")
    below = descendants(process.pid)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert_stopped(process, signal.SIGINT, below)


def test_a_signal_that_was_ignored_stays_so(tmp_path):
    """nohup, or a shell's background job."""
    process = start_planted(MOMENTS["base evaluation"], "math", *SMALL, "--out", tmp_path, ignored=(signal.SIGINT, signal.SIGHUP))
    read_until(process, "HELD")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(process.pid, number)
    time.sleep(1)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert_stopped(process, signal.SIGTERM, [])


def test_a_signal_ends_a_small_command(tmp_path):
    process = start_planted(MOMENTS["base evaluation"], "eval", "math", "--out", tmp_path)
    read_until(process, "HELD")
    below = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    assert_stopped(process, signal.SIGINT, below)
