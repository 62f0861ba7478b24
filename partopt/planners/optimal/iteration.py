"""The least iteration of a synchronous schedule: one pass + E + X + U.

X is what the stage that paces adds for the other microbatches, U the largest update, E what stages
that choose to recompute add to the pass; elsewhere E is 0, and recomputation a part of `one pass`.

Regions of X and U are searched, the one with the least bound first. A probe that finds no plan
rules out a region, or all plans in it that take less than a target; a plan that takes more splits
the region in two, neither of which holds that plan.
"""

from __future__ import annotations

import heapq
import math

from partopt.cost.kernels import passed_s
from partopt.cost.period import parts_of_iteration
from partopt.cost.problem import Partition, Problem
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.bounds import Bounds, Counts, Region
from partopt.planners.optimal.families import FamilyProbe

_EAGER = 5  # tries after which a region is asked for anything better than the best
_LAYERS_PROBED = 100_000  # layers times probes, where those count the recomputation


def least_iteration(
    probe: FamilyProbe, counts: Counts, value: float
) -> tuple[Partition | None, float, float]:
    """The plan with the least iteration below `value`, that iteration, and a lower bound.

    Where a probe gives up, the bounds are those of the regions that are left. Where E varies and
    the family's probe does not bound it, E counts as 0 in the lower bound. Probes that count it
    take long: after `_most_probes` of a family the search ends, with the lower bound that it has.
    """
    problem, (one_pass, x, u) = probe.problem, _floors(probe, counts)
    best_known = value < math.inf
    best, goal, slack = None, value - one_pass, SUM * (value if best_known else one_pass)
    whole = Region(x + u, u, math.inf, x, math.inf, tries=_EAGER if best_known else 0)
    regions = probe.regions(counts, whole)
    heapq.heapify(regions)
    while probe.probes < _most_probes(problem):
        if not regions or regions[0].bound >= goal - 2 * slack:
            break
        region = heapq.heappop(regions)
        target = _target(region, goal - 2 * slack)
        bounds = Bounds(
            pace_s=min(region.most_x, target - region.u),
            update_s=min(region.most_u, target - region.x),
            recompute_s=target - region.u - region.x - 3 * slack,
        )
        found = probe.find(bounds, counts, problem.stages)
        if found is None and probe.gave_up:
            heapq.heappush(regions, region)
            break
        if found is None:
            probe.leave_open(region, bounds, counts)
            if target < goal - 2 * slack:
                heapq.heappush(regions, region._replace(bound=target, tries=region.tries + 1))
            continue
        passing, rest, update = parts_of_iteration(found, problem)
        extra = passing - one_pass if probe.bounds_recompute else 0.0
        taken = extra + rest + update
        if passing + rest + update < value:
            best, value = found, passing + rest + update
        if taken < goal:
            goal, slack = taken, SUM * (one_pass + taken)
        if taken < target:
            heapq.heappush(regions, region._replace(tries=0))
            continue
        for part in _parts(region, min(target, taken - 2 * slack), extra, rest, update, 2 * slack):
            heapq.heappush(regions, part)
    lower = min(goal, regions[0].bound) if regions else goal
    return best, value, min(one_pass + lower, value)


def _floors(probe: FamilyProbe, counts: Counts) -> tuple[float, float, float]:
    """Seconds of one pass of a microbatch at the least, and what X and U do not go below."""
    problem, layers = probe.problem, probe.layers
    compute = float(layers.compute[layers.first_mode, -1])
    one_pass = float(passed_s(layers, 0, problem.chain.layers, layers.first_mode))
    x, u = probe.floors_s(counts)
    shared = compute * layers.M / problem.topology.devices - one_pass
    return one_pass, max(x, shared) * (1 - SUM) - SUM * one_pass, u * (1 - SUM)


def _most_probes(problem: Problem) -> int:
    """The most probes of a search.

    It is enough except for chains of many layers whose stages choose to recompute.
    """
    return (
        max(100, _LAYERS_PROBED // problem.chain.layers) if problem.recompute_per_stage else 10**9
    )


def _target(region: Region, most: float) -> float:
    """The target of a region: half way between its bound and `most`, just below the best.

    After some tries, or close to `most`, it is `most`. While no plan is known it grows from the
    bound.
    """
    if most == math.inf:
        return (region.bound + 1e-9) * 1.001**2**region.tries if region.tries < 14 else most
    return (
        most
        if region.tries >= _EAGER or most - region.bound < 1e-4 * most
        else (region.bound + most) / 2
    )


def _parts(
    region: Region, target: float, e: float, x: float, u: float, least: float
) -> list[Region]:
    """The parts of a region that may hold a plan below `target`, given a plan that is not below it.

    Cut at U = t, the first has none with U = u > t, the second none with X = x > target - t or E =
    e > target - t - `region.x`; at X likewise. Where no t does both by `least` seconds, it lies in
    the middle, and only the first part is rid of the plan.
    """
    bound, u0, u1, x0, x1, _ = region
    from_u, from_x = max(u0, target - max(x, x0 + e)), max(x0, target - u0 - e)
    if max(u - from_u, x - from_x) < least:
        from_u, from_x = u0, x0
    if e < least or u - from_u >= x - from_x:
        t = (from_u + u) / 2
        return [Region(bound, u0, t, x0, x1), Region(max(bound, t + x0), t, u1, x0, x1)]
    t = (from_x + x) / 2
    return [Region(bound, u0, u1, x0, t), Region(max(bound, u0 + t), u0, u1, t, x1)]
