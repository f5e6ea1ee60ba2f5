"""SIGKILL at 20 moments of a small run, one drawn from each twentieth of its time; then the same command until it ends.

Each time the end must be that of the undisturbed run: metrics (times apart), harness, every byte of the last weights; and
no process and no half-written file may be left. Every other kill takes the process group, the others the host alone. The
same, less often, for a search that confirms and for two ranks; and the signals that need many processes.

    bash run.sh test-slow -k kill               prints what was killed when
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import small
from config import ROOT
from small import SMALL, rows
from test_faults import (  # noqa: F401 (disk is a fixture)
    MOMENTS, assert_stopped, disk, end_of, fill_at_each_kind, pause, read_until, start_planted)
from warden import descendants

pytestmark = pytest.mark.slow
SEED = 20261130
KINDS = {                               # -> flags, how many kills, ranks
    "whale": ([], 20, 1),
    "search": (["--method", "harness", "--accept", "confirm", "--rollouts", "192"], 4, 1),
    "race": (["--method", "harness", "--accept", "race", "--rollouts", "144"], 2, 1),
    "ranks": ([], 3, 2),
}


def start(kind: str, folder: Path, apart: Path) -> subprocess.Popen:
    """The run, as `bash run.sh` starts it; its temporary files go `apart`."""
    flags, _, n_ranks = KINDS[kind]
    ranks = [str(ROOT / "ranks.py"), "--standalone", "--nproc-per-node", str(n_ranks)] if n_ranks > 1 else []
    apart.mkdir(exist_ok=True)
    with open(folder.with_suffix(".out"), "a") as output:
        return subprocess.Popen(
            [sys.executable, *ranks, str(ROOT / "cli.py"), "math", *SMALL, *flags, "--out", str(folder.parent), "--name", folder.name],
            stdout=output, stderr=output, start_new_session=True, env=os.environ | {"TMPDIR": str(apart)})


def wait_for_config(process: subprocess.Popen, folder: Path) -> float:
    """When the run began, the seconds of its imports left out."""
    while not (folder / "config.json").exists():
        assert process.poll() is None, folder.with_suffix(".out").read_text()
        time.sleep(0.005)
    return time.monotonic()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """kind -> the undisturbed run, and how many seconds it took from its config.json to its end; made when asked for."""
    class Whole(dict):
        def __missing__(self, kind):
            folder = tmp_path_factory.mktemp("whole") / "run"
            process = start(kind, folder, folder.parent / "tmp")
            began = wait_for_config(process, folder)
            assert process.wait() == 0, folder.with_suffix(".out").read_text()
            self[kind] = folder, time.monotonic() - began
            return self[kind]

    return Whole()


def where(folder: Path) -> str:
    """What the run was doing when it was killed, as its files tell."""
    if half := next((path for path in folder.rglob("*tmp*") if "tmp" in path.name), None):
        return f"writing {half.relative_to(folder)}"
    done = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if (folder / "metrics.jsonl").exists() else []
    if not done:
        return "loading, or base evaluation"
    last = done[-1]
    what = {"eval": last.get("label"), "weight_step": f"weight step {last.get('step')}", "candidate": f"candidate {last.get('candidate')}",
            "iteration": f"iteration {last.get('iteration')}", "ledger": f"phase {last.get('phase')}"}[last["kind"]]
    scored = len(list(folder.glob("harness/*/*/score.json")))
    return f"after {what}" + f", {scored} candidates scored" * (scored > 0)


@pytest.mark.parametrize("kind, i", [(kind, i) for kind, (_, n, _) in KINDS.items() for i in range(n)])
def test_a_kill_changes_nothing(whole, figure, tmp_path, kind, i):
    undisturbed, took = whole[kind]
    n = KINDS[kind][1]
    moment = (i + random.Random(f"{SEED} {kind} {i}").random()) / n * took
    folder, apart, whom = tmp_path / "run", tmp_path / "tmp", ("group", "host")[i % 2]
    for _ in range(20):
        process = start(kind, folder, apart)
        began = wait_for_config(process, folder)
        while time.monotonic() - began < moment and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            break
        moment *= 0.9                                                # it was faster this time
        shutil.rmtree(folder)
    below = descendants(process.pid)
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
    assert_gone(below)
    figure(f"kill of {kind:6} after {moment:6.2f} of {took:5.1f} s, {whom:5}: {where(folder)}")
    process = start(kind, folder, apart)
    assert process.wait() == 0, folder.with_suffix(".out").read_text()
    assert rows(folder) == rows(undisturbed)
    assert end_of(folder)[1:] == end_of(undisturbed)[1:]
    assert not [path for path in folder.rglob("*tmp*") if "tmp" in path.name]
    assert len(list(apart.iterdir())) <= (kind == "ranks")              # the folder of the launcher that was killed


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.02)


def test_a_full_disk_at_every_write(finished, disk, monkeypatch):     # noqa: F811
    fill_at_each_kind(finished, disk, monkeypatch)
    names = {Path(kind).name for kind, _ in disk.hit}
    assert names >= {"config.json.#.tmp", "metrics.jsonl", "log.txt", "#_step_#.jsonl.#.tmp", "step_#.jsonl.#.tmp",
                     "trainer.json", "tokenizer_config.json", "step_#.tmp", "state.json.#.tmp", "summary.json.#.tmp", "report.html.#.tmp",
                     "final_harness.py.#.tmp", "harness.py.#.tmp", "proposal.json.#.tmp", "score.json.#.tmp", "gates.json.#.tmp",
                     "traces.jsonl.#.tmp", "history.jsonl.#.tmp", "iteration_#.json.#.tmp", "acceptance.json.#.tmp", "task.md.#.tmp"}, names


# ---- signals, clocks, disks: what takes long


def test_a_laptop_asleep_in_a_weight_step(finished, tmp_path):
    process = small.start("math", *SMALL, "--tool-s", 1, "--harness-s", 1, "--out", tmp_path, "--name", "run")
    while not (tmp_path / "run/weights/step_000000/state.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    pause(process, 6)
    output = process.stdout.read()
    assert process.wait() == 0, output
    assert end_of(tmp_path / "run") == end_of(finished)


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


# ---- signals to many processes ---------------------------------------------------------------------------------------


def test_a_signal_ends_a_comparison_and_its_arms(tmp_path):
    process = small.start("compare", "math", *SMALL, "--methods", "whale,weight", "--seeds", 1, "--jobs", 2, "--out", tmp_path)
    arms = [tmp_path / f"compare-math/arms/{name}-seed3" for name in ("whale", "weight")]
    while not all((arm / "weights/step_000000/state.json").exists() for arm in arms):
        assert process.poll() is None
        time.sleep(0.05)
    below = descendants(process.pid)
    assert len(below) >= 4
    os.kill(process.pid, signal.SIGTERM)
    assert_stopped(process, signal.SIGTERM, below)
    assert all("stopped by SIGTERM" in arm.with_name(arm.name + ".log").read_text() for arm in arms)


def test_a_signal_ends_all_ranks(tmp_path):
    flags = ["--standalone", "--nproc-per-node", "2", str(ROOT / "cli.py"), "math", *SMALL, "--out", str(tmp_path), "--name", "run"]
    process = subprocess.Popen([sys.executable, str(ROOT / "ranks.py"), *flags], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (tmp_path / "run/weights/step_000000/state.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    below = descendants(process.pid)
    assert len(below) >= 4
    os.kill(process.pid, signal.SIGINT)
    output = process.stdout.read()
    assert process.wait() == 130 and "stopped by SIGINT" in output and "Traceback" not in output, output
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        time.sleep(0.02)
