"""What the methods differ in, what a run spends and measures: FST's rule, the ledger, evaluation, selection, tracking."""

import ast
import json
import sys
import types
from pathlib import Path

import pytest

import proposers
from config import CHOICES, ROOT
from envs import ENVS
from gates import N_TWINS
from lint import beyond_prompts
from candidates import Candidate
from mechanisms import mechanisms_of, render
from small import SMALL, call, rows
from tasks import Row, ToolUse
from whale import Run

H0 = (ROOT / "harnesses/h0_math.py").read_text()
CHESS = (ROOT / "harnesses/h0_chess.py").read_text()


def run(out: Path, *flags, domain: str = "math") -> Path:
    code, output = call(domain, *SMALL, *flags, "--out", out, "--name", "run")
    assert code == 0, output
    return out / "run"


# ---- FST: prompts only ----------------------------------------------------------------------------------------------

ALLOWED = {
    "the same": H0,
    "another system prompt": H0.replace('SYSTEM_PROMPT = ""', 'SYSTEM_PROMPT = "Use the tool."'),
    "another user prompt, of several strings": H0.replace('"{question}\\n', '("Please: {question}"\n    " now\\n').replace('}}."', '}}.")'),
    "comments, layout, docstring": '"""Mine."""\n# a comment\n' + H0.split('"""', 2)[2].replace("\n\n\ndef", "\n\n\n\n# more\ndef"),
    "prompts in another place": H0.replace('SYSTEM_PROMPT = ""\n', "").replace("MAX_CALLS = 2", 'MAX_CALLS = 2\nSYSTEM_PROMPT = "a"'),
}
REFUSED = {
    "another constant": (H0.replace("MAX_CALLS = 2", "MAX_CALLS = 3"), "from line 7 on"),
    "a constant hidden in a prompt": (H0.replace('SYSTEM_PROMPT = ""', 'SYSTEM_PROMPT = f"{(MAX_CALLS := 9)}"'), "plain string"),
    "a computed prompt": (H0.replace('SYSTEM_PROMPT = ""', 'SYSTEM_PROMPT = "a" + "b"'), "plain string"),
    "two names at once": (H0.replace('SYSTEM_PROMPT = ""', 'SYSTEM_PROMPT = MORE = ""'), "from line"),
    "a prompt set again": (H0.replace("def run", 'SYSTEM_PROMPT += "x"\n\n\ndef run'), "from line"),
    "a prompt set in run": (H0.replace("    messages = chat", '    global SYSTEM_PROMPT\n    SYSTEM_PROMPT = "x"\n    messages = chat'), "from line"),
    "another line in run": (H0.replace("        messages.append(reply.message)\n", "        messages.append(reply.message)\n        messages = list(messages)\n"),
                            "from line"),
    "less of it": (H0.replace("        for call in reply.tool_calls:\n", "        for call in reply.tool_calls[:1]:\n"), "from line"),
    "something after it": (H0 + "\nMORE = 1\n", "from line"),
    "another import": (H0.replace("from harness_api", "import re\nfrom harness_api"), "from line"),
    "an annotated prompt": (H0.replace('SYSTEM_PROMPT = ""', 'SYSTEM_PROMPT: str = ""\nSYSTEM_PROMPT = ""'), "from line"),
    "no harness": ("x = (", "does not parse"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_fst_allows(name):
    ast.parse(ALLOWED[name])
    assert ALLOWED[name] != H0 or name == "the same"
    assert beyond_prompts(ALLOWED[name], H0) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_fst_refuses(name):
    source, words = REFUSED[name]
    assert source != H0 and words in beyond_prompts(source, H0)


@pytest.mark.parametrize("domain", ENVS)
def test_mechanisms_of_prompts_keep_the_rule(domain):
    """Each alone and all together, in each domain; and those that change more are found out."""
    h0 = ENVS[domain].h0.read_text()
    prompts = mechanisms_of(domain, prompts_only=True)
    assert len(prompts) >= 2 and not any(m.n_extra_calls for m in prompts)
    names = [m.name for m in prompts]
    for has in [[name] for name in names] + [names]:
        source = render(domain, proposers.add_mechanisms(frozenset(), has, {m.name: m for m in prompts}), "")
        assert beyond_prompts(source, h0) == "" and source != render(domain, frozenset(), "")
    for mechanism in mechanisms_of(domain):
        if not mechanism.prompt:
            assert beyond_prompts(render(domain, frozenset([mechanism.name]), ""), h0)


@pytest.mark.slow
def test_a_run_of_fst_changes_prompts_only(tmp_path):
    folder = run(tmp_path, "--method", "fst", "--iterations", "3")
    sources = {path: path.read_text() for path in folder.glob("harness/cycle_01/h*/harness.py")}
    assert len(sources) > 3 and all(beyond_prompts(source, H0) == "" for source in sources.values())
    assert len(set(sources.values())) == len(sources)
    assert "may differ from h0 in the text of SYSTEM_PROMPT and USER_PROMPT" in " ".join(
        (folder / "harness/cycle_01/task.md").read_text().split())


def test_a_proposer_that_breaks_the_rule_is_refused_with_the_reason(tmp_path, monkeypatch):
    """Its candidates cost no rollout; where it reads the archive, it finds why."""
    def propose(request):
        assert request.prompts_only
        good, bad = ALLOWED["another system prompt"], REFUSED["another constant"][0]
        return [Candidate("", "h0", "keeps the rule", (), good, 0), Candidate("", "h0", "breaks the rule", (), bad, 0)]

    monkeypatch.setattr(proposers, "propose_by_rules", propose)
    folder = run(tmp_path, "--method", "fst")
    history = [json.loads(line) for line in (folder / "harness/cycle_01/history.jsonl").read_text().splitlines()]
    assert [row["refused"] for row in history[:2]] == ["", ""]
    assert history[2]["refused"].startswith("prompts only (FST): from line 7 on it differs from h0")
    assert (folder / "harness/cycle_01/h2/refused.json").exists()
    assert json.loads((folder / "summary.json").read_text())["rollouts"]["harness"] == 2 * 24


# ---- one archive for harness phases in a row ------------------------------------------------------------------------


@pytest.mark.slow
def test_harness_only_is_one_search(tmp_path):
    """Its phases go on with one archive: the first incumbent is scored once, no program is tried twice."""
    folder = run(tmp_path, "--method", "harness", "--rollouts", str(24 * 7), "--iterations", "2")
    assert [path.name for path in folder.glob("harness/*")] == ["cycle_01"]
    history = [json.loads(line) for line in (folder / "harness/cycle_01/history.jsonl").read_text().splitlines()]
    assert [row["name"] for row in history] == [f"h{i}" for i in range(len(history))]
    assert sum(not row["refused"] for row in history) == 7
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rollouts"]["harness"] == 24 * 7 and summary["cycles"] == 2
    scores = [row["mean"] for row in history if not row["refused"]]
    best = [row["best_score"] for row in rows(folder) if row["kind"] == "iteration"]
    assert best == sorted(best) and best[-1] == max(scores) and len(best) == summary["harness_iterations"]
    assert [row["iteration"] for row in rows(folder) if row["kind"] == "iteration"] == [1, 2, 3]


def test_the_last_step_is_cut_to_the_budget(tmp_path):
    folder = run(tmp_path, "--method", "weight", "--rollouts", "200")
    assert json.loads((folder / "summary.json").read_text())["rollouts"]["weight"] == 200
    assert json.loads((folder / "state.json").read_text())["n_drawn"] == 25


@pytest.mark.parametrize("finish, n_searches", [("budget", 0), pytest.param("harness", 1, marks=pytest.mark.slow)])
def test_a_budget_that_ends_after_weights(tmp_path, finish, n_searches):
    """Said in the log; --finish harness adds the phase, whole, beyond the budget."""
    folder = run(tmp_path, "--method", "whale", "--rollouts", "260", "--finish", finish)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rollouts"]["weight"] == 256 and len(summary["accepted"]) == n_searches
    assert ("--finish harness adds that phase" in (folder / "log.txt").read_text()) == (finish == "budget")
    assert summary["rollouts"]["harness"] == n_searches * 4 * 24


@pytest.mark.parametrize("method, moment", [
    ("weight", "finish_weight_step"), pytest.param("harness", "finish_iteration", marks=pytest.mark.slow),
    pytest.param("whale", "finish_iteration", marks=pytest.mark.slow)])
def test_a_run_stopped_after_its_last_step_still_ends_well(tmp_path, monkeypatch, method, moment):
    """The budget is spent, but the phase is not over: what was found is adopted and measured, as without the stop."""
    flags = ["--method", method, "--rollouts", {"harness": "120", "weight": "256", "whale": "352"}[method]]
    whole = run(tmp_path / "a", *flags)
    last = max(row["training_rollouts"] for row in rows(whole) if row["kind"] in ("iteration", "weight_step"))
    finish = getattr(Run, moment)

    def stop(self, *args):
        finish(self, *args)
        if self.dir.training_rollouts() == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(Run, moment, stop)
        assert call("math", *SMALL, *flags, "--out", tmp_path / "b", "--name", "run")[0] == 130
    again = run(tmp_path / "b", *flags)
    assert rows(again) == rows(whole) and (again / "final_harness.py").read_text() == (whole / "final_harness.py").read_text()


def test_a_proposer_with_nothing_more_to_try_ends_a_search(tmp_path, monkeypatch):
    """Not the budget: without this, harness-only would go on for ever, as what is not scored costs nothing."""
    def propose(request):
        new = len(request.history) == 1
        return [Candidate("", "h0", "x", (), ALLOWED["another system prompt"], 0)] * new

    monkeypatch.setattr(proposers, "propose_by_rules", propose)
    folder = run(tmp_path, "--method", "harness", "--rollouts", "480")
    log = (folder / "log.txt").read_text()
    assert "nothing more to try" in log and "432 of 480 training rollouts are left" in log
    assert [row["kind"] for row in rows(folder)].count("ledger") == 2


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_the_ledger_is_what_the_files_hold(tmp_path):
    """Each entry counted again, from traces where they are kept."""
    folder = run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    ledger = summary["ledger"]
    assert set(ledger) == {"setup", "weight", "harness", "gates", "eval"}
    assert ledger["weight"]["rollouts"] == 2 * 16 * 8 and ledger["eval"]["rollouts"] == 3 * 24
    traces = [json.loads(line) for path in folder.glob("harness/cycle_01/*/traces.jsonl") for line in path.read_text().splitlines()]
    assert ledger["harness"]["rollouts"] == len(traces)
    assert ledger["harness"]["model_calls"] == sum(trace["n_calls"] for trace in traces)
    assert ledger["harness"]["completion_tok"] == sum(trace["n_tok"] for trace in traces)
    assert ledger["harness"]["tool_calls"] == sum(e["request"]["type"] == "python" for trace in traces for e in trace["events"])
    assert ledger["harness"]["proposer_calls"] == 1 and ledger["harness"]["proposer_usd"] == 0
    graded = [json.loads(line) for path in folder.glob("eval/*.jsonl") for line in path.read_text().splitlines()]
    assert ledger["eval"]["completion_tok"] == sum(trace["n_tok"] for trace in graded)
    n_scored = len(list(folder.glob("harness/cycle_01/*/score.json")))
    assert 2 * (n_scored - 1) < ledger["gates"]["rollouts"] <= 2 * N_TWINS * (n_scored - 1) and ledger["gates"]["completion_tok"] > 0
    for amounts in ledger.values():
        assert amounts["prompt_tok"] > amounts["completion_tok"] or not amounts["rollouts"]
    last = [row for row in rows(folder) if row["kind"] == "ledger"][-1]
    for kind, amounts in ledger.items():
        for what, amount in amounts.items():
            if what != "seconds":
                assert last.get(f"{kind}_{what}", 0) == amount, (kind, what)
    assert all(row["training_rollouts"] <= ledger["weight"]["rollouts"] + ledger["harness"]["rollouts"] for row in rows(folder))


def test_a_proposers_bill_is_kept_and_not_paid_twice(tmp_path, monkeypatch):
    """Money and calls reach the ledger; a resumed run takes them from the archive and asks nobody."""
    def propose(request):
        request.bill.proposer_usd += 0.25
        request.bill.proposer_calls = 7
        return [Candidate("", "h0", "x", (), ALLOWED["another system prompt"], 0)]

    monkeypatch.setattr(proposers, "propose_by_rules", propose)
    finish = Run.finish_iteration
    with monkeypatch.context() as stopped:
        stopped.setattr(Run, "finish_iteration", lambda self, phase, outcomes, search: finish(self, phase, outcomes, search)
                        if search.n_iterations == 1 else (_ for _ in ()).throw(KeyboardInterrupt))
        assert call("math", *SMALL, "--out", tmp_path, "--name", "run")[0] == 130
    assert json.loads((tmp_path / "run/state.json").read_text())["ledger"]["harness"].get("proposer_usd", 0) == 0
    monkeypatch.setattr(proposers, "propose_by_rules", None)
    folder = run(tmp_path)
    spent = json.loads((folder / "summary.json").read_text())["ledger"]["harness"]
    assert spent["proposer_usd"] == 0.25 and spent["proposer_calls"] == 7
    state = json.loads((folder / "state.json").read_text())
    assert state["ledger"]["harness"]["proposer_usd"] == 0.25
    assert json.loads((folder / "harness/cycle_01/iteration_02.json").read_text())["bill"] == {
        "proposals": 1, "proposer_calls": 7, "proposer_tok": 0, "proposer_usd": 0.25, "proposer_unpriced": 0}


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_within_a_weight_phase(tmp_path):
    folder = run(tmp_path, "--method", "weight", "--rollouts", "512", "--epochs", "0.1", "--eval-epochs", "0.025")
    labels = [row["label"] for row in rows(folder) if row["kind"] == "eval"]
    assert labels == ["base", "cycle 1, weight step 1", "cycle 1, weight step 2", "cycle 1, weight step 3", "cycle 1, after the weight phase"]
    evals = json.loads((folder / "state.json").read_text())["evals"]
    assert [row["training_rollouts"] for row in evals] == [0, 128, 256, 384, 512]


def test_selection_by_the_harness_split(tmp_path):
    """The best evaluation is then the one with the best score on D_harness, whatever the test split says."""
    folder = run(tmp_path, "--select", "harness-set", "--method", "weight", "--rollouts", "256", "--epochs", "0.025")
    evals = json.loads((folder / "state.json").read_text())["evals"]
    summary = json.loads((folder / "summary.json").read_text())
    assert len(evals) == 3 and all(0 <= row["select_mean"] <= 1 for row in evals)
    best = max(evals, key=lambda row: row["select_mean"])
    assert summary["best_mean8"]["mean"] == pytest.approx(best["mean"], abs=1e-6) and summary["select"] == "harness-set"
    assert summary["rollouts"]["eval"] == 3 * (24 + 24)
    assert "chosen on D_harness" in (folder / "report.html").read_text()


def test_the_best_can_be_another_one(tmp_path):
    """Selection by D_harness and by the test split disagree where their scores do."""
    from rundir import RunDir

    point = {"ci95": [0, 1], "weight_step": 0, "training_rollouts": 0}
    run_dir = RunDir(tmp_path / "r", {})
    run_dir.state.evals = [{**point, "label": "a", "mean": 0.9, "select_mean": 0.1}, {**point, "label": "b", "mean": 0.2, "select_mean": 0.3}]
    assert run_dir.best_eval()["label"] == "b"
    for row in run_dir.state.evals:
        del row["select_mean"]
    assert run_dir.best_eval()["label"] == "a"


@pytest.mark.parametrize("domain, rate", [("search", "retrieval_hit_frac"), ("chess", "legal_move_frac")])
def test_diagnostics_of_a_domain_counted_again(domain, rate, tmp_path):
    """From the traces of the evaluation, by another way of counting."""
    data = ROOT / "embedded" / domain
    code, output = call(domain, "--method", "harness", "--rollouts", "32", "--iterations", "2", "--train", f"{data}/train.jsonl[:64]",
                        "--harness-set", f"{data}/harness.jsonl[:16]", "--test", f"{data}/test.jsonl[:32]", "--epochs", "1", "--n-eval", "1",
                        "--out", tmp_path, "--name", "run")
    assert code == 0, output
    row = next(row for row in rows(tmp_path / "run") if row["kind"] == "eval")
    traces = [json.loads(line) for line in sorted((tmp_path / "run/eval").iterdir())[0].read_text().splitlines()]
    tasks = {task.id: task for task in ENVS[domain]().load(data / "test.jsonl")}
    hits = total = 0
    for trace in traces:
        outputs = [(e["request"], e["result"]) for e in trace["events"] if e["request"]["type"] != "generate"]
        if domain == "search":
            total += 1
            hits += any(answer.casefold() in result["output"].casefold() for answer in tasks[trace["task_id"]].answers for _, result in outputs)
        else:
            total += len(outputs)
            hits += sum("legal" in result["output"] and "not legal" not in result["output"] or "is right" in result["output"]
                        for _, result in outputs)
    assert 0 < hits < total and row[rate] == pytest.approx(hits / total)
    assert row["answered_frac"] <= 1 and row["tok_a_rollout"] == sum(trace["n_tok"] for trace in traces) / len(traces)


# ---- live tracking --------------------------------------------------------------------------------------------------


class FakeTracker(types.ModuleType):
    """wandb, trackio or tensorboard, as far as they are used."""

    def __init__(self):
        super().__init__("fake")
        self.sent, self.closed, self.settings = [], 0, None

    def init(self, project, name, config, resume, id=None, dir=None):
        self.settings = config
        return self

    def define_metric(self, name, step_metric):
        assert step_metric == "training_rollouts"

    def log(self, numbers):
        self.sent += [(key, value, numbers["training_rollouts"]) for key, value in numbers.items()]

    def finish(self):
        self.closed += 1

    def SummaryWriter(self, folder):
        return self

    def add_scalar(self, key, value, step):
        self.sent.append((key, value, step))

    def flush(self):
        pass

    close = finish


@pytest.mark.parametrize("name, module", [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_tracker_gets_what_metrics_jsonl_has(tmp_path, monkeypatch, name, module):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, module, fake)
    folder = run(tmp_path, "--method", "weight", "--rollouts", "128", "--track", name)
    reward = next(row for row in rows(folder) if row["kind"] == "weight_step")["reward"]
    assert ("weight_step/reward", reward, 128) in fake.sent and fake.closed == 1
    assert {key for key, _, _ in fake.sent} >= {"eval/mean", "eval/tok_a_rollout", "ledger/weight_rollouts"}
    assert all(isinstance(value, int | float) for _, value, _ in fake.sent)


def test_a_tracker_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, output = call("math", *SMALL, "--track", "wandb", "--out", tmp_path, "--name", "run")
    assert code == 1 and "pip install wandb" in output and "Traceback" not in output
    monkeypatch.setattr("whale.Run._load_parts", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert call("math", *SMALL, "--out", tmp_path, "--name", "run")[0] == 130, "the directory is still good without it"
    assert "wandb" in CHOICES["track"]


# ---- what cannot be asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--select", "train"], ["--finish", "x"], ["--track", "mlflow"], ["--eval-epochs", "-1"], ["--rollouts", "-1"],
                                   ["--max-iterations", "2", "--min-iterations", "3"], ["--stagewise-phases", "-1"],
                                   ["--eval-epochs", "0.0001"], ["--patience-epochs", "0.0001", "--method", "adaptive"], ["--rollouts", "4"],
                                   ["--rollouts", "40", "--method", "harness"], ["--finish", "harness", "--method", "weight"],
                                   ["--harness", str(ROOT / "harnesses/fewshot_math.py"), "--method", "fst"]])
def test_bad_flags(flags, tmp_path):
    code, output = call("math", *SMALL, *flags, "--out", tmp_path)
    assert code == 2 and flags[0] in output and "Traceback" not in output and not list(tmp_path.iterdir())




def test_what_a_killed_process_left_is_cleared_and_no_more(tmp_path):
    """Half-written files go; a half-written checkpoint is a folder, and its trainer sees to that."""
    from rundir import RunDir, write_atomically

    folder = tmp_path / "run"
    for name in ("harness/cycle_01/h1/score.json.77.tmp", "state.json.12.tmp", "weights/step_000003.tmp/model.safetensors", "notes.tmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("half")
    write_atomically(folder / "harness/cycle_01/h1/score.json", "whole")
    RunDir(folder, {}).close()
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {name for name in left if "tmp" in name} == {"weights/step_000003.tmp/model.safetensors", "notes.tmp"}
    assert (folder / "harness/cycle_01/h1/score.json").read_text() == "whole"


def test_without_git_a_run_names_its_version(monkeypatch):
    import config

    commit = config.code_version()
    monkeypatch.setenv("PATH", "/nowhere")
    assert config.code_version() == config.VERSION != commit


@pytest.mark.parametrize("answer, documents, hit", [
    ("1", [("Foo", "bar")], 0), ("no", [], 0), ("Bar", [("Foo", "a bar b")], 1), ("Foo", [("Foo", "x")], 1), ("barn", [("Foo", "a bar b")], 0)])
def test_a_retrieval_hit_is_in_a_passage(answer, documents, hit, monkeypatch):
    """Not in the numbers of the list, nor in the words that say that nothing was found."""
    env = ENVS["search"]()
    env.found[3, "q"] = [types.SimpleNamespace(title=title, text=text) for title, text in documents]
    monkeypatch.setattr("envs.cut_text", lambda text, n, tokenizer: text)
    use = ToolUse([], {"type": "search", "query": "q", "topk": 3, "max_tokens": 50}, "", 1)
    result = env._show(use, None)
    task = env.read_case(Row("x", 1, {"id": "a", "reference": answer}))
    assert env.count(task, [{"request": use.request, "result": result}]) == {"retrieval_hit": (hit, 1)}
    verdict = env.verify(task, "<answer>something else</answer>", use.state)
    assert verdict.kind == ("" if hit else "not_retrieved")
