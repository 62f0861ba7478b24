"""The first step of a run against one process that has the whole model.

The ranks run a step of the plan in which no weights change; the one process runs its microbatches
one after the other. An asynchronous plan's stages step by whole batches, whose gradients count.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from partopt.documents.training_run import Check
from partopt.errors import ANSWER_IS_NO, PartoptError, invalid
from partopt.profiler.device import free_host_bytes
from partopt.profiler.step import run_loss
from partopt.profiler.weightless import RandomNumbers, replace_attribute
from partopt.replay.cuts import held_parameter_names
from partopt.runtime.context import Context
from partopt.runtime.training import Microbatches, PlannedTraining, RankTraining
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from partopt.units import format_bytes

EQUAL = 1e-4  # relative error up to which numbers of 32 bits are equal to rounding
EQUAL_16 = 5e-2  # and of 16 bits
PART = 2**20  # numbers that are compared at once, so that no difference of a whole tensor is kept
# torch's functions that drop: the name of their probability, and its place among the arguments
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
_PROBABILITIES = dict.fromkeys((*_DROPOUTS, "feature_alpha_dropout"), ("p", 1)) | {
    "scaled_dot_product_attention": ("dropout_p", 4)
}


class StepResult(NamedTuple):
    """What a rank found: losses of its microbatches, and gradients by stage and parameter."""

    losses: dict[int, float]
    gradients: dict[tuple[int, str], Tensor]


class GradientSums:
    """In the place of a stage's optimizer: it adds up the gradients, and changes no weight."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.sums = parameters, dict[int, Tensor]()  # by the parameter's id

    def step(self) -> None:
        """Take the gradients of a round, of a batch or of the iteration."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                if id(parameter) in self.sums:
                    self.sums[id(parameter)].add_(parameter.grad)
                else:
                    self.sums[id(parameter)] = parameter.grad


def check_first(training: PlannedTraining, context: Context, device: torch.device) -> Check | None:
    """Run a first step, and compare; the outcome on rank 0, None on others.

    One process has the whole model on `device`: that of rank 0, or the CPU. Every rank calls it.
    Dropout is off meanwhile. Raises PartoptError where the model draws random numbers all the same,
    and before anything is built where the device does not hold the model.
    """
    check_room(training, context, device)
    context.say("check: a step of all ranks")
    pipeline, sums = RankTraining(training, context), dict[int, GradientSums]()

    def sum_of(s: int, parameters: Sequence[nn.Parameter]) -> GradientSums:
        sums[s] = GradientSums(parameters)
        return sums[s]

    alike = contextlib.nullcontext() if device == context.device else whole_float32()
    with alike, without_dropout(*(stage.model for stage in pipeline.stages.values())):
        pipeline.run(sum_of)
    gradients = {
        (s, name): sums[s].sums[id(parameter)]
        for s, stage in pipeline.stages.items()
        for name, parameter in stage.held_parameters.items()
        if s in sums and id(parameter) in sums[s].sums
    }
    counted = count_microbatches(training, pipeline)
    expected = context.on_rank_0(
        lambda go_on: train_alone(WholeModel(training, device, go_on), counted)
    )
    equal = EQUAL if training.dtype == torch.float32 else EQUAL_16
    return compare(StepResult(pipeline.end_step(), gradients), expected, context, equal)


def count_microbatches(training: PlannedTraining, pipeline: RankTraining) -> dict[str, int]:
    """The first microbatches of a step whose gradients count, by parameter.

    An asynchronous stage drops those of a batch that the step does not end. Raises PartoptError
    where no stage ends one.
    """
    plan, M = training.plan, training.microbatches
    if not training.asynchronous:
        return dict.fromkeys(pipeline.trained, M)
    orders = order(plan.schedule, placement_of(plan, M))
    batches = [batch_of_stage(plan, orders, s) for s in range(len(plan.stages))]
    if min(batches) > M:
        what = "no stage steps in so few, and `check=True` compares what it would step by"
        raise invalid("microbatches", M, what, f"give at least {min(batches)}")
    counted = {}
    for stage, batch in zip(plan.stages, batches, strict=True):
        names = held_parameter_names(pipeline.record, stage.start, stage.stop)
        counted.update(dict.fromkeys(names, M // batch * batch))
    return counted


def check_room(training: PlannedTraining, context: Context, device: torch.device) -> None:
    """Raise PartoptError, on every rank, where `device` of rank 0 does not hold the whole model.

    Counted are weights and gradients, and those that rank 0 has there besides, of an asynchronous
    plan with the weights before and the sums so far. Activations come to it.
    """
    plan, copies = training.plan, 2 + 2 * training.asynchronous
    needed_bytes = 2 * plan.profile.parameter_bytes
    if device == context.device:
        held_bytes = sum(stage.parameter_bytes for stage in plan.stages if 0 in stage.ranks)
        needed_bytes += copies * held_bytes
    room_bytes = context.gather(free_bytes(device))[0]
    if needed_bytes > room_bytes:
        where = "the host" if device.type == "cpu" else "one GPU"
        raise PartoptError(
            f"`check=True` needs the whole model in one process: {format_bytes(needed_bytes)} or "
            f"more beside activations, and {where} has {format_bytes(int(room_bytes))} free",
            "`check_device=cpu` has it on the host"
            if device.type != "cpu"
            else "check a model of fewer layers, planned the same way",
            ANSWER_IS_NO,
            code="out-of-memory",
        )


def free_bytes(device: torch.device) -> float:
    """The memory that is free on a device."""
    return free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """The context in which a GPU multiplies all bits of float32, as a CPU does."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def compare(
    found: StepResult,
    expected: Reference | None,
    context: Context,
    equal: float,
) -> Check | None:
    """The largest errors of what the ranks found; a gradient that is missing is wholly wrong.

    Every rank calls it. Rank 0, which alone knows what is `expected`, shows it to all, a gradient
    at a time; every rank compares what it has, and tells its errors.
    """
    every = context.gather((found.losses, _errors(found, expected, context)))
    if expected is None:
        return None
    errors: dict[str, float] = {}
    for _, errors_of_rank in every:
        errors |= {name: max(off, errors.get(name, 0.0)) for name, off in errors_of_rank.items()}
    errors |= dict.fromkeys(expected.gradients.keys() - errors.keys(), 1.0)
    worst = max(errors, key=errors.__getitem__, default="")
    losses = {number: loss for of_rank, _ in every for number, loss in of_rank.items()}
    loss_error = _error(
        torch.tensor([losses[number] for number in expected.losses]),
        torch.tensor(list(expected.losses.values())),
        max(map(abs, expected.losses.values())),
    )
    error = errors.get(worst, 0.0)
    return Check(
        compared="gradients",
        loss_error=loss_error,
        largest_error=error,
        worst=worst,
        parameters=len(expected.gradients),
        equal=loss_error <= equal and error <= equal,
    )


def _errors(found: StepResult, expected: Reference | None, context: Context) -> dict[str, float]:
    """The largest error of every parameter that this rank has."""
    shown = None
    if expected is not None:
        shown = {n: (t.shape, t.dtype, largest(t)) for n, t in expected.gradients.items()}
        context.say(f"check: comparing {len(shown)} tensors")
    shown = context.gather(shown)[0]
    # a gradient that one process has not may be zeros here, as sums over replicas are
    errors = {name: float(t.any()) for (_, name), t in found.gradients.items() if name not in shown}
    for name, (shape, dtype, scale) in shown.items():
        if expected is None:
            right = torch.empty(shape, dtype=dtype, device=context.device)
        else:
            right = expected.gradients[name].to(context.device).contiguous()
        context.broadcast(right)
        for (_, held_name), held in found.gradients.items():
            if held_name == name:
                errors[name] = max(_error(held, right, scale), errors.get(name, 0.0))
    return errors


def _error(found: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference over `scale`; 1 where there is what is not a number."""
    parts = zip(
        torch.split(found.reshape(-1), PART), torch.split(expected.reshape(-1), PART), strict=True
    )
    off = [largest(one - other) / max(scale, 1e-30) for one, other in parts]
    return max(off, default=0.0) if all(map(math.isfinite, off)) else 1.0


class Reference(NamedTuple):
    """What one process finds: the loss of every microbatch, and every parameter's gradient."""

    losses: dict[int, float]
    gradients: dict[str, Tensor]


class WholeModel:
    """The model of a training with all its weights, without dropout, and its microbatches.

    `parameters` are those that train, by the first of their names. `go_on` is called with what
    comes next, before every microbatch.
    """

    def __init__(
        self, training: PlannedTraining, device: torch.device, go_on: Callable[[str], None]
    ) -> None:
        torch.manual_seed(training.seed)
        self.training, self.model = training, training.build().to(device)
        self._loss_fn = training.cast(self.model, device)
        self._inputs_of, self._go_on = Microbatches(training, device), go_on
        every = self.model.named_parameters()
        self.parameters = {name: p for name, p in every if p.requires_grad}

    def backward(self, microbatch: int, scale: float = 1.0) -> float:
        """Run a microbatch: its loss, whose gradients times `scale` add up in the parameters.

        Raises PartoptError where the model draws random numbers.
        """
        self._go_on(f"check: microbatch {microbatch} in one process")
        inputs, before = self._inputs_of(microbatch), RandomNumbers()
        with without_dropout(self.model):
            loss = run_loss(self.model, inputs, self._loss_fn)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        if before.advanced():
            raise PartoptError(
                "the model draws random numbers besides torch's dropout, which one process and "
                "several draw in other orders",
                "check it without them: noise, layer drop, sampling, or a dropout of its own",
                code="not-comparable",
            )
        return float(loss.detach())


def largest(tensor: Tensor) -> float:
    """The largest absolute entry of a tensor; 0 where it has none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def train_alone(whole: WholeModel, counted: Mapping[str, int]) -> Reference:
    """The losses of a step's microbatches, and the sums of the gradients that count."""
    M = whole.training.microbatches
    scale = 1.0 if whole.training.asynchronous else 1.0 / M
    found = Reference({}, {})
    for number in range(M):
        found.losses[number] = whole.backward(number, scale)
        for name, parameter in whole.parameters.items():
            if counted.get(name) == number + 1 and parameter.grad is not None:
                found.gradients[name], parameter.grad = parameter.grad, None
    return found


# --- dropout --------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """In this context torch's functions drop nothing, nor do its layers, which call them.

    They are replaced, since `model.eval()` would change other layers, too. Of recurrent layers it
    is those of the `models`.
    """
    recurrent = [
        module for model in models for module in model.modules() if isinstance(module, nn.RNNBase)
    ]
    with contextlib.ExitStack() as stack:
        for module in recurrent:
            stack.enter_context(replace_attribute(module, "dropout", 0.0))
        for name in _PROBABILITIES:
            function = _with_zero(getattr(functional, name), *_PROBABILITIES[name])
            stack.enter_context(replace_attribute(functional, name, function))
        yield


def _with_zero(function: Callable[..., Tensor], name: str, place: int) -> Callable[..., Tensor]:
    """The function, with probability 0 whatever it is given."""

    @functools.wraps(function)
    def call(*arguments: object, **options: object) -> Tensor:
        if len(arguments) <= place:
            return function(*arguments, **options | {name: 0.0})
        return function(*arguments[:place], 0.0, *arguments[place + 1 :], **options)

    return call
