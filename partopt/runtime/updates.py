"""From the gradients of a rank's stages to their next weights: exchanges, clipping, steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.runtime.buckets import Sum
from partopt.runtime.context import Context
from partopt.runtime.gradients import Gradients, Tied
from partopt.runtime.scattering import Scatter
from partopt.runtime.shares import Shares, scatters
from partopt.runtime.stage_versions import versions_of
from partopt.runtime.versions import Step, Versions
from partopt.schedules import schedule
from partopt.schedules.layout import own_microbatches
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
        shares: Mapping[int, Shares],
    ) -> None:
        self.parameters, self.clip, self.shares = parameters, clip, shares
        self.steps = {
            s: _step_of(s, own, optimizer_of, shares.get(s))
            for s, own in parameters.items()
            if optimizer_of and own
        }
        graded = {s: shares[s].graded if s in shares else own for s, own in parameters.items()}
        ranks = [stage.ranks for stage in plan.stages]
        # buckets begin beside the last backward of an iteration
        self.overlaps = plan.microbatches is not None and plan.engine.allreduce == "overlap"
        bucket_bytes = plan.engine.bucket_bytes if self.overlaps else math.inf
        self.gradients = Gradients(
            context, graded, ranks, tied, clip is not None, bucket_bytes, shares
        )
        # backwards that scatter their gradients, as many as any replica has
        M = int(order.microbatch.max()) + 1
        self.early = {s: own_microbatches(M, len(ranks[s]), 0) * scatters(plan) for s in shares}
        # of an asynchronous plan, by stage
        self.versions: dict[int, Versions] = {}
        if schedule(plan.schedule).asynchronous:
            self.versions = {
                s: versions_of(
                    plan,
                    order,
                    s,
                    own,
                    self.steps.get(s),
                    self.gradients.tied_of(own),
                    shares.get(s),
                )
                for s, own in parameters.items()
            }
        self.exchanging = set(order.stage[order.kind == A].tolist())
        self.sums: dict[int, tuple[int, Sum | Scatter | None]] = {}  # round and sum, by stage
        self.prepared = False  # the gradients of this step are summed and clipped

    def begin_step(self, first: int = 0) -> None:
        """Drop gradients of the step before, that no optimizer used; `first` is its microbatch."""
        self.prepared = False
        for versions in self.versions.values():
            versions.begin_step(first)
        for own in self.parameters.values():
            for parameter in own:
                parameter.grad = None
        for s, shares in self.shares.items():
            shares.begin_step(self.early[s])

    def end_gradients(self, s: int) -> None:
        """End what makes gradients for a microbatch: a backward, or the part of the weights."""
        if s in self.shares:
            self.shares[s].end_backward()

    def begin_last_backward(self, s: int) -> None:
        """Begin the backward that the exchange of a stage's gradients follows."""
        if self.overlaps and s not in self.shares:
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
        aside: list[nn.Parameter] = []
        if versions := self.versions.get(s):
            aside = versions.aside  # what they get from now on is of the next round, too
            versions.begin_exchange()
        begun: Sum | Scatter | None
        if s in self.shares:
            begun = self.shares[s].begin_sum(done, aside)
        else:
            begun = self.gradients.begin_sum(s, done, aside)
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
        if s in self.steps:
            self.steps[s]()
            for parameter in self.parameters[s]:
                parameter.grad = None


def _step_of(
    s: int, parameters: Sequence[nn.Parameter], optimizer_of: OptimizerOf, shares: Shares | None
) -> Step:
    """What steps a stage: its optimizer, or that of this replica's share, which may be empty."""
    if shares is None:
        return optimizer_of(s, parameters).step
    return partial(shares.step, optimizer_of(s, shares.stepped) if shares.stepped else None)
