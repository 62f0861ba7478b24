"""Pages of small documents, letter by letter: what they were is what they are."""

import hashlib

import pytest
from msgspec.structs import replace

import partopt as po
from partopt.documents.plan import RunnerUp
from partopt.documents.profile import Group
from partopt.documents.training_run import Check
from tests.helpers import ROOT, chain_profile, flat, limited, two_level, uniform_profile
from tests.report.pictures import cases

PAGES = ROOT / "tests/golden/pages.txt"
MARK = "=== "  # before the name of a page


def plan(topology, profile=None, **options):
    """The plan of an own split, which no search decides."""
    return po.solve(po.Job(profile or uniform_profile(6), topology, **options)).plan


def documents():
    """Documents by their names; a text is a file of YAML."""
    servers = two_level(2, 2, outer_links=2, memory_bytes=10**9)
    flush = {"schedule": "1f1b", "microbatches": 8}
    uneven = chain_profile([1e-3, 2e-3, 3e-3, 1e-3], output_bytes=[10**6] * 4)
    pair = plan(servers, cuts=[2], replicas=[2, 2], recompute="always", **flush)
    stale = plan(flat(3), uneven, cuts=[3], replicas=[2, 1], schedule="pipedream")
    loops = {"schedule": "interleaved", "microbatches": 4, "cuts": [1, 3, 5], "replicas": [1] * 4}
    check = Check(
        equal=False,
        loss_error=1e-3,
        largest_error=0.12345,
        worst="a.weight",
        compared="gradients",
        parameters=12,
    )
    run = replace(cases.run(4), check=check, remarks=["the machine was busy"])
    yield "a profile", uneven
    yield "a profile of repeated blocks", cases.many_layers(5)
    yield "a plan", pair
    yield "an asynchronous plan", stale
    yield "a plan that does not fit", limited(pair, 10**7)
    yield "a plan with an alternative", replace(stale, runners_up=[RunnerUp.of(stale)])
    tensor = replace(uneven, group=Group(ranks=2))
    yield "a plan of groups", plan(flat(4), tensor, cuts=[3], replicas=[1, 1], schedule="pipedream")
    yield "a simulation", po.simulate(pair, microbatches=6, bandwidth={"server": "1 GB/s"}).document
    yield "a simulation that varies", po.simulate(stale, jitter="5%", draws=3, seed=1).document
    yield "a simulation of loops", po.simulate(plan(flat(2), **loops), memory="20 MB").document
    flows = po.simulate(pair).flows
    unknown = replace(flows.flows[0], critical=None, per_second=None, saved=None)
    yield "flows", replace(flows, flows=[unknown, *flows.flows[1:]])
    yield "a comparison", cases.comparison(3)
    yield "a scaling", cases.scaling([1, 8, 32])
    yield "a run", run
    yield "trials", po.try_schedules(po.Uniform(stages=4, microbatches=8))
    yield "a trial", po.try_schedule("zb-h1", po.Uniform(stages=2, microbatches=3)).document
    for stages in (8, 9):  # of more than eight devices not all numbers are named
        pipeline = po.Uniform(stages=stages, microbatches=stages)
        yield f"a trial of {stages} devices", po.try_schedule("1f1b", pipeline).document
    yield "a cluster", servers.dump()


OTHERS = {
    "60 columns": ("COLUMNS", "60"),
    "120 columns": ("COLUMNS", "120"),
    "a dumb terminal": ("TERM", "dumb"),
}


@pytest.fixture
def pages(partopt, tmp_path, monkeypatch):
    """What `show` prints of each document, and digests of it on other terminals."""
    monkeypatch.chdir(tmp_path)
    found = []
    for name, document in documents():
        file = tmp_path / name.replace(" ", "-")
        if isinstance(document, str):
            file.write_text(document)
        else:
            document.save(str(file))
        outcome = partopt("show", file.name)
        found.append(f"{MARK}{name}\n{outcome.out}{outcome.err}")
        for terminal, (variable, value) in OTHERS.items():
            with monkeypatch.context() as patched:
                patched.setenv(variable, value)
                digest = hashlib.sha256(partopt("show", file.name).out.encode()).hexdigest()
            found[-1] += f"{terminal}: {digest[:12]}\n"
    return found


@pytest.mark.slow
def test_pages_read_as_they_did(pages, request):
    """Whoever changes a page on purpose runs `pytest tests/report --update`, and reads them."""
    if request.config.getoption("--update"):
        PAGES.write_text("\n".join(pages))
    expected = PAGES.read_text().split(f"\n{MARK}")
    assert "\n".join(pages).split(f"\n{MARK}") == expected
