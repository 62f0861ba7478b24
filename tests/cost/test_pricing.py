"""The numbers of a plan, and that they are the same however it came about."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from msgspec import structs

from partopt import planners
from partopt.cost.pricing import price, under
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, consecutive, problem_of
from partopt.cost.ranges import Group
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.placement import CHUNKS, MIRRORED, STRAIGHT, ranks_of
from partopt.simulator import execute
from partopt.simulator.memory import peak_memory_bytes
from tests.examples import examples
from tests.helpers import flat, measurement, profile_of
from tests.planners.problems import (
    chain,
    clusters,
    priced,
    problem,
    stashed,
    topology,
    trained,
)
from tests.simulator.plans import chunked, plan_of

STRAIGHTS = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]
CHUNKED = [name for name, entry in SCHEDULES.items() if entry.shape != STRAIGHT]
MODES = ["never", "always"]
ASYNCHRONOUS = {name for name, entry in SCHEDULES.items() if entry.asynchronous}


def made(name, replicas, recompute):
    costs = {"cuts": [3] * (len(replicas) - 1), "weights": [5 + s for s in range(len(replicas))]}
    M = None if name in ASYNCHRONOUS else 12
    return plan_of(replicas, schedule=name, microbatches=M, recompute=MODES[recompute], **costs)


def test_gradients_that_are_as_large_as_what_was_sent_are_not_said_twice():
    """Behind layer 1 go 8 bytes of numbers, and behind layer 2 also 4 of indices."""
    tensors = [(0, [1], 8), (1, [2], 8)]
    plain = measurement([1.0] * 3, output_bytes=[8] * 3, tensors=tensors)
    [send] = structs.replace(plain, tensors=plain.tensors[1:]).tensors
    mixed = structs.replace(
        plain,
        tensors=[*plain.tensors, structs.replace(send, bytes=4, gradient=False)],
    )
    for measured, found in ((plain, [None, None, None]), (mixed, [None, None, 8])):
        stated = problem_of(profile_of([measured]), flat(3), cuts=(1, 2), replicas=(1, 1, 1))
        plan = planners.plan("manual", stated)
        assert [stage.back_bytes for stage in plan.stages] == found
        assert [stage.gradient_bytes for stage in plan.stages] == [0, 8, 8]


@pytest.mark.slow
@examples(150)
@given(
    st.sampled_from(STRAIGHTS),
    st.sampled_from(STRAIGHTS),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_plan_under_another_schedule_holds_and_costs_what_one_made_for_that_schedule_does(
    before, after, replicas, recompute
):
    if not (SCHEDULES[before].uneven and SCHEDULES[after].uneven):
        replicas = replicas[:1] * len(replicas)
    found = under(made(before, replicas, recompute), after, 12)
    made_for_it = made(after, replicas, recompute)
    assert found.stages == made_for_it.stages
    assert (found.schedule, found.microbatches, found.noam) == (
        made_for_it.schedule,
        made_for_it.microbatches,
        made_for_it.noam,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@examples(25, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_a_plan_under_its_own_conditions_is_the_plan_that_was_priced(name, data):
    entry, model = SCHEDULES[name], data.draw(stashed(8))
    v = CHUNKS.get(entry.shape, 2)
    M = None if entry.asynchronous else data.draw(st.integers(4, 12))
    d, on = data.draw(st.integers(1, 2)), data.draw(clusters(devices=8))
    most = on.devices // d * (v if entry.shape in ("looped", "vee") else 1)
    sizes = range(v, min(model.layers, most) + 1, v)
    assume(sizes and (M or 0) % d == 0)
    S = data.draw(st.sampled_from(sizes))
    P = S // v if entry.shape in ("looped", "vee") else S
    assume(entry.shape == STRAIGHT or refusal(name, P, v, (M or 0) // d) is None)
    cuts = sorted(data.draw(st.permutations(range(1, model.layers)))[: S - 1])
    ranks = ranks_of(entry.shape, P, v, d)
    stages = list(map(Assignment, [0, *cuts], [*cuts, model.layers], ranks))
    given = problem(
        replace(model, optimizer_s=3.0),
        on,
        schedule=name,
        microbatches=M,
        **data.draw(trained(M)),
        recompute=data.draw(st.sampled_from(MODES)),
    )
    family = CONTIGUOUS if entry.shape == STRAIGHT else entry.shape
    plan = priced(given, Partition(family, stages))
    assert under(plan, name, M, plan.topology) == plan
    other = structs.replace(plan.topology, allreduce="tree")
    assert under(under(plan, topology=other), topology=plan.topology) == plan


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_stages_of_a_rank_together_need_what_it_holds_at_its_fullest(name, P, d, recompute):
    """With recomputation inputs are kept and a stash is made again. The stages of a mirrored pair
    are on two ranks, which are not fullest at once.
    """
    shape = SCHEDULES[name].shape
    for v in [CHUNKS[shape]] if shape in CHUNKS else [1, 2, 3]:
        tried = [M for M in range(1, 17) if refusal(name, P, v, M) is None]
        assert tried
        for M in tried:
            S = len(ranks_of(shape, P, v, d))
            cuts = [1 + s % 2 for s in range(S - 1)]
            plan = chunked(name, P, v, M * d, d, cuts=cuts, recompute=recompute)
            order = execute(plan).order
            held = [
                sum(plan.stages[s].memory.total_bytes for s in stages)
                for _, stages in sorted(plan.stages_by_rank().items())
            ]
            peaks = peak_memory_bytes(order, plan).tolist()
            assert held == peaks or shape == MIRRORED, (v, M)
            assert all(map(int.__ge__, held, peaks))


def test_another_topology_changes_the_all_reduces_and_nothing_else():
    plan = made("1f1b", [2, 1], False)
    slower = under(plan, topology=flat(3, 0.5))
    assert [stage.allreduce_s for stage in slower.stages] == [
        2 * stage.allreduce_s for stage in plan.stages
    ]
    assert [stage.memory for stage in slower.stages] == [stage.memory for stage in plan.stages]


def test_a_synchronous_schedule_needs_a_number_of_microbatches():
    with pytest.raises(PartoptError, match="needs a number of microbatches"):
        under(made("pipedream", [1, 1], False), "1f1b")


def test_a_deeper_warm_up_holds_as_many_more():
    plan = under(made("pipedream", [1, 1], False), warmups=[5, 0])
    assert [(stage.warmup, stage.in_flight, stage.weight_versions) for stage in plan.stages] == [
        (5, 6, 6),
        (0, 1, 1),
    ]
    assert execute(plan).peak_in_flight.tolist() == [6, 1]


def test_a_plan_says_what_the_formulas_say():
    """Layers of 6, 3 and 3 s on a 2-1 split of three devices: 9 / 2 against 3; 12 s on one
    device.
    """
    profile = profile_of(
        [measurement([2.0, 1.0, 1.0], [4.0, 2.0, 2.0], output_bytes=[8, 8, 0], microbatch_size=4)],
        parameter_bytes=[4, 4, 8],
    )
    given = problem_of(profile, topology((3, 1e6)))
    plan = price(Partition(CONTIGUOUS, consecutive([0, 2, 3], [2, 1])), given, "manual")
    assert (plan.shape, plan.noam, plan.idle_ranks) == ("2-1", 2, [])
    assert plan.predicted.period_s == 9 / 2
    assert plan.predicted.samples_per_s == 4 / 4.5
    assert plan.predicted.speedup_over_one_device == 12 / 4.5
    assert plan.predicted.bubble == pytest.approx(1 - 12 / (3 * 4.5))
    assert plan.predicted.bound_by == "compute of stage 0"
    assert [
        (flow.kind, flow.source, flow.destination, flow.stage, flow.bytes, flow.per)
        for flow in plan.communication
    ] == [
        ("allreduce", None, None, 0, 8, "round"),
        ("send", 0, 1, None, 8, "microbatch"),
        ("send", 1, 0, None, 8, "microbatch"),
    ]


@pytest.mark.parametrize(("shard", "shares"), [("none", 1), ("optimizer", 2), ("gradients", 2)])
def test_the_step_of_a_stage_is_that_of_its_trained_bytes_and_of_its_share(shard, shares):
    """8 s for 12 and 4 bytes, on two replicas each."""
    model = replace(chain([1] * 2, [2] * 2, [0], [12, 4]), optimizer_s=8.0)
    given = problem(model, topology((4, 1e9)), schedule="1f1b", microbatches=4, shard=shard)
    plan = priced(given, Partition(CONTIGUOUS, consecutive(range(3), [2, 2])))
    assert [stage.optimizer_s for stage in plan.stages] == [6 / shares, 2 / shares]


def tied(*members: int):
    """Three layers that compute for 3 s, of which some share 60 bytes."""
    return chain([1] * 3, [2] * 3, [0] * 2, [0] * 3, (Group(members, 60.0),))


def exchanges(given, bounds, replicas=None) -> list[float]:
    """Seconds in which each stage exchanges tied gradients."""
    plan = priced(given, Partition(CONTIGUOUS, consecutive(bounds, replicas)))
    return [stage.tied_exchange_s for stage in plan.stages]


def test_stages_that_part_tied_layers_exchange_their_gradients():
    """Two holders of 60 bytes at 10 bytes/s. Of three layers in two stages the first sees one
    elsewhere, the second two that may lie in two stages.
    """
    assert exchanges(problem(tied(0, 2), topology((3, 10.0))), [0, 1, 3], [1, 2]) == [6, 6]
    assert exchanges(problem(tied(0, 1, 2), topology((3, 10.0))), [0, 2, 3]) == [6, 2 * 2 / 3 * 6]


@pytest.mark.parametrize("bounds", [[0, 3], [0, 2, 3]])
def test_a_stage_with_all_of_the_tied_layers_exchanges_nothing(bounds):
    assert {*exchanges(problem(tied(0, 1), topology((3, 10.0))), bounds)} == {0}


def test_devices_that_hold_both_ends_of_the_model_exchange_nothing():
    """In a V the first and the last stage are on one device; in a loop they are not."""
    model = chain([1] * 4, [2] * 4, [0] * 3, [0] * 4, (Group((0, 3), 60.0),))
    for name, ranks, seconds in (
        ("zbv", [0, 1, 1, 0], 0),
        ("interleaved", [0, 1, 0, 1], 6),
    ):
        stages = [Assignment(s, s + 1, [rank]) for s, rank in enumerate(ranks)]
        given = problem(model, topology((2, 10.0)), schedule=name, microbatches=4)
        plan = priced(given, Partition(SCHEDULES[name].shape, stages))
        assert plan.stages[0].tied_exchange_s == seconds


def test_a_flow_names_the_outermost_level_that_it_crosses():
    """Servers of 4: ranks 0-1 and 2-5 and 6-7. The second stage's gradients and both cuts' messages
    cross servers, the others' gradients stay inside.
    """
    profile = profile_of(
        [measurement([2.0, 4.0, 2.0], output_bytes=[8, 8, 0])], parameter_bytes=[4, 4, 4]
    )
    given = problem_of(profile, topology((4, 1e9), (2, 1e6)))
    plan = price(Partition(CONTIGUOUS, consecutive([0, 1, 2, 3], [2, 4, 2])), given, "manual")
    found = [
        (flow.kind, flow.stage if flow.kind == "allreduce" else flow.source, flow.level)
        for flow in plan.communication
    ]
    assert found == [
        ("allreduce", 0, "level1"),
        ("send", 0, "level2"),
        ("send", 1, "level2"),
        ("allreduce", 1, "level2"),
        ("send", 1, "level2"),
        ("send", 2, "level2"),
        ("allreduce", 2, "level1"),
    ]


def test_a_message_inside_a_server_names_its_level():
    profile = profile_of([measurement([2.0, 4.0], output_bytes=[8, 0])])
    given = problem_of(profile, topology((2, 1e9), (2, 1e6)))
    plan = price(Partition(CONTIGUOUS, consecutive([0, 1, 2])), given, "manual")
    assert [flow.level for flow in plan.communication] == ["level1", "level1"]


def test_more_actions_than_can_be_simulated_are_refused_before_they_are_counted():
    with pytest.raises(PartoptError, match=r"10000001 microbatches are more than 20,000,000"):
        chunked("interleaved", 1, 1, 10_000_001)


@pytest.mark.parametrize(("size", "held"), [(1, 10), (2, 13), (3, 17), (4, 20)])
def test_bytes_between_measured_sizes_are_the_nearest_whole_ones(size, held):
    """10 bytes of one sample, 20 of four."""
    measured = [
        measurement(
            [float(b)] * 2, None, [held, 0], b, [(0, [1], held)], [([0], held), ([1], held)]
        )
        for b, held in ((1, 10), (4, 20))
    ]
    given = problem_of(profile_of(measured), flat(2), size, cuts=[1], replicas=[1, 1])
    first, second = planners.plan("manual", given).stages
    assert first.output_bytes == second.input_bytes == held
    assert first.stash_bytes == second.stash_bytes == held
