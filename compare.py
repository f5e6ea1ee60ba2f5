"""Several methods or schedules on the same tasks, seeds and budgets: runs them all, then one table and one figure.

Every arm is an ordinary run (`bash run.sh DOMAIN --method M --seed S --rollouts N ...`) in a process and a directory of
its own; a finished arm is never run again, a stopped one is resumed. Arms that differ in more than what is compared are
refused. The x axis is the training rollouts (weight + harness), as in the paper; all else that was spent stands beside.

    OUT/compare-math/arms/whale-seed0/ ...      the runs, each with its log
    OUT/compare-math/results.json               all that table and figure are made of
    OUT/compare-math/table.md  curves.png  report.html

Differs from the paper: the paper shows single runs; here a method is the mean over seeds, and since arms of one seed
share tasks and sampling seeds, differences are paired.

    bash run.sh compare math --methods whale,weight --seeds 3 --rollouts 5632
    bash run.sh compare math --schedules "0.2:2,0.2:6,0.6:2,0.6:6,1.0:10"
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from config import ROOT, Config, load_splits
from rundir import UsageError
from sched import METHODS
from whale import rollout_budget

VARIES = {"method", "seed", "epochs", "iterations", "out", "name"}      # what arms of a comparison may differ in


class ArmFailed(RuntimeError):
    """An arm ended without its result; the others are finished and kept."""


@dataclass(frozen=True)
class Arm:
    label: str                          # the method, or "whale E:I"
    cfg: Config

    @property
    def folder(self) -> Path:
        return self.cfg.run_dir

    @property
    def complete(self) -> bool:
        summary = self.folder / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["complete"]


def plan_arms(cfg: Config, methods: list[str], schedules: list[tuple[float, int]], n_seeds: int) -> list[Arm]:
    """One arm a method (or a schedule of `cfg.method`) and seed, all to the same number of training rollouts."""
    _, splits = load_splits(cfg)
    cfg = replace(cfg, rollouts=rollout_budget(cfg, len(splits["train"]), len(splits["harness"])))
    variants = [(method, replace(cfg, method=method)) for method in methods] or [
        (f"{cfg.method} {epochs:g}:{iterations}", replace(cfg, epochs=epochs, iterations=iterations))
        for epochs, iterations in schedules]
    for _, variant in variants:
        rollout_budget(variant, len(splits["train"]), len(splits["harness"]))           # refuses less than a step
    folder = cfg.run_dir / "arms"
    return [Arm(label, replace(variant, seed=seed, out=str(folder), name=f"{label.replace(' ', '-')}-seed{seed}"))
            for seed in range(cfg.seed, cfg.seed + n_seeds) for label, variant in variants]


def run_arms(arms: list[Arm], n_jobs: int) -> None:
    """Runs those that are not complete, n_jobs at once, each on its share of the cores. ArmFailed when all are done."""
    todo = [arm for arm in arms if not arm.complete]
    n_threads = max(1, len(os.sched_getaffinity(0)) // n_jobs)
    running: dict[Arm, subprocess.Popen] = {}
    failed: dict[str, str] = {}
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        overall = progress.add_task("training rollouts of all arms", total=sum(arm.cfg.rollouts for arm in arms))
        bars = {}
        try:
            while todo or running:
                while todo and len(running) < n_jobs:
                    arm = todo.pop(0)
                    running[arm] = start_arm(arm, n_threads)
                    bars[arm] = progress.add_task(arm.folder.name, total=arm.cfg.rollouts)
                for arm, process in list(running.items()):
                    progress.update(bars[arm], completed=n_spent(arm))
                    if process.poll() is not None:
                        del running[arm]
                        progress.remove_task(bars.pop(arm))
                        if process.returncode:
                            failed[arm.folder.name] = last_line(log_of(arm))
                        console.print(f"{arm.folder.name}: " + (failed.get(arm.folder.name) or last_result(arm)))
                progress.update(overall, completed=sum(map(n_spent, arms)))
                time.sleep(0.2)
        finally:
            for process in running.values():                        # stopped: the arms stop too, and can be resumed
                process.terminate()
            for process in running.values():
                process.wait()
    if failed:
        raise ArmFailed("\n".join(f"{name}: {why} (its log: {arms[0].folder.parent / name}.log)"
                                  for name, why in failed.items()))


def start_arm(arm: Arm, n_threads: int) -> subprocess.Popen:
    flags = []
    for key, value in asdict(arm.cfg).items():
        if key != "domain" and value != "":
            flags += [f"--{key.replace('_', '-')}", str(value).lower() if isinstance(value, bool) else str(value)]
    arm.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(log_of(arm), "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), arm.cfg.domain, *flags], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(n_threads)}, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    """Killed, we leave no arm behind that would hold its directory (prctl PR_SET_PDEATHSIG, Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def log_of(arm: Arm) -> Path:
    return arm.folder.with_name(arm.folder.name + ".log")


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


def last_result(arm: Arm) -> str:
    summary = json.loads((arm.folder / "summary.json").read_text())
    return (f"test mean@{summary['n_eval']} {summary['base_mean8']['mean']:.3f} -> {summary['final_mean8']['mean']:.3f}"
            f" in {sum(summary['seconds'].values()):.0f} s")


def n_spent(arm: Arm) -> int:
    """Training rollouts so far."""
    state = arm.folder / "state.json"
    ledger = json.loads(state.read_text())["ledger"] if state.exists() else {}
    return sum(int(ledger.get(kind, {}).get("rollouts", 0)) for kind in ("weight", "harness"))


# ---- the command ----------------------------------------------------------------------------------------------------


def add_flags(parser) -> None:
    parser.add_argument("--methods", default="", help=f"comma-separated, of {', '.join(METHODS)}; default: all")
    parser.add_argument("--schedules", default="", help='E:I,E:I ...: schedules of one --method, in place of --methods')
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --seed on")
    parser.add_argument("--jobs", type=int, default=0, help="arms at once; default: one a core, on a GPU one")


def read_variants(methods: str, schedules: str) -> tuple[list[str], list[tuple[float, int]]]:
    if methods and schedules:
        raise UsageError("give --methods or --schedules, not both")
    try:
        pairs = [(float(epochs), int(iterations)) for epochs, _, iterations in
                 (pair.partition(":") for pair in schedules.split(",") if schedules)]
    except ValueError:
        raise UsageError(f"--schedules {schedules}: must be E:I,E:I ..., such as 0.2:2,0.6:6") from None
    names = [name for name in methods.split(",") if name] or ([] if schedules else list(METHODS))
    if wrong := [name for name in names if name not in METHODS]:
        raise UsageError(f"--methods {','.join(wrong)}: the methods are {', '.join(METHODS)}")
    if len(set(names)) < len(names) or len(set(pairs)) < len(pairs):
        raise UsageError("a method or schedule is given twice")
    return names, pairs


def command_compare(cfg: Config, methods: str, schedules: str, n_seeds: int, n_jobs: int) -> int:
    if n_seeds < 1 or n_jobs < 0:
        raise UsageError(f"--seeds {n_seeds} --jobs {n_jobs}: at least 1 (--jobs 0: one a core)")
    names, pairs = read_variants(methods, schedules)
    cfg = replace(cfg, name=cfg.name or f"compare-{cfg.domain}")
    arms = plan_arms(cfg, names, pairs, n_seeds)
    n_cores = len(os.sched_getaffinity(0))
    run_arms(arms, min(len(arms), n_jobs or (n_cores if cfg.device == "cpu" else 1)))
    return 0
