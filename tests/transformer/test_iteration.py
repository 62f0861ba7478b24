"""An iteration's seconds and bytes: by hand, and what more ranks and recomputation never do."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt.documents.engine import Layout
from partopt.documents.transformer import Kept, Loss, Recurrence, Scores
from partopt.errors import PartoptError
from partopt.transformer.as_profile import profile_of, stage_starts
from partopt.transformer.block import Shape
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import (
    HOST_S,
    PASS_S,
    RESERVED,
    STRAGGLER,
    Degrees,
    estimate,
    host_bytes,
    once_s,
    stage_blocks,
    stage_counts,
    stages_of,
)
from partopt.transformer.rates import COLLECTIVE_S, HOP_S, ON_HOST, SUSTAINED
from partopt.transformer.unequal_stages import makespan_s
from tests.examples import examples
from tests.transformer.helpers import (
    ENGINE,
    EXPERTS,
    GPT,
    KINDS,
    LLAMA,
    PORT,
    RATES,
    RING,
    seconds,
    size,
    training,
    with_port,
)

SHIPPED = dataclasses.replace(RATES, device="H100-80GB")  # profiles say the digest of its file
APART = dataclasses.replace(RATES, server=1)  # pipelines go over ports
HOSTED = dataclasses.replace(RATES, host_link=50e9, host_memory=60e9)
BLOCKING = replace(ENGINE, allreduce="blocking", waits=("1f1b", "interleaved"))


def test_one_device_runs_its_blocks_one_after_the_other():
    work = training()
    found, block = estimate(work, Layout(microbatch=2), 32), work.block(Shape(b=2))
    ends = work.head_s(Shape(b=2)) + work.embedding_s(Shape(b=2))
    spent = 16 * (4 * block.seconds + ends)
    assert found.seconds == pytest.approx(spent + HOST_S + found.parts["step"])
    assert found.parts["replicas"] == 0.0
    assert math.fsum(found.parts.values()) == pytest.approx(found.seconds)
    assert math.fsum(found.memory.values()) == pytest.approx(found.memory_bytes)


def test_a_pipeline_has_a_bubble_and_waits_for_its_sends():
    work, shape = training(engine=BLOCKING, rates=APART), Shape()
    block, head, embed = work.block(shape), work.head_s(shape), work.embedding_s(shape)
    parts = estimate(work, Layout(pp=4), 16).parts
    slow = block.seconds + head  # the last of four stages of a block
    whole = 4 * block.seconds + head + embed
    send = HOP_S + 2 * 2048 * 1024 / PORT
    assert parts["bubble"] == pytest.approx(whole - slow)
    assert parts["imbalance"] == pytest.approx(16 * (slow - whole / 4))
    assert parts["sends"] == pytest.approx(2 * 16 * (send + PASS_S) + 2 * 3 * send)
    inside = estimate(training(engine=BLOCKING), Layout(pp=4), 16).parts["sends"]
    send = HOP_S + 2 * 2048 * 1024 / RATES.link
    assert inside == pytest.approx(2 * 16 * (send + PASS_S) + 2 * 3 * send)


def test_chunks_make_the_bubble_smaller_and_sends_more():
    work = training(replace(LLAMA, blocks=16), engine=BLOCKING, rates=APART)
    one, two = (estimate(work, Layout(pp=4, chunks=v), 16).parts for v in (1, 2))
    assert two["bubble"] == pytest.approx(one["bubble"] / 2)
    send = HOP_S + 2 * 2048 * 1024 / PORT
    assert two["sends"] - one["sends"] == pytest.approx(2 * 16 * (send + PASS_S))


def test_sends_are_hidden_where_the_engine_does_not_wait():
    model, layout = replace(LLAMA, blocks=16), Layout(pp=4, chunks=2)
    waits = estimate(training(model, engine=BLOCKING, rates=APART), layout, 64).parts["sends"]
    hidden = estimate(training(model, rates=APART), layout, 64).parts["sends"]
    send = HOP_S + 2 * 2048 * 1024 / PORT
    fill = 3 + 4  # a chunk goes round the four devices once more
    chunk = 2 * training(model).block(Shape()).seconds
    assert send < chunk / 2
    shown = RATES.taken * send + PASS_S
    assert hidden == pytest.approx(2 * 64 * 2 * shown + 2 * fill * send)
    assert hidden < waits
    slow = with_port(APART, PORT / 100)
    send = HOP_S + 2 * 2048 * 1024 / (PORT / 100)
    late = estimate(training(model, rates=slow), layout, 64).parts["sends"]
    shown = send - chunk / 2 + RATES.taken * send + PASS_S
    assert late == pytest.approx(2 * 64 * 2 * shown + 2 * fill * send)


def test_gradients_are_exchanged_once_an_iteration():
    work = training(engine=BLOCKING)
    parts = estimate(work, Layout(dp=8, shard="optimizer"), 32).parts
    held = LLAMA.parameters
    assert parts["replicas"] == pytest.approx((4 + 2) * held * 7 / 8 / RATES.link)
    plain = estimate(work, Layout(dp=8), 32).parts
    assert plain["replicas"] == pytest.approx(2 * 4 * held * 7 / 8 / RATES.link)
    across = estimate(work, Layout(dp=16, shard="optimizer"), 32).parts
    rate = min(8 * RING, RATES.link)
    assert across["replicas"] == pytest.approx((4 + 2) * held * 15 / 16 / rate)


def test_experts_are_exchanged_among_those_who_have_them():
    """Two ranks have the same ones: of one server where four have all, else of two."""
    work = training(EXPERTS, engine=BLOCKING)
    dense = 4 * EXPERTS.dense_parameters(EXPERTS.kinds()[0]) + 2 * EXPERTS.end_parameters
    among = min(8 * RING, RATES.link)
    for dp, ep, rate, dense_rate in ((8, 4, RATES.link, RATES.link), (16, 8, RING, among)):
        layout = Layout(dp=dp, ep=ep, shard="optimizer")
        experts = 4 * EXPERTS.expert_parameters(EXPERTS.kinds()[0]) / ep
        gradients = 4 * dense * (dp - 1) / dp / dense_rate + 4 * experts / 2 / rate
        shared = estimate(work, layout, 32).parts["replicas"]
        assert shared == pytest.approx(gradients * 6 / 4)
        whole = estimate(work, replace(layout, shard="none"), 32).parts["replicas"]
        assert whole == pytest.approx(gradients * 2)


def one_by_one(loads, forward_s, m):
    """1F1B, action by action: its rule as published (Narayanan et al., SC 2021)."""
    p, end = len(loads), {}
    rows = []
    for s in range(p):
        ahead = min(m, p - s)
        row = [("F", i) for i in range(ahead)]
        for i in range(m):
            row += [("B", i)] + ([("F", ahead + i)] if ahead + i < m else [])
        rows.append(row)
    now = [0.0] * p
    while any(rows):
        for s, row in enumerate(rows):
            while row:
                kind, i = row[0]
                last = s == p - 1
                needs = ("F", s - 1, i) if kind == "F" else ("F", s, i) if last else ("B", s + 1, i)
                if needs[1] >= 0 and needs not in end:
                    break
                took = forward_s[s] if kind == "F" else loads[s] - forward_s[s]
                now[s] = end[kind, s, i] = max(now[s], end.get(needs, 0.0)) + took
                row.pop(0)
    return max(now)


@examples(200)
@given(
    least=st.integers(1, 6),
    more=st.lists(st.integers(0, 3), min_size=2, max_size=9),
    head=st.floats(0, 6),
    ratio=st.floats(1, 4),
    m=st.integers(1, 30),
)
def test_unequal_stages_take_as_long_as_their_actions_one_by_one(least, more, head, ratio, m):
    """Where they differ by a block and a backward is twice its forward; else at least as long."""
    blocks = [least + each for each in more]
    loads = [n * (1 + ratio) for n in blocks]
    loads[-1] += head
    forward = [float(n) for n in blocks]
    found, expected = makespan_s(loads, forward, m), one_by_one(loads, forward, m)
    assert found <= expected * (1 + 1e-9)
    assert ratio < 2 or max(more) > 1 or found == pytest.approx(expected)


def test_what_is_hidden_behind_compute_takes_a_part_of_it():
    work = training(sequence=65_536)
    shown = estimate(work, Layout(dp=8, shard="optimizer"), 8).parts["replicas"]
    whole = 6 * LLAMA.parameters * 7 / 8 / RATES.link
    assert shown == pytest.approx(whole / 4 + RATES.taken * whole * 3 / 4)


def test_shards_are_gathered_behind_the_block_before():
    work, each = (
        training(sequence=65_536),
        LLAMA.block_parameters(LLAMA.kinds()[0]) * 7 / 8 / RATES.link,
    )
    gather, scatter = 2 * each + COLLECTIVE_S, 4 * each + COLLECTIVE_S
    parts = estimate(work, Layout(dp=8, shard="parameters"), 8).parts
    first = 6 * LLAMA.end_parameters * 7 / 8 / RATES.link + gather + scatter
    shown = 4 * RATES.taken * (2 * gather + scatter) + first
    assert parts["replicas"] == pytest.approx(shown)
    kept = estimate(work, Layout(dp=8, shard="gradients"), 8).parts
    assert shown - kept["replicas"] == pytest.approx(4 * RATES.taken * gather)


def test_the_slowest_of_many_devices():
    few, many = (estimate(training(), Layout(dp=n), 64).parts for n in (8, 64))
    assert few["stragglers"] == 0.0
    total = math.fsum(many.values()) - many["stragglers"]
    assert many["stragglers"] == pytest.approx(3 * STRAGGLER * total)


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ((10, 4, 1, "stage"), [3, 3, 2, 2]),
        ((14, 4, 1, "blocks"), [3, 4, 4, 3]),
        ((13, 4, 1, "layers"), [3, 4, 4, 2]),
        ((8, 2, 2, "stage"), [2, 2, 2, 2]),
        ((6, 2, 2, "blocks"), [1, 2, 2, 1]),
        ((5, 1, 1, "blocks"), [5]),
    ],
)
def test_blocks_of_stages(given, counts):
    assert stage_blocks(*given, head=0.0) == counts


def test_a_last_stage_has_as_many_fewer_as_the_head_is_long():
    assert stage_blocks(80, 4, 1, "fewer", head=4.0) == [21, 21, 21, 17]
    assert stage_blocks(8, 4, 1, "fewer", head=0.0) == [2, 2, 2, 2]


@examples(60)
@given(
    L=st.integers(1, 130),
    p=st.integers(1, 16),
    v=st.integers(1, 4),
    ends=st.sampled_from(["stage", "blocks", "layers", "fewer"]),
    head=st.floats(0, 3),
)
def test_every_block_is_in_a_stage(L, p, v, ends, head):
    if 2 * p * v > L:
        return
    counts = stage_blocks(L, p, v, ends, head)
    assert len(counts) == p * v
    assert sum(counts) == L
    assert min(counts) >= 0


def test_bytes_of_whole_parameters():
    memory = estimate(training(), Layout(dp=8, shard="optimizer"), 32).memory
    held = LLAMA.parameters
    assert memory["parameters"] == pytest.approx(2 * held)
    assert memory["gradients"] == pytest.approx(4 * held)
    assert memory["optimizer"] == pytest.approx(12 * held / 8)
    assert memory["logits"] == pytest.approx(RESERVED * 4 * 2048 * 32_000)


def test_context_ranks_share_the_optimizer_too():
    one, two = (
        estimate(training(), Layout(dp=4, cp=c, shard="optimizer"), 32).memory["optimizer"]
        for c in (1, 2)
    )
    assert one == pytest.approx(2 * two)


def test_the_first_stage_holds_as_many_microbatches_as_there_are_stages():
    work = training(replace(LLAMA, vocabulary=8, blocks=8))
    kept = RESERVED * work.block(Shape()).saved_bytes
    for m, p, v, held in ((16, 4, 1, 4), (2, 4, 1, 2), (16, 4, 2, 4 + 3 / 2)):
        found = estimate(work, Layout(pp=p, chunks=v), m).memory["activations"]
        assert found == pytest.approx(kept * 8 / p * held)


def test_bytes_of_shards():
    found = estimate(training(), Layout(dp=8, shard="parameters"), 8).memory
    assert found["in shares"] == pytest.approx(16 * LLAMA.parameters / 8)
    two = 2 * LLAMA.end_parameters
    assert found["gathered"] == pytest.approx(
        RESERVED * (2 * two + 10 * LLAMA.block_parameters(LLAMA.kinds()[0]))
    )
    assert found["buffers"] == 0.0
    work = 2048 * (12 * 1024 + 12 * LLAMA.ffn + 8 * LLAMA.q)
    assert found["at work"] == pytest.approx(RESERVED * work)


def test_tensor_ranks_share_what_is_gathered():
    for name in ("gathered", "in shares"):
        one, four = (
            estimate(training(), Layout(tp=t, dp=2, shard="parameters"), 8).memory[name]
            for t in (1, 4)
        )
        assert four == pytest.approx(one / 4)


def test_shards_in_a_server_are_copied_across():
    work = training(shards="server")
    near, far = (
        estimate(work, Layout(dp=n, shard="parameters"), 64).memory["in shares"] for n in (8, 64)
    )
    assert near == pytest.approx(far)
    assert seconds(training(), 64, dp=64, shard="parameters") != seconds(
        work, 64, dp=64, shard="parameters"
    )


def test_copies_of_shares_are_all_reduced_over_the_ports_of_ranks():
    """Of 16 devices in two servers; at ports so slow that no block's backward hides it."""
    slow, slower = (training(rates=with_port(RATES, port), shards="server") for port in (1e6, 5e5))
    parts = [
        estimate(work, Layout(dp=16, shard="parameters"), 32).parts["replicas"]
        for work in (slow, slower)
    ]
    sent = 2 * sum(slow.parameters(Shape())) * slow.gradient_bytes / 8
    times = 2 * (LLAMA.blocks + 1)  # of two microbatches; one block's is nowhere hidden
    assert parts[1] - parts[0] == pytest.approx(times * sent / 1e6)


def test_some_blocks_recompute_and_others_do_not():
    never, half, always = (
        estimate(training(), Layout(recompute=own), 8) for own in ("never", 2, "always")
    )
    assert half.seconds == pytest.approx((never.seconds + always.seconds) / 2)
    kept = [own.memory["activations"] for own in (never, half, always)]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)


MODELS = st.sampled_from([GPT, LLAMA, EXPERTS, KINDS])
DEGREES = {"pp": [1, 2, 4], "dp": [1, 2, 8], "microbatch": [1, 2], "cp": [1, 2]}
LAYOUTS = st.builds(
    Layout,
    shard=st.sampled_from(["none", "optimizer", "parameters"]),
    **{name: st.sampled_from(values) for name, values in DEGREES.items()},
)
FACTS = st.fixed_dictionaries(
    {
        "sequence_parallel": st.booleans(),
        "scores": st.sampled_from([None, Scores(forward=9, backward=11, kept=5)]),
        "format": st.sampled_from(["bfloat16", "fp8"]),
        "ends": st.sampled_from(["stage", "blocks", "layers", "fewer"]),
    }
)


@pytest.mark.slow
@examples(100)
@given(model=MODELS, layout=LAYOUTS, facts=FACTS)
def test_recomputation_takes_longer_and_needs_no_more(model, layout, facts):
    work = training(replace(model, blocks=8), **facts)
    ways = [
        estimate(work, replace(layout, recompute=own), 64)
        for own in ("never", "selective", "always")
    ]
    activations = [own.memory["activations"] for own in ways]
    assert activations == sorted(activations, reverse=True)
    assert [own.seconds for own in ways] == sorted(own.seconds for own in ways)


@pytest.mark.slow
@examples(100)
@given(model=MODELS, layout=LAYOUTS, facts=FACTS)
def test_more_tensor_ranks_need_no_more(model, layout, facts):
    work = training(replace(model, blocks=8), **facts)
    sizes = [size(work, 64, **as_dict(replace(layout, tp=t))) for t in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


def as_dict(layout):
    names = ("tp", "cp", "pp", "dp", "microbatch", "shard", "recompute")
    return {name: getattr(layout, name) for name in names}


@pytest.mark.slow
@examples(60)
@given(model=MODELS, layout=LAYOUTS, facts=FACTS)
def test_parts_are_not_negative_and_sum_to_the_whole(model, layout, facts):
    found = estimate(training(replace(model, blocks=8), **facts), layout, 64)
    assert min(found.parts.values()) >= -1e-12
    assert min(found.memory.values()) >= 0
    assert math.fsum(found.parts.values()) == pytest.approx(found.seconds)


def test_faster_devices_and_links_never_take_longer():
    layouts = [
        {"tp": t, "pp": p, "dp": n, "shard": shard}
        for t, p, n, shard in itertools.product((1, 4), (1, 4), (1, 8), ("optimizer", "parameters"))
    ]
    better = {"link": 2 * RATES.link, "outer": with_port(RATES, 2 * PORT, 2 * RING).outer}
    better |= {"clock": 1.2, "bandwidth": 2 * RATES.bandwidth}
    for layout in layouts:
        usual = seconds(training(), 64, **layout)
        for name, value in better.items():
            faster = training(rates=dataclasses.replace(RATES, **{name: value}))
            assert seconds(faster, 64, **layout) <= usual * (1 + 1e-12), (layout, name)


def test_what_trainers_do_differently_costs_what_it_should():
    layout = {"tp": 4, "dp": 8, "shard": "optimizer"}
    usual = seconds(training(), 64, **layout)
    assert seconds(training(sums="autograd"), 64, **layout) != usual
    assert seconds(training(tp_overlap="buffers"), 64, **layout) < usual
    assert seconds(training(exchange="float32"), 64, **layout) > usual
    pipeline = {"tp": 4, "pp": 4}
    whole = training(sends="whole", sequence_parallel=False, engine=BLOCKING)
    parts = training(sequence_parallel=False, engine=BLOCKING)
    assert seconds(whole, 64, **pipeline) > seconds(parts, 64, **pipeline)
    kept = training(keeps_outputs=True)
    assert size(kept, 64, **pipeline) > size(training(), 64, **pipeline)
    few = replace(EXPERTS, blocks=8)
    assert seconds(training(few, dispatch_overlap=True), 64, ep=8, dp=8) < seconds(
        training(few), 64, ep=8, dp=8
    )
    assert training(kept_selective=Kept(hidden=2)).practice.kept_selective is not None


@pytest.mark.parametrize(
    ("layout", "batch", "said"),
    [
        ({"tp": 3}, 32, "tp: 8 heads are not a multiple of 3"),
        ({"cp": 3}, 32, "cp: 2048 tokens, half a rank's at a time, are not a multiple of 6"),
        ({"ep": 2, "dp": 2}, 32, "ep: 1 experts are not a multiple of 2"),
        ({"dp": 3}, 32, "dp: 32 samples, in microbatches of 1, are not a multiple of 3"),
        ({"pp": 4, "chunks": 2}, 32, "pp: 4 x 2 stages of 4 blocks"),
        ({"pp": 2, "chunks": 2}, 5, "chunks: 5 microbatches are not a multiple of 2"),
        ({"chunks": 2}, 32, "chunks: 2 stages on each of one device"),
        ({"pp": 2, "schedule": "interleaved"}, 32, "schedule: interleaved with chunks=1"),
        ({"pp": 2, "chunks": 2, "schedule": "1f1b"}, 32, "schedule: 1f1b with chunks=2"),
        ({"dp": 2, "shard": "gradients"}, 32, "shard: gradients: the trainer has none, optimizer"),
    ],
)
def test_what_cannot_be_run_is_said(layout, batch, said):
    faults = [fault.message for fault in find_faults(training(), Layout(**layout), batch)]
    assert any(said in fault for fault in faults)
    assert all(fault.startswith("layout.") for fault in faults)
    fault = next(find_faults(training(), Layout(**layout), batch))
    assert (fault.code, fault.fields["part"]) == ("unsupported-layout", said.partition(":")[0])


def faults_of(layout, batch=32, **changes):
    """The parts of a layout, in words, that have a fault."""
    return {
        fault.fields["part"]
        for fault in find_faults(training(**changes), Layout.parse(layout), batch)
    }


def degrees_of(work, batch=32, **layout):
    return Degrees.of(work, Layout(**layout), batch)


@pytest.mark.parametrize(
    ("ends", "counts", "further"),
    [
        ("stage", [2, 2, 2, 2], 3),
        ("3-2-2m-1", [3, 2, 2, 1], 2),
        ("4-4-0m-0", [4, 4, 0, 0], 2),
        ("4-3-1-0m", [4, 3, 1, 0], 3),
    ],
)
def test_stages_hold_blocks_of_their_kinds_in_order(ends, counts, further):
    work = training(KINDS, ends=ends)
    degrees = degrees_of(work, pp=4)
    stages, left = stages_of(work, degrees), list(work.kinds)
    for place, stage in enumerate(stages):
        inside, left = left[: counts[place]], left[counts[place] :]
        assert stage.counts == tuple(map(inside.count, work.counts))
        assert (stage.further, stage.first, stage.last) == (
            place == further,
            place == 0,
            place == 3,
        )
    assert left == []
    assert stage_counts(work, degrees) == counts


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 2, "chunks": 2}, {"pp": 1, "tp": 2}])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_iteration_of_kinds_is_the_sum_of_its_blocks(layout, recompute):
    """Of all devices' seconds: every block by its kind, further tokens, ends, nothing else."""
    work = training(KINDS)
    parts = estimate(work, Layout(**layout, recompute=recompute), 32).parts
    shape = degrees_of(work, **layout, recompute=recompute).shape
    blocks = [work.block(shape, kind) for kind in KINDS.kinds()]
    whole = sum(block.seconds for block in blocks) + blocks[0].head_s + blocks[0].embedding_s
    whole += sum(work.further_s(shape))
    apart = ("imbalance", "bubble", "sends", "step", "replicas", "host", "stragglers")
    found = sum(seconds for name, seconds in parts.items() if name not in apart)
    assert found == pytest.approx(32 / layout["pp"] * whole)


def test_the_fullest_device_holds_the_bytes_of_its_kinds():
    """The first has two dense blocks, the second two of experts; both the ends that lie there."""
    work = training(KINDS, ends="2-6")
    found = estimate(work, Layout(pp=2, ep=1, shard="none"), 4).memory
    windowed, full = KINDS.kinds()[2:4]
    held = 3 * KINDS.block_parameters(windowed) + 3 * KINDS.block_parameters(full)
    held += KINDS.block_parameters(full) + KINDS.joining_parameters + KINDS.end_parameters
    assert found["parameters"] == 2 * held
    assert found["optimizer"] == 12 * held
    kept = [work.block(Shape(), kind).saved_bytes for kind in (windowed, full)]
    assert found["activations"] == pytest.approx((3 * kept[0] + 4 * kept[1]) * RESERVED)
    assert found["logits"] == 2 * 4 * 2048 * 32_000 * RESERVED


def test_further_tokens_are_on_the_last_stage_or_where_it_is_said():
    """A stage of its own takes them off the last one, which is the slowest."""
    work = training(KINDS, ends="4-4-0m-0", rates=SHIPPED)
    alone = estimate(work, Layout(pp=4), 32).parts["imbalance"]
    together = estimate(training(KINDS, ends="3-2-2-1"), Layout(pp=4), 32).parts["imbalance"]
    assert together != alone
    starts = stage_starts(work, degrees_of(work, pp=4))
    profile = profile_of(work, Layout(pp=4, schedule="1f1b"), 32)
    names = [layer.name for layer in profile.layers]
    assert [names[start] for start in starts] == ["layers.4", "norm", "lm_head"]
    assert names[-3:] == ["norm", "mtp", "lm_head"]


def test_layers_of_a_profile_are_of_their_kinds():
    work = training(KINDS, rates=SHIPPED)
    degrees = degrees_of(work, dp=4, ep=4)
    profile = profile_of(work, Layout(dp=4, ep=4), 32)
    [measured] = profile.measurements
    slower = 1 + STRAGGLER * max(0, math.log2(degrees.devices / 8))
    for i, kind in enumerate(KINDS.kinds()):
        block, layer = work.block(degrees.shape, kind), measured.layers[i + 1]
        assert layer.forward_s == pytest.approx(slower * block.forward_s)
        assert layer.backward_s == pytest.approx(slower * block.backward_s)
        held = KINDS.dense_parameters(kind) + KINDS.expert_parameters(kind) / 4
        assert profile.layers[i + 1].parameter_bytes == pytest.approx(2 * held, abs=1)
    whole = 2 * sum(work.parameters(degrees.shape)) + 2 * KINDS.joining_parameters
    assert profile.layers[-2].parameter_bytes == pytest.approx(whole, abs=1)
    assert measured.layers[-2].forward_s == pytest.approx(
        slower * work.further_s(degrees.shape).forward
    )


def test_experts_that_are_cut_have_fewer_copies():
    """4 ranks have different experts, each cut by 2: of 16 two have the same."""
    work = training(EXPERTS, engine=BLOCKING)
    found = estimate(work, Layout(dp=16, ep=4, etp=2, shard="none"), 32).parts["replicas"]
    dense = 4 * EXPERTS.dense_parameters(EXPERTS.kinds()[0]) + 2 * EXPERTS.end_parameters
    experts = 4 * EXPERTS.expert_parameters(EXPERTS.kinds()[0]) / 8
    rates = min(8 * RING, RATES.link), RING
    both = dense * 15 / 16 / rates[0] + experts / 2 / rates[1]
    assert found == pytest.approx(2 * 4 * both)


def test_muon_makes_matrices_orthogonal():
    plain, muon = (
        estimate(training(KINDS, muon=own), Layout(dp=8, ep=4), 64).parts["step"]
        for own in (False, True)
    )
    experts = 6 * 3 * 8 / 4 / 2 * (4 * 512**2 * 1024 + 2 * 512**3)
    attention = 8 * 6 * 384**2 * 768
    rate = 8e14 * SUSTAINED
    assert muon - plain == pytest.approx(5 * (experts + attention) / rate)


MIXED = replace(EXPERTS, blocks=8)
DELTA = Recurrence(rule="delta", heads=16, head_size=64, groups=4, keys=64, chunk=64)
GATED = replace(LLAMA, recurrence=DELTA, full_period=4)
FSDP = replace(ENGINE, shard=("none", "gradients", "parameters"))


@pytest.mark.parametrize(
    ("layout", "changes", "parts"),
    [
        ("tp=2,cp=2,pp=2,dp=2", {}, set()),
        ("pp=6", {"ends": "blocks"}, set()),
        ("pp=6", {}, {"pp"}),
        # tokens by tensor and context parallel ranks, where these cut what lies between products
        ("tp=4", {"sequence": 2046}, {"tp"}),
        ("tp=4", {"sequence": 2046, "sequence_parallel": False}, set()),
        ("tp=4,cp=2", {"sequence": 2044}, {"tp"}),
        ("tp=2", {"model": replace(LLAMA, ffn=3585)}, {"tp"}),
        # heads of keys are cut, or several ranks have the same
        ("tp=4", {}, set()),
        ("tp=4", {"repeats_keys": False}, {"tp"}),
        ("tp=2", {"model": replace(LLAMA, heads=6, kv_heads=3)}, {"tp"}),
        ("tp=8,dp=2", {"model": replace(LLAMA, heads=16, kv_heads=16)}, set()),
        ("tp=16,dp=2", {"model": replace(LLAMA, heads=16, kv_heads=16)}, {"tp"}),
        # experts lie on the ranks of one stage
        ("dp=8,ep=8", {"model": MIXED}, set()),
        ("tp=2,cp=2,dp=2,ep=8", {"model": MIXED}, set()),
        ("pp=8,ep=8", {"model": MIXED}, {"ep"}),
        ("dp=4,pp=2,ep=8", {"model": MIXED}, {"ep"}),
        ("dp=8,ep=2,etp=4", {"model": MIXED}, set()),
        ("dp=4,ep=2,etp=4", {"model": MIXED}, {"etp"}),
        ("dp=8,etp=3", {"model": MIXED}, {"etp"}),
        ("dp=8,etp=2", {}, {"etp"}),
        # modules of a block, stages of further tokens
        ("recompute=selective,modules=moe+mlp", {"model": MIXED}, set()),
        ("modules=moe", {"model": MIXED}, {"modules"}),
        ("pp=4", {"model": KINDS, "ends": "4-4-0m-0"}, set()),
        ("pp=4", {"model": KINDS, "ends": "4-0-4m-0"}, {"ends"}),
        ("pp=4", {"model": MIXED, "ends": "4-4-0m-0"}, {"ends"}),
        # embedding and head that share a weight
        ("pp=2", {"model": replace(LLAMA, tied=True)}, set()),
        ("pp=2", {"model": replace(LLAMA, tied=True), "parts_ties": False}, {"pp"}),
        ("dp=2", {"model": replace(LLAMA, tied=True), "parts_ties": False}, set()),
        # heads of recurrences by context parallel ranks
        ("cp=2", {"model": GATED}, set()),
        ("cp=8", {"model": GATED}, {"cp"}),
        ("cp=2", {"model": GATED, "spreads_recurrences": False}, {"cp"}),
        ("dp=2", {"model": GATED, "spreads_recurrences": False}, set()),
        # what the trainer does
        ("recompute=selective", {}, set()),
        ("recompute=selective", {"engine": replace(ENGINE, recompute=("blocks",))}, {"recompute"}),
        ("recompute=always", {"engine": replace(ENGINE, recompute=("none",))}, {"recompute"}),
        ("recompute=2", {"engine": replace(ENGINE, recompute=("none",))}, {"recompute"}),
        ("cp=2,shard=none", {}, set()),
        ("cp=2,shard=none", {"engine": FSDP}, {"shard"}),
        ("pp=2,shard=parameters", {"engine": FSDP}, {"shard"}),
        # facts that need a part
        ("tp=2", {"tp_overlap": "buffers"}, set()),
        ("dp=2", {"tp_overlap": "buffers"}, {"tp"}),
        ("tp=2", {"tp_overlap": "buffers", "sequence_parallel": False}, {"tp"}),
        ("ep=2,dp=2", {"model": MIXED, "dispatch_overlap": True}, set()),
        ("ep=2,dp=2,pp=2,chunks=2", {"model": MIXED, "dispatch_overlap": True}, set()),
        ("ep=2,dp=2,pp=2", {"model": MIXED, "dispatch_overlap": True}, {"ep"}),
        ("dp=2", {"model": MIXED, "dispatch_overlap": True}, {"ep"}),
        ("dp=2,shard=optimizer", {"rates": HOSTED, "optimizer_offload": 0.5}, set()),
        ("dp=2,shard=none", {"rates": HOSTED, "optimizer_offload": 0.5}, {"shard"}),
        (
            "ep=2,dp=2,recompute=always",
            {"model": MIXED, "dispatch_overlap": True},
            {"recompute"},
        ),
    ],
)
def test_a_part_that_needs_another_has_a_fault_without_it(layout, changes, parts):
    assert faults_of(layout, **changes) == parts


def test_groups_of_ranks_fill_servers_or_divide_them():
    rates = dataclasses.replace(RATES, server=72, sizes=(72, 2))
    model = replace(LLAMA, heads=144, kv_heads=144, ffn=144 * 64)
    work = training(model, rates=rates, sequence=144 * 16)
    held = {t * c for t in range(1, 73) for c in range(1, 17) if rates.holds(t * c)}
    assert held == {d for d in range(1, 145) if 72 % d == 0 or d == 144}
    assert {fault.fields["part"] for fault in find_faults(work, Layout(tp=8, cp=2), 32)} == {"cp"}
    assert [*find_faults(work, Layout(tp=8, cp=3), 32)] == []
    assert [*find_faults(work, Layout(tp=16), 32)] != []


def test_what_needs_too_much_is_not_timed():
    whole = estimate(training(), Layout(dp=8), 32)
    over = estimate(training(), Layout(dp=8), 32, most=whole.memory_bytes - 1)
    assert (over.seconds, over.parts) == (math.inf, {})
    assert (over.memory, over.memory_bytes) == (whole.memory, whole.memory_bytes)
    assert estimate(training(), Layout(dp=8), 32, most=whole.memory_bytes) == whole


def test_two_stages_are_a_pipeline():
    parts = estimate(training(engine=BLOCKING), Layout(pp=2), 8).parts
    assert min(parts[name] for name in ("bubble", "imbalance", "sends")) > 0
    assert "sends" not in estimate(training(), Layout(), 8).parts


def test_what_is_sent_in_parts_is_gathered_again_without_sequence_parallelism():
    layout = Layout(tp=4, pp=2)
    cut, whole = (
        estimate(training(sequence_parallel=own, engine=BLOCKING), layout, 8).parts["sends"]
        for own in (True, False)
    )
    size = 2 * 2048 * 1024
    assert whole - cut == pytest.approx(2 * 8 * size * 3 / 4 / RATES.link)
    apart = training(sequence_parallel=False, sends="whole", engine=BLOCKING)
    # of what four ranks send whole, half goes over each link; of two ranks no more than is cut
    send = HOP_S + size / 2 / RATES.link
    shown = 2 * (8 + 1) * send + 2 * 8 * PASS_S
    assert estimate(apart, layout, 8).parts["sends"] == pytest.approx(shown)
    messages = [apart.message_bytes(Shape(t=t)) for t in (1, 2, 4, 8)]
    assert messages == [size, size / 2, size / 2, size / 2]


def test_a_pass_of_a_stage_takes_longer_than_its_layers_in_the_plan_as_in_the_closed_form():
    work = training(replace(LLAMA, blocks=16), rates=SHIPPED)
    one, *cut = (profile_of(work, Layout(pp=p, chunks=v), 8) for p, v in ((1, 1), (4, 1), (4, 2)))
    for profile, stages in zip(cut, (4, 8), strict=True):
        pairs = zip(one.measurements[0].layers, profile.measurements[0].layers, strict=True)
        later = [
            (cut.forward_s - whole.forward_s, cut.backward_s - whole.backward_s)
            for whole, cut in pairs
        ]
        slow = [i for i, pair in enumerate(later) if pair != (0.0, 0.0)]
        degrees = Degrees.of(work, Layout(pp=4, chunks=stages // 4), 8)
        assert slow == [0, *stage_starts(work, degrees)]
        assert [later[i] for i in slow] == [pytest.approx((PASS_S, PASS_S))] * stages


def test_what_a_block_takes_while_it_is_at_work():
    scores = Scores(forward=9, backward=11, kept=5, work=3)
    own = training(GPT, scores=scores, sequence_parallel=False)
    T, square = 2048, 8 * 2048**2
    never, always = (
        estimate(own, Layout(recompute=each), 8).memory["at work"] for each in ("never", "always")
    )
    assert never == pytest.approx(RESERVED * (4 * T * 1024 + 3 * square))
    assert always - never == pytest.approx(RESERVED * (34 * T * 1024 + 5 * square))


def test_logits_of_a_group_are_held_where_they_are_gathered():
    one = 2048 * 32_000
    for t, gathers, held in ((1, False, 4), (4, False, 1), (1, True, 4), (4, True, 4 + 2 + 0.5)):
        loss = Loss(passes=12, held=4, gathers=gathers)
        found = estimate(training(loss=loss), Layout(tp=t), 8).memory["logits"]
        assert found == pytest.approx(RESERVED * held * one)
    few = training(replace(LLAMA, vocabulary=8, blocks=8))
    assert estimate(few, Layout(pp=2), 64).memory["logits"] == 0.0  # of the first stage


def test_a_pipeline_of_shards_gathers_a_stage_once():
    layout = Layout(pp=2, dp=8, shard="parameters", microbatch=1)
    found, each = estimate(training(), layout, 64), LLAMA.block_parameters(LLAMA.kinds()[0])
    rate, near = 7 / 8 / RATES.link, COLLECTIVE_S
    gather, scatter = 2 * each * rate + near, 4 * each * rate + near
    first = 6 * LLAMA.end_parameters * rate + gather + scatter
    assert found.parts["replicas"] == pytest.approx(2 * (gather + scatter) + first / 2)
    held = 2 * each + LLAMA.end_parameters
    assert found.memory["gathered"] == pytest.approx(RESERVED * 6 * held)
    assert found.memory["buffers"] == 2 * 8 * 2048 * 1024  # the first stage receives gradients
    many = training(replace(LLAMA, blocks=16, vocabulary=64))
    inside = estimate(many, Layout(pp=4, dp=2, shard="gradients", recompute="always"), 16)
    assert inside.memory["buffers"] == 2 * 2 * 8 * 2048 * 1024
    chunks = estimate(many, Layout(pp=2, chunks=4, dp=2, shard="gradients"), 16)
    assert chunks.memory["buffers"] == 7 * 2 * 8 * 2048 * 1024


def test_the_optimizer_s_step():
    P = LLAMA.parameters
    whole, shared, sharded = (
        estimate(training(), Layout(dp=8, shard=own), 64).parts["step"]
        for own in ("none", "optimizer", "parameters")
    )
    assert whole == pytest.approx(RATES.passes_s(P * (34 + 8)))
    assert shared == pytest.approx(RATES.passes_s(P * (34 / 8 + 8)))
    assert sharded == pytest.approx(RATES.passes_s(P * 40 / 8))
    few = estimate(training(EXPERTS), Layout(dp=8, ep=4, shard="optimizer"), 64).parts["step"]
    dense = EXPERTS.dense_parameters(EXPERTS.kinds()[0]) * 4 + 2 * EXPERTS.end_parameters
    experts = EXPERTS.expert_parameters(EXPERTS.kinds()[0]) * 4 / 4
    assert few == pytest.approx(
        RATES.passes_s(34 * (dense / 8 + experts / 2) + 8 * (dense + experts))
    )


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_host_steps_a_share_of_the_optimizer(share, overlaps):
    facts = {"optimizer_offload": share, "offload_overlap": overlaps}
    work, P = training(rates=HOSTED, **facts), LLAMA.parameters
    found = estimate(work, Layout(dp=8, shard="optimizer"), 64)
    there, here = share * P / 8, (1 - share) * P / 8
    host_s, copy_s = 28 * there / (ON_HOST * 60e9), 4 * there / 50e9
    waited_s = host_s if overlaps else copy_s + host_s + copy_s
    step_s = RATES.passes_s(8 * P) + max(waited_s, RATES.passes_s(34 * here))
    assert found.parts["step"] == pytest.approx(step_s)
    assert found.memory["optimizer"] == pytest.approx(12 * here)
    assert host_bytes(work, found.layout, 64) == pytest.approx(8 * 16 * there)
    without = estimate(training(rates=HOSTED), found.layout, 64)
    assert without.memory_bytes - found.memory_bytes == pytest.approx(12 * there)
    rest = found.parts.keys() - {"step", "stragglers"}
    assert all(found.parts[part] == without.parts[part] for part in rest)
    plan_s = once_s(work, found.layout, 64) - once_s(training(rates=HOSTED), found.layout, 64)
    assert plan_s == pytest.approx(step_s - without.parts["step"])


def test_the_host_is_asked_for_no_optimizer_where_its_way_is_not_known():
    with pytest.raises(PartoptError, match="its way to the host's memory is not known"):
        training(optimizer_offload=0.5)


def test_the_share_on_the_host_is_of_the_rank_that_holds_most():
    work = training(EXPERTS, rates=HOSTED, optimizer_offload=0.5)
    layout = Layout(pp=4, dp=4, ep=4, shard="optimizer")
    kind = EXPERTS.kinds()[0]
    dense = (EXPERTS.dense_parameters(kind) + EXPERTS.end_parameters) / 4
    experts = EXPERTS.expert_parameters(kind) / 4
    assert host_bytes(work, layout, 64) == pytest.approx(8 * 0.5 * 16 * (dense + experts))


def test_tied_ends_are_one_and_add_their_gradients():
    tied = replace(LLAMA, tied=True)
    apart, one = (
        estimate(training(own), Layout(), 8).memory["parameters"] for own in (LLAMA, tied)
    )
    assert apart - one == 2 * LLAMA.end_parameters
    layout = Layout(pp=2, dp=2)
    more = [
        estimate(training(own, engine=BLOCKING), layout, 8).parts["replicas"]
        for own in (LLAMA, tied)
    ]
    assert more[1] - more[0] == pytest.approx(2 * 4 * LLAMA.end_parameters / 2 / RING)


def test_gradients_in_float32_are_copied_and_all_reduced():
    own = training(engine=BLOCKING, exchange="float32")
    found = estimate(own, Layout(dp=8), 32).parts["replicas"]
    ring = 2 * 4 * LLAMA.parameters * 7 / 8 / RATES.link
    assert found == pytest.approx(ring + RATES.passes_s(26 * LLAMA.parameters))
