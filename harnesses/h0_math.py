"""h0 of math, as in the paper: no system prompt, the question with the answer's format, the Python tool, two calls."""

from harness_api import PYTHON, chat, generate, python, tool_result

SYSTEM_PROMPT = ""
USER_PROMPT = "{question}\n\nPut your final answer in \\boxed{{}}."
MAX_CALLS = 2


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    for _ in range(MAX_CALLS):
        reply = yield generate(messages, tools=[PYTHON])
        messages.append(reply.message)
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            output = yield python(call.arguments.get("code", ""))
            messages.append(tool_result(call, output))
