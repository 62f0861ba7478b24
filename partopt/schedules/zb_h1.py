"""ZB-H1 (Qi et al., ICLR 2024, section 2.1): 1F1B with the backward in two parts.

The paper is "Zero bubble pipeline parallelism". The gradient of the inputs goes upstream at once;
that of the weights waits, longer on later devices, and fills the drain. Every device then holds as
much as 1F1B's first: P microbatches.
"""

from __future__ import annotations

from partopt.schedules import bubble
from partopt.schedules.entry import DEPTH, Kernel, Schedule, StageCounts, all_own, downstream_warmup
from partopt.schedules.layout import STRAIGHT, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row: 1F1B's with I for B, and the W of each one p backwards after its I."""
    return spell(delay_weights("F" * min(place.P - 1 - place.p, place.M), place.M, place.p))


def delay_weights(warmup: str, forwards: int, lag: int) -> str:
    """1F1B with each W `lag` backwards after its I.

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


SCHEDULE = Schedule(
    name="zb-h1",
    summary="1F1B with backwards in two parts: a third of its bubble",
    row=row,
    shape=STRAIGHT,
    asynchronous=False,
    split=True,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=StageCounts(
        in_flight=lambda s, replicas, M: min(all_own(s, replicas, M), len(replicas)),
        # as many Ws are behind their Is as there are devices before this one
        begun=lambda s, replicas, M: min(all_own(s, replicas, M), s + 1),
        warmup=downstream_warmup(1),
        takes_warmup=False,
        kernel=Kernel(DEPTH),
    ),
    weight_versions=1,
    bubble=bubble.FILLED_DRAIN,
    comm="overlap",
    comm_source=(
        "zero-bubble (ICLR 2024) on Megatron-LM, and torch 2.13 "
        "`_PipelineScheduleRuntime` posts sends and receives and waits where it needs "
        "one"
    ),
    tried_by_auto=True,
    data_parallel=False,
)
