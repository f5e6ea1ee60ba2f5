"""A domain of one's own, from nothing: an environment with a tool, an h0, a data file; then the whole loop on it."""

import json
from pathlib import Path

import pytest

import envs
from math_answer import last_box
from tasks import Row, Task, ToolUse, Verdict
from config import DOMAIN_PRESETS, PRESETS, Config
from whale import Run, train_whale

H0 = '''"""The number is looked up before the model is asked, once."""

from harness_api import chat, generate

SYSTEM_PROMPT = ""
USER_PROMPT = "{question}\\n\\nPut your final answer in \\\\boxed{{}}."
CALL = '<tool_call>\\n{"name": "python", "arguments": {"code": "print(look_up)"}}\\n</tool_call>'
MAX_CALLS = 1


def run(task):
    found = yield {"type": "look_up", "name": "apples"}
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    messages += [{"role": "assistant", "content": CALL}, {"role": "tool", "name": "look_up", "content": found}]
    for _ in range(MAX_CALLS):
        reply = yield generate(messages)
        messages.append(reply.message)
        if "boxed" in reply.content:
            return
        messages += chat("", "Put the final answer in \\\\boxed{}.")
'''


class LookUpEnv(envs.Env):
    """Numbers of things; the answer is what the tool says, in a box."""
    name = "look_up"
    h0 = Path("set by the test")
    tools = ("look_up",)

    def read(self, row: Row, stem: str) -> Task:
        return Task(row.text("id"), {"question": row.text("question")}, row.text("answer"), stem)

    def perfect_reply(self, task: Task) -> str:
        return rf"\boxed{{{task.answer}}}"

    def start(self, task: Task) -> tuple[object, dict[str, str]]:
        return task, task.fields

    def use_tools(self, uses: list[ToolUse], tokenizer) -> list[dict]:
        return [{"output": use.state.answer, "ok": True} for use in uses]

    def verify(self, task: Task, reply: str | None, state: object = None) -> Verdict:
        box = last_box(reply or "")
        return Verdict(float(box == task.answer), "the last box is right, or is not", box)


@pytest.fixture
def domain(tmp_path, monkeypatch) -> list[str]:
    """Registers it, as a line in envs.py would, and writes its files."""
    (tmp_path / "h0.py").write_text(H0)
    monkeypatch.setattr(LookUpEnv, "h0", tmp_path / "h0.py")
    monkeypatch.setitem(envs.ENVS, "look_up", LookUpEnv)
    for name, start, n in (("train", 100, 64), ("harness", 300, 16), ("test", 400, 16)):
        rows = [{"id": f"{i}", "question": f"Sam has some apples and counts them on day {i}. How many apples does Sam have?", "answer": str(7 * i)} for i in range(start, start + n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [str(tmp_path / f"{name}.jsonl") for name in ("train", "harness", "test")]


def test_a_new_domain_trains(domain, tmp_path):
    assert ("tiny", "look_up") not in DOMAIN_PRESETS                # nothing about it is anywhere else
    cfg = Config(**{"domain": "look_up", **PRESETS["tiny"], "cycles": 1, "epochs": 1.0, "prompt_batch": 16, "iterations": 2,
                    "n_eval": 2, "train": domain[0], "harness_set": domain[1], "test": domain[2], "out": str(tmp_path)})
    run = Run(cfg)
    train_whale(run)
    run.close()
    summary = json.loads((cfg.run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["weight_steps"] == 4 and summary["harness_iterations"] == 2
    assert summary["final_mean8"]["mean"] > summary["base_mean8"]["mean"]
    candidates = list(cfg.run_dir.glob("harness/cycle_01/h*/harness.py"))
    assert len(candidates) >= 3
