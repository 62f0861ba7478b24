"""`partopt compare`."""

import json

import pytest

from partopt import documents
from partopt.documents.plan import Plan
from partopt.planners import PLANNERS
from tests.helpers import chain_profile, changed, flat, two_level, uniform_profile


@pytest.fixture
def compared(partopt, profile_file, topology_file):
    return lambda *options: partopt(
        "compare", profile_file(), "--topology", topology_file(), *options
    )


@pytest.fixture
def plan_file(partopt, profile_file, topology_file, tmp_path):
    def write(content=None, cluster=None, *options):
        arguments = (
            profile_file(content or uniform_profile(6), "other.json"),
            "--topology",
            topology_file(cluster or flat(4), "other.yaml"),
        )
        assert (
            partopt(
                "plan", *arguments, "--cuts", "3", *options, "-o", tmp_path / "mine.json", "--force"
            ).code
            == 0
        )
        return str(tmp_path / "mine.json")

    return write


@pytest.mark.slow
def test_every_planner_is_compared_fastest_first(compared):
    rows = compared("--json").document["rows"]
    assert {row["planner"] for row in rows} == PLANNERS.keys() - {"manual"}
    assert [row["period_s"] for row in rows] == sorted(row["period_s"] for row in rows)


def test_json_is_one_document_and_nothing_else(compared):
    outcome = compared("--json")
    assert (outcome.code, outcome.err, outcome.document["schema"]) == (
        0,
        "",
        "partopt.comparison/1",
    )


@pytest.mark.slow
def test_the_table_ends_with_the_plan_to_make_next(compared):
    outcome = compared()
    assert outcome.code == 0
    assert outcome.out.splitlines()[0].startswith(
        "model    chain: 6 layers, microbatch 1, schedule pipedream"
    )
    assert outcome.err.strip().startswith("next:    partopt plan ")


def test_planners_are_chosen_by_name(compared):
    rows = compared("--planner", "gpipe", "--planner", "straight", "--json").document["rows"]
    assert sorted(row["planner"] for row in rows) == ["gpipe", "straight"]


@pytest.mark.slow
def test_a_planner_that_refuses_is_left_out_with_its_reason_unless_it_was_asked_for(
    compared, monkeypatch
):
    monkeypatch.setattr("partopt.planners.pipedream.LAYER_LIMIT", 5)
    outcome = compared("--json")
    assert outcome.code == 0
    assert {row["planner"] for row in outcome.document["rows"]} == PLANNERS.keys() - {
        "manual",
        "pipedream",
    }
    assert outcome.err.startswith("warning: without pipedream: pipedream: 6 layers")
    assert compared("--planner", "pipedream").code == 2


def test_an_unknown_planner(compared):
    outcome = compared("--planner", "gpip")
    assert (outcome.code, outcome.out, outcome.hints) == (2, "", ['did you mean "gpipe"?'])


def test_what_does_not_fit_is_compared_all_the_same(compared):
    outcome = compared("--memory", "1 MB", "--json")
    assert outcome.code == 0
    assert not any(row["fits"] for row in outcome.document["rows"])


def test_more_stages_than_layers(compared):
    outcome = compared("--stages", 7)
    assert (outcome.code, outcome.out, outcome.errors) == (2, "", ["7 stages for 6 layers"])


def test_ones_own_plan_is_priced_beside_the_others(compared, plan_file):
    path = plan_file()
    rows = compared("--plan", path, "--planner", "data_parallel", "--json").document["rows"]
    assert [row["planner"] for row in rows] == ["data_parallel", path]
    assert rows[1]["shape"] == "1-1"


def test_ones_own_plan_is_priced_as_when_it_was_made(compared, plan_file, topology_file):
    path = plan_file(None, flat(4, 10e9, memory_bytes=16 * 10**9), "--replicas", "2,1")
    made = Plan.load(path)
    (row,) = [
        row for row in compared("--plan", path, "--json").document["rows"] if row["planner"] == path
    ]
    assert (row["period_s"], row["peak_memory_bytes"]) == (
        made.predicted.period_s,
        made.peak_memory_bytes,
    )


def test_a_plan_of_another_model_is_refused(compared, plan_file):
    for content in (
        uniform_profile(5, name="five"),
        chain_profile([1.0] * 6, names=list("abcdef"), name="letters"),
    ):
        path = plan_file(content)
        outcome = compared("--plan", path)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.errors == [
            f"{path}: a plan of {content.model.name}, whose layers are not those of chain"
        ]


def test_a_plan_of_more_devices_is_refused(compared, plan_file):
    path = plan_file(None, flat(8), "--replicas", "4,4")
    outcome = compared("--plan", path)
    assert (outcome.code, outcome.errors) == (
        2,
        [f"{path}: a plan for 8 devices; the topology has 4"],
    )


def test_a_profile_is_no_plan(compared, profile_file):
    outcome = compared("--plan", profile_file())
    assert (outcome.code, outcome.errors) == (
        2,
        [f'{profile_file()}: schema: "partopt.profile/1" is not a partopt plan'],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster", [flat(4), two_level(2, 2), two_level(2, 4)], ids=["flat", "same", "larger"]
)
def test_a_nested_plan_is_priced_on_other_clusters(
    partopt, profile_file, topology_file, tmp_path, cluster
):
    """A pipeline in each of two servers."""
    arguments = profile_file(), "--topology", topology_file(two_level(2, 2), "nested.yaml")
    plan = partopt("plan", *arguments, "--cuts", 2, "--replicas", "2,2", "-o", "-").out.encode()
    plan = changed(plan, "stages", 0, "ranks", to=[0, 2])
    plan = changed(plan, "stages", 1, "ranks", to=[1, 3])
    (tmp_path / "nested.json").write_bytes(changed(plan, "family", to="nested"))
    outcome = partopt(
        "compare",
        profile_file(),
        "--topology",
        topology_file(cluster),
        "--plan",
        tmp_path / "nested.json",
        "--json",
    )
    assert outcome.code == 0
    assert all(row["period_s"] > 0 for row in outcome.document["rows"])


@pytest.mark.slow
def test_the_profile_is_read_from_standard_input(partopt, topology_file):
    outcome = partopt(
        "compare",
        "-",
        "--topology",
        topology_file(),
        "--json",
        stdin=documents.encode(uniform_profile(4)),
    )
    assert len(json.loads(outcome.out)["rows"]) == len(PLANNERS) - 1
