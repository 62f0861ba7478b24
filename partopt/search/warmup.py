"""How many forwards come before the first backward, searched by simulation.

The formula fills an asynchronous pipeline whose messages take no time. Latency, links that are shared and all-reduces that are waited for
ask for more microbatches in flight; each costs memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from partopt.errors import PartoptError
from partopt.plan import Plan
from partopt.schedules import schedule
from partopt.simulator.judge import judged, simulation_of, with_prediction
from partopt.simulator.restate import restated

# r_s    replicas of stage s
# w_s    its warm-up, forwards of each replica before its first backward

SEARCH_LIMIT = 100_000  # stages times microbatches in flight: above, one simulation takes too long to try several
WORTHWHILE = 1e-3  # of the period: what more memory must at least save
_DEEPER = ((1, 1), (1, 2), (1, 3), (1, 4), (1.5, 0), (1.5, 1), (2, 0), (2, 1), (3, 0))  # factors and additions, see `warmups`


def warmups(replicas: Sequence[int], factor: float = 1.0, more: int = 0) -> list[int]:
    """w_s = floor((factor * sum of r_t over t > s, + r_s - 1 + more) / r_s): PipeDream's with factor 1 and nothing more."""
    return [int((factor * sum(replicas[s + 1 :]) + r - 1 + more) // r) for s, r in enumerate(replicas)]


def judged_at_best(plan: Plan, memory_bytes: int | None) -> Plan:
    """`judged`, for an asynchronous plan at the warm-up with the shortest period under the limit `memory_bytes` of a device.

    Nothing is searched where the formula's warm-up reaches what the loads of the plan allow. Where another is better, the plan says in
    `predicted.formula_period_s` what the formula's would have given. Raises PartoptError where the schedule cannot run the plan, whatever
    the warm-up.
    """
    if not schedule(plan.schedule).asynchronous:
        return judged(plan)
    try:
        usual = judged(plan)
    except PartoptError:  # waiting for all-reduces, the formula's can deadlock
        usual = None
    allowed = plan.predicted.period_s * (1 + WORTHWHILE)
    if usual is not None and (
        usual.predicted.period_s <= allowed or len(plan.stages) * sum(s.replicas for s in plan.stages) > SEARCH_LIMIT
    ):
        return usual
    best = usual
    for found in _deeper(plan, allowed):
        fits = found.fits(memory_bytes) or (best is not None and not best.fits(memory_bytes))
        if fits and (best is None or found.predicted.period_s < best.predicted.period_s * (1 - WORTHWHILE)):
            best = found
    if best is None:
        return judged(plan)  # which says why
    if best is usual:
        return best
    return replace(best, predicted=replace(best.predicted, formula_period_s=usual.predicted.period_s if usual else None))


def _deeper(plan: Plan, allowed: float) -> Iterator[Plan]:
    """The plan at deeper and deeper warm-ups, judged, until one is as fast as its loads allow."""
    replicas = [stage.replicas for stage in plan.stages]
    for factor, more in _DEEPER:
        try:
            found = with_prediction(simulation_of(restated(plan, warmups=warmups(replicas, factor, more))))
        except PartoptError:
            continue
        yield found
        if found.predicted.period_s <= allowed:
            return
