"""Scaling an estimate to a step that somebody measured."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from partopt import documents
from partopt.documents.profile import LayerMeasurement, Measurement, Profile

StepSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


def check_seconds(seconds: float | None) -> None:
    """Raise PartoptError for what is no time of a step."""
    if seconds is not None:
        hint = "give the seconds of a forward and a backward, without the optimizer"
        documents.check_option("calibrate", seconds, StepSeconds, hint)


def calibrate(profile: Profile, seconds: float | None) -> Profile:
    """The estimated profile with all times scaled, so that a step takes `seconds`.

    The step is the forward and the backward of one microbatch of the smallest size.
    """
    if seconds is None or profile.estimated is None:
        return profile
    layers = profile.measured()[0].layers
    scale = seconds / sum(layer.forward_s + layer.backward_s for layer in layers)
    return replace(
        profile,
        estimated=replace(profile.estimated, scale=scale, calibrated_s=float(seconds)),
        measurements=[_scale(each, scale) for each in profile.measurements],
    )


def _scale(measurement: Measurement, scale: float) -> Measurement:
    optimizer_s = measurement.optimizer_s
    return replace(
        measurement,
        optimizer_s=None if optimizer_s is None else optimizer_s * scale,
        layers=[_scale_layer(layer, scale) for layer in measurement.layers],
    )


def _scale_layer(layer: LayerMeasurement, scale: float) -> LayerMeasurement:
    input_s = layer.backward_input_s
    return replace(
        layer,
        forward_s=layer.forward_s * scale,
        backward_s=layer.backward_s * scale,
        backward_input_s=None if input_s is None else input_s * scale,
    )
