"""Chakra execution traces: read by themselves, and executed to what the simulator says."""

from __future__ import annotations

import json

import pytest

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.stage import MemoryRules
from partopt.errors import PartoptError
from partopt.report import chakra
from partopt.simulation import simulate
from tests.helpers import chain_profile, flat
from tests.report.execution_traces import (
    COLL,
    COMP,
    RECV,
    SEND,
    delimited,
    makespan_s,
    read_all,
    read_trace,
)

MB = 10**6
SECONDS = [0.002, 0.001, 0.003, 0.002, 0.001, 0.002, 0.004, 0.001]
# messages take their latency alone; all-reduces of 8 MB over two some 8 ms
CLUSTER = flat(8, 1e9, latency=0.0005)


def planned(cuts, replicas, cluster=CLUSTER, shared=(), **options):
    """The priced plan of a split of eight layers."""
    profile = chain_profile(
        SECONDS,
        [2 * each for each in SECONDS],
        output_bytes=[0] * 8,
        parameter_bytes=[4 * MB] * 8,
        shared=shared,
        name="eight",
    )
    stated = {"schedule": "1f1b", "microbatches": 8} | options
    problem = problem_of(profile, cluster, cuts=cuts, replicas=replicas, **stated)
    return planners.plan("manual", problem)


def asynchronous(**options):
    return {"schedule": "pipedream", "microbatches": None} | options


PLANS = {
    "1f1b": ([3, 5], [1, 1, 1], {}),
    "unequal replicas": ([3, 5], [3, 2, 1], {}),
    "interleaved": ([2, 4, 6], [2, 2, 2, 2], {"schedule": "interleaved"}),
    "zbv": ([2, 4, 6], [2, 2, 2, 2], {"schedule": "zbv"}),
    "zb-h1": ([3, 6], [2, 2, 2], {"schedule": "zb-h1"}),
    "dualpipe": ([4], [2, 2], {"schedule": "dualpipe"}),
    "recomputed": ([3, 5], [2, 2, 2], {"schedule": "gpipe", "recompute": True}),
    "data parallel": ([], [4], {"cluster": flat(8, 1e9)}),
    "data parallel, waiting": ([], [4], {"blocking_allreduce": True}),
    "optimizer in shares": ([4], [4, 2], {"memory_rules": MemoryRules(shard="optimizer")}),
    "gradients in shares": ([4], [2, 2], {"memory_rules": MemoryRules(shard="gradients")}),
    "gathers that are hidden": (
        [4],
        [2, 2],
        {"memory_rules": MemoryRules(shard="parameters"), "cluster": flat(8, 1e10, latency=5e-4)},
    ),
    "gathers that last": ([], [4], {"memory_rules": MemoryRules(shard="parameters")}),
    "pipedream": ([3, 5], [2, 1, 1], asynchronous()),
    "pipedream, blocking": ([3, 5], [2, 1, 2], asynchronous(blocking_allreduce=True)),
    "all-reduces that last": ([4], [4, 1], asynchronous()),
}


@pytest.mark.parametrize("name", PLANS)
def test_executing_the_traces_takes_what_the_simulator_says(tmp_path, name):
    cuts, replicas, options = PLANS[name]
    simulation = simulate(planned(cuts, replicas, **options))
    path = str(tmp_path / "trace.et")
    simulation.save(path)
    found_s = makespan_s(path, simulation.plan.topology)
    rounding_s = 1e-6 * len(simulation.execution.order.kind)
    assert found_s == pytest.approx(simulation.execution.makespan_s, abs=rounding_s)


def test_buckets_are_exchanged_beside_the_last_backward(tmp_path):
    """32 MB in buckets of 4 MB: seven of eight while the last backward goes on."""
    plan = planned([], [4], bucket_bytes=4 * MB)
    simulation = simulate(plan)
    path = str(tmp_path / "trace.et")
    simulation.save(path)
    exchanges = [node for node in read_all(path)[0] if node.type == COLL]
    sizes = [node.attributes["comm_size"] for node in exchanges]
    assert sizes == [28 * MB, 4 * MB]
    first, rest = [node for node in read_all(path)[0] if node.name.startswith("0B4")]
    assert (first.micros, rest.micros) == (4000, 28000)
    assert exchanges[0].data_deps == [first.id]
    assert exchanges[1].data_deps == [rest.id, exchanges[0].id]


def test_what_is_in_the_files(tmp_path):
    plan = planned([4], [2, 1], microbatches=2)
    written = simulate(plan).save(str(tmp_path / "trace.et"))
    names = [f"{tmp_path}/trace.{rank}.et" for rank in range(8)]
    assert written == [*names, f"{tmp_path}/trace.comm_groups.json"]
    assert json.loads((tmp_path / "trace.comm_groups.json").read_text()) == {"1": [0, 1]}
    about, nodes = read_trace(tmp_path / "trace.0.et")
    assert about == {
        "version": "0.0.4",
        "model": "eight",
        "schedule": "1f1b",
        "planner": "manual",
        "topology": "flat-8",
    }
    assert [(node.name, node.type, node.data_deps, node.micros) for node in nodes] == [
        ("0F0", COMP, [], 8000),
        ("0F0 to 2", SEND, [1], 0),
        ("0B0 from 2", RECV, [1], 0),
        ("0B0", COMP, [1, 3], 16000),
        ("0 allreduce 0", COLL, [4], 0),
        ("0U", COMP, [4, 5], 0),
    ]
    assert [node.id for node in nodes] == [1, 2, 3, 4, 5, 6]
    assert nodes[1].attributes == {
        "is_cpu_op": False,
        "comm_size": 0,
        "comm_src": 0,
        "comm_dst": 2,
        "comm_tag": 0,
    }
    assert nodes[4].attributes == {
        "is_cpu_op": False,
        "comm_size": 16 * MB,
        "comm_type": 0,
        "pg_name": "1",
    }
    assert [node.name for node in read_trace(tmp_path / "trace.7.et")[1]] == ["idle"]


def test_every_message_is_sent_and_received_once(tmp_path):
    simulate(planned([2, 4, 6], [2, 2, 2, 2])).save(str(tmp_path / "trace.et"))
    ends = {SEND: [], RECV: []}
    for nodes in read_all(str(tmp_path / "trace.et")).values():
        for node in nodes:
            if node.type in ends:
                said = node.attributes
                ends[node.type].append((said["comm_src"], said["comm_dst"], said["comm_tag"]))
    assert sorted(ends[SEND]) == sorted(ends[RECV])
    assert len(set(ends[SEND])) == len(ends[SEND]) == 8 * 3 * 2


def test_devices_that_wait_for_their_messages(tmp_path):
    """What follows a message on the device that sent it comes after it."""
    plan = planned([4], [1, 1], serial_transfers=True)
    simulate(plan).save(str(tmp_path / "trace.et"))
    nodes = read_trace(tmp_path / "trace.0.et")[1]
    sent = next(node for node in nodes if node.type == SEND)
    following = next(node for node in nodes if node.type == COMP and node.id > sent.id)
    assert sent.id in following.data_deps


def test_tied_parameters_are_exchanged_by_all_that_hold_them(tmp_path):
    plan = planned([3, 5], [2, 1, 2], shared=[("w", [0, 7], MB)])
    simulate(plan).save(str(tmp_path / "trace.et"))
    groups = json.loads((tmp_path / "trace.comm_groups.json").read_text())
    assert groups == {"1": [0, 1], "2": [0, 1, 3, 4], "3": [3, 4]}
    for rank, nodes in read_all(str(tmp_path / "trace.et")).items():
        own = [node for node in nodes if node.type == COLL and node.attributes["pg_name"] == "2"]
        assert len(own) == (rank in groups["2"])
        if own:
            step = next(node for node in nodes if node.name.endswith("U"))
            assert own[0].id in step.data_deps


def test_a_device_that_holds_both_ends_exchanges_tied_parameters_once(tmp_path):
    plan = planned([2, 4, 6], [1] * 4, schedule="zbv", shared=[("w", [0, 7], MB)])
    simulate(plan).save(str(tmp_path / "trace.et"))
    nodes = read_trace(tmp_path / "trace.0.et")[1]
    assert [node.name for node in nodes if node.type == COLL] == []  # its own: nobody else's


def test_rounds_that_differ_have_no_exchange_of_tied_parameters(tmp_path):
    plan = planned([3, 5], [2, 1, 1], shared=[("w", [0, 7], MB)], **asynchronous())
    with pytest.raises(PartoptError, match="their rounds differ") as raised:
        simulate(plan).save(str(tmp_path / "trace.et"))
    assert raised.value.code == "unlike-rounds"
    assert list(tmp_path.iterdir()) == []


def test_replicas_that_gather_get_equally_many_microbatches(tmp_path):
    rules = MemoryRules(shard="parameters")
    plan = planned([4], [3, 1], memory_rules=rules)
    with pytest.raises(PartoptError, match="the 3 replicas of stage 0 gather parameters") as raised:
        simulate(plan).save(str(tmp_path / "trace.et"))
    assert raised.value.hint == "use a multiple of 3 microbatches"


def test_nothing_is_written_where_one_of_the_files_exists(tmp_path):
    (tmp_path / "trace.5.et").write_text("mine")
    simulation = simulate(planned([4], [1, 1]))
    with pytest.raises(PartoptError, match=r"trace\.5\.et: already exists"):
        simulation.save(str(tmp_path / "trace.et"))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.5.et"]
    simulation.save(str(tmp_path / "trace.et"), force=True)
    assert len(list(tmp_path.iterdir())) == 9


def test_more_than_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(chakra, "MOST_ACTIONS", 10)
    with pytest.raises(PartoptError, match="actions; 10 are written at most"):
        simulate(planned([4], [1, 1])).save(str(tmp_path / "trace.et"))


def test_the_command_line_says_which_files_it_wrote(partopt, tmp_path):
    planned([4], [2, 1]).save(str(tmp_path / "plan.json"))
    outcome = partopt("simulate", tmp_path / "plan.json", "-o", tmp_path / "g.et")
    assert f"Wrote {tmp_path}/g.0.et .. {tmp_path}/g.7.et, {tmp_path}/g.comm_groups.json" in (
        outcome.err
    )


def published_schema():
    """The messages Metadata and Node, of the published numbers and types of their fields."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")

    def message(name, *fields, choices=()):
        made = file.message_type.add(name=name)
        for number, field, kind in (*fields, *choices):
            many = field in ("attr", "data_deps")
            own = made.field.add(name=field, number=number, type=getattr(kinds, f"TYPE_{kind}"))
            own.label = kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL
            if kind == "MESSAGE":
                own.type_name = ".et.Attribute"
            if (number, field, kind) in choices:
                own.oneof_index = 0
        if choices:
            made.oneof_decl.add(name="value")

    values = [(7, "int32_val", "INT32"), (9, "int64_val", "INT64"), (27, "bool_val", "BOOL")]
    message("Attribute", (1, "name", "STRING"), choices=[*values, (29, "string_val", "STRING")])
    message("Metadata", (1, "version", "STRING"), (2, "attr", "MESSAGE"))
    times = [(6, "start_time_micros", "UINT64"), (7, "duration_micros", "UINT64")]
    enum = (3, "type", "INT32")  # the same on the wire
    ends = [(5, "data_deps", "UINT64"), *times, (10, "attr", "MESSAGE")]
    message("Node", (1, "id", "UINT64"), (2, "name", "STRING"), enum, *ends)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    named = [pool.FindMessageTypeByName(f"et.{name}") for name in ("Metadata", "Node")]
    return [message_factory.GetMessageClass(each) for each in named]


def test_the_library_of_protocol_buffers_reads_and_writes_the_same(tmp_path):
    Metadata, Node = published_schema()
    simulate(planned([2, 4, 6], [2, 2, 2, 2])).save(str(tmp_path / "trace.et"))
    for rank, ours in read_all(str(tmp_path / "trace.et")).items():
        head, *rest = delimited((tmp_path / f"trace.{rank}.et").read_bytes())
        assert Metadata.FromString(head).version == "0.0.4"
        for content, own in zip(rest, ours, strict=True):
            node = Node.FromString(content)
            assert node.SerializeToString(deterministic=True) == content
            assert (node.id, node.name, node.type) == (own.id, own.name, own.type)
            assert list(node.data_deps) == own.data_deps
            assert (node.start_time_micros, node.duration_micros) == (own.start_micros, own.micros)
            assert {
                each.name: getattr(each, each.WhichOneof("value")) for each in node.attr
            } == own.attributes
