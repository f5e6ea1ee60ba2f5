"""Runs harness programs against an engine as one continuous batch and records what happened, token by token.

`run` starts n samples of a harness on each task. Whenever a program waits for the model its request is in the batch;
there are no waves. A program's requests and their results are its trace; the ids that were sampled, and only they,
carry loss (`Trace.sequences`).

With an exact engine the batch does not depend on the clock: the next request of a program joins a fixed number of
engine steps after its last reply, and the engine waits if a program or tool is not done by then. So tool time is hidden
behind sampling, and the same seeds give the same tokens whatever the load of the machine and the number of sandbox
workers. An engine that is not exact (vLLM) could not keep that promise anyway, so it samples on while a tool is late.

Differs from the paper: nothing that we know of; the paper does not say how its rollouts are scheduled.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import groupby, islice

import numpy as np
from jinja2 import TemplateError

from engine import Completion, SamplingParams
from harness_api import is_plain
from tasks import MAX_TOKEN_CHARS, Task, ToolUse, Verdict
from sandbox import Event, Limits, Programs, Sandbox, ToolResult

PROGRAM_STEPS = 1       # engine steps between a result and the program's next request
TOOL_STEPS = 2          # engine steps between a tool request and its result
MAX_TOOL_CALLS = 32     # a rollout; a model that prints a hundred calls in one reply gets no further
MAX_PROMPT_CHARS = 8 << 20      # that a template may add to its messages; less where the context is small
MAX_TRACE_BYTES = 16 << 20      # of a rollout's requests and results as JSON, whatever the model's context
INFRA_TRIES = 3
N_GRADERS = 8           # threads that verify: a verifier may ask a judge over the network

# Turns as labelled paragraphs, for a model that has no chat template.
PLAIN_TEMPLATE = ("{{ bos_token or '' }}{% for m in messages %}"
                  "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: ', 'tool': 'Output: '}[m.role] }}"
                  "{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}")
PLAIN_STOP = ("\n\nUser:", "\n\nOutput:", "\n\nAssistant:")


class InfraError(RuntimeError):
    """Rollouts that our own machinery lost, again and again. They are never scored."""


@dataclass(frozen=True)
class RolloutConfig:
    """What a harness cannot change. Every arm of a comparison uses the same."""
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    max_assistant_tok: int = 8192       # a rollout, over all its model calls
    max_calls: int = 16                 # hard cap on model calls a rollout
    n_live: int = 256                   # programs alive at once
    n_workers: int = 1                  # sandbox processes that run them
    tool_limits: Limits = Limits()
    harness_limits: Limits = Limits()


@dataclass(frozen=True)
class Sequence:
    """One training row: ids (T,) and mask (T,), True where the model sampled the token, so where it carries loss."""
    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class Call:
    """One model call, token for token."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish: str
    usage: tuple[int, int] | None = None            # Completion.usage

    @property
    def n_prompt_tok(self) -> int:
        return self.usage[0] if self.usage else len(self.prompt_ids)

    @property
    def n_tok(self) -> int:
        return self.usage[1] if self.usage else len(self.completion_ids)


@dataclass
class Trace:
    """One rollout tau: its requests and results, its tokens, its verdict."""
    task_id: str
    sample: int
    harness_sha: str
    version: int                                    # of the weights that sampled it
    status: str = "ok"                              # "ok", "error", "killed", "infra"
    end: str = ""                                   # why it ended, in words
    reward: float = 0.0
    why: str = ""                                   # the verifier's reason; never holds the reference
    kind: str = ""                                  # the verifier's word for why it was not solved, if it has one
    answered: bool = False                          # the last reply held something that the verifier could read
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)     # what the domain counts: (hits, of how many)
    events: list[dict] = field(default_factory=list)        # {"request": ..., "result": ...}, in order
    calls: list[Call] = field(default_factory=list)

    @property
    def n_tok(self) -> int:
        return sum(call.n_tok for call in self.calls)

    @property
    def n_prompt_tok(self) -> int:
        return sum(call.n_prompt_tok for call in self.calls)

    @property
    def n_tool_calls(self) -> int:
        return sum(event["request"]["type"] != "generate" for event in self.events)

    @property
    def last_reply(self) -> dict | None:
        """{"content", "tool_calls", "finish"} of the last model call."""
        return next((e["result"] for e in reversed(self.events) if e["request"]["type"] == "generate"), None)

    @property
    def truncated(self) -> bool:
        return bool(self.calls) and self.calls[-1].finish == "length"

    @property
    def accepted(self) -> bool:
        """Whether it is trained on. A reply cut by a length limit is not, whatever stands in it."""
        return self.status == "ok" and self.reward > 0.5 and not self.truncated

    @property
    def failure(self) -> str:
        """Why it was not solved, as one word for counting; "solved" where it was."""
        replies = [event["result"] for event in self.events if event["request"]["type"] == "generate"]
        outputs = [event["result"] for event in self.events if event["request"]["type"] != "generate"]
        if self.status != "ok":
            return self.status
        if self.reward > 0.5:
            return "solved"
        if not replies or self.truncated:
            return "token_limit"
        if self.kind:
            return self.kind
        if replies[-1]["tool_calls"]:
            return "call_limit"                     # still at work when the harness stopped
        if "<tool_call>" in replies[-1]["content"]:
            return "malformed_call"
        if not self.answered:
            return "no_answer_after_tool" if outputs else "no_answer"
        if not outputs:
            return "no_tool_wrong_answer"
        return "wrong_answer" if outputs[-1].get("ok", True) else "tool_error"

    def sequences(self) -> list[Sequence]:
        """The training view: a call whose prompt is the sequence so far plus more, token for token, extends it; any
        other starts a new sequence (a template that drops earlier thinking, a harness that rewrites its context)."""
        rows: list[tuple[list[int], list[bool]]] = []
        for call in self.calls:
            if rows and list(call.prompt_ids[:len(rows[-1][0])]) == rows[-1][0]:
                ids, mask = rows[-1]
                new = call.prompt_ids[len(ids):]
            else:
                ids, mask, new = [], [], call.prompt_ids
                rows.append((ids, mask))
            ids += new
            mask += [False] * len(new)
            ids += call.completion_ids
            mask += [True] * len(call.completion_ids)
        return [Sequence(tuple(ids), tuple(mask)) for ids, mask in rows if any(mask)]

    def brief(self) -> dict:
        return {"task_id": self.task_id, "sample": self.sample, "reward": self.reward, "failure": self.failure,
                "end": self.end, "n_tok": self.n_tok}

    def to_json(self, tokenizer=None) -> dict:
        """With a tokenizer, also the token ids, and `texts`: the training view as runs of [text, the model said it]."""
        row = {key: value for key, value in asdict(self).items() if key != "calls"}
        row |= {"failure": self.failure, "accepted": self.accepted, "n_tok": self.n_tok, "n_calls": len(self.calls)}
        if tokenizer is None:
            return row
        texts = [[[tokenizer.decode([token for token, _ in run]), said]
                  for said, run in groupby(zip(sequence.ids, sequence.mask, strict=True), key=lambda pair: pair[1])]
                 for sequence in self.sequences()]
        return row | {"calls": [asdict(call) for call in self.calls], "texts": texts}


def max_trace_bytes(max_calls: int, max_len: int) -> int:
    """What a rollout's requests and results may come to: a full context a call, at 8 bytes a token. Else a harness
    could put a megabyte into each request."""
    return min(MAX_TRACE_BYTES, 8 * max_len * max_calls)


def derive_seed(*coordinates: int | str) -> int:
    """A 64-bit seed from a draw's coordinates (run, phase, step, task, sample, call)."""
    return int.from_bytes(hashlib.blake2b(repr(coordinates).encode(), digest_size=8).digest(), "big")


def parse_tool_calls(content: str, limit: int = MAX_TOOL_CALLS) -> list[dict]:
    """The well-formed tool calls of a reply, after any thinking: {"name": str, "arguments": dict}.

    Reads Qwen3's JSON form and Qwen3.5's <function=...><parameter=...> form; anything malformed is left out.
    """
    calls = []
    for block in islice(tool_blocks(content.rpartition("</think>")[2]), limit):
        function = re.fullmatch(r"\s*<function=([\w.-]+)>(.*)</function>\s*", block, re.DOTALL)
        if function:
            *parts, rest = function[2].split("</parameter>")
            found = [re.search(r"<parameter=([\w.-]+)>\n?(.*)", part, re.DOTALL) for part in parts]
            if "<parameter=" not in rest:                                       # else one is not closed
                arguments = {part[1]: part[2].removesuffix("\n") for part in found if part}
                calls.append({"name": function[1], "arguments": arguments})
            continue
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict) \
                and is_plain(call["arguments"]):
            calls.append({"name": call["name"], "arguments": call["arguments"]})
    return calls


def tool_blocks(text: str) -> Iterator[str]:
    """What stands in its <tool_call> blocks. A regular expression would look for the end of each that has none."""
    end = 0
    while (start := text.find("<tool_call>", end)) >= 0:
        start += len("<tool_call>")
        if (end := text.find("</tool_call>", start)) < 0:
            return
        yield text[start:end]


def remember_short(function: Callable[..., object]) -> Callable[..., object]:
    """Samples of a task share their prompts; a harness that asks with a megabyte each time must not fill the memory."""
    remembered = lru_cache(maxsize=1024)(function)
    return lambda *texts: (remembered if sum(map(len, texts)) <= 1 << 16 else function)(*texts)


class Prompter:
    """Chat messages -> prompt ids, through the model's own template. Sampled text is never tokenised again."""

    def __init__(self, tokenizer, max_len: int = 1 << 20):
        self.tokenizer, self.max_chars = tokenizer, min(MAX_TOKEN_CHARS * max_len, MAX_PROMPT_CHARS)
        self.plain = tokenizer.chat_template is None
        self.template = PLAIN_TEMPLATE if self.plain else tokenizer.chat_template
        special = set(tokenizer.all_special_tokens) | {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))
        self.render, self.encode = remember_short(self._render), remember_short(self._encode)
        self.is_special = lru_cache(maxsize=64)(lambda token: bool(self.special.fullmatch(self.decode([token]))))

    def defuse(self, value):
        """Turn tokens spelled out in a text stay text: `<|im_start|>` in a tool's output must not open a turn. So in
        every text of some JSON; not in the JSON itself, where quotes and what is not ASCII are written otherwise."""
        if isinstance(value, str):
            return self.special.sub(lambda match: match[0][0] + " " + match[0][1:], value)
        if isinstance(value, list):
            return [self.defuse(part) for part in value]
        if isinstance(value, dict):
            return {self.defuse(key): self.defuse(part) for key, part in value.items()}
        return value

    def _render(self, messages: str, tools: str) -> str:
        text = self.tokenizer.apply_chat_template(
            json.loads(messages), tools=json.loads(tools), chat_template=self.template, tokenize=False,
            add_generation_prompt=True)
        if len(text) > self.max_chars + 4 * (len(messages) + len(tools)):           # not to be kept, nor encoded
            raise ValueError(f"it makes {len(text):,} characters of them")
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(np.array(ids), skip_special_tokens=False)      # a list is checked id by id

    def prompt(self, request: dict, said_text: str, said_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """-> prompt text and ids. Where the text begins with `said_text` (the last prompt and what the model said to
        it), the ids of that part are the recorded ones."""
        text = self.render(json.dumps(self.defuse(request["messages"])), json.dumps(self.defuse(request.get("tools"))))
        if said_text and text.startswith(said_text):
            return text, said_ids + self.encode(text[len(said_text):])
        return text, self.encode(text)

    def read(self, completion: Completion, stop: tuple[str, ...]) -> tuple[str, str]:
        """A completion's (full text, content): the content ends before the stop token or stop string."""
        full = content = self.decode(completion.ids)
        if completion.finish == "stop" and self.is_special(completion.ids[-1]):
            content = self.decode(completion.ids[:-1])
        cuts = [content.find(text) for text in stop if text in content]
        return full, self.defuse(content[:min(cuts)] if cuts else content)


@contextmanager
def threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that ends when its block does: whoever wanted a result has waited for it, and a stop waits for none."""
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Live:
    """A program that has not ended."""
    task: Task
    trace: Trace
    state: object                       # what its environment's tools remember
    text: str = ""                      # last prompt and reply as text
    ids: tuple[int, ...] = ()           # and as ids
    stop: tuple[str, ...] = ()
    request: dict | None = None         # the one it waits for


def run(engine, env, sandbox: Sandbox, source: str, tasks: list[Task], n: int, seed: tuple[int | str, ...],
        cfg: RolloutConfig, on_finish: Callable[[Trace], None] | None = None) -> list[Trace]:
    """n rollouts of the harness `source` on each task -> traces in the order of (task, sample). `on_finish` gets each
    when it ends; its verdict comes later.

    The number of traces is fixed before the run: programs that fail or are killed count, with reward 0. Rollouts lost
    to our own machinery ("infra") are run again and never scored; InfraError after INFRA_TRIES.
    """
    batch = Batch(engine, env, sandbox, source, seed, cfg, on_finish)
    wanted = [(task, sample) for task in tasks for sample in range(n)]
    done: dict[tuple[str, int], Trace] = {}
    for _ in range(INFRA_TRIES):
        done |= {(trace.task_id, trace.sample): trace for trace in batch.run(wanted)}
        wanted = [(task, sample) for task, sample in wanted if done[task.id, sample].status == "infra"]
        if not wanted:
            return [done[task.id, sample] for task in tasks for sample in range(n)]
    reasons = Counter(trace.end for trace in done.values() if trace.status == "infra")
    raise InfraError(f"{len(wanted)} rollouts failed {INFRA_TRIES} times for reasons of the machine, not of the model: "
                     f"{reasons.most_common(1)[0][0]}. The same command goes on from the last finished step.")


class Batch:
    """The state of one continuous batch."""

    def __init__(self, engine, env, sandbox, source, seed, cfg, on_finish):
        self.engine, self.env, self.sandbox, self.source = engine, env, sandbox, source
        self.seed, self.cfg, self.on_finish = seed, cfg, on_finish
        self.sha = hashlib.sha256(source.encode()).hexdigest()
        self.prompter = Prompter(engine.tokenizer, engine.max_len)
        self.max_bytes = max_trace_bytes(cfg.max_calls, engine.max_len)

    def run(self, wanted: list[tuple[Task, int]]) -> list[Trace]:
        self.engine.reset()
        self.live: dict[int, Live] = {}
        self.finished: list[Trace] = []
        self.tick = 0
        self.program_due: dict[int, list[int]] = defaultdict(list)      # tick -> programs whose request is taken then
        self.tool_due: dict[int, list[int]] = defaultdict(list)         # tick -> programs whose tool result is
        self.tool_jobs: dict[str, int] = {}                             # code -> the sandbox's job that runs it
        self.tool_results: dict[str, ToolResult] = {}
        self.uses: list[tuple[int, ToolUse]] = []                       # this tick's requests to the env's tools
        self.use_due: dict[int, list[tuple[tuple[int, ...], Future]]] = defaultdict(list)   # tick -> users and results
        self.verdicts: list[tuple[Trace, Future]] = []
        # in an order of this file's own: its programs could count themselves, and a table hold an earlier file's order
        todo = deque(sorted(enumerate(wanted), key=lambda one: derive_seed(self.sha, one[1][0].id)))
        workers = Programs(self.sandbox, self.source, self.cfg.harness_limits, self.cfg.n_workers)
        with closing(workers) as self.programs, threads(1) as self.tools, threads(N_GRADERS) as self.graders:
            while todo or self.live:
                while todo and len(self.live) < self.cfg.n_live:
                    program, (task, sample) = todo.popleft()
                    state, fields = self.env.start(task)
                    self.live[program] = Live(task, Trace(task.id, sample, self.sha, self.engine.version), state)
                    # by the file too: else its random numbers, seen in a trace, would tell a later file its task
                    self.programs.start(program, fields, derive_seed(*self.seed, self.sha, task.id, sample, "harness"))
                    self.program_due[self.tick].append(program)
                for program in self.program_due.pop(self.tick, []):
                    self._take_event(program, self.programs.wait(program))
                for program in self.tool_due.pop(self.tick, []):
                    self._take_tool_result(program)
                for users, future in self.use_due.pop(self.tick, []):
                    self._take_use_results(users, future)
                if self.uses:                       # one call for all of this tick, hidden behind sampling
                    users, uses = zip(*self.uses, strict=True)
                    future = self.tools.submit(self.env.use_tools, list(uses), self.engine.tokenizer)
                    self.use_due[self.tick + TOOL_STEPS].append((users, future))
                    self.uses = []
                self.programs.flush()               # programs run while the engine does
                for completion in self.engine.step() if not self.engine.idle else []:
                    self._take_completion(completion)
                self.tick += 1
            for trace, future in self.verdicts:
                self._grade(trace, future.result())
        return self.finished

    def _resume(self, program: int, result: dict) -> None:
        live = self.live[program]
        live.trace.events.append({"request": live.request, "result": result})
        self.programs.resume(program, result)
        self.program_due[self.tick + PROGRAM_STEPS].append(program)

    def _take_event(self, program: int, event: Event) -> None:
        """A program's next request, or its end."""
        live = self.live[program]
        if event.kind == "done":
            self._end(program, "ok", "the harness returned")
        elif event.kind != "request":
            self._end(program, event.kind, event.message)
        elif event.n_bytes > self.max_bytes:            # it is kept whole, in memory and on disk
            self._end(program, "ok", f"limit of {self.max_bytes:,} bytes of requests and results")
        elif event.request["type"] == "generate":
            self._submit(program, live, event.request)
        elif event.request["type"] not in self.env.tools:
            self._end(program, "error", f"the {self.env.name} domain has no request '{event.request['type']}'")
        elif live.trace.n_tool_calls >= MAX_TOOL_CALLS:
            self._end(program, "ok", f"limit of {MAX_TOOL_CALLS} tool calls")
        elif event.request["type"] != "python":
            live.request = event.request
            last = live.trace.last_reply
            said = last["content"] if last and last["finish"] == "stop" else ""     # what was cut says nothing
            self.uses.append((program, ToolUse(live.state, event.request, said, len(live.trace.calls))))
        else:
            live.request = event.request
            code = event.request["code"]
            if code not in self.tool_jobs:          # the tool is stateless: the samples of a task share equal snippets
                self.tool_jobs[code] = program
                self.sandbox.python_start(program, code, self.cfg.tool_limits)
            self.tool_due[self.tick + TOOL_STEPS].append(program)

    def _submit(self, program: int, live: Live, request: dict) -> None:
        trace, left = live.trace, self.cfg.max_assistant_tok - live.trace.n_tok
        if len(trace.calls) >= self.cfg.max_calls:
            return self._end(program, "ok", f"limit of {self.cfg.max_calls} model calls")
        if left <= 0:
            return self._end(program, "ok", f"limit of {self.cfg.max_assistant_tok} assistant tokens")
        try:
            text, ids = self.prompter.prompt(request, live.text, live.ids)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError, MemoryError) as error:  # the template is the model's, whatever that does
            return self._end(program, "error", f"the chat template refused the messages: {error}")
        if not ids:
            return self._end(program, "error", "an empty prompt")
        live.request, live.text, live.ids = request, text, ids
        live.stop = tuple(request.get("stop") or ()) + (PLAIN_STOP if self.prompter.plain else ())
        self.engine.submit((program, len(trace.calls)), list(ids), SamplingParams(
            max_tokens=min(request.get("max_tokens") or left, left), temperature=self.cfg.temperature,
            top_k=self.cfg.top_k, top_p=self.cfg.top_p, stop=live.stop,
            seed=derive_seed(*self.seed, trace.task_id, trace.sample, len(trace.calls)),
        ), after=(program, len(trace.calls) - 1))

    def _take_completion(self, completion: Completion) -> None:
        program = completion.id[0]
        live = self.live[program]
        if completion.finish == "too_long":
            return self._end(program, "ok", f"prompt of {len(live.ids)} tokens does not fit the model's context")
        full, content = self.prompter.read(completion, live.stop)
        if live.text.rstrip().endswith("<think>"):      # opened by the template (Qwen3.5): what follows is thinking
            content = "<think>\n" + content
        live.trace.calls.append(Call(live.ids, tuple(completion.ids), completion.finish, completion.usage))
        live.text, live.ids = live.text + full, live.ids + tuple(completion.ids)
        self._resume(program, {"content": content, "tool_calls": parse_tool_calls(content),
                               "finish": completion.finish})

    def _samples_on(self, ready: Callable[[], bool]) -> bool:
        """Whether not to wait for a late result now. An exact engine waits; an idle one has nothing else to do."""
        return not self.engine.exact and not self.engine.idle and not ready()

    def _take_use_results(self, users: tuple[int, ...], future: Future) -> None:
        if self._samples_on(future.done):
            return self.use_due[self.tick + 1].append((users, future))
        for program, result in zip(users, future.result(), strict=True):
            self._take_result(program, result)

    def _take_tool_result(self, program: int) -> None:
        code = self.live[program].request["code"]
        if code not in self.tool_results:
            if self._samples_on(lambda: self.sandbox.python_ready(self.tool_jobs[code])):
                return self.tool_due[self.tick + 1].append(program)
            self.tool_results[code] = self.sandbox.python_wait(self.tool_jobs[code])
        result = self.tool_results[code]
        failed = {"infra": result.output} if result.status == "infra" else {}
        self._take_result(program, {"output": result.output.rstrip("\n"), "ok": result.status == "ok", **failed})

    def _take_result(self, program: int, result: dict) -> None:
        """A tool's result: to the program, unless the environment says that the rollout is over."""
        if "infra" in result:
            return self._end(program, "infra", result["infra"])
        if "end" not in result:
            return self._resume(program, result)
        live = self.live[program]
        live.trace.events.append({"request": live.request, "result": result})
        self._end(program, "ok", result["end"])

    def _end(self, program: int, status: str, why: str) -> None:
        """Grades the last thing the model said; what the harness returned is not looked at."""
        live = self.live.pop(program)
        trace = live.trace
        self.engine.release((program, len(trace.calls) - 1))
        self.programs.drop(program)
        trace.status, trace.end = status, why
        if status == "ok":
            reply = trace.last_reply
            trace.rates = self.env.count(live.task, trace.events)
            self.verdicts.append((trace, self.graders.submit(
                self.env.verify, live.task, reply["content"] if reply else None, live.state)))
        self.finished.append(trace)
        if self.on_finish and status != "infra":
            self.on_finish(trace)

    def _grade(self, trace: Trace, verdict: Verdict) -> None:
        trace.answered, trace.kind = verdict.extracted is not None, verdict.kind
        trace.reward = 0.0 if trace.truncated else verdict.reward
        trace.why = "the last reply was cut by a length limit" if trace.truncated else verdict.why


def cost_of(traces: Iterable[Trace]) -> dict[str, int]:
    """What rollouts took, in the words of the ledger."""
    traces = list(traces)
    return {"rollouts": len(traces), "model_calls": sum(len(trace.calls) for trace in traces),
            "prompt_tok": sum(trace.n_prompt_tok for trace in traces),
            "completion_tok": sum(trace.n_tok for trace in traces),
            "tool_calls": sum(trace.n_tool_calls for trace in traces)}


def summarise(traces: Iterable[Trace]) -> dict[str, float]:
    """Counts and rates of a set of rollouts. The denominators are all of them, but for a domain's own rates."""
    traces = list(traces)
    n = len(traces)
    statuses = Counter(trace.status for trace in traces)
    rates: dict[str, list[int]] = {}
    for trace in traces:
        for name, (hits, total) in trace.rates.items():
            counted = rates.setdefault(f"{name}_frac", [0, 0])
            counted[0], counted[1] = counted[0] + hits, counted[1] + total
    return {
        "n": n, "mean_reward": sum(trace.reward for trace in traces) / n,
        "n_ok": statuses["ok"], "n_error": statuses["error"], "n_killed": statuses["killed"],
        "answered_frac": sum(trace.answered for trace in traces) / n,
        "truncated_frac": sum(trace.truncated for trace in traces) / n,
        "tool_frac": sum(trace.n_tool_calls > 0 for trace in traces) / n,
        "calls_a_rollout": sum(len(trace.calls) for trace in traces) / n,
        "tok_a_rollout": sum(trace.n_tok for trace in traces) / n,
        **{name: hits / total for name, (hits, total) in rates.items() if total},
    }
