"""The search server, its client, and the command. The protocol is Search-R1's, so its server and clients work too.

    bash run.sh retriever --corpus FILE                                     BM25 in memory, for small corpora
    bash run.sh retriever --corpus FILE --index DIR --build                 BM25, built once, mapped from then on
    bash run.sh retriever --corpus FILE --index DIR --backend e5 --build    E5; after a kill the same command goes on
    curl -s localhost:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}'
"""

import argparse
import http.client
import json
import math
import queue
import re
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice
from urllib.parse import urlsplit

from keys import check_url
from search_index import (
    Bm25Index, Document, E5Index, Hits, Index, RetrieverError, parse_json, pin_e5, read_document, require)
from tasks import MAX_TOKEN_CHARS
from wire import ends_within

MAX_BATCH = 1024                # queries that are searched together
MAX_BODY, MAX_QUERIES, MAX_TOPK, MAX_DOCUMENTS = 8 << 20, 1024, 1000, 1 << 16           # of a request
MAX_ANSWER = 16 << 20           # bytes of an answer that the client reads
CHUNK_QUERIES, CHUNK_DOCUMENTS, CHUNK_CHARS = 64, 1024, 1 << 20     # that the client puts into one request
BACKOFF_S, AVOID_S = 0.2, 30.0  # more before each further try; a URL that failed is the last choice for so long
PATHS = "there are GET /health and POST /retrieve"


class RetrieverDown(RuntimeError):
    """No server gave a usable answer; the message names them and the last reason."""


@dataclass(frozen=True)
class Request:
    queries: list[str]
    topk: int
    return_scores: bool
    max_doc_tokens: int | None
    tokenizer: object                           # None: max_doc_tokens counts words


def read_request(body: bytes, topk: int) -> Request:
    """`topk`: of a request that does not say. null is as good as absent. RetrieverError says which field is wrong."""
    fields = parse_json(body, "the body")
    require(isinstance(fields, dict), f"the body: must be an object, not {type(fields).__name__}")
    fields = {key: value for key, value in fields.items() if value is not None}
    queries, topk, n_tok = fields.get("queries"), fields.get("topk", topk), fields.get("max_doc_tokens")
    return_scores, name = fields.get("return_scores", False), fields.get("tokenizer_name")
    require(isinstance(queries, list) and all(isinstance(query, str) for query in queries),
            "'queries' must be a list of texts")
    require(type(topk) is int and 1 <= topk <= MAX_TOPK, f"'topk' must be a whole number in 1 .. {MAX_TOPK}")
    require(isinstance(return_scores, bool), "'return_scores' must be true or false")
    require(n_tok is None or type(n_tok) is int and n_tok >= 1, "'max_doc_tokens' must be a whole number from 1")
    require(name is None or isinstance(name, str), "'tokenizer_name' must be a folder or a name on the hub")
    require(len(queries) <= MAX_QUERIES and len(queries) * topk <= MAX_DOCUMENTS,
            f"{len(queries)} 'queries' with 'topk' {topk}: at most {MAX_QUERIES} queries and {MAX_DOCUMENTS} "
            "documents at once")
    return Request(queries, topk, return_scores, n_tok, load_tokenizer(name) if name and n_tok else None)


@lru_cache(maxsize=4)
def load_tokenizer(name: str):
    from engine import find_tokenizer
    try:
        if tokenizer := find_tokenizer(name):           # nothing is downloaded for a client
            return tokenizer
        why = "it is not on this machine"
    except (OSError, ValueError) as error:
        why = error
    raise RetrieverError(f"'tokenizer_name' {name!r}: cannot be loaded: {why}")


def cut_text(text: str, n_tok: int, tokenizer=None) -> str:
    """The first n_tok tokens, or words where there is no tokenizer; never re-worded, only shorter. Of a passage of
    megabytes no more is tokenised, nor returned, than n_tok of the longest could need."""
    n_chars = MAX_TOKEN_CHARS * n_tok + 1024
    if len(text) > n_chars:
        space = text.rfind(" ", n_chars // 2, n_chars)                          # better not within a word
        text = text[:space if space > 0 else n_chars]
    if tokenizer is None:
        spans = [word.span() for word in re.finditer(r"\S+", text)]
    else:
        spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[:spans[n_tok - 1][1]] if len(spans) > n_tok else text


class Server(ThreadingHTTPServer):
    """One thread a connection reads and writes; one worker searches, for all requests that wait at that moment."""
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, index: Index, host: str, port: int, topk: int = 3):
        self.index, self.topk, self.jobs, self.cutting = index, topk, queue.SimpleQueue(), threading.Lock()
        self.n_requests = self.n_batches = 0
        super().__init__((host, port), Handler)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            batch = [self.jobs.get()]
            while sum(len(request.queries) for request, _ in batch) < MAX_BATCH and not self.jobs.empty():
                batch.append(self.jobs.get())
            self.n_batches += 1
            self.n_requests += len(batch)
            try:
                self._rank(batch)
            except Exception as error:                          # any: the next batch must find a worker
                for _, future in batch:
                    future.set_exception(error)

    def _rank(self, batch: list[tuple[Request, Future]]) -> None:
        queries = [query for request, _ in batch for query in request.queries]
        ranked = iter(self.index.rank(queries, max(request.topk for request, _ in batch)))
        for request, future in batch:
            future.set_result([hits[:request.topk] for hits in islice(ranked, len(request.queries))])

    def answer(self, request: Request) -> list[list[dict]]:
        future: Future[list[Hits]] = Future()
        self.jobs.put((request, future))
        return [[self._show(request, row, score) for row, score in hits] for hits in future.result()]

    def _show(self, request: Request, row: int, score: float) -> dict:
        passage = self.index.corpus.read(row)
        text = passage.text
        if request.max_doc_tokens:
            with self.cutting:                                  # threads must not share a tokenizer
                text = cut_text(text, request.max_doc_tokens, request.tokenizer)
        document = {"id": passage.id, "title": passage.title, "text": text, "contents": f'"{passage.title}"\n{text}'}
        return {"document": document, "score": score} if request.return_scores else document

    def handle_error(self, request, client_address) -> None:
        if not isinstance(error := sys.exception(), ConnectionError):           # a client that left is no news
            print(f"retriever: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"               # connections are kept
    timeout = 60                                # seconds that a silent one is kept
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._reply(404, {"error": f"{self.path}: {PATHS}"})
        server = self.server
        self._reply(200, {"backend": server.index.backend, "n_documents": len(server.index.corpus),
                          "n_requests": server.n_requests, "n_batches": server.n_batches})

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path != "/retrieve":
                return self._reply(404, {"error": f"{self.path}: {PATHS}"})
            request = read_request(body, self.server.topk)
        except RetrieverError as error:
            return self._reply(400, {"error": str(error)})
        try:
            result = self.server.answer(request)
        except Exception as error:              # any: it is told to whom it concerns, and the server goes on
            return self._reply(500, {"error": f"the search failed: {type(error).__name__}: {error}"})
        self._reply(200, {"result": result})

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        n_bytes = int(length) if re.fullmatch(r"[0-9]{1,12}", length) else -1
        if not 0 <= n_bytes <= MAX_BODY:
            self.close_connection = True                        # what follows is no request
            self.rfile.read(max(0, min(n_bytes, 2 * MAX_BODY)))     # one that still sends would not read our answer
            raise RetrieverError(f"Content-Length {length[:20]!r}: must be a number of bytes up to {MAX_BODY}")
        return self.rfile.read(n_bytes)

    def _reply(self, status: int, answer: dict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class says of broken HTTP, as JSON."""
        self.close_connection = True
        self._reply(code, {"error": message or self.responses[code][0]})

    def log_message(self, *args) -> None:
        pass


class RemoteRetriever:
    """Asks servers in turn, several requests at a time. Gives up after `tries`, but not before each URL had one."""

    def __init__(self, urls: list[str], timeout_s: float = 30.0, tries: int = 3):
        for url in urls:
            try:
                check_url("a URL of a retriever", url)
            except ValueError as error:
                raise RetrieverError(f"no URL of the form http://HOST:PORT: {error}") from None
        self.urls = [url.rstrip("/").removesuffix("/retrieve") for url in urls]
        self.failed_at, self.turns = dict.fromkeys(self.urls, -math.inf), count()
        self.timeout_s, self.n_tries = timeout_s, max(tries, len(urls))
        self.pool = ThreadPoolExecutor(4 * len(urls))

    def search(self, queries: list[str], topk: int) -> list[list[Document]]:
        """For each query at most topk documents, best first. RetrieverDown if any of them cannot be had."""
        n_most = max(1, min(CHUNK_QUERIES, CHUNK_DOCUMENTS // topk))
        chunks: list[list[str]] = []
        for query in queries:
            if not chunks or len(chunks[-1]) == n_most or sum(map(len, chunks[-1])) + len(query) > CHUNK_CHARS:
                chunks.append([])
            chunks[-1].append(query)
        return [hits for found in self.pool.map(lambda chunk: self._ask(chunk, topk), chunks) for hits in found]

    def _ask(self, queries: list[str], topk: int) -> list[list[Document]]:
        for n, url in enumerate(self._urls_to_try()):
            time.sleep(BACKOFF_S * n)
            try:
                return self._post(url, queries, topk)
            except (RetrieverError, OSError, UnicodeError, http.client.HTTPException) as error:     # of a host's name
                reason, self.failed_at[url] = f"{url}: {type(error).__name__}: {error}", time.monotonic()
        raise RetrieverDown(f"no answer from {', '.join(self.urls)} in {self.n_tries} tries; the last reason: {reason}")

    def _urls_to_try(self) -> list[str]:
        """All URLs, the next one first, but those that failed lately last; and again, up to the number of tries."""
        turn, since = next(self.turns) % len(self.urls), time.monotonic() - AVOID_S
        urls = sorted(self.urls[turn:] + self.urls[:turn], key=lambda url: self.failed_at[url] > since)
        return (urls * self.n_tries)[:self.n_tries]

    def _post(self, url: str, queries: list[str], topk: int) -> list[list[Document]]:
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}, ensure_ascii=False)
        place, answer, sockets = urlsplit(url), bytearray(), []
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        with (closing(kind(place.netloc, timeout=self.timeout_s)) as connection,    # no proxies, no redirects
              ends_within(self.timeout_s, sockets)):
            connection.connect()
            sockets.append(connection.sock)
            connection.request("POST", f"{place.path}/retrieve", body.encode("utf-8", "replace"),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            while part := response.read1(1 << 16):
                answer += part
                require(len(answer) <= MAX_ANSWER, f"the answer has more than {MAX_ANSWER} bytes")
        if 400 <= response.status < 500:        # our mistake: another try would not mend it
            raise RetrieverDown(f"{url} refuses the request with status {response.status}: {bytes(answer[:300])!r}")
        require(response.status == 200, f"status {response.status}: {bytes(answer[:300])!r}")
        return read_answer(parse_json(answer, "the answer"), len(queries), topk)


def read_answer(answer: object, n_queries: int, topk: int) -> list[list[Document]]:
    """A server's answer, every part of it checked."""
    result = answer.get("result") if isinstance(answer, dict) else None
    require(isinstance(result, list) and len(result) == n_queries,
            f"the answer is no object with 'result', a list of {n_queries} lists")
    for hits in result:
        require(isinstance(hits, list) and len(hits) <= topk, f"the answer: a result is no list of at most {topk}")
    return [[read_hit(hit) for hit in hits] for hits in result]


def read_hit(hit: object) -> Document:
    """Its document may lack an id: those of Search-R1's own BM25 do."""
    score, document = (hit.get("score"), hit.get("document")) if isinstance(hit, dict) else (None, None)
    require(type(score) in (int, float) and abs(score) < 1e9 and isinstance(document, dict),        # no NaN either
            "the answer: a hit is no object with a 'document' and a number as 'score'")
    return read_document({"id": "", **document}, "the answer, a document", float(score))


def open_retriever(spec: str, timeout_s: float = 30.0, tries: int = 3) -> RemoteRetriever | Bm25Index:
    """`spec`: URLs of retriever servers with commas between them, or a corpus file, which is indexed in memory."""
    if spec.startswith(("http://", "https://")):
        return RemoteRetriever([url.strip() for url in spec.split(",") if url.strip()], timeout_s, tries)
    return Bm25Index.open(spec, None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True, metavar="FILE", help="passages, JSONL")
    parser.add_argument("--index", metavar="DIR", help="without it BM25 is built in memory at each start")
    parser.add_argument("--backend", choices=("bm25", "e5"), default="bm25")
    parser.add_argument("--build", action="store_true", help="first build the index, or go on building it")
    parser.add_argument("--e5-model", default="intfloat/e5-base-v2", metavar="NAME", help="default %(default)s")
    parser.add_argument("--e5-revision", default="", metavar="COMMIT", help="of a hub model: commit, tag or branch; "
                        "without it what the index was made with, or main")
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s; there is no password")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    parser.add_argument("--topk", type=int, default=3, help="of requests that do not say; default %(default)s")


def command_retriever(args: argparse.Namespace) -> int:
    """Builds if asked to, then serves until Ctrl-C (130) or SIGTERM (143). RetrieverError if it cannot."""
    require(bool(args.index) or not args.build and args.backend == "bm25", "--build and --backend e5 need --index DIR")
    require(1 <= args.topk <= MAX_TOPK, f"--topk {args.topk} must be in 1 .. {MAX_TOPK}")
    require(0 <= args.port <= 65535, f"--port {args.port} must be in 0 .. 65535")
    kind, model = Bm25Index, ()
    if args.backend == "e5":
        kind, model = E5Index, (pin_e5(args.e5_model, args.e5_revision, args.index),)
    try:
        if args.build:
            kind.build(args.corpus, args.index, *model, progress=sys.stderr.isatty())
        index = kind.open(args.corpus, args.index, *model)
        try:
            server = Server(index, args.host, args.port, args.topk)
        except (OSError, UnicodeError) as error:                    # a name that no host can have is no OSError
            raise RetrieverError(f"--host {args.host} --port {args.port}: {getattr(error, 'strerror', error)}; --port "
                                 "0 takes a free one") from None
        with server:
            print(f"retriever: {args.backend}, {len(index.corpus):,} passages, "
                  f"http://{args.host}:{server.server_address[1]}", flush=True)
            server.serve_forever()
    except KeyboardInterrupt as stopped:
        return 128 + next(iter(stopped.args), signal.SIGINT)
