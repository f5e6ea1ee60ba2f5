r"""When are two answers of a math problem the same? Own exact code: no float, no eval, no algebra package.

The same verdict in every thread, in bounded time, whatever the model wrote. Both texts become trees: groups (list,
pair, equation, ...) over leaves (numbers, algebra, words). What we decided:
- Text up to the last `</think>`, after an unclosed `<think>` or in a `<tool_call>` is no answer. The last box counts,
  empty or unclosed too.
- Numbers go by value: 42 = 042 = 42.0 = 84/2 = 4.2e1, 1\frac12 = 3/2 (mixed, no product), 70,000 = 70{,}000 = 70\,000;
  digits of any script. Nothing is rounded: 0.333 is not 1/3. A base is part of a number: 52_8 is not 52. A ratio
  or a time is a string.
- A unit, degree, % or currency on one side only is passed over; on both it must be the same: 50 is 50\%, 0.5 is not.
  Words that change the value are no units (5 million, 2 dozen).
- Plain algebra goes by value, in any order, a fraction split or not. Work left to do is not done here: 42 is not 40+2
  or 6\cdot7, and x^2-1 is not (x-1)(x+1), else echoing "compute", "expand", "factor" would pay. Roots are symbols:
  \sqrt{12} is not 2\sqrt{3}. The rest (\ln, \sum, 2^n, 5!) must match as a string, white space aside.
- Lists, sets and unions match unordered and in full: an extra candidate fails. `and`, `or`, `;` are commas, {5} is 5,
  1 \pm 2 is a list of two. Points, intervals and matrices are ordered; brackets count, but for those of matrices.
- `x = 42` is 42 if one side has no name. Other equations go up to a constant factor. A chain a = b = c is a hedge.
- Words ignore case (Yes, yes); single letters do not; choice (B) is B.

Differs from the paper: its strict match compares strings, and reads the last 100 characters only.
"""

import hashlib
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_ANSWER_CHARS, MAX_ALGEBRA_CHARS, MAX_DEPTH, MAX_DIGITS, MAX_POWER = 2000, 400, 24, 75, 1000
SYMBOLS = str.maketrans({"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
                         "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ",
                         "²": "^2", "³": "^3", "，": ","})
REWRITES = [(re.compile(pattern.replace("END", "(?![A-Za-z])")), spelling) for pattern, spelling in (
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)END", ""),
    (r"(?<=\d)(?:,\\!|\{,\}|\\[,; !]|~| )(?=\d{3}(?![\d/]))", ""),             # thousands, but for the plain comma
    (r"(?<!\\)\\[,;:! ]|~|\\q?quadEND|\s", " "),
    (r"(?<!\\)(?:\\[()\[\]]|\$)", ""),                                         # maths mode
    (r"\\(?=[$%])", ""),
    (r"\\[dtc]fracEND", r"\\frac"),
    (r"\^ ?(?:\\circEND|\{ ?\\circ ?\})|\\degrees?END", "°"),
    (r"\\(?:times|cdot)END", "*"), (r"\\divEND", "/"), (r"\*\*", "^"),
    (r"<=|\\leq(?:slant)?END", r"\\le "), (r">=|\\geq(?:slant)?END", r"\\ge "), (r"!=|\\neqEND", r"\\ne "))]
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname) ?\{([^{}]*)\}")
WORDS = re.compile(r"(?! *(?:and|or) *$)[a-z ./]+", re.IGNORECASE)
UNIT = re.compile(r'(.*[\d)}\]°])(?: *"([^"]+)"| ([A-Za-z.]+(?: [A-Za-z.]+){0,3})) *(?:\^ ?\{? ?([23]) ?\}?)?')
UNIT_NAMES = {"degree": "°", "percent": "%", "dollar": "$"}
SHORT_UNITS = set("cm mm km kg mg lb lbs oz ft yd mi hr hrs min sec ml mph am pm".split())
NOT_UNITS = set("not no dozen hundred thousand million billion trillion third thirds squared cubed mod base".split())
NAME = re.compile(r"\\?[A-Za-z]+(?:_\w)?(?:\([a-z]\))?")
LISTS, RELATIONS = {",", ";", "and", "or"}, {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"}
FLIPPED = {">": "<", r"\ge": r"\le"}
OPEN, CLOSE = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}


class Leaf(NamedTuple):
    text: str                                           # without white space
    unit: str
    value: dict[int, int] | None                        # see Algebra; None if the text is not plain algebra
    is_open: bool                                       # arithmetic is left to do
    kind: str = "leaf"


class Group(NamedTuple):
    kind: str
    parts: list


def last_box(text: str) -> str | None:
    r"""What the last outermost `\boxed{...}` or `\boxed 7` holds; None if there is none or it is not closed."""
    closing, unclosed = {}, []
    for brace in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        if brace[0] == "{":
            unclosed.append(brace.start())
        elif brace[0] == "}" and unclosed:
            closing[unclosed.pop()] = brace.start()
    content, end = None, 0
    for box in re.finditer(r"\\boxed(?![A-Za-z])\s*(\{|[^\s${}\\]*)", text):
        if box.start() >= end:                          # else it stands inside the box before it
            close = closing.get(box.start(1))
            content = box[1].rstrip(".,;:") if box[1] != "{" else close and text[box.end():close]
            end = close or box.end()
    return content


def same_answer(reference: str, answer: str) -> bool:
    r, a = parse(clean(reference)), parse(clean(answer))
    (r_name, r_value), (a_name, a_value) = split_name(r), split_name(a)
    return same(r, a) or (r_name == a_name or not r_name or not a_name) and same(r_value, a_value)


def clean(text: str) -> str:
    r"""One spelling for each thing; `\text{cm}` becomes `"cm"`, which tells a unit from a product of variables."""
    while (inner := last_box(text)) and text.strip() == rf"\boxed{{{inner}}}":
        text = inner
    text = "".join(str(unicodedata.decimal(c, c)) for c in text.translate(SYMBOLS))
    for pattern, spelling in REWRITES:
        text = pattern.sub(spelling, text)
    return TEXT.sub(lambda m: f' "{m[1].strip()}" ' if WORDS.fullmatch(m[1]) else f" {m[1]} ", text)


def split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Cuts at the separators outside all brackets: (parts, separators met); no parts if the brackets do not match."""
    parts, met, depth, start = [], [], 0, 0
    for token in re.finditer(r"\\?[A-Za-z]+|\\.|.", text):
        depth += (token[0] in OPEN) - (token[0] in CLOSE)
        if depth < 0:
            break
        if depth == 0 and token[0].lower() in separators:
            parts, met, start = [*parts, text[start:token.start()]], [*met, token[0].lower()], token.end()
    return ([*parts, text[start:]], met) if depth == 0 else ([], [])


def parse(text: str, in_brackets: bool = False, depth: int = 0) -> Leaf | Group:
    """The tree of an answer. In brackets a plain comma is never a thousands mark: (100,200) is a point."""
    def group(kind: str, texts: list[str]) -> Group:
        return Group(kind, [parse(t, in_brackets or kind in ("()", "(]", "[)", "[]"), depth + 1) for t in texts])

    text = text.strip().removesuffix(".").rstrip()
    if depth > MAX_DEPTH:
        return Leaf(text, "", None, False)
    if m := re.fullmatch(r"\\begin\{([pb]?)matrix\}(.*)\\end\{\1matrix\}", text):
        return Group("matrix", [group("row", split(row, {"&"})[0]) for row in split(m[2], {"\\\\"})[0] if row.strip()])
    for left, right in (("{", "}"), (r"\{", r"\}")):
        if text.startswith(left) and text.endswith(right) and split(inner := text[len(left):-len(right)], set())[0]:
            return parse(inner, in_brackets or left == r"\{", depth + 1)
    if not in_brackets and not re.search(r"[(\[]|\\\{", text):
        text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    parts = split(text, LISTS)[0]
    parts = [p.replace(r"\pm", sign) for p in parts for sign in ("+-" if p.count(r"\pm") == 1 else "+")]
    if len(parts) > 1:
        return group("list", parts)
    if len(parts := split(text, {r"\cup"})[0]) > 1:
        return group("union", parts)
    parts, met = split(text, RELATIONS)
    if met and set(met) <= FLIPPED.keys():
        parts, met = parts[::-1], [FLIPPED[sign] for sign in met[::-1]]
    if met:
        return group(" ".join(met), parts)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(parts := split(text[1:-1], LISTS)[0]) > 1:
        return group(text[0] + text[-1], parts)
    return parse_leaf(text)


def parse_leaf(text: str) -> Leaf:
    unit = ""
    if m := UNIT.fullmatch(text):
        words = (m[2] or m[3]).casefold().replace(".", "").split()
        if words and not NOT_UNITS & set(words) and (m[2] or len(words[0]) > 3 or words[0] in SHORT_UNITS):
            words = [w.removesuffix("s") if len(w) > 2 else w for w in words]
            text, unit = m[1], " ".join(UNIT_NAMES.get(w, w) for w in words) + (m[4] or "")
    if text[-1:] in ("%", "°"):
        text, unit = text[:-1], text[-1] + unit
    if m := re.fullmatch(r"(-?) ?([$€£])(.+)", text):
        text, unit = m[1] + m[3], m[2] + unit
    try:
        algebra = Algebra(text)
        value, is_open = algebra.value, algebra.is_open
    except ValueError:
        value, is_open = None, False
    text = re.sub(r'(?<!\d)[\s"]+|[\s"]+(?!\d)', "", text)                     # but "1 2" is not 12
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", re.sub(r"([_^])\{(\w)\}", r"\1\2", text))
    return Leaf(text.casefold() if len(text) > 1 and text.isalpha() else text, unit, value, is_open)


def is_named(tree: Leaf | Group) -> bool:
    return tree.kind in ("=", r"\in") and tree.parts[0].kind == "leaf" and bool(NAME.fullmatch(tree.parts[0].text))


def split_name(tree: Leaf | Group) -> tuple[str, Leaf | Group]:
    """('x', its values) if `x = ...` or `x in ...` is all that the tree names, else ('', the tree)."""
    parts = tree.parts if tree.kind == "list" else [tree]
    names = {part.parts[0].text for part in parts if is_named(part)}
    if len(names) != 1:
        return "", tree
    values = [part.parts[1] if is_named(part) else part for part in parts]
    return names.pop(), values[0] if len(values) == 1 else Group("list", values)


def same(r: Leaf | Group, a: Leaf | Group) -> bool:
    """Does the answer's tree say what the reference's does?"""
    if r.kind == a.kind == "leaf":
        same_value = r.value is not None and r.value == a.value and a.is_open <= r.is_open
        return (r.unit == a.unit or not r.unit or not a.unit) and (same_value or r.text == a.text)
    if r.kind != a.kind or len(r.parts) != len(a.parts):
        return False
    if r.kind not in ("list", "union"):
        return all(map(same, r.parts, a.parts)) or r.kind == "=" and same_equation(r, a)
    rest = list(a.parts)
    for part in r.parts:                                # unordered: strike out one match for each part
        match = next((i for i, other in enumerate(rest) if same(part, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def same_equation(r: Group, a: Group) -> bool:
    """Is left - right the same up to a constant factor? But 2x = 84 is no way to say x = 42."""
    if any(side.kind != "leaf" or side.value is None for side in r.parts + a.parts):
        return False
    if is_named(r) and is_number(r.parts[1].value):
        return False
    differences = [add(left.value, scale(right.value, -1)) for left, right in (r.parts, a.parts)]
    r_monic, a_monic = (scale(d, inverse(d[min(d)])) if d else d for d in differences)
    return r_monic == a_monic


# Algebra by value. An expression is a sum of terms {monomial: coefficient}, both integers modulo the prime P; a symbol
# is the hash of its name, the number 5 is {1: 5}. Two numbers of up to MAX_DIGITS digits are then equal only if they
# are, other expressions but for an accident of 1 in 2^500 (Schwartz-Zippel), and no value grows.
P = 2**521 - 1
Terms = dict[int, int]


def add(p: Terms, q: Terms) -> Terms:
    return {m: c for m in p | q if (c := (p.get(m, 0) + q.get(m, 0)) % P)}


def scale(p: Terms, factor: int) -> Terms:
    return {m: c * factor % P for m, c in p.items()}


def is_number(p: Terms) -> bool:
    return p.keys() <= {1}


def multiply(p: Terms, q: Terms) -> Terms:
    """Only a number is multiplied out; any other factor becomes one term, so that factored and expanded differ."""
    if is_number(p) or is_number(q):
        return scale(p, q.get(1, 0)) if is_number(q) else scale(q, p.get(1, 0))
    (m, c), (n, d) = fold(p), fold(q)
    return {m * n % P: c * d % P}


def divide(p: Terms, q: Terms) -> Terms:
    n, d = (inverse(x) for x in fold(q))
    return {m * n % P: c * d % P for m, c in p.items()}


def inverse(x: int) -> int:
    return pow(x, -1, P)                                # ValueError if x is 0


def fold(p: Terms) -> tuple[int, int]:
    """A sum as one (monomial, coefficient)."""
    lead = p[min(p)] if p else 0
    return sum(m * c for m, c in p.items()) * inverse(lead) % P, lead


def number(value: Fraction) -> Terms:
    return {1: value.numerator * inverse(value.denominator) % P} if value else {}


class Algebra:
    r"""Recursive descent over + - * / ^, juxtaposition, \frac, \sqrt, mixed numbers; ValueError on anything else."""
    SYMBOL = (r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|pi|rho|sigma|tau|phi|omega|infty)(?![A-Za-z])"
              r"|(?![A-Za-z]{4})[A-Za-z]")              # four letters in a row are a word, no product
    NUMBER = (r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,3})(?![\d.A-Za-z])|"
              r" *\* *10 *\^ *(?:(-?\d{1,3})|\{ *([+-]?\d{1,3}) *\}))?(?! *[\d._!])")  # 52_8 and 5! are not 52 and 5
    MIXED = r"(\d+)(?: *\\frac *(?:\{ *(\d+) *\}|(\d)) *(?:\{ *(\d+) *\}|(\d))| +(\d+) */ *(\d+))"

    def __init__(self, text: str):
        if len(text) > MAX_ALGEBRA_CHARS or re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
            raise ValueError("too long")
        self.text, self.at, self.depth, self.is_open = text.strip(), 0, 0, False
        self.value = self.sum()
        if self.at < len(self.text):
            raise ValueError("not algebra")

    def take(self, pattern: str) -> re.Match | None:
        m = re.compile(f" *(?:{pattern})").match(self.text, self.at)
        self.at = m.end() if m else self.at
        return m

    def sum(self) -> Terms:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("too deep")
        total, signs = {}, self.take(r"[+\- ]*")
        while signs:
            terms = scale(self.product(), (-1) ** signs[0].count("-"))
            self.is_open |= bool(total.keys() & terms.keys())
            total, signs = add(total, terms), self.take(r"[+\-][+\- ]*")
        self.depth -= 1
        return total

    def product(self) -> Terms:
        left = self.power()
        while sign := self.take(r"[*/] *-?|(?=[A-Za-z(\[{\\])"):
            right = scale(self.power(), -1 if "-" in sign[0] else 1)
            self.is_open |= "/" not in sign[0] and is_number(left) and is_number(right)
            left = divide(left, right) if "/" in sign[0] else multiply(left, right)
        return left

    def power(self) -> Terms:
        base = self.atom()
        if not self.take(r"\^"):
            return base
        exponent = self.argument(r"-?\d+")
        n = next((n for n in (exponent.get(1, 0), exponent.get(1, 0) - P) if abs(n) <= MAX_POWER), None)
        if n is None or not is_number(exponent):
            raise ValueError("no small whole exponent")
        monomial, coefficient = fold(base)
        return {pow(monomial, n, P): pow(coefficient, n, P)}

    def argument(self, bare: str = r"\d") -> Terms:
        r"""What \frac, \sqrt and ^ apply to: a bare digit, a symbol or a group."""
        return number(Fraction(m[0])) if (m := self.take(bare)) else self.atom()

    def atom(self) -> Terms:
        if m := self.take(self.MIXED):
            top, bottom = number(Fraction(m[2] or m[3] or m[6])), number(Fraction(m[4] or m[5] or m[7]))
            return add(number(Fraction(m[1])), divide(top, bottom))
        if m := self.take(self.NUMBER):
            return number(Fraction(m[1]) * Fraction(10) ** int(m[2] or m[3] or m[4] or 0))
        for left, right in (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"):
            if self.take(left):
                inner = self.sum()
                if self.take(right):
                    return inner
                raise ValueError("bracket not closed")
        if self.take(r"\\frac(?![A-Za-z])"):
            return divide(self.argument(), self.argument())
        if self.take(r"\\sqrt(?![A-Za-z])"):
            index = self.take(r"\[ *\d+ *\]")
            return symbol(f"root {index and index[0]} {sorted(self.argument().items())}")
        if m := self.take(rf"(?:{self.SYMBOL}) *(?:_ *(?:\w|\{{\w+\}}))?"):
            return symbol(re.sub(r"[ {}]", "", m[0]))
        raise ValueError("not algebra")


def symbol(name: str) -> Terms:
    return {int.from_bytes(hashlib.sha512(name.encode()).digest(), "big"): 1}
