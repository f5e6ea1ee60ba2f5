"""A coding agent as proposer: scripted agents that behave, that fail, and that attack; and whole searches with them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

import agent_cmd
import jail
import files
import sessions
import test_harness_search as small
import warden
from agent_cmd import LAYER, Tally, check_settings, fill, run_command_agent, words_of
from harness_search import SearchError
from files import UsageError, fingerprint
from rundir import scorer_paths
from sessions import ProposerConfig, ProposerFailed, Workplace, propose_by_agent
from test_harness_search import TASKS, make_search

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
CANARY = "canary-71c2"
SETTINGS = ProposerConfig(proposer="cmd")
engine, model_dir, sandbox = small.engine, small.model_dir, small.sandbox       # fixtures

# A proposer in a few lines: each slot is h0 with another request in its prompt.
GOOD = r"""
n=0
for slot in $WHALE_SLOTS; do
  n=$((n + 1))
  sed "s/Put your/Think $WHALE_SEED$n words long. Put your/" archive/*/h0/harness.py > $slot.py
  row="{\"slot\": \"$slot\", \"parent\": \"h0\", \"hypothesis\": \"fewer than 3 of 4 fail\", \"mechanisms\": [\"m$n\"]}"
  rows="$rows${rows:+, }$row"
done
echo "[$rows]" > proposal.json
echo "I read $(ls archive | wc -l) cycles" > report.md
echo '{"usd": 0.25, "prompt_tok": 1000, "completion_tok": 50, "model": "script", "version": "1.0"}'
"""


def script_of(folder: Path, text: str, name: str = "agent") -> ProposerConfig:
    """Settings for a scripted agent; its path has a space in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"my {name}.sh"
    path.write_text(text)
    return replace(SETTINGS, proposer_cmd=f"sh '{path}' {{dir}} {{prompt_file}}")


def hold(tmp_path: Path, text: str, settings: dict | None = None, **changes) -> tuple[sessions.Session, Path]:
    """One session of a script -> how it ended, and its working copy."""
    copy = tmp_path / "session" / "work"
    copy.mkdir(parents=True, exist_ok=True)
    workplace = Workplace(copy, ("h1", "h2"), tmp_path / "transcript.txt",
                          replace(script_of(tmp_path / "scripts", text), **settings or {}), None, seed=7)
    return run_command_agent(replace(workplace, **changes)), copy


def proposer(settings: ProposerConfig, **changes) -> partial:
    return partial(propose_by_agent, **{"settings": settings, "run_agent": run_command_agent,
                                        "pause": lambda seconds: None} | changes)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, engine, sandbox) -> Path:
    """An archive whose h0 is scored."""
    folder = tmp_path_factory.mktemp("begun") / "archive"
    search_with(folder, engine, sandbox, None, SETTINGS).iterate()
    return folder


def search_with(folder: Path, engine, sandbox, begun: Path | None, settings: ProposerConfig,
                proposing: dict | None = None, **changes):
    """A search of 2 candidates an iteration on 4 tasks; where nothing is there yet, it goes on from `begun`."""
    if begun and not folder.exists():
        shutil.copytree(begun, folder)
    return make_search(folder, engine, sandbox, tasks=TASKS[:4], n_candidates=2,
                       proposer=proposer(settings, **proposing or {}), **changes)


def records(archive: Path, iteration: int = 2) -> list[dict]:
    return [json.loads(path.read_text())
            for path in sorted((archive / "sessions" / f"iteration_{iteration:02d}").glob("session_*.json"))]


def alive(mark: str) -> list[str]:
    """Processes whose command line holds this."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if mark in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


# ---- the command ----------------------------------------------------------------------------------------------------


def test_words_are_split_before_they_are_filled():
    words = words_of(replace(SETTINGS, proposer_cmd="agent --in {dir} --model {model} --cap={usd} 'do {prompt_file} now'"))
    values = {"dir": "/a b/{model}", "prompt_file": "/p q", "model": "", "usd": ""}
    assert fill(words, values) == ["agent", "--in", "/a b/{model}", "do /p q now"]
    assert fill(words, values | {"model": "m; x", "usd": "1.5"}) == [
        "agent", "--in", "/a b/{model}", "--model", "m; x", "--cap=1.5", "do /p q now"]


@pytest.mark.parametrize("name", agent_cmd.AGENTS)
def test_ready_agents(name):
    words = words_of(replace(SETTINGS, proposer_cmd=name))
    values = {"dir": "/d", "prompt_file": "/p", "model": "", "usd": ""}
    assert not any("{" in word for word in fill(words, values)) and "--model" not in fill(words, values)
    assert "Read the file /p and do what it says." in fill(words, values)
    chosen = fill(words, values | {"model": "m"})
    assert chosen[chosen.index("--model") + 1] == "m"


@pytest.mark.parametrize("changes, told", [
    ({"proposer_cmd": ""}, "is empty"), ({"proposer_cmd": "sh 'x"}, "quotation"),
    ({"proposer_cmd": "sh {file}"}, "{file} is no placeholder"), ({"proposer_cmd": "no-such-agent {dir}"}, "no program"),
    ({"proposer_cmd": "sh x", "proposer_price": "5"}, "IN,OUT"),
    ({"proposer_cmd": "sh x", "proposer_price": "5,nan"}, "IN,OUT"),
    ({"proposer_cmd": "sh x", "proposer_s": 0.0}, "--proposer-s"),
    ({"proposer_cmd": "sh x", "proposer_usd": -1.0}, "--proposer-usd"),
    ({"proposer_cmd": "sh x", "proposer_usd": float("nan")}, "--proposer-usd"),
    ({"proposer_cmd": "sh x", "max_proposer_failures": 0}, "--max-proposer-failures"),
    ({"proposer_cmd": "sh x", "proposer_env": "FOO=1"}, "give names only"),
    ({"proposer_cmd": "sh x", "proposer_env": "GOOD, 1BAD"}, "'1BAD'"),
])
def test_settings_that_cannot_work_are_refused(changes, told):
    with pytest.raises(UsageError, match=told.replace("{", r"\{")):
        check_settings(replace(SETTINGS, **changes))
    check_settings(replace(SETTINGS, proposer_cmd="sh x {dir}", proposer_price="5,25"))


def test_a_script_that_cannot_be_read_there_is_refused(tmp_path, monkeypatch):
    """The command runs in the working copy, not here, and the repository is closed to it."""
    clone, outside = tmp_path / "clone", tmp_path / "outside"
    for folder in (clone, outside):
        folder.mkdir()
        for name in ("agent.sh", "whale-tool"):
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    (clone / "harness_api.py").touch()
    (outside / "link").symlink_to(clone / "agent.sh")
    monkeypatch.chdir(clone)

    def check(command: str, waived: tuple[str, ...] = ()) -> None:
        check_settings(replace(SETTINGS, proposer_cmd=command), waived, (clone,))

    for command in ("sh agent.sh {dir}", "./agent.sh", "sh ../outside/agent.sh", f"sh {clone}/agent.sh", f"{clone}/agent.sh",
                    f"sh {outside}/link", f"sh {outside}/agent.sh --with {clone}"):
        with pytest.raises(UsageError, match="runs in the working copy, and may not read .*give its absolute path"):
            check(command)
    for command in (f"sh {outside}/agent.sh {{dir}} harness_api.py", f"{outside}/agent.sh", "sh -c 'cat agent.sh'"):
        check(command)
    check(f"sh {clone}/agent.sh", (LAYER,))
    monkeypatch.setenv("PATH", str(clone))
    with pytest.raises(UsageError, match="may not read"):
        check("whale-tool {dir}")
    monkeypatch.setenv("PATH", f"{clone}:{outside}")
    check("whale-tool {dir}")


def test_no_landlock_is_refused_unless_waived(monkeypatch, tmp_path):
    def missing(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(agent_cmd.jail, "syscall", missing)
    settings = replace(SETTINGS, proposer_cmd="sh x")
    with pytest.raises(UsageError, match=f"--waive {LAYER}"):
        check_settings(settings)
    check_settings(settings, waived=(LAYER,))


def test_environment_is_an_allow_list(monkeypatch, tmp_path):
    for name in ("WHALE_JUDGE_KEY", "HF_TOKEN", "WANDB_API_KEY", "ANTHROPIC_API_KEY", "MY_KEY", "LC_ALL", "HTTPS_PROXY"):
        monkeypatch.setenv(name, CANARY)
    _, copy = hold(tmp_path, "env > seen", {"proposer_env": "MY_KEY, OTHER"})
    seen = dict(line.split("=", 1) for line in (copy / "seen").read_text().splitlines())
    assert {name for name, value in seen.items() if value == CANARY} == {"MY_KEY", "LC_ALL", "HTTPS_PROXY"}
    assert seen["WHALE_SLOTS"] == "h1 h2" and seen["WHALE_SEED"] == "7" and seen["HOME"] == os.environ["HOME"]
    ready = replace(SETTINGS, proposer_cmd="claude")
    workplace = Workplace(copy, ("h1",), tmp_path / "t", ready, None)
    assert agent_cmd.environment_of(workplace, tmp_path)["ANTHROPIC_API_KEY"] == CANARY


# ---- what it says of itself -----------------------------------------------------------------------------------------

CLAUDE = [{"type": "system", "subtype": "init", "model": "claude-x", "claude_code_version": "2.1.197"},
          {"type": "result", "is_error": False, "result": "All written.", "total_cost_usd": 0.5, "usage": {
              "input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 30, "output_tokens": 4}}]
CODEX = [{"type": "item.completed", "item": {"type": "agent_message", "text": "All written."}},
         {"type": "error", "message": "Reconnecting... 2/5"},
         {"type": "turn.completed", "usage": {"input_tokens": 60, "cached_input_tokens": 50, "output_tokens": 4}}]
STEP = {"type": "step_finish", "part": {"cost": 0.25, "tokens": {"input": 10, "output": 2, "cache": {
    "read": 15, "write": 5}}}}
OPENCODE = [{"type": "text", "part": {"text": "All written."}}, STEP, STEP]


@pytest.mark.parametrize("events, expected", [
    (CLAUDE, (0.5, 60, 4, "claude-x", "2.1.197")), (CODEX, (None, 60, 4, "", "")), (OPENCODE, (0.5, 60, 4, "", ""))])
def test_events_of_the_common_agents(events, expected):
    tally = Tally()
    for event in events:
        tally.feed(json.dumps(event).encode())
    assert (tally.usd, tally.prompt_tok, tally.completion_tok, tally.model, tally.version) == expected
    assert tally.words == "All written." and not tally.error


HOSTILE_LINES = [
    b"{" + b'"a":[' * 100_000, b"[" * 100_000, b"{}", b"{\xff\xfe", b'{"usd": NaN}', b'{"usd": -3}', b'{"usd": 1e999}',
    b'{"usd": "much"}', b'{"usd": true}', b'{"usd": ' + b"9" * 4000 + b"}", b'{"usd": ' + b"9" * 5000 + b"}",
    b'{"prompt_tok": [1]}', b'{"type": "result", "usage": 5, "result": {}}', b'{"type": []}', b'{"type": {"a": 1}}',
    b'{"type": "step_finish", "part": [1]}', b'{"type": "turn.failed", "error": "x"}', b"\0" * 100,
    b'{"type": "system", "model": ["x"], "claude_code_version": 5}', b'{"type": "text", "part": {"text": "\\ud800"}}']


def test_hostile_output_is_never_taken_for_an_amount():
    tally = Tally()
    for line in HOSTILE_LINES:
        tally.feed(line)
        assert (tally.usd, tally.prompt_tok, tally.completion_tok, tally.model) == (None, None, None, "")
        json.dumps(asdict(tally) | {"last_line": ""}).encode()
        tally.words.encode()                            # no lone surrogate
    assert tally.notes and "\ufffd" in tally.words


# ---- one session, contained -----------------------------------------------------------------------------------------


@pytest.fixture(params=["own process ids", "no namespaces"])
def both_ways(request, monkeypatch):
    monkeypatch.setattr(agent_cmd, "NAMESPACES", request.param == "own process ids")


def test_a_good_session(tmp_path):
    session, copy = hold(tmp_path, "echo hello; cat $2 > prompt; echo '{\"usd\": 1.5, \"model\": \"m\"}'; touch h1.py")
    assert (session.end, session.usd, session.model, session.prompt_tok) == ("done", 1.5, "m", None)
    assert "h1.py, h2.py" in (copy / "prompt").read_text() and "hello" in (tmp_path / "transcript.txt").read_text()
    assert not [note for note in session.notes if "namespaces" not in note]


ATTACKS = r"""
cat '@TMP@/open.txt' > $1/seen
cat '@TMP@/references/test.jsonl' >> $1/seen
ls '@TMP@/references' >> $1/seen
ln -s '@TMP@/references' $1/link; cat $1/link/test.jsonl >> $1/seen
for pid in @HOST@ $PPID; do for name in environ maps cwd/sessions.py root/etc/hostname fd/0; do
  [ -e /proc/$pid/$name ] && timeout 1 cat /proc/$pid/$name >> $1/seen; done; done
for place in '@TMP@' /tmp /dev/shm $HOME; do echo bad > "$place/@CANARY@" && echo "wrote" >> $1/seen; done
@SCOPED@ && kill -0 @HOST@ && echo signalled >> $1/seen
@SCOPED@ && python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("\0@CANARY@"); print("reached")' >> $1/seen
echo ok > $TMPDIR/mine; cat $TMPDIR/mine >> $1/seen; ls /proc/self/fd > $1/fds; grep CapEff /proc/self/status >> $1/seen
"""


@pytest.mark.parametrize("walled", [True, False])
def test_what_the_wall_holds(tmp_path, both_ways, monkeypatch, walled):
    """And what gets through where it is waived: the same attacks."""
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "test.jsonl").write_text("the references")
    (tmp_path / "open.txt").write_text("may be read")
    is_scoped = jail.syscall(jail.LANDLOCK_CREATE, None, 0, 1) >= 6             # Linux 6.12
    script = ATTACKS
    for name, value in {"TMP": tmp_path, "HOST": os.getpid(), "CANARY": CANARY,
                        "SCOPED": "true" if is_scoped else "false"}.items():
        script = script.replace(f"@{name}@", str(value))
    try:
        with socket.socket(socket.AF_UNIX) as ours:
            ours.bind(f"\0{CANARY}")
            ours.listen()
            session, copy = hold(tmp_path, script, closed=(ROOT, tmp_path / "references"),
                                 waived=() if walled else (LAYER,))
        seen = (copy / "seen").read_text()
        if walled:
            assert seen == "may be readok\nCapEff:\t0000000000000000\n", session
            assert (copy / "fds").read_text().split() == ["0", "1", "2", "3"]           # 3: of ls itself
        else:
            assert seen.count("the references") == 2 and seen.count("wrote") == 4
            assert not is_scoped or "reached" in seen and (agent_cmd.NAMESPACES or "signalled" in seen)
            # an agent of root has no capabilities, so that the kernel keeps it from root's own processes all the same
            assert "PATH=" in seen or os.getuid() == 0 or agent_cmd.NAMESPACES
            assert any(LAYER in note for note in session.notes)
    finally:
        for place in ("/tmp", "/dev/shm", os.environ["HOME"]):
            Path(place, CANARY).unlink(missing_ok=True)


MARKS = r"""
cd '@TMP@/outside'; exec 2> $TMPDIR/errors
chmod 777 file; chmod 000 file; touch -d 2001-01-01 file; touch file; chmod 777 .; touch -d 2001-01-01 .; chown 0 file
python3 -c 'import os; f = os.open("file", os.O_RDONLY); os.fchmod(f, 0o777)'
python3 -c 'import os; os.setxattr("file", "user.x", b"1")'
chmod 666 /dev/null; chmod 1777 /dev/shm /tmp; chmod u+x "$HOME"; chmod 444 /proc/version; ln file $TMPDIR/hard
chmod 777 $TMPDIR/hard; ln -s "$PWD/file" $TMPDIR/soft; chmod 777 $TMPDIR/soft; mv file $TMPDIR/moved; rm -f file
mount -o remount,rw /; mount -o remount,bind,rw /; umount -l /; umount "$HOME/.claude"
unshare -Urm sh -c 'mount -o remount,bind,rw /; chmod 777 file'
"""


def state_of(*paths: Path) -> list[tuple]:
    return [(seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, seen.st_size) for seen in map(os.stat, paths)]


def test_modes_and_times_outside_are_not_its_to_change(tmp_path):
    """Landlock has no right for them: the agent's own mounts are read-only. What this machine needs is asked for the
    mode that it has, so that nothing breaks where the wall does."""
    if not has_namespaces():
        pytest.skip("no namespaces here")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    before = state_of(outside, outside / "file")
    session, copy = hold(tmp_path, MARKS.replace("@TMP@", str(tmp_path)))
    assert state_of(outside, outside / "file") == before
    assert "user.x" not in os.listxattr(outside / "file")
    told = (copy.parent / "tmp" / "errors").read_text()
    assert told.count("Read-only file system") >= 17 and not session.notes, (told, session)


def test_terminals_of_others_are_not_its_own(tmp_path):
    """It has some of its own. In those that are there somebody may type a password, or read what it writes."""
    master, slave = os.openpty()
    path = os.ttyname(slave)
    assert os.path.exists(path)
    session, _ = hold(tmp_path, f"""
(exec 3<> {path}) && echo BREACH
python3 -c 'import os, pty; a, b = pty.openpty(); os.write(b, b"own"); print(os.read(a, 9))'""")
    os.close(master)
    os.close(slave)
    if "without" in "".join(session.notes):
        pytest.skip("no mounts of its own here")
    said = (tmp_path / "transcript.txt").read_text()
    assert session.end == "done" and said == "b'own'\n", said


def test_places_of_its_own_are_all_its_own(tmp_path, both_ways, monkeypatch):
    """What an agent needs works behind the wall: its copy, TMPDIR, its state in HOME, devices, and common programs."""
    home = tmp_path / "home"
    (home / ".claude").mkdir(parents=True)
    (home / ".claude.json").write_text("{}")
    monkeypatch.setenv("HOME", str(home))
    session, copy = hold(tmp_path, r"""
set -e
echo x > file; chmod 700 file; touch -d 2001-01-01 file; mkdir -p a/b; mv file a/b/; ln a/b/file hard
echo y > $TMPDIR/aside; chmod 600 $TMPDIR/aside; ln $TMPDIR/aside linked
python3 -c 'import os; os.rename(os.environ["TMPDIR"] + "/aside", "renamed")'
echo s > $HOME/.claude/state; chmod 600 $HOME/.claude/state; echo '{"a": 1}' > $HOME/.claude.json
echo gone > /dev/null; head -c 5 /dev/zero > /dev/null; head -c 5 /dev/urandom > random
python3 -c 'import pty, os; m, s = pty.openpty(); os.write(s, b"tty"); print(os.read(m, 3).decode())' > said
sh -c 'echo sh' >> said; ps > /dev/null || true
git init -q repo; cd repo; git -c user.name=n -c user.email=e commit -q --allow-empty -m m; git log --format=%s >> ../said; cd ..
if command -v node > /dev/null; then node -e 'require("fs").writeFileSync(process.env.TMPDIR + "/n", "n")'; fi
echo end >> said""")
    assert session.end == "done", session
    assert (copy / "said").read_text() == "tty\nsh\nm\nend\n" and (copy / "renamed").read_text() == "y\n"
    assert (home / ".claude" / "state").stat().st_mode & 0o777 == 0o600 and "1" in (home / ".claude.json").read_text()
    assert all("modes and times of files outside" in note for note in session.notes)
    assert len(session.notes) == (0 if agent_cmd.NAMESPACES and has_namespaces() else 1)


def test_without_mounts_of_its_own_it_runs_and_it_is_said(tmp_path):
    text = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import warden
def refused(*args): raise OSError(38, 'Function not implemented')
warden.set_mounts = refused
warden.main()
"""
    if not has_namespaces():
        pytest.skip("no namespaces here")
    process = start_warden({"argv": ["sh", "-c", "echo x > done"], "env": {"PATH": os.environ["PATH"]}, "cwd": str(tmp_path),
                            "writable": [str(tmp_path), "/dev/null"]}, tmp_path, program=["-c", text])
    report = json.loads(process.stdout.read())
    process.wait(10)
    assert report["end"] == "exit" and "not implemented" in report["missing"]["mounts"] and (tmp_path / "done").exists()


def test_never_ending_is_ended(tmp_path, both_ways):
    started = time.monotonic()
    session, _ = hold(tmp_path, "trap '' TERM INT HUP; echo here; sleep 7771 & sleep 7771", {"proposer_s": 1.0})
    assert session.end == "failed" and "--proposer-s" in session.words and "here" in session.words
    assert time.monotonic() - started < 6 and not alive("sleep 7771")


def test_children_are_ended(tmp_path, both_ways):
    session, _ = hold(tmp_path, """
(setsid sh -c 'trap "" TERM HUP; sleep 7772 & sleep 7772' &)
(setsid setsid sleep 7772 > /dev/null 2>&1 < /dev/null &)
nohup sleep 7772 > /dev/null 2>&1 &
python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(7772)' sleep 7772
sleep 0.3; exit 0""")
    assert session.end == "done" and any("of its processes were left" in note for note in session.notes)
    assert not alive("sleep 7772")


def test_fork_bomb(tmp_path, monkeypatch):
    """Small: it forks no more than it is counted for, as other tests share this machine."""
    monkeypatch.setattr(agent_cmd, "MAX_PROCESSES", 40)
    session, _ = hold(tmp_path, "for i in $(seq 300); do sleep 7773 & done; sleep 7773")
    assert session.end == "failed" and ("processes" in session.words or "fork" in session.words)
    assert not alive("sleep 7773")


def test_100_mb_of_output_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_cmd, "MAX_OUTPUT_BYTES", 2_000_000)
    session, _ = hold(tmp_path, "head -c 50000000 /dev/zero; head -c 50000000 /dev/zero >&2; touch done")
    assert session.end == "failed" and "2,000,000 bytes" in session.words
    n_bytes = sum(path.stat().st_size for path in tmp_path.glob("transcript*"))
    assert 2_000_000 <= n_bytes < 2_000_200 and b"cut here" in (tmp_path / "transcript.txt").read_bytes()[-100:]


def test_disk_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_cmd, "MAX_DISK_BYTES", 5_000_000)
    session, copy = hold(tmp_path, "head -c 9000000 /dev/zero > h1.py; truncate -s 1T h2.py; echo still here")
    assert (copy / "h1.py").stat().st_size <= 5_000_000 and "still here" in (tmp_path / "transcript.txt").read_text()
    for body, told in (("for i in 1 2 3 4; do head -c 3000000 /dev/zero > f$i; done; sleep 20", "5,000,000 bytes"),
                       ("head -c 3000000 /dev/zero > $TMPDIR/x; head -c 3000000 /dev/zero > y; sleep 20", "5,000,000")):
        session, copy = hold(tmp_path, body)
        assert session.end == "failed" and told in session.words and session.seconds < 10


def test_money_limit(tmp_path):
    row = json.dumps({"type": "step_finish", "part": {"cost": 0.4}})
    session, _ = hold(tmp_path, f"for i in 1 2 3 4 5; do echo '{row}'; done; sleep 30", usd=0.5)
    assert session.end == "failed" and "limit of $0.5" in session.words and session.seconds < 10
    assert session.usd == pytest.approx(2.0) and any("cost more" in note for note in session.notes)


@pytest.mark.parametrize("script, end, told", [
    ("echo 'Not logged in. Please run /login' >&2; exit 1", "failed", "Not logged in"),
    ("echo '{\"type\": \"result\", \"is_error\": true, \"result\": \"Not logged in\"}'", "failed", "Not logged in"),
    ("echo 'API Error: 529 overloaded' >&2; exit 1", "transient", "529"),
    ("echo 'HTTP 500: internal' >&2; exit 1", "transient", "500"), ("echo no /tmp/pytest-500/x; exit 1", "failed", "pytest-500"),
    ("echo later; exit 75", "transient", "later"), ("exit 3", "failed", "exit status 3"),
    ("echo '\033[2J\033]0;x\007'; exit 3", "failed", "exit status 3"), ("kill -9 $$", "failed", "exit status -9"),
    ("exec /no/such/program", "failed", "exit status 127")])
def test_failures_in_its_own_words(tmp_path, script, end, told):
    session, _ = hold(tmp_path, script)
    assert session.end == end and told in session.words and "\033" not in session.words


def test_a_program_that_cannot_be_started(tmp_path):
    session, _ = hold(tmp_path, "", {"proposer_cmd": f"{tmp_path}/none {{dir}}"})
    assert session.end == "failed" and "could not be started" in session.words


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_run_is_the_end_of_the_agent(tmp_path, sign, monkeypatch):
    """Without a namespace, the harder case: an orphan in a session of its own."""
    monkeypatch.setattr(agent_cmd, "NAMESPACES", False)
    run = os.fork()
    if run == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)        # a background job is born with it ignored
        try:
            hold(tmp_path, "(setsid sleep 7774 &) ; touch started; sleep 7774")
        finally:
            os._exit(1)
    wait_until(lambda: (tmp_path / "session" / "work" / "started").exists(), 20)
    os.kill(run, sign)
    os.waitpid(run, 0)
    wait_until(lambda: not alive("sleep 7774"), 10)


def test_the_end_of_the_warden_is_the_end_of_the_agent(tmp_path):
    if not has_namespaces():
        pytest.skip("no process-id namespace here: what the agent put into the background stays")
    job = {"argv": ["sh", "-c", "(setsid sleep 7775 &) ; sleep 7775"], "env": {"PATH": os.environ["PATH"]}, "cwd": "/"}
    process = start_warden(job, tmp_path)
    wait_until(lambda: len(alive("sleep 7775")) >= 2, 10)
    process.kill()
    process.wait()
    wait_until(lambda: not alive("sleep 7775"), 10)


def test_without_landlock_the_agent_is_not_started(tmp_path):
    text = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import warden
def missing(*paths): raise OSError(38, 'Function not implemented')
warden.make_ruleset = missing
warden.main()
"""
    job = {"closed": [], "writable": [], "landlock": True, "argv": ["touch", f"{tmp_path}/started"]}
    run = subprocess.run([sys.executable, "-c", text], input=json.dumps(job), text=True, capture_output=True)
    report = json.loads(run.stdout)
    assert report["end"] == "refused" and not (tmp_path / "started").exists()
    workplace = Workplace(tmp_path, ("h1",), tmp_path / "t", SETTINGS, None)
    end, words = agent_cmd.judge(report, agent_cmd.limit_passed(report, workplace, False), Tally(), "")
    assert end == "failed" and "not implemented" in words and LAYER in words


def has_namespaces() -> bool:
    pid = os.fork()
    if pid == 0:
        failed = True
        try:
            failed = bool(jail.enter_namespaces(jail.CLONE_NEW_USER_IPC_PID))
        finally:
            os._exit(failed)                            # whatever happens: a child that goes on would be pytest again
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def wait_until(is_so, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def start_warden(job: dict, folder: Path, where: Path = ROOT, user: int | None = None,
                 program: list[str] | None = None) -> subprocess.Popen:
    job = {"transcript": f"{folder}/out", "errors": f"{folder}/err", "wall_s": 30, "output_bytes": 10**6,
           "disk_bytes": 10**8, "n_files": 1000, "n_processes": 100, "watched": [str(folder)], "closed": [],
           "places": [str(folder)], "host": os.getpid(), "writable": ["/dev/null"], "landlock": True, "namespaces": True} | job
    process = subprocess.Popen(
        [sys.executable if user is None else shutil.which("python3", path="/usr/bin:/usr/local/bin"), "-S", "-s", "-E", "-B",
         *(program or [f"{where}/warden.py"])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, cwd="/", start_new_session=True,
        user=user, group=user, extra_groups=None if user is None else [])
    process.stdin.write(json.dumps(job).encode())
    process.stdin.close()
    return process


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root; as an ordinary user the other tests are it")
@pytest.mark.parametrize("namespaces", [True, False])
def test_as_an_ordinary_user(namespaces):
    folder = Path(tempfile.mkdtemp(prefix="whale-test-", dir="/tmp"))
    own = subprocess.Popen(["sleep", "7777"], env={"KEY": CANARY}, user=NOBODY, group=NOBODY, extra_groups=[])
    try:
        for name in ("warden.py", "jail.py", "harness_api.py"):
            shutil.copy(ROOT / name, folder)
        work, secret = folder / "work", folder / "secret"
        for path in (work, secret):
            path.mkdir()
            os.chown(path, NOBODY, NOBODY)
        folder.chmod(0o755)
        (secret / "x").write_text(CANARY)
        os.chown(secret / "x", NOBODY, NOBODY)
        (secret / "x").chmod(0o640)
        script = f"""cat {secret}/x; echo a > {folder}/work/b; echo bad > {secret}/y; cat /proc/{own.pid}/environ; chmod 777 {secret}/x {secret}
kill -0 {own.pid} && echo signalled
(setsid sleep 7776 &) ; mkdir d; chmod 000 d; sleep 2.5; echo late"""
        job = {"argv": ["sh", "-c", script], "env": {"PATH": "/usr/bin:/bin"}, "cwd": str(work), "watched": [str(work)],
               "closed": [str(secret)], "writable": [str(work), "/dev/null"], "namespaces": namespaces}
        process = start_warden(job, work, folder, NOBODY)
        report = json.loads(process.stdout.read())
        # in a namespace of its own the warden may look into a closed folder; else it ends who makes one
        assert report["end"] == ("hidden" if "namespaces" in report["missing"] else "exit"), report
        assert process.wait(10) == 0 and not alive("sleep 7776")
        assert (work / "b").exists() and not (secret / "y").exists() and CANARY not in (work / "out").read_text()
        is_open = "namespaces" in report["missing"]     # then Landlock alone does not keep it from that
        assert "mounts" not in report["missing"] and stat_modes(secret, secret / "x") == ([0o777] * 2 if is_open else [
            0o755, 0o640])
        assert "Permission denied" in (work / "err").read_text() and "signalled" not in (work / "out").read_text()
        assert (Path("/proc") / str(own.pid) / "environ").read_text().startswith(f"KEY={CANARY}")
    finally:
        own.kill()
        own.wait()
        sessions.remove_tree(folder)


def stat_modes(*paths: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


def test_paths_that_landlock_allows(tmp_path):
    (tmp_path / "a" / "closed").mkdir(parents=True)
    (tmp_path / "a" / "open").mkdir()
    (tmp_path / "a" / "link").symlink_to("closed")
    allowed = warden.readable_paths([str(tmp_path / "a" / "link"), str(tmp_path / "a" / "closed" / "deeper")])
    below = [path for path in allowed if path.startswith(str(tmp_path))]
    assert below == [str(tmp_path / "a" / "open")] and "/usr" in allowed and warden.readable_paths([]) == ["/"]


# ---- what it leaves -------------------------------------------------------------------------------------------------


def test_no_shared_memory_is_left(tmp_path):
    """System V's outlives its maker, and is everybody's who has its key."""
    key = 0x77AC1E
    session, copy = hold(tmp_path, f"python3 -c 'import ctypes; print(ctypes.CDLL(None).shmget({key}, 4096, 0o1666))' > $1/seen")
    if any("without namespaces" in note for note in session.notes):
        pytest.skip("no namespaces here")
    assert int((copy / "seen").read_text()) >= 0
    assert str(key) not in Path("/proc/sysvipc/shm").read_text()


LITTER = {
    "a link": "ln -s /etc/passwd h1.py", "a pipe": "mkfifo h1.py", "a folder": "mkdir h1.py",
    "a socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"h1.py\")'",
    "a big file": "head -c 3000000 /dev/zero > h1.py", "a sparse file": "truncate -s 1G h1.py",
    "white space": "echo > h1.py", "nothing": "true"}


@pytest.mark.parametrize("kind", LITTER)
def test_only_plain_files_are_taken(tmp_path, kind, engine, sandbox, begun):
    said = []
    search = search_with(tmp_path / "archive", engine, sandbox, begun, replace(
        script_of(tmp_path, LITTER[kind]), max_proposer_failures=2), {"say": said.append})
    search.iterate()
    with pytest.raises(ProposerFailed, match="2 times in a row"):
        search.iterate()
    assert [row["end"] for row in records(search.folder)] == ["done", "done"]
    told = {"white space": ["h1.py is empty, so it was not taken"], "nothing": []}.get(
        kind, ["h1.py is no plain file of at most 1,000,000 bytes, so it was not taken"])
    assert [note for note in records(search.folder)[0]["notes"] if "namespaces" not in note] == told
    assert any(line.endswith("".join(f"; {note}" for note in told)) for line in said if line.startswith("session 1"))


MESS = r"""
cp archive/*/h0/harness.py h1.py; echo '# x' >> h1.py; echo '# y' >> archive/archive/h0/harness.py
rm -rf reports; ln -s /etc reports; mkfifo pipe; ln -s /etc/passwd report.md
python3 -c '
import os
print("[" * 100000, file=open("proposal.json", "w"))
open(b"name\n\xff\x1b", "w"); os.mkdir("closed"); open("closed/x", "w"); os.chmod("closed", 0)
for i in range(1500): os.mkdir("dddddddddd"); os.chdir("dddddddddd")
'
"""


def test_a_mess_is_reported_and_removed(tmp_path, engine, sandbox, begun):
    search = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, MESS))
    search.iterate()
    candidate, = [outcome.candidate for outcome in search.iterate()]
    assert candidate.note.startswith("recovered") and candidate.parent == "h0"
    record, = records(search.folder)
    assert any(note.startswith("proposal.json could not be read: maximum recursion") for note in record["notes"])
    told = "\n".join(record["strays"])
    assert all(path in told for path in ("archive/archive/h0/harness.py", "reports", "pipe", "name\n\ufffd\ufffd"))
    assert "\x1b" not in told and record["n_strays"] >= 5
    assert "# y" not in (search.folder / "h0" / "harness.py").read_text() and Path("/etc/passwd").exists()
    assert not (search.folder / "sessions" / "iteration_02" / "report.md").exists()
    assert not [left for left in Path("/tmp").glob("whale-proposer-*") if left.stat().st_mtime > time.time() - 5]


def test_entries_of_proposals_that_are_none():
    for text in ("", "5", "[5, null]", '{"h1": 3}', '[{"slot": [1]}]', "[" * 100_000, '{"h1": {"parent": 1e999}}'):
        rows, why = sessions.read_proposals(text)
        assert all(isinstance(row, dict) for row in rows.values()) and bool(why) == (text in ("", "5", "[" * 100_000))
    assert sessions.read_proposals('[{"slot": "h1.py", "parent": "h0"}]')[0]["h1"]["parent"] == "h0"


def test_many_files_are_bounded_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "N_LOOKED_AT", 100)
    for i in range(300):
        (tmp_path / str(i)).touch()
    stamps = sessions.stamps_of(tmp_path)
    assert len(stamps) == 101 and "(more than 100 files)" in stamps


# ---- whole searches -------------------------------------------------------------------------------------------------


def test_a_whole_search_and_its_repetition(tmp_path, engine, sandbox):
    histories = []
    for name in ("one", "two"):
        search = search_with(tmp_path / name, engine, sandbox, None, script_of(tmp_path / f"{name}-s", GOOD),
                             {"closed": (ROOT, tmp_path / name), "guarded": tuple(scorer_paths())})
        for _ in range(3):
            search.iterate()
        histories.append((tmp_path / name / "history.jsonl").read_bytes())
        assert [outcome.candidate.name for outcome in search.outcomes] == ["h0", "h1", "h2", "h3", "h4"]
        assert all(outcome.score for outcome in search.outcomes), [outcome.refused for outcome in search.outcomes]
    assert histories[0] == histories[1] and b"tmp" not in histories[0]
    record, = records(tmp_path / "one", 3)
    assert (record["end"], record["usd"], record["model"], record["version"]) == ("done", 0.25, "script", "1.0")
    assert (search.bill.proposer_calls, search.bill.proposer_usd, search.bill.proposer_tok) == (1, 0.25, 1050)
    notes = tmp_path / "one" / "sessions" / "iteration_03"
    assert "I read 1 cycles" in (notes / "report.md").read_text() and "usd" in (notes / "transcript_1.txt").read_text()


def test_the_script_of_the_manual(tmp_path, engine, sandbox, begun):
    """As printed in PROPOSERS.md, in a run's second cycle."""
    printed = (ROOT / "PROPOSERS.md").read_text().partition("    #!/bin/sh\n")[2].partition("\n\n")[0]
    (tmp_path / "my_agent.sh").write_text(textwrap.dedent("    #!/bin/sh\n" + printed) + "\n")
    settings = replace(SETTINGS, proposer_cmd=f"sh {tmp_path}/my_agent.sh {{dir}} {{prompt_file}}")
    check_settings(settings, closed=(ROOT, tmp_path / "run"))
    for cycle in ("cycle_01", "cycle_02"):
        search = search_with(tmp_path / "run" / "harness" / cycle, engine, sandbox, begun, settings,
                             {"closed": (ROOT, tmp_path / "run"), "guarded": tuple(scorer_paths())})
        search.iterate()
        assert [(outcome.candidate.name, outcome.refused) for outcome in search.iterate()] == [("h1", ""), ("h2", "")]
        record, = records(search.folder)
        assert (record["end"], record["usd"], record["model"], record["n_strays"]) == ("done", 0.0, "sed", 0)
        sources = {candidate["source"] for candidate in record["candidates"]}
        assert len(sources) == 2 and all("words long. Put your" in source for source in sources)
        assert not any(candidate["note"] for candidate in record["candidates"])


def test_it_sees_this_cycle_and_those_before(tmp_path, engine, sandbox, begun):
    runs = tmp_path / "run" / "harness"
    first = search_with(runs / "cycle_01", engine, sandbox, begun, script_of(tmp_path, GOOD))
    first.iterate(), first.iterate()
    look = "find . -type f | sort > $TMPDIR/seen; cp $TMPDIR/seen report.md\n" + GOOD.replace("archive/*", "archive/cycle_02")
    second = search_with(runs / "cycle_02", engine, sandbox, begun, script_of(tmp_path, look.replace("> report.md", "> /dev/null")))
    second.iterate(), second.iterate()
    seen = (runs / "cycle_02" / "sessions" / "iteration_02" / "report.md").read_text().split()
    assert {"./task.md", "./harness_api.py", "./archive/cycle_01/h1/traces.jsonl", "./archive/cycle_01/history.jsonl",
            "./archive/cycle_02/h0/harness.py", "./archive/cycle_01/reports/iteration_02.md"} <= set(seen)
    assert not [path for path in seen if "sessions" in path or "transcript" in path]


def test_an_agent_that_edits_the_scorer_stops_the_search(tmp_path, engine, sandbox, begun):
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "gates.py").write_text("passed = False\n")
    settings = script_of(tmp_path, GOOD + f"echo 'passed = True' > '{scorer}/gates.py'; touch '{scorer}/new.py'")
    walled = search_with(tmp_path / "walled", engine, sandbox, begun, settings, {"guarded": (scorer,)})
    walled.iterate()
    assert len(walled.iterate()) == 2 and (scorer / "gates.py").read_text() == "passed = False\n"
    open_ = search_with(tmp_path / "open", engine, sandbox, begun, settings, {"guarded": (scorer,), "waived": (LAYER,)})
    open_.iterate()
    with pytest.raises(SearchError, match=r"(?s)changed .*gates.py.*new.py"):
        open_.iterate()
    assert not (open_.folder / "iteration_02.json").exists() and not (open_.folder / "h1").exists()
    assert records(open_.folder)[0]["candidates"] == [] and len(records(open_.folder)[0]["tampered"]) == 2
    archive = replace(settings, proposer_cmd=script_of(
        tmp_path / "s2", f"echo x >> '{tmp_path}/arch/h0/score.json'; mkdir -p '{tmp_path}/arch/h9'").proposer_cmd)
    search = search_with(tmp_path / "arch", engine, sandbox, begun, archive, {"waived": (LAYER,)})
    search.iterate()
    with pytest.raises(SearchError, match="score.json"):
        search.iterate()


@pytest.mark.parametrize("change", ["chmod 777 gates.py", "chmod 000 gates.py", "touch -d 2001-01-01 gates.py", "chmod 700 .",
                                    "chmod 777 ../scorer/below"])
def test_a_mode_or_a_time_that_an_agent_changed_stops_the_search(tmp_path, engine, sandbox, begun, monkeypatch, change):
    """Landlock has no right for it, so without namespaces it is found; with them it is refused."""
    scorer = tmp_path / "scorer"
    (scorer / "below").mkdir(parents=True)
    (scorer / "below").chmod(0o755)
    (scorer / "gates.py").write_text("passed = False\n")
    settings = script_of(tmp_path, GOOD + f"cd '{scorer}' && {change}; true")
    if has_namespaces():
        walled = search_with(tmp_path / "walled", engine, sandbox, begun, settings, {"guarded": (scorer,)})
        walled.iterate()
        assert len(walled.iterate()) == 2 and records(walled.folder)[0]["tampered"] == []
    monkeypatch.setattr(agent_cmd, "NAMESPACES", False)
    found = search_with(tmp_path / "found", engine, sandbox, begun, settings, {"guarded": (scorer,)})
    found.iterate()
    with pytest.raises(SearchError, match="changed .*scorer"):
        found.iterate()
    record, = records(found.folder)
    assert len(record["tampered"]) == 1 and any("modes and times" in note for note in record["notes"])


def test_transient_failures_are_tried_again(tmp_path, engine, sandbox, begun):
    state = tmp_path / "outside"                        # what a session leaves in its copy is gone: waived, to remember
    script = f"echo x >> '{state}'; [ $(wc -l < '{state}') -gt 3 ] || {{ echo 'rate limit' >&2; exit 1; }}\n" + GOOD
    pauses = []
    search = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, script), {
        "waived": (LAYER,), "pause": pauses.append})
    search.iterate()
    assert len(search.iterate()) == 2 and pauses == [5.0, 10.0, 20.0]
    assert [row["end"] for row in records(search.folder)] == ["transient"] * 3 + ["done"]
    assert (search.bill.proposer_calls, search.bill.proposer_unpriced, search.bill.proposer_usd) == (4, 3, 0.25)


def test_failures_in_a_row_stop_with_its_own_words_and_keep_the_bill(tmp_path, engine, sandbox, begun):
    words = "echo '{\"usd\": 0.5}'; echo 'I am out of ideas' >&2; exit 4"
    asked = []

    def remembering(request, **kwargs):
        asked.append(request)
        return propose_by_agent(request, **kwargs)

    search = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, words))
    search.proposer = partial(remembering, **search.proposer.keywords)
    search.iterate()
    with pytest.raises(ProposerFailed, match="I am out of ideas"):
        search.iterate()
    assert (asked[0].bill.proposer_calls, asked[0].bill.proposer_usd) == (3, 1.5)
    assert not (search.folder / "iteration_02.json").exists()
    again = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, GOOD))
    again.iterate(), again.iterate()                    # the earlier sessions are on its bill
    assert (again.bill.proposer_calls, again.bill.proposer_usd) == (4, 1.75)


def test_a_killed_search_goes_on_without_asking_again(tmp_path, engine, sandbox, begun):
    class Killed(BaseException):
        pass

    whole = search_with(tmp_path / "whole", engine, sandbox, begun, script_of(tmp_path, GOOD))
    whole.iterate(), whole.iterate()

    def die(request, **kwargs):                         # after the session, before anything of it is written
        propose_by_agent(request, **kwargs)
        raise Killed

    search = search_with(tmp_path / "killed", engine, sandbox, begun, script_of(tmp_path, GOOD))
    search.proposer = partial(die, **search.proposer.keywords)
    search.iterate()
    with pytest.raises(Killed):
        search.iterate()
    again = search_with(tmp_path / "killed", engine, sandbox, begun, script_of(tmp_path, "echo asked again; exit 1"))
    again.iterate(), again.iterate()
    assert len(records(again.folder)) == 1 and again.bill.proposer_usd == 0.25
    assert (tmp_path / "killed" / "history.jsonl").read_bytes() == (tmp_path / "whole" / "history.jsonl").read_bytes()


def test_killed_in_the_middle_of_a_session(tmp_path, engine, sandbox, begun):
    class Killed(BaseException):
        pass

    def die(workplace):
        raise Killed

    search = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, GOOD))
    search.proposer = partial(search.proposer, run_agent=die)
    search.iterate()
    with pytest.raises(Killed):
        search.iterate()
    assert [row["end"] for row in records(search.folder)] == ["running"]
    again = search_with(tmp_path / "archive", engine, sandbox, begun, script_of(tmp_path, GOOD))
    again.iterate(), again.iterate()
    assert [row["end"] for row in records(search.folder)] == ["killed", "done"]
    assert (again.bill.proposer_calls, again.bill.proposer_unpriced, again.bill.proposer_usd) == (2, 1, 0.25)


def test_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BIG_BYTES", 100)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "small").write_text("x")
    (tmp_path / "a" / "big").write_text("x" * 200)
    (tmp_path / "a" / "sessions").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    before = fingerprint([tmp_path], tmp_path / "a" / "sessions")
    (tmp_path / "a" / "sessions" / "note").write_text("its own")
    seen = (tmp_path / "a" / "big").stat()
    (tmp_path / "a" / "big").write_text("y" * 200)
    os.utime(tmp_path / "a" / "big", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    (tmp_path / "a" / "new").touch()
    (tmp_path / "a" / "new").unlink()                   # no change, though the folder's time is another

    def changed() -> list[str]:
        after = fingerprint([tmp_path], tmp_path / "a" / "sessions")
        return sorted(path.removeprefix(str(tmp_path)) for path in before | after if before.get(path) != after.get(path))

    assert changed() == ["/a/big"]
    before = fingerprint([tmp_path], tmp_path / "a" / "sessions")
    os.utime(tmp_path / "a" / "small", ns=(0, 0))
    assert changed() == ["/a/small"]
    os.chmod(tmp_path / "a", 0o711)
    os.chmod(tmp_path / "a" / "big", 0o600)
    assert changed() == ["/a", "/a/big", "/a/small"]
    inner = fingerprint([tmp_path / "a" / "small"])
    os.chmod(tmp_path / "a", 0o755)                     # the folder above a path counts too
    assert fingerprint([tmp_path / "a" / "small"]) != inner
    assert {"whale.py", "h0_math.py", "test.jsonl", "model.safetensors", "report.html.jinja", "task.md.jinja"} <= {
        Path(path).name for path in fingerprint(scorer_paths())}
