"""A plan under the user's own order instead of a schedule's.

The order is in the compute-only CSV that torch executes.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from partopt.cost.plan import layout_of, with_counts_of, with_steps_of
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.order import I
from partopt.schedules.torch_csv import from_csv
from partopt.simulator.engine import simulate
from partopt.simulator.execution import Execution
from partopt.simulator.work import work_of


def microbatches_in(text: str, plan: Plan) -> int:
    """The microbatches that a CSV passes through all pipelines of the plan.

    The largest number in it gives them. Raises PartoptError where it has no actions.
    """
    numbers = [int(found) for found in re.findall(r"[0-9]{1,7}[FBIW]([0-9]{1,7})", text)]
    if not numbers:
        raise PartoptError(
            "it has no actions",
            "a cell is a stage, one of F B I W and a microbatch, like 2F0",
            code="no-actions",
        )
    return (max(numbers) + 1) * plan.stages[0].replicas


def execute_csv(text: str, name: str, plan: Plan, microbatches: int) -> Execution:
    """Execute the order in `text`, called `name`, on the stages of `plan`.

    It is one iteration of a synchronous schedule. Raises PartoptError that names the cell, or the
    rank and the action, where the order is malformed, does not match this plan or deadlocks.
    """
    synchronous = replace(plan, schedule=name, microbatches=microbatches, allreduce="overlap")
    synchronous = with_steps_of(synchronous, plan)
    order = from_csv(text, layout_of(synchronous))
    alike = "zb-h1" if (order.kind == I).any() else "1f1b"  # with backwards in two parts or whole
    counted = with_counts_of(order, synchronous, schedule(alike))
    work = work_of(replace(counted, schedule=alike), False)
    timeline = simulate(order, work)
    return Execution(counted, order, work, timeline, None, 0.0, float(timeline.makespan))
