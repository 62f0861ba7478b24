"""The backward of each layer in two parts: the gradient of its input, and those of its weights.

Zero-bubble schedules put off the second. It is measured by its absence: a few steps whose backward
computes the gradients of the layers' inputs alone. A custom Function computes all its gradients at
once, so its layer's input part is its whole backward. The backward of a compiled layer is one piece
too, but a schedule's runtime would compile it in two, so nothing is said of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from partopt.documents.profile import Measurement
from partopt.profiler.memory import is_out_of_memory, release_memory
from partopt.profiler.timeline import Stepper

STEPS = 3


def time_input_gradients(stepper: Stepper, steps: int = STEPS) -> list[list[float]]:
    """Seconds of each layer in each of a few such steps; no steps where autograd refuses them."""
    try:
        return [stepper.input_gradients() for _ in range(steps)]
    except Exception as error:  # the model's own code may raise anything
        if is_out_of_memory(error):
            release_memory()
        return []


def split_backward(
    measurement: Measurement, steps: Sequence[Sequence[float]], scale: float
) -> Measurement:
    """The measurement with `backward_input_s` of each layer, or as it is without steps.

    `scale` is that of the layers' other times. What is longer than the whole backward, by noise, is
    cut to it.
    """
    if not steps:
        return measurement
    layers = [
        replace(layer, backward_input_s=min(statistics.median(seconds) * scale, layer.backward_s))
        for layer, seconds in zip(measurement.layers, zip(*steps, strict=True), strict=True)
    ]
    return replace(measurement, layers=layers)
