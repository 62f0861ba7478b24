"""One rank of a training by a plan: its stages of the model, their data, and its steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.profiler.as_trained import cast
from partopt.profiler.device import choose_dtype
from partopt.profiler.source import ModelSource
from partopt.profiler.step import loss_of_output
from partopt.profiler.tensors import Inputs, Loss, pin, place
from partopt.profiler.weightless import RandomNumbers, build_without_weights, fake_mode
from partopt.replay.cuts import check_cuts, held_parameter_names, shared_parameters
from partopt.replay.events import Record
from partopt.replay.recording import record_model
from partopt.replay.replayed_stage import ReplayStage, StageModule, materialise
from partopt.replay.unit_calls import number_calls
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.optimizers import SharedOptimizer, optimizer_of, step_by_mean, warm_up
from partopt.runtime.torch_engine import execute_on_torch
from partopt.runtime.updates import OptimizerOf, StageOptimizer, Tied
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order
from partopt.schedules.placement import placement_of

SPREAD = 1_000_003  # a prime: neighbouring seeds and microbatches draw different numbers


@dataclass(frozen=True)
class PlannedTraining:
    """What is trained by which plan.

    `microbatches` pass through in a step. Losses are means over them, or over a round of an
    asynchronous plan; `engine` is that of partopt or that of torch.
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
    def asynchronous(self) -> bool:
        """Whether there are no iterations."""
        return self.plan.microbatches is None

    def build(self) -> nn.Module:
        """The whole model, ready to train; on the CPU, unless the file says otherwise."""
        model = self.source.build()
        if model is self.source.found:
            model = copy.deepcopy(model)
        return model.to(self.dtype).train()

    def build_seeded(self) -> nn.Module:
        """The whole model with the weights of the seed; random numbers go on as they were."""
        numbers = RandomNumbers()
        torch.manual_seed(self.seed)
        whole = self.build()
        numbers.restore()
        return whole

    def build_weightless(self, device: torch.device) -> tuple[nn.Module, Loss]:
        """The model and its loss; without weights, or with them where its build needs values."""
        try:
            with build_without_weights(fake_mode()):
                model = self.build()
        except Exception:
            torch.manual_seed(self.seed)
            model = self.build().to(device)
        return model, self.cast(model, device)

    def cast(self, model: nn.Module, device: torch.device) -> Loss:
        """Have the model run under the plan's autocast, if any; its loss function, likewise."""
        loss_fn = self.source.loss_fn or loss_of_output
        if self.plan.profile.autocast is None:
            return loss_fn
        dtype = choose_dtype(self.plan.profile.autocast)
        model.forward = cast(model.forward, device, dtype)
        return cast(loss_fn, device, dtype)

    def draw_numbers(self, number: int) -> None:
        """Draw numbers that follow from the seed of the run and from `number` from now on."""
        RandomNumbers.seed(self.seed * SPREAD + number)

    def draw_inputs(self, number: int, device: torch.device) -> Inputs:
        """Example inputs, drawn with a seed of microbatch `number`: every rank draws the same."""
        return place(self.draw_on_host(number), device, self.dtype)

    def draw_on_host(self, number: int) -> Inputs:
        """The same as the model's file makes them."""
        before = RandomNumbers()
        self.draw_numbers(number)
        try:
            return self.source.example_inputs(self.plan.microbatch_size)
        finally:
            before.restore()

    def record(self, device: torch.device) -> tuple[Record, set[str]]:
        """What a forward of the model does, as the plan cuts it, and which parameters train.

        Raises PartoptError where the plan is one for another model, or the model cannot be cut so.
        """
        model, loss_fn = self.build_weightless(device)
        layers = number_calls([name for stage in self.plan.stages for name in stage.modules])
        record = record_model(model, self.draw_inputs(0, device), loss_fn, layers)
        check_cuts(record, [stage.start for stage in self.plan.stages])
        known = dict(model.named_parameters())
        for s, stage in enumerate(self.plan.stages):
            names = held_parameter_names(record, stage.start, stage.stop)
            held_bytes = sum(known[name].numel() * known[name].element_size() for name in names)
            if held_bytes != stage.parameter_bytes:
                raise PartoptError(
                    f"stage {s} has {held_bytes} bytes of parameters in this model, "
                    f"{stage.parameter_bytes} in the plan",
                    "give the arguments of the model that was profiled, or plan for this one",
                    code="other-model",
                )
        return record, {name for name, parameter in known.items() if parameter.requires_grad}

    def stage(self, s: int, record: Record, whole: nn.Module, device: torch.device) -> StageModule:
        """Stage s of the model, whose `record` is given, with copies of the `whole` one's weights.

        They are those of its layers alone.
        """
        stage = self.plan.stages[s]
        model, loss_fn = self.build_weightless(device)
        names = held_parameter_names(record, stage.start, stage.stop)
        materialise(model, names, whole, device)
        place, example = (s, len(self.plan.stages)), self.draw_inputs(0, device)
        return StageModule(model, record, stage.start, stage.stop, loss_fn, place, example)


class Microbatches:
    """The inputs of the microbatches of one replica of a stage, by their numbers over all steps.

    A model file's `data(rank, replicas)` gives those of a replica in their order. Without it the
    example inputs are drawn. They are kept for as many `uses`, or for good.
    """

    def __init__(
        self,
        training: PlannedTraining,
        device: torch.device,
        replica: tuple[int, int] = (0, 1),
        uses: float = math.inf,
    ) -> None:
        self.training, self.device, self.uses = training, device, uses
        self.rank, self.replicas = replica
        self.data: Iterator[Inputs] | None = None
        if training.source.data is not None:
            self.data = iter(training.source.replica_data(self.rank, self.replicas))
        self.taken = 0
        self.drawn: dict[int, Inputs] = {}  # on the host, before a step needs them
        self.made: dict[int, tuple[Inputs, float]] = {}  # with the uses that are left

    def __call__(self, number: int) -> Inputs:
        """The inputs of microbatch `number`, which is this replica's."""
        inputs, left = self.made.pop(number, (None, 0.0))
        if left == 0:
            left = self.uses
            self.draw([number])
            inputs = place(self.drawn.pop(number), self.device, self.training.dtype)
        if left > 1:
            self.made[number] = inputs, left - 1
        return inputs

    def draw(self, numbers: Iterable[int]) -> None:
        """Have inputs on the host, pinned for a GPU, so that no step draws or pins any."""
        for number in numbers:
            if number not in self.drawn:
                example = self.training.draw_on_host
                inputs = example(number) if self.data is None else self._next(number)
                self.drawn[number] = pin(inputs) if self.device.type == "cuda" else inputs

    def draw_step(self, first: int, microbatches: int) -> None:
        """Have those of this replica in a step, which begins with microbatch `first`."""
        self.draw(range(first + self.rank, first + microbatches, self.replicas))

    def skip(self, microbatches: int) -> None:
        """Pass over what earlier runs have trained on: so many microbatches of all replicas."""
        if self.data is not None:
            for number in range(self.rank, microbatches, self.replicas):
                self._next(number)

    def _next(self, number: int) -> Inputs:
        assert self.data is not None
        where = f"{self.training.source.place}: data({self.rank}, {self.replicas})"
        try:
            for inputs in self.data:
                self.taken += 1
                if self.taken * self.replicas > number:
                    return inputs
        except Exception as error:
            raise PartoptError(
                f"{where} failed at microbatch {number}: {type(error).__name__}: {error}",
                "it yields the inputs of one microbatch after the other",
                code="model-code-failed",
            ) from error
        raise PartoptError(
            f"{where} ended after {self.taken} microbatches, before number {number}",
            "run fewer steps, or let it begin again",
            code="too-little-data",
        )


class RankTraining:
    """The stages of one rank, as they train step after step.

    `optimizers` are of the parameters that this rank steps itself, by stage, once they are made.
    """

    def __init__(self, training: PlannedTraining, context: Context) -> None:
        plan, rank = training.plan, context.rank
        self.training, self.context = training, context
        self.steps = self.first = 0  # steps so far, number of the step's first microbatch
        self.optimizers: dict[int, Optimizer] = {}
        self._stage_optimizers: dict[int, StageOptimizer] = {}  # of all parameters of a stage
        self.inputs: dict[int, Microbatches] = {}
        for s, stage in enumerate(plan.stages):
            if rank in stage.ranks:
                replica = list(stage.ranks).index(rank), stage.replicas
                uses = 2 if stage.recompute else 1  # a recomputation reads them again
                self.inputs[s] = Microbatches(training, context.device, replica, uses)
        self.record, self.trained = training.record(context.device)
        # as they are built, in float32
        whole_bytes = sum(stage.parameter_bytes for stage in plan.stages)
        whole_bytes = whole_bytes * 4 // training.dtype.itemsize
        self.stages = context.in_turns(whole_bytes, self._make_stages)
        # the same on every rank
        holding = shared_parameters(self.record, [stage.start for stage in plan.stages])
        self.tied = [
            Tied(
                name,
                sorted({rank for s in users for rank in plan.stages[s].ranks}),
                [self.stages[s].held_parameters[name] for s in users if s in self.stages],
            )
            for name, users in holding.items()
            if name in self.trained
        ]
        # every rank makes all groups, in one order; sums of gradients have one, weights another
        shared = plan.shard == "optimizer"
        self.sharing = {
            s: context.group(stage.ranks, "weights")
            for s, stage in enumerate(plan.stages)
            if shared and stage.replicas > 1
        }
        if context.backend == "nccl":
            for held in self.stages.values():
                held.warm_up(training.draw_inputs(0, context.device), context.device)
                warm_up(self._optimizer_of, held.parameters)

    def _make_stages(self) -> dict[int, ReplayStage]:
        training, device = self.training, self.context.device
        whole = training.build_seeded() if self.inputs else nn.Module()
        scale = 1.0 if training.asynchronous else 1.0 / training.microbatches

        def stage(s: int, inputs: Microbatches) -> ReplayStage:
            module = training.stage(s, self.record, whole, device)
            recompute = training.plan.stages[s].recompute
            return ReplayStage(module, lambda n: inputs(self.first + n), scale, recompute)

        return {s: stage(s, inputs) for s, inputs in self.inputs.items()}

    def step(self) -> RankRecord:
        """Learn from one iteration, or from the microbatches of an asynchronous plan."""
        return self.run(self._stage_optimizer_of)

    def run(self, optimizer_of: OptimizerOf | None) -> RankRecord:
        """The same with another optimizer; the record of this rank.

        Without one weights stay, and an iteration leaves its gradients.
        """
        training = self.training
        for s, stage in self.stages.items():
            if stage.draws_ahead:
                self.inputs[s].draw_step(self.first, training.microbatches)
        # of dropout: the same, whether the steps before ran here or in another run
        training.draw_numbers(self.steps * self.context.ranks + self.context.rank)
        execute_step = execute_on_torch if training.engine == "torch" else execute
        return execute_step(
            training.plan,
            self.stages.__getitem__,
            context=self.context,
            microbatches=training.microbatches if training.asynchronous else None,
            optimizer_of=optimizer_of,
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

    def begin_at(self, steps: int) -> None:
        """Go on behind so many steps of an earlier run, whose data is passed over."""
        self.steps, self.first = steps, steps * self.training.microbatches
        for inputs in self.inputs.values():
            inputs.skip(self.first)

    def make_optimizers(self) -> None:
        """Make what steps the stages, which the first step would else do."""
        for s, stage in self.stages.items():
            if stage.parameters:
                self._stage_optimizer_of(s, stage.parameters)

    def _optimizer_of(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        training = self.training
        return optimizer_of(training.source, training.plan.optimizer, training.rate, parameters)

    def _stage_optimizer_of(self, s: int, parameters: Sequence[nn.Parameter]) -> StageOptimizer:
        """What steps stage s, the same in every step: its optimizer, or that of all replicas."""

        def make(stepped: Sequence[nn.Parameter]) -> Optimizer:
            training, plan, made = self.training, self.training.plan, self._optimizer_of(stepped)
            if training.asynchronous:
                orders = order(plan.schedule, placement_of(plan, training.microbatches))
                step_by_mean(made, batch_of_stage(plan, orders, s))
            self.optimizers[s] = made
            return made

        if s not in self._stage_optimizers:
            group = self.sharing.get(s)
            self._stage_optimizers[s] = (
                make(parameters) if group is None else SharedOptimizer(parameters, make, group)
            )
        return self._stage_optimizers[s]


def losses_of(parts: Sequence[Mapping[int, float]]) -> float:
    """The mean loss of a step, from the losses of microbatches on all ranks."""
    every = [loss for part in parts for loss in part.values()]
    return sum(every) / len(every)
