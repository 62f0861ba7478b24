"""BERT from transformers with its language-model head, random weights from a configuration,
offline.

pip install '.[examples]'
partopt profile examples/bert.py --microbatch 1,2 -o bert.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 30522}


def build(
    layers: int = 12, width: int = 768, heads: int = 12, context: int = 128, vocabulary: int = 30522
) -> nn.Module:
    """The model, by default BERT base with sequences of 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    _built.update(context=context, vocabulary=vocabulary)
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=max(context, 512),
            vocab_size=vocabulary,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels: the model returns a loss."""
    ids = torch.randint(_built["vocabulary"], (batch_size, _built["context"]))
    return {"input_ids": ids, "labels": ids}
