"""The embedded worlds: that what is shipped is what nano.py writes, and that nano.py still runs, at a small size."""

import json
import random

import pytest

import nano
import nano_chess
import nano_worlds
from engine import SamplingParams, load_tokenizer
from transformers_engine import TransformersEngine
from envs import ENVS, SearchEnv
from mechanisms import mechanisms_of, render
from tasks import ToolUse
from config import ROOT


def test_the_shipped_data_is_what_nano_writes(tmp_path, monkeypatch):
    """All of math and search; of chess the first puzzles (the rest would take minutes)."""
    monkeypatch.setattr(nano, "MIX", {"math": 1, "search": 1})
    nano.write_data(tmp_path)
    names = [f"math/{split}" for split in nano.SPLITS] + [f"search/{split}" for split in (*nano.SPLITS, "corpus")]
    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (ROOT / "embedded" / f"{name}.jsonl").read_bytes(), name
    for split in ("train", "test"):
        shipped = [json.loads(line) for line in (ROOT / "embedded" / "chess" / f"{split}.jsonl").read_text().splitlines()]
        found = {(puzzle.fen, " ".join(puzzle.line)) for puzzle in nano_chess.find_puzzles(f"chess {split} 0")}
        assert len(found & {(row["fen"], row["answer"]) for row in shipped[:nano_chess.CHUNK]}) > nano_chess.CHUNK - 3


def test_nano_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(nano, "SPLITS", {"train": 6, "harness": 3, "test": 3})
    monkeypatch.setattr(nano, "MIX", {"math": 4, "search": 4, "chess": 4})
    monkeypatch.setattr(nano, "N_PRACTICE_PUZZLES", 4)
    monkeypatch.setattr(nano_chess, "CHUNK", 4)
    monkeypatch.setattr("sys.argv", ["nano.py", "--out", str(tmp_path), "--steps", "2"])
    nano.main()
    for domain, env in ENVS.items():
        assert len(env().load(tmp_path / domain / "train.jsonl")) == 6
    engine = TransformersEngine(str(tmp_path / "model"), n_rows=2, max_len=64)
    engine.submit("a", list(engine.tokenizer("Hello", add_special_tokens=False).input_ids), SamplingParams(max_tokens=4, seed=0))
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("domain", ["math", "search"])
def test_demonstrations_speak_the_language_of_the_rules(domain):
    """The prompts that the rules proposer writes are made of phrases that the model was taught."""
    rng = random.Random(0)
    words = nano_worlds.MATH if domain == "math" else nano_worlds.SEARCH_WORDS
    grammar = {nudge(rng, words) for nudge in (nano_worlds.tool_nudge, nano_worlds.form_nudge, nano_worlds.step_nudge,
                                               nano_worlds.careful_nudge) for _ in range(3000)}
    grammar |= {nano_worlds.repair_nudge(rng) for _ in range(300)} | set(words.format_lines) | {words.h0_system, *words.system}
    taught = {nano_worlds.upper_first(phrase).lower().split()[i] for phrase in grammar for i in range(len(phrase.split()))}
    for mechanism in mechanisms_of(domain):
        source = render(domain, frozenset([mechanism.name]), "x")
        for line in source.splitlines():
            if line.split(" = ")[0] in ("SYSTEM_PROMPT", "USER_PROMPT", "REMINDER", "REPAIR", "ASK_FOR_TOOL", "ASK_FOR_FORM"):
                said = json.loads(line.split(" = ", 1)[1]).replace("{question}", "").replace("{{}}", "{}").lower().split()
                assert not set(said) - taught - {"-"}, (mechanism.name, set(said) - taught)


def test_what_a_search_shows_is_what_was_taught():
    """The format of passages in demonstrations is the environment's."""
    env = SearchEnv()
    env.open()
    book = nano_worlds.Encyclopaedia("embedded")
    [hits] = env.retriever.search([book.names["town"][0]], 1)
    world = nano_worlds.SearchWorld(book, lambda query, topk: [(hits[0].title, hits[0].text)])
    shown, _ = world.use(random.Random(0), {"query": "x"}, f"mayor|{book.names['town'][0]}")
    tokenizer = load_tokenizer(str(ROOT / "embedded" / "model"))
    request = {"query": book.names["town"][0], "topk": 1, "max_tokens": 200}
    assert env.use_tools([ToolUse([], request, "", 1)], tokenizer)[0]["output"] == shown
