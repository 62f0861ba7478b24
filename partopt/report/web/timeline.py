"""A timeline as the page draws it: actions as columns of small whole numbers."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from partopt.documents.simulation import DrawnTimeline, RankTimeline
from partopt.report.actions import COLOURS, DARKENED, WORDS, read_row, shade, span_text
from partopt.schedules.order import KINDS, U
from partopt.units import format_seconds

_TICKS = 2_000_000  # in a window: finer than any screen at any zoom
_SHADES = 4  # of a kind's colour, for the stages of a rank
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
    legend: list[dict[str, str]]
    sentence: str
    headings: list[str]
    gaps: list[str]


def timeline_of(timeline: DrawnTimeline, end_s: float) -> WebTimeline:
    """The actions of `timeline`, of a simulation that lasts until `end_s`.

    Times are in whole numbers of `tick_s`, rows in the order of their ranks.
    """
    windows = timeline.windows
    tick_s = max(each.end_s - each.begin_s for each in windows) / _TICKS
    rows = [_row(rank, tick_s) for rank in timeline.ranks]
    used = sorted({kind for row in rows for kind in row["kind"]})
    places = {kind: place for place, kind in enumerate(used)}
    for row in rows:
        row["kind"] = [places[kind] for kind in row["kind"]]
    chunks = max(len(rank.stages) for rank in timeline.ranks)
    data = {
        "windows": [[round(w.begin_s / tick_s), round(w.end_s / tick_s)] for w in windows],
        "tick_s": tick_s,
        "kinds": [_kind(kind, min(chunks, _SHADES)) for kind in used],
        "allreduce": COLOURS["A"],
        "ranks": rows,
    }
    letters = [KINDS[kind] for kind in used] + ["A"] * any(row["exchanges"] for row in rows)
    legend = [{"word": WORDS[letter], "colour": COLOURS[letter]} for letter in letters]
    headings = [f"{each.what.capitalize()}, {span_text(each)}" for each in windows]
    gaps = [
        f"{format_seconds(then.begin_s - now.end_s)} left out"
        for now, then in itertools.pairwise(windows)
    ]
    return WebTimeline(data, legend, _sentence(timeline, end_s), headings, ["", *gaps])


def _row(rank: RankTimeline, tick_s: float) -> dict[str, Any]:
    own = read_row(rank)
    start = np.rint(own.start / tick_s).astype(np.int64)
    exchanges = np.stack([rank.allreduce_start_s, rank.allreduce_end_s], axis=1) / tick_s
    return {
        "rank": rank.rank,
        "stages": rank.stages,
        "kind": own.kind.tolist(),
        "chunk": own.chunk.tolist(),
        "microbatch": own.microbatch.tolist(),
        "pair": own.pair.tolist(),
        "start": start.tolist(),
        "length": (np.rint(own.end / tick_s).astype(np.int64) - start).tolist(),
        "exchanges": np.rint(exchanges).astype(np.int64).tolist(),
    }


def _kind(kind: int, shades: int) -> dict[str, Any]:
    letter = KINDS[kind]
    assert letter in DARKENED
    mixed = [shade(letter, chunk, shades) for chunk in range(shades)]
    dark = [0.3 * red + 0.59 * green + 0.11 * blue < 0.5 for red, green, blue in mixed]
    return {
        "word": WORDS[letter],
        "shades": [_hex(colour) for colour in mixed],
        "ink": "#fff" if all(dark) else "#000",
        "numbered": kind != U,
    }


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(each * 255):02x}" for each in colour)


def _sentence(timeline: DrawnTimeline, end_s: float) -> str:
    windows, whole = timeline.windows, format_seconds(end_s)
    text = f"The first {format_seconds(windows[0].end_s)} of {whole}"
    if len(windows) > 1:
        *others, last = (_PARTS[each.what] for each in windows)
        text = f"{', '.join(others)} and {last} of {whole}".capitalize()
    elif windows[0].what == "all":
        text = f"All {whole}"
    return f"{text}{f'; {timeline.note}' if timeline.note else ''}."
