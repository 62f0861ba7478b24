"""What makes the measured times doubtful, as notes of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from partopt.documents import Note
from partopt.documents.profile import Measurement
from partopt.profiler.clock import Clock
from partopt.profiler.timeline import LayerTimes
from partopt.profiler.tracker import Tracker

IDLE_ABOVE = 0.10  # share of the wall time that the processor may spend elsewhere
_NAMED = 3  # layers in a note's text


def note_busy_machine(clock: Clock) -> Iterator[Note]:
    """A note where something else used the processor during the measurement, or nothing did."""
    share = clock.idle_share()
    if share is not None and share > IDLE_ABOVE:
        yield Note(
            code="busy-machine",
            text=(
                f"the model had the processor for {1 - share:.0%} of the time: the times are "
                f"processor time, by wall time a step took {1 / (1 - share):.1f} times as long; "
                "something else was running, or the model waits"
            ),
            fields={"idle_share": share},
        )


def note_overhead(measurements: Sequence[Measurement]) -> Iterator[Note]:
    """A note for each size at which the hooks cost so much that the layers' shares are in doubt."""
    for each in measurements:
        if each.overhead_bound and each.overhead is not None:
            yield Note(
                code="hook-overhead",
                text=(
                    f"microbatch {each.microbatch_size}: the hooks cost "
                    f"{(each.overhead - 1) * 100:.0f} % of the step: the layers' shares are in "
                    "doubt; larger units need fewer hooks: `granularity=block`, or `units`"
                ),
                fields={"microbatch_size": each.microbatch_size, "overhead": each.overhead},
            )


def note_missing_backwards(tracker: Tracker, instrumented: list[LayerTimes]) -> Iterator[Note]:
    """A note where layers train but show no backward of their own.

    A reentrant checkpoint runs its forward with gradients switched off and makes its one node
    before that forward begins: the backward of the layers in it is charged to the layer before.
    Such a layer may still show the time of the checkpoint that follows it.
    """
    silent = {
        index
        for index in range(len(tracker.layers))
        if not any(times.backward_s[index] for times in instrumented)
    }
    names = [
        tracker.layers[index].name or "the model"
        for index in sorted(silent | tracker.without_graph)
        if _trains(tracker.modules[tracker.layers[index].name])
    ]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield Note(
            code="no-backward",
            text=(
                f"{', '.join(names[:_NAMED])}{more}: no backward of its own is seen, its time is "
                "charged to its neighbours; checkpoint with use_reentrant=False, or choose with "
                "`units` a larger unit that holds the checkpoint"
            ),
            fields={"layers": names},
        )


def _trains(module: nn.Module) -> bool:
    """Whether a parameter of the module has a gradient.

    One that the loss does not depend on has none, and no backward either.
    """
    return any(parameter.grad is not None for parameter in module.parameters())
