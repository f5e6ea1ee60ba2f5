"""Comparisons: several arms to the same budget, killed and resumed, refused where they differ; and the paired interval."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import arms
import cli
import compare
from config import Config
from files import UsageError
from small import SMALL, call, edit, start
from stats import bootstrap_ci, paired_ci

FLAGS = ["compare", "math", *SMALL, "--methods", "whale,weight", "--seeds", "2"]


def content(folder: Path) -> dict:
    """results.json but for what another run may measure otherwise: seconds, and the command with its --out."""
    results = json.loads((folder / "results.json").read_text())
    for arm in results["arms"]:
        del arm["machine"]
        for amounts in arm["ledger"].values():
            del amounts["seconds"]
    return results | {"commands": None}


def without_minutes(table: str) -> list[str]:
    """The tables' rows; where a row ends with what was spent, without the minutes."""
    rows = [line for line in table.splitlines() if line.startswith("|") or line.startswith("**")]
    spends = re.compile(r"^\| \w+ \| (setup|weight|harness|gates|eval|all) \|")
    return [re.sub(r"\| [\d.]+ \|$", "", row) if spends.match(row) else row for row in rows]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    code, output = call(*FLAGS, "--out", out)
    assert code == 0, output
    assert "whale less each" in output and "report.html" in output
    return out / "compare-math"


def test_all_arms_reach_the_same_budget_and_are_shown(done):
    results = content(done)
    assert [arm["name"] for arm in results["arms"]] == ["whale-seed3", "weight-seed3", "whale-seed4", "weight-seed4"]
    assert {arm["training_rollouts"] for arm in results["arms"]} == {results["rollouts"]} and not results["missing"]
    table, page = (done / "table.md").read_text(), (done / "report.html").read_text()
    for arm in results["arms"]:
        summary = json.loads((done / "arms" / arm["name"] / "summary.json").read_text())
        assert summary["final_mean8"]["mean"] == pytest.approx(arm["final"]["mean"], abs=1e-4)
        assert arm["final"]["mean"] == sum(arm["final"]["n_right"]) / 24
        assert f'href="arms/{arm["name"]}/report.html"' in page and (done / "arms" / arm["name"] / "report.html").exists()
    for label in ("whale", "weight"):
        finals = [arm["final"]["mean"] for arm in results["arms"] if arm["label"] == label]
        row = next(line for line in table.splitlines() if line.startswith(f"| {label} | 2 |"))
        assert f"{sum(finals) / 2:.3f}" in row and f"{min(finals):.3f} to {max(finals):.3f}" in row
        for kind in ("setup", "weight", "harness", "gates", "eval", "all"):
            assert f"| {label} | {kind} |" in table
    assert (done / "curves.png").read_bytes()[:4] == b"\x89PNG" and "<script" not in page
    assert str(Path(__file__).parents[1]) not in (done / "results.json").read_text()


def test_arms_of_a_seed_share_what_they_can(done):
    """Same seed, same base rollouts, same first weight step; another seed, other ones."""
    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (done / "arms" / name / "metrics.jsonl").read_text().splitlines()]

    firsts = {name: [{k: v for k, v in row.items() if "second" not in k and k != "rollouts_per_s" and k != "rule"}
                     for row in lines(name)[:2]] for name in ("whale-seed3", "weight-seed3", "whale-seed4")}
    keep = ("kind", "reward", "mean", "n", "tok_a_rollout", "loss", "n_supervised_tok")
    shown = {name: [[row.get(key) for key in keep] for row in rows] for name, rows in firsts.items()}
    assert shown["whale-seed3"] == shown["weight-seed3"] != shown["whale-seed4"]


def test_paired_differences_against_a_loop(done):
    results = content(done)
    arms = {arm["name"]: arm["final"]["n_right"] for arm in results["arms"]}
    per_seed = []
    for seed in (3, 4):
        total = 0
        for i in range(24):
            total += arms[f"whale-seed{seed}"][i] - arms[f"weight-seed{seed}"][i]
        per_seed.append(total / 24)
    found = compare.differences(results, "final")["weight"]
    assert found["seeds"] == pytest.approx(per_seed) and found["mean"] == pytest.approx(sum(per_seed) / 2)
    assert found["ci95"][0] <= found["mean"] <= found["ci95"][1]


def test_a_finished_comparison_starts_nothing(done, monkeypatch):
    monkeypatch.setattr(arms, "start_arm", None)
    before, machines = content(done), json.loads((done / "compare.json").read_text())["machines"]
    code, output = call(*FLAGS, "--out", done.parent, "--jobs", "1")
    assert code == 0 and content(done) == before, output
    assert json.loads((done / "compare.json").read_text())["machines"] == machines, "where they ran, not where they were looked at"
    code, output = call("report", done)
    assert code == 0 and content(done) == before, output


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_table(done, tmp_path):
    """SIGKILL of the comparison alone, in its first arms and, when it was started again, in its last: its arms end with
    it, and the same command goes on with each of them."""
    folder = tmp_path / "compare-math"
    for seed in (3, 4):
        process = start(*FLAGS, "--out", tmp_path, "--jobs", "2")
        deadline = time.monotonic() + 600
        while not (folder / f"arms/whale-seed{seed}/weights/step_000001").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()                               # ends only when the arms, which hold its output, have ended
        assert not json.loads((folder / f"arms/whale-seed{seed}/state.json").read_text())["complete"]
    code, output = call(*FLAGS, "--out", tmp_path)
    assert code == 0 and content(folder) == content(done), output
    ours, theirs = ((where / "table.md").read_text() for where in (folder, done))
    assert without_minutes(ours) == without_minutes(theirs) and len(without_minutes(ours)) > 20


def test_what_is_finished_is_shown_while_the_rest_is_missing(done, tmp_path):
    folder = Path(shutil.copytree(done, tmp_path / "compare-math"))

    def stop(name: str) -> None:
        edit(folder / "arms" / name / "state.json", complete=False)

    stop("weight-seed4")
    code, output = call("report", folder)
    results = content(folder)
    assert code == 0 and results["missing"] == ["weight-seed4"] and len(results["arms"]) == 3, output
    assert "Not finished: weight-seed4" in (folder / "table.md").read_text()
    for name in ("whale-seed3", "whale-seed4"):
        stop(name)
    assert call("report", folder)[0] == 0 and compare.differences(content(folder), "final") == {}
    (folder / "arms/weight-seed3/state.json").write_text('{"a": [1]}')
    code, output = call("report", folder)
    assert code == 2 and "no arm is finished" in output and str(folder) in output      # its own command would heal it
    (folder / "arms/weight-seed3/state.json").unlink()
    code, output = call("report", folder)
    assert code == 2 and "no arm is finished" in output
    assert "weight-seed4" in (folder / "report.html").read_text()
    assert len(compare.differences(results, "final")["weight"]["seeds"]) == 1       # only pairs are compared


@pytest.mark.parametrize("group, key, value", [("config", "temperature", 0.7), ("config", "n_eval", 4), ("sha256", "test", "0" * 64),
                                               ("config", "epochs", 0.5), ("config", "iterations", 9)])
def test_arms_that_differ_are_refused(done, tmp_path, group, key, value):
    folder = Path(shutil.copytree(done, tmp_path / "compare-math"))
    path = folder / "arms/weight-seed4/config.json"
    config = json.loads(path.read_text())
    config[group][key] = value
    path.write_text(json.dumps(config))
    code, output = call("report", folder)
    assert code == 2 and key in output and repr(value) in output and "weight-seed4" in output and "Traceback" not in output


def test_a_comparison_with_other_settings_is_refused(done):
    code, output = call(*FLAGS, "--out", done.parent, "--lr", "0.5")
    assert code == 2 and "lr" in output and "0.5" in output and "--name" in output
    for flags in (["--rollouts", "128"], ["--iterations", "3", "--rollouts", "352"], ["--train", SMALL[SMALL.index("--train") + 1].replace(":640", ":660")]):
        code, output = call(*FLAGS, "--out", done.parent, *flags)
        assert code == 2 and (flags[0][2:] in output), output
    code, output = call("compare", "math", *SMALL, "--schedules", "0.05:2", "--out", done.parent, "--name", "compare-math")
    assert code == 2 and "'methods'" in output and "'schedules'" in output


@pytest.mark.parametrize("flags, words", [
    (["--methods", "whale,magic"], "magic"), (["--methods", "whale,whale"], "twice"), (["--schedules", "0.2"], "E:I"),
    (["--schedules", "0.2:x"], "0.2:x"), (["--schedules", "0.0001:2"], "less than a step"), (["--seeds", "0"], "--seeds"),
    (["--methods", "whale", "--schedules", "0.2:2"], "not both"), (["--rollouts", "-1"], "--rollouts"), (["--schedules", "0.2:0"], "0.2:0"),
    (["--schedules", "0.2:2", "--method", "adaptive"], "adaptive"), (["--schedules", "0.0625:3,1.0:10"], "whale 1:10 takes"),
])
def test_bad_requests(flags, words, tmp_path):
    code, output = call("compare", "math", *flags, "--out", tmp_path)
    assert code == 2 and words in output and "Traceback" not in output and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_arm_that_fails_is_named_and_the_others_are_kept(tmp_path):
    """One method cannot go on (nothing is ever accepted); the other ends well, and the page shows it."""
    never = tmp_path / "train.jsonl"
    never.write_text("".join(json.dumps({"id": f"x{i}", "question": f"What is the number of {'a' * i}?", "answer": "123456789",
                                         "source": "test"}) + "\n" for i in range(32)))
    code, output = call("compare", "math", *SMALL, "--train", never, "--epochs", "3", "--max-empty-steps", "1", "--rollouts", "72",
                        "--methods", "harness,weight", "--seeds", "1", "--out", tmp_path)
    folder = tmp_path / "compare-math"
    assert code == 1 and "weight-seed3" in output and "no rollout was accepted" in output and "weight-seed3.log" in output, output
    assert content(folder)["missing"] == ["weight-seed3"] and [a["name"] for a in content(folder)["arms"]] == ["harness-seed3"]


@pytest.mark.slow
def test_schedules_are_compared_to_one_budget(tmp_path):
    code, output = call("compare", "math", *SMALL, "--schedules", "0.05:2,0.025:2", "--seeds", "1", "--rollouts", "360", "--out", tmp_path)
    assert code == 0, output
    results = content(tmp_path / "compare-math-schedules")
    assert [arm["label"] for arm in results["arms"]] == ["whale 0.05:2", "whale 0.025:2"]
    assert all(360 - 64 < arm["training_rollouts"] <= 360 for arm in results["arms"])
    spans = [[kind for _, _, kind in arm["phases"]] for arm in results["arms"]]
    assert spans[0] == ["weight", "harness"] and spans[1] == ["weight", "harness", "weight"]


# ---- the interval ---------------------------------------------------------------------------------------------------


def test_paired_interval_of_one_run_is_that_of_its_tasks():
    rng = np.random.default_rng(0)
    values = rng.normal(0.3, 1.0, 200).tolist()
    assert paired_ci([values], seed=1) == pytest.approx(bootstrap_ci(values, 1), abs=0.02)
    assert paired_ci([values], seed=1) == paired_ci([values], seed=1) != paired_ci([values], seed=2)


def test_paired_interval_holds_what_varies_between_runs():
    assert paired_ci([[0.1] * 50, [0.3] * 50, [0.2] * 50], 0) == pytest.approx((0.1, 0.3))
    assert paired_ci([[0.25] * 50] * 3, 0) == (0.25, 0.25)


@pytest.mark.parametrize("n_runs, task_sd, run_sd", [(3, 0.3, 0.0), (12, 0.3, 0.0), (12, 0.3, 0.1), (12, 0.0, 0.1)])
def test_paired_interval_covers(n_runs, task_sd, run_sd, n_worlds: int = 300):
    """Runs share their tasks: in such worlds, 95 % intervals hold the truth about 95 times in 100, or more often."""
    rng = np.random.default_rng(1)
    hits = 0
    for world in range(n_worlds):
        grid = 0.2 + rng.normal(0, run_sd, (n_runs, 1)) + rng.normal(0, task_sd, (1, 100)) + rng.normal(0, 0.2, (n_runs, 100))
        low, high = paired_ci(grid.tolist(), world, n_resamples=500)
        hits += low <= 0.2 <= high
    assert 0.89 <= hits / n_worlds


def test_paired_interval_of_many_tasks_is_not_divided_by_the_runs():
    """Three runs with the very same differences know no more than one."""
    rng = np.random.default_rng(0)
    values = rng.normal(0.3, 1.0, 200).tolist()
    one, three = paired_ci([values], 1), paired_ci([values] * 3, 1)
    assert three[1] - three[0] == pytest.approx(one[1] - one[0], rel=0.05)


def test_a_table_of_results_that_differ_in_seeds_pairs_only_what_is_there():
    arm = {"training_rollouts": 8, "final": {"n_right": [1, 0], "mean": 0.5}}
    results = {"settings": {"config": {"n_eval": 1}}, "labels": ["weight", "whale"], "arms": [
        {**arm, "label": "weight", "seed": 1}, {**arm, "label": "whale", "seed": 0}]}
    assert compare.differences(results, "final") == {}
    assert compare.labels_of(results) == ["whale", "weight"], "others are compared with whale, whatever came first"
    results["arms"][1] |= {"seed": 1, "final": {"n_right": [1, 1]}}
    assert compare.differences(results, "final")["weight"]["mean"] == 0.5
    del results["arms"][1]
    assert compare.differences(results, "final") == {} and compare.labels_of(results) == ["weight"]


def test_read_variants():
    assert compare.read_variants(None, None)[0] == list(compare.METHODS)
    assert compare.read_variants(None, "0.2:6,1:10") == ([], [(0.2, 6), (1.0, 10)])
    for methods, schedules, words in (("wahle", None, "methods are"), ("", None, "methods are"), ("whale,", None, "methods are"), (None, "", "E:I")):
        with pytest.raises(UsageError, match=words):
            compare.read_variants(methods, schedules)


def test_an_arm_gets_each_setting_whatever_it_begins_with(tmp_path, monkeypatch):
    """A folder's name may begin with a dash, which argparse takes for a flag where it stands alone."""
    cfg = Config("math", out=str(tmp_path), name="-name", harness_set="--harness.jsonl", top_p=0.5, seed=7)
    monkeypatch.setattr(arms.subprocess, "Popen", lambda words, **_: words)
    _, _, *words = arms.start_arm(arms.Arm("whale", cfg), 1)
    given = cli.build_parser().parse_args(words)
    assert all(getattr(given, key) == value or value == "" for key, value in asdict(cfg).items())
