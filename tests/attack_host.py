"""The host of test_attacks.py: makes a world worth attacking, puts itself into a setting, and runs attacks in the
sandbox, or outside of it. The job comes as JSON on stdin, the results go as JSON to stdout.

It is copied beside the files of the sandbox, and imports nothing else, so that an ordinary user can run it.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time

LIBC = ctypes.CDLL(None, use_errno=True)
ROOT = os.path.dirname(os.path.abspath(__file__))
X86 = os.uname().machine == "x86_64"
CANARY = os.environ.get("API_KEY", "")
HARNESS = """
def run(task):
    import contextlib, io
    from harness_api import python
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            exec(task["code"], {"__name__": "attack"})
        except BaseException as error:
            print(repr(error))
    yield python(output.getvalue()[-4000:])
"""


class World:
    """Files, listeners and shared memory that an attack might reach; open to every user of this machine."""

    def __init__(self, folder: str):
        os.chmod(folder, 0o755)
        self.folder = folder
        os.makedirs(f"{folder}/open")
        os.chmod(f"{folder}/open", 0o777)
        for name in ("answers.jsonl", "config.json", "open/mine", "module.py"):
            with open(f"{folder}/{name}", "w") as file:
                file.write(f"text = {CANARY!r}\n")
        os.symlink(f"{folder}/answers.jsonl", f"{folder}/link")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.path, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.path.bind(f"{folder}/socket")
        self.abstract.bind(f"\0whale-attack-{os.getpid()}")
        for listener in (self.path, self.abstract):
            listener.listen()
        os.set_inheritable(os.open(f"{folder}/answers.jsonl", os.O_RDONLY), True)

    def fill(self, code: str) -> str:
        words = {"HOST_PID": os.getpid(), "WORLD": self.folder, "TCP_PORT": self.tcp.getsockname()[1], "ROOT": ROOT,
                 "UDP_PORT": self.udp.getsockname()[1], "CANARY": CANARY}
        for word, value in words.items():
            code = code.replace(word, str(value))
        return code


# --- settings ---


def install_filter(*code: tuple[int, int, int, int]) -> None:
    """Seccomp, for this process and all below."""
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in (*code, (6, 0, 0, 0x7FFF0000))))
    program = struct.pack("HxxxxxxP", len(code) + 1, ctypes.addressof(lines))
    if LIBC.prctl(22, 2, program, 0, 0):                    # root does it without no_new_privs
        LIBC.prctl(38, 1, 0, 0, 0)
        assert LIBC.prctl(22, 2, program, 0, 0) == 0


def refuse_call(number: int, errno: int, mask: int | None = None, option: int | None = None) -> None:
    """Refuse a system call: always, if its first argument has a bit of `mask`, or if it is `option`."""
    refuse = (6, 0, 0, 0x50000 | errno)
    if mask is option is None:
        return install_filter((0x20, 0, 0, 0), (0x15, 0, 1, number), refuse)
    test = (0x15, 0, 1, option) if mask is None else (0x45, 0, 1, mask)
    install_filter((0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), test, refuse)


def as_in_a_container() -> None:
    """No new namespaces, no mounts (Docker's seccomp profile)."""
    for number in (272, 56) if X86 else (97, 220):          # unshare, clone
        refuse_call(number, 1, mask=0x7E020080)
    for number in (308, 165, 442) if X86 else (268, 40, 442):           # setns, mount, mount_setattr
        refuse_call(number, 1)
    refuse_call(435, 38)                                    # clone3, as if there were none


def without_capabilities() -> None:
    for number in range(64):
        LIBC.prctl(24, number, 0, 0, 0)                                                 # out of the bounding set
    assert LIBC.syscall(126 if X86 else 91, struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0       # capset


def without(layer: str) -> None:
    """A kernel that lacks a layer's system call."""
    number = {"landlock": 444, "closed_fds": 436, "no_caps": 126 if X86 else 91, "rlimits": 302 if X86 else 261}
    if layer in number:
        return refuse_call(number[layer], 38)
    refuse_call(157 if X86 else 167, 38, option={"no_new_privs": 38, "seccomp": 22}[layer])


def without_folders(*folders: str) -> None:
    """Own mounts, read-only, and nothing in these."""
    assert LIBC.unshare(0x20000) == 0 and LIBC.mount(b"/", b"/", None, 0x44000, None) == 0
    for folder in folders:
        if os.path.isdir(folder):
            assert LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None) == 0
    attributes = struct.pack("QQQQ", 1, 0, 0, 0)
    assert LIBC.syscall(442, -100, b"/", 0x8000, attributes, 32) == 0


def with_hostile_environment(world: World) -> None:
    for name in ("sitecustomize", "usercustomize", "json", "harness_api"):
        with open(f"{world.folder}/open/{name}.py", "w") as file:
            file.write(f"open({world.folder + '/open/ran'!r}, 'w'); raise SystemExit('BREACH')\n")
    os.environ |= {"PYTHONPATH": f"{world.folder}/open", "PYTHONHOME": world.folder, "PYTHONSTARTUP": "json.py",
                   "LD_PRELOAD": f"{world.folder}/open/none.so", "PYTHONINSPECT": "1", "PYTHONSAFEPATH": "1",
                   "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "ascii", "HOME": f"{world.folder}/open"}
    gone = tempfile.mkdtemp(dir=world.folder)
    os.chdir(gone)
    os.rmdir(gone)


def with_tight_limits() -> None:
    for name, value in (("NOFILE", 24), ("AS", 1 << 30), ("CPU", 60), ("CORE", 0), ("FSIZE", 1 << 20), ("STACK", 1 << 20)):
        limit = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(limit, (value, value))


def enter(setting: str, world: World) -> None:
    for word in setting.split():
        match word.split(":"):
            case ["container"]:
                as_in_a_container()
            case ["powerless"]:
                without_capabilities()
            case ["without", layer]:
                without(layer)
            case ["bare", *folders]:
                without_folders(*folders)
            case ["processes", n]:
                resource.setrlimit(resource.RLIMIT_NPROC, (int(n), int(n)))
            case ["environment"]:
                with_hostile_environment(world)
            case ["limits"]:
                with_tight_limits()


# --- the attacks ---


def run_outside(code: str) -> list[str]:
    """In a process of its own, as it would be inside."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        for descriptor in (1, 2):
            os.dup2(theirs, descriptor)
        try:
            exec(code, {"__name__": "attack"})
            sys.stdout.flush()
        except BaseException as error:
            os.write(1, repr(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        output = file.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    return ["outside", output]


def run_inside(job: dict, fill) -> dict:
    from sandbox import Limits, Programs, Sandbox, SandboxUnavailable

    limits, answer = Limits(**job.get("limits", {})), {}
    try:
        sandbox = Sandbox(tuple(job.get("waive", ())), max_jobs=job.get("max_jobs", 2))
    except SandboxUnavailable as error:
        return {"refused": str(error)}
    with sandbox:
        begun = time.monotonic()
        for name, code in job["attacks"].items():
            sandbox.python_start(name, fill(code), limits)
        tool = {name: sandbox.python_wait(name) for name in job["attacks"]}
        answer["tool"] = {name: [result.status, result.output] for name, result in tool.items()}
        answer["harness"], apart = {}, job.get("apart", False)      # apart: a worker each, as it may be the last thing
        programs = None
        for number, (name, code) in enumerate(job["attacks"].items()):
            programs = programs if programs and not apart else Programs(sandbox, HARNESS, limits)
            programs.start(number, {"code": fill(code)}, 0)
            event = programs.wait(number)
            answer["harness"][name] = [event.kind, event.request["code"] if event.request else event.message]
            if apart:
                programs.close()
        if programs:
            programs.close()
        answer |= {"layers": sandbox.layers, "seconds": round(time.monotonic() - begun, 2),
                   "after": [*vars(sandbox.python("print(6 * 7)", Limits())).values()]}
    return answer


def main() -> None:
    job = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        world = World(folder)
        enter(job["setting"], world)
        if job["setting"] == "outside":
            answer = {name: run_outside(world.fill(code)) for name, code in job["attacks"].items()}
        else:
            answer = run_inside(job, world.fill)
        try:
            os.waitpid(-1, os.WNOHANG)
            answer["children"] = "some are left"
        except ChildProcessError:
            answer["children"] = ""
        answer["world"] = sorted(os.listdir(folder)) + sorted(os.listdir(f"{folder}/open"))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
