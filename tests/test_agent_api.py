"""The proposer that is an agent over a chat endpoint, against a real HTTP server on loopback that plays a scripted model."""

import json
import random
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import agent_api
import agent_tools
import chat_endpoint
import harness_search as hs
from agent_api import run_api_agent
from agent_tools import Workbench
from chat_endpoint import check_settings_api
from envs import MathEnv
from lint import ForbiddenText
from files import UsageError
from sandbox import Sandbox
from servers import MODEL, free_port
from sessions import ProposerConfig, ProposerFailed, Workplace, propose_by_agent
from test_harness_search import SMALL, TASKS, make_search
from transformers_engine import TransformersEngine

KEY = "sk-test-0123456789abcdef"
H0 = MathEnv.h0.read_text()


class ScriptedServer(ThreadingHTTPServer):
    """/v1/models and /v1/chat/completions. `script`: what each call is answered, from the front: a reply, a function
    from the request's body to one, (status, headers, text), bytes, "hang", "drip", "drip headers", "reset"."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.bodies, self.headers, self.served = [], [], [], ["scripted-1"]
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, headers: dict, content: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/v1/models" and isinstance(self.server.served, list):
            return self.answer(200, {}, json.dumps({"data": [{"id": name} for name in self.server.served]}).encode())
        self.answer(self.server.served if isinstance(self.server.served, int) else 404, {}, b"no models here")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        assert self.path == "/v1/chat/completions"
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        step = self.server.script.pop(0) if self.server.script else say("Done.")
        step = step(body) if callable(step) else step
        try:
            if isinstance(step, tuple):
                self.answer(step[0], step[1], step[2].encode())
            elif isinstance(step, bytes):
                self.answer(200, {}, step)
            elif step == "hang":
                time.sleep(3)
            elif step in ("drip", "drip headers"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"Content-Length: 100000\r\n\r\n" * (step == "drip"))
                for _ in range(30):
                    self.wfile.write(b"X")
                    time.sleep(0.1)
            elif step == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            elif step == "short":
                self.answer(200, {"Content-Length": "500"}, b'{"choices"')
            else:
                self.answer(200, {}, json.dumps(step).encode())
        except OSError:
            pass


def say(content, *calls, usage=None, finish="stop", **more) -> dict:
    """A reply; each call is (name, arguments): an object, or the text that stands there."""
    message = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [{"id": f"x{i}", "type": "function", "function": {
            "name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
            for i, (name, given) in enumerate(calls)]
    return {"model": "scripted-1.0", "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10} if usage is None else usage}


def slot(name="h1", **changes) -> tuple[str, dict]:
    return "write_slot", {"slot": name, "source": H0.replace("MAX_CALLS = 2", "MAX_CALLS = 3"), "parent": "h0",
                          "hypothesis": "with a third call fewer end at the call limit", "mechanisms": ["calls_3"]} | changes


FINISH = ("finish", {"report": "I looked at h0."})


@pytest.fixture(scope="module")
def plain():
    server = ScriptedServer()
    yield server
    server.shutdown()


@pytest.fixture
def server(plain, monkeypatch):
    monkeypatch.setenv(chat_endpoint.KEY, KEY)
    plain.script, plain.bodies, plain.headers, plain.served = [], [], [], ["scripted-1"]
    return plain


@pytest.fixture
def place(server, tmp_path) -> Callable[..., Workplace]:
    """A working copy with one scored candidate, and the settings for it."""
    folder = tmp_path / "copy"
    (folder / "archive" / "cycle_01" / "h0").mkdir(parents=True)
    (folder / "task.md").write_text("# Your task: better harnesses\n")
    (folder / "harness_api.py").write_text("x = 1\n" * 500)
    (folder / "archive/cycle_01/history.jsonl").write_text('{"name": "h0"}\n')
    (folder / "archive/cycle_01/h0/score.json").write_text("{}\n")
    (folder / "archive/cycle_01/h0/harness.py").write_text(H0)
    (folder / "archive/cycle_01/h0/traces.jsonl").write_text(
        "".join(json.dumps({"row": i, "text": "wörter " * 3000, "end": "The Last Word"}, ensure_ascii=False) + "\n" for i in range(6)))

    def make(slots=("h1",), usd=None, **changes) -> Workplace:
        settings = ProposerConfig(proposer="api", proposer_url=server.url, proposer_model="scripted-1", **changes)
        return Workplace(folder, slots, tmp_path / "transcript.txt", settings, usd)
    return make


def hold(workplace: Workplace):
    """A session without pauses -> it, and the pauses that it would have made."""
    pauses = []
    return run_api_agent(workplace, pauses.append), pauses


def transcript(workplace: Workplace) -> list[dict]:
    return [json.loads(line) for line in workplace.transcript.read_text().splitlines()]


def answers(server) -> list[str]:
    """What the model was told after each of its replies, as the last request holds it."""
    return [message["content"] for message in server.bodies[-1]["messages"][2:] if message["role"] != "assistant"]


# ---- a session ------------------------------------------------------------------------------------------------------


def test_a_session(server, place):
    server.script = [
        say("I look around.", ("list_files", {})), say(None, ("read_file", {"path": "archive/cycle_01/h0/harness.py"})),
        say(None, ("grep", {"pattern": "last word|nothing", "max_hits": 2})), say("", slot()), say(None, FINISH)]
    workplace = place()
    session, pauses = hold(workplace)
    assert (session.end, session.words, pauses) == ("done", "I looked at h0.", [])
    assert (session.model, session.version) == ("scripted-1.0", "whale agent")
    assert (session.prompt_tok, session.completion_tok, session.usd) == (500, 50, None)
    assert "MAX_CALLS = 3" in (workplace.folder / "h1.py").read_text()
    assert json.loads((workplace.folder / "proposal.json").read_text()) == [
        {key: value for key, value in slot()[1].items() if key != "source"}]
    assert (workplace.folder / "report.md").read_text() == "I looked at h0."
    listing, read, hits, written = answers(server)
    assert listing.splitlines() == ["archive/", "harness_api.py  3000", "task.md  30"]
    assert read.startswith("(lines 1 to ") and "def run(task)" in read
    assert hits.startswith("(6 lines, 2 shown)\narchive/cycle_01/h0/traces.jsonl:1: (character 210")
    assert written == "Written; it looks right. Still to do: nothing; call finish."
    first = server.bodies[0]
    assert first["model"] == "scripted-1" and set(first) == {"model", "messages", "tools", "seed"}
    assert [tool["function"]["name"] for tool in first["tools"]] == ["list_files", "read_file", "grep", "write_slot", "finish"]
    assert "# Your task" in first["messages"][1]["content"] and "h1" in first["messages"][1]["content"]
    assert len({body["seed"] for body in server.bodies}) == 5 and all(0 <= body["seed"] < 2 ** 31 for body in server.bodies)
    for body in server.bodies:                          # every call has its answer, under an id of our own
        called = [call["id"] for message in body["messages"] for call in message.get("tool_calls") or []]
        assert called == [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]
        assert len(set(called)) == len(called) and all(re.fullmatch("[a-z0-9]{9}", id) for id in called)
    rows = transcript(workplace)
    assert [row.get("role") for row in rows] == ["system", "user"] + ["assistant", "tool"] * 4 + ["assistant", None]
    assert rows[-1] == {"end": "done", "words": "I looked at h0."}


def test_text_without_a_call_ends_it_when_the_slots_are_written(server, place):
    server.script = [say("Let me think."), say(None, slot()), say("All is written.")]
    session, _ = hold(place())
    assert (session.end, session.words, len(server.bodies)) == ("done", "All is written.", 3)
    assert "h1" in answers(server)[0] and "call finish" in answers(server)[0]


def test_finish_is_asked_for_again_while_slots_are_left(server, place):
    server.script = [say(None, slot(), FINISH), say(None, slot("h2")), say(None, FINISH)]
    workplace = place(slots=("h1", "h2", "h3"))
    session, _ = hold(workplace)
    assert session.end == "done" and answers(server)[1].startswith("Not yet: h2, h3")
    assert "it is the same program as h1" in answers(server)[2]
    assert [row["slot"] for row in json.loads((workplace.folder / "proposal.json").read_text())] == ["h1", "h2"]


@pytest.mark.parametrize("changes, words", [
    ({"source": "def run(task:"}, "does not parse"),
    ({"source": "import os\n" + H0}, "import of os is not allowed"),
    ({"source": H0 + "x = '\ud800\0'\n"}, "looks right"),              # as � each
    ({"source": ""}, "SYSTEM_PROMPT must be set"),
    ({"source": "#" * 30_000}, "not written: 30,000 bytes"),
    ({"source": "x = " + "(" * 5000}, "does not parse"),
    ({"source": "# mine\n" + H0}, "it is the same program as h0"),
    ({"parent": "h9"}, "its parent 'h9' is no scored candidate of archive/cycle_01"),
    ({"parent": "../cycle_01/h0"}, "is no scored candidate"),
    ({"hypothesis": " "}, "it has no hypothesis"),
    ({"slot": "h2"}, "there is no slot 'h2'"),
    ({"slot": "../h1"}, "there is no slot"),
    ({"slot": "h1.py", "mechanisms": None}, "looks right"),
    ({"mechanisms": "calls_3, careful"}, "looks right"),
    ({"mechanisms": 1}, "mechanisms must be array"),
    ({"mechanisms": [1, "x" * 1000, None, {"a": 2}]}, "looks right"),
    ({"source": None}, "needs source"),
    ({"source": 7}, "source must be string, not int"),
    ({"more": 1}, "no argument 'more'"),
])
def test_a_slot_is_judged_at_once(changes, words, server, place):
    server.script = [say(None, slot(**changes)), say(None, slot()), say(None, FINISH)]
    workplace = place()
    assert hold(workplace)[0].end == "done"
    assert words in answers(server)[0] and "looks right" in answers(server)[1]
    assert sorted(path.name for path in workplace.folder.iterdir()) == [
        "archive", "h1.py", "harness_api.py", "proposal.json", "report.md", "task.md"]


# ---- the working copy, and nothing else ------------------------------------------------------------------------------


@pytest.fixture
def bench(place) -> Workbench:
    workplace = place()
    (workplace.folder / "link").symlink_to("/etc")
    (workplace.folder / "archive" / "link.txt").symlink_to("/etc/hostname")
    return Workbench(workplace.folder, ("h1",))


@pytest.mark.parametrize("path", ["/etc/passwd", "..", "../transcript.txt", "archive/../../x", "link", "link/hostname", "archive/link.txt",
                                  "none", "a\0b", "x" * 5000, "\ud800", "archive/cycle_01/h0/harness.py/x"])
def test_paths_outside_are_refused(path, bench):
    for name, given in (("list_files", {}), ("read_file", {}), ("grep", {"pattern": "root"})):
        text, done = bench.run(name, {"path": path, **given})
        assert text.startswith("Error: ") and done is None and len(text) < 400
        assert "root:" not in text


def test_links_are_not_shown(bench):
    assert "link" not in bench.run("list_files", {})[0] + bench.run("list_files", {"path": "archive"})[0]
    assert bench.run("grep", {"pattern": Path("/etc/hostname").read_text().strip() or "x"})[0].startswith("(0 lines")


def test_a_long_line_is_read_in_parts(bench):
    path, whole, at = "archive/cycle_01/h0/traces.jsonl", "", 0
    line = (bench.folder / path).read_text().splitlines()[2]
    while at is not None:
        text, _ = bench.run("read_file", {"path": path, "start_line": 3, "n_lines": 1, "start_char": at})
        head, _, part = text.partition("\n")
        whole += part
        more = re.search(r"go on with start_char (\d+)", head)
        assert len(text) <= agent_tools.MAX_ANSWER and head.startswith(f"(line 3 of 6, characters {at} to ")
        at = int(more[1]) if more else None
    assert whole == line and len(line) > 20_000
    several, _ = bench.run("read_file", {"path": path, "n_lines": "5"})
    assert several.startswith("(lines 1 to 5 of 6)") and f"({len(line)} characters in this line)" in several
    many, _ = bench.run("read_file", {"path": "harness_api.py", "n_lines": 10_000})
    assert many.startswith("(lines 1 to 200 of 500)\n1: x = 1\n")
    assert bench.run("read_file", {"path": path, "start_line": 7})[0] == "(the file has no line 7)"


@pytest.mark.parametrize("name, given", [
    ("read_file", {"path": "task.md", "start_line": 0}), ("read_file", {"path": "task.md", "n_lines": -1}), ("read_file", {"path": "archive"}),
    ("read_file", {"path": "task.md", "start_line": 10 ** 30}), ("read_file", {"path": "task.md", "n_lines": True}), ("read_file", {}),
    ("read_file", {"path": ["task.md"]}), ("read_file", {"path": "task.md", "n_lines": float("nan")}), ("list_files", {"path": "task.md"}),
    ("grep", {"pattern": "|"}), ("grep", {"pattern": "x" * 2000}), ("grep", {"pattern": "x", "max_hits": 0}), ("run", {}), ("find", {"path": "."}),
    ("__init__", {}), ("bash", {"command": "ls"}), ("", {}), ("list_files", []), ("list_files", None), ("list_files", 3),
])
def test_bad_calls_are_answered_in_words(name, given, bench):
    text, done = bench.run(name, given)
    assert text.startswith("Error: ") and done is None and len(text) < 300


def test_grep_takes_no_expression_and_is_bounded(bench, monkeypatch):
    (bench.folder / "a.txt").write_text("(a+)+$ " + "a" * 100_000 + "\n" + "needle\n" * 5000)
    assert bench.run("grep", {"pattern": "(a+)+$", "path": "a.txt"})[0].startswith("(1 lines, 1 shown)")
    text, _ = bench.run("grep", {"pattern": "NEEDLE", "path": "a.txt", "max_hits": 10 ** 9})
    assert text.startswith("(5000 lines, 100 shown)") and len(text) < agent_tools.MAX_ANSWER
    monkeypatch.setattr(agent_tools, "MAX_GREP_BYTES", 1000)
    assert "1 files were not searched" in bench.run("grep", {"pattern": "needle", "path": "a.txt"})[0]


# ---- a model that misbehaves ------------------------------------------------------------------------------------------


def with_calls(calls) -> dict:
    reply = say(None)
    reply["choices"][0]["message"]["tool_calls"] = calls
    return reply


CALL = {"id": "x", "type": "function", "function": {"name": "list_files", "arguments": "{}"}}
ODD = {
    "arguments that are no JSON": (say(None, ("read_file", '{"path": ')), "no JSON object"),
    "deep arguments": (say(None, ("read_file", "[" * 100_000)), "no JSON object"),
    "a list as arguments": (say(None, ("read_file", "[1]")), "no JSON object"),
    "NaN as arguments": (say(None, ("read_file", '{"path": NaN}')), "path must be string"),
    "a number of 5,000 digits": (say(None, ("read_file", '{"path": ' + "9" * 5000 + "}")), "no JSON object"),
    "a lone surrogate and NUL": (say("\ud800\0", ("read_file", '{"path": "\\ud800\\u0000"}')), "there is no"),
    "an unknown tool": (say(None, ("bash", {"command": "ls"})), "there is no tool 'bash'"),
    "a tool without a name": (with_calls([{"id": "x", "function": {"arguments": "{}"}}]), "there is no tool ''"),
    "calls that are no calls": (with_calls([None, 3, [], {"function": 7}]), "there is no tool ''"),
    "calls that are no list": (with_calls({"a": 1}), "Not written yet"),
    "arguments as an object": (with_calls([{"function": {"name": "list_files", "arguments": {"path": "."}}}]), "task.md  30"),
    "no arguments": (with_calls([{"function": {"name": "list_files", "arguments": ""}}]), "task.md  30"),
    "the same id twice": (with_calls([CALL, CALL]), "task.md  30"),
    "a hundred calls": (with_calls([CALL] * 100), "84 further calls of this reply were not done"),
    "nothing": (say(None), "Not written yet"),
    "an empty text": (say(""), "Not written yet"),
    "content that is a number": (say(7), "Not written yet"),
    "content in parts": (say([{"type": "text", "text": "Hi"}, {"text": None}, 3]), "Not written yet"),
    "a megabyte of text": (say("x" * 1_000_000), "Not written yet"),
    "a megabyte of source": (say(None, slot(source="x" * 1_000_000)), "1,000,000 bytes"),
    "a reply that was cut": (say(None, ("write_slot", '{"slot": "h1", "sou'), finish="length"), "Your reply was cut"),
    "a call in the text": (say('<tool_call>{"name": "list_files", "arguments": {}}</tool_call>'), "task.md  30"),
    "a call in Qwen3.5's form": (say("<tool_call><function=read_file><parameter=path>\ntask.md\n</parameter><parameter=n_lines>1"
                                     "</parameter></function></tool_call>"), "# Your task"),
    "a bad call in the text": (say("<tool_call>{list_files}</tool_call>"), "holds one JSON object"),
    "many tags": (say("<tool_call>" * 9000), "holds one JSON object"),
    "many parameters": (say("<tool_call><function=a>" + "<parameter=a>" * 7000 + "</function></tool_call>"), "holds one JSON object"),
    "thinking": (say("<think>" + "<tool_call>" * 50_000 + "</think>Hm."), "Not written yet"),
    "odd reasoning": (say(None, ("list_files", {}), reasoning_details=[float("nan")], reasoning_content={"a": "b" * 99_999}), "task.md  30"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_model_gets_wrong_is_told_to_it(name, server, place):
    reply, words = ODD[name]
    server.script = [reply, say(None, slot()), say(None, FINISH)]
    workplace = place()
    started = time.monotonic()
    session, _ = hold(workplace)
    assert (session.end, len(server.bodies)) == ("done", 3) and time.monotonic() - started < 3
    assert any(words in text for text in answers(server))
    for body in server.bodies:
        assert len(json.dumps(body)) < 60_000
        assert body["messages"][-1]["role"] in ("user", "tool")
        for message in body["messages"]:
            assert message["content"] or message["tool_calls"]
            for call in message.get("tool_calls") or []:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert workplace.transcript.stat().st_size < 100_000


def test_reasoning_is_given_back_where_it_came(server, place):
    server.script = [say(None, ("list_files", {}), reasoning_content="I think.", reasoning_details=[{"a": 1}]), say(None, slot()), say(None, FINISH)]
    hold(place())
    message = server.bodies[-1]["messages"][2]
    assert (message["reasoning_content"], message["reasoning_details"]) == ("I think.", [{"a": 1}])


def test_a_model_that_does_nothing_useful_is_left(server, place):
    server.script = [say("Hm.")] * 50
    session, _ = hold(place())
    assert session.end == "failed" and "6 replies in a row" in session.words and len(server.bodies) == 6
    server.script, server.bodies = [say(None, slot(), ("read_file", {})), *[say("", ("bash", {}))] * 50], []
    session, _ = hold(place(slots=("h1", "h2")))                        # what is written counts
    assert session.end == "done" and "6 replies in a row" in session.words and len(server.bodies) == 7


def test_turns_are_limited(server, place, monkeypatch):
    monkeypatch.setattr(agent_api, "MAX_TURNS", 12)
    server.script = [say(None, ("list_files", {}))] * 50
    session, _ = hold(place())
    assert (session.end, session.words, len(server.bodies)) == ("failed", "it took 12 turns", 12)
    assert "turns are left" not in answers(server)[5] and "(1 turns are left. Write the slots.)" in answers(server)[10]
    monkeypatch.setattr(agent_api, "MAX_OUTPUT", 1000)
    server.script = [say("x" * 600, ("list_files", {}))] * 50
    assert hold(place())[0].words == "it said more than 1,000 characters"


def test_a_long_history_is_shortened(server, place, monkeypatch):
    """What is dropped is said to be, every call keeps its answer, and the newest answer is whole."""
    monkeypatch.setattr(agent_api, "HISTORY", 40_000)
    read = [say(f"Part {i}.", ("read_file", {"path": "archive/cycle_01/h0/traces.jsonl", "start_line": i % 6 + 1, "n_lines": 1,
                                             "start_char": i * 7})) for i in range(140)]
    server.script = [say(None, slot()), *read, say(None, FINISH)]
    assert hold(place())[0].end == "done"
    sizes = [len(json.dumps(body["messages"], ensure_ascii=False)) for body in server.bodies]
    assert len(sizes) == 142 and max(sizes) < 45_000 and max(sizes[1:]) > 30_000
    for body in server.bodies[1:]:
        messages = body["messages"]
        called = [call["id"] for message in messages for call in message.get("tool_calls") or []]
        assert called == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert "was dropped to make room" not in messages[-1]["content"]
    assert "was dropped to make room" in server.bodies[-1]["messages"][3]["content"]


def test_answers_of_one_reply_share_the_room(server, place, monkeypatch):
    monkeypatch.setattr(agent_api, "HISTORY", 40_000)
    read = ("read_file", {"path": "archive/cycle_01/h0/traces.jsonl", "n_lines": 1})
    server.script = [say(None, read, read, read, ("list_files", {})), *GOOD]
    assert hold(place())[0].end == "done"
    assert [len(text) > 10_000 for text in answers(server)[:4]] == [True, False, False, False]
    assert answers(server)[1].startswith("(No room for this answer") and "task.md" in answers(server)[3]


def test_a_context_that_is_too_small(server, place):
    """Of a server that says so the history is halved until it fits; if nothing helps, its words are the session's."""
    def small(reply):
        return lambda body: reply if len(json.dumps(body)) < 20_000 else (
            400, {}, "This model's maximum context length is 4096 tokens. However, you requested 5000")

    read = ("read_file", {"path": "archive/cycle_01/h0/traces.jsonl", "n_lines": 1})
    server.script = [small(say(None, read)) for _ in range(30)]
    server.script[9:] = [small(say(None, slot())), small(say(None, FINISH)), *[small(say(None, FINISH))] * 9]
    assert hold(place())[0].end == "done"
    server.script = [(400, {}, "maximum context length")] * 9
    session, _ = hold(place())
    assert session.end == "failed" and "maximum context length" in session.words


# ---- a server without tools or seeds --------------------------------------------------------------------------------


def no_tools(reply):
    """vLLM without --enable-auto-tool-choice; and one that knows no seed."""
    def answer(body):
        if "seed" in body:
            return 422, {}, '{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}'
        if "tools" in body:
            return 400, {}, '{"message": "\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser"}'
        return reply
    return answer


def test_tools_in_the_text(server, place):
    def call(name, given):
        return "<tool_call>\n" + json.dumps({"name": name, "arguments": given}) + "\n</tool_call>"

    server.script = [no_tools(None), no_tools(None), no_tools(say("<think>Hm, <tool_call>?</think>" + call("list_files", {}))),
                     no_tools(say(call(*slot()) + call("grep", {"pattern": "MAX_CALLS"}))), no_tools(say(call(*FINISH)))]
    session, pauses = hold(place())
    assert (session.end, session.words, pauses, len(server.bodies)) == ("done", "I looked at h0.", [], 5)
    assert session.notes == ("the server takes no seed", "the server takes no tools")
    last = server.bodies[-1]
    assert set(last) == {"model", "messages"} and '"name": "write_slot"' in last["messages"][0]["content"]
    assert [message["role"] for message in last["messages"]] == ["system", "user"] + ["assistant", "user"] * 2
    assert last["messages"][-1]["content"].count("<tool_response>") == 2
    assert all("tool_calls" not in message for message in last["messages"])


def test_llama_cpp_without_jinja(server, place):
    server.script = [(500, {}, "tools param requires --jinja flag"), say("<tool_call>" + json.dumps({"name": "write_slot", "arguments": slot()[1]})
                                                                         + "</tool_call>")]
    session, pauses = hold(place())
    assert session.end == "done" and pauses == [] and "tools" not in server.bodies[1]


# ---- a server that fails --------------------------------------------------------------------------------------------

GOOD = [say(None, slot()), say(None, FINISH)]
GARBAGE = [b"", b"[" * 100_000, b"null", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b'{"choices": "x"}', b"\xff\xfe",
           b"<html>", b'{"choices": [{"message": {}}', b'{"error": {"code": 429}}', b'{"choices": {"0": 1}}', b'"x"', b"\0"]


@pytest.mark.parametrize("fault", [(429, {}, "slow down"), (500, {}, ""), (502, {}, "<html>"), (503, {}, "\x00"), (529, {}, "overloaded"),
                                   "reset", "short", *GARBAGE], ids=lambda fault: str(fault)[:24])
def test_a_failed_call_is_tried_again(fault, server, place):
    server.script = [fault, fault, GOOD[0], fault, GOOD[1]]
    session, pauses = hold(place())
    assert (session.end, len(server.bodies)) == ("done", 5) and pauses == [2, 4, 2]
    assert len({json.dumps(body["messages"]) for body in server.bodies}) == 2
    assert session.prompt_tok == 200
    lost = not isinstance(fault, tuple)
    assert session.notes == (("3 calls brought no reply; what they cost is not in the sums",) if lost else ())


@pytest.mark.parametrize("asked, wait", [("7", 7), ("0.5", 2), ("100000", 120), ("nan", 2), ("-5", 2), ("Wed, 21 Oct 2026 07:28:00 GMT", 2),
                                         ("9" * 500, 2)])
def test_a_server_says_how_long_to_wait(asked, wait, server, place):
    server.script = [(429, {"Retry-After": asked}, "slow down"), *GOOD]
    assert hold(place())[1] == [wait]


def test_in_the_end_it_is_transient(server, place):
    server.script = [(503, {}, f"down for a while, {KEY}")] * 9
    session, pauses = hold(place())
    assert (session.end, pauses, len(server.bodies)) == ("transient", [2, 4, 8, 16], 5)
    assert "no reply in 5 tries" in session.words and "answered 503: down for a while, [WHALE_PROPOSER_KEY]" in session.words
    workplace = place()
    nowhere = replace(workplace, settings=replace(workplace.settings, proposer_url=f"http://127.0.0.1:{free_port()}"))
    session, _ = hold(nowhere)
    assert session.end == "transient" and "is the server there?" in session.words
    assert (session.prompt_tok, session.usd) == (None, None)
    server.script = [say(None, slot()), *["reset"] * 5]                 # what was written counts all the same
    session, _ = hold(place())
    assert session.end == "transient" and session.prompt_tok == 100 and (workplace.folder / "h1.py").exists()


@pytest.mark.parametrize("status, words", [(400, "bad request"), (401, "WHALE_PROPOSER_KEY"), (402, "no credit"), (403, "WHALE_PROPOSER_KEY"),
                                           (404, "--proposer-model"), (302, "redirects are not followed"), (307, "redirects")])
def test_what_is_refused_is_not_asked_again(status, words, server, place):
    server.script = [(status, {"Location": f"{server.url}/v1/chat/completions"}, f"bad request {KEY} " + "x" * 100_000)] * 2
    workplace = place()
    session, pauses = hold(workplace)
    assert (session.end, pauses, len(server.bodies)) == ("failed", [], 1)
    assert words in session.words and len(session.words) < 1000
    assert KEY not in repr(session) + repr(workplace) + workplace.transcript.read_text()


@pytest.mark.parametrize("fault", ["hang", "drip", "drip headers"])
def test_a_server_that_hangs_or_drips(fault, server, place, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "CALL_S", 0.3)
    server.script = [fault, *GOOD]
    started = time.monotonic()
    session, _ = hold(place())
    assert session.end == "done" and time.monotonic() - started < 2
    monkeypatch.setattr(chat_endpoint, "CALL_S", 900)
    server.script = [say(None, slot("h1")), fault, fault]
    started = time.monotonic()
    session, _ = hold(place(slots=("h1", "h2"), proposer_s=0.6))                       # the wall limit holds
    assert session.end == "done" and "time is up" in session.words and 0.5 < session.seconds < 2
    assert time.monotonic() - started < 2


def test_a_body_without_end(server, place, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "MAX_BODY_BYTES", 1000)
    server.script = [say("x" * 100_000)] * 5
    session, _ = hold(place())
    assert session.end == "transient" and "too much" in session.words


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage, price, tok, usd", [
    ({"prompt_tokens": 1000, "completion_tokens": 100}, "3,15", (2000, 200), 0.009),
    ({"prompt_tokens": 1000, "completion_tokens": 100}, "", (2000, 200), None),
    ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": 0.25}, "3,15", (2000, 200), 0.5),       # its own word counts
    ({"cost": 0.25}, "3,15", (None, None), 0.5),
    ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": -1}, "", (2000, 200), None),
    ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": float("nan")}, "", (2000, 200), None),
    ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": float("inf")}, "3,15", (2000, 200), 0.009),
    ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": "0"}, "", (2000, 200), None),
    ({"prompt_tokens": -1, "completion_tokens": 100}, "3,15", (None, 200), None),
    ({"prompt_tokens": float("nan"), "completion_tokens": True}, "3,15", (None, None), None),
    ({"prompt_tokens": "7", "completion_tokens": 1e300}, "3,15", (None, None), None),
    ({}, "3,15", (None, None), None), ([], "", (None, None), None), ("x", "", (None, None), None),
    ({"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}, "", (0, 0), 0.0),
])
def test_cost(usage, price, tok, usd, server, place):
    server.script = [say(None, slot(), usage=usage), say(None, FINISH, usage=usage)]
    session, _ = hold(place(proposer_price=price))
    assert (session.prompt_tok, session.completion_tok) == tok
    assert session.usd == (usd if usd is None else pytest.approx(usd))


def test_one_call_that_does_not_say_makes_the_sum_unknown(server, place):
    server.script = [say(None, slot(), usage={"cost": 1}), say(None, FINISH, usage={})]
    session, _ = hold(place())
    assert session.usd is None


def test_the_money_limit_is_not_passed(server, place):
    server.script = [say(None, ("list_files", {}), usage={"cost": 0.3})] * 9
    session, _ = hold(place(usd=1.0))
    assert len(server.bodies) == 3 and session.usd == pytest.approx(0.9) and session.end == "failed"
    assert "$0.9 of its $1 are spent" in session.words
    server.script, server.bodies = [say(None, slot())] * 9, []
    session, _ = hold(place(usd=1.0))                           # what cannot be held is said after one call
    assert len(server.bodies) == 1 and session.end == "failed" and "--proposer-price" in session.words


# ---- the key, and settings --------------------------------------------------------------------------------------------


def test_the_key_goes_into_one_header_only(server, place, monkeypatch):
    server.script = [say(f"You are {KEY}", ("grep", {"pattern": KEY})), *GOOD]
    workplace = place()
    session, _ = hold(workplace)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    said = repr(session) + workplace.transcript.read_text() + json.dumps(server.bodies) + repr(workplace)
    assert KEY not in said and "You are [WHALE_PROPOSER_KEY]" in said
    assert not any(KEY.encode() in path.read_bytes() for path in workplace.folder.rglob("*") if path.is_file())
    monkeypatch.delenv(chat_endpoint.KEY)
    server.script, server.headers = list(GOOD), []
    hold(place())
    assert all("Authorization" not in headers for headers in server.headers)
    monkeypatch.setenv(chat_endpoint.KEY, "EMPTY")                      # as one says to vLLM; no secret
    server.script = [say("EMPTY", ("list_files", {})), *GOOD]
    hold(place())
    assert server.bodies[-1]["messages"][2]["content"] == "EMPTY"


def test_a_proxy_is_no_way_to_this_machine(server, place, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    server.script = list(GOOD)
    assert hold(place())[0].end == "done"


@pytest.mark.parametrize("changes, words", [
    ({"proposer_url": ""}, "must be like http://localhost:8000/v1"),
    ({"proposer_url": "localhost:8000"}, "must be like"),
    ({"proposer_url": "file:///etc/passwd"}, "must be like"),
    ({"proposer_url": "http://[::1"}, "must be like"),
    ({"proposer_url": "http://a:99999/v1"}, "must be like"),
    ({"proposer_url": "http://me:secret@localhost:8000"}, "no name or password"),
    ({"proposer_price": "3"}, "--proposer-price"), ({"proposer_price": "nan,1"}, "--proposer-price"), ({"proposer_price": "-1,1"}, "--proposer-price"),
])
def test_settings_that_cannot_be(changes, words, server):
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        check_settings_api(replace(ProposerConfig(proposer_url=server.url), **changes))
    assert "secret" not in str(refused.value)


def test_settings_are_asked_of_the_server(server, monkeypatch):
    settings = ProposerConfig(proposer_url=server.url)
    assert check_settings_api(settings).proposer_model == "scripted-1"
    assert check_settings_api(replace(settings, proposer_url=server.url + "/v1/")).proposer_model == "scripted-1"
    server.served = ["a", "b"]
    with pytest.raises(UsageError, match="2 models, name one: a, b"):
        check_settings_api(settings)
    named = replace(settings, proposer_model="c")
    assert check_settings_api(named) == named
    server.served = 404                                             # some have no such list
    assert check_settings_api(named) == named
    for status, words in ((404, "404"), (401, chat_endpoint.KEY)):
        server.served = status
        with pytest.raises(UsageError, match=words):
            check_settings_api(settings if status == 404 else named)
    with pytest.raises(UsageError, match="is the server there"):
        check_settings_api(replace(named, proposer_url=f"http://127.0.0.1:{free_port()}"))
    monkeypatch.setenv(chat_endpoint.KEY, "abc\n")
    with pytest.raises(UsageError, match="line end") as refused:
        check_settings_api(named)
    assert "abc" not in str(refused.value)


# ---- whole searches -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(MODEL, n_rows=32, max_len=1024)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(max_jobs=2) as box:
        yield box


def play(body: dict) -> dict:
    """A small deterministic model: lists, reads, greps, writes its slots, ends; what it writes follows from the seed."""
    n = sum(message["role"] == "assistant" for message in body["messages"])
    archive, slots = re.search(r"search is (\S+)/:.*Your slots: (.*?)\. Write", body["messages"][1]["content"], re.DOTALL).groups()
    steps = [("list_files", {"path": archive}), ("read_file", {"path": f"{archive}/h0/traces.jsonl", "n_lines": 1}),
             ("read_file", {"path": f"{archive}/h0/traces.jsonl"}), ("read_file", {"path": f"{archive}/history.jsonl"}),
             ("grep", {"pattern": "call_limit|wrong_answer|answer", "max_hits": 100})]
    if n < len(steps):
        return say("I look.", steps[n])
    if n == len(steps):
        return say(None, *[slot(name, source=H0 + f"\nNOTE_{name} = {body['seed']}\n") for name in slots.split(", ")])
    return say(None, FINISH)


def search_by(server, folder, engine, sandbox, **changes):
    settings = ProposerConfig(proposer="api", proposer_url=server.url, proposer_price="1,1")
    return make_search(folder, engine, sandbox, **(SMALL | changes),
                       proposer=partial(propose_by_agent, settings=settings, run_agent=partial(run_api_agent, pause=lambda s: None), pause=lambda s: None))


def test_a_whole_search(server, tmp_path, engine, sandbox):
    server.script = [play] * 100
    first = search_by(server, tmp_path / "a" / "cycle_01", engine, sandbox)
    for _ in range(3):
        first.iterate()
    rows = (first.folder / "history.jsonl").read_text()
    assert [json.loads(row)["refused"] for row in rows.splitlines()] == [""] * 5
    assert [json.loads(row)["parent"] for row in rows.splitlines()] == ["", "h0", "h0", "h0", "h0"]
    assert (first.bill.proposer_calls, first.bill.proposer_tok, first.bill.proposer_unpriced) == (1, 770, 0)
    assert first.bill.proposer_usd == pytest.approx(770e-6)
    n_asked = len(server.bodies)
    assert n_asked == 14
    again = search_by(server, tmp_path / "b" / "cycle_01", engine, sandbox)
    for _ in range(3):
        again.iterate()
    assert (again.folder / "history.jsonl").read_text() == rows
    assert [body["messages"] for body in server.bodies[:n_asked]] == [body["messages"] for body in server.bodies[n_asked:]]
    n_asked = len(server.bodies)
    resumed = search_by(server, tmp_path / "b" / "cycle_01", engine, sandbox, n_done=2)
    resumed.iterate()
    assert (resumed.folder / "history.jsonl").read_text() == rows and len(server.bodies) == n_asked


def test_killed_after_its_session_it_is_not_asked_again(server, tmp_path, engine, sandbox, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    server.script = [play] * 100
    search = search_by(server, tmp_path / "cycle_01", engine, sandbox)
    search.iterate()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(hs.Search, "_write", die)                     # the session has ended, its marker is not written
        search.iterate()
    n_asked = len(server.bodies)
    assert n_asked == 7
    resumed = search_by(server, tmp_path / "cycle_01", engine, sandbox)
    resumed.iterate()
    assert [outcome.candidate.name for outcome in resumed.iterate()] == ["h1", "h2"] and len(server.bodies) == n_asked


def test_a_server_that_stays_down_stops_the_search_in_its_words(server, tmp_path, engine, sandbox):
    server.script = [(401, {}, "no such key")] * 100
    search = search_by(server, tmp_path / "cycle_01", engine, sandbox)
    search.iterate()
    with pytest.raises(ProposerFailed, match="401: no such key"):
        search.iterate()
    assert len(server.bodies) == 3 and not (search.folder / "iteration_02.json").exists()


def test_canary(server, tmp_path, engine, sandbox):
    """With uuids as references, nothing that the server receives, nor what is kept of a session, holds one."""
    tasks = [replace(task, answer=str(uuid.UUID(int=random.Random(task.id).getrandbits(128)))) for task in TASKS[:4]]
    server.script = [play] * 100
    search = search_by(server, tmp_path / "cycle_01", engine, sandbox, tasks=tasks, forbidden=ForbiddenText(tasks))
    search.iterate()
    search.iterate()
    content = json.dumps(server.bodies) + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert tasks[0].fields["question"] in json.dumps(server.bodies)            # traces were read
    for task in tasks:
        for secret in (task.answer, task.answer.replace("-", ""), task.answer[:8]):
            assert secret not in content

