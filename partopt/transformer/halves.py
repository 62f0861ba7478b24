"""Half a block on one rank: attention, full or latent, and a feed-forward that all tokens take.

A kind of block has an entry for both. What comes beside these is elsewhere: norms and residuals of
the hidden width, and experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from partopt.documents.transformer import Kept, Latent, Pair, Practice, Transformer

# t      tensor parallel ranks, which cut what is inside
# share  of the ranks that cut what lies between products: t, or 1 without sequence parallelism
# less   bytes by which the input of a product is narrower than in 16 bits


class Product(NamedTuple):
    """Of a share of the `tokens` a product (T, k) x (k, n); operations make `again` a share."""

    n: float
    k: float
    again: float
    tokens: float = 1.0
    name: str = "qkv"


class Half(NamedTuple):
    """Half a block: what is done for a token.

    `products` with weights are in their order. Bytes are `passed` over memory inside it, forward
    and backward, and `converted` are elements of other formats. So many `inputs` of products have
    the hidden width. Of latent attention the `expansion` are some of the products, and `turned`
    bytes are passed behind it.
    """

    products: Sequence[Product] = ()
    passed: Pair = (0.0, 0.0)
    converted: Pair = (0.0, 0.0)
    inputs: int = 0
    expansion: slice = slice(0, 0)
    turned: float = 0.0


def attention(model: Transformer, practice: Practice, t: int, share: int) -> Half:
    """Query, key and value, scores over them, and the projection."""
    if model.latent is not None:
        return _latent(model, model.latent, t, share)
    passes = practice.passes
    h, q = model.hidden, model.q / t
    kv = max(model.kv / t, model.head_size)  # which several ranks have where heads are fewer
    products = [Product(q + 2 * kv, h, 0.0), Product(h, q, 1.0, name="proj")]
    if not practice.joined_queries:
        products[:1] = [Product(q, h, 0.0), Product(kv, h, 1.0), Product(kv, h, 0.0)]
    forward, backward = (
        q * queries + kv * keys + (q + kv) * rotary * model.rotary
        for queries, keys, rotary in zip(passes.queries, passes.keys, passes.rotary, strict=True)
    )
    return Half(
        products=products,
        passed=(forward, backward),
        converted=(q, q + 2 * kv + h / t),
        inputs=1,
    )


def _latent(model: Transformer, latent: Latent, t: int, share: int) -> Half:
    """Keys, values and queries that are compressed, and expanded for training.

    Megatron Core, multi_latent_attention.py: every rank compresses its tokens by whole weights.
    Queries are turned in place, keys and values copied apart, the turned key to every head.
    """
    h, a, q, values = model.hidden, model.heads / t, model.q / t, model.values / t
    low, unturned = latent.queries + latent.keys, model.head_size - latent.rotary
    expanded = a * (unturned + latent.values)
    products = [
        Product(latent.keys + latent.rotary, h, 1.0, 1 / share),
        *([Product(latent.queries, h, 0.0, 1 / share)] if latent.queries else []),
        Product(expanded, latent.keys, 1.0),
        Product(q, latent.queries or h, 0.0),
        Product(h, values, 1.0, name="proj"),
    ]
    turned = a * (4 * latent.rotary + 2 * (unturned + latent.values))
    turned += a * 2 * (model.head_size + latent.values)
    return Half(
        products=products,
        passed=(turned + 8 * low, turned + 12 * low),
        converted=(low + values, 1.5 * low + q + expanded + h / t),
        inputs=1,
        expansion=slice(-3, -1),
        turned=turned,
    )


def feed_forward(model: Transformer, practice: Practice, t: int, width: int) -> Half:
    """One that all tokens take; nothing where it has no width."""
    if not width:
        return Half()
    passes, h, f = practice.passes, model.hidden, width / t
    ups = 2 if model.gated else 1
    products = [Product(ups * f, h, 0.5, name="fc1"), Product(h, f, 0.0, name="fc2")]
    if model.gated and not practice.joined_gate:
        products[:1] = [Product(f, h, 0.0, name="fc1"), Product(f, h, 1.0, name="fc1")]
    forward, backward = passes.gated if model.gated else passes.plain
    return Half(
        products=products,
        passed=(f * forward, f * backward),
        converted=(f, ups * f + h / t),
        inputs=1,
    )


def attention_bytes(
    model: Transformer, kept: Kept, t: int, share: int, less: float, modules: Collection[str]
) -> float:
    """Bytes inside attention that are kept of a token."""
    if (latent := model.latent) is None:
        over_q = kept.queries + kept.rotary * model.rotary - less
        over_q += kept.grouped * (model.kv_heads < model.heads)
        return (model.q * over_q + model.kv * kept.keys) / t
    # outputs of the compression, as they are and normal; attention's output, and in fewer bits
    size = 3 * (latent.queries + latent.keys + latent.rotary) / share
    size += model.values * (2 + (2 - less) * bool(less)) / t
    if "mla_up_proj" not in modules:  # its inputs; queries, keys and values
        size += (2 - less) * (latent.queries + latent.keys)
        size += 2 * (2 * model.q + model.values) / t
    return size


def feed_forward_bytes(model: Transformer, kept: Kept, width: float, less: float) -> float:
    """Bytes inside a feed-forward so wide that are kept of a token."""
    return width * ((kept.gated if model.gated else kept.plain) - less)
