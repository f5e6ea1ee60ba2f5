"""h0 of search, as in the paper: one query, the best passage cut at 200 tokens, two model calls."""

from harness_api import SEARCH, chat, generate, search, tool_result

SYSTEM_PROMPT = "Answer questions of fact, using search when needed."
USER_PROMPT = "{question}\n\nGive your final answer in <answer></answer>."
MAX_CALLS = 2


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    for _ in range(MAX_CALLS):
        reply = yield generate(messages, tools=[SEARCH])
        messages.append(reply.message)
        if not reply.tool_calls:
            return
        for call in reply.tool_calls[:1]:
            output = yield search(call.arguments.get("query", ""), topk=1, max_tokens=200)
            messages.append(tool_result(call, output))
