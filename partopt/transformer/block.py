"""A block on one rank for one microbatch: its seconds, and the bytes that it keeps."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from msgspec import structs

from partopt.documents.engine import Engine
from partopt.documents.transformer import BITS, Calibration, Format, Kind, Practice, Transformer
from partopt.errors import PartoptError, unknown
from partopt.transformer import halves, operations
from partopt.transformer.adapters import SUM, Adapters
from partopt.transformer.experts import Experts
from partopt.transformer.halves import Half, Product
from partopt.transformer.offloading import moved_bytes
from partopt.transformer.pictures import Pictures
from partopt.transformer.rates import COLLECTIVE_S, HOP_S, Rates, Seconds

# of the exchanges of a tensor parallel group, what products that are split hide: torch's, 20 to
# 29 % of the forward pass of its authors; Transformer Engine's, fitted on runs of NeMo on H100
HIDDEN = {"none": 0.0, "backward": 0.0, "async": 0.5, "buffers": 0.7}
# of those that Megatron's backward runs beside another product: fitted on Korthikanti's table 4
UNDER_GRADIENTS = 0.65
# of a tensor that all ranks of a group send whole, what goes through a rank's port: fitted on
# sheets of Hagemann et al., runs with and without sequence parallelism
WHOLE_SENDS = 0.5
GATHERED = 8  # bytes a logit of the copies where all of them are gathered
JOINED = 30  # bytes of passes over a further token's inputs: norms, joined, residual; counted
# fitted on published runs of experts
BESIDE = 1.2  # of the host's time, where it starts two microbatches side by side
GROUPED = 0.75  # of the operations, where experts have a capacity
# bytes a score that attention with sinks takes longer, forward and backward: runs of GPT-OSS in
# Megatron Bridge 26.02 to 26.08, whose kernels differ
SINKS = (3.0, 6.0)
# of convolution, chunks, states and norm of a recurrence over what is counted of them: fitted on
# runs of Nemotron 3 Nano; and the share of a product's rate that products of chunks have, assumed
RECURRENT = 3.0
CHUNKS = 0.4
PICKED = 8  # bytes a score of an indexer, written and read for the keys that are taken; counted

# of a practice, what no block depends on; what nothing in one does that is not of experts; and
# nothing that it keeps
_BESIDE_BLOCKS = ("ends", "optimizer_offload", "offload_overlap", "fsdp")
_BESIDE_HALVES = (
    *(*_BESIDE_BLOCKS, "loss", "graphs", "launches", "offload", "routing", "fused_experts"),
    *("dispatch", "dispatch_bytes", "dispatch_overlap"),
)
_BESIDE_BYTES = (
    *(*_BESIDE_BLOCKS, "loss", "graphs", "launches", "dispatch_bytes", "dispatch_overlap"),
    *("fused_experts", "conversion", "passes", "tp_overlap", "sums", "buffer_bytes"),
)
_BESIDE_LAYOUTS = ("loss", "conversion", "fp8_parameters")  # and on what no layout does

Recomputed = Literal["never", "selective", "always"]


class Shape(NamedTuple):
    """What a block's seconds depend on beside its kind and its `Training`.

    With `fsdp` its parameters lie in shares on several ranks, and are gathered for it. Of selective
    recomputation there may be `modules`; the `offload` are those whose tensors go to the host.
    """

    b: int = 1
    t: int = 1
    c: int = 1
    e: int = 1
    recompute: Recomputed = "never"
    fsdp: bool = False
    etp: int = 1
    modules: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @property
    def plain(self) -> Shape:
        """The same where nothing is made again, or copied to the host."""
        return self._replace(recompute="never", modules=(), offload=())


class Parameters(NamedTuple):
    """Of a block on a rank: those beside its experts, and theirs."""

    dense: float
    experts: float


class Block(NamedTuple):
    """Seconds of a block, `again_s` of what it makes again, and the bytes that it keeps.

    `whole_bytes` it has while it is made again. `parts` are what its forward and backward are
    made of. Head and embedding of the same shape take `head_s` and `embedding_s`. It has so many
    `parameters` on a rank, and `copied_bytes` in the host's memory.
    """

    forward_s: float
    backward_s: float
    again_s: float
    saved_bytes: float
    whole_bytes: float
    parts: Mapping[str, Seconds]
    head_s: float
    embedding_s: float
    parameters: Parameters
    trained: Parameters
    copied_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """All of a microbatch."""
        return self.forward_s + self.backward_s + self.again_s


class Scale(NamedTuple):
    """What a measured block has, over what is computed of it: seconds, and bytes kept."""

    forward: float = 1.0
    backward: float = 1.0
    kept: float = 1.0

    def of(self, computed: Seconds) -> Seconds:
        """Seconds that are computed as they are measured."""
        return Seconds(self.forward * computed.forward, self.backward * computed.backward)


@dataclass(frozen=True)
class Memo:
    """What is computed so far, by shape: blocks of kinds, their mean, further tokens, pictures.

    Of blocks the parts that are not of experts, and what makes them again; experts by what they
    depend on. Cuts, numbers of `Columns`, and layouts by question.
    """

    blocks: dict[Shape, Mapping[Kind, Block]] = field(default_factory=dict)
    means: dict[Shape, Block] = field(default_factory=dict)
    further: dict[Shape, Seconds] = field(default_factory=dict)
    pictures: dict[Shape, Seconds] = field(default_factory=dict)
    cuts: dict[tuple[object, ...], Sequence[Any]] = field(default_factory=dict)
    halves: dict[tuple[Shape, Kind], Mapping[str, Seconds]] = field(default_factory=dict)
    again: dict[tuple[Shape, Kind, str], float] = field(default_factory=dict)
    experts: dict[tuple[float, int, int], Experts] = field(default_factory=dict)
    heads: dict[Shape, float] = field(default_factory=dict)
    spare_bytes: dict[Shape, float] = field(default_factory=dict)
    saved_bytes: dict[tuple[Shape, Kind], float] = field(default_factory=dict)
    columns: dict[tuple[object, ...], dict[Shape, Sequence[float]]] = field(default_factory=dict)
    layouts: dict[tuple[object, ...], Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A transformer that a trainer trains on some device: all but the layout.

    With a `calibration` blocks of its kind take what was measured of them, of other shapes in
    proportion. Blocks are cut as the practice does, or in one of the `other_ends` where a layout is
    faster so and needs no more than `room` bytes. What was computed is kept in a `memo`.
    Tensor parallel ranks may outnumber heads of keys where the trainer `repeats_keys`, stages have
    one of embedding and head that share a weight where it `parts_ties`, and context parallel ranks
    share recurrences where it `spreads_recurrences`. Raises PartoptError for a number format, an
    attention or a way to the host's memory that the device is not known to have.
    """

    model: Transformer
    sequence: int
    format: Format
    practice: Practice
    engine: Engine
    rates: Rates
    calibration: Sequence[Calibration] = ()
    repeats_keys: bool = True
    parts_ties: bool = True
    spreads_recurrences: bool = True
    other_ends: Sequence[str] = ()
    room: float = math.inf
    _shared: dict[tuple[object, ...], Memo] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        formats = [*self.rates.products]
        formats += ["mxfp8"] * ("nvfp4" in formats)  # both have a scale a block, from Blackwell on
        known: list[tuple[str, Iterable[str]]] = [
            (self.format, formats),
            (self.wide, self.rates.products),
        ]
        if self.practice.scores is None:
            known.append((self.practice.attention, self.rates.attention))
            known.append(("float16", self.rates.peaks))
        if self.practice.optimizer_offload and not self.rates.host_memory * self.rates.host_link:
            raise PartoptError(
                f"{self.rates.device}: its way to the host's memory is not known",
                "leave `optimizer-offload` out",
                code="unknown-rates",
            )
        if self.practice.offload:
            known.append(("offload", ["offload"] if self.rates.host_link else []))
        if self.practice.adapters and (self.model.recurrence or self.model.indexer):
            raise PartoptError(
                f"{self.model.name}: adapters beside a recurrence or an indexer are not planned",
                "leave `lora` out",
                code="unsupported-model",
            )
        for name, names in known:
            if name not in names:
                raise unknown(
                    f"{self.rates.device}: what {name} achieves on it is not known",
                    name,
                    names,
                    code="unknown-rates",
                )
        if self.practice.host_shards and not (self.rates.host_link and self.rates.host_memory):
            raise PartoptError(
                f"{self.rates.device}: what copies to its host's memory reach is not known",
                "leave `cpu-offload=yes` out",
                code="unknown-rates",
            )

    def having(self, practice: Practice, engine: Engine, format: Format) -> Training:
        """The same with another practice, engine and number format."""
        same = practice.ends == self.practice.ends
        ends = self.other_ends if same else ()
        other = replace(self, practice=practice, engine=engine, format=format, other_ends=ends)
        other.share_blocks(self)
        return other

    def cut_by(self, ends: str) -> Training:
        """The same with blocks that are shared out so, and in no other way."""
        practice = structs.replace(self.practice, ends=ends)
        other = replace(self, practice=practice, other_ends=())
        other.share_blocks(self)
        return other

    @cached_property
    def as_cut(self) -> Sequence[Training]:
        """The same, cut in every way that is open, as the practice does first."""
        return [self, *map(self.cut_by, self.other_ends)]

    def share_blocks(self, other: Training) -> None:
        """Share what is computed with `other` and all that shares it, where nothing differs for it.

        Of the sizes of levels blocks know that of a server, which is among the rates.
        """
        alike = replace(
            other,
            practice=self.practice,
            engine=self.engine,
            format=self.format,
            rates=replace(other.rates, sizes=self.rates.sizes),
            other_ends=self.other_ends,
            room=self.room,
        )
        if alike == self:
            object.__setattr__(self, "_shared", other._shared)

    @cached_property
    def memo(self) -> Memo:
        """What is known of all trainings with such blocks that share it."""
        return self._memo_but_for(_BESIDE_BLOCKS, self.format, self.gradient_bytes)

    @cached_property
    def _of_halves(self) -> Memo:
        """What is known of all trainings whose blocks are alike but for experts."""
        return self._memo_but_for(_BESIDE_HALVES, self.format, self.gradient_bytes)

    @cached_property
    def _kept(self) -> dict[tuple[Shape, Kind], float]:
        """Bytes that blocks keep, of all trainings in which they keep as much."""
        return self._memo_but_for(_BESIDE_BYTES, self.format).saved_bytes

    @cached_property
    def layouts(self) -> dict[tuple[object, ...], Any]:
        """Layouts of questions, of all that can have the same."""
        return self._memo_but_for(_BESIDE_LAYOUTS).layouts

    def _memo_but_for(self, beside: Sequence[str], *same: object) -> Memo:
        """What is known of trainings that differ in these parts of the practice alone."""
        practice = structs.replace(self.practice, **dict.fromkeys(beside))
        return self._shared.setdefault((practice, *same), Memo())

    @cached_property
    def adapters(self) -> Adapters | None:
        """What alone is trained, where that is not all."""
        return Adapters(self.practice, self.rates, self.wide) if self.practice.adapters else None

    @cached_property
    def pictures(self) -> Pictures | None:
        """What reads pictures, where samples have some."""
        tower, practice = self.model.tower, self.practice
        if not (tower and practice.images):
            return None
        return Pictures(tower, self.model, practice, self.rates, self.wide)

    @property
    def trained_ends(self) -> int:
        """Parameters of the embedding, or of the head, that are trained."""
        return 0 if self.adapters else self.model.end_parameters

    @property
    def wide(self) -> Format:
        """The format of products that are never in 8 bits: the head's, those of scores."""
        return "float16" if self.format == "float16" else "bfloat16"

    @cached_property
    def gradient_bytes(self) -> int:
        """Of a gradient as it is kept, and exchanged."""
        return 4 if self.engine.gradients == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """Of a parameter of a product where it is whole, as it is kept and gathered."""
        narrow = self.practice.fp8_parameters and self.format == "fp8" and not self.adapters
        return 1 if narrow else 2

    @property
    def document(self) -> int:
        """Tokens that attend to none but themselves: a sample, or one of its documents."""
        return min(self.sequence, self.practice.documents or self.sequence)

    def tokens(self, shape: Shape) -> float:
        """T."""
        return shape.b * self.sequence / shape.c

    def share(self, shape: Shape) -> int:
        """Ranks over which what lies between products is cut."""
        return shape.t if self.practice.sequence_parallel else 1

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every block."""
        return tuple(self.model.kinds())

    @cached_property
    def further_kinds(self) -> tuple[Kind, ...]:
        """The kinds of a further token's blocks."""
        return tuple(self.model.further_kinds)

    @cached_property
    def counts(self) -> Mapping[Kind, int]:
        """Blocks of every kind that the model has."""
        return Counter(self.kinds)

    @cached_property
    def is_unequal(self) -> bool:
        """Whether blocks of the model are, or pictures are read before the first."""
        return self.model.is_unequal or self.pictures is not None

    def parameters(self, shape: Shape, kind: Kind | None = None) -> Parameters:
        """Those of a block on a rank, gathered if they lie in shares."""
        cut, whole, experts = self._parameters[kind or self.kinds[-1]]
        return Parameters(cut / shape.t + whole, experts / (shape.e * shape.etp))

    @cached_property
    def _parameters(self) -> Mapping[Kind, tuple[int, int, int]]:
        """Of a block of every kind: those that tensor parallel ranks cut, others, and experts'."""
        model, found = self.model, dict[Kind, tuple[int, int, int]]()
        for kind in self.counts:
            whole = model.whole_parameters(kind)
            cut = model.dense_parameters(kind) - whole
            found[kind] = cut, whole, model.expert_parameters(kind)
        return found

    def blocks(self, shape: Shape) -> Mapping[Kind, Block]:
        """A block of every kind, as `counts` has them; looked up where they were asked for."""
        if (found := self.memo.blocks.get(shape)) is None:
            found = {kind: self._block(shape, kind) for kind in self.counts}
            self.memo.blocks[shape] = found
        return found

    def block(self, shape: Shape, kind: Kind | None = None) -> Block:
        """A block of a kind, by default the last one's."""
        return self.blocks(shape)[kind or self.kinds[-1]]

    def mean(self, shape: Shape) -> Block:
        """A block in the mean of kinds; what it has while it is made again is of the largest."""
        if (found := self.memo.means.get(shape)) is None:
            found = self.memo.means[shape] = self._mean(shape)
        return found

    def mean_of(self, rows: Iterable[Sequence[float]]) -> Sequence[float]:
        """The mean of numbers of blocks, a row for every kind."""
        if len(self.counts) == 1:
            return next(iter(rows))
        counts, L = self.counts.values(), self.model.blocks
        return [sum(map(operator.mul, values, counts)) / L for values in zip(*rows, strict=True)]

    def _mean(self, shape: Shape) -> Block:
        if len(self.counts) == 1:
            return self.block(shape)
        mean, blocks = self.mean_of, [*self.blocks(shape).values()]
        none, names = Seconds(0.0, 0.0), dict.fromkeys(name for b in blocks for name in b.parts)
        forward_s, backward_s, again_s, saved_bytes = mean(block[:4] for block in blocks)
        (copied_bytes,) = mean([block.copied_bytes] for block in blocks)
        return blocks[0]._replace(
            forward_s=forward_s,
            backward_s=backward_s,
            again_s=again_s,
            saved_bytes=saved_bytes,
            whole_bytes=max(block.whole_bytes for block in blocks),
            parts={name: Seconds(*mean(b.parts.get(name, none) for b in blocks)) for name in names},
            parameters=Parameters(*mean(block.parameters for block in blocks)),
            copied_bytes=copied_bytes,
            trained=Parameters(*mean(block.trained for block in blocks)),
        )

    def calibration_of(self, kind: Kind) -> Calibration | None:
        """What was measured of blocks of a kind."""
        return next((found for found in self.calibration if found.kind in ("", kind.name)), None)

    def is_measured(self, shape: Shape, kind: Kind) -> bool:
        """Whether a block of this shape is one of those that were measured."""
        calibration = self.calibration_of(kind)
        return calibration is not None and shape._replace(recompute="never") in [
            Shape(block.microbatch_size, calibration.ranks, e=calibration.expert_ranks)
            for block in calibration.blocks
        ]

    def is_scaled(self, part: str, kind: Kind) -> bool:
        """Whether a `part` of blocks is in what was measured; what one rank exchanges is not."""
        calibration = self.calibration_of(kind)
        if calibration is None or part in ("context", "exchange"):
            return False
        return part != "tensor" or calibration.ranks > 1

    @cached_property
    def _scales(self) -> Mapping[Kind, Mapping[int, Scale]]:
        """By samples of a microbatch, what blocks of a kind have over what is computed of them."""
        scales = dict[Kind, dict[int, Scale]]()
        for kind in self.counts:
            scales[kind] = {}
            calibration = self.calibration_of(kind)
            for block in calibration.blocks if calibration else ():
                assert calibration
                shape = Shape(block.microbatch_size, calibration.ranks, e=calibration.expert_ranks)
                inside = self._inside(shape, kind)
                computed = _sum(s for part, s in inside.items() if self.is_scaled(part, kind))
                kept = block.kept_bytes / self._saved_bytes(shape, kind)
                scales[kind][shape.b] = Scale(
                    block.forward_s / computed.forward,
                    block.backward_s / computed.backward,
                    kept or 1.0,
                )
        return scales

    def scale(self, shape: Shape, kind: Kind) -> Scale:
        """That of the measured size with as many tokens; between two in proportion, else the end's.

        Other degrees have the same: what kernels achieve depends on tokens more than on widths.
        """
        known, size = self._scales[kind], shape.b / shape.c
        if not known:
            return Scale()
        below = max((b for b in known if b <= size), default=min(known))
        above = min((b for b in known if b >= size), default=max(known))
        along = (size - below) / (above - below) if above > below else 0.0
        pairs = zip(known[below], known[above], strict=True)
        return Scale(*(low + along * (high - low) for low, high in pairs))

    def _mixer(self, shape: Shape, kind: Kind) -> Half:
        return halves.mixer(self.model, self.practice, shape.t, self.share(shape), kind)

    def _feed_forward(self, shape: Shape, kind: Kind) -> Half:
        return halves.feed_forward(self.model, self.practice, shape.t, self.share(shape), kind)

    def experts(self, shape: Shape) -> Experts:
        """The experts of a block that has some."""
        tokens = self.tokens(shape) / self.share(shape)
        key = tokens, shape.e, shape.etp
        if (found := self.memo.experts.get(key)) is None:
            found = self.memo.experts[key] = Experts(
                model=self.model,
                practice=self.practice,
                rates=self.rates,
                format=self.format,
                conversion=self._conversion,
                gradient_bytes=self.gradient_bytes,
                adapters=self.adapters,
                e=shape.e,
                etp=shape.etp,
                tokens=tokens,
            )
        return found

    def _inside(self, shape: Shape, kind: Kind) -> dict[str, Seconds]:
        """The parts that are in a block's module, computed; whatever is made again or copied."""
        key = self._beside_experts(shape), kind
        if (found := self._of_halves.halves.get(key)) is None:
            found = self._of_halves.halves[key] = self._inside_halves(*key)
        return {**found, **({"experts": self.experts(shape).work_s} if kind.experts else {})}

    def _beside_experts(self, shape: Shape) -> Shape:
        """The shape as far as parts that are not of experts depend on it."""
        if shape.fsdp or self.practice.sums == "autograd":  # passes over weights of experts, too
            return shape.plain
        return Shape(shape.b, shape.t, shape.c)

    def _inside_halves(self, shape: Shape, kind: Kind) -> Mapping[str, Seconds]:
        return {
            "products": _sum(self._linear_s(shape, p) for p in self.products(shape, kind)),
            "attention": self._attention_s(shape, kind),
            "passes": self._passes_s(shape, kind),
            "tensor": self._tensor_s(shape, kind),
            **({"recurrence": self._recurrence_s(shape)} if kind.is_recurrent else {}),
        }

    def _block(self, shape: Shape, kind: Kind) -> Block:
        parts = self._inside(shape, kind)
        if self.calibration:
            scale = self.scale(shape, kind)
            exchanged = scale if self.is_scaled("tensor", kind) else Scale()
            parts = {
                name: (exchanged if name == "tensor" else scale).of(seconds)
                for name, seconds in parts.items()
            }
        if shape.c > 1:
            parts["context"] = self._context_s(shape, kind, parts["attention"])
        work_s = _sum(parts.values())
        again_s = self._again_s(shape, kind, work_s.forward, parts["attention"].forward)
        if kind.experts:
            exchange_s = self.experts(shape).shown_s(sum(work_s) + again_s)
            parts["exchange"] = Seconds(exchange_s, exchange_s)
        if any(launches_s := self._launches_s(shape, kind, _sum(parts.values()), again_s)):
            parts["launches"] = launches_s
        copied_bytes = moved_bytes(self, shape, kind)[1] if shape.offload else 0.0
        if copied_bytes:
            parts["offload"] = self._copied_s(copied_bytes, _sum(parts.values()), again_s)
        forward_s, backward_s = _sum(parts.values())
        return Block(
            forward_s,
            backward_s,
            again_s,
            self.saved_bytes(shape, kind),
            self.saved_bytes(shape.plain, kind),
            parts,
            self.head_s(shape),
            self.embedding_s(shape),
            self.parameters(shape, kind),
            self.trained_parameters(shape, kind),
            copied_bytes,
        )

    def _copied_s(self, size: float, work_s: Seconds, again_s: float) -> Seconds:
        """What copies to the host show beyond a forward, and those back beyond its backward.

        Copy engines make them: what is hidden takes of the memory's bandwidth alone.
        """
        copy_s, passed_s = size / self.rates.host_link, self.rates.passes_s(size)
        windows = work_s.forward, work_s.backward + again_s
        return Seconds(*(max(passed_s, copy_s - window_s) for window_s in windows))

    def _again_s(self, shape: Shape, kind: Kind, forward_s: float, attention_s: float) -> float:
        """What is made again, of a forward without its exchanges and of its attention."""
        practice, scale = self.practice, self.scale(shape, kind)
        exchanged = scale if self.is_scaled("tensor", kind) else Scale()
        if shape.recompute == "always":
            if kind.experts:
                experts = self.experts(shape)
                forward_s += experts.both_s
            if not practice.stops_early:
                return forward_s
            products = self.products(shape, kind)
            last_s = self._linear_s(shape, products[-1]).forward
            scatter_s = self._scatter_s(shape) * self._shown
            return forward_s - scale.forward * last_s - exchanged.forward * scatter_s
        if shape.recompute == "selective" and shape.modules:
            return sum(self._module_s(name, shape, kind, attention_s) for name in shape.modules)
        if self._makes_operations(shape):
            made_s = self._remade_s(shape, kind)
            return scale.forward * made_s + exchanged.forward * self._regathered_s(shape, kind)
        return attention_s if shape.recompute == "selective" and practice.scores else 0.0

    def _module_s(self, name: str, shape: Shape, kind: Kind, attention_s: float) -> float:
        """What making a module again takes, by its name in `partopt.documents.engine.MODULES`."""
        if name == "core_attn":
            return attention_s
        key, known = (self._beside_experts(shape), kind, name), self._of_halves.again
        if (made_s := known.get(key)) is None:
            made_s = known[key] = self._module_beside_experts_s(name, shape, kind)
        scale = self.scale(shape, kind).forward
        if name == "mlp" and kind.feed == "dense":  # and what its group exchanges
            exchanged = scale if self.is_scaled("tensor", kind) else 1.0
            tensor_s = self._inside(shape, kind)["tensor"].forward / self._pairs(kind)
            return scale * made_s + exchanged * tensor_s
        if name == "moe_act" and kind.experts:
            made_s = self.experts(shape).activation_s.forward
        elif name == "moe" and kind.experts:
            experts = self.experts(shape)
            made_s += experts.work_s.forward
            made_s += experts.both_s
        return scale * made_s

    def _module_beside_experts_s(self, name: str, shape: Shape, kind: Kind) -> float:
        """The same without experts, and without exchanges."""
        T, attention, feed = self.tokens(shape), *self._halves(shape, kind)
        if name == "mla_up_proj":
            expansion = attention.products[attention.expansion]
            products_s = sum(self._linear_s(shape, product).forward for product in expansion)
            return products_s + self.rates.passes_s(T * attention.turned)
        norm = self.practice.passes.norms[0] / 2 * self.model.hidden / self.share(shape)
        if name == "layernorm":  # others are in the product behind them (gpt_layer_specs.py)
            apart = (self.model.latent is not None and kind.attends) + kind.experts
            return self.rates.passes_s(T * norm * apart)
        of_feed = name == ("shared_experts" if kind.experts else "mlp") or name == "moe"
        made_s = self._half_s(shape, feed) if of_feed and (kind.experts or name == "mlp") else 0.0
        if name == "mlp" and kind.feed == "dense":
            made_s += self.rates.passes_s(T * norm)
        return made_s

    def _half_s(self, shape: Shape, half: Half) -> float:
        """The forward of a half's products and of passes inside it."""
        products_s = sum(self._linear_s(shape, product).forward for product in half.products)
        size = half.passed[0]
        if BITS[self.format] < 16:
            inputs = half.inputs * self.model.hidden / self.share(shape)
            size += self._conversion * (half.converted[0] + inputs)
        return products_s + self.rates.passes_s(self.tokens(shape) * size)

    def _launches_s(self, shape: Shape, kind: Kind, device_s: Seconds, again_s: float) -> Seconds:
        """What the host takes longer to start a block than the device to run it.

        Where a block was measured, that is in it. With a capacity no counts are waited for, and one
        kernel is of all experts. Beside another microbatch it is both directions that wait.
        """
        model, practice = self.model, self.practice
        launches, graphs = practice.launches, practice.graphs
        if self.calibration_of(kind) or graphs == "full":
            return Seconds(0.0, 0.0)
        latent = model.latent is not None and kind.attends
        attention = launches.latent if latent else launches.attention
        expanding = attention * ("mla_up_proj" in shape.modules and latent)
        attention += launches.norms + expanding
        attention *= kind.mixer != "none"
        feed, router = launches.dense * bool(model.width(kind)), 0.0
        feed += launches.norms * (kind.feed != "none")
        if kind.experts:
            router, feed = launches.router + feed, self.experts(shape).launches
        held = {"none": 0.0, "router": router, "attention": router + attention}[graphs]
        share = GROUPED if kind.experts and practice.routing == "capacity" else 1.0
        forward_s = (attention + router + feed - held) * share * self.rates.launch
        backward_s = forward_s * (3 if shape.recompute == "always" else 2)
        if self._overlaps(shape, kind):
            late_s = BESIDE * (forward_s + backward_s) - sum(device_s) - again_s
            return Seconds(max(0.0, late_s) / 3, max(0.0, late_s) * 2 / 3)
        return Seconds(
            max(0.0, forward_s - device_s.forward),
            max(0.0, backward_s - device_s.backward - again_s),
        )

    def _overlaps(self, shape: Shape, kind: Kind) -> bool:
        """Whether exchanges of experts are hidden behind another microbatch."""
        return self.practice.dispatch_overlap and kind.experts and shape.e * shape.etp > 1

    def products(self, shape: Shape, kind: Kind | None = None) -> list[Product]:
        """The products of attention and feed-forward, in their order."""
        both = self._halves(shape, kind or self.kinds[-1])
        return [product for half in both for product in half.products]

    def _linear_s(self, shape: Shape, product: Product) -> Seconds:
        tokens = self.tokens(shape) * product.tokens
        if self.adapters:
            return self.adapters.linear_s(product, tokens, self.format)
        return self.rates.linear_s(tokens, product.n, product.k, self.format, self._grad_out(shape))

    def frozen(self, shape: Shape, kind: Kind) -> float:
        """Parameters of a block on a rank that are not trained: none, or all beside adapters."""
        return sum(self.parameters(shape, kind)) if self.adapters else 0.0

    def trained_parameters(self, shape: Shape, kind: Kind) -> Parameters:
        """Parameters of a block on a rank that are trained: all, or its adapters'."""
        if not (adapters := self.adapters):
            return self.parameters(shape, kind)
        experts = adapters.parameters_of_experts(self.model) / shape.e if kind.experts else 0.0
        return Parameters(adapters.parameters(self.products(shape, kind)), experts)

    def _grad_out(self, shape: Shape) -> tuple[float, float]:
        """Bytes an element of a weight's gradient: written, and read where it is added to one."""
        if self.practice.sums == "product" and not shape.fsdp:
            return self.gradient_bytes, self.gradient_bytes
        return 2.0, 0.0

    def _attention_s(self, shape: Shape, kind: Kind) -> Seconds:
        """Half of the scores where a kernel skips what is masked; else all, with a softmax.

        A kernel skips those between documents, too.

        A row of a window sees as many keys as one of a sequence of twice its width does in the
        mean.
        """
        model, rates, scores, s = self.model, self.rates, self.practice.scores, self.sequence
        if not kind.attends:
            return Seconds(0.0, 0.0)
        if scores is None:
            widths, s = model.q + model.values, self.document
            samples = shape.b * self.sequence / s / (shape.t * shape.c)
            flops = 2 * samples * operations.scores(model, s, kind) * widths
            seen = min(s, 2 * operations.keys_seen(model, s, kind))
            latent = model.latent is not None
            kernel_s = rates.attention_s(self.practice.attention, flops, seen / shape.c, latent)
            pairs = samples * model.heads * s * s * model.sinks
            sinks_s = Seconds(*(rates.passes_s(n * pairs) for n in SINKS))
            chosen_s = self._indexer_s(samples * shape.t) if kind.mixer == "indexed" else sinks_s
            return _sum([kernel_s, chosen_s])
        heads, d, rows = shape.b * model.heads / shape.t, model.head_size, s / shape.c
        both_s = rates.product_s(rows, s, d, self.wide) + rates.product_s(rows, d, s, self.wide)
        return Seconds(
            heads * (both_s + rates.passes_s(rows * s * scores.forward)),
            heads * (2 * both_s + rates.passes_s(rows * s * scores.backward)),
        )

    def _indexer_s(self, samples: float) -> Seconds:
        """The scores of an indexer on all keys, whole on every tensor parallel rank, and its pick.

        It learns from the scores of attention, so that its gradients are made in any case.
        """
        indexer, s, rates = self.model.indexer, self.document, self.rates
        assert indexer
        pairs = samples * s * s / (2 if self.model.causal else 1)
        product_s = rates.arithmetic_s(pairs, indexer.heads, indexer.head_size, self.wide)
        passes_s = rates.passes_s(PICKED * pairs)
        return Seconds(product_s + passes_s, 2 * product_s + passes_s)

    def _recurrence_s(self, shape: Shape) -> Seconds:
        """A convolution, the products of chunks, what is written of states, and a gated norm.

        A delta's keys are repeated for every head, and its chunks solve a triangle beside.
        """
        state, rates, T = self.model.recurrence, self.rates, self.tokens(shape) / shape.t
        assert state
        d, N, Q, is_delta = state.values, state.keys, state.chunk, state.rule == "delta"
        wide = (state.heads if is_delta else state.groups) * N
        convolved, normal = 4 * state.convolved, 6 * d
        scanned = 2 * (2 * d + 2 * wide) + 2 * d + 12 * d * N / Q
        products = Q * wide + Q * d + 2 * N * d
        if is_delta:
            products += Q * (wide + d + state.heads * Q) + N * d
        product_s = T * products * rates.arithmetic_s(1, 1, 1, self.wide) / CHUNKS
        forward_s = rates.passes_s(T * (convolved + scanned + normal)) + product_s
        backward_s = rates.passes_s(T * (3 * convolved + 2.5 * scanned + 2 * normal))
        return Seconds(RECURRENT * forward_s, RECURRENT * (backward_s + 2.5 * product_s))

    def _passes_s(self, shape: Shape, kind: Kind) -> Seconds:
        """Passes over memory: norms to activation, conversions to fewer bits, sums, copies."""
        sizes = (self._passed_bytes(shape, kind, way) for way in (0, 1))
        return Seconds(*map(self.rates.passes_s, sizes))

    def _passed_bytes(self, shape: Shape, kind: Kind, way: int) -> float:
        """Bytes of a block's passes, forward (0) or backward (1)."""
        model, practice, passes, t = self.model, self.practice, self.practice.passes, shape.t
        T, h, both = self.tokens(shape), model.hidden, self._halves(shape, kind)
        over_h = h * (passes.norms[way] + passes.residuals[way])
        over_h += h * passes.dropout[way] * model.dropout
        over_h *= kind.halves / 2
        inside = sum(half.passed[way] for half in both)
        if BITS[self.format] < 16:
            over_h += self._conversion * (0 if way else h * sum(half.inputs for half in both))
            inside += self._conversion * sum(half.converted[way] for half in both)
        size = T * (over_h / self.share(shape) + inside)
        parameters = sum(self.parameters(shape, kind))
        if way:  # gradients of the input of products that are apart, at full width
            apart = 2 * (not practice.joined_queries and kind.attends)
            apart += bool(model.width(kind)) and model.gated and not practice.joined_gate
            size += SUM * T * h * (min(apart, 1) if practice.compiled and t == 1 else apart)
        if shape.fsdp:
            size += parameters * practice.shard_copies[way]
            size += parameters * (2 + self.gradient_bytes) * way
        elif way and practice.sums == "autograd":
            size += parameters * (2 + 2 * self.gradient_bytes)
        return size

    def _halves(self, shape: Shape, kind: Kind) -> tuple[Half, Half]:
        return self._mixer(shape, kind), self._feed_forward(shape, kind)

    @cached_property
    def _conversion(self) -> float:
        """Bytes an element of conversions to the products' format.

        The trainer's to fp8; with a scale a block no maximum goes first; of nvfp4 there are
        two maxima and a turned copy.
        """
        return {"mxfp8": 4.0, "nvfp4": 11.0}.get(self.format, self.practice.conversion)

    def _gather_s(self, shape: Shape) -> float:
        size = self.tokens(shape) * self.model.hidden * BITS[self.format] / 8
        return self.rates.replicas_s(size, shape.t)

    def _scatter_s(self, shape: Shape) -> float:
        return self.rates.replicas_s(self.tokens(shape) * self.model.hidden * 2, shape.t)

    @property
    def _shown(self) -> float:
        """The share of exchanges of a tensor parallel group that products do not hide."""
        return 1 - HIDDEN[self.practice.tp_overlap]

    def _tensor_s(self, shape: Shape, kind: Kind) -> Seconds:
        """What a tensor parallel group exchanges, in attention and in the feed-forward.

        Backward of a product whose input was gathered: a gather of it again, which may run under
        the product of the input's gradient, and a scatter of that, under the weight's. Without
        sequence parallelism an all-reduce is in the scatter's place.
        """
        if shape.t == 1:
            return Seconds(0.0, 0.0)
        practice, pairs = self.practice, self._pairs(kind)
        # what split products exchange starts by itself
        start_s = 0.0 if HIDDEN[practice.tp_overlap] else COLLECTIVE_S
        gather_s, scatter_s = self._gather_s(shape) + start_s, self._scatter_s(shape) + start_s
        if practice.sequence_parallel:
            beside_s = pairs * (scatter_s + gather_s * practice.regathers)
            forward_s, backward_s = pairs * (gather_s + scatter_s), pairs * gather_s + beside_s
        else:
            reduce_s = 2 * scatter_s - start_s
            apart = self.model.gated and not practice.joined_gate and self.model.width(kind) > 0
            forward_s, backward_s = pairs * reduce_s, (pairs + apart) * reduce_s
            beside_s = backward_s
        if practice.tp_overlap == "backward":
            backward_s -= UNDER_GRADIENTS * beside_s
        return Seconds(forward_s * self._shown, backward_s * self._shown)

    def _pairs(self, kind: Kind) -> int:
        """Halves whose inputs a tensor parallel group gathers: a mixer, and a feed-forward."""
        return (kind.mixer != "none") + bool(self.model.width(kind))

    def _makes_operations(self, shape: Shape) -> bool:
        """Whether operations of a block are made again, and none of its modules."""
        selective = shape.recompute == "selective" and not shape.modules
        return selective and self.practice.selective == "operations"

    def _remade_s(self, shape: Shape, kind: Kind) -> float:
        """What is made again where some operations are: products, all passes but the last.

        All of the experts: no policy names grouped products, nor their passes.
        """
        products = self.products(shape, kind)
        products_s = sum(
            self._linear_s(shape, product).forward * product.again for product in products
        )
        last = self.practice.passes.residuals[0] / 2
        last_s = self.rates.passes_s(self.tokens(shape) * self.model.hidden * last)
        if kind.experts:
            products_s += self.experts(shape).work_s.forward
        return products_s + self._passes_s(shape, kind).forward - last_s / self.share(shape)

    def _regathered_s(self, shape: Shape, kind: Kind) -> float:
        """The gathers that are made again there."""
        return self._pairs(kind) * self._gather_s(shape) * self._shown

    def _context_s(self, shape: Shape, kind: Kind, attention_s: Seconds) -> Seconds:
        """Keys and values go round c ranks, behind the attention of those that have come.

        A recurrence has all tokens of a part of its heads: two exchanges, which nothing hides.
        """
        t, c, rates = shape.t, shape.c, self.rates
        rate = rates.message_rate(rates.server, t * c)
        if (state := self.model.recurrence) and kind.is_recurrent:
            sent = 2 * self.tokens(shape) * (state.joined + state.values) / t * (1 - 1 / c)
            return Seconds(*[2 * HOP_S + sent / rate] * 2)
        if not kind.attends:
            return Seconds(0.0, 0.0)
        wide = self.model.kv * (1 + self.model.values / self.model.q)
        round_s = (c - 1) * (HOP_S + 2 * self.tokens(shape) * wide / t / rate)
        forward_s, backward_s = attention_s
        return Seconds(max(0.0, round_s - forward_s), max(0.0, 2 * round_s - backward_s))

    def further_s(self, shape: Shape) -> Seconds:
        """A block that predicts a further token, what joins its inputs, head and loss."""
        if shape not in self.memo.further:
            self.memo.further[shape] = self._further_s(shape)
        return self.memo.further[shape]

    def _further_s(self, shape: Shape) -> Seconds:
        blocks, model, T = self.further_blocks(shape), self.model, self.tokens(shape)
        joined = Product(model.hidden / shape.t, 2 * model.hidden, 0.0)
        passes_s, head_s = self.rates.passes_s(JOINED * T * model.hidden), blocks[0].head_s
        forward_s, backward_s = self._linear_s(shape, joined)
        forward_s += sum(block.forward_s for block in blocks) + (head_s + passes_s) / 3
        backward_s += sum(block.backward_s + block.again_s for block in blocks)
        return Seconds(forward_s, backward_s + (head_s + passes_s) * 2 / 3)

    def further_blocks(self, shape: Shape) -> list[Block]:
        """The blocks of a further token."""
        return [self.block(shape, kind) for kind in self.further_kinds]

    def head_s(self, shape: Shape) -> float:
        """Seconds of the head and the loss, forward and backward."""
        key, known = Shape(shape.b, shape.t, shape.c, fsdp=shape.fsdp), self.memo.heads
        if (found := known.get(key)) is None:
            found = known[key] = self._head_s(key)
        return found

    def _head_s(self, shape: Shape) -> float:
        loss, rates, t = self.practice.loss, self.rates, shape.t
        T, h, V = self.tokens(shape), self.model.hidden, self.model.vocabulary
        if self.adapters:
            product_s = rates.frozen_s(T, V / t, h, self.wide)
        else:
            product_s = rates.linear_s(T, V / t, h, self.wide, self._grad_out(shape))
        whole_s = sum(product_s)
        whole_s += 3 * rates.replicas_s(2 * T * h, t)
        if loss.gathers and t > 1:
            copies_s = rates.replicas_s(2 * T * V, t) + rates.passes_s(GATHERED * T * V)
            return whole_s + copies_s + rates.passes_s(T * V * loss.passes)
        return whole_s + rates.passes_s(T * V / t * loss.passes)

    def embedding_s(self, shape: Shape) -> float:
        """Seconds of the embedding, forward and backward, and of what reads pictures before it."""
        passes_s = self.rates.passes_s(12 * self.tokens(shape) * self.model.hidden)
        return passes_s + sum(self.pictures_s(shape))

    def pictures_s(self, shape: Shape) -> Seconds:
        """Seconds of what reads pictures, which all ranks of the first stage do for them all."""
        if not self.pictures:
            return Seconds(0.0, 0.0)
        if (known := self.memo.pictures).get(shape) is None:
            known[shape] = self.pictures.seconds(shape.b, shape.recompute == "always")
        return known[shape]

    def message_bytes(self, shape: Shape) -> float:
        """What a rank sends to the next stage."""
        whole = self.practice.sends == "whole" and not self.practice.sequence_parallel
        through = max(1.0, WHOLE_SENDS * shape.t) if whole else 1.0
        return through * 2 * self.tokens(shape) * self.model.hidden / shape.t

    def saved_bytes(self, shape: Shape, kind: Kind | None = None) -> float:
        """Bytes that a block keeps of a microbatch on one rank; its input is known in any case."""
        key, known = (shape, kind or self.kinds[-1]), self._kept
        if (found := known.get(key)) is None:
            scale = 1.0 if shape.recompute == "always" else self.scale(*key).kept
            found = known[key] = scale * self._saved_bytes(*key)
        return found

    def _saved_bytes(self, shape: Shape, kind: Kind) -> float:
        """Korthikanti et al., 2022, table 2, and the same count of other blocks."""
        model, T, share, t = self.model, self.tokens(shape), self.share(shape), shape.t
        if shape.recompute == "always":
            return 2 * T * model.hidden / share
        kept, modules = self.practice.kept, shape.modules
        scores = self.score_bytes(shape) * kind.attends
        if shape.recompute == "selective" and not modules:
            kept, scores = self.practice.kept_selective or kept, 0.0
        less = kept.narrower if BITS[self.format] < 16 else 0.0
        width = model.width(kind) / t
        if ("shared_experts" if kind.experts else "mlp") in modules:
            width = 0.0
        dense = kind.feed == "dense"
        inputs = (kind.mixer != "none") + dense  # in the format of products
        over_h = (kept.hidden + model.dropout * kept.dropout) * kind.halves / 2 - less * inputs
        over_h -= (2 - less) * ("mlp" in modules and dense)
        apart = (2 - less) * (model.latent is not None and kind.attends) + 2 * kind.experts
        over_h -= apart * ("layernorm" in modules)
        size = halves.mixer_bytes(model, kept, t, share, less, modules, kind)
        size += halves.feed_forward_bytes(model, kept, width, less) + over_h * model.hidden / share
        size = T * (size + kept.whole * model.hidden) + scores
        if self.adapters:
            size -= T * self.adapters.unkept_bytes(model, less, width, dense, t, share)
        if kind.experts and self._makes_operations(shape):
            size += self.experts(shape).exchanged_bytes
        elif kind.experts:
            wide = kept.gated if model.gated else kept.plain
            size += self.experts(shape).kept_bytes(less, wide, modules)
        return size - (moved_bytes(self, shape, kind)[0] if shape.offload else 0.0)

    def score_bytes(self, shape: Shape) -> float:
        """What is kept of the scores of attention."""
        scores, s = self.practice.scores, self.sequence
        kept = scores.kept if scores else 0.0
        return kept * self.model.heads * s * self.tokens(shape) / shape.t


def _sum(parts: Iterable[Seconds]) -> Seconds:
    """All of them, one after the other."""
    forward_s = backward_s = 0.0
    for part in parts:
        forward_s += part[0]
        backward_s += part[1]
    return Seconds(forward_s, backward_s)
