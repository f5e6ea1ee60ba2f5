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

MAX_SOURCE_BYTES = 20_000
ALLOWED_MODULES = "re json math string textwrap itertools collections functools statistics random harness_api".split()
FORBIDDEN_NAMES = "exec eval compile open input getattr setattr delattr globals locals vars dir breakpoint".split()
DATA_NAMES = re.compile(
    r"(?<![a-z])(gsm8k|svamp|mawps|asdiv|dapo|deepscaler|aime|math[-_ ]?500|hotpotqa|musique|2wiki\w*|popqa|triviaqa|"
    r"nq[-_ ]open|bamboogle|lichess|d_(weight|harness|test)|(train|test|harness)(ing)?[-_ ](set|split))(?![a-z])",
    re.IGNORECASE)
QUESTION_WORDS = 12     # so many words in a row give a question away; of a shorter one (not below 5) all of them
COMMON = 3              # words that stand in more questions than this are the language of the domain, not a question
ANSWER_TABLE = 6        # so many constants of two or more characters that equal answers are a table of answers
N_PROBE_TASKS = 4
N_GATE_ROLLOUTS = 2     # of the model, a candidate, at most


@dataclass(frozen=True)
class Probe:
    name: str
    passed: bool
    why: str = ""
    cost: dict[str, int] = field(default_factory=dict)      # of the model's rollouts, in the words of the ledger


class ForbiddenText:
    """What no harness may hold, from the tasks of all splits."""

    def __init__(self, tasks: list[Task]):
        self.questions = [words_of(text) for task in tasks for text in task.fields.values()]
        self.questions += [words_of(task.fields["fen"].split()[0]) for task in tasks if "fen" in task.fields]
        answers = {answer.strip().casefold() for task in tasks for answer in task.answers}
        answers |= {move for task in tasks if "fen" in task.fields for move in task.answer.split()}
        # short words are the language's: "two", "film" and "English" are answers too
        self.answers = {answer for answer in answers if re.search(r"\d.|.\d| ", answer) or len(answer) >= 10}
        self.sources = {task.source.casefold() for task in tasks
                        if re.search(r"[\d_-]", task.source) and len(task.source) > 3}             # no plain words


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


def parse_harness(source: str) -> tuple[ast.Module, str]:
    """-> syntax tree, and what the contract misses in it ("" if nothing)."""
    if (n_bytes := len(source.encode())) > MAX_SOURCE_BYTES:
        return ast.Module([], []), f"{n_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed"
    try:
        tree = ast.parse(source)
        ast.dump(tree)                      # what cannot be shown (an int of 5,000 digits) cannot be compared either
        constants = [(target.id, constant_of(node.value)) for node in tree.body if isinstance(node, ast.Assign)
                     for target in node.targets if isinstance(target, ast.Name)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ast.Module([], []), f"does not parse: {type(error).__name__}: {error}"
    for wanted in ("SYSTEM_PROMPT", "USER_PROMPT"):
        if [isinstance(value, str) for name, value in constants if name == wanted] != [True]:
            return tree, f"{wanted} must be set once, to a string constant"
    runs = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if len(runs) != 1 or len(runs[0].args.args) != 1 or not any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(runs[0])):
        return tree, "there must be one generator function run(task)"
    return tree, ""


def lint(tree: ast.Module) -> str:
    """The first thing in the file that a harness has no business with. A lint, not a wall: the sandbox is the wall.
    "The question" is what a task asks: its text, or its position."""
    imported, asked = set(), {"question"}                   # asked: names that stand for the question's text
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
            if not set(modules) <= set(ALLOWED_MODULES) or "*" in names:
                return f"line {node.lineno}: import of {', '.join(modules)} is not allowed"
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and root_of(node.value, asked) == "question":
            asked |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        line = f"line {getattr(node, 'lineno', 0)}: "
        if name.startswith("__") or isinstance(node, ast.Name) and name in FORBIDDEN_NAMES:
            return f"{line}{name} is not allowed"
        if isinstance(node, ast.Attribute | ast.Subscript) and root_of(node) in imported and (
                not isinstance(node.ctx, ast.Load) or name.startswith("_")):
            return f"{line}{root_of(node)} is shared among programs, so it must not be changed"
        tests = (
            [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else [node] if isinstance(node, ast.Compare)
            else [node.subject] if isinstance(node, ast.Match) else [node.slice] if isinstance(node, ast.Subscript)
            else node.args if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" else [])
        if any(root_of(part, asked) == "question" for test in tests for part in ast.walk(test)):
            return f"{line}a branch or look-up on the question's text"
    return ""


def root_of(node: ast.AST, asked: set[str] = frozenset()) -> str:
    """The name at the left end of a.b[c].d; with `asked`, "question" for task["question"] and the names in `asked`."""
    while node is not None and not isinstance(node, ast.Name):
        keys = [node.slice] if isinstance(node, ast.Subscript) else node.args[:1] if isinstance(node, ast.Call) else []
        if asked and len(keys) == 1 and constant_of(keys[0]) in ("question", "fen", "board"):
            return "question"
        node = getattr(node, "value", None) or (getattr(node, "func", None) if asked else None)     # f(a).b is not f's
    return "" if node is None else "question" if node.id in asked else node.id


def constant_of(node: ast.AST) -> str | bytes | float | None:
    """The value of a literal, of a sum or join of literals, or of an f-string with its fields left blank; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(constant_of(part) or " ") for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        glue, parts = "", [constant_of(node.left), constant_of(node.right)]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "join" and node.args:
        glue = constant_of(node.func.value)
        parts = [constant_of(part) for part in getattr(node.args[0], "elts", [None])]
    else:
        return None
    return glue.join(parts) if all(isinstance(part, str) for part in [glue, *parts]) else None


def find_literals(tree: ast.Module, forbidden: ForbiddenText) -> str:
    """Names of data sets, tables of answers, and questions among the constants, also where they are simply encoded.

    One number is nobody's secret (an answer may well be 256), so answers count as a table only: ANSWER_TABLE different
    constants, where a string counts if half of its pieces are answers. Numbers in prose, as in examples, do not count.
    """
    texts = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        codes = [constant_of(element) for element in getattr(node, "elts", [])]
        if codes and all(type(code) is int and 9 <= code < 0x110000 for code in codes):
            texts |= set(decodings("".join(map(chr, codes))))                       # a list of character codes
        value = constant_of(node)
        texts |= set(decodings(value.decode("latin-1") if isinstance(value, bytes) else str(value)))
    answers = set()
    for text in texts:
        named = (s for s in forbidden.sources if re.search(rf"(?<!\w){re.escape(s)}(?!\w)", text.casefold()))
        if found := DATA_NAMES.search(text) or next(named, ""):
            return f"names a data set or split: {str(found if isinstance(found, str) else found[0])!r}"
        pieces = [piece for piece in re.split(r"[\s,;:|/]+", text.casefold()) if piece]
        hits = forbidden.answers.intersection(pieces)
        if 2 * sum(piece in hits for piece in pieces) >= len(pieces):
            answers |= hits
        answers |= forbidden.answers & {text.casefold().strip()}                    # of several words
    if len(answers) >= ANSWER_TABLE:
        return f"holds a table of answers: {len(answers)} of its constants are answers"
    spans = {words[i:i + n] for words in map(words_of, texts) for n in range(5, QUESTION_WORDS + 1)
             for i in range(len(words) - n + 1)}
    n_questions = Counter(span for words in forbidden.questions for span in spans.intersection(
        words[i:i + QUESTION_WORDS] for i in range(max(1, len(words) - QUESTION_WORDS + 1))))
    rare = sorted(" ".join(span) for span, n in n_questions.items() if n <= COMMON)
    return f"holds the text of a question: {rare[0]!r}" if rare else ""


def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def decodings(text: str) -> Iterator[str]:
    """The text itself, and what it is when reversed or read as rot13, hex or base64."""
    yield text
    if len(text) >= 8:
        yield from (text[::-1], codecs.encode(text, "rot13"))
        for decode in (bytes.fromhex, lambda encoded: base64.b64decode(encoded, validate=True)):
            try:
                yield decode(text).decode()
            except ValueError:                              # as are binascii.Error and UnicodeDecodeError
                pass


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
        self.max_len = 1 << 30
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


def beyond_prompts(source: str, h0: str) -> str:
    """What in a harness differs from h0 but for the text of SYSTEM_PROMPT and USER_PROMPT (the rule of FST, Fast-Slow
    Training), by the syntax tree; "" if nothing. Comments, layout and the file's docstring are no difference."""
    rests = []
    for text in (source, h0):
        tree, why = parse_harness(text)
        if why:
            return why
        rest = []
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="SYSTEM_PROMPT" | "USER_PROMPT" as name)], value=value):
                    if text is source and not isinstance(value, ast.Constant):      # f"{(MAX_CALLS := 9)}" is one too
                        return f"line {node.lineno}: {name} must be one plain string"
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    rest.append(node)
        rests.append(rest)
    for node, other in zip_longest(*rests):
        if node is None or other is None or ast.dump(node) != ast.dump(other):
            where = f"line {node.lineno}" if node else "the end"
            return f"from {where} on it differs from h0 in more than SYSTEM_PROMPT and USER_PROMPT"
    return ""


@lru_cache(maxsize=1024)
def program_of(source: str) -> str:
    """What two files share that differ in comments, layout and docstring only."""
    tree, why = parse_harness(source)
    return ast.dump(ast.Module([n for n in tree.body if not isinstance(getattr(n, "value", n), ast.Constant)
                                or not isinstance(n, ast.Expr)], [])) if not why else source
