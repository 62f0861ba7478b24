"""A local search from the best plans of a schedule search: cuts, replicas and recomputation.

What a move gives is what the simulator says of it. A move is taken where the plan fits better or,
as well, is faster; the search ends where no move is, or with the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partopt.cost.period import compute_s
from partopt.cost.price import price
from partopt.cost.problem import (
    CONTIGUOUS,
    FREE,
    Assignment,
    Partition,
    Problem,
    partition_of,
)
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.layout import own_microbatches
from partopt.search.candidates import effort_of
from partopt.search.sizes import order_of
from partopt.simulator.prediction import simulate_plan

BUDGET = 800_000  # of the simulations of all moves, as `effort_of` counts
STARTS = 8  # plans from which the search begins, the best
_GAIN = 1e-6  # of the time: what a move must save


def climb(
    plans: Sequence[Plan],
    others: Sequence[Plan],
    problems: Sequence[Problem],
    recompute_per_stage: bool,
) -> list[Plan]:
    """`plans` in their order, moved or in the place of `others` that are, while that is better.

    The search begins from the best of both that are not alike; what cannot be faster than the best
    of all is not tried. `problems` are those of `partopt.search.schedule.state_problems`. With
    `recompute_per_stage` single stages may recompute, under the schedules for which the optimal
    planner can choose them.
    """
    found, left = {plan.schedule: plan for plan in plans}, BUDGET
    starts = _starts([*plans, *others])
    for done, plan in enumerate(starts):
        problem = problem_of_plan(plan, problems)
        problem.progress("moving cuts", done, len(starts))
        best = min(found.values(), key=order_of)
        climb = _Climb(problem, recompute_per_stage, plan, best, left // (len(starts) - done))
        moved = climb.run()
        left -= climb.spent
        found[moved.schedule] = min(found[moved.schedule], moved, key=order_of)
    return sorted(found.values(), key=order_of)


def move_cuts(plan: Plan, problem: Problem) -> Plan:
    """The simulated `plan` of `problem` with its cuts moved while the simulator says that it helps.

    Every stage keeps its ranks, where `problem` asks for equal replicas.
    """
    return _Climb(problem, False, plan, plan, BUDGET).run()


def _starts(plans: Sequence[Plan]) -> list[Plan]:
    """The best plans, one for each schedule, grid, microbatch size and recomputation."""
    starts: dict[object, Plan] = {}
    for plan in sorted(plans, key=_key):
        stages = [(each.replicas, each.recompute) for each in plan.stages]
        key = plan.schedule, plan.family, plan.microbatch_size, str(stages)
        starts.setdefault(key, plan)
    return list(starts.values())[:STARTS]


def problem_of_plan(plan: Plan, problems: Sequence[Problem]) -> Problem:
    """The one of `problems` that a plan is for, under its schedule.

    Its stages may choose to recompute where some do and others do not.
    """
    asked, modes = plan.microbatch_size, {stage.recompute for stage in plan.stages}
    same = [each for each in problems if each.chain.microbatch_size == asked]
    alike = next((each for each in same if {each.recompute} == modes), None)
    return replace(
        alike or same[0],
        schedule=plan.schedule,
        chunks=len(plan.stages_by_rank()[plan.stages[0].ranks[0]]),
        recompute_per_stage=alike is None,
    )


class _Climb:
    """Moves of one plan, one after the other, each of which makes it better."""

    def __init__(
        self, problem: Problem, per_stage: bool, plan: Plan, rival: Plan, budget: int
    ) -> None:
        entry = schedule(problem.schedule)
        self.problem, self.best, self.budget = problem, plan, budget
        self.rival, self.spent = rival, 0
        places = sum(stage.replicas for stage in plan.stages)
        self.effort = effort_of(len(plan.stages), places, plan.microbatches or 1)
        self.cells = problem.boundaries()
        self.may_choose = per_stage and entry.kernel is not None and bool(problem.memory_bytes)
        free = problem.replication == FREE
        self.uneven = entry.uneven and plan.family == CONTIGUOUS and free
        self.seen: set[object] = set()

    def run(self) -> Plan:
        """The best plan that the moves reach."""
        while self.spent + self.effort <= self.budget and self._step():
            pass
        return self.best

    def _step(self) -> bool:
        """Take the first move that is better; whether there is one."""
        partition = partition_of(self.best, self.problem.recompute_per_stage)
        for moved, problem in self._moves(partition):
            key = tuple(
                (each.start, each.stop, tuple(each.ranks), each.recompute) for each in moved
            )
            if self.spent + self.effort > self.budget or key in self.seen:
                continue
            self.seen.add(key)
            found = self._simulate(replace(partition, stages=moved), problem)
            if found is not None and _key(found) < _key(self.best):
                self.best, self.problem = found, problem
                return True
        return False

    def _simulate(self, partition: Partition, problem: Problem) -> Plan | None:
        """The plan of a partition; None where it cannot be better, or cannot run."""
        rival = min(self.rival, self.best, key=order_of)
        samples = problem.chain.microbatch_size * (problem.microbatches or 1)
        rival_s = samples / rival.predicted.samples_per_s
        if rival.fits and _least_s(partition, problem) >= rival_s:
            return None
        self.spent += self.effort
        try:
            return simulate_plan(price(partition, problem, "grid"))
        except PartoptError:
            return None

    def _moves(self, partition: Partition) -> Iterator[tuple[list[Assignment], Problem]]:
        """Stages one move away, and the problem that lets them be so."""
        stages = list(partition.stages)
        for moved in shift_cuts(stages, self.cells):
            yield moved, self.problem
        if self.uneven:
            for moved in change_replicas(stages, self.problem.topology.devices, self.cells):
                yield moved, self.problem
        if self.may_choose:
            free = replace(self.problem, recompute_per_stage=True)
            alike = [replace(stage, recompute=self.problem.recomputes(stage)) for stage in stages]
            for s, stage in enumerate(alike):
                changed = replace(stage, recompute=not stage.recompute)
                yield [*alike[:s], changed, *alike[s + 1 :]], free


def _key(plan: Plan) -> tuple[float, float]:
    """The order of plans: by the bytes that exceed the memory, then by the time."""
    limit, peak = plan.memory_limit_bytes, plan.peak_memory_bytes
    return max(0, peak - (peak if limit is None else limit)), -plan.predicted.samples_per_s


def _least_s(partition: Partition, problem: Problem) -> float:
    """Seconds for which the busiest device computes in an iteration; 0 where there are none."""
    busy: dict[int, float] = {}
    M = problem.microbatches or 0
    for stage in partition.stages:
        r, seconds = len(stage.ranks), compute_s(stage, problem)
        for k, rank in enumerate(stage.ranks):
            busy[rank] = busy.get(rank, 0.0) + seconds * own_microbatches(M, r, k)
    return max(busy.values())


def shift_cuts(stages: Sequence[Assignment], cells: Sequence[int]) -> Iterator[list[Assignment]]:
    """The stages with a cut, or several neighbouring ones, one of the `cells` later or earlier."""
    cuts = [stage.start for stage in stages] + [stages[-1].stop]
    place = {cell: number for number, cell in enumerate(cells)}
    for many in range(1, len(stages)):
        for first in range(1, len(stages) - many + 1):
            for step in (-1, 1):
                moved = list(cuts)
                for c in range(first, first + many):
                    moved[c] = cells[place[cuts[c]] + step]
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield [
                        replace(stage, start=start, stop=stop)
                        for stage, start, stop in zip(stages, moved[:-1], moved[1:], strict=True)
                    ]


def change_replicas(
    stages: Sequence[Assignment], devices: int, cells: Sequence[int]
) -> Iterator[list[Assignment]]:
    """The stages with one replica more or fewer, one moved, two stages joined, or one cut in two.

    Their ranks are consecutive again.
    """
    counts = [len(stage.ranks) for stage in stages]
    S, spare = len(stages), devices - sum(counts)
    for s, t in ((s, t) for s in range(S) for t in range(S)):
        if s != t and counts[s] > 1:
            more = [count - (u == s) + (u == t) for u, count in enumerate(counts)]
            yield _lay(stages, more)
    for s in range(S):
        if spare:
            yield _lay(stages, [count + (u == s) for u, count in enumerate(counts)])
        if counts[s] > 1:
            yield _lay(stages, [count - (u == s) for u, count in enumerate(counts)])
    for s in range(S - 1):
        joined = replace(stages[s], stop=stages[s + 1].stop)
        both = counts[s] + counts[s + 1]
        yield _lay([*stages[:s], joined, *stages[s + 2 :]], [*counts[:s], both, *counts[s + 2 :]])
    for s, stage in enumerate(stages):
        for cut in (cell for cell in cells if stage.start < cell < stage.stop):
            halves = [replace(stage, stop=cut), replace(stage, start=cut)]
            for r in range(1, counts[s] + bool(spare)):
                rest = max(1, counts[s] - r)
                yield _lay(
                    [*stages[:s], *halves, *stages[s + 1 :]],
                    [*counts[:s], r, rest, *counts[s + 1 :]],
                )


def _lay(stages: Sequence[Assignment], counts: Sequence[int]) -> list[Assignment]:
    """The stages on consecutive ranks, so many each."""
    firsts = [sum(counts[:s]) for s in range(len(counts))]
    return [
        replace(stage, ranks=range(first, first + count))
        for stage, first, count in zip(stages, firsts, counts, strict=True)
    ]
