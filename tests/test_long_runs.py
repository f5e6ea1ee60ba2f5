"""What a long run must not do: grow. The half hour itself is slow_soak.py; here is what it is made of, many times over."""

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import requests

import candidates
import report
from agent_tools import Workbench
from candidates import ProposalRequest, earlier_findings
from config import PRESETS, ROOT, Config, DiskPlan, UsageError, check_disk, plan_disk
from files import in_order
from sandbox import Limits, Sandbox
from sessions import fill_folder
from small import start
from watch import anonymous_of, count_in, family_of, size_of, stat_of

MIB = 1 << 20
SNIPPETS = ["print(1)", "x = [0] * 10**9", "raise ValueError('x')", "import os; os.fork()", "print('a' * 100_000)",
            "def f(): f()\nf()", "import sys; sys.exit(3)", "open('/etc/passwd')", "import ctypes; ctypes.string_at(0)",
            "import os; os._exit(9)"]


# ---- a hundred cycles -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(finished, tmp_path_factory) -> Path:
    """A finished run whose first cycle is there 101 times."""
    folder = tmp_path_factory.mktemp("long") / "run"
    shutil.copytree(finished, folder)
    for number in range(2, 102):
        shutil.copytree(folder / "harness/cycle_01", folder / f"harness/cycle_{number:02d}")
    return folder


def test_cycles_are_in_the_order_of_their_numbers(long_run, tmp_path):
    """As text, cycle_100 comes before cycle_11: what is earlier, what a session is given, and which archive is the last."""
    archives = in_order((long_run / "harness").iterdir())
    assert [path.name for path in archives[98:]] == ["cycle_99", "cycle_100", "cycle_101"]
    told = [finding.cycle for finding in earlier_findings(archives[100])]
    assert set(told) == set(range(101 - candidates.N_CYCLES, 101)) and told == sorted(told)
    assert {finding.cycle for finding in earlier_findings(archives[98])} == set(range(99 - candidates.N_CYCLES, 99))
    for archive in (archives[98], archives[100]):
        work = tmp_path / archive.name
        fill_folder(work, ProposalRequest(archive, (), ("h9",), (0,), "math", archive / "sessions"))
        assert {path.name for path in (work / "archive").iterdir()} == {path.name for path in archives[:archives.index(archive) + 1]}
        assert Workbench(work, ("h9",)).archive.name == archive.name
        command = next(line for line in (work / "task.md").read_text().splitlines() if line.startswith("C=$("))
        said = subprocess.run(["bash", "-c", command.partition(";")[0] + "; echo $C"], cwd=work, capture_output=True, text=True)
        assert said.stdout.strip() == f"archive/{archive.name}"


def test_a_page_of_a_hundred_cycles_is_no_longer_than_one_of_ten(long_run, tmp_path):
    short = tmp_path / "run"
    shutil.copytree(long_run, short, ignore=lambda _, names: [
        name for name in names if name.startswith("cycle_") and int(name[6:]) > report.N_CYCLES])
    pages = {folder: report.write_report(folder).read_text() for folder in (short, long_run)}
    assert len(pages[long_run]) < 1.01 * len(pages[short])
    assert "<h3>cycle 101:" in pages[long_run] and "<h3>cycle 91:" not in pages[long_run] and "91 before them" in pages[long_run]
    assert "before them" not in pages[short] and "<h3>cycle 01:" in pages[short]


def test_what_a_proposer_is_told_does_not_grow(long_run):
    from envs import MathEnv
    from rollout import RolloutConfig
    from task_text import task_text
    env = MathEnv()
    tasks = env.load(ROOT / "embedded/math/harness.jsonl")[:8]
    texts = [task_text(env, tasks, RolloutConfig(), 3, earlier=earlier_findings(long_run / f"harness/cycle_{number}"))
             for number in (20, 101)]
    assert len(texts[1]) < 1.02 * len(texts[0]) and "Cycles before 91 are in" in texts[1] and "cycle 100, h" in texts[1]


# ---- what a run takes on disk ----------------------------------------------------------------------------------------


def test_a_run_says_what_it_takes_and_takes_less(finished):
    """Before anything is sampled. Not absurdly less, and never more than the bound."""
    lines = (finished / "log.txt").read_text().splitlines()
    said = next(i for i, line in enumerate(lines) if " takes about " in line)
    assert said < next(i for i, line in enumerate(lines) if line.startswith("test mean"))
    words = re.search(r"about ([\d,]+) MiB \((\d+) checkpoints of (\d+) MiB, .*at most ([\d,]+) MiB; ([\d,]+) MiB are free", lines[said])
    about, n, each, most, free = (int(word.replace(",", "")) for word in words.groups())
    taken = size_of(finished) / MIB
    assert taken < about < 50 * taken and about < most < 50 * taken and free > about
    checkpoints = [size_of(folder) / MIB for folder in (finished / "weights").iterdir() if (folder / "model.safetensors").exists()]
    assert n == Config("math").keep + 2 and all(0.9 * each < size < 1.1 * each for size in checkpoints)


def test_a_resumed_run_needs_room_for_the_rest_only(finished, tmp_path, monkeypatch):
    cfg = Config("math", out=str(tmp_path), name="run")
    plan = DiskPlan(n_checkpoints=1, checkpoint=100 * MIB, records=0, most=0)
    free = shutil.disk_usage(tmp_path)._replace(free=95 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(UsageError, match="95 MiB free and this run may need 100 MiB more"):
        check_disk(cfg, plan)
    shutil.copytree(finished, tmp_path / "run")
    assert "95 MiB are free" in check_disk(cfg, plan)


@pytest.mark.parametrize("method", ["weight", "harness", "stagewise", "adaptive"])
def test_every_method_has_a_bound(method):
    """Twice the rollouts, about twice the records."""
    plans = [plan_disk(Config(**{"domain": "math", **PRESETS["tiny"], "method": method, "rollouts": n}), 10 ** 6, 2048, 256, 256)
             for n in (20_000, 40_000)]
    assert 1.7 < plans[1].records / plans[0].records < 2.2 and (plans[0].n_checkpoints > 0) == (method != "harness")


# ---- long-lived processes -------------------------------------------------------------------------------------------


def rest_of(pid: int) -> dict[str, list]:
    """What a process and all below it hold when they have nothing to do."""
    family = family_of(pid)
    return {"processes": family, "states": [(stat_of(one) or "Z")[0] for one in family],
            "files": [count_in(Path(f"/proc/{one}/fd")) for one in family],
            "threads": [count_in(Path(f"/proc/{one}/task")) for one in family]}


def wait_for_rest(pid: int, wanted: dict[str, list]) -> None:
    """Children that have just ended may still be seen; what stays does not go."""
    deadline = time.monotonic() + 60
    while (rest := rest_of(pid)) != wanted:
        assert time.monotonic() < deadline, (rest, wanted)
        time.sleep(0.05)


def soak_sandbox(n: int) -> list[float]:
    """n snippets, hostile ones among them -> MiB of the sandbox's processes, after each hundred."""
    sizes = []
    with Sandbox(max_jobs=2) as sandbox:
        sandbox.python("print(1)", Limits(2, 256))
        pid, own = sandbox._process.pid, count_in(Path("/proc/self/fd"))
        rest = rest_of(pid) | {"states": ["S"] * len(family_of(pid))}       # none of them is busy, or a zombie
        wait_for_rest(pid, rest)
        for start in range(0, n, 100):
            for job in range(start, start + 100):
                sandbox.python_start(job, f"{SNIPPETS[job % len(SNIPPETS)]}\n# {job}", Limits(2, 256))
            statuses = [sandbox.python_wait(job).status for job in range(start, start + 100)]
            assert set(statuses) == {"ok", "error", "killed"}
            wait_for_rest(pid, rest)
            assert count_in(Path("/proc/self/fd")) == own
            sizes.append(sum(map(anonymous_of, rest["processes"])) / MIB)
        assert not sandbox._jobs and not sandbox._answers
    assert max(sizes[-5:]) < max(sizes[:5]) + 0.5
    return sizes


def test_snippets_leave_nothing_in_the_helper():
    """slow_soak.py has ten thousand."""
    soak_sandbox(1500)


def ask(url: str, n: int, body: str) -> None:
    """n requests over one connection, and as many over connections of their own that break off in several places."""
    with requests.Session() as session:
        for i in range(n):
            assert session.post(f"{url}/retrieve", data=body.replace("NUMBER", str(i))).status_code == (200 if "queries" in body else 400)
    host, port = url.removeprefix("http://").split(":")
    request = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for i in range(n):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall([b"", b"GARBAGE\r\n\r\n", request[:40], request[:-3], request][i % 5])      # and never read


def soak_retriever(n: int) -> list[float]:
    """-> MiB of a retriever server after each tenth of n requests, good ones and bad ones."""
    process = start("retriever", "--corpus", ROOT / "embedded/search/corpus.jsonl", "--port", 0)
    sizes = []
    try:
        url = re.search(r"http://[\d.:]+", process.stdout.readline())[0]
        good, bad = json.dumps({"queries": ["Who founded NUMBER?"], "topk": 3}), '{"question": NUMBER}'
        rest = {**rest_of(process.pid), "states": ["S"]}
        for _ in range(10):
            ask(url, n // 40, good)
            ask(url, n // 40, bad)
            wait_for_rest(process.pid, rest)
            sizes.append(anonymous_of(process.pid) / MIB)
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 143
    assert max(sizes[-3:]) < max(sizes[:3]) + 4
    return sizes


def test_a_retriever_holds_nothing_of_finished_requests():
    soak_retriever(1200)
