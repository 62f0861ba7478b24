"""`-o` of every command writes what the suffix says, or refuses before anything is read."""

import re

import pytest

ON = "--topology", "v100-pcie"
COMMANDS = {
    "plan": (["plan", "no.json", *ON], ".json"),
    "plan --scaling": (["plan", "no.json", *ON, "--scaling", "2"], ".json, .svg, .pdf, .png"),
    "compare": (["compare", "no.json", *ON], ".json, .svg, .pdf, .png"),
    "simulate": (["simulate", "no.json"], ".json (trace for Perfetto)"),
    "schedule": (["schedule", "1f1b"], ".json (trace for Perfetto)"),
    "report": (["report", "no.json"], ".html"),
    "run": (["run", "no.json", "no.py"], ".json"),
    "show": (["show", "no.json"], ".svg, .pdf, .png"),
    "import pipedream": (["import", "pipedream", "no.txt"], ".json"),
    "import torch-profile": (["import", "torch-profile", "no.json"], ".json"),
    "import vllm": (["import", "vllm", "1,1", "--profile", "no.json", *ON], ".json"),
    "profile": (["profile", "no.py"], ".json"),
    "topology measure": (["topology", "measure"], ".yaml, .yml"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_another_suffix_is_refused_and_the_hint_names_those_that_work(partopt, tmp_path, name):
    arguments, forms = COMMANDS[name]
    path = tmp_path / "t.gif"
    outcome = partopt(*arguments, "-o", path)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors == [f"{path}: unsupported format .gif"]
    assert outcome.hints[0].startswith(f"choose {forms}")
    assert not path.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_is_there_is_refused_before_anything_is_read(partopt, tmp_path, name):
    arguments, forms = COMMANDS[name]
    for form in re.findall(r"\.\w+", forms):
        path = tmp_path / f"t{form}"
        path.write_text("mine")
        outcome = partopt(*arguments, "-o", path)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.errors == [f"{path}: already exists"]
        assert path.read_text() == "mine"


def test_an_export_has_the_suffix_of_its_trainer(partopt, plan_file, tmp_path):
    path = tmp_path / "t.svg"
    outcome = partopt("export", plan_file(), "--to", "flows", "-o", path)
    assert (outcome.code, outcome.errors) == (2, [f"{path}: unsupported format .svg"])
    assert outcome.hints == ["choose .csv, .json"]
    assert not path.exists()


def test_a_plan_in_a_picture_is_refused(partopt, profile_file, topology_file, tmp_path):
    path = tmp_path / "t.svg"
    outcome = partopt("plan", profile_file(), "--topology", topology_file(), "-o", path)
    assert (outcome.code, outcome.hints) == (2, ["choose .json"])
    assert not path.exists()


def test_every_command_with_an_output_is_here():
    from partopt import cli

    names = {name.split()[0] for name in COMMANDS} | {"export"}
    assert names == cli.VERBS.keys() - {"doctor", "schema", "trainer"}
