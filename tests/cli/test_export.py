"""`partopt export`."""

import json
import re
import shlex
from pathlib import Path

import pytest

from partopt.documents.plan import Plan
from partopt.options import LAYER_KINDS
from partopt.trainers import writers
from tests.helpers import flat
from tests.trainers.models import transformer
from tests.trainers.plans import BLOCKS, planned

COUNTS = "export VLLM_PP_LAYER_PARTITION=4,3,3,2\n"


@pytest.fixture
def plan(tmp_path):
    """The path of a plan of twelve blocks, 4-3-3-2."""
    path = tmp_path / "plan.json"
    planned().save(str(path))
    return path


def test_on_standard_output_and_what_to_know_beside_it(partopt, plan):
    for given in ([], ["-o", "-"]):
        outcome = partopt("export", plan, "--to", "vllm", *given)
        assert (outcome.code, outcome.out) == (0, COUNTS)
        assert outcome.err.splitlines()[0] == "note:    wte, wpe -> embedding"


def test_a_plan_from_standard_input(partopt, plan):
    assert partopt("export", "-", "--to", "vllm", stdin=plan.read_bytes()).out == COUNTS


def test_a_file_is_not_replaced_unless_asked(partopt, plan, tmp_path):
    path = tmp_path / "pp.sh"
    outcome = partopt("export", plan, "--to", "vllm", "-o", path)
    assert (outcome.code, outcome.out, path.read_text()) == (0, "", COUNTS)
    assert f"Wrote {path}" in outcome.err
    path.write_text("mine")
    refused = partopt("export", plan, "--to", "vllm", "-o", path)
    assert (refused.code, refused.hints) == (2, ["add --force to replace it"])
    assert path.read_text() == "mine"
    assert partopt("export", plan, "--to", "vllm", "-o", path, "--force").code == 0
    assert path.read_text() == COUNTS


def test_lines_of_a_shell_go_into_any_file(partopt, plan, tmp_path):
    assert partopt("export", plan, "--to", "vllm", "-o", tmp_path / "vllm.env").code == 0
    assert (tmp_path / "vllm.env").read_text() == COUNTS
    assert partopt("export", plan, "--to", "deepspeed", "-o", tmp_path / "ds.env").code == 2


def test_several_files_lie_beside_each_other(partopt, tmp_path):
    path = tmp_path / "plan.json"
    planned(schedule="zb-h1").save(str(path))
    for given in ([], ["-o", "-"]):
        outcome = partopt("export", path, "--to", "torchtitan", *given)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.hints == ["add -o partopt_plan.py"]
    assert partopt("export", path, "--to", "torchtitan", "-o", tmp_path / "mine.py").code == 0
    assert (tmp_path / "mine.csv").read_text().startswith("0F0,")
    assert "--module mine " in (tmp_path / "mine.py").read_text()


def test_a_file_that_is_no_module_is_refused(partopt, plan, tmp_path):
    outcome = partopt("export", plan, "--to", "torchtitan", "-o", tmp_path / "my-plan.py")
    assert (outcome.code, outcome.hints) == (2, ["call the file planned.py"])
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_that_is_not_there_is_refused(partopt, plan, tmp_path):
    outcome = partopt("export", plan, "--to", "vllm", "-o", tmp_path / "no" / "pp.sh")
    assert (outcome.code, len(outcome.errors)) == (2, 1)


def test_a_plan_that_cannot_be_said_is_refused_with_every_reason(partopt, tmp_path):
    path = tmp_path / "plan.json"
    planned([1, 9, 15], replicas=[2, 1, 1, 1]).save(str(path))
    outcome = partopt("export", path, "--to", "megatron", "-o", tmp_path / "args.sh")
    head = "megatron cannot say this plan of gpt: "
    assert (outcome.code, outcome.errors) == (
        2,
        [
            f"{head}stages have unequal replicas, 2-1-1-1",
            f"{head}stage 1 begins with wpe, inside embedding",
            f"{head}stage 3 begins with lm_head, between norm and head",
        ],
    )
    assert not (tmp_path / "args.sh").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"microbatches": 6, "microbatch_size": 2}, " --global-batch 12"),
        ({"schedule": "pipedream"}, " --global-batch G"),
    ],
)
def test_the_hint_is_the_command_that_makes_a_plan_which_can_be_said(
    partopt, tmp_path, options, asked
):
    """It plans as many samples for the same trainer, on the topology of the same name."""
    path, profile, cluster = (tmp_path / name for name in ("plan.json", "gpt.json", "four.yaml"))
    measured = transformer(BLOCKS, microbatch_size=2)
    planned([1, 9, 15], measured, **options).save(str(path))
    refused = partopt("export", path, "--to", "megatron")
    name = Plan.load(str(path)).topology.name
    words = f"--topology {name} --for megatron{asked} -o plan.json"
    assert refused.hints[-1] == f"partopt plan PROFILE {words}"
    measured.save(str(profile))
    cluster.write_text(flat(4).dump())
    made = (
        words.replace("batch G", "batch 16")
        .replace(name, str(cluster))
        .replace("plan.json", str(tmp_path / "better.json"))
    )
    assert partopt("plan", profile, *shlex.split(made)).code == 0
    assert partopt("export", tmp_path / "better.json", "--to", "megatron").code == 0


def test_the_hint_of_a_transformer_has_its_sequence(partopt, tmp_path):
    path = tmp_path / "plan.json"
    asked = "gpt3-1.3b", "--topology", "dgx-h100", "--for", "deepspeed", "--global-batch", 64
    layout = "--layout", "tp=2,pp=2", "--sequence", "2k", "-o", path
    assert partopt("plan", *asked, *layout).code == 0
    refused = partopt("export", path, "--to", "torchtitan")
    words = "--topology dgx-h100 --for torchtitan --global-batch 64 --sequence 2048 -o plan.json"
    assert refused.hints[-1] == f"partopt plan PROFILE {words}"


def test_rules(partopt, plan):
    given = ("export", plan, "--to", "vllm")
    assert partopt(*given, "--map", "h.0=embedding").out == COUNTS.replace("4,", "3,", 1)
    for rule, error in (
        ("h.0", "--map h.0: not a rule"),
        ("x=norm", "--map x=norm: no layer has such a name"),
    ):
        outcome = partopt(*given, "--map", rule)
        assert (outcome.code, outcome.errors) == (2, [error])


def test_trainers_are_listed_and_an_unknown_one_has_a_nearest(partopt, plan):
    listed = partopt("export", "--help").out
    assert all(f"  {name}  " in listed for name in [*writers(), "flows"])
    outcome = partopt("export", plan, "--to", "torch_titan")
    assert (outcome.code, outcome.hints) == (2, ['did you mean "torchtitan"?'])
    assert partopt("export", plan).code == 2
    for words in ([], ["-o", "own.py"]):
        outcome = partopt("export", plan, "--to", "partopt", *words)
        assert (outcome.code, outcome.errors) == (2, ["nothing is written for partopt"])
    outcome = partopt("export", plan, "--to", "verl")
    hint = "partopt import verl SCRIPT --topology FILE -o better.sh"
    assert (outcome.code, outcome.hints) == (2, [hint])


def test_a_file_that_is_no_plan_is_refused(partopt, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": "partopt.profile/1"}))
    assert partopt("export", path, "--to", "vllm").code == 2


def test_a_part_that_no_rule_leaves_is_named_by_another_rule(partopt, plan):
    outcome = partopt("export", plan, "--to", "vllm", "--map", "lm_head=mtp")
    assert outcome.code != 0 and outcome.out == ""
    assert outcome.errors[0].endswith("the model has no head (--map)")
    assert outcome.hints == ["say which layers it is: --map NAME=head"]


def test_torchtitan_refuses_layers_that_predict_further_tokens(partopt, plan):
    refused = partopt("export", plan, "--to", "torchtitan", "--map", "ln_f=mtp")
    assert refused.code == 2 and "the model predicts further tokens" in refused.errors[0]
    assert refused.hints[0].startswith("say otherwise what these layers are: --map NAME=head")


def test_kinds_of_layers_are_the_same_in_help_in_errors_and_on_the_page(partopt, plan):
    shown = partopt("export", "--help").out
    refused = partopt("export", plan, "--to", "vllm", "--map", "lm_head=x").hints[0]
    page = Path("docs/trainers.md").read_text()
    for text in (shown, refused, page[page.index('`--map "score=head"`') :][:200]):
        assert set(LAYER_KINDS) <= set(re.findall(r"\w+", text))
