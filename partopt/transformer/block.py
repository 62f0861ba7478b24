"""A block on one rank for one microbatch: its seconds, and the bytes that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from partopt.documents.engine import Engine
from partopt.documents.transformer import (
    BITS,
    Calibration,
    Format,
    Kept,
    Practice,
    Transformer,
)
from partopt.errors import PartoptError, did_you_mean
from partopt.transformer.rates import COLLECTIVE_S, HOP_S, Rates, Seconds

# of the exchanges of a tensor parallel group, what products that are split hide: torch's, 20 to
# 29 % of the forward pass of its authors; Transformer Engine's, fitted on runs of NeMo on H100
HIDDEN = {"none": 0.0, "async": 0.5, "buffers": 0.7}
GATHERED = 8  # bytes a logit of the copies where all of them are gathered
SUM = 6  # bytes an element where two tensors are added

Recomputed = Literal["never", "selective", "always"]


class Shape(NamedTuple):
    """What a block's seconds depend on beside its `Training`.

    With `fsdp` its parameters lie in shares on several ranks, and are gathered for it.
    """

    b: int = 1
    t: int = 1
    c: int = 1
    e: int = 1
    recompute: Recomputed = "never"
    fsdp: bool = False


class Block(NamedTuple):
    """Seconds of a block, `again_s` of what it makes again, and the bytes that it keeps.

    `whole_bytes` it has while it is made again. `parts` are what its forward and backward are
    made of. Head and embedding of the same shape take `head_s` and `embedding_s`.
    """

    forward_s: float
    backward_s: float
    again_s: float
    saved_bytes: float
    whole_bytes: float
    parts: Mapping[str, Seconds]
    head_s: float
    embedding_s: float

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
        """Computed seconds as they are measured."""
        return Seconds(self.forward * computed.forward, self.backward * computed.backward)


class Product(NamedTuple):
    """Of all tokens a product (T, k) x (k, n); `again` is the share that operations make again."""

    n: float
    k: float
    again: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """A transformer that a trainer trains on some device: all but the layout.

    With a `calibration` blocks take what was measured of them, of other shapes in proportion.
    Tensor parallel ranks may outnumber heads of keys where the trainer `repeats_keys`, stages have
    one of embedding and head that share a weight where it `parts_ties`. Raises PartoptError for a
    number format or an attention that the device is not known to have.
    """

    model: Transformer
    sequence: int
    format: Format
    practice: Practice
    engine: Engine
    rates: Rates
    calibration: Calibration | None = None
    repeats_keys: bool = True
    parts_ties: bool = True
    _blocks: dict[Shape, Block] = field(default_factory=dict, init=False, compare=False)

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
        for name, names in known:
            if name not in names:
                raise PartoptError(
                    f"{self.rates.device}: what {name} achieves on it is not known",
                    did_you_mean(name, names),
                    code="unknown-rates",
                    device=self.rates.device,
                    name=name,
                )

    @property
    def wide(self) -> Format:
        """The format of products that are never in 8 bits: the head's, those of scores."""
        return "float16" if self.format == "float16" else "bfloat16"

    @cached_property
    def gradient_bytes(self) -> int:
        """Of a gradient as it is kept, and exchanged."""
        return 4 if self.engine.gradients == "float32" else 2

    def tokens(self, shape: Shape) -> float:
        """T."""
        return shape.b * self.sequence / shape.c

    def share(self, shape: Shape) -> int:
        """Ranks over which what lies between products is cut."""
        return shape.t if self.practice.sequence_parallel else 1

    def parameters(self, shape: Shape) -> float:
        """Those of a block on a rank, gathered if they lie in shares."""
        return self.model.dense_parameters / shape.t + self.model.expert_parameters / shape.e

    def block(self, shape: Shape) -> Block:
        """A block; looked up where it was asked for before."""
        if shape not in self._blocks:
            self._blocks[shape] = self._block(shape)
        return self._blocks[shape]

    def is_measured(self, shape: Shape) -> bool:
        """Whether a block of this shape is one of those that were measured."""
        calibration = self.calibration
        return calibration is not None and shape._replace(recompute="never") in [
            Shape(block.microbatch_size, calibration.ranks) for block in calibration.blocks
        ]

    def is_scaled(self, part: str) -> bool:
        """Whether a `part` of blocks is in what was measured; what one rank exchanges is not."""
        calibration = self.calibration
        if calibration is None or part in ("context", "exchange"):
            return False
        return part != "tensor" or calibration.ranks > 1

    @cached_property
    def _scales(self) -> Mapping[int, Scale]:
        """By samples of a microbatch, what blocks have over what is computed of them."""
        calibration = self.calibration
        scales: dict[int, Scale] = {}
        for block in calibration.blocks if calibration else ():
            shape = Shape(block.microbatch_size, calibration.ranks if calibration else 1)
            inside = self._inside(shape)
            computed = _sum(s for part, s in inside.items() if self.is_scaled(part))
            kept = block.kept_bytes / self._saved_bytes(shape) if block.kept_bytes else 1.0
            scales[shape.b] = Scale(
                block.forward_s / computed.forward, block.backward_s / computed.backward, kept
            )
        return scales

    def scale(self, shape: Shape) -> Scale:
        """That of the measured size with as many tokens; between two in proportion, else the end's.

        Other degrees have the same: what kernels achieve depends on tokens more than on widths.
        """
        known, size = self._scales, shape.b / shape.c
        if not known:
            return Scale()
        below = max((b for b in known if b <= size), default=min(known))
        above = min((b for b in known if b >= size), default=max(known))
        along = (size - below) / (above - below) if above > below else 0.0
        pairs = zip(known[below], known[above], strict=True)
        return Scale(*(low + along * (high - low) for low, high in pairs))

    def _inside(self, shape: Shape) -> dict[str, Seconds]:
        """The parts that are in a block's module, computed."""
        return {
            "products": _sum(self._linear_s(shape, product) for product in self.products(shape)),
            "attention": self._attention_s(shape),
            "passes": self._passes_s(shape),
            "tensor": self._tensor_s(shape),
            **({"experts": self._experts_s(shape)} if self.model.experts else {}),
        }

    def _block(self, shape: Shape) -> Block:
        scale = self.scale(shape)
        exchanged = scale if self.is_scaled("tensor") else Scale()
        parts = {
            name: (exchanged if name == "tensor" else scale).of(seconds)
            for name, seconds in self._inside(shape).items()
        }
        if shape.c > 1:
            parts["context"] = self._context_s(shape, parts["attention"])
        if self.model.experts:
            parts["exchange"] = self._exchange_s(shape, _sum(parts.values()))
        again_s = self._again_s(shape, _sum(parts.values()).forward, parts["attention"].forward)
        if any(launches_s := self._launches_s(shape, _sum(parts.values()), again_s)):
            parts["launches"] = launches_s
        forward_s, backward_s = _sum(parts.values())
        whole = shape._replace(recompute="never")
        saved_bytes, whole_bytes = self.saved_bytes(shape), self.saved_bytes(whole)
        ends_s = self.head_s(shape), self.embedding_s(shape)
        return Block(forward_s, backward_s, again_s, saved_bytes, whole_bytes, parts, *ends_s)

    def _again_s(self, shape: Shape, forward_s: float, attention_s: float) -> float:
        """What is made again, of a forward and of its attention."""
        practice, scale = self.practice, self.scale(shape)
        exchanged = scale if self.is_scaled("tensor") else Scale()
        if shape.recompute == "always":
            if not practice.stops_early:
                return forward_s
            last_s = self._linear_s(shape, self.products(shape)[-1]).forward
            scatter_s = self._scatter_s(shape) * self._shown
            return forward_s - scale.forward * last_s - exchanged.forward * scatter_s
        if shape.recompute == "selective" and practice.selective == "operations":
            made_s = self._remade_s(shape)
            return scale.forward * made_s + exchanged.forward * self._regathered_s(shape)
        return attention_s if shape.recompute == "selective" and practice.scores else 0.0

    def _launches_s(self, shape: Shape, device_s: Seconds, again_s: float) -> Seconds:
        """What the host takes longer to start a block than the device to run it.

        Where a block was measured, that is in it.
        """
        model, launches, graphs = self.model, self.practice.launches, self.practice.graphs
        if self.calibration or graphs == "full":
            return Seconds(0.0, 0.0)
        attention = launches.attention + 2 * launches.norms
        feed, router = launches.dense * bool(model.ffn), 0.0
        if model.experts:
            local = model.experts / shape.e
            router = launches.router + launches.shared * bool(model.ffn)
            feed = launches.rows if self.practice.dispatch == "rows" else launches.copies
            feed += launches.experts + launches.expert * local
            feed += launches.converts * local * (BITS[self.format] < 16)
        held = {"none": 0.0, "router": router, "attention": router + attention}[graphs]
        forward_s = (attention + router + feed - held) * self.rates.launch
        backward_s = forward_s * (3 if shape.recompute == "always" else 2)
        return Seconds(
            max(0.0, forward_s - device_s.forward),
            max(0.0, backward_s - device_s.backward - again_s),
        )

    def products(self, shape: Shape) -> list[Product]:
        """The products of attention and feed-forward, in their order."""
        model, practice, t = self.model, self.practice, shape.t
        h, q, f = model.hidden, model.q / t, model.ffn / t
        kv = max(model.kv / t, model.head_size)  # which several ranks have where heads are fewer
        found = [Product(q + 2 * kv, h, 0.0), Product(h, q, 1.0)]
        if not practice.joined_queries:
            found[:1] = [Product(q, h, 0.0), Product(kv, h, 1.0), Product(kv, h, 0.0)]
        if f and model.gated and not practice.joined_gate:
            found += [Product(f, h, 0.0), Product(f, h, 1.0), Product(h, f, 0.0)]
        elif f:
            found += [Product(f * (2 if model.gated else 1), h, 0.5), Product(h, f, 0.0)]
        return found

    def _linear_s(self, shape: Shape, product: Product) -> Seconds:
        return self.rates.linear_s(
            self.tokens(shape), product.n, product.k, self.format, self._grad_out(shape)
        )

    def _grad_out(self, shape: Shape) -> tuple[float, float]:
        """Bytes an element of a weight's gradient: written, and read where it is added to one."""
        if self.practice.sums == "product" and not shape.fsdp:
            return self.gradient_bytes, self.gradient_bytes
        return 2.0, 0.0

    def _attention_s(self, shape: Shape) -> Seconds:
        """Half of the scores where a kernel skips what is masked; else all, with a softmax."""
        model, rates, scores, s = self.model, self.rates, self.practice.scores, self.sequence
        if scores is None:
            flops = 4 * shape.b * model.scores(s) * model.q / (shape.t * shape.c)
            return rates.attention_s(self.practice.attention, flops, s / shape.c)
        heads, d, rows = shape.b * model.heads / shape.t, model.head_size, s / shape.c
        both_s = rates.product_s(rows, s, d, self.wide) + rates.product_s(rows, d, s, self.wide)
        return Seconds(
            heads * (both_s + rates.passes_s(rows * s * scores.forward)),
            heads * (2 * both_s + rates.passes_s(rows * s * scores.backward)),
        )

    def _passes_s(self, shape: Shape) -> Seconds:
        """Passes over memory: norms to activation, conversions to fewer bits, sums, copies."""
        forward, backward = (self.rates.passes_s(self._passed_bytes(shape, way)) for way in (0, 1))
        return Seconds(forward, backward)

    def _passed_bytes(self, shape: Shape, way: int) -> float:
        """Bytes of a block's passes, forward (0) or backward (1)."""
        model, practice, passes, t = self.model, self.practice, self.practice.passes, shape.t
        T, h, q, f = self.tokens(shape), model.hidden, model.q, model.ffn
        kv = max(model.kv, t * model.head_size)
        over_h = h * (passes.norms[way] + passes.residuals[way])
        over_h += h * passes.dropout[way] * model.dropout
        inside = q * passes.queries[way] + kv * passes.keys[way]
        inside += (q + kv) * passes.rotary[way] * model.rotary
        inside += f * (passes.gated if model.gated else passes.plain)[way]
        if BITS[self.format] < 16:
            ups = 2 if model.gated else 1
            over_h += self._conversion * (0 if way else 2 * h)
            inside += self._conversion * (q + 2 * kv + ups * f + 2 * h if way else q + f)
        size = T * (over_h / self.share(shape) + inside / t)
        parameters = self.parameters(shape)
        if way:  # gradients of the input of products that are apart, at full width
            apart = 2 * (not practice.joined_queries) + (model.gated and not practice.joined_gate)
            size += SUM * T * h * (min(apart, 1) if practice.compiled and t == 1 else apart)
        if shape.fsdp:
            size += parameters * practice.shard_copies[way]
            size += (
                parameters * (2 + self.gradient_bytes) * bool(way and practice.shard_copies[way])
            )
        elif way and practice.sums == "autograd":
            size += parameters * (2 + 2 * self.gradient_bytes)
        return size

    @cached_property
    def _conversion(self) -> float:
        """Bytes an element of conversions to the products' format.

        The trainer's to fp8; with a scale a block no maximum goes first; of nvfp4 there are
        two maxima and a turned copy.
        """
        return {"mxfp8": 4.0, "nvfp4": 11.0}.get(self.format, self.practice.conversion)

    def _gather_s(self, shape: Shape) -> float:
        size = self.tokens(shape) * self.model.hidden * BITS[self.format] / 8
        return self.rates.link_s(size, shape.t)

    def _scatter_s(self, shape: Shape) -> float:
        return self.rates.link_s(self.tokens(shape) * self.model.hidden * 2, shape.t)

    @property
    def _shown(self) -> float:
        """The share of exchanges of a tensor parallel group that products do not hide."""
        return 1 - HIDDEN[self.practice.tp_overlap]

    def _tensor_s(self, shape: Shape) -> Seconds:
        """What a tensor parallel group exchanges, in attention and in the feed-forward."""
        if shape.t == 1:
            return Seconds(0.0, 0.0)
        practice, pairs = self.practice, 2 if self.model.ffn else 1
        # what split products exchange starts by itself
        start_s = COLLECTIVE_S if practice.tp_overlap == "none" else 0.0
        gather_s, scatter_s = self._gather_s(shape) + start_s, self._scatter_s(shape) + start_s
        forward_s = backward_s = pairs * (gather_s + scatter_s)
        if not practice.sequence_parallel:  # all-reduces
            reduce_s = 2 * scatter_s - start_s
            apart = self.model.gated and not practice.joined_gate and pairs == 2
            forward_s, backward_s = pairs * reduce_s, (pairs + apart) * reduce_s
        elif practice.regathers:
            backward_s += pairs * gather_s
        return Seconds(forward_s * self._shown, backward_s * self._shown)

    def _remade_s(self, shape: Shape) -> float:
        """What is made again where some operations are: products, all passes but the last."""
        products = self.products(shape)
        products_s = sum(
            self._linear_s(shape, product).forward * product.again for product in products
        )
        last = self.practice.passes.residuals[0] / 2
        last_s = self.rates.passes_s(self.tokens(shape) * self.model.hidden * last)
        return products_s + self._passes_s(shape).forward - last_s / self.share(shape)

    def _regathered_s(self, shape: Shape) -> float:
        """The gathers that are made again there."""
        return (2 if self.model.ffn else 1) * self._gather_s(shape) * self._shown

    def _context_s(self, shape: Shape, attention_s: Seconds) -> Seconds:
        """Keys and values go round c ranks, behind the attention of those that have come."""
        t, c, rates = shape.t, shape.c, self.rates
        rate = rates.link if t * c <= rates.server else rates.port
        round_s = (c - 1) * (HOP_S + 4 * self.tokens(shape) * self.model.kv / t / rate)
        forward_s, backward_s = attention_s
        return Seconds(max(0.0, round_s - forward_s), max(0.0, 2 * round_s - backward_s))

    def _experts_s(self, shape: Shape) -> Seconds:
        """The experts' products and passes."""
        model, rates, bits = self.model, self.rates, BITS[self.format]
        h, f = model.hidden, model.expert_ffn
        rows = self._rows(shape)
        up = rates.linear_s(rows, f * (model.matrices - 1), h, self.format, (0.0, 0.0))
        down = rates.linear_s(rows, h, f, self.format, (0.0, 0.0))
        weights = model.expert_parameters / shape.e
        # rows are permuted, sorted and put back: three times read and written
        gated, back = (6, 10) if model.gated else (4, 6)
        over = rows * (12 * h + gated * f) + weights * bits / 8
        over_back = rows * (12 * h + back * f) + weights * (bits / 8 + 2 * self.gradient_bytes)
        if bits < 16:
            over += rows * self._conversion * (h + f)
            over_back += rows * self._conversion * ((model.matrices - 1) * f + h)
        passes = Seconds(rates.passes_s(over), rates.passes_s(over_back))
        return _sum([up, down, passes])

    def _rows(self, shape: Shape) -> float:
        """Tokens of the experts of a rank, as often as experts take it."""
        return self.tokens(shape) / self.share(shape) * self.model.experts_per_token

    def _exchange_s(self, shape: Shape, work_s: Seconds) -> Seconds:
        """What two exchanges in a direction show: to experts on e ranks and back.

        They send all rows, or one copy of a token to all S servers, spread inside (DeepEP).
        """
        if shape.e == 1:
            return Seconds(0.0, 0.0)
        model, rates, e, k = self.model, self.rates, shape.e, self.model.experts_per_token
        S = math.ceil(e / rates.server)  # experts' ranks follow each other, tensor ranks among them
        size = self._rows(shape) * model.hidden * 2
        out, near = size * (1 - 1 / S), size / S
        if self.practice.dispatch == "copies":
            copies = size / k
            out = copies * (S - 1) * (1 - (1 - 1 / S) ** k)
            near = copies * e * (1 - (1 - 1 / e) ** k)
        both_s = 2 * (max(out / rates.port, near / rates.link) + HOP_S)
        if self.practice.dispatch_overlap:
            forward_s, backward_s = work_s
            return Seconds(max(0.0, both_s - forward_s), max(0.0, both_s - backward_s))
        return Seconds(both_s, both_s)

    def head_s(self, shape: Shape) -> float:
        """Seconds of the head and the loss, forward and backward."""
        loss, rates, t = self.practice.loss, self.rates, shape.t
        T, h, V = self.tokens(shape), self.model.hidden, self.model.vocabulary
        whole_s = sum(rates.linear_s(T, V / t, h, self.wide, self._grad_out(shape)))
        whole_s += 3 * rates.link_s(2 * T * h, t)
        if loss.gathers and t > 1:
            copies_s = rates.link_s(2 * T * V, t) + rates.passes_s(GATHERED * T * V)
            return whole_s + copies_s + rates.passes_s(T * V * loss.passes)
        return whole_s + rates.passes_s(T * V / t * loss.passes)

    def embedding_s(self, shape: Shape) -> float:
        """Seconds of the embedding, forward and backward."""
        return self.rates.passes_s(12 * self.tokens(shape) * self.model.hidden)

    def message_bytes(self, shape: Shape) -> float:
        """What a rank sends to the next stage."""
        whole = self.practice.sends == "whole" and not self.practice.sequence_parallel
        return 2 * self.tokens(shape) * self.model.hidden / (1 if whole else shape.t)

    def saved_bytes(self, shape: Shape) -> float:
        """Bytes that a block keeps of a microbatch on one rank; its input is known in any case."""
        scale = 1.0 if shape.recompute == "always" else self.scale(shape).kept
        return scale * self._saved_bytes(shape)

    def _saved_bytes(self, shape: Shape) -> float:
        """Korthikanti et al., 2022, table 2, and the same count of other blocks."""
        model, T, share, t = self.model, self.tokens(shape), self.share(shape), shape.t
        if shape.recompute == "always":
            return 2 * T * model.hidden / share
        kept, scores = self.practice.kept, self.score_bytes(shape)
        if shape.recompute == "selective":
            kept, scores = self.practice.kept_selective or kept, 0.0
        return scores + self._kept_bytes(kept, T / share, T / t) + T * kept.whole * model.hidden

    def _kept_bytes(self, kept: Kept, cut: float, inside: float) -> float:
        """What is kept of `cut` tokens of the hidden width, and of those `inside` products."""
        model, less = self.model, kept.narrower if BITS[self.format] < 16 else 0.0
        h, q, f = model.hidden, model.q, model.ffn
        inputs = 2 if f else 1  # of products, of the hidden width
        size = cut * h * (kept.hidden - less * inputs + model.dropout * kept.dropout)
        gated = kept.gated if model.gated else kept.plain
        over_q = kept.queries + kept.rotary * model.rotary - less
        over_q += kept.grouped * (model.kv_heads < model.heads)
        size += inside * (q * over_q + model.kv * kept.keys + f * (gated - less))
        if model.experts:
            size -= cut * 2 * h * (0 if f else 1)  # the rows are kept instead
            rows = cut * model.experts_per_token
            size += rows * ((4 - less) * h + (gated - less) * model.expert_ffn)
        return size

    def score_bytes(self, shape: Shape) -> float:
        """What is kept of the scores of attention."""
        scores, s = self.practice.scores, self.sequence
        kept = scores.kept if scores else 0.0
        return kept * self.model.heads * s * self.tokens(shape) / shape.t


def _sum(parts: Iterable[Seconds]) -> Seconds:
    """All of them, one after the other."""
    seconds = list(parts)
    return Seconds(sum(part.forward for part in seconds), sum(part.backward for part in seconds))
