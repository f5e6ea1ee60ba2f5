"""Which candidate is accepted: the race's rule and confirming, as formulas, over simulated searches and in real ones."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import candidates as hs
import harness_search
import mechanisms
import proposers
from acceptance import (
    FINALISTS, HARDLY, chance_to_win, confirm, cuts_of, kept_rollouts, mean_of, pareto_front, still_racing)
from harness_search import Search
from sandbox import Sandbox
from test_harness_search import (  # noqa: F401  (fixtures)
    FORBIDDEN, H0, Killed, MortalEngine, engine, make_search, make_tasks, model_dir, sandbox, variants)

# ---- formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tasks, cuts", [(256, [32, 64, 128, 256]), (8, [1, 2, 4, 8]), (3, [1, 2, 3]), (1, [1])])
def test_rounds_end_with_all_tasks(n_tasks, cuts):
    assert cuts_of(n_tasks, "race") == cuts
    assert cuts_of(n_tasks, "best") == cuts_of(n_tasks, "confirm") == [n_tasks]


@pytest.mark.parametrize("wins, losses, ties", [(5, 9, 18), (0, 6, 26), (0, 0, 32), (9, 4, 3), (1, 30, 1)])
def test_the_chance_against_draws(wins, losses, ties):
    """The mean difference is drawn from what the tasks played say of it, then the tasks that are left."""
    differences = np.array([1.0] * wins + [-1.0] * losses + [0.0] * ties)
    n, n_tasks = len(differences), 128
    variance = max(((differences - differences.mean()) ** 2).sum(), 1.0) / n
    rng = np.random.default_rng(0)
    means = rng.normal(differences.mean(), np.sqrt(variance / n), 200_000)
    totals = differences.sum() + rng.normal(means * (n_tasks - n), np.sqrt(variance * (n_tasks - n)))
    own, best = {i: max(d, 0) for i, d in enumerate(differences)}, {i: max(-d, 0) for i, d in enumerate(differences)}
    assert chance_to_win(own, best, n_tasks) == pytest.approx((totals > 0).mean(), abs=0.005)


@pytest.mark.parametrize("own, chance", [([1, 1, 0], 1.0), ([1, 0, 0], 0.0), ([0, 0, 0], 0.0)])
def test_when_all_is_played_nothing_is_left_to_chance(own, chance):
    """A tie does not end above the best."""
    assert chance_to_win(dict(enumerate(own)), dict(enumerate([0, 1, 0])), 3) == chance


def test_the_clearly_worse_stop_and_the_leader_never_does():
    n = 32
    best = {i: float(i % 2 == 0) for i in range(n)}                             # 0.5
    rewards = {"nothing": dict.fromkeys(range(n), 0.0), "equal": dict(best), "better": {i: float(i % 4 != 1) for i in range(n)}}
    chances = still_racing(rewards, best, 256)
    assert chances == {"better": 1.0}                   # eight tasks behind the leader, the equal one stops too
    assert still_racing({"only": dict(best)}, best, 256) == {"only": 0.5}       # equal to the archive's best: open
    hopeless = {"a": dict.fromkeys(range(n), 0.0), "b": dict.fromkeys(range(n), 0.0)}
    assert still_racing(hopeless, best, 256) == {}


def naive_front(points):
    return {a for a, score, tok in points
            if not any((s > score and t <= tok) or (s >= score and t < tok) for _, s, t in points)}


def test_the_front():
    rng = random.Random(0)
    for _ in range(50):
        points = [(i, rng.randint(0, 5), rng.randint(0, 5)) for i in range(8)]
        assert pareto_front(points) == naive_front(points) != set()


def simulate(rng: random.Random, quality: float, hardness: dict[int, float]) -> dict[int, float]:
    """Rewards of a harness: tasks differ in hardness, so that rewards of two harnesses go together."""
    return {task: float(rng.random() < min(1.0, max(0.0, quality + shift))) for task, shift in hardness.items()}


def test_a_race_costs_less_and_finds_as_good_a_one():
    """Three candidates against a best, 200 times: the quality that is lost is far below a standard error."""
    rng, n = random.Random(1), 256
    spent, lost = [], []
    for _ in range(200):
        hardness = {task: rng.uniform(-0.4, 0.4) for task in range(n)}
        base = rng.uniform(0.2, 0.6)
        quality = {"best": base} | {f"c{i}": base + rng.gauss(-0.02, 0.06) for i in range(3)}
        rewards = {name: simulate(rng, q, hardness) for name, q in quality.items()}
        racing, played = ["c0", "c1", "c2"], 0
        for cut in cuts_of(n, "race"):
            played += len(racing) * (cut - (0 if cut == 32 else cut // 2))
            so_far = {name: {task: rewards[name][task] for task in range(cut)} for name in racing}
            if so_far and cut < n:
                racing = sorted(still_racing(so_far, rewards["best"], n))
        spent.append(played / (3 * n))
        pick = max(["best", *racing], key=lambda name: mean_of(rewards[name]))
        whole = max(rewards, key=lambda name: mean_of(rewards[name]))
        lost.append(quality[whole] - quality[pick])
    assert 0.3 < np.mean(spent) < 0.6 and np.mean(lost) < 0.005


def test_confirming_accepts_what_is_better_and_hardly_ever_luck():
    """The interval holds over all finalists together: three that are no better are accepted in fewer than 5 %."""
    rng, n, accepted = random.Random(2), 256, {0.0: 0, 0.15: 0}
    for gain in accepted:
        for trial in range(150):
            hardness = {task: rng.uniform(-0.4, 0.4) for task in range(n)}
            finalists = {f"h{i}": simulate(rng, 0.5 + gain, hardness) for i in range(3)}
            rows = confirm(finalists, simulate(rng, 0.5, hardness), 3, trial)
            assert [row.mean for row in rows] == sorted((row.mean for row in rows), reverse=True)
            assert rows[0].difference == pytest.approx(rows[0].mean - rows[0].incumbent_mean)
            assert rows[0].ci[0] < rows[0].difference < rows[0].ci[1]
            accepted[gain] += any(row.is_better for row in rows)
    assert accepted[0.0] <= 8 and accepted[0.15] >= 120


def test_rollouts_that_a_phase_keeps_for_its_end():
    assert kept_rollouts("confirm", 256) == (FINALISTS + 1) * 256
    assert kept_rollouts("best", 256) == kept_rollouts("race", 256) == 0 and 0 < HARDLY < 0.5


# ---- in a search ----------------------------------------------------------------------------------------------------

SMALL = dict(tasks=make_tasks(16, "race"), forbidden=FORBIDDEN, n_candidates=3)
GOOD = mechanisms.render("math", frozenset({"calls_6", "careful_reminder", "ask_for_form"}), "", H0)
MUTE = H0.replace("yield generate(messages, tools=[PYTHON])", "yield generate(messages, max_tokens=1)")


def propose(request):
    """One that may be better, one that cannot be, one that is refused."""
    return variants(request, GOOD + f"\nN = {len(request.history)}\n", MUTE + f"\nN = {len(request.history)}\n", "import os")


def search_by(rule, folder, engine, sandbox):  # noqa: F811
    counting = MortalEngine(engine, float("inf"))
    search = make_search(folder, counting, sandbox, proposer=propose, rule=rule, **SMALL)
    outcomes = [outcome for _ in range(3) for outcome in search.iterate()]
    return rule, folder, search, outcomes, search.accept(), counting.n_done


@pytest.fixture(scope="module")
def raced(tmp_path_factory, engine, sandbox):  # noqa: F811
    return search_by("race", tmp_path_factory.mktemp("race") / "archive", engine, sandbox)


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory, engine, sandbox):  # noqa: F811
    return search_by("confirm", tmp_path_factory.mktemp("confirm") / "archive", engine, sandbox)


@pytest.fixture(params=["raced", "confirmed"])
def searched(request):
    return request.getfixturevalue(request.param)


def test_a_race_stops_the_worse_one_early(raced):
    _, folder, _, outcomes, accepted, _ = raced
    stopped = [o for o in outcomes if o.score and o.score.stopped]
    assert stopped and {o.candidate.source.partition("\nN = ")[0] for o in stopped} == {MUTE}
    for outcome in stopped:
        score, rows = outcome.score, (folder / outcome.candidate.name / "traces.jsonl").read_text().splitlines()
        assert score.n == len(rows) == len(score.rewards) in (2, 4, 8) and "of 16 tasks" in score.stopped
        assert score.cost["rollouts"] == score.n and outcome not in hs.rank(outcomes)
        of_h0 = [json.loads(row)["task_id"] for row in (folder / "h0/traces.jsonl").read_text().splitlines()]
        assert [json.loads(row)["task_id"] for row in rows] == of_h0[:score.n]          # row k is the same task
    whole = [o.score for o in outcomes if o.score and not o.score.stopped]
    assert all(score.n == 16 for score in whole) and accepted.mean == max(score.mean for score in whole)


def test_a_race_scores_as_a_whole_scoring_does(raced, tmp_path, engine, sandbox):  # noqa: F811
    """The same rollouts on the same seeds: what was scored whole in a race has the same rewards without one."""
    _, _, _, outcomes, _, _ = raced
    search = make_search(tmp_path, engine, sandbox, proposer=propose, **SMALL)
    best = [outcome for _ in range(3) for outcome in search.iterate()]
    for raced, whole in zip(outcomes, best, strict=True):
        assert (raced.refused, raced.candidate) == (whole.refused, whole.candidate)
        if raced.score:
            assert raced.score.rewards == {task: whole.score.rewards[task] for task in raced.score.rewards}


def test_confirming_uses_fresh_seeds_and_pays(confirmed):
    _, folder, search, outcomes, accepted, _ = confirmed
    record = json.loads((folder / "acceptance.json").read_text())
    better = [o.candidate.name for o in hs.rank(outcomes) if o.score.mean > outcomes[0].score.mean][:FINALISTS]
    assert better and {row["name"] for row in record["confirmed"]} == set(better)
    assert accepted.cost["rollouts"] == 16 * (1 + len(better))
    fresh = json.loads((folder / better[0] / "confirmed.json").read_text())["rewards"]
    old = next(o.score.rewards for o in outcomes if o.candidate.name == better[0])
    assert fresh.keys() == old.keys() and fresh != old
    row = next(row for row in record["confirmed"] if row["name"] == better[0])
    of_h0 = json.loads((folder / "h0/confirmed.json").read_text())["rewards"]
    assert row["difference"] == pytest.approx(mean_of(fresh) - mean_of(of_h0))
    assert accepted.candidate.name == next((r["name"] for r in record["confirmed"] if r["is_better"]), "h0")
    assert (folder / "accepted.txt").read_text().strip() == accepted.candidate.name == record["name"]
    assert search.accept() == accepted                  # of the same phase: made once, charged as long as it is not over


@pytest.mark.parametrize("fraction", [0.4, 0.7, 0.95])
def test_killed_and_resumed_it_is_the_same_search(searched, fraction, tmp_path, engine):  # noqa: F811
    """And no rollout of a finished round is made again: at most one round more than without the kill."""
    rule, folder, _, outcomes, accepted, n = searched

    def go(mortal):
        with Sandbox(max_jobs=2) as box:                # what a killed run left in one is gone with it
            search = make_search(tmp_path / "archive", mortal, box, proposer=propose, rule=rule, **SMALL)
            found = [outcome for _ in range(3) for outcome in search.iterate()]
            return found, search.accept()

    with pytest.raises(Killed):
        go(MortalEngine(engine, int(fraction * n)))
    again = MortalEngine(engine, float("inf"))
    found, then = go(again)

    def timeless(outcomes):
        return [replace(o, gate_seconds=0.0, score=o.score and replace(o.score, seconds=0.0)) for o in outcomes]

    assert timeless(found) == timeless(outcomes) and replace(then, seconds=0) == replace(accepted, seconds=0)
    assert again.n_done < n
    for name in ("history.jsonl", "archive.md", "accepted.txt", "acceptance.json", "task.md"):
        assert (tmp_path / "archive" / name).read_text() == (folder / name).read_text(), name


def no_gates(*args):
    return []


@pytest.mark.slow
def test_a_race_stopped_between_any_two_rounds(tmp_path, engine, sandbox, monkeypatch):  # noqa: F811
    """Three that all go on: after a stop some have played a round more than others, and nothing is decided otherwise."""
    sources = [GOOD + f"\nN = {i}\n" for i in range(3)]
    small = SMALL | {"tasks": make_tasks(8, "rounds")}
    left, play = [0], Search._play
    monkeypatch.setattr(harness_search, "check_harness", no_gates)

    def stopping(self, candidate, *args):
        left[0] -= candidate.name != "h0"
        if left[0] == 0:
            raise Killed
        return play(self, candidate, *args)

    def go(folder):
        search = make_search(folder, engine, sandbox, proposer=lambda r: variants(r, *sources), rule="race", **small)
        names = [o.candidate.name for _ in range(2) for o in search.iterate()]
        return names, (folder / "history.jsonl").read_text()

    whole = go(tmp_path / "whole")
    monkeypatch.setattr(Search, "_play", stopping)
    left[0] = 1000
    go(tmp_path / "counted")
    n_rounds = 1000 - left[0]
    assert n_rounds >= 12
    for moment in range(1, n_rounds):
        left[0] = moment
        with pytest.raises(Killed):
            go(tmp_path / f"stopped {moment}")
        assert go(tmp_path / f"stopped {moment}") == whole, moment


def test_confirming_in_a_later_phase_is_against_what_the_one_before_accepted(tmp_path, engine, sandbox, monkeypatch):  # noqa: F811
    """h1 is confirmed in the first phase; in the second, luckier ones fail against it, and h1 stays."""
    n = len(SMALL["tasks"])
    share = {("score", "h1"): 0.5, ("confirm", "h1"): 0.9}

    def play(self, candidate, tasks, tally, seeds, title):
        part = share.get((seeds, candidate.name), 0.1 if candidate.name == "h0" or seeds == "confirm" else 0.95)
        tally.rewards |= {task.id: float(i < part * n) for i, task in enumerate(tasks)}
        tally.cost["rollouts"] += n
        return ""

    monkeypatch.setattr(Search, "_play", play)
    monkeypatch.setattr(harness_search, "check_harness", no_gates)
    batches = iter([[GOOD], [GOOD + f"\nN = {i}\n" for i in range(3)]])
    search = make_search(tmp_path, engine, sandbox, proposer=lambda r: variants(r, *next(batches)), rule="confirm", **SMALL)
    search.iterate()
    search.iterate()
    first = search.accept(0)
    assert (first.candidate.name, first.cost["rollouts"]) == ("h1", 2 * n) and first.mean > 0.9
    search.iterate()
    second = search.accept(1)
    assert second.candidate.name == "h1" and second.mean == first.mean
    assert {row.name for row in second.confirmed} == {"h2", "h3", "h4"}
    assert second.cost["rollouts"] == 3 * n                     # h1's were paid for by the first phase
    assert search.accept(1) == second and search.accept(2).cost == {}           # each is confirmed once


def test_a_finalist_that_its_fresh_rollouts_refuse_is_not_accepted(tmp_path, engine, sandbox, monkeypatch):  # noqa: F811
    def play(self, candidate, tasks, tally, seeds, title):
        tally.rewards |= {task.id: float(candidate.name == "h1") for task in tasks}
        return "model tokens: a hit" if seeds == "confirm" and candidate.name == "h1" else ""

    monkeypatch.setattr(Search, "_play", play)
    monkeypatch.setattr(harness_search, "check_harness", no_gates)
    search = make_search(tmp_path, engine, sandbox, proposer=lambda r: variants(r, GOOD), rule="confirm", **SMALL)
    search.iterate()
    search.iterate()
    accepted = search.accept()
    assert accepted.candidate.name == "h0" and "h1 is refused: model tokens: a hit" in accepted.why


def test_the_archive_as_a_table(searched):
    _, folder, _, outcomes, _, _ = searched
    rows = [line.split(" | ") for line in (folder / "archive.md").read_text().splitlines()[2:] if line.startswith("| h")]
    assert sorted(row[0].removeprefix("| ") for row in rows) == sorted(o.candidate.name for o in outcomes)
    of = {o.candidate.name: o for o in outcomes}
    front = pareto_front((o.candidate.name, o.score.mean, o.score.tok_a_rollout) for o in hs.rank(outcomes))
    for row in rows:
        outcome = of[row[0].removeprefix("| ")]
        if outcome.score:
            assert row[2].startswith(f"{outcome.score.mean:.3f} [") and row[3] == f"{outcome.score.n_ok} / 0 / 0"
            assert ("on the front" in row[6]) == (outcome.candidate.name in front)
        else:
            assert row[6].startswith("refused: ")


def test_a_sibling_is_no_parent(tmp_path, engine, sandbox):  # noqa: F811
    """In a race it has no score yet; so that both ways refuse alike, it is none in either."""
    def siblings(request):
        return [*variants(request, GOOD), *variants(request, GOOD + "\nN = 1\n", parent=request.slots[0])]

    search = make_search(tmp_path, engine, sandbox, proposer=siblings, **SMALL)
    search.iterate()
    assert "parent 'h1'" in search.iterate()[1].refused


def test_an_unknown_price_is_not_nothing(tmp_path, engine, sandbox):  # noqa: F811
    """What a proposer cannot tell is counted as unknown, in the bill that is kept."""
    def unpriced(request):
        request.bill.proposer_unpriced = 1
        return proposers.propose_by_rules(request)

    search = make_search(tmp_path, engine, sandbox, proposer=unpriced, **SMALL)
    search.iterate()
    search.iterate()
    bill = json.loads((tmp_path / "iteration_02.json").read_text())["bill"]
    assert bill == {"proposals": 3, "proposer_calls": 1, "proposer_tok": 0, "proposer_usd": 0.0, "proposer_unpriced": 1}
