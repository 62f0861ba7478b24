"""A report as one page of HTML, which needs no other file and no network."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from partopt import __version__
from partopt.documents.plan import Plan, RunnerUp, needed_bytes, proof_of, room_bytes
from partopt.documents.simulation import DrawnTimeline, Finding, SimulationDocument
from partopt.report.layout_words import layout_name
from partopt.report.looks import MEMORY
from partopt.report.phrases import (
    against_limit,
    basis_lines,
    cluster_lines,
    count_text,
    price_lines,
    speed_lines,
    speed_text,
)
from partopt.report.plan_text import stage_columns, weights_lines
from partopt.report.simulation_text import LEVELS, describe_shares, group_devices, share_columns
from partopt.report.text import Column, label_lines, style
from partopt.report.transformer_text import layout_table, lever_lines
from partopt.report.web.timeline import timeline_of
from partopt.units import format_bytes, format_seconds

_HERE = Path(__file__).parent
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_WIDTH = re.compile(r'<svg [^>]*?\bwidth="([0-9.]+)pt"')
_PREAMBLE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_READABLE = 1.5  # pixels of a point: the smallest labels, of 6 points, have 9


class Shown(NamedTuple):
    """A document on the page: its picture as SVG, its page as text, and its digest."""

    name: str
    svg: bytes
    text: str
    sha256: str


def render(
    plan: Plan,
    simulation: SimulationDocument,
    timeline: DrawnTimeline | None,
    figure: bytes,
    documents: Sequence[Shown],
    advice: Sequence[Mapping[str, str]],
    commands: Sequence[str],
) -> str:
    """The page.

    `timeline` are all actions that it can hold, `figure` is the timeline as SVG; of `documents` the
    first is the plan. `advice` is as `advice_of` writes it, and `commands` are what a reader can
    check the page with.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    cluster, figures = plan.topology.cluster, plan.predicted.figures
    stages = f"{count_text(len(plan.stages), 'stage')}, {plan.shape}"
    cut = layout_name(plan.layout) if plan.transformer else stages
    remarks = [
        *((label, f"{label} {text}") for label, text in weights_lines(plan)),
        *speed_lines(plan.predicted),
        *price_lines(figures, cluster.devices),
        *basis_lines(plan.profile.estimated),
    ]
    return environment.get_template("page.html").render(
        version=__version__,
        title=f"{plan.profile.name} on {cluster.devices} x {plan.topology.device.name}: {cut}, "
        f"{plan.schedule}",
        lead="; ".join(text for _, text in cluster_lines(plan.topology)),
        css=Markup((_HERE / "page.css").read_text()),
        js=Markup((_HERE / "page.js").read_text()),
        parts=environment.get_template("parts.html").module,
        tiles=_tiles(plan, simulation),
        remarks=[text for _, text in remarks],
        picture=_inline(documents[0].svg, "picture"),
        figure=_inline(figure, "figure"),
        timeline=timeline and timeline_of(timeline, simulation.makespan_s),
        shares=_table(
            devices := group_devices(simulation),
            share_columns(),
            describe_shares(simulation, devices),
        ),
        levels=_table(zip(plan.topology.levels, simulation.levels, strict=True), LEVELS),
        stages=_table(enumerate(plan.stages), stage_columns(plan)),
        memory=_memory_table(plan),
        runners_up=_beside_table(plan),
        levers=label_lines(lever_lines(plan, plan.transformer)) if plan.transformer else "",
        advice=advice,
        beside=[
            (shown.name, _inline(shown.svg, shown.name), shown.text) for shown in documents[1:]
        ],
        proof=_proof(plan),
        commands=commands,
        digests=[(shown.name, shown.sha256) for shown in documents],
    )


def _inline(svg: bytes, name: str) -> Markup:
    """A picture as a part of the page: without its preamble, its names unlike other pictures'.

    It is as wide as the page, but its text no larger than the page's, nor too small to read."""
    text = _PREAMBLE.sub("", svg.decode(), count=1)
    width = _WIDTH.search(text)
    assert width is not None, "pictures say how wide they are"
    points = float(width[1])
    limits = f"min-width:{_READABLE * points:.0f}px;max-width:{2 * points:.0f}px"
    sized = text.replace("<svg ", f'<svg style="{limits}" ', 1)
    return Markup(_ID.sub(rf"\g<1>{name}-", sized))


def _tiles(plan: Plan, simulation: SimulationDocument) -> list[tuple[str, str, bool]]:
    """What is read first: numbers, what they are, and whether they are bad."""
    predicted, N = plan.predicted, plan.topology.group_ranks
    pace = format_seconds(predicted.period_s), "a microbatch in steady state"
    if predicted.iteration_s is not None:
        batch = f"{plan.microbatches} microbatches of {plan.microbatch_size}"
        pace = format_seconds(predicted.iteration_s), f"an iteration of {batch}"
    one = "one device" if N == 1 else f"one group of {N}"
    peak = simulation.peak_memory_bytes + needed_bytes(plan) - plan.peak_memory_bytes
    full = f"at most on a device{against_limit(peak, room_bytes(plan))}"
    speed = speed_text(predicted.samples_per_s, plan.profile.tokens_per_sample)
    proof = proof_of(plan) if plan.planner == "optimal" else None
    return [
        (speed, "simulated speed", False),
        (f"{predicted.speedup_over_one_device:.2f}x", f"the speed of {one}", False),
        (*pace, False),
        (f"{predicted.bubble:.1%}", "of the devices' time is idle", False),
        (format_bytes(peak), full, not simulation.fits),
        *([(proof.value, proof.label, False)] if proof is not None else []),
    ]


def advice_of(
    finding: Finding, command: Callable[[Finding], Sequence[str]] | None
) -> dict[str, str]:
    """A finding, with the command that makes its change."""
    spell = style().spell
    return {
        "severity": finding.severity,
        "text": f"{spell(finding.text)}.",
        "change": spell(finding.change),
        "command": shlex.join(command(finding)) if command is not None and finding.verb else "",
    }


def _proof(plan: Plan) -> list[tuple[str, str]]:
    proof, certificate = proof_of(plan), plan.certificate
    if proof is None or certificate is None:
        return []
    lines = [
        ("claim", proof.claim),
        ("why", certificate.proof),
        ("reached", format_seconds(certificate.objective_s)),
    ]
    if certificate.lower_bound_s:
        lines.append(("no plan of these is below", format_seconds(certificate.lower_bound_s)))
    return lines


def _table(rows: Iterable[Any], columns: Sequence[Column], note: str = "") -> dict[str, Any]:
    """A table as the template takes it."""
    cells = [
        [_bar(col.parts(row)) if col.parts else col.cell(row) for col in columns] for row in rows
    ]
    return {"columns": columns, "rows": cells, "note": note}


def _bar(parts: Iterable[tuple[str, float, str]]) -> dict[str, Any]:
    """Shares of 1 side by side: their names, sizes and colours."""
    return {
        "parts": [
            {"percent": f"{100 * share:.2f}", "colour": colour, "title": f"{name} {share:.1%}"}
            for name, share, colour in parts
            if share > 0
        ]
    }


def _memory_table(plan: Plan) -> dict[str, Any]:
    """The memory of a device of every stage, by parts, against the limit."""
    limit, reserve = room_bytes(plan), plan.reserve
    most = max([limit or 1, *(stage.memory.total_bytes for stage in plan.stages)])
    rows = [
        (s, {name: getattr(stage.memory, f"{name}_bytes") for name in MEMORY})
        for s, stage in enumerate(plan.stages)
    ]

    def part(name: str) -> Callable[[Any], str]:
        return lambda row: format_bytes(row[1][name]) if row[1][name] else "-"

    def parts(row: Any) -> Iterable[tuple[str, float, str]]:
        return ((name, row[1][name] / most, MEMORY[name]) for name in MEMORY)

    note = "No limit is known." if limit is None else f"The limit is {format_bytes(limit)}."
    if reserve.size_bytes:
        whose = "of it" if reserve.basis == "computed" else "more"
        note += f" {format_bytes(reserve.size_bytes)} {whose} are reserved."
    return _table(
        rows,
        [
            Column("STAGE", lambda row: str(row[0]), "text"),
            Column("OF THE LIMIT", str, "text", parts=parts),
            *(Column(name.upper(), part(name), colour=MEMORY[name]) for name in MEMORY),
            Column("ALL", lambda row: format_bytes(plan.stages[row[0]].memory.total_bytes)),
        ],
        note,
    )


def _beside_table(plan: Plan) -> dict[str, Any] | None:
    """The layouts or plans that were found beside the plan, where it says them."""
    rows, columns, notes = layout_table(plan)
    if rows:
        return _table(rows, columns, "; ".join(notes))
    if not plan.runners_up:
        return None
    tokens = plan.profile.tokens_per_sample
    return _table(
        [RunnerUp.of(plan), *plan.runners_up],
        [
            Column("PLANNER", lambda row: row.planner, "text"),
            Column("SCHEDULE", lambda row: row.schedule, "text"),
            Column("MICROBATCH", lambda row: str(row.microbatch_size)),
            Column("SHAPE", lambda row: row.shape, "text"),
            Column("PERIOD", lambda row: format_seconds(row.period_s)),
            Column("SPEED", lambda row: speed_text(row.samples_per_s, tokens)),
            Column("MEMORY", lambda row: format_bytes(row.peak_memory_bytes)),
            Column("FITS", lambda row: "yes" if row.fits else "no", "whole"),
        ],
    )
