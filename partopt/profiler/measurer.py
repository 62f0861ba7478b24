"""Measuring: what each layer takes, keeps and passes on, for each microbatch size."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from partopt.documents import Note
from partopt.documents.profile import (
    Device,
    Estimated,
    Layer,
    LayerMeasurement,
    Measurement,
    Profile,
)
from partopt.errors import PartoptError
from partopt.profiler.backward_split import STEPS as STEPS_OF_SPLIT
from partopt.profiler.backward_split import split_backward, time_input_gradients
from partopt.profiler.compilation import compile_units, record_stash
from partopt.profiler.device import describe_device
from partopt.profiler.group import RankGroup, check_same_inputs, expect_collectives
from partopt.profiler.memory import release_memory
from partopt.profiler.optimizer import time_optimizer
from partopt.profiler.precision import no_cast_cache
from partopt.profiler.quality_checks import (
    OVERHEAD_BOUND,
    RESCALE_ABOVE,
    note_missing_backwards,
    note_optimizer,
    note_recomputed,
    note_unscaled_inputs,
)
from partopt.profiler.ranks import combine_ranks
from partopt.profiler.resume import check_same_layers
from partopt.profiler.step import Inputs, check_step
from partopt.profiler.structure import Structure, observe, track
from partopt.profiler.subject import Subject
from partopt.profiler.tensors import place, tensors_in, tokens_per_sample
from partopt.profiler.timeline import LayerTimes, Stepper
from partopt.profiler.tracker import Tracker
from partopt.profiler.units import calls_vary

STEPS = 10
LONG_STEP_S, STEPS_IF_LONG = 1.0, 5
WARM_UP_STEPS = 2
CUDA_WARM_UP_S = 0.5  # a GPU at rest takes as long to raise its clock rate


class Measurer:
    """Measures one subject size by size, the smallest first.

    The layers are numbered at the first size that fits. What `resumed` holds is not measured again.
    """

    input_gradient_steps = STEPS_OF_SPLIT

    def __init__(self, subject: Subject, resumed: Profile | None = None) -> None:
        self.subject = subject
        self.resumed = resumed
        self.layers: list[Layer] = []
        self.measurements: list[Measurement] = [*resumed.measurements] if resumed else []
        self.notes: list[Note] = [*resumed.notes] if resumed else []
        self.uneven: dict[int, str] = {}  # layers that run at random, and their names
        self._tracker: Tracker | None = None
        self.tokens_per_sample = resumed.model.tokens_per_sample if resumed else None
        self._input_elements: dict[int, list[int]] = {}
        measured = resumed.measured() if resumed else []
        self._optimizer_s = measured[0].optimizer_s if measured else None
        self._optimizer_tried = bool(measured)

    @property
    def has_new(self) -> bool:
        """Whether a size was measured here."""
        return len(self.measurements) > (len(self.resumed.measurements) if self.resumed else 0)

    def describe_device(self) -> Device:
        """The device whose times these are."""
        return describe_device(self.subject.settings.device)

    def describe_estimate(self) -> Estimated | None:
        """What the times were computed from; None of measured ones."""
        return None

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The context in which the model lies on the device, ready to train."""
        settings = self.subject.settings
        if any(parameter.is_meta for parameter in self.subject.model.parameters()):
            raise PartoptError(
                "the model is on the meta device: it has no weights to measure",
                "build a few of its blocks with weights and add the others by `repeat`, or "
                "`estimate`",
                code="no-weights",
            )
        self.subject.model.to(settings.device, settings.dtype).train()
        yield

    def measure(self, size: int) -> None:
        """Add the measurement of one microbatch size.

        A size that runs out of memory, or is larger than one that did, is added as out of memory;
        one that is there already is left as it is.
        """
        if any(each.microbatch_size == size for each in self.measurements):
            return
        self.subject.settings.progress(size, 0, 0)
        if any(each.out_of_memory and each.microbatch_size < size for each in self.measurements):
            self.measurements.append(Measurement(microbatch_size=size, out_of_memory=True))
            return
        try:
            measurement = self._measure(size)
        except Exception as error:
            if not self.subject.group.is_out_of_memory(error):
                raise
            measurement = Measurement(microbatch_size=size, out_of_memory=True)
        if measurement.out_of_memory:
            self.subject.model.zero_grad(set_to_none=True)
            release_memory()
        self.measurements.append(measurement)

    def _measure(self, size: int) -> Measurement:
        subject, settings = self.subject, self.subject.settings
        subject.group.seed()
        inputs = place(subject.example_inputs(size), settings.device, settings.dtype)
        check_same_inputs(size, inputs, subject.group)
        tracker, structure = self._see(inputs)
        if not self.layers:  # once: it is the same at every size
            names = [tracker.layers[layer].name for layer in sorted(structure.recomputed)]
            self.notes += note_recomputed(names)
        self._note_inputs(size, inputs)
        self._keep_layers(structure.layers, tracker, size)
        with contextlib.ExitStack() as compiled:
            if settings.compiled:
                compiled.enter_context(compile_units(tracker.modules))
                check_step(subject.model, inputs, subject.loss_fn)
                groups = record_stash(subject, inputs, tracker)
                structure = replace(structure, stash_groups=groups)
            return self._time(size, inputs, tracker, structure)

    def _see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The layers at one microbatch size, once a step has shown that it runs."""
        subject = self.subject
        check_step(subject.model, inputs, subject.loss_fn)
        if subject.group.ranks > 1:
            # it adds to gradients, for which DTensors then know their layout
            with expect_collectives():
                check_step(subject.model, inputs, subject.loss_fn)
        tracker = self._tracker or track(subject, inputs)
        with no_cast_cache():
            seen = observe(subject, inputs, tracker)
        return tracker, combine_ranks(seen, subject.group)

    def _time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        subject, settings = self.subject, self.subject.settings
        stepper = Stepper(subject.model, inputs, subject.loss_fn, tracker, subject.clock)
        peak_memory_bytes = _warm_up(stepper, settings.device, subject.group)
        bare_s, instrumented = self._alternate(stepper, size)
        if tracker.varied:
            raise calls_vary(sorted({key.name for key in tracker.varied}))
        if all(measurement.out_of_memory for measurement in self.measurements):
            # once: it is the same at every size
            self.notes += note_missing_backwards(tracker, instrumented)
        if not self._optimizer_tried:
            self._optimizer_s, self._optimizer_tried = self._optimizer(inputs), True
        summary = summarize(
            size, structure, bare_s, instrumented, self._optimizer_s, peak_memory_bytes
        )
        parts = [] if settings.compiled else self._input_gradients(stepper)
        self.uneven |= {layer: tracker.layers[layer].name for layer in stepper.uneven}
        return split_backward(summary, parts, _scale(summary.overhead or 1.0))

    def _keep_layers(self, layers: list[Layer], tracker: Tracker, size: int) -> None:
        if not self.layers:
            if self.resumed is not None:
                check_same_layers(self.resumed.layers, layers)
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
        chosen = self.subject.group.agree(_choose_steps(stepper.last_bare_s))
        steps = self.subject.settings.steps or chosen
        progress = self.subject.settings.progress
        for step in range(steps):
            progress(size, step, steps)
            bare_s.append(stepper.bare())
            instrumented.append(stepper.instrumented())
        progress(size, steps, steps)
        return bare_s, instrumented

    def _note_inputs(self, size: int, inputs: Inputs) -> None:
        """Once, when a second size shows whether the inputs grow, or none will."""
        self.tokens_per_sample = tokens_per_sample(inputs, size)
        self._input_elements[size] = [tensor.numel() for tensor in tensors_in(inputs)]
        sizes = len(self.subject.settings.microbatch_sizes)
        if len(self._input_elements) == min(2, sizes):
            self.notes += note_unscaled_inputs(self._input_elements)

    def _input_gradients(self, stepper: Stepper) -> list[list[float]]:
        """Seconds of each layer in steps whose backward leaves the gradients of weights out."""
        return time_input_gradients(stepper, self.input_gradient_steps)

    def _optimizer(self, inputs: Inputs) -> float | None:
        """Seconds of an optimizer step, or None and a note where it fails."""
        try:
            return self._time_optimizer(inputs)
        except Exception as error:
            self.notes.append(note_optimizer(error))
        self.subject.model.zero_grad(set_to_none=True)
        release_memory()
        return None

    def _time_optimizer(self, inputs: Inputs) -> float | None:
        """Seconds of an optimizer step."""
        subject = self.subject
        return time_optimizer(subject.model, inputs, subject.loss_fn, subject.clock)


def _choose_steps(step_s: float) -> int:
    """How many steps to time where nobody says: those of a long step spread less."""
    return STEPS if step_s <= LONG_STEP_S else STEPS_IF_LONG


def _warm_up(stepper: Stepper, device: torch.device, group: RankGroup) -> int | None:
    """Run both kinds of step untimed, and return the peak memory of a bare one in bytes.

    The peak, the largest of the ranks, is None where the device does not report it.
    """
    if device.type == "cuda":
        release_memory()
        torch.cuda.reset_peak_memory_stats(device)
    began, steps = time.perf_counter(), 0
    while steps < WARM_UP_STEPS or (
        device.type == "cuda" and group.agree(time.perf_counter() - began < CUDA_WARM_UP_S)
    ):
        stepper.bare()  # returns when the device has done it
        steps += 1
    peak = None
    if device.type == "cuda":
        peak = max(group.gather(torch.cuda.max_memory_allocated(device)))
    stepper.instrumented()
    return peak


def summarize(
    size: int,
    structure: Structure,
    bare_s: list[float],
    instrumented: list[LayerTimes],
    optimizer_s: float | None,
    peak: int | None,
) -> Measurement:
    """The measurement of a size: medians of its steps, and what the structure shows."""
    step_s = statistics.median(bare_s)
    overhead = statistics.median(times.step_s for times in instrumented) / step_s
    scale = _scale(overhead)
    layers = [
        _layer(
            [times.forward_s[index] * scale for times in instrumented],
            [times.backward_s[index] * scale for times in instrumented],
            structure.output_bytes.get(index, 0),
            structure.flops.get(index, 0),
            structure.transient_bytes.get(index, 0),
            structure.split_stash_bytes.get(index, 0),
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


def _scale(overhead: float) -> float:
    """What brings the layers' times back to the bare step."""
    return 1 / overhead if overhead > RESCALE_ABOVE else 1.0


def _layer(
    forward_s: list[float],
    backward_s: list[float],
    output_bytes: int,
    forward_flops: int,
    transient_bytes: int,
    split_stash_bytes: int,
) -> LayerMeasurement:
    return LayerMeasurement(
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        forward_stdev_s=_stdev(forward_s),
        backward_stdev_s=_stdev(backward_s),
        output_bytes=output_bytes,
        transient_bytes=transient_bytes,
        split_stash_bytes=split_stash_bytes,
        forward_flops=forward_flops,
    )


def _stdev(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
