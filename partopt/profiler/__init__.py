"""Measures the layers of a PyTorch model.

This package and partopt.runtime are the only ones that import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from partopt.documents.profile import Model, Profile
from partopt.errors import ANSWER_IS_NO, PartoptError, did_you_mean
from partopt.profiler.clock import Clock
from partopt.profiler.device import (
    choose_device,
    choose_dtype,
    clock_of,
    describe_device,
    describe_environment,
    held_still,
)
from partopt.profiler.doubts import warn_if_shared
from partopt.profiler.load import ModelSource, find_model
from partopt.profiler.measure import Measurer, Progress, Subject
from partopt.profiler.step import Inputs, Loss
from partopt.profiler.units import GRANULARITIES

__all__ = ["ModelSource", "ProfilingStopped", "find_model", "profile_model", "profile_source"]


class ProfilingStopped(BaseException):
    """Profiling ended before all sizes were measured: by `error`, or by Ctrl-C where that is None.

    `profile` holds the microbatch sizes that were finished; only after Ctrl-C may it be None. Not
    an Exception, so that code which catches those lets Ctrl-C through, as it does
    KeyboardInterrupt.
    """

    def __init__(self, profile: Profile | None, error: Exception | None = None) -> None:
        super().__init__(
            f"profiling was stopped: {error}" if error else "profiling was interrupted"
        )
        self.profile = profile
        self.error = error


def profile_model(
    model: nn.Module,
    example_inputs: Callable[[int], Inputs],
    *,
    loss_fn: Loss | None = None,
    microbatch_sizes: Iterable[int] = (1, 2, 4, 8),
    device: str = "auto",
    dtype: str = "float32",
    granularity: str = "auto",
    units: Sequence[str] = (),
    steps: int = 10,
    identity: Model | None = None,
    clock: Clock | None = None,
    progress: Progress = lambda size, done, steps: None,
) -> Profile:
    """Measure every layer of `model` at each microbatch size, in place, as it trains.

    `example_inputs(size)` returns the inputs of one microbatch, `loss_fn(output, inputs)` the loss
    (default: the output's `.loss`, else the sum of its floating tensors). `granularity` and `units`
    choose the layers, see `partopt.profiler.units`. `steps` bare and as many instrumented steps are
    timed. The model is moved to the device and dtype, put into training mode, and left so.

    Raises PartoptError for bad input and where every size runs out of memory; ProfilingStopped,
    with what is finished, on Ctrl-C and where an error comes after a size was finished.
    """
    sizes = _checked_sizes(microbatch_sizes, steps, granularity)
    place = choose_device(device)
    timer = clock or clock_of(place)
    subject = Subject(
        model,
        example_inputs,
        loss_fn,
        place,
        choose_dtype(dtype),
        granularity,
        tuple(units),
        steps,
        timer,
        progress,
    )
    profile = _measured(
        Measurer(subject), sizes, identity or Model(name=type(model).__name__), dtype
    )
    warn_if_shared(timer)
    return profile


def _measured(measurer: Measurer, sizes: list[int], named: Model, dtype: str) -> Profile:
    """Measure the sizes; the model is left without gradients."""
    subject = measurer.subject
    with held_still(subject.device):
        try:
            subject.model.to(subject.device, subject.dtype).train()
            for size in sizes:
                measurer.measure(size)
        except KeyboardInterrupt:
            raise ProfilingStopped(_collect(measurer, named, dtype)) from None
        except Exception as error:
            finished = _collect(measurer, named, dtype)
            if finished is None:
                raise
            raise ProfilingStopped(finished, error) from error
        finally:
            subject.model.zero_grad(set_to_none=True)
    profile = _collect(measurer, named, dtype)
    if profile is None:
        smaller = (
            "a smaller model, or --dtype bfloat16"
            if sizes[0] == 1
            else "a smaller size: --microbatch 1"
        )
        raise PartoptError(
            "every microbatch size ran out of memory", f"try {smaller}", ANSWER_IS_NO
        )
    return profile


def profile_source(source: ModelSource, name: str | None = None, **options: Any) -> Profile:
    """Build the model that `source` found and measure it; `options` are those of
    `profile_model`.
    """
    identity = Model(name=name or source.name, entry=source.entry, arguments=source.arguments)
    try:
        return profile_model(
            source.build(),
            source.example_inputs,
            loss_fn=source.loss_fn,
            identity=identity,
            **options,
        )
    except ProfilingStopped as stopped:
        if isinstance(stopped.error, PartoptError):
            stopped.error = _located(stopped.error, source)
        raise
    except PartoptError as error:
        raise _located(error, source) from error.__cause__


def _located(error: PartoptError, source: ModelSource) -> PartoptError:
    """The error, said to be in the model's file where it is not about an option."""
    return error if error.message.startswith((source.place, "--")) else error.at(source.place)


def _checked_sizes(sizes: Iterable[int], steps: int, granularity: str) -> list[int]:
    """The microbatch sizes, each once, the smallest first.

    Raises PartoptError for what cannot be measured.
    """
    ordered = sorted(set(sizes))
    if not ordered or ordered[0] < 1:
        found = f"{ordered[0]} is not a microbatch size" if ordered else "no size given"
        raise PartoptError(f"--microbatch: {found}", "list whole numbers from 1, such as 1,2,4,8")
    if steps < 1:
        raise PartoptError(
            f"--steps: {steps} steps measure nothing", "give at least 1; 10 show the spread"
        )
    if granularity not in GRANULARITIES:
        raise PartoptError(
            f"--granularity: {granularity} is not known", did_you_mean(granularity, GRANULARITIES)
        )
    return ordered


def _collect(measurer: Measurer, model: Model, dtype: str) -> Profile | None:
    """The profile of the sizes measured so far, or None where none was measured whole."""
    if not measurer.layers or all(
        measurement.out_of_memory for measurement in measurer.measurements
    ):
        return None
    device = measurer.subject.device
    return Profile(
        model=model,
        device=describe_device(device),
        environment=describe_environment(device),
        dtype=dtype,
        layers=measurer.layers,
        measurements=measurer.measurements,
    )
