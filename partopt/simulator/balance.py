"""The devices that slow down the rest, and a cut to move or a device to add to relieve them."""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan
from partopt.documents.stage import stages_text
from partopt.schedules import SCHEDULES
from partopt.simulator.change import Change, suggest
from partopt.units import format_seconds

# r   replicas of a stage
# C   compute seconds of a stage for one microbatch

_MOST_LISTED = 12  # stages whose cuts or replicas are listed


class _Group(NamedTuple):
    """Devices that hold the same stages.

    `seconds` is the time of the stages for one microbatch, divided by the number of devices.
    """

    stages: tuple[int, ...]
    devices: int
    seconds: float


class Imbalance(NamedTuple):
    """How far the slowest devices are above the mean, and a change that would help.

    `ratio` is their time a microbatch over the mean of all devices that work; `text` says it in
    words.
    """

    ratio: float
    text: str
    change: Change


def imbalance(plan: Plan) -> Imbalance | None:
    """How far the slowest devices are above the mean; None where nothing takes time."""
    groups = _groups(plan)
    slowest = max(groups, key=lambda group: group.seconds)
    total = sum(group.seconds * group.devices for group in groups)
    mean = total / sum(group.devices for group in groups)
    if mean == 0:
        return None
    ratio = slowest.seconds / mean
    s = max(slowest.stages, key=lambda each: plan.stages[each].compute_s)
    text = (
        f"{_takes(slowest)} a microbatch, {ratio:.2f} times the mean of all devices, "
        f"{format_seconds(mean)}"
    )
    change = (
        _move_cut(plan, s, slowest, groups)
        or _add_replica(plan, s, slowest, groups)
        or _change_planner(plan, s)
    )
    return Imbalance(ratio, text, change)


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


def _move_cut(plan: Plan, s: int, slowest: _Group, groups: list[_Group]) -> Change | None:
    """The change that gives a layer of stage s to its lighter neighbour.

    None where the stage has one layer or where moving a layer of mean duration would not help.
    """
    stage = plan.stages[s]
    of = {each: group for group in groups for each in group.stages}
    layer_s = stage.compute_s / len(stage.modules)
    beside = [n for n in (s - 1, s + 1) if 0 <= n < len(plan.stages) and of[n] is not slowest]
    after = {n: of[n].seconds + layer_s / of[n].devices for n in beside}
    n = min(after, key=lambda each: after[each], default=s)
    if len(stage.modules) == 1 or n == s or after[n] >= slowest.seconds:
        return None
    first = n < s  # the neighbour before takes the first layer
    given = stage.start if first else stage.stop - 1
    cuts = _cuts(plan)
    cuts[(s if first else n) - 1] += 1 if first else -1
    lighter = (
        f"{_takes(of[n])}: try layer {given}, {stage.modules[given - stage.start]}, on stage {n}: "
    )
    split = _split(plan, cuts, [other.replicas for other in plan.stages])
    if split is None:
        return Change(f"{lighter}the cut one layer {'later' if first else 'earlier'}")
    return split._replace(text=lighter + split.text)


def _add_replica(plan: Plan, s: int, slowest: _Group, groups: list[_Group]) -> Change | None:
    """The change that adds a replica to stage s, on an idle device or one of a lighter stage.

    None where there is no such device or replicas must be equal.
    """
    if plan.schedule not in SCHEDULES or not SCHEDULES[plan.schedule].uneven:
        return None
    replicas = [stage.replicas for stage in plan.stages]
    replicas[s] += 1
    more = f"a replica more of stage {s}, of the idle ranks: "
    if not plan.idle_ranks:
        # of each group that can spare a device, its seconds without that device
        spared = {
            group.stages[0]: group.seconds * group.devices / (group.devices - 1)
            for group in groups
            if group.devices > 1
        }
        giver = min(spared, key=lambda each: spared[each], default=s)
        if giver == s or spared[giver] >= slowest.seconds:
            return None
        replicas[giver] -= 1
        more = f"a replica more of stage {s} and one less of stage {giver}: "
    split = _split(plan, _cuts(plan), replicas) or Change("see `compare`", "compare")
    return split._replace(text=more + split.text)


def _change_planner(plan: Plan, s: int) -> Change:
    stage = plan.stages[s]
    if len(stage.modules) > 1:
        lightest = "no neighbour is light enough: see what other planners make of it, `compare`"
        return Change(lightest, "compare")
    change = suggest("measure", granularity="leaf")
    single = f"stage {s} is one layer, {stage.modules[0]}: profile smaller ones, "
    return change._replace(text=single + change.text)


def _cuts(plan: Plan) -> list[int]:
    return [stage.start for stage in plan.stages[1:]]


def _split(plan: Plan, cuts: list[int], replicas: list[int]) -> Change | None:
    """The change to a plan with these cuts and replicas.

    None where a device holds several stages, or there are too many stages to list.
    """
    chunks = max(len(stages) for stages in plan.stages_by_rank().values())
    if chunks > 1 or len(plan.stages) > _MOST_LISTED:
        return None
    if max(replicas) > 1:
        return suggest("solve", cuts=cuts, replicas=replicas)
    return suggest("solve", cuts=cuts)
