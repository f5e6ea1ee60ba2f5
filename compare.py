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

import json
import os
import platform
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from arms import Arm, ArmFailed, is_complete, plan_arms, run_arms
from config import ROOT, Config, describe_model, identity_of, load_splits, pin_model, read_file
from plots import Figures, Series
from report import RATES, as_usage_error, is_running, phase_spans, read_run, render
from files import UsageError, read_json, read_sealed, take_lock, write_atomically
from rundir import AMOUNTS, LEDGER, best_of
from sched import METHODS
from screen import LEDGER_TITLES, ledger_cells
from stats import paired_ci

VARIES = {"methods": ("method", "seed"), "schedules": ("epochs", "iterations", "seed")}    # what arms may differ in


def collect(folder: Path) -> dict:
    """results.json of a comparison: what its finished arms measured. UsageError where settings differ."""
    asked = read_json(folder / "compare.json")
    arms, settings = [], None
    for name, label in asked["arms"].items():
        arm = folder / "arms" / name
        if not is_complete(arm):
            continue
        (config, state, metrics), summary = read_run(arm), read_sealed(arm / "summary.json")
        own = comparable(read_json(arm / "config.json"), asked["varies"])
        settings = settings or own
        if differing := differing_settings(settings, own):
            raise UsageError("\n".join([f"{arm} and {arms[0]['name']} cannot be compared; they differ in", *differing]))
        n, evals = config["n_eval"], [row for row in metrics if row["kind"] == "eval" and "n" in row]
        points = {"base": state["evals"][0], "best": best_of(state["evals"]), "final": state["evals"][-1]}
        arms.append({
            "name": name, "label": label, "seed": config["seed"], "version": summary["version"],
            "machine": asked["machines"][name],
            "curve": [{key: row[key] for key in ("label", "training_rollouts", "mean", "ci95")}
                      for row in state["evals"]],
            "phases": phase_spans(metrics), "accepted": state["accepted"],
            **{which: {"mean": row["mean"], "ci95": row["ci95"], "n_right": [round(m * n) for m in row["task_means"]]}
               for which, row in points.items()},
            "rates": {which: {key: row[key] for key in (*RATES, "tok_a_rollout", "calls_a_rollout") if key in row}
                      for which, row in (("base", evals[0]), ("final", evals[-1]))},
            "training_rollouts": state["evals"][-1]["training_rollouts"],
            "ledger": {kind: {what: round(state["ledger"][kind].get(what, 0), 1) for what in AMOUNTS}
                       for kind in LEDGER}})
    missing = [name for name in asked["arms"] if name not in {arm["name"] for arm in arms}]
    shown = json.loads(json.dumps(settings or {}).replace(f"{ROOT}/", ""))
    return {**{key: asked[key] for key in ("commands", "domain", "rollouts")}, "missing": missing, "arms": arms,
            "labels": list(dict.fromkeys(asked["arms"].values())), "settings": shown}


def comparable(identity: dict[str, dict], varies: list[str]) -> dict[str, dict]:
    """What must be equal in all arms."""
    config = {key: value for key, value in identity["config"].items() if key not in varies}
    return {**identity, "config": config}


def differing_settings(before: dict[str, dict], now: dict[str, dict]) -> list[str]:
    return [f"  {group} {key}: {before.get(group, {}).get(key)!r} and {value!r}" for group, values in now.items()
            for key, value in values.items() if before.get(group, {}).get(key) != value]


def labels_of(results: dict) -> list[str]:
    """Of the finished arms, in the order in which they were asked for, the one that others are compared with first."""
    there = {arm["label"] for arm in results["arms"]}
    return [label for label in dict.fromkeys([reference_of(results), *results["labels"]]) if label in there]


def reference_of(results: dict) -> str:
    """The label that the others are compared with."""
    return "whale" if "whale" in results["labels"] else results["labels"][0]


def differences(results: dict, which: str) -> dict[str, dict]:
    """By label: the first one less it, paired by seed and task: mean, ci95, and each seed's mean."""
    by_arm = {(arm["label"], arm["seed"]): arm for arm in results["arms"]}
    first = reference_of(results)
    others = [label for label in labels_of(results) if label != first]
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
        means = {kind: {what: float(np.mean([arm["ledger"][kind].get(what, 0) for arm in own])) for what in AMOUNTS}
                 for kind in LEDGER}
        means["all"] = {what: sum(amounts[what] for amounts in means.values()) for what in AMOUNTS}
        spent += [[label, kind, *ledger_cells(amounts)] for kind, amounts in means.items()]
    tables.append(("what an arm spent, mean over seeds", ["method", "phase", *LEDGER_TITLES], spent))
    keys = [key for key in (*RATES, "tok_a_rollout", "calls_a_rollout")
            if any(key in rates for arm in results["arms"] for rates in arm["rates"].values())]

    def diagnose(name: str, arms: list[dict], which: str) -> list[str]:
        values = {key: [arm["rates"][which][key] for arm in arms if key in arm["rates"][which]] for key in keys}
        return [name, *("" if not values[key] else f"{100 * np.mean(values[key]):.1f} %" if key in RATES else
                        f"{np.mean(values[key]):.2f}" for key in keys)]

    titles = RATES | {"tok_a_rollout": "tokens a rollout", "calls_a_rollout": "calls a rollout"}
    tables.append(("where it comes from: rates on the test split, mean over seeds",
                   ["agent", *(titles[key] for key in keys)],
                   [diagnose("base", results["arms"], "base"),
                    *(diagnose(f"{label}, final", own, "final") for label, own in arms_of.items())]))
    return tables


def figure_of(results: dict) -> Figures:
    """mean@n against training rollouts: the mean over seeds, and from the least to the most of them. Seeds that were
    evaluated elsewhere are interpolated between their evaluations; one that ended earlier keeps its last value."""
    series = []
    for label in labels_of(results):
        curves = [([point["training_rollouts"] for point in arm["curve"]], [point["mean"] for point in arm["curve"]])
                  for arm in results["arms"] if arm["label"] == label]
        grid = sorted({x for xs, _ in curves for x in xs})
        values = np.array([np.interp(grid, xs, ys) for xs, ys in curves])              # (n_seeds, n_points)
        series.append(Series(label, grid, *(f(axis=0).tolist() for f in (values.mean, values.min, values.max)),
                             measured=[all(x in xs for xs, _ in curves) for x in grid]))
    first = next(arm for arm in results["arms"] if arm["label"] == labels_of(results)[0])
    return Figures(f"test mean@{results['settings']['config']['n_eval']}", series, [], first["phases"], first["label"])


def markdown(results: dict, tables: list[tuple[str, list[str], list[list[str]]]]) -> str:
    blocks = []
    for title, titles, rows in tables:
        lines = ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows)]
        blocks.append(f"**{title}**\n\n" + "\n".join(lines) + "\n")
    missing = f"Not finished: {', '.join(results['missing'])}.\n\n" if results["missing"] else ""
    commands = "\n".join(results["commands"])
    return (f"```\n{commands}\n```\n\n{provenance(results)}\n\n{missing}" + "\n".join(blocks)
            + f"\n{' '.join(notes_on(results))}\n")


def provenance(results: dict) -> str:
    """Where and by which code."""
    versions = sorted({arm["version"][:12] for arm in results["arms"]})
    warning = "; arms of different versions of the code: see that nothing changed that they measure"
    return (f"{'; '.join(sorted({arm['machine'] for arm in results['arms']}))}; version {', '.join(versions)}"
            + warning * (len(versions) > 1))


def notes_on(results: dict) -> list[str]:
    """What must be known to read the tables."""
    n = results["rollouts"]
    off = [f"{arm['name']} ({arm['training_rollouts']:,})" for arm in results["arms"] if arm["training_rollouts"] != n]
    n_seeds = max(sum(arm["label"] == label for arm in results["arms"]) for label in labels_of(results))
    few = "one seed, so they say nothing of how seeds differ" if n_seeds == 1 else \
        f"only {n_seeds} seeds, so they are too narrow where seeds differ much" if n_seeds < 10 else f"{n_seeds} seeds"
    return [f"The best is chosen on {chosen_on(results)}; of more evaluations, it is higher by chance.",
            f"Intervals are 95 %, bootstrapped over seeds and tasks: of {few}.",
            *[f"Not at {n:,} training rollouts ended: {', '.join(off)}."] * bool(off)]


def chosen_on(results: dict) -> str:
    return {"test": "the test split, as in the paper", "harness-set": "D_harness"}[
        results["settings"]["config"]["select"]]


def write_comparison(folder: Path, running: bool = False) -> Path:
    """results.json, table.md, curves.png and report.html of a comparison, from its finished arms -> the folder.
    UsageError if there is none, or if they cannot be compared."""
    with as_usage_error(folder):
        results = collect(folder)
        if not results["arms"]:
            raise UsageError(f"{folder}: no arm is finished yet")
        tables, figure = tables_of(results), figure_of(results)
        page = render(
            "compare.html.jinja", title=f"comparison on {results['domain']}", results=results, tables=tables,
            svg={size: figure.svg(size) for size in ("wide", "narrow")}, provenance=provenance(results),
            notes=notes_on(results), running=running or is_running(folder))
        text = markdown(results, tables)
    write_atomically(folder / "results.json", json.dumps(results) + "\n")
    write_atomically(folder / "table.md", text)
    figure.save_png(folder / "curves.png.tmp")
    (folder / "curves.png.tmp").replace(folder / "curves.png")
    write_atomically(folder / "report.html", page)
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
    parser.add_argument("--methods", help=f"comma-separated, of {', '.join(METHODS)}; default: all")
    parser.add_argument("--schedules", help='E:I,E:I ...: schedules of one --method, in place of --methods')
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --seed on")
    parser.add_argument("--jobs", type=int, default=0, help="arms at once; default: one a core, on a GPU one")


def read_variants(methods: str | None, schedules: str | None) -> tuple[list[str], list[tuple[float, int]]]:
    if methods is not None and schedules is not None:
        raise UsageError("give --methods or --schedules, not both")
    try:
        pairs = [(float(epochs), int(iterations)) for epochs, _, iterations in
                 (pair.partition(":") for pair in (schedules.split(",") if schedules is not None else []))]
        if min([x for pair in pairs for x in pair], default=1) <= 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"--schedules {schedules}: must be E:I,E:I ..., such as 0.2:2,0.6:6") from None
    names = methods.split(",") if methods is not None else [] if pairs else list(METHODS)
    if wrong := [name for name in names if name not in METHODS]:
        raise UsageError(f"--methods {','.join(wrong)}: the methods are {', '.join(METHODS)}")
    if len(set(names)) < len(names) or len(set(pairs)) < len(pairs):
        raise UsageError("a method or schedule is given twice")
    return names, pairs


def command_compare(cfg: Config, methods: str | None, schedules: str | None, n_seeds: int, n_jobs: int) -> int:
    if not 1 <= n_seeds <= 1000 or n_jobs < 0:
        raise UsageError(f"--jobs {n_jobs}: at least 0" if n_jobs < 0 else f"--seeds {n_seeds}: 1 to 1000")
    names, pairs = read_variants(methods, schedules)
    if cfg.finish == "harness":
        raise UsageError("--finish harness spends beyond the budget, so it is not for comparisons")
    if pairs and cfg.method not in ("whale", "fst"):
        raise UsageError(f"--schedules are those of --method whale or fst; {cfg.method} does not keep E and I in turn")
    cfg = replace(cfg, name=cfg.name or f"compare-{cfg.domain}" + "-schedules" * bool(pairs))
    env, splits = load_splits(cfg)
    cfg = pin_model(cfg)                            # once, for all arms
    for line in describe_model(cfg):
        print(line)
    arms = plan_arms(cfg, splits, names, pairs, n_seeds)
    identity = identity_of(arms[0].cfg, env, splits, read_file(cfg.harness or str(env.h0)))
    folder, n_cores = cfg.run_dir, len(os.sched_getaffinity(0))
    n_jobs = min(len(arms), n_jobs or (n_cores if cfg.device == "cpu" else 1))
    n_threads = max(1, n_cores // n_jobs)
    console = Console(highlight=False)

    def show_so_far() -> None:
        try:
            write_comparison(folder, running=True)
        except (UsageError, OSError) as error:                  # the arms go on; said again at the end
            console.print(f"no comparison yet: {error}", soft_wrap=True)

    folder.mkdir(parents=True, exist_ok=True)
    with take_lock(folder, "comparison"):
        note_request(folder, arms, identity, "schedules" if pairs else "methods",
                     f"{name_machine(cfg.device)}; {n_jobs} at once, torch threads each: {n_threads}")
        if any(arm.complete for arm in arms):
            write_comparison(folder, running=True)              # refuses arms that differ before more are run
        console.print(f"{len(arms)} arms to {arms[0].cfg.rollouts:,} training rollouts each, {n_jobs} at once; after "
                      f"each, the tables: {folder / 'report.html'}", soft_wrap=True)
        try:
            run_arms(arms, n_jobs, n_threads, show_so_far)
        except ArmFailed:
            show_so_far()
            raise
    write_comparison(folder)
    for title, titles, rows in tables_of(read_json(folder / "results.json"))[:2]:
        table = Table(*titles, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"what was spent, and the curves: {folder / 'report.html'}, table.md, curves.png", soft_wrap=True)
    return 0


def note_request(folder: Path, arms: list[Arm], identity: dict[str, dict], kind: str, machine: str) -> None:
    """compare.json: the arms so far and these. UsageError if those so far were asked for with other settings."""
    path, varies = folder / "compare.json", VARIES[kind]
    settings = {**comparable(identity, varies), "compared": {"by": kind}}
    before = read_json(path) if path.exists() else {"arms": {}, "commands": [], "machines": {}, "settings": settings}
    if changes := differing_settings(before["settings"], settings):
        raise UsageError("\n".join([f"{folder} holds a comparison with other settings (then, and now):", *changes,
                                    "Give this one another --name, or remove that directory."]))
    command = "bash run.sh " + shlex.join(sys.argv[1:])
    done = {arm.folder.name for arm in arms if arm.complete and arm.folder.name in before["machines"]}
    write_atomically(path, json.dumps({
        "domain": arms[0].cfg.domain, "rollouts": arms[0].cfg.rollouts, "varies": varies, "settings": settings,
        "commands": list(dict.fromkeys([*before["commands"], command])),
        "machines": before["machines"] | {arm.folder.name: machine for arm in arms if arm.folder.name not in done},
        "arms": before["arms"] | {arm.folder.name: arm.label for arm in arms}}, indent=1) + "\n")
