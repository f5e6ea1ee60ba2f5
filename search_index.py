"""A corpus of passages and an index over it, BM25 or E5. retriever.py builds, serves and asks it.

A corpus is JSONL, {"id": "0", "contents": "\\"Title\\"\\ntext"} (Search-R1's form) or {"id", "title", "text"}.

What 21 million passages (wiki-18) need, by arithmetic: the passages stay in their file, 8 B each in memory. BM25: some
10 GB, mapped; its build holds all words, some 60 GB. E5: 32 GB of float16 vectors, mapped and searched exactly, in
blocks, so that one block in float32 (0.2 GB) is all that is held; a GPU that has room holds them all.

Differs from the paper: BM25 is the default, as it needs neither weights nor a GPU. The last bits of E5's scores, and
so the order of near ties, depend on the queries that share a batch; BM25's do not.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from files import UsageError, naming, read_json, refuse_special

WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 1024          # the rest of a BM25 query is not read, as in Lucene
MAX_TOK = 512                   # of a passage or query that E5 reads, as its model card says
EMBED_ROWS = 4096               # passages a block of E5's build: what a kill can lose
SEARCH_ROWS = 1 << 16           # vectors a block of E5's search

Hits = list[tuple[int, float]]  # (row of the corpus, score), best first


class RetrieverError(ValueError):
    """A corpus, index, flag, request or answer that cannot be used; the message says what is wrong with which."""


def require(fine: bool, message: str) -> None:
    if not fine:
        raise RetrieverError(message)


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


def text_field(fields: dict, key: str, where: str) -> str:
    value = fields.get(key)
    require(value is not None, f"{where}: field {key!r} is missing")
    require(isinstance(value, str), f"{where}: field {key!r} must be text, not {type(value).__name__} {value!r:.40}")
    return plain(value)


def read_document(fields: object, where: str, score: float = 0.0) -> Document:
    """A passage in either form. RetrieverError begins with `where`."""
    require(isinstance(fields, dict), f"{where}: must be an object, not {type(fields).__name__}")
    name = str(fields["id"]) if type(fields.get("id")) is int else text_field(fields, "id", where)
    if "contents" not in fields:
        return Document(name, text_field(fields, "title", where), text_field(fields, "text", where), score)
    title, _, text = text_field(fields, "contents", where).partition("\n")
    title = re.sub(r'^"(.*)"$', r"\1", title.strip())           # "John "Hannibal" Smith" keeps the inner quotes
    return Document(name, title, text, score)


class Corpus:
    """Passages by row, read from the file when asked for; all it holds is where their lines end."""

    def __init__(self, path: str | Path, offsets: np.ndarray):  # (n + 1,) int64; passage i is in bytes [i] .. [i + 1]
        self.path, self.offsets, self.file = path, offsets, open_corpus(path)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, row: int, score: float = 0.0) -> Document:
        start, end = self.offsets[row:row + 2].tolist()
        where = f"{self.path}, passage {row + 1}"
        return read_document(parse_json(os.pread(self.file.fileno(), end - start, start), where), where, score)


def open_corpus(path: str | Path):
    try:
        refuse_special(path)
        return open(path, "rb")
    except OSError as error:
        raise RetrieverError(f"--corpus {path}: cannot be read: {error.strerror}") from None


def scan_corpus(path: str | Path, progress: bool) -> Iterator[tuple[int, Document]]:
    """(end of its line in bytes, passage) for every passage, in order. A broken line: RetrieverError."""
    file, position, n_passages = open_corpus(path), 0, 0
    if progress:
        from rich.console import Console
        from rich.progress import wrap_file
        file = wrap_file(file, os.path.getsize(path), description="reading", console=Console(stderr=True))
    with file as lines:
        for n, line in enumerate(lines, start=1):
            position += len(line)
            if line.strip():
                where, n_passages = f"{path}, line {n}", n_passages + 1
                yield position, read_document(parse_json(line, where), where)
    require(n_passages > 0, f"--corpus {path}: holds no passage")


class Index(ABC):
    backend: str
    corpus: Corpus

    @abstractmethod
    def rank(self, queries: list[str], topk: int) -> list[Hits]:
        """For each query at most topk hits, ties in the corpus's order; [] for a blank query."""

    def search(self, queries: list[str], topk: int) -> list[list[Document]]:
        return [[self.corpus.read(row, score) for row, score in hits] for hits in self.rank(queries, topk)]


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
        manifest = read_json(index_dir / "manifest.json")
    except UsageError:
        raise RetrieverError(f"--index {index_dir}: holds no index; --build makes one, in a new folder") from None
    changes = "; ".join(f"{key} {manifest.get(key)!r} there, {value!r} asked for" for key, value in expected.items()
                        if manifest.get(key) != value)
    require(not changes, f"--index {index_dir}: is of something else ({changes}); give another one, or remove it and "
                         "--build")
    require(not complete or (index_dir / "complete").exists(),
            f"--index {index_dir}: its build has not ended; the same command with --build goes on")


def write_synced(path: Path, content: bytes) -> None:
    """A kill at any moment leaves the old file or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with naming(path), open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class Bm25Index(Index):
    """BM25 (Lucene's form) over title and text: lower case, English stop words, k1 and b as in Search-R1's own BM25. No
    stemmer: one for plurals moved recall@3 by 0.2 points (438 questions, 6,412 passages)."""
    backend = "bm25"

    def __init__(self, corpus: Corpus, bm25):                   # a bm25s.BM25
        self.corpus, self.bm25 = corpus, bm25

    @classmethod
    def build(cls, corpus_path: str | Path, index_dir: str | Path, progress: bool = True) -> None:
        """The folder appears whole or not at all; one that is there already is only checked."""
        index_dir, manifest = Path(index_dir), describe(corpus_path, cls.backend)
        if index_dir.exists() and any(index_dir.iterdir()):
            return check_index(index_dir, manifest)
        aside = index_dir.with_name(index_dir.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        bm25, offsets = count_words(corpus_path, progress)
        with naming(index_dir):
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
            bm25, offsets = count_words(corpus_path, progress=False)
        else:
            import bm25s
            check_index(Path(index_dir), describe(corpus_path, cls.backend))
            try:
                offsets = np.memmap(Path(index_dir) / "offsets", np.int64, "r")
                bm25 = bm25s.BM25.load(index_dir, mmap=True, show_progress=False, allow_pickle=False)
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise RetrieverError(f"--index {index_dir}: is damaged ({type(error).__name__}: {error}); remove it "
                                     "and --build") from None
        return cls(Corpus(corpus_path, offsets), bm25)

    def rank(self, queries: list[str], topk: int) -> list[Hits]:
        return [self._rank_one(query, topk) for query in queries]

    def _rank_one(self, query: str, topk: int) -> Hits:
        """Only passages that share a word with the query."""
        words = WORD.findall(query.lower())[:MAX_QUERY_WORDS]
        scores = self.bm25.get_scores_from_ids(self.bm25.get_tokens_ids(words))     # (n,); retrieve() mixes up ties
        rows = np.flatnonzero(scores > 0)
        if len(rows) > topk:                                    # only what reaches the k-th best score is sorted
            rows = rows[scores[rows] >= np.partition(scores[rows], -topk)[-topk]]
        rows = rows[np.argsort(-scores[rows], kind="stable")][:topk]
        return list(zip(rows.tolist(), scores[rows].tolist(), strict=True))


def count_words(corpus_path: str | Path, progress: bool) -> tuple:
    """(bm25s.BM25 of the whole corpus, the offsets of Corpus)."""
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN
    offsets, stop_words = [0], set(STOPWORDS_EN)
    vocabulary: dict[str, int] = {}
    passages: list[list[int]] = []                              # the word ids of each
    for end, passage in scan_corpus(corpus_path, progress):
        words = WORD.findall(f"{passage.title}\n{passage.text}".lower())
        offsets.append(end)
        passages.append([vocabulary.setdefault(word, len(vocabulary)) for word in words if word not in stop_words])
    require(len(vocabulary) > 0, f"--corpus {corpus_path}: holds no word to search for")
    bm25 = bm25s.BM25(k1=0.9, b=0.4)
    bm25.index((passages, vocabulary), create_empty_token=False, show_progress=progress)
    return bm25, np.array(offsets)


def pin_e5(name: str, revision: str, index_dir: str | Path) -> str:
    """A hub model as name@commit: the commit that the index was made with, unless a revision is asked for."""
    from engine import ModelError, find_commit, is_hub_name
    if not is_hub_name(name):
        require(not revision, f"--e5-revision {revision}: is for a model of the hub, and --e5-model {name} is none")
        return name
    try:
        made_with = read_json(Path(index_dir) / "manifest.json")["model"]
        if made_with.startswith(f"{name}@") and not revision:
            return made_with
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass                                                    # no index yet, or none that check_index lets pass
    try:
        return f"{name}@{find_commit(name, revision)}"
    except ModelError as error:
        raise RetrieverError(f"--e5-model: {error}") from None


class Encoder:
    """E5: the mean of the last hidden states over the attention mask, as a unit vector. `name`: a folder or, of a hub
    model, name@commit."""

    def __init__(self, name: str):
        import torch
        from transformers import AutoModel, AutoTokenizer

        from engine import Model, ModelError, is_hub_name, locate, naming_the_model
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype, self.batch_rows = (torch.float16, 256) if self.device == "cuda" else (torch.float32, 32)
        try:
            with naming_the_model(name):
                where = locate(Model(*name.split("@", 1)) if is_hub_name(name) else name)
                self.tokenizer = AutoTokenizer.from_pretrained(**where)
                model = AutoModel.from_pretrained(**where, dtype=dtype, use_safetensors=True)
            self.model = model.eval().to(self.device)
        except ModelError as error:
            raise RetrieverError(f"--e5-model {name}: cannot be loaded: {error}") from None
        self.n_dims = self.model.config.hidden_size
        self.max_tok = min(MAX_TOK, self.model.config.max_position_embeddings)

    def __call__(self, texts: list[str]) -> np.ndarray:         # (n, d) float32
        import torch
        vectors = np.empty((len(texts), self.n_dims), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))              # like lengths share a batch
        for start in range(0, len(order), self.batch_rows):
            rows = order[start:start + self.batch_rows]
            batch = [plain(texts[i]) for i in rows]
            inputs = self.tokenizer(batch, padding=True, truncation=True, max_length=self.max_tok, return_tensors="pt")
            with torch.inference_mode():
                hidden = self.model(**inputs.to(self.device)).last_hidden_state.float()         # (B, T, d)
                mask = inputs["attention_mask"].unsqueeze(-1)                       # (B, T, 1); 1: a token of the text
                mean = (hidden * mask).sum(1) / mask.sum(1)
                vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors


def import_faiss():
    try:
        import faiss
    except ImportError:
        raise RetrieverError("--backend e5 needs faiss where no GPU holds the vectors: "
                             "pip install faiss-cpu==1.15.1") from None
    return faiss


class E5Index(Index):
    """Exact inner-product search over the vectors of E5 (intfloat/e5-base-v2)."""
    backend = "e5"

    def __init__(self, corpus: Corpus, vectors: np.ndarray, encoder: Encoder):      # (n, d) float16, mapped
        import torch
        self.corpus, self.encoder = corpus, encoder
        if encoder.device == "cuda" and vectors.nbytes < 0.8 * torch.cuda.mem_get_info()[0]:
            self.vectors, self.faiss = torch.tensor(vectors, device="cuda"), None
        else:
            self.vectors, self.faiss = vectors, import_faiss()

    @classmethod
    def build(cls, corpus_path: str | Path, index_dir: str | Path, model: str, progress: bool = True) -> None:
        """Embeds the corpus in blocks of EMBED_ROWS; a kill loses at most a block, and the same call goes on."""
        index_dir, manifest = Path(index_dir), describe(corpus_path, cls.backend, model)
        index_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(index_dir, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if set(os.listdir(index_dir)) <= {"manifest.json.tmp"}:                 # new, or killed in its first moment
                write_synced(index_dir / "manifest.json", json.dumps(manifest).encode())
            check_index(index_dir, manifest, complete=False)
            if not (index_dir / "complete").exists():
                embed_corpus(corpus_path, index_dir, Encoder(model), progress)
                write_synced(index_dir / "complete", b"")
        except BlockingIOError:
            raise RetrieverError(f"--index {index_dir}: another process is building it") from None
        finally:
            os.close(lock)

    @classmethod
    def open(cls, corpus_path: str | Path, index_dir: str | Path, model: str) -> "E5Index":
        index_dir = Path(index_dir)
        check_index(index_dir, describe(corpus_path, cls.backend, model))
        corpus, encoder = Corpus(corpus_path, np.memmap(index_dir / "offsets", np.int64, "r")), Encoder(model)
        return cls(corpus, map_vectors(index_dir, len(corpus), corpus, encoder), encoder)

    def rank(self, queries: list[str], topk: int) -> list[Hits]:
        if not queries:
            return []
        vectors = self.encoder([f"query: {query}" for query in queries])            # (Q, d)
        scores, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for start in range(0, len(self.corpus), SEARCH_ROWS):
            block_scores, block_rows = self._search_block(vectors, self.vectors[start:start + SEARCH_ROWS], topk)
            scores = np.concatenate([scores, block_scores], axis=1)
            rows = np.concatenate([rows, block_rows + start], axis=1)
            order = np.lexsort((rows, -scores))[:, :topk]       # by score; equal ones by row
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        return [list(zip(row.tolist(), score.tolist(), strict=True)) if query.strip() else []
                for query, row, score in zip(queries, rows, scores, strict=True)]

    def _search_block(self, vectors: np.ndarray, block, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """The best scores and their rows in the block, both (Q, at most topk). `block`: (m, d) float16."""
        k = min(topk, len(block))
        if self.faiss:
            return self.faiss.knn(vectors, block.astype(np.float32), k, self.faiss.METRIC_INNER_PRODUCT)
        import torch
        best = (torch.from_numpy(vectors).to(block.device) @ block.float().T).topk(k)
        return best.values.cpu().numpy(), best.indices.cpu().numpy()


def embed_corpus(corpus_path: str | Path, index_dir: Path, encoder: Encoder, progress: bool) -> None:
    """Writes `offsets` and `vectors`, from the last whole block that is there already."""
    if encoder.device == "cpu":
        import_faiss()                                          # said before hours of work
    if not (index_dir / "offsets").exists():
        offsets = np.array([0, *(end for end, _ in scan_corpus(corpus_path, progress))])
        write_synced(index_dir / "offsets", offsets.tobytes())
    corpus = Corpus(corpus_path, np.memmap(index_dir / "offsets", np.int64, "r"))
    row_bytes = 2 * encoder.n_dims
    with open(index_dir / "vectors", "ab") as file:
        n_there = file.tell() // row_bytes
        if n_there:
            map_vectors(index_dir, n_there, corpus, encoder)    # refuses other weights
        blocks = range(n_there // EMBED_ROWS, math.ceil(len(corpus) / EMBED_ROWS))
        file.truncate(blocks.start * EMBED_ROWS * row_bytes)    # a block that a kill cut short goes
        if progress:
            from rich.console import Console
            from rich.progress import track
            blocks = track(blocks, f"embedding, blocks of {EMBED_ROWS:,}", total=blocks.stop, completed=blocks.start,
                           console=Console(stderr=True))
        for block in blocks:
            rows = range(block * EMBED_ROWS, min((block + 1) * EMBED_ROWS, len(corpus)))
            file.write(encoder([passage_text(corpus.read(row)) for row in rows]).astype(np.float16).tobytes())
            file.flush()
            os.fsync(file.fileno())                             # "complete" must not reach the disk before it


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
