"""The weight phase's update: rejection-sampling fine-tuning (RSFT) on the rollouts that the verifier accepted.

The paper's objective, normalised over the model's own tokens I(tau) of the accepted set S+, is a plain SFT loss:

    J(theta) = 1 / sum_{S+} |I(tau)| * sum_{S+} sum_{t in I(tau)} log p_theta(tau_t | x, h, tau_<t)

One weight step is one epoch over the accepted trajectories of one prompt batch, in minibatches of 64, with AdamW at a
constant learning rate of 1e-7; no KL, no entropy term, no advantage. On CPU it is bit for bit a function of weights,
optimiser, trajectories in their order, seed and thread count; on a GPU the backward pass adds in no fixed order.

On several ranks (ranks.py) weights, gradients and optimiser are sharded by FSDP2: fp32 masters, bf16 compute, gradients
summed in fp32. Every rank is given all trajectories and trains on its share of each minibatch, so the update is that of
one rank to rounding, and a checkpoint knows nothing of the number of ranks that wrote it. The rounding is that of bf16:
FSDP casts all weights and the residual stream to it, autocast on one rank leaves norms, decay rates and sums in fp32.

Differs from the paper:
- S+ in J is one minibatch: each optimiser step divides by the supervised tokens of its own minibatch. The last one of
  a weight step holds what is left and counts as a whole optimiser step (the paper does not say).
- Gradients are clipped by their norm (`max_grad_norm`); the paper gives no value.
- Dropout stays off (eval mode): the policy that is trained is the one that sampled.

Known limits at lr 1e-7, both of fp32 rounding: a weight with |w| > 2 does not move, and AdamW's decay does nothing.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from engine import Model, load_model, untied_weights, weights_checksum
from ranks import ALONE, Ranks
from files import Damaged, UsageError, naming, read_json, sync

if TYPE_CHECKING:
    from rollout import Sequence

FREE_ON_LOAD = {"gradient_checkpointing"}  # a run that ran out of memory may go on with it
Trajectory = list["Sequence"]  # more than one sequence when the harness rewrote its context between calls


@dataclass(frozen=True)
class TrainConfig:
    lr: float  # constant
    minibatch: int  # trajectories an optimiser step
    micro_tok: int  # padded tokens a forward pass: memory, not the result
    max_grad_norm: float
    weight_decay: float
    beta1: float
    beta2: float
    head_chunk_tok: int  # tokens whose logits exist at a time: memory, not the result
    autocast_bf16: bool  # matrix products in bf16; weights, gradients and optimiser stay fp32
    gradient_checkpointing: bool  # a layer's activations are made again in the backward pass: memory, not the result

    def __post_init__(self):
        for name in ("lr", "minibatch", "micro_tok", "max_grad_norm", "head_chunk_tok"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")


@dataclass(frozen=True)
class StepStats:
    loss: float | None  # mean a supervised token over the step; None when there was no update
    n_updates: int
    n_trajectories: int
    n_seq: int
    n_supervised_tok: int
    n_tok: int  # without padding
    padding_frac: float | None  # of the padded tokens
    grad_norm: float | None  # before clipping, mean over the updates


class TrainError(RuntimeError):
    """Training cannot go on."""


class CheckpointError(Damaged):
    """A checkpoint that is incomplete, damaged or of another configuration; the message names the file or field."""


class TokenLosses(torch.nn.Module):
    """Model and loss as one module: FSDP keeps what its root owns (embedding, last norm, head) whole from the forward
    pass to the end of the backward pass, so all chunks of the head use it and none asks other ranks for it."""

    def __init__(self, model: torch.nn.Module, head_chunk_tok: int):
        super().__init__()
        self.model, self.head_chunk_tok = model, head_chunk_tok
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma

    def forward(self, ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """-sum of log p_theta over the tokens under the mask; ids and loss_mask (B, T) -> scalar, fp32."""
        hidden = self.hidden(ids)  # (B, T, D)
        # position t predicts token t + 1; only positions before a supervised token go through the head
        hidden = hidden[:, :-1][loss_mask[:, 1:]]  # (N, D)
        targets = ids[:, 1:][loss_mask[:, 1:]]  # (N,)
        if len(hidden) <= self.head_chunk_tok:  # the one chunk is needed whole in the backward pass
            return self._sum_chunk(hidden, targets)
        # (N, V) logits of a 248,320-word vocabulary do not fit: made in chunks, and once more in the backward pass
        chunks = zip(hidden.split(self.head_chunk_tok), targets.split(self.head_chunk_tok), strict=True)
        return torch.stack([checkpoint(self._sum_chunk, h, y, use_reentrant=False) for h, y in chunks]).sum()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        # No padding mask: every layer looks left only, so pads on the right change nothing (a test proves it for each
        # architecture), and without a mask attention takes its fast path.
        return self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state

    def _sum_chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(hidden), targets, reduction="sum")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()  # (N, V)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Trainer:
    """Model, AdamW and weights version. `version` counts the weight steps that changed the weights.

    With several ranks every method is called by all of them, with the same arguments.
    """

    def __init__(self, model: str | Path | Model, cfg: TrainConfig, device: str | torch.device, ranks: Ranks = ALONE):
        self.cfg, self.device, self.ranks, self.version = cfg, torch.device(device), ranks, 0
        self.model = load_model(model).to(self.device)
        self.trust_remote_code = isinstance(model, Model) and model.trust_remote_code
        self.losses = TokenLosses(self.model, cfg.head_chunk_tok)
        self.max_seq_tok = min(cfg.micro_tok, self.model.config.get_text_config().max_position_embeddings)
        self._check_head()
        self.layers = [m for m in self.model.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
        if not self.layers and (cfg.gradient_checkpointing or ranks.world > 1):
            raise ValueError(f"{type(self.model).__name__} does not say what is a layer (GradientCheckpointingLayer)")
        if cfg.gradient_checkpointing:
            for layer in self.layers:  # transformers' own switch does nothing in eval mode, which is ours
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if ranks.world > 1:
            self._shard()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay
        )

    def _shard(self) -> None:
        """Each rank keeps 1 / world of every tensor; a layer is whole only while it computes."""
        shard = partial(
            fully_shard,
            mesh=init_device_mesh(self.device.type, (self.ranks.world,)),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.cfg.autocast_bf16 else None, reduce_dtype=torch.float32
            ),
        )
        for layer in self.layers:
            shard(layer)
        shard(self.losses)

    def step(self, trajectories: list[Trajectory], seed: int | tuple[int, ...]) -> StepStats:
        """One weight step: one SFT epoch over accepted trajectories, shuffled by `seed`, e.g. (run seed, phase, step).

        Nothing accepted: nothing changes and n_updates is 0. ValueError, before any update, on what cannot be trained.
        """
        for trajectory in trajectories:
            self._check(trajectory)
        if not trajectories:
            return StepStats(None, 0, 0, 0, 0, 0, None, None)
        order = list(range(len(trajectories)))
        random.Random(str(seed)).shuffle(order)  # a string is hashed with sha512, the same in every process
        loss_sum, n_padded_tok, grad_norms = 0.0, 0, []
        for start in range(0, len(order), self.cfg.minibatch):
            minibatch = [sequence for i in order[start : start + self.cfg.minibatch] for sequence in trajectories[i]]
            minibatch_loss_sum, minibatch_padded_tok = self.accumulate_grads(minibatch)
            norm = self.clip_grads()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss_sum += minibatch_loss_sum
            n_padded_tok += minibatch_padded_tok
            grad_norms.append(norm.item())
        sequences = [sequence for trajectory in trajectories for sequence in trajectory]
        n_supervised_tok, n_tok = count_supervised_tok(sequences), sum(len(s.ids) for s in sequences)
        self.version += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for an engine that shares the GPU and now wakes up
        return StepStats(
            loss=loss_sum / n_supervised_tok,
            n_updates=len(grad_norms),
            n_trajectories=len(trajectories),
            n_seq=len(sequences),
            n_supervised_tok=n_supervised_tok,
            n_tok=n_tok,
            padding_frac=1 - n_tok / n_padded_tok,
            grad_norm=sum(grad_norms) / len(grad_norms),
        )

    def accumulate_grads(self, minibatch: list["Sequence"]) -> tuple[float, int]:
        """Adds the gradient of -J over the minibatch to .grad; returns the sum of token losses and n tokens padded."""
        world = self.ranks.world
        n_supervised_tok = count_supervised_tok(minibatch)  # of all micro-batches and ranks at once: no mean of means
        of_ranks = [split_by_length(share, self.cfg.micro_tok) for share in split_by_load(minibatch, world)]
        n_passes = max(map(len, of_ranks))  # a pass is a collective: a rank with fewer micro-batches adds empty ones
        own = of_ranks[self.ranks.rank]
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in own + [[]] * (n_passes - len(own)):
            micro_loss_sum = self.sum_token_losses(micro_batch)
            (micro_loss_sum * world / n_supervised_tok).backward()  # FSDP averages over ranks
            loss_sum += micro_loss_sum.detach()
        padded = (len(m) * max(len(s.ids) for s in m) for micro_batches in of_ranks for m in micro_batches)
        return self.ranks.sum(loss_sum).item(), sum(padded)

    def sum_token_losses(self, micro_batch: list["Sequence"]) -> torch.Tensor:
        """-sum of log p_theta over the supervised tokens of the micro-batch, 0 of an empty one; scalar, fp32."""
        ids, loss_mask = (t.to(self.device) for t in pad_right(micro_batch))  # each (B, T)
        # where FSDP holds the weights it casts them itself
        enabled = self.cfg.autocast_bf16 and self.ranks.world == 1
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            return self.losses(ids, loss_mask)

    def clip_grads(self) -> torch.Tensor:
        """Scales all gradients to a norm of at most max_grad_norm; returns the norm before.

        A NaN stops the run here, on every rank, before it is in the weights.
        """
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm(grads))
        if not norm.isfinite():
            raise TrainError(f"the gradient is non-finite (its norm is {norm.item()}); the weights are unchanged")
        clip_grads_with_norm_(self.model.parameters(), self.cfg.max_grad_norm, norm)
        return norm

    def _check_head(self) -> None:
        """Decoder + head must be the model's own forward pass; some models scale logits after it (Granite, Cohere)."""
        ids = torch.arange(4, device=self.device)[None]  # (1, 4)
        with torch.no_grad():
            ours = self.losses.logits(self.losses.hidden(ids))
            theirs = self.model(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item()):
            raise ValueError(f"{type(self.model).__name__} changes its logits after the head in an unknown way")

    def _check(self, trajectory: Trajectory) -> None:
        """Accepting is the caller's job. What is given is trained, so what cannot be trained is an error, no skip."""
        if not trajectory:
            raise ValueError("a trajectory without a sequence")
        n_vocab = self.model.get_input_embeddings().num_embeddings
        for s in trajectory:
            if len(s.ids) != len(s.mask):
                raise ValueError(f"a sequence of {len(s.ids)} ids has a mask of {len(s.mask)}")
            if not any(s.mask):
                raise ValueError(f"a sequence of {len(s.ids)} tokens, none of them supervised")
            if s.mask[0]:
                raise ValueError("the first token of a sequence is supervised, but nothing precedes it")
            if len(s.ids) > self.max_seq_tok:
                raise ValueError(f"a sequence of {len(s.ids)} tokens, over {self.max_seq_tok} (micro_tok or the model)")
            if min(s.ids) < 0 or max(s.ids) >= n_vocab:
                raise ValueError(f"token ids {min(s.ids)} to {max(s.ids)} are not all in the vocabulary of {n_vocab}")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor); a tied tensor once, under the name that checkpoints use. Live on one rank; on several,
        gathered one at a time, on every rank, so each must ask for all of them."""
        for name, tensor in untied_weights(self.model).items():
            yield name, whole(tensor)

    def checksum(self) -> str:
        return weights_checksum(self.weights())

    def save(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """HF folder in fp32, trainer.safetensors and, last, trainer.json; `folder` appears whole or not at all.

        A folder of that name (left by a killed run that now repeats the step) is replaced: never save over the
        checkpoint that a run would resume from. Rank 0 writes, and alone needs the file system.
        """
        weights = self._gather(untied_weights(self.model).items())
        moments = self._gather(
            (f"{name}.{key}", value)
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()  # exp_avg, exp_avg_sq, step
        )
        if self.ranks.rank > 0:
            return
        folder = Path(folder)
        aside = folder.with_name(folder.name + ".tmp")
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        try:
            with naming(folder, Exception, SafetensorError):  # tokenizers raises no class of its own for a full disk
                self._write(aside, weights, moments, tokenizer)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # gigabytes, perhaps on a full disk
            raise
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        sync(folder.parent)

    def _write(self, aside: Path, weights: dict, moments: dict, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        save_file(moments, aside / "trainer.safetensors")
        files = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
        record = {"version": self.version, "config": asdict(self.cfg), "sha256": {f: _sha256(aside / f) for f in files}}
        marker = aside / "trainer.json"
        marker.write_text(json.dumps({"record": record, "sha256": _sha256_json(record)}, indent=1))
        for path in [*(aside / f for f in files), marker, aside]:
            sync(path)

    def load(self, folder: str | Path) -> None:
        """Makes this trainer the one that was saved, bit for bit, by however many ranks. Rank 0 reads and hands out.

        Raises CheckpointError before anything is changed.
        """
        version, weights, moments = self._read(Path(folder)) if self.ranks.rank == 0 else (0, {}, {})
        self.version, names = self.ranks.broadcast((version, list(moments)))
        for name, tensor in untied_weights(self.model).items():
            self._fill(tensor, weights.get(name))
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for key in names:
            name, _, kind = key.rpartition(".")
            state = self.optimizer.state[parameters[name]]
            # AdamW keeps its step count on the CPU, whole on every rank
            state[kind] = torch.zeros(()) if kind == "step" else torch.zeros_like(parameters[name])
            self._fill(state[kind], moments.get(key))

    def _read(self, folder: Path) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """A checkpoint's version, weights and moments."""
        record = read_checkpoint_record(folder)
        changed = sorted({name for name, _ in asdict(self.cfg).items() ^ record["config"].items()} - FREE_ON_LOAD)
        if changed:
            raise CheckpointError(f"{folder} was made with other values of {', '.join(changed)}: {record['config']}")
        saved = Model(str(folder), trust_remote_code=self.trust_remote_code)
        try:
            moments = load_file(folder / "trainer.safetensors")
        except SafetensorError as error:
            raise CheckpointError(f"{folder / 'trainer.safetensors'} holds no tensors: {error}") from None
        return record["version"], untied_weights(load_model(saved)), moments

    def _gather(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Whole tensors in rank 0's main memory, one after the other; {} on other ranks, which must take part."""
        gathered = {}
        for name, tensor in named:
            tensor = whole(tensor)
            if self.ranks.rank == 0:
                gathered[name] = tensor.cpu()
        return gathered

    def _fill(self, tensor: torch.Tensor, source: torch.Tensor | None) -> None:
        """tensor <- rank 0's source, of which each rank gets its shard; other ranks have none."""
        if isinstance(tensor, DTensor):
            source = torch.empty(tensor.shape) if source is None else source
            source = distribute_tensor(source.to(self.device), tensor.device_mesh, tensor.placements)
        else:
            source = self.ranks.broadcast(source)
        with torch.no_grad():
            tensor.copy_(source)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor with all its shards, which is a collective; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def count_supervised_tok(sequences: Iterable["Sequence"]) -> int:
    """sum |I(tau)|, the denominator of J."""
    return sum(sum(s.mask) for s in sequences)


def split_by_load(sequences: list["Sequence"], n: int) -> list[list["Sequence"]]:
    """n shares of about as many tokens each, the same on every rank; some are empty where there are few sequences."""
    shares, n_tok = [[] for _ in range(n)], [0] * n
    for sequence in sorted(sequences, key=lambda s: -len(s.ids)):  # the longest first, to whoever has the least
        least = n_tok.index(min(n_tok))
        shares[least].append(sequence)
        n_tok[least] += len(sequence.ids)
    return shares


def split_by_length(sequences: list["Sequence"], micro_tok: int) -> list[list["Sequence"]]:
    """Micro-batches of at most micro_tok padded tokens, longest rows first: memory runs out at once or never."""
    micro_batches: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: -len(s.ids)):
        if not micro_batches or (len(micro_batches[-1]) + 1) * len(micro_batches[-1][0].ids) > micro_tok:
            micro_batches.append([])
        micro_batches[-1].append(sequence)
    return micro_batches


def pad_right(sequences: list["Sequence"]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, loss_mask), each (B, T). loss_mask is True on the tokens that the model sampled, never on padding.

    It comes from the sequences, not from ids: the pad id may be a stop token that the model said. No sequences: a row
    of padding.
    """
    n_rows, n_cols = max(1, len(sequences)), max((len(s.ids) for s in sequences), default=2)
    ids = torch.zeros(n_rows, n_cols, dtype=torch.long)
    loss_mask = torch.zeros(n_rows, n_cols, dtype=torch.bool)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = torch.tensor(s.ids)
        loss_mask[row, : len(s.ids)] = torch.tensor(s.mask)
    return ids, loss_mask


def read_checkpoint_record(folder: Path) -> dict:
    """trainer.json's record (version, config, sha256 a file), once every file is found to be as it was written."""
    marker = folder / "trainer.json"
    if not marker.is_file():
        raise CheckpointError(f"{marker} is missing: no complete checkpoint")
    try:
        content = read_json(marker)
        record = content["record"]
        intact = content["sha256"] == _sha256_json(record) and isinstance(record["sha256"], dict)
    except (UsageError, TypeError, LookupError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{marker} is cut or changed")
    for name, sha256 in record["sha256"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise UsageError(f"{folder / name} cannot be read: {error.strerror}") from None
        if found != sha256:
            raise CheckpointError(f"{folder / name} is cut or changed: its sha256 is not the recorded one")
    return record


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_json(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
