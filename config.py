"""The settings: every knob, the presets, and what is checked before a model is loaded.

The defaults of `Config` are the paper's settings for math; PRESETS and DOMAIN_PRESETS override them, and flags override
both.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import chat_endpoint
import keys
import sched
import server_call
from agent_cmd import LAYER as AGENT_LAYER
from acceptance import ACCEPT, kept_rollouts
from engine import Model, find_commit, is_hub_name
from envs import ENVS
from proposers import PROPOSERS
from rft import TrainConfig
from rollout import RolloutConfig, max_trace_bytes
from files import UsageError, read_json, refuse_huge, refuse_special, sha256
from rundir import scorer_paths
from sandbox import Limits
from search_answer import KEY as JUDGE_KEY, Judge
from sessions import ProposerConfig
from tasks import Task, check_disjoint

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
N_SHOWN = 2                 # rollouts of a weight step, of each verdict, that are kept with their tokens


@dataclass(frozen=True)
class Config:
    """Every knob, each a flag. The defaults are the `paper` preset for math; PRESETS overrides them."""
    domain: str
    preset: str = "tiny"
    method: str = "whale"                   # whale, adaptive, weight, harness, fst, stagewise (sched.py)
    seed: int = 0
    cycles: int = 2                         # of one weight and one harness phase
    rollouts: int = 0                       # training rollouts to spend; 0: what `cycles` cycles of WHALE would take
    name: str = ""                          # of the run; "": from domain, method and seed
    out: str = str(ROOT / "runs")
    # theta, D_weight, D_harness, D_test
    model: str = "Qwen/Qwen3.5-2B"
    revision: str = ""                      # of a hub model: commit, tag or branch; "": main; its commit is recorded
    trust_remote_code: bool = False         # run code that comes with the model, with all rights of this user
    train: str = ""                         # FILE or FILE[a:b], rows a to b
    harness_set: str = ""
    test: str = ""
    harness: str = ""                       # the harness to start from; "": h0 of the domain
    retriever: str = ""                     # search: URLs of retriever servers, or a corpus file; "": the embedded one
    judge_url: str = ""                     # search: asked where exact match says no; its key is in WHALE_JUDGE_KEY
    judge_model: str = ""
    # schedule (E, I) and its adaptive form
    epochs: float = 0.6                     # E: epochs of weight updates a cycle
    iterations: int = 6                     # I: harness iterations a cycle; the first scores the incoming harness
    candidates: int = 3                     # M
    patience_epochs: float = 0.2            # adaptive weight phase: window, patience and least length
    patience_iterations: int = 2            # adaptive harness phase
    min_iterations: int = 6
    max_iterations: int = 16
    stagewise_phases: int = 0               # weight phases before the harness phases of `stagewise`; 0: as WHALE has
    one_search: bool = False                # harness: one search of `iterations` a cycle, whatever rollouts that takes
    finish: str = "budget"                  # harness: when weights were trained last, one more harness phase
    # rollouts
    prompt_batch: int = 256
    group_size: int = 8                     # G
    n_eval: int = 8                         # mean@n on D_test
    eval_epochs: float = 0.0                # also evaluate every so many epochs inside a weight phase; 0: after phases
    select: str = "test"                    # the split that chooses the best evaluation, as in the paper; harness-set
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    max_assistant_tok: int = 8192           # a rollout
    max_calls: int = 16                     # model calls a rollout, hard cap
    max_len: int = 16384                    # tokens of context
    n_rows: int = 256                       # rollouts at once
    tool_s: float = 30.0
    tool_mb: int = 1024
    harness_s: float = 5.0                  # between two requests of a harness program
    harness_mb: int = 512
    n_workers: int = 1                      # sandbox processes that run harness programs; changes no result
    max_failed_frac: float = 0.5            # a weight step with more failed programs than this stops the run
    max_empty_steps: int = 5                # weight steps in a row without an accepted rollout
    # rejection-sampling fine-tuning
    lr: float = 1e-7
    minibatch: int = 64                     # trajectories
    micro_tok: int = 16384
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    head_chunk_tok: int = 256               # of a vocabulary of 248,320: 0.9 GiB; four times as many are hardly faster
    autocast_bf16: bool = True
    gradient_checkpointing: bool = True     # less memory, more time; changes no result
    keep: int = 2                           # checkpoints: so many of the last, and the best evaluation's in any case
    # machinery
    engine: str = "vllm"                    # what samples: transformers, vllm, server
    device: str = "cpu"                     # cpu or cuda; with several ranks, one GPU each
    tp: int = 1                             # vllm: GPUs an engine
    gpu_memory_frac: float = 0.5            # vllm: of a GPU's memory while it samples; the trainer has the rest
    urls: str = ""                          # server: URLs, comma-separated; a key for them is in WHALE_ENGINE_KEY
    share: str = ""                         # server: a folder that they see too, for weights; "": in the run directory
    # who writes new harnesses, what that may cost, and which is accepted
    proposer: str = "cmd"                   # rules: embedded; cmd: a coding agent; api: a model behind a chat endpoint
    proposer_cmd: str = "claude"            # claude, codex, opencode, or a command with {dir}, {prompt_file}, {model}
    proposer_model: str = ""                # the name that the command or the endpoint knows
    proposer_url: str = ""                  # api: an OpenAI-compatible endpoint; its key is in WHALE_PROPOSER_KEY
    proposer_price: str = ""                # IN,OUT: $ a million tokens, where the proposer does not report its cost
    proposer_s: float = 2400.0              # wall limit of a session
    proposer_usd: float = 0.0               # money limit of a session; 0: none
    proposer_env: str = ""                  # cmd: more environment variables that it may see, comma-separated
    max_proposer_failures: int = 3          # sessions in a row without a candidate that stop the run
    accept: str = "best"                    # best: the highest score, as in the paper; race; confirm (acceptance.py)
    model_price: str = ""                   # IN,OUT: $ a million tokens, what the servers at --urls charge
    max_rollouts: int = 0                   # caps of the harness search, rollouts of gates included; 0: none
    max_proposals: int = 0                  # candidates
    max_cost: float = 0.0                   # $, all that is paid for; needs known prices
    # machinery again
    waive: str = ""                         # layers of sandbox and proposer to do without, comma-separated; said
    track: str = ""                         # wandb, trackio or tensorboard: a live copy of metrics.jsonl

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / (self.name or f"{self.domain}-{self.method}-seed{self.seed}")

    @property
    def theta(self) -> Model:
        """What is loaded wherever the model is."""
        return Model(self.model, self.revision, self.trust_remote_code)

    @property
    def waived(self) -> tuple[str, ...]:
        return tuple(filter(None, self.waive.split(",")))

    @property
    def waived_layers(self) -> tuple[str, ...]:
        """Those of the sandbox."""
        return tuple(name for name in self.waived if name not in (AGENT_LAYER, keys.HTTPS))


PRESETS = {
    "paper": dict(device="cuda"),           # the table of the paper; the defaults of Config are its column for math
    "tiny": dict(                           # its adaptive settings are the paper's, shrunk as E and I are
        model=str(ROOT / "embedded" / "model"), proposer="rules", epochs=0.0625, iterations=3, patience_epochs=0.03125,
        patience_iterations=1, min_iterations=3, max_iterations=8, prompt_batch=32, max_assistant_tok=160,
        max_calls=8, max_len=1024, tool_s=2.0, tool_mb=256, harness_s=2.0, harness_mb=256, lr=1e-3, minibatch=64,
        micro_tok=4096, head_chunk_tok=1024, autocast_bf16=False, engine="transformers", gradient_checkpointing=False),
}
DOMAIN_PRESETS = {                          # where a domain differs
    ("paper", "chess"): dict(model="Qwen/Qwen3.5-4B", max_assistant_tok=8129, max_calls=18),
    ("tiny", "search"): dict(epochs=0.3125, patience_epochs=0.09375, prompt_batch=64, lr=5e-4),
    ("tiny", "chess"): dict(epochs=1.25, patience_epochs=0.375, prompt_batch=64, lr=5e-4, max_calls=12, max_len=1536),
}
CHOICES = {"domain": tuple(ENVS), "engine": ("transformers", "vllm", "server"),
           "preset": tuple(PRESETS), "proposer": PROPOSERS, "method": sched.METHODS, "accept": ACCEPT,
           "select": ("test", "harness-set"), "finish": ("budget", "harness"),
           "track": ("", "wandb", "trackio", "tensorboard")}
# the least and the most of a number; of those that are not here, 0 and 10**9
BOUNDS = {
    **dict.fromkeys(("cycles", "iterations", "candidates", "prompt_batch", "group_size", "n_eval", "max_calls",
                     "max_assistant_tok", "max_proposer_failures", "patience_iterations", "min_iterations",
                     "max_iterations", "keep", "minibatch", "micro_tok", "head_chunk_tok"), (1, 10**9)),
    "seed": (0, 2**63 - 1), "max_len": (16, 10**9), "n_rows": (1, 1 << 16), "n_workers": (1, 1024), "tp": (1, 1024),
    "top_p": (1e-9, 1), "temperature": (0, 100), "lr": (1e-30, 1), "max_grad_norm": (1e-30, 10**9),
    "weight_decay": (0, 1), "beta1": (0, 1 - 1e-9), "beta2": (0, 1 - 1e-9), "gpu_memory_frac": (0.01, 1),
    "max_failed_frac": (0, 1), "proposer_s": (1, 10**7), **dict.fromkeys(("tool_s", "harness_s"), (0.1, 3600)),
    **dict.fromkeys(("tool_mb", "harness_mb"), (64, 1 << 20))}
ALTERNATING = ("whale", "fst", "adaptive")      # methods whose length may be given in cycles
# these change no result, nor does the address of a server
FREE_ON_RESUME = {"out", "name", "keep", "n_workers", "track", "tp", "gpu_memory_frac", "urls", "share",
                  "gradient_checkpointing", "proposer_price", "proposer_s", "proposer_usd", "proposer_env",
                  "model_price", "max_proposer_failures", "max_rollouts", "max_proposals", "max_cost"}


def train_config(cfg: Config) -> TrainConfig:
    return TrainConfig(**{knob.name: getattr(cfg, knob.name) for knob in fields(TrainConfig)})


def proposer_config(cfg: Config) -> ProposerConfig:
    return ProposerConfig(**{knob.name: getattr(cfg, knob.name) for knob in fields(ProposerConfig)})


def rollout_config(cfg: Config) -> RolloutConfig:
    return RolloutConfig(cfg.temperature, cfg.top_k, cfg.top_p, cfg.max_assistant_tok, cfg.max_calls, cfg.n_rows,
                         cfg.n_workers, Limits(cfg.tool_s, cfg.tool_mb), Limits(cfg.harness_s, cfg.harness_mb))


# ---- checks before a model is loaded --------------------------------------------------------------------------------


def n_steps(flag: str, epochs: float, cfg: Config, n_train: int) -> int:
    try:
        return sched.steps(epochs, n_train, cfg.prompt_batch)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def check_schedule(cfg: Config, n_train: int, n_harness_tasks: int) -> None:
    """UsageError where a setting of the schedule cannot be met, before a model is loaded."""
    if cfg.one_search and cfg.iterations < 2:
        raise UsageError(f"--iterations {cfg.iterations}: the first one scores the incoming harness; a search takes 2")
    budget = rollout_budget(cfg, n_train, n_harness_tasks)
    if cfg.method == "adaptive":
        n_steps("--patience-epochs", cfg.patience_epochs, cfg, n_train)
    if cfg.eval_epochs:
        n_steps("--eval-epochs", cfg.eval_epochs, cfg, n_train)
    least = least_search(cfg, n_harness_tasks) if cfg.method == "harness" else least_weight_step(cfg)
    if budget < least:
        raise UsageError(f"--rollouts {budget}: {cfg.method} needs at least {least} to begin")
    if cfg.one_search and cfg.method != "harness":
        raise UsageError(f"--one-search is for --method harness, not {cfg.method}")
    if cfg.finish == "harness" and cfg.method not in ALTERNATING:
        raise UsageError(f"--finish harness is for {', '.join(ALTERNATING)}; {cfg.method} has its phases as they are")


def least_search(cfg: Config, n_harness_tasks: int) -> int:
    """Rollouts of the smallest search: the incoming harness, one candidate, and what accepting takes."""
    return 2 * n_harness_tasks + kept_rollouts(cfg.accept, n_harness_tasks)


def least_weight_step(cfg: Config) -> int:
    """Rollouts of the smallest weight step: half a batch. An update is as large whatever its batch, but noisier."""
    return cfg.group_size * max(1, cfg.prompt_batch // 2)


def rollout_budget(cfg: Config, n_train: int, n_harness_tasks: int) -> int:
    """Training rollouts: what was asked for, or what `cycles` cycles of WHALE take, or of a search alone."""
    weight_steps = 0 if cfg.one_search else n_steps("--epochs", cfg.epochs, cfg, n_train)
    planned = sched.planned_rollouts(
        weight_steps, cfg.prompt_batch, cfg.group_size, cfg.iterations, cfg.candidates, n_harness_tasks, cfg.cycles)
    return cfg.rollouts or planned + cfg.cycles * kept_rollouts(cfg.accept, n_harness_tasks)


def read_file(path: str) -> str:
    try:
        refuse_special(path)
        refuse_huge(path)
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UsageError(f"{path}: {why}") from None


def load_split(env, value: str) -> list[Task]:
    """Tasks of FILE or FILE[a:b] (rows a to b, in Hugging Face's split notation, and as strict as there)."""
    path, start, end = re.fullmatch(r"(.*?)(?:\[([0-9]{0,12}):([0-9]{0,12})\])?", value, re.DOTALL).groups()
    if path.endswith("]"):
        raise UsageError(f"{value}: rows are given as FILE[a:b], from row a to before row b, counted from 0")
    tasks = env.load(Path(path))
    first, last = int(start or 0), int(end or len(tasks))
    if not first < last <= len(tasks):
        raise UsageError(f"{value}: there are no such rows; {path} has {len(tasks):,}")
    return tasks[first:last]


def load_splits(cfg: Config) -> tuple:
    """-> the environment and its splits {"train", "harness", "test"}, checked to be disjoint."""
    env = make_env(cfg)
    embedded = ROOT / "embedded" / cfg.domain
    splits = {split: load_split(env, given or str(embedded / f"{split}.jsonl"))
              for split, given in (("train", cfg.train), ("harness", cfg.harness_set), ("test", cfg.test))}
    check_disjoint(**splits)
    return env, splits


def make_env(cfg: Config):
    """The environment of cfg.domain, with the retriever and the judge that the flags name."""
    if cfg.domain != "search" and (cfg.retriever or cfg.judge_url):
        raise UsageError(f"--judge-url and --retriever are for search; {cfg.domain} has no use for them")
    try:
        return ENVS[cfg.domain](cfg.retriever, open_judge(cfg)) if cfg.domain == "search" else ENVS[cfg.domain]()
    except (ValueError, OSError) as error:
        raise UsageError(f"--retriever {cfg.retriever}: {error}") from None


def secret_paths(cfg: Config) -> tuple[Path, ...]:
    """What a proposer must not read: the references, and the runs, whose files hold graded test rollouts."""
    given = (re.sub(r"\[\d*:\d*\]$", "", value) for value in (cfg.train, cfg.harness_set, cfg.test) if value)
    return tuple(Path(path).resolve() for path in (ROOT, cfg.out, *given))


def guarded_paths(cfg: Config) -> tuple[Path, ...]:
    """What a proposer must not write: what decides a score, and what a run goes on from."""
    local = [path for path in (Path(cfg.model),) if path.exists()]
    return (*scorer_paths(), *local, cfg.run_dir / "config.json", cfg.run_dir / "state.json",
            cfg.run_dir / "weights", *secret_paths(cfg)[2:])


def check_urls(cfg: Config) -> None:
    """UsageError or ModelError if a flag holds no URL of a server, or one with a secret, or if a key would be seen on
    its way. It comes before all else that could repeat what a flag holds."""
    engines = server_call.read_urls(cfg.urls) if cfg.urls else []
    retrievers = cfg.retriever.split(",") if "://" in cfg.retriever else []
    try:
        for flag, urls, name in (("--urls", engines, server_call.KEY), ("--retriever", retrievers, ""),
                                 ("--judge-url", [cfg.judge_url], JUDGE_KEY),
                                 ("--proposer-url", [cfg.proposer_url], chat_endpoint.KEY)):
            for url in filter(None, map(str.strip, urls)):
                keys.check_url(flag, url, name)
                if keys.HTTPS not in cfg.waived:
                    keys.check_cleartext(flag, url, name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def open_judge(cfg: Config, cache_path: Path | None = None) -> Judge | None:
    """The judge that the flags name, with the key that only the environment holds."""
    if bool(cfg.judge_url) != bool(cfg.judge_model):
        raise UsageError("--judge-url and --judge-model go together")
    try:
        key = keys.read_key(JUDGE_KEY) or None
        return Judge(cfg.judge_url, cfg.judge_model, key, cache_path=cache_path) if cfg.judge_url else None
    except ValueError as error:
        raise UsageError(f"--judge-url: {error}") from None


def identity_of(cfg: Config, env, splits: dict[str, list[Task]], h0: str) -> dict[str, dict]:
    """What makes a run another run: its settings, and the hashes of data, model and h0."""
    return {"config": {key: value for key, value in asdict(cfg).items()
                       if key not in FREE_ON_RESUME and not str(value).startswith(("http://", "https://"))},
            "sha256": {**{split: hash_tasks(tasks) for split, tasks in splits.items()},
                       "model": hash_model(cfg.model), "h0": sha256(h0),
                       **{path.name: hash_model(str(path)) for path in env.files}}}


def pin_model(cfg: Config, record: Path | None = None) -> Config:
    """The same settings with the commit of a hub model, for all that is loaded of it from here on. A run that has begun
    goes on with the commit in its `record`, wherever the branch is now. ModelError if it cannot be known."""
    if not is_hub_name(cfg.model):
        if cfg.revision:
            raise UsageError(f"--revision {cfg.revision}: is for a model of the hub, and --model {cfg.model} is none")
        return cfg
    before = read_json(record).get("config", {}) if record and record.exists() and not cfg.revision else {}
    if before.get("model") == cfg.model and isinstance(before.get("revision"), str):
        return replace(cfg, revision=before["revision"])
    # a server's name for its model is no business of the hub's
    return replace(cfg, revision=find_commit(cfg.model, cfg.revision, ask_hub=cfg.engine != "server") or cfg.revision)


def describe_model(cfg: Config) -> list[str]:
    """What its user should know of where a model comes from."""
    return [f"{cfg.model} at commit {cfg.revision}"] * bool(cfg.revision) + [
        f"--trust-remote-code true: code that comes with {cfg.model} is run, with all rights of this user: it can read "
        "keys, change results, and reach the network"] * cfg.trust_remote_code


def hash_tasks(tasks: list[Task]) -> str:
    return hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()


def hash_model(model: str) -> str:
    """sha256 over a local model's files; a hub name stands for itself."""
    path = Path(model)
    files = [f for f in sorted(path.glob("*")) if f.is_file()] if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256(b"" if files else model.encode())
    for file in files:
        with open(file, "rb") as handle:
            digest.update(file.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class DiskPlan:
    """Bytes that a run directory takes."""
    n_checkpoints: int          # the last --keep, the best, one that is being written, one for servers to read
    checkpoint: int
    records: int                # all else, if rollouts fill the model's context once
    most: int                   # and if each fills all that it may, as a harness can make it do

    @property
    def needed(self) -> int:
        return self.n_checkpoints * self.checkpoint + self.records

    def __str__(self) -> str:
        at_most = self.needed - self.records + self.most
        parts = [f"{self.n_checkpoints} checkpoints of {self.checkpoint >> 20:,} MiB"] * (self.n_checkpoints > 0)
        parts += [f"traces and all else {self.records >> 20:,} MiB"]
        return f"about {self.needed >> 20:,} MiB ({', '.join(parts)}), at most {at_most >> 20:,} MiB"


def n_weights_of(model: str) -> int:
    """Of a local model whose files are bf16; 0 where it is not here yet."""
    path = Path(model)
    files = list(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    return sum(file.stat().st_size for file in files) // 2


def plan_disk(cfg: Config, n_weights: int, n_train: int, n_harness_tasks: int, n_test: int) -> DiskPlan:
    """Of a run that spends what is planned; an adaptive one without --rollouts may go on for longer."""
    budget, a_step = rollout_budget(cfg, n_train, n_harness_tasks), cfg.prompt_batch * cfg.group_size
    epochs, iterations = (cfg.patience_epochs, cfg.min_iterations) if cfg.method == "adaptive" else (
        cfg.epochs, cfg.iterations)
    a_phase = 1 if cfg.one_search else n_steps("--epochs", epochs, cfg, n_train)              # weight steps
    a_search = 1 + (iterations - 1) * cfg.candidates                                            # candidates
    if cfg.method in ALTERNATING:
        n_cycles = 1 + budget // (a_phase * a_step + a_search * n_harness_tasks)
        n_weight_steps, n_scored, n_evals = a_phase * n_cycles, a_search * n_cycles, 1 + 2 * n_cycles
    else:
        n_weight_steps = 0 if cfg.method == "harness" else 1 + budget // a_step
        n_scored = 0 if cfg.method == "weight" else 1 + budget // n_harness_tasks
        n_evals = 3 + n_weight_steps // a_phase + n_scored // a_search
    if cfg.eval_epochs:
        n_evals += n_weight_steps // n_steps("--eval-epochs", cfg.eval_epochs, cfg, n_train)
    n_sessions = 0 if cfg.proposer == "rules" else n_scored

    def records(trace: int, whole: int, session: int) -> int:
        """`whole`: a trace with its tokens. A candidate's other files and its place on the page: 128 KiB."""
        return (n_evals * n_test * (whole + 300 * cfg.n_eval) + n_scored * (n_harness_tasks * trace + (128 << 10))
                + n_weight_steps * 2 * N_SHOWN * whole + n_sessions * session + (4 << 20))

    usual, most = 4 * cfg.max_len, max_trace_bytes(cfg.max_calls, cfg.max_len)
    n_checkpoints = cfg.keep + 2 + (cfg.engine == "server") if n_weight_steps else 0
    return DiskPlan(n_checkpoints, 3 * 4 * n_weights + (1 << 20),                   # in fp32, and two AdamW moments
                    records(usual, 4 * usual, 1 << 20), records(3 * most, 8 * most, 21 << 20))  # JSON escapes


def check_disk(cfg: Config, plan: DiskPlan) -> str:
    """What the run directory takes, in words. UsageError if there is no room for what is not there yet."""
    out = Path(cfg.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    free, there = shutil.disk_usage(existing).free, 0
    for path in cfg.run_dir.rglob("*"):
        try:
            there += path.stat().st_size * (path.relative_to(cfg.run_dir).parts[0] != "set_aside")
        except OSError:                                         # another process is at work there; the lock will say so
            pass
    left = plan.needed - there
    if free < left:
        raise UsageError(f"{existing} has {free >> 20:,} MiB free and this run may need {left >> 20:,} MiB more; make "
                         f"room or choose another place with --out. Its directory takes {plan}")
    return f"{cfg.run_dir} takes {plan}; {free >> 20:,} MiB are free"


def code_version() -> str:
    """The commit, marked if files differ from it; without git, the version."""
    try:
        commit, changes = (subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True,
                                          env=keys.without_secrets(os.environ))
                           for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]))
    except (OSError, subprocess.CalledProcessError):
        return VERSION
    return commit.stdout.strip() + "-changed" * bool(changes.stdout.strip())
