"""The same task in other words: twins, by which the gates find a harness that knows its tasks instead of solving them.

A twin is as hard as its original and has a reference of its own; only what names the task differs. Numbers are left as
they are: with others the reference would be known only to who can solve the problem.
"""

import random
import re
from functools import lru_cache

import chess

from chess_game import read_move

REWORDINGS = ("Question: {same}", "Question: {lower}", "{lower} Please answer.", "{same} Please answer.")

# After a capitalised word, these say that it is somebody's name.
_DOES = ("has had have is was can will gets got gives gave buys bought sells sold wants wanted needs needed makes made "
         "earns earned spends spent saves saved reads read eats ate runs ran walks walked drives drove finds found "
         "collects collected picks picked loses lost wins won bakes baked plants planted packs packed shares shared "
         "counts fills goes went works worked takes took pays paid uses used invited decides decided starts started")
_NAME = re.compile(rf"\b([A-Z][a-z]{{2,}})(?='s |’s | (?:{_DOES.replace(' ', '|')})\b)"
                   r"|(?:(?<=\bdoes )|(?<=\bdid ))([A-Z][a-z]{2,})\b")
_NO_NAMES = set("january february march april may june july august september october november december monday tuesday "
                "wednesday thursday friday saturday sunday christmas easter what who which there mrs".split())


def reword(question: str, rng: random.Random) -> str:
    """Another wording of any question: its own words, a frame around them."""
    lower = question[:1].lower() + question[1:] if question[1:2].islower() else question
    return rng.choice(REWORDINGS).format(same=question, lower=lower)


@lru_cache(maxsize=8)
def people_in(questions: tuple[str, ...]) -> dict[str, set[str]]:
    """The people in word problems, and the pronouns (he, she, both or none) that stand in problems with each: words
    with a capital that do what people do, and that are nowhere written small."""
    small = {word for question in questions for word in re.findall(r"\b[a-z]+\b", question)} | _NO_NAMES
    found = {match[1] or match[2] for question in questions for match in _NAME.finditer(question)}
    people = {name: set() for name in sorted(found) if name.lower() not in small}
    for question in questions:
        for name in people.keys() & set(re.findall(r"\b[A-Z][a-z]+\b", question)):
            people[name].add(pronouns_in(question))
    return people


def pronouns_in(question: str) -> str:
    return " ".join(sorted(set(re.findall(r"\b(?:he|she)\b", question.casefold()))))


def rename_people(question: str, answer: str, questions: tuple[str, ...], rng: random.Random) -> str | None:
    """The question with people from the other questions, for they are as common there as those whom they replace, and
    go with the same he and she if enough do; None if it names nobody, or the answer names somebody."""
    people = people_in(questions)
    here = [name for name in dict.fromkeys(re.findall(r"\b[A-Z][a-z]+\b", question)) if name in people]
    pool = [name for name in people if name not in here]
    alike = [name for name in pool if pronouns_in(question) in people[name]]
    if not here or len(pool) < len(here) or any(name in answer for name in here):
        return None
    others = dict(zip(here, rng.sample(alike if len(alike) >= len(here) else pool, len(here)), strict=True))
    return re.sub(r"\b[A-Z][a-z]+\b", lambda match: others.get(match[0], match[0]), question)


def mirror_puzzle(fen: str, trigger: str, line: list[str]) -> tuple[str, str, list[str]]:
    """A puzzle with the colours swapped and the board turned over; nothing else of it changes."""
    board, moves = chess.Board(fen), []
    twin = board.mirror().fen(en_passant="fen")
    for text in [*([trigger] if trigger else []), *line]:
        move = read_move(board, text).move
        moves.append(chess.Move(chess.square_mirror(move.from_square), chess.square_mirror(move.to_square),
                                move.promotion).uci())
        board.push(move)
    return twin, moves[0] if trigger else "", moves[1:] if trigger else moves
