"""The README's numbers are the results' own, and results are those of complete comparisons at equal budgets."""

import importlib.util
import json
import re

import pytest

import compare
from config import ROOT

SPEC = importlib.util.spec_from_file_location("update_readme", ROOT / "results" / "update_readme.py")
update_readme = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(update_readme)
README = (ROOT / "README.md").read_text()


def test_the_pages_are_what_the_script_writes():
    for path, text in update_readme.pages().items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("domain", update_readme.DOMAINS)
def test_results_are_whole(domain):
    """Each method with the same seeds, to the same budget; the table and the README hold each arm's own numbers."""
    results = json.loads((ROOT / "results" / domain / "results.json").read_text())
    arms = results["arms"]
    assert not results["missing"] and results["commands"] and results["domain"] == domain and all(arm["machine"] for arm in arms)
    seeds = {label: {arm["seed"] for arm in arms if arm["label"] == label} for label in compare.labels_of(results)}
    assert set(map(frozenset, seeds.values())) == {frozenset({0, 1, 2})}
    assert set(seeds) >= {"whale", "weight", "harness"} and (domain != "math" or set(seeds) == set(compare.METHODS))
    assert all(0.95 * results["rollouts"] < arm["training_rollouts"] <= results["rollouts"] for arm in arms)
    assert all(re.fullmatch("[0-9a-f]{40}", arm["version"]) for arm in arms)
    n_eval = results["settings"]["config"]["n_eval"]
    for arm in arms:
        for which in ("base", "best", "final"):
            assert arm[which]["mean"] == pytest.approx(sum(arm[which]["n_right"]) / n_eval / len(arm[which]["n_right"]))
        assert arm["best"]["mean"] == max(point["mean"] for point in arm["curve"])
    table = (ROOT / "results" / domain / "table.md").read_text()
    assert table == compare.markdown(results, compare.tables_of(results))
    for label in seeds:
        final = sum(arm["final"]["mean"] for arm in arms if arm["label"] == label) / 3
        assert re.search(rf"\| {domain} \| {label} \| 3 \|[^\n]* {final:.3f} \|", README)
    assert f"results/{domain}/curves.png" in README or domain != "math"


def test_the_tests_that_are_named_exist():
    """SECURITY.md says where each promise is tried; a name alone is of the file that it says beside the table."""
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)?(?:::(\w+))?`", text)
    named = [(path or "tests/test_secrets.py", name) for path, name in named if path or name]
    assert len(named) > 30
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), (path, name)
