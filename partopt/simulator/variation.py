"""A plan on devices that vary: every action by chance, some ranks always.

An action takes its time times a lognormal factor of mean 1, drawn for itself alone, so that a
microbatch may be late on one device and early on the next. Which rank's slowness costs most is
found by making one rank after another slower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.plan import layout_of
from partopt.documents.simulation import RankFactor, RankSensitivity, Varied
from partopt.errors import PartoptError
from partopt.options import check_count, invalid
from partopt.schedules import order
from partopt.schedules.order import Order
from partopt.simulator.engine import simulate
from partopt.simulator.execution import Execution
from partopt.simulator.steady import steady_state
from partopt.units import parse_share

DRAWS = 50
SLOWER = 0.1  # by which one rank after another is made slower
MORE_MICROBATCHES = 512  # asynchronous: that pass beside those of the plain run
MOST_RANKS = 64  # that are made slower, one at a time
MOST_ACTIONS, MOST_TRIED = 10**9, 50_000_000  # of all draws; of all slower ranks
MOST_FACTOR = 1000.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How the times of actions differ from the plan's.

    `jitter` is the standard deviation of an action's time as a share of its mean, `slow` by how
    much the actions of a rank take longer. Of `draws` number i depends on `seed` and i alone.
    """

    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    draws: int = DRAWS


def variation_of(
    jitter: str | float | None,
    slow: Mapping[int, float] | None,
    seed: int | None,
    draws: int | None,
) -> Variation | None:
    """The variation that these options give; None where there is none.

    Raises PartoptError for a value that cannot be, and for `seed` or `draws` without `jitter`.
    """
    for name, value in (("seed", seed), ("draws", draws)):
        if value is not None and jitter is None:
            raise invalid(name, value, "nothing is drawn", "add `jitter=5%`")
    if draws is not None:
        check_count("draws", draws)
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise invalid("seed", seed, "must be a whole number from 0", "for example `seed=1`")
    if jitter is None and not slow:
        return None
    for rank, factor in (slow or {}).items():
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 0 < factor <= MOST_FACTOR:
            raise invalid(
                "slow",
                f"{rank}={factor}",
                f"a factor is more than 0 and at most {MOST_FACTOR:g}",
                f"`slow={rank}=1.2` makes rank {rank} take 1.2 times as long",
            )
    try:
        share = parse_share(jitter) if isinstance(jitter, str) else float(jitter or 0.0)
    except PartoptError as error:
        raise error.at("`jitter`") from None
    if not 0 <= share <= 1:
        raise invalid("jitter", jitter, "must be from 0% to 100%", "for example `jitter=5%`")
    return Variation(
        jitter=share, slow=dict(slow or {}), seed=seed or 0, draws=draws or DRAWS if share else 1
    )


def vary(execution: Execution, variation: Variation) -> Varied:
    """What becomes of `execution` under `variation`, and which slow rank costs most.

    Raises PartoptError for a slow rank without work, and for more draws than are simulated.
    """
    working = sorted(execution.plan.stages_by_rank())
    for rank, factor in variation.slow.items():
        if rank not in working:
            raise invalid(
                "slow",
                f"{rank}={factor}",
                f"rank {rank} has no work in this plan",
                f"choose one of the {len(working)} ranks with work, from {working[0]} to "
                f"{working[-1]}",
            )
    runs = _Runs(execution, variation)
    actions = len(runs.order.kind)
    most = max(1, MOST_ACTIONS // actions)
    if variation.draws > most:
        why = f"of {actions:,} actions each: more than are simulated"
        raise invalid("draws", variation.draws, why, f"choose `draws={most}`")
    drawn = [runs.seconds(runs.factors(draw)) for draw in range(variation.draws)]
    p50, p95 = (float(np.percentile(drawn, share)) for share in (50, 95))
    plain_s = execution.makespan_s if execution.steady is None else execution.steady.period_s
    return Varied(
        jitter=variation.jitter,
        slow=[RankFactor(rank=r, factor=f) for r, f in sorted(variation.slow.items())],
        seed=variation.seed,
        draws=variation.draws,
        microbatches=runs.microbatches,
        plain_s=plain_s,
        p50_s=p50,
        p95_s=p95,
        p50_loss=p50 / plain_s - 1,
        p95_loss=p95 / plain_s - 1,
        slower=SLOWER,
        sensitivity=_sensitivities(execution, variation.slow),
    )


class _Runs:
    """The execution again and again, at other times of its actions."""

    def __init__(self, execution: Execution, variation: Variation) -> None:
        self.execution, self.variation = execution, variation
        self.order, self.microbatches = execution.order, execution.microbatches
        if execution.steady is not None and variation.jitter:
            self.microbatches += MORE_MICROBATCHES
            layout = layout_of(execution.plan, self.microbatches)
            self.order = order(execution.plan.schedule, layout)

    @cached_property
    def slow(self) -> Floats:
        """Of each action the factor of its rank, shape (actions,)."""
        return by_rank(self.order, self.variation.slow)

    def factors(self, draw: int) -> Floats:
        """What the time of each action is multiplied by in a draw, shape (actions,)."""
        sigma = math.sqrt(math.log1p(self.variation.jitter**2))
        if not sigma:
            return self.slow
        chance = np.random.default_rng([self.variation.seed, draw])
        z = chance.standard_normal(len(self.order.kind))
        return np.exp(sigma * z - sigma**2 / 2) * self.slow

    def seconds(self, scale: Floats) -> float:
        """Seconds of an iteration, or asynchronous of a microbatch: in steady state where it
        settles, else at the mean pace.
        """
        timeline = simulate(self.order, dataclasses.replace(self.execution.work, scale=scale))
        if self.execution.steady is None:
            return float(timeline.makespan)
        replicas = [stage.replicas for stage in self.execution.plan.stages]
        return steady_state(timeline, replicas).period_s


def by_rank(actions: Order, factors: Mapping[int, float]) -> Floats:
    """Of each action the factor of its rank, 1 where none is given, shape (actions,)."""
    scale = np.ones(len(actions.kind))
    for rank, factor in factors.items():
        scale[actions.rows[rank] : actions.rows[rank + 1]] = factor
    return scale


def _sensitivities(execution: Execution, slow: Mapping[int, float]) -> list[RankSensitivity]:
    """What the slowness of each rank costs, the most first; nothing else varies.

    Where there are many ranks, one is made slower for each that holds the same stages; where these
    are too many too, those that compute longest.
    """
    runs, stages = _Runs(execution, Variation(slow=slow)), execution.plan.stages_by_rank()
    actions, work, tried = runs.order, execution.work, sorted(stages)
    most = max(1, min(MOST_RANKS, MOST_TRIED // len(actions.kind)))
    if len(tried) > most:
        alike = {tuple(stages[rank]): rank for rank in reversed(tried)}
        compute_s = execution.shares.compute_s
        tried = sorted(alike.values(), key=lambda rank: (-compute_s[rank], rank))[:most]
    plain_s = runs.seconds(runs.slow)
    found = []
    for rank in tried:
        own = slice(actions.rows[rank], actions.rows[rank + 1])
        seconds = work.seconds[actions.kind[own], actions.stage[own]] * runs.slow[own]
        # of an iteration, or asynchronous of a microbatch
        busy_s = float(seconds.sum()) / (1 if execution.steady is None else runs.microbatches)
        more_s = runs.seconds(runs.slow * by_rank(actions, {rank: 1 + SLOWER})) - plain_s
        found.append(
            RankSensitivity(
                rank=rank,
                loss=more_s / plain_s,
                per_second=more_s / (SLOWER * busy_s) if busy_s else 0.0,
            )
        )
    return sorted(found, key=lambda each: (-round(each.loss, 9), each.rank))
