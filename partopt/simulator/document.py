"""An execution as a document, with the changes made to the plan before it ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from partopt.cost.figures import figures_of
from partopt.documents.plan import Plan
from partopt.documents.simulation import (
    Finding,
    LevelTime,
    Planned,
    RankTime,
    SimulationDocument,
    Varied,
)
from partopt.schedules import SCHEDULES
from partopt.simulator.drawing import drawn_timeline, drawn_windows
from partopt.simulator.execution import Execution
from partopt.units import format_bandwidth, format_bytes, format_seconds

_LISTED = 11  # characters of a long list at its beginning, and at its end


def document_of(
    execution: Execution,
    before: Plan,
    findings: Sequence[Finding],
    varied: Varied | None = None,
) -> SimulationDocument:
    """The document of `execution` with the advice `findings`; `before` is the unchanged plan.

    `varied` is what becomes of it where devices vary.
    """
    plan, steady, peak = execution.plan, execution.steady, int(execution.peak_memory_bytes.max())
    limit = plan.memory_limit_bytes
    return SimulationDocument(
        model=plan.profile.name,
        layers=plan.stages[-1].stop,
        parameter_bytes=plan.profile.parameter_bytes,
        estimated=plan.profile.estimated,
        planner=plan.planner,
        stages=len(plan.stages),
        shape=plan.shape,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=execution.microbatches,
        makespan_s=execution.makespan_s,
        iteration_s=None if steady else execution.makespan_s,
        period_s=execution.period_s,
        bubble=execution.bubble,
        longest_span_s=execution.longest_span_s,
        samples_per_s=plan.microbatch_size / execution.period_s,
        figures=figures_of(plan.microbatch_size / execution.period_s, plan.profile, plan.topology),
        settled=steady.settled if steady else None,
        cycle_microbatches=steady.microbatches if steady else None,
        window_start_s=execution.start_s,
        window_end_s=execution.end_s,
        peak_memory_bytes=peak,
        fits=limit is None or peak <= limit,
        changed=changes(before, plan),
        planned=_promises(before),
        levels=_level_times(execution),
        advice=list(findings),
        ranks=[
            _rank_time(execution, rank, stages)
            for rank, stages in sorted(plan.stages_by_rank().items())
        ],
        topology=plan.topology,
        timeline=drawn_timeline(execution.timeline, drawn_windows(execution)),
        variation=varied or msgspec.UNSET,
    )


def _promises(plan: Plan) -> Planned:
    return Planned(
        period_s=plan.predicted.period_s,
        iteration_s=plan.predicted.iteration_s,
        samples_per_s=plan.predicted.samples_per_s,
        bubble=plan.predicted.bubble,
        peak_memory_bytes=plan.peak_memory_bytes,
    )


def _level_times(execution: Execution) -> list[LevelTime]:
    return [
        LevelTime(
            level=use.level,
            transfer_share=use.transfer_share,
            allreduce_share=use.allreduce_share,
            sent_bytes=use.bytes,
        )
        for use in execution.level_use
    ]


def _rank_time(execution: Execution, rank: int, stages: list[int]) -> RankTime:
    shares = execution.shares
    return RankTime(
        rank=rank,
        stages=stages,
        compute_s=float(shares.compute_s[rank]),
        transfer_s=float(shares.transfer_s[rank]),
        allreduce_s=float(shares.allreduce_s[rank]),
        idle_s=float(shares.idle_s[rank]),
        waiting_for_activations_s=float(shares.forward_s[rank]),
        waiting_for_gradients_s=float(shares.gradient_s[rank]),
        finished_s=float(shares.end_s[rank]),
        peak_in_flight=int(execution.peak_in_flight[rank]),
        peak_memory_bytes=int(execution.peak_memory_bytes[rank]),
    )


def changes(before: Plan, after: Plan) -> list[str]:
    """The conditions that differ between two plans of the same stages.

    Example: `bandwidth of cluster 1.25 GB/s -> 3.13 GB/s`.
    """
    return [f"{what} {old} -> {new}" for what, old, new in _pairs(before, after) if old != new]


def _pairs(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    yield "schedule", before.schedule, after.schedule
    if after.microbatches is not None:
        yield (
            "microbatches",
            "none" if before.microbatches is None else str(before.microbatches),
            str(after.microbatches),
        )
    if (before.schedule, before.microbatches) == (after.schedule, after.microbatches):
        old, new = ([stage.warmup for stage in plan.stages] for plan in (before, after))
        if old != new:
            yield "warm-up", _list_numbers(old), _list_numbers(new)
    yield from _level_pairs(before, after)
    yield "memory of a device", _limit(before), _limit(after)
    yield "transfers", before.comm, after.comm
    if after.schedule in SCHEDULES and SCHEDULES[after.schedule].asynchronous:
        yield "all-reduces", before.allreduce, after.allreduce


def _level_pairs(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    for old_level, new_level in zip(
        before.topology.own_levels, after.topology.own_levels, strict=True
    ):
        old_rate, new_rate = old_level.bandwidth_bytes_per_s, new_level.bandwidth_bytes_per_s
        yield (
            f"bandwidth of {new_level.name}",
            format_bandwidth(old_rate),
            format_bandwidth(new_rate),
        )
        yield (
            f"latency of {new_level.name}",
            format_seconds(old_level.latency_s),
            format_seconds(new_level.latency_s),
        )
        yield f"links of {new_level.name}", str(old_level.links), str(new_level.links)


def _limit(plan: Plan) -> str:
    limit = plan.memory_limit_bytes
    return "unknown" if limit is None else format_bytes(limit)


def _list_numbers(numbers: Sequence[int]) -> str:
    text = ",".join(map(str, numbers))
    return text if len(text) <= 2 * _LISTED + 2 else f"{text[:_LISTED]}..{text[-_LISTED:]}"
