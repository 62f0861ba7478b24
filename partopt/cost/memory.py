"""Bytes on each device of a stage.

Weights in all their versions, gradients, optimizer state, activations, receive buffers, and what a
backward takes while it runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from partopt.cost.chain import Chain
from partopt.documents.stage import Memory, MemoryRules

# W   bytes of the stage's parameters that have a gradient
# V   versions of these

# Bytes that an optimizer keeps for each parameter: fp32 moments; 8-bit ones, with a scale for every
# 2,048 of them that is left out (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
# ICLR 2022); the rows and columns of a factored second moment, next to nothing for a matrix
# (Shazeer and Stern, "Adafactor", ICML 2018, without its optional first moment)
STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "adam8bit": 2, "adafactor": 0}
_MASTER_BYTES = 4  # the fp32 copy of a 16-bit parameter


# stages of ZeRO (Rajbhandari et al. 2020)
SHARDED = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
GATHERED = 2  # layers whose parameters are whole: of the one that runs, and of the next


class Kept(NamedTuple):
    """What a trainer keeps beside the parameters."""

    gradients: float  # bytes for a byte of parameters with a gradient
    state: float  # bytes of optimizer state for it
    # of what a replica holds a share: nothing, the state, the gradients too, the parameters too
    shard: int = 0
    posted: int = 0  # M, where all of an iteration have receive buffers; 0: those in flight


class Sizes(NamedTuple):
    """Bytes of a stage, whatever it has in flight."""

    trained: float  # W
    frozen: float  # parameters without a gradient
    gradients: float
    state: float  # of the optimizer
    stash: float  # of one microbatch
    split_stash: float  # of one microbatch between the parts of its backward, beside the stash
    transient: float  # the most that layers take while they run, beside the stash
    inputs: float  # that cross the cut before it, for one microbatch
    outputs: float  # and the cut behind it
    layer: float = 0.0  # parameters of its largest layer
    sharers: int = 1  # devices that share its parameters


def kept_of(
    optimizer: str, rules: MemoryRules, sixteen_bit: bool, microbatches: int | None = None
) -> Kept:
    """What is kept beside 16-bit or 32-bit parameters, with so many microbatches an iteration.

    Beside 16-bit ones stands an fp32 master copy, whatever the moments are; `rules.optimizer_bytes`
    are all the state of a parameter, a master copy included.
    """
    each = 2 if sixteen_bit else 4
    state: float = STATE_BYTES[optimizer] + (_MASTER_BYTES if sixteen_bit else 0)
    if rules.optimizer_bytes is not None:
        state = rules.optimizer_bytes
    gradient = 4 if rules.gradients == "float32" else each
    posted = microbatches or 0 if rules.buffers == "all" else 0
    return Kept(gradient / each, state / each, SHARDED[rules.shard], posted)


def shares(kept: Kept, replicas: int) -> tuple[int, int, int]:
    """Devices that share the parameters of a stage, its gradients, and its state."""
    parameters, gradients, state = (replicas if kept.shard >= k else 1 for k in (3, 2, 1))
    return parameters, gradients, state


@register_jitable
def parameters_bytes(own: Any, layer: Any, sharers: int) -> Any:
    """Bytes of parameters on one device of a stage that has `own` in all; for arrays too.

    Where devices share them, some layers are whole at a time, up to all of them.
    """
    return np.minimum(own, own / sharers + GATHERED * layer)


def posted_buffers(posted: int, replicas: int, in_flight: int) -> int:
    """Receive buffers of a stage for each of its cuts; see `Kept.posted`."""
    return -(-posted // replicas) if posted else in_flight


def stage_memory(
    chain: Chain,
    i: int,
    j: int,
    in_flight: int,
    weight_versions: int,
    kept: Kept,
    replicas: int,
    begun: int,
    recompute: bool,
    split: bool,
) -> Memory:
    """Bytes on each device that holds layers [i, j), by what they are for; see `device_memory`.

    `split`: backwards are in two parts.
    """
    buffers = posted_buffers(kept.posted, replicas, in_flight)
    sizes = sizes_of(chain, i, j, kept, replicas, split)
    return device_memory(sizes, in_flight, weight_versions, begun, recompute, buffers)


def sizes_of(chain: Chain, i: int, j: int, kept: Kept, replicas: int, split: bool) -> Sizes:
    """The bytes of layers [i, j) on each device that holds them, `split` as for `stage_memory`."""
    trained = chain.trained_bytes(i, j)
    parameters, gradients, state = shares(kept, replicas)
    return Sizes(
        trained,
        chain.frozen_bytes(i, j),
        kept.gradients * trained / gradients,
        kept.state * trained / state,
        chain.stash_bytes(i, j),
        chain.split_stash(i, j) if split else 0.0,
        chain.transient(split)(i, j),
        chain.a[i],
        chain.a[j],
        chain.layer_bytes(i, j),
        parameters,
    )


def device_memory(
    sizes: Sizes,
    in_flight: int,
    weight_versions: int,
    begun: int,
    recompute: bool,
    buffers: int,
) -> Memory:
    """Bytes on a device, by what they are for, given the sizes of its stage.

    Frozen parameters have one version, no gradient and no state. There are so many `buffers` for
    what each cut brings: activations from the stage before, gradients from the stage after. A stage
    that recomputes keeps of a microbatch only its input, which is in that buffer, and the stash of
    the `begun` ones. These keep what the parts of their backward have between them, too. One
    backward runs at a time. What it takes beside its stash comes to that: at its peak part of its
    stash may be gone.
    """
    kept = begun if recompute else in_flight
    parts = {
        "parameters_bytes": parameters_bytes(
            weight_versions * sizes.trained + sizes.frozen, sizes.layer, sizes.sharers
        ),
        "gradients_bytes": sizes.gradients,
        "optimizer_bytes": sizes.state,
        "activations_bytes": kept * sizes.stash + begun * sizes.split_stash,
        "buffers_bytes": buffers * (sizes.inputs + sizes.outputs),
        "transient_bytes": sizes.transient,
    }
    whole = {name: round(float(size)) for name, size in parts.items()}
    return Memory(**whole, total_bytes=sum(whole.values()))


def memory_table(
    chain: Chain,
    in_flight: int,
    weight_versions: int,
    kept: Kept,
    replicas: int,
    recompute: bool,
    split: bool,
    begun: int = 1,
) -> NDArray[np.float64]:
    """`stage_memory` in all of every range [i, j), shape (N+1, N+1); inf for j <= i.

    `begun` are the microbatches whose backward has begun.
    """
    trained, stash = chain.trained_bytes.table, chain.stash_bytes.table
    inputs, outputs = chain.a[:, None], chain.a[None, :]
    parameters, gradients, state = shares(kept, replicas)
    own = weight_versions * trained + chain.frozen_bytes.table
    parts = [
        parameters_bytes(own, chain.layer_bytes.table, parameters),
        kept.gradients * trained / gradients,
        kept.state * trained / state,
        (begun if recompute else in_flight) * stash
        + (begun * chain.split_stash_table if split else 0.0),
        posted_buffers(kept.posted, replicas, in_flight) * (inputs + outputs),
        chain.transient(split).table,
    ]
    needs = sum(np.rint(part) for part in parts)
    ordered = np.arange(chain.layers + 1)
    return np.where(ordered[:, None] < ordered[None, :], needs, np.inf)
