"""The plan (`partopt.plan/1`): stages, replicas, ranks, in-flight counts and predicted costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from partopt import documents
from partopt.documents.engine import Engine, Layout, Recompute
from partopt.documents.figures import Figures, Positive
from partopt.documents.plan_checks import find_faults
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.documents.stage import Flow, Load, Reserve, Shard, Stage, device_bytes
from partopt.documents.topology import Topology
from partopt.errors import PartoptError

Replication = Literal["free", "uniform", "none"]
Tied = Literal["exchange", "together"]
Optimizer = Literal["sgd", "momentum", "adam", "adam8bit", "adafactor"]

# S stages, s = 0..S-1 in the order of the layers; P devices.


class Estimate(documents.Part, frozen=True, kw_only=True):
    """What the formulas say. `period_s` is per microbatch; `iteration_s` where synchronous.

    `one_device_s` is a microbatch on one device; `loads` are the largest of each kind.
    """

    period_s: Annotated[float, msgspec.Meta(gt=0)]
    iteration_s: Seconds | None
    one_device_s: Seconds
    bound_by: str
    loads: list[Load]


class Predicted(documents.Part, frozen=True, kw_only=True):
    """What the simulator says of the plan, and beside it what the formulas `estimate`.

    `period_s` is per microbatch; `iteration_s` where synchronous. `bubble` is the idle share of the
    devices' time, and `bound_by` what keeps the period from being shorter: `compute of stage 2`.
    `formula_period_s` is the simulated period at the warm-up that the formula gives, where another
    was found to be better.
    """

    period_s: Annotated[float, msgspec.Meta(gt=0)]
    iteration_s: Seconds | None
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    bubble: float
    speedup_over_one_device: Seconds
    bound_by: str
    formula_period_s: Seconds | None = None
    estimate: Estimate


class Certificate(documents.Part, frozen=True, kw_only=True):
    """What the planner minimised, the value that it reached, and a bound that no plan is below.

    `scope` says which plans, `proof` why. Of the planner `optimal` the value is the simulated
    period or iteration, and the bound one that no plan of the scope can beat in the simulator.
    """

    status: str
    objective_s: Seconds
    lower_bound_s: Seconds
    gap: float
    scope: str
    proof: str


class Request(documents.Part, frozen=True, kw_only=True):
    """What was requested of the planner.

    The plan itself states its schedule, its engine and its topology.

    `stages` is how many, `cut_at` the layers that a stage may begin with, both `None` for any;
    `tied` says whether stages may part layers that share parameters; `recompute` is `auto` where
    the planner may choose, a number of the first blocks that each stage makes again, which lie
    between `block_bounds`; `costs` are what GPipe's heuristics balance, of each layer, `None` for
    the measured time; `cuts` and `replicas` are a person's own split, `any_schedule` says that the
    schedule was to be found, too. Of a `layout` that was fixed `pp`, `chunks` and `dp` are here;
    the rest is what the plan is.
    """

    stages: Count | None
    cut_at: list[Index] | None
    replication: Replication
    tied: Tied
    recompute: Recompute | Count
    block_bounds: list[Index] | None = None
    costs: list[Annotated[float, msgspec.Meta(ge=0)]] | None
    cuts: list[Index] | None = None
    replicas: list[Count] | None = None
    any_schedule: bool = False
    layout: Layout = Layout()


class ProfileReference(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """The profile of the plan: its model's name and parameters, and the digest of its content.

    `estimated` is the device that its times were estimated for, where nobody measured them.
    `sample_flops` are the model's operations on a sample, forward and backward, `peak_flops` what a
    device computes in a second at most; both are there where they are known. `dtype` is that of the
    parameters, `autocast` that of the operations under autocast.
    """

    name: str
    sha256: str
    parameter_bytes: Bytes
    dtype: str = "float32"
    autocast: str | None = None
    estimated: str | None = None
    tokens_per_sample: Count | None = None
    sample_flops: Positive | None = None
    peak_flops: Positive | None = None


class RunnerUp(documents.Part, frozen=True, kw_only=True):
    """A plan that was found beside the plan, in short; numbers as in a plan."""

    planner: str
    schedule: str
    microbatch_size: Count
    shape: str
    period_s: Annotated[float, msgspec.Meta(gt=0)]
    samples_per_s: Seconds
    peak_memory_bytes: Bytes
    fits: bool

    @classmethod
    def of(cls, plan: Plan) -> RunnerUp:
        """`plan` in short."""
        return cls(
            planner=plan.planner,
            schedule=plan.schedule,
            microbatch_size=plan.microbatch_size,
            shape=plan.shape,
            period_s=plan.predicted.period_s,
            samples_per_s=plan.predicted.samples_per_s,
            peak_memory_bytes=plan.peak_memory_bytes,
            fits=plan.fits,
        )


class Plan(documents.Document, frozen=True, kw_only=True):
    """A plan, self-contained: it carries its topology whole and refers to its profile by digest.

    It is for `trainer`, of which `engine` says what its engine does; `layout` is what all stages
    have in common, `reserve` what the limit of memory is beside. `runners_up` are plans that were
    found beside it.
    """

    schema: str = "partopt.plan/1"
    planner: str
    family: str
    layout: Layout
    microbatches: Count | None
    noam: Count
    optimizer: Optimizer
    trainer: str
    engine: Engine
    reserve: Reserve
    request: Request
    stages: Annotated[list[Stage], msgspec.Meta(min_length=1)]
    communication: list[Flow]
    predicted: Predicted
    certificate: Certificate | None
    profile: ProfileReference
    topology: Topology
    runners_up: list[RunnerUp] | msgspec.UnsetType = msgspec.UNSET

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults that the types do not express."""
        yield from (fault.at("topology") for fault in self.topology.inconsistencies())
        yield from find_faults(self)

    @property
    def shape(self) -> str:
        """Replicas of each stage, as the PipeDream paper writes them: `15-1`.

        Runs of five or more equal counts are folded: `1x64`.
        """
        runs = [
            (replicas, len(list(run)))
            for replicas, run in itertools.groupby(stage.replicas for stage in self.stages)
        ]
        return "-".join(
            f"{replicas}x{count}" if count > 4 else "-".join([str(replicas)] * count)
            for replicas, count in runs
        )

    @property
    def schedule(self) -> str:
        """The name of the schedule; that of a file where its order is in one."""
        return self.layout.schedule or ""

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        return self.layout.microbatch or 1

    @property
    def shard(self) -> Shard:
        """What each replica of a stage holds a share of."""
        return self.layout.shard or "none"

    @property
    def waits(self) -> bool:
        """Whether devices wait for their messages; else these overlap with compute."""
        return self.schedule in self.engine.waits

    def with_engine(self, **facts: Any) -> Plan:
        """The plan with some facts of its engine replaced, and nothing counted again."""
        return replace(self, engine=replace(self.engine, **facts))

    def with_layout(self, **fields: Any) -> Plan:
        """The plan with some fields of its layout replaced, and nothing counted again."""
        return replace(self, layout=replace(self.layout, **fields))

    @property
    def copies(self) -> int:
        """Copies of the model that a schedule runs across each other on the same devices."""
        return 2 if self.family == "mirrored" else 1

    @property
    def world_size(self) -> int:
        """The ranks that a run of the plan has: those up to the last with work."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)

    @property
    def idle_ranks(self) -> list[int]:
        """Ranks that the plan leaves without work."""
        return sorted(
            set(range(self.topology.devices))
            - {rank for stage in self.stages for rank in stage.ranks}
        )

    def stages_by_rank(self) -> dict[int, list[int]]:
        """The stages that each rank with work holds, in their order.

        A rank holds several where the schedule has several chunks on a device.
        """
        held: dict[int, list[int]] = {}
        for s, stage in enumerate(self.stages):
            for rank in stage.ranks:
                held.setdefault(rank, []).append(s)
        return held

    @property
    def slowest_device_s(self) -> float:
        """Compute seconds for each microbatch that passes, of the device with the most."""
        held = self.stages_by_rank().values()
        return max(
            sum(self.stages[s].compute_s / self.stages[s].replicas for s in stages)
            for stages in held
        )

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes on the fullest device."""
        return self._device_bytes(self.fullest_stages)

    @property
    def fullest_stages(self) -> list[int]:
        """The stages of the device that holds the most; of equal ones the lowest rank."""
        distinct = dict.fromkeys(map(tuple, self.stages_by_rank().values()))
        return max(map(list, distinct), key=self._device_bytes)

    def _device_bytes(self, held: Sequence[int]) -> int:
        """Bytes on a device with the stages of these numbers."""
        return device_bytes([self.stages[s] for s in held])

    def find_deviations(self, fewer: bool = False) -> Iterator[str]:
        """The ways in which the plan departs from its request.

        With `fewer`, the number of stages requested is a maximum.
        """
        request, own = self.request, len(self.stages)
        yield from self.find_other_degrees()
        if (
            request.stages is not None
            and own != request.stages
            and not (fewer and own < request.stages)
        ):
            yield f"{request.stages} stages requested, {own} planned"
        replicas = {stage.replicas for stage in self.stages}
        if (request.replication == "uniform" and len(replicas) > 1) or (
            request.replication == "none" and replicas != {self.copies}
        ):
            yield f"replication {request.replication} requested, {self.shape} planned"

    def find_other_degrees(self) -> Iterator[str]:
        """The degrees of the layout that are others than those requested."""
        for name in ("pp", "chunks", "dp"):
            asked, found = getattr(self.request.layout, name), getattr(self.layout, name)
            if asked not in (None, found):
                yield f"{name}={asked} requested, {found or 'unequal replicas'} planned"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit of one device; `None` where none is known."""
        return self.topology.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every device has room under its limit, if there is one."""
        limit = self.memory_limit_bytes
        return limit is None or self.peak_memory_bytes <= limit

    def stages_of(self, rank: int) -> list[Stage]:
        """The stages that `rank` holds, in their order; none of an idle rank.

        Raises PartoptError for a rank that the topology does not have.
        """
        if not 0 <= rank < self.topology.devices:
            raise PartoptError(
                f"no rank {rank}",
                f"ranks are numbered 0 to {self.topology.devices - 1}",
                code="unknown-rank",
                rank=rank,
            )
        return [stage for stage in self.stages if rank in stage.ranks]

    def stage_of(self, rank: int, chunk: int = 0) -> Stage:
        """The stage that `rank` holds; where it holds several, the one of number `chunk`.

        Raises PartoptError for a rank or a chunk that does not exist, and for an idle rank.
        """
        held = self.stages_of(rank)
        if not held:
            raise PartoptError(
                f"rank {rank} is idle: the plan has no stage on it",
                "`stages_of` gives an empty list for it",
                code="idle-rank",
                rank=rank,
            )
        if not 0 <= chunk < len(held):
            raise PartoptError(
                f"rank {rank} holds {len(held)} stages, none of number {chunk}",
                "`stages_of` lists them",
                code="no-such-stage",
                rank=rank,
                chunk=chunk,
            )
        return held[chunk]
