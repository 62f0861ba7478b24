"""LLaMA from transformers, random weights from a configuration, offline.

pip install "partopt[examples]"
partopt profile examples/llama.py --microbatch 1 -o llama-7b.json

The defaults are the shape of the 7B model, 27 GB of weights in float32: where that does not fit
into memory, a few of its layers are measured. `--set layers=80 --set width=8192 --set heads=64
--set kv_heads=8 --set ffn=28672` is the shape of the 70B model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vision import declare_missing_operators

# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 32000}


def build(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    ffn: int = 11008,
    vocabulary: int = 32000,
    context: int = 128,
) -> nn.Module:
    """The model; `kv_heads` below `heads` share keys and values, `ffn` is the width between."""
    declare_missing_operators()  # transformers imports torchvision where it is installed
    from transformers import LlamaConfig, LlamaForCausalLM

    _built.update(context=context, vocabulary=vocabulary)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=ffn,
            vocab_size=vocabulary,
            max_position_embeddings=context,
            use_cache=False,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels: the model shifts them and returns a loss."""
    ids = torch.randint(_built["vocabulary"], (batch_size, _built["context"]))
    return {"input_ids": ids, "labels": ids}
