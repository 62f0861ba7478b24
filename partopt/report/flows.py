"""The flows of a plan: what each takes, and what it costs that it does."""

from __future__ import annotations

import csv
import io

from msgspec import structs

from partopt.documents.flows import Flows, FlowTime
from partopt.report.basis import basis_lines
from partopt.report.ranks import ranks_text
from partopt.report.table import label_lines, paragraph, table
from partopt.report.width import stretch
from partopt.units import format_bytes, format_seconds

_HEADINGS = ["FLOW", "RANKS", "BYTES", "TIMES", "LEVEL", "TAKES", "SHARE", "COSTS", "SAVED"]
_RANKS_WIDTH = 12
_LEGEND = (
    "SHARE of the time that it is on its way. COSTS: seconds for each second that it "
    "is slower; - not critical. SAVED: share of the time, if it had no bytes."
)


def render(flows: Flows) -> str:
    """The plan, and its flows as a table, first those that cost most."""
    time = f"{format_seconds(flows.period_s)} a microbatch"
    if flows.iteration_s is not None:
        time = f"{format_seconds(flows.iteration_s)} an iteration of {flows.microbatches}"
    critical = sum(flow.critical is True for flow in flows.flows)
    tried = f"{critical} are critical" if flows.tried else "which are critical was not tried"
    head = [
        ("model", f"{flows.model}, microbatch {flows.microbatch_size}, on {flows.cluster}"),
        ("plan", f"{flows.planner}: {flows.shape}, schedule {flows.schedule}, {time}"),
        ("flows", f"{len(flows.flows)}, of which {tried}" if flows.flows else "none"),
        *basis_lines(flows.estimated),
    ]
    if not flows.flows:
        return label_lines(head)
    rows = [_cells(flow) for flow in sorted(flows.flows, key=_order)]
    lines = table(_HEADINGS, rows, left=(0, 1, 4), gap=1, verdicts=(0, 1), spare=(3, 2, 6))
    return "\n\n".join([label_lines(head), lines, paragraph(_LEGEND)])


def _order(flow: FlowTime) -> tuple[float, float]:
    return -(flow.saved or 0.0), -flow.share


def _cells(flow: FlowTime) -> list[str]:
    name = flow.kind if flow.stage is None else f"{flow.kind} {flow.stage}"
    return [
        name if flow.source is None else f"{name} {flow.source} to {flow.destination}",
        ranks_text(flow.ranks, stretch(_RANKS_WIDTH, least=_RANKS_WIDTH)),
        format_bytes(flow.bytes),
        f"{flow.times:.4g}",
        flow.level,
        format_seconds(flow.takes_s),
        f"{flow.share:.1%}",
        f"{flow.per_second:.2f}" if flow.critical and flow.per_second is not None else "-",
        "-" if flow.saved is None else f"{flow.saved:.1%}",
    ]


def to_csv(flows: Flows) -> str:
    """A row a flow, under the names of its fields; lists are words."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(FlowTime.__struct_fields__)
    for flow in flows.flows:
        values = structs.astuple(flow)
        lists = [" ".join(map(str, each)) if isinstance(each, list) else each for each in values]
        rows.writerow([{True: "yes", False: "no"}[v] if isinstance(v, bool) else v for v in lists])
    return file.getvalue()
