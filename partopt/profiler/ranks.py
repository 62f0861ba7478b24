"""What the ranks of a group saw of one step, put together: one set of layers, one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partopt.documents.profile import Layer, StashGroup
from partopt.errors import PartoptError
from partopt.profiler.group import RankGroup
from partopt.profiler.structure import Structure

# and by layer what passes, and what a split backward keeps
_Held = tuple[list[Layer], list[StashGroup], dict[int, int], dict[int, int]]


def combine_ranks(structure: Structure, group: RankGroup) -> Structure:
    """The structure with the memory of the rank that holds the most, all else this rank's.

    Raises PartoptError, on every rank, where the ranks do not have the same layers.
    """
    passing, split = dict(structure.transient_bytes), dict(structure.split_stash_bytes)
    own = structure.layers, structure.stash_groups, passing, split
    ranks: list[_Held] = group.gather(own)
    _check_same_layers([layers for layers, *_ in ranks])
    layers, kept, passing, split = max(ranks, key=_bytes)
    return replace(
        structure,
        layers=layers,
        stash_groups=kept,
        transient_bytes=passing,
        split_stash_bytes=split,
    )


def _bytes(held: _Held) -> int:
    """Bytes of a rank: parameters, what is kept, and the most that passes."""
    layers, kept, passing, _ = held
    return (
        sum(layer.parameter_bytes for layer in layers)
        + sum(each.bytes for each in kept)
        + max(passing.values(), default=0)
    )


def _check_same_layers(ranks: Sequence[list[Layer]]) -> None:
    keys = [[f"{layer.name} call {layer.call}" for layer in layers] for layers in ranks]
    for rank, found in enumerate(keys):
        if found == keys[0]:
            continue
        longest = max(len(found), len(keys[0]))
        first, other = (own + ["no layer"] * (longest - len(own)) for own in (keys[0], found))
        index = next(i for i in range(longest) if first[i] != other[i])
        raise PartoptError(
            f"the ranks of the group have other layers: layer {index} is {first[index]} on rank "
            f"0, {other[index]} on rank {rank}",
            "each rank holds its part of every layer: build the same modules on all of them",
            code="ranks-disagree",
            layer=index,
            rank=rank,
        )
