"""A soak: each world runs for ten minutes, cycle after cycle, and is watched from outside. What a run holds must not grow.

WHALE_SOAK_S=480 makes all three last that many seconds together. By default 1,800, half an hour.

    bash run.sh test-slow -k soak

What is watched, of the process and of all below it: memory (PSS), open files, threads, processes, zombies; what lies in
the temporary folder and in /dev/shm; the run directory and its checkpoints. The first cycle is warm-up: the caches of
model and tokenizer fill, and the second evaluation is the first that makes a page with figures. Of the rest,

    memory       the least of a cycle, when nothing is at work: its median in the last third is not above that in the
                 middle one by 32 MiB. Its peak follows what is sampled (more tool calls and tokens a rollout, as the
                 model learns), up to the largest batch that there can be: the median by no half
    files ...    open files, threads and processes: the least of a cycle, what is left when nothing is at work, in the last
                 third no higher than in the middle one
    files made   none in the temporary folder or /dev/shm that outlives the run, and no more of them later than before
    CPU time     a model call, of all that a cycle does: the median of the last third is at most 1.5 times that of the
                 middle one
    directory    no more than five checkpoints (two that are kept, the best, the one that is written, and what it takes
                 the place of); the rest grows by what a cycle writes, as much in the last third as in the middle one (to
                 a half); all of it is below what was said at the start
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from config import ROOT
from test_long_runs import soak_retriever, soak_sandbox
from watch import count_in, family_of, pss_of, size_of, stat_of

pytestmark = pytest.mark.slow
SOAK_S = float(os.environ.get("WHALE_SOAK_S", "1800"))
EVERY_S = 0.25
SHARED_BEFORE = set(Path("/dev/shm").iterdir())
MIB = 1 << 20
LEAST_CYCLES = 20               # if the machine is busy, it takes up to half as long again
# small, so that there are many cycles; all that a run does is in each of them
FLAGS = {"math": ["--epochs", "0.05", "--train", "train.jsonl[:160]"],
         "search": ["--epochs", "0.05", "--train", "train.jsonl[:160]"],
         "chess": ["--epochs", "0.05", "--train", "train.jsonl[:160]"]}
COMMON = ["--cycles", "1000", "--prompt-batch", "8", "--iterations", "2", "--candidates", "1", "--n-eval", "2", "--lr",
          "1e-4", "--max-empty-steps", "1000", "--harness-set", "harness.jsonl[:12]", "--test", "test.jsonl[:12]"]


@dataclass
class Sample:
    """What was seen from outside at a moment, of the run's process and of all below it."""
    at_s: float
    n_cycles: int
    pss_own: int            # bytes, of the process
    pss: int                # and of all
    n_files: int
    n_threads: int
    n_processes: int
    n_zombies: int
    n_temporary: int
    disk: int               # bytes of the run directory
    n_checkpoints: int
    cpu_s: float            # of the process


def take_sample(pid: int, started: float, run: Path, temporary: Path) -> Sample:
    family = family_of(pid)
    stats = {one: stat_of(one) for one in family}
    own, metrics = stats.get(pid) or ["?"] * 20, run / "metrics.jsonl"
    n_ledgers = metrics.read_bytes().count(b'"kind": "ledger"') if metrics.exists() else 0
    return Sample(
        at_s=time.monotonic() - started, n_cycles=n_ledgers // 2, pss_own=pss_of(pid), pss=sum(map(pss_of, family)),
        n_files=count_in(Path(f"/proc/{pid}/fd")), n_threads=count_in(Path(f"/proc/{pid}/task")),
        n_processes=len(family), n_zombies=sum(words[:1] == ["Z"] for words in stats.values()),
        n_temporary=count_in(temporary), disk=size_of(run) - size_of(run / "weights"), n_checkpoints=len(list((run / "weights").glob("*/model.safetensors"))),
        cpu_s=(int(own[11]) + int(own[12])) / os.sysconf("SC_CLK_TCK") if own[0] != "?" else 0.0)


def watch(domain: str, folder: Path, seconds: float) -> tuple[list[Sample], Path, int, str]:
    """Runs for so long, then SIGTERM -> the samples, the run directory, its exit code and what it printed."""
    data, temporary = ROOT / "embedded" / domain, folder / "tmp"
    flags = [re.sub(r"^(\w+\.jsonl)", rf"{data}/\1", flag) for flag in (*FLAGS[domain], *COMMON)]
    temporary.mkdir()
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), domain, *flags, "--out", str(folder), "--name", "run"],
            stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True)
    samples, started = [], time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - started < 1.5 * seconds and (
                time.monotonic() - started < seconds or samples[-1].n_cycles < LEAST_CYCLES):
            time.sleep(EVERY_S)
            samples.append(take_sample(process.pid, started, folder / "run", temporary))
        family = family_of(process.pid)
        process.send_signal(signal.SIGTERM)              # a background job is deaf to SIGINT
        code = process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not [pid for pid in family if stat_of(pid)], "a process outlives the run"
    return samples, folder / "run", code, (folder / "output.txt").read_text()


@dataclass
class Cycle:
    """A cycle in figures: memory at its peak and at its least, and what is left of the rest when nothing is at work."""
    number: int
    seconds: float
    cpu_s_a_call: float
    pss_own: float          # MiB, its peak
    pss: float
    least_own: float        # MiB
    least: float
    n_files: int
    n_threads: int
    n_processes: int
    n_temporary: int
    disk: float             # MiB, without checkpoints
    n_checkpoints: int


def cycles_of(samples: list[Sample], run: Path) -> list[Cycle]:
    """The finished ones."""
    ledgers = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ledgers = [row for row in ledgers if row["kind"] == "ledger"][1::2]
    n_calls = [sum(row.get(f"{kind}_model_calls", 0) for kind in ("weight", "harness", "gates", "eval")) for row in ledgers]
    found, n_before = [], 0
    for number in range(samples[-1].n_cycles):
        group = [s for s in samples if s.n_cycles == number]
        last = next(s for s in samples if s.n_cycles > number)
        calls, n_before = n_calls[number] - n_before, n_calls[number]
        if group:
            least = {name: min(getattr(s, name) for s in group)
                     for name in ("n_files", "n_threads", "n_processes", "n_temporary")}
            found.append(Cycle(
                number + 1, last.at_s - group[0].at_s, (last.cpu_s - group[0].cpu_s) / calls,
                max(s.pss_own for s in group) / MIB, max(s.pss for s in group) / MIB,
                min(s.pss_own for s in group) / MIB, min(s.pss for s in group) / MIB, **least,
                disk=max(s.disk for s in group) / MIB, n_checkpoints=max(s.n_checkpoints for s in group)))
    return found


def thirds(cycles: list[Cycle], name: str) -> tuple[list[float], list[float]]:
    """Of the middle and the last third of the cycles after the first."""
    values = [getattr(cycle, name) for cycle in cycles[1:]]
    n = len(values) // 3
    return values[n:len(values) - n], values[len(values) - n:]


def rise(cycles: list[Cycle], name: str) -> float:
    """Of the straight line through the middle and the last third, from end to end."""
    values = np.array(sum(thirds(cycles, name), []))
    return float(np.polyfit(np.arange(len(values)), values, 1)[0] * (len(values) - 1))


def table_of(cycles: list[Cycle]) -> str:
    names = list(vars(cycles[0]))
    rows = [names, *([f"{value:.4g}" for value in vars(cycle).values()] for cycle in cycles)]
    width = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(n) for cell, n in zip(row, width, strict=True)) for row in rows)


def draw(cycles: list[Cycle], path: Path) -> None:
    names = [name for name in vars(cycles[0]) if name != "number"]
    figure = Figure((9, 1.5 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True), names, strict=True):
        axes.plot([cycle.number for cycle in cycles], [getattr(cycle, name) for cycle in cycles], ".-")
        axes.set_ylabel(name, rotation=0, ha="right")
        axes.set_ylim(bottom=0)
    figure.savefig(path)


@pytest.mark.parametrize("domain", FLAGS)
def test_a_soak_is_flat(domain, figure, tmp_path):
    samples, run, code, output = watch(domain, tmp_path, SOAK_S / len(FLAGS))
    cycles = cycles_of(samples, run)
    (tmp_path / "soak.txt").write_text(table_of(cycles) + "\n")
    draw(cycles, tmp_path / "soak.png")
    figure(f"soak of {domain}: {samples[-1].at_s:.0f} s, {len(cycles)} cycles; table and picture in {tmp_path}\n"
           + table_of(cycles[:3] + cycles[3:-1][::max(1, len(cycles) // 12)] + cycles[-1:]))
    for name in ("pss_own", "pss", "least_own", "least", "cpu_s_a_call", "seconds", "disk"):
        middle, last = thirds(cycles, name)
        figure(f"  {name}: rise {rise(cycles, name):+.3g}; largest {max(middle):.4g}, then {max(last):.4g}; "
              f"median {statistics.median(middle):.4g}, then {statistics.median(last):.4g}")
    assert code == 143, output[-2000:]
    assert len(cycles) >= LEAST_CYCLES, "too few cycles to tell: a longer WHALE_SOAK_S"
    for name, times, more in (("least_own", 1, 32), ("least", 1, 32), ("pss_own", 1.5, 0), ("pss", 1.5, 0)):
        middle, last = map(statistics.median, thirds(cycles, name))
        assert last <= times * middle + more, name
    for name in ("n_files", "n_threads", "n_processes", "n_temporary"):
        middle, last = thirds(cycles, name)
        assert max(last) <= max(middle), name
    assert max(cycle.n_checkpoints for cycle in cycles) <= 5
    middle, last = thirds(cycles, "disk")
    assert last[-1] - last[0] <= 1.5 * (middle[-1] - middle[0]) * len(last) / len(middle)
    assert size_of(run) < int(re.search(r"takes about ([\d,]+) MiB", output)[1].replace(",", "")) * MIB
    assert not any(a.n_zombies and b.n_zombies and c.n_zombies for a, b, c in zip(samples, samples[1:], samples[2:], strict=False))
    assert not count_in(tmp_path / "tmp"), "left in the temporary folder"
    assert not [path for path in Path("/dev/shm").glob("whale-*") if path not in SHARED_BEFORE]
    middle, last = thirds(cycles, "cpu_s_a_call")
    assert statistics.median(last) <= 1.5 * statistics.median(middle)


def test_ten_thousand_snippets(figure):
    figure(f"10,000 snippets, memory of the helper: {' '.join(f'{size:.2f}' for size in soak_sandbox(10_000)[::10])} MiB")


def test_ten_thousand_requests(figure):
    figure(f"10,000 requests, memory of the retriever: {' '.join(f'{size:.1f}' for size in soak_retriever(10_000))} MiB")
