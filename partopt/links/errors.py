"""How far a fitted topology is from what was measured, size by size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partopt.cost.collectives import allreduce_s
from partopt.documents.topology import Level, Topology
from partopt.links.fit import Sharing, messages_in_turn
from partopt.links.samples import LevelSamples, LinkMeasurement, MessageSample

POOR = 0.15  # a fit with a larger error anywhere is called poor
SENDER = "its sender"


@dataclass(frozen=True)
class Comparison:
    """One measured figure beside what the topology says; `error` is positive where that is more."""

    level: str
    what: str
    size_bytes: int
    measured_s: float
    fitted_s: float
    error: float

    @property
    def allowed(self) -> float:
        """The largest error of a good fit."""
        return POOR

    @property
    def is_poor(self) -> bool:
        """Whether the topology is too far off here."""
        return abs(self.error) > POOR


def compare(measurement: LinkMeasurement, topology: Topology) -> list[Comparison]:
    """All measured figures that the topology speaks of, level by level.

    What a message takes of its sender is compared as a share of the whole message.
    """
    found: list[Comparison] = []
    for place, (samples, level) in enumerate(zip(measurement.levels, topology.levels, strict=True)):
        found += _messages(samples, level)
        if level.overhead_s or level.copy_bytes_per_s:
            found += _handling(samples, level)
        step = topology.group_size(place)
        for each in samples.allreduces:
            ranks = range(0, each.ranks * step, step)
            fitted = allreduce_s(each.size_bytes, ranks, topology)
            what = f"all-reduce of {each.ranks}"
            found.append(_relative(level.name, what, each.size_bytes, each.seconds, fitted))
    for each in measurement.whole:
        fitted = allreduce_s(each.size_bytes, range(each.ranks), topology)
        what = f"all-reduce of {each.ranks}"
        found.append(_relative("all", what, each.size_bytes, each.seconds, fitted))
    return found


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """The one with the largest error."""
    return max(comparisons, key=lambda each: abs(each.error))


def message_s(sample: MessageSample, level: Level) -> float:
    """What the level says of messages under way at once, from send to arrival of the last."""
    n = messages_in_turn(sample.traffic, Sharing(level.bus, level.links))
    return level.latency_s + n * sample.size_bytes / level.bandwidth_bytes_per_s


def _messages(samples: LevelSamples, level: Level) -> Iterator[Comparison]:
    for each in samples.messages:
        fitted = message_s(each, level)
        yield _relative(level.name, each.traffic.label, each.size_bytes, each.seconds, fitted)


def _handling(samples: LevelSamples, level: Level) -> Iterator[Comparison]:
    for each in samples.handling:
        fitted = level.message_s + each.size_bytes * level.copy_byte_s
        error = (fitted - each.send_s) / samples.single_s[each.size_bytes]
        yield Comparison(level.name, SENDER, each.size_bytes, each.send_s, fitted, error)


def _relative(
    level: str, what: str, size_bytes: int, measured_s: float, fitted_s: float
) -> Comparison:
    return Comparison(level, what, size_bytes, measured_s, fitted_s, fitted_s / measured_s - 1)
