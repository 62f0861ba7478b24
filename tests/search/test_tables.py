"""Plans side by side, figure by figure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from partopt import Job, solve
from partopt.documents.profile import Group
from partopt.search.scaling import scale_plans
from partopt.search.tables import comparison_of, scaling_of
from tests.helpers import flat, uniform_profile

CLUSTER = flat(4, 1e9, memory_bytes=10**9)


def plan(**options):
    return solve(Job(uniform_profile(8), CLUSTER, **options)).plan


def test_a_row_of_a_comparison_is_of_its_plan():
    plans = {
        "slow": plan(cuts=[1], replicas=[1, 1]),
        "fast": plan(cuts=[4], replicas=[2, 2]),
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
    ratio = rows["slow"].period_s / rows["fast"].period_s
    assert rows["slow"].price == pytest.approx(ratio - 1) and ratio > 1.5
    assert (table.model, table.layers, table.schedule) == ("chain", 8, "pipedream")
    assert comparison_of(plans, None).rows[0].speedup_over_data_parallel is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_of_a_scaling_counts_ranks_of_groups_and_the_speed_of_each(ranks):
    profile = replace(uniform_profile(8), group=Group(ranks=2) if ranks == 2 else None)
    plans = scale_plans(Job(profile, flat(8), planner="straight"), [2, 4], False)
    for row, own in zip(scaling_of(plans).rows, plans, strict=True):
        assert row.devices == own.topology.devices * own.topology.group_ranks
        assert row.efficiency == own.predicted.speedup_over_one_device / own.topology.devices
        assert (row.planner, row.shape, row.fits) == ("straight", own.shape, True)
    assert [row.devices for row in scaling_of(plans).rows] == [2, 4]
