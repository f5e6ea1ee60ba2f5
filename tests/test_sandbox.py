"""What the sandbox does: statuses and words, limits, lost processes, programs side by side. Attacks: test_attacks.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sandbox as sandbox_module
from jail import LAYERS
from sandbox import Limits, Programs, Sandbox, SandboxUnavailable, parse_answer, run_snippet

ROOT = Path(__file__).resolve().parent.parent
QUICK = Limits(seconds=0.5)

@pytest.fixture(scope="module")
def box():
    with Sandbox(max_jobs=2) as sandbox:
        yield sandbox


# --- limits and output of a snippet ---


@pytest.mark.parametrize("code, status, part", [
    ("print(6 * 7)", "ok", "42\n"),
    ("import sys; print('a'); print('b', file=sys.stderr); print('c')", "ok", "a\nb\nc\n"),
    ("print('before'); x", "error", "before\nNameError: name 'x' is not defined\n"),
    ("def f(:", "error", "SyntaxError"),
    ("raise SystemExit", "ok", ""),
    ("raise SystemExit('bye')", "error", "bye"),
    ("raise KeyboardInterrupt('k')", "error", "KeyboardInterrupt: k"),
    ("input()", "error", "EOFError"),
    ("def f(): f()\nf()", "error", "RecursionError"),
    ("class E(Exception):\n    def __str__(self): 1/0\nraise E", "error", "E: <exception str() failed>"),
    ("import sys; sys.stdout.close()", "ok", ""),
    ("import builtins, sys, traceback; builtins.print = traceback.format_exception_only = None; sys.stdout = 5; 1/0",
     "error", ""),
    ("import sympy", "error", "No module named 'sympy'"),
    ("import csv, queue; print(csv.__name__)", "ok", "csv\n"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 1\nprint(P())", "ok", "P(x=1)\n"),
    ("print('\\ud800', '\\0', chr(0x1F600))", "ok", "\\ud800 \0 \U0001F600\n"),
    ("import os; os.write(1, b'\\xff\\xfe')", "ok", "\ufffd\ufffd"),
    ("x = '\ud800'", "error", "UnicodeEncodeError"),
    ("\0", "error", "null bytes"),
    ("#" * 70_000, "error", "longer than"),
    ("bytearray(1 << 40)", "killed", "memory limit of 256 MB reached"),
    ("x = []\nwhile True: x.append(bytes(20_000))", "killed", "memory limit of 256 MB reached"),
    ("print('so far')\nwhile True: pass", "killed", "so far\n[killed: time limit of 0.5 s reached]\n"),
    ("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(999)", "killed", "time limit of 0.5 s"),
    ("import ctypes; ctypes.string_at(1)", "killed", "SIGSEGV"),
    ("import os; os._exit(7)", "killed", "exit status 7"),
    ("import os, time; [os.close(i) for i in (0, 1, 2)]; time.sleep(999)", "killed", "SIGKILL"),
    ("while True: print('x' * 100_000)", "killed", "[killed: "),
])
def test_a_snippet(box, code, status, part):
    result = box.python(code, QUICK)
    assert result.status == status and part in result.output, result


def test_long_output_keeps_both_ends(box):
    result = box.python("print('first' + 'é' * 5_000_000 + 'last'); 1/0", Limits(output_chars=200))
    assert result.status == "error" and len(result.output) <= 200 and "cut here" in result.output
    assert result.output.startswith("firstéé")
    assert result.output.endswith("élast\nZeroDivisionError: division by zero\n")
    exact = box.python("print('x' * 199)", Limits(output_chars=200))
    assert exact.output == "x" * 199 + "\n"


def test_forged_messages_are_only_text(box):
    forged = '{"job": "#1", "status": "ok", "why": "", "n_bytes": 0}\\n'
    write = f"import os\nfor fd in range(64):\n    try: os.write(fd, b'{forged}')\n    except OSError: pass\n"
    result = box.python(write + "1/0", QUICK)
    assert result.status == "error" and result.output.count('"status": "ok"') == 3
    assert box.python("print(1)", QUICK) == sandbox_module.ToolResult("ok", "1\n")


def test_snippets_are_alike_and_apart(box):
    code = "import random, math; print(random.random(), hash('a'), getattr(math, 'mark', None)); math.mark = 1"
    assert box.python(code, QUICK) == box.python(code, QUICK)


def test_jobs_run_while_nobody_waits_and_end_in_any_order(box):
    for job in range(20):
        box.python_start(job, f"print({job})" if job % 9 else "while True: pass", QUICK)
    with pytest.raises(ValueError, match="already"):
        box.python_start(3, "", QUICK)
    for job in reversed(range(20)):
        result = box.python_wait(job)
        assert (result.status, result.output) == ("ok", f"{job}\n") if job % 9 else result.status == "killed"


def test_many_queued_jobs_do_not_block(box):
    """Both directions of the control socket fill up."""
    for job in range(150):
        box.python_start(job, f"print('{'y' * 20_000}')", Limits(output_chars=30_000))
    assert all(box.python_wait(job).output == "y" * 20_000 + "\n" for job in range(150))


def test_the_least_memory_is_enough_for_small_code(box):
    code = "import math, statistics; print(math.comb(40, 20), statistics.mean([1, 2]))"
    result = box.python(code, Limits(memory_mb=64))
    assert result.output == "137846528820 1.5\n"


def test_limits_are_checked():
    for wrong in ({"seconds": 0}, {"memory_mb": 1}, {"output_chars": 1 << 21}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Limits(**wrong)


def test_run_snippet(tmp_path):
    (tmp_path / "code.py").write_text("print(6 * 7)")
    answer = run_snippet(str(tmp_path / "code.py"), Limits())
    assert answer["status"] == "ok" and answer["output"] == "42\n" and "seccomp" in answer["layers"]["on"]


# --- missing layers ---

def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="Linux"):
        Sandbox(waive=LAYERS)


def test_a_waiver_must_name_a_layer():
    with pytest.raises(ValueError, match="no such layer"):
        Sandbox(waive=("landlok",))


def test_a_required_layer_that_is_not_reported_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox_module, "LAYERS", (*LAYERS, "moat"))
    with pytest.raises(SandboxUnavailable, match="layer moat is missing here: not reported"):
        Sandbox()


# --- no process is left; a lost helper is `infra` ---


def tree(pid):
    """`pid` and all its descendants that run (a zombie does not)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [pid] if pid in parents else []
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def gone(pids):
    give_up = time.monotonic() + 10
    while any(tree(pid) for pid in pids):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def busy_sandbox():
    sandbox = Sandbox(max_jobs=4)
    sandbox.python_start(1, "import time; time.sleep(999)", Limits(seconds=60))
    sandbox.python_start(2, "while True: pass", Limits(seconds=60))
    programs = Programs(sandbox, "def run(task):\n    import time; time.sleep(999)\n    yield", Limits())
    programs.start(1, {}, 0)
    give_up = time.monotonic() + 10
    while len(tree(sandbox._process.pid)) < 5 and time.monotonic() < give_up:
        time.sleep(0.01)
    return sandbox, programs, tree(sandbox._process.pid)


def test_close_leaves_no_process():
    sandbox, _, pids = busy_sandbox()
    assert len(pids) >= 4
    sandbox.close()
    assert not any(tree(pid) for pid in pids)
    assert sandbox.python("print(1)", QUICK).status == "infra"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_host_leaves_no_process(how):
    code = (f"import sys, time; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
            "from test_sandbox import busy_sandbox; box = busy_sandbox(); print(*box[2], flush=True); time.sleep(60)")
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in host.stdout.readline().split()]
    assert len(pids) >= 4
    host.send_signal(how)
    host.wait()
    host.stdout.close()
    assert gone(pids)


@pytest.mark.parametrize("which", [0, 1, 2])    # with namespaces: the outer process, process 1 inside, and the forker
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_helper_is_infra_and_is_replaced(monkeypatch, how, which):
    monkeypatch.setattr(sandbox_module, "SILENCE_S", 0.2)
    if how == signal.SIGSTOP and which == 0:
        pytest.skip("the outer process does nothing but wait")
    sandbox, programs, pids = busy_sandbox()
    with sandbox:
        inner = pids[:3] if "namespaces" in sandbox.layers["on"] else [pids[0], *pids[:2]]
        os.kill(inner[which], how)
        if (how, which) == (signal.SIGSTOP, 2):             # which is found when the next child is to be forked
            assert sandbox.python("print(1)", QUICK).status == "infra"
        assert sandbox.python_wait(1).status == "infra" and sandbox.python_wait(2).status == "infra"
        assert programs.wait(1).kind == "infra"
        assert gone(pids)
        assert sandbox.python("print(1)", QUICK).output == "1\n"
        for _ in range(2 * sandbox_module.MAX_RESPAWNS):    # but not for ever
            sandbox._process.kill()
            sandbox._process.wait()
            sandbox.python("print(1)", QUICK)
        assert sandbox.python("print(1)", QUICK).status == "infra"


def test_a_new_helper_is_not_asked_for_workers_of_the_old_one():
    with Sandbox(max_jobs=1) as sandbox:
        job, channel = sandbox.spawn_worker(64)
        sandbox._lose_helper()
        assert sandbox.python("print(1)", QUICK).output == "1\n"           # by a new one
        assert sandbox.ask_worker("cpu", job) is None and sandbox.ask_worker("end", job) is None
        assert sandbox._n_spawned == 2 and sandbox.python("print(2)", QUICK).output == "2\n"
        channel.sock.close()


# --- harness programs ---

ECHO = """
import random
from harness_api import PYTHON, SEARCH, chat, generate, python, tool_result
for schema in (PYTHON, SEARCH):
    schema["seen"] = schema.get("seen", 0) + 1
count = 0
def run(task):
    global count
    count += 1
    messages = chat("", task["question"])
    for turn in range(3):
        reply = yield generate(messages, tools=[PYTHON, SEARCH], max_tokens=count)
        print("discarded")
        messages.append(reply.message)
        for call in reply.tool_calls:
            output = yield python(call.arguments["code"])
            messages.append(tool_result(call, f"{output} {output.ok} {random.random()} {list({'a', 'b', 'c'})}"))
        ATTACK
"""
CALM = ECHO.replace("ATTACK", "pass")
ATTACK = """if task["question"] == "hostile" and turn == 1:
            import os
            """


def reply(content, code=None, finish="stop"):
    calls = [] if code is None else [{"name": "python", "arguments": {"code": code}}]
    return {"content": content, "tool_calls": calls, "finish": finish}


def play(programs, tasks):
    """Run programs side by side against a host that answers by rule. -> the events of each"""
    events = {i: [] for i in range(len(tasks))}
    for i, question in enumerate(tasks):
        programs.start(i, {"question": question}, seed=i)
    live = list(events)
    while live:
        for i in list(live):
            event = programs.wait(i)
            events[i].append(event)
            if event.kind != "request":
                live.remove(i)
            elif event.request["type"] == "python":
                programs.resume(i, {"output": event.request["code"] + "!", "ok": i % 2 == 0})
            else:
                n = len(event.request["messages"])
                programs.resume(i, reply(f"said {n}", "code" if n < 4 else None))
    return list(events.values())


TASKS = [f"question {i}" for i in range(7)]


def test_programs_do_not_depend_on_the_number_of_workers(box):
    seen = []
    for n_workers in (1, 3):
        programs = Programs(box, CALM, QUICK, n_workers)
        seen.append(play(programs, TASKS))
        programs.close()
    assert seen[0] == seen[1]
    assert [[event.kind for event in events] for events in seen[0]] == [["request"] * 5 + ["done"]] * len(TASKS)
    assert len({events[2].request["messages"][2]["content"] for events in seen[0]}) == len(TASKS)   # own random numbers
    assert all(e.request["max_tokens"] == 1 and [tool["seen"] for tool in e.request["tools"]] == [1, 1]
               for events in seen[0] for e in events if e.request and e.request["type"] == "generate")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_somebody_else_kills_is_run_again(monkeypatch, how):
    """A machine out of memory, or a person: no program can send a signal, so none is to blame; but not for ever."""
    source, resume, n = ECHO.replace("ATTACK", "import time; time.sleep(0.02)"), Programs.resume, [0]
    with Sandbox(max_jobs=1) as sandbox:
        idle = set(tree(sandbox._process.pid))

        def kill_child():
            give_up = time.monotonic() + 30
            while not (new := set(tree(sandbox._process.pid)) - idle - killed) and time.monotonic() < give_up:
                time.sleep(0.005)
            killed.update(new)
            os.kill(new.pop(), how)

        def resume_and_kill(programs, program_id, result):
            resume(programs, program_id, result)
            n[0] += 1
            if n[0] in (3, 12, 20):
                programs.flush()
                kill_child()

        killed, seen = set(), []
        for resuming in (resume, resume_and_kill):
            monkeypatch.setattr(Programs, "resume", resuming)
            programs = Programs(sandbox, source, QUICK)
            seen.append(play(programs, TASKS))
            programs.close()
        assert seen[0] == seen[1] and len(killed) == 3
        for n_kills, status, words in ((1, "ok", "1\n"), (2, "killed infra", f"died of {how.name}")):
            sandbox.python_start(n_kills, "import time; time.sleep(0.5); print(1)", Limits(seconds=60))
            sandbox.flush()
            for _ in range(n_kills):
                kill_child()
            result = sandbox.python_wait(n_kills)
            assert result.status in status.split() and words in result.output


@pytest.mark.parametrize("attack, kind, words", [
    ("while True: pass", "killed", "time limit of 0.5 s"),
    ("import time; time.sleep(999)", "killed", "time limit of 0.5 s"),
    ("x = bytearray(1 << 40)", "killed", "memory limit of 256 MB"),
    ("x = []\n            while True: x.append(bytes(20_000))", "killed", "memory limit of 256 MB"),
    ("os._exit(9)", "killed", "exit status 9"),
    ("os.close(0)", "killed", ""),
    ("import ctypes; ctypes.string_at(1)", "killed", "SIGSEGV"),
    ("os.write(0, bytes(1000))", "killed", "own channel"),
    ("os.write(0, b'\\\\xff' * 1000)", "killed", "own channel"),
    ("import json; p = b'[' * 100000; os.write(0, len(p).to_bytes(4, 'little') + p)", "killed", "own channel"),
    ("p = b'{\"id\": 3, \"kind\": \"done\"}'; os.write(0, len(p).to_bytes(4, 'little') + p)", "killed", "own channel"),
    ("1 / 0", "error", "ZeroDivisionError: division by zero (line 20 of the harness)"),
    ("raise SystemExit", "error", "SystemExit"),
    ("def f(): f()\n            f()", "error", "RecursionError"),
    ("open('/etc/passwd')", "error", "PermissionError"),
    ("import threading; threading.Thread(target=print).start()", "error", "can't start new thread"),
    ("yield 5", "error", "a request is a dict, not int"),
    ("yield {'type': 7}", "error", "a request has a type, not 7"),
    ("yield {'type': 'launch', 'code': len}", "error", "launch: must be plain JSON"),
    ("yield {'type': 'python', 'code': 5}", "error", "code must be a string"),
    ("yield {'type': 'python', 'code': 'x' * (1 << 21)}", "error", "at most 1048576 bytes"),
    ("yield generate(messages, tools=[{'function': {'name': 'x' * (1 << 20)}}])", "error", "at most 1048576 bytes"),
    ("yield generate(messages, stop=['x'] * 17)", "error", "at most 16 strings"),
    ("yield generate(messages, stop=['x' * 201])", "error", "at most 16 strings"),
    ("yield {'type': 'launch', 'x': 1e999}", "error", "must be plain JSON"),
    ("yield generate([])", "error", "messages must be"),
    ("yield generate(messages, max_tokens=float('nan'))", "error", "max_tokens must be"),
    ("yield generate(messages, tools=[{'function': {'name': 'f', 'x': float('nan')}}])", "error", "JSON"),
    ("yield generate(messages, tools=[{'function': {'name': 'f', 'x': [[]] * 2000}}])", "error", "at most 1000 values"),
    ("m = []; m.append(m); yield generate(messages, tools=m)", "error", "tools must be"),
    ("yield {'type': 'python', 'code': '1', 'seed': 1}", "error", "no field 'seed'"),
])
def test_an_honest_program_beside_a_hostile_one_ends_normally(box, attack, kind, words):
    source = ECHO.replace("ATTACK", ATTACK + attack)
    tasks = ["question 0", "hostile", *TASKS[2:]]
    programs = Programs(box, source, QUICK, 2)
    events = play(programs, tasks)
    programs.close()
    assert (events[1][-1].kind, len(events[1])) == (kind, 5) and words in events[1][-1].message, events[1][-1]
    calm = Programs(box, CALM, QUICK, 1)
    assert [e for i, e in enumerate(events) if i != 1] == [e for i, e in enumerate(play(calm, tasks)) if i != 1]
    calm.close()


def test_a_worker_keeps_no_program_that_the_host_has_ended(box):
    """Else a harness that goes on until the host stops it would fill its worker."""
    source = "def run(task):\n    kept = bytes(1 << 24)\n    while True:\n        yield {'type': 'python', 'code': ''}"
    programs = Programs(box, source, Limits(seconds=5))
    for i in range(40):                     # 640 MB in all, and the limit is 256
        programs.start(i, {}, 0)
        assert programs.wait(i).kind == "request"
        programs.resume(i, {"output": "", "ok": True})
        assert programs.wait(i).kind == "request"
        programs.drop(i)
    programs.close()


@pytest.mark.parametrize("ending", ["while True: pass", "yield", "1 / 0", "os._exit(1)", "x = bytearray(1 << 40)"])
def test_how_a_program_takes_its_end_is_its_own_affair(box, ending):
    source = ("import os\ndef run(task):\n    for turn in range(3):\n        try:\n"
              "            yield {'type': 'python', 'code': task['question']}\n        finally:\n"
              f"            if task['question'] == 'hostile':\n                {ending}")
    programs = Programs(box, source, QUICK)
    for i, question in enumerate(("honest", "hostile", "honest")):
        programs.start(i, {"question": question}, 0)
        assert programs.wait(i).request["code"] == question
    programs.drop(1)
    for i in (0, 2):
        kinds = []
        while not kinds or kinds[-1] == "request":
            programs.resume(i, {"output": "", "ok": True})
            kinds.append(programs.wait(i).kind)
        assert kinds == ["request", "request", "done"]
    programs.close()


def test_a_harness_that_keeps_ending_its_worker_is_given_up(box):
    programs = Programs(box, "import os\ndef run(task):\n    os._exit(4)\n    yield", QUICK, 2)
    for i in range(50):
        programs.start(i, {}, 0)
    events = [programs.wait(i) for i in range(50)]
    programs.start(50, {}, 0)
    events.append(programs.wait(50))
    assert {event.kind for event in events} == {"killed"}
    assert sum("exit status 4" in event.message for event in events) == 3
    assert sum("3 times" in event.message for event in events) == 48
    programs.close()


@pytest.mark.parametrize("source, words", [
    ("def run(task)\n    yield", "SyntaxError: expected ':' (line 1"),
    ("def run(task):\n    return 1", "must be a generator function"),
    ("x = 1", "has no attribute 'run'"),
    ("import numpy", "No module named 'numpy'"),
    ("import sandbox", "No module named 'sandbox'"),
    ("\0", "null bytes"),
    ("raise StopIteration", "StopIteration"),
])
def test_a_broken_harness_says_why(box, source, words):
    programs = Programs(box, source, QUICK)
    for i in range(2):
        programs.start(i, {}, 0)
        event = programs.wait(i)
        assert event.kind == "error" and words in event.message
    programs.close()


def test_h0_of_math(box):
    programs = Programs(box, (ROOT / "harnesses" / "h0_math.py").read_text(), QUICK)
    events = play(programs, ["6 * 7?"])[0]
    assert events[0].request["messages"] == [
        {"role": "user", "content": "6 * 7?\n\nPut your final answer in \\boxed{}."}]
    assert [e.request and e.request["type"] for e in events] == ["generate", "python", "generate", "python", None]
    assert events[2].request["messages"][1:] == [{"role": "assistant", "content": "said 1"},
                                                 {"role": "tool", "name": "python", "content": "code!"}]
    programs.close()


def test_full_pipes_in_both_directions_do_not_block(box):
    programs = Programs(box, CALM, Limits(seconds=5), 2)
    question, n = "z" * 100_000, 60
    for i in range(n):
        programs.start(i, {"question": question}, 0)
    for i in range(n):
        assert programs.wait(i).request["messages"][0]["content"] == question
        programs.resume(i, reply(question))
    assert all(programs.wait(i).request["messages"][1]["content"] == question for i in reversed(range(n)))
    programs.close()


@pytest.mark.parametrize("payload", [
    b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"id": true, "kind": "done"}', b'{"id": 1}',
    b'{"id": 1, "kind": "infra"}', b'{"id": 1, "kind": "error", "message": 5}', b'{"id": 1, "kind": "request"}',
    b'{"id": 1, "kind": "request", "request": {"type": "python", "code": NaN}}', b'{"id": ' + b"1" * 9999 + b"}",
    b'{"id": 1, "kind": "request", "request": {"type": "python", "code": "\\ud800"}}',
    b'{"id": 1, "kind": "request", "request": {"type": "python", "code": "\xed\xa0\x80"}}',
    b'{"id": 1, "kind": "error", "message": "\xed\xa0\x80"}',
    '{"id": 1, "kind": "request", "request": {"type": "python", "code": "\\ud800"}}'.encode("utf-16"),
    b'{"id": 1, "kind": "request", "request": {"type": "launch", "x": 1e999}}',
])
def test_a_forged_frame_is_refused(payload):
    with pytest.raises((ValueError, RecursionError)):
        parse_answer(payload)


def test_a_lone_surrogate_in_a_request_becomes_a_question_mark(box):
    programs = Programs(box, "def run(task):\n    yield {'type': 'python', 'code': 'a\\ud800b'}", QUICK)
    programs.start(1, {}, 0)
    assert programs.wait(1).request["code"] == "a?b"
    programs.close()
