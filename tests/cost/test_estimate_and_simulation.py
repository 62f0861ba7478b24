"""What the formulas say of a plan is never more than the simulator finds, whatever the warm-up."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.pricing import under
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem, consecutive
from partopt.documents.plan import Plan
from partopt.documents.topology import Device, Topology
from partopt.errors import PartoptError
from partopt.planners.pipedream import on_members
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.placement import CHUNKS, STRAIGHT, ranks_of
from partopt.simulator import execute
from tests.examples import examples
from tests.planners.problems import (
    chain,
    clusters,
    priced,
    problem,
    stashed,
    topology,
    trained,
)

NEAR = 1e-9
LAYERS = 7  # at most
FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
FLAT = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]
FOLDED = [name for name in SCHEDULES if name not in FLAT]


CLUSTERS = clusters(devices=8)
NESTING = CLUSTERS.filter(lambda on: sum(level.size > 1 for level in on.levels) > 1)


@st.composite
def problems(
    draw: st.DrawFn,
    names: list[str],
    on: st.SearchStrategy[Topology] = CLUSTERS,
    layers: int = 1,
    microbatches: int | None = None,
) -> Problem:
    """Problems of `layers` layers or more under one of the schedules `names`, and where it needs a
    number of them so many microbatches.
    """
    name, cluster = draw(st.sampled_from(names)), draw(on)
    model = draw(stashed(LAYERS, layers))
    asynchronous = SCHEDULES[name].asynchronous
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    M = None if asynchronous else microbatches or draw(st.integers(1, 12))
    step, sixteen_bit = draw(st.sampled_from([0.0, 3.0])), draw(st.booleans())
    facts = {
        "messages": draw(st.sampled_from(["packed", "split"])),
        "bucket_bytes": draw(st.sampled_from([1, 7, 10**9])),
    }
    return problem(
        replace(model, optimizer_s=step, sixteen_bit=sixteen_bit),
        cluster,
        schedule=name,
        microbatches=M,
        **draw(trained(M, **facts)),
        memory_bytes=draw(st.sampled_from([None, 100, 300])),
        recompute=recompute,
    )


@st.composite
def contiguous(draw: st.DrawFn, given: Problem) -> Partition:
    """Stages on consecutive ranks of which some may stay idle."""
    N, P, uneven = given.chain.layers, given.topology.devices, SCHEDULES[given.schedule].uneven
    S = draw(st.integers(1, min(N, P)))
    cuts = sorted(draw(st.permutations(range(1, N)))[: S - 1])
    equal = draw(st.integers(1, P // S))
    first, stages = 0, []
    for s, (start, stop) in enumerate(zip([0, *cuts], [*cuts, N], strict=True)):
        left = P - first - (S - s)
        first += draw(st.integers(0, left if uneven else 0)) if draw(st.booleans()) else 0
        left = P - first - (S - s)
        r = 1 + draw(st.integers(0, left)) if uneven else equal
        mode = draw(st.booleans()) if given.recompute_per_stage else None
        stages.append(Assignment(start, stop, range(first, first + r), mode))
        first += r
    return Partition(CONTIGUOUS, stages)


@st.composite
def nested(draw: st.DrawFn, given: Problem) -> Partition:
    """Pipelines inside the members of levels, copied on some of them."""
    sizes = [level.size for level in given.topology.levels if level.size > 1]

    def pipeline(k: int, i: int, j: int) -> list[Assignment]:
        if k < 0:
            return [Assignment(i, j, [0])]
        stages, first, start = [], 0, i
        while start < j:
            left = sizes[k] - first
            stop = j if left == 1 else draw(st.integers(start + 1, j))
            copies = draw(st.integers(1, left if stop == j else left - 1))
            inside, members = pipeline(k - 1, start, stop), range(first, first + copies)
            stages += on_members(inside, members, math.prod(sizes[:k]))
            first, start = first + copies, stop
        return stages

    return Partition(NESTED, pipeline(len(sizes) - 1, 0, given.chain.layers))


def estimated_s(plan: Plan) -> float:
    """Seconds of an iteration or, asynchronous, of a microbatch."""
    estimate = plan.predicted.estimate
    return estimate.period_s if estimate.iteration_s is None else estimate.iteration_s


def check(partition: Partition, given: Problem, warmups: list[int] | None) -> None:
    """The simulated plan, at these warm-ups, takes no less than the formulas say."""
    plan = priced(given, partition)
    try:
        if warmups is not None and SCHEDULES[given.schedule].takes_warmup:
            most = given.microbatches
            own = [
                w if most is None else min(w, -(-most // stage.replicas) - 1)
                for w, stage in zip(warmups, plan.stages, strict=False)
            ]
            plan = under(plan, warmups=[max(0, w) for w in own])
        run = execute(plan)
    except PartoptError:  # it deadlocks
        assume(False)
    limit = given.memory_bytes
    assume(limit is None or (plan.fits and run.peak_memory_bytes.max() <= limit))
    seconds = run.period_s if given.microbatches is None else run.makespan_s
    settled = run.steady is None or run.steady.settled
    slack = NEAR if settled else 2e-2
    assert estimated_s(plan) <= seconds * (1 + slack)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT)
@examples(40, suppress_health_check=FILTERED)
@given(st.data())
def test_no_contiguous_plan_is_simulated_to_less_than_its_estimate(name, data):
    given = data.draw(problems([name]))
    partition = data.draw(contiguous(given))
    deep = st.lists(st.integers(0, 9), min_size=8, max_size=8)
    check(partition, given, data.draw(st.none() | deep))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLAT if SCHEDULES[name].uneven])
@examples(30, suppress_health_check=FILTERED)
@given(st.data())
def test_no_nested_plan_is_simulated_to_less_than_its_estimate(name, data):
    given = data.draw(problems([name], NESTING))
    check(data.draw(nested(given)), given, None)


@cache
def folded_sizes(name: str, devices: int) -> list[tuple[int, int, int, int]]:
    """P, v, M and d under which the schedule `name` has a stage for each of some layers."""
    shape = SCHEDULES[name].shape
    chunks = [CHUNKS[shape]] if shape in CHUNKS else [2, 3]
    return [
        (P, v, M, d)
        for P, v, M in product(range(1, devices + 1), chunks, range(1, 13))
        for d in range(1, devices // P + 1)
        if len(ranks_of(shape, P, v)) <= LAYERS and M % d == 0 and not refusal(name, P, v, M // d)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDED)
@examples(20, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_with_several_stages_on_a_device_is_simulated_to_less_than_its_estimate(name, data):
    entry, on = SCHEDULES[name], data.draw(CLUSTERS)
    sizes = folded_sizes(name, on.devices)
    assume(sizes)
    P, v, M, d = data.draw(st.sampled_from(sizes))
    ranks = ranks_of(entry.shape, P, v, d)
    given = data.draw(problems([name], st.just(on), len(ranks), M))
    cuts = sorted(data.draw(st.permutations(range(1, given.chain.layers)))[: len(ranks) - 1])
    stages = [
        Assignment(start, stop, own)
        for start, stop, own in zip([0, *cuts], [*cuts, given.chain.layers], ranks, strict=True)
    ]
    alike = given.with_(recompute="never") if given.recompute_per_stage else given
    check(Partition(entry.shape, stages), alike.with_(chunks=v), None)


def estimate_and_simulation(given: Problem, replicas: list[int]) -> tuple[float, float]:
    """What the formulas and the simulator say of a layer a stage with so many replicas."""
    partition = Partition(CONTIGUOUS, consecutive(range(len(replicas) + 1), replicas))
    run = execute(priced(given, partition))
    seconds = run.period_s if given.microbatches is None else run.makespan_s
    return estimated_s(priced(given, partition)), seconds


def test_a_stage_that_lies_unevenly_over_servers_shares_its_messages_as_its_replicas_lie():
    """3-4-1 on two servers of four: of the second stage rank 3 alone is in the first server, and
    one in four of its messages of 40 bytes to rank 7 leaves it, at 10 bytes/s; 2 s a microbatch if
    each server had half of them. The devices compute for 0.5 s.
    """
    model = chain([1, 1, 0], [0.5, 1, 0.5], [0, 40], [0, 0, 0])
    given = problem(model, topology((4, 1e6), (2, 10.0)))
    estimated, simulated = estimate_and_simulation(given, [3, 4, 1])
    assert estimated == 40 / 4 / 10
    assert estimated <= simulated < 2


def test_the_messages_to_the_fuller_server_of_a_stage_pass_one_port():
    """The same plan with 40 bytes before the second stage: three in four of them come to the ranks
    4 to 6 from outside.
    """
    model = chain([1, 1, 0], [0.5, 1, 0.5], [40, 0], [0, 0, 0])
    given = problem(model, topology((4, 1e6), (2, 10.0)))
    estimated, simulated = estimate_and_simulation(given, [3, 4, 1])
    assert estimated == 3 * 40 / 4 / 10
    assert estimated <= simulated


def test_an_all_reduce_may_end_while_earlier_stages_drain():
    """2-2, M = 4, 1 s forward and 2 s backward each. The second stage begins after 1 s, computes
    for 2 * 3 s and exchanges 3 bytes at 1 byte/s; meanwhile the first has its last backward, from 6
    s to 8 s. One after the other these would be 3 + 6 + 3 s.
    """
    model = chain([1, 1], [2, 2], [0], [0, 3])
    given = problem(model, topology((4, 1.0)), schedule="1f1b", microbatches=4)
    assert estimate_and_simulation(given, [2, 2]) == (1 + 2 * 3 + 3, 10)


def test_several_links_carry_several_messages():
    """2-1, 8 bytes over two links of 1 byte/s: rank 2 receives two messages at once, in 8 s."""
    given = problem(chain([2, 1], [0, 0], [8], [0, 0]), topology((3, 1.0), links=2))
    estimated, simulated = estimate_and_simulation(given, [2, 1])
    assert estimated == 8 / 2
    assert estimated <= simulated < 8


def test_messages_between_stages_of_one_server_leave_an_outer_bus_alone():
    """3-1 on two servers of two: rank 2 and the last device share a server, so two of three
    messages of 9 s pass the bus, each way: 12 s, not 18.
    """
    inner, outer = topology((2, 1e9), (2, 1.0)).levels
    cluster = Topology(
        name="test", device=Device(name="device"), levels=[inner, structs.replace(outer, bus=True)]
    )
    given = problem(chain([3, 1], [0, 0], [9], [0, 0]), cluster)
    estimated, simulated = estimate_and_simulation(given, [3, 1])
    assert estimated == pytest.approx(2 / 3 * 2 * 9)
    assert estimated <= simulated * (1 + NEAR) < 18
