"""Which candidate a harness phase accepts, when 256 tasks with a rollout each leave a standard error of 3 points.

    best        the highest score of the archive; ties go to fewer model calls, then to the earlier: the paper's rule
    race        the same, but scored in rounds: a candidate that will hardly end above the best stops early
    confirm     the FINALISTS best above the incoming harness, and that one, once more on fresh seeds; the best that is
                better by more than the interval of the difference is accepted; if none is, the incoming one stays

Pure: scores in, decisions out. The search (harness_search.py) does what is decided here.

Differs from the paper: it has `best` only, and accepted a lucky candidate in its (0.2, 2) run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stats import bootstrap_ci, sign_test

ACCEPT = ("best", "confirm", "race")
FINALISTS = 3               # that are confirmed, beside the incoming harness
ROUNDS = (1 / 8, 1 / 4, 1 / 2, 1.0)     # of a race: the part of the tasks that is played at the end of each
HARDLY = 0.1                # a candidate stops when the chance that it ends above the best is lower than this


def cuts_of(n_tasks: int, rule: str) -> list[int]:
    """Tasks played at the end of each round; a round holds at least one."""
    return sorted({max(1, round(part * n_tasks)) for part in ROUNDS}) if rule == "race" else [n_tasks]


def kept_rollouts(rule: str, n_tasks: int) -> int:
    """Rollouts that a harness phase keeps for its end."""
    return (FINALISTS + 1) * n_tasks if rule == "confirm" else 0


def chance_to_win(own: dict[str, float], best: dict[str, float], n_tasks: int) -> float:
    """The chance that a candidate ends above the best, from the rewards of the tasks that it has played, task by task
    against the best's: if the rest goes as these did, the sum of the differences is normal (stochastic curtailment)."""
    differences = [own[task] - best[task] for task in own]
    n, rest = len(differences), n_tasks - len(differences)
    if not rest:
        return float(sum(differences) > 0)
    mean = math.fsum(differences) / n
    variance = max(math.fsum((d - mean) ** 2 for d in differences), 1.0) / n      # equal so far does not mean for ever
    spread = math.sqrt(variance * rest * (1 + rest / n))                          # of the rest, and of what we know
    return 0.5 * math.erfc(-mean * n_tasks / (spread * math.sqrt(2)))


def still_racing(rewards: dict[str, dict[str, float]], best: dict[str, float], n_tasks: int) -> dict[str, float]:
    """The candidates that go on -> their chance. `rewards`: of each in the race; `best`: of the archive's best.

    Each is held against whoever leads on the tasks that were played, the archive's best or one of themselves.
    """
    played = next(iter(rewards.values()))
    leader = max([best, *rewards.values()], key=lambda r: math.fsum(r[task] for task in played))    # ties: the first
    chances = {name: 1.0 if own is leader else chance_to_win(own, leader, n_tasks) for name, own in rewards.items()}
    return {name: chance for name, chance in chances.items() if chance >= HARDLY}


@dataclass(frozen=True)
class Confirmed:
    """A finalist against the incoming harness, on the same fresh tasks and seeds."""
    name: str
    mean: float
    incumbent_mean: float
    difference: float
    ci: tuple[float, float]             # of the difference; 95 % over all finalists together (Bonferroni)
    is_better: bool                     # the interval lies above 0; and, as a bootstrap of few tasks that differ is
                                        # too narrow, an exact sign test at the same level says so too


def confirm(finalists: dict[str, dict[str, float]], incumbent: dict[str, float], n_tests: int,
            seed: int) -> list[Confirmed]:
    """Each finalist's fresh rewards against the incumbent's, the best first. `n_tests`: finalists, refused ones too."""
    found, level = [], 0.05 / n_tests
    for name, rewards in finalists.items():
        differences = [rewards[task] - incumbent[task] for task in incumbent]
        ci = bootstrap_ci(differences, seed, level=1 - level)
        chance = sign_test(sum(d > 0 for d in differences), sum(d < 0 for d in differences))
        found.append(Confirmed(name, mean_of(rewards), mean_of(incumbent), mean_of(rewards) - mean_of(incumbent), ci,
                               ci[0] > 0 and chance <= level / 2))
    return sorted(found, key=lambda c: -c.mean)


def mean_of(rewards: dict[str, float]) -> float:
    return math.fsum(rewards.values()) / len(rewards)


def pareto_front(points: Iterable[tuple[str, float, float]]) -> set[str]:
    """Names of those (name, score, tokens a rollout) that no other beats in one without losing in the other."""
    points = list(points)
    return {name for name, score, tok in points if not any(
        s >= score and t <= tok and (s > score or t < tok) for _, s, t in points)}
