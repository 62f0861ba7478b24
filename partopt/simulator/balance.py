"""The devices that slow down the rest."""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan
from partopt.documents.stage import stages_text
from partopt.units import format_seconds


class _Group(NamedTuple):
    """Devices that hold the same stages.

    `seconds` is the time of the stages for one microbatch, divided by the number of devices.
    """

    stages: tuple[int, ...]
    devices: int
    seconds: float


class Imbalance(NamedTuple):
    """How far the slowest devices are above the mean.

    `ratio` is their time a microbatch over the mean of all devices that work; `text` says it in
    words.
    """

    ratio: float
    text: str


def imbalance(plan: Plan) -> Imbalance | None:
    """How far the slowest devices are above the mean; None where nothing takes time."""
    groups = _groups(plan)
    slowest = max(groups, key=lambda group: group.seconds)
    total = sum(group.seconds * group.devices for group in groups)
    mean = total / sum(group.devices for group in groups)
    if mean == 0:
        return None
    ratio = slowest.seconds / mean
    text = (
        f"{_takes(slowest)} a microbatch, {ratio:.2f} times the mean of all devices, "
        f"{format_seconds(mean)}"
    )
    return Imbalance(ratio, text)


def _groups(plan: Plan) -> list[_Group]:
    counts: dict[tuple[int, ...], int] = {}
    for stages in plan.stages_by_rank().values():
        counts[tuple(stages)] = counts.get(tuple(stages), 0) + 1
    return [
        _Group(stages, n, sum(plan.stages[s].compute_s for s in stages) / n)
        for stages, n in counts.items()
    ]


def _takes(group: _Group) -> str:
    """`stage 2 takes 4.50 ms`, `stages 0 and 3 together take 4.50 ms`."""
    takes = "takes" if len(group.stages) == 1 else "together take"
    return f"{stages_text(group.stages)} {takes} {format_seconds(group.seconds)}"
