"""What one GPU does with the paper's model, in minutes and without network: `bash run.sh gpu-check`.

Random weights of exactly Qwen3.5-2B's shape (speed does not depend on what the weights say) go through the code of a
real run: the engine samples, the trainer takes a minibatch, new weights go into the engine, and two weight steps of the
`paper` preset run whole. Rates stand beside what this very card reaches on one large matrix product (MFU: model FLOPs
utilisation, 6 N a trained token and 2 N a sampled one, attention and recomputation not counted).

Every stop token is one in 256 of the vocabulary, so replies are 256 tokens long on average; the verifier of the two
steps is a coin (a hash of the reply), since random weights solve nothing. What the machine lacks is named and left out.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5TextConfig

import config
from engine import SamplingParams, load_model, load_tokenizer, untied_weights
from rft import Trainer
from rollout import Sequence
from files import UsageError, write_atomically
from screen import Screen
from tasks import Verdict
from team import open_engine
from whale import Run, train_whale

QWEN3_5_2B = dict(              # Qwen/Qwen3.5-2B, text_config of its config.json
    vocab_size=248320, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=262144, tie_word_embeddings=True)
STOP_EVERY = 256                # of the vocabulary, one id in so many ends a reply
LEFT_OUT = (RuntimeError, ValueError)       # why a part cannot run here: a dead engine, no memory, a missing kernel ...


def check(cfg: config.Config, shape: PreTrainedConfig, sampled: tuple[int, int], trained: tuple[int, int]) -> dict:
    """All parts -> what is written. `sampled`: requests, and tokens each; `trained`: rows, and tokens each."""
    screen = Screen()
    folder = Path(tempfile.mkdtemp(prefix="whale-gpu-check-", dir=cfg.out))
    found = {"machine": machine(cfg.device), "left_out": {}}

    def part(name: str, measure: Callable[[], dict]) -> None:
        started = time.monotonic()
        try:
            found[name] = measure() | {"part_s": round(time.monotonic() - started, 1)}
            screen.say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
        except LEFT_OUT as error:
            found["left_out"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            screen.say(f"{name}: left out, {found['left_out'][name]}")

    try:
        model = make_model(shape, folder / "model", cfg.device)
        cfg = replace(cfg, model=str(model), out=str(folder))
        with torch.device("meta"):
            n_weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
        found["model"] = {"n_weights": n_weights, "type": shape.model_type}
        part("matmul", lambda: {"tflops": matmul_tflops(cfg.device)})
        peak = found.get("matmul", {}).get("tflops")
        part("rollouts", lambda: sample(cfg, n_weights, peak, *sampled))
        part("training", lambda: train(cfg, n_weights, peak, *trained))
        part("two_steps", lambda: two_steps(cfg))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def machine(device: str) -> dict:
    """The card, the versions, and which fast kernels are there."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    packages = {"vllm": "vllm", "flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
    return {"device": name, "torch": torch.__version__,
            **{package: find_spec(module) is not None for package, module in packages.items()}}


def make_model(shape: PreTrainedConfig, folder: Path, device: str) -> Path:
    """Random weights in bf16, and the embedded tokenizer: its ids are the first of the vocabulary."""
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape).to(torch.bfloat16)
    model.generation_config.eos_token_id = list(range(0, shape.vocab_size, STOP_EVERY))
    model.save_pretrained(folder)
    load_tokenizer(config.PRESETS["tiny"]["model"]).save_pretrained(folder)
    return folder


def matmul_tflops(device: str, n: int = 8192) -> float:
    """The rate of one large bf16 matrix product: what this card can do, not what its data sheet says."""
    n = n if device.startswith("cuda") else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    started = clock(device)
    for _ in range(20):
        a @ b
    return round(20 * 2 * n ** 3 / (clock(device) - started) / 1e12, 2)


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.monotonic()


def peak_gib(device: str) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.startswith("cuda") else None


def mfu(flops: float, seconds: float, peak_tflops: float | None) -> float | None:
    return round(flops / seconds / 1e12 / peak_tflops, 4) if peak_tflops else None


def sample(cfg: config.Config, n_weights: int, peak: float | None, n_requests: int, n_new_tok: int) -> dict:
    """Sampling at full length, prompts of 256 tokens; and weights into the engine, as after a weight step: what it says
    to a prompt must be the same before and after."""
    started = time.monotonic()
    engine = open_engine(cfg)
    start_s, prompt = time.monotonic() - started, list(range(1, 257))
    try:
        engine.stop_ids = set()
        for i in range(n_requests):
            engine.submit(i, [*prompt[:-1], 300 + i], SamplingParams(max_tokens=n_new_tok, seed=i, top_k=cfg.top_k))
        started, n_tok = time.monotonic(), 0
        while not engine.idle:
            n_tok += sum(len(completion.ids) for completion in engine.step())
        seconds = time.monotonic() - started
        weights, before = untied_weights(load_model(cfg.model)), greedy(engine, prompt)
        started = time.monotonic()
        engine.sleep()
        engine.wake()
        wake_s, started = time.monotonic() - started, time.monotonic()
        engine.load_weights(weights.items(), 1)
        load_s = time.monotonic() - started
        same = greedy(engine, prompt) == before
    finally:
        engine.close()
    return {"engine": cfg.engine, "start_s": round(start_s, 1), "n_tok": n_tok, "tok_per_s": round(n_tok / seconds),
            "mfu": mfu(2 * n_weights * n_tok, seconds, peak), "sleep_and_wake_s": round(wake_s, 2),
            "weight_load_s": round(load_s, 2), "weight_bytes": 2 * n_weights, "same_after_load": same}


def greedy(engine, prompt: list[int]) -> list[int]:
    engine.submit("greedy", prompt, SamplingParams(max_tokens=16, seed=0, temperature=0))
    done = []
    while not engine.idle:
        done += engine.step()
    return done[0].ids


def train(cfg: config.Config, n_weights: int, peak: float | None, n_rows: int, n_row_tok: int) -> dict:
    """Optimiser steps of one minibatch: the first warms up, the second is timed."""
    trainer = Trainer(cfg.model, config.train_config(replace(cfg, minibatch=n_rows)), cfg.device)
    mask = tuple(j >= 256 for j in range(n_row_tok))
    rows = [[Sequence(tuple(1 + (i + j) % 1000 for j in range(n_row_tok)), mask)] for i in range(n_rows)]
    trainer.step(rows, 0)
    if cfg.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    started = clock(cfg.device)
    stats = trainer.step(rows, 1)
    seconds = clock(cfg.device) - started
    return {"n_tok": stats.n_tok, "tok_per_s": round(stats.n_tok / seconds), "loss": round(stats.loss, 3),
            "mfu": mfu(6 * n_weights * stats.n_tok, seconds, peak), "peak_gib": peak_gib(cfg.device)}


def two_steps(cfg: config.Config) -> dict:
    """Two weight steps of a run, with its evaluations, on the tasks of the embedded math world."""
    run = Run(cfg)
    run.env.verify = by_coin
    started = time.monotonic()
    try:
        train_whale(run)
        spent = {kind: round(run.dir.spent(kind, "seconds"), 1) for kind in ("setup", "weight", "eval")}
        n_tok = {kind: int(run.dir.spent(kind, "completion_tok")) for kind in ("weight", "eval")}
        return {"weight_steps": run.state.weight_step, "rollouts": run.dir.training_rollouts(),
                "version": run.team.version, "seconds": spent, "sampled_tok": n_tok,
                "run_s": round(time.monotonic() - started, 1)}
    finally:
        run.close()


def by_coin(task, reply: str | None, state) -> Verdict:
    """Right by a hash of the reply: about half of all, the same each time."""
    heads = hashlib.sha256((reply or "").encode()).digest()[0] % 2
    return Verdict(float(heads), "a coin", reply or None)


def command_gpu_check(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("gpu-check: torch sees no GPU here")
    data = config.ROOT / "embedded" / "math"
    cfg = config.Config(domain="math", preset="paper", **{
        **config.PRESETS["paper"], "out": tempfile.gettempdir(), "name": "two-steps", "method": "weight",
        # smaller than the paper's in these, so that it ends in minutes:
        "prompt_batch": 32, "max_assistant_tok": 1024, "max_len": 4096, "rollouts": 512, "n_eval": 1,
        "train": f"{data}/train.jsonl", "harness_set": f"{data}/harness.jsonl", "test": f"{data}/test.jsonl[:64]"})
    if find_spec("vllm") is None:
        cfg = replace(cfg, engine="transformers")               # which says that it cannot serve this model
    found = check(cfg, Qwen3_5TextConfig(**QWEN3_5_2B), (512, 512), (64, 2048))
    write_atomically(Path(args.out), json.dumps(found, indent=1) + "\n")
    print(args.out)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="gpu-check.json")
