"""The engine trains what one process trains, in the order that the simulator runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from partopt.documents.plan import Plan
from partopt.report import trace
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.updates import tied_stages
from partopt.schedules import SCHEDULES
from partopt.schedules.order import A, B, F, I, Order, U
from partopt.simulator.execution import execute as simulate
from partopt.simulator.timeline import Timeline
from tests.runtime.engine_cases import RANKS, SLEEPING_STEPS, Case, Ran, cases, sleeping
from tests.runtime.launched import outcome_of
from tests.runtime.plans import straight
from tests.runtime.references import expected

CASES = cases()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What every rank gave."""
    found: list[Any] = outcome_of("tests.runtime.engine_cases", tmp_path_factory)
    return found


@pytest.fixture(scope="module")
def ran(results: list[Any]) -> dict[str, list[Ran]]:
    """What every rank was left with, by case."""
    return {case.name: [cases[i] for cases, *_ in results] for i, case in enumerate(CASES)}


def test_every_schedule_is_a_case():
    assert {case.plan.schedule for case in CASES} == set(SCHEDULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_weights_are_those_of_one_process(case: Case, ran: dict[str, list[Ran]]):
    weights, losses = expected(case)
    found: dict[int, float] = {}
    for rank in ran[case.name]:
        found |= rank.losses
        for s, own in rank.weights.items():
            for weight, right in zip(own, weights[s], strict=True):
                torch.testing.assert_close(weight, right, rtol=1e-10, atol=1e-12)
    assert found == pytest.approx(losses, rel=1e-10)
    held = {s for rank in ran[case.name] for s in rank.weights}
    assert held == set(range(len(case.plan.stages)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_runs_its_row_of_the_simulated_order(case: Case, ran: dict[str, list[Ran]]):
    orders = simulate(case.plan, case.microbatches).order
    for rank, own in enumerate(ran[case.name]):
        names = [] if rank >= orders.ranks else names_of(orders, rank)
        assert own.log == names * case.steps


def names_of(orders: Order, rank: int) -> list[str]:
    """What the stages of a rank are told to run."""
    places = range(orders.rows[rank], orders.rows[rank + 1])
    return [orders.name(place) for place in places if orders.kind[place] not in (A, U)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_measured_execution_is_like_a_simulated_one(case: Case, ran: dict[str, list[Ran]]):
    records = [own.record for own in ran[case.name]]
    measured = measured_execution(case.plan, records, microbatches=case.microbatches)
    simulated = simulate(case.plan, case.microbatches)
    found, right = measured.timeline, simulated.timeline
    for name in ("kind", "stage", "microbatch", "source", "destination"):
        assert (getattr(found.transfers, name) == getattr(right.transfers, name)).all()
    for name in ("stage", "round"):
        assert (getattr(found.collectives, name) == getattr(right.collectives, name)).all()
    check_times(found)
    json.loads(b"".join(trace.write(found, case.plan)))
    assert measured.shares.compute_s.sum() > 0


def check_times(timeline: Timeline) -> None:
    """Nothing ends before it begins, and no action begins before its message is there."""
    order, sent = timeline.order, timeline.transfers
    assert (timeline.start >= 0).all()
    assert (timeline.end >= timeline.start).all()
    inside = np.ones(len(order.kind), dtype=bool)
    inside[order.rows[:-1][np.diff(order.rows) > 0]] = False
    assert (timeline.start[1:] >= timeline.end[:-1])[inside[1:]].all()
    assert (sent.end >= sent.start).all()
    assert (timeline.collectives.end >= timeline.collectives.start).all()
    begins = {
        (int(order.kind[place]) == F, int(order.stage[place]), int(order.microbatch[place])): start
        for place, start in enumerate(timeline.start.tolist())
        if order.kind[place] in (F, B, I)
    }
    for kind, stage, microbatch, end in zip(
        sent.kind.tolist(), sent.stage.tolist(), sent.microbatch.tolist(), sent.end, strict=True
    ):
        receiver = stage + 1 if kind == F else stage - 1
        assert begins[kind == F, receiver, microbatch] >= end


@pytest.mark.parametrize(
    ("i", "plan"), list(enumerate(sleeping())), ids=[plan.schedule for plan in sleeping()]
)
def test_sleeping_stages_take_about_as_long_as_simulated(i: int, plan: Plan, results: list[Any]):
    """The best of the steps, at its own action times; more than that is another program's load."""
    records = [sleeping_records[i] for _, sleeping_records, _ in results]
    steps = [measured_execution(plan, records, step) for step in range(SLEEPING_STEPS)]
    ratio = min(each.makespan_s / with_measured_times(each).makespan_s for each in steps)
    assert 0.9 < ratio < 1.4
    simulated = simulate(plan)
    for each in steps:  # nobody wakes early
        assert each.makespan_s >= simulated.makespan_s * 0.98


def test_a_plan_says_which_parameters_are_tied():
    plan = straight("1f1b", [2, 1, 1], 4, tied=((0, 2), 8))
    assert tied_stages(plan) == {"tied": [0, 2]}


def test_a_stage_that_blocks_sends_its_gradients_after_their_exchange(ran: dict[str, list[Ran]]):
    case = next(case for case in CASES if case.name == "blocking exchange")
    orders = simulate(case.plan, case.microbatches).order
    exchanging = next(s for s, stage in enumerate(case.plan.stages) if stage.replicas > 1)
    for rank in case.plan.stages[exchanging].ranks:
        record = ran[case.name][rank].record
        kinds = orders.kind[orders.rows[rank] : orders.rows[rank + 1]]
        exchanges = np.flatnonzero(kinds == A)
        assert len(exchanges)
        posted = record.send_posted[0, exchanges - 1]
        assert (posted >= record.exchanged[0, exchanges]).all()


@pytest.mark.parametrize("case", [c for c in CASES if "sharing" in c.name], ids=lambda c: c.name)
def test_replicas_keep_the_momentum_of_their_own_parameters_alone(
    case: Case, ran: dict[str, list[Ran]]
):
    """A weight of 16 numbers and a bias of 4."""
    own = {1: [20], 2: [16, 4], 3: [16, 4, 0]}
    for s, stage in enumerate(case.plan.stages):
        kept = [ran[case.name][rank].state[s] for rank in sorted(stage.ranks)]
        assert kept == own[stage.replicas]


def test_ranks_of_a_host_take_turns_where_memory_is_short(results: list[Any]):
    short, ample = ([each[2][case] for each in results] for case in range(2))
    assert len(_at_once(short)) == 2  # one of each host
    assert len(_at_once(ample)) == RANKS


def _at_once(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most of these spans of time that have a moment in common."""
    return max(
        ([span for span in spans if span[0] <= began < span[1]] for began, _ in spans), key=len
    )
