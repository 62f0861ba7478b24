"""One training step as it is measured: forward, loss, backward; run, checked and timed.

Timed are the bare step, steps that time every layer, and the optimizer's. The gradients stay
allocated from step to step and the backward adds to them, as it does for every microbatch of a
batch but the first. They are zeroed before the first stamp. A device with a queue then works as far
behind the host as a step leaves it, as in training, where one step follows another: what a layer
takes is its device's time where the host is ahead, and that of its launches where it is not.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.device import (
    Clock,
    is_device_failure,
    is_out_of_memory,
    is_stepped,
    key_in_block,
    release_memory,
)
from partopt.profiler.layers import Backward, Tracker
from partopt.profiler.source import describe
from partopt.profiler.tensors import Inputs, Labelled, Loss, local_tensors, tensors_in

_OPTIMIZER_STEPS = 3  # each touches every weight: few are needed, and they are long


def run_forward(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for `inputs`.

    A tuple or list of inputs is spread over its arguments, a mapping over its keywords. Labels are
    for the loss.
    """
    if isinstance(inputs, Labelled):
        return run_forward(model, inputs.inputs)
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


def share_gradients(model: nn.Module, blocks: Collection[str]) -> None:
    """Give the blocks of these lists, which are alike, one memory for their gradients.

    Backwards add to it as they would to every block's, and what it comes to is not looked at.
    """
    shared: dict[object, Tensor] = {}
    # those that have one first: it is the memory of all
    for name, weight in sorted(model.named_parameters(), key=lambda pair: pair[1].grad is None):
        if weight.requires_grad and (key := key_in_block(name, weight, blocks)) is not None:
            if key not in shared:
                shared[key] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = shared[key]


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
            "return tensors, or give loss_fn(output, inputs) or loss_fn(output, labels)",
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


def check_step(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None, clock: Clock | None = None
) -> None:
    """Run one step, to explain what is wrong with it before anything is timed.

    Where the clock is that of a device with a queue, every module waits for it, so that a failure
    of the device is known by its layer. Raises PartoptError; running out of memory passes through.
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
    place = _Place(model, clock) if clock is not None and clock.queues else None
    try:
        with place.forward() if place else contextlib.nullcontext():
            loss = run_loss(model, inputs, loss_fn)
        _check_loss(loss)
        with place.backward(loss) if place else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
    except PartoptError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if place is not None and is_device_failure(error):
            raise device_failure(str(place), error, layer=place.name) from error
        hint = (
            "are example_inputs what the model takes? the second of a pair is for a "
            "loss_fn(output, labels), and the first may be a tuple"
        )
        raise PartoptError(
            f"the training step {describe(error)}", hint, code="model-code-failed"
        ) from error


class _Place:
    """Where a step is: at which module without children, in which direction."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        leaves = [name for name, module in model.named_modules() if not any(module.children())]
        self._tracker, self._clock = Tracker(model, leaves), clock
        self._direction, self._layer = "forward", 0

    @property
    def name(self) -> str:
        """The module's name; before the first one that of the model, which is empty."""
        layers = self._tracker.layers
        return layers[self._layer].name if layers else ""

    def __str__(self) -> str:
        return f"in the {self._direction} of {self.name or 'the model'}"

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Follow the forward that runs in this context."""
        with self._tracker.discover(self._enter):
            yield
            self._clock.wait()

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Follow the backward that runs in this context."""
        Backward(loss, self._tracker.began).call_at_changes(self._enter)
        self._direction = "backward"
        yield
        self._clock.wait()

    def _enter(self, layer: int) -> None:
        self._clock.wait()  # for the layer before
        self._layer = layer


USUAL_CAUSE = "an index that lies outside of a table is the usual cause"


def device_failure(where: str, error: Exception, **fields: Any) -> PartoptError:
    """The error of a device that failed at its work; `where` says which."""
    what = str(error).strip().partition("\n")[0]
    ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return PartoptError(
        f"the device failed {where}: {what}",
        f"{USUAL_CAUSE}; "
        + (
            "profile one rank's part alone to see the line: with CUDA_LAUNCH_BLOCKING=1 several "
            "wait for each other"
            if ranks
            else "CUDA_LAUNCH_BLOCKING=1 in the environment shows the line"
        ),
        code="device-failed",
        **fields,
    )


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
    _nodes: Counter[int] | None = None  # of every layer, in the first step
    _attaching_s: float = 0.0  # host seconds that the last step's hooks took to attach
    _behind_s: float = 0.0  # how far a step leaves the device behind the host

    def bare(self) -> float:
        """Seconds of a step, forward to backward, with nothing attached to the model."""
        with _no_collection():
            zero_gradients(self.model)
            self.clock.hold(self._behind_s)
            started, issuing = self.clock.stamp(), time.perf_counter()
            # named, so that it is freed after the step is timed, as below
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            loss.backward()  # type: ignore[no-untyped-call]
            ended, issued_s = self.clock.stamp(), time.perf_counter() - issuing
            [self.last_bare_s] = self.clock.intervals_s([started, ended])
        self._behind_s = max(self.last_bare_s - issued_s, 0.0)
        return self.last_bare_s

    def time_layers(self) -> LayerTimes:
        """Seconds of every layer in a step.

        Hooks are attached between forward and backward, while no time is counted. A device with a
        queue is held up there for as long as attaching took the last time: otherwise it would run
        dry, and the first kernels of the backward would be charged for their launches, which in a
        bare step are hidden behind the forward.
        """
        return self._by_layers(self.clock)

    def time_launches(self) -> LayerTimes:
        """Seconds of the host that every layer takes in a step.

        Before every layer the device is waited for, so that no launch waits for room in the queue.
        """
        return self._by_layers(_HostClock(self.clock))

    def _by_layers(self, clock: Clock) -> LayerTimes:
        backward = _Phase(clock)
        with _no_collection():
            forward, loss = self._forward(clock)
            attaching = time.perf_counter()
            Backward(loss, self.tracker.began).call_at_changes(backward.enter)
            self._attaching_s = time.perf_counter() - attaching
            backward.enter(self.tracker.current)
            loss.backward()  # type: ignore[no-untyped-call]
            backward.end()
        layers = len(self.tracker.layers)
        return LayerTimes(forward.seconds(layers), backward.seconds(layers))

    def input_gradients(self) -> list[float]:
        """Seconds of every layer in a backward that computes no gradients of weights.

        Zero-bubble schedules put these off: what they take is measured by its absence. A layer
        whose input needs no gradient takes none; a custom Function computes all its gradients at
        once. Raises what autograd does where part of the model refuses such a backward, as
        reentrant checkpoints do.
        """
        backward = _Phase(self.clock)
        with _no_collection():
            _, loss = self._forward(self.clock)
            edges = Backward(loss, self.tracker.began).input_gradients(backward.enter)
            gradients = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
            backward.end()
            del gradients  # freed after the backward is timed
        return backward.seconds(len(self.tracker.layers))

    def input_parts(self, steps: int) -> list[list[float]]:
        """`input_gradients` of a few steps; of none where autograd refuses them."""
        try:
            return [self.input_gradients() for _ in range(steps)]
        except Exception as error:  # the model's code may raise anything
            if is_out_of_memory(error):
                release_memory()
            return []

    def optimizer(self, blocks: Collection[str] = ()) -> float:
        """Median seconds of an AdamW step on the whole model, which is paid once a batch.

        Of `blocks` the second of every list is stepped, and its seconds are those of as many bytes
        of all; on a CPU one parameter after the other, so that one has moments at a time, the
        largest when the gradients of the others are gone. The learning rate is 0, so that the
        weights stay as they are.
        """
        run_loss(self.model, self.inputs, self.loss_fn).backward()  # type: ignore[no-untyped-call]
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        trained = [parameter for name, parameter in named if is_stepped(name, blocks)]
        # a list that is not there is refused where it would be repeated
        trained = trained or [parameter for _, parameter in named]
        stepped = {id(parameter) for parameter in trained}
        for _, parameter in named:
            if id(parameter) not in stepped:
                parameter.grad = None  # makes room for the moments
        apart = blocks and not self.clock.queues
        parts = [[p] for p in sorted(trained, key=Tensor.numel)] if apart else [trained]
        step_s = sum(map(self._median_step_s, parts))
        trained_bytes, all_bytes = (
            sum(part.nbytes for part in local_tensors(parameters))
            for parameters in (trained, [parameter for _, parameter in named])
        )
        return step_s * (all_bytes / trained_bytes)

    def _median_step_s(self, parameters: list[nn.Parameter]) -> float:
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        optimizer.step()  # the first one makes the moments
        times, issued_s = list[float](), 0.0
        for _ in range(1 + _OPTIMIZER_STEPS):
            # as behind a backward: launches are hidden, of which the first step learns how long
            self.clock.hold(issued_s)
            started, issuing = self.clock.stamp(), time.perf_counter()
            optimizer.step()
            issued_s = time.perf_counter() - issuing
            times += self.clock.intervals_s([started, self.clock.stamp()])
        optimizer.zero_grad()
        return statistics.median(times[1:])

    def _forward(self, clock: Clock) -> tuple[_Phase, Tensor]:
        """A forward with a stamp at every layer, and the loss; the device is held up behind it."""
        forward = _Phase(clock)
        with self.tracker.watch(forward.enter):
            zero_gradients(self.model)
            clock.hold(self._behind_s)
            forward.enter(0)
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            forward.end()
        nodes = self.tracker.nodes
        self._nodes = self._nodes or nodes
        self.uneven |= {layer for layer in nodes if nodes[layer] != self._nodes[layer]}
        clock.hold(self._attaching_s)
        return forward, loss


@dataclass
class _HostClock(Clock):
    """The host's time between the moments at which it waits for the device."""

    device: Clock

    def stamp(self) -> tuple[float, float]:
        """When the host comes to this point, and when the device has."""
        reached = time.perf_counter()
        self.device.wait()
        return reached, time.perf_counter()

    def intervals_s(self, stamps: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds in which the host does not wait."""
        return [after[0] - before[1] for before, after in itertools.pairwise(stamps)]


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
        """Seconds of every one of the layers in this phase."""
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
