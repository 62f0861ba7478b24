"""A plan checked again: every plan that is made holds, and claims that are not true do not."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt import documents, planners, solve
from partopt.cost.memory import COMMUNICATOR_BYTES
from partopt.cost.problem import Problem, problem_from_plan, problem_of
from partopt.documents.engine import Engine
from partopt.documents.plan import Certificate, Plan
from partopt.documents.topology import Topology
from partopt.documents.transformer import Calibration, MeasuredBlock
from partopt.errors import PartoptError
from partopt.importers.hugging_face import find_transformer
from partopt.job import Job
from partopt.planners import PLANNERS
from partopt.schedules import SCHEDULES
from partopt.search.bound import PROOF, scope
from partopt.search.contest import Contest, contestants, plan_alone
from partopt.search.effort import SearchParams
from partopt.search.judging import plan_layout
from partopt.search.variants import Variant
from partopt.search.verify import claim, verify
from partopt.transformer.as_profile import profile_again
from tests.examples import examples
from tests.helpers import measurement, profile_of, two_level, uniform_profile
from tests.search.plans import KINDS, manual, plan_of

pytestmark = pytest.mark.any_effort

CHECKED = ["profile", "numbers", "memory", "request", "objective", "bound", "status"]
OF_CERTIFICATE = CHECKED[4:]


def failed(plan: Plan, problem: Problem) -> list[str]:
    """The checks that do not hold of a plan that was written and read again."""
    return [
        check.check
        for check in verify(Plan.parse(documents.encode(plan)), problem.profile).checks
        if not check.passed
    ]


def test_a_check_says_what_it_looked_at_and_how_long(monkeypatch):
    """Of runners-up, where there are any, nothing is computed again."""
    for kind, beside in (("manual", ""), ("grid", ", but not those of runners-up")):
        plan, problem = KINDS[kind]()
        assert bool(plan.runners_up) == bool(beside)
        seconds = itertools.accumulate(itertools.count(1))
        monkeypatch.setattr("partopt.search.verify.time.perf_counter", lambda: next(seconds))  # noqa: B023
        checks = verify(plan, problem.profile).checks
        monkeypatch.undo()
        assert [check.took_s for check in checks] == [2.0 * (n + 1) for n in range(len(checks))]
        [numbers] = [check for check in checks if check.check == "numbers"]
        assert numbers.text.endswith(f" fields, priced and simulated again{beside}")


@st.composite
def problems(
    draw: st.DrawFn, schedules: Sequence[str] = ("pipedream", "1f1b", "gpipe"), asked: bool = True
) -> Problem:
    """Up to seven layers, some of them tied, on up to two servers of three devices.

    With every option that a plan records where something is `asked`, and else with those that every
    planner looks at.
    """
    count = draw(st.integers(2, 7))

    def drawn(*values: Any) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    sizes = measurement(
        drawn(1e-3, 2e-3, 3e-3), drawn(2e-3, 0.0, 5e-3), drawn(0, 10**6, 10**7), optimizer_s=1e-3
    )
    name = draw(st.sampled_from(schedules))
    asynchronous = SCHEDULES[name].asynchronous
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    starts = draw(st.none() | st.sets(st.integers(1, count - 1)))
    tied = draw(st.sampled_from([[], [("weight", [0, count - 1], 10**6)]]))
    requested: dict[str, Any] = {
        "replication": draw(st.sampled_from(["free", "uniform", "none"])),
        "stages": draw(st.sampled_from([None, 1, 2])),
        "costs": drawn(1.0, 2.0) if draw(st.booleans()) else None,
    }
    return problem_of(
        profile_of([sizes], [size + 10**6 for size in drawn(0, 10**6, 2 * 10**7)], shared=tied),
        two_level(
            3,
            draw(st.sampled_from([1, 2])),
            1e10,
            1e9,
            outer_latency=draw(st.sampled_from([0.0, 1e-3])),
            memory_bytes=10**9,
        ),
        schedule=name,
        microbatches=None if asynchronous else draw(st.sampled_from([4, 6, 8])),
        recompute=recompute,
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam"])),
        engine=Engine(
            waits=draw(st.sampled_from([(), tuple(SCHEDULES)])),
            allreduce="blocking" if asynchronous and draw(st.booleans()) else "overlap",
        ),
        memory_bytes=draw(st.sampled_from([None, 10**9, 2 * 10**8, 10**8, 5 * 10**7])),
        tied=draw(st.sampled_from(["exchange", "together"])),
        cut_at=None if starts is None else [0, *sorted(starts)],
        **requested if asked else {},
    )


@pytest.mark.slow
@examples(60)
@given(problems())
def test_the_problem_from_a_plan_is_the_problem_that_was_stated(problem):
    found = problem_from_plan(planners.plan("data_parallel", problem), problem.profile)
    assert found.topology == problem.limited_topology
    for name in (
        "schedule",
        "microbatches",
        "optimizer",
        "engine",
        "trainer",
        "reserve",
        "shard",
        "memory_bytes",
        "request",
    ):
        assert getattr(found, name) == getattr(problem, name), name
    assert found.cell_costs().tolist() == problem.cell_costs().tolist()
    assert (found.chain.f.tolist(), found.chain.a.tolist()) == (
        problem.chain.f.tolist(),
        problem.chain.a.tolist(),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lingvo")
@examples(60)
@given(problems(), st.sampled_from([name for name in PLANNERS if name != "manual"]))
def test_every_plan_that_fits_and_is_as_requested_holds(problem, name):
    assume(planners.required_features(problem) <= PLANNERS[name].uses)
    try:
        plan = plan_alone(name, problem, SearchParams.at("quick"))[0]
    except PartoptError:
        return
    assert failed(plan, problem) == ([] if plan.fits else ["memory"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lingvo")
@examples(40)
@given(problems(list(SCHEDULES), asked=False))
def test_every_plan_under_every_schedule_holds(problem):
    try:
        plans = (
            Contest(contestants(problem), Variant(problem)).plans_at(SearchParams.at("quick")).plans
        )
    except PartoptError:
        return
    for name, plan in plans.items():
        assert failed(plan, problem) == ([] if plan.fits else ["memory"]), name


@pytest.mark.slow
@examples(40)
@given(problems(list(SCHEDULES), asked=False), st.data())
def test_every_split_of_ones_own_holds(problem, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, problem.chain.layers - 1), max_size=3)))
    size = len(cuts) + 1
    job = Job(
        problem.profile,
        problem.topology,
        planner="manual",
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        cuts=cuts,
        replicas=data.draw(
            st.none() | st.lists(st.sampled_from([1, 2]), min_size=size, max_size=size)
        ),
        memory=problem.memory_bytes,
        engine=problem.engine,
    )
    try:
        plan = plan_alone("manual", job.problem, SearchParams.at("quick"))[0]
    except PartoptError:
        return
    assert failed(plan, job.problem) == ([] if plan.fits else ["memory"])


@pytest.mark.slow
@examples(6)
@given(problems(["1f1b"], asked=False))
def test_the_best_plan_under_each_schedule_holds(problem):
    job = Job(
        problem.profile,
        problem.topology,
        schedule="auto",
        microbatches=problem.microbatches,
        memory=problem.memory_bytes,
        recompute=problem.request.recompute,
        tied=problem.request.tied,
        engine=problem.engine,
    )
    try:
        found = solve(job)
    except PartoptError:
        return
    for plan in (found.plan, *found.alternatives):
        assert failed(plan, problem) == ([] if plan.fits else ["memory"]), plan.schedule


def test_a_certificate_of_what_proves_nothing_fails():
    plan, problem = KINDS["manual"]()
    other, _ = KINDS["pipedream"]()
    assert plan.certificate is None and other.certificate is not None
    claimed = msgspec.structs.replace(plan, certificate=other.certificate)
    [status] = [row for row in verify(claimed, problem.profile).checks if row.check == "status"]
    text = "nothing is proved of this plan, and it has a certificate"
    assert (status.passed, status.text) == (False, text)


def test_what_is_verified_says_whether_times_were_estimated():
    """Of a transformer they are not where its block was measured."""
    asked = Job(
        model=find_transformer("llama3-8b"),
        topology=Topology.load("dgx-h100", 1),
        trainer="megatron",
        global_batch=16,
        sequence=2048,
    )
    plan = plan_layout(asked)
    profile = profile_again(plan)
    assert verify(plan, profile).estimated == plan.profile.estimated is not None
    block = MeasuredBlock(microbatch_size=1, forward_s=1e-3, backward_s=2e-3)
    measured = Calibration(name="block", sha256="0" * 64, blocks=[block])
    about = msgspec.structs.replace(plan.transformer, calibration=[measured])
    plan = msgspec.structs.replace(plan, transformer=about)
    assert verify(plan, profile).estimated is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_holds(kind):
    plan, problem = KINDS[kind]()
    assert failed(plan, problem) == []
    assert claim(plan)


@pytest.mark.slow
def test_the_kinds_are_what_they_say():
    made = {kind: make() for kind, make in KINDS.items()}
    plans = {kind: plan for kind, (plan, _) in made.items()}
    assert plans["optimal, nested"].family == "nested"
    assert plans["optimal, nested"].certificate.gap > 0.01
    simulated, _ = made["optimal, an iteration"]
    assert simulated.predicted.iteration_s is not None
    assert len({stage.recompute for stage in plans["optimal, some recompute"].stages}) == 2
    assert any(stage.tied_exchange_s for stage in plans["optimal, tied"].stages)
    deeper = plans["a deeper warm-up"].predicted
    assert deeper.formula_period_s > deeper.period_s
    assert {plans[kind].planner for kind in ("grid", "grid, chunks")} == {"grid"}
    assert plans["grid, chunks"].family == "looped"


SPLIT = {"cuts": None, "replicas": None}
RUNNER_UP = {"planner": "gpipe", "schedule": "1f1b", "microbatch_size": 3, "shape": "1-1"}
RUNNER_UP |= {"period_s": 2.0, "samples_per_s": 1.5, "peak_memory_bytes": 7, "fits": True}
CONTRADICTIONS = [  # of a split by hand of four ranks into 2-1-1, and the checks that fail
    ({"request": {"cut_at": [0, 4]}}, ["request"]),
    ({"request": {"recompute": "always"}}, ["numbers"]),
    ({"request": {"cuts": None}}, ["numbers"]),
    ({"request": {"replicas": None}}, ["numbers"]),
    ({"request": {"cuts": [2, 5]}}, ["numbers"]),
    ({"request": {"replicas": [1, 1, 1]}}, ["numbers"]),
    ({"request": SPLIT}, ["numbers"]),
    ({"planner": "gpipe"}, ["numbers", "bound"]),
    ({"planner": "grid"}, ["numbers"]),
    *(
        ({"planner": "optimal", "request": SPLIT | request}, ["request", *OF_CERTIFICATE])
        for request in ({"stages": 2}, {"replication": "uniform"}, {"replication": "none"})
    ),
    ({"family": "nested"}, CHECKED[1:4]),
    ({"reserve": {"size_bytes": 5, "basis": "none"}}, ["memory"]),
    ({"reserve": {"size_bytes": 5, "basis": "given"}}, ["memory"]),
    ({"runners_up": [RUNNER_UP]}, []),
    ({"runners_up": [RUNNER_UP | {"samples_per_s": 1.6}]}, ["numbers"]),
    ({"runners_up": [RUNNER_UP | {"fits": False}]}, ["numbers"]),
    ({"runners_up": [RUNNER_UP | {"peak_memory_bytes": 10**9 + 1}]}, ["numbers"]),
    ({"stages": {"frozen_bytes": 2 * 10**6 + 1}}, ["numbers"]),
    ({"stages": {"compute_s": 6e-3 * (1 + 1e-12)}}, []),
    ({"stages": {"compute_s": 6e-3 * (1 + 1e-4)}}, ["numbers"]),
]


@pytest.mark.parametrize(("changes", "checks"), CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_is_found_out(changes, checks):
    plan, problem = manual()
    document = json.loads(documents.encode(plan))
    for name, value in changes.items():
        place = document["stages"][0] if name == "stages" else document.get(name)
        if isinstance(place, dict):
            place |= value
        else:
            document[name] = value
    changed = Plan.parse(json.dumps(document).encode())
    assert failed(changed, problem) == checks


def test_a_worse_plan_with_a_certificate_of_its_own_is_found_out():
    """Everything about it is right, but that nothing is better."""
    worse, problem = manual()
    period = worse.predicted.period_s
    boast = Certificate(
        status="optimal",
        objective_s=period,
        lower_bound_s=period,
        gap=0.0,
        scope=scope(problem),
        proof=PROOF,
    )
    request = msgspec.structs.replace(worse.request, cuts=None, replicas=None)
    plan = msgspec.structs.replace(worse, planner="optimal", certificate=boast, request=request)
    assert failed(plan, problem) == ["bound"]
    [check] = [check for check in verify(plan, problem.profile).checks if not check.passed]
    assert check.text == "another bound is found"


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
    stated = problem.with_(cuts=moved, replicas=replicas)
    own, _ = plan_alone("manual", stated, SearchParams.at("quick"))
    other = msgspec.structs.replace(
        own, planner=name, certificate=plan.certificate, request=plan.request
    )
    assert failed(plan, problem) == []
    assert failed(other, problem) == ["bound"]
    bound = next(check for check in verify(other, problem.profile).checks if check.check == "bound")
    assert bound.differences


def test_a_quick_planners_bound_that_is_changed_is_found_out():
    plan, problem = plan_of("pipedream")
    lower = plan.certificate.lower_bound_s
    changed = msgspec.structs.replace(plan.certificate, lower_bound_s=0.9 * lower)
    assert "bound" in failed(msgspec.structs.replace(plan, certificate=changed), problem)


def test_a_bound_above_what_there_is_fails_and_a_lower_one_holds():
    plan, problem = plan_of("optimal")
    reached = plan.certificate.objective_s

    def with_bound(lower: float) -> Plan:
        gap = reached / lower - 1
        changed = msgspec.structs.replace(
            plan.certificate,
            lower_bound_s=lower,
            gap=gap,
            status=f"no plan is more than {100 * gap:.3g} % faster",
        )
        return msgspec.structs.replace(plan, certificate=changed)

    assert failed(with_bound(reached * 1.01), problem) == ["bound", "status"]
    assert failed(with_bound(reached * 0.99), problem) == []
    assert claim(with_bound(reached / 1.01)).startswith(
        "no plan is more than 1 % faster, among plans under"
    )


@pytest.mark.parametrize("kind", ["optimal", "pipedream", "gpipe", "manual"])
def test_another_profile_is_named_and_every_check_is_made_all_the_same(kind):
    plan, problem = KINDS[kind]()
    slower = msgspec.structs.replace(problem.profile, dtype="bfloat16")
    assert failed(plan, replace(problem, profile=slower))[:2] == ["profile", "numbers"]
    checks = verify(plan, uniform_profile(3, name="three")).checks
    assert [check.check for check in checks] == CHECKED
    assert (
        checks[1].text
        == "cannot be recomputed: a plan of chain, whose layers are not those of three"
    )


def test_every_field_that_differs_is_named_with_both_values():
    plan, problem = plan_of("optimal")
    stage = msgspec.structs.replace(plan.stages[0], in_flight=plan.stages[0].in_flight + 3)
    changed = msgspec.structs.replace(plan, noam=plan.noam + 1, stages=[stage, *plan.stages[1:]])
    numbers = verify(changed, problem.profile).checks[1]
    assert numbers.differences == [
        f"noam: {plan.noam + 1} recorded, {plan.noam} found",
        f"stages[0].in_flight: {stage.in_flight} recorded, {plan.stages[0].in_flight} found",
    ]


@pytest.mark.parametrize(
    ("kind", "certificate"),
    [("optimal", None), ("pipedream", None), ("manual", "boast"), ("gpipe", "boast")],
)
def test_a_certificate_that_is_missing_or_that_no_planner_gave(kind, certificate):
    plan, problem = KINDS[kind]()
    boast = Certificate(
        status="optimal", objective_s=1.0, lower_bound_s=1.0, gap=0.0, scope="", proof=""
    )
    changed = msgspec.structs.replace(plan, certificate=None if certificate is None else boast)
    assert "objective" in failed(changed, problem)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_an_assumed_reserve_is_found_again_and_another_is_not(schedule):
    """1 GB, communicators, and 3 % of the whole device, not of what is left."""
    profile = profile_of([measurement([1.0] * 4, [2.0] * 4)], [10**6] * 4)
    gpu = msgspec.structs.replace(profile.device, type="cuda")
    profile = msgspec.structs.replace(profile, device=gpu)
    M = None if schedule == "pipedream" else 4
    cluster = two_level(2, 1, 1e9, 1e9, memory_bytes=40 * 10**9)
    job = Job(profile, cluster, schedule=schedule, microbatches=M)
    plan = solve(job).plan
    assert (plan.reserve.basis, plan.reserve.size_bytes) == (
        "assumed",
        2_200_000_000 + COMMUNICATOR_BYTES,
    )
    assert failed(plan, job.problem) == []
    (memory,) = (row for row in verify(plan, profile).checks if row.check == "memory")
    assert memory.text.endswith("of 35.3 GB on the fullest device, 4.72 GB reserved")
    less = msgspec.structs.replace(plan.reserve, size_bytes=4_650_000_000)
    assert "memory" in failed(msgspec.structs.replace(plan, reserve=less), job.problem)
