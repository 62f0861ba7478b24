"""Findings on an execution: where time or memory goes, in numbers, and one change that helps."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.simulation import Finding
from partopt.schedules import SCHEDULES
from partopt.simulator.alternatives import other_schedules
from partopt.simulator.balance import imbalance
from partopt.simulator.case import NOTICED, Case, finding
from partopt.simulator.change import Change, suggest
from partopt.simulator.closed_forms import idle_share, pipeline_of
from partopt.simulator.execution import ACTION_LIMIT, Execution
from partopt.simulator.waits import allreduces, busy_ports, few_in_flight, transfers
from partopt.units import format_bytes, format_seconds

# per device of a pipeline: 1F1B then idles for at most a fifth of the time
ENOUGH_MICROBATCHES = 4
# a stage of some dozen kernels is host-bound below that: each takes 10 us or more to launch
SHORT_FORWARD_S = 2e-3
# of a device's memory: up to a tenth goes to what no plan counts,
# allocators, communicators and workspaces
FULL = 0.9


def findings(execution: Execution) -> list[Finding]:
    """All findings: faults first, then losses, then risks."""
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
        other_schedules,
        _idle_ranks,
        _launches,
    )
    found = [each for look in looks for each in look(case)]
    return sorted(found, key=lambda each: ("fault", "loss", "risk").index(each.severity))


def _memory(case: Case) -> Iterator[Finding]:
    limit = case.plan.memory_limit_bytes
    if limit is None:
        return
    peaks = case.execution.peak_memory_bytes
    rank, peak = int(peaks.argmax()), int(peaks.max())
    if peak <= FULL * limit:
        return
    over = f", and exceeds the limit by {format_bytes(peak - limit)}" if peak > limit else ""
    share = f"{peak / limit:.0%} of {format_bytes(limit)}"
    yield finding(
        "memory",
        "fault" if peak > limit else "risk",
        peak / limit,
        "of the limit",
        f"rank {rank} needs {format_bytes(peak)}, {share}{over}",
        suggest("solve", " with more `stages` or a smaller `microbatch_size`")
        if all(stage.recompute for stage in case.plan.stages)
        else suggest("solve", recompute="always"),
    )


def _unsettled(case: Case) -> Iterator[Finding]:
    steady, passed = case.execution.steady, case.execution.microbatches
    if steady is None or steady.settled:
        return
    more = min(4 * passed, ACTION_LIMIT // (2 * len(case.plan.stages)))
    yield finding(
        "unsettled",
        "risk",
        passed,
        "microbatches",
        f"{passed} microbatches do not settle into a steady state: the period is their mean pace",
        suggest("simulate", microbatches=more)
        if more > passed
        else Change("fewer stages: so many take longer to settle than partopt simulates"),
    )


def _imbalance(case: Case) -> Iterator[Finding]:
    found = imbalance(case.plan)
    if found is not None and found.ratio > 1 + NOTICED:
        yield finding("imbalance", "loss", found.ratio, "of the mean", found.text, found.change)


def _few_microbatches(case: Case) -> Iterator[Finding]:
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
    yield finding(
        "microbatches",
        "loss",
        plan.microbatches / d,
        "microbatches a device",
        f"{plan.microbatches} microbatches for {d} devices: equal stages wait for {now:.1%} of "
        f"the time, with {M} for {then:.1%}",
        suggest("simulate", f", a batch of {M * plan.microbatch_size} samples", microbatches=M),
    )


def _idle_ranks(case: Case) -> Iterator[Finding]:
    plan, idle = case.plan, len(case.plan.idle_ranks)
    if not idle:
        return
    replicates = plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].uneven
    yield finding(
        "idle-ranks",
        "loss",
        idle,
        "ranks",
        f"{idle} of {plan.topology.devices} devices have no work",
        suggest("solve", ", which replicates stages", planner="pipedream")
        if replicates
        else suggest("solve", " with more `stages`"),
    )


def _launches(case: Case) -> Iterator[Finding]:
    """Launches on the slowest stage; where another stage is short, its device waits anyway."""
    plan = case.plan
    pace = max(plan.stages, key=lambda stage: stage.compute_s / stage.replicas)
    if not 0 < pace.forward_s < SHORT_FORWARD_S:
        return
    yield finding(
        "launches",
        "risk",
        pace.forward_s,
        "s",
        f"the forward of stage {plan.stages.index(pace)}, the slowest, takes "
        f"{format_seconds(pace.forward_s)} a microbatch, less than "
        f"{format_seconds(SHORT_FORWARD_S)}: launching its kernels may take longer",
        suggest("solve", microbatch_size=2 * plan.microbatch_size),
    )
