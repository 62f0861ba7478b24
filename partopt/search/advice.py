"""What to know of a plan of a named planner beside the plans of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partopt.documents import Note
from partopt.documents.plan import Plan

_NOTICED = 0.01  # of the speed: a smaller difference is not told


def note_data_parallel(plan: Plan, others: Mapping[str, Plan]) -> Iterator[Note]:
    """That plain data parallelism is faster than `plan`, where it is among `others` and fits."""
    other = others.get("data_parallel")
    if other is None or not other.fits:
        return
    speedup = other.predicted.samples_per_s / plan.predicted.samples_per_s
    if speedup > 1 + _NOTICED:
        fits = "" if other.memory_limit_bytes is None else " and fits"
        yield Note(
            code="data-parallel-faster",
            text=f"data_parallel is {speedup - 1:.1%} faster{fits}: `planner=data_parallel`",
            fields={"planner": plan.planner, "speedup": speedup},
        )
