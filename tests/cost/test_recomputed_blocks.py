"""Blocks that are made again one by one, by hand and beside a published model."""

from __future__ import annotations

import pytest

import partopt as po
from partopt.cost.ranges import RangeMax, RangeSum
from partopt.cost.recomputed_blocks import Blocks
from tests.helpers import chain_profile, flat


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
