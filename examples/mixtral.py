"""Mixtral from transformers, random weights from a configuration, offline.

pip install '.[examples]'
partopt profile examples/mixtral.py --estimate h100 --dtype bfloat16 -o mixtral.json

Every token goes to two of eight experts. Their products are computed in groups, whose sizes no
shape depends on: the model can be estimated, and its experts are taken to be equally busy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 32000}


def build(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    experts: int = 8,
    context: int = 128,
    vocabulary: int = 32000,
) -> nn.Module:
    """The model, by default the shape of 8x7B with 128 tokens; `ffn` is the width of an expert."""
    from transformers import MixtralConfig, MixtralForCausalLM

    _built.update(context=context, vocabulary=vocabulary)
    return MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=ffn,
            num_local_experts=experts,
            vocab_size=vocabulary,
            max_position_embeddings=context,
            experts_implementation="grouped_mm",
            use_cache=False,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels: the model shifts them and returns a loss."""
    ids = torch.randint(_built["vocabulary"], (batch_size, _built["context"]))
    return {"input_ids": ids, "labels": ids}
