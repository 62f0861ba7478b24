"""The best contiguous or nested plan under the physical cost and the memory limit, with a proof.

Probes (`partopt.planners.optimal.families`) tell whether a bound can be kept, and how; the search
narrows the interval between the largest bound without a plan and the best plan.

What is least is the period of an asynchronous schedule, the iteration of a synchronous one
(`partopt.planners.optimal.bisection`): each is the largest of terms that belong to one stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from partopt.cost.iteration import objective_s
from partopt.cost.kernels import replica_counts
from partopt.cost.problem import (
    CONTIGUOUS,
    EXCHANGE,
    FREE,
    NESTED,
    Decision,
    Partition,
    Problem,
    certify,
)
from partopt.cost.tolerances import SUM
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners.optimal import refuters
from partopt.planners.optimal.bisection import bisect_minimum
from partopt.planners.optimal.families import FamilyProbe, families
from partopt.planners.optimal.probes import Counts
from partopt.planners.optimal.ties import break_ties
from partopt.planners.placing import stage_count
from partopt.schedules import schedule
from partopt.units import format_bytes

FAMILIES = (CONTIGUOUS, NESTED)  # of the plans that are searched
PROOF = "a search for plans below the bound found none"
_LONG = 400  # layers from which a search begins with the best plan of a coarser chain
_GRAIN = 8  # layers of one of its
_ROUGH = 0.02  # relative: the precision with which a long chain is searched first
_FAR = 1.25  # times a bound of a family that gave up: others are asked for plans below it alone
_APART = 1.1  # times the bound that this proves: nearer, the search goes on until it is exact


def plan(problem: Problem) -> Decision:
    """The best plan within the memory, by period or iteration.

    Raises PartoptError where no plan fits.
    """
    if problem.stages is not None:
        stage_count(problem)
    problem = drop_useless_recompute(problem)
    best, value, lower = least(problem)
    if best is None:
        raise _nothing_fits(problem)
    lower = refuters.bound_s(problem, lower)
    return Decision(best, certify(max(value, lower), lower, scope(problem), PROOF))


def least(
    problem: Problem, among: Sequence[str] = FAMILIES
) -> tuple[Partition | None, float, float]:
    """The plan of the families `among` with the least objective, that, and a lower bound.

    None and infinity where no plan fits. Of plans with the same objective one of fewest stages.
    """
    probes = [probe for probe in families(problem) if probe.family in among]
    incumbent, value = coarse_incumbent(problem, _LONG, _GRAIN)
    best, value, lower = _search(probes, value, SUM if incumbent is None else _ROUGH)
    best = best or incumbent
    if incumbent and value <= _APART * lower:  # else some family gave up, and no more is proved
        finer, value, lower = _search(probes, value)
        best = finer or best
    return (best and break_ties(best, probes)), value, lower


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
    partition = found.on_layers(bounds)
    return partition, objective_s(partition, problem)


def scope(problem: Problem) -> str:
    """The plans of which the bound speaks, in words."""
    entry, chain, M = schedule(problem.schedule), problem.chain, problem.microbatches
    may, limit = problem.recompute_per_stage, problem.memory_bytes
    words = [
        f"{' and '.join(FAMILIES)} plans under {problem.schedule}",
        "any warm-up" if entry.takes_warmup else "",
        f"{'' if M is None else f'{M} '}microbatches of {chain.microbatch_size}",
        "" if limit is None else f"{format_bytes(limit)} a device",
        "" if problem.stages is None else f"{problem.stages} stages",
        "" if problem.replication == FREE else f"replication {problem.replication}",
        "stages recompute or not" if may else "all recomputed" if problem.recompute else "",
        "tied layers together" if problem.tied != EXCHANGE and chain.tied else "",
        "serial transfers" if problem.serial_transfers else "",
        "blocking all-reduces" if problem.blocking_allreduce else "",
        _places_to_cut(problem),
    ]
    return ", ".join(word for word in words if word)


def _places_to_cut(problem: Problem) -> str:
    """How many there are, where there are fewer than layers in the profile, in words."""
    places = len(problem.boundaries()) - 2
    fewer = problem.profile and places < len(problem.profile.layers) - 1
    return f"{places} places to cut" if fewer else ""


def below(problem: Problem, seconds: float) -> tuple[Partition | None, float]:
    """The best plan with objective below `seconds`, or `None`, and a lower bound on all plans.

    No probe runs where all stages together already take longer.
    """
    stated = drop_useless_recompute(problem.coarsen())
    if refuters.refuter(stated)(seconds):
        return None, seconds
    best, _, lower = _search(list(families(stated)), seconds)
    return best, lower


def _search(
    probes: Sequence[FamilyProbe], value: float, precision: float = SUM
) -> tuple[Partition | None, float, float]:
    """The best plan of all families below `value`, its objective, and a lower bound."""
    problem, best, lower, far = probes[0].problem, None, math.inf, math.inf
    every = replica_counts(problem)
    rough = precision > SUM
    if rough and problem.microbatches is None:  # nested ones give up soonest there
        probes = probes[::-1]
    for done, counts in enumerate(every):
        problem.progress("optimal: replicas", done, len(every))
        if problem.stages is not None and counts[0] * problem.stages > problem.topology.devices:
            continue
        for probe in probes:
            found, least_s, bound = _least(probe, counts, min(value, far), precision)
            if found is not None:
                best, value = found, least_s
            if not probe.complete or probe.gave_up:
                probe.refute_between(_floor_s(probe, counts), min(value, far), counts)
                bound = _floor_s(probe, counts)
                if rough and value > _FAR * bound:
                    far = bound
            lower = min(lower, bound)
    return best, value, lower


def _floor_s(probe: FamilyProbe, counts: Counts) -> float:
    """Seconds that no plan goes below, whatever a probe found.

    The compute shared among all devices, one pass of an iteration, or the largest bound refuted.
    """
    layers = probe.layers
    compute = float(layers.compute[layers.first_mode, -1]) * max(layers.M, 1)
    shared = compute / probe.problem.topology.devices
    one_pass = float(layers.behind[0]) if layers.M else 0.0
    return max(max(shared, one_pass) * (1 - SUM), probe.refuted_s(counts))


def _least(
    probe: FamilyProbe, counts: Counts, value: float, precision: float = SUM
) -> tuple[Partition | None, float, float]:
    """The plan with the least period or iteration below `value`, that, and a lower bound.

    Relative to these it is the least to `precision`.
    """
    problem, lower = probe.problem, _floor_s(probe, counts)
    slack = precision * (value if value < math.inf else lower)
    return bisect_minimum(
        lambda T: probe.find(T, counts, problem.stages),
        lambda found: objective_s(found, problem),
        min(lower, value),
        value,
        slack,
        rough=precision > SUM,
    )
