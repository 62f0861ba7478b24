"""`partopt import TRAINER LAYOUT` and `partopt compare --layout`."""

import re
import shlex

import pytest

from partopt.documents.plan import Plan
from tests.helpers import flat
from tests.trainers.models import transformer

LAYOUT = "Et*4|t*3|t*3|t*2L"


@pytest.fixture
def given(profile_file, topology_file):
    """The profile of a transformer of twelve blocks, and four devices."""
    return ["--profile", profile_file(transformer()), "--topology", topology_file()]


@pytest.fixture
def imported(partopt, given):
    return lambda *words: partopt("import", *words, *given, "--microbatches", 8)


@pytest.mark.slow
def test_a_layout_becomes_a_plan_beside_a_better_one(imported, tmp_path):
    outcome = imported("megatron", LAYOUT, "-o", tmp_path / "plan.json")
    assert outcome.code == 0
    plan = Plan.load(str(tmp_path / "plan.json"))
    assert (plan.planner, plan.schedule, plan.microbatches) == ("manual", "1f1b", 8)
    assert [stage.start for stage in plan.stages] == [0, 6, 9, 12]
    assert re.search(r"\nother cuts +1-1-1-1 ", outcome.out)
    assert "to the same stages cut at 4,8,12" in " ".join(outcome.out.split())
    assert "note:    wte, wpe -> embedding" in outcome.err.splitlines()
    assert f"Wrote {tmp_path / 'plan.json'}" in outcome.err


@pytest.mark.slow
def test_the_command_that_follows_makes_the_better_plan(imported, partopt, tmp_path):
    outcome = imported("torchgpipe", "6,3,3,4")
    command = shlex.split(outcome.err.splitlines()[-1])
    assert command[:3] == ["next:", "partopt", "plan"]
    assert command[command.index("--cuts") + 1] == "4,8,12"
    better = tmp_path / "better.json"
    assert partopt(*command[2:-1], better).code == 0
    assert [stage.start for stage in Plan.load(str(better)).stages] == [0, 4, 8, 12]


@pytest.mark.slow
def test_a_layout_that_loses_nothing_is_told_so(imported):
    outcome = imported("torchgpipe", "4,4,4,4")
    assert "loses    nothing: no plan that torchgpipe runs is faster" in outcome.out
    assert outcome.err.splitlines()[-1].startswith("next:    partopt compare ")


@pytest.mark.slow
def test_a_file_and_standard_input(imported, partopt, given, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun t.py --pipeline-model-parallel-layout '{LAYOUT}'\n")
    from_file = imported("megatron", script, "--json").document
    read = ["import", "megatron", "-", *given, "--microbatches", 8, "--json"]
    assert partopt(*read, stdin=script.read_bytes()).document == from_file
    assert [stage["start"] for stage in from_file["stages"]] == [0, 6, 9, 12]
    assert imported("megatron", tmp_path / "other.sh").errors == [
        f"{tmp_path / 'other.sh'}: no such file"
    ]


SCRIPT = """torchrun train.py --pipeline-model-parallel-layout 'Et*4|t*3|t*3|t*2L' \\
  --micro-batch-size 1 --global-batch-size 12 --recompute-granularity full \\
  --use-distributed-optimizer --tensor-model-parallel-size {tp}
"""


@pytest.mark.slow
def test_what_a_script_says_beside_the_layout_holds_where_no_option_does(partopt, given, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.format(tp=1))
    said = partopt("import", "megatron", script, *given, "--json").document
    assert said["microbatches"] == 12
    assert said["layout"]["shard"] == "optimizer"
    assert {stage["recompute"] for stage in said["stages"]} == {True}
    words = ["--microbatches", 8, "--recompute", "never", "--shard", "none"]
    stated = partopt("import", "megatron", script, *given, *words, "--json").document
    assert stated["microbatches"] == 8
    assert stated["layout"]["shard"] == "none"
    assert {stage.get("recompute", False) for stage in stated["stages"]} == {False}
    asynchronous = partopt("import", "megatron", script, *given, "--schedule", "pipedream")
    assert asynchronous.code == 0
    script.write_text(SCRIPT.format(tp=8))
    refused = partopt("import", "megatron", script, *given)
    assert refused.code == 2
    assert refused.errors == ["the layout has groups of 8 tensor parallel ranks, the profile of 1"]


@pytest.mark.slow
def test_the_command_that_follows_keeps_what_the_script_says(partopt, given, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.format(tp=1))
    following = partopt("import", "megatron", script, *given).err.splitlines()[-1]
    command = shlex.split(following)[2:]
    assert command[command.index("--global-batch") + 1] == "12"
    assert command[command.index("--recompute") + 1] == "always"
    assert partopt(*command[:-1], tmp_path / "better.json").code == 0


@pytest.mark.slow
def test_several_stages_on_a_device(imported):
    outcome = imported("megatron", LAYOUT, "--pipeline-size", 2)
    assert "plan     manual: 4 stages, 2-2-2-2, schedule interleaved" in outcome.out


@pytest.mark.slow
def test_an_order_states_its_microbatches(imported, partopt, given, tmp_path):
    order = tmp_path / "order.csv"
    order.write_text("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    words = ["torch-csv", order, "--cuts", 8]
    outcome = partopt("import", *words, *given)
    assert "schedule 1f1b" in outcome.out
    assert "an iteration of 8 microbatches" in outcome.out
    assert imported(*words).code == 0
    refused = partopt("import", *words, *given, "--global-batch", 16)
    assert refused.errors == ["--global-batch 16: the order is of 8 microbatches"]
    refused = partopt("import", *words, *given, "--schedule", "gpipe")
    assert refused.errors == ["--schedule gpipe: the order is that of 1f1b"]


def test_what_the_trainer_does_not_do_is_a_warning(imported):
    outcome = imported("megatron", LAYOUT, "--schedule", "gpipe")
    assert (
        "warning: megatron does not run it so: the schedule is gpipe; it runs 1f1b, interleaved"
        in outcome.err
    )


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_written_and_said_so(imported, partopt, tmp_path):
    path = tmp_path / "plan.json"
    outcome = imported("megatron", LAYOUT, "--memory", "40 MB", "-o", path)
    assert outcome.code == 1
    assert f"Wrote {path}\n" in outcome.err
    assert "loses" not in outcome.out or "loses    all: it does not fit, and " in outcome.out
    assert outcome.errors[0].startswith("the plan does not fit: a device of stage 0 needs")
    command = shlex.split(outcome.hints[0].partition(": ")[2])
    assert command[:3] == ["partopt", "import", "megatron"]
    assert partopt(*command[1 : command.index("-o")]).code == 0
    simulated = partopt("simulate", path)
    assert simulated.code == 1
    assert "exceeds the limit" in simulated.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["megatron", "Et*5L"], "the layout has 5 blocks, the profile 12"),
        (["megatron", LAYOUT, "--onto", "x"], "--onto: not of partopt import megatron"),
        (["pipedream", "g.txt", "--map", "x=norm"], "--map: not of partopt import pipedream"),
        (["megatrn", LAYOUT], 'unknown format "megatrn"'),
        (["megatron", LAYOUT, "--cut-at", "h.*"], "--cut-at: --cuts already fixes the boundaries"),
    ],
)
def test_what_is_refused(imported, words, error):
    outcome = imported(*words)
    assert (outcome.code, outcome.out, outcome.errors) == (2, "", [error])
    assert outcome.hints


def test_help_lists_the_formats_of_both_kinds(partopt):
    page = partopt("import", "--help").out
    assert "Measurements, as a profile:\n  torch-profile" in page
    assert "Layouts of trainers, as a plan:\n  megatron" in page
    own = partopt("import", "vllm", "--help").out
    assert own.startswith("Usage: partopt import vllm [OPTIONS] LAYOUT\n")
    assert "vLLM: VLLM_PP_LAYER_PARTITION" in own


def test_layouts_are_compared_with_the_planners(partopt, given):
    profile, topology = given[1], given[2:]
    words = ["--layout", f"megatron:{LAYOUT}", "--layout", "megatron:Et*6|t*6L", "--json"]
    rows = partopt(
        "compare", profile, *topology, "--planner", "gpipe", *words, "--layout", "vllm:12"
    ).document["rows"]
    assert {row["planner"]: row["shape"] for row in rows} == {
        "gpipe": "1-1-1-1",
        "megatron layout": "1-1-1-1",
        "megatron layout 2": "2-2",
        "vllm layout": "1",
    }


def test_layers_of_a_compared_layout_are_named_as_those_of_one_that_is_read(partopt, given):
    """Of twelve blocks one is said to be an embedding: eleven are left for the layout."""
    words = ["--planner", "gpipe", "--map", "h.0=embedding", "--layout"]
    compared = partopt("compare", *given[1:], *words, "vllm:11", "--json").document
    assert {row["planner"] for row in compared["rows"]} == {"gpipe", "vllm layout"}
    assert partopt("compare", *given[1:], *words, "vllm:12").code == 2


@pytest.mark.slow
def test_a_layout_is_compared_and_planned_as_its_trainer_runs_it(partopt, given, topology_file):
    """Latency makes deeper warm-ups better, which neither the trainer has nor 1f1b."""
    topology_file(flat(4, 1e9, latency=1e-3))  # where `given` has its own
    words = (*given[2:], "--microbatches", 32, "--json")
    layout = "Et*4|t*4|t*2|t*2L"
    plan = partopt("import", "megatron", layout, "--profile", given[1], *words).document
    words = (*words, "--schedule", "1f1b")
    compared = partopt("compare", given[1], *words, "--layout", f"megatron:{layout}").document
    (row,) = [row for row in compared["rows"] if row["planner"] == "megatron layout"]
    assert row["period_s"] == plan["predicted"]["period_s"]
    split = ["--cuts", "6,10,12", "--replicas", "1,1,1,1"]
    own = partopt("plan", given[1], *words, *split, "--with", "waits=1f1b").document
    assert own["predicted"] == plan["predicted"]
    eager = partopt("plan", given[1], *words[:-1], "1f1b-eager", *split).document
    assert eager["predicted"]["period_s"] < 0.999 * row["period_s"]


@pytest.mark.slow
def test_the_fastest_layout_is_the_plan_to_make_next(partopt, given):
    profile, topology = given[1], given[2:]
    words = ["--planner", "gpipe", "--layout", "deepspeed:0,8,16"]
    words += ["--schedule", "1f1b", "--microbatches", 8]
    outcome = partopt("compare", profile, *topology, *words)
    command = shlex.split(outcome.err.splitlines()[-1])
    assert command[1:5] == ["partopt", "import", "deepspeed", "0,8,16"]
    assert "plan     manual: 2 stages, 2-2, schedule 1f1b" in partopt(*command[2:]).out


def test_a_layout_without_its_trainer(partopt, given):
    profile, topology = given[1], given[2:]
    outcome = partopt("compare", profile, *topology, "--layout", "12")
    assert outcome.errors == ["--layout 12: no trainer"]
