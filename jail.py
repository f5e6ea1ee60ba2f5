"""The inner side of the sandbox: the helper process and the jailed children that it forks. The host has sandbox.py.

The helper is started by exec and never forked from the trainer, so no child can hold a copy of its memory or secrets.
Each child locks itself in with the layers of `lock_down`, in that order, and reports them *before* it is given code:

    rlimits         memory, CPU time, no file growth, no core file; dies with the helper (PR_SET_PDEATHSIG)
    no_new_privs    no setuid program could help it (and seccomp needs it)
    landlock        can read the standard library and nothing else: no /proc, no repository, no path to write
    closed_fds      has its own channel and no other descriptor
    no_caps         root without a capability
    seccomp         a list of allowed system calls (SYSCALLS); any other, known or new, fails with EPERM: no exec, fork,
                    thread, socket, kill, ptrace, prctl, mount, chmod, io_uring; no open() for writing
    namespaces      (optional, around the helper) own user, network, IPC and process-id namespace

All that a child sends is hostile input: a snippet's bytes are only ever text, a worker's frames are capped, parsed and
checked field by field. Not covered: a child can learn that a path exists (stat); programs of the same harness share a
worker process, so one could spy on another; kernel bugs and timing side channels.

This file is run by sandbox.py, in an empty environment, as `python -S -s -B jail.py --helper FD PID N`.
"""

import ctypes
import gc
import json
import math
import os
import platform
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import harness_api

# Nothing here may import `threading` (subprocess does): with it a fork of the helper costs 0.5 ms more.

LAYERS = ("rlimits", "no_new_privs", "landlock", "closed_fds", "no_caps", "seccomp")    # required; namespaces are not
PRELOAD = "cmath datetime decimal fractions functools heapq itertools re statistics string textwrap typing"

MAX_CODE_BYTES = 1 << 16            # of a snippet; fits into a socket's buffer, so handing it over never blocks
MAX_PRINT_BYTES = 64 << 20          # a snippet that prints more is killed
MAX_REQUEST_BYTES = 1 << 20         # of a program's request, as JSON
TICK_S = 0.5                        # the longest wait of the helper while a snippet runs;
OVERSLEPT_S = 1.0                   # one that took so much longer was no wait: the machine slept, or we were stopped
WALL_GRACE_S = 1.0                  # a snippet's limit on the clock is its CPU limit plus this: load is no crime

EXIT_RAISED, EXIT_MEMORY, EXIT_BROKEN = 1, 2, 3     # exit codes of a child; EXIT_BROKEN: the jail could not be built
# Nothing in the jail can send a signal, so these are somebody else's, or ours to a child that closed its channel.
# It runs again, but not for ever.
KILLED = ("it died of SIGKILL", "it died of SIGTERM", "it died of SIGHUP")


@dataclass(frozen=True)
class Limits:
    """What one snippet, or one exchange of a program, may use. `output_chars` is for snippets only."""

    seconds: float = 2.0
    memory_mb: int = 256
    output_chars: int = 4096

    def __post_init__(self):
        for name, low, high in (("seconds", 0.1, 3600), ("memory_mb", 64, 1 << 20), ("output_chars", 64, 1 << 20)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)} is outside {low} .. {high}")


# ---------------------------------------------------------------------------------------------- 1. the jail of a child

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEW_USER_IPC_PID = 0x10000000 | 0x08000000 | 0x20000000
CLONE_NEW_USER_NET_IPC_PID = CLONE_NEW_USER_IPC_PID | 0x40000000
CLOSE_RANGE, LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 436, 444, 445, 446
CAPSET, OPEN, OPENAT, FCNTL = (126, 2, 257, 72) if MACHINE == "x86_64" else (91, None, 56, 25)

# All that pure computation needs: name, number on x86_64, number on aarch64. Nothing here can name another process,
# make a descriptor that reaches outside, or change a file. open, openat, fcntl: below, judged by their arguments.
SYSCALLS = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; lseek 8 62; close 3 57; dup 32 23; dup2 33 -
dup3 292 24; getdents64 217 61; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; access 21 -
faccessat 269 48; faccessat2 439 439; getcwd 79 17; brk 12 214; mmap 9 222; munmap 11 215; mremap 25 216
mprotect 10 226; madvise 28 233; futex 202 98; sched_yield 24 124; rt_sigaction 13 134; rt_sigprocmask 14 135
rt_sigreturn 15 139; sigaltstack 131 132; alarm 37 -; setitimer 38 103; getitimer 36 102; pause 34 -; poll 7 -
ppoll 271 73; restart_syscall 219 128; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113
clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; getrusage 98 165; select 23 -; pselect6 270 72
getrandom 318 278; uname 63 160; sched_getaffinity 204 123; getpid 39 172; getppid 110 173; gettid 186 178
getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; exit 60 93; exit_group 231 94"""


class Filter(ctypes.Structure):     # struct sock_fprog
    _fields_ = [("n_lines", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def seccomp_filter() -> Filter:
    """Classic BPF: allow the listed calls, open for reading, and harmless fcntl commands; any other call is EPERM."""
    load, equal, any_bit, ret = 0x20, 0x15, 0x45, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000 | 1                # 1: EPERM
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    # no F_SETFL, F_SETOWN, F_SETSIG: together they make the kernel send any signal to any process of this user
    fcntl_ok = (0, 1, 2, 3, 1030)               # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[MACHINE]), (ret, 0, 0, kill),     # no i386 calls
            (load, 0, 0, 0)]                    # x32 numbers have bit 30 set, so they are not in the list
    for row in SYSCALLS.strip().replace("\n", ";").split(";"):
        number = row.split()[1 if MACHINE == "x86_64" else 2]
        code += [(equal, 0, 1, int(number)), (ret, 0, 0, allow)] if number != "-" else []
    for number, flags_at in ((OPEN, 24), (OPENAT, 32)):     # offset of the flags argument: low half, little-endian
        if number is not None:
            code += [(equal, 0, 4, number), (load, 0, 0, flags_at), (any_bit, 1, 0, writes), (ret, 0, 0, allow),
                     (ret, 0, 0, refuse)]
    code += [(equal, 0, 1 + 2 * len(fcntl_ok), FCNTL), (load, 0, 0, 24)]
    for command in fcntl_ok:
        code += [(equal, 0, 1, command), (ret, 0, 0, allow)]
    code += [(ret, 0, 0, refuse)]
    return Filter(len(code), b"".join(struct.pack("HBBI", *line) for line in code))


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def syscall(number: int, *args) -> int:
    return checked(LIBC.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *args))))


def new_ruleset(net: int = 0b11) -> tuple[int, int]:
    """-> a Landlock rule set, as a descriptor, and the rights to files that it withholds: all that this kernel knows.
    It withholds TCP too (`net`: bind, connect), and abstract unix sockets and signals to processes outside."""
    abi = syscall(LANDLOCK_CREATE, None, 0, 1)
    files, scoped = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1, 0b11
    handled = struct.pack("QQQ", files, net, scoped)[:8 if abi < 4 else 16 if abi < 6 else 24]
    return syscall(LANDLOCK_CREATE, handled, len(handled), 0), files


def allow(ruleset: int, path: str, rights: int) -> None:
    """Grants rights to a file, or to a directory and all below it."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def landlock_ruleset() -> int:
    """Everything that this kernel's Landlock can forbid is forbidden, but for reading the standard library (what is on
    sys.path; directories of installed packages excepted)."""
    ruleset, _ = new_ruleset()
    read_file, read_dir = 4, 8
    rules = {path: read_dir for path in sys.path if os.path.isdir(path)}
    for path in list(rules):
        rules |= {entry.path: read_file | read_dir if entry.is_dir() else read_file
                  for entry in os.scandir(path) if entry.name not in ("site-packages", "dist-packages")}
    for path, rights in rules.items():
        allow(ruleset, path, rights)
    return ruleset


def drop_capabilities() -> None:
    syscall(CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))


def set_limit(name: str, value: int) -> None:
    """A limit that this process cannot raise again; where it has a tighter one, that stays."""
    hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def die_with(parent: int) -> None:
    """This process gets SIGKILL when its parent ends, however the parent ends."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:                  # it ended before we asked
        os._exit(EXIT_BROKEN)


@dataclass
class Jail:
    """What the helper prepares once, so that a child has little to do: each page that it does not touch saves time."""

    namespaces: str             # why there are none; "" when there are
    ruleset: int | OSError      # Landlock's rules, or why there are none
    filter: Filter
    full_report: bytes = b""

    def __post_init__(self):
        self.full_report = self.report([*LAYERS], {})

    def report(self, on: list[str], off: dict[str, str]) -> bytes:
        outer = (["namespaces"], {}) if not self.namespaces else ([], {"namespaces": self.namespaces})
        return json.dumps({"on": outer[0] + on, "off": outer[1] | off}).encode() + b"\n"

    def lock_down(self, memory_mb: int, cpu_s: int | None) -> bytes:
        """Lock this process in; returns the report, a line of JSON. A layer that fails is reported, never skipped."""
        def rlimits():
            for name, value in (("AS", memory_mb << 20), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 32), ("NPROC", 0),
                                ("MEMLOCK", 0), *([("CPU", cpu_s)] if cpu_s else [])):
                set_limit(name, value)
            checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))    # a program that is sent core files heeds no limit

        def landlock():
            if isinstance(self.ruleset, OSError):
                raise self.ruleset
            syscall(LANDLOCK_RESTRICT, self.ruleset, 0)

        on, off = [], {}
        for name, apply in (
            ("rlimits", rlimits),
            ("no_new_privs", lambda: checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))),
            ("landlock", landlock),
            ("closed_fds", lambda: syscall(CLOSE_RANGE, 3, 0x7FFFFFFF, 0)),
            ("no_caps", drop_capabilities),
            ("seccomp", lambda: checked(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(self.filter), 0, 0))),
        ):
            try:
                apply()
                on.append(name)
            except (OSError, ValueError) as error:      # ValueError: setrlimit over a hard limit
                off[name] = str(error)
        return self.report(on, off) if off else self.full_report


def snippet_child(jail: Jail, channel: int, memory_mb: int, cpu_s: int | None) -> None:
    """A jailed child that runs one snippet. Its channel is its stdin (the code), stdout and stderr (what it prints);
    its exit code is the status. So nothing that the code writes can be taken for anything but its output."""
    for descriptor in (0, 1, 2):
        os.dup2(channel, descriptor)
    os.write(1, jail.lock_down(memory_mb, cpu_s))
    code = b"".join(iter(lambda: os.read(0, MAX_CODE_BYTES), b""))
    out = sys.stderr = sys.__stderr__ = sys.stdout      # set up by the helper: UTF-8, written line by line
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed(0)                      # the same code prints the same thing
    status, message = EXIT_RAISED, ""
    try:
        exec(compile(code.decode("utf-8", "surrogatepass"), "<python>", "exec"), vars(main))
        status = 0
    except SystemExit as stop:
        status, message = (0, "") if stop.code in (None, 0) else (EXIT_RAISED, f"SystemExit: {stop.code}\n")
    except MemoryError:
        status = EXIT_MEMORY
    except BaseException as error:      # whatever the code raised is its result
        message = "".join(traceback.format_exception_only(error))
    finally:
        try:
            out.flush()
            os.write(1, message.encode("utf-8", "backslashreplace")[:MAX_CODE_BYTES])
        finally:
            os._exit(status)            # no atexit, no destructor of the code's


# -------------------------------------------------------------------------------------- 2. frames between the processes

FRAME = struct.Struct("<I")             # length of the payload that follows


def pack_frame(payload: bytes) -> bytes:
    return FRAME.pack(len(payload)) + payload


def cut_frames(buffer: bytearray, max_bytes: int = sys.maxsize) -> Iterator[bytes]:
    """Cut the complete frames off the front of `buffer`. ValueError at one that is longer than `max_bytes`."""
    while len(buffer) >= 4:
        end = 4 + FRAME.unpack_from(buffer)[0]
        if end - 4 > max_bytes:
            raise ValueError(f"a frame of {end - 4} bytes")
        if len(buffer) < end:
            return
        payload = bytes(buffer[4:end])
        del buffer[:end]
        yield payload


class Channel:
    """Frames over a stream socket, never blocking: what cannot go out now waits in `outbox` until `readable` finds
    room, so two ends that write at the same time cannot hang."""

    def __init__(self, sock: socket.socket):
        self.sock, self.outbox, self.inbox = sock, bytearray(), bytearray()
        self.sockets_out: list[socket.socket] = []      # to be handed over; they go with the next byte, so not after
        self.fds_in: list[int] = []                     # the frame that tells what they are for
        sock.setblocking(False)

    def post(self, payload: bytes) -> None:
        """Goes out with the next flush."""
        self.outbox += pack_frame(payload)

    def send(self, payload: bytes, *sockets: socket.socket) -> None:
        self.post(payload)
        self.sockets_out += sockets
        self.flush()

    def flush(self) -> None:
        try:
            while self.outbox:
                if self.sockets_out:
                    n_sent = socket.send_fds(self.sock, [self.outbox], [s.fileno() for s in self.sockets_out])
                else:
                    n_sent = self.sock.send(self.outbox)
                self.drop_sockets()
                del self.outbox[:n_sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.outbox.clear()             # the other end is gone; reading says so
            self.drop_sockets()

    def drop_sockets(self) -> None:
        while self.sockets_out:
            self.sockets_out.pop().close()

    def read(self, max_fds: int = 0) -> bool:
        """Take what is there into `inbox`; False at the end of the stream."""
        try:
            if max_fds:
                chunk, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, max_fds)
                self.fds_in += fds
            else:
                chunk = self.sock.recv(1 << 18)
        except BlockingIOError:
            return True
        except ConnectionResetError:        # it died with input unread
            return False
        self.inbox += chunk
        return bool(chunk)


def readable(channels: Iterable[Channel], timeout_s: float | None) -> list[Channel]:
    """The channels with something to read (or at their end), after at most `timeout_s`; writes out what it can."""
    by_fd, poller, ready = {channel.sock.fileno(): channel for channel in channels}, select.poll(), []
    for fd, channel in by_fd.items():
        poller.register(fd, select.POLLIN | (select.POLLOUT if channel.outbox else 0))
    for fd, event in poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
        if event & select.POLLOUT:
            by_fd[fd].flush()
        if event & ~select.POLLOUT:
            ready.append(by_fd[fd])
    return ready


def to_json(message: dict, **options) -> bytes:
    """A lone surrogate becomes "?"."""
    return json.dumps(message, ensure_ascii=False, **options).encode("utf-8", "replace")


def split_message(payload: bytes) -> tuple[dict, bytes]:
    """Host and helper: a line of JSON, then raw bytes (a snippet's code, or its output)."""
    line, _, body = payload.partition(b"\n")
    return json.loads(line), body


# ------------------------------------------------------------------------------------- 3. a worker of harness programs


class HarnessProgram:
    """One program inside a worker: fresh modules, own `random` state."""

    def __init__(self, code: types.CodeType, seed: int):
        api = types.ModuleType("harness_api")
        own = {name: json.loads(json.dumps(vars(harness_api)[name])) for name in ("PYTHON", "SEARCH")}  # to change
        vars(api).update(vars(harness_api), **own)
        self.modules = {"harness_api": api, "harness": types.ModuleType("harness")}
        self.code, self.generator, self.request, self.is_over = code, None, None, False
        random.seed(seed)
        self.random_state = random.getstate()

    def exchange(self, frame: dict) -> bytes:
        """Hand over the task, the result of the last request, or the end; returns the program's next event as JSON."""
        program_id = frame["id"]
        sys.modules.update(self.modules)
        random.setstate(self.random_state)
        try:
            if "over" in frame:                     # a limit of the host's was reached
                self.is_over = True
                self.generator.close()
                return to_json({"id": program_id, "kind": "done"})
            if "task" in frame:
                exec(self.code, vars(self.modules["harness"]))
                self.generator = self.modules["harness"].run(frame["task"])
                if not isinstance(self.generator, types.GeneratorType):
                    raise TypeError("run(task) must be a generator function: it has to yield its requests")
            try:
                request = (next(self.generator) if "task" in frame
                           else self.generator.send(harness_api.parse_result(self.request, frame["result"])))
            except StopIteration:
                self.is_over = True
                return to_json({"id": program_id, "kind": "done"})
            if not (problem := harness_api.check_request(request)):
                self.request = request
                event = to_json({"id": program_id, "kind": "request", "request": request}, allow_nan=False)
                if len(event) <= MAX_REQUEST_BYTES:
                    return event
                problem = f"a request is at most {MAX_REQUEST_BYTES} bytes of JSON"
            self.is_over = True
            self.generator.close()
            return to_json({"id": program_id, "kind": "error", "message": problem})
        except MemoryError:
            os._exit(EXIT_MEMORY)
        except BaseException as error:      # whatever the program raised is its end
            self.is_over = True
            return to_json({"id": program_id, "kind": "error", "message": describe(error)})
        finally:
            self.random_state = random.getstate()


def describe(error: BaseException) -> str:
    """For example: ZeroDivisionError: division by zero (line 3 of the harness)"""
    words = traceback.format_exception_only(error)[-1].strip()[:500]
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<harness>"]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{words} (line {line} of the harness)" if line else words


def worker_child(jail: Jail, descriptor: int, memory_mb: int) -> None:
    """A jailed child that runs many programs. Frames are answered in order, one answer each, so that the first
    unanswered one names the program that runs. Time is the host's concern: there is no CPU limit here."""
    os.dup2(descriptor, 0)
    for standard in (1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), standard)
    os.write(0, jail.lock_down(memory_mb, None))
    sys.stderr = sys.__stderr__ = sys.stdout
    sys.stdin = sys.__stdin__ = None
    sys.modules["__main__"] = types.ModuleType("__main__")
    code, broken, programs, inbox = None, "", {}, bytearray()
    while chunk := os.read(0, 1 << 18):
        inbox += chunk
        for frame in map(json.loads, cut_frames(inbox)):
            if "source" in frame:
                try:
                    code = compile(frame["source"], "<harness>", "exec")
                except (SyntaxError, ValueError, RecursionError) as error:
                    broken = describe(error)
                continue
            program_id = frame["id"]
            if "task" in frame and not broken:
                programs[program_id] = HarnessProgram(code, frame["seed"])
            if program_id in programs:
                event = programs[program_id].exchange(frame)
                if programs[program_id].is_over:
                    del programs[program_id]
            else:
                why = broken or "the program has ended already"
                event = to_json({"id": program_id, "kind": "error", "message": why})
            reply = memoryview(pack_frame(event))
            while reply:
                reply = reply[os.write(0, reply):]


# ---------------------------------------------------------------------------------------------- 4. the helper process


@dataclass
class Child:
    """The helper's note of one running snippet."""

    job: int | str
    pid: int
    channel: Channel
    code: bytes
    limits: Limits
    deadline: float
    is_trusted: bool = False        # its report was right, and it has the code
    head: bytearray = field(default_factory=bytearray)      # first and last bytes of its output, each at most half of
    tail: bytearray = field(default_factory=bytearray)      # what `output_chars` can be in UTF-8
    n_bytes: int = 0
    is_late: bool = False           # we killed it for its time, if it had not ended by then
    why: str = ""                   # why else we killed it


def fork_to_order(jail: Jail, orders: socket.socket) -> None:
    """The process that forks the children. A child begins as a copy of it, and can read all of its memory: so it never
    sees the code or the output of any. An order is [child's function, arguments] with the child's channel, answered by
    a pid; or a pid, to be killed and reaped, answered by its exit code (negative: a signal; one that it chose before
    the kill stays) and its CPU seconds."""
    me = os.getpid()
    while order := socket.recv_fds(orders, 1024, 1):
        match json.loads(order[0] or b"null"):
            case None:
                return
            case [name, *args]:
                descriptor, answer = order[1][0], os.fork()
                if answer == 0:
                    try:
                        die_with(me)
                        orders.close()
                        {"snippet": snippet_child, "worker": worker_child}[name](jail, descriptor, *args)
                    finally:
                        os._exit(EXIT_BROKEN)
                os.close(descriptor)
            case pid:
                os.kill(pid, signal.SIGKILL)
                _, status, usage = os.wait4(pid, 0)
                answer = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        orders.send(json.dumps(answer).encode())


class Helper:
    """The helper's loop. Single-threaded; it waits for nobody but the forker, and that for a child that it killed."""

    def __init__(self, control: socket.socket, max_jobs: int, jail: Jail):
        self.orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        me, self.forker = os.getpid(), os.fork()
        if self.forker == 0:
            try:
                die_with(me)
                control.close()
                self.orders.close()
                fork_to_order(jail, theirs)
            finally:
                os._exit(EXIT_BROKEN)
        theirs.close()
        self.control, self.max_jobs = Channel(control), max_jobs
        self.queue: deque[tuple[int | str, bytes, Limits]] = deque()
        self.snippets: list[Child] = []
        self.workers: dict[str, int] = {}           # job -> pid
        self.once_more: set[int | str] = set()      # snippets that run again
        ours, theirs = socket.socketpair()
        pid = self.fork(theirs, "snippet", Limits().memory_mb, math.ceil(Limits().seconds))
        with ours, ours.makefile("rb") as lines:    # a throw-away child proves the layers: our first message
            self.proven = lines.readline()
        self.end(pid)
        self.tell({"job": "report", "report": json.loads(self.proven or b"null")})

    def tell(self, head: dict, body: bytes = b"") -> None:
        self.control.send(to_json(head) + b"\n" + body)

    def ask_forker(self, order: list | int, *descriptors: int) -> int | list:
        try:
            socket.send_fds(self.orders, [json.dumps(order).encode()], descriptors)
            return json.loads(self.orders.recv(1024))
        except ValueError:                                  # nothing: it is dead, and so are its children
            raise OSError("it cannot make another process") from None

    def fork(self, channel: socket.socket, *order) -> int:
        with channel:
            return self.ask_forker([*order], channel.fileno())

    def end(self, pid: int) -> tuple[int, float]:
        """Kill and reap a child; returns its exit code and its CPU seconds."""
        return tuple(self.ask_forker(pid))

    def serve(self) -> None:
        """Until the host closes its end, or dies."""
        while True:
            due, began = min((child.deadline for child in self.snippets), default=math.inf), time.monotonic()
            ready = readable([self.control, *(child.channel for child in self.snippets)],
                             None if due == math.inf else min(max(0, due - began), TICK_S))
            if (slept := time.monotonic() - began) > TICK_S + OVERSLEPT_S:
                for child in self.snippets:         # we all were stopped (SIGSTOP, a paused machine): not its time
                    child.deadline += slept
            if self.control in ready:
                if not self.control.read(max_fds=8):
                    break
                for payload in cut_frames(self.control.inbox):
                    self.obey(*split_message(payload))
            for child in list(self.snippets):
                if child.channel in ready:
                    self.read_output(child)
                if time.monotonic() >= child.deadline:
                    child.deadline, child.is_late = math.inf, True
                    os.kill(child.pid, signal.SIGKILL)
            while self.queue and len(self.snippets) < self.max_jobs:
                self.start_snippet(*self.queue.popleft())
        for pid in [*self.workers.values(), *(child.pid for child in self.snippets)]:
            self.end(pid)
        self.orders.close()
        os.waitpid(self.forker, 0)

    def obey(self, head: dict, body: bytes) -> None:
        op, job = head["op"], head["job"]
        if op == "ping":
            self.tell({"job": job})
        elif op == "snippet":
            self.queue.append((job, body, Limits(**head["limits"])))
        elif op == "worker":
            channel = socket.socket(fileno=self.control.fds_in.pop(0))
            self.workers[job] = self.fork(channel, "worker", head["memory_mb"])
        elif op == "cpu":           # the number of another process's CPU clock is made as in clock_getcpuclockid(3)
            self.tell({"job": job, "cpu_s": time.clock_gettime((~self.workers[job] << 3) | 2)})
        elif op == "end":
            self.tell({"job": job, "exit": self.end(self.workers.pop(job))[0]})

    def start_snippet(self, job: int | str, code: bytes, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        pid = self.fork(theirs, "snippet", limits.memory_mb, math.ceil(limits.seconds))
        deadline = time.monotonic() + limits.seconds + WALL_GRACE_S
        self.snippets.append(Child(job, pid, Channel(ours), code, limits, deadline))

    def read_output(self, child: Child) -> None:
        channel = child.channel
        if not channel.read():
            self.finish(child)
        elif child.is_trusted:
            half, room = 2 * child.limits.output_chars, 2 * child.limits.output_chars - len(child.head)
            child.n_bytes += len(channel.inbox)
            child.head += channel.inbox[:room]
            child.tail = (child.tail + channel.inbox[room:])[-half:]
            channel.inbox.clear()
            if child.n_bytes > MAX_PRINT_BYTES:
                self.kill(child, f"it printed more than {MAX_PRINT_BYTES >> 20} MB")
        elif channel.inbox == self.proven:          # only now the code leaves us
            child.is_trusted = True
            channel.inbox.clear()
            channel.outbox += child.code
            channel.flush()
            channel.sock.shutdown(socket.SHUT_WR)
        elif not self.proven.startswith(channel.inbox):
            self.kill(child, f"its layers differ from the proven ones: {bytes(channel.inbox)!r:.500}")

    def kill(self, child: Child, why: str) -> None:
        child.why = child.why or why
        os.kill(child.pid, signal.SIGKILL)

    def finish(self, child: Child) -> None:
        """Its channel is closed: it is dead, or can tell us nothing any more. Reap it and answer."""
        self.snippets.remove(child)
        child.channel.sock.close()
        child.deadline = math.inf                   # from here on its pid may be another's
        code, cpu_s = self.end(child.pid)
        status = ("infra" if not child.is_trusted else "killed" if child.why else "ok" if code == 0
                  else "error" if code == EXIT_RAISED else "killed")
        why = child.why or cause_of_death(code, child.limits, math.inf if child.is_late else cpu_s)
        if why in KILLED and child.job not in self.once_more:
            self.once_more.add(child.job)
            return self.queue.append((child.job, child.code, child.limits))
        self.once_more.discard(child.job)
        self.tell({"job": child.job, "status": status, "why": why, "n_bytes": child.n_bytes}, child.head + child.tail)


def cause_of_death(code: int, limits: Limits, cpu_s: float = 0.0) -> str:
    """A child's exit code in words; "" when there is nothing to say."""
    if code == EXIT_MEMORY:
        return f"memory limit of {limits.memory_mb} MB reached"
    if code == -signal.SIGKILL and cpu_s >= math.ceil(limits.seconds) - 0.1:    # RLIMIT_CPU
        return f"time limit of {limits.seconds:g} s reached"
    if code < 0:
        return f"it died of {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    return f"exit status {code}" if code > EXIT_RAISED else ""


def enter_namespaces(kinds: int = CLONE_NEW_USER_NET_IPC_PID) -> str:
    """Own user, network, IPC and process-id namespaces for what we fork from now on; returns why not, or ""."""
    def enter():
        ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
        checked(LIBC.unshare(kinds))
        for name, text in (("setgroups", "deny"), *((name, f"{i} {i} 1") for name, i in ids.items())):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

    # First in a throw-away child: some systems let unshare pass and refuse the map, which would leave us as nobody.
    pid = os.fork()
    if pid == 0:
        try:
            enter()
            os._exit(0)
        except OSError as error:
            os._exit(min(error.errno or 255, 255))
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        return os.strerror(code)
    enter()
    return ""


def helper_main(control_fd: int, host_pid: int, max_jobs: int) -> None:
    """The helper's entry point: `python -S -s -B jail.py --helper FD PID N`, in an empty environment."""
    die_with(host_pid)
    sys.path.pop(0)                         # this file's directory: from here on the standard library only
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")              # if memory runs out, the kernel takes one of us, not the trainer
    except OSError:
        pass                                # a courtesy, no layer
    control = socket.socket(fileno=control_fd)
    why_not = enter_namespaces()
    if not why_not:
        inner = os.fork()                   # process 1 of the new namespace: its end is the end of all in it
        if inner:
            control.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        die_with(0)                         # our parent is outside the namespace and has no number here
    for name in PRELOAD.split():
        __import__(name)
    try:
        ruleset = landlock_ruleset()
    except OSError as error:
        ruleset = error
    jail = Jail(why_not, ruleset, seccomp_filter())
    # A child's stdout; line by line, so that what was printed before a limit is not lost.
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.environ.clear()
    gc.collect()
    gc.freeze()                             # a child's collector then leaves the shared pages alone
    Helper(control, max_jobs, jail).serve()


if __name__ == "__main__" and sys.argv[1:2] == ["--helper"]:
    try:
        helper_main(*map(int, sys.argv[2:]))
    except OSError as caught:               # no process or no descriptor is left for us; said before our sockets close
        os.write(2, f"the sandbox's helper process: {caught}\n".encode())
        os._exit(EXIT_BROKEN)
