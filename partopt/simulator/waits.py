"""What devices wait for that the network or the warm-up could spare them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partopt.documents.simulation import Finding
from partopt.documents.stage import Stage
from partopt.documents.topology import Level
from partopt.schedules import SCHEDULES
from partopt.simulator.case import BUSY, NOTICED, Case, finding
from partopt.simulator.change import Change, name_option, suggest
from partopt.units import format_bandwidth, format_seconds


def transfers(case: Case) -> Iterator[Finding]:
    """Messages that the least idle rank waits for."""
    share = case.transfer_share
    if share <= NOTICED:
        return
    yield finding(
        "transfers",
        "loss",
        share,
        "of the time",
        f"rank {case.rank}, which waits least for others, waits for messages {share:.1%} of the "
        f"time, most of them on level {case.slowest_level.name}",
        _faster(case, case.slowest_level, share),
    )


def _faster(case: Case, level: Level, share: float) -> Change:
    """What would keep devices from waiting for messages on a level."""
    if case.plan.comm == "serial":
        return suggest("simulate", ", where the trainer sends while it computes", comm="overlap")
    for full, busy in case.overloaded:
        if full is level:
            computing_s = float(case.execution.shares.compute_s.max())
            return _widen(level, busy * case.window_s / (BUSY * computing_s))
    deeper = _deeper_schedule(case.plan.schedule)
    if deeper is not None:
        hides = ", which has more microbatches in flight and hides the latency"
        return suggest("simulate", hides, schedule=deeper)
    if case.execution.steady is not None:
        return _deepen(case)
    sent = case.execution.timeline.transfers
    if 2 * level.latency_s > float((sent.end - sent.start).max(initial=0.0)):
        latency = {level.name: format_seconds(level.latency_s * NOTICED / share)}
        return suggest("simulate", ": it is latency, not bandwidth", latency=latency)
    return _widen(level, share / NOTICED)


def _deeper_schedule(name: str) -> str | None:
    """The synchronous schedule that orders a device as `name` does, with a longer warm-up."""
    own = SCHEDULES.get(name)
    if own is None or own.asynchronous or own.kernel is None or not own.takes_warmup:
        return None
    for other in SCHEDULES.values():
        same = other.row is own.row and not other.asynchronous
        if same and other.kernel is not None and other.kernel.factor > own.kernel.factor:
            return other.name
    return None


def _widen(level: Level, factor: float) -> Change:
    """A level that is `factor` times as fast."""
    return suggest("simulate", bandwidth=_bandwidth(level, factor))


def _bandwidth(level: Level, factor: float) -> dict[str, str]:
    """The bandwidth that is `factor` times the level's, rounded up to two digits."""
    rate = level.bandwidth_bytes_per_s * factor
    digit = 10.0 ** (np.floor(np.log10(rate)) - 1)
    return {level.name: format_bandwidth(float(np.ceil(rate / digit - 1e-9) * digit))}


def _deepen(case: Case) -> Change:
    stages = case.plan.stages
    held = stages[0].in_flight
    return Change(
        f"`warmup=+1`: one microbatch more in flight on each device, {held + 1} instead of {held} "
        "on the first",
        "simulate",
        {"warmup": [stage.warmup + 1 for stage in stages]},
    )


def allreduces(case: Case) -> Iterator[Finding]:
    """All-reduces that the least idle rank waits for."""
    shares, plan = case.execution.shares, case.plan
    # idle time at the end makes it cheaper by as much
    share = float(shares.allreduce_s[case.rank] - shares.end_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    s = plan.stages_by_rank()[case.rank][0]
    stage = plan.stages[s]
    held = f"with {stage.replicas} replicas" if stage.replicas > 1 else "with tied parameters"
    yield finding(
        "all-reduce",
        "loss",
        share,
        "of the time",
        f"rank {case.rank}, of stage {s} {held}, waits for all-reduces {share:.1%} of the time",
        _exchange_less(case, stage),
    )


def _exchange_less(case: Case, stage: Stage) -> Change:
    """What would keep devices from waiting for the gradients of `stage`."""
    plan, network = case.plan, ", or a faster network: `bandwidth`"
    if plan.microbatches is not None:
        twice = ": one exchange for twice the work"
        return suggest("simulate", twice, microbatches=2 * plan.microbatches)
    if plan.allreduce == "blocking":
        older = ", where the trainer can use gradients that are a round older"
        return suggest("simulate", older, allreduce="overlap")
    if stage.tied_exchange_s > stage.allreduce_s:
        nothing = ", which leaves nothing to exchange with other stages"
        return suggest("solve", nothing + network, tied="together")
    return suggest("solve", " with fewer `replicas` of that stage" + network)


def few_in_flight(case: Case) -> Iterator[Finding]:
    """Too few microbatches in flight, where nothing else holds up the devices."""
    steady = case.execution.steady
    if steady is None or not steady.settled or case.overloaded:
        return
    share = float(case.execution.shares.idle_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    yield finding(
        "in-flight",
        "loss",
        share,
        "of the time",
        f"every device waits for others for {share:.1%} of the time or more: too few microbatches "
        "are in flight",
        _deepen(case),
    )


def busy_ports(case: Case) -> Iterator[Finding]:
    """Ports that have little time left, other than those that messages are waited for."""
    waiting = case.slowest_level if case.transfer_share > NOTICED else None
    for level, share in case.overloaded:
        if level is waiting:
            continue
        wider = name_option("bandwidth", _bandwidth(level, share / BUSY * case.stretch))
        yield finding(
            "port",
            "risk",
            share,
            "of the time",
            f"a port of level {level.name} is busy for {share:.1%} of the time with transfers and "
            "all-reduces",
            suggest("simulate", f", or {wider}", links={level.name: level.links + 1}),
        )
