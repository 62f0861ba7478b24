"""Seconds that no iteration of a synchronous schedule goes below; and what planners minimise."""

from __future__ import annotations

import math

from partopt.cost.passes import (
    message_s,
    passes_of,
    passing_prefix,
    work_of,
)
from partopt.cost.period import binding, compute_s, stage_loads, stages_together, update_s
from partopt.cost.problem import Partition, Problem
from partopt.documents.stage import Load
from partopt.schedules import schedule
from partopt.schedules.layout import STRAIGHT, own_microbatches

# M        microbatches per iteration
# n        those of a stage's first replica


def iteration_s(partition: Partition, problem: Problem) -> float:
    """Seconds that no iteration of a synchronous schedule goes below, with M microbatches.

    It is that of the stage or the port that takes longest. Where devices hold several stages, a
    device begins when its first microbatch has come, works through all of its stages, and makes its
    smallest update.
    """
    stages = range(len(partition.stages))
    if schedule(problem.schedule).shape == STRAIGHT:
        return max(stage_iteration_s(partition, s, problem) for s in stages)
    heads = [problem.chain.forward_s(0, stage.start) for stage in partition.stages]
    M = problem.microbatches
    assert M is not None
    most = 0.0
    for s in stages:
        held = stages_together(partition, s)
        numbers = [t for t in stages if partition.stages[t] in held]
        work = sum(M // len(own.ranks) * compute_s(own, problem) for own in held)
        update = min(update_s(partition, t, problem) for t in numbers)
        most = max(most, min(heads[t] for t in numbers) + work + update)
    return most


def stage_iteration_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds of an iteration, at the least, for stage s, its ports, and those around it.

    Its first replica begins when the first microbatch has come, and works through its own
    (`partopt.cost.passes.work_s`); then it updates, while its last gradient passes on. All messages
    over a cut come between the layers before it.
    """
    stage, M, entry = partition.stages[s], problem.microbatches, schedule(problem.schedule)
    assert M is not None
    n, own = own_microbatches(M, len(stage.ranks), 0), passes_of(stage, problem)
    update, work = update_s(partition, s, problem), work_of(stage, problem, own.round_s)
    if entry.split:
        ends = [work + update, n * (own.forward_s + own.passing_s) + own.tail_s]
    else:
        ends = [work + max(update, own.tail_s)]
    busy, _, *sides = stage_loads(partition, s, problem)
    if problem.messages_hold:
        held = n * len(stage.ranks) * busy.seconds - 2 * message_s(problem, stage.start)
        # an exchange that has begun early does not wait for the stage's last message
        waiting = (len(stage.ranks) * busy.seconds - compute_s(stage, problem)) / 2
        late = max(0.0, waiting - message_s(problem, stage.start))
        ends.append(held + update - (late if problem.early_bytes < math.inf else 0.0))
        ends.append(held + (0.0 if entry.split else own.tail_s))
    ports = [_port_iteration_s(partition, load, problem) for load in sides]
    return float(max([own.head_s + max(ends), *ports]))


def _port_iteration_s(partition: Partition, load: Load, problem: Problem) -> float:
    """Seconds of an iteration, at the least, in which a port carries `load` for each microbatch.

    It carries nothing before the first microbatch has come to it, and after its last message there
    are the layers that the gradient passes through yet. A port that is no bus sends a cut's
    activations alone: behind the last of them follow all the layers after the cut, too.
    """
    M, chain = problem.microbatches, problem.chain
    assert M is not None
    back = passing_prefix(problem, problem.all_recompute)
    before = partition.stages[load.place].start
    bus = problem.network.bus.any()
    if load.what == "cut" and not bus:
        return float(chain.forward_prefix[-1] + back[-1]) + M * load.seconds
    after = before if bus or load.what == "cut" else partition.stages[load.place].stop
    around = chain.forward_prefix[after] + back[before]
    if chain.lopsided:  # the port in may be the one that carries as much
        around = min(around, chain.forward_prefix[before] + back[after])
    return float(around) + M * load.seconds


def objective_s(partition: Partition, problem: Problem) -> float:
    """Seconds to minimise: the period if asynchronous, the iteration if synchronous."""
    return (
        binding(partition, problem).seconds
        if problem.microbatches is None
        else iteration_s(partition, problem)
    )


def cannot_beat(partition: Partition, seconds: float, problem: Problem) -> bool:
    """Whether by the formulas a microbatch takes `seconds` or more.

    A stage that computes for as long is enough to know it.
    """
    if any(compute_s(stage, problem) / len(stage.ranks) >= seconds for stage in partition.stages):
        return True
    return objective_s(partition, problem) / (problem.microbatches or 1) >= seconds
