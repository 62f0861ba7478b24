from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.chain import Chain, chain_of
from partopt.cost.memory import STATE_BYTES, kept_of, memory_table, with_counts
from partopt.cost.pricing import sum_layers
from partopt.cost.problem import Assignment
from partopt.documents.engine import Engine
from partopt.documents.stage import Memory
from partopt.schedules import SCHEDULES
from partopt.schedules.entry import Counts
from tests.examples import examples
from tests.helpers import measurement, profile_of, with_memory_of
from tests.planners.problems import block_bounds, chains, problem, topology, trained, with_memory


@pytest.mark.parametrize(
    "optimizer, sixteen_bit, expected",
    [
        ("sgd", False, 0),
        ("momentum", False, 100),
        ("adam", False, 200),
        ("sgd", True, 200),  # 50 parameters of 2 bytes: an fp32 master copy of 4 bytes each
        ("momentum", True, 400),  # and one fp32 moment
        ("adam", True, 600),  # and two
        ("adam8bit", False, 50),  # 25 parameters with two moments of a byte each
        ("adam8bit", True, 300),  # 50 parameters: these, and the master copy
        ("adafactor", False, 0),  # its rows and columns are left out
        ("adafactor", True, 200),
    ],
)
def test_optimizer_state_of_100_bytes_of_parameters(optimizer, sixteen_bit, expected):
    assert 100 * kept_of(optimizer, Engine(), "none", sixteen_bit).state == expected


@pytest.mark.parametrize("sixteen_bit, expected", [(False, 25 * 6), (True, 50 * 6)])
@pytest.mark.parametrize("optimizer", sorted(STATE_BYTES))
def test_bytes_of_each_parameter_take_the_place_of_what_the_optimizer_keeps(
    optimizer, sixteen_bit, expected
):
    engine = Engine(optimizer_bytes=6)
    assert 100 * kept_of(optimizer, engine, "none", sixteen_bit).state == expected


@pytest.mark.parametrize(
    "gradients, sixteen_bit, expected",
    [
        ("parameters", False, 1),
        ("parameters", True, 1),
        ("float32", False, 1),
        ("float32", True, 2),
    ],
)
def test_gradients_of_16_bit_parameters_may_be_kept_in_fp32(gradients, sixteen_bit, expected):
    kept = kept_of("adam", Engine(gradients=gradients), "none", sixteen_bit)
    assert kept.gradients == expected


CHAIN = chain_of(
    profile_of(
        [
            measurement(
                [1.0] * 3, output_bytes=[10, 20, 0], stash_groups=[([0], 7), ([1, 2], 30), ([2], 4)]
            )
        ],
        parameter_bytes=[100, 200, 300],
    )
)


def memory_of(
    model: Chain, i: int, j: int, held: int, begun: int = 1, replicas: int = 1, **options: Any
) -> Memory:
    """Of layers [i, j) with so many microbatches in flight, under 1f1b and sgd by default."""
    usual = {"schedule": "1f1b", "microbatches": 8, "optimizer": "sgd"}
    given = problem(model, topology((1, 1.0)), **usual | options)
    stage = sum_layers(Assignment(i, j, range(replicas)), given)
    entry = SCHEDULES[given.schedule]
    return with_counts(stage, Counts(held - 1, held, begun), entry, given.kept).memory


def test_a_stage_with_three_microbatches_in_flight_and_three_versions_of_its_weights():
    """Layers 1 and 2: W = 500, stash 30 + 4, a = 10 before them and nothing after."""
    memory = memory_of(CHAIN, 1, 3, 3, schedule="pipedream", microbatches=None, optimizer="adam")
    assert memory.parameters_bytes == 3 * 500
    assert memory.gradients_bytes == 500
    assert memory.optimizer_bytes == 2 * 500
    assert memory.activations_bytes == 3 * 34
    assert memory.buffers_bytes == 3 * (10 + 0)
    assert memory.total_bytes == 1500 + 500 + 1000 + 102 + 30


@pytest.mark.parametrize("begun", [1, 2])
def test_recomputation_keeps_the_inputs_in_their_buffers_and_the_stash_of_what_has_begun(begun):
    memory = memory_of(CHAIN, 1, 3, 3, begun, recompute="always")
    assert (memory.activations_bytes, memory.buffers_bytes) == (begun * 34, 3 * 10)


@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "stash", "beside"), [("1f1b", 0, 34), ("zb-h1", 7 + 30 + 4, 0)]
)
def test_blocks_that_recompute_keep_their_inputs_and_the_stash_of_one(
    begun, schedule, stash, beside
):
    """Layers 0 to 2 alone keep 7, 30 and 34; in two parts of a backward all of it stays."""
    how = {"recompute": "always", "engine": Engine(recompute=("none", "blocks"))}
    memory = memory_of(CHAIN, 0, 3, 3, begun, schedule=schedule, **how)
    assert memory.activations_bytes == 3 * (10 + 20) + begun * stash
    assert memory.transient_bytes == beside


@pytest.mark.parametrize(("replicas", "posted"), [(1, 8), (2, 4), (3, 3), (5, 2), (9, 1)])
def test_where_all_have_buffers_the_replica_with_most_microbatches_has_most(replicas, posted):
    """Of 8, on replicas that they need not divide among, however few are in flight."""
    memory = memory_of(CHAIN, 1, 2, 2, replicas=replicas, engine=Engine(buffers="all"))
    assert memory.buffers_bytes == posted * (10 + 20)
    assert memory_of(CHAIN, 1, 2, 2, replicas=replicas).buffers_bytes == 2 * (10 + 20)


def test_what_blocks_keep_has_one_buffer_unless_a_whole_stage_keeps_its_inputs_alone():
    assert memory_of(CHAIN, 1, 2, 2, engine=Engine(buffers="one")).buffers_bytes == 10 + 20
    whole = Engine(buffers="one", recompute=("none", "stage"))
    memory = memory_of(CHAIN, 1, 2, 2, recompute="always", engine=whole)
    assert memory.buffers_bytes == 2 * 10 + 20


@pytest.mark.parametrize(("replicas", "held"), [(1, 600), (10, 60 + 2 * 100)])
def test_of_parameters_in_shares_two_layers_are_whole_at_a_time(replicas, held):
    alike = chain_of(profile_of([measurement([1.0] * 6)], parameter_bytes=[100] * 6))
    memory = memory_of(alike, 0, 6, 1, replicas=replicas, shard="parameters")
    assert memory.parameters_bytes == held


def test_a_stage_in_the_middle_receives_from_both_sides():
    assert memory_of(CHAIN, 1, 2, 2).buffers_bytes == 2 * (10 + 20)


def test_sixteen_bit_weights_bring_a_master_copy():
    memory = memory_of(replace(CHAIN, sixteen_bit=True), 0, 1, 1, optimizer="adam")
    assert memory.optimizer_bytes == 100 * 2 + 2 * 100 * 2


def test_frozen_parameters_are_held_once_and_one_backward_runs_at_a_time():
    """Layers 1 and 2: 500 bytes, of which 200 are frozen, 50 of them shared by both; their
    backwards take 40 and 90 bytes while they run, beside the stash that they share.
    """
    profile = profile_of(
        [measurement([1.0] * 3, output_bytes=[10, 20, 0], stash_groups=[([1, 2], 30)])],
        parameter_bytes=[100, 200, 350],
        shared=[("table", [1, 2], 50)],
    )
    chain = chain_of(with_memory_of(profile, [0, 150, 100], [900, 40, 90], ["table"]))
    assert [chain.trained_bytes(i, i + 1) for i in range(3)] == [100, 50, 250]
    assert (chain.trained_bytes(1, 3), chain.frozen_bytes(1, 3)) == (300, 200)
    assert chain.tied == []
    memory = memory_of(chain, 1, 3, 3, schedule="pipedream", microbatches=None, optimizer="adam")
    assert memory.parameters_bytes == 3 * 300 + 200
    assert (memory.gradients_bytes, memory.optimizer_bytes) == (300, 600)
    assert memory.transient_bytes == 90
    assert memory.total_bytes == 1100 + 300 + 600 + 3 * 30 + 3 * 10 + 90


@pytest.mark.parametrize("schedule, beside", [("1f1b", 60), ("zb-h1", 90)])
def test_the_stash_of_the_layers_behind_is_gone_where_a_backward_is_in_one_part(schedule, beside):
    """Layer 1 takes 90 bytes, when the 30 that layer 2 alone keeps are freed; layer 2 takes 40, and
    a stage that ends with layer 1 has nothing to free.
    """
    profile = profile_of(
        [measurement([1.0] * 3, output_bytes=[0] * 3, stash_groups=[([0, 1], 500), ([2], 30)])]
    )
    chain = chain_of(with_memory_of(profile, [0] * 3, [0, 90, 40]))
    memory = memory_of(chain, 1, 3, 3, schedule=schedule)
    assert (memory.transient_bytes, memory.activations_bytes) == (beside, 3 * 530)
    assert (
        memory_of(chain, 1, 3, 3, schedule=schedule, recompute="always").transient_bytes == beside
    )
    assert memory_of(chain, 0, 2, 3, schedule=schedule).transient_bytes == 90


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(STATE_BYTES))
@pytest.mark.parametrize(
    "schedule, M", [("pipedream", None), ("1f1b", 5), ("pipedream-2bw", None), ("zb-h1", 5)]
)
@examples(30)
@given(st.data())
def test_tables_say_what_stages_hold(schedule, M, optimizer, data):
    model = data.draw(with_memory(data.draw(chains())))
    model = replace(model, sixteen_bit=data.draw(st.booleans()))
    r, how = data.draw(st.integers(1, 4)), data.draw(trained(M))
    held, recompute = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    first = data.draw(st.none() | st.integers(1, 3))
    options = {"schedule": schedule, "microbatches": M, "optimizer": optimizer}
    options |= {"recompute": (first or "always") if recompute else "never", **how}
    options["block_bounds"] = data.draw(block_bounds(model.layers))
    stated = problem(model, topology((4, 1.0)), **options)
    table = memory_table(stated, held, r, recompute)
    for i in range(model.layers):
        for j in range(i + 1, model.layers + 1):
            formula = memory_of(model, i, j, held, replicas=r, **options)
            assert formula.total_bytes == table[i, j]
