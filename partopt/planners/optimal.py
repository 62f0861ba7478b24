"""The best contiguous or nested plan under the physical cost and the memory limit, with a proof.

Probes (`partopt.planners.families`) tell whether a bound can be kept, and how. Bisection that jumps
to the value of each plan found narrows the interval between the largest bound without a plan and
the best plan, until they meet: Nicol, "Rectilinear partitioning of irregular data parallel
computations", JPDC 1994; Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
partitioning", JPDC 2004.

Asynchronous schedules: the least period. Synchronous ones: the least iteration
(`partopt.planners.iteration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partopt.cost.kernels import passed_s, replica_counts
from partopt.cost.period import binding, objective_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Decision, Partition, Problem, certify
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners.families import Screened, families
from partopt.planners.iteration import least_iteration
from partopt.planners.placing import stage_count
from partopt.planners.searching import ENDLESS, TOLERANCE, Counts, least
from partopt.planners.ties import settled

MET = 1e-10  # relative: how near to its lower bound a plan is called optimal
FAMILIES = (CONTIGUOUS, NESTED)  # of the plans that are searched
_LONG = 400  # layers from which a search begins with the best plan of a coarser chain
_GRAIN = 8  # layers of one of its


def plan(problem: Problem) -> Decision:
    """The best plan within the memory, by period or iteration.

    Raises PartoptError where no plan fits.
    """
    if problem.stages is not None:
        stage_count(problem)
    searched = eased(problem)
    probes = list(families(searched))
    rough, value = _first(searched)
    best, value, lower = _search(probes, value)
    best = best or rough
    if best is None:
        more = (
            ""
            if problem.recompute or problem.recompute_per_stage
            else ", or let stages recompute (--recompute auto)"
        )
        raise PartoptError(
            "optimal: no plan fits the memory",
            f"give smaller microbatches, larger devices or more{more}",
            ANSWER_IS_NO,
        )
    best, how = (
        settled(best, probes),
        proof(problem, all(probe.complete and not probe.gave_up for probe in probes)),
    )
    met = value <= lower * (1 + MET)
    return Decision(best, certify(value, value if met else lower, status(value, lower), how))


def eased(problem: Problem) -> Problem:
    """The problem, in which no stage recomputes where memory is not limited: that only takes
    time.
    """
    return replace(
        problem,
        recompute_per_stage=problem.recompute_per_stage and problem.memory_bytes is not None,
    )


def _first(problem: Problem) -> tuple[Partition | None, float]:
    """A plan to begin with, and its objective: of a coarser chain; where stages may choose, with
    all of them recomputing or none.
    """
    best, value = _roughly(problem)
    if not problem.recompute_per_stage or problem.microbatches is None:
        return best, value
    for recompute in (False, True):
        found, value, _ = _search(
            list(families(replace(problem, recompute_per_stage=False, recompute=recompute))), value
        )
        best = (
            best
            if found is None
            else replace(
                found, stages=[replace(stage, recompute=recompute) for stage in found.stages]
            )
        )
    return best, value


def _roughly(problem: Problem) -> tuple[Partition | None, float]:
    """The best plan of a long chain that cuts before every `_GRAIN`-th layer alone, and its
    objective: where to begin.
    """
    bounds = [*range(0, problem.chain.layers, _GRAIN), problem.chain.layers]
    if problem.chain.layers < _LONG or (
        problem.stages is not None and len(bounds) <= problem.stages
    ):
        return None, ENDLESS
    found, _, _ = _search(list(families(replace(problem, cut_at=bounds[:-1]).coarsened())), ENDLESS)
    if found is None:
        return None, ENDLESS
    stages = [
        replace(stage, start=bounds[stage.start], stop=bounds[stage.stop]) for stage in found.stages
    ]
    partition = replace(found, stages=stages)
    return partition, objective_s(partition, problem)


def status(seconds: float, lower_bound_s: float) -> str:
    """What is proven of a plan with this objective: that it is optimal, or by how much at most it
    is not.
    """
    if seconds <= lower_bound_s * (1 + MET):
        return "optimal"
    return f"gap {100 * (seconds / lower_bound_s - 1):.3g} %" if lower_bound_s else "gap"


def proof(problem: Problem, complete: bool) -> str:
    """How a lower bound is obtained, where the probes kept every entry and gave up nowhere, or
    not.
    """
    what = "period" if problem.microbatches is None else "iteration"
    how = "no probe finds one" if complete else "no ranks, wherever they lie, would do"
    return f"no {' or '.join(FAMILIES)} plan has a shorter {what}: {how}"


def below(problem: Problem, seconds: float) -> tuple[Partition | None, float]:
    """The best plan whose objective is less than `seconds`, `None` where there is none, and what no
    plan goes below.
    """
    best, _, lower = _search(list(families(eased(problem.coarsened()))), seconds)
    return best, lower


def _search(probes: Sequence[Screened], value: float) -> tuple[Partition | None, float, float]:
    """The best plan of all families whose objective is less than `value`, that objective, and a
    lower bound.
    """
    problem, best, lower = probes[0].problem, None, ENDLESS
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


def _floor_s(probe: Screened, counts: Counts) -> float:
    """What no plan goes below, whatever a probe found: the compute shared among all devices, or one
    microbatch's pass.
    """
    problem, layers = probe.problem, probe.layers
    if problem.microbatches is None:
        shared = (
            float(layers.compute[layers.first_mode, -1])
            / problem.topology.devices
            * (1 - TOLERANCE)
        )
        return max(shared, probe.refused_s(counts))
    return float(passed_s(layers, 0, problem.chain.layers, layers.first_mode)) * (1 - TOLERANCE)


def _least_period(
    probe: Screened, counts: Counts, value: float
) -> tuple[Partition | None, float, float]:
    """The plan with the least period below `value`, that period, and a lower bound."""
    problem, lower = probe.problem, _floor_s(probe, counts)
    slack = TOLERANCE * (value if value < ENDLESS else lower)
    return least(
        lambda T: probe.find(T, 0.0, counts, problem.stages),
        lambda found: binding(found, problem).seconds,
        min(lower, value),
        value,
        slack,
    )
