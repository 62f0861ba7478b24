"""What the flows of a plan cost: each is made slower, one at a time, and the plan executed again.

A flow is critical where the time gets longer by that. Whoever tunes collectives gains by those that
are, and may leave the others alone, or let them yield.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from partopt.cost.collectives import allreduce_s, tied_s
from partopt.cost.memory import recomputes_apart
from partopt.cost.sharding import exchange_by, half_s
from partopt.documents.plan import Plan
from partopt.documents.stage import Flow
from partopt.documents.tables import Flows, FlowTime
from partopt.simulator.engine import simulate
from partopt.simulator.execution import Execution
from partopt.simulator.steady import steady_state
from partopt.simulator.work import Work, action_seconds

SLOWER = 0.01  # by which a flow is made slower
MOST_TRIED = 50_000_000  # actions of all executions
_CHANGED = 1e-9  # of the time: less is rounding
_WITHOUT = -1.0  # as much faster as it takes: without its bytes


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
        slower=SLOWER,
        flows=[_flow_time(flow, execution, tried) for flow in plan.communication],
    )


def _flow_time(flow: Flow, execution: Execution, tried: bool) -> FlowTime:
    """What a flow takes and, if `tried`, costs.

    The costs are null where the plan does not settle with it slower, or without it.
    """
    plan, whole_s = execution.plan, _time_s(execution)
    seconds, own = seconds_of(flow, plan), [plan.stages[s] for s in _stages(flow)]
    if flow.per == "microbatch":  # each replica has its part of them
        times = float(plan.microbatches or 1)
        busy_s = seconds * times / own[0].replicas
    else:  # all do their part at the same time
        times = 1.0 if plan.microbatches else 1 / own[0].replicas
        busy_s = seconds * times
    slower_s = _executed_s(execution, changed(flow, execution, SLOWER)) if tried else None
    without_s = _executed_s(execution, changed(flow, execution, _WITHOUT)) if tried else None
    critical = per_second = saved = None
    if slower_s is not None and without_s is not None:
        more_s, least_s = slower_s - whole_s, _CHANGED * whole_s
        critical = more_s > least_s
        per_second = more_s / (SLOWER * busy_s) if abs(more_s) > least_s else 0.0
        saved = max(0.0, 1 - without_s / whole_s) if flow.bytes else 0.0
    return FlowTime(
        kind=flow.kind,
        source=flow.source,
        destination=flow.destination,
        stage=flow.stage,
        parameters=flow.parameters,
        ranks=sorted({rank for stage in own for rank in stage.ranks}),
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


def _time_s(execution: Execution) -> float:
    """Seconds of an iteration or, asynchronous, of a microbatch."""
    return execution.makespan_s if execution.steady is None else execution.period_s


def _stages(flow: Flow) -> list[int]:
    return [s for s in (flow.source, flow.destination, flow.stage) if s is not None]


def seconds_of(flow: Flow, plan: Plan) -> float:
    """Seconds of one such flow, with nothing else on its level."""
    if flow.kind == "send":
        level = next(each for each in plan.topology.levels if each.name == flow.level)
        return flow.bytes / level.bandwidth_bytes_per_s + level.latency_s
    if flow.holders is not None:
        return tied_s(flow.bytes, flow.holders, plan.topology)
    ranks = plan.stages[_stages(flow)[0]].ranks
    if flow.kind == "allreduce":
        return allreduce_s(flow.bytes, ranks, plan.topology)
    # parameters are gathered for a microbatch before the forward and before the backward
    passes = 2 if flow.kind == "allgather" and flow.per == "microbatch" else 1
    return passes * half_s(flow.bytes / passes, ranks, plan.topology)


def _executed_s(execution: Execution, work: Work) -> float | None:
    """`_time_s` at the costs of `work`; None where it does not settle."""
    timeline = simulate(execution.order, work)
    if execution.steady is None:
        return float(timeline.makespan)
    found = steady_state(timeline, [stage.replicas for stage in execution.plan.stages])
    return found.period_s if found.settled else None


def changed(flow: Flow, execution: Execution, share: float) -> Work:
    """The costs of `execution` with one flow slower by a `share` of what it takes.

    It has as many bytes more as take so long, so that it holds its ports longer. A negative share
    makes it faster, down to no bytes at all; what is left is latency.
    """
    work, plan = execution.work, execution.plan
    more_s = share * seconds_of(flow, plan)
    if flow.kind == "send":
        return _with_message(flow, work, more_s)
    s = _stages(flow)[0]
    if flow.holders is not None:
        return dataclasses.replace(work, tied_s=_plus(work.tied_s, s, more_s))
    if flow.per == "microbatch":
        return _with_gathers(flow, execution, share)
    slope = work.allreduces[s].slope
    size = _plus(work.gradient_bytes, s, more_s / slope) if slope else work.gradient_bytes
    return dataclasses.replace(work, gradient_bytes=size)


def _with_message(flow: Flow, work: Work, more_s: float) -> Work:
    """The costs with a message between stages of other bytes."""
    assert flow.source is not None
    assert flow.destination is not None
    level = next(each for each in work.topology.levels if each.name == flow.level)
    way, cut = int(flow.destination < flow.source), max(flow.source, flow.destination)
    crossing = work.crossing.copy()
    crossing[way] = _plus(crossing[way], cut, more_s * level.bandwidth_bytes_per_s)
    return dataclasses.replace(work, cut_bytes=crossing[0], back_bytes=crossing[1])


def _with_gathers(flow: Flow, execution: Execution, share: float) -> Work:
    """The costs with parameters gathered, or gradients scattered, faster or slower."""
    plan, s = execution.plan, _stages(flow)[0]
    factors = {"gather" if flow.kind == "allgather" else "scatter": 1 + share}
    apart = recomputes_apart(plan)
    seconds = execution.work.seconds.copy()
    seconds[:, s] = action_seconds(
        plan.stages[s], plan.topology, exchange_by(plan), apart, **factors
    )
    return dataclasses.replace(execution.work, seconds=seconds)


def _plus(values: np.ndarray, place: int, more: float) -> np.ndarray:
    """The values with `more` at one place, not below 0."""
    changed = values.copy()
    changed[place] = max(0.0, changed[place] + more)
    return changed
