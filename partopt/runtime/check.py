"""The first step of a run against one process that has the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from partopt.documents.run import Check
from partopt.runtime.context import Context
from partopt.runtime.one_process import Reference, WholeModel, switch_off_dropout, train_alone
from partopt.runtime.parameters import own_parameter_names
from partopt.runtime.stale_reference import train_stale
from partopt.runtime.training import RankTraining, Training
from partopt.runtime.visible_rates import visible_rates

EQUAL = 1e-4  # relative error up to which numbers of 32 bits are equal to rounding
EQUAL_16 = 5e-2  # and of 16 bits

Compared = Literal["gradients", "changes"]


class Found(NamedTuple):
    """What a rank found: losses of its microbatches, and tensors by stage and parameter."""

    losses: dict[int, float]
    tensors: dict[tuple[int, str], Tensor]


def check_first(training: Training, context: Context) -> Check | None:
    """Run a first step, and compare; the outcome on rank 0, None on others.

    Of an iteration the gradients are compared, of the step of an asynchronous plan what it changes
    the weights by. Every rank calls it. Dropout is off meanwhile. Raises PartoptError where the
    model draws random numbers all the same.
    """
    check = _check_changes if training.asynchronous else _check_gradients
    return check(training, context)


def _check_gradients(training: Training, context: Context) -> Check | None:
    own = _without_dropout(RankTraining(training, context))
    own.step(learn=False)
    every = context.gather(Found(own.end_step(), own.gradients()))
    if context.rank:
        return None
    expected = train_alone(WholeModel(training, context.device), training.microbatches)
    return compare(every, expected, "gradients", tolerance(training))


def _check_changes(training: Training, context: Context) -> Check | None:
    """Learn by plain SGD, whatever the plan's optimizer is.

    Adam divides a gradient that is nothing but rounding by its own size, so that two runs part.
    """
    plan = structs.replace(training.plan, optimizer="sgd")
    source = replace(training.source, optimizer=None)
    own = _without_dropout(RankTraining(replace(training, plan=plan, source=source), context))
    names = _names(own)
    alone = context.rank == 0
    rates = visible_rates(WholeModel(training, context.device), names) if alone else []
    rates = context.gather(rates)[0]
    if own.tied:  # one parameter has one rate, in whichever stages it is
        rates = [min(rate for rate in rates if rate > 0.0)] * len(rates)
    for s in own.stages:
        if stepped := own.stepped(s):
            own.optimizer(s, stepped).param_groups[0]["lr"] = rates[s]
    before = _weights(own)
    own.step()
    changes = {key: (now - before[key]).cpu() for key, now in _weights(own).items()}
    every = context.gather(Found(own.end_step(), changes))
    if context.rank:
        return None
    equal = tolerance(training)
    whole, tied = WholeModel(training, context.device), {each.name for each in own.tied}
    expected = train_stale(training, whole, names, rates, equal, tied)
    return compare(every, expected, "changes", equal)


def _names(own: RankTraining) -> list[list[str]]:
    """The parameters of each stage that train; a tied one is of the first that holds it."""
    left, names = set(own.trained), []
    for stage in own.training.plan.stages:
        held = own_parameter_names(own.record, stage.start, stage.stop)
        names.append([name for name in held if name in left])
        left -= set(held)
    return names


def compare(every: Sequence[Found], expected: Reference, compared: Compared, equal: float) -> Check:
    """The largest errors of what the ranks found; a tensor that is missing is wholly wrong."""
    errors = dict.fromkeys(expected.tensors, 0.0)
    missing = errors.keys() - {name for found in every for _, name in found.tensors}
    errors |= dict.fromkeys(missing, 1.0)
    for found in every:
        for (_, name), own in found.tensors.items():
            off = 1.0
            if name in expected.tensors:
                off = _error(own, expected.tensors[name], expected.scales[name])
            errors[name] = max(errors.get(name, 0.0), off)
    worst = max(errors, key=errors.__getitem__, default="")
    losses = {number: loss for found in every for number, loss in found.losses.items()}
    loss_error = _error(
        torch.tensor([losses[number] for number in expected.losses]),
        torch.tensor(list(expected.losses.values())),
        max(map(abs, expected.losses.values())),
    )
    error = errors.get(worst, 0.0)
    return Check(
        compared=compared,
        loss_error=loss_error,
        largest_error=error,
        worst=worst,
        parameters=len(expected.tensors),
        equal=loss_error <= equal and error <= equal,
    )


def tolerance(training: Training) -> float:
    """The relative error up to which numbers of a training are equal to rounding.

    Under autocast a weight that learns is rounded to 16 bits wherever it is used.
    """
    rounded = training.asynchronous and training.plan.profile.autocast is not None
    return EQUAL if training.dtype == torch.float32 and not rounded else EQUAL_16


def _error(own: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference over `scale`; 1 where there is what is not a number."""
    off = float((own.double() - expected.double()).abs().max()) / max(scale, 1e-30)
    return off if math.isfinite(off) else 1.0


def _weights(own: RankTraining) -> dict[tuple[int, str], Tensor]:
    return {
        (s, name): each.detach().clone()
        for s, stage in own.stages.items()
        for name, each in stage.own_parameters.items()
        if each.requires_grad
    }


def _without_dropout(own: RankTraining) -> RankTraining:
    for stage in own.stages.values():
        switch_off_dropout(stage.model)
    return own
