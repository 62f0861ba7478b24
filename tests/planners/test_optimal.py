import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.chain import Chain
from partopt.cost.collectives import ALGORITHMS
from partopt.cost.iteration import objective_s
from partopt.cost.period import binding, tied_exchange_s
from partopt.cost.problem import Problem
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.errors import PartoptError
from partopt.planners import data_parallel, gpipe, optimal, straight
from partopt.planners.optimal import refuters
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from tests.examples import examples
from tests.planners import exhaustive
from tests.planners.exhaustive import priced
from tests.planners.problems import (
    chain,
    chains,
    problem,
    proven,
    shared_sizes,
    topology,
    with_memory,
    with_messages,
)


@st.composite
def clusters(draw: st.DrawFn, levels: int = 3, devices: int = 6, sizes: int = 4) -> Topology:
    """One to `levels` levels, each with its own bandwidth, links, latency and bus; outer ones may
    be the faster.
    """
    made: list[Level] = []
    total = 1
    for k in range(1, draw(st.integers(1, levels)) + 1):
        size = draw(st.integers(1, max(1, min(sizes, devices // total))))
        total *= size
        rates = {
            "bandwidth_bytes_per_s": float(draw(st.sampled_from([1, 2, 4, 8, 16]))),
            "links": draw(st.sampled_from([1, 1, 2])),
        }
        waits = {
            "latency_s": float(draw(st.sampled_from([0, 0, 0, 1]))),
            "bus": draw(st.sampled_from([False, False, True])),
        }
        made.append(Level(name=f"level{k}", size=size, **rates, **waits, **draw(engines())))
    return Topology(
        name="mixed",
        device=Device(name="device"),
        levels=made,
        allreduce=draw(st.sampled_from(["fastest", *ALGORITHMS])),
    )


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """What messages take of devices and all-reduces achieve on a level; often nothing."""
    if not draw(st.booleans()):
        return {}
    own = AllReduceRates(
        bandwidth_bytes_per_s=draw(st.sampled_from([msgspec.UNSET, 2.0, 4.0])),
        latency_s=draw(st.sampled_from([msgspec.UNSET, 0.0, 2.0])),
    )
    return {
        "overhead_s": float(draw(st.sampled_from([0, 0, 1]))),
        "copy_bytes_per_s": draw(st.sampled_from([msgspec.UNSET, 8.0])),
        "allreduce": draw(st.sampled_from([msgspec.UNSET, own])),
    }


@st.composite
def stashed(draw: st.DrawFn, layers: int = 6) -> Chain:
    """Chains whose layers keep something for their backward, some of it shared; of half of them
    some parameters are frozen, and backwards take memory while they run.
    """
    model = draw(chains(layers))
    model = draw(with_messages(model)) if draw(st.booleans()) else model
    if draw(st.booleans()):
        return draw(with_memory(model))
    return replace(model, stash_bytes=draw(shared_sizes(model.layers)))


def refused(given: Problem) -> None:
    """The planner says that no plan fits."""
    with pytest.raises(PartoptError, match="no plan fits"):
        optimal.plan(given)


def check(given: Problem) -> None:
    """The planner's objective is the least there is, proven, with the fewest stages that have it;
    the plan fits. Where none fits the planner says so.
    """
    best = exhaustive.best(given)
    if best is None:
        refused(given)
        return
    partition, certificate = proven(optimal.plan(given))
    seconds = objective_s(partition, given)
    assert seconds == pytest.approx(best.seconds, rel=1e-11)
    # what all stages take together may be longer
    assert certificate.objective_s == max(seconds, certificate.lower_bound_s)
    assert certificate.status == "optimal"
    assert len(partition.stages) == best.stages
    assert exhaustive.holds(partition, given)


@examples(60)
@given(stashed(), clusters(levels=1), st.booleans(), st.booleans())
def test_equals_exhaustive_search_on_one_level(model, cluster, recompute, serial):
    check(problem(model, cluster, recompute=recompute, serial_transfers=serial, memory_bytes=None))


@examples(60)
@given(stashed(), clusters(), st.booleans(), st.booleans(), st.booleans())
def test_equals_exhaustive_search_on_several_levels(model, cluster, recompute, serial, blocking):
    options = {"serial_transfers": serial, "blocking_allreduce": blocking}
    check(problem(model, cluster, recompute=recompute, **options))


@examples(60)
@given(
    stashed(),
    clusters(),
    st.booleans(),
    st.sampled_from(["pipedream", "pipedream-2bw"]),
    st.integers(10, 300),
    st.booleans(),
)
def test_equals_exhaustive_search_under_a_memory_limit(
    model, cluster, recompute, schedule, memory_bytes, serial
):
    check(
        problem(
            model,
            cluster,
            recompute=recompute,
            schedule=schedule,
            memory_bytes=memory_bytes,
            serial_transfers=serial,
        )
    )


@examples(15)
@given(stashed(8), clusters(devices=8), st.sampled_from([None, 60, 150]))
def test_equals_exhaustive_search_on_eight_layers_and_devices(model, cluster, memory_bytes):
    check(problem(model, cluster, memory_bytes=memory_bytes))


@examples(40)
@given(stashed(5), clusters(devices=5), st.integers(10, 300))
def test_equals_exhaustive_search_where_stages_choose_to_recompute(model, cluster, memory_bytes):
    check(problem(model, cluster, recompute_per_stage=True, memory_bytes=memory_bytes))


@examples(40)
@given(stashed(), clusters(), st.sampled_from(["uniform", "none"]), st.sampled_from([None, 100]))
def test_equals_exhaustive_search_with_replication_bound(model, cluster, replication, memory_bytes):
    check(problem(model, cluster, replication=replication, memory_bytes=memory_bytes))


@examples(40)
@given(stashed(), clusters(), st.integers(1, 5), st.sampled_from([None, 150]))
def test_takes_exactly_the_stages_asked_for(model, cluster, stages, memory_bytes):
    given = problem(
        model, cluster, stages=min(stages, model.layers, cluster.devices), memory_bytes=memory_bytes
    )
    check(given)


SYNCHRONOUS = st.sampled_from(["1f1b", "1f1b-eager", "gpipe", "zb-h1"])


@examples(60)
@given(
    stashed(4),
    clusters(devices=4),
    SYNCHRONOUS,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([None, 60, 150]),
    st.booleans(),
    st.booleans(),
)
def test_equals_exhaustive_search_for_synchronous_schedules(
    model, cluster, schedule, M, memory_bytes, serial, recompute
):
    model, options = (
        replace(model, optimizer_s=3.0),
        {"serial_transfers": serial, "recompute": recompute},
    )
    check(
        problem(
            model, cluster, schedule=schedule, microbatches=M, memory_bytes=memory_bytes, **options
        )
    )


@examples(40)
@given(
    stashed(4),
    clusters(devices=4),
    SYNCHRONOUS,
    st.sampled_from([2, 3, 8]),
    st.sampled_from([30, 60, 100, 150]),
    st.booleans(),
)
def test_equals_exhaustive_search_for_synchronous_stages_that_choose_to_recompute(
    model, cluster, schedule, M, memory_bytes, serial
):
    options = {
        "memory_bytes": memory_bytes,
        "serial_transfers": serial,
        "recompute_per_stage": True,
    }
    check(problem(model, cluster, schedule=schedule, microbatches=M, **options))


@examples(40)
@given(
    stashed(4),
    clusters(devices=4),
    SYNCHRONOUS,
    st.integers(1, 4),
    st.sampled_from([None, 100]),
    st.booleans(),
)
def test_takes_exactly_the_stages_asked_for_under_synchronous_schedules(
    model, cluster, schedule, stages, memory_bytes, auto
):
    options = {
        "stages": min(stages, model.layers, cluster.devices),
        "memory_bytes": memory_bytes,
        "recompute_per_stage": auto,
    }
    check(problem(model, cluster, schedule=schedule, microbatches=3, **options))


@examples(40)
@given(
    stashed(), clusters(), st.lists(st.integers(0, 5)), st.sampled_from(["exchange", "together"])
)
def test_what_it_proves_of_merged_layers_is_what_the_plan_is_priced_at(
    model, cluster, starts, tied
):
    given = problem(
        model,
        cluster,
        cut_at=sorted({0, *(start for start in starts if start < model.layers)}),
        tied=tied,
    )
    partition, certificate = proven(planners.decide("optimal", given))
    assert {stage.start for stage in partition.stages} <= set(given.boundaries())
    period_s = priced(given, partition).predicted.period_s
    # what all stages take together may be longer
    assert certificate.objective_s == max(period_s, certificate.lower_bound_s)
    if tied == "together":
        assert all(tied_exchange_s(partition, s, given) == 0 for s in range(len(partition.stages)))


def objective(given: Problem) -> float:
    """The least that the planner's formula finds, infinite where no plan fits.

    Not the certificate's: the bounds beside the formula stop at a share of work, so that an easier
    problem may have the higher one.
    """
    try:
        return objective_s(optimal.plan(given).partition, given)
    except PartoptError:
        return math.inf


@examples(40)
@given(
    stashed(8),
    clusters(levels=2, devices=12),
    st.sampled_from([None, 100, 200]),
    st.booleans(),
    st.sampled_from([("pipedream", None), ("1f1b", 4), ("gpipe", 3)]),
)
def test_a_relaxed_problem_is_never_worse(model, cluster, memory_bytes, recompute, schedule):
    name, M = schedule
    given = problem(
        model,
        cluster,
        memory_bytes=memory_bytes,
        recompute=recompute,
        schedule=name,
        microbatches=M,
    )
    best = objective(given) * (1 + 1e-11)
    last = cluster.levels[-1]
    faster = [
        Level(
            name=level.name,
            size=level.size,
            bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s,
            links=level.links,
            bus=level.bus,
        )
        for level in cluster.levels
    ]
    larger = [*cluster.levels[:-1], msgspec.structs.replace(last, size=last.size + 1)]
    for levels in (faster, larger):  # the same algorithm: the fastest is that of a large bucket
        topology = msgspec.structs.replace(cluster, levels=levels, devices=0)
        assert objective(replace(given, topology=topology)) <= best
    if memory_bytes is not None:
        assert objective(replace(given, memory_bytes=2 * memory_bytes)) <= best
    assert objective(replace(given, recompute_per_stage=True)) <= best
    uniform = objective(replace(given, replication="uniform"))
    assert best <= uniform * (1 + 1e-10)
    assert uniform <= objective(replace(given, replication="none")) * (1 + 1e-11)


@examples(50)
@given(stashed(8), clusters(levels=3, devices=12), st.booleans())
def test_never_worse_than_the_other_contiguous_planners(model, cluster, serial):
    given = problem(model, cluster, serial_transfers=serial)
    best = objective(given)
    for planner in (gpipe, straight, data_parallel):
        assert best <= binding(planner.plan(given).partition, given).seconds * (1 + 1e-12)


def test_ranks_stay_idle_where_that_keeps_a_stage_inside_a_server():
    """Two layers of 2 s; an all-reduce of two ranks of a server takes 2 s a round, of three 4 s,
    and across servers far longer.
    """
    model = chain([2, 2], [0, 0], [0], [0, 0])
    cluster = Topology(
        name="two servers of three",
        device=Device(name="device"),
        levels=[
            Level(name="server", size=3, bandwidth_bytes_per_s=1.0, latency_s=1.0),
            Level(name="cluster", size=2, bandwidth_bytes_per_s=1.0, latency_s=100.0),
        ],
    )
    partition, certificate = proven(optimal.plan(problem(model, cluster)))
    assert certificate.objective_s == 1.0
    assert [list(stage.ranks) for stage in partition.stages] == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({}, 8 + 8), ({"schedule": "1f1b", "microbatches": 8}, 8 + 8 * (8 + 8) + 16 + 4)],
)
def test_both_cuts_of_the_stage_in_the_middle_bind(options, seconds):
    """Layers of 4 s forward and 8 s backward, a device each, 8 bytes between them at 1 byte/s:
    compute and each cut alone would take 12 s a microbatch, and less than 8 times 16 s in all. In
    an iteration one message more is on its way before and behind, and a layer; and as messages of
    both cuts come by one port, what the middle sends cannot follow without a gap, of 4 s.
    """
    model = chain([4] * 3, [8] * 3, [8] * 2, [800] * 3)
    given = problem(model, topology((3, 1.0)), replication="none", **options)
    check(given)
    assert proven(optimal.plan(given))[1].objective_s == pytest.approx(seconds, rel=2e-6)
    two_servers = problem(model, topology((3, 1.0), (2, 1e6)), **options)
    check(two_servers)
    if not options:
        assert proven(optimal.plan(two_servers))[1].objective_s == (8 + 8) / 2


def test_a_stage_that_fits_with_one_in_flight_alone_has_others_behind_it():
    """A byte of parameters takes four with one version; of 90 bytes, weights of 20 take 80, and one
    version more does not fit.
    """
    model = chain([1] * 3, [2] * 3, [0] * 2, [10, 10, 20])
    given = problem(model, topology((2, 1.0)), memory_bytes=90)
    partition, certificate = proven(optimal.plan(given))
    assert [stage.start for stage in partition.stages] == [0, 2]
    assert certificate.objective_s == 6 + 3  # the first holds one microbatch until it returns


def test_a_plan_that_does_not_exist_is_said_so():
    with pytest.raises(PartoptError, match="no plan fits the memory"):
        optimal.plan(problem(chain([1], [1], [], [100]), topology((1, 1.0)), memory_bytes=1))


def test_more_shapes_than_the_tables_hold_are_said_before_they_are_made():
    with pytest.raises(
        PartoptError, match="32768 devices in components of 4096: its tables outgrow memory"
    ):
        optimal.plan(problem(chain([1], [1], [], [1]), topology((4096, 2.0), (8, 1.0))))


@pytest.mark.parametrize(
    "options, least", [({}, 2.0), ({"schedule": "1f1b", "microbatches": 3}, 6.0)]
)
def test_where_an_entry_had_no_room_the_certificate_is_a_gap_above_what_needs_no_search(
    monkeypatch, options, least
):
    """4 s of compute on 2 devices, of which one layer takes 3 s; three times that an iteration."""
    find = ContiguousProbe.find
    monkeypatch.setattr(
        ContiguousProbe, "find", lambda *arguments: find(*arguments)._replace(complete=False)
    )
    monkeypatch.setattr(refuters, "bound_s", lambda _, lower: lower)
    _, certificate = proven(
        optimal.plan(problem(chain([1, 1], [2, 0], [0], [90, 90]), topology((2, 1.0)), **options))
    )
    assert certificate.lower_bound_s == pytest.approx(least)
    assert certificate.status.startswith("within ")
