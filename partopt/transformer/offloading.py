"""What of a block goes to the host's memory between its forward and its backward.

Megatron Core, pipeline_parallel/fine_grained_activation_offload.py: what a named module saves is
copied behind the module, and copied back one block ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from partopt.documents.transformer import BITS, Kind, Practice, Transformer

if TYPE_CHECKING:
    from partopt.transformer.block import Shape, Training

LEAST = 2**20  # numbers of a tensor that is copied: min_offloaded_tensor_size
BLOCKS = 2  # whose tensors are on the device: of that at work, and of the one ahead
ATTENDING = ("qkv_linear", "core_attn", "attn_proj")  # modules of attention
TOGETHER = {"expert_fc1", "moe_act"}  # one module where operations of experts are fused
# what is not copied where these are made again (transformer_config.py; attention.py would commit
# a group that it has not begun; outputs of an expansion are given up in any case)
_AGAIN = {"core_attn": {"core_attn", "mla_up_proj"}, "expert_fc1": {"moe"}, "moe_act": {"moe"}}
# nor with these graphs of CUDA (transformer_layer.py, _set_offload_modules)
_IN_GRAPHS = {"router": {"mlp_norm"}, "attention": {"attn_norm", "mlp_norm"}}


class Tensor(NamedTuple):
    """Its numbers; bytes of one that the device gives up, and of its copy."""

    numbers: float
    freed: float
    copied: float


def copied_modules(model: Transformer, practice: Practice, again: Collection[str]) -> list[str]:
    """Of the modules that a trainer offloads those that blocks have and do not make `again`.

    Norms are modules before latent attention and experts; others are in the product behind them.
    """
    idle = {"expert_fc1", "moe_act", "mlp_norm"} if not model.experts else set[str]()
    idle |= {"attn_norm"} if not model.latent else set()
    idle |= {name for name, made in _AGAIN.items() if made & {*again}}
    idle |= _IN_GRAPHS.get(practice.graphs, set())
    idle |= {"attn_proj"} if "core_attn" in idle else set()
    return [name for name in practice.offload.split("+") if name and name not in idle]


def moved_bytes(work: Training, shape: Shape, kind: Kind) -> tuple[float, float]:
    """Bytes of a block and a microbatch that a device gives up, and those that are copied."""
    found = [one for one in _tensors(work, shape, kind) if one.numbers >= LEAST]
    freed = sum(tensor.numbers * tensor.freed for tensor in found)
    return freed, sum(tensor.numbers * tensor.copied for tensor in found)


def _tensors(work: Training, shape: Shape, kind: Kind) -> Iterator[Tensor]:
    """What the modules of a shape save; the output of attention is saved by two."""
    model, kept, latent, names = work.model, work.practice.kept, work.model.latent, shape.offload
    T, share, experts = work.tokens(shape), work.share(shape), work.experts(shape)
    q, kv, values = (T / shape.t * width for width in (model.q, model.kv, model.values))
    less = kept.narrower if BITS[work.format] < 16 else 0.0
    narrow, hidden = 2 - less, T * model.hidden / share
    if not kind.attends:
        names = tuple(name for name in names if name not in ("attn_norm", *ATTENDING))
    if "attn_norm" in names or ("qkv_linear" in names and not latent):
        yield Tensor(hidden, 2, 2)
    if "qkv_linear" in names and "layernorm" not in (shape.modules if latent else ()):
        yield Tensor(hidden, narrow, narrow)
    if "qkv_linear" in names and latent:
        for width in (latent.queries, latent.keys + latent.rotary):
            yield Tensor(T * width / share, 3, 3)
        for width in (latent.queries, latent.keys) if "mla_up_proj" not in shape.modules else ():
            yield Tensor(T * width, narrow, narrow)
    if "core_attn" in names and latent:
        yield from [Tensor(q, 2, 2)] * 2
        yield from (Tensor(values, 2, 2), Tensor(values, 2 * bool(less), 2))
    elif "core_attn" in names:
        yield Tensor(q, 2 + kept.rotary * model.rotary, 2)
        yield from [Tensor(kv, kept.keys / 2, 2)] * 2
        yield Tensor(q, 0, 2)
    if "attn_proj" in names:
        yield Tensor(values, narrow if latent else kept.queries - 2 - less, narrow)
    if kind.experts:
        held = experts.held_rows / experts.rows
        wide = (kept.gated if model.gated else kept.plain) - 2
        if "mlp_norm" in names:
            yield Tensor(hidden, 2, 2)
        if "expert_fc1" in names:
            yield Tensor(experts.rows * model.expert_inputs, narrow * held, narrow)
        if "moe_act" in names:
            yield Tensor(experts.rows * experts.width, wide * held * shape.etp, wide)
