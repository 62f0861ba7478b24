"""From the gradients of a rank's stages to their next weights: exchanges, clipping, steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.runtime.buckets import Sum
from partopt.runtime.context import Context
from partopt.runtime.gradients import Gradients, Tied
from partopt.runtime.versions import Versions, versions_of
from partopt.schedules import schedule
from partopt.schedules.order import A, Order

OptimizerOf = Callable[[int, Sequence[nn.Parameter]], Optimizer]


class Updates:
    """The gradients and weights of the stages of one rank."""

    def __init__(
        self,
        plan: Plan,
        order: Order,
        context: Context,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        optimizer_of: OptimizerOf | None,
        clip: float | None,
        tied: Sequence[Tied],
    ) -> None:
        self.parameters, self.clip = parameters, clip
        self.optimizers = {
            s: optimizer_of(s, own) for s, own in parameters.items() if optimizer_of and own
        }
        ranks = [stage.ranks for stage in plan.stages]
        # buckets begin beside the last backward of an iteration
        self.early = plan.microbatches is not None and plan.allreduce == "overlap"
        bucket_bytes = plan.bucket_bytes if self.early else math.inf
        self.gradients = Gradients(context, parameters, ranks, tied, clip is not None, bucket_bytes)
        # of an asynchronous plan, by stage
        self.versions: dict[int, Versions] = {}
        if schedule(plan.schedule).asynchronous:
            self.versions = {
                s: versions_of(
                    plan, order, s, own, self.optimizers.get(s), self.gradients.tied_of(own)
                )
                for s, own in parameters.items()
            }
        self.exchanging = set(order.stage[order.kind == A].tolist())
        self.sums: dict[int, tuple[int, Sum | None]] = {}  # by stage: the round, its exchange
        self.prepared = False  # the gradients of this step are summed and clipped

    def begin_step(self, first: int = 0) -> None:
        """Drop gradients of the step before, that no optimizer used; `first` is its microbatch."""
        self.prepared = False
        for versions in self.versions.values():
            versions.begin_step(first)
        for own in self.parameters.values():
            for parameter in own:
                parameter.grad = None

    def begin_last_backward(self, s: int) -> None:
        """Begin the backward that the exchange of a stage's gradients follows."""
        if self.early:
            self.gradients.watch(s)

    def end_backward(self, s: int, microbatch: int, number: int) -> None:
        """End the backward of a microbatch, known as `number` over all steps."""
        if versions := self.versions.get(s):
            versions.end_backward(number)
            if s not in self.exchanging:
                versions.end_round(microbatch)  # of one replica: a round is a microbatch

    def begin_exchange(self, s: int, number: int, done: Callable[[int], None]) -> None:
        """Begin to exchange the gradients of round `number`, once the one before has ended.

        The rank goes on meanwhile, as the simulated one does; `done` is called when it ends.
        """
        # what tied parameters get from now on is of the next round, too
        tied = self.gradients.tied_of(self.parameters[s]) if s in self.versions else []
        begun = self.gradients.begin_sum(s, done, [parameter for parameter, _ in tied])
        self.finish_exchange(s)
        self.sums[s] = number, begun
        if begun is None:
            self.finish_exchange(s)

    def finish_exchange(self, s: int) -> None:
        """Wait for the exchange of a stage, if one has begun; asynchronous, step by its sums."""
        if s not in self.sums:
            return
        number, begun = self.sums.pop(s)
        if begun is not None:
            begun.finish()
        if s in self.versions:
            self.versions[s].end_round(number)

    def finish_exchanges(self) -> None:
        """Wait for the exchanges of all stages."""
        for s in self.parameters:
            self.finish_exchange(s)
        for versions in self.versions.values():
            versions.end_step()

    def prepare(self, s: int) -> None:
        """Wait for all that the step of a stage needs of other ranks."""
        if self.clip is None and not self.gradients.tied:
            self.finish_exchange(s)
        elif not self.prepared:  # once for all stages of the rank, whose steps come last
            self.finish_exchanges()
            self.gradients.sum_tied()
            if self.clip is not None:
                self.gradients.clip(self.clip)
            self.prepared = True

    def step(self, s: int) -> None:
        """Step the optimizer of a stage; without one its gradients stay."""
        if s in self.optimizers:
            self.optimizers[s].step()
            self.optimizers[s].zero_grad()
