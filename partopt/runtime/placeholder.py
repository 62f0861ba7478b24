"""Tensors without values that stand for results of other stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map_only

from partopt.errors import PartoptError
from partopt.runtime.events import Key, Likeness, is_question

Fetch = Callable[["Placeholder"], Tensor]


class Placeholder(Tensor):
    """Answers for shape, format and place; computing with it uses the tensor that was received."""

    key: Key
    fetch: Fetch

    @staticmethod
    def __new__(cls, likeness: Likeness, _key: Key, _fetch: Fetch) -> Placeholder:
        """A tensor like `likeness`, without memory."""
        return Tensor._make_wrapper_subclass(
            cls,
            likeness.shape,
            strides=likeness.stride or None,
            dtype=likeness.dtype,
            device=likeness.device,
            requires_grad=likeness.gradient,
        )

    def __init__(self, _likeness: Likeness, key: Key, fetch: Fetch) -> None:
        self.key = key
        self.fetch = fetch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function on the tensors received, unless it asks for shape and format alone."""
        options = kwargs or {}
        if is_question(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        received, received_options = tree_map_only(
            Placeholder, lambda each: each.fetch(each), (args, options)
        )
        return func(*received, **received_options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """No operation reaches a placeholder: it has no values."""
        raise RuntimeError(f"{func} reached a placeholder")

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.key)})"


class Absent(Placeholder):
    """An input of the model that was not given to the stage `named`; PartoptError where needed."""

    named: str

    @staticmethod
    def __new__(cls, likeness: Likeness, _named: str) -> Absent:
        """A tensor like `likeness`, without memory."""
        return Placeholder.__new__(cls, likeness, _NO_KEY, _refuse)  # type: ignore[return-value]

    def __init__(self, likeness: Likeness, named: str) -> None:
        super().__init__(likeness, _NO_KEY, _refuse)
        self.named = named

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """No operation goes without the values."""
        _refuse(next(each for each in tree_leaves(args) if isinstance(each, Absent)))


_NO_KEY = Key(-1, 0)


def _refuse(absent: Placeholder) -> Tensor:
    assert isinstance(absent, Absent)
    raise PartoptError(
        f"{absent.named} computes with the model's inputs",
        "call it with `inputs`",
        code="inputs-missing",
    )


def fill(value: Any, real: Callable[[Tensor], Tensor]) -> Any:
    """`value`, nested as arguments are, with `real(tensor)` for each tensor in it.

    What is most common is done without torch's general walk over trees.
    """
    if isinstance(value, Tensor):
        return real(value)
    kind = type(value)
    if kind is tuple:
        return tuple([fill(each, real) for each in value])
    if kind is list:
        return [fill(each, real) for each in value]
    if kind is dict:
        return {key: fill(each, real) for key, each in value.items()}
    if kind in SUPPORTED_NODES:
        return tree_map_only(Tensor, real, value)
    return value
