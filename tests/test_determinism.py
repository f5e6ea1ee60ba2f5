"""The same seed on the same machine is the same run, byte for byte, times apart: whatever else is different around it.

A resume in the middle, search and chess: test_whale.py. The number of torch threads does change bits (conftest.py), and a
run that goes on with another number says so.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from files import read_sealed
from small import SMALL, TIMES, call, edit, rows, start

# what holds times, and the settings that are told apart below
NOT_COMPARED = {".lock", "log.txt", "report.html", "metrics.jsonl"}
SURROUNDINGS = {
    "C, to the east, narrow": dict(
        env={"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Kolkata",
             "COLUMNS": "40", "PYTHONOPTIMIZE": "1", "NO_COLOR": "1"},
        flags=["--n-workers", "3", "--name", "another"], umask=0o077, busy=0),
    "Turkish, to the west, wide, one core, loaded": dict(
        env={"PYTHONHASHSEED": "random", "LC_ALL": "tr_TR.UTF-8", "TZ": "America/St_Johns", "COLUMNS": "250",
             "PYTHONUNBUFFERED": "1", "FORCE_COLOR": "1"},
        flags=["--n-workers", "2"], umask=0o022, busy=2),
}


def without_times(record: object) -> object:
    if isinstance(record, dict):
        return {key: without_times(value) for key, value in record.items() if not TIMES.search(key) or key == "name"}
    return [without_times(value) for value in record] if isinstance(record, list) else record


def content_of(path: Path) -> object:
    """Of a file of a run, what must be the same each time."""
    if path.suffix != ".json" or "weights" in path.parts and path.name != "state.json":
        return path.read_bytes()
    record = without_times(json.loads(path.read_text()))
    if path.name == "config.json":
        record["config"] = {key: value for key, value in record["config"].items() if key not in ("name", "out", "n_workers")}
    return {key: value for key, value in record.items() if key not in ("metrics_bytes", "metrics_sha256")
            and not (key == "sha256" and isinstance(value, str))}           # its own seal, and of rows with their times


def assert_same_run(run: Path, other: Path) -> None:
    """File by file: weights, optimiser, archives, traces, evaluations, harness, state, summary; and the rows of metrics."""
    files = [{path.relative_to(folder): path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_COMPARED}
             for folder in (run, other)]
    assert files[0].keys() == files[1].keys()
    differ = [str(name) for name in files[0] if content_of(files[0][name]) != content_of(files[1][name])]
    assert not differ and rows(run) == rows(other)
    assert {"model.safetensors", "trainer.safetensors", "traces.jsonl", "history.jsonl", "final_harness.py"} <= {
        name.name for name in files[0]}


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.slow] * ("loaded" in what)) for what in SURROUNDINGS])
def test_what_surrounds_a_run_changes_nothing(finished, tmp_path, what):
    """Hash seed, locale, time zone, terminal, -O, umask, home, temporary folder, working directory, number of sandbox
    workers and of cores, and what else the machine has to do."""
    around, home = SURROUNDINGS[what], tmp_path / "home"
    home.mkdir()
    env = os.environ | around["env"] | {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home)}
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(around["busy"])]
    cores = sorted(os.sched_getaffinity(0))
    try:
        process = start("math", *SMALL, *around["flags"], "--out", tmp_path / "runs", env=env, cwd=home, umask=around["umask"],
                        preexec_fn=lambda: os.sched_setaffinity(0, cores[:1] if around["busy"] else cores))
        output, _ = process.communicate()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert process.returncode == 0, output
    assert_same_run(finished, next((tmp_path / "runs").iterdir()))


def test_another_number_of_threads_is_said(finished, tmp_path):
    """Of a run that goes on; the same number is not worth a word."""
    for name, n in (("run", torch.get_num_threads()), ("more", torch.get_num_threads() + 6)):
        shutil.copytree(finished, tmp_path / name)
        edit(tmp_path / name / "state.json", complete=False, n_threads=n)
        code, output = call("math", *SMALL, "--out", tmp_path, "--name", name)
        assert code == 0 and (f"began with {n} torch threads" in output) == (name == "more"), output
        assert read_sealed(tmp_path / name / "state.json")["n_threads"] == n
    assert read_sealed(finished / "state.json")["n_threads"] == torch.get_num_threads()


def test_a_difference_is_seen(finished, tmp_path):
    """The comparison itself, on a run of another seed and on one flipped byte."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    assert_same_run(finished, copy)
    for name in ("weights/step_000002/trainer.safetensors", "harness/cycle_01/h1/traces.jsonl", "state.json", "final_harness.py"):
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole.replace(b"0", b"1", 1) if b"0" in whole else whole + b"#")
        with pytest.raises(AssertionError):
            assert_same_run(finished, copy)
        (copy / name).write_bytes(whole)
    assert_same_run(finished, copy)
