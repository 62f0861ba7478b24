"""The cluster: devices grouped by levels of links, innermost first.

It is a YAML file that people write, and every plan carries it whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import msgspec
import yaml
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from partopt import documents, units
from partopt.documents.files import PathLike, find_shipped
from partopt.documents.reading import fault_at
from partopt.documents.yaml_text import positive, read_by, read_mapping
from partopt.errors import PartoptError

# L   levels, k = 1..L innermost first; level k is `levels[k - 1]`
# P   devices, ranks 0..P-1 numbered depth first:
#     a level-k component is n_1 * ... * n_k consecutive ranks

Size = Annotated[int, msgspec.Meta(ge=1)]
Links = Annotated[int, msgspec.Meta(ge=1, le=1024)]
DEVICE_LIMIT = 2**20
LEVEL_LIMIT = 32
Algorithm = Literal["fastest", "ring", "tree", "hierarchical"]
FASTEST, LONGEST_S = 1e18, 1e6  # bytes/s and seconds of latency, beyond all links
Rate = Annotated[float, msgspec.Meta(gt=0, le=FASTEST)]
Latency = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]


class Device(documents.StrictStruct, frozen=True, kw_only=True):
    """The kind of device that the cluster has; `memory_bytes` is `None` where no limit is known.

    `price_per_hour` is what one of them costs, in any currency; unset where it is not known.
    """

    name: str
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    price_per_hour: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | UnsetType = UNSET


class AllReduceRates(documents.StrictStruct, frozen=True, kw_only=True):
    """What a level's links achieve in an all-reduce, where that differs from one message."""

    bandwidth_bytes_per_s: Rate | UnsetType = UNSET
    latency_s: Latency | UnsetType = UNSET


class Level(documents.StrictStruct, frozen=True, kw_only=True):
    """A tier of the topology: groups of `size` members, each behind `links` links.

    A link carries `bandwidth_bytes_per_s` in one direction. A message keeps the device that sends
    it and the one that receives it from computing for `overhead_s`, and for as long as
    `copy_bytes_per_s` takes for its bytes, where that is given. `allreduce` is for collectives.
    """

    name: str
    link: str = ""
    size: Size
    bandwidth_bytes_per_s: Rate
    links: Links = 1
    latency_s: Latency = 0.0
    bus: bool = False
    # unset where there is none: a float that equals its default is written all the same
    overhead_s: Latency | UnsetType = UNSET
    copy_bytes_per_s: Rate | UnsetType = UNSET
    allreduce: AllReduceRates | UnsetType = UNSET

    @property
    def message_s(self) -> float:
        """Seconds that a message takes of its devices, whatever its bytes."""
        return self.overhead_s or 0.0

    @property
    def copy_byte_s(self) -> float:
        """Seconds that every byte of a message takes of its devices."""
        return 1 / self.copy_bytes_per_s if self.copy_bytes_per_s else 0.0

    @property
    def allreduce_bandwidth_bytes_per_s(self) -> float:
        """What one link carries in one direction of an all-reduce."""
        rate = self.allreduce and self.allreduce.bandwidth_bytes_per_s
        return rate or self.bandwidth_bytes_per_s

    @property
    def allreduce_latency_s(self) -> float:
        """Seconds of one step of an all-reduce."""
        latency_s = self.allreduce.latency_s if self.allreduce else UNSET
        return self.latency_s if isinstance(latency_s, UnsetType) else latency_s


class Grouping(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What lies behind a topology of groups: N `ranks` in each, and the cluster's own levels.

    Of a group's ranks `copies` hold the same parameters and exchange them together.
    """

    ranks: Annotated[int, msgspec.Meta(ge=2)]
    copies: Annotated[int, msgspec.Meta(ge=1)] = 1
    levels: Annotated[list[Level], msgspec.Meta(min_length=1)]


class Topology(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """P identical devices under L levels, innermost first.

    `devices` is P; left out, it is computed. `allreduce` is the algorithm of all-reduces
    (`partopt.cost.collectives`). Where `group` is given, each of them is a group of N
    ranks, and the levels are those between groups: rank p is the real ranks p N .. p N + N - 1.
    """

    name: str
    device: Device
    devices: int = 0
    levels: Annotated[list[Level], msgspec.Meta(min_length=1)]
    allreduce: Algorithm = "fastest"
    group: Grouping | None = None

    def __post_init__(self) -> None:
        try:
            levels, product = len(self.levels), math.prod(level.size for level in self.levels)
            too_many = product > DEVICE_LIMIT
        except (TypeError, AttributeError):
            return  # `faults` says what is wrong
        if levels > LEVEL_LIMIT or too_many:
            raise ValueError(_too_large(levels, product))
        if self.devices not in (0, product):
            raise ValueError(
                f"{self.devices} devices, but the sizes of the levels multiply to {product}"
            )
        msgspec.structs.force_setattr(self, "devices", product)

    @classmethod
    def load(cls, path: PathLike, servers: int | None = None) -> Self:
        """The topology in the YAML file `path`, on standard input (`-`), or of a shipped name.

        `servers` replaces the size of its outermost level. Raises PartoptError with every fault
        found.
        """
        found = find_shipped(path, "topologies")
        return cls.parse(documents.read_bytes(found), found, servers)

    @classmethod
    def parse(cls, content: bytes, where: str = "topology", servers: int | None = None) -> Self:
        """The topology in a YAML text; `where` names it in errors. As `load`."""
        if servers is not None:
            documents.check_option(
                "servers", servers, Size, "it is the size of the outermost level"
            )
        check = partial(_level_faults, servers=servers)
        file = read_mapping(content, "topology", TopologyFile, where, check)
        levels = [_read_level(level) for level in file.levels]
        if servers is not None:
            levels[-1] = replace(levels[-1], size=servers)
        return cls(
            name=file.name,
            device=_read_device(file.device),
            levels=levels,
            allreduce=file.allreduce,
        )

    def dump(self) -> str:
        """The topology as YAML that `parse` reads back: sizes and rates in base units, exactly."""
        return yaml.safe_dump(
            self._entries(), sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
        )

    def file(self) -> TopologyFile:
        """The topology as a file has it."""
        return msgspec.convert(self._entries(), TopologyFile)

    def _entries(self) -> dict[str, Any]:
        return _given(
            name=self.name,
            device=_given(
                name=self.device.name,
                memory=_text(self.device.memory_bytes, "B"),
                price=_text(self.device.price_per_hour, "per hour"),
            ),
            levels=[_dump_level(level) for level in self.levels],
            allreduce=None if self.allreduce == "fastest" else self.allreduce,
        )

    def resize(self, devices: int) -> Self:
        """The topology with `devices` devices, which fill inner levels before outer ones.

        The outermost level takes what is left. Raises PartoptError for a number that does not fill
        the levels evenly.
        """
        documents.check_option("devices", devices, Size, "choose a number of devices")
        if devices > DEVICE_LIMIT:
            raise PartoptError(
                f"{devices} devices; partopt plans for up to {DEVICE_LIMIT}",
                "choose fewer",
                code="invalid-option",
                option="devices",
                value=devices,
            )
        inner = self.levels[:-1]
        sizes = [level.size for level in inner]
        if not _fills(devices, sizes):
            below = next(count for count in range(devices, 0, -1) if _fills(count, sizes))
            above = next(count for count in itertools.count(devices) if _fills(count, sizes))
            groups = ", ".join(f"{level.size} to a {level.name}" for level in inner)
            raise PartoptError(
                f"{devices} devices do not fill {self.name}: {groups}",
                f"choose {below} or {above}, for example",
                code="unfit-devices",
            )
        left, levels = devices, []
        for level in inner:
            levels.append(replace(level, size=min(level.size, left)))
            left //= levels[-1].size
        levels.append(replace(self.levels[-1], size=left))
        return replace(self, devices=0, levels=levels)

    def in_groups(self, ranks: int, copies: int = 1) -> Self:
        """The topology whose devices are groups of `ranks` ranks; itself where they are that.

        Of a group's ranks `copies` hold the same parameters. Raises PartoptError for groups that
        do not divide it.
        """
        if (ranks, copies) == (self.group_ranks, self.group_copies):
            return self
        cluster = self.cluster
        try:
            levels = group_levels(cluster.levels, ranks, copies)
        except PartoptError as error:
            raise error.at(self.name) from None
        group = Grouping(ranks=ranks, copies=copies, levels=cluster.levels)
        return replace(cluster, devices=0, levels=levels, group=group)

    @property
    def cluster(self) -> Self:
        """The topology whose devices are single ranks."""
        if self.group is None:
            return self
        return replace(self, devices=0, levels=self.group.levels, group=None)

    @property
    def group_ranks(self) -> int:
        """Real ranks of a device: N of a topology of groups, else 1."""
        return 1 if self.group is None else self.group.ranks

    @property
    def group_copies(self) -> int:
        """Real ranks of a device that hold the same parameters."""
        return 1 if self.group is None else self.group.copies

    @property
    def own_levels(self) -> list[Level]:
        """Of every level, the level of the cluster: what one link of one member achieves there."""
        names = {level.name for level in self.levels}
        return [level for level in self.cluster.levels if level.name in names]

    def real_ranks(self, rank: int) -> range:
        """The ranks of the cluster that `rank` stands for."""
        return range(rank * self.group_ranks, (rank + 1) * self.group_ranks)

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults that the types do not express: levels of one name, or of other groups."""
        yield from self._group_faults()
        yield from _repeated_names([level.name for level in self.levels])

    def _group_faults(self) -> Iterator[PartoptError]:
        if self.group is None:
            return
        if self.group.ranks % self.group.copies:
            what = f"{self.group.copies} do not divide the group's ranks"
            hint = f"copies lie within the {self.group.ranks} ranks of a group"
            yield fault_at("group.copies", what, hint)
            return
        try:
            levels = group_levels(self.group.levels, self.group.ranks, self.group.copies)
        except PartoptError as error:
            yield error.at("group")
            return
        if levels != self.levels:
            what = f"not those between groups of {self.group.ranks} ranks"
            hint = "plan again: a topology of groups follows from group.levels"
            yield fault_at("levels", what, hint)

    def notes(self) -> list[documents.Note]:
        """A note for every level that is faster than the one inside it: likely a wrong order."""
        return [
            documents.Note(
                code="inverted-levels",
                text=(
                    f"{self.name}: level {outer.name} ({_rate(outer)}) is faster than {inner.name} "
                    f"inside it ({_rate(inner)}): are the levels listed innermost first?"
                ),
                fields={"inner": inner.name, "outer": outer.name},
            )
            for inner, outer in itertools.pairwise(self.levels)
            if outer.bandwidth_bytes_per_s > inner.bandwidth_bytes_per_s
        ]

    def group_size(self, k: int) -> int:
        """Devices in one level-k component; `group_size(0)` is 1 and `group_size(L)` is P."""
        return math.prod(level.size for level in self.levels[:k])

    def common_level(self, first: int, last: int) -> int:
        """The lowest k whose components hold both ranks; 0 for a rank and itself."""
        size = 1
        for k, outer in enumerate([*self.levels, None]):
            if first // size == last // size:
                return k
            size *= outer.size if outer else 1
        raise ValueError(f"ranks {first} and {last} are not both in 0..{self.devices - 1}")

    @property
    def outermost_level(self) -> int:
        """The outermost level that separates devices; 0 for a single device."""
        return self.common_level(0, self.devices - 1)


def _repeated_names(names: Sequence[object]) -> Iterator[PartoptError]:
    """Names of levels that a level inside has, too."""
    for index, name in enumerate(names):
        if name in names[:index]:
            yield PartoptError(
                f'levels[{index}].name: "{name}" is used twice',
                "give each level its own name",
                code="repeated-name",
                path=f"levels[{index}].name",
            )


def _too_large(levels: int, devices: int) -> str:
    """Of how many levels or devices there are too many; empty where there are not."""
    if levels > LEVEL_LIMIT:
        return f"{levels} levels; partopt plans for up to {LEVEL_LIMIT}"
    if devices > DEVICE_LIMIT:
        return f"{devices} devices; partopt plans for up to {DEVICE_LIMIT}"
    return ""


def _level_faults(raw: dict[str, Any], servers: int | None) -> Iterator[PartoptError]:
    """What is wrong with the levels of a file together, whatever else is wrong with each."""
    listed = raw.get("levels")
    levels = (
        [level for level in listed if isinstance(level, dict)] if isinstance(listed, list) else []
    )
    if levels != listed:
        return
    names = [level.get("name") for level in levels]
    yield from _repeated_names([name if isinstance(name, str) else object() for name in names])
    sizes = [level.get("size") for level in levels]
    sizes[-1:] = sizes[-1:] if servers is None else [servers]
    devices = math.prod(size for size in sizes if type(size) is int and size > 0)
    if what := _too_large(len(levels), devices):
        hint = "check the levels and their sizes"
        yield PartoptError(f"levels: {what}", hint, code="invalid-value", path="levels")


def _fills(devices: int, sizes: Sequence[int]) -> bool:
    """Whether `devices` fill levels of these `sizes` one after the other.

    Every level must be full but the outermost that they reach.
    """
    for size in sizes:
        if devices < size:
            return True
        if devices % size:
            return False
        devices //= size
    return True


def _rate(level: Level) -> str:
    return units.format_bandwidth(level.bandwidth_bytes_per_s)


# N     ranks of a group; planning rank p is the real ranks p N .. p N + N - 1
# G_k   ranks of a level-k component, G_0 = 1
# s_k   ranks of a group that share a port of level k: min(N, G_{k-1}), on a bus N
#       links'_k = ceil(links_k / s_k), beta'_k = beta_k links_k / (s_k links'_k)


def group_levels(levels: Sequence[Level], ranks: int, copies: int = 1) -> list[Level]:
    """The levels between groups of `ranks` consecutive ranks of a cluster with these `levels`.

    A profile of a group (tensor, sequence or context parallel) holds the numbers of one rank: its
    shard of the parameters, what it keeps, its bytes at a cut. Memory, cuts and all-reduces are
    then priced as without groups, on levels that carry what one rank of every group may use.

    Context parallel ranks, `copies` of the same parameters, exchange them together: ranks of a
    group on one port that are copies share what a collective takes of it, up to what they reach
    among themselves.

    Levels that a group fills are left out, but for the outermost, which stays at size 1. Raises
    PartoptError unless a group fills inner levels whole and divides the next one.
    """
    left, inside, found = ranks, 1, []
    for level in levels:
        filled = left > 1 and left % level.size == 0
        if not filled and level.size % left:
            break
        size = 1 if filled else level.size // left
        left = left // level.size if filled else 1
        if not filled or level is levels[-1]:
            sharers = ranks if level.bus else min(ranks, inside)
            grouped = _share(level, size, sharers)
            if copies > 1 and not level.bus:
                together = sharers / min(sharers, ranks // copies)
                among = levels[0].allreduce_bandwidth_bytes_per_s * levels[0].links
                grouped = _speed_up(grouped, together, among)
            found.append(grouped)
        inside *= level.size
    if left == 1:
        return found
    sizes = ", ".join(f"{level.size} to a {level.name}" for level in levels)
    fitting, inside = {1}, 1
    for level in levels:
        fitting |= {inside * part for part in range(1, level.size + 1) if level.size % part == 0}
        inside *= level.size
    raise PartoptError(
        f"groups of {ranks} ranks do not divide {sizes}",
        "choose a cluster whose inner levels a group fills, or divides; here groups can have "
        f"{', '.join(map(str, sorted(fitting)[:8]))} ranks",
        code="unfit-group",
    )


def _share(level: Level, size: int, sharers: int) -> Level:
    """A level of `size` groups, `sharers` ranks of each on one port."""
    links = -(-level.links // sharers)
    rate = level.bandwidth_bytes_per_s * level.links / (sharers * links)
    rates = level.allreduce
    if rates and rates.bandwidth_bytes_per_s:
        allreduce_rate = rates.bandwidth_bytes_per_s * level.links / (sharers * links)
        rates = replace(rates, bandwidth_bytes_per_s=allreduce_rate)
    return replace(level, size=size, links=links, bandwidth_bytes_per_s=rate, allreduce=rates)


def _speed_up(level: Level, times: float, most: float) -> Level:
    """A level whose collectives are so many times as fast, up to `most` bytes/s of all links."""
    current = level.allreduce_bandwidth_bytes_per_s
    rate = max(current, min(times * current, most / level.links))
    rates = replace(level.allreduce or AllReduceRates(), bandwidth_bytes_per_s=rate)
    return level if rate == current else replace(level, allreduce=rates)


# The file, in which quantities carry their units; partopt.units says what a bare number lacks.
_Quantity = str | int | float
_bandwidth, _memory, _price = map(
    positive, (units.parse_bandwidth, units.parse_bytes, units.parse_price)
)
_duration = units.parse_seconds  # which may be zero
_Bandwidth = Annotated[_Quantity, read_by(_bandwidth)]
_Duration = Annotated[_Quantity, read_by(_duration)]


class _DeviceFile(documents.StrictStruct, frozen=True):
    name: str
    memory: Annotated[_Quantity, read_by(_memory)] | None = None
    price: Annotated[_Quantity, read_by(_price)] | None = None


class _AllReduceFile(documents.StrictStruct, frozen=True):
    bandwidth: _Bandwidth | None = None
    latency: _Duration | None = None


class _LevelFile(documents.StrictStruct, frozen=True):
    name: str
    size: Size
    bandwidth: _Bandwidth
    link: str = ""
    links: Links = 1
    latency: _Duration = "0 s"
    bus: bool = False
    overhead: _Duration | None = None
    copy: _Bandwidth | None = None
    allreduce: _AllReduceFile | None = None


class TopologyFile(documents.StrictStruct, frozen=True):
    """The file as a whole."""

    name: str
    device: _DeviceFile
    levels: Annotated[list[_LevelFile], msgspec.Meta(min_length=1)]
    allreduce: Algorithm = "fastest"


def _read_device(file: _DeviceFile) -> Device:
    return Device(
        name=file.name,
        memory_bytes=None if file.memory is None else round(_memory(file.memory)),
        price_per_hour=UNSET if file.price is None else _price(file.price),
    )


def _read_level(file: _LevelFile) -> Level:
    allreduce: AllReduceRates | UnsetType = UNSET
    if rates := file.allreduce:
        allreduce = AllReduceRates(
            bandwidth_bytes_per_s=UNSET if rates.bandwidth is None else _bandwidth(rates.bandwidth),
            latency_s=UNSET if rates.latency is None else _duration(rates.latency),
        )
    return Level(
        name=file.name,
        link=file.link,
        size=file.size,
        bandwidth_bytes_per_s=_bandwidth(file.bandwidth),
        links=file.links,
        latency_s=_duration(file.latency),
        bus=file.bus,
        overhead_s=(file.overhead is not None and _duration(file.overhead)) or UNSET,
        copy_bytes_per_s=UNSET if file.copy is None else _bandwidth(file.copy),
        allreduce=allreduce,
    )


def _dump_level(level: Level) -> dict[str, Any]:
    rates = level.allreduce
    return _given(
        name=level.name,
        size=level.size,
        bandwidth=_text(level.bandwidth_bytes_per_s, "B/s"),
        link=level.link or None,
        links=None if level.links == 1 else level.links,
        latency=_text(level.latency_s, "s"),
        bus=level.bus or None,
        overhead=_text(level.overhead_s, "s"),
        copy=_text(level.copy_bytes_per_s, "B/s"),
        allreduce=_given(
            bandwidth=_text(rates.bandwidth_bytes_per_s, "B/s"),
            latency=None if rates.latency_s is UNSET else f"{rates.latency_s!r} s",
        )
        if rates
        else None,
    )


def _given(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def _text(value: float | UnsetType | None, unit: str) -> str | None:
    """A quantity as `read` reads it back exactly; None of nothing."""
    return f"{value!r} {unit}" if value else None
