"""What is changed of a person's configuration, in its own text, so that it says a better plan."""

from __future__ import annotations

import ast
import random
import re

import pytest
from msgspec import structs

from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search import judging
from partopt.search.changes import change_text
from partopt.search.jobs import read_job
from tests.golden.test_readings import READINGS
from tests.trainers.test_configured import REGISTRY, TOML

LAYOUTS = [
    "tp=8,pp=1,chunks=1,cp=1",
    "tp=2,pp=4,chunks=2,cp=1",
    "tp=1,pp=2,chunks=1,recompute=selective,cp=1",
    "tp=4,pp=1,chunks=1,recompute=always,microbatch=2,cp=1",
    "tp=2,pp=2,chunks=1,recompute=2",
    "tp=1,pp=4,chunks=1",
]
TRAININGS = {case: read for case, (table, read) in READINGS.items() if table != "layouts"}
CLUSTER = Topology.load("dgx-h100", 4)


def plan_another(job, layout):
    """The plan of another layout of a job, with what its trainer has by a flag alone."""
    said = {name: part for name, part in structs.asdict(Layout.parse(layout)).items() if part}
    if job.trainer == "deepspeed":
        said = {name: part for name, part in said.items() if name not in ("chunks", "cp")}
    said |= {"etp": None, "ep": min(job.layout.ep or 1, 4)}
    said |= {"modules": None} if said.get("recompute") != "selective" else {}
    facts = {name: value for name, value in job.facts.items() if name not in judging._SWITCHES}
    return judging.plan_layout(job.with_(layout=structs.replace(job.layout, **said), facts=facts))


def stages_of(plan):
    return [(stage.start, stage.stop, stage.recompute) for stage in plan.stages]


def check_changed(case, layout):
    """The changed text is read as the plan that it was changed to."""
    trainer, text, options = TRAININGS[case]
    try:
        job, _ = read_job(trainer, text, CLUSTER, **options)
        yours, other = judging.plan_layout(job), plan_another(job, layout)
    except PartoptError:  # no page, or no such layout
        return False
    given = options.get("arguments"), options.get("function")
    changes = change_text(text, yours, other, *given)
    again = judging.plan_layout(read_job(trainer, changes.text, CLUSTER, **options)[0])
    assert stages_of(again) == stages_of(other)
    named = [structs.replace(plan.layout, recompute=None) for plan in (again, other)]
    assert named[0] == named[1]
    words = {plan.transformer.model.vocabulary for plan in (again, other)}  # filled up for tp
    near = 1e-6 if len(words) == 1 else 0.01
    assert again.predicted.iteration_s == pytest.approx(other.predicted.iteration_s, rel=near)
    assert changes.says_all and not changes.by_hand
    marked = changes.mark_lines(text)
    assert changes.text.splitlines()[-1] == marked.splitlines()[-1]
    assert read_job(trainer, marked, CLUSTER, **options)[0] == read_job(
        trainer, changes.text, CLUSTER, **options
    )[0]  # fmt: skip
    return True


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_configuration_that_gives_a_page_can_be_changed_in_its_own_text(part):
    cases = [*TRAININGS][part::8]
    changed = [
        check_changed(case, layout)
        for k, case in enumerate(cases)
        for layout in random.Random(k).sample(LAYOUTS, 1)
    ]
    assert sum(changed) > len(changed) // 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["configured: megatron", "configured: bridge", "configured: nemo"])
def test_a_changed_text_is_the_plan(case, layout):
    assert check_changed(case, layout)


LAYOUT_OF_NONE = "pipeline_model_parallel_layout = None"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
TP=8 # of a server
PP=${PP:-4}
ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 128256
    --swiglu --untie-embeddings-and-output-weights --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --bf16 --sequence-parallel --recompute-activations
    --tensor_model_parallel_size "$TP" --micro-batch-size 1
    --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage=5  # or 10
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun pretrain_gpt.py "${ARGS[@]}" --global-batch-size $((SLURM_NNODES * 16))
"""


def change(layout, text=SCRIPT, **options):
    job, _ = read_job("megatron", text, CLUSTER, **options)
    yours, other = judging.plan_layout(job), plan_another(job, layout)
    return change_text(text, yours, other, options.get("arguments"))


def test_values_are_set_where_they_stand_and_all_else_stays():
    changes = change("tp=4,pp=2,chunks=5,recompute=never")
    lines = changes.text.splitlines()
    assert lines[2:4] == ["TP=4 # of a server", "PP=${PP:-2}"]
    assert "--num-layers-per-virtual-pipeline-stage=8  # or 10" in changes.text
    assert "--recompute" not in changes.text and 'size "$TP" --micro' in changes.text
    assert ("--tensor_model_parallel_size", "8", "4") in changes.rows
    assert ("--num-layers-per-virtual-pipeline-stage", "5", "8") in changes.rows
    others = [line for line in SCRIPT.splitlines() if line not in lines]
    assert len(others) == 4 and len(lines) == len(SCRIPT.splitlines())
    marked = changes.mark_lines(SCRIPT).splitlines()
    assert marked[0] == "#!/bin/bash" and marked[1].startswith("# changed by partopt, lines ")
    numbers = [int(number) for number in marked[1].rpartition("lines ")[2].strip(":").split(", ")]
    assert not {marked[number - 1] for number in numbers} & {*SCRIPT.splitlines()}
    assert len(numbers) == len(others)


def test_what_is_given_cannot_be_changed_in_the_text():
    changes = change("tp=8,pp=1,chunks=1", arguments={"tensor_model_parallel_size": "4"})
    assert [name for name, *_ in changes.by_hand] == ["--tensor_model_parallel_size"]
    assert changes.describe()[-1] == "--tensor_model_parallel_size  4 -> 8, by hand"
    assert changes.says_all


@pytest.mark.parametrize("layout", ["tp=8,pp=1,chunks=1", "tp=4,pp=4,chunks=1"])
def test_what_is_given_is_not_set_at_the_path_that_the_text_has_for_it(layout):
    """It counts nothing there, beside what is given."""
    trainer, text, _ = TRAININGS["configured: bridge"]
    text = text.replace("virtual_pipeline_model_parallel_size = 4", LAYOUT_OF_NONE)
    given = {"pipeline_model_parallel_layout": "Et*18|t*14L"}
    job, _ = read_job(trainer, text, CLUSTER, arguments=given)
    other = plan_another(job, layout)
    changes = change_text(text, judging.plan_layout(job), other, given)
    assert [name for name, *_ in changes.by_hand] == [*given] and changes.says_all
    assert LAYOUT_OF_NONE in changes.text and not {row[0] for row in changes.rows} & given.keys()
    again, _ = read_job(trainer, changes.text, CLUSTER)
    assert stages_of(judging.plan_layout(again)) == stages_of(other)


@pytest.mark.parametrize(
    ("stages", "said", "change"),
    [
        ("19-20-20-21", "", {"--decoder-first-pipeline-num-layers": "19"}),
        ("18-20-22-20", "", {"--pipeline-model-parallel-layout": "Et*18|t*20|t*22|t*20L"}),
        ("18-20-22-20", "--num-layer-list 20,20,20,20", {"--num-layer-list": "18,20,22,20"}),
        ("18-20-22-20", "--DDP-impl local", {}),
    ],
)
def test_stages_are_said_as_the_version_of_the_text_has_them(stages, said, change):
    text = SCRIPT.replace("--num-layers-per-virtual-pipeline-stage=5  # or 10", said)
    job, _ = read_job("megatron", text, CLUSTER)
    other = job.with_(facts={**job.facts, "ends": stages})
    plans = [judging.plan_layout(one) for one in (job, other)]
    changes = change_text(text, *plans)
    rows = {name: new for name, _, new in changes.rows}
    assert {name: rows.get(name) for name in change} == change
    assert changes.says_all
    if change:
        again = judging.plan_layout(read_job("megatron", changes.text, CLUSTER)[0])
        assert stages_of(again) == stages_of(plans[1])
    else:
        by_hand = [row for row in changes.by_hand if row[0].endswith("-layout")]
        assert by_hand and "pipeline-model-parallel-layout" not in changes.text


@pytest.mark.parametrize("imported", ["", "from torchtitan.config import (\n    FullAC,\n)\n"])
def test_a_program_imports_what_a_change_needs(imported):
    text, module = imported + REGISTRY, "torchtitan.distributed.activation_checkpoint"
    job, _ = read_job("torchtitan", text, CLUSTER)
    yours = judging.plan_layout(job)
    for recompute, name in (("selective", "SelectiveAC"), ("never", "None")):
        other = judging.plan_layout(
            job.with_(layout=structs.replace(job.layout, recompute=recompute))
        )
        changes = change_text(text, yours, other)
        line = f"from {module} import {name}\n"
        assert changes.says_all and (line in changes.text) == (name != "None")
        assert changes.text.replace(line, "").startswith(imported)
        assert f"activation_checkpoint={name}" in changes.text
        ast.parse(changes.text)


def test_other_functions_of_a_program_stay():
    others = "".join(REGISTRY.replace("llama3_8b", f"other_{k}") for k in range(4))
    text = others + REGISTRY + others.replace("other", "further")
    job, _ = read_job("torchtitan", text, CLUSTER, function="llama3_8b")
    layout = "tp=4,pp=1,chunks=1,recompute=always,microbatch=1,cp=1"
    yours, other = judging.plan_layout(job), plan_another(job, layout)
    changes = change_text(text, yours, other, function="llama3_8b")
    assert changes.says_all and "global_batch_size" in changes.text
    assert changes.text.startswith(others)
    assert changes.text.endswith(others.replace("other", "further"))


def test_what_a_default_says_is_written_where_the_plan_has_it_otherwise():
    text = re.sub(r'.activation_checkpoint.\nmode = "full"\n', "", TOML)
    job, _ = read_job("torchtitan", text, CLUSTER)
    assert job.layout.recompute == "selective" and "activation_checkpoint" not in text
    other = plan_another(job, "tp=2,pp=1,chunks=1,recompute=never,microbatch=1,cp=1")
    changes = change_text(text, judging.plan_layout(job), other)
    assert changes.says_all and '[activation_checkpoint]\nmode = "none"' in changes.text


def test_what_a_document_computes_follows():
    trainer, text, options = TRAININGS["configured: nemo"]
    text += "\nexp:\n  ranks: ${multiply:${model.tensor_model_parallel_size}, 2}\n"
    job, _ = read_job(trainer, text, CLUSTER, **options)
    other = plan_another(job, "tp=2,pp=4,chunks=1,cp=1")
    changes = change_text(text, judging.plan_layout(job), other)
    assert changes.says_all and not changes.by_hand
    assert "tensor_model_parallel_size: 2" in changes.text and "${multiply" in changes.text


def test_a_batch_of_other_servers_is_noted():
    _, notes = read_job("megatron", SCRIPT, Topology.load("dgx-h100", 8))
    said = "`arguments=SLURM_JOB_NUM_NODES=8 SLURM_NNODES=8` makes it 128"
    assert [note for note in notes if said in note and note.startswith("a batch of 64 is of SLURM")]
    assert not any("a batch of" in note for note in read_job("megatron", SCRIPT, CLUSTER)[1])
