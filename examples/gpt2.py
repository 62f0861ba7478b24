"""GPT-2 from transformers, random weights from a configuration, offline.

pip install '.[examples]'
partopt profile examples/gpt2.py --microbatch 1,2 -o gpt2.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# example_inputs follows the model that build made last
_built = {"context": 256, "vocabulary": 50257}


def build(
    layers: int = 12, width: int = 768, heads: int = 12, context: int = 256, vocabulary: int = 50257
) -> nn.Module:
    """The model, by default GPT-2 small with a quarter of its context."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _built.update(context=context, vocabulary=vocabulary)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            n_positions=context,
            vocab_size=vocabulary,
            use_cache=False,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels: the model shifts them and returns a loss."""
    ids = torch.randint(_built["vocabulary"], (batch_size, _built["context"]))
    return {"input_ids": ids, "labels": ids}
