r"""A GPT in plain torch: pre-norm transformer blocks, learned positions, the output tied to the
token embedding.

    partopt profile examples/gpt.py --microbatch 1,2,4 -o gpt.json

GPT-2 small is the same model with more of everything:

    partopt profile examples/gpt.py --set layers=12 --set width=768 --set heads=12 \
        --set context=1024 --set vocabulary=50257 -o gpt2.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shapes: b samples, t tokens, w width, h heads, v vocabulary.

# example_inputs follows the model that build made last
_built = {"context": 128, "vocabulary": 8192}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, w) to (b, t, w)."""
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised input and added to the residual
    stream.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, w) to (b, t, w)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids to logits over the vocabulary."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(b, t) to (b, t, v)."""
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(
    layers: int = 8, width: int = 256, heads: int = 8, context: int = 128, vocabulary: int = 8192
) -> nn.Module:
    """The model with random weights; the defaults are small enough to profile on a CPU in a
    minute.
    """
    _built.update(context=context, vocabulary=vocabulary)
    return GPT(layers, width, heads, context, vocabulary)


def example_inputs(batch_size: int) -> Tensor:
    """Token ids, a full context of them."""
    return torch.randint(_built["vocabulary"], (batch_size, _built["context"]))


def loss_fn(output: Tensor, inputs: Tensor) -> Tensor:
    """Cross entropy of each next token."""
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
