"""How busy the ports of a cluster are under a plan, by its traffic and the rates of its links."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from partopt.documents.plan import Plan

# k   level of the topology, from 1; c   a component of level k - 1, which has a port of level k

Port = tuple[int, int]  # k, c
Message = tuple[int, int, float]  # sender, receiver, and the bytes of a microbatch between them
_PAIRS = 4096  # of ranks that send to each other, by which a cut is looked at at most


def port_use(plan: Plan) -> dict[Port, float]:
    """The share of the time for which each port (k, c) is busy; ports without traffic are left out.

    A message takes the ports of the level at which its ends part, and on a bus those of all its
    members. All-reduces count as rings from each rank to the next higher one, whatever the
    algorithm; exchanges of tied parameters are not counted.
    """
    cuts = (_sent(plan, cut) for cut in range(1, len(plan.stages)))
    return _busy(plan, itertools.chain(*cuts, _reduced(plan)))


def cut_use(plan: Plan) -> dict[int, float]:
    """The share of the time for which each cut keeps a port busy, the busiest one."""
    return {
        cut: max(_busy(plan, _sent(plan, cut)).values(), default=0.0)
        for cut in range(1, len(plan.stages))
    }


def _busy(plan: Plan, messages: Iterable[Message]) -> dict[Port, float]:
    """The share of the time that messages take of ports, in the busier direction of each."""
    topology = plan.topology
    out: dict[Port, float] = defaultdict(float)
    into: dict[Port, float] = defaultdict(float)
    shared: dict[Port, float] = defaultdict(float)  # of a bus, by the component that it joins
    for sender, receiver, size in messages:
        k = topology.common_level(sender, receiver)
        if k and size:
            members = topology.group_size(k - 1)
            out[k, sender // members] += size
            into[k, receiver // members] += size
            shared[k, sender // topology.group_size(k)] += size

    def seconds(k: int, c: int) -> float:
        level = topology.levels[k - 1]
        moved = shared[k, c // level.size] if level.bus else max(out[k, c], into[k, c])
        return moved / (level.bandwidth_bytes_per_s * level.links)

    return {
        (k, c): seconds(k, c) / plan.predicted.period_s for k, c in sorted(out.keys() | into.keys())
    }


def _sent(plan: Plan, cut: int) -> Iterator[Message]:
    """Activations over a cut, and the gradients that come back."""
    first, second = plan.stages[cut - 1], plan.stages[cut]
    pairs = min(_PAIRS, math.lcm(first.replicas, second.replicas))
    for microbatch in range(pairs):
        sender, receiver = first.rank_of(microbatch), second.rank_of(microbatch)
        yield sender, receiver, first.output_bytes / pairs
        yield receiver, sender, second.gradient_bytes / pairs


def _reduced(plan: Plan) -> Iterator[Message]:
    """What neighbours in the ring of each stage's replicas send."""
    for stage in plan.stages:
        r = stage.replicas
        size = 2 * (r - 1) / r * stage.trained_bytes / (plan.microbatches or r)
        ring = sorted(stage.ranks)  # so that it leaves a server once
        for sender, receiver in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            yield sender, receiver, size
