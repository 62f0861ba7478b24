"""Which synchronous schedule: with how many stages on a device, pipelines side by side, samples in a microbatch, and recomputed or not.

Every grid of d pipelines of P/d devices is balanced by GPipe's criterion, estimated by the closed forms of `partopt.cost.period`, and the
most promising are simulated. What takes longer than the best found so far even without a bubble is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from partopt.cost.flight import CHUNKED, SYNCHRONOUS
from partopt.cost.period import binding, iteration_s
from partopt.cost.price import price
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem, consecutive
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.plan import Plan
from partopt.planners import gpipe
from partopt.planners.placing import placed, stage_multiple, stages_a_device
from partopt.schedules import refusal, schedule
from partopt.schedules.layout import LOOPED, STRAIGHT
from partopt.simulator.judge import judged

# P   devices; d   pipelines side by side; v   stages on a device; S   stages; M   microbatches of an iteration

CHUNKS = (2, 4)  # v of the schedules that take any
SPLIT_SHARE = 1 / 3  # of 1F1B's bubble that is left where backwards are split, with F = I = W
ACTION_BUDGET = 4_000_000  # simulated in all; the best estimate of each schedule is simulated whatever it takes

Stated = Callable[[int, bool], Problem]  # the problem at a microbatch size, recomputed or not


@dataclass(frozen=True)
class Candidate:
    """A partition under a schedule, with the seconds of a sample that the closed forms estimate, and those that it cannot go below."""

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
    """The best judged plan under every synchronous schedule but the naive one, fastest first, those that fit before those that do not.

    `stated` gives the problem at each of the microbatch `sizes` and `recomputes`, and raises PartoptError for what cannot be. PartoptError
    where nothing can run.
    """
    found: dict[str, Plan] = {}
    spent, best_s = 0, float("inf")
    candidates = sorted(_candidates(sizes, recomputes, stated), key=lambda candidate: candidate.estimate_s)
    for done, candidate in enumerate(candidates):
        problem = candidate.problem
        problem.progress("simulating schedules", done, len(candidates))
        known = found.get(problem.schedule)
        settled = known is not None and known.fits(problem.memory_bytes)
        if settled and (candidate.least_s >= best_s or spent > ACTION_BUDGET):
            continue
        spent += candidate.actions
        plan = judged(price(candidate.partition, problem, "grid"))
        fits = plan.fits(problem.memory_bytes)
        if known is None or (fits, plan.predicted.samples_per_s) > (settled, known.predicted.samples_per_s):
            found[problem.schedule] = plan
        best_s = min(best_s, 1 / plan.predicted.samples_per_s) if fits else best_s
    if not found:
        raise PartoptError("no schedule can run this", "give more microbatches, or fewer devices", ANSWER_IS_NO)
    return sorted(found.values(), key=lambda plan: (not plan.fits(problem.memory_bytes), -plan.predicted.samples_per_s))


def _candidates(sizes: Sequence[int], recomputes: Sequence[bool], stated: Stated) -> Iterator[Candidate]:
    refusals = []
    for size in sizes:
        for recompute in recomputes:
            try:
                problem = stated(size, recompute)
            except PartoptError as error:
                refusals.append(error)
                continue
            boundaries: dict[int, list[int]] = {}
            for own in _schedules(problem):
                yield from _grids(own, boundaries)
    if refusals and len(refusals) == len(sizes) * len(recomputes):
        raise PartoptError.together(refusals)


def _schedules(problem: Problem) -> Iterator[Problem]:
    """The problem under every schedule, and every v where a schedule takes any."""
    for name in (*SYNCHRONOUS, *CHUNKED):
        if name != "naive":
            for v in CHUNKS if schedule(name).shape == LOOPED else CHUNKS[:1]:
                yield replace(problem, schedule=name, chunks=v)


def _grids(problem: Problem, boundaries: dict[int, list[int]]) -> Iterator[Candidate]:
    """The grids of d pipelines of P/d devices under the schedule of `problem`; `boundaries` keeps the balanced partition into S stages."""
    P, M = problem.topology.devices, problem.microbatches
    assert M is not None
    for d in (d for d in range(1, P + 1) if P % d == 0 and M % d == 0):
        S = P // d * stages_a_device(problem)
        v = stage_multiple(problem)
        if d == P and problem.schedule not in ("1f1b", "gpipe"):
            continue  # pipelines of one device: data parallelism, whatever it is called
        if len(problem.boundaries()) <= S or S % v or refusal(problem.schedule, P // d, v, M // d):
            continue
        if S not in boundaries:
            balanced = gpipe.plan(replace(problem.coarsened(), stages=S, schedule="1f1b"))
            bounds = problem.boundaries()
            boundaries[S] = [*(bounds[stage.start] for stage in balanced.stages), bounds[-1]]
        yield from _candidate(problem, consecutive(boundaries[S], [d] * S))


def _candidate(problem: Problem, stages: list[Assignment]) -> Iterator[Candidate]:
    """The partition with its replicas next to each other; and where both are on several levels, with its pipelines next to each other."""
    shape, S, d = schedule(problem.schedule).shape, len(stages), len(stages[0].ranks)
    partitions = [placed(Partition(CONTIGUOUS, stages), problem, "grid")]
    if shape == STRAIGHT and d > 1 and S > 1 and len(problem.topology.levels) > 1:
        partitions.append(Partition(NESTED, [replace(stage, ranks=range(s, S * d, S)) for s, stage in enumerate(stages)]))
    M, b = problem.microbatches, problem.chain.microbatch_size
    assert M is not None
    for partition in partitions:
        least = M * binding(partition, problem).seconds
        bubble = (iteration_s(partition, problem) - least) * (SPLIT_SHARE if schedule(problem.schedule).split else 1.0)
        yield Candidate(problem, partition, (least + bubble) / (M * b), least / (M * b))
