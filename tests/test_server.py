"""Rollouts from servers. Against a small OpenAI-compatible server, and (bash run.sh test-vllm) against real vLLM servers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from safetensors.torch import load_file

import server_engine
from config import ROOT
from engine import EngineDied, ModelError, SamplingParams, load_model, untied_weights
from server_engine import ServerEngine, digests_of
from servers import MODEL, PlainServer, start_vllm_server, vllm_servers, wait_for
from small import SMALL, call, call_json, rows
from test_engines import drain, greedy, random_prompts


@pytest.fixture(scope="module")
def plain():
    server = PlainServer()
    yield server
    server.shutdown()


@pytest.fixture
def engine(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.05)
    plain.faults, plain.bodies = [], []
    engine = ServerEngine(MODEL, plain.url, tmp_path / "share", n_rows=4, max_len=512)
    yield engine
    engine.close()


def test_a_server_of_text(plain, engine):
    """Prompts go in as ids with every sampling parameter; the reply's ids are its text's, and its end is known."""
    assert not engine.takes_weights
    reference = load_model(MODEL)
    prompt = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 12 apples and buys 3 more. How many?"}], add_generation_prompt=True, return_dict=False)
    engine.submit(0, prompt, SamplingParams(max_tokens=60, seed=3, temperature=0))
    done = drain(engine)[0]
    expected = greedy(reference, prompt, 60, engine.stop_ids)
    decode = engine.tokenizer.decode
    assert decode(done.ids, skip_special_tokens=True) == decode(expected, skip_special_tokens=True)
    assert done.finish == ("stop" if expected[-1] in engine.stop_ids else "length")
    body = plain.bodies[-1]
    assert body["prompt"] == prompt and body["model"] == "nano"
    assert {"temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "stop_token_ids", "max_tokens"} <= body.keys()
    with pytest.raises(ModelError, match="--method harness"):
        engine.load_weights(untied_weights(reference).items(), 1)


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage"])
def test_a_failed_try_is_repeated(plain, engine, fault):
    plain.faults = [fault, fault, None]
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=5, seed=1))
    assert drain(engine)[0].ids and engine.n_retries == 2


def test_a_server_that_hangs(plain, engine, monkeypatch):
    monkeypatch.setattr(server_engine, "ANSWER_S", 0.5)
    monkeypatch.setattr(server_engine, "TOKEN_S", 0)
    plain.faults = ["hang", None]
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=5, seed=1))
    started = time.monotonic()
    assert drain(engine)[0].ids and time.monotonic() - started < 4.5


def test_in_the_end_it_is_an_error_and_never_an_answer(plain, engine):
    plain.faults = [500] * 6
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=5, seed=1))
    with pytest.raises(EngineDied, match="6 times.*500"):
        drain(engine)
    plain.faults = [400]                                    # what is refused is not asked again
    engine.reset()
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=5, seed=1))
    with pytest.raises(EngineDied, match="400"):
        drain(engine)
    assert engine.n_retries == 5


def test_the_least_loaded_server_is_asked(tmp_path, monkeypatch):
    """Two servers, one of them slow: both are used, and the fast one gets more; one that dies is done without."""
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.05)
    fast, slow = PlainServer(), PlainServer()
    answer = slow.complete
    slow.complete = lambda body: time.sleep(0.2) or answer(body)
    engine = ServerEngine(MODEL, f"{slow.url},{fast.url}", tmp_path, n_rows=4, max_len=512)
    for i in range(40):
        engine.submit(i, [5, 6, 7], SamplingParams(max_tokens=5, seed=i))
    assert len(drain(engine)) == 40
    assert len(slow.bodies) >= 2 and len(fast.bodies) > len(slow.bodies)
    fast.shutdown()
    fast.server_close()
    for i in range(8):
        engine.submit(i, [5, 6, 7], SamplingParams(max_tokens=5, seed=i))
    assert len(drain(engine)) == 8 and engine.n_retries >= 1
    engine.close()
    slow.shutdown()


def test_urls_that_are_no_servers(tmp_path, plain):
    with pytest.raises(ModelError, match="--urls: http://127.0.0.1:9"):
        ServerEngine(MODEL, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(ModelError, match="needs --urls"):
        ServerEngine(MODEL, " , ", tmp_path)
    assert call("math", *SMALL, "--engine", "server", "--out", tmp_path)[0] == 2
    assert call("math", *SMALL, "--urls", plain.url, "--out", tmp_path)[0] == 2
    assert call("math", *SMALL, "--engine", "server", "--urls", "http://127.0.0.1:9", "--out", tmp_path)[0] == 1


@pytest.mark.slow
def test_harness_search_from_a_server(plain, tmp_path):
    """A whole harness-only run; and a method that trains is refused before it samples."""
    plain.faults = []
    small = [*SMALL, "--engine", "server", "--urls", plain.url, "--n-rows", 4, "--max-len", 512, "--out", tmp_path]
    code, output = call("math", *small, "--method", "harness", "--rollouts", 72, "--name", "h")
    assert code == 0, output
    assert [row["kind"] for row in rows(tmp_path / "h")].count("candidate") >= 2
    n_asked = len(plain.bodies)
    code, output = call("math", *small, "--name", "w")
    assert code == 2 and "--method harness" in output and len(plain.bodies) == n_asked + 1      # whether it takes ids
    result = call_json("eval", "math", *small, "--n", 1)
    assert result["exit"] == 0 and result["n_ok"] == 24


HOST = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from engine import SamplingParams
from server_engine import ServerEngine
from servers import MODEL
engine = ServerEngine(MODEL, {url!r}, None, n_rows=4, max_len=512)
engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=5, seed=1))
engine.step()
engine.close()
"""


def test_a_server_that_hangs_keeps_no_process_alive(plain, tmp_path):
    plain.faults = [None] + ["hang"] * 6                            # it is asked once whether it takes ids
    script = HOST.format(root=str(ROOT), tests=str(ROOT / "tests"), url=plain.url)
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
    assert time.monotonic() - started < 25                          # six tries of a minute each would take longer
    plain.faults = []


class DevServer(BaseHTTPRequestHandler):
    """What a vLLM server in dev mode says to a load, but for sampling: it keeps digests, and loads if `loads`."""
    loads, paused, version, held, calls = True, False, "default", {}, []

    def log_message(self, *_) -> None:
        pass

    def answer(self, content: dict, status: int = 200) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        self.answer({"/v1/models": {"data": [{"id": "m", "max_model_len": 512}]}, "/weight_info": {"weight_version": type(self).version},
                     "/server_info?config_format=json": {"vllm_config": {"model_config": {"dtype": "torch.float32"}}}}[self.path])

    def do_POST(self) -> None:
        kind, body = type(self), json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        kind.calls.append(path)
        if path in ("/pause", "/resume"):
            kind.paused = path == "/pause"
        elif path == "/update_weight_version":
            kind.version = body["new_version"]
        elif path == "/weight_checker" and body["action"] == "reset":
            kind.held = dict.fromkeys(kind.held, "0")
        elif path == "/collective_rpc":
            if kind.loads == "fails":
                return self.answer({"error": "scripted"}, 500)
            if kind.loads:
                weights = load_file(f"{body['kwargs']['weights_path']}/model.safetensors")
                kind.held = {f"dp0:pp0:pcp0:tp0:{name}": sha for name, sha in digests_of(weights).items() if ".q_proj" not in name}
        self.answer({"checksums": kind.held} if path == "/weight_checker" else {"success": True})


@pytest.fixture
def dev_server():
    kind = type("Kind", (DevServer,), {"held": {"dp0:pp0:pcp0:tp0:model.norm.weight": "0"}, "calls": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", kind
    server.shutdown()


def test_a_server_must_hold_what_it_was_given(dev_server, tmp_path):
    """It loads: in order. It says that it did and did not: found out. It fails: not left paused, nor under the old name."""
    url, kind = dev_server
    new = {name: tensor * 1.5 for name, tensor in untied_weights(load_model(MODEL)).items()}
    engine = ServerEngine(MODEL, url, tmp_path / "share", n_rows=2, max_len=256)
    first = engine.stamp
    assert kind.version == first and not kind.paused and (tmp_path / "share" / first).exists()
    assert kind.calls[2:] == ["/update_weight_version", "/pause", "/weight_checker", "/collective_rpc", "/reset_prefix_cache",
                              "/weight_checker", "/update_weight_version", "/resume"]
    engine.load_weights(new.items(), 1)
    assert kind.version == engine.stamp != first and [path.name for path in (tmp_path / "share").iterdir()] == [engine.stamp]
    again = engine.stamp
    engine.load_weights(untied_weights(load_model(MODEL)).items(), 1)                   # the same number, other weights
    assert kind.version == engine.stamp != again
    for loads in (False, "fails"):
        kind.loads = loads
        with pytest.raises(EngineDied, match="does not hold the weights" if not loads else "could not be loaded.*500"):
            engine.load_weights(new.items(), 2)
        assert not kind.paused and kind.version == "loading"
    engine.close()


def test_digests_know_what_vllm_fuses():
    q, k, v = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
    digests = digests_of({f"model.layers.0.self_attn.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))})
    fused = digests_of({"x.weight": torch.cat([q, k, v])})["x.weight"]
    assert digests["model.layers.0.self_attn.qkv_proj.weight"] == fused and len(digests) == 4


@pytest.mark.needs_vllm
def test_vllm_servers_that_lose_their_weights(tmp_path, monkeypatch):
    """A server that is killed: the other one answers. Restarted, it serves its own model again: no token of that is
    taken, it is given the run's weights, and then asked again."""
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.2)
    monkeypatch.setattr(server_engine, "DOWN_S", 0.2)
    reference = load_model(MODEL)
    new = {name: tensor * 1.5 for name, tensor in untied_weights(reference).items()}
    changed = load_model(MODEL)
    changed.load_state_dict(new, strict=False)
    prompts = random_prompts(24)
    with vllm_servers(tmp_path) as (urls, processes):
        engine = ServerEngine(MODEL, ",".join(urls), tmp_path / "share", n_rows=16, max_len=256)
        engine.load_weights(new.items(), 1)

        def ask() -> None:
            for i, prompt in enumerate(prompts):
                engine.submit(i, prompt, SamplingParams(max_tokens=8, seed=i, temperature=0))
            done = drain(engine)
            for i, prompt in enumerate(prompts):
                assert done[i].ids == greedy(changed, prompt, 8, engine.stop_ids), i

        ask()
        os.killpg(processes[0].pid, signal.SIGKILL)
        processes[0].wait()
        ask()
        assert engine.n_retries >= 1
        port, log = int(urls[0].rpartition(":")[2]), tmp_path / "again.log"
        processes[0] = start_vllm_server(port, log)
        wait_for(urls[0], processes[0], log)
        time.sleep(2)
        ask()
        version = requests.get(urls[0] + "/weight_info", timeout=10).json()["weight_version"]
        assert version == engine.stamp == requests.get(urls[1] + "/weight_info", timeout=10).json()["weight_version"]
        engine.close()


@pytest.mark.needs_vllm
def test_a_run_over_two_vllm_servers(tmp_path):
    """The whole loop; every trajectory's version is the trainer's, and the servers end with the last weights."""
    with vllm_servers(tmp_path) as (urls, _):
        code, output = call("math", *SMALL, "--engine", "server", "--urls", ",".join(urls), "--max-len", 512, "--n-rows", 32,
                            "--out", tmp_path, "--name", "run")
        assert code == 0, output
        versions = {requests.get(url + "/weight_info", timeout=10).json()["weight_version"].partition("-")[0] for url in urls}
    steps = [row for row in rows(tmp_path / "run") if row["kind"] == "weight_step"]
    assert versions == {str(steps[-1]["version"])} and steps[-1]["version"] == 2
    for path in sorted((tmp_path / "run/rollouts").glob("*.jsonl")):
        assert {json.loads(line)["version"] for line in path.read_text().splitlines()} == {int(path.stem.rpartition("_")[2]) - 1}
    assert not list((tmp_path / "run").glob("serving/*"))
    assert threading.active_count() < 30                        # those of its 32 rollouts at once have ended
