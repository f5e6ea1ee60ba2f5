"""bench.py at sizes that measure nothing: its two sides did the same work, and what it writes is whole."""

import json
import math
import re
import statistics

import pytest

import bench
import measure
from config import ROOT
from measure import Row, take_turns
from small import call

CHEAP = "rollouts,training,loss,scaling,weights"         # all but TRL's, which has an environment of its own


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    code, output = call("bench", "--quick", "--only", CHEAP, "--out", out)
    assert code == 0, output
    return json.loads(out.read_text()) | {"output": output}


def test_each_section_says_something_sane(results):
    assert {row["section"] for row in results["rows"]} == set(results["seconds"]) == set(CHEAP.split(","))
    assert not results["left_out"] and results["machine"]["cores"] and len(results["load"]) == 2
    for row in results["rows"]:
        numbers = [*row["ours"], *row["bare"], *([] if row["ratio"] is None else [row["ratio"]])]
        assert row["ours"] and all(math.isfinite(number) and number > 0 for number in numbers), row
        assert (row["ratio"] is None) == (not row["bare"]) and len(row["bare"]) in (0, len(row["ours"]))
        assert (row["met"] is None) == (row["least"] is None and row["most"] is None)
        assert row["name"].split()[0] in results["output"]


def test_both_sides_did_the_same_work(results):
    counted = [row for row in results["rows"] if row["work"]]
    assert {row["section"] for row in counted} == set(CHEAP.split(","))
    for row in counted:
        for what, (ours, bare) in row["work"].items():
            assert ours == (pytest.approx(bare, rel=1e-4) if what == "loss" else bare) and ours > 0, (row["name"], what)


def test_ratios_are_of_the_numbers_beside_them():
    row = measure.speed_row("s", "n", [1.0, 2.0, 4.0], [2.0, 2.0, 2.0], {}, least=0.9)
    assert row.ratio == 1.0 and row.met
    assert Row("s", "n", "x", [2.0], most=1.0).met is False and Row("s", "n", "x", [2.0]).met is None
    assert bench.cells({**vars(row), "met": row.met}) == ["s", "n", "2 s", "2 s", "1.00", ">= 0.9", "yes"]


def test_sides_take_turns_and_the_first_round_does_not_count():
    order = []
    seconds = take_turns(2, a=lambda: order.append("a"), b=lambda: order.append("b"))
    assert order == ["a", "b"] * 3 and [len(values) for values in seconds.values()] == [2, 2]


def test_a_missing_trl_leaves_its_section_out_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "TRL_PACKAGES", ("no-such-package-as-this==0",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, output = call("bench", "--quick", "--only", "step", "--out", tmp_path / "bench.json")
    left_out = json.loads((tmp_path / "bench.json").read_text())["left_out"]
    assert code == 0 and "TRL's environment could not be made" in left_out["step"] and left_out["step"] in output


def test_an_unknown_section_is_refused():
    code, output = call("bench", "--only", "rollouts,speed")
    assert code == 2 and "speed" in output and "training" in output


def test_the_committed_figures_are_whole():
    files = [json.loads(path.read_text()) for path in (ROOT / "results").glob("bench*.json")]
    assert {section for file in files for section in file["seconds"]} == set(bench.SECTIONS)
    for row in [row for file in files for row in file["rows"]]:
        if row["section"] in ("rollouts", "training", "scaling"):
            assert all(ours == pytest.approx(bare, rel=1e-3) for ours, bare in row["work"].values())
        if row["section"] == "rollouts":
            assert row["ratio"] == statistics.median(b / a for a, b in zip(row["ours"], row["bare"], strict=True))
    assert re.search(r"## How fast", (ROOT / "README.md").read_text())
