"""The job that a configuration states: what options say goes before it, 0 and False too."""

import functools
import re

import pytest

from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers import hugging_face
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.jobs import read_job
from partopt.search.judging import plan_layout
from partopt.trainers import export_plan
from tests.trainers.test_dialects import SLIME, SWIFT, TUNES, VERL

DGX = Topology.load("dgx-h100", 1)


@pytest.fixture(scope="module")
def script():
    """Arguments of Megatron for a plan of 64 samples of 2,048 tokens, tp 2."""
    layout = Layout(tp=2, microbatch=2)
    options = {"trainer": "megatron", "global_batch": 64, "sequence": 2048, "layout": layout}
    return export_plan(plan_layout(Job(load_transformer("llama3-8b"), DGX, **options)), "megatron")


@pytest.mark.parametrize(
    "option", ["global_batch", "sequence", "microbatch_size", "chunks", "recompute"]
)
def test_an_option_of_0_is_not_left_out(script, option):
    asked, _ = read_job("megatron", script.main, DGX)
    assert (asked.global_batch, asked.sequence, asked.layout.microbatch) == (64, 2048, 2)
    with pytest.raises(PartoptError) as error:
        read_job("megatron", script.main, DGX, **{option: 0})
    assert error.value.code != "missing-option"


def test_an_option_that_is_none_is_what_the_text_says(script):
    asked, _ = read_job("megatron", script.main, DGX)
    names = ("global_batch", "sequence", "dtype", "layout", "facts")
    assert read_job("megatron", script.main, DGX, **dict.fromkeys(names))[0] == asked
    assert read_job("megatron", script.main, DGX, global_batch=32)[0].global_batch == 32


OF_MEGATRON = """python pretrain_gpt.py --num-layers 32 --hidden-size 4096 --vocab-size 32000
    --num-attention-heads 32 --seq-length 4096 --bf16 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2 --context-parallel-size 1 --micro-batch-size 1
    --num-layers-per-virtual-pipeline-stage 8 --sequence-parallel true --use-distributed-optimizer
    --recompute-granularity full --recompute-method block --recompute-num-layers 2
    --cuda-graph-impl local --cuda-graph-scope attn --ddp-bucket-size 1000000
    --tp-comm-overlap true --fp8-format hybrid --overlap-grad-reduce {more}
"""
TEXTS = {
    "megatron": OF_MEGATRON.format(more="--global-batch-size 64"),
    "megatron without a batch": OF_MEGATRON.format(more=""),
    "deepspeed": """deepspeed pretrain_gpt.py --num-layers 32 --hidden-size 4096 --deepspeed
        --num-attention-heads 32 --vocab-size 32000 --seq-length 4096 --bf16 --micro-batch-size 1
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1
        --gradient-accumulation-steps 4 """,
    "torchtitan": """torchrun -m torchtitan.train --module llama3 --config llama3_8b
        --training.seq_len 4096 --training.local_batch_size 2 --training.global_batch_size 64
        --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2
        --parallelism.pipeline_parallel_schedule 1F1B --parallelism.fsdp_reshard_after_forward never
        --activation_checkpoint.mode full --parallelism.pipeline_parallel_microbatch_size 1 """,
    "ms-swift": SWIFT,
    "ms-swift padded": SWIFT.replace("--packing true", "--packing false"),
    "verl": VERL,
    "verl packed": VERL.replace("DYNAMIC:-False", "DYNAMIC:-True"),
    "verl of examples": TUNES,
    "slime": SLIME,
}
OPTIONS = (
    *({"layout": Layout(**{part: 2})} for part in ("tp", "cp", "pp", "chunks", "microbatch")),
    {"layout": Layout(recompute="never")},
    {"layout": Layout(shard="optimizer")},
    {"layout": Layout(microbatch=2), "global_batch": 64},
    {"global_batch": 64},
    {"sequence": 2048},
    {"dtype": "bfloat16"},
    *({"facts": {fact: "no"}} for fact in ("tp_overlap", "sequence_parallel")),
    {"facts": {"graphs": "none"}},
    {"facts": {"bucket": "50MB"}},
)
# a flag or a field and its value, but those that name a model
SETTING = re.compile(r"(?<=[\s+])(?:--)?([\w-]+(?:\.\w+)+(?==)|(?<=--)[\w.-]+)[ =](\w+)(?=\s)")


def state(case, text, options):
    """The job of a text with options; the codes of the errors where it is refused."""
    arguments = {"tokens_per_sample": "900"} if case in ("slime", "verl packed") else {}
    try:
        return read_job(case.split()[0], text, DGX, arguments, **options)[0]
    except PartoptError as error:
        return {part.code for part in error.parts}


@pytest.mark.parametrize("case", TEXTS)
def test_a_value_that_is_not_asked_for_changes_nothing(case, monkeypatch):
    """Where an option makes a hidden value needless, any value in its place makes the same job."""
    monkeypatch.setattr(hugging_face, "load_transformer", functools.cache(load_transformer))
    text, replaced = TEXTS[case], set[str]()
    for found in SETTING.finditer(text):
        before, after = text[: found.start(2)], text[found.end(2) :]
        hidden = f"{before}$(hidden){after}"
        if isinstance(state(case, hidden, {}), Job):  # nothing asks for it
            continue
        for options in OPTIONS:
            job = state(case, hidden, options)
            if not isinstance(job, Job):
                assert job & {"unknown-variable", "missing-setting"}, (found[0], options, job)
                continue
            values = [found[2], *([str(2 * int(found[2]))] if found[2].isdecimal() else [])]
            others = [state(case, f"{before}{value}{after}", options) for value in values]
            assert others[0] == job and others[-1] == job, (found[0], options)
            replaced.add(found[1])
    assert len(replaced) > 3


def test_a_part_that_a_branch_leaves_open_is_that_of_the_layout():
    text = TEXTS["megatron"].replace("parallel-size 2", "parallel-size $TP", 1)
    script = f"if [ $(nvidia-smi -L | wc -l) -gt 4 ]; then TP=2; else TP=4; fi\n{text}"
    with pytest.raises(PartoptError, match=r"--tensor-model-parallel-size: depends on \$\(nvidia"):
        read_job("megatron", script, DGX, layout=Layout(pp=2))
    job, _ = read_job("megatron", script, DGX, layout=Layout(tp=2))
    assert job == read_job("megatron", text, DGX, {"TP": "2"})[0]


def test_a_cut_that_is_stated_replaces_that_of_the_text():
    text = f"{TEXTS['megatron'].rstrip()} --decoder-first-pipeline-num-layers 14\n"
    text = re.sub("--(num-layers-per-virtual-pipeline-stage 8|cuda-graph-impl local)", "", text)
    assert read_job("megatron", text, DGX)[0].facts["ends"] == "14-18"
    assert read_job("megatron", text, DGX, facts={"ends": "15-17"})[0].facts["ends"] == "15-17"
    options = {"layout": Layout(pp=3), "facts": {"ends": "11-11-10"}}
    assert read_job("megatron", text, DGX, **options)[0].facts["ends"] == "11-11-10"
    assert read_job("megatron", TEXTS["megatron"], DGX, layout=Layout(pp=1))[0].layout.chunks == 1
