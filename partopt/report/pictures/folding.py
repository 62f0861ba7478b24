"""Layers as columns of a picture: runs of repeated blocks are drawn once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from partopt.documents.profile import Profile

_UNFOLDED = 40  # layers that have room for a column each
_LONGEST = 64  # layers of a block


class Fold(NamedTuple):
    """A block of `size` columns from column `first` that stands for `times` of its like."""

    first: int
    size: int
    times: int


class Columns(NamedTuple):
    """The layers of each column, as many as its block has repeats; and the blocks."""

    layers: list[list[int]]
    folds: list[Fold]


def columns_of(profile: Profile) -> Columns:
    """The columns of a profile: a layer each, or where these are many, repeated blocks once.

    Blocks are alike where their layers have types, parameters and outputs in common; their times
    may differ.
    """
    N, outputs = len(profile.layers), profile.measured()[-1].layers
    if N <= _UNFOLDED:
        return Columns([[layer] for layer in range(N)], [])
    alike = [
        (layer.type, layer.parameter_bytes, measured.output_bytes)
        for layer, measured in zip(profile.layers, outputs, strict=True)
    ]
    return fold(alike)


def fold(alike: Sequence[Hashable]) -> Columns:
    """The columns of layers of which equal ones in `alike` are alike.

    From the first layer on, the block is taken that leaves out most layers, of equal ones the
    shortest.
    """
    columns = Columns([], [])
    repeats = [_repeats(alike, size) for size in range(1, min(_LONGEST, len(alike) // 2) + 1)]
    layer = 0
    while layer < len(alike):
        size, times = max(
            ((size, own[layer]) for size, own in enumerate(repeats, 1)),
            key=lambda block: (block[0] * (block[1] - 1), -block[0]),
            default=(1, 1),
        )
        if times > 1:
            columns.folds.append(Fold(len(columns.layers), size, times))
        columns.layers.extend(
            [layer + place + size * time for time in range(times)] for place in range(size)
        )
        layer += size * times
    return columns


def _repeats(alike: Sequence[Hashable], size: int) -> list[int]:
    """How many blocks of `size` layers that are alike follow each other from each layer on."""
    same, times = 0, [1] * len(alike)
    for layer in reversed(range(len(alike) - size)):
        same = same + 1 if alike[layer] == alike[layer + size] else 0
        times[layer] = same // size + 1
    return times
