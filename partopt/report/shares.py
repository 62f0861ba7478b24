"""Where the time of the devices goes, and how busy the links are, as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.simulation import RankTime, SimulationDocument
from partopt.report.ranks import ranks_text
from partopt.report.table import paragraph, table
from partopt.report.topology import link_text
from partopt.report.width import columns, stretch
from partopt.units import format_bytes, format_seconds

_BAR_WIDTH = 14
_RANKS_WIDTH = 11
_SOME = 1e-9  # of the time: less is rounding
_MOST_ROWS = 16
_HEADINGS = [
    "#",
    "RANKS",
    "TIME",
    "WORK",
    "ACTS",
    "GRAD",
    "SEND",
    "SYNC",
    "END",
    "FLIGHT",
    "MEMORY",
]
MEANING = [  # of the columns, those where all devices spend nothing left out
    ("WORK", "computing"),
    ("ACTS", "waiting for activations"),
    ("GRAD", "waiting for gradients"),
    ("SEND", "waiting for messages on their way"),
    ("SYNC", "waiting for all-reduces"),
    ("END", "nothing left to do"),
]
_BLOCKS = "█░░▒▓ "  # of the bar, in the order of the columns
_ASCII = "#--=+ "

Floats = NDArray[np.float64]


class DeviceGroup(NamedTuple):
    """Devices that hold the same stages: the means of their `parts`, and the maxima of the rest."""

    stages: tuple[int, ...]
    ranks: list[int]
    parts: Floats  # shape (6,), in the order of the columns
    work: float  # of the busiest
    in_flight: int
    memory_bytes: int


def share_table(document: SimulationDocument, ascii_only: bool = False) -> str:
    """A row for all the devices that hold the same stages.

    It has the shares of their time, their microbatches in flight and their memory.
    """
    parts = np.array([time_parts(each) for each in document.ranks]) / document.window_s
    groups = group_devices(document.ranks, parts)
    shown = pick_rows(groups)
    lines = textwrap.wrap(_meaning(document, parts), columns())
    if len(shown) < len(groups):
        lines.append(
            paragraph(
                f"{len(shown)} of {len(groups)} rows are shown, the busiest and the fullest among "
                "them."
            )
        )
    rows = [_row(group, ascii_only) for group in shown]
    return "\n".join(
        [table(_HEADINGS, rows, left=(0, 1, 2), gap=1, verdicts=(1,), spare=(2, 8)), *lines]
    )


def time_parts(rank: RankTime) -> tuple[float, ...]:
    """Seconds of the rank, in the order of the columns."""
    return (
        rank.compute_s,
        rank.waiting_for_activations_s,
        rank.waiting_for_gradients_s,
        rank.transfer_s,
        rank.allreduce_s,
        rank.finished_s,
    )


def _meaning(document: SimulationDocument, parts: Floats) -> str:
    """What the shares are of, and the meaning of the columns that are not empty."""
    if document.settled is None:
        stretch = "the iteration"
    else:
        stretch = "a cycle of the steady state" if document.settled else "the time"
    used = [
        f"{name} {what}"
        for (name, what), part in zip(MEANING, parts.T, strict=True)
        if part.max() >= _SOME
    ]
    return f"Shares of {stretch}, {format_seconds(document.window_s)}: {', '.join(used)}."


def group_devices(ranks: Sequence[RankTime], parts: Floats) -> list[DeviceGroup]:
    """The devices by the stages that they hold; `parts` are `time_parts`, shape (ranks, 6)."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, rank in enumerate(ranks):
        places.setdefault(tuple(rank.stages), []).append(place)
    return [
        DeviceGroup(
            stages=stages,
            ranks=[ranks[place].rank for place in own],
            parts=parts[own].mean(axis=0),
            work=float(parts[own, 0].max()),
            in_flight=max(ranks[place].peak_in_flight for place in own),
            memory_bytes=max(ranks[place].peak_memory_bytes for place in own),
        )
        for stages, own in sorted(places.items())
    ]


def pick_rows(groups: list[DeviceGroup]) -> list[DeviceGroup]:
    """All groups or, where they are too many, some at even distances.

    The busiest and the fullest are always among them.
    """
    if len(groups) <= _MOST_ROWS:
        return groups
    even = _MOST_ROWS - 2
    places = {n * (len(groups) - 1) // (even - 1) for n in range(even)}
    places.add(max(range(len(groups)), key=lambda n: groups[n].work))
    places.add(max(range(len(groups)), key=lambda n: groups[n].memory_bytes))
    return [groups[n] for n in sorted(places)]


def _row(group: DeviceGroup, ascii_only: bool) -> list[str]:
    return [
        ",".join(map(str, group.stages)),
        ranks_text(group.ranks, stretch(_RANKS_WIDTH, least=_RANKS_WIDTH)),
        _bar(group.parts, ascii_only),
        *(_percent(part) for part in group.parts.tolist()),
        str(group.in_flight),
        format_bytes(group.memory_bytes),
    ]


def _bar(parts: Floats, ascii_only: bool) -> str:
    """The parts side by side, in whole characters, the largest remainders rounded up."""
    cells = parts / max(float(parts.sum()), 1e-300) * _BAR_WIDTH
    whole = np.floor(cells + 1e-9).astype(np.int64)
    for place in np.argsort(whole - cells, kind="stable")[: _BAR_WIDTH - int(whole.sum())]:
        whole[place] += 1
    return "".join(
        letter * int(count)
        for letter, count in zip(_ASCII if ascii_only else _BLOCKS, whole, strict=True)
    )


def _percent(share: float) -> str:
    """`87%`; `-` for nothing."""
    return "-" if share < _SOME else "<1%" if share < 0.005 else f"{share:.0%}"


def level_table(document: SimulationDocument) -> str:
    """A row for each level: its links, how busy its ports are, and all that was sent over it.

    Of the ports of a level the busiest counts, in shares of the time.
    """
    rows = [
        [
            level.name,
            link_text(level),
            f"{use.transfer_share:.1%}",
            f"{use.allreduce_share:.1%}",
            format_bytes(use.sent_bytes),
        ]
        for level, use in zip(document.topology.levels, document.levels, strict=True)
    ]
    note = "How long the busiest port of a level is in use; SENT is all messages over it."
    lines = table(["LEVEL", "LINK", "TRANSFERS", "ALL-REDUCES", "SENT"], rows, left=(0, 1))
    return f"{lines}\n{paragraph(note)}"
