"""The planning problem, and the decision of a planner that `price` turns into a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from msgspec import UNSET, UnsetType, structs
from numpy.typing import NDArray

from partopt.cost.chain import Chain, chain_of, coarsen
from partopt.cost.collectives import AllReduce, allreduce_over
from partopt.cost.devices import check_device
from partopt.cost.figures import flops_of
from partopt.cost.memory import Kept, kept_of
from partopt.cost.ranges import Group
from partopt.cost.sharding import (
    Exchange,
    early_bytes,
    exchange_of,
    exchange_topology,
    steps_in_backwards,
)
from partopt.documents import Note
from partopt.documents.engine import PARTOPT, Engine
from partopt.documents.plan import (
    Certificate,
    Optimizer,
    Plan,
    ProfileReference,
    Request,
)
from partopt.documents.profile import Profile
from partopt.documents.stage import Reserve, Shard
from partopt.documents.topology import Topology
from partopt.documents.transformer import Modelled
from partopt.errors import PartoptError

# what is being done, how much of it is done, and the total
Progress = Callable[[str, int, int], None]
ReportShare = Callable[[float], None]  # the share of one part that is done

CONTIGUOUS = "contiguous"  # the ranks of a stage are consecutive
FREE: Final = "free"  # any replicas; "uniform": the same in every stage
NONE: Final = "none"  # one replica of every stage
# stages may split tied layers, and exchange the gradients; "together": they may not
EXCHANGE: Final = "exchange"
# relative: how near to its bound a value is taken to be equal to it, and called optimal: the
# simulator adds up the actions of a run one after the other, and a bound the layers of a stage
OPTIMAL, MET = 1e-10, 1e-6
NESTED = "nested"  # pipelines inside the members of a level, replicated over the members


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignore a progress report."""


def ignore_share(share: float) -> None:
    """Ignore how much is done."""


def share_of(progress: Progress, what: str, part: int, parts: int) -> ReportShare:
    """Reports of the share that is done of one of several parts of the same work."""
    return lambda share: progress(what, round(100 * (part + share)), 100 * parts)


class Known(dict[object, Any]):
    """What was made for problems on one profile and topology, by all that it depends on."""

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` makes, the first time that the key is asked for."""
        if key not in self:
            self[key] = make()
        return self[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A model on a cluster, how it is to be trained there, and what is requested of its plan.

    `request` is recorded in the plan as it is. `microbatches` is M of a synchronous schedule,
    `None` for an asynchronous one; `engine` is what that of `trainer` does, `shard` what a
    replica of a stage holds a share of; `chunks` is how many stages a schedule that interleaves
    puts on a device; `memory_bytes` is the limit of one device beside `reserve`, `None` where there
    is none; a plan has at least `least_stages`; `progress` is called during long work; `known` is
    what a search looks up; `transformer` is what the profile was computed from, where it was.
    """

    profile: Profile
    topology: Topology
    chain: Chain
    schedule: str = "pipedream"
    microbatches: int | None = None
    optimizer: Optimizer = "adam"
    trainer: str = PARTOPT
    engine: Engine = field(default_factory=Engine)
    shard: Shard = "none"
    reserve: Reserve = field(default_factory=Reserve)
    chunks: int = 2
    memory_bytes: int | None = None
    least_stages: int = 1
    request: Request = field(default_factory=Request)
    transformer: Modelled | UnsetType = UNSET
    progress: Progress = ignore_progress
    known: Known = field(default_factory=Known, repr=False)

    def with_(self, **changes: Any) -> Problem:
        """The problem with some fields changed, or some of its request.

        Its chain stays as it is.
        """
        asked = {name: changes.pop(name) for name in REQUESTED & changes.keys()}
        request = structs.replace(changes.pop("request", self.request), **asked)
        return replace(self, request=request, **changes)

    def with_shard(self, shard: Shard) -> Problem:
        """The problem of replicas that share so much, with the chain that is then run."""
        if shard == self.shard:
            return self
        size = self.chain.microbatch_size
        chain = self.known.once(("chain", size), lambda: chain_of(self.profile, size))
        return as_run(replace(self, shard=shard, chain=chain))

    @property
    def shards(self) -> Sequence[Shard]:
        """What replicas may share: all that the trainer has, or as the problem says."""
        return self.engine.shard if self.request.any_shard else [self.shard]

    @property
    def waits(self) -> bool:
        """Whether devices wait for their messages; else these overlap with compute."""
        return self.schedule in self.engine.waits

    @property
    def blocks(self) -> bool:
        """Whether devices wait for their gradients to be exchanged behind the backward."""
        return self.engine.allreduce == "blocking"

    @property
    def recompute_per_stage(self) -> bool:
        """Whether a planner chooses the stages that recompute."""
        return self.request.recompute == "auto"

    @property
    def all_recompute(self) -> bool:
        """Whether every stage recomputes all it can, whatever a planner decides."""
        return self.request.recompute == "always"

    @property
    def recompute_by_default(self) -> bool:
        """Whether stages recompute of which a partition says nothing."""
        return self.request.recompute not in ("never", "auto")

    @property
    def first(self) -> int | None:
        """How many blocks a stage that recomputes makes again, the first; `None` for all."""
        asked = self.request.recompute
        return asked if isinstance(asked, int) else None

    @cached_property
    def kept(self) -> Kept:
        """What devices keep beside the parameters."""
        sixteen_bit, copies = self.chain.sixteen_bit, self.topology.group_copies
        settings = self.optimizer, self.engine, self.shard, sixteen_bit
        return kept_of(*settings, self.microbatches, copies)

    @cached_property
    def exchange(self) -> Exchange:
        """What replicas exchange for a byte of parameters."""
        return exchange_of(self.kept, self.microbatches is not None)

    @cached_property
    def exchange_topology(self) -> Topology:
        """The topology, its all-reduces as fast as the gradients of parameters are exchanged."""
        return exchange_topology(self.topology, self.exchange)

    def allreduce_over(self, ranks: Sequence[int]) -> AllReduce:
        """How `ranks` exchange the gradients of their parameters, for a byte of these.

        A search asks of the same ones often, in many problems on one topology.
        """
        group = ranks if isinstance(ranks, range) else tuple(ranks)
        key = "all-reduce", id(self.topology), self.exchange, group
        found: AllReduce = self.known.once(
            key, lambda: allreduce_over(ranks, self.exchange_topology)
        )
        return found

    @cached_property
    def messages_each_way(self) -> NDArray[np.float64]:
        """Messages of a microbatch over a cut, forward and back, shape (2, N+1)."""
        tensors = self.chain.tensors
        if self.engine.messages == "packed":
            return np.ones_like(tensors)
        return np.array([np.maximum(1.0, tensors[0]), tensors[1]])

    @cached_property
    def messages(self) -> NDArray[np.float64]:
        """Messages over a cut one way, the mean of both ways; shape (N+1,)."""
        mean: NDArray[np.float64] = self.messages_each_way.mean(axis=0)
        return mean

    @cached_property
    def reference(self) -> ProfileReference:
        """How plans name the profile; its digest is taken once for all the plans of a problem."""
        products = self.transformer.format if self.transformer else None
        flops, peak = flops_of(self.profile, self.topology, products)
        return ProfileReference(
            name=self.profile.model.name,
            sha256=self.profile.sha256(),
            parameter_bytes=self.profile.parameter_bytes(),
            dtype=self.profile.dtype,
            autocast=self.profile.autocast,
            estimated=self.profile.estimated_for,
            tokens_per_sample=self.profile.model.tokens_per_sample,
            sample_flops=flops,
            peak_flops=peak,
        )

    @cached_property
    def limited_topology(self) -> Topology:
        """The topology as plans carry it: the memory of its devices is the limit."""
        return structs.replace(
            self.topology,
            device=structs.replace(self.topology.device, memory_bytes=self.memory_bytes),
        )

    def cell_costs(self) -> NDArray[np.float64]:
        """The costs that GPipe's heuristics balance, shape (N,).

        Those of the request, by default the measured seconds of every layer.
        """
        costs = self.request.costs
        return self.chain.f + self.chain.g if costs is None else np.array(costs)

    def coarsen(self) -> Problem:
        """The problem whose layers are the ranges that no stage may split.

        The problem itself where every layer may begin a stage.
        """
        bounds = self.boundaries()
        if len(bounds) > self.chain.layers:
            return self
        costs = self.request.costs
        if costs is not None:
            costs = np.add.reduceat(costs, bounds[:-1]).tolist()
        key = "coarse", self.chain, tuple(bounds)
        chain = self.known.once(key, lambda: coarsen(self.chain, bounds))
        return self.with_(chain=chain, cut_at=None, costs=costs)

    def boundaries(self) -> list[int]:
        """Where stages may begin and end, ascending, from 0 to N."""
        starts = self.request.cut_at or range(self.chain.layers)
        return [
            *(start for start in starts if self.tied_group_across(start) is None),
            self.chain.layers,
        ]

    def tied_group_across(self, start: int) -> Group | None:
        """The tied layers that a stage beginning with layer `start` must not split, or `None`.

        There are such layers only where tied layers must stay together.
        """
        groups = self.chain.tied if self.request.tied == "together" else ()
        return next(
            (group for group in groups if group.members[0] < start <= group.members[-1]), None
        )

    @property
    def early_bytes(self) -> float:
        """Bytes of parameters whose gradients are exchanged at once beside the last backward.

        Infinite where it comes first.
        """
        early = self.microbatches is not None and not self.blocks
        return early_bytes(self.engine.bucket_bytes, self.exchange, early)

    def recomputes(self, stage: Assignment) -> bool:
        """Whether a stage recomputes its activations."""
        return self.recompute_by_default if stage.recompute is None else stage.recompute


# what a problem requests of its plan, and all that it may be asked for by name
REQUESTED = frozenset(Request.__struct_fields__)
_FIELDS = {entry.name for entry in fields(Problem)}
STATED = _FIELDS | REQUESTED
# what a plan records of its problem as it is, by the same names
RECORDED = sorted(_FIELDS & set(Plan.__struct_fields__) - {"profile", "topology"})


def problem_of(
    profile: Profile,
    topology: Topology,
    microbatch_size: int | None = None,
    known: Known | None = None,
    **options: Any,
) -> Problem:
    """The problem of planning `profile` on `topology`; `options` are as those of `Problem.with_`.

    The memory limit defaults to the device's. Where a group of ranks was measured, the devices of
    the problem are groups; PartoptError where they do not divide the topology. `known` is what was
    looked up for others on this profile and topology.
    """
    options.setdefault("memory_bytes", topology.device.memory_bytes)
    known = Known() if known is None else known
    group = profile.group_ranks, profile.group_copies
    grouped = known.once("topology", lambda: topology.in_groups(*group))
    chain = known.once(("chain", microbatch_size), lambda: chain_of(profile, microbatch_size))
    stated = Problem(profile=profile, topology=grouped, chain=chain, known=known)
    return as_run(stated.with_(**options))


def as_run(problem: Problem) -> Problem:
    """The problem, its chain as the schedule and the engine run it.

    Backwards may end with the optimizer's step, and blocks be made again one by one.
    """
    chain, known = problem.chain, problem.known
    if steps_in_backwards(problem.schedule, problem.kept.shard > 0):
        chain = known.once(("steps", chain), chain.with_steps)
    if problem.engine.recomputes_blocks:
        bounds, plain = problem.request.block_bounds, chain
        key = "blocks", plain, None if bounds is None else tuple(bounds)
        chain = known.once(key, lambda: plain.with_blocks(bounds))
    return replace(problem, chain=chain)


def problem_from_plan(plan: Plan, profile: Profile) -> Problem:
    """The problem that `plan` was made for, from what it records and its profile.

    Raises PartoptError where `profile` has other layers, none of that microbatch size, or was
    estimated for another device.
    """
    names = [name for stage in plan.stages for name in stage.modules]
    if names != [layer.name for layer in profile.layers]:
        raise PartoptError(
            f"a plan of {plan.profile.name}, whose layers are not those of {profile.model.name}",
            "give its own profile",
            code="other-layers",
        )
    check_device(profile, plan.topology)
    return problem_of(
        profile,
        plan.topology,
        plan.microbatch_size,
        schedule=plan.schedule,
        shard=plan.shard,
        chunks=len(plan.stages_by_rank()[plan.stages[0].ranks[0]]),
        **{name: getattr(plan, name) for name in RECORDED},
    )


@dataclass(frozen=True)
class Assignment:
    """Layers [start, stop) on `ranks`; replica k is `ranks[k]`.

    `recompute` is `None` where it is as the problem says.
    """

    start: int
    stop: int
    ranks: Sequence[int]
    recompute: bool | None = None


@dataclass(frozen=True)
class Partition:
    """A family and its stages in order."""

    family: str
    stages: Sequence[Assignment]

    def on_layers(self, bounds: Sequence[int]) -> Partition:
        """The partition of a coarse chain, whose ranges lie between `bounds`, on the layers."""
        stages = [
            replace(stage, start=bounds[stage.start], stop=bounds[stage.stop])
            for stage in self.stages
        ]
        return replace(self, stages=stages)

    def on_cells(self, bounds: Sequence[int]) -> Partition:
        """The partition of a coarse chain, whose ranges lie between `bounds`, which it cuts at."""
        number = {bound: k for k, bound in enumerate(bounds)}
        stages = [
            replace(stage, start=number[stage.start], stop=number[stage.stop])
            for stage in self.stages
        ]
        return replace(self, stages=stages)


@dataclass(frozen=True)
class Decision:
    """What a planner decides: a partition; what it proved of it, if anything; and what to know."""

    partition: Partition
    certificate: Certificate | None = None
    notes: Sequence[Note] = ()


def certify(
    objective_s: float, lower_bound_s: float, scope: str, proof: str, status: str = ""
) -> Certificate:
    """The certificate of a plan with objective `objective_s`; none of `scope` is below the bound.

    Without a `status` it says how near the two are: optimal, to `MET`, or by how much at most
    another plan is faster.
    """
    lower = min(lower_bound_s, objective_s)
    unknown = lower <= 0 < objective_s
    if objective_s <= lower * (1 + OPTIMAL):
        lower = objective_s
    gap = objective_s / lower - 1 if lower > 0 else 0.0
    near = "optimal" if gap <= MET else f"no plan is more than {100 * gap:.3g} % faster"
    if unknown:
        near = "no bound is known"
    return Certificate(
        status=status or near,
        objective_s=objective_s,
        lower_bound_s=lower,
        gap=gap,
        scope=scope,
        proof=proof,
    )


def partition_of(plan: Plan, recompute_per_stage: bool) -> Partition:
    """The partition of `plan`.

    It says which stages recompute only with `recompute_per_stage`, where a problem leaves that to
    the partition.
    """
    stages = [
        Assignment(
            stage.start, stage.stop, stage.ranks, stage.recompute if recompute_per_stage else None
        )
        for stage in plan.stages
    ]
    return Partition(plan.family, stages)


def are_consecutive(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether every stage has consecutive ranks, behind those of the stage before it."""
    end = 0
    for group in ranks:
        if group[0] < end or list(group) != [*range(group[0], group[0] + len(group))]:
            return False
        end = group[0] + len(group)
    return True


def consecutive(
    boundaries: Sequence[int], replicas: Sequence[int] | None = None
) -> list[Assignment]:
    """Stages between `boundaries`, with `replicas` (default one) on consecutive ranks from 0."""
    counts = replicas or [1] * (len(boundaries) - 1)
    stages, rank = [], 0
    for start, stop, count in zip(boundaries[:-1], boundaries[1:], counts, strict=True):
        stages.append(Assignment(start, stop, range(rank, rank + count)))
        rank += count
    return stages
