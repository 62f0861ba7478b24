"""Shares of a stage's parameters: each of its replicas steps its own rows alone (ZeRO 1 and 2).

Gradients are reduced and scattered over the replicas, and the parameters gathered behind the step
(Rajbhandari et al., SC 2020, sections 5.1 and 5.2). As in torch's FSDP2 a share are rows of every
parameter, so that it has as many dimensions as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import EXCHANGING, Context, lost_connections
from partopt.runtime.gradients import Tied
from partopt.runtime.parameters import gradient_of
from partopt.runtime.scattering import Scatter, pack, places_by_format, rows_of, split_like
from partopt.schedules import schedule
from partopt.simulator.execution import execute as simulate

# r   replicas of the stage
# k   which of them this rank is, by rank


class Shares:
    """The share of one replica in the `parameters` of its stage, of which some are `tied`.

    `own` are its rows of each, in the memory of the whole; `stepped` are those of them that are not
    empty, for the optimizer. `groups` are those of the replicas for sums of gradients and for
    gathers, of which either may come first on a rank; what is gathered at once fills a bucket.
    """

    def __init__(
        self,
        context: Context,
        parameters: Sequence[nn.Parameter],
        tied: Sequence[nn.Parameter],
        groups: tuple[Any, Any],
        bucket_bytes: int,
    ) -> None:
        self.context, self.parameters = context, list(parameters)
        self.bucket_bytes = bucket_bytes
        self.sums, self.gathers = groups
        self.r, self.k = dist.get_world_size(self.sums), dist.get_rank(self.sums)
        self.own = [nn.Parameter(self._rows(each.data)) for each in parameters]
        self.stepped = [share for share in self.own if share.numel()]
        apart = {id(each) for each in tied}
        self.tied = [id(each) in apart for each in parameters]
        self.untied = [i for i, tied in enumerate(self.tied) if not tied]
        self.on_the_way: list[Scatter] = []
        self.early = self.scattered = 0  # backwards still to scatter, buckets that this one has
        self.ready: set[int] = set()  # gradients that this backward has
        self.buckets: list[list[int]] = []

    def scatter_in_backwards(self) -> None:
        """Scatter gradients while backwards run, in buckets.

        Buckets are filled from the last parameter on, whose gradient comes first, and scattered in
        their order on every replica (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
        """
        places = self.untied[::-1]
        parts = places_by_format([self.parameters[i] for i in places], self.bucket_bytes)
        self.buckets = [[places[i] for i in part] for part in parts]
        for i in places:
            noted = partial(self._note_gradient, i)
            self.parameters[i].register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]

    @property
    def graded(self) -> list[nn.Parameter]:
        """Those in whose `.grad` sums come: rows, or whole a parameter that other stages hold."""
        every = zip(self.parameters, self.own, self.tied, strict=True)
        return [parameter if tied else share for parameter, share, tied in every]

    @property
    def row_gradients(self) -> dict[int, Tensor]:
        """The gradients of this replica's rows by the id of the parameter, without tied ones."""
        return {id(self.parameters[i]): gradient_of(self.own[i]) for i in self.untied}

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The replicas, as tensors in shares name them."""
        return DeviceMesh.from_group(self.gathers, self.context.device.type)

    def _rows(self, tensor: Tensor) -> Tensor:
        return rows_of(tensor, self.k, self.r)

    def share_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """This replica's rows of a parameter; of a frozen one itself."""
        places = (i for i, each in enumerate(self.parameters) if each is parameter)
        place = next(places, None)
        return parameter if place is None else self.own[place]

    def begin_sum(self, done: Callable[[int], None], aside: Sequence[nn.Parameter] = ()) -> Scatter:
        """Begin the last sum of a step or a round, as `Gradients.begin_sum` does."""
        while self.early > 0:  # for the microbatches that other replicas have more
            self.end_backward()
        earlier, self.on_the_way = self.on_the_way, []
        left = [] if self.buckets else self.untied
        return self._scatter(left, done, aside, earlier)

    def begin_step(self, early: int) -> None:
        """Drop what is left of the step before; in this one so many backwards scatter `early`."""
        self.drop_gradients()
        self.early = early

    def end_backward(self) -> None:
        """Scatter what a backward has left, so that every replica scatters all buckets for it."""
        if self.early > 0:
            while self.scattered < len(self.buckets):
                self._scatter_next()
            self.early -= 1
        self.scattered = 0
        self.ready.clear()

    def _note_gradient(self, place: int, _parameter: nn.Parameter) -> None:
        """Scatter the buckets whose turn it is, now that a gradient is there."""
        self.ready.add(place)
        while self.early > 0 and self.scattered < len(self.buckets):
            if not self.ready.issuperset(self.buckets[self.scattered]):
                break
            self._scatter_next()

    def _scatter_next(self) -> None:
        while self.on_the_way and self.on_the_way[0].has_ended:
            self.on_the_way.pop(0).finish()
        self.on_the_way.append(self._scatter(self.buckets[self.scattered]))
        self.scattered += 1

    def _scatter(self, places: Sequence[int], *options: Any) -> Scatter:
        parameters, own = [self.parameters[i] for i in places], [self.own[i] for i in places]
        return Scatter(parameters, own, self.sums, *options)

    def step(self, optimizer: Optimizer | None) -> None:
        """Step this share, with None where it is empty, and gather the weights, all in place."""
        every = zip(self.own, self.parameters, self.tied, strict=True)
        for share, parameter, tied in every:
            share.data = self._rows(parameter.data)
            if tied:
                share.grad = self._rows(gradient_of(parameter))
        if optimizer is not None:
            optimizer.step()
        self.drop_gradients()
        self._gather([share.data for share in self.own], [p.data for p in self.parameters])

    def drop_gradients(self) -> None:
        """Drop the gradients of this share."""
        for share in self.own:
            share.grad = None

    def _gather(self, rows: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
        """Give each of `whole` the rows of all replicas, of which `rows` are this one's."""
        progress = self.context.progress
        before = progress.state
        progress.note(EXCHANGING)
        for places in places_by_format(whole, self.bucket_bytes):
            parts, own = [whole[i] for i in places], [rows[i] for i in places]
            mine = pack(own, sum(rows_of(part, 0, self.r).numel() for part in parts))
            every = mine.new_empty(self.r, len(mine))
            with lost_connections():
                dist.all_gather(list(every), mine, group=self.gathers)
            for k in range(self.r):
                found = [rows_of(part, k, self.r) for part in parts]
                for part, gathered in zip(found, split_like(every[k], found), strict=True):
                    part.copy_(gathered)
        progress.note(before)


NO_SHARES: Mapping[int, Shares] = MappingProxyType({})


def shares_of(
    plan: Plan,
    context: Context,
    parameters: Mapping[int, Sequence[nn.Parameter]],
    tied: Sequence[Tied],
) -> dict[int, Shares]:
    """This rank's shares of its stages, which have `parameters`, where the plan has replicas share.

    Every rank calls it. They are for all steps: optimizers know them.
    """
    if plan.shard == "none":
        return {}
    found = {}
    apart = [parameter for each in tied for parameter in each.parameters]
    for s, stage in enumerate(plan.stages):
        if stage.replicas > 1:  # every rank makes all groups, in one order
            groups = tuple(context.group(stage.ranks, f"{use} of {s}") for use in ("sums", "rows"))
            if s in parameters:
                found[s] = Shares(context, parameters[s], apart, groups, plan.engine.bucket_bytes)
                if scatters(plan):
                    found[s].scatter_in_backwards()
    return found


def scatters(plan: Plan) -> bool:
    """Whether the gradients of a synchronous plan add up in shares, after every backward."""
    return plan.shard == "gradients" and plan.microbatches is not None


def check_shares(plan: Plan, microbatches: int | None) -> None:
    """Raise PartoptError where replicas cannot hold the shares that the plan says.

    `microbatches` pass through an asynchronous plan, whose replicas gather their weights after
    every round: where one would have to be done before another can be, they would wait for ever.
    That is as in an exchange that blocks.
    """
    if plan.shard == "none":
        return
    if plan.shard == "parameters":
        raise PartoptError(
            "a plan with `shard=parameters`: replicas that hold shares of the parameters would "
            "have to gather those of each layer before it runs, and that is not run",
            "plan with `shard=gradients`",
            code="cannot-run",
        )
    if schedule(plan.schedule).asynchronous:
        try:
            simulate(plan.with_engine(allreduce="blocking"), microbatches)
        except PartoptError as error:
            raise PartoptError(
                f"{plan.schedule} of {plan.shape} with `shard={plan.shard}`: replicas "
                "of a stage would wait for each other for ever, to gather the weights of a round",
                "plan with `shard=none`, or with `schedule=1f1b`",
                code="cannot-run",
            ) from error
