"""How many forwards come before the first backward, searched by simulation.

The formula fills an asynchronous pipeline whose messages take no time. Latency, links that are
shared and all-reduces that are waited for ask for more microbatches in flight; each costs memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from partopt.cost.flight import blocking_warmups
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.simulator.prediction import check_actions, simulate_plan
from partopt.simulator.restate import with_conditions

# r_s    replicas of stage s
# w_s    its warm-up, forwards of each replica before its first backward

# stages times microbatches in flight: above, one simulation takes too long to try several
SEARCH_LIMIT = 100_000
WORTHWHILE = 1e-3  # of the period: what more memory must at least save
# see `warmups`
_DEEPER = (
    (1, 1),
    (1, 2),
    (1, 3),
    (1.5, 0),
    (1.5, 1),
    (2, 0),
    (2, 1),
    (3, 0),
    (4, 0),
    (6, 0),
    (8, 0),
)
_PATIENCE = 4  # depths in a row that gain nothing, after which no deeper ones are tried


def warmups(replicas: Sequence[int], factor: float = 1.0, more: int = 0) -> list[int]:
    """w_s = floor((factor * sum of r_t over t > s, + r_s - 1 + more) / r_s), 0 of the last stage.

    PipeDream's with factor 1 and nothing more.
    """
    return [
        *(
            int((factor * sum(replicas[s + 1 :]) + r - 1 + more) // r)
            for s, r in enumerate(replicas[:-1])
        ),
        0,
    ]


def simulate_with_best_warmup(plan: Plan) -> Plan:
    """`simulate_plan`, for an asynchronous plan at the warm-up with the shortest period.

    That warm-up keeps to the limit `memory_bytes` of a device. Nothing is searched where the
    formula's warm-up reaches what the loads of the plan allow, or does not fit. Where another is
    better, the plan says in `predicted.formula_period_s` what the formula's would have given.
    Raises PartoptError where the schedule cannot run the plan, whatever the warm-up.
    """
    if not schedule(plan.schedule).asynchronous:
        return simulate_plan(plan)
    check_actions(plan)
    allowed_s = plan.predicted.estimate.period_s * (1 + WORTHWHILE)
    usual = _try(plan, None)
    too_long = len(plan.stages) * sum(stage.replicas for stage in plan.stages) > SEARCH_LIMIT
    if usual is not None and (usual.predicted.period_s <= allowed_s or too_long or not usual.fits):
        return usual
    best = _deepen(plan, usual, allowed_s)
    if best is None:
        return simulate_plan(plan)  # which says why
    if best is usual:
        return best
    best = _leaner(plan, best)
    return replace(
        best,
        predicted=replace(
            best.predicted, formula_period_s=usual.predicted.period_s if usual else None
        ),
    )


def _try(plan: Plan, warmup: Sequence[int] | None, must_fit: bool = False) -> Plan | None:
    """The plan simulated at a warm-up, where None is its own.

    None where it deadlocks, as it can while it waits for all-reduces, or where it must fit and does
    not.
    """
    changed = plan if warmup is None else with_conditions(plan, warmups=warmup)
    if must_fit and not changed.fits:
        return None
    try:
        found = simulate_plan(changed)
    except PartoptError:
        return None
    return None if must_fit and not found.fits else found


def _deepen(plan: Plan, usual: Plan | None, allowed_s: float) -> Plan | None:
    """The best of `usual` and ever deeper warm-ups that fit.

    The search ends when one is as fast as the loads of the plan allow. Where the formula's warm-up
    deadlocks, the first tried is one that cannot, whether it fits or not.
    """
    replicas = [stage.replicas for stage in plan.stages]
    best = usual or _try(plan, blocking_warmups(replicas))
    in_vain = 0  # depths tried since the last gain
    for depth in dict.fromkeys(tuple(warmups(replicas, factor, more)) for factor, more in _DEEPER):
        if in_vain == _PATIENCE or (best is not None and best.predicted.period_s <= allowed_s):
            break
        found = _try(plan, depth, must_fit=True)
        in_vain += 1
        if found is not None and (
            best is None or found.predicted.period_s < best.predicted.period_s * (1 - WORTHWHILE)
        ):
            best, in_vain = found, 0
    return best


def _leaner(plan: Plan, best: Plan) -> Plan:
    """`best`, or the same period to WORTHWHILE with fewer microbatches in flight.

    The warm-up is bisected between those of `plan` and of `best`.
    """
    low, high = ([stage.warmup for stage in each.stages] for each in (plan, best))
    allowed_s, steps = (
        best.predicted.period_s * (1 + WORTHWHILE),
        max(b - a for a, b in zip(low, high, strict=True)),
    )
    enough, short = steps, 0
    while enough - short > 1:
        middle = (enough + short) // 2
        found = _try(
            plan, [a + -(-max(0, b - a) * middle // steps) for a, b in zip(low, high, strict=True)]
        )
        if found is not None and found.predicted.period_s <= allowed_s:
            best, enough = found, middle
        else:
            short = middle
    return best
