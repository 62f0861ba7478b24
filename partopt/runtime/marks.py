"""Marks in a graph of torch.export: where layers begin and end, and what the model switches.

An exported graph has what is done with tensors. Which layer does it is told by operators without
tensors, which are called where layers begin and end. So is when gradients and autocast go on and
off: torch.export's own regions lose a `no_grad` that lies inside of an autocast. What an exported
graph would lose without a word is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from partopt.errors import PartoptError
from partopt.profiler.fake import replace_attribute

_LIBRARY: Any = torch.library.Library("partopt", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "enter(int layer) -> ()",
    "leave() -> ()",
    "grad(bool enabled) -> ()",
    "autocast(str device, ScalarType dtype, bool enabled, bool cached) -> ()",
    "end_autocast() -> ()",
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], lambda *_: None, "CompositeExplicitAutograd")

ENTER = torch.ops.partopt.enter.default
LEAVE = torch.ops.partopt.leave.default
GRAD = torch.ops.partopt.grad.default
AUTOCAST = torch.ops.partopt.autocast.default
END_AUTOCAST = torch.ops.partopt.end_autocast.default

# by the function that a graph would pass over
_LOST = {
    Tensor.register_hook: "a hook on a tensor",
    Tensor.backward: "a backward within the forward",
    torch.autograd.backward: "a backward within the forward",
    torch.autograd.grad: "a backward within the forward",
}

_begin_inference: Any = torch.inference_mode.__enter__


def is_mark(node: fx.Node) -> bool:
    """Whether a node is one of these operators."""
    return getattr(node.target, "namespace", None) == "partopt"


def mark_of(node: fx.Node) -> str:
    """The name of a mark."""
    return str(node.target).split(".")[1]


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """The context of a forward that is exported: it is marked, or refused with a PartoptError."""
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__
    apply = vars(Function)["apply"].__func__

    def begin(region: Any) -> Any:
        AUTOCAST(region.device, region.fast_dtype, region._enabled, region._cache_enabled)
        with torch._C.DisableTorchFunction():  # torch.export does not see it
            return enter(region)

    def end(region: Any, *raised: Any) -> Any:
        END_AUTOCAST()
        with torch._C.DisableTorchFunction():
            return leave(region, *raised)

    def refuse(kind: type, *arguments: Any, **options: Any) -> Any:
        if kind.__module__ == "torch._library.autograd":  # of an operator, which a graph has whole
            return apply(kind, *arguments, **options)
        raise cannot_export(f"a graph loses the backward of {kind.__name__}")

    with (
        replace_attribute(torch.autocast, "__enter__", begin),
        replace_attribute(torch.autocast, "__exit__", end),
        replace_attribute(torch.inference_mode, "__enter__", _refuse_inference),
        replace_attribute(Function, "apply", classmethod(refuse)),
        _Watch(),
    ):
        yield


class _Watch(TorchFunctionMode):
    """Marks where gradients are switched, and refuses what a graph would lose."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LOST:
            raise cannot_export(f"a graph loses {_LOST[func]}")
        if func is not torch._C._set_grad_enabled:
            return func(*args, **(kwargs or {}))
        GRAD(*args)
        with torch._C.DisableTorchFunction():
            return func(*args)


def _refuse_inference(region: Any) -> Any:
    if region.mode:
        raise cannot_export("a graph loses where inference mode begins")
    return _begin_inference(region)


def cannot_export(why: str) -> PartoptError:
    """The error of a model that cannot be cut by torch.export."""
    return PartoptError(why, "keep the layers that replay names in one stage", code="cannot-export")


class Switches:
    """Does what switches say, where a graph runs."""

    def __init__(self) -> None:
        self._allowed = torch.is_grad_enabled()
        self._regions: list[Any] = []

    def run(self, mark: fx.Node) -> None:
        """Do what a mark says."""
        getattr(self, mark_of(mark))(*mark.args)

    def grad(self, enabled: bool) -> None:
        """Switch gradients, but never on where they were off from the first."""
        torch._C._set_grad_enabled(enabled and self._allowed)

    def autocast(self, device: str, dtype: torch.dtype, enabled: bool, cached: bool) -> None:
        """Begin a region."""
        self._regions.append(torch.autocast(device, dtype, enabled, cached))
        self._regions[-1].__enter__()

    def end_autocast(self) -> None:
        """End the region begun last."""
        self._regions.pop().__exit__(None, None, None)

    def close(self) -> None:
        """End what is left open where a graph stops with an error."""
        while self._regions:
            self.end_autocast()
        self.grad(True)
