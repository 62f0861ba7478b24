"""A level of a topology from the seconds that were measured on it.

A message of x bytes takes o + c x of the device at each end and l + n x / b in between, as the
simulator has it, one after the other: n messages share a link where all of a level's are on one
bus, or where more leave a member than it has links. The thread that sends is kept for 2 (o + c x),
so each end gets half of that. An all-reduce is a ring (Patarasuk and Yuan, 2009).
"""

# o, c   seconds a message and a byte take of each of its two devices (overhead, 1 / copy)
# l, b   latency and bandwidth of a link
# n      messages that a link carries one after the other
# r      ranks of an all-reduce

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from partopt.documents.topology import FASTEST, AllReduceRates, Device, Level, Topology
from partopt.links.curves import Floats, fit_factors
from partopt.links.layout import Traffic
from partopt.links.samples import AllReduceSample, LevelSamples, LinkMeasurement

_DIGITS = 4  # significant ones of a figure


class Sharing(NamedTuple):
    """How the messages of a level share its links."""

    bus: bool
    links: int


def fit_topology(measurement: LinkMeasurement, name: str) -> Topology:
    """The topology whose levels come nearest to what was measured; its all-reduces are rings."""
    holds_devices = measurement.backend == "gloo"  # others send without the thread that computes
    return Topology(
        name=name,
        device=Device(name=measurement.device, memory_bytes=measurement.memory_bytes),
        levels=[
            fit_level(samples, measurement.backend, holds_devices) for samples in measurement.levels
        ],
        allreduce="ring",
    )


def fit_level(samples: LevelSamples, link: str = "", holds_devices: bool = True) -> Level:
    """The level that comes nearest to the samples, its figures of four digits."""
    fits = [
        (_fit_messages(samples, sharing, holds_devices), sharing)
        for sharing in _sharings([each.traffic for each in samples.messages])
    ]
    # of equal ones the first: neither a bus nor several links
    (factors, _), sharing = min(fits, key=lambda fit: fit[0][1])
    latency, byte_s, overhead, copy = factors.tolist()
    return Level(
        name=samples.name,
        link=link,
        size=samples.size,
        bandwidth_bytes_per_s=_rate(byte_s),
        links=sharing.links,
        latency_s=_round(latency),
        bus=sharing.bus,
        overhead_s=_round(overhead) or msgspec.UNSET,
        copy_bytes_per_s=_rate(copy) if copy else msgspec.UNSET,
        allreduce=_fit_allreduce(samples.allreduces, sharing),
    )


def messages_in_turn(traffic: Traffic, sharing: Sharing) -> int:
    """n of a traffic: messages that one link carries one after the other."""
    at_once = traffic.messages if sharing.bus else traffic.port_messages
    return math.ceil(at_once / sharing.links)


def _sharings(traffic: Sequence[Traffic]) -> Iterator[Sharing]:
    """Every way to share that the traffic can tell apart: links that divide a port's messages."""
    most = max(each.port_messages for each in traffic)
    for links in range(1, most + 1):
        if most % links == 0:
            yield from (Sharing(False, links), Sharing(True, links))


def _fit_messages(
    samples: LevelSamples, sharing: Sharing, holds_devices: bool
) -> tuple[Floats, float]:
    """l, 1 / b, o and c, and the mean error of messages and of what they take of the sender."""
    rows: list[tuple[float, ...]] = []
    target, scale = [], []
    for each in samples.messages:
        n, x = messages_in_turn(each.traffic, sharing), each.size_bytes
        rows.append((1.0, n * x, 2.0 * holds_devices, 2.0 * x * holds_devices))
        target.append(each.seconds)
        scale.append(each.seconds)
    for held in samples.handling if holds_devices else ():
        rows.append((0.0, 0.0, 2.0, 2.0 * held.size_bytes))
        target.append(held.send_s)
        scale.append(samples.single_s[held.size_bytes])
    return fit_factors(np.array(rows), np.array(target), np.array(scale))


def _fit_allreduce(samples: Sequence[AllReduceSample], sharing: Sharing) -> AllReduceRates:
    """Latency of a step and bandwidth of a link, from the seconds of rings."""
    r = np.array([each.ranks for each in samples], dtype=np.float64)
    sizes = np.array([each.size_bytes for each in samples], dtype=np.float64)
    seconds = np.array([each.seconds for each in samples])
    on_a_link = (r if sharing.bus else 1) / sharing.links
    columns = np.stack([2 * (r - 1), 2 * (r - 1) / r * on_a_link * sizes], 1)
    factors, _ = fit_factors(columns, seconds, seconds)
    return AllReduceRates(
        bandwidth_bytes_per_s=_rate(float(factors[1])), latency_s=_round(float(factors[0]))
    )


def _rate(byte_s: float) -> float:
    """Bytes per second."""
    return _round(1 / byte_s) if byte_s * FASTEST > 1 else FASTEST


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")
