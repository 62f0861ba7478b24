"""The model as people train it: under autocast, and compiled layer by layer.

Under autocast the forward and the loss run in fewer bits, the backward outside. The weights stay
float32; `torch.autocast` casts them once a forward and keeps the copies.

What `torch.compile` compiles is a module's `forward`, not its call: the hooks that tell the layers
apart stay outside of the compiled code. A model that comes compiled is opened first, whole or in
parts, because the graph of a whole model has no layers to time; its layers are compiled then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler.device import choose_dtype, is_out_of_memory
from partopt.profiler.settings import Subject
from partopt.profiler.source import describe
from partopt.profiler.step import loss_of_output
from partopt.profiler.weightless import replace_attribute

_WRAPPED = "_orig_mod"  # where the module that torch.compile returns holds the one it was given
_VARIANTS = 8  # graphs of one layer: with and without gradients, and what its code makes of it


@contextlib.contextmanager
def under_autocast(subject: Subject) -> Iterator[Subject]:
    """The subject with its forward and its loss under the autocast of its settings, if any."""
    settings = subject.settings
    if settings.autocast is None:
        yield subject
        return
    dtype, device = choose_dtype(settings.autocast), settings.torch_device
    with replace_attribute(subject.model, "forward", cast(subject.model.forward, device, dtype)):
        loss_fn = cast(subject.loss_fn or loss_of_output, device, dtype)
        yield dataclasses.replace(subject, loss_fn=loss_fn)


def cast(
    function: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """The function under autocast to `dtype`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return function(*arguments, **options)

    return call


@contextlib.contextmanager
def no_cast_cache() -> Iterator[None]:
    """Have autocast cast a weight wherever it is used.

    A copy made by one layer and used by another would pass for a tensor that crosses between them,
    while every stage of a pipeline makes one.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`, where `module` is what that returned."""
    while _WRAPPED in module._modules:
        module = module.get_submodule(_WRAPPED)
    return module


@contextlib.contextmanager
def open_compiled(subject: Subject) -> Iterator[Subject]:
    """The subject with nothing compiled in it; where something was, its settings say `compile`."""
    model = unwrap_compiled(subject.model)
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and unwrap_compiled(child) is not child
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = unwrap_compiled(child)
    calls = [
        (module, module._compiled_call_impl)
        for module in model.modules()
        if module._compiled_call_impl is not None
    ]
    for module, _ in calls:
        module._compiled_call_impl = None
    was_compiled = model is not subject.model or bool(wrapped or calls)
    compiled = subject.settings.compile or was_compiled
    settings = dataclasses.replace(subject.settings, compile=compiled)
    try:
        yield dataclasses.replace(subject, model=model, settings=settings)
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
        for module, call in calls:
            module._compiled_call_impl = call


@contextlib.contextmanager
def compile_units(units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Compile the modules in this context, for the shapes that it meets.

    There are graphs for every unit of one class, and the backward is compiled with the forward.
    Raises PartoptError, when a module is first called, where it cannot be compiled.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    options: list[tuple[Any, str, Any]] = [
        (dynamo, "recompile_limit", len(units) * _VARIANTS),
        (dynamo, "accumulated_recompile_limit", len(units) * _VARIANTS),
        (functorch, "force_non_lazy_backward_lowering", True),
    ]
    with contextlib.ExitStack() as stack:
        for configuration, option, value in options:
            if hasattr(configuration, option):
                stack.enter_context(configuration.patch(option, value))
        stack.callback(torch.compiler.reset)
        for name, module in units.items():
            forward = torch.compile(module.forward, dynamic=False)
            stack.enter_context(replace_attribute(module, "forward", _explain(forward, name)))
        yield


def _explain(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return forward(*arguments, **options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            cause = describe(getattr(error, "inner_exception", error))
            raise PartoptError(
                f"`compile`: layer {name or 'the model'} cannot be compiled: {cause}",
                "it runs without `compile`; on a CPU the compiler needs a C++ compiler (g++)",
                code="compile-failed",
                option="compile",
            ) from error

    return call
