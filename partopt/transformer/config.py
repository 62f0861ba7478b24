"""A transformer from its configuration: Hugging Face's config.json, or one of `models/`.

Both have the same form; those of `models/` say their source beside. What a `Transformer` cannot say
is refused by name: blocks of several kinds, and attention over compressed keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from partopt import documents
from partopt.documents.files import PathLike, find_shipped, shipped_names
from partopt.documents.transformer import Numerics, Transformer
from partopt.errors import PartoptError, did_you_mean

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
    names: Mapping[str, str] = field(default_factory=dict)


_GPT2 = {"blocks": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner"}
_KINDS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2"), _Kind()),
    "gemma": _Kind(tied=True),
    "mixtral": _Kind(experts="num_local_experts", width="intermediate_size"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _Kind(experts="num_experts")),
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
    **dict.fromkeys(("qwen2", "qwen2_moe"), Numerics(epsilon=1e-6, bias="queries")),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Numerics(epsilon=1e-6, query_key_norms=True)),
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
    "starcoder2": {"epsilon": "norm_epsilon", "bias": "use_bias"},
    "bert": {"epsilon": "layer_norm_eps"},
    "roberta": {"epsilon": "layer_norm_eps"},
}
_HINT = "it plans models of equal blocks: attention and a feed-forward or experts"


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
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        what = f"{where}: not JSON: {error}"
        raise PartoptError(what, "a config.json is expected", code="malformed-document") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
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
            f"{did_you_mean(kind, _KINDS)}; {_HINT}",
            code="unsupported-model",
            model_type=kind,
        )
    made = _Reader(raw, _KINDS[kind]).read(name)
    documents.refuse(made.faults(), where)
    return made


def named_transformer(text: str) -> Transformer | None:
    """The model in `models/` whose name stands in a text, as `meta-llama/Meta-Llama-3.1-8B`.

    Separators, case and the minor version of Llama 3 do not matter, nor what NeMo has inside,
    `Llama31Config8B`; the longest name counts. What is published as `Llama-3-8B` is without the
    scaled positions of 3.1.
    """
    said = re.sub(r"(moe)?(config|modelprovider)[-_]?(?=[0-9])", "-", text.lower())
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
    return "[-_ ]?".join(joined.get(run, run) for run in runs) + "(?![a-z0-9])"


def like_shipped(model: Transformer) -> Transformer | None:
    """The model with the name of one in `models/` of the same shape.

    What no time depends on stays the model's.
    """
    return next(iter(alike_shipped(model)), None)


def alike_shipped(model: Transformer, *ignored: str) -> list[Transformer]:
    """The models with the name of one in `models/` of the same shape, and its fields `ignored`."""
    found = []
    for shipped in map(load_transformer, shipped_names("models")):
        same = {field: getattr(shipped, field) for field in ("name", *ignored)}
        if structs.replace(model, **same, numerics=shipped.numerics) == shipped:
            found.append(structs.replace(shipped, numerics=model.numerics))
    return found


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
        raw |= {"sliding_window": model.window} if model.window else {}
        raw |= {kind.dropout: 0.1 * model.dropout} if kind.dropout else {}
        if kind.experts:
            raw |= {kind.experts: model.experts, "num_experts_per_tok": model.experts_per_token}
            raw |= {kind.width: model.expert_ffn}
            raw |= {"shared_expert_intermediate_size": model.ffn} if model.ffn else {}
        raw |= _write_numerics(model, name)
        with suppress(PartoptError):
            read = read_transformer(msgspec.json.encode(raw), name, model.name)
            if structs.replace(read, numerics=model.numerics and read.numerics) == model:
                return raw
    raise PartoptError(
        f"{model.name}: no configuration in the form of Hugging Face's has its blocks",
        "gated and plain feed-forwards, positions and experts go together as in models that exist",
        code="unsupported-model",
    )


def _write_numerics(model: Transformer, kind: str) -> dict[str, object]:
    """What no time depends on, as far as a `model_type` has words for it."""
    numerics, usual, words = model.numerics, _NUMERICS[kind], _USUAL | _WORDS.get(kind, {})
    if numerics is None:
        return {}
    raw: dict[str, object] = {words["epsilon"]: numerics.epsilon}
    raw |= {words["rotary_base"]: numerics.rotary_base} if model.rotary else {}
    raw |= {"rope_scaling": numerics.rotary_scaling} if numerics.rotary_scaling else {}
    for name in ("rotary_share", "activation"):
        if getattr(numerics, name) != getattr(usual, name):
            raw[words[name]] = getattr(numerics, name)
    if numerics.bias != usual.bias:
        raw |= {words["bias"]: numerics.bias != "none", "mlp_bias": numerics.bias == "all"}
    return raw


def _other_blocks(raw: dict[str, Any]) -> Iterator[PartoptError]:
    """What makes a model one of other blocks than partopt knows, or of several kinds."""
    layers, experts = raw.get("layer_types"), raw.get("decoder_sparse_step")
    found = {
        "text_config": isinstance(raw.get("text_config"), dict) and "a model of several parts",
        "is_encoder_decoder": raw.get("is_encoder_decoder") is True and "an encoder and a decoder",
        "kv_lora_rank": bool(raw.get("kv_lora_rank")) and "attention over compressed keys (MLA)",
        "first_k_dense_replace": bool(raw.get("first_k_dense_replace"))
        and "the first blocks have no experts: blocks of two kinds",
        "mlp_only_layers": bool(raw.get("mlp_only_layers"))
        and "some blocks have no experts: blocks of two kinds",
        "decoder_sparse_step": experts not in (None, 1)
        and "some blocks have no experts: blocks of two kinds",
        "layer_types": isinstance(layers, list)
        and len({*map(str, layers)}) > 1
        and f"blocks of several kinds: {', '.join(sorted({*map(str, layers)}))}",
    }
    for path, what in found.items():
        if what:
            message = f"{path}: {what}"
            yield PartoptError(message, _HINT, code="unsupported-model", path=path)


class _Reader:
    """Reads the fields of a configuration, and notes what is missing."""

    def __init__(self, raw: dict[str, Any], kind: _Kind) -> None:
        self.raw, self.kind, self.faults = raw, kind, list[PartoptError]()

    def read(self, name: str) -> Transformer:
        """The transformer, of which only types have been checked."""
        raw, kind = self.raw, self.kind
        names = {**_NAMES, **kind.names}
        size = {key: self._count(names[key]) for key in names if key != "ffn"}
        heads = size["heads"]
        shared = kind.experts and kind.width == "moe_intermediate_size"
        ffn = 0
        if shared:  # the width of an expert that every token takes
            ffn = self._count("shared_expert_intermediate_size", 0)
        elif not kind.experts:
            ffn = self._count(names["ffn"], 0 if kind.gated else 4 * size["hidden"])
        experts: dict[str, int] = {}
        if kind.experts:
            experts = {
                "experts": self._count(kind.experts),
                "experts_per_token": self._count("num_experts_per_tok"),
                "expert_ffn": self._count(kind.width),
            }
        dropout = raw.get(kind.dropout, 0.1) if kind.dropout else 0.0
        windowed = raw.get("use_sliding_window", True)
        values: dict[str, Any] = {
            **size,
            **experts,
            "kv_heads": self._count("num_key_value_heads", heads),
            "head_size": self._count("head_dim", size["hidden"] // max(1, heads)),
            "tied": raw.get("tie_word_embeddings", kind.tied) is True,
            "dropout": dropout != 0,
            "window": self._count("sliding_window", 0) if windowed else 0,
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
