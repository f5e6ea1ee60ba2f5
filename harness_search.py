"""The harness phase: Meta-Harness (paper, section 3), a search over whole harness files by real rollouts.

An iteration asks a proposer for M candidates; each passes the gates or is refused, then gets one rollout on every
D_harness task, on seeds that all share. The best score is accepted; ties go to fewer model calls, then to the earlier.
The incoming harness is scored first, as iteration 1. The archive on disk is all that a proposer needs:

    h0/ h1/ ...         harness.py, proposal.json, traces.jsonl; then score.json or refused.json, which ends a candidate
    iteration_02.json   what was proposed, so that nothing is proposed twice
    history.jsonl       one row a candidate;  task.md: what a proposer is told;  accepted.txt: written last of all

The denominator is fixed before the run: `error` and `killed` count as 0, `infra` is run again. The gates stop mistakes
and plain cheating; what a harness cannot do at all is the business of the sandbox, which is the wall.

Differs from the paper:
- The embedded proposer is a rule-based stand-in for a coding agent: it counts the failures in the parent's traces and
  combines known mechanisms. A coding agent takes its place with the same `ProposalRequest`.
- The paper names no gates. Ours take two rollouts a candidate, counted apart from the training rollouts.
"""

import ast
import base64
import codecs
import hashlib
import json
import os
import random
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import harness_api
import rollout
from engine import Completion, SamplingParams
from envs import Task
from rollout import RolloutConfig, derive_seed
from sandbox import Sandbox


class SearchError(RuntimeError):
    """The search cannot go on; nothing is recorded as done that was not."""


@dataclass(frozen=True)
class Candidate:
    name: str                           # "h0" is the incoming harness; names are a cycle's own
    parent: str                         # the candidate that it was made from; "" for the incoming harness
    hypothesis: str                     # one falsifiable line
    mechanisms: tuple[str, ...]         # by name, where the proposer knows them
    source: str
    iteration: int


@dataclass(frozen=True)
class Score:
    mean: float
    ci95: tuple[float, float]           # bootstrap over tasks
    n: int
    n_ok: int
    n_error: int
    n_killed: int
    calls_a_rollout: float
    tok_a_rollout: float
    n_model_calls: int
    n_prompt_tok: int
    n_completion_tok: int
    n_tool_calls: int
    failures: dict[str, int]            # Trace.failure -> rollouts
    seconds: float
    harness_sha: str
    version: int                        # of the weights
    key: str                            # all that the score depends on; it is used again only where this is equal


@dataclass(frozen=True)
class Outcome:
    candidate: Candidate
    score: Score | None
    refused: str = ""                   # why a gate refused it
    gate_rollouts: int = 0              # of the model; rollouts of a scripted model cost no sampling
    gate_seconds: float = 0.0


@dataclass(frozen=True)
class ProposalRequest:
    folder: Path                        # the archive
    history: tuple[Outcome, ...]        # of this cycle, oldest first
    n_candidates: int                   # M
    seed: tuple[int | str, ...]
    domain: str


def bootstrap_ci(values: list[float], seed: int, n_resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of `values`, one value a task."""
    values = np.asarray(values, dtype=float)
    picks = np.random.Generator(np.random.Philox(seed)).integers(0, len(values), (n_resamples, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def select_best(outcomes: list[Outcome]) -> Outcome:
    """Highest mean; ties to fewer model calls, then to the earlier one."""
    return min((o for o in outcomes if o.score), key=lambda o: (-o.score.mean, o.score.calls_a_rollout))


# ---- the search -----------------------------------------------------------------------------------------------------


class Search:
    """One harness phase on disk. What is complete there is taken from there, so a resumed search repeats nothing.

    proposer: request -> 1 to M candidates, whose names and iterations are set here; what it raises is not caught.
    on_candidate(title, n_rollouts): a context manager that yields a function to call after each rollout.
    n_done: iterations whose outcomes the caller has already; `iterate` goes on after them.
    """

    def __init__(self, folder: Path, engine, env, sandbox: Sandbox, incumbent: Candidate, tasks: list[Task],
                 forbidden: "ForbiddenText", seed: tuple[int | str, ...], rollout_cfg: RolloutConfig, n_candidates: int,
                 proposer: Callable[[ProposalRequest], list[Candidate]], on_candidate: Callable | None = None,
                 n_done: int = 0):
        self.folder, self.engine, self.env, self.sandbox = Path(folder), engine, env, sandbox
        self.tasks, self.forbidden, self.seed, self.cfg = tasks, forbidden, seed, rollout_cfg
        self.n_candidates, self.proposer = n_candidates, proposer
        self.on_candidate = on_candidate or (lambda title, n_rollouts: nullcontext(lambda: None))
        self.incumbent = replace(incumbent, name="h0", parent="", iteration=1)
        self.version = engine.version                           # a phase scores one version of the weights
        self.outcomes: list[Outcome] = []
        self.n_iterations = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "task.md", task_text(env, tasks, rollout_cfg, n_candidates))
        for _ in range(n_done):
            self.iterate()

    def iterate(self) -> list[Outcome]:
        """One iteration: the first scores the incumbent, later ones propose M candidates, gate them and score them."""
        if self.engine.version != self.version:
            raise SearchError(f"the engine serves weights {self.engine.version}, this phase began on {self.version}")
        number = self.n_iterations + 1
        candidates = self._propose(number) if number > 1 else self._write([self.incumbent])
        outcomes = []
        for candidate in candidates:
            outcomes.append(self._load(candidate) or self._finish(candidate, self.outcomes + outcomes))
            rows = [history_row(outcome) for outcome in self.outcomes + outcomes]
            write_atomically(self.folder / "history.jsonl", "".join(rows))
        self.outcomes, self.n_iterations = self.outcomes + outcomes, number
        return outcomes

    def best(self) -> tuple[Candidate, Score]:
        outcome = select_best(self.outcomes)
        return outcome.candidate, outcome.score

    def accept(self) -> Candidate:
        """Ends the phase: h <- the archive's best. The marker is the last file that is written."""
        candidate, _ = self.best()
        write_atomically(self.folder / "accepted.txt", candidate.name + "\n")
        return candidate

    def _propose(self, number: int) -> list[Candidate]:
        """The candidates of an iteration: those on disk, else the proposer's."""
        marker = self.folder / f"iteration_{number:02d}.json"
        if marker.exists():
            return [self._read(name, sha) for name, sha in json.loads(marker.read_text()).items()]
        before = self._fingerprint()
        proposed = self.proposer(ProposalRequest(
            self.folder, tuple(self.outcomes), self.n_candidates, (*self.seed, "propose", number), self.env.name))
        after = self._fingerprint()
        if changed := [str(path) for path, sha in before.items() if after.get(path) != sha]:
            raise SearchError(f"the proposer changed {', '.join(changed)}: archive and scorer are not its to write")
        if not 1 <= len(proposed) <= self.n_candidates:
            raise SearchError(f"the proposer returned {len(proposed)} candidates, not 1 to {self.n_candidates}")
        candidates = self._write([
            replace(candidate, name=f"h{len(self.outcomes) + i}", iteration=number,
                    hypothesis=" ".join(candidate.hypothesis.split()),
                    source=candidate.source.encode("utf-8", "replace").decode())        # a lone surrogate is no source
            for i, candidate in enumerate(proposed)])
        write_atomically(marker, json.dumps({c.name: sha256(c.source) for c in candidates}) + "\n")
        return candidates

    def _fingerprint(self) -> dict[Path, str]:
        """What a proposer must leave alone: our own code and the archive so far."""
        paths = [*Path(__file__).parent.glob("*.py"), *self.folder.rglob("*.*")]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}

    def _write(self, candidates: list[Candidate]) -> list[Candidate]:
        for candidate in candidates:
            folder, proposal = self.folder / candidate.name, asdict(candidate)
            folder.mkdir(exist_ok=True)
            write_atomically(folder / "harness.py", proposal.pop("source"))
            write_atomically(folder / "proposal.json", json.dumps(proposal, indent=1) + "\n")
        return candidates

    def _read(self, name: str, sha: str) -> Candidate:
        source = (self.folder / name / "harness.py").read_bytes().decode("utf-8", "replace")
        if sha256(source) != sha:
            raise SearchError(f"{self.folder / name / 'harness.py'} was changed after it was proposed")
        proposal = json.loads((self.folder / name / "proposal.json").read_text(encoding="utf-8"))
        return Candidate(**proposal | {"mechanisms": tuple(proposal["mechanisms"]), "source": source})

    def _finish(self, candidate: Candidate, earlier: list[Outcome]) -> Outcome:
        """Gates and scores a candidate, and writes what came of it with the marker last."""
        started, folder = time.monotonic(), self.folder / candidate.name
        refused, n_rollouts = ("", 0) if candidate.name == "h0" else self._gate(candidate, earlier)
        gates = {"gate_rollouts": n_rollouts, "gate_seconds": time.monotonic() - started}
        if refused:
            record = {"refused": refused, "key": self.score_key(candidate), **gates}
            write_atomically(folder / "refused.json", json.dumps(record, indent=1) + "\n")
            return Outcome(candidate, None, refused, **gates)
        with self.on_candidate(f"scoring {candidate.name}", len(self.tasks)) as advance:
            started = time.monotonic()
            traces = rollout.run(self.engine, self.env, self.sandbox, candidate.source, self.tasks, 1,
                                 (*self.seed, "score"), self.cfg, lambda trace: advance())
        score = self._score(candidate, traces, time.monotonic() - started)
        write_atomically(folder / "traces.jsonl", "".join(json.dumps(trace.to_json()) + "\n" for trace in traces))
        write_atomically(folder / "score.json", json.dumps(asdict(score) | gates, indent=1) + "\n")
        return Outcome(candidate, score, **gates)

    def _gate(self, candidate: Candidate, earlier: list[Outcome]) -> tuple[str, int]:
        """-> why it is refused, "" if it is not; and how many rollouts of the model it took to tell."""
        if not any(o.score and o.candidate.name == candidate.parent for o in earlier):
            return f"its parent {candidate.parent!r} is no scored candidate of this archive", 0
        for outcome in earlier:
            if program_of(outcome.candidate.source) == program_of(candidate.source):
                return f"it is the same program as {outcome.candidate.name}", 0
        probes = check_harness(candidate.source, self.env, self.engine, self.sandbox, self.tasks, self.forbidden,
                               self.cfg, (*self.seed, "gate"))
        return "; ".join(f"{p.name}: {p.why}" for p in probes if not p.passed), sum(p.n_rollouts for p in probes)

    def _score(self, candidate: Candidate, traces: list[rollout.Trace], seconds: float) -> Score:
        n, rewards = len(self.tasks), [trace.reward for trace in traces]
        statuses = Counter(trace.status for trace in traces)
        n_calls, n_tok = sum(len(trace.calls) for trace in traces), sum(trace.n_tok for trace in traces)
        failures = Counter(trace.failure for trace in traces if trace.failure != "solved")
        return Score(
            mean=sum(rewards) / n, ci95=bootstrap_ci(rewards, derive_seed(*self.seed, "bootstrap")), n=n,
            n_ok=statuses["ok"], n_error=statuses["error"], n_killed=statuses["killed"],
            calls_a_rollout=n_calls / n, tok_a_rollout=n_tok / n, n_model_calls=n_calls,
            n_prompt_tok=sum(trace.n_prompt_tok for trace in traces), n_completion_tok=n_tok,
            n_tool_calls=sum(trace.n_tool_calls for trace in traces), failures=dict(sorted(failures.items())),
            seconds=seconds, harness_sha=sha256(candidate.source), version=self.version, key=self.score_key(candidate))

    def score_key(self, candidate: Candidate) -> str:
        settings = {key: value for key, value in asdict(self.cfg).items() if key != "n_workers"}    # changes no result
        tasks = [[task.id, task.fields, task.answer] for task in self.tasks]
        return sha256(json.dumps([candidate.source, self.version, self.env.name, tasks, self.seed, settings]))

    def _load(self, candidate: Candidate) -> Outcome | None:
        """A finished candidate's outcome, if it was made from this source under these settings."""
        for path in (self.folder / candidate.name / "score.json", self.folder / candidate.name / "refused.json"):
            record = json.loads(path.read_text()) if path.exists() else {}
            if record.get("key") == self.score_key(candidate):
                gates = {key: record.pop(key) for key in ("gate_rollouts", "gate_seconds")}
                if "refused" in record:
                    return Outcome(candidate, None, record["refused"], **gates)
                return Outcome(candidate, Score(**record | {"ci95": tuple(record["ci95"])}), **gates)
        return None


def history_row(outcome: Outcome) -> str:
    """A candidate's row of history.jsonl. No seconds, so that a resumed search writes the same rows."""
    row = asdict(outcome.candidate) | (asdict(outcome.score) if outcome.score else {}) | {"refused": outcome.refused}
    return json.dumps({key: value for key, value in row.items() if key not in ("source", "seconds", "key")}) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """A kill at any moment leaves the old file or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def task_text(env, tasks: list[Task], cfg: RolloutConfig, n_candidates: int) -> str:
    return f"""# Your task: better harnesses for `{env.name}`

A harness is the program around a fixed model. Write {n_candidates} new ones: complete Python files, each with the name
of its parent and a hypothesis, one line that counted failures could prove wrong. Each is scored by one rollout on each
of {len(tasks)} tasks. The best mean reward is kept, ties go to fewer model calls.

Read `history.jsonl` (one row a candidate) and, of each candidate, `harness.py`, `score.json` or `refused.json` (why a
gate refused it), and `traces.jsonl`: a row a rollout, with every request and result, the verdict and one word for the
kind of failure. Write to none of these files, nor to the program that runs you.

What is graded: {env.__doc__} The verifier sees the model's last reply alone.
Budgets, which no harness can raise: {cfg.max_calls} model calls and {cfg.max_assistant_tok} sampled tokens a rollout,
{cfg.harness_limits.seconds:g} s between two requests, {MAX_SOURCE_BYTES:,} bytes of source.

Refused before scoring: files that hold questions, answers or names of data sets, that branch on a question's text or
solve the task themselves, that score with a model that knows nothing, that fail on the first tasks, and any program
that was tried before. The contract:

{harness_api.__doc__}"""


# ---- gates ----------------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class Probe:
    name: str
    passed: bool
    why: str = ""
    n_rollouts: int = 0                 # of the model


class ForbiddenText:
    """What no harness may hold, from the tasks of all splits."""

    def __init__(self, tasks: list[Task]):
        self.questions = [words_of(text) for task in tasks for text in task.fields.values()]
        self.answers = {task.answer.strip().casefold() for task in tasks if len(task.answer.strip()) > 1}
        self.sources = {task.source.casefold() for task in tasks if re.search(r"[\d_-]", task.source)}  # no plain words


def check_harness(source: str, env, engine, sandbox: Sandbox, tasks: list[Task], forbidden: ForbiddenText,
                  cfg: RolloutConfig, seed: tuple[int | str, ...]) -> list[Probe]:
    """The gates in order, up to the first that refuses. `tasks`: a few of the domain's."""
    probes = []

    def passes(name: str, why: str, n_rollouts: int = 0) -> bool:
        probes.append(Probe(name, not why, why, n_rollouts))
        return not why

    tree, why = parse_harness(source)
    if not (passes("contract", why) and passes("lint", lint(tree))
            and passes("literals", find_literals(tree, forbidden))):
        return probes
    some = ([task for task in tasks if task.answer not in source] or tasks)[:N_PROBE_TASKS]      # no hit by chance
    generous = replace(cfg, max_assistant_tok=1_000_000)                # an echo must not be cut before it is graded
    for name, model in null_models(env, some):
        scripted = ScriptedEngine(engine.tokenizer, model)
        traces = rollout.run(scripted, env, sandbox, source, some, 1, (*seed, name), generous)
        n_solved = sum(trace.reward > 0.5 for trace in traces)
        if not passes(f"null model: {name}", f"solves {n_solved} of {len(some)} tasks" if n_solved else ""):
            return probes
    traces = rollout.run(engine, env, sandbox, source, tasks[:2], 1, (*seed, "real"), cfg)
    passes("first tasks", next((f"{t.status}: {t.end}" for t in traces if t.status != "ok"), ""), len(traces))
    return probes


def parse_harness(source: str) -> tuple[ast.Module, str]:
    """-> syntax tree, and what the contract misses in it ("" if nothing)."""
    if (n_bytes := len(source.encode())) > MAX_SOURCE_BYTES:
        return ast.Module([], []), f"{n_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed"
    try:
        tree = ast.parse(source)
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
    """The first thing in the file that a harness has no business with. A lint, not a wall: the sandbox is the wall."""
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
        if asked and [constant_of(key) for key in keys] == ["question"]:
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
        if found := DATA_NAMES.search(text) or next((s for s in forbidden.sources if s in text.casefold()), ""):
            return f"names a data set or split: {str(found if isinstance(found, str) else found[0])!r}"
        pieces = [piece for piece in re.split(r"[\s,;:|/]+", text.casefold()) if piece]
        hits = forbidden.answers.intersection([text.casefold().strip(), *pieces])
        if 2 * sum(piece in hits for piece in pieces) >= len(pieces):
            answers |= hits
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
    yield "copy", copy                                      # takes the last number that the harness put into the prompt
    yield "spray", lambda prompt: " ".join([*(box(task.answer) for task in tasks), box("987654321")])


class ScriptedEngine:
    """The Engine contract over a function from prompt to reply."""

    def __init__(self, tokenizer, model: Callable[[str], str]):
        self.tokenizer, self.model, self.version = tokenizer, model, -1
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


def program_of(source: str) -> str:
    """What two files share that differ in comments, layout and docstring only."""
    tree, why = parse_harness(source)
    return ast.dump(ast.Module([n for n in tree.body if not isinstance(getattr(n, "value", n), ast.Constant)
                                or not isinstance(n, ast.Expr)], [])) if not why else source


# ---- the rules proposer: a stand-in for a coding agent ---------------------------------------------------------------


@dataclass(frozen=True)
class Mechanism:
    """One thing that a harness can do about some kinds of failure (words of Trace.failure)."""
    name: str
    cures: str
    claim: str                          # for the hypothesis: "<counted failures>; <claim>, at most half as many will"
    n_extra_calls: int = 0              # model calls that it needs beyond h0's two
    group: str = ""                     # a harness has at most one mechanism of a group


SAID = {
    "call_limit": "were still calling the tool at the end", "malformed_call": "ended in a malformed call",
    "no_answer": "gave no readable answer and no call", "no_tool_wrong_answer": "were wrong without the tool",
    "no_answer_after_tool": "gave no readable answer after an output", "wrong_answer": "were wrong after an output",
    "tool_error": "were wrong after code that failed"}
MATH_MECHANISMS = (
    Mechanism("calls_4", "call_limit", "4 model calls", group="calls"),
    Mechanism("calls_6", "call_limit", "6 model calls", group="calls"),
    Mechanism("calls_3", "call_limit", "3 model calls", group="calls"),
    Mechanism("repair_call", "malformed_call", "malformed calls sent back in words", 1),
    Mechanism("ask_for_tool", "no_tool_wrong_answer no_answer", "the tool asked for if the first reply has no call", 1),
    Mechanism("careful_reminder", "no_answer_after_tool wrong_answer",
              "a turn after each output that says to go on or else to box the answer", 1, "reminder"),
    Mechanism("careful_reminder_in_output", "no_answer_after_tool wrong_answer",
              "a line in each output that says to go on or else to box the answer", 1, "reminder"),
    Mechanism("blunt_reminder", "no_answer_after_tool",
              "a turn after each output that says to box the answer", group="reminder"),
    Mechanism("blunt_reminder_in_output", "no_answer_after_tool",
              "a line in each output that says to box the answer", group="reminder"),
    Mechanism("ask_for_box", "no_answer_after_tool no_answer", "a missing box asked for once", 1),
    Mechanism("explain_error", "tool_error", "a turn that says so when the code failed", 1),
    Mechanism("system_tool", "no_tool_wrong_answer no_answer", "a system prompt that asks for the tool"),
    Mechanism("checklist", "wrong_answer no_answer_after_tool", "a checklist below the question"),
    Mechanism("steps", "wrong_answer", "one step a call asked for", 1),
)
CAREFUL = "If more steps are needed, call the python tool again; otherwise give the final answer in \\boxed{}."
BLUNT = "Now give the final answer in \\boxed{}."
# What to say to a reply without a well-formed call: mechanism -> constant, text, when.
ANSWERS = {
    "repair_call": ("REPAIR", "The tool call could not be read. Send it again as valid JSON.",
                    '"<tool_call>" in reply.content:                      # a call that could not be read'),
    "ask_for_tool": ("ASK_FOR_TOOL", "Please use the python tool to compute.", "turn == 0:"),
    "ask_for_box": ("ASK_FOR_BOX",
                    "If you are not done, go on with the next step; otherwise give the final answer in \\boxed{}.",
                    '"\\\\boxed{" not in reply.content and messages[-2]["content"] != ASK_FOR_BOX:    # once'),
}


def render_math(has: frozenset[str], heading: str) -> str:
    """The harness file that has these mechanisms; with none of them it is h0."""
    answers = [answer for name, answer in ANSWERS.items() if name in has]
    reminders = [name for name in has if "reminder" in name]
    lines = (["Use the python tool for every calculation."] * ("checklist" in has)
             + ["Work step by step, one tool call for each step."] * ("steps" in has)
             + ["Put your final answer in \\boxed{{}}."])
    constants = {
        "SYSTEM_PROMPT": "Always use the python tool to compute." if "system_tool" in has else "",
        "USER_PROMPT": "{question}\n\n" + ("- " + "\n- ".join(lines) if "checklist" in has else " ".join(lines)),
        "MAX_CALLS": n_calls(has), **{constant: text for constant, text, _ in answers}}
    if reminders:
        constants["REMINDER"] = CAREFUL if "careful" in reminders[0] else BLUNT
    if "explain_error" in has:
        constants["ERROR"] = "The code failed. Fix the error and call the python tool again."

    branches = "".join(f'            {"elif" if i else "if"} {test}\n                messages += chat("", {constant})\n'
                       for i, (constant, _, test) in enumerate(answers))
    ending = "            return"
    if answers:
        ending = branches + "            else:\n                return\n            continue"
    output, after = "output", ""
    if "ERROR" in constants:
        after = '        if not output.ok:\n            messages += chat("", ERROR)\n'
    if reminders and "in_output" in reminders[0]:
        output = 'f"{output}\\n\\n{REMINDER}"' + (" if output.ok else output" if after else "")
    elif reminders:
        after += ("        else:\n    " if after else "") + '        messages += chat("", REMINDER)\n'
    assignments = "\n".join(f"{name} = {json.dumps(value)}" for name, value in constants.items())
    return f'''"""{heading}"""

from harness_api import PYTHON, chat, generate, python, tool_result

{assignments}


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    for {"turn" if "ask_for_tool" in has else "_"} in range(MAX_CALLS):
        reply = yield generate(messages, tools=[PYTHON])
        messages.append(reply.message)
        if not reply.tool_calls:
{ending}
        for call in reply.tool_calls:
            output = yield python(call.arguments.get("code", ""))
            messages.append(tool_result(call, {output}))
{after}'''


DOMAINS = {"math": (MATH_MECHANISMS, render_math)}


def n_calls(has: frozenset[str]) -> int:
    return next((int(name[6:]) for name in has if name.startswith("calls_")), 2)


def add_mechanisms(base: frozenset[str], added: list[str], known: dict[str, Mechanism]) -> frozenset[str]:
    """The base with these in it, one of a group, and with the model calls that they need."""
    has = set(base)
    for name in added:
        has = {other for other in has if not known[name].group or known[other].group != known[name].group} | {name}
    needed = min(6, 2 + sum(known[name].n_extra_calls for name in has))
    if n_calls(has) < needed:
        has = {name for name in has if known[name].group != "calls"} | {f"calls_{needed + (needed == 5)}"}
    return frozenset(has)


def propose_by_rules(request: ProposalRequest) -> list[Candidate]:
    """M new harnesses from the archive's best, deterministic for a seed. Each slot takes the mechanism for the kinds of
    failure that are most frequent in the best's traces and that no earlier slot took up; the last combines several."""
    mechanisms, render = DOMAINS[request.domain]
    known = {mechanism.name: mechanism for mechanism in mechanisms}
    cures = {mechanism.name: set(mechanism.cures.split()) for mechanism in mechanisms}
    best, rng = select_best(list(request.history)), random.Random(derive_seed(*request.seed))
    parent = best.candidate
    rows = (request.folder / parent.name / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    failures = Counter(json.loads(row)["failure"] for row in rows)
    base, origin = frozenset(parent.mechanisms), ""
    if not base <= known.keys() or program_of(render(base, "")) != program_of(parent.source):
        base, origin = frozenset(), f"(from h0's structure, as the mechanisms of {parent.name} are not known) "
    scored = {o.candidate.name: (set(o.candidate.mechanisms), o.score.mean) for o in request.history if o.score}
    tried = [(*scored[o.candidate.parent], *scored[o.candidate.name])
             for o in request.history if o.score and o.candidate.parent]
    no_help = set().union(*(after - before for before, old_mean, after, new_mean in tried if new_mean <= old_mean))

    def rank(chosen: set[str]) -> list[str]:
        """What could be added to the base and to `chosen`, by how many rollouts failed in ways that it addresses and
        they do not. Where it has not helped so far, they count half."""
        covered = set().union(*(cures[name] for name in chosen))
        weights = {name: sum(failures[word] for word in cures[name] - covered) / (2 if name in no_help else 1)
                   for name in known}
        groups = {known[name].group or name for name in chosen}
        return sorted((name for name in known if name not in base and (known[name].group or name) not in groups),
                      key=weights.get, reverse=True)                # stable: ties in the order of the table

    def fills(slot: int) -> Iterator[tuple[list[str], list[str]]]:
        """(added, removed) mechanisms for a slot, the most wanted first."""
        if slot < request.n_candidates - 1:
            if slot == request.n_candidates - 2 and base and len(request.history) > 6 and rng.random() < 0.5:
                yield [], [rng.choice(sorted(base))]                # later on: does something not earn its place?
            yield from (([name], []) for name in rank(used))
        several: list[str] = []
        for _ in range(4):
            several += rank(set(several))[:1]
        yield from ((several[:n], []) for n in (3, 2, 4))
        for _ in range(1000):
            yield rng.sample(list(known), rng.randint(2, 5)), []

    def explain(added: list[str], removed: list[str]) -> str:
        """A hypothesis that the counts in the new candidate's score.json can prove wrong."""
        cited = {word: failures[word] for word in SAID if failures[word] and any(word in cures[name] for name in added)}
        claim = ", ".join([f"without {name}" for name in removed] + [f"with {known[name].claim}" for name in added])
        if removed or sum(cited.values()) < 2:
            goal = "does not fall below" if removed else "rises above"
            return f"{origin}{claim}, the mean reward {goal} {best.score.mean:.3f}"
        counts, half = ", ".join(f"{n} {SAID[word]}" for word, n in cited.items()), sum(cited.values()) // 2
        return f"{origin}of {len(rows)} rollouts of {parent.name}, {counts}; {claim}, at most {half} will"

    taken = {program_of(outcome.candidate.source) for outcome in request.history}
    used: set[str] = set()                                          # mechanisms that this iteration has tried
    candidates = []
    for slot in range(request.n_candidates):
        for added, removed in fills(slot):
            has = add_mechanisms(base - set(removed), added, known)
            changed = [name for name in known if name in has - base]
            hypothesis = explain(changed, removed)
            source = render(has, textwrap.fill(f"From {parent.name} by rule: {hypothesis}.", 116))
            if program_of(source) not in taken:
                taken.add(program_of(source))
                used |= set(changed)
                candidates.append(Candidate("", parent.name, hypothesis, tuple(sorted(has)), source, 0))
                break
    return candidates
