"""Where what a stage holds depends on its replicas: plans are still the best there are."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.memory import SHARDED, kept_of, stage_memory
from partopt.cost.problem import Problem
from partopt.documents.stage import MemoryRules
from tests.examples import examples
from tests.planners import exhaustive
from tests.planners.problems import (
    chain,
    chains,
    memory_rules,
    problem,
    proven,
    topology,
    with_memory,
)
from tests.planners.test_optimal import SYNCHRONOUS, check, clusters, optimal, stashed

LIMITS = st.integers(10, 200)
MORE = st.sampled_from(["gradients", "parameters"])


@examples(150)
@given(
    stashed(5),
    clusters(devices=6),
    st.sampled_from(["pipedream", "pipedream-2bw"]),
    st.sampled_from(["optimizer", "gradients", "parameters"]),
    LIMITS,
    st.sampled_from([{}, {"recompute": True}, {"recompute_per_stage": True}]),
)
def test_equals_exhaustive_search_for_asynchronous_schedules(
    model, cluster, schedule, shard, memory_bytes, recompute
):
    rules = MemoryRules(shard=shard)
    options = {"schedule": schedule, "memory_bytes": memory_bytes, **recompute}
    check(problem(model, cluster, memory_rules=rules, **options))


@examples(150)
@given(
    stashed(4),
    clusters(devices=4),
    SYNCHRONOUS,
    st.sampled_from([1, 2, 3, 8]),
    LIMITS,
    st.sampled_from([{}, {"recompute": True}, {"recompute_per_stage": True}]),
    st.data(),
)
def test_equals_exhaustive_search_for_synchronous_schedules(
    model, cluster, schedule, M, memory_bytes, recompute, data
):
    rules = data.draw(memory_rules(M))
    options = {"schedule": schedule, "microbatches": M, "memory_bytes": memory_bytes, **recompute}
    check(problem(replace(model, optimizer_s=3.0), cluster, memory_rules=rules, **options))


@examples(60)
@given(stashed(), clusters(), st.sampled_from(["uniform", "none"]), LIMITS, st.booleans(), MORE)
def test_equals_exhaustive_search_with_replication_bound(
    model, cluster, replication, memory_bytes, serial, shard
):
    rules = MemoryRules(shard=shard)
    options = {"replication": replication, "serial_transfers": serial}
    check(problem(model, cluster, memory_rules=rules, memory_bytes=memory_bytes, **options))


@examples(60)
@given(stashed(), clusters(), LIMITS)
def test_sharding_more_never_makes_a_plan_slower(model, cluster, memory_bytes):
    def best_s(shard: str) -> float:
        rules = MemoryRules(shard=shard)
        stated = problem(model, cluster, memory_bytes=memory_bytes, memory_rules=rules)
        found = exhaustive.best(stated)
        if found is None:
            return math.inf
        return proven(optimal.plan(stated))[1].objective_s

    best = [best_s(shard) for shard in SHARDED]
    assert all(less <= more * (1 + 1e-9) for more, less in pairwise(best))


@examples(60)
@given(st.data(), st.integers(1, 5), st.booleans())
def test_more_sharding_and_more_replicas_never_take_more(data, held, sixteen_bit):
    model = data.draw(with_memory(data.draw(chains())))
    i = data.draw(st.integers(0, model.layers - 1))
    j = data.draw(st.integers(i + 1, model.layers))

    def taken_bytes(shard: str, r: int) -> int:
        kept = kept_of("adam", MemoryRules(shard=shard), sixteen_bit)
        return stage_memory(model, i, j, held, 1, kept, r, 1, False, split=False).total_bytes

    for r in range(1, 5):
        taken = [taken_bytes(shard, r) for shard in SHARDED]
        assert taken == sorted(taken, reverse=True)
    for shard in SHARDED:
        taken = [taken_bytes(shard, r) for r in range(1, 6)]
        assert taken == sorted(taken, reverse=True)


@pytest.mark.parametrize(
    "shard, expected",
    [
        ("none", (100, 100, 200)),
        ("optimizer", (100, 100, 50)),
        ("gradients", (100, 25, 50)),
        ("parameters", (25 + 2 * 10, 25, 50)),
    ],
)
def test_four_replicas_hold_a_quarter_each(shard, expected):
    """Of parameters two layers are whole at a time, the one that runs and the next."""
    kept = kept_of("adam", MemoryRules(shard=shard), sixteen_bit=False)
    model = chain([1] * 10, [1] * 10, [0] * 9, [10] * 10)
    memory = stage_memory(model, 0, 10, 1, 1, kept, 4, 1, False, split=False)
    held = memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes
    assert held == expected


def test_a_model_that_fits_no_device_fits_replicas_that_share_its_state():
    """100 bytes of parameters with gradients and twice as much state: 401 bytes on one device, 251
    on four. Without sharding two stages would be needed, and there is but one layer.
    """
    stated = problem(
        chain([1], [1], [], [100]),
        topology((4, 1000.0)),
        memory_bytes=260,
        memory_rules=MemoryRules(shard="optimizer"),
    )
    assert len(proven(optimal.plan(stated))[0].stages[0].ranks) == 4
    assert exhaustive.best(_unsharded(stated)) is None


def _unsharded(stated: Problem) -> Problem:
    return replace(stated, memory_rules=MemoryRules())


def test_two_layers_fit_together_only_where_two_replicas_share_their_state():
    """10 bytes of parameters a layer, two versions, a gradient and two moments: 50 for one layer,
    100 for two, 80 of these where two replicas share the moments. Compute is 8 on both sides, 4 a
    replica; one layer a device takes 6.
    """
    stated = problem(
        chain([3, 1, 1, 3], [3, 1, 1, 3], [0, 0, 0], [10, 10, 10, 10]),
        topology((4, 1e6)),
        schedule="pipedream-2bw",
        memory_bytes=90,
        memory_rules=MemoryRules(shard="optimizer"),
    )
    check(stated)
    partition, certificate = proven(optimal.plan(stated))
    assert [(stage.start, len(stage.ranks)) for stage in partition.stages] == [(0, 2), (2, 2)]
    assert certificate.objective_s == 4
    assert proven(optimal.plan(_unsharded(stated)))[1].objective_s == 6
