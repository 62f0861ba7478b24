"""What a device computes and moves in a second: what estimated profiles are made from.

It is a YAML file that people write, in which every number has its source or is marked as assumed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated, Self

import msgspec

from partopt import documents, units
from partopt.documents import shipped
from partopt.documents.files import PathLike
from partopt.documents.profile_checks import DTYPES
from partopt.documents.yaml_text import read_mapping
from partopt.errors import PartoptError, did_you_mean

TF32 = "tfloat32"  # how float32 is multiplied where torch is told so
FORMATS = (*DTYPES, TF32)

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Cited(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """Where a number comes from: its `source`, or what it is `assumed` for."""

    source: str = ""
    assumed: str = ""


class Quantity(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """A number with its unit, and where it comes from."""

    value: str | int | float


class Factor(_Cited, frozen=True, kw_only=True, omit_defaults=True):
    """What is achieved of a peak, and where that is known from."""

    value: Share


class Efficiency(documents.Part, frozen=True, kw_only=True):
    """What operations achieve of the peak of their kind; `memory` is of the bandwidth."""

    matmul: Factor
    convolution: Factor
    attention_forward: Factor
    attention_backward: Factor
    memory: Factor


class DeviceFile(documents.Part, frozen=True, kw_only=True):
    """A device as people write it: quantities carry their units and their sources.

    `aliases` are other names of it, as torch's. `peaks` are the speeds of dense matrix products by
    number format, `launch` what each operation takes beside its work.
    """

    name: str
    aliases: list[str] = []
    type: str = "cuda"
    memory: str | int | float
    peaks: Annotated[dict[str, Quantity], msgspec.Meta(min_length=1)]
    bandwidth: Quantity
    launch: Quantity
    efficiency: Efficiency

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Numbers with neither a source nor an assumption, or both, and unknown formats."""
        for path, number in self.numbers():
            if bool(number.source) == bool(number.assumed):
                yield PartoptError(
                    f"{path}: needs a source or an assumption, and not both",
                    'write {value: .., source: "data sheet, page"} or {value: .., assumed: "why"}',
                    code="uncited-number",
                    path=path,
                )
        for name in self.peaks:
            if name not in FORMATS:
                yield PartoptError(
                    f'peaks: "{name}" is not a number format that partopt knows',
                    did_you_mean(name, FORMATS),
                    code="inconsistent-document",
                    path="peaks",
                )

    def numbers(self) -> Iterator[tuple[str, Quantity | Factor]]:
        """Every number of the file with its path."""
        yield from ((f"peaks.{name}", peak) for name, peak in self.peaks.items())
        yield from (("bandwidth", self.bandwidth), ("launch", self.launch))
        for field in msgspec.structs.fields(Efficiency):
            yield f"efficiency.{field.name}", getattr(self.efficiency, field.name)


class Roofline(documents.Part, frozen=True, kw_only=True):
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
        found = shipped.find(path, "devices")
        return cls.of(read_device(documents.read_bytes(found), found), found)

    @classmethod
    def of(cls, file: DeviceFile, where: str = "device") -> Self:
        """The device that a file states. Raises PartoptError with every faulty quantity."""
        faults: list[PartoptError] = []

        def positive(parse: Callable[[object], float], value: object, path: str) -> float:
            try:
                if number := parse(value):
                    return number
                raise PartoptError(
                    f"'{value}' is zero", "write what the device has", code="malformed-quantity"
                )
            except PartoptError as error:
                faults.append(error.at(path))
                return 1.0

        shares = file.efficiency
        made = cls(
            name=file.name,
            type=file.type,
            memory_bytes=round(positive(units.parse_bytes, file.memory, "memory")),
            peaks_flops={
                name: positive(units.parse_flops, peak.value, f"peaks.{name}.value")
                for name, peak in file.peaks.items()
            },
            bandwidth_bytes_per_s=shares.memory.value
            * positive(units.parse_bandwidth, file.bandwidth.value, "bandwidth.value"),
            launch_s=positive(units.parse_seconds, file.launch.value, "launch.value"),
            matmul=shares.matmul.value,
            convolution=shares.convolution.value,
            attention_forward=shares.attention_forward.value,
            attention_backward=shares.attention_backward.value,
        )
        documents.refuse(faults, where)
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
    file = read_mapping(content, "device", DeviceFile, where)
    documents.refuse(file.inconsistencies(), where)
    return file


@functools.cache
def shipped_device(name: str) -> tuple[str, Roofline] | None:
    """The device that goes by `name`, with the name of its shipped file; None of any other."""
    for own in shipped.names("devices"):
        path = shipped.folder("devices") / f"{own}.yaml"
        file = read_device(path.read_bytes(), str(path))
        if name.lower() in {known.lower() for known in (own, file.name, *file.aliases)}:
            return own, Roofline.of(file, str(path))
    return None


def same_device(first: str, second: str) -> bool:
    """Whether two names are of one device."""
    found = shipped_device(first)
    return first == second or (found is not None and found == shipped_device(second))
