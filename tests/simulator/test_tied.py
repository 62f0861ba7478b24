"""The exchange of the gradients of tied parameters, as plans are charged for it and as they are
executed.

Two holders of 40 bytes, over links of 10 bytes/s with 0.5 s of latency: 4 s and two steps, 5 s.
Stages take 1 s forward, 2 s backward.
"""

import pytest

from partopt.cost.pricing import under
from partopt.documents.stage import Flow
from partopt.schedules.placement import placement_of
from partopt.schedules.torch_csv import to_csv
from partopt.simulator import execute
from partopt.what_if.advice import findings
from tests.helpers import flat
from tests.simulator.plans import plan_of

LINKS = flat(4, 10.0, 0.5)
APART, TIED = {"topology": flat(4, 10.0, 0.5)}, {"topology": LINKS, "tied": ((0, 1), 40)}


@pytest.mark.parametrize(
    ("schedule", "estimated_s"), [("naive", 29.0), ("gpipe", 18.0), ("1f1b", 18.0), ("zb-h1", 18.0)]
)
def test_an_iteration_takes_longer_by_the_exchange(schedule, estimated_s):
    """Stage 0 ends last: nothing hides what comes after its last backward.

    The formula knows that stage 1 begins after 1 s, works for 12 s and exchanges for 5 s; under the
    naive schedule that nothing else goes on.
    """
    without, plan = (
        plan_of([1, 1], schedule=schedule, microbatches=4, **options) for options in (APART, TIED)
    )
    assert plan.predicted.iteration_s == estimated_s
    assert execute(plan).makespan_s == execute(without).makespan_s + 5


def test_replicas_exchange_after_their_all_reduce():
    """A ring of two over 40 bytes takes as long as the exchange."""
    plan = plan_of([2, 2], schedule="1f1b", microbatches=4, **TIED)
    assert [(stage.allreduce_s, stage.tied_exchange_s) for stage in plan.stages] == [(5, 5), (5, 5)]
    without = plan_of([2, 2], schedule="1f1b", microbatches=4, **APART)
    # the ring has its latency without any bytes too
    assert execute(plan).makespan_s == execute(without).makespan_s - 1 + 10


def test_an_asynchronous_stage_is_paced_by_an_exchange_that_is_longer_than_its_compute():
    """3 s of compute: with the exchange beside it 5 s a microbatch; within the backward two take 2
    (3 + 5) s and a round trip.
    """
    plan = plan_of([1, 1], **TIED)
    assert plan.predicted.period_s == execute(plan).period_s == 5
    assert plan.predicted.bound_by == "all-reduce of stage 0"
    assert execute(plan.with_engine(allreduce="blocking")).period_s == (2 * (3 + 5) + 2 * 0.5) / 2


def test_who_waits_for_the_exchange_is_told_so():
    execution = execute(plan_of([1, 1], **TIED))
    [found] = [finding for finding in findings(execution) if finding.code == "all-reduce"]
    assert "with tied parameters, waits for all-reduces 40.0% of the time" in found.text


def test_a_plan_says_which_exchanges_to_make():
    plan = plan_of([1, 1, 1], schedule="1f1b", microbatches=4, topology=LINKS, tied=((0, 2), 40))
    # stages between the tied ones exchange nothing
    assert [stage.tied_exchange_s for stage in plan.stages] == [5, 0, 5]
    assert "1A0" not in [name for rank in range(3) for name in execute(plan).order.names(rank)]
    shared = {"kind": "tied", "holders": 2, "parameters": ["tied"], "bytes": 40}
    shared |= {"per": "iteration", "level": "all"}
    tied = [flow for flow in plan.communication if flow.kind == "tied"]
    assert tied == [Flow(stage=s, **shared) for s in (0, 2)]
    assert list(plan.faults()) == []


def test_on_another_network_the_exchange_takes_another_time():
    plan = plan_of([1, 1], schedule="1f1b", microbatches=4, **TIED)
    assert [stage.tied_exchange_s for stage in under(plan, topology=flat(4, 20.0)).stages] == [2, 2]
    assert under(plan).stages == plan.stages


def test_torch_gets_computations_alone():
    plan = plan_of([1, 1], schedule="1f1b", microbatches=2, **TIED)
    simulation = execute(plan)
    assert simulation.order.names(1) == ["1F0", "1B0", "1F1", "1B1", "1A0", "1U"]
    assert to_csv(simulation.order, placement_of(plan)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
