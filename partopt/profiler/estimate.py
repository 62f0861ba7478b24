"""Estimates the layers of a PyTorch model on a device that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from partopt.documents.device import Roofline, same_device
from partopt.documents.estimates import cluster_of
from partopt.documents.profile import Model, Profile
from partopt.errors import PartoptError
from partopt.profiler.estimating.calibration import calibrate as scale_to
from partopt.profiler.estimating.calibration import check_seconds
from partopt.profiler.estimating.clock import RooflineClock
from partopt.profiler.estimating.collectives import Interconnect
from partopt.profiler.estimating.pretended_group import (
    TOPOLOGY,
    check_interconnect,
    make_parallel,
    open_pretended_group,
)
from partopt.profiler.fake import build_without_weights, fake_mode
from partopt.profiler.load import ModelSource, find_model
from partopt.profiler.random_numbers import RandomNumbers
from partopt.profiler.session import measure_subject
from partopt.profiler.settings import (
    Progress,
    Settings,
    check_model,
    check_name,
    check_settings,
)
from partopt.profiler.step import Inputs, Loss
from partopt.profiler.subject import Subject

_USUAL = "bfloat16"  # in which models are trained on what computes in it


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
    All else, and the errors, are as in `partopt.profiler.measure`; what needs the values of tensors
    is refused too.
    """
    settings, clock = _settings(
        device, microbatch_sizes, dtype, granularity, units, progress, autocast
    )
    check_seconds(calibrate)
    check_model(model, example_inputs, loss_fn)
    subject = Subject(model, example_inputs, loss_fn, settings, clock)
    identity = Model(name=check_name(name) or type(model).__name__)
    return scale_to(measure_subject(subject, identity), calibrate)


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
    topology: TOPOLOGY | None = None,
) -> Profile:
    """What the model that `source` names would take on `device`; it is built without weights.

    `source`, `arguments` and `name` are as in `partopt.profiler.measure_source`. A `group` of so
    many ranks runs it together, over the innermost links of a `topology`, a file or a shipped name:
    its build makes it parallel over the process group that is there, or it is a model of
    transformers, which is cut as its class says. All else is as in `estimate`.
    """
    links = check_interconnect(group, topology)
    settings, clock = _settings(
        device, microbatch_sizes, dtype, granularity, units, progress, autocast, links
    )
    check_seconds(calibrate)
    title = check_name(name)
    found = find_model(source, arguments)
    identity = Model(name=title or found.name, entry=found.entry, arguments=found.arguments)
    try:
        with open_pretended_group(group) as ranks:
            model = _build(found)
            make_parallel(model, ranks)
            inputs_of, loss_fn = found.example_inputs, found.loss_fn
            subject = Subject(model, inputs_of, loss_fn, settings, clock, ranks)
            return scale_to(measure_subject(subject, identity), calibrate)
    except PartoptError as error:
        raise found.locate(error) from error.__cause__


def _build(source: ModelSource) -> nn.Module:
    """The model without its weights, or with them where its build needs their values."""
    before = RandomNumbers()
    try:
        with build_without_weights(fake_mode()):
            return source.build()
    except Exception:  # whatever it is, an ordinary build fails of it too, or not
        before.restore()
        return source.build()


def _settings(
    device: str | os.PathLike[str],
    microbatch_sizes: Iterable[int],
    dtype: str | None,
    granularity: str,
    units: Sequence[str],
    progress: Progress | None,
    autocast: str | None,
    links: Interconnect | None = None,
) -> tuple[Settings, RooflineClock]:
    """The settings of tracing on the CPU, and the clock of the device."""
    roofline = Roofline.load(device)
    if links is not None and not same_device(roofline.name, links.topology.device.name):
        raise PartoptError(
            f"`topology={links.topology.name}`: a cluster of {links.topology.device.name}, not of "
            f"{roofline.name}",
            f"give the cluster of the device: `topology={cluster_of(roofline.name) or 'CLUSTER'}`",
            code="other-device",
            option="topology",
        )
    if dtype is None:
        half = autocast is None and _USUAL in roofline.peaks_flops
        dtype = _USUAL if half else "float32"
    settings = check_settings(
        microbatch_sizes, "cpu", dtype, granularity, units, 1, progress, autocast
    )
    roofline.check_dtype(settings.dtype_name)
    if settings.autocast_name is not None:
        roofline.check_dtype(settings.autocast_name, "autocast")
    return settings, RooflineClock(roofline, links)
