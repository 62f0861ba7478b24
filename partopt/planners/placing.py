"""Where the stages of a partition lie, for schedules that give a device several of them."""

from __future__ import annotations

from dataclasses import replace

from partopt.cost.problem import Partition, Problem
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.layout import CHUNKS, MIRRORED, STRAIGHT, ranks_of

# S   stages; P   devices of one pipeline; v   stages on a device, S = v P, but for a mirrored
#     schedule, which has S = P
# d   pipelines side by side


def stage_multiple(problem: Problem) -> int:
    """What the number of stages must be a multiple of: v, or 2 for the two halves of a mirrored
    schedule.
    """
    shape = schedule(problem.schedule).shape
    return CHUNKS.get(shape, problem.chunks)


def stages_a_device(problem: Problem) -> int:
    """Stages for each device of a pipeline: v; 1 where there are two copies of it."""
    return 1 if schedule(problem.schedule).shape == MIRRORED else stage_multiple(problem)


def stage_count(problem: Problem) -> int:
    """The number of stages asked for, by default as many as the schedule puts on all devices.

    PartoptError where it exceeds the layers or what the devices hold, or is none that the schedule
    can lay out.
    """
    multiple, most = stage_multiple(problem), problem.topology.devices * stages_a_device(problem)
    asked, limits = (
        problem.stages,
        (
            (problem.chain.layers, "layers"),
            (most, "devices" if most == problem.topology.devices else "places"),
        ),
    )
    largest = min(problem.chain.layers, most) // multiple * multiple
    if largest == 0:
        limit, what = min(limits)
        raise PartoptError(
            f"--schedule {problem.schedule}: {limit} {what} make no {multiple} stages",
            "choose another schedule: 1f1b",
        )
    if asked is None:
        return largest
    for limit, what in limits:
        if asked > limit:
            raise PartoptError(
                f"{asked} stages for {limit} {what}",
                f"ask for at most {largest}: --stages {largest}",
            )
    if asked % multiple:
        nearest = min(-(-asked // multiple) * multiple, largest)
        raise PartoptError(
            f"{asked} stages: {problem.schedule} takes a multiple of {multiple}",
            f"--stages {nearest}",
        )
    return asked


def placed(partition: Partition, problem: Problem, planner: str) -> Partition:
    """The partition with its stages where the schedule has them; as it is where that is one stage a
    device.

    PartoptError for unequal replicas under a schedule that cannot have them, for a number of stages
    that does not fill the devices, and for more devices than there are.
    """
    entry, replicas = schedule(problem.schedule), [len(stage.ranks) for stage in partition.stages]
    if not entry.uneven and len(set(replicas)) > 1:
        shape = "-".join(map(str, replicas))
        raise PartoptError(
            (
                f"--schedule {problem.schedule}: the planner {planner} replicates stages "
                f"unequally, {shape}, which it cannot run"
            ),
            "give each stage equally many: --planner gpipe, or --schedule 1f1b, which can",
        )
    if entry.shape == STRAIGHT:
        return partition
    S, d, v = len(replicas), replicas[0], stages_a_device(problem)
    if S % stage_multiple(problem):
        message = (
            f"{S} stages by the planner {planner}: {problem.schedule} takes a multiple of "
            f"{stage_multiple(problem)}"
        )
        raise PartoptError(message, "give it as many as that, or choose --planner gpipe")
    if S // v * d > problem.topology.devices:
        raise PartoptError(
            f"{S // v * d} devices needed, {problem.topology.devices} there",
            "give fewer replicas or stages",
        )
    ranks = ranks_of(entry.shape, S // v, v, d)
    stages = [replace(stage, ranks=own) for stage, own in zip(partition.stages, ranks, strict=True)]
    return replace(partition, family=entry.shape, stages=stages)
