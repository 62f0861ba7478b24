"""The kernels of CUDA, where a model is traced on fake tensors of the CPU.

The CPU has other kernels than CUDA for attention and dropout, which do other work and keep other
tensors: a model that is to be estimated for a GPU calls those of CUDA. (Fake tensors of CUDA itself
end the process where torch was built without it.) Recurrent layers, which cuDNN runs as it likes,
are refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partopt.errors import PartoptError
from partopt.profiler.weightless import replace_attribute

_FLASH_HEAD = 256  # the largest head of the flash kernel
_HALVES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """The context in which a model calls the kernels of a device of this type."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_packed_sequences())
        if device == "cuda":
            kernels = stack.enter_context(_CudaKernels())
            stack.enter_context(_also_in_backward(kernels))
        yield


@contextlib.contextmanager
def _also_in_backward(kernels: TorchFunctionMode) -> Iterator[None]:
    """The mode is active in a backward too, where checkpoints run their forward again.

    torch leaves it out of whatever it is asked for, and it is asked for the backward.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_with_kernels(*arguments: Any, **options: Any) -> Any:
        with kernels:
            return run(*arguments, **options)

    with replace_attribute(torch.autograd, "_engine_run_backward", run_with_kernels):
        yield


@contextlib.contextmanager
def _without_packed_sequences() -> Iterator[None]:
    """transformers looks for packed sequences in positions, and takes all fakes for such.

    It would then give attention a mask, and take a slower kernel, where a real step does not.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with replace_attribute(masks, "find_packed_sequence_indices", lambda _positions: None):
        yield


class _CudaKernels(TorchFunctionMode):
    """Puts CUDA's kernels of attention and dropout in the place of the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel, or `func` where CUDA has no other."""
        replacement = _REPLACEMENTS.get(func)
        made = replacement(*args, **(kwargs or {})) if replacement else None
        return func(*args, **(kwargs or {})) if made is None else made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Flash attention, or with a mask or in float32 the memory-efficient one; None for neither.

    Shapes: (b, h, t, w) samples, heads, tokens, width of a head; with `enable_gqa` several heads of
    the query share one of key and value.
    """
    plain = query.dim() == key.dim() == 4 and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
    if not plain or query.dtype not in (*_HALVES, torch.float32):
        return None
    if attn_mask is None and query.dtype in _HALVES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        made: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return made
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = efficient(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return found


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Dropout that keeps a mask of bytes; None where CUDA runs no such kernel."""
    if inplace or not training or not 0 < p < 1:
        return None
    return torch.native_dropout(input, p, True)[0]


def _refuse_recurrence(*_arguments: Any, **_options: Any) -> NoReturn:
    raise PartoptError(
        "the model has recurrent layers (LSTM, GRU or RNN), which an estimate does not know",
        "measure the model: leave out `estimate`",
        code="no-rule",
    )


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.dropout: _dropout,
    **dict.fromkeys(
        (torch.lstm, torch.lstm_cell, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        _refuse_recurrence,
    ),
}
