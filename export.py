"""A run's model and harness as an ordinary Hugging Face folder, which from_pretrained and vLLM load.

    OUT/model.safetensors, config.json      in bf16, of the class of the model that the run began with
    OUT/tokenizer..., generation_config.json
    OUT/harness.py                          the harness that the weights were trained with, or found for
    OUT/README.md                           a model card with the run's own numbers

A vision-language model (Qwen3.5) is trained as its text model; here the trained weights go back into the whole one.

Differs from the paper: nothing; the paper does not say how its models are kept. bf16 has 8 bits of mantissa, so at the
paper's learning rate most of an update is lost in it: the card says how much of it is left (--dtype float32 keeps all).

    bash run.sh export runs/math-whale-seed0 --out my-model
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from engine import Model, load_model, load_tokenizer, locate, naming_the_model, untied_weights
from report import as_usage_error, read_run
from rft import read_checkpoint_record
from files import UsageError, in_order, naming, read_sealed, read_text, sha256, write_atomically
from rundir import best_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_run(run: Path, out: Path, which: str, dtype: str, trust_remote_code: bool = False) -> dict:
    """Writes OUT from the run's `which` ("final" or "best") evaluation -> what the command shows. UsageError, before
    anything is written, if the run or OUT is not fit for it. The run may be a stranger's: that it says of itself that
    code which came with its model was trusted is no reason to run it here."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists and is not empty")
    with as_usage_error(run):
        config, state, _ = read_run(run)
        point = best_of(state["evals"]) if which == "best" else state["evals"][-1]
        step, summary = point["weight_step"], read_sealed(run / "summary.json")
        checkpoint = run / "weights" / f"step_{step:06d}" if step else None
        harness = harness_of(run, config, point["harness_sha"])
    if checkpoint:
        read_checkpoint_record(checkpoint)
    aside = out.with_name(f"{out.name}.{os.getpid()}.tmp")               # a name that nobody else's folder has
    base = Model(config["model"], config["revision"], trust_remote_code)
    try:
        changed = export_model(checkpoint, base, aside, DTYPES[dtype])
        write_atomically(aside / "harness.py", harness)
        write_atomically(aside / "README.md", model_card(config, summary, point, which, dtype, changed))
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return {"out": str(out), "weight_step": step, "mean": point["mean"], "changed_frac": changed}


def harness_of(run: Path, config: dict, sha: str) -> str:
    """The source of the harness of an evaluation, by its sha256."""
    for path in [run / "final_harness.py", *in_order(run.glob("harness/*/*/harness.py")),
                 *([Path(config["harness"])] if config["harness"] else [])]:
        if path.exists() and sha256(source := read_text(path)) == sha:
            return source
    raise UsageError(f"{run}: the harness of that evaluation is not among the run's files")


def export_model(checkpoint: Path | None, base: str | Model, out: Path, dtype: torch.dtype) -> float:
    """Writes the checkpoint's weights (None: the base model's own) as a model of the base's class -> the share of
    weights that differ from the base's after rounding."""
    base = base if isinstance(base, Model) else Model(base)
    last = replace(base, name=str(checkpoint)) if checkpoint else base
    trained, before = load_model(last, dtype), load_model(base, dtype)
    old = untied_weights(before)
    new = untied_weights(trained)
    if new.keys() != old.keys():
        raise UsageError(f"{checkpoint}: its weights are not those of a {type(before).__name__}, as {base} is")
    changed = sum((new[name] != old[name]).sum().item() for name in new) / sum(t.numel() for t in new.values())
    with naming_the_model(base):
        where = locate(base)
        whole_config = trained.config if "gguf_file" in where else AutoConfig.from_pretrained(**where)
        model = trained
        if whole_config.get_text_config() is not whole_config:          # a vision-language model
            model = AutoModelForImageTextToText.from_pretrained(**where, dtype=dtype, use_safetensors=True)
            put_back(trained, model)
    tokenizer = load_tokenizer(last)
    with naming(out, Exception, SafetensorError):           # tokenizers raises no class of its own for a full disk
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    try:
        generation = GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"],
                                                      revision=where.get("revision", "main"))
    except OSError:
        return changed                                                  # the base has none; save_pretrained wrote ours
    with naming(out):
        generation.save_pretrained(out)
    return changed


def put_back(text: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Copies the text model's weights into the vision-language model. Every name must be found, each way."""
    decoder = whole.get_decoder()
    decoder.load_state_dict(text.get_decoder().state_dict())            # strict: no name more, no name less
    whole.get_output_embeddings().load_state_dict(text.get_output_embeddings().state_dict())


def model_card(config: dict, summary: dict, point: dict, which: str, dtype: str, changed: float) -> str:
    """Its numbers are those of the run's own files."""
    local = Path(config["model"]).exists()
    base = "/".join(Path(config["model"]).parts[-2:])
    lines = ["---", *([] if local else [f"base_model: {base}"]), "library_name: transformers",
             "pipeline_tag: text-generation", "tags: [whale, rejection-sampling-fine-tuning]", "---", "",
             f"# {base}, trained with WHALE on {config['domain']}", "",
             "Weights and harness were found together (WHALE, arXiv:2609.00196), so use them together: `harness.py` is",
             "the program around the model under which these numbers were measured.", "",
             f"- test mean@{config['n_eval']}: {point['mean']:.3f} (95 % interval {point['ci95'][0]:.3f} to "
             f"{point['ci95'][1]:.3f}), the run's {which} evaluation; the base model under h0 had "
             f"{summary['base_mean8']['mean']:.3f}",
             f"- {point['weight_step']} weight steps, {point['training_rollouts']:,} training rollouts; method "
             f"{config['method']}, seed {config['seed']}",
             f"- weights in {dtype}; {100 * changed:.2f} % of them differ from the base model's after rounding",
             f"- verifier: {summary['verifier']}; version of the code: {summary['version']}", "",
             "Harnesses that were accepted:" if summary["accepted"] else "The harness is h0.", "",
             *(f"- cycle {a['cycle']}: {a['name']} ({a['score']:.3f} on D_harness): {a['hypothesis']}"
               for a in summary["accepted"]), "",
             f"Sampling: temperature {config['temperature']}, top-k {config['top_k']}, top-p {config['top_p']};"
             f" {config['max_calls']} model calls and {config['max_assistant_tok']} sampled tokens a rollout at most.",
             "All settings:", "", "```json", json.dumps(config, indent=1), "```", ""]
    return "\n".join(lines)


def add_flags(parser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("--out", required=True, help="a folder that does not exist yet")
    parser.add_argument("--which", choices=("final", "best"), default="final", help="evaluation")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the run's model")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
