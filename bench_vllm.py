"""vLLM's side of `bash run.sh bench --engine vllm`: its own `generate`, one turn a line of input.

Reads its job as JSON from the first line of standard input: the model, LLM's settings, and rounds of calls, each a
prompt's ids, a number of tokens and a seed. For each further line it generates round after round, and prints one line.
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr            # what libraries print is no answer of ours
    llm = LLM(job["model"], generation_config="vllm", **job["settings"])
    rounds = [([{"prompt_token_ids": ids} for ids, _, _ in calls],
               [SamplingParams(max_tokens=n, seed=seed, ignore_eos=True, detokenize=False, **job["sampling"])
                for _, n, seed in calls]) for calls in job["rounds"]]
    print(json.dumps({"ready": True}), file=out, flush=True)
    for _ in sys.stdin:
        outputs = [output for prompts, params in rounds for output in llm.generate(prompts, params, use_tqdm=False)]
        print(json.dumps({"n_tok": sum(len(output.outputs[0].token_ids) for output in outputs)}), file=out, flush=True)


if __name__ == "__main__":
    main()
