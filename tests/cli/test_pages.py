"""Pages of every verb and document: as wide as they are told, whatever is in them, and plain where
the terminal is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click import unstyle
from msgspec.structs import replace

import partopt as po
from partopt.documents import doctor
from partopt.documents.doctor import Accelerator, Diagnosis, Exchange, Machine
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.profile import Device, Environment
from partopt.documents.topology import Topology
from partopt.documents.training_run import Check, Run
from partopt.planners import PLANNERS
from partopt.printable import shorten
from partopt.report import profile_text as profile
from partopt.report.clusters import render_links
from partopt.report.text import page_style
from partopt.runtime.link_fit import fit_links, levels_of
from partopt.schedules import SCHEDULES
from tests.helpers import (
    chain_profile,
    flat,
    measurement,
    out_of_memory,
    profile_of,
    two_level,
    uniform_profile,
)
from tests.links.synthetic import level_samples
from tests.links.synthetic import measurement as measured_links
from tests.report.pictures import cases
from tests.trainers.models import transformer

pytestmark = pytest.mark.any_effort  # a page is as wide whatever plan is on it
WIDTHS = [60, 200]
LONG = [
    f"model.language_model.decoder.layers.{index}.feed_forward.gate_projection"
    for index in range(12)
]
NAMELESS = Topology.parse(
    b"""
name: a-cluster-with-a-name-that-nobody-would-choose-but-somebody-will
device: {name: NVIDIA-H200-NVL-with-141-GB-of-memory, memory: 150754820096 B}
levels:
- {name: two-cards-joined-by-a-bridge, link: nvlink-bridge-of-four-lanes, size: 2,
   bandwidth: 123456789 kB/s, latency: 1 us}
- {name: host-with-two-sockets, link: pcie-5.0-x16-and-more, size: 2,
   bandwidth: 12345678.9 kB/s, latency: 100 ms}
- {name: cluster, link: ethernet, size: 3, bandwidth: 1234567.8 kB/s, links: 16, bus: true}
"""
)
NAME = "-".join(LONG[:2])
HEAVY = chain_profile([0.0123] * 11 + [1.5], parameter_bytes=[10**9] * 12, names=LONG, name=NAME)


def widest(text: str) -> str:
    """The widest line; one of a single word, as a path in a command may be, is as wide as that."""
    return max((line for line in text.splitlines() if len(line.rstrip(" \\").split()) > 1), key=len)


# --- of every kind, at other widths -----------------------------------------------------------


def heavy_run() -> Run:
    """A run that differs from one process, of a model and layers with long names."""
    plan = replace(cases.run(6, NAME).plan, topology=NAMELESS.name, shape="-".join(["12"] * 20))
    check = Check(
        equal=False,
        loss_error=1e-3,
        largest_error=0.12345,
        worst=LONG[0],
        compared="gradients",
        parameters=12345,
    )
    return replace(cases.run(6), plan=plan, check=check, remarks=[f"{name}: slow" for name in LONG])


def kinds() -> Iterator[tuple[str, po.Plan]]:
    """A document of every kind but files that people write."""
    job = po.Job(HEAVY, NAMELESS, memory="30 GB", schedule="1f1b", microbatches=12, effort="quick")
    plan = po.solve(job).plan
    yield "profile", HEAVY
    yield "plan", plan
    yield "comparison", po.compare(job)[0]
    yield "scaling", po.scale(job, [4, 12])
    yield "simulation", po.simulate(plan, microbatches=7, jitter="5%", draws=3).document
    yield "verification", po.verify(plan, HEAVY)
    yield "run", heavy_run()
    yield "doctor", heavy_machine()
    yield "trial", po.try_schedules(po.Uniform(stages=4, microbatches=8))


def heavy_machine() -> Diagnosis:
    """A machine with long names, eight devices, and much that is missing."""
    device = Device(name=f"{NAME} 80GB HBM3", type="cuda", memory_bytes=80 * 10**9)
    return Diagnosis(
        environment=HEAVY.environment,
        machine=Machine(system="Linux x86_64", processor=device, cores=208),
        devices=[
            Accelerator(device=device, capability="9.0", reaches=[k for k in range(8) if k != n])
            for n in range(8)
        ],
        backend="nccl",
        checks=[
            doctor.Check(name="second GPU", status="missing", text=NAME),
            doctor.Check(name="profile", status="failed", text=NAME, seconds=123.4, output=[NAME]),
        ],
        exchanges=[Exchange(kind="messages both ways", bytes=2**20, first_s=1.2, seconds=3.4e-5)],
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The documents in files."""
    folder = tmp_path_factory.mktemp("documents")
    found = {}
    for kind, document in kinds():
        found[kind] = folder / f"{kind}.json"
        document.save(str(found[kind]))
    found["flows"] = folder / "flows.json"
    plan = po.Plan.load(str(found["plan"]))
    po.simulate(plan).flows.save(str(found["flows"]))
    found["topology"] = folder / "cluster.yaml"
    found["topology"].write_text(NAMELESS.dump())
    return found


@pytest.fixture(scope="module")
def solve():
    """Solves the job of each schedule once."""
    solved: dict[str, po.Result] = {}
    original = po.solve

    def once(job: po.Job, *progress: object, **options: object) -> po.Result:
        if job.schedule not in solved:
            solved[job.schedule] = original(job, *progress, **options)
        return solved[job.schedule]

    return once


@pytest.fixture
def commands(files, solve, profile_file, topology_file, monkeypatch) -> dict[str, list[object]]:
    """Command lines that print a page: of documents, and of verbs whose page has more than one."""
    monkeypatch.setattr(po, "solve", solve)
    two_sizes = profile_of(
        [measurement([0.0123] * 6, microbatch_size=size) for size in (1, 2)],
        [10**9] * 6,
        LONG[:6],
        name=NAME,
    )
    job = [profile_file(two_sizes), "--topology", files["topology"], "--effort", "quick"]
    layout = [profile_file(transformer(), "t.json"), "--topology", topology_file()]
    return {
        **{kind: ["show", file] for kind, file in files.items()},
        "device": ["show", "h100"],
        "tried": ["plan", *job, "--memory", "30 GB"],
        "auto": ["plan", *job, "--schedule", "auto", "--global-batch", "12"],
        "layout": [
            "import",
            "megatron",
            "Et*4|t*3|t*3|t*2L",
            "--profile",
            *layout,
            "--microbatches",
            "8",
        ],
        "every layer": ["show", files["profile"], "--all"],
        "schedule": ["schedule", "interleaved", "--stages", "4", "--microbatches", "8"],
        "levels": ["show", files["topology"]],
        "topologies": ["topology", "list"],
    }


def pages(partopt: Callable[..., object], commands: dict[str, list[object]]) -> Iterator[str]:
    """The pages of the commands."""
    for name, words in commands.items():
        outcome = partopt(*words)
        assert outcome.code == 0, (name, outcome.err)
        yield outcome.out


# planners' names are shortened where a page is narrow
SHORTENED = {
    shorten(name, width)
    for name in SCHEDULES.keys() - PLANNERS.keys()
    for width in range(4, len(name))
}


@pytest.mark.slow
def test_every_page_is_as_wide_as_it_is_told_and_plain_on_a_dumb_terminal(
    partopt, monkeypatch, commands, files
):
    assert {*files, "device"} == {*DOCUMENTS}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        found = list(pages(partopt, commands))
        assert not "".join(found).isascii()
        for page in found:
            assert len(widest(page)) <= width, page
            assert not re.search(r"(does|DOES|NOT|FAILED|fits?)\.\.|\.\.(fit|FIT)\b", page)
            assert not set(re.findall(r"\S+\.\.\S+", page)) & SHORTENED
    monkeypatch.setenv("TERM", "dumb")
    assert "".join(pages(partopt, commands)).isascii()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_measurements_are_as_wide_as_they_are_told(width):
    levels = [level_samples(level) for level in levels_of(16, 4)[:1]]
    samples = measured_links(*levels, hosts=(LONG[0],) * 4)
    with page_style(width=width):
        fitted = fit_links(samples, NAMELESS.name, 4)
        for page in (profile.render_sizes(HEAVY), render_links(fitted)):
            assert len(widest(unstyle(page))) <= width, widest(unstyle(page))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "plain"),
    [
        ({}, False),
        ({"TERM": "xterm", "LANG": "de_DE.UTF-8"}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "C"}, True),
        ({"LC_ALL": "POSIX", "LANG": "en_GB.UTF-8"}, True),
        ({"LANG": "C", "LC_ALL": "en_GB.UTF-8"}, False),
        ({"LANG": "C", "PYTHONIOENCODING": "utf-8"}, False),
    ],
)
def test_a_locale_without_characters_has_plain_pages(
    partopt, monkeypatch, profile_file, told, plain
):
    for name in ("PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert partopt("show", profile_file(HEAVY)).out.isascii() is plain


# --- of any numbers and names, at 80 columns --------------------------------------------------

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
OPTIONS = [
    *((name, pair) for name in ("pipedream", "gpipe", "data_parallel") for pair in PAIRS),
    *(("gpipe --schedule 1f1b --microbatches 12", pair) for pair in SHORT_PAIRS),
]


@pytest.fixture
def shown(partopt, monkeypatch):
    """Runs a command whose page has to fit; warm-ups are searched for short pipelines alone."""
    monkeypatch.setattr("partopt.search.warmup.SEARCH_LIMIT", 2_000)

    def show(*words, codes=(0,)):
        outcome = partopt(*words)
        assert outcome.code in codes, outcome.err
        assert len(widest(outcome.out)) <= 80, widest(outcome.out)
        return outcome

    return show


@pytest.fixture
def job(profile_file, topology_file):
    return lambda content, cluster: [
        profile_file(PROFILES[content]),
        "--topology",
        topology_file(TOPOLOGIES[cluster]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pair"), OPTIONS, ids=lambda own: own if isinstance(own, str) else " on ".join(own)
)
def test_plans_and_simulations(shown, job, tmp_path, options, pair):
    path, words = tmp_path / "plan.json", ["--planner", *options.split(), "--memory", "1000 TB"]
    if shown("plan", *job(*pair), *words, "-o", path, codes=(0, 1)).code == 0:
        shown("show", path)
        level = TOPOLOGIES[pair[1]].levels[0].name
        what_if = ["--bandwidth", f"{level}=1.234567 GB/s", "--microbatches", 7]
        for conditions in ([], what_if) if "gpipe" in options and pair in SHORT_PAIRS else ():
            shown("simulate", path, *conditions, codes=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("content", "cluster"), SHORT_PAIRS)
def test_comparisons(shown, job, content, cluster):
    shown("compare", *job(content, cluster))


@pytest.mark.parametrize("content", PROFILES)
def test_profiles(shown, profile_file, content):
    shown("show", profile_file(PROFILES[content]))


def test_a_profile_of_a_long_environment(shown, profile_file):
    environment = Environment(
        torch="2.13.0.dev20260101+cu130.with.local.changes",
        cuda="13.0.1 of a nightly build of some vendor",
    )
    shown("show", profile_file(replace(uniform_profile(2), environment=environment)))


@pytest.mark.parametrize("cluster", TOPOLOGIES)
def test_topologies(shown, topology_file, cluster):
    shown("topology", "show", topology_file(TOPOLOGIES[cluster]))


def test_the_list_of_topologies(shown):
    shown("topology", "list")
