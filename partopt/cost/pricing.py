"""Every number of a plan: of a partition that a planner decided, and of a plan changed since.

A stage is sums over its layers. All else follows from the stages, the schedule, the microbatches,
the topology and how memory is counted, here and nowhere else: seconds of the exchanges,
microbatches in flight, memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from partopt.cost.collectives import allreduce_s, members_crossed, tied_s
from partopt.cost.estimate import estimate_of, idle_share
from partopt.cost.memory import kept_by, shares, with_counts
from partopt.cost.problem import CONTIGUOUS, RECORDED, Assignment, Partition, Problem
from partopt.cost.recomputed_blocks import Remade
from partopt.cost.sharding import (
    PARAMETERS,
    collectives_of,
    exchange_by,
    exchange_topology,
    steps_in_backwards,
)
from partopt.documents.actions import B, F, I, W
from partopt.documents.engine import Layout
from partopt.documents.plan import Certificate, Estimate, Plan, Predicted, noam
from partopt.documents.stage import Flow, FlowPer, Memory, Stage
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, schedule
from partopt.schedules.entry import Counts, Replicas, Schedule
from partopt.schedules.order import Order
from partopt.schedules.placement import MIRRORED, STRAIGHT, placement_of

# S   stages; s   one of them
# M   microbatches of an iteration
# r   replicas of a stage


def price(
    partition: Partition,
    problem: Problem,
    planner: str,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of `partition`: stages with memory, communication, prediction and certificate.

    Raises PartoptError where the schedule cannot run several stages on a device so.
    """
    stages = [sum_layers(stage, problem) for stage in partition.stages]
    plan = plan_of(partition, problem, stages, _flows(partition, problem), planner, certificate)
    plan = _with_counts(_with_exchanges(plan))
    return replace(plan, predicted=_predicted(plan, problem))


def under(
    plan: Plan,
    schedule_name: str | None = None,
    microbatches: int | None = None,
    topology: Topology | None = None,
    warmups: Sequence[int] | None = None,
    **fields: Any,
) -> Plan:
    """The plan under other conditions, on the same ranks; its prediction is not made again.

    `warmups` are the forwards of every stage before its first backward, under a schedule that takes
    them; `fields` are others of Plan. Raises PartoptError where the plan cannot run that way.
    """
    name = schedule_name or plan.schedule
    asynchronous = schedule(name).asynchronous
    M = None if asynchronous else microbatches or plan.microbatches
    if not asynchronous and M is None:
        raise PartoptError(
            f"{name} needs a number of microbatches",
            "add `microbatches=64`",
            code="microbatches-missing",
        )
    changed = plan
    if not warmups or topology or fields or (name, M) != (plan.schedule, plan.microbatches):
        changed = replace(plan.with_layout(schedule=name), microbatches=M, **fields)
        changed = replace(with_steps_of(changed, plan), topology=topology or plan.topology)
        changed = _with_exchanges(changed)
    return _with_counts(changed, warmups)


# ---- what follows from the stages -------------------------------------------------------------


def _with_exchanges(plan: Plan) -> Plan:
    """The plan with the seconds in which its stages exchange gradients on its topology."""
    reducing = exchange_topology(plan.topology, exchange_by(plan))
    tied = _tied_s(plan.communication, len(plan.stages), plan.topology)
    stages = [
        replace(
            stage,
            allreduce_s=allreduce_s(stage.trained_bytes, stage.ranks, reducing),
            tied_exchange_s=seconds,
        )
        for stage, seconds in zip(plan.stages, tied, strict=True)
    ]
    return replace(plan, stages=stages)


def _tied_s(flows: Sequence[Flow], S: int, topology: Topology) -> list[float]:
    """Seconds in which every stage exchanges the gradients of tied parameters with others."""
    seconds = [0.0] * S
    for flow in flows:
        if flow.stage is not None and flow.holders is not None:
            seconds[flow.stage] += tied_s(flow.bytes, flow.holders, topology)
    return seconds


def _with_counts(plan: Plan, warmups: Sequence[int] | None = None) -> Plan:
    """The plan with its warm-ups, microbatches in flight, weight versions and memory."""
    entry, M = schedule(plan.schedule), plan.microbatches
    if entry.shape == STRAIGHT:
        replicas = Replicas(stage.replicas for stage in plan.stages)
        counts = [entry.counts(s, replicas, M) for s in range(len(replicas))]
        if warmups is not None:
            counts = [
                Counts(warmup, warmup + 1, usual.begun)
                for warmup, usual in zip(warmups, counts, strict=True)
            ]
    else:
        counts = _counts_by_order(order(plan.schedule, placement_of(plan)), plan)
    usual = noam(sum(plan.devices_by_stages().values()), plan.stages[0].replicas)
    plan = replace(plan, noam=usual if warmups is None else counts[0].held)
    return _counted(plan, counts, entry)


def _counted(plan: Plan, counts: Sequence[Counts], entry: Schedule) -> Plan:
    stages, kept = zip(plan.stages, counts, strict=True), kept_by(plan)
    counted = [with_counts(stage, stage_counts, entry, kept) for stage, stage_counts in stages]
    return replace(plan, stages=counted)


def with_steps_of(changed: Plan, plan: Plan) -> Plan:
    """`changed`, made from `plan`, whose backwards end with steps if its schedule has that."""
    sign = _steps_in_backwards(changed) - _steps_in_backwards(plan)
    stages = [
        replace(
            stage,
            compute_s=max(0.0, stage.compute_s + sign * stage.optimizer_s),
            backward_s=max(0.0, stage.backward_s + sign * stage.optimizer_s),
        )
        for stage in changed.stages
    ]
    return replace(changed, stages=stages)


def _steps_in_backwards(plan: Plan) -> bool:
    known = plan.microbatches is None and plan.schedule in SCHEDULES
    return known and steps_in_backwards(plan.schedule, plan.shard != "none")


def with_counts_of(order: Order, plan: Plan, entry: Schedule) -> Plan:
    """The plan with the counts and memory of its stages under an order, which is like `entry`'s."""
    return _counted(plan, _counts_by_order(order, plan), entry)


def _counts_by_order(order: Order, plan: Plan) -> list[Counts]:
    """The counts of every stage, held and begun when its device is fullest.

    The stages of one device are not fullest at once; counted this way, their memory adds up to what
    the device needs. A stage that is recomputed whole has buffers for all that it ever holds.
    """
    stashes = np.array([max(1, stage.stash_bytes) for stage in plan.stages])
    again = np.array([stage.recomputes_whole for stage in plan.stages])
    waiting, working = np.where(again, 0, stashes), np.where(again, stashes, 0)
    parting = np.array([stage.split_stash_bytes for stage in plan.stages])
    counts: dict[int, Counts] = {}
    seen = set[tuple[bytes, bytes]]()
    for rank, stages in plan.stages_by_rank().items():
        of_rank = order.of_rank(rank)
        kind, stage = order.kind[of_rank], order.stage[of_rank]
        if (row := (kind.tobytes(), stage.tobytes())) in seen:  # of another replica
            continue
        seen.add(row)
        enters, begins, ends = kind == F, (kind == B) | (kind == I), (kind == B) | (kind == W)
        of_begun = working[stage] + parting[stage] * (kind != B)
        taken = enters * waiting[stage] + begins * of_begun
        given = ends * (waiting[stage] + of_begun)
        fullest = int(np.argmax(np.cumsum(taken - given) + given))
        for s in stages:
            its = stage == s
            done = np.cumsum(ends & its) - (ends & its)
            held, begun = (np.cumsum(actions & its) - done for actions in (enters, begins))
            held, begun = int(held.max() if again[s] else held[fullest]), int(begun[fullest])
            before = counts.get(s, Counts(0, 1, 0))
            first = _forwards_first(order, rank, s)
            counts[s] = Counts(*map(max, before, (first, held, begun)))
    return [counts[s] for s in range(len(plan.stages))]


def _forwards_first(order: Order, rank: int, s: int) -> int:
    """Forwards of stage s on `rank` before its first backward."""
    of_rank = order.of_rank(rank)
    kind = order.kind[of_rank][order.stage[of_rank] == s]
    return int((kind[: int(np.argmax((kind == B) | (kind == I)))] == F).sum())


# ---- what follows from the layers -------------------------------------------------------------

_NOTHING = Memory(
    parameters_bytes=0,
    gradients_bytes=0,
    optimizer_bytes=0,
    activations_bytes=0,
    buffers_bytes=0,
    total_bytes=0,
)
UNKNOWN = Predicted(
    period_s=float("inf"),
    iteration_s=None,
    samples_per_s=0.0,
    bubble=0.0,
    speedup_over_one_device=0.0,
    bound_by="",
    estimate=Estimate(
        period_s=float("inf"), iteration_s=None, one_device_s=0.0, bound_by="", loads=[]
    ),
)


def sum_layers(stage: Assignment, problem: Problem) -> Stage:
    """The sums over the layers of a stage, which has no counts, no memory and no exchanges yet."""
    again, first = problem.recomputes(stage), problem.first
    alike = problem.chain, stage.start, stage.stop, len(stage.ranks), again, first
    key = "layers", *alike, problem.kept, problem.engine.messages
    sums: Stage = problem.known.once(key, lambda: _sum_layers(stage, problem))
    return replace(sums, ranks=list(stage.ranks))


def _sum_layers(stage: Assignment, problem: Problem) -> Stage:
    i, j, chain, recompute = stage.start, stage.stop, problem.chain, problem.recomputes(stage)
    messages, back_messages = map(int, problem.messages_each_way[:, i]) if i else (1, 1)
    forward, trained = chain.forward_s(i, j), chain.trained_bytes(i, j)
    total, step_s = chain.trained_bytes(0, chain.layers), chain.steps_s(i, j)
    if chain.stepping is None and total:  # replicas that share the state step shares of it
        sharers = shares(problem.kept, len(stage.ranks))[-1]
        step_s = trained / total * chain.optimizer_s / sharers
    blocks, first = chain.blocks if recompute else None, problem.first
    if blocks is None:
        again_s, transient = forward if recompute else 0.0, chain.transient(split=False)(i, j)
        remade = Remade(again_s, chain.stash_bytes(i, j), 0.0, transient)
    else:
        remade = blocks.remade(i, j, first)
    return Stage(
        start=i,
        stop=j,
        modules=chain.names[i:j],
        replicas=len(stage.ranks),
        ranks=list(stage.ranks),
        recompute=recompute,
        blocks=None if blocks is None else blocks.count(i, j),
        blocks_again=0 if blocks is None else blocks.count(i, j, first),
        warmup=0,
        in_flight=1,
        weight_versions=1,
        compute_s=chain.compute_s(i, j) + float(remade.again_s),
        forward_s=forward,
        backward_s=max(0.0, chain.compute_s(i, j) - forward),
        again_s=float(remade.again_s),
        backward_weight_s=float(chain.gw[i:j].sum()),
        allreduce_s=0.0,
        tied_exchange_s=0.0,
        optimizer_s=step_s,
        parameter_bytes=round(chain.parameter_bytes(i, j)),
        frozen_bytes=round(chain.frozen_bytes(i, j)),
        input_bytes=round(chain.a[i]),
        output_bytes=round(chain.a[j]),
        back_bytes=None if chain.back[i] == chain.a[i] else round(chain.back[i]),
        messages=messages,
        back_messages=back_messages,
        stash_bytes=round(float(remade.stash_bytes)),
        transient_bytes=round(float(remade.transient_bytes)),
        split_transient_bytes=round(chain.transient(split=True)(i, j)),
        split_stash_bytes=round(chain.split_stash(i, j) + float(remade.split_stash_bytes)),
        layer_bytes=round(chain.layer_bytes(i, j)) if problem.kept.shard >= PARAMETERS else 0,
        memory=_NOTHING,
    )


def plan_of(
    partition: Partition,
    problem: Problem,
    stages: list[Stage],
    communication: list[Flow],
    planner: str,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of `partition` with these parts, which predicts nothing; the rest is the problem's.

    A manual plan records its split as requested, replicas without those of a mirrored copy.
    """
    copies, cuts, replicas = 2 if partition.family == MIRRORED else 1, None, None
    if planner == "manual":
        cuts = [stage.start for stage in partition.stages[1:]]
        replicas = [len(stage.ranks) // copies for stage in partition.stages]
    devices = {rank for stage in partition.stages for rank in stage.ranks}
    layout = Layout.of(
        stages,
        copies,
        tp=problem.topology.group_ranks,
        microbatch=problem.chain.microbatch_size,
        shard=problem.shard,
        schedule=problem.schedule,
    )
    if problem.transformer:
        layout = layout.with_inside(problem.transformer.layout)
    return Plan(
        planner=planner,
        family=partition.family,
        layout=layout,
        noam=noam(len(devices), len(partition.stages[0].ranks)),
        stages=stages,
        communication=communication,
        predicted=UNKNOWN,
        certificate=certificate,
        profile=problem.reference,
        topology=problem.limited_topology,
        **{name: getattr(problem, name) for name in RECORDED}
        | {"request": replace(problem.request, cuts=cuts, replicas=replicas)},
    )


def _flows(partition: Partition, problem: Problem) -> list[Flow]:
    """The messages of a plan, stage by stage: sends across cuts, all-reduces, tied exchanges."""
    flows: list[Flow] = []
    for s in range(len(partition.stages)):
        flows += _sends(partition, s, problem)
        flows += _collectives(partition, s, problem)
        flows += _tied_flows(partition, s, problem)
    return flows


def _sends(partition: Partition, s: int, problem: Problem) -> Iterator[Flow]:
    """Activations forward and gradients backward across the cut before stage s.

    They name the outermost level that they cross, none where a device passes to itself. Consecutive
    ranks part furthest out at their ends, other pairs where the nearest do.
    """
    chain, topology = problem.chain, problem.topology
    if s == 0:
        return
    before, after = partition.stages[s - 1].ranks, partition.stages[s].ranks
    pairs = zip(before, after, strict=False)
    if partition.family == CONTIGUOUS:
        pairs = zip(before[:1], after[-1:], strict=True)
    outermost = min(topology.common_level(one, other) for one, other in pairs)
    if outermost == 0:
        return
    for source, destination, size in ((s - 1, s, chain.a), (s, s - 1, chain.back)):
        yield Flow(
            kind="send",
            source=source,
            destination=destination,
            bytes=round(size[partition.stages[s].start]),
            per="microbatch",
            level=topology.levels[outermost - 1].name,
        )


def _collectives(partition: Partition, s: int, problem: Problem) -> Iterator[Flow]:
    """The collectives of stage s over its replicas."""
    stage, topology = partition.stages[s], problem.topology
    if len(stage.ranks) == 1:
        return
    trained = problem.chain.trained_bytes(stage.start, stage.stop)
    whole = problem.chain.parameter_bytes(stage.start, stage.stop)
    for kind, size, often in collectives_of(problem.kept, trained, whole, _round(problem)):
        yield Flow(
            kind=kind,
            stage=s,
            ranks=list(stage.ranks),
            bytes=round(size),
            per=often,
            level=topology.levels[max(members_crossed(stage.ranks, topology)) - 1].name,
        )


def _round(problem: Problem) -> FlowPer:
    return "round" if problem.microbatches is None else "iteration"


def _tied_flows(partition: Partition, s: int, problem: Problem) -> Iterator[Flow]:
    """The part of stage s in the exchanges of tied parameters that other devices hold too.

    Holders are the stage itself and one stage for each layer elsewhere: the most that are possible,
    and known without the other stages.
    """
    stage, topology = partition.stages[s], problem.topology
    layers = set(range(stage.start, stage.stop))
    groups = [group for group in problem.chain.tied if not layers.isdisjoint(group.members)]
    if not groups:
        return
    device = stage.ranks[0]
    on_device = [other for other in partition.stages if device in other.ranks]
    for group in groups:
        outside = sum(
            not any(other.start <= layer < other.stop for other in on_device)
            for layer in group.members
        )
        if outside:
            yield Flow(
                kind="tied",
                stage=s,
                holders=1 + outside,
                parameters=list(group.names),
                bytes=round(problem.kept.gradients * group.size),
                per=_round(problem),
                level=topology.levels[topology.outermost_level - 1].name,
            )


def tied_exchanges_s(partition: Partition, problem: Problem) -> list[float]:
    """Seconds in which every stage exchanges the gradients of tied parameters with others."""
    S = len(partition.stages)
    if not problem.chain.tied:
        return [0.0] * S
    flows = [flow for s in range(S) for flow in _tied_flows(partition, s, problem)]
    return _tied_s(flows, S, problem.topology)


def _predicted(plan: Plan, problem: Problem) -> Predicted:
    """What the formulas say, for want of a simulation.

    One device works through the whole model without recomputation, and steps once an iteration.
    """
    M, chain = plan.microbatches, problem.chain
    alone = chain.compute_s(0, chain.layers) + (0.0 if M is None else chain.optimizer_s / M)
    estimate = estimate_of(plan, alone)
    return Predicted(
        period_s=estimate.period_s,
        iteration_s=estimate.iteration_s,
        samples_per_s=plan.microbatch_size / estimate.period_s,
        bubble=idle_share(plan, estimate.period_s),
        speedup_over_one_device=alone / estimate.period_s,
        bound_by=estimate.bound_by,
        estimate=estimate,
    )
