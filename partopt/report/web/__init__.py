"""A report as one page of HTML, which needs no other file and no network."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from partopt import __version__
from partopt.documents.plan import Plan
from partopt.documents.proof import proof_of
from partopt.documents.simulation import DrawnTimeline, Finding, SimulationDocument
from partopt.report.basis import basis_lines
from partopt.report.figures import price_lines, speed_lines, speed_text
from partopt.report.limit import against_limit
from partopt.report.topology import cluster_lines
from partopt.report.web.tables import (
    beside_table,
    level_table,
    memory_table,
    share_table,
    stage_table,
)
from partopt.report.web.timeline import timeline_of
from partopt.units import format_bytes, format_seconds

_HERE = Path(__file__).parent
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_WIDTH = re.compile(r'<svg [^>]*?\bwidth="([0-9.]+)pt"')
_PREAMBLE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)


class Beside(NamedTuple):
    """A document beside the plan: its page as text, and its picture as SVG."""

    name: str
    heading: str
    svg: bytes
    text: str


class Contents(NamedTuple):
    """What the page is made of.

    `timeline` are all actions that the page can hold, `pictures` SVG of the plan (`picture`) and of
    its timeline (`figure`), `commands` what a reader can check it with, and `digests` SHA-256 by
    file.
    """

    plan: Plan
    simulation: SimulationDocument
    timeline: DrawnTimeline | None
    pictures: Mapping[str, bytes]
    beside: Sequence[Beside]
    commands: Sequence[str]
    digests: Sequence[tuple[str, str]]


def render(
    contents: Contents,
    spell: Callable[[str], str] = str,
    command: Callable[[Finding], Sequence[str]] | None = None,
) -> str:
    """The page; options in its texts are as `spell` writes them.

    `command` gives the words of the command that makes a change.
    """
    plan, simulation = contents.plan, contents.simulation
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    parts: Any = environment.get_template("parts.html").module
    drawn = contents.timeline
    timeline = None if drawn is None else timeline_of(drawn, simulation.makespan_s)
    beside = [
        {**each._asdict(), "picture": _inline(each.svg, each.name)} for each in contents.beside
    ]
    return environment.get_template("page.html").render(
        version=__version__,
        title=_title(plan),
        lead="; ".join(text for _, text in cluster_lines(plan.topology)),
        css=Markup((_HERE / "page.css").read_text()),
        js=Markup((_HERE / "page.js").read_text()),
        picture=parts.picture,
        table=parts.table,
        sections=_sections(contents),
        tiles=_tiles(plan, simulation),
        remarks=[text for _, text in _remarks(plan)],
        pictures={name: _inline(svg, name) for name, svg in contents.pictures.items()},
        timeline=timeline,
        shares=share_table(simulation),
        levels=level_table(simulation),
        stages=stage_table(plan),
        memory=memory_table(plan),
        runners_up=beside_table(plan),
        advice=[_advice(finding, spell, command) for finding in simulation.advice],
        beside=beside,
        proof=_proof(plan),
        commands=contents.commands,
        digests=contents.digests,
    )


def _inline(svg: bytes, name: str) -> Markup:
    """A picture as a part of the page: without its preamble, its names unlike other pictures'.

    It is as wide as the page, but its text no larger than the page's.
    """
    text = _PREAMBLE.sub("", svg.decode(), count=1)
    width = _WIDTH.search(text)
    assert width is not None, "pictures say how wide they are"
    sized = text.replace("<svg ", f'<svg style="max-width:{2 * float(width[1]):.0f}px" ', 1)
    return Markup(_ID.sub(rf"\g<1>{name}-", sized))


def _title(plan: Plan) -> str:
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    where = f"{plan.topology.cluster.devices} x {plan.topology.device.name}"
    return f"{plan.profile.name} on {where}: {stages}, {plan.shape}, {plan.schedule}"


def _sections(contents: Contents) -> list[str]:
    """The names of the sections, in their order."""
    names = ["outcome", "plan", "timeline", "time", "stages", "advice", "proof", "check"]
    if not contents.simulation.advice:
        names.remove("advice")
    if contents.plan.runners_up:
        names.insert(names.index("stages") + 1, "beside")
    place = names.index("proof")
    return [*names[:place], *(each.name for each in contents.beside), *names[place:]]


def _tiles(plan: Plan, simulation: SimulationDocument) -> list[dict[str, Any]]:
    """What is read first, each number with what it is."""
    predicted = plan.predicted
    peak, limit = simulation.peak_memory_bytes, simulation.memory_limit_bytes
    if predicted.iteration_s is None:
        pace = format_seconds(predicted.period_s), "a microbatch in steady state"
    else:
        pace = (
            format_seconds(predicted.iteration_s),
            f"an iteration of {plan.microbatches} microbatches of {plan.microbatch_size}",
        )
    tiles = [
        (speed_text(predicted.samples_per_s, plan.profile.tokens_per_sample), "simulated speed"),
        (f"{predicted.speedup_over_one_device:.2f}x", f"the speed of {_one(plan)}"),
        pace,
        (f"{predicted.bubble:.1%}", "of the devices' time is idle"),
    ]
    found: list[dict[str, Any]] = [
        {"value": value, "label": label, "bad": False} for value, label in tiles
    ]
    full = f"at most on a device{against_limit(peak, limit)}"
    found.append({"value": format_bytes(peak), "label": full, "bad": not simulation.fits})
    proof = proof_of(plan)
    if proof is not None and plan.planner == "optimal":
        found.append({"value": proof.value, "label": proof.label, "bad": False})
    return found


def _one(plan: Plan) -> str:
    N = plan.topology.group_ranks
    return "one device" if N == 1 else f"one group of {N}"


def _remarks(plan: Plan) -> list[tuple[str, str]]:
    return [
        *speed_lines(plan.predicted),
        *price_lines(plan.predicted.figures, plan.topology.cluster.devices),
        *basis_lines(plan.profile.estimated),
    ]


def _advice(
    finding: Finding,
    spell: Callable[[str], str],
    command: Callable[[Finding], Sequence[str]] | None,
) -> dict[str, str]:
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
