"""Towers that read pictures before the first stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import Job, PartoptError, Topology, solve
from partopt.documents.engine import Layout
from partopt.documents.transformer import Tower
from partopt.importers.hugging_face import load_transformer
from partopt.report.transformer_text import render
from partopt.trainers import export_plan
from partopt.transformer.block import Shape
from partopt.transformer.iteration import Degrees, estimate, iteration_s, stage_counts
from tests.transformer.helpers import LLAMA, seconds, size, training

TOWER = Tower(blocks=3, hidden=512, ffn=2048, patch=588, merged=4, aligner=4 * 512 * 1024)
PICTURES = replace(LLAMA, blocks=12, tower=TOWER)
PARAMETERS = 3 * (4 + 8) * 512**2 + 588 * 512 + 4 * 512 * 1024
LAYOUTS = [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 4}, {"tp": 2, "pp": 2, "dp": 2, "cp": 2}]


def test_a_sample_without_pictures_has_no_tower():
    for layout in LAYOUTS:
        plain, none = (
            estimate(training(model), Layout(**layout), 32)
            for model in (replace(PICTURES, tower=None), PICTURES)
        )
        assert plain == none


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_stage_has_it_whole_and_trains_it_or_not(layout):
    assert TOWER.parameters == PARAMETERS
    frozen, trained = (
        estimate(
            training(PICTURES, images=256, tower_trained=way),
            Layout(**layout, shard="optimizer"),
            32,
        )
        for way in (False, True)
    )
    sharers = layout["dp"] * layout.get("cp", 1)
    for found, of_state in ((frozen, 0), (trained, 4 + 12 / sharers)):
        if "tower" in found.memory:  # of the fullest, which may be the last
            assert found.memory["tower"] == pytest.approx((2 + of_state) * PARAMETERS)
    assert frozen.seconds < trained.seconds
    assert "tower" in frozen.parts


def test_frozen_it_takes_the_operations_of_its_products_and_attention():
    work = training(PICTURES, images=256)
    patches, tokens = 4 * 256, 256
    flops = 2 * patches * (PARAMETERS - TOWER.aligner) + 2 * tokens * TOWER.aligner
    scores = 3 * 4 * patches**2 * 512
    forward, backward = work.pictures_s(Shape(b=8))
    arithmetic = 8 * (flops / 8e14 + scores * (1 + 400 / patches) / 0.5e15)
    assert backward == 0
    assert arithmetic < forward < 3 * arithmetic
    trained = training(PICTURES, images=256, tower_trained=True).pictures_s(Shape(b=8))
    assert trained.forward == forward
    assert 1.5 * forward < trained.backward < 3 * forward
    again = training(PICTURES, images=256, tower_trained=True)
    made = again.pictures_s(Shape(b=8, recompute="always"))
    assert made.backward == pytest.approx(trained.backward + forward)


@given(st.integers(1, 512), st.sampled_from(LAYOUTS), st.booleans())
def test_more_pictures_take_longer_and_no_less_memory(images, layout, trained):
    few, more = (training(PICTURES, images=n, tower_trained=trained) for n in (images, 2 * images))
    assert seconds(few, **layout) < seconds(more, **layout)
    assert size(few, **layout) <= size(more, **layout)


def test_the_first_stage_has_fewer_blocks_as_best():
    layout, batch = Layout(pp=4, dp=1, microbatch=1), 32
    counts = []
    for images in (64, 512, 2048):
        work = training(PICTURES, images=images, ends="free")
        found = stage_counts(work, Degrees.of(work, layout, batch))
        counts.append(found[0])
        least = min(
            iteration_s(training(PICTURES, images=images, ends=f"{a}-{b}-{c}-{d}"), layout, batch)
            for a in range(1, 10)
            for b in range(1, 11 - a)
            for c in range(1, 12 - a - b)
            if (d := 12 - a - b - c) > 0
        )
        assert iteration_s(work, layout, batch) <= least * (1 + 1e-9)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def job_of(**options):
    model, topology = load_transformer("qwen3-vl-8b"), Topology.load("dgx-h100", 1)
    asked = {"trainer": "megatron-bridge", "global_batch": 32, "sequence": 4096} | options
    return Job(model=model, topology=topology, **asked)


def test_a_plan_is_simulated_as_computed_and_not_exported():
    plan = solve(job_of(facts={"images": 2048}, layout=Layout(pp=4, chunks=1))).plan
    about = plan.transformer
    assert about and plan.fits
    assert plan.predicted.iteration_s == pytest.approx(about.closed_s, rel=0.05)
    assert plan.stages[0].frozen_bytes == 2 * about.model.tower.parameters
    page = " ".join(render(plan).split())
    assert "a tower of 0.58 B, frozen, for 2,048 tokens of pictures" in page
    assert "its text alone" not in page
    assert "no published run with pictures is known: the seconds with them are unverified" in page
    assert "published runs like this" not in page and about.form and about.form.errors is None
    alone = solve(job_of(layout=Layout(pp=4, chunks=1)), levers=False).plan
    assert "published runs like this" in render(alone) and "with pictures" not in render(alone)
    with pytest.raises(PartoptError, match="a tower is not written"):
        export_plan(plan, "megatron-bridge")


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"images": 5000}, "a sample has 4,096 tokens"),
        ({"images": 8, "fsdp": "yes"}, "not planned in shares"),
        ({"images": 8, "tower": "trained", "lora": 8}, "nor trained beside adapters"),
        ({"images": "many"}, "unknown images"),
    ],
)
def test_what_is_not_planned_of_it_is_refused(facts, what):
    with pytest.raises(PartoptError, match=what):
        solve(job_of(facts=facts))


def test_a_model_of_text_has_no_pictures():
    job = job_of(facts={"images": 8}).with_(model=load_transformer("qwen3-8b"))
    with pytest.raises(PartoptError, match="what reads pictures of qwen3-8b is not known"):
        solve(job)
