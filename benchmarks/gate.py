"""When a measurement is good enough to ship: its coverage, its overhead and its spread."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from partopt.documents.profile import LayerMeasurement, Measurement, Profile

COVERAGE = (0.95, 1.05)  # sum of the layers over a bare step
OVERHEAD = 1.10  # at most: an instrumented step over a bare one
SPREAD = 0.05  # at most: standard deviation over mean, of layers that count
COUNTS = 0.01  # of the step: the spread of shorter layers is not looked at


def spread(measurement: Measurement) -> float:
    """The largest standard deviation of a layer over its time, of layers over 1 % of the step."""
    total = sum(map(_seconds, measurement.layers))
    large = [layer for layer in measurement.layers if _seconds(layer) > COUNTS * total]
    return max(
        math.hypot(layer.forward_stdev_s, layer.backward_stdev_s) / _seconds(layer)
        for layer in large
    )


def faults(measurement: Measurement) -> Iterator[str]:
    """What keeps a measurement from being shipped, a phrase each."""
    if measurement.out_of_memory:
        return
    if measurement.coverage is None or not COVERAGE[0] <= measurement.coverage <= COVERAGE[1]:
        yield f"coverage {_or_unknown(measurement.coverage)}, not {COVERAGE[0]} to {COVERAGE[1]}"
    if measurement.overhead is None or measurement.overhead > OVERHEAD:
        yield f"overhead {_or_unknown(measurement.overhead)}, over {OVERHEAD:.2f}"
    if spread(measurement) > SPREAD:
        yield f"spread {spread(measurement):.1%}, over {SPREAD:.0%}"


def failures(profile: Profile) -> dict[int, str]:
    """Why sizes fail the gate, by microbatch size."""
    found = {each.microbatch_size: ", ".join(faults(each)) for each in profile.measurements}
    return {size: why for size, why in found.items() if why}


def merge(first: Profile, again: Profile) -> Profile:
    """The first profile with the sizes that were measured again."""
    newer = {each.microbatch_size: each for each in again.measured()}
    measurements = [newer.get(each.microbatch_size, each) for each in first.measurements]
    return msgspec.structs.replace(first, measurements=measurements)


def without(profile: Profile, sizes: set[int]) -> Profile | None:
    """The profile without these sizes and what its notes say of them; None where none is left."""
    kept = [each for each in profile.measurements if each.microbatch_size not in sizes]
    if all(each.out_of_memory for each in kept):
        return None
    notes = [note for note in profile.notes if note.fields.get("microbatch_size") not in sizes]
    return msgspec.structs.replace(profile, measurements=kept, notes=notes)


def _seconds(layer: LayerMeasurement) -> float:
    return layer.forward_s + layer.backward_s


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
