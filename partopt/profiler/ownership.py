"""The layer of each node of the autograd graph, and hooks where the backward changes layer.

Every node carries the number of its creation, so the numbers at which the layers of the forward
began determine a node's layer. The engine runs the ready node with the highest number first, which
on one device is exactly the reverse order of creation: sorted that way, a hook is needed only at
the first node of each layer. AccumulateGrad nodes carry no number and need no hook: one runs when
its gradient is complete, after the last node that contributes to it, which belongs to the first
layer that uses the parameter, its owner. Hooks on nodes leave the forward alone: in-place
operations, shared modules and several calls of one module all work, where full backward hooks on
modules do not.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any  # torch.autograd.graph.Node
_UNNUMBERED = 2**63  # AccumulateGrad's number is the largest there is: it always runs at once


def next_node_number() -> int:
    """The number that the next node created on this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def hook_layer_changes(
    loss: Tensor, began: list[tuple[int, int]], entered: Callable[[int], None]
) -> None:
    """Have the backward of `loss` call `entered(layer)` where it comes to another layer.

    `began` holds, in the order of the forward, the node number at which each layer began, and the
    layer.
    """
    _announce_changes(_owned_nodes(loss, began), began[-1][1], entered)


def hook_input_gradients(
    loss: Tensor, began: list[tuple[int, int]], entered: Callable[[int], None]
) -> list[GradientEdge]:
    """The edges of the graph that lead from one layer to another: gradients of layers' inputs.

    A backward for these edges alone skips the gradients of weights, since no node computes what
    leads to no edge that was asked for. Hooks are put where this backward changes layer, as by
    `hook_layer_changes`, and at its first node: what autograd does before it grows with the edges.
    """
    owned = _owned_nodes(loss, began)
    edges = _edges_between(owned)
    runs = _leading(owned, {node for node, _ in edges})  # one that is asked for need not run itself
    running = [(layer, node) for layer, node in owned if node in runs]
    _announce_changes(running, None, entered)
    return [GradientEdge(node, index) for node, index in edges]


def hook_parting_nodes(
    loss: Tensor, began: list[tuple[int, int]], arrived: Callable[[int, Tensor], None]
) -> None:
    """Have the backward of `loss` call `arrived(layer, gradient)` where ways part.

    One leads to a layer before, another to weights alone. What arrives there is what the first part
    of a backward keeps for the second: gradients of the layers' inputs come in the first, those of
    weights in the second.
    """
    owned = _owned_nodes(loss, began)
    runs = _leading(owned, {node for node, _ in _edges_between(owned)})
    layers = {node: layer for layer, node in owned}
    for layer, node in owned:
        following = [each for each, _ in node.next_functions if each is not None]
        if node in runs and any(
            layers.get(each, layer) == layer and each not in runs for each in following
        ):
            node.register_prehook(_pass_on(layer, arrived))


def _edges_between(owned: list[tuple[int, Node]]) -> set[tuple[Node, int]]:
    """The edges that lead from one layer to another: the node that they lead to, and its input."""
    layers = {node: layer for layer, node in owned}
    return {
        (following, index)
        for layer, node in owned
        for following, index in node.next_functions
        if layers.get(following, layer) != layer
    }


def _leading(owned: list[tuple[int, Node]], ends: set[Node]) -> set[Node]:
    """The nodes that lead to one of `ends`."""
    leads, found = set(ends), set()
    for _, node in reversed(owned):  # those that a node leads to come before it
        if any(following in leads for following, _ in node.next_functions):
            leads.add(node)
            found.add(node)
    return found


def _owned_nodes(loss: Tensor, began: list[tuple[int, int]]) -> list[tuple[int, Node]]:
    """The layer of every numbered node, and the node, in the order of the backward."""
    starts = [number for number, _ in began]
    numbered = sorted(_numbered_nodes(loss.grad_fn), key=lambda pair: -pair[0])
    return [
        (began[max(bisect.bisect_right(starts, number) - 1, 0)][1], node)
        for number, node in numbered
    ]


def _announce_changes(
    owned: list[tuple[int, Node]], first: int | None, entered: Callable[[int], None]
) -> None:
    """Hook each node whose layer is not that of the node before it, at the beginning `first`."""
    previous = first
    for layer, node in owned:
        if layer != previous:
            node.register_prehook(_announce(layer, entered))
            previous = layer


def _announce(layer: int, entered: Callable[[int], None]) -> Callable[[Any], None]:
    def prehook(_gradients: Any) -> None:
        entered(layer)

    return prehook


def _pass_on(layer: int, arrived: Callable[[int, Tensor], None]) -> Callable[[Any], None]:
    def prehook(gradients: Any) -> None:
        for gradient in gradients:
            if gradient is not None:
                arrived(layer, gradient)

    return prehook


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
