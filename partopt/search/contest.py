"""Plans of several planners for one problem, all simulated.

The plan of `optimal` is the best that a search in the simulator finds, which begins with the plans
of its dynamic program and with those of the other planners (`partopt.search.improve`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from partopt import planners
from partopt.cost.pricing import price
from partopt.cost.problem import Decision, Problem, partition_of
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, optimal, required_features
from partopt.schedules import schedule
from partopt.search.bound import certify_simulated, lower_bound_s
from partopt.search.effort import SearchParams
from partopt.search.improve import GRID, GridSearch, Improvement
from partopt.search.variants import Variant
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup

OPTIMAL = "optimal"
OPTIONS = {  # what a planner may look at or keep to -> the option that asks for it
    "stages": "`stages`",
    "costs": "`cost`",
    "auto": "`recompute=auto`",
    "uniform": "`replication=uniform`",
    "none": "`replication=none`",
}
NEAR = 1.1  # times the estimate: plans on fewer servers that are slower begin no search
SHOWN_LIMIT = 20_000  # stages times devices of a plan that is simulated only to be shown


class Plans(NamedTuple):
    """Simulated plans by the names of their planners, and notes on them."""

    plans: dict[str, Plan]
    notes: list[Note]

    @property
    def best(self) -> Plan:
        """The fastest that fits, or of all where none does; ties keep the first."""
        fitting = [plan for plan in self.plans.values() if plan.fits] or self.plans.values()
        return max(fitting, key=lambda plan: plan.predicted.samples_per_s)


def check_planner(name: str, problem: Problem) -> None:
    """Raise PartoptError for options of `problem` that the planner `name` would ignore."""
    for feature in sorted(required_features(problem)):
        using = [other for other, entry in PLANNERS.items() if feature in entry.uses]
        if name in PLANNERS and name not in using:
            raise PartoptError(
                f"{OPTIONS[feature]}: the planner {name} does not look at it",
                f"choose {', '.join(f'`planner={other}`' for other in using)}",
                code="option-ignored",
            )


class Contest:
    """The plans of the planners `names` for one variant, which get better with more effort.

    Where only some are `shown`, others that cannot be the fastest are left out, and the shown ones
    too where their simulation is long. Planners that do not choose which stages recompute plan for
    the variant in which none does. Those that are `named` are asked in their order, and none may
    refuse; the plans of others begin the search for the best, too.
    """

    def __init__(
        self,
        names: Iterable[str],
        variant: Variant,
        shown: Iterable[str] | None = None,
        named: bool = False,
    ) -> None:
        self.names, self.variant, self.shown, self.named = list(names), variant, shown, named
        if shown is not None and OPTIMAL in self.names:
            # the plans of `straight` are among those of `optimal`
            self.names = [name for name in self.names if name != "straight"]
        self.optimal: Improvement | None = None
        self.grid: GridSearch | None = None
        self._refused: dict[str, PartoptError] = {}
        self._simulated: dict[str, Plan] = {}

    @cached_property
    def _decisions(self) -> dict[str, Decision]:
        """What the planners decide, but for those whose plans are searched."""
        found = dict[str, Decision]()
        for name in self.names:
            if name not in (OPTIMAL, GRID):
                try:
                    found[name] = planners.decide(name, self.variant.plain)
                except PartoptError as error:
                    self._refused[name] = error
        return found

    def _begin_grid(self) -> GridSearch:
        variant, cells = self.variant, self.variant.coarse[1]
        # a batch is often divided by powers of two alone
        others = variant.fewer if variant.problem.topology.levels[-1].size.bit_count() > 1 else []
        alike = [variant, *(other for other in others if other.coarse[1] == cells)]
        every = (grid for other in alike for grid in other.grids)
        return GridSearch(variant, sorted(every, key=lambda grid: grid.estimate_s))

    def plans_at(self, params: SearchParams, time_to_beat_s: float = math.inf) -> Plans:
        """The simulated plans at an effort; notes say which planners refuse, and why.

        Nothing is improved where no plan is proved to go below `time_to_beat_s` seconds per
        microbatch. Raises PartoptError where all refuse, or one that is named.
        """
        plans, decided = dict[str, Plan](), self._decisions
        # what the first two find says which of the others are left out
        first = [] if self.named else [name for name in (OPTIMAL, GRID) if name in self.names]
        for name in dict.fromkeys([*first, *self.names]):
            if name in self._refused or (name in decided and self._is_left_out(name, plans)):
                continue
            try:
                found = self._plan(name, params, time_to_beat_s)
            except PartoptError as error:
                self._refused[name] = error
            else:
                plans |= {name: found} if found else {}
        if self._refused and (self.named or not plans):
            every = self._refused.values()
            raise PartoptError.together({error.message: error for error in every}.values())
        notes = [
            Note(
                code="planner-refused",
                text=f"without {name}: {error.message}",
                fields={"planner": name},
            )
            for name, error in self._refused.items()
            if error.code != "no-plan-fits"  # which the plan that is shown instead says of itself
        ]
        notes += [note for name in decided if name in plans for note in decided[name].notes]
        return Plans({name: plans[name] for name in self.names if name in plans}, notes)

    def plans_so_far(self, last: object = None) -> Plans | None:
        """The simulated plans of a search that is interrupted; None if it has none yet."""
        plans = dict(self._simulated)
        for name, search in ((GRID, self.grid), (OPTIMAL, self.optimal)):
            with suppress(PartoptError):  # one that is too long to be simulated whole is none
                if search and (plan := search.plan_so_far()):
                    plans[name] = plan
        return Plans(plans, []) if plans else None

    def simpler_plans(self, best: Plan) -> Iterator[Plan]:
        """Plans of the searches that are as good as the best; all with nothing made again, and with
        less in shares.
        """
        searches = (search for search in (self.grid, self.optimal) if search)
        found = [best, *filter(None, (search.simpler_plan() for search in searches))]
        problem = self.variant.problem
        if problem.recompute_per_stage:
            again = [plan for plan in found if any(stage.recompute for stage in plan.stages)]
            found += [_simulate_again(plan, problem, keep=True) for plan in again]
        yield from found[1:]
        for plan in found:
            yield from self.share_less(plan)

    def share_less(self, plan: Plan) -> Iterator[Plan]:
        """The plan's stages with less in shares."""
        problem = self.variant.problem
        for shard in problem.shards[: problem.shards.index(problem.shard)]:
            yield _simulate_again(plan, problem.with_shard(shard))

    def _plan(self, name: str, params: SearchParams, time_to_beat_s: float) -> Plan | None:
        """The plan of a planner; None where it has none that fits."""
        if name == OPTIMAL:
            self.optimal = self.optimal or self._improve(params)
            return self.optimal.best_plan(params, time_to_beat_s)
        if name == GRID:
            self.grid = self.grid or self._begin_grid()
            return self.grid.best_plan(params)
        if name not in self._simulated:
            problem = self.variant.plain.with_(any_shard=False)  # it planned for this share
            self._simulated[name] = _simulate(name, self._decisions[name], problem, params)
        return self._simulated[name]

    def _improve(self, params: SearchParams) -> Improvement:
        """The search for the best plan of the planner `optimal`."""
        variant, cells = self.variant, self.variant.coarse[1]
        planners.check_schedule(OPTIMAL, variant.problem.schedule)
        others = [decision.partition for decision in self._decisions.values()]
        if not optimal.are_many(variant.problem):
            others += (grid.partition.on_layers(cells) for grid in variant.grids[: params.equal])
            others += (
                shape.partition().on_layers(other.coarse[1])
                for other in variant.fewer
                if other.estimate_s <= NEAR * variant.estimate_s
                for shape in other.starts[: params.fewer]
            )
        return Improvement(variant, others, lower_bound_s(variant.problem), params)

    def _is_left_out(self, name: str, plans: dict[str, Plan]) -> bool:
        """Whether a planner's partition is not estimated to be faster than the best of `plans`.

        One that is hidden or long need not be shown then. A stage that computes for as long is
        enough to know it.
        """
        if self.shown is None:
            return False
        partition, problem = self._decisions[name].partition, self.variant.plain
        stages, chain = partition.stages, problem.chain
        fitting = (plan.predicted.period_s for plan in plans.values() if plan.fits)
        best_s = min(fitting, default=math.inf)
        long = len(stages) * len({rank for stage in stages for rank in stage.ranks}) > SHOWN_LIMIT
        if best_s == math.inf or not (name not in self.shown or long):
            return False
        computing = (
            chain.compute_s(stage.start, stage.stop, problem.all_recompute) / len(stage.ranks)
            for stage in stages
        )
        if max(computing) >= best_s:
            return True
        return price(partition, problem, "").predicted.period_s >= best_s


def plan_alone(
    name: str, problem: Problem, params: SearchParams, time_to_beat_s: float = math.inf
) -> tuple[Plan, list[Note]]:
    """The simulated plan of one planner, and its notes; of `optimal` the best that is found.

    `time_to_beat_s` is as for `Contest.plans_at`. Raises PartoptError where it refuses the problem,
    or its schedule cannot run its plan.
    """
    plans, notes = Contest([name], Variant(problem), named=True).plans_at(params, time_to_beat_s)
    return plans[name], notes


def _simulate(name: str, decision: Decision, problem: Problem, params: SearchParams) -> Plan:
    """A decision, simulated; nothing is known of one that does not fit."""
    problem.progress(f"simulating {name}", 0, 1)
    plan = price(decision.partition, problem, name, decision.certificate)
    plan = simulate_with_best_warmup(plan, params, problem.progress)
    return plan if plan.fits else replace(plan, certificate=None)


def _simulate_again(plan: Plan, problem: Problem, keep: bool = False) -> Plan:
    """A plan's stages at its warm-ups, simulated for another problem, with the same bound.

    Those that `keep` all that they compute are at their best warm-ups.
    """
    warmups, proved = [stage.warmup for stage in plan.stages], plan.certificate
    if keep:
        plan = replace(plan, stages=[replace(stage, recompute=False) for stage in plan.stages])
    again = price(partition_of(plan, problem.recompute_per_stage), problem, plan.planner)
    again = simulate_with_best_warmup(again) if keep else simulate_at_warmup(again, warmups)
    return certify_simulated(again, proved.lower_bound_s, problem) if proved else again


def able_planners(features: set[str], schedule: str) -> list[str]:
    """The planners that have all of `features` and can plan for the schedule, in their order."""
    return [
        name
        for name, entry in PLANNERS.items()
        if features <= entry.uses and entry.plans_for(schedule)
    ]


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for `problem` and look at the options that it states, in order."""
    needed = required_features(problem)
    able = able_planners(needed, problem.schedule)
    if not schedule(problem.schedule).overlaps and "costs" not in needed:
        able.append(GRID)
    if not able:
        options = " and ".join(sorted(OPTIONS[feature] for feature in needed))
        raise PartoptError(
            f"`schedule={problem.schedule}`: no planner has {options} with it",
            "drop one of these options",
            code="no-planner",
        )
    return [name for name in able if name != "manual"]
