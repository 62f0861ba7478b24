"""The order of plans: the fastest that fits, but of those that are as good as equal the simplest.

A plan of many stages, of a schedule that few trainers run, is no answer for a tenth of a percent:
what is predicted is not that exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, needed_bytes
from partopt.documents.stage import Shard
from partopt.schedules import rank

TIE = 0.005  # of the speed of the fastest: plans that lose no more are as good
TIGHT = 0.9  # of the memory: a plan that needs more leaves little
# planners whose plans the simulator changes; what others decide is theirs only as it is
SEARCHED = ("optimal", "grid")
_SHARDS: Sequence[Shard] = get_args(Shard)


def rate(plan: Plan) -> float:
    """Samples a second."""
    return plan.predicted.samples_per_s


def order_of(plan: Plan) -> tuple[bool, float]:
    """The order of plans: those that fit first, and of them the fastest."""
    return not plan.fits, -rate(plan)


def is_as_good(plan: Plan, fastest: Plan) -> bool:
    """Whether a plan fits and is as fast as the fastest one, about."""
    return plan.fits and rate(plan) >= (1 - TIE) * rate(fastest)


def complexity(plan: Plan) -> tuple[Any, ...]:
    """What of two plans that are equally fast puts the simpler first; its first numbers the most.

    The schedule, data parallelism before all; the stages; unequal replicas; what replicas share
    and stages make again; little memory left. Of a transformer its layout, then the memory.
    """
    if plan.transformer:
        return *layout_complexity(plan.transformer.layout), needed_bytes(plan)
    stages, limit = plan.stages, plan.memory_limit_bytes
    return (
        rank(plan.schedule, len(stages)),
        len(stages),
        len({stage.replicas for stage in stages}) > 1,
        _SHARDS.index(plan.shard),
        sum(stage.recompute for stage in stages) > 0,
        limit is not None and plan.peak_memory_bytes > TIGHT * limit,
    )


def layout_complexity(layout: Layout) -> tuple[float, ...]:
    """As `complexity`, of a transformer's layout.

    Schedule and stages on a device, what is made again, kinds of parallel ranks beside replicas.
    """
    again, stages = layout.recomputation, (layout.pp or 1) * (layout.chunks or 1)
    degrees = (getattr(layout, name) or 1 for name in ("tp", "cp", "ep", "etp", "pp"))
    return (
        rank(layout.schedule or "1f1b", stages),
        layout.chunks or 1,
        again.is_whole,
        again.blocks or (math.inf if again.is_whole else len(again.modules)),
        sum(degree > 1 for degree in degrees),
    )


def first_of(plans: Iterable[Plan]) -> Plan:
    """The simplest of the plans that are as good as the fastest that fits; the fastest of equals.

    Plans of searches, of which a bound may be known, go before those that began them. Of plans none
    of which fits it is the fastest.
    """
    fastest, *others = sorted(plans, key=order_of)
    good = [fastest, *(plan for plan in others if is_as_good(plan, fastest))]
    return min(good, key=lambda plan: (plan.planner not in SEARCHED, complexity(plan)))
