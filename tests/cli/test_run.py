"""`partopt run` in the test's own process: what it asks for and shows; nothing is trained."""

import json
import signal
from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

import partopt as po
from partopt.documents.training_run import Check, Run
from partopt.runtime.measured import TrainingRun
from tests.helpers import flat, uniform_profile
from tests.report.pictures import cases


@pytest.fixture(scope="module")
def finished():
    job = po.Job(uniform_profile(4), flat(2), schedule="1f1b", microbatches=2, cuts=[2])
    return TrainingRun(cases.run(2), po.simulate(po.solve(job).plan).execution)


@pytest.fixture
def run(partopt, monkeypatch, finished, tmp_path):
    """Runs a plan with options; `given` has with what, and `ends` is how it ends."""
    finished.measured.plan.save(str(tmp_path / "plan.json"))

    def start(*options, ends=finished):
        def run_source(plan, model, **given):
            print("printed by the model")
            start.given = {"planner": plan.planner, "model": model} | given
            if isinstance(ends, BaseException):
                raise ends
            return ends

        monkeypatch.setattr(po, "run_source", run_source)
        return partopt("run", tmp_path / "plan.json", "model.py", *options)

    return start


def test_the_page_is_printed_and_what_the_model_prints_is_not_on_it(run):
    done = run("--set", "width=4", "--steps", 3, "--every", 2, "--save", "folder", "--check")
    assert (done.code, done.err) == (0, "printed by the model\n")
    assert "samples/s" in done.out
    expected = {"planner": "manual", "model": "model.py", "arguments": {"width": 4}, "steps": 3}
    expected |= {"every": 2, "save": "folder", "check": True, "rate": 1e-3, "seed": 0}
    expected |= {"engine": "auto", "backend": "auto", "check_device": "auto"}
    expected |= {"microbatches": None, "resume": None}
    assert run.given == expected


def test_the_run_or_its_timeline_is_written(run, finished, tmp_path):
    done = run("-o", tmp_path / "run.json")
    assert done.err.endswith(f"\nWrote {tmp_path / 'run.json'}\n") and "samples/s" in done.out
    assert Run.load(str(tmp_path / "run.json")) == finished.document
    done = run("-o", tmp_path / "run.trace.json", "--json")
    assert done.err.endswith(f"\nWrote {tmp_path / 'run.trace.json'}\n")
    assert Run.parse(done.out.encode()) == finished.document
    assert json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    done = run("-o", "-")
    assert (done.err, Run.parse(done.out.encode())) == ("printed by the model\n", finished.document)


@pytest.mark.parametrize("name", ["run.json", "run.trace.json"])
def test_a_file_that_is_there_is_replaced_by_force_alone(run, tmp_path, name):
    (tmp_path / name).write_text("mine")
    done = run("-o", tmp_path / name)
    assert (done.code, done.errors) == (2, [f"{tmp_path / name}: already exists"])
    assert "printed" not in done.err and (tmp_path / name).read_text() == "mine"
    assert run("-o", tmp_path / name, "--force").code == 0
    assert (tmp_path / name).read_text() != "mine"


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [((), 130, "interrupted"), ((signal.SIGTERM,), 143, "terminated")],
)
def test_a_run_that_is_stopped_says_by_what(run, given, code, says):
    done = run(ends=KeyboardInterrupt(*given))
    assert (done.code, done.out) == (code, "")
    assert done.err == f"printed by the model\n{says}: every process has ended\n"


def test_a_rank_that_has_nothing_to_show_is_silent(run, tmp_path):
    done = run("-o", tmp_path / "run.json", ends=None)
    assert (done.code, done.out) == (0, "")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("equal", [True, False])
def test_a_run_that_differs_from_one_process_is_shown_and_ends_with_1(run, finished, equal):
    check = Check(
        equal=equal,
        loss_error=2e-3,
        largest_error=0.12345,
        worst="layer 1",
        compared="gradients",
        parameters=12,
    )
    done = run(ends=changed(finished, document=replace(finished.document, check=check)))
    assert (done.code, "samples/s" in done.out) == (0 if equal else 1, True)
    says = "the run is not equal to one process: gradients of layer 1 differ by 0.1 of the largest"
    assert done.errors == ([] if equal else [f"{says}, losses by 0.002"])
