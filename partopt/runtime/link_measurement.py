"""Measures the links between the ranks of a run, level by level; every rank takes part."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from partopt.links.layout import MeasuredLevel, Traffic, levels_of
from partopt.links.samples import (
    AllReduceSample,
    HandlingSample,
    LevelSamples,
    LinkMeasurement,
    MessageSample,
)
from partopt.profiler.device import describe_device
from partopt.runtime.context import Context
from partopt.runtime.link_messages import (
    Peer,
    Seconds,
    allreduce,
    exchange,
    ping,
    pong,
    receive_late,
    send_early,
)

_MANY_BYTES, _MOST_TIMES = 4 * 10**6, 10


@dataclass(frozen=True)
class LinkSettings:
    """What is measured: servers of `per_server` ranks, messages of `sizes` bytes."""

    per_server: int
    sizes: tuple[int, ...]
    repetitions: int = 10  # at the least, the warm-up with them; of small messages there are more
    rounds: int = 3  # over all sizes, so that a burst of other work is in one of them

    def repetitions_of(self, size_bytes: int) -> int:
        """How often a message of `size_bytes` is repeated in a round."""
        return self.repetitions * max(1, min(_MOST_TIMES, _MANY_BYTES // size_bytes))


def measure_links(
    settings: LinkSettings, tell: Callable[[str], None], context: Context
) -> LinkMeasurement:
    """Measure every level; `tell` is called on rank 0 with what is measured next.

    Every rank of the run calls it and gets the same. A message's seconds are the median of its
    repetitions, and the mean over the pairs that exchange at once.
    """
    load, cores = _load(context)  # before there is any of our own
    ranks = _Ranks(context, settings, tell if context.rank == 0 else lambda text: None)
    levels = levels_of(context.ranks, settings.per_server)
    ranks.make_groups(levels)
    device = describe_device(context.device)
    memory = device.memory_bytes
    if memory is not None and context.device.type == "cpu":
        memory //= settings.per_server  # the ranks of a host share what it has
    return LinkMeasurement(
        device=device.name,
        memory_bytes=memory,
        backend="gloo" if context.device.type == "cpu" else "nccl",
        ranks=context.ranks,
        hosts=tuple(context.gather(context.host)),
        load=load,
        cores=cores,
        levels=tuple(ranks.measure_level(level) for level in levels),
        whole=ranks.allreduces(tuple(range(context.ranks))) if len(levels) > 1 else (),
    )


def _load(context: Context) -> tuple[float, int]:
    """Runnable processes for each core, of the host that has the most, and its cores."""
    cores = os.cpu_count() or 1
    if not hasattr(os, "getloadavg"):
        return 0.0, cores
    return max(context.gather((os.getloadavg()[0] / cores, cores)))  # type: ignore[no-any-return]


class _Ranks:
    """All ranks of the run, from one of them: what they time together and tell each other."""

    def __init__(
        self, context: Context, settings: LinkSettings, tell: Callable[[str], None]
    ) -> None:
        self.context, self.settings, self.tell = context, settings, tell

    def make_groups(self, levels: Sequence[MeasuredLevel]) -> None:
        """Make all process groups first: every rank has to, in one order."""
        for level in levels:
            for ranks in level.allreduces:
                self.context.group(ranks)
            if self.context.device.type == "cuda":
                for first, second in (pair for each in level.traffic for pair in each.pairs):
                    self.context.group([first, second], f"{first}>{second}")
                    self.context.group([first, second], f"{second}>{first}")
        self.context.group(range(self.context.ranks))

    def measure_level(self, level: MeasuredLevel) -> LevelSamples:
        """Everything that is measured on one level."""
        one = level.traffic[0]
        timed = {traffic: self._messages(level, traffic) for traffic in level.traffic}
        self.tell(f"{level.name}: late receives")
        late = self._in_rounds(partial(self._late, one.pairs[0], timed[one]))
        return LevelSamples(
            level.name,
            level.size,
            tuple(
                MessageSample(traffic, size, seen.message)
                for traffic, sizes in timed.items()
                for size, seen in sizes.items()
            ),
            tuple(
                HandlingSample(size, seen.send, late[size].message)
                for size, seen in timed[one].items()
            ),
            tuple(each for ranks in level.allreduces for each in self.allreduces(ranks)),
        )

    def allreduces(self, ranks: tuple[int, ...]) -> tuple[AllReduceSample, ...]:
        """All-reduces of every size over `ranks`; the mean of what its ranks saw."""
        self.tell(f"all-reduce of {len(ranks)}")
        timed = self._in_rounds(partial(self._allreduce, ranks))
        return tuple(
            AllReduceSample(len(ranks), size, seen.message) for size, seen in timed.items()
        )

    def _in_rounds(self, measure: Callable[[int], Seconds]) -> dict[int, Seconds]:
        """What `measure` gives for each size, the median of several rounds over all of them."""
        rounds = [
            [measure(size) for size in self.settings.sizes] for _ in range(self.settings.rounds)
        ]
        return {
            size: Seconds(*map(statistics.median, zip(*seen, strict=True)))
            for size, seen in zip(self.settings.sizes, zip(*rounds, strict=True), strict=True)
        }

    def _allreduce(self, ranks: tuple[int, ...], size: int) -> Seconds:
        group, own = self.context.group(ranks), None
        self.context.barrier()
        if self.context.rank in ranks:
            repetitions = self.settings.repetitions_of(size)
            own = Seconds(allreduce(self.context, group, size, repetitions))
        return self._mean(own)

    def _messages(self, level: MeasuredLevel, traffic: Traffic) -> dict[int, Seconds]:
        self.tell(f"{level.name}: {traffic.label}")
        return self._in_rounds(partial(self._message, traffic))

    def _message(self, traffic: Traffic, size: int) -> Seconds:
        """The mean of what the first rank of every pair saw."""
        own, count = None, self.settings.repetitions_of(size)
        self.context.barrier()
        for first, second in traffic.pairs:
            if self.context.rank not in (first, second):
                continue
            leads = self.context.rank == first
            peer = Peer(self.context, second if leads else first)
            if traffic.both_ways:
                own = Seconds(exchange(peer, size, count))
            elif leads:
                own = ping(peer, size, count)
            else:
                pong(peer, size, count)
        return self._mean(own)

    def _late(self, pair: tuple[int, int], early: dict[int, Seconds], size: int) -> Seconds:
        """From a receive that is posted after the message was sent, to its arrival."""
        own, count = None, self.settings.repetitions_of(size)
        self.context.barrier()
        if self.context.rank == pair[0]:
            send_early(Peer(self.context, pair[1]), size, count)
        elif self.context.rank == pair[1]:
            peer = Peer(self.context, pair[0])
            own = Seconds(receive_late(peer, size, count, early[size].message))
        return self._mean(own)

    def _mean(self, own: Seconds | None) -> Seconds:
        """The mean over the ranks that saw anything."""
        seen = [value for value in self.context.gather(own) if value is not None]
        return Seconds(*map(statistics.fmean, zip(*seen, strict=True)))
