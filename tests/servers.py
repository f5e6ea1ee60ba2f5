"""Servers for tests: real vLLM servers on loopback, and a small OpenAI-compatible one around the transformers engine."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import requests

from config import ROOT
from vllm_engine import kill_group

MODEL = str(ROOT / "embedded" / "model")
HAS_VLLM = find_spec("vllm") is not None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_vllm_server(port: int, log_path, dev_mode: bool = True) -> subprocess.Popen:
    env = os.environ | {"VLLM_SERVER_DEV_MODE": str(int(dev_mode)), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                        "HF_HUB_OFFLINE": "1"}
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--host", "127.0.0.1",
             "--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64",
             "--max-num-batched-tokens", "4096", "--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out"],
            env=env, stdout=log, stderr=log, start_new_session=True)


def wait_for(url: str, process: subprocess.Popen, log_path, limit_s: float = 240) -> None:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up and process.poll() is None:
        try:
            return requests.get(url + "/v1/models", timeout=5).raise_for_status()
        except requests.RequestException:
            time.sleep(0.5)
    raise RuntimeError(f"no server at {url}: {open(log_path).read()[-2000:]}")


@contextmanager
def vllm_servers(folder, n: int = 2, **kwargs):
    """URLs of n servers of the embedded model, and their processes."""
    ports = [free_port() for _ in range(n)]
    logs = [folder / f"server_{port}.log" for port in ports]
    processes = [start_vllm_server(port, log, **kwargs) for port, log in zip(ports, logs, strict=True)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url, process, log in zip(urls, processes, logs, strict=True):
            wait_for(url, process, log)
        yield urls, processes
    finally:
        for process in processes:
            kill_group(process)


class PlainServer(ThreadingHTTPServer):
    """/v1/models and /v1/completions, answered with text by the transformers engine. `faults`: taken one a completion
    from the front; a status code, "hang", "garbage", or None for an answer."""

    daemon_threads = True

    def __init__(self):
        from transformers_engine import TransformersEngine

        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.lock = TransformersEngine(MODEL, n_rows=4, max_len=512), threading.Lock()
        self.faults, self.bodies = [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def complete(self, body: dict) -> dict:
        from engine import SamplingParams

        with self.lock:
            self.engine.submit(0, body["prompt"], SamplingParams(
                body["max_tokens"], body["seed"], body["temperature"], body["top_k"], body["top_p"], tuple(body.get("stop", ()))))
            done = []
            while not self.engine.idle:
                done += self.engine.step()
        return {"text": self.engine.tokenizer.decode(done[0].ids, skip_special_tokens=True), "finish_reason": done[0].finish}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, content: dict | str) -> None:
        payload = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "nano", "max_model_len": 512}]})
        else:
            self.answer(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, {"error": "no such path"})
        self.server.bodies.append(body)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            time.sleep(5)
        elif fault == "garbage":
            self.answer(200, "[" * 50)
        elif fault:
            self.answer(fault, {"error": "scripted"})
        else:
            self.answer(200, {"choices": [self.server.complete(body)]})
