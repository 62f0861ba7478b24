"""What was changed in a plan before it was simulated, and how its prediction changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from partopt.documents.simulation import SimulationDocument
from partopt.report.figures import speed_text, tokens_per_sample
from partopt.report.table import label_lines, table
from partopt.units import format_bytes, format_seconds


def compare(document: SimulationDocument) -> list[str]:
    """What was changed, and a table of the prediction before and after; empty without changes."""
    if not document.changed:
        return []
    lines = [
        ("changed" if place == 0 else "", change) for place, change in enumerate(document.changed)
    ]
    return [label_lines(lines), table(["", "PLANNED", "CHANGED", "BY"], _rows(document))]


def _rows(document: SimulationDocument) -> list[list[str]]:
    before = document.planned
    speed = partial(speed_text, tokens=tokens_per_sample(document))
    rows = [
        _row("period", format_seconds, before.period_s, document.period_s),
        _row("speed", speed, before.samples_per_s, document.samples_per_s),
        [
            "idle",
            f"{before.bubble:.1%}",
            f"{document.bubble:.1%}",
            f"{100 * (document.bubble - before.bubble):+.1f} points",
        ],
        _row("memory", format_bytes, before.peak_memory_bytes, document.peak_memory_bytes),
    ]
    if before.iteration_s is not None and document.iteration_s is not None:
        rows.insert(1, _row("iteration", format_seconds, before.iteration_s, document.iteration_s))
    return rows


def _row(what: str, written: Callable[[float], str], old: float, new: float) -> list[str]:
    return [what, written(old), written(new), _by(old, new)]


def _by(old: float, new: float) -> str:
    """`+5.2%`, `x 12.3`, or `-` where both are alike."""
    by = f"{new / old - 1:+.1%}" if 0 < new < 10 * old else f"x {new / old:.3g}" if old else "-"
    return "-" if by in ("+0.0%", "-0.0%") else by
