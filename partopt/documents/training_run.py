"""A run of a plan: what was predicted, what was measured (`partopt.run/2`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.documents.stage import Shard

Share = Annotated[float, msgspec.Meta(ge=0)]


class RanPlan(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan that was run: the model, as its profile has it, and what the page of a run repeats.

    `tokens_per_sample` and `estimated` are as in a plan's profile; `measured_per` says of what the
    seconds of the run are.
    """

    model: str
    parameter_bytes: Bytes
    dtype: str
    autocast: str | None = None
    sha256: str
    schedule: str
    shape: str
    microbatch_size: Count
    microbatches: Count
    topology: str
    shard: Shard = "none"
    tokens_per_sample: Count | None = None
    estimated: str | None = None
    measured_per: Literal["iteration", "microbatch"] | None = None


class RankSeconds(documents.StrictStruct, frozen=True, kw_only=True):
    """One rank in an iteration, or asynchronous in a cycle of the steady state.

    `forward_s` and `backward_s` are the mean of its actions, of all stages that it holds; the
    others are seconds in all: spent waiting for messages, for gradients to be exchanged, and for
    other ranks to compute. `peak_memory_bytes` are those of tensors; null where nobody counted. On
    a GPU its allocator took `reserved_bytes` for them, and `device_bytes` are in use there in all.
    """

    forward_s: Seconds
    backward_s: Seconds
    transfer_s: Seconds
    allreduce_s: Seconds
    idle_s: Seconds
    peak_memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    device_bytes: Bytes | None = None


class StageSeconds(documents.StrictStruct, frozen=True, kw_only=True):
    """A stage of the layers `modules` from layer `start`: medians of its actions.

    They are over microbatches, replicas and the steps that count; what the engine takes to pack and
    send is in them. A backward that the schedule parts is the sum of
    both, `backward_weight_s` the part for the weights. Where a stage does `recompute`, that is
    within the backward or, where the schedule has it apart, `recompute_s`. `optimizer_s` is null
    where an asynchronous stage steps within its backwards.
    """

    start: Index
    modules: list[str]
    recompute: bool
    forward_s: Seconds
    backward_s: Seconds
    backward_weight_s: Seconds | None = None
    recompute_s: Seconds | None = None
    optimizer_s: Seconds | None = None


class RunRank(documents.StrictStruct, frozen=True, kw_only=True):
    """A rank and the stages that it holds."""

    rank: Index
    stages: list[Index]
    predicted: RankSeconds
    measured: RankSeconds


class Check(documents.StrictStruct, frozen=True, kw_only=True):
    """The first step against one process: relative errors of losses, and of what is `compared`.

    An error is the largest difference over the largest gradient, or change, of the parameter;
    `worst` is the one that has the largest.
    """

    compared: Literal["gradients", "changes"]  # changes of weights: in older files
    loss_error: Share
    largest_error: Share
    worst: str
    parameters: Count
    equal: bool


class MachineLoad(documents.StrictStruct, frozen=True, kw_only=True):
    """Processes that wanted to run on this machine in the minute before and after the run."""

    before: Share
    after: Share
    cores: Count


class Run(documents.Document, frozen=True, kw_only=True):
    """What a plan was predicted to take, and what it took.

    `predicted_s` and `measured_s` are an iteration, or asynchronous a microbatch in steady state;
    `own_times_s` is what the simulator says where every action is as long as it was in the run:
    what then remains is the network's or the engine's. `measured_s` is the median of the steps, the
    first left out where there are several, and `counted_step`, in which memory was counted;
    `steps_s` are all of them. `losses` are the means of the steps.
    """

    schema: str = "partopt.run/2"
    plan: RanPlan
    engine: str
    backend: str
    device: str
    ranks_per_core: Share
    steps: Count
    steps_s: list[Seconds]
    counted_step: Index | None = None
    losses: list[float]
    predicted_s: Seconds
    measured_s: Seconds
    own_times_s: Seconds
    samples_per_s: Share
    check: Check | None = None
    machine: MachineLoad
    stages: list[StageSeconds]
    ranks: list[RunRank]
    remarks: list[str] = []
