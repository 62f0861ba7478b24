"""A clock that tests set, small models, and profiles of them without real time."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.documents.device import Roofline
from partopt.documents.profile import Measurement, Model, Profile
from partopt.profiler import ModelSource, find_model
from partopt.profiler.device import Clock
from partopt.profiler.layer_choice import called_modules, choose_units
from partopt.profiler.layers import Tracker
from partopt.profiler.measuring import profile_of
from partopt.profiler.settings import ProfileSettings, Subject

# found, not imported: torchvision's import fails beside a CPU-only torch until the examples have
# declared what it lacks
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="this example comes from torchvision"
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="this example comes from transformers"
)

EXAMPLES = Path(__file__).parents[2] / "examples"


class FakeClock(Clock):
    """Stamp n reads n * n seconds: every interval is different, and sums of them are exact."""

    def __init__(self) -> None:
        self.stamps = itertools.count()

    def stamp(self) -> float:
        return float(next(self.stamps) ** 2)


class ProcessorClock(FakeClock):
    """Processor time of this process: what else the machine does meanwhile does not count."""

    def stamp(self) -> float:
        return time.process_time()


class Parts(nn.Module):
    """Named modules, and a forward given as a function of them and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def structure(
    model: nn.Module,
    example_inputs: Callable[[int], Any] = lambda size: torch.randn(size, 4),
    loss_fn: Any = None,
    clock: Any = None,
    **options: Any,
) -> Profile:
    """The profile of `model` at microbatch size 1 with times that mean nothing."""
    settings = {"microbatch_sizes": [1], "device": "cpu", "granularity": "leaf", "steps": 1}
    settings |= options
    subject = Subject(
        model, example_inputs, loss_fn, ProfileSettings(**settings), clock or FakeClock()
    )
    return profile_of(subject, Model(name=type(model).__name__))


def names(profile: Profile) -> list[str]:
    return [f"{layer.name}#{layer.call}" if layer.call else layer.name for layer in profile.layers]


def flows(profile: Profile) -> list[tuple[int, list[int], int]]:
    [measurement] = profile.measurements
    return [(tensor.producer, tensor.consumers, tensor.bytes) for tensor in measurement.tensors]


def stash(profile: Profile) -> list[tuple[list[int], int]]:
    [measurement] = profile.measurements
    return [(group.layers, group.bytes) for group in measurement.stash_groups]


def example(name: str, **arguments: Any) -> ModelSource:
    return find_model(str(EXAMPLES / f"{name}.py"), arguments)


def layer_seconds(measurement: Measurement) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in measurement.layers)


def device(**changes: Any) -> Roofline:
    """A device of round numbers: 1e9 flop/s, 1e6 bytes/s, launches for nothing."""
    numbers: dict[str, Any] = {
        "name": "Round",
        "type": "cpu",
        "memory_bytes": 10**9,
        "peaks_flops": {"float32": 1e9, "bfloat16": 1e9, "float16": 1e9},
        "bandwidth_bytes_per_s": 1e6,
        "launch_s": 0.0,
        "matmul": 1.0,
        "convolution": 1.0,
        "attention_forward": 1.0,
        "attention_backward": 1.0,
        "sha256": "",
    }
    return Roofline(**{**numbers, **changes})


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(linear(), nn.ReLU(), linear()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "called twice": lambda: Parts(
        lambda self, x: self.a(self.b(self.a(x))), a=linear(), b=linear()
    ),
    "skip": lambda: Parts(
        lambda self, x: self.c((y := self.a(x)) + self.b(y)), a=linear(), b=linear(), c=linear()
    ),
    "two sources": lambda: Parts(
        lambda self, x: self.c(self.a(x) + self.b(x)), a=linear(), b=linear(), c=linear()
    ),
    "tied": lambda: Parts(
        lambda self, x: nn.functional.linear(self.b(self.a(x)), self.a.weight),
        a=linear(),
        b=linear(),
    ),
    "view": lambda: Parts(
        lambda self, x: self.b(self.a(x).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)),
        a=linear(),
        b=linear(),
    ),
}


def tracked(model: nn.Module, inputs: Any, granularity: str = "leaf") -> Tracker:
    """A tracker of the units of `model` that has seen one forward."""
    tracker = Tracker(model, choose_units(model, called_modules(model, inputs), granularity))
    with tracker.discover():
        model(inputs)
    return tracker
