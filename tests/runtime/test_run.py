"""`partopt run`: a model of a file trains by a plan, and what it prints is what it did."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from partopt import Job, Plan, Profile, solve
from partopt.documents.training_run import Run
from partopt.errors import PartoptError
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.report.run_text import render
from partopt.runtime.run import RunOptions, check_plan, run_plan
from tests.forked import run_forked
from tests.helpers import flat

MODEL = '''
import torch
from torch import nn


class Tied(nn.Module):
    """An embedding, three layers, and the embedding again as the head."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh())
                                    for _ in range(3)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def build(width=8):
    return Tied(width)


def example_inputs(batch_size):
    return torch.randint(0, 11, (batch_size, 5))


def loss_fn(output, inputs):
    return nn.functional.cross_entropy(output.flatten(0, 1), inputs.flatten())
'''
OPTIMIZER = "\n\ndef optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.5)\n"
DATA = """

def data(rank, replicas):
    own = [torch.full((2, 5), number) for number in range(rank, 6, replicas)]
    yield from torch.utils.data.DataLoader(own, batch_size=None, num_workers=1)
"""
UNTIED = MODEL.replace("        self.head.weight = self.embed.weight\n", "")

HOOKED = MODEL.replace(
    "self.head =", "self.body[0].register_full_backward_hook(lambda *_: None)\n        self.head ="
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes a model file, measures it, and plans it; gives the paths of plan and model.

    The profile is beside them.
    """
    folder = tmp_path_factory.mktemp("run")

    def make(name, text=MODEL, units=(), **options):
        model, path = folder / f"{name}.py", folder / f"{name}.json"
        model.write_text(textwrap.dedent(text))
        given = {"schedule": "1f1b", "microbatches": 4} | options
        measured = {"microbatch_sizes": [2], "steps": 1, "granularity": "block", "units": units}
        profile = measure_source(str(model), **measured)
        profile.save(folder / f"{name}.profile.json", force=True)
        devices = given.pop("devices", sum(given.get("replicas", [1, 1])))
        solve(Job(profile, flat(devices), **given)).plan.save(str(path), force=True)
        return str(path), str(model)

    return make


def partopt(*arguments):
    return run_forked("partopt", [str(argument) for argument in arguments])


def document_of(ran):
    assert ran.returncode == 0, ran.stderr
    return Run.parse(ran.stdout.encode())


@pytest.mark.slow
def test_a_plan_of_unequal_replicas_and_a_tied_parameter_is_equal_to_one_process(made, tmp_path):
    plan, model = made("tied", cuts=[2], replicas=[2, 1])
    written = tmp_path / "out.trace.json"
    ran = partopt("run", plan, model, "--check", "--steps", 3, "--json", "-o", written)
    document = document_of(ran)
    check = document.check
    assert check.equal
    assert check.loss_error < 1e-6 and check.largest_error < 1e-5
    assert check.parameters == 7  # the tied one counts once
    assert (document.steps, len(document.losses), len(document.steps_s)) == (3, 3, 3)
    assert [(row.rank, row.stages) for row in document.ranks] == [(0, [0]), (1, [0]), (2, [1])]
    assert sorted(document.steps_s[1:])[0] == document.measured_s
    assert document.predicted_s == pytest.approx(Plan.load(plan).predicted.iteration_s)
    names = {event.get("name") for event in json.loads(written.read_text())["traceEvents"]}
    assert {"0F0", "1B3"} <= names or {"F0", "B3"} <= names
    page = render(document)
    assert "check    equal to one process" in page
    assert max(len(line) for line in page.splitlines()) <= 80
    (tmp_path / "run.json").write_text(ran.stdout)
    closes_the_loop(document, tmp_path / "run.json", Path(plan).with_suffix(".profile.json"))


@pytest.mark.slow
def test_ranks_that_a_plan_leaves_idle_are_not_started(made):
    plan, model = made("idle", UNTIED, cuts=[2], replicas=[1, 1], devices=4)
    assert Plan.load(plan).idle_ranks == [2, 3]
    document = document_of(partopt("run", plan, model, "--check", "--steps", 1, "--json"))
    assert document.check.equal
    assert [row.rank for row in document.ranks] == [0, 1]


def closes_the_loop(document, run, onto):
    """A plan by the profile of the run has stages that take what they took."""
    again = run.with_name("again.json")
    made = partopt("profile", "--from-run", run, "--onto", onto, "-o", again)
    assert (made.returncode, made.stdout) == (0, "")
    assert f"medians of 2 steps, the first left out, in {run}, 1f1b of 2-1" in made.stderr
    job = Job(Profile.load(again), flat(3), schedule="1f1b", microbatches=4)
    planned = solve(job.with_(cuts=[2], replicas=[2, 1])).plan
    for stage, took in zip(planned.stages, document.stages, strict=True):
        assert stage.forward_s == pytest.approx(took.forward_s)
        assert stage.backward_s == pytest.approx(took.backward_s)


def test_a_model_that_cannot_be_cut_so_is_refused_before_any_process_starts(made):
    units = ["embed", "body.0", "body.1", "body.2", "head"]
    plan, model = made("hooked", HOOKED, units, cuts=[2])
    ran = partopt("run", plan, model, "--check")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert 'a full backward hook on "body.0" wraps what layer 1 "body.0" gets' in ran.stderr
    assert "hint:" in ran.stderr


@pytest.mark.slow
def test_an_asynchronous_plan_learns_from_the_data_of_each_replica(made):
    """Labels are the inputs, and every microbatch is one number: the model learns the six.

    They are loaded by processes of the ranks.
    """
    options = {"schedule": "pipedream", "microbatches": None, "cuts": [2], "replicas": [2, 1]}
    plan, model = made("data", UNTIED + OPTIMIZER + DATA, **options)
    one, two = (("run", plan, model, "--microbatches", 6, "--steps", steps) for steps in (1, 2))
    document = document_of(partopt(*one, "--check", "--json"))
    assert document.plan.microbatches == 6
    assert document.check.compared == "gradients"
    assert "gradients of 8 parameters" in render(document)
    over = partopt(*two)
    assert over.returncode != 0
    # those of a replica, or all six: whichever rank comes first to what is not there
    assert re.search(r"ended after [36] microbatches, before number ", over.stderr)
    assert "rank" in over.stderr and "Traceback" not in over.stderr
    with pytest.raises(PartoptError, match="7 microbatches a step are no multiple of its 2"):
        run_plan(Plan.load(plan), find_model(model), RunOptions(microbatches=7))


@pytest.mark.slow
def test_a_gradient_that_is_wrong_is_told(made, tmp_path):
    """A loss that counts the last stage's rank twice is not that of one process."""
    broken = MODEL.replace(
        "    return nn.functional",
        "    import torch.distributed as dist\n"
        "    twice = 2 if dist.get_rank() else 1\n"
        "    return twice * nn.functional",
    ).replace("dist.get_rank()", "dist.is_initialized() and dist.get_rank()")
    plan, model = made("wrong", broken, cuts=[2])
    ran = partopt("run", plan, model, "--check", "--steps", 1)
    assert ran.returncode == 1
    assert "NOT equal to one process" in ran.stdout
    assert "error: the run is not equal to one process: gradients of " in ran.stderr


def test_what_cannot_run_is_refused_before_any_process_starts(made, monkeypatch):
    path, model = made("refused", cuts=[2])
    plan, source = Plan.load(path), find_model(model)
    for options, expected in (
        ({"steps": 0}, "`steps=0`"),
        ({"backend": "mpi"}, "`backend=mpi`: unknown backend"),
        ({"backend": "nccl"}, "`backend=nccl`"),
        ({"microbatches": 8}, "`microbatches=8`: not possible"),
    ):
        with pytest.raises(PartoptError, match=expected):
            run_plan(plan, source, RunOptions(**options))
    with pytest.raises(PartoptError, match="bytes of parameters in this model"):
        run_plan(plan, find_model(model, {"width": 4}), RunOptions())
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PartoptError, match="the plan has 2 ranks, torchrun started 3"):
        run_plan(plan, source, RunOptions())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_tied_parameter_of_an_asynchronous_plan_is_refused_with_the_way_out(made, schedule):
    plan, _ = made(schedule, schedule=schedule, microbatches=None, cuts=[2], replicas=[1, 1])
    with pytest.raises(PartoptError, match="several stages hold the parameter") as raised:
        check_plan(Plan.load(plan))
    assert "`tied=together`" in raised.value.hint


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_and_says_which(made):
    dying = MODEL.replace(
        "    return nn.functional",
        "    import os, torch.distributed as dist\n"
        "    if dist.is_initialized() and torch.is_grad_enabled():\n"
        "        os._exit(7)\n"
        "    return nn.functional",
    )
    plan, model = made("dying", dying, cuts=[2])
    ran = partopt("run", plan, model, "--steps", 1)
    assert ran.returncode == 1
    assert "rank 1" in ran.stderr and "Traceback" not in ran.stderr
    assert Path(model).exists()
