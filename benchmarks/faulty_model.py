"""A model to which a fault happens in an action; the environment says which: see `kills.py`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

BLOCKS, WIDTH = 4, 6

SLOW_S = 3.0  # of what a slow rank takes for an action

passed = 0  # actions of this rank so far


def boom() -> None:
    """Fail as any code may."""
    raise ValueError("boom")


HAPPENINGS: dict[str, Callable[[], Any]] = {
    "killed in an action": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "slow, then Ctrl-C": lambda: time.sleep(SLOW_S),
    "raises": boom,
    "out of memory": lambda: bytearray(10**15),
}


def pass_action(*_: object) -> None:
    """What has to happen in this action of this rank."""
    global passed
    fault = json.loads(os.environ["FAULT"])
    passed += 1
    if (dist.get_rank(), passed) == (fault["rank"], fault["action"]):
        Path(fault["struck"]).write_text(repr(time.monotonic()))
        HAPPENINGS[fault["kind"]]()


class Block(nn.Module):
    """A layer whose running statistics count the microbatches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Two actions: this, and its backward."""
        out = torch.tanh(self.norm(self.linear(x)))
        if not isinstance(x, FakeTensor) and dist.is_initialized():
            pass_action()
            out.register_hook(pass_action)
        return out


def build() -> nn.Module:
    """Blocks in a row."""
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def example_inputs(batch_size: int) -> Tensor:
    """Inputs for the first block."""
    return torch.randn(batch_size, WIDTH)
