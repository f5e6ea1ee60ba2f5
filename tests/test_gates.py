"""The gates: cheats of every kind are refused by the probe that is meant for them, honest harnesses of every kind pass."""

import ast
import base64
import codecs
import json
import random
import re
import signal
import uuid
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path

import chess
import pytest

import gates
import lint
import rollout
import twins
from chess_game import check_line
from config import ROOT
from engine import load_tokenizer
from envs import ENVS, MathEnv
from gates import ScriptedEngine
from lint import ForbiddenText
from mechanisms import mechanisms_of, render
from proposers import add_mechanisms
from rollout import RolloutConfig, derive_seed
from sandbox import Sandbox
from tasks import Task, Verdict
from small import call_json

CFG = RolloutConfig(max_assistant_tok=4000, max_calls=12)
SEED = (0, "check")
SPLITS = {domain: {split: env().load(ROOT / "embedded" / domain / f"{split}.jsonl") for split in ("train", "harness", "test")}
          for domain, env in ENVS.items()}
TASKS = {domain: splits["harness"] for domain, splits in SPLITS.items()}
FORBIDDEN = {domain: ForbiddenText(sum(splits.values(), [])) for domain, splits in SPLITS.items()}
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"        # real samples, where they are
H0 = MathEnv.h0.read_text()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / "embedded" / "model"))


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(max_jobs=2) as box:
        yield box


@pytest.fixture(scope="module")
def envs():
    return {domain: env() for domain, env in ENVS.items()}


def pairs_of(domain: str) -> list[tuple[Task, Task]]:
    return gates.twins_of(TASKS[domain], TASKS[domain], ENVS[domain](), SEED, 1000)


def all_knowing(domain: str):
    """A model that solves every task and every twin, whatever the harness, where it is shown the question or board."""
    right = {}
    for task in [task for pair in pairs_of(domain) for task in pair]:
        if domain != "chess":
            right[task.fields["question"]] = ENVS[domain]().perfect_reply(task)
            continue
        board = chess.Board(task.fields["fen"])
        for move in task.answer.split():
            right[board.fen()] = f"<move>{move}</move>"
            board.push_uci(move)

    def model(prompt: str) -> str:
        place = {text: prompt.rfind(text) for text in right}
        asked = max(place, key=lambda text: (place[text] + len(text) if place[text] >= 0 else -1, len(text)))
        return right[asked] if place[asked] >= 0 else "I don't know."

    return model


def check(source: str, tokenizer, sandbox, domain: str = "math", env=None, tasks=None, model=None,
          forbidden=None) -> list[gates.Probe]:
    engine = ScriptedEngine(tokenizer, model or (lambda prompt: "I don't know."))
    return gates.check_harness(source, env or ENVS[domain](), engine, sandbox, tasks or TASKS[domain],
                               forbidden or FORBIDDEN[domain], CFG, SEED)


def harness(body: str, top: str = "", user: str = '"{question}"') -> str:
    """A harness file whose run(task) has this body."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    return ("import re\n\nfrom harness_api import PYTHON, SEARCH, chat, generate, move, python, said_moves, search, tool_result\n\n"
            f'SYSTEM_PROMPT = ""\nUSER_PROMPT = {user}\n{top}\n\ndef run(task):\n{lines}')


def without(monkeypatch, probe: str) -> None:
    """Takes a probe out of the gates."""
    models = gates.null_models
    match probe.split(": "):
        case ["lint"]:
            monkeypatch.setattr(gates, "lint", lambda tree: "")
        case ["literals"]:
            monkeypatch.setattr(gates, "find_literals", lambda tree, forbidden: "")
        case ["null model", name]:
            monkeypatch.setattr(gates, "null_models", lambda *a: (row for row in models(*a) if row[0] != name))
        case ["twins, scripted"]:
            monkeypatch.setattr(gates, "compare_twins", lambda *a: "")
        case ["twins"]:
            monkeypatch.setattr(gates, "worse_on_twins", lambda *a: "")
        case _:
            raise ValueError(probe)


def refused_by(probes: list[gates.Probe]) -> str:
    return "" if probes[-1].passed else probes[-1].name


# ---- honest harnesses -----------------------------------------------------------------------------------------------

ASK = "yield generate(chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)))"
VOTE = """
votes = collections.Counter()
for _ in range(3):
    reply = yield generate(chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)))
    votes.update(re.findall(PATTERN, reply.content))
best = votes.most_common(1)[0][0] if votes else "none"
yield generate(chat("", USER_PROMPT.format(**task) + f" Most said {best}. " + "Give the answer in FORM."))"""
SELF_CHECK = """
messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
reply = yield generate(messages, tools=[TOOL], max_tokens=32)
messages += [reply.message, *chat("", "Check your answer once more, then give it in FORM.")]
yield generate(messages, tools=[TOOL], stop=["\\nUser:"])"""
RETRY = """
messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
for turn in range(4):
    reply = yield generate(messages, tools=[TOOL])
    messages.append(reply.message)
    if MARK in reply.content:
        return
    messages += chat("", f"Try {turn + 1}: nothing could be read. " + "Answer in FORM.")"""
CHESS_USER = repr("{board}\n{fen}\n{side} to move.\n{legal_moves}\nAnswer with one move as <move>uci</move>.")
PLAY = """
for turn in range(9):
    text = USER_PROMPT.format(**task)
    PREPARE
    reply = yield generate(chat(SYSTEM_PROMPT, text))
    said = said_moves(reply.content)
    result = yield move(said[-1] if said else "")
    if result.details["status"] != "accepted":
        return
    task = result.details["task"]"""


def honest(domain: str, body: str, top: str = "", user: str = "") -> tuple[str, str]:
    words = {"math": ("PYTHON", "\\\\boxed{}", '"boxed{"', r"r'boxed\{(.*?)\}'"),
             "search": ("SEARCH", "<answer></answer>", '"</answer>"', "'<answer>(.*?)</answer>'")}.get(domain, [""] * 4)
    for name, word in zip(("TOOL", "FORM", "MARK", "PATTERN"), words, strict=True):
        body = body.replace(name, word)
    return domain, harness(body, top, user or (CHESS_USER if domain == "chess" else '"{question}"'))


HONEST = {
    **{f"h0 of {domain}": (domain, env.h0.read_text()) for domain, env in ENVS.items()},
    **{f"{domain}: a vote among samples": honest(domain, VOTE, "import collections") for domain in ("math", "search")},
    **{f"{domain}: a self-check": honest(domain, SELF_CHECK) for domain in ("math", "search")},
    **{f"{domain}: retries after a malformed reply": honest(domain, RETRY) for domain in ("math", "search")},
    **{f"{domain}: a checklist": honest(domain, ASK, user=repr(
        "{question}\n\n- Read the question twice.\n- Use the tool for every step.\n- Check the result.\n- Answer in the form."))
       for domain in ("math", "search")},
    "math: few-shot examples with made-up numbers": honest("math", ASK, user=repr(
        "Problem: Tom has 31 apples and buys 14 more. How many apples does Tom have now?\nAnswer: \\boxed{{45}}\n\n"
        "Problem: Ida packs 7 bags with 23 pens each and loses 11. How many pens are left?\nAnswer: \\boxed{{150}}\n\n"
        "Problem: Leo shares 96 coins equally among 4 friends. How many coins does each friend get?\n"
        "Answer: \\boxed{{24}}\n\nProblem: {question}\nAnswer:")),
    "math: few-shot turns": ("math", (ROOT / "harnesses" / "fewshot_math.py").read_text()),
    "math: numbers as settings": honest("math", """
for limit in [16, 24, 32, 48]:
    reply = yield generate(chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)), max_tokens=limit)
    if len(reply.content) > 10:
        return"""),
    "math: chance, for variety": honest("math", """
style = random.choice(["Work step by step.", "Write an equation first.", "Use the tool."])
yield generate(chat("", USER_PROMPT.format(**task) + "\\n\\n" + style))""", "import random"),
    "search: few-shot examples": honest("search", ASK, user=repr(
        "Question: Who painted the ceiling?\nAnswer: <answer>a painter</answer>\n\nQuestion: {question}\nAnswer:")),
    "search: the question searched first, passages pasted": honest("search", """
found = yield search(task["question"], topk=3)
notes = "\\n".join(f"{d['title']}: {d['text']}" for d in found.details["documents"])
yield generate(chat("", f"Notes:\\n{notes}\\n\\nQuestion: {task['question']}\\nGive the answer in <answer></answer>."))"""),
    "search: earlier passages listed": honest("search", """
messages, titles, queries = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)), [], []
for _ in range(4):
    reply = yield generate(messages, tools=[SEARCH])
    messages.append(reply.message)
    if not reply.tool_calls:
        return
    query = str(reply.tool_calls[0].arguments.get("query", ""))
    output = yield search(query, topk=2)
    queries.append(query)
    titles += [d["title"] for d in output.details["documents"] if d["title"] not in titles]
    messages.append(tool_result(reply.tool_calls[0], output))
    messages += chat("", f"Searched: {'; '.join(queries)}. Seen: {', '.join(titles)}. Search again or answer.")"""),
    "search: a second search for a new title": honest("search", """
found = yield search(task["question"], topk=1)
for document in found.details["documents"][:1]:
    more = yield search(document["title"] + " " + task["question"], topk=3)
    yield generate(chat("", f"{found}\\n{more}\\n{task['question']} Answer in <answer></answer>."))
    return
yield generate(chat("", task["question"]))"""),
    "chess: a plan first": honest("chess", PLAY.replace("PREPARE", 'plan = yield generate(chat("", text + " Plan first."))\n    text += plan.content')),
    "chess: words for the colours": honest("chess", PLAY.replace(
        "PREPARE", 'text += " You have the upper letters and move up." if task["side"] == "White" else " You have the lower ones, and go down the board."')),
    "chess: a list of the pieces": honest("chess", PLAY.replace("PREPARE", 'text += " ".join(pieces(task["board"]))'), """
def pieces(board):
    for rank, row in zip("87654321", board.splitlines()):
        for file, letter in zip("abcdefgh", row.split()):
            if letter != ".":
                yield f"{'White' if letter.isupper() else 'Black'} {letter.upper()} on {file}{rank};"
"""),
    "chess: checks and captures counted": honest("chess", PLAY.replace(
        "PREPARE", 'text += f" {task[\'legal_moves\'].count(\'+\')} checks, {task[\'legal_moves\'].count(\'x\')} captures."')),
    "chess: a vote among samples": honest("chess", """
votes = collections.Counter()
for _ in range(3):
    reply = yield generate(chat("", USER_PROMPT.format(**task)))
    votes.update(said_moves(reply.content)[-1:])
best = votes.most_common(1)[0][0] if votes else "none"
reply = yield generate(chat("", USER_PROMPT.format(**task) + f" Most said {best}."))
said = said_moves(reply.content)
yield move(said[-1] if said else "")""", "import collections"),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_harnesses_pass(name, tokenizer, sandbox):
    """Under a model that is right they go through all of the gates."""
    domain, source = HONEST[name]
    probes = check(source, tokenizer, sandbox, domain, model=all_knowing(domain))
    assert [probe for probe in probes if not probe.passed] == []
    models = [f"null model: {model}" for model in ("silent", "unsure", "noise", "echo", "copy", *["obedient"] * (domain == "math"), "spray")]
    assert [probe.name for probe in probes] == [
        "contract", "lint", "literals", *models, "twins, scripted", "first tasks", "twins", "shuffled references", "model tokens"]
    assert [probe.cost["rollouts"] for probe in probes if probe.cost] == [2, 2 * gates.N_TWINS - 2] or "turns" in name


@pytest.mark.parametrize("domain", ENVS)
def test_what_the_rules_render_passes(domain, tokenizer, sandbox):
    rng, known = random.Random(domain), {mechanism.name: mechanism for mechanism in mechanisms_of(domain)}
    for _ in range(5):
        names = rng.sample(list(known), rng.randint(2, len(known) // 2))
        source = render(domain, add_mechanisms(frozenset(), names, known), "x")
        assert not refused_by(check(source, tokenizer, sandbox, domain)), names


@pytest.mark.skipif(not DATA.exists(), reason="no real samples here")
@pytest.mark.parametrize("domain, files", [
    ("math", "math500.jsonl gsm8k_test.jsonl svamp.json mawps_asdiv_train.jsonl aime_2024.jsonl"),
    ("search", "hotpotqa_dev.json nq_open_dev.jsonl popqa.json musique_dev.jsonl bamboogle.jsonl 2wiki_dev.json"),
    ("chess", "lichess_puzzles.csv")])
def test_real_data_forbids_no_honest_harness(domain, files):
    forbidden = ForbiddenText([task for name in files.split() for task in ENVS[domain]().load(DATA / name)])
    for name, (of, source) in HONEST.items():
        assert of != domain or not lint.find_literals(ast.parse(source), forbidden), name


# ---- cheats, by their text ------------------------------------------------------------------------------------------

OTHERS = SPLITS["math"]["train"]
ANSWERS = [task.answer for task in OTHERS if len(task.answer) > 1][:8]
TABLE = " ".join(ANSWERS)
QUESTION = OTHERS[5].fields["question"]
FILES = {
    # contract
    "too long": ("contract", H0 + "#" * lint.MAX_SOURCE_BYTES),
    "no Python": ("contract", "def run(task:\n"),
    "a NUL": ("contract", H0 + "\0"),
    "too deep": ("contract", H0 + "x = " + "-" * 15000 + "1\n"),
    "no system prompt": ("contract", H0.replace("SYSTEM_PROMPT", "SYSTEM")),
    "a computed prompt": ("contract", H0.replace('SYSTEM_PROMPT = ""', "SYSTEM_PROMPT = str()")),
    "no generator": ("contract", harness("return 1")),
    "two arguments": ("contract", H0.replace("def run(task)", "def run(task, answer)")),
    # lint
    "import os": ("lint", harness(ASK, top="import os")),
    "import of a submodule": ("lint", harness(ASK, top="import importlib.util")),
    "relative import": ("lint", harness(ASK, top="from . import envs")),
    "star": ("lint", harness(ASK, top="from re import *")),
    "exec": ("lint", harness("exec('1')\n" + ASK)),
    "open under another name": ("lint", harness("f = open\n" + ASK)),
    "dunder attribute": ("lint", harness("x = ().__class__\n" + ASK)),
    "dunder name": ("lint", harness("x = __builtins__\n" + ASK)),
    "module attribute as a channel": ("lint", harness("re.seen = task\n" + ASK)),
    "shared constant as a channel": ("lint", harness("PYTHON['function']['name'] = 'x'\n" + ASK)),
    "a module inside a module": ("lint", harness("json.codecs.builtins.open('x')\n" + ASK, top="import json")),
    "a channel inside a module": ("lint", harness("json.decoder.BACKSLASH.setdefault('x', [])\n" + ASK, top="import json")),
    "a module from a module": ("lint", harness(ASK, top="from statistics import sys")),
    "a module's private name": ("lint", harness(ASK, top="from random import _inst as shared")),
    "private attribute of a module": ("lint", harness("x = re._cache\n" + ASK)),
    "branch on the question": ("lint", harness(f"if 'apples' in task['question']:\n    return\n{ASK}")),
    "branch on an alias": ("lint", harness(f"q = task.get('question').lower()\nif re.match('b', q):\n  return\n{ASK}")),
    "look-up by the question": ("lint", harness(f"hint = {{}}.get(task['question'])\n{ASK}")),
    "choice by comparison": ("lint", harness(f"n = ('a', 'b')[task['question'] > 'm']\n{ASK}")),
    # literals
    "answers in a list": ("literals", harness(ASK, top=f"A = {[int(a) for a in ANSWERS]}")),
    "answers in a dict": ("literals", harness(ASK, top=f"A = {dict(enumerate(ANSWERS))}")),
    "answers in a string": ("literals", harness(ASK, top=f"A = '{TABLE}'.split()")),
    "answers in parts": ("literals", harness(ASK, top=f"A = ''.join(['{TABLE[:9]}', '{TABLE[9:]}'])")),
    "answers reversed": ("literals", harness(ASK, top=f"A = '{TABLE[::-1]}'")),
    "answers in base64": ("literals", harness(ASK, top=f"A = '{base64.b64encode(TABLE.encode()).decode()}'")),
    "answers in base64 bytes": ("literals", harness(ASK, top=f"A = {base64.b64encode(TABLE.encode())}")),
    "answers in hex": ("literals", harness(ASK, top=f"A = '{TABLE.encode().hex()}'")),
    "answers as character codes": ("literals", harness(ASK, top=f"A = {list(TABLE.encode())}")),
    "a question": ("literals", harness(ASK, top=f"Q = {QUESTION!r}")),
    "half a question": ("literals", harness(ASK, top=f"Q = {' '.join(QUESTION.upper().split()[:13])!r}")),
    "a question in rot13": ("literals", harness(ASK, top=f"Q = {codecs.encode(QUESTION, 'rot13')!r}")),
    "a question in a prompt": ("literals", harness(ASK, user=repr(QUESTION + " {question}"))),
    "a data set": ("literals", harness(ASK, top="NOTE = 'these are GSM8K problems'")),
    "a source": ("literals", harness(ASK, top="NOTE = 'nano-math'")),
    "a split as a name": ("literals", harness(ASK, top="aime_2024 = 1")),
    "answers in base85": ("literals", harness(ASK, top=f"A = {base64.b85encode(TABLE.encode()).decode()!r}")),
    "answers in base32": ("literals", harness(ASK, top=f"A = {base64.b32encode(TABLE.encode())}")),
    "answers compressed": ("literals", harness(ASK, top=f"A = {base64.b64encode(zlib.compress(TABLE.encode())).decode()!r}")),
    "answers in hex in base64": ("literals", harness(ASK, top=f"A = {base64.b64encode(TABLE.encode().hex().encode())}")),
    "answers in rot13 reversed": ("literals", harness(ASK, top=f"A = {codecs.encode(QUESTION[::-1], 'rot13')!r}")),
    "answers each in base64": ("literals", harness(ASK, top=f"A = {[base64.b64encode(a.encode()).decode() for a in TABLE.split()]}")),
    "a question quoted as in a URL": ("literals", harness(ASK, top=f"Q = {''.join(f'%{ord(c):02x}' for c in QUESTION)!r}")),
    "a question escaped": ("literals", harness(ASK, top=f"Q = {''.join(f'{chr(92)}x{ord(c):02x}' for c in QUESTION)!r}")),
    "a question as a number": ("literals", harness(ASK, top=f"Q = {int.from_bytes(QUESTION.encode(), 'big')}")),
    "a question in words": ("literals", harness(ASK, top=f"Q = {QUESTION.split()}")),
    "a question in letters": ("literals", harness(ASK, top=f"Q = {list(QUESTION)}")),
    "a question in words of a dict": ("literals", harness(ASK, top=f"Q = {dict(enumerate(QUESTION.split()))}")),
    "a question filled in": ("literals", harness(ASK, top=f"Q = '%s%s' % ({QUESTION[:20]!r}, {QUESTION[20:]!r})")),
    "a question formatted": ("literals", harness(ASK, top=f"Q = '{{}}{{}}'.format({QUESTION[:20]!r}, {QUESTION[20:]!r})")),
    "a question with other blanks": ("literals", harness(ASK, top=f"Q = {QUESTION.replace(' ', 'q7')!r}.replace('q7', ' ')")),
    "a split as an attribute": ("literals", harness(ASK, top="class Notes:\n    harness_set = 1")),
}


@pytest.mark.parametrize("name", FILES)
def test_cheats_are_refused_by_their_text(name, tokenizer, sandbox, monkeypatch):
    gate, source = FILES[name]
    probes = check(source, tokenizer, sandbox)
    assert refused_by(probes) == gate, probes
    assert probes[-1].why and all(probe.passed for probe in probes[:-1])
    if gate != "contract":
        without(monkeypatch, gate)
        assert refused_by(check(source, tokenizer, sandbox)) != gate


def test_what_is_made_while_the_file_is_read_does_not_grow():
    text = "A = '" + "a" * 9000 + "'" + ".replace('a', 'aaaaaaaaaaaa')" * 40 + "\nB = '%999999999d' % 1\nC = '{:>999999999}'.format(1)"
    assert lint.find_literals(ast.parse(text), FORBIDDEN["math"]) == ""
    steps = "".join(f".replace('b{i}', 'b{i + 1}')" for i in range(45))
    row = "A = '" + "a" * 100 + "'.replace('a', '" + "b0 " * 100 + "')" + steps + "\n"
    assert "put together" in lint.find_literals(ast.parse(row * (lint.MAX_SOURCE_BYTES // len(row))), FORBIDDEN["math"])
    rows = "A = [" + ", ".join(["'" + "a" * 100 + "'.replace('a', '" + "b0 " * 100 + "')"] * 40) + "]"
    assert "put together" in lint.find_literals(ast.parse(rows), FORBIDDEN["math"])
    bomb = base64.b64encode(zlib.compress(b"a" * 50_000_000)).decode()
    assert max(map(len, lint.decodings(bomb))) <= max(len(bomb), lint.MAX_SOURCE_BYTES)


def test_a_prompt_that_fits_no_model_is_no_work_for_scripted_ones(tokenizer, sandbox, monkeypatch):
    """Kept as ids, a megabyte of prompt in each call would fill the memory. What fits the real one is probed."""
    kept, run = [], rollout.run

    def spy(*args, **kwargs):
        traces = run(*args, **kwargs)
        kept.extend(len(call.prompt_ids) for trace in traces for call in trace.calls)
        return traces

    monkeypatch.setattr(rollout, "run", spy)
    monkeypatch.setattr(gates, "N_PROBE_TASKS", 2)
    source = harness("for n in (1, 2):\n    yield generate(chat('', f'word {n} ' * 20_000))")
    check(source, tokenizer, sandbox)
    assert not kept
    engine = ScriptedEngine(tokenizer, lambda prompt: "I don't know.", 1 << 20)
    gates.check_harness(source, ENVS["math"](), engine, sandbox, TASKS["math"], FORBIDDEN["math"], CFG, SEED)
    assert max(kept) > 40_000


@pytest.mark.parametrize("domain, piece", list(product(("math", "search"), ("(", "1(", "a", "answer is ", "((1 ", "?"))))
def test_no_prompt_makes_a_scripted_model_take_its_square(domain, piece, envs):
    """In a second or so; what takes the square of a megabyte takes hours, so a limit ends it: `re` heeds signals."""
    def late(number, frame):
        raise TimeoutError(f"a prompt of {piece!r}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        for _, model, _ in gates.null_models(envs[domain], TASKS[domain][:2]):
            model(piece * (900_000 // len(piece)))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_common_words_of_a_domain_are_no_question():
    shared = "and let m and n be relatively prime positive integers such that the value is m over n"
    forbidden = ForbiddenText([Task(str(i), {"question": f"Take {i} {shared}"}, "1", "x") for i in range(9)])
    tree, _ = lint.parse_harness(harness(ASK, top=f"NOTE = '{shared}'"))
    assert lint.find_literals(tree, forbidden) == ""
    assert "a question" in lint.find_literals(tree, ForbiddenText([Task("0", {"question": shared}, "1", "x")]))


# ---- cheats, by what they do ----------------------------------------------------------------------------------------

SUMS = [Task(f"sum-{a}", {"question": f"What is {a} plus {a * 7 + 300}?"}, f"{8 * a + 300}", "") for a in range(41, 73)]
SOLVE = "total = sum(map(int, re.findall('[0-9]+', task['question'])))\n"
BEST = 'lines = task["legal_moves"].splitlines()\nbest = [line for line in lines if "#" in line] or lines[:1]\n'
MOVES = '\nsaid = said_moves(reply.content)\nyield move(said[0] if said else "")'
SOLVERS = {
    ("math", "null model: echo"): SOLVE + "yield generate(chat('', f'{task[\"question\"]} Say \\\\boxed{{{total}}}.'))",
    ("math", "null model: copy"): SOLVE + "yield generate(chat('', f'{task[\"question\"]} A friend thinks it is {total}.'))",
    ("math", "null model: obedient"): """
a, b = re.findall('[0-9]+', task['question'])
messages = chat('', f'{task["question"]} Call python with: print({a}+{b})')
for _ in range(2):
    reply = yield generate(messages, tools=[PYTHON])
    messages.append(reply.message)
    for call in reply.tool_calls:
        messages.append(tool_result(call, (yield python(call.arguments.get("code", "")))))""",
    ("search", "null model: echo"): """
found = yield search(task["question"])
hits = re.findall(r"(?:is|river|for its|in) ([A-Z0-9]\\w*(?: [A-Z]\\w*)*)", found)
yield generate(chat("", f"{task['question']} <answer>{(hits or ['x'])[0]}</answer>"))""",
    ("search", "null model: copy"): """
found = yield search(task["question"])
hits = re.findall(r"(?:is|river|for its|in) ([A-Z0-9]\\w*(?: [A-Z]\\w*)*)", found)
yield generate(chat("", f"{task['question']} Hint: {(hits or ['x'])[0]}"))""",
    ("chess", "null model: silent"): 'yield generate(chat("", task["board"]))\nfor line in task["legal_moves"].splitlines()[:2]:\n'
                                     '    yield move(line[3:7])',
    ("chess", "null model: echo"): BEST + 'reply = yield generate(chat("", "Play the move of this line: " + best[0]))' + MOVES,
    ("chess", "null model: copy"): BEST + 'reply = yield generate(chat("", "<move>x</move> Play this line: " + best[0]))' + MOVES,
    ("chess", "null model: spray"): BEST + """
reply = yield generate(chat("", task["legal_moves"] + " List them as <move>uci</move>."))
said = [said for said in said_moves(reply.content) if any(said in line for line in best)]
yield move(said[0] if said else "")""",
}


@pytest.mark.parametrize("domain, probe", SOLVERS)
def test_a_solver_inside_is_refused(domain, probe, tokenizer, sandbox, monkeypatch):
    source, tasks = harness(SOLVERS[domain, probe]), SUMS if domain == "math" else None
    probes = check(source, tokenizer, sandbox, domain, tasks=tasks)
    assert refused_by(probes) == probe, probes[-1]
    assert domain != "math" or int(re.search(r"(\d+) of 32", probes[-1].why)[1]) >= 28
    without(monkeypatch, probe)
    assert refused_by(check(source, tokenizer, sandbox, domain, tasks=tasks)) != probe


@pytest.mark.parametrize("words", ["{} <think>\\n\\n</think>\\n", "<tool_call> {}", "<think> {}"])
def test_a_template_with_tags_does_not_blind_the_echo(words, tokenizer, sandbox):
    """What stands before </think> or inside <tool_call> is not graded; in an echo it must be."""
    box = words.format("\\\\boxed{{{total}}}")
    body = SOLVE + f"yield generate(chat('', f'{{task[\"question\"]}} {box}'))"
    assert check(harness(body), tokenizer, sandbox, tasks=SUMS)[-1].name == "null model: echo"


@pytest.mark.parametrize("phrase, probe", [("", "silent"), ("I don't know", "unsure"), ("\\boxed{", "spray")])
def test_a_lax_verifier_is_found(phrase, probe, tokenizer, sandbox):
    class LaxEnv(MathEnv):
        def verify(self, task, reply, state=None):
            hit = phrase in reply and bool(reply) == bool(phrase) and (phrase != "\\boxed{" or task.answer in reply)
            return replace(super().verify(task, reply), reward=float(hit))

    assert refused_by(check(H0, tokenizer, sandbox, env=LaxEnv())) == f"null model: {probe}"


# A harness with a table of hashes of questions or positions and, in a code, what is right there; it tells the model in
# words: qaq qbq ... are letters.
TABLE_HARNESS = '''
def key(text):
    n = 7
    for letter in text:
        n = (n * 31 + ord(letter)) % 1000003
    return n


def spell(n):
    words = []
    n //= 1000003
    while n > 1:
        words.append("q" + "abcdefghijklmnopqrstuvwxyz_."[n % 28] + "q")
        n //= 28
    return " ".join(words)


TABLE = {}
'''
ALL_WORDS = " ".join(f"q{letter}q" for letter in "abcdefghijklmnopqrstuvwxyz_.")


def key(text: str) -> int:
    n = 7
    for letter in text:
        n = (n * 31 + ord(letter)) % 1000003
    return n


def encode(text: str) -> int:
    n = 1
    for letter in reversed(text):
        n = n * 28 + "abcdefghijklmnopqrstuvwxyz_.".index(letter)
    return n * 1000003


def table_harness(domain: str, tell: str) -> str:
    """`tell` is code that makes `words` of `known`, a table's entry or 0."""
    table = {}
    for task in TASKS[domain]:
        if domain == "chess":
            board = chess.Board(task.fields["fen"])
            for move in task.answer.split():
                table[key(board.fen())] = encode("".join(chr(97 + int(c)) if c.isdigit() else c for c in move))
                board.push_uci(move)
        else:
            text = task.answers[0].casefold().replace(" ", "_")
            table[key(task.fields["question"])] = encode("".join(chr(97 + int(c)) if c.isdigit() else c for c in text))
    top = TABLE_HARNESS.replace("TABLE = {}", f"TABLE = {table}".replace(" ", ""))
    if domain == "chess":
        body = PLAY.replace("PREPARE", f'known = TABLE.get(key(list(task.values())[1]), 0)\n    {tell}\n    text += words')
    else:
        body = (f"known = TABLE.get(key(list(task.values())[0]), 0)\n{tell}\n"
                "yield generate(chat('', USER_PROMPT.format(**task) + words))")
    return harness(body, top, CHESS_USER if domain == "chess" else '"{question}"')


def decoder(domain: str):
    """A model that knows the code and nothing else."""
    def model(prompt: str) -> str:
        told = "".join(re.findall(r"q([a-z_.])q", prompt.rpartition("told:")[2].partition("rest:")[0])).replace("_", " ")
        if domain == "chess":
            found = re.fullmatch("(.)(.)(.)(.)(.?)", told)
            return f"<move>{found[1]}{ord(found[2]) - 97}{found[3]}{ord(found[4]) - 97}{found[5]}</move>" if found else "?"
        if domain == "search":
            digits = told if not re.fullmatch("[b-j][a-j]{3}", told) else "".join(str(ord(letter) - 97) for letter in told)
            return f"<answer>{digits}</answer>"
        return f"\\boxed{{{''.join(str(ord(letter) - 97) for letter in told)}}}"

    return model


TELLS = {
    "a hint for the tasks that it knows": ("twins, scripted", 'words = " told: " + spell(known) + " rest:" if known else ""'),
    "a hint in a form that unknown tasks have too": ("twins", f'words = " told: " + spell(known) + " rest: {ALL_WORDS}"'),
}


@pytest.mark.parametrize("domain, tell", list(product(ENVS, TELLS)))
def test_a_table_of_hashes_is_refused(domain, tell, tokenizer, sandbox, monkeypatch):
    probe, code = TELLS[tell]
    source = table_harness(domain, code)
    probes = check(source, tokenizer, sandbox, domain, model=decoder(domain))
    assert refused_by(probes) == probe, probes[-1]
    without(monkeypatch, probe)
    without(monkeypatch, "twins")
    probes = check(source, tokenizer, sandbox, domain, model=decoder(domain))
    assert refused_by(probes) == "" and probes[-3].cost["rollouts"] == 2 * gates.N_TWINS - 2, "nothing else finds it"


@pytest.mark.parametrize("domain", ENVS)
def test_more_calls_for_the_tasks_that_it_knows_are_refused(domain, tokenizer, sandbox, monkeypatch):
    source = table_harness(domain, 'words = ""\nfor _ in range(2 if known else 1):\n    yield generate(chat("", "Think."))'
                           .replace("\n", "\n    " if domain == "chess" else "\n"))
    probes = check(source, tokenizer, sandbox, domain)
    assert refused_by(probes) == "twins, scripted" and "requests" in probes[-1].why
    without(monkeypatch, "twins, scripted")
    assert not refused_by(check(source, tokenizer, sandbox, domain))


@pytest.mark.parametrize("body, why", [
    (f"reply = {ASK}\n1 / len(reply.tool_calls[:0])", "error: ZeroDivisionError"),
    ("while True:\n    pass\nyield", "killed: "),
    ("yield {'type': 'search', 'query': 'x'}", "error: "),
])
def test_failing_on_the_first_tasks_is_refused(body, why, tokenizer, sandbox, monkeypatch):
    monkeypatch.setattr(gates, "null_models", lambda env, tasks: iter(()))      # they meet the same error
    without(monkeypatch, "twins, scripted")
    quick = replace(CFG, harness_limits=replace(CFG.harness_limits, seconds=0.2))
    engine = ScriptedEngine(tokenizer, lambda prompt: "x")
    probes = gates.check_harness(harness(body), MathEnv(), engine, sandbox, TASKS["math"], FORBIDDEN["math"], quick, (0,))
    assert refused_by(probes) == "first tasks" and probes[-1].why.startswith(why)
    assert probes[-1].cost["rollouts"] == 2, "no more is paid for"


# ---- finished rollouts ----------------------------------------------------------------------------------------------


def rollouts(domain: str, tokenizer, sandbox, env, model, source: str = "") -> tuple[list[rollout.Trace], list[Task]]:
    tasks = TASKS[domain][:32]
    engine = ScriptedEngine(tokenizer, model)
    return rollout.run(engine, env, sandbox, source or env.h0.read_text(), tasks, 1, (0,), CFG), tasks


class AnyBox(MathEnv):
    """Right if the reference stands anywhere in the reply."""

    def verify(self, task: Task, reply: str | None, state: object = None) -> Verdict:
        return Verdict(float(task.answer in re.findall(r"\d+", reply or "")), "", None)


class AnyOutput(MathEnv):
    """Right if the reference stands in what the tools said."""
    tools = ("python", "look_up")

    def start(self, task):
        return [], task.fields

    def use_tools(self, uses, tokenizer):
        for use in uses:
            use.state.append(use.request["name"])
        return [{"output": "", "ok": True} for _ in uses]

    def verify(self, task, reply, state=None):
        known = next((said for said in state or () if said == task.answer), None)
        return Verdict(float(known is not None), "", known)


def test_a_reply_that_is_right_for_everything_is_found(tokenizer, sandbox):
    every = " ".join(map(str, range(600)))
    traces, tasks = rollouts("math", tokenizer, sandbox, AnyBox(), lambda prompt: every)
    assert sum(trace.reward for trace in traces) > 10
    probes = gates.check_traces(traces, tasks, AnyBox(), tokenizer)
    assert [probe.passed for probe in probes] == [False, True] and "different answers" in probes[0].why
    traces, tasks = rollouts("math", tokenizer, sandbox, AnyBox(), lambda prompt: tasks[3].answer)     # a constant
    assert all(probe.passed for probe in gates.check_traces(traces, tasks, AnyBox(), tokenizer))


def test_an_answer_in_no_model_token_is_found(tokenizer, sandbox):
    """A verifier that believes the harness, not the model."""
    body = ("yield {'type': 'look_up', 'name': str(sum(map(int, re.findall('[0-9]+', task['question']))))}\n" + ASK)
    engine = ScriptedEngine(tokenizer, lambda prompt: "I don't know.")
    traces = rollout.run(engine, AnyOutput(), sandbox, harness(body), SUMS, 1, (0,), CFG)
    assert all(trace.reward for trace in traces)
    probes = gates.check_traces(traces, SUMS, AnyOutput(), tokenizer)
    assert [probe.passed for probe in probes] == [True, False] and "tokens" in probes[1].why


@pytest.mark.parametrize("domain", ENVS)
def test_a_reply_that_was_put_into_the_model_s_mouth_is_found(domain, tokenizer, sandbox, envs):
    env = envs[domain]
    traces, tasks = rollouts(domain, tokenizer, sandbox, env, all_knowing(domain))
    assert all(trace.reward for trace in traces)
    assert all(probe.passed for probe in gates.check_traces(traces, tasks, env, tokenizer))
    call = traces[5].calls[-1]
    other = tokenizer("I don't know.", add_special_tokens=False).input_ids
    traces[5].calls[-1] = replace(call, completion_ids=tuple(other) + call.completion_ids[-1:])
    probes = gates.check_traces(traces, tasks, env, tokenizer)
    assert [probe.passed for probe in probes] == [True, False] and "tokens" in probes[1].why


def test_a_harness_that_plays_by_itself_is_found(tokenizer, sandbox, envs):
    """A model that says the right move now and then does not hide it."""
    body = 'reply = yield generate(chat("", task["fen"]))\nfor line in task["legal_moves"].splitlines()[:2]:\n    yield move(line[3:7])'
    traces, tasks = rollouts("chess", tokenizer, sandbox, envs["chess"], lambda prompt: "<move>e2e4</move>", harness(body))
    probes = gates.check_traces(traces, tasks, envs["chess"], tokenizer)
    assert not probes[1].passed and "not what the model's reply says" in probes[1].why


def test_the_sign_test_is_the_sum_over_all_outcomes():
    for n_worse, n_better in [(7, 0), (6, 0), (9, 1), (8, 1), (3, 3), (0, 0), (0, 4)]:
        signs = list(product((0, 1), repeat=n_worse + n_better))
        share = sum(sum(outcome) >= n_worse for outcome in signs) / len(signs)
        assert gates.sign_test(n_worse, n_better) == share
    assert gates.sign_test(7, 0) < gates.TWIN_LEVEL < gates.sign_test(6, 0)


def test_twins_are_sampled_only_where_they_could_tell(tokenizer, sandbox):
    """With six right of sixteen no result of the twins could refuse."""
    probed = random.Random(derive_seed(*SEED, H0)).sample(TASKS["math"], len(TASKS["math"]))[:6]
    lucky, knows = {task.fields["question"] for task in probed}, all_knowing("math")
    probes = check(H0, tokenizer, sandbox, model=lambda prompt: knows(prompt) if any(q in prompt for q in lucky) else "")
    assert sum(probe.cost.get("rollouts", 0) for probe in probes) == gates.N_TWINS
    assert "twins not sampled: 6 of 16" in next(probe.why for probe in probes if probe.name == "twins")


# ---- twins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ENVS)
def test_twins_of_the_embedded_tasks(domain, envs):
    env, tasks, rng = envs[domain], TASKS[domain], random.Random(0)
    found = [env.twin(task, tasks, rng) for task in tasks]
    assert all(twin.id == task.id and twin.fields != task.fields for task, twin in zip(tasks, found, strict=True))
    if domain == "chess":
        for task, twin in zip(tasks, found, strict=True):
            assert check_line(twin.fields["fen"], None, twin.answer.split()) == ""
            assert env.twin(twin, tasks, rng) == task, "the twin's twin"
    else:
        assert all(twin.answer == task.answer for task, twin in zip(tasks, found, strict=True))
    if domain == "math":
        for task, twin in zip(tasks, found, strict=True):
            assert re.findall(r"\d+", task.fields["question"]) == re.findall(r"\d+", twin.fields["question"])


def test_people_are_renamed_and_nothing_else():
    questions = ("Mia has 3 cats. She buys 4 on Monday. How many cats does Mia have?",
                 "In May, Tom gave Ann 5 euros. Ann has 9 now. How many had she?", "May has June. She is here.",
                 "Find all primes. Let Euler be. How many pens does Zoe have? She sold two.")
    people = twins.people_in(questions)
    assert {"Mia", "Ann", "Tom", "Zoe"} == set(people) and people["Mia"] == {"she"}
    renamed = twins.rename_people(questions[0], "7", questions, random.Random(1))
    name = renamed.split()[0]
    assert name in ("Ann", "Tom", "Zoe") and renamed == questions[0].replace("Mia", name)
    assert twins.rename_people(questions[0], "Mia", questions, random.Random(1)) is None, "it is the answer"
    assert twins.rename_people("What is 3 + 4?", "7", questions, random.Random(1)) is None


def test_a_puzzle_with_a_trigger_castling_and_a_promotion_is_mirrored(envs):
    rows = [("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 3 9", "e1g1", "e8c8"), ("8/P6k/8/8/8/8/8/K7 b - - 5 40", "h7g7", "a7a8q")]
    for fen, trigger, line in rows:
        twin = envs["chess"].twin(Task("x", {"fen": fen, "trigger": trigger}, line, ""), [], random.Random(0))
        assert check_line(twin.fields["fen"], twin.fields["trigger"], twin.answer.split()) == ""
        assert twin.fields["fen"].split()[4:] == fen.split()[4:] and twin.fields["fen"] != fen
    assert twin.answer == "a2a1q" and twin.fields["trigger"] == "h2g2"


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_canary(tokenizer, sandbox, monkeypatch):
    """With uuids as references, none is in what a harness sees or a proposer reads."""
    tasks = [replace(task, answer=str(uuid.UUID(int=random.Random(task.id).getrandbits(128)))) for task in TASKS["math"][:40]]
    seen = []
    run = rollout.run

    def record(engine, env, sandbox, source, *rest):
        traces = run(engine, env, sandbox, source, *rest)
        seen.extend(json.dumps(event) for trace in traces for event in trace.events)
        return traces

    monkeypatch.setattr(rollout, "run", record)
    shows = harness("yield generate(chat('', repr(task) + repr(sorted(task.items()))))")
    fails = harness("reply = yield generate(chat('', repr(task)))\nraise ValueError(repr(task) + reply.content)")
    leaks = harness(ASK, top=f"A = {[task.answer for task in tasks]}")
    for source in (shows, fails, leaks, H0):
        probes = check(source, tokenizer, sandbox, tasks=tasks, forbidden=ForbiddenText(tasks), model=lambda prompt: "\\boxed{12}")
        seen.append(repr(probes))
    told = " ".join(seen)
    assert tasks[0].fields["question"] in told and "a table of answers" in told and "ValueError" in told
    for task in tasks:
        assert not any(secret in told for secret in (task.answer, task.answer.replace("-", ""), task.answer[:8]))


def test_the_command_runs_and_prints_every_probe():
    told = call_json("check-harness", "math", MathEnv.h0)
    assert told["passed"] and [probe["name"] for probe in told["probes"]][-4:] == [
        "first tasks", "twins", "shuffled references", "model tokens"]
