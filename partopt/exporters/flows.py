"""Every flow of a plan, as CSV or JSON: what whoever tunes collectives may tune.

It is no trainer: any plan can be written.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from msgspec import structs

from partopt import documents
from partopt.documents.flows import Flows, FlowTime
from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text
from partopt.simulator.execution import execute
from partopt.simulator.flows import flows_of


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A table, a row a flow; lists are words."""
    flows = flows_of(execute(plan))
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(field.name for field in structs.fields(FlowTime))
    rows.writerows([_cell(value) for value in structs.astuple(flow)] for flow in flows.flows)
    return Text(file.getvalue(), notes=_notes(flows))


def write_json(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """The document of the flows."""
    flows = flows_of(execute(plan))
    return Text(documents.encode(flows).decode(), notes=_notes(flows))


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _notes(flows: Flows) -> list[str]:
    if flows.tried:
        critical = sum(flow.critical is True for flow in flows.flows)
        return [f"{critical} of {len(flows.flows)} flows are critical"]
    return ["which flows are critical was not tried: too many actions, or the plan does not settle"]


TARGET = Target(
    name="flows",
    summary="no trainer: every message and collective, and which are critical (.csv, .json)",
    tried="no trainer",
    write=write,
    others={".json": write_json},
    suffix=".csv",
    schedules=None,
    cuts=ANYWHERE,
    replicas="any",
    recompute="each",
    shards=("none", "optimizer", "gradients", "parameters"),
    ranks=(),
    groups=True,
)
