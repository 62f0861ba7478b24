"""Losses that take labels: what comes with the inputs, and what the model gets of it."""

import functools
import inspect

import pytest
import torch
from torch import nn

from partopt import estimate, measure
from partopt.errors import PartoptError
from partopt.profiler import find_model, measure_source
from partopt.profiler.step import run_forward
from partopt.profiler.tensors import Labelled, split_labels, with_labels
from tests.forked import run_forked

LOSS = nn.functional.cross_entropy


def classifier(size=None):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def pair(size):
    return torch.randn(size, 4), torch.randint(3, [size])


def of_labels(output, labels):
    assert labels.dtype is torch.int64
    return LOSS(output, labels)


def of_targets(output, target):
    return LOSS(output, target)


def of_inputs(output, inputs):
    assert isinstance(inputs, torch.Tensor)
    return output.square().mean() + inputs.mean()


@pytest.mark.parametrize(
    ("loss_fn", "labels"),
    [
        (of_labels, True),
        (of_targets, True),
        (LOSS, True),
        (functools.partial(LOSS, label_smoothing=0.1), True),
        (nn.CrossEntropyLoss(), True),
        (of_inputs, False),
        (lambda output, _: output.sum(), False),
        (lambda output: output, False),
        (max, False),
        (None, False),
    ],
)
def test_the_name_of_its_second_argument_says_what_a_loss_takes(loss_fn, labels):
    given = torch.ones(2, 4)
    found = split_labels((given, given), loss_fn, lambda: inspect.signature(of_inputs), "it")
    assert isinstance(found, Labelled) is labels


def of_noise(output, noise):
    return (output - noise).square().mean()


class Denoiser(nn.Module):
    """Has two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, step):
        return self.last(self.first(x) + step)


def vector(size):
    return torch.randn(size, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "loss_fn", "labels"),
    [
        (nn.Linear(4, 4), lambda size: (vector(size), vector(size)), of_noise, True),
        (nn.Linear(4, 4), vector, of_noise, False),
        (Denoiser(), lambda size: ((vector(size), vector(size)), vector(size)), of_noise, True),
        (Denoiser(), lambda size: ({"x": vector(size), "step": 1}, vector(size)), of_noise, True),
        (Denoiser(), lambda size: (vector(size), vector(size)), of_noise, False),
        (nn.Linear(4, 4), lambda size: (vector(size), vector(size)), of_inputs, False),
    ],
)
def test_by_any_other_name_it_takes_what_the_model_does_not(model, inputs, loss_fn, labels):
    given = with_labels(model, inputs, loss_fn)[0](2)
    assert isinstance(given, Labelled) is labels
    assert labels is False or (
        given.labels.shape == (2, 4) and run_forward(model, given) is not None
    )


@pytest.mark.slow
def test_a_file_whose_loss_takes_noise_is_measured_as_the_model_is(tmp_path):
    file = tmp_path / "net.py"
    loss = "def loss_fn(out, noise): return (out - noise).square().mean()"
    inputs = "torch.randn(size, 8), torch.randn(size, 8)"
    file.write_text(
        FILE.replace("loss_fn = nn.CrossEntropyLoss()", loss).replace(
            "torch.randn(size, 8), torch.randint(8, [size])", inputs
        )
    )
    source = find_model(file)
    assert isinstance(source.example_inputs(2), Labelled)
    measured = measure_source(file, device="cpu", steps=1, **OPTIONS)
    assert len(measured.layers) == 4


OPTIONS = {"microbatch_sizes": [2], "granularity": "leaf", "dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [of_labels, LOSS, nn.CrossEntropyLoss()])
def test_the_model_gets_the_inputs_and_the_loss_the_labels(loss_fn):
    measured = measure(classifier(), pair, loss_fn=loss_fn, device="cpu", steps=1, **OPTIONS)
    assert [layer.name for layer in measured.layers] == ["0", "1", "2"]
    assert measured.model.tokens_per_sample is None
    [estimated] = estimate(classifier(), pair, "h100", loss_fn=loss_fn, **OPTIONS).measurements
    assert estimated.tensors == measured.measurements[0].tensors
    # the loss keeps labels of 8 bytes each, which are nobody's
    assert all(each.gradient for each in estimated.tensors)


def test_a_loss_of_the_inputs_keeps_its_meaning():
    inputs = lambda size: torch.randn(size, 4)  # noqa: E731
    measure(classifier(), inputs, loss_fn=of_inputs, device="cpu", steps=1, **OPTIONS)


@pytest.mark.parametrize(
    ("inputs", "found"),
    [(lambda size: torch.randn(size, 4), "Tensor"), (lambda size: (1, 2, 3), "3 values")],
)
def test_without_a_pair_there_are_no_labels(inputs, found):
    with pytest.raises(PartoptError, match=f"gave {found}, and loss_fn takes labels") as refused:
        measure(classifier(), inputs, loss_fn=LOSS, device="cpu", steps=1, **OPTIONS)
    assert refused.value.code == "no-labels"


def test_a_pair_without_a_loss_of_labels_is_two_arguments_and_the_hint_says_so():
    with pytest.raises(PartoptError) as refused:
        measure(classifier(), pair, device="cpu", steps=1, **OPTIONS)
    assert "the second of a pair is for a loss_fn(output, labels)" in refused.value.hint


FILE = """
import torch
from torch import nn

loss_fn = nn.CrossEntropyLoss()

def build():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

def example_inputs(size):
    return torch.randn(size, 8), torch.randint(8, [size])
"""
DATA = """
def data(rank, replicas):
    while True:
        yield example_inputs(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", [FILE, FILE + DATA], ids=["examples", "data"])
def test_stages_train_with_labels_as_one_process_does(partopt, tmp_path, file):
    model, profile, plan = tmp_path / "net.py", tmp_path / "net.json", tmp_path / "plan.json"
    model.write_text(file)
    measuring = ["--device", "cpu", "--steps", 1, "--microbatch", 2]
    assert partopt("profile", model, *measuring, "-o", profile).code == 0
    options = ["--cuts", "2", "--replicas", "1,1", "--schedule", "1f1b", "--microbatches", 4]
    topology = ["--topology", "v100-pcie", "--planner", "manual"]
    assert partopt("plan", profile, *topology, *options, "-o", plan).code == 0
    checking = [] if "data" in file else ["--check"]
    done = run_forked("partopt", ["run", str(plan), str(model), "--steps", "1", *checking])
    assert done.returncode == 0, done.stderr
