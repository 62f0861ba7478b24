"""Where to cut for given replicas, by closed forms: the cuts of least bottleneck.

A search over partitions changes the replicas of a stage or two at a time; with the cuts where they
were, few such steps gain anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partopt.cost.flight import in_flight, weight_versions
from partopt.cost.links import allreduce_s, exchange_s, side_s
from partopt.cost.memory import optimizer_bytes
from partopt.cost.problem import Problem
from partopt.schedules import schedule

# S, s     stages, and which one; r its replicas
# n        ranges that no stage may split; tables over the boundaries between them, [i, j]
# M        microbatches of an iteration

LIMIT = 160  # ranges: above, the tables take too long

Floats = NDArray[np.float64]


class Balance:
    """Balances stages with given ranks over the chain of a problem, for a search."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bounds = problem, problem.boundaries()
        chain, at = problem.chain, np.ix_(self.bounds, self.bounds)
        self.able = len(self.bounds) <= LIMIT
        if not self.able:
            return
        self.compute = {
            again: np.subtract.outer(prefix, prefix).T
            for again in (False, True)
            for prefix in (chain.busy_prefix(again)[self.bounds],)
        }
        self.weights, self.stash = chain.parameter_bytes.table()[at], chain.stash_bytes.table()[at]
        self.a = chain.a[self.bounds]
        self._table = lru_cache(maxsize=None)(self._seconds)

    def cuts(
        self, ranks: Sequence[range], recompute: Sequence[bool]
    ) -> tuple[float, list[int]] | None:
        """Boundaries of stages on these ranks, from 0 to N, with the seconds of their bottleneck.

        None where no cuts fit.
        """
        S, n, problem = len(ranks), len(self.bounds) - 1, self.problem
        replicas = [len(own) for own in ranks]
        if n < S:
            return None
        best, choices = np.full(n + 1, np.inf), []
        best[0] = 0.0
        for s, own in enumerate(ranks):
            held = in_flight(problem.schedule, s, replicas, problem.microbatches)
            before = problem.topology.common_level(ranks[s - 1][-1], own[0]) if s else 0
            after = problem.topology.common_level(own[-1], ranks[s + 1][0]) if s + 1 < S else 0
            table = np.maximum(best[:, None], self._table(own, before, after, held, recompute[s]))
            choices.append(table.argmin(axis=0))
            best = table.min(axis=0)
        if best[n] == math.inf:
            return None
        cuts = [n]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return float(best[n]), [self.bounds[cut] for cut in reversed(cuts)]

    def _seconds(self, own: range, before: int, after: int, held: int, recompute: bool) -> Floats:
        """Seconds per microbatch of a stage [i, j) on the ranks `own`, infinite where i >= j.

        Its neighbours part from it at the levels `before` and `after`, 0 where it has none. Of a
        synchronous schedule what it adds to an iteration, beyond one pass, by its microbatches.
        """
        problem, r, M = self.problem, len(own), self.problem.microbatches
        compute, span = self.compute[recompute], self._span(own)
        gradients = self.weights * (
            allreduce_s(1.0, own, problem.topology) - allreduce_s(0.0, own, problem.topology)
        ) + allreduce_s(0.0, own, problem.topology)
        side = exchange_s if problem.serial_transfers else side_s
        sides = [
            self.a * side(1.0, own, max(level, span), problem.topology) if level else 0 * self.a
            for level in (before, after)
        ]
        if problem.serial_transfers:
            compute = compute + r * (sides[0][:, None] + sides[1][None, :])
        carried = np.maximum(sides[0][:, None], sides[1][None, :])
        if M is None:
            seconds = np.maximum(np.maximum(compute, gradients) / r, carried)
        else:
            seconds = (np.maximum(-(-M // r) * compute, M * carried) - compute + gradients) / M
        return np.where(self._fits(held, recompute), seconds, np.inf)

    def _span(self, own: range) -> int:
        return self.problem.topology.common_level(own[0], own[-1]) if len(own) > 1 else 0

    def _fits(self, held: int, recompute: bool) -> NDArray[np.bool_]:
        """Where a stage [i, j) has room; at the shallowest warm-up of a schedule that takes one."""
        problem, n = self.problem, len(self.bounds)
        filled = np.triu(np.ones((n, n), dtype=np.bool_), 1)
        if problem.memory_bytes is None:
            return filled
        held = 1 if schedule(problem.schedule).takes_warmup else held
        state = optimizer_bytes(1.0, problem.optimizer, problem.chain.sixteen_bit)
        fixed = weight_versions(problem.schedule, held) + 1 + state
        inputs = np.broadcast_to(self.a[:, None], (n, n))
        kept = held * inputs + self.stash if recompute else held * self.stash
        buffers = held * (self.a[:, None] + self.a[None, :])
        return filled & (fixed * self.weights + kept + buffers <= problem.memory_bytes)
