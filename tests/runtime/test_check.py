"""A first step held against one process: right engines pass, and each wrong one is seen."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from partopt import Job, solve
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.runtime.check import (
    EQUAL,
    SEEN,
    Reference,
    StepResult,
    WholeModel,
    compare,
    used_versions,
    visible_rates,
)
from partopt.runtime.context import Context, Progress
from partopt.runtime.training import PlannedTraining
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from tests.helpers import flat
from tests.runtime.check_cases import CASES, MODEL, RIGHT, WRONG
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight
from tests.runtime.references import versions_used

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """What the check of each case came to."""
    return outcome_of("tests.runtime.check_cases", tmp_path_factory)


@pytest.mark.parametrize("name", RIGHT)
def test_a_run_is_equal_to_one_process(name, checks):
    check = checks[name]
    assert check.equal
    assert check.compared == ("gradients" if CASES[name].schedule == "1f1b" else "changes")
    assert check.parameters == (17 if CASES[name].tied else 18)  # all of the model
    assert check.loss_error < EQUAL / 10
    assert check.largest_error < EQUAL / 3


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_does_one_thing_wrongly_is_seen(name, checks):
    assert not checks[name].equal
    assert checks[name].largest_error > 20 * EQUAL


def used(plan, M):
    orders = order(plan.schedule, placement_of(plan, M))
    return [used_versions(plan, orders, s, M) for s in range(len(plan.stages))]


def test_versions_by_hand():
    """The stage before the last one knows of all updates but the last, and so on.

    Of batches of three, the first two have the first weights, the third those of batch 0.
    """
    assert used(straight("pipedream", [1, 1, 1], 0), 7) == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    versions = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert used(straight("pipedream-2bw", [1, 1, 1], 0), 11) == [versions] * 3


@pytest.mark.parametrize("allreduce", ["overlap", "blocking"])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2, 1], [3, 1], [1, 3, 2]])
def test_versions_of_replicas_are_those_that_a_walk_along_the_rows_finds(replicas, allreduce):
    plan = straight("pipedream", replicas, 0).with_engine(allreduce=allreduce)
    walked = versions_used(order(plan.schedule, placement_of(plan, 13)), plan)
    found = used(plan, 13)
    assert {(s, m): found[s][m] for s, m in walked} == walked
    assert len(walked) == 13 * len(replicas)


class Alone(Context):
    """A process that shows what it has to nobody else, and that pickles no tensor."""

    def gather(self, value):
        assert not any(isinstance(each, torch.Tensor) for each in tree_leaves(value))
        return [value]

    def broadcast(self, tensor):
        pass


def outcome(found, **tensors):
    expected = {name: torch.tensor(each) for name, each in {"a": [1.0, 4.0], "b": [2.0]}.items()}
    largest = {name: float(each.max()) for name, each in expected.items()}
    reference = Reference({0: 2.0, 1: 4.0}, expected, largest)
    made = {(0, name): torch.tensor(each) for name, each in tensors.items()}
    context = Alone(0, 1, torch.device("cpu"), Progress())
    check = compare(StepResult(found, made), reference, context, "changes", EQUAL)
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


def test_an_update_of_any_stage_is_seen_in_the_gradients(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    profile = measure_source(str(path), microbatch_sizes=[2], steps=1, granularity="block")
    plan = solve(Job(profile, flat(2), cuts=[2], replicas=[1, 1])).plan
    whole = WholeModel(PlannedTraining(plan, find_model(str(path)), 4), torch.device("cpu"), print)
    start = {name: each.detach().clone() for name, each in whole.parameters.items()}
    names = [[n for n in start if n.startswith("tokens")], [n for n in start if "tokens" not in n]]
    rates = visible_rates(whole, [*names, []])
    for name, each in whole.parameters.items():
        assert torch.equal(each, start[name])
        assert each.grad is None
    assert rates[2] == 0.0  # a stage that has nothing to learn
    for own, rate in zip(names, rates[:2], strict=True):
        before = gradients(whole)
        with torch.no_grad():
            for name in own:
                whole.parameters[name] -= rate * before[name]
        after = gradients(whole)
        seen = max(share(after, before, each) for each in names)
        assert seen == pytest.approx(SEEN / 3, rel=0.3)
        with torch.no_grad():
            for name in own:
                whole.parameters[name].copy_(start[name])


def gradients(whole):
    whole.model.zero_grad()
    whole.backward(0)
    return {name: each.grad.clone() for name, each in whole.parameters.items()}


def share(after, before, names):
    changed = torch.cat([(after[name] - before[name]).flatten() for name in names])
    return float(changed.norm() / torch.cat([before[name].flatten() for name in names]).norm())
