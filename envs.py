r"""The environments: how a domain reads its data, what its tools do, and the verifier that decides R(x, tau).

A domain is one class here and one h0 file; `Env` says what it must have and what it inherits.

- math: the last `\boxed{}` of the model's last message equals the reference (math_answer.py).
- search: the last `<answer>` of it equals one of the references after normalisation (search_answer.py).
- chess: the whole line of the puzzle was played on the board, one move a reply (chess_game.py).
"""

import random
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from sys import getsizeof

import chess_game
import math_answer
import twins
from retriever import RetrieverDown, cut_text, open_retriever
from search_answer import Judge, golds_of, last_answer, normalise, read_golds, same_answer
from files import refuse_special
from tasks import DataError, Row, Task, ToolUse, Verdict, load_tasks, read_rows


ROOT = Path(__file__).resolve().parent
MAX_FOUND, MAX_FOUND_BYTES = 20_000, 256 << 20      # searches that are remembered, and the bytes that they found
MAX_TITLE_CHARS = 1000


class Env(ABC):
    """What every domain has. A new one sets `name` and `h0`, and writes `read`, `perfect_reply` and `verify`; with
    tools of its own, also `use_tools`."""
    name: str
    h0: Path                                            # the harness file to start from
    tools: tuple[str, ...] = ()                         # request types beside "generate"; "python" is the sandbox's
    files: tuple[Path, ...] = ()                        # beside the tasks, what results depend on
    judge: Judge | None = None                          # a second opinion where the verifier has one
    lucky_frac: float = 0.0                             # of tasks that a model of no knowledge may solve by chance
    by_state: bool = False                              # graded is what the tools remember, not the last reply alone

    def load(self, path: str | Path) -> list[Task]:
        return load_tasks(path, self)

    @abstractmethod
    def read(self, row: Row, stem: str) -> Task:
        """One row of a data file; `stem` names the file in ids. A DataError where the row is broken."""

    def read_case(self, row: Row) -> Task:
        """One row of a file of verifier cases."""
        return Task(row.text("id", or_number=True), {}, row.text("reference", or_number=True), "case")

    @abstractmethod
    def perfect_reply(self, task: Task) -> str:
        """A reply that the verifier must find right."""

    def find_fault(self, task: Task) -> str:
        """Why no reply could meet the reference; "" if one does."""
        right = self.verify(task, self.perfect_reply(task)).reward
        return "" if right else f"{str(task.answer)[:80]!r} does not verify against itself"

    def twin(self, task: Task, others: list[Task], rng: random.Random) -> Task | None:
        """The same task in other words: as hard, with its own reference; None where there is no way. It keeps the id,
        and so the seeds. `others`: tasks from which it may take its words."""
        question = task.fields.get("question")
        return question and replace(task, fields=task.fields | {"question": twins.reword(question, rng)})

    def open(self) -> None:
        """Makes ready, or refuses, what the tools need, before a model is loaded."""
        return None

    def start(self, task: Task) -> tuple[object, dict[str, str]]:
        """-> what a rollout's tools remember (None: nothing), and what the harness's run(task) gets."""
        return None, task.fields

    def use_tools(self, uses: list[ToolUse], tokenizer) -> list[dict]:
        """Results in order: {"output": str, "ok": bool, "details": plain JSON for the harness}, and for the host "end":
        why the rollout is over, or "infra": what of our own machinery failed. All requests of a moment in one call."""
        raise TypeError(f"{type(self).__name__} has tools, {', '.join(self.tools)}, so it must write use_tools")

    def count(self, task: Task, events: list[dict]) -> dict[str, tuple[int, int]]:
        """Diagnostics of one rollout, rate -> (hits, of how many): what the reward alone does not tell."""
        return {}

    @abstractmethod
    def verify(self, task: Task, reply: str | None, state: object = None) -> Verdict:
        """Grades the model's last message, raw text; None if there is none."""


class MathEnv(Env):
    """Word and competition problems; a stateless Python tool; the answer in a box, in the model's last reply."""
    name = "math"
    h0 = ROOT / "harnesses" / "h0_math.py"
    tools = ("python",)
    foreign_instructions = (                            # of DAPO, DAPO, DeepScaleR; a harness words its own format line
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.",
        'Remember to put your answer on its own line after "Answer:".',
        r"Let's think step by step and output the final answer within \boxed{}.",
    )

    def read(self, row: Row, stem: str) -> Task:
        """One row; its columns tell the format: verl (DAPO, DeepScaleR), SVAMP, MATH, AIME, or WHALE, GSM8K, MAWPS."""
        if "prompt" in row.cells:
            match row.get("prompt"):
                case [{"content": str(question)}]:
                    for sentence in self.foreign_instructions:
                        question = question.removeprefix(sentence).removesuffix(sentence).strip()
                case _:
                    raise row.error("prompt", "must be a list of one message with a text as content")
            answer = row.text("reward_model.ground_truth", or_number=True, or_empty=True)
        elif "Body" in row.cells:
            question, answer = f"{row.text('Body')} {row.text('Question')}", row.text("Answer", or_number=True)
        else:
            question = row.text(next((key for key in ("problem", "Problem") if key in row.cells), "question"))
            answer = row.text("Answer" if "Answer" in row.cells else "answer", or_number=True)
            answer = answer.rpartition("####")[2].strip()                                # GSM8K's mark
        if not question or not answer and "prompt" not in row.cells:
            raise row.error("answer" if question else "prompt", "is empty but for the format")
        return Task(task_id(row, stem), {"question": question}, answer, task_source(row, stem))

    def read_case(self, row: Row) -> Task:
        case = super().read_case(row)
        if len(case.answer) > math_answer.MAX_ANSWER_CHARS:     # no box may be as long; to read it could take hours
            raise row.error("reference", f"is longer than {math_answer.MAX_ANSWER_CHARS} characters")
        return case

    def perfect_reply(self, task: Task) -> str:
        return rf"\boxed{{{task.answer}}}"

    def twin(self, task: Task, others: list[Task], rng: random.Random) -> Task | None:
        """Other people; where there are none, another wording."""
        questions = tuple(other.fields["question"] for other in others)
        renamed = twins.rename_people(task.fields["question"], task.answer, questions, rng)
        return replace(task, fields={"question": renamed}) if renamed else super().twin(task, others, rng)

    def verify(self, task: Task, reply: str | None, state: object = None) -> Verdict:
        """The rules of equality are math_answer.py's."""
        if not reply:
            return Verdict(0.0, "there is no reply", None)
        reply = reply.encode("utf-8", "backslashreplace").decode()                       # no lone surrogate into a log
        reply = reply.rpartition("</think>")[2].partition("<think>")[0]
        boxed = math_answer.last_box(re.sub(r"<tool_call>.*?(?:</tool_call>|\Z)", " ", reply, flags=re.DOTALL))
        if boxed is None:
            return Verdict(0.0, r"no \boxed{} outside of thinking and tool calls, or the last one is not closed", None)
        if not boxed.strip() or len(boxed) > math_answer.MAX_ANSWER_CHARS:
            limit = math_answer.MAX_ANSWER_CHARS
            return Verdict(0.0, f"the last box is empty or longer than {limit} characters", boxed[:200])
        if math_answer.same_answer(task.answer, boxed):
            return Verdict(1.0, "the boxed answer is right", boxed[:200])
        return Verdict(0.0, f"boxed {boxed.strip()[:60]!r}, which is not the reference", boxed[:200])


class SearchEnv(Env):
    """Questions of fact; a search tool; the answer in `<answer>` tags, in the model's last reply."""
    name = "search"
    h0 = ROOT / "harnesses" / "h0_search.py"
    tools = ("search",)
    corpus = ROOT / "embedded" / "search" / "corpus.jsonl"

    def __init__(self, retriever: str = "", judge: Judge | None = None):
        """`retriever`: URLs of servers, or a corpus file; "" is the embedded corpus, read on first use."""
        self.spec, self.retriever, self.judge = retriever or str(self.corpus), None, judge
        if self.spec.startswith(("http://", "https://")):
            self.retriever = open_retriever(self.spec)  # asks nothing yet
        else:
            self.files = (Path(self.spec),)
            refuse_special(self.spec)
            self.files[0].open().close()
        self.found: dict[tuple[int, str], list] = {}    # (topk, query) -> documents: the samples of a task ask the same
        self.n_found_bytes = 0

    def read(self, row: Row, stem: str) -> Task:
        """One row of Search-R1's, FlashRAG's, NQ-open, TriviaQA, PopQA, HotpotQA, 2Wiki, MuSiQue or Bamboogle files."""
        try:
            golds = golds_of(row.cells)
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None
        return Task(task_id(row, stem), {"question": row.text("question")}, golds, task_source(row, stem))

    def read_case(self, row: Row) -> Task:
        try:
            return Task(row.text("id", or_number=True), {}, read_golds(row.get("reference")), "case")
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None

    def perfect_reply(self, task: Task) -> str:
        return f"<answer>{task.answers[0]}</answer>"

    def start(self, task: Task) -> tuple[list[str], dict[str, str]]:
        return [], task.fields                          # the passages that this rollout has seen

    def open(self) -> None:
        """RetrieverDown or JudgeDown if a server does not answer."""
        self.retriever = self.retriever or open_retriever(self.spec)
        self.retriever.search(["a question"], 1)
        if self.judge:
            self.judge.check()

    def use_tools(self, uses: list[ToolUse], tokenizer) -> list[dict]:
        self.retriever = self.retriever or open_retriever(self.spec)
        if len(self.found) > MAX_FOUND or self.n_found_bytes > MAX_FOUND_BYTES:
            self.found.clear()
            self.n_found_bytes = 0
        new = {(use.request["topk"], use.request["query"]) for use in uses} - self.found.keys()
        self.n_found_bytes += sum(getsizeof(query) for _, query in new)                 # a megabyte, if a harness likes
        self.found |= {key: [] for key in new if not key[1].strip()}                    # nobody is asked for nothing
        new = sorted(new - self.found.keys())
        for topk in sorted({topk for topk, _ in new}):
            queries = [query for k, query in new if k == topk]
            try:
                results = self.retriever.search(queries, topk)
            except RetrieverDown as error:
                return [{"infra": f"retriever: {error}"}] * len(uses)
            self.found |= {(topk, query): found for query, found in zip(queries, results, strict=True)}
            self.n_found_bytes += sum(getsizeof(d.text) + getsizeof(d.title) for found in results for d in found)
        return [self._show(use, tokenizer) for use in uses]

    def _show(self, use: ToolUse, tokenizer) -> dict:
        """The passages as text, each cut to the tokens that were asked for, in the policy's own tokens."""
        documents = []
        for found in self.found[use.request["topk"], use.request["query"]]:
            text = cut_text(found.text, use.request["max_tokens"], tokenizer)
            title = found.title[:MAX_TITLE_CHARS] + " ..." * (len(found.title) > MAX_TITLE_CHARS)
            documents.append({"title": title, "text": text + " ..." * (text != found.text)})
        output = "\n".join(f"[{i}] {d['title']}: {d['text']}" for i, d in enumerate(documents, start=1))
        use.state.extend([passage for document in documents for passage in document.values()] or [""])     # a search
        return {"output": output or "No passage found.", "ok": bool(documents), "details": {"documents": documents}}

    def count(self, task: Task, events: list[dict]) -> dict[str, tuple[int, int]]:
        found = [passage for event in events if event["request"]["type"] == "search"
                 for document in event["result"]["details"]["documents"] for passage in document.values()]
        return {"retrieval_hit": (int(holds_answer(found, task.answers)), 1)}

    def verify(self, task: Task, reply: str | None, state: list[str] | None = None) -> Verdict:
        answer = last_answer(reply or "")
        if answer is None:
            why = "no closed <answer> outside of thinking and tool calls" if reply else "there is no reply"
            return Verdict(0.0, why, None)
        said = repr(answer.strip()[:60])
        if same_answer(task.answers, answer):
            return Verdict(1.0, f"answered {said}, which is right", answer[:200])
        if self.judge and self.judge.same(task.fields.get("question", ""), task.answers, answer):
            return Verdict(1.0, f"answered {said}, which the judge calls right", answer[:200])
        missing = bool(state) and not holds_answer(state, task.answers)
        return Verdict(0.0, f"answered {said}, which is not the reference"
                       + "; no passage that was found holds the reference" * missing, answer[:200],
                       "not_retrieved" if missing else "")


class ChessEnv(Env):
    """Puzzles on a board: the harness hands over one move a model reply; the whole line must be played, and every move
    of it must stand in the model's reply of that turn."""
    lucky_frac = 0.25                                   # some moves mate by chance
    by_state = True
    name = "chess"
    h0 = ROOT / "harnesses" / "h0_chess.py"
    tools = ("move",)

    def read(self, row: Row, stem: str) -> Task:
        """One row of Lichess's table (FEN and Moves, of which the first is the opponent's) or of WHALE's own files: the
        same in lower case; with `answer` in place of `moves`, the line begins with an own move."""
        cells = {key.lower(): value for key, value in row.cells.items()}
        row = Row(row.where, row.number, cells)
        fen = row.text("fen")
        moves = row.get("answer" if "answer" in cells else "moves")
        moves = moves.split() if isinstance(moves, str) else moves
        if not isinstance(moves, list) or not moves or not all(isinstance(move, str) for move in moves):
            raise row.error("moves", "must be moves in UCI, as one text or a list")
        trigger, line = (None, moves) if "answer" in cells else (moves[0], moves[1:])
        if fault := chess_game.check_line(fen, trigger, line):
            raise row.error("moves", f"cannot be played: {fault}")
        return Task(task_id(row, stem), {"fen": fen, "trigger": trigger or ""}, " ".join(line), task_source(row, stem))

    def read_case(self, row: Row) -> Task:
        line = row.text("reference").split()
        if fault := chess_game.check_line(row.text("fen"), None, line):
            raise row.error("reference", fault)
        return Task(row.text("id", or_number=True), {"fen": row.text("fen"), "trigger": ""}, " ".join(line), "case")

    def perfect_reply(self, task: Task) -> str:
        return f"<move>{task.answer.split()[0]}</move>" if task.answer else ""

    def find_fault(self, task: Task) -> str:
        return ""                                       # `read` has played the line

    def start(self, task: Task) -> tuple[chess_game.Game, dict[str, str]]:
        game = chess_game.Game(task.fields["fen"], task.fields["trigger"] or None, task.answer.split())
        return game, game.observation()

    def twin(self, task: Task, others: list[Task], rng: random.Random) -> Task:
        """The other colour's puzzle."""
        fen, trigger, line = twins.mirror_puzzle(task.fields["fen"], task.fields["trigger"], task.answer.split())
        return replace(task, fields={"fen": fen, "trigger": trigger}, answer=" ".join(line))

    def use_tools(self, uses: list[ToolUse], tokenizer) -> list[dict]:
        return [use.state.play(use.request["uci"], use.reply, use.turn) for use in uses]

    def count(self, task: Task, events: list[dict]) -> dict[str, tuple[int, int]]:
        tries = [event["result"]["details"]["status"] for event in events if event["request"]["type"] == "move"]
        return {"legal_move": (sum(status in ("accepted", "solved", "wrong") for status in tries),
                               sum(status not in ("unsaid", "over") for status in tries))}

    def verify(self, task: Task, reply: str | None, state: chess_game.Game | None = None) -> Verdict:
        """Of the game that was played; without one, the last move of the reply alone is played."""
        if state is None:
            return chess_game.grade_reply(task.fields["fen"], task.answer.split(), reply)
        return state.verdict(reply)


def holds_answer(passages: list[str], answers: tuple[str, ...]) -> bool:
    """Whether one of the answers stands in the passages, both normalised, as whole words."""
    seen = [f" {normalise(passage)} " for passage in passages]
    return any(f" {normalise(gold)} " in passage for passage in seen for gold in answers)


ENVS = {env.name: env for env in (MathEnv, SearchEnv, ChessEnv)}


def task_id(row: Row, stem: str) -> str:
    """The row's id. A bare number would collide with those of other files, so the file's name comes before it; test_0
    and the like are numbered anew in each data set, so its name does. No id at all is the row's number."""
    columns = ("id", "ID", "unique_id", "_id", "puzzleid")
    found = next((row.cells[key] for key in columns if row.cells.get(key) is not None), None)
    extra = row.cells.get("extra_info")
    if found is None and isinstance(extra, dict):
        found = extra.get("index")
    if type(found) is int or found is None or isinstance(found, str) and found.isdigit():
        return f"{stem}-{row.number if found is None else found}"
    if isinstance(found, str) and re.fullmatch(r"(train|dev|test|validation)_\d+", found):
        return f"{task_source(row, stem)}-{found}"
    if not isinstance(found, str) or not found:
        raise row.error("id", f"must be text, not {found!r}")
    return found


def task_source(row: Row, stem: str) -> str:
    source = row.cells.get("source") or row.cells.get("data_source") or stem
    if not isinstance(source, str):
        raise row.error("source", f"must be text, not {source!r}")
    return source


def verify_cases(domain: str, path: str | Path) -> dict:
    """Verdicts on a file of cases (`id`, `reply`, `reference`, `expected`; chess: also `fen`); rows of another `domain`
    are skipped."""
    env, n, misses = ENVS[domain](), 0, []
    for row in read_rows(path):
        if row.cells.get("domain", domain) == domain:
            n, reply, expected = n + 1, row.cells.get("reply"), row.get("expected")
            if not isinstance(reply, str | None) or expected not in (0, 1):
                raise row.error("reply", "must be text or null, and field 'expected' 0 or 1")
            case = env.read_case(row)
            verdict = env.verify(case, reply)
            if verdict.reward != expected:
                misses.append({"id": case.id, "expected": expected, "got": int(verdict.reward), "why": verdict.why})
    if not n:
        raise DataError(f"{path}: holds no case of {domain}")
    return {"n": n, "as_expected": n - len(misses), "misses": misses}
