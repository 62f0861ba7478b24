"""The profile (`partopt.profile/1`): a model measured layer by layer on one device.

The layers are measured at one or more microbatch sizes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Self

import msgspec

from partopt import documents
from partopt.documents import shipped
from partopt.documents.files import PathLike
from partopt.errors import PartoptError, did_you_mean

# Shapes below: N layers; B measurements, one a microbatch size, ascending.

SCHEMA = "partopt.profile/1"
_SCHEMA = msgspec.Meta(extra_json_schema={"default": SCHEMA})
DTYPES = ("float32", "bfloat16", "float16", "float64")

Seconds = Annotated[float, msgspec.Meta(ge=0)]
LayerSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # thirty years
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]  # an exabyte
Index = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Model(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """The model measured: its name, where it was loaded from, and its build arguments."""

    name: str
    entry: str = ""
    arguments: dict[str, Any] = {}


class Device(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """The device that was measured."""

    name: str
    type: str = ""
    memory_bytes: Bytes | None = None


class Group(documents.Part, frozen=True, kw_only=True):
    """The ranks that ran the model together, by tensor, sequence or context parallelism."""

    ranks: Annotated[int, msgspec.Meta(ge=2)]


class Environment(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """Versions at the time of measuring; `None` where it is not known or does not apply."""

    torch: str | None = None
    cuda: str | None = None
    python: str | None = None
    partopt: str | None = None


class SharedParameter(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter that several layers use; a stage with more than one of them keeps it once.

    A frozen one has no gradient.
    """

    name: str
    bytes: Bytes
    frozen: bool = False


class Layer(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """One unit of planning: a module and which of its calls this is.

    `parameter_bytes` includes the shared parameters and the frozen ones, which have no gradient;
    `frozen_bytes` includes the shared ones that are frozen. `measured_as` is the layer whose
    measurements this one has, where it was not run itself.
    """

    name: str
    call: Index = 0
    type: str = ""
    parameter_bytes: Bytes = 0
    frozen_bytes: Bytes = 0
    measured_as: Index | None = None
    shared_parameters: list[SharedParameter] = []


class LayerMeasurement(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """Median seconds and bytes of one layer for one microbatch.

    `backward_input_s` is the input-gradient part of the backward. `transient_bytes` is the peak
    that lives only while the layer runs, beside what is kept for its backward.

    `forward_flops` counts the floating-point operations of the matrix products and convolutions of
    the forward.
    """

    forward_s: LayerSeconds
    backward_s: LayerSeconds
    backward_input_s: Seconds | None = None
    forward_stdev_s: Seconds = 0.0
    backward_stdev_s: Seconds = 0.0
    output_bytes: Bytes = 0
    transient_bytes: Bytes = 0
    forward_flops: Bytes | None = None


class Tensor(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor of one layer that later ones consume, carried through every cut between them."""

    producer: Index
    consumers: Annotated[list[Index], msgspec.Meta(min_length=1)]
    bytes: Bytes


class StashGroup(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """Storage kept from forward to backward, and the layers that keep it.

    A stage that holds any of them pays for it once.
    """

    layers: Annotated[list[Index], msgspec.Meta(min_length=1)]
    bytes: Bytes


class Measurement(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """Everything measured at one microbatch size.

    A size that ran out of memory has `out_of_memory` and no layers.
    """

    microbatch_size: Count
    out_of_memory: bool = False
    step_s: Seconds | None = None
    coverage: Seconds | None = None
    overhead: Seconds | None = None
    overhead_bound: bool = False
    optimizer_s: Seconds | None = None
    peak_memory_bytes: Bytes | None = None
    layers: list[LayerMeasurement] = []
    tensors: list[Tensor] = []
    stash_groups: list[StashGroup] = []


class Profile(documents.Document, frozen=True, kw_only=True, omit_defaults=True):
    """A profile: N layers, and for each microbatch size N measurements of them.

    `dtype` is that of the parameters; `autocast` that of the operations which `torch.autocast`
    runs in fewer bits, `compiled` whether the layers were compiled. Where a `group` of ranks ran
    the model together, times and bytes are those of one rank. `notes` say what to know about the
    measurements. `schema` and `environment` are always written: a default that a function makes
    is not omitted.
    """

    schema: Annotated[str, _SCHEMA] = msgspec.field(default_factory=lambda: SCHEMA)
    model: Model
    device: Device
    environment: Environment = msgspec.field(default_factory=Environment)
    dtype: str
    autocast: str | None = None
    compiled: bool = False
    group: Group | None = None
    layers: Annotated[list[Layer], msgspec.Meta(min_length=1)]
    measurements: Annotated[list[Measurement], msgspec.Meta(min_length=1)]
    notes: list[documents.Note] = []

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """The profile in the file `path`, on standard input (`-`), or of a shipped name.

        Raises PartoptError with every fault found.
        """
        return super().load(shipped.find(path, "profiles"))

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults beyond types: indices out of range, sizes not ascending, no time to plan with."""
        for field, dtype in (("dtype", self.dtype), ("autocast", self.autocast)):
            if dtype not in DTYPES and (dtype is not None or field == "dtype"):
                yield _fault(
                    field,
                    f'"{dtype}" is not a number format that partopt knows',
                    did_you_mean(str(dtype), DTYPES),
                )
        yield from _layer_faults(self.layers)
        sizes = [measurement.microbatch_size for measurement in self.measurements]
        if sizes != sorted(set(sizes)):
            yield _fault(
                "measurements",
                f"microbatch sizes {sizes} are not ascending",
                "list each size once, the smallest first",
            )
        if not self.measured():
            yield _fault(
                "measurements", "every microbatch size ran out of memory", "measure a smaller size"
            )
        for position, measurement in enumerate(self.measurements):
            yield from _measurement_faults(
                measurement, len(self.layers), f"measurements[{position}]"
            )

    def measured(self) -> list[Measurement]:
        """The measurements that did not run out of memory, by ascending microbatch size."""
        return [measurement for measurement in self.measurements if not measurement.out_of_memory]

    def parameter_bytes(self) -> int:
        """Bytes of the model's parameters, shared ones once."""
        shared = {
            parameter.name: parameter.bytes
            for layer in self.layers
            for parameter in layer.shared_parameters
        }
        held = sum(
            layer.parameter_bytes - sum(parameter.bytes for parameter in layer.shared_parameters)
            for layer in self.layers
        )
        return held + sum(shared.values())

    @property
    def group_ranks(self) -> int:
        """Ranks that ran the model together; 1 without a group."""
        return 1 if self.group is None else self.group.ranks

    def sha256(self) -> str:
        """Hexadecimal digest of the profile's content, whatever the layout of its file.

        Fields left at their defaults do not count.
        """
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def _fault(path: str, what: str, hint: str) -> PartoptError:
    return PartoptError(f"{path}: {what}", hint, code="inconsistent-document", path=path)


def _layer_faults(layers: list[Layer]) -> Iterator[PartoptError]:
    seen: set[tuple[str, int]] = set()
    sizes: dict[str, int] = {}
    frozen: dict[str, bool] = {}
    for index, layer in enumerate(layers):
        place = f"layers[{index}]"
        if (layer.name, layer.call) in seen:
            what = f'"{layer.name}" call {layer.call} is listed twice'
            yield _fault(place, what, "number the calls of a module 0, 1, 2")
        seen.add((layer.name, layer.call))
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
        if layer.measured_as is not None and layer.measured_as >= len(layers):
            yield _fault(
                f"{place}.measured_as",
                f"there is no layer {layer.measured_as}",
                f"layers are numbered 0 to {len(layers) - 1}",
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
