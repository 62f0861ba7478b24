"""Layers as columns of a picture: runs of repeated blocks are drawn once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from partopt.documents.profile import Profile
from partopt.report.folds import fold

_UNFOLDED = 40  # layers that have room for a column each


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
    return columns_from(alike)


def columns_from(alike: Sequence[Hashable]) -> Columns:
    """The columns of layers of which equal ones in `alike` are alike."""
    columns = Columns([], [])
    for own in fold(alike):
        if own.times > 1:
            columns.folds.append(Fold(len(columns.layers), own.length, own.times))
        columns.layers.extend(
            [layer + own.length * time for time in range(own.times)] for layer in own.block
        )
    return columns
