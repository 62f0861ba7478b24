"""Reading Chakra execution traces, and executing them on one level without contention.

Written from the published schema and the definition of Protocol Buffers alone, apart from what
writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from partopt.cost.collectives import allreduce_s
from partopt.documents.topology import Topology

COMP, SEND, RECV, COLL = 4, 5, 6, 7
ALL_REDUCE, ALL_GATHER = 0, 2
# fields of AttributeProto by their types
VALUES = {7: int, 9: int, 27: bool, 29: bytes.decode}


class Read(NamedTuple):
    """A node as it was read."""

    id: int
    name: str
    type: int
    data_deps: list[int]
    start_micros: int
    micros: int
    attributes: dict[str, Any]


def varints(content: bytes) -> list[int]:
    """The numbers that packed varints spell."""
    found, value, shift = [], 0, 0
    for byte in content:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            found.append(value)
            value = shift = 0
    assert shift == 0, "a varint without an end"
    return found


def leading(content: bytes, at: int) -> tuple[int, int]:
    """The varint at a place, and the place behind it."""
    end = at
    while content[end] & 0x80:
        end += 1
    return varints(content[at : end + 1])[0], end + 1


def delimited(content: bytes) -> list[bytes]:
    """The messages of a file, each behind its length."""
    found, at = [], 0
    while at < len(content):
        size, at = leading(content, at)
        assert at + size <= len(content)
        found.append(content[at : at + size])
        at += size
    return found


def fields(message: bytes) -> list[tuple[int, Any]]:
    """The fields of a message: numbers and bytes."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(message):
        key, at = leading(message, at)
        if key & 7 == 0:
            value, at = leading(message, at)
            found.append((key >> 3, value))
        else:
            assert key & 7 == 2
            size, at = leading(message, at)
            found.append((key >> 3, message[at : at + size]))
            at += size
    return found


def attribute(message: bytes) -> tuple[str, Any]:
    """The name and the value of an AttributeProto."""
    (one, name), (kind, value) = fields(message)
    assert one == 1
    return name.decode(), VALUES[kind](value)


def read_node(message: bytes) -> Read:
    """A Node."""
    own = fields(message)
    single = dict(own)
    return Read(
        single[1],
        single[2].decode(),
        single[3],
        varints(single.get(5, b"")),
        single.get(6, 0),
        single.get(7, 0),
        dict(attribute(value) for number, value in own if number == 10),
    )


def read_trace(path: Path) -> tuple[dict[str, Any], list[Read]]:
    """The attributes of the metadata, whose version is among them, and the nodes."""
    head, *nodes = delimited(path.read_bytes())
    about = dict(attribute(value) for number, value in fields(head) if number == 2)
    version = next(value.decode() for number, value in fields(head) if number == 1)
    return about | {"version": version}, [read_node(each) for each in nodes]


def read_all(path: str) -> dict[int, list[Read]]:
    """The nodes of every rank, of the files `PATH.0.et` and so on."""
    stem, found = path.removesuffix(".et"), {}
    while (own := Path(f"{stem}.{len(found)}.et")).exists():
        found[len(found)] = read_trace(own)[1]
    return found


def makespan_s(path: str, topology: Topology) -> float:
    """Seconds until all nodes of all ranks are over, on one level whose ports are never busy."""
    traces = read_all(path)
    groups = json.loads(Path(path.removesuffix(".et") + ".comm_groups.json").read_text())
    (level,) = topology.levels
    nodes = {(rank, node.id): node for rank, own in traces.items() for node in own}
    sends = {
        (node.attributes["comm_src"], node.attributes["comm_dst"], node.attributes["comm_tag"]): (
            rank,
            node.id,
        )
        for (rank, _), node in nodes.items()
        if node.type == SEND
    }
    # the n-th collective of a group is the same one on all of its ranks; of a rank, one at a time
    turns, calls, before = {}, {}, {}
    for rank, own in traces.items():
        count: Counter[str] = Counter()
        last: list[tuple[int, int]] = []
        for node in own:
            if node.type == COLL:
                name = node.attributes["pg_name"]
                turns[rank, node.id] = name, count[name]
                calls[name, count[name], rank] = rank, node.id
                count[name] += 1
                before[rank, node.id], last = last, [(rank, node.id)]

    @cache
    def ready(key: tuple[int, int]) -> float:
        return max((end((key[0], other)) for other in nodes[key].data_deps), default=0.0)

    @cache
    def end(key: tuple[int, int]) -> float:
        rank, node = key[0], nodes[key]
        said = node.attributes
        if node.type == COMP:
            return ready(key) + node.micros * 1e-6
        if node.type == SEND:
            return ready(key) + said["comm_size"] / level.bandwidth_bytes_per_s + level.latency_s
        if node.type == RECV:
            sent = sends[said["comm_src"], rank, said["comm_tag"]]
            assert nodes[sent].attributes["comm_size"] == said["comm_size"]
            return max(ready(key), end(sent))
        name, turn = turns[key]
        ranks = groups[name]
        size = said["comm_size"] * (len(ranks) if said["comm_type"] == ALL_GATHER else 1)
        takes_s = allreduce_s(size, ranks, topology)
        begin = max(ready(calls[name, turn, each]) for each in ranks)
        begin = max([begin, *(end(other) for other in before[key])])
        return begin + (takes_s if said["comm_type"] == ALL_REDUCE else takes_s / 2)

    for key in sorted(nodes, key=lambda key: key[1]):  # in turn, so that little is nested
        end(key)
    return max(end(key) for key in nodes)
