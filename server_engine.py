"""The Engine contract over servers: any number of vLLM servers, on any machines, that share a folder with this one.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --port 8000 --enable-scale-out      # on each rollout machine
    bash run.sh math --engine server --urls http://a:8000,http://b:8000 --share /shared/folder ...

In dev mode a server takes weights; scale-out is /inference/v1/generate, token ids in and out. A request goes to the
server with the fewest in flight; one that fails is tried again elsewhere. Weights are written once to the shared folder
and reloaded by every server, which is then asked for its digests. Every completion carries the version of the weights
that sampled it: one of another version (of a server that was restarted) is thrown away, and the server is given the
weights again. Dev mode lets whoever reaches the port change the model: use it on a network of your own.

A server that speaks only OpenAI's /v1/completions cannot take weights; it serves `--method harness`, and `eval`.
"""

import hashlib
import shutil
import threading
import time
import uuid
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import requests
import torch
from safetensors.torch import save_file

from engine import (
    Completion, EngineDied, ModelError, SamplingParams, check_names, digest, load_model, load_tokenizer, stop_ids_of,
    untied_weights)
from vllm_engine import POLL_S, sampling_of

N_TRIES = 4             # of a request, each after a longer pause and, where there is another, on another server
PAUSE_S = 1.0           # before the second try; doubled before each further one
DOWN_S = 30             # that a server which failed is asked only if there is no other
ANSWER_S = 600          # to sample one completion
LOAD_S = 900            # to reload the weights
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
EMPTY = hashlib.sha256(b"").hexdigest()         # of a weight that a CPU server keeps repacked, out of sight


class ServerFailed(RuntimeError):
    """This try failed; another may not."""


class ServerRefused(EngineDied):
    """The server answers, and will not do this: another try would get the same."""


@dataclass(eq=False)
class Server:
    url: str
    name: str                                   # of the model that it serves
    max_len: int
    dtype: str                                  # that it computes in, e.g. "bfloat16"; "": it cannot take weights
    n_running: int = 0
    down_until: float = 0.0                     # time.monotonic()
    lock: threading.Lock = field(default_factory=threading.Lock)       # held while it is given weights


class ServerEngine:
    """The Engine contract over HTTP. `share`: a folder that this machine and all servers see under the same path.

    Several ranks may use the same servers: the one that `leads` gives them their weights, and all of them call a
    version by the `name` that they have in common. Another run's version 3 is not ours.
    """

    exact = False

    def __init__(self, model: str, urls: str, share: Path, n_rows: int = 256, max_len: int = 4096,
                 name: str = "", leads: bool = True):
        self.tokenizer = load_tokenizer(model)
        self.local = threading.local()          # a connection pool a thread
        self.servers = [self._meet(url.strip().rstrip("/")) for url in urls.split(",") if url.strip()]
        if not self.servers:
            raise ModelError("--engine server needs --urls URL,URL")
        dtypes = {server.dtype for server in self.servers}
        if len(dtypes) > 1:
            raise ModelError("--urls: all servers must compute in one dtype, and all or none in dev mode; these are "
                             + ", ".join(f"{server.url} {server.dtype or 'no dev mode'}" for server in self.servers))
        self.takes_weights = dtypes != {""}
        self.dtype = getattr(torch, dtypes.pop() or "bfloat16")
        self.max_len = min([max_len, *(server.max_len for server in self.servers)])
        self.share, self.folder = share, None
        self.version, self.n_steps = 0, 0
        self.name, self.leads, self.stamp = name or uuid.uuid4().hex[:8], leads, ""
        self.n_retries = 0                      # for the curious
        self._threads = ThreadPoolExecutor(n_rows)
        self._futures: dict[Future, Hashable] = {}
        self._finished: list[Completion] = []
        loaded = load_model(model, self.dtype)
        self.config, self.stop_ids = loaded.config, stop_ids_of(loaded, self.tokenizer)
        if self.takes_weights:                  # whatever they serve now, it is this from here on
            self.shapes = {name: tuple(tensor.shape) for name, tensor in untied_weights(loaded).items()}
            self.load_weights(untied_weights(loaded).items(), 0)

    # ---- the contract ----

    def submit(self, id: Hashable, prompt_ids: list[int], params: SamplingParams,
               after: Hashable | None = None) -> None:
        if not prompt_ids or params.max_tokens < 1:
            raise ValueError(f"request {id!r}: {len(prompt_ids)} prompt tokens, max_tokens {params.max_tokens}")
        if len(prompt_ids) >= self.max_len:
            self._finished.append(Completion(id, [], "too_long"))
            return
        self._futures[self._threads.submit(self._sample, id, list(prompt_ids), params)] = id

    @property
    def idle(self) -> bool:
        return not self._futures and not self._finished

    def step(self) -> list[Completion]:
        """What has finished since the last call; waits POLL_S for it at most."""
        self.n_steps += 1
        done, _ = wait(self._futures, POLL_S, return_when="FIRST_COMPLETED")
        for future in done:
            del self._futures[future]
            self._finished.append(future.result())
        finished, self._finished = self._finished, []
        return finished

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Writes the weights to the shared folder and has every server load them, forget its prefixes and prove it."""
        if not self.takes_weights:
            raise ModelError("these servers cannot take weights: start them with VLLM_SERVER_DEV_MODE=1, or use "
                             "--method harness")
        if not self.idle:
            raise RuntimeError("load_weights while requests are running would mix two policies in one completion")
        given = {name: tensor.detach().to(self.dtype).cpu().contiguous() for name, tensor in named}
        check_names(self.shapes, given)
        before, self.folder = self.folder, self.share / f"version_{version}"
        self.version, self.digests = version, digests_of(given)
        self.stamp = f"{self.name}-{version}"
        if not self.leads:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(self.folder)
        save_file(given, self.folder / "model.safetensors", metadata={"format": "pt"})
        with ThreadPoolExecutor(len(self.servers)) as threads:
            list(threads.map(self._give_weights, self.servers))
        if before and before != self.folder:
            shutil.rmtree(before)               # the last version stays, for a server that is restarted

    def release(self, id: Hashable) -> None:
        """Servers free finished requests themselves."""

    def sleep(self) -> None:
        """Servers have GPUs of their own."""

    def wake(self) -> None:
        """Nothing to do."""

    def reset(self) -> None:
        """Waits for what is running and forgets it."""
        wait(self._futures)
        self._futures, self._finished = {}, []

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.folder and self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- inside ----

    def _meet(self, url: str) -> Server:
        """What a server serves and can do."""
        try:
            card = self._call(url, "GET", "/v1/models", limit_s=30)["data"][0]
        except (ServerFailed, ServerRefused, LookupError, TypeError) as error:
            raise ModelError(f"--urls: {url} is no OpenAI-compatible server that answers: {error}") from None
        try:
            config = self._call(url, "GET", "/server_info?config_format=json", limit_s=30)["vllm_config"]
            dtype = config["model_config"]["dtype"].removeprefix("torch.")
        except (ServerFailed, ServerRefused, LookupError, TypeError, AttributeError):
            dtype = ""                          # no vLLM server in dev mode
        else:
            try:
                self._call(url, "POST", "/inference/v1/generate",
                           {"token_ids": [1], "sampling_params": {"max_tokens": 1}})
            except (ServerFailed, ServerRefused) as error:
                raise ModelError(f"--urls: {error}") from None
        return Server(url, card["id"], card.get("max_model_len") or 1 << 30, dtype)

    def _call(self, url: str, method: str, path: str, body: dict | None = None, limit_s: float | None = None) -> dict:
        """One request; ServerFailed unless it is answered with a JSON object."""
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            self.local.session.trust_env = False
        try:
            response = self.local.session.request(method, url + path, json=body, timeout=(10, limit_s or ANSWER_S))
            if response.status_code != 200:
                again = response.status_code >= 500 or response.status_code in (408, 429)
                raise (ServerFailed if again else ServerRefused)(
                    f"{url}{path} answered {response.status_code}: {response.text[:300]}")
            answer = response.json() if response.content else {}
        except (requests.RequestException, ValueError) as error:
            raise ServerFailed(f"{url}{path}: {type(error).__name__}: {str(error)[:300]}") from None
        if not isinstance(answer, dict):
            raise ServerFailed(f"{url}{path} answered no JSON object")
        return answer

    def _sample(self, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """One completion, by whichever server gives it. EngineDied when none does."""
        error, tried = None, []
        for attempt in range(N_TRIES):
            if attempt:
                self.n_retries += 1
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            server = self._least_loaded(tried)
            tried.append(server)
            try:
                if self.takes_weights:
                    return self._sample_tokens(server, id, prompt_ids, params)
                return self._sample_text(server, id, prompt_ids, params)
            except ServerFailed as failure:
                error, server.down_until = failure, time.monotonic() + DOWN_S
            finally:
                server.n_running -= 1
        raise EngineDied(f"a request failed {N_TRIES} times; last: {error}. The same command goes on from the last "
                         "finished step")

    def _least_loaded(self, tried: list[Server]) -> Server:
        """The server with the fewest requests in flight, of those that did not fail this request, nor any of late."""
        now = time.monotonic()
        server = min(self.servers, key=lambda s: (tried.count(s), s.down_until > now, s.n_running))
        server.n_running += 1
        return server

    def _sample_tokens(self, server: Server, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        answer = self._call(server.url, "POST", "/inference/v1/generate", {
            "token_ids": prompt_ids,
            "sampling_params": sampling_of(params, self.stop_ids, self.max_len - len(prompt_ids))})
        try:
            (choice,) = answer["choices"]
            ids, finish = list(choice["token_ids"]), choice["finish_reason"]
            versions = {span["version"] for span in choice["weight_versions"]}
        except (LookupError, TypeError, ValueError):
            raise ServerFailed(f"{server.url} answered {str(answer)[:300]}") from None
        if versions != {self.stamp}:
            self._give_weights(server)
            raise ServerFailed(f"{server.url} sampled with weights {sorted(versions)}, not {self.stamp}")
        if finish not in ("stop", "length") or not ids:
            raise ServerFailed(f"{server.url} ended a request with {finish!r} after {len(ids)} tokens")
        return Completion(id, ids, finish)

    def _sample_text(self, server: Server, id: Hashable, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """From a server that answers with text; its ids are counted and shown, and never trained on."""
        sampling = sampling_of(params, self.stop_ids, self.max_len - len(prompt_ids))
        del sampling["detokenize"], sampling["ignore_eos"]
        if not params.stop:
            del sampling["stop"]
        answer = self._call(server.url, "POST", "/v1/completions", {
            "model": server.name, "prompt": prompt_ids, **sampling, "skip_special_tokens": True})
        try:
            (choice,) = answer["choices"]
            text, finish = str(choice["text"]), choice["finish_reason"]
        except (LookupError, TypeError, ValueError):
            raise ServerFailed(f"{server.url} answered {str(answer)[:300]}") from None
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        ends = finish == "stop" and not any(stop in text for stop in params.stop)
        return Completion(id, ids + [self.tokenizer.eos_token_id] * ends, "stop" if finish == "stop" else "length")

    def _give_weights(self, server: Server) -> None:
        """The server loads the shared folder, if it does not serve it yet. EngineDied if it cannot or did not."""
        with server.lock:
            try:
                if self._call(server.url, "GET", "/weight_info").get("weight_version") == self.stamp:
                    return
                self._call(server.url, "POST", "/pause?mode=abort")        # what runs there is of other weights
                self._call(server.url, "POST", "/collective_rpc", {
                    "method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}, LOAD_S)
                if not self._call(server.url, "POST", "/reset_prefix_cache").get("success"):
                    raise EngineDied(f"{server.url} did not reset its prefix cache")
                if not self._holds(server):
                    raise EngineDied(f"{server.url} does not hold the weights of {self.folder}: does it see that "
                                     f"folder, and does it serve a {self.config.architectures[0]}?")
                self._call(server.url, "POST", "/update_weight_version", {"new_version": self.stamp})
                self._call(server.url, "POST", "/resume")
            except ServerFailed as failure:
                raise EngineDied(f"the weights could not be loaded: {failure}") from None

    def _holds(self, server: Server) -> bool:
        """Whether the digests of all weights that the server keeps whole are those of the trainer's."""
        checksums = self._call(server.url, "POST", "/weight_checker", {"action": "checksum"}, LOAD_S)["checksums"]
        split = any(":tp1:" in key for key in checksums)
        held = {name: sha for key, sha in checksums.items() for name in [key.rpartition(":")[2]]
                if sha != EMPTY and (not split or name.endswith("norm.weight"))}
        common = held.keys() & self.digests.keys()
        return bool(common) and held.keys() <= self.digests.keys() and all(held[n] == self.digests[n] for n in common)


def digests_of(given: dict[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of each weight's bytes, and of those that vLLM keeps as one, under the name that it has there."""
    digests = {name: digest(tensor) for name, tensor in given.items()}
    for name in given:
        *path, module, kind = name.split(".")
        for whole, parts in FUSED.items():
            names = [".".join([*path, part, kind]) for part in parts]
            if module == parts[0] and all(part in given for part in names):
                digests[".".join([*path, whole, kind])] = digest(torch.cat([given[part] for part in names]))
    return digests
