"""What a schedule is: the order of each device, and every fact about it.

Formulas, planners and the simulator read these facts. Each schedule's file makes its entry,
`SCHEDULE = Schedule(...)`, beside its `row`. No fact has a default: one that is left out is an
error when the entry is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from partopt.schedules.bubble import SLOTS, Bubble, Times
from partopt.schedules.layout import CHUNKS, LOOPED, MIRRORED, STRAIGHT, Place, own_microbatches
from partopt.schedules.order import Row

# s, r_s   a stage and its replicas
# p, P, v  position of a device in its pipeline, devices of the pipeline, stages on a device
# M        microbatches of an iteration through all replicas; through one pipeline where P is given;
#          None: no limit

# weight versions of a stage: one for each microbatch in flight
ALL_IN_FLIGHT = 0

# what the microbatches in flight of a stage depend on
DOWNSTREAM, OWN, DEPTH = range(3)


@dataclass(frozen=True)
class Kernel:
    """What formulas that have no whole plan yet know of the microbatches in flight.

    Those of stage s depend on the devices downstream (DOWNSTREAM), on the M / r_s microbatches
    that a replica gets, all of which it holds (OWN), or on how many stages there are (DEPTH). Of
    what it rebuilds, a stage keeps one stash, under DEPTH as many as there are stages up to it.
    """

    depends_on: int

    def __post_init__(self) -> None:
        if self.depends_on not in (DOWNSTREAM, OWN, DEPTH):
            raise ValueError(f"depends_on is DOWNSTREAM, OWN or DEPTH, not {self.depends_on}")


# of the stage s, the replicas of every stage, and M
Count = Callable[[int, Sequence[int], int | None], int]


@dataclass(frozen=True)
class StageCounts:
    """What one replica of a stage holds and does first, with one stage on each device."""

    # the most microbatches between their forward and the end of their backward
    in_flight: Count
    # the most microbatches at once whose backward, or the recomputation before it, has begun
    begun: Count
    # forwards before the first backward
    warmup: Count
    # plans state the warm-up, which may be another: `row` follows `place.warmup`
    takes_warmup: bool
    kernel: Kernel | None  # None: the optimal planner cannot plan for the schedule


@dataclass(frozen=True)
class DeviceCounts:
    """What one device holds, with several stages on each."""

    # the most microbatches in flight in all of its stages together, of p, P, v and M
    in_flight: Callable[[int, int, int, int], int]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule: its name, what it does in a line, the order of a device, and its facts.

    ValueError where facts contradict each other.
    """

    name: str
    summary: str
    row: Callable[[Place], Row]
    shape: str  # how its stages lie on the devices, as partopt.schedules.layout names it
    asynchronous: bool  # it never flushes: there are no iterations
    split: bool  # its backwards are in two parts, I and W
    uneven: bool  # its stages may have unequal numbers of replicas
    # recomputation is an action of its own, R, done while a device waits for the gradient
    recomputes: bool
    one_at_a_time: bool  # devices overlap nothing: one microbatch is on its way at a time
    counts: StageCounts | DeviceCounts
    weight_versions: int  # that a stage keeps: 1, 2, or ALL_IN_FLIGHT
    bubble: Bubble  # for how long each device waits
    # whether devices wait for their messages under engines that run it, and which those are
    comm: Literal["overlap", "serial"]
    comm_source: str
    tried_by_auto: bool  # `schedule="auto"` tries it, looped ones with any number of chunks
    data_parallel: bool  # `schedule="auto"` tries it with one device in each pipeline

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(f"schedule {self.name}: {fault}")

    def _faults(self) -> Iterator[str]:
        if self.shape not in (*CHUNKS, LOOPED):
            yield f"unknown shape {self.shape!r}"
        elif (self.shape == STRAIGHT) != isinstance(self.counts, StageCounts):
            yield "counts are StageCounts with one stage on each device, else DeviceCounts"
        if self.weight_versions not in (ALL_IN_FLIGHT, 1, 2):
            yield "weight_versions is 1, 2 or ALL_IN_FLIGHT"
        if self.asynchronous and (self.shape != STRAIGHT or self.tried_by_auto):
            yield 'asynchronous: one stage on each device, and `schedule="auto"` does not try it'
        if self.one_at_a_time and self.kernel is not None:
            yield "one_at_a_time: the optimal planner cannot plan for it, kernel is None"

    @property
    def takes_warmup(self) -> bool:
        """Whether plans state the warm-up of each stage, which may differ from the usual one."""
        return isinstance(self.counts, StageCounts) and self.counts.takes_warmup

    @property
    def kernel(self) -> Kernel | None:
        """Microbatches in flight for compiled code.

        None where the optimal planner cannot plan for the schedule.
        """
        return self.counts.kernel if isinstance(self.counts, StageCounts) else None

    @property
    def steps_in_backwards(self) -> bool:
        """Whether every backward ends with a step of the optimizer, which makes a version."""
        return self.weight_versions == ALL_IN_FLIGHT

    def versions_of(self, held: int) -> int:
        """Versions of its weights that a stage keeps with `held` microbatches in flight."""
        return self.weight_versions or held

    def makespan(self, P: int, v: int, M: int, t: Times = SLOTS) -> float:
        """Time of an iteration in closed form, where `bubble` holds; by default in slots."""
        passes = 1 if self.shape == MIRRORED else v
        return passes * M * (t.F + t.B) + self.bubble.of(P, v, M, t)


class Replicas(list[int]):
    """The replicas of every stage; what is asked of every stage in turn is added up once."""

    @cached_property
    def after(self) -> list[int]:
        """The devices of the stages after each stage."""
        ends = list(accumulate(self))
        return [ends[-1] - end for end in ends]


def _after(s: int, replicas: Sequence[int]) -> int:
    """The devices of the stages after stage s."""
    return replicas.after[s] if isinstance(replicas, Replicas) else sum(replicas[s + 1 :])


def all_own(s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """All microbatches that the first replica of stage s gets in an iteration, ceil(M / r_s)."""
    assert microbatches is not None
    return own_microbatches(microbatches, replicas[s], 0)


def only_one(s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """One microbatch, whatever the stage: the backward that recomputes it uses it up."""
    return 1


def downstream_warmup(factor: int) -> Count:
    """`factor` times the warm-up of 1F1B: ceil(factor * sum of r_t over t > s, over r_s).

    No more than all but one of the ceil(M / r_s) that a replica gets.
    """

    def warmup(s: int, replicas: Sequence[int], microbatches: int | None) -> int:
        first = -(-factor * _after(s, replicas) // replicas[s])
        return first if microbatches is None else min(first, all_own(s, replicas, microbatches) - 1)

    return warmup


def downstream(factor: int, *, takes_warmup: bool) -> StageCounts:
    """The counts of 1F1B with `downstream_warmup`, one microbatch more than it in flight.

    Where the schedule `takes_warmup`, plans may state another.
    """
    warmup = downstream_warmup(factor)

    def in_flight(s: int, replicas: Sequence[int], microbatches: int | None) -> int:
        return warmup(s, replicas, microbatches) + 1

    kernel = Kernel(DOWNSTREAM)
    return StageCounts(in_flight, only_one, warmup, takes_warmup=takes_warmup, kernel=kernel)
