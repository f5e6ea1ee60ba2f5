"""The Engine contract over vLLM: fast rollouts on a GPU, one engine a GPU (or a group of them, --tp).

vLLM runs in a process of its own, so that its memory, its CUDA context and its crashes are its own. That process is a
loop over vLLM's step: it takes requests as they come, steps while there are any, and sends back what has finished. The
host talks to it over a pipe and never waits for a step: programs and tools run while the GPU samples. A process that
dies or falls silent is an EngineDied within SILENCE_S; it dies with its host, however the host ends.

The weights come from the trainer, as a folder in shared memory that vLLM reloads in place. What the engine then holds
is read back, weight by weight under the trainer's names, and compared by sha256: fused, renamed or repacked, none is
missed. Whatever --model names, vLLM gets the text model as the trainer has it, so names are the same on both sides.

Differs from TransformersEngine: samples depend on what else is in the batch (kernels round by batch size), so a run
that is repeated draws the same tasks with the same seeds, but not the same tokens.
"""

import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterable
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

import torch

from engine import (
    Completion, EngineDied, Model, ModelError, SamplingParams, cast, check_names, digest, load_model, load_tokenizer,
    stop_ids_of, untied_weights, write_weights)
from keys import without_secrets

START_S = 900           # to load a model and capture its graphs
SILENCE_S = 50          # of an engine that has work; a step takes milliseconds
GOODBYE_S = 20          # for vLLM's workers to end by themselves
POLL_S = 0.005          # that `step` waits for something to finish
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"         # a tied head is the embedding
BEAT_S = 1.0            # between two signs of life of a process that steps


class VllmEngine:
    """The Engine contract over a vLLM process. `dtype` is what it computes in: bf16 on a GPU, as the trainer does."""

    takes_weights = True
    notes = ()
    exact = False                           # the same request may be answered otherwise beside other requests

    def __init__(self, model: str | Model, n_rows: int = 256, max_len: int = 4096, device: str = "cuda", tp: int = 1,
                 memory_frac: float = 0.6, dtype: torch.dtype | None = None):
        if find_spec("vllm") is None:
            raise ModelError("--engine vllm: vLLM is not installed in this environment; start with run.sh, which makes "
                             "one that has it")
        self.tokenizer = load_tokenizer(model)
        self.dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        loaded = load_model(model)                      # the text model, whatever the folder is of
        config = self.config = loaded.config
        if tp > config.num_key_value_heads:
            raise ModelError(f"--tp {tp}: at most the {config.num_key_value_heads} key/value heads of {model}")
        self.stop_ids = stop_ids_of(loaded.generation_config, self.tokenizer)
        self.max_len = min(max_len, getattr(config, "max_position_embeddings", max_len))
        self.tp, self.version, self.n_steps = tp, 0, 0
        base = cast(untied_weights(loaded).items(), self.dtype)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        self.folder, self._lock = make_folder(sum(tensor.nbytes for tensor in base.values()))
        self._process: subprocess.Popen | None = None
        self.log_path = Path(tempfile.gettempdir()) / f"{self.folder.name}.log"
        self.keep_log = False                           # until the engine has died
        try:
            write_weights(self.folder / "base", config, base)
            self.tokenizer.save_pretrained(self.folder / "base")
            n_cached_tok = n_rows * self.max_len
            settings = {
                "model": str(self.folder / "base"), "dtype": str(self.dtype).removeprefix("torch."), "seed": 0,
                "max_model_len": self.max_len, "max_num_seqs": n_rows, "tensor_parallel_size": tp,
                "generation_config": "vllm",            # no sampling parameter from a file
                "enable_prefix_caching": "linear_attention" not in (getattr(config, "layer_types", None) or []),
                "disable_log_stats": True, "trust_remote_code": isinstance(model, Model) and model.trust_remote_code,
                **({"enforce_eager": True, "enable_chunked_prefill": False,     # seeds and chunks do not mix on a CPU
                    "max_num_batched_tokens": max(8192, self.max_len),
                    "kv_cache_memory_bytes": min(n_cached_tok * cache_bytes_a_token(config), 4 << 30)}
                   if device == "cpu" else {"gpu_memory_utilization": memory_frac, "enable_sleep_mode": True})}
            self._start(settings, device)
            self._prove(base)
            (self.folder / "base" / "model.safetensors").unlink()              # memory: vLLM has its own
        except BaseException:
            self.close()
            raise

    def _start(self, settings: dict, device: str) -> None:
        # It pickles, and that is safe: a socket pair without a name, held by this process and the one started here, and
        # both run this file. What a model says crosses it as ids, and as text that is never unpickled.
        ours, theirs = Pipe()
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if device == "cpu" else {}
        gpu = {"CUDA_VISIBLE_DEVICES": visible_gpus(device, self.tp)} if device != "cpu" else {}
        # it is no rank of ours
        torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        env = {key: value for key, value in without_secrets(os.environ).items()
               if key not in torchrun and not key.startswith("TORCHELASTIC_")}
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **cpu, **gpu}
        with open(self.log_path, "wb") as log, theirs:
            self._process = subprocess.Popen(           # a session of its own: Ctrl-C is for the host
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), json.dumps(settings)],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        self._pipe: Connection = ours
        self._outbox: SimpleQueue = SimpleQueue()       # sent by a thread: a full pipe must not stop the host
        threading.Thread(target=send_all, args=(self._outbox, ours), daemon=True).start()
        self._heard = time.monotonic()
        self._running: set[Hashable] = set()
        self._finished: list[Completion] = []
        self._ask("ready", limit_s=START_S)

    # ---- the contract ----

    def submit(self, id: Hashable, prompt_ids: list[int], params: SamplingParams,
               after: Hashable | None = None) -> None:
        """Hands a request over at once. `after` is not needed: vLLM finds shared prefixes itself."""
        if not prompt_ids or params.max_tokens < 1:
            raise ValueError(f"request {id!r}: {len(prompt_ids)} prompt tokens, max_tokens {params.max_tokens}")
        if len(prompt_ids) >= self.max_len:             # vLLM would refuse it, and all that was asked with it
            self._finished.append(Completion(id, [], "too_long"))
            return
        if not self._running:
            self._heard = time.monotonic()              # it was silent because it had nothing to do
        self._running.add(id)
        sampling = sampling_of(params, self.stop_ids, self.max_len - len(prompt_ids))
        self._outbox.put(("submit", id, list(prompt_ids), sampling))

    @property
    def idle(self) -> bool:
        return not self._running and not self._finished

    def step(self) -> list[Completion]:
        """What has finished since the last call; waits POLL_S for it at most."""
        self.n_steps += 1
        while self._running and self._pipe.poll(0 if self._finished else POLL_S):
            kind, *content = self._receive()
            if kind == "finished":
                for id, ids, finish, versions in content[0]:
                    if versions != {str(self.version)}:
                        raise EngineDied(f"request {id!r} was sampled with weights {versions}, not {self.version}")
                    if id in self._running:             # else it was given up by reset()
                        self._running.remove(id)
                        self._finished.append(Completion(id, ids, finish))
        self._check_silence()
        finished, self._finished = self._finished, []
        return finished

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights by way of a folder, forgets what was cached under the old ones, and proves it:
        EngineDied if what vLLM then holds is not what was given. Call it when idle."""
        if not self.idle:
            raise RuntimeError("load_weights while requests are running would mix two policies in one completion")
        given = cast(named, self.dtype)
        check_names(self.shapes, given)
        folder = self.folder / f"version_{version}"
        write_weights(folder, self.config, given)
        self._ask("load", str(folder), str(version), limit_s=START_S)
        self.version = version
        self._prove(given)
        shutil.rmtree(folder)

    def release(self, id: Hashable) -> None:
        """vLLM frees finished requests itself."""

    def sleep(self) -> None:
        """Gives the GPU's memory to the trainer: weights move to host memory, the cache is dropped (level 1)."""
        self._ask("sleep", limit_s=START_S)

    def wake(self) -> None:
        self._ask("wake", limit_s=START_S)

    def reset(self) -> None:
        """Forgets all requests and cached prefixes."""
        self._ask("reset")
        self._running, self._finished = set(), []

    def close(self) -> None:
        """Ends the process and all below it."""
        if self._process is not None:
            self._outbox.put(None)
            self._pipe.close()
            if self.tp > 1 and self._process.poll() is None:            # it gives back what its workers shared
                try:
                    self._process.wait(GOODBYE_S)
                except subprocess.TimeoutExpired:
                    pass
            kill_group(self._process)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        if not self.keep_log:
            self.log_path.unlink(missing_ok=True)

    # ---- inside ----

    def _prove(self, given: dict[str, torch.Tensor]) -> None:
        """EngineDied unless the engine holds these weights, to the last bit: each by its sha256 or, if it is split
        among GPUs, by the sum of its bits over all of them."""
        wanted = given.keys()
        if EMBEDDING in given:                          # by which a tied head multiplies
            given = {HEAD: given[EMBEDDING], **given}
        reports = self._ask("read", {name: tuple(tensor.shape) for name, tensor in given.items()}, limit_s=START_S)
        proved, wrong = set(), set()
        for parts in set().union(*reports):
            held = [report.get(parts) for report in reports]                    # one a GPU
            if all(isinstance(one, list) for one in held):
                right = all(one == [digest(given[part]) for part in parts] for one in held)
            else:
                right = None not in held and sum(held) == sum(sum_bits(given[part]) for part in parts)
            (proved if right else wrong).update(parts)
        if wrong := wrong | (wanted - proved):
            raise EngineDied(f"the engine does not hold the weights that it was given: {sorted(wrong)[:5]}")

    def _receive(self) -> tuple:
        """The next message; EngineDied at the end of the pipe, or if it is the engine's last words."""
        try:
            kind, *content = self._pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._died()
        self._heard = time.monotonic()
        if kind == "failed":
            self._died(content[0])
        return kind, *content

    def _ask(self, *message, limit_s: float | None = None) -> object:
        """The answer to a message that is not a request for tokens."""
        limit_s = limit_s or SILENCE_S
        self._outbox.put(message)
        give_up = time.monotonic() + limit_s
        while True:
            if not self._pipe.poll(max(0.0, give_up - time.monotonic())):
                self._died(f"it did not answer '{message[0]}' in {limit_s:g} s")
            kind, *content = self._receive()
            if kind == "answer":
                return content[0]

    def _check_silence(self) -> None:
        if self._process.poll() is not None and not self._pipe.poll():
            self._died()
        if self._running and time.monotonic() - self._heard > SILENCE_S:
            self._died(f"no sign of life for {SILENCE_S} s")

    def _died(self, why: str = "") -> None:
        kill_group(self._process)
        why = why or f"its process ended with code {self._process.returncode}"
        said = [line for line in self.log_path.read_text(errors="replace").splitlines() if "error" in line.lower()][-4:]
        self.keep_log = True
        raise EngineDied("\n  ".join([f"the vLLM engine is gone: {why}", *said, f"Its log: {self.log_path}. The same "
                                      "command goes on from the last finished step."]))


def sampling_of(params: SamplingParams, stop_ids: set[int], room: int) -> dict:
    """vLLM's sampling parameters, every one that could change a token."""
    return {"n": 1, "max_tokens": min(params.max_tokens, room), "min_tokens": 0, "seed": params.seed % (1 << 63),
            "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": 0.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "stop": list(params.stop), "include_stop_str_in_output": True, "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,                         # stop_ids are all that end a completion
            "detokenize": bool(params.stop), "skip_special_tokens": False, "logprobs": None}


def cache_bytes_a_token(config) -> int:
    """Keys and values of all layers, in fp32."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim


def make_folder(n_bytes: int) -> tuple[Path, TextIO]:
    """A folder for weights of n_bytes, in shared memory if there is room, and the lock that says it is in use. Those of
    processes that were killed go."""
    shm, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    roomy = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * n_bytes + (64 << 20)
    where = shm if roomy else disk
    with open(disk / "whale-engines.lock", "a") as all_folders:         # a new one is not locked at once
        fcntl.flock(all_folders, fcntl.LOCK_EX)
        for left in where.glob("whale-engine-*"):
            try:
                with open(left / "lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
            except OSError:
                pass                                                    # in use, or not ours
        folder = Path(tempfile.mkdtemp(prefix="whale-engine-", dir=where))
        lock = open(folder / "lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def visible_gpus(device: str, tp: int) -> str:
    """The GPUs of an engine: the one of its rank, and of the next ranks with --tp."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if visible != [""] else [str(i) for i in range(torch.cuda.device_count())]
    first = int(device.partition(":")[2] or 0)
    return ",".join(visible[first:first + tp])


def send_all(outbox: SimpleQueue, pipe: Connection) -> None:
    """Sends what is put into the outbox, until None or until nobody reads any more."""
    while (message := outbox.get()) is not None:
        try:
            pipe.send(message)
        except OSError:
            return


def kill_group(process: subprocess.Popen) -> None:
    """Ends a process that leads its group, and the group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# ---- the engine's own process ---------------------------------------------------------------------------------------


def serve(pipe: Connection, settings: dict, engines: list) -> None:
    """Takes messages and steps, until the host closes the pipe. The engine is left in `engines`, to be shut down."""
    from vllm import SamplingParams as VllmParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**settings))
    engines.append(engine)
    engine.set_weight_version("0")
    engine.add_request("warm-up", {"prompt_token_ids": [1, 2]}, VllmParams(max_tokens=2, detokenize=False))
    while engine.has_unfinished_requests():     # what is compiled at first use is compiled before anybody waits for it
        engine.step()
    ids: dict[str, Hashable] = {}               # vLLM's request ids are strings
    n_requests, beat = 0, time.monotonic()
    while True:
        while not engine.has_unfinished_requests() or pipe.poll():
            kind, *content = pipe.recv()
            if kind == "submit":
                id, prompt_ids, params = content
                ids[str(n_requests)] = id
                engine.add_request(str(n_requests), {"prompt_token_ids": prompt_ids}, VllmParams(**params))
                n_requests += 1
                continue
            answer = None
            if kind == "reset":
                engine.abort_request(list(ids))
                ids.clear()
                forget_prefixes(engine)
            elif kind == "load":
                folder, version = content
                engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                engine.apply_model(repack_head)
                forget_prefixes(engine)
                engine.set_weight_version(version)
            elif kind == "read":
                answer = engine.apply_model(Read(content[0]))
            elif kind == "sleep" and settings.get("enable_sleep_mode"):
                engine.sleep(level=1)
            elif kind == "wake" and settings.get("enable_sleep_mode") and engine.is_sleeping():
                engine.wake_up()
            pipe.send(("answer", answer))
        finished = []
        for output in engine.step():
            if output.finished:
                said = output.outputs[0]
                if said.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"a request ended with {said.finish_reason!r}")
                versions = {span.version for span in said.weight_versions or []}
                finished.append((ids.pop(output.request_id), list(said.token_ids), said.finish_reason, versions))
        if finished or time.monotonic() - beat > BEAT_S:
            beat = time.monotonic()
            pipe.send(("finished", finished))


def forget_prefixes(engine) -> None:
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache")


class Read:
    """Called on the model of each GPU: what it holds, as {names at the trainer's: their sha256s, or the sum of the bits
    of this GPU's part}. Names stand together where vLLM keeps them as one. A class, since vLLM pickles it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes

    def __call__(self, model: torch.nn.Module) -> dict[tuple[str, ...], list[str] | int]:
        report: dict[tuple[str, ...], list[str] | int] = {}
        for parameter, parts in made_of(model, self.shapes).items():
            module = model.get_submodule(parameter.rpartition(".")[0])
            held = dense(module, model.get_parameter(parameter))
            n_rows = [self.shapes[part][0] for part in parts]
            if len(held) >= sum(n_rows) and tuple(held.shape[1:]) == self.shapes[parts[0]][1:]:
                report[parts] = [digest(rows) for rows in held[:sum(n_rows)].split(n_rows)]     # then padding, if any
            else:
                report[parts] = sum_bits(held)
        return report


def made_of(model: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{a parameter of vLLM's: the weights that are its rows, in order}. E.g. qkv_proj is q_proj, k_proj and v_proj."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}      # a tied head, too
    fused = {part: (whole, parts) for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
             for part in parts}
    found = {}
    for name in names:
        *path, module, kind = name.split(".")
        if name in own:
            found[name] = (name,)
        elif module in fused:
            whole, parts = fused[module]
            found[".".join([*path, whole, kind])] = tuple(".".join([*path, part, kind]) for part in parts)
    return {parameter: parts for parameter, parts in found.items() if parameter in own}


def sum_bits(tensor: torch.Tensor) -> int:
    """The sum of a weight's bit patterns: that of its parts is that of the whole, and zeros add nothing."""
    return int(tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).sum(dtype=torch.int64))


def dense(module: torch.nn.Module, parameter: torch.Tensor) -> torch.Tensor:
    """A weight as a plain matrix. Where a CPU's kernels work on a repacked copy, the layer is asked what it multiplies
    by: its product with the identity. Of a repacked convolution, vLLM keeps the original too."""
    if (unpacked := getattr(module, "_cpu_unpacked_conv_weight", None)) is not None:
        return unpacked[:, None]
    if not hasattr(module, "cpu_linear"):
        return parameter
    n_inputs = parameter.shape[1] if parameter.numel() else module.input_size_per_partition
    return module.cpu_linear(torch.eye(n_inputs, dtype=parameter.dtype), parameter, None).T


def repack_head(model: torch.nn.Module) -> None:
    """reload_weights forgets the copy of a tied head that a CPU's kernels work on: it would multiply by the old one."""
    if hasattr(getattr(model, "lm_head", None), "cpu_linear"):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def main() -> None:
    import ctypes

    fd, host, settings = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)          # PR_SET_PDEATHSIG: dies with its host
    if os.getppid() != host:
        return
    pipe, engines = Connection(fd), []
    try:
        serve(pipe, settings, engines)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        for engine in engines:                                          # the host is gone, or done with us
            engine.engine_core.shutdown()
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    finally:
        os.killpg(0, signal.SIGKILL)                                    # and with it what vLLM started


if __name__ == "__main__":
    main()
