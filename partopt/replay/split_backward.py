"""A backward in two parts: first the gradients of a stage's inputs, later those of its weights.

After Qi et al., Zero Bubble Pipeline Parallelism (2024), as torch.distributed.pipelining does it:
the first part runs the graph from the outputs to the inputs and keeps the gradients that arrive at
nodes where a way to a weight branches off; the second goes on from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# trunk    nodes between the outputs and the inputs
# branch   a node of the trunk from which a way leads to a weight outside of the trunk

Arrived = dict[Node, tuple[Tensor | None, ...]]  # gradients that came to branches


class WeightPart:
    """The second part of a backward; it keeps the graph that it needs."""

    def __init__(
        self,
        arrived: Arrived,
        whole: set[Node],
        branches: dict[Node, set[int]],
        weights: Sequence[Tensor],
    ) -> None:
        self._arrived = arrived
        self._whole = whole
        self._branches = branches
        self._weights = list(weights)

    def run(self) -> None:
        """Add the gradients of the weights to their `.grad`."""
        for nodes, weights in _groups(self._branches):
            self._run_group(nodes, [self._weights[weight] for weight in weights])

    def _run_group(self, nodes: Sequence[Node], weights: Sequence[Tensor]) -> None:
        """The gradients of weights that no branch but `nodes` leads to."""
        edges, gradients = [], []
        for node in nodes:
            for number, gradient in enumerate(self._arrived.get(node, ())):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        if not edges:
            return
        # from one branch the gradient flows into the next, too, where all of it has arrived
        whole = self._whole & self._arrived.keys()
        handles = [
            node.register_prehook(lambda _, arrived=self._arrived[node]: arrived)
            for node in nodes
            if node in whole
        ]
        try:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=list(weights))
        finally:
            for handle in handles:
                handle.remove()


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[list[Tensor], WeightPart]:
    """The gradients of `inputs`, leaves of the graph, and what is left to do for `weights`."""
    ends = [get_gradient_edge(tensor).node for tensor in inputs]
    roots = [get_gradient_edge(tensor).node for tensor in outputs]
    above = _nodes_above(roots)
    trunk = _climb(ends, above)
    apart = set(roots) - trunk  # of outputs that depend on no input
    branches = _branches(weights, above, trunk, apart)
    arrived: Arrived = {}
    handles = [
        node.register_prehook(partial(arrived.__setitem__, node))
        for node in branches
        if node in trunk
    ]
    try:
        found = _gradients(outputs, gradients, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for node in branches.keys() & apart:
        arrived[node] = _arriving_at(node, outputs, gradients)
    return found, WeightPart(arrived, trunk, branches, weights)


def _gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    if not outputs or not inputs:
        return [torch.zeros_like(leaf) for leaf in inputs]
    found = torch.autograd.grad(
        outputs, list(inputs), list(gradients), retain_graph=True, allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
        for leaf, gradient in zip(inputs, found, strict=True)
    ]


def _nodes_above(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """The nodes that lead to every node below the roots."""
    above: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(above)
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is not None:
                if child not in above:
                    above[child] = []
                    waiting.append(child)
                above[child].append(node)
    return above


def _climb(ends: Iterable[Node], above: dict[Node, list[Node]]) -> set[Node]:
    """The nodes from the `ends` up."""
    reached: set[Node] = set()
    waiting = [end for end in ends if end in above]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(above[node])
    return reached


def _branches(
    weights: Sequence[Tensor],
    above: dict[Node, list[Node]],
    trunk: set[Node],
    apart: set[Node],
) -> dict[Node, set[int]]:
    """The nodes of the trunk, and roots `apart` from it, from which ways lead to which weights."""
    branches: defaultdict[Node, set[int]] = defaultdict(set)
    for number, weight in enumerate(weights):
        reached: set[Node] = set()
        waiting = [get_gradient_edge(weight).node]
        while waiting:
            node = waiting.pop()
            if node in reached or node not in above:
                continue
            reached.add(node)
            if node in trunk or node in apart:
                branches[node].add(number)
            if node not in trunk:
                waiting.extend(above[node])
    return dict(branches)


def _groups(branches: dict[Node, set[int]]) -> list[tuple[list[Node], list[int]]]:
    """Branches and weights such that those of different groups have nothing in common."""
    groups: list[tuple[list[Node], set[int]]] = []
    for node, weights in branches.items():
        joined = [group for group in groups if group[1] & weights]
        groups = [group for group in groups if not group[1] & weights]
        nodes = [trunk_node for group in joined for trunk_node in group[0]]
        groups.append(([*nodes, node], weights.union(*(group[1] for group in joined))))
    return [(nodes, sorted(weights)) for nodes, weights in groups]


def _arriving_at(
    node: Node, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """What arrives at a root that leads to no input: the gradients of the outputs that it made."""
    arriving: dict[int, Tensor] = {}
    for output, gradient in zip(outputs, gradients, strict=True):
        edge = get_gradient_edge(output)
        if edge.node is node:
            number = edge.output_nr
            arriving[number] = arriving[number] + gradient if number in arriving else gradient
    return tuple(arriving.get(number) for number in range(max(arriving) + 1))
