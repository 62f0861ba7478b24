"""Where the stages of a partition lie, for schedules that give a device several of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from partopt.cost.problem import Partition, Problem
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.placement import CHUNKS, STRAIGHT, ranks_of

# S   stages
# P   devices of one pipeline
# v   stages on a device: S = v P, but S = P for a mirrored schedule
# d   pipelines side by side


def stage_multiple(problem: Problem) -> int:
    """What the number of stages must be a multiple of: v, or 2 under a mirrored schedule.

    A mirrored schedule has two halves.
    """
    shape = schedule(problem.schedule).shape
    return CHUNKS.get(shape, problem.chunks)


def stages_a_device(problem: Problem) -> int:
    """Stages for a device of a pipeline: v; 1 where there are two copies of it."""
    return schedule(problem.schedule).stages_a_device(problem.chunks)


def stage_count(problem: Problem) -> int:
    """The number of stages that `problem` requests, by default as many as can be placed.

    The default is as many as the schedule puts on all devices, within the number of layers. Raises
    PartoptError where the number exceeds the layers or what the devices hold, or where the schedule
    cannot lay it out.
    """
    multiple, most = stage_multiple(problem), problem.topology.devices * stages_a_device(problem)
    limits = (
        (problem.chain.layers, "layers"),
        (most, "devices" if most == problem.topology.devices else "places"),
    )
    largest = min(problem.chain.layers, most) // multiple * multiple
    if largest == 0:
        limit, what = min(limits)
        raise PartoptError(
            f"{problem.schedule}: cannot form a multiple of {multiple} stages on {limit} {what}",
            "choose another schedule: `schedule=1f1b`",
            code="stages-impossible",
        )
    if problem.request.stages is None:
        return largest
    _check_stages(problem.request.stages, problem.schedule, limits, multiple, largest)
    return problem.request.stages


def _check_stages(
    stages: int, name: str, limits: Iterable[tuple[int, str]], multiple: int, largest: int
) -> None:
    """Raise PartoptError where so many stages exceed a limit or are not a multiple."""
    for limit, what in limits:
        if stages > limit:
            raise PartoptError(
                f"{stages} stages for {limit} {what}",
                f"ask for at most {largest}: `stages={largest}`",
                code="too-many-stages",
            )
    if stages % multiple:
        nearest = min(-(-stages // multiple) * multiple, largest)
        raise PartoptError(
            f"{stages} stages: {name} takes a multiple of {multiple}",
            f"`stages={nearest}`",
            code="stages-not-a-multiple",
        )


def place(partition: Partition, problem: Problem, planner: str) -> Partition:
    """The partition with its stages on the ranks that the schedule gives them.

    Unchanged where the schedule has one stage a device. Raises PartoptError for unequal replicas
    under a schedule that cannot have them, for a number of stages that does not fill the devices,
    and for more devices than there are.
    """
    entry, replicas = schedule(problem.schedule), [len(stage.ranks) for stage in partition.stages]
    if not entry.uneven and len(set(replicas)) > 1:
        shape = "-".join(map(str, replicas))
        raise PartoptError(
            f"{problem.schedule} cannot run stages that the planner {planner} replicates "
            f"unequally, {shape}",
            "give each stage equally many replicas: `planner=gpipe`; or choose a schedule that "
            "runs them: `schedule=1f1b`",
            code="unequal-replicas",
        )
    if entry.shape == STRAIGHT:
        return partition
    S, d, v = len(replicas), replicas[0], stages_a_device(problem)
    if S % stage_multiple(problem):
        raise PartoptError(
            f"{S} stages by the planner {planner}: {problem.schedule} takes a multiple of "
            f"{stage_multiple(problem)}",
            "cut into as many as that, or choose `planner=gpipe`",
            code="stages-not-a-multiple",
        )
    if S // v * d > problem.topology.devices:
        raise PartoptError(
            f"{S // v * d} devices needed, {problem.topology.devices} there",
            "give fewer replicas or stages",
            code="too-few-devices",
        )
    ranks = ranks_of(entry.shape, S // v, v, d)
    stages = [
        replace(stage, ranks=group) for stage, group in zip(partition.stages, ranks, strict=True)
    ]
    return replace(partition, family=entry.shape, stages=stages)
