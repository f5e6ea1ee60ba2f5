"""`--proposer cmd`: any coding agent that edits files, as a command.

    --proposer-cmd claude                                       Claude Code, Codex (codex) or OpenCode (opencode)
    --proposer-cmd 'sh /path/to/my_agent.sh {dir} {prompt_file}'        any other command, a whole line

The line is split into words as a shell would, then the placeholders are filled, so a path with spaces stays one word:
{dir} the working copy, {prompt_file} what to do, {model} --proposer-model, {usd} what the session may cost. A word with
{model} or {usd} goes, and an option before it, where there is no such value. The command runs in {dir}, with nothing on
its standard input, and may not read the repository: a script lies elsewhere and is named by its absolute path. Its
environment names the files to write (WHALE_SLOTS="h4 h5 h6", for h4.py ...) and has a WHALE_SEED that is the same when
a search is repeated.

What a session cost is read from what the command prints, from any line that is a JSON object: the events of the three
agents, or for an agent of your own {"usd": 0.12, "prompt_tok": 9000, "completion_tok": 700, "model": "...",
"version": "..."}, of which the last one counts. Exit status 75 (EX_TEMPFAIL) means: try again later.

warden.py holds the limits and is the wall around it. Not covered: the agent's network, its memory, its own state in
HOME, and reading whatever else this user can read.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jail
import keys
from files import UsageError
from screen import plain
from sessions import ROOT, ProposerConfig, Session, Workplace, parse_price, prompt_for, read_plain

LAYER = "proposer-landlock"             # to be named in --waive
MAX_OUTPUT_BYTES = 20_000_000           # standard output and standard error together
MAX_DISK_BYTES = 2_000_000_000          # of a file, and of all that it adds to its copy and its temporary folder
MAX_FILES = 200_000                     # that it adds there
MAX_PROCESSES = 1000                    # threads count where the kernel counts for us
MAX_LINE = 4 << 20                      # of its output that is looked at as JSON
LOOK_S = 1.0                            # between two looks at what it cost so far
NAMESPACES = True                       # of process ids and mounts, where the system allows them
GOODBYE_S = 60.0                        # past the wall limit, for the warden to end what there is
IN_COPY = ("task.md", "harness_api.py")                 # files that a command finds where it runs
UNPROTECTED = "modes and times of files outside were not protected"
EX_TEMPFAIL = 75

PASSED = ("PATH HOME USER LOGNAME LANG LANGUAGE TERM TZ SHELL HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy "
          "https_proxy no_proxy all_proxy SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE "
          "CURL_CA_BUNDLE").split()     # and LC_*
SECRETS = (".ssh .gnupg .netrc .git-credentials .aws .azure .docker .kube .pypirc .kaggle .config/wandb .config/gcloud "
           ".config/gh .cache/huggingface/token .cache/huggingface/stored_tokens").split()      # in HOME, never read
TRANSIENT = re.compile(
    r"overloaded|rate.?limit|too many requests|(?<![\w/-])(429|500|502|503|504|529)(?![\w/-])|timed? ?out|try again|"
    r"temporar|connection|network|ECONNRE|EAI_AGAIN|socket hang up|disconnected|unavailable", re.I)
FINAL = re.compile(r"usage limit|quota|credit balance|billing|log.?in|authenticat|api.?key|unauthorized", re.I)


@dataclass(frozen=True)
class Agent:
    """How one of the common agents is run."""
    command: str
    keys: str                           # environment variables that it may see beside PASSED
    state: str                          # what it writes in HOME, its login among it; a name with a dot inside is a file
    env: tuple[tuple[str, str], ...] = ()


# The flags are those of Claude Code 2.1.197, Codex 0.171.0 and OpenCode 1.18.33, from their own --help. The warden is
# the sandbox: Codex's own makes mounts, which Landlock forbids. None gets its web tools: test sets are public.
AGENTS = {
    "claude": Agent(
        "claude -p 'Read the file {prompt_file} and do what it says.' --output-format stream-json --verbose "
        "--safe-mode --permission-mode acceptEdits --tools=Bash,Edit,Read,Write --allowedTools=Bash,Edit,Read,Write "
        "--no-session-persistence --max-budget-usd {usd} --model {model}",
        "ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN ANTHROPIC_BASE_URL CLAUDE_CODE_OAUTH_TOKEN CLAUDE_CONFIG_DIR",
        ".claude .claude.json .cache/claude .cache/claude-cli-nodejs",
        (("DISABLE_AUTOUPDATER", "1"), ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"))),
    "codex": Agent(
        "codex exec --json --ephemeral --skip-git-repo-check --sandbox danger-full-access --color never --cd {dir} "
        "-c 'web_search=\"disabled\"' --model {model} 'Read the file {prompt_file} and do what it says.'",
        "OPENAI_API_KEY OPENAI_BASE_URL CODEX_API_KEY CODEX_HOME", ".codex"),
    "opencode": Agent(
        "opencode run --format json --auto --pure --dir {dir} --model {model} "
        "'Read the file {prompt_file} and do what it says.'",
        "OPENCODE_API_KEY OPENROUTER_API_KEY ANTHROPIC_API_KEY OPENAI_API_KEY GOOGLE_GENERATIVE_AI_API_KEY "
        "GEMINI_API_KEY GROQ_API_KEY DEEPSEEK_API_KEY MISTRAL_API_KEY XAI_API_KEY OPENCODE_CONFIG",
        ".local/share/opencode .local/state/opencode .config/opencode .cache/opencode",
        (("OPENCODE_DISABLE_AUTOUPDATE", "1"),
         ("OPENCODE_PERMISSION", '{"webfetch": "deny", "websearch": "deny"}'))),
}


# ---- the command ----------------------------------------------------------------------------------------------------


def words_of(settings: ProposerConfig) -> list[str]:
    """The command as words, its placeholders not filled. UsageError if it cannot be one."""
    template = settings.proposer_cmd
    try:
        words = shlex.split(AGENTS[template].command if template in AGENTS else template)
    except ValueError as error:
        raise UsageError(f"--proposer-cmd {template!r}: {error}") from None
    if not words:
        raise UsageError(f"--proposer-cmd is empty: give {', '.join(AGENTS)}, or a command")
    known = ("dir", "prompt_file", "model", "usd")
    for name in re.findall(r"\{([A-Za-z_]+)\}", " ".join(words)):
        if name not in known:
            raise UsageError(f"--proposer-cmd: {{{name}}} is no placeholder; they are "
                             f"{', '.join(f'{{{name}}}' for name in known)}")
    return words


def fill(words: list[str], values: dict[str, str]) -> list[str]:
    """Each placeholder once, so that a value is never taken for one. Without a value its word goes, and an option
    before it."""
    filled: list[str] = []
    for word in words:
        names = re.findall(r"\{(dir|prompt_file|model|usd)\}", word)
        if all(values[name] for name in names):
            filled.append(re.sub(r"\{(dir|prompt_file|model|usd)\}", lambda match: values[match[1]], word))
        elif filled[1:] and filled[-1].startswith("-") and word.startswith("{"):
            filled.pop()
    return filled


def check_words(words: list[str], closed: tuple[Path, ...]) -> None:
    """UsageError for a file that is here, but not where the command runs, or that it may not read."""
    closed = tuple(Path(path).resolve() for path in closed)

    def is_closed(path: str) -> bool:
        return any(Path(path).resolve().is_relative_to(folder) for folder in closed)

    if "{" not in words[0]:
        program, found = words[0], shutil.which(words[0])
        if not found:
            raise UsageError(f"--proposer-cmd: there is no program {program!r} on PATH: install it, name another "
                             "agent, or do without one: --proposer rules")
        if "/" not in program:                                          # where one is closed, the next on PATH is run
            places = [place for place in os.get_exec_path() if not is_closed(os.path.join(place, program))]
            words = [shutil.which(program, path=os.pathsep.join(places)) or found, *words[1:]]
    for path in words:
        is_elsewhere = not os.path.isabs(path) and os.path.isfile(path) and path not in IN_COPY
        if is_elsewhere or os.path.isabs(path) and os.path.exists(path) and is_closed(path):
            raise UsageError(f"--proposer-cmd: the command runs in the working copy, and may not read {path}: put the "
                             "script elsewhere and give its absolute path")


def check_settings(settings: ProposerConfig, waived: tuple[str, ...] = (), closed: tuple[Path, ...] = ()) -> None:
    """UsageError for what would fail later, before a model is loaded. closed: what the agent may not read."""
    for name in ("proposer_s", "max_proposer_failures"):
        if not 0 < getattr(settings, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)} is not above 0")
    if not 0 <= settings.proposer_usd < math.inf:
        raise UsageError(f"--proposer-usd {settings.proposer_usd} is not 0 (no limit) or above")
    try:
        parse_price(settings.proposer_price or "0,0")
    except ValueError as error:
        raise UsageError(f"--proposer-price {settings.proposer_price}: {error}") from None
    for name in names_in(settings.proposer_env):
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError("--proposer-env: give names only, with commas between them; their values are those of "
                             f"this environment. Not a name, from {name.partition('=')[0]!r} on")
    if settings.proposer != "cmd":
        return
    words = words_of(settings)
    check_words(words[:1] if settings.proposer_cmd in AGENTS else words, () if LAYER in waived else closed)
    if settings.proposer_cmd == "opencode" and settings.proposer_model and "/" not in settings.proposer_model:
        raise UsageError(f"--proposer-model {settings.proposer_model}: opencode wants PROVIDER/MODEL")
    if sys.platform != "linux":
        raise UsageError(f"--proposer cmd needs Linux, where an agent can be locked in; this is {sys.platform}")
    if LAYER not in waived:
        try:
            jail.syscall(jail.LANDLOCK_CREATE, None, 0, 1)
        except OSError as error:
            raise UsageError(
                f"this kernel has no Landlock ({error.strerror}), so an agent could read the references and change the "
                f"scorer. Changes would be found, reading would not. To run it all the same: --waive {LAYER}") from None


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def environment_of(workplace: Workplace, private: Path) -> dict[str, str]:
    """What the agent sees of our environment: an allow-list."""
    settings = workplace.settings
    agent = AGENTS.get(settings.proposer_cmd)
    names = {*PASSED, *names_in(settings.proposer_env), *(agent.keys.split() if agent else ())}
    passed = {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
    return passed | dict(agent.env if agent else ()) | {
        "TMPDIR": str(private), "CLAUDE_CODE_TMPDIR": str(private),
        "WHALE_SEED": str(workplace.seed % (1 << 31)),                  # a shell can reckon with it
        "WHALE_SLOTS": " ".join(workplace.slots)}


def paths_in_home(settings: ProposerConfig) -> tuple[list[str], list[str]]:
    """-> what an agent may write in HOME, and what it may not read. The state of a ready agent is made if need be."""
    if not os.environ.get("HOME"):
        return [], []
    home = Path(os.environ["HOME"])
    if settings.proposer_cmd in AGENTS:
        for name in AGENTS[settings.proposer_cmd].state.split():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".json") and not (home / name).exists():
                (home / name).write_text("{}\n")
            elif not name.endswith(".json"):
                (home / name).mkdir(exist_ok=True)
    state = [home / name for agent in AGENTS.values() for name in agent.state.split()]
    if settings.proposer_cmd in AGENTS:
        state += [Path(os.environ[name]) for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME") if os.environ.get(name)]
    secrets = [home / name for name in SECRETS] + [Path(os.environ[name]) / file for name, file in (
        ("HF_TOKEN_PATH", ""), ("HF_HOME", "token"), ("HF_HOME", "stored_tokens")) if os.environ.get(name)]
    return ([str(path) for path in state if path.exists()],
            [str(path) for path in secrets if path.exists()])


# ---- a session ------------------------------------------------------------------------------------------------------


def run_command_agent(workplace: Workplace) -> Session:
    """One session of the command in its workplace."""
    settings, private = workplace.settings, workplace.folder.parent / "tmp"
    private.mkdir(exist_ok=True)
    prompt_file = private / "prompt.md"
    prompt_file.write_text(prompt_for(workplace), encoding="utf-8")
    usd = "" if workplace.usd is None else f"{workplace.usd:.4f}"
    argv = fill(words_of(settings), {"dir": str(workplace.folder), "prompt_file": str(prompt_file),
                                     "model": settings.proposer_model, "usd": usd})
    version = ""
    if settings.proposer_cmd in AGENTS:
        with Watched(workplace, [argv[0], "--version"], private / "version", wall_s=60.0) as aside:
            while aside.goes_on():
                pass
        version = plain(read_plain(private / "version") or "").strip()[:100]
        (private / "version").unlink(missing_ok=True)
    tally, ended_for_money = Tally(), False
    with (Watched(workplace, argv, workplace.transcript, settings.proposer_s) as watched,
          open(workplace.transcript, "rb") as transcript):
        lines = Lines(transcript)
        while watched.goes_on():
            for line in lines.take():
                tally.feed(line)
            if workplace.usd is not None and (tally.usd or 0.0) > workplace.usd:
                ended_for_money = True
                watched.stop()
        for line in lines.take(is_whole=True):
            tally.feed(line)
    report = watched.report
    if report["end"] == "output":
        with open(workplace.transcript, "ab") as transcript:
            transcript.write(f"\n[cut here: it had printed {MAX_OUTPUT_BYTES:,} bytes]\n".encode())
    limit = limit_passed(report, workplace, ended_for_money)
    end, words = judge(report, limit, tally, plain(tail_of(watched.errors)))
    missing = report.get("missing", {})
    notes = [*tally.notes, *(note for note, is_so in (
        (limit, limit),
        (f"{report.get('n_left')} of its processes were left when it ended, and were killed", report.get("n_left")),
        (f"it cost more than its limit of ${usd}", workplace.usd is not None and (tally.usd or 0.0) > workplace.usd),
        (f"without Landlock ({LAYER} is waived): it could read and write whatever this user can",
         LAYER in workplace.waived),
        (f"without namespaces of its own ({missing.get('namespaces')}): {UNPROTECTED}", "namespaces" in missing),
        (f"without mounts of its own ({missing.get('mounts')}): {UNPROTECTED}", "mounts" in missing),
    ) if is_so)]
    return Session(end, words, tally.model or settings.proposer_model, tally.version or version, tally.prompt_tok,
                   tally.completion_tok, tally.usd, round(watched.seconds, 1), tuple(notes))


def limit_passed(report: dict, workplace: Workplace, ended_for_money: bool) -> str:
    """Why the agent was ended; "" if it ended by itself."""
    return "" if report["end"] == "exit" else {
        "time": f"it was ended after {workplace.settings.proposer_s:g} s (--proposer-s)",
        "output": f"it was ended when it had printed {MAX_OUTPUT_BYTES:,} bytes",
        "processes": f"it was ended when it had more than {MAX_PROCESSES:,} processes",
        "disk": f"it was ended when its new files passed {MAX_DISK_BYTES:,} bytes or {MAX_FILES:,} in number",
        "hidden": "it was ended: it made a folder that cannot be looked into",
        "stopped": f"it was ended at its limit of ${workplace.usd}" if ended_for_money else "it was stopped",
        "refused": f"not started: Landlock is missing ({report.get('missing', {}).get('landlock')}); --waive {LAYER}",
        "lost": "the process that watches it was lost",
    }[report["end"]]


def judge(report: dict, limit: str, tally: "Tally", errors: str) -> tuple[str, str]:
    """-> how the session ended (Session.end), and why, with the agent's own words."""
    said = (tally.error or tally.words or plain(tally.last_line[-2000:].decode("utf-8", "replace"))).strip()
    if limit:
        return "failed", ". ".join(filter(None, (limit, said[-1500:], errors.strip()[-500:])))
    if report["code"] == 0 and not tally.error:
        return "done", said[-2000:]
    words = "\n".join(filter(None, (f"exit status {report['code']}", said[-1500:], errors.strip()[-1500:])))
    passes = report["code"] == EX_TEMPFAIL or (TRANSIENT.search(words) and not FINAL.search(words))
    return "transient" if passes else "failed", words


class Watched:
    """A command that runs under a warden. `report` is the warden's, once it has ended. Whatever interrupts us, Ctrl-C
    among it, the command ends first."""

    def __init__(self, workplace: Workplace, argv: list[str], transcript: Path, wall_s: float):
        settings, private = workplace.settings, workplace.folder.parent / "tmp"
        self.errors = transcript.with_name(transcript.stem + ".stderr" + transcript.suffix)
        state, secrets = paths_in_home(settings)
        devices = [path for path in ("/dev/null", "/dev/tty", "/dev/ptmx", "/dev/pts") if os.path.exists(path)]
        job = {"argv": argv, "env": environment_of(workplace, private), "cwd": str(workplace.folder),
               "transcript": str(transcript.absolute()), "errors": str(self.errors.absolute()), "wall_s": wall_s,
               "output_bytes": MAX_OUTPUT_BYTES, "disk_bytes": MAX_DISK_BYTES, "n_files": MAX_FILES,
               "n_processes": MAX_PROCESSES, "watched": [str(workplace.folder), str(private)],
               "closed": [*map(str, workplace.closed), *secrets], "host": os.getpid(),
               "writable": [str(workplace.folder), str(private), *state, *devices],
               "places": [str(workplace.folder.parent), *state],        # of devices no mode is its to change
               "landlock": LAYER not in workplace.waived, "namespaces": NAMESPACES,
               "blots": keys.blots(os.environ)}         # it may print what it sees
        transcript.write_bytes(b"")
        self.report, self.begun, self.seconds, self.wall_s = {"end": "lost"}, time.monotonic(), 0.0, wall_s
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-E", "-B", str(ROOT / "warden.py")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={}, cwd="/", start_new_session=True)
        try:
            self.process.stdin.write(json.dumps(job).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass                                        # it died at once, as its report will say

    def goes_on(self) -> bool:
        """False once it has ended. Waits for it a little."""
        try:
            self.process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() - self.begun > self.wall_s + GOODBYE_S:
                self.process.kill()                     # it hangs; what is below it dies with it
            return True
        said = self.process.stdout.read()
        self.process.stdout.close()
        self.seconds = time.monotonic() - self.begun
        self.report = json.loads(said) if said else self.report
        return False

    def stop(self) -> None:
        self.process.terminate()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.stop()
            self.process.wait()


class Lines:
    """The lines of a file that still grows."""

    def __init__(self, file):
        self.file, self.rest = file, b""

    def take(self, is_whole: bool = False) -> list[bytes]:
        """The lines that have come since; with `is_whole`, what is left after the last line's end too."""
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        return [*lines, self.rest] if is_whole else lines


def tail_of(path: Path, n_bytes: int = 4000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - n_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


# ---- what it says of itself -----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What is read from an agent's output. All of it is hostile: what is not what it should be counts as not said."""
    usd: float | None = None
    prompt_tok: int | None = None
    completion_tok: int | None = None
    model: str = ""
    version: str = ""
    words: str = ""                     # the last thing that the model said
    error: str = ""                     # the last error that was not followed by success
    last_line: bytes = b""              # that is no event
    notes: tuple[str, ...] = ()

    def feed(self, line: bytes) -> None:
        """One line of output."""
        try:
            event = json.loads(line) if line.startswith(b"{") and len(line) <= MAX_LINE else None
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            self.last_line = line if line.strip() else self.last_line
            return
        kind = event.get("type")
        if kind == "system":                                            # claude: its first event
            self.name(event.get("model"), event.get("claude_code_version"))
        elif kind == "result":                                          # claude: its last
            usage = part(event, "usage")
            self.bill(event.get("total_cost_usd"), [usage.get(name) for name in (
                "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")], usage.get("output_tokens"))
            self.say(event.get("result"), is_error=event.get("is_error") is True)
        elif kind == "turn.completed":                                  # codex: the tokens of the session so far
            usage = part(event, "usage")
            self.bill(None, [usage.get("input_tokens")], usage.get("output_tokens"))
            self.error = ""
        elif kind == "turn.failed":
            self.say(part(event, "error").get("message"), is_error=True)
        elif kind == "item.completed" and part(event, "item").get("type") == "agent_message":
            self.say(event["item"].get("text"))
        elif kind == "step_finish":                                     # opencode: one step's, to be added
            step, tokens = part(event, "part"), part(part(event, "part"), "tokens")
            cache = part(tokens, "cache")
            self.bill(step.get("cost"), [tokens.get("input"), cache.get("read"), cache.get("write")],
                      tokens.get("output"), is_sum=False)
            self.error = ""
        elif kind == "text":
            self.say(part(event, "part").get("text"))
        elif kind == "error":                                           # codex and opencode
            inner = part(event, "error")
            self.say(event.get("message") or part(inner, "data").get("message") or inner.get("message")
                     or inner.get("name"), is_error=True)
        elif event.keys() & {"usd", "prompt_tok", "completion_tok"}:    # an agent of your own
            self.bill(event.get("usd"), [event.get("prompt_tok")], event.get("completion_tok"))
            self.name(event.get("model"), event.get("version"))

    def name(self, model: object, version: object) -> None:
        self.model = plain(model)[:100] if isinstance(model, str) else self.model
        self.version = plain(version)[:100] if isinstance(version, str) else self.version

    def say(self, text: object, is_error: bool = False) -> None:
        text = plain(text[-4000:]) if isinstance(text, str) else ""
        if is_error:
            self.error = text or "an error without a message"
        elif text:
            self.words = text

    def bill(self, usd: object, prompt_tok: list, completion_tok: object, is_sum: bool = True) -> None:
        """Amounts so far, or (not is_sum) to be added to those before."""
        counts = [amount(tok) for tok in prompt_tok]
        new = {"usd": amount(usd), "completion_tok": amount(completion_tok),
               "prompt_tok": sum(filter(None, counts)) if any(count is not None for count in counts) else None}
        for name, value in new.items():
            if value is not None:
                value = value if name == "usd" else int(value)
                setattr(self, name, value if is_sum else value + (getattr(self, name) or 0))
        given = [value for value in (usd, completion_tok, *prompt_tok) if value is not None]
        if any(amount(value) is None for value in given):
            self.notes = ("what it says of its cost is no amount",)


def part(event: dict, name: str) -> dict:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def amount(value: object) -> float | None:
    """A number of dollars or tokens that can be one, else None: nothing negative, no NaN, no 1e300, no text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e12:
        return None
    return value
