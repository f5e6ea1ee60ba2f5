"""Many GPUs: torchrun starts this program once a GPU, and the copies (ranks) work as one.

Rank 0 runs the loop as if it were alone: it alone decides, proposes, writes and prints. What can be shared is an order
to all ranks, which carry it out together (team.py): rollouts, each rank its share of the tasks on an engine of its own,
and weight steps under FSDP2 (rft.py).

A rank that fails says why and ends, and the launcher ends all others. Those that only notice (a broken connection in
the middle of a collective) say nothing.

    bash run.sh math --preset paper                             over all visible GPUs
    .venv/bin/python ranks.py --standalone --nproc-per-node 2 cli.py math ...       what run.sh does: torchrun's flags

As a program it is torchrun, but for how it ends: with the exit code of the rank that failed, and without torchrun's own
traceback below that rank's message. torchrun itself starts the program as well.

Differs from the paper: nothing; the paper does not say how its training is spread over GPUs.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryDirectory

import stop

if __name__ == "__main__":
    stop.listen()                       # before the imports that take seconds; torchrun's handlers take over

import torch
import torch.distributed as dist

from jail import LIBC, PR_SET_PDEATHSIG

START_S = 600               # for all ranks to be there; importing torch from a busy file system takes a while
COLLECTIVE_S = 900          # for a collective of the trainer, which all ranks enter at about the same time
ORDER_DAYS = 30             # for the next order: rank 0 may wait hours for a coding agent; a process that dies is seen
GRACE_S = 10                # in which a rank that another one's failure has broken waits to be ended


@dataclass(frozen=True)
class Ranks:
    """This process among the `world` processes of a run. Every method is called by all ranks, in the same order."""
    rank: int = 0
    world: int = 1
    local_rank: int = 0                 # on this machine: the number of its GPU
    local_world: int = 1
    group: dist.ProcessGroup | None = None      # of gloo, for Python objects: they never touch a GPU

    def device(self, name: str) -> str:
        """This rank's device: each has a GPU of its own."""
        return f"cuda:{self.local_rank}" if name.startswith("cuda") and self.world > 1 else name

    def broadcast(self, thing: object = None) -> object:
        """Rank 0's thing, on every rank."""
        if self.world == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        return box[0]

    def gather(self, thing: object) -> list:
        """Each rank's thing, in the order of ranks, on rank 0; [] elsewhere."""
        if self.world == 1:
            return [thing]
        boxes = [None] * self.world if self.rank == 0 else None
        dist.gather_object(thing, boxes, dst=0, group=self.group)
        return boxes or []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place, on every rank."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor


ALONE = Ranks()


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """This process's place, from torchrun's environment; ALONE, and no process group, where there is none.

    The rank that fails first raises its error on; one that fails after it, most often because of it, ends here without
    a word.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)          # no rank outlives its launcher, however that ends
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpu = local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=COLLECTIVE_S))
    group = dist.new_group(backend="gloo", timeout=timedelta(days=ORDER_DAYS))
    ranks = Ranks(rank, world, local_rank, local_world, group)
    try:
        yield ranks
    except KeyboardInterrupt:                       # told to end, not failed
        raise
    except BaseException as error:
        is_first = is_first_to_fail(store)
        time.sleep(1 if is_first else GRACE_S)          # if it is a dead rank that broke this one, it is ended here
        if not is_first:
            os._exit(1)
        error.add_note(f"on rank {rank} of {world}")
        raise
    dist.destroy_process_group()


def is_first_to_fail(store: dist.Store) -> bool:
    try:
        return store.add("whale/failed", 1) == 1
    except RuntimeError:                            # the store is gone, and with it the launcher that saw a failure
        return False


def launch(argv: list[str]) -> int:
    """torchrun with these arguments -> the exit code of the rank that failed first; 128 + n after signal n."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    logging.disable(logging.ERROR)                  # torchrun's account of how it ends the ranks
    args = torchrun.parse_args(argv)
    args.signals_to_handle = ",".join(name for name in args.signals_to_handle.split(",")        # nohup stays nohup
                                      if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN)
    os.environ["WHALE_LAUNCHER"] = str(os.getpid())
    store = keep_to_loopback(args) if args.standalone else None         # it serves for as long as it is held
    try:
        with TemporaryDirectory(prefix="whale-ranks-") as args.log_dir:        # its own it leaves behind
            torchrun.run(args)
    except ChildFailedError as error:
        # the launcher itself ends the others with SIGTERM; by any other signal a rank died without a word of its own
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        rank, code = min(failures.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
        if code < 0:
            print(f"run.sh: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    finally:
        del store
    return 0


def keep_to_loopback(args: argparse.Namespace) -> dist.Store:
    """One machine's ranks meet where no other machine can join them: torch's own store listens on all addresses, and
    whoever reaches it, or a rank's port, could have objects unpickled. Changes torchrun's settings; -> the store."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    args.standalone, args.rdzv_backend, args.master_addr, args.master_port = False, "static", "127.0.0.1", port
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                         multi_tenant=True)             # so it is torchrun's own, too


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
