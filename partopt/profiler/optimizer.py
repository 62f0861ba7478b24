"""The time of one optimizer step, apart from forward and backward.

It is paid once a batch, not once a microbatch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from partopt.profiler.clock import Clock
from partopt.profiler.step import Inputs, Loss, run_loss

TIMED_STEPS = 3  # each touches every weight: few are needed, and they are long


def time_optimizer(model: nn.Module, inputs: Inputs, loss_fn: Loss | None, clock: Clock) -> float:
    """Median seconds of an AdamW step on the whole model."""
    run_loss(model, inputs, loss_fn).backward()  # type: ignore[no-untyped-call]
    return time_steps(
        [parameter for parameter in model.parameters() if parameter.requires_grad], clock
    )


def time_steps(trained: Sequence[nn.Parameter], clock: Clock) -> float:
    """Median seconds of an AdamW step on these parameters, with the gradients that they have.

    The learning rate is 0, so that the weights stay as they are.
    """
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    optimizer.step()  # the first one makes the moments
    times = []
    for _ in range(TIMED_STEPS):
        started = clock.stamp()
        optimizer.step()
        times.extend(clock.intervals_s([started, clock.stamp()]))
    return statistics.median(times)
