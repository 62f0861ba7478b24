"""Which microbatch size to plan for, and what lies between two that were measured."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from partopt.documents.profile import LayerMeasurement, Measurement, Profile, StashGroup
from partopt.errors import ANSWER_IS_NO, PartoptError


def best_microbatch_size(profile: Profile, sizes: Collection[int] = ()) -> int:
    """The measured size with the most samples/s on one device; of equal ones the smallest.

    `sizes` are those to choose from, by default all.
    """

    def seconds_per_sample(measurement: Measurement) -> float:
        return (
            sum(layer.forward_s + layer.backward_s for layer in measurement.layers)
            / measurement.microbatch_size
        )

    measured = [
        measurement
        for measurement in profile.measured()
        if not sizes or measurement.microbatch_size in sizes
    ]
    return min(measured, key=seconds_per_sample).microbatch_size


def measurement_at(profile: Profile, microbatch_size: int) -> Measurement:
    """What was measured at `microbatch_size`, or interpolated linearly between its neighbours.

    Raises PartoptError for a size outside those that were measured, or that ran out of memory.
    """
    measured = profile.measured()
    sizes = [measurement.microbatch_size for measurement in measured]
    if microbatch_size in sizes:
        return measured[sizes.index(microbatch_size)]
    if any(m.microbatch_size <= microbatch_size for m in profile.measurements if m.out_of_memory):
        raise PartoptError(
            f"microbatch size {microbatch_size} does not fit the device that was profiled",
            f"choose at most {max(sizes)}",
            exit_code=ANSWER_IS_NO,
            code="out-of-memory-when-profiled",
            option="microbatch_size",
        )
    if not sizes[0] < microbatch_size < sizes[-1]:
        raise PartoptError(
            f"microbatch size {microbatch_size} was not measured, and times are never extrapolated",
            f"choose from {sizes[0]} to {sizes[-1]}"
            if len(sizes) > 1
            else f"choose {sizes[0]}, or profile that size",
            code="not-measured",
            option="microbatch_size",
        )
    above = next(index for index, size in enumerate(sizes) if size > microbatch_size)
    return _between(measured[above - 1], measured[above], microbatch_size)


def _between(low: Measurement, high: Measurement, size: int) -> Measurement:
    weight = (size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)

    def mix(first: float, second: float) -> float:
        return first + weight * (second - first)

    def mix_whole(first: int, second: int) -> int:
        return round(mix(first, second))

    if _structure(low) != _structure(high):
        raise PartoptError(
            f"microbatch size {size} cannot be interpolated: the layers exchange other tensors "
            f"at {low.microbatch_size} than at {high.microbatch_size}",
            "choose one of the two, or profile that size",
            code="not-interpolable",
            option="microbatch_size",
        )
    return Measurement(
        microbatch_size=size,
        optimizer_s=None
        if low.optimizer_s is None or high.optimizer_s is None
        else mix(low.optimizer_s, high.optimizer_s),
        layers=[
            LayerMeasurement(
                forward_s=mix(a.forward_s, b.forward_s),
                backward_s=mix(a.backward_s, b.backward_s),
                backward_input_s=None
                if a.backward_input_s is None or b.backward_input_s is None
                else mix(a.backward_input_s, b.backward_input_s),
                output_bytes=mix_whole(a.output_bytes, b.output_bytes),
                transient_bytes=mix_whole(a.transient_bytes, b.transient_bytes),
                split_stash_bytes=mix_whole(a.split_stash_bytes, b.split_stash_bytes),
                forward_flops=mix_whole(a.forward_flops or 0, b.forward_flops or 0),
            )
            for a, b in zip(low.layers, high.layers, strict=True)
        ],
        tensors=[
            structs.replace(a, bytes=mix_whole(a.bytes, b.bytes))
            for a, b in zip(low.tensors, high.tensors, strict=True)
        ],
        stash_groups=[
            StashGroup(layers=a.layers, bytes=mix_whole(a.bytes, b.bytes))
            for a, b in zip(low.stash_groups, high.stash_groups, strict=True)
        ],
    )


def _structure(measurement: Measurement) -> object:
    """Who produces, consumes and keeps what, without the bytes."""
    flows = [(tensor.producer, tensor.consumers, tensor.gradient) for tensor in measurement.tensors]
    return flows, [group.layers for group in measurement.stash_groups]
