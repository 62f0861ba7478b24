"""A block's seconds and bytes, by hand."""

import dataclasses
import itertools
import random

import pytest
from msgspec.structs import replace

from partopt.documents.transformer import Calibration, Kept, Latent, Loss, MeasuredBlock, Scores
from partopt.errors import PartoptError
from partopt.transformer.block import BESIDE, GATHERED, GROUPED, JOINED, UNDER_GRADIENTS, Shape
from partopt.transformer.experts import (
    CONVERTED,
    DEEPEP,
    DRAWN,
    EXCHANGE_S,
    LOGITS,
    NVLINK,
    OVERLAPPED,
    ROUTER,
    TILE,
)
from partopt.transformer.rates import (
    BLOCK_SCALES,
    COLLECTIVE_S,
    HOP_S,
    LAUNCH_S,
    MEMORY,
    OUTPUT,
    SUSTAINED,
)
from partopt.transformer.rates import LATENT as LATENT_RATE
from tests.transformer.helpers import EXPERTS, GPT, LLAMA, PORT, RATES, training

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
    size = 10 * LLAMA.block_parameters(LLAMA.kinds()[0]) / (MEMORY * BYTES)
    assert added.backward - usual.backward == pytest.approx(size)
    copied = training(shard_copies=(4, 6)).block(Shape(fsdp=True)).parts["passes"]
    per = LLAMA.block_parameters(LLAMA.kinds()[0]) / (MEMORY * BYTES)
    assert copied.forward - usual.forward == pytest.approx(4 * per)
    assert copied.backward - usual.backward == pytest.approx((6 + 2 + 4) * per)
    experts = training(EXPERTS, shard_copies=(4, 6)).block(Shape(e=4, fsdp=True)).parts["passes"]
    plain = training(EXPERTS).block(Shape(e=4)).parts["passes"]
    held = (
        EXPERTS.dense_parameters(EXPERTS.kinds()[0])
        + EXPERTS.expert_parameters(EXPERTS.kinds()[0]) / 4
    )
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
    # Megatron's backward: behind other products the gathers again and the scatters; all-reduces
    for parallel, beside in ((True, 4 * (one + COLLECTIVE_S)), (False, 4 * one + 2 * COLLECTIVE_S)):
        usual, hidden = (
            training(sequence_parallel=parallel, tp_overlap=how).block(Shape(t=8)).parts["tensor"]
            for how in ("none", "backward")
        )
        assert hidden.forward == usual.forward
        assert usual.backward - hidden.backward == pytest.approx(UNDER_GRADIENTS * beside)
    # experts exchange their rows otherwise
    found = training(EXPERTS).block(Shape(t=8)).parts["tensor"]
    assert found.forward == pytest.approx(2 * (one + COLLECTIVE_S))


def test_keys_and_values_go_round_behind_attention():
    work, shape = training(sequence=65_536), Shape(c=16)
    block, tokens = work.block(shape), 65_536 / 16
    late = 15 * (HOP_S + 4 * tokens * LLAMA.kv / PORT) - block.parts["attention"].forward
    assert late > 0
    assert block.parts["context"].forward == pytest.approx(late)
    assert "context" not in training().block(Shape()).parts


LINK = NVLINK * RATES.link  # what exchanges reach in a server


def exchange_s(e, t=1, server=8, **facts):
    """Seconds of one exchange of a forward, of two."""
    model = replace(EXPERTS, experts=24, **facts.pop("model", {}))
    rates = dataclasses.replace(RATES, server=server)
    block = training(model, rates=rates, **facts).block(Shape(t=t, e=e))
    return block.parts["exchange"].forward / 2


@pytest.mark.parametrize(
    ("e", "t", "server", "servers"),
    [(8, 1, 8, 1), (8, 8, 8, 1), (8, 1, 4, 2), (8, 4, 4, 2), (6, 2, 4, 2), (12, 1, 4, 3)],
)
def test_rows_cross_the_servers_that_experts_ranks_fill(e, t, server, servers):
    """These follow each other, tensor ranks among them: 8 fill one server of 8."""
    rows = T / t * 2 * H * 2
    near = rows * (1 - 1 / e) if servers == 1 else rows / servers
    found = max(rows * (1 - 1 / servers) / PORT, near / LINK)
    assert exchange_s(e, t, server) == pytest.approx(found + EXCHANGE_S)
    assert training(EXPERTS).block(Shape()).parts["exchange"] == (0.0, 0.0)


@pytest.mark.parametrize(("dispatch", "rate"), [("deepep", DEEPEP), ("hybridep", LINK)])
def test_copies_of_a_token_go_once_to_a_server_and_a_rank(dispatch, rate):
    token, model = T * H * 2, {"experts_per_token": 3}
    near = token * 7 * (1 - (1 - 1 / 8) ** 3)
    found = exchange_s(8, dispatch=dispatch, model=model)
    assert found == pytest.approx(near / rate + EXCHANGE_S)
    out = token * (3 - 1) * (1 - (1 - 1 / 3) ** 3)
    near = token * 12 * (1 - (1 - 1 / 12) ** 3)
    found = exchange_s(12, server=4, dispatch=dispatch, model=model)
    assert found == pytest.approx(max(out / PORT, near / rate) + EXCHANGE_S)


def test_the_servers_of_copies_by_drawing_experts():
    """Every set of two of 24 experts on 12 ranks, each with two: servers that a token reaches."""
    reached = [
        len({place // 2 // 4 for place in taken})
        for taken in itertools.product(range(24), repeat=2)
    ]
    mean = sum(reached) / len(reached)  # its rank's server is one of three
    slow = dataclasses.replace(RATES, link=1e18, server=4)
    work = training(replace(EXPERTS, experts=24), rates=slow, dispatch="hybridep")
    found = work.block(Shape(e=12)).parts["exchange"].forward / 2 - EXCHANGE_S
    assert found == pytest.approx(T * H * 2 * mean * (1 - 1 / 3) / PORT)


def test_groups_of_a_router_limit_servers():
    """Of 8 groups in 4 servers a token takes 4: no more than two servers, of two each."""
    slow = dataclasses.replace(RATES, link=1e18, server=2)
    grouped = replace(EXPERTS, experts_per_token=6, groups=8, groups_per_token=4)
    work = training(grouped, rates=slow, dispatch="hybridep")
    found = work.block(Shape(e=8)).parts["exchange"].forward / 2 - EXCHANGE_S
    servers = 2 * (1 - (1 - 1 / 2) ** 6)
    assert found == pytest.approx(T * H * 2 * servers * (1 - 1 / 4) / PORT)


def test_some_of_an_exchange_hides_behind_another_microbatch():
    plain, hidden = (
        training(EXPERTS, sequence=65_536, dispatch_overlap=own).block(Shape(e=8))
        for own in (False, True)
    )
    shown = 1 - OVERLAPPED * (1 - RATES.taken)
    assert sum(hidden.parts["exchange"]) == pytest.approx(sum(plain.parts["exchange"]) * shown)


def test_an_expert_may_be_cut():
    """Rows come from both ranks, each with half of an expert; exchanges reach both."""
    whole, cut = (training(EXPERTS).experts(Shape(e=4, etp=n)) for n in (1, 2))
    assert (cut.rows, cut.width) == (2 * whole.rows, whole.width / 2)
    assert cut.exchange_s > whole.exchange_s
    assert training(EXPERTS).parameters(Shape(e=4, etp=2)).experts == (
        EXPERTS.expert_parameters(EXPERTS.kinds()[0]) / 8
    )


def test_experts_by_hand():
    """Products of all rows and half a tile an expert, weights and rows in passes, a router."""
    block, rows, h, f = training(EXPERTS).block(Shape(e=4)), 2 * T, H, EXPERTS.expert_ffn
    pairs = ((2 * f, h), (h, f))
    tiles = sum(2 * 2 * TILE / 2 * n * k for n, k in pairs) / RATE
    router = 2 * T * 8 * h / RATE / ROUTER + LOGITS * T * 8 / (MEMORY * BYTES)
    forward = sum(product(rows, n, k) for n, k in pairs) + tiles
    passed = rows * (12 * h + 6 * f) / (MEMORY * BYTES)
    assert block.parts["experts"].forward == pytest.approx(forward + passed + router)
    # of the second expert weights are read once more, 4 bytes of its gradients read and written
    more = sum(n * k for n, k in pairs) * ((2 + 4) / MEMORY + 4 / OUTPUT) / BYTES
    backward = sum(product(rows, k, n) + product(n, k, rows, 4.0, 4.0) for n, k in pairs)
    passed = rows * (12 * h + 10 * f) / (MEMORY * BYTES)
    router = 2 * 2 * T * 8 * h / RATE / ROUTER + LOGITS * T * 8 / (MEMORY * BYTES)
    backward += 2 * tiles + more + passed + router
    assert block.parts["experts"].backward == pytest.approx(backward)


def test_conversions_of_experts_and_experts_that_convert_in_their_products():
    rows, h, f = 2 * T, H, EXPERTS.expert_ffn
    shape = Shape(e=4)
    plain, fused = (
        training(EXPERTS, format="fp8", fused_experts=own).experts(shape).work_s
        for own in (False, True)
    )
    converted = CONVERTED * 6 * rows * (h + f) + rows * 3 * f - rows * 3 * h
    assert plain.forward - fused.forward == pytest.approx(converted / (MEMORY * BYTES))


@pytest.mark.parametrize(("routing", "more"), [("capacity", 1.0), ("real", DRAWN)])
def test_the_slowest_rank_has_more(routing, more):
    found = training(EXPERTS, routing=routing).experts(Shape(e=4))
    assert found.imbalance == more


def test_balanced_routing_is_as_uneven_as_draws_are():
    """The largest of 64 normal sums of 4,096 draws, in the mean of many; the formula bounds it."""
    experts = training(replace(EXPERTS, experts=64), routing="balanced").experts(Shape(e=64))
    rng, rows = random.Random(3), experts.rows
    drawn = [max(rng.gauss(rows, rows**0.5) for _ in range(64)) / rows for _ in range(400)]
    mean = sum(drawn) / len(drawn)
    assert mean <= experts.imbalance <= 1 + 1.3 * (mean - 1)


LATENT = replace(
    EXPERTS,
    heads=16,
    kv_heads=16,
    head_size=96,
    latent=Latent(queries=384, keys=256, rotary=32, values=64),
    ffn=3584,
    shared_ffn=512,
    dense_first=1,
)
DENSE, OF_EXPERTS = LATENT.kinds()[0], LATENT.kinds()[1]


def test_latent_attention_by_hand():
    """Five products, of which ranks cut what is expanded; every rank compresses its tokens."""
    work = training(LATENT)
    products = [tuple(found[:2]) for found in work.products(Shape(t=2), DENSE)]
    assert products == [
        (256 + 32, H),
        (384, H),
        (16 * (64 + 64) / 2, 256),
        (16 * 96 / 2, 384),
        (H, 16 * 64 / 2),
        (2 * 3584 / 2, H),
        (H, 3584 / 2),
    ]
    pairs = [(288, H), (384, H), (2048, 256), (1536, 384), (H, 1024), (7168, H), (H, 3584)]
    found = work.block(Shape(), DENSE).parts
    assert found["products"].forward == pytest.approx(sum(product(T, n, k) for n, k in pairs))
    low, turned = 640, 16 * (4 * 32 + 2 * (64 + 64) + 2 * (96 + 64))
    passed = T * (20 * H + 6 * 3584 + turned + 8 * low)
    assert found["passes"].forward == pytest.approx(passed / (MEMORY * BYTES))
    flops = T**2 / 2 * 16 * 2 * (96 + 64)
    rate = 1e15 * SUSTAINED * LATENT_RATE * 0.5 * T / (T + 400)
    assert found["attention"].forward == pytest.approx(flops / rate)
    kept = 8 * H + 3 * (low + 32) + 2 * 1024 + 2 * low + 2 * 1536 + 2 * 16 * (96 + 64) + 6 * 3584
    assert work.block(Shape(), DENSE).saved_bytes == T * kept


def test_a_shared_expert_is_a_feed_forward_beside_experts():
    block, shared = (training(replace(LATENT, shared_ffn=n)).block(Shape()) for n in (0, 512))
    more = product(T, 2 * 512, H) + product(T, H, 512)
    change = shared.parts["products"].forward - block.parts["products"].forward
    assert change == pytest.approx(more)


def test_blocks_of_a_window_see_fewer_keys():
    work = training(replace(LLAMA, window=256, full_period=2))
    windowed, full = (work.block(Shape(), kind).parts["attention"] for kind in work.kinds[:2])
    pairs = (256 * T - 256**2 / 2) / (T**2 / 2)
    slower = (512 + 400) / 512 / ((T + 400) / T)
    assert windowed.forward == pytest.approx(full.forward * pairs * slower)
    assert work.block(Shape()) == work.block(Shape(), work.kinds[-1])


def test_modules_are_made_again_by_name():
    """Each takes what it took forward, and its bytes are not kept."""
    work, never = training(LATENT), training(LATENT).block(Shape(e=4))

    def again(name, kind=OF_EXPERTS):
        return work.block(Shape(e=4, recompute="selective", modules=(name,)), kind)

    experts, rows, tokens = work.experts(Shape(e=4)), 2 * T, T
    expansion = product(T, 2048, 256) + product(T, 1536, 384)
    turned = 16 * (4 * 32 + 2 * (64 + 64) + 2 * (96 + 64))
    found = again("mla_up_proj")
    assert found.again_s == pytest.approx(expansion + T * turned / (MEMORY * BYTES))
    kept = T * (2 * 640 + 2 * 1536 + 2 * 16 * (96 + 64))
    assert never.saved_bytes - found.saved_bytes == kept
    assert again("core_attn").again_s == never.parts["attention"].forward
    assert again("moe_act").again_s == experts.activation_s.forward
    assert never.saved_bytes - again("moe_act").saved_bytes == 2 * rows * 512
    assert again("layernorm").again_s == pytest.approx(8 * T * H / (MEMORY * BYTES))
    assert never.saved_bytes - again("layernorm").saved_bytes == 4 * tokens * H
    shared = product(T, 1024, H) + product(T, H, 512) + 6 * 512 * T / (MEMORY * BYTES)
    assert again("shared_experts").again_s == pytest.approx(shared)
    assert never.saved_bytes - again("shared_experts").saved_bytes == 6 * 512 * T
    whole = shared + experts.work_s.forward + experts.both_s
    assert again("moe").again_s == pytest.approx(whole)
    assert again("moe").saved_bytes < never.saved_bytes
    assert again("mlp").again_s == 0.0
    dense = again("mlp", DENSE)  # with its norm
    one = product(T, 7168, H) + product(T, H, 3584)
    one += (6 * 3584 + 4 * H) * T / (MEMORY * BYTES)
    assert dense.again_s == pytest.approx(one)
    kept = work.block(Shape(e=4), DENSE).saved_bytes - dense.saved_bytes
    assert kept == T * (2 * H + 6 * 3584)


def test_only_norms_that_are_modules_are_made_again():
    """Of latent attention and of experts; others are in the product behind them."""
    kept = {}
    for work, kind in [(training(LATENT), DENSE), (training(EXPERTS), None), (training(), None)]:
        shapes = Shape(), Shape(recompute="selective", modules=("layernorm",))
        never, again = (work.block(shape, kind) for shape in shapes)
        kept[work.model.name, kind] = never.saved_bytes - again.saved_bytes
        assert again.again_s == pytest.approx(2 * kept[work.model.name, kind] / (MEMORY * BYTES))
    assert [*kept.values()] == [2 * T * H, 2 * T * H, 0]


def test_a_feed_forward_that_is_made_again_is_exchanged_again():
    """Its input is gathered and its output scattered over the group: half of a block's."""
    work = training(rates=dataclasses.replace(RATES, link=1e9))
    one, four = (work.block(Shape(t=t, recompute="selective", modules=("mlp",))) for t in (1, 4))
    shown_s = four.parts["tensor"].forward / 2
    assert shown_s > one.again_s > four.again_s - shown_s > one.again_s / 4


def test_a_further_token_takes_a_block_a_head_and_what_joins_them():
    work = training(replace(LATENT, further=1))
    block = work.block(Shape())
    joined = product(T, H, 2 * H) + product(T, 2 * H, H) + product(2 * H, H, T, 4.0, 4.0)
    joined += JOINED * T * H / (MEMORY * BYTES)
    found = sum(work.further_s(Shape()))
    assert found == pytest.approx(block.seconds + block.head_s + joined)


def test_a_block_takes_what_its_device_or_its_host_takes():
    """Few tokens wait for 48 launches of attention, 310 of experts and 2 each; many for none."""
    rates = dataclasses.replace(RATES, launch=LAUNCH_S)
    few, many = (
        training(EXPERTS, sequence=tokens, rates=rates, routing="balanced")
        for tokens in (64, 65_536)
    )
    host_s = (48 + 170 + 140 + 4.7 * 2) * LAUNCH_S
    block = few.block(Shape(e=4))
    assert (block.forward_s, block.backward_s) == pytest.approx((host_s, 2 * host_s))
    assert few.block(Shape(e=4, recompute="always")).seconds == pytest.approx(4 * host_s)
    assert "launches" not in many.block(Shape(e=4)).parts
    facts = {"sequence": 64, "rates": rates}
    converted = training(EXPERTS, format="fp8", routing="balanced", **facts).block(Shape(e=4))
    assert converted.forward_s == pytest.approx(host_s + 4.9 * 2 * LAUNCH_S)
    known = training(EXPERTS, **facts).block(Shape(e=4))  # sizes: nothing is waited for
    assert known.forward_s == pytest.approx(GROUPED * host_s)
    beside = training(EXPERTS, routing="balanced", dispatch_overlap=True, **facts)
    assert beside.block(Shape(e=4)).seconds == pytest.approx(BESIDE * 3 * host_s)
    latent = training(LATENT, graphs="router", **facts, routing="balanced").block(Shape(e=4))
    assert latent.forward_s == pytest.approx((84 + 140 + 9.4) * LAUNCH_S)
    twice = Shape(e=4, recompute="selective", modules=("mla_up_proj",))
    again = training(LATENT, graphs="router", **facts, routing="balanced").block(twice)
    assert again.forward_s - latent.forward_s == pytest.approx(80 * LAUNCH_S)
    small = training(LLAMA, sequence=64, rates=dataclasses.replace(RATES, launch=1e-3))
    assert small.block(Shape()).forward_s == pytest.approx(60e-3)


@pytest.mark.parametrize(
    ("graphs", "held"), [("none", 0), ("router", 174), ("attention", 174 + 44), ("full", 367.4)]
)
def test_graphs_take_launches_away(graphs, held):
    slow = dataclasses.replace(RATES, launch=1e-3)
    found = training(EXPERTS, graphs=graphs, rates=slow, routing="balanced").block(Shape(e=4))
    device_s = sum(s.forward for name, s in found.parts.items() if name != "launches")
    assert found.forward_s == pytest.approx(max(device_s, (367.4 - held) * 1e-3))


def test_what_was_measured_has_its_launches():
    once = MeasuredBlock(microbatch_size=1, forward_s=1e-5, backward_s=2e-5)
    measured = Calibration(name="block", sha256="0" * 64, blocks=[once])
    rates = dataclasses.replace(RATES, launch=LAUNCH_S)
    block = training(EXPERTS, sequence=64, calibration=[measured], rates=rates).block(Shape())
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


def test_experts_are_made_again_where_operations_are_and_exchanges_are_kept():
    half = Kept(hidden=2, keys=2, gated=2, rotary=0)
    work = training(EXPERTS, kept_selective=half, selective="operations")
    made, full = (work.block(Shape(recompute=own)) for own in ("selective", "always"))
    experts = made.parts["experts"].forward
    assert experts < made.again_s < full.again_s
    attention = T * (2 * H + 4 * EXPERTS.q + 2 * EXPERTS.kv)
    assert made.saved_bytes == attention
    # two rows of a token come to an expert of another rank and go back, in 16 bits
    over_ranks = work.block(Shape(e=4, recompute="selective"))
    assert over_ranks.saved_bytes == attention + T * 2 * 2 * 2 * H
    assert over_ranks.again_s - over_ranks.parts["experts"].forward == pytest.approx(
        made.again_s - experts
    )


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
    # rows in the order of tokens and of experts, what the router reads and says
    assert experts == T * (8 * H + 6 * q + 4 * kv + 2 * (4 * H + 6 * fe) + 8 * 8)
    copies = training(EXPERTS, dispatch="deepep").block(Shape()).saved_bytes
    assert experts - copies == 2 * 2 * T * H


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
