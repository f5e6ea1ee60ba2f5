"""Intervals: how sure a mean is, and how sure the difference of two arms that share tasks and seeds is.

Differs from the paper: the paper gives no intervals.
"""

import numpy as np


def bootstrap_ci(values: list[float], seed: int, n_resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of `values`, one value a task."""
    values = np.asarray(values, dtype=float)
    picks = np.random.Generator(np.random.Philox(seed)).integers(0, len(values), (n_resamples, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def paired_ci(differences: list[list[float]], seed: int, n_resamples: int = 10_000) -> tuple[float, float]:
    """95 % interval of the mean of differences (n_runs, n_tasks): arm less arm, run by run (same seed), task by task.

    Two-level percentile bootstrap: runs are drawn again, and in each drawn run the tasks. With few runs it is too
    narrow (that of three cannot reach far beyond the worst and the best), so each run's difference belongs beside it.
    """
    grid = np.asarray(differences, dtype=float)                                 # (n_runs, n_tasks)
    n_runs, n_tasks = grid.shape
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty(n_resamples)
    for i in range(n_resamples):
        runs = rng.integers(0, n_runs, n_runs)
        means[i] = grid[runs[:, None], rng.integers(0, n_tasks, (n_runs, n_tasks))].mean()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
