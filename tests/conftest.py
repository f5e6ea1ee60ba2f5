"""One torch thread: tests of a small model share their cores, and bits depend on the number of threads."""

import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"                 # read when torch is imported, here and in child processes
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A finished small run of math, to look at and to copy, never to change."""
    from small import SMALL, call

    out = tmp_path_factory.mktemp("finished")
    code, output = call("math", *SMALL, "--out", out, "--name", "run")
    assert code == 0, output
    return out / "run"
