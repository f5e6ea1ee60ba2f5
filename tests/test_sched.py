"""The schedules: the paper's step counts, both adaptive rules on hand-made signals, replay, each method's phases."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched import METHODS, FixedRule, PatienceRule, phases, planned_rollouts, steps


def n_until_end(rule, signals):
    """How many of the signals the rule takes before it ends; None if it would go on."""
    for n, x in enumerate(signals, start=1):
        rule.record(x)
        if not rule.goes_on:
            return n
    return None


@pytest.mark.parametrize(
    ("n_rows", "counts"),
    [(18_946, (44, 15, 74)), (17_917, (42, 14, 70)), (16_384, (38, 13, 64))],  # search, math, chess
)
def test_steps_of_the_paper(n_rows, counts):
    assert tuple(steps(epochs, n_rows, 256) for epochs in (0.6, 0.2, 1.0)) == counts


def test_halves_are_rounded_up_and_decimals_are_exact():
    assert steps(0.5, 5, 1) == 3  # round(2.5) is 2
    assert steps(1, 640, 256) == 3  # 2.5 steps an epoch
    assert steps(0.145, 100, 1) == 15  # 0.145 * 100 is 14.499999999999998 in floats
    with pytest.raises(ValueError, match="less than a step"):
        steps(0.1, 256, 256)


def test_fixed_rule_ignores_the_signal():
    rule = FixedRule(3)
    assert n_until_end(rule, [1.0, 0.0, 0.0]) == 3
    assert rule.why == "3 of 3 recorded; ends: limit of 3 reached"


def weight_rule(n=4):
    return PatienceRule(window=n, patience=n, min_n=n)


def test_weight_phase_flat_reward_ends_one_patience_after_the_first_full_window():
    assert n_until_end(weight_rule(), [0.5] * 20) == 8


def test_weight_phase_goes_on_while_the_window_rises():
    assert n_until_end(weight_rule(), [k / 100 for k in range(100)]) is None


def test_weight_phase_ends_one_patience_after_its_last_best():
    # windows of 4: means rise up to the one that ends at signal 7 and never come back to it
    signals = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7] + [0.1] * 10
    assert n_until_end(weight_rule(), signals) == 7 + 4


def test_a_window_that_is_not_full_sets_no_best():
    # the first signal alone is the highest "mean" of all; counted, the phase would end at 5
    assert n_until_end(weight_rule(), [1.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0]) == 8
    assert weight_rule().mean is None


def test_an_equal_window_is_no_new_best_whatever_the_order_of_its_signals():
    # sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1]) in floats; the window has the same mean at each step
    assert n_until_end(weight_rule(3), [0.3, 0.2, 0.1] * 5) == 6
    assert n_until_end(weight_rule(3), [0.1, 0.2, 0.3] * 5) == 6


def harness_rule():
    return PatienceRule(window=1, patience=2, min_n=6, max_n=16)


@pytest.mark.parametrize(
    ("archive_best", "n"),
    [
        ([0.3] * 16, 6),  # nothing ever better: the minimum holds it
        ([0.3, 0.3, 0.3, 0.4] + [0.4] * 12, 6),  # best at 4, two without: 6
        ([0.3, 0.3, 0.3, 0.3, 0.4] + [0.4] * 11, 7),  # best at 5: 7
        ([0.3, 0.3, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5, 0.5], 9),  # better at 7, just in time
        ([0.3, 0.3, 0.3, 0.3, 0.4, 0.4, 0.4, 0.5, 0.5], 7),  # better at 8, too late
        ([k / 100 for k in range(20)], 16),  # better each time: the maximum ends it
    ],
)
def test_harness_phase(archive_best, n):
    assert n_until_end(harness_rule(), archive_best) == n


def test_why_tells_the_numbers_that_decide():
    rule = PatienceRule(window=2, patience=2, min_n=2, max_n=9)
    assert rule.why == "0 recorded, 0 of 2 in the first window (patience 2, at least 2, at most 9); goes on"
    for x in (0.25, 0.5, 0.25):
        rule.record(x)
    assert "3 recorded, mean of last 2 0.3750, best 0.3750 1 ago" in rule.why and rule.why.endswith("goes on")
    rule.record(0.0)
    assert rule.why.endswith("ends: no new best for 2")
    ended_by_max = harness_rule()
    n_until_end(ended_by_max, range(16))
    assert ended_by_max.why.endswith("ends: limit of 16 reached")


def test_a_signal_after_the_end_or_not_a_number_is_refused():
    rule = FixedRule(1)
    with pytest.raises(ValueError, match="nan"):
        rule.record(float("nan"))
    rule.record(0.5)
    with pytest.raises(ValueError, match="cannot record 0.5: 1 of 1 recorded; ends"):
        rule.record(0.5)
    for bad in (dict(window=0, patience=1, min_n=1), dict(window=1, patience=1, min_n=3, max_n=2)):
        with pytest.raises(ValueError, match="at least 1"):
            PatienceRule(**bad)
    with pytest.raises(ValueError, match="at least 1"):
        FixedRule(0)


def end_by_definition(signals, window, patience, min_n, max_n):
    """DESIGN's sentence, quadratic: at each n look at every full window of the phase anew."""
    for n in range(1, len(signals) + 1):
        means = {end: sum(signals[end - window : end]) for end in range(window, n + 1)}
        if n == max_n:
            return n
        if means and n >= min_n:
            last_best = min(end for end in means if means[end] == max(means.values()))  # the first to reach the maximum
            if n - last_best >= patience:
                return n
    return None


@given(
    signals=st.lists(st.integers(0, 3), max_size=30),  # small integers: ties are common, sums exact
    window=st.integers(1, 5),
    patience=st.integers(1, 5),
    min_n=st.integers(1, 8),
    max_more=st.none() | st.integers(0, 10),
)
def test_patience_rule_is_its_definition(signals, window, patience, min_n, max_more):
    max_n = None if max_more is None else min_n + max_more
    rule = PatienceRule(window, patience, min_n, max_n)
    assert n_until_end(rule, signals) == end_by_definition(signals, window, patience, min_n, max_n)


@given(signals=st.lists(st.floats(0, 1), max_size=25), cut=st.integers(0, 25))
def test_a_replayed_rule_goes_on_as_the_old_one(signals, cut):
    def feed(rule, xs):
        said = []
        for x in xs:
            if rule.goes_on:
                rule.record(x)
            said.append(rule.why)
        return said

    whole = feed(weight_rule(), signals)
    resumed = weight_rule()
    feed(resumed, signals[:cut])
    assert feed(resumed, signals[cut:]) == whole[cut:]


NUMBERS = dict(fixed=(44, 6), adaptive=(15, 2, 6, 16), n_weight_phases=2)  # search


def first_phases(method, n=5, start=0):
    return list(islice(phases(method, **NUMBERS, start=start), n))


def test_kinds_and_cycles():
    table = {m: [(p.kind[0], p.cycle) for p in first_phases(m)] for m in METHODS}
    alternating = [("w", 1), ("h", 1), ("w", 2), ("h", 2), ("w", 3)]
    assert table["whale"] == table["fst"] == table["adaptive"] == alternating
    assert table["weight"] == [("w", k) for k in range(1, 6)]
    assert table["harness"] == [("h", k) for k in range(1, 6)]
    assert table["stagewise"] == [("w", 1), ("w", 2), ("h", 3), ("h", 4), ("h", 5)]


def test_rules_of_the_phases():
    for method in METHODS:
        for phase in first_phases(method):
            if method == "adaptive":
                n = 30 if phase.kind == "weight" else 6  # of a flat signal: window 15, then patience 15
            else:
                n = 44 if phase.kind == "weight" else 6
            assert n_until_end(phase.rule, [0.5] * 60) == n, (method, phase)


@pytest.mark.parametrize("method", METHODS)
def test_phases_from_start_are_the_rest(method):
    def told(phase):
        return phase.index, phase.cycle, phase.kind, phase.rule.why

    assert [told(p) for p in first_phases(method, 4, start=3)] == [told(p) for p in first_phases(method, 7)][3:]


def test_unknown_method():
    with pytest.raises(ValueError, match="none of whale, fst"):
        next(phases("whales", **NUMBERS))


def test_planned_rollouts():
    # search, (0.6, 6): 44 steps of 256 prompts x 8, then 256 for the incumbent and 5 x 3 candidates x 256
    assert planned_rollouts(44, 256, 8, 6, 3, 256, cycles=1) == 90_112 + 256 + 3_840
    assert planned_rollouts(15, 256, 8, 1, 3, 256, cycles=2) == 2 * (30_720 + 256)
