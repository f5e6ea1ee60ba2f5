"""One request to a server over HTTP, and what may come of it. The key is in the environment and goes nowhere else:

    WHALE_ENGINE_KEY=... bash run.sh search-harness math --engine server --urls https://host/v1 --model NAME
"""

import re
import threading
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError

from engine import EngineDied, ModelError
from keys import check_url, load_answer, read_key, redact, redact_bytes
from tasks import MAX_TOKEN_CHARS
from wire import Session

KEY = "WHALE_ENGINE_KEY"
ANSWER_S = 60           # to answer, where the caller names no limit
MAX_ANSWER_BYTES = 64 << 20
N_SHOWN = 300           # characters of an answer in an error
ADVICE = {401: f"set {KEY} to a key that it takes", 403: f"does the key in {KEY} allow this?",
          404: "is the URL the one before /chat/completions, and --model a name that it serves?"}


class ServerFailed(RuntimeError):
    """This try failed; another may not. `wait_s`: how long the server asks to be left alone."""

    def __init__(self, message: str, status: int = 0, answer: str = "", wait_s: float = 0.0):
        super().__init__(message)
        self.status, self.answer, self.wait_s = status, answer, wait_s


class ServerRefused(EngineDied):
    """The server answers, and will not do this: another try would get the same."""

    def __init__(self, message: str, status: int = 0, answer: str = ""):
        super().__init__(message)
        self.status, self.answer = status, answer


def check_length(url: str, text: str, max_tok: int) -> None:
    """ServerFailed where the text cannot be of so few tokens. It is yet to be tokenised, and to be kept."""
    if len(text) > MAX_TOKEN_CHARS * max_tok + 1024:
        raise ServerFailed(f"{url} answered with {len(text)} characters where {max_tok} tokens were asked for: it does "
                           "not keep to max_tokens; leave it out of --urls")


def read_urls(urls: str) -> list[str]:
    """Each once, without the /v1 that it may end in. ModelError if one is no server's, or if it holds a secret."""
    bases = [url.strip().rstrip("/").removesuffix("/v1").rstrip("/") for url in urls.split(",") if url.strip()]
    for url in bases:
        try:
            check_url("--urls", url, KEY)
        except ValueError as error:
            raise ModelError(str(error)) from None
    if not bases:
        raise ModelError("--engine server needs --urls URL,URL")
    return list(dict.fromkeys(bases))


class Client:
    """Calls servers, from many threads."""

    def __init__(self):
        try:
            self.key = read_key(KEY)
        except ValueError as error:
            raise ModelError(str(error)) from None
        self.local = threading.local()          # a connection pool a thread

    def call(self, url: str, method: str, path: str, body: dict | None = None, limit_s: float | None = None) -> dict:
        """The JSON object of the answer. ServerRefused or ServerFailed if there is none."""
        if not hasattr(self.local, "session"):
            self.local.session = Session(trust_env=False)
            self.local.session.headers.update({"Authorization": f"Bearer {self.key}"} if self.key else {})
        if re.search(r"/v\d", urlsplit(url).path):
            path = path.removeprefix("/v1")     # the URL ends in a version of its own: /v1beta/openai
        limit_s = limit_s or ANSWER_S
        try:
            response, content = self.local.session.exchange(method, url + path, limit_s, MAX_ANSWER_BYTES, json=body)
        except (requests.RequestException, HTTPError, OSError, ValueError) as error:
            self.local.session.close()
            del self.local.session
            raise ServerFailed(f"{url}{path}: {type(error).__name__}: {redact(str(error))[:N_SHOWN]}") from None
        content = redact_bytes(content)                         # some servers say the key in it
        if response.status_code != 200:
            raise self._failure(url + path, response, content.decode("utf-8", "replace"))
        try:
            answer = load_answer(content) if content else {}
        except (ValueError, RecursionError) as error:
            raise ServerFailed(f"{url}{path}: {type(error).__name__}: {redact(str(error))[:N_SHOWN]}") from None
        if not isinstance(answer, dict):
            raise ServerFailed(f"{url}{path} answered no JSON object")
        return answer

    def _failure(self, where: str, response: requests.Response, answer: str) -> ServerFailed | ServerRefused:
        status = response.status_code
        message = f"{where} answered {status}: {answer[:N_SHOWN]}"
        if status >= 500 or status in (408, 429):
            wait = response.headers.get("Retry-After", "")                      # seconds; a date is not looked at
            return ServerFailed(message, status, answer, float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else 0.0)
        return ServerRefused(f"{message} ({ADVICE[status]})" if status in ADVICE else message, status, answer)
