"""Which device holds back the rest, and which cut to move, or which device to add, so that it holds
them back less.
"""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan, stages_text
from partopt.schedules import SCHEDULES
from partopt.units import format_seconds

# r   replicas of a stage
# C   compute seconds of a stage for one microbatch

_MOST_LISTED = 12  # stages whose cuts or replicas are spelled out


class _Group(NamedTuple):
    """Devices that hold the same stages; `seconds` a microbatch are what the stages take, over the
    devices.
    """

    stages: tuple[int, ...]
    devices: int
    seconds: float


def imbalance(plan: Plan) -> tuple[float, str, str]:
    """The time a microbatch of the slowest devices over the mean of all that work, what that is,
    and what would help.
    """
    groups = _groups(plan)
    slowest = max(groups, key=lambda group: group.seconds)
    mean = sum(group.seconds * group.devices for group in groups) / sum(
        group.devices for group in groups
    )
    if mean == 0:
        return 1.0, "", ""
    ratio = slowest.seconds / mean
    s = max(slowest.stages, key=lambda each: plan.stages[each].compute_s)
    text = (
        f"{_named(slowest.stages)} {_takes(slowest)} {format_seconds(slowest.seconds)} a microbatch, "
        f"{ratio:.2f} times the mean of all devices, {format_seconds(mean)}"
    )
    change = (
        _moved_cut(plan, s, slowest, groups)
        or _another_replica(plan, s, slowest, groups)
        or _other_planner(plan, s)
    )
    return ratio, text, change


def _groups(plan: Plan) -> list[_Group]:
    counts: dict[tuple[int, ...], int] = {}
    for stages in plan.stages_by_rank().values():
        counts[tuple(stages)] = counts.get(tuple(stages), 0) + 1
    return [
        _Group(stages, n, sum(plan.stages[s].compute_s for s in stages) / n)
        for stages, n in counts.items()
    ]


def _named(stages: tuple[int, ...]) -> str:
    return stages_text(stages) + (" together" if len(stages) > 1 else "")


def _takes(group: _Group) -> str:
    return "takes" if len(group.stages) == 1 else "take"


def _moved_cut(plan: Plan, s: int, slowest: _Group, groups: list[_Group]) -> str:
    """Which layer of stage s to give to its lighter neighbour; empty where it has one layer or
    that, by their mean, would not help.
    """
    stage = plan.stages[s]
    if len(stage.modules) == 1:
        return ""
    of = {each: group for group in groups for each in group.stages}
    layer_s = stage.compute_s / len(stage.modules)
    beside = [n for n in (s - 1, s + 1) if 0 <= n < len(plan.stages) and of[n] is not slowest]
    after = {n: of[n].seconds + layer_s / of[n].devices for n in beside}
    n = min(after, key=lambda each: after[each], default=s)
    if n == s or after[n] >= slowest.seconds:
        return ""
    first = n < s  # the neighbour before takes the first layer
    given = stage.start if first else stage.stop - 1
    cuts = [other.start for other in plan.stages[1:]]
    cuts[(s if first else n) - 1] += 1 if first else -1
    lighter = (
        f"{_named(of[n].stages)} {_takes(of[n])} {format_seconds(of[n].seconds)}: try layer "
        f"{given}, "
    )
    how = (
        _flags(plan, cuts, [other.replicas for other in plan.stages])
        or f"the cut one layer {'later' if first else 'earlier'}"
    )
    return f"{lighter}{stage.modules[given - stage.start]}, on stage {n}: {how}"


def _another_replica(plan: Plan, s: int, slowest: _Group, groups: list[_Group]) -> str:
    """One device more for stage s, an idle one or one of a lighter stage; empty where none is or
    replicas must be equal.
    """
    if plan.schedule not in SCHEDULES or not SCHEDULES[plan.schedule].uneven:
        return ""
    cuts, replicas = (
        [stage.start for stage in plan.stages[1:]],
        [stage.replicas for stage in plan.stages],
    )
    replicas[s] += 1
    if plan.idle_ranks:
        return (
            f"a replica more of stage {s}, of the idle ranks: "
            f"{_flags(plan, cuts, replicas) or 'see partopt compare'}"
        )
    able = [
        each
        for each in groups
        if each.devices > 1 and each.seconds * each.devices / (each.devices - 1) < slowest.seconds
    ]
    if not able:
        return ""
    giver = min(able, key=lambda each: each.seconds * each.devices / (each.devices - 1)).stages[0]
    replicas[giver] -= 1
    return (
        f"a replica more of stage {s} and one less of stage {giver}: "
        f"{_flags(plan, cuts, replicas) or 'see partopt compare'}"
    )


def _other_planner(plan: Plan, s: int) -> str:
    if len(plan.stages[s].modules) == 1:
        return (
            f"stage {s} is one layer, {plan.stages[s].modules[0]}: profile smaller ones, "
            "partopt profile --granularity leaf"
        )
    return "no neighbour is light enough: see what other planners make of it, partopt compare"


def _flags(plan: Plan, cuts: list[int], replicas: list[int]) -> str:
    """The command that plans so, for plans of one stage a device that are not too long to be
    spelled out.
    """
    if (
        any(len(stages) > 1 for stages in plan.stages_by_rank().values())
        or len(plan.stages) > _MOST_LISTED
    ):
        return ""
    each = f" --replicas {','.join(map(str, replicas))}" if max(replicas) > 1 else ""
    return f"partopt plan --cuts {','.join(map(str, cuts))}{each}"
