"""An agent of our own that proposes: a loop over any OpenAI-compatible chat endpoint, with the tools of agent_tools.py.

    bash run.sh math --proposer api --proposer-url http://localhost:8000 --proposer-model Qwen/Qwen3.5-9B
    WHALE_PROPOSER_KEY=... bash run.sh math --proposer api --proposer-url https://openrouter.ai/api/v1 \\
        --proposer-model NAME --proposer-usd 2

One call after the other to {url}/chat/completions; what the model calls is done and answered, until it calls `finish`,
or says something without a call when all slots are written, or a limit is reached. What is written by then counts.
Where the server takes no `tools`, they are told in the prompt and read from <tool_call> blocks in the reply.

The server is not trusted: what it sends is bounded and checked, and its mistakes are told to the model or end the
session in words. A failed call is tried again; a server that drips is left when the time is up; redirects are not
followed. The key (WHALE_PROPOSER_KEY) goes into one header and nowhere else, and is blotted out of what comes back.
Sampling is the server's own but for the seed, so with a server that is deterministic, so is the session.
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

import requests

from agent_tools import TOOLS, Workbench, clean, shorten, tool_schemas
from rollout import derive_seed, parse_tool_calls
from rundir import UsageError
from sessions import ProposerConfig, Session, Workplace, price_of

KEY = "WHALE_PROPOSER_KEY"
N_TRIES = 5                     # of a call
PAUSE_S = 2.0                   # before the second try; doubled before each further one
MAX_PAUSE_S = 120.0             # that a server may ask for (Retry-After)
CALL_S = 900.0                  # of one try; a local model may think for minutes
MAX_TURNS = 150
MAX_CALLS = 16                  # of one reply
MAX_USELESS = 6                 # replies in a row without a call that could be done
MAX_BODY_BYTES = 8_000_000
MAX_CONTENT = 20_000            # characters of a reply that are kept
MAX_OUTPUT = 4_000_000          # of all replies of a session
HISTORY = 160_000               # characters of turns that are sent again; halved whenever the server says: too long
MIN_HISTORY = 6_000
MAX_TRANSCRIPT = 20_000_000
GIVEN_BACK = ("reasoning_content", "reasoning_details")     # some servers want these again, with the calls they led to

SYSTEM = """You improve the program around a language model that itself does not change. You work through tools alone, \
in a working copy: read what was tried and how it failed, in the traces above all; then write better harness files. \
Do not guess what a file holds: read it."""
TEXT_TOOLS = """

Call a tool by writing one or more blocks like this, and nothing after them; the answers come in the next message:

<tool_call>
{"name": "read_file", "arguments": {"path": "task.md"}}
</tool_call>

The tools:
"""


class CallFailed(RuntimeError):
    """No reply from the endpoint. `end` is that of the session; `status` the HTTP status, 0 without one."""

    def __init__(self, words: str, end: str = "failed", status: int = 0):
        super().__init__(words)
        self.end, self.status = end, status


@dataclass
class Turn:
    """A reply and what it was answered, as they are sent again."""
    message: dict
    answers: list[dict]

    @property
    def n_chars(self) -> int:
        return len(json.dumps([self.message, *self.answers], ensure_ascii=False))


@dataclass
class Spent:
    """Sums over the calls of a session; None once a call did not say."""
    prompt_tok: int | None = 0
    completion_tok: int | None = 0
    usd: float | None = 0.0
    dearest: float = 0.0            # call
    n_lost: int = 0                 # calls that were sent and brought no reply: what they cost is not known
    notes: list[str] = field(default_factory=list)

    def add(self, usage: object, price: str) -> None:
        usage = usage if isinstance(usage, dict) else {}
        counts = [usage.get(name) if type(usage.get(name)) is int and 0 <= usage[name] < 1e12 else None
                  for name in ("prompt_tokens", "completion_tokens")]
        cost = usage.get("cost")
        if type(cost) not in (int, float) or not 0 <= cost < 1e9:                   # NaN is not either
            cost = price_of(price, *counts) if price and None not in counts else None
        self.dearest = max(self.dearest, cost or 0.0)
        self.prompt_tok, self.completion_tok, self.usd = (
            None if total is None or new is None else total + new for total, new in
            ((self.prompt_tok, counts[0]), (self.completion_tok, counts[1]), (self.usd, cost)))


class Endpoint:
    """A chat endpoint, the tries that a call takes and the time that is left for them."""

    def __init__(self, settings: ProposerConfig, deadline: float, pause: Callable[[float], None]):
        self.url, self.deadline, self.pause = base_url(settings.proposer_url), deadline, pause
        host = urlsplit(self.url).hostname
        self.is_loopback = host in ("localhost", "::1") or host.startswith("127.")
        self.takes = {"tools", "seed"}          # of what is sent: what the server has not refused
        self.n_lost = 0

    def models(self) -> list[str]:
        """The names of what it serves. CallFailed if it does not say."""
        rows = self._call("GET", "/models", None).get("data")
        return [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)] \
            if isinstance(rows, list) else []

    def chat(self, model: str, messages: list[dict], seed: int) -> dict:
        """One reply: {"choices": [{"message": {...}}], ...}, checked so far. CallFailed when there is none."""
        body = {"model": model, "messages": messages, "seed": seed, "tools": tool_schemas()}
        return self._call("POST", "/chat/completions", {
            key: value for key, value in body.items() if key in self.takes or key in ("model", "messages")})

    def _call(self, method: str, path: str, body: dict | None) -> dict:
        wait = words = ""
        for attempt in range(N_TRIES):
            if attempt:
                asked = float(wait) if re.fullmatch(r"\d{1,9}(\.\d+)?", wait) else 0.0
                if time.monotonic() + min(asked, MAX_PAUSE_S) > self.deadline:
                    break
                self.pause(max(PAUSE_S * 2 ** (attempt - 1), min(asked, MAX_PAUSE_S)))
            left = self.deadline - time.monotonic()
            if left <= 0:
                break
            status, wait, content = self._send(method, path, body, min(CALL_S, left))
            words = clean(content[:2000].decode("utf-8", "replace")).strip()[:600]
            if status == 200:
                try:
                    answer = json.loads(content)
                    if method == "GET" or isinstance(answer["choices"][0]["message"], dict):
                        return answer if isinstance(answer, dict) else {}
                except (ValueError, LookupError, TypeError, RecursionError):
                    pass
                words = f"no reply in the answer: {words[:300]}"
            elif status and status < 500 and status not in (408, 409, 425, 429):
                raise CallFailed(f"{self.url}{path} answered {status}: {words}{ADVICE.get(status, '')}", status=status)
            words = f"{self.url}{path} answered {status}: {words}" if status else f"{self.url}{path}: {words}"
            self.n_lost += method == "POST" and status in (0, 200)
            if status >= 500 and attempt == 0 and "tool" in words:      # llama.cpp without --jinja
                raise CallFailed(words, status=status)
        if self.deadline - time.monotonic() <= 0 or not words:
            raise CallFailed(f"its time is up{words and '; the last call: '}{words}", "limit")
        raise CallFailed(f"no reply in {N_TRIES} tries; the last: {words}", "transient")

    def _send(self, method: str, path: str, body: dict | None, limit_s: float) -> tuple[int, str, bytes]:
        """-> status, Retry-After, content; status 0 and why, where no whole answer came in time. In a thread of its
        own, which is left behind if it does not end: no timeout of a socket ends a server that drips its headers."""
        answer, give_up, key = SimpleQueue(), time.monotonic() + limit_s, os.environ.get(KEY, "")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})

        def work() -> None:
            content, session = bytearray(), requests.Session()
            session.trust_env = not self.is_loopback            # a proxy is no way to this machine
            try:
                with session, session.request(                  # the key as auth, else ~/.netrc would replace it
                        method, self.url + path, json=body, timeout=limit_s, stream=True, allow_redirects=False,
                        auth=lambda request: request.headers.update(headers) or request) as response:
                    for part in response.raw.stream(65536, decode_content=False):
                        content += part
                        if len(content) > MAX_BODY_BYTES or time.monotonic() > give_up:
                            raise ValueError
                wait = response.headers.get("Retry-After", "")
                answer.put((response.status_code, wait, bytes(content).replace(key.encode() or b"\0", b"***")))
            except Exception as error:      # of requests, urllib3, http.client; no text of theirs: it may hold the key
                why = f"more than {MAX_BODY_BYTES:,} bytes, or too slow" if type(error) is ValueError else \
                    f"{type(error).__name__}: is the server there?"
                answer.put((0, "", why.encode()))

        threading.Thread(target=work, daemon=True).start()
        try:
            return answer.get(timeout=limit_s)
        except Empty:
            return 0, "", f"no whole answer within {limit_s:.0f} s".encode()


ADVICE = {401: f" (the key is read from {KEY})", 402: " (the account has no credit)",
          403: f" (the key is read from {KEY})", 404: " (check --proposer-url and --proposer-model)",
          **dict.fromkeys((301, 302, 303, 307, 308), " (redirects are not followed: give the address it leads to)")}


def base_url(url: str) -> str:
    """With its version: http://localhost:8000 is http://localhost:8000/v1."""
    return url.rstrip("/") + ("" if re.search(r"/v\d", urlsplit(url).path) else "/v1")


def check_settings_api(settings: ProposerConfig) -> ProposerConfig:
    """The settings with the model's name, asked of the server if there is none. UsageError says what to change."""
    url, key = settings.proposer_url, os.environ.get(KEY, "")
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and not parts.query and (parts.port or 1)
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"--proposer-url must be like http://localhost:8000/v1, not {url!r}")
    if parts.username or parts.password:
        raise UsageError(f"--proposer-url must hold no name or password; a key goes into {KEY}")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError(f"{KEY} holds a character that no header may hold (a line end?)")
    if settings.proposer_price and not re.fullmatch(r"\d{1,9}(\.\d+)?,\d{1,9}(\.\d+)?", settings.proposer_price):
        raise UsageError(f'--proposer-price is "IN,OUT", $ a million tokens, as 3,15; not {settings.proposer_price!r}')
    try:
        names = Endpoint(settings, time.monotonic() + 60, time.sleep).models()
    except CallFailed as failure:
        if settings.proposer_model and failure.status in (404, 405):        # not every server lists its models
            return settings
        raise UsageError(f"--proposer-url: {failure}") from None
    if settings.proposer_model:
        return settings
    if len(names) != 1:
        shown = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
        raise UsageError(f"--proposer-model: the server serves {len(names)} models, name one: {shown}")
    return replace(settings, proposer_model=names[0])


def run_api_agent(workplace: Workplace, pause: Callable[[float], None] = time.sleep) -> Session:
    """One session. It never raises for what the server or the model does."""
    started, settings, spent = time.monotonic(), workplace.settings, Spent()
    bench = Workbench(workplace.folder, workplace.slots)
    endpoint = Endpoint(settings, started + settings.proposer_s, pause)
    served, model = "", settings.proposer_model
    with open(workplace.transcript, "a", encoding="utf-8") as transcript:
        log = transcript_of(transcript)
        try:
            if not model:
                model = check_settings_api(settings).proposer_model
            end, words, served = converse(endpoint, bench, workplace, model, spent, log)
        except (CallFailed, UsageError) as failure:
            end, words = getattr(failure, "end", "failed"), str(failure)
        log({"end": end, "words": words})
    if end == "limit":
        end = "done" if bench.proposals else "failed"
    notes = list(spent.notes)
    notes += [f"the server takes no {name}" for name in ("seed", "tools") if name not in endpoint.takes]
    if endpoint.n_lost:
        notes.append(f"{endpoint.n_lost} calls brought no reply; what they cost is not in the sums")
    return Session(end, words, served or model, "whale agent", spent.prompt_tok, spent.completion_tok, spent.usd,
                   time.monotonic() - started, tuple(notes))


def converse(endpoint: Endpoint, bench: Workbench, workplace: Workplace, model: str, spent: Spent,
             log: Callable[[dict], None]) -> tuple[str, str, str]:
    """Turns until the end -> how it ended, in words, and the name that the server gives its model."""
    task = (workplace.folder / "task.md").read_text(encoding="utf-8", errors="replace")
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"""{clean(task)}

---
You are in the working copy. The archive of this search is in {bench.name_of(bench.archive)}/:
{bench.list_files(bench.name_of(bench.archive))}

Your slots: {', '.join(bench.slots)}. Write each with write_slot, then call finish."""}]
    turns: list[Turn] = []
    limit, n_output, n_useless, n_calls, served = HISTORY, 0, 0, 0, ""
    log(opening[0])
    log(opening[1])
    while len(turns) < MAX_TURNS:
        if workplace.usd is not None and spent.usd is not None and spent.usd + spent.dearest > workplace.usd:
            return "limit", f"its ${workplace.usd:g} are spent, or would be with one more call", served
        shrink(turns, limit)
        try:
            payload = endpoint.chat(model, with_tools(opening, "tools" not in endpoint.takes)
                                    + [message for turn in turns for message in (turn.message, *turn.answers)],
                                    derive_seed(workplace.seed, len(turns)) & 0x7FFFFFFF)
        except CallFailed as failure:
            said = str(failure).casefold()
            refused = next((name for name in ("seed", "tool") if name in said and failure.status and not turns
                            and {"tool": "tools"}.get(name, name) in endpoint.takes), "")
            if refused:
                endpoint.takes.discard({"tool": "tools"}.get(refused, refused))
            elif failure.status in (400, 413) and re.search("context|token|too long|too large", said) and turns \
                    and limit > MIN_HISTORY:
                limit //= 2
            else:
                raise
            log({"retry": str(failure)})
            continue
        spent.add(payload.get("usage"), workplace.settings.proposer_price)
        served = clean(str(payload.get("model") or ""))[:200] or served
        choice = payload["choices"][0]
        content, calls, extra = read_message(choice["message"])
        n_output += len(content) + sum(len(str(given)) for _, given in calls)
        if workplace.usd is not None and spent.usd is None:
            return "failed", ("the server does not say what a call costs, so the money limit cannot be held: give "
                              "--proposer-price (0,0 for a server of your own)"), served
        by_text = not calls and "<tool_call>" in content
        if by_text:
            calls = calls_in(content)
        message, answers, n_done = answer_calls(bench, content, calls, extra, by_text, n_calls, limit)
        n_calls += len(calls)
        log(message)
        if choice.get("finish_reason") == "length":
            limit = max(MIN_HISTORY, limit // 2)        # there may have been no room for more
            answers.append({"role": "user", "content": "Your reply was cut by a length limit. Be shorter."})
        if bench.report is not None:
            return "done", bench.report or content, served
        if not calls and not bench.left:
            bench.finish(content)
            return "done", content, served
        if not calls and not answers:
            answers.append({"role": "user", "content": f"Not written yet, or not right: {', '.join(bench.left)}. Use "
                                                       "the tools; call finish when you are done."})
        if MAX_TURNS - len(turns) <= 6:
            answers[-1]["content"] += f"\n({MAX_TURNS - len(turns) - 1} turns are left. Write the slots.)"
        turns.append(Turn(message, merge(answers)))
        for answer in turns[-1].answers:
            log(answer)
        n_useless = 0 if n_done else n_useless + 1
        if n_useless >= MAX_USELESS:
            return "limit", f"{n_useless} replies in a row without a call that could be done; the last: " \
                            f"{content[:500]}", served
        if n_output > MAX_OUTPUT:
            return "limit", f"it said more than {MAX_OUTPUT:,} characters", served
    return "limit", f"it took {MAX_TURNS} turns", served


def with_tools(opening: list[dict], by_text: bool) -> list[dict]:
    """The opening; where the server takes no `tools`, they are told in it."""
    if not by_text:
        return opening
    told = TEXT_TOOLS + "\n".join(json.dumps(schema["function"]) for schema in tool_schemas())
    return [opening[0] | {"content": opening[0]["content"] + told}, *opening[1:]]


def read_message(message: dict) -> tuple[str, list[tuple[str, object]], dict]:
    """A reply -> its text; its calls, each a name and its arguments, or a text that is no JSON; what is given back."""
    content = message.get("content")
    if isinstance(content, list):                           # of parts
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
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
        calls.append((clean(str(function.get("name")))[:64], given))
    extra = {}
    for key in GIVEN_BACK:
        try:
            if message.get(key) and len(json.dumps(message[key])) <= MAX_CONTENT:
                extra[key] = message[key]
        except (ValueError, RecursionError):
            pass
    return clean(content) if isinstance(content, str) else "", calls, extra


def calls_in(content: str) -> list[tuple[str, object]]:
    """The calls that are written in a reply's text; one that cannot be read is a call of no tool."""
    calls = [(call["name"], call["arguments"]) for call in parse_tool_calls(content, MAX_CALLS + 1)]
    return calls or [("", "a <tool_call> block that is no JSON object with name and arguments, or does not end")]


def answer_calls(bench: Workbench, content: str, calls: list[tuple[str, object]], extra: dict, by_text: bool,
                 n_before: int, room: int) -> tuple[dict, list[dict], int]:
    """Does the calls of a reply -> the reply as it is sent again, the answers, and how many calls could be done. The
    ids are our own, and arguments that could not be used are left out: servers choke on either."""
    shown, answers, n_done = [], [], 0
    for number, (name, given) in enumerate(calls[:MAX_CALLS]):
        if isinstance(given, str):
            text, done = f"Error: the arguments are no JSON: {shorten(clean(given), 300)}", None
        else:
            text, done = bench.run(name, given)
        n_done += done is not None
        if number + 1 == MAX_CALLS < len(calls):
            text += f"\n({len(calls) - MAX_CALLS} further calls of this reply were not done: at most {MAX_CALLS})"
        room -= len(text)
        if room < 0 and number:
            text = "(No room for this answer beside the others: ask for less at once.)"
        call_id = f"c{n_before + number:08d}"                           # nine letters and digits: Mistral's rule
        shown.append({"id": call_id, "type": "function", "function": {
            "name": name if name in TOOLS else "unknown", "arguments": json.dumps(done or {})}})
        answers.append({"role": "tool", "tool_call_id": call_id, "content": text})
    message = {"role": "assistant", "content": shorten(content, MAX_CONTENT), **extra}
    if by_text:
        answers = [{"role": "user", "content": f"<tool_response>\n{answer['content']}\n</tool_response>"}
                   for answer in answers]
    elif shown:
        message["tool_calls"] = shown
    return message, answers, n_done


def merge(answers: list[dict]) -> list[dict]:
    """User turns in a row as one: some templates want user and assistant to take turns."""
    texts = [answer["content"] for answer in answers if answer["role"] == "user"]
    tools = [answer for answer in answers if answer["role"] != "user"]
    return tools + [{"role": "user", "content": "\n".join(texts)}] * bool(texts)


def shrink(turns: list[Turn], limit: int) -> None:
    """When the turns are longer than the limit, room is made down to half of it, so that the next calls share a prefix
    with this one: the long texts of the oldest turns are dropped, and said to be; then whole turns."""
    if sum(turn.n_chars for turn in turns) <= limit:
        return
    for turn in turns[:-1]:
        for message in (turn.message, *turn.answers):
            message["content"] = drop(message["content"])
            for call in message.get("tool_calls", []):
                given = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(
                    {key: drop(value) if isinstance(value, str) else value for key, value in given.items()})
        if sum(turn.n_chars for turn in turns) <= limit // 2:
            return
    while len(turns) > 1 and sum(turn.n_chars for turn in turns) > limit:
        turns.pop(0)


def drop(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:200]}\n[dropped to make room: the rest of {len(text)} characters]"


def transcript_of(file) -> Callable[[dict], None]:
    """A function that writes a message as a line, at once; no more than MAX_TRANSCRIPT bytes in all."""
    def log(message: dict) -> None:
        line = json.dumps(message) + "\n"
        if file.tell() + len(line) <= MAX_TRANSCRIPT:
            file.write(line)
            file.flush()
    return log
