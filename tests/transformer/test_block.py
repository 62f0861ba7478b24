"""A block's seconds and bytes, by hand."""

import dataclasses

import pytest
from msgspec.structs import replace

from partopt.documents.transformer import Calibration, Kept, Loss, MeasuredBlock, Scores
from partopt.errors import PartoptError
from partopt.transformer.block import GATHERED, Shape
from partopt.transformer.rates import (
    BLOCK_SCALES,
    COLLECTIVE_S,
    HOP_S,
    LAUNCH_S,
    MEMORY,
    OUTPUT,
    SUSTAINED,
)
from tests.transformer.helpers import EXPERTS, GPT, LLAMA, RATES, training

T, H, F = 2048, 1024, 4096
RATE, BYTES = 8e14 * SUSTAINED, 3e12
WAYS = ("product", "autograd")
SCORES = Scores(forward=9, backward=11, kept=5)


def product(m, n, k, out=2.0, added=0.0):
    arithmetic = 2 * m * n * k / RATE + out * m * n / (OUTPUT * BYTES)
    arithmetic += added * m * n / (MEMORY * BYTES)
    return max(arithmetic, (2 * (m * k + n * k) + (out + added) * m * n) / (MEMORY * BYTES))


def test_a_product_is_its_arithmetic_and_its_output_or_all_bytes():
    assert RATES.product_s(4096, 4096, 4096) == pytest.approx(product(4096, 4096, 4096))
    thin = RATES.product_s(1, 4096, 4096)
    assert thin == pytest.approx((2 * (4096 + 4096**2) + 2 * 4096) / (MEMORY * BYTES))
    fp8, mxfp8 = (RATES.product_s(8192, 8192, 8192, form) for form in ("fp8", "mxfp8"))
    written = 2 * 8192**2 / (OUTPUT * BYTES)
    assert (fp8 - written) / (mxfp8 - written) == pytest.approx(BLOCK_SCALES)


def test_the_products_of_a_gpt_block():
    """Query, key and value in one, projection, and the feed-forward's two."""
    pairs = [(3 * H, H), (H, H), (F, H), (H, F)]
    found = training(GPT).block(Shape()).parts["products"]
    assert found.forward == pytest.approx(sum(product(T, n, k) for n, k in pairs))
    # gradients of weights are added to those in float32: read and written
    backward = sum(product(T, k, n) + product(n, k, T, 4.0, 4.0) for n, k in pairs)
    assert found.backward == pytest.approx(backward)
    for own in (
        training(GPT, sums="autograd").block(Shape()),
        training(GPT).block(Shape(fsdp=True)),
    ):
        apart = sum(product(T, k, n) + product(n, k, T) for n, k in pairs)
        assert own.parts["products"].backward == pytest.approx(apart)


def test_products_that_are_apart_are_as_many():
    work = training(joined_queries=False, joined_gate=False)
    assert len(work.products(Shape())) == 7
    q, kv, f = LLAMA.q, LLAMA.kv, LLAMA.ffn
    assert [own.n for own in work.products(Shape(t=2))][:3] == [q / 2, kv / 2, kv / 2]
    joined = training().products(Shape())
    assert [own.n for own in joined] == [q + 2 * kv, H, 2 * f, H]


def test_the_passes_of_a_block():
    """Bytes a token of GPT: 22 h and 4 f forward, 34 h and 6 f backward; of Llama by its list."""
    found = training(GPT).block(Shape()).parts["passes"]
    assert found.forward == pytest.approx(T * (22 * H + 4 * F) / (MEMORY * BYTES))
    assert found.backward == pytest.approx(T * (34 * H + 6 * F) / (MEMORY * BYTES))
    own, q, kv, f = training(), LLAMA.q, LLAMA.kv, LLAMA.ffn
    passes = own.block(Shape(t=2)).parts["passes"]
    assert passes.forward == pytest.approx(
        T / 2 * (20 * H + 4 * (q + kv) + 6 * f) / (MEMORY * BYTES)
    )


def test_conversions_to_fp8_are_of_the_inputs_ofproducts():
    plain, converted = (training(format=form).block(Shape()) for form in ("bfloat16", "fp8"))
    added = converted.parts["passes"].forward - plain.parts["passes"].forward
    assert added == pytest.approx(T * 6 * (2 * H + LLAMA.q + LLAMA.ffn) / (MEMORY * BYTES))
    added = converted.parts["passes"].backward - plain.parts["passes"].backward
    back = LLAMA.q + 2 * LLAMA.kv + 2 * LLAMA.ffn + 2 * H  # gradients of the products' outputs
    assert added == pytest.approx(T * 6 * back / (MEMORY * BYTES))


def test_autograd_adds_and_shards_are_copied():
    """6 or 10 bytes a parameter are added to a gradient; shards are copied, gradients cast."""
    usual, added = (training(sums=own).block(Shape()).parts["passes"] for own in WAYS)
    assert added.forward == usual.forward
    size = 10 * LLAMA.block_parameters / (MEMORY * BYTES)
    assert added.backward - usual.backward == pytest.approx(size)
    copied = training(shard_copies=(4, 6)).block(Shape(fsdp=True)).parts["passes"]
    per = LLAMA.block_parameters / (MEMORY * BYTES)
    assert copied.forward - usual.forward == pytest.approx(4 * per)
    assert copied.backward - usual.backward == pytest.approx((6 + 2 + 4) * per)
    experts = training(EXPERTS, shard_copies=(4, 6)).block(Shape(e=4, fsdp=True)).parts["passes"]
    plain = training(EXPERTS).block(Shape(e=4)).parts["passes"]
    held = EXPERTS.dense_parameters + EXPERTS.expert_parameters / 4
    assert experts.forward - plain.forward == pytest.approx(4 * held / (MEMORY * BYTES))


def test_what_products_that_are_apart_give_is_added_at_full_width():
    facts = {"joined_queries": False, "joined_gate": False}
    for t, compiled, sums in ((1, False, 3), (4, False, 3), (1, True, 1), (4, True, 3)):
        usual = training().block(Shape(t=t)).parts["passes"]
        apart = training(compiled=compiled, **facts).block(Shape(t=t)).parts["passes"]
        assert apart.forward == usual.forward
        added = sums * 6 * T * H / (MEMORY * BYTES)
        assert apart.backward - usual.backward == pytest.approx(added)
    gates = training(sequence_parallel=False, joined_gate=False).block(Shape(t=8)).parts["tensor"]
    assert gates.backward == pytest.approx(gates.forward * 3 / 2)


def test_causal_attention_is_half_of_the_square():
    found = training(GPT).block(Shape()).parts["attention"]
    flops = 2 * T * T * H
    assert found.forward == pytest.approx(flops / (1e15 * SUSTAINED * 0.5 * T / (T + 400)))
    assert found.backward == pytest.approx(2.5 * flops / (1e15 * SUSTAINED * 0.4 * T / (T + 300)))


def test_scores_in_memory_are_all_of_the_square():
    work = training(GPT, scores=SCORES)
    forward = 8 * (product(T, T, 128) + product(T, 128, T) + 9 * T * T / (MEMORY * BYTES))
    found = work.block(Shape())
    assert found.parts["attention"].forward == pytest.approx(forward)
    assert found.saved_bytes - training(GPT).block(Shape()).saved_bytes == 5 * 8 * T * T


def test_what_tensor_parallel_ranks_exchange():
    """Two gathers and two scatters, and the gathers once more backward; or all-reduces."""
    one = T * H * 2 * 7 / 8 / 3e11
    found = training().block(Shape(t=8)).parts["tensor"]
    assert found.forward == pytest.approx(4 * (one + COLLECTIVE_S))
    assert found.backward == pytest.approx(6 * (one + COLLECTIVE_S))
    found = training(sequence_parallel=False).block(Shape(t=8)).parts["tensor"]
    assert found.forward == found.backward == pytest.approx(2 * (2 * one + COLLECTIVE_S))
    hidden = training(tp_overlap="async").block(Shape(t=8)).parts["tensor"]
    assert hidden.forward == pytest.approx(4 * one * 0.5)
    assert training().block(Shape()).parts["tensor"] == (0.0, 0.0)
    # experts exchange their rows otherwise
    found = training(EXPERTS).block(Shape(t=8)).parts["tensor"]
    assert found.forward == pytest.approx(2 * (one + COLLECTIVE_S))


def test_keys_and_values_go_round_behind_attention():
    work, shape = training(sequence=65_536), Shape(c=16)
    block, tokens = work.block(shape), 65_536 / 16
    late = 15 * (HOP_S + 4 * tokens * LLAMA.kv / RATES.port) - block.parts["attention"].forward
    assert late > 0
    assert block.parts["context"].forward == pytest.approx(late)
    assert "context" not in training().block(Shape()).parts


def test_experts_of_a_block():
    block = training(EXPERTS).block(Shape())
    assert block.parts["exchange"] == (0.0, 0.0)
    apart = training(EXPERTS).block(Shape(e=8)).parts["exchange"].forward
    rows = T * 2
    assert apart == pytest.approx(2 * (rows * H * 2 / RATES.link + HOP_S))
    two = training(EXPERTS, rates=dataclasses.replace(RATES, server=4))
    across = two.block(Shape(e=8)).parts["exchange"].forward
    assert across == pytest.approx(2 * (rows * H * 2 / 2 / RATES.port + HOP_S))
    copies = training(EXPERTS, dispatch="copies", rates=two.rates).block(Shape(e=8))
    assert copies.parts["exchange"].forward < across
    hidden = training(EXPERTS, dispatch_overlap=True).block(Shape(e=8))
    assert hidden.parts["exchange"].forward <= apart


@pytest.mark.parametrize(
    ("e", "t", "server", "servers"), [(8, 8, 8, 1), (8, 4, 4, 2), (6, 2, 4, 2)]
)
def test_an_exchange_crosses_the_servers_that_experts_ranks_fill(e, t, server, servers):
    """They follow each other over tensor ranks: 8 fill one server of 8, whatever those are."""
    work = training(replace(EXPERTS, experts=24), rates=dataclasses.replace(RATES, server=server))
    rows_bytes = T / t * 2 * H * 2
    out_s = rows_bytes * (1 - 1 / servers) / RATES.port
    found = work.block(Shape(t=t, e=e)).parts["exchange"].forward
    assert found == pytest.approx(2 * (max(out_s, rows_bytes / servers / RATES.link) + HOP_S))


def test_experts_by_hand():
    """Products of all rows, weights and rows in passes."""
    block, rows, h, f = training(EXPERTS).block(Shape(e=4)), 2 * T, H, EXPERTS.expert_ffn
    weights = EXPERTS.expert_parameters / 4
    forward = product(rows, 2 * f, h) + product(rows, h, f)
    passed = rows * (12 * h + 6 * f) + 2 * weights
    assert block.parts["experts"].forward == pytest.approx(forward + passed / (MEMORY * BYTES))
    # gradients of weights are added in passes: 4 bytes are read and 4 written
    backward = sum(
        product(rows, k, n) + product(n, k, rows, 0.0, 0.0) for n, k in ((2 * f, h), (h, f))
    )
    passed = rows * (12 * h + 10 * f) + weights * (2 + 2 * 4)
    assert block.parts["experts"].backward == pytest.approx(backward + passed / (MEMORY * BYTES))
    fp8 = training(EXPERTS, format="fp8").block(Shape(e=4))
    passed = rows * (12 * h + 6 * f + 6 * (h + f)) + weights
    forward = RATES.product_s(rows, 2 * f, h, "fp8") + RATES.product_s(rows, h, f, "fp8")
    assert fp8.parts["experts"].forward == pytest.approx(forward + passed / (MEMORY * BYTES))
    # three servers hold twelve ranks of experts; a token goes once to each of the two others
    many = replace(EXPERTS, experts=12, experts_per_token=3)
    work = training(many, dispatch="copies", rates=dataclasses.replace(RATES, server=4))
    out = T * H * 2 * (3 - 1) * (1 - (1 - 1 / 3) ** 3)
    near = T * H * 2 * 12 * (1 - (1 - 1 / 12) ** 3)
    found = work.block(Shape(e=12)).parts["exchange"].forward
    assert found == pytest.approx(2 * (max(out / RATES.port, near / RATES.link) + HOP_S))


def test_a_block_takes_what_its_device_or_its_host_takes():
    """Few tokens wait for 48 launches of attention, 318 of experts and 2 each; many for none."""
    rates = dataclasses.replace(RATES, launch=LAUNCH_S)
    few, many = (training(EXPERTS, sequence=tokens, rates=rates) for tokens in (64, 65_536))
    host_s = (48 + 318 + 4.7 * 2) * LAUNCH_S
    block = few.block(Shape(e=4))
    assert (block.forward_s, block.backward_s) == pytest.approx((host_s, 2 * host_s))
    assert few.block(Shape(e=4, recompute="always")).seconds == pytest.approx(4 * host_s)
    assert "launches" not in many.block(Shape(e=4)).parts
    converted = training(EXPERTS, sequence=64, format="fp8", rates=rates).block(Shape(e=4))
    assert converted.forward_s == pytest.approx(host_s + 4.9 * 2 * LAUNCH_S)
    small = training(LLAMA, sequence=64, rates=dataclasses.replace(RATES, launch=1e-3))
    assert small.block(Shape()).forward_s == pytest.approx(60e-3)


@pytest.mark.parametrize(
    ("graphs", "held"), [("none", 0), ("router", 149), ("attention", 149 + 48), ("full", 375.4)]
)
def test_graphs_take_launches_away(graphs, held):
    slow = dataclasses.replace(RATES, launch=1e-3)
    found = training(EXPERTS, graphs=graphs, rates=slow).block(Shape(e=4))
    device_s = sum(s.forward for name, s in found.parts.items() if name != "launches")
    assert found.forward_s == pytest.approx(max(device_s, (375.4 - held) * 1e-3))


def test_what_was_measured_has_its_launches():
    once = MeasuredBlock(microbatch_size=1, forward_s=1e-5, backward_s=2e-5)
    measured = Calibration(name="block", sha256="0" * 64, blocks=[once])
    rates = dataclasses.replace(RATES, launch=LAUNCH_S)
    block = training(EXPERTS, sequence=64, calibration=measured, rates=rates).block(Shape())
    assert (block.forward_s, block.backward_s) == pytest.approx((1e-5, 2e-5))


def test_what_is_made_again():
    never, always = (training().block(Shape(t=2, recompute=own)) for own in ("never", "always"))
    assert (never.again_s, always.again_s) == (0.0, always.forward_s)
    early = training(stops_early=True).block(Shape(t=2, recompute="always"))
    scatter = T * H * 2 / 2 / RATES.link
    assert always.again_s - early.again_s == pytest.approx(product(T, H, LLAMA.ffn / 2) + scatter)
    scores = training(GPT, scores=SCORES).block(Shape(recompute="selective"))
    assert scores.again_s == scores.parts["attention"].forward
    assert training().block(Shape(recompute="selective")).again_s == 0.0


def test_operations_are_made_again_every_second_product():
    facts = {"joined_queries": False, "joined_gate": False, "selective": "operations"}
    work = training(kept_selective=Kept(hidden=2, keys=2, gated=2, rotary=0), **facts)
    block, full = (work.block(Shape(recompute=own)) for own in ("selective", "always"))
    products = sum(product(T, n, k) for n, k in ((LLAMA.kv, H), (H, LLAMA.q), (LLAMA.ffn, H)))
    residual = 6 * T * H / (MEMORY * BYTES)
    assert block.again_s == pytest.approx(products + block.parts["passes"].forward - residual)
    assert 0 < block.again_s < full.again_s
    cut = work.block(Shape(t=4, recompute="selective"))
    # two ranks have the same one of two heads of keys
    products = sum(
        product(T, n, k) for n, k in ((LLAMA.head_size, H), (H, LLAMA.q / 4), (LLAMA.ffn / 4, H))
    )
    gathers = 2 * T * H * 2 * 3 / 4 / RATES.link
    passes = cut.parts["passes"].forward - residual / 4
    assert cut.again_s == pytest.approx(products + passes + gathers)
    assert block.saved_bytes == T * (2 * H + 4 * LLAMA.q + 2 * LLAMA.kv + 2 * LLAMA.ffn)


def test_bytes_that_a_block_keeps_are_those_of_korthikanti():
    """34 s b h, of which sequence parallelism cuts all; 2 s b h where all is made again."""
    for t in (1, 4):
        assert training(GPT).block(Shape(t=t)).saved_bytes == 34 * T * H / t
        whole = training(GPT, sequence_parallel=False).block(Shape(t=t)).saved_bytes
        assert whole == T * H * (10 + 24 / t)
    again = training(GPT).block(Shape(recompute="always"))
    assert (again.saved_bytes, again.whole_bytes) == (2 * T * H, 34 * T * H)
    scores = training(GPT, scores=SCORES)
    assert scores.block(Shape(recompute="selective")).saved_bytes == 34 * T * H


def test_bytes_of_other_blocks():
    q, kv, f = LLAMA.q, LLAMA.kv, LLAMA.ffn
    assert training().block(Shape()).saved_bytes == T * (8 * H + 6 * q + 4 * kv + 6 * f)
    fp8 = training(format="fp8").block(Shape()).saved_bytes
    assert fp8 == T * (6 * H + 5 * q + 4 * kv + 5 * f)
    experts, fe = training(EXPERTS).block(Shape()).saved_bytes, EXPERTS.expert_ffn
    assert experts == T * (6 * H + 6 * q + 4 * kv + 2 * (4 * H + 6 * fe))


def test_the_head_and_its_loss():
    V, work = 32_000, training()
    products = product(T, V, H) + product(T, H, V) + product(V, H, T, 4.0, 4.0)
    assert work.head_s(Shape()) == pytest.approx(products + 12 * T * V / (MEMORY * BYTES))
    gathered = training(loss=Loss(passes=12, held=4, gathers=True))
    assert gathered.head_s(Shape()) == work.head_s(Shape())
    part = V / 4
    products = product(T, part, H) + product(T, H, part) + product(part, H, T, 4.0, 4.0)
    exchanges = (3 * 2 * T * H + 2 * T * V) * 3 / 4 / RATES.link
    passes = (12 + GATHERED) * T * V / (MEMORY * BYTES)  # of all logits, on each of four ranks
    assert gathered.head_s(Shape(t=4)) == pytest.approx(products + exchanges + passes)


@pytest.mark.parametrize(
    ("form", "own"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("fp8", "bfloat16")]
)
def test_the_head_is_in_16_bits(form, own):
    products = {name: RATES.products[name] / (2 + (name == own)) for name in RATES.products}
    slower, rates = training(format=own), dataclasses.replace(RATES, products=products)
    alone = training(format=own, rates=rates).head_s(Shape())
    assert training(format=form, rates=rates).head_s(Shape()) == alone > slower.head_s(Shape())


def test_more_ranks_never_take_longer_nor_keep_more():
    for model in (GPT, LLAMA):
        blocks = [training(model, tp_overlap="buffers").block(Shape(t=t)) for t in (1, 2, 4, 8)]
        kept = [own.saved_bytes for own in blocks]
        work = [own.parts["products"].forward for own in blocks]
        assert kept == sorted(kept, reverse=True)
        assert work == sorted(work, reverse=True)


def test_a_format_or_an_attention_that_is_not_known_is_refused():
    rates = dataclasses.replace(RATES, products={"bfloat16": 1e14})
    with pytest.raises(PartoptError, match="device: what fp8 achieves on it is not known"):
        training(format="fp8", rates=rates)
    with pytest.raises(PartoptError, match="what fa3 achieves"):
        training(practice=replace(training().practice, attention="fa3"))
