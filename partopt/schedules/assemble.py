"""Whole orders: put together from the rows of single devices, and checked.

Microbatches are numbered, all-reduces and optimizer steps put in, for all ranks at once. Of an
order of one's own, `check` says what no pipeline can execute, and which work is left out.
Deadlocks, devices that wait for each other, are found by executing the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError
from partopt.schedules.entry import Schedule
from partopt.schedules.layout import Chunks, Layout, Place
from partopt.schedules.order import (
    KINDS,
    A,
    B,
    F,
    I,
    Integers,
    Order,
    R,
    Row,
    U,
    W,
    microbatch_numbers,
)

SHORT = 1024  # microbatches of a device, times its chunks: shorter rows are remembered
NOWHERE = -1  # the place of an action that is not there


class NumberedRow(NamedTuple):
    """A row, and of each action which of its chunk's microbatches it is for."""

    row: Row
    number: NDArray[np.int32]


def row_of(entry: Schedule, place: Place) -> NumberedRow:
    """What the device at `place` does; a search asks for the same short rows often."""
    return (_known_row if place.M * place.v <= SHORT else _row_of)(entry.row, place)


def _row_of(row: Callable[[Place], Row], place: Place) -> NumberedRow:
    found = row(place)
    return NumberedRow(found, microbatch_numbers(found))


_known_row = lru_cache(maxsize=1024)(_row_of)


def write_rows(
    rows: Sequence[NumberedRow], which: Integers, chunks: Chunks, v: int, layout: Layout
) -> Order:
    """The order in which the n-th rank with work does `rows[which[n]]`, on its v chunks."""
    every = Row(*(np.concatenate(parts) for parts in zip(*(own.row for own in rows), strict=True)))
    number = np.concatenate([own.number for own in rows])
    lengths = np.array([len(own.number) for own in rows])
    first = np.cumsum(lengths) - lengths
    length = lengths[which]
    place = _ranges(first[which], length)
    at = every.chunk[place] + np.repeat(v * np.arange(len(which)), length)
    stage, replicas = chunks.stage[at], np.array(layout.replicas, dtype=np.int32)
    counts = np.zeros(layout.devices + 1, dtype=np.int64)
    counts[chunks.rank[::v] + 1] = length
    return Order(
        kind=every.kind[place],
        stage=stage,
        microbatch=number[place] * replicas[stage] + chunks.k[at],
        joined=every.joined[place],
        rows=np.cumsum(counts),
    )


def _ranges(first: Integers, length: Integers) -> Integers:
    """The numbers from each of `first` on, as many as `length` says, one range after the other."""
    ends = np.cumsum(length)
    places: Integers = np.repeat(first - (ends - length), length)
    places += np.arange(len(places))
    return places


def add_updates(order: Order, chunks: Chunks, layout: Layout, asynchronous: bool) -> Order:
    """The order with the exchange of gradients and, synchronous, the optimizer's steps.

    Synchronous, a stage exchanges after its last backward, a replica without microbatches at once.
    Asynchronous, it exchanges after every round of one microbatch on each replica, and what a last,
    partial round leaves over is not exchanged. A stage that shares no gradients does not exchange.
    """
    exchanges = np.array([layout.exchanges(s) for s in range(len(layout.ranks))])
    if asynchronous:
        return _add_rounds(order, exchanges, layout)
    exchanging = np.flatnonzero(exchanges[chunks.stage])
    rank = chunks.rank
    after = np.concatenate(
        [_after_last(order, chunks, exchanging), order.rows[rank + 1]], dtype=np.int64
    )
    whose = np.concatenate([exchanging, np.arange(len(rank))])
    kind = np.repeat(np.array([A, U], dtype=np.int8), [len(exchanging), len(rank)])
    # by rank; at one place all-reduces come before steps, and those of earlier chunks first
    by_place = np.lexsort((whose, kind, after, rank[whose]))
    whose = whose[by_place]
    added = np.bincount(rank[whose], minlength=order.ranks)
    return _insert(order, after[by_place], added, kind[by_place], chunks.stage[whose], np.int32(0))


def _add_rounds(order: Order, exchanges: NDArray[np.bool_], layout: Layout) -> Order:
    """The order with an exchange after every whole round, of the stages that exchange."""
    if not exchanges.any():
        return order
    r = np.array(layout.replicas, dtype=np.int32)
    ended = np.flatnonzero(((order.kind == W) | (order.kind == B)) & exchanges[order.stage])
    stage = order.stage[ended]
    rounds = order.microbatch[ended] // r[stage]
    whole = rounds < layout.microbatches // r[stage]
    after = ended[whole] + 1
    added = np.diff(np.searchsorted(after, order.rows, side="right"))
    return _insert(order, after, added, np.int8(A), stage[whole], rounds[whole])


def _after_last(order: Order, chunks: Chunks, chosen: Integers) -> Integers:
    """The place after the last backward of each chosen chunk; where it has none, the rank's first.

    Of most chunks that is the end of the rank's row.
    """
    rank, stage = chunks.rank[chosen], chunks.stage[chosen]
    first, after = order.rows[rank], order.rows[rank + 1].copy()
    looking = np.flatnonzero(after > first)
    while len(looking):
        place = after[looking] - 1
        kind = order.kind[place]
        found = ((kind == B) | (kind == W)) & (order.stage[place] == stage[looking])
        looking = looking[~found]
        after[looking] -= 1
        looking = looking[after[looking] > first[looking]]
    return after


def _insert(
    order: Order,
    after: Integers,
    added: Integers,
    kind: NDArray[np.int8] | np.int8,
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32] | np.int32,
) -> Order:
    """The order with an action put in before each place of `after`, which rises.

    `added` says how many are on each rank.
    """
    placed = after + np.arange(len(after))
    kept = np.ones(len(order.kind) + len(after), dtype=np.bool_)
    kept[placed] = False

    def merge(own: NDArray[Any], new: NDArray[Any] | np.generic) -> NDArray[Any]:
        merged = np.empty(len(kept), dtype=own.dtype)  # a third of the time of `np.insert`
        merged[kept], merged[placed] = own, new
        return merged

    return Order(
        kind=merge(order.kind, kind),
        stage=merge(order.stage, stage),
        microbatch=merge(order.microbatch, microbatch),
        joined=merge(order.joined, np.bool_(False)),
        rows=order.rows + np.concatenate([[0], np.cumsum(added)]),
    )


def check(order: Order, layout: Layout) -> None:
    """Raise PartoptError, with the rank and the action, unless all of the work is done once.

    Every stage does each microbatch: a forward, then a backward, whole or an I and then a W, all on
    the rank that holds the stage's replica for that microbatch; a recomputation lies between the
    two. Joined actions are one forward and the one backward after it.
    """
    kind, stage, microbatch = order.kind, order.stage, order.microbatch
    stages, M, replicas = len(layout.ranks), layout.microbatches, np.array(layout.replicas)
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    acts = (kind != A) & (kind != U)  # on a microbatch

    wrong = np.flatnonzero((stage < 0) | (stage >= stages))
    _refuse(order, wrong, "names an unknown stage", f"stages are numbered 0 to {stages - 1}")
    wrong = np.flatnonzero(acts & ((microbatch < 0) | (microbatch >= M)))
    hint = f"microbatches are numbered 0 to {M - 1}"
    _refuse(order, wrong, "names an unknown microbatch", hint)

    holder = np.zeros((stages, replicas.max()), dtype=np.int64)
    for s, ranks in enumerate(layout.ranks):
        holder[s, : len(ranks)] = ranks
    right = holder[stage, np.where(acts, microbatch % replicas[stage], 0)]
    wrong = np.flatnonzero(acts & (right != rank))
    for first in wrong[:1]:
        hint = f"microbatch {microbatch[first]} of that stage belongs on rank {right[first]}"
        _refuse(order, wrong, "is on the wrong rank", hint)
    held = [r * stages + s for s, ranks in enumerate(layout.ranks) for r in ranks]
    wrong = np.flatnonzero(~acts & ~np.isin(rank * stages + stage, held))
    _refuse(order, wrong, "is on a rank that does not hold the stage", "leave it out there")

    # where each kind of action is of every task, a microbatch on a stage
    task = stage.astype(np.int64) * M + microbatch
    place: dict[int, Integers] = {}
    for each in (F, B, I, W, R):
        own = np.flatnonzero(kind == each)
        place[each] = np.full(stages * M, NOWHERE, dtype=np.int64)
        place[each][task[own[::-1]]] = own[::-1]
        again = own[place[each][task[own]] != own]
        _refuse(order, again, "occurs twice", "each microbatch passes a stage once")

    hint = "each microbatch needs on each stage one F, and one B or one I and one W"
    parts = np.maximum(place[I], place[W])
    both = parts[(place[B] != NOWHERE) & (parts != NOWHERE)]
    _refuse(order, both, "occurs beside a whole backward", hint)
    whole, split = parts == NOWHERE, parts != NOWHERE
    for each, needed in ((F, whole | split), (B, whole), (I, split), (W, split)):
        for missing in np.flatnonzero(needed & (place[each] == NOWHERE))[:1].tolist():
            s, g = divmod(missing, M)
            name, on = f"{s}{KINDS[each]}{g}", layout.ranks[s][g % len(layout.ranks[s])]
            raise _invalid(on, name, "is missing", hint)

    # the actions of a task are on one rank, so that places compare
    backward = np.maximum(place[B], place[I])
    for earlier, later, what in (
        (place[F], backward, "comes before its forward"),
        (place[I], place[W], "comes before the inputs' backward"),
        (place[F], place[R], "comes before its forward"),
        (place[R], backward, "comes before its recomputation"),
    ):
        wrong = later[(later != NOWHERE) & (later < earlier)]
        hint = "F comes first, then R where there is one, then B, or I and after it W"
        _refuse(order, wrong, what, hint)

    first = np.flatnonzero(order.joined)
    second = np.minimum(first + 1, len(kind) - 1)
    pair = (kind[first] == F) & np.isin(kind[second], (B, I)) & (rank[first] == rank[second])
    wrong = first[~(pair & (task[first] != task[second]))]
    hint = "join a forward and the backward after it"
    _refuse(order, wrong, "is not joined with the backward of another microbatch", hint)


def _refuse(order: Order, wrong: Integers, what: str, hint: str) -> None:
    """PartoptError that names the first action at these places, if any, and its rank."""
    if len(wrong):
        action = int(wrong.min())
        rank = int(np.searchsorted(order.rows, action, side="right")) - 1
        raise _invalid(rank, order.name(action), what, hint)


def _invalid(rank: int, action: str, what: str, hint: str) -> PartoptError:
    return PartoptError(
        f"rank {rank}: {action} {what}", hint, code="invalid-order", rank=rank, action=action
    )
