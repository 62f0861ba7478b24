"""The first step of a run against one process that has the whole model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from partopt.documents.run import Check
from partopt.runtime.context import Context
from partopt.runtime.cuts import own_parameter_names
from partopt.runtime.reference import (
    Reference,
    WholeModel,
    largest,
    switch_off_dropout,
    train_alone,
    train_stale,
    visible_rates,
)
from partopt.runtime.training import RankTraining, Training

EQUAL = 1e-4  # relative error up to which numbers of 32 bits are equal to rounding
EQUAL_16 = 5e-2  # and of 16 bits
PART = 2**20  # numbers that are compared at once, so that no difference of a whole tensor is kept

Compared = Literal["gradients", "changes"]


class Found(NamedTuple):
    """What a rank found: losses of its microbatches, and tensors by stage and parameter."""

    losses: dict[int, float]
    tensors: dict[tuple[int, str], Tensor]


def check_first(training: Training, context: Context) -> Check | None:
    """Run a first step, and compare; the outcome on rank 0, None on others.

    Of an iteration the gradients are compared, of the step of an asynchronous plan the weights that
    it makes. Every rank calls it. Dropout is off meanwhile. Raises PartoptError where the model
    draws random numbers all the same.
    """
    context.say("check: a step of all ranks")
    # under autocast a weight that learns is rounded to 16 bits wherever it is used
    rounded = training.asynchronous and training.plan.profile.autocast is not None
    equal = EQUAL if training.dtype == torch.float32 and not rounded else EQUAL_16
    check = _check_changes if training.asynchronous else _check_gradients
    return check(training, context, equal)


def _check_gradients(training: Training, context: Context, equal: float) -> Check | None:
    own = _without_dropout(training, context)
    own.step(learn=False)
    expected = context.on_rank_0(
        lambda go_on: train_alone(
            WholeModel(training, context.device, go_on), training.microbatches
        )
    )
    gradients = {
        (s, name): each.grad
        for s, stage in own.stages.items()
        for name, each in stage.own_parameters.items()
        if each.grad is not None
    }
    return compare(Found(own.end_step(), gradients), expected, context, "gradients", equal)


def _check_changes(training: Training, context: Context, equal: float) -> Check | None:
    """Learn by plain SGD, whatever the plan's optimizer is.

    Adam divides a gradient that is nothing but rounding by its own size, so that two runs part.
    """
    plan = structs.replace(training.plan, optimizer="sgd")
    source = replace(training.source, optimizer=None)
    own = _without_dropout(replace(training, plan=plan, source=source), context)
    names = [
        [n for n in own_parameter_names(own.record, each.start, each.stop) if n in own.trained]
        for each in plan.stages
    ]
    rates = context.on_rank_0(
        lambda go_on: visible_rates(WholeModel(training, context.device, go_on), names)
    )
    own.rates = rates = context.gather(rates)[0]
    own.step()
    expected = context.on_rank_0(
        lambda go_on: train_stale(
            training, WholeModel(training, context.device, go_on), names, rates, equal
        )
    )
    weights = {
        (s, name): each.detach()
        for s, stage in own.stages.items()
        for name, each in stage.own_parameters.items()
        if each.requires_grad
    }
    return compare(Found(own.end_step(), weights), expected, context, "changes", equal)


def _without_dropout(training: Training, context: Context) -> RankTraining:
    own = RankTraining(training, context)
    for stage in own.stages.values():
        switch_off_dropout(stage.model)
    return own


def compare(
    own: Found, expected: Reference | None, context: Context, compared: Compared, equal: float
) -> Check | None:
    """The largest errors of what the ranks found; a tensor that is missing is wholly wrong.

    Every rank calls it. Rank 0, which alone knows what is `expected`, shows it to all, a tensor at
    a time; each compares what it has, and tells its errors.
    """
    every = context.gather((own.losses, _errors(own, expected, context)))
    if expected is None:
        return None
    errors: dict[str, float] = {}
    for _, found in every:
        errors |= {name: max(off, errors.get(name, 0.0)) for name, off in found.items()}
    errors |= dict.fromkeys(expected.tensors.keys() - errors.keys(), 1.0)
    worst = max(errors, key=errors.__getitem__, default="")
    losses = {number: loss for each, _ in every for number, loss in each.items()}
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


def _errors(own: Found, expected: Reference | None, context: Context) -> dict[str, float]:
    """The largest error of each parameter that this rank has."""
    shown = None
    if expected is not None:
        shown = {n: (t.shape, t.dtype, expected.scales[n]) for n, t in expected.tensors.items()}
        context.say(f"check: comparing {len(shown)} tensors")
    shown = context.gather(shown)[0]
    # a gradient that one process has not may be zeros here, as sums over replicas are
    errors = {name: float(t.any()) for (_, name), t in own.tensors.items() if name not in shown}
    for name, (shape, dtype, scale) in shown.items():
        if expected is None:
            right = torch.empty(shape, dtype=dtype, device=context.device)
        else:
            right = expected.tensors[name].contiguous()
        context.broadcast(right)
        for (_, each), held in own.tensors.items():
            if each == name:
                errors[name] = max(_error(held, right, scale), errors.get(name, 0.0))
    return errors


def _error(own: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference over `scale`; 1 where there is what is not a number."""
    parts = zip(
        torch.split(own.reshape(-1), PART), torch.split(expected.reshape(-1), PART), strict=True
    )
    off = [largest(one - other) / max(scale, 1e-30) for one, other in parts]
    return max(off, default=0.0) if all(map(math.isfinite, off)) else 1.0
