"""What a run survives: damaged files, signals, a full disk, a stopped machine. Slow: tests/slow_kills.py."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import report
from config import ROOT
from engine import EngineDied
from rft import read_checkpoint_record
from candidates import earlier_findings
from files import Damaged, read_sealed
from report import page_of
from rundir import RunDir
from small import SMALL, call, edit, rows
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


def test_what_a_later_search_or_a_page_reads_is_seen_to_be_changed(copied):
    """A letter of an earlier archive's history, of its score, of the summary: refused by name, with what to do."""
    archive = copied / "harness/cycle_01"
    for path in (archive / "history.jsonl", archive / "h0/score.json", archive / "acceptance.json", copied / "summary.json"):
        content = path.read_text()
        path.write_text(content.replace('"h', '"g', 1))
        assert path.read_text() != content
        with pytest.raises(Damaged, match=f"{path.name} is damaged.* Put it back from a copy"):
            earlier_findings(copied / "harness/cycle_02") if path.suffix == ".jsonl" else page_of(copied, False)
        path.write_text(content)
    page_of(copied, False)
    with pytest.raises(Damaged, match="is damaged: .*. Put it back from a copy"):           # cut, so no JSON either
        path.write_text(content[:100])
        read_sealed(path)


def test_a_checkpoint_of_another_run_or_step_is_not_taken(finished, halfway, tmp_path):
    """Whole in itself, put back from the wrong copy."""
    folder = Path(shutil.copytree(halfway, tmp_path / "run"))
    for step in ("step_000001", "step_000002"):
        (folder / "weights" / step).rename(folder / "weights" / f"{step}.aside")
    (folder / "weights/step_000001.aside").rename(folder / "weights/step_000002")
    (folder / "weights/step_000002.aside").rename(folder / "weights/step_000001")
    code, output = go_on(folder)
    assert code == 0 and "step_000002 is not the checkpoint of" in output and "DAMAGED" in output, output
    assert end_of(folder) == end_of(finished)


@pytest.mark.parametrize("n", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_a_kill_while_things_are_set_aside(finished, halfway, tmp_path, monkeypatch, n):
    """Until the weights are, it is done again, so that no score of theirs is left."""
    folder, moved = Path(shutil.copytree(halfway, tmp_path / "run")), []
    weights = folder / "weights/step_000002/model.safetensors"
    weights.write_bytes(flip(weights.read_bytes()))
    (folder / "harness/cycle_01.bak").mkdir()
    (folder / "rollouts/step_000002 (copy).jsonl").touch()
    (folder / "weights/step_000001.good").mkdir()
    replace = Path.replace

    def stop_at(path, target):
        if "set_aside" in str(target):
            moved.append(path)
            if len(moved) > n:
                raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", stop_at)
        assert go_on(folder)[0] == 130
    assert go_on(folder)[0] == 0 and end_of(folder) == end_of(finished)
    assert all((folder / "set_aside" / name).exists() for name in ("weights/step_000002", "harness/cycle_01", "rollouts/step_000002.jsonl"))
    assert (folder / "weights/step_000001.good").is_dir() and (folder / "harness/cycle_01.bak").is_dir()


# ---- directories that others made ------------------------------------------------------------------------------------


def test_what_only_cannot_be_read_is_not_damaged(halfway, tmp_path, monkeypatch):
    """Another user, a file server that is away: nothing is set aside, and when it is back the run goes on."""
    folder = Path(shutil.copytree(halfway, tmp_path / "run"))
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with monkeypatch.context() as away:
        away.setattr("rft._sha256", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied", str(path))))
        code, output = go_on(folder)
    assert code == 2 and "cannot be read: Permission denied" in output and "DAMAGED" not in output
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_folder_that_is_another_runs_keeps_what_is_in_it(copied):
    others = [copied / "notes" / "thesis.docx.tmp", copied / "state.json.note.tmp"]
    others[0].parent.mkdir()
    for path in others:
        path.write_text("mine")
    (copied / "half.json.123.tmp").write_text("{")
    assert go_on(copied, "--seed", 9)[0] == 2 and (copied / "half.json.123.tmp").exists()
    assert go_on(copied)[0] == 0 and not (copied / "half.json.123.tmp").exists() and all(path.exists() for path in others)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "log.txt", "weights", "weights/step_000001", "eval", "final_harness.py", "pipe"])
def test_a_link_in_a_run_directory_is_refused(copied, tmp_path, name):
    """Nothing is written, removed or shown by way of it."""
    victim = tmp_path / "victim"
    if (copied / name).is_dir():
        shutil.move(copied / name, victim)
    else:
        victim.write_text("mine")
        (copied / name).unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in [victim, *victim.rglob("*")] if path.is_file()}
    os.mkfifo(copied / name) if name == "pipe" else (copied / name).symlink_to(victim)
    for command in (["math", *SMALL, "--out", tmp_path, "--name", "run"], ["report", copied], ["export", copied, "--out", tmp_path / "out"]):
        code, output = call(*command)
        assert code == 2 and str(copied / name) in output and "is a link, a pipe or a device" in output, output
    assert {path: path.read_bytes() for path in [victim, *victim.rglob("*")] if path.is_file()} == before


def test_no_record_leads_out_of_a_run(copied, tmp_path):
    (tmp_path / "secret").write_text('"canary-77"\n')
    edit(copied / "summary.json", final_harness="../secret")
    assert call("report", copied)[0] == 0 and "canary-77" not in (copied / "report.html").read_text()
    history = next(copied.glob("harness/*/history.jsonl"))
    whole = history.read_text()
    history.write_text(whole.replace('"name": "h1"', '"name": "../../../secret"'))
    code, output = call("report", copied)
    assert code == 2 and "'../../../secret' lies outside" in output, output
    history.write_text(whole)
    edit(copied / "state.json", evals=[row | {"traces": "../secret"} for row in read_sealed(copied / "state.json")["evals"]])
    code, output = call("report", copied)
    assert code == 2 and "'../secret' lies outside" in output, output


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


def test_a_signal_ends_a_small_command(tmp_path):
    process = start_planted(MOMENTS["base evaluation"], "eval", "math", "--out", tmp_path)
    read_until(process, "HELD")
    below = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    assert_stopped(process, signal.SIGINT, below)


# ---- disks -----------------------------------------------------------------------------------------------------------


class Disk:
    """A small tmpfs. From `arm` on it is full at the first opening, or making of a folder, of each kind that was not hit
    before; a kind is a path without its numbers. `free_again` ends that."""
    current, wanted = None, staticmethod(lambda name: True)

    def __init__(self, path: Path):
        self.path, self.hit, self.is_armed, self.kinds = path, set(), False, []

    def hear(self, event: str, args: tuple) -> None:
        if self.is_armed and event in ("open", "os.mkdir") and str(args[0]).startswith(str(self.path)):
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            kind = re.sub(r"\d+", "#", str(Path(args[0]).relative_to(self.path)))
            if not self.wanted(Path(kind).name):
                return
            leaves = [0, 1 << 20, 5400 << 10] if event == "os.mkdir" and kind.endswith("step_#.tmp") else [0]
            for room in leaves:                                      # a checkpoint's large files are written by no Python
                if (kind, room) not in self.hit:
                    self.hit.add((kind, room))
                    return self.fill(room)

    def fill(self, leave: int = 0) -> None:
        self.is_armed = False
        seen = os.statvfs(self.path)
        with open(self.path / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, max(1, seen.f_bavail * seen.f_frsize - leave))

    def free_again(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)


sys.addaudithook(lambda event, args: Disk.current and Disk.current.hear(event, args))


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    Disk.current = Disk(path)
    yield Disk.current
    Disk.current = None
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_where_it_matters(finished, disk, monkeypatch):
    names = {"step_#.tmp", "state.json.#.tmp"}
    disk.wanted = names.__contains__
    fill_at_each_kind(finished, disk, monkeypatch)
    assert {Path(kind).name for kind, _ in disk.hit} == names


def fill_at_each_kind(finished: Path, disk: Disk, monkeypatch) -> None:
    """One run, which meets a full disk once at each kind of file that it writes, and goes on when there is room again."""
    monkeypatch.setattr("whale.check_disk", lambda *_: "")
    folder, said = disk.path / "run", []
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))         # nothing needs room in /tmp either
    for _ in range(100):
        disk.is_armed = True
        code, output = go_on(folder)
        disk.free_again()
        assert "Traceback" not in output
        if disk.is_armed:                                            # no kind is left
            break
        if code:
            assert code == 1 and "No space left" in output and str(folder) in output and "goes on" in output, output
            said.append(output)
        else:                                                        # only the page was lost, and the run says so
            assert "no report.html: " in output
    assert code == 0, output
    assert any("step_000001" in output and "os error 28" in output for output in said)        # in the words of a library
    assert end_of(folder) == end_of(finished) and not list(folder.rglob("*.tmp"))
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("words", [
    ["eval", "math", "--test", f"{ROOT}/embedded/math/test.jsonl[:2]", "--n", 1], ["export", "RUN"],
    ["retriever", "--corpus", ROOT / "embedded/search/corpus.jsonl", "--build", "--index"]], ids=lambda words: words[0])
def test_a_full_disk_under_a_small_command(finished, disk, words):
    (disk.path / "out").mkdir()
    disk.fill()
    out = [disk.path / "out/index"] if "--index" in words else ["--out", disk.path / ("out" if words[0] == "eval" else "out/new")]
    code, output = call(*[finished if word == "RUN" else word for word in words], *out)
    assert code == 1 and ("No space left" in output or "os error 28" in output), output
    assert str(disk.path) in output and "Traceback" not in output


@pytest.mark.parametrize("what", ["read-only", "a file", "a dangling link", "below a file"])
def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_loaded(request, halfway, tmp_path, monkeypatch, what):
    monkeypatch.setattr("team.TransformersEngine", None)
    out = tmp_path / "runs"
    match what:
        case "read-only":
            disk = request.getfixturevalue("disk")
            out = disk.path
            shutil.copytree(halfway, out / "run")
            subprocess.run(["mount", "-o", "remount,ro", out], check=True)
        case "a file":
            out.write_text("precious")
        case "a dangling link":
            out.symlink_to(tmp_path / "nowhere")
        case "below a file":
            out.write_text("precious")
            out = out / "deeper"
    code, output = call("math", *SMALL, "--out", out, "--name", "run")
    assert code == 2 and str(out) in output and "--out" in output and "Traceback" not in output, output


# ---- clocks ----------------------------------------------------------------------------------------------------------

SLEEPY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from sandbox import Limits, Programs, Sandbox
with Sandbox() as box:
    programs = Programs(box, '''
import time
from harness_api import *
def run(task):
    time.sleep(2)
    yield generate(chat("", "hello"))
''', Limits(1, 128))
    programs.start(0, {{}}, 0)
    programs.flush()
    box.python_start(1, "import time\\ntime.sleep(2)\\nprint('done')", Limits(3, 128))
    box.flush()
    print("HELD", flush=True)
    print(programs.wait(0).kind, box.python_wait(1))
    programs.start(2, {{}}, 0)
    print(programs.wait(2).kind)
"""


def pause(process: subprocess.Popen, seconds: float) -> None:
    """As a paused virtual machine is: all of them, for a while that the clock counts."""
    below = descendants(process.pid)
    assert below
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (process.pid, *below):
            os.kill(pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


def test_a_pause_is_not_the_time_of_a_snippet_or_a_program():
    """Longer than every limit of theirs on the clock, and than the silence after which a helper is given up."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPY], stdout=subprocess.PIPE, text=True)
    read_until(process, "HELD")
    time.sleep(0.5)
    pause(process, 12)
    output, _ = process.communicate()
    assert output == "request ToolResult(status='ok', output='done\\n')\nrequest\n" and process.returncode == 0, output


@pytest.mark.parametrize("ahead", [pytest.param(3600, marks=pytest.mark.slow), -7 * 86400])
def test_another_clock_changes_nothing(finished, tmp_path, monkeypatch, ahead):
    """The wall clock set forward, or back a week, while files of before lie there; and one that moves on in leaps."""
    real, n = time.monotonic, [0]

    def leaping() -> float:
        n[0] += 1
        return real() + 3600 * (n[0] // 50)

    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - ahead, time.time() - ahead))
    os.utime(folder / "report.html", (0, 0))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "log.txt")}
    assert go_on(folder)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a complete run does nothing"
    edit(folder / "state.json", complete=False)                     # the page is of another state now
    report.write_report(folder)
    edit(folder / "state.json", complete=True)
    os.utime(folder / "state.json", (0, 0))
    assert go_on(folder)[0] == 0 and report.report_mark(folder) in (folder / "report.html").read_text()
    if ahead > 0:
        monkeypatch.setattr(time, "monotonic", leaping)
        assert go_on(tmp_path / "leaps")[0] == 0
        assert end_of(tmp_path / "leaps") == end_of(finished) and n[0] > 500


# ---- parts that die --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_helper_that_is_killed_in_a_run_changes_nothing(finished, tmp_path, monkeypatch):
    """The sandbox's helper, in the middle of a weight step: its rollouts are made again, to the same end."""
    from rollout import Batch

    take, n = Batch._take_completion, [0]

    def taking(self, completion):
        n[0] += 1
        if n[0] == 100:
            self.sandbox._process.kill()
        return take(self, completion)

    monkeypatch.setattr(Batch, "_take_completion", taking)
    code, output = go_on(tmp_path / "run")
    assert code == 0 and n[0] > 100, output
    assert end_of(tmp_path / "run") == end_of(finished)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), EngineDied("the engine is gone. The same command goes on")], ids=type)
def test_an_engine_that_fails_in_a_run_is_a_sentence(finished, tmp_path, monkeypatch, error):
    from transformers_engine import TransformersEngine

    step = TransformersEngine.step

    def failing(self):
        if self.version == 1:
            raise error
        return step(self)

    with monkeypatch.context() as broken:
        broken.setattr(TransformersEngine, "step", failing)
        code, output = go_on(tmp_path / "run")
    assert code == 1 and "Traceback" not in output and "the same command goes on" in output.lower(), output
    assert read_sealed(tmp_path / "run/state.json")["weight_step"] == 1


def test_nobody_is_left_to_be_told(tmp_path):
    """The terminal is gone, and something swallows the exception: the process ends all the same. And without any stream."""
    code = ("import os, sys, time, stop; stop.listen(); stop.can_raise = True; told = False\n"
            "while True:\n  try:\n    told = told or print('here', flush=True) or True; time.sleep(99)\n  except BaseException: pass")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    done = subprocess.run(["bash", "-c", f"exec {sys.executable} cli.py verify math --reply-file {tmp_path}/reply --reference 3 <&- >&- 2>&-"],
                          cwd=ROOT, capture_output=True)
    assert done.returncode == 2
    (tmp_path / "reply").write_text("\\boxed{3}")
    done = subprocess.run(["bash", "-c", f"exec {sys.executable} cli.py verify math --reply-file {tmp_path}/reply --reference 3 <&- >&-"],
                          cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
