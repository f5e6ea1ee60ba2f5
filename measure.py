"""What the comparisons of bench.py share: taking turns, a row of the result, a run's parts, the bare sides."""

import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

import rollout
from config import DOMAIN_PRESETS, PRESETS, ROOT, Config, load_splits, rollout_config
from engine import Completion, SamplingParams, load_model, load_tokenizer
from keys import without_secrets
from rft import TrainConfig, split_by_length
from rollout import Trace
from sandbox import Sandbox
from team import open_engine

TINY = PRESETS["tiny"]
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0",
                "chess==1.11.2")                # the last for the verifier's module
GROUP = 8                                       # rollouts a task


class LeftOut(RuntimeError):
    """What cannot be measured here; the message says why."""


# ---- ratios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One comparison. What is judged is the ratio; where there is no bare side, the number itself."""
    section: str
    name: str
    unit: str
    ours: list[float]                           # one a repeat
    bare: list[float] = field(default_factory=list)
    ratio: float | None = None
    least: float | None = None                  # the target; neither: context
    most: float | None = None
    work: dict[str, list[float]] = field(default_factory=dict)          # what each side did: [ours, bare]
    note: str = ""

    @property
    def met(self) -> bool | None:
        judged = self.ratio if self.ratio is not None else statistics.median(self.ours)
        if self.least is not None:
            return judged >= self.least
        return None if self.most is None else judged <= self.most


def take_turns(n: int, **sides: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each side in each of n rounds, where one comes after the other; a round before those is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(n + 1):
        for name, side in sides.items():
            gc.collect()
            started = time.perf_counter()
            side()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median_ratio(above: list[float], below: list[float]) -> float:
    """Round by round, so that a machine that slows down for a while slows both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def speed_row(section: str, name: str, ours: list[float], bare: list[float], work: dict, **rest) -> Row:
    """How many times as fast as the bare side: its seconds over ours."""
    return Row(section, name, "s", ours, bare, median_ratio(bare, ours), work=work, **rest)


# ---- a run's parts, and the same model calls without them -----------------------------------------------------------


def tiny(domain: str, **changes) -> Config:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Config(**{"domain": domain, **TINY, **DOMAIN_PRESETS.get(("tiny", domain), {}), "device": device, **changes})


class Parts:
    """What a run of a domain is made of, made as a run makes it; a context manager that ends the sandbox."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.env, self.splits = load_splits(cfg)
        self.env.open()
        self.engine = open_engine(cfg)
        self.sandbox = Sandbox()
        gc.collect()
        gc.freeze()

    def roll_out(self, n_tasks: int, source: str = "") -> list[Trace]:
        """GROUP rollouts on each of the first training tasks, again from the first where there are too few."""
        tasks = self.splits["train"]
        wanted = [replace(tasks[i % len(tasks)], id=f"{tasks[i % len(tasks)].id} {i}") for i in range(n_tasks)]
        return rollout.run(self.engine, self.env, self.sandbox, source or self.env.h0.read_text(), wanted, GROUP,
                           ("bench",), rollout_config(self.cfg))

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_) -> None:
        gc.unfreeze()
        self.engine.close()
        self.sandbox.close()


def replay(engine, cfg: Config, traces: list[Trace], at_once: bool = False) -> int:
    """The recorded calls through the engine alone -> tokens sampled. As many rollouts are under way as in a run, each
    with its next call as soon as the one before has ended; `at_once`: all calls are there from the start."""
    def submit(i: int, k: int) -> None:
        trace, call = traces[i], traces[i].calls[k]
        engine.submit((i, k), list(call.prompt_ids), SamplingParams(
            len(call.completion_ids), rollout.derive_seed("bench", trace.task_id, trace.sample, k), cfg.temperature,
            cfg.top_k, cfg.top_p), after=(i, k - 1))

    engine.reset()
    stop_ids, engine.stop_ids = engine.stop_ids, set()          # only the recorded length ends a completion
    todo = deque(i for i, trace in enumerate(traces) if trace.calls)
    n_tok = n_live = 0
    if at_once:
        for i in todo:
            for k in range(len(traces[i].calls)):
                submit(i, k)
        todo.clear()
    while todo or not engine.idle:
        while todo and n_live < cfg.n_rows:
            submit(todo.popleft(), 0)
            n_live += 1
        for completion in engine.step():
            (i, k), n_tok = completion.id, n_tok + len(completion.ids)
            if not at_once and k + 1 < len(traces[i].calls):
                submit(i, k + 1)
            else:
                engine.release(completion.id)
                n_live -= 1
    engine.stop_ids = stop_ids
    return n_tok


class UntilLength(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, ends: torch.Tensor):
        self.ends = ends                        # (B,), columns

    def __call__(self, input_ids, scores, **_) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def generate(model, cfg: Config, traces: list[Trace]) -> int:
    """The recorded calls through transformers' own `generate`, as its users do: first all first calls, then all second
    ones ..., in left-padded batches of `n_rows`, sorted by the length of the prompt. -> tokens sampled"""
    n_tok = 0
    for k in range(max(len(trace.calls) for trace in traces)):
        calls = sorted((t.calls[k] for t in traces if len(t.calls) > k), key=lambda call: len(call.prompt_ids))
        for start in range(0, len(calls), cfg.n_rows):
            batch = calls[start:start + cfg.n_rows]
            ids = pad_sequence([torch.tensor(c.prompt_ids) for c in batch], batch_first=True, padding_side="left")
            lengths = torch.tensor([len(c.completion_ids) for c in batch])
            look = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor([[len(c.prompt_ids)] for c in batch])
            ids, look, ends = (t.to(model.device) for t in (ids, look.long(), ids.shape[1] + lengths))
            out = model.generate(ids, attention_mask=look, do_sample=True, temperature=cfg.temperature,
                                 top_k=cfg.top_k, top_p=cfg.top_p, max_new_tokens=int(lengths.max()),
                                 eos_token_id=None, pad_token_id=0, stopping_criteria=[UntilLength(ends)])
            n_tok += int(lengths[lengths <= out.shape[1] - ids.shape[1]].sum())
    return n_tok


def train_plainly(model, optimizer, trajectories: list, cfg: TrainConfig) -> tuple[float, int]:
    """The loop that one writes by hand -> sum of token losses, tokens trained. Micro-batches of similar length."""
    trajectories = list(trajectories)
    random.Random("0").shuffle(trajectories)                    # as Trainer.step does with seed 0
    loss_sum = n_tok = 0
    for start in range(0, len(trajectories), cfg.minibatch):
        rows = [row for trajectory in trajectories[start:start + cfg.minibatch] for row in trajectory]
        n_supervised = sum(sum(row.mask) for row in rows)
        for batch in split_by_length(rows, cfg.micro_tok):
            ids = pad_sequence([torch.tensor(row.ids) for row in batch], batch_first=True).to(model.device)
            mask = pad_sequence([torch.tensor(row.mask) for row in batch], batch_first=True).to(model.device)[:, 1:]
            with torch.autocast(model.device.type, torch.bfloat16, enabled=cfg.autocast_bf16):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][mask]
                loss = F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][mask], reduction="sum")
            (loss / n_supervised).backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        n_tok += n_supervised
    return float(loss_sum), n_tok


# ---- TRL ------------------------------------------------------------------------------------------------------------


def trl_python() -> Path:
    """An environment with TRL, made once, outside of the clone: its packages are none of this project's."""
    key = hashlib.sha256(repr((TRL_PACKAGES, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whale" / f"trl-{key}"
    if not (folder / "complete").exists():
        print(f"setting up TRL in {folder} (once, about a minute)", flush=True)
        pip = [str(folder / "bin" / "python"), "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:                                    # torch by itself first: what depends on it must not choose another
            for command in ([sys.executable, "-P", "-m", "venv", "--clear", str(folder)], [*pip, TRL_PACKAGES[0]],
                            [*pip, *TRL_PACKAGES]):
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (subprocess.CalledProcessError, OSError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise LeftOut(f"TRL's environment could not be made: {why}") from None
        (folder / "complete").touch()
    return folder / "bin" / "python"


class Side:
    """The other side of a comparison, a program in a process of its own, which takes its turn when asked to."""

    def __init__(self, python: str | Path, program: str, job: dict):
        self.program = program
        self.process = subprocess.Popen([str(python), str(ROOT / program)], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env=without_secrets(os.environ))
        self.ask(json.dumps(job))

    def ask(self, line: str = "go") -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise LeftOut(f"{self.program} ended with status {self.process.wait()}")
        return json.loads(answer)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


# ---- models of other sizes ------------------------------------------------------------------------------------------


def save_deeper(folder: Path, n_layers: int) -> str:
    """The embedded model with more layers, which add nothing: the same tokens at a larger model's cost."""
    model = load_model(TINY["model"])
    config = model.config.to_dict() | {"num_hidden_layers": n_layers, "layer_types": ["full_attention"] * n_layers}
    deeper = Qwen3ForCausalLM(Qwen3Config(**config))
    deeper.load_state_dict(model.state_dict(), strict=False)
    for layer in deeper.model.layers[model.config.num_hidden_layers:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    deeper.save_pretrained(folder)
    load_tokenizer(TINY["model"]).save_pretrained(folder)
    return str(folder)


def save_random(folder: Path, **sizes) -> str:
    """A Qwen3 of any size in bf16; most of its weights are alike, which no measurement here can tell."""
    config = Qwen3Config(**{"head_dim": 64, "num_key_value_heads": 1, "tie_word_embeddings": True,
                            "max_position_embeddings": 32768, "eos_token_id": 2, **sizes})
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01).view(-1)[:4096].uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    load_tokenizer(TINY["model"]).save_pretrained(folder)
    return str(folder)


# ---- memory ---------------------------------------------------------------------------------------------------------


def in_a_process(call: str) -> dict:
    """What a function of bench.py prints, called in a process of its own: memory is a matter of whole processes."""
    done = subprocess.run([sys.executable, "-c", f"import bench; bench.{call}"], cwd=ROOT, capture_output=True,
                          text=True, env=without_secrets(os.environ))
    if done.returncode:
        raise LeftOut(f"{call.partition('(')[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def proc_bytes(name: str, file: str = "self/status") -> int:
    """A line of a file of /proc that counts in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc", file).read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def with_descendants(root: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue                            # it has just ended
    family = [root]
    for pid in family:                          # grows while it is read
        family += [child for child, parent in parents.items() if parent == pid]
    return family


class Holding:
    """An engine that answers only when all `n` rollouts wait for it; a model that calls the tool, then answers."""
    version, idle, exact, max_len = 0, False, True, 2048

    def __init__(self, n: int):
        self.tokenizer, self.n, self.held_bytes = load_tokenizer(TINY["model"]), n, 0
        self.says = [self.tokenizer(text, add_special_tokens=False).input_ids + [2] for text in (
            '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>',
            "It is \\boxed{42}.")]

    def reset(self) -> None:
        self.waiting: list = []

    def release(self, id) -> None:
        pass

    def submit(self, id, prompt_ids, params, after=None) -> None:
        self.waiting.append((id, prompt_ids))

    def step(self) -> list[Completion]:
        if len(self.waiting) < self.n:
            return []
        waiting, self.waiting = self.waiting, []
        if waiting[0][0][1]:                    # the second call of all
            self.held_bytes = sum(proc_bytes("VmRSS", f"{pid}/status") for pid in with_descendants(os.getpid()))
        return [Completion(id, list(self.says[id[1]]), "stop") for id, _ in waiting]
