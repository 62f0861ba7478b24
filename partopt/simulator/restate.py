"""A plan under other conditions, with the same stages on the same ranks.

The conditions are the schedule, the batch, the network and the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from partopt.cost.collectives import allreduce_s, tied_s
from partopt.cost.flight import Counts, begun, counts_of, noam, weight_versions
from partopt.cost.memory import Kept, Sizes, device_memory, posted_buffers, shares
from partopt.cost.sharding import exchange_by, exchange_topology, kept_by, steps_in_backwards
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, schedule
from partopt.schedules.entry import Replicas
from partopt.schedules.layout import STRAIGHT, Layout
from partopt.schedules.order import B, F, I, Order, W

# S   stages; s   one of them
# M   microbatches of an iteration


def with_conditions(
    plan: Plan,
    schedule_name: str | None = None,
    microbatches: int | None = None,
    topology: Topology | None = None,
    warmups: Sequence[int] | None = None,
    **fields: Any,
) -> Plan:
    """The plan with the given conditions, and everything but its prediction updated to them.

    Memory and microbatches in flight are among what is updated. `warmups` are the forwards of each
    stage before its first backward, under a schedule that takes them; `fields` are others of Plan.
    Raises PartoptError where the plan cannot run that way.
    """
    name = schedule_name or plan.schedule
    asynchronous = schedule(name).asynchronous
    M = None if asynchronous else microbatches or plan.microbatches
    if not asynchronous and M is None:
        raise PartoptError(
            f"{name} needs a number of microbatches",
            "add `microbatches=64`",
            code="microbatches-missing",
            schedule=name,
        )
    changed = plan
    if not warmups or topology or fields or (name, M) != (plan.schedule, plan.microbatches):
        changed = replace(plan, schedule=name, microbatches=M, **fields)
        changed = _on_network(with_steps_of(changed, plan), topology or plan.topology)
    counts = _counts(changed, warmups)
    usual = noam(len(plan.stages_by_rank()), plan.stages[0].replicas)
    return replace(
        changed,
        noam=usual if warmups is None else counts[0].held,
        stages=[
            with_counts(
                stage,
                own,
                weight_versions(name, own.held),
                schedule(name).split,
                kept_by(changed),
            )
            for stage, own in zip(changed.stages, counts, strict=True)
        ],
    )


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
    return replace(changed, stages=stages) if sign else changed


def _steps_in_backwards(plan: Plan) -> bool:
    known = plan.microbatches is None and plan.schedule in SCHEDULES
    return known and steps_in_backwards(plan.schedule, plan.memory_rules.shard != "none")


def _on_network(plan: Plan, topology: Topology) -> Plan:
    """The plan on `topology`, its exchanges of gradients as long as they take there."""
    tied = _tied_exchanges_s(plan, topology)
    reducing = exchange_topology(topology, exchange_by(plan))
    stages = [
        replace(
            stage,
            allreduce_s=allreduce_s(stage.trained_bytes, stage.ranks, reducing),
            tied_exchange_s=tied[s],
        )
        for s, stage in enumerate(plan.stages)
    ]
    return replace(plan, topology=topology, stages=stages)


def _counts(plan: Plan, warmups: Sequence[int] | None) -> list[Counts]:
    """The counts of each stage, under the plan's schedule."""
    name, M = plan.schedule, plan.microbatches
    replicas = Replicas(stage.replicas for stage in plan.stages)
    if not _is_straight(plan):
        return _count(order(name, layout_of(plan)), plan)
    if warmups is not None:
        return [Counts(own, own + 1, begun(name, s, replicas, M)) for s, own in enumerate(warmups)]
    return [counts_of(name, s, replicas, M) for s in range(len(replicas))]


def _is_straight(plan: Plan) -> bool:
    """Whether devices hold one stage each."""
    return schedule(plan.schedule).shape == STRAIGHT


def _tied_exchanges_s(plan: Plan, topology: Topology) -> list[float]:
    """Seconds of each stage's exchanges of the gradients of tied parameters, on `topology`."""
    seconds = [0.0] * len(plan.stages)
    for flow in plan.communication:
        if flow.stage is not None and flow.holders is not None:
            seconds[flow.stage] += tied_s(flow.bytes, flow.holders, topology)
    return seconds


def layout_of(plan: Plan, microbatches: int | None = None) -> Layout:
    """The layout of the plan, as its schedule needs it.

    `microbatches` pass through, by default those of the plan's iteration.
    """
    passing = microbatches or plan.microbatches
    assert passing is not None
    return Layout(
        ranks=[stage.ranks for stage in plan.stages],
        devices=plan.topology.devices,
        microbatches=passing,
        recompute=[stage.recompute for stage in plan.stages],
        warmup=[stage.warmup for stage in plan.stages],
        tied=[stage.tied_exchange_s > 0 for stage in plan.stages],
    )


def with_counts(stage: Stage, counts: Counts, versions: int, split: bool, kept: Kept) -> Stage:
    """The stage with these `counts` of microbatches and `versions` of its weights.

    Its memory is updated to them, and to backwards that are `split` or not; `kept` is what its
    trainer keeps.
    """
    held = counts.held
    sizes = Sizes(
        stage.trained_bytes,
        stage.frozen_bytes,
        stage.memory.gradients_bytes,
        stage.memory.optimizer_bytes,
        stage.stash_bytes,
        stage.split_stash_bytes if split else 0,
        stage.transient(split),
        stage.input_bytes,
        stage.output_bytes,
        stage.layer_bytes,
        shares(kept, stage.replicas)[0],
    )
    buffers = posted_buffers(kept.posted, stage.replicas, held)
    memory = device_memory(sizes, held, versions, counts.begun, stage.recompute, buffers)
    return replace(
        stage, warmup=counts.warmup, in_flight=held, weight_versions=versions, memory=memory
    )


def forwards_first(order: Order, rank: int, s: int) -> int:
    """Forwards of stage s on `rank` before its first backward."""
    own = slice(order.rows[rank], order.rows[rank + 1])
    kind = order.kind[own][order.stage[own] == s]
    return int((kind[: int(np.argmax((kind == B) | (kind == I)))] == F).sum())


def _count(order: Order, plan: Plan) -> list[Counts]:
    """The counts of each stage, held and begun when its device is fullest.

    The stages of one device are not fullest at once; counted this way, their memory adds up to what
    the device needs.
    """
    stashes = np.array([max(1, each.stash_bytes) for each in plan.stages])
    again = np.array([each.recompute for each in plan.stages])
    waiting = np.where(again, [max(1, each.input_bytes) for each in plan.stages], stashes)
    working = np.where(again, stashes, 0)
    parting = np.array([each.split_stash_bytes for each in plan.stages])
    counts: dict[int, Counts] = {}
    for rank, stages in plan.stages_by_rank().items():
        own = slice(order.rows[rank], order.rows[rank + 1])
        kind, stage = order.kind[own], order.stage[own]
        enters, begins, ends = kind == F, (kind == B) | (kind == I), (kind == B) | (kind == W)
        of_begun = working[stage] + parting[stage] * (kind != B)
        taken = enters * waiting[stage] + begins * of_begun
        given = ends * (waiting[stage] + of_begun)
        fullest = int(np.argmax(np.cumsum(taken - given) + given))
        for s in stages:
            its = stage[: fullest + 1] == s
            done = ends[: fullest + 1] & its
            done[fullest] = False
            held, begun = (
                int((each[: fullest + 1] & its).sum() - done.sum()) for each in (enters, begins)
            )
            before = counts.get(s, Counts(0, 1, 0))
            first = forwards_first(order, rank, s)
            counts[s] = Counts(*map(max, before, (first, held, begun)))
    return [counts[s] for s in range(len(plan.stages))]
