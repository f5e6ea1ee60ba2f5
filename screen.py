"""What a person sees of a run: lines, progress bars, and the tables at the end. The same lines go to log.txt."""

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from keys import redact

LEDGER_TITLES = ("rollouts", "model calls", "prompt tokens", "sampled tokens", "tool calls", "proposals",
                 "proposer calls", "proposer tokens", "proposer USD", "minutes")


# what drives a terminal or changes the order in which text is shown, and half characters, which cannot be written
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Text of a model, a server or a stranger's file, as it can be written and shown; no secret is in it."""
    return UNSAFE.sub("\ufffd", redact(text))


class Screen:
    def __init__(self, quiet: bool = False):
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self.log_path: Path | None = None

    def say(self, text: str, style: str = "") -> None:
        """One line. `text` may hold a model's, a proposer's or a server's words: nothing in it is read as markup."""
        text = plain(text)
        self.console.print(Text(text, style=style))
        try:
            if self.log_path:
                with open(self.log_path, "a", encoding="utf-8") as file:
                    file.write(text + "\n")
        except OSError as error:                # a copy of what was just shown, perhaps of a first error
            self.console.print(Text(f"from here on without log.txt: {error.strerror}"))
            self.log_path = None

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar with the time left, on a terminal only -> a function that moves it on by one."""
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                      console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)

    def show_end(self, summary: dict, h0: str, final: str, folder: Path) -> None:
        """base, best and final mean@8, what each kind of work took, the final harness against h0."""
        scores = Table(f"test mean@{summary['n_eval']}", "mean", "95 % interval")
        for label in ("base", "best", "final"):
            point = summary[f"{label}_mean8"]
            scores.add_row(label, f"{point['mean']:.3f}", f"{point['ci95'][0]:.3f} - {point['ci95'][1]:.3f}")
        spent = Table("spent", *summary["ledger"])
        for title, *cells in zip(LEDGER_TITLES, *map(ledger_cells, summary["ledger"].values()), strict=True):
            spent.add_row(title, *cells)
        self.console.print(scores, spent)
        self.console.print(f"money: {money_text(summary['usd'])}")
        diff = "".join(difflib.unified_diff(h0.splitlines(True), final.splitlines(True), "h0", "final harness"))
        if diff:
            self.console.print(Syntax(plain(diff), "diff", theme="ansi_dark", background_color="default"))
        else:
            self.console.print("the final harness is h0")
        chosen = "the test split, as in the paper" if summary["select"] == "test" else "D_harness"
        self.console.print(f"best is chosen on {chosen}; to look at: {folder / 'report.html'}")


def money_text(usd: dict) -> str:
    """What a run has cost, for people: `usd` of its summary."""
    unknown = [f"{usd['unpriced_sessions']} sessions of the proposer"] * bool(usd["unpriced_sessions"])
    unknown += ["the model's servers"] * (usd["model"] is None)
    return f"${usd['known']:.2f}" + (f", and an unknown cost of {' and '.join(unknown)}" if unknown else "")


def ledger_cells(amounts: dict[str, float]) -> list[str]:
    """One row of the ledger, for people. A cost that is not known is not 0."""
    unknown = f" + {amounts['proposer_unpriced']:.0f} unknown" if amounts["proposer_unpriced"] else ""
    return [*(f"{amounts[what]:,.0f}" for what in ("rollouts", "model_calls", "prompt_tok", "completion_tok",
                                                "tool_calls", "proposals", "proposer_calls", "proposer_tok")),
            f"{amounts['proposer_usd']:.2f}{unknown}", f"{amounts['seconds'] / 60:.1f}"]
