"""From a partition to a plan: every number in a plan is computed here, for every planner alike."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from partopt.cost.collectives import members_crossed
from partopt.cost.flight import Counts, chunks_in_flight, counts_of, noam, weight_versions
from partopt.cost.iteration import iteration_s
from partopt.cost.memory import stage_memory
from partopt.cost.period import (
    all_loads,
    binding,
    compute_s,
    cut_level,
    fullest,
    one_device_s,
    optimizer_step_s,
    tied_exchange_s,
    tied_groups,
    utilisation,
)
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.cost.sharding import PARAMETERS, collectives_of
from partopt.documents.plan import Certificate, Estimate, Plan, Predicted, Request
from partopt.documents.stage import Flow, FlowPer, Memory, Stage
from partopt.schedules import schedule
from partopt.schedules.entry import Replicas
from partopt.schedules.layout import MIRRORED, STRAIGHT


def price(
    partition: Partition,
    problem: Problem,
    planner: str,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of `partition`: stages with memory, communication, prediction and certificate."""
    replicas = Replicas(len(stage.ranks) for stage in partition.stages)
    flights = _flights(partition, replicas, problem)
    return plan_of(
        partition,
        problem,
        [_stage(partition, s, counts, problem) for s, counts in enumerate(flights)],
        _communication(partition, problem),
        _predicted(partition, problem),
        planner,
        certificate,
    )


def plan_of(
    partition: Partition,
    problem: Problem,
    stages: list[Stage],
    communication: list[Flow],
    predicted: Predicted,
    planner: str,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of `partition` with these parts; all else is the problem's."""
    return Plan(
        planner=planner,
        family=partition.family,
        schedule=problem.schedule,
        microbatch_size=problem.chain.microbatch_size,
        microbatches=problem.microbatches,
        noam=noam(devices_used(partition), len(partition.stages[0].ranks)),
        optimizer=problem.optimizer,
        memory_rules=problem.memory_rules,
        comm="serial" if problem.serial_transfers else "overlap",
        allreduce="blocking" if problem.blocking_allreduce else "overlap",
        bucket_bytes=problem.bucket_bytes,
        request=_request(partition, problem, planner),
        stages=stages,
        communication=communication,
        predicted=predicted,
        certificate=certificate,
        profile=problem.reference,
        topology=problem.limited_topology,
    )


def _request(partition: Partition, problem: Problem, planner: str) -> Request:
    """What was requested; of a manual plan its split, replicas without those of a mirrored copy."""
    if planner != "manual":
        return problem.request
    copies = 2 if partition.family == MIRRORED else 1
    return structs.replace(
        problem.request,
        cuts=[stage.start for stage in partition.stages[1:]],
        replicas=[len(stage.ranks) // copies for stage in partition.stages],
    )


def _stage(partition: Partition, s: int, counts: Counts, problem: Problem) -> Stage:
    """Stage s with its counts of microbatches."""
    stage = partition.stages[s]
    recompute, r = problem.recomputes(stage), len(stage.ranks)
    unplaced = unplaced_stage(stage.start, stage.stop, recompute, counts, r, problem)
    return structs.replace(
        unplaced,
        ranks=list(stage.ranks),
        allreduce_s=problem.allreduce_over(stage.ranks).seconds(unplaced.trained_bytes),
        tied_exchange_s=tied_exchange_s(partition, s, problem),
    )


def unplaced_stage(
    start: int,
    stop: int,
    recompute: bool,
    counts: Counts,
    replicas: int,
    problem: Problem,
) -> Stage:
    """Layers [start, stop) as a stage whose replicas have no ranks yet, which exchanges nothing.

    It has these `counts` of microbatches.
    """
    stage, chain = Assignment(start, stop, range(replicas), recompute), problem.chain
    messages, back_messages = map(int, problem.messages_each_way[:, start])
    forward, shared = chain.forward_s(start, stop), problem.kept.shard >= PARAMETERS
    return Stage(
        start=start,
        stop=stop,
        modules=chain.names[start:stop],
        replicas=replicas,
        ranks=[],
        recompute=recompute,
        warmup=counts.warmup,
        in_flight=counts.held,
        weight_versions=weight_versions(problem.schedule, counts.held),
        compute_s=compute_s(stage, problem),
        forward_s=forward,
        backward_s=max(0.0, chain.compute_s(start, stop) - forward),
        backward_weight_s=float(chain.gw[start:stop].sum()),
        allreduce_s=0.0,
        tied_exchange_s=0.0,
        optimizer_s=optimizer_step_s(stage, problem),
        parameter_bytes=round(chain.parameter_bytes(start, stop)),
        frozen_bytes=round(chain.frozen_bytes(start, stop)),
        input_bytes=round(chain.a[start]),
        output_bytes=round(chain.a[stop]),
        back_bytes=None if chain.back[start] == chain.a[start] else round(chain.back[start]),
        messages=messages if start else 1,
        back_messages=back_messages if start else 1,
        stash_bytes=round(chain.stash_bytes(start, stop)),
        transient_bytes=round(chain.transient(split=False)(start, stop)),
        split_transient_bytes=round(chain.transient(split=True)(start, stop)),
        split_stash_bytes=round(chain.split_stash(start, stop)),
        layer_bytes=round(chain.layer_bytes(start, stop)) if shared else 0,
        memory=_memory(stage, counts, problem),
    )


def _flights(partition: Partition, replicas: Replicas, problem: Problem) -> list[Counts]:
    """The counts of every stage.

    Where devices hold several stages: an even share of what the device holds, and one backward
    begun, which the simulation corrects.
    """
    name, M, stages = problem.schedule, problem.microbatches, range(len(replicas))
    if schedule(name).shape == STRAIGHT:
        return [counts_of(name, s, replicas, M) for s in stages]
    assert M is not None
    P = devices_used(partition) // replicas[0]
    v = len(replicas) // P
    own = [-(-chunks_in_flight(name, p, P, v, -(-M // replicas[0])) // v) for p in range(P)]
    return [Counts(max(0, own[s % P] - 1), max(1, own[s % P]), 1) for s in stages]


def _memory(stage: Assignment, counts: Counts, problem: Problem) -> Memory:
    """Bytes on each device of a stage with these counts of microbatches."""
    return stage_memory(
        problem.chain,
        stage.start,
        stage.stop,
        counts.held,
        weight_versions(problem.schedule, counts.held),
        problem.kept,
        len(stage.ranks),
        counts.begun,
        problem.recomputes(stage),
        schedule(problem.schedule).split,
    )


def peak_memory_bytes(partition: Partition, problem: Problem) -> int:
    """Bytes on the fullest device of a partition whose devices have one stage each."""
    replicas = Replicas(len(stage.ranks) for stage in partition.stages)
    return max(
        _memory(stage, counts, problem).total_bytes
        for stage, counts in zip(
            partition.stages, _flights(partition, replicas, problem), strict=True
        )
    )


def devices_used(partition: Partition) -> int:
    """Devices that have work."""
    return len({rank for stage in partition.stages for rank in stage.ranks})


def _communication(partition: Partition, problem: Problem) -> list[Flow]:
    """The messages of a plan, stage by stage: sends across cuts, all-reduces, tied exchanges."""
    flows: list[Flow] = []
    for s in range(len(partition.stages)):
        flows += _sends(partition, s, problem)
        flows += _exchanges(partition, s, problem)
    return flows


def _sends(partition: Partition, s: int, problem: Problem) -> Iterator[Flow]:
    """Activations forward and gradients backward across the cut before stage s."""
    chain = problem.chain
    outermost = _outermost_level(partition, s, problem) if s > 0 else 0
    if outermost == 0:  # there is no cut, or a device passes to itself
        return
    for source, destination, size in ((s - 1, s, chain.a), (s, s - 1, chain.back)):
        yield Flow(
            kind="send",
            source=source,
            destination=destination,
            bytes=round(size[partition.stages[s].start]),
            per="microbatch",
            level=problem.topology.levels[outermost - 1].name,
        )


def _outermost_level(partition: Partition, c: int, problem: Problem) -> int:
    """The outermost level that messages between stages c-1 and c cross, 0 for none.

    Consecutive ranks part furthest out at their ends; other pairs by `cut_level`.
    """
    before, after = partition.stages[c - 1].ranks, partition.stages[c].ranks
    if partition.family == CONTIGUOUS:
        return problem.topology.common_level(before[0], after[-1])
    return cut_level(partition, c, problem)


def _exchanges(partition: Partition, s: int, problem: Problem) -> Iterator[Flow]:
    """The collectives of stage s over its replicas, and its part in tied exchanges."""
    stage, topology = partition.stages[s], problem.topology
    per: FlowPer = "round" if problem.microbatches is None else "iteration"
    trained = problem.chain.trained_bytes(stage.start, stage.stop)
    whole = problem.chain.parameter_bytes(stage.start, stage.stop)
    flows = collectives_of(problem.kept, trained, whole, per) if len(stage.ranks) > 1 else ()
    for kind, size, often in flows:
        yield Flow(
            kind=kind,
            stage=s,
            ranks=list(stage.ranks),
            bytes=round(size),
            per=often,
            level=topology.levels[max(members_crossed(stage.ranks, topology)) - 1].name,
        )
    for group, holders in tied_groups(partition, s, problem):
        yield Flow(
            kind="tied",
            stage=s,
            holders=holders,
            parameters=list(group.names),
            bytes=round(problem.kept.gradients * group.size),
            per=per,
            level=topology.levels[topology.outermost_level - 1].name,
        )


def _predicted(partition: Partition, problem: Problem) -> Predicted:
    """The prediction: steady state if asynchronous, a whole iteration if synchronous.

    The period of a synchronous schedule is its iteration divided by its microbatches.
    """
    known = all_loads(partition, problem)
    load = binding(partition, problem, known)
    iteration = None if problem.microbatches is None else iteration_s(partition, problem)
    period = load.seconds if iteration is None else iteration / (problem.microbatches or 1)
    computes = [compute_s(stage, problem) for stage in partition.stages]
    bound_by = "every stage in turn" if schedule(problem.schedule).one_at_a_time else str(load)
    alone = one_device_s(problem)
    return Predicted(
        period_s=period,
        iteration_s=iteration,
        samples_per_s=problem.chain.microbatch_size / period,
        bubble=max(0.0, 1.0 - utilisation(computes, devices_used(partition), period)),
        speedup_over_one_device=alone / period,
        bound_by=bound_by,
        estimate=Estimate(
            period_s=period,
            iteration_s=iteration,
            one_device_s=alone,
            bound_by=bound_by,
            loads=fullest(partition, problem, known),
        ),
    )
