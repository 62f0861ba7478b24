"""Findings on an execution: where time or memory goes, in numbers, and a change that helps.

A change is tried before it is advised (`partopt.simulator.change`). The stages stay as they are, so
that none speaks against what a planner has proved of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.simulation import Finding, Varied
from partopt.schedules import ACTION_LIMIT, SCHEDULES
from partopt.simulator.balance import imbalance
from partopt.simulator.case import NOTICED, Case, Point
from partopt.simulator.change import Change, Goal, Trials
from partopt.simulator.closed_forms import idle_share, pipeline_of
from partopt.simulator.execution import Execution
from partopt.simulator.held_back import held_back
from partopt.simulator.slow_rank import slow_rank
from partopt.simulator.waits import allreduces, busy_ports, few_in_flight, transfers
from partopt.units import format_bytes, format_seconds

# per device of a pipeline: 1F1B then idles for at most a fifth of the time
ENOUGH_MICROBATCHES = 4
# a stage of some dozen kernels is host-bound below that: each takes 10 us or more to launch
SHORT_FORWARD_S = 2e-3
# of a device's memory: up to a tenth goes to what no plan counts,
# allocators, communicators and workspaces
FULL = 0.9


def findings(
    execution: Execution, trials: Trials | None = None, varied: Varied | None = None
) -> list[Finding]:
    """All findings: faults first, then losses, then risks.

    Changes are advised only with `trials`, and each once; `varied` is what becomes of the execution
    where devices vary.
    """
    case = Case(execution)
    looks = (
        _memory,
        _unsettled,
        _imbalance,
        _few_microbatches,
        transfers,
        allreduces,
        few_in_flight,
        busy_ports,
        _other_schedules,
        _idle_ranks,
        _launches,
    )
    points = [point for look in looks for point in look(case)]
    points += slow_rank(varied, execution.steady is None) if varied else []
    found = [finding for point in points for finding in _advise(point, execution, trials)]
    return sorted(found, key=lambda each: ("fault", "loss", "risk").index(each.severity))


def _advise(point: Point, execution: Execution, trials: Trials | None) -> Iterator[Finding]:
    """The finding of a point, with the change that helps if one does.

    None of a point that is made for its change alone, where that does not help.
    """
    tried = None
    if trials is not None:
        alike = point.severity == "fault" or point.for_its_change
        tried = (trials.fastest if alike else trials.first)(execution, point.changes)
    if tried is None and point.for_its_change:
        return
    yield Finding(
        code=point.code,
        severity=point.severity,
        value=point.value,
        unit=point.unit,
        text=point.text,
        verb="simulate" if tried else "",
        options=tried.options if tried else {},
        change=tried.text if tried else "",
        speedup=tried.speedup if tried else None,
        peak_memory_bytes=tried.peak_memory_bytes if tried else None,
    )


def _memory(case: Case) -> Iterator[Point]:
    limit = case.plan.memory_limit_bytes
    if limit is None:
        return
    peaks = case.execution.peak_memory_bytes
    rank, peak = int(peaks.argmax()), int(peaks.max())
    held = held_back(case.plan) if peak <= limit else None
    if held is not None:
        needs = f"rank {rank} needs {format_bytes(peak)} of {format_bytes(limit)}"
        yield Point("memory", "loss", held.slower, "slower", f"{held.text}; {needs}")
    if peak <= FULL * limit or held is not None:
        return
    over = f", and exceeds the limit by {format_bytes(peak - limit)}" if peak > limit else ""
    share = f"{peak / limit:.0%} of {format_bytes(limit)}"
    yield Point(
        "memory",
        "fault" if peak > limit else "risk",
        peak / limit,
        "of the limit",
        f"rank {rank} needs {format_bytes(peak)}, {share}{over}",
        _schedules(case, "fits") if peak > limit else [],
    )


def _schedules(case: Case, goal: Goal) -> list[Change]:
    """The other schedules of the plan's kind, with as many stages on a device, to be tried."""
    own = SCHEDULES.get(case.plan.schedule)
    return [
        Change({"schedule": name}, "it fits" if goal == "fits" else "", goal)
        for name, entry in SCHEDULES.items()
        if own is not None
        and name != own.name
        and (entry.shape, entry.asynchronous) == (own.shape, own.asynchronous)
    ]


def _unsettled(case: Case) -> Iterator[Point]:
    steady, passed = case.execution.steady, case.execution.microbatches
    if steady is None or steady.settled:
        return
    more = min(4 * passed, ACTION_LIMIT // (2 * len(case.plan.stages)))
    yield Point(
        "unsettled",
        "risk",
        passed,
        "microbatches",
        f"{passed} microbatches do not settle into a steady state: the period is their mean pace",
        [Change({"microbatches": more}, "a steady state", "settles")] if more > passed else [],
    )


def _imbalance(case: Case) -> Iterator[Point]:
    found = imbalance(case.plan)
    if found is not None and found.ratio > 1 + NOTICED:
        yield Point("imbalance", "loss", found.ratio, "of the mean", found.text)


def _few_microbatches(case: Case) -> Iterator[Point]:
    plan = case.plan
    if plan.microbatches is None or plan.schedule not in SCHEDULES:
        return
    if SCHEDULES[plan.schedule].one_at_a_time:
        return
    of, d = pipeline_of(plan), len(plan.stages_by_rank())
    enough = ENOUGH_MICROBATCHES * of.P
    if len(plan.stages) == 1 or enough <= of.M:
        return
    now, then = idle_share(plan.schedule, of), idle_share(plan.schedule, of._replace(M=enough))
    M = enough * d // of.P
    yield Point(
        "microbatches",
        "loss",
        plan.microbatches / d,
        "microbatches a device",
        f"{plan.microbatches} microbatches for {d} devices: equal stages wait for {now:.1%} of "
        f"the time, with {M} for {then:.1%}",
        [Change({"microbatches": M}, f"a batch of {M * plan.microbatch_size} samples")],
    )


def _other_schedules(case: Case) -> Iterator[Point]:
    """A schedule that the stages can run on their present ranks, and that is faster."""
    plan = case.plan
    own = SCHEDULES.get(plan.schedule)
    if own is None or own.asynchronous or len(plan.stages) == 1:
        return
    faster = [
        change
        for change in _schedules(case, "faster")
        if SCHEDULES[change.options["schedule"]].split != own.split or own.one_at_a_time
    ]
    bubble = case.execution.bubble
    yield Point(
        "schedule",
        "loss",
        bubble,
        "of the time",
        f"under {plan.schedule} the devices compute nothing for {bubble:.1%} of the time",
        faster,
        for_its_change=True,
    )


def _idle_ranks(case: Case) -> Iterator[Point]:
    plan, idle = case.plan, len(case.plan.idle_ranks)
    if idle:
        each = plan.topology.group_ranks
        text = f"{idle * each} of {plan.topology.devices * each} devices have no work"
        yield Point("idle-ranks", "loss", idle, "ranks", text)


def _launches(case: Case) -> Iterator[Point]:
    """Launches on the slowest stage; where another stage is short, its device waits anyway."""
    plan = case.plan
    pace = max(plan.stages, key=lambda stage: stage.compute_s / stage.replicas)
    if not 0 < pace.forward_s < SHORT_FORWARD_S:
        return
    yield Point(
        "launches",
        "risk",
        pace.forward_s,
        "s",
        f"the forward of stage {plan.stages.index(pace)}, the slowest, takes "
        f"{format_seconds(pace.forward_s)} a microbatch, less than "
        f"{format_seconds(SHORT_FORWARD_S)}: launching its kernels may take longer",
    )
