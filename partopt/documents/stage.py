"""What a plan is made of: stages with their memory, the traffic between them, loads, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count, Index, Seconds

Positive = Annotated[float, msgspec.Meta(gt=0)]
Gradients = Literal["parameters", "float32"]
Buffers = Literal["flight", "all", "one"]
Shard = Literal["none", "optimizer", "gradients", "parameters"]
FlowKind = Literal["send", "allreduce", "allgather", "reducescatter", "tied"]
FlowPer = Literal["microbatch", "round", "iteration"]

# S   stages; s   one of them, 0..S-1 in the order of the layers


class Memory(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes on each device of a stage.

    `transient_bytes` is what the stage takes beside these while its backward runs; of the stages of
    one device only the largest counts (`device_bytes`).
    """

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    buffers_bytes: Bytes
    transient_bytes: Bytes = 0
    total_bytes: Bytes


class Reserve(documents.StrictStruct, frozen=True, kw_only=True):
    """What no plan may use of a device, which its limit of memory is beside, and what says so."""

    size_bytes: Bytes = 0
    basis: Literal["none", "given", "measured", "assumed", "computed"] = "none"


class Stage(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers `[start, stop)` on `ranks`.

    Replica k is `ranks[k]` and runs the microbatches g with g mod replicas = k.

    `compute_s` is one microbatch on one replica: `forward_s`, `backward_s`, and `again_s` of
    forwards that are computed again where activations are recomputed. Where blocks are, one by one,
    these are the first `blocks_again` of its `blocks`; else it is the whole stage, from its input.
    `backward_weight_s` is the part of the backward that the gradients of the weights take.
    `allreduce_s` is one all-reduce of the gradients over the ranks, `tied_exchange_s` the exchange
    of those of tied parameters with other stages, `optimizer_s` one step of the optimizer, within
    `backward_s` where each backward ends with one. `frozen_bytes` are those of `parameter_bytes`
    that have no gradient. `input_bytes` and `output_bytes` cross the cuts before and after the
    stage, per microbatch; over the one before it go `back_bytes` of gradients, where these are
    fewer, in `back_messages`, and the input comes in `messages`. `stash_bytes` are what its
    backward needs kept, of blocks that are computed again their inputs, and `split_stash_bytes`
    what one in two parts keeps between them beside that. While the backward runs it takes
    `transient_bytes` beside them, or `split_transient_bytes` where it is in two parts and frees no
    stash as it goes. `layer_bytes` are the parameters of its largest layer, where its replicas hold
    a share of the parameters each.
    """

    start: Index
    stop: Count
    modules: list[str]
    replicas: Count
    ranks: list[Index]
    recompute: bool
    blocks: Index | None = None
    blocks_again: Index = 0
    warmup: Index
    in_flight: Count
    weight_versions: Count
    compute_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    again_s: Seconds = 0.0
    backward_weight_s: Seconds
    allreduce_s: Seconds
    tied_exchange_s: Seconds
    optimizer_s: Seconds
    parameter_bytes: Bytes
    frozen_bytes: Bytes = 0
    input_bytes: Bytes
    output_bytes: Bytes
    back_bytes: Bytes | None = None
    messages: Count = 1
    back_messages: Index = 1
    stash_bytes: Bytes
    transient_bytes: Bytes = 0
    split_transient_bytes: Bytes = 0
    split_stash_bytes: Bytes = 0
    layer_bytes: Bytes = 0
    memory: Memory

    @property
    def layers(self) -> range:
        """The layers, by their numbers in the profile."""
        return range(self.start, self.stop)

    def rank_of(self, microbatch: int) -> int:
        """The rank that runs a microbatch."""
        return self.ranks[microbatch % self.replicas]

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that have a gradient."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that go back over the cut before the stage, per microbatch."""
        return self.input_bytes if self.back_bytes is None else self.back_bytes

    @property
    def first_again(self) -> int | None:
        """How many of its blocks are computed again where not all are."""
        return None if self.blocks_again == (self.blocks or 0) else self.blocks_again

    @property
    def recomputes_whole(self) -> bool:
        """Whether it keeps its input alone, and computes all of its layers again."""
        return self.recompute and self.blocks is None

    def transient(self, split: bool) -> int:
        """Bytes beside the stash while the backward runs, `split` in two parts or whole."""
        return self.split_transient_bytes if split else self.transient_bytes

    @property
    def gradients_s(self) -> float:
        """Seconds in which gradients are exchanged, over the ranks and with other stages."""
        return self.allreduce_s + self.tied_exchange_s


def device_bytes(stages: Sequence[Stage]) -> int:
    """Bytes on a device that holds `stages`: one of them runs at a time."""
    memory = [stage.memory for stage in stages]
    held = sum(of_stage.total_bytes - of_stage.transient_bytes for of_stage in memory)
    return held + max(of_stage.transient_bytes for of_stage in memory)


class Flow(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Traffic of the plan: a `send` between stages, an `allreduce` of one, or a `tied` exchange.

    A `send` is per microbatch, an `allreduce` per round or iteration. `tied` is the stage's part in
    an exchange of the gradients of `parameters` among up to `holders` stages that hold them.
    `level` is the outermost level of the topology that it crosses.
    """

    kind: FlowKind
    source: Index | None = None
    destination: Index | None = None
    stage: Index | None = None
    ranks: list[Index] = []
    holders: Count | None = None
    parameters: list[str] = []
    bytes: Bytes
    per: FlowPer
    level: str


class Load(documents.StrictStruct, frozen=True):
    """Seconds per microbatch for which something is busy.

    `what` it is, of stage or cut number `place` (cut c lies before stage c).
    """

    what: str
    place: Index
    seconds: Seconds

    def __str__(self) -> str:
        return f"{self.what} {'before' if self.what == 'cut' else 'of'} stage {self.place}"


class Figures(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What people quote of training beside samples/s.

    Each is `None` where the profile or the topology does not say it.

    `device_flops_per_s` are the model's operations in a second over all real devices of the
    cluster, idle ones included, and `mfu` these over the peak of a device. `price_per_hour` is of
    all devices; `samples_per_money` and `tokens_per_money` are what one unit of money buys.
    """

    tokens_per_s: Positive | None = None
    device_flops_per_s: Positive | None = None
    mfu: Positive | None = None
    price_per_hour: Positive | None = None
    samples_per_money: Positive | None = None
    tokens_per_money: Positive | None = None


def stages_text(stages: Sequence[int]) -> str:
    """Stages as messages name them: `stage 0`, or `stages 0 and 4` where a device holds several."""
    return (
        f"stage {stages[0]}"
        if len(stages) == 1
        else f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
    )
