"""The data loaders on real files and on broken ones; attacks on the math verifier."""
import json
import logging
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import math_answer
from envs import MathEnv, verify_cases
from tasks import DataError, Task, Verdict, check_disjoint, load_tasks

SHARED = Path(__file__).parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real samples are not part of the project")


def reward(answer: str, reference: str) -> float:
    return verdict(rf"So it is \boxed{{{answer}}}.", reference).reward


def verdict(reply: str | None, reference: str) -> Verdict:
    return MathEnv().verify(Task("t", {"question": "?"}, reference, "test"), reply)


# ---- verifier: values ----

EQUAL = [                                               # (answer, reference)
    # whole numbers and decimals
    ("42", "42"), ("042", "42"), ("25", "025"), ("-0", "0"), ("--5", "5"), ("+-5", "-5"), ("{42}", "42"),
    ("(42)", "42"), ("1,234.50", "1234.5"), ("1{,}234", "1234"), (r"1,\!234", "1234"), (r"1\,234\,567", "1,234,567"),
    ("1 234 567", "1234567"), (r"1\ 234", "1234"), ("4.2e1", "42"), ("1E5", "100000"),
    (r"3.46223 \times 10^{3}", "3462.23"), ("10^{3}", "1000"), (r"6.72\cdot10^{-5}", ".0000672"), ("2^{10}", "1024"),
    ("４２", "42"), ("٤٢", "42"), ("1" * 400, "1" * 400), ("7.", "7.0"),
    # fractions
    (r"\dfrac{1}{2}", r"\frac12"), (r"\tfrac12", "0.5"), (r"\frac 1 2", "1/2"), (r"\frac1{72}", r"\frac{1}{72}"),
    (r"\frac{270}7", "270/7"), ("2/4", "1/2"), ("84/2", "42"), ("-3/-4", "3/4"), (r"-\frac{-1}{2}", "0.5"),
    ("3 1/2", "7/2"), (r"22 \frac{1}{2}", "22.5"), (r"-1\frac12", "-1.5"), (r"\frac{\frac12}{3}", r"\frac16"),
    # units, degrees, money, percent
    (r"336^\circ", "336"), (r"90^{\circ}", r"90\text{ degrees}"), ("50%", r"50\text{ percent}"), ("50", r"50\%"),
    (r"\$5", "5 dollars"), ("$5", "5"), (r"-\$5", "-5"), (r"\$32,\!348", "32348"), ("5 apples", "5"),
    (r"20\text{ days}", "20 days"), (r"3200 \mathrm{~cm}^{3}", r"3200\text{ cm}^3"), ("5 miles per hour", "5"),
    ("5 cm", "5"), (r"25^{\circ} \mathrm{C}", "25"),
    # algebra
    ("b a", "ab"), (r"\frac{x}{7}+\frac27", r"\frac{2+x}{7}"), ("6e - 10", "2 (3e - 5)"),
    (r"\frac{\sqrt3}{2}\pi", r"\frac{\pi \sqrt{3}}{2}"), (r"\sqrt2", r"\sqrt{2}"), (r"2\sqrt{3}+4", r"4 + 2\sqrt3"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac12+\frac{\sqrt5}{2}"), (r"1 + e^{-1}", r"1+\frac{1}{e}"),
    (r"(b+2)(a+5)", "(a+5)(b+2)"), ("-(x-1)", "1-x"), (r"x \cdot 3", "3x"), ("x**2+1", "1+x^2"), ("10^12", "10^{12}"),
    (r"\sqrt[3]{2}", r"\sqrt[3] 2"), (r"-\frac{\sqrt{2}}{3}", r"\frac{-\sqrt{2}}{3}"), (r"3^{\frac13}", r"3^{\frac13}"),
    # equations, relations, names
    ("x=42", "42"), ("42", r"\theta = 42"), ("y = 2x+3", "2x - y + 3 = 0"), ("2x+3", "y=2x+3"),
    (r"f(x) = x^2", "x^2"), ("y=1, x=2", "x=2, y=1"), (r"x \in [2,5)", "[2,5)"), ("3 < x", "x > 3"),
    (r"x \geq 3", r"3 \le x"), ("c<=2", r"c \leq 2"), (r"\text{Area} = 5", "5"), ("x=1, x=2", "1,2"),
    ("x = 1, 2", "2, 1"), ("40+2=x", "40+2=x"),
    # lists, sets, points, intervals, matrices
    (r"\{3,1,2\}", "1, 2, 3"), ("{5}", r"\{5\}"), (r"1-\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    ("3; 5", "5 and 3"), (r"-30 \text{ or } -12", r"-12 \text{ OR } -30"), (r"\{-2, 1+\sqrt5, 1-\sqrt5\}",
    r"\{1\pm\sqrt{5},-2\}"), (r"\left(\tfrac43,1\right)", "(4/3, 1)"), (r"\left[0,1\right)", "[0, 1)"),
    ("(100,200)", "(100, 200)"), ("(1,1), (0,0)", "(0,0),(1,1)"), (r"(-\infty,2)\cup(3,+\infty)", "(3,∞) ∪ (−∞,2)"),
    (r"\begin{bmatrix}0.5&1\end{bmatrix}", r"\begin{pmatrix} \frac12 & 1 \\ \end{pmatrix}"),
    # words, choices, times, bases
    (r"\text{(B)}", "B"), (r"\textbf{B}", r"\text{(B)}"), ("even", r"\text{Even}"),
    (r"\text{no solution}", "No solution"), ("12:00", "12:00"), ("3:5:7", "3 : 5 : 7"), ("52_{8}", "52_8"),
    (r"\ln 2", r"\ln  2"), ("2^{n}", "2^n"), ("4:40 a.m.", r"4:40\text{ a.m.}"), (r"\boxed{\boxed{42}}", "42"),
    (r"\[42\]", "42"), (r"\(42\)", "42"), (r"\displaystyle 42", "42"), (r"\!\;42\quad", "42"),
]

DIFFERENT = [
    ("", "0"), ("41", "42"), ("4 2", "42"), ("1 2", "12"), ("42 41", "42"), ("1.2.3", "1.23"), ("1,23", "123"),
    ("1,5", "1.5"), ("12,34", "1234"), ("0.333", "1/3"), ("0.3333333333333333", "1/3"),
    ("0.1000000000000000055511151231257827", "0.1"), ("9007199254740993", "9007199254740992"),
    ("1" * 76 + "2", "1" * 76 + "3"), ("3.14", r"\pi"), ("3.14159265358979", r"\pi"), ("22/7", r"\pi"),
    ("1e400", "1e401"), ("1/0", "0"), ("0/0", "1"), ("nan", "0"), ("inf", r"\infty"), ("NaN", "nan1"), ("True", "1"),
    ("None", "0"), ("-42", "42"), ("5!", "5"), ("120", "5!"), ("42_8", "42"), ("52", "52_8"), ("0x2a", "42"),
    ("0b101010", "42"), ("4_2", "42"), ("42j", "42"), ("42i", "42"), ("42x", "42"), (r"42\pi", "42"), ("40+2", "42"),
    (r"6 \cdot 7", "42"), ("6*7", "42"), ("6(7)", "42"), ("43-1", "42"), ("0.5+0.5", "1"), ("2x+3x", "5x"),
    ("(x-1)(x+1)", "x^2-1"), ("x^2-1", "(x-1)(x+1)"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sqrt{12}", r"2\sqrt{3}"), (r"\sqrt{4}", "2"), (r"\sqrt[3]{2}", r"\sqrt{2}"), (r"1\frac12", r"\frac12"),
    (r"2\frac12", "1"), (r"\approx 42", "42"), (">42", "42"), (r"\neq 42", "42"), ("<43", "42"), ("~42 or so", "42"),
    # units
    ("0.5", r"50\%"), (r"0.5\%", "0.5 cm"), (r"5\text{ m}", r"5\text{ cm}"), (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    ("50 cents", r"\$50"), (r"90^\circ", r"90\%"), ("5 million", "5"), (r"5\text{ dozen}", "5"),
    (r"5\text{ thousand}", "5"), (r"5\text{ squared}", "5"), ("5", "5 million"),
    # hedges
    ("41 or 42", "42"), ("42, 42", "42"), ("41=42", "42"), ("42=42=42", "42"), (r"42 \text{ or maybe } 41", "42"),
    (r"\{41,42\}", "42"), ("(42, 41)", "42"), ("x=42, y=41", "42"), ("x=42", "y=42"), ("2x=84", "x=42"),
    ("2x=84", "84"), ("x=1, y=2", "x=2, y=1"), ("1, 2", "x=1, y=2"), (r"42 \pm 1", "42"), (r"\pm 42", "42"),
    (r"42\\41", "42"), ("42;41", "42"), ("42|41", "42"), ("42?", "42"), ("1-100", "42"), (r"\boxed{41} 42", "42"),
    (r"41 \boxed{42}", "42"),
    # order and brackets
    ("(2,1)", "(1,2)"), ("(1,2)", "1,2"), ("[1,2]", "(1,2)"), ("[0,1)", "[0,1]"), ("(100,200)", "100200"),
    (r"(1,2)\cup(3,4)", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("x>3", "x<3"), ("x>3", r"x\ge3"), ("3<x", "x<3"),
    ("x+y=1", "x+y=2"), ("y=2x", "y=-2x"), ("1<x<2", "2<x<1"), (r"\begin{pmatrix}1&2\end{pmatrix}",
    r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\begin{vmatrix}1\end{vmatrix}", r"\begin{pmatrix}1\end{pmatrix}"),
    ("1, 2, 3", "1, 2"), ("1, 2", "1, 2, 3"), ("1, 1, 2", "1, 2, 2"),
    # words
    ("(D)", r"\text{(C)}"), ("b", "B"), ("Evelyn", "Navin"), ("neve", "even"), ("yes", "no"), ("1:00", "1"),
    ("4:40 pm", "4:40 a.m."), ("2 thirds", "2"),
    ("1:2", "1/2"), ("2:4", "1:2"), ("the reference", "42"), (r"\log_{2}8", "3"), (r"\int_0^1 84x dx", "42"),
    ("__import__('os')", "42"), ("().__class__", "42"), ("10**10**10", "1"), ("9^{9^{9^9}}", "9"),
]


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal(answer, reference):
    assert reward(answer, reference) == 1


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_different(answer, reference):
    assert reward(answer, reference) == 0


# ---- verifier: which text is graded ----

@pytest.mark.parametrize(("reply", "expected"), [
    (r"\boxed{41} no, \boxed{42}", 1), (r"\boxed{42} no, \boxed{41}", 0), (r"\boxed{42} and \boxed{", 0),
    (r"\boxed{42} or \boxed{}", 0), (r"Write \boxed{ first: \boxed{42}", 1), (r"\boxed 42", 1), (r"$\boxed 42$.", 1),
    (r"\boxed 42, so", 1), (r"\boxed {42}", 1), ("\\boxed\n{42}", 1), (r"\boxed\boxed{42}", 1), (r"\fbox{42}", 0),
    (r"\boxedness{42}", 0), (r"\Boxed{42}", 0), (r"boxed{42}", 0), (r"\boxed{\{42\}}", 1), (r"} \boxed{42} {", 1),
    (r"\boxed{42}}", 1), (r"\boxed{{42}", 0), ("42", 0), ("#### 42", 0), ("Answer: 42", 0),
    (r"<think>\boxed{41}</think> \boxed{42}", 1), (r"<think>\boxed{42}</think> It is 42.", 0),
    (r"thinking, \boxed{42}", 1), (r"\boxed{42} <think> or \boxed{41}", 1), (r"<think>a</think>b<think>\boxed{42}",
    0), (r"\boxed{42}</think>", 0), (r"\boxed{42}</think>\boxed{41}", 0),
    ('<tool_call>{"arguments": {"code": "print(\'\\boxed{42}\')"}}</tool_call>', 0),
    (r"\boxed{42} <tool_call>\boxed{41}", 1), (r"<tool_call>x</tool_call> \boxed{42}", 1), (None, 0), ("", 0),
    ("\\boxed{\x00}", 0), ("\ud800 \\boxed{42}", 1),
])
def test_which_box(reply, expected):
    assert verdict(reply, "42").reward == expected


def test_nested_box_with_more_in_it_is_a_hedge():
    assert reward(r"\boxed{41} 42", "41") == reward(r"\boxed{41} 42", "42") == 0


def test_why_is_for_people_and_never_holds_the_reference():
    secret = "7f3c19aa"
    for reply in (None, "", "no box", r"\boxed{", r"\boxed{}", r"\boxed{41}", rf"\boxed{{{'9' * 5000}}}"):
        graded = verdict(reply, secret)
        assert graded.reward == 0 and graded.why and secret not in graded.why + str(graded.extracted)
    assert verdict(r"so \boxed{41}", secret).why == "boxed '41', which is not the reference"
    assert verdict(r"so \boxed{41}", secret).extracted == "41"
    graded = verdict("\\boxed{\ud800\x00}", "42")
    assert json.loads(json.dumps(graded.why)).encode() and graded.extracted.encode()          # can be logged


HOSTILE = [
    "9" * 1_000_000, "0." + "0" * 1_000_000 + "1", "(" * 1500, "{" * 900 + "}" * 900, r"\{" * 400 + r"\}" * 400,
    r"\sqrt{" * 250 + "2" + "}" * 250, r"\sqrt" * 70 + "2", r"\frac" * 70 + "2", "((x+1)^{999})^{999}",
    "9^{9^{9^{9}}}", "(a+b+c+d)^{99}" * 25, "x^{1000}" * 40, "1e999", "1e-999", "2^{-1000}", "1/" * 190 + "1",
    "-" * 1900 + "1", "1," * 999 + "1", r"1 \pm " * 300, r"1\pm2," * 250, "(1," * 400, r"\begin{pmatrix}" * 100,
    r"\text{" * 300, '"' * 1900, " " * 1900 + "1", "1 a" * 600, "a " * 900, r"\cup" * 400, "=" * 1900,
    r"\boxed{" * 200 + "1" + "}" * 200, r"\{1,2\}," * 200, "x_1+" * 99 + "y", "[" * 200 + "]" * 200,
    "().__class__.__base__.__subclasses__()", "\x00" * 100, "\ud800" * 100, "\u202e24", r"\frac{1}{0}",
    r"\frac{1}{x-x}", r"0^{-1}", r"1\frac{1}{0}", r"\sqrt[0]{1}",
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_wrong_and_cheap(answer):
    for reference in ("42", r"\frac{x+1}{2}", "1, 2", "y = 2x"):
        assert reward(answer, reference) == 0


@pytest.mark.parametrize("reply", [
    r"\boxed{" * 50_000, r"\boxed " * 50_000, r"\boxed{}" * 50_000, r"\boxed" + " " * 200_000, "<think>" * 50_000,
    "</think>" * 50_000, "<tool_call>" * 50_000, "{" * 200_000, "}" * 200_000, "\\" * 200_000, " " * 200_000,
])
def test_hostile_replies_are_wrong_and_cheap(reply):
    assert verdict(reply, "42").reward == 0


def test_verdicts_are_the_same_in_any_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.extend(reward(a, "42") for a in ("42", "41", "9^{9^{9^9}}")))
    thread.start()
    thread.join()
    assert rewards == [1, 0, 0]


PIECES = [*r"0123456789+-*/^_=<>()[]{},;.:!|&$%abxyie ", "\\", "°", "−", "٣", " and ", " cm", r"\frac", r"\sqrt",
          r"\pm", r"\cup", r"\text{", r"\boxed{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\{", r"\}", r"\pi",
          r"\infty",
          r"\left", r"\le", r"\in"]
LATEX = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)



@given(st.one_of(st.text(max_size=200), LATEX), st.one_of(st.text(min_size=1, max_size=50), LATEX))
@settings(max_examples=200, deadline=None)
def test_any_text_gets_a_verdict(answer, reference):
    for reply in (answer, rf"\boxed{{{answer}}}"):
        assert verdict(reply, reference).reward in (0.0, 1.0)


@given(LATEX)
@settings(max_examples=200, deadline=None)
def test_what_can_be_boxed_equals_itself(text):
    boxed = math_answer.last_box(rf"\boxed{{{text}}}")
    if boxed == text and text.strip():
        assert reward(text, text) == 1


@given(st.integers(-10**30, 10**30))
@settings(max_examples=80, deadline=None)
def test_a_whole_number_in_many_forms(n):
    forms = [f"{n:+d}", f"{n}.0", f"{n}.", f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", r"\,"),
    f"{n:,}".replace(",", r",\!"), f"${n}$", rf"\text{{{n}}}",
             f"x = {n}", rf"{n}\%", rf"{n}^\circ", rf"{n} \text{{ units}}", rf"\frac{{{2 * n}}}{{2}}", f"{3 * n}/3",
             str(n).replace("-", "−"), rf"\left({n}\right)", f"{n}e0",
             rf"{n} \times 10^{{0}}"]
    for form in forms:
        assert reward(form, str(n)) == 1, form
        assert reward(form, str(n + 1)) == 0, form


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
@settings(max_examples=200, deadline=None)
def test_fractions_are_compared_exactly(p, q):
    def latex(f: Fraction, k: int) -> str:
        return rf"{'-' * (f < 0)}\frac{{{abs(f.numerator) * k}}}{{{f.denominator * k}}}"
    assert reward(latex(p, 6), f"{p.numerator}/{p.denominator}") == 1
    assert reward(latex(p, 3), latex(q, 5)) == (p == q)


# ---- loading ----

def write(path: Path, *rows: dict | str) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@needs_shared
@pytest.mark.parametrize(("file", "n", "first_id", "first_answer"), [
    ("gsm8k_test.jsonl", 660, "gsm8k_test-1", "18"), ("math500.jsonl", 250, "test/precalculus/807.json",
    r"\left( 3, \frac{\pi}{2} \right)"),
    ("aime_2024.jsonl", 30, "aime_2024-60", "204"), ("dapo_16.jsonl", 16, "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "34"),
    ("dapo_16.parquet", 16, "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "34"),
    ("deepscaler_1209_verl.parquet", 1205, "deepscaler_1209_verl-0", r"\frac{3}{7}"),
    ("svamp.json", 500, "chal-1", "51"), ("mawps_asdiv_train.jsonl", 2727, "mawps_asdiv_train-1", "504"),
])
def test_real_files_load(file, n, first_id, first_answer, caplog):
    tasks = MathEnv().load(SHARED / "data" / file)
    assert (len(tasks), tasks[0].id, tasks[0].answer) == (n, first_id, first_answer)
    assert len({task.id for task in tasks}) == n
    for task in tasks:
        assert not any(sentence in task.fields["question"] for sentence in MathEnv.foreign_instructions)
        assert "####" not in task.answer
    if file.startswith("deepscaler"):                   # 1,209 rows: nothing is dropped unsaid
        assert "2 x repeated question" in caplog.text and "row 266" in caplog.text and "row 1188" in caplog.text
    else:
        assert not caplog.text


@needs_shared
def test_real_references_differ_from_each_other():
    """Equality is not so lenient that another task's answer will do."""
    answers = {task.answer for task in MathEnv().load(SHARED / "data" / "math500.jsonl")}
    answers = sorted(answer for answer in answers if not answer.isdigit())
    hits = [(a, b) for i, a in enumerate(answers) for b in answers[:i] if reward(a, b)]
    assert len(answers) > 100 and hits == [(r"\frac{1}{4}", r"\frac14")]


@needs_shared
def test_shared_cases():
    report = verify_cases("math", SHARED / "cases" / "verifier.jsonl")
    assert (report["n"], report["misses"]) == (77, [])


def test_own_format_round_trip(tmp_path):
    row = {"id": "n-1", "question": " 1 + 1? ", "answer": "2", "source": "nano"}
    assert MathEnv().load(write(tmp_path / "own.jsonl", row, "")) == [Task("n-1", {"question": "1 + 1?"}, "2", "nano")]


@pytest.mark.parametrize(("rows", "said"), [
    (['{"question": "q", '], "line 1: is not JSON"),
    (["[" * 100_000], "line 1: is not JSON"),
    (["3"], "line 1: is not one value"),
    ([{"question": "q", "answer": "1"}, {"question": "p"}], "line 2: field 'answer' is missing"),
    ([{"question": "q", "answer": "1"}, "", {"question": "p", "answer": None}], "line 3: field 'answer' is missing"),
    ([{"question": "q", "answer": " "}], "line 1: field 'answer' is empty"),
    ([{"question": "q", "answer": "so\n#### "}], "line 1: field 'answer' is empty"),
    ([{"question": "q", "answer": ["1"]}], "line 1: field 'answer' must be text, not list"),
    ([{"question": "q", "answer": True}], "line 1: field 'answer' must be text, not bool"),
    (['{"question": "q", "answer": NaN}'], "line 1: field 'answer' must be text, not float"),
    ([{"answer": "1"}], "line 1: field 'question' is missing"),
    ([{"question": 3, "answer": "1"}], "line 1: field 'question' must be text, not int"),
    ([{"problem": "", "answer": "1"}], "line 1: field 'problem' is empty"),
    ([{"Body": "b", "Answer": 1.0}], "line 1: field 'Question' is missing"),
    ([{"question": "q", "answer": "1", "id": 1.5}], "line 1: field 'id' must be text"),
    ([{"question": "q", "answer": "1", "source": 3}], "line 1: field 'source' must be text"),
    ([{"question": "q", "answer": "}"}], "line 1: field 'answer' '}' does not verify against itself"),
    ([{"question": "q", "answer": "1" * 2001}], "does not verify against itself"),
    ([{"question": "q", "answer": "1", "id": "a"}, {"question": "p", "answer": "1", "id": "a"}],
    "line 2: field 'id' 'a' is that of"),
    ([{"prompt": "text", "reward_model": {"ground_truth": "1"}}],
    "line 1: field 'prompt' must be a list of one message"),
    ([{"prompt": [{"content": "q"}], "reward_model": "1"}], "line 1: field 'reward_model.ground_truth' is missing"),
    ([{"prompt": [{"content": MathEnv.foreign_instructions[0]}], "reward_model": {"ground_truth": "1"}}],
    "line 1: field 'prompt' is empty"),
    ([], "holds no rows"),
])
def test_a_broken_row_is_named(tmp_path, rows, said):
    path = write(tmp_path / "broken.jsonl", *rows)
    with pytest.raises(DataError) as error:
        MathEnv().load(path)
    assert str(path) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.txt", b"", "unknown kind of file"), ("a.json", b'{"question": "q"}', "must hold a list of rows"),
    ("a.parquet", b"no", "is not parquet"),
    ("a.jsonl", b'{"question": "\xff"}', "cannot be read"), ("a.csv", b"question,answer\nq,1,2\n",
    "line 2: is not one value for each column"),
    ("a.csv", b"question,answer\nq\n", "line 2: is not one value for each column"),
    ("a.json", b'[{"question": "q", "answer": "1"}, 7]', "row 2: is not one value"),
])
def test_a_broken_file_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        MathEnv().load(tmp_path / name)
    assert name in str(error.value) and said in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing.jsonl: cannot be read"):
        MathEnv().load(tmp_path / "nothing.jsonl")


def test_csv_loads_with_line_breaks_in_a_field(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffquestion,answer\n"one\nand one?",2\nthree?,3\n', encoding="utf-8")
    assert [(t.id, t.fields["question"]) for t in MathEnv().load(tmp_path / "a.csv")] == [("a-1", "one\nand one?"),
    ("a-2", "three?")]


def test_repeated_questions_are_dropped_and_counted(tmp_path, caplog):
    rows = (("One?", "1"), ("one? ", "1"), ("ONE?", "2"), ("Two?", "2"))
    path = write(tmp_path / "a.jsonl", *({"question": question, "answer": answer} for question, answer in rows))
    with caplog.at_level(logging.WARNING, logger="whale"):
        assert [task.id for task in MathEnv().load(path)] == ["a-1", "a-4"]
    assert "2 tasks; dropped: 1 x repeated question; 1 x repeated question with another answer" in caplog.text


def test_disjoint_splits():
    questions = (("1", "What is  one?"), ("2", "what IS\none?"), ("1", "Other?"))
    a, b, c = (Task(task_id, {"question": question}, "1", "s") for task_id, question in questions)
    check_disjoint(train=[a], test=[], harness=[Task("3", {"question": "Two?"}, "1", "s")])
    with pytest.raises(DataError, match="test '2' and train '1' have the same question"):
        check_disjoint(train=[a], test=[b])
    with pytest.raises(DataError, match="test '1' and train '1' have the same id"):
        check_disjoint(train=[a], test=[c])


def test_verify_cases_reports_misses_and_refuses_bad_files(tmp_path):
    case = {"id": "c", "domain": "math", "reply": r"\boxed{41}", "reference": "42", "expected": 1}
    report = verify_cases("math", write(tmp_path / "a.jsonl", case, case | {"expected": 0}, case | {"domain": "chess"}))
    assert report == {"n": 2, "as_expected": 1,
                      "misses": [{"id": "c", "expected": 1, "got": 0, "why": "boxed '41', which is not the reference"}]}
    for broken, said in ((case | {"domain": "chess"}, "no case of math"), (case | {"reply": 3}, "field 'reply'"),
                         (case | {"expected": 2}, "'expected'")):
        with pytest.raises(DataError, match=said):
            verify_cases("math", write(tmp_path / "b.jsonl", broken))


def test_only_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert load_tasks(write(tmp_path / "a.jsonl", {"question": "q", "answer": "1"}), MathEnv())
