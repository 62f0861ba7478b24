"""What arguments of Megatron-LM say of a transformer's training.

Megatron Bridge, NeMo and Megatron-DeepSpeed have the same arguments under other names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from partopt.configurations.program import Called
from partopt.configurations.settings import Settings
from partopt.configurations.shell import unknown_names
from partopt.documents.engine import Layout
from partopt.documents.stage import Shard
from partopt.documents.transformer import Format, Numerics, Transformer
from partopt.errors import PartoptError
from partopt.trainers.megatron_model import BUCKET_ITEM, FACTOR, LLAMA3, NORMS, usual_numerics
from partopt.trainers.megatron_names import count, find, note_arguments, note_unread
from partopt.trainers.megatron_vocabulary import name_shape
from partopt.trainers.trainer import Configured
from partopt.transformer.config import named_transformer

_OF_BERT = r"(?m)^[^#\n]*pretrain_bert\.py"
_GATED = ("swiglu", "fast-swiglu", "geglu", "reglu")
# formats by words of their recipes, the first that is said
_FORMATS: dict[Format, tuple[str, ...]] = {
    "nvfp4": ("nvfp4", "fp4"),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8", "hybrid", "e4m3"),
    "float16": ("fp16", "float16", "16"),
}
_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# what names a model: of Hugging Face, of a recipe, in a file of its own
_NAMING = ("from_hf_pretrained", "hf_model_id", "hf_path", "model_name", "recipe", "model")
_FLASH = ("use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
_ZERO = ("zero_optimization.stage", "zero_stage")
_NAMED = (
    *("latent", "chunked", "full_period", "sinks", "dense_first", "experts_period"),
    *("groups", "groups_per_token", "further"),
)
_UNPLANNED = ("32", "fp32", "float32", "32-true")  # formats


def read_training(
    settings: Settings, devices: int, trainer: str, stated: Sequence[int] | None = None
) -> Configured:
    """A transformer's training on so many devices, as the arguments or fields of `trainer` say.

    `stated` are the blocks of stages of a pipeline's layout, which goes before other arguments.
    Raises PartoptError with all that is missing, and for what is not planned.
    """
    fields = trainer == "megatron-bridge"  # whose defaults are others than those of arguments
    notes, shard = list(note_arguments(settings)), _shard(settings, trainer)
    degree = {
        name: count(settings, f"{name}_parallel_size", 1) or 1
        for name in ("tensor_model", "context", "pipeline_model", "expert_model")
    }
    t, c, p = degree["tensor_model"], degree["context"], degree["pipeline_model"]
    model = _model(settings, trainer, t, notes)
    split = count(settings, "expert_tensor_parallel_size", t) or 1
    dispatcher = settings.find("moe_token_dispatcher_type") or ("" if fields else "allgather")
    ep = 1
    if model.experts:
        ep = _share_experts(model.experts, degree["expert_model"], split, notes)
        if dispatcher == "allgather":
            flag = settings.show("moe_token_dispatcher_type")
            notes.append(f"{flag}: allgather is counted as alltoall")
    microbatch = count(settings, "micro_batch_size")
    steps = settings.count("gradient_accumulation_steps", default=1) or 1  # DeepSpeed's
    samples = (microbatch or 1) * max(1, devices // (t * c * p)) * steps
    batch = count(settings, "global_batch_size", None if fields else samples)
    sequence = count(settings, "seq_length")
    noop = _noop_blocks(settings)
    chunks = _chunks(settings, model.blocks + len(noop), p)
    blocks = _stages(settings, model.blocks + len(noop), p, chunks, noop)
    if stated is not None:
        chunks, blocks = max(1, len(stated) // p), list(stated)
    most = max(blocks) if blocks else -(-model.blocks // (p * chunks))
    layout = Layout(
        tp=t,
        cp=c,
        ep=ep,
        pp=p,
        chunks=chunks,
        microbatch=microbatch or 1,
        recompute=_recompute(settings, chunks, most, notes),
        shard=shard,
    )
    found = Configured(
        model=model,
        sequence=sequence or 1,
        global_batch=batch or 1,
        format=_format(settings, notes),
        layout=layout,
        facts=_facts(settings, t, p, trainer),
        blocks=blocks,
        notes=[*notes, *note_unread(settings)],
    )
    if settings.faults:
        raise PartoptError.together(settings.faults)
    return found


def _share_experts(experts: int, ranks: int, split: int, notes: list[str]) -> int:
    """Ranks that share the experts, where `ranks` do and an expert is split over `split`."""
    if split <= 1:
        return ranks
    fits = experts % (ranks * split) == 0
    how = "counted as experts on each" if fits else "not counted: whole ones are"
    notes.append(f"an expert's split over {split} ranks is {how}")
    return ranks * split if fits else ranks


def _model(settings: Settings, trainer: str, ranks: int, notes: list[str]) -> Transformer:
    """The shape: of a model that is named, with what is said otherwise, or as it is said."""
    base, fields = _find_named(settings, notes), trainer == "megatron-bridge"

    def usual(field: str, otherwise: Any = None) -> Any:
        return getattr(base, field) if base else otherwise

    heads = count(settings, "num_attention_heads", usual("heads")) or 1
    hidden = count(settings, "hidden_size", usual("hidden")) or 1
    gated = (
        settings.has("swiglu", "gated_linear_unit")
        or settings.find("activation", "activation_func") in _GATED
        or usual("gated", False)
    )
    dense = hidden * 8 // 3 // 64 * 64 if gated and not fields else 4 * hidden
    gated = gated or settings.has("quick_geglu")
    groups = count(settings, "num_query_groups", usual("kv_heads", heads)) or heads
    if not _has_groups(settings, fields or base is not None) and groups != heads:
        flag, needed = map(settings.show, ("num_query_groups", "group_query_attention"))
        notes.append(f"{flag} has no effect without {needed}")
        groups = heads
    width = count(settings, "ffn_hidden_size", usual("ffn", dense)) or 0
    experts = count(settings, "num_experts", usual("experts", 0)) or 0
    apart = settings.has("untie_embeddings_and_output_weights")
    share = settings.find("share_embeddings_and_output_weights") if fields else None
    tied = usual("tied", True) and not apart if share is None else bool(share)
    rotary = settings.find("position_embedding_type") in ("rope", "yarn")
    rotary = rotary or settings.has("use_rotary_position_embeddings") or usual("rotary", False)
    blocks = count(settings, "num_layers", usual("blocks")) or 1
    shape: dict[str, Any] = {
        "blocks": blocks - len(_noop_blocks(settings)),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups,
        "head_size": count(settings, "kv_channels", usual("head_size", hidden // heads)),
        "ffn": width,
        "vocabulary": usual("vocabulary", 0),
        "gated": gated,
        "causal": usual("causal", not re.search(_OF_BERT, settings.text)),
        "rotary": rotary,
        "dropout": _dropout(settings, usual("dropout", True)),
        "tied": tied,
        "window": _window(settings, usual("window", 0)),
        "numerics": _read_numerics(settings, base, gated),
    }
    if experts > 1 and _has_experts(settings, trainer):
        base = base if usual("experts") else None  # else experts are as wide as the feed-forward
        taken = usual("experts_per_token", 1 if trainer == "deepspeed" else 2)
        shared = "moe_shared_expert_intermediate_size"
        shape |= {
            "experts": experts,
            "experts_per_token": count(settings, "moe_router_topk", taken),
            "expert_ffn": count(settings, "moe_ffn_hidden_size", usual("expert_ffn", width)),
            "shared_ffn": count(settings, shared, usual("shared_ffn", 0)),
            "ffn": base.ffn if base else 0,
        }
    # of a model that is named
    shape |= {field: getattr(base, field) for field in _NAMED} if base else {}
    if settings.faults:
        raise PartoptError.together(settings.faults)
    return name_shape(settings, shape, ranks, notes)


def _has_groups(settings: Settings, usual: bool) -> bool:
    """Whether queries share keys and values; a fault where a checkpoint says among how many."""
    flagged = settings.has("group_query_attention", "num_key_value_heads")
    of_checkpoint = settings.has("use_checkpoint_args")
    if of_checkpoint and not find(settings, "num_query_groups"):
        why = "the checkpoint says it, by --use-checkpoint-args"
        settings.refuse_missing("num_query_groups", why)
    return usual or flagged or of_checkpoint


def _find_named(settings: Settings, notes: list[str]) -> Transformer | None:
    """The model that a text without a shape names: itself, or in what it calls."""
    if settings.form == "script" and settings.value("num_layers") is not None:
        return None
    names = [name for name in map(settings.value, _NAMING) if isinstance(name, str)]
    if settings.form == "program":
        values = [value for value in settings.values.values() if isinstance(value, str)]
        names += [value for value in values if isinstance(value, Called)]
        names += [name for value in values for name in unknown_names(value)] + settings.unread
    for said in names:
        if found := named_transformer(said):
            notes.append(f"the shape of {found.name}, which {said} names")
            return found
    return None


def _has_experts(settings: Settings, trainer: str) -> bool:
    """Whether all blocks have experts; a fault where some have none."""
    every = 2 if trainer == "deepspeed" else 1  # by default
    name = "expert_interval" if trainer == "deepspeed" else "moe_layer_freq"
    kinds, first = _kinds(settings, name, every), settings.find("first_k_dense_replace")
    if isinstance(first, int) and first > 0:
        name, kinds = "first_k_dense_replace", {False, True}
    return _only_kind(settings, name, kinds)


def _kinds(settings: Settings, name: str, every: int = 1) -> set[bool]:
    """Whether blocks are of a kind: every n-th, or as a list says, `([1]*48)` or `[0]+[1]*3`."""
    value = settings.find(name)
    text = str(value).strip("'\"() ")
    if value is None or text in ("-1", "None"):
        value = every
    if isinstance(value, list):
        return {bool(flag) for flag in value}
    parts = re.findall(r"\[([01, ]*)\](?:\*([0-9]{1,4}))?", text)
    if parts:
        stated = [kinds for kinds, times in parts if int(times or 1)]
        return {kind.strip() == "1" for kinds in stated for kind in kinds.split(",")}
    if isinstance(value, int) and value > 0:
        return {True, value == 1}
    what = f"{settings.show(name)}: {value!r} does not say which blocks"
    settings.faults.append(PartoptError(what, "give a number", code="invalid-value", path=name))
    return {True}


def _only_kind(settings: Settings, name: str, kinds: set[bool]) -> bool:
    """Whether all blocks are of the kind, or none; a fault where some are."""
    if len(kinds) > 1:
        what = f"{settings.show(name)}: blocks of two kinds: not planned"
        settings.faults.append(PartoptError(what, "leave it out", code="unsupported-model"))
    return any(kinds)


def _window(settings: Settings, usual: int) -> int:
    """Tokens that attention looks at, of which Megatron counts those before; 0 for all."""
    before = settings.find("window_size")
    if before is None:
        return usual
    found = re.match(r"[\[(]?'?(-1|[0-9]{1,9})'?([ ,\])]|$)", str(before))
    if found is None:
        what = f"{settings.show('window_size')}: {before!r} is not a number of tokens"
        fault = PartoptError(what, "give a number", code="invalid-value", path="window_size")
        settings.faults.append(fault)
        return 0
    name = "window_attn_skip_freq"
    skips = settings.find(name)
    if skips is not None:  # every n-th looks at all; a list says which do not
        listed = _only_kind(settings, name, _kinds(settings, name))
        return 0 if listed == isinstance(skips, int) else int(found[1]) + 1
    return int(found[1]) + 1


def _read_numerics(settings: Settings, base: Transformer | None, gated: bool) -> Numerics:
    """What no time depends on; what depends on a variable is as if it were not said."""
    named = base.numerics if base else None
    usual = named or structs.replace(usual_numerics(gated), norm="layer", bias="all")

    def number(default: float, *names: str) -> float:
        values = [settings.known(name) for name in names]
        return next(
            (value for value in values if isinstance(value, int | float) and value > 0), default
        )

    def said(name: str, default: object) -> object:
        value = settings.known(name)
        return default if value is None else value

    norms = {word.lower(): norm for norm, word in NORMS.items()}
    scaled = said("use_rope_scaling", said("rope_scaling", named and bool(usual.rotary_scaling)))
    factor = number(FACTOR, "rope_scaling_factor")
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
        rotary_scaling=LLAMA3 | {"factor": factor} if scaled else {},
    )


def _dropout(settings: Settings, usual: bool) -> bool:
    stated = [settings.find(name) for name in ("hidden_dropout", "attention_dropout")]
    return any(usual if value is None else bool(value) for value in stated)


def _noop_blocks(settings: Settings) -> list[int]:
    """The numbers of blocks that do nothing, which MindSpeed's `--noop-layers` lists."""
    return [int(number) for number in re.findall(r"[0-9]+", str(settings.find("noop_layers")))]


def _chunks(settings: Settings, blocks: int, p: int) -> int:
    """Stages on a device, by any of the arguments that say it."""
    found = count(settings, "num_virtual_stages_per_pipeline_rank", 1) or 1
    size = settings.count("num_layers_per_virtual_pipeline_stage", default=0)
    return max(1, (blocks + sum(_ends(settings))) // (p * size)) if size else found


def _ends(settings: Settings) -> tuple[bool, bool]:
    """Whether the embedding counts as a block, and the head."""
    embedding = "embed" in str(find(settings, "partition_method")).lower()
    first, last = map(settings.has, _ENDS)
    return first or embedding, last or embedding


def _stages(
    settings: Settings, blocks: int, p: int, v: int, noop: Sequence[int]
) -> list[int] | None:
    """Blocks of every stage where they are not shared out evenly; None where they are."""
    listed = settings.find("num_layer_list")
    first = count(settings, "num_layers_in_first_pipeline_stage", 0)
    last = count(settings, "num_layers_in_last_pipeline_stage", 0)
    ends = _ends(settings)
    if p == 1 or p * v > blocks + sum(ends):  # which is refused
        return None
    if not (listed or first or last or noop or ends[0] != ends[1]):
        return None
    if listed is not None:
        counts = [int(number) for number in re.findall(r"[0-9]+", str(listed))]
    elif first or last:
        middle = p - bool(first) - bool(last)
        rest = (blocks - (first or 0) - (last or 0)) // max(1, middle)
        devices = [first or rest, *[rest] * (p - 2), last or rest]
        counts = [devices[stage % p] // v for stage in range(p * v)]
    else:
        whole, left = divmod(blocks + sum(ends), p * v)
        counts = [whole + (stage < left) for stage in range(p * v)]
        counts[0] -= ends[0]
        counts[-1] -= ends[1]
    if len(counts) != p * v or sum(counts) != blocks or min(counts) < 0:
        said = "-".join(map(str, counts[:16])) or "none"
        what = f"stages of {said} blocks are not {p} x {v} of {blocks}"
        hint = "check the blocks that are said of stages"
        settings.faults.append(PartoptError(what, hint, code="unsupported-layout"))
        return None
    starts = [0, *itertools.accumulate(counts)]
    return [
        stop - start - sum(start <= number < stop for number in noop)
        for start, stop in itertools.pairwise(starts)
    ]


def _recompute(settings: Settings, chunks: int, most: int, notes: list[str]) -> Any:
    """What is made again, in stages of `most` blocks."""
    how, method = find(settings, "recompute_granularity"), find(settings, "recompute_method")
    number = count(settings, "recompute_num_layers", 1) or 1
    if settings.has("recompute_activations") or how == "selective":
        modules = settings.find("recompute_modules")
        if modules not in (None, "core_attn", ["core_attn"]):
            what = "selective recomputation is counted as of attention alone"
            notes.append(f"{settings.show('recompute_modules')}: {what}")
        return "selective"
    # the only one of 2021, whose arguments had no granularity
    alone = settings.form == "script" and settings.has("activations_checkpoint_method")
    if how != "full" and not (alone or settings.has("checkpoint_activations")):
        return "never"
    if method == "block":
        if settings.has("enable_recompute_layers_per_pp_rank"):
            number = max(1, number // chunks)
        return number if number < most else "always"
    if number > 1:
        what = "blocks are counted as recomputed one by one"
        notes.append(f"{settings.show('recompute_num_layers')}: {what}")
    return "always"


def _shard(settings: Settings, trainer: str) -> Shard:
    if trainer == "deepspeed":
        stage = settings.find(*_ZERO)
        if stage not in (None, 0, 1):
            what = f"ZeRO stage {stage}: pipelines of DeepSpeed run stages 0 and 1 alone"
            settings.faults.append(PartoptError(what, "give stage 1", code="unsupported-layout"))
        # of bfloat16 in stage 0 replicas share the float32 state (runtime/bf16_optimizer.py)
        return "optimizer" if stage == 1 or settings.has("bf16.enabled", "bf16") else "none"
    shared = settings.find("use_distributed_optimizer")
    if shared is None and trainer == "megatron-bridge":
        shared = settings.find("optim.name") in (None, "distributed_fused_adam")
    return "optimizer" if shared else "none"


def _format(settings: Settings, notes: list[str]) -> Format:
    names = ["mixed_precision", "plugins", "precision"]
    if settings.find("fp8") is not False:  # NeMo's, beside which the others say nothing
        names += ["fp4_format", "fp4", "fp8_recipe", "fp8_format", "fp8", "fp8_hybrid", "fp8_e4m3"]
    words = list[str]()
    for name in filter(settings.has, names):
        word = settings.find(name)
        if isinstance(word, Called):  # precision("fp8")
            word = f"{word} {settings.known(f'{name}.{word}')}"
        words.append(f"{name} {word}".lower() if word is True else str(word).lower())
    if settings.has("fp4_format", "fp4"):  # of which there is one recipe
        return "nvfp4"
    for form, recipes in _FORMATS.items():
        for word in words:
            if any(recipe in re.sub(r"bf(loat)?16", "", word) for recipe in recipes):
                return form
    if settings.has("fp16", "fp16.enabled"):
        return "float16"
    stated = settings.has("bf16", "bf16.enabled") or words
    if {*words} & {*_UNPLANNED} or (not stated and settings.form == "script"):
        said = f"{settings.show('precision')} {words[0]}" if words else "neither --bf16 nor --fp16"
        notes.append(f"{said}: float32 is not planned, bfloat16 is counted")
    return "bfloat16"


def _facts(settings: Settings, t: int, p: int, trainer: str) -> dict[str, object]:
    """Facts of the trainer that are not its defaults."""
    found: dict[str, object] = {}
    if trainer == "deepspeed":
        if settings.has("use_flash_attn", "use_flash_attn_v1", *_FLASH):
            found["attention"] = "flash"
        if _ends(settings)[0]:
            found["ends"] = "blocks"
        if settings.has("bf16.enabled", "bf16") and not settings.has(*_ZERO):
            found["gradients"] = "float32"
        return found

    def on(*names: str, default: bool = False) -> bool:
        stated = any(settings.value(name) is not None for name in names)
        return settings.has(*names) if stated else default

    fields = trainer == "megatron-bridge"
    fused = on("cross_entropy_loss_fusion", default=fields)
    backend = settings.find("moe_flex_dispatcher_backend")
    copies = on("moe_enable_deepep") | (settings.find("moe_token_dispatcher_type") == "flex")
    overlaps = on("overlap_grad_reduce", "overlap_grad_sync", default=fields)
    narrow = on("grad_reduce_in_bf16") or settings.find("grad_reduce_in_fp32") is False
    narrow = narrow or settings.find("main_grads_dtype") in ("bf16", "fp16")
    whole = on("accumulate_allreduce_grads_in_fp32")  # which --bf16 has by itself
    narrow = narrow or (not fields and settings.has("fp16") and not whole)
    waits = on("no_overlap_p2p_communication") or settings.find("overlap_p2p_comm") is False
    if fused != fields:
        found["loss"] = "fused" if fused else "plain"
    stated = {
        ("tp-overlap", "yes"): t > 1 and on("tp_comm_overlap", "ub_tp_comm_overlap"),
        ("exchange-overlap", "yes"): on("overlap_moe_expert_parallel_comm"),
        ("exchange", "hybridep" if backend == "hybridep" else "deepep"): copies,
        ("sequence-parallel", "no"): t > 1 and not find(settings, "sequence_parallel"),
        ("allreduce", "blocking"): not overlaps,
        ("gradients", "parameters"): narrow,
        ("waits", "1f1b,interleaved"): waits,
    }
    found |= {name: value for (name, value), said in stated.items() if said}
    if p > 1:
        found["ends"] = "blocks" if all(_ends(settings)) else "stage"
    if bucket := settings.count("ddp_bucket_size", "bucket_size", default=0):
        found["bucket"] = bucket * BUCKET_ITEM
    return found
