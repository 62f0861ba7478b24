"""Which synchronous schedule: with how many stages on a device, pipelines side by side, samples in
a microbatch, and recomputed or not.

Every grid of d pipelines of P/d devices is balanced by GPipe's criterion and estimated by closed
forms (`partopt.search.grid`), and the most promising of each schedule are simulated first. What
cannot be faster than the best found so far under its schedule is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from partopt.cost.flight import CHUNKED, SYNCHRONOUS
from partopt.cost.period import tied_exchange_s
from partopt.cost.price import price
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners import gpipe
from partopt.planners.placing import stage_multiple, stages_a_device
from partopt.schedules import order, refusal, schedule
from partopt.schedules.layout import LOOPED, STRAIGHT, ranks_of
from partopt.search import contest
from partopt.search.grid import Grid, Stages, estimate_s, least_s, stages_between
from partopt.simulator.memory import base_memory_bytes, peak_memory_bytes
from partopt.simulator.ports import ports_of
from partopt.simulator.prediction import simulate_plan
from partopt.simulator.restate import layout_of

# P   devices; d   pipelines side by side; v   stages on a device; S   stages; M   microbatches of
#     an iteration

CHUNKS = (2, 4)  # v of the schedules that take any
# simulated in all; the best estimate of each schedule is simulated whatever it takes
ACTION_BUDGET = 4_000_000
REPLANNED = 2  # schedules with one stage a device whose best grid the optimal planner is to beat
_ROUNDING = 1e-9

Stated = Callable[[int, bool], Problem]  # the problem at a microbatch size, recomputed or not


@dataclass(frozen=True)
class Candidate:
    """A partition under a schedule, with the seconds of a sample that closed forms estimate, and
    those that it cannot go below.
    """

    problem: Problem
    partition: Partition
    estimate_s: float
    least_s: float

    @property
    def actions(self) -> int:
        """How many a simulation executes, about."""
        assert self.problem.microbatches is not None
        return 2 * len(self.partition.stages) * self.problem.microbatches


def chosen(sizes: Sequence[int], recomputes: Sequence[bool], stated: Stated) -> list[Plan]:
    """The best judged plan under every synchronous schedule but the naive one, fastest first, those
    that fit before those that do not.

    `stated` gives the problem at each of the microbatch `sizes` and `recomputes`, and raises
    PartoptError for what cannot be. PartoptError where nothing can run.
    """
    found: dict[str, Plan] = {}
    spent, limit = 0, None
    tried = sorted(
        candidates(sizes, recomputes, stated), key=lambda candidate: candidate.estimate_s
    )
    for done, candidate in enumerate(tried):
        name, limit = candidate.problem.schedule, candidate.problem.memory_bytes
        candidate.problem.progress("simulating schedules", done, len(tried))
        known = found.get(name)
        settled = known is not None and known.fits
        if known is not None and settled:
            hopeless = candidate.least_s * known.predicted.samples_per_s >= 1 - _ROUNDING
            if hopeless or spent > ACTION_BUDGET:
                continue
        plan = price(candidate.partition, candidate.problem, "grid")
        if known is not None and not _may_fit(plan, limit, exactly=not settled):
            continue
        spent += candidate.actions
        plan = simulate_plan(plan)
        if known is None or (plan.fits, plan.predicted.samples_per_s) > (
            settled,
            known.predicted.samples_per_s,
        ):
            found[name] = plan
    if not found:
        raise PartoptError(
            "no schedule can run this", "give more microbatches, or fewer devices", ANSWER_IS_NO
        )
    return sorted(found.values(), key=lambda plan: (not plan.fits, -plan.predicted.samples_per_s))


def with_free_replicas(
    plans: Sequence[Plan], stated: Stated, recompute_per_stage: bool
) -> list[Plan]:
    """`plans`, in the order of their speed; the first with one stage a device give way to the
    optimal planner's, where those are faster.

    It has any replicas, and with `recompute_per_stage` chooses the stages that recompute; samples
    of a microbatch are as they were.
    """
    found = list(plans)
    for place in [
        place for place, plan in enumerate(plans) if schedule(plan.schedule).shape == STRAIGHT
    ][:REPLANNED]:
        plan = plans[place]
        problem = replace(
            stated(plan.microbatch_size, plan.stages[0].recompute), schedule=plan.schedule
        )
        with suppress(PartoptError):
            own = contest.decided(
                "optimal", replace(problem, recompute_per_stage=recompute_per_stage)
            )
            found[place] = max(
                plan, own, key=lambda each: (each.fits, each.predicted.samples_per_s)
            )
    return sorted(found, key=lambda each: (not each.fits, -each.predicted.samples_per_s))


def _may_fit(plan: Plan, limit: int | None, exactly: bool) -> bool:
    """Whether what devices hold throughout fits; `exactly`: and what microbatches keep, by their
    order, which takes a while to write.
    """
    if limit is None:
        return True
    if base_memory_bytes(plan).max() > limit:
        return False
    return not exactly or bool(
        peak_memory_bytes(order(plan.schedule, layout_of(plan)), plan).max() <= limit
    )


def candidates(
    sizes: Sequence[int], recomputes: Sequence[bool], stated: Stated
) -> Iterator[Candidate]:
    """Every grid under every schedule that can run on it.

    PartoptError where none of the problems can be stated.
    """
    refusals = []
    grids: dict[Shape, list[Grid]] = {}
    for size in sizes:
        for recompute in recomputes:
            try:
                problem = stated(size, recompute)
            except PartoptError as error:
                refusals.append(error)
                continue
            laid = _Laid(grids)
            for own in _schedules(problem):
                yield from _on_grids(own, laid)
    if refusals and len(refusals) == len(sizes) * len(recomputes):
        raise PartoptError.together({error.message: error for error in refusals}.values())


def _schedules(problem: Problem) -> Iterator[Problem]:
    """The problem under every schedule, and every v where a schedule takes any."""
    for name in (*SYNCHRONOUS, *CHUNKED):
        if name != "naive":
            for v in CHUNKS if schedule(name).shape == LOOPED else CHUNKS[:1]:
                yield replace(problem, schedule=name, chunks=v)


Shape = tuple[str, int, int]  # how stages lie on devices, v, and d


@dataclass(frozen=True)
class _Laid:
    """What problems that differ in their schedule alone share: grids, and balanced partitions by
    their number of stages.
    """

    grids: dict[Shape, list[Grid]]
    stages: dict[int, Stages] = field(default_factory=dict)

    def grids_of(self, shape: Shape, topology: Topology) -> list[Grid]:
        """The grids of a shape: replicas next to each other; and where both are on several levels,
        pipelines next to each other.
        """
        if shape not in self.grids:
            name, v, d = shape
            pipeline = topology.devices // d
            ports = ports_of(topology)
            ranks = ranks_of(name, pipeline, v, d)
            self.grids[shape] = [Grid([_run(own) for own in ranks], ports)]
            if d > 1 and pipeline > 1 and len(topology.levels) > 1:
                nested = [[rank % d * pipeline + rank // d for rank in own] for own in ranks]
                self.grids[shape].append(Grid([_run(own) for own in nested], ports))
        return self.grids[shape]

    def balanced(self, S: int, problem: Problem) -> Stages:
        """S stages of least variance."""
        if S not in self.stages:
            found = gpipe.plan(replace(problem.coarsened(), stages=S))
            bounds = problem.boundaries()
            self.stages[S] = stages_between(
                [*(bounds[stage.start] for stage in found.partition.stages), bounds[-1]], problem
            )
        return self.stages[S]


def _run(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks as a range where they are evenly apart, which is quicker to price."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[0] + step * len(ranks), step) if step > 0 else range(0)
    return run if list(run) == list(ranks) else ranks


def _on_grids(problem: Problem, laid: _Laid) -> Iterator[Candidate]:
    """The grids of d pipelines of P/d devices that the schedule of `problem` can run on."""
    P, M, entry, v = (
        problem.topology.devices,
        problem.microbatches,
        schedule(problem.schedule),
        stage_multiple(problem),
    )
    assert M is not None
    for d in (
        d for d in range(1, P + 1) if P % d == 0 and (M % d == 0 or (entry.uneven and d < M))
    ):
        S = P // d * stages_a_device(problem)
        if d == P and problem.schedule not in ("1f1b", "gpipe"):
            continue  # pipelines of one device: data parallelism, whatever it is called
        if len(problem.boundaries()) <= S or S % v or refusal(problem.schedule, P // d, v, M // d):
            continue
        stages = laid.balanced(S, problem)
        for number, grid in enumerate(laid.grids_of((entry.shape, v, d), problem.topology)):
            family = entry.shape if entry.shape != STRAIGHT else NESTED if number else CONTIGUOUS
            yield _candidate(problem, family, stages, grid)


def _candidate(problem: Problem, family: str, stages: Stages, grid: Grid) -> Candidate:
    """The stages on a grid, estimated."""
    assert problem.microbatches is not None
    bounds, samples = stages.bounds, problem.microbatches * problem.chain.microbatch_size
    laid = [
        Assignment(start, stop, ranks)
        for start, stop, ranks in zip(bounds[:-1], bounds[1:], grid.ranks, strict=True)
    ]
    partition = Partition(family, laid)
    tied = np.array([tied_exchange_s(partition, s, problem) for s in range(len(laid))])
    seconds = estimate_s(stages, grid, problem, tied), least_s(stages, grid, problem, tied)
    return Candidate(problem, partition, *(each / samples for each in seconds))
