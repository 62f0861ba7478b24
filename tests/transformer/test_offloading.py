"""What modules save in the host's memory, by hand."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from partopt.documents.engine import Layout
from partopt.documents.transformer import Latent
from partopt.errors import PartoptError
from partopt.transformer.block import Shape
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import estimate, host_bytes
from partopt.transformer.offloading import BLOCKS, copied_modules
from partopt.transformer.rates import MEMORY
from tests.transformer.helpers import EXPERTS, LLAMA, RATES, training

T, H, KV, Q = 2048, 1024, 256, 1024  # tokens; widths between blocks, of keys, of queries
WIDE = replace(LLAMA, kv_heads=8, blocks=24)
LATENT = replace(
    EXPERTS,
    kv_heads=8,
    head_size=96,
    latent=Latent(queries=512, keys=512, rotary=32, values=64),
    dense_first=1,
    ffn=3584,
)
DENSE, OF_EXPERTS = LATENT.kinds()[:2]
ATTENTION = "qkv_linear+core_attn+attn_proj"


def moved(work, names, kind=None, **shape):
    """Bytes that a block keeps less with these modules on the host, and those that are copied."""
    never, again = work.block(Shape(**shape), kind), shape.get("modules", ())
    practice = replace(work.practice, offload=names)
    named = tuple(copied_modules(work.model, practice, again))
    found = work.block(Shape(**shape, offload=named), kind)
    return never.saved_bytes - found.saved_bytes, found.copied_bytes


def test_attention_of_a_dense_block():
    """Keys and values of 2 heads are half a million numbers each: too few to be copied."""
    work = training(offload=ATTENTION)
    assert moved(work, "qkv_linear") == (4 * T * H, 4 * T * H)  # input of the norm, its output
    # queries as they come and turned; the output, which the projection still saves
    assert moved(work, "core_attn") == (4 * T * Q, 4 * T * Q)
    assert moved(work, "core_attn+attn_proj") == (6 * T * Q, 6 * T * Q)
    assert moved(work, "attn_norm+mlp_norm+expert_fc1+moe_act") == (0, 0)
    wide = training(WIDE, offload=ATTENTION)
    assert moved(wide, "core_attn") == ((4 + 4) * T * Q, (4 + 4) * T * Q)
    assert moved(wide, "core_attn", t=2) == (4 * T * Q, 4 * T * Q)
    assert moved(wide, "core_attn", t=4) == (0, 0)
    assert moved(training(WIDE, offload=ATTENTION, format="fp8"), ATTENTION) == (
        T * (3 * H + (4 + 4 + 1) * Q),
        T * (3 * H + (4 + 4 + 1) * Q),
    )


def test_latent_attention_and_experts():
    work = training(LATENT, offload=ATTENTION)
    assert moved(work, "attn_norm", DENSE) == (2 * T * H, 2 * T * H)
    # the norm's output; what is compressed, 3 bytes of a number; inputs of expansions
    compressed = 3 * (512 + 512 + 32) + 2 * (512 + 512)
    assert moved(work, "qkv_linear", DENSE) == (T * (2 * H + compressed),) * 2
    q, values = 8 * 96, 8 * 64
    freed, copied = moved(work, "core_attn+attn_proj", DENSE)
    assert freed == 2 * T * (2 * q + 2 * values)
    assert copied - freed == 2 * T * values  # the output twice
    assert moved(work, "mlp_norm", DENSE) == (0, 0)
    assert moved(work, "mlp_norm", OF_EXPERTS) == (2 * T * H, 2 * T * H)
    rows = 2 * T  # with a capacity no rank holds more
    assert moved(work, "expert_fc1", OF_EXPERTS) == (2 * rows * H,) * 2
    assert moved(work, "moe_act", OF_EXPERTS) == (4 * rows * 512,) * 2
    real = training(LATENT, offload=ATTENTION, routing="real")  # memory is held for more rows
    assert moved(real, "moe_act", OF_EXPERTS) == pytest.approx(
        (1.3 * 4 * rows * 512, 4 * rows * 512)
    )
    again = {"recompute": "selective", "modules": ("moe_act",)}
    assert moved(work, "moe_act", OF_EXPERTS, **again) == (4 * rows * 512,) * 2


@pytest.mark.parametrize(("link", "shows"), [(1e9, True), (1e15, False)])
def test_copies_show_beyond_the_block_or_take_of_the_memorys_bandwidth(link, shows):
    work = training(WIDE, offload=ATTENTION, rates=dataclasses.replace(RATES, host_link=link))
    shape = Shape(offload=tuple(ATTENTION.split("+")))
    never, found = work.block(Shape()), work.block(shape)
    copy_s, passed_s = found.copied_bytes / link, found.copied_bytes / (MEMORY * RATES.bandwidth)
    if shows:
        expected = copy_s - never.forward_s, copy_s - never.backward_s
    else:
        expected = passed_s, passed_s
    assert found.parts["offload"] == pytest.approx(expected)
    assert found.forward_s - never.forward_s == pytest.approx(expected[0])


def test_a_device_holds_what_is_in_flight_and_the_host_the_rest():
    """Two blocks' tensors; and inputs of stages, which the schedule holds."""
    layout = Layout(pp=4, chunks=2, dp=2)
    plain, work = training(WIDE), training(WIDE, offload="qkv_linear+core_attn")
    before, after = (estimate(one, layout, 64).memory for one in (plain, work))
    block, flight = 12 * T * H, (4 + 7) / 2  # of chunks of 3 blocks, so many microbatches
    gone = before["activations"] - after["activations"]
    assert gone == pytest.approx(1.05 * flight * (6 * block - 2 * 2 * T * H))
    assert after["at work"] - before["at work"] == pytest.approx(1.05 * BLOCKS * block)
    assert host_bytes(work, layout, 64) == pytest.approx(8 * flight * 6 * block)
    assert host_bytes(plain, layout, 64) == 0
    for again in ("always", 2):  # blocks that are made again save nothing else
        made = replace(layout, recompute=again)
        assert estimate(work, made, 64) == estimate(plain, made, 64)


@pytest.mark.parametrize(
    ("model", "offload", "again", "facts", "expected"),
    [
        (WIDE, "attn_norm+mlp_norm+expert_fc1+moe_act", "", {}, ""),
        (WIDE, ATTENTION, "mlp", {}, ATTENTION),
        (WIDE, ATTENTION, "core_attn", {}, "qkv_linear"),
        (EXPERTS, "attn_norm+mlp_norm+moe_act", "", {}, "mlp_norm+moe_act"),
        (EXPERTS, "mlp_norm+moe_act", "", {"graphs": "router"}, "moe_act"),
        (LATENT, "attn_norm+attn_proj", "", {"graphs": "attention"}, "attn_proj"),
        (LATENT, f"attn_norm+{ATTENTION}", "mla_up_proj", {}, "attn_norm+qkv_linear"),
        (EXPERTS, "expert_fc1+moe_act", "moe", {}, ""),
        (EXPERTS, "expert_fc1+moe_act", "moe_act", {}, "expert_fc1+moe_act"),
    ],
)
def test_modules_that_are_not_there_or_made_again_copy_nothing(
    model, offload, again, facts, expected
):
    practice = training(model, **facts, offload=offload).practice
    assert "+".join(copied_modules(model, practice, again.split("+"))) == expected


@pytest.mark.parametrize(
    ("facts", "offload", "expected"),
    [
        ({"graphs": "full"}, "moe_act", "graphs=full wait for copies"),
        ({"fused_experts": True}, "moe_act", "fused-experts copy what expert_fc1+moe_act save"),
        ({"fused_experts": True}, "expert_fc1+moe_act", ""),
        ({"graphs": "attention"}, "moe_act", ""),
    ],
)
def test_what_is_not_computed_is_a_fault(facts, offload, expected):
    work = training(EXPERTS, **facts, offload=offload)
    faults = "; ".join(fault.message for fault in find_faults(work, Layout(), 16))
    assert expected in faults and bool(faults) == bool(expected)


def test_a_device_whose_way_to_the_host_is_not_known_is_refused():
    rates = dataclasses.replace(RATES, host_link=0.0)
    with pytest.raises(PartoptError, match="what offload achieves on it is not known"):
        training(offload=ATTENTION, rates=rates)
