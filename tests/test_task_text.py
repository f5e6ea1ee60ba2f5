"""task.md: what a proposer is told agrees with what the code does, and gives nothing away."""

import ast
import inspect
import json
import re
import subprocess
import uuid
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import chess_game
import envs
import gates
import lint
import harness_api
import rollout
import task_text as module
from config import DOMAIN_PRESETS, PRESETS, Config, rollout_config
from envs import ENVS, ROOT
from math_answer import last_box, same_answer
from search_answer import last_answer
from search_answer import same_answer as same_fact
from task_text import N_FINDINGS, Finding, task_text

TASKS = {domain: ENVS[domain]().load(ROOT / "embedded" / domain / "harness.jsonl")[:64] for domain in ENVS}
EARLIER = [Finding(1, "h1", 0.25, (0.2, 0.3), 0.3, "of 64 rollouts of h0, 9 fail by wrong_answer; with x at most 4", False),
           Finding(1, "h2", 0.5, (0.4, 0.6), 0.3, "of 64 rollouts of h0, 20 fail by call_limit; with y at most 9", True)]
PATHS = {"harness_api.py", "harness.py", "proposal.json", "score.json", "refused.json", "traces.jsonl", "archive.md",
         "history.jsonl", "report.md", "h4.py", "h5.py", "h6.py", "archive/", "archive/cycle_02/", "archive/cycle_*",
         "h0/", "h1/", "reports/"}


class OwnEnv(envs.MathEnv):
    """Riddles; the answer in a box.

    One guess each."""
    name = "riddles"
    tools = ("python", "look_up")


def cfg_of(domain: str, preset: str) -> Config:
    return Config(**{"domain": domain, **PRESETS[preset], "preset": preset, **DOMAIN_PRESETS.get((preset, domain), {})})


def text_of(domain: str, preset: str = "paper", **changes) -> str:
    cfg = cfg_of(domain, preset)
    arguments = {"env": ENVS[domain](), "tasks": TASKS[domain], "cfg": rollout_config(cfg), "n_candidates": 3,
                 "slots": ("h4", "h5", "h6"), "max_len": cfg.max_len} | changes
    return task_text(**arguments)


def section(text: str, title: str) -> str:
    return re.search(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("domain, preset, prompts_only, earlier",
                         list(product(ENVS, ["tiny", "paper"], [False, True], [(), EARLIER])))
def test_it_says_what_the_settings_are(domain, preset, prompts_only, earlier):
    text, cfg = text_of(domain, preset, prompts_only=prompts_only, earlier=earlier), cfg_of(domain, preset)
    budgets = flat(section(text, "Budgets"))
    wanted = [f"{cfg.max_calls} model calls", f"{cfg.max_assistant_tok} sampled tokens",
              f"{rollout.MAX_TOOL_CALLS} tool requests", f"context of {cfg.max_len} tokens",
              f"{cfg.harness_s:g} s and {cfg.harness_mb} MB between two requests", "20,000 bytes of source",
              "temperature 1, top-k 20, top-p 1."]
    wanted += [f"{cfg.tool_s:g} s, {cfg.tool_mb} MB, 4096 characters"] * (domain == "math")
    wanted += [f"{harness_api.MAX_TOPK} passages of {harness_api.MAX_PASSAGE_TOK} tokens"] * (domain == "search")
    assert [words for words in wanted if words not in budgets] == []
    numbers = re.findall(r"\d[\d,]*", budgets)
    assert len(numbers) == sum(len(re.findall(r"\d[\d,]*", words)) for words in wanted)     # and no other number
    opening = flat(text.split("## ")[0])
    assert "Write 3 new harness files" in opening and "on each of 64 tasks" in opening and "up to 0.062" in opening
    assert ("restricted" in opening) == prompts_only and ("**Control flow**" in text) != prompts_only
    assert ("may differ from h0 in the text of SYSTEM_PROMPT and USER_PROMPT only" in opening) == prompts_only
    assert ("## What earlier cycles found" in text) == bool(earlier)
    assert harness_api.__doc__.strip() in text
    assert 120 < len(text.splitlines()) <= 192 and "\n\n\n" not in text
    assert not re.search(r"\{\{|\{%|\{#|None|<task_text|<envs", text)


@pytest.mark.parametrize("domain, prompts_only", list(product(ENVS, [False, True])))
def test_it_gives_nothing_away(domain, prompts_only):
    """Nothing of a reference, of a question, or of where the tasks are from."""
    texts = set()
    for _ in range(2):
        tasks = [replace(task, answer=str(uuid.uuid4())) for task in TASKS[domain]]
        texts.add(text_of(domain, tasks=tasks, prompts_only=prompts_only, earlier=EARLIER))
        assert not any(task.answer in text for task in tasks for text in texts)
    text, = texts                                                   # whatever the references are
    assert not lint.DATA_NAMES.search(text)
    assert not any(task.source in text or task.id in text for task in TASKS[domain])
    assert not any(value in text for task in TASKS[domain] for value in task.fields.values() if len(value) > 3)


@pytest.mark.parametrize("domain, slots", list(product([*ENVS, "riddles"], [("h4", "h5", "h6"), ()])))
def test_every_path_is_one_that_is_there(domain, slots):
    text = text_of("math", env=OwnEnv(), slots=slots) if domain == "riddles" else text_of(domain, slots=slots)
    paths = re.findall(r"(?<![\w$/.])[\w/]*\w\.(?:py|md|jsonl?|txt|toml)\b", text)
    paths += re.findall(r"(?<![\w$/])\w[\w/*]*/(?:cycle_\*)?(?=[`)\s])", text)
    assert {"traces.jsonl", "archive/", "proposal.json"} < set(paths) <= PATHS
    assert set(re.findall(r"\$C\S*", text)) == {"$C/archive.md", "$C/h0/traces.jsonl", "$C/h1/traces.jsonl"}


def words_of_code(domain: str) -> set[str]:
    """Every word that Trace.failure can give for a rollout that counts."""
    failure = ast.parse(inspect.cleandoc(inspect.getsource(rollout.Trace.failure.fget)))
    values = [node.value for node in ast.walk(failure) if isinstance(node, ast.Return)]
    values += [branch for value in values if isinstance(value, ast.IfExp) for branch in (value.body, value.orelse)]
    returned = {value.value for value in values if isinstance(value, ast.Constant)}
    assert "solved" in returned and len(returned) == 9
    always = {"error", "killed", "solved", "token_limit"}           # of Trace.status, and before the verifier's word
    if domain == "chess":                                           # whose verdicts all have a word
        return always | {kind for kind, _ in chess_game._FAILURES.values()}
    kinds = re.findall(r'"(\w+)" if missing else ""', inspect.getsource(envs.SearchEnv.verify))
    assert len(kinds) == 1
    return always | returned | set(kinds if domain == "search" else [])


@pytest.mark.parametrize("domain", [*ENVS, "riddles"])
def test_every_word_of_failure_is_explained(domain):
    text = text_of("math", env=OwnEnv()) if domain == "riddles" else text_of(domain)
    header, *rows = re.findall(r"^\| `(\w+)` \| .+ \|$", text, re.MULTILINE)
    assert header == "failure"
    assert len(rows) == len(set(rows)) and set(rows) == words_of_code(domain)
    named = re.findall(r"`(\w+_\w+)`", section(text, "Axes") + section(text, "Where"))
    assert set(named) - set(rows) <= {"n_ok", "n_error", "n_killed", "n_calls", "n_tok", "max_tokens", "said_moves"}


@pytest.mark.parametrize("domain", [*ENVS, "riddles"])
def test_every_gate_is_named(domain):
    forbidden = section(text_of("math", env=OwnEnv()) if domain == "riddles" else text_of(domain), "Forbidden")
    names = set()
    for node in ast.walk(ast.parse((ROOT / "gates.py").read_text())):
        match node:                                                 # passes("lint", ...) and passes(f"null model: ...")
            case ast.Call(func=ast.Name(id="passes" | "Probe"), args=[ast.Constant(value=str(name)), *_]):
                names.add(name)
            case ast.Call(func=ast.Name(id="passes" | "Probe"), args=[ast.JoinedStr(values=[ast.Constant(value=name), *_]), *_]):
                names.add(name.split(":")[0])
    models = [node.value.elts[0].value for node in ast.walk(ast.parse(inspect.getsource(gates.null_models)))
              if isinstance(node, ast.Yield)]
    assert {"contract", "lint", "literals", "null model", "first tasks"} <= names and len(set(models)) >= 6
    for name in [*names, *models, "shuffled references", "twins", "model tokens"]:
        assert name in forbidden


@pytest.mark.parametrize("prompts_only", [False, True])
def test_a_domain_without_a_template_gets_the_shared_one(prompts_only):
    text = text_of("math", env=OwnEnv(), prompts_only=prompts_only, slots=(), max_len=0, earlier=EARLIER)
    graded = section(text, "What is graded")
    assert "Riddles; the answer in a box.\n\nOne guess each." in graded and "python, look_up" in graded
    assert "Here `task` holds: question." in text and "the model's context." in text and "`h4.py` and so on: 3 files" in text
    assert "\\boxed" not in text and "<move>" not in text and "<answer>" not in text
    assert "\n\n\n" not in text

    class Mute(OwnEnv):
        pass

    assert "`why` in its trace" in section(text_of("math", env=Mute()), "What is graded")


def test_what_it_says_of_boxes_is_so():
    text = flat(section(text_of("math"), "What is graded"))
    claims = {"42 = 42.0 = 84/2": [("42", "42.0", True), ("42", "84/2", True)], "1,000 = 1000": [("1000", "1,000", True)],
              "0.333 is not 1/3": [("1/3", "0.333", False)],
              r"40+2 and 6\cdot 7 are not 42": [("42", "40+2", False), ("42", r"6\cdot 7", False)],
              "(x-1)(x+1) is not x^2-1": [("x^2-1", "(x-1)(x+1)", False)], "`x = 42` is 42": [("42", "x = 42", True)],
              r"\sqrt{12} is not 2\sqrt{3}": [(r"2\sqrt{3}", r"\sqrt{12}", False)],
              '"7 or 8" for 7': [("7", "7 or 8", False)], "`a = b = c`": [("42", "x = 40+2 = 42", False)],
              "on one side only is passed over": [("42", "42 cm", True), (r"50\%", "50", True)],
              "on both it must agree": [("42 kg", "42 cm", False)], "Lists and sets match in any order": [("1, 2", "2, 1", True)]}
    for words, cases in claims.items():
        assert words in text
        for reference, answer, is_same in cases:
            assert same_answer(reference, answer) == is_same, (reference, answer)
    env, task = ENVS["math"](), replace(TASKS["math"][0], answer="7")
    for reply, reward in ((r"\boxed{8} \boxed{7}", 1), (r"\boxed{7} \boxed{", 0), (r"\boxed{7} \boxed{}", 0), ("The answer is 7", 0),
                          (r"<think>\boxed{7}", 0), (r"<tool_call>\boxed{7}</tool_call>", 0), (r"\boxed{" + "7" * 2001 + "}", 0)):
        assert env.verify(task, reply).reward == reward, reply
    assert last_box(r"\boxed{7") is None


def test_what_it_says_of_answer_tags_is_so():
    text = section(text_of("search"), "What is graded")
    assert '"in Paris, France" is not "Paris"' in text and "more than 500 characters" in flat(text) and "judge" not in text
    assert not same_fact(["Paris"], "in Paris, France") and same_fact(["Paris"], "the PARIS.") and same_fact(["1" * 500], "1" * 500) and not same_fact(["1" * 501], "1" * 501)
    assert last_answer("<answer>1</answer> <answer>2<answer>3</answer>") == "3" and last_answer("<answer>1") is None
    env = ENVS["search"]()
    env.judge = object()
    assert "a judge" in section(text_of("search", env=env), "What is graded")


def test_what_earlier_cycles_found_is_told_in_order():
    """What was kept first, then those that moved the score most, from the best gain to the worst loss; each one line."""
    long = "of 64 rollouts of h0 {{ 7 * 7 }}\n" + "very " * 100
    many = [Finding(2, f"h{i}", 0.5 + gain, (0.4, 0.6), 0.5, long, False) for i, gain in enumerate(
        (0.01, -0.2, 0.3, 0.02, -0.01, 0.04, -0.03, 0.1))]
    found = section(text_of("math", earlier=[*many, *EARLIER]), "What earlier cycles found")
    rows = [line for line in found.splitlines() if line.startswith("- ")]
    assert rows[0] == ("- cycle 1, h2, kept: 0.500 [0.400, 0.600], +0.200: of 64 rollouts of h0, 20 fail by call_limit; with y at most 9")
    assert [re.match(r"- cycle (\d), (h\d)", row).groups() for row in rows] == [
        ("1", "h2"), ("1", "h1"), ("2", "h2"), ("2", "h7"), ("2", "h5"), ("2", "h6"), ("2", "h1")]
    assert len(rows) == len(EARLIER) + N_FINDINGS
    assert all(len(row) < 360 and row.endswith("...") and "{{ 7 * 7 }}" in row for row in rows[2:])
    assert "-0.200" in rows[-1]


def test_the_number_of_slots_is_the_number_of_candidates():
    with pytest.raises(ValueError, match="2 slots for 3"):
        text_of("math", slots=("h4", "h5"))


@pytest.mark.parametrize("domain", ["math", "chess"])
def test_the_commands_that_it_shows_work(domain, tmp_path):
    """On an archive as a search writes it, with two cycles: they read the running one."""
    word = "wrong_move" if domain == "chess" else "wrong_answer"
    for cycle in ("cycle_01", "cycle_02"):
        for name, rewards in (("h0", (0, 0, 0, 1)), ("h1", (1, 0, 0, 1))):
            traces = []
            for i, reward in enumerate(rewards):
                trace = rollout.Trace(f"t{i}", 0, "sha", 1, end="the harness returned", reward=reward, answered=True,
                                      why=f"{cycle} {name}", kind="" if reward else word)
                trace.calls.append(rollout.Call((1,), (2,), "stop"))
                trace.events.append({"request": harness_api.generate(harness_api.chat("", "a \"failure\": \"spoof\" question")),
                                     "result": {"content": "a reply", "tool_calls": [], "finish": "stop"}})
                traces.append(json.dumps(trace.to_json()) + "\n")
            folder = tmp_path / "archive" / cycle / name
            folder.mkdir(parents=True)
            (folder / "traces.jsonl").write_text("".join(traces))
        (tmp_path / "archive" / cycle / "archive.md").write_text(f"table of {cycle}\n")
    commands = re.search(r"```sh\n(.*?)```", text_of(domain), re.DOTALL)[1]
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "table of cycle_02" and f'3 "failure": "{word}"' in lines and '1 "failure": "solved"' in lines
    assert "spoof" not in "".join(line for line in lines if line.startswith(tuple("123")))
    assert lines.count("===== cycle_02 h0 | the harness returned | 1 tokens") == 3 and any("a reply" in line for line in lines)
    assert lines[-1] == f"1 {word} -> solved" and not any("cycle_01" in line for line in lines)


def test_templates_are_those_of_domains():
    """A template that no domain would get, for a slip in its name."""
    names = {path.name for path in Path(module.PROMPTS).iterdir()}
    assert names == {"task.md.jinja", *(f"task_{domain}.md.jinja" for domain in ENVS)}
