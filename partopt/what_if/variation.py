"""A plan executed again at other times: by chance, with slow ranks, with slow messages.

By chance an action takes its time times a lognormal factor of mean 1, drawn for itself alone, so
that a microbatch may be late on one device and early on the next. Which rank's slowness costs most,
and which flow's, is found by making one after another slower. A flow is critical where the time
gets longer by that: whoever tunes collectives gains by those that are, and may leave the others
alone, or let them yield.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import allreduce_s, tied_s
from partopt.cost.memory import recomputes_apart
from partopt.cost.sharding import exchange_by, half_s
from partopt.documents.plan import Plan
from partopt.documents.simulation import RankFactor, RankSensitivity, Varied
from partopt.documents.stage import Flow
from partopt.documents.tables import Flows, FlowTime
from partopt.errors import PartoptError, invalid
from partopt.options import check_count
from partopt.schedules import order
from partopt.schedules.order import Order
from partopt.schedules.placement import placement_of
from partopt.simulator.execution import Execution
from partopt.simulator.kernel import simulate
from partopt.simulator.steady import steady_state
from partopt.simulator.work import Work, action_seconds
from partopt.units import parse_share

DRAWS = 50
SLOWER = 0.1  # by which one rank after another is made slower
FLOW_SLOWER = 0.01  # by which one flow after another is
MORE_MICROBATCHES = 512  # asynchronous: that pass beside those of the plain run
MOST_RANKS = 64  # that are made slower, one at a time
MOST_ACTIONS = 10**9  # of all draws
MOST_TRIED = 50_000_000  # actions of all executions with one rank, or one flow, slower
MOST_FACTOR = 1000.0
_CHANGED = 1e-9  # of the time: less is rounding
_WITHOUT = -1.0  # as much faster as it takes: without its bytes

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How the times of actions differ from the plan's.

    `jitter` is the standard deviation of an action's time as a share of its mean, `slow` by how
    much the actions of a rank take longer. Of `draws` number i depends on `seed` and i alone.
    """

    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    draws: int = DRAWS


def variation_of(
    jitter: str | float | None,
    slow: Mapping[int, float] | None,
    seed: int | None,
    draws: int | None,
) -> Variation | None:
    """The variation that these options give; None where there is none.

    Raises PartoptError for a value that cannot be, and for `seed` or `draws` without `jitter`.
    """
    for name, value in (("seed", seed), ("draws", draws)):
        if value is not None and jitter is None:
            raise invalid(name, value, "nothing is drawn", "add `jitter=5%`")
    if draws is not None:
        check_count("draws", draws)
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise invalid("seed", seed, "must be a whole number from 0", "for example `seed=1`")
    if jitter is None and not slow:
        return None
    for rank, factor in (slow or {}).items():
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 0 < factor <= MOST_FACTOR:
            what = f"a factor is more than 0 and at most {MOST_FACTOR:g}"
            hint = f"`slow={rank}=1.2` makes rank {rank} take 1.2 times as long"
            raise invalid("slow", f"{rank}={factor}", what, hint)
    try:
        share = parse_share(jitter) if isinstance(jitter, str) else float(jitter or 0.0)
    except PartoptError as error:
        raise error.at("`jitter`") from None
    if not 0 <= share <= 1:
        raise invalid("jitter", jitter, "must be from 0% to 100%", "for example `jitter=5%`")
    return Variation(
        jitter=share, slow=dict(slow or {}), seed=seed or 0, draws=draws or DRAWS if share else 1
    )


# --- devices that vary ----------------------------------------------------------------------------


def vary(execution: Execution, variation: Variation) -> Varied:
    """What becomes of `execution` under `variation`, and which slow rank costs most.

    Raises PartoptError for a slow rank without work, and for more draws than are simulated.
    """
    working = sorted(execution.plan.stages_by_rank())
    for rank, factor in variation.slow.items():
        if rank not in working:
            what = f"rank {rank} has no work in this plan"
            ranks = f"{len(working)} ranks with work, from {working[0]} to {working[-1]}"
            raise invalid("slow", f"{rank}={factor}", what, f"choose one of the {ranks}")
    runs = _Runs(execution, variation)
    actions = len(runs.order.kind)
    most = max(1, MOST_ACTIONS // actions)
    if variation.draws > most:
        why = f"of {actions:,} actions each: more than are simulated"
        raise invalid("draws", variation.draws, why, f"choose `draws={most}`")
    drawn = [runs.seconds(runs.factors(draw)) for draw in range(variation.draws)]
    p50, p95 = (float(np.percentile(drawn, share)) for share in (50, 95))
    plain_s = execution.time_s
    return Varied(
        jitter=variation.jitter,
        slow=[RankFactor(rank=r, factor=f) for r, f in sorted(variation.slow.items())],
        seed=variation.seed,
        draws=variation.draws,
        microbatches=runs.microbatches,
        plain_s=plain_s,
        p50_s=p50,
        p95_s=p95,
        p50_loss=p50 / plain_s - 1,
        p95_loss=p95 / plain_s - 1,
        slower=SLOWER,
        sensitivity=_sensitivities(execution, variation.slow),
    )


class _Runs:
    """The execution again and again, at other times of its actions."""

    def __init__(self, execution: Execution, variation: Variation) -> None:
        self.execution, self.variation = execution, variation
        self.order, self.microbatches = execution.order, execution.microbatches
        if execution.steady is not None and variation.jitter:
            self.microbatches += MORE_MICROBATCHES
            placement = placement_of(execution.plan, self.microbatches)
            self.order = order(execution.plan.schedule, placement)

    @cached_property
    def slow(self) -> Floats:
        """Of every action the factor of its rank, shape (actions,)."""
        return by_rank(self.order, self.variation.slow)

    def factors(self, draw: int) -> Floats:
        """What the time of every action is multiplied by in a draw, shape (actions,)."""
        sigma = math.sqrt(math.log1p(self.variation.jitter**2))
        if not sigma:
            return self.slow
        chance = np.random.default_rng([self.variation.seed, draw])
        z = chance.standard_normal(len(self.order.kind))
        return np.exp(sigma * z - sigma**2 / 2) * self.slow

    def seconds(self, scale: Floats) -> float:
        """`Execution.time_s` with these factors; at the mean pace where it does not settle."""
        work = dataclasses.replace(self.execution.work, scale=scale)
        return _execute(self.execution, self.order, work)[0]


def _execute(execution: Execution, actions: Order, work: Work) -> tuple[float, bool]:
    """`Execution.time_s` of other actions or work, and whether they settle."""
    timeline = simulate(actions, work)
    if execution.steady is None:
        return float(timeline.makespan), True
    found = steady_state(timeline, [stage.replicas for stage in execution.plan.stages])
    return found.period_s, found.settled


def by_rank(actions: Order, factors: Mapping[int, float]) -> Floats:
    """Of every action the factor of its rank, 1 where none is given, shape (actions,)."""
    scale = np.ones(len(actions.kind))
    for rank, factor in factors.items():
        scale[actions.rows[rank] : actions.rows[rank + 1]] = factor
    return scale


def _sensitivities(execution: Execution, slow: Mapping[int, float]) -> list[RankSensitivity]:
    """What the slowness of every rank costs, the most first; nothing else varies.

    Where there are many ranks, one is made slower for all that hold the same stages; where these
    are too many too, those that compute longest.
    """
    runs, stages = _Runs(execution, Variation(slow=slow)), execution.plan.stages_by_rank()
    actions, work, tried = runs.order, execution.work, sorted(stages)
    most = max(1, min(MOST_RANKS, MOST_TRIED // len(actions.kind)))
    if len(tried) > most:
        alike = {tuple(stages[rank]): rank for rank in reversed(tried)}
        compute_s = execution.shares.compute_s
        tried = sorted(alike.values(), key=lambda rank: (-compute_s[rank], rank))[:most]
    plain_s = runs.seconds(runs.slow)
    found = []
    for rank in tried:
        row = actions.of_rank(rank)
        seconds = work.seconds[actions.kind[row], actions.stage[row]] * runs.slow[row]
        # of an iteration, or asynchronous of a microbatch
        busy_s = float(seconds.sum()) / (1 if execution.steady is None else runs.microbatches)
        more_s = runs.seconds(runs.slow * by_rank(actions, {rank: 1 + SLOWER})) - plain_s
        per_second = more_s / (SLOWER * busy_s) if busy_s else 0.0
        found.append(RankSensitivity(rank=rank, loss=more_s / plain_s, per_second=per_second))
    return sorted(found, key=lambda cost: (-round(cost.loss, 9), cost.rank))


# --- what every flow costs ------------------------------------------------------------------------


def flows_of(execution: Execution) -> Flows:
    """Every flow of the plan of `execution`, in the order of its `communication`."""
    plan, steady = execution.plan, execution.steady
    actions = (1 + 2 * len(plan.communication)) * len(execution.order.kind)
    tried = actions <= MOST_TRIED and (steady is None or steady.settled)
    return Flows(
        model=plan.profile.name,
        estimated=plan.profile.estimated,
        planner=plan.planner,
        shape=plan.shape,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        cluster=plan.topology.name,
        period_s=execution.period_s,
        iteration_s=None if steady else execution.makespan_s,
        slower=FLOW_SLOWER,
        flows=[_flow_time(flow, execution, tried) for flow in plan.communication],
    )


def _flow_time(flow: Flow, execution: Execution, tried: bool) -> FlowTime:
    """What a flow takes and, if `tried`, costs.

    The costs are null where the plan does not settle with it slower, or without it.
    """
    plan, whole_s = execution.plan, execution.time_s
    seconds, stages = _flow_s(flow, plan), [plan.stages[s] for s in _stages(flow)]
    if flow.per == "microbatch":  # every replica has its part of them
        times = float(plan.microbatches or 1)
        busy_s = seconds * times / stages[0].replicas
    else:  # all do their part at the same time
        times = 1.0 if plan.microbatches else 1 / stages[0].replicas
        busy_s = seconds * times
    critical = per_second = saved = None
    if tried:
        (slower_s, settled), (without_s, also) = (
            _execute(execution, execution.order, _with_flow(flow, execution, share))
            for share in (FLOW_SLOWER, _WITHOUT)
        )
        if settled and also:
            more_s, least_s = slower_s - whole_s, _CHANGED * whole_s
            critical = more_s > least_s
            per_second = more_s / (FLOW_SLOWER * busy_s) if abs(more_s) > least_s else 0.0
            saved = max(0.0, 1 - without_s / whole_s) if flow.bytes else 0.0
    return FlowTime(
        kind=flow.kind,
        source=flow.source,
        destination=flow.destination,
        stage=flow.stage,
        parameters=flow.parameters,
        ranks=sorted({rank for stage in stages for rank in stage.ranks}),
        bytes=flow.bytes,
        per=flow.per,
        times=times,
        level=flow.level,
        takes_s=seconds,
        share=busy_s / whole_s,
        critical=critical,
        per_second=per_second,
        saved=saved,
    )


def _stages(flow: Flow) -> list[int]:
    return [s for s in (flow.source, flow.destination, flow.stage) if s is not None]


def _flow_s(flow: Flow, plan: Plan) -> float:
    """Seconds of one such flow, with nothing else on its level."""
    if flow.kind == "send":
        level = next(level for level in plan.topology.levels if level.name == flow.level)
        return flow.bytes / level.bandwidth_bytes_per_s + level.latency_s
    if flow.holders is not None:
        return tied_s(flow.bytes, flow.holders, plan.topology)
    ranks = plan.stages[_stages(flow)[0]].ranks
    if flow.kind == "allreduce":
        return allreduce_s(flow.bytes, ranks, plan.topology)
    # parameters are gathered for a microbatch before the forward and before the backward
    passes = 2 if flow.kind == "allgather" and flow.per == "microbatch" else 1
    return passes * half_s(flow.bytes / passes, ranks, plan.topology)


def _with_flow(flow: Flow, execution: Execution, share: float) -> Work:
    """The costs of `execution` with one flow slower by a `share` of what it takes.

    It has as many bytes more as take so long, so that it holds its ports longer. A negative share
    makes it faster, down to no bytes at all; what is left is latency.
    """
    work, plan, s = execution.work, execution.plan, _stages(flow)[0]
    more_s = share * _flow_s(flow, plan)

    def plus(values: Floats, place: int, more: float) -> Floats:
        changed = values.copy()
        changed[place] = max(0.0, changed[place] + more)
        return changed

    if flow.source is not None and flow.destination is not None:
        level = next(level for level in work.topology.levels if level.name == flow.level)
        way, cut = int(flow.destination < flow.source), max(flow.source, flow.destination)
        sizes = [*work.crossing]
        sizes[way] = plus(sizes[way], cut, more_s * level.bandwidth_bytes_per_s)
        return dataclasses.replace(work, cut_bytes=sizes[0], back_bytes=sizes[1])
    if flow.holders is not None:
        return dataclasses.replace(work, tied_s=plus(work.tied_s, s, more_s))
    if flow.per == "microbatch":  # parameters gathered, or gradients scattered, beside the compute
        factors = {"gather" if flow.kind == "allgather" else "scatter": 1 + share}
        exchange, apart = exchange_by(plan), recomputes_apart(plan)
        seconds = work.seconds.copy()
        seconds[:, s] = action_seconds(plan.stages[s], plan.topology, exchange, apart, **factors)
        return dataclasses.replace(work, seconds=seconds)
    slope = work.allreduces[s].slope
    size = plus(work.gradient_bytes, s, more_s / slope) if slope else work.gradient_bytes
    return dataclasses.replace(work, gradient_bytes=size)
