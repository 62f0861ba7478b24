"""What stages hold, one behind the other, bounds every asynchronous plan as it is executed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.cost.iteration import objective_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem, consecutive
from partopt.cost.turns import held_s, holds_in_turns
from partopt.planners.optimal import refuters, suffixes
from partopt.search.warmup import simulate_with_best_warmup
from tests.examples import examples
from tests.planners.exhaustive import holds, nested, partitions, priced
from tests.planners.problems import chain, problem, topology
from tests.planners.test_bus import simulated_s
from tests.planners.test_optimal import clusters, stashed

SCHEDULES = ["pipedream", "pipedream-2bw"]


def plans(given: Problem) -> list[Partition]:
    """Every plan of the problem that fits with one microbatch in flight."""
    modes = (False, True) if given.recompute_per_stage else (None,)
    contiguous = [
        Partition(
            CONTIGUOUS, [Assignment(*own, mode) for own, mode in zip(stages, chosen, strict=True)]
        )
        for stages in partitions(given)
        for chosen in product(modes, repeat=len(stages))
    ]
    return [each for each in [*contiguous, *nested(given)] if holds(each, given)]


def within(T: float, every: list[Partition], given: Problem) -> bool:
    """Whether the formulas let one of the plans take T."""
    return any(objective_s(one, given) <= T and holds_in_turns(one, T, given) for one in every)


@st.composite
def problems(draw: st.DrawFn, levels: int) -> Problem:
    """Small problems of which some plans fit, with little memory."""
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    return problem(
        draw(stashed(4)),
        draw(clusters(levels=levels, devices=4, sizes=4)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        memory_bytes=draw(st.sampled_from([60, 100, 200])),
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
    )


@examples(30)
@given(problems(2), st.floats(1, 2))
def test_no_plan_is_refuted_that_the_formulas_or_the_simulator_allow(given, near):
    refutes, every = suffixes.refuter(given), plans(given)
    known = [simulated_s(given, stages) for stages in partitions(given)]
    for seconds in known:
        assert seconds is None or not refutes(seconds * (1 + 1e-9))
    least = min((objective_s(one, given) for one in every), default=0.0)
    assert not refutes(near * least) or not within(near * least, every, given)


@examples(100)
@given(problems(1), st.floats(1, 2))
def test_all_is_refuted_that_the_formulas_do_not_allow_where_links_are_alike(given, near):
    every = plans(given)
    least = min((objective_s(one, given) for one in every), default=0.0)
    assume(least > 0)
    T = near * least * (1 + 1e-9)
    assert suffixes.refuter(given)(T) != within(T, every, given)


def four(memory_bytes: int) -> Problem:
    """Four layers of 1 s and 2 s, a stage each, of which one microbatch takes a byte."""
    model = chain([1] * 4, [2] * 4, [0] * 3, [0] * 4)
    on = topology((4, 1.0))
    return problem(model, on, memory_bytes=memory_bytes, replication="none")


@pytest.mark.parametrize(("memory_bytes", "seconds"), [(3, 6.0), (4, 3.0)])
def test_stages_behind_take_whole_turns(memory_bytes, seconds):
    """A microbatch is away from the first stage for 9 s of compute, so that three in flight would
    do for a period of 4 s. But then the third stage has two in flight, and holds a microbatch for a
    round and 3 s; the second has three, and the first four.
    """
    given = four(memory_bytes)
    plan = Partition(CONTIGUOUS, consecutive(range(5)))
    assert objective_s(plan, given) == 12 / memory_bytes
    assert holds_in_turns(plan, seconds, given)
    assert not holds_in_turns(plan, seconds * (1 - 1e-9), given)
    assert simulate_with_best_warmup(priced(given, plan)).predicted.period_s == seconds
    assert refuters.bound_s(given, 3.0) == pytest.approx(seconds, rel=2e-6)


def test_a_stage_holds_for_whole_turns():
    """Rounds of 2 * 5 s, 3 s of work and room for two. One in flight lasts for a round, two for the
    second's turn at the least; three do not fit.
    """
    assert held_s(5.0, 2, 2, 3.0, 7.0) == 10
    assert held_s(5.0, 2, 2, 3.0, 8.0) == 10 + 3
    assert held_s(5.0, 2, 2, 3.0, 15.0) == 18
    assert held_s(5.0, 2, 2, 3.0, 18.0) == np.inf


def test_messages_count_there_and_back():
    """Stages of 3 s with two in flight, and messages of 2 s at 1 byte/s: the first holds one for
    3 + 2 * 2 + 3 s, which is two rounds.
    """
    given = problem(chain([1, 1], [2, 2], [2], [0, 0]), topology((2, 1.0)), memory_bytes=6)
    plan = Partition(CONTIGUOUS, consecutive(range(3)))
    assert holds_in_turns(plan, 5.0, given) and not holds_in_turns(plan, 4.99, given)


def test_problems_that_are_large_or_have_memory_or_iterations_are_not_refuted():
    given = four(3)
    assert suffixes.refuter(given)(5.9) and not suffixes.refuter(given)(6.01)
    for other in (
        replace(given, memory_bytes=None),
        replace(given, schedule="1f1b", microbatches=4),
        replace(given, topology=topology((2000, 1.0))),
    ):
        assert not suffixes.refuter(other)(1e-9)
