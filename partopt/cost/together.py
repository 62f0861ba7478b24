"""Seconds of an iteration that no single stage tells of: what all stages of a pipeline add up to.

`partopt.cost.iteration` bounds what one stage must do, with the messages over its own cuts alone.
Here the first microbatch pays for all messages before a stage, a round trip for all behind it, and
what follows a stage's last gradients counts: they come to fewer replicas together, and each stage
that they pass makes its update yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partopt.cost.compiled import compiled
from partopt.cost.links import wait_s
from partopt.cost.passes import most_in_flight, passes_of, passing_prefix, stage_work_s
from partopt.cost.period import cut_level, update_s
from partopt.cost.problem import Partition, Problem
from partopt.schedules import schedule

# M   microbatches per iteration; n  those of a stage's first replica
# k   replicas of a stage that get n microbatches: the others get n - 1
# x   seconds of the messages over a stage's first cut and all cuts before it


class Before(NamedTuple):
    """What of the stages before a stage its own end depends on."""

    tail_s: float  # from the leaving of its last gradient to the end of the first stage's backward
    update_s: float  # and to the end of the last update among them
    replicas: int  # of the stage just before; 0 where there is none
    forward_s: float  # of that stage, for one microbatch
    passing_s: float


@compiled()
def end_s(M, r, work, passed, update, tail, updates, replicas, forward, passing):  # type: ignore[no-untyped-def]
    """Seconds from the coming of a stage's first microbatch to the end of the iteration.

    Its k last replicas to begin each get their first microbatch in turns of the stage before, and
    need `work` seconds to their last backward, `passed` until their last gradient leaves. Those k
    gradients come to `replicas` devices, which pass them on one after the other.
    """
    k = M - (-(-M // r) - 1) * r
    begun, queued = 0.0, 0.0
    if replicas > 0:
        begun = (k - 1) // replicas * forward
        queued = (-(-k // replicas) - 1) * passing
    return max(begun + work + update, passed + max(begun, queued) + max(tail, updates))


def together_s(partition: Partition, problem: Problem) -> float:
    """Seconds that no iteration of a straight synchronous schedule goes below."""
    M, chain, entry = problem.microbatches, problem.chain, schedule(problem.schedule)
    assert M is not None
    stages = partition.stages
    messages = [0.0, *(_message_s(partition, s, problem) for s in range(1, len(stages)))]
    back = passing_prefix(problem, problem.all_recompute)
    x, updates, longest = 0.0, float("-inf"), 0.0
    for s, stage in enumerate(stages):
        r, own = len(stage.ranks), passes_of(stage, problem)
        n = -(-M // r)
        x += messages[s]
        updates += messages[s]
        any_warmup = entry.takes_warmup or entry.one_at_a_time
        F = 1 if entry.one_at_a_time else max(1, most_in_flight(stage, problem)) if any_warmup else n
        behind = chain.forward_s(stage.stop, chain.layers) + float(back[-1] - back[stage.stop])
        R = behind + 2 * sum(messages[s + 1 :])
        work = stage_work_s(
            M, r, F, problem.topology.devices, int(s > 0), chain.layers - stage.start,
            own.forward_s, own.backward_s, own.passing_s, R, entry.split, any_warmup,
        )
        passed = n * (own.forward_s + own.passing_s) if entry.split else work
        update = update_s(partition, s, problem)
        begun, queued = 0.0, 0.0
        tail = float(back[stage.start]) + x
        before = stages[s - 1] if s else None
        seconds = end_s(
            M, r, work, passed, update, tail, updates,
            len(before.ranks) if before else 0,
            chain.forward_s(before.start, before.stop) if before else 0.0,
            float(back[before.stop] - back[before.start]) if before else 0.0,
        )
        longest = max(longest, chain.forward_s(0, stage.start) + x + seconds)
        updates = max(updates, update) + float(back[stage.stop] - back[stage.start])
    return longest


def _message_s(partition: Partition, s: int, problem: Problem) -> float:
    """Seconds of a message over the cut before stage s, at the least."""
    size = float(problem.chain.a[partition.stages[s].start])
    return float(wait_s(problem.network, size, cut_level(partition, s, problem)))
