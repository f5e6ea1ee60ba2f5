"""Several methods or schedules on the same tasks, seeds and budgets: runs them all, then one table and one figure.

Every arm is an ordinary run (`bash run.sh DOMAIN --method M --seed S --rollouts N ...`) in a process and a directory of
its own; a finished arm is never run again, a stopped one is resumed. Arms that differ in more than what is compared are
refused. The x axis is the training rollouts (weight + harness), as in the paper; all else that was spent stands beside.

    OUT/compare-math/arms/whale-seed0/ ...      the runs, each with its log
    OUT/compare-math/compare.json               what is compared, where, and the commands that asked for it
    OUT/compare-math/results.json               all that the tables and the figure are made of
    OUT/compare-math/table.md  curves.png  report.html      rewritten whenever an arm ends

Differs from the paper: the paper shows single runs; here a method is the mean over seeds, and since arms of one seed
share tasks and sampling seeds, differences are paired.

    bash run.sh compare math --methods whale,weight --seeds 3 --rollouts 5632
    bash run.sh compare math --schedules "0.2:2,0.2:6,0.6:2,0.6:6,1.0:10"
"""

import ctypes
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from config import FREE_ON_RESUME, ROOT, Config, load_splits
from plots import Figures, Series
from report import RATES, phase_spans, read_json, read_run, render
from rundir import AMOUNTS, LEDGER, UsageError, take_lock, write_atomically
from sched import METHODS
from screen import LEDGER_TITLES, ledger_cells
from stats import paired_ci
from whale import rollout_budget

VARIES = {"method", "seed", "epochs", "iterations"}     # what arms of a comparison may differ in


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


def run_arms(arms: list[Arm], n_jobs: int, n_threads: int, on_end: Callable[[], None]) -> None:
    """Runs those that are not complete, n_jobs at once. ArmFailed, when all are done, if one did not end well."""
    todo = [arm for arm in arms if not arm.complete]
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
                        on_end()
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


# ---- from the arms' files to tables and a figure --------------------------------------------------------------------


def collect(folder: Path) -> dict:
    """results.json of a comparison: what its finished arms measured. UsageError where settings differ."""
    asked = read_json(folder / "compare.json")
    arms, settings = [], None
    for name, label in asked["arms"].items():
        arm = folder / "arms" / name
        if not (arm / "summary.json").exists() or not read_json(arm / "summary.json")["complete"]:
            continue
        config, state, metrics = read_run(arm)
        own = {**read_json(arm / "config.json"), "config": {k: v for k, v in config.items() if k not in VARIES}}
        settings = settings or own
        if differing := [f"{group} {key}: {settings[group].get(key)!r} and {value!r}" for group in own
                         for key, value in own[group].items() if settings[group].get(key) != value]:
            raise UsageError(f"{arm} and {folder / 'arms' / arms[0]['name']} cannot be compared; they differ in\n  "
                             + "\n  ".join(differing))
        summary, n = read_json(arm / "summary.json"), config["n_eval"]
        best = max(state["evals"], key=lambda row: row.get("select_mean", row["mean"]))
        evals = [row for row in metrics if row["kind"] == "eval" and "n" in row]
        arms.append({
            "name": name, "label": label, "seed": config["seed"], "version": summary["version"],
            "curve": [{key: row[key] for key in ("label", "training_rollouts", "mean", "ci95")}
                      for row in state["evals"]],
            "phases": phase_spans(metrics), "accepted": state["accepted"],
            **{which: {"mean": row["mean"], "ci95": row["ci95"], "n_right": [round(m * n) for m in row["task_means"]]}
               for which, row in (("base", state["evals"][0]), ("best", best), ("final", state["evals"][-1]))},
            "rates": {which: {key: row[key] for key in (*RATES, "tok_a_rollout", "calls_a_rollout") if key in row}
                      for which, row in (("base", evals[0]), ("final", evals[-1]))},
            "training_rollouts": state["evals"][-1]["training_rollouts"],
            "ledger": {kind: {what: round(state["ledger"][kind].get(what, 0), 1) for what in AMOUNTS}
                       for kind in LEDGER}})
    missing = [name for name in asked["arms"] if name not in {arm["name"] for arm in arms}]
    shown = json.loads(json.dumps(settings or {}).replace(f"{ROOT}/", ""))
    return {**{key: asked[key] for key in ("commands", "machine", "domain", "rollouts")}, "missing": missing,
            "arms": arms, "settings": shown}


def labels_of(results: dict) -> list[str]:
    return list(dict.fromkeys(arm["label"] for arm in results["arms"]))


def differences(results: dict, which: str) -> dict[str, dict]:
    """By label: the first label less it, paired by seed and task: mean, ci95, and each seed's mean."""
    by_arm = {(arm["label"], arm["seed"]): arm for arm in results["arms"]}
    first, *others = labels_of(results)
    n = results["settings"]["config"]["n_eval"]
    found = {}
    for label in others:
        seeds = sorted(seed for name, seed in by_arm if name == label and (first, seed) in by_arm)
        grid = [[(a - b) / n for a, b in zip(by_arm[first, seed][which]["n_right"],
                                             by_arm[label, seed][which]["n_right"], strict=True)] for seed in seeds]
        if grid:
            found[label] = {"mean": float(np.mean(grid)), "ci95": paired_ci(grid, seed=0),
                            "seeds": [sum(row) / len(row) for row in grid]}
    return found


def tables_of(results: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, column titles, rows): the results, paired differences, what was spent, where the gain comes from."""
    if not results["arms"]:
        return []
    labels, n_eval = labels_of(results), results["settings"]["config"]["n_eval"]
    arms_of = {label: [arm for arm in results["arms"] if arm["label"] == label] for label in labels}
    over = {which: differences(results, which) for which in ("final", "best")}

    def mean(arms: list[dict], which: str) -> str:
        return f"{np.mean([arm[which]['mean'] for arm in arms]):.3f}"

    rows = []
    for label, own in arms_of.items():
        finals = [arm["final"]["mean"] for arm in own]
        rows.append([label, str(len(own)), *(mean(own, which) for which in ("base", "best", "final")),
                     f"{min(finals):.3f} to {max(finals):.3f}",
                     f"{np.mean([arm['training_rollouts'] for arm in own]):,.0f}"])
    tables = [(f"test mean@{n_eval}, mean over seeds",
               ["method", "seeds", "base", "best", "final", "final, least to most", "training rollouts"], rows)]
    over = {which: differences(results, which) for which in ("final", "best")}
    rows = [[label, f"{row['mean']:+.3f}", "{:+.3f} to {:+.3f}".format(*row["ci95"]),
             ", ".join(f"{x:+.3f}" for x in row["seeds"]), f"{over['best'][label]['mean']:+.3f}",
             "{:+.3f} to {:+.3f}".format(*over["best"][label]["ci95"])] for label, row in over["final"].items()]
    if rows:
        tables.append((f"{labels[0]} less each, paired by seed and task",
                       ["method", "final", "95 % interval", "each seed's", "best", "95 % interval"], rows))
    spent = []
    for label, own in arms_of.items():
        for kind in LEDGER[1:]:
            means = {what: float(np.mean([arm["ledger"][kind][what] for arm in own])) for what in AMOUNTS}
            spent.append([label, kind, *ledger_cells(means)])
    tables.append(("what an arm spent, mean over seeds", ["method", "phase", *LEDGER_TITLES], spent))
    keys = [key for key in RATES if key in results["arms"][0]["rates"]["base"]]

    def diagnose(name: str, arms: list[dict], which: str) -> list[str]:
        means = {key: np.mean([arm["rates"][which].get(key, np.nan) for arm in arms])
                 for key in (*keys, "tok_a_rollout", "calls_a_rollout")}
        return [name, *(f"{100 * means[key]:.1f} %" for key in keys), f"{means['tok_a_rollout']:.1f}",
                f"{means['calls_a_rollout']:.2f}"]

    tables.append(("where it comes from: rates on the test split, mean over seeds",
                   ["agent", *(RATES[key] for key in keys), "tokens a rollout", "calls a rollout"],
                   [diagnose("base", results["arms"], "base"),
                    *(diagnose(f"{label}, final", own, "final") for label, own in arms_of.items())]))
    return tables


def figure_of(results: dict) -> Figures:
    """mean@n against training rollouts: the mean over seeds, and from the least to the most of them."""
    series = []
    for label in labels_of(results):
        curves = [([point["training_rollouts"] for point in arm["curve"]], [point["mean"] for point in arm["curve"]])
                  for arm in results["arms"] if arm["label"] == label]
        end = min(max(x) for x, _ in curves)
        grid = sorted({x for xs, _ in curves for x in xs if x <= end})
        values = np.array([np.interp(grid, xs, ys) for xs, ys in curves])              # (n_seeds, n_points)
        series.append(Series(label, grid, *(f(axis=0).tolist() for f in (values.mean, values.min, values.max))))
    first = results["arms"][0]
    return Figures(f"test mean@{results['settings']['config']['n_eval']}", series, [], first["phases"])


def markdown(results: dict) -> str:
    blocks = []
    for title, titles, rows in tables_of(results):
        lines = ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows)]
        blocks.append(f"**{title}**\n\n" + "\n".join(lines) + "\n")
    commands = "\n".join(results["commands"])
    missing = f"Not finished: {', '.join(results['missing'])}.\n\n" if results["missing"] else ""
    versions = ", ".join(sorted({arm["version"][:12] for arm in results["arms"]}))
    return (f"```\n{commands}\n```\n\n{results['machine']}; version {versions}\n\n{missing}" + "\n".join(blocks)
            + f"\nThe best is chosen on {chosen_on(results)}. Intervals are 95 %, bootstrapped over seeds and tasks.\n")


def chosen_on(results: dict) -> str:
    return {"test": "the test split, as in the paper", "harness-set": "D_harness"}[
        results["settings"]["config"]["select"]]


def write_comparison(folder: Path) -> Path:
    """results.json, table.md, curves.png and report.html of a comparison, from its finished arms -> the folder."""
    folder = Path(folder)
    results = collect(folder)
    write_atomically(folder / "results.json", json.dumps(results) + "\n")
    if results["arms"]:
        figure = figure_of(results)
        write_atomically(folder / "table.md", markdown(results))
        figure.save_png(folder / "curves.png")
        write_atomically(folder / "report.html", render(
            "compare.html.jinja", title=f"comparison on {results['domain']}", results=results,
            tables=tables_of(results), svg={size: figure.svg(size) for size in ("wide", "narrow")},
            chosen_on=chosen_on(results)))
    return folder


def name_machine(device: str) -> str:
    """The machine in words, for whoever reads the results."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}" if device != "cpu" else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores of {cpu[1] if cpu else platform.machine()}, {memory:.0f} GiB, {gpu}"


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
        if min([x for pair in pairs for x in pair], default=1) <= 0:
            raise ValueError
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
    cfg = replace(cfg, name=cfg.name or f"compare-{cfg.domain}" + "-schedules" * bool(pairs))
    arms = plan_arms(cfg, names, pairs, n_seeds)
    folder, n_cores = cfg.run_dir, len(os.sched_getaffinity(0))
    n_jobs = min(len(arms), n_jobs or (n_cores if cfg.device == "cpu" else 1))
    n_threads = max(1, n_cores // n_jobs)
    folder.mkdir(parents=True, exist_ok=True)
    with take_lock(folder, "comparison"):
        note_request(folder, arms, f"{name_machine(cfg.device)}; {n_jobs} arms at once, {n_threads} threads each")
        try:
            run_arms(arms, n_jobs, n_threads, lambda: write_comparison(folder))
        finally:
            write_comparison(folder)
    results = read_json(folder / "results.json")
    console = Console(highlight=False)
    for title, titles, rows in tables_of(results)[:2]:
        table = Table(*titles, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"what was spent, and the curves: {folder / 'report.html'}, table.md, curves.png", soft_wrap=True)
    return 0


def note_request(folder: Path, arms: list[Arm], machine: str) -> None:
    """compare.json: the arms so far and these. UsageError if those so far were asked for with other settings."""
    path = folder / "compare.json"
    free = VARIES | FREE_ON_RESUME
    settings = {key: value for key, value in asdict(arms[0].cfg).items() if key not in free}
    before = read_json(path) if path.exists() else {"arms": {}, "commands": [], "settings": settings}
    if changes := [f"  {key}: {before['settings'].get(key)!r} then, {value!r} now" for key, value in settings.items()
                   if before["settings"].get(key) != value]:
        raise UsageError("\n".join([f"{folder} holds a comparison with other settings:", *changes,
                                    "Give this one another --name, or remove that directory."]))
    command = "bash run.sh " + shlex.join(sys.argv[1:])
    write_atomically(path, json.dumps({
        "domain": arms[0].cfg.domain, "rollouts": arms[0].cfg.rollouts, "machine": machine, "settings": settings,
        "commands": list(dict.fromkeys([*before["commands"], command])),
        "arms": before["arms"] | {arm.folder.name: arm.label for arm in arms}}, indent=1) + "\n")
