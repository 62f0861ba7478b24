"""Orders and what they cost, drawn at random: every schedule, on topologies of one to three levels,
or made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.collectives import ALGORITHMS
from partopt.documents.actions import KINDS, A, U
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.order import Order
from partopt.schedules.placement import LOOPED, MIRRORED, STRAIGHT, VEE, Placement, ranks_of
from partopt.simulator.work import Work
from tests.helpers import flat

# the first four make many ties; sums of the others depend on their order
COSTS = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.1, 1 / 3])


@dataclass(frozen=True, eq=False)
class Case:
    """An order, its costs, and the layout that it was made for."""

    name: str
    layout: Placement
    order: Order
    work: Work


def consecutive(replicas: Sequence[int]) -> list[list[int]]:
    """The ranks of stages with these numbers of replicas."""
    ends = np.cumsum([0, *replicas]).tolist()
    return [list(range(start, stop)) for start, stop in pairwise(ends)]


def case(
    name: str,
    ranks: Sequence[Sequence[int]],
    microbatches: int,
    topology: Topology | None = None,
    warmup: list[int] | None = None,
    **costs: Any,
) -> Case:
    """A case by hand.

    `costs`: forward, backward, cut, gradient, tied (one for all, or of each), serial, blocking.
    """
    S, devices = len(ranks), max(max(each) for each in ranks) + 1
    on = topology or flat(devices, bandwidth=1.0)
    tied = np.broadcast_to(np.array(costs.pop("tied", 0.0), dtype=float), S).copy()
    layout = Placement(ranks, on.devices, microbatches, warmup=warmup, tied=(tied > 0).tolist())
    forward, backward = (
        np.broadcast_to(np.array(costs.pop(kind, default), dtype=float), S)
        for kind, default in (("forward", 1), ("backward", 2))
    )
    nothing = np.zeros(S)
    work = Work(
        ranks=ranks,
        seconds=np.array(
            [forward, backward, backward / 2, backward / 2, forward, nothing, nothing]
        ),
        cut_bytes=np.broadcast_to(np.array(costs.pop("cut", 0.0), dtype=float), S + 1).copy(),
        gradient_bytes=np.broadcast_to(np.array(costs.pop("gradient", 0.0), dtype=float), S).copy(),
        tied_s=tied,
        topology=on,
        **costs,
    )
    return Case(name, layout, order(name, layout), work)


@st.composite
def topologies(
    draw: st.DrawFn, devices: int, latencies: Sequence[float] = (0.0, 0.5, 0.1), ties: bool = False
) -> Topology:
    """One to three levels with room for `devices`.

    `ties`: times on them add up without rounding, so that ties are ties, and messages take nothing
    of devices.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    inside = int(np.prod(sizes, dtype=int))
    sizes.append(-(-devices // inside) + draw(st.integers(0, 1)))
    levels = [
        Level(
            name=f"level{k}",
            size=size,
            bandwidth_bytes_per_s=draw(
                st.sampled_from([0.5, 1.0, 2.0] if ties else [0.5, 1.0, 2.0, 3.0])
            ),
            links=1 if ties else draw(st.integers(1, 3)),
            latency_s=draw(st.sampled_from(latencies)),
            bus=draw(st.booleans()),
            **(draw(handled()) if not ties and draw(st.booleans()) else {}),
        )
        for k, size in enumerate(sizes, start=1)
    ]
    return Topology(
        name="random",
        device=Device(name="device"),
        levels=levels,
        allreduce=draw(st.sampled_from(["fastest", *ALGORITHMS])),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    names: Sequence[str] = tuple(SCHEDULES),
    latencies: Sequence[float] = (0.0, 0.5, 0.1),
    **fixed: Any,
) -> Case:
    """Any schedule over stages on any ranks at any costs; `fixed` are fields of Work that are not
    drawn.
    """
    name = draw(st.sampled_from(names))
    entry = SCHEDULES[name]
    ranks, microbatches = draw(_straight() if entry.uneven else _chunked(name))
    topology = draw(topologies(max(max(each) for each in ranks) + 1, latencies))
    place = draw(st.permutations(range(topology.devices)))
    ranks = [[place[rank] for rank in each] for each in ranks]
    S = len(ranks)
    recompute = (
        draw(st.lists(st.booleans(), min_size=S, max_size=S)) if entry.recomputes else [False] * S
    )
    tied = np.array(
        draw(st.lists(COSTS, min_size=S, max_size=S)) if draw(st.booleans()) else [0.0] * S
    )
    layout = Placement(ranks, topology.devices, microbatches, recompute, tied=(tied > 0).tolist())

    def drawn(count: int) -> np.ndarray[Any, Any]:
        return np.array(draw(st.lists(COSTS, min_size=count, max_size=count)))

    seconds = drawn(len(KINDS) * S).reshape(len(KINDS), S)
    seconds[A] = 0.0
    options = {
        "serial": draw(st.booleans()),
        "blocking": entry.asynchronous and draw(st.booleans()),
        "early": None if entry.asynchronous else draw(early(S)),
        "back_bytes": draw(st.sampled_from([None, np.array([0.0, *drawn(S - 1), 0.0])])),
        "messages": np.array([drawn(S + 1), drawn(S + 1)]) if draw(st.booleans()) else None,
    } | fixed
    work = Work(
        ranks, seconds, np.array([0.0, *drawn(S - 1), 0.0]), drawn(S), tied, topology, **options
    )
    return Case(name, layout, order(name, layout), work)


@st.composite
def handled(draw: st.DrawFn) -> dict[str, Any]:
    """What messages take of devices, and all-reduces achieve, on a level."""
    rates = AllReduceRates(bandwidth_bytes_per_s=draw(st.sampled_from([msgspec.UNSET, 0.5, 2.0])))
    return {
        "overhead_s": draw(st.sampled_from([0.0, 0.5, 0.25])),
        "copy_bytes_per_s": draw(st.sampled_from([msgspec.UNSET, 2.0])),
        "allreduce": rates,
    }


@st.composite
def early(draw: st.DrawFn, S: int) -> np.ndarray[Any, Any] | None:
    """Exchanges beside the last backward, or after it."""
    starts = draw(st.lists(COSTS, min_size=S, max_size=S))
    tails = draw(st.lists(st.sampled_from([0.25, 0.5, 1 / 3]), min_size=S, max_size=S))
    pairs = [pair if pair[0] else (0.0, 0.0) for pair in zip(starts, tails, strict=True)]
    return np.array(pairs, dtype=float).T.copy() if draw(st.booleans()) else None


@st.composite
def _straight(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return consecutive(replicas), draw(st.integers(1, 10))


@st.composite
def _chunked(draw: st.DrawFn, name: str) -> tuple[list[list[int]], int]:
    shape = SCHEDULES[name].shape
    P, d = (
        draw(st.sampled_from([2, 4]) if shape == MIRRORED else st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    v = {STRAIGHT: 1, LOOPED: draw(st.integers(1, 3)), VEE: 2, MIRRORED: 2}[shape]
    microbatches = draw(
        st.sampled_from([M for M in range(1, 11) if refusal(name, P, v, M) is None])
    )
    return ranks_of(shape, P, v, d), microbatches * d


def without_updates(given: Order) -> np.ndarray[Any, Any]:
    """Which actions are computations of a microbatch."""
    return ~np.isin(given.kind, (A, U))


def row_of(given: Order, rank: int) -> list[int]:
    """The actions of a rank."""
    return list(range(int(given.rows[rank]), int(given.rows[rank + 1])))


def scaled(work: Work, factor: float) -> Work:
    """The same work where everything takes `factor` times as long: compute, bytes and latencies."""
    levels = [
        structs.replace(
            level, latency_s=factor * level.latency_s, overhead_s=factor * level.message_s
        )
        for level in work.topology.levels
    ]
    return replace(
        work,
        seconds=factor * work.seconds,
        cut_bytes=factor * work.cut_bytes,
        back_bytes=None if work.back_bytes is None else factor * work.back_bytes,
        gradient_bytes=factor * work.gradient_bytes,
        tied_s=factor * work.tied_s,
        early=None if work.early is None else work.early * [[factor], [1.0]],
        topology=structs.replace(work.topology, levels=levels),
    )
