"""What texts of trainers say, and what is refused."""

from __future__ import annotations

import pytest

from partopt.configurations.settings import read_settings
from partopt.errors import PartoptError
from partopt.trainers import TRAINERS, readers
from partopt.trainers.layout import read_layout
from tests.helpers import flat, uniform_profile
from tests.trainers.models import transformer

# wte wpe h.0 .. h.11 ln_f lm_head: block n is layer n + 2
CUTS = [6, 9, 12]

TITAN = [
    ["tok_embeddings", *(f"layers.{n}" for n in range(4))],
    [f"layers.{n}" for n in range(4, 7)],
    [f"layers.{n}" for n in range(7, 10)],
    ["layers.10", "layers.11", "norm", "lm_head"],
]
WORDS = " ".join(",".join(names) for names in TITAN)
LISTS = [
    ["embedding", *["decoder"] * 4],
    ["decoder"] * 3,
    ["decoder"] * 3,
    ["decoder", "decoder", "loss"],
]

SAME = [
    ("megatron", "Et*4|t*3|t*3|t*2L"),
    ("megatron", "E,tttt|(ttt|)*2,ttL\n"),
    ("megatron", "Et*4|(t*3|)*2t*2,L"),
    ("megatron", "torchrun train.py --pipeline-model-parallel-layout 'Et*4|(ttt|)*2ttL' --x 1"),
    ("megatron", "L='Et*4|t*3|t*3|t*2L'\nrun --pipeline-model-parallel-layout $L"),
    ("megatron", "A=(--x 1 --pipeline-model-parallel-layout 'Et*4|t*3|t*3|t*2L')\nrun ${A[@]}"),
    ("megatron", 'A=(\n  --pipeline-model-parallel-layout="Et*4|t*3|t*3|t*2L"\n)\n'),
    ("megatron", "pipeline_model_parallel_layout: Et*4|t*3|t*3|t*2L  # of four\nother: 3\n"),
    ("megatron-bridge", f"cfg.model.pipeline_model_parallel_layout = {LISTS}"),
    ("megatron-bridge", repr(LISTS)),
    ("megatron-bridge", f"L = {LISTS}\ndict(pipeline_model_parallel_layout=L)"),
    ("torchtitan", WORDS),
    ("torchtitan", WORDS.replace("lm_head", "output")),
    ("torchtitan", repr(TITAN)),
    ("torchtitan", repr([tuple(own) for own in TITAN])),
    ("torchtitan", f"def f():\n  c.parallelism.module_fqns_per_model_part = S\nS = {TITAN}"),
    (
        "torchtitan",  # the last counts
        f"module_fqns_per_model_part = [['norm']]\nmodule_fqns_per_model_part = {TITAN}",
    ),
    ("torchtitan", f"P(x=g(), module_fqns_per_model_part={TITAN})"),
    (
        "torchtitan",
        f"run.sh --parallelism.module_fqns_per_model_part \\\n {WORDS} --steps 3 || exit",
    ),
    ("deepspeed", "0,6,9,12,16"),
    ("deepspeed", "[0, 6, 9, 12, 16]"),
    ("deepspeed", "BOUNDS = [0, 6, 9, 12, 16]  # of stages\nimport deepspeed"),
    ("colossalai", "Plugin(pp_size=4, num_layers_per_stage=[4, 3, 3, 2])"),
    ("colossalai", "train --num-layers-per-stage 4, 3, 3, 2"),
    ("vllm", "4,3,3,2"),
    ("vllm", "export VLLM_PP_LAYER_PARTITION=4,3,3,2\nvllm serve m"),
    ("vllm", "# VLLM_PP_LAYER_PARTITION=6,6\nVLLM_PP_LAYER_PARTITION='4,3,3,2' vllm serve m -x"),
    ("vllm", "import os\nos.environ['VLLM_PP_LAYER_PARTITION'] = '4,3,3,2'"),
    ("sglang", "SGLANG_PP_LAYER_PARTITION=4,3,3,2"),
    ("torchgpipe", "GPipe(model, balance=[6, 3, 3, 4], chunks=8)"),
    ("accelerate", "h.4,h.7,h.10"),
    ("accelerate", "prepare_pippy(model, split_points=['h.4', 'h.7', 'h.10'])"),
]


@pytest.mark.parametrize(("trainer", "text"), SAME)
def test_twelve_blocks_4_3_3_2(trainer, text):
    assert list(read_layout(trainer, text, transformer()).cuts) == CUTS


def test_a_cut_before_a_block_of_two_layers_is_before_its_first():
    layout = read_layout("vllm", "1,2", transformer(3, halves=True))
    assert list(layout.cuts) == [4]


def test_names_that_begin_alike_are_others():
    names = ["norm0", "h1", "h10.norm", "norm.weight", "norm", "h.1", "h.10"]
    own = uniform_profile(len(names), names=names)
    for split, cuts in (("norm", [3]), ("h1,norm", [1, 3]), ("h10,norm", [2, 3]), ("h.10", [6])):
        assert list(read_layout("accelerate", split, own).cuts) == cuts
    with pytest.raises(PartoptError, match="nor: the profile has no such layer"):
        read_layout("accelerate", "nor", own)


def test_embedding_norm_and_head_may_stand_alone_where_a_trainer_has_them_so():
    model = transformer(2)
    assert list(read_layout("megatron", "E|t|t|L", model).cuts) == [2, 3, 4]
    alone = "tok_embeddings layers.0,layers.1 norm lm_head"
    assert list(read_layout("torchtitan", alone, model).cuts) == [2, 4, 5]


def test_the_devices_of_a_pipeline_are_read_with_it():
    text = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|tt|tt|t*6L'"
    layout = read_layout("megatron", text, transformer())
    assert layout.pipeline_size == 2
    with pytest.raises(PartoptError, match="the layout itself says 2"):
        read_layout("megatron", text, transformer(), pipeline_size=4)


@pytest.mark.parametrize(
    ("said", "schedule", "chunks"),
    [("", "interleaved", 2), ("ZBVZeroBubble", "zbv", None), ("Mine", "interleaved", 2)],
)
def test_torchtitan_names_its_schedule(said, schedule, chunks):
    text = f"c.pipeline_parallel_degree = 2\nc.pipeline_parallel_schedule = {said!r}\n"
    text += f"c.module_fqns_per_model_part = {TITAN}"
    options = read_layout("torchtitan", text, transformer()).options(flat(4))
    assert (options["schedule"], options.get("chunks")) == (schedule, chunks)
    assert options["replicas"] == [2, 2, 2, 2]


REFUSED = [
    ("megatron", "Et*4|t*9L", "the layout has 13 blocks, the profile 12"),
    ("megatron", "Et*6||t*6L", "segment 1 is empty: Megatron runs a stage without layers"),
    ("megatron", "Et*6|t*6|mL", "`m`: layers of multi-token prediction are in no profile"),
    ("megatron", "t*12L", "a layout begins with its one E, and ends with its one L"),
    ("megatron", "EtLt*11", "a layout begins with its one E, and ends with its one L"),
    ("megatron", "Et*12", "a layout begins with its one E, and ends with its one L"),
    ("megatron", "Et*6|x*6L", "unknown: xxxxxx"),
    ("megatron", "E(ttL", "unknown: ("),
    ("megatron", "Et*999999999L", "'Et*999999999L': more than 1,000,000 letters"),
    ("megatron", "import sys", "no layout, and no pipeline_model_parallel_layout"),
    ("megatron-bridge", "[['embedding'], ['decodr']]", "unknown: <decodr>"),
    ("megatron-bridge", "[['embedding'], 3]", "model_parallel_layout is [['embedding'], 3]"),
    ("torchtitan", WORDS.replace(",norm", ""), "the layout has no norm, which torchtitan would"),
    ("torchtitan", WORDS.replace("layers.11,", ""), "the layout has 11 blocks, the profile 12"),
    ("torchtitan", WORDS.replace("norm", "nrm"), "nrm: no module of torchtitan's models"),
    ("torchtitan", WORDS.replace("layers.5", "layers.3"), "the layout has 11 blocks"),
    ("torchtitan", WORDS + " norm", "norm stands where the end is expected"),
    (
        "torchtitan",
        WORDS.replace("norm,lm_head", "lm_head,norm"),
        "head stands where norm is expected",
    ),
    ("torchtitan", repr([*TITAN[:2], [], *TITAN[2:]]), "stage 2 has no modules"),
    ("torchtitan", repr([*TITAN, []]), "stage 4 has no modules"),
    ("torchtitan", "[['tok_embeddings'], 3]", "not a list of the modules of each stage"),
    (
        "torchtitan",
        "c.module_fqns_per_model_part = split(12)",
        "module_fqns_per_model_part is computed, and nothing is executed here",
    ),
    ("deepspeed", "0,6,12", "the layout has 12 layers, the profile 16"),
    ("deepspeed", "0,6,6,16", "stage 1 has no layers"),
    ("deepspeed", "1,6,16", "1,6,16: not bounds"),
    ("deepspeed", "0,9,6,16", "0,9,6,16: not bounds"),
    ("deepspeed", "0", "0: not bounds"),
    ("vllm", "4,4", "the layout has 8 blocks, the profile 12"),
    ("vllm", "6,0,6", "stage 1 has no blocks"),
    ("vllm", "six,six", "neither numbers nor a text with VLLM_PP_LAYER_PARTITION"),
    ("vllm", "VLLM_PP_LAYER_PARTITION=a,b c", "VLLM_PP_LAYER_PARTITION is"),
    ("colossalai", "Plugin(num_layers_per_stage=[6, 0, 6])", "stage 1 has no blocks"),
    ("torchgpipe", "[8, 0, 8]", "stage 1 has no layers"),
    ("torchgpipe", "[8, 9]", "the layout has 17 layers, the profile 16"),
    ("accelerate", "h.4,h.40", "h.40: the profile has no such layer"),
    ("accelerate", "h.7,h.4", "h.7, h.4: stages do not begin in the order of the layers"),
    ("accelerate", "wte", "wte: stages do not begin in the order of the layers"),
    ("torch-csv", "", "no actions"),
    ("megatrn", "", 'unknown trainer "megatrn"'),
]


@pytest.mark.parametrize(("trainer", "text", "message"), REFUSED)
def test_what_is_no_layout_of_the_model_is_refused(trainer, text, message):
    with pytest.raises(PartoptError) as raised:
        read_layout(trainer, text, transformer())
    assert message in raised.value.message
    assert raised.value.hint


def test_a_model_whose_names_do_not_say_what_they_are_needs_rules():
    model = transformer(2)
    with pytest.raises(PartoptError, match="the profile has no head"):
        read_layout("megatron", "Et|tL", model, rules=["lm_head=norm"])
    with pytest.raises(PartoptError, match="the layout has a head, the profile none"):
        alone = "tok_embeddings,layers.0 layers.1,norm,lm_head"
        read_layout("torchtitan", alone, model, rules=["lm_head=norm"])
    layout = read_layout("megatron", "E|ttL", model, rules=["wpe=embedding"])
    assert list(layout.cuts) == [2]


def test_one_number_is_one_stage():
    assert not read_layout("colossalai", "P(num_layers_per_stage=12)", transformer()).cuts


def test_rules_and_cuts_are_refused_where_they_say_nothing():
    with pytest.raises(PartoptError, match="deepspeed counts layers, whatever they are"):
        read_layout("deepspeed", "0,6,16", transformer(), rules=["wpe=embedding"])
    with pytest.raises(PartoptError, match="a layout of vllm itself says where stages begin"):
        read_layout("vllm", "6,6", transformer(), cuts=[3])


def test_every_trainer_that_reads_has_an_example_and_says_what_it_is():
    for trainer in (TRAINERS[name] for name in readers()):
        assert trainer.reads
        assert trainer.example


def test_a_flag_that_ends_like_another_is_another():
    script = "--ffn-hidden-size 4096 --hidden-size 1024"
    assert read_settings(script).number("hidden_size") == 1024
    assert read_settings("--ffn-hidden-size 4096").number("hidden_size") is None
    assert read_settings("hidden-size: 1024").number("hidden_size") == 1024
