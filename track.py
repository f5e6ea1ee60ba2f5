"""Live tracking, by `--track wandb|trackio|tensorboard`: each row of metrics.jsonl goes to one of them as well.

A copy to watch, never a record: nothing is read back from it, and what could not be sent is lost to it alone. The
packages are not among the requirements; the step of every number is the training rollouts spent. A resumed run goes
on in the tracker's same run; rows that it writes again are sent again.
"""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}


class TrackerError(RuntimeError):
    """The tracker cannot be started; the message says what to install or set."""


@dataclass(frozen=True)
class Tracker:
    send: Callable[[dict[str, float], int], None]       # numbers by name, training rollouts
    close: Callable[[], None]

    def log(self, row: dict) -> None:
        """The numbers of a row of metrics.jsonl, as kind/name."""
        numbers = {f"{row['kind']}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
        self.send(numbers, row["training_rollouts"])


NO_TRACKER = Tracker(lambda numbers, step: None, lambda: None)


def open_tracker(name: str, folder: Path, settings: dict) -> Tracker:
    """`name`: one of PACKAGES, or "" for none. TrackerError if its package is not there or it does not start."""
    if not name:
        return NO_TRACKER
    try:
        package = importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise TrackerError(f"--track {name} needs a package that is not installed ({error}): "
                           f".venv/bin/python -m pip install {name}") from None
    if name == "tensorboard":
        writer = package.SummaryWriter(str(folder / "tensorboard"))

        def write(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return Tracker(write, writer.close)
    try:
        where = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]         # two --out may share a name
        if name == "wandb":
            run = package.init(project="whale", name=folder.name, id=f"{folder.name}-{where}", dir=str(folder),
                               resume="allow", config=settings)
            run.define_metric("*", step_metric="training_rollouts")
        else:
            run = package.init(project="whale", name=f"{folder.name}-{where}", resume="allow", config=settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise TrackerError(f"--track {name}: {error}") from None
    return Tracker(lambda numbers, step: run.log({**numbers, "training_rollouts": step}), run.finish)
