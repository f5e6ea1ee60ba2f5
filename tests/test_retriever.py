"""The retriever as a user runs it: a real server, its client against servers that lie, builds that are killed."""
import argparse
import fcntl
import http.client
import json
import math
import os
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import retriever
import search_index
from retriever import RemoteRetriever, RetrieverDown, Server, cut_text, open_retriever
from search_index import Bm25Index, Document, E5Index, Index, RetrieverError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real samples are not part of the project")

PASSAGES = [
    ("Emma (novel)", "Emma is a novel by Jane Austen, published in 1815.\nIt is set in Highbury."),
    ('John "Hannibal" Smith', "A colonel of the A-Team, played by George Peppard."),
    ("Rush", "Rush is a Canadian rock band; Neil Peart was its drummer."),
    ("Twin A", "The same words."),
    ("Twin A", "The same words."),
    ("Zürich", "Zürich is a city in Switzerland. 10 km of lake. 東京 is elsewhere."),
    ("", "A passage without a title mentions Rush once."),
]
PROGRAM = ("import argparse, sys, retriever, stop; parser = argparse.ArgumentParser(); retriever.add_flags(parser);"
           "stop.listen(); stop.can_raise = True;"               # as cli.py does, without torch
           "sys.exit(retriever.command_retriever(parser.parse_args()))")


def write_corpus(path: Path, passages=PASSAGES) -> Path:
    path.write_text("".join(json.dumps({"id": str(n), "contents": f'"{title}"\n{text}'}, ensure_ascii=n % 2 == 0) + "\n"
                            for n, (title, text) in enumerate(passages)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@contextmanager
def running(*flags):
    """The real program -> (process, ready line, URL); SIGTERM ends it."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "--port", "0", *map(str, flags)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,      # a shell's background job ignores SIGINT
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, line, line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def served(corpus):
    with running("--corpus", corpus, "--topk", 2) as (_, _, url):
        yield url


def ask(url: str, body, method: str = "POST", path: str = "/retrieve"):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body)
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    return status, answer


# ---- corpus ----

def test_titles_keep_their_inner_quotes(corpus):
    found = Bm25Index.open(corpus, None).search(["hannibal colonel"], 1)[0][0]
    assert (found.id, found.title, found.text) == ("1", 'John "Hannibal" Smith', PASSAGES[1][1])


@pytest.mark.parametrize("contents, title, text", [
    ('"A"\nb\nc', "A", "b\nc"), ('"A"', "A", ""), ("A\nb", "A", "b"), ('""A""\nb', '"A"', "b"), ('"\nb', '"', "b"),
    ('"A" and "B"\nc', 'A" and "B', "c"), ('""\nb', "", "b"), ("\nb", "", "b"), (' "A" \r\nb', "A", "b"), ("", "", ""),
    ('"\ud800"\nx', "?", "x")])
def test_contents_are_read_as_title_and_text(contents, title, text):
    assert search_index.read_document({"id": 7, "contents": contents}, "here") == Document("7", title, text, 0.0)


def test_both_forms_of_a_corpus_are_the_same(corpus, tmp_path):
    rows = [json.dumps({"id": n, "title": title, "text": text}) for n, (title, text) in enumerate(PASSAGES)]
    other = tmp_path / "other.jsonl"
    other.write_text("\n" + "\n\n".join(rows))                  # blank lines, and no newline at the end
    queries = ["rush drummer", "same words", "zürich", "emma"]
    assert Bm25Index.open(other, None).search(queries, 9) == Bm25Index.open(corpus, None).search(queries, 9)


@pytest.mark.parametrize("line, said", [
    ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[1]", "must be an object, not list"),
    ('{"contents": "x"}', "'id' is missing"), ('{"id": "1"}', "'title' is missing"),
    ('{"id": "1", "title": "x"}', "'text' is missing"), ('{"id": "1", "contents": 5}', "'contents' must be text, not int 5"),
    ('{"id": [], "contents": "x"}', "'id' must be text"), (b'{"id": "1", "contents": "\xff"}', "not JSON")])
def test_a_broken_line_is_named(tmp_path, line, said):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"id": "0", "contents": "fine"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(RetrieverError, match=re.escape(f"{path}, line 3: ")) as error:
        Bm25Index.open(path, None)
    assert said in str(error.value)


@pytest.mark.parametrize("content, said", [("", "no passage"), ('{"id": "0", "contents": "?!"}', "no word"),
                                           (None, "No such file")])
def test_a_corpus_with_nothing_in_it_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(RetrieverError, match=said):
        open_retriever(str(tmp_path / "c.jsonl"))


# ---- BM25 ----

def naive_bm25(query: str, passages, k1=0.9, b=0.4) -> list[float]:
    from bm25s.stopwords import STOPWORDS_EN
    bags = [Counter(w for w in re.findall(r"\w+", f"{t}\n{x}".lower()) if w not in STOPWORDS_EN) for t, x in passages]
    mean = sum(map(Counter.total, bags)) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            df = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
            score += idf * bag[word] / (bag[word] + k1 * (1 - b + b * bag.total() / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["Rush drummer", "rush rush the a", "same words", "10 km", "ZÜRICH 東京", "A-Team, a novel?"])
def test_bm25_is_the_formula(corpus, query):
    hits = Bm25Index.open(corpus, None).search([query], 100)[0]
    naive = naive_bm25(query, PASSAGES)
    assert [int(hit.id) for hit in hits] == sorted((i for i, s in enumerate(naive) if s > 0), key=lambda i: (-round(naive[i], 6), i))
    assert [hit.score for hit in hits] == pytest.approx([naive[int(hit.id)] for hit in hits], rel=1e-5)


def test_bm25_ties_and_odd_queries(corpus):
    index = Bm25Index.open(corpus, None)
    assert [[hit.id for hit in hits] for hits in index.search(["same words"] * 2, 1)] == [["3"], ["3"]]
    assert [hit.id for hit in index.search(["same words"], 50)[0]] == ["3", "4"]
    odd = ["", "   ", "xyzzy", "the of", "\0", "\ud800", "?!", "\n" * 9]
    assert index.search(odd, 5) == [[]] * len(odd)
    assert index.search([], 5) == []
    assert index.search(["rush " * 200_000], 1)[0][0].id == "2"


def test_many_ties_at_the_cut_keep_the_corpus_order(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [(f"T{n}", "word" if n % 3 else "word word") for n in range(200)])
    index = Bm25Index.open(path, None)
    everything = index.rank(["word"], 200)[0]
    assert [row for row, _ in everything] == [n for n in range(200) if n % 3 == 0] + [n for n in range(200) if n % 3]
    for topk in (1, 66, 67, 68, 199):
        assert index.rank(["word"], topk)[0] == everything[:topk]


def test_a_built_index_answers_as_the_one_in_memory(corpus, tmp_path):
    (tmp_path / "index").mkdir()                                # an empty folder may be there
    Bm25Index.build(corpus, tmp_path / "index", progress=False)
    queries = ["rush drummer", "same words", "zürich lake", "", "xyzzy", "jane austen"]
    assert Bm25Index.open(corpus, tmp_path / "index").search(queries, 3) == Bm25Index.open(corpus, None).search(queries, 3)


def test_bars_go_to_stderr(corpus, tmp_path, capsys):
    Bm25Index.build(corpus, tmp_path / "index", progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "reading" in shown.err


def test_a_bm25_build_is_whole_or_absent(corpus, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def die():
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "sync", die)
        Bm25Index.build(corpus, tmp_path / "index", progress=False)
    assert not (tmp_path / "index").exists()
    with pytest.raises(RetrieverError, match="holds no index"):
        Bm25Index.open(corpus, tmp_path / "index")
    Bm25Index.build(corpus, tmp_path / "index", progress=False)
    assert Bm25Index.open(corpus, tmp_path / "index").search(["emma"], 1)[0][0].id == "0"


def test_an_index_of_something_else_is_refused(corpus, tmp_path):
    index_dir = tmp_path / "index"
    Bm25Index.build(corpus, index_dir, progress=False)
    edited = tmp_path / "edited.jsonl"
    edited.write_bytes(corpus.read_bytes().replace(b"drummer", b"singers"))      # of the same size
    for call in (Bm25Index.open, Bm25Index.build):
        with pytest.raises(RetrieverError, match="corpus_sha256 .* there, .* asked for"):
            call(edited, index_dir)
    with pytest.raises(RetrieverError, match="backend 'bm25' there, 'e5' asked for"):
        E5Index.open(corpus, index_dir, "model")
    with pytest.raises(RetrieverError, match="backend 'bm25' there, 'e5' asked for"):
        E5Index.build(corpus, index_dir, "model")
    Bm25Index.build(corpus, index_dir, progress=False)          # the same: nothing to do
    (index_dir / "complete").unlink()
    with pytest.raises(RetrieverError, match="has not ended"):
        Bm25Index.open(corpus, index_dir)


def test_a_large_corpus_is_told_from_an_edited_one(tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 20_000_000)
    before = search_index.describe(path, "bm25")
    for position in (0, 19_999_999):                            # the head and the tail are always looked at
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"y")
        assert search_index.describe(path, "bm25") != before
        before = search_index.describe(path, "bm25")


def test_heavy_packages_are_not_imported(corpus):
    code = (f"import sys, retriever; retriever.open_retriever({str(corpus)!r}).search(['rush'], 1);"
            "print([m for m in ('torch', 'transformers', 'faiss', 'rich', 'datasets') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- server ----

def normal(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@needs_shared
def test_bm25_finds_real_answers_through_the_server():
    questions = [json.loads(line) for line in open(SHARED / "data" / "mini_wiki_questions.jsonl")]
    questions = [q for q in questions if not {normal(a) for a in q["golden_answers"]} & {"yes", "no"}]
    with running("--corpus", SHARED / "data" / "mini_wiki_corpus.jsonl") as (_, line, url):
        assert re.fullmatch(r"retriever: bm25, 6,412 passages, http://127\.0\.0\.1:\d+\n", line)
        found = RemoteRetriever([url + "/retrieve"]).search([q["question"] for q in questions], 3)
    hits = sum(any(normal(a) and normal(a) in normal(f"{d.title} {d.text}") for a in q["golden_answers"] for d in documents)
               for q, documents in zip(questions, found, strict=True))
    print(f"recall@3 {hits}/{len(questions)} = {hits / len(questions):.3f}")
    assert hits >= 0.6 * len(questions)


def test_the_answer_is_search_r1s(served):
    status, answer = ask(served, {"queries": ["rush", "xyzzy", "hannibal"], "topk": 1, "return_scores": True})
    assert status == 200 and answer["result"][1] == []
    assert answer["result"][2][0]["document"] == {"id": "1", "title": 'John "Hannibal" Smith', "text": PASSAGES[1][1],
                                                  "contents": f'"John "Hannibal" Smith"\n{PASSAGES[1][1]}'}
    assert answer["result"][2][0]["score"] > 0
    status, plain = ask(served, {"queries": ["rush", "xyzzy", "hannibal"], "topk": 1})
    assert plain["result"] == [[hit["document"] for hit in hits] for hits in answer["result"]]
    assert len(ask(served, {"queries": ["rush"], "topk": None})[1]["result"][0]) == 2        # --topk 2
    assert ask(served, {"queries": []}) == (200, {"result": []})


def test_a_cut_is_a_beginning_and_at_most_so_long():
    tokenizer = retriever.load_tokenizer(str(ROOT / "embedded" / "model"))
    text = ' "Zürich"  is\n\n東京 a 👍🏽 city, <|im_start|>assistant\n1,234.5 tail  '
    n_tok = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    cuts = [cut_text(text, n, tokenizer) for n in range(1, n_tok + 2)]
    assert all(text.startswith(cut) for cut in cuts) and cuts[-1] == cuts[-2] == text
    assert [len(cut) for cut in cuts] == sorted(len(cut) for cut in cuts) and len(cuts[0]) < 4
    assert cut_text("  a b\n c  ", 2) == "  a b" and cut_text("  a b\n c  ", 3) == "  a b\n c  "
    assert cut_text("", 3) == "" and cut_text("", 3, tokenizer) == ""


@pytest.mark.parametrize("body, said", [
    (b"", "not JSON"), (b"\xff", "not JSON"), (b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "must be an object"),
    ({}, "'queries'"), ({"queries": "rush"}, "'queries'"), ({"queries": [1]}, "'queries'"), ({"queries": [["a"]]}, "'queries'"),
    ({"queries": ["a"], "topk": 0}, "'topk'"), ({"queries": ["a"], "topk": 1001}, "'topk'"), ({"queries": ["a"], "topk": "3"}, "'topk'"),
    ({"queries": ["a"], "topk": True}, "'topk'"), ({"queries": ["a"], "topk": 1.0}, "'topk'"),
    (b'{"queries": ["a"], "topk": NaN}', "'topk'"), ({"queries": ["a"] * 1025, "topk": 1}, "1025 'queries'"),
    ({"queries": ["a"] * 1000, "topk": 1000}, "documents at once"),
    ({"queries": ["a"], "return_scores": 1}, "'return_scores'"), ({"queries": ["a"], "max_doc_tokens": 0}, "'max_doc_tokens'"),
    ({"queries": ["a"], "max_doc_tokens": 3, "tokenizer_name": 5}, "'tokenizer_name'"),
    (b" " * (8 << 20) + b"{}", "bytes")])
def test_a_bad_request_is_told_why(served, body, said):
    status, answer = ask(served, body)
    assert status == 400 and list(answer) == ["error"] and said in answer["error"] and "Traceback" not in answer["error"]
    assert ask(served, {"queries": ["rush"], "topk": 1})[0] == 200


def test_odd_http_is_answered(served):
    assert ask(served, {"queries": []}, path="/search")[0] == 404
    assert ask(served, None, "GET", "/retrieve")[0] == 404
    address = tuple(served.removeprefix("http://").split(":"))
    post = b"POST /retrieve HTTP/1.1\r\n"
    for raw, status in ((b"PUT /retrieve HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 501), (post + b"\r\n", 400),
                        (post + b"Content-Length: -1\r\n\r\n", 400), (post + b"Content-Length: 1" + b"0" * 5000 + b"\r\n\r\n", 400),
                        (post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400)):
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(raw)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")      # and the server hangs up
        assert str(status).encode() in head.split(b"\r\n")[0] and list(json.loads(body)) == ["error"]
    for raw in (b"\0\xff\r\n\r\n", post + b"Content-Length: 99\r\n\r\n{", b"POST /retrieve"):
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(raw)                             # and gone in the middle
    assert ask(served, {"queries": ["\ud800 rush \0"], "topk": 1})[0] == 200


def test_a_connection_is_kept(served):
    connection = http.client.HTTPConnection(served.removeprefix("http://"), timeout=20)
    connection.connect()
    port = connection.sock.getsockname()[1]
    for body in ('{"queries": ["rush"]}', "broken", '{"queries": ["rush"]}'):
        connection.request("POST", "/retrieve", body)
        connection.getresponse().read()
        assert connection.sock.getsockname()[1] == port
    connection.close()


class SlowIndex(Index):
    """Answers when told to, and breaks on a word."""
    backend = "slow"

    def __init__(self, corpus: search_index.Corpus):
        self.corpus, self.go, self.entered = corpus, threading.Event(), threading.Semaphore(0)

    def rank(self, queries, topk):
        self.entered.release()
        self.go.wait(20)
        if "boom" in queries:
            raise RuntimeError("the index broke")
        return [[(int(query), float(k)) for k in range(topk)] for query in queries]


@contextmanager
def in_process(index: Index):
    server = Server(index, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def slow(corpus):
    index = SlowIndex(Bm25Index.open(corpus, None).corpus)
    with in_process(index) as (server, url):
        yield index, server, url


def at_once(url: str, bodies: list[dict], server: Server, index: SlowIndex) -> list:
    """Sends one request that the worker holds on to, then all others while it does -> their answers."""
    answers: list = [None] * len(bodies)

    def send(n):
        answers[n] = ask(url, bodies[n])

    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(bodies))]
    threads[0].start()
    assert index.entered.acquire(timeout=20)
    for thread in threads[1:]:
        thread.start()
    give_up = time.monotonic() + 20
    while server.jobs.qsize() < len(bodies) - 1 and time.monotonic() < give_up:
        time.sleep(0.005)
    index.go.set()
    for thread in threads:
        thread.join()
    return answers


def test_documents_are_cut(corpus):
    cut = {"queries": ["emma"], "topk": 1, "max_doc_tokens": 4}
    with in_process(Bm25Index.open(corpus, None)) as (_, url):
        document = ask(url, cut)[1]["result"][0][0]
        assert document["text"] == "Emma is a novel" and document["contents"] == '"Emma (novel)"\nEmma is a novel'
        text = ask(url, cut | {"tokenizer_name": str(ROOT / "embedded" / "model")})[1]["result"][0][0]["text"]
        assert text and PASSAGES[0][1].startswith(text) and text != "Emma is a novel"
        status, answer = ask(url, cut | {"tokenizer_name": "/no/such/folder"})
        assert status == 400 and "'/no/such/folder': cannot be loaded" in answer["error"]


def test_waiting_requests_are_one_batch(slow):
    index, server, url = slow
    bodies = [{"queries": [str(n % 7)] * (n % 3), "topk": 1 + n % 4, "return_scores": True} for n in range(12)]
    bodies[0]["queries"] = ["0"]
    for body, (status, answer) in zip(bodies, at_once(url, bodies, server, index), strict=True):
        assert status == 200
        assert [[hit["document"]["id"] for hit in hits] for hits in answer["result"]] == [[q] * body["topk"] for q in body["queries"]]
    assert ask(url, None, "GET", "/health") == (200, {"backend": "slow", "n_documents": 7, "n_requests": 12, "n_batches": 2})


def test_a_batch_has_a_limit(slow, monkeypatch):
    monkeypatch.setattr(retriever, "MAX_BATCH", 4)
    index, server, url = slow
    assert all(status == 200 for status, _ in at_once(url, [{"queries": ["1", "2"]}] * 9, server, index))
    assert server.n_batches == 5


def test_a_broken_batch_breaks_nothing_else(slow):
    index, server, url = slow
    answers = at_once(url, [{"queries": ["1"]}, {"queries": ["2"]}, {"queries": ["boom"]}], server, index)
    assert [status for status, _ in answers] == [200, 500, 500]
    assert answers[2][1] == {"error": "the search failed: RuntimeError: the index broke"}
    assert ask(url, {"queries": ["3"]})[0] == 200


def test_signals_end_it(corpus):
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with running("--corpus", corpus) as (process, _, _):
            process.send_signal(sent)
            output, errors = process.communicate(timeout=20)
            assert (process.returncode, output, errors) == (code, "", "")


def test_build_then_serve(corpus, tmp_path):
    with running("--corpus", corpus, "--index", tmp_path / "index", "--build") as (_, line, url):
        assert line.startswith("retriever: bm25, 7 passages, http://127.0.0.1:")
        assert RemoteRetriever([url]).search(["emma"], 1)[0][0].title == "Emma (novel)"


def test_flags_are_checked(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parser = argparse.ArgumentParser()
    retriever.add_flags(parser)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, said in ((["--build"], "--index DIR"), (["--backend", "e5"], "--index DIR"), (["--topk", "0"], "--topk 0"),
                            (["--port", "70000"], "--port 70000"), (["--index", str(tmp_path / "none")], "holds no index"),
                            (["--port", str(taken.getsockname()[1])], "free one"), (["--host", "no.such.host.invalid"], "--host")):
            with pytest.raises(RetrieverError, match=re.escape(said)):
                retriever.command_retriever(parser.parse_args(["--corpus", str(corpus), *flags]))


# ---- client ----

@contextmanager
def fake(reply):
    """A server that does what `reply(handler, request fields)` does -> (URL, list of requests it got)."""
    seen = []

    class FakeHandler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            try:
                reply(self, seen[-1])
            except OSError:                                     # the client had enough
                pass

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def say(content, status: int = 200, **headers):
    def reply(handler, fields):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
    return reply


def hit(**changes):
    return {"document": {"id": "0", "title": "t", "text": "x"}, "score": 1.0} | changes


def silent(handler, fields):
    handler.rfile.read(1)                                       # until the client hangs up


def dripping(handler, fields):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)


def endless(handler, fields):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 16))


BAD = {
    "500": (say({"error": "x"}, 500), "status 500"), "503": (say(b"busy", 503), "busy"),
    "redirect": (say(b"", 302, Location="http://127.0.0.1:9/retrieve"), "status 302"),
    "empty": (say(b""), "not JSON"), "text": (say(b"<html>"), "not JSON"), "deep": (say(b"[" * 100_000), "not JSON"),
    "list": (say([]), "'result'"), "no result": (say({"results": [[]]}), "'result'"), "too few": (say({"result": []}), "'result'"),
    "too many": (say({"result": [[], []]}), "'result'"), "no list": (say({"result": [{}]}), "no list"),
    "over topk": (say({"result": [[hit()] * 3]}), "at most 2"), "no score": (say({"result": [[{"document": {}}]]}), "'score'"),
    "plain": (say({"result": [[{"id": "0", "contents": "x"}]]}), "'score'"), "NaN": (say({"result": [[hit(score=math.nan)]]}), "'score'"),
    "inf": (say({"result": [[hit(score=math.inf)]]}), "'score'"), "huge": (say({"result": [[hit(score=10 ** 400)]]}), "'score'"),
    "bool": (say({"result": [[hit(score=True)]]}), "'score'"), "null": (say({"result": [[None]]}), "'score'"),
    "no document": (say({"result": [[hit(document="x")]]}), "'document'"),
    "no text": (say({"result": [[hit(document={"title": "x"})]]}), "'text' is missing"),
    "wrong type": (say({"result": [[hit(document={"contents": 5})]]}), "must be text"),
    "cut short": (say(b'{"result": [[', **{"Content-Length": "900"}), "not JSON"),
    "no http": (lambda handler, fields: handler.wfile.write(b"SSH-2.0\r\n"), "BadStatusLine"),
    "hangs up": (lambda handler, fields: None, "Remote"), "endless": (endless, "16777216 bytes"),
    "silent": (silent, "timed out"), "dripping": (dripping, "no whole answer in 0.3 s")}


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(retriever, "BACKOFF_S", 0.0)


@pytest.mark.parametrize("reply, said", BAD.values(), ids=BAD)
def test_a_bad_answer_is_asked_for_again(served, no_waiting, reply, said):
    timeout_s = 0.3 if reply in (silent, dripping) else 20
    with fake(reply) as (url, seen):
        both = RemoteRetriever([url, served], timeout_s, tries=1)
        assert [d.title for d in both.search(["hannibal"], 2)[0]] == ['John "Hannibal" Smith'] and len(seen) == 1
        assert len(both.search(["hannibal"], 2)[0]) == 1 and len(seen) == 1           # the bad one is the last choice now
        with pytest.raises(RetrieverDown, match=re.escape(url)) as error:
            RemoteRetriever([url], timeout_s, tries=2).search(["hannibal"], 2)
    assert said in str(error.value) and "in 2 tries" in str(error.value) and len(seen) == 3


def test_a_dead_server(served, no_waiting):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(RetrieverDown, match=f"no answer from {dead} in 3 tries; the last reason: .*refused"):
        RemoteRetriever([dead]).search(["rush"], 1)
    assert RemoteRetriever([dead, served + "/retrieve/"]).search(["emma"] * 200, 1)[199][0].id == "0"


def test_our_mistake_is_not_repeated():
    with fake(say({"error": "'topk' must be smaller"}, 400)) as (url, seen), pytest.raises(RetrieverDown, match="must be smaller"):
        RemoteRetriever([url, "http://127.0.0.1:9"]).search(["rush"], 1)
    assert len(seen) == 1


def test_the_load_is_spread_and_the_order_kept(no_waiting):
    together = threading.Barrier(4)                             # broken, unless so many requests are there at a time

    def echo(handler, fields):
        together.wait(20)
        say({"result": [[{"document": {"contents": f'"{q}"\n\ud800'}, "score": 2}] for q in fields["queries"]]})(handler, fields)

    queries = [str(n) for n in range(4 * retriever.CHUNK_QUERIES)]
    with fake(echo) as (one, seen_one), fake(echo) as (other, seen_other):
        found = RemoteRetriever([one, other], timeout_s=20).search(queries, 3)
    assert found == [[Document("", query, "?", 2.0)] for query in queries]
    assert len(seen_one) == len(seen_other) == 2


def test_urls_take_turns():
    empty = say({"result": [[]]})
    with fake(empty) as (one, seen_one), fake(empty) as (other, seen_other):
        client = RemoteRetriever([one, other])
        for _ in range(6):
            client.search(["x"], 1)
    assert len(seen_one) == len(seen_other) == 3


def test_requests_stay_small(served):
    with fake(lambda handler, fields: say({"result": [[]] * len(fields["queries"])})(handler, fields)) as (url, seen):
        client = RemoteRetriever([url])
        assert client.search(["x" * 700_000] * 3, 1) == [[]] * 3 and [len(r["queries"]) for r in seen] == [1] * 3
        assert client.search([], 1) == [] and len(seen) == 3
        client.search(["x"] * 3, 1000)
        assert [len(r["queries"]) for r in seen[3:]] == [1] * 3
    assert len(RemoteRetriever([served]).search(["rush \ud800"], 1000)[0]) == 2


def test_no_proxy_is_asked(served, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert RemoteRetriever([served]).search(["emma"], 1)[0][0].id == "0"


def test_a_spec_is_urls_or_a_file(corpus, served):
    assert open_retriever(f"{served}, {served}/retrieve,").urls == [served, served]
    assert open_retriever(served).search(["rush"], 2) == open_retriever(str(corpus)).search(["rush"], 2)
    for spec in ("http://", "http://:80", "http://a:b", "http://a,corpus.jsonl", "https://h/?x=1", "http://u:p@h/"):
        with pytest.raises(RetrieverError, match="no URL of the form"):
            open_retriever(spec)


# ---- E5 ----

def make_model(folder: Path, seed: int, n_dims: int = 32) -> str:
    """A random BERT of two layers and its word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    words = sorted({w for title, text in PASSAGES for w in re.findall(r"\w+|[^\w\s]", f"{title} {text} query: passage:")})
    vocab = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(seed)
    BertModel(BertConfig(vocab_size=len(vocab), hidden_size=n_dims, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                         max_position_embeddings=24, initializer_range=0.5)).save_pretrained(folder)
    return str(folder)


def naive_e5(model: str, texts: list[str]) -> np.ndarray:
    """One text at a time, so without padding."""
    import torch
    from transformers import AutoModel, AutoTokenizer
    tokenizer, bert = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    rows = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            mean = bert(torch.tensor([ids[:23] + ids[-1:] if len(ids) > 24 else ids])).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory) -> Path:
    words = " ".join(text for _, text in PASSAGES).split()
    passages = [(words[n % 7], " ".join(words[n % 11: n % 11 + 1 + 3 * n % 40])) for n in range(23)]
    return write_corpus(tmp_path_factory.mktemp("long") / "corpus.jsonl", passages)


def test_e5_says_what_to_install(long_corpus, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(RetrieverError, match="pip install faiss-cpu==1.15.1"):
        E5Index.build(long_corpus, tmp_path / "index", model, progress=False)


def test_e5_is_the_formula(long_corpus, model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("faiss")
    monkeypatch.setattr(search_index, "SEARCH_ROWS", 5)
    E5Index.build(long_corpus, tmp_path / "index", model, progress=True)
    assert "embedding" in capsys.readouterr().err
    index = E5Index.open(long_corpus, tmp_path / "index", model)
    queries = ["Rush drummer", "novel", "in a city " * 9]
    contents = [json.loads(line)["contents"] for line in long_corpus.read_text().splitlines()]
    naive = naive_e5(model, [f"query: {q}" for q in queries]) @ naive_e5(model, [f"passage: {c}" for c in contents]).T
    for on_gpu in (False, True):
        if on_gpu:                                              # what a GPU holds
            import torch
            index.vectors, index.faiss = torch.tensor(index.vectors), None
        for topk in (1, 4, 7, 100):
            for scores, hits in zip(naive, index.rank(queries, topk), strict=True):
                assert len(hits) == min(topk, 23) == len({row for row, _ in hits})
                assert [score for _, score in hits] == pytest.approx(sorted(scores, reverse=True)[:topk], abs=2e-3)
                assert [score for _, score in hits] == pytest.approx([scores[row] for row, _ in hits], abs=2e-3)
    assert index.rank([" ", "novel \ud800"], 2)[0] == [] and index.search([], 2) == []


def test_an_e5_index_is_of_one_model(long_corpus, model, tmp_path):
    pytest.importorskip("faiss")
    mine = make_model(tmp_path / "model", seed=1)
    E5Index.build(long_corpus, tmp_path / "index", mine, progress=False)
    with pytest.raises(RetrieverError, match="model .* there, .* asked for"):
        E5Index.open(long_corpus, tmp_path / "index", model)
    with pytest.raises(RetrieverError, match="--e5-model .*cannot be loaded"):
        E5Index.build(long_corpus, tmp_path / "other", str(tmp_path / "none"), progress=False)
    for n_dims in (32, 64, 16):                                 # other weights behind the same name
        make_model(tmp_path / "model", 2, n_dims)
        with pytest.raises(RetrieverError, match="other weights"):
            E5Index.open(long_corpus, tmp_path / "index", mine)
    (tmp_path / "index" / "complete").unlink()
    vectors = (tmp_path / "index" / "vectors").read_bytes()
    with pytest.raises(RetrieverError, match="other weights"):
        E5Index.build(long_corpus, tmp_path / "index", mine, progress=False)
    assert (tmp_path / "index" / "vectors").read_bytes() == vectors


KILLS = """
import json, os, signal, sys
from pathlib import Path
import search_index
corpus, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
search_index.EMBED_ROWS = 6                     # of 23 passages: 4 blocks
real, encode = os.fsync, search_index.Encoder.__call__
search_index.E5Index.build(corpus, folder / "whole", model, progress=False)
for n in range(1, 99):
    if not (pid := os.fork()):
        calls = iter(range(1, 99))
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == n else real(file)
        search_index.E5Index.build(corpus, folder / str(n), model, progress=False)
        os._exit(0)
    ended = os.waitpid(pid, 0)[1]
    vectors, embedded = folder / str(n) / "vectors", []
    complete = (folder / str(n) / "complete").exists()
    if vectors.exists() and not complete:
        vectors.write_bytes(vectors.read_bytes() + b"torn")
    search_index.Encoder.__call__ = lambda self, texts: embedded.append(len(texts)) or encode(self, texts)
    search_index.E5Index.build(corpus, folder / str(n), model, progress=False)
    search_index.Encoder.__call__ = encode
    print(json.dumps({"killed": os.WIFSIGNALED(ended), "complete": complete, "embedded": sum(embedded)}))
    if not os.WIFSIGNALED(ended):
        break
"""


def test_a_killed_build_goes_on_and_ends_the_same(long_corpus, model, tmp_path):
    pytest.importorskip("faiss")
    done = subprocess.run([sys.executable, "-c", KILLS, str(long_corpus), model, str(tmp_path)], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # syncs: manifest, offsets, four blocks, complete; a kill at each, and one build that was not killed
    assert [row["killed"] for row in rows] == [True] * 7 + [False] and [row["complete"] for row in rows] == [False] * 7 + [True]
    # whole blocks are not done again; one passage more shows that the weights are the same
    assert [row["embedded"] for row in rows] == [23] * 2 + [1 + 17, 1 + 11, 1 + 5, 1 + 5, 1 + 5, 0]
    files = {"manifest.json", "offsets", "vectors", "complete"}
    for n in range(1, len(rows) + 1):
        assert {path.name for path in (tmp_path / str(n)).iterdir()} == files
        for name in files:
            assert (tmp_path / str(n) / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (n, name)


def test_two_builders_do_not_mix(long_corpus, model, tmp_path):
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(RetrieverError, match="another process is building"):
        E5Index.build(long_corpus, tmp_path, model, progress=False)
    os.close(other)
    assert not list(tmp_path.iterdir())


def test_e5_is_served(long_corpus, model, tmp_path):
    pytest.importorskip("faiss")
    with running("--corpus", long_corpus, "--index", tmp_path / "index", "--backend", "e5", "--e5-model", model,
                 "--build") as (_, line, url):
        assert line.startswith("retriever: e5, 23 passages, ")
        assert len(RemoteRetriever([url]).search(["rush", "emma"], 5)[1]) == 5
