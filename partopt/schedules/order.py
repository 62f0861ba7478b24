"""What every rank does, in order: actions as arrays.

They are written as `torch.distributed.pipelining` writes them (`2F0`, `1B3`). What an order keeps
in flight is counted exactly; the counts of a schedule's entry must agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import KINDS, B, F, I, R, U, W

Integers = NDArray[np.int64]

_KIND_OF = np.full(128, -1, dtype=np.int8)
for _kind, _letter in enumerate(KINDS):
    _KIND_OF[ord(_letter)] = _KIND_OF[ord(_letter.lower())] = _kind


class Row(NamedTuple):
    """The actions of one device, as its schedule sees them.

    Of every action its kind, which of the device's chunks it is for, and whether it runs at once
    with the next.
    """

    kind: NDArray[np.int8]
    chunk: NDArray[np.int32]
    joined: NDArray[np.bool_]


def spell(text: str, chunks: NDArray[np.int32] | None = None) -> Row:
    """The row that `text` spells, a letter an action.

    Capitals are for the device's chunk 0 and small letters for its chunk 1, unless `chunks` says
    otherwise. `&` joins the two actions after it: a forward and a backward that run at once, in one
    slot.
    """
    letters = np.frombuffer(text.encode(), dtype=np.uint8)
    joined = np.zeros(len(letters), dtype=np.bool_)
    if "&" in text:
        sign = letters == ord("&")
        joined[1:] = sign[:-1]
        letters, joined = letters[~sign], joined[~sign]
    chunk = (letters >= ord("a")).astype(np.int32) if chunks is None else chunks
    return Row(_KIND_OF[letters], chunk, joined)


def microbatch_numbers(row: Row) -> NDArray[np.int32]:
    """Of every action, which of its chunk's microbatches it is for, from 0; shape of the row.

    Forwards come in order, and so do backwards, whether whole or in two parts; the n-th W belongs
    to the n-th I.
    """
    numbers = np.zeros(len(row.kind), dtype=np.int32)
    split = bool((row.kind == W).any())
    for chunk in range(int(row.chunk.max(initial=0)) + 1):
        of_chunk = row.chunk == chunk
        for kinds in ((F,), (B, I), (R,)):
            chosen = np.logical_or.reduce([row.kind == kind for kind in kinds])
            places = np.flatnonzero(of_chunk & chosen)
            numbers[places] = np.arange(len(places))
        if split:
            numbers[of_chunk & (row.kind == W)] = numbers[of_chunk & (row.kind == I)]
    return numbers


@dataclass(frozen=True, eq=False)
class Order:
    """The actions of all ranks.

    Those of rank k are the entries [rows[k], rows[k+1]) of the arrays, in the order in which it
    does them.
    """

    kind: NDArray[np.int8]  # shape (actions,)
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]  # of A: the round; of U: 0
    joined: NDArray[np.bool_]  # runs at once with the action after it
    rows: NDArray[np.int64]  # shape (ranks + 1,)

    @property
    def ranks(self) -> int:
        """Number of ranks, including those without work."""
        return len(self.rows) - 1

    def of_rank(self, rank: int) -> slice:
        """Where the actions of a rank are."""
        return slice(self.rows[rank], self.rows[rank + 1])

    def name(self, action: int) -> str:
        """The action as it is written: `2F0`."""
        number = "" if self.kind[action] == U else str(self.microbatch[action])
        return f"{self.stage[action]}{KINDS[self.kind[action]]}{number}"

    def names(self, rank: int) -> list[str]:
        """The actions of a rank as they are written, joined ones as `(0F3;3B1)OVERLAP_F_B`."""
        row = self.of_rank(rank)
        columns = (column[row].tolist() for column in (self.kind, self.stage, self.microbatch))
        names = [
            f"{s}{KINDS[kind]}{'' if kind == U else g}" for kind, s, g in zip(*columns, strict=True)
        ]
        pairs = iter(zip(names, self.joined[row].tolist(), strict=True))
        return [
            f"({name};{next(pairs)[0]})OVERLAP_F_B" if joined else name for name, joined in pairs
        ]


def in_flight(order: Order) -> Integers:
    """The most microbatches that every rank holds at once, shape (ranks,).

    A microbatch is held from the start of its forward to the end of its backward, or of its W where
    the backward is split. One that is in flight in several of a rank's chunks counts in all of
    them. Of two joined actions, the forward first, both hold theirs until the slot ends.
    """
    most = np.zeros(order.ranks, dtype=np.int64)
    busy = np.flatnonzero(np.diff(order.rows))
    if len(busy):
        begins, ends = order.kind == F, (order.kind == B) | (order.kind == W)
        after, first = np.cumsum(begins.astype(np.int64) - ends), order.rows[busy]
        before = (after - begins + ends)[first]
        most[busy] = np.maximum(np.maximum.reduceat(after + ends, first) - before, 0)
    return most
