"""What every drawing of a timeline needs.

Words and colours of the kinds of actions, and ticks of a time axis.
"""

from __future__ import annotations

import math
import re

import numpy as np

from partopt.documents.simulation import DrawnWindow, RankTimeline
from partopt.schedules.order import KINDS
from partopt.simulator.timeline import Slots
from partopt.units import format_seconds

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "R": "recomputation",
    "A": "all-reduce",
    "U": "optimizer step",
}

# Okabe and Ito's colours or shades of them, which colour-blind people can distinguish.
# In grey, too, forwards are lighter than any backward.
COLOURS = {
    "F": "#AEDCF7",
    "B": "#D55E00",
    "I": "#E69F00",
    "W": "#009E73",
    "R": "#CC79A7",
    "A": "#4D4D4D",
    "U": "#F0E442",
}
DARKENED = {
    "F": "#7CC3EE",
    "B": "#A84A00",
    "I": "#C08400",
    "W": "#006B4E",
    "R": "#A3527F",
    "A": "#4D4D4D",
    "U": "#C9BE1F",
}

_ACTION = re.compile(r"([0-9]+)([A-Z])([0-9]*)")


def shade(letter: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind of action: the later its chunk among those of the rank, the darker."""
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    light, dark = (
        np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        for colour in (COLOURS[letter], DARKENED[letter])
    )
    red, green, blue = (light + part * (dark - light)).tolist()
    return red, green, blue


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


def span_text(window: DrawnWindow) -> str:
    """`131.8-133.6 s`: from when to when a window goes, in digits that tell the two apart."""
    span = window.end_s - window.begin_s
    unit, factor = next(
        (pair for pair in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if window.end_s * pair[1] >= 1),
        ("ns", 1e9),
    )
    digits = max(0, 1 - math.floor(math.log10(span * factor)))
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
    number, unit = format_seconds(seconds).split()
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
