"""What the replicas of a stage exchange, by what they hold shares of.

Gradients are reduced over the replicas: an all-reduce, or where state is sharded a reduce-scatter
of the gradients before the step and an all-gather of the parameters behind it (ZeRO; Rajbhandari et
al., SC 2020). Where a synchronous schedule adds up shares of the gradients, every backward scatters
its gradients; where parameters are sharded (ZeRO 3, FSDP), they are gathered for every
forward and for every backward, beside the compute. An engine with `whole_sums` has an all-reduce in
place of the reduce-scatter before a step of shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from partopt.cost.collectives import allreduce_over
from partopt.cost.memory import Kept, kept_by
from partopt.documents.plan import Plan
from partopt.documents.stage import FlowKind, FlowPer
from partopt.documents.topology import Algorithm, AllReduceRates, Level, Topology
from partopt.schedules import schedule

STATE, GRADIENTS, PARAMETERS = 1, 2, 3  # of `Kept.shard`


class Exchange(NamedTuple):
    """Bytes that the replicas of a stage exchange for a byte of its parameters.

    `reduced` is the exchange of a round or an iteration, as an all-reduce of so many bytes with the
    share `latency` of its latency; a gather is half an all-reduce, and so is a scatter.
    """

    reduced: float
    latency: float
    gathered: float = 0.0  # for every forward and every backward
    scattered: float = 0.0  # within every backward


ALLREDUCE = Exchange(1.0, 1.0)  # of as many bytes as the parameters have


def exchange_of(kept: Kept, synchronous: bool) -> Exchange:
    """The exchange of a trainer that keeps so much."""
    gradients = kept.gradients
    if kept.shard >= GRADIENTS and synchronous:
        if kept.shard == PARAMETERS:
            return Exchange(0.0, 0.0, kept.gathered, gradients)
        return Exchange(0.5, 0.5, scattered=gradients)
    if kept.shard == PARAMETERS:
        return Exchange(gradients / 2, 0.5, kept.gathered)
    if kept.shard == STATE and kept.whole_sums:
        return Exchange(gradients + 0.5, 1.5)
    return Exchange((gradients + 1) / 2 if kept.shard else gradients, 1.0)


def collectives_of(
    kept: Kept, trained: float, whole: float, per: FlowPer
) -> list[tuple[FlowKind, float, FlowPer]]:
    """The collectives of a stage: kind, bytes, and how often.

    Of its parameters `trained` bytes have a gradient, `whole` are all; `per` is a "round" or an
    "iteration". Parameters in shares are gathered twice for every microbatch.
    """
    if not kept.shard:
        return [("allreduce", kept.gradients * trained, per)]
    exchange = exchange_of(kept, per == "iteration")
    gather: tuple[float, FlowPer] = (
        (2 * exchange.gathered * whole, "microbatch") if exchange.gathered else (trained, per)
    )
    kind: FlowKind = "allreduce" if kept.whole_sums and kept.shard == STATE else "reducescatter"
    return [
        (kind, kept.gradients * trained, "microbatch" if exchange.scattered else per),
        ("allgather", *gather),
    ]


def steps_in_backwards(schedule_name: str, shared: bool) -> bool:
    """Whether backwards are counted with the optimizer's step that ends them under a schedule.

    It is left out where state is `shared`: replicas step shares of the parameters, which they
    exchange first.
    """
    return schedule(schedule_name).steps_in_backwards and not shared


def exchange_by(plan: Plan) -> Exchange:
    """The exchange of a plan's trainer."""
    return exchange_of(kept_by(plan), plan.microbatches is not None)


def early_bytes(bucket_bytes: int, exchange: Exchange, early: bool) -> float:
    """Bytes of parameters whose gradients are exchanged at once beside the last backward.

    They fill a bucket. Infinite where nothing is exchanged, or not `early` but behind the backward.
    """
    return bucket_bytes / exchange.reduced if early and exchange.reduced else math.inf


def exchange_topology(topology: Topology, exchange: Exchange) -> Topology:
    """The topology on which an all-reduce of the parameters takes as long as their exchange."""
    if exchange.reduced == exchange.latency == 1.0:
        return topology

    def scaled(level: Level) -> Level:
        bandwidth = level.allreduce_bandwidth_bytes_per_s
        rates = AllReduceRates(
            bandwidth_bytes_per_s=bandwidth / exchange.reduced if exchange.reduced else math.inf,
            latency_s=level.allreduce_latency_s * exchange.latency,
        )
        return structs.replace(level, allreduce=rates)

    return structs.replace(topology, levels=[scaled(level) for level in topology.levels])


def half_s(size_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size_bytes` over `ranks`.

    Half of an all-reduce around rings; a tree has no halves that leave shares.
    """
    if not size_bytes:
        return 0.0
    return min(allreduce_over(ranks, way).seconds(size_bytes) for way in half_ways(topology)) / 2


def half_ways(topology: Topology) -> list[Topology]:
    """The topology once for every algorithm that it allows and that has halves."""
    rings: Sequence[Algorithm] = ("ring", "hierarchical")
    if topology.allreduce in rings:
        return [topology]
    return [structs.replace(topology, allreduce=ring) for ring in rings]
