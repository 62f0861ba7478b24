"""What makes the measured times doubtful, said as warnings."""

from __future__ import annotations

import warnings

from torch import nn

from partopt.errors import PartoptWarning
from partopt.profiler.clock import Clock
from partopt.profiler.timeline import LayerTimes
from partopt.profiler.tracker import Tracker

IDLE_ABOVE = 0.10  # share by which processor and wall time may part
_NAMED = 3  # layers in a warning


def warn_if_shared(clock: Clock) -> None:
    """Warn where something else used the processor while it was measured."""
    share = clock.idle_share()
    if share is not None and share > IDLE_ABOVE:
        text = (
            f"processor and wall time differ by {share:.0%}: something else was running, "
            "and the times are too long"
        )
        warnings.warn(PartoptWarning(f"{text}; measure on a quiet machine"), stacklevel=2)


def warn_if_misattributed(tracker: Tracker, instrumented: list[LayerTimes]) -> None:
    """Warn of layers that train but show no backward of their own.

    A reentrant checkpoint runs its forward with gradients switched off and makes its one node
    before that forward begins: the backward of the layers in it is charged to the layer before.
    Such a layer may still show the time of the checkpoint that follows it.
    """
    silent = {
        index
        for index in range(len(tracker.layers))
        if not any(times.backward_s[index] for times in instrumented)
    }
    doubtful = [
        index
        for index in sorted(silent | tracker.without_graph)
        if _trains(tracker.modules[tracker.layers[index].name])
    ]
    if not doubtful:
        return
    names = ", ".join(tracker.layers[index].name or "the model" for index in doubtful[:_NAMED])
    more = f" and {len(doubtful) - _NAMED} more" if len(doubtful) > _NAMED else ""
    text = f"{names}{more}: no backward of its own is seen, its time is charged to its neighbours"
    hint = (
        "checkpoint with use_reentrant=False, or choose a larger unit that holds the "
        "checkpoint: --unit"
    )
    warnings.warn(PartoptWarning(f"{text}; {hint}"), stacklevel=2)


def _trains(module: nn.Module) -> bool:
    """Whether a parameter of the module has a gradient: one that the loss does not depend on has
    none, and no backward either.
    """
    return any(parameter.grad is not None for parameter in module.parameters())
