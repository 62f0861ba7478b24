"""Plans side by side, figure by figure: of planners, and on several numbers of devices."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from partopt import Job, solve
from partopt.cost.pricing import under
from partopt.documents.profile import Group
from partopt.search.compare import compare, comparison_of
from partopt.search.scaling import scale_plans, scaling_of
from partopt.search.warmup import simulate_at_warmup
from tests.helpers import flat, uniform_profile

CLUSTER = flat(4, 1e9, memory_bytes=10**9)


def plan(**options):
    return solve(Job(uniform_profile(8), CLUSTER, **options)).plan


def test_a_row_of_a_comparison_is_of_its_plan():
    plans = {
        "slow": plan(cuts=[1], replicas=[1, 1]),
        "fast": plan(cuts=[3], replicas=[2, 2]),
        "none fits": plan(cuts=[4], replicas=[2, 2], memory="1 kB"),
    }
    alone = plan(planner="data_parallel")
    table = comparison_of(plans, alone, restricted=["slow", "none fits"])
    assert [row.planner for row in table.rows][-1] == "slow"
    rows = {row.planner: row for row in table.rows}
    for name, own in plans.items():
        row, predicted = rows[name], own.predicted
        assert (row.shape, row.stages, row.fits) == (own.shape, len(own.stages), own.fits)
        assert (row.period_s, row.samples_per_s) == (predicted.period_s, predicted.samples_per_s)
        assert row.peak_memory_bytes == own.peak_memory_bytes
        assert row.speedup_over_data_parallel == alone.predicted.period_s / predicted.period_s
        assert row.speedup_over_one_device == predicted.speedup_over_one_device
    assert (rows["fast"].price, rows["none fits"].price) == (None, None)
    assert rows["none fits"].period_s < rows["fast"].period_s
    ratio = rows["slow"].period_s / rows["fast"].period_s
    assert rows["slow"].price == pytest.approx(ratio - 1) and ratio > 1.5
    assert (table.model, table.layers, table.schedule) == ("chain", 8, "pipedream")
    assert comparison_of(plans, None).rows[0].speedup_over_data_parallel is None


def test_a_plan_for_other_microbatches_is_compared_at_the_best_warm_up_for_these():
    """With two of them no stage does more than one forward first, which starves a pipeline."""
    split = {"cuts": [2, 4, 6], "replicas": [1] * 4, "schedule": "1f1b-eager"}
    few = plan(microbatches=2, **split)
    assert {stage.warmup for stage in few.stages} == {0, 1}
    job = Job(uniform_profile(8), CLUSTER, schedule="1f1b-eager", microbatches=16)
    (row,) = [own for own in compare(job, ["gpipe"], {"few": few})[0].rows if own.planner == "few"]
    assert row.period_s == plan(microbatches=16, **split).predicted.period_s
    priced = under(few, microbatches=16)
    starved = simulate_at_warmup(priced, [stage.warmup for stage in few.stages])
    assert row.period_s < starved.predicted.period_s


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_of_a_scaling_counts_ranks_of_groups_and_the_speed_of_each(ranks):
    profile = replace(uniform_profile(8), group=Group(ranks=2) if ranks == 2 else None)
    plans = scale_plans(Job(profile, flat(8), planner="straight"), [2, 4], False)
    for row, own in zip(scaling_of(plans).rows, plans, strict=True):
        assert row.devices == own.topology.devices * own.topology.group_ranks
        assert row.efficiency == own.predicted.speedup_over_one_device / own.topology.devices
        assert (row.planner, row.shape, row.fits) == ("straight", own.shape, True)
    assert [row.devices for row in scaling_of(plans).rows] == [2, 4]
