"""From the gradients of a rank's stages to their next weights: exchanges, sums, steps.

Gradients are added up over the replicas of a stage in buckets, beside the backward that makes them,
as torch's DistributedDataParallel does it (Li et al., VLDB 2020): a bucket is exchanged when all of
its gradients are there, and the buckets of every replica in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partopt.documents.actions import A
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import Context, lost_connections
from partopt.runtime.versions import DoubleBuffered, Step, Versions, batch_of_stage, gradient_of
from partopt.schedules import schedule
from partopt.schedules.order import Order


class StageOptimizer(Protocol):
    """What changes weights by gradients: an optimizer of torch, or that of several replicas."""

    def step(self) -> Any:
        """Change the weights."""


OptimizerOf = Callable[[int, Sequence[nn.Parameter]], StageOptimizer]


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages hold: its name, and all ranks that hold it.

    `parameters` are what this rank holds of it, one for every stage that has a copy.
    """

    name: str
    ranks: Sequence[int]
    parameters: Sequence[nn.Parameter] = ()


def tied_stages(plan: Plan) -> dict[str, list[int]]:
    """The stages that hold every tied parameter of `plan`."""
    stages: dict[str, list[int]] = {}
    for flow in plan.communication:
        if flow.kind == "tied" and flow.stage is not None:
            for name in flow.parameters:
                stages.setdefault(name, []).append(flow.stage)
    return stages


def check_tied(plan: Plan, names: Sequence[str]) -> None:
    """Raise PartoptError where stages of an asynchronous plan hold the same parameters `names`."""
    if names and schedule(plan.schedule).asynchronous:
        raise PartoptError(
            f"{plan.schedule}: several stages hold the parameter {names[0]}, and each would step "
            "it by other gradients",
            "plan with `tied=together`, or with a schedule that flushes: `schedule=1f1b`",
            code="cannot-run",
        )


class Sum:
    """Gradients of `parameters` on their way to be added up over a group.

    They are taken from the parameters, bucket by bucket, until `finish` puts their sums there.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        bucket_bytes: float,
    ) -> None:
        self.buckets, self.group = list(buckets_of(parameters, bucket_bytes)), group
        # of the first buckets, what is summed, and of the first of those their works
        self.taken: list[Tensor] = []
        self.begun: list[Any] = []
        self._made: set[int] = set()  # parameters, by id
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin every bucket when the backward that comes now has made its gradients."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note_made)  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for parameter in bucket
        ]

    def take_rest(self) -> None:
        """Take the gradients that are left from their parameters."""
        for handle in self._handles:
            handle.remove()
        while len(self.taken) < len(self.buckets):
            self._take_next()

    def begin_rest(self) -> list[Any]:
        """Begin the buckets that are taken; the works of all."""
        for whole in self.taken[len(self.begun) :]:
            with lost_connections():
                self.begun.append(dist.all_reduce(whole, group=self.group, async_op=True))
        return self.begun

    def finish(self) -> None:
        """Wait for the sums, and give them to the parameters as their gradients."""
        for bucket, whole, work in zip(self.buckets, self.taken, self.begun, strict=True):
            with lost_connections():
                work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, summed in zip(bucket, torch.split(whole, sizes), strict=True):
                parameter.grad = summed.view_as(parameter)

    def _note_made(self, parameter: Tensor) -> None:
        """Begin the buckets that are next, where all of their gradients are there."""
        if id(parameter) in self._made:
            raise PartoptError(
                "a parameter gets its gradient in several parts of one backward, as reentrant "
                "checkpoints make it: buckets of gradients cannot be exchanged beside that",
                "plan with `allreduce=blocking`",
                code="cannot-run",
            )
        self._made.add(id(parameter))
        while len(self.begun) < len(self.buckets):
            if not self._made.issuperset(map(id, self.buckets[len(self.begun)])):
                break
            self._take_next()
            self.begin_rest()

    def _take_next(self) -> None:
        bucket = self.buckets[len(self.taken)]
        parts = [gradient_of(parameter).reshape(-1) for parameter in bucket]
        self.taken.append(torch.cat(parts))
        for parameter in bucket:
            parameter.grad = None


def buckets_of(
    parameters: Sequence[nn.Parameter], bucket_bytes: float
) -> Iterator[list[nn.Parameter]]:
    """Parameters of one number format, the last first, up to so many bytes at once or one alone.

    A backward makes gradients in about that order.
    """
    backwards = list(reversed(parameters))
    by_format = sorted(backwards, key=lambda parameter: str(parameter.dtype))
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in by_format:
        is_full = size_bytes + parameter.nbytes > bucket_bytes
        if bucket and (is_full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.nbytes
    if bucket:
        yield bucket


class Updates:
    """The gradients and weights of the stages of one rank, which have `parameters`."""

    def __init__(
        self,
        plan: Plan,
        order: Order,
        context: Context,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        optimizer_of: OptimizerOf | None,
        tied: Sequence[Tied],
    ) -> None:
        self.context, self.parameters, self.tied = context, parameters, tied
        self.steps: dict[int, Step] = {
            s: optimizer_of(s, of_stage).step
            for s, of_stage in parameters.items()
            if optimizer_of and of_stage
        }
        apart = {id(parameter) for shared in tied for parameter in shared.parameters}
        self.untied = {
            s: [parameter for parameter in of_stage if id(parameter) not in apart]
            for s, of_stage in parameters.items()
        }
        # every rank makes all groups, in one order, and also those that it is not in
        ranks = [stage.ranks for stage in plan.stages]
        self.replicas = [context.group(members) if len(members) > 1 else None for members in ranks]
        self.holders = [
            context.group(shared.ranks) if len(shared.ranks) > 1 else None for shared in tied
        ]
        # buckets begin beside the last backward of an iteration
        self.overlaps = plan.microbatches is not None and plan.engine.allreduce == "overlap"
        self.bucket_bytes = plan.engine.bucket_bytes if self.overlaps else math.inf
        self.exchanging = set(order.stage[order.kind == A].tolist())
        self.watched: dict[int, Sum] = {}
        self.sums: dict[int, tuple[int, Sum]] = {}  # the round that is exchanged, by stage
        self.versions: dict[int, Versions] = {}  # of an asynchronous plan
        for s, of_stage in parameters.items() if schedule(plan.schedule).asynchronous else ():
            step, replicas = self.steps.get(s), plan.stages[s].replicas
            if schedule(plan.schedule).steps_in_backwards:
                self.versions[s] = Versions(of_stage, step, replicas)
            else:
                self.versions[s] = DoubleBuffered(
                    of_stage, step, replicas, batch_of_stage(plan, order, s)
                )

    def begin_step(self, first: int = 0) -> None:
        """Drop gradients of the step before, that no optimizer used; `first` is its microbatch."""
        self.tied_summed = False
        for versions in self.versions.values():
            versions.begin_step(first)
        for of_stage in self.parameters.values():
            for parameter in of_stage:
                parameter.grad = None

    def begin_last_backward(self, s: int) -> None:
        """Begin the backward that the exchange of a stage's gradients follows."""
        group = self.replicas[s]
        if self.overlaps and group is not None:
            self.watched[s] = self._sum(s, group)
            self.watched[s].watch()

    def end_backward(self, s: int, microbatch: int, number: int) -> None:
        """End the backward of a microbatch, known as `number` over all steps."""
        if versions := self.versions.get(s):
            versions.end_backward(number)
            if s not in self.exchanging:
                versions.end_round(microbatch)  # of one replica: a round is a microbatch

    def take_gradients(self, s: int, number: int) -> None:
        """Take the gradients of round `number` to be exchanged, once the one before has ended."""
        group = self.replicas[s]
        if group is not None:
            taken = self.watched.pop(s, None) or self._sum(s, group)
            taken.take_rest()
            self.finish_exchange(s)
            self.sums[s] = number, taken

    def begin_exchange(self, s: int) -> list[Any]:
        """Begin to exchange them; the works of it. The rank goes on, as the simulated one does."""
        return self.sums[s][1].begin_rest() if s in self.sums else []

    def _sum(self, s: int, group: Any) -> Sum:
        return Sum(self.untied[s], group, self.bucket_bytes)

    def finish_exchange(self, s: int) -> None:
        """Wait for the exchange of a stage, if one has begun; asynchronous, step by its sums."""
        if s in self.sums:
            number, begun = self.sums.pop(s)
            begun.finish()
            if s in self.versions:
                self.versions[s].end_round(number)

    def finish_exchanges(self) -> None:
        """Wait for the exchanges of all stages."""
        for s in self.parameters:
            self.finish_exchange(s)

    def prepare(self, s: int) -> None:
        """Wait for all that the step of a stage needs of other ranks."""
        if not self.tied:
            self.finish_exchange(s)
        elif not self.tied_summed:  # once for all stages of the rank, whose steps come last
            self.finish_exchanges()
            self._sum_tied()
            self.tied_summed = True

    def _sum_tied(self) -> None:
        """Add up the gradients of every tied parameter over all ranks and stages that hold it."""
        for shared, group in zip(self.tied, self.holders, strict=True):
            if self.context.rank not in shared.ranks:
                continue
            held = [gradient_of(parameter) for parameter in shared.parameters]
            total = torch.stack(held).sum(0)
            if group is not None:
                with lost_connections():
                    dist.all_reduce(total, group=group)
            for gradient in held:
                gradient.copy_(total)

    def step(self, s: int) -> None:
        """Step the optimizer of a stage; without one its gradients stay."""
        if s in self.steps:
            self.steps[s]()
            for parameter in self.parameters[s]:
                parameter.grad = None
