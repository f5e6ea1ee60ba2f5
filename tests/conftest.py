"""One torch thread: tests of a small model share their cores, and bits depend on the number of threads."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"                 # read when torch is imported, here and in child processes
os.environ["WHALE_TRACEBACK"] = "1"                 # no test takes a fault for a refusal
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: what `bash run.sh test-slow` runs")
    config.addinivalue_line("markers", "needs_vllm: what `bash run.sh test-vllm` runs, in an environment that has it")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="slow: bash run.sh test-slow"))
        if item.get_closest_marker("needs_vllm") and not find_spec("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not in this environment: bash run.sh test-vllm"))


@pytest.fixture
def figure(record_property):
    """Call it with a line that is shown after all tests, whichever process ran this one."""
    return lambda line: record_property("figure", line)


def pytest_terminal_summary(terminalreporter):
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    lines = [value for report in reports for name, value in report.user_properties if name == "figure"]
    if lines:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A finished small run of math, to look at and to copy, never to change."""
    from small import SMALL, call

    out = tmp_path_factory.mktemp("finished")
    code, output = call("math", *SMALL, "--out", out, "--name", "run")
    assert code == 0, output
    return out / "run"
