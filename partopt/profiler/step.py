"""One training step as it is measured: forward, loss, backward; run, checked and timed.

Timed are the bare step, steps that time each layer, and the optimizer's. The gradients stay
allocated from step to step and the backward adds to them, as it does for every microbatch of a
batch but the first. They are zeroed just before the first stamp, so that both kinds of step begin
behind the same work in a device's queue.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.device import Clock, is_out_of_memory, release_memory
from partopt.profiler.layers import Backward, Tracker
from partopt.profiler.source import describe
from partopt.profiler.tensors import Inputs, Loss, tensors_in

_OPTIMIZER_STEPS = 3  # each touches every weight: few are needed, and they are long


def run_forward(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for `inputs`.

    A tuple or list of inputs is spread over its arguments, a mapping over its keywords.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def run_loss(model: nn.Module, inputs: Inputs, loss_fn: Loss | None) -> Tensor:
    """Run the forward and compute the loss.

    It is what `loss_fn` returns, else the output's `.loss`, else the sum of its floating tensors.
    """
    output = run_forward(model, inputs)
    return default_loss(output) if loss_fn is None else loss_fn(output, inputs)


def zero_gradients(model: nn.Module) -> None:
    """Set the gradients that there are to zero; memory that several share, once."""
    gradients = {id(weight.grad): weight.grad for weight in model.parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            gradient.zero_()


def default_loss(output: Any) -> Tensor:
    """The `.loss` of an output that has one, else the sum of its floating tensors.

    Raises PartoptError where it holds none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not floating:
        raise PartoptError(
            f"the model returned {type(output).__name__}: no .loss and no floating tensor in it",
            "return tensors, or give loss_fn(output, inputs)",
            code="no-loss",
        )
    return (
        torch.stack([tensor.sum() for tensor in floating]).sum()
        if len(floating) > 1
        else floating[0].sum()
    )


def loss_of_output(output: Any, _inputs: Inputs) -> Tensor:
    """`default_loss`, as a loss function."""
    return default_loss(output)


def check_step(model: nn.Module, inputs: Inputs, loss_fn: Loss | None) -> None:
    """Run one step, to explain what is wrong with it before anything is timed.

    Raises PartoptError; running out of memory passes through.
    """
    if not any(True for _ in model.parameters()):
        raise PartoptError(
            "the model has no parameters: there is nothing to train",
            "measure a model with parameters",
            code="nothing-to-train",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PartoptError(
            "no parameter of the model requires a gradient: there is no backward to measure",
            "unfreeze some of it",
            code="nothing-to-train",
        )
    try:
        loss = run_loss(model, inputs, loss_fn)
        _check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    except PartoptError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        hint = "are example_inputs what the model takes?"
        raise PartoptError(
            f"the training step {describe(error)}", hint, code="model-code-failed"
        ) from error


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise PartoptError(
            f"loss_fn returned {found}, not a single number",
            "return a scalar tensor, such as a mean",
            code="invalid-loss",
        )
    if not loss.requires_grad:
        raise PartoptError(
            "the loss depends on no parameter that requires a gradient",
            "does loss_fn detach it, or the forward?",
            code="invalid-loss",
        )


# --- timed ----------------------------------------------------------------------------------------


@dataclass
class LayerTimes:
    """Seconds of every layer in one instrumented step.

    Their sum is the step: the intervals leave no gap.
    """

    forward_s: list[float]
    backward_s: list[float]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass
class Stepper:
    """Runs steps of one model on one microbatch and times them.

    `uneven` are the layers whose forwards made more nodes of the graph in one step than in another:
    part of them runs at random.
    """

    model: nn.Module
    inputs: Inputs
    loss_fn: Loss | None
    tracker: Tracker
    clock: Clock
    last_bare_s: float = 0.0
    uneven: set[int] = field(default_factory=set)
    _nodes: Counter[int] | None = None  # of each layer, in the first step
    _attaching_s: float = 0.0  # host seconds that the last step's hooks took to attach

    def bare(self) -> float:
        """Seconds of a step, forward to backward, with nothing attached to the model."""
        with _no_collection():
            zero_gradients(self.model)
            started = self.clock.stamp()
            # named, so that it is freed after the step is timed, as below
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            loss.backward()  # type: ignore[no-untyped-call]
            [self.last_bare_s] = self.clock.intervals_s([started, self.clock.stamp()])
        return self.last_bare_s

    def instrumented(self) -> LayerTimes:
        """Seconds of each layer in a step.

        Hooks are attached between forward and backward, while no time is counted. A device with a
        queue is held up there for as long as attaching took the last time: otherwise it would run
        dry, and the first kernels of the backward would be charged for their launches, which in a
        bare step are hidden behind the forward.
        """
        backward = _Phase(self.clock)
        with _no_collection():
            forward, loss = self._forward()
            attaching = time.perf_counter()
            Backward(loss, self.tracker.began).call_at_changes(backward.enter)
            self._attaching_s = time.perf_counter() - attaching
            backward.enter(self.tracker.current)
            loss.backward()  # type: ignore[no-untyped-call]
            backward.end()
        layers = len(self.tracker.layers)
        return LayerTimes(forward.seconds(layers), backward.seconds(layers))

    def input_gradients(self) -> list[float]:
        """Seconds of each layer in a backward that computes no gradients of weights.

        Zero-bubble schedules put these off: what they take is measured by its absence. A layer
        whose input needs no gradient takes none; a custom Function computes all its gradients at
        once. Raises what autograd does where part of the model refuses such a backward, as
        reentrant checkpoints do.
        """
        backward = _Phase(self.clock)
        with _no_collection():
            _, loss = self._forward()
            edges = Backward(loss, self.tracker.began).input_gradients(backward.enter)
            gradients = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
            backward.end()
            del gradients  # freed after the backward is timed
        return backward.seconds(len(self.tracker.layers))

    def input_parts(self, steps: int) -> list[list[float]]:
        """`input_gradients` of a few steps; of none where autograd refuses them."""
        try:
            return [self.input_gradients() for _ in range(steps)]
        except Exception as error:  # the model's own code may raise anything
            if is_out_of_memory(error):
                release_memory()
            return []

    def optimizer(self) -> float:
        """Median seconds of an AdamW step on the whole model, which is paid once a batch.

        The learning rate is 0, so that the weights stay as they are.
        """
        run_loss(self.model, self.inputs, self.loss_fn).backward()  # type: ignore[no-untyped-call]
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0)
        optimizer.step()  # the first one makes the moments
        times: list[float] = []
        for _ in range(_OPTIMIZER_STEPS):
            started = self.clock.stamp()
            optimizer.step()
            times += self.clock.intervals_s([started, self.clock.stamp()])
        return statistics.median(times)

    def _forward(self) -> tuple[_Phase, Tensor]:
        """A forward with a stamp at each layer, and the loss; the device is held up behind it."""
        forward = _Phase(self.clock)
        with self.tracker.watch(forward.enter):
            zero_gradients(self.model)
            forward.enter(0)
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            forward.end()
        nodes = self.tracker.nodes
        self._nodes = self._nodes or nodes
        self.uneven |= {layer for layer in nodes if nodes[layer] != self._nodes[layer]}
        self.clock.hold(self._attaching_s)
        return forward, loss


@dataclass
class _Phase:
    """The forward or the backward of one step: a stamp wherever another layer begins."""

    clock: Clock
    entered: list[int] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)

    def enter(self, layer: int) -> None:
        self.stamps.append(self.clock.stamp())
        self.entered.append(layer)

    def end(self) -> None:
        self.stamps.append(self.clock.stamp())

    def seconds(self, layers: int) -> list[float]:
        """Seconds of each of the layers in this phase."""
        totals = [0.0] * layers
        intervals_s = self.clock.intervals_s(self.stamps)
        for layer, interval_s in zip(self.entered, intervals_s, strict=True):
            totals[layer] += interval_s
        return totals


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out of a timed step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
