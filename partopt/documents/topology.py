"""The cluster: devices grouped by levels of links, innermost first (a YAML file that people write;
carried whole in every plan).
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import yaml

from partopt import documents, units
from partopt.documents import shipped
from partopt.errors import PartoptError, PartoptWarning

# L   levels, k = 1..L innermost first; level k is `levels[k - 1]`
# P   devices, ranks 0..P-1 numbered depth first: a level-k component is n_1 * ... * n_k consecutive
#     ranks

# as written; a bare number is refused by partopt.units, which says why
Quantity = str | int | float
Size = Annotated[int, msgspec.Meta(ge=1)]
Links = Annotated[int, msgspec.Meta(ge=1, le=1024)]
DEVICE_LIMIT = 2**20


class Device(documents.Part, frozen=True, kw_only=True):
    """The kind of device that the cluster is made of; `memory_bytes` is `None` where no limit is
    known.
    """

    name: str
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None


class Level(documents.Part, frozen=True, kw_only=True):
    """A tier of the topology: groups of `size` members, each behind `links` links of
    `bandwidth_bytes_per_s` in one direction.
    """

    name: str
    link: str = ""
    size: Size
    bandwidth_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    links: Links = 1
    latency_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    bus: bool = False


class Topology(documents.Part, frozen=True, kw_only=True):
    """P identical devices under L levels, innermost first.

    `devices` is P; left out, it is computed.
    """

    name: str
    device: Device
    devices: int = 0
    levels: Annotated[list[Level], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        product = math.prod(level.size for level in self.levels)
        if product > DEVICE_LIMIT:
            raise ValueError(f"{product} devices; partopt plans for up to {DEVICE_LIMIT}")
        if self.devices not in (0, product):
            raise ValueError(
                f"{self.devices} devices, but the sizes of the levels multiply to {product}"
            )
        msgspec.structs.force_setattr(self, "devices", product)

    @staticmethod
    def load(path: str, servers: int | None = None) -> Topology:
        """The topology in the YAML file `path`, on standard input (`-`), or of a shipped name.

        `servers` replaces the size of its outermost level. Raises PartoptError with every fault
        found.
        """
        found = shipped.find(path, "topologies")
        return Topology.parse(documents.read_bytes(found), found, servers)

    @staticmethod
    def parse(content: bytes, where: str = "topology", servers: int | None = None) -> Topology:
        """The topology in a YAML text; `where` names it in errors. As `load`."""
        return _parse(content, where, servers)

    def notes(self) -> list[documents.Note]:
        return []

    def faults(self) -> list[PartoptError]:
        return []

    def group_size(self, k: int) -> int:
        """Devices in one level-k component; `group_size(0)` is 1 and `group_size(L)` is P."""
        return math.prod(level.size for level in self.levels[:k])

    def common_level(self, first: int, last: int) -> int:
        """The lowest k whose components hold both ranks; 0 for a rank and itself."""
        for k in range(len(self.levels) + 1):
            size = self.group_size(k)
            if first // size == last // size:
                return k
        raise ValueError(f"ranks {first} and {last} are not both in 0..{self.devices - 1}")

    @property
    def outermost_level(self) -> int:
        """The outermost level on which devices part; 0 of one device."""
        return self.common_level(0, self.devices - 1)


class _DeviceFile(documents.Part, frozen=True):
    name: str
    memory: Quantity | None = None


class _LevelFile(documents.Part, frozen=True):
    name: str
    size: Size
    bandwidth: Quantity
    link: str = ""
    links: Links = 1
    latency: Quantity = "0 s"
    bus: bool = False


class TopologyFile(documents.Part, frozen=True):
    """A topology as people write it: quantities carry their units."""

    name: str
    device: _DeviceFile
    levels: Annotated[list[_LevelFile], msgspec.Meta(min_length=1)]


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without its traps: `16:30` and `0x10` and dates are text, and a key that
    is given twice is refused.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key.value}" is given twice', key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)$"), list("-+.0123456789")
)


def _parse(content: bytes, where: str, outermost_size: int | None) -> Topology:
    """The topology in a YAML text.

    Raises PartoptError with every fault found; warns where an outer level is the faster.
    """
    try:
        raw = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error).at(where) from None
    # of PyYAML's own: `!!int x`, lists nested without end
    except (ValueError, RecursionError) as error:
        raise PartoptError(
            f"{where}: not YAML that partopt reads: {error}", "see docs/formats.md for an example"
        ) from None
    if not isinstance(raw, dict):
        raise PartoptError(
            f"{where}: not a topology", "see docs/formats.md, or partopt topology show v100-pcie"
        )
    faults = list(documents.find_faults(raw, TopologyFile, ""))
    topology = (
        None if faults else _from_file(msgspec.convert(raw, TopologyFile), outermost_size, faults)
    )
    if topology is None or faults:
        raise PartoptError.together(fault.at(where) for fault in faults)
    _warn_inverted(topology, where)
    return topology


def resized(topology: Topology, devices: int) -> Topology:
    """The topology with `devices` devices: inner levels are filled before outer ones, and the
    outermost takes what is left.

    Raises PartoptError for a number that does not fill the levels evenly.
    """
    sizes = [level.size for level in topology.levels[:-1]]
    if devices > DEVICE_LIMIT:
        raise PartoptError(
            f"{devices} devices; partopt plans for up to {DEVICE_LIMIT}", "choose fewer"
        )
    if not _fills(devices, sizes):
        below = next(count for count in range(devices, 0, -1) if _fills(count, sizes))
        above = next(count for count in itertools.count(devices) if _fills(count, sizes))
        inner = ", ".join(f"{level.size} to a {level.name}" for level in topology.levels[:-1])
        raise PartoptError(
            f"{devices} devices do not fill {topology.name}: {inner}",
            f"choose {below} or {above}, for example",
        )
    left, levels = devices, []
    for size, level in zip([*sizes, left], topology.levels, strict=True):
        levels.append(
            msgspec.structs.replace(
                level, size=left if level is topology.levels[-1] else min(size, left)
            )
        )
        left //= levels[-1].size
    return msgspec.structs.replace(topology, devices=0, levels=levels)


def _fills(devices: int, sizes: Sequence[int]) -> bool:
    """Whether `devices` fill levels of these `sizes` one after the other, all whole but the
    outermost that they reach.
    """
    for size in sizes:
        if devices < size:
            return True
        if devices % size:
            return False
        devices //= size
    return True


def dump(topology: Topology) -> str:
    """The topology as YAML that `parse` reads back: sizes and rates in base units, exactly."""
    levels: list[dict[str, Any]] = []
    for level in topology.levels:
        entry: dict[str, Any] = {
            "name": level.name,
            "size": level.size,
            "bandwidth": f"{level.bandwidth_bytes_per_s!r} B/s",
        }
        entry |= {"link": level.link} if level.link else {}
        entry |= {"links": level.links} if level.links != 1 else {}
        entry |= {"latency": f"{level.latency_s!r} s"} if level.latency_s else {}
        entry |= {"bus": True} if level.bus else {}
        levels.append(entry)
    memory = (
        {}
        if topology.device.memory_bytes is None
        else {"memory": f"{topology.device.memory_bytes} B"}
    )
    document = {
        "name": topology.name,
        "device": {"name": topology.device.name, **memory},
        "levels": levels,
    }
    return yaml.safe_dump(
        document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
    )


def _from_file(
    file: TopologyFile, outermost_size: int | None, faults: list[PartoptError]
) -> Topology | None:
    """The topology of a file, its faults added to `faults`."""
    memory = None
    if file.device.memory is not None:
        memory = round(_positive(units.parse_bytes, file.device.memory, "device.memory", faults))
    levels = [_level(level, f"levels[{index}]", faults) for index, level in enumerate(file.levels)]
    if outermost_size is not None:
        levels[-1] = msgspec.structs.replace(levels[-1], size=outermost_size)
    faults += _repeated_names(level.name for level in levels)
    try:
        return Topology(
            name=file.name, device=Device(name=file.device.name, memory_bytes=memory), levels=levels
        )
    except ValueError as error:
        faults.append(PartoptError(f"levels: {error}", "check the sizes of the levels"))
        return None


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
    )


def _quantity(parse_unit: Any, text: Quantity, path: str, faults: list[PartoptError]) -> float:
    """The quantity in SI units; a fault is noted and stands in as 1, so that the rest of the file
    can be checked too.
    """
    try:
        return float(parse_unit(text))
    except PartoptError as error:
        faults.append(error.at(path))
        return 1.0


def _positive(parse_unit: Any, text: Quantity, path: str, faults: list[PartoptError]) -> float:
    value = _quantity(parse_unit, text, path, faults)
    if value == 0:
        faults.append(
            PartoptError(
                f"{path}: '{text}' is zero", "write what the device or the link really has"
            )
        )
        return 1.0
    return value


def _repeated_names(names: Iterable[str]) -> list[PartoptError]:
    seen: set[str] = set()
    faults = []
    for index, name in enumerate(names):
        if name in seen:
            faults.append(
                PartoptError(
                    f'levels[{index}].name: "{name}" is used twice', "give each level its own name"
                )
            )
        seen.add(name)
    return faults


def _not_yaml(error: yaml.YAMLError) -> PartoptError:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return PartoptError(
        f"{place}not YAML: {getattr(error, 'problem', None) or error}",
        "see docs/formats.md for an example",
    )


def _warn_inverted(topology: Topology, where: str) -> None:
    for inner, outer in zip(topology.levels, topology.levels[1:], strict=False):
        if outer.bandwidth_bytes_per_s > inner.bandwidth_bytes_per_s:
            warnings.warn(
                f"{where}: level {outer.name} ({units.format_bandwidth(outer.bandwidth_bytes_per_s)}) is faster than {inner.name} "
                f"inside it ({units.format_bandwidth(inner.bandwidth_bytes_per_s)}): are the levels listed innermost first?",
                PartoptWarning,
                stacklevel=3,
            )
