"""The README's numbers are the runs' own."""

import json
import re

import pytest

from config import ROOT

RESULTS = json.loads((ROOT / "results" / "tiny.json").read_text())


@pytest.mark.parametrize("row", RESULTS["runs"], ids=lambda row: f"{row['domain']}-{row['method']}-{row['seed']}")
def test_the_table_holds_each_run(row):
    cells = [row["domain"], row["method"], str(row["seed"]), *(f"{row[f'{which}_mean8']['mean']:.3f}" for which in ("base", "best", "final")),
             f"{row['rollouts']['weight'] + row['rollouts']['harness']:,}"]
    pattern = r"\| *" + r"[^|]*\| *".join(re.escape(cell) for cell in cells)
    assert re.search(pattern, (ROOT / "README.md").read_text()), pattern
