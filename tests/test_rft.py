"""The weight update against naive loops, on tiny random models of three architectures; checkpoints."""

import math
import random
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rft import CheckpointError, TrainConfig, Trainer, pad_right, split_by_length, weights_checksum

VOCAB = 101
CFG = TrainConfig(
    lr=1e-3,
    minibatch=64,
    micro_tok=512,
    max_grad_norm=1e9,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.999,
    head_chunk_tok=7,
    autocast_bf16=False,
    gradient_checkpointing=False,
)
SIZES = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)


@dataclass(frozen=True)
class Row:
    """What rft.py reads of rollout.Sequence."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


def qwen3(tied=True):
    return Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=tied)
    )


def gemma3():
    # a window of 4: most padding positions see nothing but padding. A cap of 0.1 bends the logits visibly.
    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=0.1,
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config)


def qwen3_5():
    config = Qwen3_5TextConfig(
        **SIZES,
        num_hidden_layers=2,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config)


MODELS = {"qwen3": qwen3, "gemma3": gemma3, "qwen3_5": qwen3_5}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small are slower on two."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """An HF folder of each architecture, random weights."""
    made = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        model = build()
        with torch.no_grad():  # so that the logits are far from uniform
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(params=MODELS)
def any_folder(request, folders):
    return folders[request.param]


@pytest.fixture
def folder(folders):
    return folders["qwen3"]


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


def make_tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def row(rng, n_prompt, n_completion):
    ids = tuple(rng.randrange(VOCAB) for _ in range(n_prompt + n_completion))
    return Row(ids, (False,) * n_prompt + (True,) * n_completion)


def batch(seed=0, n=9):
    """Trajectories of one or two sequences, 20 versus 1 supervised tokens among them, and one with two model turns."""
    rng = random.Random(seed)
    trajectories = [[row(rng, 3, 20)], [row(rng, 30, 1)], [row(rng, 1, 2), row(rng, 12, 5)]]
    two_turns = row(rng, 5, 15)
    mask = tuple(5 <= i < 9 or 13 <= i < 20 for i in range(20))  # tool text at 9..12 between two completions
    trajectories.append([replace(two_turns, mask=mask)])
    trajectories += [[row(rng, rng.randint(1, 30), rng.randint(1, 20))] for _ in range(n - len(trajectories))]
    return trajectories


def flat(trajectories):
    return [sequence for trajectory in trajectories for sequence in trajectory]


def grads(trainer):
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def naive(model_dir, sequences):
    """Loss and gradient by the formula, the model's own forward pass, one row and one token at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, n = 0.0, 0
    for s in sequences:
        log_p = F.log_softmax(model(input_ids=torch.tensor([s.ids])).logits[0].double(), dim=-1)
        for t in range(1, len(s.ids)):
            if s.mask[t]:
                total, n = total - log_p[t - 1, s.ids[t]], n + 1
    (total / n).backward()
    return total.item() / n, {name: p.grad for name, p in model.named_parameters()}


def assert_close(got, expected, tolerance=1e-6):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= tolerance * max(1.0, tensor.abs().max().item()), name


def equal_state(a, b):
    """Weights, optimiser state and version, bit for bit."""
    states = [t.optimizer.state_dict()["state"] for t in (a, b)]
    assert states[0].keys() == states[1].keys()
    same_moments = all(torch.equal(states[0][i][k], states[1][i][k]) for i in states[0] for k in states[0][i])
    return a.checksum() == b.checksum() and same_moments and a.version == b.version


# --- the gradient ---


@pytest.mark.parametrize("micro_tok", [35, 100, 5_000])
def test_gradient_is_that_of_the_naive_loop(any_folder, micro_tok):
    sequences = flat(batch())
    trainer = Trainer(any_folder, replace(CFG, micro_tok=micro_tok), "cpu")
    assert len(split_by_length(sequences, micro_tok)) == {35: 9, 100: 4, 5_000: 1}[micro_tok]
    loss_sum, _ = trainer.accumulate_grads(sequences)
    loss, expected = naive(any_folder, sequences)
    assert_close(grads(trainer), expected)
    assert loss_sum / sum(sum(s.mask) for s in sequences) == pytest.approx(loss, abs=1e-5)


def test_twenty_tokens_weigh_twenty_times_one_token(folder):
    rng = random.Random(1)
    long, short = row(rng, 2, 20), row(rng, 21, 1)
    trainer = Trainer(folder, replace(CFG, micro_tok=22), "cpu")  # each row a micro-batch of its own
    trainer.accumulate_grads([long, short])
    parts = [naive(folder, [s])[1] for s in (long, short)]
    assert_close(grads(trainer), {name: (20 * parts[0][name] + parts[1][name]) / 21 for name in parts[0]})
    mean_of_means = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    with pytest.raises(AssertionError):
        assert_close(grads(trainer), mean_of_means, tolerance=1e-2)


def test_only_sampled_tokens_carry_loss(folder):
    """The loss is that of predicting exactly the tokens under the mask: the last two here, and nothing else."""
    s = Row((5, 6, 7, 8, 9), (False, False, False, True, True))
    trainer = Trainer(folder, CFG, "cpu")
    log_p = F.log_softmax(trainer.model(input_ids=torch.tensor([s.ids])).logits[0], dim=-1)
    expected = -(log_p[2, 8] + log_p[3, 9])
    assert trainer.sum_token_losses([s]).item() == pytest.approx(expected.item(), abs=1e-5)


def test_masks_come_from_lengths_not_from_ids():
    a, b = Row((0, 3, 0, 0), (False, False, True, True)), Row((0, 0), (False, True))
    ids, loss_mask = pad_right([a, b])
    assert ids.tolist() == [[0, 3, 0, 0], [0, 0, 0, 0]]
    assert loss_mask.tolist() == [[False, False, True, True], [False, True, False, False]]


def test_a_row_alone_is_the_row_in_its_batch(any_folder):
    trainer = Trainer(any_folder, CFG, "cpu")
    sequences = [s for s in flat(batch(seed=2)) if len(s.ids) > 1]
    assert max(len(s.ids) for s in sequences) > 4 * min(len(s.ids) for s in sequences)  # much padding
    ids, _ = pad_right(sequences)
    together = trainer.losses.hidden(ids)
    assert torch.isfinite(together).all()
    for i, s in enumerate(sequences):
        alone = trainer.losses.hidden(torch.tensor([s.ids]))[0]
        assert (together[i, : len(s.ids)] - alone).abs().max() < 1e-5


def test_chunked_head_is_the_full_head(any_folder):
    found = []
    for head_chunk_tok in (1, 7, 10_000):
        trainer = Trainer(any_folder, replace(CFG, head_chunk_tok=head_chunk_tok), "cpu")
        trainer.accumulate_grads(flat(batch()))
        found.append(grads(trainer))
    assert_close(found[0], found[2])
    assert_close(found[1], found[2])


def test_gradient_checkpointing_computes_each_layer_twice_and_changes_no_gradient(any_folder):
    found, n_calls = [], []
    for on in (False, True):
        trainer, calls = Trainer(any_folder, replace(CFG, micro_tok=60, gradient_checkpointing=on), "cpu"), []
        for layer in trainer.layers:
            layer.mlp.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(module))
        trainer.accumulate_grads(flat(batch()))
        found.append(grads(trainer))
        n_calls.append(len(calls))
    assert len(trainer.layers) == 2 and n_calls[1] == 2 * n_calls[0] > 0
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_gradient_checkpointing_keeps_less_for_the_backward_pass(any_folder):
    kept = []
    for on in (False, True):
        trainer, n_bytes = Trainer(any_folder, replace(CFG, gradient_checkpointing=on), "cpu"), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=n_bytes: n.append(t.nbytes) or t, lambda t: t):
            trainer.sum_token_losses(flat(batch()))
        kept.append(sum(n_bytes))
    assert kept[1] < kept[0] / 2


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, num_hidden_layers=1, logits_scaling=2.0)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GraniteForCausalLM changes its logits"):
        Trainer(tmp_path, CFG, "cpu")


@pytest.mark.parametrize("micro_tok", [1, 10, 33, 64, 1_000])
def test_micro_batches_hold_each_sequence_once_within_the_budget(micro_tok):
    sequences = flat(batch(seed=3, n=40))
    micro_batches = split_by_length(sequences, micro_tok)
    assert sorted(s.ids for m in micro_batches for s in m) == sorted(s.ids for s in sequences)
    for m in micro_batches:
        assert len(m) == 1 or len(m) * max(len(s.ids) for s in m) <= micro_tok


# --- the step ---


def test_one_step_is_adamw_on_the_naive_gradient(folder):
    trajectories = batch()
    trainer = Trainer(folder, replace(CFG, micro_tok=40, max_grad_norm=0.05), "cpu")
    stats = trainer.step(trajectories, (0,))
    loss, gradient = naive(folder, flat(trajectories))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, p in model.named_parameters():  # first step of AdamW: m / sqrt(v) with both bias corrections = g / |g|
        g = gradient[name] * 0.05 / (norm + 1e-6)
        expected = p * (1 - CFG.lr * CFG.weight_decay) - CFG.lr * g / (g.abs() + 1e-8)
        moved = trainer.model.get_parameter(name)
        sure = g.abs() > 1e-6  # elsewhere the sign of a rounding error decides
        assert sure.any() and (moved - expected)[sure].abs().max() < 1e-5, name
        moments = trainer.optimizer.state[moved]  # they show clipping and betas, to which the first step is blind
        assert (moments["exp_avg"] - (1 - CFG.beta1) * g).abs().max() < 1e-6, name
        assert torch.allclose(moments["exp_avg_sq"], (1 - CFG.beta2) * g.square(), rtol=1e-2, atol=1e-12), name
    assert stats.loss == pytest.approx(loss, abs=1e-5) and stats.grad_norm == pytest.approx(norm, rel=1e-4)


def test_stats_and_minibatches(folder):
    trajectories = batch(n=9)
    trainer = Trainer(folder, replace(CFG, minibatch=4, micro_tok=60), "cpu")
    stats = trainer.step(trajectories, (0, 1))
    sequences = flat(trajectories)
    assert (stats.n_updates, stats.n_trajectories, stats.n_seq) == (3, 9, 10)  # 4 + 4 + 1
    assert stats.n_supervised_tok == sum(sum(s.mask) for s in sequences)
    assert stats.n_tok == sum(len(s.ids) for s in sequences)
    assert 0 < stats.padding_frac < 0.5
    assert trainer.version == 1  # weight steps, not optimiser steps
    assert all(state["step"] == 3 for state in trainer.optimizer.state.values())
    assert trainer.step(trajectories, (0, 2)).loss < stats.loss


def test_padding_frac(folder):
    trainer = Trainer(folder, CFG, "cpu")
    rng = random.Random(0)
    assert trainer.step([[row(rng, 5, 5)], [row(rng, 1, 1)]], (0,)).padding_frac == pytest.approx(1 - 12 / 20)


def test_nothing_accepted_changes_nothing(folder):
    trainer, twin = (Trainer(folder, CFG, "cpu") for _ in range(2))
    for t in (trainer, twin):
        t.step(batch(), (0,))
    stats = trainer.step([], (1,))
    assert equal_state(trainer, twin)
    assert (stats.n_updates, stats.n_trajectories, stats.n_supervised_tok, stats.loss) == (0, 0, 0, None)
    for t in (trainer, twin):  # nor does the optimiser remember the empty step
        t.step(batch(1), (2,))
    assert equal_state(trainer, twin)


def test_same_seed_is_bit_equal_and_the_seed_decides_the_minibatches(folder):
    cfg = replace(CFG, minibatch=4)
    runs = [Trainer(folder, cfg, "cpu") for _ in range(3)]
    for trainer, seed in zip(runs, [(7, 1), (7, 1), (7, 2)], strict=True):
        torch.manual_seed(hash(trainer) % 2**31)  # no running generator has a say
        random.seed(hash(trainer))
        trainer.step(batch(n=12), seed)
    assert equal_state(runs[0], runs[1])
    assert runs[0].checksum() != runs[2].checksum()


def test_within_a_minibatch_the_given_order_has_no_weight(folder):
    found = []
    for trajectories in (batch(), batch()[::-1]):
        trainer = Trainer(folder, replace(CFG, micro_tok=50), "cpu")
        trainer.accumulate_grads(flat(trajectories))
        found.append(grads(trainer))
    assert_close(found[0], found[1])


def test_lr_of_the_paper_moves_fp32_masters_and_not_bf16_weights(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)  # a bf16 checkpoint
    trainer = Trainer(tmp_path, replace(CFG, lr=1e-7, autocast_bf16=True, max_grad_norm=1.0), "cpu")
    before = {name: w.clone() for name, w in trainer.weights()}
    assert {w.dtype for w in before.values()} == {torch.float32}
    assert trainer.step(batch(), (0,)).n_updates == 1
    trainer.step(batch(), (1,))
    for name, w in trainer.weights():
        exp_avg = trainer.optimizer.state[trainer.model.get_parameter(name)]["exp_avg"]
        can_move = (before[name].abs() > 1e-3) & (before[name].abs() < 2) & (exp_avg.abs() > 1e-7)  # not: unused words
        assert can_move.any()
        assert (w != before[name])[can_move].float().mean() > 0.99, name
        # all that a bf16 trainer would keep of it
        assert torch.equal(w.bfloat16()[can_move], before[name].bfloat16()[can_move]), name


def test_autocast_keeps_gradients_in_fp32_and_near_the_exact_ones(folder):
    trainer = Trainer(folder, replace(CFG, autocast_bf16=True), "cpu")
    trainer.accumulate_grads(flat(batch()))
    exact = naive(folder, flat(batch()))[1]
    assert {g.dtype for g in grads(trainer).values()} == {torch.float32}
    error = torch.cat([(g - exact[name]).flatten() for name, g in grads(trainer).items()]).norm()
    size = torch.cat([g.flatten() for g in exact.values()]).norm()
    assert 0 < error < 0.05 * size


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        ([Row((1, 2, 3), (False, False, False))], "none of them supervised"),
        ([Row((1, 2, 3), (False, True))], "3 ids has a mask of 2"),
        ([Row((1, 2, 3), (True, True, True))], "first token"),
        ([Row((1,) * 65, (False,) + (True,) * 64)], "65 tokens, over 64"),
        ([Row((1, VOCAB), (False, True))], "vocabulary of 101"),
        ([], "without a sequence"),
    ],
)
def test_what_cannot_be_trained_is_an_error_before_any_update(folder, trajectory, message):
    trainer, twin = (Trainer(folder, replace(CFG, minibatch=1, micro_tok=64), "cpu") for _ in range(2))
    with pytest.raises(ValueError, match=message):
        trainer.step([[row(random.Random(0), 2, 2)], trajectory], (0,))
    assert equal_state(trainer, twin)


def test_the_length_limit_of_the_model_holds_too(folder):
    trainer = Trainer(folder, replace(CFG, micro_tok=10_000), "cpu")
    trainer.step([[row(random.Random(0), 200, 56)]], (0,))
    with pytest.raises(ValueError, match="257 tokens, over 256"):
        trainer.step([[row(random.Random(0), 200, 57)]], (1,))


def test_a_gradient_that_is_not_finite_stops_the_run(folder):
    trainer = Trainer(folder, CFG, "cpu")
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[3] = float("inf")
    before = trainer.checksum()
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.step([[Row((3, 4), (False, True))]], (0,))
    assert trainer.checksum() == before


def test_config_is_checked():
    with pytest.raises(ValueError, match="micro_tok is 0"):
        replace(CFG, micro_tok=0)


# --- weights and checkpoints ---


def test_weights_are_the_checkpoint_with_tied_tensors_once(any_folder, tmp_path):
    # transformers stores Qwen3.5's text model under the prefix of its vision-language class
    stored = load_file(any_folder / "model.safetensors")
    weights = dict(Trainer(any_folder, CFG, "cpu").weights())
    assert len(weights) == len(stored) and not any("lm_head" in name for name in weights)
    for name, tensor in stored.items():
        assert torch.equal(weights[name.replace("model.language_model.", "model.")], tensor)
    torch.manual_seed(0)
    qwen3(tied=False).save_pretrained(tmp_path)
    assert "lm_head.weight" in dict(Trainer(tmp_path, CFG, "cpu").weights())


def test_checksum_sees_names_values_and_dtypes_but_no_order():
    named = [("a", torch.arange(4.0)), ("b", torch.ones(2, 2))]
    same = weights_checksum(named)
    assert weights_checksum(reversed(named)) == same
    changed = [
        [("a", torch.arange(4.0)), ("c", torch.ones(2, 2))],
        [("a", torch.arange(4.0)), ("b", torch.ones(4))],
        [("a", torch.arange(4.0)), ("b", torch.tensor([[1, 1], [1, 1.0000001]]))],
        [("a", torch.arange(4.0)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))],
        [("a", torch.arange(4.0))],
    ]
    assert len({same, *map(weights_checksum, changed)}) == 6


def test_a_step_after_load_is_the_step_without(any_folder, tmp_path, tokenizer):
    cfg = replace(CFG, minibatch=4, micro_tok=64)
    trainer = Trainer(any_folder, cfg, "cpu")
    trainer.step(batch(), (0,))
    trainer.save(tmp_path / "step_000001", tokenizer)
    resumed = Trainer(any_folder, cfg, "cpu")
    resumed.step(batch(5), (9,))  # another history, all of which has to go
    resumed.load(tmp_path / "step_000001")
    assert equal_state(trainer, resumed)
    assert trainer.step(batch(1), (1,)) == resumed.step(batch(1), (1,))
    assert equal_state(trainer, resumed) and resumed.version == 2


def test_a_checkpoint_is_an_hf_folder_in_fp32_and_can_be_saved_before_any_step(folder, tmp_path, tokenizer):
    trainer = Trainer(folder, CFG, "cpu")
    trainer.save(tmp_path / "s", tokenizer)
    assert {t.dtype for t in load_file(tmp_path / "s" / "model.safetensors").values()} == {torch.float32}
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "s")("w7 w8").input_ids == [7, 8]
    assert Trainer(tmp_path / "s", CFG, "cpu").checksum() == trainer.checksum()
    resumed = Trainer(folder, CFG, "cpu")
    resumed.step(batch(), (0,))
    resumed.load(tmp_path / "s")
    assert equal_state(trainer, resumed)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer.safetensors", "config.json", "tokenizer.json", "trainer.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_named(folder, tmp_path, tokenizer, name, damage):
    trainer, twin = (Trainer(folder, CFG, "cpu") for _ in range(2))
    trainer.step(batch(), (0,))
    trainer.save(tmp_path / "s", tokenizer)
    path = tmp_path / "s" / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        if damage == "flip":
            content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-1])
    loader = Trainer(folder, CFG, "cpu")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        loader.load(tmp_path / "s")
    assert equal_state(loader, twin)


def test_a_changed_version_in_the_marker_is_found(folder, tmp_path, tokenizer):
    Trainer(folder, CFG, "cpu").save(tmp_path / "s", tokenizer)
    marker = tmp_path / "s" / "trainer.json"
    marker.write_text(marker.read_text().replace('"version": 0', '"version": 1'))
    with pytest.raises(CheckpointError, match="trainer.json"):
        Trainer(folder, CFG, "cpu").load(tmp_path / "s")


def test_another_configuration_is_refused_by_name(folder, tmp_path, tokenizer):
    Trainer(folder, CFG, "cpu").save(tmp_path / "s", tokenizer)
    with pytest.raises(CheckpointError, match="other values of beta2, lr"):
        Trainer(folder, replace(CFG, lr=2e-3, beta2=0.95, gradient_checkpointing=True), "cpu").load(tmp_path / "s")
    Trainer(folder, replace(CFG, gradient_checkpointing=True), "cpu").load(tmp_path / "s")


def test_a_failed_save_leaves_the_old_checkpoint_and_the_next_save_works(folder, tmp_path, tokenizer, monkeypatch):
    trainer = Trainer(folder, CFG, "cpu")
    trainer.save(tmp_path / "s", tokenizer)
    old = trainer.checksum()
    trainer.step(batch(), (0,))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rft.save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(tmp_path / "s", tokenizer)
    reader = Trainer(folder, CFG, "cpu")
    reader.load(tmp_path / "s")
    assert reader.checksum() == old
    trainer.save(tmp_path / "s", tokenizer)
    reader.load(tmp_path / "s")
    assert equal_state(reader, trainer)


def test_a_base_model_with_a_missing_weight_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.norm.weight"):
        Trainer(tmp_path, CFG, "cpu")
    with pytest.raises(ValueError, match="no such folder"):
        Trainer(tmp_path / "nowhere", CFG, "cpu")
