"""The steady state of asynchronous schedules: found, not taken for one too early, and reported
where there is none yet.
"""

import numpy as np
import pytest
from hypothesis import given

from partopt.cost.pricing import under
from partopt.documents.actions import F
from partopt.documents.engine import Engine
from partopt.simulator import execute
from partopt.simulator.metrics import shares
from tests.examples import examples
from tests.helpers import BLOCKING, flat
from tests.simulator.plans import plan_of, plans


def forwards(simulation):
    """When the first stage began each microbatch."""
    order = simulation.order
    chosen = (order.kind == F) & (order.stage == 0)
    return simulation.timeline.start[chosen][np.argsort(order.microbatch[chosen])]


def slope_s(simulation, cycle):
    """Seconds per microbatch over whole cycles in the later half of a run, its end left out."""
    starts = forwards(simulation)
    last = len(starts) - len(starts) // 8
    cycles = (last - len(starts) // 2) // cycle
    return (starts[last - 1] - starts[last - 1 - cycles * cycle]) / (cycles * cycle)


@pytest.mark.slow
@examples(80)
@given(plans())
def test_the_period_is_the_slope_of_a_run_four_times_as_long(plan):
    found = execute(plan)
    assert found.steady.settled
    longer = execute(plan, 4 * found.microbatches)
    assert found.period_s == pytest.approx(slope_s(longer, found.steady.microbatches), rel=1e-9)
    assert longer.steady.settled
    assert found.period_s == pytest.approx(longer.period_s, rel=1e-9)


@pytest.mark.parametrize(
    "replicas", [[1], [4], [3, 1], [15, 1], [2, 1, 1], [1, 2], [3, 2], [2, 3], [1, 2, 3, 4], [5, 7]]
)
@pytest.mark.parametrize("blocking", [False, True])
def test_balanced_plans_settle_and_a_cycle_is_a_number_of_whole_rounds(replicas, blocking):
    found = execute(plan_of(replicas, engine=BLOCKING if blocking else Engine()))
    assert found.steady.settled
    assert found.steady.microbatches % np.lcm.reduce(replicas) == 0
    assert found.end_s - found.start_s == pytest.approx(
        found.steady.microbatches * found.period_s, rel=1e-12
    )


def test_computations_that_repeat_while_all_reduces_fall_behind_are_not_a_steady_state():
    """The first stage sends a microbatch every 14 s, a round of the second stage's two replicas
    every 28 s; its all-reduce takes 29 s.

    The replicas compute for 2 s of the 14, so that for some twenty rounds nobody waits for an
    all-reduce; then everybody does.
    """
    plan = plan_of([1, 2], [5.0, 1.0], [9.0, 1.0], weights=[0, 29])
    early = forwards(execute(plan, 40))
    assert set(np.diff(early[3:30])) == {14.0}
    found = execute(plan)
    assert found.period_s == 14.5
    assert found.steady.settled
    assert not execute(plan, 40).steady.settled


def test_queues_that_fill_slowly_are_not_a_steady_state():
    """A warm-up of 40 forwards runs ahead of a second stage that is slower by a thousandth."""
    plan = under(plan_of([1, 1], [1.0, 1.001], [1.0, 1.001]), warmups=[40, 0])
    found = execute(plan)
    assert found.steady.settled
    assert found.period_s == pytest.approx(2.002, rel=1e-9)


@pytest.mark.parametrize(
    ("forward", "backward", "cuts", "weights", "latency_s", "warmups"),
    [
        ([2, 4, 4], [6, 2, 5], [0, 3], [18, 0, 0], 200, [52, 34, 0]),
        ([4, 4, 2], [1, 3, 4], [3, 4], [18, 18, 0], 200, [50, 33, 0]),
        ([2, 1, 4], [5, 6, 2], [1, 3], [18, 18, 0], 500, [48, 32, 0]),
    ],
)
def test_bursts_that_latency_parts_are_not_a_steady_state(
    forward, backward, cuts, weights, latency_s, warmups
):
    """Some fifty microbatches follow each other at the pace of the computations, then everybody
    waits for a message: within a burst even whole microbatches repeat.
    """
    on = flat(3, 1.0, latency=latency_s)
    plan = plan_of([1, 1, 1], forward, backward, cuts, weights, on)
    found = execute(under(plan, warmups=warmups))
    assert found.steady.settled
    longer = execute(under(plan, warmups=warmups), 4 * found.microbatches)
    assert found.period_s == pytest.approx(slope_s(longer, found.steady.microbatches), rel=1e-9)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_too_few_microbatches_do_not_settle(microbatches):
    found = execute(plan_of([3, 1, 2]), microbatches)
    assert not found.steady.settled
    assert found.period_s > 0
    assert 0 <= found.start_s < found.end_s <= found.makespan_s


@pytest.mark.slow
@examples(25)
@given(plans(gradients=False))
def test_the_period_does_not_depend_on_how_many_microbatches_are_simulated(plan):
    found = execute(plan)
    for more in (1, 7, 23):
        assert execute(plan, 2 * found.microbatches + more).period_s == pytest.approx(
            found.period_s, rel=1e-9
        )


def test_where_time_goes_in_a_cycle_is_the_same_in_every_cycle():
    found = execute(plan_of([2, 1, 3], cuts=[1, 2], weights=[3, 0, 2]))
    cycle = found.end_s - found.start_s
    for back in (0.0, cycle / 3, cycle):
        of_rank = shares(found.timeline, found.work, found.start_s - back, found.end_s - back)
        assert of_rank.compute_s == pytest.approx(found.shares.compute_s, rel=1e-9)
        assert of_rank.transfer_s == pytest.approx(found.shares.transfer_s, rel=1e-9, abs=1e-9)
