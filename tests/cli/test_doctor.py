"""`partopt doctor`: a real diagnosis of this machine, and what it says of commands that fail."""

import json
import subprocess
from pathlib import Path

import click
import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from partopt import cli, describe_host
from partopt.cli import doctor
from partopt.documents.doctor import Accelerator, Diagnosis
from partopt.documents.training_run import Check
from partopt.runtime.exchanges import exchange
from partopt.runtime.link_fit import fit_links
from partopt.runtime.processes import run_local
from tests.links.synthetic import level_samples, measurement, server
from tests.report.pictures import cases

CHECK = Check(
    compared="gradients", loss_error=0.0, largest_error=0.0, worst="a", parameters=1, equal=True
)
MISSING = {"GPU", "second GPU", "NCCL"}  # of a torch for processors


def parse(verb, arguments):
    """The values of a command line, of which nothing runs."""
    with cli.partopt.make_context("partopt", [verb]) as context:
        command = cli.partopt.get_command(context, verb)
    while isinstance(command, click.Group):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command.make_context(verb, list(arguments)).params


@pytest.fixture
def written(tmp_path, partopt, monkeypatch):
    """A diagnosis, with recorded links and a recorded run for what other tests start in earnest."""

    def run(command, cwd, **_):
        monkeypatch.chdir(cwd)
        module, *arguments = command[2:]
        if module == "partopt.runtime.exchanges":
            printed = msgspec.json.encode(run_local(2, exchange, backend=arguments[0])[0])
            return subprocess.CompletedProcess(command, 0, printed, b"")
        if arguments[0] == "topology":
            ranks = parse("topology", arguments[1:])["ranks"]
            found = fit_links(
                measurement(level_samples(server(ranks)), ranks=ranks), "links", ranks
            )
            Path(cwd, "links.yaml").write_text(found.text)
            return subprocess.CompletedProcess(command, 0, msgspec.json.encode(found.document), b"")
        if arguments[0] == "run":
            given = parse("run", arguments[1:])
            assert Path(given["plan"]).is_file()
            assert given["check"]
            replace(cases.run(2), check=CHECK).save(given["output"])
            return subprocess.CompletedProcess(command, 0, b"", b"")
        done = partopt(*arguments)
        return subprocess.CompletedProcess(command, done.code, done.out.encode(), done.err.encode())

    monkeypatch.setattr(doctor.subprocess, "run", run)
    path = tmp_path / "doctor.json"
    done = partopt("doctor", "-o", path)
    assert done.code == 0, done.err
    return path, done.out


@pytest.mark.slow
def test_one_file_has_the_machine_and_all_that_was_tried(written, partopt):
    path, page = written
    found = Diagnosis.load(str(path))
    status = {each.name: each.status for each in found.checks}
    assert found.failed == []
    assert {name for name in MISSING if status[name] == "missing"} == MISSING
    tried = ("exchanges", "links", "profile", "plan", "run")
    assert [status[name] for name in tried] == ["ok"] * 5
    assert found.backend == "gloo"
    assert [each.kind for each in found.exchanges] == [
        "message",
        "messages both ways",
        "all-reduce",
        "all-gather",
        "broadcast",
        "reduce",
    ]
    assert all(each.seconds and not each.error for each in found.exchanges)
    assert found.profile is not None
    assert [each.microbatch_size for each in found.profile.measurements] == [4, 8]
    assert found.links is not None
    assert found.links["schema"] == "partopt.links/1"
    assert found.run is not None
    assert found.run.check is not None
    assert found.run.check.equal
    for words in ("this torch was built without CUDA", "ranks exchange over gloo", "all-reduce"):
        assert words in " ".join(page.split())
    follows_its_schema_and_is_shown_again(path, page, partopt)


def follows_its_schema_and_is_shown_again(path, page, partopt):
    jsonschema.validate(json.loads(path.read_text()), json.loads(partopt("schema", "doctor").out))
    shown = partopt("show", path)
    assert shown.code == 0
    assert shown.out.split() == page.split()


def test_what_fails_or_hangs_is_said_and_the_rest_is_tried(partopt, tmp_path, monkeypatch):
    def run(command, **options):
        words = " ".join(command)
        if "topology" in words:
            raise subprocess.TimeoutExpired(command, 1.0, None, b"measuring\nall-reduce of 2")
        if "exchanges" in words:
            found = [{"kind": "message", "bytes": 8, "error": "no such device"}]
            return subprocess.CompletedProcess(command, 0, json.dumps(found).encode(), b"")
        return subprocess.CompletedProcess(command, 2, b"", b"error: no\nhint: try")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    outcome = partopt("doctor", "-o", tmp_path / "d.json")
    assert outcome.code == 1
    assert outcome.errors == ["failed: exchanges, links, profile"]
    checks = {each.name: each for each in Diagnosis.load(str(tmp_path / "d.json")).checks}
    assert checks["exchanges"].text == "message: no such device"
    assert checks["links"].text == "did not end within 300 s"
    assert checks["links"].output == ["measuring", "all-reduce of 2"]
    assert (checks["profile"].text, checks["profile"].output) == (
        "exit code 2",
        ["error: no", "hint: try"],
    )
    assert checks["plan"].text == "not tried: there is no profile.json"
    assert checks["run"].status == "missing"


@pytest.mark.parametrize(
    ("gpus", "backend", "ranks", "runs"),
    [
        (0, "gloo", "2", {"run": "gloo"}),
        (1, "gloo", "2", {"run": "gloo", "run on one GPU": "nccl"}),
        (2, "nccl", "2", {"run": "nccl", "run, torch's engine": None}),
        (8, "nccl", "4", {"run": "nccl", "run, torch's engine": None}),
    ],
)
def test_what_is_tried_follows_the_gpus(partopt, tmp_path, monkeypatch, gpus, backend, ranks, runs):
    host = describe_host()
    devices = [Accelerator(device=host.machine.processor)] * gpus
    monkeypatch.setattr(
        "partopt.describe_host", lambda: host._replace(devices=devices, backend=backend)
    )
    tried = []

    def run(command, cwd, **_):
        tried.append(command[3:])
        if "-o" in command and "plan" in command:  # `run` needs it
            (Path(cwd) / command[command.index("-o") + 1]).write_text("{}")
        if "profile" in command:
            (Path(cwd) / "profile.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, b"[]" if len(tried) == 1 else b"{}", b"")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(doctor._Trial, "load", lambda *_: None)
    path = tmp_path / "d.json"
    assert partopt("doctor", "-o", path).code == 0
    names = [each.name for each in Diagnosis.load(str(path)).checks]
    assert [each for each in names if each.startswith("run")] == [*runs]
    [measured] = [each for each in tried if each[:2] == ["topology", "measure"]]
    assert measured[measured.index("--ranks") + 1] == ranks
    backends = [
        each[each.index("--backend") + 1] if "--backend" in each else None
        for each in tried
        if each[0] == "run"
    ]
    assert backends == [*runs.values()]


def test_a_file_that_is_there_is_kept(partopt, tmp_path):
    (tmp_path / "d.json").write_text("mine")
    assert partopt("doctor", "-o", tmp_path / "d.json").code == 2
    assert (tmp_path / "d.json").read_text() == "mine"
