"""A transformer's training in the arguments of Megatron-LM, which Megatron Bridge has as fields."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from partopt.configurations.program import Expression
from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.documents.transformer import (
    Graphs,
    Latent,
    Loss,
    Modelled,
    Numerics,
    Scores,
    Transformer,
)
from partopt.trainers.megatron_mixers import write_mixers

PLAIN: Final = Loss(passes=52, held=6)
FUSED: Final = Loss(passes=12, held=4)
COMPILED: Final = Loss(passes=48, held=10)  # the fused one by torch's compiler
# attention by a product, a kernel of scale, mask and softmax, dropout, and another product
SCORES: Final = Scores(forward=9, backward=11, kept=5)
BUCKET_ITEM = 4  # bytes of a gradient in a bucket, whose size Megatron takes in parameters
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}
# what --use-rope-scaling says, beside a factor (core/models/common/embeddings)
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192.0}
FACTOR = 8.0  # by default
# fields of a model with experts, and of latent attention, by the arguments that say them
EXPERTS = {
    "moe_router_topk": "experts_per_token",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_shared_expert_intermediate_size": "shared_ffn",
    "moe_latent_size": "expert_hidden",
    "moe_router_num_groups": "groups",
    "moe_router_group_topk": "groups_per_token",
}
LATENT = {
    "q_lora_rank": "queries",
    "kv_lora_rank": "keys",
    "qk_pos_emb_head_dim": "rotary",
    "v_head_dim": "values",
}
# stretched positions of latent attention, by what a config.json calls them (MLATransformerConfig)
YARN = {
    "rotary_scaling_factor": "factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
# what is captured, by what holds the host's launches (core/transformer/transformer_layer.py)
GRAPHS: dict[Graphs, tuple[str, ...]] = {
    "router": ("moe_router", "moe_preprocess"),
    "attention": ("attn", "moe_router", "moe_preprocess"),
    "full": ("full_iteration",),
}
# formats of FSDP alone
MAIN_GRADIENTS: Final = "megatron_fsdp_main_grads_dtype"
MAIN_PARAMETERS: Final = "megatron_fsdp_main_params_dtype"
# what replicas hold shares of, by what FSDP calls it
STRATEGIES: dict[Shard, str] = {
    "none": "no_shard",
    "optimizer": "optim",
    "gradients": "optim_grads",
    "parameters": "optim_grads_params",
}
# formats of an optimizer's state beside parameters in 16 bits, by bytes of a parameter
STATES = {
    8.0: {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    6.0: {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "fp16"},
}
# of the state in the host's memory: whether, the share, and whether copies overlap the step
OFFLOAD = (
    *("optimizer_cpu_offload", "optimizer_offload_fraction"),
    "overlap_cpu_optimizer_d2h_h2d",
)


def model_arguments(plan: Plan) -> dict[str, Any]:
    """The shape of a plan's transformer, its format, and what its trainer is told beside a layout.

    By the names of Megatron-LM; True is a flag alone, what is None or False is left out.
    """
    about = plan.transformer
    if not about:
        return {}
    model, practice, layout, latent = about.model, about.practice, plan.layout, about.model.latent
    wide = about.format != "float16"  # gradients in float32 by default
    grouped, dropout = model.kv_heads != model.heads, 0.1 if model.dropout else 0.0
    fp8 = {"fp8": ("hybrid", None), "mxfp8": ("e4m3", "mxfp8")}.get(about.format, (None, None))
    return {
        "num_layers": None if model.pattern else model.blocks,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn or model.expert_ffn,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_size - (latent.rotary if latent else 0),
        "seq_length": about.sequence,
        "max_position_embeddings": about.sequence,
        "vocab_size": model.vocabulary,
        **_write_numerics(model),
        "position_embedding_type": _positions(model),
        **write_mixers(model),
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "window_size": (model.window - 1, 0) if model.window else None,
        "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None,
        "window_attn_skip_freq": model.full_period or None if model.window else None,
        "softmax_type": "learnable" if model.sinks else None,
        **(_latent(model, latent) if latent else {}),
        **(_experts(plan) if model.experts else {}),
        "mtp_num_layers": None if model.further_pattern else model.further or None,
        "swiglu": model.gated,
        "untie_embeddings_and_output_weights": not model.tied,
        "bf16": about.format != "float16",
        "fp16": about.format == "float16",
        "fp8_format": fp8[0],
        "fp8_recipe": fp8[1],
        "fp8_param_gather": about.practice.fp8_parameters,
        "fp4_format": "e2m1" if about.format == "nvfp4" else None,
        "cross_entropy_loss_fusion": practice.loss != PLAIN,
        "tp_comm_overlap": practice.tp_overlap == "buffers" and (layout.tp or 1) > 1,
        "sequence_parallel": practice.sequence_parallel and (layout.tp or 1) > 1,
        "grad_reduce_in_bf16": plan.engine.gradients == "parameters",
        "accumulate_allreduce_grads_in_fp32": not wide and plan.engine.gradients == "float32",
        **_graphs(about),
        **_state(plan, about),
    }


def _positions(model: Transformer) -> str:
    """How positions are told; a recurrence tells them to attention."""
    return "rope" if model.rotary else "none" if model.recurrence else "learned_absolute"


def _latent(model: Transformer, latent: Latent) -> dict[str, Any]:
    """Attention over compressed keys, whose positions are turned apart."""
    scaling = model.numerics.rotary_scaling if model.numerics else {}
    stretched = scaling.get("rope_type") == "yarn"
    return {
        "multi_latent_attention": True,
        "qk_head_dim": model.head_size - latent.rotary,
        **{name: getattr(latent, field) or None for name, field in LATENT.items()},
        "rope_type": "yarn" if stretched else "rope",
        **{name: scaling[word] for name, word in YARN.items() if stretched and word in scaling},
    }


def _graphs(about: Modelled) -> dict[str, Any]:
    """What graphs of CUDA hold, which a model without experts has no router in."""
    held = GRAPHS.get(about.practice.graphs, ())
    scope = held if about.model.experts else tuple(name for name in held if "moe" not in name)
    if not scope:
        return {"cuda_graph_impl": "none"}
    if about.practice.graphs == "full":  # of an iteration, within which nothing is checked
        checks = {"no_check_for_nan_in_loss_and_grad": True}
        return {"cuda_graph_impl": "local", "cuda_graph_scope": [*scope], **checks}
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [*scope]}


def _state(plan: Plan, about: Modelled) -> dict[str, Any]:
    """Formats of an optimizer's state, or its place, which one that replicas share is aware of."""
    said: Mapping[str, Any] = STATES.get(float(about.facts.get("optimizer_bytes", 0)), {})
    if share := about.practice.optimizer_offload:
        said = dict(zip(OFFLOAD, (True, share, about.practice.offload_overlap), strict=True))
    if not said or plan.shard == "none" or about.practice.muon:
        return {}
    names = {"main_params_dtype": MAIN_PARAMETERS} if plan.layout.shares_gradients else {}
    named = {names.get(name, name): value for name, value in said.items()}
    return {"use_precision_aware_optimizer": True} | named


def fsdp_arguments(plan: Plan) -> dict[str, Any]:
    """What shares of gradients and parameters are told beside the optimizer's.

    Gradients are in the format of parameters, unless another is said.
    """
    narrow = plan.engine.gradients == "parameters"
    fp8 = plan.transformer and plan.transformer.format in ("fp8", "mxfp8")
    return {
        "data_parallel_sharding_strategy": STRATEGIES[plan.shard],
        "fsdp_double_buffer": True,
        MAIN_GRADIENTS: None if narrow else "fp32",
        "fp8_param_gather": bool(fp8),
        "no_gradient_accumulation_fusion": True,  # which Transformer Engine has from 2.10 on
        "ckpt_format": "fsdp_dtensor",
    }


def _write_numerics(model: Transformer) -> dict[str, Any]:
    numerics = model.numerics or usual_numerics(model.gated)
    scaling = numerics.rotary_scaling
    scaled = scaling == LLAMA3 | {"factor": scaling.get("factor")}
    return {
        "normalization": NORMS[numerics.norm],
        "norm_epsilon": numerics.epsilon,
        "qk_layernorm": numerics.query_key_norms or model.latent is not None,
        "squared_relu": numerics.activation == "relu2",
        # of which there is no fused kernel (core/transformer/transformer_config.py)
        **({"no_bias_gelu_fusion": True} if numerics.activation == "relu2" else {}),
        "disable_bias_linear": numerics.bias != "all",
        "add_qkv_bias": numerics.bias == "queries",
        "rotary_base": round(numerics.rotary_base) if model.rotary else None,
        "rotary_percent": numerics.rotary_share if model.rotary else None,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": scaling["factor"] if scaled else None,
    }


def usual_numerics(gated: bool) -> Numerics:
    """What Megatron has where nothing is said, or a plan does not say it."""
    if gated:
        return Numerics(epsilon=1e-5)
    return Numerics(norm="layer", epsilon=1e-5, activation="gelu", bias="all")


def _experts(plan: Plan) -> dict[str, Any]:
    assert plan.transformer
    model, practice, t = plan.transformer.model, plan.transformer.practice, plan.layout.tp or 1
    copies, split = practice.dispatch != "alltoall", plan.layout.etp or 1
    return {
        "num_experts": model.experts,
        "moe_layer_freq": None
        if model.pattern
        else _pattern(kind.experts for kind in model.kinds()),
        **{name: getattr(model, field) or None for name, field in EXPERTS.items()},
        "moe_grouped_gemm": plan.transformer.format != "float16",
        "moe_token_dispatcher_type": "flex" if copies else "alltoall",
        "moe_flex_dispatcher_backend": practice.dispatch if copies else None,
        "overlap_moe_expert_parallel_comm": practice.dispatch_overlap,
        "moe_router_force_load_balancing": practice.routing == "balanced",
        "moe_expert_capacity_factor": 1.0 if practice.routing == "capacity" else None,
        "moe_pad_expert_input_to_capacity": practice.routing == "capacity",
        "use_transformer_engine_op_fuser": practice.fused_experts,
        # as many as the tensor parallel ranks by default
        "expert_tensor_parallel_size": split if t > 1 or split > 1 else None,
    }


def _pattern(flags: Iterable[bool]) -> Expression | None:
    """Which blocks are of a kind, `[0]*3+[1]*58`; None where all are."""
    runs = [(int(flag), len([*run])) for flag, run in itertools.groupby(flags)]
    half, rest = divmod(len(runs), 2)
    several = half > 1 and not rest and runs == runs[:2] * half
    text = "+".join(f"[{flag}]*{n}" for flag, n in (runs[:2] if several else runs))
    text = f"({text})*{half}" if several else f"({text})"
    return Expression(text) if len(runs) > 1 else None
