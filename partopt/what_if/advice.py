"""Findings on an execution: where time or memory goes, in numbers, and a change that helps.

Nothing is advised that was not executed: a change has options of `simulate`, and the gain and the
price that are stated are those of the plan executed with them. The stages stay as they are, so that
no change speaks against what a planner has proved of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from partopt.cost.messages import parting_levels
from partopt.documents.plan import Plan
from partopt.documents.simulation import Finding, Varied
from partopt.documents.stage import stages_text
from partopt.documents.topology import Level
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT, SCHEDULES, schedule
from partopt.schedules.entry import SLOTS
from partopt.schedules.one_f_one_b import downstream
from partopt.schedules.placement import MIRRORED, STRAIGHT
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

Goal = Literal["faster", "fits", "settles"]


class Change(NamedTuple):
    """Options to change, what else they take, in words, and what the change is for."""

    options: Mapping[str, Any]
    more: str = ""
    goal: Goal = "faster"


class Point(NamedTuple):
    """What a finding rests on, and the changes that may help, in the order of preference.

    `value` is in `unit`. One that is made `for_its_change` is nothing to point at without.
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

    def successes(
        self, now: Execution, changes: Sequence[Change]
    ) -> Iterator[tuple[Change, dict[str, Any], Execution]]:
        """Those of `changes` to the execution `now` that do what they are for.

        Each has all the options that `simulate` is called with, and the execution under them.
        """
        for change in changes if len(now.order.kind) <= MOST_ACTIONS else ():
            options = self._with(change.options)
            with suppress(PartoptError):  # the plan cannot run that way
                then = self.run(Conditions(**options))
                limit = then.plan.memory_limit_bytes
                if limit is not None and int(then.peak_memory_bytes.max()) > limit:
                    continue
                if change.goal == "settles":
                    achieved = then.steady is not None and then.steady.settled
                else:
                    achieved = change.goal == "fits" or then.period_s * (1 + WORTH) <= now.period_s
                if achieved:
                    yield change, options, then

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All that was given, with `options` in place of it; those by level one by one.

        A warm-up is one of a schedule, and goes with it.
        """
        given = {name: value for name, value in vars(self.given).items() if value not in (None, {})}
        if "schedule" in options:
            given.pop("warmup", None)
        by_level = {
            name: {**given[name], **value}
            for name, value in options.items()
            if isinstance(value, Mapping) and name in given
        }
        return {**given, **options, **by_level}


@dataclass(frozen=True, eq=False)
class Case:
    """An execution, and the rank, the levels and the shares of time that findings are about."""

    execution: Execution

    @property
    def plan(self) -> Plan:
        """The plan that was executed."""
        return self.execution.plan

    @property
    def window_s(self) -> float:
        """Seconds of the iteration or, asynchronous, of one cycle of the steady state."""
        return self.execution.end_s - self.execution.start_s

    @cached_property
    def rank(self) -> int:
        """The working rank that waits least for others to compute: its delays delay all ranks."""
        ranks = sorted(self.plan.stages_by_rank())
        return ranks[int(np.argmin(self.execution.shares.idle_s[ranks]))]

    @cached_property
    def transfer_share(self) -> float:
        """Share of the time for which that rank waits for messages."""
        return float(self.execution.shares.transfer_s[self.rank]) / self.window_s

    @cached_property
    def overloaded(self) -> list[tuple[Level, float]]:
        """The cluster's levels with a port that is busy nearly all of the time, and the share."""
        levels = self.execution.work.topology.own_levels
        shares = [use.transfer_share + use.allreduce_share for use in self.execution.level_use]
        return [(level, share) for level, share in zip(levels, shares, strict=True) if share > BUSY]

    @cached_property
    def slowest_level(self) -> Level:
        """The cluster's level on which messages spend most of the time."""
        sent, work = self.execution.timeline.transfers, self.execution.work
        crossed = parting_levels(sent.source, sent.destination, work.topology)
        levels = work.topology.own_levels
        seconds = np.bincount(crossed - 1, sent.end - sent.start, minlength=len(levels))
        return levels[int(seconds.argmax())]


def findings(
    execution: Execution, trials: Trials | None = None, varied: Varied | None = None
) -> list[Finding]:
    """All findings: faults first, then losses, then risks.

    Changes are advised only with `trials`, and only once; `varied` is what becomes of the
    execution where devices vary.
    """
    case = Case(execution)
    looks = (
        _memory,
        _unsettled,
        _imbalance,
        _few_microbatches,
        _transfers,
        _allreduces,
        _few_in_flight,
        _busy_ports,
        _other_schedules,
        _idle_ranks,
        _launches,
    )
    points = [point for look in looks for point in look(case)]
    points += slow_rank(varied, execution.steady is None) if varied else []
    advised = (_advise(point, execution, trials) for point in points)
    found = [finding for finding in advised if finding is not None]
    return sorted(found, key=lambda finding: ("fault", "loss", "risk").index(finding.severity))


def _advise(point: Point, now: Execution, trials: Trials | None) -> Finding | None:
    """The finding of a point, with the first change that helps, or the fastest of alike ones.

    None of a point that is made for its change alone, where that does not help.
    """
    tried = trials.successes(now, point.changes) if trials is not None else iter(())
    alike = point.severity == "fault" or point.for_its_change
    best = min(tried, key=lambda run: run[2].period_s, default=None) if alike else next(tried, None)
    if best is None and point.for_its_change:
        return None
    options, texts, speedup, peak = dict[str, Any](), list[str](), None, None
    if best is not None:
        change, options, then = best
        speedup = now.period_s / then.period_s
        peak, before = (int(run.peak_memory_bytes.max()) for run in (then, now))
        gains = (
            f"{abs(speedup - 1):.1%} {'faster' if speedup > 1 else 'slower'}",
            f"{peak / max(before, 1) - 1:+.1%} memory",
        )
        texts = [text for text in gains if not text.lstrip("+-").startswith("0.0%")]
        texts += [change.more] if change.more else []
    return Finding(
        code=point.code,
        severity=point.severity,
        value=point.value,
        unit=point.unit,
        text=point.text,
        verb="" if best is None else "simulate",
        options=options,
        change=", ".join(texts),
        speedup=speedup,
        peak_memory_bytes=peak,
    )


def _memory(case: Case) -> Iterator[Point]:
    limit = case.plan.memory_limit_bytes
    if limit is None:
        return
    peaks = case.execution.peak_memory_bytes
    rank, peak = int(peaks.argmax()), int(peaks.max())
    needs = f"rank {rank} needs {format_bytes(peak)}"
    held = held_back(case.plan) if peak <= limit else None
    if held is not None:
        text = f"{held.text}; {needs} of {format_bytes(limit)}"
        yield Point("memory", "loss", held.slower, "slower", text)
    elif peak > FULL * limit:
        text = f"{needs}, {peak / limit:.0%} of {format_bytes(limit)}"
        if peak > limit:
            text += f", and exceeds the limit by {format_bytes(peak - limit)}"
        changes = _schedules(case, "fits") if peak > limit else []
        severity: Literal["fault", "risk"] = "fault" if peak > limit else "risk"
        yield Point("memory", severity, peak / limit, "of the limit", text, changes)


def _schedules(case: Case, goal: Goal) -> list[Change]:
    """The other schedules of the plan's kind, with as many stages on a device, to be tried."""
    planned = SCHEDULES.get(case.plan.schedule)
    return [
        Change({"schedule": name}, "it fits" if goal == "fits" else "", goal)
        for name, entry in SCHEDULES.items()
        if planned is not None
        and name != planned.name
        and (entry.shape, entry.asynchronous) == (planned.shape, planned.asynchronous)
    ]


def _unsettled(case: Case) -> Iterator[Point]:
    steady, passed = case.execution.steady, case.execution.microbatches
    if steady is None or steady.settled:
        return
    more = min(4 * passed, ACTION_LIMIT // (2 * len(case.plan.stages)))
    text = f"{passed} microbatches do not settle into a steady state: the period is their mean pace"
    settling = [Change({"microbatches": more}, "a steady state", "settles")]
    changes = settling if more > passed else []
    yield Point("unsettled", "risk", passed, "microbatches", text, changes)


def _imbalance(case: Case) -> Iterator[Point]:
    """How far the devices that hold the slowest stages are above the mean."""
    plan = case.plan
    devices = Counter(tuple(held) for held in plan.stages_by_rank().values())
    seconds = {held: sum(plan.stages[s].compute_s for s in held) / n for held, n in devices.items()}
    slowest = max(seconds, key=lambda held: seconds[held])
    mean = sum(seconds[held] * n for held, n in devices.items()) / devices.total()
    if mean and seconds[slowest] > mean * (1 + NOTICED):
        ratio, takes = seconds[slowest] / mean, "takes" if len(slowest) == 1 else "together take"
        text = (
            f"{stages_text(slowest)} {takes} {format_seconds(seconds[slowest])} a microbatch, "
            f"{ratio:.2f} times the mean of all devices, {format_seconds(mean)}"
        )
        yield Point("imbalance", "loss", ratio, "of the mean", text)


def _few_microbatches(case: Case) -> Iterator[Point]:
    plan, planned = case.plan, SCHEDULES.get(case.plan.schedule)
    if plan.microbatches is None or planned is None or planned.one_at_a_time:
        return
    of, d = pipeline_of(plan), len(plan.stages_by_rank())
    enough = ENOUGH_MICROBATCHES * of.P
    if len(plan.stages) == 1 or enough <= of.M:
        return
    now, then = idle_share(plan.schedule, of), idle_share(plan.schedule, of._replace(M=enough))
    M, per_device = enough * d // of.P, plan.microbatches / d
    text = (
        f"{plan.microbatches} microbatches for {d} devices: equal stages wait for {now:.1%} of the "
        f"time, with {M} for {then:.1%}"
    )
    changes = [Change({"microbatches": M}, f"a batch of {M * plan.microbatch_size} samples")]
    yield Point("microbatches", "loss", per_device, "microbatches a device", text, changes)


class Pipeline(NamedTuple):
    """One of the equal pipelines of a plan."""

    P: int  # devices
    v: int  # stages that a device holds
    M: int  # microbatches that pass through in an iteration


def pipeline_of(plan: Plan) -> Pipeline:
    """The pipeline of a synchronous plan.

    Balanced stages with unequal replicas fill as one pipeline of all devices does, one behind the
    other: 15-1 passes its first 15 microbatches on at once, and the last stage works through them
    alone.
    """
    assert plan.microbatches is not None
    held = plan.stages_by_rank()
    devices, v = len(held), len(next(iter(held.values())))
    if len({stage.replicas for stage in plan.stages}) > 1:
        return Pipeline(devices, v, plan.microbatches)
    mirrored = schedule(plan.schedule).shape == MIRRORED
    P = len(plan.stages) if mirrored else len(plan.stages) // v
    return Pipeline(P, v, max(1, plan.microbatches * P // devices))


def idle_share(name: str, of: Pipeline) -> float:
    """Share of an iteration for which devices wait under the schedule `name`, in closed form.

    Stages are equal with F = I = W, messages take no time, and the optimizer's step is left out.
    """
    entry = schedule(name)
    return entry.bubble.of(*of, SLOTS) / entry.makespan(*of)


def _transfers(case: Case) -> Iterator[Point]:
    """Messages that the least idle rank waits for."""
    share = case.transfer_share
    if share > NOTICED:
        text = (
            f"rank {case.rank}, which waits least for others, waits for messages {share:.1%} of "
            f"the time, most of them on level {case.slowest_level.name}"
        )
        changes = list(_faster(case, case.slowest_level, share))
        yield Point("transfers", "loss", share, "of the time", text, changes)


def _faster(case: Case, level: Level, share: float) -> Iterator[Change]:
    """What might keep devices from waiting for messages on a level, first what costs least."""
    plan, planned = case.plan, SCHEDULES.get(case.plan.schedule)
    if plan.waits:
        yield Change({"facts": {"waits": "none"}}, "where the trainer sends while it computes")
    computing_s = float(case.execution.shares.compute_s.max())
    for full, busy in case.overloaded:
        if full is level and computing_s > 0:
            yield _widen(level, busy * case.window_s / (BUSY * computing_s))
    if planned is not None and not planned.asynchronous and planned.shape == STRAIGHT:
        # the forwards of the first of two stages before its first backward, of eight microbatches
        usual = {
            other.name: other.counts(0, [1, 1], 8).warmup
            for other in SCHEDULES.values()
            if other.row is planned.row and not other.asynchronous
        }
        deeper = [name for name, first in usual.items() if first > usual[planned.name]]
        for name in deeper[:1]:
            yield Change({"schedule": name}, "more microbatches in flight hide the latency")
    if case.execution.steady is not None:
        yield from _deepen(case)
    sent = case.execution.timeline.transfers
    if 2 * level.latency_s > float((sent.end - sent.start).max(initial=0.0)):
        latency = {level.name: format_seconds(level.latency_s * NOTICED / share)}
        yield Change({"latency": latency}, "a network of less latency")
    yield _widen(level, max(2.0, share / NOTICED))


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


def _allreduces(case: Case) -> Iterator[Point]:
    """All-reduces that the least idle rank waits for."""
    shares, plan = case.execution.shares, case.plan
    # idle time at the end makes it cheaper by as much
    share = float(shares.allreduce_s[case.rank] - shares.end_s[case.rank]) / case.window_s
    if share <= NOTICED:
        return
    s = plan.stages_by_rank()[case.rank][0]
    replicas = plan.stages[s].replicas
    held = f"with {replicas} replicas" if replicas > 1 else "with tied parameters"
    changes = []  # first what costs least
    if plan.engine.allreduce == "blocking":
        older = "where the trainer can use gradients that are a round older"
        changes.append(Change({"facts": {"allreduce": "overlap"}}, older))
    if plan.microbatches is not None:
        M = 2 * plan.microbatches
        batch = f"a batch of {M * plan.microbatch_size} samples: one exchange for twice the work"
        changes.append(Change({"microbatches": M}, batch))
    busiest = int(np.argmax([use.allreduce_share for use in case.execution.level_use]))
    changes.append(_widen(plan.topology.own_levels[busiest], 2.0))
    text = f"rank {case.rank}, of stage {s} {held}, waits for all-reduces {share:.1%} of the time"
    yield Point("all-reduce", "loss", share, "of the time", text, changes)


def _few_in_flight(case: Case) -> Iterator[Point]:
    """Too few microbatches in flight, where nothing else holds up the devices."""
    steady = case.execution.steady
    if steady is None or not steady.settled or case.overloaded:
        return
    share = float(case.execution.shares.idle_s[case.rank]) / case.window_s
    if share > NOTICED:
        text = (
            f"every device waits for others for {share:.1%} of the time or more: too few "
            "microbatches are in flight"
        )
        yield Point("in-flight", "loss", share, "of the time", text, list(_deepen(case)))


def _busy_ports(case: Case) -> Iterator[Point]:
    """Ports that have little time left, other than those that messages are waited for."""
    waiting = case.slowest_level if case.transfer_share > NOTICED else None
    for level, share in case.overloaded:
        if level is waiting:
            continue
        # by so much what waits for the port could go faster
        slowest_s = case.plan.slowest_device_s
        stretch = max(1.0, case.execution.period_s / slowest_s) if slowest_s else 1.0
        text = (
            f"a port of level {level.name} is busy for {share:.1%} of the time with transfers and "
            "all-reduces"
        )
        more = Change({"links": {level.name: level.links + 1}}, "more links")
        changes = [more, _widen(level, share / BUSY * stretch)]
        yield Point("port", "risk", share, "of the time", text, changes)


def _other_schedules(case: Case) -> Iterator[Point]:
    """A schedule that the stages can run on their present ranks, and that is faster."""
    plan = case.plan
    planned = SCHEDULES.get(plan.schedule)
    if planned is None or planned.asynchronous or len(plan.stages) == 1:
        return
    faster = [
        change
        for change in _schedules(case, "faster")
        if SCHEDULES[change.options["schedule"]].split != planned.split or planned.one_at_a_time
    ]
    bubble = case.execution.bubble
    text = f"under {plan.schedule} the devices compute nothing for {bubble:.1%} of the time"
    yield Point("schedule", "loss", bubble, "of the time", text, faster, for_its_change=True)


def _idle_ranks(case: Case) -> Iterator[Point]:
    plan, idle = case.plan, len(case.plan.idle_ranks)
    if idle:
        group_ranks = plan.topology.group_ranks
        text = f"{idle * group_ranks} of {plan.topology.devices * group_ranks} devices have no work"
        yield Point("idle-ranks", "loss", idle, "ranks", text)


def _launches(case: Case) -> Iterator[Point]:
    """Launches on the slowest stage; where another stage is short, its device waits anyway."""
    plan = case.plan
    pace = max(plan.stages, key=lambda stage: stage.compute_s / stage.replicas)
    if 0 < pace.forward_s < SHORT_FORWARD_S:
        text = (
            f"the forward of stage {plan.stages.index(pace)}, the slowest, takes "
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
