"""gpu-check at a size that a CPU does: every part runs and measures, and what cannot run is named."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config

import config
import gpu_check
from small import call
from test_export import LINEAR_ATTENTION

SHAPE = dict(vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=2048, tie_word_embeddings=True)


def small(tmp_path) -> config.Config:
    data = config.ROOT / "embedded" / "math"
    return replace(config.Config(domain="math", preset="tiny", **config.PRESETS["tiny"]), device="cpu", out=str(tmp_path), method="weight",
                   prompt_batch=4, group_size=4, rollouts=32, n_eval=1, max_assistant_tok=600, name="two-steps",
                   train=f"{data}/train.jsonl[:64]", harness_set=f"{data}/harness.jsonl[:4]", test=f"{data}/test.jsonl[:4]",
                   gradient_checkpointing=True)


def test_every_part_measures(tmp_path):
    found = gpu_check.check(small(tmp_path), Qwen3Config(**SHAPE), (8, 20), (4, 300))
    assert not found["left_out"] and found["matmul"]["tflops"] > 0
    rollouts, training, steps = found["rollouts"], found["training"], found["two_steps"]
    assert rollouts["n_tok"] == 8 * 20 and rollouts["weight_bytes"] == 2 * found["model"]["n_weights"] and 0 < rollouts["mfu"] < 1
    assert rollouts["same_after_load"]
    assert training["n_tok"] == 4 * 300 and training["loss"] > 1 and 0 < training["mfu"] < 1
    assert steps["weight_steps"] == 2 and steps["rollouts"] == 32 and steps["version"] == 2       # the coin accepted some, each time
    assert 32 * 20 < steps["sampled_tok"]["weight"] < 32 * 600                                    # replies end by themselves
    assert not list(tmp_path.iterdir())


def test_what_cannot_run_is_named(tmp_path):
    """Linear attention needs vLLM: the trainer runs, the two parts that sample say why they do not."""
    found = gpu_check.check(small(tmp_path), Qwen3_5TextConfig(**SHAPE, **LINEAR_ATTENTION), (8, 20), (4, 300))
    assert found["left_out"].keys() == {"rollouts", "two_steps"} and "--engine vllm" in found["left_out"]["rollouts"]
    assert found["training"]["tok_per_s"] > 0


def test_the_shape_is_that_of_the_paper():
    """1.88 billion weights in the text model, of which 0.51 in the embedding."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**gpu_check.QWEN3_5_2B))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.88e9, rel=0.01)
    assert model.model.config.layer_types.count("full_attention") == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    code, output = call("gpu-check", "--out", tmp_path / "x.json")
    assert code == 2 and "torch sees no GPU here" in output and not (tmp_path / "x.json").exists()
