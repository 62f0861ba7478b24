"""Bytes on each device of a stage.

Weights in all their versions, gradients, optimizer state, activations and receive buffers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.cost.chain import Chain
from partopt.documents.stage import Memory

# W   parameter bytes of the stage
# V   weight versions

# fp32 moments that an optimizer keeps for each parameter
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


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
) -> Memory:
    """Bytes on each device that holds layers [i, j), by what they are for; see `device_memory`."""
    weights = chain.parameter_bytes(i, j)
    state = optimizer_bytes(weights, optimizer, chain.sixteen_bit)
    return device_memory(
        weights,
        state,
        chain.stash_bytes(i, j),
        chain.a[i],
        chain.a[j],
        in_flight,
        weight_versions,
        rebuilt,
    )


def device_memory(
    weights: float,
    state: float,
    stash: float,
    inputs: float,
    outputs: float,
    in_flight: int,
    weight_versions: int,
    rebuilt: int,
) -> Memory:
    """Bytes on a device, by what they are for, given the sizes of its stage.

    The stage has `weights` bytes of parameters, `state` bytes of optimizer state, and `stash` bytes
    for each microbatch. A stage that recomputes keeps only its input for each microbatch in flight,
    and the stash of the `rebuilt` ones; `rebuilt` is 0 where nothing is recomputed. Each microbatch
    in flight has one buffer for what each cut brings: activations from the stage before, gradients
    from the stage after.
    """
    parts = {
        "parameters_bytes": weight_versions * weights,
        "gradients_bytes": weights,
        "optimizer_bytes": state,
        "activations_bytes": in_flight * inputs + rebuilt * stash if rebuilt else in_flight * stash,
        "buffers_bytes": in_flight * (inputs + outputs),
    }
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(**whole, total_bytes=sum(whole.values()))


def memory_table(
    chain: Chain, in_flight: int, weight_versions: int, optimizer: str, recompute: bool
) -> NDArray[np.float64]:
    """`stage_memory` in all, unrounded, of every range [i, j), shape (N+1, N+1); inf for j <= i."""
    weights, stash = chain.parameter_bytes.table(), chain.stash_bytes.table()
    inputs, outputs = chain.a[:, None], chain.a[None, :]
    state = optimizer_bytes(1.0, optimizer, chain.sixteen_bit)
    kept = in_flight * inputs + stash if recompute else in_flight * stash
    needs = (weight_versions + 1 + state) * weights + kept + in_flight * (inputs + outputs)
    ordered = np.arange(chain.layers + 1)
    return np.where(ordered[:, None] < ordered[None, :], needs, np.inf)
