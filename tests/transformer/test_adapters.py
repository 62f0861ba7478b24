"""Adapters of low rank, trained beside products that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import Job, PartoptError, Plan, Topology, solve
from partopt.documents.engine import Layout
from partopt.documents.transformer import ADAPTED
from partopt.importers.hugging_face import load_transformer
from partopt.report.transformer_text import render
from partopt.trainers import TRAINERS, export_plan
from partopt.transformer.block import Shape
from partopt.transformer.halves import Product
from partopt.transformer.iteration import estimate
from tests.transformer.helpers import EXPERTS, GPT, KINDS, LLAMA, RATES, seconds, size, training

RANK = 16
LAYOUTS = [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 4}, {"tp": 2, "pp": 2, "dp": 2, "cp": 2}]


def by_hand(targets):
    """Parameters of adapters of a block of `LLAMA`: 1,024 wide, 2 of 8 heads of keys, 3,584."""
    sides = {"qkv": 1024 + 1536, "proj": 2 * 1024, "fc1": 1024 + 2 * 3584, "fc2": 3584 + 1024}
    return RANK * sum(sides[name] for name in targets)


@pytest.mark.parametrize("targets", [["qkv"], ["qkv", "proj"], ["fc1", "fc2"], [*ADAPTED]])
def test_what_is_trained_is_two_narrow_matrices_a_product(targets):
    work = training(adapters=RANK, adapted="+".join(targets))
    assert work.trained_parameters(Shape(), work.kinds[-1]) == (by_hand(targets), 0)
    memory = estimate(work, Layout(dp=8, shard="optimizer"), 32).memory
    trained = 4 * by_hand(targets)
    assert memory["gradients"] == pytest.approx(4 * trained)
    assert memory["optimizer"] == pytest.approx(12 * trained / 8)
    assert memory["parameters"] == pytest.approx(2 * (LLAMA.parameters + trained), rel=1e-3)


def test_all_experts_have_some():
    work = training(EXPERTS, adapters=RANK, adapted="fc1")
    dense, experts = work.trained_parameters(Shape(e=2), work.kinds[-1])
    assert (dense, experts) == (0, RANK * (1024 + 2 * 512) * 8 / 2)


@given(
    st.sampled_from([GPT, LLAMA, EXPERTS, KINDS]),
    st.sampled_from(LAYOUTS),
    st.integers(1, 64),
    st.sets(st.sampled_from(ADAPTED), min_size=1),
    st.booleans(),
)
def test_adapters_train_less_and_wider_ones_take_more(model, layout, rank, targets, drops):
    facts = {"adapted": "+".join(name for name in ADAPTED if name in targets)}
    narrow, wide = (
        training(model, adapters=width, adapter_dropout=drops, **facts)
        for width in (rank, 2 * rank)
    )
    full = training(model)
    for part in ("gradients", "optimizer"):
        few, more, all_of_them = (
            estimate(work, Layout(**layout), 32).memory[part] for work in (narrow, wide, full)
        )
        assert 0 < 1.999 * few <= more < all_of_them
    assert size(narrow, **layout) < size(wide, **layout)
    assert seconds(narrow, **layout) <= seconds(wide, **layout)


def test_a_product_that_is_not_trained_has_no_gradient_of_its_weight():
    adapters = training(adapters=RANK, adapted="fc2").adapters
    product, tokens = Product(4096, 4096, 0.0, name="qkv"), 8192
    forward, backward = adapters.linear_s(product, tokens, "bfloat16")
    full = RATES.linear_s(tokens, product.n, product.k)
    assert forward == full.forward
    assert backward == RATES.product_s(tokens, product.k, product.n)
    assert backward == pytest.approx(full.backward / 2, rel=0.05)
    more = adapters.linear_s(product._replace(name="fc2"), tokens, "bfloat16")
    narrow = 2 * 2 * tokens * RANK * 2 * 4096 / 8e14  # two products of two operations
    assert forward + narrow / 2 < more.forward and backward + narrow < more.backward


def job_of(**options):
    model, topology = load_transformer("llama3-8b"), Topology.load("dgx-h100", 1)
    asked = {"trainer": "megatron-bridge", "global_batch": 32, "sequence": 4096} | options
    return Job(model=model, topology=topology, **asked)


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = {"lora": 8, "lora-targets": "proj+qkv", "lora-dropout": "yes"}
    return solve(job_of(facts=facts)).plan


def test_a_plan_of_adapters_is_simulated_verified_and_exported(plan):
    about, profile = plan.transformer, plan.transformer and plan.profile
    assert about and profile
    assert plan.predicted.iteration_s == pytest.approx(about.closed_s, rel=0.05)
    assert all(stage.frozen_bytes > 0.99 * stage.parameter_bytes for stage in plan.stages)
    assert "adapters of rank 8 beside qkv, proj alone are trained" in " ".join(render(plan).split())
    written = export_plan(plan, "megatron-bridge")
    said = "LoRA(target_modules=['linear_qkv', 'linear_proj'], dim=8, dropout=0.1)"
    assert f"    config.peft = {said}\n" in written.main
    assert not any("does not say so" in note for note in written.notes)


def test_a_training_of_all_weights_takes_more(plan):
    full = solve(job_of(layout=plan.layout)).plan
    assert plan.fits and full.peak_memory_bytes > 1.3 * plan.peak_memory_bytes


@pytest.mark.parametrize("other", ["fsdp", "muon"])
def test_what_adapters_cannot_have_is_refused(other):
    with pytest.raises(PartoptError, match="lora=8") as refused:
        TRAINERS["megatron-bridge"].run_with({"lora": "8", other: "yes"})
    assert refused.value.hint == f"leave `{other}` out"
