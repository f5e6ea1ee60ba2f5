"""Keys stay in the environment, nothing that lies in a folder is run, a hub model is one commit, and ports are this machine's.

Whole small runs with planted keys, against servers that say them back; then every byte that was written or printed is searched.
"""

import ast
import contextlib
import html
import json
import os
import pickle
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

import huggingface_hub
import numpy as np
import pytest
from jinja2 import TemplateError

import agent_cmd
import keys
import retriever
import search_index
import server_engine
from chat_endpoint import check_settings_api
from cli import build_parser
from config import PRESETS, ROOT, Config, check_urls, pin_model, train_config
from engine import ModelError, find_commit, find_tokenizer, load_generation_config, load_model, load_tokenizer
from rft import CheckpointError, Trainer
from rollout import Prompter
from files import UsageError, read_sealed, write_sealed
from search_answer import Judge
from search_index import Bm25Index, Encoder, RetrieverError
from server_engine import ServerEngine
from servers import PlainServer
from sessions import ProposerConfig
from small import DATA, SMALL, call, call_json
from track import TrackerError, as_tracker_error
from vllm_engine import VllmEngine
from warden import Blotter

MODEL = ROOT / "embedded" / "model"
SEARCH = ROOT / "embedded" / "search"
# each unlike all others, and with the characters that quoting changes
KEYS = {name: f"canary/{name[::-1].lower()}+{i:02d}=" for i, name in enumerate((
    "WHALE_JUDGE_KEY", "WHALE_PROPOSER_KEY", "WHALE_ENGINE_KEY", "HF_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "DB_PASSWORD", "PASSED_TOKEN"))}
NEEDLES = {name: tuple({form.encode() for form in (key, quote(key, safe=""), key.replace("/", r"\/"))}) for name, key in KEYS.items()}


def found_in(content: bytes) -> set[str]:
    return {name for name, forms in NEEDLES.items() if any(form in content for form in forms)}


def found_below(folder: Path) -> dict[str, set[str]]:
    """path -> the keys that a file, its name or a link's target holds."""
    found = {}
    for path in folder.rglob("*"):
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        if names := found_in(content + os.fsencode(path.name)):
            found[str(path.relative_to(folder))] = names
    return found


class Echo(ThreadingHTTPServer):
    """Answers every request with `status` and what `body` makes of the Authorization header, which a proxy may say back."""

    daemon_threads = True

    def __init__(self, status: int = 401, body=lambda given, asked: {"error": f"no such key: {given}"}, headers: dict | None = None):
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.status, self.body, self.headers, self.given = status, body, headers or {}, []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class EchoHandler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = self.headers.get("Authorization", "")
        self.server.given.append(given)
        content = self.server.body(given, json.loads(asked or b"{}"))
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(self.server.status)
        for name, value in {"Content-Length": str(len(content)), "X-Given": given, **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET


@pytest.fixture
def serve():
    servers = []

    def start(*args, **kwargs) -> Echo:
        servers.append(Echo(*args, **kwargs))
        return servers[-1]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def planted(monkeypatch):
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


@pytest.fixture(scope="module")
def policy():
    server = PlainServer()
    server.key = KEYS["WHALE_ENGINE_KEY"]
    yield server
    server.shutdown()


# ---- whole runs -----------------------------------------------------------------------------------------------------


def say(content: str, *calls: tuple[str, dict]) -> dict:
    called = [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
              for i, (name, given) in enumerate(calls)]
    return {"model": "scripted", "choices": [{"message": {"role": "assistant", "content": content, "tool_calls": called},
                                              "finish_reason": "stop"}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}


def propose(h0: str):
    """A proposer that writes the key that it is given wherever it can: words, the harness, its hypothesis, its report."""
    def answer(given: str, asked: dict) -> dict:
        if "messages" not in asked:
            return {"data": [{"id": "scripted"}]}
        slot = re.search(r"Your slots: (\w+)", json.dumps(asked["messages"]))[1]
        source = f"# {given}\n" + h0.replace("MAX_CALLS = 2", "MAX_CALLS = 3")
        return say(f"I was given {given}", ("write_slot", {
            "slot": slot, "source": source, "parent": "h0", "hypothesis": f"{given} helps", "mechanisms": [given]}),
            ("finish", {"report": given}))
    return answer


WANDB = """
import json, os, sys
class Run:
    def define_metric(self, *args, **kwargs): pass
    def finish(self): pass
    def log(self, row):
        if row["training_rollouts"]:
            raise RuntimeError("permission denied for api_key " + os.environ["WANDB_API_KEY"])
        print(row, file=open(os.path.join(folder, "offline"), "a"))
def init(**settings):
    global folder
    folder = settings["dir"]
    print(settings, sys.argv, file=open(os.path.join(folder, "offline"), "a"))
    return Run()
"""
STARTS = """
import os, sys
def note(event, args):                  # each program that is started: some live too short to be watched
    if event == "subprocess.Popen":
        with open({file!r}, "a") as file:
            print(args[1], dict(os.environ if args[3] is None else args[3]), file=file)
sys.addaudithook(note)
"""
AGENT = """
import json, os, sys, base64
slots = os.environ["WHALE_SLOTS"].split()
seen = "\\n".join(f"{name}={value}" for name, value in os.environ.items())
for pid in filter(str.isdigit, os.listdir("/proc")):            # whoever started it, and whatever else this user runs
    for kind in ("environ", "cmdline"):
        try:
            seen += open(f"/proc/{pid}/{kind}").read()
        except OSError:
            pass
print(seen)
print(seen, file=sys.stderr)
key = os.environ["PASSED_TOKEN"]
for piece in (key[:5], key[5:9], key[9:], "\\n"):
    sys.stdout.write(piece)
    sys.stdout.flush()
print(json.dumps({"usd": 0.0, "model": key, "version": key, "type": "text", "part": {"text": key}}))
h0 = [line for line in open("archive/cycle_01/h0/harness.py").read().splitlines()]
for slot in slots:
    open(slot + ".py", "w").write(f"# {key}\\n" + "\\n".join(h0).replace("MAX_CALLS = 2", "MAX_CALLS = 3"))
json.dump([{"slot": slot, "parent": "h0", "hypothesis": key, "mechanisms": [key]} for slot in slots], open("proposal.json", "w"))
open("report.md", "w").write(seen)
open("stray-" + key.replace("/", "-"), "w").write(seen)
"""


class Watch(threading.Thread):
    """Which keys the environment and the words of each process below `root` held, while it lived."""

    def __init__(self, root: int):
        super().__init__(daemon=True)
        self.root, self.stopped, self.held, self.programs = root, threading.Event(), {}, set()
        self.start()

    def run(self) -> None:
        own = Path(f"/proc/{self.root}/cmdline").read_bytes()
        while not self.stopped.wait(0.01):
            parents = {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    parents[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    continue
            below, before = {self.root}, set()
            while below != before:
                before, below = below, below | {pid for pid, parent in parents.items() if parent in below}
            for pid in below:
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    environment = Path(f"/proc/{pid}/environ").read_bytes()
                except OSError:
                    continue
                program = words.replace(b"\0", b" ")[:200].decode(errors="replace")
                self.programs.add(program)
                if names := found_in(words):
                    self.held.setdefault(f"words of {program}", set()).update(names)
                if pid != self.root and words != own and (names := found_in(environment)):      # its own: forked, before exec
                    self.held.setdefault(program, set()).update(names)


def run_watched(tmp_path: Path, *args) -> tuple[int, str, Watch, Path]:
    """The command with all keys planted, HOME and temporary files in one folder -> exit code, what it printed, its processes, and
    the folder of all that it can have written. There, `started` has the environment of each program that it started."""
    world = tmp_path / "world"
    for name in ("home", "tmp", "stub"):
        (world / name).mkdir(parents=True, exist_ok=True)
    (world / "stub" / "wandb.py").write_text(WANDB)
    (world / "stub" / "sitecustomize.py").write_text(STARTS.format(file=str(world / "started")))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), *map(str, args), "--out", str(world / "runs"), "--name", "run"], text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=world,
        env=os.environ | KEYS | {"HOME": str(world / "home"), "TMPDIR": str(world / "tmp"), "PYTHONPATH": str(world / "stub"),
                                 "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    watch = Watch(process.pid)
    printed = process.communicate(timeout=600)[0]
    watch.stopped.set()
    watch.join()
    return process.returncode, printed, watch, world


FEW = ["--method", "harness", "--one-search", "true", "--cycles", "1", "--iterations", "2", "--candidates", "1", "--n-eval", "1"]


def test_a_run_that_uses_every_server(tmp_path, serve, policy):
    """Judge, proposer and engine, each with its key, and each (but the engine, whose words are a model's) says it back."""
    judge = serve(200, lambda given, asked: {"choices": [{"message": {"content": f"VERDICT: INCORRECT\n{given}"}}]})
    proposer = serve(200, propose((ROOT / "harnesses/h0_search.py").read_text()))
    code, printed, watch, world = run_watched(
        tmp_path, "search", *FEW, "--train", f"{SEARCH}/train.jsonl[:64]", "--harness-set", f"{SEARCH}/harness.jsonl[:6]",
        "--test", f"{SEARCH}/test.jsonl[:6]", "--engine", "server", "--urls", policy.url, "--model", MODEL, "--max-len", 512,
        "--judge-url", judge.url, "--judge-model", "j", "--proposer", "api", "--proposer-url", proposer.url, "--track", "wandb")
    run = world / "runs" / "run"
    assert code == 0, printed
    assert set(judge.given) == {f"Bearer {KEYS['WHALE_JUDGE_KEY']}"} and set(proposer.given) == {f"Bearer {KEYS['WHALE_PROPOSER_KEY']}"}
    assert found_in(printed.encode()) == set() and watch.held == {} and found_below(world) == {}
    assert any("jail.py" in program for program in watch.programs)
    started = (world / "started").read_text()
    assert all(f"['{program}'" in started for program in ("git", "rm", "chmod", "fc-list")) and "jail.py" in started
    source = (run / "harness/cycle_01/h1/harness.py").read_text()
    assert "[WHALE_PROPOSER_KEY]" in source and "MAX_CALLS = 3" in source                      # it was there to be found
    assert "tracking ends here: the tracker failed: RuntimeError: permission denied for api_key [WANDB_API_KEY]" in printed
    assert "'judge_url'" in (run / "offline").read_text()
    assert call("report", run)[0] == 0 and found_below(world) == {}


def test_an_agent_that_looks_for_keys(tmp_path, planted):
    """It sees the one that --proposer-env names, which is blotted out of all that is kept of it, and no other."""
    (tmp_path / "agent.py").write_text(AGENT)
    code, printed, watch, world = run_watched(
        tmp_path, "math", *FEW, *SMALL[10:], "--proposer", "cmd", "--proposer-cmd", f"{Path(sys.executable).resolve()} {tmp_path}/agent.py",       # the environment is in a closed folder
        "--proposer-env", "PASSED_TOKEN", "--model", MODEL)
    run = world / "runs" / "run"
    assert code == 0, printed
    assert found_in(printed.encode()) == set() and found_below(world) == {}
    assert {name for names in watch.held.values() for name in names} <= {"PASSED_TOKEN"}, watch.held
    transcript = (run / "harness/cycle_01/sessions/iteration_02/transcript_1.txt").read_text()
    assert "PASSED_TOKEN=[PASSED_TOKEN]" in transcript and "\n[PASSED_TOKEN]\n" in transcript
    assert not any(f"{name}=" in transcript for name in KEYS if name != "PASSED_TOKEN")
    assert "# [PASSED_TOKEN]" in (run / "harness/cycle_01/h1/harness.py").read_text()
    out = tmp_path / "exported"
    code, output = call("export", run, "--out", out)
    assert code == 0 and found_in(output.encode()) == set() and found_below(out) == {}


def test_help_and_refusals_say_no_key(planted, capsys):
    for args in (["math", "--help"], ["retriever", "--help"], ["math", "--judge-key", "x"], ["math", "--model", "/none"]):
        assert found_in(call(*args)[1].encode() + "".join(capsys.readouterr()).encode()) == set()


# ---- servers that answer badly, URLs and keys that cannot be ----------------------------------------------------------


def ask_engine(url: str, tmp_path) -> str:
    with pytest.raises(ModelError) as failure:
        ServerEngine(str(MODEL), url, tmp_path / "share", n_rows=2, max_len=256)
    return str(failure.value)


def ask_proposer(url: str, tmp_path) -> str:
    with pytest.raises(UsageError) as failure:
        check_settings_api(ProposerConfig(proposer_url=url))
    return str(failure.value)


def ask_judge(url: str, tmp_path) -> str:
    judge = Judge(url, "m", keys.read_key("WHALE_JUDGE_KEY"), tries=1)
    assert judge.same("Capital of France?", ("Paris",), "Lyons") is None
    return judge.last_error


ASKERS = pytest.mark.parametrize("ask", [ask_engine, ask_proposer, ask_judge])


@ASKERS
def test_a_server_that_says_the_key_back(ask, serve, planted, tmp_path):
    """Plain, quoted as in a URL, with JSON's slashes, and as a byte string cut by a limit."""
    for status in (400, 401, 403, 500, 200):
        server = serve(status, lambda given, _: {"error": given, "url": f"/x?key={quote(given, safe='')}", "pad": given * 99})
        said = ask(server.url, tmp_path)
        assert server.given[0].startswith("Bearer canary/") and found_in(said.encode()) == set() and "canary" not in said


def spellings(key: str) -> list[str]:
    """As libraries of servers write a text: URLs with and without the slash, in either case; HTML; JSON with escapes."""
    every = "".join(rf"\u{ord(letter):04x}" for letter in key)
    return [quote(key), quote(key, safe=""), quote(key, safe="").lower(), html.escape(key), every, every.upper().replace(r"\U", r"\u"),
            key.replace("+", r"\u002B").replace("=", r"\u003d"), rf"\u{ord(key[0]):04x}{key[1:-1]}\u{ord(key[-1]):04x}"]


def test_a_key_is_found_however_a_server_spells_it(serve, monkeypatch, tmp_path):
    """In an error, in the name of a model, and in a reply, which becomes a trace."""
    key = "sk-canary/a+b&c=d'e"
    for name in ("WHALE_ENGINE_KEY", "WHALE_PROPOSER_KEY"):
        monkeypatch.setenv(name, key)
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.0)
    answer = {"data": [{"id": "m"}, {"id": "n ###"}], "choices": [{"message": {"content": "It is ###."}, "finish_reason": "stop"}]}
    for n, said in enumerate(spellings(key)):
        server = serve(200, lambda given, asked, said=said: json.dumps(answer).replace("###", said).encode())
        refusals = ask_engine(server.url, tmp_path) + ask_proposer(server.url, tmp_path)
        out = tmp_path / f"out{n}"
        code, output = call("eval", "math", "--engine", "server", "--urls", server.url, "--model", "m", "--test", f"{DATA}/test.jsonl[:1]",
                            "--n", "1", "--out", out)
        assert code == 0, output
        kept = "".join(path.read_text() for path in out.rglob("*.jsonl"))
        assert "It is [WHALE_" in kept and refusals.count("n [WHALE_") == 2
        for text in (kept, refusals, output):
            text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
            assert not any(key in form for form in (text, unquote(text), html.unescape(text))), said


@ASKERS
def test_a_redirect_is_not_followed(ask, serve, planted, tmp_path):
    other = serve(200)
    for status in (301, 302, 307, 308):
        said = ask(serve(status, headers={"Location": f"{other.url}/v1/models"}).url, tmp_path)
        assert found_in(said.encode()) == set() and other.given == []


SECRET = "s3cr3t-in-a-url"
BAD_URLS = [f"http://user:{SECRET}@127.0.0.1:9/v1", f"http://{SECRET}@127.0.0.1:9", f"http://127.0.0.1:9/v1?api_key={SECRET}",
            f"http://127.0.0.1:9/v1#{SECRET}", f"HTTP://user:{SECRET}@127.0.0.1:9", f"http://user:{SECRET}/x@127.0.0.1:9", SECRET,
            f"http://127.0.0.1:{SECRET}/v1", f"http://[{SECRET}/v1", f"ftp://{SECRET}", f"http://127.0.0.1:9\\@{SECRET}/",
            f" http://127.0.0.1:9/ {SECRET}"]
FLAGS = {"--judge-url": ["search", "--judge-model", "j"], "--proposer-url": ["math", "--proposer", "api"],
         "--urls": ["math", "--engine", "server"], "--retriever": ["search"]}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_key_in_a_url_is_refused_and_not_repeated(flag, tmp_path, monkeypatch):
    word, *rest = FLAGS[flag]
    for url in BAD_URLS:
        if flag == "--retriever" and "://" not in url:          # a file
            continue
        for args in ([word, *rest], [word]):                    # also where the flag itself is not for such a run
            code, output = call(*args, flag, url, "--out", tmp_path / "runs")
            assert code in (1, 2) and SECRET not in output and flag in output and "Traceback" not in output, url
    monkeypatch.setenv("MY_TOKEN", "t0ken-from-a-variable")     # in the path, where some proxies want it
    code, output = call(word, *rest, flag, "http://127.0.0.1:9/t0ken-from-a-variable/v1", "--out", tmp_path / "runs")
    assert code in (1, 2) and "t0ken" not in output and flag in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["abcdefgh\n", "abcd\nefgh: x", "abcdéfgh", "abcdefgh\x7f", " abcdefgh", "abcd\udcffefgh"])
def test_a_key_that_no_header_may_hold(key, monkeypatch, tmp_path):
    for name, flag in (("WHALE_JUDGE_KEY", "--judge-url"), ("WHALE_PROPOSER_KEY", "--proposer-url"), ("WHALE_ENGINE_KEY", "--urls")):
        with monkeypatch.context() as patch:
            patch.setenv(name, key)
            word, *rest = FLAGS[flag]
            code, output = call(word, *rest, flag, "http://127.0.0.1:9/v1", "--out", tmp_path)
            assert code in (1, 2) and name in output and "no header may hold" in output and "abcd" not in output


def test_no_key_goes_over_a_network_in_the_clear(planted, monkeypatch):
    for flag, knob, name in (("--urls", "urls", "WHALE_ENGINE_KEY"), ("--judge-url", "judge_url", "WHALE_JUDGE_KEY"),
                             ("--proposer-url", "proposer_url", "WHALE_PROPOSER_KEY")):
        for host in ("192.0.2.1", "example.com", "127.0.0.1.example.com", "localhost.example.com", "[2001:db8::1]"):
            url = f"http://{host}:8000/v1"
            with pytest.raises(UsageError, match=f"{flag} .* the key in {name} would go over the network in the clear.*--waive https"):
                check_urls(Config("search", **{knob: url}))
            check_urls(Config("search", **{knob: url}, waive="https"))
            check_urls(Config("search", **{knob: url.replace("http", "https")}))
        for host in ("127.0.0.1", "127.8.8.8", "localhost", "[::1]"):
            check_urls(Config("search", **{knob: f"http://{host}:8000/v1"}))
        monkeypatch.delenv(name)
        check_urls(Config("search", **{knob: "http://192.0.2.1/v1"}))
    assert Config("math", waive="https,landlock").waived_layers == ("landlock",)


def test_a_secret_is_blotted_out_however_it_comes_in_pieces(planted, monkeypatch):
    monkeypatch.setenv("LONGER_TOKEN", KEYS["HF_TOKEN"] + "-and-more")
    monkeypatch.setenv("PROXY_URL", "http://me:my-pass-word@proxy:8080/")
    monkeypatch.setenv("SOME_KEY", "EMPTY")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-false")
    said = " ".join((*KEYS.values(), *(quote(key, safe="") for key in KEYS.values()), KEYS["HF_TOKEN"] + "-and-more",
                     KEYS["HF_TOKEN"].replace("/", r"\/"), "http://me:my-pass-word@proxy", "EMPTY false-false", KEYS["HF_TOKEN"][:-1]))
    clean = keys.redact(said)
    assert found_in(clean.encode()) == set() and "[LONGER_TOKEN]" in clean and "my-pass-word" not in clean
    assert clean.endswith(f"EMPTY false-false {KEYS['HF_TOKEN'][:-1]}") and keys.redact_bytes(said.encode() + b"\xff") == clean.encode() + b"\xff"
    for size in (1, 2, 3, 7, 30, 1000):
        blotter = Blotter(keys.blots(os.environ))
        pieces = [blotter.take(said.encode()[at:at + size]) for at in range(0, len(said), size)]
        assert b"".join(pieces) + blotter.take(b"", is_last=True) == clean.encode()
    assert Blotter(keys.blots(os.environ)).take(b"what holds no beginning of one is not held back\n").endswith(b"back\n")
    left = keys.without_secrets(os.environ)
    assert not left.keys() & {*KEYS, "PROXY_URL", "SOME_KEY"} and left["TOKENIZERS_PARALLELISM"] == "false-false" and "PATH" in left
    with pytest.raises(TrackerError) as failure, as_tracker_error():
        raise RuntimeError(KEYS["WANDB_API_KEY"])
    assert str(failure.value).endswith("[WANDB_API_KEY]") and failure.value.__cause__ is None


def test_the_process_of_vllm_gets_no_key(planted, tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def look(command, env, **_):
        raise Seen(json.dumps([command, env]))

    monkeypatch.setattr("vllm_engine.subprocess.Popen", look)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/where")
    engine = VllmEngine.__new__(VllmEngine)
    engine.log_path, engine.tp = tmp_path / "log", 1
    with pytest.raises(Seen) as seen:
        engine._start({"model": "m"}, "cpu")
    assert found_in(str(seen.value).encode()) == set() and "/some/where" in str(seen.value)


def test_what_an_agent_may_not_read_in_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in (".aws", ".ssh", ".config/gcloud", "hub"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "hub" / "token").write_text("t")
    closed = agent_cmd.paths_in_home(ProposerConfig(proposer="cmd", proposer_cmd="sh x"))[1]
    assert {str(Path(path).relative_to(tmp_path)) for path in closed} == {".aws", ".ssh", ".config/gcloud", "hub/token"}


# ---- nothing that lies in a folder is run ---------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, sentinel: Path):
        self.sentinel = sentinel

    def __reduce__(self):
        return Path.touch, (self.sentinel,)


CODE = """
import os
from pathlib import Path
Path({sentinel!r}).touch()
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
class CanaryConfig(Qwen3Config):
    model_type = "whale_canary"
class CanaryForCausalLM(Qwen3ForCausalLM):
    config_class = CanaryConfig
class CanaryTokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    Path({sentinel!r}).touch()
"""
PICKLES = ("pytorch_model.bin", "model.pt", "model.pkl", "model.pth", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin",
           "trainer_state.pt", "adapter_model.bin", "tokenizer.pkl", "vocab.pkl", "state.pkl", "embeddings.npy", "index.faiss", "cache.pickle",
           "scaler.joblib", "generation_config.pkl")
SCRIPTS = ("dataset.py", "math.py", "conftest.py", "sitecustomize.py", "modeling_canary.py", "tokenization_canary.py", "generate.py",
           "custom_generate/generate.py", "harness_api.py", "torch.py", "__init__.py")


@pytest.fixture
def sentinel(tmp_path) -> Path:
    """A file that is there once a bomb went off. It is shown to go off."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()
    path.unlink()
    return path


def plant(folder: Path, sentinel: Path) -> None:
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Bomb(sentinel)))
    for name in SCRIPTS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE.format(sentinel=str(sentinel)))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "."}')


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def evil_model(folder: Path, sentinel: Path, only_its_code: bool = False) -> Path:
    """The embedded model with code and pickles beside it. `only_its_code`: no class of transformers' own fits."""
    shutil.copytree(MODEL, folder)
    plant(folder, sentinel)
    auto_map = {"AutoConfig": "modeling_canary.CanaryConfig", "AutoModelForCausalLM": "modeling_canary.CanaryForCausalLM"}
    edit_json(folder / "config.json", auto_map=auto_map, **({"model_type": "whale_canary"} if only_its_code else {}))
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_canary.CanaryTokenizer"]})
    return folder


def test_a_model_folder_with_everything_in_it(tmp_path, sentinel, monkeypatch):
    """Eval in the folder itself, with data files beside scripts; its own code is not asked for at the terminal either."""
    folder = evil_model(tmp_path / "model", sentinel)
    monkeypatch.chdir(folder)
    for split in ("train", "harness", "test"):
        shutil.copy(DATA / f"{split}.jsonl", folder)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    result = call_json("eval", "math", "--model", ".", "--train", "train.jsonl", "--harness-set", "harness.jsonl", "--test", "test.jsonl[:2]",
                       "--n", 1, "--out", tmp_path / "out")
    assert not sentinel.exists() and result["n_tasks"] == 2 and asked == []
    load_generation_config(str(folder))
    assert not sentinel.exists()


@pytest.mark.parametrize("kind", ["bin", "pt", "index"])
def test_weights_in_a_pickle_are_no_weights(kind, tmp_path, sentinel):
    folder = evil_model(tmp_path / "model", sentinel)
    (folder / "model.safetensors").unlink()
    if kind == "pt":
        (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(sentinel)))
    if kind == "index":
        (folder / "pytorch_model.bin.index.json").write_text('{"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}')
    with pytest.raises(ModelError, match=f"--model {folder}: cannot be loaded"):
        load_model(folder)
    with pytest.raises(RetrieverError, match="--e5-model .*cannot be loaded"):
        Encoder(str(folder))
    assert not sentinel.exists()


def test_code_of_a_model_runs_only_where_a_flag_says_so(tmp_path, sentinel):
    folder = evil_model(tmp_path / "model", sentinel, only_its_code=True)
    args = ["eval", "math", "--model", folder, "--test", f"{DATA}/test.jsonl[:1]", "--n", 1, "--out", tmp_path / "out"]
    code, output = call(*args)
    assert code == 1 and "--trust-remote-code true runs it" in output and str(folder) in output and not sentinel.exists()
    with pytest.raises(ModelError, match="--trust-remote-code true"):
        load_model(folder)
    with pytest.raises(RetrieverError, match="only code which comes with it"):
        Encoder(str(folder))
    assert len(retriever.load_tokenizer(str(folder))) == len(load_tokenizer(folder)) > 1000         # transformers' own class reads these
    assert not sentinel.exists()
    done = subprocess.run([sys.executable, str(ROOT / "cli.py"), *map(str, args), "--trust-remote-code", "true"], text=True,
                          capture_output=True, timeout=600, env=os.environ | {"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0 and sentinel.exists(), done.stderr
    assert "--trust-remote-code true: code that comes with" in done.stderr


def test_a_crash_leaves_no_key_in_a_core_file():
    code = "import keys, resource; keys.leave_no_core(); print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    for environment, limit in (({"WHALE_JUDGE_KEY": "canary-canary"}, "0\n"), ({}, f"{resource.getrlimit(resource.RLIMIT_CORE)[1]}\n")):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2))
        assert done.stdout == limit
    assert "__main__\":\n    leave_no_core()\n" in (ROOT / "cli.py").read_text()


def test_nothing_of_the_current_directory_is_run(tmp_path, sentinel):
    """run.sh with the keys in the environment, in a folder that somebody else filled; and a matplotlibrc there."""
    hostile, project = tmp_path / "hostile", tmp_path / "project"
    hostile.mkdir()
    project.mkdir()
    for name in ("venv", "pip", "ensurepip", "stop", "json", "sitecustomize", "matplotlib"):
        (hostile / f"{name}.py").write_text(f"open({str(sentinel)!r}, 'w')")
    shutil.copy(ROOT / "run.sh", project)
    (project / "requirements.txt").write_text("")
    (project / "cli.py").write_text("print('the end')")
    done = subprocess.run(["bash", project / "run.sh", "math"], cwd=hostile, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("the end\n") and not sentinel.exists(), done.stdout + done.stderr
    (hostile / "matplotlib.py").unlink()
    (hostile / "matplotlibrc").write_text("text.usetex: True\n")
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; import plots; print(plots.matplotlib.rcParams['text.usetex'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=hostile, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and not sentinel.exists()


def test_a_strangers_run_does_not_say_what_is_trusted(tmp_path, sentinel, finished):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    record = json.loads((run / "config.json").read_text())
    record["config"] |= {"model": str(evil_model(tmp_path / "model", sentinel, only_its_code=True)), "trust_remote_code": True}
    (run / "config.json").write_text(json.dumps(record))
    code, output = call("export", run, "--out", tmp_path / "out")
    assert code == 1 and "--trust-remote-code" in output and not sentinel.exists(), output


def test_it_is_another_run_with_the_flag(tmp_path, finished):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    code, output = call("math", *SMALL, "--out", tmp_path, "--name", "run", "--trust-remote-code", "true")
    assert code == 2 and "trust_remote_code: False then, True now" in output
    assert json.loads((folder / "config.json").read_text())["config"]["trust_remote_code"] is False


def test_a_run_and_its_checkpoints_with_everything_in_them(tmp_path, sentinel, finished):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (checkpoint,) = (path for path in (run / "weights").iterdir() if path.name == "step_000002")
    for folder in (run, run / "weights", checkpoint, run / "harness", run / "eval", run / "rollouts"):
        plant(folder, sentinel)
    for args in (["math", *SMALL, "--out", tmp_path, "--name", "run"], ["report", run], ["export", run, "--out", tmp_path / "out"],
                 ["eval", "math", "--model", checkpoint, "--harness", run / "final_harness.py", "--test", f"{DATA}/test.jsonl[:1]", "--n", 1,
                  "--out", tmp_path / "eval"]):
        code, output = call(*args)
        assert code == 0, output
    trainer = Trainer(str(MODEL), train_config(Config("math", **PRESETS["tiny"])), "cpu")
    trainer.load(checkpoint)
    (checkpoint / "trainer.safetensors").write_bytes(pickle.dumps(Bomb(sentinel)))
    with pytest.raises(CheckpointError, match="trainer.safetensors is cut or changed"):
        trainer.load(checkpoint)
    import rft                                          # whoever can write there can write its checksums too
    record = json.loads((checkpoint / "trainer.json").read_text())["record"]
    record["sha256"]["trainer.safetensors"] = rft._sha256(checkpoint / "trainer.safetensors")
    (checkpoint / "trainer.json").write_text(json.dumps({"record": record, "sha256": rft._sha256_json(record)}))
    with pytest.raises(CheckpointError, match="trainer.safetensors holds no tensors"):
        trainer.load(checkpoint)
    assert not sentinel.exists()


def test_a_search_index_with_everything_in_it(tmp_path, sentinel):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps({"id": str(n), "title": f"t{n}", "text": f"word{n} rush"}) + "\n" for n in range(5)))
    Bm25Index.build(corpus, index, progress=False)
    arrays = sorted(index.glob("*.npy"))
    assert arrays
    plant(index, sentinel)
    assert Bm25Index.open(corpus, index).search(["word3"], 1)[0][0].id == "3"
    for array in arrays:
        before = array.read_bytes()
        np.save(array, np.array([Bomb(sentinel)], dtype=object), allow_pickle=True)
        for content in (array.read_bytes(), pickle.dumps(Bomb(sentinel))):
            array.write_bytes(content)
            with pytest.raises(RetrieverError, match=f"--index {index}: is damaged"):
                Bm25Index.open(corpus, index)
        array.write_bytes(before)
    assert not sentinel.exists()


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ messages.append(1) }}", "{{ raise_exception.__globals__['os'].system('touch SENTINEL') }}", "{% include '/etc/passwd' %}",
    "{{ self._TemplateReference__context.parent }}{{ ''|attr('__class__') }}", "{{ '{0.__class__}'.format(1).x.y }}",
    "{% import 'os' as os %}{{ os.system('touch SENTINEL') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999999) %}x{% endfor %}")


def test_a_chat_template_that_tries_to_get_out(tmp_path, sentinel):
    """Templates are rendered in Jinja's sandbox. What one raises ends its rollout, as an error."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    for template in ESCAPES:
        (folder / "chat_template.jinja").write_text(template.replace("SENTINEL", str(sentinel)))
        with pytest.raises((TemplateError, TypeError, ArithmeticError, RecursionError)):
            said = Prompter(load_tokenizer(folder)).prompt({"messages": [{"role": "user", "content": "hello"}]}, "", ())[0]
            raise AssertionError(f"{template}: {said}")
        assert not sentinel.exists()
    (folder / "chat_template.jinja").write_text(ESCAPES[-1])
    result = call_json("eval", "math", "--model", folder, "--test", f"{DATA}/test.jsonl[:1]", "--n", 1, "--out", tmp_path / "out")
    traces = Path(result["traces"]).read_text()
    assert result["n_error"] == 1 and "the chat template refused the messages" in traces


# what unpickles, or runs text, and where it may
LOADERS = re.compile(r"^(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal|_pickle)\.|^(torch|np|numpy|yaml|pandas|pd)\.(load|unsafe_load|full_load|"
                     r"read_pickle|load_library)$|\.(load_dataset|read_pickle|load_extension)$|^(eval|exec|compile|__import__)$|^os\.(system|popen)$|"
                     r"^torch\.(jit|hub|package)\.|^(runpy|imp)\.|^importlib\.")
ALLOWED = {
    ("jail.py", "exec"), ("jail.py", "compile"), ("jail.py", "__import__"),           # harness programs and snippets, inside the sandbox
    ("nano_worlds.py", "eval"),                             # sums that it has made itself
    ("track.py", "importlib.import_module"),                # one of three names
    ("data.py", "datasets.load_dataset"),                   # which has no code of data sets since 4.0, and is pinned
}


def test_the_sources_load_no_pickle_and_run_no_text():
    used, loads = set(), []
    for path in sorted(ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if LOADERS.search(name):
                    used.add((path.name, name))
                assert given.get("allow_pickle", "False") == "False" and given.get("weights_only", "True") == "True", path
                assert given.get("shell", "False") == "False", path
                assert given.get("trust_remote_code", "False") != "True", f"{path}: {name}"
                if name.endswith(".from_pretrained") and path.name != "bench_trl.py":           # of what we wrote, in TRL's own process
                    loads.append(name)
                    assert re.search(r"where|locate\(", given.get(None, "") + given.get("revision", "")), f"{path}: {name}: by way of locate()"
                    assert not name.startswith("AutoModel") or given.get("use_safetensors") == "True", f"{path}: {name}"
    assert used == ALLOWED and len(loads) >= 8


# ---- a hub model is one commit --------------------------------------------------------------------------------------

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A cache as the hub's library leaves it, and no hub: two commits of a model, main at the first, a tag at the second. -> main."""
    model = tmp_path / "hub" / "models--owner--name"
    for commit in (OLD, NEW):
        shutil.copytree(MODEL, model / "snapshots" / commit)
    edit_json(model / "snapshots" / NEW / "generation_config.json", eos_token_id=[2, 7])
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(OLD)
    (model / "refs" / "v2").write_text(NEW)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return model / "refs" / "main"


def test_a_hub_model_is_the_commit_that_a_run_began_with(hub, tmp_path):
    """Its commit is resolved once, recorded and said; the branch moves, and the run goes on with the first one."""
    run = ["math", *SMALL, "--method", "weight", "--rollouts", 64, "--model", "owner/name", "--out", tmp_path, "--name", "run"]
    code, output = call(*run)
    assert code == 0 and f"owner/name at commit {OLD}" in output, output
    config = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert (config["model"], config["revision"]) == ("owner/name", OLD)
    hub.write_text(NEW)
    write_sealed(tmp_path / "run/state.json", read_sealed(tmp_path / "run/state.json") | {"complete": False})
    code, output = call(*run)
    assert code == 0 and "resumed" in output and f"owner/name at commit {OLD}" in output, output
    code, output = call(*run, "--revision", "v2")
    assert code == 2 and f"revision: '{OLD}' then, '{NEW}' now" in output
    code, output = call("export", tmp_path / "run", "--out", tmp_path / "exported")
    assert code == 0, output
    assert json.loads((tmp_path / "exported/generation_config.json").read_text())["eos_token_id"] == 2              # of OLD
    assert f'"revision": "{OLD}"' in (tmp_path / "exported/README.md").read_text()
    code, output = call("eval", "math", "--model", "owner/name", "--test", f"{DATA}/test.jsonl[:1]", "--n", 1, "--out", tmp_path)
    assert code == 0 and f"owner/name at commit {NEW}" in output


def test_branches_tags_and_commits(hub, tmp_path):
    for revision, commit, stop in (("", OLD, 2), ("main", OLD, 2), ("v2", NEW, [2, 7]), (NEW, NEW, [2, 7])):
        model = pin_model(Config("math", model="owner/name", revision=revision)).theta
        assert model.revision == commit and find_tokenizer(model) is not None
        assert load_generation_config(model).eos_token_id == load_model(model).generation_config.eos_token_id == stop
    for args, words in ((["--model", "owner/name", "--revision", "v3"], "--model owner/name --revision v3: is not in the hub's cache"),
                        (["--model", "owner/other"], "--model owner/other: is not in the hub's cache")):
        code, output = call("math", *SMALL, *args, "--out", tmp_path / "runs")
        assert code == 1 and words in output, output
    code, output = call("math", *SMALL, "--revision", "v2", "--out", tmp_path / "runs")
    assert code == 2 and "--revision v2: is for a model of the hub" in output and not (tmp_path / "runs").exists()


def test_a_pinned_model_needs_no_hub(monkeypatch, tmp_path):
    """A recorded commit is taken as it is; a server's own name for its model is not looked up at the hub."""
    def ask(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("engine.hf_hub_download", ask)
    (tmp_path / "run").mkdir()
    cfg = Config("math", model="owner/never-seen", out=str(tmp_path), name="run")
    (tmp_path / "run/config.json").write_text(json.dumps({"config": {"model": cfg.model, "revision": OLD}}))
    assert pin_model(cfg, tmp_path / "run/config.json").revision == OLD
    assert pin_model(Config("math", model="owner/never-seen", out=str(tmp_path), engine="server")).revision == ""
    with pytest.raises(ModelError, match="owner/never-seen: is not in the hub's cache.*asked the hub"):
        find_commit("owner/never-seen")


def test_the_encoder_of_an_index_is_one_commit(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("engine.find_commit", lambda name, revision="": asked.append(revision) or OLD)
    assert search_index.pin_e5("owner/e5", "", tmp_path) == f"owner/e5@{OLD}" and asked == [""]
    (tmp_path / "manifest.json").write_text(json.dumps({"model": f"owner/e5@{NEW}"}))
    assert search_index.pin_e5("owner/e5", "", tmp_path) == f"owner/e5@{NEW}" and asked == [""]         # what it was made with
    assert search_index.pin_e5("owner/e5", "v2", tmp_path) == f"owner/e5@{OLD}" and asked == ["", "v2"]
    assert search_index.pin_e5(str(tmp_path), "", tmp_path) == str(tmp_path)
    with pytest.raises(RetrieverError, match="--e5-revision v2"):
        search_index.pin_e5(str(tmp_path), "v2", tmp_path)
    loaded = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda **where: loaded.append(where) or int("none"))
    with pytest.raises(RetrieverError, match="--e5-model owner/e5@aaaa.*cannot be loaded"):
        Encoder(f"owner/e5@{OLD}")
    assert loaded == [{"pretrained_model_name_or_path": "owner/e5", "revision": OLD, "trust_remote_code": False}]


# ---- ports ----------------------------------------------------------------------------------------------------------


def listening(root: int) -> set[str]:
    """Addresses on which the process or one below it listens (LISTEN is state 0A)."""
    parents, addresses = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, = line.split()
            raw = bytes.fromhex(local.partition(":")[0])
            if state == "0A":
                raw = b"".join(raw[at:at + 4][::-1] for at in range(0, len(raw), 4))
                addresses[f"socket:[{line.split()[9]}]"] = socket.inet_ntop(family, raw)
    below, before = {root}, set()
    while below != before:
        before, below = below, below | {pid for pid, parent in parents.items() if parent in below}
    found = set()
    for pid in below:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):                      # closed meanwhile
                found |= {addresses[target]} if (target := os.readlink(link)) in addresses else set()
    return found


def test_ranks_of_one_machine_listen_to_it_alone(tmp_path):
    """torch's own store listens on every address, and what reaches a rank's port is unpickled."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ranks.py"), "--standalone", "--nproc-per-node", "2", str(ROOT / "cli.py"), "math", *SMALL,
         "--method", "weight", "--rollouts", "64", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name} | {"OMP_NUM_THREADS": "1"})
    found, log = set(), []
    reader = threading.Thread(target=lambda: log.extend(process.stdout), daemon=True)
    reader.start()
    give_up = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < give_up:
        found |= listening(process.pid)
        time.sleep(0.1)
    reader.join(60)
    assert process.returncode == 0, "".join(log)
    assert found == {"127.0.0.1"}, found


def test_our_servers_listen_to_this_machine_alone(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "0", "title": "t", "text": "a word"}\n')
    args = build_parser().parse_args(["retriever", "--corpus", str(corpus), "--port", "0"])
    with retriever.Server(Bm25Index.open(corpus, None), args.host, args.port), Echo() as server:        # those of the tests, too
        assert listening(os.getpid()) == {"127.0.0.1"}
        server.shutdown()
