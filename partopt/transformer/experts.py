"""The experts of a block on one rank for a microbatch: products, exchanges, bytes, imbalance."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from partopt.documents.transformer import BITS, Format, Practice, Transformer
from partopt.transformer.adapters import Adapters
from partopt.transformer.rates import Rates, Seconds

# T      tokens of a rank, cut by tensor parallel ranks
# k      experts that a token takes
# e, S   ranks that have different experts, servers that these and the ranks that cut them fill
# rows   tokens of the experts of a rank, as often as experts take it

# fitted on published runs of experts: benchmarks/published_trainers.py
CONVERTED = (
    4.0  # of what is counted, bytes of conversions: DeepSeek's trace has 7 ms a block of them
)
EXCHANGE_S = 160e-6  # start of an exchange, its counts and its end
OVERLAPPED = 0.5  # of exchanges, hidden behind another microbatch; 0.37 was measured on 16 H100
DRAWN = 1.09  # the slowest rank over the mean as tokens are drawn, routing that is not forced
# measured, counted or assumed
DEEPEP = 153e9  # bytes a second of DeepEP in a server: its README, H800
NVLINK = 0.94  # of what rings reach in a server, other dispatchers: 0.75 of 0.80
HELD = {"real": 1.3, "balanced": 1.05, "capacity": 1.0}  # rows of a rank that memory must hold
TILE = 128  # rows of a product's tile: every expert leaves half of one empty
LOGITS = 40  # bytes of the router's passes for an expert and a token, in float32; counted
ROUTER = 0.38  # of a product's rate, the router's: a narrow one


@dataclass(frozen=True)
class Experts:
    """Experts of a block on `e` ranks, cut by `etp` more, for `tokens` of a rank.

    Conversions to the products' format take `conversion` bytes an element.
    """

    model: Transformer
    practice: Practice
    rates: Rates
    format: Format
    conversion: float
    gradient_bytes: int
    e: int
    etp: int
    tokens: float
    adapters: Adapters | None = None

    @property
    def rows(self) -> float:
        """Rows of a rank, which come from all that an expert is cut over."""
        return self.tokens * self.model.experts_per_token * self.etp

    @property
    def held_rows(self) -> float:
        """Rows of an expert's whole width for which memory is held."""
        return self.rows / self.etp * HELD[self.practice.routing]

    @property
    def local(self) -> float:
        """Experts of a rank."""
        return self.model.experts / self.e

    @property
    def width(self) -> float:
        """Of an expert's part on a rank."""
        return self.model.expert_ffn / self.etp

    @cached_property
    def imbalance(self) -> float:
        """What the slowest rank takes over the mean.

        Of balanced routing it is that of the largest of e sums of `rows` draws.
        """
        if self.practice.routing == "real":
            return DRAWN
        if self.practice.routing == "capacity" or self.e == 1:
            return 1.0
        return 1 + math.sqrt(2 * math.log(self.e) / max(1.0, self.rows))

    @cached_property
    def work_s(self) -> Seconds:
        """All but the exchanges."""
        activation, router = self.activation_s, self._router_s()
        up = self._grouped_s(
            "fc1", self.width * (self.model.matrices - 1), self.model.expert_inputs
        )
        down = self._grouped_s("fc2", self.model.expert_inputs, self.width)
        converted = [0.0, 0.0]
        if BITS[self.format] < 16 and not self.practice.fused_experts:
            h, gates = self.model.expert_inputs, (self.model.matrices - 2) * self.width
            converted = [CONVERTED * self.conversion * self.rows * n for n in (h, gates + h)]
        permuted_s = self.rates.passes_s(self._permuted_bytes())
        passes = map(self.rates.passes_s, converted)
        forward, backward = (
            self.imbalance * (products_up + products_down + active + passed) + permuted_s + routed
            for products_up, products_down, active, passed, routed in zip(
                up, down, activation, passes, router, strict=True
            )
        )
        return Seconds(forward, backward)

    @cached_property
    def activation_s(self) -> Seconds:
        """The activation, and its output in the format of the products."""
        passes = self.practice.passes.gated if self.model.gated else self.practice.passes.plain
        if self.practice.fused_experts:  # what the products write is read once, written in 8 bits
            both = (min(2.0, BITS[self.format] / 8) + 2) * self.model.expert_inputs
            sizes = [n / 2 * self.width + both * (BITS[self.format] < 16) for n in passes]
        else:
            converted = CONVERTED * self.conversion * (BITS[self.format] < 16)
            sizes = [(n + converted) * self.width for n in passes]
        return Seconds(*(self.rates.passes_s(self.rows * size) for size in sizes))

    def _grouped_s(self, name: str, n: float, k: float) -> Seconds:
        """The product `name` of the rows with (k, n) of every expert.

        All weights are read, and gradients of all are added to what is there.
        """
        rates, rows, form = self.rates, self.rows, self.format
        weights, grad = self.local * n * k, self.gradient_bytes
        more_s = rates.arithmetic_s(self.local * TILE / 2, n, k, form)
        read_s = rates.passes_s(weights * BITS[form] / 8)
        if self.adapters:
            pairs = zip(
                rates.frozen_s(rows, n, k, form),
                self.adapters.beside_s(name, rows, n, k),
                strict=True,
            )
            return Seconds(*(max(one_s + more_s, read_s) + added_s for one_s, added_s in pairs))
        one = rates.linear_s(rows, n, k, form, (grad, grad))
        others = max(0.0, self.local - 1) / self.local  # the first is in the product
        added_s = rates.written_s(grad * weights) + rates.passes_s(grad * weights)
        return Seconds(
            max(one.forward + more_s, read_s),
            one.backward + 2 * more_s + others * (read_s + added_s),
        )

    def _permuted_bytes(self) -> float:
        """Rows to their experts' order and back; or copies that arrived to rows."""
        rows, h = self.rows, self.model.expert_inputs
        if self.practice.dispatch == "alltoall":
            return 12 * rows * h
        copies = self.tokens * min(self.model.experts_per_token, self.e)
        return 4 * rows * h + 4 * copies * h

    def _router_s(self) -> Seconds:
        """A narrow product, and passes over what it says of every expert."""
        logits = self.tokens * self.model.experts
        passes_s = self.rates.passes_s(LOGITS * logits)
        once_s = self.rates.arithmetic_s(self.tokens, self.model.experts, self.model.hidden)
        return Seconds(once_s / ROUTER + passes_s, 2 * once_s / ROUTER + passes_s)

    @cached_property
    def exchange_s(self) -> float:
        """Seconds of one exchange, to the experts or back.

        All rows, or one copy of a token for a server that it goes to and for a rank (DeepEP,
        HybridEP), through port and links at once. Ranks with experts are consecutive.
        """
        model, rates, e, k = self.model, self.rates, self.e, self.model.experts_per_token
        if e * self.etp == 1:
            return 0.0
        S = math.ceil(e * self.etp / rates.server)
        size, achieved = self.practice.dispatch_bytes * model.expert_inputs * self.tokens, NVLINK
        if self.practice.dispatch == "alltoall":
            out, near = size * k, size * k * (1 - 1 / e if S == 1 else 1 / S)
        else:
            out = size * self._servers(S)
            near = size * (e if S > 1 else e - 1) * (1 - (1 - 1 / e) ** k)
            if self.practice.dispatch == "deepep":
                achieved = min(1.0, DEEPEP / rates.link)
        near += size * k * (self.etp - 1)
        out_s = rates.scattered_s(out, e * self.etp)
        return max(out_s, near / (achieved * rates.link)) + EXCHANGE_S

    @property
    def both_s(self) -> float:
        """Seconds of the two exchanges of a direction, of the slowest rank."""
        return 2 * self.imbalance * self.exchange_s

    def shown_s(self, work_s: float) -> float:
        """What the two show, of a block that works so long forward and backward.

        Beside another microbatch they hide behind its work, from which they take multiprocessors.
        """
        if not self.practice.dispatch_overlap:
            return self.both_s
        hidden_s = min(OVERLAPPED * self.both_s, work_s / 2)
        return self.both_s - (1 - self.rates.taken) * hidden_s

    def _servers(self, S: int) -> float:
        """Servers to which a token goes, of those that its groups of experts leave it."""
        model, reached = self.model, float(S)
        if model.groups and S > 1:
            reached = min(S, model.groups_per_token / max(1.0, model.groups / S))
        return max(1.0, reached * (1 - (1 - 1 / max(1.0, reached)) ** model.experts_per_token))

    def kept_bytes(self, less: float, kept: float, modules: Collection[str]) -> float:
        """Bytes that are kept of a microbatch, those of the router among them.

        `kept` are bytes of a number of the width of an expert; inputs of products have `less` than
        2. Rows in the order of tokens stay beside those in the order of experts.
        """
        if "moe" in modules:
            return 0.0
        rows = self.held_rows
        wide = kept - less - (2 - less) * ("moe_act" in modules)
        inputs = (2 - less) + 2 * (self.practice.dispatch == "alltoall")
        if self.adapters:  # what is not trained keeps no input
            inputs += self.adapters.input_bytes("fc1") - (2 - less)
            wide += self.adapters.input_bytes("fc2") - (2 - less)
        size = rows * (inputs * self.model.expert_inputs + wide * self.model.expert_ffn)
        return size + 8 * self.tokens * self.model.experts

    @property
    def exchanged_bytes(self) -> float:
        """What the exchanges of a microbatch bring, where that alone is kept of it."""
        return 4 * self.held_rows * self.model.expert_inputs * (self.e * self.etp > 1)

    @property
    def launches(self) -> float:
        """Operations of the forward that the host starts beside the router's."""
        launches = self.practice.launches
        of_one = launches.expert + launches.converts * (BITS[self.format] < 16)
        alltoall = self.practice.dispatch == "alltoall"
        sent = launches.alltoall if alltoall else launches.dispatch
        return sent + launches.experts + of_one * self.local
