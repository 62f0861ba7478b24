"""Measuring: what each layer takes, keeps and passes on, for each microbatch size."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from partopt.documents import Note
from partopt.documents.profile import Layer, LayerMeasurement, Measurement, StashGroup, Tensor
from partopt.errors import PartoptError
from partopt.profiler.dataflow import DataflowMode, output_recorder
from partopt.profiler.optimizer import time_optimizer
from partopt.profiler.out_of_memory import is_out_of_memory, release_memory
from partopt.profiler.parameters import describe_layers
from partopt.profiler.quality_checks import note_missing_backwards
from partopt.profiler.stash import StashRecorder
from partopt.profiler.step import Inputs, check_step, place, run_loss
from partopt.profiler.subject import Subject
from partopt.profiler.timeline import LayerTimes, Stepper
from partopt.profiler.tracker import Tracker
from partopt.profiler.units import called_modules, choose_units

WARM_UP_STEPS = 2
CUDA_WARM_UP_S = 0.5  # a GPU at rest takes as long to raise its clock rate
# instrumented / bare: above it the layers' times are scaled to the bare step
RESCALE_ABOVE = 1.05
# above it the hooks cost so much that the shares of the layers themselves are in doubt
OVERHEAD_BOUND = 1.20


@dataclass(frozen=True)
class Structure:
    """What one forward shows of the layers at one microbatch size, apart from time."""

    layers: list[Layer]
    output_bytes: dict[int, int]
    flops: dict[int, int]
    tensors: list[Tensor]
    stash_groups: list[StashGroup]
    users: Mapping[str, set[int]] = field(default_factory=dict)  # of the parameters


class Measurer:
    """Measures one subject size by size, the smallest first.

    The layers are numbered at the first size that fits.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.layers: list[Layer] = []
        self.measurements: list[Measurement] = []
        self.notes: list[Note] = []
        self._tracker: Tracker | None = None
        self._optimizer_s: float | None = None
        self._optimizer_tried = False

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The context in which the model lies on the device, ready to train."""
        settings = self.subject.settings
        self.subject.model.to(settings.device, settings.dtype).train()
        yield

    def measure(self, size: int) -> None:
        """Add the measurement of one microbatch size.

        A size that runs out of memory, or is larger than one that did, is added as out of memory.
        """
        if any(smaller.out_of_memory for smaller in self.measurements):
            self.measurements.append(Measurement(microbatch_size=size, out_of_memory=True))
            return
        try:
            measurement = self._measure(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            measurement = Measurement(microbatch_size=size, out_of_memory=True)
        if measurement.out_of_memory:
            self.subject.model.zero_grad(set_to_none=True)
            release_memory()
        self.measurements.append(measurement)

    def _measure(self, size: int) -> Measurement:
        settings = self.subject.settings
        inputs = place(self.subject.example_inputs(size), settings.device, settings.dtype)
        tracker, structure = self._see(inputs)
        self._keep_layers(structure.layers, tracker, size)
        return self._time(size, inputs, tracker, structure)

    def _see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The layers at one microbatch size, once a step has shown that it runs."""
        subject = self.subject
        check_step(subject.model, inputs, subject.loss_fn)
        tracker = self._tracker or track(subject, inputs)
        return tracker, observe(subject, inputs, tracker)

    def _time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        subject, settings = self.subject, self.subject.settings
        stepper = Stepper(subject.model, inputs, subject.loss_fn, tracker, subject.clock)
        peak_memory_bytes = _warm_up(stepper, settings.device)
        bare_s, instrumented = self._alternate(stepper, size)
        if all(measurement.out_of_memory for measurement in self.measurements):
            # once: it is the same at every size
            self.notes += note_missing_backwards(tracker, instrumented)
        if not self._optimizer_tried:
            self._optimizer_s, self._optimizer_tried = self._optimizer(inputs), True
        return _summary(size, structure, bare_s, instrumented, self._optimizer_s, peak_memory_bytes)

    def _keep_layers(self, layers: list[Layer], tracker: Tracker, size: int) -> None:
        if not self.layers:
            self.layers, self._tracker = layers, tracker
        elif [(layer.name, layer.call) for layer in layers] != [
            (layer.name, layer.call) for layer in self.layers
        ]:
            first = next(
                measurement.microbatch_size
                for measurement in self.measurements
                if not measurement.out_of_memory
            )
            raise PartoptError(
                f"at microbatch size {size} the model calls other layers than at {first}",
                "choose larger units, whose calls do not depend on the data: "
                "`granularity=block`, or `units`",
                code="calls-vary",
                microbatch_sizes=[first, size],
            )

    def _alternate(self, stepper: Stepper, size: int) -> tuple[list[float], list[LayerTimes]]:
        """Bare and instrumented steps in turn, so that a drift of the device affects both."""
        bare_s, instrumented = [], []
        steps, progress = self.subject.settings.steps, self.subject.settings.progress
        for step in range(steps):
            progress(size, step, steps)
            bare_s.append(stepper.bare())
            instrumented.append(stepper.instrumented())
        progress(size, steps, steps)
        return bare_s, instrumented

    def _optimizer(self, inputs: Inputs) -> float | None:
        """Seconds of an optimizer step, or None where its state does not fit next to the model."""
        try:
            return self._time_optimizer(inputs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.subject.model.zero_grad(set_to_none=True)
        release_memory()
        return None

    def _time_optimizer(self, inputs: Inputs) -> float | None:
        subject = self.subject
        return time_optimizer(subject.model, inputs, subject.loss_fn, subject.clock)


def track(subject: Subject, inputs: Inputs) -> Tracker:
    """The tracker of the units that the settings choose."""
    called = called_modules(subject.model, inputs)
    settings = subject.settings
    units = choose_units(subject.model, called, settings.granularity, settings.units)
    return Tracker(subject.model, units)


def observe(subject: Subject, inputs: Inputs, tracker: Tracker) -> Structure:
    """One forward under observation: layers, tensors between them, what they keep."""
    output_bytes: dict[int, int] = {}
    flow = DataflowMode(subject.model, tracker)
    stash = StashRecorder(subject.model, tracker)
    with tracker.discover(output_recorder(output_bytes)), flow, stash.hooks():
        loss = run_loss(subject.model, inputs, subject.loss_fn)
    groups = stash.groups()
    del loss  # the graph had to live until the groups were read
    return Structure(
        describe_layers(subject.model, tracker, flow.users),
        output_bytes,
        flow.flops,
        flow.tensors(),
        groups,
        flow.users,
    )


def _warm_up(stepper: Stepper, device: torch.device) -> int | None:
    """Run both kinds of step untimed, and return the peak memory of a bare one in bytes.

    The peak is None where the device does not report it.
    """
    if device.type == "cuda":
        release_memory()
        torch.cuda.reset_peak_memory_stats(device)
    began, steps = time.perf_counter(), 0
    while steps < WARM_UP_STEPS or (
        device.type == "cuda" and time.perf_counter() - began < CUDA_WARM_UP_S
    ):
        stepper.bare()  # returns when the device has done it
        steps += 1
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    stepper.instrumented()
    return peak


def _summary(
    size: int,
    structure: Structure,
    bare_s: list[float],
    instrumented: list[LayerTimes],
    optimizer_s: float | None,
    peak: int | None,
) -> Measurement:
    step_s = statistics.median(bare_s)
    overhead = statistics.median(times.step_s for times in instrumented) / step_s
    scale = 1 / overhead if overhead > RESCALE_ABOVE else 1.0
    layers = [
        _layer(
            [times.forward_s[index] * scale for times in instrumented],
            [times.backward_s[index] * scale for times in instrumented],
            structure.output_bytes.get(index, 0),
            structure.flops.get(index, 0),
        )
        for index in range(len(structure.layers))
    ]
    return Measurement(
        microbatch_size=size,
        step_s=step_s,
        coverage=sum(layer.forward_s + layer.backward_s for layer in layers) / step_s,
        overhead=overhead,
        overhead_bound=overhead > OVERHEAD_BOUND,
        optimizer_s=optimizer_s,
        peak_memory_bytes=peak,
        layers=layers,
        tensors=structure.tensors,
        stash_groups=structure.stash_groups,
    )


def _layer(
    forward_s: list[float], backward_s: list[float], output_bytes: int, forward_flops: int
) -> LayerMeasurement:
    return LayerMeasurement(
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        forward_stdev_s=_stdev(forward_s),
        backward_stdev_s=_stdev(backward_s),
        output_bytes=output_bytes,
        forward_flops=forward_flops,
    )


def _stdev(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
