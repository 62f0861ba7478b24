"""The README says what the commands say."""

import re
import shlex

import pytest

from tests.forked import run_forked
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"```\n\$ partopt ([^\n]*)\n(.*?)```", README, re.DOTALL)
GNMT = re.findall(r"```\npartopt (plan gnmt[^\n]*)\n```", README)


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 800
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_the_commands_print_what_is_shown(partopt, tmp_path, monkeypatch, command, shown):
    """Lines are left out where dots are."""
    monkeypatch.chdir(tmp_path)
    printed = partopt(*shlex.split(command)).out
    for part in filter(None, shown.split("...\n")):
        before, found, printed = printed.partition(part)
        assert found and (not before or before.endswith("\n"))


def test_a_lever_a_challenger_and_a_size_are_shown():
    words = " ".join(text for _, text in SHOWN)
    assert "also     --" in words and "try      tp" in words and "\n*    " in words


@pytest.mark.slow
def test_the_picture_is_that_of_the_plan(partopt, tmp_path):
    plan, drawn = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert partopt(*shlex.split(*GNMT), "-o", plan).code == 0
    assert partopt("show", plan, "-o", drawn).code == 0
    [picture] = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert (ROOT / picture).read_bytes() == drawn.read_bytes()


@pytest.mark.slow
def test_what_it_says_of_the_plan_is_so(partopt):
    [command] = GNMT
    rate = re.search(
        r"\*\*([\d,]+) samples/s, (\d+) % more than data parallelism\*\* \(([\d,]+)\)", README
    )
    even = re.search(r"(\d+) % more than the best .*?\(([\d,]+): `([^`]+)`\)", README, re.DOTALL)
    words = shlex.split(command)
    found = {
        "best": words,
        "data": [*words, "--planner", "data_parallel"],
        "even": [*words, *even[3].split()],
    }
    for replicas in (4, 2):  # the other even splits, of 37 layers: none is faster
        stages = 16 // replicas
        starts = [round(37 * s / stages) for s in range(1, stages)]
        cuts, sizes = ",".join(map(str, starts)), ",".join([str(replicas)] * stages)
        found[f"even {stages}"] = [*words, "--cuts", cuts, "--replicas", sizes]
    speeds = {
        name: partopt(*given, "--json").document["predicted"]["samples_per_s"]
        for name, given in found.items()
    }
    printed = [int(each.replace(",", "")) for each in (rate[1], rate[3], even[2])]
    assert printed == [round(speeds[name]) for name in ("best", "data", "even")]
    assert int(rate[2]) == round(100 * (speeds["best"] / speeds["data"] - 1))
    assert int(even[1]) == round(100 * (speeds["best"] / speeds["even"] - 1))
    assert speeds["even"] >= max(speeds["even 4"], speeds["even 8"])


@pytest.mark.slow
def test_the_model_that_it_prints_is_measured_planned_reported_and_run(tmp_path):
    [model] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_model.py").write_text(model)
    [commands] = re.findall(r"```\n(partopt profile my_model.*?)```", README, re.DOTALL)
    for line in commands.splitlines():
        done = run_forked("partopt", shlex.split(line, comments=True)[1:], tmp_path)
        assert done.returncode == 0, done.stderr
    assert "partopt run" in line and "equal to one process: losses to" in done.stdout
    assert "1f1b, 1-1 on cpu-2" in done.stdout  # on two devices, a stage each
    assert {path.name for path in tmp_path.iterdir()} >= {"mine.json", "plan.json", "report.html"}
