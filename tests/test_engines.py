"""The Engine contract, the same tests for every engine: transformers, vLLM in a process, vLLM servers.

vLLM's need an environment that has it: `bash run.sh test-vllm`.
"""

import random

import pytest
import torch

from engine import Completion, ModelError, SamplingParams, load_model, untied_weights
from server_engine import ServerEngine
from servers import MODEL, vllm_servers
from transformers_engine import TransformersEngine
from vllm_engine import VllmEngine


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.needs_vllm),
                                        pytest.param("server", marks=pytest.mark.needs_vllm)])
def engine(request, tmp_path_factory):
    if request.param == "transformers":
        yield TransformersEngine(MODEL, n_rows=8, max_len=256)
    elif request.param == "vllm":
        engine = VllmEngine(MODEL, n_rows=8, max_len=256, device="cpu")
        yield engine
        engine.close()
    else:
        folder = tmp_path_factory.mktemp("servers")
        with vllm_servers(folder) as (urls, _):
            engine = ServerEngine(MODEL, ",".join(urls), folder / "share", n_rows=8, max_len=256)
            assert engine.takes_weights and engine.dtype == torch.float32
            yield engine
            engine.close()


@pytest.fixture(scope="module")
def reference():
    return load_model(MODEL)


@pytest.fixture(autouse=True)
def fresh(engine):
    engine.reset()


def drain(engine) -> dict[object, Completion]:
    done: dict[object, Completion] = {}
    while not engine.idle:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def random_prompts(n: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 900) for _ in range(rng.randrange(2, longest))] for _ in range(n)]


def greedy(model, prompt: list[int], n: int, stop_ids: set[int]) -> list[int]:
    """What the bare model says, a token at a time, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + n and (len(ids) == len(prompt) or ids[-1] not in stop_ids):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt):]


def perturbed(model, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in untied_weights(model).items()}


def test_greedy_is_the_bare_model(engine, reference):
    """20 prompts, more than run at once, of many lengths; some are asked for while others run."""
    prompts = random_prompts(20)
    for i in range(10):
        engine.submit(i, prompts[i], SamplingParams(max_tokens=5 + i, seed=i, temperature=0))
    done = {completion.id: completion for completion in engine.step()}
    for i in range(10, 20):
        engine.submit(i, prompts[i], SamplingParams(max_tokens=5 + i, seed=i, temperature=0))
    done |= drain(engine)
    for i, prompt in enumerate(prompts):
        assert done[i].ids == greedy(reference, prompt, 5 + i, engine.stop_ids), i
        assert done[i].finish == ("stop" if done[i].ids[-1] in engine.stop_ids else "length")


def test_seeds_decide(engine):
    """Eight seeds, one prompt: different replies; the same seeds again: the same replies; 64-bit seeds are taken."""
    prompt = random_prompts(1)[0]

    def sample(offset: int) -> list[tuple[int, ...]]:
        engine.reset()
        for i in range(8):
            engine.submit(i, prompt, SamplingParams(max_tokens=12, seed=(1 << 64) - 9 + i - offset, top_k=0))
        return [tuple(completion.ids) for _, completion in sorted(drain(engine).items())]

    first = sample(0)
    assert len(set(first)) >= 6
    assert sum(a == b for a, b in zip(first, sample(0), strict=True)) >= 7          # vLLM's batches round as they come
    assert sum(a == b for a, b in zip(first, sample(1000), strict=True)) <= 2


def test_sampling_parameters_are_ours(engine, reference):
    """Frequencies of a first token: the softmax of the 5 largest at temperature 0.7, whatever generation_config.json says."""
    prompt = engine.tokenizer("Tom has", add_special_tokens=False).input_ids
    n = 1500
    for i in range(n):
        engine.submit(i, prompt, SamplingParams(max_tokens=1, seed=i, temperature=0.7, top_k=5))
    counts = torch.zeros(reference.config.vocab_size)
    for completion in drain(engine).values():
        counts[completion.ids[0]] += 1
    with torch.no_grad():
        values, ids = reference(torch.tensor([prompt])).logits[0, -1].topk(5)
    expected = torch.zeros_like(counts)
    expected[ids] = (values / 0.7).softmax(-1)
    assert (counts / n - expected).abs().max() < 4 * (0.25 / n) ** 0.5


def test_a_prompt_that_is_too_long_ends_alone(engine):
    engine.submit("too long", [5] * 256, SamplingParams(max_tokens=3, seed=0))
    engine.submit("far too long", [5] * 100_000, SamplingParams(max_tokens=3, seed=0))
    engine.submit("context", [5] * 250, SamplingParams(max_tokens=100, seed=0, temperature=0))
    engine.submit("cut", [5, 6, 7], SamplingParams(max_tokens=3, seed=0))
    done = drain(engine)
    assert done["too long"] == Completion("too long", [], "too_long") and done["far too long"].finish == "too_long"
    assert 1 <= len(done["context"].ids) <= 6 and 1 <= len(done["cut"].ids) <= 3


def test_what_cannot_be_asked(engine):
    for prompt, n in (([], 3), ([5], 0)):
        with pytest.raises(ValueError, match="max_tokens"):
            engine.submit(0, prompt, SamplingParams(max_tokens=n, seed=0))
    assert engine.idle and engine.step() == []


def test_stop_strings(engine):
    """A stop string ends the completion with the token that completes it."""
    prompt = engine.tokenizer("Tom has 12 apples", add_special_tokens=False).input_ids
    engine.submit(0, prompt, SamplingParams(max_tokens=60, seed=3, temperature=0))
    text = engine.tokenizer.decode(drain(engine)[0].ids)
    stop = text[len(text) // 2:len(text) // 2 + 2]
    engine.submit(1, prompt, SamplingParams(max_tokens=60, seed=3, temperature=0, stop=(stop,)))
    done = drain(engine)[1]
    assert done.finish == "stop"
    assert stop in engine.tokenizer.decode(done.ids) and stop not in engine.tokenizer.decode(done.ids[:-1])


def test_sleep_and_wake(engine, reference):
    prompt = random_prompts(1)[0]
    engine.sleep()
    engine.wake()
    engine.submit(0, prompt, SamplingParams(max_tokens=8, seed=4, temperature=0))
    assert drain(engine)[0].ids == greedy(reference, prompt, 8, engine.stop_ids)


def test_new_weights_leave_no_old_prefix(engine, reference):
    """A prompt of 200 tokens (prefixes are cached by the block) is asked under old weights, then, longer, under new ones:
    the reply is the new model's. Then the old weights again, by a version that was there before and by a new one."""
    prompt = (random_prompts(1, 60)[0] * 100)[:200]
    engine.submit("a", prompt, SamplingParams(max_tokens=8, seed=1, temperature=0))
    longer = prompt + drain(engine)["a"].ids + [5]
    old, new = {name: t.clone() for name, t in untied_weights(reference).items()}, perturbed(reference, 0)
    changed = load_model(MODEL)
    changed.load_state_dict(new, strict=False)
    assert greedy(changed, longer, 10, engine.stop_ids) != greedy(reference, longer, 10, engine.stop_ids)
    try:
        for version, weights, model in ((1, new, changed), (2, old, reference), (1, new, changed), (1, new, changed)):
            engine.load_weights(weights.items(), version)
            assert engine.version == version
            engine.submit("b", longer, SamplingParams(max_tokens=10, seed=2, temperature=0), after="a")
            assert drain(engine)["b"].ids == greedy(model, longer, 10, engine.stop_ids), version
    finally:
        engine.load_weights(old.items(), 0)


def test_weights_that_do_not_match_are_refused(engine, reference):
    """A name more, a name less, another shape; the engine serves what it served."""
    old = dict(untied_weights(reference))
    name = "model.norm.weight"
    for wrong in ({**old, "model.unknown": torch.zeros(1)}, {n: t for n, t in old.items() if n != name},
                  {**old, name: old[name][:-1]}, {n.replace("model.", "model.language_model."): t for n, t in old.items()}):
        with pytest.raises(ModelError, match="do not match"):
            engine.load_weights(wrong.items(), 7)
    assert engine.version == 0
    prompt = random_prompts(1)[0]
    engine.submit(0, prompt, SamplingParams(max_tokens=8, seed=4, temperature=0))
    assert drain(engine)[0].ids == greedy(reference, prompt, 8, engine.stop_ids)


def test_weights_are_not_changed_under_a_request(engine, reference):
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=30, seed=1))
    with pytest.raises(RuntimeError, match="two policies"):
        engine.load_weights(untied_weights(reference).items(), 1)
    assert drain(engine)[0].ids and engine.version == 0


def test_reset_forgets_what_runs(engine, reference):
    for i in range(12):
        engine.submit(i, [5, 6, 7 + i], SamplingParams(max_tokens=100, seed=i))
    engine.step()
    engine.reset()
    assert engine.idle
    prompt = random_prompts(1)[0]
    engine.submit(0, prompt, SamplingParams(max_tokens=8, seed=4, temperature=0))
    assert drain(engine)[0].ids == greedy(reference, prompt, 8, engine.stop_ids)
