"""Microbatches in flight, weight versions and warm-up of a stage.

In flight are the microbatches that a stage holds at once; the warm-up is its forwards before its
first backward. All are read from the schedule's entry (`partopt.schedules.entry.Schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partopt.schedules import schedule
from partopt.schedules.entry import DeviceCounts, StageCounts, downstream_warmup

# M        microbatches per iteration of a synchronous schedule
# S, s     stages, and which one
# r_s      replicas of stage s
# P, p     devices of one pipeline, and the place of one among them
# v        chunks, stages of one device


class Counts(NamedTuple):
    """Microbatches of a replica of a stage.

    `warmup` forwards come before its first backward, and the most that it holds are `held`, of
    which `begun` have begun their backward.
    """

    warmup: int
    held: int
    begun: int


def counts_of(name: str, s: int, replicas: Sequence[int], microbatches: int | None) -> Counts:
    """The counts of stage s. The schedule `name` has one stage on each device."""
    return Counts(*(count(name, s, replicas, microbatches) for count in (warmup, in_flight, begun)))


def noam(devices: int, input_replicas: int) -> int:
    """Minibatches in flight per input-stage replica: ceil(P / r_0).

    PipeDream, SOSP 2019, section 3.2.
    """
    return -(-devices // input_replicas)


def in_flight(name: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """The most microbatches that one replica of stage s holds at once.

    A microbatch is held from its forward to the end of its backward. The schedule `name` has one
    stage on each device.
    """
    counts = schedule(name).counts
    assert isinstance(counts, StageCounts), "chunks_in_flight counts those of a device"
    return counts.in_flight(s, replicas, microbatches)


def begun(name: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """The most microbatches at once whose backward one replica of stage s has begun, not ended.

    It begins with its recomputation, if any, and where it is in two parts ends with the second. The
    schedule `name` has one stage on each device.
    """
    counts = schedule(name).counts
    assert isinstance(counts, StageCounts), "with several stages on a device, orders are counted"
    return counts.begun(s, replicas, microbatches)


def warmup(name: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """Forwards that one replica of stage s does before its first backward.

    The schedule `name` has one stage on each device.
    """
    counts = schedule(name).counts
    assert isinstance(counts, StageCounts), "with several stages on a device, rows know their own"
    return counts.warmup(s, replicas, microbatches)


def chunks_in_flight(name: str, p: int, P: int, v: int, microbatches: int) -> int:
    """The most microbatches in flight on device p, in all of its v chunks together.

    The schedule `name` has several stages on each device.
    """
    counts = schedule(name).counts
    assert isinstance(counts, DeviceCounts), "in_flight counts those of a stage"
    return counts.in_flight(p, P, v, microbatches)


def weight_versions(name: str, held: int) -> int:
    """Versions of its weights that a stage keeps with `held` microbatches in flight."""
    return schedule(name).versions_of(held)


def blocking_warmups(replicas: Sequence[int]) -> list[int]:
    """Warm-ups under pipedream with which devices that wait for their all-reduces cannot deadlock.

    No gradient of a round leaves stage s+1 before all of its replicas have had their backward, for
    which it has taken in (w_{s+1} + 1) r_{s+1} microbatches; the replica of stage s that sends the
    last of these must get to it without a backward of that round: w_s >= ceil(((w_{s+1} + 1)
    r_{s+1} - 1) / r_s). PipeDream's own warm-up is less for 1-3-1 and deadlocks. Derived here.
    """
    warmups, usual = [0] * len(replicas), downstream_warmup(1)
    for s in reversed(range(len(replicas) - 1)):
        taken_in = (warmups[s + 1] + 1) * replicas[s + 1]
        warmups[s] = max(usual(s, replicas, None), -(-(taken_in - 1) // replicas[s]))
    return warmups
