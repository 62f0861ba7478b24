"""Steps that change a plan in one place."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TypeVar

from partopt.cost.problem import NONE
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape
from partopt.planners.optimal import recut
from partopt.search.evaluator import Candidate, PlanEvaluator

STEPS = (1, 2, 3, 5, 8, 13, 21)  # layers by which a cut moves
TURNED, NUDGED = 0.15, 0.5  # of the steps: another warm-up; of these: of one stage alone
SWITCHED = 0.15  # of the steps: a stage recomputes or no longer does
TWICE = 0.4  # of the steps: two at once
RECUT = 0.6  # of the steps that change places: all cuts are chosen again
KINDS = ("cut",) * 9 + ("give",) * 6 + ("swap", "swap", "split", "split", "merge", "merge")

T = TypeVar("T")


def neighbour(now: Candidate, evaluator: PlanEvaluator, rng: random.Random) -> Candidate | None:
    """A plan near this one, not simulated yet; None where the step leads to none."""
    stages = now.stages
    if evaluator.entry.takes_warmup and rng.random() < TURNED:
        s = rng.randrange(stages)
        if rng.random() >= NUDGED:
            rule = rng.randrange(len(evaluator.warmup_rules))
            return now._replace(warmup_rule=rule, extra_warmup=())
        extra = list(now.extra_warmup or (0,) * stages)
        extra[s] += rng.choice((-1, 1))
        return now._replace(extra_warmup=tuple(extra))
    shape = step(now.shape, evaluator.costs, rng)
    if shape is not None and rng.random() < TWICE:
        shape = step(shape, evaluator.costs, rng)
    if shape is None:
        return None
    extra_warmup = now.extra_warmup if shape.stages == stages else ()
    return now._replace(shape=shape, extra_warmup=extra_warmup)


def step(shape: Shape, costs: StageCosts, rng: random.Random) -> Shape | None:
    """The plan with another cut, other places of two stages, or another number of stages."""
    kind = "cut" if costs.even else rng.choice(KINDS)
    if costs.chooses_recompute and rng.random() < SWITCHED:
        kind = "recompute"
    other = valid(_change(shape, kind, rng), costs)
    if other is not None and other.counts != shape.counts and rng.random() < RECUT:
        return recut(costs, other)
    return other


def _change(shape: Shape, kind: str, rng: random.Random) -> Shape | None:
    """The plan after a step of one kind; it may have too many places, or stages of none."""
    places, b, r, idle, modes = shape.parts
    S, s = shape.stages, rng.randrange(shape.stages)
    if kind == "recompute":
        return Shape(places, b, r, idle, _put(modes, s, not modes[s]))
    if kind == "cut" and s > 0:
        cut = b[s] + rng.choice((-1, 1)) * rng.choice(STEPS)
        return Shape(places, _put(b, s, cut), r, idle, modes) if b[s - 1] < cut < b[s + 1] else None
    if kind == "give":  # places of a stage, or idle ones (S), to a stage, to none, or before one
        counts = [*r, len(places) - sum(r)]
        source, to = rng.sample(range(S + 1), 2)
        many = rng.choice((1, 1, 1, 2))
        if source == S and rng.random() < 0.5:
            return Shape(places, b, r, _put(idle, to, idle[to] + 1), modes)
        if counts[source] < many:
            return None
        counts[source] -= many
        counts[to] += many
        kept = idle if rng.random() < 0.7 else (0,) * S
        return Shape(places, b, tuple(counts[:S]), kept, modes)
    if kind == "swap":
        t = rng.randrange(S)
        return Shape(places, b, _put(_put(r, s, r[t]), t, r[s]), idle, modes)
    if kind == "split":
        return _split(shape, s, rng)
    if kind == "merge" and s > 0:
        both = r[s - 1] + rng.choice((0, r[s]))
        merged = _put(_put(r, s), s - 1, both)
        return Shape(places, _put(b, s), merged, _put(idle, s), _put(modes, s))
    return None


def _split(shape: Shape, s: int, rng: random.Random) -> Shape | None:
    """The plan with stage s in two that share its places; of one place, with another stage's."""
    places, b, r, idle, modes = shape.parts
    first = rng.randint(1, r[s])
    donors = [t for t in range(len(r)) if t != s and r[t] > 1]
    if first == r[s] and sum(r) == len(places) and donors:
        donor = rng.choice(donors)
        r = _put(r, donor, r[donor] - 1)
    second = max(1, r[s] - first)
    cut = b[s] + max(1, round((b[s + 1] - b[s]) * first / (first + second)))
    if cut >= b[s + 1]:
        return None
    return Shape(
        places,
        _put(b, s, b[s], cut),
        _put(r, s, first, second),
        _put(idle, s, idle[s], 0),
        _put(modes, s, modes[s], modes[s]),
    )


def _put(values: tuple[T, ...], s: int, *new: T) -> tuple[T, ...]:
    """The values with `new` ones, or none, in place of that at s."""
    return (*values[:s], *new, *values[s + 1 :])


def valid(shape: Shape | None, costs: StageCosts) -> Shape | None:
    """The shape with no more idle places than there are; None where it may not be."""
    if shape is None or costs.problem.request.stages not in (None, shape.stages):
        return None
    left = len(shape.places) - sum(shape.counts)
    if left < 0 or min(shape.counts) < 1 or shape.stages < costs.problem.least_stages:
        return None
    dp = 1 if costs.problem.request.replication == NONE else costs.problem.request.layout.dp
    if costs.even or dp is not None:
        replicas = {len(ranks) for ranks in shape.ranks} if costs.even else set()
        if len(replicas) > 1 or (dp is not None and replicas != {dp}):
            return None
    if sum(shape.idle) <= left:
        return shape
    idle = list[int]()
    for count in shape.idle:
        idle.append(min(count, left))
        left -= idle[-1]
    return replace(shape, idle=tuple(idle))
