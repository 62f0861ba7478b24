"""Checks of a plan beyond its types: stages tile the layers, ranks exist, sums add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from partopt.documents.engine import Layout
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.plan import Plan
    from partopt.documents.stage import Stage


def _fault(message: str, hint: str) -> PartoptError:
    return PartoptError(message, hint, code="inconsistent-plan")


def find_faults(plan: Plan) -> Iterator[PartoptError]:
    """Faults of a plan that its types do not express, each with its place."""
    yield from list(_tiling_faults(plan)) or _other_faults(plan)


def _tiling_faults(plan: Plan) -> Iterator[PartoptError]:
    """The first stage that does not follow the one before; what comes after it follows from it."""
    stop = 0
    for s, stage in enumerate(plan.stages):
        if stage.start != stop or stage.stop <= stage.start:
            yield _fault(
                f"stages[{s}]: layers [{stage.start}, {stage.stop}) do not follow layer {stop}",
                "stages tile the layers in order",
            )
            return
        stop = stage.stop


def _other_faults(plan: Plan) -> Iterator[PartoptError]:
    held: dict[int, list[int]] = {}
    longest = max(stage.compute_s for stage in plan.stages)
    for s, stage in enumerate(plan.stages):
        yield from _count_faults(s, stage)
        yield from _time_faults(s, stage, 1e-9 * longest)
        yield from _rank_faults(s, stage, plan, held)
    if len({len(stages) for stages in held.values()}) > 1:
        yield _fault(
            "stages: some ranks hold more of them than others",
            "every rank of a plan holds equally many stages",
        )
    yield from _flow_faults(plan)
    for n, load in enumerate(plan.predicted.estimate.loads):
        if load.place >= len(plan.stages):
            yield _fault(
                f"predicted.estimate.loads[{n}].place: {load.place}, of {len(plan.stages)} stages",
                "re-run `solve`",
            )
    yield from _layout_faults(plan)
    yield from _request_faults(plan)
    yield from _kind_faults(plan)
    yield from _runner_up_faults(plan)


def _count_faults(s: int, stage: Stage) -> Iterator[PartoptError]:
    """Names, ranks and bytes of stage s that are not as many as they should be."""
    layers = stage.stop - stage.start
    if len(stage.modules) != layers:
        yield _fault(
            f"stages[{s}].modules: {len(stage.modules)} names for {layers} layers",
            "name each layer once",
        )
    if len(stage.ranks) != stage.replicas:
        yield _fault(
            f"stages[{s}].ranks: {len(stage.ranks)} ranks for {stage.replicas} replicas",
            "each replica has one rank",
        )
    if stage.frozen_bytes > stage.parameter_bytes:
        yield _fault(
            f"stages[{s}].frozen_bytes: more than parameter_bytes, of which they are a part",
            "re-run `solve`",
        )
    if stage.memory.transient_bytes not in (stage.transient_bytes, stage.split_transient_bytes):
        yield _fault(
            f"stages[{s}].memory.transient_bytes: neither transient_bytes nor "
            "split_transient_bytes of the stage",
            "re-run `solve`",
        )
    parts = msgspec.structs.asdict(stage.memory)
    if parts.pop("total_bytes") != sum(parts.values()):
        yield _fault(
            f"stages[{s}].memory.total_bytes: not the sum of its parts, {sum(parts.values())}",
            "re-run `solve`",
        )


def _flow_faults(plan: Plan) -> Iterator[PartoptError]:
    """Traffic of no stage, of stages that do not exist, or over levels that do not."""
    levels = {level.name for level in plan.topology.levels}
    for index, flow in enumerate(plan.communication):
        place = f"communication[{index}]"
        ends = [s for s in (flow.source, flow.destination, flow.stage) if s is not None]
        own = ("source", "destination") if flow.kind == "send" else ("stage",)
        if None in (getattr(flow, name) for name in own):
            yield _fault(f"{place}: {flow.kind} without its {' and '.join(own)}", "re-run `solve`")
        elif max(ends) >= len(plan.stages):
            hint = f"stages are numbered 0 to {len(plan.stages) - 1}"
            yield _fault(f"{place}: no stage {max(ends)}", hint)
        if flow.level not in levels:
            yield _fault(f"{place}: no level {flow.level}", f"known: {', '.join(sorted(levels))}")


def _layout_faults(plan: Plan) -> Iterator[PartoptError]:
    """Fields of the layout that are missing, or others than the stages say."""
    own = plan.layout
    rest = {name: getattr(own, name) for name in ("microbatch", "shard", "schedule")}
    stated = Layout.of(plan.stages, plan.copies, tp=plan.topology.group_ranks, **rest)
    for name in Layout.__struct_fields__:
        found, value = getattr(stated, name), getattr(own, name)
        if value != found or (name in rest and value is None):
            what = "missing" if value is None else f"{value}, and the stages have {found}"
            yield _fault(f"layout.{name}: {what}", "re-run `solve`")


def _request_faults(plan: Plan) -> Iterator[PartoptError]:
    """Requests that these layers do not allow, and departures of the plan from its request.

    The number of stages and the replication are checked for the planner `optimal` alone.
    """
    layers, starts, costs = plan.stages[-1].stop, plan.request.cut_at, plan.request.costs
    if starts is not None and not (
        starts[:1] == [0] and starts == sorted(set(starts)) and starts[-1] < layers
    ):
        yield _fault(
            "request.cut_at: not ascending layers from 0 on", f"the layers are 0 to {layers - 1}"
        )
    bounds = plan.request.block_bounds
    if bounds is not None and not (
        len(bounds) > 1 and bounds == sorted(set(bounds)) and bounds[-1] <= layers
    ):
        yield _fault(
            "request.block_bounds: not ascending layers", f"the layers are 0 to {layers - 1}"
        )
    if costs is not None and len(costs) != layers:
        yield _fault(
            f"request.costs: {len(costs)} costs for {layers} layers", "give each layer one"
        )
    for s, stage in enumerate(plan.stages):
        if starts is not None and stage.start not in starts:
            yield _fault(
                f"stages[{s}].start: {stage.start} is not one of request.cut_at",
                "stages begin where they may",
            )
        asked = plan.request.recompute
        as_asked = stage.recompute == (asked != "never")
        if isinstance(asked, int):
            as_asked = as_asked and stage.blocks_again == min(asked, stage.blocks or 0)
        elif asked == "always":
            as_asked = as_asked and stage.first_again is None
        if not as_asked and asked != "auto":
            yield _fault(
                f"stages[{s}].recompute: request.recompute is {plan.request.recompute}",
                "re-run `solve`",
            )
    for what in plan.find_deviations() if plan.planner == "optimal" else []:
        yield _fault(f"request: {what}", "re-run `solve`")


def _runner_up_faults(plan: Plan) -> Iterator[PartoptError]:
    """Runners-up whose own numbers contradict each other."""
    limit = plan.memory_limit_bytes
    for n, row in enumerate(plan.runners_up or []):
        rate = row.microbatch_size / row.period_s
        if not math.isclose(rate, row.samples_per_s, rel_tol=1e-6):
            place = f"runners_up[{n}].samples_per_s"
            yield _fault(f"{place}: not microbatch_size / period_s, {rate:g}", "re-run `solve`")
        if row.fits != (limit is None or row.peak_memory_bytes <= limit):
            yield _fault(f"runners_up[{n}].fits: not as its memory says", "re-run `solve`")


def _kind_faults(plan: Plan) -> Iterator[PartoptError]:
    """A family, a planner, buffers or a reserve that the rest of the plan contradicts."""
    reserve, given = plan.reserve, plan.engine.reserve_bytes
    if (
        (reserve.basis == "none" and reserve.size_bytes > 0)
        or (reserve.basis == "given" and reserve.size_bytes != given)
        or (reserve.basis != "none" and plan.memory_limit_bytes is None)
    ):
        yield _fault(
            f"reserve.basis: {reserve.basis}, with {reserve.size_bytes} bytes reserved of "
            f"{'no limit' if plan.memory_limit_bytes is None else 'each device'}",
            "re-run `solve`",
        )
    synchronous = plan.microbatches is not None
    if plan.engine.buffers == "all" and not synchronous:
        yield _fault(f"engine.buffers: all under {plan.schedule}", "it has no iteration")
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    apart = any(not _is_run(stage.ranks) for stage in plan.stages) or ranks != sorted(ranks)
    if plan.family == "nested" and not apart:
        yield _fault("family: nested, and all ranks are consecutive", 'they are "contiguous"')
    request = plan.request
    if (request.cuts is None) != (request.replicas is None):
        yield _fault("request.cuts: without request.replicas, or they without", "give both")
    elif request.cuts is not None and request.replicas is not None:
        replicas = [stage.replicas // plan.copies for stage in plan.stages]
        if ([s.start for s in plan.stages[1:]], replicas) != (request.cuts, request.replicas):
            yield _fault("request.cuts: the stages are others", "re-run `solve`")
    if (plan.planner == "manual") != (request.cuts is not None):
        yield _fault(
            f"planner: {plan.planner}, with{'out' if request.cuts is None else ''} request.cuts",
            'a person\'s own split is "manual"',
        )
    if request.any_schedule != (plan.planner == "grid") and plan.planner != "optimal":
        yield _fault(
            f"planner: {plan.planner}, with request.any_schedule {request.any_schedule}",
            'what is found among all schedules is of "grid" or "optimal"',
        )


def _is_run(ranks: Sequence[int]) -> bool:
    return all(after == rank + 1 for rank, after in itertools.pairwise(ranks))


def _time_faults(s: int, stage: Stage, rounding: float) -> Iterator[PartoptError]:
    """Parts of the compute time of stage s that do not add up, by more than `rounding` seconds."""
    whole = stage.forward_s + stage.backward_s + stage.again_s
    if not math.isclose(whole, stage.compute_s, rel_tol=1e-6, abs_tol=rounding):
        yield _fault(
            f"stages[{s}].compute_s: not the sum of its parts, {whole:g}", "re-run `solve`"
        )
    if stage.backward_weight_s > stage.backward_s + rounding:
        yield _fault(
            f"stages[{s}].backward_weight_s: longer than backward_s, of which it is a part",
            "re-run `solve`",
        )


def _rank_faults(
    s: int, stage: Stage, plan: Plan, held: dict[int, list[int]]
) -> Iterator[PartoptError]:
    """Ranks of stage s that do not exist, appear twice, or are apart where they may not be.

    `held` maps the ranks seen so far to their stages.
    """
    devices = plan.topology.devices
    for rank in stage.ranks:
        if rank >= devices:
            yield _fault(
                f"stages[{s}].ranks: no rank {rank}", f"the topology has ranks 0 to {devices - 1}"
            )
        if s in held.setdefault(rank, []):
            yield _fault(
                f"stages[{s}].ranks: rank {rank} appears twice",
                "each replica has a rank of its own",
            )
        held[rank].append(s)
    if plan.family == "contiguous" and not _is_run(stage.ranks):
        yield _fault(
            f"stages[{s}].ranks: not consecutive, in a contiguous plan",
            "consecutive ranks, or another family",
        )
