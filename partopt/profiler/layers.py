"""Which layer runs now: the one rule by which time, memory and tensors are charged to layers.

A layer is a unit and the number of its call. In the forward it runs from the moment its module is
called until the next unit is called: what runs outside of every unit belongs to the unit entered
last, what runs before the first to the first, and the loss to the last. A unit called inside of
another one belongs to the outer one. So the layers tile the forward without gaps.

In the backward every node of the autograd graph carries the number of its creation: the numbers at
which the layers began determine the layer of every node. The engine runs the ready node with the
highest number first, which on one device is the reverse order of creation, so that a hook is needed
only at the first node of every layer. A custom Function makes its one node before what it calls
runs: where that is layers, as in a reentrant checkpoint, the first of them has the node.
AccumulateGrad nodes carry no number and need no hook: one runs when its gradient is complete, after
the last node that contributes to it, which belongs to the first layer that uses the parameter.
Hooks on nodes leave the forward alone: in-place operations, shared modules and several calls of one
module work, where full backward hooks on modules do not.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

Node = Any  # torch.autograd.graph.Node
Entered = Callable[[int], None]
Left = Callable[[int, Any], None]
_UNNUMBERED = 2**63  # AccumulateGrad's number is the largest there is: it always runs at once


@contextlib.contextmanager
def remove_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when this context ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class LayerKey(NamedTuple):
    """A unit's name, and which of its calls this is."""

    name: str
    call: int


class Tracker:
    """Follows the forward from layer to layer by hooks on the units.

    `layers` are numbered by the forward in `discover`. Of these `without_graph` ran with gradients
    switched off, and no node is theirs; `varied` are those that a later forward did not call, and
    calls that only a later one made. `began` has, of the forward that was followed last, the number
    of the autograd node with which every layer began, and the layer.
    """

    def __init__(self, model: nn.Module, units: list[str]) -> None:
        self.modules = {name: model.get_submodule(name) for name in units}
        self.layers: list[LayerKey] = []
        self.without_graph: set[int] = set()
        self.varied: set[LayerKey] = set()
        self.current = 0
        self.began: list[tuple[int, int]] = []
        self._ended = 0
        self._numbers: dict[LayerKey, int] = {}
        self._first_in_function: set[int] = set()  # the first layers that a custom Function calls
        self._depth = 0

    @property
    def inside_unit(self) -> bool:
        """Whether a unit is running, as opposed to code between units."""
        return self._depth > 0

    @property
    def nodes(self) -> Counter[int]:
        """How many nodes of the graph every layer made in the forward that was followed last."""
        nodes: Counter[int] = Counter()
        for (first, layer), (after, _) in itertools.pairwise([*self.began, (self._ended, -1)]):
            nodes[layer] += after - first
        return nodes

    def discover(
        self, entered: Entered | None = None, left: Left | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Number the layers by the forward that runs in this context: the first call is layer 0."""
        self.layers, self._numbers = [], {}
        self.without_graph, self._first_in_function = set(), set()
        return self.watch(entered, left, discovering=True)

    @contextlib.contextmanager
    def watch(
        self, entered: Entered | None = None, left: Left | None = None, discovering: bool = False
    ) -> Iterator[None]:
        """Follow one forward.

        `entered(layer)` is called at every change of layer, `left(layer, output)` at every end of a
        unit. A call that the numbered forward did not make stays with the layer before it.
        """
        calls: Counter[str] = Counter()
        called: list[LayerKey] = []
        self._depth, self.current = 0, 0
        self.began = [(next_number(), 0)]

        def begin(name: str) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            key = LayerKey(name, calls[name])
            calls[name] += 1
            called.append(key)
            if discovering and key not in self._numbers:
                self._numbers[key] = len(self.layers)
                self.layers.append(key)
            layer, number = self._numbers.get(key, self.current), next_number()
            if discovering and not torch.is_grad_enabled():
                is_first = self.began[-1][0] < number - 1
                firsts = (
                    self._first_in_function if is_first and _in_function() else self.without_graph
                )
                firsts.add(layer)
            if layer != self.current:
                self.current = layer
                self.began.append((number - (layer in self._first_in_function), layer))
                if entered is not None:
                    entered(layer)

        def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0 and left is not None:
                left(self.current, output)

        handles = []
        for name, module in self.modules.items():
            # before the module's hooks, which may gather its input
            before = module.register_forward_pre_hook
            handles.append(before(lambda _module, _inputs, name=name: begin(name), prepend=True))
            handles.append(module.register_forward_hook(end))
        with remove_after(handles):
            yield
        self._ended = next_number()
        if called != self.layers:
            self.varied |= set(called).symmetric_difference(self.layers) or set(self.layers)


class Backward:
    """The numbered nodes of the backward of `loss`, as they run, with their layers.

    `began` is that of the tracker that followed the forward.
    """

    def __init__(self, loss: Tensor, began: list[tuple[int, int]]) -> None:
        starts = [number for number, _ in began]
        numbered = sorted(_numbered_nodes(loss.grad_fn), key=lambda pair: -pair[0])
        self.layers: dict[Node, int] = {
            node: began[max(bisect.bisect_right(starts, number) - 1, 0)][1]
            for number, node in numbered
        }
        self._first = began[-1][1]

    def call_at_changes(self, entered: Entered) -> None:
        """Have it call `entered(layer)` where it comes from the layer of the loss to another."""
        self._announce(self.layers, self._first, entered)

    def input_gradients(self, entered: Entered) -> list[GradientEdge]:
        """The edges that carry gradients from layer to layer.

        A backward for these alone skips the gradients of weights, since no node computes what leads
        to no edge that was asked for. It calls `entered(layer)` at its first node and where it
        changes layer: what autograd does before it grows with the edges.
        """
        self._announce(self._leading, None, entered)  # what is asked for need not run itself
        return [GradientEdge(node, index) for node, index in self._edges]

    def call_at_partings(self, arrived: Callable[[int, Tensor], None]) -> None:
        """Have it call `arrived(layer, gradient)` where ways part to a layer before and to weights.

        What arrives there is what the first part of a backward keeps for the second: gradients of
        the layers' inputs come in the first, those of weights in the second.
        """

        def pass_on(gradients: Any, layer: int) -> None:
            for gradient in gradients:
                if gradient is not None:
                    arrived(layer, gradient)

        for node, layer in self.layers.items():
            following = [after for after, _ in node.next_functions if after is not None]
            if node in self._leading and any(
                self.layers.get(after, layer) == layer and after not in self._leading
                for after in following
            ):
                node.register_prehook(lambda gradients, layer=layer: pass_on(gradients, layer))

    def _announce(self, running: Collection[Node], previous: int | None, entered: Entered) -> None:
        for node, layer in self.layers.items():
            if node in running and layer != previous:
                node.register_prehook(lambda _gradients, layer=layer: entered(layer))
                previous = layer

    @cached_property
    def _edges(self) -> list[tuple[Node, int]]:
        """The edges between layers: the node that every one leads to, and its input."""
        edges = (
            edge
            for node, layer in self.layers.items()
            for edge in node.next_functions
            if self.layers.get(edge[0], layer) != layer
        )
        return [*dict.fromkeys(edges)]

    @cached_property
    def _leading(self) -> set[Node]:
        """The nodes that lead to an edge between layers."""
        ends, leading = {node for node, _ in self._edges}, set()
        for node in reversed(self.layers):  # those that a node leads to come before it
            if any(after in ends or after in leading for after, _ in node.next_functions):
                leading.add(node)
        return leading


def _in_function() -> bool:
    """Whether a custom Function calls what runs now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.autograd.Function.apply.__code__:
        frame = frame.f_back
    return frame is not None


def next_number() -> int:
    """The number that the next node created on this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def _numbered_nodes(root: Node) -> Iterator[tuple[int, Node]]:
    """Every node that `root` reaches, with its number, without the AccumulateGrad nodes."""
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number < _UNNUMBERED:
            yield number, node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
