"""What a search will take, what it may take, what it has cost: the plan against a run, the caps, prices that are not known."""

import json

import pytest

import proposers
from config import CHOICES, Config
from costs import Budget, Plan, check_costs, describe, plan_search
from gates import N_GATE_ROLLOUTS
from candidates import Candidate
from rundir import UsageError
from sessions import parse_price, price_of
from small import SMALL, call, rows


def settings(**changes) -> Config:
    known = dict(domain="math", cycles=2, iterations=3, candidates=3, epochs=1, prompt_batch=32, group_size=8, n_eval=8, n_rows=8,
                 proposer="rules")
    return Config(**known | changes)


@pytest.mark.parametrize("method", CHOICES["method"])
def test_the_plan_counts_what_the_schedule_says(method):
    plan = plan_search(settings(method=method, max_iterations=5, rollouts=0), n_train=64, n_tasks=16, n_test=10)
    proposals = {"weight": 0, "adaptive": 2 * 4 * 3, "whale": 12, "fst": 12}.get(method)
    if proposals is not None:
        assert plan.proposals == proposals
    assert plan.gates == plan.proposals * N_GATE_ROLLOUTS and plan.scoring % 16 == 0
    if method in ("whale", "fst"):
        assert plan == Plan(2, (12 + 2) * 16, 12 * N_GATE_ROLLOUTS, 0, 8 * 10 * 5, 12, 4)
    if method == "harness":                             # the budget of two cycles of WHALE, as one search
        budget = 2 * (2 * 32 * 8 + 7 * 16)
        assert plan.scoring == budget // 16 * 16 and plan.proposals == budget // 16 - 1


def test_confirming_and_caps_are_in_the_plan():
    plan = plan_search(settings(accept="confirm"), 64, 16, 10)
    assert plan.confirming == 2 * 4 * 16
    capped = plan_search(settings(max_proposals=5), 64, 16, 10)
    assert (capped.proposals, capped.requests, capped.scoring) == (5, 2, (5 + 2) * 16)


@pytest.mark.parametrize("changes, says", [
    ({}, "proposer rules: free; model: runs here, without a price; caps: none"),
    ({"proposer": "api"}, "proposer api: price unknown (--proposer-price), no limit (--proposer-usd)"),
    ({"proposer": "api", "proposer_price": "3,15", "proposer_usd": 0.5}, "3,15 $ a million tokens, at most $2.00"),
    ({"proposer": "cmd", "proposer_cmd": "claude"}, "proposer cmd: reports its cost, no limit"),
    ({"proposer": "cmd", "proposer_cmd": "./mine.sh {dir}"}, "proposer cmd: price unknown"),
    ({"engine": "server", "urls": "http://a"}, "model: price unknown (--model-price)"),
    ({"engine": "server", "urls": "http://a", "model_price": "0,2", "max_assistant_tok": 1000}, "at most $"),
    ({"max_cost": 5.0, "max_rollouts": 100}, "caps: --max-rollouts 100, --max-cost 5"),
])
def test_the_plan_in_words(changes, says):
    cfg = settings(**changes)
    assert says in describe(plan_search(cfg, 64, 16, 10), cfg)


def test_prices():
    assert parse_price("3, 15.5") == (3.0, 15.5) and price_of("3,15", 2_000_000, 100_000) == pytest.approx(7.5)
    for text in ("3", "3,15,1", "-1,2", "nan,1", "1e400,1", "x,y", "3;15", ""):
        with pytest.raises(ValueError, match="IN,OUT"):
            parse_price(text)


@pytest.mark.parametrize("changes, flag", [
    ({"proposer_price": "3"}, "--proposer-price 3"), ({"engine": "server", "model_price": "x,1"}, "--model-price x,1"),
    ({"model_price": "1,1", "engine": "transformers"}, "--model-price 1,1"),
    ({"max_cost": 5.0, "engine": "server"}, "--max-cost 5"), ({"max_cost": 5.0, "proposer": "api"}, "--max-cost 5"),
])
def test_a_cap_on_money_needs_known_prices(changes, flag):
    with pytest.raises(UsageError, match=flag):
        check_costs(settings(**changes))
    check_costs(settings(max_cost=5.0, engine="transformers"))
    check_costs(settings(max_cost=5.0, engine="server", model_price="0,0", proposer="api", proposer_price="0,0"))


def ledger(**harness) -> dict:
    return {"weight": {}, "harness": harness, "gates": {}, "eval": {"rollouts": 100, "prompt_tok": 50_000, "completion_tok": 10_000}}


def test_what_the_caps_leave():
    def left(changes, spent, kept=0, first=False):
        return Budget(settings(**changes), ledger(**spent), 16).n_candidates(kept, first)

    each = 16 + N_GATE_ROLLOUTS
    assert left({}, {})[0] > 1 << 20
    assert left({"max_rollouts": 3 * each}, {}) == (3, f"--max-rollouts {3 * each}")
    assert left({"max_rollouts": 3 * each}, {"rollouts": 1})[0] == 2
    assert left({"max_rollouts": 3 * each}, {}, kept=each)[0] == 2
    assert left({"max_rollouts": 16 + each}, {}, first=True)[0] == 1 and left({"max_rollouts": 15 + each}, {}, first=True)[0] == 0
    assert left({"max_proposals": 4}, {"proposals": 3, "proposer_calls": 1}) == (1, "--max-proposals 4")
    assert left({"max_proposals": 4}, {"proposals": 0, "proposer_calls": 9})[0] == 0        # sessions that gave nothing
    assert left({"max_cost": 1.0}, {"proposer_usd": 0.5})[0] > 1 << 20                      # nothing else costs money
    assert left({"max_cost": 1.0}, {"proposer_usd": 1.0})[0] == 0
    n, why = left({"max_cost": 1.0}, {"proposer_usd": 0.1, "proposer_unpriced": 2})
    assert n == 0 and "2 sessions did not say what they cost" in why
    paid = {"max_cost": 1.0, "engine": "server", "model_price": "10,20"}        # evaluation: $0.70, so $0.007 a rollout
    assert left(paid, {})[0] == int(0.3 / (0.007 * each)) and left(paid, {"prompt_tok": 30_000})[0] == 0


# ---- runs -----------------------------------------------------------------------------------------------------------


def run(out, *flags):
    code, output = call("math", *SMALL, "--method", "harness", "--iterations", "3", *flags, "--out", out, "--name", "run")
    assert code == 0, output
    return out / "run", json.loads((out / "run/summary.json").read_text())


N_TASKS = 24


@pytest.mark.parametrize("flags, n_proposals, cap", [
    (["--max-proposals", "4"], 4, "--max-proposals 4"),
    (["--max-rollouts", str(N_TASKS + 2 * (N_TASKS + N_GATE_ROLLOUTS))], 2, "--max-rollouts"),
    (["--max-rollouts", "10"], 0, "--max-rollouts 10"),
])
def test_a_cap_ends_the_search_and_is_said(flags, n_proposals, cap, tmp_path):
    """Never passed; what was found until then is accepted and measured."""
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 9), *flags)
    spent = summary["ledger"]
    assert spent["harness"]["proposals"] == n_proposals and summary["stopped_by"].startswith(cap)
    assert f"the harness search ended at {cap}" in (folder / "log.txt").read_text()
    if cap.startswith("--max-rollouts"):
        assert spent["harness"]["rollouts"] + spent["gates"]["rollouts"] <= int(flags[1])
    assert summary["complete"] and len(summary["accepted"]) == bool(n_proposals)


def test_the_plan_is_said_before_and_holds(tmp_path):
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 12), "--accept", "confirm")
    log = (folder / "log.txt").read_text()
    assert log.index("the harness search takes at most") < log.index("test mean@")
    spent = summary["ledger"]
    assert summary["rollouts"]["harness"] <= N_TASKS * 12 and spent["harness"]["proposer_unpriced"] == 0


def test_money_ends_a_search(tmp_path, monkeypatch):
    """Each session costs 40 cents, so a dollar is enough for three; a fourth is not held."""
    known = proposers.propose_by_rules

    def paid(request):
        request.bill.proposer_usd = 0.4
        assert request.usd_left > 0
        return known(request)

    monkeypatch.setattr(proposers, "propose_by_rules", paid)
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 30), "--candidates", "2", "--max-cost", "1")
    assert summary["ledger"]["harness"]["proposer_usd"] == pytest.approx(1.2) and summary["stopped_by"] == "--max-cost 1"
    assert summary["usd"] == {"known": pytest.approx(1.2), "unpriced_sessions": 0}


def test_a_session_of_unknown_cost_ends_a_search_with_a_cap_on_money(tmp_path, monkeypatch):
    def unpriced(request):
        request.bill.proposer_unpriced = 1
        source = request.history[0].candidate.source + f"\nN = {len(request.history)}\n"
        return [Candidate("", "h0", "x", (), source, 0)]

    monkeypatch.setattr(proposers, "propose_by_rules", unpriced)
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 9), "--max-cost", "1")
    assert summary["ledger"]["harness"]["proposer_calls"] == 1 and "did not say what they cost" in summary["stopped_by"]
    assert "0.00 + 1 unknown" in call("report", folder)[1] + (folder / "report.html").read_text()


def test_caps_may_change_on_resume(tmp_path):
    run(tmp_path, "--rollouts", str(N_TASKS * 9), "--max-proposals", "4")
    assert [row["accept"] for row in rows(tmp_path / "run") if "accept" in row] == []
    code, output = call("math", *SMALL, "--method", "harness", "--iterations", "3", "--rollouts", str(N_TASKS * 9),
                        "--max-proposals", "5", "--out", tmp_path, "--name", "run")
    assert code == 0 and "this run is complete" in output
