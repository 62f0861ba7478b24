"""Weight stashing of a parameter that several stages hold, each with a part of its gradient.

The parameter has one row of versions: a round's gradients of all holders are added up and make the
next one. In every stage a microbatch uses the version that its forward in the first of these knows,
where it is the oldest: it is one value for a microbatch, though later stages could have a newer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from partopt.documents.plan import Plan
from partopt.runtime.context import lost_connections
from partopt.runtime.parameters import gradient_of
from partopt.runtime.versions import Step, Versions, Weights
from partopt.schedules.order import A, F, Order


class TiedVersions(Versions):
    """The versions of one tied parameter, whose gradients are added up over `group`.

    `known` says how many of a step's rounds the forward of each of its microbatches knows of.
    """

    def __init__(
        self, parameter: nn.Parameter, group: Any, optimizer_step: Step | None, known: list[int]
    ) -> None:
        super().__init__([parameter], [parameter], optimizer_step, 1)
        self.group, self.known = group, known
        self.begin_step(0)

    def begin_step(self, first: int) -> None:
        """Begin at an empty pipeline, with microbatch `first`: versions are counted from there."""
        self.first, self.made = first, 0
        self.begun: list[tuple[Tensor, Any]] = []  # sums of rounds that have made no version yet

    def begin_exchange(self) -> None:
        """Begin to add up the gradient of a round."""
        [parameter] = self.parameters
        gradient = gradient_of(parameter)
        self._drop_gradients()
        with lost_connections():
            work: Any = dist.all_reduce(gradient, group=self.group, async_op=True)
        self.begun.append((gradient, work))

    def version_of(self, microbatch: int) -> Weights:
        """The weights that the microbatch has in every stage."""
        known = self.known[microbatch - self.first]
        while self.made < known:
            self._make_next()
        return self.newest  # no later microbatch knows of fewer rounds

    def end_round(self, number: int) -> None:
        """What a round adds is known later."""

    def end_step(self) -> None:
        """End at an empty pipeline, with all versions made."""
        while self.begun:
            self._make_next()

    def _make_next(self) -> None:
        gradient, work = self.begun.pop(0)
        with lost_connections():
            work.wait()
        [parameter] = self.parameters
        parameter.grad = gradient
        self._step()
        self.made += 1


def known_rounds(plan: Plan, order: Order, s: int) -> list[int]:
    """The rounds that the forward of each microbatch in stage s knows of.

    They are the exchanges before it in its rank's row, but for the last one if that blocks nothing.
    """
    known = [0] * (int(order.microbatch.max()) + 1)
    late = plan.engine.allreduce != "blocking"
    for rank in plan.stages[s].ranks:
        row = slice(order.rows[rank], order.rows[rank + 1])
        own, kind = order.stage[row] == s, order.kind[row]
        rounds = np.maximum(np.cumsum(own & (kind == A)) - late, 0)
        forwards = own & (kind == F)
        for microbatch, ended in zip(
            order.microbatch[row][forwards], rounds[forwards], strict=True
        ):
            known[microbatch] = int(ended)
    return known
