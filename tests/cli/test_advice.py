"""Commands that a simulation advises, as they are pasted: they run, and bring what was promised."""

import re
import shlex

import pytest

from tests.helpers import flat, two_level, uniform_profile

CASES = {
    "few microbatches": (flat(4, 10e9), ["1f1b", "--microbatches", 8], []),
    "gpipe": (flat(4, 10e9), ["gpipe", "--microbatches", 32], []),
    "serial": (flat(4, 1e9), ["1f1b", "--microbatches", 16], []),
    "latency": (flat(4, 10e9, latency=1e-3), ["1f1b", "--microbatches", 16], []),
    "slow network": (two_level(2, 2, 10e9, 1e8), ["pipedream"], []),
    "what was given": (
        flat(4, 10e9),
        ["1f1b-eager", "--microbatches", 32],
        ["--microbatches", 8, "--bandwidth", "all=200 MB/s", "--warmup", "+1"],
    ),
    "too large": (
        flat(4, 10e9),
        ["gpipe", "--microbatches", 32],
        ["--memory", "40 MB"],
    ),
}


def advised(page: str) -> list[tuple[str, list[str]]]:
    """What each change of a page brings, and the words of its command."""
    text = page.replace("\\\n", "")
    found = re.findall(r"-> (.*?):\n +(partopt [^\n]*)", text, re.DOTALL)
    return [(" ".join(brings.split()), shlex.split(command)) for brings, command in found]


def change_of(brings: str, what: str) -> float:
    """The relative change of the speed or the memory, 0 where it is not told."""
    if what == "memory":
        told = re.search(r"([+-][\d.]+)% memory", brings)
        return float(told[1]) / 100 if told else 0.0
    told = re.search(r"([\d.]+)% (faster|slower)", brings)
    return (float(told[1]) if told[2] == "faster" else -float(told[1])) / 100 if told else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_command_runs_and_brings_what_it_promises(
    partopt, profile_file, topology_file, tmp_path, monkeypatch, name
):
    cluster, schedule, given = CASES[name]
    monkeypatch.chdir(tmp_path)
    profile = profile_file(uniform_profile(8))
    options = ["--topology", topology_file(cluster), "--planner", "gpipe", "--schedule", *schedule]
    assert partopt("plan", profile, *options, "-o", "a plan.json").code == 0
    now = partopt("simulate", "a plan.json", *given, "--json").document
    changes = advised(partopt("simulate", "a plan.json", *given).out)
    assert changes
    for brings, (program, *words) in changes:
        outcome = partopt(*words, "--json")
        assert (program, outcome.code) == ("partopt", 0)
        then = outcome.document
        faster = then["samples_per_s"] / now["samples_per_s"] - 1
        more = then["peak_memory_bytes"] / now["peak_memory_bytes"] - 1
        assert change_of(brings, "speed") == pytest.approx(faster, abs=6e-4)
        assert change_of(brings, "memory") == pytest.approx(more, abs=6e-4)
        assert faster > 0 or (not now["fits"] and then["fits"])


def test_what_does_not_fit_is_hinted_the_command_that_makes_it_fit(partopt, plan_file):
    plan = plan_file("--planner", "gpipe", "--schedule", "gpipe", "--microbatches", 32)
    outcome = partopt("simulate", plan, "--memory", "40 MB")
    assert outcome.code == 1
    brings, _, command = outcome.hints[0].partition(": ")
    assert brings.endswith("it fits")
    assert partopt(*shlex.split(command)[1:]).code == 0


def test_a_saved_simulation_shows_flags_alone(partopt, synchronous, tmp_path):
    saved = tmp_path / "simulation.json"
    saved.write_text(partopt("simulate", synchronous, "--json").out)
    page = partopt("show", saved).out
    assert "faster" in page
    assert "partopt simulate" not in page
