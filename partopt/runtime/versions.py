"""Weights of asynchronous schedules: which version a microbatch uses, and when the next is made.

A version is put in place by giving the parameters its memory, so that any stage can be run with it
and needs to know nothing of versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from partopt.documents.plan import Plan
from partopt.runtime.context import lost_connections
from partopt.runtime.parameters import gradient_of
from partopt.schedules import schedule
from partopt.schedules.order import Order, in_flight

# r   replicas of the stage
# G   microbatches of a batch of 2BW, between two versions

Weights = list[Tensor]
Step = Callable[[], Any]  # of an optimizer


class Versions:
    """PipeDream's weight stashing: a microbatch's backward uses the weights of its forward.

    The forward uses the newest ones. There is a new version after each round, of one microbatch on
    each replica; one that no microbatch in flight uses is freed, and the newest one becomes the new
    one where that is so. `graded` are those in whose `.grad` the sums of a round come: the
    parameters, or where replicas share them this one's rows.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        graded: Sequence[nn.Parameter],
        optimizer_step: Step | None,
        replicas: int,
    ) -> None:
        self.parameters, self.graded = list(parameters), list(graded)
        self.optimizer_step, self.replicas = optimizer_step, replicas
        self.newest: Weights = [parameter.data for parameter in parameters]
        self.in_flight: dict[int, Weights] = {}  # by microbatch
        # tied ones that keep their gradients while those of the stage alone are added up
        self.aside: list[nn.Parameter] = []

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

    def begin_exchange(self) -> None:
        """Begin to exchange what a round adds to parameters that other stages hold, too."""

    def end_round(self, number: int) -> None:
        """Make a new version, if this round ends a batch."""
        self._step()

    def end_step(self) -> None:
        """End at an empty pipeline, with all versions made."""

    def version_of(self, microbatch: int) -> Weights:
        """The weights that the forward of a microbatch uses."""
        return self.newest

    def _is_newest_kept(self) -> bool:
        """Whether some microbatch has the newest version yet, or will have it."""
        return any(weights is self.newest for weights in self.in_flight.values())

    def _step(self) -> None:
        if self.optimizer_step is None:
            self._drop_gradients()
            return
        if self._is_newest_kept():
            self._use([weight.clone() for weight in self.newest])
        with ExitStack() as unnoticed:  # what changes is nobody's saved tensor
            for parameter in self.parameters:  # torch 2.6 takes one at a time
                unnoticed.enter_context(_unsafe_preserve_version_counter(parameter))
            self.optimizer_step()
        self._drop_gradients()
        self.newest = [parameter.data for parameter in self.parameters]

    def _drop_gradients(self) -> None:
        for parameter in self.graded:
            parameter.grad = None

    def _use(self, weights: Weights) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight


class DoubleBuffered(Versions):
    """PipeDream-2BW's two versions (Narayanan et al., ICML 2021, section 3.1).

    Microbatches of batch t use version t - 1, that before the newest where batch t - 1 has ended.
    Gradients are exchanged after every round; those of a batch add up to one step. Those of the
    `tied` parameters are added up over a group when the batch has ended; it steps when they are
    there, which is when the version is asked for. Of `shared` ones it steps at once: replicas
    gather them together, and of a last round some would not ask.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        graded: Sequence[nn.Parameter],
        optimizer_step: Step | None,
        replicas: int,
        batch: int,
        tied: Sequence[tuple[nn.Parameter, Any]],
        shared: bool,
    ) -> None:
        super().__init__(parameters, graded, optimizer_step, replicas)
        self.batch = batch
        self.tied = [(_place_of(parameter, graded), group) for parameter, group in tied]
        self.aside = [parameter for parameter, _ in tied]
        self.steps_late = bool(tied) and not shared
        self.ended: Ended | None = None
        self.begin_step(0)

    def begin_step(self, first: int) -> None:
        """Begin at an empty pipeline, with microbatch `first`: batches are counted from there."""
        self.first = first
        self.kept = {0: self.newest}  # the newest version and the one before, by number
        self.total: list[Tensor] = []  # gradients of the batch's rounds so far

    def version_of(self, microbatch: int) -> Weights:
        """The weights that both passes of a microbatch use."""
        version = max(0, (microbatch - self.first) // self.batch - 1)
        if version not in self.kept:
            self._finish_batch()
        return self.kept[version]

    def end_round(self, number: int) -> None:
        """Make a new version, if this round ends a batch; with tied parameters, begin to."""
        batch, left = divmod((number + 1) * self.replicas, self.batch)
        if self.replicas > 1 or left == 0:
            self._take_gradients()  # those of the next round are summed over the replicas alone
        if left == 0:
            self._finish_batch()
            self.ended = Ended(batch, self.total, _begin_sums(self.total, self.tied))
            self.total = []
            if not self.steps_late:
                self._finish_batch()

    def end_step(self) -> None:
        """End at an empty pipeline, with all versions made."""
        self._finish_batch()

    def _take_gradients(self) -> None:
        """Add the gradients of a round, or of several of one replica, to those of its batch."""
        rounds = [gradient_of(parameter) for parameter in self.graded]
        for before, own in zip(self.total, rounds, strict=bool(self.total)):
            before.add_(own)
        self.total = self.total or rounds
        self._drop_gradients()

    def _is_newest_kept(self) -> bool:
        """The next batch has it, while the one behind that has the new one."""
        return True

    def _finish_batch(self) -> None:
        """Make the version of the batch that ended last."""
        if self.ended is None:
            return
        batch, gradients, sums = self.ended
        self.ended = None
        with lost_connections():
            for work in sums:
                work.wait()
        self.kept = {batch - 1: self.newest}  # the one before is free, so that two are at once
        of_round = [parameter.grad for parameter in self.graded]
        for parameter, gradient in zip(self.graded, gradients, strict=True):
            parameter.grad = gradient
        self._step()
        for parameter, left in zip(self.graded, of_round, strict=True):
            parameter.grad = left
        self.kept[batch] = self.newest


class Ended(NamedTuple):
    """A batch that has ended: its number, its gradients, and sums of some that are on their way."""

    batch: int
    gradients: list[Tensor]
    sums: list[Any]


def _begin_sums(gradients: list[Tensor], tied: Sequence[tuple[int, Any]]) -> list[Any]:
    with lost_connections():
        return [dist.all_reduce(gradients[i], group=group, async_op=True) for i, group in tied]


def _place_of(parameter: nn.Parameter, parameters: Sequence[nn.Parameter]) -> int:
    return next(i for i, each in enumerate(parameters) if each is parameter)


def batch_of_stage(plan: Plan, order: Order, stage: int) -> int:
    """Microbatches whose gradients an asynchronous stage adds up before it steps."""
    if schedule(plan.schedule).steps_in_backwards:
        return plan.stages[stage].replicas
    return batch_of(plan, order)


def batch_of(plan: Plan, order: Order) -> int:
    """G of 2BW: a multiple of all numbers of replicas, and no fewer than are in flight."""
    peaks = in_flight(order)
    most = max(int(np.sum(peaks[stage.ranks])) for stage in plan.stages)
    whole = math.lcm(*(stage.replicas for stage in plan.stages))
    return -(-most // whole) * whole
