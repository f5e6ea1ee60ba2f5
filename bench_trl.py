"""TRL's side of `bash run.sh bench --only step`: GRPOTrainer as fast as it goes on a CPU, one step a line of input.

Runs under the Python of an environment of its own (bench.py makes it), so of this project it imports the verifier and
nothing else. Reads its job as JSON from the first line of standard input; then, for each further line, does one
optimiser step (sample, verify, train) and prints one line of JSON.

Chosen for speed: transformers' own generation, all samples of a step in one batch; one optimiser update on them, so
that no old log-probabilities have to be computed; no reference model (beta 0), no gradient checkpointing, no
bf16, no logging, no saving.
"""

import json
import os
import sys
import time

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from envs import MathEnv
from tasks import Task


def main() -> None:
    job = json.loads(sys.stdin.readline())
    env, counts = MathEnv(), {}

    def reward(completions, completion_ids, answer, **_) -> list[float]:
        counts["completion_tok"] = sum(map(len, completion_ids))
        counts["rollouts"] = len(completions)
        rewards = [env.verify(Task("", {}, gold, ""), reply[0]["content"]).reward
                   for reply, gold in zip(completions, answer, strict=True)]
        counts["reward"] = sum(rewards) / len(rewards)
        return rewards

    class TakingTurns(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if not sys.stdin.readline():
                os._exit(0)                             # whoever asked has what it wanted
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            print(json.dumps({"seconds": time.perf_counter() - self.started, **counts}), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr            # what libraries print is no answer of ours
    n = len(job["prompts"]) * job["group_size"]
    args = GRPOConfig(
        output_dir=job["out"], per_device_train_batch_size=job["micro_rows"],
        gradient_accumulation_steps=n // job["micro_rows"], num_generations=job["group_size"],
        max_completion_length=job["max_tok"], temperature=job["temperature"], top_k=job["top_k"], top_p=job["top_p"],
        learning_rate=job["lr"], lr_scheduler_type="constant", max_steps=1000, num_iterations=1, beta=0.0,
        loss_type="dapo", bf16=False, use_cpu=True, gradient_checkpointing=False, shuffle_dataset=False,
        optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False)
    rows = [{"prompt": [{"role": "user", "content": prompt}], "answer": answer} for prompt, answer in job["prompts"]]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"), args=args, reward_funcs=reward,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[TakingTurns()])
    print(json.dumps({"ready": True}), file=out, flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
