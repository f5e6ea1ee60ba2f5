"""Live tracking, by `--track wandb|trackio|tensorboard`: each row of metrics.jsonl goes to one of them as well.

A copy to watch, never a record: nothing is read back from it, and what could not be sent is lost to it alone. The
packages are not among the requirements; the step of every number is the training rollouts spent. A resumed run goes
on in the tracker's same run; rows that it writes again are sent again.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keys import redact

PACKAGES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}


class TrackerError(RuntimeError):
    """The tracker cannot be started; the message says what to install or set."""


@dataclass(frozen=True)
class Tracker:
    """Both calls may raise TrackerError, whatever a package raises."""
    send: Callable[[dict[str, float], int], None]       # numbers by name, training rollouts
    end: Callable[[], None]

    def log(self, row: dict) -> None:
        """The numbers of a row of metrics.jsonl, as kind/name."""
        numbers = {f"{row['kind']}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
        with as_tracker_error():
            self.send(numbers, row["training_rollouts"])

    def close(self) -> None:
        with as_tracker_error():
            self.end()


NO_TRACKER = Tracker(lambda numbers, step: None, lambda: None)


@contextmanager
def as_tracker_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:                          # another project's code, over a network: it may raise anything
        raise TrackerError(f"the tracker failed: {type(error).__name__}: {redact(str(error))}") from None


def open_tracker(name: str, folder: Path, settings: dict) -> Tracker:
    """`name`: one of PACKAGES, or "" for none. TrackerError if its package is not there or it does not start."""
    if not name:
        return NO_TRACKER
    try:
        package = importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise TrackerError(f"--track {name} needs a package that is not installed ({error}): "
                           f".venv/bin/python -m pip install {name}") from None
    run_id = f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"    # names may recur
    with as_tracker_error():
        if name == "tensorboard":
            writer = package.SummaryWriter(str(folder / "tensorboard"))

            def write(numbers: dict[str, float], step: int) -> None:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)
                writer.flush()

            return Tracker(write, writer.close)
        if name == "wandb":
            run = package.init(project="whale", name=folder.name, id=run_id, dir=str(folder), resume="allow",
                               config=settings)
            run.define_metric("*", step_metric="training_rollouts")
        else:
            run = package.init(project="whale", name=run_id, resume="allow", config=settings)
        return Tracker(lambda numbers, step: run.log({**numbers, "training_rollouts": step}), run.finish)
