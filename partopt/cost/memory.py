"""Bytes on each device of a stage.

Weights in all their versions, gradients, optimizer state, activations, receive buffers, and what a
backward takes while it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.chain import Chain
from partopt.documents.stage import Memory

# W   bytes of the stage's parameters that have a gradient
# V   versions of these

# fp32 moments that an optimizer keeps for each parameter
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


class Sizes(NamedTuple):
    """Bytes of a stage, whatever it has in flight."""

    trained: float  # W
    frozen: float  # parameters without a gradient
    state: float  # of the optimizer
    stash: float  # of one microbatch
    transient: float  # the most that layers take while they run, beside the stash
    inputs: float  # that cross the cut before it, for one microbatch
    outputs: float  # and the cut behind it


def optimizer_bytes(parameter_bytes: float, optimizer: str, sixteen_bit: bool) -> float:
    """State of the optimizer: its moments, and for 16-bit parameters an fp32 master copy.

    Beside 16-bit parameters each moment and the master copy are 32-bit, so twice W each.
    """
    if not sixteen_bit:
        return MOMENTS[optimizer] * parameter_bytes
    return (MOMENTS[optimizer] + 1) * 2 * parameter_bytes


def stage_memory(
    chain: Chain,
    i: int,
    j: int,
    in_flight: int,
    weight_versions: int,
    optimizer: str,
    rebuilt: int,
    split: bool,
) -> Memory:
    """Bytes on each device that holds layers [i, j), by what they are for; see `device_memory`.

    `split`: backwards are in two parts.
    """
    trained = chain.trained_bytes(i, j)
    sizes = Sizes(
        trained,
        chain.frozen_bytes(i, j),
        optimizer_bytes(trained, optimizer, chain.sixteen_bit),
        chain.stash_bytes(i, j),
        chain.transient(split)(i, j),
        chain.a[i],
        chain.a[j],
    )
    return device_memory(sizes, in_flight, weight_versions, rebuilt)


def device_memory(sizes: Sizes, in_flight: int, weight_versions: int, rebuilt: int) -> Memory:
    """Bytes on a device, by what they are for, given the sizes of its stage.

    Frozen parameters have one version, no gradient and no state. A stage that recomputes keeps only
    its input for each microbatch in flight, and the stash of the `rebuilt` ones; `rebuilt` is 0
    where nothing is recomputed. Each microbatch in flight has one buffer for what each cut brings:
    activations from the stage before, gradients from the stage after. One backward runs at a time.
    What it takes beside its stash comes to that: at its peak part of its stash may be gone.
    """
    held = sizes.stash
    kept = in_flight * sizes.inputs + rebuilt * held if rebuilt else in_flight * held
    parts = {
        "parameters_bytes": weight_versions * sizes.trained + sizes.frozen,
        "gradients_bytes": sizes.trained,
        "optimizer_bytes": sizes.state,
        "activations_bytes": kept,
        "buffers_bytes": in_flight * (sizes.inputs + sizes.outputs),
        "transient_bytes": sizes.transient,
    }
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(**whole, total_bytes=sum(whole.values()))


def memory_table(
    chain: Chain,
    in_flight: int,
    weight_versions: int,
    optimizer: str,
    recompute: bool,
    split: bool,
) -> NDArray[np.float64]:
    """`stage_memory` in all, unrounded, of every range [i, j), shape (N+1, N+1); inf for j <= i."""
    trained, stash = chain.trained_bytes.table(), chain.stash_bytes.table()
    once = chain.frozen_bytes.table() + chain.transient(split).table()
    inputs, outputs = chain.a[:, None], chain.a[None, :]
    state = optimizer_bytes(1.0, optimizer, chain.sixteen_bit)
    kept = in_flight * inputs + stash if recompute else in_flight * stash
    needs = (weight_versions + 1 + state) * trained + kept + in_flight * (inputs + outputs) + once
    ordered = np.arange(chain.layers + 1)
    return np.where(ordered[:, None] < ordered[None, :], needs, np.inf)
