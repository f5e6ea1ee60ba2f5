"""The proposers: who writes new harness files. A proposer is a function from `ProposalRequest` to candidates.

`propose_by_rules`, the embedded one, is a rule-based stand-in for a coding agent: it reads the archive's traces, counts
why rollouts failed, and writes complete new files that combine known mechanisms, each with a hypothesis that the counts
of its own score can prove wrong. It is deterministic for a seed. It cannot invent a mechanism.

Differs from the paper: the paper's proposer is a coding agent (Claude Opus) with file access to the same archive.
"""

import json
import random
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gates import program_of
from harness_search import Candidate, ProposalRequest, select_best
from rollout import derive_seed

@dataclass(frozen=True)
class Mechanism:
    """One thing that a harness can do about some kinds of failure (words of Trace.failure)."""
    name: str
    cures: str
    claim: str                          # for the hypothesis: "<counted failures>; <claim>, at most half as many will"
    n_extra_calls: int = 0              # model calls that it needs beyond h0's two
    group: str = ""                     # a harness has at most one mechanism of a group


SAID = {
    "call_limit": "were still calling the tool at the end", "malformed_call": "ended in a malformed call",
    "no_answer": "gave no readable answer and no call", "no_tool_wrong_answer": "were wrong without the tool",
    "no_answer_after_tool": "gave no readable answer after an output", "wrong_answer": "were wrong after an output",
    "tool_error": "were wrong after code that failed"}
MATH_MECHANISMS = (
    Mechanism("calls_4", "call_limit", "4 model calls", group="calls"),
    Mechanism("calls_6", "call_limit", "6 model calls", group="calls"),
    Mechanism("calls_3", "call_limit", "3 model calls", group="calls"),
    Mechanism("repair_call", "malformed_call", "malformed calls sent back in words", 1),
    Mechanism("ask_for_tool", "no_tool_wrong_answer no_answer", "the tool asked for if the first reply has no call", 1),
    Mechanism("careful_reminder", "no_answer_after_tool wrong_answer",
              "a turn after each output that says to go on or else to box the answer", 1, "reminder"),
    Mechanism("careful_reminder_in_output", "no_answer_after_tool wrong_answer",
              "a line in each output that says to go on or else to box the answer", 1, "reminder"),
    Mechanism("blunt_reminder", "no_answer_after_tool",
              "a turn after each output that says to box the answer", group="reminder"),
    Mechanism("blunt_reminder_in_output", "no_answer_after_tool",
              "a line in each output that says to box the answer", group="reminder"),
    Mechanism("ask_for_box", "no_answer_after_tool no_answer", "a missing box asked for once", 1),
    Mechanism("explain_error", "tool_error", "a turn that says so when the code failed", 1),
    Mechanism("system_tool", "no_tool_wrong_answer no_answer", "a system prompt that asks for the tool"),
    Mechanism("checklist", "wrong_answer no_answer_after_tool", "a checklist below the question"),
    Mechanism("steps", "wrong_answer", "one step a call asked for", 1),
)
CAREFUL = "If more steps are needed, call the python tool again; otherwise give the final answer in \\boxed{}."
BLUNT = "Now give the final answer in \\boxed{}."
# What to say to a reply without a well-formed call: mechanism -> constant, text, when.
ANSWERS = {
    "repair_call": ("REPAIR", "The tool call could not be read. Send it again as valid JSON.",
                    '"<tool_call>" in reply.content:                      # a call that could not be read'),
    "ask_for_tool": ("ASK_FOR_TOOL", "Please use the python tool to compute.", "turn == 0:"),
    "ask_for_box": ("ASK_FOR_BOX",
                    "If you are not done, go on with the next step; otherwise give the final answer in \\boxed{}.",
                    '"\\\\boxed{" not in reply.content and messages[-2]["content"] != ASK_FOR_BOX:    # once'),
}


def render_math(has: frozenset[str], heading: str) -> str:
    """The harness file that has these mechanisms; with none of them it is h0."""
    answers = [answer for name, answer in ANSWERS.items() if name in has]
    reminders = [name for name in has if "reminder" in name]
    lines = (["Use the python tool for every calculation."] * ("checklist" in has)
             + ["Work step by step, one tool call for each step."] * ("steps" in has)
             + ["Put your final answer in \\boxed{{}}."])
    constants = {
        "SYSTEM_PROMPT": "Always use the python tool to compute." if "system_tool" in has else "",
        "USER_PROMPT": "{question}\n\n" + ("- " + "\n- ".join(lines) if "checklist" in has else " ".join(lines)),
        "MAX_CALLS": n_calls(has), **{constant: text for constant, text, _ in answers}}
    if reminders:
        constants["REMINDER"] = CAREFUL if "careful" in reminders[0] else BLUNT
    if "explain_error" in has:
        constants["ERROR"] = "The code failed. Fix the error and call the python tool again."

    branches = "".join(f'            {"elif" if i else "if"} {test}\n                messages += chat("", {constant})\n'
                       for i, (constant, _, test) in enumerate(answers))
    ending = "            return"
    if answers:
        ending = branches + "            else:\n                return\n            continue"
    output, after = "output", ""
    if "ERROR" in constants:
        after = '        if not output.ok:\n            messages += chat("", ERROR)\n'
    if reminders and "in_output" in reminders[0]:
        output = 'f"{output}\\n\\n{REMINDER}"' + (" if output.ok else output" if after else "")
    elif reminders:
        after += ("        else:\n    " if after else "") + '        messages += chat("", REMINDER)\n'
    assignments = "\n".join(f"{name} = {json.dumps(value)}" for name, value in constants.items())
    return f'''"""{heading}"""

from harness_api import PYTHON, chat, generate, python, tool_result

{assignments}


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    for {"turn" if "ask_for_tool" in has else "_"} in range(MAX_CALLS):
        reply = yield generate(messages, tools=[PYTHON])
        messages.append(reply.message)
        if not reply.tool_calls:
{ending}
        for call in reply.tool_calls:
            output = yield python(call.arguments.get("code", ""))
            messages.append(tool_result(call, {output}))
{after}'''


DOMAINS = {"math": (MATH_MECHANISMS, render_math)}


def n_calls(has: frozenset[str]) -> int:
    return next((int(name[6:]) for name in has if name.startswith("calls_")), 2)


def add_mechanisms(base: frozenset[str], added: list[str], known: dict[str, Mechanism]) -> frozenset[str]:
    """The base with these in it, one of a group, and with the model calls that they need."""
    has = set(base)
    for name in added:
        has = {other for other in has if not known[name].group or known[other].group != known[name].group} | {name}
    needed = min(6, 2 + sum(known[name].n_extra_calls for name in has))
    if n_calls(has) < needed:
        has = {name for name in has if known[name].group != "calls"} | {f"calls_{needed + (needed == 5)}"}
    return frozenset(has)


def propose_by_rules(request: ProposalRequest) -> list[Candidate]:
    """M new harnesses from the archive's best, deterministic for a seed. Each slot takes the mechanism for the kinds of
    failure that are most frequent in the best's traces and that no earlier slot took up; the last combines several."""
    mechanisms, render = DOMAINS[request.domain]
    known = {mechanism.name: mechanism for mechanism in mechanisms}
    cures = {mechanism.name: set(mechanism.cures.split()) for mechanism in mechanisms}
    best, rng = select_best(list(request.history)), random.Random(derive_seed(*request.seed))
    parent = best.candidate
    rows = (request.folder / parent.name / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    failures = Counter(json.loads(row)["failure"] for row in rows)
    base, origin = frozenset(parent.mechanisms), ""
    if not base <= known.keys() or program_of(render(base, "")) != program_of(parent.source):
        base, origin = frozenset(), f"(from h0's structure, as the mechanisms of {parent.name} are not known) "
    scored = {o.candidate.name: (set(o.candidate.mechanisms), o.score.mean) for o in request.history if o.score}
    tried = [(*scored[o.candidate.parent], *scored[o.candidate.name])
             for o in request.history if o.score and o.candidate.parent]
    no_help = set().union(*(after - before for before, old_mean, after, new_mean in tried if new_mean <= old_mean))

    def rank(chosen: set[str]) -> list[str]:
        """What could be added to the base and to `chosen`, by how many rollouts failed in ways that it addresses and
        they do not. Where it has not helped so far, they count half."""
        covered = set().union(*(cures[name] for name in chosen))
        weights = {name: sum(failures[word] for word in cures[name] - covered) / (2 if name in no_help else 1)
                   for name in known}
        groups = {known[name].group or name for name in chosen}
        return sorted((name for name in known if name not in base and (known[name].group or name) not in groups),
                      key=weights.get, reverse=True)                # stable: ties in the order of the table

    def fills(slot: int) -> Iterator[tuple[list[str], list[str]]]:
        """(added, removed) mechanisms for a slot, the most wanted first."""
        if slot < request.n_candidates - 1:
            if slot == request.n_candidates - 2 and base and len(request.history) > 6 and rng.random() < 0.5:
                yield [], [rng.choice(sorted(base))]                # later on: does something not earn its place?
            yield from (([name], []) for name in rank(used))
        several: list[str] = []
        for _ in range(4):
            several += rank(set(several))[:1]
        yield from ((several[:n], []) for n in (3, 2, 4))
        for _ in range(1000):
            yield rng.sample(list(known), rng.randint(2, 5)), []

    def explain(added: list[str], removed: list[str]) -> str:
        """A hypothesis that the counts in the new candidate's score.json can prove wrong."""
        cited = {word: failures[word] for word in SAID if failures[word] and any(word in cures[name] for name in added)}
        claim = ", ".join([f"without {name}" for name in removed] + [f"with {known[name].claim}" for name in added])
        if removed or sum(cited.values()) < 2:
            goal = "does not fall below" if removed else "rises above"
            return f"{origin}{claim}, the mean reward {goal} {best.score.mean:.3f}"
        counts, half = ", ".join(f"{n} {SAID[word]}" for word, n in cited.items()), sum(cited.values()) // 2
        return f"{origin}of {len(rows)} rollouts of {parent.name}, {counts}; {claim}, at most {half} will"

    taken = {program_of(outcome.candidate.source) for outcome in request.history}
    used: set[str] = set()                                          # mechanisms that this iteration has tried
    candidates = []
    for slot in range(request.n_candidates):
        for added, removed in fills(slot):
            has = add_mechanisms(base - set(removed), added, known)
            changed = [name for name in known if name in has - base]
            hypothesis = explain(changed, removed)
            source = render(has, textwrap.fill(f"From {parent.name} by rule: {hypothesis}.", 116))
            if program_of(source) not in taken:
                taken.add(program_of(source))
                used |= set(changed)
                candidates.append(Candidate("", parent.name, hypothesis, tuple(sorted(has)), source, 0))
                break
    return candidates
