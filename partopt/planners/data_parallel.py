"""Data parallelism: the whole model on every device."""

from __future__ import annotations

from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive


def plan(problem: Problem) -> Decision:
    """One stage, replicated on every device."""
    return Decision(
        Partition(CONTIGUOUS, consecutive([0, problem.chain.layers], [problem.topology.devices]))
    )
