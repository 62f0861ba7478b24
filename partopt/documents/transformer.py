"""A transformer as its configuration states it, and what a trainer does when it runs one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from partopt import documents
from partopt.documents.engine import Layout
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.errors import PartoptError

# number format of the blocks' products; mxfp8 and nvfp4 have a scale a block of 32 and of 16
Format = Literal["bfloat16", "float16", "fp8", "mxfp8", "nvfp4"]
BITS: dict[Format, int] = {"bfloat16": 16, "float16": 16, "fp8": 8, "mxfp8": 8, "nvfp4": 4}

Traffic = Annotated[float, msgspec.Meta(ge=0)]
Graphs = Literal["none", "router", "attention", "full"]  # what is captured of a block
_MOST = 1000  # blocks: published models have up to 126
Pair = tuple[Traffic, Traffic]  # forward and backward
# how blocks are shared out to stages: a way, or those of each stage, `17-20-22-21`
Ends = Annotated[
    str, msgspec.Meta(pattern=r"^(stage|blocks|layers|fewer|free|[0-9]{1,4}(-[0-9]{1,4}){1,999})$")
]


class Numerics(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What no time depends on, and without which it is another model.

    Norms are of root mean squares or of layers, with an `epsilon`; with `query_key_norms` each head
    has two more. The feed-forward's `activation` is the gate's, where it has one. `bias` is that of
    all products, of attention's, of queries, keys and values alone, or of none. Positions turn
    `rotary_share` of a head by powers of `rotary_base`, which `rotary_scaling` stretches, in the
    words of a config.json. `besides` tells what else is otherwise than in Llama's and GPT's blocks.
    """

    norm: Literal["rms", "layer"] = "rms"
    epsilon: Annotated[float, msgspec.Meta(gt=0)]
    query_key_norms: bool = False
    activation: str = "silu"
    bias: Literal["none", "queries", "attention", "all"] = "none"
    rotary_base: Annotated[float, msgspec.Meta(gt=0)] = 10_000
    rotary_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1
    rotary_scaling: dict[str, bool | float | str | list[float]] = {}
    besides: str = ""


class Transformer(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """An embedding of a `vocabulary`, `blocks` equal blocks, and a head.

    `hidden` is the width between blocks. `heads` of `head_size` numbers attend, `kv_heads` have
    keys and values of their own, over all tokens or a `window` of the last ones. `ffn` is the width
    of the feed-forward. With `experts` each is `expert_ffn` wide, a token takes
    `experts_per_token`, and `ffn` is the width of a shared one, 0 where there is none. Attention
    may be `causal`, positions `rotary`, the feed-forward `gated`, embedding and head `tied`; there
    may be `dropout`. `numerics` are None where nothing says them.
    """

    name: str
    blocks: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    ffn: Index
    vocabulary: Count
    gated: bool = True  # the feed-forward has a gate, as SwiGLU
    rotary: bool = True  # positions turn queries and keys
    dropout: bool = False
    tied: bool = False  # embedding and head share their weight
    causal: bool = True
    window: Index = 0
    experts: Index = 0
    experts_per_token: Index = 0
    expert_ffn: Index = 0
    numerics: Numerics | None = None

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Heads that groups of keys do not divide, and experts that are not whole."""
        faults = {
            "blocks": (self.blocks > _MOST, f"is more than the {_MOST:,} that can be planned"),
            "kv_heads": (self.heads % self.kv_heads, f"does not divide the {self.heads} heads"),
            "ffn": (not self.ffn + self.experts, "where there are no experts"),
            "expert_ffn": (
                bool(self.experts) != bool(self.expert_ffn),
                "needs experts, and they it",
            ),
            "experts_per_token": (
                not bool(self.experts) <= self.experts_per_token <= self.experts,
                f"is not between 1 and the {self.experts} experts",
            ),
        }
        for path, (wrong, what) in faults.items():
            if wrong:
                message = f"{path}: {getattr(self, path)} {what}"
                hint = "check the model's configuration"
                yield PartoptError(message, hint, code="inconsistent-document", path=path)

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_size

    @property
    def matrices(self) -> int:
        """Weights of a feed-forward, or of an expert."""
        return 3 if self.gated else 2

    @property
    def expert_parameters(self) -> int:
        """Those of all experts of a block."""
        return self.experts * self.matrices * self.hidden * self.expert_ffn

    @property
    def dense_parameters(self) -> int:
        """Those of a block beside its experts: attention, feed-forward, router, two norms.

        Biases are left out: 0.1 % and less.
        """
        inside = self.matrices * self.ffn + self.experts
        return self.hidden * (2 * self.q + 2 * self.kv + inside + 2)

    @property
    def block_parameters(self) -> int:
        """Those of a block."""
        return self.dense_parameters + self.expert_parameters

    @property
    def end_parameters(self) -> int:
        """Those of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.blocks * self.block_parameters + self.end_parameters * (2 - self.tied)

    @property
    def active_parameters(self) -> int:
        """Those that multiply every token: the experts that it takes, and the head."""
        taken = self.experts_per_token * self.matrices * self.hidden * self.expert_ffn
        return self.blocks * (self.dense_parameters + taken) + self.end_parameters

    def scores(self, sequence: int) -> float:
        """Scores of a head on a sample that attention needs: half of the square where causal."""
        if self.window and self.window < sequence:
            pairs = self.window * sequence - self.window**2 / 2
        else:
            pairs = sequence**2 / 2
        return pairs if self.causal else float(sequence**2)

    def flops(self, sequence: int) -> float:
        """Model operations on a sample, forward and backward, no recomputation.

        6 a parameter and token, and attention over the whole square, as trainers report it
        (Narayanan et al., SC 2021, appendix).
        """
        attention = 12 * sequence**2 * self.q * self.blocks
        return 6.0 * self.active_parameters * sequence + attention


class Passes(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that a block's passes over memory read and write, forward and backward.

    They are for each element of a token: of `norms` (both of a block), `residuals` and `dropout`
    over the hidden width, of `rotary` positions over that of queries and keys, of what else is done
    to `queries` and to `keys` (with values), of the activation, `gated` or `plain`, over that of
    the feed-forward.
    """

    norms: Pair = (8, 12)
    residuals: Pair = (12, 12)
    dropout: Pair = (2, 10)
    rotary: Pair = (4, 4)
    queries: Pair = (0, 0)
    keys: Pair = (0, 0)
    gated: Pair = (6, 10)
    plain: Pair = (4, 6)


class Kept(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that a block keeps of a token for its backward, for each element, in 16 bits.

    `hidden` are cut as what lies between products is, `whole` are not. `queries` hold the output of
    attention, too, `grouped` what is made of keys and values where several heads share them,
    `keys` are those of keys and values together, `rotary` what turned queries add; `gated` and
    `plain` are of the feed-forward, `dropout` of its masks. In 8 bits and fewer, each input of a
    product is `narrower` by so much.
    """

    hidden: Traffic = 8
    whole: Traffic = 0
    dropout: Traffic = 2
    queries: Traffic = 4
    rotary: Traffic = 2
    grouped: Traffic = 0
    keys: Traffic = 4
    gated: Traffic = 6
    plain: Traffic = 4
    narrower: Traffic = 1


class Scores(documents.StrictStruct, frozen=True, kw_only=True):
    """Attention that writes its scores.

    Bytes of a score: of passes `forward` and `backward`, those `kept`, those there during the
    `work`.
    """

    forward: Traffic
    backward: Traffic
    kept: Traffic
    work: Traffic = 0


class Loss(documents.StrictStruct, frozen=True, kw_only=True):
    """A cross entropy: bytes of the `passes` over a logit, and those of it that are `held`.

    With `gathers` every rank of a tensor parallel group takes the loss of all of them.
    """

    passes: Traffic
    held: Traffic
    gathers: bool = False


class Launches(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Operations that the host starts for the forward of a block; backward twice as many.

    Those of `attention` and of each of two `norms`; of a `dense` feed-forward; of a `router`, of
    its exchange in `rows` or `copies`, of all `experts`, of each `expert` and, with products in 8
    bits and fewer, what each `converts`, and of a `shared` expert.
    """

    attention: Traffic = 40
    norms: Traffic = 4
    dense: Traffic = 12
    router: Traffic = 149
    rows: Traffic = 149
    copies: Traffic = 25
    experts: Traffic = 20
    expert: Traffic = 4.7
    converts: Traffic = 4.9
    shared: Traffic = 12


class Practice(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trainer does when it runs a transformer: facts, each with a source in its file.

    `passes` over memory are counted, and what is `kept` for the backward. `attention` is a kernel
    of the device's file; with `scores` there is none. `joined_queries` and
    `joined_gate`: query, key and value, and gate and up, are one product. `compiled`: one kernel
    sums what several products give. `sequence_parallel` cuts what lies between products over
    tensor parallel ranks, `regathers` gathers their inputs again for the gradients of weights;
    `tp_overlap` says how products hide these exchanges. `sums` are gradients added up within the
    product, or by autograd; `exchange` scatters them, or all-reduces them in float32.

    `sends` between stages are whole, or a part of each tensor parallel rank. `ends` says how blocks
    are shared out to stages: evenly, with the head beside the last ones; with embedding and head a
    block each; with embedding, norm and head a layer each; fewer at the ends where all others have
    as many then; freely, the last device fewer; or those of each stage, as `17-20-22-21`.
    `selective` recomputation makes attention again, or every second product; then `kept_selective`
    remains. `stops_early`: what is made again ends before the block's last product.

    `shard_copies` are bytes a parameter that sharded parameters are copied, beside their gradients;
    `shards` lie over all replicas, or over those in a server. `conversion` is bytes an element to
    fp8. Experts' `dispatch` sends rows, or one copy of a token to each server; `dispatch_overlap`
    hides it behind another microbatch. The host `launches` the operations of a block, but for those
    that `graphs` hold: of the router, of that and attention, or all. `keeps_outputs`: a stage keeps
    its output. `buffer_bytes` are what the trainer holds beside all that.
    """

    passes: Passes = Passes()
    kept: Kept = Kept()
    loss: Loss
    attention: str
    scores: Scores | None = None
    joined_queries: bool = True
    joined_gate: bool = True
    compiled: bool = False
    sequence_parallel: bool = True
    regathers: bool = True
    tp_overlap: Literal["none", "async", "buffers"] = "none"
    sums: Literal["product", "autograd"] = "product"
    exchange: Literal["scatter", "float32"] = "scatter"
    sends: Literal["parts", "whole"] = "parts"
    ends: Ends = "stage"
    selective: Literal["attention", "operations"] = "attention"
    kept_selective: Kept | None = None
    stops_early: bool = False
    shard_copies: Pair = (0, 0)
    shards: Literal["all", "server"] = "all"
    conversion: Traffic = 6
    dispatch: Literal["rows", "copies"] = "rows"
    dispatch_overlap: bool = False
    launches: Launches = Launches()
    graphs: Graphs = "none"
    keeps_outputs: bool = False
    buffer_bytes: Traffic = 3e9


BlockSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class MeasuredBlock(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A trainer's own block as it was measured for microbatches of `microbatch_size` samples.

    `forward_s` and `backward_s` of one rank, nothing made again; `kept_bytes` it keeps from one to
    the other, 0 where that was not measured.
    """

    microbatch_size: Count
    forward_s: BlockSeconds
    backward_s: BlockSeconds
    kept_bytes: Bytes = 0


class Calibration(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What was measured of a trainer's own block, for which the closed form's is scaled.

    A group of `ranks` tensor parallel ranks ran it. `blocks` are in the order of their sizes, from
    the profile of a model called `name`, with the digest `sha256`.
    """

    name: str
    sha256: str
    ranks: Count = 1
    blocks: Annotated[list[MeasuredBlock], msgspec.Meta(min_length=1)]

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Sizes that are not ascending."""
        sizes = [block.microbatch_size for block in self.blocks]
        if sizes != sorted(set(sizes)):
            what = f"blocks: microbatch sizes {sizes} are not ascending"
            hint = "list each size once, the smallest first"
            yield PartoptError(what, hint, code="inconsistent-document", path="blocks")


class LayoutBeside(documents.StrictStruct, frozen=True, kw_only=True):
    """A layout that was found beside that of a plan.

    `iteration_s` and `memory_bytes` of the fullest rank are `simulated`, or by the closed form. Of
    the parts of an iteration `part` is the one that differs most in the direction in which the
    whole does, by `part_s` seconds.
    """

    layout: Layout
    iteration_s: Seconds
    simulated: bool
    memory_bytes: Count
    fits: bool
    part: str
    part_s: float


class Modelled(documents.StrictStruct, frozen=True, kw_only=True):
    """What the profile of a plan was computed from: a `model`, and the `practice` of its trainer.

    Samples have `sequence` tokens, products are in `format`; a `calibration` is what was measured
    of a block. The question fixed the parts of the layout that are in `asked`, and `facts` of the
    trainer. `layout` has the degrees that are in the profile, `closed_s` and `closed_bytes` are
    seconds of an iteration and bytes of the fullest rank by the closed form. Of `tried` layouts
    those `beside` it are the next that fit, and some that do not and would be faster; `left_out` is
    one that would be the fastest and is not believed. An iteration takes `freely_s` with blocks
    that are cut freely, where that is less.
    """

    model: Transformer
    sequence: Count
    format: Format
    practice: Practice
    layout: Layout
    asked: Layout = Layout()
    facts: dict[str, str | int | float] = {}
    closed_s: Seconds
    closed_bytes: Count
    calibration: Calibration | msgspec.UnsetType = msgspec.UNSET
    tried: Count = 1
    freely_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    beside: list[LayoutBeside] = []
    left_out: LayoutBeside | msgspec.UnsetType = msgspec.UNSET
