"""Export: a run's model as an ordinary folder, whose numbers are the run's; Qwen3.5's text weights back in the whole model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import export
from config import ROOT
from engine import load_model
from rft import TrainConfig, Trainer
from rollout import Sequence
from small import SMALL, call, call_json, edit

MODEL = ROOT / "embedded" / "model"
LINEAR_ATTENTION = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)


def test_an_exported_agent_scores_what_the_run_says(finished, tmp_path):
    """Model and harness from OUT, the run's test tasks and seeds: the very number of the final evaluation."""
    code, output = call("export", finished, "--out", tmp_path / "agent", "--dtype", "float32")
    assert code == 0, output
    summary = json.loads((finished / "summary.json").read_text())
    result = call_json("eval", "math", *SMALL, "--model", tmp_path / "agent", "--harness", tmp_path / "agent/harness.py", "--n", 1,
                       "--out", tmp_path)
    assert result["mean"] == pytest.approx(summary["final_mean8"]["mean"], abs=1e-4)
    assert f"{result['mean']:.3f}" in (tmp_path / "agent/README.md").read_text()


def test_in_bf16_it_is_an_ordinary_folder(finished, tmp_path):
    (tmp_path / "agent.tmp").mkdir()                                # somebody's own
    code, output = call("export", finished, "--out", tmp_path / "agent")
    assert code == 0, output
    ours = load_file(tmp_path / "agent/model.safetensors")
    checkpoint = load_file(finished / "weights/step_000002/model.safetensors")
    base = load_file(MODEL / "model.safetensors")
    assert ours.keys() == checkpoint.keys() == base.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, checkpoint[name].to(torch.bfloat16))
    n_changed = sum((ours[name] != base[name].to(torch.bfloat16)).sum().item() for name in ours)
    share = n_changed / sum(tensor.numel() for tensor in ours.values())
    assert 0 < share < 1 and f"{100 * share:.2f} % of them differ" in (tmp_path / "agent/README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "agent")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(MODEL).chat_template
    assert (tmp_path / "agent/generation_config.json").exists() and list(tmp_path.glob("*.tmp")) == [tmp_path / "agent.tmp"]
    assert (tmp_path / "agent/harness.py").read_text() == (finished / "final_harness.py").read_text()


def test_the_best_is_another_step_with_its_own_harness(finished, tmp_path):
    """The evaluation after the weight phase, made the best: its weights, and h0, under which it was measured."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    state = json.loads((folder / "state.json").read_text())
    state["evals"][1]["mean"] = 1.0
    edit(folder / "state.json", evals=state["evals"])
    code, output = call("export", folder, "--out", tmp_path / "agent", "--which", "best")
    assert code == 0 and "1.000" in (tmp_path / "agent/README.md").read_text(), output
    assert (tmp_path / "agent/harness.py").read_text() == (ROOT / "harnesses/h0_math.py").read_text()


def test_a_run_without_weight_steps_exports_the_base_model(tmp_path):
    assert call("math", *SMALL, "--method", "harness", "--rollouts", 48, "--out", tmp_path, "--name", "h")[0] == 0
    result = call("export", tmp_path / "h", "--out", tmp_path / "agent", "--dtype", "float32")
    assert result[0] == 0 and "changed_frac: 0.0" in result[1]


@pytest.mark.parametrize("what, words", [("no run", "is no run directory"), ("out is full", "not empty"), ("out is a file", "not empty"),
                                         ("pruned", "no complete checkpoint"), ("damaged", "state.json is damaged"), ("no harness", "harness of that")])
def test_bad_requests(finished, tmp_path, what, words):
    folder, out = Path(shutil.copytree(finished, tmp_path / "run")), tmp_path / "agent"
    match what:
        case "no run":
            folder = tmp_path
        case "out is full":
            (out / "precious").mkdir(parents=True)
        case "out is a file":
            out.write_text("precious")
        case "pruned":
            shutil.rmtree(folder / "weights/step_000002")
        case "damaged":
            (folder / "state.json").write_text("{")
        case "no harness":
            for path in folder.rglob("*harness.py"):
                path.write_text("")
    code, output = call("export", folder, "--out", out)
    assert code == 2 and words in output and "Traceback" not in output, output
    assert what.startswith("out") or not out.exists()


# ---- Qwen3.5: a vision-language checkpoint, trained as its text model ----------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def qwen(request, tmp_path_factory) -> Path:
    return tiny_vision_language_model(tmp_path_factory.mktemp("qwen"), request.param)


def tiny_vision_language_model(folder: Path, tied: bool, head_dim: int = 8, linear_head_dim: int = 8) -> Path:
    """Random, of Qwen3.5's architecture, linear attention and all; with the embedded model's tokenizer."""
    text = dict(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                head_dim=head_dim, **LINEAR_ATTENTION | dict(linear_key_head_dim=linear_head_dim, linear_value_head_dim=linear_head_dim),
                max_position_embeddings=256, tie_word_embeddings=tied)
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=4, num_position_embeddings=16)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=1000, video_token_id=1001, vision_start_token_id=1002,
        vision_end_token_id=1003, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def test_qwen3_5_is_trained_and_goes_back_into_the_whole_model(qwen, tmp_path):
    """Load the vision-language folder, one weight step, save, resume, export: the full class loads it, with the text
    weights of the trainer and the vision weights untouched."""
    cfg = TrainConfig(lr=1e-2, minibatch=2, micro_tok=512, max_grad_norm=1.0, weight_decay=0.01, beta1=0.9, beta2=0.999, head_chunk_tok=8,
                      autocast_bf16=False, gradient_checkpointing=False)
    trainer = Trainer(qwen, cfg, "cpu")
    rows = [[Sequence(tuple(range(5, 5 + n)), (False,) * 4 + (True,) * (n - 4))] for n in (12, 30)]
    first = trainer.step(rows, 0).loss
    trainer.save(tmp_path / "step_000001", AutoTokenizer.from_pretrained(MODEL))
    again = Trainer(qwen, cfg, "cpu")
    again.load(tmp_path / "step_000001")
    assert again.checksum() == trainer.checksum() and again.step(rows, 1).loss == trainer.step(rows, 1).loss < first
    trainer.load(tmp_path / "step_000001")
    changed = export.export_model(tmp_path / "step_000001", str(qwen), tmp_path / "agent", torch.float32)
    assert 0.5 < changed <= 1
    whole, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "agent", dtype=torch.float32, output_loading_info=True)
    assert type(whole).__name__ == "Qwen3_5ForConditionalGeneration" and not any(report.values())
    before, after = load_file(qwen / "model.safetensors"), load_file(tmp_path / "agent/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == ("visual" in name), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(whole.eval()(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
    text = load_model(tmp_path / "agent")                                # and it can be the base of the next run
    assert all(torch.equal(tensor, dict(trainer.weights())[name]) for name, tensor in export.untied_weights(text).items())


def test_a_checkpoint_of_another_architecture_is_refused(qwen, finished, tmp_path):
    with pytest.raises(export.UsageError, match="its weights are not those of"):
        export.export_model(finished / "weights/step_000002", str(qwen), tmp_path / "agent", torch.float32)


def test_no_name_may_be_missing_when_weights_go_back(qwen):
    text, whole = load_model(qwen), AutoModelForImageTextToText.from_pretrained(qwen, dtype=torch.float32)
    del text.get_decoder().norm
    with pytest.raises(RuntimeError, match="norm.weight"):
        export.put_back(text, whole)
