"""Whole orders: put together from the rows of single devices, and checked.

Microbatches are numbered, all-reduces and optimizer steps put in, for all ranks at once. Of a
user's order, `check` says what no pipeline can execute, and which work is left out.
Deadlocks, devices that wait for one another, are found by executing the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import KINDS, A, B, F, I, R, U, W
from partopt.errors import PartoptError
from partopt.schedules.entry import Schedule
from partopt.schedules.order import Integers, Order, Row, microbatch_numbers
from partopt.schedules.placement import Chunks, Place, Placement

SHORT = 1024  # microbatches of a device, times its chunks: shorter rows are remembered
NOWHERE = -1  # the place of an action that is not there


class NumberedRow(NamedTuple):
    """A row with the exchanges of gradients and the optimizer's steps.

    `number` says of every action which of its chunk's microbatches it is for; of A the round, of U
    0.
    """

    row: Row
    number: NDArray[np.int32]


def row_of(
    entry: Schedule, place: Place, exchanges: tuple[bool, ...], rounds: int | None
) -> NumberedRow:
    """What the device at `place` does; a search asks for the same short rows often.

    `exchanges` and `rounds` are as for `add_updates`.
    """
    known = place.M * place.v <= SHORT
    return (_known_row if known else _row_of)(entry.row, place, exchanges, rounds)


def _row_of(
    row: Callable[[Place], Row], place: Place, exchanges: tuple[bool, ...], rounds: int | None
) -> NumberedRow:
    found = row(place)
    return add_updates(found, microbatch_numbers(found), exchanges, rounds)


_known_row = lru_cache(maxsize=4096)(_row_of)


def add_updates(
    row: Row, number: NDArray[np.int32], exchanges: Sequence[bool], rounds: int | None
) -> NumberedRow:
    """The row with the exchange of gradients and, synchronous, the optimizer's steps.

    `exchanges` says which of the device's chunks share gradients with other devices. Synchronous, a
    chunk exchanges after its last backward, without microbatches at once. Asynchronous, after each
    of its whole `rounds` of a microbatch on every replica; what a last, partial round leaves over
    is not exchanged.
    """
    ends = (row.kind == B) | (row.kind == W)
    if rounds is None:
        sharing = np.flatnonzero(exchanges)
        last = [np.flatnonzero(ends & (row.chunk == c))[-1:] + 1 for c in sharing]
        after = np.array([int(place[0]) if len(place) else 0 for place in last], dtype=np.int64)
        by_place = np.argsort(after, kind="stable")  # of earlier chunks first
        every = np.arange(len(exchanges))
        chunk = np.concatenate([sharing[by_place], every])
        after = np.concatenate([after[by_place], np.full(len(every), len(row.kind))])
        kind = np.repeat(np.array([A, U], dtype=np.int8), [len(sharing), len(every)])
        numbers = np.zeros_like(chunk)
    else:
        ended = np.flatnonzero(ends & np.array(exchanges)[row.chunk] & (number < rounds))
        after, chunk, numbers = ended + 1, row.chunk[ended], number[ended]
        kind = np.full(len(ended), A, dtype=np.int8)
    with_updates = Row(
        np.insert(row.kind, after, kind),
        np.insert(row.chunk, after, chunk),
        np.insert(row.joined, after, False),
    )
    return NumberedRow(with_updates, np.insert(number, after, numbers))


def write_rows(
    rows: Sequence[NumberedRow], which: Integers, chunks: Chunks, placement: Placement
) -> Order:
    """The order in which the n-th rank with work does `rows[which[n]]`, on its chunks."""
    every = Row(*(np.concatenate(parts) for parts in zip(*(row.row for row in rows), strict=True)))
    number = np.concatenate([row.number for row in rows])
    lengths = np.array([len(row.number) for row in rows])
    first = np.cumsum(lengths) - lengths
    length = lengths[which]
    place = _ranges(first[which], length)
    ranks, held = np.unique(chunks.rank, return_index=True)  # and their first chunks
    at = every.chunk[place] + np.repeat(held, length)
    kind, stage = every.kind[place], chunks.stage[at]
    microbatch, replicas = number[place], np.array(placement.replicas, dtype=np.int32)
    numbered = kind < A
    microbatch[numbered] *= replicas[stage[numbered]]
    microbatch[numbered] += chunks.k[at[numbered]]
    counts = np.zeros(placement.devices + 1, dtype=np.int64)
    counts[ranks + 1] = length
    joined = every.joined[place] & (not placement.in_turn)
    return Order(kind, stage, microbatch, joined, np.cumsum(counts))


def _ranges(first: Integers, length: Integers) -> Integers:
    """The numbers from all of `first` on, as many as `length` says, one range after the other."""
    ends = np.cumsum(length)
    places: Integers = np.repeat(first - (ends - length), length)
    places += np.arange(len(places))
    return places


def check(order: Order, placement: Placement) -> None:
    """Raise PartoptError, with the rank and the action, unless all of the work is done once.

    Every stage does all microbatches: a forward, then a backward, whole or an I and then a W, all
    on the rank that holds the stage's replica for that microbatch; a recomputation lies between the
    two. Joined actions are one forward and the one backward after it.
    """
    kind, stage, microbatch = order.kind, order.stage, order.microbatch
    stages, M, replicas = len(placement.ranks), placement.microbatches, np.array(placement.replicas)
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    acts = (kind != A) & (kind != U)  # on a microbatch

    wrong = np.flatnonzero((stage < 0) | (stage >= stages))
    _refuse(order, wrong, "names an unknown stage", f"stages are numbered 0 to {stages - 1}")
    wrong = np.flatnonzero(acts & ((microbatch < 0) | (microbatch >= M)))
    hint = f"microbatches are numbered 0 to {M - 1}"
    _refuse(order, wrong, "names an unknown microbatch", hint)

    holders = np.concatenate(placement.ranks)  # of stage 0, then of stage 1, ...
    replica = np.where(acts, microbatch % replicas[stage], 0)
    right = holders[(np.cumsum(replicas) - replicas)[stage] + replica]
    wrong = np.flatnonzero(acts & (right != rank))
    for first in wrong[:1]:
        hint = f"microbatch {microbatch[first]} of that stage belongs on rank {right[first]}"
        _refuse(order, wrong, "is on the wrong rank", hint)
    held = holders * stages + np.repeat(np.arange(stages), replicas)
    wrong = np.flatnonzero(~acts & ~np.isin(rank * stages + stage, held))
    _refuse(order, wrong, "is on a rank that does not hold the stage", "leave it out there")

    task = stage.astype(np.int64) * M + microbatch  # a microbatch on a stage
    place = _places(order, task, stages * M)
    hint = "each microbatch needs on each stage one F, and one B or one I and one W"
    parts = np.maximum(place[I], place[W])
    both = parts[(place[B] != NOWHERE) & (parts != NOWHERE)]
    _refuse(order, both, "occurs beside a whole backward", hint)
    whole, split = parts == NOWHERE, parts != NOWHERE
    for code, needed in ((F, whole | split), (B, whole), (I, split), (W, split)):
        for missing in np.flatnonzero(needed & (place[code] == NOWHERE))[:1].tolist():
            s, g = divmod(missing, M)
            name, on = f"{s}{KINDS[code]}{g}", placement.ranks[s][g % len(placement.ranks[s])]
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


def _places(order: Order, task: Integers, tasks: int) -> Integers:
    """The places in `order` of all actions, [kind, task]; PartoptError for a second of a task."""
    found = np.full((A, tasks), NOWHERE, dtype=np.int64)
    for code in range(A):
        places = np.flatnonzero(order.kind == code)
        found[code, task[places[::-1]]] = places[::-1]
        repeated = places[found[code, task[places]] != places]
        _refuse(order, repeated, "occurs twice", "each microbatch passes a stage once")
    return found


def _refuse(order: Order, wrong: Integers, what: str, hint: str) -> None:
    """PartoptError that names the first action at these places, if any, and its rank."""
    if len(wrong):
        action = int(wrong.min())
        rank = int(np.searchsorted(order.rows, action, side="right")) - 1
        raise _invalid(rank, order.name(action), what, hint)


def _invalid(rank: int, action: str, what: str, hint: str) -> PartoptError:
    return PartoptError(f"rank {rank}: {action} {what}", hint, code="invalid-order", rank=rank)
