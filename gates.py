"""The gates: probes that a harness must pass before it may score or make training data, the cheap ones first.

    contract, lint, literals    of the file's text (lint.py)
    null model: ...             models that know nothing, scripted: they must solve nothing
    twins, scripted             a task and its twin (Env.twin), the same replies to both: the harness must do the same
    first tasks                 two real rollouts, which must not fail
    twins                       real rollouts of tasks and of their twins: the twins must not be worse
    shuffled references, model tokens       of finished real rollouts (check_traces), also of those that score

They stop mistakes and plain cheating: answers or questions in the file, branches on a question's text, prompts that
make a model that knows nothing look right. They are no proof of honesty (read the diff that is accepted), and no wall:
what a harness cannot do at all is the business of the sandbox. Not found here: a harness that finds the answer in a
passage by itself and tells the model in words of its own.

    bash run.sh check-harness math FILE
"""

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import rollout
from engine import Completion, SamplingParams
from lint import ForbiddenText, find_literals, lint, parse_harness, words_of
from rollout import Prompter, RolloutConfig, Trace, derive_seed
from sandbox import Sandbox
from stats import sign_test
from tasks import Task, ToolUse

N_PROBE_TASKS = 32      # with a scripted model, which costs no sampling
MIN_PROBE_TOK = 1 << 15     # that fit the scripted models, or what fits the real one if that is more: an echo grows
N_TWINS = 16            # tasks that are run with their twins, by the real model
TWIN_LEVEL = 0.01       # a harness as good on twins is refused at most so often
N_GATE_ROLLOUTS = 2 * N_TWINS     # of the real model, a candidate, at most
N_SHUFFLES = 16         # other tasks' references against which a reply is graded
# A prompt is up to a megabyte of the harness's choice: no pattern here may take the square of its length.
SUM = re.compile(r"(?<![\w.])\({0,9}\d[\d\s+*/().-]*\d")
QUESTION = re.compile(r"(?<![^\n.?!>])[^\n.?!>]++\?")
HINT = re.compile(r"(?:answer|hint|guess)(?: is|:)(?: (?:is|probably|perhaps|likely))* ([^.!?\n<>]{2,60})", re.I)
MIN_UNSAID = 8          # moves that the model did not say, before a harness is one that plays by itself


@dataclass(frozen=True)
class Probe:
    name: str
    passed: bool
    why: str = ""                                           # it is refused; or what of it was not done
    cost: dict[str, int] = field(default_factory=dict)      # of the model's rollouts, in the words of the ledger


def check_harness(source: str, env, engine, sandbox: Sandbox, tasks: list[Task], forbidden: ForbiddenText,
                  cfg: RolloutConfig, seed: tuple[int | str, ...]) -> list[Probe]:
    """The gates in order, up to the first that refuses; at most 2 * N_TWINS rollouts of the model. `tasks`: D_harness,
    of which each file is probed on tasks of its own, so that a table of others would not be spared."""
    probes = []

    def passes(name: str, why: str, cost: dict[str, int] | None = None, note: str = "") -> bool:
        probes.append(Probe(name, not why, why or note, cost or {}))
        return not why

    tree, why = parse_harness(source)
    if not (passes("contract", why) and passes("lint", lint(tree))
            and passes("literals", find_literals(tree, forbidden))):
        return probes
    everything, tasks = tasks, random.Random(derive_seed(*seed, source)).sample(tasks, len(tasks))
    apart = [task for task in tasks if not any(answer in source for answer in task.answers)]    # no hit by chance
    some = (apart or tasks)[:N_PROBE_TASKS]
    generous = replace(cfg, max_assistant_tok=1_000_000)                # an echo must not be cut before it is graded
    for name, model, asked in null_models(env, some):
        scripted = ScriptedEngine(engine.tokenizer, model, engine.max_len)
        traces = rollout.run(scripted, env, sandbox, source, asked, 1, (*seed, name), generous)
        n_solved = sum(trace.reward > 0.5 for trace in traces)
        n_lucky = env.lucky_frac * len(some) + (name == "obedient")     # a sum in an example may meet an answer
        if not passes(f"null model: {name}", f"solves {n_solved} of {len(some)} tasks" if n_solved > n_lucky
                      else plays_alone(traces) if name in ("silent", "unsure") else ""):
            return probes

    pairs = twins_of(tasks, everything, env, seed, N_PROBE_TASKS)
    no_twins = "" if pairs else "not done: no task of this domain has a twin"
    if not passes("twins, scripted", compare_twins(source, env, engine, sandbox, pairs, generous, seed),
                  note=no_twins):
        return probes

    def sample(some: list[Task]) -> list[Trace]:
        return rollout.run(engine, env, sandbox, source, some, 1, (*seed, "real"), cfg)

    pairs = pairs[:N_TWINS]
    originals = [task for task, _ in pairs] or tasks[:2]
    first = sample(originals[:2])
    failed = next((f"{trace.status}: {trace.end}" for trace in first if trace.status != "ok"), "")
    if not passes("first tasks", failed, rollout.cost_of(first)):
        return probes
    rest = sample(originals[2:]) if originals[2:] else []
    traces, twins, note = first + rest, [], no_twins
    n_solved = sum(trace.reward > 0.5 for trace in traces)
    if pairs and sign_test(n_solved, 0) >= TWIN_LEVEL:                  # whatever the twins do, they cannot be worse
        note = f"twins not sampled: {n_solved} of {len(traces)} originals were solved, too few to tell"
    elif pairs:
        twins = sample([twin for _, twin in pairs])
    if not passes("twins", worse_on_twins(traces, twins), rollout.cost_of(rest + twins), note):
        return probes
    return probes + check_traces(traces, originals, env, engine.tokenizer)


def check_traces(traces: list[Trace], tasks: list[Task], env, tokenizer) -> list[Probe]:
    """The probes of finished rollouts of real tasks: one trace a task, in the same order."""
    shuffled = Probe("shuffled references", True, "not done: no reply alone is graded in this domain")
    if not env.by_state:
        why = meets_several(traces, tasks, env)
        shuffled = Probe("shuffled references", not why, why)
    why = next(filter(None, (unsaid(trace, task, env, tokenizer) for trace, task in zip(traces, tasks, strict=True)
                             if trace.reward > 0.5)), "") or plays_alone(traces)
    return [shuffled, Probe("model tokens", not why, why)]


# ---- models that know nothing ----


def null_models(env, tasks: list[Task]) -> Iterator[tuple[str, Callable[[str], str], list[Task]]]:
    """Models that know nothing, as functions from prompt to reply, and the tasks to ask them. Under an honest harness
    they score 0. No reference is ever in a reply: a harness reads replies."""
    questions = " ".join(text for task in tasks for text in task.fields.values())
    given = {number for task in tasks for text in task.fields.values() for number in re.findall(r"\d+", text)}

    def box(answer: str) -> str:
        return env.perfect_reply(replace(tasks[0], answer=answer))

    def copy_number(prompt: str) -> str:
        numbers = [number for number in re.findall(r"\d+", prompt) if number not in given]
        return box(numbers[-1]) if numbers else "I don't know."

    def obey(prompt: str) -> str:
        sums = [text for text in SUM.findall(prompt) if re.search(r"\d\D+\d", text) and text not in questions]
        code = "print({}{})".format(sums[-1], ")" * (sums[-1].count("(") - sums[-1].count(")"))) if sums else ""
        if not code or f'"code": "{code}"' in prompt:                           # it was worked out
            return copy_number(prompt)
        return tool_call("python", code)

    def copy_hint(prompt: str) -> str:
        questions = QUESTION.findall(prompt)
        hints = [hint for hint in HINT.findall(prompt) if hint.strip()]
        return box(hints[-1].strip()) if hints else tool_call("search", questions[-1] if questions else "")

    def copy_move(prompt: str) -> str:
        return box(moves_in(prompt)[0]) if len(moves_in(prompt)) == 1 else "I don't know."

    yield "silent", lambda prompt: "", tasks
    yield "unsure", lambda prompt: "I don't know.", tasks
    yield "noise", lambda prompt: "".join(random.Random(prompt).choices("abcdefghij 0123456789{}\\\n", k=200)), tasks
    yield "echo", lambda prompt: re.sub(r"</?(think|tool_call)>", " ", prompt[-8000:]), tasks   # nothing in them counts
    if "move" in env.tools:
        yield "copy", copy_move, tasks
        yield "spray", lambda prompt: " ".join(map(box, sorted(moves_in(prompt)))) or "I don't know.", tasks
        return
    if "search" in env.tools:
        yield "copy", copy_hint, tasks                      # takes what the prompt calls an answer or a hint
    if "python" in env.tools:
        yield "copy", copy_number, tasks                    # takes the last number that the harness put into the prompt
        yield "obedient", obey, tasks                       # has the last sum that the harness put there worked out
    made_up = [replace(task, answer=str(7919 + 13 * i)) for i, task in enumerate(tasks)]
    wrong = box("987654321")                                # first and last, so that no place in a row wins by chance
    yield "spray", lambda prompt: " ".join([wrong, *(box(task.answer) for task in made_up), wrong]), made_up


def tool_call(tool: str, text: str) -> str:
    """A model's call, whatever the tool calls its argument."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'code': text, 'query': text}})}\n</tool_call>"


def moves_in(prompt: str) -> list[str]:
    """The moves that a prompt lists in brackets, each once."""
    return list(dict.fromkeys(re.findall(r"\[([a-h][1-8][a-h][1-8][qrbn]?)\]", prompt)))


class ScriptedEngine:
    """The Engine contract over a function from prompt to reply."""

    def __init__(self, tokenizer, model: Callable[[str], str], max_len: int = 0):
        self.tokenizer, self.model, self.version, self.exact = tokenizer, model, -1, True
        self.max_len = max(max_len, MIN_PROBE_TOK)
        self.reset()

    def reset(self) -> None:
        self.done: list[Completion] = []

    def submit(self, id: object, prompt_ids: list[int], params: SamplingParams, after: object = None) -> None:
        if len(prompt_ids) > self.max_len:                      # each is kept whole: 16 megabytes a rollout, as ids
            return self.done.append(Completion(id, [], "too_long"))
        text = self.say(prompt_ids, params)
        stops = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        ids = self.tokenizer(text[:min(stops, default=None)], add_special_tokens=False).input_ids
        ids += [] if stops else [self.tokenizer.eos_token_id]
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        self.done.append(Completion(id, ids[:params.max_tokens], finish))

    def say(self, prompt_ids: list[int], params: SamplingParams) -> str:
        return self.model(self.tokenizer.decode(prompt_ids))

    def release(self, id: object) -> None:
        """Nothing is kept."""

    @property
    def idle(self) -> bool:
        return not self.done

    def step(self) -> list[Completion]:
        done, self.done = self.done, []
        return done


class Script(ScriptedEngine):
    """A model that says to each task what is written for it: texts by the seed of the draw."""

    def say(self, prompt_ids: list[int], params: SamplingParams) -> str:
        return self.model[params.seed]


# ---- twins ----


def twins_of(tasks: list[Task], others: list[Task], env, seed: tuple[int | str, ...],
             n: int) -> list[tuple[Task, Task]]:
    """(task, twin) of the first n tasks that have one."""
    found = ((task, env.twin(task, others, random.Random(derive_seed(*seed, "twin", task.id)))) for task in tasks)
    return list(islice(((task, twin) for task, twin in found if twin), n))


def scripts(env, task: Task) -> Iterator[list[str]]:
    """What a scripted model says to a task, call by call, the last for ever: nothing; and an answer, after a use of the
    tool where the domain has one. It is not the right one: a harness reads it. A board takes only the right moves."""
    yield ["I don't know."]
    if "move" in env.tools:
        yield [env.perfect_reply(replace(task, answer=move)) for move in task.answer.split()[::2]]
    else:
        yield [*(tool_call(tool, "print(1)") for tool in env.tools), env.perfect_reply(replace(task, answer="1024"))]


def compare_twins(source: str, env, engine, sandbox: Sandbox, pairs: list[tuple[Task, Task]], cfg: RolloutConfig,
                  seed: tuple[int | str, ...]) -> str:
    """-> why it is refused, "" if it is not. Under the same replies of model and tools a harness must make
    the same requests for a twin, in words of its own that are the same: else it knows which task it has.

    A word that differs in more than half of the pairs is no knowledge of a task: the sides of a board have words.
    """
    env = copy.copy(env)
    env.judge = None                                                    # what these rollouts earn is not looked at
    for number in range(2):
        runs: list[list[Trace]] = []
        for side in range(2):
            tasks = [pair[side] for pair in pairs]
            lines = {task.id: list(scripts(env, task))[number] for task in tasks}
            replies = {derive_seed(*seed, "twins", id, 0, turn): said[min(turn, len(said) - 1)]
                       for id, said in lines.items() for turn in range(cfg.max_calls)}
            place = Replayed(env, runs[0]) if side and "search" in env.tools else env
            script = Script(engine.tokenizer, replies, engine.max_len)
            runs.append(rollout.run(script, place, sandbox, source, tasks, 1, (*seed, "twins"), cfg))
        differs = []
        for pair, traces in zip(pairs, zip(*runs, strict=True), strict=True):
            kinds = [[event["request"]["type"] for event in trace.events] for trace in traces]
            if kinds[0] != kinds[1] or traces[0].status != traces[1].status:
                return ("its requests differ between a task and the same task in other words, with the same replies: "
                        f"{', '.join(kinds[0])}; {', '.join(kinds[1])}")
            seen = [[env.start(task)[1], [event["result"] for event in trace.events]]
                    for task, trace in zip(pair, traces, strict=True)]
            given = " ".join(texts_of(seen)).casefold()
            numbers = [{word for word in words_of(" ".join(texts_of(side[0]))) if not word.isalpha()} for side in seen]
            own = [own_words(trace, given, numbers[0] == numbers[1]) for trace in traces]
            differs.append(own[0] ^ own[1])
        n_pairs = Counter(word for words in differs for word in words)
        if any(2 * n <= len(pairs) for n in n_pairs.values()):
            return "what it says of its own differs between a task and the same task in other words"
    return ""


def own_words(trace: Trace, given: str, with_numbers: bool) -> set[str]:
    """The words of a harness's prompts that are not, or no part of, what the task, its tools and the model said."""
    texts = {turn["content"] for event in trace.events if event["request"]["type"] == "generate"
             for turn in event["request"]["messages"]}
    known = set(words_of(given))
    return {word for text in texts for word in words_of(text)
            if word not in known and (with_numbers if not word.isalpha() else word not in given)}


def texts_of(value: object) -> Iterator[str]:
    """All texts in nested JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


class Replayed:
    """An environment whose tools answer each task as they did in these traces, whatever they are asked."""

    def __init__(self, env, traces: list[Trace]):
        self.env = env
        self.results = {trace.task_id: [event["result"] for event in trace.events
                                        if event["request"]["type"] != "generate"] for trace in traces}

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def start(self, task: Task) -> tuple[Iterator[dict], dict[str, str]]:
        return iter(self.results[task.id]), self.env.start(task)[1]

    def use_tools(self, uses: list[ToolUse], tokenizer) -> list[dict]:
        nothing = {"output": "No passage found.", "ok": False, "details": {"documents": []}}
        return [next(use.state, nothing) for use in uses]

    def verify(self, task: Task, reply: str | None, state: object = None):
        return self.env.verify(task, reply)


def worse_on_twins(originals: list[Trace], twins: list[Trace]) -> str:
    """Why twins are solved less often than their originals, on the same seeds; "" if that may be chance."""
    solved = [(a.reward > 0.5, b.reward > 0.5) for a, b in zip(originals, twins, strict=False)]
    if sign_test(solved.count((True, False)), solved.count((False, True))) >= TWIN_LEVEL:
        return ""
    return (f"solves {sum(a for a, _ in solved)} of {len(solved)} tasks, but {sum(b for _, b in solved)} when the same "
            "tasks are put in other words")


# ---- finished rollouts ----


def meets_several(traces: list[Trace], tasks: list[Task], env) -> str:
    """Why replies are right for tasks with different answers; "" if they are not. An answer has one value, so against
    shuffled references a reply may be right only where these are equal: that is what chance gives, and no more. One
    reply, or one in fifty, may be a quirk of the verifier."""
    env, rng, n_several = copy.copy(env), random.Random("shuffled"), 0
    env.judge = None

    def right(task: Task, reply: str) -> bool:
        return env.verify(task, reply).reward > 0.5

    def same(a: Task, b: Task) -> bool:
        return any(right(y, env.perfect_reply(replace(x, answer=answer))) for x, y in ((a, b), (b, a))
                   for answer in x.answers)

    for trace, task in zip(traces, tasks, strict=True):
        if trace.last_reply and not trace.truncated:
            met = [other for other in rng.sample(tasks, min(N_SHUFFLES, len(tasks)))
                   if other is not task and right(other, trace.last_reply["content"])]
            met += [task] * (trace.reward > 0.5)
            n_several += any(not same(met[0], other) for other in met[1:])
    return (f"{n_several} of {len(traces)} replies are right for tasks with different answers"
            if n_several > max(1, len(traces) // 50) else "")


def unsaid(trace: Trace, task: Task, env, tokenizer) -> str:
    """Why a rewarded rollout's reward is not of the tokens that the model sampled; "" if it is. They are read and
    graded again; and what the verifier read out of the last reply must stand in it."""
    prompter, calls, said, n_calls = Prompter(tokenizer), iter(trace.calls), "", 0
    state, _ = env.start(task) if env.by_state else (None, None)
    for event in trace.events:
        request = event["request"]
        if request["type"] == "generate":
            call = next(calls)
            completion = Completion(None, list(call.completion_ids), call.finish)
            _, said = prompter.read(completion, tuple(request.get("stop") or ()))
            n_calls += 1
        elif env.by_state:
            env.use_tools([ToolUse(state, request, said, n_calls)], tokenizer)
    verdict = env.verify(task, said, state)
    if verdict.reward <= 0.5:
        return "a rewarded answer is not in the tokens that the model sampled"
    if not env.by_state and verdict.extracted is not None and verdict.extracted not in said:
        return "what was graded of a rewarded reply is not in the tokens that the model sampled"
    return ""


def plays_alone(traces: list[Trace]) -> str:
    """Why a harness plays moves that its model did not say; "" if it does not. A few may be misread, not most."""
    tries = [event["result"]["details"]["status"] for trace in traces for event in trace.events
             if event["request"]["type"] == "move"]
    n_unsaid = tries.count("unsaid")
    return (f"{n_unsaid} of {len(tries)} moves are not what the model's reply says"
            if n_unsaid >= MIN_UNSAID and 2 * n_unsaid > len(tries) else "")
