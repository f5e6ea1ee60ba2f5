"""The harness search: scores, the archive, resuming, and the rules proposer."""

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import gates
import lint
import mechanisms
import harness_search as hs
import nano
import proposers
import rollout
from transformers_engine import TransformersEngine
from envs import MathEnv
from tasks import Task
from lint import ForbiddenText
from nano_worlds import MathWorld, demonstrate
from candidates import Candidate, Outcome, ProposalRequest, Score
from harness_search import Search, SearchError
from rollout import RolloutConfig, run
from files import UsageError, read_sealed, sha256
from sandbox import Sandbox
from small import edit
from stats import bootstrap_ci

ROOT = Path(__file__).resolve().parents[1]
CFG = RolloutConfig(max_assistant_tok=96, max_calls=8)
H0 = MathEnv.h0.read_text()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The embedded model, or a random one with the same tokenizer and template."""
    if (ROOT / "embedded" / "model" / "model.safetensors").exists():
        return ROOT / "embedded" / "model"
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rng, folder = random.Random(0), tmp_path_factory.mktemp("model")
    texts = [turn["content"] for _ in range(200) for turn in demonstrate(rng, MathWorld(), MathWorld().sample(rng))]
    nano.train_tokenizer(iter(texts)).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=nano.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0,
    )).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir):
    return TransformersEngine(str(model_dir), n_rows=32, max_len=1024)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(max_jobs=2) as box:
        yield box


def make_tasks(n: int, name: str = "harness") -> list[Task]:
    rng = random.Random(name)
    problems = list({p.question: p for p in (MathWorld().sample(rng) for _ in range(2 * n))}.values())[:n]
    return [Task(f"math-{name}-{i}", {"question": p.question}, p.answer, "nano-math") for i, p in enumerate(problems)]


TASKS = make_tasks(8)
OTHERS = make_tasks(300, "train")
FORBIDDEN = ForbiddenText(TASKS + OTHERS)


def make_search(folder, engine, sandbox, **changes) -> Search:
    arguments = dict(
        folder=folder, engine=engine, env=MathEnv(), sandbox=sandbox, tasks=TASKS, forbidden=FORBIDDEN,
        incumbent=Candidate("h7", "h2", "from the cycle before", (), H0, 3), seed=(0, "harness", 1), rollout_cfg=CFG,
        n_candidates=3, proposer=proposers.propose_by_rules)
    arguments |= changes
    return Search(roll_out=partial(rollout.run, engine, arguments["env"], sandbox, cfg=arguments["rollout_cfg"]), **arguments)


def check(source, engine, sandbox, env=None, tasks=TASKS, forbidden=FORBIDDEN) -> list[gates.Probe]:
    return gates.check_harness(source, env or MathEnv(), engine, sandbox, tasks, forbidden, CFG, (0, "check"))


def harness(body: str, top: str = "", user: str = '"{question}"') -> str:
    """A harness file whose run(task) has this body."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    return ("import re\n\nfrom harness_api import PYTHON, chat, generate, python, tool_result\n\n"
            f'SYSTEM_PROMPT = ""\nUSER_PROMPT = {user}\n{top}\n\ndef run(task):\n{lines}')


ASK = "yield generate(chat(SYSTEM_PROMPT, USER_PROMPT.format(**task)))"

# ---- scores ---------------------------------------------------------------------------------------------------------


def make_score(mean: float, calls: float) -> Score:
    return Score(mean, (0.0, 1.0), 8, 8, 0, 0, calls, 1.0, {}, {}, 0.0, "", 0, "", {})


def make_outcome(name: str, mean: float | None, calls: float = 2.0, source: str = "") -> Outcome:
    candidate = Candidate(name, "", "", (), source, 1)
    return Outcome(candidate, None, "why") if mean is None else Outcome(candidate, make_score(mean, calls))


@pytest.mark.parametrize("scores, best", [
    ([(0.5, 2), (0.6, 4), (0.4, 1)], 1),
    ([(0.5, 2.0), (0.5, 1.5), (0.5, 1.75)], 1),             # a tie goes to fewer calls
    ([(0.5, 2.0), (0.5, 2.0)], 0),                          # then to the earlier one
    ([(0.0, 2.0), (None, 0.0), (0.0, 3.0)], 0),             # a refused one is never the best
])
def test_tie_rule(scores, best):
    outcomes = [make_outcome(f"h{i}", mean, calls) for i, (mean, calls) in enumerate(scores)]
    assert hs.select_best(outcomes) is outcomes[best]


def test_bootstrap_interval():
    values = np.random.default_rng(0).binomial(1, 0.3, 256).astype(float).tolist()
    low, high = bootstrap_ci(values, 7)
    error = 1.96 * np.std(values) / 16
    assert abs((np.mean(values) - low) / error - 1) < 0.1 and abs((high - np.mean(values)) / error - 1) < 0.1
    assert (low, high) == bootstrap_ci(values, 7) != hs.bootstrap_ci(values, 8)
    assert bootstrap_ci([1.0, 1.0], 0) == (1.0, 1.0)


def test_score_key(tmp_path, engine, sandbox):
    def key(source=H0, version=0, **changes):
        search = make_search(tmp_path, engine, sandbox, **changes)
        search.version = version
        return search.score_key(replace(search.incumbent, source=source))

    keys = [key(), key(source=H0 + "#"), key(version=1), key(seed=(1, "harness", 1)), key(tasks=TASKS[:-1]),
            key(tasks=[*TASKS[:-1], replace(TASKS[-1], answer="1")]), key(rollout_cfg=replace(CFG, temperature=0.9))]
    assert len(set(keys)) == len(keys)
    assert key(rollout_cfg=replace(CFG, n_workers=2)) == key()          # changes no result
    assert key(incumbent=Candidate("other", "", "", (), H0, 0)) == key()        # nor does a name


def test_denominators_count_what_failed(tmp_path, engine, sandbox):
    """A model that is always right, under a harness that fails where the answer is odd."""
    def oracle(prompt: str) -> str:
        return next(MathEnv().perfect_reply(task) for task in TASKS if task.fields["question"] in prompt)

    fails = harness(f"reply = {ASK}\nif reply.content[-2] in '13579':\n    1 / 0")
    search = make_search(tmp_path, gates.ScriptedEngine(engine.tokenizer, oracle), sandbox,
                         incumbent=Candidate("", "", "", (), fails, 0))
    [outcome] = search.iterate()
    n_even = sum(int(task.answer) % 2 == 0 for task in TASKS)
    assert outcome.score.mean == n_even / 8 and outcome.score.n_error == 8 - n_even and 0 < n_even < 8
    score, rows = outcome.score, [json.loads(line) for line in (tmp_path / "h0" / "traces.jsonl").open()]
    assert score.n == len(rows) == 8 and score.n_ok + score.n_error + score.n_killed == 8 and score.n_error > 0
    assert score.mean == sum(row["reward"] for row in rows) / 8
    assert score.failures == dict(sorted(Counter(r["failure"] for r in rows if r["failure"] != "solved").items()))
    assert score.cost["model_calls"] == sum(row["n_calls"] for row in rows) == 8 * score.calls_a_rollout
    assert score.cost["completion_tok"] == sum(row["n_tok"] for row in rows) == 8 * score.tok_a_rollout


# ---- the archive ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class MortalEngine:
    """An engine that dies after so many steps."""

    def __init__(self, engine, n_steps: float):
        self.engine, self.n_steps, self.n_done = engine, n_steps, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        self.n_steps -= 1
        if self.n_steps < 0:
            raise Killed
        self.n_done += 1
        return self.engine.step()


SMALL = dict(tasks=TASKS[:4], n_candidates=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, engine, sandbox):
    """An uninterrupted search of three iterations -> its folder, and the engine steps that it took."""
    folder, mortal = tmp_path_factory.mktemp("cycle"), MortalEngine(engine, 1e9)
    search = make_search(folder, mortal, sandbox, **SMALL)
    for _ in range(3):
        search.iterate()
    search.accept()
    return folder, int(1e9 - mortal.n_steps)


def read_all(folder: Path) -> dict[str, object]:
    """Every file of an archive; without the times, and what seals them."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.name in ("score.json", "refused.json", "gates.json"):
            record = read_sealed(path)
            files[str(path.relative_to(folder))] = {k: v for k, v in record.items() if "seconds" not in k}
        elif path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def test_archive_of_a_search(finished):
    folder, _ = finished
    rows = [json.loads(line) for line in (folder / "history.jsonl").open()]
    assert [row["name"] for row in rows] == ["h0", "h1", "h2", "h3", "h4"]
    assert [row["iteration"] for row in rows] == [1, 2, 2, 3, 3]
    assert rows[0]["parent"] == "" and rows[0]["harness_sha"] == sha256(H0)
    for row in rows:
        files = {path.name for path in (folder / row["name"]).iterdir()}
        assert row["refused"] == "", row                        # the rules write nothing that a gate refuses
        gates = {"gates.json"} if row["parent"] else set()
        assert files == {"harness.py", "proposal.json", "traces.jsonl", "score.json"} | gates
        assert row["hypothesis"] and "\n" not in row["hypothesis"]
        assert len((folder / row["name"] / "traces.jsonl").read_text().splitlines()) == row["n"] == 4
    best = min(rows, key=lambda row: (-row["mean"], row["calls_a_rollout"]))
    assert (folder / "accepted.txt").read_text() == best["name"] + "\n"
    assert "def run(task)" in (folder / "task.md").read_text()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.95])
def test_killed_and_resumed_is_the_same_search(fraction, finished, tmp_path, engine, sandbox):
    reference, n_steps = finished
    n_proposals = Counter()

    def proposer(request):
        n_proposals[request.seed] += 1
        return proposers.propose_by_rules(request)

    with pytest.raises(Killed):
        mortal = MortalEngine(engine, int(fraction * n_steps))
        search = make_search(tmp_path, mortal, sandbox, proposer=proposer, **SMALL)
        for _ in range(3):
            search.iterate()
    assert not (tmp_path / "accepted.txt").exists()
    search = make_search(tmp_path, engine, sandbox, proposer=proposer, **SMALL)
    outcomes = [outcome for _ in range(3) for outcome in search.iterate()]
    search.accept()
    assert read_all(tmp_path) == read_all(reference)
    assert [outcome.candidate.name for outcome in outcomes] == ["h0", "h1", "h2", "h3", "h4"]
    assert set(n_proposals.values()) == {1} and len(n_proposals) == 2


def test_what_is_finished_is_neither_proposed_nor_scored_again(finished, engine, sandbox):
    folder, _ = finished
    before = read_all(folder)
    search = make_search(folder, MortalEngine(engine, 0), sandbox, proposer=None, n_done=2, **SMALL)
    assert [outcome.candidate.name for outcome in search.iterate()] == ["h3", "h4"]
    assert search.accept().candidate.name == (folder / "accepted.txt").read_text().strip()
    assert read_all(folder) == before


def test_a_score_made_under_other_settings_is_not_used(tmp_path, engine, sandbox):
    make_search(tmp_path, engine, sandbox).iterate()
    with pytest.raises(Killed):
        make_search(tmp_path, MortalEngine(engine, 0), sandbox, seed=(1, "harness", 1)).iterate()
    path = tmp_path / "h0" / "score.json"
    honest = json.loads(path.read_text())
    edit(path, mean=1.0, key="0" * 64)
    [outcome] = make_search(tmp_path, engine, sandbox).iterate()
    assert outcome.score.mean == honest["mean"] and outcome.score.key == honest["key"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mean": 1.0}))          # a digit that flipped, not a setting
    with pytest.raises(UsageError, match="score.json is damaged"):
        make_search(tmp_path, engine, sandbox).iterate()


def test_other_weights_in_the_middle_of_a_phase_stop_it(tmp_path, engine, sandbox):
    mortal = MortalEngine(engine, 1e9)
    search = make_search(tmp_path, mortal, sandbox)
    mortal.version = engine.version + 1
    with pytest.raises(SearchError, match="weights"):
        search.iterate()


def test_canary(tmp_path, engine, sandbox):
    """With uuids as references, no byte that a proposer can read holds one, and no harness sees one."""
    tasks = [replace(task, answer=str(uuid.UUID(int=random.Random(task.id).getrandbits(128)))) for task in TASKS]
    requests = []

    def proposer(request):
        requests.append(repr(request))
        shows_all = harness("yield generate(chat('', repr(task) + repr(sorted(task.items()))))")
        raises = harness("reply = yield generate(chat('', repr(task)))\nraise ValueError(repr(task))")
        sources = [shows_all, raises, H0 + "x = 1\n"]
        return [replace(c, source=s) for c, s in zip(proposers.propose_by_rules(request), sources, strict=True)]

    search = make_search(tmp_path, engine, sandbox, tasks=tasks, forbidden=ForbiddenText(tasks), proposer=proposer)
    outcomes = search.iterate() + search.iterate()
    assert sum(outcome.score is not None for outcome in outcomes) >= 3
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) + "".join(requests).encode()
    assert TASKS[0].fields["question"].encode() in content
    for task in tasks:
        for secret in (task.answer, task.answer.replace("-", ""), task.answer[:8]):
            assert secret.encode() not in content
    prompts = (tmp_path / "h1" / "traces.jsonl").read_text()
    assert tasks[0].fields["question"] in prompts and "nano-math" not in prompts


# ---- proposers that misbehave ---------------------------------------------------------------------------------------


def test_a_proposer_that_raises_stops_the_search_and_marks_nothing(finished, tmp_path, engine, sandbox):
    class Broken(Exception):
        pass

    def broken(request):
        raise Broken

    search = make_search(tmp_path, engine, sandbox, proposer=broken, **SMALL)
    search.iterate()
    for _ in range(2):
        with pytest.raises(Broken):
            search.iterate()
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "iteration_02.json").exists()
    search.proposer = proposers.propose_by_rules
    assert [outcome.candidate.name for outcome in search.iterate()] == ["h1", "h2"]
    reference = (finished[0] / "history.jsonl").read_text().splitlines()[:3]
    assert (tmp_path / "history.jsonl").read_text().splitlines() == reference


def variants(request, *sources, parent="h0"):
    return [Candidate("x", parent, "a line\nand another", (), source, 99) for source in sources]


@pytest.mark.parametrize("n", [0, 4])
def test_too_few_or_too_many_candidates_stop_the_search(n, tmp_path, engine, sandbox):
    search = make_search(tmp_path, engine, sandbox, proposer=lambda request: variants(request, *[H0] * n))
    search.iterate()
    with pytest.raises(SearchError, match=f"{n or 'no'} candidate"):
        search.iterate()


def test_duplicates_and_unknown_parents_are_refused(tmp_path, engine, sandbox):
    other = H0.replace("MAX_CALLS = 2", "MAX_CALLS = 3")
    comments = '"""Another docstring."""\n# and a comment\n' + H0[H0.index("from harness_api"):]
    batches = iter([variants(None, comments, other, other + "\n# again"),
                    variants(None, H0 + "1 / 0\n", H0 + "import os\n", H0 + "\ud800"),
                    [*variants(None, H0 + "x = 2\n", parent="h9"), *variants(None, H0 + "x = 3\n", parent="h1")]])
    search = make_search(tmp_path, engine, sandbox, proposer=lambda request: next(batches))
    outcomes = [outcome for _ in range(4) for outcome in search.iterate()]
    fails = "error: ZeroDivisionError"
    expected = ["", "same program as h0", "", "same program as h2", fails, "lint: ", "contract: ",
                "parent 'h9'", "parent 'h1'"]           # h1 was refused: no parent
    assert len(outcomes) == len(expected)
    for outcome, words in zip(outcomes, expected, strict=True):
        assert words in outcome.refused and bool(words) == bool(outcome.refused) == (outcome.score is None)
        paid = {"": len(TASKS), fails: 2}.get(words, 0) if outcome.candidate.name != "h0" else 0
        assert outcome.gate_cost.get("rollouts", 0) == paid
        if outcome.refused:                             # where the proposer reads it
            record = json.loads((tmp_path / outcome.candidate.name / "refused.json").read_text())
            assert record["refused"] == outcome.refused
    assert outcomes[2].candidate.hypothesis == "a line and another"
    replayed = make_search(tmp_path, MortalEngine(engine, 0), sandbox, proposer=None)
    assert [outcome for _ in range(4) for outcome in replayed.iterate()] == outcomes


@pytest.mark.parametrize("name", ["h0/score.json", "h0/traces.jsonl", "history.jsonl"])
def test_a_proposer_that_edits_the_archive_stops_the_search(name, tmp_path, engine, sandbox):
    def proposer(request):
        (request.folder / "notes.txt").write_text("a note of its own is fine")
        (request.folder / name).write_text("{}")
        return proposers.propose_by_rules(request) if "traces" not in name else variants(request, H0)

    search = make_search(tmp_path, engine, sandbox, proposer=proposer)
    search.iterate()
    with pytest.raises(SearchError, match=name):
        search.iterate()


def test_a_proposer_that_plants_files_stops_the_search(tmp_path, engine, sandbox):
    """A score for a candidate that is still to come would be taken for our own."""
    def proposer(request):
        (request.folder / "h1").mkdir()
        (request.folder / "h1" / "score.json").write_text("{}")
        return proposers.propose_by_rules(request)

    search = make_search(tmp_path, engine, sandbox, proposer=proposer)
    search.iterate()
    with pytest.raises(SearchError, match="score.json"):
        search.iterate()


@pytest.mark.parametrize("lost, words", [("h0/score.json", "score of this finished candidate"), ("iteration_02.json", "iteration_02.json is gone")])
def test_what_was_paid_for_is_not_paid_again(lost, words, finished, tmp_path, engine, sandbox):
    folder = tmp_path / "archive"
    shutil.copytree(finished[0], folder)
    (folder / lost).unlink()
    with pytest.raises(SearchError, match=words):
        make_search(folder, MortalEngine(engine, 0), sandbox, proposer=None, n_done=2, **SMALL)


def test_a_number_too_long_to_show_is_refused(engine, sandbox):
    source = H0 + "\nX = 0x" + "f" * 4000 + "\n"
    assert lint.parse_harness(source)[1] and not check(source, engine, sandbox)[-1].passed
    assert lint.program_of(source) == source


def test_a_candidate_changed_after_it_was_proposed_is_refused(tmp_path, engine, sandbox):
    with pytest.raises(Killed):
        search = make_search(tmp_path, engine, sandbox)
        search.iterate()
        search.engine = MortalEngine(engine, 0)
        search.iterate()
    path = tmp_path / "h2" / "harness.py"
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(SearchError, match="h2"):
        make_search(tmp_path, engine, sandbox, n_done=1).iterate()


# ---- the rules proposer ---------------------------------------------------------------------------------------------

FAILURES = {"call_limit": 61, "malformed_call": 40, "no_answer_after_tool": 33, "no_tool_wrong_answer": 20,
            "wrong_answer": 30, "token_limit": 12, "solved": 60}
KNOWN = {mechanism.name: mechanism for mechanism in mechanisms.mechanisms_of("math")}


def with_failures(outcome: Outcome, failures: dict[str, int]) -> Outcome:
    return replace(outcome, score=replace(outcome.score, failures=failures, n=sum(failures.values())))


def simulate(folder: Path, n_iterations: int, seed: int = 0, m: int = 3, source: str = H0,
             domain: str = "math") -> list[list[Candidate]]:
    """Proposals over iterations with made-up scores and failures, without a model."""
    rng = random.Random(seed)
    history = [with_failures(make_outcome("h0", 0.2, source=source), FAILURES)]
    rounds = []
    for iteration in range(2, n_iterations + 2):
        request = ProposalRequest(folder, tuple(history), tuple(f"h{len(history) + i}" for i in range(m)),
                                  (seed, "propose", iteration), domain, folder / "notes")
        rounds.append([replace(c, name=f"h{len(history) + i}") for i, c in enumerate(proposers.propose_by_rules(request))])
        for candidate in rounds[-1]:
            failures = {word: rng.randint(0, 60) for word in FAILURES}
            score = make_score(round(rng.random(), 2), 2.0) if rng.random() < 0.9 else None
            history.append(with_failures(Outcome(candidate, score), failures) if score else Outcome(candidate, None, "why"))
    return rounds


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_rules_never_repeat_a_program(m, tmp_path):
    rounds = simulate(tmp_path, 16, m=m)
    candidates = [candidate for candidates in rounds for candidate in candidates]
    assert [len(candidates) for candidates in rounds] == [m] * 16
    assert len({lint.program_of(c.source) for c in candidates} | {lint.program_of(H0)}) == 16 * m + 1
    for candidate in candidates:
        tree, why = lint.parse_harness(candidate.source)
        assert (why, lint.lint(tree), lint.find_literals(tree, FORBIDDEN)) == ("", "", "")
        assert set(candidate.mechanisms) <= KNOWN.keys() and "\n" not in candidate.hypothesis
        needed = 2 + sum(KNOWN[name].n_extra_calls for name in candidate.mechanisms)
        assert f"MAX_CALLS = {mechanisms.n_calls(candidate.mechanisms)}\n" in candidate.source
        assert mechanisms.n_calls(candidate.mechanisms) >= min(6, needed)
        for group in ("calls", "reminder"):
            assert sum(KNOWN[name].group == group for name in candidate.mechanisms) <= 1


def test_slots_follow_the_counted_failures(tmp_path):
    [first, second, third] = simulate(tmp_path, 1)[0]
    assert {"careful_reminder"} == set(first.mechanisms) - {"calls_3"}      # 33 and 30 failures
    assert {"repair_call"} == set(second.mechanisms) - {"calls_3"}
    assert len([name for name in third.mechanisms if KNOWN[name].group != "calls"]) >= 2
    for candidate in (first, second, third):
        assert candidate.parent == "h0" and "of 256 rollouts of h0" in candidate.hypothesis
        cited = {word for name in candidate.mechanisms for word in KNOWN[name].cures.split()}
        total = sum(FAILURES.get(word, 0) for word in cited)
        assert candidate.hypothesis.endswith(f"at most {total // 2} are left")
        assert all(f"{FAILURES[word]} {mechanisms.SAID[word]}" in candidate.hypothesis for word in cited if word in FAILURES)


def test_later_rounds_build_on_the_best_and_may_take_away(tmp_path):
    rounds = simulate(tmp_path, 16, seed=3)
    removals = [c for candidates in rounds for c in candidates if c.hypothesis.startswith("without ")]
    assert removals and all(c.hypothesis.split()[1].rstrip(",") not in c.mechanisms for c in removals)
    assert len({candidates[0].parent for candidates in rounds}) > 1


def test_the_rules_do_not_run_dry_before_their_table_does(tmp_path):
    """Forty iterations, as in the paper's harness-only runs, never stop for want of a new program."""
    rounds = simulate(tmp_path, 40, seed=1)
    assert [len(candidates) for candidates in rounds] == [3] * 40


def test_a_small_table_is_tried_out_and_then_there_is_nothing_more(tmp_path):
    """Chess has 3 x 2 x 3 x 2 x 2 programs, of which h0 is one."""
    source = (ROOT / "harnesses" / "h0_chess.py").read_text()
    rounds = simulate(tmp_path, 60, source=source, domain="chess")
    sizes = [len(candidates) for candidates in rounds]
    assert sizes[:16] == [3] * 16 and 0.9 * 71 < sum(sizes) <= 71 and sizes[-1] == 0


def test_a_foreign_incumbent_is_said_to_be_unknown(tmp_path):
    foreign = H0.replace("Put your final answer", "State the answer")
    for candidate in simulate(tmp_path, 1, source=foreign)[0]:
        assert candidate.hypothesis.startswith("(from h0's structure, as the mechanisms of h0 are not known)")


def test_rendering_without_mechanisms_is_h0():
    assert mechanisms.render("math", frozenset(), "x").partition('"""\n\n')[2] == H0.partition('"""\n\n')[2]


def test_rules_do_not_depend_on_the_hash_seed(tmp_path):
    code = ("import sys; sys.path[:0] = ['.', 'tests']; from pathlib import Path; import test_harness_search as t\n"
            "print([candidate for round in t.simulate(Path(sys.argv[1]), 8, seed=5) for candidate in round])")
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], cwd=ROOT, capture_output=True,
                          text=True, check=True, env={**os.environ, "PYTHONHASHSEED": other})
    ours = [candidate for candidates in simulate(tmp_path / "ours", 8, seed=5) for candidate in candidates]
    assert done.stdout == f"{ours}\n" and len(ours) == 24


def talk(has: frozenset[str], replies: list[str], engine, sandbox) -> tuple[str, list[str]]:
    """Runs a rendered harness against a model that says these lines -> the last prompt, and the lines left unsaid."""
    left, prompts = list(replies), []

    def model(prompt: str) -> str:
        prompts.append(prompt)
        return left.pop(0)

    scripted, cfg = gates.ScriptedEngine(engine.tokenizer, model), replace(CFG, max_assistant_tok=10_000)
    [trace] = run(scripted, MathEnv(), sandbox, mechanisms.render("math", has, "x"), TASKS[:1], 1, (0,), cfg)
    assert trace.status == "ok"
    return prompts[-1], left


CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(41 + 1)"}}\n</tool_call>'
FAILING = CALL.replace("41 + 1", "1 / 0")
BOX = "\\boxed{42}"


@pytest.mark.parametrize("mechanism, replies, says", [
    ("calls_3", [CALL, CALL, BOX], ""),
    ("calls_4", [CALL, CALL, CALL, BOX], ""),
    ("calls_6", [CALL] * 5 + [BOX], ""),
    ("repair_call", ["<tool_call>print(1)</tool_call>", CALL, BOX], "The tool call could not be read."),
    ("ask_for_tool", [BOX, CALL, BOX], "Please use the python tool"),
    ("ask_for_form", ["It is 42.", BOX], "If you are not done"),
    ("ask_for_form", ["It is 42.", "Yes, 42."], "If you are not done"),                  # once only
    ("explain_error", [FAILING, CALL, BOX], "The code failed."),
    ("careful_reminder", [CALL, BOX], "</tool_response><|im_end|>\n<|im_start|>user\nIf more steps are needed"),
    ("careful_reminder_in_output", [CALL, BOX], "42\n\nIf more steps are needed"),
    ("blunt_reminder", [CALL, BOX], "</tool_response><|im_end|>\n<|im_start|>user\nNow give the final answer"),
    ("blunt_reminder_in_output", [CALL, BOX], "42\n\nNow give the final answer"),
    ("system_tool", [BOX], "system\nAlways use the python tool"),
    ("checklist", [BOX], "\n- Use the python tool for every calculation.\n- Put your final answer in"),
    ("steps", [BOX], "\n\nWork step by step, one tool call for each step. Put your final answer in"),
])
def test_each_mechanism_does_what_it_says(mechanism, replies, says, engine, sandbox):
    """The model's lines are all asked for and no more, and the harness says its own; h0 does neither."""
    has = proposers.add_mechanisms(frozenset(), [mechanism], KNOWN)
    prompt, left = talk(has, [*replies, "one too many"], engine, sandbox)
    assert says in prompt and left == ["one too many"]
    h0_prompt, h0_left = talk(frozenset(), [*replies, "one too many"], engine, sandbox)
    assert (says and says not in h0_prompt) or len(h0_left) > 1
    everything = proposers.add_mechanisms(frozenset(), list(KNOWN), KNOWN)                     # and all of them get along
    assert talk(everything, [*replies, *[BOX] * 6], engine, sandbox)[1]


def test_reminder_and_error_take_turns(engine, sandbox):
    for reminder, after in (("careful_reminder", "user\nIf more"), ("blunt_reminder_in_output", "42\n\nNow give")):
        has = proposers.add_mechanisms(frozenset(), [reminder, "explain_error"], KNOWN)
        prompt, _ = talk(has, [FAILING, CALL, BOX], engine, sandbox)
        assert prompt.count("The code failed.") == 1 and prompt.count(after) == 1
