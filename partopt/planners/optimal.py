"""The best contiguous plan under the physical cost and the memory limit, with a proof.

A probe (`partopt.planners.probe`) tells whether a bound can be kept, and how. Bisection that jumps to the value of each plan found narrows
the interval between the largest bound without a plan and the best plan, until they meet: Nicol, "Rectilinear partitioning of irregular
data parallel computations", JPDC 1994; Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", JPDC 2004.

Asynchronous schedules: the least period. Synchronous ones: the least iteration (`partopt.planners.iteration`).
"""

from __future__ import annotations

from partopt.cost.kernels import passed_s, replica_counts
from partopt.cost.period import binding
from partopt.cost.problem import CONTIGUOUS, Partition, Problem
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners.iteration import least_iteration
from partopt.planners.placing import stage_count
from partopt.planners.searching import ENDLESS, TOLERANCE, Counts, Probe, least

FEWEST_STAGES_LIMIT = 20_000  # layers times stages up to which plans of one period are searched for the one with the fewest stages


def plan(problem: Problem) -> Partition:
    """The best plan within the memory, by period or iteration. Raises PartoptError where no plan fits."""
    if problem.stages is not None:
        stage_count(problem)
    probe = Probe(problem)
    best, value, lower = _search(probe, ENDLESS)
    if best is None:
        more = "" if problem.recompute or problem.recompute_per_stage else ", or let stages recompute (--recompute auto)"
        raise PartoptError("optimal: no plan fits the memory", f"give smaller microbatches, larger devices or more{more}", ANSWER_IS_NO)
    if problem.stages is None and problem.microbatches is None:
        best = _with_fewest_stages(probe, best, value)
    if value <= lower * (1 + 3 * TOLERANCE):
        return Partition(CONTIGUOUS, best.stages, value, "optimal")
    return Partition(CONTIGUOUS, best.stages, value, f"gap {100 * (value / lower - 1):.3g} %" if lower else "gap", lower)


def below(problem: Problem, seconds: float) -> tuple[Partition | None, float]:
    """The best plan whose objective is less than `seconds`, `None` where there is none, and what no plan goes below."""
    best, _, lower = _search(Probe(problem.coarsened()), seconds)
    return best, lower


def _search(probe: Probe, value: float) -> tuple[Partition | None, float, float]:
    """The best plan whose objective is less than `value`, that objective, and a lower bound."""
    problem, best, lower = probe.problem, None, 0.0
    every = replica_counts(problem)
    if problem.microbatches is not None and len(every) > 1:
        every.sort(key=lambda counts: sum(probe.floors_s(counts)))
    for done, counts in enumerate(every):
        problem.progress("optimal: replicas", done, len(every))
        if problem.stages is not None and counts[0] * problem.stages > problem.topology.devices:
            continue
        search = _least_period if problem.microbatches is None else least_iteration
        found, value, bound = search(probe, counts, value)
        best, lower = found or best, bound if lower == 0.0 else min(bound, lower)
    return best, value, lower if probe.complete else _floor_s(probe)


def _floor_s(probe: Probe) -> float:
    """What no plan goes below, whatever a probe found: the compute shared among all devices, or one microbatch's pass."""
    problem, layers = probe.problem, probe.layers
    if problem.microbatches is None:
        return float(layers.compute[layers.first_mode, -1]) / problem.topology.devices * (1 - TOLERANCE)
    passes = problem.microbatches if problem.schedule == "naive" else 1
    return passes * float(passed_s(layers, 0, problem.chain.layers, layers.first_mode)) * (1 - TOLERANCE)


def _least_period(probe: Probe, counts: Counts, value: float) -> tuple[Partition | None, float, float]:
    """The plan with the least period below `value`, that period, and a lower bound."""
    problem, lower = probe.problem, _floor_s(probe)
    slack = TOLERANCE * (value if value < ENDLESS else lower)
    return least(
        lambda T: probe.find(T, 0.0, counts, problem.stages), lambda found: binding(found, problem).seconds, min(lower, value), value, slack
    )


def _with_fewest_stages(probe: Probe, best: Partition, period: float) -> Partition:
    """Of the plans with this period one with the fewest stages; `best` itself where the tables for that would be large."""
    problem = probe.problem
    if problem.chain.layers * len(best.stages) > FEWEST_STAGES_LIMIT:
        return best
    for counts in replica_counts(problem):
        for count in range(1, min(len(best.stages), problem.topology.devices // counts[0] + 1)):
            found = probe.find(period * (1 + TOLERANCE), 0.0, counts, count)
            if found is not None and binding(found, problem).seconds <= period:
                best = found
                break
    return best
