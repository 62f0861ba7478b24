"""The settings of configurations that options of a job replace, in the words of all trainers."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from partopt.documents.engine import Layout
from partopt.trainers.megatron_model import MAIN_GRADIENTS, OFFLOAD

# those that have the value of an option, or of a part of a layout
_VALUES = {
    "tp": ("tensor_model_parallel_size", "tensor_parallel_degree"),
    "cp": ("context_parallel_size", "context_parallel_degree"),
    "ep": ("expert_model_parallel_size", "expert_parallel_degree"),
    "etp": ("expert_tensor_parallel_size",),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "chunks": ("num_virtual_stages_per_pipeline_rank",),
    "microbatch": (
        *("micro_batch_size", "train_micro_batch_size_per_gpu"),
        "pipeline_parallel_microbatch_size",
    ),
    "schedule": ("pipeline_parallel_schedule",),
    "sequence": ("seq_length", "seq_len", "SEQUENCE"),
    "global_batch": ("global_batch_size",),
    "dtype": ("precision",),
}
# those that say nothing else than what an option, a part or a fact says
_NEEDLESS = {
    "chunks": ("num_layers_per_virtual_pipeline_stage", "pipeline_parallel_layers_per_stage"),
    "recompute": (
        *("recompute_granularity", "recompute_method", "recompute_num_layers"),
        *("recompute_activations", "checkpoint_activations", "activations_checkpoint_method"),
        *("enable_recompute_layers_per_pp_rank", "activation_checkpoint_interval"),
        *("activation_checkpoint", "activation_checkpoint.mode", "selective_ac_option"),
    ),
    "modules": ("recompute_modules",),
    "shard": (
        *("use_distributed_optimizer", "data_parallel_sharding_strategy", "optim.name"),
        *("zero_optimization.stage", "zero_stage", "fsdp_reshard_after_forward"),
    ),
    "global_batch": (
        *("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n"),
        "data.train_batch_size",
    ),
    "dtype": (
        *("mixed_precision", "plugins", "fp8", "fp8_recipe", "fp8_format", "fp8_hybrid"),
        *("fp8_e4m3", "fp4_format", "model.converters"),
    ),
    "ends": (
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        "num_layer_list",
    ),
    "graphs": ("cuda_graph_impl", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph"),
    "exchange": ("moe_flex_dispatcher_backend", "moe_enable_deepep"),
    "exchange_overlap": ("overlap_moe_expert_parallel_comm",),
    "routing": ("moe_router_force_load_balancing", "moe_pad_expert_input_to_capacity"),
    "fused_experts": ("use_transformer_engine_op_fuser",),
    "fp8_parameters": ("fp8_param_gather",),
    "offload": ("fine_grained_activation_offloading", "offload_modules"),
    "optimizer_offload": OFFLOAD[:2],
    "offload_overlap": OFFLOAD[2:],
    "tp_overlap": ("tp_comm_overlap",),
    "sequence_parallel": ("sequence_parallel",),
    "allreduce": ("overlap_grad_reduce",),
    "gradients": ("main_grads_dtype", MAIN_GRADIENTS),
    "bucket": ("ddp_bucket_size",),
    "loss": ("cross_entropy_loss_fusion",),
    "cpu_offload": ("enable_cpu_offload",),
    "async_tp": ("enable_async_tensor_parallel",),
}


def replaced_settings(
    layout: Layout, options: Mapping[str, object], facts: Mapping[str, object]
) -> dict[str, object]:
    """What settings are where options say something else: a value, or None for none is needed.

    Parts of a layout, options and facts that are None say nothing.
    """
    said = {**facts, **options, **structs.asdict(layout)}
    said = {name.replace("-", "_"): value for name, value in said.items() if value is not None}
    found = {other: None for name in said for other in _NEEDLESS.get(name, ())}
    values = {other: value for name, value in said.items() for other in _VALUES.get(name, ())}
    if "global_batch" in said:
        values["gradient_accumulation_steps"] = 1
    if "exchange" in said:
        values["moe_token_dispatcher_type"] = "alltoall"
    if "dtype" in said:
        values |= dict.fromkeys(("fp16", "fp16.enabled"), said["dtype"] == "float16")
    return found | values
