"""A transformer's training in the arguments of Megatron-LM, and read back from them.

Megatron Bridge, NeMo and Megatron-DeepSpeed have the same arguments under names of their own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import structs

from partopt import documents
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.documents.transformer import Format, Loss, Numerics, Transformer
from partopt.errors import PartoptError
from partopt.trainers.settings import Settings
from partopt.trainers.trainer import Configured
from partopt.transformer.config import like_shipped, named_transformer

PLAIN: Final = Loss(passes=52, held=6)
FUSED: Final = Loss(passes=12, held=4)
BUCKET_ITEM = 4  # bytes of a gradient in a bucket, whose size Megatron takes in parameters

# other names of arguments: NeMo's, Bridge's, Megatron-DeepSpeed's
_NAMES: dict[str, tuple[str, ...]] = {
    "num_query_groups": ("num_key_value_heads",),
    "num_experts": ("num_moe_experts",),
    "seq_length": ("encoder_seq_length",),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "global_batch_size": ("train_batch_size",),
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers",),
    "expert_model_parallel_size": ("moe_expert_parallel_size",),
}
_GATED = ("swiglu", "fast-swiglu", "geglu", "reglu")
# formats by words of their recipes, the first that is said
_FORMATS: dict[Format, tuple[str, ...]] = {
    "nvfp4": ("nvfp4", "fp4"),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8", "hybrid", "e4m3"),
    "float16": ("fp16", "float16", "16"),
}
_NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}
# what --use-rope-scaling says, beside a factor (core/models/common/embeddings)
_LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192.0}
_FACTOR = 8.0  # by default
_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_REFUSED = {
    "multi_latent_attention": "attention over compressed keys (MLA)",
    "mtp_num_layers": "multi-token prediction",
    "heterogeneous_layers_config_path": "blocks of several kinds",
    "hybrid_override_pattern": "blocks of several kinds",
    "is_hybrid_model": "blocks of several kinds",
    "use_torch_fsdp2": "FSDP in Megatron",
    "use_megatron_fsdp": "FSDP in Megatron",
    "use_custom_fsdp": "FSDP in Megatron",
}
_NOT_COUNTED = {
    "rampup_batch_size": "the batch is taken to be whole from the beginning",
    "recompute_modules": "selective recomputation is of attention alone",
    "cpu_offloading_num_layers": "nothing is offloaded",
    "optimizer_cpu_offload": "nothing is offloaded",
    "use_precision_aware_optimizer": "state is counted in float32",
    "cuda_graph_impl": "graphs of CUDA are not counted",
    "ds_sequence_parallel_size": "sequence parallelism of DeepSpeed is not counted",
}


def model_arguments(plan: Plan) -> dict[str, Any]:
    """The shape of a plan's transformer, its format, and what its trainer is told beside a layout.

    By the names of Megatron-LM; True is a flag alone, what is None or False is left out.
    """
    about = plan.transformer
    if not about:
        return {}
    model, practice, own = about.model, about.practice, plan.layout
    grouped, dropout = model.kv_heads != model.heads, 0.1 if model.dropout else 0.0
    fp8 = {"fp8": ("hybrid", None), "mxfp8": ("e4m3", "mxfp8")}.get(about.format, (None, None))
    return {
        "num_layers": model.blocks,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.expert_ffn if model.experts else model.ffn,
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
        "tp_comm_overlap": practice.tp_overlap != "none" and (own.tp or 1) > 1,
        "sequence_parallel": practice.sequence_parallel and (own.tp or 1) > 1,
        "grad_reduce_in_bf16": plan.engine.gradients == "parameters",
    }


def _write_numerics(model: Transformer) -> dict[str, Any]:
    own = model.numerics or _usual_numerics(model.gated)
    scaling = own.rotary_scaling
    scaled = scaling == _LLAMA3 | {"factor": scaling.get("factor")}
    return {
        "normalization": _NORMS[own.norm],
        "norm_epsilon": own.epsilon,
        "qk_layernorm": own.query_key_norms,
        "squared_relu": own.activation == "relu2",
        "disable_bias_linear": own.bias != "all",
        "add_qkv_bias": own.bias == "queries",
        "rotary_base": round(own.rotary_base) if model.rotary else None,
        "rotary_percent": own.rotary_share if model.rotary else None,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": scaling["factor"] if scaled else None,
    }


def _usual_numerics(gated: bool) -> Numerics:
    """What Megatron has where nothing is said, or a plan does not say it."""
    if gated:
        return Numerics(epsilon=1e-5)
    return Numerics(norm="layer", epsilon=1e-5, activation="gelu", bias="all")


def _experts(plan: Plan) -> dict[str, Any]:
    assert plan.transformer
    model, practice, t = plan.transformer.model, plan.transformer.practice, plan.layout.tp or 1
    copies = practice.dispatch == "copies"
    return {
        "num_experts": model.experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_ffn,
        "moe_shared_expert_intermediate_size": model.ffn or None,
        "moe_grouped_gemm": plan.transformer.format != "float16",
        "moe_token_dispatcher_type": "flex" if copies else "alltoall",
        "moe_enable_deepep": copies,
        "overlap_moe_expert_parallel_comm": practice.dispatch_overlap,
        # experts lie over all ranks, whole
        "expert_tensor_parallel_size": 1 if t > 1 else None,
    }


def read_training(settings: Settings, devices: int, trainer: str) -> Configured:
    """A transformer's training on so many devices, as the arguments or fields of `trainer` say.

    Raises PartoptError with all that is missing, and for what is not planned.
    """
    script = settings.form == "script"
    notes = list(_notes(settings))
    model = _model(settings, script, notes)
    degree = {
        name: settings.count(f"{name}_parallel_size", default=1) or 1
        for name in ("tensor_model", "context", "pipeline_model", "expert_model")
    }
    t, c, p = degree["tensor_model"], degree["context"], degree["pipeline_model"]
    whole = settings.count("expert_tensor_parallel_size", default=t) or 1
    ep = (_count(settings, "expert_model_parallel_size", 1) or 1) if model.experts else 1
    if model.experts and whole > 1:
        notes.append(f"an expert's split over {whole} ranks is counted as experts on each")
        ep *= whole
    microbatch = _count(settings, "micro_batch_size", 1 if trainer == "megatron-bridge" else None)
    replicas = max(1, devices // (t * c * p))
    batch = _count(settings, "global_batch_size", (microbatch or 1) * replicas)
    sequence = _count(settings, "seq_length")
    layout = Layout(
        tp=t,
        cp=c,
        ep=ep,
        pp=p,
        chunks=_chunks(settings, model, p),
        microbatch=microbatch or 1,
        recompute=_recompute(settings),
        shard=_shard(settings, trainer),
    )
    found = Configured(
        model=model,
        sequence=sequence or 1,
        global_batch=batch or 1,
        format=_format(settings, notes),
        layout=layout,
        facts=_facts(settings, script, t, p, trainer),
        notes=notes,
    )
    if settings.faults:
        raise PartoptError.together(settings.faults)
    return found


def _count(settings: Settings, name: str, default: int | None = None) -> int | None:
    return settings.count(name, *_NAMES.get(name, ()), default=default)


def _notes(settings: Settings) -> Iterator[str]:
    """What is not counted; a fault for what is not planned."""
    for name, what in _REFUSED.items():
        if settings.has(name):
            message = f"{settings.show(name)}: {what}: not planned"
            fault = PartoptError(message, "leave it out", code="unsupported-model", path=name)
            settings.faults.append(fault)
    for name, what in _NOT_COUNTED.items():
        if settings.has(name):
            yield f"{settings.show(name)}: {what}"
    if settings.find("moe_layer_freq") not in (None, 1):
        what = f"{settings.show('moe_layer_freq')}: blocks of two kinds: not planned"
        settings.faults.append(PartoptError(what, code="unsupported-model"))
    grouped = settings.form != "script" or settings.has("group_query_attention")
    if settings.has("num_query_groups") and not grouped:
        yield "--num-query-groups has no effect without --group-query-attention"


def _model(settings: Settings, script: bool, notes: list[str]) -> Transformer:
    """The shape: of a model that is named, with what is said otherwise, or as it is said."""
    names = ("from_hf_pretrained", "hf_model_id", "hf_path", "model_name", "recipe")
    named = [str(value) for value in map(settings.find, names) if isinstance(value, str)]
    base = next((own for own in map(named_transformer, named) if own is not None), None)
    heads = _count(settings, "num_attention_heads", base.heads if base else None) or 1
    hidden = _count(settings, "hidden_size", base.hidden if base else None) or 1
    gated = settings.has("swiglu", "gated_linear_unit") or settings.find("activation") in _GATED
    gated = gated or bool(base and base.gated)
    groups = _count(settings, "num_query_groups", base.kv_heads if base else heads) or heads
    flagged = not script or settings.has("group_query_attention", "num_key_value_heads")
    dense = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
    width = _count(settings, "ffn_hidden_size", base.ffn if base else dense) or 0
    experts = _count(settings, "num_experts", base.experts if base else 0) or 0
    tied = not settings.has("untie_embeddings_and_output_weights")
    if not script:
        share = settings.find("share_embeddings_and_output_weights")
        tied = bool(base.tied if base else True) if share is None else bool(share)
    rope = settings.find("position_embedding_type") in ("rope", "yarn")
    size = settings.known("padded_vocab_size") or settings.known("vocab_size")
    vocabulary = size if isinstance(size, int) else base.vocabulary if base else 0
    shape: dict[str, Any] = {
        "blocks": _count(settings, "num_layers", base.blocks if base else None) or 1,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if flagged else heads,
        "head_size": _count(settings, "kv_channels", base.head_size if base else hidden // heads),
        "ffn": width,
        "vocabulary": vocabulary,
        "gated": gated,
        "rotary": rope
        or settings.has("use_rotary_position_embeddings")
        or bool(base and base.rotary),
        "dropout": _dropout(settings, base),
        "tied": tied,
        "window": _window(settings),
        "numerics": _read_numerics(settings, base, gated),
    }
    if experts:
        expert_width = base.expert_ffn if base else width
        shape |= {
            "experts": experts,
            "experts_per_token": _count(
                settings, "moe_router_topk", base.experts_per_token if base else 2
            ),
            "expert_ffn": _count(settings, "moe_ffn_hidden_size", expert_width),
            "ffn": _count(settings, "moe_shared_expert_intermediate_size", base.ffn if base else 0),
        }
    if settings.faults:
        raise PartoptError.together(settings.faults)
    return name_shape(settings, shape, notes)


def _read_numerics(settings: Settings, base: Transformer | None, gated: bool) -> Numerics:
    """What no time depends on; what depends on a variable is as if it were not said."""
    named = base.numerics if base else None
    usual = named or structs.replace(_usual_numerics(gated), norm="layer", bias="all")

    def number(default: float, *names: str) -> float:
        values = [settings.known(name) for name in names]
        return next((own for own in values if isinstance(own, int | float) and own > 0), default)

    def said(name: str, default: object) -> object:
        value = settings.known(name)
        return default if value is None else value

    norms = {word.lower(): norm for norm, word in _NORMS.items()}
    scaled = said("use_rope_scaling", said("rope_scaling", named and bool(usual.rotary_scaling)))
    factor = number(_FACTOR, "rope_scaling_factor")
    biased = said("add_bias_linear", said("bias", usual.bias == "all"))  # NeMo's is `bias`
    every = not said("disable_bias_linear", not biased)
    queries = said("add_qkv_bias", usual.bias == "queries")
    return structs.replace(
        usual,
        norm=norms.get(str(settings.known("normalization")).lower(), usual.norm),
        epsilon=number(usual.epsilon, "norm_epsilon", "layernorm_epsilon"),
        query_key_norms=bool(said("qk_layernorm", usual.query_key_norms)),
        activation="relu2" if settings.known("squared_relu") else usual.activation,
        bias="all" if every else "queries" if queries else "none",
        rotary_base=number(usual.rotary_base, "rotary_base"),
        rotary_share=number(usual.rotary_share, "rotary_percent", "rotary_percentage"),
        rotary_scaling=_LLAMA3 | {"factor": factor} if scaled else {},
    )


def _window(settings: Settings) -> int:
    """Tokens that attention looks at, of which Megatron counts those before; 0 for all."""
    before = settings.find("window_size")
    if before is None:
        return 0
    found = re.match(r"[\[(]?'?(-1|[0-9]{1,9})'?([ ,\])]|$)", str(before))
    if found is None:
        what = f"{settings.show('window_size')}: {before!r} is not a number of tokens"
        fault = PartoptError(what, "give a number", code="invalid-value", path="window_size")
        settings.faults.append(fault)
    return int(found[1]) + 1 if found else 0


def name_shape(settings: Settings, shape: dict[str, Any], notes: list[str]) -> Transformer:
    """The transformer of this shape; a shipped one of the same gives its name and vocabulary."""
    missing = not shape["vocabulary"]
    model = Transformer(name="model", **shape | {"vocabulary": shape["vocabulary"] or 1})
    if like := like_shipped(model, *["vocabulary"] * missing):
        if missing:
            notes.append(
                f"a vocabulary of {like.vocabulary:,}, as {like.name} of the same shape has"
            )
        return like
    if missing:
        settings.refuse_missing("vocab_size")
        raise PartoptError.together(settings.faults)
    documents.refuse(model.faults(), "the model's shape")
    return model


def _dropout(settings: Settings, base: Transformer | None) -> bool:
    stated = [settings.find(name) for name in ("hidden_dropout", "attention_dropout")]
    if stated == [None, None]:
        return base.dropout if base else True
    return any(value is None or bool(value) for value in stated)


def _chunks(settings: Settings, model: Transformer, p: int) -> int:
    """Stages on a device, by any of the arguments that say it."""
    found = settings.count(
        "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", default=1
    )
    each = settings.count("num_layers_per_virtual_pipeline_stage", default=0)
    ends = sum(map(settings.has, _ENDS))
    return (model.blocks + ends) // (p * each) if each else found or 1


def _recompute(settings: Settings) -> Any:
    def said(name: str) -> object:
        return settings.find(name, *_NAMES[name])

    how = said("recompute_granularity")
    if settings.has("recompute_activations") or how == "selective":
        return "selective"
    deep = settings.has("deepspeed_activation_checkpointing", "checkpoint_activations")
    if how != "full" and not deep:
        return "never"
    if said("recompute_method") == "block":
        return _count(settings, "recompute_num_layers", 1) or "never"
    return "always"


def _shard(settings: Settings, trainer: str) -> Shard:
    if trainer == "deepspeed":
        stage = settings.find("zero_optimization.stage", "zero_stage")
        if stage not in (None, 0, 1):
            what = f"ZeRO stage {stage}: pipelines of DeepSpeed run stages 0 and 1 alone"
            settings.faults.append(PartoptError(what, "give stage 1", code="unsupported-layout"))
        return "optimizer" if stage == 1 else "none"
    shared = settings.find("use_distributed_optimizer")
    if shared is None and settings.form != "script":
        shared = settings.find("optim.name") in (None, "distributed_fused_adam")
    return "optimizer" if shared else "none"


def _format(settings: Settings, notes: list[str]) -> Format:
    names = ("mixed_precision", "precision", "fp4_format", "fp4", "fp8_recipe", "fp8_format", "fp8")
    scaled = settings.has("fp8_format", "fp8", "fp4_format", "fp4")
    words = [str(settings.find(name)).lower() for name in names if settings.has(name)]
    for form, recipes in _FORMATS.items():
        for word in words:
            if any(recipe in re.sub(r"bf(loat)?16", "", word) for recipe in recipes):
                return form
    if settings.has("fp4_format", "fp4"):  # of which there is one recipe
        return "nvfp4"
    if settings.has("fp16", "fp16.enabled"):
        return "float16"
    stated = scaled or words or settings.has("bf16", "bf16.enabled")
    if not stated and settings.form == "script":
        notes.append("neither --bf16 nor --fp16: float32 is not planned, bfloat16 is counted")
    return "bfloat16"


def _facts(settings: Settings, script: bool, t: int, p: int, trainer: str) -> dict[str, object]:
    """Facts of the trainer that are not its defaults."""
    if trainer == "deepspeed":
        flash = any(name.startswith("use_flash_attn") for name in settings.values)
        return {"attention": "flash"} if flash else {}

    def on(*names: str, default: bool = False) -> bool:
        stated = any(settings.value(name) is not None for name in names)
        return settings.has(*names) if stated else default

    fused = on("cross_entropy_loss_fusion", default=not script)
    copies = on("moe_enable_deepep") or settings.find("moe_token_dispatcher_type") == "flex"
    overlaps = on("overlap_grad_reduce", "overlap_grad_sync", default=not script)
    narrow = on("grad_reduce_in_bf16") or settings.find("grad_reduce_in_fp32") is False
    waits = on("no_overlap_p2p_communication") or settings.find("overlap_p2p_comm") is False
    found: dict[str, object] = {}
    if fused != (trainer == "megatron-bridge"):
        found["loss"] = "fused" if fused else "plain"
    stated = {
        ("tp-overlap", "yes"): t > 1 and on("tp_comm_overlap", "ub_tp_comm_overlap"),
        ("exchange-overlap", "yes"): on("overlap_moe_expert_parallel_comm"),
        ("exchange", "copies"): copies,
        ("sequence-parallel", "no"): t > 1 and not on("sequence_parallel"),
        ("allreduce", "blocking"): not overlaps,
        ("gradients", "parameters"): narrow,
        ("waits", "1f1b,interleaved"): waits,
    }
    found |= {name: value for (name, value), said in stated.items() if said}
    if p > 1:
        found["ends"] = "blocks" if any(map(settings.has, _ENDS)) else "stage"
    if bucket := settings.count("ddp_bucket_size", "bucket_size", default=0):
        found["bucket"] = bucket * BUCKET_ITEM
    return found


def with_layout(found: Configured, segments: Sequence[str]) -> Configured:
    """The training with the blocks of each stage of a pipeline's layout."""
    blocks = [segment.count("t") for segment in segments]
    chunks = len(blocks) // (found.layout.pp or 1)
    layout = structs.replace(found.layout, chunks=max(1, chunks))
    return dataclasses.replace(found, layout=layout, blocks=blocks)
