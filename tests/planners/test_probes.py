"""The compiled probe of contiguous plans against one in plain Python, with blocks of few cuts and
of many.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.cost.iteration import objective_s
from partopt.cost.kernels import replica_counts
from partopt.cost.problem import NESTED, Partition, Problem
from partopt.planners import optimal
from partopt.planners.optimal.bisection import bisect_minimum
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.planners.optimal.families import FamilyProbe
from tests.planners import exhaustive, plain_probe
from tests.planners.problems import chain, problem, proven, topology
from tests.planners.test_optimal import clusters, stashed

NEAR = 1e-9  # relative: the costs of these problems are whole numbers or far from it


def agree(given: Problem, T: float) -> None:
    """The compiled probe finds a plan where the plain one does, of blocks of any size, and the plan
    takes no more.
    """
    for counts in replica_counts(given):
        there = plain_probe.exists(given, T, counts)
        for blocks in ((2, 4), (4, 16), (32, 1024)):
            answer = ContiguousProbe(given, blocks=blocks).find(T, counts, None)
            assert (answer.plan is not None) == there
            assert answer.complete
            assert answer.plan is None or objective_s(answer.plan, given) <= T * (1 + NEAR)


@settings(max_examples=40, deadline=None)
@given(
    stashed(5),
    clusters(devices=5),
    st.sampled_from(["pipedream", "pipedream-2bw"]),
    st.sampled_from([None, 60, 120]),
    st.sampled_from(["never", "always", "auto"]),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_plain_probe_around_the_least_period(
    model, cluster, schedule, memory_bytes, recompute, serial, blocking
):
    on = problem(
        model,
        cluster,
        schedule=schedule,
        memory_bytes=memory_bytes,
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        serial_transfers=serial,
        blocking_allreduce=blocking,
    )
    best = exhaustive.best_contiguous(on)
    for factor in (0.8, 1 - NEAR, 1 + NEAR, 1.3):
        agree(on, factor * (best.seconds if best else 1e6))


@settings(max_examples=40, deadline=None)
@given(
    stashed(4),
    clusters(devices=4),
    st.sampled_from(["1f1b", "1f1b-eager", "gpipe"]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([None, 60, 120]),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_plain_probe_around_the_least_iteration(
    model, cluster, schedule, M, memory_bytes, auto, serial
):
    on = problem(
        replace(model, optimizer_s=3.0),
        cluster,
        schedule=schedule,
        microbatches=M,
        memory_bytes=memory_bytes,
        recompute_per_stage=auto,
        serial_transfers=serial,
    )
    best = exhaustive.best_contiguous(on)
    for factor in (0.8, 1 - NEAR, 1 + NEAR, 1.3):
        agree(on, factor * (best.seconds if best else 1e6))


@settings(max_examples=25, deadline=None)
@given(stashed(4), clusters(devices=4), st.sampled_from([1, 3, 8]), st.booleans())
def test_equals_the_plain_probe_where_backwards_are_in_two_parts(model, cluster, M, serial):
    on = problem(model, cluster, schedule="zb-h1", microbatches=M, serial_transfers=serial)
    best = exhaustive.best_contiguous(on)
    assert best is not None
    for factor in (0.8, 1 - NEAR, 1 + NEAR, 1.3):
        agree(on, factor * best.seconds)


@settings(max_examples=30, deadline=None)
@given(stashed(9), clusters(levels=2, devices=6), st.sampled_from([None, 60, 120]))
def test_blocks_of_few_cuts_leave_the_least_period_as_it_is(model, cluster, memory_bytes):
    """Nine layers are five blocks of two and three of four, so that ends are passed over in both;
    exhaustive search has none.
    """
    on = problem(model, cluster, memory_bytes=memory_bytes)
    best = exhaustive.best_contiguous(on)
    probe = ContiguousProbe(on, blocks=(2, 4))
    _, value, _ = bisect_minimum(
        lambda T: probe.find(T, (1, cluster.devices), None).plan,
        lambda plan: objective_s(plan, on),
        0.0,
        best.seconds * 2 + 1 if best else 1e6,
        1e-12,
    )
    assert value == (pytest.approx(best.seconds, rel=1e-11) if best else 1e6)


@settings(max_examples=30, deadline=None)
@given(
    stashed(9), clusters(levels=2, devices=6), st.sampled_from([None, 60, 120]), st.integers(2, 4)
)
def test_a_long_chain_begins_with_the_best_plan_of_a_coarser_one(
    model, cluster, memory_bytes, grain
):
    on = problem(model, cluster, memory_bytes=memory_bytes)
    assert optimal.coarse_incumbent(on, model.layers + 1, grain) == (None, math.inf)
    found, value = optimal.coarse_incumbent(on, model.layers, grain)
    coarse = replace(on, cut_at=range(0, model.layers, grain)).coarsen()
    best = exhaustive.best(coarse)
    if best is None:
        assert (found, value) == (None, math.inf)
        return
    assert found is not None
    assert value == objective_s(found, on) == pytest.approx(best.seconds, rel=1e-11)
    assert {stage.start % grain for stage in found.stages} == {0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimal, "_LONG", 2)
        patch.setattr(optimal, "_GRAIN", grain)
        _, begun = proven(optimal.plan(on))
    _, certificate = proven(optimal.plan(on))
    assert begun.objective_s == pytest.approx(certificate.objective_s, rel=1e-11)
    assert begun.status == "optimal"


def least_without_nested(on: Problem) -> tuple[Partition | None, float, float]:
    """`optimal.least` of a long chain, where the probe of nested plans gives up."""

    def find(probe: FamilyProbe, T: float, *rest: Any) -> Partition | None:
        probe.gave_up = probe.family == NESTED
        return None if probe.gave_up else real(probe, T, *rest)

    real = FamilyProbe.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimal, "_LONG", 2)
        patch.setattr(optimal, "_GRAIN", 2)
        patch.setattr(FamilyProbe, "find", find)
        return optimal.least(on)


@settings(max_examples=30, deadline=None)
@given(stashed(9), clusters(levels=2, devices=6), st.sampled_from([None, 60]))
def test_the_bound_of_a_long_chain_holds_where_a_family_gives_up(model, cluster, memory_bytes):
    on = problem(model, cluster, memory_bytes=memory_bytes)
    best, (found, value, lower) = exhaustive.best(on), least_without_nested(on)
    if best is not None and found is not None:
        assert lower <= best.seconds * (1 + 1e-9) <= value * (1 + 2e-9)
        assert value == pytest.approx(objective_s(found, on), rel=1e-11)


def test_a_grain_that_leaves_too_few_places_to_cut_gives_nothing_to_begin_with():
    on = problem(chain([1] * 8, [1] * 8, [0] * 7, [0] * 8), topology((4, 1.0)), stages=4)
    assert optimal.coarse_incumbent(on, 8, 3) == (None, math.inf)
    assert optimal.coarse_incumbent(on, 8, 2)[1] == 4.0
