"""An execution as Chakra execution traces, for ASTRA-sim and others that read them.

A file a rank: messages of Protocol Buffers, each behind its length as a varint; first a
`GlobalMetadata`, then the `Node`s. Numbers of fields and values are those of Chakra's published
schema, schema/protobuf/et_def.proto of MLCommons Chakra, and attributes have the types that its
feeders read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

from partopt.errors import PartoptError
from partopt.report.execution_graph import ExecutionGraph
from partopt.report.rank_nodes import COLLECTIVE, COMPUTE, RECEIVE, SEND, Node
from partopt.simulator.execution import Execution

MOST_ACTIONS = 1_000_000  # some 300 MB

_VERSION = "0.0.4"  # of the schema, as Chakra's own generator writes it
_TYPES = {COMPUTE: 4, SEND: 5, RECEIVE: 6, COLLECTIVE: 7}  # NodeType
_COLLECTIVES = {"allreduce": 0, "allgather": 2, "reducescatter": 7}  # CollectiveCommType
_CACHED = 65_536  # numbers and attributes come again and again
_VARINT, _LENGTH = 0, 2  # wire types
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29  # fields of AttributeProto's value


def write(execution: Execution) -> Iterator[tuple[str, bytes]]:
    """The files, by what their names end in: `.0.et` of rank 0, and `.comm_groups.json`.

    Every rank of the topology has one. Raises PartoptError above MOST_ACTIONS.
    """
    actions = len(execution.order.kind)
    if actions > MOST_ACTIONS:
        raise PartoptError(
            f"an execution graph of {actions:,} actions; {MOST_ACTIONS:,} are written at most",
            "simulate fewer `microbatches`",
            code="too-many-actions",
            actions=actions,
            limit=MOST_ACTIONS,
        )
    graph = ExecutionGraph(execution)
    head = _behind_length(_metadata(execution))
    for rank in range(execution.plan.topology.devices):
        nodes = graph.nodes(rank) or [Node(1, "idle", COMPUTE, ())]
        yield f".{rank}.et", b"".join([head, *_nodes(nodes, rank)])
    groups = {str(number): list(ranks) for ranks, number in graph.groups.items()}
    yield ".comm_groups.json", json.dumps(groups).encode() + b"\n"


def _nodes(nodes: list[Node], rank: int) -> Iterator[bytes]:
    """The nodes of a rank; their times are whole microseconds, which add up to the rank's."""
    exact, written = 0.0, 0
    for node in nodes:
        exact += node.seconds
        micros = round(exact * 1e6) - written
        written += micros
        yield _behind_length(_node(node, rank, micros))


def _node(node: Node, rank: int, micros: int) -> bytes:
    parts = [
        _field(1, node.number),
        _text(2, node.name),
        _field(3, _TYPES[node.does]),
        _bytes(5, b"".join(map(_varint, node.after))) if node.after else b"",
        _field(6, round(node.start_s * 1e6)),
        _field(7, micros),
        *(_bytes(10, attribute) for attribute in _attributes(node, rank)),
    ]
    return b"".join(parts)


def _attributes(node: Node, rank: int) -> Iterator[bytes]:
    yield _attribute("is_cpu_op", _BOOL, 0)
    if node.does == COMPUTE:
        return
    yield _attribute("comm_size", _INT64, node.size_bytes)
    if node.does == COLLECTIVE:
        yield _attribute("comm_type", _INT64, _COLLECTIVES[node.kind])
        yield _text(1, "pg_name") + _text(_STRING, str(node.group))
        return
    ends = (rank, node.peer) if node.does == SEND else (node.peer, rank)
    yield _attribute("comm_src", _INT32, ends[0])
    yield _attribute("comm_dst", _INT32, ends[1])
    yield _attribute("comm_tag", _INT32, node.tag)


def _metadata(execution: Execution) -> bytes:
    plan = execution.plan
    about = {
        "model": plan.profile.name,
        "schedule": plan.schedule,
        "planner": plan.planner,
        "topology": plan.topology.name,
    }
    if plan.profile.estimated is not None:
        about["estimated"] = plan.profile.estimated
    attributes = [_text(1, name) + _text(_STRING, value) for name, value in about.items()]
    return _text(1, _VERSION) + b"".join(_bytes(2, each) for each in attributes)


@lru_cache(_CACHED)
def _attribute(name: str, kind: int, value: int) -> bytes:
    return _text(1, name) + _varint(kind << 3 | _VARINT) + _varint(value)


def _field(number: int, value: int) -> bytes:
    """A number that is not negative; nothing for 0, which is what a reader takes it for."""
    return _varint(number << 3 | _VARINT) + _varint(value) if value else b""


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH) + _behind_length(content)


def _behind_length(content: bytes) -> bytes:
    return _varint(len(content)) + content


@lru_cache(_CACHED)
def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have their highest bit set."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
