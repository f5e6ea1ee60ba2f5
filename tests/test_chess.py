"""The chess board: moves in any notation, puzzles played through, attacks on the reading of replies."""
import csv
import itertools
import json
import random
from pathlib import Path

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chess_game import Game, Reading, check_line, grade_reply, observe, read_move, said_moves

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real samples are not part of the project")

BACK_RANK = "6k1/5ppp/8/8/8/8/1R3PPP/R5K1 w - - 0 1"        # a1a8 and b2b8 mate
CASTLING = "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"
CASTLING_BLACK = CASTLING.replace(" w ", " b ")
PROMOTION = "5rk1/1P2P3/8/8/8/8/6PP/6K1 w - - 0 1"          # e7 promotes, takes f8, b7 promotes
EN_PASSANT = "rnbqkbnr/ppp1p1pp/8/3pPp2/8/8/PPPP1PPP/RNBQKBNR w KQkq d6 0 3"
BISHOP_OR_FILE = "4k3/8/8/8/8/2p5/1P6/1N2KB2 w - - 0 1"     # b2xc3 by the pawn, Nxc3; no bishop's move to c3
BISHOPS = "4k3/8/8/3B4/8/1p1p4/8/1B2K3 w - - 0 1"           # B1xd3, B5xb3; no pawns
TWO_ROOKS = "4k3/8/8/8/8/8/8/R4R1K w - - 0 1"
OPENING = chess.STARTING_FEN
LINE = ("e2e4", "e7e5", "g1f3", "b8c6", "f1b5")


def puzzles() -> list[tuple[str, str, list[str]]]:
    """Of every Lichess row: FEN, the opponent's trigger, the line."""
    with open(SHARED / "data" / "lichess_puzzles.csv", encoding="utf-8", newline="") as file:
        return [(row["FEN"], *(lambda moves: (moves[0], moves[1:]))(row["Moves"].split())) for row in csv.DictReader(file)]


def positions(n: int) -> list[chess.Board]:
    return [Game(*puzzle).board for puzzle in random.Random(0).sample(puzzles(), n)]


def read(fen: str, text: str) -> str:
    """The move in UCI, or why there is none."""
    reading = read_move(chess.Board(fen), text)
    assert (reading.move is not None) == (reading.kind == "move")
    return reading.move.uci() if reading.move else reading.kind


# ---- what a reply says ----

@pytest.mark.parametrize("reply, moves", [
    ("", []), ("I give up.", []), ("<move>a1a8</move>", ["a1a8"]), ("<MOVE> a1a8\n</Move>", ["a1a8"]),
    ("<move>h2h3</move> no, <move>a1a8</move>", ["h2h3", "a1a8"]), ("<move>uci</move>", ["uci"]), ("<move></move>", [""]),
    ("<move>h2h3 <move>a1a8</move></move>", ["a1a8"]), ("</move>a1a8<move>", []), ("a1a8</move>", ["a1a8"]),
    ("<move>" * 8000 + "a1a8", []), ("a1a8 in <move> tags", []), ("a1a8, so <move>h2h3</move>", ["h2h3"]),
    ("<move>**[a1a8]**</move>", ["a1a8"]), ("<move>`Ra8#`.</move>", ["Ra8#"]), ("<move>(e8=Q+)!</move>", ["e8=Q+"]),
    ("<move>_O-O_</move>", ["O-O"]), ("<move>a1a8 or b2b8</move>", ["a1a8 or b2b8"]), ("<move>...Qd8</move>", ["Qd8"]),
    # thinking
    ("<think>a1a8</think>h2h3", ["h2h3"]), ("a1a8</think>", []), ("h2h3 <think> a1a8", ["h2h3"]),
    ("<think><move>a1a8</move></think>", []), ("<think>x</think>b2b8</think><move>a1a8</move>", ["a1a8"]),
    ("<think><move></think>a1a8", ["a1a8"]), ("<move>a1<think>a8</move>", []),
    # prose
    ("a1a8", ["a1a8"]), ("[a1a8]", ["a1a8"]), ("My move: **a1a8**.", ["a1a8"]), ("_a1a8_", ["a1a8"]), ("我走a1a8。", ["a1a8"]),
    ("E7E8Q or e7e8=q?", ["E7E8Q", "e7e8=q"]), ("e2-e4, e7xd8=Q+", ["e2-e4", "e7xd8=Q+"]), ("1.Qxf7# wins", ["Qxf7#"]),
    ("12...exd5 13. Nbd7!", ["exd5", "Nbd7"]), ("R1a3+ and Qh4xe1", ["R1a3+", "Qh4xe1"]), ("exd8=N, e8=Q+ or e8q", ["exd8=N", "e8=Q+", "e8q"]),
    ("- [a1a8] SAN=Ra8#", ["a1a8", "Ra8#"]), ("O-O, 0-0-0#, o-o+", ["O-O", "0-0-0#", "o-o+"]), ("Nf3-e5, Ba1a8", ["Nf3-e5", "Ba1a8"]),
    ("e4", ["e4"]), ("The pawn goes to e4+!", ["e4+"]), ("Nf3 hits the pawn on e5.", ["Nf3"]), ("a pawn, e4, then e5", ["e4", "e5"]),
    # no moves
    ("r1b5/b1b5/8/2n2n2/4p2Q w KQkq - 0 4", []), ("Q@a8", []), ("a1a9 i1a8 xa1a8 a1a8x sa1a8", []), ("0000 -- Z0 @@@@", []),
    ("won 1-0, lost 0-1, drawn 3-0-0, 0-0-1, a1a8-b", []), ("https://example.org/a1a8", []), ("B2B sales in A4", []), ("Ze4 e4X e4-X Z-e4", []),
])
def test_said_moves(reply, moves):
    assert said_moves(reply) == moves


# ---- reading a move ----

@pytest.mark.parametrize("fen, text, wanted", [
    (BACK_RANK, "a1a8", "a1a8"), (BACK_RANK, " A1A8\n", "a1a8"), (BACK_RANK, "a1-a8#", "a1a8"), (BACK_RANK, "Ra8", "a1a8"),
    (BACK_RANK, "Ra8#", "a1a8"), (BACK_RANK, "ra8+", "a1a8"), (BACK_RANK, "RA8!!", "a1a8"), (BACK_RANK, "Ra1-a8", "a1a8"),
    (BACK_RANK, "a1b3", "illegal"), (BACK_RANK, "a1a1", "illegal"), (BACK_RANK, "Qa8", "illegal"), (BACK_RANK, "e4", "illegal"),
    (BACK_RANK, "h3", "h2h3"), (BACK_RANK, "H3", "h2h3"), (BACK_RANK, "a8a1", "illegal"), (BACK_RANK, "g8f8", "illegal"),
    # castling
    (CASTLING, "e1g1", "e1g1"), (CASTLING, "e1h1", "e1g1"), (CASTLING, "E1A1", "e1c1"), (CASTLING, "O-O", "e1g1"),
    (CASTLING, "0-0+", "e1g1"), (CASTLING, "o-o", "e1g1"), (CASTLING, "O-O-O#", "e1c1"), (CASTLING, "0-0-0", "e1c1"),
    (CASTLING, "o-o-o", "e1c1"), (CASTLING_BLACK, "O-O", "e8g8"), (CASTLING_BLACK, "e8a8", "e8c8"), (CASTLING_BLACK, "e1g1", "illegal"),
    (CASTLING.replace("KQkq", "Qkq"), "O-O", "illegal"), (CASTLING.replace("KQkq", "Qkq"), "e1h1", "illegal"),
    ("6k1/5p1p/8/8/8/8/5P1P/4R2K w - - 0 1", "O-O", "illegal"), ("6k1/5p1p/8/8/8/8/5P1P/4R2K w - - 0 1", "e1g1", "e1g1"),
    (CASTLING, "e1g1q", "illegal"), (CASTLING, "e1h1=Q", "illegal"), (CASTLING, "Kh1", "illegal"), (CASTLING, "O-O-O-O", "malformed"),
    (CASTLING, "OO", "malformed"), (CASTLING, "O-O Ke1", "malformed"), ("4k3/8/8/8/8/8/8/R3K3 w Q - 0 1", "O-O", "illegal"),
    # promotion
    (PROMOTION, "e7e8q", "e7e8q"), (PROMOTION, "b7b8q", "b7b8q"), (PROMOTION, "B7B8Q", "b7b8q"), (PROMOTION, "b7b8=N", "b7b8n"),
    (PROMOTION, "b8=R", "b7b8r"), (PROMOTION, "b8b", "b7b8b"), (PROMOTION, "b8=q", "b7b8q"), (PROMOTION, "exf8=Q+", "e7f8q"),
    (PROMOTION, "EXF8=r", "e7f8r"), (PROMOTION, "e7xf8=N", "e7f8n"), (PROMOTION, "b7b8", "illegal"), (PROMOTION, "b8", "illegal"),
    (PROMOTION, "exf8", "illegal"), (PROMOTION, "b7b8k", "malformed"), (PROMOTION, "b7b8p", "malformed"), (PROMOTION, "b7b8qq", "malformed"),
    (PROMOTION, "h2h3q", "illegal"), (PROMOTION, "B7b8q", "b7b8q"), (PROMOTION, "Bb8=Q", "malformed"),
    # en passant
    (EN_PASSANT, "e5d6", "e5d6"), (EN_PASSANT, "exd6", "e5d6"), (EN_PASSANT, "d6", "illegal"), (EN_PASSANT, "exf6", "illegal"),
    # a bishop is no file
    (BISHOP_OR_FILE, "bxc3", "b2c3"), (BISHOP_OR_FILE, "Bxc3", "illegal"), (BISHOP_OR_FILE, "BXC3", "malformed"),
    (BISHOP_OR_FILE, "b2c3", "b2c3"), (BISHOP_OR_FILE, "B2C3", "b2c3"), (BISHOP_OR_FILE, "bc3", "malformed"), (BISHOP_OR_FILE, "b3", "b2b3"),
    (BISHOP_OR_FILE, "bb5", "malformed"), (BISHOP_OR_FILE, "Bb5", "f1b5"), (BISHOP_OR_FILE, "nc3", "b1c3"), (BISHOP_OR_FILE, "Bb2c3", "illegal"),
    (BISHOP_OR_FILE, "b1c3", "b1c3"), (BISHOP_OR_FILE, "B1c3", "illegal"), (BISHOP_OR_FILE, "B1C3", "b1c3"),
    (BISHOPS, "B1xd3", "b1d3"), (BISHOPS, "B5xb3", "d5b3"), (BISHOPS, "bxd3", "illegal"),
    # several
    (TWO_ROOKS, "Rd1", "malformed"), (TWO_ROOKS, "Rad1", "a1d1"), (TWO_ROOKS, "Rfd1", "f1d1"), (TWO_ROOKS, "R1d1", "malformed"),
    # no moves
    *((OPENING, text, "malformed") for text in (
        "", "0000", "--", "Z0", "@@@@", "Q@a8", "P@e4", "uci", "e2e4 e7e5", "e2e9", "i2i4", "e4e", "Nf3\x00", "Nf3,", "e2\ne4", "４e4", "\ud800",
        "♘f3", "None", "1. e4", "x", "e", "N", "+", "#", "a1a8\u0301")),
])
def test_read_move(fen, text, wanted):
    assert read(fen, text) == wanted


@needs_shared
def test_every_notation_of_every_legal_move_of_200_positions():
    n_moves = 0
    for board in positions(200):
        for move in list(board.legal_moves):
            san, uci = board.san(move), move.uci()
            texts = {san, san.rstrip("+#"), board.lan(move), uci, uci.upper(), uci[:4] + uci[4:].upper(), uci[:4] + "=" * bool(uci[4:]) + uci[4:]}
            if board.is_castling(move):
                texts |= {san.replace("O", "0"), san.lower(), uci[:2] + ("h" if uci[2] == "g" else "a") + uci[3]}
            elif san[0] in "KQRN":
                texts |= {san.lower(), san.upper()}
            for text in texts:
                assert read_move(board, text) == Reading("move", move), (text, board.fen())
                for reply in (f"<move> {text} </move>", f"So **{text}**", f"1. {text}, of course."):
                    assert said_moves(reply) == [text]
            n_moves += 1
    assert n_moves > 4000


@needs_shared
def test_san_is_read_as_by_python_chess():
    """Whatever is a move here is the same there; what is none here is none there, or lacks the x of a pawn's capture."""
    n_moves = 0
    for board in [*positions(4), *map(chess.Board, (CASTLING, CASTLING_BLACK, PROMOTION, EN_PASSANT, BISHOPS, BISHOP_OR_FILE, TWO_ROOKS))]:
        for parts in itertools.product(["", *"KQRBN"], ["", *"be"], ["", "1"], ["", "x"], chess.SQUARE_NAMES, ["", "=Q", "n"]):
            text, reading = "".join(parts), read_move(board, "".join(parts))
            try:
                assert reading.move == board.parse_san(text) or reading.kind == "malformed" and not parts[0]
                n_moves += reading.kind == "move"
            except ValueError:
                assert reading.kind != "move", (text, board.fen())
    assert n_moves > 300


# ---- one reply ----

def chess_cases() -> list:
    path = SHARED / "cases" / "verifier.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [pytest.param(case, id=case["id"]) for case in map(json.loads, lines) if case["domain"] == "chess"]


@needs_shared
@pytest.mark.parametrize("case", chess_cases())
def test_verifier_case(case):
    assert not check_line(case["fen"], None, case["solution"])
    verdict = grade_reply(case["fen"], case["solution"], case["reply"])
    assert verdict.reward == case["expected"], verdict
    assert (verdict.kind == "") == (verdict.reward == 1)


@pytest.mark.parametrize("reply, reward, kind, extracted", [
    ("<move>a1a8</move>", 1, "", "a1a8"), ("<move>b2b8</move>", 1, "", "b2b8"), ("<move>Rb8</move>", 1, "", "Rb8"),
    ("<move>a1a7</move>", 0, "wrong_move", "a1a7"), ("<move>a1b3</move>", 0, "illegal_move", "a1b3"), ("<move>uci</move>", 0, "malformed_move", "uci"),
    ("<move>a1a8</move><move></move>", 0, "malformed_move", ""), ("no idea", 0, "no_move", None), ("", 0, "no_move", None), (None, 0, "no_move", None),
    ("<move>\ud800</move>", 0, "malformed_move", "\\ud800"),
])
def test_one_reply(reply, reward, kind, extracted):
    verdict = grade_reply(BACK_RANK, ["a1a8"], reply)
    assert (verdict.reward, verdict.kind, verdict.extracted) == (reward, kind, extracted)
    assert "a8" not in verdict.why


def test_a_mate_is_right_only_where_one_is_expected():
    assert grade_reply(BACK_RANK, ["a1a8"], "b2b8").reward == 1
    assert grade_reply(BACK_RANK, ["h2h3"], "b2b8").kind == "wrong_move"
    assert grade_reply(BACK_RANK, ["a1a8"], "a1b1").kind == "wrong_move"


# ---- a whole puzzle ----

@needs_shared
def test_all_puzzles_play_through():
    """The line itself is solved, in whatever notation; a wrong move at any turn loses."""
    rng = random.Random(0)
    n_own = n_wrong = n_mates = 0
    for fen, trigger, line in puzzles():
        assert not check_line(fen, trigger, line)
        game, board = Game(fen, trigger, line), chess.Board(fen)
        assert game.last_move == f"{trigger} ({board.san(board.parse_uci(trigger))})"
        board.push_uci(trigger)
        wrong_turn = rng.randrange(len(line) // 2 + 1)
        for turn, uci in enumerate(line[::2]):
            move = board.parse_uci(uci)
            san = board.san(move)
            if turn == wrong_turn:
                others = [other for other in board.legal_moves if other != move and not ("#" in san and "#" in board.san(other))]
                if others:
                    other = rng.choice(others).uci()
                    losing = Game(fen, trigger, line)
                    for before, right in enumerate(line[:2 * turn:2]):
                        losing.play(right, right, before)
                    result = losing.play(other, f"<move>{other}</move>", turn)
                    assert result["ok"] is False and result["end"] and result["details"] == {"status": "wrong"}
                    assert losing.status == "wrong" and losing.verdict(other).reward == 0 and uci not in result["output"]
                    n_wrong += 1
            result = game.play(rng.choice([uci, san, uci.upper()]), f"<move>{rng.choice([uci, san])}</move>", turn)
            board.push(move)
            n_own, n_mates = n_own + 1, n_mates + board.is_checkmate()
            if turn < len(line) // 2:
                reply_san = board.san(board.parse_uci(line[2 * turn + 1]))
                board.push_uci(line[2 * turn + 1])
                fields = result["details"].pop("task")
                assert result == {"output": f"{uci} is right; the opponent answers {fields['last_move']}", "ok": True, "details": {"status": "accepted"}}
                assert fields == observe(board, f"{line[2 * turn + 1]} ({reply_san})", line[:2 * turn + 1:2])
                assert game.status == "open" and game.verdict(uci).kind == "unfinished"
        assert result["ok"] and result["end"] and result["details"] == {"status": "solved"}
        assert game.status == "solved" and game.verdict(uci).reward == 1
    assert (n_own, n_mates) == (5825, 796) and n_wrong > 2400


@needs_shared
def test_results_do_not_depend_on_what_is_still_to_be_played():
    """Two puzzles that begin alike and end differently answer every try before the difference alike."""
    for fen, trigger, line in [puzzle for puzzle in puzzles() if len(puzzle[2]) > 2][:200]:
        games = [Game(fen, trigger, line), Game(fen, trigger, line[:-1] + ["differs"])]
        for turn, uci in enumerate(line[:-1:2]):
            for text, reply in (("uci", "uci"), ("a1a1", "a1a1"), (uci, ""), (uci, uci), (uci, uci)):
                first, second = (game.play(text, reply, turn) for game in games)
                assert first == second
            assert first["details"]["status"] == "unsaid" and games[0].observation() == games[1].observation()


def test_the_observation():
    game = Game("6k1/5ppp/8/8/8/8/1r3PPP/R5K1 b - - 0 1", "b2b1", ["a1b1", "h7h6", "b1b8"])
    fields = game.observation()
    assert fields == {
        "side": "White", "fen": "6k1/5ppp/8/8/8/8/5PPP/Rr4K1 w - - 1 2", "last_move": "b2b1 (Rb1+)", "played": "none", "move_number": "1",
        "board": ". . . . . . k .\n. . . . . p p p\n. . . . . . . .\n. . . . . . . .\n. . . . . . . .\n. . . . . . . .\n. . . . . P P P\nR r . . . . K .",
        "legal_moves": "- [a1b1] SAN=Rxb1"}
    fields["fen"] = "changed"                               # by one rollout: another must not see it
    assert game.observation()["fen"] == "6k1/5ppp/8/8/8/8/5PPP/Rr4K1 w - - 1 2"
    fields = game.play("Rxb1", "<move>Rxb1</move>", 1)["details"]["task"]
    assert (fields["last_move"], fields["played"], fields["move_number"]) == ("h7h6 (h6)", "a1b1", "2")
    assert fields["legal_moves"].splitlines()[:2] == ["- [b1a1] SAN=Ra1", "- [b1b2] SAN=Rb2"]
    assert "- [b1b8] SAN=Rb8+" in fields["legal_moves"]
    assert Game(OPENING, None, LINE).observation()["last_move"] == "none"


def test_a_puzzle_of_black_and_a_board_that_stays():
    game = Game(OPENING, "e2e4", ["e7e5", "g1f3", "b8c6"])
    before = game.observation()
    assert before["side"] == "Black" and before["last_move"] == "e2e4 (e4)"
    for text, reply, status in [("e4e5", "e4e5", "illegal"), ("zz", "zz", "malformed"), ("e7e5", "e7e6", "unsaid"), ("e7e5", "", "unsaid"),
                                ("e7e5", "<move>e7e6</move> or e7e5", "unsaid"), ("e7e5", "<think>e7e5</think>", "unsaid"), ("a1a8", "e7e5", "unsaid"),
                                ("", "e7e5", "malformed")]:
        result = game.play(text, reply, 1)
        assert result["ok"] is False and result["details"] == {"status": status} and "end" not in result and result["output"], text
        assert (game.last, game.status, game.observation()) == (status, "open", before)
        assert game.verdict(reply).kind == f"{status}_move" and game.verdict(reply).reward == 0
    assert game.play("E5", "e7e5", 1)["details"]["status"] == "accepted"      # the same move in other words


@pytest.mark.parametrize("said, handed", [("O-O", "e1h1"), ("e1g1", "0-0"), ("e1h1", "e1g1"), ("h2h3 e1g1 h2h4", "o-o")])
def test_moves_are_compared_as_moves(said, handed):
    assert Game(CASTLING, None, ["e1g1"]).play(handed, said, 1)["details"] == {"status": "solved"}


def test_one_accepted_move_a_reply():
    game = Game(OPENING, None, LINE)
    reply = "<move>e2e4</move><move>g1f3</move><move>f1b5</move>"
    assert game.play("uci", reply, 1)["details"]["status"] == "malformed"           # a failed try does not use it up
    assert game.play("e2e4", reply, 1)["details"]["status"] == "accepted"
    after = game.observation()
    for text in ("g1f3", "h2h3", "e2e4"):
        assert game.play(text, reply, 1)["details"] == {"status": "unsaid"}
    assert (game.status, game.played, game.observation()) == ("open", ["e2e4"], after)
    assert game.play("g1f3", reply, 2)["ok"] and game.play("f1b5", reply, 3)["end"]
    assert game.verdict(reply).reward == 1


@pytest.mark.parametrize("move, status", [("a1a8", "solved"), ("h2h3", "wrong")])
def test_nothing_is_played_after_the_end(move, status):
    game = Game(BACK_RANK, None, ["a1a8"])
    assert game.play(move, move, 1)["end"]
    fen, verdict = game.board.fen(), game.verdict(move)
    for text in ("a1a8", "b2b8", "g8f8"):
        assert game.play(text, text, 2) == {"output": "the game is over", "ok": False, "details": {"status": "over"}}
    assert (game.status, game.board.fen(), game.verdict(move)) == (status, fen, verdict)


def test_kinds_of_failure_of_a_longer_line():
    game = Game(OPENING, None, LINE)
    assert [(game.verdict(reply).kind, game.verdict(reply).why) for reply in (None, "hm")] == [("no_move", "there is no reply"), ("no_move", "no move was tried")]
    game.play("e2e4", "e2e4", 1)
    assert game.verdict("e2e4").kind == "unfinished" and game.verdict(None) == game.verdict("e2e4")
    game.play("e1e5", "e1e5", 2)
    assert game.verdict("e1e5").kind == "illegal_move"      # the last try counts
    game.play("g1h3", "g1h3", 3)
    assert game.verdict("g1h3").kind == "wrong_move" and game.verdict("g1h3").extracted == "g1h3"


@pytest.mark.parametrize("fen, trigger, line, why", [
    (OPENING, None, LINE, ""), (OPENING, "e2e4", ["e7e5"], ""), (CASTLING, None, ["e1h1"], ""),
    (OPENING, None, [], "has 0 moves"), (OPENING, None, LINE[:2], "has 2 moves"), (OPENING, None, ["e2e5"], "'e2e5' (ply 1) is illegal"),
    (OPENING, "e2e4", ["e2e4"], "'e2e4' (ply 2) is illegal"), (OPENING, "0000", ["e7e5"], "'0000' (ply 1) is malformed"),
    (OPENING, None, ["e2e4", "e7e5", "e4"], "'e4' (ply 3) is illegal"), (PROMOTION, None, ["b7b8"], "'b7b8' (ply 1) is illegal"),
    (BACK_RANK, None, ["a1a8", "g8h8", "a8a1"], "'g8h8' (ply 2) is illegal"), (OPENING, None, [""], "'' (ply 1) is malformed"),
    ("", None, ["e2e4"], "bad FEN ''"), ("8/8/8 w - - 0 1", None, ["e2e4"], "bad FEN"), ("x" * 5000, None, ["e2e4"], "bad FEN"),
    ("8/8/8/8/8/8/4P3/8 w - - 0 1", None, ["e2e4"], "NO_WHITE_KING"), ("8/8/8/8/8/8/4P3/8 w - - 0 " + "1" * 3000, None, ["e2e4"], "no possible position"), (BACK_RANK.replace(" w ", " b "), None, ["g8f8"], ""),
    ("R5k1/5ppp/8/8/8/8/8/6K1 w - - 0 1", None, ["a8a7"], "OPPOSITE_CHECK"),
])
def test_check_line(fen, trigger, line, why):
    found = check_line(fen, trigger, line)
    assert why in found and bool(found) == bool(why) and len(found) < 400


# ---- hostile text ----

HOSTILE = ["\x00", "\ud800", "<move>" * 170_000, "<move>a1a8" * 100_000, "</move>" * 150_000, "<move></move>" * 80_000, "<think>" * 150_000,
           "</think>" * 130_000, "a1" * 500_000, "a1a8 " * 200_000, "O-" * 500_000, "0-0-" * 250_000, "a1a8+" * 200_000, "+" * 1_000_000, "-" * 1_000_000,
           "<move>" + "(" * 1_000_000 + "</move>", "Nf3-" * 250_000, " " * 1_000_000, "R1" * 500_000, "<" * 1_000_000, "_" * 1_000_000, "a1a8" + "#" * 1_000_000,
           "é" * 500_000, "a-" * 500_000, "<move>" * 80_000 + "</move>" * 80_000, "".join(f"<move>{n}</move>" for n in range(60_000)), "e2e4\x00" * 1_000_000]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:12]!r}")
def test_hostile_text_is_read_in_linear_time(text):
    """A megabyte and more each: anything quadratic would not come back."""
    said_moves(text)
    assert read_move(chess.Board(), text).kind == ("illegal" if text.startswith("a1a8#") else "malformed")
    game = Game(OPENING, None, LINE)
    for handed, reply in ((text, text), ("e2e5", text)):
        assert len(json.dumps([game.play(handed, reply, 1), game.tried])) < 4000
    assert (game.status, game.played) == ("open", [])
    assert grade_reply(BACK_RANK, ["a1a8"], "<move>h2h3</move>" + text).reward == 0


PIECES_OF_TEXT = st.sampled_from(["<move>", "</move>", "<think>", "</think>", "e2e4", "Nf3", "O-O", "e8=Q", "e4", "0000", "Q@a8", "\x00", "\ud800", " ", "-", "=", "+", "b", "B", "x", "1"])
ANY_TEXT = st.one_of(st.text(st.characters(exclude_categories=())), st.lists(PIECES_OF_TEXT, max_size=12).map("".join))


@settings(max_examples=400, deadline=None)
@given(ANY_TEXT, ANY_TEXT, st.sampled_from([OPENING, CASTLING, CASTLING_BLACK, PROMOTION, EN_PASSANT, BISHOPS]))
def test_any_text_is_read_without_an_error(text, reply, fen):
    board = chess.Board(fen)
    said = said_moves(reply)
    assert all(move in reply for move in said)
    reading = read_move(board, text)
    assert reading.kind in ("move", "illegal", "malformed") and (reading.move in board.legal_moves if reading.move else reading.kind != "move")
    first = next(iter(board.legal_moves)).uci()
    game = Game(fen, None, [first])
    result = game.play(text, reply, 1)
    json.dumps(result).encode()                             # plain JSON, no surrogate that a log could not hold
    if result["ok"] or "end" in result:                     # nothing is played that the model did not say
        assert reading.kind == "move" and reading in [read_move(chess.Board(fen), move) for move in said]
    verdict = game.verdict(reply)
    assert verdict.reward == (reading.kind == "move" and game.status == "solved") and (verdict.extracted or "").encode() is not None


@settings(max_examples=200, deadline=None)
@given(st.one_of(ANY_TEXT, st.text("rnbqkpRNBQKP12345678/ wb-KQkqe36019", max_size=90), st.tuples(ANY_TEXT, ANY_TEXT).map(lambda ends: ends[0] + OPENING + ends[1])), ANY_TEXT)
def test_any_puzzle_is_refused_without_an_error(fen, move):
    found = check_line(fen, None, [move])
    if not found:
        assert Game(fen, None, [move]).play(move, f"<move>{move}</move>", 1)["details"]["status"] in ("solved", "unsaid")
    found.encode()
