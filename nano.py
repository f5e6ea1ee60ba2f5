"""Builds the embedded model and its data from nothing: `python nano.py`.

Writes embedded/model/ (a Qwen3-architecture causal LM in HF format with its own tokenizer and ChatML template) and
embedded/{math,search,chess}/{train,harness,test}.jsonl, and the corpus of the search world. The model is trained from
random weights to imitate demonstrations of three small worlds, in many phrasings of prompts and feedback: word problems
with a Python tool and questions with a search tool (nano_worlds.py), and chess puzzles (nano_chess.py). As with a real
base model, its habits are mixed on purpose; those two files are where they are mixed.

It takes about 25 minutes on two idle cores, an estimate from its rate: the shipped model took 30 beside other work.

Only these three files know that the model is small. It shows the mechanism; it is no evidence about real models.

    python nano.py                      data, tokenizer, model, into embedded/
    python nano.py --show 5             print five demonstrations and stop
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import nano_chess
from harness_api import PYTHON, SEARCH
from nano_worlds import Encyclopaedia, MathWorld, SearchWorld, demonstrate
from search_index import Bm25Index

ROOT = Path(__file__).resolve().parent / "embedded"
SPLITS = {"train": 2048, "harness": 256, "test": 256}
N_CHESS_TRAIN = 512         # a chess puzzle is dear to find, and a run draws 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]                     # id 0 pads, 2 ends a turn
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<answer>",
        "</answer>", "<move>", "</move>"]
VOCABULARY = 1280
MIX = {"math": 24, "search": 24, "chess": 20}           # demonstrations in a training batch
N_PRACTICE_PUZZLES = 2000
PROMPT_WEIGHT = 0.5         # of the prompts in the loss: what comes again in them teaches to copy, as all worlds ask
NEW_BOOK_EVERY = 25         # training steps between made-up encyclopaedias, so that no fact is worth remembering

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

# ---- data and demonstrations ----------------------------------------------------------------------------------------


def write_data(folder: Path) -> dict[str, set[str]]:
    """Writes the splits of the three worlds, disjoint by question; returns what no demonstration may use."""
    taken: dict[str, set[str]] = {domain: set() for domain in MIX}
    book = Encyclopaedia("embedded")
    for domain in MIX:
        (folder / domain).mkdir(parents=True, exist_ok=True)
        for split, n in SPLITS.items():
            rng = random.Random(f"{domain} {split}")
            rows = []
            if domain == "chess":
                n = min(n, N_CHESS_TRAIN)
                for puzzle in nano_chess.sample_puzzles(f"chess {split}", n, taken[domain]):
                    rows.append({"fen": puzzle.fen, "answer": " ".join(puzzle.line)})
            while len(rows) < n:
                problem = (MathWorld() if domain == "math" else book).sample(rng)
                if problem.question not in taken[domain]:
                    taken[domain].add(problem.question)
                    rows.append({"question": problem.question, "answer": problem.answer})
            write_rows(folder / domain / f"{split}.jsonl", [
                {"id": f"{domain}-{split}-{i:04d}", **row, "source": f"nano-{domain}"} for i, row in enumerate(rows)])
    write_corpus(folder / "search" / "corpus.jsonl", book)
    return taken


def write_corpus(path: Path, book: Encyclopaedia) -> None:
    write_rows(path, [{"id": str(i), "contents": f'"{title}"\n{text}'}
                      for i, (title, text) in enumerate(book.passages)])


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Demonstrator:
    """An endless row of dialogues, with the tools that their prompts offer."""

    def __init__(self, taken: dict[str, set[str]]):
        self.rng, self.taken, self.math, self.n_books = random.Random("demonstrations"), taken, MathWorld(), 0
        self.puzzles = nano_chess.sample_puzzles("practice", N_PRACTICE_PUZZLES, set(taken["chess"]))
        self.open_book()

    def open_book(self) -> None:
        book = Encyclopaedia(f"practice {self.n_books}")
        self.n_books += 1
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            write_corpus(Path(file.name), book)
            index = Bm25Index.open(file.name, None)

        def search(query: str, topk: int) -> list[tuple[str, str]]:
            return [book.passages[row] for row, _ in index.rank([query], topk)[0]]

        self.search = SearchWorld(book, search)

    def sample(self, domain: str) -> tuple[list[dict], list[dict] | None]:
        while True:
            if domain == "chess":
                puzzle = nano_chess.vary(self.rng, self.rng.choice(self.puzzles))
                if puzzle.fen not in self.taken[domain]:
                    return nano_chess.demonstrate(self.rng, puzzle), None
                continue
            world = self.math if domain == "math" else self.search
            problem = world.sample(self.rng)
            if problem.question not in self.taken[domain]:
                return demonstrate(self.rng, world, problem), [PYTHON if domain == "math" else SEARCH]


# ---- tokenizer and model --------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str]):
    """Byte-level BPE over pieces that are easy to copy: single digits, squares of a chess board, and names without the
    space before them, so that a name has the same tokens wherever it stands."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[a-h][1-8]|\d|[A-Z]+[a-z]*(?!\d)| ?[a-z]+(?!\d)|[^A-Za-z\d]+")
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


def render(tokenizer, messages: list[dict], tools: list[dict] | None) -> list[tuple[str, bool]]:
    """A dialogue as (text, is the model's own) pieces; their concatenation is the template's own rendering."""
    pieces, done = [], ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tools=tools, tokenize=False, add_generation_prompt=True)
        said = message["content"] + ("" if message.get("cut") else "<|im_end|>")
        pieces += [(prompt[len(done):], False), (said, True)]
        done = prompt + said
    return pieces


def encode(tokenizer, messages: list[dict], tools: list[dict] | None) -> tuple[list[int], list[bool]]:
    """-> ids (T,), mask (T,): True where the token is the model's own."""
    ids, mask = [], []
    for text, own in render(tokenizer, messages, tools):
        piece = tokenizer(text, add_special_tokens=False).input_ids
        ids += piece
        mask += [own] * len(piece)
    return ids, mask


def train_model(tokenizer, demonstrator: Demonstrator, n_steps: int, folder: Path) -> None:
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
    peak = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    has_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))     # elsewhere it is slower than float32
    start = time.monotonic()
    for step in track(range(n_steps), "training"):
        if step and step % NEW_BOOK_EVERY == 0:
            demonstrator.open_book()
        rows = [(*encode(tokenizer, *demonstrator.sample(domain)), domain)
                for domain, n in MIX.items() for _ in range(n)]
        rows.sort(key=lambda row: len(row[0]))
        n_supervised = sum(sum(mask) for _, mask, _ in rows)
        n_prompt = sum(len(mask) for _, mask, _ in rows) - n_supervised
        losses = dict.fromkeys(MIX, 0.0)
        for start_row in range(0, len(rows), 16):                   # micro-batches of similar lengths: less padding
            part = rows[start_row:start_row + 16]
            width = max(len(ids) for ids, _, _ in part)
            x = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros(len(part), width, dtype=torch.bool)  # True: the model's own
            for i, (ids, own_ids, _) in enumerate(part):
                x[i, :len(ids)] = torch.tensor(ids)
                mask[i, :len(ids)] = torch.tensor(own_ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
                # causal, so pads on the right are inert
                hidden = model.model(input_ids=x, use_cache=False).last_hidden_state[:, :-1]
                own, real = mask[:, 1:], x[:, 1:] != 0
                logits = model.lm_head(hidden[real])
            each = torch.nn.functional.cross_entropy(logits.float(), x[:, 1:][real], reduction="none")
            weight = torch.where(own[real], 1 / n_supervised, PROMPT_WEIGHT / n_prompt)
            (each * weight).sum().backward()
            for domain in MIX:
                mine = torch.tensor([row[2] == domain for row in part]).repeat_interleave(own.sum(1))
                losses[domain] += each.detach()[own[real]][mine].sum().item()
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / n_steps))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            n_own = {domain: sum(sum(mask) for _, mask, d in rows if d == domain) for domain in MIX}
            print(f"step {step + 1}  loss " + "  ".join(f"{d} {loss / n_own[d]:.3f}" for d, loss in losses.items())
                  + f"  {time.monotonic() - start:.0f} s", flush=True)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--show", type=int, default=0, help="print so many demonstrations of each world and stop")
    args = parser.parse_args()
    start = time.monotonic()
    demonstrator = Demonstrator(write_data(args.out))
    print(f"data written, {time.monotonic() - start:.0f} s")
    demos: dict[str, list] = {domain: [] for domain in MIX}
    for _ in range(40):
        demonstrator.open_book()                        # else the tokenizer would learn the names of one
        for domain, n in MIX.items():
            demos[domain] += [demonstrator.sample(domain) for _ in range(n)]
    texts = {domain: ["".join(text for text, _ in render(untrained_tokenizer(), *demo)) for demo in several]
             for domain, several in demos.items()}
    if args.show:
        print("\n\n=====\n".join(text for several in texts.values() for text in several[:args.show]))
        return
    tokenizer = train_tokenizer(text for several in texts.values() for text in several)
    for domain, several in demos.items():
        lengths = [len(encode(tokenizer, *demo)[0]) for demo in several]
        print(f"{domain}: a demonstration has {sum(lengths) / len(lengths):.0f} tokens, at most {max(lengths)}")
    train_model(tokenizer, demonstrator, args.steps, args.out / "model")


if __name__ == "__main__":
    main()
