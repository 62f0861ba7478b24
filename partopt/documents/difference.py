"""The difference: two profiles of one model, layer by layer (`partopt.difference/1`)."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count, Index, Measurement, Profile, Seconds
from partopt.errors import PartoptError

_LISTED = 6  # names in a message


class Side(documents.Part, frozen=True, kw_only=True):
    """One of the profiles. `seconds_s` is the forward and backward of all its layers.

    `estimated` is as in a plan's profile.
    """

    name: str
    model: str
    device: str
    estimated: str | None = None
    dtype: str
    compiled: bool
    layers: Count
    seconds_s: Seconds
    parameter_bytes: Bytes
    stash_bytes: Bytes


class LayerSide(documents.Part, frozen=True, kw_only=True):
    """A layer in one of the profiles. `seconds_s` is its forward and backward."""

    index: Index
    seconds_s: Seconds
    parameter_bytes: Bytes
    output_bytes: Bytes


class LayerDifference(documents.Part, frozen=True, kw_only=True):
    """A layer of either profile, None in that which has none of its name and call.

    `ratio` is seconds in the second over seconds in the first, None where there is none.
    """

    name: str
    call: Index
    type: str
    first: LayerSide | None
    second: LayerSide | None
    ratio: Seconds | None


class Difference(documents.Document, frozen=True, kw_only=True):
    """Two profiles at one microbatch size: the layers of the first, then those of the second only.

    `microbatch_size` is one at which both were measured.
    """

    schema: str = "partopt.difference/1"
    microbatch_size: Count
    first: Side
    second: Side
    layers: Annotated[list[LayerDifference], msgspec.Meta(min_length=1)]

    @classmethod
    def between(
        cls,
        first: Profile,
        second: Profile,
        names: tuple[str, str],
        microbatch_size: int | None = None,
    ) -> Self:
        """What lies between two profiles, called `names`.

        Layers are matched by name and call. `microbatch_size` is by default the largest at which
        both were measured. Raises PartoptError where no layer or no size is common.
        """
        size = _common_size(first, second, names, microbatch_size)
        before, after = _layers(first, size), _layers(second, size)
        if not before.keys() & after.keys():
            raise PartoptError(
                f"{names[0]} and {names[1]} have no layer in common: {_some(first)}; "
                f"{_some(second)}",
                "compare profiles of one model, cut into the same layers",
                code="no-common-layer",
            )
        types = {(layer.name, layer.call): layer.type for layer in [*second.layers, *first.layers]}
        return cls(
            microbatch_size=size,
            first=_side(first, size, names[0]),
            second=_side(second, size, names[1]),
            layers=[
                LayerDifference(
                    name=key[0],
                    call=key[1],
                    type=types[key],
                    first=before.get(key),
                    second=after.get(key),
                    ratio=_ratio(before.get(key), after.get(key)),
                )
                for key in [*before, *(key for key in after if key not in before)]
            ],
        )


def _common_size(first: Profile, second: Profile, names: tuple[str, str], asked: int | None) -> int:
    own, others = ([each.microbatch_size for each in it.measured()] for it in (first, second))
    common = sorted(set(own) & set(others))
    known = "; ".join(
        f"{name} has {', '.join(map(str, sizes))}"
        for name, sizes in zip(names, (own, others), strict=True)
    )
    if not common:
        raise PartoptError(
            f"no microbatch size in common: {known}",
            "profile one that the other has",
            code="no-common-microbatch-size",
        )
    if asked is not None and asked not in common:
        raise PartoptError(
            f"microbatch size {asked} was not measured in both: {known}",
            f"choose from {', '.join(map(str, common))}",
            code="not-measured",
            option="microbatch_size",
        )
    return asked or common[-1]


def _at(profile: Profile, size: int) -> Measurement:
    return next(each for each in profile.measured() if each.microbatch_size == size)


def _layers(profile: Profile, size: int) -> dict[tuple[str, int], LayerSide]:
    measured = _at(profile, size).layers
    return {
        (layer.name, layer.call): LayerSide(
            index=index,
            seconds_s=times.forward_s + times.backward_s,
            parameter_bytes=layer.parameter_bytes,
            output_bytes=times.output_bytes,
        )
        for index, (layer, times) in enumerate(zip(profile.layers, measured, strict=True))
    }


def _side(profile: Profile, size: int, name: str) -> Side:
    measured = _at(profile, size)
    return Side(
        name=name,
        model=profile.model.name,
        device=profile.device.name,
        estimated=profile.estimated_for,
        dtype=profile.dtype + (f", autocast {profile.autocast}" if profile.autocast else ""),
        compiled=profile.compiled,
        layers=len(profile.layers),
        seconds_s=sum(layer.forward_s + layer.backward_s for layer in measured.layers),
        parameter_bytes=profile.parameter_bytes(),
        stash_bytes=sum(group.bytes for group in measured.stash_groups),
    )


def _ratio(first: LayerSide | None, second: LayerSide | None) -> float | None:
    return second.seconds_s / first.seconds_s if first and second and first.seconds_s else None


def _some(profile: Profile) -> str:
    names = [layer.name for layer in profile.layers]
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
