"""A simulation as people read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partopt.documents.simulation import Finding, SimulationDocument
from partopt.report import advice, gantt
from partopt.report.basis import basis_lines
from partopt.report.changes import compare
from partopt.report.figures import price_lines, speed_lines, speed_text, tokens_per_sample
from partopt.report.head import head_of_simulation
from partopt.report.limit import against_limit
from partopt.report.shares import level_table, share_table
from partopt.report.table import label_lines, paragraph
from partopt.report.variation import variation_lines
from partopt.report.width import columns
from partopt.units import format_bytes, format_seconds

_AGREES = 1e-3  # of the period: closer than that, the simulation confirms the plan


def render(
    document: SimulationDocument,
    ascii_only: bool = False,
    colour: bool = False,
    spell: Callable[[str], str] = str,
    command: Callable[[Finding], Sequence[str]] | None = None,
) -> str:
    """The timeline, then tables, outcome and advice.

    The tables show where the time goes and how busy the links are; the outcome is what follows from
    them. Options in the advice are written as `spell` does, and `command` gives the words of the
    command that makes a change.
    """
    parts = [
        str(head_of_simulation(document)),
        _drawing(document, ascii_only, colour),
        share_table(document, ascii_only),
        level_table(document),
        *compare(document),
        label_lines(_outcome(document)),
        advice.render(document.advice, spell, command),
    ]
    return "\n\n".join(parts)


def _drawing(document: SimulationDocument, ascii_only: bool, colour: bool) -> str:
    """The timeline, and how much of the simulation it shows."""
    timeline = document.timeline
    if timeline is None:
        return "The timeline has too many actions to be drawn."
    text = gantt.render(timeline, columns(), ascii_only, colour)
    if len(timeline.windows) > 1 or timeline.windows[0].what == "all":
        return text
    drawn_s = format_seconds(timeline.windows[0].end_s)
    all_s = format_seconds(document.makespan_s)
    note = f"The first {drawn_s} of {all_s}, in which the pipeline fills. BUSY is of these."
    return f"{text}\n{paragraph(note)}"


def _outcome(document: SimulationDocument) -> list[tuple[str, str]]:
    ran = f"{document.microbatches} microbatches in {format_seconds(document.makespan_s)}"
    if document.iteration_s is not None:
        ran += f"; the longest span of a rank is {format_seconds(document.longest_span_s)}"
    period = f"{format_seconds(document.period_s)} a microbatch{_pace(document)}"
    count = len(document.ranks)
    devices = "device" if count == 1 else f"{count} devices"
    speed = speed_text(document.samples_per_s, tokens_per_sample(document))
    return [
        ("speed", f"{speed}; {devices} idle {document.bubble:.1%} of the time"),
        *speed_lines(document),
        ("ran", ran),
        ("period", period + _prediction(document)),
        *price_lines(document.figures, document.topology.cluster.devices),
        ("memory", _memory(document)),
        *variation_lines(document),
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


def _prediction(document: SimulationDocument) -> str:
    """What the plan says, where nothing was changed and it says something else."""
    planned_s = document.planned.period_s
    if document.changed or abs(document.period_s - planned_s) <= _AGREES * planned_s:
        return ""
    return f"; the plan says {format_seconds(planned_s)}"


def _memory(document: SimulationDocument) -> str:
    fullest, limit = document.fullest, document.memory_limit_bytes
    return f"{format_bytes(fullest.peak_memory_bytes)} at most, on rank {fullest.rank}" + (
        against_limit(fullest.peak_memory_bytes, limit)
    )
