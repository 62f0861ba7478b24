"""What a stage must do before, between and after its microbatches' passes through other stages.

Each bound here holds whatever the other stages are, and whatever the warm-up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.links import wait_s
from partopt.cost.memory import device_memory, posted_buffers, sizes_of
from partopt.cost.problem import Assignment, Problem
from partopt.schedules import schedule
from partopt.schedules.entry import DOWNSTREAM

# n   microbatches that a replica gets in an iteration
# F   microbatches that it may hold at once
# f   forward seconds of the stage for one microbatch
# b   backward seconds, recomputation included
# R   seconds from the end of a microbatch's forward to its gradient's arrival, at the least

ROUNDED_BYTES = 8.0  # of the terms of a stage's memory, at the most
NEVER = 2**40  # more microbatches than any stage holds, and more replicas than any topology has


class Passes(NamedTuple):
    """Seconds for one microbatch, of a stage and of the layers around it, at the least."""

    forward_s: float  # f
    backward_s: float  # b
    passing_s: float  # the part of b after which the gradient leaves
    head_s: float  # until the first microbatch has come
    round_s: float  # R: the layers behind, and the messages to and from them
    tail_s: float  # from the last gradient's leaving to the end of the layers before

    @property
    def held_s(self) -> float:
        """Seconds for which a replica holds a microbatch."""
        return self.forward_s + self.backward_s + self.round_s


def passes_of(stage: Assignment, problem: Problem) -> Passes:
    """The passes of a stage.

    Layers elsewhere recompute only where all do; of messages those over the cuts of the stage count
    alone, at the quickest level.
    """
    chain, i, j = problem.chain, stage.start, stage.stop
    forward, recomputes = chain.forward_s(i, j), problem.recomputes(stage)
    own, others = (passing_prefix(problem, again) for again in (recomputes, problem.all_recompute))
    before, after = (message_s(problem, c) for c in (i, j))
    behind = chain.forward_s(j, chain.layers) + float(others[-1] - others[j])
    return Passes(
        forward_s=forward,
        backward_s=chain.compute_s(i, j, recomputes) - forward,
        passing_s=float(own[j] - own[i]),
        head_s=chain.forward_s(0, i) + before,
        round_s=behind + 2 * after,
        tail_s=float(others[i]) + before,
    )


def passing_prefix(problem: Problem, recompute: bool) -> NDArray[np.float64]:
    """`Chain.passing_prefix` under the schedule of the problem.

    Some schedules recompute while they wait, which delays no gradient.
    """
    entry = schedule(problem.schedule)
    return problem.chain.passing_prefix(entry.split, recompute and not entry.recomputes)


def message_s(problem: Problem, c: int) -> float:
    """Seconds of a message over cut c at the quickest level; 0 at the ends of the chain."""
    if c in (0, problem.chain.layers):
        return 0.0
    return float(wait_s(problem.network, float(problem.chain.traffic[c]), 1))


def most_in_flight(stage: Assignment, problem: Problem) -> int:
    """The most microbatches in flight for which a stage fits; 0 where not even one does.

    With one backward begun, at the least.
    """
    limit = problem.memory_bytes
    if limit is None:
        return NEVER
    entry, kept, r = schedule(problem.schedule), problem.kept, len(stage.ranks)
    sizes = sizes_of(problem.chain, stage.start, stage.stop, kept, r, entry.split)
    recomputes = problem.recomputes(stage)

    def held_bytes(F: int) -> int:
        buffers = posted_buffers(kept.posted, r, F)
        return device_memory(sizes, F, entry.versions_of(F), 1, recomputes, buffers).total_bytes

    if held_bytes(1) > limit:
        return 0
    F, more = 1, 1
    while more:  # each takes no more than those before it, but that terms are whole bytes
        held, ten = held_bytes(F), held_bytes(F + 10)
        if ten == held:
            return NEVER
        more = min(NEVER - F, int(10 * (limit - held + ROUNDED_BYTES) / (ten - held)) + 2)
        while held_bytes(F + more) > limit:
            more -= 1
        F += more
    return F


def work_of(stage: Assignment, problem: Problem, round_s: float) -> float:
    """Seconds from the first forward of a stage's first replica to its last backward, at the least.

    A gradient comes `round_s` seconds after its forward, at the least.
    """
    M, entry, own = problem.microbatches, schedule(problem.schedule), passes_of(stage, problem)
    assert M is not None
    downstream = entry.kernel is not None and entry.kernel.depends_on == DOWNSTREAM
    any_warmup = downstream or entry.one_at_a_time
    r, f, b, p = len(stage.ranks), own.forward_s, own.backward_s, own.passing_s
    n = -(-M // r)
    if entry.split:
        work = split_work_s(n, f, b, round_s)
    else:
        F = max(1, most_in_flight(stage, problem)) if downstream else n
        work = work_s(n, 1 if entry.one_at_a_time else F, f, b, p, round_s)
    if any_warmup:
        return float(work)
    P, layers = problem.topology.devices, problem.chain.layers - stage.start
    before = int(stage.start > 0)
    return float(
        max(work, first_backward_s(M, r, P, before, layers, f, b, p, round_s, entry.split))
    )


def work_s(n: int, F: int, f: float, b: float, passing: float, R: float) -> float:
    """Seconds from a replica's first forward to its last backward, at the least.

    It has n microbatches, and F or fewer at once. Under 1F1B with w < F forwards first, the first
    backward comes after w + 1 forwards and after the first round trip; the last forward ends n - w
    - 1 backwards and forwards later; and behind it come w + 1 backwards, the last of them after
    another round trip. More forwards first never make that longer. And of F + 1 microbatches the
    last comes after the first has gone.
    """
    trip, F = f + R + passing, min(n, F)
    cycles = ((n - 1) // F + 1) * trip + (n - 1) % F * max(f, passing)
    if n == F:
        return max(cycles, n * (f + b), f + R + passing + (n - 1) * b, n * f + R + passing)
    between = (n - F) * (f + b)
    return max(cycles, max(F * f, f + R) + between + max(F * b, R + passing))


def split_work_s(n: int, f: float, b: float, R: float) -> float:
    """`work_s` where backwards are in two parts, the second of which waits as long as it likes."""
    return max(n * (f + b), f + R + n * b)


def first_backward_s(
    M: int,
    r: int,
    P: int,
    before: int,
    layers: int,
    f: float,
    b: float,
    passing: float,
    R: float,
    split: bool,
) -> float:
    """`work_s` under schedules with a warm-up of their own, for what precedes the first backward.

    The stage has r of P devices, and `layers` from it to the end of the chain; `before` is 1 where
    stages come before it, else 0. Split, as 1F1B: no more forwards come before the first gradient
    than there are stages from it on. GPipe: the last stage sends the first gradient when its
    replica has had all of its forwards; the last of those is one of the last microbatches, of as
    many as that stage has replicas.
    """
    n = -(-M // r)
    if split:
        stages = max(1, min(layers, P // r - before))
        return f + R + n * (f + b) - min(n, stages) * f
    first = max(0, M - max(1, P - r - before)) // r + 1
    return first * f + R + passing + (n - 1) * b
