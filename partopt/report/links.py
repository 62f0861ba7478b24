"""Measured links as people read them: what was measured, what was fitted, how far off that is."""

from __future__ import annotations

from partopt.links import Comparison, FittedLinks, LinkMeasurement
from partopt.report.table import label_lines, table
from partopt.report.topology import render as render_topology
from partopt.units import format_bytes, format_seconds


def render(links: FittedLinks) -> str:
    """The table of all figures, the topology, and whether the fit is good."""
    measurement = links.measurement
    rows = [_row(each) for each in links.comparisons]
    headings = ["LEVEL", "TRAFFIC", "SIZE", "MEASURED", "FITTED", "ERROR"]
    load = f"{measurement.load * measurement.cores:.1f} on {measurement.cores} cores"
    lines = label_lines(
        [
            ("ranks", f"{measurement.ranks} on {_hosts(measurement)}, {measurement.backend}"),
            ("load", f"{load} before the measurement"),
            ("fit", links.quality),
        ]
    )
    return f"{table(headings, rows, left=(0, 1))}\n\n{render_topology(links.topology)}\n\n{lines}"


def _hosts(measurement: LinkMeasurement) -> str:
    count = len(set(measurement.hosts))
    return f"{count} host{'s' if count > 1 else ''}"


def _row(comparison: Comparison) -> list[str]:
    error = f"{comparison.error:+z.1%}"
    return [
        comparison.level,
        comparison.what,
        format_bytes(comparison.size_bytes),
        format_seconds(comparison.measured_s),
        format_seconds(comparison.fitted_s),
        f"{error} poor" if comparison.is_poor else error,
    ]
