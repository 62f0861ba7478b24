"""Measured times put into a profile: the layers of a stage are scaled alike."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from partopt import documents
from partopt.documents.profile import (
    Device,
    Environment,
    LayerMeasurement,
    Measurement,
    Profile,
)
from partopt.errors import PartoptError


def measurement_of(onto: Profile, microbatch_size: int) -> Measurement:
    """What the profile measured at the size that ran; PartoptError where it did not."""
    known = {measurement.microbatch_size: measurement for measurement in onto.measured()}
    if microbatch_size not in known:
        raise PartoptError(
            f"{onto.model.name} was not measured at a microbatch size of {microbatch_size}",
            f"its bytes are known at {', '.join(map(str, known))}: profile that size",
            code="not-measured",
            option="microbatch_size",
        )
    return known[microbatch_size]


def spread(
    layers: Sequence[LayerMeasurement],
    forward_s: float,
    backward_s: float,
    weight_s: float | None = None,
) -> list[LayerMeasurement]:
    """The layers of a stage that takes these seconds, in proportion to what they took before.

    `weight_s` is the part of the backward for the weights, by default the share that it was.
    """
    apart = weight_s is not None or any(layer.backward_input_s is not None for layer in layers)
    weights = [_weight_s(layer) for layer in layers]
    inputs = [layer.backward_s - weight for layer, weight in zip(layers, weights, strict=True)]
    if weight_s is None:
        whole = sum(weights) + sum(inputs)
        weight_s = backward_s * (sum(weights) / whole if whole else 0.5)
    weight_s = min(weight_s, backward_s)
    return [
        replace(
            layer,
            forward_s=forward,
            backward_s=of_input + of_weight,
            backward_input_s=of_input if apart else None,
            forward_stdev_s=0.0,
            backward_stdev_s=0.0,
        )
        for layer, forward, of_input, of_weight in zip(
            layers,
            _in_proportion(forward_s, [layer.forward_s for layer in layers]),
            _in_proportion(backward_s - weight_s, inputs),
            _in_proportion(weight_s, weights),
            strict=True,
        )
    ]


def with_times(
    onto: Profile,
    measured: Measurement,
    layers: list[LayerMeasurement],
    optimizer_s: float | None,
    device: Device,
    notes: list[documents.Note],
) -> Profile:
    """The profile `onto` at one microbatch size, its times those of `layers`, on `device`.

    Bytes stay, and what was measured of the whole step is left out.
    """
    return replace(
        onto,
        device=device,
        environment=Environment(),
        estimated=None,
        measurements=[
            Measurement(
                microbatch_size=measured.microbatch_size,
                layers=layers,
                tensors=measured.tensors,
                stash_groups=measured.stash_groups,
                optimizer_s=optimizer_s,
            )
        ],
        notes=notes,
    )


def _weight_s(layer: LayerMeasurement) -> float:
    """The part of a backward for the weights; half where it was not measured."""
    if layer.backward_input_s is None:
        return layer.backward_s / 2
    return layer.backward_s - layer.backward_input_s


def _in_proportion(seconds: float, before: list[float]) -> list[float]:
    """`seconds` divided as `before` is; evenly where that is nothing."""
    total = sum(before)
    return [seconds * (part / total if total else 1 / len(before)) for part in before]
