"""The Engine contract over transformers: runs where there is no GPU, and repeats bit for bit.

A continuous batch over one preallocated key/value cache: every request owns a row (slot) of it from its first token to
its last, rows have their own lengths, and a finished row is free at the next step. One `step` samples one token for
every running request. What a row samples is a function of its prompt, its seed and the weights; which rows run beside
it changes its logits in the last bits only (floating-point sums), so callers who want runs to repeat exactly submit in
an order that does not depend on the clock (rollout.py does).

Differs from the paper: the paper samples with vLLM; the sampling rules (temperature, top-k, top-p) are the same.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine import (
    Completion, EngineDied, Model, ModelError, SamplingParams, check_names, load_model, load_tokenizer, stop_ids_of,
    untied_weights, weights_checksum)

ADMIT_EVERY = 8         # steps between prefills while more than half of the rows run
PREFILL_TOK = 8192      # padded tokens a prefill pass


def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Attention where query heads share key/value heads, without copying the cache once per query head.

    query (B, H, Q, D); key, value (B, K, T, D), H a multiple of K; mask (B, 1, Q, T), True = may look. The H/K queries
    of a group are laid along the query axis, which attention treats row by row. -> (B, Q, H, D).
    """
    B, H, Q, D = query.shape
    K = key.shape[1]
    query = query.reshape(B, K, H // K * Q, D)
    mask = attention_mask if Q == 1 else attention_mask.repeat(1, 1, H // K, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, H, Q, D).transpose(1, 2), None


AttentionInterface.register("whale_grouped", grouped_attention)


@dataclass
class Request:
    """A request from submit to its last token. `row` is its slot in the cache, `ids` prompt and completion."""
    id: Hashable
    prompt_ids: list[int]
    params: SamplingParams
    after: Hashable | None
    completion: list[int] = field(default_factory=list)
    row: int = -1


class SlotCache:
    """Keys and values of every layer, (n_rows, n_kv_heads, width, head_dim); a drop-in for transformers' Cache.

    Before each forward pass the engine says where the pass reads and writes: `rows` (B,), `positions` (B, Q), how many
    tokens of each row are real (the rest is right padding), and the width to read.
    """

    def __init__(self, n_rows: int):
        self.n_rows, self.width = n_rows, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def aim(self, rows: torch.Tensor, positions: torch.Tensor, real: torch.Tensor, read: int, contiguous: bool,
            fresh: bool) -> None:
        """contiguous: rows are 0..B-1, so the cache is read in place; fresh: no past, so it is not read at all."""
        self.rows, self.read, self.contiguous, self.fresh = rows, read, contiguous, fresh
        self.b, self.q = real.nonzero(as_tuple=True)                  # which of (B, Q) are real tokens
        self.write_rows, self.write_cols = rows[self.b], positions[self.b, self.q]

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores this pass's key and value, (B, n_kv_heads, Q, head_dim); returns all that its rows may look at."""
        for store, new in ((self.keys, key), (self.values, value)):
            if layer == len(store):
                store.append(new.new_zeros(self.n_rows, new.shape[1], self.width, new.shape[3]))
            store[layer][self.write_rows, :, self.write_cols] = new[self.b, :, self.q]
        if self.fresh:
            return key, value
        if self.contiguous:
            n = len(self.rows)
            return self.keys[layer][:n, :, :self.read], self.values[layer][:n, :, :self.read]
        return self.keys[layer][self.rows, :, :self.read], self.values[layer][self.rows, :, :self.read]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        for store in (self.keys, self.values):
            for layer in store:
                layer[targets, :, :length] = layer[source, :, :length].clone()      # torch refuses overlapping views

    def grow(self, width: int) -> None:
        """Makes room for `width` columns, at least doubling, so that growing stays rare."""
        if width <= self.width:
            return
        more = max(width, 2 * self.width, 256) - self.width
        for store in (self.keys, self.values):
            store[:] = [F.pad(layer, (0, 0, 0, more)) for layer in store]
        self.width += more


class TransformersEngine:
    """The Engine contract over a transformers causal LM whose layers are all (full or sliding) attention."""

    takes_weights = True
    notes = ()
    exact = True                            # the same requests in the same order are answered with the same tokens

    def __init__(self, model: str | Model, n_rows: int = 256, max_len: int = 4096, device: str = "cpu",
                 dtype: torch.dtype = torch.float32):
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, dtype, attention="whale_grouped").to(device)
        config = self.model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds - {"full_attention", "sliding_attention"} or getattr(config, "attn_logit_softcapping", None):
            raise ModelError(f"--model {model}: layers of kind {sorted(kinds)} need --engine vllm")
        self.window = config.sliding_window if "sliding_attention" in kinds else None
        self.device, self.n_rows = device, n_rows
        self.max_len = min(max_len, getattr(config, "max_position_embeddings", max_len))
        self.stop_ids = stop_ids_of(self.model.generation_config, self.tokenizer)
        self.version = 0
        self.n_steps = 0
        self._forget()

    # ---- the contract ----

    def submit(self, id: Hashable, prompt_ids: list[int], params: SamplingParams,
               after: Hashable | None = None) -> None:
        """Queues a request. `after` may name a finished request whose sequence this prompt extends: where its row is
        still in the cache, only the rest of the prompt is computed."""
        if not prompt_ids or params.max_tokens < 1:
            raise ValueError(f"request {id!r}: {len(prompt_ids)} prompt tokens, max_tokens {params.max_tokens}")
        self.waiting.append(Request(id, list(prompt_ids), params, after))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admits waiting requests to free rows, samples one token for every running row, returns what has finished."""
        self.n_steps += 1
        # prefill is dearest for few rows at a time, so arrivals are gathered for some steps while enough rows run
        gather = len(self.running) > self.n_rows // 2 and self.n_steps % ADMIT_EVERY
        finished = [] if gather else self._admit()
        if self.running:
            rows = sorted(self.running)
            in_place = len(rows) >= 0.6 * (rows[-1] + 1)          # idle rows between cost less than a gather
            if in_place:
                rows = list(range(rows[-1] + 1))
            ids = torch.tensor([[self.last_id[row]] for row in rows])
            lengths = torch.tensor([self.lengths[row] for row in rows])
            logits = self._forward(rows, ids, lengths, torch.ones(len(rows), dtype=torch.long), in_place)
            live = [i for i, row in enumerate(rows) if row in self.running]
            for i in live:
                self.lengths[rows[i]] += 1
            finished += self._sample([rows[i] for i in live], logits[live] if len(live) < len(rows) else logits)
        return finished

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights, and proves it: EngineDied if what the engine then holds is not what was given. A name
        or shape that does not match raises, and nothing cached under the old weights is used again. Only when idle."""
        if not self.idle:
            raise RuntimeError("load_weights while requests are running would mix two policies in one completion")
        own, given = untied_weights(self.model), dict(named)
        check_names({name: tensor.shape for name, tensor in own.items()}, given)
        for name, tensor in given.items():
            own[name].copy_(tensor)
        if self.checksum() != weights_checksum((name, tensor.to(own[name].dtype)) for name, tensor in given.items()):
            raise EngineDied("the engine does not hold the weights that it was given")
        self.version = version
        self._forget()

    def release(self, id: Hashable) -> None:
        """No prompt will extend this finished request any more: its row is free."""
        if request := self.kept.pop(id, None):
            self.lengths[request.row] = 0
            self.free.append(request.row)

    def checksum(self) -> str:
        return weights_checksum(untied_weights(self.model).items())

    def sleep(self) -> None:
        """Frees the cache between phases."""
        self._forget()

    def wake(self) -> None:
        """Nothing to do: the weights stayed and the cache grows again on use."""

    def reset(self) -> None:
        """Forgets all requests and cached rows, so that what follows does not depend on what went before."""
        self._forget()

    def close(self) -> None:
        """Nothing to end: it lives in this process."""

    # ---- inside ----

    def _forget(self) -> None:
        self.cache = SlotCache(self.n_rows)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}                     # row -> request
        self.kept: dict[Hashable, Request] = {}                   # finished requests whose rows nobody has taken yet
        self.free = deque(range(self.n_rows))                     # never used or taken back, next first
        self.lengths = [0] * self.n_rows                          # tokens of a row whose keys and values are stored
        self.last_id = [0] * self.n_rows                          # sampled, not yet stored
        self.uniforms = torch.zeros(self.n_rows, 0)               # (n_rows, max_tokens): one draw a token, by seed

    def _take_row(self, request: Request) -> int:
        """A row for the request: its predecessor's, a free one, or the one kept longest."""
        before = self.kept.pop(request.after, None) if request.after is not None else None
        if before is not None:
            stored = (before.prompt_ids + before.completion)[:self.lengths[before.row]]
            if request.prompt_ids[:len(stored)] == stored and len(stored) < len(request.prompt_ids):
                return before.row
            self.free.appendleft(before.row)
            self.lengths[before.row] = 0
        if not self.free:
            oldest = self.kept.pop(next(iter(self.kept)))
            self.free.append(oldest.row)
        row = self.free.popleft()
        self.lengths[row] = 0
        return row

    def _admit(self) -> list[Completion]:
        """Prefills as many waiting requests as there are rows. Requests with the same prompt are computed once."""
        finished, fresh, extended = [], {}, []
        while self.waiting and len(self.running) < self.n_rows:
            request = self.waiting.popleft()
            if len(request.prompt_ids) >= self.max_len:
                finished.append(Completion(request.id, [], "too_long"))
                continue
            request.row = row = self._take_row(request)
            self.running[row] = request
            n = min(request.params.max_tokens, self.max_len - len(request.prompt_ids))
            if self.uniforms.shape[1] < n:
                self.uniforms = F.pad(self.uniforms, (0, n - self.uniforms.shape[1]))
            self.uniforms[row, :n] = torch.from_numpy(
                np.random.Generator(np.random.Philox(request.params.seed)).random(n, dtype=np.float32))
            if self.lengths[row]:
                extended.append(request)
            else:
                fresh.setdefault(tuple(request.prompt_ids), []).append(request)
        for groups in (list(fresh.values()), [[request] for request in extended]):
            for batch in self._split_by_length(groups):
                finished += self._prefill(batch)
        return finished

    def _split_by_length(self, groups: list[list[Request]]) -> Iterator[list[list[Request]]]:
        """Batches of prompts of which similar lengths are still to compute, of at most PREFILL_TOK padded tokens."""
        def left(group: list[Request]) -> int:
            return len(group[0].prompt_ids) - self.lengths[group[0].row]

        batch: list[list[Request]] = []
        for group in sorted(groups, key=left):
            if batch and (left(group) * (len(batch) + 1) > PREFILL_TOK or left(group) > 1.5 * left(batch[0]) + 8):
                yield batch
                batch = []
            batch.append(group)
        if batch:
            yield batch

    def _prefill(self, groups: list[list[Request]]) -> list[Completion]:
        """Computes one prompt a group (from where its row stands) and samples a first token for all of the group."""
        firsts = [group[0] for group in groups]
        rows = [request.row for request in firsts]
        starts = torch.tensor([self.lengths[row] for row in rows])
        tails = [request.prompt_ids[self.lengths[request.row]:] for request in firsts]
        counts = torch.tensor([len(tail) for tail in tails])
        ids = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)                       # (B, Q), right-padded
        for i, tail in enumerate(tails):
            ids[i, :len(tail)] = torch.tensor(tail)
        logits = self._forward(rows, ids, starts, counts, in_place=False)
        for group in groups:
            for request in group:
                self.lengths[request.row] = len(request.prompt_ids)
            if len(group) > 1:
                self.cache.copy_row(group[0].row, [r.row for r in group[1:]], len(group[0].prompt_ids))
        which = [i for i, group in enumerate(groups) for _ in group]
        return self._sample([request.row for group in groups for request in group], logits[which])

    def _forward(self, rows: list[int], ids: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor,
                 in_place: bool) -> torch.Tensor:
        """ids (B, Q), of which the first counts[b] are real, at positions starts[b]... -> logits (B, V) of the last."""
        offsets = torch.arange(ids.shape[1])
        positions = starts[:, None] + offsets                                                   # (B, Q)
        fresh = not bool(starts.any())
        read = int((starts + counts).max())
        self.cache.grow(read)
        self.cache.aim(torch.tensor(rows), positions, offsets < counts[:, None], read, in_place, fresh)
        columns = torch.arange(read)
        look = (columns <= positions[:, :, None])[:, None]                                      # (B, 1, Q, read)
        mask = look.to(self.device)
        if self.window:
            near = (columns > positions[:, :, None] - self.window)[:, None]
            mask = {"full_attention": mask, "sliding_attention": (look & near).to(self.device)}
        hidden = self.model.get_decoder()(
            input_ids=ids.to(self.device), position_ids=positions.to(self.device), attention_mask=mask,
            past_key_values=self.cache, use_cache=True).last_hidden_state                       # (B, Q, hidden)
        last = hidden[torch.arange(len(rows)), counts - 1]
        logits = self.model.get_output_embeddings()(last).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def _sample(self, rows: list[int], logits: torch.Tensor) -> list[Completion]:
        """Draws one token a row from logits (n, V); frees the rows that have ended."""
        requests = [self.running[row] for row in rows]
        at = torch.tensor([len(request.completion) for request in requests])
        draws = self.uniforms[torch.tensor(rows), at]                                           # (n,)
        params = {(r.params.temperature, r.params.top_k, r.params.top_p) for r in requests}
        if len(params) == 1:
            tokens = sample_tokens(logits, draws.to(logits.device), *params.pop()).tolist()
        else:
            tokens = [int(sample_tokens(logits[i:i + 1], draws[i:i + 1].to(logits.device), r.params.temperature,
                                        r.params.top_k, r.params.top_p)) for i, r in enumerate(requests)]
        finished = []
        for request, token in zip(requests, tokens, strict=True):
            request.completion.append(token)
            self.last_id[request.row] = token
            n = len(request.completion)
            if token in self.stop_ids or (request.params.stop and self._said_stop(request)):
                finish = "stop"
            elif n >= request.params.max_tokens or len(request.prompt_ids) + n >= self.max_len:
                finish = "length"
            else:
                continue
            del self.running[request.row]
            self.kept[request.id] = request
            finished.append(Completion(request.id, request.completion, finish))
        return finished

    def _said_stop(self, request: Request) -> bool:
        """Whether a stop string was said; only what the last token can have completed is read."""
        longest = max(map(len, request.params.stop))
        tail = self.tokenizer.decode(request.completion[-longest - 4:])
        return any(stop in tail for stop in request.params.stop)


def sample_tokens(logits: torch.Tensor, draws: torch.Tensor, temperature: float, top_k: int, top_p: float):
    """logits (n, V), draws (n,) uniform in [0, 1) -> token ids (n,), by inverting the cumulative distribution."""
    if temperature == 0:
        return logits.argmax(-1)
    k = min(top_k or logits.shape[-1], logits.shape[-1])
    values, tokens = logits.topk(k, dim=-1)                                                     # (n, k), largest first
    probabilities = (values / temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    if top_p < 1:
        kept = cumulative - probabilities < top_p                  # the token that crosses top_p is kept
        cumulative = torch.where(kept, probabilities, 0).cumsum(-1)
    picks = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=k - 1)
    return tokens.gather(1, picks[:, None])[:, 0]
