"""What a schedule is: the order of every device, and every fact about it.

Formulas, planners and the simulator read these facts. A schedule's file makes its entry, a
`Schedule`, beside its `row`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from partopt.schedules.order import Row
from partopt.schedules.placement import CHUNKS, LOOPED, MIRRORED, STRAIGHT, Place

# s, r_s   a stage and its replicas
# p, P, v  position of a device in its pipeline, devices of the pipeline, stages on a device
# M        microbatches of an iteration through all replicas; through one pipeline where P is given;
#          None: no limit

# weight versions of a stage: one for every microbatch in flight
ALL_IN_FLIGHT = 0


class Counts(NamedTuple):
    """Microbatches of a replica of a stage.

    `warmup` forwards come before its first backward. It holds at most `held` between their forward
    and the end of their backward; of at most `begun` the backward, or the recomputation before it,
    has begun.
    """

    warmup: int
    held: int
    begun: int


# of the stage s, the replicas of every stage, and M
StageCounts = Callable[[int, Sequence[int], int | None], Counts]
# the most chunks in flight in all stages of a device together, of p, P, v and M
DeviceCounts = Callable[[int, int, int, int], int]


class Times(NamedTuple):
    """What the actions of one stage take: a forward, and the two parts of its backward."""

    F: float
    I: float  # noqa: E741
    W: float

    @property
    def B(self) -> float:
        """A whole backward."""
        return self.I + self.W


SLOTS = Times(1, 1, 1)  # in slots, the time of a forward


@dataclass(frozen=True)
class Bubble:
    """The time in an iteration for which every device waits, of equal stages.

    Messages take no time. `text` is the formula as papers print it, `condition` where it holds, if
    not everywhere; `of` and `holds` compute them from P, v, M and the times of a stage. Of an
    asynchronous schedule it is the waiting in its steady state.
    """

    text: str
    of: Callable[[int, int, int, Times], float]
    condition: str = ""
    holds: Callable[[int, int, int, Times], bool] = lambda P, v, M, t: True


# a pipeline fills and drains once
FLUSH = Bubble("(P-1)(F+B)", lambda P, v, M, t: (P - 1) * (t.F + t.B))
# gradients of the weights fill the drain
FILLED_DRAIN = Bubble(
    "(P-1)(F+I-W)",
    lambda P, v, M, t: (P - 1) * (t.F + t.I - t.W),
    "M >= P and W <= F, I",
    lambda P, v, M, t: M >= P and min(t.F, t.I) >= t.W,
)


def no_stage_counts(s: int, replicas: Sequence[int], microbatches: int | None) -> Counts:
    """Refuse: devices have several stages, whose orders are counted."""
    raise AssertionError("with several stages on a device, `in_flight` counts those of a device")


def no_device_counts(p: int, P: int, v: int, microbatches: int) -> int:
    """Refuse: every device has one stage."""
    raise AssertionError("with one stage on each device, `counts` counts those of a stage")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule: its name, what it does in a line, the order of a device, and its facts.

    Facts with a default are those of a schedule with a flush and one stage on every device. It
    states `counts` or, with several stages on a device, `in_flight`. ValueError where facts
    contradict one another.
    """

    name: str
    summary: str
    row: Callable[[Place], Row]
    shape: str = STRAIGHT  # how its stages lie, as partopt.schedules.placement names it
    asynchronous: bool = False  # it never flushes: there are no iterations
    split: bool = False  # its backwards are in two parts, I and W
    uneven: bool = False  # its stages may have unequal numbers of replicas
    # recomputation is an action, R, done while a device waits for the gradient
    recomputes: bool = False
    repeats: bool = False  # between fill and drain a row is the same steps again and again
    one_at_a_time: bool = False  # devices overlap nothing: one microbatch is on its way at a time
    counts: StageCounts = no_stage_counts
    in_flight: DeviceCounts = no_device_counts
    takes_warmup: bool = False  # plans state the warm-up, which may be another: `row` follows it
    weight_versions: int = 1  # that a stage keeps: 1, 2, or ALL_IN_FLIGHT
    bubble: Bubble  # for how long every device waits
    tried_by_auto: bool = True  # `schedule="auto"` tries it, looped ones with any number of chunks
    data_parallel: bool = False  # `schedule="auto"` tries it with one device in every pipeline

    def __post_init__(self) -> None:
        straight = self.shape == STRAIGHT
        stated = self.counts is not no_stage_counts, self.in_flight is not no_device_counts
        faults = {
            f"unknown shape {self.shape!r}": self.shape not in (*CHUNKS, LOOPED),
            "one stage on each device has `counts`, several have `in_flight`": stated
            != (straight, not straight),
            "weight_versions is 1, 2 or ALL_IN_FLIGHT": self.weight_versions
            not in (ALL_IN_FLIGHT, 1, 2),
            'asynchronous: one stage on each device, and `schedule="auto"` does not try it': (
                self.asynchronous and (not straight or self.tried_by_auto)
            ),
        }
        for fault, found in faults.items():
            if found:
                raise ValueError(f"schedule {self.name}: {fault}")

    @property
    def overlaps(self) -> bool:
        """Whether devices with one stage a device work at once: what `optimal` can plan for."""
        return self.shape == STRAIGHT and not self.one_at_a_time

    @property
    def steps_in_backwards(self) -> bool:
        """Whether every backward ends with a step of the optimizer, which makes a version."""
        return self.weight_versions == ALL_IN_FLIGHT

    def versions_of(self, held: int) -> int:
        """Versions of its weights that a stage keeps with `held` microbatches in flight."""
        return self.weight_versions or held

    def stages_a_device(self, v: int) -> int:
        """Stages for every device of a pipeline: v, where the shape does not say how many.

        1 where there are two copies of the pipeline.
        """
        return 1 if self.shape == MIRRORED else CHUNKS.get(self.shape, v)

    def makespan(self, P: int, v: int, M: int, t: Times = SLOTS) -> float:
        """Time of an iteration in closed form, where `bubble` holds; by default in slots."""
        return self.stages_a_device(v) * M * (t.F + t.B) + self.bubble.of(P, v, M, t)

    def idle_share(self, P: int, v: int, M: int) -> float:
        """Share of an iteration for which devices wait, where F = I = W."""
        return self.bubble.of(P, v, M, SLOTS) / self.makespan(P, v, M)


class Replicas(list[int]):
    """The replicas of every stage; what is asked of every stage in turn is added up once."""

    @cached_property
    def after(self) -> list[int]:
        """The devices of the stages after each stage."""
        ends = list(accumulate(self))
        return [ends[-1] - end for end in ends]


def devices_after(s: int, replicas: Sequence[int]) -> int:
    """The devices of the stages after stage s."""
    return replicas.after[s] if isinstance(replicas, Replicas) else sum(replicas[s + 1 :])
