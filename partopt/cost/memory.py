"""Bytes on a device of a stage, and those that no plan may use.

Weights in all their versions, gradients, optimizer state, activations, receive buffers, and what a
backward takes while it runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from partopt.cost.chain import SIXTEEN_BIT, chain_of
from partopt.documents.engine import Engine
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.stage import Memory, Reserve, Shard, Stage
from partopt.schedules import schedule
from partopt.schedules.entry import Counts, Schedule

if TYPE_CHECKING:
    from partopt.cost.problem import Problem

# W   bytes of the stage's parameters that have a gradient
# V   versions of these

# Bytes that an optimizer keeps for a parameter: fp32 moments; 8-bit ones, with a scale for every
# 2,048 of them that is left out (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
# ICLR 2022); the rows and columns of a factored second moment, next to nothing for a matrix
# (Shazeer and Stern, "Adafactor", ICML 2018, without its optional first moment)
STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "adam8bit": 2, "adafactor": 0}
_MASTER_BYTES = 4  # the fp32 copy of a 16-bit parameter

# stages of ZeRO (Rajbhandari et al. 2020)
SHARDED = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
GATHERED = 2  # layers whose parameters are whole: of the one that runs, and of the next

# Communicators of NCCL, as `partopt.runtime` makes them: one for all ranks, one for a pipeline, one
# for the replicas of a stage, and one for every direction of a pair that sends messages: so many or
# fewer (tied parameters and shares of the optimizer have more). Of a group that exchanges gradients
# 544 to 688 MB were seen on A100s (NVIDIA/nccl issue 964), of a pair on H100s 10 MiB to receive and
# 2 MiB to send in each of 32 channels (1685); a direction has `CHANNELS`.
COLLECTIVES, COLLECTIVE_BYTES = 3, 688_000_000
DIRECTIONS, CHANNELS, CHANNEL_BYTES = 9, 4, 12 * 2**20
COMMUNICATOR_BYTES = COLLECTIVES * COLLECTIVE_BYTES + DIRECTIONS * CHANNELS * CHANNEL_BYTES
FIXED_BYTES, SHARE = 1_000_000_000, 0.03  # see `reserve_of`


Floats = NDArray[np.float64]


class Kept(NamedTuple):
    """What a trainer keeps beside the parameters."""

    gradients: float  # bytes for a byte of parameters with a gradient
    state: float  # bytes of optimizer state for it
    # of what a replica holds a share: nothing, the state, the gradients too, the parameters too
    shard: int = 0
    posted: int = 0  # microbatches of an iteration that have receive buffers; 0: those in flight
    gathered: float = 1.0  # bytes for a byte of parameters, where replicas share them
    copies: int = 1  # ranks of a device that hold the same parameters, and share them, too
    on_host: bool = False  # whether shares are in none of a device's memory
    whole_sums: bool = False  # whether all have the sums of gradients that replicas share not


def kept_of(
    optimizer: str,
    engine: Engine,
    shard: Shard,
    sixteen_bit: bool,
    microbatches: int | None = None,
    copies: int = 1,
) -> Kept:
    """What is kept beside 16-bit or 32-bit parameters, with so many microbatches an iteration.

    Of the ranks of a device `copies` hold the same parameters.

    Beside 16-bit ones stands an fp32 master copy, whatever the moments are; `optimizer_bytes` of an
    engine are all the state of a parameter, a master copy included. Gradients that are exchanged
    once, behind the last backward, are whole until then, and as large.
    """
    size = 2 if sixteen_bit else 4
    state: float = STATE_BYTES[optimizer] + (_MASTER_BYTES if sixteen_bit else 0)
    if engine.optimizer_bytes is not None:
        state = engine.optimizer_bytes
    gradient = 4 if engine.gradients == "float32" else size
    posted = {"flight": 0, "all": microbatches or 0, "one": 1}[engine.buffers]
    sharded = SHARDED[shard]
    if shard == "gradients" and engine.allreduce == "blocking":
        sharded = SHARDED["optimizer"]
    gathered = (engine.gathered_bytes or size) / size
    on_host, sums = engine.on_host is True, engine.whole_sums is True
    return Kept(gradient / size, state / size, sharded, posted, gathered, copies, on_host, sums)


def kept_by(plan: Plan) -> Kept:
    """What the trainer of a plan keeps."""
    sixteen_bit = plan.profile.dtype in SIXTEEN_BIT
    copies = plan.topology.group_copies
    return kept_of(plan.optimizer, plan.engine, plan.shard, sixteen_bit, plan.microbatches, copies)


def recomputes_apart(of: Plan | Problem) -> bool:
    """Whether stages recompute while they wait for the gradient, not within the backward."""
    return schedule(of.schedule).recomputes and not of.engine.recomputes_blocks


def shares(kept: Kept, replicas: Any) -> tuple[Any, Any, Any]:
    """Ranks that share the parameters of a stage, its gradients, its state; for arrays too."""
    ranks = replicas * kept.copies
    parameters, gradients, state = (ranks if kept.shard >= k else 1 for k in (3, 2, 1))
    return parameters, gradients, state


def shares_of_memory(kept: Kept, replicas: Any) -> tuple[Any, Any, Any]:
    """The same of a device's memory, of which shares on the host take nothing."""
    return shares(kept, math.inf if kept.on_host else replicas)


class Sizes(NamedTuple):
    """Bytes of ranges of layers as stages, by the names of `Stage`; arrays."""

    trained_bytes: Floats
    frozen_bytes: Floats
    layer_bytes: Floats
    stash_bytes: Floats
    split_stash_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats


def parts_of(
    stages: Any, whole: Any, counts: tuple[Any, Any], replicas: Any, kept: Kept, entry: Schedule
) -> dict[str, Any]:
    """Bytes on a device by part, as in `Memory`, but for what one backward takes while it runs.

    `stages` have the sizes of a stage, or arrays of those of many, by their names in `Stage`; those
    that are `whole` are recomputed so. `counts` are the microbatches in flight, and those whose
    backward has begun; `kept` is what the trainer keeps. Frozen parameters have one version, no
    gradient and no state. Where devices share parameters, some layers are whole at a time, up to
    all of them. There are as many buffers for what a cut brings, activations from the stage before
    and gradients from the stage after, as there are microbatches in flight, or posted. A whole
    stage that is recomputed keeps of a microbatch its input alone, in such a buffer of all that are
    in flight, and its stash once its backward has begun. From then on there is also what the parts
    of a backward keep between them.
    """
    (held, begun), ranks = counts, shares_of_memory(kept, replicas)
    weights = entry.versions_of(held) * stages.trained_bytes + stages.frozen_bytes
    buffers = -(-kept.posted // replicas) if kept.posted else held
    inputs = np.where(whole, np.maximum(buffers, held), buffers)
    parting = begun * stages.split_stash_bytes if entry.split else 0
    parts = {
        "parameters_bytes": np.minimum(weights, weights / ranks[0] + GATHERED * stages.layer_bytes),
        "gradients_bytes": kept.gradients * stages.trained_bytes / ranks[1],
        "optimizer_bytes": kept.state * stages.trained_bytes / ranks[2],
        "activations_bytes": np.where(whole, begun, held) * stages.stash_bytes + parting,
        "buffers_bytes": inputs * stages.input_bytes + buffers * stages.output_bytes,
    }
    return {name: np.rint(size) for name, size in parts.items()}


def with_counts(stage: Stage, counts: Counts, entry: Schedule, kept: Kept) -> Stage:
    """The stage with these `counts` of microbatches under a schedule, and its memory.

    One backward runs at a time. What it takes beside its stash comes to that: at its peak part of
    its stash may be gone.
    """
    warmup, held, begun = counts
    whole, replicas = stage.recomputes_whole, stage.replicas
    found = parts_of(stage, whole, (held, begun), replicas, kept, entry)
    parts = {name: int(size) for name, size in found.items()}
    parts["transient_bytes"] = stage.transient(entry.split)
    return replace(
        stage,
        warmup=warmup,
        in_flight=held,
        weight_versions=entry.versions_of(held),
        memory=Memory(**parts, total_bytes=sum(parts.values())),
    )


def memory_table(
    problem: Problem, in_flight: int, replicas: int, recompute: bool, begun: int = 1
) -> Floats:
    """Bytes in all of every range [i, j) as a stage, shape (N+1, N+1); inf for j <= i.

    As `ranges_bytes`, of all of them.
    """
    i, j = np.triu_indices(problem.chain.layers + 1, 1)
    needs = np.full((problem.chain.layers + 1,) * 2, np.inf)
    needs[i, j] = sum(ranges_bytes(problem, i, j, (in_flight, begun), replicas, recompute))
    return needs


def ranges_bytes(
    problem: Problem,
    i: NDArray[np.int64],
    j: NDArray[np.int64],
    counts: tuple[Any, Any],
    replicas: int,
    recompute: bool,
) -> tuple[Floats, Floats]:
    """Bytes of ranges [i, j) as stages: what they hold, and what a backward takes beside it.

    `counts` are as for `parts_of`, numbers or one for every range.
    """
    chain, entry = problem.chain, schedule(problem.schedule)
    stash, parting = chain.stash_bytes.table[i, j], chain.split_stash_table[i, j]
    transient = chain.transient(entry.split).table[i, j]
    if recompute and chain.blocks is not None:
        _, stash, more, beside = chain.blocks.remade(i, j, problem.first)
        parting, transient = parting + more, transient if entry.split else beside
    parameters = chain.trained_bytes, chain.frozen_bytes, chain.layer_bytes
    sizes = *(size.table[i, j] for size in parameters), stash, parting, chain.a[i], chain.a[j]
    whole = recompute and chain.blocks is None
    parts = parts_of(Sizes(*sizes), whole, counts, replicas, problem.kept, entry)
    return sum(parts.values()), np.rint(transient)


def reserve_of(profile: Profile, limit_bytes: int | None) -> Reserve:
    """What no plan may use of a device of `limit_bytes` by default.

    They are for context, workspaces of libraries, fragments and communicators. Nothing is reserved
    where no limit is known, and where the times are of a CPU, whose memory has none of these. Else
    it is 1 GB and 3 % of the device, or what the profiled step took beyond what the formulas say of
    the whole model on one device, if that is more: the peak that a profile records is the
    allocator's, which knows neither the context nor its fragments. Communicators are beside
    that, which one device has none of.
    """
    on_gpu = profile.estimated_for is not None or profile.device.type == "cuda"
    if limit_bytes is None or not on_gpu:
        return Reserve()
    excess = 0.0
    for measured in profile.measured():
        if measured.peak_memory_bytes is not None:
            chain = chain_of(profile, measured.microbatch_size)
            whole = 0, chain.layers
            weights = 2 * chain.trained_bytes(*whole) + chain.frozen_bytes(*whole)
            kept = chain.stash_bytes(*whole) + chain.transient(split=False)(*whole)
            excess = max(excess, measured.peak_memory_bytes - weights - kept)
    assumed = FIXED_BYTES + SHARE * limit_bytes
    basis: Literal["measured", "assumed"] = "measured" if excess > assumed else "assumed"
    return Reserve(size_bytes=round(max(excess, assumed)) + COMMUNICATOR_BYTES, basis=basis)
