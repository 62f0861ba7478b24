"""What replicas that hold a share of parameters, gradients or state exchange, worked by hand."""

import pytest
from msgspec import structs

from partopt.cost.collectives import TREE, allreduce_over
from partopt.cost.pricing import under
from partopt.cost.sharding import half_s
from partopt.simulator import execute
from tests.helpers import flat
from tests.simulator.plans import plan_of

# A stage of F = 1 and B = 2 s on two replicas that exchange 100 bytes at 10 bytes/s: an all-reduce
# takes 10 s, a gather or a scatter 5 s. Two microbatches are one for each replica.


def replicated(shard, sixteen_bit=False, **options):
    """The stage; of 16-bit parameters its gradients are kept and exchanged in 32 bits."""
    options = {"schedule": "1f1b", "microbatches": 2, "topology": flat(2, 10.0)} | options
    plan = plan_of([2], [1.0], [2.0], weights=[100], **options)
    profile = structs.replace(plan.profile, dtype="bfloat16" if sixteen_bit else "float32")
    return under(plan.with_engine(gradients="float32").with_layout(shard=shard), profile=profile)


@pytest.mark.parametrize(
    "shard, expected, of_sixteen_bit",
    [
        ("none", 1 + 2 + 10, 1 + 2 + 20),
        # gradients of 32 bits are scattered, parameters gathered
        ("optimizer", 1 + 2 + 5 + 5, 1 + 2 + 10 + 5),
        # the backward lasts as long as the scatter beside it
        ("gradients", 1 + 5 + 5, 1 + 10 + 5),
        # nothing is left for the end
        ("parameters", 5 + (5 + 5), 5 + (5 + 10)),
    ],
)
def test_an_iteration_of_one_microbatch_a_replica(shard, expected, of_sixteen_bit):
    assert execute(replicated(shard)).makespan_s == pytest.approx(expected)
    assert execute(replicated(shard, sixteen_bit=True)).makespan_s == pytest.approx(of_sixteen_bit)


def test_every_backward_scatters_and_the_last_exchange_comes_once():
    """Three microbatches a replica: F and B of 1 and 5 s, then the parameters are gathered."""
    assert execute(replicated("gradients", microbatches=6)).makespan_s == 3 * (1 + 5) + 5
    assert execute(replicated("parameters", microbatches=6)).makespan_s == 3 * (5 + 10)


def test_gradients_that_are_reduced_once_are_whole_until_then():
    """Behind the last backward: 3 (1 + 2) s, then 5 to scatter and 5 to gather."""
    own = replicated("gradients", microbatches=6)
    blocking = under(own.with_engine(allreduce="blocking"))
    assert execute(blocking).makespan_s == 3 * (1 + 2) + 5 + 5
    whole, part = (each.stages[0].memory.gradients_bytes for each in (blocking, own))
    assert whole == 2 * part == 100


def test_gathers_take_no_trees():
    """Of eight ranks 7/8 of the bytes pass each, also where an all-reduce would be a tree."""
    cluster = flat(8, 10.0, 1e8)
    assert allreduce_over(range(8), cluster).algorithm == TREE
    for named in ("fastest", "tree", "ring"):
        own = structs.replace(cluster, allreduce=named)
        assert half_s(100.0, range(8), own) == pytest.approx(100 * 7 / 8 / 10 + 7 * 1e8)


def test_parameters_gathered_in_fewer_bytes_take_less():
    """One byte of four: 5/4 s, more than F of 1 s, and beside the scatter's 5 s."""
    own = replicated("parameters").with_engine(gathered_bytes=1.0)
    assert execute(under(own)).makespan_s == pytest.approx(5 / 4 + (5 / 4 + 5))


def test_a_round_of_an_asynchronous_schedule_is_one_microbatch_of_each_replica():
    """Compute 3 s, exchange 10 s beside it: the exchange binds, 5 s a microbatch. With parameters
    in shares F and B take 5 s each, and the scatter of 5 s goes beside them.
    """
    for shard in ("none", "optimizer", "gradients", "parameters"):
        run = execute(replicated(shard, schedule="pipedream", microbatches=None))
        assert run.period_s == pytest.approx(5.0), shard


def test_backwards_in_two_parts_gather_for_the_first_and_scatter_in_the_second():
    shared = replicated("parameters", schedule="zb-h1")
    assert execute(shared).makespan_s == pytest.approx(5 + 5 + 5)
    one = plan_of([1], [1.0], [2.0], weights=[100], schedule="1f1b", microbatches=2)
    # one replica exchanges nothing
    assert execute(under(one.with_layout(shard="parameters"))).makespan_s == 2 * 3


def test_the_flows_of_a_plan_say_what_is_exchanged():
    scatter, gather = ("reducescatter", 100, "iteration"), ("allgather", 100, "iteration")
    each = "reducescatter", 100, "microbatch"
    for shard, expected in {
        "none": [("allreduce", 100, "iteration")],
        "optimizer": [scatter, gather],
        "gradients": [each, gather],
        "parameters": [each, ("allgather", 200, "microbatch")],
    }.items():
        options = {"schedule": "1f1b", "microbatches": 2, "shard": shard}
        plan = plan_of([2], weights=[100], topology=flat(2, 10.0), **options)
        assert [(flow.kind, flow.bytes, flow.per) for flow in plan.communication] == expected


def test_half_an_all_reduce_has_half_its_latency():
    """Two steps of 3 s each: the scatter beside the backward and the gather behind it have one."""
    slow = {"topology": flat(2, 10.0, latency=3.0)}
    assert execute(replicated("none", **slow)).makespan_s == pytest.approx(1 + 2 + 10 + 6)
    found = execute(replicated("gradients", **slow)).makespan_s
    assert found == pytest.approx(1 + (5 + 3) + (5 + 3))
