"""Schedules on equal stages as people read them: one with its timeline, several in a table."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.simulation import ClosedForm, TrialDocument, Tried
from partopt.report import gantt
from partopt.report.phrases import Lines
from partopt.report.text import Column, label_lines, paragraph, table_of
from partopt.units import format_seconds

_LISTED = 8  # devices whose numbers are all named
_LEGEND = (
    "BUBBLE: idle share. CLOSED FORM: seconds of it, OF IT the share that they are. "
    "F, B, I, W: of one stage, of v that a device holds. IN FLIGHT: microbatches, in each "
    "stage of a device, on the first and the last device. ACTIVATIONS: what a device keeps "
    "of them, in what it keeps of one."
)


def render(document: TrialDocument) -> str:
    """One schedule with its timeline, or a table of several."""
    if len(document.tried) > 1 or document.refused:
        question = label_lines([("pipeline", _pipeline(document))])
        return "\n\n".join([question, *_tables(document)])
    [tried] = document.tried
    drawing = "The timeline has too many actions to be drawn."
    if document.timeline is not None:
        drawing = gantt.render(document.timeline)
    named = f"{tried.schedule}: {tried.summary}" if tried.summary else tried.schedule
    head = [("schedule", named), ("pipeline", _pipeline(document, tried.chunks))]
    return "\n\n".join([label_lines(head), drawing, label_lines(_outcome(document, tried))])


def _pipeline(document: TrialDocument, chunks: int = 1) -> str:
    """The question, in words."""
    stages = f"{chunks} stages each, " if chunks > 1 else ""
    forward, backward = format_seconds(document.forward_s), format_seconds(document.backward_s)
    weights = format_seconds(document.weight_gradient_s)
    return (
        f"{document.stages} devices, {stages}{document.microbatches} microbatches; forward of a "
        f"device {forward}, backward {backward}, of that {weights} for the weights; "
        f"messages {format_seconds(document.transfer_s)}"
        + ("; recomputed" if document.recompute else "")
    )


def _outcome(document: TrialDocument, tried: Tried) -> Lines:
    def by_device(numbers: Sequence[float]) -> str:
        """`4, 3, 2, 1`: of every device; of many the first and the last, of equal ones one."""
        first, *others = [f"{number:g}" for number in numbers]
        if len(set(numbers)) == 1:
            return first
        if len(numbers) > _LISTED:
            return f"{first}, {others[0]} .. {others[-1]}"
        return ", ".join([first, *others])

    form = tried.closed_form
    iteration = format_seconds(tried.iteration_s)
    if tried.asynchronous:
        iteration += f", in which {document.microbatches} microbatches pass in steady state"
    bubble = f"{form.formula} = {format_seconds(form.bubble_s)}, {form.bubble:.1%}"
    flight = by_device(tried.in_flight) + (
        " (in each stage of a device)" if tried.chunks > 1 else ""
    )
    if tried.in_flight != form.in_flight:
        flight += f"; {by_device(form.in_flight)} said"
    return [
        ("iteration", f"{iteration}; closed form {format_seconds(form.iteration_s)}"),
        ("bubble", f"{tried.bubble:.1%}; closed form {bubble}: {_verdict(form)}"),
        ("in flight", flight),
        ("kept", f"{by_device(tried.activations)} times the activations of one microbatch"),
    ]


def _verdict(form: ClosedForm) -> str:
    return "agrees" if form.agrees else f"differs: {form.reason or 'no reason known'}"


def _tables(document: TrialDocument) -> list[str]:
    """A row for every schedule that ran, a line for what cannot run, and why forms differ."""

    def ends(numbers: Sequence[float]) -> str:
        """`4..1`: of the first and the last device."""
        first, last = numbers[0], numbers[-1]
        return f"{first:g}" if len(set(numbers)) == 1 else f"{first:g}..{last:g}"

    table = table_of(
        document.tried,
        [
            Column("SCHEDULE", lambda tried: tried.schedule, "whole"),
            Column("ITERATION", lambda tried: format_seconds(tried.iteration_s)),
            Column("BUBBLE", lambda tried: f"{tried.bubble:.1%}"),
            Column("CLOSED FORM", lambda tried: tried.closed_form.formula, "whole", spare=2),
            Column("OF IT", lambda tried: f"{tried.closed_form.bubble:.1%}", spare=1),
            Column("IN FLIGHT", lambda tried: ends(tried.in_flight)),
            Column("ACTIVATIONS", lambda tried: ends(tried.activations)),
        ],
        gap=1,
    )
    refused = [
        paragraph(refusal.message, f"{refusal.schedule:<14} ", " " * 15)
        for refusal in document.refused
    ]
    reasons: dict[str, list[str]] = {}
    for tried in document.tried:
        if not tried.closed_form.agrees:
            reasons.setdefault(_verdict(tried.closed_form), []).append(tried.schedule)
    differ = [
        paragraph(f"{verdict}: {', '.join(names)}", rest="  ") for verdict, names in reasons.items()
    ]
    lines = [*map("\n".join, filter(None, [refused, differ]))]
    return [table, *lines, paragraph(_LEGEND)] if document.tried else lines
