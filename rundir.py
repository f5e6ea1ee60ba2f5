"""The directory of a run: everything that a run knows, as plain files that a kill at any moment leaves usable.

    config.json     the resolved settings and the hashes of data, model and h0; a run of other settings is refused
    state.json      what a resumed run must know beside the weights; the marker of a finished step, written last
    metrics.jsonl   one row an event; rows after the last finished step are cut off on resume and written again
    weights/step_000044/state.json      the last state with these weights, step 0 being the base model's
    summary.json    the run in one glance;  log.txt  what the screen said
    weights/  harness/  eval/       checkpoints (rft.py), archives (harness_search.py), graded test rollouts
    rollouts/       of each weight step, a few rollouts with their tokens;  report.html: all of it, to look at

A killed run loses at most the step that it was in, and the same command goes on. State, checkpoint and metrics have
checksums: where one is damaged, the run says so, goes back to the last state that is whole, and moves what came later
to set_aside/. Kept are the last --keep checkpoints and that of the best evaluation.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from files import (
    Damaged, UsageError, naming, read_bytes, read_json, read_sealed, take_lock, write_atomically, write_sealed)
from screen import Screen
from track import NO_TRACKER, TrackerError

ROOT = Path(__file__).resolve().parent
FORMAT = 5                              # of the directory; a run of another one is neither resumed nor reported on
FOLDERS = ("weights", "harness", "eval", "rollouts", "set_aside", "serving")    # others are a tracker's
LEDGER = ("setup", "weight", "harness", "gates", "eval")        # what is paid for ...
AMOUNTS = ("rollouts", "model_calls", "prompt_tok", "completion_tok", "tool_calls", "proposals", "proposer_calls",
           "proposer_tok", "proposer_usd", "proposer_unpriced", "seconds")                   # ... and in what


@dataclass
class State:
    phase: int = 0                          # index of the running phase
    signals: list[float] = field(default_factory=list)          # of the running phase, as its rule saw them
    phase_start: int = 0                    # training rollouts at its start
    idle: bool = False                      # the phase before was a search that spent nothing
    weight_step: int = 0
    n_drawn: int = 0                        # prompts drawn from D_weight so far
    empty_steps: int = 0                    # weight steps in a row without an accepted rollout
    harness_iterations: int = 0
    archive_iterations: dict[str, int] = field(default_factory=dict)        # by archive: sched.Phase.archive
    billed: dict[str, float] = field(default_factory=dict)      # of the running iteration: what the ledger has of it
    harness: dict | None = None             # the current candidate; None is h0
    evals: list[dict] = field(default_factory=list)
    accepted: list[dict] = field(default_factory=list)
    ledger: dict[str, dict[str, float]] = field(default_factory=lambda: {kind: {} for kind in LEDGER})
    metrics_bytes: int = 0                  # rows after these belong to a step that was not finished
    metrics_sha256: str = ""                # of these
    checkpoint_sha256: str = ""             # of the trainer.json of the weights; "": they are the base model's
    n_threads: int = 0                      # of torch: sums in another order differ in the last bits
    complete: bool = False


class RunDir:
    """State, ledger and records of one run. Opening it takes its lock; UsageError if it belongs to another run, or
    nothing of it is whole. `check` raises Damaged for a folder that holds no whole checkpoint."""

    def __init__(self, path: Path, identity: dict[str, dict], keep: int = 2,
                 check: Callable[[Path], object] = lambda folder: None):
        self.path, self.keep, self.check, self.screen = path, keep, check, Screen()
        self.mark = time.monotonic()                # every second from here is charged to one entry of the ledger
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_links(path)
            self.lock = take_lock(path, "run")
            with open(path / "metrics.jsonl", "ab"):                # can it be written? Told before a model is loaded
                pass
        except OSError as error:
            raise UsageError(f"{error.filename or path} cannot be written ({error.strerror}): this run needs a folder "
                             "of its own that can; give another --out or --name") from None
        self._check_identity({"format": {"version": FORMAT}, **identity})
        for left in path.rglob("*.tmp"):                            # by a process that was killed
            if re.search(r"\.\d+\.tmp$", left.name) and left.is_file():
                left.unlink(missing_ok=True)
        self.screen.log_path = path / "log.txt"
        state = self._find_state()
        self.resumed, self.state = state is not None, state or State()
        if (path / "metrics.jsonl").stat().st_size > self.state.metrics_bytes:
            os.truncate(path / "metrics.jsonl", self.state.metrics_bytes)
        self.track = NO_TRACKER

    def _states(self) -> list[Path]:
        """Where a state was written, the latest first: state.json, then beside the checkpoints."""
        copies = [folder / "state.json" for _, folder in reversed(self._checkpoints())]
        copies, newest = [path for path in copies if path.exists()], self.path / "state.json"
        return [newest, *copies] if copies or newest.exists() else []

    def _checkpoints(self) -> list[tuple[int, Path]]:
        folders = (self.path / "weights").glob("step_*")
        return sorted((int(path.name[5:]), path) for path in folders if path.name[5:].isdigit())

    def _find_state(self) -> State | None:
        """The latest state that is whole and whose metrics and checkpoint are, None for a new run. What is damaged is
        said; what came later than that state was made of other weights, and is moved out of the way."""
        damage = []
        for path in self._states():
            try:
                state = read_state(path)
                metrics = read_bytes(self.path / "metrics.jsonl")[:state.metrics_bytes]
                if hashlib.sha256(metrics).hexdigest() != state.metrics_sha256:
                    raise Damaged(f"{self.path / 'metrics.jsonl'} is cut or changed before byte "
                                  f"{state.metrics_bytes:,}: its sha256 is not the recorded one")
                if state.weight_step and (damage or not state.complete):     # of a complete run, a report is left
                    self.check(self.weights_dir(state.weight_step))
                    if self._checkpoint_sha256(state.weight_step) != state.checkpoint_sha256:
                        raise Damaged(f"{self.weights_dir(state.weight_step)} is not the checkpoint of {path}")
            except Damaged as error:
                damage += [str(error)] * (str(error) not in damage)
                continue
            if damage:
                shutil.copy(self.path / "metrics.jsonl", self._aside("metrics.jsonl"))
                later = self._set_aside(state)
                write_sealed(self.path / "state.json", asdict(state))
                for line in (*(f"DAMAGED: {line}" for line in damage),
                             f"the run goes back to {path.relative_to(self.path)}, the state after weight step "
                             f"{state.weight_step}, and does again what came later"
                             + f"; that is moved to {self.path / 'set_aside'}: {', '.join(later)}" * bool(later)):
                    self.screen.say(line, style="bold red")
            return state
        if damage:
            raise UsageError("\n".join([f"{self.path}: no state of this run is whole, so it cannot go on:",
                                        *(f"  {line}" for line in damage),
                                        "Put these files back from a copy, or give this run another --name."]))
        return None

    def _set_aside(self, state: State) -> list[str]:
        """Moves what other weights than this state's made to set_aside/ -> what that is."""
        later = [path for step, path in self._checkpoints() if step > state.weight_step]
        if later:
            evals = {row["traces"] for row in state.evals}
            later += [path for path in sorted((self.path / "harness").glob("cycle_*")) if path.name[6:].isdigit()
                      and str(int(path.name[6:])) not in state.archive_iterations]
            later += [path for path in sorted((self.path / "eval").glob("*")) if f"eval/{path.name}" not in evals]
            later += [path for path in sorted((self.path / "rollouts").glob("step_*")) if path.stem[5:].isdigit()
                      and int(path.stem[5:]) > state.weight_step]
        for path in reversed(later):            # the weights go last: until then, a kill leaves this to be done again
            path.replace(self._aside(path.relative_to(self.path)))
        return [str(path.relative_to(self.path)) for path in later]

    def _aside(self, name: str | Path) -> Path:
        """Where such a file or folder may lie in set_aside/; what is there of an earlier time goes."""
        aside = self.path / "set_aside" / name
        aside.parent.mkdir(parents=True, exist_ok=True)
        if aside.is_dir():
            shutil.rmtree(aside)
        return aside

    def _check_identity(self, identity: dict[str, dict]) -> None:
        path = self.path / "config.json"
        if not path.exists() and not self._states():
            return write_atomically(path, json.dumps(identity, indent=1) + "\n")
        try:
            before = read_json(path)
        except UsageError as error:
            raise UsageError(f"{error}. It says what run this is: put it back from a copy, or give this run another "
                             "--name") from None
        before = {group: values if isinstance(values, dict) else {} for group, values in before.items()}
        changes = [f"  {group} {key}: {before.get(group, {}).get(key)!r} then, {value!r} now"
                   for group, values in identity.items() for key, value in values.items()
                   if before.get(group, {}).get(key) != value]
        if changes:
            raise UsageError("\n".join([f"{self.path} holds a run with other settings:", *changes,
                                        "Give this run another --name, or remove that directory."]))

    def log(self, kind: str, text: str, **metrics) -> None:
        """The one door: a line on the screen and in log.txt, a row in metrics.jsonl."""
        self.screen.say(text)
        row = {"kind": kind, **metrics, "training_rollouts": self.training_rollouts(),
               "seconds": round(self.seconds(), 1)}
        path = self.path / "metrics.jsonl"
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            self.track.log(row)
        except TrackerError as error:                           # a copy to watch is no reason to stop
            self.screen.say(f"tracking ends here: {error}")
            self.track = NO_TRACKER

    def close(self) -> None:
        """Gives the directory free."""
        try:
            self.track.close()
        except TrackerError as error:
            self.screen.say(str(error))
        self.lock.close()

    # -- the ledger --

    def charge(self, kind: str, **amounts: float) -> None:
        entry = self.state.ledger[kind]
        for key, amount in amounts.items():
            entry[key] = entry.get(key, 0) + amount

    def clock(self, kind: str, already_s: float = 0.0) -> None:
        """Charges the time since the last reading, less what was charged by other means, to `kind`."""
        now = time.monotonic()
        self.charge(kind, seconds=max(0.0, now - self.mark - already_s))
        self.mark = now

    def spent(self, kind: str, what: str = "rollouts") -> float:
        return self.state.ledger[kind].get(what, 0)

    def seconds(self) -> float:
        return sum(self.spent(kind, "seconds") for kind in LEDGER)

    def training_rollouts(self) -> int:
        """The x axis of every comparison: gates and evaluation are counted apart."""
        return int(self.spent("weight") + self.spent("harness"))

    # -- records --

    def weights_dir(self, step: int) -> Path:
        return self.path / "weights" / f"step_{step:06d}"

    def write_traces(self, folder: str, name: str, rows: list[dict]) -> None:
        (self.path / folder).mkdir(exist_ok=True)
        write_atomically(self.path / folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def best_eval(self) -> dict:
        return best_of(self.state.evals)

    def save(self) -> None:
        """Ends a step: the state beside its checkpoint, then state.json. Then the checkpoints go that are neither among
        the last `keep` nor the best's."""
        state, metrics = self.state, read_bytes(self.path / "metrics.jsonl")
        state.metrics_bytes, state.metrics_sha256 = len(metrics), hashlib.sha256(metrics).hexdigest()
        state.checkpoint_sha256 = self._checkpoint_sha256(state.weight_step)
        folder = self.weights_dir(state.weight_step)
        folder.mkdir(parents=True, exist_ok=True)                   # step 0 has a state and no weights
        for path in (folder / "state.json", self.path / "state.json"):
            write_sealed(path, asdict(state))
        steps = [step for step, _ in self._checkpoints() if 0 < step <= state.weight_step]
        kept = {0, *steps[-self.keep:]} | ({self.best_eval()["weight_step"]} if state.evals else set())
        for step, left in self._checkpoints():
            if step not in kept:
                shutil.rmtree(left)

    def _checkpoint_sha256(self, step: int) -> str:
        """Of its trainer.json, which holds the checksums of its other files."""
        path = self.weights_dir(step) / "trainer.json"
        return hashlib.sha256(read_bytes(path)).hexdigest() if path.exists() else ""

    def write_summary(self, **facts) -> None:
        """summary.json, rewritten after every phase."""
        state = self.state
        if not state.evals:
            return

        def point(row: dict) -> dict:
            return {"mean": round(row["mean"], 6), "ci95": [round(x, 6) for x in row["ci95"]]}      # shown as 3 digits

        write_sealed(self.path / "summary.json", {
            **facts, "complete": state.complete, "base_mean8": point(state.evals[0]),
            "best_mean8": point(self.best_eval()), "final_mean8": point(state.evals[-1]),
            "rollouts": {kind: int(self.spent(kind)) for kind in LEDGER},
            "seconds": {kind: round(self.spent(kind, "seconds"), 1) for kind in LEDGER},
            "ledger": {kind: {what: round(self.spent(kind, what), 4) for what in AMOUNTS} for kind in LEDGER},
            "weight_steps": state.weight_step, "harness_iterations": state.harness_iterations,
            "accepted": state.accepted, "final_harness": "final_harness.py"})


def best_of(evals: list[dict]) -> dict:
    """The best evaluation: chosen on the test split, as in the paper, or on D_harness (--select harness-set)."""
    return max(evals, key=lambda row: row.get("select_mean", row["mean"]))


def refuse_links(run: Path) -> None:
    """UsageError for a link, a pipe or a device among a run's own files, as somebody else could have put there: what is
    written or removed by way of one lies elsewhere."""
    open_ends = [run]
    while open_ends:
        folder = open_ends.pop()
        for path in folder.iterdir():
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                open_ends += [path] * (folder != run or path.name in FOLDERS)
            elif not stat.S_ISREG(mode):
                raise UsageError(f"{path} is a link, a pipe or a device, and a run has files and folders of its own. A "
                                 "run on another disk has its whole --out there")


def read_state(path: Path) -> State:
    record = read_sealed(path)
    if set(record) != {knob.name for knob in fields(State)}:
        raise Damaged(f"{path} is damaged: it is not what a run of this version writes")
    return State(**record)


def scorer_paths() -> list[Path]:
    """What of this repository decides a score, or what a run goes on to do."""
    return [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("*.jinja")), ROOT / "run.sh", ROOT / "harnesses",
            ROOT / "prompts", ROOT / "embedded"]
