"""Memory over time, below the rows of a timeline: that of the fullest rank, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.plan import Plan
from partopt.report.memory import device_parts
from partopt.report.page import Page
from partopt.report.pictures.look import GREY, RED
from partopt.simulator.memory import memory_over_time, peak_memory_bytes
from partopt.simulator.timeline import Timeline
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 0.5  # inches
# what actions do not have: purples that get lighter, and the last of Okabe and Ito's blues
_COLOURS = {
    "parameters": "#54278F",
    "gradients": "#807DBA",
    "optimizer": "#BCBDDC",
    "buffers": "#E3E2EF",
    "transient": "#F7E6C4",
    "activations": "#0072B2",
}
_NEAR = 2.5  # of the peak: a limit above so many is only named
_STEPS = [factor * 10**power for power in range(4) for factor in (0.5, 1, 2)]
_PREFIXES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


class Part(NamedTuple):
    """A part of memory, and its colour."""

    name: str
    colour: str


class MemoryTrace(NamedTuple):
    """What the fullest rank holds: at `times` seconds, and from each until the next.

    `levels` are bytes, one row on top of another, a row for each of `parts`.
    """

    rank: int
    parts: list[Part]
    times: NDArray[np.float64]
    levels: NDArray[np.int64]  # shape (parts, times)
    peak: int
    limit: int | None


def trace_of(timeline: Timeline, plan: Plan, ranks: list[int]) -> MemoryTrace | None:
    """The memory of the fullest of `ranks`; None where nothing is known to take any."""
    peaks = peak_memory_bytes(timeline.order, plan)[ranks]
    rank = ranks[int(peaks.argmax())]
    if not peaks.max():
        return None
    series = memory_over_time(timeline, plan, rank)
    held = device_parts([plan.stages[s] for s in plan.stages_by_rank()[rank]])
    del held["activations"]
    rows = {name: np.full(len(series.times), size) for name, size in held.items()}
    rows["activations"] = series.values - sum(held.values())
    shown = {name: row for name, row in rows.items() if row.any()}
    return MemoryTrace(
        rank=rank,
        parts=[Part(name, _COLOURS[name]) for name in shown],
        times=series.times,
        levels=np.cumsum(list(shown.values()), axis=0),
        peak=int(peaks.max()),
        limit=plan.memory_limit_bytes,
    )


def draw_memory(axes: Axes, page: Page, trace: MemoryTrace) -> None:
    """Draw the parts on top of each other, and the limit of the device where it is near."""
    first = max(0, int(np.searchsorted(trace.times, page.begin, side="right")) - 1)
    last = int(np.searchsorted(trace.times, page.end))
    times = np.append(trace.times[first:last], page.end)
    below = np.zeros(len(times))
    for part, level in zip(trace.parts, trace.levels[:, first:last], strict=True):
        above = np.append(level, level[-1])
        axes.fill_between(
            times, below, above, step="post", color=part.colour, linewidth=0, label=part.name
        )
        below = above
    top = float(trace.peak)
    if trace.limit is not None and trace.limit <= _NEAR * trace.peak:
        axes.axhline(trace.limit, color=RED, linewidth=0.8, linestyle=(0, (3, 2)))
        top = max(top, float(trace.limit))
    axes.set_ylim(0, 1.12 * top)


def label_memory(axes: Axes, trace: MemoryTrace) -> None:
    """The scale of bytes, on the left."""
    unit, scale = next(
        (pair for pair in reversed(_PREFIXES.items()) if trace.peak >= pair[1]), ("B", 1.0)
    )
    most = axes.get_ylim()[1] / scale
    step = next(step for step in _STEPS if most / step < 3)
    places = [n * step for n in range(3) if n * step <= most]
    axes.set_yticks([place * scale for place in places], [f"{place:g}" for place in places])
    axes.set_ylabel(unit, labelpad=2)


def name_memory(trace: MemoryTrace) -> list[tuple[str, str]]:
    """What stands beside the panel, a line each with its colour."""
    named = [("memory of", GREY), (f"rank {trace.rank}", GREY)]
    if trace.limit is not None:
        named += [("limit", RED), (format_bytes(trace.limit), RED)]
    return named
