"""A transformer as its configuration states it, and what a trainer does when it runs one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec

from partopt import documents
from partopt.documents.engine import Layout
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.errors import PartoptError

# number format of the blocks' products; mxfp8 and nvfp4 have a scale a block of 32 and of 16
Format = Literal["bfloat16", "float16", "fp8", "mxfp8", "nvfp4"]
BITS: dict[Format, int] = {"bfloat16": 16, "float16": 16, "fp8": 8, "mxfp8": 8, "nvfp4": 4}

Traffic = Annotated[float, msgspec.Meta(ge=0)]
Dispatch = Literal["alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "router", "attention", "full"]  # what is captured of a block
_MOST = 1000  # blocks: published models have up to 126
Pair = tuple[Traffic, Traffic]  # forward and backward
# how blocks are shared out to stages: a way, or those of each stage, `17-20-22m-21`; m are those of
# further tokens, in the last stage by default
Ends = Annotated[
    str,
    msgspec.Meta(pattern=r"^(stage|blocks|layers|fewer|free|[0-9]{1,4}m?(-[0-9]{1,4}m?){1,999})$"),
]

# modules of a block that may save in the host's memory, as Megatron calls them
OFFLOADED = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    *("mlp_norm", "expert_fc1", "moe_act"),
)
_OFFLOADED = f"({'|'.join(OFFLOADED)})"
# products of a block that may have an adapter: into attention and out of it, to the width and back
ADAPTED = ("qkv", "proj", "fc1", "fc2")
_ADAPTED = f"({'|'.join(ADAPTED)})"
_Adapted = Annotated[str, msgspec.Meta(pattern=rf"^{_ADAPTED}(\+{_ADAPTED})*$")]


OTHER_PARTS = "parts beside its text"  # of a model of pictures, which are not planned


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


class Latent(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Attention over compressed keys (DeepSeek-AI, 2024, multi-head latent attention).

    Keys and values are compressed to `keys` numbers, queries to `queries`, 0 where they are not. Of
    a head's queries and keys `rotary` numbers have positions; its values are `values` wide.
    """

    queries: Index = 0
    keys: Count
    rotary: Count
    values: Count


class Tower(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What makes tokens of pictures, of patches of `patch` numbers.

    Its `blocks` are `hidden` wide, their feed-forwards `ffn`, which may be `gated`; there are so
    many `positions`. So many `merged` patches are a token, which `aligner` parameters make of them.
    Patches see those of a picture of `picture` tokens, but in all but `full` blocks a `window` of
    so many, where it has one.
    """

    blocks: Count
    hidden: Count
    ffn: Count
    gated: bool = False
    patch: Count
    merged: Count = 1
    positions: Index = 0
    aligner: Count
    picture: Count = 1024  # where it may be of any size, that of examples of ms-swift
    window: Index = 0
    full: Index = 0

    @property
    def matrices(self) -> int:
        """Weights of a feed-forward."""
        return 3 if self.gated else 2

    @property
    def parameters(self) -> int:
        """All of them, but for norms and biases: 0.1 % and less."""
        inside = self.hidden * (4 * self.hidden + self.matrices * self.ffn)
        return self.blocks * inside + self.hidden * (self.patch + self.positions) + self.aligner

    def seen(self, tokens: int) -> float:
        """Patches that a patch sees in the mean of blocks, where a sample has so many tokens."""
        whole = min(tokens, self.picture) * self.merged
        full = self.full if self.window else self.blocks
        return (full * whole + (self.blocks - full) * min(whole, self.window)) / self.blocks


class Recurrence(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A state that tokens change and read one by one, in place of attention.

    By a `rule`: of `states` (Dao and Gu, 2024, Mamba-2), or a gated `delta` (Yang et al., 2025).
    `heads` have values of `head_size`; `groups` have keys and queries of `keys` numbers. All three
    are convolved over `kernel` tokens. `chunk` tokens are done at once.
    """

    rule: Literal["states", "delta"]
    heads: Count
    head_size: Count
    groups: Count
    keys: Count
    kernel: Count = 4
    chunk: Count

    @property
    def values(self) -> int:
        """Width of the values of all heads: the input of the last product."""
        return self.heads * self.head_size

    @property
    def convolved(self) -> int:
        """Width of values, keys and queries."""
        return self.values + 2 * self.groups * self.keys

    @property
    def joined(self) -> int:
        """Width of the first product's output: those, a gate, and numbers that a head has."""
        return self.convolved + self.values + self.heads * (2 if self.rule == "delta" else 1)

    def parameters(self, hidden: int) -> int:
        """Those between blocks so wide: two products, a convolution, a norm, and those of heads."""
        inside = hidden * (self.joined + self.values) + self.convolved * self.kernel
        if self.rule == "delta":
            return inside + 2 * self.heads + self.head_size
        return inside + self.convolved + 3 * self.heads + self.values  # with a bias


class Indexer(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What takes the `taken` keys that a token attends to (DeepSeek-AI, 2025, sparse attention).

    It has `heads` of `head_size`. The first `first` blocks have one, and every `period`-th behind
    them; those between attend to the same keys as the one before.
    """

    heads: Count
    head_size: Count
    taken: Count
    period: Count = 1
    first: Index = 0

    def is_in(self, block: int) -> bool:
        """Whether that block, of those numbered from 0, has one."""
        return block < self.first or not (block + 1 - self.first) % self.period


# what mixes tokens, and what is done with one by itself; `sparse` attention takes an indexer's keys
Mixer = Literal["attention", "windowed", "indexed", "sparse", "delta", "states", "none"]
Feed = Literal["dense", "experts", "none"]
_MIXERS: dict[Mixer, str] = {
    "attention": "",
    "delta": "gated delta",
    "states": "state space",
    "none": "",
}


class Kind(NamedTuple):
    """A kind of block: a mixer of tokens and a feed-forward, one of which there may not be."""

    mixer: Mixer
    feed: Feed

    @property
    def windowed(self) -> bool:
        """Whether its attention has a window."""
        return self.mixer == "windowed"

    @property
    def experts(self) -> bool:
        """Whether it has experts."""
        return self.feed == "experts"

    @property
    def attends(self) -> bool:
        """Whether its mixer is attention."""
        return self.mixer in ("attention", "windowed", "indexed", "sparse")

    @property
    def is_recurrent(self) -> bool:
        """Whether its mixer is a recurrence."""
        return self.mixer in ("delta", "states")

    @property
    def halves(self) -> int:
        """Those of a block that it has, each with a norm and a residual."""
        return (self.mixer != "none") + (self.feed != "none")

    @property
    def name(self) -> str:
        """In a word or more: `dense`, `windowed experts`, `state space`, `only experts`."""
        if self.mixer == "none":
            return f"only {self.feed}"
        mixer = _MIXERS.get(self.mixer, self.mixer)
        if self.feed == "none":
            return mixer or self.mixer
        return f"{mixer} {self.feed}".lstrip()


# blocks that are half of others, as Megatron writes them in a pattern
LETTERS = {
    "M": Kind("states", "none"),
    "G": Kind("delta", "none"),
    "*": Kind("attention", "none"),
    "-": Kind("none", "dense"),
    "E": Kind("none", "experts"),
}
_Pattern = Annotated[str, msgspec.Meta(pattern=r"^[MG*E-]{0,1000}$")]


class Transformer(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """An embedding of a `vocabulary`, a row of `blocks`, and a head.

    `hidden` is the width between blocks. `heads` of `head_size` numbers attend, `kv_heads` have
    keys and values of their own, or `latent` ones. They see all tokens or a `window` of the last
    ones, or of the `chunked` sequence; every `full_period`-th block sees all. `sinks` are in the
    scores beside tokens. Attention may be `causal`, positions `rotary`, the feed-forward `gated`,
    embedding and head `tied`; there may be `dropout`. Attention is `output_gated` where queries
    have a gate beside, sparse where there is an `indexer`. With a `recurrence` every
    `full_period`-th block attends; or a `pattern` has a letter for each block, half of others.

    `ffn` is the width of a dense feed-forward. The `experts` are `expert_ffn` wide, a token
    takes `experts_per_token`, of `groups` no more than `groups_per_token`, and all tokens one
    `shared_ffn` wide. The first `dense_first` blocks have none of these, and of the others every
    `experts_period`-th has them. Between two products experts may work in another width,
    `expert_hidden`. As many blocks, with head and loss, predict `further` tokens: like the last
    one, or those of a `further_pattern`. A `tower` makes some of the tokens of pictures. `numerics`
    are None where nothing says them.
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
    latent: Latent | None = None
    output_gated: bool = False
    indexer: Indexer | None = None
    recurrence: Recurrence | None = None
    pattern: _Pattern = ""
    window: Index = 0
    chunked: bool = False
    full_period: Index = 0
    sinks: bool = False
    experts: Index = 0
    experts_per_token: Index = 0
    expert_ffn: Index = 0
    expert_hidden: Index = 0
    shared_ffn: Index = 0
    dense_first: Index = 0
    experts_period: Count = 1
    groups: Index = 0
    groups_per_token: Index = 0
    further: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    further_pattern: _Pattern = ""
    tower: Tower | None = None
    numerics: Numerics | None = None

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Heads that groups of keys do not divide, and experts that are not whole."""
        kinds = self.kinds() if self.blocks <= _MOST else []
        dense, latent = any(kind.feed == "dense" for kind in kinds), self.latent
        others = {*self.further_kinds} - {*kinds} if kinds else set()
        rule = self.recurrence.rule if self.recurrence else "none"
        lacking = [kind for kind in kinds if kind.is_recurrent and kind.mixer != rule]
        lacking += [kind for kind in kinds if kind.experts and not self.experts]
        faults = {
            "blocks": (self.blocks > _MOST, f"is more than the {_MOST:,} that can be planned"),
            "kv_heads": (self.heads % self.kv_heads, f"does not divide the {self.heads} heads"),
            "ffn": (dense and not self.ffn, "where there are no experts"),
            "expert_ffn": (
                bool(self.experts) != bool(self.expert_ffn),
                "needs experts, and they it",
            ),
            "experts_per_token": (
                not bool(self.experts) <= self.experts_per_token <= self.experts,
                f"is not between 1 and the {self.experts} experts",
            ),
            "groups": (
                self.groups and (self.experts % self.groups or not self.groups_per_token),
                f"does not divide the {self.experts} experts, or groups_per_token is missing",
            ),
            "head_size": (latent and latent.rotary > self.head_size, "has fewer than are rotary"),
            "pattern": (
                self.pattern and (len(self.pattern) != self.blocks or lacking),
                f"is not of {self.blocks} blocks that the model has",
            ),
            "further_pattern": (others, "has kinds that no block is of"),
        }
        for path, (wrong, what) in faults.items():
            if wrong:
                message = f"{path}: {getattr(self, path)} {what}"
                hint = "check the model's configuration"
                yield PartoptError(message, hint, code="inconsistent-document", path=path)

    def kinds(self) -> list[Kind]:
        """The kind of every block, in order."""
        if self.pattern:
            return [LETTERS[letter] for letter in self.pattern]
        return [Kind(self._mixer(i), self._feed(i)) for i in range(self.blocks)]

    def _mixer(self, i: int) -> Mixer:
        if indexer := self.indexer:
            return "indexed" if indexer.is_in(i) else "sparse"
        sees_all = bool(self.full_period) and not (i + 1) % self.full_period
        if self.recurrence and not sees_all:
            return self.recurrence.rule
        return "windowed" if self.window and not sees_all else "attention"

    def _feed(self, i: int) -> Feed:
        later = i >= self.dense_first and not (i + 1) % self.experts_period
        return "experts" if self.experts and later else "dense"

    @property
    def further_kinds(self) -> list[Kind]:
        """Those of a further token's blocks."""
        if self.further_pattern:
            return [LETTERS[letter] for letter in self.further_pattern]
        return self.kinds()[-1:]

    @property
    def is_unequal(self) -> bool:
        """Whether what is cut into stages are blocks of several kinds, or of further tokens."""
        return bool(self.further) or len({*self.kinds()}) > 1

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Width of the keys."""
        return self.kv_heads * self.head_size

    @property
    def values(self) -> int:
        """Width of what all heads attend to: the input of the projection."""
        return self.heads * (self.latent.values if self.latent else self.head_size)

    @property
    def matrices(self) -> int:
        """Weights of a feed-forward, or of an expert."""
        return 3 if self.gated else 2

    @property
    def queries(self) -> int:
        """Width of what a product makes of queries, with a gate of the output."""
        return self.q * (1 + self.output_gated)

    @property
    def expert_inputs(self) -> int:
        """The width that experts take and give."""
        return self.expert_hidden or self.hidden

    def width(self, kind: Kind) -> int:
        """That of the feed-forward that all tokens take: dense, or shared beside experts."""
        return {"dense": self.ffn, "experts": self.shared_ffn, "none": 0}[kind.feed]

    def expert_parameters(self, kind: Kind) -> int:
        """Those of all experts of a block."""
        return kind.experts * self.experts * self.matrices * self.expert_inputs * self.expert_ffn

    def whole_parameters(self, kind: Kind) -> int:
        """Those of a block that no tensor parallel rank cuts: what compresses, and an indexer."""
        whole = 2 * self.hidden * self.expert_hidden * kind.experts
        if (latent := self.latent) and kind.attends:
            whole += self.hidden * (latent.queries + latent.keys + latent.rotary)
        if (indexer := self.indexer) and kind.mixer == "indexed":
            made = (latent.queries if latent else 0) or self.hidden  # of which its queries are
            whole += indexer.head_size * (indexer.heads * made + self.hidden + 2)
            whole += indexer.heads * self.hidden
        return whole

    def dense_parameters(self, kind: Kind) -> int:
        """Those of a block beside its experts: mixer, feed-forward, router, norms.

        Biases are left out: 0.1 % and less.
        """
        inside = self.matrices * self.width(kind) + self.experts * kind.experts + kind.halves
        return self.whole_parameters(kind) + self.hidden * inside + self._mixing_parameters(kind)

    def _mixing_parameters(self, kind: Kind) -> int:
        """Those of a mixer that tensor parallel ranks cut."""
        if self.recurrence and kind.is_recurrent:
            return self.recurrence.parameters(self.hidden)
        if not kind.attends:
            return 0
        if (latent := self.latent) is None:
            return self.hidden * (self.queries + self.q + 2 * self.kv)
        expanded = (latent.queries or self.hidden) * self.q + latent.queries
        unturned = self.head_size - latent.rotary
        expanded += latent.keys * self.heads * (unturned + latent.values) + latent.keys
        return expanded + self.hidden * self.values

    def block_parameters(self, kind: Kind) -> int:
        """Those of a block."""
        return self.dense_parameters(kind) + self.expert_parameters(kind)

    @property
    def end_parameters(self) -> int:
        """Those of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, but for blocks that predict further tokens."""
        inside = sum(self.block_parameters(kind) for kind in self.kinds())
        return inside + self.end_parameters * (2 - self.tied)

    @property
    def joining_parameters(self) -> int:
        """Those that join a further token's embedding and what is predicted from."""
        return 2 * self.hidden**2


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

    Those of `attention` or `latent` attention, and of one of two `norms`; of a `dense`
    feed-forward; of a `router`, of its `alltoall` or of another `dispatch`, of all `experts`, of
    one `expert` and, with products in 8 bits and fewer, of what it `converts`.
    """

    attention: Traffic = 40
    latent: Traffic = 80
    norms: Traffic = 4
    dense: Traffic = 12
    router: Traffic = 170
    alltoall: Traffic = 120
    dispatch: Traffic = 25
    experts: Traffic = 20
    expert: Traffic = 4.7
    converts: Traffic = 4.9


class Practice(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trainer does when it runs a transformer: facts, each with a source in its file.

    `passes` over memory are counted, and what is `kept` for the backward. `attention` is a kernel
    of the device's file; with `scores` there is none. `joined_queries` and
    `joined_gate`: query, key and value, and gate and up, are one product. `compiled`: one kernel
    sums what several products give. `sequence_parallel` cuts what lies between products over
    tensor parallel ranks, `regathers` gathers their inputs again for the gradients of weights;
    `tp_overlap` says how products hide these exchanges: in the backward alone, beside another
    product; or all, in parts. `sums` are gradients added up within the product, or by autograd;
    `exchange` scatters them, or all-reduces them in float32.

    `sends` between stages are whole, or a part of each tensor parallel rank. `ends` says how blocks
    are shared out to stages: evenly, with the head beside the last ones; with embedding and head a
    block each; with embedding, norm and head a layer each; fewer at the ends where all others have
    as many then; freely, the last device fewer, and unequal blocks by their seconds; or those of
    each stage, as `17-20-22-21`.
    `selective` recomputation makes attention again, or every second product; then `kept_selective`
    remains. `stops_early`: what is made again ends before the block's last product.

    `shard_copies` are bytes a parameter that sharded parameters are copied, beside their gradients;
    `shards` lie over all replicas, or over those in a server. With `fsdp` they may be of gradients
    and parameters, which the engine has not by itself. In `flat_shards` a parameter is in 16 bits
    beside its float32 copy, and its gradient as it is exchanged; two blocks have lasting buffers;
    where gradients alone are shared, parameters are whole all along. `host_shards` are in the
    host's memory, where the optimizer steps them. With `fp8_parameters` those of products have one
    byte, where products are in fp8 with a scale a tensor. `conversion` is bytes an element to fp8.

    Experts' `dispatch` sends a row for every expert of a token; or a copy to every server and rank
    that has some of them (DeepEP, HybridEP), of `dispatch_bytes` an element.
    `dispatch_overlap` hides some of it behind another microbatch. With `fused_experts` activation
    and conversions are in their products. Tokens' `routing` is as they are drawn, forced to be
    balanced, or forced by a capacity, which makes all sizes known.

    The host `launches` the operations of a block, but for those that `graphs` hold: of the router,
    of that and attention, or all. With `muon` matrices are made orthogonal before a step. Of an
    optimizer's state a share, `optimizer_offload`, is in the host's memory, whose processors step
    it; with `offload_overlap` beside the copies of gradients and parameters. What `offload` modules
    save, joined by +, is there until the backward.
    Where `adapters` have a rank they alone are trained, beside the `adapted` products, joined by +
    (LoRA: Hu et al., 2021); with `adapter_dropout` some of their input is dropped. A sample is
    packed of `documents` of so many tokens, which attend within themselves; 0 where it is one. Of
    a sample `images` tokens are of pictures, whose tower is there then, frozen or `tower_trained`.
    `keeps_outputs`: a stage keeps its output. `buffer_bytes` are what the trainer holds beside.
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
    tp_overlap: Literal["none", "backward", "async", "buffers"] = "none"
    sums: Literal["product", "autograd"] = "product"
    exchange: Literal["scatter", "float32"] = "scatter"
    sends: Literal["parts", "whole"] = "parts"
    ends: Ends = "stage"
    selective: Literal["attention", "operations"] = "attention"
    kept_selective: Kept | None = None
    stops_early: bool = False
    shard_copies: Pair = (0, 0)
    shards: Literal["all", "server"] = "all"
    fsdp: bool = False
    flat_shards: bool = True
    fp8_parameters: bool = False
    host_shards: bool = False
    conversion: Traffic = 6
    dispatch: Dispatch = "alltoall"
    dispatch_bytes: Traffic = 2
    dispatch_overlap: bool = False
    fused_experts: bool = False
    routing: Literal["real", "balanced", "capacity"] = "real"
    launches: Launches = Launches()
    graphs: Graphs = "none"
    muon: bool = False
    adapters: Index = 0
    adapted: _Adapted = "+".join(ADAPTED)
    adapter_dropout: bool = False
    documents: Index = 0
    images: Index = 0
    tower_trained: bool = False
    optimizer_offload: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0
    offload_overlap: bool = False
    offload: Annotated[str, msgspec.Meta(pattern=rf"^({_OFFLOADED}(\+{_OFFLOADED})*)?$")] = ""
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

    It is of the `kind` of that name, or of a model of one. A group of `ranks` tensor parallel ranks
    ran it, which had the experts of one of `expert_ranks`. `blocks` are in the order of their
    sizes, from the profile of a model called `name`, with the digest `sha256`.
    """

    name: str
    sha256: str
    kind: str = ""
    ranks: Count = 1
    expert_ranks: Count = 1
    blocks: Annotated[list[MeasuredBlock], msgspec.Meta(min_length=1)]

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Sizes that are not ascending."""
        sizes = [block.microbatch_size for block in self.blocks]
        if sizes != sorted(set(sizes)):
            what = f"blocks: microbatch sizes {sizes} are not ascending"
            hint = "list each size once, the smallest first"
            yield PartoptError(what, hint, code="inconsistent-document", path="blocks")


class Worth(documents.StrictStruct, frozen=True, kw_only=True):
    """What one or more switches of a trainer are worth: the `facts`, `with` which it is searched.

    The best layout then takes `iteration_s` by the closed form, `saved` of that of the best without
    them, where one fits. `flags` are what people write for it. What `changes_numbers` makes
    training compute others; of what is not `verified` no published pair of runs says the worth.
    They come with `graphs` where the plan has others.
    """

    facts: dict[str, str] = msgspec.field(name="with")
    flags: list[str]
    iteration_s: Seconds
    saved: float | msgspec.UnsetType = msgspec.UNSET
    layout: Layout
    changes_numbers: bool
    verified: bool
    graphs: Graphs | msgspec.UnsetType = msgspec.UNSET


class LayoutBeside(documents.StrictStruct, frozen=True, kw_only=True):
    """A layout that was found beside that of a plan.

    `iteration_s` and `memory_bytes` of the fullest rank are `simulated`, or by the closed form. Of
    the parts of an iteration `part` is the one that differs most in the direction in which the
    whole does, by `part_s` seconds. What does not fit may do so with a switch, `fits_with`; a
    `doubt` is why one that fits is not believed.
    """

    layout: Layout
    iteration_s: Seconds
    simulated: bool
    memory_bytes: Count
    fits: bool
    part: str
    part_s: float
    fits_with: Worth | msgspec.UnsetType = msgspec.UNSET
    doubt: str | msgspec.UnsetType = msgspec.UNSET


class Challenger(documents.StrictStruct, frozen=True, kw_only=True):
    """A layout that is worth a try: it may be faster, or needs more than is planned with.

    `iteration_s` and `memory_bytes` are by the closed form, `saved` is of the fastest that fits;
    `fits_chance` is how likely it fits, by the errors of published runs' memory.
    """

    layout: Layout
    iteration_s: Seconds
    saved: float
    memory_bytes: Count
    fits_chance: Annotated[float, msgspec.Meta(ge=0, le=1)]


class PartSeconds(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What a part of a block takes; `scaled` by what was measured, or computed."""

    name: str
    forward_s: float
    backward_s: float
    scaled: bool = False


class MeasuredScale(documents.StrictStruct, frozen=True, kw_only=True):
    """What a measured block has, over what is computed of it.

    `forward` and `backward` are of its seconds, `kept` of the bytes that it keeps.
    """

    forward: float
    backward: float
    kept: float


class BlockParts(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A block of a `kind` on a rank, of a microbatch.

    It is computed, measured, or of a shape that is scaled by what was, with that `scale`. `parts`
    are those that take time, `again_s` are of what it makes again, `products` the columns and rows
    of its weights, `kept_bytes` what it keeps.
    """

    kind: str
    basis: Literal["computed", "scaled", "measured"]
    scale: MeasuredScale | None = None
    parts: list[PartSeconds]
    forward_s: Seconds
    backward_s: Seconds
    again_s: Seconds = 0.0
    products: list[tuple[float, float]]
    kept_bytes: Bytes


class RunErrors(documents.StrictStruct, frozen=True, kw_only=True):
    """How far published `runs` `like` a plan's are from what is computed, of the seconds.

    No constant was fitted to them, but one to those of attention with sinks, and one to some of
    state spaces. `half` are within one
    share, one of a `twentieth` is over the other.
    """

    like: str
    runs: Count
    half: Seconds
    twentieth: Seconds


class ClosedForm(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """What the closed form of an iteration is made of.

    `parts` are its seconds, of which those that are `scaled` are in what was measured of blocks.
    Every one of the `stages` has a letter for what it holds: `E` embedding, `t` a block, `m` a
    further token, `L` head. A rank has so many `tokens` of a microbatch; head, embedding and what
    predicts a further token take `head_s`, `embedding_s` and `further_s` of it. `host_bytes` lie in
    the memory of a server. Products of `odd_widths` take longer than is computed. Published runs
    had these `errors`.
    """

    parts: dict[str, float]
    scaled: list[str] = []
    stages: Annotated[list[str], msgspec.Meta(min_length=1)]
    tokens: Seconds
    head_s: Seconds
    embedding_s: Seconds
    further_s: Seconds = 0.0
    blocks: Annotated[list[BlockParts], msgspec.Meta(min_length=1)]
    host_bytes: Bytes = 0
    odd_widths: bool = False
    errors: RunErrors | None = None


class Modelled(documents.StrictStruct, frozen=True, kw_only=True):
    """What the profile of a plan was computed from: a `model`, and the `practice` of its trainer.

    Samples have `sequence` tokens, products are in `format`; a `calibration` is what was measured
    of a block of a kind. The question fixed the parts of the layout that are in `asked`, and
    `facts` of the trainer, its `dtype` among them. `layout` has the degrees that are in the
    profile, `closed_s` and `closed_bytes` are seconds of an iteration and bytes of the fullest rank
    by the closed `form`.
    Of `tried` layouts those `beside` it are the next that fit, and some that do not and would be
    faster; `left_out` is one that would be the fastest and is not believed. An iteration takes
    `by_count_s` with unequal blocks cut by count. A plan of the simplest layout says by which share
    of its time at most others are faster, the `tie`; and how likely it fits, the `fits_chance`.
    Switches that help have their `levers`, one by one; and all `together`. A `challenger` is worth
    a try.
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
    form: ClosedForm | msgspec.UnsetType = msgspec.UNSET
    calibration: list[Calibration] = []
    tried: Count = 1
    by_count_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    beside: list[LayoutBeside] = []
    tie: Annotated[float, msgspec.Meta(gt=0)] | msgspec.UnsetType = msgspec.UNSET
    fits_chance: Annotated[float, msgspec.Meta(ge=0, le=1)] | msgspec.UnsetType = msgspec.UNSET
    left_out: LayoutBeside | msgspec.UnsetType = msgspec.UNSET
    levers: list[Worth] = []
    together: Worth | msgspec.UnsetType = msgspec.UNSET
    challenger: Challenger | msgspec.UnsetType = msgspec.UNSET
