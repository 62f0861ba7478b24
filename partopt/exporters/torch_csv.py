"""The order alone, as `torch.distributed.pipelining` reads it (`_load_csv`)."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text
from partopt.schedules import SCHEDULES, order, schedule
from partopt.schedules.layout import MIRRORED
from partopt.schedules.torch_csv import to_csv


def csv_of(plan: Plan) -> str:
    """The CSV of one pipeline of the plan."""
    layout = layout_of(plan)
    return to_csv(order(plan.schedule, layout), layout)


def csv_faults(plan: Plan) -> list[str]:
    """Actions of the plan's order that torch does not have."""
    if schedule(plan.schedule).recomputes and any(stage.recompute for stage in plan.stages):
        return [f"{plan.schedule} recomputes while it waits, and torch has no action for that"]
    return []


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A row a rank of one pipeline; every pipeline has the same file."""
    return Text(csv_of(plan))


SYNCHRONOUS = {
    name: None
    for name, entry in SCHEDULES.items()
    if not entry.asynchronous and entry.shape != MIRRORED  # each stage is on one rank of a pipeline
}

TARGET = Target(
    name="torch-csv",
    summary="torch: the order alone, for _PipelineScheduleRuntime",
    tried="torch 2.13.0",
    write=write,
    suffix=".csv",
    schedules=SYNCHRONOUS,
    cuts=ANYWHERE,
    replicas="equal",
    recompute="each",
    ranks=(),
    groups=True,
    faults=csv_faults,
)
