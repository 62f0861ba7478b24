"""A transformer's training in the configurations of trainers: written, read again, and judged."""

from __future__ import annotations

import functools
import json
import re

import pytest
from msgspec import structs

from partopt.documents.engine import Layout
from partopt.documents.plan import seconds_of
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import (
    like_shipped,
    load_transformer,
    read_transformer,
    write_config,
)
from partopt.job import Job
from partopt.search import judging
from partopt.search.changes import change_text
from partopt.search.jobs import read_job
from partopt.search.judging import judge_layout
from partopt.trainers import export_plan
from tests.helpers import rows
from tests.trainers.models import exported, model_of, plan_layout, value_of


@functools.cache
def topology():
    return Topology.load("dgx-h100", 2)


def told(model):
    """The model but for what no argument says of norms, biases, positions and routers."""
    numerics = model.numerics
    scaling = numerics.rotary_scaling
    yarn = scaling.get("rope_type") == "yarn" and (not model.latent or scaling["beta_fast"] != 32)
    bias = "queries" if numerics.bias == "attention" else numerics.bias
    numerics = structs.replace(
        numerics, besides="", bias=bias, rotary_scaling={} if yarn else scaling
    )
    return structs.replace(model, numerics=numerics)


def answer(plan):
    """The plan without its question, which fixes all where it is read."""
    about = structs.replace(plan.transformer, asked=Layout(), facts={})
    engine = structs.replace(plan.engine, shard=("none",))
    return structs.replace(plan, transformer=about, engine=engine)


ROUND = rows("""
    torchtitan | llama3-8b | tp=2,recompute=selective | fp8 | compile=yes
    torchtitan | llama3-70b | tp=8,recompute=always | bfloat16 | compile=yes async-tp=yes loss=eager
    torchtitan | llama3-8b | pp=2,shard=none | bfloat16 | loss=compiled
    megatron | llama3-8b | pp=2,tp=2,chunks=2,recompute=2 | bfloat16 | ends=free
    megatron | mixtral-8x7b | tp=2,ep=8 | bfloat16 | exchange=deepep
    megatron | llama3-8b | shard=parameters | fp8 | gradients=parameters
    megatron-bridge | qwen3-30b-a3b | ep=8,shard=parameters | bfloat16 |
    megatron | llama3-8b | cp=2,shard=gradients | bfloat16 | optimizer_bytes=6
    torchtitan | llama3-8b | recompute=always | bfloat16 | cpu-offload=yes
    megatron | glm-4.5 | pp=4,ep=2,etp=2 | bfloat16 | routing=capacity
    megatron | deepseek-v3 | pp=8,chunks=2,ep=2,recompute=selective,modules=mla_up_proj+moe_act |
        bfloat16 | graphs=attention optimizer_bytes=8 ends=4-4-4-4-4-4-4-4-4-4-4-4-4-4-4-1
    megatron-bridge | deepseek-v3 | pp=16,chunks=2 | bfloat16 | graphs=full
        ends=3-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-2-0m-0
    megatron-bridge | gpt-oss-20b | ep=8,shard=none | bfloat16 | muon=yes
    megatron-bridge | moonlight-16b-a3b | ep=8 | bfloat16 | fused-experts=yes
    megatron | llama3-70b | tp=4,pp=4 | bfloat16 |
        optimizer-offload=0.37 offload-overlap=yes gradients=parameters
    megatron-bridge | llama3-8b | pp=2 | bfloat16 | optimizer-offload=1
    megatron-bridge | llama3-8b | pp=2,chunks=4 | fp8 | waits=1f1b,interleaved
    deepspeed | gpt3-13b | tp=2,pp=4 | float16 | attention=flash
""")


@pytest.mark.parametrize("case", ROUND, ids=lambda case: f"{case[0]}-{case[2]}")
def test_what_is_written_is_read_again_of_one(case):
    trainer, model, layout, form, said = case
    facts = {name: value_of(own) for name, own in (fact.split("=") for fact in said.split())}
    plan = plan_layout(trainer, told(model_of(model)), layout, form, facts)
    text = export_plan(plan, trainer, stem="planned").main
    again, notes = read_job(trainer, text, topology())
    assert answer(judging.plan_layout(again)) == answer(plan) and not notes


@pytest.mark.parametrize("trainer", ["megatron", "megatron-bridge"])
def test_megatron_counts_a_window_without_the_token_itself(trainer):
    text = exported(trainer, "llama3-8b window=1024", "pp=2").main
    assert "1023, 0" in text or "1023,0" in text
    assert read_job(trainer, text, topology())[0].model.window == 1024


MEGATRON = """#!/bin/bash
TP=${TP:-4}
PP=2
NODES=2
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32  # of which 8 have keys
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --normalization RMSNorm --rotary-base 500000 --use-rope-scaling
)
PARALLEL=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size ${PP})
if [ "$TP" -gt 1 ]; then
    PARALLEL+=(--sequence-parallel)
fi
TRAINING="--micro-batch-size 1 --global-batch-size $((NODES * 64)) --bf16"
torchrun --nproc-per-node 8 --nnodes $NODES pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" ${PARALLEL[@]} $TRAINING --use-distributed-optimizer --save $1
"""


def read(trainer, text, **options):
    return read_job(trainer, text, topology(), **options)


def test_a_script_of_megatron():
    asked, notes = read("megatron", MEGATRON)
    assert asked.model == model_of("llama3-8b")
    assert (asked.sequence, asked.global_batch, asked.dtype) == (8192, 128, "bfloat16")
    assert asked.layout == Layout(
        tp=4, cp=1, ep=1, pp=2, chunks=1, microbatch=1, recompute="never", shard="optimizer"
    )
    assert asked.facts == {"allreduce": "blocking", "ends": "stage"}
    assert notes == ["a vocabulary of 128,256, as llama3-8b of the same shape has"]


# what is put behind --bf16 or, where it has an arrow, in place of what stands before that
CHANGES = rows("""
    --overlap-grad-reduce | facts | {"ends": "stage"}
    --bf16 -> --fp16 | dtype | float16
    --fp8-format hybrid --fp8-recipe mxfp8 | dtype | mxfp8
    --fp4-format e2m1 --fp8-format hybrid | dtype | nvfp4
    --recompute-activations | recompute | selective
    --recompute-granularity full --recompute-method uniform | recompute | always
    --recompute-granularity full --recompute-method block --recompute-num-layers 3 | recompute | 3
    --num-layers-per-virtual-pipeline-stage 4 | chunks | 4
    --num-virtual-stages-per-pipeline-rank 8 | chunks | 8
    --use-distributed-optimizer -> | shard | none
    --group-query-attention -> | kv_heads | 32
    --vocab-size 1000 | vocabulary | 1000
    --window-size 4095,0 | window | 4096
    --window-size 4095 0 | window | 4096
    --window-size -1 -1 | window | 0
    --bf16 -> --precision bfloat16 | dtype | bfloat16
    --ffn-hidden-size 14336 -> | ffn | 10880
    --num-experts 8 --expert-model-parallel-size 2 | ep | 2
    --num-experts 8 --expert-model-parallel-size 2 | etp | 4
    --num-experts 8 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 | etp | None
    --num-experts 8 --moe-layer-freq ([0]*3+[1]*29) | dense_first | 3
    --num-experts 8 --moe-layer-freq ([0]*3+[1])*8 | experts_period | 4
    --num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 | groups | 4
    --num-experts 8 --moe-shared-expert-intermediate-size 512 | shared_ffn | 512
    --mtp-num-layers 2 | further | 2
    --softmax-type learnable | sinks | True
    --window-size 127,0 --window-attn-skip-freq 2 | full_period | 2
    --window-size 127,0 --window-attn-skip-freq [1,1,1,0]*8 | full_period | 4
    --window-size 127,0 --window-attn-skip-freq 1 | window | 0
    --multi-latent-attention | latent | Latent(keys=32, rotary=64, values=128)
    --multi-latent-attention --qk-head-dim 96 | head_size | 160
    --recompute-granularity selective --recompute-modules moe_act layernorm | modules |
        moe_act+layernorm
""")


@pytest.mark.parametrize(("change", "name", "value"), CHANGES)
def test_what_arguments_of_megatron_say(change, name, value):
    old, arrow, new = change.partition(" ->")
    old, new = (old, new.strip()) if arrow else ("--bf16", f"--bf16 {change}")
    assert old in MEGATRON
    asked, _ = read("megatron", MEGATRON.replace(old, new), arguments={"vocab_size": "128256"})
    if "--vocab-size" in new:
        asked, _ = read("megatron", MEGATRON.replace(old, new))
    for own in (asked.layout, asked, asked.model):
        if hasattr(own, name):
            assert getattr(own, name) == value_of(value)
            return
    raise AssertionError(name)


def test_what_is_given_goes_before_what_the_script_says():
    asked, _ = read(
        "megatron",
        MEGATRON,
        arguments={"TP": "8"},
        global_batch=64,
        sequence=4096,
        dtype="fp8",
        layout=Layout(pp=1, recompute="always"),
        facts={"loss": "fused"},
    )
    layout = asked.layout
    assert (layout.tp, layout.pp, layout.recompute) == (8, 1, "always")
    assert (asked.global_batch, asked.sequence, asked.dtype) == (64, 4096, "fp8")
    assert asked.facts["loss"] == "fused"


def test_all_that_is_missing_is_said_at_once():
    text = MEGATRON.replace("TP=${TP:-4}", "").replace("--hidden-size 4096", "--hidden-size $H")
    text = text.replace("--num-layers 32", "").replace("--seq-length 8192", "")
    with pytest.raises(PartoptError) as raised:
        read("megatron", text)
    messages = [part.message for part in raised.value.parts]
    assert "--hidden-size: depends on H, which the text does not say" in messages
    for name in ("num-layers", "seq-length"):
        assert f"--{name}: the configuration does not say it" in messages
    assert all("`arguments=" in part.hint for part in raised.value.parts)
    rest = MEGATRON.replace("TP=${TP:-4}", "")
    with pytest.raises(PartoptError, match="--tensor-model-parallel-size: depends on TP"):
        read("megatron", rest)


NOT_PLANNED = rows("""
    --linear-attention-freq 4 | blocks of another kind
    --use-megatron-fsdp --data-parallel-sharding-strategy all | unknown all
    --num-experts 8 --moe-layer-freq 2 | --moe-layer-freq: blocks of two kinds
    --num-experts 8 --moe-layer-freq [1]*31 | does not say which of 32 blocks
    --window-size 9,0 --window-attn-skip-freq [0,1]*16 | skip-freq: blocks of two kinds
    --pipeline-model-parallel-layout Et*16|t*16mL | 1 of further tokens .m., the model 32 an
    --pipeline-model-parallel-layout Et*16|t*15L | 31 blocks .t. and 0
    --window-size all | 'all' is not a number of tokens
""")


@pytest.mark.parametrize(("flag", "message"), NOT_PLANNED)
def test_what_is_not_planned_is_refused(flag, message):
    with pytest.raises(PartoptError, match=message):
        read("megatron", MEGATRON.replace("--bf16", f"--bf16 {flag}"))


FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
BUFFERS = "--use-nccl-ub --fsdp-double-buffer"


IN_FSDP = rows(f"""
    | parameters | parameters | as with --fsdp-double-buffer
    {BUFFERS} | parameters | parameters |
    {BUFFERS} --data-parallel-sharding-strategy optim_grads | gradients | parameters |
    {BUFFERS} --megatron-fsdp-main-grads-dtype fp32 | parameters | float32 |
    {BUFFERS} --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16 |
        parameters | float32 | exchanged in the format in which they are kept
    {BUFFERS} --fp8-format hybrid | parameters | parameters | gathered in the format of products
""")


@pytest.mark.parametrize(("flags", "shard", "gradients", "noted"), IN_FSDP)
def test_a_script_of_fsdp_in_megatron(flags, shard, gradients, noted):
    text = MEGATRON.replace("PP=2", "PP=1").replace("--bf16", f"--bf16 {FSDP} {flags}")
    asked, notes = read("megatron", text)
    assert asked.layout.shard == shard
    assert asked.facts["fsdp"] == "yes" and "allreduce" not in asked.facts
    assert asked.facts.get("gradients", "float32") == gradients
    assert "not read" not in " ".join(notes)
    assert [note for note in notes if noted and noted in note] or (not noted and len(notes) == 1)


def test_gradients_of_fsdp_are_counted_as_copied():
    note = "gradients are counted as copied, as without gradient accumulation fusion"
    text = MEGATRON.replace("PP=2", "PP=1").replace("--bf16", "--bf16 --use-megatron-fsdp")
    assert note in read("megatron", text)[1]
    shares = "cfg.ddp.data_parallel_sharding_strategy = 'optim_grads_params'"
    fields = f"cfg.ddp.use_megatron_fsdp = True\n{shares}\n{BRIDGE}"
    assert note in read("megatron-bridge", fields)[1]
    off = f"cfg.model.gradient_accumulation_fusion = False\n{fields}"
    assert note not in read("megatron-bridge", off)[1]


def test_shares_of_the_state_by_fsdp_are_those_of_the_distributed_optimizer():
    flags = f"--bf16 {FSDP} --data-parallel-sharding-strategy"
    for strategy, shard in (("optim", "optimizer"), ("no_shard", "none")):
        asked, _ = read("megatron", MEGATRON.replace("--bf16", f"{flags} {strategy}"))
        assert asked.layout.shard == shard and "fsdp" not in asked.facts


def test_fsdp_of_megatron_bridge_says_what_it_shares():
    text = exported("megatron-bridge", layout="shard=parameters").main
    said = "    config.ddp.data_parallel_sharding_strategy = 'optim_grads_params'\n"
    asked, _ = read("megatron-bridge", text)
    assert (asked.layout.shard, said in text) == ("parameters", True)
    assert read("megatron-bridge", text.replace(said, ""))[0].layout.shard == "none"
    assert "use_megatron_fsdp = False" in exported("megatron-bridge", layout="tp=1").main


def test_pipelines_of_megatron_have_no_fsdp():
    asked, _ = read("megatron", MEGATRON.replace("--bf16", f"--bf16 {FSDP}"))
    with pytest.raises(PartoptError, match="a view, which pipelines do not free"):
        judging.plan_layout(asked)


def test_what_starts_fsdp_of_megatron_does_not_limit_connections():
    for layout, line in (
        ("shard=parameters,tp=2", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        ("tp=2", "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("cp=2", "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("pp=2", ""),
    ):
        written = exported("megatron", layout=layout)
        assert line in written.main and ("CUDA_DEVICE" in written.main) == bool(line)
        assert any("may hide less" in note for note in written.notes) == ("unset" in line)


def test_shards_of_torchtitan_on_the_host_are_read_and_written():
    written = exported("torchtitan", layout="shard=parameters", facts="cpu-offload=yes")
    assert "config.training.enable_cpu_offload = True" in written.main
    assert any("OMP_NUM_THREADS" in note for note in written.notes)
    flags = "--module llama3 --config llama3_8b --training.enable_cpu_offload --training.seq_len"
    asked, _ = read("torchtitan", f"torchrun -m torchtitan.train {flags} 8192")
    assert asked.facts["cpu-offload"] == "yes"


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [({}, None), ({"factor": 32.0}, "32.0"), ({"rope_type": "yarn"}, None), ({"x": 1.0}, None)],
)
def test_a_scaling_of_positions_is_written_where_it_is_llamas(scaling, factor):
    model = model_of("llama3-8b")
    if scaling:
        scaling = model.numerics.rotary_scaling | scaling
    numerics = structs.replace(model.numerics, rotary_scaling=scaling)
    model = structs.replace(model, numerics=numerics)
    written = export_plan(plan_layout("megatron", model, "tp=1", "bfloat16", {}), "megatron")
    assert ("--use-rope-scaling" in written.main) == (factor is not None)
    said = re.search(r"--rope-scaling-factor (\S+)", written.main)
    assert (said and said[1]) == factor
    lacks = [note for note in written.notes if "the model has rotary_scaling" in note]
    assert bool(lacks) == (bool(scaling) and factor is None)


def test_what_is_not_counted_is_said():
    text = MEGATRON.replace("--bf16", "--bf16 --rampup-batch-size 16 16 1000 --num-experts 8")
    _, notes = read("megatron", text, arguments={"vocab_size": "1000"})
    said = " ".join(notes)
    for words in ("--rampup-batch-size", "allgather is counted as alltoall"):
        assert words in said


def test_uneven_stages_are_planned_as_they_are():
    layout = "--pipeline-model-parallel-layout 'Et*20|t*12L'"
    asked, notes = read("megatron", MEGATRON.replace("--bf16", f"--bf16 {layout}"))
    assert asked.facts["ends"] == "20-12" and len(notes) == 1
    assert [stage.stop for stage in judging.plan_layout(asked).stages] == [
        21,
        35,
    ]  # behind the embedding, with the head
    with pytest.raises(PartoptError, match=r"ends: 20-13 are not 2 x 1 stages of 32 blocks"):
        judging.plan_layout(asked.with_(facts={"ends": "20-13"}))
    even = "--pipeline-model-parallel-layout 'E(t|)*31tL'"
    asked, notes = read("megatron", MEGATRON.replace("--bf16", f"--bf16 {even}"))
    assert asked.layout.chunks == 16 and len(notes) == 1


BRIDGE = """
from megatron.bridge import AutoBridge


def llama3_8b():
    cfg = common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size, = 512,
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.mixed_precision = "bf16_with_fp8_delayed_scaling_mixed"
    cfg.ddp.use_distributed_optimizer = True
    return cfg
"""
NEMO = """
trainer: {num_nodes: 2, precision: bf16-mixed}
model:
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  encoder_seq_length: 8192
  activation: fast-swiglu
  position_embedding_type: rope
  rotary_base: 500000.0
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  micro_batch_size: 1
  global_batch_size: 512
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  sequence_parallel: true
  optim: {name: distributed_fused_adam}
"""


WITHOUT_FP8 = NEMO + "  fp8: false\n  fp8_hybrid: true\n"


@pytest.mark.parametrize(
    ("text", "form"), [(BRIDGE, "fp8"), (NEMO, "bfloat16"), (WITHOUT_FP8, "bfloat16")]
)
def test_a_recipe_of_bridge_and_a_document_of_nemo(text, form):
    asked, _ = read("megatron-bridge", text)
    assert asked.model.name == "llama3-8b" and asked.dtype == form
    assert (asked.sequence, asked.global_batch) == (8192, 512)
    own = asked.layout
    assert (own.tp, own.pp, own.chunks, own.shard) == (4, 2, 4, "optimizer")
    assert asked.facts == {"ends": "stage"}


def test_which_optimizers_of_nemo_share_their_state():
    for name, shard in (("mcore_distributed_optim", "optimizer"), ("fused_adam", "none")):
        asked, _ = read("megatron-bridge", NEMO.replace("distributed_fused_adam", name))
        assert asked.layout.shard == shard


TOML = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
compile = true
[parallelism]
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
"""
REGISTRY = """
def llama3_8b():
    return Trainer.Config(
        model_spec=model_registry("8B", converters=[Float8LinearConverter.Config()]),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        training=TrainingConfig(local_batch_size=2, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        compile=CompileConfig(enable=True, enable_async_tensor_parallel=True),
        activation_checkpoint=FullAC.Config(),
    )
"""
COMMAND = """torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
  --training.local_batch_size 2 --training.seq_len 8192 --compile.enable \\
  --parallelism.tensor_parallel_degree=2 --compile.enable_async_tensor_parallel \\
  --model.converters float8 --activation_checkpoint.mode full"""


@pytest.mark.parametrize("text", [TOML, REGISTRY, COMMAND])
def test_the_forms_of_torchtitans_configuration(text):
    asked, notes = read("torchtitan", text)
    assert asked.model == model_of("llama3-8b") and not notes
    assert (asked.sequence, asked.global_batch, asked.dtype) == (8192, 16, "fp8")
    assert asked.layout == Layout(
        tp=2, cp=1, ep=1, pp=1, chunks=1, microbatch=2, recompute="always", shard="parameters"
    )
    assert asked.facts == {"compile": "yes", "async-tp": "yes"}


PIPELINE = r"[parallelism]\npipeline_parallel_degree = 2"
LOOPED = rf'{PIPELINE}\npipeline_parallel_schedule = "Interleaved1F1B"'
TOML_CHANGES = rows(rf"""
    [parallelism] | {PIPELINE} | pp=2 chunks=1 shard=gradients |
    [parallelism] | {PIPELINE}\nfsdp_reshard_after_forward = "always" | pp=2 shard=parameters |
    [parallelism] | [parallelism]\nfsdp_reshard_after_forward = "never" | pp=1 shard=gradients |
    [parallelism] | [parallelism]\ndata_parallel_replicate_degree = 8 | shard=none |
    [parallelism] | [parallelism]\ndata_parallel_replicate_degree = 2 | shard=parameters |
        shards in 2 copies are counted as shards over all replicas
    [parallelism] | {LOOPED} | pp=2 chunks=2 |
    [parallelism] | {LOOPED}\npipeline_parallel_layers_per_stage = 4 | pp=2 chunks=5 |
    [parallelism] | {PIPELINE}\npipeline_parallel_schedule = "GPipe" | pp=2 chunks=2 |
        pipeline_parallel_schedule: GPipe is counted as 1F1B, of as many stages
    mode = "full" | mode = "none" | recompute=never |
    mode = "full" | mode = "selective" | recompute=selective |
        selective_ac_option: 2, every so many blocks, is counted as op
    mode = "full" | mode = "selective"\nselective_ac_option = "op" | recompute=selective |
    local_batch_size = 2 | batch_size = 4 | microbatch=4 |
    local_batch_size = 2 | | microbatch=8 | local_batch_size: 8, torchtitan's default
    mode = "full" | mode = "memory_budget" | recompute=selective |
        activation_checkpoint: a memory budget is counted as selective
""")  # of 34 layers the ends are two, so that 4 a stage are 5 chunks


@pytest.mark.parametrize(("old", "new", "said", "note"), TOML_CHANGES)
def test_what_a_configuration_of_torchtitan_says(old, new, said, note):
    assert old in TOML
    asked, notes = read("torchtitan", TOML.replace(old, new.replace(r"\n", "\n")))
    layout = {name: value_of(own) for name, own in (part.split("=") for part in said.split())}
    assert {name: getattr(asked.layout, name) for name in layout} == layout
    assert notes == ([note] if note else [])


@pytest.mark.parametrize(
    ("family", "flavor", "assets", "said"),
    [
        ("llama3", "coreweave", "Llama-3.1-8B", "the model is llama3-coreweave, none that"),
        ("deepseek_v3", "16B", "deepseek-moe-16b-base", "the model is deepseek_v3-16b, none that"),
        ("deepseek_v3", "671B", "", "deepseek-v3"),
        ("llama3", "70B_flex", "Llama-3.1-8B", "llama3-70b"),
    ],
)
def test_the_flavor_says_the_model_whatever_its_files_are_called(family, flavor, assets, said):
    text = TOML.replace('"llama3"', f'"{family}"').replace('"8B"', f'"{flavor}"')
    text = text.replace("[parallelism]", f'hf_assets_path = "{assets}"\n[parallelism]')
    if "none" in said:
        with pytest.raises(PartoptError, match=said) as refused:
            read("torchtitan", text)
        assert "`arguments=model.flavor=8B`" in refused.value.hint
        given = {"model.name": "llama3", "model.flavor": "8B"}
        found, _ = read("torchtitan", text, arguments=given)
        assert found.model.name == "llama3-8b"
    else:
        assert read("torchtitan", text)[0].model.name == said


TOKENS = """
def llama3_8b():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192,
                                max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )
"""


def test_newer_versions_of_torchtitan_count_tokens():
    asked, notes = read("torchtitan", TOKENS)
    assert (asked.model, asked.sequence) == (model_of("llama3-8b"), 8192)
    assert (asked.layout.microbatch, asked.global_batch, notes) == (2, 2 * 8, [])
    step = TOKENS.replace("max_context", "num_tokens_per_train_step=64 * 8192, max_context")
    assert read("torchtitan", step)[0].global_batch == 64
    assert read("torchtitan", step, global_batch=32)[0].global_batch == 32
    assert read("torchtitan", step, sequence=4096)[0].layout.microbatch == 4
    piped = TOKENS.replace("tensor_", "num_pp_microbatches=4, pipeline_")
    asked, _ = read("torchtitan", piped)
    assert (asked.layout.pp, asked.layout.microbatch, asked.global_batch) == (2, 2, 2 * 4 * 8)
    asked, notes = read("torchtitan", TOKENS.replace("2 * 8192", "12000"))
    assert asked.layout.microbatch == 1
    assert notes == ["num_tokens_per_microbatch_per_dp_rank: 12,000 are counted as 1 of 8,192"]


def test_older_versions_of_torchtitan_name_the_blocks_that_stages_begin_with():
    said = '\npipeline_parallel_split_points = ["layers.20"]'
    asked, notes = read(
        "torchtitan", TOML.replace("[parallelism]", PIPELINE.replace(r"\n", "\n") + said)
    )
    assert (asked.layout.pp, asked.layout.chunks) == (2, 1)
    assert notes == ["stages of 20-12 blocks are counted as the trainer shares them out by itself"]
    bare = TOML.replace("seq_len = 8192\n", "").replace("local_batch_size = 2\n", "")
    asked, notes = read("torchtitan", bare)
    assert (asked.sequence, asked.layout.microbatch, asked.global_batch) == (2048, 8, 64)
    assert notes == [
        f"{name}, torchtitan's default" for name in ("seq_len: 2,048", "local_batch_size: 8")
    ]


DROPOUTS = [("0", "0", False), ("0.1", "0", True), ("0", "0.1", True), ("0.1", "0.1", True)]
DROPOUTS += [("0", None, True), (None, "0", True), (None, None, True)]


@pytest.mark.parametrize(("hidden", "attention", "expected"), DROPOUTS)
def test_either_dropout_is_one_and_megatron_has_both_by_default(hidden, attention, expected):
    flags = [
        f"--{name}-dropout {own}"
        for name, own in (("attention", attention), ("hidden", hidden))
        if own
    ]
    text = MEGATRON.replace(
        "--attention-dropout 0 --hidden-dropout 0", " ".join(["--vocab-size 32000", *flags])
    )
    assert read("megatron", text)[0].model.dropout is expected


def test_a_model_in_a_variable_of_a_script_is_no_shape():
    """Of a launch script `MODEL` is a word; of what is written here, a table."""
    asked, notes = read("torchtitan", f"MODEL=llama3\n{COMMAND}")
    assert asked.model == model_of("llama3-8b") and not notes
    with pytest.raises(PartoptError, match="the model is None, none that partopt has"):
        read("torchtitan", "[training]\nseq_len = 8192\nlocal_batch_size = 1\n")


def test_stages_of_torchtitan_are_lists_of_modules():
    stages = "[parallelism]\nmodule_fqns_per_model_part = [1, 2]"
    with pytest.raises(PartoptError, match="is not a list of the modules of each stage"):
        read("torchtitan", TOML.replace("[parallelism]", stages))


def test_a_model_that_torchtitan_names_and_partopt_does_not_have():
    with pytest.raises(PartoptError, match="llama3-debugmodel, none that partopt has"):
        read("torchtitan", TOML.replace("8B", "debugmodel"))


STATE = """cat <<EOT > ds.json
{"zero_optimization": {"stage": $ZERO}}
EOT
torchrun"""
DEEPSPEED = MEGATRON.replace("torchrun", STATE).replace("TP=${TP:-4}", "TP=4\nZERO=1")
DEEPSPEED = DEEPSPEED.replace("--group-query-attention --num-query-groups", "--num-key-value-heads")
DEEPSPEED = DEEPSPEED.replace("--use-distributed-optimizer", "--deepspeed --use-flash-attn-v2")


def test_a_script_of_megatron_deepspeed():
    asked, _ = read("deepspeed", DEEPSPEED)
    assert asked.model == model_of("llama3-8b") and asked.facts == {"attention": "flash"}
    assert (asked.layout.tp, asked.layout.pp, asked.layout.shard) == (4, 2, "optimizer")


def test_a_script_without_a_flash_kernel_is_told_of_it():
    text = DEEPSPEED.replace("--use-flash-attn-v2", "")
    asked, _ = read("deepspeed", text)
    assert asked.facts == {"attention": "scores"}
    judged = judge_layout(asked)
    changes = {name: new for name, _, new in change_text(text, judged.plan, judged.best).rows}
    assert changes["--use-flash-attn-v2"] == "True"


def test_a_layout_alone_and_a_trainer_of_other_models_need_a_profile():
    with pytest.raises(PartoptError, match="a layout alone does not say the model"):
        read("megatron", "Et*4|t*4L")
    with pytest.raises(PartoptError, match="vllm: its configurations do not say"):
        read("vllm", "4,4")


def test_the_best_is_no_slower_and_the_changes_are_what_differs():
    asked, _ = read("megatron", MEGATRON)
    compared = judge_layout(asked)
    yours, best = compared.plan, compared.best
    assert seconds_of(best) <= seconds_of(yours) and best.fits
    rows = change_text(MEGATRON, yours, best).rows
    changes = {name: (old, new) for name, old, new in rows}
    assert changes["--overlap-grad-reduce"] == ("-", "True")
    own, layout = yours.layout, best.layout
    for name, part in (("tensor", "tp"), ("pipeline", "pp")):
        flag, values = f"--{name}-model-parallel-size", (getattr(own, part), getattr(layout, part))
        assert changes.get(flag, (str(values[0]),) * 2) == tuple(map(str, values))
    assert not any("layers" in name and "num" in name for name in changes)  # of the same model


WORDS = [
    ("megatron-bridge", BRIDGE, "model.tensor_model_parallel_size", r"(model|ddp|train)\.\w+"),
    ("deepspeed", DEEPSPEED, "--tensor-model-parallel-size", r"--[a-z0-9-]+"),
    ("torchtitan", TOML, "activation_checkpoint.mode", r"[a-z]+(_checkpoint)?\.[a-z_]+"),
]


@pytest.mark.parametrize(("trainer", "text", "one", "form"), WORDS, ids=lambda own: own[:12])
def test_changes_are_in_the_words_of_the_configuration(trainer, text, one, form):
    judged = judge_layout(read(trainer, text)[0])
    names = [name for name, _, _ in change_text(text, judged.plan, judged.best).rows]
    assert one in names and len({*names}) == len(names), names
    assert [name for name in names if not re.fullmatch(form, name)] == []


def test_a_variable_of_the_environment_is_no_flag():
    alone = MEGATRON.replace("TP:-4", "TP:-1").replace("PP=2", "PP=4")
    asked, _ = read("megatron", alone)
    plans = [judging.plan_layout(asked.with_(layout=Layout(tp=tp))) for tp in (1, 2)]
    changes = change_text(alone, *plans)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS", "-", "1") in changes.rows
    assert changes.text.splitlines()[1] == "export CUDA_DEVICE_MAX_CONNECTIONS=1"


def test_the_best_of_its_own_layout_changes_nothing():
    asked, _ = read("megatron", MEGATRON)
    best = judge_layout(asked).best
    text = export_plan(best, "megatron").main
    again = judge_layout(read("megatron", text)[0])
    assert again.best == again.plan and change_text(text, again.plan, again.best).text == text


def test_what_a_trainer_does_not_have_is_not_in_its_best():
    asked, _ = read("deepspeed", DEEPSPEED)
    best = judge_layout(asked).best
    assert (best.layout.cp, best.layout.ep, best.layout.chunks) == (1, 1, 1)
    assert export_plan(best, "deepspeed").main


@pytest.mark.parametrize(
    "name", ["llama3-70b", "gpt3-175b", "mixtral-8x22b", "qwen3-0.6b", "bert-large"]
)
def test_a_configuration_that_is_written_is_read_again(name):
    model = load_transformer(name)
    raw = json.dumps(write_config(model)).encode()
    assert read_transformer(raw, "it", name) == model
    assert like_shipped(model) == model


def test_a_program_of_deepspeed_without_a_topology_is_one_pipeline():
    asked = Job(
        model=model_of("llama3-8b"),
        topology=topology(),
        trainer="deepspeed",
        global_batch=64,
        sequence=2048,
        layout=Layout(pp=4, tp=2),
    )
    text = export_plan(judging.plan_layout(asked), "deepspeed").main
    with pytest.raises(PartoptError, match="are not whole numbers"):
        read("deepspeed", text.replace("BOUNDS = [0", "BOUNDS = ['none'"))
    line = next(line for line in text.splitlines() if "ProcessTopology(axes" in line)
    whole, _ = read("deepspeed", text)
    assert (whole.layout.pp, whole.layout.tp, whole.global_batch) == (4, 2, 64)
    alone, _ = read("deepspeed", text.replace(f"{line}\n", ""))
    assert (alone.layout.tp, alone.layout.dp) == (1, None)
    assert alone.global_batch == 64 // whole.layout.dp


FACTS = rows("""
    --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router | graphs=attention
    --cuda-graph-impl local --cuda-graph-modules moe_router moe_preprocess | graphs=router
    --external-cuda-graph --cuda-graph-scope attn | graphs=attention
    --enable-cuda-graph | graphs=full
    --cuda-graph-impl full_iteration | graphs=full
    --cuda-graph-impl none --cuda-graph-scope full |
    --moe-router-force-load-balancing | routing=balanced
    --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity | routing=capacity
    --use-transformer-engine-op-fuser | fused-experts=yes
    --moe-token-dispatcher-type flex | exchange=deepep
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep | exchange=hybridep
    --moe-enable-deepep | exchange=deepep
    --moe-flex-dispatcher-backend hybridep |
    --overlap-moe-expert-parallel-comm | exchange-overlap=yes
    --optimizer muon | muon=yes
    --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 |
        optimizer_bytes=8.0
    --fine-grained-activation-offloading --offload-modules core_attn attn_proj |
        offload=core_attn+attn_proj
    --fine-grained-activation-offloading --offload-modules fused_group_mlp |
        offload=expert_fc1+moe_act
    --offload-modules core_attn |
    --use-precision-aware-optimizer |
    --use-precision-aware-optimizer --optimizer-cpu-offload | optimizer-offload=1
    --optimizer-cpu-offload --optimizer-offload-fraction 0.374 --exp-avg-dtype bf16
        --use-precision-aware-optimizer | optimizer-offload=0.37
    --optimizer-cpu-offload --optimizer-offload-fraction 1.5 --use-precision-aware-optimizer |
        optimizer-offload=1
    --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 |
        optimizer_bytes=6.0
    --use-precision-aware-optimizer --main-params-dtype fp16 | optimizer_bytes=10.0
    --cuda-graph-impl local --cuda-graph-scope attn moe | graphs=full
    --cuda-graph-impl local --cuda-graph-scope attn mlp | graphs=attention
    --optimizer-offload-fraction 0.4 --overlap-cpu-optimizer-d2h-h2d |
    --exp-avg-dtype bf16 |
""")


@pytest.mark.parametrize(("flags", "fact"), FACTS)
def test_what_arguments_of_megatron_say_of_a_trainer(flags, fact):
    asked, _ = read(
        "megatron", MEGATRON.replace("--bf16", f"--bf16 --vocab-size 1000 --num-experts 8 {flags}")
    )
    usual = {"allreduce": "blocking", "ends": "stage"}
    said = {f"{name}={value}" for name, value in asked.facts.items() if name not in usual}
    without = set() if "graphs" in fact else {"graphs=none"}  # which a plan would have
    assert said == {*filter(None, [fact])} | without


def test_a_copy_of_parameters_stays_where_the_optimizer_is_not_aware_of_it():
    asked, notes = read(
        "megatron-bridge",
        "cfg.optimizer.optimizer_cpu_offload = True\n"
        "cfg.optimizer.optimizer_offload_fraction = 0.5\n"
        "cfg.optimizer.overlap_cpu_optimizer_d2h_h2d = True\n" + BRIDGE,
    )
    assert asked.facts["optimizer-offload"] == "0.5"
    assert asked.facts["offload-overlap"] == "yes"
    assert any("a copy stays on the device" in note for note in notes)
    alone = "cfg.optimizer.optimizer_cpu_offload = True\n" + BRIDGE  # a share of nothing there
    assert "optimizer-offload" not in read("megatron-bridge", alone)[0].facts


RECIPE = """
import torch
from bridge import AutoBridge, apply_flex_dispatcher_backend, pretrain_config

LAYOUTS = {(2, 1): [["embedding"] + ["decoder"] * 30, ["decoder"] * 31 + ["mtp", "loss"]]}


def set_layout(model):
    size = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    if size not in LAYOUTS:
        raise ValueError(size)
    model.pipeline_model_parallel_layout = LAYOUTS[size]


def recipe():
    cfg = pretrain_config()
    cfg.model = AutoBridge.from_hf_pretrained("deepseek-ai/DeepSeek-V3").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.expert_model_parallel_size = 8
    cfg.model.seq_length = 4096
    cfg.model.mtp_num_layers = 1
    cfg.model.recompute_modules = ["mla_up_proj", "moe_act"]
    cfg.model.moe_token_dispatcher_type = "alltoall"
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.mixed_precision = "bf16_mixed"
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    set_layout(cfg.model)
    apply_flex_dispatcher_backend(cfg.model, "hybridep")
    return cfg
"""


def test_a_recipe_of_bridge_is_read_with_its_tables_and_setters():
    """A function that is not read says how much is recomputed, where a module is named."""
    asked, notes = read("megatron-bridge", RECIPE, function="recipe")
    assert asked.model == structs.replace(
        load_transformer("deepseek-v3"), numerics=asked.model.numerics
    )
    layout = asked.layout
    assert (layout.ep, layout.etp, layout.pp, layout.chunks) == (8, None, 2, 1)
    assert (layout.recompute, layout.modules) == ("selective", "mla_up_proj+moe_act")
    expected = {"exchange": "hybridep", "optimizer_bytes": 8.0, "ends": "30-31"}
    assert asked.facts == expected | {"graphs": "none"}
    assert "expert_tensor_parallel_size: 1, as in recipes of Bridge" in notes


def test_a_layout_that_a_function_sets_by_itself_is_asked_for():
    setter = "set_deepseek_pipeline_model_parallel_layout"
    text = RECIPE.replace("def set_layout", "def other").replace("set_layout", setter)
    text = text.replace("import AutoBridge,", f"import AutoBridge, {setter},")
    with pytest.raises(PartoptError, match="deepseek_pipeline_model_parallel_layout: depends on"):
        read("megatron-bridge", text, function="recipe")
    said = text.replace(f"{setter}(cfg.model)", f'{setter}(cfg.model, "Et*30|t*31mL")')
    asked, _ = read("megatron-bridge", said, function="recipe")
    assert asked.facts["ends"] == "30-31"


def test_a_recipe_may_predict_no_further_tokens():
    text = RECIPE.replace("mtp_num_layers = 1", "mtp_num_layers = None").replace('"mtp", ', "")
    assert read("megatron-bridge", text, function="recipe")[0].model.further == 0


def test_torchtitans_models_of_several_kinds_are_written_by_their_flavors():
    """Without the further tokens, which none of its pipelines has."""
    for name, flavor in (("deepseek-v3", "671B"), ("gpt-oss-20b", "20b")):
        model = structs.replace(load_transformer(name), further=0)
        plan = plan_layout("torchtitan", model, "pp=4,ep=4", "bfloat16", {})
        text = export_plan(plan, "torchtitan", stem="planned").main
        assert f'model_registry("{flavor}")' in text
        assert f'"layers.{model.blocks - 1}", "norm", "lm_head"]' in text
        again, _ = read("torchtitan", text)
        assert answer(judging.plan_layout(again)) == answer(plan)


def test_words_of_a_tokenizer_that_are_not_known_do_not_hide_those_of_the_model():
    words = "  vocab_size: 128256\ntokenizer: {vocab_size: '${other.words}'}\n"
    assert read("megatron-bridge", f"{NEMO}{words}")[0].model.vocabulary == 128256
