"""The plan (`partopt.plan/1`): stages, replicas, ranks, in-flight counts and predicted costs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from partopt import documents
from partopt.documents.engine import Engine, Layout, Recompute
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.documents.stage import (
    Figures,
    Flow,
    Load,
    Positive,
    Reserve,
    Shard,
    Stage,
    device_bytes,
)
from partopt.documents.topology import Topology
from partopt.documents.transformer import Modelled
from partopt.errors import PartoptError
from partopt.units import format_seconds

Replication = Literal["free", "uniform", "none"]
Tied = Literal["exchange", "together"]
Optimizer = Literal["sgd", "momentum", "adam", "adam8bit", "adafactor"]

# S stages, s = 0..S-1 in the order of the layers; P devices.


class Estimate(documents.StrictStruct, frozen=True, kw_only=True):
    """What the formulas say. `period_s` is per microbatch; `iteration_s` where synchronous.

    `one_device_s` is a microbatch on one device; `loads` are the largest of each kind.
    """

    period_s: Positive
    iteration_s: Seconds | None
    one_device_s: Seconds
    bound_by: str
    loads: list[Load]


class HeldBack(documents.StrictStruct, frozen=True, kw_only=True):
    """By which share a microbatch takes longer, `slower`, to fit in memory; and both in words."""

    slower: float
    text: str


class PortTime(documents.StrictStruct, frozen=True, kw_only=True):
    """Seconds for which an all-reduce of a stage takes its ports of a level."""

    stage: Index
    level: str
    seconds: Seconds


class Predicted(documents.StrictStruct, frozen=True, kw_only=True):
    """What the simulator says of the plan, and beside it what the formulas `estimate`.

    `period_s` is per microbatch; `iteration_s` where synchronous. `bubble` is the idle share of the
    devices' time, and `bound_by` what keeps the period from being shorter: `compute of stage 2`.
    `formula_period_s` is the simulated period at the warm-up that the formula gives, where another
    was found to be better. `held_back` is what memory costs, where nothing else costs more, and
    `allreduce_ports` how long ports are taken for a microbatch.
    """

    period_s: Positive
    iteration_s: Seconds | None
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    bubble: float
    speedup_over_one_device: Seconds
    bound_by: str
    formula_period_s: Seconds | None = None
    held_back: HeldBack | msgspec.UnsetType = msgspec.UNSET
    allreduce_ports: list[PortTime] | msgspec.UnsetType = msgspec.UNSET
    estimate: Estimate

    @property
    def binding_load(self) -> Load | None:
        """The load that keeps the period from being shorter; None where it is something else."""
        loads = self.estimate.loads
        return next((load for load in loads if str(load) == self.bound_by), None)

    @property
    def binds(self) -> str:
        """What keeps the period from being shorter, in words: memory, where it costs most."""
        return f"memory: {self.held_back.text}" if self.held_back else self.bound_by


class Certificate(documents.StrictStruct, frozen=True, kw_only=True):
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


class Request(documents.StrictStruct, frozen=True, kw_only=True):
    """What was requested of the planner.

    The plan itself states its schedule, its engine and its topology.

    `stages` is how many, `cut_at` the layers that a stage may begin with, both `None` for any;
    `tied` says whether stages may part layers that share parameters; `recompute` is `auto` where
    the planner may choose, a number of the first blocks that each stage makes again, which lie
    between `block_bounds`; `costs` are what GPipe's heuristics balance, of each layer, `None` for
    the measured time; `cuts` and `replicas` are a person's own split. Of a `layout` that was fixed
    `pp`, `chunks` and `dp` are here; the rest is what the plan is. `any_shard`: what replicas share
    was chosen of all that the trainer has.
    """

    stages: Count | None = None
    cut_at: list[Index] | None = None
    replication: Replication = "free"
    tied: Tied = "exchange"
    recompute: Recompute | Count = "never"
    block_bounds: list[Index] | None = None
    costs: list[Annotated[float, msgspec.Meta(ge=0)]] | None = None
    cuts: list[Index] | None = None
    replicas: list[Count] | None = None
    layout: Layout = Layout()
    any_shard: bool = False


class ProfileReference(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
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


class RunnerUp(documents.StrictStruct, frozen=True, kw_only=True):
    """A plan that was found beside the plan, in short; numbers as in a plan."""

    planner: str
    schedule: str
    microbatch_size: Count
    shape: str
    period_s: Positive
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
    found beside it; `transformer` is what its profile was computed from, where it was.
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
    transformer: Modelled | msgspec.UnsetType = msgspec.UNSET

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults that the types do not express."""
        yield from (fault.at("topology") for fault in self.topology.inconsistencies())
        yield from list(_tiling_faults(self)) or _other_faults(self)

    @property
    def shape(self) -> str:
        """Replicas of every stage, as the PipeDream paper writes them: `15-1`.

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
        """The stages that every rank with work holds, in their order.

        A rank holds several where the schedule has several chunks on a device.
        """
        held: dict[int, list[int]] = {}
        for s, stage in enumerate(self.stages):
            for rank in stage.ranks:
                held.setdefault(rank, []).append(s)
        return held

    def devices_by_stages(self) -> dict[tuple[int, ...], int]:
        """How many devices hold the same stages, by these."""
        ranks = [stage.ranks for stage in self.stages]
        if len(set().union(*ranks)) == sum(map(len, ranks)):  # every device holds one
            return {(s,): len(of_stage) for s, of_stage in enumerate(ranks)}
        return Counter(map(tuple, self.stages_by_rank().values()))

    @property
    def slowest_device_s(self) -> float:
        """Compute seconds for every microbatch that passes, of the device with the most."""
        return max(
            sum(self.stages[s].compute_s / self.stages[s].replicas for s in stages)
            for stages in self.devices_by_stages()
        )

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes on the fullest device."""
        return self._device_bytes(self.fullest_stages)

    @property
    def fullest_stages(self) -> list[int]:
        """The stages of the device that holds the most; of equal ones the lowest rank."""
        return max(map(list, self.devices_by_stages()), key=self._device_bytes)

    def _device_bytes(self, held: Sequence[int]) -> int:
        """Bytes on a device with the stages of these numbers."""
        return device_bytes([self.stages[s] for s in held])

    def find_deviations(self, fewer: bool = False) -> Iterator[str]:
        """The ways in which the plan departs from its request.

        With `fewer`, the number of stages requested is a maximum.
        """
        request, planned = self.request, len(self.stages)
        yield from self.find_other_degrees()
        if (
            request.stages is not None
            and planned != request.stages
            and not (fewer and planned < request.stages)
        ):
            yield f"{request.stages} stages requested, {planned} planned"
        replicas = {stage.replicas for stage in self.stages}
        if (request.replication == "uniform" and len(replicas) > 1) or (
            request.replication == "none" and replicas != {self.copies}
        ):
            yield f"replication {request.replication} requested, {self.shape} planned"
        for s, stage in enumerate(self.stages):
            if request.cut_at is not None and stage.start not in request.cut_at:
                yield f"stage {s} begins at layer {stage.start}, where none was requested to"

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
        last = self.topology.devices - 1
        if not 0 <= rank <= last:
            hint = f"ranks are numbered 0 to {last}"
            raise PartoptError(f"no rank {rank}", hint, code="unknown-rank", rank=rank)
        return [stage for stage in self.stages if rank in stage.ranks]

    def stage_of(self, rank: int, chunk: int = 0) -> Stage:
        """The stage that `rank` holds; where it holds several, the one of number `chunk`.

        Raises PartoptError for a rank or a chunk that does not exist, and for an idle rank.
        """
        held = self.stages_of(rank)
        if not held:
            what, hint = "is idle: the plan has no stage on it", "gives an empty list for it"
            raise PartoptError(
                f"rank {rank} {what}", f"`stages_of` {hint}", code="idle-rank", rank=rank
            )
        if 0 <= chunk < len(held):
            return held[chunk]
        raise PartoptError(
            f"rank {rank} holds {len(held)} stages, none of number {chunk}",
            "`stages_of` lists them",
            code="no-such-stage",
            rank=rank,
        )


class Proof(NamedTuple):
    """What is proved of a plan, and among which plans: every text names these.

    `claim` is a sentence, `line` the same with what it rests on, `value` and `label` are a number
    and what it is of.
    """

    claim: str
    line: str
    value: str
    label: str


def noam(devices: int, input_replicas: int) -> int:
    """Minibatches in flight per input-stage replica: ceil(P / r_0).

    PipeDream, SOSP 2019, section 3.2.
    """
    return -(-devices // input_replicas)


def seconds_of(plan: Plan) -> float:
    """Seconds of an iteration or, where there is none, of a microbatch."""
    return plan.predicted.iteration_s or plan.predicted.period_s


def cuts_of(plan: Plan) -> list[int]:
    """The first layer of every stage but the first."""
    return [stage.start for stage in plan.stages[1:]]


def needed_bytes(plan: Plan) -> int:
    """Bytes on the fullest device, with what a closed form counts beside the stages."""
    return plan.peak_memory_bytes + _counted_bytes(plan)


def room_bytes(plan: Plan) -> int | None:
    """The limit of what `needed_bytes` counts; `None` where none is known."""
    limit = plan.memory_limit_bytes
    return None if limit is None else limit + _counted_bytes(plan)


def _counted_bytes(plan: Plan) -> int:
    return plan.reserve.size_bytes * (plan.reserve.basis == "computed")


def proof_of(plan: Plan) -> Proof | None:
    """What the certificate of `plan` says; None where it has none.

    Of the planner `optimal` it speaks of simulated plans, of others of what they minimise.
    """
    certificate = plan.certificate
    if certificate is None:
        return None
    status, scope, lower_s = certificate.status, certificate.scope, certificate.lower_bound_s
    if plan.planner != "optimal":
        claim = f"{status}, among {scope}"
        return Proof(claim, f"among {scope}: {certificate.proof}", status, f"among {scope}")
    if status == "optimal":
        claim = f"optimal among {scope}"
        return Proof(claim, claim, status, f"among {scope}")
    claim = f"{status}, among {scope}"
    if not lower_s:
        return Proof(claim, claim, "no bound", f"is known of {scope}")
    label = f"faster at most is any of {scope}"
    return Proof(
        claim, f"{claim}; bound {format_seconds(lower_s)}", f"{certificate.gap:.1%}", label
    )


def _fault(message: str, hint: str = "re-run `solve`") -> PartoptError:
    return PartoptError(message, hint, code="inconsistent-plan")


def _tiling_faults(plan: Plan) -> Iterator[PartoptError]:
    """The first stage that does not follow the one before; what comes after it follows from it."""
    stop = 0
    for s, stage in enumerate(plan.stages):
        if stage.start != stop or stage.stop <= stage.start:
            what = f"layers [{stage.start}, {stage.stop}) do not follow layer {stop}"
            yield _fault(f"stages[{s}]: {what}", "stages tile the layers in order")
            return
        stop = stage.stop


def _other_faults(plan: Plan) -> Iterator[PartoptError]:
    """What is wrong with a plan whose stages tile the layers."""
    for s, stage in enumerate(plan.stages):
        yield from _stage_faults(stage, f"stages[{s}]")
        yield from _rank_faults(plan, stage, f"stages[{s}]")
    if len(set(map(len, plan.stages_by_rank().values()))) > 1:
        yield _fault(
            "stages: some ranks hold more of them than others",
            "every rank of a plan holds equally many stages",
        )
    yield from _flow_faults(plan)
    yield from _port_faults(plan)
    for n, load in enumerate(plan.predicted.estimate.loads):
        if load.place >= len(plan.stages):
            place = f"predicted.estimate.loads[{n}].place"
            yield _fault(f"{place}: {load.place}, of {len(plan.stages)} stages")
    yield from _layout_faults(plan)
    yield from _request_faults(plan)


def _stage_faults(stage: Stage, place: str) -> Iterator[PartoptError]:
    """Names and ranks that are not as many as they should be."""
    layers, ranks = stage.stop - stage.start, len(stage.ranks)
    if len(stage.modules) != layers:
        what = f"{len(stage.modules)} names for {layers} layers"
        yield _fault(f"{place}.modules: {what}", "name each layer once")
    if ranks != stage.replicas:
        what = f"{ranks} ranks for {stage.replicas} replicas"
        yield _fault(f"{place}.ranks: {what}", "each replica has one rank")


def _rank_faults(plan: Plan, stage: Stage, place: str) -> Iterator[PartoptError]:
    """Ranks that do not exist, appear twice, or are apart where they may not be."""
    devices = plan.topology.devices
    for index, rank in enumerate(stage.ranks):
        if rank >= devices:
            hint = f"the topology has ranks 0 to {devices - 1}"
            yield _fault(f"{place}.ranks: no rank {rank}", hint)
        if rank in stage.ranks[:index]:
            hint = "each replica has a rank of its own"
            yield _fault(f"{place}.ranks: rank {rank} appears twice", hint)
    if plan.family == "contiguous" and not _is_run(stage.ranks):
        what, hint = "not consecutive, in a contiguous plan", "consecutive ranks, or another family"
        yield _fault(f"{place}.ranks: {what}", hint)


def _is_run(ranks: Sequence[int]) -> bool:
    return all(after == rank + 1 for rank, after in itertools.pairwise(ranks))


def _port_faults(plan: Plan) -> Iterator[PartoptError]:
    """Ports of stages or levels that do not exist."""
    levels = [level.name for level in plan.topology.levels]
    for n, port in enumerate(plan.predicted.allreduce_ports or []):
        place = f"predicted.allreduce_ports[{n}]"
        if port.stage >= len(plan.stages):
            yield _fault(f"{place}.stage: {port.stage}, of {len(plan.stages)} stages")
        if port.level not in levels:
            yield _fault(f"{place}.level: no level {port.level}", f"known: {', '.join(levels)}")


def _flow_faults(plan: Plan) -> Iterator[PartoptError]:
    """Traffic of no stage, of stages that do not exist, or over levels that do not."""
    levels = {level.name for level in plan.topology.levels}
    for index, flow in enumerate(plan.communication):
        place = f"communication[{index}]"
        ends = [s for s in (flow.source, flow.destination, flow.stage) if s is not None]
        needed = ("source", "destination") if flow.kind == "send" else ("stage",)
        if None in (getattr(flow, name) for name in needed):
            yield _fault(f"{place}: {flow.kind} without its {' and '.join(needed)}")
        elif max(ends) >= len(plan.stages):
            hint = f"stages are numbered 0 to {len(plan.stages) - 1}"
            yield _fault(f"{place}: no stage {max(ends)}", hint)
        if flow.level not in levels:
            yield _fault(f"{place}: no level {flow.level}", f"known: {', '.join(sorted(levels))}")


def _layout_faults(plan: Plan) -> Iterator[PartoptError]:
    """Fields of the layout that are missing, or others than the stages say."""
    layout = plan.layout
    rest = {name: getattr(layout, name) for name in ("microbatch", "shard", "schedule")}
    stated = Layout.of(plan.stages, plan.copies, tp=plan.topology.group_ranks, **rest)
    if plan.transformer:
        inside = plan.transformer.layout
        stated = stated.with_inside(inside)
        ranks = (inside.tp or 1) * (inside.cp or 1)
        if ranks != plan.topology.group_ranks:
            what = f"{ranks} ranks of a group, and the topology has {plan.topology.group_ranks}"
            yield _fault(f"transformer.layout: {what}")
    for name in Layout.__struct_fields__:
        found, value = getattr(stated, name), getattr(layout, name)
        if value != found or (name in rest and value is None):
            what = "missing" if value is None else f"{value}, and the stages have {found}"
            yield _fault(f"layout.{name}: {what}")


def _request_faults(plan: Plan) -> Iterator[PartoptError]:
    """Layers and costs of a request that these layers do not have."""
    starts, costs, layers = plan.request.cut_at, plan.request.costs, plan.stages[-1].stop
    if starts is not None and not (
        starts[:1] == [0] and starts == sorted(set(starts)) and starts[-1] < layers
    ):
        hint = f"the layers are 0 to {layers - 1}"
        yield _fault("request.cut_at: not ascending layers from 0 on", hint)
    if costs is not None and len(costs) != layers:
        what = f"{len(costs)} costs for {layers} layers"
        yield _fault(f"request.costs: {what}", "give each layer one")
