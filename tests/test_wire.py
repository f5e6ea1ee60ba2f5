"""A server that never comes to an end, and one that answers with too much: every client leaves it, and nothing is left of the call."""

import gzip
import itertools
import socket
import threading
import time
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest

import chat_endpoint
import envs
import rollout
import tasks
from config import ROOT
from engine import Completion, SamplingParams, load_tokenizer
from envs import SearchEnv
from retriever import RemoteRetriever, RetrieverDown, cut_text
from search_answer import Judge
from search_index import Document
from server_call import Client, ServerFailed
from server_chat import Chat
from server_engine import Server, ServerEngine
from sessions import ProposerConfig
from tasks import DataError, ToolUse, read_rows

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {                                     # what comes first, and what comes again and again
    "a header that drips": (OK + b"A: ", b"a"), "a status that drips": (b"HTTP/1.1 2", b"0"), "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body that drips": (OK + b"\r\n", b" "), "a chunk's extension": (CHUNKED + b"2;", b"a"), "chunks": (CHUNKED, b"1\r\n \r\n"),
    "a chunk's extension, and no more after it": (OK + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2;", b"a"),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: b\r\n"), "no end": (OK + b"Content-Length: 2\r\n\r\n{", b"")}
LIMIT_S, GENEROUS_S = 0.3, 60.0                 # the old clients went on for ever
MODEL = str(ROOT / "embedded" / "model")


def engine_call(url: str) -> None:
    with pytest.raises(ServerFailed, match="no whole answer in 0.3 s"):
        Client().call(url, "POST", "/v1/completions", {"a": 1}, limit_s=LIMIT_S)


def judge_call(url: str) -> None:
    judge = Judge(url, "m", timeout_s=LIMIT_S, tries=1)
    assert judge.same("q", ["a"], "b") is None and "Time" in judge.last_error


def retriever_call(url: str) -> None:
    with pytest.raises(RetrieverDown, match="no whole answer in 0.3 s"):
        RemoteRetriever([url], LIMIT_S, tries=1).search(["a"], 1)


def proposer_call(url: str) -> None:
    endpoint = chat_endpoint.Endpoint(ProposerConfig(proposer_url=url), time.monotonic() + 1000)
    status, _, words = endpoint._send("GET", "/models", None, LIMIT_S)
    assert (status, words) == (0, b"timed out: no whole answer in 0.3 s")


@pytest.mark.parametrize("call", [engine_call, judge_call, retriever_call, proposer_call])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_server_without_end_is_left_when_the_time_is_up(kind, call):
    first, again = ENDLESS[kind]

    def serve() -> None:
        with suppress(OSError):                 # the client leaves
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(first)
                for _ in range(int(2 * GENEROUS_S / 0.02)):
                    peer.sendall(again)
                    time.sleep(0.02)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        before = set(threading.enumerate())
        begun = time.monotonic()
        client = threading.Thread(target=call_and_keep, args=(call, f"http://127.0.0.1:{listener.getsockname()[1]}", said := []), daemon=True)
        client.start()
        client.join(GENEROUS_S)
        assert said == ["as it should"], f"{said or 'still there'} after {time.monotonic() - begun:.0f} s"
        assert not [t for t in set(threading.enumerate()) - before if "watch" in t.name or "work" in t.name]


def call_and_keep(call, url: str, said: list) -> None:
    try:
        call(url)
        said.append("as it should")
    except BaseException as error:
        said.append(repr(error))


def test_a_call_leaves_no_thread_and_keeps_its_connection():
    peers = []

    def serve() -> None:
        with suppress(OSError):
            for _ in range(2):
                peers.append(listener.accept()[0])
                while peers[-1].recv(65536):
                    peers[-1].sendall(OK + b"Content-Length: 2\r\n\r\n{}")

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        client, n_before = Client(), threading.active_count()
        client.call(f"http://127.0.0.1:{listener.getsockname()[1]}", "GET", "/x")
        for _ in range(20):
            assert client.call(f"http://127.0.0.1:{listener.getsockname()[1]}", "GET", "/x") == {}
            assert threading.active_count() == n_before
        assert len(peers) == 1 and len(client.local.session.adapter.sockets) == 1
        peers[0].shutdown(socket.SHUT_RDWR)


# ---- too much ----------------------------------------------------------------------------------------------------------------


def chat_says(text: str, max_tokens: int, n_said: int) -> Completion:
    chat = Chat(lambda *args: {"choices": [{"message": {"content": text}, "finish_reason": "stop"}],
                               "usage": {"prompt_tokens": 7, "completion_tokens": n_said}}, print)
    return chat.sample("http://a", "m", 0, chat.tokenizer("Hello").input_ids, SamplingParams(max_tokens=max_tokens, seed=0), 1.0)


def text_says(text: str, max_tokens: int, tokenizer) -> Completion:
    engine = ServerEngine.__new__(ServerEngine)
    engine.stop_ids, engine.max_len, engine.tokenizer = (0,), 512, tokenizer
    engine._call = lambda *args, **kwargs: {"choices": [{"text": text, "finish_reason": "stop"}]}
    return engine._sample_text(Server("http://a", {"m": 512}, {}, "m", ""), 0, [1], SamplingParams(max_tokens=max_tokens, seed=0))


class Refusing:
    """A tokenizer that should not be asked."""
    eos_token_id = 0

    def __call__(self, text, **_):
        raise AssertionError(f"{len(text)} characters were tokenised")


def test_a_text_that_is_longer_than_its_tokens_is_a_failed_try():
    for ask in (lambda text, n: chat_says(text, n, 0), lambda text, n: text_says(text, n, Refusing())):
        with pytest.raises(ServerFailed, match="http://a answered with 3000000 characters where 20 tokens .* --urls"):
            ask("ab " * 1_000_000, 20)
    tokenizer = load_tokenizer(MODEL)
    with pytest.raises(ServerFailed, match="tokens where 8 were asked for.* --urls"):
        text_says("a1" * 500, 8, tokenizer)
    assert text_says("Nine and four.", 20, tokenizer).finish == "stop"


def test_a_count_of_tokens_that_cannot_be_is_not_what_is_charged():
    n_ours = len(Chat(None, None).tokenizer("word " * 50).input_ids) + 1
    for said in (0, 3, 1001, 10**8):
        assert chat_says("word " * 50, 1000, said).usage == (1, n_ours)         # and 1 for "Hello"
    assert chat_says("word " * 50, 30, 0).usage[1] == 30
    assert chat_says("word " * 50, 1000, 55).usage == (7, 55) and chat_says("", 1000, 0).usage == (7, 0)


def test_no_more_of_a_passage_is_tokenised_than_could_be_shown():
    tokenizer, seen = load_tokenizer(MODEL), []

    def spy(text, **kwargs):
        seen.append(len(text))
        return tokenizer(text, **kwargs)

    prose = "Emma was written by Jane Austen, and 1815 is its year. " * 100
    whole = tokenizer(prose, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for n_tok in (1, 5, 40):
        assert cut_text(prose * 50, n_tok, spy) == prose[:whole[n_tok - 1][1]]
        assert cut_text(prose * 50, n_tok) == " ".join(prose.split()[:n_tok])
    assert max(seen) <= 64 * 40 + 1024 and len(cut_text("x" * 10**6, 5)) <= 64 * 5 + 1024 and cut_text(" " * 10**6, 5, tokenizer)


def test_what_searches_found_is_remembered_within_bytes(monkeypatch):
    monkeypatch.setattr(envs, "MAX_FOUND_BYTES", 10 << 20)
    env, asked = SearchEnv(), []

    class Retriever:
        def search(self, queries, topk):
            asked.extend(queries)
            return [[Document("0", "t" * 100_000, query + " x" * (1 << 20), 1.0)] for query in queries]

    env.retriever = Retriever()
    use = lambda query: env.use_tools([ToolUse([], {"query": query, "topk": 1, "max_tokens": 5}, "", 0)], load_tokenizer(MODEL))  # noqa: E731
    for n in range(30):
        assert len(use(f"q{n}")[0]["output"]) < 5000            # the title, too, is cut
        assert sum(len(d.text) for found in env.found.values() for d in found) < 15 << 20
    env.found.clear()
    env.n_found_bytes = 0
    use("again")
    use("again")
    assert asked.count("again") == 1


@pytest.mark.parametrize("letter", "x ")
def test_what_searches_asked_is_remembered_within_bytes(monkeypatch, letter):
    monkeypatch.setattr(envs, "MAX_FOUND_BYTES", 10 << 20)
    env = SearchEnv()
    env.retriever = SimpleNamespace(search=lambda queries, topk: [[] for _ in queries])
    for n in range(30):
        env.use_tools([ToolUse([], {"query": letter * ((1 << 20) + n), "topk": 1, "max_tokens": 5}, "", 0)], None)
        assert sum(len(query) for _, query in env.found) < 15 << 20


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.csv", "a.json", "a.jsonl.zst"])
def test_a_line_without_end_is_refused_by_file_and_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tasks, "MAX_LINE_CHARS", 1000)
    monkeypatch.setattr(tasks, "MAX_JSON_CHARS", 1000)
    path, first = tmp_path / name, b"a\n" if "csv" in name else b'{"a": "b"}\n'
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(first + b" " * 3000))
    elif name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress(first + b" " * 3000))
    else:
        path.write_bytes(first + b" " * 3000)
    with pytest.raises(DataError, match=name + (": is longer" if name == "a.json" else ", line 2: is longer")):
        list(read_rows(path))


def test_a_zstd_bomb_is_unpacked_in_pieces(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b" " * (1 << 30)))
    assert max(map(len, itertools.islice(tasks._ZstdFile._unpack(path), 100))) <= 64 << 20


def test_a_prompt_that_a_template_blows_up_is_neither_kept_nor_encoded():
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = "{{ '{:>20000000}'.format(1) }}"
    prompter = rollout.Prompter(tokenizer, 512)
    prompter.encode = lambda text: pytest.fail(f"{len(text)} characters were encoded")
    with pytest.raises(ValueError, match="20,000,000 characters"):
        prompter.prompt({"messages": [{"role": "user", "content": "a"}]}, "", ())
    long = {"messages": [{"role": "user", "content": "word " * 200_000}]}
    assert len(rollout.Prompter(load_tokenizer(MODEL), 512).prompt(long, "", ())[1]) > 100_000     # the engine says that it is too long
