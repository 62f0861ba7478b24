"""Data parallelism: the whole model on every device."""

from __future__ import annotations

from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive


def plan(problem: Problem) -> Partition:
    """One stage, replicated on every device."""
    return Partition(CONTIGUOUS, consecutive([0, problem.chain.layers], [problem.topology.devices]))
