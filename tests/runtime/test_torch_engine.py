"""torch's pipeline runtime trains what one process and partopt's own engine train."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.schedules import RECV_B, RECV_F, _Action, _add_send_recv

from partopt.cost.plan import layout_of
from partopt.errors import PartoptError
from partopt.report import trace
from partopt.runtime import torch_engine
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.routes import actions_of
from partopt.runtime.torch_engine import can_say, execute_on_torch, receives_ahead
from partopt.schedules import SCHEDULES, order
from partopt.schedules.order import A, U
from partopt.schedules.torch_csv import to_csv
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
            if action.sends and not action.sends.is_local:
                assert (np.diff(times, axis=0) >= 0).all()
            else:
                assert not np.any(times[1:])
            times = [record.receive_posted, record.received, record.begin]
            times = [each[:, action.place] for each in times]
            if action.receives and not action.receives.is_local:
                assert (np.diff(times, axis=0) >= 0).all()
                waited = record.waited[:, action.place]
                assert (waited <= times[2] - times[0]).all()
                assert (waited > 0).all()
            else:
                assert not np.any(times[:2])


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


def row(text: str) -> list[_Action]:
    return [_Action.from_str(each) for each in text.split()]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"),
        (1, "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"),
        (2, "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"),
        (9, "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"),
    ],
)
def test_receives_are_posted_before_the_actions_that_need_them(ahead: int, expected: str):
    """The last stage of GPipe: torch posts each receive when the forward before it has ended."""
    assert receives_ahead(row(expected), 0) == row(expected)
    own = "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    assert receives_ahead(row(own), ahead) == row(expected)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - NOT_ON_TORCH))
def test_posting_ahead_keeps_all_but_how_early_receives_are(name: str):
    plan = next(plan for each, plan, _ in all_plans(4) if each == name)
    layout = layout_of(plan)
    lines = to_csv(order(name, layout), layout).splitlines()
    lowered = _add_send_recv(
        {rank: row(line.replace(",", " ")) for rank, line in enumerate(lines)},
        lambda s: layout.ranks[s][0],
        len(layout.ranks),
    )
    for own, ahead in itertools.product(lowered.values(), range(4)):
        found = receives_ahead(own, ahead)
        for receiving in (True, False):
            assert [a for a in found if is_receive(a) == receiving] == [
                a for a in own if is_receive(a) == receiving
            ]
        early, late = posted_before(found), posted_before(own)
        assert all(a >= b for a, b in zip(early, late, strict=True))
        assert ahead == 0 or early[0] >= min(ahead, early[-1])


def is_receive(action: _Action) -> bool:
    return action.computation_type in (RECV_F, RECV_B)


def posted_before(actions: list[_Action]) -> list[int]:
    """How many receives come before each other action."""
    counts = list(itertools.accumulate(map(is_receive, actions)))
    return [n for n, action in zip(counts, actions, strict=True) if not is_receive(action)]
