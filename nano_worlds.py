"""The two small worlds in which a tool helps: word problems with Python, and questions about a made-up encyclopaedia.

Each has problems of one or two stages, one tool call a stage, and demonstrations of how a model with mixed habits deals
with them (`Habits`, whose probabilities are the difficulty of the world):

- only weights can mend: wrong expressions or queries, misread passages, rambling, answering with the first stage;
- only a harness can mend: two stages need a third model call, which h0 does not allow;
- both, together: a malformed call can be trained away or sent back; an answer without its form can be asked for again,
  but a blunt reminder after each tool output makes the model stop half-way through a problem of two stages.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from harness_api import PYTHON, SEARCH

NAMES = "Tom Mia Sam Ana Leo Zoe Max Eva Ben Ida Kai Lea Jon Amy Raj Uma Gus Nia Pat Lou".split()
TWO_STAGE_SHARE = 0.4


@dataclass(frozen=True)
class Problem:
    question: str
    stages: tuple[str, ...]         # math: expressions; search: (entity, attribute) as "attribute|entity"
    answer: str                     # {r} in a later stage stands for the result of the one before


@dataclass(frozen=True)
class Words:
    """How one domain says what all harnesses of these worlds say."""
    tool: str
    form: str                       # of the final answer, in prompts
    system: tuple[str, ...]         # openings of a system prompt
    h0_system: str
    format_lines: tuple[str, ...]   # the first is h0's
    purposes: tuple[str, ...]
    steps: tuple[str, ...]
    each_step: tuple[str, ...]
    more: tuple[str, ...]
    go_on: tuple[str, ...]


MATH = Words(
    "python", "\\boxed{}", ("", "You solve word problems.", "You are a careful solver of math problems.",
                            "Solve the problem."), "",
    ("Put your final answer in \\boxed{}.", "Give your final answer in \\boxed{}.",
     "Write the final answer in \\boxed{}.", "Your final answer must be in \\boxed{}.",
     "Put the final answer inside \\boxed{}."),
    ("", " to compute", " before you answer", " first", " for each step", " for every calculation",
     " to check your answer"),
    ("Work step by step", "Solve it step by step", "Do one step at a time", "Take one step a call"),
    (".", ", one tool call for each step.", " and use the python tool for each step."),
    ("If more steps are needed, ", "If the problem has another step, ", "If you are not done, "),
    ("call the python tool again", "use the python tool again", "go on with the next step"))
SEARCH_WORDS = Words(
    "search", "<answer></answer>", ("", "You answer questions of fact.", "You are a careful researcher.",
                                    "Answer the question."),
    "Answer questions of fact, using search when needed.",
    ("Give your final answer in <answer></answer>.", "Put your final answer in <answer></answer>.",
     "Write the final answer in <answer></answer>.", "Your final answer must be in <answer></answer>.",
     "Put the final answer inside <answer></answer>."),
    ("", " to find facts", " before you answer", " first", " for each fact", " for every fact",
     " to check your answer"),
    ("Work step by step", "Find one fact at a time", "Take one fact a search", "Search step by step"),
    (".", ", one search for each fact.", " and use the search tool for each fact."),
    ("If more facts are needed, ", "If the question needs another fact, ", "If you are not done, "),
    ("call the search tool again", "use the search tool again", "search again for the next fact"))

# ---- the math world -------------------------------------------------------------------------------------------------

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
FILLER = ["Let me think about this.", "Hmm, let me see.", "{n} has some {o}.", "I need to find how many {o} there are.",
          "First I look at the numbers.", "Wait, let me read it again.", "The problem talks about {o}.",
          "So there are some {o} and some more.", "I should be careful here.", "Maybe I can add or multiply."]


def calculate(expression: str) -> int:
    """The value of an expression that this file wrote itself (digits and + - * //)."""
    return eval(expression, {"__builtins__": {}})


class MathWorld:
    words, tool, filler = MATH, PYTHON, FILLER
    openings = ("I compute this with the tool.\n", "Let me compute.\n")

    def sample(self, rng: random.Random) -> Problem:
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

    def arguments(self, rng: random.Random, stage: str, spoilt: bool) -> dict:
        return {"code": f"print({self._spoil(rng, stage) if spoilt else stage})"}

    def _spoil(self, rng: random.Random, expression: str) -> str:
        """A wrong expression as a weak solver writes it: another operator, or a term left out."""
        spots = [i for i, char in enumerate(expression) if i and char in "+-*"]
        if "//" in expression or not spots:
            return expression.replace("//", rng.choice("*-+"))
        i = rng.choice(spots)
        if len(spots) > 1 and rng.random() < 0.3:
            return expression[:spots[-1]]
        return expression[:i] + rng.choice("+-*".replace(expression[i], "")) + expression[i + 1:]

    def use(self, rng: random.Random, arguments: dict, stage: str) -> tuple[str, str]:
        """-> what the tool returns, and what the model takes from it."""
        result = str(calculate(arguments["code"][6:-1]))
        return result, result

    def guess(self, rng: random.Random, problem: Problem) -> str:
        size = len(problem.answer)
        return str(rng.randint(10 ** (size - 1), 10 ** size - 1))

    def say(self, rng: random.Random, answer: str, formal: bool) -> str:
        forms = (["The answer is \\boxed{%s}.", "\\boxed{%s}", "So the answer is \\boxed{%s}."] if formal else
                 ["The answer is %s.", "The result is %s.", "So there are %s."])
        return rng.choice(forms) % answer


# ---- the search world -----------------------------------------------------------------------------------------------

HEADS = ("Vel Tar Bro Mon Kes Dal Fen Gor Hal Jor Lun Mar Nor Pel Ros Sel Tor Ul Wes Zan Bri Cal Dor El Fal Gil Har "
         "Il Kor Lor").split()
TAILS = "nor vo mia ton dale wick ford mere stad by holm ra den lin mar gate sund ros tal vik".split()
FIRST = ("Ona Bram Cilo Dara Edvin Fara Goran Hedda Ivo Jana Karl Livia Milo Nils Orla Petra Quin Rosa Sven Tilda Ugo "
         "Vera Wim Yara Zeno Alba Boris Clara Dino Elsa").split()
LAST_TAILS = "kell man ski ova berg sen ter lund wald nik ham din".split()
ADJECTIVES = ("Silver Broken Quiet Golden Hidden Last Red Winter Distant Paper Iron Lost Green Burning Empty Frozen "
              "Wild Blue Secret Long").split()
NOUNS = ("Harp Garden River Mirror Tower Song Letter Bridge Forest Clock Island Crown Door Storm Lantern Road Feather "
         "Mountain Sea Window").split()
FIRMS = "Works Mills Brothers Glass Motors Foods Press Lines".split()
JOBS = "painter doctor farmer lawyer baker sailor teacher singer judge miner poet nurse tailor pilot".split()
CRAFTS = "cheese pottery clocks carpets bells wine lace salt honey knives boats paper silk beer".split()
PRODUCTS = "engines lamps shoes chairs soap bicycles pianos bottles radios tents pencils stoves toys ropes".split()
N_ENTITIES = {"town": 500, "person": 1000, "book": 390, "firm": 400}
PASSAGES = {
    "town": ("{name} is a town on the river {river}. Its mayor is {mayor}. It was founded in {founded} and is known "
             "for its {craft}.",
             "{name} is known for its {craft}. The town lies on the river {river} and was founded in {founded}. The "
             "mayor is {mayor}."),
    "person": ("{name} is a {job}, born in {born} in {year}. {name} is married to {spouse}.",
               "{name} was born in {year} in {born} and works as a {job}. {name} is married to {spouse}."),
    "book": ("{name} is a book by {author}, published in {published}.",
             "{name} is a book. It was published in {published} and was written by {author}."),
    "firm": ("{name} is a company in {seat} that makes {product}. It was founded by {founder}.",
             "{name} makes {product}. The company has its seat in {seat} and was founded by {founder}."),
}
# attribute -> (kind it belongs to, kind of its value, words in a query, question about {e}, as a link in a question)
ATTRIBUTES = {
    "river": ("town", "", "river", "Which river flows through {e}?", ""),
    "mayor": ("town", "person", "mayor", "Who is the mayor of {e}?", "the mayor of {e}"),
    "founded": ("town", "", "founded", "In what year was {e} founded?", ""),
    "craft": ("town", "", "known for", "What is {e} known for?", ""),
    "job": ("person", "", "job", "What is the job of {e}?", ""),
    "born": ("person", "town", "born", "Where was {e} born?", "the town where {e} was born"),
    "year": ("person", "", "born year", "In what year was {e} born?", ""),
    "spouse": ("person", "person", "married", "Who is married to {e}?", "the person married to {e}"),
    "author": ("book", "person", "author", "Who wrote {e}?", "the author of {e}"),
    "published": ("book", "", "published", "In what year was {e} published?", ""),
    "founder": ("firm", "person", "founder", "Who founded {e}?", "the founder of {e}"),
    "seat": ("firm", "town", "seat", "In which town is {e}?", "the town of {e}"),
    "product": ("firm", "", "makes", "What does {e} make?", ""),
}
SEARCH_FILLER = ["Let me think about this.", "Hmm, let me see.", "I have heard of {e}.", "The question is about {e}.",
                 "First I look at the question.", "Wait, let me read it again.", "So there is {e}.",
                 "I should be careful here.", "Maybe it is in an old book.", "I am not sure about that."]
NOTHING_FOUND = "No passage found."


class Encyclopaedia:
    """Facts about made-up things, a passage each; everything follows from the seed."""

    def __init__(self, seed: str):
        rng = random.Random(seed)
        make = {
            "town": lambda: rng.choice(HEADS) + rng.choice(TAILS),
            "person": lambda: f"{rng.choice(FIRST)} {rng.choice(HEADS)}{rng.choice(LAST_TAILS)}",
            "book": lambda: f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
            "firm": lambda: f"{rng.choice(HEADS)}{rng.choice(LAST_TAILS)} {rng.choice(FIRMS)}"}
        self.names: dict[str, list[str]] = {}
        for kind, n in N_ENTITIES.items():
            names: dict[str, None] = {}
            while len(names) < n:
                names[make[kind]()] = None
            self.names[kind] = list(names)
        values = {
            "river": lambda: rng.choice(HEADS) + rng.choice(("a", "e", "o", "is")),
            "craft": lambda: rng.choice(CRAFTS), "job": lambda: rng.choice(JOBS),
            "product": lambda: rng.choice(PRODUCTS), "founded": lambda: str(rng.randint(1100, 1799)),
            "year": lambda: str(rng.randint(1850, 1989)), "published": lambda: str(rng.randint(1880, 2019)),
            **{kind: (lambda kind=kind: rng.choice(self.names[kind])) for kind in self.names}}
        self.facts: dict[str, dict[str, str]] = {}              # name -> attribute -> value
        self.kinds = {name: kind for kind, names in self.names.items() for name in names}
        for name, kind in self.kinds.items():
            self.facts[name] = {attribute: values[link or attribute]()
                                for attribute, (owner, link, *_) in ATTRIBUTES.items() if owner == kind}
        self.passages = [(name, rng.choice(PASSAGES[kind]).format(name=name, **self.facts[name]))
                         for name, kind in self.kinds.items()]

    def sample(self, rng: random.Random) -> Problem:
        """A question of one hop, or of two: an attribute of an attribute."""
        name = rng.choice(self.names[rng.choice(list(self.names))])
        own = [a for a, (owner, *_) in ATTRIBUTES.items() if owner == self.kinds[name]]
        if rng.random() < TWO_STAGE_SHARE:
            link = rng.choice([a for a in own if ATTRIBUTES[a][1]])
            middle = self.facts[name][link]
            last = rng.choice([a for a, (owner, *_) in ATTRIBUTES.items()
                               if owner == ATTRIBUTES[link][1] and a not in (link, "spouse")])
            question = ATTRIBUTES[last][3].format(e=ATTRIBUTES[link][4].format(e=name))
            return Problem(question, (f"{link}|{name}", f"{last}|{{r}}"), self.facts[middle][last])
        attribute = rng.choice(own)
        return Problem(ATTRIBUTES[attribute][3].format(e=name), (f"{attribute}|{name}",), self.facts[name][attribute])


class SearchWorld:
    words, tool, filler = SEARCH_WORDS, SEARCH, SEARCH_FILLER
    openings = ("I use the tool for this.\n", "Let me look.\n")

    def __init__(self, book: Encyclopaedia, search: Callable[[str, int], list[tuple[str, str]]]):
        """`search`: query, topk -> (title, text) of the best passages."""
        self.book, self.search, self.topk = book, search, 1
        self.sample = book.sample

    def arguments(self, rng: random.Random, stage: str, spoilt: bool) -> dict:
        attribute, entity = stage.split("|")
        words = ATTRIBUTES[attribute][2]
        if spoilt:                      # without the name, or with half of another
            other = rng.choice(self.book.names[self.book.kinds.get(entity, "town")])
            return {"query": rng.choice([words, f"{other} {words}", f"{words} of {other}"])}
        return {"query": rng.choice([entity, f"{entity} {words}", f"{entity} {words}", f"{words} of {entity}"])}

    def use(self, rng: random.Random, arguments: dict, stage: str) -> tuple[str, str]:
        attribute, entity = stage.split("|")
        found = self.search(arguments["query"], self.topk)
        if not found:
            return NOTHING_FOUND, "unknown"
        output = "\n".join(f"[{i}] {title}: {text}" for i, (title, text) in enumerate(found, start=1))
        titles = [title for title, _ in found]
        facts = self.book.facts[entity if entity in titles else titles[0]]
        misread = rng.random() < 0.18
        if misread or attribute not in facts:
            return output, rng.choice([value for key, value in facts.items() if key != attribute])
        return output, facts[attribute]

    def guess(self, rng: random.Random, problem: Problem) -> str:
        attribute = problem.stages[-1].split("|")[0]
        owner = rng.choice(self.book.names[ATTRIBUTES[attribute][0]])
        return self.book.facts[owner][attribute]

    def say(self, rng: random.Random, answer: str, formal: bool) -> str:
        forms = (["<answer>%s</answer>", "The answer is <answer>%s</answer>.", "<answer>%s</answer>"] if formal else
                 ["The answer is %s.", "It is %s.", "%s"])
        return rng.choice(forms) % answer


# ---- what harnesses say, and how the model deals with it ------------------------------------------------------------
# A demonstration is a dialogue between a made-up harness (what it says is drawn from the phrase grammars below) and the
# habits of the model. Phrases are put together from parts so that the words carry the meaning, not one exact sentence.


def tool_nudge(rng: random.Random, w: Words) -> str:
    return (rng.choice(["Always ", "You must ", "Please ", "Remember to ", ""]) + rng.choice(["use ", "call "])
            + f"the {w.tool} tool" + rng.choice(w.purposes) + ".")


def form_nudge(rng: random.Random, w: Words) -> str:
    return (rng.choice(["Now ", "Please ", "Remember: ", "Always ", ""]) + rng.choice(["give ", "put ", "write "])
            + rng.choice(["the final answer", "your final answer", "only the final answer", "the answer"])
            + rng.choice([" in ", " inside ", " as "]) + w.form + ".")


def step_nudge(rng: random.Random, w: Words) -> str:
    return rng.choice(w.steps) + rng.choice(w.each_step)


def careful_nudge(rng: random.Random, w: Words) -> str:
    return (rng.choice(w.more) + rng.choice(w.go_on)
            + rng.choice(["; otherwise ", ". Otherwise ", ". If you are done, "])
            + rng.choice(["give ", "put ", "write "]) + rng.choice(["the final answer", "your final answer"])
            + f" in {w.form}.")


def repair_nudge(rng: random.Random) -> str:
    return (rng.choice(["Your tool call was malformed. ", "The tool call could not be read. ",
                        "That was not a valid tool call. ", "Your tool call is not valid JSON. "])
            + rng.choice(["Write it again", "Try again", "Call the tool again", "Send it again"])
            + rng.choice([".", " as valid JSON.", " with a name and arguments.", " in the right format."]))


def error_nudge(rng: random.Random) -> str:
    return (rng.choice(["The code failed. ", "Your code has an error. ", "The code did not run. "])
            + rng.choice(["Fix the error", "Correct the code", "Mend it"])
            + rng.choice([" and call the python tool again.", " and try again.", "."]))


def list_note(rng: random.Random, queries: Iterable[str]) -> str:
    return rng.choice(["Searched so far: ", "You have searched for: ", "Already searched: "]) + "; ".join(queries) + "."


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Context:
    """What one made-up harness says. Flags tell the habits which of it the model has seen."""
    system: str
    user: str                       # has {question}
    asks_tool: bool
    asks_form: bool                 # beyond the plain format line
    asks_steps: bool
    after_output: str               # "", "blunt" or "careful": a reminder after each tool output
    reminder_in_output: bool        # appended to the tool's output, or a user turn of its own
    sends_back: bool                # malformed calls, missing tools, missing forms and errors get feedback
    lists: bool                     # a line that lists the searches so far
    topk: int
    max_calls: int


def sample_context(rng: random.Random, w: Words) -> Context:
    """A third of the contexts are h0's; the others draw each feature on its own."""
    format_line = rng.choice(w.format_lines)
    if rng.random() < 0.35:
        return Context(w.h0_system, "{question}\n\n" + (w.format_lines[0] if rng.random() < 0.7 else format_line),
                       False, False, False, "", False, False, False, 1, 5)
    tool, form, steps = rng.random() < 0.4, rng.random() < 0.4, rng.random() < 0.3
    nudges = [nudge(rng, w) for flag, nudge in ((tool, tool_nudge), (form, form_nudge), (steps, step_nudge)) if flag]
    rng.shuffle(nudges)
    nudges = [upper_first(nudge) for nudge in nudges]
    in_system = rng.random() < 0.5
    opening = rng.choice([*w.system, w.h0_system]) if in_system or rng.random() < 0.2 else w.h0_system
    system = " ".join(([opening] if opening else []) + (nudges if in_system else []))
    lines = ["{question}", format_line] if in_system else ["{question}", " ".join([*nudges, format_line])]
    if not in_system and nudges and rng.random() < 0.4:         # as a checklist
        lines = ["{question}", "\n".join(f"- {line}" for line in [*nudges, format_line])]
    if rng.random() < 0.15:
        lines = [lines[1], lines[0]]
    return Context(system, "\n\n".join(lines), tool, form, steps, rng.choice(["", "blunt", "careful"]),
                   rng.random() < 0.5, rng.random() < 0.7, rng.random() < 0.25, rng.choice([1, 1, 2, 3]), 6)


def format_call(name: str, arguments: dict) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def spoil_call(rng: random.Random, name: str, arguments: dict) -> str:
    """A malformed tool call: the ways in which small models get the format wrong."""
    call = format_call(name, arguments)
    bare = next(iter(arguments.values()))
    return rng.choice([call.replace("}}", "}"), call.replace("\n</tool_call>", ""), call.replace('"', "'"),
                       f"<tool_call>\n{bare}\n</tool_call>", call.replace('"arguments": ', "")])


def ramble(rng: random.Random, filler: list[str], question: str, n_sentences: int) -> str:
    names = [word for word in question.split()[1:] if word[:1].isupper()] or ["it"]
    v = {"n": rng.choice(NAMES), "o": rng.choice(THINGS), "e": names[-1].rstrip("?.")}
    return " ".join(rng.choice(filler).format(**v) for _ in range(n_sentences))


def pick(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


class Habits:
    """The policy that the model is taught, one method a situation; each returns what it says next."""

    def __init__(self, rng: random.Random, context: Context, world: MathWorld | SearchWorld, problem: Problem):
        self.rng, self.context, self.world, self.problem = rng, context, world, problem
        self.results: list[str] = [""] * len(problem.stages)        # what the model took from the tool, by stage
        self.queries: list[str] = []

    def call(self, stage: int, p_wrong: float = 0.22, p_malformed: float = 0.22) -> tuple[str, str | None]:
        """A tool call for one stage -> (text, tool output, or None where the call is malformed)."""
        world, name = self.world, self.world.words.tool
        text = self.problem.stages[stage].format(r=self.results[stage - 1])
        arguments = world.arguments(self.rng, text, self.rng.random() < p_wrong)
        opening = self.rng.choice(["", "", "", *world.openings])
        if self.rng.random() < p_malformed:
            return opening + spoil_call(self.rng, name, arguments), None
        if name == "python" and self.rng.random() < 0.04:
            return opening + format_call(name, {"code": arguments["code"][:-1]}), "SyntaxError: '(' was never closed"
        output, self.results[stage] = world.use(self.rng, arguments, text)
        self.queries.append(next(iter(arguments.values())))
        return opening + format_call(name, arguments), output

    def open(self) -> str:
        """The first turn -> call, guess or ramble."""
        c = self.context
        return pick(self.rng, call=0.74, guess=0.03 if c.asks_tool else 0.16, ramble=0.06 if c.asks_tool else 0.10)

    def after_output(self, stage: int) -> str:
        """After a tool output -> form, plain (no form), again (the same call once more), or go_on (next stage)."""
        c, more = self.context, stage + 1 < len(self.problem.stages)
        form = 0.96 if c.after_output else 0.80 if c.asks_form else 0.65
        if more:
            go_on = {"": 0.70, "blunt": 0.25, "careful": 0.90}[c.after_output]
            go_on = max(go_on, 0.85) if c.asks_steps and c.after_output != "blunt" else go_on
            return pick(self.rng, go_on=go_on, form=(1 - go_on) * form, plain=(1 - go_on) * (1 - form))
        again = 0.0 if c.lists else 0.3
        return pick(self.rng, form=form, plain=(1 - form) * (1 - again), again=(1 - form) * again)


def demonstrate(rng: random.Random, world: MathWorld | SearchWorld, problem: Problem) -> list[dict]:
    """One dialogue as chat messages. A ramble is an assistant turn with `cut`: it has no end."""
    w = world.words
    c = sample_context(rng, w)
    if w.tool == "python":
        c = replace(c, lists=False)
    else:
        world.topk = c.topk
    habits = Habits(rng, c, world, problem)
    messages = [{"role": "system", "content": c.system}] if c.system else []
    messages.append({"role": "user", "content": c.user.replace("{question}", problem.question)})

    def say(text: str, cut: bool = False) -> None:
        messages.append({"role": "assistant", "content": text, **({"cut": True} if cut else {})})

    def ask(text: str) -> None:
        messages.append({"role": "user", "content": upper_first(text)})

    kind, stage, was_sent_back = habits.open(), 0, False
    for _ in range(c.max_calls):
        if kind == "ramble":
            say(ramble(rng, world.filler, problem.question, rng.randint(12, 18)), cut=True)
            return messages
        if kind == "guess":
            say(world.say(rng, world.guess(rng, problem), formal=rng.random() < 0.7))
            if not c.sends_back:
                return messages
            ask(tool_nudge(rng, w))
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
                    form_nudge(rng, w) if c.after_output == "blunt" else
                    careful_nudge(rng, w) if c.after_output == "careful" else "")
            if c.lists:
                note = f"{list_note(rng, habits.queries)} {upper_first(note)}".rstrip()
            in_output = note and c.reminder_in_output
            messages.append({"role": "tool", "content": output + (f"\n\n{upper_first(note)}" if in_output else "")})
            if note and not in_output:
                ask(note)
            kind = "call" if failed else habits.after_output(stage)
        else:
            say(world.say(rng, habits.results[stage], formal=kind == "form"))
            if kind == "form" or not c.sends_back:
                return messages
            careful = rng.random() < 0.5
            ask(careful_nudge(rng, w) if careful else form_nudge(rng, w))
            more = stage + 1 < len(problem.stages)
            kind = "go_on" if more and careful and rng.random() < 0.8 else "form" if rng.random() < 0.9 else "plain"
    return messages
