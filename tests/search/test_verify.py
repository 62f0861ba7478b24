"""A plan checked again: every plan that a planner makes holds, and none that is altered does."""

import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt import documents, planners
from partopt.cost.problem import Problem, problem_from_plan, problem_of
from partopt.documents.plan import Certificate, Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, optimal
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.search.contest import plan_alone
from partopt.search.schedule import best_by_schedule
from partopt.search.verify import claim, verify
from tests.examples import examples
from tests.helpers import chain_profile, flat, measurement, profile_of, two_level, uniform_profile

ASYNCHRONOUS = {"schedule": "pipedream", "microbatches": None}
SYNCHRONOUS = {"schedule": "1f1b", "microbatches": 6}


def failed(plan: Plan, problem: Problem) -> list[str]:
    """The checks that do not hold of a plan that was written and read again."""
    return [
        check.check
        for check in verify(Plan.parse(documents.encode(plan)), problem.profile).checks
        if not check.passed
    ]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to seven layers on up to two servers of three devices, with every option that a plan
    records.
    """
    count = draw(st.integers(2, 7))

    def drawn(*values: Any) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    sizes = measurement(
        drawn(1e-3, 2e-3, 3e-3), drawn(2e-3, 0.0, 5e-3), drawn(0, 10**6, 10**7), optimizer_s=1e-3
    )
    schedule = draw(
        st.sampled_from([ASYNCHRONOUS, SYNCHRONOUS, {"schedule": "gpipe", "microbatches": 4}])
    )
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    starts = draw(st.none() | st.sets(st.integers(1, count - 1)))
    return problem_of(
        profile_of([sizes], drawn(0, 10**6, 2 * 10**7)),
        two_level(
            3,
            draw(st.sampled_from([1, 2])),
            1e10,
            1e9,
            outer_latency=draw(st.sampled_from([0.0, 1e-3])),
            memory_bytes=10**9,
        ),
        **schedule,
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam"])),
        replication=draw(st.sampled_from(["free", "uniform", "none"])),
        serial_transfers=draw(st.booleans()),
        blocking_allreduce=schedule is ASYNCHRONOUS and draw(st.booleans()),
        memory_bytes=draw(st.sampled_from([None, 10**9, 2 * 10**8])),
        stages=draw(st.sampled_from([None, 1, 2])),
        cut_at=None if starts is None else [0, *sorted(starts)],
        costs=np.array(drawn(1.0, 2.0)) if draw(st.booleans()) else None,
    )


@examples(60)
@given(problems())
def test_the_problem_from_a_plan_is_the_problem_that_was_stated(problem):
    found = problem_from_plan(planners.plan("data_parallel", problem), problem.profile)
    assert found.topology == problem.limited_topology
    for name in (
        "schedule",
        "microbatches",
        "optimizer",
        "recompute",
        "recompute_per_stage",
        "replication",
        "tied",
        "serial_transfers",
    ):
        assert getattr(found, name) == getattr(problem, name), name
    for name in ("blocking_allreduce", "memory_bytes", "stages", "cut_at", "request"):
        assert getattr(found, name) == getattr(problem, name), name
    assert found.cell_costs().tolist() == problem.cell_costs().tolist()
    assert (found.chain.f.tolist(), found.chain.a.tolist()) == (
        problem.chain.f.tolist(),
        problem.chain.a.tolist(),
    )


@pytest.mark.filterwarnings("ignore:lingvo")
@examples(60)
@given(problems(), st.sampled_from([name for name in PLANNERS if name != "manual"]))
def test_every_plan_that_fits_and_is_as_requested_holds(problem, name):
    assume(planners.required_features(problem) <= PLANNERS[name].uses)
    try:
        plan = plan_alone(name, problem)[0]
    except PartoptError:
        return
    assert failed(plan, problem) == ([] if plan.fits else ["memory"])


def manual(**options: Any) -> tuple[Plan, Problem]:
    """Six equal layers as 2-1-1 on four devices."""
    problem = problem_of(
        uniform_profile(6),
        flat(4, 10e9, memory_bytes=10**9),
        cuts=(2, 4),
        replicas=(2, 1, 1),
        **options,
    )
    return plan_alone("manual", problem)[0], problem


def plan_of(name: str, **options: Any) -> tuple[Plan, Problem]:
    """Layers of 1 to 4 ms on two servers of two, all of whose devices every planner uses."""
    profile = chain_profile(
        [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3], output_bytes=[10**6] * 6, parameter_bytes=[10**5] * 6
    )
    problem = problem_of(profile, two_level(2, 2, memory_bytes=10**9), **options)
    return plan_alone(name, problem)[0], problem


def grid() -> tuple[Plan, Problem]:
    """The best of all schedules for eight layers."""
    problem = problem_of(uniform_profile(8), flat(4, 1e9), microbatches=8, schedule="1f1b")
    return best_by_schedule([problem])[0], problem


CASES = {
    "optimal": lambda: plan_of("optimal"),
    "optimal, an iteration": lambda: plan_of("optimal", **SYNCHRONOUS),
    "optimal, requested": lambda: plan_of(
        "optimal", stages=2, cut_at=[0, 2, 4], replication="uniform", recompute_per_stage=True
    ),
    "pipedream": lambda: plan_of("pipedream"),
    "straight": lambda: plan_of("straight", stages=4),
    "gpipe": lambda: plan_of("gpipe", stages=4, costs=np.array([1.0, 2.0, 3.0, 1.0, 1.0, 1.0])),
    "interleaved": lambda: plan_of("gpipe", schedule="interleaved", microbatches=4, chunks=1),
    "dualpipe": lambda: plan_of("gpipe", schedule="dualpipe", microbatches=8, replication="none"),
    "manual": manual,
    "a deeper warm-up": lambda: manual(blocking_allreduce=True),
    "grid": grid,
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_plan_holds(case):
    plan, problem = CASES[case]()
    assert failed(plan, problem) == []
    assert claim(plan)


def values(node: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a document and its path."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from values(value, (*here, key))
        else:
            yield (*here, key), value


def others(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [1.001 * value, 0.999 * value] if value > 1e-12 else [1e-8]
    return [f"{value}x"] if isinstance(value, str) else [1]


def altered(plan: Plan) -> Iterator[tuple[tuple[Any, ...], Plan | None]]:
    """The plan with each of its values changed in turn, `None` where it cannot be read; the version
    of its format stays.
    """
    document = json.loads(documents.encode(plan))
    for path, value in values(document):
        for other in others(value) if path != ("schema",) else []:
            changed = copy.deepcopy(document)
            node = changed
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = other
            try:
                yield path, Plan.parse(json.dumps(changed).encode())
            except PartoptError:
                yield path, None


# What a plan may say otherwise and still be right: labels, a request that it keeps to as well, and
# another cluster that it suits.
QUESTION = ("request", "topology")


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_is_altered_anywhere_does_not_hold(case):
    plan, problem = CASES[case]()
    count = 0
    for path, other in altered(plan):
        if path[0] not in QUESTION:
            assert other is None or failed(other, problem), path
            count += 1
    assert count > 100


@pytest.mark.parametrize("case", ["optimal", "optimal, an iteration", "optimal, requested"])
def test_an_altered_question_holds_only_where_its_best_answer_is_the_plans(case):
    plan, problem = CASES[case]()
    for path, other in altered(plan):
        if path[0] in QUESTION and other is not None and not failed(other, problem):
            best = plan_alone("optimal", problem_from_plan(other, problem.profile))[0]
            assert best.certificate.objective_s == pytest.approx(
                plan.certificate.objective_s, rel=1e-9
            ), path


def test_a_worse_plan_with_a_certificate_of_its_own_is_found_out():
    """Everything about it is right, but that nothing is better."""
    worse, problem = manual()
    period = worse.predicted.period_s
    boast = Certificate(
        status="optimal",
        objective_s=period,
        lower_bound_s=period,
        gap=0.0,
        proof=optimal.proof(problem, True),
    )
    plan = msgspec.structs.replace(worse, planner="optimal", certificate=boast)
    assert failed(plan, problem) == ["bound"]
    [check] = [check for check in verify(plan, problem.profile).checks if not check.passed]
    assert check.text == "there is a plan below 6.00 ms: 4"


@pytest.mark.parametrize("name", ["gpipe", "torchgpipe", "lingvo", "straight", "pipedream"])
@pytest.mark.filterwarnings("ignore:lingvo")
def test_a_quick_planners_plan_with_its_cuts_moved_is_found_out(name):
    """Its numbers are those of its own stages, and its certificate is the planner's; but these are
    not the stages that the planner chooses.
    """
    plan, problem = plan_of(name)
    cuts = [stage.start for stage in plan.stages[1:]]
    moved = next(
        other
        for other in itertools.combinations(range(1, 6), len(cuts) or 1)
        if list(other) != cuts
    )
    replicas = tuple(stage.replicas for stage in plan.stages) if cuts else (2, 2)
    own, _ = plan_alone("manual", replace(problem, cuts=moved, replicas=replicas))
    other = msgspec.structs.replace(
        own, planner=name, certificate=plan.certificate, request=plan.request
    )
    assert failed(plan, problem) == []
    assert failed(other, problem) == ["bound"]
    bound = next(check for check in verify(other, problem.profile).checks if check.check == "bound")
    assert bound.differences


@pytest.mark.parametrize("name", ["straight", "pipedream"])
def test_a_quick_planners_bound_that_is_changed_is_found_out(name):
    plan, problem = plan_of(name)
    lower = plan.certificate.lower_bound_s
    changed = msgspec.structs.replace(plan.certificate, lower_bound_s=0.9 * lower)
    assert "bound" in failed(msgspec.structs.replace(plan, certificate=changed), problem)


def test_a_bound_above_what_there_is_fails_and_a_lower_one_holds():
    plan, problem = plan_of("optimal")
    reached = plan.certificate.objective_s

    def with_bound(lower: float) -> Plan:
        gap = reached / lower - 1
        changed = msgspec.structs.replace(
            plan.certificate, lower_bound_s=lower, gap=gap, status=f"gap {100 * gap:.3g} %"
        )
        return msgspec.structs.replace(plan, certificate=changed)

    assert failed(with_bound(reached * 1.01), problem) == ["bound", "status"]
    assert failed(with_bound(reached * 0.99), problem) == []
    assert claim(with_bound(reached / 1.01)).startswith(
        "at most 1 % above the optimum within the contiguous"
    )


def leave_out_entries(monkeypatch):
    """The probe says of every answer that entries were left out for want of room."""
    find = ContiguousProbe.find
    monkeypatch.setattr(
        ContiguousProbe, "find", lambda *arguments: find(*arguments)._replace(complete=False)
    )


def test_a_gap_that_came_of_entries_without_room_holds(monkeypatch):
    leave_out_entries(monkeypatch)
    plan, problem = plan_of("optimal", replication="none")
    assert plan.certificate.status.startswith("gap ")
    assert failed(plan, problem) == []


def test_a_search_that_was_not_complete_proves_nothing(monkeypatch):
    plan, problem = plan_of("optimal", replication="none")
    leave_out_entries(monkeypatch)
    assert failed(plan, problem) == ["bound"]


@pytest.mark.parametrize("case", ["optimal", "pipedream", "gpipe", "manual"])
def test_another_profile_is_named_and_every_check_is_made_all_the_same(case):
    plan, problem = CASES[case]()
    slower = msgspec.structs.replace(problem.profile, dtype="bfloat16")
    assert failed(plan, replace(problem, profile=slower))[:2] == ["profile", "numbers"]
    checks = verify(plan, uniform_profile(3, name="three")).checks
    assert [check.check for check in checks] == [
        "profile",
        "numbers",
        "memory",
        "request",
        "objective",
        "bound",
        "status",
    ]
    assert (
        checks[1].text
        == "cannot be recomputed: a plan of chain, whose layers are not those of three"
    )


def test_every_field_that_differs_is_named_with_both_values():
    plan, problem = plan_of("optimal")
    stage = msgspec.structs.replace(plan.stages[0], warmup=plan.stages[0].warmup + 3)
    changed = msgspec.structs.replace(plan, noam=plan.noam + 1, stages=[stage, *plan.stages[1:]])
    numbers = verify(changed, problem.profile).checks[1]
    assert numbers.differences == [
        f"noam: {plan.noam + 1} recorded, {plan.noam} found",
        f"stages[0].warmup: {stage.warmup} recorded, {plan.stages[0].warmup} found",
    ]


@pytest.mark.parametrize(
    ("case", "certificate"),
    [("optimal", None), ("pipedream", None), ("manual", "boast"), ("gpipe", "boast")],
)
def test_a_certificate_that_is_missing_or_that_no_planner_gave(case, certificate):
    plan, problem = CASES[case]()
    boast = Certificate(status="optimal", objective_s=1.0, lower_bound_s=1.0, gap=0.0, proof="")
    changed = msgspec.structs.replace(plan, certificate=None if certificate is None else boast)
    assert "objective" in failed(changed, problem)
