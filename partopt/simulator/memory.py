"""What microbatches keep on a device between forward and backward, over time and at peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.documents.actions import KINDS, B, F, I, R, W
from partopt.documents.plan import Plan
from partopt.schedules.order import Order
from partopt.simulator.timeline import Timeline

# S   stages; s   one of them

Integers = NDArray[np.int64]


class Series(NamedTuple):
    """A quantity that changes in steps: `values[n]` from `times[n]` seconds on, until the next.

    Both have shape (changes + 1,).
    """

    times: NDArray[np.float64]
    values: Integers


class Steps(NamedTuple):
    """What the start of an action takes and what its end gives back, by kind and stage.

    Both have shape (kinds, S).
    """

    taken: Integers
    given: Integers


def in_flight_over_time(timeline: Timeline, rank: int) -> Series:
    """Microbatches that a rank holds, from the start of a forward to the end of its backward.

    Where the backward is split, they are held to the end of W. A microbatch that is in flight in
    several of the rank's stages counts in all of them.
    """
    return _series(timeline, rank, _counting(_stages(timeline.order)), 0)


def memory_over_time(timeline: Timeline, plan: Plan, rank: int) -> Series:
    """Bytes that a rank holds: its base memory, and the stash of every microbatch while kept."""
    return _series(
        timeline, rank, _stashing(timeline.order, plan), int(base_memory_bytes(plan)[rank])
    )


def peak_memory_bytes(
    order: Order, plan: Plan, ranks: Sequence[Sequence[int]] | None = None
) -> Integers:
    """The most bytes that every rank of an order holds at once, shape (ranks,).

    `ranks` are as in `base_memory_bytes`. A stage keeps its stash from the start of a forward to
    the end of the backward or, where that is split, of W, and from I to W what lies between these.
    A stage that is recomputed whole keeps its input alone, in the buffer that it came in; and the
    stash from the start of R, or of the backward where the schedule has no R. The order suffices
    without times: a rank runs one action after the other, and two joined ones both take before
    either gives back.
    """
    return base_memory_bytes(plan, ranks)[: order.ranks] + peaks(order, _stashing(order, plan))


def peaks(order: Order, steps: Steps) -> Integers:
    """The most that every rank holds at once of what its actions take, shape (ranks,)."""
    most = np.zeros(order.ranks, dtype=np.int64)
    fill_peaks(order.kind, order.stage, order.joined, order.rows, *steps, most)
    return most


@compiled()
def fill_peaks(kind, stage, joined, rows, taken, given, most):
    """Fill in the most that every rank holds at once; see `peaks`."""
    for rank in range(len(most)):
        level, owed = 0, 0  # what two joined actions give back they give back together
        for n in range(rows[rank], rows[rank + 1]):
            level += taken[kind[n], stage[n]]
            most[rank] = max(most[rank], level)
            owed += given[kind[n], stage[n]]
            if not joined[n]:
                level, owed = level - owed, 0


def base_memory_bytes(plan: Plan, ranks: Sequence[Sequence[int]] | None = None) -> Integers:
    """Bytes that every rank of the topology holds throughout, shape (devices,).

    These are weights, gradients, optimizer state, buffers, and room for the backward that takes
    most while it runs. Where one of the plan's pipelines stands for all, `ranks` are those of its
    stages.
    """
    memory = [stage.memory for stage in plan.stages]
    ranks = ranks or [stage.ranks for stage in plan.stages]
    rank_of = np.array([rank for group in ranks for rank in group])
    beside = np.array([part.transient_bytes for part in memory])
    held = np.array([part.total_bytes - part.activations_bytes for part in memory]) - beside
    return base_bytes(rank_of, list(map(len, ranks)), held, beside, plan.topology.devices)


def base_bytes(
    rank_of: Integers,
    replicas: Sequence[int] | Integers,
    held: Integers,
    beside: Integers,
    devices: int,
) -> Integers:
    """Bytes that every device holds of its stages, and the most that a backward takes beside it.

    `rank_of` are the ranks of the stages' `replicas`, one stage after the other.
    """
    base, transient = np.zeros((2, devices), dtype=np.int64)
    np.add.at(base, rank_of, np.repeat(held, replicas))
    np.maximum.at(transient, rank_of, np.repeat(beside, replicas))
    return base + transient


def _stages(order: Order) -> int:
    return int(order.stage.max(initial=0)) + 1


def _counting(S: int) -> Steps:
    taken, given = np.zeros((2, len(KINDS), S), dtype=np.int64)
    taken[F] = 1
    given[[B, W]] = 1
    return Steps(taken, given)


def _stashing(order: Order, plan: Plan) -> Steps:
    """`stash_steps` of a plan's stages."""
    stash = np.array([stage.stash_bytes for stage in plan.stages])
    parting = np.array([stage.split_stash_bytes for stage in plan.stages])
    whole = np.array([stage.recomputes_whole for stage in plan.stages])
    return stash_steps(order, stash, parting, whole)


def stash_steps(
    order: Order, stash: Integers, parting: Integers, whole: NDArray[np.bool_]
) -> Steps:
    """Bytes; every backward gives back all that its microbatch has taken.

    Of every stage its stash, what lies between the parts of a backward, and whether it keeps its
    input alone.
    """
    taken, given = np.zeros((2, len(KINDS), len(stash)), dtype=np.int64)
    apart = np.zeros_like(whole)
    apart[order.stage[order.kind == R]] = True
    taken[F], taken[R] = np.where(whole, 0, stash), np.where(whole & apart, stash, 0)
    taken[[B, I]] = np.where(whole & ~apart, stash, 0)
    given[[B, W]] = stash
    taken[I] += parting
    given[W] += parting
    return Steps(taken, given)


def _levels(order: Order, row: slice, steps: Steps) -> tuple[Integers, Integers]:
    """What is held during the actions in `row`, and after them, beyond what was before."""
    kind, stage = order.kind[row], order.stage[row]
    taken, given = steps.taken[kind, stage], steps.given[kind, stage]
    first = np.flatnonzero(order.joined[row])
    taken[first] += taken[first + 1]
    given[first + 1] += given[first]
    taken[first + 1] = given[first] = 0
    after = np.cumsum(taken - given)
    return after + given, after


def _series(timeline: Timeline, rank: int, steps: Steps, base: int) -> Series:
    """What a rank holds over time, starting with `base` at 0 s.

    Points at which nothing changes are left out.
    """
    row = timeline.order.of_rank(rank)
    levels = _levels(timeline.order, row, steps)
    times = np.stack([timeline.start[row], timeline.end[row]], axis=1).ravel().astype(np.float64)
    values = base + np.stack(levels, axis=1).ravel()
    changed = np.diff(values, prepend=base) != 0
    return Series(
        np.concatenate([[0.0], times[changed]]), np.concatenate([[base], values[changed]])
    )
