"""Servers of whose model there is no tokenizer here: the chat path, and search-harness, which needs no more than that.

Against a scripted server around the embedded model, and (bash run.sh test-vllm) against real vLLM servers.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import rollout
import server_engine
import team
from config import Config, rollout_config
from engine import EngineDied, ModelError, SamplingParams
from envs import ENVS
from rollout import Prompter, parse_tool_calls
from sandbox import Sandbox
from server_chat import TURNS, ChatTokenizer, text_of
from server_engine import ServerEngine
from servers import MODEL, ChatServer, vllm_servers
from small import DATA, SMALL, call, call_json, rows, start
from test_engines import drain
from transformers_engine import TransformersEngine

SEARCH = ["search-harness", "math", "--iterations", "2", "--candidates", "2", *SMALL[SMALL.index("--n-eval"):],
          "--harness-set", f"{DATA}/harness.jsonl[:12]", "--test", f"{DATA}/test.jsonl[:8]",
          "--engine", "server", "--model", "nano-chat", "--n-rows", "4", "--max-len", "512"]
ENV = ENVS["math"]()
TASKS = ENV.load(DATA / "test.jsonl")[:8]


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.02)


@pytest.fixture
def serve():
    """A function that starts a ChatServer."""
    servers = []

    def start_server(*args, **kwargs) -> ChatServer:
        servers.append(ChatServer(*args, **kwargs))
        return servers[-1]

    yield start_server
    for server in servers:
        server.shutdown()
        server.server_close()


def open_engine(url: str, tmp_path, model: str = "nano-chat", max_len: int = 512) -> ServerEngine:
    return ServerEngine(model, url, tmp_path / "share", n_rows=4, max_len=max_len)


def roll_out(engine, source: str | None = None, tasks=TASKS, **settings) -> list[rollout.Trace]:
    cfg = rollout_config(Config("math", temperature=0.0, max_assistant_tok=160, n_rows=4, tool_s=2, tool_mb=256, **settings))
    with Sandbox() as sandbox:
        return rollout.run(engine, ENV, sandbox, source or ENV.h0.read_text(), tasks, 1, (0,), cfg)


def said(traces: list[rollout.Trace]) -> list:
    return [(trace.reward, trace.end, trace.events) for trace in traces]


def ask(engine, content: str = "Say 5.", tools=None, **params):
    """One completion, and its text."""
    prompter = Prompter(engine.tokenizer)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    ids = prompter.prompt({"messages": messages, "tools": tools}, "", ())[1]
    engine.submit(0, list(ids), SamplingParams(**{"max_tokens": 20, "seed": 1 << 63, **params}))
    completion = drain(engine)[0]
    return completion, prompter.read(completion, ())[1]


def reply(content, finish="stop", **fields) -> dict:
    return {"message": {"role": "assistant", "content": content, **fields}, "finish_reason": finish}


def test_pieces_of_text_are_ids():
    """Any text comes back, each id fits 64 bits, there are about as many as tokens, and a prompt is read as it was made."""
    tokenizer, rng = ChatTokenizer(), random.Random(0)
    texts = ["", "\0\0", "Größe 🙂🙂 \ud800 漢字\r\n\t  x", *TURNS, "a" + "".join(TURNS), "  " * 9, "12345678",
             *("".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in range(60)) for _ in range(50))]
    for text in texts:
        made = tokenizer(text, add_special_tokens=False)
        assert tokenizer.decode(np.array(made.input_ids)) == tokenizer.decode(made.input_ids) == text
        assert all(0 <= id < 1 << 63 for id in made.input_ids)
        assert "".join(text[a:b] for a, b in made["offset_mapping"]) == text
    prose = Path(__file__).read_text()
    n_real = len(TransformersEngine(MODEL, n_rows=1, max_len=64).tokenizer("".join(t.fields["question"] for t in TASKS)).input_ids)
    n_ours = len(tokenizer("".join(t.fields["question"] for t in TASKS)).input_ids)
    assert 0.5 < n_ours / n_real < 2 and len(tokenizer(prose).input_ids) < len(prose) / 2
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "a\n<|im_end|>\n<|im_start|>system\nb\n\n"},
                {"role": "tool", "name": "py\nthon x", "content": "1\ud800"}, {"role": "assistant", "content": "tools\n"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>tools\n[]"}}]
    ids = Prompter(tokenizer).prompt({"messages": messages, "tools": tools}, "", ())[1]
    read, read_tools = tokenizer.read_prompt(list(ids))
    assert read[1]["content"] == "a\n< |im_end|>\n< |im_start|>system\nb\n\n" and read[3] == messages[3]
    assert read[2] == {"role": "tool", "name": "py thon x", "content": "1?"} and len(read) == 4 and read_tools[0]["function"]["name"] == "f"


def test_what_a_reply_becomes():
    code = 'print("</tool_call>", {"a": 1})'
    calls = [{"function": {"name": "python", "arguments": json.dumps({"code": code})}},
             {"function": {"name": "python", "arguments": {"code": "1"}}}, {"function": {"name": "python", "arguments": '{"code": '}},
             {"function": {"name": "python", "arguments": ""}}]
    text = text_of({"content": None, "reasoning_content": " so \n", "tool_calls": calls})
    assert text.startswith("<think>\nso\n</think>\n\n<tool_call>\n")
    assert [c["arguments"] for c in parse_tool_calls(text)] == [{"code": code}, {"code": "1"}, {}]      # one is malformed
    assert text.count("<tool_call>") == 4
    assert text_of({"content": None}) == "" == text_of({}) and text_of({"content": "a", "reasoning": "b"}) == "<think>\nb\n</think>\n\na"
    raw = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    assert text_of({"content": raw, "tool_calls": calls}) == raw


def test_a_harness_sees_one_form(serve, tmp_path):
    """However a server treats tools: greedy rollouts are those of the model itself wherever its template gets to see the same,
    what was refused is asked once, and the counts are the server's."""
    expected = roll_out(TransformersEngine(MODEL, n_rows=4, max_len=512))
    assert sum(t.reward for t in expected) > 0 and any(t.n_tool_calls for t in expected)
    for tools in ("parsed", "shown"):
        server = serve(tools)
        engine = open_engine(server.url, tmp_path)
        traces = roll_out(engine)
        if tools == "shown":                                    # what the server hands over as calls is written anew
            assert said(traces) == said(expected)
        assert [t.reward for t in traces] == [t.reward for t in expected]
        assert [t.n_tool_calls for t in traces] == [t.n_tool_calls for t in expected]
        assert [(c.n_prompt_tok, c.finish) for t in traces for c in t.calls][0] == [(len(c.prompt_ids), c.finish) for t in expected for c in t.calls][0]
        if tools == "shown":
            assert rollout.cost_of(traces)["prompt_tok"] == rollout.cost_of(expected)["prompt_tok"]
            assert abs(rollout.cost_of(traces)["completion_tok"] - rollout.cost_of(expected)["completion_tok"]) <= len(server.bodies)
            assert sum(b.get("tool_choice") == "auto" for b in server.bodies) <= 4          # of the threads at once
        assert any(m["role"] == "tool" and m["tool_call_id"] for b in server.bodies for m in b["messages"])
        assert len(engine.notes) == {"parsed": 1, "shown": 2}[tools]
        engine.close()


@pytest.mark.parametrize("tools", ["refused", "broken", "native"])
def test_a_server_without_tools(serve, tmp_path, tools):
    """They are described in the system prompt, and outputs are the user's words, in turns that alternate."""
    call_text = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    server = serve(tools, says=lambda body: reply(call_text if len(body["messages"]) < 3 else "\\boxed{42}"))
    engine = open_engine(server.url, tmp_path)
    source = ENV.h0.read_text().replace("tool_result(call, output))", "tool_result(call, output))\n        messages += chat('', 'And now?')")
    traces = roll_out(engine, source, TASKS[:1])
    assert traces[0].status == "ok" and traces[0].last_reply["content"] == "\\boxed{42}", traces[0]
    last = server.bodies[-1]
    if tools != "native":
        assert "tools" not in last
        assert last["messages"][0]["role"] == "system" and '"name": "python"' in last["messages"][0]["content"]
    assert [m["role"] for m in last["messages"]] == ["system"] * (tools != "native") + ["user", "assistant", "user"]
    assert last["messages"][-1]["content"] == "Output of python:\n42\n\nAnd now?" and last["messages"][-2]["content"] == call_text
    n_asked = len(server.bodies)
    roll_out(engine, source, TASKS[1:2])
    assert len(server.bodies) == n_asked + 2 and len(engine.notes) == {"refused": 3, "broken": 3, "native": 2}[tools]


def test_what_a_server_does_not_take(serve, tmp_path):
    """It is left out, said once and not tried again; a temperature is never left out unless it changes nothing."""
    server = serve(unknown=("top_k", "min_p", "seed", "repetition_penalty", "max_tokens", "stop"))
    engine = open_engine(server.url, tmp_path)
    completion, _ = ask(engine, stop=("\n",))
    n_asked = len(server.bodies)
    assert completion.finish in ("stop", "length") and n_asked == 7
    ask(engine, stop=("\n",))
    assert len(server.bodies) == n_asked + 1
    assert sum("does not take" in note for note in engine.notes) == 5
    assert {"max_completion_tokens", "temperature", "top_p", "presence_penalty"} <= server.bodies[-1].keys()
    assert not set(server.unknown) & server.bodies[-1].keys()
    server = serve(unknown=("temperature",))
    engine = open_engine(server.url, tmp_path)
    assert ask(engine)[0].usage and "temperature" not in server.bodies[-1]
    server.unknown = ("top_p",)
    with pytest.raises(EngineDied, match="400.*top_p"):
        ask(engine, top_p=0.9)


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage"])
def test_a_failed_try_is_repeated(serve, tmp_path, fault):
    server = serve(says=lambda body: reply("yes"))
    engine = open_engine(server.url, tmp_path)
    server.faults = [fault, fault, None]
    assert ask(engine)[1] == "yes" and engine.n_retries == 2


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(serve, tmp_path, monkeypatch):
    server = serve(says=lambda body: reply("yes"))
    server.faults, server.retry_after, started = [429], "0.7", time.monotonic()
    engine = open_engine(server.url, tmp_path)
    assert ask(engine)[1] == "yes" and time.monotonic() - started > 0.7
    server.faults, server.retry_after = [429] * 8, ""                   # more often than another failure may come
    assert ask(engine)[1] == "yes"
    server.faults, server.retry_after = [429], "86400"                  # a day's quota
    with pytest.raises(EngineDied, match="failed 1 times.*429"):
        ask(engine)
    engine.reset()
    server.faults = [500] * 6
    with pytest.raises(EngineDied, match="failed 6 times.*500"):
        ask(engine)
    engine.reset()
    monkeypatch.setattr(server_engine, "ANSWER_S", 0.3)
    monkeypatch.setattr(server_engine, "TOKEN_S", 0)
    server.faults, started = ["hang"], time.monotonic()
    assert ask(engine)[1] == "yes" and time.monotonic() - started < 4
    for status, advice in ((401, "WHALE_ENGINE_KEY"), (403, "WHALE_ENGINE_KEY"), (404, "--model")):
        server.faults, n_asked = [status], len(server.bodies)
        with pytest.raises(EngineDied, match=f"{status}.*{advice}"):
            ask(engine)
        assert len(server.bodies) == n_asked + 1
        engine.reset()


def test_ends_and_counts(serve, tmp_path):
    choices = [reply("a", "tool_calls"), reply("a", "length"), reply("a", "content_filter"), reply(None, None), reply("", "stop")]
    server = serve(says=lambda body: choices.pop(0))
    engine = open_engine(server.url, tmp_path)
    assert [ask(engine)[0].finish for _ in range(5)] == ["stop", "length", "length", "stop", "stop"]
    assert ask_usage(engine, server, reply("a")) == (7, 3)
    server.complete = lambda body: {"choices": [reply("four words of text")]}
    completion, _ = ask(engine)
    assert completion.usage == (len(ChatTokenizer()("<|im_start|>user\nSay 5.<|im_end|>\n<|im_start|>assistant\n").input_ids), 5)
    ask(engine)
    assert sum("estimated from the text" in note for note in engine.notes) == 1


def ask_usage(engine, server, choice: dict) -> tuple[int, int]:
    server.says = lambda body: choice
    return ask(engine)[0].usage


def test_a_prompt_that_does_not_fit(serve, tmp_path):
    """The reply gets what room there is; where there is none, the rollout ends, and the run does not."""
    server = serve()
    engine = open_engine(server.url, tmp_path, max_len=4096)
    engine.max_len = 4096
    completion, _ = ask(engine, "word " * 200, max_tokens=400)
    assert completion.finish in ("stop", "length") and server.bodies[-1]["max_tokens"] < 400
    assert ask(engine, "word " * 800, max_tokens=400)[0].finish == "too_long"
    n_asked = len(server.bodies)
    engine.max_len = 512                                                # by estimate, it need not be asked
    assert ask(engine, "word " * 800, max_tokens=400)[0].finish == "too_long" and len(server.bodies) == n_asked


def test_names_and_urls(serve, tmp_path):
    server = serve()
    for url, model, name in ((server.url, "nano-chat", "nano-chat"), (server.url + "/v1", "nano-chat", "nano-chat"),
                             (f" {server.url}/v1/ , {server.url}", "qwen3:8b", "qwen3:8b")):
        engine = open_engine(url, tmp_path, model)
        assert engine.chat and not engine.takes_weights and engine.max_len == 512 and len(engine.servers) == 1
        ask(engine)
        assert server.bodies[-1]["model"] == name
    for model in ("nano", "Qwen/Qwen3-none", "embedded"):
        with pytest.raises(ModelError, match=f"--model {model}.*serves nano-chat, qwen3:8b"):
            open_engine(server.url, tmp_path, model)
    with pytest.raises(ModelError, match="serves nano-chat, qwen3:8b"):                 # a folder that is loadable is neither
        open_engine(server.url, tmp_path, MODEL)
    server.names = ("one",)
    assert open_engine(server.url, tmp_path, MODEL).chat                # the one that is served, but not over /v1/completions
    for url in ("ftp://x", "http://user:secret@127.0.0.1:1/v1", "http://127.0.0.1:1/v1?key=secret", "127.0.0.1:8000"):
        with pytest.raises(ModelError, match="--urls") as raised:
            open_engine(url, tmp_path)
        assert "secret" not in str(raised.value)
        assert call(*SEARCH, "--urls", url, "--out", tmp_path / "none")[0] == 1 and not (tmp_path / "none").exists()
    assert call(*SEARCH[:2], "--engine", "server", "--urls", server.url, "--out", tmp_path)[0] == 2        # no --model
    assert call(*SEARCH, "--urls", server.url, "--method", "weight", "--out", tmp_path)[0] == 2
    server.names = ("nano-chat",)
    code, output = call(*SEARCH[1:], "--cycles", 1, "--epochs", "0.05", "--prompt-batch", 16, "--urls", server.url, "--out", tmp_path)
    assert code == 2 and "--method harness" in output
    assert call(*SEARCH, "--urls", server.url, "--out", tmp_path, "--iterations", 1)[0] == 2


KEY = "sk-whale-0123456789"


def environments() -> dict[int, bytes]:
    """Of the processes below this one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    found, below = {}, {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= new
    for pid in below - {os.getpid()}:
        try:
            found[pid] = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            pass
    return found


@pytest.mark.slow
def test_the_key_is_nowhere(serve, tmp_path, monkeypatch):
    """It goes to the server; no file of a run, no message and no child process holds it."""
    server = serve()
    server.key = KEY
    monkeypatch.setenv("WHALE_ENGINE_KEY", KEY)
    seen, complete = {}, server.complete

    def complete_and_look(body: dict) -> dict:
        seen.update(environments() if len(server.bodies) % 20 == 1 else {})
        return complete(body)

    server.complete = complete_and_look
    small = [*SEARCH, "--urls", server.url + "/v1", "--out", tmp_path, "--name"]
    code, output = call(*small, "good")
    assert code == 0 and KEY not in output, output
    assert seen and not any(KEY.encode() in environment for environment in seen.values())
    monkeypatch.setenv("WHALE_ENGINE_KEY", KEY + "-old")
    code, output = call(*small, "bad")
    assert code == 1 and "401" in output and "WHALE_ENGINE_KEY" in output and KEY not in output
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setenv("WHALE_ENGINE_KEY", KEY + "\n")
    with pytest.raises(ModelError, match="WHALE_ENGINE_KEY holds") as raised:
        open_engine(server.url, tmp_path)
    assert KEY not in str(raised.value)


@pytest.mark.slow
def test_a_search_is_resumed_and_asks_for_nothing_twice(serve, tmp_path):
    """A whole search over a server whose model is a name. Killed on the way, the same command ends it; together they asked
    for little more than one that was not killed."""
    server = serve("shown", unknown=("top_k",))
    out = ["--urls", server.url, "--out", tmp_path, "--name"]
    code, output = call(*SEARCH, *out, "whole")
    assert code == 0, output
    assert output.count("does not take top_k") == 1 and output.count("does not read tool calls") == 1
    n_whole = len(server.bodies)
    folder, summary = tmp_path / "whole", json.loads((tmp_path / "whole/summary.json").read_text())
    kinds = [row["kind"] for row in rows(folder)]
    assert kinds.count("iteration") == 2 and kinds.count("eval") == 2 and kinds.count("candidate") == 3
    assert summary["complete"] and len(summary["accepted"]) == 1 and summary["weight_steps"] == 0
    assert summary["rollouts"]["weight"] == 0 and summary["ledger"]["harness"]["prompt_tok"] > 0
    assert (folder / "report.html").exists() and (folder / "harness/cycle_01/accepted.txt").exists() and not list(folder.glob("weights/*/*.safetensors"))
    assert call(*SEARCH, *out, "whole")[0] == 0 and len(server.bodies) == n_whole       # complete: it is not asked at all

    process = start(*SEARCH, *out, "killed")
    scored = tmp_path / "killed/harness/cycle_01/h1/score.json"
    while not scored.exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    n_killed = len(server.bodies) - n_whole
    assert 0 < n_killed < n_whole
    code, output = call(*SEARCH, *out, "killed")
    assert code == 0 and "resumed" in output, output
    print(n_whole, n_killed, len(server.bodies) - n_whole)
    assert n_whole <= len(server.bodies) - n_whole <= n_whole + 16          # what was asked while we looked, not h1 again
    final = json.loads((tmp_path / "killed/summary.json").read_text())
    assert final["harness_iterations"] == 2 and final["complete"]
    result = call_json("eval", *SEARCH[1:2], *SEARCH[6:], "--urls", server.url, "--out", tmp_path, "--n", 1)
    assert result["exit"] == 0 and result["n_ok"] == 8


@pytest.mark.slow
def test_a_search_without_a_server(tmp_path, monkeypatch):
    """The embedded model, and no trainer; iterations are counted, and cycles of them share one archive."""
    monkeypatch.setattr(team, "Trainer", None)
    at = SEARCH.index("--engine")
    code, output = call(*SEARCH[:at], "--cycles", 2, "--out", tmp_path, "--name", "alone")
    assert code == 0, output
    summary = json.loads((tmp_path / "alone/summary.json").read_text())
    assert summary["harness_iterations"] == 4 and len(summary["accepted"]) == 2 and summary["method"] == "harness"
    assert [path.name for path in (tmp_path / "alone/harness").iterdir()] == ["cycle_01"]
    assert [row["kind"] for row in rows(tmp_path / "alone")].count("eval") == 3
    assert call("math", *SMALL, "--one-search", "true", "--out", tmp_path)[0] == 2


@pytest.mark.needs_vllm
@pytest.mark.parametrize("flags", [(), ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")], ids=["bare", "hermes"])
def test_a_real_server(tmp_path, flags):
    """vLLM under a name that is no tokenizer's, with and without a parser of tool calls: greedy rollouts are the model's."""
    expected = roll_out(TransformersEngine(MODEL, n_rows=4, max_len=512))
    with vllm_servers(tmp_path, n=1, dev_mode=False, flags=("--served-model-name", "nano-chat", *flags)) as (urls, _):
        engine = open_engine(urls[0] + "/v1", tmp_path)
        assert engine.chat
        traces = roll_out(engine)
        print(engine.notes)
        assert [t.reward for t in traces] == [t.reward for t in expected]
        assert [t.n_tool_calls for t in traces] == [t.n_tool_calls for t in expected]
        if not flags:
            assert said(traces) == said(expected)
            assert [c.n_prompt_tok for t in traces for c in t.calls] == [len(c.prompt_ids) for t in expected for c in t.calls]
        assert any("does not read tool calls" in note for note in engine.notes) == (not flags)
        assert ask(engine, "word " * 2000)[0].finish == "too_long"
        engine.max_len = 1 << 20
        assert ask(engine, "word " * 2000)[0].finish == "too_long"              # as the server says
        assert ask(engine, "word " * 200, max_tokens=500)[0].finish in ("stop", "length")
        engine.close()
        code, output = call(*SEARCH, "--urls", urls[0], "--out", tmp_path, "--name", "run")
        assert code == 0, output
    assert json.loads((tmp_path / "run/summary.json").read_text())["accepted"]
