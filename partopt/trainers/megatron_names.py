"""Names of Megatron's arguments: others for the same, and those that are not read as they say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from partopt.configurations.program import Called
from partopt.configurations.settings import Settings
from partopt.trainers.megatron_mixers import PATTERN, find_other_blocks

# names of Megatron Bridge's fields that are others than those of the arguments
FIELDS = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "norm_epsilon": "layernorm_epsilon",
    "use_rope_scaling": "rope_scaling",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "ddp_bucket_size": "bucket_size",
}
# fields that are off where these arguments turn something off
OPPOSITES = {
    "disable_bias_linear": "add_bias_linear",
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "grad_reduce_in_bf16": "grad_reduce_in_fp32",
    "no_bias_gelu_fusion": "bias_activation_fusion",
    "no_check_for_nan_in_loss_and_grad": "check_for_nan_in_loss",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
}
# other names of arguments: Bridge's, NeMo's, Megatron-DeepSpeed's, MindSpeed's
SYNONYMS: dict[str, tuple[str, ...]] = {name: (field,) for name, field in FIELDS.items()} | {
    "num_layers": ("encoder_num_layers",),
    "num_layer_list": ("pipeline_model_parallel_blocks",),  # of Yuan 2
    "activation": ("activation_func",),
    "swiglu": (FIELDS["swiglu"], "t5_swiglu"),  # OpenGPT-X's
    "num_query_groups": ("num_key_value_heads",),
    "moe_router_topk": ("topk",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "seq_length": ("encoder_seq_length",),
    "micro_batch_size": ("train_micro_batch_size_per_gpu", "mbs"),
    "global_batch_size": ("train_batch_size", "gbs"),
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers", "checkpoint_num_layers"),
    "tensor_model_parallel_size": ("tensor_parallelism",),
    "pipeline_model_parallel_size": ("pipeline_parallelism",),
    "context_parallel_size": ("context_parallelism",),
    "expert_model_parallel_size": ("moe_expert_parallel_size", "expert_parallelism"),
    "expert_tensor_parallel_size": ("expert_tensor_parallelism",),
    "num_virtual_stages_per_pipeline_rank": (
        "virtual_pipeline_model_parallel_size",
        "virtual_pipeline_parallelism",
    ),
    "sequence_parallel": ("sequence_parallelism",),
    "num_layers_in_first_pipeline_stage": ("decoder_first_pipeline_num_layers",),
    "num_layers_in_last_pipeline_stage": ("decoder_last_pipeline_num_layers",),
    "partition_method": ("pp_partition_method",),
    "overlap_grad_reduce": ("overlap_grad_sync",),
    "rotary_percent": ("rotary_percentage",),
    "use_megatron_fsdp": ("use_custom_fsdp",),
    "tp_comm_overlap": ("ub_tp_comm_overlap",),
    "moe_flex_dispatcher_backend": ("flex_dispatcher_backend",),
    "cuda_graph_scope": ("cuda_graph_modules",),
}
# keys of NeMo's documents, where these are others than Bridge's fields
NEMO = {
    "recompute_granularity": "model.activations_checkpoint_granularity",
    "recompute_method": "model.activations_checkpoint_method",
    "recompute_num_layers": "model.activations_checkpoint_num_layers",
    "tp_comm_overlap": "model.ub_tp_comm_overlap",
    "use_distributed_optimizer": "optim.name",
    "overlap_grad_reduce": "optim.overlap_grad_sync",
    "overlap_param_gather": "optim.overlap_param_sync",
    "micro_batch_size": "model.micro_batch_size",
    "global_batch_size": "model.global_batch_size",
}
# what is refused, and what is not counted as it is written, by names of arguments
_REFUSED = {
    "blocks of several kinds": "heterogeneous_layers_config_path "
    "heterogeneous_layers_config_encoded_json",
    "training of few weights, as LoRA": "lora_target_modules lora_r lora_rank",
    "frozen weights": "freeze_llm freeze_layers freeze_parameters freeze_parameters_ratio "
    "freeze_parameters_regex",
    "training of modules beside adapters": "modules_to_save",
    "weights in few bits": "quantization_config load_in_4bit load_in_8bit quant_bits quant_method",
}
# of what a specification of blocks is called, kinds that are not planned
_OTHER_BLOCKS = re.compile(r"mamba|hybrid|gated_delta|linear_attention|qwen3_next|qwen3_5|glm5|dsa")
_NOT_COUNTED = {
    "the batch is taken to be whole from the beginning": "rampup_batch_size "
    "step_batch_size_schedule",
    "the checkpoint says the shape; where the text says it, that is taken": "use_checkpoint_args",
    "nothing is offloaded": "cpu_offloading cpu_offloading_num_layers optimizer_offload_policy "
    "cpu_optimizer",
    "all that modules save is counted as offloaded": "activation_offload_fraction "
    "delta_offload_bytes_across_pp_ranks min_offloaded_tensor_size",
    "every rank is counted to keep what it recomputes from": "distribute_saved_activations "
    "partition_activations",
    "all replicas are counted to share one state": "num_distributed_optimizer_instances",
    "without `--with documents=` a sample is counted as one": "packed_sequence_size",
    "formats of MS-AMP are not counted": "msamp",
    "convolutions beside attention are not counted": "use_lf_gate",  # of Yuan 2
    "sequence parallelism of DeepSpeed is not counted": "ds_sequence_parallel_size",
}
# words of arguments that change time, memory or the model, whoever has them
_MATTERS = re.compile(
    r"recompute|offload|cuda_graph|wgrad|fsdp|residual|partial_activation|hierarchical|capacity"
    r"|shared_expert|cp_comm|parallel_algo|gather_with|kernel|^no_.*fusion|swap|reuse|overlap|async"
    r"|sparse|quant|fp32|compress|spec$|ascend|coc_|turbo|memory_|pipeline|stage|layers|attention"
    r"|optimizer|expert|parallel|shard|embed_|fuse|cache|_dtype|deterministic|invariant|dropping"
    r"|latent|mhc|mamba|dsa_|gdp_|remat|stash|kitchen|buckets|variable_seq|mlp_chunks|block_specs"
    r"|rope_freq|fp4_param|symmetric|no_persist|qk_clip|(^|_)mup"
)
# of these words, but read elsewhere, of data, or as it is counted
_NO_MATTER = re.compile(
    r"_.*|.*(path|save|load|log|interval|ckpt|init|dropout|softmax|router|_mask.*|backend|data.*)"
    r"|attention_type|cuda_graph_warmup_steps|params_dtype|moe_router_.*|(pipeline_)?model_parallel(_size|_layout)?|use_flash_attn.*|use_fused.*"
    r"|(no_(masked_softmax|bias_gelu)_fusion|optimizer|pipeline_dtype|sequence_parallel)"
    r"|overlap_(param_gather|p2p_communication)|.*_(config|cfg|parallelism_type|in_fp32)|router.*"
    r"|(set|log|abort|apply|normalize|inference|rl|decoupled|wandb|tensorboard|no_pipeline|empty"
    r"|distributed|nccl|ckpt|barrier|scatter_gather|tp_comm_(bulk|split|atomic))_.*"
)
_HOLDS = (dict, Called)  # what has settings in it
_SHOWN = 12  # names in a note


def turns_off(settings: Settings, name: str) -> bool:
    """Whether an argument of `OPPOSITES` is given, or its field is off."""
    is_given = settings.has(name)
    return settings.find(OPPOSITES[name]) is False or is_given


def note_arguments(settings: Settings) -> Iterator[str]:
    """What is not counted as it is written; a fault for what is not planned."""
    for what, names in _REFUSED.items():
        for name in [name for name in names.split() if settings.has(name)][:1]:
            message = f"{settings.show(name)}: {what}: not planned"
            settings.refuse(message, "leave it out", "unsupported-model")
    for what, names in _NOT_COUNTED.items():
        said = filter(settings.has, names.split())
        yield from (f"{settings.show(name)}: {what}" for name in said)
    if named := next(find_other_blocks(settings, _OTHER_BLOCKS), None):
        message = f"{settings.show(named)}: blocks of another kind: not planned"
        hint = f"say them by {settings.show(PATTERN)}, or leave it out to plan them as attention"
        settings.refuse(message, hint, "unsupported-model")
    kernels = settings.find("attention_backend"), settings.find("transformer_impl")
    writes = kernels[0] in ("unfused", "local") or kernels[1] == "local"
    if writes and not settings.has("use_flash_attn"):
        yield "attention is counted to write no scores, but with `attention=scores`"
    if settings.find("position_embedding_type") == "alibi":
        yield f"{settings.show('position_embedding_type')}: alibi is counted as learned positions"
    gathered = settings.has("fp8_param_gather")
    if not gathered and settings.has("use_megatron_fsdp") and settings.has("fp8_format"):
        named = settings.show("fp8_param_gather")
        yield f"{named}: parameters are counted as gathered in the format of products"
    optimizer = settings.find("optimizer")
    if isinstance(optimizer, str) and not re.search("adam|muon", optimizer.lower()):
        yield f"{settings.show('optimizer')}: its state is counted as Adam's"


def note_unread(settings: Settings) -> Iterator[str]:
    """The arguments that nothing has asked for and that may change what is planned."""
    values = settings.values.items()
    names = {
        path.rpartition(".")[2]: value for path, value in values if not isinstance(value, _HOLDS)
    }
    rest = names.keys() - settings.asked - settings.variables
    stated = [name for name, value in names.items() if value and name in rest]
    unread = [name for name in stated if _MATTERS.search(name) and not _NO_MATTER.fullmatch(name)]
    if unread:
        said = ", ".join(map(settings.show, unread[:_SHOWN]))
        more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
        yield f"not read, and may change time, memory or the model: {said}{more}"
    if settings.unread:
        said = ", ".join(settings.unread[:_SHOWN])
        yield f"not read, and may set more: {said}"
