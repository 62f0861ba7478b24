"""A topology as people read it."""

from __future__ import annotations

import textwrap

from partopt.topology import Level, Topology
from partopt.units import format_bandwidth, format_bytes, format_seconds


def describe(topology: Topology, width: int = 71) -> str:
    """`v100-pcie, 16 x V100-16GB: server (4, pcie 12 GB/s), ...`; further lines are indented to stand under the first."""
    levels = ", ".join(f"{level.name} ({level.size}, {_link(level)})" for level in topology.levels)
    lines = textwrap.wrap(f"{topology.name}, {topology.devices} x {topology.device.name}: {levels}", width)
    return "\n         ".join(lines)


def rows(topology: Topology) -> list[list[str]]:
    """One row a level: name, link, size, bandwidth of a link, links, latency, kind."""
    return [
        [
            level.name,
            level.link or "-",
            str(level.size),
            format_bandwidth(level.bandwidth_bytes_per_s),
            str(level.links),
            format_seconds(level.latency_s),
            "bus" if level.bus else "switched",
        ]
        for level in topology.levels
    ]


HEADINGS = ["LEVEL", "LINK", "SIZE", "BANDWIDTH", "LINKS", "LATENCY", "KIND"]


def headline(topology: Topology) -> str:
    """`v100-pcie: 16 x V100-16GB, 16 GB each`."""
    memory = topology.device.memory_bytes
    each = f", {format_bytes(memory)} each" if memory is not None else ""
    return f"{topology.name}: {topology.devices} x {topology.device.name}{each}"


def _link(level: Level) -> str:
    rate = format_bandwidth(level.bandwidth_bytes_per_s)
    count = f"{level.links} x " if level.links > 1 else ""
    return f"{level.link} {count}{rate}".strip()
