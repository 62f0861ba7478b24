"""Adapters of low rank, which alone are trained, beside products of a block (Hu et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partopt.documents.transformer import Format, Practice, Transformer
from partopt.transformer.halves import Product
from partopt.transformer.rates import Rates, Seconds

# bytes an element of passes that scale, add, and drop some: counted
SCALED, SUM, DROPPED = 4, 6, 5


@dataclass(frozen=True)
class Adapters:
    """Those that a practice has, with products in the format `wide`."""

    practice: Practice
    rates: Rates
    wide: Format

    @property
    def rank(self) -> int:
        """The width of their products."""
        return self.practice.adapters

    @property
    def names(self) -> list[str]:
        """The products that have one."""
        return self.practice.adapted.split("+")

    def linear_s(self, product: Product, tokens: float, form: Format) -> Seconds:
        """A product that is not trained, with its adapter."""
        frozen = self.rates.frozen_s(tokens, product.n, product.k, form)
        added = self.beside_s(product.name, tokens, product.n, product.k)
        return Seconds(frozen.forward + added.forward, frozen.backward + added.backward)

    def beside_s(self, name: str, tokens: float, n: float, k: float) -> Seconds:
        """The adapter of a product (tokens, k) x (k, n): its two, scaled, and added."""
        if name not in self.names:
            return Seconds(0.0, 0.0)
        rates, dropped = self.rates, DROPPED * k * self.practice.adapter_dropout
        passed = (SCALED + SUM) * n + dropped, SCALED * n + SUM * k + dropped
        down = rates.linear_s(tokens, self.rank, k, self.wide)
        up = rates.linear_s(tokens, n, self.rank, self.wide)
        forward, backward = (
            one + other + rates.passes_s(tokens * size)
            for one, other, size in zip(down, up, passed, strict=True)
        )
        return Seconds(forward, backward)

    def parameters(self, products: Iterable[Product]) -> float:
        """Parameters of those of some products on a rank."""
        return self.rank * sum(p.n + p.k for p in products if p.name in self.names)

    def parameters_of_experts(self, model: Transformer) -> float:
        """Parameters of those of all experts of a block."""
        ups = (model.matrices - 1) * model.expert_ffn
        wide = (model.expert_inputs + ups) * ("fc1" in self.names)
        wide += (model.expert_inputs + model.expert_ffn) * ("fc2" in self.names)
        return self.rank * wide * model.experts

    def input_bytes(self, name: str) -> int:
        """Bytes an element of a product's input that its adapter keeps: 16 bits, and a mask."""
        return (2 + self.practice.adapter_dropout) * (name in self.names)

    def unkept_bytes(
        self, model: Transformer, less: float, width: float, dense: bool, t: int, share: int
    ) -> float:
        """Bytes of a token that a block keeps less than one whose products are trained.

        A product that is not trained keeps no input, which has `less` than 2 bytes an element, a
        part on each of `share` ranks; its adapter has it whole. Attention keeps its output in any
        case, of which each of `t` ranks has a part. `width` is that of a `dense` feed-forward.
        """
        kept, inner = self.input_bytes, model.hidden * ((2 - less) / share)
        found = inner - kept("qkv") * model.hidden + (2 - less - kept("fc2")) * width
        if dense and width:
            found += inner - kept("fc1") * model.hidden
        if proj := kept("proj"):
            found -= (2 * bool(less) + 3 * (proj - 2)) * model.values / t
        return found - 2 * self.rank * len(self.names)
