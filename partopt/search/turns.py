"""Warm-ups with which no stage holds a microbatch for longer than those behind it make it.

Where memory is limited, a stage that takes in all that it has room for makes those in front hold
theirs for longer, who then have no room for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from partopt.cost.links import transfer_s
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.documents.topology import Topology

# T   seconds per microbatch, the period
# w_s warm-up of stage s: all that it has in flight but one

_HALVINGS = 20  # of the interval in which the period lies


def warmups_in_turns(plan: Plan, most: Sequence[int]) -> list[int]:
    """w_s with which each stage holds its microbatches for no longer than those behind it need.

    They are those of the shortest period at which no stage needs more than `most`.
    """
    stages, waits_s = plan.stages, _waits_s(plan)
    # no round is shorter than its work; at the longest each stage does with one microbatch
    short = max(stage.compute_s / stage.replicas for stage in stages)
    enough = sum(stage.compute_s for stage in stages) + sum(waits_s)
    behind_first = list(zip(stages, most, waits_s, strict=True))[::-1]
    at_best = _at(short, behind_first)
    if at_best is not None:
        return at_best
    for _ in range(_HALVINGS):
        T = (short + enough) / 2
        short, enough = (T, enough) if _at(T, behind_first) is None else (short, T)
    return _at(enough, behind_first) or [0] * len(stages)


def _at(T: float, behind_first: Sequence[tuple[Stage, int, float]]) -> list[int] | None:
    """The warm-ups at a period of T seconds; None where a stage needs more than its most.

    The last stage comes first, each with the most that it holds and the wait before it.
    """
    found, away_s = [], 0.0
    for stage, own, wait_s in behind_first:
        r, busy_s = stage.replicas, stage.compute_s
        # by Little's law; between a microbatch's forward and its backward there are whole turns
        held_s = busy_s + away_s
        found.append(max(1, math.ceil(held_s / (r * T) * (1 - 1e-12))) - 1 if T else 0)
        if found[-1] > own:
            return None
        away_s = max(held_s, found[-1] * r * T + busy_s) + wait_s
    return found[::-1]


def _waits_s(plan: Plan) -> list[float]:
    """Seconds for a microbatch and its gradient to cross the cut before each stage."""
    topology = plan.topology
    return [0.0] + [
        2
        * transfer_s(
            (stage.input_bytes + stage.gradient_bytes) / 2,
            _level(before, stage, topology),
            topology,
        )
        for before, stage in pairwise(plan.stages)
    ]


def _level(before: Stage, stage: Stage, topology: Topology) -> int:
    """The level at which the nearest ranks of two stages part."""
    return topology.common_level(before.ranks[-1], stage.ranks[0])
