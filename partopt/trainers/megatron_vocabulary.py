"""How many words a model has, as arguments of Megatron-LM and names of tokenizers say it."""

from __future__ import annotations

import re
from typing import Any

from partopt.configurations.marks import strip_marks
from partopt.configurations.settings import Settings
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError
from partopt.importers.hugging_face import alike_shipped, load_transformer

# words of a tokenizer, by what its type, its name or its file is called: the first that matches
_TOKENIZERS = {
    r"gpt-?2": 50_257,
    r"gpt-vocab": 50_257,  # of the same
    r"gpt-?neox|pythia": 50_277,
    r"llama-?_?3": 128_256,
    r"llama-?_?2|llamatokenizer": 32_000,
    r"mixtral-8x|mistral-7b-v0\.1": 32_000,
    r"qwen-?2\.?5|qwen2": 151_936,  # 152,064 of those of 7 billion and more
    r"qwen-?3[._]5": 248_320,
    r"qwen-?3": 151_936,
    r"bigscience/(bloom|tokenizer)|bloomtokenizer": 250_680,
    r"deepseek-(v3|r1)": 129_280,
    r"deepseek-v2": 102_400,
    r"kimi-k2|moonlight": 163_840,
    r"glm-?4\.5": 151_552,
    r"glm-?5": 154_880,
    r"nemotron-(3|h)-": 131_072,
    r"gpt-oss": 201_088,
}
_QWEN_WIDE, _WIDE = 152_064, 3584
# words before those that Pai-Megatron-Patch's --extra-vocab-size adds
_BEFORE_EXTRA = {128_256: 128_000, 151_936: 151_643, 152_064: 151_643}
_DIVISOR = 128  # Megatron's default
_NAMING = (
    *("tokenizer_model", "tokenizer_name_or_path", "vocab_file"),
    *("tokenizer.type", "tokenizer.model"),
)
_TYPES = ("patch_tokenizer_type", "tokenizer_type", "model_type_hf")
_SAYS_NOTHING = r"\s|[<>]|^$|^(.*/)?(tokenizer|vocab)[\w.-]*$|^(true|none|mock)$"
_SAYS_SIZE = r"tokenizer\w*?[0-9]{2,3}(k|[0-9]{3})"  # in the name of its folder


def name_shape(settings: Settings, shape: dict[str, Any], ranks: int) -> Transformer:
    """The transformer of this shape, whose vocabulary is as it is said for so many tensor ranks.

    A shipped one of the same shape gives its name; and its vocabulary where nothing says one and it
    alone can be meant. PartoptError where that is not known, or the shape cannot be.
    """
    words, padded = _find_vocabulary(settings, shape["vocabulary"], shape["hidden"], ranks)
    model = Transformer(name="model", **shape | {"vocabulary": padded or 1})
    if wrong := [fault.at("the model's shape") for fault in model.faults()]:
        settings.faults += wrong
        settings.check()
    alike = alike_shipped(model, "vocabulary")
    if words:
        return next((shipped for shipped in alike if shipped.vocabulary in (words, padded)), model)
    base, tokenizer = settings.known("rotary_base"), _unknown_tokenizer(settings)
    alike = [shipped for shipped in alike if base in (None, _rotary_base(shipped.name))]
    bytes_alone = "sentencepiece" not in str(settings.known("tokenizer_type")).lower()
    if len(alike) == 1 and not tokenizer and bytes_alone:
        (like,) = alike
        settings.notes.append(
            f"a vocabulary of {like.vocabulary:,}, as {like.name} of the same shape has"
        )
        return like
    sizes = ", ".join(f"{shipped.name} has {shipped.vocabulary:,}" for shipped in alike)
    why = f"the words of {tokenizer[-80:]} are not known" if tokenizer else ""
    same = f"of the same shape {sizes}" if sizes else ""
    settings.refuse_missing("vocab_size", "; ".join(part for part in (why, same) if part))
    raise PartoptError.together(settings.faults)


def _rotary_base(name: str) -> float | None:
    numerics = load_transformer(name).numerics
    return numerics.rotary_base if numerics else None


def _find_vocabulary(settings: Settings, usual: int, hidden: int, ranks: int) -> tuple[int, int]:
    """Words, and those with what fills up the parts of tensor ranks; 0 where nothing says them."""
    for name in ("padded_vocab_size", "pad_vocab_size_to"):
        if settings.has(name):
            exact = settings.count(name) or 1
            return exact, exact
    divisor = settings.count("make_vocab_size_divisible_by", default=0) or 0
    # beside a model that is named, a constant of another file is that of a tokenizer for tests
    value = settings.known("vocab_size") if usual else _find_words(settings)
    stated = value is not None and not (usual and isinstance(value, str))
    words = value if isinstance(value, int) else usual
    if stated and (not isinstance(value, int) or value < 1):
        words = settings.count("vocab_size", default=usual) or 0
    named = 0 if stated else _of_tokenizer(settings, hidden, usual)
    if named not in (0, usual):  # another tokenizer than the model's
        words, usual = named, 0
        divisor = divisor or _DIVISOR * (not settings.has("extra_vocab_size"))
    multiple = divisor * ranks if divisor and (stated or not usual) else 1
    return words, -(-words // multiple) * multiple


def _find_words(settings: Settings) -> object:
    """The words that a text says, of the model where those of its tokenizer are not known."""
    last = [value for path, value in settings.values.items() if path.endswith(".vocab_size")]
    numbers: list[object] = [value for value in last if isinstance(value, int)]
    return settings.known("vocab_size") or (numbers or [settings.find("vocab_size")])[-1]


def _of_tokenizer(settings: Settings, hidden: int, usual: int) -> int:
    """Words of a tokenizer that is known by its name, noted where unusual; 0 where it is not."""
    for name in (*_NAMING, *_TYPES * (not _unknown_tokenizer(settings))):
        text = _known_text(settings, name)
        for pattern, size in _TOKENIZERS.items():
            if re.search(pattern, text.lower()):
                words = _QWEN_WIDE if pattern.startswith("qwen-?2") and hidden >= _WIDE else size
                if extra := settings.count("extra_vocab_size", default=0):
                    words = _BEFORE_EXTRA.get(words, words) + extra
                if words != usual:
                    settings.notes.append(f"a vocabulary of {words:,}, by the name {text[-60:]}")
                return words
    return 0


def _unknown_tokenizer(settings: Settings) -> str:
    """The tokenizer that is named and is none that is known."""
    for name in (_known_text(settings, name) for name in _NAMING[:3]):
        if re.search(_SAYS_SIZE, name.lower()) or not re.search(_SAYS_NOTHING, name.lower()):
            return "/".join(name.split("/")[-3:])
    return ""


def _known_text(settings: Settings, name: str) -> str:
    """What is known of a value, as the file in a folder that is not."""
    value = settings.value(name)
    words = value if isinstance(value, list) else [value or ""]
    return strip_marks(" ".join(map(str, words)))
