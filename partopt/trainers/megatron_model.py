"""A transformer's training in the arguments of Megatron-LM, which Megatron Bridge has as fields."""

from __future__ import annotations

from typing import Any, Final

from partopt.documents.plan import Plan
from partopt.documents.transformer import Loss, Numerics, Transformer

PLAIN: Final = Loss(passes=52, held=6)
FUSED: Final = Loss(passes=12, held=4)
BUCKET_ITEM = 4  # bytes of a gradient in a bucket, whose size Megatron takes in parameters
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}
# what --use-rope-scaling says, beside a factor (core/models/common/embeddings)
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192.0}
FACTOR = 8.0  # by default


def model_arguments(plan: Plan) -> dict[str, Any]:
    """The shape of a plan's transformer, its format, and what its trainer is told beside a layout.

    By the names of Megatron-LM; True is a flag alone, what is None or False is left out.
    """
    about = plan.transformer
    if not about:
        return {}
    model, practice, layout = about.model, about.practice, plan.layout
    wide = about.format != "float16"  # gradients in float32 by default
    grouped, dropout = model.kv_heads != model.heads, 0.1 if model.dropout else 0.0
    fp8 = {"fp8": ("hybrid", None), "mxfp8": ("e4m3", "mxfp8")}.get(about.format, (None, None))
    return {
        "num_layers": model.blocks,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn or model.expert_ffn,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_size,
        "seq_length": about.sequence,
        "max_position_embeddings": about.sequence,
        "vocab_size": model.vocabulary,
        **_write_numerics(model),
        "position_embedding_type": "rope" if model.rotary else "learned_absolute",
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "window_size": (model.window - 1, 0) if model.window else None,
        "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None,
        **(_experts(plan) if model.experts else {}),
        "swiglu": model.gated,
        "untie_embeddings_and_output_weights": not model.tied,
        "bf16": about.format != "float16",
        "fp16": about.format == "float16",
        "fp8_format": fp8[0],
        "fp8_recipe": fp8[1],
        "fp4_format": "e2m1" if about.format == "nvfp4" else None,
        "cross_entropy_loss_fusion": practice.loss == FUSED,
        "tp_comm_overlap": practice.tp_overlap == "buffers" and (layout.tp or 1) > 1,
        "sequence_parallel": practice.sequence_parallel and (layout.tp or 1) > 1,
        "grad_reduce_in_bf16": plan.engine.gradients == "parameters",
        "accumulate_allreduce_grads_in_fp32": not wide and plan.engine.gradients == "float32",
    }


def _write_numerics(model: Transformer) -> dict[str, Any]:
    numerics = model.numerics or usual_numerics(model.gated)
    scaling = numerics.rotary_scaling
    scaled = scaling == LLAMA3 | {"factor": scaling.get("factor")}
    return {
        "normalization": NORMS[numerics.norm],
        "norm_epsilon": numerics.epsilon,
        "qk_layernorm": numerics.query_key_norms,
        "squared_relu": numerics.activation == "relu2",
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
    copies = practice.dispatch != "alltoall"
    return {
        "num_experts": model.experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_ffn,
        "moe_shared_expert_intermediate_size": model.shared_ffn or None,
        "moe_grouped_gemm": plan.transformer.format != "float16",
        "moe_token_dispatcher_type": "flex" if copies else "alltoall",
        "moe_enable_deepep": practice.dispatch == "deepep",
        "moe_flex_dispatcher_backend": "hybridep" if practice.dispatch == "hybridep" else None,
        "overlap_moe_expert_parallel_comm": practice.dispatch_overlap,
        # experts lie over all ranks, whole
        "expert_tensor_parallel_size": 1 if t > 1 else None,
    }
