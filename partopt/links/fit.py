"""A level of a topology from the seconds that were measured on it.

A message of x bytes takes l + n x / b from its send to its arrival: n messages share a link where
all of a level's are on one bus, or where more leave a member than it has links. The call that sends
keeps its thread for o + c x of that, which the topology says of both devices. An all-reduce is a
ring (Patarasuk and Yuan, 2009).
"""

# l, b   latency and bandwidth of a link
# n      messages that a link carries one after the other
# o, c   seconds a message and a byte take of the device that sends them (overhead, 1 / copy)
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
        (_fit_messages(samples, sharing), sharing)
        for sharing in _sharings([each.traffic for each in samples.messages])
    ]
    # of equal ones the first: neither a bus nor several links
    (factors, _), sharing = min(fits, key=lambda fit: fit[0][1])
    latency, byte_s = factors.tolist()
    overhead, copy = _fit_sender(samples) if holds_devices else (0.0, 0.0)
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


def _fit_messages(samples: LevelSamples, sharing: Sharing) -> tuple[Floats, float]:
    """l and 1 / b, and the mean error."""
    sizes = np.array([each.size_bytes for each in samples.messages], dtype=np.float64)
    counts = np.array([messages_in_turn(each.traffic, sharing) for each in samples.messages])
    seconds = np.array([each.seconds for each in samples.messages])
    return fit_factors(np.stack([np.ones_like(sizes), counts * sizes], 1), seconds, seconds)


def _fit_sender(samples: LevelSamples) -> tuple[float, float]:
    """o and c; errors are shares of the whole message."""
    sizes = np.array([each.size_bytes for each in samples.handling], dtype=np.float64)
    seconds = np.array([each.send_s for each in samples.handling])
    scale = np.array([samples.single_s[each.size_bytes] for each in samples.handling])
    factors, _ = fit_factors(np.stack([np.ones_like(sizes), sizes], 1), seconds, scale)
    return float(factors[0]), float(factors[1])


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
