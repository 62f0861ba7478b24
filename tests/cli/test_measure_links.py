"""`partopt topology measure` in the test's own process, where nothing is really measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from partopt.documents.topology import Topology
from partopt.runtime import link_measurement, processes
from partopt.runtime.link_measurement import LinkRun
from tests.links.synthetic import level_samples, measurement, server

GOOD = measurement(level_samples(server(2)), ranks=2)
POOR = measurement(
    level_samples(server(2), seconds_of=lambda x: 5e-5 + x / (3e9 if x < 1e6 else 0.5e9)),
    ranks=2,
)


@pytest.fixture
def measuring(monkeypatch):
    """Lets a run give a measurement at once."""

    def give(found):
        monkeypatch.setattr(LinkRun, "measure", lambda self, tell: found)

    give(GOOD)
    return give


@pytest.fixture
def no_processes(monkeypatch):
    """Fails where a process would be started."""

    def start(*_, **__):
        raise AssertionError("a process is started")

    monkeypatch.setattr(link_measurement, "run_ranks", start)


def test_a_good_fit_is_written(partopt, measuring, tmp_path):
    path = tmp_path / "mine.yaml"
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", path)
    assert outcome.code == 0
    assert "fit      good fit: largest error 0%" in outcome.out
    assert outcome.err == f"\nWrote {path}\nnext:    partopt plan PROFILE --topology {path}\n"
    topology = Topology.load(path)
    assert (topology.name, topology.devices) == ("mine", 2)
    assert path.read_text().startswith("# good fit: ")


def test_a_poor_fit_is_written_only_where_it_is_accepted(partopt, measuring, tmp_path):
    measuring(POOR)
    path = tmp_path / "mine.yaml"
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", path)
    assert outcome.code == 1
    assert outcome.errors[0].startswith(f"{path}: not written: the fit is poor, ")
    assert "--accept-poor writes it all the same" in outcome.hints[0]
    assert "POOR FIT" in outcome.out
    assert not path.exists()
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", path, "--accept-poor")
    assert outcome.code == 0
    assert path.read_text().startswith("# POOR FIT: ")
    assert Topology.load(path).devices == 2


def test_standard_output_has_the_file_alone(partopt, measuring):
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", "-", "--name", "lab")
    assert outcome.code == 0
    assert Topology.parse(outcome.out.encode()).name == "lab"
    assert "good fit" in outcome.err


def test_figures_as_json(partopt, measuring, tmp_path):
    measuring(POOR)
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", tmp_path / "c.yaml", "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, document["is_poor"]) == (1, True)
    assert document["measurement"]["levels"][0]["messages"][0]["seconds"] > 0
    assert document["topology"]["devices"] == 2


def test_a_busy_machine_is_said(partopt, measuring, tmp_path):
    measuring(replace(GOOD, load=1.5, cores=2))
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", tmp_path / "c.yaml")
    busy = "the machine is busy: a load of 3.0 on 2 cores before the measurement"
    assert f"warning: {busy}\n" in outcome.err
    assert f"# {busy}\n" in (tmp_path / "c.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--ranks", 1], "--ranks 1: a link has two ends"),
        (["--ranks", 4, "--per-server", 3], "--per-server 3: 4 ranks are not whole servers of 3"),
        (["--sizes", "4kB"], "--sizes 4000: latency and bandwidth need two sizes"),
        (["--sizes", "1 B,4kB"], "--sizes 1: a message has 4 bytes to 4 GiB"),
        (["--sizes", "4000,8kB"], "--sizes: '4000' has no unit"),
        (["--backend", "mpi"], "partopt topology measure: invalid value for '--backend'"),
        (["--repetitions", 1], "partopt topology measure: invalid value for '--repetitions'"),
        (["--json", "--output", "-"], "--json: standard output already has the file"),
    ],
)
def test_bad_options_before_any_process_starts(partopt, no_processes, tmp_path, arguments, error):
    outcome = partopt("topology", "measure", "-o", tmp_path / "c.yaml", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors[0].startswith(error)


@pytest.mark.parametrize(
    ("built", "error"),
    [
        (False, "--backend nccl: this torch was built without NCCL"),
        (True, "--backend nccl: 2 ranks need a GPU each, torch sees 1"),
    ],
)
def test_nccl_that_is_not_there(partopt, no_processes, monkeypatch, tmp_path, built, error):
    monkeypatch.setattr(processes.dist, "is_nccl_available", lambda: built)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 1)
    outcome = partopt(
        "topology", "measure", "--ranks", 2, "--backend", "nccl", "-o", tmp_path / "c.yaml"
    )
    assert (outcome.code, outcome.errors) == (2, [error])
    assert outcome.hints == ["--backend gloo is for processors"]


def test_an_existing_file_is_kept(partopt, no_processes, measuring, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("mine")
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", path)
    assert outcome.errors == [f"{path}: already exists"]
    assert path.read_text() == "mine"
    assert partopt("topology", "measure", "--ranks", 2, "-o", path, "--force").code == 0


def test_torchrun_says_how_many_ranks_there_are(partopt, no_processes, monkeypatch, tmp_path):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "h"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    outcome = partopt("topology", "measure", "--ranks", 2, "-o", tmp_path / "c.yaml")
    assert outcome.errors == ["--ranks 2: torchrun says how many ranks there are"]
