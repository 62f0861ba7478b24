"""Which layer runs now: the one rule by which time, memory and tensors are charged to layers.

A layer is a unit and the number of its call. It runs from the moment its module is called until the
next unit is called: what runs outside of every unit belongs to the unit entered last, what runs
before the first to the first, and the loss to the last. A unit called inside of another one belongs
to the outer one. So the layers tile the forward without gaps, in execution order, and nothing is
lost.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

Entered = Callable[[int], None]
Left = Callable[[int, Any], None]


class LayerKey(NamedTuple):
    """A unit's name, and which of its calls this is."""

    name: str
    call: int


class Tracker:
    """Follows the forward from layer to layer by hooks on the units."""

    def __init__(self, model: nn.Module, units: list[str]) -> None:
        self.modules = {name: model.get_submodule(name) for name in units}
        self.layers: list[LayerKey] = []
        # layers that the numbered forward ran with gradients switched off
        self.without_graph: set[int] = set()
        # layers that a later forward did not call, or called where the numbered one did not
        self.varied: set[LayerKey] = set()
        self.current = 0
        self._index: dict[LayerKey, int] = {}
        self._calls: Counter[str] = Counter()
        self._called: list[LayerKey] = []
        self._depth = 0
        self._discovering = False

    @property
    def inside_unit(self) -> bool:
        """Whether a unit is running, as opposed to code between units."""
        return self._depth > 0

    def discover(
        self, entered: Entered | None = None, left: Left | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Number the layers by the forward that runs in this context: the first call is layer 0."""
        self.layers, self._index, self.without_graph = [], {}, set()
        return self.watch(entered, left, discovering=True)

    @contextlib.contextmanager
    def watch(
        self, entered: Entered | None = None, left: Left | None = None, discovering: bool = False
    ) -> Iterator[None]:
        """Follow one forward, and call back at changes of layer and ends of units.

        `entered(layer)` is called at each change of layer, `left(layer, output)` at each end of a
        unit.
        """
        self._calls.clear()
        self._called = []
        self.current, self._depth, self._discovering = 0, 0, discovering
        handles = []
        for name, module in self.modules.items():
            # before the module's own hooks, which may gather its input
            before = self._before(name, entered)
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(self._after(left)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._called != self.layers:
            self.varied |= set(self._called).symmetric_difference(self.layers) or set(self.layers)

    def _before(self, name: str, entered: Entered | None) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            layer = self._layer(name)
            if self._discovering and not torch.is_grad_enabled():
                self.without_graph.add(layer)
            if layer != self.current:
                self.current = layer
                if entered is not None:
                    entered(layer)

        return hook

    def _after(self, left: Left | None) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0 and left is not None:
                left(self.current, output)

        return hook

    def _layer(self, name: str) -> int:
        """The number of the layer that begins.

        A call that the numbered forward did not make stays with the layer before it.
        """
        key = LayerKey(name, self._calls[name])
        self._calls[name] += 1
        self._called.append(key)
        if self._discovering and key not in self._index:
            self._index[key] = len(self.layers)
            self.layers.append(key)
        return self._index.get(key, self.current)
