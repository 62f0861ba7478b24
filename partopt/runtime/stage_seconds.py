"""What the actions of each stage took in a run: medians over microbatches, replicas and steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.documents.run import StageSeconds
from partopt.runtime.actions import RankRecord, actions_of
from partopt.schedules import order
from partopt.schedules.order import B, F, I, R, U, W

_NS = 1e-9


def stage_seconds(
    plan: Plan, steps: Sequence[Sequence[RankRecord]], microbatches: int | None
) -> list[StageSeconds]:
    """The seconds of each stage of `plan`, from the records of all ranks in each of `steps`.

    `microbatches` are those that passed through an asynchronous plan.
    """
    orders = order(plan.schedule, layout_of(plan, microbatches))
    actions = {rank: actions_of(orders, rank) for rank in range(orders.ranks)}
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    for record in (record for records in steps for record in records):
        took_ns = (record.end - record.begin).sum(axis=0).tolist()
        for action in actions[record.rank]:
            taken[action.stage, action.kind].append(took_ns[action.place])
    found = []
    for s, stage in enumerate(plan.stages):
        own = {kind: statistics.median(ns) * _NS for (at, kind), ns in taken.items() if at == s}
        split = I in own
        found.append(
            StageSeconds(
                start=stage.start,
                modules=stage.modules,
                recompute=stage.recompute,
                forward_s=own[F],
                backward_s=own[I] + own[W] if split else own[B],
                backward_weight_s=own[W] if split else None,
                recompute_s=own.get(R),
                optimizer_s=own.get(U),
            )
        )
    return found
