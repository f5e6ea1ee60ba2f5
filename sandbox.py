"""Runs untrusted code: the Python tool's snippets, and the harness programs. Linux on x86_64 or aarch64; no dependency.

    host (trainer) --exec, empty environment--> helper --fork--> one jailed child a snippet: `Sandbox.python`
                                                       --fork--> jailed workers, many programs each: `Programs`

jail.py is what runs inside: the helper, and the layers that a child puts on before it is given code. A missing layer is
refused (SandboxUnavailable) unless waived by name, and then it is in `Sandbox.layers["waived"]`.

    bash run.sh sandbox FILE.py --seconds 2 --mb 256
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace

import harness_api
import jail
from jail import (
    AUDIT_ARCH, KILLED, LAYERS, MACHINE, MAX_CODE_BYTES, MAX_REQUEST_BYTES, OVERSLEPT_S, Channel, Limits,
    cause_of_death, cut_frames, readable, split_message, to_json)

MAX_DEATHS = 3                      # of one harness's workers, before all its programs are killed
MAX_RESPAWNS = 3                    # of the helper, in one batch of programs
WALL_FACTOR = 4                     # a program's limit on the clock, as a multiple of its CPU limit
SILENCE_S = 5.0                     # a helper that says nothing for this long, and then answers no ping, is given up


@dataclass(frozen=True)
class ToolResult:
    status: str     # "ok" | "error": it raised | "killed": a limit was reached or it died | "infra": our fault
    output: str     # what it printed (stdout and stderr), then the error or the limit in words


@dataclass(frozen=True)
class Event:
    kind: str               # "request" | "done" | "error" | "killed" | "infra"
    request: dict | None    # checked by harness_api.check_request
    message: str
    n_bytes: int = 0        # with all that the program was sent and has sent so far


class SandboxUnavailable(RuntimeError):
    """A required layer is missing here and was not waived."""


LOST = "the sandbox's helper process died or did not answer"


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
        self._worker_jobs: set[str] = set()         # of the helper that is there now
        self.layers = self._spawn()

    def _spawn(self) -> dict:
        """Start a helper and judge its report; returns the layers. SandboxUnavailable if it will not do."""
        # PYTHONHASHSEED: a program that loops over a set does the same in every run.
        env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        if "LD_LIBRARY_PATH" in os.environ:             # some interpreters find their own library only by it
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(       # -S -s: no site-packages
                    [sys.executable, "-S", "-s", "-B", jail.__file__, "--helper",
                     *map(str, (theirs.fileno(), os.getpid(), self.max_jobs))],
                    env=env, cwd="/", pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    start_new_session=True)             # Ctrl-C is for the host
        except OSError as error:                        # no /dev/null, no descriptor or no process left for us
            raise SandboxUnavailable(f"the sandbox's helper process cannot be started: {error}") from None
        self._control, self._n_spawned = Channel(ours), self._n_spawned + 1
        if (answer := self._await("report")) is None:
            raise SandboxUnavailable("the sandbox's helper process did not start; its error is above")
        report = answer[0]["report"] or {"on": [], "off": {}}
        missing = {name: report["off"].get(name, "not reported") for name in LAYERS if name not in report["on"]}
        if refused := {name: why for name, why in missing.items() if name not in self.waive}:
            self._lose_helper()
            raise SandboxUnavailable(
                "; ".join(f"sandbox layer {name} is missing here: {why}" for name, why in refused.items())
                + f". To run untrusted code without: --waive {','.join([*self.waive, *refused])}")
        return {"on": report["on"], "off": report["off"], "waived": [name for name in self.waive if name in missing]}

    def _lose_helper(self) -> None:
        """The helper is dead, or is now, with all below it; every open job is `infra`."""
        self._process.kill()
        self._process.wait()
        if self._control is not None:
            self._control.sock.close()
            self._control = None
        self._worker_jobs.clear()
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
        self.flush()
        while job not in self._answers:
            if self._control is None:
                return None
            if readable_awake([self._control], SILENCE_S):
                self._read()
                is_pinged, give_up = False, time.monotonic() + SILENCE_S
            elif time.monotonic() >= give_up:
                if is_pinged:
                    self._lose_helper()
                self._tell({"op": "ping", "job": "ping"})
                is_pinged, give_up = True, time.monotonic() + SILENCE_S
        return self._answers.pop(job)

    def _read(self) -> None:
        """Takes the answers that the helper has sent; it must have sent something."""
        if not self._control.read():
            return self._lose_helper()
        for head, body in map(split_message, cut_frames(self._control.inbox)):
            self._answers[head["job"]] = head, body

    def forget_losses(self) -> None:
        """Before a batch: in a run of days, somebody else may kill the helper now and then."""
        if self._control is not None:
            self._n_spawned = 1

    def python_start(self, job_id: int | str, code: str, limits: Limits) -> None:
        """Run a snippet, from the next `flush` or `python_wait` on; does not wait. At most `max_jobs` run at once; a
        job's time begins when its child does."""
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is already there")
        self._revive()
        self._jobs[job_id] = limits
        body = code.encode("utf-8", "surrogatepass")
        if len(body) > MAX_CODE_BYTES:
            why = f"the code is longer than {MAX_CODE_BYTES} bytes"
            self._answers[job_id] = {"status": "error", "why": why, "n_bytes": 0}, b""
        elif self._control is not None:
            self._control.post(to_json({"op": "snippet", "job": job_id, "limits": asdict(limits)}) + b"\n" + body)

    def flush(self) -> None:
        """Hands over the snippets that were started."""
        if self._control is not None:
            self._control.flush()

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

    def python_ready(self, job_id: int | str) -> bool:
        """Whether `python_wait` would find the result there."""
        while job_id not in self._answers and self._control is not None and readable([self._control], 0):
            self._read()
        return job_id in self._answers

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
        self._worker_jobs.add(job)
        self._tell({"op": "worker", "job": job, "memory_mb": memory_mb}, b"", theirs)
        channel = Channel(ours)
        while self._control is not None and not channel.inbox.endswith(b"\n"):
            if not readable_awake([channel], 2 * SILENCE_S):
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
        """op "cpu": the CPU seconds of a worker so far; "end": kill it, and say how it ended. None: it was lost with
        its helper, and the next one knows nothing of it."""
        if job not in self._worker_jobs:
            return None
        if op == "end":
            self._worker_jobs.remove(job)
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
    n_bytes: int = 0                # of these
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
    watch: tuple[int, float] | None = None              # n_answers and CPU seconds when it was first found late,
    n_looks: int = 0                                    # and how often it was since, half its CPU limit apart


class Programs:
    """Runs the programs of one harness source, spread over `n_workers` jailed processes. Single-threaded.

    A program depends on its task, seed and results only: not on the others, nor on the number of workers. One that
    makes its worker die (memory, crash) or takes too long is "killed"; the worker's others are replayed in a new one.
    The time of an exchange is the worker's CPU time, with a generous limit on the clock for one that sleeps.
    """

    def __init__(self, sandbox: Sandbox, source: str, limits: Limits, n_workers: int = 1):
        self.sandbox, self.source, self.limits = sandbox, source, limits
        self._programs: dict[int, Program] = {}
        self._n_deaths = self._n_kills = 0
        sandbox.forget_losses()
        self._workers: list[Worker | None] = [None] * n_workers
        for slot in range(n_workers):
            self._start_worker(slot)

    def start(self, program_id: int, task: dict, seed: int) -> None:
        """Begin `run(task)` at the next `flush` or `wait`; does not wait. `task` holds the visible fields only."""
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
        """Answer the program's last request at the next `flush` or `wait`; does not wait."""
        program = self._programs[program_id]
        if program.event is None:           # else it was lost with its worker, as `wait` will say
            self._submit(program, to_json({"id": program_id, "result": result}))

    def drop(self, program_id: int) -> None:
        """Its last request will not be answered: the worker need not keep it. What it does at its end is still its."""
        program, worker = self._programs.pop(program_id, None), self._workers[program_id % len(self._workers)]
        if program and worker:
            self._submit(program, to_json({"id": program_id, "over": True}))

    def wait(self, program_id: int) -> Event:
        """The program's next event; blocks for that one only, but serves all. After any but "request" it is gone."""
        program = self._programs[program_id]
        if program.event is None:
            self.flush()
        next_check = time.monotonic() + self.limits.seconds / 2
        while program.event is None:
            workers = {worker.channel: worker for worker in self._workers if worker}
            for channel in readable(workers, max(0, next_check - time.monotonic())):
                if self._workers[workers[channel].slot] is workers[channel]:    # else it was ended a moment ago
                    self._read(workers[channel])
            if program.event is None and time.monotonic() >= next_check:        # whatever trickles in meanwhile
                self._check_time(self._workers[program_id % len(self._workers)])
                next_check = time.monotonic() + self.limits.seconds / 2
        event, program.event = program.event, None
        if event.kind != "request":
            del self._programs[program_id]
        return event

    def flush(self) -> None:
        """Sends what `start`, `resume` and `python_start` have gathered: one system call and one wake-up for many."""
        self.sandbox.flush()
        for worker in filter(None, self._workers):
            worker.channel.flush()

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
            worker.channel.post(frame)

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
                    program.n_answers, program.n_bytes = program.n_answers + 1, program.n_bytes + len(payload)
                    program.event = replace(event, n_bytes=program.n_bytes + sum(map(len, program.frames)))
        except (ValueError, RecursionError) as error:
            self._bury(worker, f"it wrote to the sandbox's own channel: {error!r:.200}")

    def _check_time(self, worker: Worker) -> None:
        """The worker owes an answer for a while: end it if its exchange has had its time."""
        answer = self.sandbox.ask_worker("cpu", worker.job)
        if answer is None:
            return self._bury(worker, "")
        if worker.watch is None or worker.watch[0] != worker.n_answers:
            worker.watch, worker.n_looks = (worker.n_answers, answer["cpu_s"]), 0
        worker.n_looks += 1                     # counted, not timed: an hour in which all were stopped is one look
        if answer["cpu_s"] - worker.watch[1] >= self.limits.seconds or worker.n_looks > 2 * WALL_FACTOR:
            self._bury(worker, f"time limit of {self.limits.seconds:g} s for one exchange reached")

    def _end(self, worker: Worker) -> dict | None:
        worker.channel.sock.close()
        self._workers[worker.slot] = None
        return self.sandbox.ask_worker("end", worker.job)

    def _bury(self, worker: Worker, why: str) -> None:
        """End a worker that is dead or must die, blame the program that ran, bring the others back in a new worker."""
        answer = self._end(worker)
        why = why or answer and cause_of_death(answer["exit"], self.limits) or "it ended its worker"
        if why in KILLED and self._n_kills < MAX_DEATHS:
            self._n_kills += 1              # perhaps by somebody else (a machine out of memory): all again
        elif answer is not None:
            self._n_deaths += 1
            if worker.pending:
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


def readable_awake(channels: list[Channel], seconds: float) -> list[Channel]:
    """jail.readable, where a wait that took much longer than it should is none: we were stopped, and so were they."""
    while True:
        began = time.monotonic()
        ready = readable(channels, seconds)
        if ready or time.monotonic() - began < seconds + OVERSLEPT_S:
            return ready


def parse_answer(payload: bytes) -> tuple[int, Event]:
    """A worker's frame. ValueError for all that an honest worker does not send."""
    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    message = json.loads(payload.decode(), parse_constant=refuse)      # by itself it would take UTF-16, and surrogates
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
