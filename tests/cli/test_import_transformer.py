"""`partopt import TRAINER FILE` of a transformer, without a profile."""

import json
import re

import click
import pytest

from partopt.cli.import_ import command as import_command
from partopt.documents.plan import Plan
from tests.cli.test_plan_transformer import APART, OPTIONS, Heeded

SCRIPT = """#!/bin/bash
ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 128256
    --swiglu --untie-embeddings-and-output-weights --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --bf16
    --tensor-model-parallel-size ${TP} --micro-batch-size 1 --global-batch-size 64
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun pretrain_gpt.py "${ARGS[@]}"
"""
CLUSTER = "--topology", "dgx-h100", "--servers", "1"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "today.sh"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_script_stands_beside_the_best_layout(partopt, script, tmp_path):
    plan = tmp_path / "plan.json"
    done = partopt("import", "megatron", script, *CLUSTER, "--set", "TP=4", "-o", plan)
    assert done.code == 0
    text = " ".join(done.out.split())
    yours, best = (
        re.search(rf"{name} (\S+) (m?s), MFU (\S+)%", text) for name in ("yours", "best")
    )
    assert float(yours[1]) > float(best[1]) and yours[2] == best[2]
    loses = float(re.search(r"loses (\S+)%", text)[1])
    assert loses == pytest.approx(100 * (1 - float(best[1]) / float(yours[1])), abs=0.2)
    assert "--sequence-parallel - -> True" in text or "--tensor-model-parallel-size 4 -> " in text
    written = Plan.load(str(plan))
    assert (written.layout.tp, written.layout.dp, written.trainer) == (4, 2, "megatron")
    assert f"partopt export {plan} --to megatron" in done.err
    other = tmp_path / "best.json"
    words = "--set", "TP=4", "--best", "-o", other
    assert partopt("import", "megatron", script, *CLUSTER, *words).code == 0
    assert Plan.load(str(other)).predicted.iteration_s < written.predicted.iteration_s


def test_what_the_script_does_not_say_is_asked_for(partopt, script):
    done = partopt("import", "megatron", script, *CLUSTER)
    assert done.code == 2 and done.out == ""
    assert done.errors == [
        "--tensor-model-parallel-size: depends on TP, which the text does not say"
    ]
    assert "--set TP=VALUE" in done.err


@pytest.mark.parametrize("text", ["if [ 1 ; then", "#!/bin/bash\necho 'a\n", "while true; do\n"])
def test_a_script_that_bash_refuses_is_refused_with_its_line(partopt, tmp_path, text):
    path = tmp_path / "broken.sh"
    path.write_text(text)
    done = partopt("import", "megatron", path, *CLUSTER)
    assert done.code == 2 and re.match(r"line \d+: bash would refuse it", done.errors[0])


@pytest.mark.parametrize("text", ["Et*3|(tt|)*29m|L", "t*3|t*3", "iffy | for"])
def test_a_layout_alone_is_no_script(partopt, text):
    done = partopt("import", "megatron", text, *CLUSTER)
    assert done.errors == ["a layout alone does not say the model"]


@pytest.mark.slow
def test_options_replace_what_the_script_says(partopt, script):
    words = "--set", "TP=2", "--global-batch", 32, "--sequence", 2048, "--layout", "pp=2", "--json"
    plan = json.loads(partopt("import", "megatron", script, *CLUSTER, *words).out)
    assert (plan["layout"]["tp"], plan["layout"]["pp"], plan["microbatches"]) == (2, 2, 32)
    assert plan["transformer"]["sequence"] == 2048


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_written_with_exit_code_1(partopt, script, tmp_path):
    plan = tmp_path / "plan.json"
    words = "--set", "TP=1", "--memory", "40GB", "-o", plan
    done = partopt("import", "megatron", script, *CLUSTER, *words)
    assert done.code == 1 and plan.exists() and "DOES NOT FIT" in done.out
    assert "the layout does not fit: a device needs" in done.err


@pytest.mark.slow
def test_a_function_of_a_program_is_named_behind_the_file(partopt, tmp_path):
    path = tmp_path / "configs.py"
    text = "def llama3_{0}():\n    return C(hf_assets_path='Llama-3-{1}',\n"
    text += "        training=T(local_batch_size=1, seq_len=2048))\n\n\n"
    path.write_text(text.format("8b", "8B") + text.format("70b", "70B"))
    done = partopt("import", "torchtitan", path, *CLUSTER)
    assert done.code == 2 and "2 functions make configurations" in done.err
    named = partopt("import", "torchtitan", f"{path}:llama3_8b", *CLUSTER, "--json")
    assert json.loads(named.out)["transformer"]["model"]["name"] == "llama3-8b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("megatron", "Et*4|t*4L", *CLUSTER), "a layout alone does not say the model"),
        (("vllm", "4,4", *CLUSTER), "vllm: its configurations do not say"),
        (("megatron", "x.sh", *CLUSTER), "x.sh: no such file"),
        (
            ("megatron", "Et*4|t*4L", *CLUSTER, "--profile", "gpt.cpu.float32", "--sequence", "4"),
            "--sequence: goes with a transformer",
        ),
        (
            ("megatron", "a --b 1", *CLUSTER, "--cuts", "3"),
            "--cuts: the configuration of a trainer",
        ),
        (("megatron", "a --b 1", *CLUSTER, "--set", "x"), "--set x: not of the form NAME=VALUE"),
    ],
)
def test_what_cannot_be_read_is_refused(partopt, words, message):
    done = partopt("import", *words)
    assert done.code == 2 and message in done.err and done.out == ""


# what an import has beside a plan
IMPORTED = OPTIONS | {
    "profile": "gpt.cpu.float32",
    "assignments": "micro_batch_size=2",
    "best": None,
    "pipeline_size": "2",
    "layout": "pp=2",
}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heeded")
    script = folder / "today.sh"
    script.write_text(SCRIPT.replace("${TP}", "4").replace("--num-layers 32", "--num-layers 4"))
    words = "import", "megatron", script, *CLUSTER, "--output", folder / "mine.json", "--force"
    return Heeded(folder, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameter",
    [
        own
        for own in import_command.get_command(click.Context(import_command), "megatron").params
        if isinstance(own, click.Option) and own.name not in APART
    ],
    ids=lambda own: own.name,
)
def test_no_option_is_ignored(partopt, command, parameter):
    command.check(partopt, parameter, IMPORTED)


def test_where_a_layout_does_not_fit_the_best_or_more_servers_are_named(partopt, script):
    script.write_text(SCRIPT.replace("${TP}", "1"))
    done = partopt("import", "megatron", script, *CLUSTER, "--memory", "40GB")
    assert done.code == 1 and done.hints == ["the best layout fits: add --best to write that"]
    assert partopt("import", "megatron", script, *CLUSTER, "--memory", "40GB", "--best").code == 0
    done = partopt("import", "megatron", script, *CLUSTER, "--memory", "14GB")
    assert done.code == 1 and done.hints == ["a layout fits with --servers 2"]
    more = *CLUSTER[:2], "--servers", 2, "--memory", "14GB", "--best"
    assert partopt("import", "megatron", script, *more).code == 0
