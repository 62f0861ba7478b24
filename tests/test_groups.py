"""Groups of ranks as planning devices, against rings of real ranks added up port by port."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import Job, PartoptError, Topology, scale, simulate, solve, verify
from partopt.cost.collectives import allreduce_over, allreduce_s
from partopt.cost.messages import transfer_s
from partopt.documents import encode
from partopt.documents.plan import Plan
from partopt.documents.profile import Group, Profile
from partopt.documents.topology import Device, Level
from partopt.report import plan_text as page
from tests.examples import examples
from tests.helpers import measurement, profile_of

BETWEEN = [
    ("dgx-a100", 4, 8, [("cluster", 4, 20.5e9, 1)]),
    ("dgx-a100", 4, 4, [("server", 2, 240e9, 1), ("cluster", 4, 20.5e9, 2)]),
    ("dgx-a100", 4, 2, [("server", 4, 240e9, 1), ("cluster", 4, 20.5e9, 4)]),
    ("dgx-a100", 4, 16, [("cluster", 2, 20.5e9, 1)]),
    ("dgx-a100", 4, 32, [("cluster", 1, 20.5e9, 1)]),
    ("v100-pcie", 4, 4, [("cluster", 4, 10e9 / 8 / 4, 1)]),
    ("v100-pcie", 4, 2, [("server", 2, 12e9, 1), ("cluster", 4, 10e9 / 8 / 2, 1)]),
]


@pytest.mark.parametrize("name, servers, ranks, levels", BETWEEN)
def test_levels_between_groups(name, servers, ranks, levels):
    topology = Topology.load(name, servers).in_groups(ranks)
    found = [(lv.name, lv.size, lv.bandwidth_bytes_per_s, lv.links) for lv in topology.levels]
    assert found == levels
    assert topology.devices * ranks == topology.cluster.devices
    assert topology.cluster == Topology.load(name, servers)
    assert topology.in_groups(ranks) is topology


def test_messages_and_all_reduces_of_each_rank_worked_by_hand():
    groups = Topology.load("dgx-a100", 4).in_groups(8)
    assert transfer_s(64e6, 1, groups) == pytest.approx(5e-6 + 64e6 / 20.5e9)  # 2.56 ms
    # 2 (r - 1) / r of 2 GB through 25 GB/s, and 6 latencies
    assert allreduce_s(2e9, range(4), groups) == pytest.approx(1.5 * 2e9 / 20.5e9 + 6 * 5e-6)


def test_groups_that_do_not_divide_the_cluster_are_refused():
    for ranks in (3, 5, 6, 12, 24, 64, 7):
        with pytest.raises(PartoptError) as error:
            Topology.load("dgx-a100", 4).in_groups(ranks)
        assert error.value.code == "unfit-group"
        assert "here groups can have 1, 2, 4, 8, 16, 32 ranks" in error.value.hint
    with pytest.raises(PartoptError, match="dgx-a100: groups of 3 ranks do not divide"):
        Job(grouped(3), Topology.load("dgx-a100"))
    text = encode(grouped(2)).replace(b'"ranks": 2', b'"ranks": 1')
    with pytest.raises(PartoptError, match=r"group\.ranks"):
        Profile.parse(text)


@st.composite
def clusters(draw):
    """A cluster and a size of groups that divides it."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    levels = [
        Level(
            name=f"level {k}",
            size=size,
            bandwidth_bytes_per_s=draw(st.floats(1.0, 100.0)),
            links=draw(st.integers(1, 9)),
            bus=draw(st.booleans()),
        )
        for k, size in enumerate(sizes)
    ]
    device = Device(name="device")
    cluster = Topology(name="any", device=device, levels=levels, allreduce="ring")
    whole = draw(st.integers(0, len(sizes) - 1))
    parts = [part for part in range(1, sizes[whole] + 1) if sizes[whole] % part == 0]
    inside = cluster.group_size(whole)
    return cluster, inside * draw(st.sampled_from(parts))


def port_seconds(rings, size, topology):
    """The busiest port of each level: what every ring brings to every port, added up."""
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for ring in rings:
        for k, level in enumerate(topology.levels, start=1):
            component = topology.group_size(k)
            inside: defaultdict[int, set[int]] = defaultdict(set)
            for rank in ring:
                inside[rank // component].add(rank // topology.group_size(k - 1))
            rate = level.bandwidth_bytes_per_s * level.links
            seconds = 2 * (len(ring) - 1) / len(ring) * size / rate
            for place, members in inside.items():
                for member in members if len(members) > 1 else ():
                    busy[level.name, place if level.bus else member] += seconds
    return {
        name: max(seconds for (own, _), seconds in busy.items() if own == name)
        for name in {name for name, _ in busy}
    }


@pytest.mark.slow
@given(case=clusters(), data=st.data())
@examples(150)
def test_a_ring_of_groups_is_a_ring_of_each_of_their_ranks(case, data):
    cluster, N = case
    groups = cluster.in_groups(N)
    chosen = data.draw(st.sets(st.integers(0, groups.devices - 1), min_size=1, max_size=6))
    rings = [[groups.real_ranks(p)[i] for p in sorted(chosen)] for i in range(N)]
    found = allreduce_over(sorted(chosen), groups).slopes
    by_name = {groups.levels[k - 1].name: 7.0 * seconds for k, seconds in found.items()}
    assert by_name == pytest.approx(port_seconds(rings, 7.0, cluster))


@pytest.mark.slow
@given(case=clusters(), data=st.data())
@examples(100)
def test_a_message_between_groups_is_one_between_each_pair_of_their_ranks(case, data):
    cluster, N = case
    groups = cluster.in_groups(N)
    if groups.devices == 1:
        return
    p, q = sorted(data.draw(st.sets(st.integers(0, groups.devices - 1), min_size=2, max_size=2)))
    busy: defaultdict[int, float] = defaultdict(float)
    k = cluster.common_level(groups.real_ranks(p)[0], groups.real_ranks(q)[0])
    level, member = cluster.levels[k - 1], cluster.group_size(k - 1)
    for rank in groups.real_ranks(p):
        busy[0 if level.bus else rank // member] += 1 / level.bandwidth_bytes_per_s / level.links
    between = groups.levels[groups.common_level(p, q) - 1]
    assert between.name == level.name
    rate = between.bandwidth_bytes_per_s * between.links
    assert 1 / rate == pytest.approx(max(busy.values()))


def grouped(ranks):
    """Six layers, measured on one rank of a group."""
    times = [0.01, 0.02, 0.01, 0.03, 0.02, 0.01]
    profile = profile_of(
        [measurement(times, output_bytes=[4_000_000] * 5 + [4], microbatch_size=2)],
        parameter_bytes=[40_000_000] * 6,
    )
    return replace(profile, group=Group(ranks=ranks))


def test_a_plan_of_groups_is_that_of_the_levels_between_them():
    by_hand = Topology(
        name="by hand",
        device=Device(name="A100-80GB", memory_bytes=80_000_000_000),
        levels=[Level(name="cluster", size=4, bandwidth_bytes_per_s=20.5e9, latency_s=5e-6)],
    )
    own = solve(Job(grouped(8), Topology.load("dgx-a100", 4))).plan
    same = solve(Job(replace(grouped(8), group=None), by_hand)).plan
    assert own.topology.group_ranks == 8
    assert own.predicted == same.predicted
    assert own.stages == same.stages
    assert own.communication == same.communication
    assert "ranks are groups of 8: rank p is the real ranks 8p to 8p+7" in page.render(own)


@pytest.mark.slow
def test_a_plan_of_groups_is_verified_and_read_again():
    plan = solve(Job(grouped(4), Topology.load("v100-pcie"))).plan
    again = Plan.parse(encode(plan))
    assert again == plan
    assert verify(again, grouped(4)).verified
    assert not verify(again, grouped(2)).verified
    wide = [replace(level, bandwidth_bytes_per_s=1e12) for level in plan.topology.levels]
    altered = replace(plan, topology=replace(plan.topology, levels=wide))
    with pytest.raises(PartoptError, match="not those between groups of 4 ranks"):
        Plan.parse(encode(altered))


def test_other_conditions_are_those_of_the_cluster_itself():
    plan = solve(Job(grouped(4), Topology.load("v100-pcie"))).plan
    faster = simulate(plan, bandwidth={"cluster": "100 Gb/s"})
    level = faster.document.topology.levels[0]
    assert level.bandwidth_bytes_per_s == 100e9 / 8 / 4
    assert faster.document.changed == ["bandwidth of cluster 1.25 GB/s -> 12.5 GB/s"]
    with pytest.raises(PartoptError, match="server"):
        simulate(plan, bandwidth={"server": "100 Gb/s"})


@pytest.mark.slow
def test_scaling_counts_real_devices():
    rows = scale(Job(grouped(4), Topology.load("dgx-a100")), [4, 8, 16]).rows
    assert [row.devices for row in rows] == [4, 8, 16]
    assert rows[0].efficiency == pytest.approx(1.0)
    with pytest.raises(PartoptError, match="groups of 4 ranks do not divide"):
        scale(Job(grouped(4), Topology.load("dgx-a100")), [2])


def test_without_a_group_documents_say_nothing_of_one():
    alone = replace(grouped(2), group=None)
    plan = solve(Job(alone, Topology.load("v100-pcie"), planner="data_parallel")).plan
    assert b'"group"' not in encode(plan)
    assert msgspec.json.decode(encode(grouped(2)))["group"] == {"ranks": 2}


def test_context_parallel_ranks_exchange_over_the_ports_of_all():
    """Two servers of eight devices of 100 B/s, each with a port of 10 B/s; t x c ranks a group."""
    inner = Level(name="server", size=8, bandwidth_bytes_per_s=100.0)
    outer = Level(name="cluster", size=2, bandwidth_bytes_per_s=10.0, links=8)
    cluster = Topology(name="two", device=Device(name="GPU"), levels=[inner, outer])
    rates = {}
    for t, c in ((8, 1), (4, 2), (1, 8), (1, 2), (2, 2)):
        level = cluster.in_groups(t * c, c).levels[-1]
        rates[t, c] = level.allreduce_bandwidth_bytes_per_s * level.links
        assert level.bandwidth_bytes_per_s == 10.0  # a message is one rank's own
    # the eight ports of a server carry the exchanges of its t tensor parallel ranks
    assert rates == {(8, 1): 10, (4, 2): 20, (1, 8): 80, (1, 2): 80, (2, 2): 40}
    fast = replace(cluster, levels=[inner, replace(outer, bandwidth_bytes_per_s=50.0)])
    assert fast.in_groups(8, 8).levels[-1].allreduce_bandwidth_bytes_per_s == 100.0
    made = cluster.in_groups(8, 8)
    read = msgspec.json.decode(msgspec.json.encode(made), type=Topology)
    assert read == made and [*read.inconsistencies()] == []
    wrong = replace(read, group=replace(read.group, copies=4))
    assert [*wrong.inconsistencies()]
