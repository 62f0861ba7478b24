"""A person's own split, priced like every other plan."""

from __future__ import annotations

from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive
from partopt.errors import PartoptError
from partopt.planners.placing import stages_a_device


def plan(problem: Problem) -> Decision:
    """Stages between `problem.cuts`, with `problem.replicas` each (default one).

    Raises PartoptError where they make no partition.
    """
    layers, places = problem.chain.layers, problem.topology.devices * stages_a_device(problem)
    cuts = list(problem.cuts)
    replicas = list(problem.replicas) or [1] * (len(cuts) + 1)
    wrong = next(
        (cut for before, cut in zip([0, *cuts], cuts, strict=False) if not before < cut < layers),
        None,
    )
    if wrong is not None:
        raise PartoptError(
            f"--cuts {','.join(map(str, cuts))}: {wrong} is out of place",
            f"give ascending layer numbers from 1 to {layers - 1}",
        )
    for cut in cuts:
        tied = problem.parted(cut)
        if tied is not None:
            what = (
                f"parts layers {tied.members[0]} to {tied.members[-1]}, which share "
                f"{', '.join(tied.names)}"
            )
            raise PartoptError(
                f"--cuts {','.join(map(str, cuts))}: {cut} {what}",
                "cut elsewhere, or let stages exchange: --tied exchange",
            )
    if len(replicas) != len(cuts) + 1:
        raise PartoptError(
            f"--replicas: {len(replicas)} counts for {len(cuts) + 1} stages",
            f"{len(cuts)} cuts make {len(cuts) + 1} stages",
        )
    if min(replicas) < 1:
        raise PartoptError(
            f"--replicas: {min(replicas)} is not a number of devices",
            "give each stage at least one",
        )
    if sum(replicas) > places:
        raise PartoptError(
            f"--replicas: {sum(replicas)} devices needed, {places} there",
            "give fewer replicas, or a larger topology",
        )
    return Decision(Partition(CONTIGUOUS, consecutive([0, *cuts, layers], replicas)))
