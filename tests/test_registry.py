"""Names of installed packages beside the built-in ones, from a distribution on a temporary path."""

import json

import pytest

from partopt import importers, planners, registry, schedules
from partopt.errors import PartoptError
from partopt.planners import Planner
from partopt.registry import Registry
from tests.helpers import ROOT, run_process

MODULE = """
from dataclasses import replace
from partopt.planners import Planner
from partopt.schedules.one_f_one_b import ONE_F_ONE_B

LATE = replace(ONE_F_ONE_B, name="late", summary="1F1B under another name")
EVEN = Planner("partopt_extra", "the whole model on one device")
MISNAMED = replace(ONE_F_ONE_B, name="early")


def plan(problem):
    from partopt.cost.problem import CONTIGUOUS, Decision, Partition, consecutive

    return Decision(Partition(CONTIGUOUS, consecutive([0, problem.chain.layers])))


def read(content, where, name, microbatch_size):
    raise NotImplementedError
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package that announces these entry points, by group, onto the path."""

    def put(entry_points, package="partopt-extra"):
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(MODULE.replace("partopt_extra", module))
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (about / "entry_points.txt").write_text("\n".join(lines) + "\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    for own in (schedules.SCHEDULES, planners.PLANNERS, importers.IMPORTERS):
        monkeypatch.setattr(own, "__dict__", dict(own.__dict__))
        own.__dict__.pop("installed", None)
    return put


def test_installed_names_come_after_the_built_in_ones(install):
    built_in = list(schedules.SCHEDULES)
    schedules.SCHEDULES.__dict__.pop("installed")
    install({"partopt.schedules": {"late": "partopt_extra:LATE"}})
    assert list(schedules.SCHEDULES) == [*built_in, "late"]
    assert len(schedules.SCHEDULES) == len(built_in) + 1
    assert "late" in schedules.SCHEDULES
    assert schedules.schedule("late").summary == "1F1B under another name"


def test_planners_and_importers_can_be_installed(install):
    install(
        {
            "partopt.planners": {"even": "partopt_extra:EVEN"},
            "partopt.importers": {"own": "partopt_extra:read"},
        }
    )
    assert planners.PLANNERS["even"].module == "partopt_extra"
    assert planners.PLANNERS["even"].plans_for("1f1b")
    assert not planners.PLANNERS["even"].plans_for("zbv")
    assert importers.IMPORTERS["own"].__module__ == "partopt_extra"


@pytest.mark.slow
def test_the_command_line_knows_installed_schedules_and_planners(install, tmp_path):
    install(
        {
            "partopt.planners": {"even": "partopt_extra:EVEN"},
            "partopt.schedules": {"late": "partopt_extra:LATE"},
        }
    )
    profile, plan = ROOT / "profiles/mlp.cpu.float32.json", tmp_path / "plan.json"
    on = ["--topology", "workstation-2", "--microbatches", "4", "-o", str(plan)]
    for arguments in (
        ["plan", str(profile), *on, "--planner", "even", "--schedule", "late"],
        ["simulate", str(plan)],
    ):
        done = run_process(arguments, environment={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr.decode()
    found = json.loads(plan.read_text())
    assert (found["planner"], found["layout"]["schedule"]) == ("even", "late")


def test_built_in_names_do_not_search_the_installed_packages(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("searched"))
    own = Registry("planner", Planner, planners.PLANNERS.builtin)
    assert "optimal" in own
    assert own.lookup("optimal") is own["optimal"] is planners.PLANNERS["optimal"]


def test_installed_packages_are_searched_once(monkeypatch):
    searched = []
    monkeypatch.setattr(registry, "entry_points", lambda group: searched.append(group) or [])
    own = Registry("planner", Planner, {})
    assert ("x" in own, list(own), len(own)) == (False, [], 0)
    assert searched == ["partopt.planners"]


@pytest.mark.parametrize(
    "value, why",
    [
        ("partopt_missing:LATE", "ModuleNotFoundError: No module named 'partopt_missing'"),
        ("partopt_extra:NONE", "AttributeError: module 'partopt_extra' has no attribute 'NONE'"),
        ("partopt_extra:read", "partopt_extra:read is not a Schedule"),
        ("partopt_extra:MISNAMED", 'partopt_extra:MISNAMED has the name "early"'),
    ],
)
def test_an_entry_point_that_does_not_load_is_named_with_its_package(install, value, why):
    install({"partopt.schedules": {"late": value}})
    assert schedules.schedule("1f1b").name == "1f1b"
    with pytest.raises(PartoptError) as raised:
        schedules.schedule("late")
    assert raised.value.message == f'schedule "late" of the package partopt-extra: {why}'
    assert raised.value.code == "broken-entry-point"
    assert raised.value.fields == {"name": "late", "group": "partopt.schedules"}


def test_an_installed_name_may_not_take_a_built_in_one(install):
    install({"partopt.schedules": {"1f1b": "partopt_extra:LATE"}})
    with pytest.raises(PartoptError) as raised:
        list(schedules.SCHEDULES)
    assert raised.value.message == (
        'schedule "1f1b" of the package partopt-extra: partopt has this name'
    )
    assert raised.value.code == "duplicate-entry-point"


def test_two_packages_may_not_have_one_name(install):
    install({"partopt.schedules": {"late": "partopt_extra:LATE"}})
    install({"partopt.schedules": {"late": "partopt_other:LATE"}}, "partopt-other")
    with pytest.raises(PartoptError, match=r'schedule "late" of the package partopt-\w+: the pack'):
        schedules.schedule("late")


def test_an_unknown_name_is_answered_with_the_nearest_of_all(install):
    install({"partopt.importers": {"chrome": "partopt_extra:read"}})
    with pytest.raises(PartoptError, match='unknown importer "chrom"') as raised:
        importers.IMPORTERS.lookup("chrom")
    assert raised.value.hint == 'did you mean "chrome"?'
    assert raised.value.code == "unknown-importer"
