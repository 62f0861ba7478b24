"""What devices wait for that the network or the warm-up could spare them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partopt.documents.topology import Level
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.one_f_one_b import downstream
from partopt.simulator.case import BUSY, NOTICED, Case, Point
from partopt.simulator.change import Change
from partopt.units import format_bandwidth, format_seconds

_DEEPER = (1, 2, 3)  # times the warm-up of 1F1B


def transfers(case: Case) -> Iterator[Point]:
    """Messages that the least idle rank waits for."""
    share = case.transfer_share
    if share <= NOTICED:
        return
    yield Point(
        "transfers",
        "loss",
        share,
        "of the time",
        f"rank {case.rank}, which waits least for others, waits for messages {share:.1%} of the "
        f"time, most of them on level {case.slowest_level.name}",
        list(_faster(case, case.slowest_level, share)),
    )


def _faster(case: Case, level: Level, share: float) -> Iterator[Change]:
    """What might keep devices from waiting for messages on a level, first what costs least."""
    if case.plan.comm == "serial":
        yield Change({"comm": "overlap"}, "where the trainer sends while it computes")
    for full, busy in case.overloaded:
        if full is level:
            computing_s = float(case.execution.shares.compute_s.max())
            yield _widen(level, busy * case.window_s / (BUSY * computing_s))
    deeper = _deeper_schedule(case.plan.schedule)
    if deeper is not None:
        yield Change({"schedule": deeper}, "more microbatches in flight hide the latency")
    if case.execution.steady is not None:
        yield from _deepen(case)
    sent = case.execution.timeline.transfers
    if 2 * level.latency_s > float((sent.end - sent.start).max(initial=0.0)):
        latency = {level.name: format_seconds(level.latency_s * NOTICED / share)}
        yield Change({"latency": latency}, "a network of less latency")
    yield _widen(level, max(2.0, share / NOTICED))


def _deeper_schedule(name: str) -> str | None:
    """The synchronous schedule that orders a device as `name` does, with a longer warm-up."""
    own = SCHEDULES.get(name)
    if own is None or own.asynchronous or own.shape != STRAIGHT:
        return None
    alike = [other for other in SCHEDULES.values() if other.row is own.row]
    deeper = (
        other.name
        for other in alike
        if not other.asynchronous and _usual_warmup(other.name) > _usual_warmup(name)
    )
    return next(deeper, None)


def _usual_warmup(name: str) -> int:
    """The forwards of the first of two stages before its first backward, of eight microbatches."""
    return schedule(name).counts(0, [1, 1], 8).warmup


def _widen(level: Level, factor: float) -> Change:
    """A level that is `factor` times as fast, rounded up to two digits."""
    rate = level.bandwidth_bytes_per_s * factor
    digit = 10.0 ** (np.floor(np.log10(rate)) - 1)
    wide = format_bandwidth(float(np.ceil(rate / digit - 1e-9) * digit))
    return Change({"bandwidth": {level.name: wide}}, "a faster network")


def _deepen(case: Case) -> Iterator[Change]:
    """Deeper warm-ups: those of 1F1B, and multiples of them."""
    stages = case.plan.stages
    now, replicas = [stage.warmup for stage in stages], [stage.replicas for stage in stages]
    for factor in _DEEPER:
        deeper = [downstream(factor)(s, replicas, None).warmup for s in range(len(stages))]
        if any(then > before for then, before in zip(deeper, now, strict=True)):
            more = f"{deeper[0] + 1} microbatches in flight on each device of the first stage"
            yield Change({"warmup": deeper}, f"{more} instead of {now[0] + 1}")


def allreduces(case: Case) -> Iterator[Point]:
    """All-reduces that the least idle rank waits for."""
    shares, plan = case.execution.shares, case.plan
    # idle time at the end makes it cheaper by as much
    share = float(shares.allreduce_s[case.rank] - shares.end_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    s = plan.stages_by_rank()[case.rank][0]
    stage = plan.stages[s]
    held = f"with {stage.replicas} replicas" if stage.replicas > 1 else "with tied parameters"
    yield Point(
        "all-reduce",
        "loss",
        share,
        "of the time",
        f"rank {case.rank}, of stage {s} {held}, waits for all-reduces {share:.1%} of the time",
        list(_exchange_less(case)),
    )


def _exchange_less(case: Case) -> Iterator[Change]:
    """What might keep devices from waiting for gradients, first what costs least."""
    plan = case.plan
    if plan.allreduce == "blocking":
        older = "where the trainer can use gradients that are a round older"
        yield Change({"allreduce": "overlap"}, older)
    if plan.microbatches is not None:
        M = 2 * plan.microbatches
        batch = f"a batch of {M * plan.microbatch_size} samples: one exchange for twice the work"
        yield Change({"microbatches": M}, batch)
    uses = case.execution.level_use
    busiest = max(range(len(uses)), key=lambda k: uses[k].allreduce_share)
    yield _widen(plan.topology.own_levels[busiest], 2.0)


def few_in_flight(case: Case) -> Iterator[Point]:
    """Too few microbatches in flight, where nothing else holds up the devices."""
    steady = case.execution.steady
    if steady is None or not steady.settled or case.overloaded:
        return
    share = float(case.execution.shares.idle_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    yield Point(
        "in-flight",
        "loss",
        share,
        "of the time",
        f"every device waits for others for {share:.1%} of the time or more: too few microbatches "
        "are in flight",
        list(_deepen(case)),
    )


def busy_ports(case: Case) -> Iterator[Point]:
    """Ports that have little time left, other than those that messages are waited for."""
    waiting = case.slowest_level if case.transfer_share > NOTICED else None
    for level, share in case.overloaded:
        if level is waiting:
            continue
        links = {level.name: level.links + 1}
        yield Point(
            "port",
            "risk",
            share,
            "of the time",
            f"a port of level {level.name} is busy for {share:.1%} of the time with transfers and "
            "all-reduces",
            [Change({"links": links}, "more links"), _widen(level, share / BUSY * case.stretch)],
        )
