"""1F1B, one forward and one backward in turn: with a flush, eager, and PipeDream's without one.

- `1f1b`: PipeDream-flush (Narayanan et al., ICML 2021); a short warm-up comes first.
- `1f1b-eager`: Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023,
  section 4. A gradient comes back to a device two transfers for every device downstream after its
  forward left; twice the warm-up of 1F1B keeps it at work meanwhile, at the price of memory. Of a
  replicated stage every replica does its share: twice the devices downstream over its own, rounded
  up.
- `pipedream`: 1F1B-RR (Narayanan et al., SOSP 2019, section 3.2). Replicas of a stage take
  microbatches in turn. Nothing is flushed: one microbatch more than the warm-up is in flight for as
  long as training lasts, and a backward uses the weights that its forward used. An order holds a
  finite stretch of it, from an empty pipeline to an empty one.
- `pipedream-2bw`: "Memory-efficient pipeline-parallel DNN training" (Narayanan et al., ICML 2021,
  section 3.1). The same actions use the newest version of the weights and the one before it,
  whatever is in flight. The paper lets gradients of several microbatches, at least P, add up
  between updates; here they are exchanged after every round, as PipeDream's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partopt.schedules.entry import (
    ALL_IN_FLIGHT,
    FLUSH,
    Bubble,
    Counts,
    Schedule,
    StageCounts,
    devices_after,
)
from partopt.schedules.order import Row, spell
from partopt.schedules.placement import Place


def row(place: Place) -> Row:
    """A device's row: its warm-up of forwards, F B in turn, then the backwards that are left."""
    warmup = min(place.warmup, place.M)
    return spell("F" * warmup + "FB" * (place.M - warmup) + "B" * warmup)


def delay_weights(warmup: str, forwards: int, lag: int) -> str:
    """1F1B with every W `lag` backwards after its I.

    There are `forwards` forwards, those of `warmup` included.
    """
    first = len(warmup)
    steps = ["FI"] * (forwards - first) + ["I"] * first
    return (
        warmup
        + "".join(steps[:lag])
        + "".join(step + "W" for step in steps[lag:])
        + "W" * min(lag, forwards)
    )


def downstream(factor: int) -> StageCounts:
    """`factor` times the warm-up of 1F1B, ceil(factor * sum of r_t over t > s, over r_s).

    No more than all but one of the ceil(M / r_s) that a replica gets; one microbatch more than the
    warm-up is in flight.
    """

    def counts(s: int, replicas: Sequence[int], microbatches: int | None) -> Counts:
        warmup = -(-factor * devices_after(s, replicas) // replicas[s])
        if microbatches is not None:
            warmup = min(warmup, -(-microbatches // replicas[s]) - 1)
        return Counts(warmup, warmup + 1, 1)

    return counts


def blocking_warmups(replicas: Sequence[int]) -> list[int]:
    """Warm-ups under pipedream with which devices that wait for their all-reduces cannot deadlock.

    No gradient of a round leaves stage s+1 before all of its replicas have had their backward, for
    which it has taken in (w_{s+1} + 1) r_{s+1} microbatches; the replica of stage s that sends the
    last of these must get to it without a backward of that round: w_s >= ceil(((w_{s+1} + 1)
    r_{s+1} - 1) / r_s). PipeDream's warm-up is less for 1-3-1 and deadlocks. Derived here.
    """
    warmups, usual = [0] * len(replicas), downstream(1)
    for s in reversed(range(len(replicas) - 1)):
        taken_in = (warmups[s + 1] + 1) * replicas[s + 1]
        warmups[s] = max(usual(s, replicas, None).warmup, -(-(taken_in - 1) // replicas[s]))
    return warmups


ONE_F_ONE_B = Schedule(
    name="1f1b",
    summary="PipeDream-flush: one forward, one backward in turn, then a flush",
    row=row,
    uneven=True,
    repeats=True,
    counts=downstream(1),
    bubble=FLUSH,
    data_parallel=True,
)

EAGER = Schedule(
    name="1f1b-eager",
    summary="1F1B with twice the warm-up, which hides the links' latency",
    row=row,
    uneven=True,
    repeats=True,
    counts=downstream(2),
    takes_warmup=True,
    bubble=FLUSH,
)

PIPEDREAM = Schedule(
    name="pipedream",
    summary="PipeDream's 1F1B-RR: asynchronous, a weight version for every microbatch in flight",
    row=row,
    asynchronous=True,
    uneven=True,
    counts=downstream(1),
    takes_warmup=True,
    weight_versions=ALL_IN_FLIGHT,
    bubble=Bubble("0", lambda P, v, M, t: 0),
    tried_by_auto=False,
)

PIPEDREAM_2BW = replace(
    PIPEDREAM,
    name="pipedream-2bw",
    summary="PipeDream-2BW: asynchronous, two weight versions",
    weight_versions=2,
)
