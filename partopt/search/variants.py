"""What a job leaves open beside cuts, replicas and warm-ups: its variants, the best estimate first.

A variant is a problem under one schedule, at one microbatch size, with one way to recompute and to
share state. Equal pipelines in closed form (`partopt.planners.grids`) say how fast it may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, zip_longest

from msgspec import structs

from partopt.cost.problem import FREE, Problem, Progress, ignore_progress
from partopt.documents.engine import PARTOPT
from partopt.errors import PartoptError, make_each
from partopt.job import Job
from partopt.options import AUTO
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.grids import Grid, GridPlan, grids
from partopt.planners.layouts import Shape, shape_of
from partopt.planners.placing import stage_count
from partopt.schedules import schedule
from partopt.search.ranking import TIE

ROOMY = 0.9  # of the memory: a plan that needs no more has no use for recomputation
REACH = 1.05  # times the best of equal pipelines: slower ones begin no search
EQUAL = 16  # of them, at most
BINDS = 1.002  # times what is estimated without a limit: memory costs at least so much


@dataclass(frozen=True, kw_only=True)
class Within:
    """What plans may be beyond what their job says, as a trainer has it.

    `schedules` are those that "auto" may choose, None for all. `equal`: stages have equally many
    replicas; `alike`: all of them recompute or none; there are `least_stages` of them.
    """

    schedules: Sequence[str] | None = None
    equal: bool = False
    alike: bool = False
    least_stages: int = 1


ANY = Within()


@dataclass(frozen=True, eq=False)
class Variant:
    """A problem, and what equal pipelines say of it in closed form.

    Where stages choose whether to recompute, `alike` are the variants in which none of them does,
    or all do.
    """

    problem: Problem
    alike: Sequence[Variant] = ()

    @cached_property
    def plain(self) -> Problem:
        """The problem of planners that do not choose which stages recompute.

        In that none does where that may fit.
        """
        able = [other for other in self.alike if other.limited_s < math.inf]
        return [*able, *self.alike, self][0].problem

    @cached_property
    def coarse(self) -> tuple[Problem, list[int]]:
        """The problem of a chain that is short enough to plan for, and its boundaries in layers."""
        return optimal.coarsen(self.problem)

    @cached_property
    def grids(self) -> list[GridPlan]:
        """Its grids, in the order of their estimates; of stages that choose, those alike."""
        if self.alike:
            every = (grid for other in self.alike for grid in other.grids)
            return sorted(every, key=lambda grid: grid.estimate_s)
        return grids(self.coarse[0])

    @cached_property
    def fewer(self) -> list[Variant]:
        """The same on fewer members of the outermost level: one less, and a power of two.

        Those are left out that are too few for what is asked, such as a number of stages.
        """
        problem = self.problem
        topology, size = problem.topology, problem.topology.levels[-1].size
        if size == 1:
            return []
        inside, power = topology.devices // size, 1 << (size - 1).bit_length() - 1
        found = []
        for n in dict.fromkeys([size - 1, power]):
            key = "fewer", id(topology), n
            fewer = problem.known.once(key, partial(topology.resize, inside * n))
            smaller = problem.with_(topology=fewer)
            with suppress(PartoptError):
                stage_count(smaller)
                found.append(Variant(smaller))
        return found

    @cached_property
    def costs(self) -> StageCosts:
        """What its stages take, in the short chain."""
        return StageCosts(self.coarse[0])

    @cached_property
    def starts(self) -> list[Shape]:
        """The plans of the dynamic program, those that are estimated to be fastest first.

        On many devices equal pipelines are in turn with them: estimates compare plans of one kind
        alone, because unequal stages keep each other waiting.
        """
        problem, costs = self.problem, self.costs
        equal = self._equal() if optimal.are_many(problem) else []
        found = in_turn([] if equal and costs.even else optimal.plans(costs), equal)
        return [shape for shape in found if shape.stages >= problem.least_stages]

    def _equal(self) -> list[Shape]:
        """Its grids that may be fastest, or where none of them fits the roomiest."""
        grids = dict[Grid, GridPlan]()
        for plan in self.grids:
            if self.costs.short or plan.may_fit():
                grids.setdefault(plan.grid, plan)
        able = list(grids.values())
        roomy = sorted(able[EQUAL:], key=lambda plan: float(plan.needs_bytes.max()))
        every = (list(self._cut(plans)) for plans in (able[:EQUAL], roomy[:EQUAL]))
        found = sorted(next(filter(None, every), []), key=lambda pair: pair[0])
        return [shape for _, shape in found]

    def _cut(self, plans: Iterable[GridPlan]) -> Iterator[tuple[float, Shape]]:
        """Grids cut where the slowest stage is fastest in the memory, with their estimates.

        The best estimate in closed form comes first.
        """
        costs, best_s = self.costs, math.inf
        for plan in plans:
            if plan.estimate_s > REACH * best_s:
                return
            shape = shape_of(plan.partition, self.problem.topology.devices)
            for full in (True, False) if costs.short else (False,):
                cut = optimal.recut(costs, shape, costs.N, full)
                if cut is not None:
                    estimate_s = costs.estimate_s(cut)
                    best_s = min(best_s, estimate_s / self.problem.chain.microbatch_size)
                    yield estimate_s, cut

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of a sample of the best plan that fits, about; infinite where none does.

        That is a grid; where memory keeps an asynchronous schedule from the best one, pipelines of
        unequal stages may fit that are faster.
        """
        if self.alike:
            return min(other.estimate_s for other in self.alike)
        problem, best_s = self.problem, self.limited_s
        if problem.microbatches is None and self.is_limited and self.starts:
            one_s = self.costs.estimate_s(self.starts[0]) / problem.chain.microbatch_size
            best_s = min(best_s, one_s)
        return best_s

    @cached_property
    def limited_s(self) -> float:
        """Seconds of a sample on the best of its grids that fit; infinite where none does."""
        best_s = math.inf
        for grid in self.grids:
            if grid.estimate_s >= best_s:
                break
            best_s = min(best_s, grid.limited_s)
        return best_s

    @cached_property
    def is_limited(self) -> bool:
        """Whether memory keeps it from its best grid."""
        return bool(self.grids) and self.limited_s > BINDS * self.grids[0].estimate_s

    @property
    def may_fit(self) -> bool:
        """Whether a plan that fits is estimated, or not ruled out by a count of devices."""
        overlaps = schedule(self.problem.schedule).overlaps
        return self.estimate_s < math.inf or (overlaps and self.costs.may_fit)

    @property
    def is_roomy(self) -> bool:
        """Whether its best grid leaves so much memory that recomputation is of no use."""
        limit = self.problem.memory_bytes
        return bool(self.grids) and (
            limit is None or float(self.grids[0].needs_bytes.max()) <= ROOMY * limit
        )

    @cached_property
    def least_bytes(self) -> float:
        """Bytes that a device of its roomiest grid needs, about; infinite where it has none."""
        if self.alike:
            return min(other.least_bytes for other in self.alike)
        return min((float(grid.needs_bytes.max()) for grid in self.grids), default=math.inf)


def in_turn(one: Iterable[Shape], other: Iterable[Shape]) -> list[Shape]:
    """The shapes of both, one of each in turn, none twice."""
    pairs = zip_longest(one, other)
    return list(dict.fromkeys(shape for pair in pairs for shape in pair if shape is not None))


def least_s(problem: Problem) -> float:
    """Seconds of a sample that no plan goes below: all devices compute all the time."""
    chain = problem.chain
    busy_s = float(chain.busy_prefix(problem.all_recompute)[-1])
    return busy_s / problem.topology.devices / chain.microbatch_size


def variants_of(
    job: Job, name: str, within: Within, progress: Progress = ignore_progress
) -> list[Variant]:
    """The variants of a job under the schedule `name`, plain ones before others.

    Where there are several microbatch sizes, `progress` is told of which. PartoptError where it can
    be stated at none of them.
    """
    sizes = job.sizes or [measured.microbatch_size for measured in job.profile.measured()]

    def at_size(size: int) -> list[Variant]:
        report_progress = part_of(progress, f"microbatch {size}", len(sizes))
        return list(_at_size(job, name, size, within, report_progress))

    return list(chain.from_iterable(make_each(sizes, at_size)))


def part_of(progress: Progress, part: str, parts: int) -> Progress:
    """Reports of what is being done that say in which part, where there are several."""
    if parts == 1:
        return progress
    return lambda what, done, total: progress(f"{part}: {what}", done, total)


def _at_size(
    job: Job, name: str, size: int, within: Within, progress: Progress
) -> Iterator[Variant]:
    """The variants at one microbatch size: with every way to recompute and to share state."""
    chosen = job.recompute in (None, "auto")
    recompute = "never" if chosen else job.recompute
    stated = job.with_(schedule=name, microbatch_size=size, recompute=recompute).problem
    fixed = structs.replace(job.layout, chunks=job.chunks or job.layout.chunks)
    stated = stated.with_(layout=fixed, least_stages=within.least_stages, progress=progress)
    stated = stated.with_(any_shard=are_shares_open(job, name))
    chosen &= stated.memory_bytes is not None and job.engine.recompute != ("none",)
    roomy_s = 0.0  # of plans that share nothing, where there is memory for all of it
    for shard in stated.shards:
        shared = stated.with_shard(shard)
        if shared.request.replication == FREE and (within.equal or _waits_for_shares(shared)):
            shared = shared.with_(replication="uniform")
        variants = [*_recomputed(shared, within)] if chosen else [Variant(shared)]
        if shard == "none" and variants[0].is_roomy:
            roomy_s = variants[0].estimate_s
        # then plans with shares of the state alone are much the same
        if not (shard == "optimizer" and variants[0].estimate_s >= (1 - TIE) * roomy_s > 0):
            yield from variants


def are_shares_open(job: Job, name: str) -> bool:
    """Whether what replicas share is chosen under the schedule `name`, of no named planner.

    Not where every backward ends with a step: that of shares is not counted.
    """
    if job.shard is not None or job.planner_name is not None or job.topology.devices == 1:
        return False
    return name == AUTO or not schedule(name).steps_in_backwards


def _recomputed(problem: Problem, within: Within) -> Iterator[Variant]:
    """The variants of a problem with every way to recompute that may be of use."""
    never = Variant(problem)
    if never.is_roomy:
        yield never
        return
    always = Variant(problem.with_(recompute="always"))
    if schedule(problem.schedule).overlaps and not within.alike:
        yield Variant(problem.with_(recompute="auto"), (never, always))
    else:
        yield from (never, always)


def promise(variant: Variant) -> tuple[float, float]:
    """The order of variants: the fastest first, of those that fit nowhere the smallest."""
    return variant.estimate_s, 0.0 if variant.estimate_s < math.inf else variant.least_bytes


def _waits_for_shares(problem: Problem) -> bool:
    """Whether replicas exchange weights within an asynchronous run of `partopt run`.

    Where stages have unequally many they may then wait for each other for ever.
    """
    shares = problem.shard != "none" and problem.trainer == PARTOPT
    return shares and schedule(problem.schedule).asynchronous
