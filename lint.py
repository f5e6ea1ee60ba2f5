"""What a harness file may hold, told from its text alone: the contract, a lint, and literals that it must not know.

A lint, not a wall: what a harness cannot do at all is the business of the sandbox. gates.py runs these checks before
the probes that run the harness.
"""

import ast
import base64
import codecs
import re
import urllib.parse
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from itertools import zip_longest
from types import ModuleType

from screen import UNSAFE
from tasks import Task

MAX_SOURCE_BYTES = 20_000
MAX_DEPTH = 100                       # of its syntax tree, which recursive functions walk
MAX_REPLACED_BYTES = 100_000          # what a replacement of literals may come to
MAX_MADE_CHARS = 1_000_000            # what all that is put together from literals may come to
ALLOWED_MODULES = "re json math string textwrap itertools collections functools statistics random harness_api".split()
# modules that these hold, such as json.codecs, which holds `open`; collections.abc is harmless
HIDDEN_MODULES = {name for module in ALLOWED_MODULES for name, value in vars(import_module(module)).items()
                  if isinstance(value, ModuleType) and value.__name__ not in ALLOWED_MODULES} - {"abc"}
FORBIDDEN_NAMES = "exec eval compile open input getattr setattr delattr globals locals vars dir breakpoint".split()
DATA_NAMES = re.compile(
    r"(?<![a-z])(gsm8k|svamp|mawps|asdiv|dapo|deepscaler|aime|math[-_ ]?500|hotpotqa|musique|2wiki\w*|popqa|triviaqa|"
    r"nq[-_ ]open|bamboogle|lichess|d_(weight|harness|test)|(train|test|harness)(ing)?[-_ ](set|split))(?![a-z])",
    re.IGNORECASE)
QUESTION_WORDS = 12     # so many words in a row give a question away; of a shorter one (not below 5) all of them
COMMON = 3              # words that stand in more questions than this are the language of the domain, not a question
ANSWER_TABLE = 6        # so many constants of two or more characters that equal answers are a table of answers


class ForbiddenText:
    """What no harness may hold, from the tasks of all splits."""

    def __init__(self, tasks: list[Task]):
        self.questions = [words_of(text) for task in tasks for text in task.fields.values()]
        self.questions += [words_of(task.fields["fen"].split()[0]) for task in tasks if "fen" in task.fields]
        answers = {answer.strip().casefold() for task in tasks for answer in task.answers}
        answers |= {move for task in tasks if "fen" in task.fields for move in task.answer.split()}
        # short words are the language's: "two", "film" and "English" are answers too
        self.answers = {answer for answer in answers if re.search(r"\d.|.\d| ", answer) or len(answer) >= 10}
        self.sources = {task.source.casefold() for task in tasks
                        if re.search(r"[\d_-]", task.source) and len(task.source) > 3}             # no plain words


def parse_harness(source: str) -> tuple[ast.Module, str]:
    """-> syntax tree, and what the contract misses in it ("" if nothing)."""
    if (n_bytes := len(source.encode("utf-8", "surrogatepass"))) > MAX_SOURCE_BYTES:
        return ast.Module([], []), f"{n_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed"
    if unsafe := UNSAFE.search(lines := re.sub(r"\r\n|\f", "\n", source)):         # it may read as what it is not
        line = lines.count("\n", 0, unsafe.start()) + 1
        return ast.Module([], []), f"line {line}: the character U+{ord(unsafe[0]):04X} cannot be seen; write its escape"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        level, depth = [tree], 0
        while level := [child for node in level for child in ast.iter_child_nodes(node)]:
            if (depth := depth + 1) > MAX_DEPTH:
                return ast.Module([], []), f"line {getattr(level[0], 'lineno', 1)}: nested more than {MAX_DEPTH} deep"
        ast.dump(tree)                      # what cannot be shown (an int of 5,000 digits) cannot be compared either
        constants = [(target.id, constant_of(node.value)) for node in tree.body if isinstance(node, ast.Assign)
                     for target in node.targets if isinstance(target, ast.Name)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ast.Module([], []), f"does not parse: {type(error).__name__}: {error}"
    for wanted in ("SYSTEM_PROMPT", "USER_PROMPT"):
        if [isinstance(value, str) for name, value in constants if name == wanted] != [True]:
            return tree, f"{wanted} must be set once, to a string constant"
    runs = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if len(runs) != 1 or len(runs[0].args.args) != 1 or not any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(runs[0])):
        return tree, "there must be one generator function run(task)"
    return tree, ""


def lint(tree: ast.Module) -> str:
    """The first thing in the file that a harness has no business with. A lint, not a wall: the sandbox is the wall.
    "The question" is what a task asks: its text, or its position."""
    imported, asked = set(), {"question"}                   # asked: names that stand for the question's text
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
            if not set(modules) <= set(ALLOWED_MODULES) or "*" in names:
                return f"line {node.lineno}: import of {', '.join(modules)} is not allowed"
            if inner := [name for name in names if name.startswith("_") or name in HIDDEN_MODULES]:
                return f"line {node.lineno}: import of {', '.join(inner)} is not allowed"
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and root_of(node.value, asked) == "question":
            asked |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        line = f"line {getattr(node, 'lineno', 0)}: "
        if name.startswith("__") or isinstance(node, ast.Name) and name in FORBIDDEN_NAMES:
            return f"{line}{name} is not allowed"
        if isinstance(node, ast.Attribute | ast.Subscript) and root_of(node) in imported and (
                not isinstance(node.ctx, ast.Load) or name.startswith("_")):
            return f"{line}{root_of(node)} is shared among programs, so it must not be changed"
        if isinstance(node, ast.Attribute) and root_of(node) in imported and name in HIDDEN_MODULES:
            return f"{line}{name}, a module inside of {root_of(node)}, is not allowed"
        tests = (
            [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else [node] if isinstance(node, ast.Compare)
            else [node.subject] if isinstance(node, ast.Match) else [node.slice] if isinstance(node, ast.Subscript)
            else node.args if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" else [])
        if any(root_of(part, asked) == "question" for test in tests for part in ast.walk(test)):
            return f"{line}a branch or look-up on the question's text"
    return ""


def root_of(node: ast.AST, asked: set[str] = frozenset()) -> str:
    """The name at the left end of a.b[c].d; with `asked`, "question" for task["question"] and the names in `asked`."""
    while node is not None and not isinstance(node, ast.Name):
        keys = [node.slice] if isinstance(node, ast.Subscript) else node.args[:1] if isinstance(node, ast.Call) else []
        if asked and len(keys) == 1 and constant_of(keys[0]) in ("question", "fen", "board"):
            return "question"
        node = getattr(node, "value", None) or (getattr(node, "func", None) if asked else None)     # f(a).b is not f's
    return "" if node is None else "question" if node.id in asked else node.id


def constant_of(node: ast.AST) -> str | bytes | float | None:
    """The value of a literal, or of what is put together from literals: sums, joins, replacements, formats (a field
    that is no literal is left blank); else None. Nothing is run, and no text grows without bound."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.FormattedValue):
        return constant_of(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(constant_of(part) or " ") for part in node.values)[:MAX_SOURCE_BYTES]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = constant_of(node.left), constant_of(node.right)
        return left + right if type(left) is type(right) and isinstance(left, str | bytes) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return fill(constant_of(node.left), getattr(node.right, "elts", [node.right]))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    text, args = constant_of(node.func.value), node.args
    if node.func.attr == "format":
        return fill(text, [*args, *(keyword.value for keyword in node.keywords)])
    if node.func.attr == "join" and args:
        args = getattr(args[0], "elts", [ast.Constant(None)])
    parts = [constant_of(arg) for arg in args]
    if not isinstance(text, str) or not parts or not all(isinstance(part, str) for part in parts):
        return None
    if node.func.attr == "join":
        return text.join(parts)[:MAX_SOURCE_BYTES]
    if node.func.attr == "replace" and len(parts) == 2 and len(text) * (len(parts[1]) + 1) <= MAX_REPLACED_BYTES:
        return text.replace(*parts)
    return None


def fill(template: str | bytes | float | None, values: list[ast.expr]) -> str | None:
    """A format with its fields filled in order."""
    if not isinstance(template, str):
        return None
    found = map(constant_of, values)
    texts = iter([" " if value is None else str(value) for value in found])
    return re.sub(r"%[sdr]|\{\w*\}", lambda field: next(texts, " "), template)[:MAX_SOURCE_BYTES]


def find_literals(tree: ast.Module, forbidden: ForbiddenText) -> str:
    """Names of data sets, tables of answers, and questions among the constants, also where they are simply encoded.

    One number is nobody's secret (an answer may well be 256), so answers count as a table only: ANSWER_TABLE different
    constants, where a string counts if half of its pieces are answers. Numbers in prose, as in examples, do not count.
    """
    texts = {getattr(node, key) for node in ast.walk(tree) for key in ("id", "attr", "arg", "name")
             if isinstance(getattr(node, key, None), str)}
    n_made = 0
    for node in ast.walk(tree):
        parts = getattr(node, "elts", None) or [*getattr(node, "keys", []), *getattr(node, "values", [])]
        values = [constant_of(part) for part in parts if isinstance(part, ast.expr)]
        value = constant_of(node)
        n_made += sum(len(made) for made in (*values, value) if isinstance(made, str | bytes))
        if n_made > MAX_MADE_CHARS:                                                 # it takes minutes to look through
            return f"what is put together from its literals comes to more than {MAX_MADE_CHARS:,} characters"
        if values and all(type(code) is int and 9 <= code < 0x110000 for code in values):
            texts |= set(decodings("".join(map(chr, values))))                      # a list of character codes
        if len(values) > 1 and all(isinstance(value, str) for value in values):
            texts |= {text for glue in ("", " ") for text in decodings(glue.join(values))}      # a text in parts
        if type(value) is int and value > 1 << 32:                                  # a text as one number
            value = value.to_bytes((value.bit_length() + 7) // 8, "big")
        texts |= set(decodings(value.decode("latin-1") if isinstance(value, bytes) else str(value)))
    answers = set()
    for text in texts:
        named = (s for s in forbidden.sources if re.search(rf"(?<!\w){re.escape(s)}(?!\w)", text.casefold()))
        if found := DATA_NAMES.search(text) or next(named, ""):
            return f"names a data set or split: {str(found if isinstance(found, str) else found[0])!r}"
        pieces = [piece for piece in re.split(r"[\s,;:|/]+", text.casefold()) if piece]
        hits = forbidden.answers.intersection(pieces)
        if 2 * sum(piece in hits for piece in pieces) >= len(pieces):
            answers |= hits
        answers |= forbidden.answers & {text.casefold().strip()}                    # of several words
    if len(answers) >= ANSWER_TABLE:
        return f"holds a table of answers: {len(answers)} of its constants are answers"
    spans = {words[i:i + n] for words in map(words_of, texts) for n in range(5, QUESTION_WORDS + 1)
             for i in range(len(words) - n + 1)}
    hits = {span for words in forbidden.questions for span in spans.intersection(windows_of(words))}
    forms = {form_of(span) for span in hits}
    n_questions = Counter(form for words in forbidden.questions if hits
                          for form in forms.intersection(map(form_of, windows_of(words))))
    rare = sorted(" ".join(span) for span in hits if n_questions[form_of(span)] <= COMMON)
    return f"holds the text of a question: {rare[0]!r}" if rare else ""


def windows_of(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[i:i + QUESTION_WORDS] for i in range(max(1, len(words) - QUESTION_WORDS + 1))}


def form_of(span: tuple[str, ...]) -> tuple[str, ...]:
    """By what spans are counted as common: one number is left blank, for an example may have the same by chance."""
    numbers = [word for word in span if word.isdecimal()]
    return tuple("#" if word in numbers else word for word in span) if len(numbers) == 1 else span


def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def unpack(packed: bytes) -> bytes:
    return zlib.decompressobj().decompress(packed, MAX_SOURCE_BYTES)


def base64_of(packed: bytes) -> bytes:
    return base64.b64decode(packed.translate(bytes.maketrans(b"-_", b"+/")), validate=True)


def as_bytes(decode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    return lambda text: decode(text.encode("latin-1")).decode("latin-1")


def unescape(text: str) -> str:
    return re.sub(r"\\(?:x..|u....)", lambda code: chr(int(code[0][2:], 16)), text)


DECODERS = (
    lambda text: text[::-1], lambda text: codecs.encode(text, "rot13"), urllib.parse.unquote, unescape,
    lambda text: bytes.fromhex(text).decode("latin-1"), as_bytes(base64_of), as_bytes(base64.b32decode),
    as_bytes(base64.b85decode), as_bytes(base64.a85decode), as_bytes(unpack))


def decodings(text: str, depth: int = 2) -> Iterator[str]:
    """The text itself, and what it is in the codes of DECODERS, to a `depth` of one inside another. What comes out
    counts if it is text, or may be packed; a short number is a number."""
    yield text
    if not depth or len(text) < (8 if text.isdecimal() or depth == 1 else 4):
        return
    for decode in DECODERS:
        try:
            found = decode(text)
        except (ValueError, zlib.error):                    # as are binascii.Error and UnicodeError
            continue
        if found != text and (found.isprintable() or found.startswith("x")):        # zlib's streams begin with an x
            yield from decodings(found, depth - 1)


def beyond_prompts(source: str, h0: str) -> str:
    """What in a harness differs from h0 but for the text of SYSTEM_PROMPT and USER_PROMPT (the rule of FST, Fast-Slow
    Training), by the syntax tree; "" if nothing. Comments, layout and the file's docstring are no difference."""
    rests = []
    for text in (source, h0):
        tree, why = parse_harness(text)
        if why:
            return why
        rest = []
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="SYSTEM_PROMPT" | "USER_PROMPT" as name)], value=value):
                    if text is source and not isinstance(value, ast.Constant):      # f"{(MAX_CALLS := 9)}" is one too
                        return f"line {node.lineno}: {name} must be one plain string"
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    rest.append(node)
        rests.append(rest)
    for node, other in zip_longest(*rests):
        if node is None or other is None or ast.dump(node) != ast.dump(other):
            where = f"line {node.lineno}" if node else "the end"
            return f"from {where} on it differs from h0 in more than SYSTEM_PROMPT and USER_PROMPT"
    return ""


@lru_cache(maxsize=1024)
def program_of(source: str) -> str:
    """What two files share that differ in comments, layout and docstring only."""
    tree, why = parse_harness(source)
    return ast.dump(ast.Module([n for n in tree.body if not isinstance(getattr(n, "value", n), ast.Constant)
                                or not isinstance(n, ast.Expr)], [])) if not why else source
