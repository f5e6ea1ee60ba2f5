"""report.html of a real small run: what it shows, that nothing in it is live, and what a broken directory is told."""

import fcntl
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report
from plots import Figures, Series
from files import sha256
from small import SMALL, call, edit

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</pre></details>{{ 7 * 7 }}\x00\ud800"


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Page(HTMLParser):
    """Tags, attributes and text; `marked`: the text of each <pre class="tokens">'s marks."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.open, self.marked = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "path", "use", "rect", "circle", "line"):
            self.open.append(tag)
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "mark":
            self.marked[-1] += data


def test_it_is_one_file_that_reaches_nowhere(finished):
    text = (finished / "report.html").read_text()
    page = Page(text)
    assert len(text) < 5_000_000 and not {"script", "iframe", "link", "img", "object", "embed", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#"), value                         # within the figure
    assert not re.search(r"url\((?!#)|@import", text)


def test_it_shows_the_run(finished):
    page = Page((finished / "report.html").read_text())
    summary = json.loads((finished / "summary.json").read_text())
    for which in ("base", "best", "final"):
        assert f"{summary[f'{which}_mean8']['mean']:.3f}" in page.text
    for amounts in summary["ledger"].values():
        assert f"{amounts['completion_tok']:,}" in page.text
    for line in (finished / "harness/cycle_01/history.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["hypothesis"] in page.text and (row["refused"] or f"{row['mean']:.3f}") in page.text
    accepted = summary["accepted"][0]["name"]
    assert f"accepted {accepted}" in page.text and "complete" in page.text
    changed = set((finished / f"harness/cycle_01/{accepted}/harness.py").read_text().splitlines()) - set(
        (finished / "harness/cycle_01/h0/harness.py").read_text().splitlines())
    for line in filter(str.strip, changed):
        assert f"+{line}" in page.text
    evals = sorted((finished / "eval").iterdir())
    base = [json.loads(line) for line in evals[0].read_text().splitlines()]
    counts = {word: sum(trace["failure"] == word for trace in base) for word in {trace["failure"] for trace in base}}
    assert sum(counts.values()) == 24
    for word, n in counts.items():
        assert f"{word}{n} base" in page.text.replace("\n", ""), word


def test_marked_are_the_tokens_that_carried_loss(finished):
    """The marks of an accepted rollout are the model's replies with their stop tokens, and nothing that it did not say."""
    rows = [json.loads(line) for line in (finished / "rollouts/step_000002.jsonl").read_text().splitlines()]
    assert {row["accepted"] for row in rows} == {True, False}
    marks = Page((finished / "report.html").read_text()).marked
    for row in rows:
        replies = [event["result"]["content"] for event in row["events"] if event["request"]["type"] == "generate"]
        said = [text for sequence in row["texts"] for text, is_model in sequence if is_model]
        assert [text.removesuffix("<|im_end|>") for text in said] == replies and set(said) <= set(marks)


def test_base_and_final_stand_side_by_side(finished):
    text = (finished / "report.html").read_text()
    groups = re.findall(r"<h3>(mended|broken|still failing|solved by both)</h3>", text)
    assert "mended" in groups and text.count("base agent</h3>") == text.count("final agent</h3>") >= 2
    evals = sorted((finished / "eval").iterdir())
    solved = [{row["task_id"] for row in map(json.loads, path.read_text().splitlines()) if row["reward"]} for path in
              (evals[0], evals[-1])]
    part = text[text.index("<h3>mended</h3>"):].split("<h3>broken")[0].split("<h3>still")[0].split("<h3>solved by")[0]
    shown = set(re.findall(r"<b>(math-test-\d+)</b>", part))
    assert shown and shown <= solved[1] - solved[0]


def test_rebuilding_gives_the_same_page(finished, copied):
    code, output = call("report", copied)
    assert code == 0 and "report.html" in output
    assert (copied / "report.html").read_bytes() == (finished / "report.html").read_bytes()


def test_hostile_text_stays_text(copied):
    """A model, a tool, a verifier's words, a hypothesis, a harness file, a reason for a refusal, a task's name."""
    for path in [*copied.glob("eval/*.jsonl"), *copied.glob("rollouts/*.jsonl")]:
        lines = []
        for trace in map(json.loads, path.read_text().splitlines()):
            trace["task_id"] += HOSTILE
            for event in trace.get("events", []):
                event["result"] |= {"content": HOSTILE, "output": HOSTILE, "finish": HOSTILE}
                event["request"] |= {"code": HOSTILE}
                for message in event["request"].get("messages", []):
                    message["content"] = HOSTILE
            if "texts" in trace:
                trace |= {"texts": [[[HOSTILE, True], [HOSTILE, False]]], "why": HOSTILE, "end": HOSTILE, "failure": HOSTILE}
            lines.append(json.dumps(trace))
        path.write_text("\n".join(lines) + "\n")
    history = copied / "harness/cycle_01/history.jsonl"
    rows = [json.loads(line) | {"hypothesis": HOSTILE} for line in history.read_text().splitlines()]
    rows[-1] |= {"refused": HOSTILE}
    history.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copied / "harness/cycle_01/h1/harness.py").write_text(HOSTILE.replace("\ud800", "") * 3)
    (copied / "final_harness.py").write_text(HOSTILE.replace("\ud800", ""))
    before = Page((copied / "report.html").read_text())
    page = Page(report.write_report(copied).read_text())
    assert "script" not in page.tags and "img" not in page.tags and not [n for n, _ in page.attributes if n.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") > 20 and "{{ 7 * 7 }}" in page.text and "</details>" in page.text
    assert set(page.tags) <= set(before.tags)


def damage(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "no run":
            shutil.rmtree(folder)
            folder.mkdir()
        case "older format":
            del config["format"]
            (folder / "config.json").write_text(json.dumps(config))
        case "newer format":
            (folder / "config.json").write_text(json.dumps(config | {"format": {"version": 99}}))
        case "nothing finished":
            (folder / "state.json").unlink()
        case "half a state":
            text = (folder / "state.json").read_text()
            (folder / "state.json").write_text(text[:len(text) // 2])
        case "a state of another kind":
            (folder / "state.json").write_text("[1, 2]")
        case "metrics cut":
            (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-200])
        case "metrics scrambled":
            text = (folder / "metrics.jsonl").read_text()
            (folder / "metrics.jsonl").write_text("x" + text[1:])
        case "a metrics row of another kind":
            (folder / "metrics.jsonl").write_text(row := '{"kind": "eval"}\n')
            edit(folder / "state.json", metrics_bytes=len(row), metrics_sha256=sha256(row))
        case "no traces":
            sorted((folder / "eval").iterdir())[0].unlink()
        case "traces of another kind":
            sorted((folder / "eval").iterdir())[0].write_text('{"a": 1}\n')
        case "no history":
            (folder / "harness/cycle_01/history.jsonl").unlink()
        case "no final harness":
            (folder / "final_harness.py").unlink()
        case "no summary":
            (folder / "summary.json").unlink()


@pytest.mark.parametrize("what, words", [
    ("no run", "is no run directory"), ("older format", "another version"), ("newer format", "99"),
    ("nothing finished", "nothing is finished yet"), ("half a state", "state.json is damaged"),
    ("a state of another kind", "no JSON object"), ("metrics cut", "cut short"), ("metrics scrambled", "metrics.jsonl is damaged"),
    ("a metrics row of another kind", "not whole"), ("no traces", "is missing"), ("traces of another kind", "not whole"),
    ("no history", "history.jsonl is missing"), ("no final harness", "final_harness.py"), ("no summary", "summary.json is missing"),
])
def test_a_broken_directory_is_told_what_is_wrong(copied, what, words):
    damage(copied, what)
    code, output = call("report", copied)
    assert code == 2 and words in output and str(copied) in output and "Traceback" not in output, output


def test_rows_after_the_last_finished_step_do_not_count(finished, copied):
    """A run killed while it wrote: what is not finished is not shown, and not a fault."""
    with open(copied / "metrics.jsonl", "a") as file:
        file.write('{"kind": "weight_step", "rew')
    report.write_report(copied)
    assert (copied / "report.html").read_bytes() == (finished / "report.html").read_bytes()


def test_a_running_run_is_said_to_be_running(copied):
    edit(copied / "state.json", complete=False)
    with open(copied / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = call("report", copied)
    assert code == 0 and "still running" in output and "still running" in (copied / "report.html").read_text()
    assert '<meta http-equiv="refresh" content="30">' in (copied / "report.html").read_text()
    assert call("report", copied)[0] == 0
    assert "http-equiv" not in (copied / "report.html").read_text()
    assert "the same command goes on" in (copied / "report.html").read_text()


def test_a_run_of_weights_alone_has_a_page(tmp_path):
    """No harness phase, so no archive; and a report is there after the base evaluation already."""
    code, output = call("math", *SMALL, "--method", "weight", "--rollouts", "128", "--out", tmp_path, "--name", "w")
    assert code == 0, output
    page = Page((tmp_path / "w/report.html").read_text())
    assert "No harness phase so far" in page.text and "The final harness is h0" in page.text


def test_the_final_harness_of_a_search_that_began_late(copied):
    """Stagewise has its first archive after its weight phases; the final harness is compared with that one's h0."""
    (copied / "harness/cycle_01").rename(copied / "harness/cycle_03")
    page = Page(report.write_report(copied).read_text())
    assert "The final harness is h0" not in page.text and "cycle 03: " in page.text


def test_before_anything_is_accepted_the_best_is_the_best_so_far(copied):
    (copied / "harness/cycle_01/accepted.txt").unlink()
    page = Page(report.write_report(copied).read_text())
    assert page.text.count("best so far") == 1 and "a tie" not in page.text
    (copied / "harness/cycle_01/accepted.txt").write_text("h0\n")              # of an earlier phase of this archive
    edit(copied / "harness/cycle_01/acceptance.json", name="h0", n_candidates=1)
    page = Page(report.write_report(copied).read_text())
    assert page.text.count("best so far") == 1 and "accepted h0" not in page.text


def test_what_a_harness_says_in_the_models_name_is_shown():
    forged = {"role": "assistant", "content": "I never said this"}
    events = [{"request": {"type": "generate", "messages": [{"role": "user", "content": "q"}]},
               "result": {"content": "a", "finish": "stop"}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, forged]
    events.append({"request": {"type": "generate", "messages": messages}, "result": {"content": "b", "finish": "length"}})
    assert list(report.turns_of(events)) == [("user", "q", ""), ("model", "a", ""), ("assistant", "I never said this", ""),
                                             ("model", "b", "cut: length")]


def test_long_rollouts_are_cut_and_say_so(finished):
    trace = json.loads(next(iter((finished / "rollouts").iterdir())).read_text().splitlines()[0])
    trace["texts"] = [[["x" * 100_000, False], ["y" * 100_000, True]] * 40]
    trace["events"] *= 500
    view = report.view_of(trace)
    assert sum(len(text) for sequence in view["texts"] for text, _ in sequence) < 3 * report.MAX_VIEW_CHARS
    assert "more characters in the run's files" in view["texts"][0][-1][0]


def test_a_figure_has_its_numbers_and_no_colour_of_its_own_for_text():
    svg = Figures("y", [Series("a <b>", [0, 10], [0.1, 0.4], [0.0, 0.3], [0.2, 0.5])], [], [(0, 5, "weight"), (5, 10, "harness")]
                  ).svg("narrow")
    assert svg.startswith("<svg") and "currentColor" in svg and "a &lt;b&gt;" in svg and "weight phase" in svg
    assert svg == Figures("y", [Series("a <b>", [0, 10], [0.1, 0.4], [0.0, 0.3], [0.2, 0.5])], [],
                          [(0, 5, "weight"), (5, 10, "harness")]).svg("narrow")
    assert 'width="' not in svg.split(">")[0]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_real_browser_nothing_is_wider_than_the_screen(finished, copied, tmp_path, width):
    """Nor is a tree of harnesses, each made from the one before it."""
    history = copied / "harness/cycle_01/history.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    for i in range(20):
        shutil.copytree(copied / "harness/cycle_01/h1", copied / f"harness/cycle_01/x{i}")
        rows.append(rows[1] | {"name": f"x{i}", "parent": f"x{i - 1}" if i else "h1", "hypothesis": "w" * 300})
    history.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = report.write_report(copied).parent
    page = tmp_path / "page.html"
    probe = "<script>document.title = JSON.stringify([innerWidth, document.documentElement.scrollWidth, document.querySelectorAll('svg').length])</script>"
    frame = tmp_path / "frame.html"                     # a frame, as the browser's own window has a least width
    page.write_text((finished / "report.html").read_text() + probe)
    frame.write_text(f'<iframe id="f" src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe><script>'
                     'f.onload = () => document.title = f.contentDocument.title</script>')
    done = subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--disable-background-networking",
                           "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=3000",
                           "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=60)
    inner, scroll, n_svg = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert inner == width and scroll <= inner and n_svg == 3                # one of them in a fold
