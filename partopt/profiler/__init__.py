"""Measures the layers of a PyTorch model.

This package and partopt.runtime are the only ones that import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from partopt.documents.profile import Model, Profile
from partopt.errors import PartoptError
from partopt.profiler.compilation import opened
from partopt.profiler.device import clock_of
from partopt.profiler.group import check_group, check_parallel, open_group
from partopt.profiler.load import ModelSource, find_model
from partopt.profiler.memory import build_within_memory
from partopt.profiler.resume import check_resume
from partopt.profiler.session import ProfilingStopped, measure_subject
from partopt.profiler.settings import (
    Progress,
    check_model,
    check_name,
    check_settings,
)
from partopt.profiler.step import Inputs, Loss
from partopt.profiler.subject import Subject

__all__ = ["ModelSource", "ProfilingStopped", "find_model", "measure", "measure_source"]


def measure(
    model: nn.Module,
    example_inputs: Callable[[int], Inputs],
    *,
    microbatch_sizes: Iterable[int] = (1, 2, 4, 8),
    loss_fn: Loss | None = None,
    device: str = "auto",
    dtype: str = "float32",
    granularity: str = "auto",
    units: Sequence[str] = (),
    steps: int | None = None,
    autocast: str | None = None,
    compile: bool = False,
    name: str | None = None,
    resume: Profile | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure every layer of `model` at each microbatch size, in place, as it trains.

    `example_inputs(size)` returns the inputs of one microbatch, `loss_fn(output, inputs)` the loss
    (default: the output's `.loss`, else the sum of its floating tensors). `granularity` and `units`
    choose the layers, see `partopt.profiler.units`. `autocast` is the dtype of an autocast over
    forward and loss, `compile` compiles each layer first; a model that comes compiled is measured
    so as well. `steps` bare and as many instrumented steps are timed (default: 10, and 5 where one
    takes more than a second), and `progress(size, done, steps)` is called after each pair, with 0
    steps while a size is prepared. The model is moved to the device and dtype, put into training
    mode, and left so; `name` is what the profile calls it (default: its class). The sizes that the
    profile `resume` holds are taken from it. The profile's `notes` say what makes the measurements
    doubtful.

    Raises PartoptError for bad input and where every size runs out of memory; ProfilingStopped,
    with what is finished, on Ctrl-C and where an error comes after a size was finished.
    """
    settings = check_settings(
        microbatch_sizes, device, dtype, granularity, units, steps, progress, autocast, compile
    )
    check_model(model, example_inputs, loss_fn)
    resumed = check_resume(resume)
    own = resumed.model.name if resumed else type(opened(model)).__name__
    identity = Model(name=check_name(name) or own)
    with open_group(settings.device) as group:
        check_group(group, settings.compiled)
        check_parallel(model, group)
        clock = clock_of(settings.device)
        subject = Subject(model, example_inputs, loss_fn, settings, clock, group)
        return measure_subject(subject, identity, resumed)


def measure_source(
    source: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    microbatch_sizes: Iterable[int] = (1, 2, 4, 8),
    device: str = "auto",
    dtype: str = "float32",
    granularity: str = "auto",
    units: Sequence[str] = (),
    steps: int | None = None,
    autocast: str | None = None,
    compile: bool = False,
    name: str | None = None,
    resume: Profile | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Build the model that `source` names and measure it.

    `source` is `FILE.py[:ATTR]` or `dotted.module[:ATTR]` and follows the contract of
    `partopt.profiler.load`; `arguments` are for its build function, `name` is by default that of
    the file. Everything else is as in `measure`, and so are the errors, which name the file where
    they are about it.
    """
    settings = check_settings(
        microbatch_sizes, device, dtype, granularity, units, steps, progress, autocast, compile
    )
    resumed = check_resume(resume)
    title = check_name(name) or (resumed and resumed.model.name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    try:
        with open_group(settings.device) as group:
            check_group(group, settings.compiled)
            model = build_within_memory(found.build, settings.device, settings.dtype)
            check_parallel(model, group)
            inputs_of, loss_fn = found.example_inputs, found.loss_fn
            clock = clock_of(settings.device)
            subject = Subject(model, inputs_of, loss_fn, settings, clock, group)
            return measure_subject(subject, identity, resumed)
    except ProfilingStopped as stopped:
        if isinstance(stopped.error, PartoptError):
            stopped.error = found.locate(stopped.error)
        raise
    except PartoptError as error:
        raise found.locate(error) from error.__cause__
