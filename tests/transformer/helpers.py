"""A small training, in numbers that are easily multiplied by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec.structs import replace

from partopt.documents.device import Attention
from partopt.documents.engine import Engine, Layout
from partopt.documents.transformer import Latent, Loss, Practice, Transformer
from partopt.transformer.block import Training
from partopt.transformer.iteration import estimate
from partopt.transformer.rates import Port, Rates

GPT = Transformer(
    name="gpt",
    blocks=4,
    hidden=1024,
    heads=8,
    kv_heads=8,
    head_size=128,
    ffn=4096,
    vocabulary=32_000,
    gated=False,
    rotary=False,
    dropout=True,
)
LLAMA = replace(GPT, name="llama", kv_heads=2, ffn=3584, gated=True, rotary=True, dropout=False)
EXPERTS = replace(LLAMA, name="experts", ffn=0, experts=8, experts_per_token=2, expert_ffn=512)
# every second block has a window, the first two no experts; one further token
KINDS = replace(
    EXPERTS,
    name="kinds",
    blocks=8,
    kv_heads=8,
    head_size=96,
    latent=Latent(queries=384, keys=256, rotary=32, values=64),
    window=512,
    full_period=2,
    ffn=3584,
    shared_ffn=512,
    dense_first=2,
    further=1,
)
PORT, RING = 4e10, 3e10
RATES = Rates(
    device="device",
    peaks={"float16": 1e15, "fp8": 2e15},
    products={"bfloat16": 8e14, "float16": 8e14, "fp8": 1.6e15, "nvfp4": 3.2e15},
    bandwidth=3e12,
    attention={"flash": Attention(share=(0.5, 0.4), half_at=(400, 300), source="a test")},
    clock=1.0,
    link=3e11,
    server=8,
    multiprocessors=128,
    outer=(Port(1, PORT, RING),),
    host_link=5e10,
    launch=0.0,  # such small blocks would wait for the host
)


def with_port(rates: Rates, message: float, ring: float | None = None) -> Rates:
    """The rates with other ports of servers, whose rings reach as much as messages by default."""
    port = Port(1, message, message if ring is None else ring)
    return dataclasses.replace(rates, outer=(port,))


# experts have a capacity: no rank has more than others
PRACTICE = Practice(
    loss=Loss(passes=12, held=4), attention="flash", routing="capacity", flat_shards=False
)
ENGINE = Engine(
    waits=("1f1b",),
    gradients="float32",
    recompute=("none", "selective", "blocks"),
    shard=("none", "optimizer"),
)


def training(model: Transformer = LLAMA, **changes: Any) -> Training:
    """A training of 2,048 tokens a sample; `changes` are fields of it, or of its practice."""
    fields = {field.name for field in dataclasses.fields(Training)}
    own = {name: value for name, value in changes.items() if name in fields}
    facts = {name: value for name, value in changes.items() if name not in fields}
    return Training(
        **{
            "model": model,
            "sequence": 2048,
            "format": "bfloat16",
            "practice": replace(PRACTICE, **facts),
            "engine": ENGINE,
            "rates": RATES,
            **own,
        }
    )


def seconds(work: Training, batch: int = 32, **layout: Any) -> float:
    """Seconds of an iteration."""
    return estimate(work, Layout(**layout), batch).seconds


def size(work: Training, batch: int = 32, **layout: Any) -> float:
    """Bytes of the fullest rank."""
    return estimate(work, Layout(**layout), batch).memory_bytes
