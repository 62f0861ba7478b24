"""Layers that are alike: of one class, configured alike, with equal weights and equal inputs.

Configuration is what modules say of themselves (`extra_repr`) and the plain values among their
attributes. An attribute that tells each of a kind from every other, such as the number of the
layer, is no configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from partopt.profiler.tracker import Tracker

Key = TypeVar("Key", bound=Hashable)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What `tensor` looks like."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class Call:
    """One call of a layer: what went in, as something to compare, and what came out."""

    inputs: Hashable
    outputs: Any  # a tree with TensorSpecs for its tensors

    @property
    def is_plain(self) -> bool:
        """Whether the output is made of tensors, plain values and containers of them."""
        leaves, _ = tree_flatten(self.outputs)
        return all(isinstance(leaf, (*_PLAIN, TensorSpec)) for leaf in leaves)


class CallRecorder:
    """Records the call of every layer in one forward that `tracker` follows."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.calls: dict[int, Call] = {}
        self._depth = 0

    def __enter__(self) -> CallRecorder:
        self._handles = [
            handle
            for module in self.tracker.modules.values()
            for handle in (
                module.register_forward_pre_hook(self._before),
                module.register_forward_hook(self._after, with_kwargs=True),
            )
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, _module: nn.Module, _inputs: Any) -> None:
        self._depth += 1

    def _after(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            outputs = tree_map_only(Tensor, TensorSpec.of, output)
            self.calls[self.tracker.current] = Call(_comparable((args, kwargs)), outputs)


def _comparable(value: Any) -> Hashable:
    """Shapes of tensors, plain values as they are, of anything else the class."""
    leaves, form = tree_flatten(value)
    return str(form), tuple(
        TensorSpec.of(leaf)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, _PLAIN)
        else type(leaf)
        for leaf in leaves
    )


def group_alike(
    modules: Mapping[Key, nn.Module], inputs: Mapping[Key, Hashable] | None = None
) -> list[list[Key]]:
    """The keys of modules that are alike, and get alike inputs if those are given.

    Groups, and keys in them, are in the order given.
    """
    groups: defaultdict[Hashable, list[Key]] = defaultdict(list)
    for key, module in modules.items():
        groups[_weights(module), (inputs or {}).get(key)].append(key)
    return [part for group in groups.values() for part in _split_by_attributes(group, modules)]


def _weights(module: nn.Module) -> Hashable:
    """Classes, configuration, parameters and buffers of a module and all that it holds."""
    return (
        tuple((name, type(inner), inner.extra_repr()) for name, inner in module.named_modules()),
        tuple((name, TensorSpec.of(each)) for name, each in module.named_parameters()),
        tuple((name, TensorSpec.of(each)) for name, each in module.named_buffers()),
        module.training,
    )


def _split_by_attributes(group: list[Key], modules: Mapping[Key, nn.Module]) -> Iterator[list[Key]]:
    """The members that have the same plain attributes, apart from those that number them."""
    attributes = [dict(_attributes(modules[key])) for key in group]
    names = {name for each in attributes for name in each}
    shared = sorted(
        name for name in names if not _is_a_number([each.get(name) for each in attributes])
    )
    parts: defaultdict[Hashable, list[Key]] = defaultdict(list)
    for key, each in zip(group, attributes, strict=True):
        parts[tuple(each.get(name) for name in shared)].append(key)
    yield from parts.values()


def _is_a_number(values: list[Hashable]) -> bool:
    """Whether the values tell every member from every other."""
    return len(set(values)) == len(values)


def _attributes(module: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if not name.startswith("_"):
                if isinstance(value, list | tuple) and _all_plain(value):
                    yield (path, name), tuple(value)
                elif isinstance(value, _PLAIN):
                    yield (path, name), value


def _all_plain(values: Iterable[object]) -> bool:
    return all(isinstance(value, _PLAIN) for value in values)
