"""Orders as pictures, and executed at the costs that the closed forms assume: F = 1, B = 2, I = W =
1, no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from partopt.documents.actions import KINDS
from partopt.schedules import SCHEDULES, order
from partopt.schedules.order import Order
from partopt.schedules.placement import LOOPED, STRAIGHT, Placement, ranks_of
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work
from tests.helpers import flat
from tests.simulator.reference import simulate

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def layout_of(name: str, P: int, v: int, microbatches: int, d: int = 1, **fields: Any) -> Placement:
    """d pipelines side by side of P devices each, as the schedule needs them."""
    return Placement(ranks_of(SCHEDULES[name].shape, P, v, d), P * d, microbatches, **fields)


def built(name: str, P: int, v: int, microbatches: int, d: int = 1) -> Order:
    """The order of d pipelines side by side."""
    return order(name, layout_of(name, P, v, microbatches, d))


def straight(name: str, replicas: Sequence[int], microbatches: int, **fields: Any) -> Placement:
    """Stages with these numbers of replicas, on consecutive ranks."""
    ends = np.cumsum([0, *replicas]).tolist()
    ranks = [list(range(start, stop)) for start, stop in pairwise(ends)]
    return Placement(ranks, ends[-1], microbatches, **fields)


def executed(
    given: Order,
    layout: Placement,
    latency: float = 0.0,
    serial: bool = False,
    seconds: dict[str, float] | None = None,
) -> Timeline:
    """The order executed by the reference, exactly: in fractions, where messages take time, which
    may part a period in three; otherwise in floats, which add up halves as they are.
    """
    costs = SECONDS | (seconds or {})
    S = len(layout.ranks)
    work = Work(
        ranks=layout.ranks,
        seconds=np.array([[costs.get(kind, 0.0)] * S for kind in KINDS]),
        cut_bytes=np.zeros(S + 1),
        gradient_bytes=np.zeros(S),
        tied_s=np.zeros(S),
        topology=flat(layout.devices, latency=latency),
        serial=serial,
    )
    return simulate(given, work, exact=latency > 0)


def makespan(name: str, P: int, v: int, microbatches: int, **fields: Any) -> Fraction:
    """Seconds of one iteration."""
    layout = layout_of(name, P, v, microbatches)
    return Fraction(executed(order(name, layout), layout, **fields).makespan)


def picture(given: Order, updates: bool = False) -> list[str]:
    """A line a rank: actions without their stage on a rank that holds one, without optimizer steps;
    joined ones as `F3&B1`.
    """
    lines = []
    for rank in range(given.ranks):
        own = range(given.rows[rank], given.rows[rank + 1])
        alone = len({int(given.stage[place]) for place in own}) == 1
        line = ""
        for place in own:
            name = given.name(place)
            if updates or not name.endswith("U"):
                line += (name.lstrip("0123456789") if alone else name) + (
                    "&" if given.joined[place] else " "
                )
        lines.append(line.strip())
    return lines


def chunks(name: str) -> tuple[int, ...]:
    """Numbers of chunks to try a schedule with."""
    return {LOOPED: (1, 2, 3), STRAIGHT: (1,)}.get(SCHEDULES[name].shape, (2,))


def spelled(*rows: str, joined: Sequence[int] = ()) -> Order:
    """An order from the names of each rank's actions, as `1F0 1B0`; `joined` are places in it."""
    names = [name for row in rows for name in row.split()]
    letters = [next(letter for letter in name if letter in KINDS) for name in names]
    parts = [name.split(letter) for name, letter in zip(names, letters, strict=True)]
    return Order(
        np.array([KINDS.index(letter) for letter in letters], dtype=np.int8),
        np.array([int(stage) for stage, _ in parts], dtype=np.int32),
        np.array([int(number or 0) for _, number in parts], dtype=np.int32),
        np.isin(np.arange(len(names)), joined),
        np.cumsum([0, *(len(row.split()) for row in rows)]),
    )
