"""The tensors in a value: arguments and results of modules, and the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Inputs = Any  # a tensor, a sequence of arguments, or a mapping of keyword arguments
Loss = Callable[[Any, Inputs], Tensor]
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value made of tuples, lists, mappings and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, _PLAIN):  # most are, and all else is asked for slowly
        return []
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, Sequence):
        return [tensor for part in value for tensor in tensors_in(part)]
    fields = getattr(value, "__dataclass_fields__", ())
    return [tensor for name in fields for tensor in tensors_in(getattr(value, name, None))]


def local_tensors(value: Any) -> list[Tensor]:
    """Every tensor in a value as this rank holds it.

    Of a DTensor its shard, of a collective that nobody waited for yet what it will be.
    """
    return [part for tensor in tensors_in(value) for part in _parts(tensor)]


def _parts(tensor: Tensor) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]  # of a DTensor its mesh, too
    return [part for each in inner if isinstance(each, Tensor) for part in _parts(each)]


def place(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The same inputs on `device`, the floating ones as `dtype`.

    To a GPU they are copied from pinned memory, so that the host does not wait for the device.
    """
    if isinstance(inputs, Tensor):
        if device.type == "cuda" and inputs.device.type == "cpu":
            inputs = inputs.pin_memory()
        wanted = dtype if inputs.is_floating_point() else inputs.dtype
        return inputs.to(device, wanted, non_blocking=True)
    if isinstance(inputs, Mapping):
        return {key: place(value, device, dtype) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(place(value, device, dtype) for value in inputs)
    return inputs


def tokens_per_sample(inputs: Inputs, size: int) -> int | None:
    """The length of the first integer input of shape (`size`, length); None where none is.

    Of an encoder and a decoder it is that of the encoder, whose input comes first.
    """
    for tensor in tensors_in(inputs):
        indices = tensor.dtype in (torch.int64, torch.int32)
        if indices and tensor.dim() == 2 and len(tensor) == size:
            return tensor.shape[1] if tensor.shape[1] > 1 else None
    return None
