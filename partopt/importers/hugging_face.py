"""A transformer from its configuration: Hugging Face's config.json, or one of `models/`.

Both have the same form; those of `models/` say their source beside. What a `Transformer` cannot say
is refused by name: other linear attention, an encoder, kinds of blocks in no period.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import structs

from partopt import documents
from partopt.documents.files import PathLike, find_shipped, shipped_names
from partopt.documents.transformer import (
    OTHER_PARTS,
    Indexer,
    Latent,
    Numerics,
    Recurrence,
    Tower,
    Transformer,
)
from partopt.errors import PartoptError
from partopt.importers.towers import read_tower

_Part = TypeVar("_Part", Latent, Recurrence, Indexer)
_BEGIN = 100_000  # bytes of a file in which a configuration says its model_type
_NAMES = {  # of what is read, as most configurations call it
    "blocks": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
}


@dataclass(frozen=True)
class _Kind:
    """What a `model_type` says without saying it; `dropout` names what says whether it has one."""

    gated: bool = True
    rotary: bool = True
    tied: bool = False
    causal: bool = True
    dropout: str = ""
    experts: str = ""  # their number; all are `width` wide
    width: str = "moe_intermediate_size"
    taken: str = "num_experts_per_tok"
    shared: str = "shared_expert_intermediate_size"  # the width of what all tokens take
    dense: str = "intermediate_size"  # the width of blocks without experts
    dense_first: str = ""  # how many blocks have none at first
    period: str = "decoder_sparse_step"  # every so many blocks have experts
    window: str = "sliding_window"
    full_period: int = 0  # of blocks that see all, where layer_types does not say it
    sinks: bool = False
    further: str = ""
    recurrence: Literal["", "states", "delta"] = ""
    names: Mapping[str, str] = field(default_factory=dict)


_GPT2 = {"blocks": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner"}
_DEEPSEEK = _Kind(
    experts="n_routed_experts",
    shared="n_shared_experts",
    dense_first="first_k_dense_replace",
    period="moe_layer_freq",
    further="num_nextn_predict_layers",
)
_DELTA = _Kind(recurrence="delta", further="mtp_num_hidden_layers")
# the text of a model of several parts, and whose kind it is where it has another name
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_TEXTS = {
    "llama4": "llama4_text",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), "qwen3_moe"),
    **{f"qwen3_5{kind}_text": f"qwen3_5{kind}" for kind in ("", "_moe")},
}
# names of models whose text has the shape of another, trained further
_ALIASES = {
    r"internvl3[._]5-(?=[0-9])": "qwen3-",
    r"qwen2-(?=(vl-)?[0-9.]+b)": "qwen2.5-",
    r"(?<=[0-9])-(vl-)?(omni|embedding|reranker|math|coder)(?=-)": "",
}
_LATENT = {
    "queries": "q_lora_rank",
    "keys": "kv_lora_rank",
    "rotary": "qk_rope_head_dim",
    "values": "v_head_dim",
}
_DELTAS = {
    "heads": "linear_num_value_heads",
    "head_size": "linear_value_head_dim",
    "groups": "linear_num_key_heads",
    "keys": "linear_key_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
_STATES = {
    "heads": "mamba_num_heads",
    "head_size": "mamba_head_dim",
    "groups": "n_groups",
    "keys": "ssm_state_size",
    "kernel": "conv_kernel",
    "chunk": "chunk_size",
}
_RECURRENCES = {"delta": _DELTAS, "states": _STATES}
_DELTA_CHUNK = 64  # as kernels have it (fla/ops/gated_delta_rule of flash-linear-attention)
_INDEXER = {
    "heads": "index_n_heads",
    "head_size": "index_head_dim",
    "taken": "index_topk",
    "period": "index_topk_freq",
    "first": "index_skip_topk_offset",
}
# what a pattern's letters are called in newer configurations
_HALVES = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
_PATTERNS = {
    "pattern": ("hybrid_override_pattern", "layers_block_type"),
    "further_pattern": ("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
}
_KINDS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2"), _Kind()),
    "mimo": _Kind(further="num_nextn_predict_layers"),
    "gemma": _Kind(tied=True),
    **dict.fromkeys(
        ("mixtral", "minimax_m2", "granitemoe"),
        _Kind(experts="num_local_experts", width="intermediate_size"),
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _Kind(experts="num_experts")),
    "qwen3_5": _DELTA,
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), replace(_DELTA, experts="num_experts")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"), _DEEPSEEK),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _DEEPSEEK),
    "nemotron_h": _Kind(
        gated=False,
        rotary=False,
        experts="n_routed_experts",
        shared="moe_shared_expert_intermediate_size",
        further="num_nextn_predict_layers",
        recurrence="states",
    ),
    "gpt_oss": _Kind(
        experts="num_local_experts", width="intermediate_size", full_period=2, sinks=True
    ),
    "llama4_text": _Kind(
        experts="num_local_experts",
        width="intermediate_size",
        shared="intermediate_size",
        dense="intermediate_size_mlp",
        period="interleave_moe_layer_step",
        window="attention_chunk_size",
        full_period=4,
    ),
    "gpt2": _Kind(gated=False, rotary=False, tied=True, dropout="resid_pdrop", names=_GPT2),
    "gpt_neox": _Kind(gated=False),
    "nemotron": _Kind(gated=False),
    "starcoder2": _Kind(gated=False, tied=True),
    **dict.fromkeys(
        ("bert", "roberta"),
        _Kind(gated=False, rotary=False, tied=True, causal=False, dropout="hidden_dropout_prob"),
    ),
}
_LAYERS = Numerics(norm="layer", epsilon=1e-5, activation="gelu", bias="all")
# what no time depends on, as configurations in transformers have it by default
_NUMERICS = {
    **dict.fromkeys(("llama", "mistral"), Numerics(epsilon=1e-6)),
    "phi3": Numerics(epsilon=1e-5),
    "granite": Numerics(epsilon=1e-6, besides="granite's multipliers"),
    "olmo2": Numerics(epsilon=1e-5, query_key_norms=True, besides="olmo2's norms behind"),
    "gemma": Numerics(epsilon=1e-6, activation="gelu", besides="gemma's scaled embedding"),
    "mixtral": Numerics(epsilon=1e-5, rotary_base=1e6),
    **dict.fromkeys(("qwen2", "qwen2_moe", "mimo"), Numerics(epsilon=1e-6, bias="queries")),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Numerics(epsilon=1e-6, query_key_norms=True)),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        Numerics(epsilon=1e-6, besides="deepseek's router"),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        Numerics(
            epsilon=1e-6, query_key_norms=True, rotary_share=0.25, besides="qwen3_next's 1 + weight"
        ),
    ),
    "deepseek_v32": Numerics(epsilon=1e-6, besides="deepseek's router"),
    "glm_moe_dsa": Numerics(epsilon=1e-5, besides="deepseek's router"),
    "nemotron_h": Numerics(epsilon=1e-5, activation="relu2", besides="deepseek's router"),
    "glm4_moe": Numerics(epsilon=1e-5, rotary_share=0.5, besides="deepseek's router"),
    "minimax_m2": Numerics(epsilon=1e-6, rotary_base=5e6, rotary_share=0.5, query_key_norms=True),
    "granitemoe": Numerics(epsilon=1e-6, besides="granite's multipliers"),
    "gpt_oss": Numerics(
        epsilon=1e-5, rotary_base=150_000, bias="all", besides="gpt_oss' clamped experts"
    ),
    "llama4_text": Numerics(
        epsilon=1e-5, rotary_base=500_000, besides="llama4's norms without weights"
    ),
    **dict.fromkeys(("gpt2", "starcoder2"), _LAYERS),
    "gpt_neox": structs.replace(_LAYERS, rotary_share=0.25, besides="gpt_neox's two residuals"),
    "nemotron": structs.replace(
        _LAYERS, activation="relu2", bias="none", rotary_share=0.5, besides="nemotron's 1 + weight"
    ),
    **dict.fromkeys(
        ("bert", "roberta"), structs.replace(_LAYERS, epsilon=1e-12, besides="bert's norms behind")
    ),
}
_USUAL = {  # and how they call it
    "epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_share": "partial_rotary_factor",
    "activation": "hidden_act",
    "bias": "attention_bias",
}
_WORDS = {
    "gpt2": {"epsilon": "layer_norm_epsilon", "activation": "activation_function"},
    "gpt_neox": {
        "epsilon": "layer_norm_eps",
        "rotary_base": "rotary_emb_base",
        "rotary_share": "rotary_pct",
    },
    "nemotron": {"epsilon": "norm_eps"},
    "nemotron_h": {"epsilon": "layer_norm_epsilon", "activation": "mlp_hidden_act"},
    "glm4_moe": {"query_key_norms": "use_qk_norm"},
    "starcoder2": {"epsilon": "norm_epsilon", "bias": "use_bias"},
    "bert": {"epsilon": "layer_norm_eps"},
    "roberta": {"epsilon": "layer_norm_eps"},
}
_HINT = "it plans blocks of attention, gated delta or state spaces, and a feed-forward or experts"
# what makes a model one of other blocks, by the fields that say so
_OTHERS = {
    "linear_attn_config": "blocks of other linear attention",
    "mamba_d_state": "blocks of other state spaces",
    "is_encoder_decoder": "an encoder and a decoder",
}
# the same of models that do not have them
_OF_KINDS = {
    **dict.fromkeys(_INDEXER.values(), "sparse attention, over keys that an indexer takes"),
    **dict.fromkeys(_DELTAS.values(), "blocks of linear attention"),
    "full_attention_interval": "blocks of linear attention",
    **dict.fromkeys(("hybrid_override_pattern", "mamba_num_heads"), "blocks of state spaces"),
}
_INDEXED = ("deepseek_v32", "glm_moe_dsa")


def find_transformer(given: PathLike) -> Transformer | None:
    """The transformer of a configuration, as `load_transformer`; None where `given` is none."""
    return load_transformer(given) if _is_configuration(given) else None


def _is_configuration(given: PathLike) -> bool:
    """Files and shipped profiles come before names of `models/`."""
    if os.path.isdir(given):  # noqa: PTH112
        return (Path(given) / "config.json").exists()
    if os.path.exists(given):  # noqa: PTH110 (unlike Path.exists it never raises)
        with suppress(OSError), Path(given).open("rb") as file:
            begin = file.read(_BEGIN)
            return b'"model_type"' in begin and b'"schema"' not in begin
        return False
    return given in shipped_names("models") and given not in shipped_names("profiles")


def load_transformer(given: PathLike) -> Transformer:
    """The transformer of a configuration: a file, its folder, `-`, or a name in `models/`.

    Raises PartoptError with all that is missing or wrong, and for what is not such a model.
    """
    path = Path(given) / "config.json" if os.path.isdir(given) else given  # noqa: PTH112
    found = find_shipped(path, "models")
    stem = Path(found).stem
    name = Path(found).resolve().parent.name if stem == "config" else stem
    return read_transformer(documents.read_bytes(found), found, name)


def read_transformer(content: bytes, where: str, name: str) -> Transformer:
    """The transformer `name` of a configuration in JSON, which `where` names in errors."""
    try:
        raw = json.loads(content)  # which takes Infinity, as Python writes it
    except (ValueError, RecursionError) as error:
        what = f"{where}: not JSON: {error}"
        raise PartoptError(what, "a config.json is expected", code="malformed-document") from None
    raw = _find_text(raw) if isinstance(raw, dict) else {}
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise PartoptError(
            f"{where}: has no model_type: not the configuration of a model",
            "give a config.json as Hugging Face has it",
            code="unknown-document",
        )
    documents.refuse(_other_blocks(raw), where)
    if kind not in _KINDS:
        raise PartoptError(
            f"{where}: model_type: {kind} is not known",
            f"{_HINT}: a model of just such blocks is read as one of {', '.join(_KINDS)}",
            code="unsupported-model",
        )
    made = _Reader(raw, _KINDS[kind]).read(name)
    documents.refuse(made.faults(), where)
    return made


def _find_text(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is a language model, which alone is planned."""
    kept = "model_type", "tie_word_embeddings", "vision_config", "of_pictures"
    while inside := next((raw[name] for name in _TEXT if isinstance(raw.get(name), dict)), None):
        above = {"of_pictures": raw} | {name: raw[name] for name in kept if name in raw}
        raw = above | inside | {"besides": OTHER_PARTS}
    if isinstance(kind := raw.get("model_type"), str) and kind in _TEXTS:
        raw = raw | {"model_type": _TEXTS[kind], "besides": OTHER_PARTS}
    return raw


def named_transformer(text: str) -> Transformer | None:
    """The model in `models/` whose name stands in a text, as `meta-llama/Meta-Llama-3.1-8B`.

    Separators, case and the minor version of Llama 3 do not matter, nor what NeMo has inside,
    `Llama31Config8B`; the longest name counts. What is published as `Llama-3-8B` is without the
    scaled positions of 3.1.
    """
    said = text.lower()
    for alias, name in _ALIASES.items():
        said = re.sub(alias, name, said)
    said = re.sub(r"(moe)?(config|modelprovider)[-_]?(?=[0-9])", "-", said)
    said = re.sub(
        r"(llama[-_ ]?3)[._]?[123](?=[-_])", r"\1", re.sub(r"gpt-(?=[0-9.]+b)", "gpt3-", said)
    )
    found = [name for name in shipped_names("models") if re.search(_pattern(name), said)]
    model = load_transformer(max(found, key=len)) if found else None
    if model and model.numerics and "llama-3-" in text.lower():
        unscaled = structs.replace(model.numerics, rotary_scaling={})
        return structs.replace(model, numerics=unscaled)
    return model


def _pattern(name: str) -> str:
    """A regular expression of a name, `qwen3-0.6b` as `Qwen3_0_6B`."""
    joined = {"-": "[-_ ]", ".": "[._p]"}
    runs = re.findall(r"[a-z]+|[0-9]+|[-.]", name)
    # another minor version is another model
    return "[-_ ]?".join(joined.get(run, run) for run in runs) + r"(?![a-z0-9]|\.[0-9])"


def like_shipped(model: Transformer) -> Transformer | None:
    """The model with the name of one in `models/` of the same shape.

    What no time depends on stays the model's.
    """
    return next(iter(alike_shipped(model)), None)


def alike_shipped(model: Transformer, *ignored: str) -> list[Transformer]:
    """The models with the name of one in `models/` of the same shape, and its fields `ignored`.

    Of several that these are the same of, as the text of a model of pictures, the first counts.
    """
    found = dict[tuple[object, ...], Transformer]()
    for shipped in map(load_transformer, shipped_names("models")):
        same = {field: getattr(shipped, field) for field in ("name", *ignored)}
        if structs.replace(model, **same, numerics=shipped.numerics) == shipped:
            fields = tuple(getattr(shipped, field) for field in ignored)
            found.setdefault(fields, structs.replace(shipped, numerics=model.numerics))
    return [*found.values()]


def write_config(model: Transformer) -> dict[str, object]:
    """The configuration that `read_transformer` reads as the model, but for its name.

    Raises PartoptError where no `model_type` that is known is such a model.
    """
    for name, kind in _KINDS.items():
        names = {**_NAMES, **kind.names}
        raw: dict[str, object] = {"model_type": name}
        raw |= {names[field]: getattr(model, field) for field in names}
        raw |= {
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "tie_word_embeddings": model.tied,
        }
        raw |= {kind.window: model.window} if model.window else {}
        if model.window and model.full_period:
            word = "chunked" if model.chunked else "sliding"
            whole = (not (i + 1) % model.full_period for i in range(model.blocks))
            raw["layer_types"] = [f"{'full' if every else word}_attention" for every in whole]
        raw |= {kind.dropout: 0.1 * model.dropout} if kind.dropout else {}
        raw |= _write_experts(model, kind) if kind.experts else {}
        raw |= _write_mixers(model)
        if latent := model.latent:
            raw |= {word: getattr(latent, field) for field, word in _LATENT.items()}
            raw["qk_nope_head_dim"] = model.head_size - latent.rotary
        raw |= {kind.further: model.further} if kind.further else {}
        raw |= {"tower": structs.asdict(model.tower)} if model.tower else {}
        raw |= _write_numerics(model, name)
        if model.numerics and OTHER_PARTS in model.numerics.besides:
            raw["besides"] = OTHER_PARTS
        with suppress(PartoptError):
            read = read_transformer(msgspec.json.encode(raw), name, model.name)
            if structs.replace(read, numerics=model.numerics and read.numerics) == model:
                return raw
    raise PartoptError(
        f"{model.name}: no configuration in the form of Hugging Face's has its blocks",
        "gated and plain feed-forwards, positions and experts go together as in models that exist",
        code="unsupported-model",
    )


def _write_mixers(model: Transformer) -> dict[str, object]:
    """What mixes tokens beside attention, and the pattern of blocks."""
    raw: dict[str, object] = {}
    if state := model.recurrence:
        raw |= {word: getattr(state, name) for name, word in _RECURRENCES[state.rule].items()}
        raw |= {"attn_output_gate": model.output_gated}
        raw |= {} if model.pattern else {"full_attention_interval": model.full_period}
    if indexer := model.indexer:
        raw |= {word: getattr(indexer, name) for name, word in _INDEXER.items()}
    written = {words[0]: getattr(model, name) for name, words in _PATTERNS.items()}
    return raw | {word: letters for word, letters in written.items() if letters}


def _write_experts(model: Transformer, kind: _Kind) -> dict[str, object]:
    """Experts in the words of a `model_type`."""
    shared, several = model.shared_ffn, kind.shared == "n_shared_experts"
    raw: dict[str, object] = {
        kind.experts: model.experts,
        kind.taken: model.experts_per_token,
        kind.dense: model.ffn,
        kind.period: model.experts_period,
        kind.dense_first or "mlp_only_layers": model.dense_first,
        "n_group": model.groups,
        "topk_group": model.groups_per_token,
    }
    if not kind.dense_first:
        raw["mlp_only_layers"] = [*range(model.dense_first)]
    raw |= {kind.shared: shared // max(1, model.expert_ffn) if several else shared}
    raw |= {"moe_latent_size": model.expert_hidden} if model.expert_hidden else {}
    return raw | {kind.width: model.expert_ffn}


def _write_numerics(model: Transformer, kind: str) -> dict[str, object]:
    """What no time depends on, as far as a `model_type` has words for it."""
    numerics, usual, words = model.numerics, _NUMERICS[kind], _USUAL | _WORDS.get(kind, {})
    if numerics is None:
        return {}
    raw: dict[str, object] = {words["epsilon"]: numerics.epsilon}
    raw |= {words["rotary_base"]: numerics.rotary_base} if model.rotary else {}
    raw |= {"rope_scaling": numerics.rotary_scaling} if numerics.rotary_scaling else {}
    for name in ("rotary_share", "activation", "query_key_norms"):
        if name in words and getattr(numerics, name) != getattr(usual, name):
            raw[words[name]] = getattr(numerics, name)
    if numerics.bias != usual.bias:
        raw |= {words["bias"]: numerics.bias != "none", "mlp_bias": numerics.bias == "all"}
    return raw


def _other_blocks(raw: dict[str, Any]) -> Iterator[PartoptError]:
    """What makes a model one of other blocks than partopt knows."""
    found = {path: what for path, what in _OTHERS.items() if raw.get(path)}
    kind = str(raw.get("model_type"))
    known = _KINDS.get(kind, _Kind()).recurrence or kind in _INDEXED
    found |= {path: what for path, what in _OF_KINDS.items() if raw.get(path) and not known}
    kinds = raw.get("attn_type_list")
    if isinstance(kinds, list) and any(kind != 1 for kind in kinds):
        found["attn_type_list"] = "blocks of linear attention"
    for path, what in found.items():
        yield PartoptError(f"{path}: {what}", _HINT, code="unsupported-model")


class _Reader:
    """Reads the fields of a configuration, and notes what is missing."""

    def __init__(self, raw: dict[str, Any], kind: _Kind) -> None:
        self.raw, self.kind, self.faults = raw, kind, list[PartoptError]()

    def read(self, name: str) -> Transformer:
        """The transformer, of which only types have been checked."""
        raw, kind = self.raw, self.kind
        names = {**_NAMES, **kind.names}
        patterns = self._patterns() if kind.recurrence == "states" else {}
        if patterns:  # beside which newer ones do not say it
            raw = self.raw = {names["blocks"]: len(patterns["pattern"])} | raw
        size = {key: self._count(names[key]) for key in names if key != "ffn"}
        heads, head_size = size["heads"], size["hidden"] // max(1, size["heads"])
        head_size = self._count("head_dim", self._count("attention_head_dim", head_size))
        latent = None
        if raw.get("kv_lora_rank"):
            latent = self._read_part(Latent, _LATENT, dict.fromkeys(_LATENT, 0))
            head_size = self._count("qk_nope_head_dim") + (latent.rotary if latent else 0)
        has_experts = kind.experts and "E" in patterns.get("pattern", "E")
        experts = self._experts(size["blocks"]) if has_experts else {}
        ffn = 0
        periodic = not experts or experts["dense_first"] or experts["experts_period"] > 1
        if "-" in patterns["pattern"] if patterns else periodic:
            dense = kind.dense if kind.experts else names["ffn"]
            ffn = self._count(dense, 0 if kind.gated else 4 * size["hidden"])
        dropout = raw.get(kind.dropout, 0.1) if kind.dropout else 0.0
        windowed = raw.get("use_sliding_window", True)
        window = self._count(kind.window, 0) if windowed and not kind.recurrence else 0
        values: dict[str, Any] = {
            **size,
            **experts,
            **self._mixers(size["blocks"], patterns),
            "kv_heads": self._count("num_key_value_heads", heads),
            "head_size": head_size,
            "latent": latent,
            "tied": raw.get("tie_word_embeddings", kind.tied) is True,
            "dropout": dropout != 0,
            "window": window,
            "chunked": bool(window) and kind.window == "attention_chunk_size",
            "full_period": self._full_period(size["blocks"], window),
            "sinks": kind.sinks,
            "further": self._count(kind.further, 0) if kind.further else 0,
            "tower": self._tower(size["hidden"]),
            "numerics": self._numerics(),
        }
        documents.refuse(self.faults, name)
        return Transformer(
            name=name,
            ffn=ffn,
            gated=kind.gated,
            rotary=kind.rotary,
            causal=kind.causal,
            **values,
        )

    def _tower(self, hidden: int) -> Tower | None:
        """What reads pictures, where it is of a kind that is known."""
        raw, said = self.raw, self.raw.get("vision_config")
        try:
            if "tower" in raw:
                return msgspec.convert(raw["tower"], Tower)
            whole = raw.get("of_pictures", raw)
            return read_tower(said, whole, hidden) if isinstance(said, dict) else None
        except (ArithmeticError, TypeError, ValueError, msgspec.ValidationError) as error:
            hint = "leave it out: the text is planned alone then"
            self.faults.append(PartoptError(f"vision_config: {error}", hint, code="invalid-value"))
            return None

    def _patterns(self) -> dict[str, str]:
        """The letters of blocks that are half of others, and of those of further tokens."""
        found = dict[str, str]()
        for name, (letters, list_name) in _PATTERNS.items():
            said, listed = self.raw.get(letters), self.raw.get(list_name)
            if not isinstance(said, str):
                words = listed if isinstance(listed, list) else []
                said = "".join(_HALVES.get(str(word), "?") for word in words)
            if "further" in name and not self.raw.get(self.kind.further):
                said = ""
            if others := sorted({*said} - {*_HALVES.values()}):
                self._refuse(letters, f"blocks of other kinds: {', '.join(others)}")
            elif not said and name == "pattern":
                self._refuse(letters, "missing, and layers_block_type, too")
            found[name] = said if not others else ""
        return found

    def _mixers(self, blocks: int, patterns: dict[str, str]) -> dict[str, Any]:
        """What mixes tokens beside attention, and how the others attend."""
        raw, rule, found = self.raw, self.kind.recurrence, dict[str, Any]()
        if words := _RECURRENCES.get(rule):
            usual = {"kernel": 4, "chunk": 128}
            found["recurrence"] = self._read_part(
                Recurrence, words, usual, rule=rule, chunk=_DELTA_CHUNK
            )
        if rule == "delta":
            found["output_gated"] = raw.get("attn_output_gate", True) is True
        if raw["model_type"] in _INDEXED and raw.get("index_topk"):
            indexer = self._read_part(Indexer, _INDEXER, {"period": 1, "first": 0})
            if indexer and indexer.period > 1:  # the first block has one in any case
                indexer = structs.replace(indexer, first=max(1, indexer.first))
            places = range(blocks) if indexer else ()
            there = ["full" if indexer and indexer.is_in(i) else "shared" for i in places]
            if raw.get("indexer_types", there) != there:
                self._refuse("indexer_types", "blocks with an indexer are in no period")
            found["indexer"] = indexer
        return found | patterns

    def _read_part(
        self, kind: type[_Part], words: Mapping[str, str], usual: Mapping[str, int], **given: object
    ) -> _Part | None:
        """The part of a model whose sizes have these words; None where one is none."""
        sizes = {name: self._count(word, usual.get(name)) for name, word in words.items()}
        try:
            return msgspec.convert({**given, **sizes}, kind)
        except msgspec.ValidationError as error:
            what = f"{', '.join(words.values())}: {error}"
            self.faults.append(PartoptError(what, "check them", code="invalid-value"))
            return None

    def _experts(self, blocks: int) -> dict[str, int]:
        """The experts, and which blocks have some."""
        raw, kind, width = self.raw, self.kind, self._count(self.kind.width)
        shared = 0
        if kind.shared in raw or kind.shared == kind.width:
            shared = self._count(kind.shared, 0)
            shared *= width if kind.shared == "n_shared_experts" else 1  # so many, as wide
        period, without = self._count(kind.period, 1), raw.get("mlp_only_layers") or []
        first = self._count(kind.dense_first, 0) if kind.dense_first else len(without)
        have = [i for i in range(blocks) if i >= first and not (i + 1) % max(1, period)]
        stated = raw.get("moe_layers") or have
        if without not in ([], [*range(first)]) or stated != have:
            path = "mlp_only_layers" if without else "moe_layers"
            self._refuse(path, "blocks without experts are neither the first nor in a period")
        if kind.period == "moe_layer_freq" and period != 1:
            self._refuse(kind.period, f"{period} for 1: blocks of experts in a period")
        groups, taken = self._count("n_group", 0), self._count("topk_group", 0)
        grouped = groups > 1 and taken
        return {
            "experts": self._count(kind.experts, raw.get("num_local_experts")),  # transformers 5
            "experts_per_token": self._count(kind.taken, self.raw.get("experts_per_token")),
            "expert_ffn": width,
            "expert_hidden": self._count("moe_latent_size", 0),
            "shared_ffn": shared,
            "dense_first": first,
            "experts_period": max(1, period),
            "groups": groups if grouped else 0,
            "groups_per_token": taken if grouped else 0,
        }

    def _full_period(self, blocks: int, window: int) -> int:
        """Every how many blocks one sees all tokens; 0 where all have the window, or none."""
        types, positions = self.raw.get("layer_types"), self.raw.get("no_rope_layers")
        if positions and not types:
            types = ["sliding_attention" if turned else "full_attention" for turned in positions]
        types = types if isinstance(types, list) else []
        known = {"full_attention", "sliding_attention", "chunked_attention"}
        known |= {"linear_attention"} if self.kind.recurrence == "delta" else set()
        known |= {"deepseek_sparse_attention"} if self.raw["model_type"] in _INDEXED else set()
        if others := sorted({*map(str, types)} - known):
            self._refuse("layer_types", f"blocks of other kinds: {', '.join(others)}")
        if self.kind.recurrence == "delta" and not types:
            return self._count("full_attention_interval", 4)
        if not (window or self.kind.recurrence == "delta") or not types:
            return self.kind.full_period if window else 0
        see_all = [str(kind) == "full_attention" for kind in types]
        period = see_all.index(True) + 1 if True in see_all else 0
        if see_all != [bool(period) and not (i + 1) % period for i in range(blocks)]:
            self._refuse("layer_types", "blocks that see all tokens are in no period")
        return period

    def _refuse(self, path: str, what: str) -> None:
        error = PartoptError(f"{path}: {what}", _HINT, code="unsupported-model")
        self.faults.append(error)

    def _numerics(self) -> Numerics:
        """What no time depends on: in the words of the kind, or as the kind has it."""
        kind = self.raw["model_type"]
        usual, words = _NUMERICS[kind], _USUAL | _WORDS.get(kind, {})
        newer = self._entries("rope_parameters")  # base, share and scaling, since transformers 5
        stated = newer | {name: value for name, value in self.raw.items() if value is not None}
        said = {name: stated[word] for name, word in words.items() if word in stated}
        if "bias" in said:
            whole = stated.get("mlp_bias") or usual.bias == "all"
            said["bias"] = ("all" if whole else "attention") if said["bias"] else "none"
        if "activation" in said:  # one word for all ways to compute it, as gelu_new
            word = str(said["activation"]).partition("_")[0]
            said["activation"] = "silu" if word == "swish" else word
        scaling = self._entries("rope_scaling") or newer
        scaling = {key: value for key, value in scaling.items() if key not in words.values()}
        if "type" in scaling:  # as older configurations call it
            scaling["rope_type"] = scaling.pop("type")
        if scaling.get("rope_type") != "default":
            said["rotary_scaling"] = scaling
        if stated.get("besides") == OTHER_PARTS:
            said["besides"] = "; ".join(filter(None, (usual.besides, OTHER_PARTS)))
        if not self.kind.rotary:
            said = {name: value for name, value in said.items() if not name.startswith("rotary")}
        try:
            return msgspec.convert(structs.asdict(usual) | said, Numerics)
        except msgspec.ValidationError as error:
            what = f"norms, biases or positions: {error}"
            self.faults.append(PartoptError(what, "check them", code="invalid-value"))
            return usual

    def _entries(self, name: str) -> dict[str, Any]:
        """The entries of `name` that are something; none where it has none."""
        value = self.raw.get(name)
        entries = value if isinstance(value, dict) else {}
        return {key: entry for key, entry in entries.items() if entry is not None}

    def _count(self, name: str, default: int | None = None) -> int:
        """The whole number that `name` has."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40:
            return value
        said = "missing" if value is None else "expected a whole number"
        hint = "the configuration of a model has it"
        self.faults.append(PartoptError(f"{name}: {said}", hint, code="invalid-value", path=name))
        return 1
