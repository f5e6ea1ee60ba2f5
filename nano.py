"""Builds the embedded model and its data from nothing: `python nano.py`.

It takes about 20 minutes on two idle cores, an estimate from its rate.

Writes embedded/model/ (a Qwen3-architecture causal LM in HF format with its own tokenizer and ChatML template) and
embedded/math/{train,harness,test}.jsonl. The model is trained from random weights to imitate demonstrations that this
file makes up: word problems solved with a Python tool, in many phrasings of prompts and feedback.

As with a real base model, its habits are mixed on purpose, and this file is where they are mixed (`Habits`):
- only weights can mend: wrong expressions, rambling to the token limit, boxing an intermediate result;
- only a harness can mend: problems of two stages need two tool calls, so a third model call, which h0 does not allow;
- both, together: a malformed call can be trained away or sent back; an answer that is not boxed can be asked for again,
  but a blunt reminder after each tool output makes the model stop half-way through a two-stage problem.

Nothing but this file knows that the model is small. It shows the mechanism; it is no evidence about real models.

    python nano.py                      data, tokenizer, model, into embedded/
    python nano.py --show 5             print five demonstrations and stop
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness_api import PYTHON

ROOT = Path(__file__).resolve().parent / "embedded"
SPLITS = {"train": 2048, "harness": 256, "test": 256}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]                     # id 0 pads, 2 ends a turn
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 1024

# ChatML with tools, the shape of Qwen's template: tools in the system turn, tool results in a user turn.
CHAT_TEMPLATE = r"""
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if first or tools -%}
{{- '<|im_start|>system\n' -}}
{%- if first %}{{ first.content }}{% endif -%}
{%- if tools -%}
{%- if first %}{{ '\n\n' }}{% endif -%}
{{- '# Tools' -}}
{%- for tool in tools -%}
{%- set names = tool.function.parameters.properties | join(', ') -%}
{{- '\n' + tool.function.name + '(' + names + '): ' + tool.function.description -}}
{%- endfor -%}
{{- '\nCall: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

# ---- the math world -------------------------------------------------------------------------------------------------

NAMES = "Tom Mia Sam Ana Leo Zoe Max Eva Ben Ida Kai Lea Jon Amy Raj Uma Gus Nia Pat Lou".split()
THINGS = "apples pens books coins cards shells cups stones eggs pears hats keys bells balls cakes plums".split()
DAYS = "Monday Tuesday Friday Sunday".split()

# One stage: (text, expression). a, b: 2-99; c, d: 2-12; e: 2-40. {m} is a*c, so that shares come out even.
ONE_STAGE = [
    ("{n} has {a} {o} and buys {b} more. How many {o} does {n} have now?", "{a}+{b}"),
    ("{n} had {a} {o} and gave {b} to a friend. How many {o} does {n} have left?", "{a}-{b}"),
    ("{n} packs {c} bags with {a} {o} each. How many {o} are in the bags?", "{c}*{a}"),
    ("{n} packs {c} bags with {a} {o} each and loses {e}. How many {o} are left?", "{c}*{a}-{e}"),
    ("{n} has {a} {o}. Each of {c} friends brings {e} more. How many {o} are there in all?", "{a}+{c}*{e}"),
    ("{n} shares {m} {o} equally among {c} friends. How many {o} does each friend get?", "{m}//{c}"),
    ("{n} found {a} {o} on {y} and {b} on the next day, then lost {e}. How many {o} are left?", "{a}+{b}-{e}"),
    ("A box holds {a} {o} and a bag holds {e}. How many {o} are in {c} boxes and {d} bags?", "{a}*{c}+{e}*{d}"),
]
# Two stages: (text, first expression, second expression, where {r} is the first result).
TWO_STAGES = [
    ("{n} fills {c} boxes with {a} {o} each, but {e} of the {o} break. Each of the others is sold for {d} coins. "
     "How many coins does {n} earn?", "{c}*{a}-{e}", "{r}*{d}"),
    ("{n} had {a} {o} and found {b} more on {y}. All of them go into bags, and a friend brings {c} times as many. "
     "After giving away {e}, how many {o} does the friend have?", "{a}+{b}", "{r}*{c}-{e}"),
    ("There are {c} shelves with {a} {o} each and {d} shelves with {e} {o} each. Then {b} new {o} arrive and "
     "{n} counts all. How many {o} does {n} count?", "{c}*{a}+{d}*{e}", "{r}+{b}"),
    ("{n} buys {m} {o} and packs them evenly into {c} crates. A truck carries {d} such crates and {e} loose {o}. "
     "How many {o} are on the truck?", "{m}//{c}", "{r}*{d}+{e}"),
]
TWO_STAGE_SHARE = 0.4


@dataclass(frozen=True)
class Problem:
    question: str
    expressions: tuple[str, ...]    # one a stage; {r} in a later one stands for the earlier result
    answer: str


def calculate(expression: str) -> int:
    """The value of an expression that this file wrote itself (digits and + - * //)."""
    return eval(expression, {"__builtins__": {}})


def sample_problem(rng: random.Random) -> Problem:
    """One word problem; all its intermediate results are positive integers."""
    while True:
        v = {"n": rng.choice(NAMES), "o": rng.choice(THINGS), "y": rng.choice(DAYS), "a": rng.randint(2, 99),
             "b": rng.randint(2, 99), "c": rng.randint(2, 12), "d": rng.randint(2, 12), "e": rng.randint(2, 40)}
        v["m"] = v["a"] * v["c"]
        text, *stages = rng.choice(TWO_STAGES if rng.random() < TWO_STAGE_SHARE else ONE_STAGE)
        expressions, result, values = [], None, []
        for stage in stages:
            expressions.append(stage.replace("{r}", "R").format(**v).replace("R", "{r}"))
            result = calculate(expressions[-1].format(r=result))
            values.append(result)
        if min(values) > 0:
            return Problem(text.format(**v), tuple(expressions), str(result))


def sample_problems(rng: random.Random, n: int, taken: set[str]) -> list[Problem]:
    problems = []
    while len(problems) < n:
        problem = sample_problem(rng)
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
    return problems


def write_data(folder: Path) -> set[str]:
    """Writes the three splits, disjoint by question; returns their questions, which no demonstration uses."""
    taken: set[str] = set()
    (folder / "math").mkdir(parents=True, exist_ok=True)
    for split, n in SPLITS.items():
        rows = [{"id": f"math-{split}-{i:04d}", "question": p.question, "answer": p.answer, "source": "nano-math"}
                for i, p in enumerate(sample_problems(random.Random(f"math {split}"), n, taken))]
        (folder / "math" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return taken


# ---- demonstrations -------------------------------------------------------------------------------------------------
# A demonstration is a dialogue between a made-up harness (what it says is drawn from the phrase grammars below) and the
# habits of the model. Phrases are put together from parts so that the words carry the meaning, not one exact sentence.

FORMAT_LINES = ["Put your final answer in \\boxed{}.", "Give your final answer in \\boxed{}.",
                "Write the final answer in \\boxed{}.", "Your final answer must be in \\boxed{}.",
                "Put the final answer inside \\boxed{}."]


def tool_nudge(rng: random.Random) -> str:
    return (rng.choice(["Always ", "You must ", "Please ", "Remember to ", ""]) + rng.choice(["use ", "call "])
            + "the python tool" + rng.choice(["", " to compute", " before you answer", " first", " for each step",
                                              " for every calculation", " to check your answer"]) + ".")


def box_nudge(rng: random.Random) -> str:
    return (rng.choice(["Now ", "Please ", "Remember: ", "Always ", ""]) + rng.choice(["give ", "put ", "write "])
            + rng.choice(["the final answer", "your final answer", "only the final answer", "the answer"])
            + rng.choice([" in ", " inside ", " as "]) + "\\boxed{}.")


def step_nudge(rng: random.Random) -> str:
    return rng.choice(["Work step by step", "Solve it step by step", "Do one step at a time", "Take one step a call"]) \
        + rng.choice([".", ", one tool call for each step.", " and use the python tool for each step."])


def careful_nudge(rng: random.Random) -> str:
    return (rng.choice(["If more steps are needed, ", "If the problem has another step, ", "If you are not done, "])
            + rng.choice(["call the python tool again", "use the python tool again", "go on with the next step"])
            + rng.choice(["; otherwise ", ". Otherwise ", ". If you are done, "])
            + rng.choice(["give ", "put ", "write "]) + rng.choice(["the final answer", "your final answer"])
            + " in \\boxed{}.")


def repair_nudge(rng: random.Random) -> str:
    return (rng.choice(["Your tool call was malformed. ", "The tool call could not be read. ",
                        "That was not a valid tool call. ", "Your tool call is not valid JSON. "])
            + rng.choice(["Write it again", "Try again", "Call the tool again", "Send it again"])
            + rng.choice([".", " as valid JSON.", " with a name and arguments.", " in the right format."]))


def error_nudge(rng: random.Random) -> str:
    return (rng.choice(["The code failed. ", "Your code has an error. ", "The code did not run. "])
            + rng.choice(["Fix the error", "Correct the code", "Mend it"])
            + rng.choice([" and call the python tool again.", " and try again.", "."]))


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Context:
    """What one made-up harness says. Flags tell the habits which of it the model has seen."""
    system: str
    user: str                       # has {question}
    asks_tool: bool
    asks_box: bool                  # beyond the plain format line
    asks_steps: bool
    after_output: str               # "", "blunt" or "careful": a reminder after each tool output
    reminder_in_output: bool        # appended to the tool's output, or a user turn of its own
    sends_back: bool                # malformed calls, missing tools, missing boxes and errors get feedback
    max_calls: int


def sample_context(rng: random.Random) -> Context:
    """A third of the contexts are h0's; the others draw each feature on its own."""
    format_line = rng.choice(FORMAT_LINES)
    if rng.random() < 0.35:
        return Context("", "{question}\n\n" + (FORMAT_LINES[0] if rng.random() < 0.7 else format_line),
                       False, False, False, "", False, False, 5)
    tool, box, steps = rng.random() < 0.4, rng.random() < 0.4, rng.random() < 0.3
    nudges = [nudge(rng) for flag, nudge in ((tool, tool_nudge), (box, box_nudge), (steps, step_nudge)) if flag]
    rng.shuffle(nudges)
    nudges = [upper_first(nudge) for nudge in nudges]
    in_system = rng.random() < 0.5
    opening = rng.choice(["", "You solve word problems.", "You are a careful solver of math problems.",
                          "Solve the problem."]) if in_system or rng.random() < 0.2 else ""
    system = " ".join(([opening] if opening else []) + (nudges if in_system else []))
    lines = ["{question}", format_line] if in_system else ["{question}", " ".join([*nudges, format_line])]
    if not in_system and nudges and rng.random() < 0.4:         # as a checklist
        lines = ["{question}", "\n".join(f"- {line}" for line in [*nudges, format_line])]
    if rng.random() < 0.15:
        lines = [lines[1], lines[0]]
    return Context(system, "\n\n".join(lines), tool, box, steps, rng.choice(["", "blunt", "careful"]),
                   rng.random() < 0.5, rng.random() < 0.7, 6)


def spoil_expression(rng: random.Random, expression: str) -> str:
    """A wrong expression as a weak solver writes it: another operator, or a term left out."""
    spots = [i for i, char in enumerate(expression) if i and char in "+-*"]
    if "//" in expression or not spots:
        return expression.replace("//", rng.choice("*-+"))
    i = rng.choice(spots)
    if len(spots) > 1 and rng.random() < 0.3:
        return expression[:spots[-1]]
    return expression[:i] + rng.choice("+-*".replace(expression[i], "")) + expression[i + 1:]


def format_call(code: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": code}}) + "\n</tool_call>"


def spoil_call(rng: random.Random, code: str) -> str:
    """A malformed tool call: the ways in which small models get the format wrong."""
    call = format_call(code)
    return rng.choice([call.replace("}}", "}"), call.replace("\n</tool_call>", ""), call.replace('"', "'"),
                       f"<tool_call>\n{code}\n</tool_call>", call.replace('"arguments": ', "")])


FILLER = ["Let me think about this.", "Hmm, let me see.", "{n} has some {o}.", "I need to find how many {o} there are.",
          "First I look at the numbers.", "Wait, let me read it again.", "The problem talks about {o}.",
          "So there are some {o} and some more.", "I should be careful here.", "Maybe I can add or multiply."]


def ramble(rng: random.Random, n_sentences: int) -> str:
    v = {"n": rng.choice(NAMES), "o": rng.choice(THINGS)}
    return " ".join(rng.choice(FILLER).format(**v) for _ in range(n_sentences))


def pick(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


class Habits:
    """The policy that the model is taught, one method a situation; each returns what it says next. The probabilities
    are the difficulty of the embedded world."""

    def __init__(self, rng: random.Random, context: Context, problem: Problem):
        self.rng, self.context, self.problem = rng, context, problem
        self.results: list[int | None] = [None] * len(problem.expressions)     # what the tool printed, by stage

    def call(self, stage: int, p_wrong: float = 0.22, p_malformed: float = 0.22) -> tuple[str, str | None]:
        """A tool call for one stage -> (text, tool output, or None where the call is malformed)."""
        expression = self.problem.expressions[stage].format(r=self.results[stage - 1])
        if self.rng.random() < p_wrong:
            expression = spoil_expression(self.rng, expression)
        code = f"print({expression})"
        opening = self.rng.choice(["", "", "", "I compute this with the tool.\n", "Let me compute.\n"])
        if self.rng.random() < p_malformed:
            return opening + spoil_call(self.rng, code), None
        if self.rng.random() < 0.04:
            return opening + format_call(code[:-1]), "SyntaxError: '(' was never closed"
        self.results[stage] = calculate(expression)
        return opening + format_call(code), str(self.results[stage])

    def open(self) -> str:
        """The first turn -> call, guess or ramble."""
        c = self.context
        return pick(self.rng, call=0.74, guess=0.03 if c.asks_tool else 0.16, ramble=0.06 if c.asks_tool else 0.10)

    def after_output(self, stage: int) -> str:
        """After a tool output -> box, plain (no box), again (the same call once more), or go_on (next stage)."""
        c, more = self.context, stage + 1 < len(self.problem.expressions)
        box = 0.96 if c.after_output else 0.80 if c.asks_box else 0.65
        if more:
            go_on = {"": 0.70, "blunt": 0.25, "careful": 0.90}[c.after_output]
            go_on = max(go_on, 0.85) if c.asks_steps and c.after_output != "blunt" else go_on
            return pick(self.rng, go_on=go_on, box=(1 - go_on) * box, plain=(1 - go_on) * (1 - box))
        return pick(self.rng, box=box, plain=(1 - box) * 0.7, again=(1 - box) * 0.3)

    def answer(self, number: int | str, boxed: bool) -> str:
        if boxed:
            form = self.rng.choice(["The answer is \\boxed{%s}.", "\\boxed{%s}", "So the answer is \\boxed{%s}."])
            return form % number
        return self.rng.choice(["The answer is %s.", "The result is %s.", "So there are %s."]) % number


def demonstrate(rng: random.Random, problem: Problem) -> list[dict]:
    """One dialogue as chat messages. A ramble is an assistant turn with `cut`: it has no end."""
    c = sample_context(rng)
    habits = Habits(rng, c, problem)
    messages = [{"role": "system", "content": c.system}] if c.system else []
    messages.append({"role": "user", "content": c.user.replace("{question}", problem.question)})

    def say(text: str, cut: bool = False) -> None:
        messages.append({"role": "assistant", "content": text, **({"cut": True} if cut else {})})

    def ask(text: str) -> None:
        messages.append({"role": "user", "content": upper_first(text)})

    kind, stage, was_sent_back = habits.open(), 0, False
    for _ in range(c.max_calls):
        if kind == "ramble":
            say(ramble(rng, rng.randint(12, 18)), cut=True)
            return messages
        if kind == "guess":
            size = len(problem.answer)
            boxed = rng.random() < 0.7
            say(habits.answer(rng.randint(10 ** (size - 1), 10 ** size - 1), boxed))
            if not c.sends_back:
                return messages
            ask(tool_nudge(rng))
            kind = "call" if rng.random() < 0.85 else "guess"
        elif kind in ("call", "go_on", "again"):
            stage += kind == "go_on"
            text, output = habits.call(stage) if not was_sent_back else habits.call(stage, p_malformed=0.08)
            say(text)
            if output is None:
                if not c.sends_back:
                    return messages
                ask(repair_nudge(rng))
                was_sent_back, kind = True, "call"
                continue
            was_sent_back = False
            failed = output.startswith("SyntaxError")
            note = (error_nudge(rng) if failed and c.sends_back else "" if failed else
                    box_nudge(rng) if c.after_output == "blunt" else
                    careful_nudge(rng) if c.after_output == "careful" else "")
            in_output = note and c.reminder_in_output
            messages.append({"role": "tool", "content": output + (f"\n\n{upper_first(note)}" if in_output else "")})
            if note and not in_output:
                ask(note)
            kind = "call" if failed else habits.after_output(stage)
        else:
            say(habits.answer(habits.results[stage], boxed=kind == "box"))
            if kind == "box" or not c.sends_back:
                return messages
            careful = rng.random() < 0.5
            ask(careful_nudge(rng) if careful else box_nudge(rng))
            more = stage + 1 < len(problem.expressions)
            kind = "go_on" if more and careful and rng.random() < 0.8 else "box" if rng.random() < 0.9 else "plain"
    return messages


# ---- tokenizer and model --------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str]):
    """Byte-level BPE with single digits, so that numbers are copied and never looked up."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS), special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens(TAGS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[SPECIAL[1]], clean_up_tokenization_spaces=False, model_max_length=2048)


@lru_cache
def untrained_tokenizer():
    """Renders the chat template before there is a vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)


def render(tokenizer, messages: list[dict]) -> list[tuple[str, bool]]:
    """A dialogue as (text, is the model's own) pieces; their concatenation is the template's own rendering."""
    pieces, done = [], ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tools=[PYTHON], tokenize=False, add_generation_prompt=True)
        said = message["content"] + ("" if message.get("cut") else "<|im_end|>")
        pieces += [(prompt[len(done):], False), (said, True)]
        done = prompt + said
    return pieces


def encode(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """-> ids (T,), mask (T,): True where the token is the model's own."""
    ids, mask = [], []
    for text, own in render(tokenizer, messages):
        piece = tokenizer(text, add_special_tokens=False).input_ids
        ids += piece
        mask += [own] * len(piece)
    return ids, mask


def train_model(tokenizer, taken: set[str], n_steps: int, folder: Path) -> None:
    """Imitates fresh demonstrations with a one-cycle learning rate; saves in bfloat16."""
    import torch
    from rich.progress import track
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=160, intermediate_size=448, num_hidden_layers=4, num_attention_heads=5,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {n_steps} steps")
    peak, batch = 3e-3, 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    rng, start = random.Random("demonstrations"), time.monotonic()
    for step in track(range(n_steps), "training"):
        rows = []
        while len(rows) < batch:
            problem = sample_problem(rng)
            if problem.question not in taken:
                rows.append(encode(tokenizer, demonstrate(rng, problem)))
        rows.sort(key=lambda row: len(row[0]))
        n_supervised = sum(sum(mask) for _, mask in rows)
        for half in (rows[:batch // 2], rows[batch // 2:]):         # two micro-batches: less padding
            width = max(len(ids) for ids, _ in half)
            x = torch.zeros(len(half), width, dtype=torch.long)
            y = torch.full((len(half), width), -100)
            for i, (ids, mask) in enumerate(half):
                x[i, :len(ids)] = torch.tensor(ids)
                y[i, :len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
            # causal, so pads on the right are inert
            hidden = model.model(input_ids=x, use_cache=False).last_hidden_state[:, :-1]
            own = y[:, 1:] != -100
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[own]), y[:, 1:][own], reduction="sum")
            (loss / n_supervised).backward()
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / n_steps))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}  loss of the last half {loss.item() / sum(sum(m) for _, m in half):.3f}  "
                  f"{time.monotonic() - start:.0f} s", flush=True)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--show", type=int, default=0, help="print so many demonstrations and stop")
    args = parser.parse_args()
    taken = write_data(args.out)
    rng = random.Random("tokenizer")
    demos = [demonstrate(rng, sample_problem(rng)) for _ in range(3000)]
    texts = ["".join(text for text, _ in render(untrained_tokenizer(), demo)) for demo in demos]
    if args.show:
        print("\n\n=====\n".join(texts[:args.show]))
        return
    tokenizer = train_tokenizer(iter(texts))
    lengths = [len(encode(tokenizer, demo)[0]) for demo in demos[:200]]
    print(f"{len(tokenizer)} tokens in the vocabulary; a demonstration has {sum(lengths) / len(lengths):.0f}")
    train_model(tokenizer, taken, args.steps, args.out / "model")


if __name__ == "__main__":
    main()
