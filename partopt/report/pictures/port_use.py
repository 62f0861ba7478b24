"""How busy the ports of a cluster are under a plan, by its traffic and the rates of its links."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from partopt.cost.links import port_rate
from partopt.documents.plan import Plan

# k       level of the topology, from 1; c a component of level k - 1, which has a port of level k
# A port carries bytes both ways at once: its time is that of their mean.

Port = tuple[int, int]  # k, c
_PAIRS = 4096  # of ranks that send to each other, by which a cut is looked at at most


def port_use(plan: Plan) -> dict[Port, float]:
    """The share of the time for which each port (k, c) is busy; ports without traffic are left out.

    A message takes the ports of the level at which its ends part. All-reduces count as rings of the
    ranks in their order, whatever the algorithm; exchanges of tied parameters are not counted.
    """
    cuts = (_sent(plan, cut) for cut in range(1, len(plan.stages)))
    return _busy(plan, itertools.chain(*cuts, _reduced(plan)))


def cut_use(plan: Plan) -> dict[int, float]:
    """The share of the time for which each cut keeps a port busy, the busiest one."""
    return {
        cut: max(_busy(plan, _sent(plan, cut)).values(), default=0.0)
        for cut in range(1, len(plan.stages))
    }


def _busy(plan: Plan, traffic: Iterable[tuple[int, int, float]]) -> dict[Port, float]:
    """The share of the time that `traffic` takes of ports: pairs of ranks, bytes a microbatch."""
    moved: dict[Port, float] = defaultdict(float)
    for first, second, size in traffic:
        k = plan.topology.common_level(first, second)
        if k and size:
            component = plan.topology.group_size(k - 1)
            moved[k, first // component] += size / 2
            moved[k, second // component] += size / 2
    return {
        port: size / port_rate(port[0], plan.topology) / plan.predicted.period_s
        for port, size in moved.items()
    }


def _sent(plan: Plan, cut: int) -> Iterator[tuple[int, int, float]]:
    """Pairs of ranks, and the bytes of both directions that a microbatch sends between them."""
    sender, receiver = plan.stages[cut - 1], plan.stages[cut]
    size = sender.output_bytes + receiver.gradient_bytes
    pairs = min(_PAIRS, math.lcm(sender.replicas, receiver.replicas))
    for microbatch in range(pairs):
        yield sender.rank_of(microbatch), receiver.rank_of(microbatch), size / pairs


def _reduced(plan: Plan) -> Iterator[tuple[int, int, float]]:
    """Neighbours in a ring, and its bytes for a microbatch between them, all of them one way."""
    for stage in plan.stages:
        r = stage.replicas
        if r == 1:
            continue
        size = 2 * (r - 1) / r * stage.trained_bytes / (plan.microbatches or r)
        for first, second in zip(stage.ranks, [*stage.ranks[1:], stage.ranks[0]], strict=True):
            yield first, second, size
