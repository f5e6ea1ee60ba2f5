"""The board of the chess domain: what a player sees, how its words are read as moves, how a puzzle's line is played.

A puzzle is a position and a line: own move, reply, own move, ..., own move. It is solved when the whole line was
played, one move a model reply; where the expected move mates, any mate is right; any other legal move loses.

How words are read (`read_move`): coordinates in any case (e2e4, E7E8Q, e7-e8=q; e1h1 castles when the king may), SAN
with or without x, + and #, castling as O-O, 0-0 or o-o. A lower-case piece letter is understood (qxf7), but B is
always the bishop and b always the file: neither stands for the other, and B1c3 is a bishop's move, not b1c3. A
promotion needs its letter. Null moves and drops are no moves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import chess

from harness_api import said_moves
from tasks import Verdict

@dataclass(frozen=True)
class Reading:
    """What a text says on a board; `move` is None unless it is a legal one."""
    kind: str                                               # "move", "illegal", "malformed"
    move: chess.Move | None = None


_COORDINATES = re.compile("([a-h][1-8])[-x]?([a-h][1-8])=?([qrbn]?)", re.IGNORECASE)
_CASTLING = re.compile("[oO0]-[oO0](-[oO0])?")
_SAN = re.compile("([kqrnB])([a-h]?)([1-8]?)[-x]?([a-h][1-8])|(?:([a-h])x)?([a-h][1-8])(?:=?([qrbnQRBN]))?")


def read_move(board: chess.Board, text: str) -> Reading:
    """Reads a text as one move in this position. Clear but not allowed: "illegal"; unclear or no move: "malformed"."""
    text = text.strip().rstrip("+#!?")
    if castling := _CASTLING.fullmatch(text):
        is_wanted = board.is_queenside_castling if castling[1] else board.is_kingside_castling
        found = [move for move in board.generate_castling_moves() if is_wanted(move)]
    elif san := _SAN.fullmatch(text if text[:1] in "bB" else text.lower()):
        found = _find_san(board, san)
    elif coordinates := _COORDINATES.fullmatch(text):
        try:
            move = board.parse_uci("".join(coordinates.groups()).lower())       # takes e1h1 as castling, e1g1q too
            found = [move] if bool(move.promotion) == bool(coordinates[3]) else []
        except ValueError:
            found = []
    else:
        return Reading("malformed")
    if len(found) == 1:
        return Reading("move", found[0])
    return Reading("malformed" if found else "illegal")     # several: Rd1 where two rooks can go there


def _find_san(board: chess.Board, san: re.Match) -> list[chess.Move]:
    piece, file, rank, square, pawn_file, pawn_square, letter = san.groups()
    square = square or pawn_square
    file = file or pawn_file or ("" if piece else square[0])                    # a pawn that takes names its file
    sources = board.pieces_mask(chess.PIECE_SYMBOLS.index((piece or "p").lower()), board.turn)
    sources &= chess.BB_FILES[chess.FILE_NAMES.index(file)] if file else chess.BB_ALL
    sources &= chess.BB_RANKS[chess.RANK_NAMES.index(rank)] if rank else chess.BB_ALL
    promotion = chess.PIECE_SYMBOLS.index(letter.lower()) if letter else None
    target = chess.BB_SQUARES[chess.parse_square(square)] & ~board.occupied_co[board.turn]      # Kh1 never castles
    return [move for move in board.generate_legal_moves(sources, target) if move.promotion == promotion]


def observe(board: chess.Board, last_move: str, played: Sequence[str]) -> dict[str, str]:
    """The fields that a harness sees; `last_move` is the opponent's, or "none"; `played` the own moves, in UCI."""
    return dict(_observe(board.fen(), last_move, " ".join(played)))


@lru_cache(maxsize=4096)                                    # the samples of a task share their positions
def _observe(fen: str, last_move: str, played: str) -> dict[str, str]:
    board = chess.Board(fen)
    legal = sorted((move.uci(), board.san(move)) for move in board.legal_moves)
    return {
        "side": "White" if board.turn else "Black",
        "fen": fen,
        "board": str(board),
        "last_move": last_move,
        "played": played or "none",
        "move_number": str(len(played.split()) + 1),
        "legal_moves": "\n".join(f"- [{uci}] SAN={san}" for uci, san in legal),
    }


def check_line(fen: str, trigger: str | None, line: Sequence[str]) -> str:
    """Why a puzzle cannot be played, in words; "" if it can. `trigger` is the opponent's move that leads from `fen` to
    the puzzle (Moves[0] of a Lichess row; the rest is the line), None if `fen` is the puzzle itself."""
    try:
        board = chess.Board(fen)
    except ValueError as error:
        return f"bad FEN {fen[:100]!r}: {error}"[:300]
    if not board.is_valid():
        return f"FEN {fen[:100]!r} is no possible position: {board.status().name}"
    if len(line) % 2 == 0:
        return f"the line has {len(line)} moves; it must begin and end with an own move, so their number is odd"
    for ply, text in enumerate([trigger, *line] if trigger else line, start=1):
        reading = read_move(board, text)
        if not reading.move:
            return f"move {text[:20]!r} (ply {ply}) is {reading.kind} in {board.fen()}"
        board.push(reading.move)
    return ""


_FAILURES = {                                               # by the last try: kind, why
    "": ("no_move", "no move was tried"),
    "malformed": ("malformed_move", "the last try cannot be read as a move"),
    "illegal": ("illegal_move", "the last try is not legal"),
    "unsaid": ("unsaid_move", "the last try is not what the model's reply says"),
    "accepted": ("unfinished", "right so far, but the rollout ended before the puzzle was solved"),
    "wrong": ("wrong_move", "a legal move, but not the right one"),
}


class Game:
    """One rollout's puzzle. The line must have passed `check_line`."""

    def __init__(self, fen: str, trigger: str | None, line: Sequence[str]):
        self.board = chess.Board(fen)
        self.line = tuple(line)
        self.played: list[str] = []                         # own accepted moves, in UCI
        self.status = "open"                                # "open", "solved", "wrong"
        self.last = ""                                      # status of the last try
        self.tried: str | None = None                       # text of the last try
        self.accepted_turn: int | None = None
        self.last_move = self._push(trigger) if trigger else "none"

    def _push(self, text: str) -> str:
        move = read_move(self.board, text).move
        words = f"{move.uci()} ({self.board.san(move)})"
        self.board.push(move)
        return words

    def observation(self) -> dict[str, str]:
        return observe(self.board, self.last_move, self.played)

    def play(self, text: str, reply: str, turn: int) -> dict:
        """Tries the move that a harness handed over; it must be one that the model's last reply, call `turn`, says.

        -> {"output": words, "ok": bool, "details": {"status", and "task" if the game goes on}, "end": if it is over}.
        """
        if self.status != "open":
            return {"output": "the game is over", "ok": False, "details": {"status": "over"}}
        self.last, output = self._try(text, reply, turn)
        self.tried = text[:200].encode("utf-8", "backslashreplace").decode()    # no lone surrogate into a log
        result = {"output": output, "ok": self.last in ("accepted", "solved"), "details": {"status": self.last}}
        if self.last == "accepted":
            result["details"]["task"] = self.observation()
        elif self.last in ("solved", "wrong"):
            self.status = self.last
            result["end"] = output
        return result

    def _try(self, text: str, reply: str, turn: int) -> tuple[str, str]:
        """-> the try's status and the output in words, which hold nothing of what is still to be played."""
        if turn == self.accepted_turn:
            return "unsaid", "one move a reply: the model has not been asked since the last one"
        reading = read_move(self.board, text)
        if reading.kind == "malformed":
            return "malformed", f"{text[:40]!r} cannot be read as one move"
        if all(read_move(self.board, said) != reading for said in dict.fromkeys(said_moves(reply))):
            return "unsaid", f"the model's last reply does not say {text[:40]!r}"
        if reading.kind == "illegal":
            return "illegal", f"{text[:40]!r} is not legal in this position"
        move, expected = reading.move, read_move(self.board, self.line[2 * len(self.played)]).move
        if move != expected and not all("#" in self.board.san(mate) for mate in (expected, move)):
            return "wrong", f"{move.uci()} is legal, but not the right move"
        self.board.push(move)
        self.played.append(move.uci())
        self.accepted_turn = turn
        if len(self.line) < 2 * len(self.played):
            return "solved", f"{move.uci()} is right, and the puzzle is solved"
        self.last_move = self._push(self.line[2 * len(self.played) - 1])
        return "accepted", f"{move.uci()} is right; the opponent answers {self.last_move}"

    def verdict(self, reply: str | None) -> Verdict:
        """The reward, 1 only for the whole line; `reply` is the model's last one, None if there is none."""
        if self.status == "solved":
            return Verdict(1.0, "the whole line was played", self.tried)
        kind, why = _FAILURES[self.last]
        return Verdict(0.0, why if self.last or reply else "there is no reply", self.tried, kind)


def grade_reply(fen: str, line: Sequence[str], reply: str | None) -> Verdict:
    """The verdict on one reply alone: the last of its moves is played from `fen`, where the line begins."""
    game = Game(fen, None, line)
    if said := said_moves(reply or ""):
        game.play(said[-1], reply, 1)
    return game.verdict(reply)
