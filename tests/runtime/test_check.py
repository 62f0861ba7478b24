"""A first step held against one process: right engines pass, and each wrong one is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from partopt import Job, solve
from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.documents.run import Check
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.runtime.check import (
    EQUAL,
    SEEN,
    Found,
    Reference,
    WholeModel,
    compare,
    used_versions,
    visible_rates,
)
from partopt.runtime.context import Context, Progress
from partopt.runtime.training import Training
from partopt.schedules import order
from tests.helpers import flat
from tests.runtime.check_cases import CASES, MODEL, RIGHT, WRONG
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight
from tests.runtime.references import versions_used


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    """What the check of each case came to."""
    found: dict[str, Check] = outcome_of("tests.runtime.check_cases", tmp_path_factory)
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_a_run_is_equal_to_one_process(name: str, checks: dict[str, Check]):
    check = checks[name]
    assert check.equal
    assert check.compared == ("gradients" if CASES[name].schedule == "1f1b" else "changes")
    assert check.parameters == (17 if CASES[name].tied else 18)  # all of the model
    assert check.loss_error < EQUAL / 10
    assert check.largest_error < EQUAL / 3


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_does_one_thing_wrongly_is_seen(name: str, checks: dict[str, Check]):
    assert not checks[name].equal
    assert checks[name].largest_error > 20 * EQUAL


def used(plan: Plan, M: int) -> list[list[int]]:
    orders = order(plan.schedule, layout_of(plan, M))
    return [used_versions(plan, orders, s, M) for s in range(len(plan.stages))]


def test_versions_of_a_pipeline():
    """The stage before the last one knows of all updates but the last, and so on."""
    assert used(straight("pipedream", [1, 1, 1], 0), 7) == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_versions_of_two_batches():
    """Batches of three: the first two have the first weights, the third those of batch 0."""
    versions = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert used(straight("pipedream-2bw", [1, 1, 1], 0), 11) == [versions] * 3


@pytest.mark.parametrize("allreduce", ["overlap", "blocking"])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2, 1], [3, 1], [1, 3, 2]])
def test_versions_of_replicas_are_those_that_a_walk_along_the_rows_finds(
    replicas: list[int], allreduce: str
):
    plan = straight("pipedream", replicas, 0).with_engine(allreduce=allreduce)
    walked = versions_used(order(plan.schedule, layout_of(plan, 13)), plan)
    found = used(plan, 13)
    assert {(s, m): found[s][m] for s, m in walked} == walked
    assert len(walked) == 13 * len(replicas)


def reference(**tensors: list[float]) -> Reference:
    made = {name: torch.tensor(each) for name, each in tensors.items()}
    return Reference({0: 2.0, 1: 4.0}, made, {name: float(t.max()) for name, t in made.items()})


class Alone(Context):
    """A process that shows what it has to nobody else, and that pickles no tensor."""

    def gather(self, value: Any) -> list[Any]:
        assert not any(isinstance(each, torch.Tensor) for each in tree_leaves(value))
        return [value]

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass


ALONE = Alone(0, 1, torch.device("cpu"), Progress())


def outcome(found: dict[int, float], **tensors: list[float]) -> Check:
    made = {(0, name): torch.tensor(each) for name, each in tensors.items()}
    expected = reference(a=[1.0, 4.0], b=[2.0])
    check = compare(Found(found, made), expected, ALONE, "changes", EQUAL)
    assert check is not None
    return check


def test_errors_are_relative_to_the_largest():
    check = outcome({0: 2.0, 1: 4.5}, a=[1.0, 3.0], b=[2.0])
    assert (check.loss_error, check.largest_error, check.worst) == (0.125, 0.25, "a")
    assert outcome({0: 2.0, 1: 4.0}, a=[1.0, 4.0], b=[2.0]).equal


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_wholly_wrong(bad: float):
    check = outcome({0: 2.0, 1: 4.0}, a=[1.0, bad], b=[2.0])
    assert (check.equal, check.largest_error, check.worst) == (False, 1.0, "a")
    assert outcome({0: bad, 1: 4.0}, a=[1.0, 4.0], b=[2.0]).loss_error == 1.0


def test_a_parameter_that_no_rank_has_is_wholly_wrong():
    check = outcome({0: 2.0, 1: 4.0}, a=[1.0, 4.0])
    assert (check.equal, check.largest_error, check.worst) == (False, 1.0, "b")


def test_a_gradient_of_zeros_is_none():
    """Sums over replicas leave zeros where one process leaves nothing."""
    assert outcome({0: 2.0, 1: 4.0}, a=[1.0, 4.0], b=[2.0], unused=[0.0]).equal
    check = outcome({0: 2.0, 1: 4.0}, a=[1.0, 4.0], b=[2.0], unused=[1e-9])
    assert (check.equal, check.largest_error, check.worst) == (False, 1.0, "unused")


def test_an_update_of_any_stage_is_seen_in_the_gradients(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    profile = measure_source(str(path), microbatch_sizes=[2], steps=1, granularity="block")
    plan = solve(Job(profile, flat(2), cuts=[2], replicas=[1, 1])).plan
    whole = WholeModel(Training(plan, find_model(str(path)), 4), torch.device("cpu"), print)
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


def gradients(whole: WholeModel) -> dict[str, torch.Tensor]:
    whole.model.zero_grad()
    whole.backward(0)
    return {name: each.grad.clone() for name, each in whole.parameters.items()}


def share(
    after: dict[str, torch.Tensor], before: dict[str, torch.Tensor], names: list[str]
) -> float:
    changed = torch.cat([(after[name] - before[name]).flatten() for name in names])
    return float(changed.norm() / torch.cat([before[name].flatten() for name in names]).norm())
