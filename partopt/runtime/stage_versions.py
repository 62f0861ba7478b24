"""The weight versions of a stage of an asynchronous plan, tied parameters among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from partopt.documents.plan import Plan
from partopt.runtime.shares import Shares
from partopt.runtime.tied_versions import TiedVersions, known_rounds
from partopt.runtime.versions import DoubleBuffered, Step, Versions, batch_of
from partopt.schedules import schedule
from partopt.schedules.order import Order


class Together(Versions):
    """Versions of several parts of a stage's parameters, each of which has its own row of them."""

    def __init__(self, parts: Sequence[Versions]) -> None:
        super().__init__([], [], None, 1)
        self.parts = parts

    def begin_step(self, first: int) -> None:
        """Begin at an empty pipeline, with microbatch `first`."""
        for part in self.parts:
            part.begin_step(first)

    def use_for_forward(self, microbatch: int) -> None:
        """Put the weights of a microbatch in place, and keep them until its backward."""
        for part in self.parts:
            part.use_for_forward(microbatch)

    def use_for_backward(self, microbatch: int) -> None:
        """Put the weights in place that the microbatch's forward used."""
        for part in self.parts:
            part.use_for_backward(microbatch)

    def end_backward(self, microbatch: int) -> None:
        """Forget the weights of a microbatch, and put the newest in place."""
        for part in self.parts:
            part.end_backward(microbatch)

    def begin_exchange(self) -> None:
        """Begin to exchange what a round adds to parameters that other stages hold, too."""
        for part in self.parts:
            part.begin_exchange()

    def end_round(self, number: int) -> None:
        """Make new versions of what this round steps."""
        for part in self.parts:
            part.end_round(number)

    def end_step(self) -> None:
        """End at an empty pipeline, with all versions made."""
        for part in self.parts:
            part.end_step()


def versions_of(
    plan: Plan,
    order: Order,
    stage: int,
    parameters: Sequence[nn.Parameter],
    optimizer_step: Step | None,
    tied: Sequence[tuple[nn.Parameter, Any]],
    shares: Shares | None,
) -> Versions:
    """The weight versions of a stage of an asynchronous plan.

    `tied` are those of its parameters that other stages hold, too, with the group of all that do,
    `shares` this replica's, where it has some.
    """
    replicas = plan.stages[stage].replicas
    graded = parameters if shares is None else shares.graded
    if schedule(plan.schedule).steps_in_backwards and tied:
        return _stashed(plan, order, parameters, optimizer_step, tied, replicas)
    if schedule(plan.schedule).steps_in_backwards:
        return Versions(parameters, graded, optimizer_step, replicas)
    batch, shared = batch_of(plan, order), shares is not None
    return DoubleBuffered(parameters, graded, optimizer_step, replicas, batch, tied, shared)


def _stashed(
    plan: Plan,
    order: Order,
    parameters: Sequence[nn.Parameter],
    optimizer_step: Step | None,
    tied: Sequence[tuple[nn.Parameter, Any]],
    replicas: int,
) -> Versions:
    """The versions of a stage with tied parameters, each as old as in the first stage with it."""
    apart = {id(parameter) for parameter, _ in tied}
    own = [each for each in parameters if id(each) not in apart]

    def step_of(part: Sequence[nn.Parameter]) -> Step | None:
        return (
            None
            if optimizer_step is None
            else partial(_step_part, optimizer_step, parameters, part)
        )

    parts: list[Versions] = [Versions(own, own, step_of(own), replicas)]
    for parameter, group in tied:
        ranks = set(dist.get_process_group_ranks(group))
        first = next(s for s, stage in enumerate(plan.stages) if ranks.intersection(stage.ranks))
        known = known_rounds(plan, order, first)
        parts.append(TiedVersions(parameter, group, step_of([parameter]), known))
    return Together(parts)


def _step_part(
    optimizer_step: Step, parameters: Sequence[nn.Parameter], part: Sequence[nn.Parameter]
) -> None:
    """Step some of an optimizer's parameters: without a gradient the others stay as they are."""
    stepped = {id(each) for each in part}
    others = [(each, each.grad) for each in parameters if id(each) not in stepped]
    for each, _ in others:
        each.grad = None
    optimizer_step()
    for each, gradient in others:
        each.grad = gradient
