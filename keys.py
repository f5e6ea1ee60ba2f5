"""The keys of servers: from the environment into one header, and nowhere else.

    WHALE_JUDGE_KEY, WHALE_PROPOSER_KEY, WHALE_ENGINE_KEY       for --judge-url, --proposer-url and --urls

What comes from a server, an agent or a library that talks to one goes through `redact` before it is shown, written or
kept: proxies say in their errors what they were sent, and an agent can print its environment. A key in a URL would be
in flags, logs and records, so `check_url` refuses it, and repeats nothing of what it refuses. Processes that need no
key are started with `without_secrets`.

SECURITY.md says what is promised; tests/test_secrets.py tries it.
"""

import ipaddress
import json
import os
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from urllib.parse import quote, urlsplit

HTTPS = "https"                         # to be named in --waive, where keys may go to other machines in the clear
NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.I)       # of variables: HF_TOKEN ...
USER = re.compile(r"//([^/@\s]*:[^/@\s]+)@")                                            # name:password in a URL
MIN_SECRET = 8                          # characters: "EMPTY", as one says to a server without a key, is no secret


def secrets(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of each variable that holds a secret, the longest first: one may be the beginning of another."""
    found = [(name, part.strip()) for name, value in environment.items()
             for part in ([value] if NAMES.search(name) else USER.findall(value))]
    return sorted((pair for pair in found if len(pair[1]) >= MIN_SECRET), key=lambda pair: -len(pair[1]))


def blots(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(what a secret looks like, what stands in its place): it may be quoted, as in URLs or in JSON."""
    return [(form, f"[{name}]") for name, value in secrets(environment) for form in dict.fromkeys(forms(value))]


def forms(value: str) -> Iterator[str]:
    """How texts quote a secret: as it is; as in URLs, with "/" or without, in either case; as in HTML; in JSON, where
    some libraries write escapes for "/" or for all that HTML could misread."""
    yield value
    for quoted in (quote(value, safe="", errors="replace"), quote(value, errors="replace")):
        yield from (quoted, re.sub("%..", lambda hex: hex[0].lower(), quoted))
    yield from (escape(value), escape(value, quote=False))
    written = json.dumps(value)[1:-1]
    yield from (written, written.replace("/", r"\/"))
    for escaped in ("\"&'+<=>", value):
        for unicode in (r"\u{:04x}", r"\u{:04X}"):
            yield "".join(unicode.format(ord(letter)) if letter in escaped else letter for letter in value)


def redact(said: str) -> str:
    """The text with the name of its variable in place of each secret."""
    for form, name in blots(os.environ):
        said = said.replace(form, name)
    return said


def redact_bytes(said: bytes) -> bytes:
    """The same before anything is decoded; bytes that are no UTF-8 stay as they are."""
    return redact(said.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def load_answer(content: bytes) -> object:
    """The JSON of a server's answer, no secret in its texts: any letter of one may have been an escape. ValueError or
    RecursionError if it is none."""
    answer = json.loads(content)
    written, spellings = json.dumps(answer, ensure_ascii=False), blots(os.environ)
    return redact_texts(answer) if any(form in written for form, _ in spellings) else answer


def redact_texts(value: object) -> object:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [redact_texts(part) for part in value]
    if isinstance(value, dict):
        return {redact(key): redact_texts(part) for key, part in value.items()}
    return value


def leave_no_core() -> None:
    """If this process holds a secret: neither it nor one below it leaves a core file, which would hold it too."""
    if secrets(os.environ):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process may see that needs no key."""
    return {name: value for name, value in environment.items() if not NAMES.search(name) and not USER.search(value)}


@contextmanager
def hidden_secrets() -> Iterator[None]:
    """For a library that starts programs of its own accord. Nothing else may go on: `redact` knows no secret here."""
    before = dict(os.environ)
    try:
        for name in before.keys() - without_secrets(before).keys():
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)


def read_key(name: str) -> str:
    """The key in that variable, "" if there is none. ValueError, without it, if it cannot be sent."""
    key = os.environ.get(name, "")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(f"{name} holds a character that no header may hold (a line end?)")
    return key


def is_loopback(url: str) -> bool:
    """Whether it leads to this machine by its very form: 127.0.0.1.example.com does not."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(flag: str, url: str, name: str = "") -> None:
    """ValueError unless it is a server's, and holds no secret. `name`: of the variable that a key belongs in."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:                      # a port that is none, half an IPv6 address
        fine = False
    if not fine or re.search(r"[@?#\\\s]", url) or not url.isprintable() or redact(url) != url:
        raise ValueError(f"{flag} must be like http://localhost:8000/v1: scheme, host, port and path, with no name or "
                         "password, no ? and no #" + f"; a key belongs in {name}" * bool(name) +
                         ". What was given is not repeated here")


def check_cleartext(flag: str, url: str, name: str) -> None:
    """ValueError if the network would see the key `name` on its way there."""
    if os.environ.get(name) and urlsplit(url).scheme == "http" and not is_loopback(url):
        raise ValueError(f"{flag} {url}: the key in {name} would go over the network in the clear; give an https:// "
                         f"URL, or unset {name}, or --waive {HTTPS} on a network of your own")
