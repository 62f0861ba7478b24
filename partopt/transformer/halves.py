"""Half a block on one rank: a mixer of tokens, and a feed-forward that all tokens take.

A kind of block has an entry for both. What comes beside these is elsewhere: norms and residuals of
the hidden width, and experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from partopt.documents.transformer import (
    Kept,
    Kind,
    Latent,
    Pair,
    Practice,
    Recurrence,
    Transformer,
)

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


def mixer(model: Transformer, practice: Practice, t: int, share: int, kind: Kind) -> Half:
    """What mixes tokens in a block of a kind; nothing where there is none."""
    if model.recurrence and kind.is_recurrent:
        return _recurrence(model.hidden, model.recurrence, t)
    if not kind.attends:
        return Half()
    half = _latent(model, model.latent, t, share) if model.latent else _full(model, practice, t)
    if not (model.indexer and kind.mixer == "indexed"):
        return half
    made, indexer = (model.latent.queries if model.latent else 0) or model.hidden, model.indexer
    wide, narrow = indexer.heads * indexer.head_size, indexer.head_size + indexer.heads
    of_indexer = [
        Product(wide, made, 0.0, 1 / share, "indexer"),
        Product(narrow, model.hidden, 0.0, 1 / share, "indexer"),
    ]
    return half._replace(products=[*half.products[:-1], *of_indexer, half.products[-1]])


def _recurrence(h: int, state: Recurrence, t: int) -> Half:
    """Gates, values, keys and queries of one product, and another one."""
    joined, values = state.joined / t, state.values / t
    return Half(
        products=[Product(joined, h, 0.0), Product(h, values, 1.0, name="proj")],
        converted=(values, joined + h / t),
        inputs=1,
    )


def _full(model: Transformer, practice: Practice, t: int) -> Half:
    """Query, key and value, scores over them, and the projection."""
    passes = practice.passes
    h, q, made = model.hidden, model.q / t, model.queries / t
    kv = max(model.kv / t, model.head_size)  # which several ranks have where heads are fewer
    products = [Product(made + 2 * kv, h, 0.0), Product(h, q, 1.0, name="proj")]
    if not practice.joined_queries:
        products[:1] = [Product(made, h, 0.0), Product(kv, h, 1.0), Product(kv, h, 0.0)]
    forward, backward = (
        q * (queries + gated * model.output_gated) + kv * keys + (q + kv) * rotary * model.rotary
        for queries, keys, rotary, gated in zip(
            passes.queries, passes.keys, passes.rotary, passes.gated, strict=True
        )
    )
    return Half(
        products=products,
        passed=(forward, backward),
        converted=(q, made + 2 * kv + h / t),
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


def feed_forward(model: Transformer, practice: Practice, t: int, share: int, kind: Kind) -> Half:
    """One that all tokens take, and products into another width of experts and back."""
    h, low, made = model.hidden, model.expert_hidden if kind.experts else 0, list[Product]()
    if low:
        made = [Product(n, k, 0.5, 1 / share, "latent") for n, k in ((low, h), (h, low))]
    if not (width := model.width(kind)):
        return Half(products=made)
    passes, f = practice.passes, width / t
    ups = 2 if model.gated else 1
    products = [Product(ups * f, h, 0.5, name="fc1"), Product(h, f, 0.0, name="fc2")]
    if model.gated and not practice.joined_gate:
        products[:1] = [Product(f, h, 0.0, name="fc1"), Product(f, h, 1.0, name="fc1")]
    forward, backward = passes.gated if model.gated else passes.plain
    return Half(
        products=[*made, *products],
        passed=(f * forward, f * backward),
        converted=(f, ups * f + h / t),
        inputs=1,
    )


def mixer_bytes(
    model: Transformer,
    kept: Kept,
    t: int,
    share: int,
    less: float,
    modules: Collection[str],
    kind: Kind,
) -> float:
    """Bytes inside what mixes tokens that are kept of a token."""
    if model.recurrence and kind.is_recurrent:
        return _recurrence_bytes(model.recurrence, less) / t
    if not kind.attends:
        return 0.0
    if (latent := model.latent) is None:
        over_q = kept.queries + kept.rotary * model.rotary - less + 4 * model.output_gated
        over_q += kept.grouped * (model.kv_heads < model.heads)
        return (model.q * over_q + model.kv * kept.keys) / t
    # outputs of the compression, as they are and normal; attention's output, and in fewer bits
    size = 3 * (latent.queries + latent.keys + latent.rotary) / share
    size += model.values * (2 + (2 - less) * bool(less)) / t
    if "mla_up_proj" not in modules:  # its inputs; queries, keys and values
        size += (2 - less) * (latent.queries + latent.keys)
        size += 2 * (2 * model.q + model.values) / t
    return size


def _recurrence_bytes(state: Recurrence, less: float) -> float:
    """What the product makes, what is read of the state, and the input of the last product.

    Of Mamba-2 the rest is made again (ops/triton/ssd_combined.py of state-spaces/mamba). A gated
    delta keeps what is convolved, too, keys and queries for every head of values, a triangle of a
    chunk, and what is normal (fla/ops/gated_delta_rule/chunk.py of flash-linear-attention).
    """
    size = 2 * state.joined + 2 * state.values + (2 - less) * state.values
    if state.rule == "delta":
        of_heads = 4 * state.keys + 2 * state.head_size + 2 * state.chunk + 6
        size += state.heads * of_heads + 2 * state.values
    return size


def feed_forward_bytes(model: Transformer, kept: Kept, width: float, less: float) -> float:
    """Bytes inside a feed-forward so wide that are kept of a token."""
    return width * ((kept.gated if model.gated else kept.plain) - less)
