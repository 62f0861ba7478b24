"""One rank of a training by a plan: its stages of the model, their data, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.profiler.as_trained import cast
from partopt.profiler.device import choose_dtype
from partopt.profiler.source import ModelSource
from partopt.profiler.step import loss_of_output
from partopt.profiler.tensors import Inputs, Loss
from partopt.profiler.weightless import RandomNumbers, build_without_weights, fake_mode
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.cuts import check_cuts, own_parameter_names, shared_parameters
from partopt.runtime.engine import execute
from partopt.runtime.events import Record
from partopt.runtime.inputs import SPREAD, Microbatches
from partopt.runtime.module import StageModule, materialise
from partopt.runtime.optimizers import SharedOptimizer, optimizer_of, step_by_mean
from partopt.runtime.recording import record_model
from partopt.runtime.replay import ReplayStage
from partopt.runtime.torch_engine import execute_on_torch
from partopt.runtime.units import number_calls
from partopt.runtime.updates import Stepping, Tied
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order


@dataclass(frozen=True)
class Training:
    """What is trained by which plan.

    `microbatches` pass through in a step. Losses are means over them, or over a round of an
    asynchronous plan; `engine` is partopt's own or that of torch.
    """

    plan: Plan
    source: ModelSource
    microbatches: int
    seed: int = 0
    rate: float = 1e-3
    engine: str = "partopt"

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters."""
        return choose_dtype(self.plan.profile.dtype)

    @property
    def starts(self) -> list[int]:
        """The first layer of each stage."""
        return [stage.start for stage in self.plan.stages]

    @property
    def asynchronous(self) -> bool:
        """Whether there are no iterations."""
        return self.plan.microbatches is None

    def build(self) -> nn.Module:
        """The whole model, ready to train; on the CPU, unless the file says otherwise."""
        found = self.source.found
        model = copy.deepcopy(found) if isinstance(found, nn.Module) else self.source.build()
        return model.to(self.dtype).train()

    def cast(self, model: nn.Module, device: torch.device) -> Loss:
        """Have the model run under the plan's autocast, if any; its loss function, likewise."""
        loss_fn = self.source.loss_fn or loss_of_output
        if self.plan.profile.autocast is None:
            return loss_fn
        dtype = choose_dtype(self.plan.profile.autocast)
        model.forward = cast(model.forward, device, dtype)
        return cast(loss_fn, device, dtype)


@dataclass
class RankTraining:
    """The stages of one rank, as they train step after step."""

    training: Training
    context: Context
    stages: dict[int, ReplayStage] = field(init=False)
    record: Record = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        plan, rank = self.training.plan, self.context.rank
        self.held = [s for s, stage in enumerate(plan.stages) if rank in stage.ranks]
        self.inputs = {s: self._microbatches(s) for s in self.held}
        # of the parameters that this rank steps itself, and what steps all of a stage's
        self.optimizers: dict[int, Optimizer] = {}
        self._stepping: dict[int, Stepping] = {}
        self.rates = [self.training.rate] * len(plan.stages)
        self.first = 0  # number of the step's first microbatch
        self.record, self.trained = record_training(self.training, self.context.device)
        self.stages = self.context.in_turns(whole_bytes(self.training), self._stages)
        self.tied = self._tied()
        # every rank makes all groups, in one order; sums of gradients and weights have one each
        shared = plan.shard == "optimizer"
        self._sharing = {
            s: self.context.group(stage.ranks, "weights")
            for s, stage in enumerate(plan.stages)
            if shared and stage.replicas > 1
        }

    @property
    def _drawn(self) -> tuple[int, int, torch.device, torch.dtype]:
        training = self.training
        size = training.plan.microbatch_size
        return size, training.seed, self.context.device, training.dtype

    def _microbatches(self, s: int) -> Microbatches:
        stage = self.training.plan.stages[s]
        replica = list(stage.ranks).index(self.context.rank), stage.replicas
        uses = 2 if stage.recompute else 1  # a recomputation reads them again
        return Microbatches(self.training.source, replica, *self._drawn, uses)

    def _stages(self) -> dict[int, ReplayStage]:
        if not self.held:
            return {}
        whole = build_whole(self.training)
        return {s: self._stage(s, whole) for s in self.held}

    def _stage(self, s: int, whole: nn.Module) -> ReplayStage:
        training, inputs = self.training, self.inputs[s]
        return ReplayStage(
            stage_of_training(training, self.record, s, whole, self.context.device),
            lambda number: inputs(self.first + number),
            1.0 if training.asynchronous else 1.0 / training.microbatches,
            training.plan.stages[s].recompute,
        )

    def _tied(self) -> list[Tied]:
        """The parameters that several stages hold, the same on every rank."""
        plan, found = self.training.plan, []
        for name, holding in shared_parameters(self.record, self.training.starts).items():
            ranks = sorted({rank for s in holding for rank in plan.stages[s].ranks})
            own = [self.stages[s].own_parameters[name] for s in holding if s in self.stages]
            if name in self.trained:
                found.append(Tied(name, ranks, own))
        return found

    def step(self, learn: bool = True) -> RankRecord:
        """One iteration, or the microbatches of an asynchronous plan; the record of this rank.

        Where it does not `learn`, weights stay and the gradients of the step are left.
        """
        training = self.training
        # of dropout: the same, whether the steps before ran here or in another run
        RandomNumbers.seed(
            training.seed * SPREAD + self.steps * self.context.ranks + self.context.rank
        )
        run = execute_on_torch if training.engine == "torch" else execute
        return run(
            training.plan,
            self.stages.__getitem__,
            context=self.context,
            microbatches=training.microbatches if training.asynchronous else None,
            optimizer_of=self._stepping_of if learn else None,
            tied=self.tied,
        )

    def end_step(self) -> dict[int, float]:
        """Go on to the next step; the losses of this one's microbatches that this rank has."""
        losses = {}
        for stage in self.stages.values():
            losses.update({number: float(loss) for number, loss in stage.losses.items()})
            stage.losses.clear()
        self.first += self.training.microbatches
        self.steps += 1
        return losses

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """The gradients that this rank has, by stage and parameter."""
        return {
            (s, name): each.grad
            for s, stage in self.stages.items()
            for name, each in stage.own_parameters.items()
            if each.grad is not None
        }

    def begin_at(self, steps: int) -> None:
        """Go on behind so many steps of an earlier run, whose data is passed over."""
        self.steps, self.first = steps, steps * self.training.microbatches
        for inputs in self.inputs.values():
            inputs.skip(self.first)

    def make_optimizers(self) -> None:
        """Make what steps the stages, which the first step would else do."""
        for s, stage in self.stages.items():
            if stage.parameters:
                self._stepping_of(s, stage.parameters)

    def _stepping_of(self, s: int, parameters: Sequence[nn.Parameter]) -> Stepping:
        """What steps stage s, the same in every step: its optimizer, or that of all replicas."""

        def make(own: Sequence[nn.Parameter]) -> Optimizer:
            training, plan = self.training, self.training.plan
            made = optimizer_of(training.source, plan.optimizer, self.rates[s], own)
            if training.asynchronous:
                orders = order(plan.schedule, layout_of(plan, training.microbatches))
                step_by_mean(made, batch_of_stage(plan, orders, s))
            self.optimizers[s] = made
            return made

        if s not in self._stepping:
            group = self._sharing.get(s)
            self._stepping[s] = (
                make(parameters) if group is None else SharedOptimizer(parameters, make, group)
            )
        return self._stepping[s]


def build_whole(training: Training) -> nn.Module:
    """The whole model with the weights of the seed; random numbers go on as they were."""
    numbers = RandomNumbers()
    torch.manual_seed(training.seed)
    whole = training.build()
    numbers.restore()
    return whole


def without_weights(training: Training, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model and its loss; without weights, or with them where its build needs their values."""
    try:
        with build_without_weights(fake_mode()):
            model = training.build()
    except Exception:
        torch.manual_seed(training.seed)
        model = training.build().to(device)
    return model, training.cast(model, device)


def whole_bytes(training: Training) -> int:
    """Bytes of the model's parameters as they are built, in float32."""
    stages = training.plan.stages
    return sum(stage.parameter_bytes for stage in stages) * 4 // training.dtype.itemsize


def stage_of_training(
    training: Training, record: Record, s: int, whole: nn.Module, device: torch.device
) -> StageModule:
    """Stage s of the model, whose `record` is given, with the weights of its own layers alone.

    They are copies of those of the `whole` model.
    """
    stage = training.plan.stages[s]
    model, loss_fn = without_weights(training, device)
    names = own_parameter_names(record, stage.start, stage.stop)
    materialise(model, names, whole, device)
    place = s, len(training.plan.stages)
    example = examples_of(training, device)(0)
    return StageModule(model, record, stage.start, stage.stop, loss_fn, place, example)


def examples_of(training: Training, device: torch.device) -> Callable[[int], Inputs]:
    """Example inputs of each microbatch."""
    size = training.plan.microbatch_size
    source, seed, dtype = training.source, training.seed, training.dtype
    return Microbatches(source, (0, 1), size, seed, device, dtype).drawn


def record_training(training: Training, device: torch.device) -> tuple[Record, set[str]]:
    """What a forward of the model does, as the plan cuts it, and which parameters train.

    Raises PartoptError where the plan is one for another model, or the model cannot be cut so.
    """
    plan = training.plan
    model, loss_fn = without_weights(training, device)
    layers = number_calls([name for stage in plan.stages for name in stage.modules])
    record = record_model(model, examples_of(training, device)(0), loss_fn, layers)
    check_cuts(record, training.starts)
    check_parameters(plan, record, model)
    return record, {name for name, each in model.named_parameters() if each.requires_grad}


def check_parameters(plan: Plan, record: Record, model: nn.Module) -> None:
    """Refuse a model whose stages have other parameters than the plan says."""
    known = dict(model.named_parameters())
    for s, stage in enumerate(plan.stages):
        names = own_parameter_names(record, stage.start, stage.stop)
        own = sum(known[name].numel() * known[name].element_size() for name in names)
        if own != stage.parameter_bytes:
            raise PartoptError(
                f"stage {s} has {own} bytes of parameters in this model, "
                f"{stage.parameter_bytes} in the plan",
                "give the arguments of the model that was profiled, or plan for this one",
                code="other-model",
                stage=s,
            )


def losses_of(parts: Sequence[Mapping[int, float]]) -> float:
    """The mean loss of a step, from the losses of microbatches on each rank."""
    every = [loss for part in parts for loss in part.values()]
    return sum(every) / len(every)
