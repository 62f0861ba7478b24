r"""Graph files of the published PipeDream profiler (public repository of the SOSP 2019 paper).

A line is a node, a tab-indented line an edge; milliseconds and bytes (the first two lines are one):

    node2 -- Conv2d(3, 64) -- forward_compute_time=22.3, backward_compute_time=24.6, \
        activation_size=1644167168.0, parameter_size=7168.0
        node1 -- node2

An activation size may be a list, `[a; b]`: their sum; a last field `stage_id=3` is ignored.
Batch, device and versions are not recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from partopt import documents
from partopt.documents import Note
from partopt.documents.profile import (
    Count,
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
    StashGroup,
    Tensor,
)
from partopt.errors import PartoptError

_NODE = re.compile(
    r"node(?P<number>[0-9]{1,9}) -- (?P<module>.*?) -- (?P<fields>forward_compute_time=.*)"
)
_EDGE = re.compile(r"\s+node(?P<source>[0-9]{1,9}) -- node(?P<target>[0-9]{1,9})\s*")
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_EXAMPLE = (
    "a node reads: node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, ..., "
    "parameter_size=7168.0; an edge, tab-indented: node1 -- node2"
)
_WRONG_FILE = "is this the file that the profiler wrote?"
_VIEWS = ("View", "__getitem__")
_SHORT_BACKWARD = 0.1  # of the forward: a likely measuring fault
_LARGEST = 2.0**63  # no time in ms and no size in bytes comes near it


@dataclass(frozen=True)
class _Node:
    number: int
    module: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def type(self) -> str:
        return self.module.split("(")[0]


def read(content: str, where: str, name: str, microbatch_size: int | None = None) -> Profile:
    """The graph as a profile of one measurement; layers in topological order, ties by node number.

    Sources named `Input*` carry no cost and belong to the first layer: what later layers take of
    them is carried from there. A sink named `__getitem__*` is dropped. Without `microbatch_size`,
    which the file does not record, 1 is assumed and noted; a backward under a tenth of its forward
    is noted too. Raises PartoptError with every malformed line.
    """
    if microbatch_size is not None:
        hint = "it is the number of samples that were measured at once"
        documents.check_option("microbatch_size", microbatch_size, Count, hint)
    graph = _graph(content, where)
    for sink in [n for n in graph if graph.out_degree(n) == 0]:
        if graph.nodes[sink]["node"].module.startswith("__getitem__"):
            graph.remove_node(sink)
    order = [graph.nodes[n]["node"] for n in nx.lexicographical_topological_sort(graph)]
    inputs = [
        node
        for node in order
        if graph.in_degree(node.number) == 0 and node.module.startswith("Input")
    ]
    layers = [node for node in order if node not in inputs]
    if not layers:
        raise _fault(f"{where}: no layers: every node is an Input", _WRONG_FILE)
    index = {node.number: position for position, node in enumerate(layers)}
    index |= {node.number: 0 for node in inputs}
    profile = Profile(
        model=Model(name=name, entry=where),
        device=Device(name="unknown (imported from PipeDream)"),
        dtype="float32",
        layers=[
            Layer(name=f"node{node.number}", type=node.type, parameter_bytes=node.parameter_bytes)
            for node in layers
        ],
        measurements=[
            Measurement(
                microbatch_size=microbatch_size or 1,
                layers=[
                    LayerMeasurement(
                        forward_s=node.forward_s,
                        backward_s=node.backward_s,
                        output_bytes=node.activation_bytes,
                    )
                    for node in layers
                ],
                tensors=list(_tensors(graph, order, index)),
                stash_groups=_stash_groups(graph, order, index),
            )
        ],
        notes=[*_assumed_size(microbatch_size, where), *_short_backwards(layers, where)],
    )
    documents.refuse(profile.faults(), where)
    return profile


def _tensors(graph: nx.DiGraph[int], order: list[_Node], index: dict[int, int]) -> Iterator[Tensor]:
    """The results that later layers use."""
    for node in order:
        consumers = sorted({index[n] for n in graph.successors(node.number)} - {index[node.number]})
        if consumers and node.activation_bytes:
            yield Tensor(
                producer=index[node.number], consumers=consumers, bytes=node.activation_bytes
            )


def _stash_groups(
    graph: nx.DiGraph[int], order: list[_Node], index: dict[int, int]
) -> list[StashGroup]:
    """Every result, kept by the layer that makes it and those that use it.

    The file does not say which the backward really needs. An operation in place, a view and an item
    of a tuple have no storage of their own: they use the largest of what they are made from.
    """
    storage: dict[int, _Node] = {}
    kept: dict[int, set[int]] = {}
    for node in order:
        sources = [storage[n] for n in graph.predecessors(node.number)]
        has_storage = not sources or not ("inplace" in node.module or node.type in _VIEWS)
        storage[node.number] = root = (
            node
            if has_storage
            else max(sources, key=lambda source: (source.activation_bytes, -source.number))
        )
        users = {index[n] for n in graph.successors(node.number)}
        kept.setdefault(root.number, set()).update(users | {index[node.number]})
    roots = [node for node in order if storage[node.number] is node and node.activation_bytes]
    return [
        StashGroup(layers=sorted(kept[root.number]), bytes=root.activation_bytes) for root in roots
    ]


def _graph(content: str, where: str) -> nx.DiGraph[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    edges: list[tuple[int, int, int]] = []
    faults: list[PartoptError] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if edge := _EDGE.fullmatch(line):
            edges.append((number, int(edge["source"]), int(edge["target"])))
        elif line.strip():
            try:
                node = _node(line)
                if node.number in graph:
                    raise _fault(
                        f"node{node.number} is listed twice", "are these two files in one?"
                    )
                graph.add_node(node.number, node=node)
            except PartoptError as error:
                faults.append(error.at(f"{where}: line {number}"))
    # also on refused lines
    listed = {
        int(number) for number in re.findall(r"^node([0-9]{1,9})\b", content, re.MULTILINE)
    } | set(graph)
    missing = [(number, end) for number, *ends in edges for end in ends if end not in listed]
    faults += [
        _fault(f"{where}: line {number}: there is no node{end}", "the file may be cut short")
        for number, end in missing
    ]
    graph.add_edges_from((source, target) for _, source, target in edges)
    if faults := faults or _graph_faults(graph, where):
        raise PartoptError.together(faults, file=where)
    return graph


def _graph_faults(graph: nx.DiGraph[int], where: str) -> list[PartoptError]:
    if not graph:
        return [PartoptError(f"{where}: the file is empty", _EXAMPLE, code="empty-file")]
    if nx.is_directed_acyclic_graph(graph):
        return []
    cycle = " -- ".join(f"node{source}" for source, _ in nx.find_cycle(graph))
    return [_fault(f"{where}: the graph has a cycle: {cycle}", "layers cannot feed themselves")]


def _fault(message: str, hint: str) -> PartoptError:
    return PartoptError(message, hint, code="malformed-graph")


def _node(line: str) -> _Node:
    for fault in documents.leaf_faults(line.strip(), "node"):
        raise fault
    match = _NODE.fullmatch(line.strip())
    if match is None:
        raise _fault("not a node and not an edge of a PipeDream graph", _EXAMPLE)
    fields = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,\s]+)", match["fields"]))
    missing = [field for field in _FIELDS if field not in fields]
    if missing:
        raise _fault(f"node{match['number']}: no {missing[0]}", _EXAMPLE)
    forward_ms, backward_ms, activation, parameters = (
        _number(field, fields[field]) for field in _FIELDS
    )
    return _Node(
        number=int(match["number"]),
        module=match["module"],
        forward_s=forward_ms / 1e3,
        backward_s=backward_ms / 1e3,
        activation_bytes=round(activation),
        parameter_bytes=round(parameters),
    )


def _number(field: str, text: str) -> float:
    """A number, or the sum of a list `[a; b]`; not negative, finite."""
    try:
        value = math.fsum(float(part) for part in text.strip("[] ").split(";"))
    except (ValueError, OverflowError):
        raise _fault(f"{field}: '{text.strip()}' is not a number", _EXAMPLE) from None
    if not 0 <= value < _LARGEST:
        raise _fault(
            f"{field}: {text.strip()} is not a time or a size",
            "measure again: it must be finite and not negative",
        )
    return value


def _assumed_size(microbatch_size: int | None, where: str) -> Iterator[Note]:
    if microbatch_size is None:
        yield Note(
            code="assumed-microbatch-size",
            text=(
                f"{where}: the file does not record its microbatch size; 1 is assumed, so "
                "samples/s means microbatches/s"
            ),
            fields={"microbatch_size": 1},
        )


def _short_backwards(layers: list[_Node], where: str) -> Iterator[Note]:
    for node in layers:
        if node.backward_s < _SHORT_BACKWARD * node.forward_s and node.parameter_bytes:
            yield Note(
                code="short-backward",
                text=(
                    f"{where}: node{node.number} ({node.type}): the backward takes "
                    f"{node.backward_s * 1e3:g} ms, the forward {node.forward_s * 1e3:g} ms: a "
                    "measuring fault? It is kept as it is"
                ),
                fields={"layer": f"node{node.number}"},
            )
