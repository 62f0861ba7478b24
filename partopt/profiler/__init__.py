"""Measures the layers of a PyTorch model, or estimates them for a device that is not there.

This package and partopt.runtime are the only ones that import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from partopt.documents.device import Roofline, cluster_of, same_device
from partopt.documents.profile import Model, Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.profiler.as_trained import opened
from partopt.profiler.collectives import Interconnect, make_parallel, open_pretended_group
from partopt.profiler.device import clock_of
from partopt.profiler.estimating import Estimator, RooflineClock, check_seconds, scale_to
from partopt.profiler.group import check_group, check_parallel, open_group
from partopt.profiler.measuring import ProfilingStopped, check_resume, profile_of
from partopt.profiler.memory import build_within_memory
from partopt.profiler.settings import Progress, Settings, Subject, check_model, check_name
from partopt.profiler.source import ModelSource, find_model
from partopt.profiler.tensors import Inputs, Loss
from partopt.profiler.weightless import build_weightless

__all__ = [
    "ModelSource",
    "ProfilingStopped",
    "estimate",
    "estimate_source",
    "find_model",
    "measure",
    "measure_source",
]


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
    settings = Settings.of(
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
        return profile_of(subject, identity, resumed)


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
    `partopt.profiler.source`; `arguments` are for its build function, `name` is by default that of
    the file. Everything else is as in `measure`, and so are the errors, which name the file where
    they are about it.
    """
    settings = Settings.of(
        microbatch_sizes, device, dtype, granularity, units, steps, progress, autocast, compile
    )
    resumed = check_resume(resume)
    title = check_name(name) or (resumed and resumed.model.name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    with _errors_name(found), open_group(settings.device) as group:
        check_group(group, settings.compiled)
        model = build_within_memory(found.build, settings.device, settings.dtype)
        check_parallel(model, group)
        clock = clock_of(settings.device)
        subject = Subject(model, found.example_inputs, found.loss_fn, settings, clock, group)
        return profile_of(subject, identity, resumed)


def estimate(
    model: nn.Module,
    example_inputs: Callable[[int], Inputs],
    device: str | os.PathLike[str],
    *,
    microbatch_sizes: Iterable[int] = (1, 2, 4, 8),
    loss_fn: Loss | None = None,
    dtype: str | None = None,
    granularity: str = "auto",
    units: Sequence[str] = (),
    autocast: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    calibrate: float | None = None,
) -> Profile:
    """What every layer of `model` would take on `device`, a device file or a shipped name.

    Nothing is measured: one step at each microbatch size runs on fake tensors, and each operation
    takes what a roofline says. `dtype` is by default bfloat16, float32 under `autocast` or where
    the device does not compute in bfloat16. `calibrate` is the seconds of a step, forward and
    backward, measured at the first size: all times are scaled to it. The model is left where it is.
    All else, and the errors, are as in `measure`; what needs the values of tensors is refused too.
    """
    roofline = Roofline.load(device)
    settings = _settings_of(
        roofline, microbatch_sizes, dtype, granularity, units, progress, autocast
    )
    check_seconds(calibrate)
    check_model(model, example_inputs, loss_fn)
    subject = Subject(model, example_inputs, loss_fn, settings, RooflineClock(roofline))
    identity = Model(name=check_name(name) or type(model).__name__)
    return scale_to(profile_of(subject, identity, measurer=Estimator), calibrate)


def estimate_source(
    source: str | os.PathLike[str],
    device: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    microbatch_sizes: Iterable[int] = (1, 2, 4, 8),
    dtype: str | None = None,
    granularity: str = "auto",
    units: Sequence[str] = (),
    autocast: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    calibrate: float | None = None,
    group: int = 1,
    topology: str | os.PathLike[str] | Topology | None = None,
) -> Profile:
    """What the model that `source` names would take on `device`; it is built without weights.

    `source`, `arguments` and `name` are as in `measure_source`. A `group` of so many ranks runs it
    together, over the innermost links of a `topology`, a file or a shipped name: its build makes it
    parallel over the process group that is there, or it is a model of transformers, which is cut as
    its class says. All else is as in `estimate`.
    """
    links, roofline = Interconnect.of(group, topology), Roofline.load(device)
    if links is not None and not same_device(roofline.name, links.topology.device.name):
        raise PartoptError(
            f"`topology={links.topology.name}`: a cluster of {links.topology.device.name}, not of "
            f"{roofline.name}",
            f"give the cluster of the device: `topology={cluster_of(roofline.name) or 'CLUSTER'}`",
            code="other-device",
            option="topology",
        )
    settings = _settings_of(
        roofline, microbatch_sizes, dtype, granularity, units, progress, autocast
    )
    check_seconds(calibrate)
    title = check_name(name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    with _errors_name(found), open_pretended_group(group) as ranks:
        model = build_weightless(found.build)
        make_parallel(model, ranks)
        clock = RooflineClock(roofline, links)
        subject = Subject(model, found.example_inputs, found.loss_fn, settings, clock, ranks)
        return scale_to(profile_of(subject, identity, measurer=Estimator), calibrate)


def _settings_of(
    device: Roofline,
    microbatch_sizes: Iterable[int],
    dtype: str | None,
    granularity: str,
    units: Sequence[str],
    progress: Progress | None,
    autocast: str | None,
) -> Settings:
    """The settings of a step on fakes of the CPU, in number formats that the device has."""
    if dtype is None:
        usual = "bfloat16"  # in which models are trained on what computes in it
        dtype = usual if autocast is None and usual in device.peaks_flops else "float32"
    settings = Settings.of(
        microbatch_sizes, "cpu", dtype, granularity, units, 1, progress, autocast
    )
    device.check_dtype(settings.dtype_name)
    if settings.autocast_name is not None:
        device.check_dtype(settings.autocast_name, "autocast")
    return settings


@contextlib.contextmanager
def _errors_name(source: ModelSource) -> Iterator[None]:
    """Errors in this context name the model's file where they are about it."""
    try:
        yield
    except ProfilingStopped as stopped:
        if isinstance(stopped.error, PartoptError):
            stopped.error = source.locate(stopped.error)
        raise
    except PartoptError as error:
        raise source.locate(error) from error.__cause__
