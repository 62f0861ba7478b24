"""A topology as the YAML file that people write: quantities carry their units."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import yaml

from partopt import documents, units
from partopt.documents.topology import (
    Algorithm,
    AllReduceRates,
    Device,
    Level,
    Links,
    Size,
    Topology,
)
from partopt.documents.yaml_text import read_mapping
from partopt.errors import PartoptError

# as written; a bare number is refused by partopt.units, which says why
Quantity = str | int | float


class _DeviceFile(documents.Part, frozen=True):
    name: str
    memory: Quantity | None = None
    price: Quantity | None = None


class _AllReduceFile(documents.Part, frozen=True):
    bandwidth: Quantity | None = None
    latency: Quantity | None = None


class _LevelFile(documents.Part, frozen=True):
    name: str
    size: Size
    bandwidth: Quantity
    link: str = ""
    links: Links = 1
    latency: Quantity = "0 s"
    bus: bool = False
    overhead: Quantity | None = None
    copy: Quantity | None = None
    allreduce: _AllReduceFile | None = None


class TopologyFile(documents.Part, frozen=True):
    """The file as a whole."""

    name: str
    device: _DeviceFile
    levels: Annotated[list[_LevelFile], msgspec.Meta(min_length=1)]
    allreduce: Algorithm = "fastest"


def read(content: bytes, where: str) -> TopologyFile:
    """The YAML text, its types checked. Raises PartoptError with every fault found."""
    return read_mapping(content, "topology", TopologyFile, where)


def convert(file: TopologyFile, faults: list[PartoptError]) -> tuple[Device, list[Level]]:
    """The device and the levels in SI units; what is wrong with a quantity goes to `faults`."""
    device = _device(file.device, faults)
    levels = [_level(level, f"levels[{index}]", faults) for index, level in enumerate(file.levels)]
    return device, levels


def dump(topology: Topology) -> str:
    """The topology as YAML that `read` accepts: sizes and rates in base units, exactly."""
    document = {
        "name": topology.name,
        "device": _dump_device(topology.device),
        "levels": [_dump_level(level) for level in topology.levels],
    } | ({} if topology.allreduce == "fastest" else {"allreduce": topology.allreduce})
    return yaml.safe_dump(
        document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
    )


def _dump_device(device: Device) -> dict[str, Any]:
    memory, price = device.memory_bytes, device.price_per_hour
    entry = {"name": device.name}
    entry |= {} if memory is None else {"memory": f"{memory} B"}
    return entry | ({"price": f"{price!r} per hour"} if price else {})


def _dump_level(level: Level) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": level.name,
        "size": level.size,
        "bandwidth": f"{level.bandwidth_bytes_per_s!r} B/s",
    }
    entry |= {"link": level.link} if level.link else {}
    entry |= {"links": level.links} if level.links != 1 else {}
    entry |= {"latency": f"{level.latency_s!r} s"} if level.latency_s else {}
    entry |= {"bus": True} if level.bus else {}
    if level.overhead_s:
        entry["overhead"] = f"{level.overhead_s!r} s"
    if level.copy_bytes_per_s:
        entry["copy"] = f"{level.copy_bytes_per_s!r} B/s"
    return entry | ({"allreduce": _dump_rates(level.allreduce)} if level.allreduce else {})


def _dump_rates(rates: AllReduceRates) -> dict[str, str]:
    bandwidth, latency = rates.bandwidth_bytes_per_s, rates.latency_s
    entry = {"bandwidth": f"{bandwidth!r} B/s"} if bandwidth else {}
    return entry if latency is msgspec.UNSET else entry | {"latency": f"{latency!r} s"}


def _device(device: _DeviceFile, faults: list[PartoptError]) -> Device:
    memory, price = device.memory, device.price
    return Device(
        name=device.name,
        memory_bytes=None
        if memory is None
        else round(_positive(units.parse_bytes, memory, "device.memory", faults)),
        price_per_hour=msgspec.UNSET
        if price is None
        else _positive(units.parse_price, price, "device.price", faults),
    )


def _level(level: _LevelFile, path: str, faults: list[PartoptError]) -> Level:
    return Level(
        name=level.name,
        link=level.link,
        size=level.size,
        bandwidth_bytes_per_s=_positive(
            units.parse_bandwidth, level.bandwidth, f"{path}.bandwidth", faults
        ),
        links=level.links,
        latency_s=_quantity(units.parse_seconds, level.latency, f"{path}.latency", faults),
        bus=level.bus,
        overhead_s=_given(units.parse_seconds, level.overhead, f"{path}.overhead", faults)
        or msgspec.UNSET,
        copy_bytes_per_s=msgspec.UNSET
        if level.copy is None
        else _positive(units.parse_bandwidth, level.copy, f"{path}.copy", faults),
        allreduce=_rates(level.allreduce, f"{path}.allreduce", faults),
    )


def _rates(
    given: _AllReduceFile | None, path: str, faults: list[PartoptError]
) -> AllReduceRates | msgspec.UnsetType:
    if given is None:
        return msgspec.UNSET
    bandwidth = given.bandwidth
    return AllReduceRates(
        bandwidth_bytes_per_s=msgspec.UNSET
        if bandwidth is None
        else _positive(units.parse_bandwidth, bandwidth, f"{path}.bandwidth", faults),
        latency_s=_given(units.parse_seconds, given.latency, f"{path}.latency", faults),
    )


def _given(
    parse_unit: Any, text: Quantity | None, path: str, faults: list[PartoptError]
) -> float | msgspec.UnsetType:
    return msgspec.UNSET if text is None else _quantity(parse_unit, text, path, faults)


def _quantity(parse_unit: Any, text: Quantity, path: str, faults: list[PartoptError]) -> float:
    """The quantity in SI units; where it is faulty, 1, so that the rest of the file is checked."""
    try:
        return float(parse_unit(text))
    except PartoptError as error:
        faults.append(error.at(path))
        return 1.0


def _positive(parse_unit: Any, text: Quantity, path: str, faults: list[PartoptError]) -> float:
    value = _quantity(parse_unit, text, path, faults)
    if value == 0:
        hint = "write what the device or the link really has"
        message = f"{path}: '{text}' is zero"
        faults.append(PartoptError(message, hint, code="invalid-value", path=path))
        return 1.0
    return value
