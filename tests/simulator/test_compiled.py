"""The simulator in compiled code against the one that is written to be read."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.simulator.engine import simulate
from tests.examples import examples
from tests.simulator import reference
from tests.simulator.cases import case, cases, consecutive


def outcome(run, case):
    """Every number of a timeline by its name, or what the error says."""
    try:
        timeline = run(case.order, case.work)
    except PartoptError as error:
        return str(error)
    parts = {
        "timeline": timeline,
        "transfers": timeline.transfers,
        "collectives": timeline.collectives,
    }
    return {
        f"{name}.{field.name}": getattr(part, field.name)
        for name, part in parts.items()
        for field in fields(part)
        if isinstance(getattr(part, field.name), np.ndarray)
    }


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_compiled_simulator_is_the_reference_bit_for_bit(name):
    @examples(60)
    @given(cases([name]))
    def on(case):
        assert_same(case)

    on()


@examples(150)
@given(cases(), st.integers(0, 2**32))
def test_actions_with_factors_of_their_own_are_the_same_too(case, seed):
    count = len(case.order.kind)
    factors = np.random.default_rng(seed).lognormal(0.0, 0.3, count)
    assert_same(replace(case, work=replace(case.work, scale=factors)))


@examples(60)
@given(cases())
def test_factors_of_one_change_nothing(case):
    ones = replace(case, work=replace(case.work, scale=np.ones(len(case.order.kind))))
    plain, scaled = outcome(simulate, case), outcome(simulate, ones)
    if isinstance(plain, str):
        assert plain == scaled
    else:
        assert all(np.array_equal(found, scaled[name]) for name, found in plain.items())


def test_both_deadlock_alike():
    """PipeDream's warm-up can be too small where replicas wait for each other's gradients."""
    stuck = case("pipedream", consecutive([1, 3, 1]), 12, blocking=True)
    assert "deadlocks" in outcome(simulate, stuck)
    assert_same(stuck)


@pytest.mark.parametrize("replicas", [[8], [5, 3], [1] * 12, [3, 1, 4, 1, 5]])
def test_longer_runs_are_the_same_too(replicas):
    for blocking in (False, True):
        for serial in (False, True):
            assert_same(
                case(
                    "pipedream",
                    consecutive(replicas),
                    150,
                    cut=0.3,
                    gradient=0.7,
                    serial=serial,
                    blocking=blocking,
                )
            )
