"""Runs untrusted code: the Python tool's snippets, and the harness programs. Linux on x86_64 or aarch64; no dependency.

    host (trainer) --exec, empty environment--> helper --fork--> one jailed child a snippet: `Sandbox.python`
                                                       --fork--> jailed workers, many programs each: `Programs`

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

A missing layer is refused (SandboxUnavailable) unless waived by name, and then it is in `Sandbox.layers["waived"]`.
All that a child sends is hostile input: a snippet's bytes are only ever text, a worker's frames are capped, parsed and
checked field by field. Not covered: a child can learn that a path exists (stat); programs of the same harness share a
worker process, so one could spy on another; kernel bugs and timing side channels.

    bash run.sh sandbox FILE.py --seconds 2 --mb 256
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
from dataclasses import asdict, dataclass, field

import harness_api

# `subprocess` is imported where it is used: it brings `threading`, with which a fork of the helper costs 0.5 ms more.

LAYERS = ("rlimits", "no_new_privs", "landlock", "closed_fds", "no_caps", "seccomp")    # required; namespaces are not
PRELOAD = "cmath datetime decimal fractions functools heapq itertools re statistics string textwrap typing"

MAX_CODE_BYTES = 1 << 16            # of a snippet; fits into a socket's buffer, so handing it over never blocks
MAX_PRINT_BYTES = 64 << 20          # a snippet that prints more is killed
MAX_REQUEST_BYTES = 1 << 20         # of a program's request, as JSON
MAX_DEATHS = 3                      # of one harness's workers, before all its programs are killed
MAX_RESPAWNS = 3                    # of the helper, in one Sandbox
WALL_GRACE_S = 1.0                  # a snippet's limit on the clock is its CPU limit plus this: load is no crime
WALL_FACTOR = 4                     # a program's limit on the clock, as a multiple of its CPU limit
SILENCE_S = 5.0                     # a helper that says nothing for this long, and then answers no ping, is given up

EXIT_RAISED, EXIT_MEMORY, EXIT_BROKEN = 1, 2, 3     # exit codes of a child; EXIT_BROKEN: the jail could not be built


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


@dataclass(frozen=True)
class ToolResult:
    status: str     # "ok" | "error": it raised | "killed": a limit was reached or it died | "infra": our fault
    output: str     # what it printed (stdout and stderr), then the error or the limit in words


@dataclass(frozen=True)
class Event:
    kind: str               # "request" | "done" | "error" | "killed" | "infra"
    request: dict | None    # checked by harness_api.check_request
    message: str


class SandboxUnavailable(RuntimeError):
    """A required layer is missing here and was not waived."""


LOST = "the sandbox's helper process died or did not answer"

# ---------------------------------------------------------------------------------------------- 1. the jail of a child

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEW_USER_NET_IPC_PID = 0x10000000 | 0x40000000 | 0x08000000 | 0x20000000
CLOSE_RANGE, LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 436, 444, 445, 446
CAPSET, OPEN, OPENAT, FCNTL = (126, 2, 257, 72) if MACHINE == "x86_64" else (91, None, 56, 25)

# All that pure computation needs: name, number on x86_64, number on aarch64. Nothing here can name another process,
# make a descriptor that reaches outside, or change a file. open, openat, fcntl: below, judged by their arguments.
SYSCALLS = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; lseek 8 62; close 3 57; dup 32 23; dup2 33 -
dup3 292 24; getdents64 217 61; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; access 21 -
faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getcwd 79 17; brk 12 214; mmap 9 222
munmap 11 215; mremap 25 216; mprotect 10 226; madvise 28 233; futex 202 98; sched_yield 24 124; rt_sigaction 13 134
rt_sigprocmask 14 135; rt_sigreturn 15 139; sigaltstack 131 132; alarm 37 -; setitimer 38 103; getitimer 36 102
pause 34 -; poll 7 -; ppoll 271 73; restart_syscall 219 128; nanosleep 35 101; clock_nanosleep 230 115
clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; getrusage 98 165
select 23 -; pselect6 270 72; getrandom 318 278; uname 63 160; sched_getaffinity 204 123; getpid 39 172
getppid 110 173; gettid 186 178; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; exit 60 93
exit_group 231 94"""


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


def landlock_ruleset() -> int:
    """A rule set, as a descriptor: everything that this kernel's Landlock can forbid is forbidden, but for reading the
    standard library (what is on sys.path; directories of installed packages excepted)."""
    abi = syscall(LANDLOCK_CREATE, None, 0, 1)
    files = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    net, scoped = 0b11, 0b11                    # TCP bind and connect; abstract unix sockets and signals
    handled = struct.pack("QQQ", files, net, scoped)[:8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = syscall(LANDLOCK_CREATE, handled, len(handled), 0)
    read_file, read_dir = 4, 8
    rules = {path: read_dir for path in sys.path if os.path.isdir(path)}
    for path in list(rules):
        rules |= {entry.path: read_file | read_dir if entry.is_dir() else read_file
                  for entry in os.scandir(path) if entry.name not in ("site-packages", "dist-packages")}
    for path, rights in rules.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    return ruleset


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
            cpu = resource.RLIM_INFINITY if cpu_s is None else cpu_s
            for name, value in (("AS", memory_mb << 20), ("CPU", cpu), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 32),
                                ("NPROC", 0), ("MEMLOCK", 0)):
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))

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
            ("no_caps", lambda: syscall(CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))),
            ("seccomp", lambda: checked(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(self.filter), 0, 0))),
        ):
            try:
                apply()
                on.append(name)
            except (OSError, ValueError) as error:      # ValueError: setrlimit over a hard limit
                off[name] = str(error)
        return self.report(on, off) if off else self.full_report


def snippet_child(jail: Jail, channel: int, limits: Limits) -> None:
    """A jailed child that runs one snippet. Its channel is its stdin (the code), stdout and stderr (what it prints);
    its exit code is the status. So nothing that the code writes can be taken for anything but its output."""
    for descriptor in (0, 1, 2):
        os.dup2(channel, descriptor)
    os.write(1, jail.lock_down(limits.memory_mb, math.ceil(limits.seconds)))
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

    def send(self, payload: bytes, *sockets: socket.socket) -> None:
        self.outbox += pack_frame(payload)
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
        vars(api).update(vars(harness_api), PYTHON=json.loads(json.dumps(harness_api.PYTHON)))      # own copy to change
        self.modules = {"harness_api": api, "harness": types.ModuleType("harness")}
        self.code, self.generator, self.request, self.is_over = code, None, None, False
        random.seed(seed)
        self.random_state = random.getstate()

    def exchange(self, frame: dict) -> bytes:
        """Hand over the task, or the result of the last request; returns the program's next event as JSON."""
        program_id = frame["id"]
        sys.modules.update(self.modules)
        random.setstate(self.random_state)
        try:
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
    why: str = ""                   # why we killed it


class Helper:
    """The helper's loop. Single-threaded; it waits for nobody but a child that it has killed."""

    def __init__(self, control: socket.socket, max_jobs: int, jail: Jail):
        self.control, self.max_jobs, self.jail = Channel(control), max_jobs, jail
        self.queue: deque[tuple[int | str, bytes, Limits]] = deque()
        self.snippets: list[Child] = []
        self.workers: dict[str, int] = {}           # job -> pid
        ours, theirs = socket.socketpair()
        pid = self.fork(theirs, snippet_child, Limits())
        with ours, ours.makefile("rb") as lines:    # a throw-away child proves the layers: our first message
            self.proven = lines.readline()
        self.end(pid)
        self.tell({"job": "report", "report": json.loads(self.proven or b"null")})

    def tell(self, head: dict, body: bytes = b"") -> None:
        self.control.send(to_json(head) + b"\n" + body)

    def fork(self, channel: socket.socket, run, *args) -> int:
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with(me)
                run(self.jail, channel.fileno(), *args)
            finally:
                os._exit(EXIT_BROKEN)
        channel.close()
        return pid

    def end(self, pid: int) -> tuple[int, float]:
        """Kill and reap a child; returns its exit code (negative: a signal) and its CPU seconds. A child that has begun
        to exit keeps its own code."""
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime

    def serve(self) -> None:
        """Until the host closes its end, or dies."""
        while True:
            due = min((child.deadline for child in self.snippets), default=math.inf)
            ready = readable([self.control, *(child.channel for child in self.snippets)],
                             None if due == math.inf else max(0, due - time.monotonic()))
            if self.control in ready:
                if not self.control.read(max_fds=8):
                    break
                for payload in cut_frames(self.control.inbox):
                    self.obey(*split_message(payload))
            for child in list(self.snippets):
                if child.channel in ready:
                    self.read_output(child)
                if time.monotonic() >= child.deadline:
                    child.deadline = math.inf
                    self.kill(child, f"time limit of {child.limits.seconds:g} s reached")
            while self.queue and len(self.snippets) < self.max_jobs:
                self.start_snippet(*self.queue.popleft())
        for pid in [*self.workers.values(), *(child.pid for child in self.snippets)]:
            self.end(pid)

    def obey(self, head: dict, body: bytes) -> None:
        op, job = head["op"], head["job"]
        if op == "ping":
            self.tell({"job": job})
        elif op == "snippet":
            self.queue.append((job, body, Limits(**head["limits"])))
        elif op == "worker":
            channel = socket.socket(fileno=self.control.fds_in.pop(0))
            self.workers[job] = self.fork(channel, worker_child, head["memory_mb"])
        elif op == "cpu":           # the number of another process's CPU clock is made as in clock_getcpuclockid(3)
            self.tell({"job": job, "cpu_s": time.clock_gettime((~self.workers[job] << 3) | 2)})
        elif op == "end":
            self.tell({"job": job, "exit": self.end(self.workers.pop(job))[0]})

    def start_snippet(self, job: int | str, code: bytes, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        pid = self.fork(theirs, snippet_child, limits)
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
        code, cpu_s = self.end(child.pid)
        status = ("infra" if not child.is_trusted else "killed" if child.why else "ok" if code == 0
                  else "error" if code == EXIT_RAISED else "killed")
        why = child.why or cause_of_death(code, child.limits, cpu_s)
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


def enter_namespaces() -> str:
    """Own user, network, IPC and process-id namespaces for what we fork from now on; returns why not, or ""."""
    def enter():
        ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
        checked(LIBC.unshare(CLONE_NEW_USER_NET_IPC_PID))
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
    """The helper's entry point: `python -S -s -B sandbox.py --helper FD PID N`, in an empty environment."""
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


# --------------------------------------------------------------------------------------------------- 5. the host's side


class Sandbox:
    """The helper process; one a run, made by a thread that outlives it (the helper dies with that thread)."""

    def __init__(self, waive: tuple[str, ...] = (), max_jobs: int = os.cpu_count() or 1):
        if unknown := set(waive) - set(LAYERS):
            raise ValueError(f"--waive {' '.join(sorted(unknown))}: no such layer; they are {', '.join(LAYERS)}")
        if sys.platform != "linux" or MACHINE not in AUDIT_ARCH:
            raise SandboxUnavailable(f"the sandbox needs Linux on {' or '.join(AUDIT_ARCH)} (Landlock, seccomp); "
                                     f"this is {sys.platform} on {MACHINE}")
        self.waive, self.max_jobs = tuple(waive), max_jobs
        self._jobs: dict[int | str, Limits] = {}        # started and not yet waited for
        self._answers: dict[int | str, tuple[dict, bytes]] = {}
        self._control: Channel | None = None            # None: no helper
        self._n_spawned, self._n_names = 0, 0
        self.layers = self._spawn()

    def _spawn(self) -> dict:
        """Start a helper and judge its report; returns the layers. SandboxUnavailable if it will not do."""
        import subprocess

        # PYTHONHASHSEED: a program that loops over a set does the same in every run.
        env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        if "LD_LIBRARY_PATH" in os.environ:             # some interpreters find their own library only by it
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(           # -S -s: no site-packages
                [sys.executable, "-S", "-s", "-B", os.path.abspath(__file__), "--helper",
                 *map(str, (theirs.fileno(), os.getpid(), self.max_jobs))],
                env=env, cwd="/", pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True)                 # Ctrl-C is for the host
        self._control, self._n_spawned = Channel(ours), self._n_spawned + 1
        if (answer := self._await("report")) is None:
            raise SandboxUnavailable("the sandbox's helper process did not start; its error is above")
        report = answer[0]["report"] or {"on": [], "off": {}}
        missing = {name: report["off"].get(name, "not reported") for name in LAYERS if name not in report["on"]}
        if refused := {name: why for name, why in missing.items() if name not in self.waive}:
            self._lose_helper()
            raise SandboxUnavailable(
                "; ".join(f"sandbox layer {name} is missing here: {why}" for name, why in refused.items())
                + f". To run untrusted code without: {' '.join(f'--waive {name}' for name in refused)}")
        return {"on": report["on"], "off": report["off"], "waived": [name for name in self.waive if name in missing]}

    def _lose_helper(self) -> None:
        """The helper is dead, or is now, with all below it; every open job is `infra`."""
        self._process.kill()
        self._process.wait()
        if self._control is not None:
            self._control.sock.close()
            self._control = None
        for job in self._jobs:
            self._answers.setdefault(job, ({"status": "infra", "why": LOST, "n_bytes": 0}, b""))

    def _revive(self) -> None:
        """A new helper in place of a lost one, with the same layers; not for ever."""
        if self._control is None and self._n_spawned <= MAX_RESPAWNS:
            try:
                if self._spawn() != self.layers:
                    self._lose_helper()
            except SandboxUnavailable:
                pass                        # there is no helper, and the caller's job will be `infra`

    def _tell(self, head: dict, body: bytes = b"", *sockets: socket.socket) -> None:
        if self._control is not None:
            self._control.send(to_json(head) + b"\n" + body, *sockets)

    def _await(self, job: int | str) -> tuple[dict, bytes] | None:
        """The helper's answer for a job; None if it is lost, which a silence of twice SILENCE_S makes it."""
        is_pinged, give_up = False, time.monotonic() + SILENCE_S
        while job not in self._answers:
            if self._control is None:
                return None
            if readable([self._control], SILENCE_S):
                if not self._control.read():
                    self._lose_helper()
                    continue
                for head, body in map(split_message, cut_frames(self._control.inbox)):
                    self._answers[head["job"]] = head, body
                is_pinged, give_up = False, time.monotonic() + SILENCE_S
            elif time.monotonic() >= give_up:
                if is_pinged:
                    self._lose_helper()
                self._tell({"op": "ping", "job": "ping"})
                is_pinged, give_up = True, time.monotonic() + SILENCE_S
        return self._answers.pop(job)

    def python_start(self, job_id: int | str, code: str, limits: Limits) -> None:
        """Run a snippet; does not wait. At most `max_jobs` run at once; a job's time begins when its child does."""
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is already there")
        self._revive()
        self._jobs[job_id] = limits
        body = code.encode("utf-8", "surrogatepass")
        if len(body) > MAX_CODE_BYTES:
            why = f"the code is longer than {MAX_CODE_BYTES} bytes"
            self._answers[job_id] = {"status": "error", "why": why, "n_bytes": 0}, b""
        else:
            self._tell({"op": "snippet", "job": job_id, "limits": asdict(limits)}, body)

    def python_wait(self, job_id: int | str) -> ToolResult:
        """The result of a started snippet; blocks for that one only."""
        head, body = self._await(job_id) or ({"status": "infra", "why": LOST, "n_bytes": 0}, b"")
        limits, text = self._jobs.pop(job_id), body.decode("utf-8", "replace")
        if head["n_bytes"] > len(body) or len(text) > limits.output_chars:
            note = f"\n[... {head['n_bytes']} bytes of output, cut here ...]\n"
            keep = max(0, limits.output_chars - len(note))
            text = text[:keep // 2] + note + text[len(text) - (keep - keep // 2):]
        if head["why"]:
            text += ("\n" if text and not text.endswith("\n") else "") + f"[{head['status']}: {head['why']}]\n"
        return ToolResult(head["status"], text)

    def python(self, code: str, limits: Limits) -> ToolResult:
        """Run a snippet and wait for it."""
        job = self._new_name()
        self.python_start(job, code, limits)
        return self.python_wait(job)

    def _new_name(self) -> str:
        self._n_names += 1
        return f"#{self._n_names}"          # no clash with the caller's numbers

    def spawn_worker(self, memory_mb: int) -> tuple[str, Channel] | None:
        """For Programs: a jailed worker, after its report was checked, and the channel to it. None: no helper."""
        self._revive()
        if self._control is None:
            return None
        job, (ours, theirs) = self._new_name(), socket.socketpair()
        self._tell({"op": "worker", "job": job, "memory_mb": memory_mb}, b"", theirs)
        channel = Channel(ours)
        while self._control is not None and not channel.inbox.endswith(b"\n"):
            if not readable([channel], 2 * SILENCE_S):
                self._lose_helper()
            elif not channel.read():
                break
        layers = json.loads(channel.inbox) if channel.inbox.endswith(b"\n") else {}
        if layers != {"on": self.layers["on"], "off": self.layers["off"]}:
            ours.close()
            self.ask_worker("end", job)         # or learn that there is no helper
            return None
        channel.inbox.clear()
        return job, channel

    def ask_worker(self, op: str, job: str) -> dict | None:
        """op "cpu": the CPU seconds of a worker so far; "end": kill it, and say how it ended. None: no helper."""
        self._tell({"op": op, "job": job})
        answer = self._await(job)
        return answer and answer[0]

    def close(self) -> None:
        """End the helper and everything below it."""
        if self._control is not None:
            self._control.sock.close()      # it reads the end of the stream, kills its children and goes
            self._control = None
            give_up = time.monotonic() + SILENCE_S
            while self._process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.002)
        self._lose_helper()
        self._n_spawned = MAX_RESPAWNS + 1

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@dataclass
class Program:
    """The host's note of one program: enough to bring it back in a fresh worker."""

    program_id: int
    frames: list[bytes]             # all that it was sent
    n_answers: int = 0              # taken from it since its start
    n_to_skip: int = 0              # after a replay: answers that were taken before its worker died
    event: Event | None = None      # not yet waited for


@dataclass
class Worker:
    """The host's note of one worker process."""

    job: str
    slot: int
    channel: Channel
    pending: deque[Program] = field(default_factory=deque)      # whose answers are due, in the order of their frames
    n_answers: int = 0
    watch: tuple[int, float, float] | None = None       # n_answers, time and CPU seconds when it was found silent


class Programs:
    """Runs the programs of one harness source, spread over `n_workers` jailed processes. Single-threaded.

    A program depends on its task, seed and results only: not on the others, nor on the number of workers. One that
    makes its worker die (memory, crash) or takes too long is "killed"; the worker's others are replayed in a new one.
    The time of an exchange is the worker's CPU time, with a generous limit on the clock for one that sleeps.
    """

    def __init__(self, sandbox: Sandbox, source: str, limits: Limits, n_workers: int = 1):
        self.sandbox, self.source, self.limits = sandbox, source, limits
        self._programs: dict[int, Program] = {}
        self._n_deaths = 0
        self._workers: list[Worker | None] = [None] * n_workers
        for slot in range(n_workers):
            self._start_worker(slot)

    def start(self, program_id: int, task: dict, seed: int) -> None:
        """Begin `run(task)`; does not wait. `task` holds the visible fields only."""
        if program_id in self._programs:
            raise ValueError(f"program {program_id} is already there")
        program = self._programs[program_id] = Program(program_id, [])
        slot = program_id % len(self._workers)
        if self._n_deaths >= MAX_DEATHS:
            program.event = self._given_up()
        elif self._workers[slot] is None and not self._start_worker(slot):
            program.event = Event("infra", None, LOST)
        else:
            self._submit(program, to_json({"id": program_id, "task": task, "seed": seed}))

    def resume(self, program_id: int, result: dict) -> None:
        """Answer the program's last request; does not wait."""
        program = self._programs[program_id]
        if program.event is None:           # else it was lost with its worker, as `wait` will say
            self._submit(program, to_json({"id": program_id, "result": result}))

    def wait(self, program_id: int) -> Event:
        """The program's next event; blocks for that one only, but serves all. After any but "request" it is gone."""
        program = self._programs[program_id]
        while program.event is None:
            workers = {worker.channel: worker for worker in self._workers if worker}
            ready = readable(workers, self.limits.seconds / 2)
            for channel in ready:
                if self._workers[workers[channel].slot] is workers[channel]:    # else it was ended a moment ago
                    self._read(workers[channel])
            if not ready:
                self._check_time(self._workers[program_id % len(self._workers)])
        event, program.event = program.event, None
        if event.kind != "request":
            del self._programs[program_id]
        return event

    def close(self) -> None:
        for worker in filter(None, self._workers):
            self._end(worker)
        self._programs.clear()

    def _start_worker(self, slot: int) -> bool:
        if spawned := self.sandbox.spawn_worker(self.limits.memory_mb):
            self._workers[slot] = Worker(spawned[0], slot, spawned[1])
            spawned[1].send(to_json({"source": self.source}))
        return spawned is not None

    def _submit(self, program: Program, *frames: bytes) -> None:
        program.frames += frames
        worker = self._workers[program.program_id % len(self._workers)]
        for frame in frames:
            worker.pending.append(program)
            worker.channel.send(frame)

    def _read(self, worker: Worker) -> None:
        if not worker.channel.read():
            self._bury(worker, "")
            return
        try:
            for payload in cut_frames(worker.channel.inbox, MAX_REQUEST_BYTES):
                program_id, event = parse_answer(payload)
                if not worker.pending or worker.pending[0].program_id != program_id:
                    raise ValueError(f"program {program_id} was not asked")
                program = worker.pending.popleft()
                worker.n_answers += 1
                if program.n_to_skip:
                    program.n_to_skip -= 1
                else:
                    program.n_answers, program.event = program.n_answers + 1, event
        except (ValueError, RecursionError) as error:
            self._bury(worker, f"it wrote to the sandbox's own channel: {error!r:.200}")

    def _check_time(self, worker: Worker) -> None:
        """The worker was silent for a while: end it if its exchange has had its time."""
        answer, now = self.sandbox.ask_worker("cpu", worker.job), time.monotonic()
        if answer is None:
            self._bury(worker, "")
        elif worker.watch is None or worker.watch[0] != worker.n_answers:
            worker.watch = (worker.n_answers, now, answer["cpu_s"])
        elif (answer["cpu_s"] - worker.watch[2] >= self.limits.seconds
              or now - worker.watch[1] >= WALL_FACTOR * self.limits.seconds):
            self._bury(worker, f"time limit of {self.limits.seconds:g} s for one exchange reached")

    def _end(self, worker: Worker) -> dict | None:
        worker.channel.sock.close()
        self._workers[worker.slot] = None
        return self.sandbox.ask_worker("end", worker.job)

    def _bury(self, worker: Worker, why: str) -> None:
        """End a worker that is dead or must die, blame the program that ran, bring the others back in a new worker."""
        answer = self._end(worker)
        if answer is not None:
            self._n_deaths += 1
            if worker.pending:
                why = why or cause_of_death(answer["exit"], self.limits) or "it ended its worker"
                worker.pending[0].event = Event("killed", None, why)
        lives = [p for p in self._programs.values() if p.event is None or p.event.kind == "request"]
        ours = [p for p in lives if p.program_id % len(self._workers) == worker.slot]
        if self._n_deaths >= MAX_DEATHS:
            for program in lives:
                program.event = self._given_up()
            for other in filter(None, self._workers):
                self._end(other)
        elif answer is None or ours and not self._start_worker(worker.slot):
            for program in ours:
                program.event = Event("infra", None, LOST)
        else:
            for program in ours:
                frames, program.frames, program.n_to_skip = program.frames, [], program.n_answers
                self._submit(program, *frames)

    def _given_up(self) -> Event:
        return Event("killed", None, f"this harness ended its worker {MAX_DEATHS} times; none of its programs runs on")


def parse_answer(payload: bytes) -> tuple[int, Event]:
    """A worker's frame. ValueError for all that an honest worker does not send."""
    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    message = json.loads(payload, parse_constant=refuse)
    if not isinstance(message, dict) or type(message.get("id")) is not int:
        raise ValueError("no program id")
    if b"\\ud" in payload or b"\\uD" in payload:
        json.dumps(message, ensure_ascii=False).encode()        # UnicodeEncodeError: a lone surrogate was smuggled in
    kind, request, words = message.get("kind"), message.get("request"), message.get("message", "")
    if not isinstance(words, str) or kind not in ("request", "done", "error"):
        raise ValueError("no event")
    if kind == "request" and (problem := harness_api.check_request(request)):
        raise ValueError(problem)
    return message["id"], Event(kind, request if kind == "request" else None, words[:1000])


def run_snippet(path: str, limits: Limits, waive: tuple[str, ...] = ()) -> dict:
    """`bash run.sh sandbox FILE.py`: one snippet as the Python tool runs it."""
    with open(path, encoding="utf-8") as file:
        code = file.read()
    with Sandbox(waive, max_jobs=1) as sandbox:
        return {**asdict(sandbox.python(code, limits)), "layers": sandbox.layers}


if __name__ == "__main__" and sys.argv[1:2] == ["--helper"]:
    helper_main(*map(int, sys.argv[2:]))
