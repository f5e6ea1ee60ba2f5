"""One exchange with a server over HTTP, bounded in bytes and by the clock."""

import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection

import requests

CONNECT_S = 10          # at most, to each address of a server
AGAIN_S = 0.1           # a connection that was still being made when the time was up has a socket by then


class TooMuch(ValueError):
    """Its answer is longer than allowed."""


@contextmanager
def ends_within(limit_s: float, sockets: Collection[socket.socket]) -> Iterator[None]:
    """TimeoutError once the time is up: the sockets are then shut, also those that come later. A socket's own timeout
    is for one read: it ends no server that drips its headers, says 100 Continue for ever, or whose chunks or trailers
    have no end."""
    done, is_late = threading.Event(), False

    def watch() -> None:
        nonlocal is_late
        wait_s = limit_s
        while not done.wait(wait_s):
            is_late, wait_s = True, AGAIN_S
            for sock in list(sockets):
                with suppress(OSError):                         # it is closed
                    sock.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except TimeoutError:
        is_late = True
    except Exception:
        if not is_late:
            raise
    finally:
        done.set()
        watcher.join()
    if is_late:         # also where nothing was raised: a shut socket looks like the end of an answer
        raise TimeoutError(f"timed out: no whole answer in {limit_s:.3g} s")


class Adapter(requests.adapters.HTTPAdapter):
    """Keeps its connections' sockets for `ends_within`: they forget them while the last answer still comes."""

    def __init__(self):
        self.sockets: dict[HTTPConnection, socket.socket] = {}
        super().__init__()

    def get_connection_with_tls_context(self, *args, **kwargs):
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = partial(self._make, type(pool).ConnectionCls)
        return pool

    def _make(self, kind: type[HTTPConnection], **kwargs) -> HTTPConnection:
        def connect() -> None:
            kind.connect(connection)
            self.sockets[connection] = connection.sock

        connection = kind(**kwargs)
        connection.connect = connect
        return connection


class Session(requests.Session):
    """Of one thread; for one after an exchange that failed, a new one: nothing is known of that connection."""

    def __init__(self, trust_env: bool):
        super().__init__()
        self.trust_env, self.adapter = trust_env, Adapter()
        self.mount("http://", self.adapter)
        self.mount("https://", self.adapter)

    def exchange(self, method: str, url: str, limit_s: float, max_bytes: int, **how) -> tuple[requests.Response, bytes]:
        """The answer, of which no redirect is followed, and its content. Errors are those of requests and urllib3,
        OSError (a TimeoutError is one) and ValueError."""
        content = bytearray()
        with ends_within(limit_s, self.adapter.sockets.values()), self.request(
                method, url, timeout=(min(CONNECT_S, limit_s), limit_s), stream=True, allow_redirects=False,
                **how) as response:
            while part := response.raw.read1(1 << 16, decode_content=True):         # stream() reads lines of any length
                content += part
                if len(content) > max_bytes:
                    raise TooMuch(f"too much: more than {max_bytes} bytes")
        return response, bytes(content)
