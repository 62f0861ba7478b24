"""A topology as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.topology import Level, Topology
from partopt.report.figures import format_money
from partopt.report.table import paragraph, table
from partopt.units import format_bandwidth, format_bytes, format_seconds


def cluster_lines(topology: Topology) -> list[tuple[str, str]]:
    """The cluster, and the groups that its ranks are in, each with its label."""
    cluster, N = topology.cluster, topology.group_ranks
    head = f"{topology.name}, {cluster.devices} x {topology.device.name}"
    lines = [("cluster", f"{head}: {_describe_levels(cluster)}")]
    if N > 1:
        text = (
            f"ranks are groups of {N}: rank p is the real ranks {N}p to {N}p+{N - 1}; between "
            f"groups {_describe_levels(topology)}"
        )
        lines.append(("group", text))
    return lines


def price_lines(topology: Topology) -> list[tuple[str, str]]:
    """What a device and the whole cluster cost, where a price is known."""
    each, devices = topology.device.price_per_hour, topology.cluster.devices
    if not each:
        return []
    all_of_them = format_money(each * devices)
    return [("price", f"{format_money(each)} a device an hour, {all_of_them} for all")]


def _describe_levels(topology: Topology) -> str:
    """`server (4, pcie 12 GB/s), cluster (4, ethernet 10 Gb/s)`."""
    return ", ".join(
        f"{level.name} ({level.size}, {link_text(level)})" for level in topology.levels
    )


def speedup_text(ratio: float, topology: Topology) -> str:
    """`14.75 times one device`, or times one group."""
    N = topology.group_ranks
    return f"{ratio:.2f} times one {'device' if N == 1 else f'group of {N}'}"


def summary(name: str, topology: Topology) -> list[str]:
    """Name, devices, their kind, their memory, and the levels, as the row of a list."""
    memory = topology.device.memory_bytes
    levels = " > ".join(f"{level.size} {level.link or level.name}" for level in topology.levels)
    return [
        name,
        str(topology.devices),
        topology.device.name,
        "-" if memory is None else format_bytes(memory),
        levels,
    ]


def render(topology: Topology) -> str:
    """The devices, and a row for each level, innermost first."""
    memory = topology.device.memory_bytes
    each = "" if memory is None else f", {format_bytes(memory)} each"
    price = topology.device.price_per_hour
    each += f", {format_money(price)} an hour each" if price else ""
    headings = ["LEVEL", "LINK", "SIZE", "BANDWIDTH", "LINKS", "LATENCY", "KIND"]
    levels = [_row(level) for level in topology.levels]
    rows = table(headings, levels, left=(0, 1, 6), spare=(6,))
    head = f"{topology.name}: {topology.devices} x {topology.device.name}{each}"
    more = [paragraph(line) for line in _engine_lines(topology)]
    note = "Bandwidth is of one link of one member, in one direction."
    return "\n".join([f"{paragraph(head)}\n\n{rows}\n", *more, paragraph(note)])


def _engine_lines(topology: Topology) -> Iterator[str]:
    """What messages take of devices, and what all-reduces achieve, where the topology says so."""
    for level in topology.levels:
        taken = [format_seconds(level.message_s)] if level.message_s else []
        if level.copy_bytes_per_s:
            taken.append(f"its bytes at {format_bandwidth(level.copy_bytes_per_s)}")
        if taken:
            yield f"A message over {level.name} takes {' and '.join(taken)} of both devices."
        if level.allreduce:
            rate = format_bandwidth(level.allreduce_bandwidth_bytes_per_s)
            delay = format_seconds(level.allreduce_latency_s)
            yield f"An all-reduce over {level.name} goes at {rate}, a step {delay} late."
    if topology.allreduce != "fastest":
        yield f"All-reduces are {topology.allreduce}."


def _row(level: Level) -> list[str]:
    return [
        level.name,
        level.link or "-",
        str(level.size),
        format_bandwidth(level.bandwidth_bytes_per_s),
        str(level.links),
        format_seconds(level.latency_s),
        "bus" if level.bus else "switched",
    ]


def link_text(level: Level) -> str:
    """`ethernet 1.25 GB/s`, or `infiniband 8 x 50 GB/s` of several links."""
    rate = format_bandwidth(level.bandwidth_bytes_per_s)
    count = f"{level.links} x " if level.links > 1 else ""
    return f"{level.link} {count}{rate}".strip()
