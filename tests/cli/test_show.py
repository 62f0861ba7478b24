"""`partopt show` and `partopt topology`."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from partopt.documents import Note
from partopt.documents.files import find_shipped, shipped_names
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.job import Job
from tests.helpers import chain_profile, two_level, uniform_profile


@pytest.fixture
def plan_file(partopt, profile_file, topology_file, tmp_path):
    assert (
        partopt(
            "plan",
            profile_file(),
            "--topology",
            topology_file(),
            "--planner",
            "gpipe",
            "-o",
            tmp_path / "plan.json",
        ).code
        == 0
    )
    return str(tmp_path / "plan.json")


def test_a_profile(partopt, profile_file):
    outcome = partopt("show", profile_file())
    assert outcome.code == 0
    assert outcome.out.startswith("model    chain: 6 layers, 6 MB of parameters, float32\n")
    assert outcome.err == f"next:    partopt plan {profile_file()} --topology dgx-a100\n"


def test_a_plan(partopt, plan_file):
    outcome = partopt("show", plan_file)
    assert outcome.code == 0
    assert "plan     gpipe: 4 stages" in outcome.out
    assert outcome.err == f"next:    partopt simulate {plan_file}\n"


def test_several_files_are_pages_one_after_the_other(partopt, profile_file, plan_file):
    both = partopt("show", profile_file(), plan_file)
    pages = [partopt("show", file).out for file in (profile_file(), plan_file)]
    assert (both.code, both.out, both.err) == (0, "\n".join(pages), "")
    refused = partopt("show", plan_file, plan_file, "--json")
    assert (refused.code, refused.errors) == (2, ["--json: takes one file, not 2"])


@pytest.mark.parametrize("what_if", [[], ["--with", "waits=gpipe", "--microbatches", 40]])
def test_a_simulation_as_simulate_printed_it(partopt, plan_file, tmp_path, what_if):
    (tmp_path / "sim.json").write_text(partopt("simulate", plan_file, *what_if, "--json").out)
    shown = partopt("show", tmp_path / "sim.json")
    assert (shown.code, shown.err) == (0, "")
    printed = partopt("simulate", plan_file, *what_if).out
    # where the plan lies is not in the document
    command = rf"partopt simulate[ \\\n]+{re.escape(plan_file)}[ \\\n]+"
    assert shown.out == re.sub(command, "", printed)
    assert "ADVICE" in shown.out and "`" not in shown.out


def test_a_comparison_as_compare_printed_it(partopt, profile_file, topology_file, tmp_path):
    given = profile_file(), "--topology", topology_file(), "--planner", "gpipe"
    (tmp_path / "comparison.json").write_text(partopt("compare", *given, "--json").out)
    shown = partopt("show", tmp_path / "comparison.json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == partopt("compare", *given).out


def test_a_scaling_as_plan_printed_it(partopt, profile_file, topology_file, tmp_path):
    given = profile_file(), "--topology", topology_file(), "--planner", "gpipe", "--scaling", "2,4"
    (tmp_path / "scaling.json").write_text(partopt("plan", *given, "--json").out)
    shown = partopt("show", tmp_path / "scaling.json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == partopt("plan", *given).out


def test_a_verification_as_show_printed_it(partopt, profile_file, plan_file, tmp_path):
    verify = "show", "--verify", plan_file, "--profile", profile_file()
    (tmp_path / "verification.json").write_text(partopt(*verify, "--json").out)
    shown = partopt("show", tmp_path / "verification.json")
    assert (shown.code, shown.err) == (0, "")
    checks = [line.split()[:2] for line in shown.out.splitlines() if " ok " in line]
    assert checks == [
        line.split()[:2] for line in partopt(*verify).out.splitlines() if " ok " in line
    ]
    assert "verified: the plan is as it says" in shown.out


def test_a_document_is_printed_again(partopt, profile_file, plan_file, tmp_path):
    for written in (profile_file(), plan_file):
        assert partopt("show", written, "--json").out == Path(written).read_text()
    (tmp_path / "sim.json").write_text(partopt("simulate", plan_file, "--json").out)
    again = partopt("show", tmp_path / "sim.json", "--json")
    assert (again.out, again.err) == ((tmp_path / "sim.json").read_text(), "")


@pytest.mark.parametrize("name", shipped_names("topologies"))
def test_a_topology_as_json_is_a_topology(partopt, tmp_path, name):
    (tmp_path / "cluster.json").write_text(partopt("show", name, "--json").out)
    assert partopt("show", tmp_path / "cluster.json").out == partopt("show", name).out
    assert Topology.load(str(tmp_path / "cluster.json")) == Topology.load(name)


def test_only_plans_are_verified(partopt, profile_file, plan_file):
    assert partopt("show", "--verify", profile_file()).errors == [
        f"--verify: {profile_file()} is a profile"
    ]
    outcome = partopt("show", plan_file, "--profile", profile_file())
    assert (outcome.code, outcome.errors) == (2, ["--profile: goes with --verify or -o"])


def test_the_kinds_in_the_help_and_their_schemas(partopt):
    for kind in DOCUMENTS:
        assert kind in partopt("show", "--help").out
        assert kind in partopt("schema", "--help").out
        assert json.loads(partopt("schema", kind).out)["$ref"]
    assert partopt("schema", "plans").hints == ['did you mean "plan"?']


@pytest.mark.parametrize("name", shipped_names("topologies"))
def test_a_topology_by_its_name_or_its_file(partopt, name):
    by_name = partopt("show", name)
    assert by_name.code == 0
    assert (
        by_name.out
        == partopt("show", find_shipped(name, "topologies")).out
        == partopt("topology", "show", name).out
    )


def test_standard_input(partopt, plan_file):
    assert (
        partopt("show", "-", stdin=Path(plan_file).read_bytes()).out
        == partopt("show", plan_file).out
    )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "the file is empty"),
        (b"hello", "not a partopt document"),
        (b"[1, 2]", "not a partopt document"),
        (b"colour: blue\n", "not a partopt document"),
        (b"{}", "not a partopt document: no schema that partopt knows"),
        (b'{"schema": "partopt.trace/1", "rows": []}', "not a partopt document"),
        (b'{"schema": "partopt.comparison/1", "rows": []}', "model: missing"),
        (b'{"schema": "partopt.plan/2"}', "schema: version 2 of plan is not known"),
        (b'{"schema": "partopt.profile/1", "model"', "not JSON: input data was truncated"),
        (b"\x89PNG\r\n\x1a\n\x00", "not a partopt document"),
        (b"name: x\ncolour: blue\n", "colour: unknown key"),
    ],
)
def test_a_file_of_unknown_kind(partopt, tmp_path, content, error):
    (tmp_path / "file").write_bytes(content)
    outcome = partopt("show", tmp_path / "file")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors[0].startswith(f"{tmp_path / 'file'}: {error}")


def test_a_plan_with_its_keys_sorted_by_another_program_is_still_a_plan(
    partopt, plan_file, tmp_path
):
    (tmp_path / "sorted.json").write_text(
        json.dumps(json.loads(Path(plan_file).read_bytes()), sort_keys=True)
    )
    assert partopt("show", tmp_path / "sorted.json").out == partopt("show", plan_file).out


def test_what_is_not_there_and_what_is_a_folder(partopt, tmp_path):
    assert partopt("show", tmp_path / "x").errors == [
        f"{tmp_path / 'x'}: no such file, and no shipped profile, topology or device of that name"
    ]
    assert partopt("show", tmp_path).errors == [f"{tmp_path}: is a directory"]


def test_the_list_of_topologies(partopt):
    outcome = partopt("topology", "list")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == shipped_names("topologies")


def test_a_topology_as_a_file_to_edit(partopt):
    outcome = partopt("topology", "show", "dgx-h100", "--servers", 4, "--yaml")
    assert outcome.err == ""
    assert Topology.parse(outcome.out.encode()) == Topology.load(
        find_shipped("dgx-h100", "topologies"), 4
    )


def test_servers_change_what_is_shown(partopt, topology_file):
    assert (
        "servers-2x2: 6 x GPU"
        in partopt("topology", "show", topology_file(two_level(2, 2)), "--servers", 3).out
    )


def rows_of_layers(page: str) -> list[str]:
    return page.split("microbatch 1:\n")[1].split("\n\n")[0].splitlines()[1:]


def test_repeated_blocks_of_a_profile_are_shown_once_unless_all_are_asked_for(
    partopt, profile_file
):
    names = ["wte", *(f"h.{n}.{part}" for n in range(12) for part in ("attn", "mlp")), "head"]
    profile = chain_profile([0.5, *[0.1, 0.2] * 12, 0.3], names=names)
    folded = partopt("show", profile_file(profile)).out
    assert [row.split()[:3] for row in rows_of_layers(folded)] == [
        ["0", "wte", "Linear"],
        ["1", "h.0.attn", "x12"],
        ["2", "h.0.mlp", "x12"],
        ["25", "head", "Linear"],
    ]
    assert "--all shows each layer" in folded
    every = partopt("show", "--all", profile_file(profile)).out
    assert [row.split()[1] for row in rows_of_layers(every)] == names


def test_of_very_many_layers_the_first_and_the_last_are_shown(partopt, profile_file):
    profile = chain_profile([1 + n / 7 for n in range(1000)])
    page = partopt("show", profile_file(profile)).out
    numbers = [row.split()[0] for row in rows_of_layers(page)]
    assert numbers == [*map(str, range(75)), "..", *map(str, range(975, 1000))]
    assert "900 rows are left out; --all shows each layer" in page
    assert len(rows_of_layers(partopt("show", "--all", profile_file(profile)).out)) == 1000


def test_topologies_as_json_are_those_that_are_shown(partopt):
    listed = partopt("topology", "list", "--json").document
    assert sorted(listed) == shipped_names("topologies")
    shown = partopt("topology", "show", "dgx-h100", "--json").document
    assert shown == listed["dgx-h100"]
    assert msgspec.convert(shown, Topology) == Topology.load("dgx-h100")
    wider = partopt("topology", "show", "dgx-h100", "--servers", "4", "--json").document
    assert wider["levels"][-1]["size"] == 4
    refused = partopt("topology", "show", "dgx-h100", "--json", "--yaml")
    assert (refused.code, refused.out) == (2, "")


@pytest.mark.parametrize(("fields", "warns"), [({"known": True}, False), ({"known": "no"}, True)])
def test_no_plan_warns_of_what_a_profile_declares_as_known(
    partopt, profile_file, topology_file, fields, warns
):
    note = Note(code="short-backward", text="layer1: looked into", fields=fields)
    given = profile_file(replace(uniform_profile(6), notes=[note]))
    shown = partopt("show", given).err
    assert shown.startswith("warning: layer1" if warns else "note:    layer1: looked into\n")
    planned = partopt("plan", given, "--topology", topology_file()).err
    assert ("note:    the profile has a warning: " in planned) == warns


def test_the_first_plan_of_the_readme_asks_nothing():
    profile = Profile.load("gnmt.v100-published.float32")
    assert Job(profile, Topology.load("v100-pcie")).notes == []
    assert [note.known for note in profile.notes] == [True]
