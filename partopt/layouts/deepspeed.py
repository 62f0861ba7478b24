"""DeepSpeed: the bounds of a `PipelineModule`, its `parts`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from partopt.errors import PartoptError
from partopt.exporters.blocks import Part
from partopt.layouts.counts import check_stages, read_numbers
from partopt.layouts.trainer_layout import LayoutFormat, Reading

_EXAMPLE = "0,5,8,11,14"


def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """Stage s has the layers from bound s up to bound s + 1."""
    bounds = read_numbers(text, "BOUNDS", _EXAMPLE)
    if len(bounds) < 2 or bounds[0] != 0 or bounds != sorted(bounds):
        raise PartoptError(
            f"{','.join(map(str, bounds))}: not bounds, which rise from 0 to the number of layers",
            f"write {_EXAMPLE}",
            code="malformed-layout",
        )
    check_stages(
        [stop - start for start, stop in itertools.pairwise(bounds)], "layers", len(layers)
    )
    return Reading(bounds[1:-1])


FORMAT = LayoutFormat(
    name="deepspeed",
    summary="DeepSpeed: bounds of the stages, from 0 to the number of layers",
    example=_EXAMPLE,
    read=read,
)
