"""When to switch between weight and harness phase: the paper's fixed schedule (E, I), its adaptive rule, the baselines.

Pure: numbers in, a decision out. A rule is rebuilt on resume, or a sweep replayed, from the recorded signals alone.

Differs from the paper:
- weight-only and harness-only are a row of phases of the fixed schedule's length, evaluated as often as WHALE is.
  Harness phases in a row are one search, with one archive.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Literal

METHODS = ("whale", "fst", "adaptive", "weight", "harness", "stagewise")


def steps(epochs: float, n_rows: int, batch: int) -> int:
    """Weight steps in `epochs` epochs over `n_rows` prompts: round(E * round(N / batch)). ValueError if that is 0."""
    per_epoch = _round_half_up(Fraction(n_rows, batch))
    n_steps = _round_half_up(Fraction(str(epochs)) * per_epoch)  # str: the decimal as written, not its nearest float
    if n_steps < 1:
        raise ValueError(f"{epochs} epochs of {per_epoch} steps ({n_rows} rows, batch {batch}) are less than a step")
    return n_steps


def _round_half_up(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2))  # round() goes to the even neighbour: round(2.5) == 2, round(3.5) == 4


class PatienceRule:
    """The adaptive rule: ends when the mean of the last `window` signals has set no phase-best for `patience` signals.

    A new best is strictly greater; a window counts only when full. Never before `min_n` signals, always at `max_n`.
    Weight phase: the signal is a step's mean reward; window = patience = min_n = 0.2 epoch, no max_n.
    Harness phase: the signal is the archive's best score; window 1, patience 2, min_n 6, max_n 16.
    """

    def __init__(self, window: int, patience: int, min_n: int, max_n: int | None = None):
        if min(window, patience, min_n) < 1 or (max_n is not None and max_n < min_n):
            raise ValueError(f"{window=} {patience=} {min_n=} {max_n=}: each at least 1, and max_n at least min_n")
        self.window, self.patience, self.min_n, self.max_n = window, patience, min_n, max_n
        self.recent: deque[float] = deque(maxlen=window)
        self.n, self.mean, self.best, self.best_at = 0, None, None, None  # mean and best of full windows only

    def record(self, x: float) -> None:
        """Takes the next signal. ValueError when the phase is over or the signal is not finite."""
        if not self.goes_on or not math.isfinite(x):
            raise ValueError(f"cannot record {x}: {self.why}")
        self.n += 1
        self.recent.append(x)
        if len(self.recent) == self.window:
            self.mean = math.fsum(self.recent) / self.window  # fsum: the same signals in another order are no new best
            if self.best is None or self.mean > self.best:
                self.best, self.best_at = self.mean, self.n

    @property
    def _end(self) -> str | None:
        if self.n == self.max_n:
            return f"ends: limit of {self.max_n} reached"
        if self.n >= self.min_n and self.best_at is not None and self.n - self.best_at >= self.patience:
            return f"ends: no new best for {self.patience}"
        return None

    @property
    def goes_on(self) -> bool:
        return self._end is None

    @property
    def why(self) -> str:
        """The rule and its numbers, for the log."""
        seen = f"{self.n} of {self.window} in the first window"
        if self.best is not None:
            seen = f"mean of last {self.window} {self.mean:.4f}, best {self.best:.4f} {self.n - self.best_at} ago"
        limits = f"patience {self.patience}, at least {self.min_n}, at most {self.max_n or 'any number'}"
        return f"{self.n} recorded, {seen} ({limits}); {self._end or 'goes on'}"


class FixedRule(PatienceRule):
    """Goes on for `limit` weight steps or harness iterations, whatever the signal: its patience cannot end earlier."""

    def __init__(self, limit: int):
        super().__init__(window=1, patience=limit, min_n=limit, max_n=limit)

    @property
    def why(self) -> str:
        return f"{self.n} of {self.max_n} recorded; {self._end or 'goes on'}"


@dataclass(frozen=True)
class Phase:
    index: int  # from 0, over the whole run
    cycle: int  # from 1
    kind: Literal["weight", "harness"]
    rule: PatienceRule  # fresh; on resume the caller records the phase's earlier signals again
    archive: int  # of the harness search, by the cycle that it began in: harness phases in a row share one


def phases(
    method: str, fixed: tuple[int, int], adaptive: tuple[int, int, int, int], n_weight_phases: int, start: int = 0
) -> Iterator[Phase]:
    """The phases of a run from index `start` on. Endless: the caller stops when the training rollouts are spent.

    fixed: (weight steps, harness iterations) a phase. adaptive: (0.2 epoch in steps; patience, min_n and max_n of the
    harness phase), read by "adaptive" alone. n_weight_phases: the length of the first stage of "stagewise".
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    (weight_steps, iterations), (weight_patience, *harness_patience) = fixed, adaptive
    for index in count(start):
        if method in ("weight", "harness"):
            cycle, kind, archive = index + 1, method, 1
        elif method == "stagewise":
            cycle, kind, archive = index + 1, "weight" if index < n_weight_phases else "harness", n_weight_phases + 1
        else:
            cycle, kind, archive = index // 2 + 1, "harness" if index % 2 else "weight", index // 2 + 1
        if method != "adaptive":
            rule = FixedRule(weight_steps if kind == "weight" else iterations)
        elif kind == "weight":
            rule = PatienceRule(window=weight_patience, patience=weight_patience, min_n=weight_patience)
        else:
            rule = PatienceRule(1, *harness_patience)
        yield Phase(index, cycle, kind, rule, archive)


def planned_rollouts(
    weight_steps: int, batch: int, group: int, iterations: int, candidates: int, n_harness_tasks: int, cycles: int
) -> int:
    """Training rollouts of `cycles` cycles of WHALE. Iteration 1 scores the incumbent, a later one its candidates."""
    return cycles * (weight_steps * batch * group + (1 + (iterations - 1) * candidates) * n_harness_tasks)
