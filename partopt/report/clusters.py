"""Topologies, measured links and devices as people read them."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.device import DeviceFile
from partopt.documents.links import FittedLinks
from partopt.documents.topology import Topology
from partopt.report.phrases import format_money
from partopt.report.text import Column, label_lines, paragraph, table_of, width
from partopt.units import format_bandwidth, format_bytes, format_seconds


def render_topologies(topologies: dict[str, Topology]) -> str:
    """A row for every topology: name, devices, their kind, their memory, and the levels."""

    def memory(row: tuple[str, Topology]) -> str:
        size = row[1].device.memory_bytes
        return "-" if size is None else format_bytes(size)

    def levels(row: tuple[str, Topology]) -> str:
        return " > ".join(f"{level.size} {level.link or level.name}" for level in row[1].levels)

    return table_of(
        topologies.items(),
        [
            Column("NAME", lambda row: row[0], "text"),
            Column("DEVICES", lambda row: str(row[1].devices)),
            Column("KIND", lambda row: row[1].device.name, "text"),
            Column("MEMORY", memory),
            Column("LEVELS, INNERMOST FIRST", levels, "text"),
        ],
    )


def render_topology(topology: Topology) -> str:
    """The devices, and a row for every level, innermost first."""
    memory, price = topology.device.memory_bytes, topology.device.price_per_hour
    details = "" if memory is None else f", {format_bytes(memory)} each"
    details += f", {format_money(price)} an hour each" if price else ""
    rows = table_of(
        topology.levels,
        [
            Column("LEVEL", lambda level: level.name, "text"),
            Column("LINK", lambda level: level.link or "-", "text"),
            Column("SIZE", lambda level: str(level.size)),
            Column("BANDWIDTH", lambda level: format_bandwidth(level.bandwidth_bytes_per_s)),
            Column("LINKS", lambda level: str(level.links)),
            Column("LATENCY", lambda level: format_seconds(level.latency_s)),
            Column("KIND", lambda level: "bus" if level.bus else "switched", "text", spare=1),
        ],
    )
    head = f"{topology.name}: {topology.devices} x {topology.device.name}{details}"
    note = "Bandwidth is of one link of one member, in one direction."
    notes = map(paragraph, [*_engine_lines(topology), note])
    return "\n".join([f"{paragraph(head)}\n\n{rows}\n", *notes])


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


def render_links(links: FittedLinks) -> str:
    """The table of all that was measured, the topology, and whether the fit is good."""
    measurement = links.measurement
    table = table_of(
        links.comparisons,
        [
            Column("LEVEL", lambda row: row.level, "text"),
            Column("TRAFFIC", lambda row: row.what, "text"),
            Column("SIZE", lambda row: format_bytes(row.size_bytes)),
            Column("MEASURED", lambda row: format_seconds(row.measured_s)),
            Column("FITTED", lambda row: format_seconds(row.fitted_s)),
            Column("ERROR", lambda row: f"{row.error:+z.1%}{' poor' if row.is_poor else ''}"),
        ],
    )
    hosts = len(set(measurement.hosts))
    where = f"{hosts} host{'s' if hosts > 1 else ''}, {measurement.backend}"
    load = f"{measurement.load * measurement.cores:.1f} on {measurement.cores} cores"
    below = label_lines(
        [
            ("ranks", f"{measurement.ranks} on {where}"),
            ("load", f"{load} before the measurement"),
            ("fit", links.quality),
        ]
    )
    return f"{table}\n\n{render_topology(links.topology)}\n\n{below}"


def render_device(device: DeviceFile) -> str:
    """The device, and every number of its file with its source."""
    lines = []
    for path, number in device.numbers():
        value = f"{number.value:.0%}" if isinstance(number.value, float) else str(number.value)
        origin = number.source or f"assumed: {number.assumed}"
        lines.append(paragraph(f"{path:30} {value:16} {origin}", rest=" " * min(48, width() // 2)))
    legend = (
        "peaks: dense matrix products. efficiency: what is achieved of them; memory, of "
        "the bandwidth. launch: what each operation takes beside its work."
    )
    if device.training is not None:
        legend += (
            " training: what the kernels of trainers achieve; attention, of the peak over s tokens."
        )
    head = f"{device.name}: {device.memory}, {device.type}"
    return "\n".join([head, "", *lines, "", paragraph(legend)])
