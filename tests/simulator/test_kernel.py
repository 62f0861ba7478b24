"""The simulator in compiled code against the one that is written to be read."""

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.simulator.kernel import simulate
from tests.examples import examples
from tests.schedules.executed import spelled
from tests.simulator import reference
from tests.simulator.cases import case, cases, consecutive


def outcome(run, case):
    """Every number of a timeline by its name, or what the error says."""
    try:
        timeline = run(case.order, case.work)
    except PartoptError as error:
        return str(error)
    parts = timeline, timeline.transfers, timeline.collectives
    found = {
        (n, field.name): getattr(part, field.name)
        for n, part in enumerate(parts)
        for field in fields(part)
    }
    return {name: each for name, each in found.items() if isinstance(each, np.ndarray)}


def assert_same(case):
    compiled, read = outcome(simulate, case), outcome(reference.simulate, case)
    assert isinstance(compiled, str) == isinstance(read, str)
    if isinstance(compiled, str):
        assert compiled == read
        return
    assert compiled.keys() == read.keys()
    for name, found in compiled.items():
        assert found.dtype == read[name].dtype, name
        assert np.array_equal(found, read[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_compiled_simulator_is_the_reference_bit_for_bit(name):
    @examples(60)
    @given(cases([name]))
    def on(case):
        assert_same(case)

    on()


@pytest.mark.slow
@examples(150)
@given(cases(), st.integers(0, 2**32))
def test_actions_with_factors_of_their_own_are_the_same_too(case, seed):
    count = len(case.order.kind)
    factors = np.random.default_rng(seed).lognormal(0.0, 0.3, count)
    assert_same(replace(case, work=replace(case.work, scale=factors)))
    ones = replace(case, work=replace(case.work, scale=np.ones(count)))
    plain, same = outcome(simulate, case), outcome(simulate, ones)
    if isinstance(plain, str):
        assert plain == same
    else:
        assert all(np.array_equal(found, same[name]) for name, found in plain.items())


STUCK = [
    ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1", "rank 0 waits at 0B1 for ever; rank 1 at 1F1 wait too"),
    ("0B0 0F0", "1F0 1B0", "rank 0 waits at 0B0 for ever; rank 1 at 1F0 wait too"),
    ("0F0 0B0", "", "rank 0 waits at 0B0 for ever"),
]


@pytest.mark.parametrize("simulator", [simulate, reference.simulate])
def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_at(simulator):
    work = case("naive", consecutive([1, 1]), 2).work
    for *rows, message in STUCK:
        with pytest.raises(PartoptError, match="deadlocks") as caught:
            simulator(spelled(*rows), work)
        assert message in str(caught.value)
        assert caught.value.hint


def test_replicas_that_wait_for_their_gradients_can_deadlock():
    """1-3-1: a replica of stage 1 waits for the others' gradients, which need forwards that stage 0
    may not begin before.
    """
    stuck = case("pipedream", consecutive([1, 3, 1]), 12, blocking=True)
    assert "1A0" in outcome(simulate, stuck)
    assert_same(stuck)
    deeper = case("pipedream", consecutive([1, 3, 1]), 12, blocking=True, warmup=[6, 1, 0])
    assert simulate(deeper.order, deeper.work).makespan > 0


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[8], [5, 3], [1] * 12, [3, 1, 4, 1, 5]])
def test_longer_runs_are_the_same_too(replicas):
    for blocking, serial in product((False, True), repeat=2):
        costs = {"cut": 0.3, "gradient": 0.7, "serial": serial, "blocking": blocking}
        assert_same(case("pipedream", consecutive(replicas), 150, **costs))
