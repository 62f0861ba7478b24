"""The order alone, as `torch.distributed.pipelining` reads it (`_load_csv`)."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text
from partopt.schedules import SCHEDULES, order
from partopt.schedules.order import R
from partopt.schedules.torch_csv import to_csv
from partopt.simulator.restate import layout_of


def csv_of(plan: Plan) -> str:
    """The CSV of one pipeline of the plan. PartoptError where torch could not execute it."""
    layout = layout_of(plan)
    return to_csv(order(plan.schedule, layout), layout)


def csv_faults(plan: Plan) -> list[str]:
    """Why torch could not execute the plan's order, if it could not."""
    if plan.microbatches is None:
        return []  # its schedule is none of torch's
    try:
        csv_of(plan)
    except PartoptError as error:
        return [error.message]
    if (order(plan.schedule, layout_of(plan)).kind == R).any():
        return [f"{plan.schedule} recomputes while it waits, and torch has no action for that"]
    return []


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A row a rank of one pipeline; every pipeline has the same file."""
    return Text(csv_of(plan))


SYNCHRONOUS = {name: None for name, entry in SCHEDULES.items() if not entry.asynchronous}

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
    faults=csv_faults,
)
