"""Where the time of the devices goes, and how busy the links are, as tables."""

from __future__ import annotations

import textwrap

import numpy as np
from numpy.typing import NDArray

from partopt.report.plan import ranks_text
from partopt.report.table import WIDTH, table
from partopt.report.topology import link_text
from partopt.simulator.execution import Execution
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
_MEANING = [  # of the columns, those where all devices spend nothing left out
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
Group = tuple[tuple[int, ...], list[int]]  # the stages that devices hold, and their ranks


def share_table(simulation: Execution, ascii_only: bool = False) -> str:
    """A row for all the devices that hold the same stages: shares of their time, what is in flight
    and their memory.
    """
    shares, window = simulation.shares, simulation.end_s - simulation.start_s
    columns = (
        shares.compute_s,
        shares.forward_s,
        shares.gradient_s,
        shares.transfer_s,
        shares.allreduce_s,
        shares.end_s,
    )
    parts = np.stack(columns) / window
    groups = _groups(simulation)
    shown = _shown(groups, parts[0], simulation.peak_memory_bytes)
    rows = [_row(simulation, group, parts[:, group[1]].mean(axis=1), ascii_only) for group in shown]
    stretch = (
        "the iteration"
        if simulation.steady is None
        else "a cycle of the steady state"
        if simulation.steady.settled
        else "the time"
    )
    working = parts[:, sorted(simulation.plan.stages_by_rank())]
    used = [
        f"{name} {what}"
        for (name, what), part in zip(_MEANING, working, strict=True)
        if part.max() >= _SOME
    ]
    lines = textwrap.wrap(
        f"Shares of {stretch}, {format_seconds(window)}: {', '.join(used)}.", WIDTH
    )
    if len(shown) < len(groups):
        lines.append(
            f"{len(shown)} of {len(groups)} rows are shown, the busiest and the fullest among them."
        )
    return "\n".join([table(_HEADINGS, rows, left=(0, 1, 2), gap=1), *lines])


def _groups(simulation: Execution) -> list[Group]:
    held: dict[tuple[int, ...], list[int]] = {}
    for rank, stages in simulation.plan.stages_by_rank().items():
        held.setdefault(tuple(stages), []).append(rank)
    return sorted(held.items())


def _shown(groups: list[Group], work: Floats, memory: NDArray[np.int64]) -> list[Group]:
    """All groups or, where they are too many, some at even distances, the busiest and the
    fullest.
    """
    if len(groups) <= _MOST_ROWS:
        return groups
    even = _MOST_ROWS - 2
    places = {n * (len(groups) - 1) // (even - 1) for n in range(even)}
    places.add(max(range(len(groups)), key=lambda n: float(work[groups[n][1]].max())))
    places.add(max(range(len(groups)), key=lambda n: int(memory[groups[n][1]].max())))
    return [groups[n] for n in sorted(places)]


def _row(simulation: Execution, group: Group, parts: Floats, ascii_only: bool) -> list[str]:
    stages, ranks = group
    return [
        ",".join(map(str, stages)),
        ranks_text(ranks, _RANKS_WIDTH),
        _bar(parts, ascii_only),
        *(_percent(part) for part in parts.tolist()),
        str(int(simulation.peak_in_flight[ranks].max())),
        format_bytes(int(simulation.peak_memory_bytes[ranks].max())),
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


def level_table(simulation: Execution) -> str:
    """A row a level: for what share of the time its busiest port is in use, and the bytes of all
    messages over it.
    """
    levels = simulation.work.topology.levels
    rows = [
        [
            level.name,
            link_text(level),
            f"{use.transfer_share:.1%}",
            f"{use.allreduce_share:.1%}",
            format_bytes(use.bytes),
        ]
        for level, use in zip(levels, simulation.level_use, strict=True)
    ]
    note = "How long the busiest port of a level is in use; SENT is all messages over it."
    return (
        f"{table(['LEVEL', 'LINK', 'TRANSFERS', 'ALL-REDUCES', 'SENT'], rows, left=(0, 1))}\n{note}"
    )
