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
from partopt.documents.plan import Plan, RunnerUp, proof_of
from partopt.documents.simulation import DrawnTimeline, Finding, SimulationDocument
from partopt.report.looks import MEMORY
from partopt.report.phrases import (
    against_limit,
    basis_lines,
    cluster_lines,
    count_text,
    format_ranks,
    link_text,
    price_lines,
    recomputed_text,
    speed_lines,
    speed_text,
)
from partopt.report.simulation_text import SHARES, group_devices
from partopt.report.transformer_text import layout_name, layout_table
from partopt.report.web.timeline import timeline_of
from partopt.units import format_bytes, format_seconds

_HERE = Path(__file__).parent
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_WIDTH = re.compile(r'<svg [^>]*?\bwidth="([0-9.]+)pt"')
_PREAMBLE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_READABLE = 1.5  # pixels of a point: the smallest labels, of 6 points, have 9
# of computing and of the five ways to wait, apart in grey too
_COLOURS = ("#0072B2", "#E69F00", "#F0E442", "#CC79A7", "#4D4D4D", "#D9D9D9")


class Shown(NamedTuple):
    """A document on the page: its picture as SVG, its page as text, and its digest.

    The picture is there for narrow screens, too.
    """

    name: str
    svg: bytes
    narrow: bytes
    text: str
    sha256: str


class HtmlColumn(NamedTuple):
    """A column of a table, whose cell of a row is a text or a bar; `colour` is a bar's part."""

    heading: str
    cell: Callable[[Any], Any]
    left: bool = False
    colour: str = ""


def render(
    plan: Plan,
    simulation: SimulationDocument,
    timeline: DrawnTimeline | None,
    figure: bytes,
    documents: Sequence[Shown],
    levers: Shown | None,
    advice: Sequence[Mapping[str, str]],
    commands: Sequence[str],
) -> str:
    """The page.

    `timeline` are all actions that it can hold, `figure` is the timeline as SVG; of `documents` the
    first is the plan; `levers` are what else makes it faster. `advice` is as `advice_of` writes it,
    and `commands` are what a reader can check the page with.
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
        picture=_pictures(documents[0], "picture"),
        figure=_inline(figure, "figure"),
        timeline=timeline and timeline_of(timeline, simulation.makespan_s),
        shares=_share_table(simulation),
        levels=_level_table(simulation),
        stages=_stage_table(plan),
        memory=_memory_table(plan),
        runners_up=_beside_table(plan),
        levers=levers and (_pictures(levers, levers.name), levers.text),
        advice=advice,
        beside=[(shown.name, _pictures(shown, shown.name), shown.text) for shown in documents[1:]],
        proof=_proof(plan),
        commands=commands,
        digests=[(shown.name, shown.sha256) for shown in documents],
    )


def _pictures(shown: Shown, name: str) -> Markup:
    """The picture of a document, and that for narrow screens where it is another."""
    if shown.narrow == shown.svg:
        return _inline(shown.svg, name)
    narrow = _inline(shown.narrow, f"{name}-narrow", "narrow")
    return _inline(shown.svg, name, "broad") + narrow


def _inline(svg: bytes, name: str, kind: str = "") -> Markup:
    """A picture as a part of the page: without its preamble, its names unlike other pictures'.

    It is as wide as the page, but its text no larger than the page's, nor too small to read.
    `kind` is the class that styles know it by.
    """
    text = _PREAMBLE.sub("", svg.decode(), count=1)
    width = _WIDTH.search(text)
    assert width is not None, "pictures say how wide they are"
    points = float(width[1])
    limits = f"min-width:{_READABLE * points:.0f}px;max-width:{2 * points:.0f}px"
    sized = text.replace("<svg ", f'<svg class="{kind}" style="{limits}" ', 1)
    return Markup(_ID.sub(rf"\g<1>{name}-", sized))


def _tiles(plan: Plan, simulation: SimulationDocument) -> list[tuple[str, str, bool]]:
    """What is read first: numbers, what they are, and whether they are bad."""
    predicted, N = plan.predicted, plan.topology.group_ranks
    pace = format_seconds(predicted.period_s), "a microbatch in steady state"
    if predicted.iteration_s is not None:
        batch = f"{plan.microbatches} microbatches of {plan.microbatch_size}"
        pace = format_seconds(predicted.iteration_s), f"an iteration of {batch}"
    one = "one device" if N == 1 else f"one group of {N}"
    peak, limit = simulation.peak_memory_bytes, simulation.memory_limit_bytes
    full = f"at most on a device{against_limit(peak, limit)}"
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
    finding: Finding,
    spell: Callable[[str], str],
    command: Callable[[Finding], Sequence[str]] | None,
) -> dict[str, str]:
    """A finding, options written as `spell` does, with the command that makes its change."""
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


def _table(rows: Iterable[Any], columns: Sequence[HtmlColumn], note: str = "") -> dict[str, Any]:
    """A table as the template takes it."""
    cells = [[column.cell(row) for column in columns] for row in rows]
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


def _share_table(document: SimulationDocument) -> dict[str, Any]:
    """Where the time of the devices goes, a row for those that hold the same stages."""
    words = [what for _, what, _ in SHARES]

    def time(group: Any) -> dict[str, Any]:
        return _bar(zip(words, group.parts.tolist(), _COLOURS, strict=True))

    def share(place: int) -> Callable[[Any], str]:
        return lambda group: f"{group.parts[place]:.1%}" if group.parts[place] else "-"

    return _table(
        group_devices(document),
        [
            HtmlColumn("stages", lambda group: ", ".join(map(str, group.stages)), left=True),
            HtmlColumn("ranks", lambda group: format_ranks(group.ranks), left=True),
            HtmlColumn("time", time, left=True),
            *(HtmlColumn(words[n], share(n), colour=_COLOURS[n]) for n in range(len(words))),
            HtmlColumn("in flight", lambda group: group.in_flight),
            HtmlColumn("peak memory", lambda group: format_bytes(group.memory_bytes)),
        ],
        f"Shares of {format_seconds(document.window_s)}.",
    )


def _level_table(document: SimulationDocument) -> dict[str, Any]:
    """The links of every level, and how busy their busiest port is."""
    return _table(
        zip(document.topology.levels, document.levels, strict=True),
        [
            HtmlColumn("level", lambda row: row[0].name, left=True),
            HtmlColumn("links", lambda row: link_text(row[0]), left=True),
            HtmlColumn("messages", lambda row: f"{row[1].transfer_share:.1%}"),
            HtmlColumn("all-reduces", lambda row: f"{row[1].allreduce_share:.1%}"),
            HtmlColumn("sent", lambda row: format_bytes(round(row[1].sent_bytes))),
        ],
    )


def _stage_table(plan: Plan) -> dict[str, Any]:
    """The stages: their layers, ranks and times."""

    def layers(row: Any) -> str:
        stage = row[1]
        return f"{stage.start} to {stage.stop - 1}: {stage.modules[0]} .. {stage.modules[-1]}"

    def or_dash(value: float, form: Callable[[float], str]) -> str:
        return form(value) if value else "-"

    return _table(
        enumerate(plan.stages),
        [
            HtmlColumn("#", lambda row: row[0], left=True),
            HtmlColumn("layers", layers, left=True),
            HtmlColumn("ranks", lambda row: format_ranks(row[1].ranks), left=True),
            HtmlColumn("forward", lambda row: format_seconds(row[1].forward_s)),
            HtmlColumn("backward", lambda row: format_seconds(row[1].backward_s)),
            HtmlColumn("all-reduce", lambda row: or_dash(row[1].allreduce_s, format_seconds)),
            HtmlColumn("sends", lambda row: or_dash(row[1].output_bytes, format_bytes)),
            HtmlColumn("in flight", lambda row: row[1].in_flight),
            HtmlColumn("activations", lambda row: recomputed_text(row[1]), True),
        ],
        "Seconds and bytes of one microbatch on one replica.",
    )


def _memory_table(plan: Plan) -> dict[str, Any]:
    """The memory of a device of every stage, by parts, against the limit."""
    limit = plan.memory_limit_bytes
    most = max([limit or 1, *(stage.memory.total_bytes for stage in plan.stages)])
    rows = [
        (s, {name: getattr(stage.memory, f"{name}_bytes") for name in MEMORY})
        for s, stage in enumerate(plan.stages)
    ]

    def part(name: str) -> Callable[[Any], str]:
        return lambda row: format_bytes(row[1][name]) if row[1][name] else "-"

    note = "No limit is known." if limit is None else f"The limit is {format_bytes(limit)}."
    if plan.reserve.size_bytes:
        note += f" {format_bytes(plan.reserve.size_bytes)} more are reserved."
    return _table(
        rows,
        [
            HtmlColumn("stage", lambda row: row[0], left=True),
            HtmlColumn(
                "of the limit",
                lambda row: _bar((name, row[1][name] / most, MEMORY[name]) for name in MEMORY),
                left=True,
            ),
            *(HtmlColumn(name, part(name), colour=MEMORY[name]) for name in MEMORY),
            HtmlColumn("all", lambda row: format_bytes(plan.stages[row[0]].memory.total_bytes)),
        ],
        note,
    )


def _beside_table(plan: Plan) -> dict[str, Any] | None:
    """The layouts or plans that were found beside the plan, where it says them."""
    rows, columns, notes = layout_table(plan)
    if rows:
        titles = [
            HtmlColumn(column.heading, column.cell, column.kind != "number") for column in columns
        ]
        return _table(rows, titles, "; ".join(notes))
    if not plan.runners_up:
        return None
    tokens = plan.profile.tokens_per_sample
    return _table(
        [RunnerUp.of(plan), *plan.runners_up],
        [
            HtmlColumn("planner", lambda row: row.planner, left=True),
            HtmlColumn("schedule", lambda row: row.schedule, left=True),
            HtmlColumn("microbatch", lambda row: row.microbatch_size),
            HtmlColumn("shape", lambda row: row.shape, left=True),
            HtmlColumn("period", lambda row: format_seconds(row.period_s)),
            HtmlColumn("speed", lambda row: speed_text(row.samples_per_s, tokens)),
            HtmlColumn("memory", lambda row: format_bytes(row.peak_memory_bytes)),
            HtmlColumn("fits", lambda row: "yes" if row.fits else "no", left=True),
        ],
    )
