"""Tables fit 80 columns, whatever is in them."""

import pytest

from partopt.documents.profile import Environment
from partopt.documents.topology import Device, Level, Topology
from tests.helpers import (
    chain_profile,
    flat,
    measurement,
    out_of_memory,
    profile_of,
    two_level,
    uniform_profile,
)

LONG = [
    f"model.language_model.decoder.layers.{index}.feed_forward.gate_projection"
    for index in range(12)
]
NAMELESS = Topology(
    name="a-cluster-with-a-name-that-nobody-would-choose-but-somebody-will",
    device=Device(name="NVIDIA-H200-NVL-with-141-GB-of-memory", memory_bytes=150754820096),
    levels=[
        Level(
            name="two-cards-joined-by-a-bridge",
            link="nvlink-bridge-of-four-lanes",
            size=2,
            bandwidth_bytes_per_s=123456789e3,
            latency_s=1e-6,
        ),
        Level(
            name="host-with-two-sockets",
            link="pcie-5.0-x16-and-more",
            size=2,
            bandwidth_bytes_per_s=12345678.9e3,
            latency_s=0.1,
        ),
        Level(
            name="cluster",
            link="ethernet",
            size=3,
            bandwidth_bytes_per_s=1234567.8e3,
            links=16,
            bus=True,
        ),
    ],
)

PROFILES = {
    "one layer": uniform_profile(1),
    "64 layers": uniform_profile(64),
    "1000 layers": uniform_profile(1000),
    "long names": chain_profile(
        [0.0123456] * 12,
        [123.456] * 12,
        [123456789] * 12,
        [987654321] * 12,
        names=LONG,
        name="-".join(LONG[:2]),
    ),
    "slow": chain_profile([123.456] * 6, parameter_bytes=[10**12] * 6),
    "fast": chain_profile([1.234e-6] * 6, microbatch_size=64),
    "measured at length": profile_of(
        [
            measurement(
                [0.0123] * 4,
                microbatch_size=32768,
                step_s=0.1234,
                coverage=1.0123,
                overhead=12.345,
                optimizer_s=0.1234,
                peak_memory_bytes=123456789,
            ),
            out_of_memory(65536),
        ]
    ),
}
TOPOLOGIES = {
    "one": flat(1),
    "64": flat(64),
    "128": flat(128),
    "nested": two_level(8, 16),
    "names": NAMELESS,
}
# every content on the longest names, the longest names on every topology, and many stages
PAIRS = [
    *((content, "names") for content in PROFILES),
    *(("long names", cluster) for cluster in TOPOLOGIES if cluster != "names"),
    ("64 layers", "64"),
    ("64 layers", "nested"),
]
SHORT_PAIRS = [pair for pair in PAIRS[:-2] if pair[0] != "1000 layers" and pair[1] != "128"]


@pytest.fixture(autouse=True)
def search_of_short_pipelines(monkeypatch):
    """Warm-ups are searched for pipelines whose simulation is quick; long ones keep the formula's,
    and print the same tables.
    """
    monkeypatch.setattr("partopt.search.warmup.SEARCH_LIMIT", 2_000)


def widest(text: str) -> str:
    """The widest line; one of a single word, as a path in a command may be, is as wide as that."""
    return max((line for line in text.splitlines() if len(line.rstrip(" \\").split()) > 1), key=len)


@pytest.mark.slow
@pytest.mark.parametrize(("content", "cluster"), PAIRS)
@pytest.mark.parametrize("planner", ["pipedream", "gpipe", "data_parallel"])
def test_plans(partopt, profile_file, topology_file, tmp_path, content, cluster, planner):
    arguments = profile_file(PROFILES[content]), "--topology", topology_file(TOPOLOGIES[cluster])
    outcome = partopt(
        "plan",
        *arguments,
        "--planner",
        planner,
        "--memory",
        "1000 TB",
        "-o",
        tmp_path / "plan.json",
    )
    assert outcome.code in (0, 1)
    assert len(widest(outcome.out)) <= 80, widest(outcome.out)
    if outcome.code == 0:
        shown = partopt("show", tmp_path / "plan.json").out
        assert len(widest(shown)) <= 80, widest(shown)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [[], ["--schedule", "1f1b", "--microbatches", 12]])
@pytest.mark.parametrize(("content", "cluster"), SHORT_PAIRS)
def test_simulations(partopt, profile_file, topology_file, tmp_path, content, cluster, schedule):
    arguments = (
        profile_file(PROFILES[content]),
        "--topology",
        topology_file(TOPOLOGIES[cluster]),
        "--planner",
        "gpipe",
        *schedule,
    )
    if partopt("plan", *arguments, "--memory", "1000 TB", "-o", tmp_path / "plan.json").code == 0:
        what_if = [
            "--bandwidth",
            f"{TOPOLOGIES[cluster].levels[0].name}=1.234567 GB/s",
            "--microbatches",
            7,
        ]
        for given in ([], what_if):
            outcome = partopt("simulate", tmp_path / "plan.json", *given)
            assert outcome.code in (0, 1), outcome.err
            assert len(widest(outcome.out)) <= 80, widest(outcome.out)


@pytest.mark.parametrize("content", PROFILES)
def test_profiles(partopt, profile_file, content):
    shown = partopt("show", profile_file(PROFILES[content])).out
    assert len(widest(shown)) <= 80, widest(shown)


def test_a_profile_of_a_long_environment(partopt, profile_file):
    import msgspec

    environment = Environment(
        torch="2.13.0.dev20260101+cu130.with.local.changes",
        cuda="13.0.1 of a nightly build of some vendor",
    )
    shown = partopt(
        "show", profile_file(msgspec.structs.replace(uniform_profile(2), environment=environment))
    ).out
    assert len(widest(shown)) <= 80, widest(shown)


@pytest.mark.slow
@pytest.mark.parametrize(("content", "cluster"), SHORT_PAIRS)
def test_comparisons(partopt, profile_file, topology_file, content, cluster):
    outcome = partopt(
        "compare", profile_file(PROFILES[content]), "--topology", topology_file(TOPOLOGIES[cluster])
    )
    assert outcome.code == 0
    assert len(widest(outcome.out)) <= 80, widest(outcome.out)


@pytest.mark.parametrize("cluster", TOPOLOGIES)
def test_topologies(partopt, topology_file, cluster):
    shown = partopt("topology", "show", topology_file(TOPOLOGIES[cluster])).out
    assert len(widest(shown)) <= 80, widest(shown)


def test_the_list_of_topologies(partopt):
    assert len(widest(partopt("topology", "list").out)) <= 80
