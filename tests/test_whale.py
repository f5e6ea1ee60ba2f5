"""The real program, run small as a user runs it: a whole run, kills, resumes, refusals, and the small commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import transformers_engine
from engine import EngineDied, untied_weights
from envs import MathEnv
from config import ROOT, Config, UsageError, check_disk, n_weights_of, plan_disk
from small import DATA, SMALL, call, call_json, edit, rows, start
from whale import Run, sample_tasks


@pytest.fixture
def whole(finished) -> Path:
    """An undisturbed run."""
    return finished


def test_a_run_leaves_what_the_design_says(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["complete"] and summary["weight_steps"] == 2 and summary["harness_iterations"] == 2
    assert summary["rollouts"]["weight"] == 2 * 16 * 8 and summary["rollouts"]["eval"] == 3 * 24
    n_scored = len(list(whole.glob("harness/cycle_01/*/score.json")))
    assert summary["rollouts"]["harness"] == 24 * n_scored and n_scored >= 2
    for key in ("domain", "method", "preset", "seed", "model", "base_mean8", "best_mean8", "final_mean8", "seconds", "cycles",
                "accepted", "final_harness", "sandbox", "version"):
        assert key in summary
    assert (whole / summary["final_harness"]).is_file()
    assert {path.name for path in whole.glob("weights/*")} == {"step_000000", "step_000001", "step_000002"}
    kinds = [row["kind"] for row in rows(whole)]
    assert kinds[0] == "eval" and kinds.count("weight_step") == 2 and kinds.count("iteration") == 2 and kinds.count("eval") == 3
    assert (whole / "harness/cycle_01/accepted.txt").read_text().strip() == summary["accepted"][0]["name"]
    versions = {json.loads(line)["version"] for line in (whole / "harness/cycle_01/h0/traces.jsonl").read_text().splitlines()}
    assert versions == {rows(whole)[2]["version"]}, "the search scores on the weights of the last weight step"


@pytest.mark.parametrize("domain", ["search", "chess"])
def test_the_other_domains_run_and_repeat(domain, tmp_path):
    """The same twice, bit for bit, though tools answer in threads of their own; the second has another hash seed, other
    workers, and is killed once."""
    data = ROOT / "embedded" / domain
    small = ["--cycles", "1", "--epochs", "0.25", "--train", f"{data}/train.jsonl[:128]",
             "--prompt-batch", "16", "--iterations", "2", "--n-eval", "1", "--harness-set", f"{data}/harness.jsonl[:16]",
             "--test", f"{data}/test.jsonl[:16]", "--out", tmp_path]
    code, output = call(domain, *small, "--name", "a")
    assert code == 0, output
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["complete"] and summary["domain"] == domain and summary["weight_steps"] == 2
    process = start(domain, *small, "--name", "b", "--n-workers", 2, env=os.environ | {"PYTHONHASHSEED": "1"})
    while not (tmp_path / "b/weights/step_000001").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert call(domain, *small, "--name", "b")[0] == 0
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    kinds = {json.loads(line)["failure"] for line in (tmp_path / "a/harness/cycle_01/h0/traces.jsonl").read_text().splitlines()}
    assert kinds & ({"wrong_move", "malformed_move", "illegal_move"} if domain == "chess" else {"call_limit", "no_answer",
                    "not_retrieved", "wrong_answer", "no_tool_wrong_answer", "malformed_call", "token_limit"})


def test_a_changed_corpus_is_refused(tmp_path):
    data = ROOT / "embedded" / "search"
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(data / "corpus.jsonl", corpus)
    flags = ["search", *SMALL, "--train", f"{data}/train.jsonl[:64]", "--harness-set", f"{data}/harness.jsonl[:16]", "--test",
             f"{data}/test.jsonl[:16]", "--epochs", "0.5", "--out", tmp_path, "--name", "a", "--retriever", corpus]
    assert call(*flags, "--method", "weight", "--rollouts", "128")[0] == 0
    with open(corpus, "a") as file:
        file.write('{"id": "new", "contents": "\\"New\\"\\nA new passage."}\n')
    code, output = call(*flags, "--method", "weight", "--rollouts", "128")
    assert code == 2 and "corpus.jsonl" in output and "Traceback" not in output


@pytest.mark.parametrize("flags, words", [
    (["math", "--retriever", "x"], "--retriever are for search"), (["search", "--judge-url", "http://x"], "go together"),
    (["search", "--retriever", "nowhere.jsonl"], "nowhere.jsonl"), (["chess", "--judge-url", "http://u", "--judge-model", "m"], "for search"),
    (["search", "--retriever", "http://"], "http"), (["search", "--judge-url", "ftp://x", "--judge-model", "m"], "--judge-url must be like http://"),
])
def test_flags_of_search_are_checked_before_a_model_is_loaded(flags, words, tmp_path, monkeypatch):
    monkeypatch.setattr("team.TransformersEngine", None)
    code, output = call(*flags, "--out", tmp_path)
    assert code in (1, 2) and words in output and "Traceback" not in output and not list(tmp_path.iterdir())


@pytest.fixture
def retriever() -> str:
    """The address of a real server over the embedded corpus, started as a user starts it."""
    process = start("retriever", "--corpus", ROOT / "embedded/search/corpus.jsonl", "--port", 0)
    line = process.stdout.readline()
    yield re.search(r"http://[\d.:]+", line)[0]
    process.terminate()
    assert process.wait(20) == 143


def test_a_server_finds_what_the_corpus_does(retriever, tmp_path):
    flags = ["eval", "search", "--test", f"{ROOT}/embedded/search/test.jsonl[:24]", "--n", 1, "--out", tmp_path]
    direct, served = call_json(*flags), call_json(*flags, "--retriever", retriever)
    assert Path(direct["traces"]).read_text() == Path(served["traces"]).read_text() and "[1] " in Path(direct["traces"]).read_text()
    dead = "http://127.0.0.1:9"
    assert call_json(*flags, "--retriever", f"{dead},{retriever}")["mean"] == direct["mean"]
    code, output = call(*flags, "--retriever", dead)
    assert code == 1 and dead in output and "Traceback" not in output


def test_a_judge_is_asked_and_counted(tmp_path, monkeypatch):
    """A server that calls every answer right: whoever answers at all is rewarded; its key is in no file."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": "VERDICT: CORRECT"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    monkeypatch.setenv("WHALE_JUDGE_KEY", "planted-key")
    data = ROOT / "embedded" / "search"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = ["--judge-url", f"http://127.0.0.1:{server.server_port}", "--judge-model", "m", "--test", f"{data}/test.jsonl[:24]"]
        result = call_json("eval", "search", *judge, "--n", 1, "--out", tmp_path)
        kinds = [json.loads(line) for line in Path(result["traces"]).read_text().splitlines()]
        assert result["mean"] == sum(trace["answered"] for trace in kinds) / 24 > 0 and result["judge"]["failed"] == 0
        code, output = call("search", *judge, "--method", "weight", "--rollouts", 128, "--prompt-batch", 16, "--epochs", 0.01, "--n-eval",
                            1, "--harness-set", f"{data}/harness.jsonl[:16]", "--out", tmp_path, "--name", "judged")
        server.shutdown()
    assert code == 0 and "judge: asked" in output and set(asked) == {"Bearer planted-key"}
    summary = json.loads((tmp_path / "judged/summary.json").read_text())
    assert summary["verifier"] == "judge m" and (tmp_path / "judged/judge.jsonl").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"planted-key" in path.read_bytes()]


def test_verify_explains_each_domain(tmp_path):
    (tmp_path / "r").write_text("<answer>the  Paris.</answer> <move>O-O</move>")
    assert call_json("verify", "search", "--reply-file", tmp_path / "r", "--reference", '["Rome", "Paris"]')["reward"] == 1
    castle = "r3k2r/pppq1ppp/2npbn2/4p3/2B1P3/2NP1N2/PPP2PPP/R1BQK2R w KQkq - 0 8"
    verdict = call_json("verify", "chess", "--reply-file", tmp_path / "r", "--reference", "e1g1", "--fen", castle)
    assert verdict["reward"] == 1 and verdict["exit"] == 0
    code, output = call("verify", "chess", "--reply-file", tmp_path / "r", "--reference", "e1g1")
    assert code == 2 and "--fen" in output
    code, output = call("verify", "chess", "--reply-file", tmp_path / "r", "--reference", "e1g1", "--fen", "nonsense")
    assert code == 1 and "FEN" in output


def test_a_complete_run_does_nothing(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file() and path.name != ".lock"}
    code, output = call("math", *SMALL, "--out", whole.parent, "--name", whole.name)
    assert code == 0 and "complete" in output
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_killed_run_goes_on_as_if_nothing_had_been(whole, tmp_path):
    """SIGKILL, the same command again, four times in one run: metrics equal line by line but for times, harness and
    weights equal."""
    folder, moments = tmp_path / "killed", {"base evaluation": 0, "weight phase": 2, "harness phase": 3, "last evaluation": 9}
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 600
    for moment, n_rows in moments.items():
        process = start("math", *SMALL, "--out", tmp_path, "--name", "killed")
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= n_rows) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if moment == "harness phase":                                # in the middle of an iteration
            while not (folder / "harness/cycle_01/h1/proposal.json").exists() and process.poll() is None:
                time.sleep(0.01)
        assert process.poll() is None, moment
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    code, output = call("math", *SMALL, "--out", tmp_path, "--name", "killed")
    assert code == 0, output
    assert rows(folder) == rows(whole)
    assert (folder / "final_harness.py").read_text() == (whole / "final_harness.py").read_text()
    weights = "weights/step_000002/model.safetensors"
    assert (folder / weights).read_bytes() == (whole / weights).read_bytes()


def test_a_directory_of_another_configuration_is_refused(whole):
    code, output = call("math", *SMALL, "--out", whole.parent, "--name", whole.name, "--lr", "0.5")
    assert code == 2 and "lr" in output and "0.5" in output and "--name" in output and "Traceback" not in output


def test_two_runs_in_one_directory(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    import fcntl
    with open(tmp_path / "whole" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = call("math", *SMALL, "--out", tmp_path, "--name", "whole")
    assert code == 2 and "in use" in output


@pytest.mark.parametrize("method", ["weight", "harness", "adaptive", "fst", "stagewise"])
def test_every_method_runs_to_its_budget(tmp_path, method):
    """One phase switched off, or both in another order: the same loop, stopped at the same number of rollouts."""
    flags = ["--method", method, "--rollouts", "200", "--stagewise-phases", "1", "--min-iterations", "1",
             "--patience-iterations", "1"]
    code, output = call("math", *SMALL, *flags, "--out", tmp_path, "--name", method)
    assert code == 0, output
    summary = json.loads((tmp_path / method / "summary.json").read_text())
    spent = summary["rollouts"]["weight"] + summary["rollouts"]["harness"]
    unit = 24 if method in ("harness", "stagewise") else 8             # a candidate, or the samples of a prompt
    assert 200 - unit < spent <= 200
    assert bool(summary["rollouts"]["weight"]) == (method != "harness")
    assert bool(summary["accepted"]) == (method == "harness") or method in ("adaptive", "fst", "stagewise")


def test_nothing_to_learn_from_stops_with_a_reason(tmp_path):
    """A verifier that accepts nothing: bit-equal weights, then a clear stop, never a silent run to the end."""
    never = tmp_path / "train.jsonl"
    never.write_text("".join(json.dumps({"id": f"x{i}", "question": f"What is the number of {'a' * i}?", "answer": "123456789",
                                         "source": "test"}) + "\n" for i in range(32)))
    code, output = call("math", *SMALL, "--train", never, "--epochs", "3", "--max-empty-steps", "2", "--out", tmp_path,
                        "--name", "none")
    assert code == 2 and "no rollout was accepted in 2 weight steps" in output, output
    state = json.loads((tmp_path / "none" / "state.json").read_text())
    assert [row["version"] for row in rows(tmp_path / "none") if row["kind"] == "weight_step"] == [0, 0]
    assert state["weight_step"] == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, said", [
    (["math", "--no-such-flag", "1"], "--no-such-flag"),
    (["math", "--seed", "x"], "--seed"),
    (["math", "--method", "magic"], "whale"),
    (["math", "--cycles", "0"], "--cycles"),
    (["math", "--epochs", "0.001"], "--epochs"),
    (["maths"], "maths"),
    (["eval", "biology", "--harness", "x"], "biology"),
    (["math", "--model", "no/such/model/here"], "--model"),
    (["math", "--model", "./nowhere"], "./nowhere"),
    (["math", "--train", "/nowhere/train.jsonl"], "/nowhere/train.jsonl"),
    (["math", "--train", f"{DATA}/train.jsonl[9999:]"], "no such rows"),
    (["math", "--train", str(DATA / "test.jsonl")], "math-test-"),
    (["eval", "math", "--harness", "/nowhere.py"], "/nowhere.py"),
    (["sandbox", "/nowhere.py"], "/nowhere.py"),
    (["verify", "math"], "--cases"),
    (["eval", "math", "--n", "0"], "--n 0"),
    (["eval", "math", "--harness", str(ROOT / "CITATION.bib")], "does not parse"),
    (["math", "--harness", str(ROOT / "cli.py")], "SYSTEM_PROMPT must be set"),
    (["verify", "math", "--reply-file", str(ROOT / "README.md")], "--reference"),
    (["verify", "math", "--cases", "/nowhere.jsonl"], "/nowhere.jsonl"),
])
def test_a_bad_request_says_what_is_wrong(tmp_path, args, said):
    code, output = call(*args, *(["--out", tmp_path] if args[0] == "math" else []))
    assert code in (1, 2) and said in output and "Traceback" not in output


def test_help_says_what_a_knob_is_and_its_value_in_each_preset():
    code, output = call("math", "--help")
    text = " ".join(output.split())
    assert code == 0 and "paper: 1e-07; tiny: 0.001; tiny search: 0.0005; tiny chess: 0.0005" in text
    assert "harness iterations a cycle; the first scores the incoming harness; paper: 6; tiny: 3" in text
    assert "model calls a rollout, hard cap" in text and str(ROOT) not in text


@pytest.mark.parametrize("row, said", [
    ('{"id": "a", "question": "What?", "answer": ', "line 3"),
    ('{"id": "a", "question": "What?"}', "answer"),
    ('{"id": "a", "question": 7, "answer": "1"}', "question"),
])
def test_a_broken_row_is_named(tmp_path, row, said):
    good = (DATA / "train.jsonl").read_text().splitlines()
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join([*good[:2], row, *good[2:4]]) + "\n")
    code, output = call("math", "--train", path, "--out", tmp_path)
    assert code == 1 and "broken.jsonl" in output and "3" in output and said in output and "Traceback" not in output
    assert not list(tmp_path.glob("math-*")), "nothing is written before the data is checked"


def test_overlap_of_splits_beyond_case_and_space(tmp_path):
    task = json.loads((DATA / "test.jsonl").read_text().splitlines()[0])
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(task | {"id": "other", "question": task["question"].upper().replace(" ", "  ")}) + "\n")
    code, output = call("math", "--train", path, "--out", tmp_path)
    assert code == 1 and "other" in output and task["id"] in output


def test_a_corrupt_model_folder(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "embedded" / "model", folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200_000])
    code, output = call("math", "--model", folder, "--out", tmp_path)
    assert code == 1 and str(folder) in output and "Traceback" not in output


def test_no_disk_space(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50 << 20))
    cfg = Config("math", model=str(ROOT / "embedded" / "model"), out=str(tmp_path / "new" / "folder"))
    with pytest.raises(UsageError, match="50 MiB free.*--out"):
        check_disk(cfg, plan_disk(cfg, n_weights_of(cfg.model), 2048, 256, 60))


def test_a_cut_checkpoint_is_named(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    folder = tmp_path / "whole"
    edit(folder / "state.json", complete=False)
    shutil.rmtree(folder / "weights/step_000000")           # of the base model: the last that a run can go back to
    for weights in folder.glob("weights/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1000])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, output = call("math", *SMALL, "--out", tmp_path, "--name", "whole")
    assert code == 2 and output.count("model.safetensors") == 2 and "--name" in output and "Traceback" not in output
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_no_prompt_twice_before_all_once():
    """Through batches, phases and epochs; and the order drawn in one go equals the order drawn in pieces."""
    tasks = MathEnv().load(DATA / "train.jsonl")[:30]
    whole = sample_tasks(tasks, 5, 0, 90)
    pieces = [task for start, n in ((0, 7), (7, 7), (14, 50), (64, 26)) for task in sample_tasks(tasks, 5, start, n)]
    assert whole == pieces
    for epoch in range(3):
        assert len({task.id for task in whole[30 * epoch:30 * epoch + 30]}) == 30
    assert whole[:30] != whole[30:60] != sample_tasks(tasks, 6, 0, 30)


def test_the_engine_must_serve_the_trained_weights(tmp_path, monkeypatch):
    """A load that does nothing is caught before a rollout is sampled from stale weights: one that is not carried out by
    the version, one that does not reach the model by the checksum."""
    import torch

    cfg = Config("math", preset="tiny", model=str(ROOT / "embedded" / "model"), max_len=512, out=str(tmp_path), tool_s=2.0,
                 tool_mb=256, harness_s=2.0, harness_mb=256, autocast_bf16=False, engine="transformers", proposer="rules")
    run = Run(cfg)
    with run.sandbox, torch.no_grad():
        next(run.trainer.model.parameters()).add_(1.0)
        run.trainer.version += 1
        run.team.serve_weights()
        next(run.trainer.model.parameters()).add_(1.0)
        run.trainer.version += 1
        monkeypatch.setattr(run.engine, "load_weights", lambda named, version: None)
        with pytest.raises(RuntimeError, match="does not serve"):
            run.team.serve_weights()
        monkeypatch.undo()
        monkeypatch.setattr(transformers_engine, "untied_weights", lambda model: {
            name: tensor.clone() for name, tensor in untied_weights(model).items()})
        with pytest.raises(EngineDied, match="does not hold the weights"):
            run.engine.load_weights(run.trainer.weights(), run.trainer.version)


def test_eval_command(tmp_path):
    result = call_json("eval", "math", "--harness", ROOT / "harnesses/h0_math.py", "--model", ROOT / "embedded/model",
                       "--test", f"{DATA}/test.jsonl[:6]", "--n", "2", "--out", tmp_path)
    assert result["exit"] == 0 and result["n_tasks"] == 6 and result["n_ok"] == 12 and 0 <= result["mean"] <= 1
    assert len(Path(result["traces"]).read_text().splitlines()) == 12 and result["n_infra"] == 0


def test_check_harness_command(tmp_path):
    good = call_json("check-harness", "math", ROOT / "harnesses/h0_math.py")
    assert good["exit"] == 0 and good["passed"] and all(probe["passed"] for probe in good["probes"])
    bad = tmp_path / "bad.py"
    bad.write_text((ROOT / "harnesses/h0_math.py").read_text().replace("from harness_api", "import os\nfrom harness_api"))
    refused = call_json("check-harness", "math", bad)
    assert refused["exit"] == 1 and not refused["passed"] and any("os" in probe["why"] for probe in refused["probes"])


def test_sandbox_command(tmp_path):
    snippet = tmp_path / "snippet.py"
    snippet.write_text("print(6 * 7)")
    result = call_json("sandbox", snippet)
    assert result["status"] == "ok" and result["output"] == "42\n" and "seccomp" in result["layers"]["on"]
    snippet.write_text("while True: pass")
    assert call_json("sandbox", snippet, "--seconds", "0.5")["status"] == "killed"


def test_verify_command(tmp_path):
    reply = tmp_path / "reply.txt"
    reply.write_text("so it is \\boxed{042}")
    assert call_json("verify", "math", "--reply-file", reply, "--reference", "42")["reward"] == 1
    cases = tmp_path / "cases.jsonl"
    cases.write_text(json.dumps({"id": "a", "reply": "\\boxed{1}", "reference": "2", "expected": 1}) + "\n")
    result = call_json("verify", "math", "--cases", cases)
    assert result["n"] == 1 and result["as_expected"] == 0 and result["misses"][0]["id"] == "a" and result["exit"] == 1


@pytest.mark.parametrize("word", ["", "nonsense", "mathx"])
def test_run_sh_names_the_right_words(word):
    done = subprocess.run(["bash", str(ROOT / "run.sh"), *([word] if word else [])], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and {"math", "test", "test-slow"} <= set(done.stderr.split())


def test_another_checkouts_environment_is_not_wiped(tmp_path):
    """A .venv that is a link, made for other requirements."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "precious").touch()
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(tmp_path / "venv")
    done = subprocess.run(["bash", str(tmp_path / "run.sh"), "math"], capture_output=True, text=True)
    assert done.returncode == 1 and "remove the link" in done.stderr and (tmp_path / "venv" / "precious").exists()


def test_python_too_old(tmp_path):
    """A PATH whose only python is 3.9 is refused with the version wanted and the one found."""
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\n[ "$1" = "--version" ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    fake.chmod(0o755)
    for tool in ("bash", "dirname", "cmp"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = subprocess.run([str(tmp_path / "bash"), str(ROOT / "run.sh"), "math"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)})
    assert done.returncode == 1 and "3.11" in done.stderr and "3.9.2" in done.stderr
