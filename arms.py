"""The arms of a comparison: which runs there are, and running them, each in a process and a directory of its own."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from config import ROOT, Config, check_schedule, rollout_budget
from files import Damaged, UsageError, read_json, read_sealed


LIBC = ctypes.CDLL(None)


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
        return is_complete(self.folder)


def is_complete(folder: Path) -> bool:
    """A damaged state is none: the arm itself goes back to the one before, and says so."""
    try:
        return read_sealed(folder / "state.json")["complete"]       # written after the summary
    except Damaged:
        return False


def plan_arms(cfg: Config, splits: dict, methods: list[str], schedules: list[tuple[float, int]],
              n_seeds: int) -> list[Arm]:
    """One arm a method (or a schedule of `cfg.method`) and seed, all to the same number of training rollouts."""
    cfg = replace(cfg, rollouts=rollout_budget(cfg, len(splits["train"]), len(splits["harness"])))
    variants = [(method, replace(cfg, method=method)) for method in methods] or [
        (f"{cfg.method} {epochs:g}:{iterations}", replace(cfg, epochs=epochs, iterations=iterations))
        for epochs, iterations in schedules]
    for label, variant in variants:
        check_schedule(variant, len(splits["train"]), len(splits["harness"]))
        cycle = rollout_budget(replace(variant, cycles=1, rollouts=0), len(splits["train"]), len(splits["harness"]))
        if schedules and cycle > cfg.rollouts:
            raise UsageError(f"--rollouts {cfg.rollouts}: one cycle of {label} takes {cycle}")
    folder = cfg.run_dir / "arms"
    return [Arm(label, replace(variant, seed=seed, out=str(folder), name=f"{label.replace(' ', '-')}-seed{seed}"))
            for seed in range(cfg.seed, cfg.seed + n_seeds) for label, variant in variants]


def run_arms(arms: list[Arm], n_jobs: int, n_threads: int, on_end: Callable[[], None]) -> None:
    """Runs those that are not complete, n_jobs at once. ArmFailed, when all are done, if one did not end well."""
    todo = [arm for arm in arms if not arm.complete]
    running: dict[Arm, subprocess.Popen] = {}
    failed: dict[str, str] = {}
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        overall = progress.add_task("arms", total=len(arms), completed=len(arms) - len(todo))
        bars = {}
        try:
            while todo or running:
                while todo and len(running) < n_jobs:
                    arm = todo.pop(0)
                    running[arm] = start_arm(arm, n_threads)
                    bars[arm] = progress.add_task(arm.folder.name, total=arm.cfg.rollouts)
                    console.print(f"{arm.folder.name}: started; its log: {log_of(arm)}")
                for arm, process in list(running.items()):
                    if console.is_terminal:
                        progress.update(bars[arm], completed=n_spent(arm))
                    if process.poll() is not None:
                        del running[arm]
                        progress.remove_task(bars.pop(arm))
                        if process.returncode:
                            failed[arm.folder.name] = last_line(log_of(arm))
                        console.print(f"{arm.folder.name}: " + (failed.get(arm.folder.name) or last_result(arm)))
                        progress.advance(overall)
                        on_end()
                time.sleep(0.5)
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
            given = str(value).lower() if isinstance(value, bool) else str(value)
            flags.append(f"--{key.replace('_', '-')}={given}")             # in one word: a name may begin with -
    arm.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(log_of(arm), "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), arm.cfg.domain, *flags], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(n_threads)}, preexec_fn=_die_with_parent,
            start_new_session=True)                                 # Ctrl-C is for us, who end them


def _die_with_parent() -> None:
    """Killed, we leave no arm behind that would hold its directory (prctl PR_SET_PDEATHSIG, Linux)."""
    LIBC.prctl(1, signal.SIGKILL)


def log_of(arm: Arm) -> Path:
    return arm.folder.with_name(arm.folder.name + ".log")


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


def last_result(arm: Arm) -> str:
    summary = read_sealed(arm.folder / "summary.json")
    return (f"test mean@{summary['n_eval']} {summary['base_mean8']['mean']:.3f} -> {summary['final_mean8']['mean']:.3f}"
            f" in {sum(summary['seconds'].values()):.0f} s")


def n_spent(arm: Arm) -> int:
    """Training rollouts so far."""
    try:
        ledger = read_json(arm.folder / "state.json")["ledger"]
    except Damaged:                                                 # or not yet there
        ledger = {}
    return sum(int(ledger.get(kind, {}).get("rollouts", 0)) for kind in ("weight", "harness"))
