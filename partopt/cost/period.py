"""Seconds of a partition per microbatch and per iteration, and what binds it.

Per microbatch in steady state; per iteration of a synchronous schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.cost.collectives import exposed
from partopt.cost.links import hold_s, paired_sides_s, run_sides_s
from partopt.cost.memory import shares
from partopt.cost.passes import (
    most_in_flight,
    passes_of,
)
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.cost.ranges import Group
from partopt.documents.plan import Plan
from partopt.documents.stage import Load
from partopt.schedules import schedule

# C        compute seconds of a stage for one microbatch on one replica
# r        replicas of a stage
# t        C / r: seconds between microbatches that a stage completes
# M        microbatches per iteration


def cut_level(partition: Partition, c: int, problem: Problem) -> int:
    """The level at which stages c-1 and c part.

    Contiguous: that of the nearest two ranks of both; others may part further out. Nested: the
    level at which the two replicas of one microbatch part, the same for all; of other families the
    lowest of all pairs, 0 where a device passes to itself, at the turn of a V.
    """
    before, after, topology = (
        partition.stages[c - 1].ranks,
        partition.stages[c].ranks,
        problem.topology,
    )
    if partition.family == CONTIGUOUS:
        return topology.common_level(before[-1], after[0])
    if partition.family == NESTED:
        return topology.common_level(before[0], after[0])
    return min(topology.common_level(one, other) for one, other in zip(before, after, strict=False))


def compute_s(stage: Assignment, problem: Problem) -> float:
    """C of a stage: forward and backward, plus a second forward if activations are recomputed."""
    return problem.chain.compute_s(stage.start, stage.stop, problem.recomputes(stage))


def stage_loads(partition: Partition, s: int, problem: Problem) -> list[Load]:
    """The loads of stage s for each microbatch, none of which the simulator can go below.

    They are those of its devices, its all-reduce, the ports of its two sides, of both together and
    of all of these, and what it holds. The all-reduce includes the exchange of the gradients of
    tied parameters with other stages; both take place once for r microbatches, one on each replica.
    With serial transfers the devices also wait for every activation and gradient, with blocking
    all-reduces for these.
    """
    r = len(partition.stages[s].ranks)
    busy = Load(
        "compute",
        s,
        sum(
            compute_s(stage, problem) / len(stage.ranks) for stage in stages_together(partition, s)
        ),
    )
    computed = busy.seconds
    cuts = [c for c in (s, s + 1) if 0 < c < len(partition.stages)]
    if problem.messages_hold and cuts:
        waiting = sum(
            hold_s(
                problem.network,
                _cut_bytes(partition, c, problem),
                float(problem.messages[partition.stages[c].start]),
                cut_level(partition, c, problem),
            )
            for c in cuts
        )
        busy = Load("compute and transfers", s, busy.seconds + 2 * waiting / r)
    exchange = gradients_s(partition, s, problem)
    loads = [busy, Load("all-reduce", s, exchange / r)]
    if problem.microbatches is None and problem.blocking_allreduce:
        loads.append(Load("compute and all-reduce", s, computed + exchange / r))
    loads += [Load("cut", c, _sides_s(partition, s, [c], problem)) for c in cuts]
    if len(cuts) > 1:
        loads.append(Load("both cuts", s, _sides_s(partition, s, cuts, problem)))
    if problem.microbatches is None and cuts and r > 1 and _trained_bytes(partition, s, problem):
        shared = _sides_s(partition, s, cuts, problem, ring=True)
        loads.append(Load("cuts and all-reduce", s, shared))
    return loads + list(_held(partition, s, problem))


def _cut_bytes(partition: Partition, c: int, problem: Problem) -> float:
    """Bytes that cross the cut before stage c one way, the mean of both ways."""
    return float(problem.chain.traffic[partition.stages[c].start])


def _trained_bytes(partition: Partition, s: int, problem: Problem) -> float:
    """Bytes of parameters of stage s that have a gradient."""
    stage = partition.stages[s]
    return float(problem.chain.trained_bytes(stage.start, stage.stop))


def _sides_s(
    partition: Partition, s: int, cuts: Sequence[int], problem: Problem, ring: bool = False
) -> float:
    """Seconds per microbatch for which some `cuts` of stage s keep the busiest of its ports busy.

    With its all-reduce, if `ring`. Of M microbatches some replicas get one less than others.
    """
    stages, ranks, topology = partition.stages, partition.stages[s].ranks, problem.topology
    M, r = problem.microbatches, len(ranks)
    even = 1.0 if M is None else M // r * r / M
    gradients, pause_s = 0.0, 0.0
    reduced = problem.allreduce_over(ranks if ring else ranks[:1])
    if ring:
        gradients = _trained_bytes(partition, s, problem)
        pause_s = reduced.latency_s + tied_exchange_s(partition, s, problem)
    if partition.family == CONTIGUOUS:
        size = [_cut_bytes(partition, c, problem) if c in cuts else 0.0 for c in (s, s + 1)]
        gaps = [
            cut_level(partition, c, problem) if c in cuts else len(topology.levels) + 1
            for c in (s, s + 1)
        ]
        run = *size, ranks[0], ranks[-1], *gaps
        held = gradients, pause_s, reduced.algorithm
        return float(even * run_sides_s(problem.network, *run, *held))
    around = [
        (_cut_bytes(partition, c, problem), stages[c - 1 if c == s else c].ranks) for c in cuts
    ]
    rings = {k: (gradients * slope + pause_s) / r for k, slope in reduced.slopes.items()}
    return even * paired_sides_s(ranks, around, topology, rings)


def _held(partition: Partition, s: int, problem: Problem) -> Iterator[Load]:
    """The load of the microbatches that stage s holds, of an asynchronous schedule.

    By Little's law a replica that holds F of them, for as long as they take from their forward on
    s to their backward, takes in no more than F in that time; memory limits F.
    """
    if problem.microbatches is not None or problem.memory_bytes is None:
        return
    stage = partition.stages[s]
    F = most_in_flight(stage, problem)
    if F > 0:
        held_s = passes_of(stage, problem).held_s
        yield Load("microbatches in flight", s, held_s / (F * len(stage.ranks)))


def stages_together(partition: Partition, s: int) -> list[Assignment]:
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
            held = stages_together(partition, s)
            outside = sum(
                not any(own.start <= layer < own.stop for own in held) for layer in group.members
            )
            found += [(group, 1 + outside)] if outside else []
    return found


def tied_exchange_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds for stage s to exchange tied gradients with the other stages that hold them."""
    return sum(
        (
            problem.tied_s(group.size, holders)
            for group, holders in tied_groups(partition, s, problem)
        ),
        0.0,
    )


def gradients_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds for stage s to exchange gradients among its replicas, and tied ones with others."""
    trained, ranks = _trained_bytes(partition, s, problem), partition.stages[s].ranks
    return problem.allreduce_over(ranks).seconds(trained) + tied_exchange_s(partition, s, problem)


def all_loads(partition: Partition, problem: Problem) -> list[list[Load]]:
    """`stage_loads` of every stage."""
    return [stage_loads(partition, s, problem) for s in range(len(partition.stages))]


def binding(
    partition: Partition, problem: Problem, loads: Sequence[Sequence[Load]] | None = None
) -> Load:
    """The largest load per microbatch, of `all_loads` where these are known; ties keep the first.

    It is the period of an asynchronous schedule, and what paces a synchronous one. A synchronous
    schedule exchanges gradients once an iteration, so its all-reduces pace nothing.
    """
    return max(
        (
            load
            for own in (all_loads(partition, problem) if loads is None else loads)
            for load in own
            if problem.microbatches is None or load.what != "all-reduce"
        ),
        key=lambda load: load.seconds,
    )


def fullest(
    partition: Partition, problem: Problem, loads: Sequence[Sequence[Load]] | None = None
) -> list[Load]:
    """The largest non-zero load of each kind, of `all_loads`; ties keep the first.

    A plan carries them. A synchronous schedule exchanges gradients once an iteration, of which one
    M-th counts for each microbatch, of what is left when the last backward has ended. The naive
    schedule keeps one thing busy at a time and has none.
    """
    found: dict[str, Load] = {}
    if schedule(problem.schedule).one_at_a_time:
        return []
    for s, own in enumerate(all_loads(partition, problem) if loads is None else loads):
        for load in own:
            if problem.microbatches is not None and load.what == "all-reduce":
                left = allreduce_left_s(partition.stages[s], problem)
                left += tied_exchange_s(partition, s, problem)
                load = Load(load.what, s, left / problem.microbatches)
            if load.seconds > (found[load.what].seconds if load.what in found else 0.0):
                found[load.what] = load
    return list(found.values())


def allreduce_left_s(stage: Assignment, problem: Problem) -> float:
    """Seconds of a stage's all-reduce that are left when its last backward has ended."""
    trained = float(problem.chain.trained_bytes(stage.start, stage.stop))
    seconds = problem.allreduce_over(stage.ranks).seconds(trained)
    split = schedule(problem.schedule).split
    last = problem.chain.gradients_s(stage.start, stage.stop, split)
    return float(exposed(seconds, trained, last, problem.early_bytes))


def update_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds after the last backward of stage s: gradient exchange and optimizer step."""
    stage = partition.stages[s]
    exchange = allreduce_left_s(stage, problem) + tied_exchange_s(partition, s, problem)
    return exchange + optimizer_step_s(stage, problem)


def optimizer_step_s(stage: Assignment, problem: Problem) -> float:
    """Seconds of a stage's share of the optimizer step, by parameters with a gradient.

    Replicas that hold a share of its state each update a share of its parameters.
    """
    chain = problem.chain
    if chain.stepping is not None:
        return chain.steps_s(stage.start, stage.stop)
    own, total = (
        chain.trained_bytes(stage.start, stage.stop),
        chain.trained_bytes(0, chain.layers),
    )
    sharers = shares(problem.kept, len(stage.ranks))[-1]
    return own / total * chain.optimizer_s / sharers if total else 0.0


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
