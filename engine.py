"""What every engine shares: the contract, what may be asked and is answered, loading a model, proving weights.

An engine serves the model token-in/token-out: prompts as ids go in, sampled ids come out, and no text is ever
re-tokenised. The contract, kept by transformers_engine.py, vllm_engine.py and server_engine.py:

    submit(id, prompt_ids, params, after)   at any time; `after`: a finished request whose sequence this prompt extends
    step() -> list[Completion]              what has finished
    load_weights(named tensors, version)    all of them, and the engine proves that it holds them; only when idle
    sleep(), wake()                         between phases; release(id): no prompt will extend that request any more
    reset(), close()                        forgets all requests and what is cached; ends what the engine has started
    idle, version, tokenizer, stop_ids, max_len
    exact                                   the same requests in the same order are answered with the same tokens
    takes_weights                           or it serves what it serves (an OpenAI-compatible server)
    notes                                   what its user should know of it, until it is taken from there
"""

import hashlib
import os
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from keys import redact
from files import naming

disable_progress_bar()          # "Loading weights" would interrupt the run's own bars

DIGEST_BYTES = 4 << 20  # that one thread hashes at a time


class EngineDied(RuntimeError):
    """The engine's process or server ended, failed or fell silent; the message holds its last words."""


class ModelError(ValueError):
    """The model folder is missing, broken, or of a kind that this engine cannot serve; the message says what to do."""


@dataclass(frozen=True)
class Model:
    """A model, where its name alone does not say enough. What takes one takes a name or a path too: a plain str."""
    name: str                                   # an HF folder, a .gguf file or a hub name
    revision: str = ""                          # of a hub name: a commit, a tag or a branch; "": main
    trust_remote_code: bool = False             # whether code that comes with it is run, with all rights of this user

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SamplingParams:
    """All of them are always given to the engine: nothing is taken from a model's generation_config.json."""
    max_tokens: int
    seed: int                        # from the request's coordinates, never from a running generator
    temperature: float = 1.0         # 0 is greedy
    top_k: int = 20                  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    stop: tuple[str, ...] = ()       # strings that end the completion; their tokens are part of it


@dataclass(frozen=True)
class Completion:
    id: Hashable
    ids: list[int]                   # sampled ids, the stop token included
    finish: str                      # "stop", "length", or "too_long": the prompt does not fit and nothing was sampled
    usage: tuple[int, int] | None = None    # tokens of prompt and completion as a server counted them, if ids are none


def weights_checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 over name, dtype, shape and bytes, by name. Trainer and engine differ: the engine's weights are stale.

    Takes one tensor at a time: they may be made only when asked for. Of its bytes it takes the sha256 of each piece, so
    that cores share the work: it would cost more than the loading.
    """
    lines = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, tensor in named:
            content = bytes_of(tensor)
            pieces = [content[start:start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]
            hashed = pool.map(_sha256, pieces) if len(pieces) > 1 else map(_sha256, pieces)
            lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sha256(b''.join(hashed)).hex()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def cast(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights in main memory, in the dtype in which vLLM holds them: all in `dtype` but the decay rates of Qwen3.5's
    linear attention, which it keeps in fp32."""
    return {name: tensor.detach().to(torch.float32 if name.endswith("A_log") else dtype).cpu().contiguous()
            for name, tensor in named}


def write_weights(folder: Path, config: PreTrainedConfig, weights: dict[str, torch.Tensor]) -> None:
    """A folder that vLLM loads."""
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder, SafetensorError):
        config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def digest(tensor: torch.Tensor) -> str:
    """sha256 of a weight's bytes."""
    return _sha256(bytes_of(tensor)).hex()


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, (n,) uint8, in main memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _sha256(piece: np.ndarray | bytes) -> bytes:
    return hashlib.sha256(piece).digest()


def untied_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """name -> live tensor; a tied tensor once, under the name that checkpoints use."""
    tied = model.all_tied_weights_keys                              # {tied name: name in the checkpoint}
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


def check_names(shapes: dict[str, tuple[int, ...]], given: dict[str, torch.Tensor]) -> None:
    """ModelError unless `given` has exactly the weights of these names and shapes."""
    if shapes.keys() != given.keys():
        raise ModelError(f"weights do not match: missing {sorted(shapes.keys() - given.keys())[:5]}, "
                         f"unknown {sorted(given.keys() - shapes.keys())[:5]}")
    for name, tensor in given.items():
        if tuple(shapes[name]) != tuple(tensor.shape):
            raise ModelError(f"weights do not match: {name} is {tuple(shapes[name])}, got {tuple(tensor.shape)}")


def stop_ids_of(generation: GenerationConfig | None, tokenizer) -> set[int]:
    """The tokens that end a completion, as tokenizer and generation_config.json name them."""
    stops = generation.eos_token_id if generation else None
    return {tokenizer.eos_token_id} | set([stops] if isinstance(stops, int) else stops or [])


def is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith(".gguf") and \
        not Path(name).exists()


def locate(model: str | Path | Model) -> dict[str, object]:
    """from_pretrained's arguments for a model: all that is loaded of one, is loaded by them."""
    model = model if isinstance(model, Model) else Model(str(model))
    path, where = Path(model.name), {"trust_remote_code": model.trust_remote_code}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"--model {model}: no such file")
        return where | {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if is_hub_name(model.name):
        return where | {"pretrained_model_name_or_path": model.name, "revision": model.revision or "main"}
    if not path.is_dir():
        raise ModelError(f"--model {model}: no such folder; give an HF folder, a .gguf file or a hub name (owner/name)")
    if not (path / "config.json").is_file():
        raise ModelError(f"--model {model}: a folder without config.json is no HF model")
    return where | {"pretrained_model_name_or_path": model.name}


def find_commit(name: str, revision: str = "", ask_hub: bool = True) -> str:
    """The commit of a hub model that a branch, a tag or a commit ("": main) stands for: by the hub's cache on this
    machine, else by the hub's word. ModelError if neither knows; without `ask_hub`, "" then."""
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
        if ask_hub and not isinstance(found, str):
            found = hf_hub_download(name, "config.json", revision=revision or "main")       # and remembers the branch
        return Path(found).parent.name if isinstance(found, str) else ""
    except Exception as error:                          # another project's code, over a network: it may raise anything
        asked, why = f" --revision {revision}" * bool(revision), f"{type(error).__name__}: {redact(str(error))[:300]}"
        raise ModelError(f"--model {name}{asked}: is not in the hub's cache on this machine, and the hub was not "
                         f"reached or does not have it: {why}. A folder can be given in its place") from None


@contextmanager
def naming_the_model(model: str | Path | Model) -> Iterator[None]:
    """What transformers and safetensors raise for a missing, cut or foreign model, as one error that names it."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:                          # any: tokenizers raises no class of its own
        if "custom code" in str(error):
            raise ModelError(f"--model {model}: is of a kind that only code which comes with it can load, and that is "
                             "not run; if you have read it, --trust-remote-code true runs it, with all rights of this "
                             "user") from None
        why = f"{type(error).__name__}: {redact(str(error))[:400]}"
        raise ModelError(f"--model {model}: cannot be loaded: {why}") from error


def load_tokenizer(model: str | Path | Model):
    """The tokenizer of a model."""
    with naming_the_model(model):
        tokenizer = AutoTokenizer.from_pretrained(**locate(model))
    if tokenizer.eos_token_id is None:
        raise ModelError(f"--model {model}: its tokenizer names no eos_token, so no reply could end")
    return tokenizer


def find_tokenizer(model: str | Model):
    """The tokenizer of a model that is on this machine, else None. Nothing is downloaded."""
    path = Path(str(model))
    if (path / "config.json").is_file() or path.suffix == ".gguf" and path.is_file():
        return load_tokenizer(model)
    if is_hub_name(str(model)):
        try:
            return AutoTokenizer.from_pretrained(**locate(model), local_files_only=True)
        except (OSError, ValueError):           # it is not, or not whole
            pass
    return None


def load_generation_config(model: str | Path | Model) -> GenerationConfig:
    """Of a model that is on this machine, as the loaded model would have it."""
    with naming_the_model(model):
        where = locate(model)
        try:
            return GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"], local_files_only=True,
                                                    revision=where.get("revision", "main"))
        except OSError:
            return GenerationConfig.from_model_config(AutoConfig.from_pretrained(**where, local_files_only=True))


def load_model(model: str | Path | Model, dtype: torch.dtype = torch.float32,
               attention: str = "sdpa") -> torch.nn.Module:
    """A causal LM in eval mode. transformers alone would keep the stored dtype, and invent weights that are missing.

    Safetensors and GGUF only, never pickle.
    """
    with naming_the_model(model):
        loaded, loading = AutoModelForCausalLM.from_pretrained(
            **locate(model), dtype=dtype, attn_implementation=attention, use_safetensors=True,
            output_loading_info=True)
    if broken := {kind: sorted(map(str, names))[:5] for kind, names in loading.items() if names}:
        raise ModelError(f"--model {model}: its weights do not fit {type(loaded).__name__}: {broken}")
    if getattr(loaded, "hf_quantizer", None) is not None:       # a .gguf, dequantised by now: a plain model from here
        loaded.hf_quantizer = None
        del loaded.config.quantization_config
    loaded.config.architectures = [type(loaded).__name__]       # of a vision-language folder, its text model
    return loaded.eval()
