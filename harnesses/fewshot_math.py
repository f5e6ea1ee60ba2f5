"""For a base model that was never taught to call tools: three worked examples as turns; a reply of code is run."""

from harness_api import chat, generate, python

SYSTEM_PROMPT = "Word problems are solved with one line of Python, then the answer is given in \\boxed{}."
USER_PROMPT = "{question}"
EXAMPLES = [
    ("Tom has 3 apples and buys 4 more. How many apples does he have now?", "print(3 + 4)", "7"),
    ("A box holds 12 pens. Mia has 5 boxes and gives away 7 pens. How many pens are left?", "print(5 * 12 - 7)", "53"),
    ("48 cards are shared equally among 6 friends. How many cards does each friend get?", "print(48 // 6)", "8"),
]


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(question=EXAMPLES[0][0]))
    for i, (question, code, output) in enumerate(EXAMPLES):
        if i:
            messages += chat("", USER_PROMPT.format(question=question))
        messages += solved(code, output) + [{"role": "assistant", "content": "\\boxed{" + output + "}"}]
    messages += chat("", USER_PROMPT.format(**task))
    reply = yield generate(messages, max_tokens=48, stop=["\n"])
    code = reply.content.strip()
    if not code.startswith("print("):
        return
    output = yield python(code)
    messages += solved(code, output)
    yield generate(messages, max_tokens=24, stop=["\n"])


def solved(code, output):
    return [{"role": "assistant", "content": code}, {"role": "tool", "name": "python", "content": output}]
