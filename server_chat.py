"""Servers of whose model there is no tokenizer here, over /v1/chat/completions: llama.cpp, Ollama, hosted APIs.

Prompts and replies stay ids, as everywhere. These ids are our own: each stands for a short piece of text, about a token
long, so that their number is an estimate. What a rollout may say and what it is charged for is the server's own count
(`Completion.usage`), where it gives one.

Servers differ in what they take. What one refuses is done in the next best way, which is remembered, and said once:

    tools           shown by the server, which reads the calls; shown, and read here; described in the system prompt
    tool outputs    as turns of role "tool"; as the user's words, where the server wants each tied to a call of its own
    parameters      temperature always, and what else it takes; top_p may go only where it is 1
    a long prompt   fewer tokens for the reply, until it is clear that the prompt does not fit

A harness and the gates see one form: raw text with <think> and <tool_call> blocks, whatever fields the server used.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from transformers import BatchEncoding

from engine import Completion, SamplingParams
from server_call import ServerFailed, ServerRefused, check_length
from tasks import MAX_TOKEN_CHARS

BEGIN, END = "<|im_start|>", "<|im_end|>"
# defused in what a harness sends, as a model's own turn tokens are where its tokenizer is known
TURNS = (BEGIN, END, "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
         "<end_of_turn>", "[INST]", "[/INST]", "</s>")
PIECE = re.compile("|".join(map(re.escape, TURNS)) + r"| ?[A-Za-z]{1,6}|[0-9]{1,3}| {2,7}|.", re.DOTALL)
N_TURNS = 256           # ids below are those of TURNS
SHOWN_AND_READ, SHOWN, DESCRIBED = range(3)         # the tools
OPTIONAL = ("top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop")
LEAST_TOK = 16          # a reply that has no room for so many does not fit
TOO_LONG = re.compile(r"context.{0,9}(length|size|window)|too (long|large)|maximum.{0,30}tokens", re.IGNORECASE)
FILTERED = re.compile(r"content.?(filter|management|policy)", re.IGNORECASE)
TOOL_TURN = re.compile(r"\broles?\b|tool_call_id|preced|alternat", re.IGNORECASE)


class ChatTokenizer:
    """What rollouts ask of a tokenizer, over pieces of text: an id is its piece's bytes behind a 1, as a number."""

    chat_template = "chat"
    all_special_tokens, added_tokens_decoder = list(TURNS), {}
    eos_token_id = TURNS.index(END)

    def __call__(self, text: str, **_) -> BatchEncoding:
        found = list(PIECE.finditer(text))
        return BatchEncoding({"input_ids": [id_of(piece[0]) for piece in found],
                              "offset_mapping": [piece.span() for piece in found]})

    def decode(self, ids: Iterable[int], **_) -> str:
        return "".join(map(piece_of, map(int, ids)))

    def apply_chat_template(self, messages: list[dict], tools: list[dict] | None = None, **_) -> str:
        turns = [("tools", json.dumps(tools))] * bool(tools)
        turns += [(" ".join([m["role"], *m.get("name", "").split()]), m["content"]) for m in messages]
        return "".join(f"{BEGIN}{who}\n{content}{END}\n" for who, content in turns) + f"{BEGIN}assistant\n"

    def read_prompt(self, ids: list[int]) -> tuple[list[dict], list[dict] | None]:
        """-> the messages and tools that a prompt was made from."""
        messages, tools = [], None
        for turn in self.decode(ids).split(BEGIN)[1:-1]:
            who, _, content = turn.removesuffix(f"{END}\n").partition("\n")
            role, _, name = who.partition(" ")
            if role == "tools":
                tools = json.loads(content)
                continue
            content = content.encode("utf-8", "replace").decode()           # a lone surrogate is no text for a server
            named = {"name": name} if role == "tool" and name else {}       # elsewhere servers are strict about names
            messages.append({"role": role, **named, "content": content})
        return messages, tools


@lru_cache(maxsize=1 << 16)
def id_of(piece: str) -> int:
    """Of at most seven bytes, so that it fits 64 bits."""
    return TURNS.index(piece) if piece in TURNS else int.from_bytes(b"\1" + piece.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1 << 16)
def piece_of(id: int) -> str:
    return TURNS[id] if id < N_TURNS else id.to_bytes(8).lstrip(b"\0")[1:].decode("utf-8", "surrogatepass")


@dataclass
class Manners:
    """What a server was found to take."""
    tools: int = SHOWN_AND_READ
    tool_turns: bool = True
    refused: set[str] = field(default_factory=set)              # parameters
    limit_name: str = "max_tokens"


class Chat:
    """Completions over /v1/chat/completions. `call`: Client.call. `note`: gets what the user should know."""

    def __init__(self, call: Callable[..., dict], note: Callable[[str], None]):
        self.tokenizer, self.call, self.note = ChatTokenizer(), call, note
        self.manners: dict[str, Manners] = defaultdict(Manners)                 # by URL

    def sample(self, url: str, model: str, id: Hashable, prompt_ids: list[int], params: SamplingParams,
               limit_s: float) -> Completion:
        """One completion. ServerFailed, or ServerRefused where no way of asking is left."""
        messages, tools = self.tokenizer.read_prompt(prompt_ids)
        n_tok = params.max_tokens
        while True:
            body = self._body(self.manners[url], model, messages, tools, params, n_tok)
            try:
                answer = self.call(url, "POST", "/v1/chat/completions", body, limit_s)
            except (ServerFailed, ServerRefused) as error:
                if error.status in (400, 413) and FILTERED.search(error.answer):
                    self.note(f"{url} refuses some prompts by a filter of its own; they count as replies cut short")
                    return Completion(id, [], "length", (0, 0))
                if error.status in (400, 413) and TOO_LONG.search(error.answer):
                    n_tok //= 2
                    if n_tok < min(LEAST_TOK, params.max_tokens):
                        self.note(f"{url} finds some prompts too long: their rollouts end there")
                        return Completion(id, [], "too_long")
                elif not self._adapt(url, body, error):
                    raise
            else:
                return self._read(url, id, prompt_ids, n_tok, answer)

    def _body(self, manners: Manners, model: str, messages: list[dict], tools: list[dict] | None,
              params: SamplingParams, n_tok: int) -> dict:
        if tools and manners.tools == DESCRIBED:
            messages = with_tools(messages, tools)
        if not manners.tool_turns or manners.tools == DESCRIBED:
            messages = without_tool_turns(messages)
        else:
            messages = [m | {"tool_call_id": f"call_{i}"} if m["role"] == "tool" else m for i, m in enumerate(messages)]
        body = {"model": model, "messages": messages, manners.limit_name: n_tok, "temperature": params.temperature,
                "top_p": params.top_p, "top_k": params.top_k, "seed": params.seed % (1 << 31), "min_p": 0.0,
                "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if params.stop:
            body["stop"] = list(params.stop)                    # where it is refused, the reply is cut here
        if tools and manners.tools != DESCRIBED:
            body |= {"tools": tools, "tool_choice": "auto" if manners.tools == SHOWN_AND_READ else "none"}
        return {key: value for key, value in body.items() if key not in manners.refused}

    def _adapt(self, url: str, body: dict, error: ServerFailed | ServerRefused) -> bool:
        """Whether there is another way of asking, after this refusal. Some say 500 of tools that they do not know."""
        manners, answer = self.manners[url], error.answer
        if error.status not in (400, 404, 422, 500, 501):
            return False
        if any(m["role"] == "tool" for m in body["messages"]) and TOOL_TURN.search(answer):
            manners.tool_turns = False
            self.note(f"{url} takes no tool outputs that answer no call of its own: they are sent as the user's words")
            return True
        if "tools" in body and re.search(r"\btools?\b|tool_", answer, re.IGNORECASE):
            asked = SHOWN_AND_READ if body["tool_choice"] == "auto" else SHOWN
            manners.tools = max(manners.tools, asked + 1)       # another thread may have got further
            self.note(f"{url} " + ("does not read tool calls: they are read here" if manners.tools == SHOWN else
                                   "takes no tools: they are described in the system prompt"))
            return True
        if error.status not in (400, 422):
            return False
        if "max_tokens" in body and "max_completion_tokens" in answer:
            manners.limit_name = "max_completion_tokens"
            return True
        may_go = OPTIONAL + tuple(name for name in ("temperature", "top_p") if body.get(name) == 1)     # their default
        named = {name for name in may_go if name in body and re.search(rf"\b{name}\b", answer)}
        if named:
            manners.refused |= named
            self.note(f"{url} does not take {', '.join(sorted(named))}: left out")
        return bool(named)

    def _read(self, url: str, id: Hashable, prompt_ids: list[int], n_tok: int, answer: dict) -> Completion:
        try:
            (choice,) = answer["choices"]
            text, finish = text_of(choice["message"]).encode("utf-8", "replace").decode(), choice["finish_reason"]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            raise ServerFailed(f"{url} answered {str(answer)[:300]}") from None
        if finish in ("error", "abort"):
            raise ServerFailed(f"{url} ended a request with {finish!r}")
        if finish == "content_filter":
            self.note(f"{url} cuts some replies by a filter of its own; they count as cut short")
        check_length(url, text, n_tok)
        cut = finish in ("length", "content_filter")
        ids = self.tokenizer(text).input_ids + [self.tokenizer.eos_token_id] * (not cut)
        usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
        counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
        if not all(type(count) is int and 0 <= count < 10**9 for count in counts) \
                or not len(text) / MAX_TOKEN_CHARS <= counts[1] <= n_tok:
            self.note(f"{url} does not always say how many tokens it used, or not what can be: they are estimated from "
                      "the text")
            counts = [len(prompt_ids), min(len(ids), n_tok)]
        return Completion(id, ids, "length" if cut else "stop", tuple(counts))


def text_of(message: dict) -> str:
    """A reply as raw text: thinking and tool calls, if the server has set them apart, are blocks in it again."""
    text, thought = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning") or ""
    if isinstance(text, list):                                  # of parts
        text = "".join(part.get("text") or "" for part in text)
    blocks = []
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            pass                                                # a malformed call stays one
        block = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        blocks.append("<tool_call>\n" + block.replace("</", "<\\/") + "\n</tool_call>")     # it ends at its own tag
    if "<tool_call>" not in text:
        text = "\n".join(filter(None, [text, *blocks]))
    return f"<think>\n{thought.strip()}\n</think>\n\n{text}" if thought and "</think>" not in text else text


def with_tools(messages: list[dict], tools: list[dict]) -> list[dict]:
    """The messages with the tools described in the system prompt, in the words of Qwen3's template."""
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    text = (f"# Tools\n\nYou may call one or more functions. Their signatures:\n<tools>\n{schemas}\n</tools>\n\nFor "
            'each call, write a JSON object with its name and arguments:\n<tool_call>\n{"name": <function-name>, '
            '"arguments": <args-json-object>}\n</tool_call>\nand wait for the output.')
    if messages[0]["role"] == "system":
        return [messages[0] | {"content": messages[0]["content"] + "\n\n" + text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def without_tool_turns(messages: list[dict]) -> list[dict]:
    """Tool outputs as the user's words. Turns of the user in a row become one: some servers want them to alternate."""
    turns: list[dict] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"Output of {message.get('name', 'the tool')}:\n{content}"
        if role == "user" and turns and turns[-1]["role"] == "user":
            turns[-1] = {"role": "user", "content": turns[-1]["content"] + "\n\n" + content}
        else:
            turns.append({"role": role, "content": content})
    return turns
