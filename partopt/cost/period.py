"""Seconds of a partition per microbatch and per iteration, and what binds it.

Per microbatch in steady state; per iteration of a synchronous schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from partopt.cost.links import allreduce_s, exchange_s, side_s, tied_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.cost.ranges import Group
from partopt.documents.plan import Plan
from partopt.documents.stage import Load
from partopt.schedules import schedule

# C        compute seconds of a stage for one microbatch on one replica
# r        replicas of a stage
# t        C / r: seconds between microbatches that a stage completes
# M        microbatches per iteration


def cut_level(partition: Partition, c: int, of: int, problem: Problem) -> int:
    """The level K of the cut before stage c, as the stage `of` (c-1 or c) sees it.

    Contiguous: the lowest level that holds that stage and the neighbouring device. Nested: the
    level at which the two replicas of one microbatch part, the same for all.
    """
    before, after = partition.stages[c - 1].ranks, partition.stages[c].ranks
    if partition.family != CONTIGUOUS:  # 0 where a device passes to itself, at the turn of a V
        return problem.topology.common_level(before[0], after[0])
    if of == c:
        return problem.topology.common_level(before[-1], after[-1])
    return problem.topology.common_level(before[0], after[0])


def compute_s(stage: Assignment, problem: Problem) -> float:
    """C of a stage: forward and backward, plus a second forward if activations are recomputed."""
    return problem.chain.compute_s(stage.start, stage.stop, problem.recomputes(stage))


def cuts_of(partition: Partition, s: int, problem: Problem) -> list[tuple[int, float, int]]:
    """The cuts before and after stage s: number, bytes, and level as the stage sees it."""
    stage = partition.stages[s]
    cuts = [(s, stage.start)] if s > 0 else []
    cuts += [(s + 1, stage.stop)] if s + 1 < len(partition.stages) else []
    return [
        (c, float(problem.chain.a[layer]), cut_level(partition, c, s, problem)) for c, layer in cuts
    ]


def stage_loads(partition: Partition, s: int, problem: Problem) -> list[Load]:
    """The loads of stage s for each microbatch: its devices, its all-reduce, its sides of the cuts.

    The all-reduce includes the exchange of the gradients of tied parameters with other stages; both
    take place once for r microbatches, one on each replica. With serial transfers the devices also
    wait for every activation and gradient that their stage sends or receives.
    """
    ranks, topology = partition.stages[s].ranks, problem.topology
    r = len(ranks)
    cuts = cuts_of(partition, s, problem)
    busy = Load(
        "compute",
        s,
        sum(compute_s(stage, problem) / len(stage.ranks) for stage in _together(partition, s)),
    )
    if problem.serial_transfers and cuts:
        waiting = sum(exchange_s(size, ranks, k, topology) for _, size, k in cuts)
        busy = Load("compute and transfers", s, busy.seconds + waiting)
    sides = [Load("cut", c, side_s(size, ranks, k, topology)) for c, size, k in cuts]
    return [busy, Load("all-reduce", s, _gradients_s(partition, s, problem) / r), *sides]


def _together(partition: Partition, s: int) -> list[Assignment]:
    """The stages on the devices of stage s.

    Only s itself, unless the schedule gives a device several stages.
    """
    if partition.family in (CONTIGUOUS, NESTED):
        return [partition.stages[s]]
    device = partition.stages[s].ranks[0]
    return [stage for stage in partition.stages if device in stage.ranks]


def tied_groups(partition: Partition, s: int, problem: Problem) -> list[tuple[Group, int]]:
    """The tied groups that stage s shares with other stages, each with the number of its holders.

    Groups that lie entirely on the devices of stage s are left out. Holders are the stage itself
    and one stage for each layer elsewhere: the most that are possible, and known without the other
    stages.
    """
    stage, found = partition.stages[s], []
    for group in problem.chain.tied:
        if any(stage.start <= layer < stage.stop for layer in group.members):
            held = _together(partition, s)
            outside = sum(
                not any(own.start <= layer < own.stop for own in held) for layer in group.members
            )
            found += [(group, 1 + outside)] if outside else []
    return found


def tied_exchange_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds for stage s to exchange tied gradients with the other stages that hold them."""
    return sum(
        (
            tied_s(group.size, holders, problem.topology)
            for group, holders in tied_groups(partition, s, problem)
        ),
        0.0,
    )


def _gradients_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds for stage s to exchange gradients among its replicas, and tied ones with others."""
    stage = partition.stages[s]
    weights = problem.chain.parameter_bytes(stage.start, stage.stop)
    return allreduce_s(weights, stage.ranks, problem.topology) + tied_exchange_s(
        partition, s, problem
    )


def binding(partition: Partition, problem: Problem) -> Load:
    """The largest load per microbatch; ties keep the first.

    It is the period of an asynchronous schedule, and what paces a synchronous one. A synchronous
    schedule exchanges gradients once an iteration, so its all-reduces pace nothing.
    """
    loads = (
        load for s in range(len(partition.stages)) for load in stage_loads(partition, s, problem)
    )
    return max(
        (load for load in loads if problem.microbatches is None or load.what != "all-reduce"),
        key=lambda load: load.seconds,
    )


def fullest(partition: Partition, problem: Problem) -> list[Load]:
    """The largest non-zero load of each kind; ties keep the first.

    A plan carries them. A synchronous schedule exchanges gradients once an iteration, of which one
    M-th counts for each microbatch. The naive schedule keeps one thing busy at a time and has none.
    """
    found: dict[str, Load] = {}
    none_beside = schedule(problem.schedule).one_at_a_time
    for s, stage in enumerate([] if none_beside else partition.stages):
        for load in stage_loads(partition, s, problem):
            if problem.microbatches is not None and load.what == "all-reduce":
                load = Load(load.what, s, load.seconds * len(stage.ranks) / problem.microbatches)
            if load.seconds > (found[load.what].seconds if load.what in found else 0.0):
                found[load.what] = load
    return list(found.values())


def iteration_s(partition: Partition, problem: Problem) -> float:
    """Seconds for one iteration of a synchronous schedule with M microbatches.

    For the stage that makes it longest: every other stage passes one microbatch on, C each, and
    this one works through all of them; then the gradients are exchanged and the weights updated.
    Without replication that is sum of t + (M-1) max t. GPipe recomputes while it waits, so that
    passing on takes no recomputation. The naive schedule overlaps nothing but replicas: the sum of
    ceil(M / r) C. With v stages on a device the pipeline is filled in a v-th of the time; what the
    zero-bubble schedules save beyond that is left to the simulator.
    """
    passing, others, update = parts_of_iteration(partition, problem)
    return passing + others + update


def objective_s(partition: Partition, problem: Problem) -> float:
    """Seconds to minimise: the period if asynchronous, the iteration if synchronous."""
    return (
        binding(partition, problem).seconds
        if problem.microbatches is None
        else iteration_s(partition, problem)
    )


def parts_of_iteration(partition: Partition, problem: Problem) -> tuple[float, float, float]:
    """The three addends of `iteration_s`.

    One microbatch's pass, what the stage that paces takes for the other microbatches, and the
    largest update.
    """
    M = problem.microbatches
    assert M is not None
    computes = [compute_s(stage, problem) for stage in partition.stages]
    update = max(_update_s(partition, s, problem) for s in range(len(partition.stages)))
    entry = schedule(problem.schedule)
    if entry.one_at_a_time:
        turns = [-(-M // len(stage.ranks)) for stage in partition.stages]
        return (
            sum(count * seconds for count, seconds in zip(turns, computes, strict=True)),
            0.0,
            update,
        )
    passing = (
        [problem.chain.compute_s(stage.start, stage.stop) for stage in partition.stages]
        if entry.recomputes
        else computes
    )
    chunks = len(_together(partition, 0))
    return (
        sum(passing) / chunks,
        max(_all_s(partition, s, M, problem) - passed / chunks for s, passed in enumerate(passing)),
        update,
    )


def _all_s(partition: Partition, s: int, M: int, problem: Problem) -> float:
    """Seconds for stage s to work through M microbatches.

    Its fullest replica gets ceil(M / r) of them; its cuts carry all.
    """
    r = len(partition.stages[s].ranks)
    busy, _, *sides = stage_loads(partition, s, problem)
    return max([-(-M // r) * r * busy.seconds, *(M * side.seconds for side in sides)])


def _update_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds after the last backward of stage s: gradient exchange and optimizer step."""
    return _gradients_s(partition, s, problem) + optimizer_step_s(partition.stages[s], problem)


def optimizer_step_s(stage: Assignment, problem: Problem) -> float:
    """Seconds of a stage's share of the optimizer step, by parameters."""
    chain = problem.chain
    weights, total = (
        chain.parameter_bytes(stage.start, stage.stop),
        chain.parameter_bytes(0, chain.layers),
    )
    return weights / total * chain.optimizer_s if total else 0.0


def one_device_s(problem: Problem) -> float:
    """Seconds per microbatch of the whole model on one device, without recomputation.

    A synchronous schedule adds 1/M of an optimizer step.
    """
    chain = problem.chain
    update = 0.0 if problem.microbatches is None else chain.optimizer_s / problem.microbatches
    return chain.compute_s(0, chain.layers) + update


def stage_variance(plan: Plan) -> float:
    """Variance of the stages' seconds per microbatch, C / r, in s^2.

    GPipe's heuristic minimises it.
    """
    costs = [stage.compute_s / stage.replicas for stage in plan.stages]
    mean = sum(costs) / len(costs)
    return sum((cost - mean) ** 2 for cost in costs) / len(costs)


def utilisation(computes: Sequence[float], devices: int, seconds_per_microbatch: float) -> float:
    """Share of the time of `devices` devices spent computing, given C of every stage."""
    return sum(computes) / (devices * seconds_per_microbatch)
