"""LLaMA from transformers, random weights from a configuration, offline.

pip install '.[examples]'
partopt profile examples/llama.py --microbatch 1 -o llama-7b.json

The defaults are the shape of the 7B model, 27 GB of weights in float32: where that does not fit
into memory, a few of its layers are measured. `--set size=70b` is the shape of the 70B model, with
all of its 4,096 tokens; `--estimate h100` needs no GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# the published models of LLaMA 2, and the largest of LLaMA 3.1
SIZES: dict[str, dict[str, int]] = {
    "7b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008},
    "13b": {"layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824},
    "70b": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
    "405b": {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}
    | {"vocabulary": 128256},
}
# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 32000}


def build(
    size: str | None = None,
    layers: int | None = None,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    ffn: int = 11008,
    vocabulary: int = 32000,
    context: int | None = None,
) -> nn.Module:
    """The model; `kv_heads` below `heads` share keys and values, `ffn` is the width between.

    `size`, one of SIZES, stands for all of these but for `layers`, where these are given too (else
    32); `context` is 4,096 tokens with it, else 128.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"layers": 32, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    if size is not None:
        shape = dict[str, int | None](SIZES[size])
        vocabulary = SIZES[size].get("vocabulary", vocabulary)
    if layers is not None:
        shape["layers"] = layers
    _built.update(context=context or (4096 if size else 128), vocabulary=vocabulary)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=shape["layers"],
            hidden_size=shape["width"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            intermediate_size=shape["ffn"],
            vocab_size=vocabulary,
            max_position_embeddings=_built["context"],
            use_cache=False,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels: the model shifts them and returns a loss."""
    ids = torch.randint(_built["vocabulary"], (batch_size, _built["context"]))
    return {"input_ids": ids, "labels": ids}
