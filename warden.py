"""The process between a run and a coding agent: it starts the agent, holds its limits, and leaves nothing of it behind.

    run --exec--> warden --fork--> first process --fork--> the agent --> whatever it starts

The first process is process 1 of a process-id namespace of the agent's own, where this system allows one: when it ends,
the kernel ends all in it, however they were forked. Elsewhere it, and the warden above it, are given every orphan
(PR_SET_CHILD_SUBREAPER), and the warden stops and kills until no descendant is left.

The agent is locked in before it is started, with jail.py's means; a layer that fails is refused, or waived by name:

    landlock        reads all but the closed paths, writes the writable ones only; no signal and no ptrace (so no
                    /proc/PID/environ) of a process that is not its own
    no_new_privs    no setuid program;  no_caps: root without a capability;  closed_fds: no descriptor of ours
    rlimits         the size of a file, no core file; processes, where they are counted for it alone
    namespaces      (where allowed) own user and process ids, and own mounts: all are read-only but for its places, as
                    Landlock knows no right to change a file's mode, owner or times

Its network is left as it is, since it must reach its model. Nor is its memory limited, but if memory runs out the
kernel takes it first.

The warden ends the agent when a limit is passed, when the run that started it is gone, and on SIGTERM. It is run by
agent_cmd.py, in an empty environment, as `python -S -s -E -B warden.py`; the job is JSON on its standard input, what
came of it is JSON on its standard output.
"""

import errno
import json
import math
import os
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jail

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEW_MOUNTS, NOSUID, NODEV, NOEXEC = 0x20000, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18                    # of mount()
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15         # truncate, ioctl of a device
TICK_S = 0.05                   # between two looks at the clock and at how many processes there are
COUNT_TICK_S = 1.0              # between two counts of its processes, which take longer
DISK_TICK_S = 1.0               # between two looks at what it wrote
CANNOT_START = 126              # exit code of an agent that was not started; the reason is on its standard error


# ---- the wall -------------------------------------------------------------------------------------------------------


def readable_paths(closed: Iterable[str]) -> list[str]:
    """Landlock can only allow. So: each child of each folder above a closed path, but for those folders themselves.
    What is made in one of them later on cannot be read, nor can the folder be listed."""
    closed = {os.path.realpath(path) for path in closed}
    above = {str(folder) for path in closed for folder in Path(path).parents}
    if not above:
        return ["/"]
    allowed = []
    for folder in sorted(above):
        if not any(Path(folder).is_relative_to(path) for path in closed):
            try:
                allowed += [entry.path for entry in os.scandir(folder)
                            if entry.path not in above | closed and not entry.is_symlink()]
            except OSError:                             # not there, or not to be listed by us: nor by the agent
                continue
    return allowed


def make_ruleset(closed: Iterable[str], writable: Iterable[str]) -> int:
    """Landlock's rules for an agent. OSError where there is no Landlock."""
    ruleset, files = jail.new_ruleset(net=0)
    for paths, rights in ((readable_paths(closed), EXECUTE | READ_FILE | READ_DIR), (writable, files)):
        for path in paths:
            try:
                jail.allow(ruleset, path, rights if os.path.isdir(path) else rights & OF_FILES & files)
            except OSError as error:                    # gone meanwhile, or one of the kinds that have no rules
                if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENXIO, errno.EBADFD):
                    raise
    return ruleset


def own_mounts(places: Iterable[str], ruleset: int | None) -> str:
    """Mounts of this process's own, all of them read-only but for these places; returns why not, or "". Sockets, pipes
    and devices are written all the same. With Landlock waived (no `ruleset`) they stay as they are."""
    try:
        jail.checked(jail.LIBC.unshare(CLONE_NEW_MOUNTS))
        show_own_ids(ruleset)
        if ruleset is None:
            return ""
        mount("/", "/", RECURSIVE | PRIVATE)            # what is mounted outside later on does not come in here
        places = sorted({os.path.realpath(place) for place in places})          # a folder before what lies in it
        for place in places:
            mount(place, place, BIND | RECURSIVE)
        set_mounts("/", AT_RECURSIVE, READ_ONLY, 0)
        for place in places:
            try:
                set_mounts(place, AT_RECURSIVE, 0, READ_ONLY)
            except PermissionError:                     # it, or a mount below it, was read-only before
                try:
                    set_mounts(place, 0, 0, READ_ONLY)
                except PermissionError:
                    pass
        if os.path.isdir("/dev/pts"):                   # terminals of its own: somebody types into those that are there
            mount("devpts", "/dev/pts", NOSUID | NOEXEC, b"devpts", b"ptmxmode=0666")
            if ruleset is not None:
                unused, files = jail.new_ruleset(net=0)
                os.close(unused)
                jail.allow(ruleset, "/dev/pts", files)
    except OSError as error:
        return str(error)
    return ""


def mount(source: str, target: str, flags: int, kind: bytes | None = None, options: bytes | None = None) -> None:
    jail.checked(jail.LIBC.mount(os.fsencode(source), os.fsencode(target), kind, flags, options))


def set_mounts(path: str, flags: int, added: int, removed: int) -> None:
    """Attributes of the mount at `path`, or of all below it too (Linux 5.12, so wherever there is Landlock)."""
    attributes = struct.pack("QQQQ", added, removed, 0, 0)
    jail.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))


def show_own_ids(ruleset: int | None) -> None:
    """A /proc with the process ids of this namespace. A container may refuse that; then `ps` is of no use in it."""
    try:
        mount("proc", "/proc", NOSUID | NODEV | NOEXEC, b"proc")
        if ruleset is not None:
            jail.allow(ruleset, "/proc", EXECUTE | READ_FILE | READ_DIR)
    except OSError:
        pass


def become_agent(job: dict, ruleset: int | None, own_ids: bool, parent: int, proc: int, out: int, err: int) -> None:
    """Lock this process in, and turn it into the agent. `proc`: a /proc that can be written."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        jail.die_with(parent)
        os.setsid()
        os.nice(10)                                     # behind the warden, and behind the run
        os.write(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), b"1000")
        limits = {"FSIZE": job["disk_bytes"], "CORE": 0}
        if own_ids:                                     # else it would count all that this user runs
            limits["NPROC"] = job["n_processes"]
        for name, value in limits.items():
            jail.set_limit(name, value)
        os.chdir(job["cwd"])
        jail.checked(jail.LIBC.prctl(jail.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if ruleset is not None:
            jail.syscall(jail.LANDLOCK_RESTRICT, ruleset, 0)
        jail.syscall(jail.CLOSE_RANGE, 3, 0x7FFFFFFF, 0)
        jail.drop_capabilities()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # Python ignores them, and an exec would pass that on
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except OSError as error:
        os.write(2, f"{job['argv'][0]} could not be started: {error}\n".encode("utf-8", "backslashreplace"))
        os._exit(CANNOT_START)


# ---- its processes --------------------------------------------------------------------------------------------------


def start(job: dict, ruleset: int | None, own_ids: bool) -> tuple[int, str, int, int, int]:
    """-> the first process, why its mounts are not its own, and descriptors to read: the agent's exit code, its output,
    its errors."""
    me, proc = os.getpid(), os.open("/proc", os.O_PATH)
    (status, status_in), (out, out_in), (err, err_in), (built, built_in) = (os.pipe() for _ in range(4))
    first = os.fork()
    if first == 0:
        try:
            jail.die_with(0 if own_ids else me)         # in a namespace of its own its parent has no number
            jail.checked(jail.LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
            if own_ids:
                os.write(built_in, own_mounts(job["places"], ruleset).encode())
            os.close(built_in)
            parent = os.getpid()
            agent = os.fork()
            if agent == 0:
                become_agent(job, ruleset, own_ids, parent, proc, out_in, err_in)
            for descriptor in (out_in, err_in, out, err, status, proc):
                os.close(descriptor)
            while True:                                 # reaps all that are given to it, until it is killed
                try:
                    ended, code = os.wait()
                except ChildProcessError:
                    signal.pause()
                    continue
                if ended == agent:
                    os.write(status_in, str(os.waitstatus_to_exitcode(code)).encode())
        finally:
            os._exit(CANNOT_START)
    for descriptor in (status_in, out_in, err_in, built_in):
        os.close(descriptor)
    return first, os.read(built, 1000).decode(), status, out, err


def descendants(root: int) -> list[int]:
    """All processes below `root` that are not dead; orphans too, as they were given to one of us."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):               # ended meanwhile
                continue
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(entry))
    found, open_ends = [], [root]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def end_all(first: int, own_ids: bool) -> None:
    """Kills the first process, and all that are left, until none is."""
    os.kill(first, signal.SIGKILL)
    if own_ids:
        os.waitpid(first, 0)                            # returns when the kernel has ended all in the namespace
        return
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:                       # none below us: nor is one below them, it would be ours
            return
        for sign in (signal.SIGSTOP, signal.SIGKILL):   # stopped first, so that it does not fork while we look
            for pid in descendants(os.getpid()):
                try:
                    os.kill(pid, sign)
                except OSError:
                    pass
        time.sleep(0.01)


def threads_of_system() -> int:
    """Quickly told: a hint that it is time to count."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[3].split(b"/")[1])


def disk_use(folders: list[str], max_bytes: float = math.inf, max_files: float = math.inf) -> tuple[str, int, int]:
    """-> what is wrong with what lies in these folders, or ""; its bytes; its files, folders among them. A folder that
    cannot be looked into is wrong."""
    open_ends, n_bytes, n_files = list(folders), 0, 0
    while open_ends:
        try:
            with os.scandir(open_ends.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        open_ends.append(entry.path)
                    n_bytes, n_files = n_bytes + entry.stat(follow_symlinks=False).st_blocks * 512, n_files + 1
                    if n_bytes > max_bytes or n_files > max_files:
                        return "disk", n_bytes, n_files
        except FileNotFoundError:                       # removed meanwhile
            continue
        except OSError:
            return "hidden", n_bytes, n_files
    return "", n_bytes, n_files


# ---- a session ------------------------------------------------------------------------------------------------------


class Blotter:
    """What comes in pieces, without the secrets in it. What may be the beginning of one waits for the next piece."""

    def __init__(self, blots: list[list[str]]):
        self.names = {os.fsencode(form): os.fsencode(name) for form, name in blots}         # the longest first
        self.secret = re.compile(b"|".join(map(re.escape, self.names)) or b"(?!)")
        self.rest = b""

    def take(self, piece: bytes, is_last: bool = False) -> bytes:
        said, shown = self.rest + piece, b""
        while True:
            n_open = 0 if is_last else max((n for form in self.names for n in range(1, len(form))
                                            if said.endswith(form[:n])), default=0)
            found = self.secret.search(said)
            if not found or found.start() >= len(said) - n_open:
                self.rest = said[len(said) - n_open:]
                return shown + said[:len(said) - n_open]
            shown += said[:found.start()] + self.names[found[0]]
            said = said[found.end():]


def watch(job: dict, ruleset: int | None, own_ids: bool) -> dict:
    """The agent from start to end -> {"end", "code", "n_left", "n_bytes", "mounts"}. `end` is "exit", or the limit that
    it passed; `n_left`: processes that it left; `mounts`: why they are not its own."""
    _, bytes_before, files_before = disk_use(job["watched"])
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    first, mounts, status, out, err = start(job, ruleset, own_ids)
    end, code, n_bytes = "", None, 0
    files = {out: os.open(job["transcript"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
             err: os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)}
    blotters = {descriptor: Blotter(job.get("blots", [])) for descriptor in files}
    poller = select.poll()
    for descriptor in (status, out, err):
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLIN)

    def take(descriptor: int) -> bool:
        """Writes down what the agent said; False if there is no more."""
        nonlocal n_bytes
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        os.write(files[descriptor], blotters[descriptor].take(chunk[:max(0, job["output_bytes"] - n_bytes)]))
        n_bytes += len(chunk)
        return bool(chunk)

    begun = next_count = time.monotonic()
    next_disk, n_threads = begun + DISK_TICK_S, threads_of_system()
    while not end:
        for descriptor, _ in poller.poll(TICK_S * 1000):
            if descriptor == status:
                told = os.read(status, 100)
                end, code = "exit", int(told) if told else None     # None: the first process was killed
            elif not take(descriptor):
                poller.unregister(descriptor)                       # its end; the agent may live on
        now = time.monotonic()
        if n_bytes > job["output_bytes"]:
            end = "output"
        elif now - begun > job["wall_s"]:
            end = "time"
        elif stopped or os.getppid() != job["host"]:
            end = "stopped"
        elif not end and (now >= next_count or threads_of_system() > n_threads + job["n_processes"]):
            next_count = now + COUNT_TICK_S
            end = "processes" if len(descendants(first)) > job["n_processes"] else ""
        elif not end and now >= next_disk:
            end, *_ = disk_use(job["watched"], bytes_before + job["disk_bytes"], files_before + job["n_files"])
            next_disk = time.monotonic() + DISK_TICK_S
    n_left = len(descendants(first)) if end == "exit" else 0        # else all of them were, and the limit says why
    end_all(first, own_ids)
    for descriptor in (out, err):
        while n_bytes <= job["output_bytes"] and take(descriptor):
            pass
        os.write(files[descriptor], blotters[descriptor].take(b"", is_last=True))
    end = "output" if n_bytes > job["output_bytes"] else end
    return {"end": end, "code": code, "n_left": n_left, "n_bytes": n_bytes, "mounts": mounts}


def main() -> None:
    job = json.load(sys.stdin)
    jail.checked(jail.LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    missing, ruleset = {}, None
    try:
        ruleset = make_ruleset(job["closed"], job["writable"])
    except OSError as error:
        missing["landlock"] = str(error)
    if job["landlock"] is False:
        ruleset = None                                  # waived, whether there is one or not
    if ruleset is None and job["landlock"]:
        return tell({"end": "refused", "missing": missing})
    if why := jail.enter_namespaces(jail.CLONE_NEW_USER_IPC_PID) if job["namespaces"] else "not asked for":
        missing["namespaces"] = why
    report = watch(job, ruleset, not why)
    tell(report | {"missing": missing | ({"mounts": report["mounts"]} if report["mounts"] else {})})


def tell(report: dict) -> None:
    try:
        os.write(1, json.dumps(report).encode())
    except BrokenPipeError:                             # the run is gone
        pass


if __name__ == "__main__":
    main()
