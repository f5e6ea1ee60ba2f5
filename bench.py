"""How fast this is, as ratios: each part against the same work done bare, taking turns in one process.

A ratio of two times on one machine, taken in turns, says what the machine's own speed does not. So nothing here is
compared with a number from another day, and what is compared did the same work: counts of both sides stand in each row.

    rollouts   the whole stack (harness programs, sandbox, tools, traces, verifier) against the engine alone, replaying
               the recorded calls: same prompt ids, seeds and completion lengths. The bare side gets call k + 1 of a
               rollout in the step in which call k ends, and knows beforehand what its prompt will be. Asking for all
               calls at once, which no agent could do, is shown too: it is slower, as a reply's cached row goes unused.
    training   Trainer.step against a plain loop: same rows, micro-batches, updates; fused AdamW; no checks
    step       a weight step (sample, verify, train, weights into the engine) against TRL's GRPOTrainer
    loss       memory of the loss over a vocabulary of 248,320
    scaling    cost a token with more rollouts and longer contexts; memory of a live rollout
    weights    trained weights into the engine, with the proof that they arrived
    ranks      cost a token of a weight step on two ranks, on a core each, against one
    vllm       the whole stack against the vLLM engine alone, and against vLLM's own `generate`

    bash run.sh bench [--only rollouts,training] [--out bench.json] [--quick]
    bash run.sh bench --engine vllm                             # the last section, where vLLM is installed
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table

import rollout
from config import ROOT, Config, code_version, load_splits, rollout_config, train_config
from engine import load_model, weights_checksum
from keys import without_secrets
from measure import (
    GROUP, TINY, TRL_PACKAGES, Holding, LeftOut, Parts, Row, Side, generate, in_a_process, median_ratio,
    proc_bytes, replay, save_deeper, save_random, speed_row, take_turns, tiny, train_plainly, trl_python)
from rft import Trainer
from rollout import Trace
from files import UsageError, write_atomically
from sandbox import Sandbox
from transformers_engine import TransformersEngine

TRL_MICRO_ROWS = 64                             # of a forward pass
QUESTION = "{question}\n\nPut your final answer in \\boxed{}."
ONE_CALL = f"""from harness_api import chat, generate
SYSTEM_PROMPT, USER_PROMPT = "", ""
def run(task):
    yield generate(chat("", {QUESTION!r}.replace("{{question}}", task["question"])))
"""
LONG_CALL = """from harness_api import chat, generate
SYSTEM_PROMPT, USER_PROMPT = "", ""
def run(task):
    yield generate(chat("", task["question"] + " the" * N_MORE), max_tokens=64)
"""
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """How much is measured; `QUICK` is for the tests."""
    repeats: int = 5
    domains: tuple[str, ...] = ("math", "search", "chess")
    n_tasks: int = 64                           # of a domain, 8 rollouts each
    deep_layers: int = 28                       # Qwen3-0.6B's
    n_recorded_tasks: int = 128                 # whose accepted rollouts are trained on
    n_step_prompts: int = 32                    # of a weight step: the tiny preset's
    vocabulary: int = 248_320                   # Qwen3.5's
    loss_rows: tuple[int, int] = (8, 2048)
    rollouts: tuple[int, int] = (256, 4096)
    context_tok: tuple[int, int] = (256, 4096)
    n_live: tuple[int, int] = (64, 4096)
    n_weights: tuple[float, ...] = (1e6, 1e7, 1e8, 1e9)

    @property
    def few(self) -> int:
        """Repeats of what takes long and is not close."""
        return max(1, self.repeats // 2)


QUICK = Sizes(1, ("math",), 4, 6, 16, 4, 2000, (2, 64), (16, 32), (64, 128), (8, 64), (1e6,))


# ---- sampling and training ------------------------------------------------------------------------------------------


def bench_rollouts(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Against the engine alone, and for context against transformers' `generate`. A model this small is the hardest
    case: a call of it takes a millisecond. The last row has a deeper one."""
    for domain in sizes.domains:
        with Parts(tiny(domain)) as parts:
            traces, row = rollout_row(parts, domain, sizes.n_tasks, sizes.repeats)
            yield row
            yield from other_rows(parts, domain, traces, sizes)
    with Parts(tiny("math", model=save_deeper(folder / "deeper", sizes.deep_layers))) as parts:
        name = f"math, {sizes.deep_layers} layers"
        yield rollout_row(parts, name, max(1, sizes.n_tasks // 4), sizes.repeats)[1]


def rollout_row(parts: Parts, name: str, n_tasks: int, repeats: int, source: str = "",
                least: float | None = 0.9) -> tuple[list[Trace], Row]:
    """The traces, and the stack against the engine alone (`least` with vLLM: 0.95)."""
    traces, n_tok = parts.roll_out(n_tasks, source), {}
    seconds = take_turns(
        repeats, ours=lambda: n_tok.update(ours=sum(trace.n_tok for trace in parts.roll_out(n_tasks, source))),
        bare=lambda: n_tok.update(bare=replay(parts.engine, parts.cfg, traces)))
    work = {"rollouts": [len(traces)] * 2, "calls": [sum(len(trace.calls) for trace in traces)] * 2,
            "completion_tok": [n_tok["ours"], n_tok["bare"]]}
    return traces, speed_row("rollouts", f"{name}: stack / engine alone", seconds["ours"], seconds["bare"], work,
                             least=least, note=f"{n_tok['ours'] / statistics.median(seconds['ours']):,.0f} tokens/s")


def other_rows(parts: Parts, name: str, traces: list[Trace], sizes: Sizes) -> Iterator[Row]:
    """The stack against other ways to make the same calls."""
    model, n_tok = load_model(parts.cfg.model).to(parts.cfg.device), {}
    seconds = take_turns(
        sizes.few, ours=lambda: n_tok.update(ours=sum(trace.n_tok for trace in parts.roll_out(sizes.n_tasks))),
        at_once=lambda: n_tok.update(at_once=replay(parts.engine, parts.cfg, traces, at_once=True)),
        generate=lambda: n_tok.update(generate=generate(model, parts.cfg, traces)))
    for side, said in (("at_once", "engine alone, all calls at once"), ("generate", "transformers' generate")):
        yield speed_row("rollouts", f"{name}: stack / {said}", seconds["ours"], seconds[side],
                        {"completion_tok": [n_tok["ours"], n_tok[side]]})


def bench_training(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """On what a weight step of the base model trains on: the accepted rollouts."""
    for domain in sizes.domains:
        with Parts(tiny(domain)) as parts:
            accepted = [trace.sequences() for trace in parts.roll_out(sizes.n_recorded_tasks) if trace.accepted]
        yield from training_rows(domain, parts.cfg, accepted, sizes.repeats)


def training_rows(name: str, cfg: Config, accepted: list, repeats: int) -> Iterator[Row]:
    trainer = Trainer(cfg.model, train_config(cfg), cfg.device)
    model = load_model(cfg.model).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                  weight_decay=cfg.weight_decay, fused=True)
    ours, bare = [], []
    seconds = take_turns(repeats, ours=lambda: ours.append(trainer.step(accepted, 0)),
                         bare=lambda: bare.append(train_plainly(model, optimizer, accepted, trainer.cfg)))
    stats = ours[-1]                            # after the same updates the losses still agree
    work = {"trained_tok": [stats.n_supervised_tok, bare[-1][1]], "loss": [stats.loss, bare[-1][0] / bare[-1][1]]}
    yield speed_row("training", f"{name}: Trainer.step / plain loop", seconds["ours"], seconds["bare"], work,
                    least=0.95, note=f"{stats.n_seq} rows, {stats.n_updates} updates")
    yield Row("training", f"{name}: padding", "of the tokens", [stats.padding_frac], most=0.15)


# ---- a weight step against TRL --------------------------------------------------------------------------------------


def bench_step(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """One call a rollout, no tools: what both can do. Both sample 8 answers to each prompt of a weight step, grade them
    with the same verifier, and train on all of them in one optimiser update (ours would train on the accepted ones
    only). Each samples for itself, so the token counts are those of two draws; the ratio is of seconds a token."""
    python = trl_python()
    with Parts(tiny("math")) as parts:
        cfg, n = parts.cfg, GROUP * sizes.n_step_prompts
        trainer = Trainer(cfg.model, replace(train_config(cfg), minibatch=n), cfg.device)
        tasks = parts.splits["train"][:sizes.n_step_prompts]
        trl = Side(python, "bench_trl.py", {
            "model": cfg.model, "out": str(folder), "group_size": GROUP, "max_tok": cfg.max_assistant_tok, "lr": cfg.lr,
            "temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p,
            "micro_rows": min(n, TRL_MICRO_ROWS),
            "prompts": [(QUESTION.replace("{question}", task.fields["question"]), task.answer) for task in tasks]})
        ours: list[dict] = []
        theirs: list[dict] = []

        def our_step() -> None:
            at = [time.perf_counter()]
            traces = parts.roll_out(sizes.n_step_prompts, ONE_CALL)
            at.append(time.perf_counter())
            trainer.step([trace.sequences() for trace in traces], 0)
            at.append(time.perf_counter())
            parts.engine.load_weights(trainer.weights(), trainer.version)
            at.append(time.perf_counter())
            ours.append({"seconds": at[-1] - at[0], "completion_tok": sum(trace.n_tok for trace in traces),
                         "rollouts": len(traces), "parts": [b - a for a, b in zip(at, at[1:], strict=False)]})

        with trl:
            take_turns(sizes.repeats, ours=our_step, bare=lambda: theirs.append(trl.ask()))
    ours, theirs = ours[1:], theirs[1:]                                             # the first of each is the warm-up
    a_token = [[step["seconds"] / step["completion_tok"] for step in side] for side in (ours, theirs)]
    work = {what: [statistics.mean(step[what] for step in side) for side in (ours, theirs)]
            for what in ("rollouts", "completion_tok")}
    spent = ", ".join(f"{what} {statistics.median(step['parts'][i] for step in ours):.2f} s"
                      for i, what in enumerate(("sample and verify", "train", "weights")))
    yield Row("step", "weight step / TRL's GRPOTrainer, a token", "s", *(
        [step["seconds"] for step in side] for side in (ours, theirs)), median_ratio(a_token[1], a_token[0]),
        least=2.0, work=work, note=f"{TRL_PACKAGES[2]}; ours: {spent}")


# ---- sizes ----------------------------------------------------------------------------------------------------------


def probe_loss(model: str, n_rows: int, n_tok: int, chunk_tok: int, naive: bool) -> None:
    """Prints by how much memory grows over a loss and its backward pass, and the seconds; gradients exist before."""
    cfg = tiny("math", micro_tok=n_rows * n_tok, head_chunk_tok=chunk_tok)
    trainer = Trainer(model, train_config(cfg), cfg.device)
    n_vocab = trainer.model.config.vocab_size
    rows = [rollout.Sequence(tuple((i * 7919 + r) % n_vocab for i in range(n_tok)), (False,) + (True,) * (n_tok - 1))
            for r in range(n_rows)]
    if naive:
        def sum_token_losses(batch: list[rollout.Sequence]) -> torch.Tensor:
            ids = torch.tensor([row.ids for row in batch], device=cfg.device)
            logits = trainer.model(input_ids=ids, use_cache=False).logits.float()
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

        trainer.sum_token_losses = sum_token_losses
    trainer.accumulate_grads([rollout.Sequence(rows[0].ids[:4], rows[0].mask[:4])])
    if cfg.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")           # the peak so far is forgotten
        before = proc_bytes("VmRSS")
    started = time.perf_counter()
    trainer.accumulate_grads(rows)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if cfg.device == "cuda" else proc_bytes("VmHWM")
    print(json.dumps({"bytes": peak - before, "seconds": seconds}))


def bench_loss(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """A narrow model, so that what grows is the logits."""
    model = save_random(folder / "loss", vocab_size=sizes.vocabulary, hidden_size=64, intermediate_size=64,
                        num_hidden_layers=1, num_attention_heads=1)
    n_rows, n_tok = sizes.loss_rows
    chunk, few = Config("math").head_chunk_tok, max(8, n_tok // 8)
    ours = in_a_process(f"probe_loss({model!r}, {n_rows}, {n_tok}, {chunk}, False)")
    naive = in_a_process(f"probe_loss({model!r}, 1, {few}, {chunk}, True)")
    scaled = naive["bytes"] / GIB * n_rows * n_tok / few
    yield Row("loss", f"{n_rows} rows of {n_tok:,} tokens, {sizes.vocabulary:,} words, chunks of {chunk}", "GiB",
              [ours["bytes"] / GIB], most=1.0,
              note=f"all logits at once: {scaled:.0f} GiB, scaled up from {few} tokens")
    turns = [in_a_process(f"probe_loss({model!r}, 1, {n_tok}, {size}, False)")["seconds"]
             for _ in range(sizes.few) for size in (chunk, 4 * chunk)]
    yield speed_row("loss", f"chunks of {chunk} / chunks of {4 * chunk}", turns[::2], turns[1::2], {"rows": [1, 1]})


def bench_scaling(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Costs at one size over costs at another."""
    few, many = sizes.rollouts
    with Parts(tiny("math")) as parts:
        n_tok: dict[int, int] = {}

        def spend(n: int) -> None:
            n_tok[n] = sum(trace.n_tok for trace in parts.roll_out(n // GROUP))

        seconds = take_turns(sizes.few, few=lambda: spend(few), many=lambda: spend(many))
    a_token = [[s / n_tok[n] for s in seconds[name]] for name, n in (("many", many), ("few", few))]
    yield Row("scaling", f"a token of {many:,} rollouts / of {few}", "s", *a_token, median_ratio(*a_token), most=1.25)
    yield from context_rows(sizes, folder / "long")
    few, many = sizes.n_live
    grown = in_a_process(f"probe_live({few}, {many})")
    yield Row("scaling", f"memory of a live rollout, {few} to {many:,} alive", "KiB", [grown["bytes"] / 1024], most=64,
              note="this process and the sandbox's, at the second call; without the engine")


def context_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """A model's own attention costs more the more it looks back on. So what is judged is what comes on top: the stack's
    cost over the engine's, with long contexts against short ones."""
    shutil.copytree(TINY["model"], folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    over: list[list[float]] = []
    for n_context in sizes.context_tok:
        with Parts(tiny("math", model=str(folder), max_len=8192, n_rows=4 * GROUP)) as parts:
            source = LONG_CALL.replace("N_MORE", str(max(1, n_context - 110)))
            name = f"{n_context:,} tokens of context"
            row = replace(rollout_row(parts, name, 4, sizes.few, source, least=None)[1], section="scaling")
        over.append([a / b for a, b in zip(row.ours, row.bare, strict=True)])
        yield row
    yield Row("scaling", f"stack over engine with {n_context:,} tokens of context / with {sizes.context_tok[0]}", "x",
              over[1], over[0], median_ratio(over[1], over[0]), most=1.25)


def probe_live(few: int, many: int) -> None:
    """Prints the memory that one more live rollout takes."""
    cfg, held = tiny("math"), []
    env, splits = load_splits(cfg)
    with Sandbox() as sandbox:
        for n in (few, many):
            engine = Holding(n)
            rollout.run(engine, env, sandbox, env.h0.read_text(), splits["train"][:n // GROUP], GROUP, ("bench",),
                        rollout_config(replace(cfg, n_rows=n)))
            held.append(engine.held_bytes)
    print(json.dumps({"bytes": (held[1] - held[0]) / (many - few)}))


def bench_weights(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """The bare side copies the same tensors and proves nothing."""
    for wanted in sizes.n_weights:
        if 14 * wanted > proc_bytes("MemAvailable", "meminfo"):     # in bf16 on its way, twice in fp32, and some air
            raise LeftOut(f"{wanted:,.0f} parameters: no room for two fp32 models")
        yield weights_row(str(folder / f"{wanted:.0f}"), wanted, sizes.repeats if wanted < 1e9 else sizes.few)


def weights_row(model: str, wanted: float, repeats: int) -> Row:
    width = max(64, round((wanted / 210) ** 0.5 / 64) * 64)
    save_random(Path(model), vocab_size=1280, hidden_size=width, intermediate_size=3 * width,
                num_attention_heads=width // 64, num_key_value_heads=width // 64,
                num_hidden_layers=max(1, round(wanted / 13 / width ** 2)))
    cfg = tiny("math", model=model)
    engine, trainer = TransformersEngine(model, 1, 64, cfg.device), Trainer(model, train_config(cfg), cfg.device)
    shutil.rmtree(model)
    own, target = dict(trainer.weights()), engine.model.state_dict()
    n_bytes = sum(tensor.nbytes for tensor in own.values())

    seconds = take_turns(repeats, load=lambda: engine.load_weights(trainer.weights(), 1),
                         hash=lambda: (engine.checksum(), weights_checksum(trainer.weights())),
                         copy=lambda: [target[name].copy_(tensor) for name, tensor in own.items()])
    return speed_row("weights", f"{n_bytes / 4e6:,.1f} M parameters / copying alone", seconds["load"], seconds["copy"],
                     {"bytes": [n_bytes] * 2}, note=f"{n_bytes / 1e6:,.0f} MB, of which sha256 of both sides takes "
                     f"{statistics.median(seconds['hash']):.3f} s")


# ---- several ranks, vLLM --------------------------------------------------------------------------------------------


def bench_ranks(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Weight steps of a run: the rank-seconds a sampled token, sampling and training. Two ranks have twice the
    rollouts, on the same cores as the sandboxes of both; so have two runs side by side, unknown to each other."""
    one, two, apart = [], [], []
    for turn in range(sizes.few):
        one += a_token_of_runs(1, 1, sizes.n_step_prompts, folder / f"{turn}-one")
        two += a_token_of_runs(1, 2, sizes.n_step_prompts, folder / f"{turn}-two")
        apart.append(statistics.mean(a_token_of_runs(2, 1, sizes.n_step_prompts, folder / f"{turn}-apart")))
    said = "a torch thread each; gloo"
    yield Row("ranks", "a token of a weight step on 2 ranks / on 1", "s", two, one, median_ratio(two, one), most=1.25,
              note=said)
    yield Row("ranks", "on 2 ranks / in 2 runs side by side", "s", two, apart, median_ratio(two, apart), note=said)


def a_token_of_runs(n_runs: int, world: int, n_prompts: int, out: Path) -> list[float]:
    """Rank-seconds a sampled token of each of n runs at once, of `world` ranks each."""
    launcher = [] if world == 1 else [str(ROOT / "ranks.py"), "--standalone", "--nproc-per-node", str(world)]
    data = ROOT / "embedded" / "math"
    runs = [subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "cli.py"), "math", "--method", "weight", "--name", str(i),
         "--out", str(out), "--prompt-batch", str(world * n_prompts), "--rollouts", str(4 * GROUP * world * n_prompts),
         "--n-eval", "1", "--test", f"{data}/test.jsonl[:8]", "--harness-set", f"{data}/harness.jsonl[:8]"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=without_secrets(os.environ) | {"OMP_NUM_THREADS": "1"})
        for i in range(n_runs)]
    if any([run.wait() for run in runs]):
        raise LeftOut(f"a run of {world} ranks failed")
    spent = [json.loads((out / str(i) / "summary.json").read_text())["ledger"]["weight"] for i in range(n_runs)]
    return [world * of_run["seconds"] / of_run["completion_tok"] for of_run in spent]


def bench_vllm(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """As `rollouts`, with vLLM. Its `generate` is given, in a process of its own, all first calls, then all second ones
    ...: it knows every prompt beforehand and nothing has to be sent to it."""
    if find_spec("vllm") is None:
        raise LeftOut("vLLM is not in this environment: bash run.sh bench --engine vllm")
    for domain in sizes.domains:
        with Parts(tiny(domain, engine="vllm")) as parts:
            traces, row = rollout_row(parts, domain, sizes.n_tasks, sizes.repeats, least=0.95)
            yield replace(row, section="vllm")
            yield generate_row(parts, domain, traces, sizes)
    with Parts(tiny("math", engine="vllm", model=save_deeper(folder / "deeper", sizes.deep_layers))) as parts:
        row = rollout_row(parts, f"math, {sizes.deep_layers} layers", sizes.n_tasks, sizes.few, least=0.95)[1]
        yield replace(row, section="vllm")


def generate_row(parts: Parts, name: str, traces: list[Trace], sizes: Sizes) -> Row:
    cfg, n_tok = parts.cfg, {}
    cpu = {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 8192, "dtype": "float32",
           "kv_cache_memory_bytes": GIB} if cfg.device == "cpu" else {
           "dtype": "bfloat16", "gpu_memory_utilization": 0.4}
    job = {"model": cfg.model, "settings": {"max_model_len": cfg.max_len, "max_num_seqs": cfg.n_rows, **cpu},
           "sampling": {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p},
           "rounds": [[(trace.calls[k].prompt_ids, len(trace.calls[k].completion_ids), i)
                       for i, trace in enumerate(traces) if len(trace.calls) > k]
                      for k in range(max(len(trace.calls) for trace in traces))]}
    with Side(sys.executable, "bench_vllm.py", job) as side:
        seconds = take_turns(
            sizes.repeats, bare=lambda: n_tok.update(bare=side.ask()["n_tok"]),
            ours=lambda: n_tok.update(ours=sum(trace.n_tok for trace in parts.roll_out(sizes.n_tasks))))
    return speed_row("vllm", f"{name}: stack / vLLM's generate", seconds["ours"], seconds["bare"],
                     {"completion_tok": [n_tok["ours"], n_tok["bare"]]})


# ---- the command ----------------------------------------------------------------------------------------------------


SECTIONS = {"rollouts": bench_rollouts, "training": bench_training, "step": bench_step, "loss": bench_loss,
            "scaling": bench_scaling, "weights": bench_weights, "ranks": bench_ranks, "vllm": bench_vllm}
TITLES = ("section", "name", "ours", "bare", "ratio", "target", "met")


def machine() -> dict[str, object]:
    cpus = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpus[0] if cpus else platform.machine(), "cores": os.cpu_count(), "gpu": gpu,
            "memory_gib": round(proc_bytes("MemTotal", "meminfo") / GIB), "torch_threads": torch.get_num_threads(),
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "trl": TRL_PACKAGES[2], "commit": code_version()}


def run_sections(names: list[str], sizes: Sizes) -> dict:
    """What bench.json holds."""
    rows, left_out, seconds, load = [], {}, {}, [os.getloadavg()]
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                for row in SECTIONS[name](sizes, Path(folder)):
                    rows.append(asdict(row) | {"met": row.met})
                    print("  ".join(cells(rows[-1])), flush=True)
            except LeftOut as error:
                left_out[name] = str(error)
        seconds[name] = round(time.perf_counter() - started, 1)
    return {"machine": machine(), "sizes": asdict(sizes), "load": [*load, os.getloadavg()], "seconds": seconds,
            "rows": rows, "left_out": left_out}


def cells(row: dict) -> list[str]:
    targets = [f"{sign} {row[key]:g}" for key, sign in (("least", ">="), ("most", "<=")) if row[key] is not None]
    ours, bare = (f"{statistics.median(row[side]):.3g} {row['unit']}" if row[side] else "" for side in ("ours", "bare"))
    ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else ""
    met = {True: "yes", False: "no", None: ""}[row["met"]]
    return [row["section"], row["name"], ours, bare, ratio, *(targets or [""]), met]


def command_bench(args: argparse.Namespace) -> int:
    default = ["vllm"] if args.engine == "vllm" else [name for name in SECTIONS if name != "vllm"]
    names = args.only.split(",") if args.only else default
    if unknown := set(names) - set(SECTIONS):
        raise UsageError(f"--only {','.join(sorted(unknown))}: the sections are {', '.join(SECTIONS)}")
    results = run_sections(names, QUICK if args.quick else Sizes())
    table = Table(*TITLES)
    for row in results["rows"]:
        table.add_row(*cells(row))
    Console().print(table)
    for name, why in results["left_out"].items():
        print(f"left out: {name}: {why}")
    write_atomically(Path(args.out), json.dumps(results, indent=1) + "\n")
    print(f"every number with its repeats: {args.out}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help=f"sections, comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--out", default="bench.json")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures nothing")
