"""torch's pipeline runtime trains what one process and partopt's own engine train."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from partopt.errors import PartoptError
from partopt.report import trace
from partopt.runtime import torch_engine
from partopt.runtime.actions import actions_of
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.schedules import SCHEDULES
from partopt.schedules.order import A, U
from partopt.simulator.execution import execute as simulate
from tests.runtime.engine_cases import SLEEPING_STEPS, Case, Ran, recomputing
from tests.runtime.launched import outcome_of
from tests.runtime.odd_cuts import CUTS
from tests.runtime.plans import all_plans, straight
from tests.runtime.references import expected
from tests.runtime.test_engine import check_times, names_of
from tests.runtime.torch_cases import (
    Results,
    Trained,
    model_plans,
    sleeping_plans,
    torch_cases,
    trained_alone,
)

CASES = torch_cases()
NOT_ON_TORCH = {"pipedream", "pipedream-2bw", "dualpipe"}
OWN, TORCH = range(2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What every rank gave."""
    found: list[Results] = outcome_of("tests.runtime.torch_cases", tmp_path_factory)
    return found


@pytest.fixture(scope="module")
def ran(results: list[Results]) -> dict[str, list[tuple[Ran, ...]]]:
    """What every rank was left with, of each engine, by case."""
    return {case.name: [rank.cases[i] for rank in results] for i, case in enumerate(CASES)}


def test_every_schedule_that_torch_can_run_is_a_case_on_2_and_4_ranks():
    for ranks in (2, 4):
        plans = {name: can_say(plan) for name, plan, _ in all_plans(ranks)}
        assert {name for name, reason in plans.items() if reason} == NOT_ON_TORCH
        found = {case.plan.schedule for case in CASES if case.name.endswith(f" on {ranks}")}
        assert found == set(SCHEDULES) - NOT_ON_TORCH


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_weights_are_those_of_one_process(case: Case, ran: dict[str, Any]):
    weights, losses = expected(case)
    found: dict[int, float] = {}
    for rank in ran[case.name]:
        found |= rank[TORCH].losses
        for s, own in rank[TORCH].weights.items():
            for weight, right in zip(own, weights[s], strict=True):
                torch.testing.assert_close(weight, right, rtol=1e-10, atol=1e-12)
    assert found == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_engines_train_the_same(case: Case, ran: dict[str, Any]):
    for own, on_torch in ran[case.name]:
        assert on_torch.losses == pytest.approx(own.losses, rel=1e-14)
        assert on_torch.weights.keys() == own.weights.keys()
        for s, weights in own.weights.items():
            torch.testing.assert_close(on_torch.weights[s], weights, rtol=1e-13, atol=1e-15)
        assert on_torch.forwards == own.forwards


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_runs_its_row_of_the_simulated_order(case: Case, ran: dict[str, Any]):
    orders = simulate(case.plan).order
    for rank, (_, own) in enumerate(ran[case.name]):
        names = [] if rank >= orders.ranks else names_of(orders, rank)
        assert own.log == names * case.steps


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_measured_execution_is_like_a_simulated_one(case: Case, ran: dict[str, Any]):
    records = [own.record for _, own in ran[case.name]]
    simulated = simulate(case.plan).timeline
    for step in range(case.steps):
        measured = measured_execution(case.plan, records, step)
        found = measured.timeline
        for name in ("kind", "stage", "microbatch", "source", "destination"):
            assert (getattr(found.transfers, name) == getattr(simulated.transfers, name)).all()
        for name in ("stage", "round"):
            assert (getattr(found.collectives, name) == getattr(simulated.collectives, name)).all()
        check_times(found)
        assert (found.end > found.start)[~np.isin(found.order.kind, (A, U))].all()
        assert (found.transfers.end > 0).all()
    json.loads(b"".join(trace.write(found, case.plan)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_messages_are_recorded_within_their_bounds(case: Case, ran: dict[str, Any]):
    for rank, (_, own) in enumerate(ran[case.name]):
        record = own.record
        for action in actions_of(simulate(case.plan).order, rank):
            times = [
                each[:, action.place] for each in (record.end, record.send_posted, record.sent)
            ]
            if action.message_out:
                assert (np.diff(times, axis=0) >= 0).all()
            else:
                assert not np.any(times[1:])
            received = record.received[:, action.place]
            assert np.array_equal(received > 0, np.full(case.steps, action.message_in is not None))
            assert (received <= record.begin[:, action.place]).all()


@pytest.mark.parametrize("name", model_plans())
def test_a_tied_gpt_trains_alike_on_both_engines_and_in_one_process(
    name: str, results: list[Results]
):
    losses, whole = trained_alone()
    weights = dict(whole.named_parameters())
    ranks: list[tuple[Trained, ...]] = [rank.models[name] for rank in results]
    found: dict[int, torch.Tensor] = {}
    held = set()
    for own, on_torch in ranks:
        found |= on_torch.losses
        torch.testing.assert_close(on_torch.losses, own.losses, rtol=1e-6, atol=0.0)
        for s, each in on_torch.weights.items():
            held |= each.keys()
            torch.testing.assert_close(each, own.weights[s], rtol=1e-5, atol=1e-6)
            for key, weight in each.items():
                torch.testing.assert_close(weight, weights[key].detach(), rtol=1e-5, atol=1e-6)
    assert held == weights.keys()
    torch.testing.assert_close([found[i] for i in sorted(found)], losses, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", CUTS)
def test_what_crosses_an_odd_cut_comes_as_it_was_sent(name: str, results: list[Results]):
    for rank in results:
        assert rank.cuts[name] == [[], []]


@pytest.mark.parametrize("i", range(len(sleeping_plans())))
def test_sleeping_stages_take_about_as_long_as_simulated(i: int, results: list[Results]):
    """No rank runs ahead; the best of the steps, at its own action times, is near the simulated."""
    plan = sleeping_plans()[i]
    records = [rank.sleeping[i] for rank in results]
    steps = [measured_execution(plan, records, step) for step in range(SLEEPING_STEPS)]
    simulated = simulate(plan)
    for each in steps:
        check_times(each.timeline)
        assert each.makespan_s >= simulated.makespan_s * 0.98
    ratio = min(each.makespan_s / with_measured_times(each).makespan_s for each in steps)
    assert 0.9 < ratio < 1.4


REFUSED = {
    "unequal replicas": (straight("1f1b", [3, 1], 6), "unequal replicas: 3-1"),
    "asynchronous": (straight("pipedream", [1, 1], 6), "never flushes"),
    "two copies": (
        next(plan for name, plan, _ in all_plans(4) if name == "dualpipe"),
        "two copies",
    ),
    "unlike pipelines": (straight("1f1b", [2, 2], 7), "different orders"),
    "recomputation apart": (recomputing(straight("gpipe", [1, 1], 4)), "no action for that"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_says_why_it_cannot_run_a_plan(name: str):
    plan, why = REFUSED[name]
    reason = can_say(plan)
    assert reason is not None
    assert why in reason
    with pytest.raises(PartoptError, match="torch's pipeline runtime cannot run the plan") as error:
        execute_on_torch(plan, lambda s: pytest.fail("built a stage"), context=None)  # type: ignore
    assert error.value.code == "torch-cannot-run"


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_engine, "PipelineStage", lambda submodule: None)
    reason = can_say(straight("1f1b", [1, 1], 4))
    assert reason is not None
    assert torch.__version__ in reason


def test_torch_runs_a_plan_whose_devices_wait():
    plan = straight("1f1b", [1, 1], 4).with_engine(waits=("1f1b",))
    assert can_say(plan) is None
