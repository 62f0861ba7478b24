"""What an execution points at: where its time or memory goes, in numbers, and one change that would
help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partopt.documents.topology import Level
from partopt.schedules import SCHEDULES
from partopt.simulator.alternatives import alternatives
from partopt.simulator.balance import imbalance
from partopt.simulator.closed_forms import idle_share, pipeline_of
from partopt.simulator.execution import ACTION_LIMIT, Execution
from partopt.simulator.finding import Finding
from partopt.simulator.ports import ports_of
from partopt.units import format_bandwidth, format_bytes, format_seconds

NOTICED = 0.05  # of the time: less than that is within what measured times are off
# for each device of a pipeline: 1F1B then idles for at most a fifth of the time
ENOUGH_MICROBATCHES = 4
# a stage of some dozen kernels, each of which takes 10 us and more to launch, is then bound by the
# host
SHORT_FORWARD_S = 2e-3
# of a device's memory: allocators, communicators and workspaces, which no plan counts, take up to a
# tenth
FULL = 0.9
BUSY = 0.9  # of the time of a port: above, whatever comes late makes what is behind it late too


@dataclass(frozen=True, eq=False)
class _Case:
    execution: Execution
    memory_bytes: int | None

    @property
    def asynchronous(self) -> bool:
        return self.execution.steady is not None

    @property
    def window_s(self) -> float:
        return self.execution.end_s - self.execution.start_s

    @cached_property
    def stretch(self) -> float:
        """Seconds per microbatch over those that the slowest device computes: as much faster
        everything goes that waits for a port.
        """
        return max(1.0, self.execution.period_s / self.execution.plan.slowest_device_s)

    @cached_property
    def rank(self) -> int:
        """The working rank that waits least for others to compute: what holds it up holds up
        all.
        """
        ranks = sorted(self.execution.plan.stages_by_rank())
        return ranks[int(np.argmin(self.execution.shares.idle_s[ranks]))]

    @property
    def transfer_share(self) -> float:
        """Of the time of that rank, what it waits for messages."""
        return float(self.execution.shares.transfer_s[self.rank]) / self.window_s

    @cached_property
    def overloaded(self) -> list[tuple[Level, float]]:
        """The levels with a port that is busy nearly all of the time, and the share."""
        levels = self.execution.work.topology.levels
        shares = [use.transfer_share + use.allreduce_share for use in self.execution.level_use]
        return [(level, share) for level, share in zip(levels, shares, strict=True) if share > BUSY]

    @cached_property
    def slowest_level(self) -> int:
        """The level on which messages spend most of the time."""
        sent, topology = self.execution.timeline.transfers, self.execution.work.topology
        crossed = ports_of(topology).levels_between(sent.source, sent.destination)
        return int(
            np.bincount(crossed - 1, sent.end - sent.start, minlength=len(topology.levels)).argmax()
        )


def findings(execution: Execution, memory_bytes: int | None) -> list[Finding]:
    """All that there is to point at, faults first, then losses, then risks; `memory_bytes` is the
    limit of a device.
    """
    case = _Case(execution, memory_bytes)
    looks = (
        _memory,
        _unsettled,
        _imbalance,
        _few_microbatches,
        _transfers,
        _allreduce,
        _in_flight,
        _ports,
        _schedule,
        _idle,
        _launches,
    )
    found = [finding for look in looks for finding in look(case)]
    return sorted(found, key=lambda finding: ("fault", "loss", "risk").index(finding.severity))


def _memory(case: _Case) -> Iterator[Finding]:
    if case.memory_bytes is None:
        return
    peaks = case.execution.peak_memory_bytes
    rank, peak, limit = int(peaks.argmax()), int(peaks.max()), case.memory_bytes
    if peak <= FULL * limit:
        return
    recomputed = all(stage.recompute for stage in case.execution.plan.stages)
    fewer = "partopt plan with more --stages or a smaller --microbatch-size"
    over = f", {format_bytes(peak - limit)} more than there is" if peak > limit else ""
    yield Finding(
        kind="memory",
        severity="fault" if peak > limit else "risk",
        value=peak / limit,
        unit="of the limit",
        text=(
            f"rank {rank} needs {format_bytes(peak)}, {peak / limit:.0%} of "
            f"{format_bytes(limit)}{over}"
        ),
        change=fewer if recomputed else "partopt plan --recompute always",
    )


def _unsettled(case: _Case) -> Iterator[Finding]:
    steady, passed = case.execution.steady, case.execution.microbatches
    more = min(4 * passed, ACTION_LIMIT // (2 * len(case.execution.plan.stages)))
    if steady is not None and not steady.settled:
        yield Finding(
            kind="unsettled",
            severity="risk",
            value=passed,
            unit="microbatches",
            text=(
                f"{passed} microbatches do not settle into a steady state: the period is "
                "their mean pace"
            ),
            change=f"--microbatches {more}"
            if more > passed
            else "fewer stages: so many take longer to settle than partopt simulates",
        )


def _imbalance(case: _Case) -> Iterator[Finding]:
    ratio, text, change = imbalance(case.execution.plan)
    if ratio > 1 + NOTICED:
        yield Finding(
            kind="imbalance",
            severity="loss",
            value=ratio,
            unit="of the mean",
            text=text,
            change=change,
        )


def _few_microbatches(case: _Case) -> Iterator[Finding]:
    plan = case.execution.plan
    if plan.microbatches is None or plan.schedule == "naive":
        return
    of, d = pipeline_of(plan), len(plan.stages_by_rank())
    enough = ENOUGH_MICROBATCHES * of.P
    if len(plan.stages) == 1 or enough <= of.M:
        return
    now, then = idle_share(plan.schedule, of), idle_share(plan.schedule, of._replace(M=enough))
    M = enough * d // of.P
    yield Finding(
        kind="microbatches",
        severity="loss",
        value=plan.microbatches / d,
        unit="microbatches a device",
        text=(
            f"{plan.microbatches} microbatches for {d} devices: equal stages wait for "
            f"{now:.1%} of the time, with {M} for {then:.1%}"
        ),
        change=f"--microbatches {M}, a batch of {M * plan.microbatch_size} samples",
    )


def _transfers(case: _Case) -> Iterator[Finding]:
    share = case.transfer_share
    if share <= NOTICED:
        return
    level = case.execution.work.topology.levels[case.slowest_level]
    text = (
        f"rank {case.rank}, which waits least for others, waits for messages {share:.1%} of "
        f"the time, most of them on level {level.name}"
    )
    yield Finding(
        kind="transfers",
        severity="loss",
        value=share,
        unit="of the time",
        text=text,
        change=_faster(case, level, share),
    )


def _faster(case: _Case, level: Level, share: float) -> str:
    """What would keep devices from waiting for messages on a level."""
    plan = case.execution.plan
    if plan.comm == "serial":
        return "--comm overlap, where the trainer sends while it computes"
    for full, busy in case.overloaded:
        if full is level:
            return _bandwidth(
                level, busy * case.window_s / (BUSY * float(case.execution.shares.compute_s.max()))
            )
    sent = case.execution.timeline.transfers
    if plan.schedule == "1f1b":
        return "--schedule 1f1b-eager, which has more microbatches in flight and hides the latency"
    if case.asynchronous:
        return _deeper(case)
    if 2 * level.latency_s > float((sent.end - sent.start).max(initial=0.0)):
        return (
            f'--latency {level.name}="{format_seconds(level.latency_s * NOTICED / share)}": '
            "it is latency, not bandwidth"
        )
    return _bandwidth(level, share / NOTICED)


def _bandwidth(level: Level, factor: float) -> str:
    """The flag that makes a level `factor` times as fast, rounded up to two digits."""
    rate = level.bandwidth_bytes_per_s * factor
    digit = 10.0 ** (np.floor(np.log10(rate)) - 1)
    return (
        "--bandwidth "
        f'{level.name}="{format_bandwidth(float(np.ceil(rate / digit - 1e-9) * digit))}"'
    )


def _deeper(case: _Case) -> str:
    held = case.execution.plan.stages[0].in_flight
    return (
        f"--warmup +1: one microbatch more in flight on each device, {held + 1} instead of "
        f"{held} on the first"
    )


def _allreduce(case: _Case) -> Iterator[Finding]:
    shares, plan = case.execution.shares, case.execution.plan
    # what comes after it with nothing left to do makes it cheaper by as much
    share = float(shares.allreduce_s[case.rank] - shares.end_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    s = plan.stages_by_rank()[case.rank][0]
    stage = plan.stages[s]
    if plan.microbatches is not None:
        change = f"--microbatches {2 * plan.microbatches}: one exchange for twice the work"
    elif plan.allreduce == "blocking":
        change = "--allreduce overlap, where the trainer can use gradients that are a round older"
    elif stage.tied_exchange_s > stage.allreduce_s:
        change = (
            "partopt plan --tied together, which leaves nothing to exchange with other "
            "stages, or a faster network: --bandwidth"
        )
    else:
        change = (
            "partopt plan with fewer --replicas of that stage, or a faster network: --bandwidth"
        )
    held = f"with {stage.replicas} replicas" if stage.replicas > 1 else "with tied parameters"
    text = f"rank {case.rank}, of stage {s} {held}, waits for all-reduces {share:.1%} of the time"
    yield Finding(
        kind="all-reduce",
        severity="loss",
        value=share,
        unit="of the time",
        text=text,
        change=change,
    )


def _in_flight(case: _Case) -> Iterator[Finding]:
    steady = case.execution.steady
    if steady is None or not steady.settled or case.overloaded:
        return
    share = float(case.execution.shares.idle_s[case.rank]) / case.window_s
    if share > NOTICED:
        text = (
            f"every device waits for others for {share:.1%} of the time or more: too few "
            "microbatches are in flight"
        )
        yield Finding(
            kind="in-flight",
            severity="loss",
            value=share,
            unit="of the time",
            text=text,
            change=_deeper(case),
        )


def _ports(case: _Case) -> Iterator[Finding]:
    waiting = (
        case.execution.work.topology.levels[case.slowest_level]
        if case.transfer_share > NOTICED
        else None
    )
    for level, share in case.overloaded:
        if level is not waiting:
            text = (
                f"a port of level {level.name} is busy for {share:.1%} of the time with "
                "transfers and all-reduces"
            )
            change = (
                f"--links {level.name}={level.links + 1}, or "
                f"{_bandwidth(level, share / BUSY * case.stretch)}"
            )
            yield Finding(
                kind="port",
                severity="risk",
                value=share,
                unit="of the time",
                text=text,
                change=change,
            )


def _schedule(case: _Case) -> Iterator[Finding]:
    return alternatives(case.execution)


def _idle(case: _Case) -> Iterator[Finding]:
    plan = case.execution.plan
    idle, devices = plan.idle_ranks, plan.topology.devices
    if idle:
        replicates = plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].uneven
        yield Finding(
            kind="idle-ranks",
            severity="loss",
            value=len(idle),
            unit="ranks",
            text=f"{len(idle)} of {devices} devices have no work",
            change="partopt plan --planner pipedream, which replicates stages"
            if replicates
            else "partopt plan with more --stages",
        )


def _launches(case: _Case) -> Iterator[Finding]:
    """Of the stage that paces the others: where another is short, its device waits anyway."""
    plan = case.execution.plan
    pace = max(plan.stages, key=lambda stage: stage.compute_s / stage.replicas)
    if 0 < pace.forward_s < SHORT_FORWARD_S:
        forward = (
            f"the forward of stage {plan.stages.index(pace)}, the slowest, takes "
            f"{format_seconds(pace.forward_s)} a microbatch"
        )
        yield Finding(
            kind="launches",
            severity="risk",
            value=pace.forward_s,
            unit="s",
            text=(
                f"{forward}, less than {format_seconds(SHORT_FORWARD_S)}: launching its "
                "kernels may take longer"
            ),
            change=f"partopt plan --microbatch-size {2 * plan.microbatch_size}",
        )
