"""The weight phase's update: rejection-sampling fine-tuning (RSFT) on the rollouts that the verifier accepted.

The paper's objective, normalised over the model's own tokens I(tau) of the accepted set S+, is a plain SFT loss:

    J(theta) = 1 / sum_{S+} |I(tau)| * sum_{S+} sum_{t in I(tau)} log p_theta(tau_t | x, h, tau_<t)

One weight step is one epoch over the accepted trajectories of one prompt batch, in minibatches of 64, with AdamW at a
constant learning rate of 1e-7; no KL, no entropy term, no advantage. On CPU it is bit for bit a function of weights,
optimiser, trajectories in their order, seed and thread count; on a GPU the backward pass adds in no fixed order.

Differs from the paper:
- S+ in J is one minibatch: each optimiser step divides by the supervised tokens of its own minibatch. The last one of
  a weight step holds what is left and counts as a whole optimiser step (the paper does not say).
- Gradients are clipped by their norm (`max_grad_norm`); the paper gives no value.
- Dropout stays off (eval mode): the policy that is trained is the one that sampled.

Known limits at lr 1e-7, both of fp32 rounding: a weight with |w| > 2 does not move, and AdamW's decay does nothing.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase

from engine import load_model, untied_weights, weights_checksum

if TYPE_CHECKING:
    from rollout import Sequence

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


class CheckpointError(RuntimeError):
    """A checkpoint that is incomplete, damaged or of another configuration; the message names the file or field."""


class Trainer:
    """Model, AdamW and weights version. `version` counts the weight steps that changed the weights."""

    def __init__(self, model_dir: str | Path, cfg: TrainConfig, device: str | torch.device):
        self.cfg, self.device, self.version = cfg, torch.device(device), 0
        self.model = load_model(model_dir).to(self.device)
        text_config = self.model.config.get_text_config()
        self.softcap = getattr(text_config, "final_logit_softcapping", None)  # Gemma
        self.max_seq_tok = min(cfg.micro_tok, text_config.max_position_embeddings)
        self._check_head()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay
        )

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
            # a NaN stops the run here, before it is in the weights
            norm = clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm, error_if_nonfinite=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss_sum += minibatch_loss_sum
            n_padded_tok += minibatch_padded_tok
            grad_norms.append(norm.item())
        sequences = [sequence for trajectory in trajectories for sequence in trajectory]
        n_supervised_tok, n_tok = count_supervised_tok(sequences), sum(len(s.ids) for s in sequences)
        self.version += 1
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
        n_supervised_tok = count_supervised_tok(minibatch)  # of all micro-batches at once: no mean of means
        loss_sum, n_padded_tok = torch.zeros((), device=self.device), 0
        for micro_batch in split_by_length(minibatch, self.cfg.micro_tok):
            micro_loss_sum = self.sum_token_losses(micro_batch)
            (micro_loss_sum / n_supervised_tok).backward()
            loss_sum += micro_loss_sum.detach()
            n_padded_tok += len(micro_batch) * max(len(s.ids) for s in micro_batch)
        return loss_sum.item(), n_padded_tok

    def sum_token_losses(self, micro_batch: list["Sequence"]) -> torch.Tensor:
        """-sum of log p_theta over the supervised tokens of the micro-batch; scalar, fp32."""
        ids, loss_mask = (t.to(self.device) for t in pad_right(micro_batch))  # each (B, T)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.autocast_bf16):
            hidden = self._hidden(ids)  # (B, T, D)
            # position t predicts token t + 1; only positions before a supervised token go through the head
            hidden = hidden[:, :-1][loss_mask[:, 1:]]  # (N, D)
            targets = ids[:, 1:][loss_mask[:, 1:]]  # (N,)
            # (N, V) logits of a 248,320-word vocabulary do not fit: made in chunks, and once more in the backward pass
            size = self.cfg.head_chunk_tok
            if len(hidden) <= size:  # the one chunk is needed whole in the backward pass: dropping it saves nothing
                return self._sum_chunk(hidden, targets)
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            return torch.stack([checkpoint(self._sum_chunk, h, y, use_reentrant=False) for h, y in chunks]).sum()

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        # No padding mask: every layer looks left only, so pads on the right change nothing (a test proves it for each
        # architecture), and without a mask attention takes its fast path.
        return self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state

    def _sum_chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._logits(hidden), targets, reduction="sum")

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()  # (N, V)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _check_head(self) -> None:
        """Decoder + head must be the model's own forward pass; some models scale logits after it (Granite, Cohere)."""
        ids = torch.arange(4, device=self.device)[None]  # (1, 4)
        with torch.no_grad():
            ours, theirs = self._logits(self._hidden(ids)), self.model(input_ids=ids, use_cache=False).logits.float()
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
        """(name, live fp32 tensor); a tied tensor once, under the name that checkpoints use."""
        yield from untied_weights(self.model).items()

    def checksum(self) -> str:
        return weights_checksum(self.weights())

    def save(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """HF folder in fp32, trainer.safetensors and, last, trainer.json; `folder` appears whole or not at all.

        A folder of that name (left by a killed run that now repeats the step) is replaced: never save over the
        checkpoint that a run would resume from.
        """
        folder = Path(folder)
        aside = folder.with_name(folder.name + ".tmp")
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        self.model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()  # exp_avg, exp_avg_sq, step
        }
        save_file(moments, aside / "trainer.safetensors")
        files = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
        record = {"version": self.version, "config": asdict(self.cfg), "sha256": {f: _sha256(aside / f) for f in files}}
        (aside / "trainer.json").write_text(json.dumps({"record": record, "sha256": _sha256_json(record)}, indent=1))
        for path in [*(aside / f for f in files), aside / "trainer.json", aside]:
            _fsync(path)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        _fsync(folder.parent)

    def load(self, folder: str | Path) -> None:
        """Makes this trainer the one that was saved, bit for bit. Raises CheckpointError before anything is changed."""
        folder = Path(folder)
        record = read_checkpoint_record(folder)
        changed = sorted({name for name, _ in asdict(self.cfg).items() ^ record["config"].items()})
        if changed:
            raise CheckpointError(f"{folder} was made with other values of {', '.join(changed)}: {record['config']}")
        self.model.load_state_dict(load_model(folder).state_dict())
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for key, value in load_file(folder / "trainer.safetensors").items():
            name, _, kind = key.rpartition(".")
            # AdamW keeps its step count on the CPU
            self.optimizer.state[parameters[name]][kind] = value if kind == "step" else value.to(self.device)
        self.version = record["version"]


def count_supervised_tok(sequences: Iterable["Sequence"]) -> int:
    """sum |I(tau)|, the denominator of J. With several ranks, the one place where the count has to become global."""
    return sum(sum(s.mask) for s in sequences)


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

    It comes from the sequences, not from ids: the pad id may be a stop token that the model said.
    """
    n_rows, n_cols = len(sequences), max(len(s.ids) for s in sequences)
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
        content = json.loads(marker.read_text())
        record = content["record"]
        intact = content["sha256"] == _sha256_json(record)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise CheckpointError(f"{marker} is cut or changed")
    for name, sha256 in record["sha256"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
        if _sha256(folder / name) != sha256:
            raise CheckpointError(f"{folder / name} is cut or changed: its sha256 is not the recorded one")
    return record


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_json(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
