"""The published graph format, the three published graphs, and the profiles made of them."""

import re
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

import partopt
from partopt import planners
from partopt.cost.chain import chain_of
from partopt.cost.problem import problem_of
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.importers.pipedream import read
from tests.planners.problems import topology

PUBLISHED = Path(__file__).parent / "published"
BATCHES = {"vgg16": 128, "resnet50": 128, "gnmt": 32}
V100 = "V100 (published, not recorded in the file)"
COSTS = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"


def node(number, module, forward=1.0, backward=2.0, activation=8.0, parameters=4.0):
    return f"node{number} -- {module} -- {COSTS.format(forward, backward, activation, parameters)}"


def graph(nodes, *edges):
    return "\n".join([*nodes, *(f"\tnode{source} -- node{target}" for source, target in edges)])


def made(nodes, *edges, size=1):
    """The profile of a graph of these nodes and edges."""
    return read(graph(nodes, *edges), "graph.txt", "model", size)


def published(name):
    return (PUBLISHED / f"{name}.txt").read_text()


def test_milliseconds_become_seconds_and_nodes_layers_in_topological_order_by_number():
    conv = node(9, "Conv2d(3, 64, kernel_size=(3, 3))", 1.5, 3)
    profile = made([node(10, "ReLU(inplace)"), conv, node(2, "Linear()")], (9, 10), (10, 2))
    assert [layer.name for layer in profile.layers] == ["node9", "node10", "node2"]
    assert [layer.type for layer in profile.layers] == ["Conv2d", "ReLU", "Linear"]
    assert profile.measurements[0].layers[0].forward_s == 0.0015


def test_inputs_carry_no_cost_and_what_later_layers_take_of_them_comes_from_the_first_stage():
    nodes = [node(1, "Input0", forward=500, activation=7), node(2, "A()"), node(3, "B()")]
    profile = made(nodes, (1, 2), (1, 3), (2, 3))
    assert [layer.name for layer in profile.layers] == ["node2", "node3"]
    assert chain_of(profile).a.tolist() == [0, 7 + 8, 0]
    assert chain_of(profile).compute_s(0, 2) == pytest.approx(0.006)


def test_a_list_of_activations_is_their_sum_and_a_stage_id_is_passed_over():
    lstm = node(1, "LSTM(1, 1)", activation="[6.0; 1.0; 1.0]") + " -- stage_id=3"
    profile = made([lstm, node(2, "Linear()")], (1, 2))
    assert profile.measurements[0].layers[0].output_bytes == 8


@pytest.mark.parametrize(
    ("written", "read"), [("7.4", 7), ("7.6", 8), ("[0.3; 0.3]", 1), ("1.6e9", 1600000000)]
)
def test_sizes_are_rounded_to_whole_bytes(written, read):
    profile = made([node(1, "Linear()", activation=written, parameters=written)])
    assert profile.measurements[0].layers[0].output_bytes == read
    assert profile.layers[0].parameter_bytes == read


def test_branches_that_end_in_getitem_are_dropped():
    modules = ["LSTM(1, 1)", "__getitem__(0)", "__getitem__(1)", "Linear()"]
    nodes = [node(number, module) for number, module in enumerate(modules, start=1)]
    layers = made(nodes, (1, 2), (1, 3), (2, 4)).layers
    assert [layer.name for layer in layers] == ["node1", "node2", "node4"]


def test_a_backward_under_a_tenth_of_the_forward_is_kept_and_noted():
    """5 ms forward: 0.49 ms are, 0.5 ms are not; nor is a layer without parameters, whose backward
    may take nothing.
    """
    nodes = [node(1, "A()", 5, 0.49), node(2, "B()", 5, 0.5), node(3, "C()", 5, 0, parameters=0)]
    profile = made(nodes, (1, 2), (2, 3))
    [note] = profile.notes
    assert (note.code, note.fields) == ("short-backward", {"layer": "node1"})
    assert note.text.startswith(
        "graph.txt: node1 (A): the backward takes 0.49 ms, the forward 5 ms: a measuring fault?"
    )
    assert profile.measurements[0].layers[0].backward_s == 0.00049


def test_a_microbatch_size_that_is_not_given_is_assumed_and_noted():
    for size, codes in ((None, ["assumed-microbatch-size"]), (1, []), (32, [])):
        profile = made([node(1, "A()")], size=size)
        assert profile.measurements[0].microbatch_size == (size or 1)
        assert [note.code for note in profile.notes] == codes
        assert [note.fields for note in profile.notes] == [{"microbatch_size": 1}] * len(codes)
    for size in (0, -1, 1.5, "2", True):
        with pytest.raises(PartoptError, match=r"`microbatch_size=.*`: expected a whole number"):
            made([node(1, "A()")], size=size)


def test_control_characters_do_not_come_in():
    with pytest.raises(PartoptError) as raised:
        made([node(1, "A\x1b[31m()")])
    assert raised.value.message == "graph.txt: line 1: node: has the control character '\\x1b'"


def test_every_malformed_line_is_named():
    faulty = [node(3, "C()", forward="fast"), node(4, "D()", backward=-1)]
    with pytest.raises(PartoptError) as raised:
        made([node(1, "A()"), "node2 - B()", *faulty], (1, 9))
    assert [part.message for part in raised.value.parts] == [
        "graph.txt: line 2: not a node and not an edge of a PipeDream graph",
        "graph.txt: line 3: forward_compute_time: 'fast' is not a number",
        "graph.txt: line 4: backward_compute_time: -1 is not a time or a size",
        "graph.txt: line 5: there is no node9",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph.txt: the file is empty"),
        (node(1, "Input0"), "graph.txt: no layers: every node is an Input"),
        (graph([node(1, "A()")] * 2), "graph.txt: line 2: node1 is listed twice"),
        (node(1, "A()").rpartition(",")[0], "graph.txt: line 1: node1: no parameter_size"),
        (
            graph([node(1, "A()"), node(2, "B()")], (1, 2), (2, 1)),
            "graph.txt: the graph has a cycle: node1 -- node2",
        ),
    ],
)
def test_what_is_no_graph_of_layers_is_refused(text, message):
    with pytest.raises(PartoptError) as raised:
        read(text, "graph.txt", "model", 1)
    assert raised.value.message == message
    assert raised.value.hint


@pytest.mark.parametrize(
    "name, layers, milliseconds",
    [("vgg16", 40, 672.5), ("resnet50", 176, 443.4), ("gnmt", 37, 89.4)],
)
def test_published_graphs(name, layers, milliseconds):
    profile = read(published(name), name, name, 128)
    assert len(profile.layers) == layers
    assert chain_of(profile).compute_s(0, layers) * 1e3 == pytest.approx(milliseconds, rel=1e-3)


def test_the_papers_own_split_of_vgg16_is_balanced():
    """15-1 on four servers of 4 (PipeDream, SOSP 2019, table 1): the convolutions fifteenfold, the
    rest once.
    """
    profile = read(published("vgg16"), "vgg16", "vgg16", 128)
    given = problem_of(profile, topology((4, 12e9), (4, 1.25e9)), cuts=(25,), replicas=(15, 1))
    first, second = planners.plan("manual", given).stages
    assert first.compute_s / 15 == pytest.approx(42.34e-3, rel=1e-3)
    assert second.compute_s == pytest.approx(37.43e-3, rel=1e-3)


@pytest.mark.parametrize("name", BATCHES)
def test_what_ships_is_what_is_imported(name, monkeypatch):
    monkeypatch.chdir(PUBLISHED)
    imported = partopt.import_profile(
        "pipedream", f"{name}.txt", microbatch_size=BATCHES[name], device=V100
    )
    ships = Profile.load(f"{name}.v100-published.float32")
    assert replace(imported, notes=[]) == replace(ships, notes=[])
    assert [(note.code, note.fields["layer"]) for note in imported.notes] == [
        (note.code, note.fields["layer"]) for note in ships.notes
    ]  # what ships says what is known of it


def test_the_batch_of_the_pictures_follows_from_the_first_convolution():
    """64 channels of 224 x 224 pixels (VGG-16) and of 112 x 112 (ResNet-50, stride 2), 4 bytes."""
    for name, side in (("vgg16", 224), ("resnet50", 112)):
        [first] = re.findall(r"Conv2d\(3, 64.*activation_size=([0-9.]+)", published(name))
        assert float(first) == BATCHES[name] * 64 * side * side * 4


def test_the_batch_of_the_sentences_follows_from_the_attention():
    """B sentences of S words, translated into T: S B and T B vectors of 1,024 numbers, T B S
    weights of the attention, S B T B / (T B S) = B. Each last state is B vectors of 1,024, too.
    """
    source = float(re.findall(r"Embedding.*activation_size=([0-9.]+)", published("gnmt"))[0])
    [sizes] = re.findall(r"RecurrentAttention.*activation_size=\[(.*)\]", published("gnmt"))
    target, hidden, _, _, weights = map(float, sizes.split(";"))
    assert (source / 4096) * (target / 4096) / (weights / 4) == BATCHES["gnmt"] == hidden / 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "shape"), [("vgg16", "v100-pcie", "15-1"), ("gnmt", "v100-nvlink", "8-8")]
)
def test_published_profiles_that_need_a_pipeline(name, topology, shape):
    """What profiles/README.md says of them; 15-1 is the paper's own answer for VGG-16.

    NCCL had rings alone when the paper's runs were made; its trees came in 2019.
    """
    profile = partopt.Profile.load(f"{name}.v100-published.float32")
    cluster = structs.replace(partopt.Topology.load(topology), allreduce="ring")
    result = partopt.solve(partopt.Job(profile, cluster))
    assert result.plan.shape == shape
    [parallel] = [plan for plan in result.alternatives if plan.planner == "data_parallel"]
    assert parallel.predicted.period_s > 1.2 * result.plan.predicted.period_s


def test_what_is_done_in_place_and_what_is_seen_otherwise_is_kept_once():
    """A picture of 7 bytes, a convolution's 8 with a ReLU in place and a view of it, then a linear
    layer's 9: 7 + 8 + 9 bytes kept.
    """
    nodes = [
        node(1, "Input", activation=7),
        node(2, "Conv2d(3, 64)"),
        node(3, "ReLU(inplace)"),
        node(4, "View(-1)"),
        node(5, "Linear()", activation=9),
    ]
    profile = made(nodes, (1, 2), (2, 3), (3, 4), (4, 5))
    groups = [(group.layers, group.bytes) for group in profile.measurements[0].stash_groups]
    assert groups == [([0], 7), ([0, 1, 2, 3], 8), ([3], 9)]
    assert chain_of(profile).stash_bytes(0, 4) == 24
