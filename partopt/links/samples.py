"""Measured seconds of messages and all-reduces: what the ranks report and the fits read."""

from __future__ import annotations

from dataclasses import dataclass

from partopt.links.layout import Traffic


@dataclass(frozen=True)
class MessageSample:
    """Messages of one size under way at once on a level; `seconds` from send to arrival."""

    traffic: Traffic
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class HandlingSample:
    """What a single message takes of its sender, and how long a late receive waits for it."""

    size_bytes: int
    send_s: float  # until the call that begins to send returns
    late_s: float  # from a receive that is posted after the send, to the arrival


@dataclass(frozen=True)
class AllReduceSample:
    """An all-reduce over `ranks` ranks, each on its own member of the level."""

    ranks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class LevelSamples:
    """Everything measured on one level."""

    name: str
    size: int
    messages: tuple[MessageSample, ...]
    handling: tuple[HandlingSample, ...]
    allreduces: tuple[AllReduceSample, ...]

    @property
    def single_s(self) -> dict[int, float]:
        """Seconds of a single message, by its bytes."""
        one = self.messages[0].traffic
        return {each.size_bytes: each.seconds for each in self.messages if each.traffic == one}


@dataclass(frozen=True)
class LinkMeasurement:
    """The levels of a cluster, innermost first, and what they were measured on."""

    device: str
    memory_bytes: int | None  # of one rank's device
    backend: str
    ranks: int
    hosts: tuple[str, ...]  # of each rank
    load: float  # runnable processes of the busiest host for each of its cores, before
    cores: int  # of that host
    levels: tuple[LevelSamples, ...]
    whole: tuple[AllReduceSample, ...] = ()  # over all ranks, where there are several levels
