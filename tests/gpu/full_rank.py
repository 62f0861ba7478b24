"""One rank of a group under a backend that does not notice that a rank has ended, as NCCL's.

Rank 1 runs out of memory at microbatch size 4, and keeps its connections.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from partopt.profiler import group, measure

group.END_S = 2.0  # not half a minute
FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


class Summed(torch.autograd.Function):
    """A sum over the ranks; its gradient is everybody's."""

    @staticmethod
    def forward(_ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


class Parallel(nn.Module):
    """A layer cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if RANK == 1 and len(x) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Summed.apply(self.inner(x))


destroy = dist.destroy_process_group


def stay() -> None:
    """Leave the group long after any other backend would."""
    (FOLDER / "full").touch()
    time.sleep(600)
    destroy()


dist.destroy_process_group = stay
profile = measure(
    nn.Sequential(Parallel(), Parallel()),
    lambda size: torch.ones(size, 8),
    microbatch_sizes=[2, 4, 8],
    device="cpu",
    steps=1,
    granularity="leaf",
    keep=lambda profile: profile.save(str(FOLDER / f"{RANK}.json"), True),
)
profile.save(str(FOLDER / f"{RANK}.json"), True)
