"""Blocks of gated deltas, state spaces and indexers in the arguments of Megatron, both ways."""

import pytest
from msgspec.structs import replace

from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.documents.transformer import Kind, Recurrence
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.jobs import read_job
from partopt.search.judging import judge_layout, plan_layout
from partopt.trainers import export_plan

CLUSTER = Topology.load("dgx-h200", 8)
LAYOUT = Layout(
    tp=2,
    cp=1,
    ep=8,
    etp=1,
    pp=4,
    dp=8,
    chunks=1,
    microbatch=1,
    recompute="always",
    shard="optimizer",
)
SHARED = load_transformer("glm-5")
SHARED = replace(SHARED, blocks=16, indexer=replace(SHARED.indexer, period=4, first=3))
MODELS = {
    "states": load_transformer("nemotron-3-nano-30b-a3b"),
    "further": load_transformer("nemotron-3-super-120b-a12b"),
    "dense": replace(load_transformer("nemotron-h-56b"), blocks=40, pattern="M-M*-" * 8),
    "delta": load_transformer("qwen3-next-80b-a3b"),
    "indexer": replace(load_transformer("deepseek-v3.2"), blocks=16),
    "shared": SHARED,
}


def planned(model, trainer="megatron", **layout):
    asked = Job(
        model=model,
        topology=CLUSTER,
        trainer=trainer,
        global_batch=64,
        sequence=4096,
        layout=replace(LAYOUT, **({} if model.experts else {"ep": None, "etp": None}), **layout),
        memory="1 TB",
    )
    return plan_layout(asked)


@pytest.mark.parametrize("trainer", ["megatron", "megatron-bridge"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read_as_it_is_written(name, trainer):
    model = MODELS[name]
    plan = planned(model, trainer)
    text = export_plan(plan, trainer).main
    asked, _ = read_job(trainer, text, CLUSTER)
    assert replace(asked.model, name=model.name, numerics=model.numerics) == model
    again = plan_layout(asked)
    assert [stage.modules for stage in again.stages] == [stage.modules for stage in plan.stages]
    assert again.predicted.iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)


def test_a_pattern_says_stages_and_further_tokens():
    plan = planned(MODELS["further"], pp=2, dp=16)
    text = export_plan(plan, "megatron").main
    (line,) = (line for line in text.splitlines() if "--hybrid-layer-pattern" in line)
    stages, further = line.split("'")[1].split("/")
    assert further == "*E"
    assert stages.replace("|", "") == MODELS["further"].pattern
    cut = sum("layers." in name for name in plan.stages[0].modules)
    assert [len(stage) for stage in stages.split("|")] == [cut, 88 - cut]
    assert "--num-layers 88" not in text.partition("PARTOPT_ARGS")[2]
    assert "--position-embedding-type none" in text
    assert "--pipeline-model-parallel-layout" not in text and "--moe-layer-freq" not in text


SUPER = """
torchrun pretrain_hybrid.py --num-experts 512 --moe-grouped-gemm --moe-router-topk 22
  --moe-shared-expert-intermediate-size 5376 --moe-token-dispatcher-type alltoall
  --moe-latent-size 1024 --is-hybrid-model --mamba-num-heads 128 --mamba-head-dim 64
  PATTERN --untie-embeddings-and-output-weights --disable-bias-linear
  --position-embedding-type none --squared-relu --hidden-size 4096 --num-attention-heads 32
  --group-query-attention --num-query-groups 2 --kv-channels 128 --ffn-hidden-size 2688
  --normalization RMSNorm --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 --seq-length 8192
  --max-position-embeddings 8192 --vocab-size 131072 --micro-batch-size 1 --global-batch-size 64
  --tensor-model-parallel-size 1 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2
"""
LETTERS = load_transformer("nemotron-3-super-120b-a12b").pattern


def read(pattern, **changes):
    text = " ".join(SUPER.replace("PATTERN", pattern).split())
    for old, new in changes.items():
        text = text.replace(old, new)
    return read_job("megatron", f"#!/bin/bash\n{text}\n", CLUSTER)


@pytest.mark.parametrize(
    ("pattern", "stages", "further"),
    [
        (f"--hybrid-override-pattern {LETTERS}", [44, 44], 0),
        (f"--hybrid-layer-pattern '{LETTERS[:40]}|{LETTERS[40:]}'", [40, 48], 0),
        (f"--hybrid-layer-pattern '{LETTERS[:40]}|{LETTERS[40:]}/*E/*E'", [40, 48], 2),
        (
            f"--hybrid-override-pattern {LETTERS} --mtp-hybrid-override-pattern '*E' "
            "--mtp-num-layers 1",
            [44, 44],
            1,
        ),
    ],
)
def test_scripts_of_hybrids_are_read(pattern, stages, further):
    asked, notes = read(pattern)
    shipped = load_transformer("nemotron-3-super-120b-a12b")
    given = {"further": further, "further_pattern": "*E" if further else ""}
    expected = replace(shipped, numerics=asked.model.numerics, name=asked.model.name, **given)
    assert asked.model == expected
    plan = judge_layout(asked).plan
    counts = [sum("layers." in name for name in stage.modules) for stage in plan.stages]
    assert counts == stages
    assert not [note for note in notes if "mamba" in note or "hybrid" in note], notes


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("--num-layers 8 --hybrid-layer-pattern DEDE", "letters that are not planned: D"),
        ("--hybrid-layer-pattern 'ME|ME/*E/ME'", "letters that are not planned"),
        ("--num-layers 88", "--mamba-num-heads: blocks of another kind: not planned"),
        (f"--num-layers 88 --hybrid-attention-ratio 0.1 {''}", "the configuration is of Mamba in"),
        (
            "--num-layers 88 --experimental-attention-variant gdn2",
            "--experimental-attention-variant: gdn2: not planned",
        ),
    ],
)
def test_other_blocks_are_refused_by_name(pattern, message):
    with pytest.raises(PartoptError, match=message):
        read(pattern)


def test_a_pattern_of_gated_deltas_is_read():
    asked, _ = read("--hybrid-layer-pattern 'GEGEGE*E' --linear-num-value-heads 64")
    assert asked.model.recurrence == Recurrence(
        rule="delta", heads=64, head_size=128, groups=16, keys=128, chunk=64
    )
    assert asked.model.kinds()[0] == Kind("delta", "none")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"chunk": 256}, "chunks of 256 tokens in place of 128"),
        ({"kernel": 3}, "convolutions over 3"),
    ],
)
def test_sizes_that_no_argument_says_are_refused(changes, what):
    model = MODELS["states"]
    odd = replace(model, name="odd", recurrence=replace(model.recurrence, **changes))
    with pytest.raises(PartoptError, match=f"it has no {what}"):
        export_plan(planned(odd), "megatron")


def test_torchtitan_writes_its_models_and_no_others():
    model = replace(load_transformer("qwen3.5-35b-a3b"), further=0)
    layout = {"etp": None, "shard": "parameters", "pp": 1, "tp": 1, "dp": 64, "recompute": "always"}
    text = export_plan(planned(model, "torchtitan", **layout), "torchtitan").main
    assert "from torchtitan.models.qwen3_5.config_registry import qwen35_35b_a3b as base" in text
    with pytest.raises(PartoptError, match="it has no model of such blocks"):
        export_plan(planned(MODELS["delta"], "torchtitan", **layout), "torchtitan")


PROVIDED = f'''
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider


def recipe():
    cfg = ConfigContainer()
    cfg.model = HybridModelProvider(
        hybrid_override_pattern="{LETTERS}", hidden_size=4096, ffn_hidden_size=2688,
        num_attention_heads=32, num_query_groups=2, kv_channels=128, mamba_num_heads=128,
        num_moe_experts=512, moe_router_topk=22, moe_ffn_hidden_size=2688, moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376, moe_router_num_groups=1,
        moe_router_group_topk=1, seq_length=8192, mtp_num_layers=2,
        mtp_hybrid_override_pattern="*E", expert_model_parallel_size=8,
    )
    cfg.tokenizer.tokenizer_model = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
    cfg.train.global_batch_size, cfg.train.micro_batch_size = 64, 1
    return cfg
'''


def test_a_provider_of_bridge_has_other_defaults_than_megatron():
    asked, notes = read_job("megatron-bridge", PROVIDED, CLUSTER, function="recipe")
    shipped = replace(load_transformer("nemotron-3-super-120b-a12b"), further=2)
    found = replace(asked.model, name=shipped.name, numerics=shipped.numerics)
    assert found == shipped
    assert asked.model.numerics.norm == "rms" and asked.model.numerics.bias == "none"
    assert "a vocabulary of 131,072, by the name" in notes[0]
