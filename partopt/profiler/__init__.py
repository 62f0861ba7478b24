"""Measures the layers of a PyTorch model, or estimates them for a device that is not there.

This package and partopt.runtime are the only ones that import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from partopt.documents.profile import Model, Profile
from partopt.profiler.as_trained import unwrap_compiled
from partopt.profiler.device import build_within_memory, clock_of
from partopt.profiler.group import check_group, check_parallel, open_group
from partopt.profiler.measuring import ProfilingStopped, check_resume, errors_name, profile_of
from partopt.profiler.settings import ProfileSettings, Subject, check_model, check_name
from partopt.profiler.source import ModelSource, find_model
from partopt.profiler.tensors import Inputs, Loss, with_labels

__all__ = ["ModelSource", "ProfilingStopped", "find_model", "measure", "measure_source"]


def measure(
    model: nn.Module,
    example_inputs: Callable[[int], Inputs],
    *,
    loss_fn: Loss | None = None,
    name: str | None = None,
    resume: Profile | None = None,
    **options: Any,
) -> Profile:
    """Measure every layer of `model` at every microbatch size, in place, as it trains.

    `example_inputs(size)` returns the inputs of one microbatch, `loss_fn(output, inputs)` the loss
    (default: the output's `.loss`, else the sum of its floating tensors). A loss whose second
    argument is called labels or target gets these: `example_inputs` then returns a pair of inputs
    and labels. `options` are the fields of `partopt.profiler.settings.ProfileSettings`. The model
    is moved to the device and dtype, put into training mode, and left so; `name` is what the
    profile calls it (default: its class). The sizes that the profile `resume` holds are taken from
    it. The profile's `notes` say what makes the measurements doubtful.

    Raises PartoptError for bad input and where every size runs out of memory; ProfilingStopped,
    with what is finished, on Ctrl-C and where an error comes after a size was finished.
    """
    settings = ProfileSettings(**options)
    check_model(model, example_inputs, loss_fn)
    inputs_of, loss = with_labels(model, example_inputs, loss_fn)
    resumed = check_resume(resume)
    given_name = resumed.model.name if resumed else type(unwrap_compiled(model)).__name__
    identity = Model(name=check_name(name) or given_name)
    with open_group(settings.torch_device) as group:
        check_group(group, settings.compile)
        check_parallel(model, group)
        clock = clock_of(settings.torch_device)
        subject = Subject(model, inputs_of, loss, settings, clock, group)
        return profile_of(subject, identity, resumed)


def measure_source(
    source: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    name: str | None = None,
    resume: Profile | None = None,
    **options: Any,
) -> Profile:
    """Build the model that `source` names and measure it.

    `source` is `FILE.py[:ATTR]` or `dotted.module[:ATTR]` and follows the contract of
    `partopt.profiler.source`; `arguments` are for its build function, `name` is by default that of
    the file. Everything else is as in `measure`, and so are the errors, which name the file where
    they are about it.
    """
    settings = ProfileSettings(**options)
    resumed = check_resume(resume)
    title = check_name(name) or (resumed and resumed.model.name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    with errors_name(found), open_group(settings.torch_device) as group:
        check_group(group, settings.compile)
        model = build_within_memory(
            found.build, settings.torch_device, settings.torch_dtype, settings.blocks
        )
        check_parallel(model, group)
        clock = clock_of(settings.torch_device)
        subject = Subject(model, found.example_inputs, found.loss_fn, settings, clock, group)
        return profile_of(subject, identity, resumed)
