"""An export of a transformer is the training that was planned, or it says what it is not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exports import drawn, judge
from partopt import Layout, PartoptError, export_plan
from partopt.configurations.settings import read_settings
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search import judging
from partopt.search.jobs import read_job
from partopt.trainers import TRAINERS
from partopt.trainers.parts import find_parts
from partopt.trainers.read_back import find_losses
from tests.examples import examples
from tests.helpers import rows
from tests.trainers.models import exported, plan_layout
from tests.trainers.readers import assigned


@pytest.mark.slow
@examples(200)
@given(st.integers(0, 2**32))
def test_what_is_drawn_is_the_same_training_or_says_what_it_is_not(seed):
    """`benchmarks/exports.py` draws many more."""
    outcome, what = judge(drawn(random.Random(seed)))
    assert outcome in ("same", "noted", "refused", "no plan"), what


# for whom it is planned, and written
REFUSED = rows("""
    megatron | megatron | bert-base | tp=2 | bfloat16 | `causal` of the model is False
    megatron-bridge | megatron-bridge | bert-base | tp=2 | bfloat16 | `causal` of the model is False
    megatron | torchtitan | llama3-8b | shard=none | float16 | float16, it would be bfloat16
    megatron | deepspeed | llama3-8b | tp=2 | fp8 | the format is fp8, it would be bfloat16
    megatron | deepspeed | llama3-8b | tp=2,recompute=selective | bfloat16 |
        recomputation is selective, it would be always
    torchtitan | torchtitan | llama3-8b | tp=8,pp=2,shard=none | bfloat16 |
        what replicas share is none, it would be gradients
    torchtitan | torchtitan | deepseek-v3 | pp=4,ep=4 | bfloat16 | predicts further tokens, which
    torchtitan | torchtitan | glm-4.5-air | pp=4,ep=4 | bfloat16 | predicts further tokens, which
    torchtitan | torchtitan | kimi-k2 | pp=4,ep=4 | bfloat16 | it has no model of such blocks
    torchtitan | torchtitan | llama4-maverick | pp=4,ep=4 | bfloat16 | has no model of such blocks
    torchtitan | torchtitan | moonlight-16b-a3b | pp=4,ep=4 | bfloat16 | has no model of such blocks
""")
OF_EXPERTS = rows("""
    mixtral-8x7b | recompute=selective,modules=mla_up_proj | mla_up_proj without latent
    llama4-scout | ep=8 | `chunked` of the model is True, it would be False
    llama4-maverick | ep=8 | `chunked` of the model is True, it would be False
""")
for own in ("megatron", "megatron-bridge"):
    REFUSED += [(own, own, model, layout, "bfloat16", why) for model, layout, why in OF_EXPERTS]


@pytest.mark.parametrize(("trainer", "to", "model", "layout", "form", "why"), REFUSED)
def test_another_training_is_refused(trainer, to, model, layout, form, why):
    with pytest.raises(PartoptError) as refused:
        exported(trainer, model, layout, form, to)
    assert {part.code for part in refused.value.parts} == {"target-cannot-say"}
    messages = [part.message for part in refused.value.parts]
    assert all(message.startswith(f"{to} cannot say this plan of ") for message in messages)
    assert any(why in message for message in messages)


NOTED = rows("""
    torchtitan | llama3-8b | bfloat16 | attention=torch |
        the plan counts attention=torch, and the text of torchtitan does not say so
    torchtitan | llama3-8b | bfloat16 | gradients=parameters |
        the plan counts gradients=parameters, and the text of torchtitan does not say so
    torchtitan | llama3-8b | bfloat16 | |
        its models attend by FlexAttention; the plan counts cuDNN's kernel
    torchtitan | mistral-7b | fp8 | |
        make its model with CONVERTERS, without which it trains in bfloat16
    megatron | llama3-8b activation=gelu | bfloat16 | |
        yours to add: the model has activation gelu, which the text does not say
    megatron | llama3-8b besides=residuals | bfloat16 | |
        yours to add: the model has residuals, which the text does not say
    megatron | llama3-8b numerics=None | bfloat16 | |
        the plan does not say norms, biases and positions of the model: plan it again
    megatron-bridge | llama3-8b | bfloat16 | messages=split |
        the plan counts messages=split, and the text of megatron-bridge does not say so:
        `partopt plan --for megatron-bridge`
""")


@pytest.mark.parametrize(("to", "model", "form", "facts", "note"), NOTED)
def test_what_the_text_does_not_say_is_a_note(to, model, form, facts, note):
    trainer = "megatron" if "messages" in facts else to
    assert note in exported(trainer, model, form=form, to=to, facts=facts).notes


@pytest.mark.parametrize("trainer", ["megatron", "megatron-bridge", "torchtitan", "deepspeed"])
def test_facts_that_nothing_depends_on_are_no_note(trainer):
    """Of one tensor parallel rank, and of a model without experts."""
    own = "sequence-parallel=no exchange=deepep" if trainer.startswith("megatron") else ""
    plain, text = (
        exported(trainer, layout="tp=1,recompute=always", facts=given) for given in ("", own)
    )
    assert text.notes == plain.notes
    assert "tp_comm_overlap = True" not in text.main and "tp-comm-overlap" not in text.main


def test_another_number_of_blocks_is_noticed():
    model = load_transformer("llama3-8b")
    plan = plan_layout("megatron", model, "pp=4,recompute=7", "bfloat16", {})
    parts = find_parts([name for stage in plan.stages for name in stage.modules])
    text, flag = export_plan(plan, "megatron").main, "--recompute-num-layers"
    for blocks, said in ((6, "6"), (9, "always")):
        other = text.replace(f"{flag} 7", f"{flag} {blocks}")
        faults = find_losses(plan, TRAINERS["megatron"], parts, read_settings(other)).faults
        assert list(faults) == [f"recomputation is 7, it would be {said}"]


def test_the_converters_of_a_model_that_is_none_of_its_own_are_read_again():
    text = exported("torchtitan", "mistral-7b", form="fp8").main
    assert "CONVERTERS = [Float8LinearConverter.Config()]" in text
    cluster = plan_layout("torchtitan", load_transformer("mistral-7b"), "tp=2", "fp8", {}).topology
    asked, _ = read_job("torchtitan", text, cluster)
    assert asked.dtype == "fp8"
    assert asked.model == load_transformer("mistral-7b")
    assert judging.plan_layout(asked).transformer.format == "fp8"


OTHERS = [
    ("    --num-layers 32", "    --num-layers 30", "the pipeline's layout has 32 blocks (t) and 0"),
    (
        "--hidden-dropout 0.0",
        "--hidden-dropout 0.1",
        "`dropout` of the model is False, it would be",
    ),
    ("--seq-length 4096", "--seq-length 2048", "the sequence is 4096, it would be 2048"),
    ("--global-batch-size 64", "--global-batch-size 32", "the batch is 64, it would be 32"),
    ("--micro-batch-size 1", "--micro-batch-size 2", "microbatch is 1, it would be 2"),
    ("--bf16", "--fp16", "the format is bfloat16, it would be float16"),
    ("-parallel-size 2", "-parallel-size 4", "tp is 2, it would be 4"),
    ("--use-distributed-optimizer", "", "what replicas share is optimizer, it would be none"),
    ("Et*17|t*15L", "Et*16|t*16L", "blocks of stages is [17, 15], it would be [16, 16]"),
    ("    --num-layers 32", "    --num-layers $LAYERS", "--num-layers: depends on LAYERS"),
]


@pytest.mark.parametrize(("old", "new", "fault"), OTHERS)
def test_a_text_that_says_another_training_is_noticed(old, new, fault):
    plan = plan_layout("megatron", load_transformer("llama3-8b"), "tp=2,pp=2", "bfloat16", {})
    trainer = TRAINERS["megatron"]
    parts = find_parts([name for stage in plan.stages for name in stage.modules])
    text = export_plan(plan, "megatron").main
    assert find_losses(plan, trainer, parts, read_settings(text)) == ([], [])
    assert old in text
    other = read_settings(text.replace(old, new, 1))
    faults = find_losses(plan, trainer, parts, other).faults
    assert [own for own in faults if fault in own]


def flags(text):
    """The arguments of an exported array, each on its line."""
    return {line.strip() for line in text.splitlines() if line.startswith("    --")}


# model, layout and facts; arguments that are given, and those that are not
TOLD = rows("""
    llama3-8b | tp=2 | | --rotary-base 500000; --use-rope-scaling; --rope-scaling-factor 8.0;
        --normalization RMSNorm; --norm-epsilon 1e-05; --disable-bias-linear |
        --qk-layernorm; --add-qkv-bias
    qwen3-8b | tp=2 | | --rotary-base 1000000; --qk-layernorm; --norm-epsilon 1e-06 |
        --use-rope-scaling
    gpt3-6.7b | tp=2 | | --normalization LayerNorm; --norm-epsilon 1e-05 |
        --rotary-base; --disable-bias-linear; --squared-relu
    llama3-8b activation=relu2 bias=queries rotary_share=0.5 rotary_scaling={} | tp=2 | |
        --squared-relu; --add-qkv-bias; --disable-bias-linear; --rotary-percent 0.5 |
        --use-rope-scaling; --rope-scaling-factor
    mixtral-8x7b shared_ffn=2048 | tp=2,ep=8 | | --moe-shared-expert-intermediate-size 2048;
        --ffn-hidden-size 14336; --expert-tensor-parallel-size 1 |
    mixtral-8x7b shared_ffn=2048 | tp=1,ep=8 | | --swiglu | --expert-tensor-parallel-size
    llama3-8b | tp=2 | tp-overlap=yes | --tp-comm-overlap |
    llama3-8b | cp=2 | bucket=40MB | --ddp-bucket-size 10000000 |
    llama3-8b | pp=8,chunks=4,recompute=1 | | --recompute-num-layers 1 |
    llama3-8b | tp=2,pp=2,recompute=16 | | --recompute-num-layers 16;
        --pipeline-model-parallel-layout 'Et*17|t*15L' |
""")


@pytest.mark.parametrize(("model", "layout", "facts", "has", "lacks"), TOLD)
def test_megatron_is_told(model, layout, facts, has, lacks):
    said = flags(exported("megatron", model, layout, facts=facts).main)
    assert {*has.split("; ")} <= said
    assert not [line for line in said if line.startswith(tuple(lacks.split("; ")) if lacks else ())]


def of_a_short_sequence(trainer, layout):
    """What is written for 32 microbatches of two samples of 1,024 tokens, on 16 GPUs."""
    plan = plan_layout(trainer, load_transformer("llama3-8b"), layout, "bfloat16", {})
    asked = Job(
        model=plan.transformer.model,
        topology=plan.topology,
        trainer=trainer,
        global_batch=64,
        sequence=1024,
        layout=Layout.parse(f"{layout},microbatch=2"),
    )
    return export_plan(judging.plan_layout(asked), trainer, stem="planned").main


def test_each_trainer_is_told_the_sequence_and_the_batch():
    megatron = flags(of_a_short_sequence("megatron", "tp=2,pp=2"))
    assert {"--seq-length 1024", "--max-position-embeddings 1024"} <= megatron
    assert {"--micro-batch-size 2", "--global-batch-size 64"} <= megatron
    bridge = of_a_short_sequence("megatron-bridge", "tp=2,pp=2")
    assert assigned(bridge, "config.dataset.seq_length") == 1024
    piped, alone = (of_a_short_sequence("torchtitan", own) for own in ("tp=2,pp=2", "tp=2"))
    for text in (piped, alone):
        assert assigned(text, "config.training.max_context_length") == 1024
        assert assigned(text, "config.training.seq_len") == 1024
        assert "num_tokens_per_microbatch_per_dp_rank = 2 * 1024\n" in text
        assert "num_tokens_per_train_step = 64 * 1024\n" in text
        assert assigned(text, "config.training.global_batch_size") == 64
    # 64 samples over four replicas
    assert assigned(piped, "config.parallelism.num_pp_microbatches") == 8
    assert assigned(piped, "config.training.local_batch_size") == 16
    assert assigned(alone, "config.training.local_batch_size") == 2
    assert "num_pp_microbatches" not in alone
    deepspeed = of_a_short_sequence("deepspeed", "tp=4,pp=2")
    assert assigned(deepspeed, "SEQUENCE") == 1024
    config = assigned(deepspeed, "CONFIG")
    assert config["gradient_accumulation_steps"] == 64 // (2 * 2)
    assert "axes=['pipe', 'data', 'model'], dims=[2, 2, 4]" in deepspeed


def test_bridge_is_told_all_of_it_whatever_its_recipe_has():
    text = exported("megatron-bridge", "qwen3-8b").main
    expected = {
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "rotary_base": 1_000_000,
        "rotary_percent": 1.0,
        "rope_scaling": False,
    }
    assert {name: assigned(text, f"config.model.{name}") for name in expected} == expected


def test_a_script_without_a_word_on_them_has_megatrons_own():
    script = """#!/bin/bash
    torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
      --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --bf16 \\
      --vocab-size 128256 --untie-embeddings-and-output-weights --seq-length 4096 \\
      --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \\
      --micro-batch-size 1 --global-batch-size 64
    """
    plan = plan_layout("megatron", load_transformer("llama3-8b"), "tp=2", "bfloat16", {})
    asked, _ = read_job("megatron", script, plan.topology)
    assert asked.model.name == "llama3-8b"
    found = asked.model.numerics
    assert (found.norm, found.epsilon, found.bias) == ("layer", 1e-5, "all")
    assert (found.rotary_base, found.rotary_scaling, found.query_key_norms) == (10_000, {}, False)


def test_a_model_of_the_shape_alone_is_not_torchtitans_flavour():
    """Its flavours have positions and norms of their own."""
    text = exported("torchtitan", "llama3-8b rotary_base=1e4").main
    assert "MODEL = {" in text
    assert "'rope_theta': 10000.0" in text
    assert "MODEL" not in exported("torchtitan").main


@pytest.mark.parametrize("trainer", ["torchtitan", "deepspeed"])
def test_a_trainer_that_cuts_no_expert_is_not_asked_to(trainer):
    with pytest.raises(PartoptError, match=r"etp=2`?: .* has no such part of a layout"):
        exported(trainer, "mixtral-8x7b", "etp=2")
