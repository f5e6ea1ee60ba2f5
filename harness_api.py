"""What a harness program may use: the requests it yields and the results it receives.

A harness is one Python file with two constants, SYSTEM_PROMPT and USER_PROMPT, and one generator function `run(task)`.
`task` is a dict of strings (math and search: `question`; chess: side, fen, board, last_move, played, move_number,
legal_moves). The program touches the world only by yielding requests, which the host answers; so the list of its
requests and results is all there is to know about a rollout.

    def run(task):
        reply = yield generate(chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)), tools=[PYTHON]) # -> Reply
        output = yield python("print(6 * 7)")                                                   # -> ToolOutput, "42"

Each domain answers to its own tool: math to `python`, search to `search`, chess to `move`. What is graded is the
model's last reply (chess: the moves that the board took); what `run` returns is not. Sampling and the budgets are the
host's.
Beside this module a harness may import re, json, math, string, textwrap, itertools, collections, functools, statistics
and random (seeded by the host, for each program on its own). What it prints is discarded.
"""

import math
import re
from dataclasses import dataclass

MAX_TOPK, MAX_PASSAGE_TOK = 20, 2000        # of one search
MAX_STOPS, MAX_STOP_CHARS = 16, 200         # of one model call
MAX_TOOL_VALUES = 1000                      # of its tool schemas: a megabyte of "[]," takes 31 when it is read
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. Print what you want to see."}},
            "required": ["code"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search an encyclopaedia and return the best passages.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}


def chat(system: str, user: str) -> list[dict]:
    """The opening messages of a conversation; no system turn when `system` is empty."""
    turns = [{"role": "user", "content": user}]
    return [{"role": "system", "content": system}, *turns] if system else turns


def generate(messages: list[dict], tools: list[dict] | None = None, max_tokens: int | None = None,
             stop: list[str] | None = None) -> dict:
    """Request one model call. Messages are {"role", "content"}, and {"role": "tool", "name", "content"}. -> Reply

    A reply ends before a stop string; so after stop=["</answer>"] it holds no closed tag, and nothing to grade. There
    may be 16 of them, of 200 characters."""
    return {"type": "generate", "messages": messages, "tools": tools, "max_tokens": max_tokens, "stop": stop}


def python(code: str) -> dict:
    """Request one run of the Python tool. Each run starts from nothing. -> ToolOutput

    What a model gives as code may be anything; what is no text is run as it prints."""
    return {"type": "python", "code": code if isinstance(code, str) else str(code)}


def search(query: str, topk: int = 1, max_tokens: int = 200) -> dict:
    """Request the best `topk` passages for a query, each cut to `max_tokens` tokens. -> ToolOutput

    `details["documents"]` is a list of {"title", "text"}."""
    return {"type": "search", "query": query if isinstance(query, str) else str(query), "topk": topk,
            "max_tokens": max_tokens}


def move(uci: str) -> dict:
    """Request that a move be played, one a reply, that the model's last reply named, in any notation. -> ToolOutput

    `details["status"]` is accepted, malformed, illegal or unsaid (the model did not say it); `details["task"]` is the
    new position after an accepted move. A legal but wrong move, and the last of the puzzle, end the rollout."""
    return {"type": "move", "uci": uci if isinstance(uci, str) else str(uci)}


@dataclass(frozen=True)
class ToolCall:
    """One well-formed tool call of a reply."""

    name: str
    arguments: dict


@dataclass(frozen=True)
class Reply:
    """What the model said. A malformed tool call is in `content`, not in `tool_calls`."""

    content: str                    # raw text, tool-call blocks included, without the final stop token
    tool_calls: list[ToolCall]
    finish: str                     # "stop", or "length": cut by a token limit

    @property
    def message(self) -> dict:
        """The reply as a turn, to be appended to the messages."""
        return {"role": "assistant", "content": self.content}


class ToolOutput(str):
    """What the tool printed, or its error in words; `ok` is False after an error or a limit."""

    ok: bool = True
    details: dict                   # plain JSON; what is in it is the tool's


def tool_result(call: ToolCall, output: str) -> dict:
    """A tool's output as a turn, to be appended to the messages."""
    return {"role": "tool", "name": call.name, "content": str(output)}


# --- The moves in a reply, for chess. ---

_TAG = re.compile(r"<(/?)move>", re.IGNORECASE)
_ALONE = r"(?<![a-zA-Z0-9/@])(?<![a-zA-Z0-9]-)(?:%s)[+#]{0,2}(?!-?[a-zA-Z0-9/@])"  # "/": rows of a FEN are no moves
_BARE_MOVE = re.compile(_ALONE % "|".join((
    "[o0]-[o0](?:-[o0])?",                                  # castling
    "[a-h][1-8][-x]?[a-h][1-8](?:=?[qrbn])?",               # coordinates
    "[kqrbn][a-h]?[1-8]?[-x]?[a-h][1-8]",                   # a piece's move
    "[a-h]x[a-h][1-8](?:=?[qrbn])?|[a-h][18]=?[qrbn]",      # a pawn takes or promotes
)), re.IGNORECASE)
_BARE_SQUARE = re.compile(_ALONE % "[a-h][1-8]")


def said_moves(text: str) -> list[str]:
    """The moves in a model's reply, as written, in order; thinking counts for nothing.

    With a `<move>` tag anywhere: what stands in the closed pairs, be it a move or not. Without: the moves in the
    prose; a bare square (e4) is a pawn's move only where there is no other, as most are places ("the knight on e5").
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    said, start, tagged = [], None, False
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start, tagged = tag.end(), True                 # the nearest opening tag counts
        elif start is not None:
            said.append(text[start:tag.start()].strip().strip(" \n*_`[]().,;!?"))
            start = None
    if tagged:
        return said
    return [move[0] for move in _BARE_MOVE.finditer(text)] or [move[0] for move in _BARE_SQUARE.finditer(text)]


# --- The rest is the host's and the worker's side of the same format. ---


def parse_result(request: dict, result: dict) -> Reply | ToolOutput:
    """The host's answer to `request` (plain JSON) as the object that the program receives."""
    if request["type"] == "generate":
        calls = [ToolCall(call["name"], call["arguments"]) for call in result["tool_calls"]]
        return Reply(result["content"], calls, result["finish"])
    output = ToolOutput(result["output"])
    output.ok, output.details = result["ok"], result.get("details", {})
    return output


def check_request(request: object) -> str:
    """What is wrong with a request, in words; "" when nothing is."""
    if not isinstance(request, dict):
        return f"a request is a dict, not {type(request).__name__}"
    kind = request.get("type")
    if not isinstance(kind, str):
        return f"a request has a type, not {kind!r:.80}"
    if kind not in _FIELDS:                                                 # a tool that only its environment knows
        return "" if is_plain(request) else f"{kind:.80}: must be plain JSON"
    fields = _FIELDS[kind]
    for name in request:
        if name not in fields and name != "type":
            return f"{kind} has no field {name!r:.80}"
    for name, (is_right, wanted) in fields.items():
        if not is_right(request.get(name)):
            return f"{kind}: {name} must be {wanted}"
    return ""


def _is_message(turn: object) -> bool:
    return (isinstance(turn, dict) and {"role", "content"} <= set(turn) <= {"role", "content", "name"}
            and turn["role"] in ("system", "user", "assistant", "tool")
            and all(isinstance(value, str) for value in turn.values()))


def is_plain(value: object, depth: int = 16) -> bool:
    """JSON and nothing else, at most `depth` levels deep."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(k, str) and is_plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list):
        return depth > 0 and all(is_plain(v, depth - 1) for v in value)
    return value is None or isinstance(value, (str, int)) or isinstance(value, float) and math.isfinite(value)


def _n_values(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_n_values, parts))


def _is_tool(tool: object) -> bool:
    return tool in (PYTHON, SEARCH) or (                # the usual ones, known to be right
        isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str) and is_plain(tool))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_FIELDS = {
    "generate": {
        "messages": (lambda v: isinstance(v, list) and bool(v) and all(map(_is_message, v)),
                     'a non-empty list of {"role": system, user, assistant or tool, "content": str}'),
        "tools": (lambda v: v is None or isinstance(v, list) and all(map(_is_tool, v))
                  and _n_values(v) <= MAX_TOOL_VALUES,
                  f"None or a list of tool schemas in plain JSON, of at most {MAX_TOOL_VALUES} values"),
        "max_tokens": (lambda v: v is None or _is_count(v), "None or a positive int"),
        "stop": (lambda v: v is None or isinstance(v, list) and len(v) <= MAX_STOPS and all(
                    isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in v),
                 f"None or a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"),
    },
    "python": {"code": (lambda v: isinstance(v, str), "a string")},
    "search": {"query": (lambda v: isinstance(v, str), "a string"),
               "topk": (lambda v: _is_count(v) and v <= MAX_TOPK, f"an int from 1 to {MAX_TOPK}"),
               "max_tokens": (lambda v: _is_count(v) and v <= MAX_PASSAGE_TOK, f"an int from 1 to {MAX_PASSAGE_TOK}")},
    "move": {"uci": (lambda v: isinstance(v, str), "a string")},
}
