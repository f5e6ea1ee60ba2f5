"""A chat endpoint that is not trusted: any OpenAI-compatible server, through calls that always end.

What it sends is bounded and checked. A call that fails for a reason that passes (429, 5xx, no connection, no reply in
the answer) is tried again, after the pause that the server asks for or a growing one; a server that drips is left when
the time is up; redirects are not followed. The key (WHALE_PROPOSER_KEY) goes into one header and nowhere else, and is
blotted out of what comes back. What a server does not take (`tools`, `seed`) is left out from then on.
"""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import requests
import urllib3

from agent_tools import clean, tool_schemas
from keys import check_url, is_loopback, load_answer, read_key, redact_bytes
from files import UsageError
from sessions import ProposerConfig, price_of
from wire import Session, TooMuch

KEY = "WHALE_PROPOSER_KEY"
N_TRIES = 5                     # of a call
PAUSE_S = 2.0                   # before the second try; doubled before each further one
MAX_PAUSE_S = 120.0             # that a server may ask for (Retry-After, in seconds)
CALL_S = 900.0                  # of one try; a local model may think for minutes
MAX_BODY_BYTES = 8_000_000
ADVICE = {401: f" (the key is read from {KEY})", 402: " (the account has no credit)",
          403: f" (the key is read from {KEY})", 404: " (check --proposer-url and --proposer-model)",
          **dict.fromkeys((301, 302, 303, 307, 308), " (redirects are not followed: give the address it leads to)")}
TEXT_TOOLS = """

Call a tool by writing one or more blocks like this, and nothing after them; the answers come in the next message:

<tool_call>
{"name": "read_file", "arguments": {"path": "task.md"}}
</tool_call>

The tools:
"""


class CallFailed(RuntimeError):
    """No reply. `end`: of the session, as in Session, or "limit"; `status`: of HTTP, 0 without one."""

    def __init__(self, words: str, end: str = "failed", status: int = 0):
        super().__init__(words)
        self.end, self.status = end, status


@dataclass
class Spent:
    """Sums over the calls of a session; None once a call did not say."""
    prompt_tok: int | None = 0
    completion_tok: int | None = 0
    usd: float | None = 0.0
    dearest: float = 0.0            # $ of one call, as far as known
    n_replies: int = 0
    n_lost: int = 0                 # calls that were sent and brought no reply: what they cost is not known

    def add(self, usage: object, price: str) -> None:
        usage = usage if isinstance(usage, dict) else {}
        counts = [usage.get(name) if type(usage.get(name)) is int and 0 <= usage[name] < 1e12 else None
                  for name in ("prompt_tokens", "completion_tokens")]
        cost = usage.get("cost")                                        # OpenRouter's own figure, in $
        if type(cost) not in (int, float) or not 0 <= cost < 1e9:       # NaN is not, either
            cost = price_of(price, *counts) if price and None not in counts else None
        self.n_replies, self.dearest = self.n_replies + 1, max(self.dearest, cost or 0.0)
        self.prompt_tok, self.completion_tok, self.usd = (
            None if total is None or new is None else total + new for total, new in
            ((self.prompt_tok, counts[0]), (self.completion_tok, counts[1]), (self.usd, cost)))


class Endpoint:
    """`deadline`: of all calls together, in time.monotonic()'s seconds. `pause`: sleeps between tries."""

    def __init__(self, settings: ProposerConfig, deadline: float, pause: Callable[[float], None] = time.sleep):
        self.settings, self.deadline, self.pause = settings, deadline, pause
        self.url = settings.proposer_url.rstrip("/")
        self.url += "" if re.search(r"/v\d", urlsplit(self.url).path) else "/v1"
        self.is_loopback = is_loopback(self.url)
        self.takes = {"tools", "seed"}          # what it has not refused
        self.spent = Spent()

    def models(self) -> list[str]:
        """The names of what it serves; asked once. CallFailed if it does not say."""
        rows = self._call("GET", "/models", None, 1).get("data")
        return [clean(row["id"]) for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)] \
            if isinstance(rows, list) else []

    def chat(self, model: str, messages: list[dict], seed: int) -> dict:
        """One reply; that it has choices[0]["message"] is checked. CallFailed when there is none."""
        while True:
            body = {"model": model, "messages": messages}
            body |= {"seed": seed} if "seed" in self.takes else {}
            if "tools" in self.takes:
                body["tools"] = tool_schemas()
            else:
                told = TEXT_TOOLS + "\n".join(json.dumps(schema["function"]) for schema in tool_schemas())
                body["messages"] = [messages[0] | {"content": messages[0]["content"] + told}, *messages[1:]]
            try:
                reply = self._call("POST", "/chat/completions", body, N_TRIES)
                self.spent.add(reply.get("usage"), self.settings.proposer_price)
                return reply
            except CallFailed as failure:
                refused = [name for name in ("seed", "tools") if name in self.takes and name[:4] in str(failure)]
                if self.spent.n_replies or not failure.status or not refused:
                    raise
                self.takes.discard(refused[0])

    def _call(self, method: str, path: str, body: dict | None, n_tries: int) -> dict:
        wait, words = 0.0, "no time for a call"
        for attempt in range(n_tries):
            pause_s = max(wait, PAUSE_S * 2 ** (attempt - 1)) if attempt else 0.0
            if time.monotonic() + pause_s >= self.deadline:
                raise CallFailed(f"its time is up; the last call: {words}", "limit")
            if attempt:
                self.pause(pause_s)
            status, asked, content = self._send(
                method, path, body, max(0.1, min(CALL_S, self.deadline - time.monotonic())))
            wait = min(float(asked), MAX_PAUSE_S) if re.fullmatch(r"\d{1,9}(\.\d+)?", asked) else 0.0
            words = clean(content[:4000].decode("utf-8", "replace")).strip()[:600]
            if status == 200:
                try:
                    answer = load_answer(content)
                    if isinstance(answer, dict) and (method == "GET" or isinstance(
                            answer["choices"][0]["message"], dict)):
                        return answer
                except (ValueError, LookupError, TypeError, RecursionError):
                    pass
                words = f"no reply in the answer: {words[:300]}"
            words = f"{self.url}{path} answered {status}: {words}" if status else f"{self.url}{path}: {words}"
            passes = status in (0, 200, 408, 409, 425, 429) or status >= 500
            if not passes or status >= 500 and "tool" in words and "tools" in self.takes and not self.spent.n_replies:
                raise CallFailed(words + ADVICE.get(status, ""), status=status)     # llama.cpp's "no tools" is a 500
            self.spent.n_lost += method == "POST" and status in (0, 200)
        raise CallFailed(f"no reply in {n_tries} tries; the last: {words}", "transient", status)

    def _send(self, method: str, path: str, body: dict | None, limit_s: float) -> tuple[int, str, bytes]:
        """-> status, Retry-After, content; status 0 and why, where no whole answer came in time."""
        key = os.environ.get(KEY, "")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            with Session(trust_env=not self.is_loopback) as session:    # a proxy is no way to this machine
                response, content = session.exchange(   # the key as auth, else ~/.netrc would replace it
                    method, self.url + path, limit_s, MAX_BODY_BYTES, json=body,
                    auth=lambda request: request.headers.update(headers) or request)
            return response.status_code, response.headers.get("Retry-After", ""), redact_bytes(content)
        except (TooMuch, TimeoutError) as error:
            return 0, "", str(error).encode()
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # not the error's own text: it may hold what a header or a proxy's address holds
            return 0, "", f"{type(error).__name__}; is the server there?".encode()


def check_settings_api(settings: ProposerConfig) -> ProposerConfig:
    """The settings with the model's name, asked of the server if there is none. UsageError says what to change."""
    try:
        check_url("--proposer-url", settings.proposer_url, KEY)
        read_key(KEY)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if settings.proposer_price and not re.fullmatch(r"\d{1,9}(\.\d+)?,\d{1,9}(\.\d+)?", settings.proposer_price):
        raise UsageError(f'--proposer-price is "IN,OUT", $ a million tokens, as 3,15; not {settings.proposer_price!r}')
    names = []
    try:
        names = Endpoint(settings, time.monotonic() + 60).models()
    except CallFailed as failure:               # not every server lists its models; but it must be there, and let us in
        if not settings.proposer_model or failure.status in (0, 401, 403) or 300 <= failure.status < 400:
            raise UsageError(f"--proposer-url: {failure}") from None
    if settings.proposer_model:
        return settings
    if len(names) != 1:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise UsageError(f"--proposer-model: the server serves {len(names)} models, name one: {shown}")
    return replace(settings, proposer_model=names[0])
