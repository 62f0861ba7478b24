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
    # steps in a row for every stage of which none is simulated: then there is little left to see
    patience: int
    steps: int = 20  # for a unit of the budget; most are ruled out

    def of_stages(self, stages: int) -> AnnealingParams:
        """Those of a plan of so many stages, with its whole patience."""
        return replace(self, patience=self.patience * stages)


@dataclass(frozen=True, kw_only=True)
class LocalParams:
    """How much a search of plans looks at that begins with some and goes on by steps."""

    budget: float
    starts: float  # the share of it for plans as they are at first
    of_kind: int = 1  # starts that are kept of every kind
    rounds: tuple[int, ...]  # plans that are annealed in every one, at one budget
    annealing: AnnealingParams


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
    plans: LocalParams
    # of them on many devices: times their budget, for starts, and for every slice of annealing;
    # slices, at most, while the last brought something
    many: float = 4.0
    slice: float = 2.0
    slices: int = 1
    # with which they begin, too, on few devices: equal pipelines, plans on fewer servers
    equal: int = 16
    fewer: int = 24  # of every number of them
    hoped: float = 0.1  # above what is to be beaten: starts that are slower are not annealed
    fine: int = 1000  # ranges of layers, between which the cuts of the best are chosen again
    # plans of grids, and the cuts of one plan
    grids: LocalParams
    cut_budget: float = 600.0

    @classmethod
    def at(cls, effort: str) -> SearchParams:
        """Those of one of `partopt.options.EFFORTS`."""
        return BY_EFFORT[effort]

    @property
    def stages(self) -> tuple[SearchParams, ...]:
        """The efforts that a search goes through, this one the last."""
        return (*(self.before.stages if self.before else ()), self)


_PLANS = LocalParams(
    budget=500.0,
    starts=0.2,
    rounds=(12, 4, 1),
    annealing=AnnealingParams(hot=0.05, cold=0.002, patience=60),
)
_GRIDS = LocalParams(
    budget=700.0,
    starts=0.5,
    of_kind=6,
    rounds=(6, 2),
    annealing=AnnealingParams(hot=0.01, cold=0.001, patience=30),
)
QUICK = SearchParams(variants=2, plans=_PLANS, grids=_GRIDS)
NORMAL = replace(
    QUICK, before=QUICK, variants=3, plans=replace(_PLANS, budget=1800.0), many=50.0, slices=6
)
THOROUGH = replace(
    NORMAL,
    before=NORMAL,
    variants=6,
    plans=replace(_PLANS, budget=25_000.0),
    grids=replace(_GRIDS, budget=7000.0),
)
BY_EFFORT = {"quick": QUICK, "normal": NORMAL, "thorough": THOROUGH}
