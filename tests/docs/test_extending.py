"""The worked examples of docs/extending.md, run as they are printed."""

import runpy
import sys
import tomllib
import types

import msgspec
import pytest
from msgspec import structs

from partopt import importers, planners, schedules, trainers
from partopt.cost.problem import problem_of
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.schedules.assemble import check
from partopt.schedules.order import in_flight
from partopt.schedules.placement import Placement, placement_of
from partopt.search.judging import plan_layout
from partopt.search.solve import solve
from partopt.simulator import execute, simulate_plan
from partopt.trainers.layout import read_layout
from tests.docs.documents import blocks, read
from tests.helpers import ROOT, flat, uniform_profile
from tests.trainers.models import transformer

EXTENDING = read("extending.md")
PLANNER, PLANNER_LINE, SCHEDULE, SCHEDULE_LINE, IMPORTER, TRAINER = blocks(EXTENDING, "python")
ADDED = "1f1b-patient"


def register(monkeypatch, registry, line, source):
    """Add what `line` of the page names to a registry, `source` as its module; its name."""
    [(name, entry)] = eval(f"{{{line}}}", {"Planner": planners.Planner}).items()
    module = types.ModuleType(entry.partition(":")[0] if isinstance(entry, str) else entry.module)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.builtin, name, entry)
    return name


@pytest.fixture
def even(monkeypatch):
    return register(monkeypatch, planners.PLANNERS, PLANNER_LINE, PLANNER)


@pytest.fixture
def patient(monkeypatch):
    """The schedule of the example, added by its file and its line."""
    return register(monkeypatch, schedules.SCHEDULES, SCHEDULE_LINE, SCHEDULE)


def test_the_planner_of_the_example_plans_once_it_is_registered(even):
    plan = planners.plan(even, problem_of(uniform_profile(10), flat(4)))
    assert plan.planner == "even"
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert list(plan.faults()) == []


def test_the_schedule_of_the_example_is_an_order_once_it_is_registered(patient):
    layout = Placement([[0], [1]], 2, 5)
    order = schedules.order(patient, layout)
    check(order, layout)
    first = ["0F0", "0F1", "0F2", "0F3", "0B0", "0F4", "0B1", "0B2", "0B3", "0B4", "0U"]
    assert order.names(0) == first
    assert order.names(1)[:4] == ["1F0", "1B0", "1F1", "1B1"]


def problem(patient, **options):
    return problem_of(uniform_profile(8), flat(4), schedule=patient, microbatches=16, **options)


@pytest.mark.parametrize("planner", ["gpipe", "optimal", "pipedream", "data_parallel"])
def test_plans_for_it_hold_what_its_order_holds(patient, planner):
    """In the plan, in the simulation and counted exactly, with and without a memory limit."""
    for memory_bytes in (None, 50_000_000):
        plan = simulate_plan(planners.plan(planner, problem(patient, memory_bytes=memory_bytes)))
        order = schedules.order(patient, placement_of(plan))
        peaks = in_flight(order)
        assert peaks.tolist() == execute(plan).peak_in_flight.tolist()
        for stage in plan.stages:
            assert stage.in_flight == max(peaks[stage.ranks])


def test_four_stages_hold_three_for_each_device_downstream_and_one(patient):
    plan = planners.plan("gpipe", problem(patient))
    assert [stage.in_flight for stage in plan.stages] == [10, 7, 4, 1]
    assert [stage.warmup for stage in plan.stages] == [9, 6, 3, 0]
    assert [stage.weight_versions for stage in plan.stages] == [1, 1, 1, 1]


@pytest.mark.slow
def test_the_automatic_search_tries_it(patient):
    """Each of 1f1b, 1f1b-eager and the added schedule fills and drains alike."""
    found = solve(Job(uniform_profile(8), flat(4), schedule="auto", microbatches=8))
    schedules = {plan.schedule for plan in (found.plan, *found.alternatives)}
    assert {patient, "1f1b", "zbv", "interleaved"} <= schedules


def test_the_importer_of_the_example_reads_once_it_is_registered(monkeypatch):
    starts = '"seconds": "partopt.importers'
    [line] = [each for each in EXTENDING.split("`") if each.startswith(starts)]
    name = register(monkeypatch, importers.IMPORTERS, line, IMPORTER)
    found = importers.IMPORTERS[name]("embed 1 2\nhead 0.5 1.5\n", "own.txt", "own", 4)
    assert [layer.name for layer in found.layers] == ["embed", "head"]
    assert [each.backward_s for each in found.measurements[0].layers] == [2.0, 1.5]
    assert list(found.faults()) == []
    with pytest.raises(PartoptError) as raised:
        importers.IMPORTERS[name]("embed 1\nhead 1 1\nx y z\n", "own.txt", "own", 4)
    assert [part.fields for part in raised.value.parts] == [{"line": 1}, {"line": 3}]


@pytest.mark.slow
def test_the_trainer_of_the_example_is_planned_for_written_and_read(monkeypatch):
    [line] = [each for each in EXTENDING.split("`") if each.startswith('"ours": ')]
    name = register(monkeypatch, trainers.TRAINERS, line, TRAINER)
    job = Job(transformer(8), flat(4), schedule="auto", microbatches=8)
    trainer = trainers.TRAINERS[name]
    plan = solve(job.with_(trainer=name)).plan
    assert (plan.trainer, plan.engine, plan.schedule) == (name, trainer.engine, "1f1b")
    text = trainers.export_plan(plan, name).main
    layout = read_layout(name, text, job.profile)
    stated = layout.options(job.topology)
    again = plan_layout(Job(job.profile, job.topology, microbatches=8, **stated), layout)
    assert [stage.layers for stage in again.stages] == [stage.layers for stage in plan.stages]
    assert again.layout == plan.layout
    facts = structs.asdict(trainer.engine)
    known = {fact for fact in facts if facts[fact] not in (None, msgspec.UNSET, ())}
    assert known <= trainer.sources.keys()


def test_the_entry_points_are_of_the_groups_that_are_searched():
    [text] = blocks(EXTENDING, "toml")
    points = tomllib.loads(text)["project"]["entry-points"]
    registries = schedules.SCHEDULES, planners.PLANNERS, importers.IMPORTERS, trainers.TRAINERS
    assert points.keys() == {own.group for own in registries}
    assert ADDED in points["partopt.schedules"]


@pytest.mark.slow
def test_its_rooms_are_those_whose_imports_are_held_to_the_rule():
    writer = runpy.run_path(str(ROOT / "docs/.site/rooms.py"))
    assert writer["page"]() == EXTENDING, "run python docs/.site/rooms.py"
