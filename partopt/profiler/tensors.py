"""The tensors in a value: arguments and results of modules, and the inputs of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import register_pytree_node, tree_map_only

from partopt.errors import PartoptError

Inputs = Any  # a tensor, a sequence of arguments, a mapping of keyword arguments, or Labelled
Loss = Callable[[Any, Inputs], Tensor]
LABELS = ("labels", "label", "targets", "target")
_INPUTS = ("inputs", "input")
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
    return [part for tensor in inner if isinstance(tensor, Tensor) for part in _parts(tensor)]


def place(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The same inputs on `device`, the floating ones as `dtype`.

    To a GPU they are copied from pinned memory, so that the host does not wait for the device.
    """
    if isinstance(inputs, Tensor):
        wanted = dtype if inputs.is_floating_point() else inputs.dtype
        if device.type == "cuda" and inputs.device.type == "cpu":
            return inputs.pin_memory().to(device, wanted, non_blocking=True)
        return inputs.to(device, wanted)
    if isinstance(inputs, Labelled):
        parts = (place(side, device, dtype) for side in (inputs.inputs, inputs.labels))
        return Labelled(*parts)
    if isinstance(inputs, Mapping):
        return {key: place(value, device, dtype) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(place(value, device, dtype) for value in inputs)
    return inputs


def pin(inputs: Inputs) -> Inputs:
    """The same inputs, those of the host in memory from which a GPU copies while that goes on."""
    return tree_map_only(
        Tensor,
        lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor,
        inputs,
    )


def tokens_per_sample(inputs: Inputs, size: int) -> int | None:
    """The length of the first integer input of shape (`size`, length); None where none is.

    Of an encoder and a decoder it is that of the encoder, whose input comes first.
    """
    for tensor in tensors_in(inputs.inputs if isinstance(inputs, Labelled) else inputs):
        indices = tensor.dtype in (torch.int64, torch.int32)
        if indices and tensor.dim() == 2 and len(tensor) == size:
            return tensor.shape[1] if tensor.shape[1] > 1 else None
    return None


# --- labels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """The inputs of the model, and the labels of the same samples, which the loss alone gets."""

    inputs: Inputs
    labels: Any


register_pytree_node(
    Labelled,
    lambda both: ([both.inputs, both.labels], None),
    lambda parts, _context: Labelled(*parts),
)


def takes_labels(
    loss_fn: Callable[..., Any], given: Any, forward: Callable[[], inspect.Signature]
) -> bool:
    """Whether a loss takes labels, which come with the inputs as the second of a pair `given`.

    It does where its second argument is called labels or target, as in the losses of torch, modules
    among them, and not where it is called inputs. By any other name it does where the model, which
    runs as `forward`, cannot take the pair: that is too much for it, or holds its arguments first.
    """
    called: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        names = list(inspect.signature(called).parameters)
    except ValueError:  # of C
        return False
    if len(names) < 2 or names[1] in (*LABELS, *_INPUTS):
        return len(names) > 1 and names[1] in LABELS
    if not is_pair(given):
        return False
    if isinstance(given[0], tuple | Mapping):
        return True
    try:
        forward().bind(*given)
    except TypeError:
        return True
    return False


def loss_of_labels(loss_fn: Callable[..., Any]) -> Loss:
    """A loss function of an output and labels, as one of the output and `Labelled`."""

    @functools.wraps(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    def loss(output: Any, given: Inputs) -> Tensor:
        labels = given.labels if isinstance(given, Labelled) else given
        result: Tensor = loss_fn(output, labels)
        return result

    return loss


def is_pair(given: Any) -> bool:
    """Whether these are two values."""
    return isinstance(given, tuple | list) and len(given) == 2


def split_labels(
    given: Any,
    loss_fn: Callable[..., Any] | None,
    forward: Callable[[], inspect.Signature],
    what: str,
) -> Inputs:
    """The inputs that `what` gave, with their labels where the loss takes these.

    Raises PartoptError where it does and they are not a pair.
    """
    if loss_fn is None or not takes_labels(loss_fn, given, forward):
        return given
    if is_pair(given):
        return Labelled(*given)
    found = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
    raise PartoptError(
        f"{what} gave {found}, and loss_fn takes labels: it needs a pair of inputs and labels",
        "return inputs, labels; the second argument of a loss_fn that takes the model's inputs is "
        "called inputs",
        code="no-labels",
    )


def with_labels(
    model: nn.Module, example_inputs: Callable[[int], Any], loss_fn: Callable[..., Any] | None
) -> tuple[Callable[[int], Inputs], Loss | None]:
    """The inputs and the loss of a model; where the loss takes labels, the inputs hold them."""
    if loss_fn is None:
        return example_inputs, None

    def inputs_of(size: int) -> Inputs:
        given, what = example_inputs(size), f"example_inputs({size})"
        return split_labels(given, loss_fn, lambda: inspect.signature(model.forward), what)

    return inputs_of, loss_of_labels(loss_fn)
