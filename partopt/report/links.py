"""Measured links as people read them: what was measured, what was fitted, how far off that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.documents import Note
from partopt.documents.topology import Topology
from partopt.links.cluster_file import quality
from partopt.links.errors import Comparison
from partopt.links.samples import LinkMeasurement
from partopt.report.table import label_lines, table
from partopt.report.topology import render as render_topology
from partopt.units import format_bytes, format_seconds

_BUSY = 0.25  # runnable processes for each core, above which a host is busy


def render(
    measurement: LinkMeasurement, topology: Topology, comparisons: Sequence[Comparison]
) -> str:
    """The table of all figures, the topology, and whether the fit is good."""
    rows = [_row(each) for each in comparisons]
    rows += [
        [samples.name, "late receive", *_cells(each.size_bytes, each.late_s), "-", "-"]
        for samples in measurement.levels
        for each in samples.handling
    ]
    headings = ["LEVEL", "TRAFFIC", "SIZE", "MEASURED", "FITTED", "ERROR"]
    load = f"{measurement.load * measurement.cores:.1f} on {measurement.cores} cores"
    lines = label_lines(
        [
            ("ranks", f"{measurement.ranks} on {_hosts(measurement)}, {measurement.backend}"),
            ("load", f"{load} before the measurement"),
            ("fit", quality(comparisons)),
        ]
    )
    return f"{table(headings, rows, left=(0, 1))}\n\n{render_topology(topology)}\n\n{lines}"


def notes_of(measurement: LinkMeasurement, per_server: int) -> Iterator[Note]:
    """What makes the figures doubtful: busy hosts, shared cores, servers that are not hosts."""
    cores, hosts = measurement.cores, measurement.hosts
    if measurement.load > _BUSY:
        load = measurement.load * cores
        yield _note(
            "busy-host",
            f"the machine is busy: a load of {load:.1f} on {cores} cores before the measurement",
        )
    on_one = max(hosts.count(host) for host in hosts)
    if measurement.backend == "gloo" and on_one > cores:
        yield _note("shared-cores", f"{on_one} ranks share {cores} cores of a host")
    servers = [hosts[first : first + per_server] for first in range(0, len(hosts), per_server)]
    if any(len(set(server)) > 1 for server in servers):
        yield _note("split-server", "ranks of one server lie on several hosts")
    if len(servers) > len({host for server in servers for host in server}):
        yield _note("one-host", "servers lie on one host: the level between them is no network")


def _note(code: str, text: str) -> Note:
    return Note(code=code, text=text)


def _hosts(measurement: LinkMeasurement) -> str:
    count = len(set(measurement.hosts))
    return f"{count} host{'s' if count > 1 else ''}"


def _row(comparison: Comparison) -> list[str]:
    error = f"{comparison.error:+z.1%}"
    return [
        comparison.level,
        comparison.what,
        *_cells(comparison.size_bytes, comparison.measured_s),
        format_seconds(comparison.fitted_s),
        f"{error} poor" if comparison.is_poor else error,
    ]


def _cells(size_bytes: int, seconds: float) -> list[str]:
    return [format_bytes(size_bytes), format_seconds(seconds)]
