"""The simulations of a search say what the reference says of the same plans."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.memory import with_counts
from partopt.cost.pricing import price, under
from partopt.cost.problem import Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.entry import Counts
from partopt.schedules.placement import LOOPED, MIRRORED, STRAIGHT, VEE, ranks_of
from partopt.search.simulations import Simulations
from partopt.search.steps import step
from partopt.simulator.execution import (
    check_actions,
    execute,
    execute_pipeline,
    with_memory,
    with_prediction,
)
from partopt.simulator.runs import work_of
from partopt.simulator.steady import steady_state
from tests.examples import examples
from tests.helpers import two_level
from tests.planners.problems import block_bounds, clusters, problem, profiled, stashed, trained
from tests.search.problems import slow
from tests.simulator import reference

ONE = Counts(0, 1, 1)
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


class Case(NamedTuple):
    """A plan in parts: the problem, its stages, and their warm-ups where they are not usual."""

    problem: Problem
    partition: Partition
    warmups: list[int] | None


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """A plan of any kind under a schedule; its memory may be short, its messages handled."""
    entry, cluster = SCHEDULES[name], draw(clusters(devices=8))
    P = cluster.devices
    d = draw(st.integers(1, P))
    p = draw(st.integers(1, P // d))
    v = {STRAIGHT: 1, LOOPED: draw(st.integers(2, 3)), VEE: 2, MIRRORED: 2}[entry.shape]
    each = draw(st.integers(1, 12) | st.integers(40, 120) if entry.repeats else st.integers(1, 12))
    assume(entry.shape == STRAIGHT or not refusal(name, p, v, each))
    ranks = [tuple(own) for own in ranks_of(entry.shape, p, v, d)]
    if entry.shape == STRAIGHT and entry.uneven and draw(st.booleans()):
        order = draw(st.permutations(range(P)))
        ends = sorted(draw(st.sets(st.integers(1, P), min_size=1, max_size=p)))
        ranks = [tuple(order[i:j]) for i, j in zip([0, *ends], ends, strict=False)]
    model = draw(stashed(len(ranks) + 4, len(ranks)))
    M = None if entry.asynchronous else each * d
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    stated = problem(
        model,
        cluster,
        schedule=name,
        microbatches=M,
        chunks=v,
        recompute=recompute,
        memory_bytes=draw(st.sampled_from([None, 60, 120, 240, 480])),
        block_bounds=draw(block_bounds(model.layers)),
        **draw(trained(M)),
    )
    inside = st.integers(1, model.layers - 1) if len(ranks) > 1 else st.nothing()
    cuts = sorted(draw(st.sets(inside, min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    modes = st.booleans() if recompute == "auto" else st.none()
    stages = [
        Assignment(*bounds, own, draw(modes))
        for *bounds, own in zip([0, *cuts], [*cuts, model.layers], ranks, strict=True)
    ]
    family = "nested" if entry.shape == STRAIGHT else entry.shape
    few = st.lists(st.integers(0, 5), min_size=len(ranks), max_size=len(ranks))
    warmups = draw(st.none() | few) if entry.takes_warmup else None
    return Case(stated, Partition(family, stages), warmups)


def executed_s(case: Case) -> float:
    """Seconds of a microbatch of the plan itself by the reference; infinite where it does not fit.

    Where devices have several stages, a search counts receive buffers for one microbatch of each.
    """
    entry, limit = SCHEDULES[case.problem.schedule], case.problem.memory_bytes
    try:
        plan = price(case.partition, profiled(case.problem), "optimal")
        if case.warmups is not None:
            plan = under(plan, warmups=case.warmups)
        if entry.shape != STRAIGHT:
            stages = [with_counts(own, ONE, entry, case.problem.kept) for own in plan.stages]
            plan = structs.replace(plan, stages=stages)
        check_actions(plan)
        execution = execute(plan)
    except PartoptError:
        return math.inf
    timeline = reference.simulate(execution.order, work_of(plan))
    seconds = float(timeline.makespan) / (plan.microbatches or 1)
    if entry.asynchronous:
        seconds = steady_state(timeline, [stage.replicas for stage in plan.stages]).period_s
    if limit is None:
        return seconds
    by_order = entry.split or entry.recomputes or entry.shape != STRAIGHT
    most = max(stage.memory.total_bytes for stage in plan.stages)
    most = int(execution.peak_memory_bytes.max()) if by_order else most
    return seconds if most <= limit else math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@examples(30, suppress_health_check=SLOW)
@given(data=st.data(), share=st.floats(0.3, 1.5))
def test_a_search_simulates_what_is_executed(name, data, share):
    """It is broken off only where it takes what is allowed."""
    case = data.draw(cases(name))
    whole = Simulations(case.problem).seconds(case.partition, case.warmups)
    assert whole == pytest.approx(executed_s(case), rel=1e-12)
    if whole < math.inf:
        found = Simulations(case.problem).seconds(case.partition, case.warmups, share * whole)
        assert found in ((whole,) if share > 1 else (whole, share * whole))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_an_optimizer_step_does_not_break_a_simulation_off(name):
    """It waits for an all-reduce, beside which other devices go on."""
    stated = slow(20, two_level(4, 4, 12e9, 1.25e9), 1, schedule=name, microbatches=8)
    costs, rng, wrong = StageCosts(stated), random.Random(0), []
    shape = optimal.plans(costs)[0]
    for _ in range(200):
        shape = step(shape, costs, rng) or shape
        whole = Simulations(stated).seconds(shape.partition())
        allowed_s = rng.uniform(0.8, 1.2) * whole
        found = Simulations(stated).seconds(shape.partition(), None, allowed_s)
        wrong += [shape] if found not in (whole, min(whole, allowed_s)) else []
    assert not wrong


@st.composite
def cases_of_columns(draw: st.DrawFn, name: str) -> Case:
    """A plan whose pipelines have a server or two each, all in one order or some in another."""
    case = draw(cases(name))
    S = len(case.partition.stages)
    width, d, apart = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.booleans())
    size, servers = -(-S // 2) * width if apart else S * width, 2 if apart else 1
    cluster = two_level(size, servers * d, 50.0, draw(st.sampled_from([1.0, 5.0, 20.0])))
    place = [(s % 2) * size + s // 2 * width if apart else s * width for s in range(S)]
    ranks = [
        tuple(first + k * servers * size + r for k in range(d) for r in range(width))
        for first in place
    ]
    if draw(st.booleans()):
        s = draw(st.integers(0, S - 1))
        ranks[s] = ranks[s][width:] + ranks[s][:width]  # it meets the stages of other pipelines
    M = case.problem.microbatches and d * width * draw(st.integers(1, 12))
    stages = [
        replace(stage, ranks=group)
        for stage, group in zip(case.partition.stages, ranks, strict=True)
    ]
    stated = case.problem.with_(topology=cluster, microbatches=M, memory_bytes=None)
    return Case(stated, Partition("nested", stages), case.warmups)


STRAIGHT_ONES = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]


@pytest.mark.parametrize("name", STRAIGHT_ONES)
@examples(40, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_pipeline_that_stands_for_all_takes_what_all_take(name, data):
    case = data.draw(cases_of_columns(name))
    plan = price(case.partition, profiled(case.problem), "optimal")
    whole = alone = None
    with suppress(PartoptError):
        whole = execute(plan)
    with suppress(PartoptError):
        alone = execute_pipeline(plan)
    assert (whole is None) == (alone is None)
    if whole is None or alone is None:
        return
    event(f"pipelines: {alone.copies}")
    assert alone.period_s == pytest.approx(whole.period_s, rel=1e-11)
    of_one, of_all = (with_prediction(execution).predicted for execution in (alone, whole))
    assert of_one.bubble == pytest.approx(of_all.bubble, abs=1e-9)
    assert of_one.bound_by == of_all.bound_by
    assert [s.memory.total_bytes for s in with_memory(alone).stages] == [
        s.memory.total_bytes for s in with_memory(whole).stages
    ]
    found = Simulations(case.problem).seconds(case.partition)
    assert found == pytest.approx(whole.period_s, rel=1e-11)
