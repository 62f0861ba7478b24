"""Trainers' own code reads what is exported of a transformer, and their own recipes are read."""

import importlib
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from partopt import Layout, Topology, export_plan
from partopt.importers.hugging_face import load_transformer
from partopt.search.jobs import read_job
from tests.trainers.models import plan_layout
from tests.trainers.own_code import needs

pytestmark = pytest.mark.filterwarnings("ignore")

# model, layout, format, facts; all on two servers of eight GPUs
CASES = {
    "dense": ("llama3-8b", "tp=2,pp=2,chunks=4", "bfloat16", {}),
    "a stage alone": ("llama3-8b", "tp=2,cp=2,recompute=always", "bfloat16", {}),
    "first blocks": ("llama3-70b", "tp=8,pp=2,recompute=10", "fp8", {}),
    "gpt": ("gpt3-13b", "tp=4,pp=2,recompute=selective", "float16", {}),
    "experts": ("mixtral-8x7b", "tp=2,ep=8,pp=2", "bfloat16", {}),
    "facts": ("llama3-8b", "tp=4", "bfloat16", {"tp-overlap": "yes", "loss": "fused"}),
    "norms of heads": ("qwen3-8b", "tp=2,pp=2", "bfloat16", {}),
}


def planned(trainer: str, case: tuple[Any, ...]) -> Any:
    model, *rest = case
    return plan_layout(trainer, load_transformer(model), *rest)


def flags(text: str) -> dict[str, str | bool]:
    """The arguments of an exported array, by their names in Megatron-LM's namespace."""
    words = shlex.split(text[text.index("(") + 1 : text.rindex(")")])
    found: dict[str, str | bool] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            own = words[i + 1] if i + 1 < len(words) else "--"
            found[word[2:].replace("-", "_")] = True if own.startswith("--") else own
    return found


# arguments of Megatron-LM whose fields in Megatron Core have other names, or are none
RENAMED = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit", "fp8_format": "fp8"}
RENAMED["norm_epsilon"] = "layernorm_epsilon"
OPPOSITE = {"disable_bias_linear": "add_bias_linear", "no_overlap_p2p_communication": "overlap_p2p"}
OF_TRAINING = {
    "seq_length", "max_position_embeddings", "vocab_size", "position_embedding_type",
    "group_query_attention", "untie_embeddings_and_output_weights", "micro_batch_size",
    "global_batch_size", "use_distributed_optimizer", "overlap_grad_reduce",
    "overlap_param_gather", "use_tp_pp_dp_mapping", "ddp_bucket_size", "grad_reduce_in_bf16",
    "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor",  # of its GPTModel
}  # fmt: skip


@needs("megatron-core")
@pytest.mark.parametrize("case", CASES)
def test_megatron_core_accepts_the_shape_and_the_layout(case):
    """As Megatron-LM makes its configuration of the arguments; its own parser is in no package."""
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    plan = planned("megatron", CASES[case])
    given = flags(export_plan(plan, "megatron").main)
    kinds = {own.name: own.default for own in dataclasses.fields(TransformerConfig)}
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in OF_TRAINING:
            continue
        if name in OPPOSITE:
            fields[OPPOSITE[name]] = False
            continue
        field = RENAMED.get(name, name)
        assert field in kinds, name
        number = isinstance(value, str) and re.fullmatch(r"[0-9.]+(e-[0-9]+)?", value)
        whole = isinstance(value, str) and value.isdecimal()
        fields[field] = int(value) if whole else float(value) if number else value
    import torch

    fields |= {"use_cpu_initialization": True, "pipeline_dtype": torch.bfloat16}
    config = TransformerConfig(**fields)
    model, layout = plan.transformer.model, plan.layout
    assert (config.num_layers, config.hidden_size) == (model.blocks, model.hidden)
    assert config.num_query_groups == model.kv_heads
    own = model.numerics
    assert (config.layernorm_epsilon, config.qk_layernorm) == (own.epsilon, own.query_key_norms)
    assert config.normalization == {"rms": "RMSNorm", "layer": "LayerNorm"}[own.norm]
    assert config.add_bias_linear == (own.bias == "all")
    assert config.ffn_hidden_size == (model.ffn or model.expert_ffn)
    assert config.tensor_model_parallel_size == layout.tp
    assert (config.virtual_pipeline_model_parallel_size or 1) == layout.chunks
    assert config.expert_model_parallel_size == layout.ep
    if model.experts:
        assert (config.num_moe_experts, config.moe_router_topk) == (8, 2)
        assert config.expert_tensor_parallel_size == 1
    # ranks of an expert's shares, and those of dense layers, both divide the pipeline's replicas
    assert layout.tp * layout.cp * layout.dp % layout.ep == 0


class Fields:
    """Takes any attribute of names that a class has, and refuses others."""

    def __init__(self, known: set[str]) -> None:
        object.__setattr__(self, "known", known)

    def __setattr__(self, name: str, value: object) -> None:
        assert name in self.known, name
        object.__setattr__(self, name, value)


def annotated(file: str, *names: str) -> set[str]:
    """The fields of the classes of a file of Bridge's, which does not import without a GPU."""
    import ast

    path = Path(str(importlib.metadata.distribution("megatron-bridge").locate_file(file)))
    tree = ast.parse(path.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        own.target.id
        for name in names
        for own in classes[name].body
        if isinstance(own, ast.AnnAssign) and isinstance(own.target, ast.Name)
    }


@needs("megatron-core", "megatron-bridge")
@pytest.mark.parametrize("case", CASES)
def test_bridge_has_the_fields_and_the_recipe_of_the_format(case):
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    def own(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    plan = planned("megatron-bridge", CASES[case])
    space: dict[str, Any] = {}
    exec(export_plan(plan, "megatron-bridge").main, space)
    training = "megatron/bridge/training/config.py"
    provider = annotated("megatron/bridge/models/gpt_provider.py", "GPTModelProvider")
    parts = {
        "model": own(TransformerConfig) | provider,
        "train": annotated(training, "TrainingConfig"),
        "dist": annotated(training, "DistributedInitConfig"),
        "ddp": own(DistributedDataParallelConfig),
        "optimizer": own(OptimizerConfig),
        "dataset": {"seq_length"},
    }
    config = Fields({*parts, "mixed_precision"})
    for name, known in parts.items():
        setattr(config, name, Fields(known))
    space["use_plan"](config)
    precision = "megatron/bridge/training/mixed_precision.py"
    recipes = annotated_functions(precision)
    assert config.mixed_precision in recipes
    made = config.model
    assert made.num_attention_heads == plan.transformer.model.heads
    assert made.add_bias_linear is (not plan.transformer.model.gated)


def annotated_functions(file: str) -> set[str]:
    import ast

    path = Path(str(importlib.metadata.distribution("megatron-bridge").locate_file(file)))
    return {
        own.name for own in ast.parse(path.read_text()).body if isinstance(own, ast.FunctionDef)
    }


TITAN = {
    "a stage alone": ("llama3-8b", "tp=2,cp=2,recompute=selective", "bfloat16", {"compile": "yes"}),
    "asynchronous": (
        "llama3-70b",
        "tp=8,recompute=always",
        "bfloat16",
        {"compile": "yes", "async-tp": "yes"},
    ),
    "a pipeline": ("llama3-8b", "pp=2,tp=2", "bfloat16", {}),
    "of another family": ("qwen3-1.7b", "tp=2", "bfloat16", {}),
    "whole parameters": ("llama3-8b", "tp=2,shard=none", "bfloat16", {"loss": "compiled"}),
}


@needs("torchtitan", "triton")
@pytest.mark.parametrize("case", TITAN)
def test_torchtitans_command_line_takes_the_whole_configuration(case, tmp_path, monkeypatch):
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    monkeypatch.syspath_prepend(str(tmp_path))
    plan, stem = planned("torchtitan", TITAN[case]), f"planned_{len(case)}"
    export_plan(plan, "torchtitan", stem=stem).save(str(tmp_path / f"{stem}.py"))
    importlib.invalidate_caches()
    try:
        config = ConfigManager().parse_args(["--module", stem, "--config", "planned"])
    finally:
        sys.modules.pop(stem, None)
    model, layout = plan.transformer.model, plan.layout
    spec = config.model_spec.model
    assert len(spec.layers) == model.blocks and spec.dim == model.hidden
    assert spec.vocab_size == model.vocabulary
    assert spec.layers[0].feed_forward.w1.out_features == model.ffn
    training = config.training
    assert (training.seq_len, training.global_batch_size) == (4096, 64)
    dims = ParallelDims.from_config(config.parallelism, 16)
    assert (dims.tp, dims.cp, dims.pp) == (layout.tp, layout.cp, layout.pp)
    assert dims.dp_replicate * dims.dp_shard == layout.dp
    steps = 64 // (training.local_batch_size * layout.dp)
    assert steps * training.local_batch_size * layout.dp == 64
    if layout.pp == 1:
        assert training.local_batch_size == layout.microbatch
    again = config.activation_checkpoint
    kinds = {"never": "NoneType", "always": "FullAC.Config", "selective": "SelectiveAC.Config"}
    assert type(again).__qualname__ == kinds[layout.recompute]


def test_deepspeeds_configuration_takes_the_whole_state():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    case = ("gpt3-13b", "tp=2,pp=4,recompute=always", "bfloat16", {})
    plan = planned("deepspeed", case)
    space: dict[str, Any] = {}
    exec(export_plan(plan, "deepspeed").main, space)

    config = DeepSpeedConfig(space["CONFIG"])  # of one process
    assert config.train_batch_size * plan.layout.dp == 64 and config.bfloat16_config.enabled
    assert config.zero_optimization_stage == 1
    assert space["MODEL"]["n_embd"] == 5120 and space["SEQUENCE"] == 4096


RECIPES = {
    "llama3_8b_pretrain_config": ("llama3-8b", 8192, Layout(tp=1, cp=2, pp=1, chunks=1)),
    "llama3_8b_16k_pretrain_config": ("llama3-8b", 16384, Layout(tp=4, cp=2, pp=2, chunks=1)),
    "llama3_70b_pretrain_config": ("llama3-70b", 8192, Layout(tp=4, cp=2, pp=4, chunks=5)),
    "llama31_405b_pretrain_config": ("llama3-405b", 131072, Layout(tp=8, cp=4, pp=8, chunks=2)),
}


@needs("megatron-bridge")
@pytest.mark.parametrize("name", RECIPES)
def test_bridges_own_recipes_are_read(name):
    model, sequence, expected = RECIPES[name]
    file = "megatron/bridge/recipes/llama/llama3.py"
    path = Path(str(importlib.metadata.distribution("megatron-bridge").locate_file(file)))
    asked, _ = read_job(
        "megatron-bridge", path.read_text(), Topology.load("dgx-h100", 32), function=name
    )
    assert (asked.model.name, asked.sequence, asked.global_batch) == (model, sequence, 512)
    own = asked.layout
    assert Layout(tp=own.tp, cp=own.cp, pp=own.pp, chunks=own.chunks) == expected
    assert own.shard == "optimizer"
    facts = {} if "8b" in name else {"tp-overlap": "yes"}
    ends = {} if own.pp == 1 else {"ends": "blocks" if "405b" in name else "stage"}
    assert asked.facts == facts | ends


OWN = {
    "llama3_8b": ("llama3-8b", 1, "selective", 1),
    "llama3_70b": ("llama3-70b", 8, "always", 8),
    "llama3_405b": ("llama3-405b", 2, "always", 8),
}


@needs("torchtitan")
@pytest.mark.parametrize("name", OWN)
def test_torchtitans_own_configurations_are_read(name):
    model, batch, again, tp = OWN[name]
    file = "torchtitan/models/llama3/config_registry.py"
    path = Path(str(importlib.metadata.distribution("torchtitan").locate_file(file)))
    asked, _ = read_job(
        "torchtitan", path.read_text(), Topology.load("dgx-h100", 16), function=name
    )
    assert (asked.model.name, asked.sequence) == (model, 8192)
    own = asked.layout
    assert (own.microbatch, own.recompute, own.tp, own.shard) == (batch, again, tp, "parameters")
    assert asked.dtype == ("fp8" if "405" in name else "bfloat16")
    assert asked.facts == ({"compile": "yes", "async-tp": "yes"} if "405" in name else {})
