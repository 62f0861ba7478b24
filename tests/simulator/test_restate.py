"""A plan under another schedule is the plan that would have been made for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.layout import CHUNKS, STRAIGHT
from partopt.simulator import execute
from partopt.simulator.memory import peak_memory_bytes
from partopt.simulator.restate import with_conditions
from tests.helpers import flat
from tests.simulator.plans import chunked, plan_of

STRAIGHTS = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]
CHUNKED = [name for name, entry in SCHEDULES.items() if entry.shape != STRAIGHT]
ASYNCHRONOUS = {name for name, entry in SCHEDULES.items() if entry.asynchronous}


def made(name, replicas, recompute):
    costs = {"cuts": [3] * (len(replicas) - 1), "weights": [5 + s for s in range(len(replicas))]}
    M = None if name in ASYNCHRONOUS else 12
    return plan_of(replicas, schedule=name, microbatches=M, recompute=recompute, **costs)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(STRAIGHTS),
    st.sampled_from(STRAIGHTS),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_restated_plan_holds_and_costs_what_one_made_for_that_schedule_does(
    before, after, replicas, recompute
):
    if not (SCHEDULES[before].uneven and SCHEDULES[after].uneven):
        replicas = replicas[:1] * len(replicas)
    found = with_conditions(made(before, replicas, recompute), after, 12)
    made_for_it = made(after, replicas, recompute)
    assert found.stages == made_for_it.stages
    assert (found.schedule, found.microbatches, found.noam) == (
        made_for_it.schedule,
        made_for_it.microbatches,
        made_for_it.noam,
    )


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("d", [1, 2])
def test_the_stages_of_a_rank_together_need_what_it_holds_at_its_fullest(name, P, d):
    for v in [CHUNKS[SCHEDULES[name].shape]] if SCHEDULES[name].shape in CHUNKS else [1, 2, 3]:
        tried = [M for M in range(1, 17) if refusal(name, P, v, M) is None]
        assert tried
        for M in tried:
            plan = chunked(name, P, v, M * d, d)
            order = execute(plan).order
            held = [
                sum(plan.stages[s].memory.total_bytes for s in stages)
                for _, stages in sorted(plan.stages_by_rank().items())
            ]
            assert held == peak_memory_bytes(order, plan).tolist(), (v, M)


def test_another_topology_changes_the_all_reduces_and_nothing_else():
    plan = made("1f1b", [2, 1], False)
    slower = with_conditions(plan, topology=flat(3, 0.5))
    assert [stage.allreduce_s for stage in slower.stages] == [
        2 * stage.allreduce_s for stage in plan.stages
    ]
    assert [stage.memory for stage in slower.stages] == [stage.memory for stage in plan.stages]


def test_a_synchronous_schedule_needs_a_number_of_microbatches():
    with pytest.raises(PartoptError, match="needs a number of microbatches"):
        with_conditions(made("pipedream", [1, 1], False), "1f1b")


def test_a_deeper_warm_up_holds_as_many_more():
    plan = with_conditions(made("pipedream", [1, 1], False), warmups=[5, 0])
    assert [(stage.warmup, stage.in_flight, stage.weight_versions) for stage in plan.stages] == [
        (5, 6, 6),
        (0, 1, 1),
    ]
    assert execute(plan).peak_in_flight.tolist() == [6, 1]
