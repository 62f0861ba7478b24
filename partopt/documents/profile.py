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
from partopt.documents.files import PathLike, find_shipped, shipped_names
from partopt.documents.reading import fault_at
from partopt.errors import PartoptError, unknown

# Shapes below: N layers; B measurements, one a microbatch size, ascending.

SCHEMA = "partopt.profile/1"
_SCHEMA = msgspec.Meta(extra_json_schema={"default": SCHEMA})
DTYPES = ("float32", "bfloat16", "float16", "float64")

Seconds = Annotated[float, msgspec.Meta(ge=0)]
LayerSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # thirty years
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]  # an exabyte
Index = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Model(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The model measured: its name, where it was loaded from, and its build arguments.

    `tokens_per_sample` is there where its inputs are sequences of tokens.
    """

    name: str
    entry: str = ""
    arguments: dict[str, Any] = {}
    tokens_per_sample: Count | None = None


class Device(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The device that was measured, or that the times were estimated for."""

    name: str
    type: str = ""
    memory_bytes: Bytes | None = None


class Group(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The ranks that ran the model together, by tensor, sequence or context parallelism.

    Of context parallel ranks `copies` hold the same parameters, whose gradients all replicas of all
    copies exchange at once.
    """

    ranks: Annotated[int, msgspec.Meta(ge=2)]
    copies: Count = 1


class Environment(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Versions and settings at the time of measuring; `None` where not known or not to the point.

    `float32_matmul_precision`, `matmul_tf32`, `cudnn_tf32` and `cudnn_benchmark` are torch's
    settings of these names; `attention` are the fused kernels that ran. `sm_clock_hz` is the clock
    rate of the device, in the median, and `throttled_by` what lowered it.
    """

    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    python: str | None = None
    partopt: str | None = None
    float32_matmul_precision: str | None = None
    matmul_tf32: bool | None = None
    cudnn_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    attention: list[str] | None = None
    sm_clock_hz: Annotated[float, msgspec.Meta(gt=0)] | None = None
    throttled_by: list[str] = []


class OperationShare(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation, and its share of the time."""

    operation: str
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Estimated(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What times were computed from that nobody measured.

    `device` is the name of the device file and `sha256` the digest of its numbers; `scale` is what
    all times were multiplied by, so that a step takes the measured `calibrated_s`; `without_rule`
    are the operations of which only the bytes are known.
    """

    device: str
    sha256: str
    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    calibrated_s: LayerSeconds | None = None
    without_rule: list[OperationShare] = []


class SharedParameter(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter that several layers use; a stage with more than one of them keeps it once.

    A frozen one has no gradient.
    """

    name: str
    bytes: Bytes
    frozen: bool = False


class Layer(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
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


class LayerMeasurement(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Median seconds and bytes of one layer for one microbatch.

    `backward_input_s` is the input-gradient part of the backward. `transient_bytes` is the peak
    that lives only while the layer runs, beside what is kept for its backward. `split_stash_bytes`
    is what a backward in two parts keeps between them beside that: the gradients that arrive where
    weights part from the layer's input. `forward_host_s` and `backward_host_s` are what the host
    takes to launch the layer, on a device with a queue: where these are longer, they are what the
    layer takes.

    `forward_flops` counts the floating-point operations of the matrix products and convolutions of
    the forward.
    """

    forward_s: LayerSeconds
    backward_s: LayerSeconds
    backward_input_s: Seconds | None = None
    forward_stdev_s: Seconds = 0.0
    backward_stdev_s: Seconds = 0.0
    forward_host_s: Seconds | None = None
    backward_host_s: Seconds | None = None
    output_bytes: Bytes = 0
    transient_bytes: Bytes = 0
    split_stash_bytes: Bytes = 0
    forward_flops: Bytes | None = None


class Tensor(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor of one layer that later ones consume, carried through every cut between them.

    Without a `gradient`, as a mask, nothing of it comes back.
    """

    producer: Index
    consumers: Annotated[list[Index], msgspec.Meta(min_length=1)]
    bytes: Bytes
    gradient: bool = True


class StashGroup(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Storage kept from forward to backward, and the layers that keep it.

    A stage that holds any of them pays for it once. What several keep has a `producer` where that
    comes before them all: the layer that made it, 0 for the model's own inputs.
    """

    layers: Annotated[list[Index], msgspec.Meta(min_length=1)]
    bytes: Bytes
    producer: Index | None = None


class Measurement(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
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
    runs in fewer bits, `compiled` whether the layers were compiled. `estimated` is there where the
    times were computed, not measured. Where a `group` of ranks ran the model together, times and
    bytes are those of one rank. `notes` say what to know about the measurements. `schema` and
    `environment` are always written: a default that a function makes is not omitted.
    """

    schema: Annotated[str, _SCHEMA] = msgspec.field(default_factory=lambda: SCHEMA)
    model: Model
    device: Device
    environment: Environment = msgspec.field(default_factory=Environment)
    dtype: str
    autocast: str | None = None
    compiled: bool = False
    estimated: Estimated | None = None
    group: Group | None = None
    layers: Annotated[list[Layer], msgspec.Meta(min_length=1)]
    measurements: Annotated[list[Measurement], msgspec.Meta(min_length=1)]
    notes: list[documents.Note] = []

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """The profile in the file `path`, on standard input (`-`), or of a shipped name.

        Raises PartoptError with every fault found.
        """
        return super().load(find_shipped(path, "profiles"))

    @classmethod
    def find(cls, sha256: str, path: PathLike | None = None) -> Self | None:
        """The profile in `path`, else the shipped one of this digest; None where none has it."""
        if path is not None:
            return cls.load(path)
        shipped = map(cls.load, shipped_names("profiles"))
        return next((profile for profile in shipped if profile.sha256() == sha256), None)

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults beyond types: indices out of range, sizes not ascending, no time to plan with."""
        for field, dtype in (("dtype", self.dtype), ("autocast", self.autocast)):
            if dtype is not None and dtype not in DTYPES:
                what = f'{field}: "{dtype}" is not a number format that partopt knows'
                yield unknown(what, dtype, DTYPES, code="inconsistent-document", path=field)
        yield from _layer_faults(self.layers)
        sizes = [measurement.microbatch_size for measurement in self.measurements]
        if sizes != sorted(set(sizes)):
            what = f"microbatch sizes {sizes} are not ascending"
            yield fault_at("measurements", what, "list each size once, the smallest first")
        if not self.measured():
            what = "every microbatch size ran out of memory"
            yield fault_at("measurements", what, "measure a smaller size")
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
    def estimated_for(self) -> str | None:
        """The device that the times were estimated for; None where they were measured."""
        return None if self.estimated is None else self.estimated.device

    @property
    def group_ranks(self) -> int:
        """Ranks that ran the model together; 1 without a group."""
        return 1 if self.group is None else self.group.ranks

    @property
    def group_copies(self) -> int:
        """Of those, ranks that hold the same parameters."""
        return 1 if self.group is None else self.group.copies

    def sha256(self) -> str:
        """Hexadecimal digest of the profile's content, whatever the layout of its file.

        Fields left at their defaults do not count.
        """
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def _layer_faults(layers: list[Layer]) -> Iterator[PartoptError]:
    seen: set[tuple[str, int]] = set()
    first: dict[str, SharedParameter] = {}
    for index, layer in enumerate(layers):
        place = f"layers[{index}]"
        if (layer.name, layer.call) in seen:
            what = f'"{layer.name}" call {layer.call} is listed twice'
            yield fault_at(place, what, "number the calls of a module 0, 1, 2")
        seen.add((layer.name, layer.call))
        if layer.measured_as is not None and layer.measured_as >= len(layers):
            what = f"there is no layer {layer.measured_as}"
            yield fault_at(
                f"{place}.measured_as", what, f"layers are numbered 0 to {len(layers) - 1}"
            )
        held = {False: 0, True: 0}  # bytes of shared parameters, by whether they are frozen
        for shared in layer.shared_parameters:
            held[shared.frozen] += shared.bytes
            known = first.setdefault(shared.name, shared)
            if known.bytes != shared.bytes:
                what = f'"{shared.name}" has {shared.bytes} bytes here and {known.bytes} before'
                yield fault_at(f"{place}.shared_parameters", what, "one parameter has one size")
            if known.frozen != shared.frozen:
                what = f'"{shared.name}" is frozen in one layer and not in another'
                hint = "a parameter has a gradient or has none"
                yield fault_at(f"{place}.shared_parameters", what, hint)
        if sum(held.values()) > layer.parameter_bytes:
            what, hint = (
                "more bytes than parameter_bytes",
                "parameter_bytes includes the shared ones",
            )
            yield fault_at(f"{place}.shared_parameters", what, hint)
        if not held[True] <= layer.frozen_bytes <= layer.parameter_bytes - held[False]:
            yield fault_at(
                f"{place}.frozen_bytes",
                f"{layer.frozen_bytes} bytes frozen of {layer.parameter_bytes}, "
                f"of which {held[True]} are shared and frozen, {held[False]} shared and not",
                "frozen_bytes are those of parameter_bytes that have no gradient",
            )


def _measurement_faults(
    measurement: Measurement, layers: int, place: str
) -> Iterator[PartoptError]:
    if measurement.out_of_memory:
        if measurement.layers:
            what = "given although the size ran out of memory"
            yield fault_at(f"{place}.layers", what, "drop the layers or out_of_memory")
        return
    if len(measurement.layers) != layers:
        what = f"{len(measurement.layers)} measurements for {layers} layers"
        yield fault_at(f"{place}.layers", what, "give one for each layer, in order")
        return
    for index, layer in enumerate(measurement.layers):
        if layer.backward_input_s is not None and layer.backward_input_s > layer.backward_s:
            what = "longer than backward_s, of which it is a part"
            yield fault_at(f"{place}.layers[{index}].backward_input_s", what, "measure it again")
    if not any(layer.forward_s + layer.backward_s for layer in measurement.layers):
        hint = "there is nothing to plan with; measure it again"
        yield fault_at(f"{place}.layers", "no layer takes any time", hint)
    numbered = f"layers are numbered 0 to {layers - 1}"
    for index, tensor in enumerate(measurement.tensors):
        path = f"{place}.tensors[{index}]"
        for layer_index in itertools.chain([tensor.producer], tensor.consumers):
            if layer_index >= layers:
                yield fault_at(path, f"there is no layer {layer_index}", numbered)
        if min(tensor.consumers) <= tensor.producer:
            what = f"consumed by layer {min(tensor.consumers)}, before it is made"
            yield fault_at(path, what, "layers are in execution order")
    for index, group in enumerate(measurement.stash_groups):
        if max(group.layers) >= layers:
            path, what = f"{place}.stash_groups[{index}]", f"there is no layer {max(group.layers)}"
            yield fault_at(path, what, numbered)
