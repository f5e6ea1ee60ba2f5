"""The small chess world: endings and ends of random games with a forced mate in one or two.

Each mate is found, and its first move proved to be the only one, by exhaustive search. What the model is taught is
mixed on purpose (`demonstrate`, whose probabilities are the difficulty of the world):

- only weights can mend: moves that do not mate although one does, illegal moves, rambling;
- only a harness can mend: more than h0's one retry after a move that cannot be read, and one after an illegal one;
- both: a harness that marks the mating moves, or asks for them, is heeded more often than one that does not.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import chess

from chess_game import observe

MAX_LEGAL = 16              # legal moves of a position: they are all listed in the prompt
MATE_IN_TWO_SHARE = 0.3
CHUNK = 40                  # puzzles found from one seed
MATERIAL = "QP RP RR QR QN RB QB RN QPP RPP RRP Q BB".split()
EDGE = list(chess.SquareSet(chess.BB_RANK_1 | chess.BB_RANK_8 | chess.BB_FILE_A | chess.BB_FILE_H))
FOES = ["", "", "", "p", "pp", "n"]


@dataclass(frozen=True)
class Puzzle:
    fen: str
    line: tuple[str, ...]       # UCI: own move, or own move, a defence, and a mating move


# ---- finding and proving mates --------------------------------------------------------------------------------------


def find_mates(board: chess.Board) -> list[chess.Move]:
    """The moves that mate at once."""
    mates = []
    for move in board.legal_moves:
        if board.gives_check(move):
            board.push(move)
            if board.is_checkmate():
                mates.append(move)
            board.pop()
    return mates


def find_mates_in_two(board: chess.Board) -> list[tuple[chess.Move, chess.Move, chess.Move]]:
    """(move, the first defence, a mate against it) for moves after which every defence is mated; at most two such."""
    found = []
    for move in list(board.legal_moves):
        board.push(move)
        answers = {}
        for defence in list(board.legal_moves):
            board.push(defence)
            mates = find_mates(board)
            board.pop()
            if not mates:
                answers = {}
                break
            answers[defence] = mates[0]
        board.pop()
        if answers:
            found.append((move, *next(iter(answers.items()))))
            if len(found) > 1:
                break
    return found


def solve(board: chess.Board, longest: int) -> Puzzle | None:
    """The puzzle of a position, if exactly one first move forces mate in one or, where `longest` is 2, in two."""
    mates = find_mates(board)
    if mates or longest == 1:
        return Puzzle(board.fen(), (mates[0].uci(),)) if len(mates) == 1 else None
    lines = find_mates_in_two(board)
    return Puzzle(board.fen(), tuple(move.uci() for move in lines[0])) if len(lines) == 1 else None


def sample_positions(rng: random.Random) -> Iterator[chess.Board]:
    """Endings set up at random, and now and then the positions of a game of random moves."""
    while True:
        if rng.random() < 0.001:
            board = chess.Board()
            while not board.is_game_over() and board.ply() < 200:
                board.push(rng.choice(list(board.legal_moves)))
                if board.ply() > 20:
                    yield board
            continue
        king = rng.choice(EDGE)                     # where lone kings are mated, mostly with the other king near
        own_king = rng.choice([square for square in chess.SQUARES if 2 <= chess.square_distance(king, square) <= 3])
        others = rng.choice(MATERIAL) + rng.choice(FOES)
        free = [square for square in chess.SQUARES if square not in (king, own_king)]
        board = chess.Board(None)
        for square, piece in zip([king, own_king, *rng.sample(free, len(others))], "kK" + others, strict=True):
            board.set_piece_at(square, chess.Piece.from_symbol(piece))
        if board.is_valid():
            yield board.mirror() if rng.random() < 0.5 else board


def find_puzzles(seed: str) -> list[Puzzle]:
    """CHUNK puzzles, of which MATE_IN_TWO_SHARE are mates in two."""
    rng = random.Random(seed)
    missing = {1: round(CHUNK * (1 - MATE_IN_TWO_SHARE)), 3: round(CHUNK * MATE_IN_TWO_SHARE)}
    puzzles = []
    for board in sample_positions(rng):
        if board.legal_moves.count() > MAX_LEGAL or is_too_free(board):
            continue
        puzzle = solve(board.copy(stack=False), 2 if missing[3] else 1)
        if puzzle and missing[len(puzzle.line)]:
            missing[len(puzzle.line)] -= 1
            puzzles.append(puzzle)
            if not any(missing.values()):
                return puzzles


def is_too_free(board: chess.Board) -> bool:
    """Whether the other side has so many moves that a mate is unlikely: such positions are not searched."""
    board.turn = not board.turn
    n_moves = board.legal_moves.count()
    board.turn = not board.turn
    return n_moves > 3


def sample_puzzles(name: str, n: int, taken: set[str]) -> list[Puzzle]:
    """n puzzles whose positions are not in `taken`, which they join. Two processes; the same whatever their number."""
    puzzles: list[Puzzle] = []
    with ProcessPoolExecutor(2) as pool:
        for chunk in pool.map(find_puzzles, [f"{name} {i}" for i in range(n // CHUNK + 3)]):
            for puzzle in chunk:
                if puzzle.fen not in taken and len(puzzles) < n:
                    taken.add(puzzle.fen)
                    puzzles.append(puzzle)
    return puzzles


def vary(rng: random.Random, puzzle: Puzzle) -> Puzzle:
    """The same puzzle on a mirrored board."""
    board = chess.Board(puzzle.fen)
    moves = [chess.Move.from_uci(uci) for uci in puzzle.line]
    if rng.random() < 0.5:
        board = board.mirror()
        moves = [chess.Move(m.from_square ^ 56, m.to_square ^ 56, m.promotion) for m in moves]
    if rng.random() < 0.5 and not board.castling_rights:
        board = board.transform(chess.flip_horizontal)
        moves = [chess.Move(m.from_square ^ 7, m.to_square ^ 7, m.promotion) for m in moves]
    return Puzzle(board.fen(), tuple(move.uci() for move in moves))


# ---- demonstrations -------------------------------------------------------------------------------------------------

SYSTEM = "You solve chess puzzles. Play the best legal move, one move at a time."
OPENINGS = (SYSTEM, "You solve chess puzzles.", "You play chess.", "Find the best move.")
HEAD = ("Side to move: {side}", "FEN: {fen}", "Board:\n{board}", "Last reply of the opponent: {last_move}",
        "Your moves so far: {played}", "Move number: {move_number}", "Legal moves:\n{legal_moves}")
FORMAT_LINES = ("Answer with one move as <move>uci</move>.", "Give your move as <move>uci</move>.",
                "Put your move in <move></move>.", "Answer with <move>uci</move>.")
FILLER = ("Let me look at the board.", "Hmm, let me see.", "The king is in a corner.", "I could give a check.",
          "Maybe the rook can move.", "I should be careful here.", "Wait, let me look again.", "The queen is strong.",
          "First I look at the kings.", "There are many moves.")


def mate_nudge(rng: random.Random) -> str:
    return rng.choice(["If a move gives mate, play it.", "A move whose SAN ends with # is mate: play it.",
                       "Look for a mate first.", "First look for checkmate.", "Play the move with # if there is one."])


def legal_nudge(rng: random.Random) -> str:
    return rng.choice(["Choose a move from the list.", "Only moves of the list are legal.", "Your move must be legal."])


def malformed_nudge(rng: random.Random) -> str:
    return (rng.choice(["That was not a move. ", "No move could be read. ", "Your move could not be read. "])
            + rng.choice(FORMAT_LINES))


def illegal_nudge(rng: random.Random) -> str:
    return (rng.choice(["That move is not legal. ", "This is no legal move. ", "Your move is illegal. "])
            + rng.choice(["Choose a move from the list.", "Choose another move.", "Take one of the legal moves."]))


def mark_moves(legal_moves: str, style: str) -> str:
    """The lines of legal moves with (mate), (check), (capture) at their ends, or under such headings, mates first."""
    groups: dict[str, list[str]] = {"mate": [], "check": [], "capture": [], "": []}
    for line in legal_moves.splitlines():
        groups["mate" if "#" in line else "check" if "+" in line else "capture" if "x" in line else ""].append(line)
    if style == "grouped":
        return "\n".join(f"({name or 'other'})\n" + "\n".join(lines) for name, lines in groups.items() if lines)
    return "\n".join(line + (f" ({name})" if name else "") for name, lines in groups.items() for line in lines)


def spoil_move(rng: random.Random, uci: str) -> str:
    """A move from or to another square; mostly illegal."""
    i = rng.choice([1, 3])
    return uci[:i] + rng.choice("12345678".replace(uci[i], "")) + uci[i + 1:4]


def demonstrate(rng: random.Random, puzzle: Puzzle) -> list[dict]:
    """One dialogue as chat messages. A ramble is an assistant turn with `cut`: it has no end."""
    plain = rng.random() < 0.35                                     # h0's context
    asks_mate, asks_legal = (not plain and rng.random() < 0.4), (not plain and rng.random() < 0.3)
    style = "" if plain else rng.choice(["", "", "grouped", "marked"])
    retries = 1 if plain else rng.choice([0, 1, 2, 3])
    format_line = FORMAT_LINES[0] if plain else rng.choice(FORMAT_LINES)
    nudges = [nudge(rng) for flag, nudge in ((asks_mate, mate_nudge), (asks_legal, legal_nudge)) if flag]
    in_system = rng.random() < 0.5
    system = " ".join([SYSTEM if plain or rng.random() < 0.5 else rng.choice(OPENINGS)] + nudges * in_system)
    head = [line for line in HEAD if plain or "legal_moves" in line or rng.random() < 0.8]
    template = "\n".join(head) + "\n\n" + " ".join(nudges * (not in_system) + [format_line])
    board, last_move, played = chess.Board(puzzle.fen), "none", ()

    def show() -> str:
        fields = observe(board, last_move, played)
        if style:
            fields = fields | {"legal_moves": mark_moves(fields["legal_moves"], style)}
        return template.format(**fields)

    messages = [{"role": "system", "content": system}, {"role": "user", "content": show()}]
    at, tries_left, was_sent_back = 0, {"malformed": retries, "illegal": retries}, False
    while True:
        move = choose_move(rng, board, puzzle.line[at], asks_mate, style)
        kind = rng.choices(["tag", "bare", "malformed", "illegal", "two", "ramble"],
                           [0.66, 0.05, 0.05 if was_sent_back else 0.12, 0.02 if asks_legal or was_sent_back else 0.07,
                            0.04, 0.06])[0]
        text, cut = say_move(rng, kind, move, board)
        messages.append({"role": "assistant", "content": text, **({"cut": True} if cut else {})})
        if kind in ("malformed", "illegal") and tries_left[kind]:
            tries_left[kind] -= 1
            was_sent_back = True
            nudge = malformed_nudge if kind == "malformed" else illegal_nudge
            messages.append({"role": "user", "content": nudge(rng)})
            continue
        if kind in ("malformed", "illegal", "ramble") or move != puzzle.line[at] or at + 2 >= len(puzzle.line):
            return messages
        board.push_uci(move)
        last_move = f"{puzzle.line[at + 1]} ({board.san(chess.Move.from_uci(puzzle.line[at + 1]))})"
        board.push_uci(puzzle.line[at + 1])
        played, at, was_sent_back = (*played, move), at + 2, False
        messages.append({"role": "user", "content": show()})


def choose_move(rng: random.Random, board: chess.Board, right: str, asks_mate: bool, style: str) -> str:
    """The right move more often where it mates and the prompt says so; otherwise some other legal move."""
    mates = [move.uci() for move in find_mates(board)]
    p_right = 0.45 if not mates else 0.80 if asks_mate and style else 0.72 if style else 0.62 if asks_mate else 0.42
    if rng.random() < p_right:
        return rng.choice(mates) if mates else right
    others = [move for move in board.legal_moves if move.uci() not in mates] or list(board.legal_moves)
    checks = [move for move in others if board.gives_check(move)]
    return rng.choice(checks if checks and rng.random() < 0.3 else others).uci()


def say_move(rng: random.Random, kind: str, move: str, board: chess.Board) -> tuple[str, bool]:
    """-> the reply, and whether it was cut (a ramble has no end)."""
    opening = rng.choice(["", "", "", "I play this move.\n", "This looks best.\n"])
    if kind == "ramble":
        return " ".join(rng.choice(FILLER) for _ in range(rng.randint(12, 18))), True
    if kind == "bare":
        return rng.choice([move, f"My move is {move}.", f"I play {move}."]), False
    if kind == "malformed":
        return opening + rng.choice([f"<move>{move[:2]}</move>", "<move>uci</move>", "I move the king.",
                                     f"<move>{move[:3]}</move>"]), False
    if kind == "illegal":
        move = spoil_move(rng, move)
    if kind == "two":
        other = rng.choice(list(board.legal_moves)).uci()
        return opening + f"<move>{other}</move> or <move>{move}</move>", False
    return opening + f"<move>{move}</move>", False
