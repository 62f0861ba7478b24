"""Accelerate: `split_points`, the modules with which all stages but the first begin."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.errors import PartoptError, did_you_mean
from partopt.exporters.blocks import Part
from partopt.layouts.literals import find_value
from partopt.layouts.trainer_layout import LayoutFormat, Reading

_EXAMPLE = "transformer.h.4,transformer.h.8"


def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """The cuts before the first layers of these names."""
    value = find_value(text, "split_points")
    names = text.replace(",", " ").split() if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PartoptError(
            f"split_points is {names!r}", f"write {_EXAMPLE}", code="malformed-layout"
        )
    cuts = [_first(name, layers) for name in names]
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise PartoptError(
            f"{', '.join(names)}: stages do not begin in the order of the layers",
            "name each layer once, in the order of the profile, and not the first",
            code="parts-out-of-order",
        )
    return Reading(cuts)


def _first(name: str, layers: Sequence[str]) -> int:
    """The first layer of the module `name`."""
    found = [i for i, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")]
    if not found:
        raise PartoptError(
            f"{name}: the profile has no such layer",
            did_you_mean(name, layers),
            code="no-such-layer",
            name=name,
        )
    return found[0]


FORMAT = LayoutFormat(
    name="accelerate",
    summary="Accelerate: split_points, the modules with which stages begin",
    example=_EXAMPLE,
    read=read,
)
