"""The transformers engine: its batch, its cache and its sampling rules. The contract itself: test_engines.py."""

import random

import pytest
import torch

from engine import ModelError, SamplingParams, Completion, load_model, untied_weights, weights_checksum
from transformers_engine import TransformersEngine, sample_tokens
from config import ROOT

MODEL = str(ROOT / "embedded" / "model")


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(MODEL, n_rows=8, max_len=256)


@pytest.fixture(scope="module")
def reference():
    return load_model(MODEL, torch.float32).eval()


def drain(engine) -> dict:
    done: dict[object, Completion] = {}
    while not engine.idle:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def random_prompts(n: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 900) for _ in range(rng.randrange(2, longest))] for _ in range(n)]


@pytest.mark.parametrize("length", [2, 255, 256, 257, 300])
def test_equal_prompts_that_fill_the_cache(length):
    """Copies of a row at every relation of a prompt's length to the width of the cache (256 columns at first)."""
    engine = TransformersEngine(MODEL, n_rows=4, max_len=512)
    prompt = (random_prompts(1, 60)[0] * 150)[:length]
    for i in range(4):
        engine.submit(i, prompt, SamplingParams(max_tokens=4, seed=7, temperature=1.0))
    done = drain(engine)
    assert len({tuple(done[i].ids) for i in range(4)}) == 1 and len(done[0].ids) >= 1


def test_logits_of_a_row_do_not_depend_on_its_batch(engine, reference):
    """Row alone = row in a batch of other lengths = the bare model, to rounding."""
    prompts = random_prompts(6)
    engine.reset()
    rows, counts = list(range(6)), torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(6, int(counts.max()), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, :len(prompt)] = torch.tensor(prompt)
    with torch.no_grad():
        together = engine._forward(rows, ids, torch.zeros(6, dtype=torch.long), counts, in_place=False)
        for i, prompt in enumerate(prompts):
            bare = reference(torch.tensor([prompt])).logits[0, -1]
            assert torch.allclose(together[i], bare, atol=2e-5)


def test_samples_are_a_function_of_prompt_and_seed(engine):
    """The same requests in another order, beside other rows, sample the same ids; other seeds sample others."""
    prompts = random_prompts(12)

    def sample(order, offset=0):
        engine.reset()
        for i in order:
            engine.submit(i, prompts[i], SamplingParams(max_tokens=12, seed=1000 + i + offset))
        return {i: completion.ids for i, completion in drain(engine).items()}

    first = sample(range(12))
    assert first == sample(reversed(range(12)))
    other = sample(range(12), offset=500)
    assert sum(first[i] != other[i] for i in range(12)) >= 6
    engine.reset()
    for i in range(8):                                           # a group: one prompt, eight seeds, computed once
        engine.submit(i, prompts[0], SamplingParams(max_tokens=12, seed=i))
    assert len({tuple(completion.ids) for completion in drain(engine).values()}) > 1


def test_a_continued_row_equals_a_fresh_one(engine, monkeypatch):
    """`after` saves the computation of the shared prefix and changes nothing else; a wrong hint is harmless."""
    prompt, computed, forward = random_prompts(1)[0], [], engine._forward

    def counting_forward(rows, ids, starts, counts, in_place):
        computed.append(int(counts.sum()))
        return forward(rows, ids, starts, counts, in_place)

    monkeypatch.setattr(engine, "_forward", counting_forward)

    def say(id, prompt_ids, after=None):
        computed.clear()
        engine.submit(id, prompt_ids, SamplingParams(max_tokens=9, seed=2), after=after)
        return drain(engine)[id].ids

    engine.reset()
    longer = prompt + say("a", prompt) + [5, 6, 7]
    continued = say("b", longer, after="a")
    assert computed[0] == 4                                      # the last sampled token and the three new ones
    other = say("c", [9] + longer, after="b")                    # no extension of b
    assert computed[0] == len(longer) + 1
    engine.reset()
    assert say("b", longer) == continued and computed[0] == len(longer)
    assert say("c", [9] + longer) == other


def test_sleep_forgets_the_cache_and_wake_serves_as_before(engine):
    engine.reset()
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=8, seed=4))
    before = drain(engine)
    engine.sleep()
    assert not engine.cache.keys and not engine.kept
    engine.wake()
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=8, seed=4))
    assert drain(engine) == before


def test_new_weights_leave_no_old_prefix(engine):
    """After load_weights a continued conversation equals a fresh one under the new weights."""
    engine.reset()
    prompt = random_prompts(1)[0] * 4
    engine.submit("a", prompt, SamplingParams(max_tokens=4, seed=1))
    longer = prompt + drain(engine)["a"].ids + [5]
    old = {name: tensor.clone() for name, tensor in untied_weights(engine.model).items()}
    new = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
           for name, tensor in old.items()}
    try:
        engine.load_weights(new.items(), 1)
        assert engine.version == 1 and engine.checksum() == weights_checksum(new.items()) != weights_checksum(old.items())
        engine.submit("b", longer, SamplingParams(max_tokens=8, seed=2), after="a")
        continued = drain(engine)["b"].ids
        engine.reset()
        engine.submit("b", longer, SamplingParams(max_tokens=8, seed=2))
        assert drain(engine)["b"].ids == continued
        with pytest.raises(ModelError, match="do not match"):
            engine.load_weights([("model.unknown", torch.zeros(1)), *old.items()], 2)
        with pytest.raises(ModelError, match="do not match"):
            engine.load_weights(list(old.items())[1:], 2)
        assert engine.checksum() == weights_checksum(new.items())
    finally:
        engine.load_weights(old.items(), 0)


def test_sampling_rules():
    """Frequencies follow the softmax of the top k at the temperature; top-p drops the tail; greedy takes the largest."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(40_000, 1)
    draws = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    for temperature, k in ((1.0, 0), (0.5, 0), (1.0, 2)):
        expected = (logits[0, :k or 4] / temperature).softmax(-1)
        got = sample_tokens(logits, draws, temperature, k, 1.0).bincount(minlength=4) / 40_000
        assert torch.allclose(got[:len(expected)], expected, atol=0.01) and got[len(expected):].sum() == 0
    assert set(sample_tokens(logits, draws, 1.0, 0, 0.6).tolist()) == {0}
    assert set(sample_tokens(logits, draws, 1.0, 0, 0.7).tolist()) == {0, 1}
    assert set(sample_tokens(logits, draws, 0, 20, 1.0).tolist()) == {0}


def test_sliding_window_model(tmp_path):
    """A model with sliding layers, beyond its window."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=256, eos_token_id=2, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    engine, bare = TransformersEngine(str(tmp_path), n_rows=4), load_model(str(tmp_path), torch.float32).eval()
    prompts = random_prompts(6, longest=30)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, SamplingParams(max_tokens=15, seed=i, temperature=0))
    done = drain(engine)
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        with torch.no_grad():
            for _ in done[i].ids:
                ids.append(int(bare(torch.tensor([ids])).logits[0, -1].argmax()))
        assert done[i].ids == ids[len(prompt):]


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "empty", "corrupt"])
def test_a_bad_model_is_named(tmp_path, name):
    if name in ("empty", "corrupt"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "corrupt":
            for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes((ROOT / "embedded" / "model" / file).read_bytes())
            (folder / "model.safetensors").write_bytes((ROOT / "embedded/model/model.safetensors").read_bytes()[:100_000])
        name = str(folder)
    with pytest.raises(ModelError, match="--model"):
        load_model(name, torch.float32)
