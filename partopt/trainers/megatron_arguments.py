"""What arguments of Megatron-LM say of a transformer's training.

Megatron Bridge, NeMo and Megatron-DeepSpeed have the same arguments under other names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import structs

from partopt.configurations.marks import unknown_names
from partopt.configurations.program import Called
from partopt.configurations.settings import Settings, read_settings
from partopt.documents.engine import MODULES, STATE, Layout, Recompute
from partopt.documents.stage import Shard
from partopt.documents.transformer import ADAPTED, OFFLOADED, Format, Latent, Numerics, Transformer
from partopt.importers.hugging_face import find_transformer, named_transformer
from partopt.trainers.megatron_mixers import PATTERNS, read_mixers, read_pattern
from partopt.trainers.megatron_model import (
    BUCKET_ITEM,
    EXPERTS,
    FACTOR,
    LATENT,
    LLAMA3,
    MAIN_GRADIENTS,
    MAIN_PARAMETERS,
    NORMS,
    OFFLOAD,
    STATES,
    STRATEGIES,
    YARN,
    usual_numerics,
)
from partopt.trainers.megatron_names import SYNONYMS, note_arguments, note_unread, turns_off
from partopt.trainers.megatron_vocabulary import name_shape
from partopt.trainers.trainer import Stated
from partopt.transformer.offloading import TOGETHER

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
_FLASH = ("use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder", "use_fused_sdpa")
_DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")  # of NeMo
_ZERO = ("zero_optimization.stage", "zero_stage")
_PATTERN = re.compile(r"[\[\]()0-9,+* ]{1,400}")
# of Megatron-LM where nothing says them, and of Bridge (MLATransformerConfig)
_LATENT = {"q_lora_rank": (0, 512), "kv_lora_rank": (32, 512)}
_LATENT |= {"qk_pos_emb_head_dim": (64, 64), "v_head_dim": (128, 128)}
_YARN = (1.0, 1.0, 0.0, 32.0, 1.0, 4096.0), (40.0, 1.0, 0.0, 32.0, 1.0, 4096.0)
FUSED_EXPERTS = "fused_group_mlp"  # the module of experts whose operations are fused
ADAPTING = ("megatron-bridge", "ms-swift", "verl")  # trainers whose adapters are read
_MOST = 1000  # blocks of a model
_UNPLANNED = ("32", "fp32", "float32", "32-true")  # formats


def read_training(
    settings: Settings, devices: int, trainer: str, stated: Sequence[str] | None = None
) -> Stated:
    """A transformer's training on so many devices, as the arguments or fields of `trainer` say.

    `stated` are the letters of stages of a pipeline's layout, which goes before other arguments.
    Raises PartoptError with all that is missing, and for what is not planned.
    """
    fields = trainer == "megatron-bridge"  # whose defaults are others than those of arguments
    settings.synonyms = SYNONYMS
    settings.notes += note_arguments(settings)
    said = read_layout(settings, trainer)
    t, c, p = said.tp or 1, said.cp or 1, said.pp or 1
    microbatch = said.microbatch or settings.count("micro_batch_size") or 1
    steps = settings.count("gradient_accumulation_steps", default=1) or 1  # DeepSpeed's
    samples = microbatch * max(1, devices // (t * c * p)) * steps
    batch = settings.count("global_batch_size", default=None if fields else samples)
    sequence = settings.count("seq_length")
    model = _model(settings, trainer, t)
    split = _split_of_experts(settings, trainer, model, t)
    noop = _noop_blocks(settings)
    chunks = _chunks(settings, model.blocks + len(noop), p)
    blocks = _stages(settings, model.blocks + len(noop), p, chunks, noop)
    if blocks is None and stated is None and trainer != "deepspeed":
        _check_even(settings, model.blocks, p, chunks)
    if stated is not None:
        _check_letters(settings, "".join(stated), model)
        chunks, blocks = max(1, len(stated) // p), [stage.count("t") for stage in stated]
    most = max(blocks) if blocks else -(-model.blocks // (p * chunks))
    recompute = read_recomputation(settings, chunks, most)
    layout = structs.replace(
        said,
        tp=t,
        cp=c,
        ep=said.ep if model.experts and said.ep else 1,
        etp=split,
        pp=p,
        chunks=chunks,
        microbatch=microbatch,
        recompute=recompute,
        modules=_modules(settings) if recompute == "selective" else None,
    )
    found = Stated(
        model=model,
        sequence=sequence or 1,
        batch=batch or 1,
        format=_format(settings),
        layout=layout,
        facts=_facts(settings, layout, trainer, model),
        blocks=blocks,
        further_stage=next((s for s, stage in enumerate(stated or ()) if "m" in stage), None),
        notes=settings.notes,
    )
    settings.notes += note_unread(settings)
    settings.check()
    return found


def read_layout(settings: Settings, trainer: str = "megatron") -> Layout:
    """What is said of a layout beside its stages and what they recompute, None where nothing is."""
    return Layout(
        shard=_shard(settings, trainer),
        tp=settings.number("tensor_model_parallel_size"),
        cp=settings.number("context_parallel_size"),
        pp=settings.number("pipeline_model_parallel_size"),
        ep=settings.number("expert_model_parallel_size"),
        microbatch=settings.number("micro_batch_size"),
    )


def _split_of_experts(settings: Settings, trainer: str, model: Transformer, t: int) -> int | None:
    """The ranks that share an expert; None where there are no experts, or they are whole."""
    fields, name = trainer == "megatron-bridge", "expert_tensor_parallel_size"
    usual = 1 if trainer == "deepspeed" else t
    unsaid = fields and model.experts and not settings.states(name)
    if unsaid and settings.unread:  # as Bridge's recipes have
        settings.notes.append(f"{name}: 1, as in recipes of Bridge")
        usual = 1
    split = settings.count(name, default=usual) or 1
    dispatcher = settings.find("moe_token_dispatcher_type") or ("" if fields else "allgather")
    if model.experts and dispatcher == "allgather":
        settings.note("moe_token_dispatcher_type", "allgather is counted as alltoall")
    return split if model.experts and split > 1 else None


def _check_even(settings: Settings, blocks: int, p: int, v: int) -> None:
    """Note as a fault blocks that stages do not share evenly, with which Megatron does not start.

    Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
    """
    units, stated = blocks + sum(_ends(settings)), "num_layer_list" in settings.replaced
    if not stated and units % (p * v) and units >= p * v > 1:  # fewer are refused, whoever trains
        what = f"{units} blocks are not a multiple of {p * v} stages: Megatron does not start"
        name, hint = "pipeline_model_parallel_layout", "say what each stage has: `arguments={}={}`"
        settings.refuse(what, hint.format(name, "Et*N|..|t*NL"), "unsupported-layout", path=name)


def _check_letters(settings: Settings, letters: str, model: Transformer) -> None:
    """Note as a fault that the units of a pipeline's layout are not those of the model."""
    said = letters.count("t"), letters.count("m")
    if said == (model.blocks, model.further) and re.fullmatch("Et*m*L", letters):
        return
    what = (
        "the pipeline's layout has {} blocks (t) and {} of further tokens (m), the model {} and {}"
    )
    message = what.format(*said, model.blocks, model.further)
    hint = "a layout begins with its one E, and ends with its one L"
    settings.refuse(message, hint, "unsupported-layout")


def _model(settings: Settings, trainer: str, ranks: int) -> Transformer:
    """The shape: of a model that is named, with what is said otherwise, or as it is said."""
    before = len(settings.faults)
    base, fields = _find_base(settings), trainer == "megatron-bridge"

    def usual(field: str, otherwise: Any = None) -> Any:
        return getattr(base, field) if base else otherwise

    heads = settings.count("num_attention_heads", default=usual("heads")) or 1
    hidden = settings.count("hidden_size", default=usual("hidden")) or 1
    gated, dense = _feed_forward(settings, hidden, usual("gated", False), fields)
    groups = settings.count("num_query_groups", default=usual("kv_heads", heads)) or heads
    if not _has_groups(settings, fields or base is not None) and groups != heads:
        flag, needed = map(settings.show, ("num_query_groups", "group_query_attention"))
        settings.notes.append(f"{flag} has no effect without {needed}")
        groups = heads
    if settings.find("attention_head_type") == "multiquery":  # of BigCode
        groups = 1
    width = settings.count("ffn_hidden_size", default=usual("ffn", dense)) or 0
    experts = settings.count("num_experts", default=usual("experts", 0)) or 0
    pattern = read_pattern(settings)
    provided = bool(fields and pattern.letters)  # by Bridge's provider of hybrids
    rotary = settings.find("position_embedding_type") in ("rope", "yarn")
    rotary = rotary or settings.has("use_rotary_position_embeddings") or usual("rotary", False)
    stated = len(pattern.letters)
    blocks = settings.count("num_layers", default=stated or usual("blocks")) or 1
    blocks = min((stated or blocks) - len(_noop_blocks(settings)), _MOST + 1)  # more are refused
    window, full_period = _window(settings, blocks, base)
    latent = _latent(settings, base, fields)
    shape: dict[str, Any] = {
        "blocks": blocks,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if latent else groups,
        "head_size": settings.count("kv_channels", default=usual("head_size", hidden // heads)),
        "ffn": width,
        "vocabulary": usual("vocabulary", 0),
        "gated": gated,
        "causal": usual("causal", not re.search(_OF_BERT, settings.text)),
        "rotary": rotary or latent is not None,
        "dropout": _has_dropout(settings, usual("dropout", not provided)),
        "tied": _is_tied(settings, usual("tied", not provided), fields),
        "latent": latent,
        "window": window,
        "full_period": full_period,
        "chunked": usual("chunked", False),
        "sinks": settings.find("softmax_type") == "learnable" or usual("sinks", False),
        "further": pattern.further or _further(settings, usual("further", 0)),
        "tower": usual("tower", None),
        "numerics": _read_numerics(settings, base, gated, latent is not None, fields),
        **read_mixers(settings, base, pattern, hidden, blocks),
    }
    if latent:
        rest = usual("head_size", 192) - usual("latent", latent).rotary
        shape["head_size"] = (settings.count("qk_head_dim", default=rest) or 0) + latent.rotary
    if experts > 1:
        shape |= _experts(settings, trainer, experts, shape, base)
    if len(settings.faults) > before:  # without which there is no shape
        settings.check()
    return name_shape(settings, shape, ranks)


def _is_tied(settings: Settings, usual: bool, fields: bool) -> bool:
    """Whether embedding and head share their weight."""
    apart = settings.has("untie_embeddings_and_output_weights")
    share = settings.find("share_embeddings_and_output_weights") if fields else None
    return usual and not apart if share is None else bool(share)


def _has_dropout(settings: Settings, usual: bool) -> bool:
    """Whether some of attention or behind it is dropped."""
    stated = [settings.find(name) for name in ("hidden_dropout", "attention_dropout")]
    return any(usual if value is None else bool(value) for value in stated)


def _feed_forward(settings: Settings, hidden: int, usual: bool, fields: bool) -> tuple[bool, int]:
    """Whether a feed-forward is gated, and its width where that is not said."""
    gated = settings.has("swiglu")
    gated = gated or settings.find("activation") in _GATED or usual
    narrow = gated and not (fields or settings.has("use_lf_gate"))  # Yuan's is as wide as others
    width = hidden * 8 // 3 // 64 * 64 if narrow else 4 * hidden
    if multiple := settings.count("multiple_of", default=0):  # FlagScale's
        factor = settings.known("hidden_dim_multiplier")
        width = int(hidden * 8 // 3 * (factor if isinstance(factor, int | float) else 1))
        width = -(-width // multiple) * multiple
    return gated or settings.has("quick_geglu"), width


def _experts(
    settings: Settings, trainer: str, experts: int, shape: dict[str, Any], base: Transformer | None
) -> dict[str, Any]:
    """What of the shape is of experts; nothing where no block has some."""
    first, period = 0, 1
    if not shape["pattern"]:
        first, period = _expert_blocks(settings, trainer, shape["blocks"], base)
    if first >= shape["blocks"]:
        return {}
    usual = {"experts_per_token": 1 if trainer == "deepspeed" else 2, "expert_ffn": shape["ffn"]}
    named = base if base and base.experts else None  # else they are as wide as the feed-forward
    found: dict[str, Any] = {
        field: settings.count(name, default=getattr(named, field) if named else usual.get(field, 0))
        for name, field in EXPERTS.items()
    }
    found |= {"experts": experts, "dense_first": first, "experts_period": period}
    found |= {"groups": 0, "groups_per_token": 0} if found["groups"] == 1 else {}
    pattern = shape["pattern"]
    if "-" not in pattern if pattern else not first and period == 1:  # no block is dense
        found["ffn"] = named.ffn if named else 0
    return found


def _latent(settings: Settings, base: Transformer | None, fields: bool) -> Latent | None:
    """Attention over compressed keys, of so many ranks; None where it is over keys."""
    named = base.latent if base else None
    if not settings.has("multi_latent_attention") and named is None:
        return None
    usual = {name: getattr(named, LATENT[name], pair[fields]) for name, pair in _LATENT.items()}
    if settings.states("q_lora_rank") and settings.value("q_lora_rank") is None:
        usual["q_lora_rank"] = 0
    ranks = {LATENT[name]: settings.count(name, default=usual[name]) or 0 for name in usual}
    return Latent(**ranks)


def _further(settings: Settings, usual: int) -> int:
    """Tokens that are predicted beside the next one; none where the text says so."""
    if settings.states("mtp_num_layers") and not settings.value("mtp_num_layers"):
        return 0
    return settings.count("mtp_num_layers", default=usual) or 0


def _has_groups(settings: Settings, usual: bool) -> bool:
    """Whether queries share keys and values; a fault where a checkpoint says among how many."""
    flagged = settings.has("group_query_attention", "num_key_value_heads")
    of_checkpoint = settings.has("use_checkpoint_args")
    if of_checkpoint and not settings.find("num_query_groups"):
        why = "the checkpoint says it, by --use-checkpoint-args"
        settings.refuse_missing("num_query_groups", why)
    return usual or flagged or of_checkpoint


def look_up_model(said: str) -> Transformer | None:
    """The model of a configuration that lies there, or whose name stands in a text."""
    return (find_transformer(said) if "/" in said else None) or named_transformer(said)


def _find_base(settings: Settings) -> Transformer | None:
    """The model that a text without a shape names: itself, or in what it calls."""
    if settings.form == "script" and settings.value("num_layers") is not None:
        return None
    names = [name for name in map(settings.value, _NAMING) if isinstance(name, str)]
    if settings.form == "program":
        values = [value for value in settings.values.values() if isinstance(value, str)]
        names += [value for value in values if isinstance(value, Called)]
        names += [name for value in values for name in unknown_names(value)] + settings.unread
    for said in names:
        if found := look_up_model(said):
            settings.notes.append(f"the shape of {found.name}, which {said} names")
            return found
    return None


def _expert_blocks(
    settings: Settings, trainer: str, blocks: int, base: Transformer | None
) -> tuple[int, int]:
    """The first block that may have experts, and every how many have some.

    The first is as many as there are where none has; a fault where they are in no such order.
    """
    name, every = ("expert_interval", 2) if trainer == "deepspeed" else ("moe_layer_freq", 1)
    first = settings.find("first_k_dense_replace")  # MindSpeed's
    first = first if isinstance(first, int) and first > 0 else 0
    said = _flags(settings, name, blocks)
    if said is None and base and base.experts and not first:
        return base.dense_first, base.experts_period
    said = every if said is None else said
    # Megatron counts blocks from 0 (core/models/gpt/gpt_layer_specs.py), Megatron-DeepSpeed from 1
    if isinstance(said, int):
        said = [not (i + (trainer == "deepspeed")) % said for i in range(blocks)]
    flags = [flag and i >= first for i, flag in enumerate(said)]
    if True not in flags:
        return blocks, 1
    begin = flags.index(True)
    # pipelines of Megatron-DeepSpeed run blocks of one kind
    for found in ((begin, 1), (0, begin + 1)) if trainer != "deepspeed" else ((0, 1),):
        if flags == [i >= found[0] and not (i + 1) % found[1] for i in range(blocks)]:
            return found
    _refuse_order(settings, name)
    return 0, 1


def _refuse_order(settings: Settings, name: str) -> None:
    what = "blocks of two kinds, neither the first nor every n-th: not planned"
    settings.refuse(f"{settings.show(name)}: {what}", "leave it out", "unsupported-model")


def _flags(settings: Settings, name: str, blocks: int) -> list[bool] | int | None:
    """Which blocks are of a kind: every n-th, or as a list says, `([0]*3+[1]*58)`; a fault else."""
    value = settings.find(name)
    text = str(value).strip("'\"")
    if value is None or text in ("-1", "None"):
        return None
    if "[" in text and _PATTERN.fullmatch(text):
        value = read_settings(f"listed = ({text})").known("listed")
    if isinstance(value, list) and len(value) == blocks:
        return [*map(bool, value)]
    if isinstance(value, int) and value > 0:
        return value
    what = f"{settings.show(name)}: {text[:60]!r} does not say which of {blocks} blocks"
    settings.refuse(what, "give a number", "invalid-value", path=name)
    return None


def _window(settings: Settings, blocks: int, base: Transformer | None) -> tuple[int, int]:
    """Tokens that attention looks at, of which Megatron counts those before; 0 for all.

    And every how many blocks one looks at all (core/transformer/utils.py,
    is_layer_window_attention).
    """
    before, name = settings.find("window_size"), "window_attn_skip_freq"
    if before is None:
        return (base.window, base.full_period) if base else (0, 0)
    found = re.match(r"[\[(]?'?(-1|[0-9]{1,9})'?([ ,\])]|$)", str(before))
    if found is None:
        what = f"{settings.show('window_size')}: {before!r} is not a number of tokens"
        settings.refuse(what, "give a number", "invalid-value", path="window_size")
        return 0, 0
    window, skips = int(found[1]) + 1, _flags(settings, name, blocks)
    if isinstance(skips, list):
        period = skips.index(False) + 1 if False in skips else 0
        if period and skips != [bool((i + 1) % period) for i in range(blocks)]:
            _refuse_order(settings, name)
        skips = period
    return (0, 0) if skips == 1 or not window else (window, skips or 0)


def _read_numerics(
    settings: Settings, base: Transformer | None, gated: bool, latent: bool, fields: bool
) -> Numerics:
    """What no time depends on; what depends on a variable is as if it were not said."""
    named = base.numerics if base else None
    usual = named or structs.replace(usual_numerics(gated), norm="layer", bias="all")
    if fields and named is None and settings.has(*PATTERNS):  # its provider of hybrids
        usual = structs.replace(usual, norm="rms", bias="none")

    def number(name: str, default: float) -> float:
        value = settings.known(name)
        return value if isinstance(value, int | float) and value > 0 else default

    def said(name: str, default: object) -> object:
        value = settings.known(name)
        return default if value is None else value

    norms = {word.lower(): norm for norm, word in NORMS.items()}
    scaled = said("use_rope_scaling", named and bool(usual.rotary_scaling))
    factor = number("rope_scaling_factor", FACTOR)
    scaling = LLAMA3 | {"factor": factor} if scaled else {}
    if latent and (named is None or settings.known("rope_type")):
        scaling = {"rope_type": "yarn"} | {
            word: number(name, usual_scaling)
            for (name, word), usual_scaling in zip(YARN.items(), _YARN[fields], strict=True)
        }
        if settings.known("rope_type") == "rope" or scaling["factor"] == 1:
            scaling = {}
    elif latent:
        scaling = usual.rotary_scaling
    biased = said("add_bias_linear", said("bias", usual.bias == "all"))  # NeMo's is `bias`
    every = not said("disable_bias_linear", not biased)
    queries = said("add_qkv_bias", usual.bias == "queries")
    return structs.replace(
        usual,
        norm=norms.get(str(settings.known("normalization")).lower(), usual.norm),
        epsilon=number("norm_epsilon", usual.epsilon),
        # of latent attention they are those of what is compressed
        query_key_norms=bool(said("qk_layernorm", usual.query_key_norms)) and not latent,
        activation="relu2" if settings.known("squared_relu") else usual.activation,
        bias="all" if every else "queries" if queries else "none",
        rotary_base=number("rotary_base", usual.rotary_base),
        rotary_share=number("rotary_percent", usual.rotary_share),
        rotary_scaling=scaling,
    )


def _noop_blocks(settings: Settings) -> list[int]:
    """The numbers of blocks that do nothing, which MindSpeed's `--noop-layers` lists."""
    return [int(number) for number in re.findall(r"[0-9]+", str(settings.find("noop_layers")))]


def _chunks(settings: Settings, blocks: int, p: int) -> int:
    """Stages on a device, by any of the arguments that say it."""
    found = settings.count("num_virtual_stages_per_pipeline_rank", default=1) or 1
    size = settings.count("num_layers_per_virtual_pipeline_stage", default=0)
    return max(1, (blocks + sum(_ends(settings))) // (p * size)) if size else found


def _ends(settings: Settings) -> tuple[bool, bool]:
    """Whether the embedding counts as a block, and the head."""
    embedding = "embed" in str(settings.find("partition_method")).lower()
    first, last = map(settings.has, _ENDS)
    return first or embedding, last or embedding


def _stages(
    settings: Settings, blocks: int, p: int, v: int, noop: Sequence[int]
) -> list[int] | None:
    """Blocks of every stage where they are not shared out evenly; None where they are."""
    listed = settings.find("num_layer_list")
    first = settings.count("num_layers_in_first_pipeline_stage", default=0)
    last = settings.count("num_layers_in_last_pipeline_stage", default=0)
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
        settings.refuse(what, hint, "unsupported-layout")
        return None
    starts = [0, *itertools.accumulate(counts)]
    return [
        stop - start - sum(start <= number < stop for number in noop)
        for start, stop in itertools.pairwise(starts)
    ]


def read_recomputation(
    settings: Settings, chunks: int, most: int
) -> Recompute | Literal["selective"] | int:
    """What is made again, in stages of `most` blocks."""
    how, method = settings.find("recompute_granularity"), settings.find("recompute_method")
    number = settings.number("recompute_num_layers", least=0)
    number = 1 if number is None else number
    unsaid = settings.unread and not settings.states("recompute_granularity")
    if unsaid and settings.has("recompute_modules"):  # a function that is not read says how
        how = "selective"
    if settings.has("recompute_activations") or how == "selective":
        return "selective"
    # the only one of 2021, whose arguments had no granularity
    alone = settings.form == "script" and settings.has("activations_checkpoint_method")
    if how != "full" and not (alone or settings.has("checkpoint_activations")):
        return "never"
    if method == "block":
        if number == 0:
            return "never"
        if settings.has("enable_recompute_layers_per_pp_rank"):
            number = max(1, number // chunks)
        return number if number < most else "always"
    if number > 1:
        settings.note("recompute_num_layers", "blocks are counted as recomputed one by one")
    return "always"


def _modules(settings: Settings) -> str | None:
    """What of a block is made again by name; None for attention's scores, Megatron's default."""
    names = settings.words("recompute_modules")
    if unknown := [name for name in names if name not in MODULES]:
        what = f"{', '.join(unknown)} is not counted as made again"
        settings.note("recompute_modules", what)
    return "+".join(name for name in names if name in MODULES) or None


def _offload(settings: Settings) -> str:
    """The modules that save in the host's memory, joined by +."""
    if not settings.has("fine_grained_activation_offloading"):
        return ""
    names = {*settings.words("offload_modules")}
    if unknown := names - {*OFFLOADED, FUSED_EXPERTS}:
        what = f"{', '.join(sorted(unknown))} is not counted as offloaded"
        settings.note("offload_modules", what)
    names |= TOGETHER if FUSED_EXPERTS in names else set()
    return "+".join(name for name in OFFLOADED if name in names)


def _shard(settings: Settings, trainer: str) -> Shard:
    if trainer == "deepspeed":
        stage = settings.find(*_ZERO)
        if stage not in (None, 0, 1):
            what = "plans are for DeepSpeed's pipelines, of stages 0 and 1 alone"
            settings.refuse(f"ZeRO stage {stage}: {what}", "give stage 1", "unsupported-layout")
        # of bfloat16 in stage 0 replicas share the float32 state (runtime/bf16_optimizer.py)
        return "optimizer" if stage == 1 or settings.has("bf16.enabled", "bf16") else "none"
    said = settings.value("use_distributed_optimizer") is not None
    shared = settings.has("use_distributed_optimizer") if said else None
    if settings.has("use_megatron_fsdp"):  # which has it by itself
        usual = STRATEGIES["none" if trainer == "megatron-bridge" else "parameters"]
        stated = settings.find("data_parallel_sharding_strategy") or usual
        found = [shard for shard, strategy in STRATEGIES.items() if strategy == stated]
        if not found:
            flag = settings.show("data_parallel_sharding_strategy")
            what, hint = f"{flag}: unknown {stated}", f"choose {', '.join(STRATEGIES.values())}"
            settings.refuse(what, hint, "invalid-value")
        return found[0] if found else "none"
    shared = shared or settings.known("optimizer") == "dist_muon" or shared
    if shared is None and trainer == "megatron-bridge":
        shared = settings.find("optim.name") in (None, *_DISTRIBUTED)
    return "optimizer" if shared else "none"


def _note_fsdp(settings: Settings) -> Iterator[str]:
    """What of FSDP is not counted as it is written."""
    exchanged = settings.find("megatron_fsdp_grad_comm_dtype") or "auto"
    if exchanged not in ("auto", settings.find(MAIN_GRADIENTS)):
        flag = settings.show("megatron_fsdp_grad_comm_dtype")
        yield f"{flag}: gradients are counted as exchanged in the format in which they are kept"
    if not settings.has("fsdp_double_buffer", "use_nccl_ub", "nccl_ub"):
        yield f"two blocks have buffers, as with {settings.show('fsdp_double_buffer')}"
    if not turns_off(settings, "no_gradient_accumulation_fusion"):
        yield "gradients are counted as copied, as without gradient accumulation fusion"


def _format(settings: Settings) -> Format:
    names = ["mixed_precision", "plugins", "precision"]
    if settings.find("fp8") is not False:  # NeMo's, beside which the others say nothing
        names += ["fp4_format", "fp8_recipe", "fp8_format", "fp8_hybrid", "fp8_e4m3"]
    words = list[str]()
    for name in filter(settings.has, names):
        word = settings.find(name)
        if isinstance(word, Called):  # precision("fp8")
            word = f"{word} {settings.known(f'{name}.{word}')}"
        words.append(f"{name} {word}".lower() if word is True else str(word).lower())
    if settings.has("fp4_format"):  # of which there is one recipe
        return "nvfp4"
    for form, recipes in _FORMATS.items():
        for word in words:
            if any(recipe in re.sub(r"bf(loat)?16", "", word) for recipe in recipes):
                return form
    if settings.has("fp16.enabled", "fp16"):
        return "float16"
    stated = settings.has("bf16.enabled", "bf16") or words
    if {*words} & {*_UNPLANNED} or (not stated and settings.form == "script"):
        said = f"{settings.show('precision')} {words[0]}" if words else "neither --bf16 nor --fp16"
        what = f"{said}: it trains in float32, which is not planned"
        settings.refuse(what, "plan it in another format: `dtype=bfloat16`", "unsupported-dtype")
    return "bfloat16"


def _graphs(settings: Settings, experts: bool) -> str:
    """What graphs of CUDA hold of a block."""
    impl, name = settings.find("cuda_graph_impl"), "cuda_graph_scope"
    scope = {*settings.words(name)}
    on = impl not in (None, "none") or settings.has("enable_cuda_graph", "external_cuda_graph")
    if impl == "full_iteration" or "full_iteration" in scope:
        return "full"
    if not on:
        return "none"
    if not scope or "full" in scope or scope >= {"attn", "moe" if experts else "mlp"}:
        return "full"
    router = scope & {"moe", "moe_router"}
    if experts and "attn" in scope and not router:
        settings.note(name, "graphs of attention are counted with the router's")
    return "attention" if "attn" in scope else "router" if router else "none"


def _state_bytes(settings: Settings) -> float:
    """Bytes of an optimizer's state for a parameter: a copy and two moments, in their formats."""
    if not settings.has("use_precision_aware_optimizer") or settings.has(OFFLOAD[0]):
        return STATE
    main = (MAIN_PARAMETERS,) if settings.has("use_megatron_fsdp") else ()
    said = [settings.find(*main * (name == "main_params_dtype"), name) for name in STATES[6.0]]
    narrow = [re.search(r"8|16", str(word or "")) for word in said]
    return sum(int(width[0]) / 8 if width else 4.0 for width in narrow)


def _read_offload(settings: Settings, fields: bool) -> float:
    """The share of an optimizer's state that is in the host's memory."""
    if not settings.has(OFFLOAD[0]):
        return 0.0
    said = settings.find(OFFLOAD[1])
    share = said if isinstance(said, int | float) else float(not fields)
    if not settings.has("use_precision_aware_optimizer"):
        flag = settings.show("use_precision_aware_optimizer")
        settings.notes.append(
            f"without {flag} a copy stays on the device: it is counted as on the host"
        )
    return round(min(1.0, max(0.0, share)), 2)


def _facts_of_deepspeed(settings: Settings) -> dict[str, object]:
    flash = settings.has("use_flash_attn", "use_flash_attn_v1", *_FLASH)
    stated = {
        ("attention", "flash" if flash else "scores"): True,
        ("ends", "blocks"): _ends(settings)[0],
        ("gradients", "float32"): settings.has("bf16.enabled", "bf16") and not settings.has(*_ZERO),
    }
    return {name: value for (name, value), holds in stated.items() if holds}


def _has_narrow_gradients(settings: Settings, fields: bool, flat: bool) -> bool:
    """Whether gradients are kept and reduced in the format of parameters."""
    wide = settings.has("accumulate_allreduce_grads_in_fp32")  # which --bf16 has by itself
    said = [  # all of which are asked for, so that none is noted as not read
        turns_off(settings, "grad_reduce_in_bf16"),
        settings.find("main_grads_dtype") in ("bf16", "fp16", "bfloat16"),
        not fields and settings.has("fp16") and not wide,
    ]
    return not re.search("32", str(settings.find(MAIN_GRADIENTS))) if flat else any(said)


def _exchange(settings: Settings) -> str:
    """How tokens go to their experts: by copies of a backend, or in one exchange of all."""
    backend = settings.find("moe_flex_dispatcher_backend")
    copies = settings.has("moe_enable_deepep")
    copies = copies or settings.find("moe_token_dispatcher_type") == "flex"
    if not copies and not settings.has("flex_dispatcher_backend"):  # Bridge's function applies it
        return "alltoall"
    return "hybridep" if backend == "hybridep" else "deepep"


def _read_adapters(settings: Settings, trainer: str) -> dict[str, object]:
    """Facts of adapters, as Bridge has them (peft/lora.py); other such trainings are refused."""
    kinds = "peft", "peft_scheme", "tuner_type", "train_type"
    kind = next((name for name in kinds if settings.has(name)), None)
    said = str(settings.find(kind)).lower() if kind else "none"
    if kind is None or said in ("none", "full"):
        return {}
    if trainer not in ADAPTING or said != "lora":
        hint = "`partopt plan --for megatron-bridge --with lora=16` counts adapters"
        what = f"{settings.show(kind)}: training of few weights, as LoRA: not planned"
        settings.refuse(what, hint, "unsupported-model")
        return {}
    rank, found = settings.count("dim", default=32), settings.find("target_modules")
    targets = found if isinstance(found, list) else []
    names = [name for name in ADAPTED if not targets or f"linear_{name}" in targets]
    if others := {*targets} - {f"linear_{name}" for name in ADAPTED}:
        what = f"{settings.show('target_modules')}: {', '.join(map(str, others))}: not planned"
        settings.refuse(what, f"linear_{', linear_'.join(ADAPTED)} are", "unsupported-model")
    dropout = settings.find("dropout")
    return {
        "lora": rank,
        **({} if names == [*ADAPTED] else {"lora-targets": "+".join(names)}),
        **({"lora-dropout": "yes"} if dropout else {}),
    }


def _facts(
    settings: Settings, layout: Layout, trainer: str, model: Transformer
) -> dict[str, object]:
    """Facts of the trainer that are not its defaults."""
    if trainer == "deepspeed":
        return _facts_of_deepspeed(settings)
    on, fields, flat = settings.has, trainer == "megatron-bridge", layout.shares_gradients
    t, p = layout.tp or 1, layout.pp or 1
    settings.notes += _note_fsdp(settings) if flat else ()
    if settings.find("moe_expert_capacity_factor") not in (None, 1):
        settings.note(
            "moe_expert_capacity_factor", "tokens are counted to be spread evenly over experts"
        )
    overlaps = on("overlap_grad_reduce", default=fields) or flat
    fused = on("cross_entropy_loss_fusion", default=fields)
    padded = on("moe_pad_expert_input_to_capacity") and settings.has("moe_expert_capacity_factor")
    graphs, exchange = _graphs(settings, bool(model.experts)), _exchange(settings)
    optimizer, share = settings.find("optimizer"), _read_offload(settings, fields)
    offload, state = _offload(settings), _state_bytes(settings)
    bucket = settings.count("ddp_bucket_size", default=0) or 0
    ends = "blocks" if all(_ends(settings)) else "stage"
    stated = {
        ("loss", "fused" if fused else "plain"): fused != fields,
        ("graphs", graphs): graphs != "none",
        ("routing", "balanced"): on("moe_router_force_load_balancing"),
        ("routing", "capacity"): padded,
        ("fused-experts", "yes"): bool(model.experts) and on("use_transformer_engine_op_fuser"),
        ("fp8-parameters", "yes"): settings.has("fp8_param_gather") and not flat,
        ("fsdp", "yes"): flat,
        ("muon", "yes"): isinstance(optimizer, str) and "muon" in optimizer,
        ("offload", offload): bool(offload),
        ("optimizer_bytes", state): state != STATE,
        ("optimizer-offload", f"{share:g}"): share > 0,
        ("offload-overlap", "yes"): share > 0 and on(OFFLOAD[2]),
        ("tp-overlap", "yes"): on("tp_comm_overlap") and t > 1,
        ("exchange-overlap", "yes"): on("overlap_moe_expert_parallel_comm"),
        ("exchange", exchange): exchange != "alltoall",
        ("sequence-parallel", "no"): t > 1 and not settings.find("sequence_parallel"),
        ("allreduce", "blocking"): not overlaps,
        ("gradients", "parameters"): _has_narrow_gradients(settings, fields, flat),
        ("waits", "1f1b,interleaved"): turns_off(settings, "no_overlap_p2p_communication"),
        ("ends", ends): p > 1,
        ("bucket", bucket * BUCKET_ITEM): bucket > 0,
    }
    found = {name: value for (name, value), holds in stated.items() if holds}
    return found | _read_adapters(settings, trainer)
