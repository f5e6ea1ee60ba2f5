"""report.html: a run as one page to look at, from the files of its directory alone.

The page has no script and no link to the outside: it opens from disk, follows the browser's light or dark mode, and its
text is escaped by the template (report.html.jinja), whatever a model, a tool or a proposer wrote. It is written after
every phase that takes a few seconds; `write_report` reads only what is finished, so it may be called while a run goes
on.

    bash run.sh report runs/math-whale-seed0          rebuilds it (or a comparison's: compare.py)
"""

import difflib
import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import jinja2

from acceptance import pareto_front
from plots import Dots, Figures, Series, front_svg
from files import (
    UsageError, below, in_order, iter_jsonl, read_bytes, read_json, read_sealed, read_text, refuse_special, sha256,
    write_atomically)
from rundir import AMOUNTS, FORMAT, LEDGER, best_of, refuse_links
from screen import LEDGER_TITLES, ledger_cells, money_text, plain
from stats import bootstrap_ci

ROOT = Path(__file__).resolve().parent
N_SHOWN = {"mended": 10, "broken": 8, "still failing": 8, "solved by both": 4}          # tasks in the browser
N_CYCLES = 10                           # with their harnesses, the last: all of a long run would take ever longer
REFRESH_S = 30                          # how often the page of a running run is written, and loads itself again
MAX_CHARS = 4000                        # of one message on the page,
MAX_VIEW_CHARS = 12_000                 # and of all messages of a rollout
RATES = {"answered_frac": "format", "truncated_frac": "truncated", "tool_frac": "tool call",
         "retrieval_hit_frac": "retrieval hit", "legal_move_frac": "legal moves"}


def write_report(folder: Path, running: bool = False) -> Path:
    """Writes FOLDER/report.html -> its path. UsageError, which says what is wrong, if FOLDER holds no readable run."""
    with as_usage_error(folder):
        page = render("report.html.jinja", **page_of(Path(folder), running))
    write_atomically(Path(folder) / "report.html", page)
    return Path(folder) / "report.html"


@contextmanager
def as_usage_error(folder: Path) -> Iterator[None]:
    """Files that parse but hold something else than a run writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, OSError,
            jinja2.TemplateError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{folder} holds records that no run writes ({type(error).__name__}: {str(error)[:300]}): the "
                         "directory is not whole") from error


def report_mark(folder: Path) -> str:
    """What stands in a page that was made of this state of the run: no clock, which may be set back, is asked."""
    return sha256(read_text(folder / "state.json"))


def render(template: str, **content) -> str:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(ROOT), autoescape=True, undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True)
    return plain(env.get_template(template).render(**content))


def is_running(folder: Path) -> bool:
    """Whether a process holds the run directory's lock."""
    if not (folder / ".lock").exists():
        return False
    refuse_special(folder / ".lock")
    with open(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


# ---- the run's files ------------------------------------------------------------------------------------------------


def read_metrics(path: Path, state: dict) -> list[dict]:
    """The rows of finished steps."""
    n_bytes = state["metrics_bytes"]
    metrics = read_bytes(path)[:n_bytes]
    if len(metrics) < n_bytes:
        raise UsageError(f"{path} is cut short: it has {len(metrics):,} bytes, and {n_bytes:,} were written")
    if hashlib.sha256(metrics).hexdigest() != state["metrics_sha256"]:
        raise UsageError(f"{path} is damaged: its sha256 is not the recorded one")
    return [json.loads(line) for line in metrics.splitlines()]


def read_run(folder: Path) -> tuple[dict, dict, list[dict]]:
    """-> config, state and the finished rows of metrics.jsonl."""
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} is no run directory: " + ("it has no config.json" if folder.exists() else "no such "
                         "directory"))
    refuse_links(folder)
    config = read_json(folder / "config.json")
    if (found := config.get("format", {}).get("version")) != FORMAT:
        summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
        raise UsageError(f"{folder} was written by another version of WHALE (directory format {found or 'before 2'}, "
                         f"this one reads {FORMAT}); its own was {summary.get('version', 'not noted')}")
    if not (folder / "state.json").exists():
        what_now = "the run is still going" if is_running(folder) else "the run's own command goes on with it"
        raise UsageError(f"{folder}: nothing is finished yet, not even the evaluation of the base model; {what_now}")
    state = read_sealed(folder / "state.json")
    return config["config"], state, read_metrics(folder / "metrics.jsonl", state)


# ---- the page -------------------------------------------------------------------------------------------------------


def page_of(folder: Path, running: bool) -> dict:
    """Everything that the template shows."""
    config, state, metrics = read_run(folder)
    evals, rows = state["evals"], {row["label"]: row for row in metrics if row["kind"] == "eval"}
    if not evals:
        raise UsageError(f"{folder}: the evaluation of the base model is not finished yet")
    measured = {}                       # an evaluation that was not repeated has its numbers in the row it equals
    for number, point in enumerate(evals):
        measured[number] = rows[point["label"]] if "n" in rows[point["label"]] else measured[number - 1]
    ledger = {kind: {what: state["ledger"][kind].get(what, 0) for what in AMOUNTS} for kind in LEDGER}
    ledger["all"] = {what: sum(amounts[what] for amounts in ledger.values()) for what in AMOUNTS}
    figures = figure_of(config, state, metrics)
    archives = [path for path in in_order(folder.glob("harness/cycle_*"))
                if (path / "history.jsonl").exists() or (path / "accepted.txt").exists()]
    first = next(iter(in_order(folder.glob("harness/*/h0/harness.py"))), None)
    summary = read_sealed(folder / "summary.json")
    return {
        "title": f"{config['method']} on {config['domain']}, seed {config['seed']}", "config": config,
        "mark": report_mark(folder),
        "refresh_s": REFRESH_S, "model": "/".join(Path(config["model"]).parts[-2:]),
        "status": "complete" if state["complete"] else "running" if running or is_running(folder) else "stopped",
        "summary": summary, "evals": [{**point, "row": measured[i]} for i, point in enumerate(evals)],
        "best": best_of(evals),
        "rate_names": {key: name for key, name in RATES.items() if any(key in row for row in measured.values())},
        "svg": {size: figures.svg(size) for size in ("wide", "narrow")},
        "money": money_text(summary["usd"]),
        "ledger_titles": LEDGER_TITLES, "ledger": {kind: ledger_cells(amounts) for kind, amounts in ledger.items()},
        "n_training": metrics[-1]["training_rollouts"], "minutes": ledger["all"]["seconds"] / 60,
        "failures": compare_failures(measured[0], measured[len(evals) - 1]),
        "cycles": [cycle_of(path) for path in archives[-N_CYCLES:]], "n_left_out": max(0, len(archives) - N_CYCLES),
        "final_source": read_text(folder / "final_harness.py"),
        "final_diff": diff_of(first, folder / "final_harness.py") if first else [],
        "groups": task_groups(*(below(folder, evals[i]["traces"]) for i in (0, -1))) if len(evals) > 1 else {},
        "training": [(path.stem, [view_of(row) for row in iter_jsonl(path)])
                     for path in shown_steps(in_order(folder.glob("rollouts/step_*.jsonl")), state["weight_step"])]}


def figure_of(config: dict, state: dict, metrics: list[dict]) -> Figures:
    """Test mean@n with its interval, the reward of each weight step, the score of each candidate; phases shaded."""
    evals = state["evals"]
    test = Series(f"test mean@{config['n_eval']}, 95 % interval", [e["training_rollouts"] for e in evals],
                  [e["mean"] for e in evals], [e["ci95"][0] for e in evals], [e["ci95"][1] for e in evals], band=False)
    steps = [row for row in metrics if row["kind"] == "weight_step"]
    scored = [row for row in metrics if row["kind"] == "candidate" and not row["refused"] and not row["stopped"]]
    dots = [Dots(name, [row["training_rollouts"] for row in points], [row[key] for row in points], marker)
            for name, points, key, marker in (("reward of a weight step", steps, "reward", "o"),
                                              ("score of a candidate", scored, "mean", "x")) if points]
    return Figures(f"mean@{config['n_eval']}", [test], dots, phase_spans(metrics))


def phase_spans(metrics: list[dict]) -> list[tuple[float, float, str]]:
    """(from, to, kind) in training rollouts, of the finished phases and the running one."""
    spans, start = [], 0
    for row in metrics:
        kind = {"weight_step": "weight", "iteration": "harness"}.get(row["kind"])
        if kind and spans and spans[-1][2] == kind:
            spans[-1] = (spans[-1][0], row["training_rollouts"], kind)
        elif kind:
            spans.append((start, row["training_rollouts"], kind))
        start = row["training_rollouts"] if kind else start
    return spans


def compare_failures(before: dict, after: dict) -> list[tuple[str, int, int, float]]:
    """(kind, before, after, the larger one's share of all rollouts), the most frequent before first."""
    counts = [Counter({key.removeprefix("failure_"): n for key, n in row.items() if key.startswith("failure_")})
              for row in (before, after)]
    kinds = sorted(counts[0].keys() | counts[1].keys(), key=lambda kind: (kind != "solved", -counts[0][kind], kind))
    return [(kind, counts[0][kind], counts[1][kind], before["n"]) for kind in kinds]


def diff_of(old: Path, new: Path) -> list[tuple[str, str]]:
    """(class, line) of a unified diff."""
    classes = {"+": "add", "-": "del", "@": "hunk"}
    diff = difflib.unified_diff(read_text(old).splitlines(), read_text(new).splitlines(), lineterm="", n=4)
    return [(classes.get(line[0], ""), line) for line in list(diff)[2:]]


# -- the harness search --


def cycle_of(folder: Path) -> dict:
    """One archive as a tree: each candidate under its parent."""
    rows = list(iter_jsonl(folder / "history.jsonl"))
    files = {row["name"]: below(folder, row["name"]) / "harness.py" for row in rows}
    accepted, why, confirmed = "", "", {}
    if (folder / "accepted.txt").exists():
        record = read_sealed(folder / "acceptance.json")
        if record["n_candidates"] == len(rows):             # else of an earlier phase, and the search has gone on since
            accepted, why = record["name"], record["why"]
            confirmed = {row["name"]: "on fresh seeds {:+.3f} [{:+.3f}, {:+.3f}]".format(row["difference"], *row["ci"])
                         for row in record["confirmed"]}
    scores = {row["name"]: folder / row["name"] / "score.json" for row in rows if not row["refused"]}
    rewards = {name: rewards_of(path, path.stat().st_mtime_ns if path.exists() else 0) for name, path in scores.items()}
    whole = [row for row in rows if not row["refused"] and not row["stopped"]]
    best = max((row["mean"] for row in whole), default=0)
    points = [(row["name"], row["mean"], row["tok_a_rollout"]) for row in whole]
    front = pareto_front(points)
    children: dict[str, list[dict]] = {}
    names = {row["name"] for row in rows if not row["refused"]}         # a refused one is no parent
    for row in rows:
        over = [] if row["refused"] or not row["parent"] else [
            reward - rewards["h0"][task] for task, reward in rewards[row["name"]].items()]
        parent = row["parent"] if row["parent"] in names and row["parent"] != row["name"] else ""
        children.setdefault(parent, []).append({
            **row, "accepted": row["name"] == accepted, "on_front": row["name"] in front,
            "verdict": "accepted" if row["name"] == accepted else "refused" if row["refused"] else
            "stopped early" if row["stopped"] else "the incoming harness" if not row["parent"] else
            confirmed[row["name"]] if row["name"] in confirmed else
            "not the best" if row["mean"] < best else "a tie, by more calls or later" if accepted else "best so far",
            "over_h0": (sum(over) / len(over), bootstrap_ci(over, 0)) if over else None,
            "changes": failure_changes(rows, row), "source": read_text(files[row["name"]]),
            "diff": diff_of(files[row["parent"]], files[row["name"]]) if row["parent"] in scores else []})

    def nest(parent: str) -> list[dict]:
        return [{**child, "children": nest(child["name"])} for child in children.get(parent, [])]

    return {"name": folder.name.replace("_", " "), "tree": nest(""), "accepted": accepted, "why": why, "n": len(rows),
            "sessions": sessions_of(folder), "front": front_svg(points, front, folder.name) if len(points) > 1 else "",
            "task": read_text(folder / "task.md")}


def sessions_of(folder: Path) -> list[list[str]]:
    """A row a session of an agent that proposed; a cost that is not known is said to be unknown."""
    rows = []
    for path in in_order(folder.glob("sessions/*/session_*.json")):
        session = read_sealed(path)
        usd, tok = session.get("usd"), [session.get(key) for key in ("prompt_tok", "completion_tok")]
        said = [*session.get("notes", []), *(f"changed {name}" for name in session.get("tampered", []))]
        if session.get("n_strays"):
            said.append(f"changed {session['n_strays']} other paths: {', '.join(session['strays'])}")
        rows.append([f"{path.parent.name.replace('_', ' ')}, {path.stem.removeprefix('session_')}", session["end"],
                     f"{session.get('model', '')} {session.get('version', '')}".strip(),
                     *(f"{n:,}" if n is not None else "unknown" for n in tok),
                     f"{usd:.2f}" if usd is not None else "unknown", f"{session.get('seconds', 0):.0f}",
                     ", ".join(candidate["name"] for candidate in session.get("candidates", [])),
                     "; ".join(said), session.get("words", "")[-300:]])
    return rows


@lru_cache(maxsize=1024)
def rewards_of(path: Path, changed_ns: int) -> dict[str, float]:
    """By task. A run writes its page after each phase, and a score does not change."""
    return read_sealed(path)["rewards"]


def failure_changes(rows: list[dict], row: dict) -> list[tuple[str, int, int]]:
    """(kind, parent's count, own count) of the failures whose count changed, the largest change first."""
    parent = next((other for other in rows if other["name"] == row["parent"] and not other["refused"]), None)
    if parent is None or row["refused"] or row["stopped"] or parent["stopped"]:     # of as many rollouts each
        return []
    kinds = parent["failures"].keys() | row["failures"].keys()
    changes = [(kind, parent["failures"].get(kind, 0), row["failures"].get(kind, 0)) for kind in sorted(kinds)]
    return sorted((c for c in changes if c[1] != c[2]), key=lambda change: -abs(change[1] - change[2]))


# -- trajectories --


def task_groups(base: Path, final: Path) -> dict[str, list[dict]]:
    """Test tasks by what became of their first rollout; of each task, how many of its n rollouts were right. Only the
    rollouts that are shown are kept: such a file may be large."""
    right, solved = [Counter(), Counter()], [{}, {}]
    for path, counter, first in zip((base, final), right, solved, strict=True):
        for trace in iter_jsonl(path):
            counter[trace["task_id"]] += trace["reward"] > 0.5
            if trace["sample"] == 0:
                first[trace["task_id"]] = trace["reward"] > 0.5
    n = sum(trace["task_id"] == next(iter(solved[0])) for trace in iter_jsonl(base))
    names = {(False, True): "mended", (True, False): "broken", (False, False): "still failing",
             (True, True): "solved by both"}
    groups: dict[str, list[str]] = {name: [] for name in N_SHOWN}
    for task in solved[0]:
        group = groups[names[solved[0][task], solved[1][task]]]
        group.append(task)
    groups = {name: tasks[:N_SHOWN[name]] for name, tasks in groups.items()}
    shown = {task for tasks in groups.values() for task in tasks}
    views = [{trace["task_id"]: view_of(trace) for trace in iter_jsonl(path)
              if trace["sample"] == 0 and trace["task_id"] in shown} for path in (base, final)]
    return {name: [{"id": task, "n": n, "right": (right[0][task], right[1][task]), "views": [v[task] for v in views]}
                   for task in tasks] for name, tasks in groups.items()}


def view_of(trace: dict) -> dict:
    """A trace as turns: (who, text, note), and its training view as runs of (text, the model said it)."""
    turns, left = [], MAX_VIEW_CHARS
    for who, text, note in turns_of(trace["events"]):
        turns.append((who, clip(text, left), note))
        left -= len(turns[-1][1])
    texts, left = [], MAX_VIEW_CHARS
    for sequence in trace["texts"]:
        texts.append([])
        for text, said in sequence:
            texts[-1].append((clip(text, left), said))
            left -= len(texts[-1][-1][0])
    title = next((text for who, text, _ in turns if who == "user"), "")
    kept = {key: trace[key] for key in ("task_id", "reward", "failure", "accepted", "why", "end", "n_calls", "n_tok")}
    return {**kept, "turns": turns, "texts": texts, "title": title}


def turns_of(events: list[dict]) -> Iterator[tuple[str, str, str]]:
    """What was new in each request, and what came back. What the model or a tool said is shown when they said it, and
    not again where it went on unchanged; what a harness made of it is shown as the message that it was."""
    shown: list[dict] = []
    said: list[str] = []
    for event in events:
        request, result = event["request"], event["result"]
        if request["type"] == "generate":
            messages = request["messages"]
            known = len(shown) if messages[:len(shown)] == shown else 0
            if shown and not known:
                yield "harness", "", "the harness began a new context"
            for message in messages[known:]:
                if message["role"] not in ("assistant", "tool") or message["content"] not in said:
                    yield message["role"], message["content"], ""
            shown = messages
            said.append(result["content"])
            yield "model", result["content"], "" if result["finish"] == "stop" else f"cut: {result['finish']}"
        else:
            asked = {key: value for key, value in request.items() if key != "type"}
            text = next(iter(asked.values())) if len(asked) == 1 else json.dumps(asked, ensure_ascii=False)
            yield f"{request['type']} call", str(text), ""
            said.append(str(result.get("output", "")))
            note = "" if result.get("ok", True) else "failed"
            yield f"{request['type']} output", said[-1], " ".join(filter(None, [note, result.get("end", "")]))


def clip(text: str, left: int = MAX_CHARS) -> str:
    n = max(0, min(MAX_CHARS, left))
    return text if len(text) <= n else f"{text[:n]} ... ({len(text) - n:,} more characters in the run's files)"


def shown_steps(paths: list[Path], last_step: int) -> list[Path]:
    """At most eight weight steps, evenly spaced, the first and the last among them; none that was not finished."""
    done = [path for path in paths if int(path.stem.rpartition("_")[2]) <= last_step]
    return [done[round(i * (len(done) - 1) / 7)] for i in range(8)] if len(done) > 8 else done
