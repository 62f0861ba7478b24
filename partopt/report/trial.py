"""Schedules on equal stages as people read them: one with its timeline, several in a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from partopt.documents.trial import ClosedForm, Refused, TrialDocument, Tried
from partopt.report import gantt
from partopt.report.table import label_lines, table
from partopt.report.width import columns
from partopt.schedules import SCHEDULES, schedule
from partopt.units import format_seconds

_LISTED = 8  # devices whose numbers are all named
_HEADINGS = ["SCHEDULE", "ITERATION", "BUBBLE", "CLOSED FORM", "OF IT", "IN FLIGHT", "ACTIVATIONS"]
_LEGEND = (
    "BUBBLE: idle share. CLOSED FORM: seconds of it, OF IT the share that they are. "
    "F, B, I, W: of one stage, of v that a device holds. IN FLIGHT: microbatches, in each "
    "stage of a device, on the first and the last device. ACTIVATIONS: what a device keeps "
    "of them, in what it keeps of one."
)


def render(document: TrialDocument, ascii_only: bool = False, colour: bool = False) -> str:
    """One schedule with its timeline, or a table of several."""
    if len(document.tried) == 1 and not document.refused:
        return _page(document, document.tried[0], ascii_only, colour)
    return "\n\n".join([label_lines([("pipeline", _pipeline(document))]), *_tables(document)])


def _page(document: TrialDocument, tried: Tried, ascii_only: bool, colour: bool) -> str:
    drawing = "The timeline has too many actions to be drawn."
    if document.timeline is not None:
        drawing = gantt.render(document.timeline, columns(), ascii_only, colour)
    known = tried.schedule in SCHEDULES
    summary = f": {schedule(tried.schedule).summary}" if known else ""
    head = [("schedule", tried.schedule + summary), ("pipeline", _pipeline(document, tried))]
    return "\n\n".join([label_lines(head), drawing, label_lines(_outcome(document, tried))])


def _pipeline(document: TrialDocument, tried: Tried | None = None) -> str:
    """The question, in words."""
    stages = f"{tried.chunks} stages each, " if tried is not None and tried.chunks > 1 else ""
    forward, backward = format_seconds(document.forward_s), format_seconds(document.backward_s)
    weights = format_seconds(document.weight_gradient_s)
    return (
        f"{document.stages} devices, {stages}{document.microbatches} microbatches; forward of a "
        f"device {forward}, backward {backward}, of that {weights} for the weights; "
        f"messages {format_seconds(document.transfer_s)}"
        + ("; recomputed" if document.recompute else "")
    )


def _outcome(document: TrialDocument, tried: Tried) -> list[tuple[str, str]]:
    form = tried.closed_form
    passed = f", in which {document.microbatches} microbatches pass in steady state"
    return [
        (
            "iteration",
            format_seconds(tried.iteration_s)
            + (passed if tried.asynchronous else "")
            + f"; closed form {format_seconds(form.iteration_s)}",
        ),
        (
            "bubble",
            f"{tried.bubble:.1%}; closed form {form.formula} = {format_seconds(form.bubble_s)}, "
            f"{form.bubble:.1%}: {_verdict(form)}",
        ),
        (
            "in flight",
            f"{_by_device(tried.in_flight)}"
            + (" (in each stage of a device)" if tried.chunks > 1 else "")
            + ("" if tried.in_flight == form.in_flight else f"; {_by_device(form.in_flight)} said"),
        ),
        (
            "kept",
            f"{_by_device(tried.activations)} times the activations of one microbatch",
        ),
    ]


def _verdict(form: ClosedForm) -> str:
    return "agrees" if form.agrees else f"differs: {form.reason or 'no reason known'}"


def _by_device(numbers: Sequence[float]) -> str:
    """`4, 3, 2, 1`: of each device; of many the first and the last, of equal ones one."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]:g}"
    shown = [f"{number:g}" for number in numbers]
    if len(shown) > _LISTED:
        return f"{shown[0]}, {shown[1]} .. {shown[-1]}"
    return ", ".join(shown)


def _ends(numbers: Sequence[float]) -> str:
    """`4..1`: of the first and the last device."""
    first, last = numbers[0], numbers[-1]
    return f"{first:g}" if len(set(numbers)) == 1 else f"{first:g}..{last:g}"


def _tables(document: TrialDocument) -> list[str]:
    """A row for each schedule that ran, a line for each that cannot, and why forms differ."""
    reasons: dict[str, list[str]] = {}
    for tried in document.tried:
        if not tried.closed_form.agrees:
            reasons.setdefault(_verdict(tried.closed_form), []).append(tried.schedule)
    rows = [_cells(tried) for tried in document.tried]
    parts = []
    if rows:
        parts.append(table(_HEADINGS, rows, left=(0, 3), gap=1, verdicts=(0, 3), spare=(4, 3)))
    if document.refused:
        parts.append("\n".join(map(_refusal, document.refused)))
    if reasons:
        lines = [f"{verdict}: {', '.join(names)}" for verdict, names in reasons.items()]
        parts.append(
            "\n".join(textwrap.fill(line, columns(), subsequent_indent="  ") for line in lines)
        )
    return [*parts, *([textwrap.fill(_LEGEND, columns())] if rows else [])]


def _cells(tried: Tried) -> list[str]:
    form = tried.closed_form
    return [
        tried.schedule,
        format_seconds(tried.iteration_s),
        f"{tried.bubble:.1%}",
        form.formula,
        f"{form.bubble:.1%}",
        _ends(tried.in_flight),
        _ends(tried.activations),
    ]


def _refusal(refused: Refused) -> str:
    return textwrap.fill(
        refused.message,
        columns(),
        initial_indent=f"{refused.schedule:<14} ",
        subsequent_indent=" " * 15,
    )
