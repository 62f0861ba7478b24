"""Findings on an execution: where time or memory goes, in numbers, and a change that helps.

A finding comes with changes of the cluster or of the job, as options of `simulate`. They are tried:
the plan is executed with them, its stages as they are, and what is stated is that execution's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from partopt.cost.messages import parting_levels
from partopt.documents.plan import Plan
from partopt.documents.simulation import Finding, Varied
from partopt.documents.stage import stages_text
from partopt.documents.topology import Level
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT, SCHEDULES
from partopt.schedules.one_f_one_b import downstream
from partopt.schedules.placement import STRAIGHT, pipeline_of
from partopt.simulator.execution import Execution
from partopt.simulator.prediction import MOST_ACTIONS, NOTICED, held_back
from partopt.units import format_bandwidth, format_bytes, format_seconds
from partopt.what_if.conditions import Conditions

# of the time unless said otherwise
BUSY = 0.9  # of a port: above, a late message delays those behind it
WORTH = 0.02  # of the speed: a change that brings less is not worth the trouble
FULL = 0.9  # of a device's memory: allocators and communicators, which no plan counts, take a tenth
ENOUGH_MICROBATCHES = 4  # per device of a pipeline: 1F1B then idles for at most a fifth
SHORT_FORWARD_S = 2e-3  # a stage of some dozen kernels, 10 us each to launch, is host-bound below
_COUNTS = 5e-4  # slowness of a rank that costs less is not named, and ranks within it are alike
_DEEPER = (1, 2, 3)  # times the warm-up of 1F1B

# the options of `simulate` that a change takes, and what else it takes, in words
Change = tuple[Mapping[str, Any], str]
# of one that helps: what else it takes, all options with it, and the execution under them
Success = tuple[str, dict[str, Any], Execution]


class Point(NamedTuple):
    """What a finding rests on, `value` in `unit`, and the changes that may help.

    The first that helps is advised, or of a fault, and of a point that is made `for_its_change`,
    the fastest. Without a change that helps, such a point is left out.
    """

    code: str
    severity: Literal["fault", "loss", "risk"]
    value: float
    unit: str
    text: str
    changes: Sequence[Change] = ()
    for_its_change: bool = False


@dataclass(frozen=True)
class Trials:
    """What a plan was executed under, and how to execute it under other conditions."""

    given: Conditions
    run: Callable[[Conditions], Execution]

    def successes(self, point: Point, now: Execution) -> Iterator[Success]:
        """The changes of `point` to the execution `now` that do what they are for, and fit."""
        for change, takes in point.changes if len(now.order.kind) <= MOST_ACTIONS else ():
            options = self._with(change)
            try:
                then = self.run(Conditions(**options))
            except PartoptError:  # the plan cannot run so
                continue
            if point.code == "unsettled":
                helps = then.steady is not None and then.steady.settled
            else:
                helps = point.severity == "fault" or then.period_s * (1 + WORTH) <= now.period_s
            if helps and then.fits:
                yield takes, options, then

    def _with(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """All that was given, with `change` in place of it; options by level one by one.

        A warm-up is one of a schedule, and goes with it.
        """
        options = {
            name: value for name, value in vars(self.given).items() if value not in (None, {})
        }
        if "schedule" in change:
            options.pop("warmup", None)
        for name, value in change.items():
            by_level = isinstance(value, Mapping)
            options[name] = {**options.get(name, {}), **value} if by_level else value
        return options


def findings(
    execution: Execution, trials: Trials | None = None, varied: Varied | None = None
) -> list[Finding]:
    """All findings: faults first, then losses, then risks.

    Changes are advised only with `trials`; `varied` is what becomes of the execution where devices
    vary.
    """
    looks = (_memory, _pace, _balance, _batch, _waits, _schedule, _idle_ranks, _launches)
    points = [point for look in looks for point in look(execution)]
    points += slow_rank(varied, execution.steady is None) if varied else []
    points.sort(key=lambda point: ("fault", "loss", "risk").index(point.severity))
    advised = [_advise(point, execution, trials) for point in points]
    return [finding for finding in advised if finding is not None]


def _advise(point: Point, now: Execution, trials: Trials | None) -> Finding | None:
    """The finding of a point, with the change that is advised, if one helps."""
    helping = trials.successes(point, now) if trials is not None else iter(())
    fastest = point.severity == "fault" or point.for_its_change
    found = sorted(helping, key=lambda run: run[2].period_s) if fastest else helping
    best = next(iter(found), None)
    if best is None and point.for_its_change:
        return None
    takes, options, then = best or ("", {}, None)
    speedup, peak, gains = None, None, [takes] if takes else []
    if then is not None:
        speedup = now.period_s / then.period_s
        peak, before = (int(run.peak_memory_bytes.max()) for run in (then, now))
        speed = f"{abs(speedup - 1):.1%} {'faster' if speedup > 1 else 'slower'}"
        memory = f"{peak / max(before, 1) - 1:+.1%} memory"
        gains = [text for text in (speed, memory) if text.lstrip("+-")[:4] != "0.0%"] + gains
    return Finding(
        code=point.code,
        severity=point.severity,
        value=point.value,
        unit=point.unit,
        text=point.text,
        verb="" if then is None else "simulate",
        options=options,
        change=", ".join(gains),
        speedup=speedup,
        peak_memory_bytes=peak,
    )


def _memory(run: Execution) -> Iterator[Point]:
    limit, peaks = run.plan.memory_limit_bytes, run.peak_memory_bytes
    if limit is None:
        return
    rank, peak = int(peaks.argmax()), int(peaks.max())
    needs = f"rank {rank} needs {format_bytes(peak)}"
    if peak > limit:
        text = (
            f"{needs}, {peak / limit:.0%} of {format_bytes(limit)}, and exceeds the limit by "
            f"{format_bytes(peak - limit)}"
        )
        changes = [(change, "it fits") for change in _other_schedules(run.plan)]
        yield Point("memory", "fault", peak / limit, "of the limit", text, changes)
    elif (held := held_back(run.plan)) is not None:
        text = f"{held.text}; {needs} of {format_bytes(limit)}"
        yield Point("memory", "loss", held.slower, "slower", text)
    elif peak > FULL * limit:
        text = f"{needs}, {peak / limit:.0%} of {format_bytes(limit)}"
        yield Point("memory", "risk", peak / limit, "of the limit", text)


def _other_schedules(plan: Plan) -> list[dict[str, str]]:
    """The other schedules of the plan's kind, with as many stages on a device."""
    planned = SCHEDULES.get(plan.schedule)
    return [
        {"schedule": name}
        for name, entry in SCHEDULES.items()
        if planned is not None
        and name != planned.name
        and (entry.shape, entry.asynchronous) == (planned.shape, planned.asynchronous)
    ]


def _pace(run: Execution) -> Iterator[Point]:
    passed = run.microbatches
    if run.steady is None or run.steady.settled:
        return
    more = min(4 * passed, ACTION_LIMIT // (2 * len(run.plan.stages)))
    changes = [({"microbatches": more}, "a steady state")] if more > passed else []
    text = f"{passed} microbatches do not settle into a steady state: the period is their mean pace"
    yield Point("unsettled", "risk", passed, "microbatches", text, changes)


def _balance(run: Execution) -> Iterator[Point]:
    """How far the devices that hold the slowest stages are above the mean."""
    plan, devices = run.plan, run.plan.devices_by_stages()
    seconds = {held: sum(plan.stages[s].compute_s for s in held) / n for held, n in devices.items()}
    slowest = max(seconds, key=lambda held: seconds[held])
    mean = sum(stage.compute_s for stage in plan.stages) / sum(devices.values())
    if mean and seconds[slowest] > mean * (1 + NOTICED):
        ratio, takes = seconds[slowest] / mean, "takes" if len(slowest) == 1 else "together take"
        text = (
            f"{stages_text(slowest)} {takes} {format_seconds(seconds[slowest])} a microbatch, "
            f"{ratio:.2f} times the mean of all devices, {format_seconds(mean)}"
        )
        yield Point("imbalance", "loss", ratio, "of the mean", text)


def _batch(run: Execution) -> Iterator[Point]:
    plan, planned = run.plan, SCHEDULES.get(run.plan.schedule)
    if plan.microbatches is None or planned is None or planned.one_at_a_time:
        return
    (P, v, M), devices = pipeline_of(plan, planned.shape), len(plan.stages_by_rank())
    enough = ENOUGH_MICROBATCHES * P
    if len(plan.stages) == 1 or enough <= M:
        return
    now, then = planned.idle_share(P, v, M), planned.idle_share(P, v, enough)
    more = enough * devices // P
    text = (
        f"{plan.microbatches} microbatches for {devices} devices: equal stages wait for {now:.1%} "
        f"of the time, with {more} for {then:.1%}"
    )
    changes = [({"microbatches": more}, f"a batch of {more * plan.microbatch_size} samples")]
    per_device = plan.microbatches / devices
    yield Point("microbatches", "loss", per_device, "microbatches a device", text, changes)


def _waits(run: Execution) -> Iterator[Point]:
    """What the rank waits for that waits least for others, and ports that may delay all."""
    plan, shares, window_s = run.plan, run.shares, run.end_s - run.start_s
    ranks, levels = sorted(plan.stages_by_rank()), run.work.topology.own_levels
    rank = ranks[int(np.argmin(shares.idle_s[ranks]))]
    use = [use.transfer_share + use.allreduce_share for use in run.level_use]
    busy = {level.name: share for level, share in zip(levels, use, strict=True) if share > BUSY}

    share = float(shares.transfer_s[rank]) / window_s
    if share > NOTICED:
        level = _slowest_level(run)
        text = (
            f"rank {rank}, which waits least for others, waits for messages {share:.1%} of the "
            f"time, most of them on level {level.name}"
        )
        changes = [*_hide_messages(run, level, busy.pop(level.name, 0.0) * window_s, share)]
        yield Point("transfers", "loss", share, "of the time", text, changes)
    # idle time at the end makes an all-reduce cheaper by as much
    share = float(shares.allreduce_s[rank] - shares.end_s[rank]) / window_s
    if share > NOTICED:
        s = plan.stages_by_rank()[rank][0]
        replicas = plan.stages[s].replicas
        held = f"with {replicas} replicas" if replicas > 1 else "with tied parameters"
        text = f"rank {rank}, of stage {s} {held}, waits for all-reduces {share:.1%} of the time"
        busiest = levels[int(np.argmax([use.allreduce_share for use in run.level_use]))]
        changes = [*_hide_allreduces(plan), _widen(busiest, 2.0)]
        yield Point("all-reduce", "loss", share, "of the time", text, changes)
    share = float(shares.idle_s[rank]) / window_s
    if run.steady and run.steady.settled and max(use) <= BUSY and share > NOTICED:
        text = (
            f"every device waits for others for {share:.1%} of the time or more: too few "
            "microbatches are in flight"
        )
        yield Point("in-flight", "loss", share, "of the time", text, [*_deepen_warmups(plan)])
    # by so much what waits for a port could go faster
    stretch = max(1.0, run.period_s / plan.slowest_device_s) if plan.slowest_device_s else 1.0
    for level in levels:
        if (share := busy.get(level.name, 0.0)) > BUSY:
            text = (
                f"a port of level {level.name} is busy for {share:.1%} of the time with transfers "
                "and all-reduces"
            )
            more = {"links": {level.name: level.links + 1}}
            changes = [(more, "more links"), _widen(level, share / BUSY * stretch)]
            yield Point("port", "risk", share, "of the time", text, changes)


def _slowest_level(run: Execution) -> Level:
    """The cluster's level on which messages spend most of the time."""
    sent, topology = run.timeline.transfers, run.work.topology
    crossed = parting_levels(sent.source, sent.destination, topology)
    levels = topology.own_levels
    seconds = np.bincount(crossed - 1, sent.end - sent.start, minlength=len(levels))
    return levels[int(seconds.argmax())]


def _hide_messages(run: Execution, level: Level, port_s: float, share: float) -> Iterator[Change]:
    """What might keep devices from waiting for messages on a level, first what costs least.

    They wait for `share` of the time; a port of the level that is nearly always busy is so for
    `port_s`.
    """
    plan, planned = run.plan, SCHEDULES.get(run.plan.schedule)
    if plan.waits:
        yield {"facts": {"waits": "none"}}, "where the trainer sends while it computes"
    computing_s = float(run.shares.compute_s.max())
    if port_s and computing_s > 0:
        yield _widen(level, port_s / (BUSY * computing_s))
    if planned is not None and not planned.asynchronous and planned.shape == STRAIGHT:
        # the forwards of the first of two stages before its first backward, of eight microbatches
        usual = {
            other.name: other.counts(0, [1, 1], 8).warmup
            for other in SCHEDULES.values()
            if other.row is planned.row and not other.asynchronous
        }
        deeper = [name for name, first in usual.items() if first > usual[planned.name]]
        for name in deeper[:1]:
            yield {"schedule": name}, "more microbatches in flight hide the latency"
    if run.steady is not None:
        yield from _deepen_warmups(plan)
    sent = run.timeline.transfers
    if 2 * level.latency_s > float((sent.end - sent.start).max(initial=0.0)):
        latency = {level.name: format_seconds(level.latency_s * NOTICED / share)}
        yield {"latency": latency}, "a network of less latency"
    yield _widen(level, max(2.0, share / NOTICED))


def _hide_allreduces(plan: Plan) -> Iterator[Change]:
    """What might keep devices from waiting for all-reduces, first what costs least."""
    if plan.engine.allreduce == "blocking":
        older = "where the trainer can use gradients that are a round older"
        yield {"facts": {"allreduce": "overlap"}}, older
    if plan.microbatches is not None:
        M = 2 * plan.microbatches
        batch = f"a batch of {M * plan.microbatch_size} samples: one exchange for twice the work"
        yield {"microbatches": M}, batch


def _widen(level: Level, factor: float) -> Change:
    """A level that is `factor` times as fast, rounded up to two digits."""
    rate = level.bandwidth_bytes_per_s * factor
    digit = 10.0 ** (np.floor(np.log10(rate)) - 1)
    wide = format_bandwidth(float(np.ceil(rate / digit - 1e-9) * digit))
    return {"bandwidth": {level.name: wide}}, "a faster network"


def _deepen_warmups(plan: Plan) -> Iterator[Change]:
    """Deeper warm-ups: those of 1F1B, and multiples of them."""
    now, replicas = zip(*((stage.warmup, stage.replicas) for stage in plan.stages), strict=True)
    for factor in _DEEPER:
        deeper = [downstream(factor)(s, replicas, None).warmup for s in range(len(now))]
        if any(then > before for then, before in zip(deeper, now, strict=True)):
            more = f"{deeper[0] + 1} microbatches in flight on each device of the first stage"
            yield {"warmup": deeper}, f"{more} instead of {now[0] + 1}"


def _schedule(run: Execution) -> Iterator[Point]:
    """A schedule that the stages can run on their present ranks, and that is faster."""
    planned = SCHEDULES.get(run.plan.schedule)
    if planned is None or planned.asynchronous or len(run.plan.stages) == 1:
        return
    changes = [
        (change, "")
        for change in _other_schedules(run.plan)
        if SCHEDULES[change["schedule"]].split != planned.split or planned.one_at_a_time
    ]
    text = f"under {planned.name} the devices compute nothing for {run.bubble:.1%} of the time"
    yield Point("schedule", "loss", run.bubble, "of the time", text, changes, True)


def _idle_ranks(run: Execution) -> Iterator[Point]:
    topology, idle = run.plan.topology, len(run.plan.idle_ranks)
    if idle:
        ranks = topology.group_ranks
        text = f"{idle * ranks} of {topology.devices * ranks} devices have no work"
        yield Point("idle-ranks", "loss", idle, "ranks", text)


def _launches(run: Execution) -> Iterator[Point]:
    """Launches on the slowest stage; where another stage is short, its device waits anyway."""
    stages = run.plan.stages
    pace = max(stages, key=lambda stage: stage.compute_s / stage.replicas)
    if 0 < pace.forward_s < SHORT_FORWARD_S:
        text = (
            f"the forward of stage {stages.index(pace)}, the slowest, takes "
            f"{format_seconds(pace.forward_s)} a microbatch, less than "
            f"{format_seconds(SHORT_FORWARD_S)}: launching its kernels may take longer"
        )
        yield Point("launches", "risk", pace.forward_s, "s", text)


def slow_rank(varied: Varied, synchronous: bool) -> Iterator[Point]:
    """The rank whose slowness costs most; none where it costs nothing."""
    worst, *others = varied.sensitivity
    if worst.loss < _COUNTS:
        return
    what = "an iteration" if synchronous else "a microbatch"
    less = [other for other in others if worst.loss - other.loss > _COUNTS]
    alike = len(others) - len(less)
    as_others = f", as of {alike} other{'s' if alike > 1 else ''}," if alike else ""
    second = less[0] if less and less[0].loss >= _COUNTS else None
    beside = f"; where rank {second.rank} is, {second.loss:.1%}" if second else ""
    text = (
        f"slowness of rank {worst.rank}{as_others} costs most: where it is {varied.slower:.0%} "
        f"slower, {what} takes {worst.loss:.1%} longer{beside}"
    )
    yield Point("slow-rank", "risk", worst.loss, "of the time", text)
