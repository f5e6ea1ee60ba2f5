"""An agent of our own that proposes: a loop over a chat endpoint (chat_endpoint.py), with the tools of agent_tools.py.

    bash run.sh math --proposer api --proposer-url http://localhost:8000
    WHALE_PROPOSER_KEY=... bash run.sh math --proposer api --proposer-url https://openrouter.ai/api/v1 \\
        --proposer-model NAME --proposer-usd 2

What the model calls is done and answered, until it calls `finish`, or calls nothing when all slots are written, or a
limit is reached; what is written by then counts. Where the server takes no `tools`, or the model writes its calls as
text, they are read from <tool_call> blocks. A malformed call is answered with what is wrong with it.

Sampling is the server's own but for the seed, and nothing that is sent depends on the time: with a server that is
deterministic, so is the session.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from agent_tools import TOOLS, Workbench, clean, shorten
from chat_endpoint import CallFailed, Endpoint, check_settings_api
from rollout import derive_seed, parse_tool_calls
from files import UsageError
from sessions import Session, Workplace

MAX_TURNS = 150
MAX_CALLS = 16                  # of one reply
MAX_USELESS = 6                 # replies in a row without a call that could be done
MAX_CONTENT = 20_000            # characters of a reply's text that are kept
MAX_OUTPUT = 4_000_000          # characters of all replies of a session
HISTORY = 160_000               # characters of turns that are sent again; halved whenever the server says: too long
MIN_HISTORY = 6_000
MAX_TRANSCRIPT = 20_000_000
GIVEN_BACK = ("reasoning_content", "reasoning_details")     # some servers want these again, with the calls they led to

SYSTEM = """You improve the program around a language model that itself does not change. You work through tools alone, \
in a working copy: read what was tried and how it failed, in the traces above all; then write better harness files. \
Do not guess what a file holds: read it."""


@dataclass
class Turn:
    """A reply and what it was answered, as they are sent again."""
    message: dict
    answers: list[dict]

    @property
    def n_chars(self) -> int:
        return len(json.dumps([self.message, *self.answers], ensure_ascii=False))


def run_api_agent(workplace: Workplace, pause: Callable[[float], None] = time.sleep) -> Session:
    """One session. It never raises for what the server or the model does."""
    started, settings = time.monotonic(), workplace.settings
    bench = Workbench(workplace.folder, workplace.slots)
    endpoint = Endpoint(settings, started + settings.proposer_s, pause)
    spent, served = endpoint.spent, []
    with open(workplace.transcript, "a", encoding="utf-8") as transcript:
        def log(message: dict) -> None:
            line = json.dumps(message) + "\n"
            if transcript.tell() + len(line) <= MAX_TRANSCRIPT:
                transcript.write(line)
                transcript.flush()

        try:
            model = settings.proposer_model or check_settings_api(settings).proposer_model
            end, words = converse(endpoint, bench, workplace, model, served, log)
        except (CallFailed, UsageError) as failure:
            end, words = getattr(failure, "end", "failed"), str(failure)
        log({"end": end, "words": words})
    if end == "limit":
        end = "done" if bench.proposals else "failed"
    notes = [f"the server takes no {name}" for name in ("seed", "tools") if name not in endpoint.takes]
    if spent.n_lost:
        notes.append(f"{spent.n_lost} calls brought no reply; what they cost is not in the sums")
    known = spent.n_replies or not spent.n_lost
    return Session(end, words[:4000], served[-1] if served else settings.proposer_model, "whale agent",
                   *((spent.prompt_tok, spent.completion_tok, spent.usd) if known else (None, None, None)),
                   time.monotonic() - started, tuple(notes))


def converse(endpoint: Endpoint, bench: Workbench, workplace: Workplace, model: str, served: list[str],
             log: Callable[[dict], None]) -> tuple[str, str]:
    """Turns until the end -> how it ended, in words. To `served` goes the name that the server gives its model."""
    opening = open_with(bench)
    for message in opening:
        log(message)
    turns: list[Turn] = []
    n_turns = n_calls = n_output = n_useless = 0            # turns: those that are still sent
    limit, spent = HISTORY, endpoint.spent
    while n_turns < MAX_TURNS:
        if workplace.usd is not None and spent.usd is None:
            return "failed", ("the server does not say what a call costs, so the money limit cannot be held: give "
                              "--proposer-price (0,0 for a server of your own)")
        if workplace.usd is not None and spent.usd + spent.dearest > workplace.usd:
            return "limit", f"${spent.usd:g} of its ${workplace.usd:g} are spent, and one more call may pass them"
        shrink(turns, limit)
        history = [message for turn in turns for message in (turn.message, *turn.answers)]
        try:
            reply = endpoint.chat(model, opening + history, derive_seed(workplace.seed, n_turns) & 0x7FFFFFFF)
        except CallFailed as failure:
            too_long = failure.status in (400, 413) and re.search("context|token|too (long|large)", str(failure))
            if not too_long or not turns or limit == MIN_HISTORY:
                raise
            limit = max(MIN_HISTORY, limit // 2)
            log({"shorter": str(failure)})
            continue
        if isinstance(reply.get("model"), str):
            served.append(clean(reply["model"])[:200])
        choice = reply["choices"][0]
        content, calls, extra = read_message(choice["message"])
        n_output += len(content) + sum(len(str(given)) for _, given in calls)
        by_text = not calls and "<tool_call>" in content
        if by_text:
            calls = calls_in(content)
        message, answers, n_done = answer_calls(bench, content, calls, extra, by_text, n_calls, limit // 2)
        n_calls += len(calls)
        log(message | {"prompt_tok": spent.prompt_tok, "completion_tok": spent.completion_tok, "usd": spent.usd})
        if bench.report is not None:
            return "done", bench.report or content
        if not calls and not bench.left:
            bench.finish(content)
            return "done", content
        if choice.get("finish_reason") == "length":
            limit = max(MIN_HISTORY, limit // 2)            # it may have had no room for more
            answers.append({"role": "user", "content": "Your reply was cut by a length limit. Be shorter."})
        elif not calls:
            answers.append({"role": "user", "content": f"Not written yet, or not right: {', '.join(bench.left)}. Use "
                                                       "the tools; call finish when you are done."})
        n_turns += 1
        if MAX_TURNS - n_turns <= 5:
            answers[-1]["content"] += f"\n({MAX_TURNS - n_turns} turns are left. Write the slots.)"
        turns.append(Turn(message, merge(answers)))
        for answer in turns[-1].answers:
            log(answer)
        n_useless = 0 if n_done else n_useless + 1
        if n_useless >= MAX_USELESS:
            return "limit", f"{n_useless} replies in a row without a call that could be done; the last: {content[:500]}"
        if n_output > MAX_OUTPUT:
            return "limit", f"it said more than {MAX_OUTPUT:,} characters"
    return "limit", f"it took {MAX_TURNS} turns"


def open_with(bench: Workbench) -> list[dict]:
    task = (bench.folder / "task.md").read_text(encoding="utf-8", errors="replace")
    archive = bench.name_of(bench.archive)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"""{clean(task)}

---
You are in the working copy. The archive of this search is {archive}/:
{bench.list_files(archive)}

Your slots: {', '.join(bench.slots)}. Write each with write_slot, then call finish."""}]


def read_message(message: dict) -> tuple[str, list[tuple[str, object]], dict]:
    """A reply -> its text without its thinking; its calls, each a name and its arguments, or a text that is no JSON;
    and what some servers want back."""
    content = message.get("content")
    if isinstance(content, list):                           # of parts
        content = "".join(part["text"] for part in content if isinstance(part, dict)
                          and isinstance(part.get("text"), str))
    content = clean(content).rpartition("</think>")[2] if isinstance(content, str) else ""
    calls, raw = [], message.get("tool_calls")
    for call in raw if isinstance(raw, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        given = function.get("arguments")
        if isinstance(given, str):
            try:
                given = json.loads(given or "{}")
            except (ValueError, RecursionError):
                pass
        calls.append((clean(function["name"])[:64] if isinstance(function.get("name"), str) else "", given))
    extra = {}
    for key in GIVEN_BACK:
        try:
            if message.get(key) and len(json.dumps(message[key], allow_nan=False)) <= MAX_CONTENT:
                extra[key] = message[key]
        except (ValueError, RecursionError):
            pass
    return content, calls, extra


def calls_in(content: str) -> list[tuple[str, object]]:
    """The calls that are written in a reply's text; if none can be read, one of no tool, to be told so."""
    return [(call["name"], call["arguments"]) for call in parse_tool_calls(content, MAX_CALLS + 1)] or [
        ("", "a <tool_call> block holds one JSON object with name and arguments, and ends with </tool_call>")]


def answer_calls(bench: Workbench, content: str, calls: list[tuple[str, object]], extra: dict, by_text: bool,
                 n_before: int, room: int) -> tuple[dict, list[dict], int]:
    """Does the calls of a reply -> the reply as it is sent again, the answers, and how many calls could be done. The
    ids are our own, and arguments that could not be used are left out: servers choke on either."""
    shown, answers, n_done = [], [], 0
    for number, (name, given) in enumerate(calls[:MAX_CALLS]):
        if isinstance(given, str):
            why = f"the arguments of {name} are no JSON object: " if name else ""
            text, done = f"Error: {why}{shorten(clean(given), 300)}", None
        else:
            text, done = bench.run(name, given)
        n_done += done is not None
        room -= len(text)
        if room < 0 and number:
            text = text if len(text) <= 300 else "(No room for this answer beside the others: ask for less at once.)"
        if number + 1 == MAX_CALLS < len(calls):
            text += f"\n({len(calls) - MAX_CALLS} further calls of this reply were not done: at most {MAX_CALLS})"
        call_id = f"c{(n_before + number) % 10 ** 8:08d}"               # nine letters and digits: Mistral's rule
        shown.append({"id": call_id, "type": "function", "function": {
            "name": name if name in TOOLS else "unknown", "arguments": json.dumps(done or {})}})
        answers.append({"role": "tool", "tool_call_id": call_id, "content": text})
    message = {"role": "assistant", "content": shorten(content, MAX_CONTENT) or "(nothing)", **extra}
    if by_text:
        answers = [{"role": "user", "content": f"<tool_response>\n{answer['content']}\n</tool_response>"}
                   for answer in answers]
    elif shown:
        message |= {"content": shorten(content, MAX_CONTENT) or None, "tool_calls": shown}
    return message, answers, n_done


def merge(answers: list[dict]) -> list[dict]:
    """User turns in a row as one: some templates want user and assistant to take turns."""
    texts = [answer["content"] for answer in answers if answer["role"] == "user"]
    tools = [answer for answer in answers if answer["role"] != "user"]
    return tools + [{"role": "user", "content": "\n".join(texts)}] * bool(texts)


def shrink(turns: list[Turn], limit: int) -> None:
    """When the turns are longer than the limit, room is made down to half of it, so that the next calls share a prefix
    with this one: the long texts of the oldest turns are dropped, and said to be; then whole turns."""
    def n_chars() -> int:
        return sum(turn.n_chars for turn in turns)

    if n_chars() <= limit:
        return
    for turn in turns[:-1]:
        drop_texts(turn)
        if n_chars() <= limit // 2:
            return
    while len(turns) > 1 and n_chars() > limit:
        turns.pop(0)
    if n_chars() > limit:
        drop_texts(turns[0])


def drop_texts(turn: Turn) -> None:
    def drop(value: object) -> object:
        return value if not isinstance(value, str) or len(value) <= 400 else (
            f"{value[:200]}\n[the rest of {len(value)} characters was dropped to make room; ask again, for less]")

    for message in (turn.message, *turn.answers):
        message["content"] = drop(message["content"])
        for call in message.get("tool_calls", []):
            given = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps({key: drop(value) for key, value in given.items()})
