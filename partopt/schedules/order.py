"""What every rank does, in order: actions as arrays.

They are written as `torch.distributed.pipelining` writes them (`2F0`, `1B3`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# F   forward of a microbatch
# B   backward, whole
# I   backward of the inputs alone        } a backward in two parts
# W   backward of the weights alone       }
# R   forward once more, from the stage's input, for a backward that kept nothing else
# A   all-reduce of a stage's gradients over its replicas; its number is the round, not a microbatch
# U   optimizer step of a stage

KINDS = "FBIWRAU"
F, B, I, W, R, A, U = range(len(KINDS))  # noqa: E741
_KIND_OF = np.full(128, -1, dtype=np.int8)
for _kind, _letter in enumerate(KINDS):
    _KIND_OF[ord(_letter)] = _KIND_OF[ord(_letter.lower())] = _kind
_NUMBERED_AS = np.array([B if kind == I else kind for kind in range(len(KINDS))], dtype=np.int32)


class Row(NamedTuple):
    """The actions of one device, as its schedule sees them.

    Of each action its kind, which of the device's chunks it is for, and whether it runs at once
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
    sign = letters == ord("&")
    joined = np.zeros(len(letters), dtype=np.bool_)
    joined[1:] = sign[:-1]
    acting = letters[~sign]
    own = (acting >= ord("a")).astype(np.int32) if chunks is None else chunks
    return Row(_KIND_OF[acting], own, joined[~sign])


def microbatch_numbers(row: Row) -> NDArray[np.int32]:
    """For each action, which of its chunk's microbatches it is for, from 0; shape of the row.

    Forwards come in order, and so do backwards, whether whole or in two parts; the n-th W belongs
    to the n-th I.
    """
    numbers = np.zeros(len(row.kind), dtype=np.int32)
    key = row.chunk * len(KINDS) + _NUMBERED_AS[row.kind]
    for each in np.unique(key):
        places = np.flatnonzero(key == each)
        if each % len(KINDS) == W:
            numbers[places] = numbers[(row.kind == I) & (row.chunk == each // len(KINDS))]
        else:
            numbers[places] = np.arange(len(places), dtype=np.int32)
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

    def name(self, action: int) -> str:
        """The action as it is written: `2F0`."""
        number = "" if self.kind[action] == U else str(self.microbatch[action])
        return f"{self.stage[action]}{KINDS[self.kind[action]]}{number}"

    def names(self, rank: int) -> list[str]:
        """The actions of a rank as they are written, joined ones as `(0F3;3B1)OVERLAP_F_B`."""
        names: list[str] = []
        places = iter(range(self.rows[rank], self.rows[rank + 1]))
        for place in places:
            if self.joined[place]:
                names.append(f"({self.name(place)};{self.name(next(places))})OVERLAP_F_B")
            else:
                names.append(self.name(place))
        return names
