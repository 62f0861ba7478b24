"""Parameters in shares: Megatron's flat buffers, torch's shares on the host."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from partopt import PartoptError, Topology
from partopt.documents.engine import Layout
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.layout_plans import simulate_layout
from partopt.search.layout_questions import estimate_layouts, fill_layout, training_for
from partopt.transformer.block import Shape
from partopt.transformer.columns import Question
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import FSDP_STEP, HOST_SUM, RESERVED, estimate
from partopt.transformer.layouts import find_layouts
from partopt.transformer.rates import ON_HOST
from tests.transformer.helpers import ENGINE, EXPERTS, LLAMA, RATES, training, with_port

OPEN = replace(ENGINE, shard=("none", "optimizer", "gradients", "parameters"))
BLOCK, END = LLAMA.block_parameters(LLAMA.kinds()[0]), LLAMA.end_parameters
HOST = dataclasses.replace(RATES, host_link=5e10, host_memory=6e10)
# a port that hides nothing
SLOW = dataclasses.replace(with_port(HOST, 1e6), server=1)


def flat(model=LLAMA, **changes):
    return training(model, engine=OPEN, flat_shards=True, fsdp=True, **changes)


def torchs(**changes):
    shard = ("none", "gradients", "parameters")
    return training(engine=replace(ENGINE, shard=shard), shard_copies=(4, 6), **changes)


def test_flat_shares_have_two_blocks_of_parameters_and_of_gradients():
    """In shares 2 bytes a parameter, 4 its gradient, 12 the optimizer's; ends stay gathered."""
    for gradients, size in (("float32", 4), ("parameters", 2)):
        work = flat()
        work = dataclasses.replace(work, engine=replace(OPEN, gradients=gradients))
        found = estimate(work, Layout(dp=8, shard="parameters"), 8).memory
        assert found["in shares"] == pytest.approx((2 + size + 12) * LLAMA.parameters / 8)
        gathered = 2 * (2 * END + 2 * BLOCK) + size * (2 * BLOCK + END)
        assert found["gathered"] == pytest.approx(RESERVED * gathered)
        usual = estimate(work, Layout(dp=8, shard="optimizer"), 8).memory
        for name in ("activations", "logits", "at work"):
            assert found[name] == usual[name]
        # where products add gradients up there are spare ones, one of each shape
        spare = 2 * (1024 * 1536 + 1024 * 1024 + 1024 * 2 * 3584 + 3584 * 1024)
        assert usual["buffers"] - found["buffers"] == pytest.approx(spare)
        assert not {"parameters", "gradients", "optimizer"} & found.keys()


def test_flat_shares_of_gradients_leave_parameters_whole():
    found = estimate(flat(), Layout(dp=8, shard="gradients"), 8).memory
    assert found["in shares"] == pytest.approx(16 * LLAMA.parameters / 8)
    gathered = 2 * LLAMA.parameters + 4 * (2 * BLOCK + END)
    assert found["gathered"] == pytest.approx(RESERVED * gathered)


def test_an_optimizer_of_fewer_bytes_has_them_in_shares():
    full, narrow = (
        estimate(
            dataclasses.replace(flat(), engine=replace(OPEN, optimizer_bytes=size)),
            Layout(dp=8, shard="parameters"),
            8,
        ).memory["in shares"]
        for size in (12, 8)
    )
    assert full - narrow == pytest.approx(4 * LLAMA.parameters / 8)


def replicas_s(work, m, **layout):
    return estimate(work, Layout(dp=2, **layout), 2 * m).parts["replicas"]


def test_whole_parameters_are_gathered_once_an_iteration_by_flat_shares_alone():
    """At a port that hides nothing; further microbatches cost what is exchanged in each."""
    block = flat().block(Shape(fsdp=True))
    gather_s, scatter_s = (
        SLOW.replicas_s(size * BLOCK, 2, 1) - part for size, part in ((2, 0), (4, 0))
    )
    first_s = gather_s + scatter_s + SLOW.replicas_s(6 * END, 2, 1)
    forward_s, backward_s = (
        LLAMA.blocks * (way - own)
        for way, own in ((gather_s, block.forward_s), (scatter_s, block.backward_s))
    )
    for work, more_s in (
        (flat(rates=SLOW), backward_s + first_s),
        (torchs(rates=SLOW), forward_s + backward_s + first_s),
    ):
        one, two = (replicas_s(work, m, shard="gradients") for m in (1, 2))
        assert one == pytest.approx(forward_s + backward_s + first_s, rel=1e-3)
        assert two - one == pytest.approx(more_s, rel=1e-3)


def test_flat_shares_gather_for_forward_and_backward_of_every_microbatch():
    one, two, once = (
        replicas_s(flat(rates=SLOW), m, shard=shard)
        for m, shard in ((1, "parameters"), (2, "parameters"), (1, "gradients"))
    )
    assert two == pytest.approx(2 * one)
    gather_s = SLOW.replicas_s(2 * BLOCK, 2, 1)
    assert one - once == pytest.approx(LLAMA.blocks * gather_s, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "layout", "words"),
    [
        ({}, {"pp": 2}, "view"),
        ({"graphs": "attention"}, {}, "graphs=attention"),
        ({"dispatch_overlap": True}, {"ep": 2}, "exchange-overlap needs more"),
        ({"muon": True}, {}, "Adam alone"),
    ],
)
def test_what_flat_shares_do_not_go_with(facts, layout, words):
    asked = Layout(dp=4, shard="parameters", **layout)
    model = EXPERTS if "ep" in layout else LLAMA
    faults = [fault.message for fault in find_faults(flat(model, **facts), asked, 8)]
    assert any(fault.startswith("layout.shard:") and words in fault for fault in faults)
    assert not [*find_faults(flat(), Layout(dp=4, cp=2, shard="parameters"), 8)]
    whole = replace(asked, shard="optimizer")
    assert not [f for f in find_faults(flat(model, **facts), whole, 8) if "shares" in f.message]


def test_the_search_takes_flat_shares_where_it_may_alone():
    deep, fixed = replace(LLAMA, blocks=64), Layout(tp=1, cp=1, pp=1)
    for work, found in ((flat(deep), ["parameters"]), (training(deep, flat_shards=True), [])):
        fitting = find_layouts(work, Question(8, 64, 8.0e9, fixed, partly=True)).fitting
        assert [layout.shard for layout, *_ in fitting[:1]] == found


# Megatron Bridge's summary of performance (docs/performance-summary.md and its archive): tokens a
# second and GPU with FSDP in 8 bits; of 70B on 64 of a rack, 4 samples a GPU, by release
PUBLISHED = [
    ("dgx-h100", "llama3-8b", 1, 16, [14_451, 14_079]),
    ("gb200-nvl72", "llama3-70b", 2, 4, [4224, 4143, 4357, 4040, 4312, 3986]),
    ("gb300-nvl72", "llama3-70b", 2, 4, [5248, 5243, 5243, 5003]),
]


def job_of(topology, model, trainer, batch, layout, **facts):
    named = {name.replace("_", "-"): value for name, value in facts.items() if name != "dtype"}
    return Job(
        load_transformer(model),
        Topology.load(topology, 1),
        trainer=trainer,
        global_batch=batch,
        sequence=8192,
        layout=Layout.parse(layout),
        facts=named,
        dtype=facts.get("dtype", "bfloat16"),
    )


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_published_tokens_of_megatrons_fsdp(row):
    topology, model, microbatch, samples, published = row
    layout = f"tp=1,pp=1,shard=parameters,microbatch={microbatch}"
    devices = Topology.load(topology, 1).cluster.devices
    given = topology, model, "megatron-bridge", samples * devices, layout
    asked = job_of(*given, gradients="parameters", dtype="fp8")
    work = training_for(asked)
    found = estimate(work, fill_layout(asked, work), samples * devices)
    rate = samples * 8192 / found.seconds
    assert all(abs(rate / known - 1) < 0.095 for known in published)
    assert abs(rate / (sum(published) / len(published)) - 1) < 0.07


def test_shares_on_the_host_leave_what_comes_and_goes():
    layout = Layout(dp=8, shard="parameters")
    here, there = (
        estimate(torchs(rates=HOST, host_shards=own), layout, 8).memory for own in (False, True)
    )
    assert here["in shares"] == pytest.approx(16 * LLAMA.parameters / 8)
    assert there["in shares"] == pytest.approx((4 + 4) * BLOCK / 8)
    assert {**here, "in shares": 0} == {**there, "in shares": 0}


def test_the_host_steps_and_adds_gradients_which_it_waits_for():
    """At a port that hides nothing copies add up; in later microbatches so do backwards."""
    layout, L = {"shard": "parameters"}, LLAMA.blocks
    here, there = (torchs(rates=SLOW, host_shards=own) for own in (False, True))
    step_s = estimate(there, Layout(dp=2, **layout), 2).parts["step"]
    assert step_s == pytest.approx(HOST.on_host_s(FSDP_STEP * LLAMA.parameters / 2))
    copy_s = 4 * BLOCK / 2 / HOST.host_link
    first_s = replicas_s(there, 1, **layout) - replicas_s(here, 1, **layout)
    # in before both gathers, out behind the scatter; and of the block that nothing hides
    assert first_s == pytest.approx((3 * L + 2) * copy_s, rel=1e-6)
    later_s = replicas_s(there, 2, **layout) - replicas_s(there, 1, **layout)
    summed_s = HOST.on_host_s(HOST_SUM * BLOCK / 2)
    # the backward's gather goes beside it as before, so that no more of it shows
    assert later_s - replicas_s(there, 1, **layout) == pytest.approx(L * summed_s, rel=1e-3)


def test_copies_that_hide_show_from_the_second_microbatch_on():
    """Where the backward hides all, the scatter, its copy and the sum show all the same."""
    fast = dataclasses.replace(HOST, link=3e13, host_link=5e12)
    work, layout = torchs(rates=fast, host_shards=True), Layout(dp=8, shard="parameters")
    one, three = (estimate(work, layout, 8 * m).parts["replicas"] for m in (1, 3))
    summed_s = HOST_SUM * BLOCK / 8 / (ON_HOST * 6e10)
    assert (three - 3 * one) / 2 / LLAMA.blocks == pytest.approx(summed_s, rel=0.1)


def test_shares_on_the_host_are_of_shares_and_of_devices_that_are_known():
    faults = [
        fault.fields["part"]
        for layout in (Layout(dp=8, shard="none"), Layout(pp=2, dp=4, shard="gradients"))
        for fault in find_faults(torchs(rates=HOST, host_shards=True), layout, 64)
    ]
    assert faults == ["shard", "shard"]
    with pytest.raises(PartoptError, match="what copies to its host's memory reach is not known"):
        torchs(host_shards=True)


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_a_plan_of_shares_takes_as_long_as_the_closed_form(trainer):
    facts = {"cpu_offload": "yes"} if trainer == "torchtitan" else {}
    asked = job_of("dgx-h100", "llama3-8b", trainer, 64, "tp=1,pp=1,shard=parameters", **facts)
    work = training_for(asked)
    plan = simulate_layout(asked, work, fill_layout(asked, work))
    about = plan.transformer
    assert plan.predicted.iteration_s == pytest.approx(about.closed_s, rel=1e-3)
    assert plan.peak_memory_bytes <= about.closed_bytes
    shares = 0 if facts else 18 * about.model.parameters / 8
    held = sum(
        getattr(stage.memory, f"{name}_bytes")
        for stage in plan.stages
        for name in ("parameters", "gradients", "optimizer")
    )
    gathered = 4 * about.model.end_parameters  # of two layers as large as the largest
    assert held == pytest.approx(shares + gathered, rel=1e-3)


def test_a_model_that_does_not_fit_otherwise_is_found_with_shares_on_the_host():
    asked = {
        name: job_of("dgx-h100", "llama3-70b", "torchtitan", 32, "pp=1", cpu_offload=name)
        for name in ("no", "yes")
    }
    here, there = (estimate_layouts(own).fitting for own in asked.values())
    assert not here
    assert there and there[0].layout.shares_gradients
