"""T5 from transformers, random weights from a configuration, offline.

pip install '.[examples]'
partopt profile examples/t5.py --microbatch 1,2 -o t5.json

Every block of the decoder reads what the encoder made: a cut inside the decoder carries it on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 32128}


def build(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    head_width: int | None = None,
    ffn: int = 3072,
    context: int = 128,
    vocabulary: int = 32128,
) -> nn.Module:
    """The model, by default T5 base with 128 tokens; `layers` in the encoder and the decoder each.

    `ffn` is the width between, `head_width` that of a head where heads are wider than the model.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    _built.update(context=context, vocabulary=vocabulary)
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=layers,
            d_model=width,
            num_heads=heads,
            d_kv=head_width or width // heads,
            d_ff=ffn,
            vocab_size=vocabulary,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Token ids to translate, and as many of the translation: the model returns a loss."""
    shape = (batch_size, _built["context"])
    ids, labels = (torch.randint(1, _built["vocabulary"], shape) for _ in range(2))
    return {"input_ids": ids, "labels": labels}
