"""Retrieval for the search domain: an index over a corpus of passages (BM25 or E5), its server, and the client.

    bash run.sh retriever --corpus FILE                                     BM25 in memory, for small corpora
    bash run.sh retriever --corpus FILE --index DIR --build                 BM25, built once, mapped from then on
    bash run.sh retriever --corpus FILE --index DIR --backend e5 --build    E5; after a kill the same command goes on
    curl -s localhost:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}'

A corpus is JSONL, {"id": "0", "contents": "\\"Title\\"\\ntext"} (Search-R1's form) or {"id", "title", "text"}. The
protocol is Search-R1's, so its server and its clients work with this client and this server.

What 21 million passages (wiki-18) need, by arithmetic: the passages stay in their file, 8 B each in memory. BM25: some
10 GB, mapped; its build holds all words, some 60 GB. E5: 32 GB of float16 vectors, mapped and searched exactly, in
blocks, so that one block in float32 (0.2 GB) is all that is held; a GPU that has room holds them all.

Differs from the paper: BM25 is the default, as it needs neither weights nor a GPU. The last bits of E5's scores, and
so the order of near ties, depend on the queries that share a batch; BM25's do not.
"""

import argparse
import fcntl
import hashlib
import http.client
import json
import math
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 1024          # the rest of a BM25 query is not read, as in Lucene
MAX_TOK = 512                   # of a passage or query that E5 reads, as its model card says
EMBED_ROWS = 4096               # passages a block of E5's build: what a kill can lose
SEARCH_ROWS = 1 << 16           # vectors a block of E5's search
MAX_BATCH = 1024                # queries that are searched together
MAX_BODY, MAX_QUERIES, MAX_TOPK, MAX_DOCUMENTS = 8 << 20, 1024, 1000, 1 << 16           # of a request
MAX_ANSWER = 16 << 20           # bytes of an answer that the client reads
CHUNK_QUERIES, CHUNK_DOCUMENTS, CHUNK_CHARS = 64, 1024, 1 << 20     # that the client puts into one request
BACKOFF_S, AVOID_S = 0.1, 30.0  # before the second try; a URL that failed is the last choice for so long


class RetrieverError(ValueError):
    """A corpus, index, flag, request or answer that cannot be used; the message says what is wrong with which."""


class RetrieverDown(RuntimeError):
    """No server gave a usable answer; the message names them and the last reason."""


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    text: str
    score: float


def parse_json(raw: bytes, where: str):
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RetrieverError(f"{where}: is not JSON: {error}") from None


def plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode()             # a lone surrogate breaks tokenizers


def read_document(fields: object, where: str, score: float = 0.0) -> Document:
    """A passage in either form. Only the outer quotes of a title go: "John "Hannibal" Smith" keeps the inner two."""
    if not isinstance(fields, dict):
        raise RetrieverError(f"{where}: must be an object, not {type(fields).__name__}")
    values = {key: fields.get(key) for key in ("id", *(("contents",) if "contents" in fields else ("title", "text")))}
    if type(values["id"]) is int:
        values["id"] = str(values["id"])
    for key, value in values.items():
        if not isinstance(value, str):
            what = "is missing" if value is None else f"must be text, not {type(value).__name__} {repr(value)[:40]}"
            raise RetrieverError(f"{where}: field {key!r} {what}")
        values[key] = plain(value)
    if contents := values.pop("contents", ""):
        title, _, values["text"] = contents.partition("\n")
        values["title"] = re.sub(r'^"(.*)"$', r"\1", title.strip())
    return Document(values["id"], values.get("title", ""), values.get("text", ""), score)


class Corpus:
    """Passages by row, read from the file when asked for; all it holds is where their lines start."""

    def __init__(self, path: str | Path, offsets: np.ndarray):          # (n + 1,) int64; the last is the file's size
        self.path, self.offsets, self.file = path, offsets, open_corpus(path)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, row: int, score: float = 0.0) -> Document:
        start, end = self.offsets[row:row + 2].tolist()
        where = f"{self.path}, passage {row + 1}"
        return read_document(parse_json(os.pread(self.file.fileno(), end - start, start), where), where, score)


def open_corpus(path: str | Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise RetrieverError(f"--corpus {path}: cannot be read: {error.strerror}") from None


def scan_corpus(path: str | Path, offsets: list[int], progress: bool) -> Iterator[Document]:
    """Every passage once, in order; `offsets` is filled for Corpus. A broken line: RetrieverError."""
    position, file = 0, open_corpus(path)
    if progress:
        from rich.progress import wrap_file
        file = wrap_file(file, os.path.getsize(path), description="reading", console=stderr_console())
    with file as lines:
        for n, line in enumerate(lines, start=1):
            if line.strip():
                offsets.append(position)
                yield read_document(parse_json(line, f"{path}, line {n}"), f"{path}, line {n}")
            position += len(line)
    if not offsets:
        raise RetrieverError(f"--corpus {path}: holds no passage")
    offsets.append(position)


def stderr_console():
    from rich.console import Console
    return Console(stderr=True)


# ---- indexes ----

def describe(corpus_path: str | Path, backend: str, model: str = "") -> dict:
    """What an index belongs to. Hashed are 64 evenly spaced windows of 64 KB, which is all of a corpus under 4 MB and
    takes no time for one of 14 GB. No time stamp: a copied corpus is the same."""
    digest, window = hashlib.sha256(), 1 << 16
    with open_corpus(corpus_path) as file:
        size = os.fstat(file.fileno()).st_size
        for start in np.linspace(0, max(0, size - window), 64).astype(int):
            file.seek(start)
            digest.update(file.read(window))
    return {"format": 1, "backend": backend, "model": model, "corpus_bytes": size, "corpus_sha256": digest.hexdigest()}


def check_index(index_dir: Path, expected: dict, complete: bool = True) -> None:
    """RetrieverError if the folder holds no index, another one, or (complete) one whose build has not ended."""
    try:
        manifest = json.loads((index_dir / "manifest.json").read_text())
    except (OSError, ValueError):
        raise RetrieverError(f"--index {index_dir}: holds no index; --build makes one, in a new folder") from None
    if manifest != expected:
        changes = "; ".join(f"{key} {manifest.get(key)!r} there, {value!r} asked for" for key, value in expected.items()
                            if manifest.get(key) != value)
        raise RetrieverError(f"--index {index_dir}: is of something else ({changes}); give another one, or remove it "
                             "and --build")
    if complete and not (index_dir / "complete").exists():
        raise RetrieverError(f"--index {index_dir}: its build has not ended; the same command with --build goes on")


def write_synced(path: Path, content: bytes) -> None:
    """A kill at any moment leaves the old file or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class Index:
    backend: str
    corpus: Corpus

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """For each query at most topk (row, score), best first, ties in the corpus's order; [] for a blank query."""
        raise NotImplementedError

    def search(self, queries: list[str], topk: int) -> list[list[Document]]:
        return [[self.corpus.read(row, score) for row, score in hits] for hits in self.rank(queries, topk)]


class Bm25Index(Index):
    """BM25 (Lucene's form) over title and text: lower case, English stop words, k1 and b as in Search-R1's own BM25. No
    stemmer: one for plurals moved recall@3 by 0.2 points (438 questions, 6,412 passages)."""
    backend = "bm25"

    def __init__(self, corpus: Corpus, bm25):
        self.corpus, self.bm25 = corpus, bm25

    @staticmethod
    def _make(corpus_path: str | Path, progress: bool) -> tuple:        # (bm25s.BM25, offsets)
        import bm25s
        from bm25s.tokenization import Tokenizer
        offsets: list[int] = []
        texts = (f"{passage.title}\n{passage.text}" for passage in scan_corpus(corpus_path, offsets, progress))
        tokenizer = Tokenizer(splitter=WORD.findall, stopwords="en")
        ids = list(tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False))
        if not tokenizer.get_vocab_dict():
            raise RetrieverError(f"--corpus {corpus_path}: holds no word to search for")
        bm25 = bm25s.BM25(k1=0.9, b=0.4)
        bm25.index((ids, tokenizer.get_vocab_dict()), create_empty_token=False, show_progress=progress)
        return bm25, np.array(offsets)

    @classmethod
    def build(cls, corpus_path: str | Path, index_dir: str | Path, progress: bool = True) -> None:
        """The folder appears whole or not at all; one that is there already is only checked."""
        index_dir, manifest = Path(index_dir), describe(corpus_path, cls.backend)
        if index_dir.exists() and any(index_dir.iterdir()):
            return check_index(index_dir, manifest)
        aside = index_dir.with_name(index_dir.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        bm25, offsets = cls._make(corpus_path, progress)
        bm25.save(aside, show_progress=False)
        offsets.tofile(aside / "offsets")
        (aside / "manifest.json").write_text(json.dumps(manifest))
        (aside / "complete").touch()
        os.sync()
        aside.rename(index_dir)

    @classmethod
    def open(cls, corpus_path: str | Path, index_dir: str | Path | None) -> "Bm25Index":
        """Without a folder the index is made in memory: half a second for 6,000 passages."""
        if index_dir is None:
            bm25, offsets = cls._make(corpus_path, progress=False)
        else:
            import bm25s
            check_index(Path(index_dir), describe(corpus_path, cls.backend))
            offsets = np.memmap(Path(index_dir) / "offsets", np.int64, "r")
            bm25 = bm25s.BM25.load(index_dir, mmap=True, show_progress=False)
        return cls(Corpus(corpus_path, offsets), bm25)

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """Only passages that share a word with the query."""
        results = []
        for query in queries:
            words = WORD.findall(query.lower())[:MAX_QUERY_WORDS]
            scores = self.bm25.get_scores_from_ids(self.bm25.get_tokens_ids(words))     # (n,); retrieve() mixes up ties
            rows = np.flatnonzero(scores > 0)
            if len(rows) > topk:
                rows = rows[scores[rows] >= np.partition(scores[rows], -topk)[-topk]]
            rows = rows[np.argsort(-scores[rows], kind="stable")][:topk]
            results.append(list(zip(rows.tolist(), scores[rows].tolist(), strict=True)))
        return results


class Encoder:
    """E5: the mean of the last hidden states over the attention mask, as a unit vector."""

    def __init__(self, name: str):
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()                  # "Loading weights" is of no interest
        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        dtype, self.batch_rows = (torch.float16, 256) if self.device == "cuda" else (torch.float32, 32)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModel.from_pretrained(name, dtype=dtype).eval().to(self.device)
        except (OSError, ValueError) as error:
            raise RetrieverError(f"--e5-model {name}: cannot be loaded: {error}") from None
        self.n_dims = self.model.config.hidden_size

    def __call__(self, texts: list[str]) -> np.ndarray:         # (n, d) float32
        vectors = np.empty((len(texts), self.n_dims), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))              # like lengths share a batch
        for rows in (order[i:i + self.batch_rows] for i in range(0, len(order), self.batch_rows)):
            inputs = self.tokenizer([plain(texts[i]) for i in rows], padding=True, truncation=True, return_tensors="pt",
                                    max_length=min(MAX_TOK, self.model.config.max_position_embeddings)).to(self.device)
            with self.torch.inference_mode():
                hidden = self.model(**inputs).last_hidden_state.float()             # (B, T, d)
                mask = inputs["attention_mask"].unsqueeze(-1)                       # (B, T, 1); 1: a token of the text
                mean = (hidden * mask).sum(1) / mask.sum(1)
                vectors[rows] = self.torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors


def import_faiss():
    try:
        import faiss
    except ImportError:
        raise RetrieverError("--backend e5 needs faiss where there is no GPU: pip install faiss-cpu==1.15.1") from None
    return faiss


class E5Index(Index):
    """Exact inner-product search over the vectors of E5 (intfloat/e5-base-v2)."""
    backend = "e5"

    def __init__(self, corpus: Corpus, vectors: np.ndarray, encoder: Encoder):      # (n, d) float16, mapped
        self.corpus, self.encoder, self.faiss = corpus, encoder, None
        with warnings.catch_warnings(action="ignore", category=UserWarning):        # a read-only map: it is only read
            self.vectors = encoder.torch.from_numpy(vectors)
        if encoder.device == "cuda" and vectors.nbytes < 0.8 * encoder.torch.cuda.mem_get_info()[0]:
            self.vectors = self.vectors.cuda()
        else:
            self.faiss = import_faiss()

    @classmethod
    def build(cls, corpus_path: str | Path, index_dir: str | Path, model: str, progress: bool = True) -> None:
        """Embeds the corpus in blocks of EMBED_ROWS; a kill loses at most a block, and the same call goes on."""
        index_dir, manifest = Path(index_dir), describe(corpus_path, cls.backend, model)
        index_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(index_dir, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if set(os.listdir(index_dir)) <= {"manifest.json.tmp"}:
                write_synced(index_dir / "manifest.json", json.dumps(manifest).encode())
            check_index(index_dir, manifest, complete=False)
            if not (index_dir / "complete").exists():
                cls._embed(corpus_path, index_dir, Encoder(model), progress)
                write_synced(index_dir / "complete", b"")
        except BlockingIOError:
            raise RetrieverError(f"--index {index_dir}: another process is building it") from None
        finally:
            os.close(lock)

    @staticmethod
    def _embed(corpus_path: str | Path, index_dir: Path, encoder: Encoder, progress: bool) -> None:
        if encoder.device == "cpu":
            import_faiss()                                      # said before hours of work
        if not (index_dir / "offsets").exists():
            offsets: list[int] = []
            for _ in scan_corpus(corpus_path, offsets, progress):
                pass
            write_synced(index_dir / "offsets", np.array(offsets).tobytes())
        corpus = Corpus(corpus_path, np.memmap(index_dir / "offsets", np.int64, "r"))
        counter = index_dir / "progress.json"
        n_done = json.loads(counter.read_bytes())["n_done"] if counter.exists() else 0
        if n_done:
            map_vectors(index_dir, n_done, corpus, encoder)     # refuses other weights
        starts = range(n_done, len(corpus), EMBED_ROWS)
        if progress:
            from rich.progress import track
            starts = track(starts, f"embedding, blocks of {EMBED_ROWS:,}", total=math.ceil(len(corpus) / EMBED_ROWS),
                           completed=n_done // EMBED_ROWS, console=stderr_console())
        with open(index_dir / "vectors", "ab") as file:
            file.truncate(n_done * encoder.n_dims * 2)          # a block that a kill cut short goes
            for start in starts:
                stop = min(start + EMBED_ROWS, len(corpus))
                texts = [passage_text(corpus.read(row)) for row in range(start, stop)]
                file.write(encoder(texts).astype(np.float16).tobytes())
                file.flush()
                os.fsync(file.fileno())                         # before the counter says so
                write_synced(counter, json.dumps({"n_done": stop}).encode())

    @classmethod
    def open(cls, corpus_path: str | Path, index_dir: str | Path, model: str) -> "E5Index":
        index_dir = Path(index_dir)
        check_index(index_dir, describe(corpus_path, cls.backend, model))
        corpus, encoder = Corpus(corpus_path, np.memmap(index_dir / "offsets", np.int64, "r")), Encoder(model)
        return cls(corpus, map_vectors(index_dir, len(corpus), corpus, encoder), encoder)

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        vectors = self.encoder([f"query: {query}" for query in queries])            # (Q, d)
        scores, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for start in range(0, len(self.corpus) if queries else 0, SEARCH_ROWS):
            block = self.vectors[start:start + SEARCH_ROWS].float()
            k = min(topk, len(block))
            if self.faiss:
                best = self.faiss.knn(vectors, block.numpy(), k, self.faiss.METRIC_INNER_PRODUCT)
            else:
                best = (self.encoder.torch.from_numpy(vectors).to(block.device) @ block.T).topk(k)
                best = best.values.cpu().numpy(), best.indices.cpu().numpy()
            scores, rows = np.concatenate([scores, best[0]], 1), np.concatenate([rows, best[1] + start], 1)
            order = np.lexsort((rows, -scores))[:, :topk]
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        return [list(zip(row.tolist(), score.tolist(), strict=True)) if query.strip() else []
                for query, row, score in zip(queries, rows, scores, strict=True)]


def passage_text(passage: Document) -> str:
    return f'passage: "{passage.title}"\n{passage.text}'        # as Search-R1 made its index


def map_vectors(index_dir: Path, n: int, corpus: Corpus, encoder: Encoder) -> np.ndarray:       # (n, d) float16
    """RetrieverError unless the first passage embeds to the vector that it has: weights can change behind a name."""
    path, first = index_dir / "vectors", encoder([passage_text(corpus.read(0))])[0]
    if os.path.getsize(path) >= n * len(first) * 2:
        vectors = np.memmap(path, np.float16, "r", 0, (n, len(first)))
        if first @ vectors[0].astype(np.float32) > 0.99:
            return vectors
    raise RetrieverError(f"--index {index_dir}: was made by other weights than --e5-model has; remove it and --build")


# ---- server ----

@dataclass(frozen=True)
class Request:
    queries: list[str]
    topk: int
    return_scores: bool
    max_doc_tokens: int | None
    tokenizer: object                           # None: max_doc_tokens counts words


def read_request(body: bytes, topk: int) -> Request:
    fields = parse_json(body, "the body")
    if not isinstance(fields, dict):
        raise RetrieverError(f"the body: must be an object, not {type(fields).__name__}")
    given = {key: value for key, value in fields.items() if value is not None}
    queries, topk, n_tok = given.get("queries"), given.get("topk", topk), given.get("max_doc_tokens")
    return_scores, name = given.get("return_scores", False), given.get("tokenizer_name")
    for fine, rule in (
            (isinstance(queries, list) and all(isinstance(query, str) for query in queries),
             "'queries' must be a list of texts"),
            (type(topk) is int and 1 <= topk <= MAX_TOPK, f"'topk' must be a whole number in 1 .. {MAX_TOPK}"),
            (isinstance(return_scores, bool), "'return_scores' must be true or false"),
            (n_tok is None or type(n_tok) is int and n_tok >= 1, "'max_doc_tokens' must be a whole number from 1"),
            (name is None or isinstance(name, str), "'tokenizer_name' must be a folder or a name on the hub")):
        if not fine:
            raise RetrieverError(rule)
    if len(queries) > MAX_QUERIES or len(queries) * topk > MAX_DOCUMENTS:
        raise RetrieverError(f"{len(queries)} 'queries' with 'topk' {topk}: at most {MAX_QUERIES} queries and "
                             f"{MAX_DOCUMENTS} documents at once")
    return Request(queries, topk, return_scores, n_tok, load_tokenizer(name) if name and n_tok else None)


@lru_cache(maxsize=4)
def load_tokenizer(name: str):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RetrieverError(f"'tokenizer_name' {name!r}: cannot be loaded: {error}") from None


def cut_text(text: str, n_tok: int, tokenizer=None) -> str:
    """The first n_tok tokens, or words where there is no tokenizer; never re-worded, only shorter."""
    if tokenizer is None:
        words = text.split(None, n_tok)                         # the last one is all that is left
        return text[:-len(words[n_tok])].rstrip() if len(words) > n_tok else text
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
            self.n_batches, self.n_requests = self.n_batches + 1, self.n_requests + len(batch)
            try:
                ranked = iter(self.index.rank([query for request, _ in batch for query in request.queries],
                                              max(request.topk for request, _ in batch)))
                results = [[hits[:r.topk] for hits in islice(ranked, len(r.queries))] for r, _ in batch]
            except Exception as error:                          # any: the next batch must find a worker
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)

    def answer(self, request: Request) -> list[list[dict]]:
        self.jobs.put((request, future := Future()))
        return [[self._show(request, row, score) for row, score in hits] for hits in future.result()]

    def _show(self, request: Request, row: int, score: float) -> dict:
        document = asdict(self.index.corpus.read(row))
        if request.max_doc_tokens:
            with self.cutting:                                  # threads must not share a tokenizer
                document["text"] = cut_text(document["text"], request.max_doc_tokens, request.tokenizer)
        del document["score"]
        document["contents"] = f'"{document["title"]}"\n{document["text"]}'
        return {"document": document, "score": score} if request.return_scores else document

    def handle_error(self, request, client_address) -> None:
        if not isinstance(error := sys.exception(), ConnectionError):           # a client that left is no news
            print(f"retriever: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60                                # seconds that a silent connection is kept
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/health":
            return self.send_error(404, f"{self.path}: there are GET /health and POST /retrieve")
        server = self.server
        self._reply(200, {"backend": server.index.backend, "n_documents": len(server.index.corpus),
                          "n_requests": server.n_requests, "n_batches": server.n_batches})

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path != "/retrieve":
                return self.send_error(404, f"{self.path}: there are GET /health and POST /retrieve")
            request = read_request(body, self.server.topk)
        except RetrieverError as error:
            return self.send_error(400, str(error))
        try:
            result = self.server.answer(request)
        except Exception as error:              # any: it is told to whom it concerns, and the server goes on
            return self.send_error(500, f"the search failed: {type(error).__name__}: {error}")
        self._reply(200, {"result": result})

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            self.close_connection = True
            raise RetrieverError("the request has no Content-Length")
        if int(length) > MAX_BODY:
            self.close_connection, left = True, min(int(length), 8 * MAX_BODY)
            while left and (part := self.rfile.read(min(left, 1 << 16))):       # one that still sends sees no answer
                left -= len(part)
            raise RetrieverError(f"the body has {length} bytes; at most {MAX_BODY} are read")
        return self.rfile.read(int(length))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection |= code not in (400, 404, 500) or self.command != "POST"      # its body was not read
        self._reply(code, {"error": message or self.responses[code][0]})

    def _reply(self, status: int, answer: dict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True, metavar="FILE", help="passages, JSONL")
    parser.add_argument("--index", metavar="DIR", help="without it BM25 is built in memory at each start")
    parser.add_argument("--backend", choices=("bm25", "e5"), default="bm25")
    parser.add_argument("--build", action="store_true", help="first build the index, or go on building it")
    parser.add_argument("--e5-model", default="intfloat/e5-base-v2", metavar="NAME", help="default %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s; there is no password")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    parser.add_argument("--topk", type=int, default=3, help="of requests that do not say; default %(default)s")


def command_retriever(args: argparse.Namespace) -> int:
    """Builds if asked to, then serves until Ctrl-C (130) or SIGTERM (143). RetrieverError if it cannot."""
    if not args.index and (args.build or args.backend == "e5"):
        raise RetrieverError(f"--{'build' if args.build else 'backend e5'} needs --index DIR")
    if not 1 <= args.topk <= MAX_TOPK or not 0 <= args.port <= 65535:
        raise RetrieverError(f"--topk {args.topk} must be in 1 .. {MAX_TOPK}, --port {args.port} in 0 .. 65535")
    kind, model = (E5Index, (args.e5_model,)) if args.backend == "e5" else (Bm25Index, ())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.build:
            kind.build(args.corpus, args.index, *model, progress=sys.stderr.isatty())
        index = kind.open(args.corpus, args.index, *model)
        try:
            server = Server(index, args.host, args.port, args.topk)
        except OSError as error:
            raise RetrieverError(f"--host {args.host} --port {args.port}: {error.strerror}; --port 0 takes a free "
                                 "one") from None
        with server:
            print(f"retriever: {args.backend}, {len(index.corpus):,} passages, "
                  f"http://{args.host}:{server.server_address[1]}", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return 130


# ---- client ----

class RemoteRetriever:
    """Asks retriever servers, several requests at a time. Gives up after `tries`, but not before each had its turn."""

    def __init__(self, urls: list[str], timeout_s: float = 30.0, tries: int = 3):
        for url in urls:
            if not re.fullmatch(r"https?://[^/:@?#]+(:[0-9]{1,5})?(/[^?#]*)?", url):
                raise RetrieverError(f"{url!r} is no URL of the form http://HOST:PORT")
        self.urls = [url.rstrip("/").removesuffix("/retrieve") for url in urls]
        self.timeout_s, self.n_tries = timeout_s, max(tries, len(urls))
        self.in_flight, self.n_asked, self.failed_at = Counter(), Counter(), dict.fromkeys(self.urls, -math.inf)
        self.lock, self.pool = threading.Lock(), ThreadPoolExecutor(4 * len(urls))

    def search(self, queries: list[str], topk: int) -> list[list[Document]]:
        """For each query at most topk documents, best first. RetrieverDown if any of them cannot be had."""
        most = max(1, min(CHUNK_QUERIES, CHUNK_DOCUMENTS // topk))
        chunks: list[list[str]] = []
        for query in queries:
            if not chunks or len(chunks[-1]) == most or sum(map(len, chunks[-1])) + len(query) > CHUNK_CHARS:
                chunks.append([])
            chunks[-1].append(query)
        return [hits for found in self.pool.map(lambda chunk: self._ask(chunk, topk), chunks) for hits in found]

    def _ask(self, queries: list[str], topk: int) -> list[list[Document]]:
        tried: list[str] = []
        for n in range(self.n_tries):
            time.sleep(BACKOFF_S * (2 ** min(n, 6) - 1))
            with self.lock:                     # one not tried for this chunk, not failed lately, with the least to do
                since = time.monotonic() - AVOID_S
                url = min(self.urls, key=lambda u: (tried.count(u), self.failed_at[u] > since, self.in_flight[u],
                                                    self.n_asked[u]))
                self.in_flight[url] += 1
                self.n_asked[url] += 1
            tried.append(url)
            try:
                return self._post(url, queries, topk)
            except (RetrieverError, OSError, http.client.HTTPException) as error:
                reason, self.failed_at[url] = f"{url}: {type(error).__name__}: {error}", time.monotonic()
            finally:
                with self.lock:
                    self.in_flight[url] -= 1
        raise RetrieverDown(f"no answer from {', '.join(self.urls)} in {len(tried)} tries; the last reason: {reason}")

    def _post(self, url: str, queries: list[str], topk: int) -> list[list[Document]]:
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}, ensure_ascii=False)
        place, deadline, answer = urlsplit(url), time.monotonic() + self.timeout_s, bytearray()
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        with closing(kind(place.netloc, timeout=self.timeout_s)) as connection:     # no proxies, no redirects
            connection.request("POST", f"{place.path}/retrieve", body.encode("utf-8", "replace"),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            while part := response.read1(1 << 16):
                answer += part
                if len(answer) > MAX_ANSWER:
                    raise RetrieverError(f"the answer has more than {MAX_ANSWER} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer in {self.timeout_s} s")
        if 400 <= response.status < 500:
            raise RetrieverDown(f"{url} refuses the request with status {response.status}: {bytes(answer[:300])!r}")
        if response.status != 200:
            raise RetrieverError(f"status {response.status}: {bytes(answer[:300])!r}")
        return read_answer(parse_json(answer, "the answer"), len(queries), topk)


def read_answer(answer: object, n_queries: int, topk: int) -> list[list[Document]]:
    """A server's answer, every part of it checked. Documents may lack an id: those of Search-R1's own BM25 do."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != n_queries:
        raise RetrieverError(f"the answer is no object with 'result', a list of {n_queries} lists")
    documents = []
    for hits in result:
        if not isinstance(hits, list) or len(hits) > topk:
            raise RetrieverError(f"the answer: a result is no list of at most {topk}")
        documents.append([])
        for hit in hits:
            score = hit.get("score") if isinstance(hit, dict) else None
            if type(score) not in (int, float) or not abs(score) < 1e9 or not isinstance(hit.get("document"), dict):
                raise RetrieverError("the answer: a hit is no object with a 'document' and a number as 'score'")
            documents[-1].append(read_document({"id": "", **hit["document"]}, "the answer, a document", float(score)))
    return documents


def open_retriever(spec: str, timeout_s: float = 30.0, tries: int = 3) -> "RemoteRetriever | Bm25Index":
    """`spec`: URLs of retriever servers with commas between them, or a corpus file, which is indexed in memory."""
    if spec.startswith(("http://", "https://")):
        return RemoteRetriever([url.strip() for url in spec.split(",") if url.strip()], timeout_s, tries)
    return Bm25Index.open(spec, None)
