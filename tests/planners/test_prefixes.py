"""What follows on what in an iteration bounds every plan, as the simulator executes it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.iteration import iteration_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.cost.together import together_s
from partopt.planners.optimal import prefixes, refuters
from tests.examples import examples
from tests.planners.exhaustive import partitions
from tests.planners.problems import chain, problem, topology
from tests.planners.test_bus import simulated_s
from tests.planners.test_optimal import clusters, stashed
from tests.planners.test_pipelines import drawn

SCHEDULES = ["1f1b", "1f1b-eager", "gpipe", "zb-h1"]


def least_s(given: Problem) -> float:
    """The least of the formulas over all partitions that an iteration has, by exhaustive search."""
    every = [
        Partition(CONTIGUOUS, [Assignment(*stage) for stage in stages])
        for stages in partitions(given)
    ]
    M = given.microbatches
    assert M is not None
    return min(
        max(together_s(each, given), iteration_s(each, given))
        for each in every
        if all(len(stage.ranks) <= M for stage in each.stages)
    )


@examples(60)
@given(
    stashed(4),
    clusters(levels=2, devices=4, sizes=4),
    st.sampled_from(SCHEDULES),
    st.integers(1, 9),
    st.sampled_from([None, 100, 300]),
    st.sampled_from(["never", "always", "auto"]),
    st.floats(0.9, 1.1),
)
def test_no_plan_is_simulated_to_less_than_what_is_refuted(
    model, cluster, name, M, memory_bytes, recompute, near
):
    given = drawn(model, cluster, name, M, memory_bytes, recompute, "free", False)
    refutes = prefixes.refuter(given)
    every = [simulated_s(given, stages) for stages in partitions(given)]
    known = [seconds for seconds in every if seconds is not None]
    for T in (near * least_s(given), *(seconds * (1 + 1e-6) for seconds in known)):
        assert not refutes(T) or all(seconds > T for seconds in known)


@examples(60)
@given(stashed(4), st.sampled_from(SCHEDULES), st.integers(1, 9), st.booleans())
def test_what_is_refuted_is_all_below_the_least_formula_where_links_are_alike(model, name, M, bus):
    """Without messages there is one window, and prefixes are not merged."""
    free = replace(model, a=0 * model.a)
    given = problem(free, topology((4, 4.0), bus=bus), schedule=name, microbatches=M)
    refutes, least = prefixes.refuter(given), least_s(given)
    assert refutes(least * (1 - 1e-6))
    assert not refutes(least * (1 + 1e-6))


@examples(60)
@given(stashed(4), clusters(levels=1, devices=4), st.sampled_from(SCHEDULES), st.integers(1, 9))
def test_merged_prefixes_take_no_more_than_any_of_them(model, cluster, name, M):
    """With room for one each, all prefixes of the same devices and replicas are merged."""
    given = problem(replace(model, optimizer_s=3.0), cluster, schedule=name, microbatches=M)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_KEPT", 1)
        refutes = prefixes.refuter(given)
    assert not refutes(least_s(given) * (1 + 1e-6))


def test_a_merged_prefix_ends_with_the_shortest_of_their_last_stages(monkeypatch):
    """Layers before the last are cut 10-15, without a message, or 15-10, with one of 2 s. The last
    gradients come two at once to the stage before, which is why the second way is the better one.
    """
    model = chain([10, 5, 10, 40], [20, 10, 20, 80], [0, 2, 0], [500, 0, 500, 0])
    given = problem(model, topology((4, 1.0)), schedule="gpipe", microbatches=4)
    ways = [Partition(CONTIGUOUS, _on_1_1_2(cut)) for cut in (1, 2)]
    assert [together_s(way, given) for way in ways] == [345, 339]
    monkeypatch.setattr(prefixes, "_KEPT", 1)
    assert not prefixes.refuter(given)(339)


def _on_1_1_2(cut: int) -> list[Assignment]:
    """The layers before `cut`, those up to the last, and the last on two devices."""
    bounds = [(0, cut, range(1)), (cut, 3, range(1, 2)), (3, 4, range(2, 4))]
    return [Assignment(*bound) for bound in bounds]


def three(cuts: list[int], weights: list[int], **options: object) -> Problem:
    """Layers of 4 s and 8 s on three devices at 1 byte/s, three microbatches under 1F1B."""
    model = chain([4] * 3, [8] * 3, cuts, weights)
    return problem(model, topology((3, 1.0)), schedule="1f1b", microbatches=3, **options)


def straight(given: Problem) -> Partition:
    """Each layer a stage of its own."""
    return Partition(CONTIGUOUS, [Assignment(s, s + 1, range(s, s + 1)) for s in range(3)])


def test_the_first_microbatch_and_the_last_gradient_pay_for_all_messages():
    """The last stage has 36 s of its own; before and behind lie two layers and two messages."""
    given = three([1, 2], [0, 0, 0])
    assert together_s(straight(given), given) == 24 + 36 + 2 * (1 + 2)
    assert iteration_s(straight(given), given) == 24 + 36 + 2 * 2
    refutes = prefixes.refuter(replace(given, replication="none"))
    assert refutes(65.99) and not refutes(66)


def test_a_stage_updates_after_the_last_gradient_has_come_to_it():
    """Updates take 6 s in all, by parameters: those of the first stage follow the last gradient."""
    given = three([0, 0], [6, 0, 0])
    slow = replace(given, chain=replace(given.chain, optimizer_s=6.0))
    assert together_s(straight(slow), slow) == 24 + 36 + 6
    refutes = prefixes.refuter(replace(slow, replication="none"))
    assert refutes(65.99) and not refutes(66)


def test_gradients_that_come_together_wait_for_each_other():
    """One device before two with two microbatches each. The second of them begins a forward of the
    first stage later; both end with a gradient, which the first stage has to pass on in turn.
    """
    model = chain([1, 4], [2, 8], [0], [0, 0])
    given = problem(model, topology((3, 1.0)), schedule="gpipe", microbatches=4)
    plan = Partition(CONTIGUOUS, [Assignment(0, 1, range(1)), Assignment(1, 2, range(1, 3))])
    assert together_s(plan, given) == 1 + 2 * 12 + 2 * 2
    assert iteration_s(plan, given) == 1 + 2 * 12 + 2


def test_where_nothing_fits_the_bound_is_infinite():
    given = replace(three([1, 2], [6, 6, 6]), memory_bytes=1)
    assert refuters.bound_s(given, 1.0) == math.inf


def test_large_problems_and_asynchronous_schedules_are_not_refuted():
    asynchronous = problem(chain([4], [8], [], [0]), topology((3, 1.0)))
    assert not prefixes.refuter(asynchronous)(1e-9)
    large = problem(
        chain([1] * 99, [1] * 99, [0] * 98, [0] * 99),
        topology((99, 1.0)),
        schedule="1f1b",
        microbatches=99,
    )
    assert not prefixes.refuter(large)(1e-9)
