"""The Engine contract over servers: any number of vLLM servers, on any machines, that share a folder with this one.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --port 8000 --enable-scale-out      # on each rollout machine
    bash run.sh math --engine server --urls http://a:8000,http://b:8000 --share /shared/folder ...

In dev mode a server takes weights; scale-out is /inference/v1/generate, token ids in and out. A request goes to the
server with the fewest in flight; one that fails is tried again elsewhere. Weights are written once to the shared folder
and reloaded by every server, which is then asked for its digests. Every completion carries the version of the weights
that sampled it: one of another version (of a server that was restarted) is thrown away, and the server is given the
weights again. Dev mode lets whoever reaches the port change the model: use it on a network of your own.

Any other OpenAI-compatible server cannot take weights; it serves `search-harness`, `--method harness`, and `eval`. It
is given token ids over /v1/completions, if it takes them there and --model is a model on this machine; else messages
over /v1/chat/completions, and --model is the model's name there (server_chat.py).
"""

import hashlib
import shutil
import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
import torch.nn.functional as F

from engine import (
    Completion, EngineDied, Model, ModelError, SamplingParams, cast, check_names, digest, find_tokenizer,
    load_generation_config, load_model, load_tokenizer, locate, stop_ids_of, untied_weights, write_weights)
from server_call import N_SHOWN, Client, ServerFailed, ServerRefused, check_length, read_urls
from server_chat import Chat
from vllm_engine import EMBEDDING, HEAD, POLL_S, sampling_of

N_TRIES = 6             # of a request, each after a longer pause and, where there is another, on another server
N_BUSY_TRIES = 10       # of one that all find too busy (429): nine minutes in all
PAUSE_S = 1.0           # before the second try; doubled before each further one
LONGEST_PAUSE_S = 600   # that a server may ask for
DOWN_S = 30             # that a server which failed is asked only if there is no other
ANSWER_S = 60           # to answer, and for a completion
TOKEN_S = 0.25          # more for each token of it
LOAD_S = 900            # to reload the weights
N_NAMES = 20            # of models, in an error
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
PADDED_TO = 64          # rows of an embedding, as vLLM pads it with zeros
EMPTY = hashlib.sha256(b"").hexdigest()         # of a weight that a CPU server keeps repacked, out of sight


@dataclass(eq=False)
class Server:
    url: str                                    # without /v1
    lengths: dict[str, int | None]              # of the contexts of the models that it serves, by name
    roots: dict[str | None, str]                # the folders or hub names that they are from, and their names here
    name: str                                   # of the one that is asked
    dtype: str                                  # that it computes in, e.g. "bfloat16"; "": it cannot take weights
    n_running: int = 0
    down_until: float = 0.0                     # time.monotonic()
    lock: threading.Lock = field(default_factory=threading.Lock)       # held while it is given weights

    @property
    def max_len(self) -> int:
        return self.lengths.get(self.name) or 1 << 30


class ServerEngine:
    """The Engine contract over HTTP. `share`: a folder that this machine and all servers see under the same path.

    Several ranks may use the same servers: each gives them its weights, which are the same, and finds that they are
    there. A version is known by its content, so that another run's version 3 is not ours.
    """

    exact = False

    def __init__(self, model: str | Model, urls: str, share: Path, n_rows: int = 256, max_len: int = 4096):
        self.notes: list[str] = []
        self._noted: set[str] = set()
        self._call = Client().call
        self.closed = threading.Event()
        self.servers = [self._meet(url) for url in read_urls(urls)]
        dtypes = {server.dtype for server in self.servers}
        if len(dtypes) > 1:
            raise ModelError("--urls: all servers must compute in one dtype, and all or none in dev mode; these are "
                             + ", ".join(f"{server.url} {server.dtype or 'no dev mode'}" for server in self.servers))
        self.takes_weights = dtypes != {""} and not all(is_but_served(str(model), server) for server in self.servers)
        self.dtype = getattr(torch, dtypes.pop() or "bfloat16")
        self.share, self.folder, self.stamp = share, None, ""
        self.version, self.n_steps = 0, 0
        self.n_retries = 0                      # for the curious
        self._jobs: SimpleQueue = SimpleQueue()
        self._results: SimpleQueue = SimpleQueue()
        self._lock, self._round = threading.Lock(), 0           # reset() begins a new round; results of old ones go
        self._running: set[Hashable] = set()
        self._finished: list[Completion] = []
        self.n_threads = n_rows
        for _ in range(n_rows):                 # daemons: a server that does not answer keeps no process alive
            threading.Thread(target=self._work, daemon=True).start()
        self.chat, self.max_len = None, max_len
        if not self.takes_weights:
            self._settle(model)
        else:                                   # whatever they serve now, it is this from here on
            self.tokenizer, loaded = load_tokenizer(model), load_model(model)
            self.config, self.stop_ids = loaded.config, stop_ids_of(loaded.generation_config, self.tokenizer)
            self.n_words = len(loaded.get_input_embeddings().weight)
            self.shapes = {name: tuple(tensor.shape) for name, tensor in untied_weights(loaded).items()}
            self.load_weights(untied_weights(loaded).items(), 0)
        self.max_len = min([max_len, *(server.max_len for server in self.servers)])

    # ---- the contract ----

    def submit(self, id: Hashable, prompt_ids: list[int], params: SamplingParams,
               after: Hashable | None = None) -> None:
        if not prompt_ids or params.max_tokens < 1:
            raise ValueError(f"request {id!r}: {len(prompt_ids)} prompt tokens, max_tokens {params.max_tokens}")
        if len(prompt_ids) >= self.max_len:
            self._finished.append(Completion(id, [], "too_long"))
            return
        self._running.add(id)
        self._jobs.put((self._round, id, list(prompt_ids), params))

    @property
    def idle(self) -> bool:
        return not self._running and not self._finished

    def step(self) -> list[Completion]:
        """What has finished since the last call; waits POLL_S for it at most."""
        self.n_steps += 1
        try:
            while self._running:
                number, result = self._results.get(timeout=0 if self._finished else POLL_S)
                if number == self._round:
                    if isinstance(result, BaseException):
                        raise result
                    self._running.remove(result.id)
                    self._finished.append(result)
        except Empty:
            pass
        finished, self._finished = self._finished, []
        return finished

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Writes the weights to the shared folder and has every server load them, forget its prefixes and prove it."""
        if not self.takes_weights:
            raise ModelError("these servers cannot take weights: start them with VLLM_SERVER_DEV_MODE=1, or use "
                             "--method harness")
        if not self.idle:
            raise RuntimeError("load_weights while requests are running would mix two policies in one completion")
        given = cast(named, self.dtype)
        check_names(self.shapes, given)
        self.version, self.digests = version, digests_of(given)
        content = hashlib.sha256(repr(sorted(self.digests.items())).encode()).hexdigest()[:16]
        before, self.stamp = self.folder, f"{version}-{content}"
        self.folder = self.share / self.stamp
        if not self.folder.exists():            # another rank may be writing it too, so it appears whole
            aside = self.folder.with_name(f".{self.stamp}-{threading.get_native_id()}-{time.time_ns()}")
            write_weights(aside, self.config, given)
            try:
                aside.rename(self.folder)
            except OSError:
                shutil.rmtree(aside)
        failures: list[BaseException] = []

        def give(server: Server) -> None:
            try:
                self._give_weights(server)
            except BaseException as failure:                    # any: what is lost here would pass for success
                failures.append(failure)

        threads = [threading.Thread(target=give, args=(server,), daemon=True) for server in self.servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise EngineDied(f"the weights could not be loaded: {failures[0]}. The same command goes on from the last "
                             "finished step")
        if before and before != self.folder:
            shutil.rmtree(before, ignore_errors=True)           # the last one stays, for a server that is restarted

    def release(self, id: Hashable) -> None:
        """Servers free finished requests themselves."""

    def sleep(self) -> None:
        """Servers have GPUs of their own."""

    def wake(self) -> None:
        """Nothing to do."""

    def reset(self) -> None:
        """Forgets what runs; a reply that still comes is thrown away."""
        self._round += 1
        self._running, self._finished = set(), []

    def close(self) -> None:
        self.closed.set()
        for _ in range(self.n_threads):
            self._jobs.put(None)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- inside ----

    def _work(self) -> None:
        """A thread: one request after the other."""
        while not self.closed.is_set():
            if (job := self._jobs.get()) is None:
                return
            number, id, prompt_ids, params = job
            if number == self._round:
                try:
                    self._results.put((number, self._sample(id, prompt_ids, params)))
                except BaseException as error:          # for the thread that waits for it
                    self._results.put((number, error))

    def _meet(self, url: str) -> Server:
        """What a server serves and can do."""
        try:
            cards = self._call(url, "GET", "/v1/models", limit_s=30)["data"]
            names, lengths = [str(card["id"]) for card in cards], [card.get("max_model_len") for card in cards]
            roots = {card.get("root"): str(card["id"]) for card in cards}
            if not all(n is None or type(n) is int and n > 0 for n in lengths):
                raise ServerFailed(f"max_model_len {lengths}"[:N_SHOWN])
        except (ServerFailed, ServerRefused, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"--urls: {url} is no OpenAI-compatible server that answers: {error}") from None
        try:
            config = self._call(url, "GET", "/server_info?config_format=json", limit_s=30)["vllm_config"]
            dtype = config["model_config"]["dtype"].removeprefix("torch.")
            if not isinstance(getattr(torch, dtype), torch.dtype):
                raise TypeError(dtype)
        except (ServerFailed, ServerRefused, LookupError, TypeError, AttributeError):
            dtype = ""                          # no vLLM server in dev mode
        else:
            try:
                self._call(url, "POST", "/resume")      # a load that was interrupted leaves it paused
                self._call(url, "POST", "/inference/v1/generate",
                           {"token_ids": [1], "sampling_params": {"max_tokens": 1}})
            except (ServerFailed, ServerRefused) as error:
                raise ModelError(f"--urls: {error}") from None
        return Server(url, dict(zip(names, lengths, strict=True)), roots, names[0] if names else "", dtype=dtype)

    def _settle(self, model: str | Model) -> None:
        """How servers that take no weights are asked, and for which model. ModelError if they do not serve it."""
        self.tokenizer = find_tokenizer(model)
        for server in self.servers:
            server.name = self._name_at(server, str(model))
        if self.tokenizer is not None:
            self.stop_ids = stop_ids_of(load_generation_config(model), self.tokenizer)
            if all(map(self._takes_ids, self.servers)):
                return
        self.chat = Chat(self._call, self._note)
        self.tokenizer = self.chat.tokenizer
        self._note("the servers are asked over /v1/chat/completions; before they have counted tokens, as for "
                   "--max-len, their number is estimated")

    def _name_at(self, server: Server, model: str) -> str:
        """What a server calls the model: its name there, the folder or hub name that it was started with; for a folder
        here, the only one there."""
        for name in (model, f"{model}:latest", server.roots.get(model)):
            if name in server.lengths:
                return name
        if self.tokenizer is not None and Path(model).exists() and len(server.lengths) == 1:
            self._note(f"{server.url} serves {server.name}; its tokenizer is taken to be that of --model {model}")
            return server.name
        names = sorted(server.lengths)
        more = f" and {len(names) - N_NAMES} more" if len(names) > N_NAMES else ""
        raise ModelError(f"--model {model}: {server.url} serves {', '.join(names[:N_NAMES]) or 'no model'}{more}")

    def _takes_ids(self, server: Server) -> bool:
        """Whether it has /v1/completions for token ids: it is asked for one token."""
        try:
            self._sample_text(server, "", [self.tokenizer.eos_token_id], SamplingParams(max_tokens=1, seed=0))
        except ServerRefused as refusal:
            if refusal.status in (401, 403):
                raise ModelError(f"--urls: {refusal}") from None
            return False
        except ServerFailed as failure:
            raise ModelError(f"--urls: {failure}") from None
        return True

    def _note(self, text: str) -> None:
        """For the user, once."""
        with self._lock:
            if text not in self._noted:
                self._noted.add(text)
                self.notes.append(text)

    def _sample(self, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """One completion, by whichever server gives it. EngineDied when none does."""
        error, tried, n_failed = None, [], 0
        while n_failed < N_TRIES and len(tried) < N_BUSY_TRIES:
            if tried:
                self.n_retries += 1
                apart = 1 + params.seed % 8 / 8         # not all at the same moment
                if self.closed.wait(max(PAUSE_S * 2 ** (len(tried) - 1), error.wait_s) * apart):
                    break
            server = self._least_loaded(tried)
            tried.append(server)
            try:
                if self.takes_weights:
                    return self._sample_tokens(server, id, prompt_ids, params)
                if self.chat:
                    return self.chat.sample(server.url, server.name, id, prompt_ids, params,
                                            ANSWER_S + TOKEN_S * params.max_tokens)
                return self._sample_text(server, id, prompt_ids, params)
            except ServerFailed as failure:
                error, server.down_until = failure, time.monotonic() + max(DOWN_S, failure.wait_s)
                n_failed += failure.status != 429
                if failure.wait_s > LONGEST_PAUSE_S:
                    break
            finally:
                with self._lock:
                    server.n_running -= 1
        raise EngineDied(f"a request failed {len(tried)} times; last: {error}. The same command goes on from the last "
                         "finished step")

    def _least_loaded(self, tried: list[Server]) -> Server:
        """The server with the fewest requests in flight, of those that did not fail this request, nor any of late."""
        with self._lock:
            now = time.monotonic()
            server = min(self.servers, key=lambda s: (tried.count(s), s.down_until > now, s.n_running))
            server.n_running += 1
        return server

    def _sample_tokens(self, server: Server, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        answer = self._call(server.url, "POST", "/inference/v1/generate", {
            "token_ids": prompt_ids,
            "sampling_params": sampling_of(params, self.stop_ids, self.max_len - len(prompt_ids))},
            ANSWER_S + TOKEN_S * params.max_tokens)
        try:
            (choice,) = answer["choices"]
            ids, finish = list(choice["token_ids"]), choice["finish_reason"]
            versions = {str(span["version"]) for span in choice["weight_versions"]}
        except (LookupError, TypeError, ValueError):
            raise ServerFailed(f"{server.url} answered {str(answer)[:N_SHOWN]}") from None
        if versions != {self.stamp}:
            self._give_weights(server)
            raise ServerFailed(f"{server.url} sampled with weights {str(sorted(versions))[:N_SHOWN]}, not {self.stamp}")
        if finish not in ("stop", "length") or not 0 < len(ids) <= params.max_tokens:
            raise ServerFailed(f"{server.url} ended a request with {str(finish)[:N_SHOWN]!r} after {len(ids)} tokens")
        if not all(type(token) is int and 0 <= token < self.n_words for token in ids):
            raise ServerFailed(f"{server.url} answered with tokens that the model has not: {str(ids)[:N_SHOWN]}")
        return Completion(id, ids, finish)

    def _sample_text(self, server: Server, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """From a server that answers with text; its ids are counted and shown, and never trained on."""
        sampling = sampling_of(params, self.stop_ids, self.max_len - len(prompt_ids))
        del sampling["detokenize"], sampling["ignore_eos"]
        if not params.stop:
            del sampling["stop"]
        answer = self._call(server.url, "POST", "/v1/completions", {
            "model": server.name, "prompt": prompt_ids, **sampling, "skip_special_tokens": True},
            ANSWER_S + TOKEN_S * params.max_tokens)
        try:
            (choice,) = answer["choices"]
            text, finish = choice["text"].encode("utf-8", "replace").decode(), choice["finish_reason"]
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ServerFailed(f"{server.url} answered {str(answer)[:N_SHOWN]}") from None
        check_length(server.url, text, params.max_tokens)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) > 4 * params.max_tokens + 16:       # a byte that is no text comes back as a mark of three
            raise ServerFailed(f"{server.url} answered with {len(ids)} tokens where {params.max_tokens} were asked "
                               "for: it does not keep to max_tokens; leave it out of --urls")
        ends = finish == "stop" and not any(stop in text for stop in params.stop)
        return Completion(id, ids + [self.tokenizer.eos_token_id] * ends, "stop" if finish == "stop" else "length")

    def _give_weights(self, server: Server) -> None:
        """The server loads the shared folder, if it does not serve it yet. ServerFailed if it could not; EngineDied if
        it did not."""
        with server.lock:
            for _ in range(N_TRIES):
                if self._call(server.url, "GET", "/weight_info").get("weight_version") == self.stamp:
                    return
                self._call(server.url, "POST", "/update_weight_version", {"new_version": "loading"})
                self._call(server.url, "POST", "/pause?mode=abort")             # what runs there is of other weights
                try:
                    self._call(server.url, "POST", "/weight_checker", {"action": "reset"})      # zeros, to see it load
                    self._call(server.url, "POST", "/collective_rpc", {
                        "method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}, LOAD_S)
                    if not self._call(server.url, "POST", "/reset_prefix_cache").get("success"):
                        continue                        # another rank gave it the same weights and has let it go on
                    if not self._holds(server):
                        raise EngineDied(f"{server.url} does not hold the weights of {self.folder}: does it see that "
                                         f"folder, and a model of its class? `vllm serve {self.folder}` serves one")
                    self._call(server.url, "POST", "/update_weight_version", {"new_version": self.stamp})
                finally:
                    self._call(server.url, "POST", "/resume")
            raise ServerFailed(f"{server.url} did not reset its prefix cache")

    def _holds(self, server: Server) -> bool:
        """Whether the digests of all weights that the server keeps whole are those of the trainer's. Of a server that
        splits them among GPUs, those are the norms: it is they that are seen to have replaced the zeros."""
        checksums = self._call(server.url, "POST", "/weight_checker", {"action": "checksum"}, LOAD_S).get("checksums")
        if not isinstance(checksums, dict):
            raise ServerFailed(f"{server.url} gives no checksums of its weights")
        split = any(":tp1:" in key for key in checksums)
        held = {name: sha for key, sha in checksums.items() for name in [key.rpartition(":")[2]]
                if sha != EMPTY and (not split or name.endswith("norm.weight"))}
        common = held.keys() & self.digests.keys()
        return bool(common) and held.keys() <= self.digests.keys() and all(held[n] == self.digests[n] for n in common)


def is_but_served(model: str, server: Server) -> bool:
    """Whether `model` is a server's name for one, and none that could be loaded here."""
    try:
        return model in server.lengths and not locate(model)
    except ModelError:
        return True


def digests_of(given: dict[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of each weight's bytes, and of those that vLLM keeps as one, under the name that it has there."""
    digests = {name: digest(tensor) for name, tensor in given.items()}
    for name in {EMBEDDING, HEAD} & given.keys():
        digests[name] = digest(F.pad(given[name], (0, 0, 0, -len(given[name]) % PADDED_TO)))
    for name in given:
        *path, module, kind = name.split(".")
        for whole, parts in FUSED.items():
            names = [".".join([*path, part, kind]) for part in parts]
            if module == parts[0] and all(part in given for part in names):
                digests[".".join([*path, whole, kind])] = digest(torch.cat([given[part] for part in names]))
    return digests
