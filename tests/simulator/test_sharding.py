"""What replicas that hold a share of parameters, gradients or state exchange, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from partopt.cost.plan import under
from partopt.documents.plan import Plan
from partopt.simulator import execute
from tests.helpers import flat
from tests.simulator.plans import plan_of

# A stage of F = 1 and B = 2 s on two replicas that exchange 100 bytes at 10 bytes/s: an all-reduce
# takes 10 s, a gather or a scatter 5 s. Two microbatches are one for each replica.


def replicated(shard: str, sixteen_bit: bool = False, **options: Any) -> Plan:
    """The stage; of 16-bit parameters its gradients are kept and exchanged in 32 bits."""
    plan = plan_of(
        [2],
        [1.0],
        [2.0],
        weights=[100],
        topology=flat(2, 10.0),
        **{"schedule": "1f1b", "microbatches": 2} | options,
    )
    profile = structs.replace(plan.profile, dtype="bfloat16" if sixteen_bit else "float32")
    return under(plan.with_engine(gradients="float32").with_layout(shard=shard), profile=profile)


@pytest.mark.parametrize(
    "shard, expected",
    [
        ("none", 1 + 2 + 10),
        ("optimizer", 1 + 2 + 5 + 5),
        ("gradients", 1 + 5 + 5),  # the backward lasts as long as the scatter beside it
        ("parameters", 5 + (5 + 5)),  # nothing is left for the end
    ],
)
def test_an_iteration_of_one_microbatch_a_replica(shard, expected):
    assert execute(replicated(shard)).makespan_s == pytest.approx(expected)


@pytest.mark.parametrize(
    "shard, expected",
    [
        ("none", 1 + 2 + 20),
        ("optimizer", 1 + 2 + 10 + 5),  # gradients of 32 bits are scattered, parameters gathered
        ("gradients", 1 + 10 + 5),
        ("parameters", 5 + (5 + 10)),
    ],
)
def test_gradients_of_twice_the_bytes_take_twice_as_long(shard, expected):
    assert execute(replicated(shard, sixteen_bit=True)).makespan_s == pytest.approx(expected)


def test_every_backward_scatters_and_the_last_exchange_comes_once():
    """Three microbatches a replica: F and B of 1 and 5 s, then the parameters are gathered."""
    assert execute(replicated("gradients", microbatches=6)).makespan_s == 3 * (1 + 5) + 5
    assert execute(replicated("parameters", microbatches=6)).makespan_s == 3 * (5 + 10)


def test_a_round_of_an_asynchronous_schedule_is_one_microbatch_of_each_replica():
    """Compute 3 s, exchange 10 s beside it: the exchange binds, 5 s a microbatch. With parameters
    in shares F and B take 5 s each, and the scatter of 5 s goes beside them.
    """
    asynchronous: dict[str, Any] = {"schedule": "pipedream", "microbatches": None}
    for shard in ("none", "optimizer", "gradients"):
        run = execute(replicated(shard, **asynchronous))
        assert run.period_s == pytest.approx(5.0), shard
    assert execute(replicated("parameters", **asynchronous)).period_s == pytest.approx(5.0)


def test_backwards_in_two_parts_gather_for_the_first_and_scatter_in_the_second():
    plan = plan_of(
        [2],
        [1.0],
        [2.0],
        weights=[100],
        topology=flat(2, 10.0),
        schedule="zb-h1",
        microbatches=2,
    )
    shared = under(plan.with_layout(shard="parameters"))
    assert execute(shared).makespan_s == pytest.approx(5 + 5 + 5)


def test_one_replica_exchanges_nothing():
    plan = plan_of([1], [1.0], [2.0], weights=[100], schedule="1f1b", microbatches=2)
    shared = under(plan.with_layout(shard="parameters"))
    assert execute(shared).makespan_s == execute(plan).makespan_s == 2 * 3


def test_the_flows_of_a_plan_say_what_is_exchanged():
    def flows(shard: str) -> list[tuple[str, int, str]]:
        options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "shard": shard}
        plan = plan_of([2], weights=[100], topology=flat(2, 10.0), **options)
        return [(flow.kind, flow.bytes, flow.per) for flow in plan.communication]

    assert flows("none") == [("allreduce", 100, "iteration")]
    assert flows("optimizer") == [
        ("reducescatter", 100, "iteration"),
        ("allgather", 100, "iteration"),
    ]
    assert flows("gradients") == [
        ("reducescatter", 100, "microbatch"),
        ("allgather", 100, "iteration"),
    ]
    assert flows("parameters") == [
        ("reducescatter", 100, "microbatch"),
        ("allgather", 200, "microbatch"),
    ]


def test_half_an_all_reduce_has_half_its_latency():
    """Two steps of 3 s each: the scatter beside the backward and the gather behind it have one."""
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "weights": [100]}
    slow = plan_of([2], [1.0], [2.0], topology=flat(2, 10.0, latency=3.0), **options)
    assert execute(slow).makespan_s == pytest.approx(1 + 2 + 10 + 6)
    shared = under(slow.with_layout(shard="gradients"))
    assert execute(shared).makespan_s == pytest.approx(1 + (5 + 3) + (5 + 3))
