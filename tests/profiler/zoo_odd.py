"""Models that are odd in one way each: routing, sharing, checkpoints, own functions, own losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Mlp(nn.Module):
    """The block of most models here."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Chain(nn.Module):
    """A stem, blocks made by `block`, and a head."""

    def __init__(self, block: Any = Mlp, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """One block."""
        return block(x)


class Checkpointed(Chain):
    """Each block is computed again in the backward."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class InnerCheckpoint(nn.Module):
    """A block that holds its checkpoint, of the older kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Routed(nn.Module):
    """Sends each row to the one of four experts that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            [rows] = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return x + result


class Seq2Seq(nn.Module):
    """Two LSTMs, the second started by the state of the first."""

    def __init__(self, vocabulary: int = 97) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.embed(source))
        made, _ = self.decoder(self.embed(target), state)
        return self.head(made)


class Encoder(nn.Module):
    """nn.TransformerEncoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Recommender(nn.Module):
    """DLRM: embedded categories and dense features, their products, and a tower on top."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(500, 16, sparse=sparse) for _ in range(4)])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(26, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        embedded = [table(categories[:, n]) for n, table in enumerate(self.tables)]
        low = self.bottom(dense)
        rows = torch.stack([low, *embedded], 1)
        products = rows @ rows.transpose(1, 2)
        upper = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([low, products[:, upper[0], upper[1]]], 1))


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.base(x) + self.up(self.down(x)))


class InAutocast(Mlp):
    """A block that chooses its own number format."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Dropping(Mlp):
    """A block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.2)


class _Square(torch.autograd.Function):
    """Keeps its factor where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2 * x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor


class OwnFunction(Mlp):
    """A block with a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(super().forward(x))


class Fourier(nn.Module):
    """A block that works on the parts of complex numbers as views."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH // 2 + 1, WIDTH // 2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.view_as_real(torch.fft.rfft(x))
        mixed = self.mix(parts.transpose(-1, -2)).transpose(-1, -2).contiguous()
        return x + torch.fft.irfft(torch.view_as_complex(mixed), n=WIDTH)


class TwoHeads(nn.Module):
    """Returns two tensors in a dict, from a dict of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), Mlp(), Mlp())
        self.value, self.policy = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.trunk(features) * mask
        return {"value": self.value(x), "policy": self.policy(x)}


def two_head_loss(output: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """Both heads' losses, weighed."""
    return output["value"].square().mean() + 0.1 * output["policy"].logsumexp(-1).mean()


def compiled(whole: bool) -> nn.Module:
    """The chain, compiled as one or block by block, by the backend that generates no code."""
    model = Chain()
    for module in [model] if whole else model.blocks:
        module.compile(backend="aot_eager")
    return model
