"""The first iteration of a run against one process that has the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partopt.documents.run import Check
from partopt.errors import PartoptError
from partopt.profiler.step import run_loss
from partopt.runtime.inputs import Microbatches
from partopt.runtime.random_state import RandomState
from partopt.runtime.training import RankTraining, Training

EQUAL = 1e-4  # relative error up to which numbers of 32 bits are equal to rounding
EQUAL_16 = 5e-2  # and of 16 bits

Gradients = dict[tuple[int, str], Tensor]  # by stage and parameter


def check_first(own: RankTraining) -> Check | None:
    """Run the first iteration without learning, and compare; the outcome on rank 0, None on others.

    Every rank calls it. Dropout is off meanwhile. Raises PartoptError where the model draws random
    numbers all the same.
    """
    for stage in own.stages.values():
        _no_dropout(stage.model)
    own.step(learn=False)
    found, losses = own.gradients(), own.end_step()
    every = own.context.gather((found, losses))
    if own.context.rank:
        return None
    loss, expected = reference(own.training, own.context.device)
    parts = [part for _, part in every]
    mean = sum(sum(part.values()) for part in parts) / sum(len(part) for part in parts)
    return compare(mean, [gradients for gradients, _ in every], loss, expected, own.training)


def reference(training: Training, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of the first iteration's microbatches, and its gradients, in one process."""
    torch.manual_seed(training.seed)
    model = training.build().to(device)
    loss_fn = training.cast(model, device)
    _no_dropout(model)
    size = training.plan.microbatch_size
    inputs = Microbatches(training.source, (0, 1), size, training.seed, device, training.dtype)
    total, before = 0.0, RandomState(device)
    for number in range(training.microbatches):
        given = inputs(number)
        loss = run_loss(model, given, loss_fn) / training.microbatches
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    if before.advanced():
        raise PartoptError(
            "the model draws random numbers, which one process and several draw in other orders",
            "check it with dropout set to 0",
            code="not-comparable",
        )
    gradients = {
        name: each.grad.detach().cpu()
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    return total, gradients


def compare(
    loss: float,
    found: Sequence[Gradients],
    expected_loss: float,
    expected: dict[str, Tensor],
    training: Training,
) -> Check:
    """The largest errors of what the ranks found; a gradient that is missing is wholly wrong."""
    worst, error, seen = "", 0.0, set()
    for gradients in found:
        for (_, name), own in gradients.items():
            seen.add(name)
            off = 1.0
            if name in expected:
                scale = expected[name].abs().max().clamp_min(torch.finfo(torch.float32).tiny)
                off = float((own.float() - expected[name].float()).abs().max() / scale)
            if not off <= error:  # not a number, too
                worst, error = name, off
    missing = sorted(expected.keys() - seen)
    if missing:
        worst, error = missing[0], 1.0
    loss_error = abs(loss - expected_loss) / max(abs(expected_loss), 1e-30)
    most = EQUAL if training.dtype == torch.float32 else EQUAL_16
    return Check(
        loss_error=loss_error,
        largest_gradient_error=error,
        worst=worst,
        parameters=len(expected),
        equal=bool(loss_error <= most and error <= most),
    )


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
