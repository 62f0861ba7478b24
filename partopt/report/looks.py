"""What drawings of all sorts have in common: words, colours, rows of actions, ticks of time."""

from __future__ import annotations

import math
import re

import numpy as np

from partopt.documents.actions import KINDS, Slots
from partopt.documents.simulation import DrawnWindow, RankTimeline

# All colours are Okabe and Ito's or shades of them, which colour-blind people can distinguish.

# of an action, and of one of a rank's second chunk, fourth, ..; in grey, too, forwards are lighter
# than any backward
COLOURS = {
    "F": ("#AEDCF7", "#7CC3EE"),
    "B": ("#D55E00", "#A84A00"),
    "I": ("#E69F00", "#C08400"),
    "W": ("#009E73", "#006B4E"),
    "R": ("#CC79A7", "#A3527F"),
    "A": ("#4D4D4D", "#4D4D4D"),
    "U": ("#F0E442", "#C9BE1F"),
}
# of the parts of a device's memory, from the bottom of a bar; neighbours differ in grey
MEMORY = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#CCE5F5",
    "activations": "#C45A00",
    "buffers": "#E69F00",
    "transient": "#F0E442",
}
# of stages, light and dark in turn
_STAGES = [
    *("#9FD8F5", "#0072B2", "#F0E442", "#B04A00"),
    *("#A8E6CF", "#00704F", "#F3C6DF", "#8A4B78"),
]

_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
_ACTION = re.compile(r"([0-9]+)([A-Z])([0-9]*)")


def stage_colour(stage: int) -> str:
    """The colour of a stage; far apart from that of the next one, and repeated after eight."""
    return _STAGES[stage % len(_STAGES)]


def ink(colour: str) -> str:
    """Black or white, whichever can be read on `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "white"


def read_row(rank: RankTimeline) -> Slots:
    """The actions of a rank as they are drawn."""
    slots = [_ACTION.findall(slot) for slot in rank.actions.split()]
    actions = [action for slot in slots for action in slot]
    sizes = [len(slot) for slot in slots]
    stage = np.array([int(stage) for stage, _, _ in actions], dtype=np.int32)
    return Slots(
        kind=np.array([KINDS.index(kind) for _, kind, _ in actions], dtype=np.int8),
        stage=stage,
        microbatch=np.array([int(number or 0) for _, _, number in actions], dtype=np.int32),
        chunk=np.searchsorted(rank.stages, stage),
        pair=np.array(
            [0 if size == 1 else place for size in sizes for place in range(1, size + 1)],
            dtype=np.int8,
        ),
        start=np.repeat(np.array(rank.start_s, dtype=np.float64), sizes),
        end=np.repeat(np.array(rank.end_s, dtype=np.float64), sizes),
    )


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which seconds are written, and how many make a second."""
    return next((unit for unit in _UNITS if abs(seconds) * unit[1] >= 0.99995), _UNITS[-1])


def span_text(window: DrawnWindow) -> str:
    """`131.8-133.6 s`: from when to when a window goes, in digits that tell the two apart."""
    unit, factor = _unit(window.end_s)
    span = (window.end_s - window.begin_s) * factor
    digits = max(0, 1 - math.floor(math.log10(span)))
    return f"{window.begin_s * factor:.{digits}f}-{window.end_s * factor:.{digits}f} {unit}"


def ticks(begin: float, end: float, most: int) -> list[tuple[float, str]]:
    """At most `most` round times in [begin, end], in seconds, and how they are written: `20 ms`."""
    span = end - begin
    if span <= 0 or most < 2:
        return [(begin, tick_label(begin))]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(
        power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1
    )
    first = math.ceil(begin / step - 1e-9)
    count = math.floor(end / step + 1e-9) - first + 1
    return [((first + n) * step, tick_label((first + n) * step)) for n in range(count)]


def tick_label(seconds: float) -> str:
    """`20 ms`: no zeros after the point."""
    unit, factor = _unit(seconds) if seconds else _UNITS[0]
    return f"{round(seconds * factor, 6):.8g} {unit}"
