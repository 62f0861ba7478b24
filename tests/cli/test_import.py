"""`partopt import`."""

import pytest

from partopt.documents.profile import Profile
from tests.helpers import measurement, profile_of
from tests.importers.traces import on_gpu, write

NODES = [
    ("node1 -- Input0", 100.0, 0.0, "1000.0", 0.0),
    ("node2 -- Conv2d(3, 64)", 1.0, 2.0, "[400.0; 600.0]", 70.0),
    ("node3 -- Linear(64, 10)", 3.0, 4.0, "10.0", 7.0),
]
GRAPH = "".join(
    f"{node} -- forward_compute_time={forward}, backward_compute_time={backward}, "
    f"activation_size={activation}, parameter_size={parameters}\n"
    for node, forward, backward, activation, parameters in NODES
).encode()
GRAPH += b"\tnode1 -- node2\n\tnode2 -- node3\n"


@pytest.fixture
def imported(partopt, tmp_path):
    def run(content: bytes = GRAPH, *options):
        (tmp_path / "net.txt").write_bytes(content)
        return partopt(
            "import", "pipedream", tmp_path / "net.txt", "-o", tmp_path / "net.json", *options
        )

    return run


@pytest.mark.slow
def test_a_graph_becomes_a_profile_and_then_a_plan(partopt, imported, tmp_path):
    outcome = imported(GRAPH, "--microbatch-size", 128)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.splitlines()[0] == f"Wrote {tmp_path / 'net.json'}: 2 layers"
    loaded = Profile.load(str(tmp_path / "net.json"))
    assert (loaded.model.name, loaded.measurements[0].microbatch_size) == ("net", 128)
    assert partopt("plan", tmp_path / "net.json", "--topology", "v100-pcie").code == 0


def test_a_microbatch_size_that_is_not_given_is_said(imported, tmp_path):
    assert imported(GRAPH, "--name", "mine").err.startswith(
        f"warning: {tmp_path / 'net.txt'}: the file does not record its microbatch size; 1 is "
        "assumed"
    )
    assert Profile.load(str(tmp_path / "net.json")).model.name == "mine"


def test_from_standard_input_to_standard_output(partopt):
    outcome = partopt("import", "pipedream", "-", "--microbatch-size", 1, "-o", "-", stdin=GRAPH)
    assert (outcome.code, outcome.err) == (0, "")
    assert [layer["name"] for layer in outcome.document["layers"]] == ["node2", "node3"]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (GRAPH, b"", "the file is empty"),
        (GRAPH, b"\n \n", "the file is empty"),
        (GRAPH, GRAPH.splitlines()[0], "no layers: every node is an Input"),
        (
            b"node2 -- Conv2d",
            b"node two -- Conv2d",
            "line 2: not a node and not an edge of a PipeDream graph",
        ),
        (
            b"\tnode2 -- node3",
            b"node2 -- node3",
            "line 5: not a node and not an edge of a PipeDream graph",
        ),
        (b", parameter_size=7.0", b"", "line 3: node3: no parameter_size"),
        (b"=3.0", b"=nan", "line 3: forward_compute_time: nan is not a time or a size"),
        (b"=3.0", b"=-3.0", "line 3: forward_compute_time: -3.0 is not a time or a size"),
        (b"=3.0", b"=inf", "line 3: forward_compute_time: inf is not a time or a size"),
        (b"=7.0", b"=1e300", "line 3: parameter_size: 1e300 is not a time or a size"),
        (b"=3.0", b"=three", "line 3: forward_compute_time: 'three' is not a number"),
        (b"[400.0; 600.0]", b"[400.0; ]", "line 2: activation_size: '[400.0; ]' is not a number"),
        (
            b"[400.0; 600.0]",
            b"[1e308; 1e308]",
            "line 2: activation_size: '[1e308; 1e308]' is not a number",
        ),
        (b"\tnode2 -- node3", b"\tnode2 -- node9", "line 5: there is no node9"),
        (
            b"\tnode2 -- node3",
            b"\tnode2 -- node3\n\tnode3 -- node2",
            "the graph has a cycle: node2 -- node3",
        ),
        (b"\tnode2 -- node3", b"\tnode2 -- node2", "the graph has a cycle: node2"),
        (b"node3 --", b"node2 --", "line 3: node2 is listed twice"),
        (
            b"node3 --",
            b"node" + b"3" * 5000 + b" --",
            "line 3: not a node and not an edge of a PipeDream graph",
        ),
        (GRAPH, b"\xff\xfe", "not text"),
    ],
)
def test_a_malformed_graph_is_refused_and_nothing_is_written(imported, tmp_path, old, new, error):
    outcome = imported(GRAPH.replace(old, new, 1), "--microbatch-size", 1)
    assert (outcome.code, outcome.errors[0]) == (2, f"{tmp_path / 'net.txt'}: {error}")
    assert not (tmp_path / "net.json").exists()


def test_a_graph_in_which_nothing_takes_time_is_refused(imported, tmp_path):
    content = (
        GRAPH.replace(b"=1.0", b"=0")
        .replace(b"=2.0", b"=0")
        .replace(b"=3.0", b"=0")
        .replace(b"=4.0", b"=0")
    )
    outcome = imported(content)
    assert (outcome.code, len(outcome.errors)) == (2, 1)
    assert outcome.errors[0].endswith("layers: no layer takes any time")


def test_a_module_called_input_that_is_no_source_is_a_layer(imported, tmp_path):
    assert imported(GRAPH.replace(b"Linear(64, 10)", b"InputNorm(64)")).code == 0
    assert [layer.type for layer in Profile.load(str(tmp_path / "net.json")).layers] == [
        "Conv2d",
        "InputNorm",
    ]


def test_a_short_backward_is_noted_and_kept(imported):
    outcome = imported(
        GRAPH.replace(b"backward_compute_time=4.0", b"backward_compute_time=0.01"),
        "--microbatch-size",
        1,
    )
    assert outcome.code == 0
    assert (
        "node3 (Linear): the backward takes 0.01 ms, the forward 3 ms: a measuring fault?"
        in outcome.err
    )


def test_an_output_is_asked_for_and_not_overwritten(partopt, imported, tmp_path):
    assert partopt("import", "pipedream", tmp_path / "net.txt").errors == [
        "partopt import: no output file"
    ]
    assert imported().code == 0
    assert imported().hints == ["add --force to replace it"]
    assert imported(GRAPH, "--force").code == 0


def test_a_device_that_is_given_is_the_profiles(imported, tmp_path):
    assert imported(GRAPH, "--device", "V100").code == 0
    assert Profile.load(str(tmp_path / "net.json")).device.name == "V100"


@pytest.fixture
def traced(partopt, tmp_path):
    """A trace of two stages on a GPU, a profile of their layers, and their plan."""
    write(tmp_path / "trace.json", on_gpu())
    layers = measurement([1.0, 2.0], output_bytes=[8, 8], microbatch_size=4)
    onto, plan = tmp_path / "onto.json", tmp_path / "plan.json"
    profile_of([layers], names=["first", "second"]).save(str(onto))
    given = ("--topology", "workstation-2", "--cuts", "1", "--replicas", "1,1", "-o", plan)
    assert partopt("plan", onto, *given).code == 0
    return tmp_path / "trace.json", "--onto", onto, "--plan", plan


def test_a_trace_becomes_a_profile_and_then_a_plan(partopt, traced, tmp_path):
    measured = tmp_path / "measured.json"
    outcome = partopt("import", "torch-profile", *traced, "-o", measured)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith(
        f"warning: times are medians of 1 passes in {traced[0]}; bytes are"
    )
    assert f"Wrote {measured}: 2 layers" in outcome.err
    loaded = Profile.load(str(measured))
    assert loaded.measurements[0].layers[1].backward_s == pytest.approx(400e-6)
    assert partopt("plan", measured, "--topology", "workstation-2").code == 0


def test_a_trace_from_standard_input_with_a_name(partopt, traced):
    given = (*traced[1:], "--name", "mine", "--device", "H200", "-o", "-")
    outcome = partopt("import", "torch-profile", "-", *given, stdin=traced[0].read_bytes())
    assert outcome.document["model"]["name"] == "mine"
    assert outcome.document["device"]["name"] == "H200"


def test_a_trace_alone_is_refused_for_what_it_lacks(partopt, traced, tmp_path):
    for given, hint in (
        (traced[:1], "say whose they are: --onto PROFILE, a profile of the same model"),
        (traced[:3], "name the plan that ran: --plan PLAN"),
        ((*traced, "--microbatch-size", 4), "leave it out"),
    ):
        outcome = partopt("import", "torch-profile", *given, "-o", tmp_path / "x.json")
        assert (outcome.code, outcome.hints) == (2, [hint])
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("more", [["--onto", "gpt.cpu.float32"], ["--plan", "p.json"], ["g.txt"]])
def test_a_graph_takes_nothing_of_a_trace(imported, more):
    outcome = imported(GRAPH, *more)
    assert (outcome.code, len(outcome.errors)) == (2, 1)
    assert outcome.errors[0].endswith(": not of partopt import pipedream")


def test_a_run_is_of_partopts_own(partopt):
    outcome = partopt("import", "run", "run.json", "-o", "p.json")
    assert outcome.code == 2
    assert outcome.hints == ["partopt profile --from-run RUN --onto PROFILE"]
