"""What was changed of a plan before it was simulated, and what became of its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partopt import documents
from partopt.documents.plan import Plan
from partopt.report.table import labelled, shorten, table
from partopt.schedules import SCHEDULES
from partopt.simulator.execution import Execution
from partopt.units import format_bandwidth, format_bytes, format_rate, format_seconds

_LIST_WIDTH = 24  # of a list of numbers


class Planned(documents.Part, frozen=True, kw_only=True):
    """What the plan predicted for itself, as it was."""

    period_s: float
    iteration_s: float | None
    samples_per_s: float
    bubble: float
    peak_memory_bytes: int


def planned_of(plan: Plan) -> Planned:
    """The plan's own prediction."""
    return Planned(
        period_s=plan.predicted.period_s,
        iteration_s=plan.predicted.iteration_s,
        samples_per_s=plan.predicted.samples_per_s,
        bubble=plan.predicted.bubble,
        peak_memory_bytes=plan.peak_memory_bytes,
    )


def changes(before: Plan, after: Plan) -> list[str]:
    """What differs in the circumstances of two plans of the same stages: `bandwidth of cluster 1.25
    GB/s -> 3.13 GB/s`.
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
            yield "warm-up", _listed(old), _listed(new)
    for old_level, new_level in zip(before.topology.levels, after.topology.levels, strict=True):
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
    yield "memory of a device", _limit(before), _limit(after)
    yield "transfers", before.comm, after.comm
    if after.schedule in SCHEDULES and SCHEDULES[after.schedule].asynchronous:
        yield "all-reduces", before.allreduce, after.allreduce


def _limit(plan: Plan) -> str:
    limit = plan.topology.device.memory_bytes
    return "unknown" if limit is None else format_bytes(limit)


def _listed(numbers: list[int]) -> str:
    return shorten(",".join(map(str, numbers)), _LIST_WIDTH)


def compared(before: Plan, simulation: Execution) -> list[str]:
    """What was changed, and a table of the prediction before and after; nothing where nothing
    was.
    """
    changed = changes(before, simulation.plan)
    if not changed:
        return []
    said, peak = planned_of(before), int(simulation.peak_memory_bytes.max())
    rate = simulation.plan.microbatch_size / simulation.period_s
    rows = [
        _row("period", format_seconds, said.period_s, simulation.period_s),
        _row("speed", lambda each: format_rate(each, "samples"), said.samples_per_s, rate),
        [
            "idle",
            f"{said.bubble:.1%}",
            f"{simulation.bubble:.1%}",
            f"{100 * (simulation.bubble - said.bubble):+.1f} points",
        ],
        _row("memory", format_bytes, said.peak_memory_bytes, peak),
    ]
    if said.iteration_s is not None and simulation.steady is None:
        rows.insert(1, _row("iteration", format_seconds, said.iteration_s, simulation.makespan_s))
    lines = [("changed" if place == 0 else "", change) for place, change in enumerate(changed)]
    return [labelled(lines), table(["", "PLANNED", "CHANGED", "BY"], rows)]


def _row(what: str, written: Callable[[float], str], old: float, new: float) -> list[str]:
    return [what, written(old), written(new), _by(old, new)]


def _by(old: float, new: float) -> str:
    """`+5.2%`, `x 12.3`, or `-` where both are alike."""
    by = f"{new / old - 1:+.1%}" if 0 < new < 10 * old else f"x {new / old:.3g}" if old else "-"
    return "-" if by in ("+0.0%", "-0.0%") else by
