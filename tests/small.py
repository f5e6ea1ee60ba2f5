"""What the tests of whole runs share: a run small enough to be made many times, and the command line called in-process."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import cli
from config import ROOT
from files import read_sealed, write_sealed

DATA = ROOT / "embedded" / "math"
SMALL = ["--cycles", "1", "--epochs", "0.05", "--prompt-batch", "16", "--iterations", "2", "--n-eval", "1",
         "--train", f"{DATA}/train.jsonl[:640]", "--harness-set", f"{DATA}/harness.jsonl[:24]",
         "--test", f"{DATA}/test.jsonl[:24]", "--seed", "3"]             # 2 weight steps, 2 iterations
TIMES = re.compile(r"time|second|_s$|per_s|tok_s|wall|mem|rss|pid|name|^ts$|eta")


def start(*args, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "cli.py"), *map(str, args)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **kwargs)


def call(*args) -> tuple[int, str]:
    """The command in this process -> (exit code, all that it printed)."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as error:                                  # argparse
            code = error.code
    return code, output.getvalue()


def call_json(*args) -> dict:
    """--json prints one JSON object and nothing else on standard output."""
    output = io.StringIO()
    with redirect_stdout(output):
        code = cli.main([*map(str, args), "--json"])
    return json.loads(output.getvalue()) | {"exit": code}


def edit(path: Path, **changes) -> None:
    """A record that a run would take for its own."""
    write_sealed(path, read_sealed(path) | changes)


def rows(folder: Path) -> list[dict]:
    return [{key: value for key, value in json.loads(line).items() if not TIMES.search(key)}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]
