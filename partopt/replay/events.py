"""What one forward of a model does, as stages see it: events, and the tensors between them.

An event is a call of a unit, or of a torch function between units. It belongs to the unit entered
last (`partopt.profiler.layers`); a function of nothing but the model's inputs belongs to every
stage, which does it for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from partopt.profiler.layers import LayerKey

EVERYWHERE = -1  # the layer of what every stage does
IN_AN_OBJECT = (
    "{1} reads a tensor of {0} that it is not given as an argument: it lies hidden in an object"
)
# what is read there is read again in every later stage, which has no such tensor
READ_BETWEEN = (
    "the model reads a tensor of {0} between layers that no call has returned: it lies hidden in "
    "an object"
)

IN_A_CHECKPOINT = "a checkpoint runs {0} and {1} once more in the backward, in one stage alone"


# names of torch functions that ask for shape, format and place alone
_QUESTIONS = {
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "stride",
    "element_size", "is_contiguous", "get_device", "__len__", "is_signed", "requires_grad_",
    "__hash__", "storage_offset", "is_same_size", "has_names", "is_conj", "is_neg",
    "is_inference", "__set__", "register_hook", "retain_grad", "dim_order", "result_type",
}  # fmt: skip
_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag", "grad", "data"}


class Key(NamedTuple):
    """A result: which event made it, and which of the event's leaves it is."""

    event: int
    leaf: int


class Likeness(NamedTuple):
    """What can be known of a tensor without its values. `storage` tells views of one apart."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradient: bool
    storage: int

    @classmethod
    def of(cls, tensor: Tensor) -> Likeness:
        """The likeness of `tensor`."""
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(
            tuple(tensor.shape),
            stride,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            storage_of(tensor),
        )


def storage_of(tensor: Tensor) -> int:
    """What views of one memory have in common."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


class Argument(NamedTuple):
    """A result that is one of the event's arguments, which may have been written to."""

    position: int
    tensor: bool


class Same(NamedTuple):
    """A result that is an earlier leaf of the same event once more."""

    leaf: int


class Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


Leaf = Likeness | Argument | Same | Constant


class Tree(NamedTuple):
    """A nested result: its structure, and which leaves of the event it takes."""

    spec: TreeSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Event:
    """A call of a unit, whose name is `unit`, or of the torch function `name` between units.

    `observed` are the results of modules inside the unit whose forward hooks see them.
    `written` are leaves that the event wrote to in place, with the position of the argument.
    `value` says that Python was given a value which depends on a layer.
    """

    name: str
    unit: str | None
    layer: int
    output: Tree
    observed: tuple[tuple[str, Tree], ...]
    leaves: tuple[Leaf, ...]
    written: tuple[tuple[int, int], ...]  # (position of the argument, leaf)
    reads: frozenset[Key]
    parameters: frozenset[str]
    storages_written: frozenset[int]
    value: bool
    opaque: str  # the type of a result that holds what cannot be followed, or nothing


@dataclass(frozen=True)
class Record:
    """One forward with its loss.

    `hidden` has pairs of layers, in their order, of which one reads what the other made and no
    message brings, and says what, `{0}` and `{1}` being the two. `holders` are the layers that hold
    every parameter, by its first name; `changed_buffers` those that the forward changed, `None`
    where that could not be seen. `wrapped` says of a layer what else autograd does with what it
    gets and returns: a full backward hook, or a function around it.
    """

    layers: Sequence[LayerKey]
    events: Sequence[Event]
    likeness: Mapping[Key, Likeness]
    hidden: Mapping[tuple[int, int], str]
    holders: Mapping[str, frozenset[int]]
    changed_buffers: frozenset[str] | None
    wrapped: Mapping[int, str]

    def layer_name(self, layer: int) -> str:
        """The layer as messages name it."""
        if layer == EVERYWHERE:
            return "the model's inputs"
        key = self.layers[layer]
        named = f'layer {layer} "{key.name or "the model"}"'
        return f"{named} (call {key.call})" if key.call else named

    def made_by(self, key: Key) -> int:
        """The layer that made a result."""
        return self.events[key.event].layer


def is_question(function: Any, arguments: Sequence[Any]) -> bool:
    """Whether a torch function asks for shape, format and place alone."""
    name = getattr(function, "__name__", "")
    if name == "type":  # with a format it converts
        return len(arguments) == 1
    if name == "__get__":
        owner = getattr(function, "__self__", None)
        return getattr(owner, "__name__", "") not in _TENSOR_PROPERTIES
    return name in _QUESTIONS


def name_of(function: Any) -> str:
    """The name of a torch function."""
    return getattr(function, "__name__", "") or str(function)
