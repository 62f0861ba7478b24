"""Actions of ranks in letters, as `torch.distributed.pipelining` writes them: `2F0`, `1B3`."""

from __future__ import annotations

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
WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "R": "recomputation",
    "A": "all-reduce",
    "U": "optimizer step",
}


class Slots(NamedTuple):
    """The actions of one rank, in order, n of them.

    `chunk` numbers the rank's stages; `pair` is 1 and 2 for two joined ones, else 0.
    """

    kind: NDArray[np.int8]  # shape (n,)
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int64]
    pair: NDArray[np.int8]
    start: NDArray[np.float64]  # seconds
    end: NDArray[np.float64]
