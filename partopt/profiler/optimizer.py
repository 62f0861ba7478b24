"""The time of one optimizer step, apart from forward and backward.

It is paid once a batch, not once a microbatch.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from partopt.profiler.clock import Clock
from partopt.profiler.step import Inputs, Loss, run_loss

TIMED_STEPS = 3  # each touches every weight: few are needed, and they are long


def time_optimizer(model: nn.Module, inputs: Inputs, loss_fn: Loss | None, clock: Clock) -> float:
    """Median seconds of an AdamW step on the whole model.

    The learning rate is 0, so that the weights stay as they are.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    run_loss(model, inputs, loss_fn).backward()  # type: ignore[no-untyped-call]
    optimizer.step()  # the first one makes the moments
    times = []
    for _ in range(TIMED_STEPS):
        started = clock.stamp()
        optimizer.step()
        times.extend(clock.intervals_s([started, clock.stamp()]))
    return statistics.median(times)
