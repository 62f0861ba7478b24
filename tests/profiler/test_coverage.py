"""Time of the processor: the layers add up to the bare step.

Shares of it are asserted, never seconds; a busy machine gets three tries.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.profiler.helpers import (
    ProcessorClock,
    example,
    layer_seconds,
    needs_torchvision,
    structure,
)

MODELS = {
    "gpt": ({"layers": 4, "width": 256, "context": 64}, 2),
    "vgg16": ({"size": 32, "classes": 10}, 2),
    "resnet50": ({"size": 64, "classes": 10}, 2),
}


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Threads that wait for each other take processor time without doing anything."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's step is no part of what is asserted, and takes as long as all the others."""
    monkeypatch.setattr("partopt.profiler.step.Stepper.optimizer", lambda *_: None)


@pytest.mark.usefixtures("single_thread", "no_optimizer")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchvision")
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        pytest.param("vgg16", marks=needs_torchvision),
        pytest.param("resnet50", marks=needs_torchvision),
    ],
)
def test_the_layers_cover_the_bare_step_within_ten_percent(name: str) -> None:
    arguments, size = MODELS[name]
    source = example(name, **arguments)
    tries = []
    for _ in range(3):
        [measurement] = structure(
            source.build(),
            source.example_inputs,
            source.loss_fn,
            ProcessorClock(),
            microbatch_sizes=[size],
            granularity="auto",
            steps=7,
        ).measurements
        assert measurement.coverage == pytest.approx(
            layer_seconds(measurement) / measurement.step_s
        )
        tries.append(measurement.coverage)
        if 0.9 <= measurement.coverage <= 1.1:
            return
    pytest.fail(f"coverage {tries}")
