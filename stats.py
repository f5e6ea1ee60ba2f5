"""Intervals: how sure a mean is, and how sure the difference of two arms that share tasks and seeds is.

Differs from the paper: the paper gives no intervals.
"""

from math import comb

import numpy as np


def bootstrap_ci(values: list[float], seed: int, n_resamples: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, one value a task."""
    values = np.asarray(values, dtype=float)
    picks = np.random.Generator(np.random.Philox(seed)).integers(0, len(values), (n_resamples, len(values)))
    tail = round(50 * (1 - level), 9)                                           # per cent, on each side
    low, high = np.percentile(values[picks].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def sign_test(n_worse: int, n_better: int) -> float:
    """The chance of so many worse pairs or more among the pairs that differ, if worse and better are equally likely."""
    n = n_worse + n_better
    return sum(comb(n, k) for k in range(n_worse, n + 1)) / 2 ** n


def paired_ci(differences: list[list[float]], seed: int, n_resamples: int = 10_000) -> tuple[float, float]:
    """95 % interval of the mean of differences (n_runs, n_tasks): arm less arm, run by run (same seed), task by task.

    Runs share their tasks, so both are drawn again, runs and tasks, each drawn run with the same drawn tasks. With few
    runs it is too narrow (that of three cannot reach far beyond the worst and the best), so each run's difference
    belongs beside it.
    """
    grid = np.asarray(differences, dtype=float)                                 # (n_runs, n_tasks)
    n_runs, n_tasks = grid.shape
    rng = np.random.Generator(np.random.Philox(seed))
    runs = rng.multinomial(n_runs, [1 / n_runs] * n_runs, n_resamples)          # how often each was drawn
    tasks = rng.multinomial(n_tasks, [1 / n_tasks] * n_tasks, n_resamples)
    means = ((runs @ grid) * tasks).sum(axis=1) / (n_runs * n_tasks)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
