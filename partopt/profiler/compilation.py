"""Layers compiled by `torch.compile`, each on its own, so that time can be taken between them.

What is compiled is a module's `forward`, not its call: the hooks that tell the layers apart stay
outside of the compiled code. A model that comes compiled is opened first, whole or in parts,
because the graph of a whole model has no layers to time; its layers are then compiled each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partopt.documents.profile import StashGroup
from partopt.errors import PartoptError
from partopt.profiler.dataflow import StorageMap
from partopt.profiler.foreign_errors import describe
from partopt.profiler.memory import is_out_of_memory
from partopt.profiler.precision import replace_forward
from partopt.profiler.stash import Kept, stash_groups
from partopt.profiler.step import Inputs, run_loss
from partopt.profiler.subject import Subject
from partopt.profiler.tracker import Tracker

_WRAPPED = "_orig_mod"  # where the module that torch.compile returns holds the one it was given
_VARIANTS = 8  # graphs of one layer: with and without gradients, and what its code makes of it


def opened(module: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`, where `module` is what that returned."""
    while _WRAPPED in module._modules:
        module = module.get_submodule(_WRAPPED)
    return module


@contextlib.contextmanager
def open_compiled(subject: Subject) -> Iterator[Subject]:
    """The subject with nothing compiled in it; where something was, its settings say `compiled`."""
    model = opened(subject.model)
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and opened(child) is not child
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = opened(child)
    calls = [
        (module, module._compiled_call_impl)
        for module in model.modules()
        if module._compiled_call_impl is not None
    ]
    for module, _ in calls:
        module._compiled_call_impl = None
    was_compiled = model is not subject.model or bool(wrapped or calls)
    compiled = subject.settings.compiled or was_compiled
    try:
        yield replace(subject, model=model, settings=replace(subject.settings, compiled=compiled))
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
        for module, call in calls:
            module._compiled_call_impl = call


@contextlib.contextmanager
def compile_units(units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Compile each of the modules in this context, for the shapes that it meets.

    The backward is compiled with the forward. Raises PartoptError, when a module is first called,
    where it cannot be compiled.
    """
    with contextlib.ExitStack() as stack:
        for configuration, option, value in _options(len(units)):
            if hasattr(configuration, option):
                stack.enter_context(configuration.patch(option, value))
        stack.callback(torch.compiler.reset)
        for name, module in units.items():
            forward = torch.compile(module.forward, dynamic=False)
            stack.enter_context(replace_forward(module, _explain(forward, name)))
        yield


def _options(units: int) -> list[tuple[Any, str, Any]]:
    """Options of the compiler: graphs for every unit of one class, and no backward put off."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    return [
        (dynamo, "recompile_limit", units * _VARIANTS),
        (dynamo, "accumulated_recompile_limit", units * _VARIANTS),
        (functorch, "force_non_lazy_backward_lowering", True),
    ]


def _explain(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(*arguments: Any, **options: Any) -> Any:
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
                unit=name,
            ) from error

    return called


def record_stash(subject: Subject, inputs: Inputs, tracker: Tracker) -> list[StashGroup]:
    """Bytes that the layers keep for the backward as they run now, by the set that keeps them.

    A compiled layer recomputes some of what it kept otherwise.
    """
    own, kept = StorageMap(), StorageMap()
    for tensor in [*subject.model.parameters(), *subject.model.buffers()]:
        own.set(tensor, True)
    found: list[Kept] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and own.get(tensor) is None:
            entry = kept.get(tensor)
            if entry is None:
                entry = Kept(set(), tensor.untyped_storage().nbytes(), None)
                kept.set(tensor, entry)
                found.append(entry)
            entry.layers.add(tracker.current)
        return tensor

    with tracker.watch(), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run_loss(subject.model, inputs, subject.loss_fn)
    del loss  # the graph had to live, so that no storage was freed and counted twice
    return stash_groups(found)
