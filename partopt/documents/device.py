"""What a device computes and moves in a second: what estimates are made from.

It is a YAML file that people write, in which every number has its source or is marked as assumed.
Estimated profiles stay with the device that they were estimated for.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Self

import msgspec

from partopt import documents, units
from partopt.documents.files import PathLike, find_shipped, shipped_folder, shipped_names
from partopt.documents.profile import DTYPES, Count
from partopt.documents.transformer import BITS
from partopt.documents.yaml_text import positive, read_by, read_mapping
from partopt.errors import PartoptError, unknown

TF32 = "tfloat32"  # how float32 is multiplied where torch is told so
FORMATS = (*DTYPES, TF32)

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Tokens = Annotated[float, msgspec.Meta(ge=0)]


class _Cited(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a number comes from: its `source`, or what it is `assumed` for."""

    source: str = ""
    assumed: str = ""


class Quantity(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """A number with its unit, and where it comes from."""

    value: str | int | float


_memory, _flops, _bandwidth, _seconds, _power = map(
    positive,
    (
        units.parse_bytes,
        units.parse_flops,
        units.parse_bandwidth,
        units.parse_seconds,
        units.parse_power,
    ),
)


class _Peak(Quantity, frozen=True, kw_only=True, omit_defaults=True):
    value: Annotated[str | int | float, read_by(_flops)]


class _Bandwidth(Quantity, frozen=True, kw_only=True, omit_defaults=True):
    value: Annotated[str | int | float, read_by(_bandwidth)]


class _Launch(Quantity, frozen=True, kw_only=True, omit_defaults=True):
    value: Annotated[str | int | float, read_by(_seconds)]


class _Power(Quantity, frozen=True, kw_only=True, omit_defaults=True):
    value: Annotated[str | int | float, read_by(_power)]


class Factor(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """What is achieved of a peak, and where that is known from."""

    value: Share


class Efficiency(documents.StrictStruct, frozen=True, kw_only=True):
    """What operations achieve of the peak of their kind; `memory` is of the bandwidth."""

    matmul: Factor
    convolution: Factor
    attention_forward: Factor
    attention_backward: Factor
    memory: Factor


class Attention(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel of causal attention, forward and backward.

    Each reaches `share` of the peak on long sequences, and half of that at `half_at` tokens.
    """

    share: tuple[Share, Share]
    half_at: tuple[Tokens, Tokens]

    @property
    def value(self) -> str:
        """All of it in a line."""
        return " and ".join(
            f"{share:.0%} s/(s + {half:g})"
            for share, half in zip(self.share, self.half_at, strict=True)
        )


class Number(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """How many there are, and where that is known from."""

    value: Count


class Training(documents.StrictStruct, frozen=True, kw_only=True):
    """What the kernels of trainers achieve: `products` by number format, `attention` by kernel.

    `peaks` are those of formats of which torch has no parameters. The clock follows the power
    `limit` over the `rated` power. Passes over tensors reach the share `passes` of the bandwidth,
    and its host starts an operation in `host`, where those are not the usual ones. Collectives take
    some of the `multiprocessors`. Copies to and from the host's memory reach `host_link` in one
    direction, and `host_memory` is its share of what the host's processors read and write; both are
    achieved, beside the other devices of a server.
    """

    peaks: dict[str, _Peak] = {}
    products: Annotated[dict[str, _Peak], msgspec.Meta(min_length=1)]
    attention: dict[str, Attention]
    limit: _Power
    rated: _Power
    multiprocessors: Number
    passes: Factor | None = None
    host: _Launch | None = None
    host_link: _Bandwidth | None = None
    host_memory: _Bandwidth | None = None


class DeviceFile(documents.StrictStruct, frozen=True, kw_only=True):
    """A device as people write it: quantities carry their units and their sources.

    `aliases` are other names of it, as torch's. `peaks` are the speeds of dense matrix products by
    number format, `launch` what each operation takes beside its work. `efficiency` is what the
    operations of eager PyTorch achieve, `training` what the kernels of trainers do.
    """

    name: str
    aliases: list[str] = []
    type: str = "cuda"
    memory: Annotated[str | int | float, read_by(_memory)]
    peaks: Annotated[dict[str, _Peak], msgspec.Meta(min_length=1)]
    bandwidth: _Bandwidth
    launch: _Launch
    efficiency: Efficiency
    training: Training | None = None

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Numbers with neither a source nor an assumption, or both, and unknown formats."""
        yield from _inconsistencies(msgspec.to_builtins(self))

    def numbers(self) -> Iterator[tuple[str, Quantity | Factor | Attention | Number]]:
        """Every number of the file with its path."""
        yield from _find_cited(self)


def _find_cited(of: msgspec.Struct | dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers in a part of a file, those of a mapping by its keys."""
    for name, entry in (of if isinstance(of, dict) else msgspec.structs.asdict(of)).items():
        if isinstance(entry, _Cited):
            yield f"{path}{name}", entry
        elif isinstance(entry, msgspec.Struct | dict):
            yield from _find_cited(entry, f"{path}{name}.")


def _inconsistencies(raw: dict[str, Any]) -> Iterator[PartoptError]:
    """Uncited numbers and unknown formats of what a file has, whatever else is wrong with it."""
    for path, number in _numbers(raw):
        if bool(number.get("source")) == bool(number.get("assumed")):
            what = f"{path}: needs a source or an assumption, and not both"
            hint = 'write {value: .., source: "data sheet, page"} or {value: .., assumed: "why"}'
            yield PartoptError(what, hint, code="uncited-number")
    training = raw.get("training")
    training = training if isinstance(training, dict) else {}
    for path, names, known in (
        ("peaks", raw.get("peaks"), FORMATS),
        ("training.peaks", training.get("peaks"), tuple(BITS)),
        ("training.products", training.get("products"), tuple(BITS)),
    ):
        for name in map(str, names if isinstance(names, dict) else ()):
            if name not in known:
                what = f'{path}: "{name}" is not a number format that partopt knows'
                yield unknown(what, name, known, code="inconsistent-document", path=path)


def _numbers(raw: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings with a value or with shares, each with its path."""
    for key, entry in raw.items():
        if isinstance(entry, dict) and entry.keys() & {"value", "share"}:
            yield f"{path}{key}", entry
        elif isinstance(entry, dict):
            yield from _numbers(entry, f"{path}{key}.")


class Roofline(documents.StrictStruct, frozen=True, kw_only=True):
    """A device file in SI units; `sha256` is the digest of the numbers."""

    name: str
    type: str
    memory_bytes: int
    peaks_flops: dict[str, float]
    bandwidth_bytes_per_s: float
    launch_s: float
    matmul: float
    convolution: float
    attention_forward: float
    attention_backward: float
    sha256: str = ""

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """The device in the YAML file `path`, on standard input (`-`), or of a shipped name.

        Raises PartoptError with every fault found; of an unknown name with the nearest one.
        """
        found = find_shipped(path, "devices")
        return cls.of(read_device(documents.read_bytes(found), found))

    @classmethod
    def of(cls, file: DeviceFile) -> Self:
        """The device that a file states."""
        shares = file.efficiency
        made = cls(
            name=file.name,
            type=file.type,
            memory_bytes=round(_memory(file.memory)),
            peaks_flops={name: _flops(peak.value) for name, peak in file.peaks.items()},
            bandwidth_bytes_per_s=shares.memory.value * _bandwidth(file.bandwidth.value),
            launch_s=_seconds(file.launch.value),
            matmul=shares.matmul.value,
            convolution=shares.convolution.value,
            attention_forward=shares.attention_forward.value,
            attention_backward=shares.attention_backward.value,
        )
        digest = hashlib.sha256(msgspec.json.encode(made)).hexdigest()
        return msgspec.structs.replace(made, sha256=digest)

    def check_dtype(self, dtype: str, option: str = "dtype") -> None:
        """Raise PartoptError where the device does not compute in `dtype`."""
        if dtype not in self.peaks_flops:
            raise PartoptError(
                f"`{option}={dtype}`: {self.name} has no peak for it",
                f"it has {', '.join(sorted(self.peaks_flops.keys() - {TF32}))}",
                code="unsupported-dtype",
                option=option,
                value=dtype,
                device=self.name,
            )


def read_device(content: bytes, where: str) -> DeviceFile:
    """The device file in a YAML text, which `where` names in errors.

    Raises PartoptError with every fault found.
    """
    return read_mapping(content, "device", DeviceFile, where, _inconsistencies)


@functools.cache
def shipped_file(name: str) -> tuple[str, DeviceFile] | None:
    """The file of the device that goes by `name`, with the name it is shipped as; else None."""
    for shipped in shipped_names("devices"):
        file = _read_shipped(shipped)
        if name.lower() in {known.lower() for known in (shipped, file.name, *file.aliases)}:
            return shipped, file
    return None


@functools.cache
def _read_shipped(shipped: str) -> DeviceFile:
    """A shipped file, read once whatever names are looked for."""
    path = shipped_folder("devices") / f"{shipped}.yaml"
    return read_device(path.read_bytes(), str(path))


@functools.cache
def shipped_device(name: str) -> tuple[str, Roofline] | None:
    """The device that goes by `name`, with the name of its shipped file; None of any other."""
    found = shipped_file(name)
    return found and (found[0], Roofline.of(found[1]))


def same_device(first: str, second: str) -> bool:
    """Whether two names are of one device."""
    found = shipped_device(first)
    return first == second or (found is not None and found == shipped_device(second))
