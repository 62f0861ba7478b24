"""A manual split, priced like every other plan."""

from __future__ import annotations

from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive
from partopt.errors import PartoptError
from partopt.planners.placing import stages_a_device


def plan(problem: Problem) -> Decision:
    """Stages between the cuts that are requested, with as many replicas as requested (default one).

    Raises PartoptError where they do not form a partition.
    """
    cuts = list(problem.request.cuts or ())
    replicas = list(problem.request.replicas or [1] * (len(cuts) + 1))
    _check_cuts(cuts, problem)
    _check_replicas(replicas, len(cuts) + 1, problem)
    boundaries = [0, *cuts, problem.chain.layers]
    return Decision(Partition(CONTIGUOUS, consecutive(boundaries, replicas)))


def _check_cuts(cuts: list[int], problem: Problem) -> None:
    """Raise PartoptError for cuts out of order or range, or splitting layers that stay together.

    Tied layers stay together where the problem requires it.
    """
    layers = problem.chain.layers
    for before, cut in zip([0, *cuts], cuts, strict=False):
        if not before < cut < layers:
            raise PartoptError(
                f"`cuts={cuts}`: {cut} is out of place",
                f"give ascending layer numbers from 1 to {layers - 1}",
                code="cut-out-of-place",
            )
    for cut in cuts:
        tied = problem.tied_group_across(cut)
        if tied is not None:
            raise PartoptError(
                f"`cuts={cuts}`: {cut} parts layers {tied.members[0]} to {tied.members[-1]}, which "
                f"share {', '.join(tied.names)}",
                "cut elsewhere, or let stages exchange: `tied=exchange`",
                code="tied-layers-parted",
            )


def _check_replicas(replicas: list[int], stages: int, problem: Problem) -> None:
    """Raise PartoptError unless every stage has a count and every replica a device."""
    places = problem.topology.devices * stages_a_device(problem)
    if len(replicas) != stages:
        raise PartoptError(
            f"`replicas`: {len(replicas)} counts for {stages} stages",
            f"give {stages}, one for each stage",
            code="replicas-per-stage",
        )
    if min(replicas) < 1:
        raise PartoptError(
            f"`replicas`: {min(replicas)} is not a number of devices",
            "give each stage at least one",
            code="replicas-per-stage",
        )
    if sum(replicas) > places:
        raise PartoptError(
            f"`replicas`: {sum(replicas)} devices needed, {places} there",
            "give fewer replicas, or a larger topology",
            code="too-few-devices",
        )
