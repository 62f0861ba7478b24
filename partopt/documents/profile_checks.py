"""What is wrong with a profile although every value has the right type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from partopt.errors import PartoptError, did_you_mean

if TYPE_CHECKING:
    from partopt.documents.profile import Layer, Measurement, Profile

DTYPES = ("float32", "bfloat16", "float16", "float64")


def find_faults(profile: Profile) -> Iterator[PartoptError]:
    """Indices out of range, sizes not ascending, no time to plan with."""
    for field, dtype in (("dtype", profile.dtype), ("autocast", profile.autocast)):
        if dtype not in DTYPES and (dtype is not None or field == "dtype"):
            yield _fault(
                field,
                f'"{dtype}" is not a number format that partopt knows',
                did_you_mean(str(dtype), DTYPES),
            )
    yield from _layer_faults(profile.layers)
    sizes = [measurement.microbatch_size for measurement in profile.measurements]
    if sizes != sorted(set(sizes)):
        yield _fault(
            "measurements",
            f"microbatch sizes {sizes} are not ascending",
            "list each size once, the smallest first",
        )
    if not profile.measured():
        yield _fault(
            "measurements", "every microbatch size ran out of memory", "measure a smaller size"
        )
    for position, measurement in enumerate(profile.measurements):
        yield from _measurement_faults(
            measurement, len(profile.layers), f"measurements[{position}]"
        )


def _fault(path: str, what: str, hint: str) -> PartoptError:
    return PartoptError(f"{path}: {what}", hint, code="inconsistent-document", path=path)


def _layer_faults(layers: list[Layer]) -> Iterator[PartoptError]:
    seen: set[tuple[str, int]] = set()
    sizes: dict[str, int] = {}
    frozen: dict[str, bool] = {}
    for index, layer in enumerate(layers):
        if (layer.name, layer.call) in seen:
            what = f'"{layer.name}" call {layer.call} is listed twice'
            yield _fault(f"layers[{index}]", what, "number the calls of a module 0, 1, 2")
        seen.add((layer.name, layer.call))
        if layer.measured_as is not None and layer.measured_as >= len(layers):
            yield _fault(
                f"layers[{index}].measured_as",
                f"there is no layer {layer.measured_as}",
                f"layers are numbered 0 to {len(layers) - 1}",
            )
        if not layer.shared_parameters and layer.frozen_bytes <= layer.parameter_bytes:
            continue
        place = f"layers[{index}]"
        for shared in layer.shared_parameters:
            if sizes.setdefault(shared.name, shared.bytes) != shared.bytes:
                yield _fault(
                    f"{place}.shared_parameters",
                    f'"{shared.name}" has {shared.bytes} bytes here and {sizes[shared.name]} '
                    "before",
                    "one parameter has one size",
                )
            if frozen.setdefault(shared.name, shared.frozen) != shared.frozen:
                yield _fault(
                    f"{place}.shared_parameters",
                    f'"{shared.name}" is frozen in one layer and not in another',
                    "a parameter has a gradient or has none",
                )
        if sum(shared.bytes for shared in layer.shared_parameters) > layer.parameter_bytes:
            yield _fault(
                f"{place}.shared_parameters",
                "more bytes than parameter_bytes",
                "parameter_bytes includes the shared ones",
            )
        held = sum(shared.bytes for shared in layer.shared_parameters if shared.frozen)
        trained = sum(shared.bytes for shared in layer.shared_parameters if not shared.frozen)
        if not held <= layer.frozen_bytes <= layer.parameter_bytes - trained:
            yield _fault(
                f"{place}.frozen_bytes",
                f"{layer.frozen_bytes} bytes frozen of {layer.parameter_bytes}, "
                f"of which {held} are shared and frozen, {trained} shared and not",
                "frozen_bytes are those of parameter_bytes that have no gradient",
            )


def _measurement_faults(
    measurement: Measurement, layers: int, place: str
) -> Iterator[PartoptError]:
    if measurement.out_of_memory:
        if measurement.layers:
            yield _fault(
                f"{place}.layers",
                "given although the size ran out of memory",
                "drop the layers or out_of_memory",
            )
        return
    if len(measurement.layers) != layers:
        yield _fault(
            f"{place}.layers",
            f"{len(measurement.layers)} measurements for {layers} layers",
            "give one for each layer, in order",
        )
        return
    for index, layer in enumerate(measurement.layers):
        if layer.backward_input_s is not None and layer.backward_input_s > layer.backward_s:
            yield _fault(
                f"{place}.layers[{index}].backward_input_s",
                "longer than backward_s, of which it is a part",
                "measure it again",
            )
    if not any(layer.forward_s + layer.backward_s for layer in measurement.layers):
        yield _fault(
            f"{place}.layers",
            "no layer takes any time",
            "there is nothing to plan with; measure it again",
        )
    yield from _flow_faults(measurement, layers, place)


def _flow_faults(measurement: Measurement, layers: int, place: str) -> Iterator[PartoptError]:
    hint = f"layers are numbered 0 to {layers - 1}"
    for index, tensor in enumerate(measurement.tensors):
        path = f"{place}.tensors[{index}]"
        for layer in itertools.chain([tensor.producer], tensor.consumers):
            if layer >= layers:
                yield _fault(path, f"there is no layer {layer}", hint)
        if min(tensor.consumers) <= tensor.producer:
            yield _fault(
                path,
                f"consumed by layer {min(tensor.consumers)}, before it is made",
                "layers are in execution order",
            )
    for index, group in enumerate(measurement.stash_groups):
        if max(group.layers) >= layers:
            path = f"{place}.stash_groups[{index}]"
            yield _fault(path, f"there is no layer {max(group.layers)}", hint)
