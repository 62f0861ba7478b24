"""One exchange of every kind between two ranks of this host, with its error if it has one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from partopt.documents.doctor import Exchange
from partopt.runtime.context import Context
from partopt.runtime.processes import run_local

BYTES = 2**20
WAIT_S = 60.0  # for one exchange


def _message(tensor: Tensor, rank: int) -> None:
    """From rank 0 to rank 1."""
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def _both_ways(tensor: Tensor, rank: int) -> None:
    """A message in either direction at once."""
    received = torch.empty_like(tensor)
    peer = 1 - rank
    pair = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def _all_gather(tensor: Tensor, _rank: int) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor)


KINDS: dict[str, Callable[[Tensor, int], None]] = {
    "message": _message,
    "messages both ways": _both_ways,
    "all-reduce": lambda tensor, _: dist.all_reduce(tensor),
    "all-gather": _all_gather,
    "broadcast": lambda tensor, _: dist.broadcast(tensor, 0),
    "reduce": lambda tensor, _: dist.reduce(tensor, 0),
}


def exchange(context: Context) -> list[Exchange]:
    """Every kind twice on this rank; a kind that fails ends the others, whose state is unknown."""
    tensor, found = torch.ones(BYTES // 4, device=context.device), list[Exchange]()
    for kind, run in KINDS.items():
        times, error = list[float](), ""
        for _ in range(2):
            began = time.perf_counter()
            try:
                run(tensor, context.rank)
                if context.device.type == "cuda":
                    torch.cuda.synchronize()
            except RuntimeError as failure:
                error = str(failure).strip().partition("\n")[0]
                break
            times.append(time.perf_counter() - began)
        first_s, seconds = [*times, None, None][:2]
        found.append(
            Exchange(kind=kind, bytes=BYTES, first_s=first_s, seconds=seconds, error=error)
        )
        if error:
            break
    return found


def main() -> None:
    """Print the exchanges of two ranks over the backend that the command line names, as JSON."""
    ranks = run_local(2, exchange, backend=sys.argv[1], start="spawn", wait_s=WAIT_S)
    sys.stdout.buffer.write(msgspec.json.encode(ranks[0]))


if __name__ == "__main__":
    main()
