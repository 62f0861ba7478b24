"""The first step of a run against one process that has the whole model.

Of an asynchronous plan that process learns with weights as old as the stages have them. The model
runs a microbatch after the other, from the empty pipeline of a step to the empty one. Before each,
every stage gets the weights that its forward has by the plan's order. How old they are is counted
here; of the versions that the engine keeps nothing is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

import torch
from msgspec import structs
from torch import Tensor, nn

from partopt.documents.plan import Plan
from partopt.documents.training_run import Check
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.device import free_host_bytes
from partopt.profiler.step import run_loss
from partopt.profiler.weightless import RandomNumbers
from partopt.replay.cuts import held_parameter_names
from partopt.runtime.context import Context
from partopt.runtime.dropout import without_dropout
from partopt.runtime.training import Microbatches, PlannedTraining, RankTraining
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order, schedule
from partopt.schedules.order import A, B, F, Order
from partopt.schedules.placement import placement_of
from partopt.units import format_bytes

# S   stages, M   microbatches of the step
# G   of them that a stage learns from at once

EQUAL = 1e-4  # relative error up to which numbers of 32 bits are equal to rounding
EQUAL_16 = 5e-2  # and of 16 bits
PART = 2**20  # numbers that are compared at once, so that no difference of a whole tensor is kept
NOISE = 1e-2  # of the largest change in a stage: what changes by less may do so by rounding alone
ULPS = 4  # by which a weight may be off
SEEN = 0.1  # share by which the updates of all stages together change the gradients
TRIAL = 1e-3  # of its weights by which a stage is changed to find out
MOST = 0.1  # of its weights by which an update may change it

Compared = Literal["gradients", "changes"]
Made = TypeVar("Made")
Tensors = dict[str, Tensor]


class StepResult(NamedTuple):
    """What a rank found: losses of its microbatches, and tensors by stage and parameter."""

    losses: dict[int, float]
    tensors: dict[tuple[int, str], Tensor]


def check_first(training: PlannedTraining, context: Context, device: torch.device) -> Check | None:
    """Run a first step, and compare; the outcome on rank 0, None on others.

    One process has the whole model on `device`: that of rank 0, or the CPU.
    Of an iteration the gradients are compared, of the step of an asynchronous plan the weights that
    it makes. That learns by plain SGD, whatever the plan's optimizer is: Adam divides a gradient
    that is nothing but rounding by its own size, so that two runs part. Every rank calls it.
    Dropout is off meanwhile. Raises PartoptError where the model draws random numbers all the same,
    and before anything is built where the device does not hold the model.
    """
    check_room(training, context, device)
    context.say("check: a step of all ranks")
    plan, asynchronous, checked = training.plan, training.asynchronous, training
    if asynchronous:
        source = replace(training.source, optimizer=None)
        checked = replace(training, plan=structs.replace(plan, optimizer="sgd"), source=source)
    pipeline = RankTraining(checked, context)
    models = [stage.model for stage in pipeline.stages.values()]
    # under autocast a weight that learns is rounded to 16 bits wherever it is used
    rounded = asynchronous and plan.profile.autocast is not None
    equal = EQUAL if training.dtype == torch.float32 and not rounded else EQUAL_16

    def alone(find: Callable[[WholeModel], Made]) -> Made | None:
        """What one process finds, on rank 0."""
        return context.on_rank_0(lambda go_on: find(WholeModel(training, device, go_on)))

    parameters = {
        (s, name): parameter
        for s, stage in pipeline.stages.items()
        for name, parameter in stage.held_parameters.items()
        if parameter.requires_grad
    }
    alike = contextlib.nullcontext() if device == context.device else whole_float32()
    if not asynchronous:
        with alike, without_dropout(*models):
            pipeline.step(learn=False)
        expected = alone(lambda whole: train_alone(whole, training.microbatches))
        gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
        return compare(
            StepResult(pipeline.end_step(), gradients), expected, context, "gradients", equal
        )
    held = [held_parameter_names(pipeline.record, stage.start, stage.stop) for stage in plan.stages]
    names = [[name for name in of_stage if name in pipeline.trained] for of_stage in held]
    pipeline.rates = rates = context.gather(alone(lambda whole: visible_rates(whole, names)))[0]
    with alike, without_dropout(*models):
        pipeline.step()
    expected = alone(lambda whole: train_stale(training, whole, names, rates, equal))
    weights = {key: weight.detach() for key, weight in parameters.items()}
    return compare(StepResult(pipeline.end_step(), weights), expected, context, "changes", equal)


def check_room(training: PlannedTraining, context: Context, device: torch.device) -> None:
    """Raise PartoptError, on every rank, where `device` of rank 0 does not hold the whole model.

    Counted are weights and gradients, of an asynchronous plan also the weights before and the
    changes, and what rank 0 has there besides. Activations come to it.
    """
    plan = training.plan
    copies = 2 + 2 * training.asynchronous
    needed_bytes = copies * plan.profile.parameter_bytes
    if device == context.device:
        needed_bytes += sum(2 * stage.parameter_bytes for stage in plan.stages if 0 in stage.ranks)
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
            bytes=needed_bytes,
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
    compared: Compared,
    equal: float,
) -> Check | None:
    """The largest errors of what the ranks found; a tensor that is missing is wholly wrong.

    Every rank calls it. Rank 0, which alone knows what is `expected`, shows it to all, a tensor at
    a time; every rank compares what it has, and tells its errors.
    """
    every = context.gather((found.losses, _errors(found, expected, context)))
    if expected is None:
        return None
    errors: dict[str, float] = {}
    for _, errors_of_rank in every:
        errors |= {name: max(off, errors.get(name, 0.0)) for name, off in errors_of_rank.items()}
    errors |= dict.fromkeys(expected.tensors.keys() - errors.keys(), 1.0)
    worst = max(errors, key=errors.__getitem__, default="")
    losses = {number: loss for of_rank, _ in every for number, loss in of_rank.items()}
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


def _errors(found: StepResult, expected: Reference | None, context: Context) -> dict[str, float]:
    """The largest error of every parameter that this rank has."""
    shown = None
    if expected is not None:
        shown = {n: (t.shape, t.dtype, expected.scales[n]) for n, t in expected.tensors.items()}
        context.say(f"check: comparing {len(shown)} tensors")
    shown = context.gather(shown)[0]
    # a gradient that one process has not may be zeros here, as sums over replicas are
    errors = {name: float(t.any()) for (_, name), t in found.tensors.items() if name not in shown}
    for name, (shape, dtype, scale) in shown.items():
        if expected is None:
            right = torch.empty(shape, dtype=dtype, device=context.device)
        else:
            right = expected.tensors[name].to(context.device).contiguous()
        context.broadcast(right)
        for (_, held_name), held in found.tensors.items():
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
    """What one process finds: the loss of every microbatch, and a tensor for every parameter.

    It is the parameter's gradient, or its values behind a step. `scales` are the sizes that errors
    of these tensors are relative to.
    """

    losses: dict[int, float]
    tensors: Tensors
    scales: dict[str, float]


class WholeModel:
    """The model of a training with all its weights, without dropout, and its microbatches.

    `parameters` are those that train, by the first of their names. `go_on` is called with what
    comes next, before every microbatch.
    """

    def __init__(
        self, training: PlannedTraining, device: torch.device, go_on: Callable[[str], None]
    ) -> None:
        torch.manual_seed(training.seed)
        self.model = training.build().to(device)
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

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters these values."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)


def largest(tensor: Tensor) -> float:
    """The largest absolute entry of a tensor; 0 where it has none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def train_alone(whole: WholeModel, microbatches: int) -> Reference:
    """The losses of an iteration's microbatches, and the gradients of their mean."""
    losses = {n: whole.backward(n, 1.0 / microbatches) for n in range(microbatches)}
    every = whole.parameters.items()
    gradients = {name: p.grad for name, p in every if p.grad is not None}
    return Reference(losses, gradients, {n: largest(gradient) for n, gradient in gradients.items()})


def train_stale(
    training: PlannedTraining,
    whole: WholeModel,
    names: Sequence[Sequence[str]],
    rates: Sequence[float],
    equal: float,
) -> Reference:
    """The losses of a step's microbatches, and the parameters that plain SGD makes.

    Each stage has the parameters `names`, and a learning rate. Errors are relative to what changed:
    the largest change of the parameter, but no less than the share `NOISE` of the largest in its
    stage, and no less than that of which `ULPS` of the weight are the share `equal`.
    """
    plan, M, losses = training.plan, training.microbatches, {}
    orders = order(plan.schedule, placement_of(plan, M))
    stages = [
        _StageWeights(
            {name: whole.parameters[name] for name in names[s]},
            used_versions(plan, orders, s, M),
            batch_of_stage(plan, orders, s),
            rates[s],
        )
        for s in range(len(plan.stages))
    ]
    for number in range(M):
        for stage in stages:
            whole.set(stage.versions[stage.used[number]])
        losses[number] = whole.backward(number)
        for stage in stages:
            stage.learn(number)
    found = Reference(losses, {}, {})
    for stage in stages:
        newest = stage.versions[stage.updates]
        changed = {name: largest(weight - stage.start[name]) for name, weight in newest.items()}
        most = max(changed.values(), default=0.0)
        for name, weight in newest.items():
            rounding = ULPS * torch.finfo(weight.dtype).eps * largest(stage.start[name])
            found.tensors[name] = weight
            found.scales[name] = max(changed[name], NOISE * most, rounding / equal)
    return found


class _StageWeights:
    """The `versions` of one stage's weights, by the updates that made them.

    Microbatch m has version `used[m]`; G of them make the next.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], used: list[int], G: int, rate: float
    ) -> None:
        self.parameters, self.used, self.G, self.rate = parameters, used, G, rate
        self.start: Tensors = {name: weight.detach().clone() for name, weight in parameters.items()}
        self.updates, self.versions = 0, {0: self.start}
        self.total: Tensors = {
            name: torch.zeros_like(weight) for name, weight in self.start.items()
        }

    def learn(self, microbatch: int) -> None:
        """Take the gradients of a microbatch, and step by the mean of a batch where it ends one."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.total[name] += parameter.grad
            parameter.grad = None
        if (microbatch + 1) % self.G == 0:
            newest = self.versions[self.updates]
            self.updates += 1
            self.versions[self.updates] = {
                name: weight.sub(self.total[name] / self.G, alpha=self.rate)
                for name, weight in newest.items()
            }
            for total in self.total.values():
                total.zero_()
        needed = {self.updates, *self.used[microbatch + 1 :]}
        self.versions = {n: weights for n, weights in self.versions.items() if n in needed}


def used_versions(plan: Plan, orders: Order, s: int, M: int) -> list[int]:
    """The updates of stage s that a microbatch's forward knows of, for all M of them.

    PipeDream's knows of all that precede it in its rank's row; an exchange that blocks nothing
    ends when the next one begins. 2BW's, of batch t, knows of all batches but the last: t - 1
    (Narayanan et al., ICML 2021, section 3.1).
    """
    if not schedule(plan.schedule).steps_in_backwards:
        G = batch_of_stage(plan, orders, s)
        return [max(0, m // G - 1) for m in range(M)]
    of_stage = orders.stage == s
    exchanges = plan.stages[s].replicas > 1
    late = exchanges and plan.engine.allreduce != "blocking"
    used = [0] * M
    for rank in plan.stages[s].ranks:
        updates = 0
        for place in range(orders.rows[rank], orders.rows[rank + 1]):
            if of_stage[place] and orders.kind[place] == F:
                used[orders.microbatch[place]] = max(0, updates - late)
            updates += of_stage[place] and orders.kind[place] == (A if exchanges else B)
    return used


def visible_rates(whole: WholeModel, names: Sequence[Sequence[str]]) -> list[float]:
    """The rate of every stage, which has the parameters `names`, for plain SGD.

    Under a rate that is good for training, weights one update older give nearly the same gradients:
    what used the wrong ones would pass for rounding. Here an update of a stage alone, by the
    gradient of a microbatch, changes the gradient of some stage by the share `SEEN` over the number
    of stages. The rate is 0 where a stage has no gradient.
    """
    before, rates = _gradients(whole), []
    for of_stage in names:
        start = {name: whole.parameters[name].detach().clone() for name in of_stage}
        gradient = _norm([before[name] for name in of_stage])
        if gradient == 0.0:
            rates.append(0.0)
            continue
        # what begins at zero, as a head may, is compared with all weights
        weights = _norm(list(start.values())) or _norm(list(whole.parameters.values()))
        rate = TRIAL * weights / gradient
        whole.set({name: weight - rate * before[name] for name, weight in start.items()})
        after = _gradients(whole)
        whole.set(start)
        changed = max(
            _norm([after[name] - before[name] for name in of_stage])
            / max(_norm([before[name] for name in of_stage]), 1e-30)
            for of_stage in names
        )
        rates.append(rate * min(SEEN / len(names) / max(changed, 1e-30), MOST / TRIAL))
    return rates


def _gradients(whole: WholeModel) -> Tensors:
    """The gradients of the first microbatch."""
    whole.model.zero_grad()
    whole.backward(0)
    every = whole.parameters.items()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in every}
    whole.model.zero_grad()
    return found


def _norm(tensors: Sequence[Tensor]) -> float:
    parts = [tensor.detach().double().norm() for tensor in tensors]
    return float(torch.stack(parts).norm()) if parts else 0.0
