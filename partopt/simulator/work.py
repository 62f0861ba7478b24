"""The costs of a plan's actions and messages, and the ports that messages and all-reduces occupy.

Together with the order, they are all that a simulation needs to know of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.alike import one_of_alike
from partopt.cost.collectives import HIERARCHICAL, AllReduce, allreduce_over, tail_share
from partopt.cost.messages import parting_levels
from partopt.cost.ranks import array_of
from partopt.cost.sharding import Exchange, half_s
from partopt.documents.actions import KINDS, B, F, I
from partopt.documents.stage import Stage
from partopt.documents.topology import Topology
from partopt.schedules.order import Order

# S   stages
# k   level, 1..L; its members are level-(k-1) components
#     a member has one port out and one port in, of `links` lanes each; a bus is one port for all

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ports:
    """Ports by level: level k has [first[k-1], first[k]), a member's out, then its in."""

    sizes: Integers  # devices in a level-k component, k = 0..L, shape (L + 1,)
    first: Integers  # shape (L + 1,)
    bus: NDArray[np.bool_]  # shape (L,)
    lanes: Integers  # links of a port, shape (L,)
    bandwidth: Floats  # bytes/s of one lane, shape (L,)
    latency: Floats  # seconds, shape (L,)

    @property
    def devices(self) -> int:
        """Devices in all."""
        return int(self.sizes[-1])

    @property
    def count(self) -> int:
        """Ports in all."""
        return int(self.first[-1])

    def of_ranks(self, ranks: NDArray[np.int32], k: Integers, side: int) -> Integers:
        """The port out (side 0) or in (side 1) of every rank at its level in `k`.

        It has the shape of `ranks`.
        """
        members = np.where(
            self.bus[k - 1], ranks // self.sizes[k], 2 * (ranks // self.sizes[k - 1]) + side
        )
        return self.first[k - 1] + members

    def of_ring(self, ranks: Sequence[int], wide: int = 0) -> tuple[Integers, Integers]:
        """The ports that a ring over `ranks` keeps busy, and their levels, ascending.

        At level `wide` the ring crosses to other ranks, even where `ranks` lie in one member.
        """
        found, members = [], np.unique(array_of(ranks))
        for k, bus in enumerate(self.bus.tolist(), start=1):
            components = members // (self.sizes[k] // self.sizes[k - 1])
            begins = np.flatnonzero(np.diff(components, prepend=-1))
            inside = np.diff(begins, append=len(members))
            passes = (inside > 1) | (k == wide)
            ports = components[begins[passes]]
            if not bus:
                passing = members[np.repeat(passes, inside)]
                ports = np.add.outer(2 * passing, (0, 1)).ravel()
            found.append(self.first[k - 1] + ports)
            members = components[begins]
        levels = np.repeat(np.arange(1, len(found) + 1), list(map(len, found)))
        return np.concatenate(found), levels


def ports_of(topology: Topology) -> Ports:
    """The ports of `topology`."""
    levels = topology.levels
    sizes = np.array([topology.group_size(k) for k in range(len(levels) + 1)], dtype=np.int64)
    counts = [
        topology.devices // sizes[k + 1] if level.bus else 2 * (topology.devices // sizes[k])
        for k, level in enumerate(levels)
    ]
    return Ports(
        sizes=sizes,
        first=np.cumsum([0, *counts]),
        bus=np.array([level.bus for level in levels]),
        lanes=np.array([level.links for level in levels], dtype=np.int64),
        bandwidth=np.array([level.bandwidth_bytes_per_s for level in levels], dtype=np.float64),
        latency=np.array([level.latency_s for level in levels], dtype=np.float64),
    )


class Ring(NamedTuple):
    """An all-reduce over some ranks, and the ports that it keeps busy, shape (ports,)."""

    reduced: AllReduce
    port: Integers
    slope: Floats  # seconds a byte
    turn: Integers  # as in `Rings`


class Groups(NamedTuple):
    """The ranks of all stages, and the rings over them, one after the other."""

    rank_of: Integers  # ranks of stage s: rank_of[replica_first[s] : replica_first[s + 1]]
    replica_first: Integers  # shape (S + 1,)
    entries: Integers  # ports of every ring, shape (S,)
    port: Integers
    slope: Floats  # seconds a byte, of every port
    turn: Integers
    total: Floats  # seconds a byte of a whole all-reduce, shape (S,)
    latency_s: Floats  # shape (S,)

    def rings(self, sizes: Floats, head_start_s: Floats, tail: Floats) -> Rings:
        """The all-reduces of `sizes` bytes in every stage; the others are as of `early_of`."""
        entries, (port, slope, turn) = self.entries, self[3:6]
        if not sizes.all():  # what has no bytes holds no port
            held = np.repeat(sizes > 0, entries)
            entries, port, slope, turn = entries * (sizes > 0), port[held], slope[held], turn[held]
        return Rings(
            np.concatenate([[0], np.cumsum(entries)]),
            *(port, slope * np.repeat(sizes, entries), turn, self.latency_s, head_start_s),
            (self.total * sizes + self.latency_s) * tail,
        )


class Links:
    """What a topology links: its ports, and the rings over any ranks, which are looked up once."""

    def __init__(self, topology: Topology) -> None:
        self.ports = ports_of(topology)
        self.ring = lru_cache(maxsize=None)(self._ring)
        self.groups = lru_cache(maxsize=None)(self._groups)
        self.pipeline = lru_cache(maxsize=None)(self._pipeline)
        self._smaller = dict[int, Links]()
        self.topology = topology

    @cached_property
    def lanes(self) -> Integers:
        """The lanes before every port, shape (ports + 1,)."""
        lanes = np.repeat(self.ports.lanes, np.diff(self.ports.first))
        return np.concatenate([[0], np.cumsum(lanes)])

    @cached_property
    def _handling(self) -> tuple[Floats, Floats]:
        """Seconds of a message and of a byte of it, by its level; 0 a device and itself."""
        levels = self.topology.levels
        message_s = np.array([0.0, *(level.message_s for level in levels)])
        return message_s, np.array([0.0, *(level.copy_byte_s for level in levels)])

    @property
    def handles(self) -> bool:
        """Whether messages take time of their devices."""
        return any(seconds.any() for seconds in self._handling)

    def handling_s(
        self, order: Order, groups: Groups, messages: Floats, crossing: Floats
    ) -> Floats:
        """Seconds that messages take of the device of every action, shape (actions,).

        The receiver's before it computes, the sender's after it. So many `messages` and bytes cross
        every cut, forward and back, shape (2, S + 1).
        """
        (overhead, copy), (rank_of, first, *_) = self._handling, groups
        rank = np.repeat(np.arange(order.ranks, dtype=np.int32), np.diff(order.rows))
        seconds, replicas = np.zeros(len(order.kind)), np.diff(first)
        for way, kinds in ((0, (F,)), (1, (B, I))):
            for other in (order.stage - 1, order.stage + 1):
                at = np.isin(order.kind, kinds) & (other >= 0) & (other < len(replicas))
                to, cut = other[at], np.maximum(order.stage, other)[at]
                peer = rank_of[first[to] + order.microbatch[at] % replicas[to]]
                k = parting_levels(rank[at], peer, self.topology)
                taken = messages[way, cut] * overhead[k] + crossing[way, cut] * copy[k]
                seconds[at] += np.where(k > 0, taken, 0.0)
        return seconds

    def _pipeline(self, ranks: tuple[Sequence[int], ...], microbatches: int | None) -> Pipeline:
        alike = one_of_alike(ranks, self.topology, microbatches)
        if alike is None:
            return Pipeline(1, ranks, self, self.groups(ranks))
        if (devices := alike.topology.devices) not in self._smaller:
            self._smaller[devices] = Links(alike.topology)
        links = self._smaller[devices]
        reduced = [allreduce_over(group, self.topology) for group in ranks]
        rings = list(map(links._ring, alike.ranks, reduced))
        return Pipeline(alike.copies, alike.ranks, links, _groups_of(alike.ranks, rings))

    def _groups(self, ranks: tuple[Sequence[int], ...]) -> Groups:
        return _groups_of(ranks, list(map(self.ring, ranks)))

    def _ring(self, ranks: Sequence[int], whole: AllReduce | None = None) -> Ring:
        """The all-reduce over ranks, or what these have of a `whole` one that goes beyond them."""
        reduced = whole or allreduce_over(ranks, self.topology)
        port, level = self.ports.of_ring(ranks, max(reduced.slopes, default=0))
        turn = level if reduced.algorithm == HIERARCHICAL else np.zeros_like(level)
        slope = np.array([reduced.slopes[k] for k in level.tolist()], dtype=np.float64)
        return Ring(reduced, port, slope, turn)


class Pipeline(NamedTuple):
    """One of some pipelines that are alike, on links for it alone; or all that there are."""

    copies: int
    ranks: Sequence[Sequence[int]]
    links: Links
    groups: Groups


def _groups_of(ranks: Sequence[Sequence[int]], rings: Sequence[Ring]) -> Groups:
    port, slope, turn = (np.concatenate(part) for part in list(zip(*rings, strict=True))[1:])
    return Groups(
        np.concatenate(list(map(array_of, ranks))),
        np.cumsum([0, *map(len, ranks)]),
        np.array([len(ring.port) for ring in rings]),
        *(port, slope, turn),
        np.array([ring.reduced.slope for ring in rings], dtype=np.float64),
        np.array([ring.reduced.latency_s for ring in rings]),
    )


class Rings(NamedTuple):
    """All-reduces; that of stage s keeps port[first[s] : first[s + 1]] busy."""

    first: Integers  # shape (S + 1,)
    port: Integers
    load: Floats  # seconds of every port
    turn: Integers  # of every port: ports of one turn are busy at once, turns in order
    latency_s: Floats  # shape (S,)
    head_start_s: Floats  # by which they may begin before the last backward ends, shape (S,)
    tail_s: Floats  # that are left when the last backward has ended, shape (S,)


@dataclass(frozen=True, eq=False)
class Work:
    """Costs of actions and messages, and whether the devices wait for messages.

    They are seconds of every kind of action on every stage and bytes of every message.
    `ranks[s][k]` is the rank of replica k of stage s; `serial`: the devices wait while they
    send and receive; `blocking`: an asynchronous stage exchanges its gradients within the backward
    that ends a round, and sends nothing on before that.
    """

    ranks: Sequence[Sequence[int]]
    seconds: Floats  # shape (kinds, S); kinds as in partopt.schedules.order.KINDS; of A unused
    cut_bytes: Floats  # shape (S + 1,): cut s lies before stage s
    gradient_bytes: Floats  # shape (S,)
    # by which an exchange of gradients with other stages lengthens the all-reduce, shape (S,)
    tied_s: Floats
    topology: Topology
    serial: bool = False
    blocking: bool = False
    # how stages exchange gradients beside their last backward, as of `early_of`, shape (2, S);
    # None: all wait for it
    early: Floats | None = None
    # bytes of gradients that go back over every cut, shape (S + 1,); None: as many as come
    back_bytes: Floats | None = None
    # messages over every cut, forward and back, shape (2, S + 1); None: always one
    messages: Floats | None = None
    # times the seconds of every action of an order, shape (actions,); empty where all are 1
    scale: Floats = field(default_factory=lambda: np.zeros(0))
    known: Pipeline | None = None  # `pipeline`, where it was looked up before

    @cached_property
    def pipeline(self) -> Pipeline:
        """The ranks, on what the topology links."""
        if self.known:
            return self.known
        links = Links(self.topology)
        return Pipeline(1, self.ranks, links, links.groups(tuple(map(tuple, self.ranks))))

    @property
    def links(self) -> Links:
        """What the topology links."""
        return self.pipeline.links

    @property
    def groups(self) -> Groups:
        """The ranks of all stages."""
        return self.pipeline.groups

    @property
    def ports(self) -> Ports:
        """The ports of the topology."""
        return self.links.ports

    @property
    def allreduces(self) -> list[AllReduce]:
        """How every stage exchanges its gradients."""
        return [self.links.ring(tuple(ranks)).reduced for ranks in self.ranks]

    @cached_property
    def rings(self) -> Rings:
        """The all-reduces of all stages."""
        early = np.zeros((2, len(self.ranks))) if self.early is None else self.early
        return self.groups.rings(self.gradient_bytes, *early)

    @cached_property
    def crossing(self) -> Floats:
        """Bytes of a microbatch over every cut, forward and back, shape (2, S + 1)."""
        return np.array(
            [self.cut_bytes, self.cut_bytes if self.back_bytes is None else self.back_bytes]
        )

    def action_s(self, order: Order) -> Floats:
        """Seconds of every action with its factor and its messages, shape (actions,).

        Empty where all of one kind on one stage take the same, `seconds`.
        """
        handled = self.links.handles
        if not len(self.scale) and not handled:
            return np.zeros(0)
        seconds = self.seconds[order.kind, order.stage]
        if len(self.scale):
            seconds = seconds * self.scale
        return seconds + self.handling_s(order) if handled else seconds

    def handling_s(self, order: Order) -> Floats:
        """Seconds that messages take of the device of every action, shape (actions,).

        Empty where no level has any.
        """
        if not self.links.handles:
            return np.zeros(0)
        counts = np.ones_like(self.crossing) if self.messages is None else self.messages
        return self.links.handling_s(order, self.groups, counts, self.crossing)


def early_of(stage: Stage, bucket_bytes: float, split: bool) -> tuple[float, float]:
    """How a stage exchanges gradients in such buckets, backwards whole or `split` in two parts.

    Seconds by which the exchange may begin before the last backward ends, and the share of it that
    comes after that end.
    """
    tail = float(tail_share(stage.trained_bytes, bucket_bytes))
    if tail == 1.0:
        return 0.0, 0.0
    return (stage.backward_weight_s if split else stage.backward_s) * (1.0 - tail), tail


def action_seconds(
    stage: Stage,
    topology: Topology,
    exchange: Exchange,
    recompute_apart: bool,
    gather: float = 1.0,
    scatter: float = 1.0,
) -> list[float]:
    """Seconds of every kind of action on a stage; gathers and scatters take so many times as long.

    Parameters are gathered and gradients scattered beside the compute, a layer after the other: an
    action takes as long as the longer of the two.
    """
    gather *= half_s(exchange.gathered * stage.parameter_bytes, stage.ranks, topology)
    scatter *= half_s(exchange.scattered * stage.trained_bytes, stage.ranks, topology)
    within = 0.0 if recompute_apart else stage.again_s
    input_s = stage.backward_s - stage.backward_weight_s
    seconds = {
        "F": max(stage.forward_s, gather),
        "B": max(stage.backward_s + within, gather + scatter),
        "I": max(input_s + within, gather),
        "W": max(stage.backward_weight_s, scatter),
        "R": max(stage.again_s, gather if stage.recompute else 0.0),
        "A": 0.0,
        "U": stage.optimizer_s,
    }
    return [seconds[kind] for kind in KINDS]
