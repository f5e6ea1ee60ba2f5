"""What a harness can do about the ways in which rollouts fail, as complete files: the table of the rules proposer.

`mechanisms_of(domain)` lists what can be added to h0, and `render(domain, has, heading)` is the harness file that has a
set of them; with none it is h0. Math and search share one form of harness, a loop around a tool; chess has its own; the
h0 of any other domain is edited.
"""

import ast
import json
from dataclasses import dataclass, replace

from lint import constant_of


@dataclass(frozen=True)
class Mechanism:
    """One thing that a harness can do about some kinds of failure (words of Trace.failure)."""
    name: str
    cures: str
    claim: str                          # for the hypothesis: "<counted failures>; <claim>, at most half are left"
    n_extra_calls: int = 0              # model calls that it needs beyond h0's two
    group: str = ""                     # a harness has at most one mechanism of a group
    prompt: bool = False                # changes h0's two prompts and nothing else


SAID = {
    "call_limit": "were still calling the tool at the end", "malformed_call": "ended in a malformed call",
    "no_answer": "gave no readable answer and no call", "no_tool_wrong_answer": "were wrong without the tool",
    "no_answer_after_tool": "gave no readable answer after an output", "wrong_answer": "were wrong after an output",
    "tool_error": "were wrong after code that failed",
    "not_retrieved": "were wrong with no passage that holds the answer",
    "wrong_move": "played a legal but wrong move", "illegal_move": "ended with an illegal move",
    "malformed_move": "ended without a readable move"}

# ---- a loop around a tool: math and search --------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolWords:
    """What differs between the two domains, in words and in code."""
    tool: str
    form: str                           # of the final answer
    mark: str                           # what a reply in that form holds
    system: str                         # h0's system prompt
    use: str                            # a line of the checklist
    steps: str
    system_tool: str
    ask_for_tool: str
    more: str                           # when to go on
    again: str                          # and how
    go_on: str                          # the same, to a reply without its form
    calls: str                          # which calls of a reply are answered
    request: str                        # code


MATH = ToolWords(
    tool="python", form="\\boxed{}", mark="\\boxed{", system="", use="Use the python tool for every calculation.",
    steps="Work step by step, one tool call for each step.", system_tool="Always use the python tool to compute.",
    ask_for_tool="Please use the python tool to compute.", more="If more steps are needed",
    again="call the python tool again", go_on="go on with the next step", calls="reply.tool_calls",
    request='python(call.arguments.get("code", ""))')
SEARCH = ToolWords(
    tool="search", form="<answer></answer>", mark="</answer>",
    system="Answer questions of fact, using search when needed.", use="Use the search tool for every fact.",
    steps="Find one fact at a time, one search for each fact.", system_tool="Always use the search tool to find facts.",
    ask_for_tool="Please use the search tool to find facts.", more="If the question needs another fact",
    again="search again for the next fact", go_on="search again for the next fact", calls="reply.tool_calls[:1]",
    request='search(call.arguments.get("query", ""), topk=TOPK, max_tokens=200)')


def tool_mechanisms(w: ToolWords) -> tuple[Mechanism, ...]:
    unread, wrong = "no_answer_after_tool", "wrong_answer" + " not_retrieved" * (w.tool == "search")
    ending = f"to go on or else to give the answer in {w.form}"
    table = [
        Mechanism("calls_4", "call_limit", "4 model calls", group="calls"),
        Mechanism("calls_6", "call_limit", "6 model calls", group="calls"),
        Mechanism("calls_3", "call_limit", "3 model calls", group="calls"),
        Mechanism("repair_call", "malformed_call", "malformed calls sent back in words", 1),
        Mechanism("ask_for_tool", "no_tool_wrong_answer no_answer",
                  "the tool asked for if the first reply has no call", 1),
        Mechanism("careful_reminder", f"{unread} {wrong}", f"a turn after each output that says {ending}", 1,
                  "reminder"),
        Mechanism("careful_reminder_in_output", f"{unread} {wrong}", f"a line in each output that says {ending}", 1,
                  "reminder"),
        Mechanism("blunt_reminder", unread, f"a turn after each output that asks for {w.form}", group="reminder"),
        Mechanism("blunt_reminder_in_output", unread, f"a line in each output that asks for {w.form}",
                  group="reminder"),
        Mechanism("ask_for_form", f"{unread} no_answer", f"a missing {w.form} asked for once", 1),
        Mechanism("system_tool", "no_tool_wrong_answer no_answer", "a system prompt that asks for the tool",
                  prompt=True),
        Mechanism("checklist", f"wrong_answer {unread}", "a checklist below the question", prompt=True),
        Mechanism("steps", wrong, "one step a call asked for", 1, prompt=True),
        Mechanism("rule_in_prompt", f"{unread} {wrong}", f"a line below the question that says {ending}",
                  prompt=True),
    ]
    if w.tool == "python":
        return (*table, Mechanism("explain_error", "tool_error", "a turn that says so when the code failed", 1))
    return (*table, Mechanism("topk_3", "not_retrieved", "three passages a search", group="topk"),
            Mechanism("topk_2", "not_retrieved", "two passages a search", group="topk"),
            Mechanism("list_searches", "call_limit not_retrieved",
                      "a line in each output that lists the searches so far"))


def render_tool(w: ToolWords, has: frozenset[str], heading: str) -> str:
    careful = f"{w.more}, {w.again}; otherwise give the final answer in {w.form}."
    # what to say to a reply without a well-formed call: mechanism -> constant, text, when
    answers = {
        "repair_call": ("REPAIR", "The tool call could not be read. Send it again as valid JSON.",
                        '"<tool_call>" in reply.content:                      # a call that could not be read'),
        "ask_for_tool": ("ASK_FOR_TOOL", w.ask_for_tool, "turn == 0:"),
        "ask_for_form": ("ASK_FOR_FORM",
                         f"If you are not done, {w.go_on}; otherwise give the final answer in {w.form}.",
                         f'{json.dumps(w.mark)} not in reply.content '
                         'and messages[-2]["content"] != ASK_FOR_FORM:    # once')}
    answers = [answer for name, answer in answers.items() if name in has]
    reminders = [name for name in has if "reminder" in name]
    topk = next((int(name[5:]) for name in has if name.startswith("topk_")), 1)
    lines = ([w.use] * ("checklist" in has) + [w.steps] * ("steps" in has) + [careful] * ("rule_in_prompt" in has)
             + [("Put" if w.tool == "python" else "Give") + f" your final answer in {w.form}."])
    lines = [line.replace("{}", "{{}}") for line in lines]
    constants = {
        "SYSTEM_PROMPT": " ".join([w.system] * bool(w.system) + [w.system_tool] * ("system_tool" in has)),
        "USER_PROMPT": "{question}\n\n" + ("- " + "\n- ".join(lines) if "checklist" in has else " ".join(lines)),
        "MAX_CALLS": n_calls(has), **{constant: text for constant, text, _ in answers}}
    if reminders:
        constants["REMINDER"] = careful if "careful" in reminders[0] else f"Now give the final answer in {w.form}."
    if "explain_error" in has:
        constants["ERROR"] = "The code failed. Fix the error and call the python tool again."

    branches = "".join(f'            {"elif" if i else "if"} {test}\n                messages += chat("", {constant})\n'
                       for i, (constant, _, test) in enumerate(answers))
    ending = "            return"
    if answers:
        ending = branches + "            else:\n                return\n            continue"
    before = ask = after = ""
    notes = []
    if "list_searches" in has:
        before, ask = "    searched = []\n", '            searched.append(str(call.arguments.get("query", "")))\n'
        notes.append("Searched so far: {'; '.join(searched)}.")
    if reminders and "in_output" in reminders[0]:
        notes.append("{REMINDER}")
    output = 'f"{output}\\n\\n' + " ".join(notes) + '"' if notes else "output"
    if "ERROR" in constants:
        after = '        if not output.ok:\n            messages += chat("", ERROR)\n'
        output += " if output.ok else output" if notes else ""
    if reminders and "in_output" not in reminders[0]:
        after += ("        else:\n    " if after else "") + '        messages += chat("", REMINDER)\n'
    assignments = "\n".join(f"{name} = {json.dumps(value)}" for name, value in constants.items())
    names = sorted([w.tool.upper(), "chat", "generate", w.tool, "tool_result"])
    return f'''"""{heading}"""

from harness_api import {", ".join(names)}

{assignments}


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
{before}    for {"turn" if "ask_for_tool" in has else "_"} in range(MAX_CALLS):
        reply = yield generate(messages, tools=[{w.tool.upper()}])
        messages.append(reply.message)
        if not reply.tool_calls:
{ending}
        for call in {w.calls}:
{ask}            output = yield {w.request.replace("TOPK", str(topk))}
            messages.append(tool_result(call, {output}))
{after}'''


def n_calls(has: frozenset[str]) -> int:
    return next((int(name[6:]) for name in has if name.startswith("calls_")), 2)


# ---- chess ----------------------------------------------------------------------------------------------------------

CHESS_MECHANISMS = (
    Mechanism("grouped_moves", "wrong_move", "the legal moves grouped as mates, checks, captures", group="marks"),
    Mechanism("marked_moves", "wrong_move", "the legal moves marked as mates, checks, captures", group="marks"),
    Mechanism("mate_hint", "wrong_move", "a line that asks to look for a mate first", prompt=True),
    Mechanism("retries_3", "malformed_move illegal_move", "three retries of either kind", group="retries"),
    Mechanism("retries_2", "malformed_move illegal_move", "two retries of either kind", group="retries"),
    Mechanism("legal_hint", "illegal_move", "a line that asks for a move of the list", prompt=True),
    Mechanism("first_move", "wrong_move", "the first of several moves taken as meant"),
)
MARK_MOVES = '''
def mark(task):
    groups = {"mate": [], "check": [], "capture": [], "": []}
    for line in task["legal_moves"].split("\\n"):
        kind = "mate" if "#" in line else "check" if "+" in line else "capture" if "x" in line else ""
        groups[kind].append(line)
    return {**task, "legal_moves": JOINED}
'''
GROUPED = '"\\n".join(f"({kind or \'other\'})\\n" + "\\n".join(lines) for kind, lines in groups.items() if lines)'
MARKED = '"\\n".join(line + (f" ({kind})" if kind else "") for kind, lines in groups.items() for line in lines)'


def render_chess(has: frozenset[str], heading: str) -> str:
    hints = (["If a move gives mate, play it."] * ("mate_hint" in has)
             + ["Choose a move from the list."] * ("legal_hint" in has))
    system = " ".join(["You solve chess puzzles. Play the best legal move, one move at a time.", *hints])
    marks = next((name for name in has if name.endswith("_moves")), "")
    mark = "\n" + MARK_MOVES.replace("JOINED", GROUPED if marks == "grouped_moves" else MARKED) if marks else ""
    fields = "mark(TASK)" if marks else "TASK"
    retries = next((int(name[8:]) for name in has if name.startswith("retries_")), 1)
    which, why = (0, "first") if "first_move" in has else (-1, "last")
    return f'''"""{heading}"""

from harness_api import chat, generate, move, said_moves

SYSTEM_PROMPT = {json.dumps(system)}
USER_PROMPT = (
    "Side to move: {{side}}\\nFEN: {{fen}}\\nBoard:\\n{{board}}\\nLast reply of the opponent: {{last_move}}\\n"
    "Your moves so far: {{played}}\\nMove number: {{move_number}}\\nLegal moves:\\n{{legal_moves}}\\n\\n"
    "Answer with one move as <move>uci</move>.")
RETRY = {{
    "malformed": "No move could be read. Answer with one move as <move>uci</move>.",
    "illegal": "That move is not legal. Choose a move from the list.",
}}
N_RETRIES = {retries}
MAX_CALLS = 9
{mark}

def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**{fields.replace("TASK", "task")}))
    left = dict.fromkeys(RETRY, N_RETRIES)
    for _ in range(MAX_CALLS):
        reply = yield generate(messages)
        messages.append(reply.message)
        said = said_moves(reply.content)
        result = yield move(said[{which}] if said else "")               # of several moves the {why} is meant
        status = result.details["status"]
        if status == "accepted":
            messages += chat("", USER_PROMPT.format(**{fields.replace("TASK", 'result.details["task"]')}))
        elif left.get(status):
            left[status] -= 1
            messages += chat("", RETRY[status])
        else:
            return
'''


# ---- any other domain: edits of its own h0 --------------------------------------------------------------------------

GENERIC_MECHANISMS = (
    Mechanism("more_calls", "call_limit", "twice as many model calls"),
    Mechanism("steps_line", "wrong_answer no_tool_wrong_answer", "a line that asks to work step by step", prompt=True),
    Mechanism("form_line", "no_answer no_answer_after_tool", "a line that asks to keep to the form of the answer",
              prompt=True),
    Mechanism("check_line", "wrong_answer no_tool_wrong_answer tool_error", "a line that asks to check the answer",
              prompt=True),
)
LINES = {"steps_line": "Work step by step.", "form_line": "Keep to the form that is asked for.",
         "check_line": "Check your answer before you give it."}


def render_generic(h0: str, has: frozenset[str], heading: str) -> str:
    """h0 with its MAX_CALLS doubled and lines added to its SYSTEM_PROMPT."""
    edits = {}
    for node in ast.parse(h0).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MAX_CALLS")], value=ast.Constant(value=int(n))):
                edits[node.lineno, node.end_lineno] = f"MAX_CALLS = {n * (1 + ('more_calls' in has))}"
            case ast.Assign(targets=[ast.Name(id="SYSTEM_PROMPT")]):
                lines = [constant_of(node.value), *(line for name, line in LINES.items() if name in has)]
                edits[node.lineno, node.end_lineno] = f"SYSTEM_PROMPT = {json.dumps(' '.join(filter(None, lines)))}"
    rows = h0.splitlines()
    for (first, last), text in sorted(edits.items(), reverse=True):
        rows[first - 1:last] = [text]
    return "\n".join([f"# {line}" for line in heading.splitlines()] + rows) + "\n"


TABLES = {"math": tool_mechanisms(MATH), "search": tool_mechanisms(SEARCH), "chess": CHESS_MECHANISMS}


def mechanisms_of(domain: str, prompts_only: bool = False) -> tuple[Mechanism, ...]:
    """`prompts_only`: those that keep the rule of FST, which then need no model calls beyond h0's."""
    table = TABLES.get(domain, GENERIC_MECHANISMS)
    return tuple(replace(m, n_extra_calls=0) for m in table if m.prompt) if prompts_only else table


def render(domain: str, has: frozenset[str], heading: str, h0: str = "") -> str:
    """The harness file that has these mechanisms; with none of them it is h0, whose text is needed only for a domain
    without a table of its own."""
    if domain not in TABLES:
        return render_generic(h0, has, heading)
    if domain == "chess":
        return render_chess(has, heading)
    return render_tool(MATH if domain == "math" else SEARCH, has, heading)
