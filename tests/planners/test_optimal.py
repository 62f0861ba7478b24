"""The dynamic programs beside every plan of their own spaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partopt.cost.problem import FREE, NONE, Known, Problem
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Places, Shape, layouts_of
from partopt.simulator import execute
from tests.examples import examples
from tests.helpers import WAITING, flat, measurement, profile_of
from tests.planners.problems import (
    chain,
    clusters,
    priced,
    problem,
    stashed,
    topology,
    trained,
)

SCHEDULES = ["pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1"]
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@st.composite
def problems(draw: st.DrawFn, layers: int = 5, devices: int = 4) -> Problem:
    """Small problems of every schedule, with everything that costs depend on."""
    name = draw(st.sampled_from(SCHEDULES))
    M = None if name.startswith("pipedream") else draw(st.integers(4, 8))
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    return problem(
        replace(draw(stashed(layers)), optimizer_s=draw(st.sampled_from([0.0, 3.0]))),
        draw(clusters(devices=devices)),
        schedule=name,
        microbatches=M,
        **draw(trained(M)),
        memory_bytes=draw(st.sampled_from([None, 100, 300])),
        recompute=recompute,
        replication=draw(st.sampled_from([FREE, FREE, "uniform", NONE])),
    )


def shapes(costs: StageCosts, places: Places) -> Iterator[Shape]:
    """Every plan on a layout whose stages stand on places of one width."""
    N, U = costs.N, len(places)
    chosen = (False, True) if len(costs.modes) > 1 else (None,)
    for S in range(1, min(N, U) + 1):
        for counts in product(range(1, U + 1), repeat=S):
            if sum(counts) > U:
                continue
            one_each = set(counts) == {1} and all(len(place) == 1 for place in places)
            if costs.problem.request.replication == NONE and not one_each:
                continue
            for idle in product(range(U - sum(counts) + 1), repeat=S):
                if sum(idle) > U - sum(counts):
                    continue
                ends = list(accumulate(i + r for i, r in zip(idle, counts, strict=True)))
                spans = [(end - r, end) for end, r in zip(ends, counts, strict=True)]
                widths = [{len(place) for place in places[a:b]} for a, b in spans]
                if any(len(own) > 1 for own in widths):
                    continue
                replicas = {r * max(own) for r, own in zip(counts, widths, strict=True)}
                if costs.even and len(replicas) > 1:
                    continue
                for cuts in combinations(range(1, N), S - 1):
                    for modes in product(chosen, repeat=S):
                        yield Shape(places, (0, *cuts, N), counts, idle, modes)


def is_plain(given: Problem) -> bool:
    """Whether links alone pace messages and all-reduces, and no ties or short iterations."""
    engines = [
        level.message_s or level.copy_byte_s or level.allreduce is not msgspec.UNSET
        for level in given.topology.levels
    ]
    short = given.memory_bytes and given.microbatches
    return not (any(engines) or given.engine.waits or short or given.chain.tied)


def slowest_stage_s(costs: StageCosts, shape: Shape) -> float:
    """Infinite where a stage has less room than its place in the plan asks for."""
    tables = zip(costs.of_shape(shape), pairwise(shape.bounds), strict=True)
    return max(
        float(seconds[cut]) if room[cut] >= least else inf for (seconds, room, least), cut in tables
    )


@pytest.mark.slow
@examples(40, suppress_health_check=SLOW)
@given(problems())
def test_no_plan_of_a_layout_has_a_faster_slowest_stage(given):
    costs = StageCosts(given)
    for places in layouts_of(given.topology)[:3]:
        found = optimal.layout_plans(costs, places, 16)
        best = min((slowest_stage_s(costs, shape) for shape in found), default=inf)
        every = (slowest_stage_s(costs, shape) for shape in shapes(costs, places))
        least = min(every, default=inf)
        if costs.entry.split and given.memory_bytes:  # later stages have less room than the first
            assert best >= least * (1 - 1e-12)
        else:
            assert best == pytest.approx(least, rel=1e-12)


@pytest.mark.slow
@examples(150, suppress_health_check=SLOW)
@given(problems(), st.randoms())
def test_a_plan_costs_what_its_estimate_says_and_no_more_than_the_simulator(given, random):
    """Where links alone pace it no less than its estimate; asynchronous exactly that, with room."""
    costs = StageCosts(given)
    every = list(shapes(costs, random.choice(layouts_of(given.topology))))
    assume(every)
    shape = random.choice(every)
    plan = priced(given, shape.partition())
    found, estimate = max(costs.slowest_s(shape), costs.ports_s(shape)), plan.predicted.estimate
    held = max(stage.memory.total_bytes for stage in plan.stages)
    if found < inf and held <= (given.memory_bytes or inf):
        assert found <= execute(plan).period_s * (1 + 1e-9)
    if is_plain(given):
        assert found >= estimate.period_s * (1 - 1e-9)
        if not (given.microbatches or given.memory_bytes):
            assert found <= estimate.period_s * (1 + 1e-9)


@pytest.mark.slow
@examples(60, suppress_health_check=SLOW)
@given(problems(), st.sampled_from([60, 80, 100, 130, 170, 230]))
def test_plans_with_their_own_warm_up_fit(given, memory):
    """Under zb-h1 later stages have begun more backwards."""
    given = given.with_(memory_bytes=memory)
    split = given.with_(schedule="zb-h1", microbatches=given.microbatches or 6, recompute="auto")
    for stated in (given, split):
        costs = StageCosts(stated)
        for shape in [] if costs.entry.takes_warmup else optimal.plans(costs):
            assert priced(stated, shape.partition()).fits


@examples(60, suppress_health_check=SLOW)
@given(
    stashed(5, 5), st.sampled_from(["never", "auto"]), st.integers(1, 2), st.sampled_from([60, 120])
)
def test_the_fewest_stages_are_those_of_all_cuts(model, recompute, r, memory):
    given = problem(
        model,
        topology((10, 1.0)),
        schedule="zb-h1",
        microbatches=6,
        memory_bytes=memory,
        recompute=recompute,
        replication="uniform",
    )
    costs, places = StageCosts(given), tuple((rank,) for rank in range(10))
    for S in range(1, 6):
        modes = [costs.stage(places, 0, r, again, S) for again in costs.modes]
        tables = np.min(modes, axis=0)
        every = (
            (k, (0, *cuts, 5)) for k in range(1, 6) for cuts in combinations(range(1, 5), k - 1)
        )
        fits = [k for k, bounds in every if max(tables[cut] for cut in pairwise(bounds)) < inf]
        assert costs.fewest_stages(r, S) == min(fits, default=inf)


@pytest.mark.slow
@examples(60, suppress_health_check=SLOW)
@given(
    problems(), st.sampled_from([40, 60, 80, 100, 130, 170]), st.sampled_from(["none", "gradients"])
)
def test_no_plan_fits_where_a_count_of_devices_rules_out_all(given, memory, shard):
    costs = StageCosts(given.with_(memory_bytes=memory, shard=shard))
    every = (each for places in layouts_of(given.topology)[:3] for each in shapes(costs, places))
    assert costs.may_fit or all(costs.slowest_s(each) == inf for each in every)


def test_a_count_of_devices_rules_out_what_has_no_room():
    """A layer takes 16 bytes with its gradients and Adam's state, and 1 of a microbatch: a device
    of 52 holds three.
    """
    for layers, fits in ((12, True), (13, False)):
        model = chain([1] * layers, [1] * layers, [0] * (layers - 1), [4] * layers)
        options = {"schedule": "zb-h1", "microbatches": 4, "memory_bytes": 52}
        assert StageCosts(problem(model, topology((4, 1.0)), **options)).may_fit == fits


@pytest.mark.parametrize(
    ("idle", "seconds"), [((0, 0, 0), [4.0, 12.0, 10.0]), ((1, 0, 0), [10.0, 12.0, 4.0])]
)
def test_messages_part_at_the_levels_between_a_stage_and_its_neighbours(idle, seconds):
    """Each stage computes 2 s, and waits there and back: 1 s in a server, 4 s between servers."""
    given = problem(
        chain([1] * 3, [1] * 3, [4] * 2, [0] * 3),
        topology((2, 4.0), (2, 1.0)),
        engine=WAITING,
    )
    places = tuple((rank,) for rank in range(4))
    shape = Shape(places, (0, 1, 2, 3), (1, 1, 1), idle, (None,) * 3)
    tables = zip(StageCosts(given).of_shape(shape), pairwise(shape.bounds), strict=True)
    assert [float(own[cut]) for (own, _, _), cut in tables] == seconds


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"schedule": "pipedream"}, 4 / 2 + 8 / 2), ({"schedule": "1f1b", "microbatches": 8}, 4)],
)
def test_asynchronous_exchanges_and_messages_share_ports(options, seconds):
    """2-1 at 1 byte/s: each of two replicas sends half of 4 bytes a microbatch, and 8 bytes of
    gradients a round; the other device 4 bytes. An iteration ends with its exchange.
    """
    given = problem(chain([1, 1], [2, 2], [4], [8, 0]), topology((3, 1.0)), **options)
    shape = Shape(tuple((rank,) for rank in range(3)), (0, 1, 2), (2, 1), (0, 0), (None, None))
    assert StageCosts(given).ports_s(shape) == seconds


def test_a_port_carries_what_leaves_its_device_at_any_level_or_its_server_at_the_outer_one():
    """40 bytes over each cut, at 4 bytes/s in a server and 1 byte/s between: a device of both sends
    5 at most, and the second and the third send all of a cut from server to server.
    """
    given = problem(chain([1] * 4, [1] * 4, [40] * 3, [0] * 4), topology((2, 4.0), (2, 1.0)))
    places = tuple((rank,) for rank in range(4))
    shape = Shape(places, (0, 1, 2, 3, 4), (1,) * 4, (0,) * 4, (None,) * 4)
    tables = enumerate(StageCosts(given).of_shape(shape))
    assert [float(own[s, s + 1]) for s, (own, _, _) in tables] == [40 / 5, 40, 40, 40 / 5]


@pytest.mark.slow
@examples(60, suppress_health_check=SLOW)
@given(problems(), st.sampled_from([None, False, True]), st.randoms())
def test_no_other_cuts_are_better_than_those_of_recut(given, full, random):
    """Nor other choices of what recomputes, where these are free; `full` has usual warm-ups."""
    costs = StageCosts(given)
    shape = random.choice(list(shapes(costs, layouts_of(given.topology)[0])))
    S, free = shape.stages, full is not None and costs.chooses_recompute
    every = [
        replace(shape, bounds=(0, *cuts, costs.N), recompute=modes)
        for cuts in combinations(range(1, costs.N), S - 1)
        for modes in (product((False, True), repeat=S) if free else [shape.recompute])
    ]
    counts = [len(ranks) for ranks in shape.ranks]
    usual = [costs.entry.counts(s, counts, costs.M).held if full else 0 for s in range(S)]

    def slowest_s(other: Shape) -> float:
        stages = zip(costs.of_shape(other), pairwise(other.bounds), usual, strict=True)
        roomy = all(table.room[cut] >= least for table, cut, least in stages)
        return slowest_stage_s(costs, other) if roomy else inf

    found = optimal.recut(costs, shape, costs.N, full)
    assert (inf if found is None else slowest_s(found)) == min(map(slowest_s, every))


@examples(60, suppress_health_check=SLOW)
@given(problems())
def test_a_stage_costs_the_same_in_every_member_of_the_outermost_level(given):
    """What is looked up for the first member is what would be found where the stage lies."""
    moved, costs = StageCosts(given), StageCosts(given.with_(known=Known()))
    costs._as_first = lambda *groups: groups
    for places in layouts_of(given.topology):
        for first, end in combinations(range(len(places) + 1), 2):
            assert moved._locate(places, first, end) == costs._locate(places, first, end)


@pytest.mark.parametrize("limit", [None, 100])
def test_stages_choose_to_recompute_where_memory_is_limited(limit):
    given = problem(
        chain([1] * 4, [1] * 4, [1] * 3, [1] * 4),
        topology((4, 4.0)),
        schedule="pipedream",
        recompute="auto",
        memory_bytes=limit,
    )
    costs = StageCosts(given)
    assert costs.chooses_recompute is (limit is not None)
    assert len(costs.modes) == (1 if limit is None else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "devices"), [(1000, 16), (500, 512)])
def test_a_long_chain_is_planned_in_ranges_of_equal_work(layers, devices):
    rng = np.random.default_rng(0)
    times = rng.integers(1, 9, layers).tolist()

    given = problem(
        chain(times, times, [1] * (layers - 1), [1] * layers),
        topology((8, 1e3), (devices // 8, 1e2)),
        schedule="1f1b",
        microbatches=64,
    )
    stated, cells = optimal.coarsen(given)
    assert stated.chain.layers == len(cells) - 1 <= optimal.CELLS
    assert cells[0] == 0 and cells[-1] == layers
    assert optimal.plan(given).partition.stages[-1].stop == layers


def test_room_for_one_microbatch_is_enough_where_plans_choose_their_warm_up():
    """Of 18 bytes of parameters as many of gradients, and 36 that Adam keeps; 2 of a microbatch."""
    given = problem(chain([1] * 2, [1] * 2, [1], [9] * 2), topology((1, 1.0)), memory_bytes=74)
    assert len(optimal.plan(given).partition.stages) == 1


def test_where_nothing_fits_the_error_says_what_would_help():

    given = problem(chain([1] * 4, [1] * 4, [1] * 3, [9] * 4), topology((4, 1.0)), memory_bytes=1)
    with pytest.raises(PartoptError, match="no plan fits") as caught:
        optimal.plan(given)
    assert "recompute=auto" in caught.value.hint


def test_stages_that_cannot_be_are_not_said_to_want_memory():
    given = problem(chain([1] * 4, [1] * 4, [1] * 3, [9] * 4), topology((4, 1.0)))
    error = optimal.nothing_fits(given.with_(stages=3))
    assert error.message == "optimal: no plan of 3 stages on 4 devices was found"
    assert "`stages`" in error.hint and "memory" not in error.message


@pytest.mark.parametrize(
    ("measured", "size", "told"),
    [((1,), 1, False), ((2,), 2, False), ((1, 2), 1, False), ((1, 2), 2, True)],
)
def test_smaller_microbatches_are_advised_where_they_were_measured(measured, size, told):
    every = [measurement([1.0] * 2, [1.0] * 2, [1] * 2, each) for each in measured]
    job = Job(profile_of(every, [10**6] * 2), flat(2), memory="1 kB", microbatch_size=size)
    with pytest.raises(PartoptError) as raised:
        optimal.plan(job.problem)
    assert ("smaller microbatches" in raised.value.hint) == told
