"""A first step held against one process: right engines pass, and each wrong one is seen."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from partopt.errors import PartoptError
from partopt.runtime.check import EQUAL, Reference, StepResult, compare, count_microbatches
from partopt.runtime.context import Context, Progress
from partopt.runtime.training import PlannedTraining
from tests.runtime.check_cases import CASES, RIGHT, WRONG
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """What the check of each case came to."""
    return outcome_of("tests.runtime.check_cases", tmp_path_factory)


@pytest.mark.parametrize("name", RIGHT)
def test_a_run_is_equal_to_one_process(name, checks):
    check = checks[name]
    assert check.equal
    assert check.parameters == (17 if CASES[name].tied else 18)  # all of the model
    assert check.loss_error < EQUAL / 10
    assert check.largest_error < EQUAL / 3


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_does_one_thing_wrongly_is_seen(name, checks):
    assert not checks[name].equal
    assert checks[name].largest_error > 20 * EQUAL


class Alone(Context):
    """A process that shows what it has to nobody else, and that pickles no tensor."""

    def gather(self, value):
        assert not any(isinstance(each, torch.Tensor) for each in tree_leaves(value))
        return [value]

    def broadcast(self, tensor):
        pass


def outcome(found, **tensors):
    expected = {name: torch.tensor(each) for name, each in {"a": [1.0, 4.0], "b": [2.0]}.items()}
    reference = Reference({0: 2.0, 1: 4.0}, expected)
    made = {(0, name): torch.tensor(each) for name, each in tensors.items()}
    context = Alone(0, 1, torch.device("cpu"), Progress())
    check = compare(StepResult(found, made), reference, context, EQUAL)
    return check.equal, check.loss_error, check.largest_error, check.worst


def test_errors_are_relative_to_the_largest_and_what_is_not_a_number_is_wholly_wrong():
    losses, off = {0: 2.0, 1: 4.0}, {0: 2.0, 1: 4.5}
    assert outcome(off, a=[1.0, 3.0], b=[2.0]) == (False, 0.125, 0.25, "a")
    assert outcome(losses, a=[1.0, 4.0], b=[2.0])[0]
    assert outcome(losses, a=[1.0, 4.0]) == (False, 0.0, 1.0, "b")  # no rank has it
    for bad in (math.nan, math.inf):
        assert outcome(losses, a=[1.0, bad], b=[2.0]) == (False, 0.0, 1.0, "a")
        assert outcome({0: bad, 1: 4.0}, a=[1.0, 4.0], b=[2.0])[1] == 1.0


def test_a_gradient_of_zeros_is_none():
    """Sums over replicas leave zeros where one process leaves nothing."""
    losses = {0: 2.0, 1: 4.0}
    assert outcome(losses, a=[1.0, 4.0], b=[2.0], unused=[0.0])[0]
    found = outcome(losses, a=[1.0, 4.0], b=[2.0], unused=[1e-9])
    assert found == (False, 0.0, 1.0, "unused")


def test_a_step_that_ends_no_batch_is_refused():
    plan = straight("pipedream-2bw", [2, 3], 0)
    with pytest.raises(PartoptError, match="no stage steps in so few") as raised:
        count_microbatches(PlannedTraining(plan, None, 2), None)
    assert raised.value.hint == "give at least 6"
