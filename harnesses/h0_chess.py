"""h0 of chess, as in the paper: one move a turn from a full observation; one retry for a reply without a readable move,
one for an illegal move; nine calls. A legal but wrong move ends the rollout."""

from harness_api import chat, generate, move, said_moves

SYSTEM_PROMPT = "You solve chess puzzles. Play the best legal move, one move at a time."
USER_PROMPT = (
    "Side to move: {side}\nFEN: {fen}\nBoard:\n{board}\nLast reply of the opponent: {last_move}\n"
    "Your moves so far: {played}\nMove number: {move_number}\nLegal moves:\n{legal_moves}\n\n"
    "Answer with one move as <move>uci</move>.")
RETRY = {
    "malformed": "No move could be read. Answer with one move as <move>uci</move>.",
    "illegal": "That move is not legal. Choose a move from the list.",
}
N_RETRIES = 1
MAX_CALLS = 9


def run(task):
    messages = chat(SYSTEM_PROMPT, USER_PROMPT.format(**task))
    left = dict.fromkeys(RETRY, N_RETRIES)
    for _ in range(MAX_CALLS):
        reply = yield generate(messages)
        messages.append(reply.message)
        said = said_moves(reply.content)
        result = yield move(said[-1] if said else "")               # of several moves the last is meant
        status = result.details["status"]
        if status == "accepted":
            messages += chat("", USER_PROMPT.format(**result.details["task"]))
        elif left.get(status):
            left[status] -= 1
            messages += chat("", RETRY[status])
        else:
            return
