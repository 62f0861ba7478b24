"""What stages took is the median over microbatches, replicas and steps, by kind of action."""

from __future__ import annotations

import statistics

import pytest

from partopt.documents.actions import KINDS
from partopt.runtime.actions import RankRecord, actions_of
from partopt.runtime.measured import stage_seconds
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from tests.runtime.plans import straight

MS = 10**6  # nanoseconds
STEPS = 3


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "pipedream"])
def test_medians_of_records_made_up(name):
    """An action takes as many ms as its numbers say: no two of a stage and a kind the same."""
    plan = straight(name, [2, 1] if name != "zb-h1" else [1, 1], 4, recompute="always")
    passing = 4 if name == "pipedream" else None
    orders = order(plan.schedule, placement_of(plan, passing))
    taken: dict[tuple[int, str], list[int]] = {}
    steps = []
    for step in range(STEPS):
        records = []
        for rank in range(orders.ranks):
            actions = actions_of(orders, rank)
            record = RankRecord(rank, "here", 1, len(actions))
            for action in actions:
                ms = 1000 * action.kind + 100 * step + 10 * action.microbatch + rank
                record.begin[0, action.place] = 7
                record.end[0, action.place] = 7 + ms * MS
                taken.setdefault((action.stage, KINDS[action.kind]), []).append(ms)
            records.append(record)
        steps.append(records)
    median_s = {key: statistics.median(ms) / 1e3 for key, ms in taken.items()}
    assert ((0, "R") in median_s) == (name == "gpipe")
    for s, found in enumerate(stage_seconds(plan, steps, passing)):
        split = name == "zb-h1"
        whole = median_s[s, "I"] + median_s[s, "W"] if split else median_s[s, "B"]
        assert found.forward_s == pytest.approx(median_s[s, "F"])
        assert found.backward_s == pytest.approx(whole)
        assert found.backward_weight_s == (pytest.approx(median_s[s, "W"]) if split else None)
        assert found.recompute_s == pytest.approx(median_s.get((s, "R")))
        assert found.optimizer_s == pytest.approx(median_s.get((s, "U")))
        assert (found.start, found.modules) == (plan.stages[s].start, plan.stages[s].modules)
