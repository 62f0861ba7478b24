"""A small transformer over the ranks of a group: by hand, as Megatron does, and by DTensor.

Also with its sequence cut over the ranks, where attention gathers keys and values.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

WIDTH, HEADS, VOCABULARY, LENGTH, BLOCKS = 32, 4, 64, 16, 2


class Copy(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Gather(torch.autograd.Function):
    """The parts of the sequence of all ranks, whose gradients are summed and cut again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [each.contiguous() for each in gradient.chunk(dist.get_world_size(), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


class Attention(nn.Module):
    gathers = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        if self.gathers:  # every position looks at every other: no mask
            queries, *others = heads
            heads = [queries, *(Gather.apply(each.contiguous()) for each in others)]
        y = functional.scaled_dot_product_attention(*heads, is_causal=not self.gathers)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width, bias=False)
        self.down = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.by_hand = parts > 1
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(WIDTH // parts), Mlp(4 * WIDTH // parts)

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            x = x + self.attention(self.norm(x))
            return x + self.mlp(self.norm2(x))
        x = x + Sum.apply(self.attention(Copy.apply(self.norm(x))))
        return x + Sum.apply(self.mlp(Copy.apply(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(parts) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_PLAN: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
    "attention.o": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def mesh(name: str = "tp") -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def by_hand() -> nn.Module:
    return Transformer(dist.get_world_size())


def by_dtensor(name: str = "tp") -> nn.Module:
    model = Transformer()
    for block in model.blocks:
        parallelize_module(block, mesh(name), BLOCK_PLAN)
    return model


def over_the_sequence() -> nn.Module:
    """The vocabulary cut too; between blocks, and in norms, each rank holds its part of the
    sequence.
    """
    cut = {"output_layouts": Shard(1), "use_local_output": False}
    gather = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    plan = BLOCK_PLAN | {name: SequenceParallel() for name in ("norm", "norm2")}
    plan |= dict.fromkeys(("attention", "mlp"), gather)
    plan |= {name: RowwiseParallel(**cut) for name in ("attention.o", "mlp.down")}
    model = Transformer()
    for block in model.blocks:
        parallelize_module(block, mesh(), plan)
    outside = {
        "embed": RowwiseParallel(input_layouts=Replicate(), **cut),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh(), outside)


class OfContext(Transformer):
    """Each rank takes its part of the sequence out of the inputs, which are those of all."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.gathers = True

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(own_part(ids))


def own_part(ids: Tensor) -> Tensor:
    return ids.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def over_the_context() -> nn.Module:
    """The sequence cut over the ranks in every layer, the parameters whole."""
    return OfContext()


def other_layers() -> nn.Module:
    """A model whose last layer has another name on rank 1."""
    model = by_hand()
    if dist.get_rank() == 1:
        model.end = model.head
        del model.head
        model.forward = lambda ids: model.end(model.blocks[1](model.blocks[0](model.embed(ids))))
    return model


def data_parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Transformer())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Transformer(), mesh=mesh("shard"))


def of_experts() -> nn.Module:
    return by_dtensor("ep")


def whole() -> nn.Module:
    """On every rank the whole model."""
    return Transformer()


class Full(Transformer):
    """Runs out of memory on rank 1 from microbatches of 4 samples on."""

    def forward(self, ids: Tensor) -> Tensor:
        if len(ids) >= 4 and os.environ["RANK"] == "1":
            raise MemoryError
        return super().forward(ids)


def full() -> nn.Module:
    return Full(dist.get_world_size())


def example_inputs(microbatch_size: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (microbatch_size, LENGTH))


def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
    ids = ids if logits.shape[1] == ids.shape[1] else own_part(ids)
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
