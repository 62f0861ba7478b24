"""Weights of asynchronous schedules: which version a microbatch uses, and when the next is made.

A version is put in place by giving the parameters its memory, so that any stage can be run with it
and needs to know nothing of versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from partopt.documents.plan import Plan
from partopt.schedules import schedule
from partopt.schedules.order import Order, in_flight

# r   replicas of the stage
# G   microbatches of a batch of 2BW, between two versions

Weights = list[Tensor]
Step = Callable[[], Any]  # of an optimizer


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, zeros where no backward has reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class Versions:
    """PipeDream's weight stashing: a microbatch's backward uses the weights of its forward.

    The forward uses the newest ones. There is a new version after every round, of one microbatch
    on every replica; one that no microbatch in flight uses is freed, and the newest one becomes the
    new one where that is so.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer_step: Step | None, replicas: int
    ) -> None:
        self.parameters, self.optimizer_step = list(parameters), optimizer_step
        self.replicas = replicas
        self.newest: Weights = [parameter.data for parameter in parameters]
        self.in_flight: dict[int, Weights] = {}  # by microbatch

    def begin_step(self, first: int) -> None:
        """Begin at an empty pipeline, with microbatch `first`."""

    def use_for_forward(self, microbatch: int) -> None:
        """Put the weights of a microbatch in place, and keep them until its backward."""
        self.in_flight[microbatch] = self.version_of(microbatch)
        self._use(self.in_flight[microbatch])

    def use_for_backward(self, microbatch: int) -> None:
        """Put the weights in place that the microbatch's forward used."""
        self._use(self.in_flight[microbatch])

    def end_backward(self, microbatch: int) -> None:
        """Forget the weights of a microbatch, and put the newest in place."""
        del self.in_flight[microbatch]
        self._use(self.newest)

    def end_round(self, number: int) -> None:
        """Make a new version, if this round ends a batch."""
        self._step()

    def version_of(self, microbatch: int) -> Weights:
        """The weights that the forward of a microbatch uses."""
        return self.newest

    def _is_newest_kept(self) -> bool:
        """Whether some microbatch has the newest version yet, or will have it."""
        return any(weights is self.newest for weights in self.in_flight.values())

    def _step(self) -> None:
        if self.optimizer_step is not None:
            if self._is_newest_kept():
                self._use([weight.clone() for weight in self.newest])
            # what changes is nobody's saved tensor
            with _unsafe_preserve_version_counter(tuple(self.parameters)):
                self.optimizer_step()
            self.newest = [parameter.data for parameter in self.parameters]
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _use(self, weights: Weights) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight


class DoubleBuffered(Versions):
    """PipeDream-2BW's two versions (Narayanan et al., ICML 2021, section 3.1).

    Microbatches of batch t use version t - 1, that before the newest where batch t - 1 has ended.
    Gradients are exchanged after every round; those of a `batch` add up to one step.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer_step: Step | None,
        replicas: int,
        batch: int,
    ) -> None:
        super().__init__(parameters, optimizer_step, replicas)
        self.batch = batch
        self.begin_step(0)

    def begin_step(self, first: int) -> None:
        """Begin at an empty pipeline, with microbatch `first`: batches are counted from there."""
        self.first = first
        self.kept = {0: self.newest}  # the newest version and the one before, by number
        self.total: list[Tensor] = []  # gradients of the batch's rounds so far

    def version_of(self, microbatch: int) -> Weights:
        """The weights that both passes of a microbatch use."""
        version = max(0, (microbatch - self.first) // self.batch - 1)
        return self.kept[version]

    def end_round(self, number: int) -> None:
        """Add up the gradients of a round; make a new version, if it ends a batch."""
        version, left = divmod((number + 1) * self.replicas, self.batch)
        if self.replicas > 1:  # those of the next round are summed over the replicas alone
            rounds = [gradient_of(parameter) for parameter in self.parameters]
            for before, of_round in zip(self.total, rounds, strict=bool(self.total)):
                before.add_(of_round)
            self.total = self.total or rounds
            self._drop_gradients()
        if left == 0:
            for parameter, gradient in zip(self.parameters, self.total, strict=bool(self.total)):
                parameter.grad = gradient
            self.kept, self.total = {version - 1: self.newest}, []  # so that two are at once
            self._step()
            self.kept[version] = self.newest

    def _is_newest_kept(self) -> bool:
        """The next batch has it, while the one behind that has the new one."""
        return True


def batch_of_stage(plan: Plan, order: Order, stage: int) -> int:
    """Microbatches whose gradients an asynchronous stage adds up before it steps.

    Of 2BW it is a multiple of all numbers of replicas, and no fewer than are in flight.
    """
    if schedule(plan.schedule).steps_in_backwards:
        return plan.stages[stage].replicas
    peaks = in_flight(order)
    most = max(int(np.sum(peaks[stage.ranks])) for stage in plan.stages)
    whole = math.lcm(*(stage.replicas for stage in plan.stages))
    return -(-most // whole) * whole
