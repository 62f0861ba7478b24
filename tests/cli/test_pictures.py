"""`-o FILE.svg` and `--picture`: what is drawn from the command line, and what is refused."""

import pytest

import partopt as po
from partopt import documents
from tests.helpers import uniform_profile
from tests.report.pictures import cases


def svg(path):
    content = path.read_bytes()
    assert content.startswith(b"<?xml") and b"<desc>" in content
    return content.decode()


@pytest.fixture
def plan_file(partopt, profile_file, topology_file, tmp_path):
    given = ["--topology", topology_file(), "--planner", "gpipe", "-o", tmp_path / "plan.json"]
    assert partopt("plan", profile_file(), *given).code == 0
    return str(tmp_path / "plan.json")


def test_a_profile_is_drawn(partopt, tmp_path):
    outcome = partopt("show", "gpt.cpu.float32", "-o", tmp_path / "a.svg")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"Wrote {tmp_path / 'a.svg'}\n"
    assert "tokens" in svg(tmp_path / "a.svg")


@pytest.mark.slow
def test_a_plan_is_drawn_with_the_layers_of_its_profile(partopt, plan_file, profile_file, tmp_path):
    without = partopt("show", plan_file, "-o", tmp_path / "a.svg")
    assert without.code == 0 and "without their layers: add --profile" in without.err
    profile = profile_file()
    assert partopt("show", plan_file, "--profile", profile, "-o", tmp_path / "b.svg").code == 0
    assert len(svg(tmp_path / "b.svg")) > len(svg(tmp_path / "a.svg"))
    other = partopt("show", plan_file, "--profile", "mlp.cpu.float32", "-o", tmp_path / "c.svg")
    assert other.code == 2
    assert "give the plan's own --profile, or none" in other.err
    assert not (tmp_path / "c.svg").exists()


@pytest.mark.slow
def test_a_plan_of_a_shipped_profile_needs_nobody_to_say_which(partopt, tmp_path):
    plan = tmp_path / "plan.json"
    given = ["--topology", "v100-pcie", "--planner", "gpipe", "-o", plan]
    written = partopt("plan", "gpt.cpu.float32", *given, "--picture", tmp_path / "b.svg")
    assert written.code == 0
    assert f"Wrote {plan}\nWrote {tmp_path / 'b.svg'}\n" in written.err
    shown = partopt("show", plan, "-o", tmp_path / "a.svg")
    assert shown.err == f"Wrote {tmp_path / 'a.svg'}\n"
    # what is written beside the plan has its runners-up, too
    assert "memory of the fullest device" not in svg(tmp_path / "a.svg")
    assert "memory of the fullest device" in svg(tmp_path / "b.svg")


@pytest.mark.parametrize("case", ["comparison", "scaling", "run"])
def test_the_other_documents_are_drawn(partopt, tmp_path, case):
    made = {
        "comparison": lambda: cases.comparison(3),
        "scaling": lambda: cases.scaling([1, 2]),
        "run": lambda: cases.run(2),
    }
    # names with control characters are refused where documents are read
    content = documents.encode(made[case]()).replace(b"\\u001b", b"")
    (tmp_path / "a.json").write_bytes(content)
    assert partopt("show", tmp_path / "a.json", "-o", tmp_path / "a.svg").code == 0
    svg(tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["dgx-h100", "h100"])
def test_what_has_no_picture_is_refused(partopt, tmp_path, name):
    outcome = partopt("show", name, "-o", tmp_path / "a.svg")
    assert outcome.code == 2
    assert "has no picture\nhint:  these have one: profile, plan, comparison" in outcome.err
    assert not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        (["-o", "a.txt"], "a.txt: unsupported format .txt"),
        (["-o", "-"], "-: unsupported format without an extension"),
        (["-o", "a.svg", "--json"], "-o: draws one document, without --json"),
        (["-o", "a.svg", "--verify"], "-o: draws one document, without --verify"),
        (["mlp.cpu.float32", "-o", "a.svg"], "-o: takes one file, not 2"),
        (["-o", "a.svg", "--profile", "gpt.cpu.float32"], "--profile: gpt.cpu.float32 is a"),
    ],
)
def test_what_does_not_go_with_a_picture_is_refused(partopt, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    outcome = partopt("show", "gpt.cpu.float32", *given)
    assert outcome.code == 2 and message in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_tables_are_written_as_documents_and_as_pictures(
    partopt, profile_file, topology_file, tmp_path
):
    profile, cluster = profile_file(uniform_profile(8)), topology_file()
    verbs = {
        "compare": ["--planner", "gpipe", "--planner", "straight"],
        "plan": ["--planner", "gpipe", "--scaling", "1,2"],
    }
    for verb, given in verbs.items():
        command = [verb, profile, "--topology", cluster, *given]
        table, drawn, again = (tmp_path / f"{verb}{end}" for end in (".json", ".svg", "2.svg"))
        printed = partopt(*command, "-o", table)
        assert printed.code == 0 and f"Wrote {table}" in printed.err
        assert "simulate" not in printed.err
        assert partopt(*command, "--json").out == table.read_text()
        assert partopt(*command, "-o", drawn).code == 0
        assert partopt("show", table, "-o", again).code == 0
        assert svg(drawn) == svg(again)
        assert partopt(*command, "-o", drawn).code == 2
        refused = partopt(*command, "-o", tmp_path / "a.txt")
        assert "choose .json, .svg, .pdf, .png" in refused.err


def test_a_picture_of_a_scaling_is_its_output(partopt, profile_file, topology_file, tmp_path):
    given = ["--topology", topology_file(), "--scaling", "1,2", "--picture", tmp_path / "a.svg"]
    outcome = partopt("plan", profile_file(), *given)
    assert outcome.code == 2 and "use -o scaling.svg" in outcome.err


@pytest.mark.slow
def test_a_stretch_of_a_timeline(partopt, plan_file, tmp_path):
    plan, whole, part = plan_file, tmp_path / "whole.svg", tmp_path / "part.svg"
    assert partopt("simulate", plan, "-o", whole).code == 0
    assert partopt("simulate", plan, "-o", part, "--window", "0 s,1 ms").code == 0
    assert whole.read_bytes() != part.read_bytes()
    simulation = po.simulate(po.Plan.load(plan))
    assert part.read_bytes() == simulation.draw("svg", (0.0, 1e-3))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--window", "0 s,1 ms"], "--window: goes with a figure"),
        (["--window", "0 s,1 ms", "-o", "t.json"], "--window: goes with a figure"),
        (["--window", "1 ms,0 s", "-o", "t.svg"], "--window: 1 ms,0 s is no stretch of time"),
        (["--window", "1 ms", "-o", "t.svg"], "--window: '' is not a quantity"),
        (["--window", "9 s,10 s", "-o", "t.svg"], "there is nothing to draw"),
    ],
)
def test_mistakes_of_a_stretch(partopt, plan_file, tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    plan = plan_file
    files = {*tmp_path.iterdir()}
    outcome = partopt("simulate", plan, *options)
    assert (outcome.code, outcome.errors) == (2, [error])
    assert {*tmp_path.iterdir()} == files
