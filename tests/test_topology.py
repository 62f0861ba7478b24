import json
import math

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from partopt.documents.files import shipped_folder, shipped_names
from partopt.documents.topology import AllReduceRates, Device, Level, Topology, TopologyFile
from partopt.errors import PartoptError
from tests.examples import examples
from tests.helpers import flat, two_level

CLUSTER = """\
name: v100-pcie
device: {name: V100-16GB, memory: 16 GB}
levels:
  - {name: server,  link: pcie,     size: 4, bandwidth: 12 GB/s}
  - {name: cluster, link: ethernet, size: 4, bandwidth: 10 Gb/s, latency: 50 us, links: 2,
     bus: true}
"""


def faults(text):
    with pytest.raises(PartoptError) as error:
        Topology.parse(text.encode(), "c.yaml")
    return [(part.message, part.hint) for part in error.value.parts]


def test_a_topology_is_read_into_base_units():
    server = Level(name="server", link="pcie", size=4, bandwidth_bytes_per_s=12e9)
    rate = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 50e-6, "links": 2, "bus": True}
    expected = Topology(
        name="v100-pcie",
        device=Device(name="V100-16GB", memory_bytes=16 * 10**9),
        levels=[server, Level(name="cluster", link="ethernet", size=4, **rate)],
    )
    found = Topology.parse(CLUSTER.encode())
    assert (found, list(found.faults())) == (expected, [])
    assert Topology.parse(CLUSTER.encode(), servers=7).devices == 28


def test_a_topology_file_meets_its_published_schema():
    schema = msgspec.json.schema(TopologyFile)
    jsonschema.validate(yaml.safe_load(CLUSTER), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(CLUSTER.replace("size: 4", "size: 0")), schema)


PAGE = "docs/formats.md"
WRONG = [
    ("12 GB/s", "12", "levels[0].bandwidth: '12' has no unit", "200 Gb/s"),
    ("12 GB/s", "12 GB", "levels[0].bandwidth: '12 GB' is a size, not a rate", '"12 GB/s"'),
    ("12 GB/s", "0 GB/s", "levels[0].bandwidth: '0 GB/s' is zero", "really has"),
    ("12 GB/s", ".inf", "levels[0].bandwidth: '.inf' is not a quantity", "200 Gb/s"),
    ("12 GB/s", "-12 GB/s", "levels[0].bandwidth: '-12 GB/s' is not a quantity", "200 Gb/s"),
    ("12 GB/s", "16:30", "levels[0].bandwidth: '16:30' is not a quantity", "200 Gb/s"),
    ("16 GB}", "16 Gb}", "device.memory: '16 Gb' is in bits", '"16 GB"'),
    ("16 GB}", "0.1 B}", "device.memory: '0.1 B' is zero", "really has"),
    ("50 us", "50", "levels[1].latency: '50' has no unit", "50 us"),
    ("50 us", "-50 us", "levels[1].latency: '-50 us' is not a quantity", "50 us"),
    ("size: 4", "size: 0", "levels[0].size: expected a whole number >= 1", PAGE),
    ("size: 4", "size: 4.5", "levels[0].size: expected a whole number, found a number", PAGE),
    ("size: 4", "size: four", "levels[0].size: expected a whole number, found text", PAGE),
    ("size: 4", "size: 1:30", "levels[0].size: expected a whole number, found text", PAGE),
    ("links: 2", "links: 0", "levels[1].links: expected a whole number >= 1", PAGE),
    ("bus: true", "bus: 1", "levels[1].bus: expected true or false, found a whole number", PAGE),
    ("bandwidth: 12", "bandwith: 12", "levels[0].bandwith: unknown key", '"bandwidth"?'),
    ("name: cluster", "name: server", 'levels[1].name: "server" is used twice', "its own name"),
    ("device: {", "gadget: {", "device: missing", PAGE),
    ("size: 4", "size: 1000000", "levels: 4000000 devices; partopt plans for up to", "sizes"),
    ("name: server", 'name: "\\e[31m"', "levels[0].name: has the control character", "printable"),
    ("name: server", 'name: "a\\nb"', "levels[0].name: has the control character", "printable"),
    ("link: pcie", '"\\e": 1', "levels[0].\\x1b: has the control character '\\x1b'", "printable"),
    ("12 GB/s", '"\\e12"', "levels[0].bandwidth: has the control character", "printable"),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), WRONG)
def test_a_wrong_value_is_named_with_its_place_and_the_remedy(old, new, message, hint):
    found = faults(CLUSTER.replace(old, new, 1))
    assert any(said.startswith(f"c.yaml: {message}") and hint in remedy for said, remedy in found)


def test_all_the_faults_of_a_file_are_told_at_once():
    text = CLUSTER.replace("16 GB", "16").replace("12 GB/s", "12 GB").replace("50 us", "50")
    found = [
        said.split(": ")[1] for said, _ in faults(text.replace("name: cluster", "name: server"))
    ]
    assert found == ["device.memory", "levels[0].bandwidth", "levels[1].latency", "levels[1].name"]


@pytest.mark.slow
def test_what_is_not_a_topology_is_refused_with_its_place():
    for text, message in {
        "": "not a topology",
        "- a\n- b": "not a topology",
        "a: [1, 2\nb: 3": "line 2, column 2: not YAML: expected ',' or ']', but got ':'",
        "name: c\n\tlevels: 3": "line 2, column 1: not YAML: found character '\\t'",
        "name: !!python/object:os.system c": "line 1, column 7: not YAML: could not determine",
        "[" * 5000: "not YAML that partopt reads: maximum recursion depth exceeded",
        "name: c\nname: d": 'line 2, column 1: the key "name" is given twice',
        "name: \x00": "not YAML: ",
        "levels: &a [*a]": "levels[0]: expected a mapping, found a list",
    }.items():
        assert any(found.startswith(f"c.yaml: {message}") for found, _ in faults(text))
    with pytest.raises(PartoptError, match="not YAML"):
        Topology.parse(b"\xff\xfe\xff")


def test_an_outer_level_faster_than_the_inner_one_is_noted():
    inverted = Topology.parse(CLUSTER.replace("12 GB/s", "1 GB/s").encode())
    [note] = inverted.notes()
    assert (note.code, note.fields) == ("inverted-levels", {"inner": "server", "outer": "cluster"})
    assert note.text == (
        f"{inverted.name}: level cluster (1.25 GB/s) is faster than server inside it (1 GB/s): "
        "are the levels listed innermost first?"
    )
    assert Topology.parse(CLUSTER.replace("12 GB/s", "10 Gb/s").encode()).notes() == []


SERVER = {"name": "server", "size": 2, "bandwidth_bytes_per_s": 1e9}


def test_a_topology_made_in_code_is_checked_like_one_in_a_file():
    def made(*levels):
        return Topology(name="c", device=Device(name="d"), levels=list(levels))

    for field, value, code, message in (
        ("bandwidth_bytes_per_s", 0.0, "invalid-value", "expected a number > 0.0"),
        ("bandwidth_bytes_per_s", math.nan, "invalid-value", "expected a number > 0.0"),
        ("bandwidth_bytes_per_s", math.inf, "not-finite", "inf is not a finite number"),
        ("latency_s", -1e-6, "invalid-value", "expected a number >= 0.0"),
        ("links", 0, "invalid-value", "expected a whole number >= 1"),
        ("links", True, "invalid-value", "expected a whole number, found true or false"),
        ("size", 0, "invalid-value", "expected a whole number >= 1"),
        ("size", "2", "invalid-value", "expected a whole number, found text"),
        ("name", None, "invalid-value", "expected text, found null"),
        ("name", "\x1b[31mred", "control-character", "has the control character '\\x1b'"),
    ):
        found = list(made(Level(**(SERVER | {field: value}))).faults())
        told = [(fault.message, fault.code) for fault in found]
        assert (f"levels[0].{field}: {message}", code) in told
        assert {fault.fields["path"] for fault in found} == {f"levels[0].{field}"}
    assert [fault.code for fault in made(Level(**SERVER), Level(**SERVER)).faults()] == [
        "repeated-name"
    ]
    none = Topology(name="c", device=Device(name="d"), levels=None)
    assert [fault.message for fault in none.faults()] == ["levels: expected a list, found null"]


def test_devices_must_be_the_product_of_the_sizes():
    with pytest.raises(ValueError, match="5 devices, but the sizes of the levels multiply to 6"):
        msgspec.structs.replace(two_level(2, 3), devices=5)


@pytest.mark.parametrize("name", shipped_names("topologies"))
def test_a_shipped_topology_names_its_sources_and_is_read_again_as_it_was(name):
    loaded = Topology.load(name)
    assert (loaded.name, loaded.notes(), list(loaded.faults())) == (name, [], [])
    text = (shipped_folder("topologies") / f"{name}.yaml").read_text()
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert any(source in comment for source in ("datasheet", "whitepaper", "et al.", "measured"))
    assert all(level.link in comment.lower() for level in loaded.levels)
    assert Topology.parse(loaded.dump().encode()) == loaded


names = st.text("abc éµ:#{}[]'\"-?*&!|>%@,\\0123 \U0001f600", max_size=8)
rates, times_s = st.floats(1e-3, 1e15), st.floats(0, 10)
reduced = st.builds(
    AllReduceRates,
    bandwidth_bytes_per_s=st.just(msgspec.UNSET) | rates,
    latency_s=st.just(msgspec.UNSET) | times_s,
)
levels = st.builds(
    Level,
    name=names,
    link=names,
    size=st.integers(1, 4),
    bandwidth_bytes_per_s=rates,
    links=st.integers(1, 9),
    latency_s=times_s,
    bus=st.booleans(),
    overhead_s=st.just(msgspec.UNSET) | st.floats(1e-9, 10),
    copy_bytes_per_s=st.just(msgspec.UNSET) | rates,
    allreduce=st.just(msgspec.UNSET) | reduced,
)
devices = st.builds(Device, name=names, memory_bytes=st.none() | st.integers(1, 2**53))
topologies = st.builds(
    Topology,
    name=names,
    device=devices,
    allreduce=st.sampled_from(["fastest", "ring", "tree", "hierarchical"]),
    levels=st.lists(levels, min_size=1, max_size=4, unique_by=lambda level: level.name),
)


@pytest.mark.slow
@examples(50)
@given(topologies)
def test_dumping_and_reading_again_gives_the_same_topology(original):
    assert Topology.parse(original.dump().encode()) == original
    assert msgspec.json.decode(msgspec.json.encode(original), type=Topology) == original
    assert json.loads(msgspec.json.encode(original))["devices"] == original.devices


def test_an_allreduce_has_the_figures_of_a_message_where_it_has_none_and_0_us_is_one():
    for own, latency_s, bandwidth in (
        ("", 5e-5, 1.25e9),
        (", allreduce: {latency: 0 us}", 0.0, 1.25e9),
        (", allreduce: {latency: 7 us}", 7e-6, 1.25e9),
        (", allreduce: {bandwidth: 1 GB/s}", 5e-5, 1e9),
    ):
        level = Topology.parse(CLUSTER.replace(", links: 2", own).encode()).levels[1]
        assert level.allreduce_latency_s == pytest.approx(latency_s)
        assert level.allreduce_bandwidth_bytes_per_s == bandwidth


def test_what_a_message_takes_of_its_devices():
    for own, message_s, copy_byte_s in (
        ("", 0.0, 0.0),
        (", overhead: 0 us", 0.0, 0.0),
        (", overhead: 3 us", 3e-6, 0.0),
        (", copy: 20 GB/s", 0.0, 5e-11),
    ):
        level = Topology.parse(CLUSTER.replace(", links: 2", own).encode()).levels[1]
        assert (level.message_s, level.copy_byte_s) == pytest.approx((message_s, copy_byte_s))


def address(cluster, rank):
    """Which member of its level-k component the rank lies in, innermost first."""
    digits = []
    for level in cluster.levels:
        rank, digit = divmod(rank, level.size)
        digits.append(digit)
    return digits


@pytest.mark.slow
@given(topologies, st.data())
def test_ranks_part_at_the_outermost_level_at_which_their_addresses_differ(cluster, data):
    first, last = (data.draw(st.integers(0, cluster.devices - 1)) for _ in range(2))
    pairs = enumerate(zip(address(cluster, first), address(cluster, last), strict=True), start=1)
    assert cluster.common_level(first, last) == max((k for k, (a, b) in pairs if a != b), default=0)
    sizes = [level.size for level in cluster.levels]
    for k in range(len(sizes) + 1):
        assert cluster.group_size(k) == math.prod(sizes[:k])
    with pytest.raises(ValueError, match=r"not both in 0\.\."):
        cluster.common_level(0, cluster.devices)


@pytest.mark.parametrize("name", ["2024-13-45", "2024-01-01", "0x_", "16:30"])
def test_what_yaml_would_take_for_a_date_or_a_number_is_text(name):
    rest = "device: {name: d}\nlevels: [{name: a, size: 2, bandwidth: 1 GB/s}]"
    assert Topology.parse(f"name: {name}\n{rest}".encode()).name == name


SIZES = {1: [1, 1, 1], 3: [3, 1, 1], 8: [8, 1, 1], 24: [8, 3, 1], 32: [8, 4, 1], 320: [8, 4, 10]}


@pytest.mark.parametrize(("devices", "sizes"), SIZES.items())
def test_inner_levels_are_filled_before_outer_ones(devices, sizes):
    resized = RACKS.resize(devices)
    assert [level.size for level in resized.levels] == sizes
    assert (resized.devices, resized.device) == (devices, RACKS.device)
    rates = [level.bandwidth_bytes_per_s for level in RACKS.levels]
    assert [level.bandwidth_bytes_per_s for level in resized.levels] == rates


RACKS = Topology(
    name="racks",
    device=Device(name="GPU"),
    levels=[
        Level(name=name, size=size, bandwidth_bytes_per_s=1e9)
        for name, size in (("server", 8), ("rack", 4), ("hall", 2))
    ],
)


@pytest.mark.parametrize(
    ("devices", "below", "above"), [(12, 8, 16), (9, 8, 16), (44, 32, 64), (65, 64, 96)]
)
def test_a_number_that_fills_no_servers_is_answered_with_its_neighbours(devices, below, above):
    told = f"{devices} devices do not fill racks: 8 to a server, 4 to a rack"
    with pytest.raises(PartoptError, match=told) as raised:
        RACKS.resize(devices)
    assert raised.value.hint == f"choose {below} or {above}, for example"
    for count in range(below + 1, above):
        with pytest.raises(PartoptError):
            RACKS.resize(count)
    assert [RACKS.resize(count).devices for count in (below, above)] == [below, above]


def test_numbers_of_devices_and_servers_are_whole_and_not_too_large():
    with pytest.raises(PartoptError, match=r"1048577 devices; partopt plans for up to 1048576"):
        flat(4).resize(2**20 + 1)
    assert flat(4).resize(2**20).devices == 2**20
    for devices in (0, -8, 8.0, "8"):
        with pytest.raises(PartoptError, match=rf"`devices={devices}`: expected a whole number"):
            RACKS.resize(devices)
    for servers in (0, -1, 2.0, "2", True):
        with pytest.raises(PartoptError, match=rf"^`servers={servers}`: expected a who") as error:
            Topology.load("dgx-h100", servers=servers)
        assert error.value.code == "invalid-option"
        assert error.value.fields == {"option": "servers", "value": servers}


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ([2] * 20, None),
        ([2] * 19 + [3], "levels: 1572864 devices; partopt plans for up to 1048576"),
        ([2**20 + 1], "levels: 1048577 devices; partopt plans for up to 1048576"),
        ([1] * 32, None),
        ([1] * 33, "levels: 33 levels; partopt plans for up to 32"),
    ],
)
def test_the_largest_cluster_is_read_and_a_larger_one_is_refused(sizes, fault):
    """From a file, and from the topology in a plan or a simulation."""
    levels = [
        {"name": f"l{n}", "size": size, "bandwidth": "1 GB/s"} for n, size in enumerate(sizes)
    ]
    text = yaml.safe_dump({"name": "c", "device": {"name": "GPU"}, "levels": levels})
    if fault is None:
        assert Topology.parse(text.encode()).devices == math.prod(sizes)
        return
    assert [said for said, _ in faults(text)] == [f"c.yaml: {fault}"]
    own = [
        Level(name=f"l{n}", size=size, bandwidth_bytes_per_s=1e9) for n, size in enumerate(sizes)
    ]
    with pytest.raises(ValueError, match=fault.removeprefix("levels: ")):
        Topology(name="c", device=Device(name="GPU"), levels=own)


@pytest.mark.parametrize("price", ["2.50 per hour", "3 per hour", "1e-3 per hour"])
def test_a_price_is_read_and_written_again(price):
    priced = CLUSTER.replace("memory: 16 GB", f"memory: 16 GB, price: {price}")
    found = Topology.parse(priced.encode())
    assert found.device.price_per_hour == float(price.split()[0])
    assert Topology.parse(found.dump().encode()) == found
    assert found.in_groups(2).device.price_per_hour == found.device.price_per_hour
    assert not Topology.parse(CLUSTER.encode()).device.price_per_hour


def test_a_price_needs_its_unit():
    for price, message, hint in (
        ("2.50", "'2.5' has no unit", 'write "2.5 per hour"'),
        ("'2'", "'2' has no unit", 'write "2 per hour"'),
        ("$2 per hour", "'$2 per hour' is not a price", "without its sign"),
        ("2 per day", "'2 per day' is not a price", "2.50 per hour"),
        ("0 per hour", "'0 per hour' is zero", "really has"),
    ):
        found = faults(CLUSTER.replace("memory: 16 GB", f"memory: 16 GB, price: {price}"))
        [(said, remedy)] = found
        assert said == f"c.yaml: device.price: {message}"
        assert hint in remedy


FAULTY = """
name: five
device: {name: A100, memory: 16 Gb}
levels:
  - {name: server, size: 4, bandwidth: 20}
  - {name: server, size: "8", bandwidth: 100 Gb/s, latency: 5, speed: 1}
allreduce: fast
allreduce: ring
"""


def test_all_faults_of_a_file_are_reported_together():
    """Keys, types, units, names and what is given twice."""
    with pytest.raises(PartoptError) as refused:
        Topology.parse(FAULTY.encode(), "c.yaml")
    assert [part.message.removeprefix("c.yaml: ") for part in refused.value.parts] == [
        'line 8, column 1: the key "allreduce" is given twice',
        "device.memory: '16 Gb' is in bits",
        "levels[0].bandwidth: '20' has no unit",
        "levels[1].speed: unknown key",
        "levels[1].size: expected a whole number, found text",
        "levels[1].latency: '5' has no unit",
        'levels[1].name: "server" is used twice',
    ]
    assert {part.fields.get("path") for part in refused.value.parts} >= {"levels[1].name"}


def test_a_file_with_too_many_devices_says_what_else_is_wrong():
    text = FAULTY.replace('"8"', "2000000").replace("allreduce: fast\n", "")
    with pytest.raises(PartoptError, match="levels: 8000000 devices") as refused:
        Topology.parse(text.encode())
    assert len(refused.value.parts) == 6
