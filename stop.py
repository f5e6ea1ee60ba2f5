"""How the program ends when it is told to: Ctrl-C, a scheduler's SIGTERM, a terminal that is gone (SIGHUP).

The first signal raises Stopped where the program is. Nothing has to be saved: each finished step is on disk, and files
are replaced whole. Some code swallows an exception (a callback, a destructor, a library) or takes its time, so a thread
watches: after LIMIT_S, or at a second signal, it kills what is below this process and ends it, with the same exit code,
128 + the signal's number. A signal that was ignored from the start (nohup) stays ignored.
"""

import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType

from jail import die_with
from warden import descendants

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIMIT_S = 3.5               # to end in good order
is_listening = was_told = False
can_raise = False           # None: it has


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end."""


def listen() -> None:
    """From here on in this process. Until `can_raise` there is nothing to end in good order."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:                              # closed: what is opened next would be taken for it
            setattr(sys, name, open(os.devnull, mode))
    sys.excepthook = tell_fault
    threading.excepthook = lambda fault: tell_fault(fault.exc_type, fault.exc_value, fault.exc_traceback)
    if launcher := os.environ.get("WHALE_LAUNCHER"):                # no rank outlives it, however it ends
        die_with(int(launcher))
    global is_listening
    is_listening = True
    heard, told = os.pipe()
    os.set_blocking(told, False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)           # written at once, whatever Python is busy with
    threading.Thread(target=watch, args=(heard,), daemon=True).start()


def hear(number: int, frame) -> None:
    global can_raise
    if can_raise is None:                                           # the second time, which is for `watch`
        return
    if not can_raise:
        tell(number)
        os._exit(128 + number)
    can_raise = None
    raise Stopped(signal.Signals(number))


def watch(heard: int) -> None:
    while (number := os.read(heard, 1)[0]) not in SIGNALS:
        pass
    if "LOCAL_RANK" in os.environ:                                  # the terminal's, then the launcher's: one request
        time.sleep(1)
        os.set_blocking(heard, False)
        while select.select([heard], [], [], 0)[0]:
            os.read(heard, 64)
    select.select([heard], [], [], LIMIT_S)
    end_children()
    tell(number)
    os._exit(128 + number)


def tell(number: int) -> None:
    """Once, to a person whose cursor a progress bar may have hidden."""
    global was_told
    if not was_told:
        was_told = True
        try:
            shown = "\x1b[?25h" * sys.stderr.isatty()
            print(f"{shown}run.sh: stopped by {signal.Signals(number).name}; what was finished is on disk, and the "
                  "same command goes on from there", file=sys.stderr, flush=True)
        except (OSError, ValueError):                               # there is nobody to be told any more
            pass


def tell_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nothing here has foreseen, in one line: a traceback helps no user. A file keeps it, without secrets. With
    WHALE_TRACEBACK=1 it is shown."""
    from screen import plain                                            # not for each process that listens

    whole = plain("".join(traceback.format_exception(kind, error, trace)))
    with suppress(OSError, ValueError):                                 # there is nobody to be told any more
        try:
            if os.environ.get("WHALE_TRACEBACK"):
                raise FileNotFoundError                                 # asked for here
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="whale-fault-", suffix=".txt",
                                             delete=False) as file:
                file.write(whole)
        except OSError:
            sys.stderr.write(whole)
        else:
            said = " ".join(plain(str(error)).split())[:1000]
            sys.stderr.write(f"run.sh: unexpected {kind.__name__}: {said}. What was finished is on disk. This is a "
                             f"fault of WHALE: please report it, with {file.name}\n")


def end_children() -> None:
    """All that is below this process and has not ended by itself."""
    give_up = time.monotonic() + 1
    while (left := descendants(os.getpid())) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:                                         # ended meanwhile
                pass
        time.sleep(0.02)
