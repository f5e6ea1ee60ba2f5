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

import requests

from config import ROOT
from vllm_engine import kill_group

MODEL = str(ROOT / "embedded" / "model")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_vllm_server(port: int, log_path, dev_mode: bool = True, flags: tuple[str, ...] = ()) -> subprocess.Popen:
    env = os.environ | {"VLLM_SERVER_DEV_MODE": str(int(dev_mode)), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                        "HF_HUB_OFFLINE": "1"}
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--host", "127.0.0.1",
             "--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64",
             "--max-num-batched-tokens", "4096", "--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out", *flags],
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

    daemon_threads, path, names, retry_after = True, "/v1/completions", ("nano",), ""

    def __init__(self):
        from transformers_engine import TransformersEngine

        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.lock = TransformersEngine(MODEL, n_rows=4, max_len=512), threading.Lock()
        self.faults, self.bodies, self.key = [], [], ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def complete(self, body: dict) -> dict:
        done = self.sample(body["prompt"], body)
        text = self.engine.tokenizer.decode(done.ids, skip_special_tokens=True)
        return {"choices": [{"text": text, "finish_reason": done.finish}]}

    def sample(self, ids: list[int], body: dict):
        from engine import SamplingParams

        with self.lock:
            self.engine.submit(0, ids, SamplingParams(
                body["max_tokens"], body.get("seed", 0), body.get("temperature", 1), body.get("top_k", 20), body["top_p"],
                tuple(body.get("stop", ()))))
            done = []
            while not self.engine.idle:
                done += self.engine.step()
        return done[0]


class Refuse(Exception):
    """A status and what is said with it."""


class ChatServer(PlainServer):
    """/v1/models and /v1/chat/completions. `tools`: "parsed" (the server reads the calls), "shown" (it takes tools with
    tool_choice none only), "refused", "broken" (a 500, as llama.cpp), or "native" (a tool's turn must answer a call). `unknown`:
    parameters that it refuses. `says`: instead of the model, a function from body to the answer's choice."""

    path, names = "/v1/chat/completions", ("qwen3:8b", "nano-chat")

    def __init__(self, tools: str = "parsed", unknown: tuple[str, ...] = (), says=None, usage: bool = True):
        super().__init__()
        self.tools, self.unknown, self.says, self.usage = tools, unknown, says, usage
        self.max_len = 512

    def complete(self, body: dict) -> dict:
        from rollout import parse_tool_calls

        for name in self.unknown:
            if name in body:
                raise Refuse(400, f"Unsupported parameter: '{name}'" + ", use 'max_completion_tokens'" * (name == "max_tokens"))
        if "tools" in body and self.tools == "broken":
            raise Refuse(500, "tools param requires --jinja flag")
        if "tools" in body and (self.tools == "refused" or self.tools == "shown" and body["tool_choice"] != "none"):
            raise Refuse(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if self.tools in ("native", "refused", "broken") and any(m["role"] == "tool" for m in body["messages"]):
            raise Refuse(400, "messages with role 'tool' must be a response to a preceding message with 'tool_calls'.")
        if self.says:
            return {"choices": [self.says(body)], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        text = self.engine.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=False)
        ids = self.engine.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) + body.get("max_tokens", 0) > self.max_len:
            raise Refuse(400, f"This model's maximum context length is {self.max_len} tokens.")
        done = self.sample(ids, {"max_tokens": body.get("max_completion_tokens"), **body})
        content, finish, calls = self.engine.tokenizer.decode(done.ids, skip_special_tokens=True), done.finish, []
        if "tools" in body and body["tool_choice"] == "auto" and (found := parse_tool_calls(content)):
            content, finish = content.partition("<tool_call>")[0] or None, "tool_calls"
            calls = [{"id": f"c{i}", "type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
                     for i, call in enumerate(found)]
        usage = {"usage": {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}} if self.usage else {}
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        return {"choices": [{"message": message, "finish_reason": finish}]} | usage


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, content: dict | str) -> None:
        payload = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        if status == 429 and self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        if not self.is_known():
            return
        if self.path == "/v1/models":
            cards = [{"id": name, "max_model_len": 512} for name in self.server.names]
            self.answer(200, {"object": "list", "data": cards})
        else:
            self.answer(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_known():
            return
        if self.path != self.server.path:
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
            try:
                self.answer(200, self.server.complete(body))
            except Refuse as refusal:
                self.answer(refusal.args[0], {"error": {"message": refusal.args[1]}})

    def is_known(self) -> bool:
        """Whether the key is right; a wrong one is said in the answer, as some servers do."""
        given = self.headers.get("Authorization", "")
        if self.server.key and given != f"Bearer {self.server.key}":
            self.answer(401, {"error": f"Incorrect API key provided: {given.removeprefix('Bearer ')}"})
            return False
        return True
