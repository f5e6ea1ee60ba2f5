"""The gates: probes that a harness file must pass before it may score or make training data, the cheap ones first.

They stop mistakes and plain cheating: answers or questions in the file, branches on a question's text, prompts that
make a model that knows nothing look right. They are no proof of honesty (read the diff that is accepted), and no wall:
what a harness cannot do at all is the business of the sandbox. Not found here: a harness that finds the answer in a
passage by itself and tells the model.

    bash run.sh check-harness math FILE
"""

import ast
import base64
import codecs
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest

import rollout
from engine import Completion, SamplingParams
from tasks import Task
from rollout import RolloutConfig
from sandbox import Sandbox

N_PROBE_TASKS = 4


@dataclass(frozen=True)
class Probe:
    name: str
    passed: bool
    why: str = ""
    cost: dict[str, int] = field(default_factory=dict)      # of the model's rollouts, in the words of the ledger


def check_harness(source: str, env, engine, sandbox: Sandbox, tasks: list[Task], forbidden: ForbiddenText,
                  cfg: RolloutConfig, seed: tuple[int | str, ...]) -> list[Probe]:
    """The gates in order, up to the first that refuses. `tasks`: a few of the domain's."""
    probes = []

    def passes(name: str, why: str, cost: dict[str, int] | None = None) -> bool:
        probes.append(Probe(name, not why, why, cost or {}))
        return not why

    tree, why = parse_harness(source)
    if not (passes("contract", why) and passes("lint", lint(tree))
            and passes("literals", find_literals(tree, forbidden))):
        return probes
    apart = [task for task in tasks if not any(answer in source for answer in task.answers)]    # no hit by chance
    some = (apart or tasks)[:N_PROBE_TASKS]
    generous = replace(cfg, max_assistant_tok=1_000_000)                # an echo must not be cut before it is graded
    for name, model in null_models(env, some):
        scripted = ScriptedEngine(engine.tokenizer, model)
        traces = rollout.run(scripted, env, sandbox, source, some, 1, (*seed, name), generous)
        n_solved = sum(trace.reward > 0.5 for trace in traces)
        if not passes(f"null model: {name}",
                      f"solves {n_solved} of {len(some)} tasks" if n_solved > env.n_lucky else ""):
            return probes
    traces = rollout.run(engine, env, sandbox, source, tasks[:2], 1, (*seed, "real"), cfg)
    failed = next((f"{trace.status}: {trace.end}" for trace in traces if trace.status != "ok"), "")
    passes("first tasks", failed, rollout.cost_of(traces))
    return probes


def null_models(env, tasks: list[Task]) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Models that know nothing, as functions from prompt to reply. Under an honest harness they score 0."""
    given = {number for task in tasks for text in task.fields.values() for number in re.findall(r"\d+", text)}

    def box(answer: str) -> str:
        return env.perfect_reply(replace(tasks[0], answer=answer))

    def copy(prompt: str) -> str:
        numbers = [number for number in re.findall(r"\d+", prompt) if number not in given]
        return box(numbers[-1]) if numbers else "I don't know."

    yield "silent", lambda prompt: ""
    yield "unsure", lambda prompt: "I don't know."
    yield "noise", lambda prompt: "".join(random.Random(prompt).choices("abcdefghij 0123456789{}\\\n", k=200))
    yield "echo", lambda prompt: re.sub(r"</?(think|tool_call)>", " ", prompt[-8000:])      # nothing in them counts
    if "move" in env.tools:
        yield "copy", lambda prompt: box(moves_in(prompt)[0]) if len(moves_in(prompt)) == 1 else "I don't know."
        yield "spray", lambda prompt: " ".join(map(box, sorted(moves_in(prompt)))) or "I don't know."
        return
    if "python" in env.tools:                               # a search puts what may be the answer into honest prompts
        yield "copy", copy                                  # takes the last number that the harness put into the prompt
    wrong = box("987654321")                                # first and last, so that no place in a row wins by chance
    yield "spray", lambda prompt: " ".join([wrong, *(box(task.answer) for task in tasks), wrong])


def moves_in(prompt: str) -> list[str]:
    """The moves that a prompt lists in brackets, each once."""
    return list(dict.fromkeys(re.findall(r"\[([a-h][1-8][a-h][1-8][qrbn]?)\]", prompt)))


class ScriptedEngine:
    """The Engine contract over a function from prompt to reply."""

    def __init__(self, tokenizer, model: Callable[[str], str]):
        self.tokenizer, self.model, self.version, self.exact = tokenizer, model, -1, True
        self.reset()

    def reset(self) -> None:
        self.done: list[Completion] = []

    def submit(self, id: object, prompt_ids: list[int], params: SamplingParams, after: object = None) -> None:
        text = self.model(self.tokenizer.decode(prompt_ids))
        stops = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        ids = self.tokenizer(text[:min(stops, default=None)], add_special_tokens=False).input_ids
        ids += [] if stops else [self.tokenizer.eos_token_id]
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        self.done.append(Completion(id, ids[:params.max_tokens], finish))

    def release(self, id: object) -> None:
        """Nothing is kept."""

    @property
    def idle(self) -> bool:
        return not self.done

    def step(self) -> list[Completion]:
        done, self.done = self.done, []
        return done
