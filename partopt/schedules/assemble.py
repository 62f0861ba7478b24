"""From the rows of single devices to an order.

Microbatches are numbered, all-reduces and optimizer steps put in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.layout import Chunk, Layout
from partopt.schedules.order import A, B, Order, Row, U, W, microbatch_numbers

# kind, stage, microbatch and joined of every action of a rank, shape (4, actions)
Actions = NDArray[np.int32]


def number_microbatches(row: Row, chunks: Sequence[Chunk], layout: Layout) -> Actions:
    """The actions of a row, with their microbatches numbered.

    The n-th action of a kind and chunk is for the n-th microbatch that the chunk gets.
    """
    stages = np.array([chunk.stage for chunk in chunks], dtype=np.int32)
    first = np.array([chunk.k for chunk in chunks], dtype=np.int32)
    step = np.array([len(layout.ranks[chunk.stage]) for chunk in chunks], dtype=np.int32)
    microbatch = microbatch_numbers(row) * step[row.chunk] + first[row.chunk]
    return np.stack(
        [row.kind.astype(np.int32), stages[row.chunk], microbatch, row.joined.astype(np.int32)]
    )


def add_updates(
    actions: Actions, chunks: Sequence[Chunk], layout: Layout, asynchronous: bool
) -> Actions:
    """The actions with the exchange of gradients and, synchronous, the optimizer's steps.

    Synchronous, a stage exchanges after its last backward, a replica without microbatches at once.
    Asynchronous, it exchanges after every round of one microbatch on each replica, and what a last,
    partial round leaves over is not exchanged. A stage that shares no gradients does not exchange.
    """
    kind, stage, microbatch, _ = actions
    after, exchanges = [np.zeros(0, dtype=np.int64)], [np.zeros((4, 0), dtype=np.int32)]
    for s, _ in chunks:
        r = len(layout.ranks[s])
        ended = np.flatnonzero((stage == s) & ((kind == B) | (kind == W)))
        if not layout.exchanges(s):
            continue
        if asynchronous:
            ended = ended[microbatch[ended] // r < layout.microbatches // r]
            after.append(ended + 1)
            exchanges.append(_actions(A, s, microbatch[ended] // r))
        else:
            after.append(ended[-1:] + 1 if len(ended) else np.zeros(1, dtype=np.int64))
            exchanges.append(_actions(A, s, np.zeros(1, dtype=np.int32)))
    exchanged = np.insert(actions, np.concatenate(after), np.concatenate(exchanges, axis=1), axis=1)
    updates = (
        [] if asynchronous else [_actions(U, s, np.zeros(1, dtype=np.int32)) for s, _ in chunks]
    )
    return np.concatenate([exchanged, *updates], axis=1)


def shift_microbatches(actions: Actions, more: int) -> Actions:
    """The actions for microbatches `more` later; rounds of exchanges and steps stay as they are."""
    shifted = actions.copy()
    shifted[2] += more * (actions[0] < A)
    return shifted


def _actions(kind: int, s: int, numbers: NDArray[np.int32]) -> Actions:
    return np.stack(
        [np.full_like(numbers, kind), np.full_like(numbers, s), numbers, np.zeros_like(numbers)]
    )


def assemble(rows: Sequence[Actions | None]) -> Order:
    """The order of all ranks from the actions of each; None of a rank without work."""
    idle = np.zeros((4, 0), dtype=np.int32)
    filled = [idle if row is None else row for row in rows]
    kind, stage, microbatch, joined = np.concatenate(filled, axis=1)
    ends = np.cumsum([0, *(row.shape[1] for row in filled)])
    return Order(kind.astype(np.int8), stage, microbatch, joined.astype(np.bool_), ends)
