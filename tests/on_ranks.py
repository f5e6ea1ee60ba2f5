"""What test_ranks.py runs on several ranks: `ranks.py --standalone --nproc-per-node 2 on_ranks.py CASE ...`."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

import cli
import ranks
import rollout
from rft import Trainer
from rollout import InfraError
from test_rft import CFG, Row, batch, make_tokenizer

STEPS = replace(CFG, minibatch=4, micro_tok=60, max_grad_norm=0.05)
N_STEPS = 3


def stats_of(trainer, first=0):
    """Several steps; the last minibatch of each is one trajectory."""
    return [asdict(trainer.step(batch(k, n=9), (k,))) for k in range(first, first + N_STEPS)]


def train(folder: Path, team: ranks.Ranks) -> dict:
    """Each model in `folder` trained as test_ranks.py trains it on one rank; what came of it, by rank 0."""
    found = {}
    for model in sorted(path.name for path in folder.glob("models/*")):
        trainer, recomputing = (Trainer(folder / "models" / model, cfg, "cpu", team) for cfg in (
            STEPS, replace(STEPS, gradient_checkpointing=True)))
        passes = []
        trainer.losses.register_forward_pre_hook(lambda module, inputs, passes=passes: passes.append(inputs[1].any().item()))
        found[model] = {"stats": stats_of(trainer), "recomputing": stats_of(recomputing)}
        found[model]["passes"] = team.gather([len(passes), passes.count(False)])
        trainer.save(folder / f"{model}-2", make_tokenizer())
        before = trainer.checksum()
        found[model]["empty"] = [trainer.step([], (9,)).n_updates, trainer.checksum() == before]
        found[model]["checksums"] = team.gather(before)
        found[model]["names"] = [name for name, _ in trainer.weights()]
        resumed = Trainer(folder / "models" / model, STEPS, "cpu", team)
        stats_of(resumed, 5)                                        # another history, all of which has to go
        resumed.load(folder / f"{model}-1")
        resumed.save(folder / f"{model}-1-2", make_tokenizer())
        found[model]["resumed"] = stats_of(resumed, N_STEPS)
        half = Trainer(folder / "models" / model, replace(STEPS, autocast_bf16=True), "cpu", team)
        found[model]["bf16"] = stats_of(half)
        found[model]["dtypes"] = [str(t.dtype) for p in half.model.parameters() for t in (p, *half.optimizer.state[p].values())]
    broken = Trainer(folder / "models" / model, STEPS, "cpu", team)
    with torch.no_grad():
        if team.rank == 0:                                          # it holds the first half, so the row of token 3
            broken.model.get_input_embeddings().weight.to_local()[3] = float("inf")
    before, said = broken.checksum(), ""
    try:
        broken.step([[Row((3, 4), (False, True))], [Row((5, 6, 7), (False, True, True))]], (0,))
    except RuntimeError as error:
        said = str(error)
    found["broken"] = [team.gather(said), broken.checksum() == before]
    return found


def main() -> int:
    case, folder, *argv = sys.argv[1:]
    ranks.GRACE_S = 3
    folder, run = Path(folder), rollout.run
    if case == "train":
        with ranks.open_ranks() as team:
            found = train(folder, team)
            if team.rank == 0:
                (folder / "found.json").write_text(json.dumps(found))
        return 0
    rank, n_runs = os.environ["RANK"], 0

    def watched(engine, env, sandbox, source, tasks, n, seed, *rest):
        """rollout.run, which notes who was asked for what; with `fail-in-...`, rank 1 loses its second batch."""
        nonlocal n_runs
        n_runs += 1
        if case.startswith("fail") and rank == "1" and n_runs == 2:
            raise InfraError("planted") if case == "fail" else KeyError("planted")
        with open(folder / f"rank_{rank}.jsonl", "a") as file:
            file.write(json.dumps({"seed": seed, "source": source, "n": n, "tasks": [task.id for task in tasks]}) + "\n")
        return run(engine, env, sandbox, source, tasks, n, seed, *rest)

    rollout.run = watched
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
