"""As few blocks made again as fit, against every number of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partopt as po
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.cost.ranges import RangeMax, RangeSum
from partopt.cost.recomputed_blocks import Blocks
from partopt.documents.plan import Plan
from partopt.search.recomputed_blocks import recompute_less
from partopt.search.replanning import Recomputation
from partopt.search.verify import verify
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS
from tests.examples import examples
from tests.helpers import chain_profile, flat, with_memory_of

MB = 1_000_000
NAMES = ["wte", *(f"h.{n}" for n in range(9)), "ln_f", "lm_head"]


def model(stash_mb: list[int]) -> po.Profile:
    """An embedding, nine blocks that keep so much, a norm and a head; 1 MB crosses each cut."""
    groups = [([n], MB * own) for n, own in enumerate(stash_mb)]
    own = {"output_bytes": [MB] * 12, "parameter_bytes": [1000] * 12, "names": NAMES}
    profile = chain_profile([1e-3] * 12, stash_groups=groups, **own)
    return with_memory_of(profile, [0] * 12, [MB] * 12)


@st.composite
def shorts(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A plan of three stages that recompute all of their blocks, on devices with little more."""
    profile = model([0, *draw(st.lists(st.integers(2, 9), min_size=9, max_size=9)), 1, 4])
    cuts = draw(st.sampled_from([[4, 7], [2, 5], [5, 9], [6, 8]]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    engine = TRAINERS["colossalai"].engine
    options = {"schedule": schedule, "microbatches": 4, "cuts": cuts, "engine": engine}
    job = po.Job(profile, flat(3), recompute="auto", block_bounds=list(range(1, 11)), **options)
    whole = job.problem.with_(recompute="always")
    stages = [
        Assignment(i, j, range(s, s + 1), True)
        for s, (i, j) in enumerate(zip([0, *cuts], [*cuts, 12], strict=True))
    ]
    partition = Partition(CONTIGUOUS, stages)
    least = simulate_plan(price(partition, whole, "optimal")).peak_memory_bytes
    limit = least + draw(st.integers(0, 60)) * MB
    problem = job.problem.with_(memory_bytes=limit, cuts=None)
    return problem, simulate_plan(price(partition, problem, "optimal"))


def with_firsts(problem: Problem, plan: Plan, firsts: list[int]) -> Plan:
    """The plan whose stages make so many of their blocks again."""
    stages = [
        Assignment(own.start, own.stop, own.ranks, True, first)
        for own, first in zip(plan.stages, firsts, strict=True)
    ]
    return simulate_plan(price(Partition(CONTIGUOUS, stages), problem, "optimal"))


@pytest.mark.slow
@examples(60)
@given(shorts())
def test_one_number_for_all_stages_is_the_least_that_fits(short):
    problem, plan = short
    most = max(stage.blocks for stage in plan.stages)
    every = {n: with_firsts(problem, plan, [n] * 3) for n in range(1, most + 1)}
    least = min((n for n, own in every.items() if own.fits), default=most)
    found = recompute_less(plan, problem, alike=True)
    assert [own.blocks_again for own in found.stages] == [
        min(least, own.blocks) for own in plan.stages
    ]
    assert found.predicted.iteration_s == every[least].predicted.iteration_s
    assert found.predicted.iteration_s <= plan.predicted.iteration_s
    assert found.fits == plan.fits
    if least < most:
        assert (found.layout.recompute, found.request.recompute) == (least, least)


@pytest.mark.slow
@examples(60)
@given(shorts())
def test_each_stage_makes_the_fewest_again_that_fit_its_device(short):
    problem, plan = short
    found = recompute_less(plan, problem, alike=False)
    for s, stage in enumerate(plan.stages):
        fits = [
            n
            for n in range(1, stage.blocks)
            for own in [with_firsts(problem, plan, [n if t == s else 99 for t in range(3)])]
            if own.stages[s].memory.total_bytes <= problem.memory_bytes
        ]
        assert found.stages[s].blocks_again == min(fits, default=stage.blocks)
    assert found.predicted.iteration_s <= plan.predicted.iteration_s
    assert found.fits == plan.fits
    assert not list(found.faults())


def test_stages_that_keep_all_go_on_to_do_so():
    options = {"schedule": "1f1b", "microbatches": 4, "cuts": [4, 7], "recompute": "auto"}
    options |= {"engine": TRAINERS["colossalai"].engine, "block_bounds": list(range(1, 11))}
    job = po.Job(model([0, *[5] * 9, 1, 4]), flat(3, memory_bytes=10**10), **options)
    problem = job.problem.with_(cuts=None)
    spans = zip([0, 4, 7], [4, 7, 12], [True, False, False], strict=True)
    stages = [Assignment(i, j, [s], again) for s, (i, j, again) in enumerate(spans)]
    plan = simulate_plan(price(Partition(CONTIGUOUS, stages), problem, "optimal"))
    found = recompute_less(plan, problem, alike=False)
    assert [own.blocks_again for own in found.stages] == [1, 0, 0]
    none = [replace(own, recompute=False) for own in stages]
    plan = simulate_plan(price(Partition(CONTIGUOUS, none), problem, "optimal"))
    assert recompute_less(plan, problem, alike=False) is plan


@pytest.mark.slow
@pytest.mark.parametrize("to", ["megatron", "colossalai"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_best_plan_of_a_trainer_is_verified_written_and_read_again(to, schedule, tmp_path):
    if schedule not in TRAINERS[to].schedules:
        pytest.skip("ColossalAI interleaves even stages alone")
    profile = model([0, *[9] * 9, 1, 4])
    stages = 4 if schedule == "interleaved" else 2
    options = {"schedule": schedule, "microbatches": 8, "optimizer": "sgd", "stages": stages}
    memory = (60 if stages == 4 else 40) * MB
    job = po.Job(profile, flat(2), memory=memory, recompute="auto", trainer=to, **options)
    always = po.solve(job.with_(recompute="always")).plan
    assert always.fits
    plan = po.solve(job).plan
    assert plan.fits
    assert any(stage.first_again is not None for stage in plan.stages)
    assert plan.predicted.iteration_s < always.predicted.iteration_s
    if plan.planner == "optimal":
        assert verify(plan, profile).verified
    assert Recomputation(plan, profile, lambda *_: None).simulated.stages == plan.stages
    plan.save(str(tmp_path / "plan.json"))
    assert po.Plan.load(str(tmp_path / "plan.json")) == plan
    layout = po.read_layout(to, po.export_plan(plan, to).main, profile)
    assert layout.stated.layout.recompute == plan.layout.recompute
    assert [0, *layout.cuts] == [stage.start for stage in plan.stages]


def test_a_published_model_keeps_and_takes_what_was_measured():
    """Korthikanti et al. 2022, 22B on 8 ranks, microbatch 4: tables 2 and 4, and figure 7."""
    s, b, h, a, t, layers = 2048, 4, 6144, 64, 8, 48
    stash, hidden = int(s * b * h * (10 + 24 / t + 5 * a * s / (h * t))), 2 * s * b * h
    profile = chain_profile(
        [0.0, *[7.7e-3] * layers, 0.0],
        [0.0, *[11.9e-3] * layers, 0.0],
        output_bytes=[hidden] * (layers + 2),
        stash_groups=[([n], stash) for n in range(1, layers + 1)],
        names=["wte", *(f"h.{n}" for n in range(layers)), "lm_head"],
    )
    plans = {}
    for how in ("never", 12, 24, "always"):
        job = po.Job(profile, flat(1), schedule="1f1b", microbatches=1, cuts=[], recompute=how)
        job = job.with_(trainer="megatron")
        plans[how] = po.solve(job).plan.stages[0]
    kept = {how: own.memory.activations_bytes for how, own in plans.items()}
    assert kept["always"] / kept["never"] == pytest.approx(0.0764, rel=0.01)
    assert kept[12] / kept["never"] == pytest.approx(1 - 12 / 48 * (1 - 0.0764), rel=0.01)
    backward_s = {how: (own.compute_s - own.forward_s) / layers for how, own in plans.items()}
    assert backward_s["always"] == pytest.approx(19.5e-3, rel=0.01)
    assert backward_s[24] == pytest.approx((19.5e-3 + 11.9e-3) / 2, rel=0.01)


def test_blocks_by_hand():
    """Layers of 1 to 5 s, of which 1, and 2 with 3, are blocks; [1, 5) with its first block."""
    stash = RangeSum([10.0, 20.0, 30.0, 40.0, 50.0])
    transient = RangeMax([1.0, 2.0, 3.0, 4.0, 5.0], stash)
    seconds, inputs = RangeSum([1.0, 2.0, 3.0, 4.0, 5.0]).alone, stash.alone / 10
    blocks = Blocks([1, 2, 4], seconds, inputs, stash, transient)
    assert (blocks.count(0, 5), blocks.count(1, 5, 1), blocks.count(4, 5)) == (2, 1, 0)
    one = blocks.remade(1, 5, 1)  # the first keeps its input in the buffer
    assert (one.again_s, one.stash_bytes, one.split_stash_bytes) == (2.0, 30 + 40 + 50, 20)
    assert one.transient_bytes == 5  # of the last layer, while all of the stash is there
    both = blocks.remade(0, 5)  # the embedding and the head are kept
    assert (both.again_s, both.stash_bytes) == (2 + 3 + 4, 10 + (2 + 3) + 50)
    assert both.transient_bytes == 30 + 40 + 4 - 50  # the second block, the head's stash is gone
    assert blocks.remade(0, 5, 7) == both
