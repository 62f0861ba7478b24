"""Both engines train what one process trains, in the order that the simulator runs."""

import json

import numpy as np
import pytest
import torch

from partopt.documents.actions import A, B, F, I, U
from partopt.errors import PartoptError
from partopt.runtime import torch_engine
from partopt.runtime.actions import actions_of
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.runtime.updates import tied_stages
from partopt.schedules import SCHEDULES, order
from partopt.schedules.placement import placement_of
from partopt.simulator import trace
from partopt.simulator.execution import execute as simulate
from tests.replay.odd_cuts import CUTS
from tests.runtime.cases import (
    RANKS,
    SLEEPING_STEPS,
    cases,
    faults,
    model_plans,
    recomputing,
    sleeping,
    trained_alone,
)
from tests.runtime.launched import outcome_of
from tests.runtime.plans import all_plans, straight
from tests.runtime.references import expected, versions_used

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in cases()}
FAULTS = faults()
SLEEPING = {case.name: case for case in sleeping()}
NOT_ON_TORCH = {"pipedream", "pipedream-2bw", "dualpipe"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank gave."""
    return outcome_of("tests.runtime.cases", tmp_path_factory)


@pytest.fixture(scope="module")
def ran(results):
    """What every rank was left with, of each engine, by case."""
    return {
        name: [list(ranks) for ranks in zip(*(each.cases[i] for each in results), strict=True)]
        for i, name in enumerate(CASES)
    }


def test_every_schedule_is_a_case_of_each_engine_that_can_run_it():
    for ranks in (2, 4):
        plans = {name: can_say(plan) for name, plan, _ in all_plans(ranks)}
        assert {name for name, reason in plans.items() if reason} == NOT_ON_TORCH
        found = {case.plan.schedule for case in CASES.values() if f" on {ranks}" in case.name}
        assert found == set(SCHEDULES)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_one_process(name, ran):
    case = CASES[name]
    weights, losses = expected(case)
    for engine in ran[name]:
        found, held = {}, set()
        for rank in engine:
            found |= rank.losses
            for s, own in rank.weights.items():
                held.add(s)
                torch.testing.assert_close(own, weights[s], rtol=1e-10, atol=1e-12)
        assert found == pytest.approx(losses, rel=1e-10)
        assert held == set(range(len(case.plan.stages)))
    assert len(ran[name]) == len(case.engines)
    for own, other in zip(ran[name][0], ran[name][-1], strict=True):
        assert other.losses == pytest.approx(own.losses, rel=1e-14)
        torch.testing.assert_close(other.weights, own.weights, rtol=1e-13, atol=1e-15)
        assert other.forwards == own.forwards


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_does_one_thing_wrongly_is_seen(name, results):
    weights, _ = expected(FAULTS[name].case)
    with pytest.raises(AssertionError, match="not close"):
        for rank in results:
            for s, own in rank.faults[name].weights.items():
                torch.testing.assert_close(own, weights[s], rtol=1e-5, atol=1e-7)


def test_versions_by_hand():
    """The stage before the last one knows of all updates but the last, and so on."""
    plan = straight("pipedream", [1, 1, 1], 0)
    used = versions_used(order(plan.schedule, placement_of(plan, 7)), plan)
    assert [[used[s, number] for number in range(7)] for s in range(3)] == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_runs_its_row_of_the_simulated_order(name, ran):
    case = CASES[name]
    orders = simulate(case.plan, case.microbatches).order
    for engine in ran[name]:
        for rank, own in enumerate(engine):
            row = range(*orders.rows[rank : rank + 2]) if rank < orders.ranks else ()
            names = [orders.name(place) for place in row if orders.kind[place] not in (A, U)]
            assert own.log == names * case.steps


@pytest.mark.parametrize("name", CASES)
def test_a_measured_execution_is_like_a_simulated_one(name, ran):
    case = CASES[name]
    right = simulate(case.plan, case.microbatches).timeline
    for number, engine in enumerate(ran[name]):
        records = [own.record for own in engine]
        for step in range(case.steps):
            given = {"microbatches": case.microbatches} if case.microbatches else {}
            measured = measured_execution(case.plan, records, step, **given)
            found = measured.timeline
            for field in ("kind", "stage", "microbatch", "source", "destination"):
                assert (getattr(found.transfers, field) == getattr(right.transfers, field)).all()
            for field in ("stage", "round"):
                own, other = getattr(found.collectives, field), getattr(right.collectives, field)
                assert (own == other).all()
            check_times(found)
            assert measured.shares.compute_s.sum() > 0
            if number:
                assert (found.end > found.start)[~np.isin(found.order.kind, (A, U))].all()
                assert (found.transfers.end > 0).all()
        json.loads(b"".join(trace.write(found, case.plan)))


def check_times(timeline):
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
        (kind == F, stage, microbatch): start
        for kind, stage, microbatch, start in rows(order.kind, order, timeline.start)
        if kind in (F, B, I)
    }
    for kind, stage, microbatch, end in rows(sent.kind, sent, sent.end):
        assert begins[kind == F, stage + 1 if kind == F else stage - 1, microbatch] >= end


def rows(kind, of, moment):
    return zip(*(each.tolist() for each in (kind, of.stage, of.microbatch, moment)), strict=True)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case.engines) > 1])
def test_messages_on_torch_are_recorded_within_their_bounds(name, ran):
    case = CASES[name]
    orders = simulate(case.plan).order
    for rank, own in enumerate(ran[name][1]):
        record = own.record
        for action in actions_of(orders, rank):
            times = record.end, record.send_posted, record.sent
            times = [each[:, action.place] for each in times]
            if action.message_out:
                assert (np.diff(times, axis=0) >= 0).all()
            else:
                assert not np.any(times[1:])
            received = record.received[:, action.place]
            assert np.array_equal(received > 0, np.full(case.steps, action.message_in is not None))
            assert (received <= record.begin[:, action.place]).all()


@pytest.mark.parametrize("name", model_plans())
def test_a_tied_gpt_trains_alike_on_both_engines_and_in_one_process(name, results):
    losses, whole = trained_alone()
    weights = {key: each.detach() for key, each in whole.named_parameters()}
    found, held = {}, set()
    for own, on_torch in (rank.models[name] for rank in results):
        found |= on_torch.losses
        torch.testing.assert_close(on_torch.losses, own.losses, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(on_torch.weights, own.weights, rtol=1e-5, atol=1e-6)
        for each in on_torch.weights.values():
            held |= each.keys()
            right = {key: weights[key] for key in each}
            torch.testing.assert_close(each, right, rtol=1e-5, atol=1e-6)
    assert held == weights.keys()
    torch.testing.assert_close([found[i] for i in sorted(found)], losses, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", CUTS)
def test_what_crosses_an_odd_cut_comes_as_it_was_sent(name, results):
    assert [rank.cuts[name] for rank in results] == [[[], []]] * RANKS


@pytest.mark.parametrize("name", SLEEPING)
def test_sleeping_stages_take_about_as_long_as_simulated(name, results):
    """The best of the steps, at its own action times; more than that is another program's load."""
    case, i = SLEEPING[name], list(SLEEPING).index(name)
    simulated = simulate(case.plan)
    for records in zip(*(rank.sleeping[i] for rank in results), strict=True):
        steps = [measured_execution(case.plan, records, step) for step in range(SLEEPING_STEPS)]
        for each in steps:
            check_times(each.timeline)
            assert each.makespan_s >= simulated.makespan_s * 0.98  # nobody wakes early
        ratio = min(each.makespan_s / with_measured_times(each).makespan_s for each in steps)
        assert 0.9 < ratio < 1.4


def test_a_plan_says_which_parameters_are_tied():
    plan = straight("1f1b", [2, 1, 1], 4, tied=((0, 2), 8))
    assert tied_stages(plan) == {"tied": [0, 2]}


def test_a_stage_that_blocks_sends_its_gradients_after_their_exchange(ran):
    case = CASES["blocking exchange"]
    orders = simulate(case.plan, case.microbatches).order
    exchanging = next(stage for stage in case.plan.stages if stage.replicas > 1)
    for rank in exchanging.ranks:
        record = ran[case.name][0][rank].record
        exchanges = np.flatnonzero(orders.kind[slice(*orders.rows[rank : rank + 2])] == A)
        assert len(exchanges)
        posted = record.send_posted[0, exchanges - 1]
        assert (posted >= record.exchanged[0, exchanges]).all()


@pytest.mark.parametrize("name", [name for name in CASES if "sharing" in name])
def test_replicas_keep_the_momentum_of_their_own_parameters_alone(name, ran):
    """A weight of 16 numbers and a bias of 4."""
    own = {1: [20], 2: [16, 4], 3: [16, 4, 0]}
    for engine in ran[name]:
        for s, stage in enumerate(CASES[name].plan.stages):
            kept = [engine[rank].state[s] for rank in sorted(stage.ranks)]
            assert kept == own[stage.replicas]


def test_ranks_of_a_host_take_turns_where_memory_is_short(results):
    def at_once(spans):
        return max(sum(a <= began < b for a, b in spans) for began, _ in spans)

    short, ample = ([each.turns[i] for each in results] for i in range(2))
    assert (at_once(short), at_once(ample)) == (2, RANKS)  # one of each host


# --- what torch's pipeline runtime cannot run -------------------------------------------------

REFUSED = {
    "unequal replicas": (straight("1f1b", [3, 1], 6), "unequal replicas: 3-1"),
    "asynchronous": (straight("pipedream", [1, 1], 6), "never flushes"),
    "two copies": (next(plan for n, plan, _ in all_plans(4) if n == "dualpipe"), "two copies"),
    "unlike pipelines": (straight("1f1b", [2, 2], 7), "different orders"),
    "recomputation apart": (recomputing(straight("gpipe", [1, 1], 4)), "no action for that"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_says_why_it_cannot_run_a_plan(name):
    plan, why = REFUSED[name]
    assert why in can_say(plan)
    with pytest.raises(PartoptError, match="torch's pipeline runtime cannot run the plan") as error:
        execute_on_torch(plan, lambda s: pytest.fail("built a stage"), context=None)
    assert error.value.code == "torch-cannot-run"


def test_an_older_torch_is_named(monkeypatch):
    plan = straight("1f1b", [1, 1], 4)
    assert can_say(plan.with_engine(waits=("1f1b",))) is None
    monkeypatch.setattr(torch_engine, "PipelineStage", lambda submodule: None)
    assert torch.__version__ in can_say(plan)
