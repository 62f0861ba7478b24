"""The best contiguous or nested plan under the physical cost and the memory limit, with a proof.

Probes (`partopt.planners.optimal.families`) tell whether a bound can be kept, and how; the search
narrows the interval between the largest bound without a plan and the best plan.

Asynchronous schedules: the least period (`partopt.planners.optimal.bisection`). Synchronous ones:
the least iteration (`partopt.planners.optimal.iteration`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from partopt.cost.kernels import passed_s, replica_counts
from partopt.cost.period import binding, objective_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Decision, Partition, Problem, certify
from partopt.cost.tolerances import OPTIMAL, SUM
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners.optimal.bisection import bisect_minimum
from partopt.planners.optimal.bounds import Bounds, Counts
from partopt.planners.optimal.families import FamilyProbe, families
from partopt.planners.optimal.iteration import least_iteration
from partopt.planners.optimal.ties import break_ties
from partopt.planners.placing import stage_count

FAMILIES = (CONTIGUOUS, NESTED)  # of the plans that are searched
_LONG = 400  # layers from which a search begins with the best plan of a coarser chain
_GRAIN = 8  # layers of one of its


def plan(problem: Problem) -> Decision:
    """The best plan within the memory, by period or iteration.

    Raises PartoptError where no plan fits.
    """
    if problem.stages is not None:
        stage_count(problem)
    problem = drop_useless_recompute(problem)
    probes = list(families(problem))
    incumbent, value = _incumbent(problem)
    best, value, lower = _search(probes, value)
    best = best or incumbent
    if best is None:
        raise _nothing_fits(problem)
    best = break_ties(best, probes)
    how = proof(problem, all(probe.complete and not probe.gave_up for probe in probes))
    met = value <= lower * (1 + OPTIMAL)
    return Decision(best, certify(value, value if met else lower, status(value, lower), how))


def _nothing_fits(problem: Problem) -> PartoptError:
    may_recompute = problem.recompute or problem.recompute_per_stage
    more = "" if may_recompute else ", or let stages recompute (`recompute=auto`)"
    sizes = [m.microbatch_size for m in problem.profile.measured()] if problem.profile else []
    smaller = any(size < problem.chain.microbatch_size for size in sizes)
    return PartoptError(
        "optimal: no plan fits the memory",
        f"give {'smaller microbatches, ' if smaller else ''}larger devices or more of them{more}",
        ANSWER_IS_NO,
        code="no-plan-fits",
        memory_bytes=problem.memory_bytes,
    )


def drop_useless_recompute(problem: Problem) -> Problem:
    """The problem, in which no stage chooses to recompute where memory is not limited.

    Recomputing only takes time there.
    """
    return replace(
        problem,
        recompute_per_stage=problem.recompute_per_stage and problem.memory_bytes is not None,
    )


def _incumbent(problem: Problem) -> tuple[Partition | None, float]:
    """A plan to begin with, or `None`, and its objective.

    The best plan of a coarser chain; where the stages of a synchronous schedule may choose, also of
    those with all of them recomputing or none.
    """
    best, value = coarse_incumbent(problem, _LONG, _GRAIN)
    if not problem.recompute_per_stage or problem.microbatches is None:
        return best, value
    for recompute in (False, True):
        alike = replace(problem, recompute_per_stage=False, recompute=recompute)
        found, value, _ = _search(list(families(alike)), value)
        if found is not None:
            stages = [replace(stage, recompute=recompute) for stage in found.stages]
            best = replace(found, stages=stages)
    return best, value


def coarse_incumbent(problem: Problem, long: int, grain: int) -> tuple[Partition | None, float]:
    """The best plan that cuts before every `grain`-th layer alone, and its objective.

    `None` and infinity for a chain of fewer than `long` layers, or where there is no plan.
    """
    bounds = [*range(0, problem.chain.layers, grain), problem.chain.layers]
    if problem.chain.layers < long or (
        problem.stages is not None and len(bounds) <= problem.stages
    ):
        return None, math.inf
    coarse = replace(problem, cut_at=bounds[:-1]).coarsen()
    found, _, _ = _search(list(families(coarse)), math.inf)
    if found is None:
        return None, math.inf
    stages = [
        replace(stage, start=bounds[stage.start], stop=bounds[stage.stop]) for stage in found.stages
    ]
    partition = replace(found, stages=stages)
    return partition, objective_s(partition, problem)


def status(seconds: float, lower_bound_s: float) -> str:
    """What is proven of a plan with this objective: that it is optimal, or its largest gap."""
    if seconds <= lower_bound_s * (1 + OPTIMAL):
        return "optimal"
    return f"gap {100 * (seconds / lower_bound_s - 1):.3g} %" if lower_bound_s else "gap"


def proof(problem: Problem, complete: bool) -> str:
    """How a lower bound is obtained, by probes that are `complete` or not.

    Complete: they kept every entry and gave up nowhere.
    """
    what = "period" if problem.microbatches is None else "iteration"
    how = (
        "exhaustive feasibility search found none"
        if complete
        else "infeasible even if replicas could use any ranks"
    )
    return f"no {' or '.join(FAMILIES)} plan has a shorter {what}: {how}"


def below(problem: Problem, seconds: float) -> tuple[Partition | None, float]:
    """The best plan with objective below `seconds`, or `None`, and a lower bound on all plans."""
    best, _, lower = _search(list(families(drop_useless_recompute(problem.coarsen()))), seconds)
    return best, lower


def _search(probes: Sequence[FamilyProbe], value: float) -> tuple[Partition | None, float, float]:
    """The best plan of all families below `value`, its objective, and a lower bound."""
    problem, best, lower = probes[0].problem, None, math.inf
    search = _least_period if problem.microbatches is None else least_iteration
    every = replica_counts(problem)
    if problem.microbatches is not None and len(every) > 1:
        every.sort(key=lambda counts: sum(probes[0].floors_s(counts)))
    for done, counts in enumerate(every):
        problem.progress("optimal: replicas", done, len(every))
        if problem.stages is not None and counts[0] * problem.stages > problem.topology.devices:
            continue
        for probe in probes:
            found, value, bound = search(probe, counts, value)
            proved = probe.complete and not (probe.gave_up and problem.microbatches is None)
            best, lower = found or best, min(lower, bound if proved else _floor_s(probe, counts))
    return best, value, lower


def _floor_s(probe: FamilyProbe, counts: Counts) -> float:
    """Seconds that no plan goes below, whatever a probe found.

    Asynchronous: the compute shared among all devices, or the largest period refuted. Synchronous:
    one microbatch's pass.
    """
    problem, layers = probe.problem, probe.layers
    if problem.microbatches is None:
        shared = float(layers.compute[layers.first_mode, -1]) / problem.topology.devices * (1 - SUM)
        return max(shared, probe.refuted_s(counts))
    return float(passed_s(layers, 0, problem.chain.layers, layers.first_mode)) * (1 - SUM)


def _least_period(
    probe: FamilyProbe, counts: Counts, value: float
) -> tuple[Partition | None, float, float]:
    """The plan with the least period below `value`, that period, and a lower bound."""
    problem, lower = probe.problem, _floor_s(probe, counts)
    slack = SUM * (value if value < math.inf else lower)
    return bisect_minimum(
        lambda T: probe.find(Bounds(T), counts, problem.stages),
        lambda found: binding(found, problem).seconds,
        min(lower, value),
        value,
        slack,
    )
