"""Pipelines inside the members of a level, replicated over them: the probe of that family, and what
the optimal planner takes of it.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.cost.capacity import shapes_of
from partopt.cost.collectives import allreduce_s
from partopt.cost.iteration import objective_s
from partopt.cost.kernels import replica_counts
from partopt.cost.links import paired_sides_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Problem
from partopt.cost.relaxed import relax
from partopt.planners import optimal, pipedream
from partopt.planners.optimal import servers
from partopt.planners.optimal.families import families
from partopt.planners.optimal.nested import probe as nested
from partopt.planners.optimal.nested.probe import NestedProbe, differs
from tests.examples import examples
from tests.planners import exhaustive
from tests.planners.exhaustive import best_nested, priced
from tests.planners.problems import chain, problem, proven, topology
from tests.planners.test_optimal import clusters, stashed

SCHEDULES = [("pipedream", None), ("pipedream-2bw", None), ("1f1b", 5), ("gpipe", 3), ("zb-h1", 4)]


def least_nested_s(given: Problem) -> float:
    """The least objective of the family, found by its probe behind the relaxed one; infinite where
    nothing fits.
    """
    [_, probe] = families(given)
    value = math.inf
    for counts in replica_counts(given):
        _, value, _ = optimal._least(probe, counts, value)
    assert probe.complete and not probe.gave_up
    return value


@examples(60)
@given(
    stashed(5),
    clusters(levels=3, devices=8, sizes=3),
    st.sampled_from(SCHEDULES),
    st.sampled_from([None, 40, 80, 150]),
    st.sampled_from(["free", "uniform"]),
    st.sampled_from([None, None, 1, 2, 3]),
    st.sampled_from(["never", "always", "auto"]),
    st.booleans(),
)
def test_equals_exhaustive_search(
    model, cluster, schedule, memory_bytes, replication, stages, recompute, serial
):
    name, M = schedule
    given = problem(
        replace(model, optimizer_s=3.0),
        cluster,
        schedule=name,
        microbatches=M,
        memory_bytes=memory_bytes,
        replication=replication,
        stages=stages,
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        serial_transfers=serial,
    )
    assume(differs(given))
    best = best_nested(given)
    assert least_nested_s(given) == (pytest.approx(best.seconds, rel=1e-11) if best else math.inf)


@examples(40)
@given(stashed(5), clusters(levels=3, devices=12), st.booleans())
def test_never_worse_than_the_published_recurrence_under_the_physical_cost(model, cluster, serial):
    given = problem(model, cluster, serial_transfers=serial)
    published = priced(given, pipedream.plan(given).partition).predicted.period_s
    best = objective_s(proven(optimal.plan(given))[0], given)
    assert best <= published * (1 + 1e-12)


@examples(40)
@given(stashed(3), clusters(levels=3, devices=8, sizes=3))
def test_any_ranks_carry_no_more_than_the_relaxed_probe_says(model, cluster):
    """Of every stage of every nested plan: its all-reduce and both of its sides are no shorter than
    the relaxed ones.
    """
    given = problem(model, cluster)
    assume(differs(given))
    shapes = relax(shapes_of(cluster), cluster)
    for partition in exhaustive.nested(given):
        for stage in partition.stages:
            r = len(stage.ranks)
            assert allreduce_s(7.0, stage.ranks, cluster) >= (
                7.0 * shapes.slope[0, r] + shapes.latency[0, r]
            ) * (1 - 1e-12)
        for before, after in pairwise(partition.stages):
            for stage, other in ((before, after), (after, before)):
                side_s = paired_sides_s(stage.ranks, [(7.0, other.ranks)], cluster, {})
                assert side_s >= 7.0 / shapes.sides[0, 0, 0, len(stage.ranks)] * (1 - 1e-12)


def test_a_pipeline_in_each_server_is_found_where_it_is_the_best():
    """Two layers of 4 s and 4 bytes on two servers of two devices; 16 bytes/s in a server, 1
    between servers; a cut of 12 bytes.

    A pipeline in each server takes 4 s a microbatch, two of them 2 s, and exchange 4 bytes in 4 s
    for every 2 microbatches. One stage on all devices exchanges 8 bytes in 12 s for every 4
    microbatches; the cut between servers takes 12 s.
    """
    given = problem(chain([2, 2], [2, 2], [12], [4, 4]), topology((2, 16.0), (2, 1.0)))
    best, certificate = proven(optimal.plan(given))
    assert (best.family, certificate.objective_s, certificate.status) == (NESTED, 2.0, "optimal")
    assert [list(stage.ranks) for stage in best.stages] == [[0, 2], [1, 3]]
    _, certificate = proven(optimal.plan(replace(given, replication="none")))
    assert certificate.objective_s == 4.0


def test_of_equal_plans_the_contiguous_one_is_taken():
    given = problem(chain([2], [2], [], [0]), topology((2, 16.0), (2, 1.0)))
    assert optimal.plan(given).partition.family == CONTIGUOUS


def test_a_probe_that_gives_up_says_so(monkeypatch):
    monkeypatch.setattr(nested, "WORK", 3)
    monkeypatch.setattr(servers, "WORK", 0)  # by which the plan is proved optimal all the same
    given = problem(chain([1] * 6, [1] * 6, [9] * 5, [5] * 6), topology((2, 2.0), (3, 1.0)))
    probe = NestedProbe(given)
    answer = probe.find(1e-3, (1, 6), None)
    assert answer.plan is None and answer.gave_up
    _, certificate = proven(optimal.plan(given))
    assert certificate.status.startswith("within ")
    best = exhaustive.best(given)
    assert best is not None
    assert certificate.lower_bound_s <= best.seconds
    assert np.isfinite(certificate.lower_bound_s)
