"""How much is searched: one value, made from the effort of a job and passed down.

Budgets count simulations: 1 for one, and 1 for every `partopt.search.simulations.ACTIONS` of it.
What the efforts before have spent counts, too, because a search goes on where they end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class AnnealingParams:
    """How the steps of an annealing get colder, and when they end."""

    hot: float  # how much worse, relative, a step is at first that is taken now and then
    cold: float  # and at last
    patience: int  # steps in a row of which none is simulated: then there is little left to see
    steps: int = 20  # for a unit of the budget; most are ruled out


@dataclass(frozen=True, kw_only=True)
class SearchParams:
    """How much a search looks at, at one effort."""

    before: SearchParams | None = None  # the effort with which a search of this one begins
    warmup_actions: float = 2e6  # simulated, after which the best warm-up so far is enough
    # variants under a schedule
    variants: int  # that are searched at most, where one of them fits
    unfit_variants: int = 6  # and where none does
    reach: float = 1.04  # times the best estimate: slower ones, also than found plans, are left out
    close: float = 1.07  # times the fastest: a schedule or variant that is slower is left at that
    # plans of the planner `optimal`
    budget: float
    starts: float = 0.2  # the share of it for plans as the dynamic program has them
    rounds: tuple[int, ...] = (12, 4, 1)  # plans that are annealed in every one, at one budget
    equal: int = 16  # equal pipelines with which they begin, too
    fewer: int = 24  # plans on fewer servers with which it begins, of every number of them
    hoped: float = 0.1  # above what is to be beaten: starts that are slower are not annealed
    fine: int = 1000  # ranges of layers, between which the cuts of the best are chosen again
    annealing: AnnealingParams = AnnealingParams(hot=0.05, cold=0.002, patience=60)  # for a stage
    # plans of grids
    grid_budget: float
    grid_starts: float = 0.5  # the share of it for grids as they are estimated
    grid_reach: float = 1.3  # times the best estimate: a grid beyond is not simulated
    grid_rounds: tuple[int, ...] = (6, 2)  # grids whose cuts are annealed in every round
    # cuts
    cut_budget: float = 600.0  # where those of one plan are moved
    cut_annealing: AnnealingParams = AnnealingParams(hot=0.01, cold=0.001, patience=300)

    @classmethod
    def at(cls, effort: str) -> SearchParams:
        """Those of one of `partopt.options.EFFORTS`."""
        return BY_EFFORT[effort]

    @property
    def stages(self) -> tuple[SearchParams, ...]:
        """The efforts that a search goes through, this one the last."""
        return (*(self.before.stages if self.before else ()), self)


QUICK = SearchParams(variants=2, budget=500.0, grid_budget=700.0)
NORMAL = replace(QUICK, before=QUICK, variants=3, budget=1800.0)
THOROUGH = replace(NORMAL, before=NORMAL, variants=6, budget=25_000.0, grid_budget=7000.0)
BY_EFFORT = {"quick": QUICK, "normal": NORMAL, "thorough": THOROUGH}
