"""What the formulas say of a schedule on equal stages, beside what its execution says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partopt.documents.trial import ClosedForm
from partopt.schedules import schedule
from partopt.schedules.entry import Schedule
from partopt.schedules.layout import STRAIGHT
from partopt.simulator.execution import Execution
from partopt.trials.uniform import Uniform
from partopt.units import format_seconds

# P   devices; v   stages on a device; M   microbatches
# t   times of one stage

_ROUNDING = 1e-9


def closed_form(name: str, pipeline: Uniform, execution: Execution) -> ClosedForm:
    """The closed form of the schedule `name`, and whether the execution agrees with it."""
    entry, P, M = schedule(name), pipeline.stages, pipeline.microbatches
    v, t = pipeline.chunks_under(name), pipeline.stage_times(name)
    again = t.F if pipeline.recompute else 0.0
    if not entry.recomputes:
        t = t._replace(I=t.I + again)  # as a part of the backward
    bubble_s = float(entry.bubble.of(P, v, M, t))
    iteration_s = entry.makespan(P, v, M, t) + (M * again if entry.recomputes else 0.0)
    held = _in_flight(entry, P, v, M)
    reasons = []
    if pipeline.seconds.transfer:
        waited = ", and devices wait for them" if execution.work.serial else ""
        reasons.append(f"messages take {format_seconds(pipeline.seconds.transfer)}{waited}")
    if not entry.bubble.holds(P, v, M, t):
        reasons.append(f"the form holds where {entry.bubble.condition}")
    agrees = _agree(
        [bubble_s / iteration_s, *map(float, held)],
        [execution.bubble, *map(float, execution.peak_in_flight.tolist())],
    )
    return ClosedForm(
        formula=entry.bubble.text,
        condition=entry.bubble.condition,
        bubble_s=bubble_s,
        bubble=bubble_s / iteration_s,
        iteration_s=iteration_s,
        in_flight=held,
        agrees=agrees,
        reason="" if agrees else "; ".join(reasons),
    )


def _in_flight(entry: Schedule, P: int, v: int, M: int) -> list[int]:
    """The most microbatches that each device holds."""
    if entry.shape != STRAIGHT:
        return [entry.in_flight(p, P, v, M) for p in range(P)]
    of = None if entry.asynchronous else M
    return [entry.counts(p, [1] * P, of).held for p in range(P)]


def _agree(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(
        math.isclose(left, right, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        for left, right in zip(found, expected, strict=True)
    )
