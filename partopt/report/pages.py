"""The page of a document as text, of any kind but those that need more than the document."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import structs

from partopt.documents.device import DeviceFile
from partopt.documents.doctor import Diagnosis
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import TrialDocument
from partopt.documents.tables import (
    Comparison,
    Flows,
    FlowTime,
    Scaling,
    Verification,
)
from partopt.documents.topology import Topology
from partopt.documents.training_run import Run
from partopt.report import doctor_text as doctor
from partopt.report import plans_text as plans
from partopt.report import profile_text as profile
from partopt.report import run_text
from partopt.report import trials_text as trials
from partopt.report.clusters import render_device, render_topology
from partopt.report.phrases import basis_lines, ranks_text
from partopt.report.text import Column, label_lines, paragraph, stretch, style, table_of
from partopt.units import format_bytes, format_seconds

_NOTED_S = 1e-3  # a check that takes longer is shown with its time


def text_of(document: Any, all_layers: bool = False) -> str:
    """The page of `document`; layers that repeat are shown once, unless `all_layers` are asked."""
    pages: dict[type, Callable[[Any], str]] = {
        Profile: partial(profile.render, all_layers=all_layers),
        Plan: partial(plans.render_plan, arithmetic=True),
        Verification: render_verification,
        Comparison: plans.render_comparison,
        DeviceFile: render_device,
        Diagnosis: doctor.render,
        Flows: render_flows,
        Run: run_text.render,
        Topology: render_topology,
        TrialDocument: trials.render,
        Scaling: plans.render_scaling,
    }
    return pages[type(document)](document)


def render_verification(verification: Verification) -> str:
    """A line for each check of a plan with the fields that differ, and what is claimed if all hold.

    A check that took a noticeable time is shown with it.
    """
    lines, spell = [], style().spell
    for row in verification.checks:
        took = f" ({format_seconds(row.took_s)})" if row.took_s > _NOTED_S else ""
        verdict = "ok" if row.passed else "FAILED"
        lines.append((row.check, f"{verdict:8}{spell(row.text)}{took}"))
        lines += [("", difference) for difference in row.differences]
    text = label_lines([*lines, *basis_lines(verification.estimated)])
    if not verification.verified:
        return text
    begin = "verified: "
    return f"{text}\n{paragraph(spell(verification.claim), begin, ' ' * len(begin))}"


def render_flows(flows: Flows) -> str:
    """The plan, and its flows as a table, first those that cost most."""

    def name(flow: FlowTime) -> str:
        kind = flow.kind if flow.stage is None else f"{flow.kind} {flow.stage}"
        return kind if flow.source is None else f"{kind} {flow.source} to {flow.destination}"

    def costs(flow: FlowTime) -> str:
        if flow.critical is None or flow.per_second is None:
            return "?"
        return f"{flow.per_second:.2f}" if flow.critical else "-"

    time = f"{format_seconds(flows.period_s)} a microbatch"
    if flows.iteration_s is not None:
        time = f"{format_seconds(flows.iteration_s)} an iteration of {flows.microbatches}"
    head = [
        ("model", f"{flows.model}, microbatch {flows.microbatch_size}, on {flows.cluster}"),
        ("plan", f"{flows.planner}: {flows.shape}, schedule {flows.schedule}, {time}"),
        ("flows", how_many_are_critical(flows) if flows.flows else "none"),
        *basis_lines(flows.estimated),
    ]
    if not flows.flows:
        return label_lines(head)
    table = table_of(
        sorted(flows.flows, key=lambda flow: (-(flow.saved or 0.0), -flow.share)),
        [
            Column("FLOW", name, "whole"),
            Column("RANKS", lambda flow: ranks_text(flow.ranks, stretch(12, least=12)), "whole"),
            Column("BYTES", lambda flow: format_bytes(flow.bytes), spare=2),
            Column("TIMES", lambda flow: f"{flow.times:.4g}", spare=1),
            Column("LEVEL", lambda flow: flow.level, "text"),
            Column("TAKES", lambda flow: format_seconds(flow.takes_s)),
            Column("SHARE", lambda flow: f"{flow.share:.1%}", spare=3),
            Column("COSTS", costs),
            Column("SAVED", lambda flow: "-" if flow.saved is None else f"{flow.saved:.1%}"),
        ],
        gap=1,
    )
    legend = (
        "SHARE of the time that it is on its way. COSTS: seconds for each second that it "
        "is slower; - not critical, ? not known. SAVED: share of the time, if it had no bytes."
    )
    return "\n\n".join([label_lines(head), table, paragraph(legend)])


def how_many_are_critical(flows: Flows) -> str:
    """Of how many, and of how many that is not known."""
    count, critical = len(flows.flows), sum(flow.critical is True for flow in flows.flows)
    why = "there are too many actions, or the pace does not settle"
    if count and flows.unknown == count:
        return f"{count}; which are critical is not known: {why}"
    text = f"{count}, of which {critical} are critical"
    return f"{text}; of {flows.unknown} it is not known: {why}" if flows.unknown else text


def flows_csv(flows: Flows) -> str:
    """A row a flow, under the names of its fields; lists are words."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(FlowTime.__struct_fields__)
    for flow in flows.flows:
        values = structs.astuple(flow)
        lists = [
            " ".join(map(str, value)) if isinstance(value, list) else value for value in values
        ]
        rows.writerow([{True: "yes", False: "no"}[v] if isinstance(v, bool) else v for v in lists])
    return file.getvalue()
