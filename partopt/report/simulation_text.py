"""A simulation as people read it: the timeline, where the time goes, the outcome, the advice."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from partopt.documents.simulation import Finding, RankTime, SimulationDocument
from partopt.report import gantt
from partopt.report.phrases import (
    Lines,
    against_limit,
    basis_lines,
    count_text,
    head,
    link_text,
    price_lines,
    ranks_text,
    speed_lines,
    speed_text,
    tokens_per_sample,
)
from partopt.report.text import (
    Column,
    command_lines,
    label_lines,
    paragraph,
    stretch,
    style,
    table_of,
    width,
)
from partopt.units import format_bytes, format_seconds

_AGREES = 1e-3  # of the period: closer than that, the simulation confirms the plan
_SOME = 1e-9  # of the time: less is rounding
_MOST_ROWS = 16
_SLOW = 4  # slow ranks that are named
_BAR_WIDTH = 14
_BLOCKS, _ASCII = "█░░▒▓ ", "#--=+ "  # of the bar, in the order of _SHARES
_SHARES = [  # of the time: headings, meanings, colours apart in grey too, and the fields of a rank
    ("WORK", "computing", "#0072B2", "compute_s"),
    ("ACTS", "waiting for activations", "#E69F00", "waiting_for_activations_s"),
    ("GRAD", "waiting for gradients", "#F0E442", "waiting_for_gradients_s"),
    ("SEND", "waiting for messages on their way", "#CC79A7", "transfer_s"),
    ("SYNC", "waiting for all-reduces", "#4D4D4D", "allreduce_s"),
    ("END", "nothing left to do", "#D9D9D9", "finished_s"),
]
LEVELS = [  # columns of levels, and how busy they are
    Column("LEVEL", lambda row: row[0].name, "text"),
    Column("LINK", lambda row: link_text(row[0]), "text"),
    Column("TRANSFERS", lambda row: f"{row[1].transfer_share:.1%}"),
    Column("ALL-REDUCES", lambda row: f"{row[1].allreduce_share:.1%}"),
    Column("SENT", lambda row: format_bytes(row[1].sent_bytes)),
]

Floats = NDArray[np.float64]


class DeviceGroup(NamedTuple):
    """Devices that hold the same stages: the means of their `parts`, and the maxima of the rest."""

    stages: tuple[int, ...]
    ranks: list[int]
    parts: Floats  # shape (6,), shares of the time, in the order of _SHARES
    work: float  # of the busiest
    in_flight: int
    memory_bytes: int


def render(
    document: SimulationDocument,
    command: Callable[[Finding], Sequence[str]] | None = None,
) -> str:
    """The timeline, then tables, outcome and advice.

    The tables show where the time goes and how busy the links are; the outcome is what follows from
    them. `command` gives the words of the command that makes a change.
    """
    parts = [
        head(document),
        _drawing(document),
        _share_table(document),
        _level_table(document),
        *_changes(document),
        label_lines(_outcome(document)),
        "\n".join(_advice(document.advice, command)),
    ]
    return "\n\n".join(parts)


def _drawing(document: SimulationDocument) -> str:
    """The timeline, and how much of the simulation it shows."""
    timeline = document.timeline
    if timeline is None:
        return "The timeline has too many actions to be drawn."
    text = gantt.render(timeline)
    if len(timeline.windows) > 1 or timeline.windows[0].what == "all":
        return text
    drawn_s, all_s = format_seconds(timeline.windows[0].end_s), format_seconds(document.makespan_s)
    note = f"The first {drawn_s} of {all_s}, in which the pipeline fills. BUSY is of these."
    return f"{text}\n{paragraph(note)}"


def group_devices(document: SimulationDocument) -> list[DeviceGroup]:
    """The devices by the stages that they hold."""
    groups: dict[tuple[int, ...], list[RankTime]] = {}
    for rank in document.ranks:
        groups.setdefault(tuple(rank.stages), []).append(rank)
    found = []
    for stages, ranks in sorted(groups.items()):
        seconds = [[getattr(rank, name) for *_, name in _SHARES] for rank in ranks]
        parts = np.array(seconds) / document.window_s
        found.append(
            DeviceGroup(
                stages=stages,
                ranks=[rank.rank for rank in ranks],
                parts=parts.mean(axis=0),
                work=float(parts[:, 0].max()),
                in_flight=max(rank.peak_in_flight for rank in ranks),
                memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
            )
        )
    return found


def share_columns() -> list[Column]:
    """Those of groups of devices: where their time goes, microbatches in flight, memory."""

    def share(place: int) -> Callable[[DeviceGroup], str]:
        def cell(group: DeviceGroup) -> str:
            part = float(group.parts[place])
            return "-" if part < _SOME else "<1%" if part < 0.005 else f"{part:.0%}"

        return cell

    def parts(group: DeviceGroup) -> Iterator[tuple[str, float, str]]:
        for part, (_, what, colour, _) in zip(group.parts.tolist(), _SHARES, strict=True):
            yield what, part, colour

    shares = [
        Column(name, share(n), colour=colour) for n, (name, _, colour, _) in enumerate(_SHARES)
    ]
    return [
        Column("#", lambda group: ",".join(map(str, group.stages)), "text"),
        Column("RANKS", lambda group: ranks_text(group.ranks, stretch(11, least=11)), "whole"),
        Column("TIME", lambda group: _bar(group.parts), "text", 1, parts),
        *shares[:-1],
        shares[-1]._replace(spare=2),
        Column("FLIGHT", lambda group: str(group.in_flight)),
        Column("MEMORY", lambda group: format_bytes(group.memory_bytes)),
    ]


def _share_table(document: SimulationDocument) -> str:
    """A row for all the devices that hold the same stages.

    It has the shares of their time, their microbatches in flight and their memory. Of too many rows
    some at even distances are shown, and always the busiest and the fullest.
    """
    groups = shown = group_devices(document)
    if len(groups) > _MOST_ROWS:
        even = _MOST_ROWS - 2
        places = {n * (len(groups) - 1) // (even - 1) for n in range(even)}
        places.add(max(range(len(groups)), key=lambda n: groups[n].work))
        places.add(max(range(len(groups)), key=lambda n: groups[n].memory_bytes))
        shown = [groups[n] for n in sorted(places)]
    table = table_of(shown, share_columns(), gap=1)
    lines = [table, paragraph(describe_shares(document, groups))]
    if len(shown) < len(groups):
        rows = f"{len(shown)} of {len(groups)} rows are shown"
        lines.append(paragraph(f"{rows}, the busiest and the fullest among them."))
    return "\n".join(lines)


def describe_shares(document: SimulationDocument, groups: Sequence[DeviceGroup]) -> str:
    """Of what the shares of the devices are, and what the headings of those that are not 0 mean."""
    cycle = "the iteration"
    if document.settled is not None:
        cycle = "a cycle of the steady state" if document.settled else "the time"
    most = np.max([group.parts for group in groups], axis=0)
    used = [
        f"{name} {what}"
        for (name, what, *_), part in zip(_SHARES, most, strict=True)
        if part >= _SOME
    ]
    return f"Shares of {cycle}, {format_seconds(document.window_s)}: {', '.join(used)}."


def _bar(parts: Floats) -> str:
    """The parts side by side, in whole characters, the largest remainders rounded up."""
    cells = parts / max(float(parts.sum()), 1e-300) * _BAR_WIDTH
    whole = np.floor(cells + 1e-9).astype(np.int64)
    for place in np.argsort(whole - cells, kind="stable")[: _BAR_WIDTH - int(whole.sum())]:
        whole[place] += 1
    letters = zip(_ASCII if style().ascii_only else _BLOCKS, whole.tolist(), strict=True)
    return "".join(letter * count for letter, count in letters)


def _level_table(document: SimulationDocument) -> str:
    """A row for every level: its links, how busy its ports are, and all that was sent over it.

    Of the ports of a level the busiest counts, in shares of the time.
    """
    table = table_of(zip(document.topology.levels, document.levels, strict=True), LEVELS)
    note = "How long the busiest port of a level is in use; SENT is all messages over it."
    return f"{table}\n{paragraph(note)}"


def _changes(document: SimulationDocument) -> list[str]:
    """What was changed, and a table of the prediction before and after; empty without changes."""
    if not document.changed:
        return []

    def row(what: str, form: Callable[[float], str], old: float, new: float) -> list[str]:
        by = f"{new / old - 1:+.1%}" if 0 < new < 10 * old else f"x {new / old:.3g}" if old else "-"
        return [what, form(old), form(new), "-" if by in ("+0.0%", "-0.0%") else by]

    def speed(samples_per_s: float) -> str:
        return speed_text(samples_per_s, tokens_per_sample(document))

    before, bubble = document.planned, document.bubble
    points = f"{100 * (bubble - before.bubble):+.1f} points"
    rows = [
        row("period", format_seconds, before.period_s, document.period_s),
        row("speed", speed, before.samples_per_s, document.samples_per_s),
        ["idle", f"{before.bubble:.1%}", f"{bubble:.1%}", points],
        row("memory", format_bytes, before.peak_memory_bytes, document.peak_memory_bytes),
    ]
    if before.iteration_s is not None and document.iteration_s is not None:
        rows.insert(1, row("iteration", format_seconds, before.iteration_s, document.iteration_s))
    headings = ["", "PLANNED", "CHANGED", "BY"]
    columns = [Column(name, itemgetter(n)) for n, name in enumerate(headings)]
    columns[0] = columns[0]._replace(kind="text")
    lines = [
        ("changed" if place == 0 else "", change) for place, change in enumerate(document.changed)
    ]
    return [label_lines(lines), table_of(rows, columns)]


def _outcome(document: SimulationDocument) -> Lines:
    ran = f"{document.microbatches} microbatches in {format_seconds(document.makespan_s)}"
    if document.iteration_s is not None:
        ran += f"; the longest span of a rank is {format_seconds(document.longest_span_s)}"
    period, planned_s = format_seconds(document.period_s), document.planned.period_s
    period = f"{period} a microbatch{_pace(document)}"
    if not document.changed and abs(document.period_s - planned_s) > _AGREES * planned_s:
        period += f"; the plan says {format_seconds(planned_s)}"
    count, fullest = len(document.ranks), document.fullest
    devices = "device" if count == 1 else count_text(count, "device")
    speed = speed_text(document.samples_per_s, tokens_per_sample(document))
    peak = f"{format_bytes(fullest.peak_memory_bytes)} at most, on rank {fullest.rank}"
    limit = against_limit(fullest.peak_memory_bytes, document.memory_limit_bytes)
    return [
        ("speed", f"{speed}; {devices} idle {document.bubble:.1%} of the time"),
        *speed_lines(document),
        ("ran", ran),
        ("period", period),
        *price_lines(document.figures, document.topology.cluster.devices),
        ("memory", peak + limit),
        *_variation(document),
        *basis_lines(document.estimated),
    ]


def _pace(document: SimulationDocument) -> str:
    count = document.cycle_microbatches
    if count is None:
        return f": an iteration of {document.microbatches}"
    if not document.settled:
        return ", the mean pace: NOT SETTLED"
    every = "microbatch" if count == 1 else f"{count} microbatches"
    return f" in steady state, which repeats with every {every}"


def _variation(document: SimulationDocument) -> Lines:
    """What varies, and the seconds without it and with it; none where nothing does."""
    varied = document.variation
    if not varied:
        return []
    parts = [f"rank {slow.rank} takes {slow.factor:g} times as long" for slow in varied.slow]
    if len(parts) > _SLOW + 1:
        parts[_SLOW:] = [f"{len(parts) - _SLOW} more ranks are slow"]
    if varied.jitter:
        of_what = f"{varied.microbatches} microbatches, seed {varied.seed}"
        draws = f"{count_text(varied.draws, 'draw')} of {of_what}"
        percent = f"{100 * varied.jitter:.3g}%"
        parts.insert(0, f"action times by {percent} of their mean, lognormal, {draws}")
    what = "an iteration" if document.iteration_s is not None else "a microbatch"
    p50 = f"{format_seconds(varied.p50_s)} ({varied.p50_loss:+.1%})"
    p95 = f"{format_seconds(varied.p95_s)} ({varied.p95_loss:+.1%})"
    found = p50 if varied.draws == 1 else f"p50 {p50}, p95 {p95}"
    outcome = f"{what} {format_seconds(varied.plain_s)} -> {found}"
    return [("varied", "; ".join(parts) or "by nothing"), ("", outcome)]


def _advice(
    findings: Sequence[Finding], command: Callable[[Finding], Sequence[str]] | None
) -> Iterator[str]:
    """Each finding and, below it, what a change brings and the `command` that makes it."""
    if not findings:
        yield "advice   nothing to point at"
        return
    yield click.style("ADVICE", bold=True)
    indent, below, spell = " " * 9, " " * 12, style().spell
    for finding in findings:
        yield paragraph(f"{spell(finding.text)}.", f"{finding.severity:9}", indent)
        if finding.verb:
            yield paragraph(f"{spell(finding.change)}:", f"{indent}-> ", below)
            if command is not None:
                words = map(shlex.quote, command(finding))
                yield from command_lines(words, below, below, width())
