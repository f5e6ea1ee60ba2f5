"""What a search will take, what it may take, what it has cost: the plan against a run, the caps, prices that are not known."""

import json

import pytest

import proposers
from config import CHOICES, Config
from costs import Budget, Plan, check_costs, describe, plan_search
from gates import N_GATE_ROLLOUTS
from candidates import Candidate
from files import UsageError
from sessions import parse_price, price_of
from small import SMALL, call


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
        assert plan == Plan((12 + 2) * 16, 12 * N_GATE_ROLLOUTS, 0, 8 * 10 * 5, 12, 4, True)
    if method == "harness":                             # the budget of two cycles of WHALE, as one search
        budget = 2 * (2 * 32 * 8 + 7 * 16)
        assert plan.scoring == budget // 16 * 16 and plan.proposals == budget // 16 - 1 and not plan.is_sure


def test_the_plan_of_a_search_alone_and_of_a_budget():
    alone = plan_search(settings(method="harness", one_search=True, cycles=2), 64, 16, 10)
    assert alone == Plan(16 * 16, 15 * N_GATE_ROLLOUTS, 0, 8 * 10 * 3, 15, 5, True)
    cycle = 2 * 32 * 8 + 7 * 16
    many = plan_search(settings(rollouts=10 * cycle, finish="harness"), 64, 16, 10)
    assert not many.is_sure and many.scoring == 11 * 7 * 16 and many.evaluation == 8 * 10 * (1 + 2 * 11)
    assert plan_search(settings(select="harness-set"), 64, 16, 10).evaluation == (8 * 10 + 16) * 5


def test_confirming_and_caps_are_in_the_plan():
    plan = plan_search(settings(accept="confirm"), 64, 16, 10)
    assert plan.confirming == 2 * 4 * 16
    capped = plan_search(settings(max_proposals=5), 64, 16, 10)
    assert (capped.proposals, capped.requests, capped.scoring) == (5, 2, (5 + 2) * 16)


@pytest.mark.parametrize("changes, says", [
    ({}, "proposer rules: free; model: runs here, without a price; caps: none"),
    ({"proposer": "api"}, "proposer api: price unknown unless it reports it (--proposer-price); a session: no limit (--proposer-usd)"),
    ({"proposer": "api", "proposer_price": "3,15", "proposer_usd": 0.5}, "3,15 $ a million tokens; a session: $0.5 at most"),
    ({"proposer": "cmd", "proposer_cmd": "claude"}, "proposer cmd: reports its cost; a session: no limit"),
    ({"rollouts": 2000}, "the harness search takes about "), ({"method": "harness"}, "more where some are refused or stopped early"),
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
    ({"proposer_cmd": "codex"}, "--proposer-cmd is for --proposer cmd"), ({"proposer": "cmd", "proposer_url": "http://a"}, "--proposer-url"),
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
    def left(changes, spent, first=False):
        return Budget(settings(**changes), ledger(**spent), 16, 10).n_candidates(first)

    each = 16 + N_GATE_ROLLOUTS
    assert left({}, {})[0] > 1 << 20
    assert left({"max_rollouts": 3 * each}, {}) == (3, f"--max-rollouts {3 * each}")
    assert left({"max_rollouts": 3 * each}, {"rollouts": 1})[0] == 2
    assert left({"max_rollouts": 3 * each, "accept": "confirm"}, {})[0] == (3 * each - 4 * 16) // each
    assert left({"max_rollouts": 16 + each}, {}, first=True)[0] == 1 and left({"max_rollouts": 15 + each}, {}, first=True)[0] == 0
    assert left({"max_proposals": 4}, {"proposals": 3, "proposer_calls": 9}) == (1, "--max-proposals 4")
    assert left({"max_cost": 1.0}, {"proposer_usd": 0.5})[0] > 1 << 20                      # nothing else costs money
    assert left({"max_cost": 1.0}, {"proposer_usd": 1.0})[0] == 0
    n, why = left({"max_cost": 1.0}, {"proposer_usd": 0.1, "proposer_unpriced": 2})
    assert n == 0 and "2 sessions did not say what they cost" in why
    paid = {"max_cost": 2.0, "engine": "server", "model_price": "10,20"}        # evaluation: $0.70, so $0.007 a rollout
    after = 0.007 * 8 * 10                              # the evaluation that follows
    assert left(paid, {})[0] == int((1.3 - after) / (0.007 * each))
    assert left(paid, {}, first=True)[0] == int((1.3 - after - 0.007 * 16) / (0.007 * each))
    dear = {"rollouts": 10, "prompt_tok": 14_000}       # candidates that take twice as much
    assert left(paid, dear)[0] == int((1.3 - 0.14 - 2 * after) / (0.014 * each))
    assert left(paid | {"max_cost": 1.0}, {"prompt_tok": 30_000})[0] == 0
    budget = Budget(settings(**paid), ledger(), 16, 10)
    assert budget.usd_left(2) == pytest.approx(1.3 - after - 2 * 0.007 * each)
    assert Budget(settings(), ledger(), 16, 10).usd_left(2) is None and Budget(settings(), ledger(), 16, 10).proposals_left is None


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
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 8), "--accept", "confirm")
    log = (folder / "log.txt").read_text()
    assert log.index("the harness search takes about") < log.index("test mean@")
    spent = summary["ledger"]
    assert summary["rollouts"]["harness"] <= N_TASKS * 8 and spent["harness"]["proposer_unpriced"] == 0


def test_money_ends_a_search(tmp_path, monkeypatch):
    """Each session costs 60 cents, so a dollar is enough for two; a third is not held."""
    known = proposers.propose_by_rules

    def paid(request):
        request.bill.proposer_usd = 0.6
        assert request.usd_left > 0
        return known(request)

    monkeypatch.setattr(proposers, "propose_by_rules", paid)
    folder, summary = run(tmp_path, "--rollouts", str(N_TASKS * 30), "--candidates", "2", "--max-cost", "1")
    assert summary["ledger"]["harness"]["proposer_usd"] == pytest.approx(1.2) and summary["stopped_by"] == "--max-cost 1"
    assert summary["usd"] == {"known": pytest.approx(1.2), "proposer": pytest.approx(1.2), "model": 0, "unpriced_sessions": 0}


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
    run(tmp_path, "--rollouts", str(N_TASKS * 9), "--max-proposals", "1")
    code, output = call("math", *SMALL, "--method", "harness", "--iterations", "3", "--rollouts", str(N_TASKS * 9),
                        "--max-proposals", "2", "--out", tmp_path, "--name", "run")
    assert code == 0 and "this run is complete" in output


def by_agent(out, script, *flags):
    (out / "agent").mkdir(exist_ok=True)
    (out / "agent" / "agent.sh").write_text(script)
    return call("math", *SMALL, "--method", "harness", "--rollouts", str(N_TASKS * 4), "--iterations", "2", "--proposer", "cmd",
                "--proposer-cmd", f"sh '{out}/agent/agent.sh'", "--out", out / "runs", "--name", "run", *flags)


@pytest.mark.slow
def test_what_failing_sessions_cost_is_charged_once(tmp_path):
    """Two sessions that give nothing stop the run; the same command holds two more: four are in the ledger, not six."""
    nothing = "echo '{\"usd\": 0.6, \"prompt_tok\": 10, \"completion_tok\": 1}'; echo I give up >&2; exit 1"
    for n in (2, 4):
        code, output = by_agent(tmp_path, nothing, "--max-proposer-failures", "2")
        assert code == 1 and "left no candidate 2 times in a row" in output and "I give up" in output
        spent = json.loads((tmp_path / "runs/run/state.json").read_text())["ledger"]["harness"]
        assert spent["proposer_calls"] == spent["proposals"] == n and spent["proposer_usd"] == pytest.approx(0.6 * n)
    works = "for slot in $WHALE_SLOTS; do (cat archive/*/h0/harness.py; echo \"N = '$slot'\") > $slot.py; done"
    code, output = by_agent(tmp_path, works, "--max-proposer-failures", "2")
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert code == 0 and summary["complete"] and summary["usd"]["known"] == pytest.approx(2.4)
    assert summary["usd"]["unpriced_sessions"] == 1 and "unknown cost of 1 sessions of the proposer" in output
    assert summary["ledger"]["harness"]["proposer_calls"] == 5


@pytest.mark.parametrize("flags, n_sessions", [(["--max-cost", "1"], 2), (["--max-proposals", "3", "--candidates", "2"], 3)])
def test_a_cap_inside_an_iteration_ends_the_phase_well(tmp_path, flags, n_sessions):
    """Sessions that give nothing count; when a cap allows no more of them, what is there is accepted and measured."""
    nothing = "echo '{\"usd\": 0.6, \"prompt_tok\": 10, \"completion_tok\": 1}'"
    code, output = by_agent(tmp_path, nothing, "--max-proposer-failures", "9", *flags)
    assert code == 0, output
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["complete"] and summary["stopped_by"].startswith(flags[0])
    assert summary["ledger"]["harness"]["proposer_calls"] == n_sessions and summary["accepted"][0]["name"] == "h0"


def test_a_session_of_unknown_cost_is_the_last_under_a_cap_on_money(tmp_path):
    code, output = by_agent(tmp_path, "true", "--max-proposer-failures", "9", "--max-cost", "5")
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert code == 0 and summary["usd"]["unpriced_sessions"] == 1 and "did not say what they cost" in summary["stopped_by"]


@pytest.mark.slow
def test_a_cap_on_the_search_ends_no_training(tmp_path):
    code, output = call("math", *SMALL, "--cycles", "2", "--max-proposals", "1", "--out", tmp_path, "--name", "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    one = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert code == 0 and summary["stopped_by"] == "--max-proposals 1" and summary["cycles"] == 1
    assert summary["weight_steps"] == 4 and summary["rollouts"]["weight"] == 4 * one["prompt_batch"] * one["group_size"]
    assert "--finish harness" not in output
