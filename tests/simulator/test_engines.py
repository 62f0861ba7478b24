"""What engines do, worked by hand: messages that take time of their devices, gradients that are
exchanged beside the last backward, tensors that have no gradient.
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.pricing import under
from partopt.documents.actions import A
from partopt.documents.engine import Engine
from partopt.documents.topology import AllReduceRates
from partopt.simulator import execute
from tests.cost.test_estimate_and_simulation import FLAT, contiguous, problems
from tests.examples import examples
from tests.helpers import WAITING, flat
from tests.planners.problems import priced
from tests.simulator.plans import plan_of


def with_level(topology, **fields):
    """The topology, its levels with other fields."""
    levels = [structs.replace(level, **fields) for level in topology.levels]
    return structs.replace(topology, levels=levels)


def test_a_message_takes_overhead_and_copying_of_both_devices_even_where_it_overlaps():
    """GPipe, 2 stages of F = 1, B = 2, M = 2, 4 bytes a cut: 0.5 s of overhead and 4/8 s of copying
    make F and B of both stages a second longer, the last gradient's and the first input's too; the
    wire is as good as none.

    Stage 0: F to 2, F to 4. Stage 1: F 2-4, F 4-6, B 6-9, B 9-12. Stage 0: B 9-12, B 12-15.
    """
    slow = with_level(flat(2, 1e12), overhead_s=0.5, copy_bytes_per_s=8.0)
    plan = plan_of([1, 1], cuts=[4], topology=slow, schedule="gpipe", microbatches=2)
    assert execute(plan).makespan_s == pytest.approx(15.0)


def test_each_tensor_of_a_cut_is_a_message_and_one_without_gradient_does_not_come_back():
    slow = with_level(flat(2, 1e12), overhead_s=0.5)
    plan = plan_of([1, 1], cuts=[4], topology=slow, schedule="gpipe", microbatches=2)
    assert execute(plan).makespan_s == pytest.approx(2 * 4.5 + 3.5 - 0.5)
    first, last = plan.stages
    three = structs.replace(plan, stages=[first, structs.replace(last, messages=3)])
    # three come in 1.5 s, one goes back in 0.5 s
    assert execute(three).makespan_s == pytest.approx(3 * 2.5 + 3 * 2.5)
    # 4 bytes go in 4 s, one of them comes back in 1 s
    plan = plan_of([1, 1], cuts=[4], schedule="gpipe", microbatches=1)
    assert execute(plan).makespan_s == 1 + 4 + 3 + 4 + 2
    first, last = plan.stages
    fewer = structs.replace(plan, stages=[first, structs.replace(last, back_bytes=1)])
    assert execute(fewer).makespan_s == 1 + 4 + 3 + 1 + 2


def data_parallel(backward, buckets, allreduce="overlap"):
    """Two replicas of a stage of 8 bytes that take 8 s to exchange."""
    engine = Engine(bucket_bytes=8 // buckets, allreduce=allreduce)
    options = {"schedule": "1f1b", "microbatches": 2, "engine": engine}
    return plan_of([2], [1.0], [backward], weights=[8], **options)


def test_plain_data_parallelism_takes_its_forward_and_the_longer_of_backward_and_exchange():
    """But for a bucket: F + max(B + AR / n, B / n + AR)."""
    for backward in (2.0, 8.0, 40.0):
        for n in (1, 2, 4, 8):
            expected = 1 + max(backward + 8 / n, backward / n + 8)
            assert execute(data_parallel(backward, n)).makespan_s == pytest.approx(expected)
        after = execute(data_parallel(backward, 4, "blocking"))
        assert after.makespan_s == 1 + backward + 8
    # a collective's own rate is what gradients take
    own = with_level(flat(2, 1.0), allreduce=AllReduceRates(bandwidth_bytes_per_s=0.5))
    plan = plan_of([2], [1.0], [2.0], weights=[8], topology=own, schedule="gpipe", microbatches=2)
    assert execute(plan).makespan_s == 1 + 2 + 16


def test_gradients_of_tied_parameters_are_exchanged_when_the_others_are():
    """Two stages of two replicas that share 8 bytes: what the two exchange comes last."""
    options = {"schedule": "gpipe", "microbatches": 2, "engine": Engine(bucket_bytes=2)}
    plan = plan_of([2, 2], [1.0, 1.0], [4.0, 4.0], weights=[0, 8], tied=((0, 1), 8), **options)
    beside, after = execute(plan), execute(plan.with_engine(allreduce="blocking"))
    assert beside.makespan_s < after.makespan_s
    done = beside.timeline.collectives
    assert (done.end - done.start).min() >= plan.stages[0].tied_exchange_s


def test_a_stage_whose_last_backward_ends_late_keeps_its_replicas_waiting():
    """Three microbatches on two replicas: the second replica is done first, and waits."""
    options = {"schedule": "1f1b", "microbatches": 3, "engine": Engine(bucket_bytes=2)}
    found = execute(plan_of([2], [1.0], [4.0], weights=[8], **options))
    # replica 0: F B F B to 10, its last backward from 6; buckets of it from 7; 8 s of exchange
    assert found.makespan_s == pytest.approx(max(7 + 8, 10 + 2))


@pytest.mark.slow
@examples(60)
@given(problems(FLAT), st.data())
def test_less_of_what_messages_take_is_never_slower(given, data):
    """Straight pipelines of one replica each, on links that no two messages share."""
    assume(given.microbatches is not None and not given.waits)
    drawn = data.draw(contiguous(given))
    alone = [replace(stage, ranks=stage.ranks[:1]) for stage in drawn.stages]
    plan = priced(given, replace(drawn, stages=alone))
    plan = structs.replace(plan, topology=with_level(plan.topology, bus=False, links=64))
    slow = with_level(plan.topology, overhead_s=0.5, copy_bytes_per_s=4.0)
    fast = with_level(plan.topology, overhead_s=0.25, copy_bytes_per_s=8.0)
    none = with_level(plan.topology, overhead_s=0.0, copy_bytes_per_s=msgspec.UNSET)
    taken = [execute(under(plan, topology=on)).makespan_s for on in (none, fast, slow)]
    assert taken == sorted(taken)


def test_an_exchange_may_be_over_before_a_device_that_sends_comes_to_it():
    """Serial transfers of 40 s keep the last stage's replicas from their step, not from exchanging
    8 bytes beside the backward.
    """
    engine = structs.replace(WAITING, bucket_bytes=2)
    options = {"schedule": "1f1b", "microbatches": 2, "engine": engine}
    plan = plan_of([1, 2], [1.0, 1.0], [2.0, 8.0], cuts=[40], weights=[0, 8], **options)
    found = execute(plan)
    assert found.timeline.collectives.end[0] < found.timeline.start[found.order.kind == A].max()


def test_levels_that_reduce_in_turn_hold_each_other_up():
    """Four replicas, two on each of two servers, 8 bytes: 2 * 1/2 * 8/4 s inside, 2 * 1/2 * 8/1 s
    across.
    """
    inside, across = flat(2, 4.0).levels[0], flat(2, 1.0).levels[0]
    levels = [structs.replace(inside, name="inside"), structs.replace(across, name="across")]
    on = structs.replace(flat(4), devices=0, levels=levels, allreduce="hierarchical")
    plan = plan_of([4], [1.0], [2.0], weights=[8], topology=on, schedule="1f1b", microbatches=4)
    assert execute(plan).makespan_s == pytest.approx(1 + 2 + 2 + 8)
