"""The tower of a model of pictures from its `vision_config`: CLIP, SigLIP, InternVL's, Qwen's.

What makes the text's tokens of it is as its family has it in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from partopt.documents.transformer import Tower

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_omni", "qwen3_5")
_LARGE = 2**40
_FIXED = {"clip_vision_model", "siglip_vision_model", "intern_vit_6b", "internvl_vision"}


def read_tower(said: Mapping[str, Any], whole: Mapping[str, Any], hidden: int) -> Tower | None:
    """The tower that a `vision_config` says, before a text so wide; None where it is of no kind.

    `whole` is the configuration in which it stands. Of Qwen's the oldest have no `model_type`.
    """
    kind = said.get("model_type", "qwen2_5_vl" if "spatial_merge_size" in said else "")
    if not isinstance(kind, str) or not (kind in _FIXED or kind.startswith(_QWEN)):
        return None

    def number(*names: str, usual: float = 0) -> float:
        for name in names:
            value = said.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, bool | str | list | dict) or not 0 <= (value or 0) < _LARGE:
                raise ValueError(f"{name}: {value!r:.40} is not a size")
            if value is not None:
                return float(value)
        return usual

    width, side = number("embed_dim", "hidden_size"), number("patch_size", usual=14)
    pixels = side * side * number("in_chans", "in_channels", "num_channels", usual=3)
    found = {
        "blocks": number("depth", "num_hidden_layers"),
        "hidden": width,
        "ffn": number("intermediate_size") or number("mlp_ratio", usual=4) * width,
        "gated": said.get("hidden_act") == "silu",
    }
    if kind in _FIXED:
        merged = round((1 / whole.get("downsample_ratio", 1)) ** 2)
        patches = (number("image_size") // side) ** 2 if side else 0
        found |= {"patch": pixels, "merged": merged, "positions": patches}
        found["picture"] = patches / merged
        single = whole.get("model_type") == "paligemma"  # one product, where others have two
        found["aligner"] = merged * width * hidden + (0 if single else hidden**2)
    else:
        merged, out = number("spatial_merge_size", usual=2) ** 2, hidden
        beside = len(said.get("deepstack_visual_indexes") or ())  # into the text's first blocks
        found |= {
            "patch": pixels * number("temporal_patch_size", usual=2),
            "merged": merged,
            "positions": number("num_position_embeddings"),
            "aligner": (1 + beside) * merged * width * (merged * width + out),
            "window": (number("window_size") // side) ** 2 if side else 0,
            "full": len(said.get("fullatt_block_indexes") or ()),
        }
    whole_numbers = {name: int(value) for name, value in found.items()}
    return msgspec.convert(whole_numbers | {"gated": found["gated"]}, Tower)
