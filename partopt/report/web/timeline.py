"""A timeline as the page draws it: actions as columns of small whole numbers."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from partopt.documents.actions import KINDS, WORDS, U
from partopt.documents.simulation import DrawnTimeline
from partopt.report.looks import COLOURS, ink, read_row, span_text
from partopt.units import format_seconds

_TICKS = 2_000_000  # in a window: finer than any screen at any zoom
_PARTS = {
    "beginning": "the beginning",
    "steady": "a steady part",
    "middle": "a part of the middle",
    "end": "the end",
}


class WebTimeline(NamedTuple):
    """What the page's script draws, what its colours mean, and a sentence that says what it is.

    `headings` are those of its windows, `gaps` say what is left out before each.
    """

    data: dict[str, Any]
    legend: list[tuple[str, str]]
    sentence: str
    headings: list[str]
    gaps: list[str]


def timeline_of(timeline: DrawnTimeline, end_s: float) -> WebTimeline:
    """The actions of `timeline`, of a simulation that lasts until `end_s`.

    Times are in whole numbers of `tick_s`, rows in the order of their ranks.
    """
    windows, rows, exchanged = timeline.windows, [], False
    tick_s = max(window.end_s - window.begin_s for window in windows) / _TICKS
    used: list[int] = []  # the kinds of actions, which rows number
    for rank in timeline.ranks:
        actions = read_row(rank)
        used += sorted({*actions.kind.tolist()} - {*used})
        start = np.rint(actions.start / tick_s).astype(np.int64)
        exchanges = np.stack([rank.allreduce_start_s, rank.allreduce_end_s], axis=1) / tick_s
        exchanged |= len(exchanges) > 0
        rows.append(
            {
                "rank": rank.rank,
                "stages": rank.stages,
                "kind": [used.index(kind) for kind in actions.kind.tolist()],
                "chunk": actions.chunk.tolist(),
                "microbatch": actions.microbatch.tolist(),
                "pair": actions.pair.tolist(),
                "start": start.tolist(),
                "length": (np.rint(actions.end / tick_s).astype(np.int64) - start).tolist(),
                "exchanges": np.rint(exchanges).astype(np.int64).tolist(),
            }
        )
    data = {
        "windows": [[round(w.begin_s / tick_s), round(w.end_s / tick_s)] for w in windows],
        "tick_s": tick_s,
        "kinds": [
            {
                "word": WORDS[KINDS[kind]],
                "colours": COLOURS[KINDS[kind]],
                "ink": [ink(colour) for colour in COLOURS[KINDS[kind]]],
                "numbered": kind != U,
            }
            for kind in used
        ],
        "allreduce": COLOURS["A"][0],
        "ranks": rows,
    }
    letters = [KINDS[kind] for kind in sorted(used)] + ["A"] * exchanged
    headings = [f"{window.what.capitalize()}, {span_text(window)}" for window in windows]
    gaps = [
        f"{format_seconds(then.begin_s - now.end_s)} left out"
        for now, then in itertools.pairwise(windows)
    ]
    legend = [(WORDS[letter], COLOURS[letter][0]) for letter in letters]
    return WebTimeline(data, legend, _sentence(timeline, end_s), headings, ["", *gaps])


def _sentence(timeline: DrawnTimeline, end_s: float) -> str:
    windows, whole = timeline.windows, format_seconds(end_s)
    text = f"The first {format_seconds(windows[0].end_s)} of {whole}"
    if len(windows) > 1:
        *others, last = (_PARTS[window.what] for window in windows)
        text = f"{', '.join(others)} and {last} of {whole}".capitalize()
    elif windows[0].what == "all":
        text = f"All {whole}"
    return f"{text}{f'; {timeline.note}' if timeline.note else ''}."
