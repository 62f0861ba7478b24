"""The levels of a cluster that are measured, and the topology that is fitted to the figures.

A message of x bytes takes l + x / b from its send to its arrival. The call that sends keeps its
thread for o + c x of that, which the topology says of both devices. An all-reduce is a ring
(Patarasuk and Yuan, 2009).
"""

# l, b   latency and bandwidth of a link
# o, c   seconds a message and a byte take of the device that sends them (overhead, 1 / copy)
# r      ranks of an all-reduce

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import allreduce_s
from partopt.documents import Note
from partopt.documents.links import (
    AllReduceSample,
    FitComparison,
    FittedLinks,
    LevelSamples,
    LinkMeasurement,
    MessageSample,
)
from partopt.documents.topology import FASTEST, AllReduceRates, Device, Level, Topology
from partopt.errors import invalid
from partopt.units import format_bytes, format_seconds

Floats = NDArray[np.float64]

_BUSY = 0.25  # runnable processes a core, above which a host is busy
_ROUNDS = 30  # of weights
_TUNING = 1.5  # times the median error: from there an error counts linearly
_SHARED = 1.25  # times as long as alone, from where messages at once are said to share a link
_STEPPED = 0.05  # error of a straight line, from where a step is looked for
_LEAST = 0.01  # errors below this always count as squares


@dataclass(frozen=True)
class MeasuredLevel:
    """A level of a cluster, and which ranks are measured for it."""

    name: str
    size: int
    pair: tuple[int, int]  # ranks that send each other messages
    ports: tuple[tuple[int, int], ...]  # pairs that do so at once: all ports of a server
    allreduces: tuple[tuple[int, ...], ...]  # their ranks


def levels_of(ranks: int, per_server: int) -> list[MeasuredLevel]:
    """The levels of `ranks` ranks in servers of `per_server`, innermost first.

    Ranks are numbered server by server. All-reduces are over the first 2, 4, ... members of a
    level, and over all of them. Raises PartoptError for a single rank, and for servers that do not
    divide the ranks.
    """
    if ranks < 2:
        raise invalid("ranks", ranks, "a link has two ends", "measure with 2 ranks or more")
    if per_server < 1 or ranks % per_server:
        what = f"{ranks} ranks are not whole servers of {per_server}"
        raise invalid("per_server", per_server, what, "choose a divisor of the number of ranks")
    levels = []
    inside = [(k, k + 1) for k in range(0, per_server - 1, 2)]
    between = [(k, k + per_server) for k in range(per_server)]
    for name, members, ports in (
        ("server", range(per_server), inside),
        ("cluster", range(0, ranks, per_server), between),
    ):
        r = len(members)
        if r > 1:
            counts = [2**power for power in range(1, r.bit_length()) if 2**power < r]
            groups = tuple(tuple(members[:count]) for count in [*counts, r])
            pairs = tuple(ports) if len(ports) > 1 else ()
            levels.append(MeasuredLevel(name, r, (members[0], members[1]), pairs, groups))
    return levels


def fit_links(measurement: LinkMeasurement, name: str, per_server: int) -> FittedLinks:
    """The topology `name` fitted to a measurement, with so many ranks in a server."""
    topology = fit_topology(measurement, name)
    comparisons = list(compare(measurement, topology))
    return FittedLinks(measurement, topology, comparisons, list(notes_of(measurement, per_server)))


def fit_topology(measurement: LinkMeasurement, name: str) -> Topology:
    """The topology whose levels come nearest to what was measured; its all-reduces are rings."""
    holds_devices = measurement.backend == "gloo"  # others send without the thread that computes
    return Topology(
        name=name,
        device=Device(name=measurement.device, memory_bytes=measurement.memory_bytes),
        levels=[
            _fit_level(samples, measurement.backend, holds_devices)
            for samples in measurement.levels
        ],
        allreduce="ring",
    )


def _fit_level(samples: LevelSamples, link: str, holds_devices: bool) -> Level:
    """The level that comes nearest to the samples; its devices may be held by messages."""
    sizes = np.array([message.size_bytes for message in samples.messages], dtype=np.float64)
    columns = np.stack([np.ones_like(sizes), sizes], 1)
    seconds = np.array([message.seconds for message in samples.messages])
    latency, byte_s = fit_factors(columns, seconds, seconds)
    overhead = copy = 0.0
    if holds_devices:  # errors are shares of the whole message
        sends = np.array([message.send_s for message in samples.messages])
        overhead, copy = fit_factors(columns, sends, seconds)
    r = np.array([sample.ranks for sample in samples.allreduces], dtype=np.float64)
    sizes = np.array([sample.size_bytes for sample in samples.allreduces], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples.allreduces])
    columns = np.stack([2 * (r - 1), 2 * (r - 1) / r * sizes], 1)
    step, ring_byte_s = fit_factors(columns, seconds, seconds)
    return Level(
        name=samples.name,
        link=link,
        size=samples.size,
        bandwidth_bytes_per_s=_rate(byte_s),
        latency_s=_round(latency),
        overhead_s=_round(overhead) or msgspec.UNSET,
        copy_bytes_per_s=_rate(copy) if copy else msgspec.UNSET,
        allreduce=AllReduceRates(bandwidth_bytes_per_s=_rate(ring_byte_s), latency_s=_round(step)),
    )


@dataclass(frozen=True)
class ProtocolStep:
    """What a message takes beside its bytes: a latency, and more `from_bytes` on.

    There a library takes another protocol, which has more bandwidth and begins later.
    """

    latency_s: float
    step_s: float
    from_bytes: int


def protocol_step(messages: Sequence[MessageSample]) -> ProtocolStep | None:
    """The step in the seconds of messages of all sizes; None where a straight line is as good.

    It is taken where the largest error was more than 5 %, and is less with it, and half or less.
    """
    sizes = np.array([message.size_bytes for message in messages])
    seconds = np.array([message.seconds for message in messages])
    line = np.stack([np.ones_like(sizes), sizes], 1)

    def largest_error(columns: Floats, factors: Sequence[float]) -> float:
        return float(np.abs(columns @ np.array(factors) / seconds - 1).max())

    straight, found = largest_error(line, fit_factors(line, seconds, seconds)), None
    least = min(straight / 2, _STEPPED)
    for start in sizes[1:-2] if straight > _STEPPED else ():  # two sizes at least have a slope
        columns = np.stack([np.ones_like(sizes), sizes >= start, sizes], 1)
        factors = fit_factors(columns, seconds, seconds)
        if (error := largest_error(columns, factors)) < least:
            least, found = error, ProtocolStep(factors[0], factors[1], int(start))
    return found


def _rate(byte_s: float) -> float:
    """Bytes per second."""
    return _round(1 / byte_s) if byte_s * FASTEST > 1 else FASTEST


def _round(value: float) -> float:
    """The value with four digits."""
    return float(f"{value:.3e}")


def fit_factors(columns: Floats, target: Floats, scale: Floats) -> list[float]:
    """Factors >= 0 of `columns`, shape (points, factors), whose sum comes near to `target`.

    Errors are shares of `scale`. Least squares with Huber's weights (Huber, 1964), a few times
    over: a single point far off moves the factors little.
    """
    A, y = columns / scale[:, None], target / scale
    lengths = np.sqrt((A**2).sum(axis=0))  # seconds and seconds a byte differ by many digits
    lengths[lengths == 0] = 1.0
    A = A / lengths
    weights, factors = np.ones(len(y)), np.zeros(A.shape[1])
    for _ in range(_ROUNDS):
        factors = _least_squares(A * weights[:, None] ** 0.5, y * weights**0.5)
        errors = np.abs(A @ factors - y)
        bound = max(_LEAST, _TUNING * float(np.median(errors)))
        weights = np.minimum(1.0, bound / np.maximum(errors, bound))
    return [float(factor) for factor in factors / lengths]


def _least_squares(A: Floats, y: Floats) -> Floats:
    """The factors >= 0 of least squares: of a few columns, some that are used and others at 0."""
    best, least = np.zeros(A.shape[1]), float(y @ y)
    for count in range(1, A.shape[1] + 1):
        for used in map(list, itertools.combinations(range(A.shape[1]), count)):
            factors = np.linalg.lstsq(A[:, used], y, rcond=None)[0]
            square = float(((A[:, used] @ factors - y) ** 2).sum())
            if (factors >= 0).all() and square < least * (1 - 1e-9):
                best, least = np.zeros(A.shape[1]), square
                best[used] = factors
    return best


def compare(measurement: LinkMeasurement, topology: Topology) -> Iterator[FitComparison]:
    """All measured figures that the topology speaks of, level by level."""

    def compare_allreduce(samples: AllReduceSample, level: str, step: int) -> FitComparison:
        ranks = range(0, samples.ranks * step, step)
        fitted, measured = allreduce_s(samples.size_bytes, ranks, topology), samples.seconds
        what = f"all-reduce of {samples.ranks}"
        return FitComparison(level, what, samples.size_bytes, measured, fitted, measured)

    for place, (samples, level) in enumerate(zip(measurement.levels, topology.levels, strict=True)):
        for message in samples.messages:
            size, measured = message.size_bytes, message.seconds
            fitted = level.latency_s + size / level.bandwidth_bytes_per_s
            yield FitComparison(level.name, "message", size, measured, fitted, measured)
        for message in samples.messages if level.overhead_s or level.copy_bytes_per_s else ():
            size, measured = message.size_bytes, message.send_s
            fitted = level.message_s + size * level.copy_byte_s
            yield FitComparison(level.name, "its sender", size, measured, fitted, message.seconds)
        for exchange in samples.allreduces:
            yield compare_allreduce(exchange, level.name, topology.group_size(place))
    for exchange in measurement.whole:
        yield compare_allreduce(exchange, "all", 1)


def notes_of(measurement: LinkMeasurement, per_server: int) -> Iterator[Note]:
    """What makes the figures doubtful: busy hosts, shared cores, servers that are not hosts."""
    cores, hosts = measurement.cores, measurement.hosts
    if measurement.load > _BUSY:
        load = f"a load of {measurement.load * cores:.1f} on {cores} cores"
        yield Note(code="busy-host", text=f"the machine is busy: {load} before the measurement")
    on_one = max(hosts.count(host) for host in hosts)
    if measurement.backend == "gloo" and on_one > cores:
        yield Note(code="shared-cores", text=f"{on_one} ranks share {cores} cores of a host")
    for level in measurement.levels:
        yield from _level_notes(level)
    servers = [hosts[first : first + per_server] for first in range(0, len(hosts), per_server)]
    if any(len(set(server)) > 1 for server in servers):
        yield Note(code="split-server", text="ranks of one server lie on several hosts")
    if len(servers) > len({host for server in servers for host in server}):
        yield Note(
            code="one-host", text="servers lie on one host: the level between them is no network"
        )


def _level_notes(level: LevelSamples) -> Iterator[Note]:
    """What a latency is made of, and what messages at once have to share."""
    if step := protocol_step(level.messages):
        parts = f"{format_seconds(step.latency_s)} are latency; {format_seconds(step.step_s)} more"
        size = format_bytes(step.from_bytes)
        text = f"{level.name}: of a message {parts}, from {size} on, are another protocol's"
        yield Note(code="protocol-step", text=text)
    for code, what, samples in (
        ("shared-directions", "both directions of a pair", level.both),
        ("shared-ports", "all pairs", level.ports),
    ):
        pairs = zip(samples, level.messages, strict=False)
        times = [sample.seconds / alone.seconds for sample, alone in pairs]
        if times and times[-1] > _SHARED:  # of the largest message, which bandwidth decides
            text = f"{level.name}: {what} at once take {times[-1]:.1f} times as long as one message"
            yield Note(code=code, text=text)
