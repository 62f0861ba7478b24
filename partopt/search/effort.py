"""How much is searched: one value, made from the effort of a job and passed down.

Budgets count simulations: 1 for one, and 1 for every `partopt.search.simulations.ACTIONS` of it.
What the efforts before have spent counts, too, because a search goes on where they end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class AnnealingParams:
    """How the steps of an annealing get colder, and when they end.

    `hot`, `cold`: how much worse, relative, a step is that is taken now and then, at first and at
    last. `steps`: for a unit of the budget, most of which are ruled out. `patience`: steps in a row
    of which none is simulated, after which there is little left to see.
    """

    hot: float
    cold: float
    patience: int
    steps: int = 20


@dataclass(frozen=True, kw_only=True)
class StartParams:
    """How plans of a dynamic program are simulated, and the best of them annealed.

    `budget`: times that of the search. `starts`: the share of it for the plans as they are.
    `warmup_rules`: numbers of the warm-ups at which these are tried, none for all. `rounds`: plans
    that are annealed in every round; all rounds have the same budget.
    """

    budget: float = 1.0
    starts: float = 0.2
    warmup_rules: tuple[int, ...] = ()
    rounds: tuple[int, ...] = (12, 4, 1)


@dataclass(frozen=True, kw_only=True)
class SearchParams:
    """How much a search looks at, at one effort.

    Of all searches:
        before          the effort with which a search of this one begins
        warmup_actions  simulated actions, after which the best warm-up that was found is enough
    Of variants under a schedule:
        variants        that are searched at most, where one of them fits
        unfit_variants  and where none does
        reach           times the best estimate: slower ones, also than what was found, are left out
        close           times the fastest: a schedule or variant that is slower is left at that
    Of plans of the planner `optimal`:
        budget          of simulations
        layouts         its starts from the program over layouts
        over_ranks      and from that over ranks, whose plans have many stages
        equal           equal pipelines with which it begins beside them, of layouts and over ranks
        fewer           plans on fewer servers with which it begins, of every number of these
        hoped           above what is to be beaten: starts that are slower are not annealed
        fine            ranges of layers, between which the cuts of the best plan are chosen again
        annealing       steps of plans; the patience is for a stage
    Of plans of grids:
        grid_budget     of simulations
        grid_starts     the share of it for grids as they are estimated
        grid_reach      times the best estimate: a grid beyond is not simulated
        grid_rounds     grids whose cuts are annealed in every round
    Of cuts:
        cut_budget      of simulations, where the cuts of one plan are moved
        cut_annealing   steps of cuts
    """

    before: SearchParams | None = None
    warmup_actions: float = 2e6
    variants: int
    unfit_variants: int = 6
    reach: float = 1.04
    close: float = 1.07
    budget: float
    layouts: StartParams = StartParams()
    over_ranks: StartParams = StartParams(
        budget=3.6, starts=0.6, warmup_rules=(2, 3, 0), rounds=(4, 1)
    )
    equal: tuple[int, int] = (16, 8)
    fewer: int = 24
    hoped: float = 0.1
    fine: int = 1000
    annealing: AnnealingParams = AnnealingParams(hot=0.05, cold=0.002, patience=60)
    grid_budget: float
    grid_starts: float = 0.5
    grid_reach: float = 1.3
    grid_rounds: tuple[int, ...] = (6, 2)
    cut_budget: float = 600.0
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
