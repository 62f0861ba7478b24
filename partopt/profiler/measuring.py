"""Measuring a model: what every layer takes, keeps and passes on, for every microbatch size.

Sizes are measured in turn, the smallest first: a step shows what is wrong and what the layers are,
bare and instrumented steps are timed in turn. Where measuring is stopped, what is finished remains,
and another run goes on with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from partopt.documents import Note
from partopt.documents.profile import (
    Device,
    Environment,
    Estimated,
    Group,
    Layer,
    Measurement,
    Model,
    Profile,
)
from partopt.errors import ANSWER_IS_NO, PartoptError, invalid
from partopt.profiler.as_trained import compile_units, no_cast_cache, open_compiled, under_autocast
from partopt.profiler.conditions import SETTINGS, ClockRate, describe_environment
from partopt.profiler.device import describe_device, hold_still, is_device_failure, release_memory
from partopt.profiler.group import RankGroup, check_same_inputs, expect_collectives
from partopt.profiler.layer_choice import calls_vary, track
from partopt.profiler.layers import Tracker
from partopt.profiler.observation import Structure, observe, observe_stash
from partopt.profiler.settings import Subject
from partopt.profiler.source import ModelSource
from partopt.profiler.step import (
    LayerTimes,
    Stepper,
    check_step,
    device_failure,
    share_gradients,
)
from partopt.profiler.summary import (
    TimedSteps,
    note_busy_machine,
    note_device,
    note_launch_bound,
    note_missing_backwards,
    note_optimizer,
    note_overhead,
    note_throttled,
    note_uneven_layers,
    note_unscaled_inputs,
    note_unsteady,
    summarize,
)
from partopt.profiler.tensors import Inputs, place, tensors_in, tokens_per_sample

STEPS = 10
LONG_STEP_S, STEPS_IF_LONG = 1.0, 5  # those of a long step spread less
WARM_UP_STEPS = 2
WINDOW_S = 0.25  # a device with a queue is warm once steps of two such windows take the same,
STEADY = 0.02  # but for this share: at rest it takes half a second or more to raise its clock rate
LONGEST_WARM_UP_S = 20.0
INPUT_GRADIENT_STEPS = 3
ISSUED_STEPS = 3


class ProfilingStopped(BaseException):
    """Profiling ended before all sizes were measured: by `error`, or by Ctrl-C where that is None.

    `profile` holds the microbatch sizes that were finished; only after Ctrl-C may it be None. Not
    an Exception, so that code which catches those lets Ctrl-C through, as it does
    KeyboardInterrupt.
    """

    def __init__(self, profile: Profile | None, error: Exception | None = None) -> None:
        super().__init__(
            f"profiling was stopped: {error}" if error else "profiling was interrupted"
        )
        self.profile = profile
        self.error = error


@contextlib.contextmanager
def errors_name(source: ModelSource) -> Iterator[None]:
    """Errors in this context name the model's file where they are about it."""
    try:
        yield
    except ProfilingStopped as stopped:
        if isinstance(stopped.error, PartoptError):
            stopped.error = source.locate(stopped.error)
        raise
    except PartoptError as error:
        raise source.locate(error) from error.__cause__


class Measurer:
    """Measures one subject size by size, the smallest first.

    The layers are numbered at the first size that fits. What `resumed` holds is not measured again.
    """

    def __init__(self, subject: Subject, resumed: Profile | None = None) -> None:
        self.subject = subject
        self.resumed = resumed
        self.layers: list[Layer] = []
        self.tracker: Tracker | None = None
        self.measurements: list[Measurement] = [*resumed.measurements] if resumed else []
        self.notes: list[Note] = [*resumed.notes] if resumed else []
        self.uneven: dict[int, str] = {}  # layers that run at random, and their names
        self.tokens_per_sample = resumed.model.tokens_per_sample if resumed else None
        # now: a device that has failed says nothing more
        device = subject.settings.torch_device
        self._device, self._environment = describe_device(device), describe_environment(device)
        self._clock_rate = ClockRate(device)
        if resumed is not None:
            known = resumed.environment
            self._environment = replace(
                self._environment,
                attention=known.attention,
                sm_clock_hz=known.sm_clock_hz,
                throttled_by=known.throttled_by,
            )
        self._input_elements: dict[int, list[int]] = {}
        measured = resumed.measured() if resumed else []
        self._optimizer_s = measured[0].optimizer_s if measured else None
        self._optimizer_tried = bool(measured)

    def describe_device(self) -> Device:
        """The device whose times these are."""
        return self._device

    def describe_environment(self) -> Environment:
        """Versions, settings and the clock rate of what was measured with."""
        return self._clock_rate.describe(self._environment)

    def describe_estimate(self) -> Estimated | None:
        """What the times were computed from; None of measured ones."""
        return None

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """The context in which the model lies on the device, ready to train."""
        model, settings = self.subject.model, self.subject.settings
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PartoptError(
                "the model is on the meta device: it has no weights to measure",
                "build a few of its blocks with weights and add the others by `repeat`, or "
                "`estimate`",
                code="no-weights",
            )
        model.to(settings.torch_device, settings.torch_dtype).train()
        yield

    def measure(self, size: int) -> None:
        """Add the measurement of one microbatch size.

        A size that runs out of memory, or is larger than one that did, is added as out of memory;
        one that is there already is left as it is.
        """
        if any(measurement.microbatch_size == size for measurement in self.measurements):
            return
        self.subject.settings.report(size, 0, 0)
        full = any(
            measurement.out_of_memory and measurement.microbatch_size < size
            for measurement in self.measurements
        )
        group = self.subject.group
        group.size = size
        try:
            measurement = None if full else self._measure(size)
            if group.was_ended():  # whatever came back of a collective that was aborted
                measurement = None
        except Exception as error:
            if not group.is_out_of_memory(error):
                if is_device_failure(error):
                    where = f"at microbatch size {size}, after a first step of it had passed"
                    raise device_failure(where, error, microbatch_size=size) from error
                raise
            measurement = None
        if measurement is None:
            self.subject.model.zero_grad(set_to_none=True)
            release_memory()
            measurement = Measurement(microbatch_size=size, out_of_memory=True)
        self.measurements.append(measurement)

    def _measure(self, size: int) -> Measurement:
        subject, settings = self.subject, self.subject.settings
        subject.group.seed()
        given = subject.example_inputs(size)
        inputs = place(given, settings.torch_device, settings.torch_dtype)
        check_same_inputs(size, inputs, subject.group)
        tracker, structure = self.see(inputs)
        self.tokens_per_sample = tokens_per_sample(inputs, size)
        self._input_elements[size] = [tensor.numel() for tensor in tensors_in(inputs)]
        if len(self._input_elements) == min(2, len(settings.sizes)):
            # once, when a second size shows whether the inputs grow, or none will
            self.notes += note_unscaled_inputs(self._input_elements)
        self._keep_layers(structure.layers, tracker, size)
        self._keep_attention(structure.attention)
        with contextlib.ExitStack() as compiled:
            if settings.compile:
                compiled.enter_context(compile_units(tracker.modules))
                check_step(subject.model, inputs, subject.loss_fn, subject.clock)
                groups = observe_stash(subject, inputs, tracker)
                structure = dataclasses.replace(structure, stash_groups=groups)
            return self.time(size, inputs, tracker, structure)

    def see(self, inputs: Inputs) -> tuple[Tracker, Structure]:
        """The layers at one microbatch size, once a step has shown that it runs."""
        subject = self.subject
        if subject.group.ranks == 1:
            share_gradients(subject.model, subject.settings.blocks)
        check_step(subject.model, inputs, subject.loss_fn, subject.clock)
        if subject.group.ranks > 1:
            # it adds to gradients, for which DTensors then know their layout
            with expect_collectives():
                check_step(subject.model, inputs, subject.loss_fn)
        tracker = self.tracker or track(subject, inputs)
        with no_cast_cache():
            return tracker, observe(subject, inputs, tracker)

    def time(
        self, size: int, inputs: Inputs, tracker: Tracker, structure: Structure
    ) -> Measurement:
        """The measurement of a size: bare and instrumented steps in turn, and the optimizer once.

        In turn, so that a drift of the device affects both.
        """
        subject, settings = self.subject, self.subject.settings
        stepper = Stepper(subject.model, inputs, subject.loss_fn, tracker, subject.clock)
        peak_bytes, steady = _warm_up(stepper, settings.torch_device, subject.group)
        if not steady:
            self.notes += note_unsteady(size)
        usual = STEPS if stepper.last_bare_s <= LONG_STEP_S else STEPS_IF_LONG
        steps = settings.steps or subject.group.agree(usual)
        bare_s, instrumented = list[float](), list[LayerTimes]()
        for step in range(steps):
            settings.report(size, step, steps)
            bare_s.append(stepper.bare())
            instrumented.append(stepper.time_layers())
            self._clock_rate.sample()
        settings.report(size, steps, steps)
        if tracker.varied:
            raise calls_vary(sorted({key.name for key in tracker.varied}))
        if all(measurement.out_of_memory for measurement in self.measurements):
            # once: it is the same at every size
            self.notes += note_missing_backwards(tracker, instrumented)
        # the backward of a compiled layer is one piece: a schedule's runtime would compile two
        parts = [] if settings.compile else stepper.input_parts(INPUT_GRADIENT_STEPS)
        issued = [
            stepper.time_launches() for _ in range(ISSUED_STEPS if subject.clock.queues else 0)
        ]
        if not self._optimizer_tried:
            self._optimizer_s, self._optimizer_tried = self._time_optimizer(stepper), True
        self.uneven |= {layer: tracker.layers[layer].name for layer in stepper.uneven}
        timed = TimedSteps(bare_s, instrumented, parts, issued)
        return summarize(size, structure, timed, self._optimizer_s, peak_bytes)

    def _time_optimizer(self, stepper: Stepper) -> float | None:
        """Seconds of an optimizer step, or None and a note where it fails."""
        try:
            return stepper.optimizer(self.subject.settings.blocks)
        except Exception as error:
            self.notes.append(note_optimizer(error))
        self.subject.model.zero_grad(set_to_none=True)
        release_memory()
        return None

    def _keep_attention(self, kernels: list[str]) -> None:
        """Note the fused kernels of attention. PartoptError where `resumed` ran with others."""
        known = self.resumed.environment.attention if self.resumed else None
        if known is not None and known != kernels:
            what = f"environment.attention is {known} in it and {kernels} here"
            raise _mismatch(what, ["environment.attention"])
        self._environment = replace(self._environment, attention=kernels)

    def _keep_layers(self, layers: list[Layer], tracker: Tracker, size: int) -> None:
        """Keep the layers of the first size. PartoptError where another size has others."""
        if not self.layers:
            if self.resumed is not None:
                _check_same_layers(self.resumed.layers, layers)
            self.layers, self.tracker = layers, tracker
        calls = [[(layer.name, layer.call) for layer in called] for called in (layers, self.layers)]
        if calls[0] != calls[1]:
            first = next(
                measurement for measurement in self.measurements if not measurement.out_of_memory
            )
            raise PartoptError(
                f"at microbatch size {size} the model calls other layers than at "
                f"{first.microbatch_size}",
                "make one module of all that depends on the data, and name it: `units`",
                code="calls-vary",
            )


def profile_of(
    subject: Subject,
    identity: Model,
    resumed: Profile | None = None,
    measurer: type[Measurer] = Measurer,
) -> Profile:
    """The profile of all microbatch sizes; the model is left without gradients.

    Those that `resumed` holds are taken from it. Raises as `partopt.profiler.measure` does.
    """
    with (
        hold_still(subject.settings.torch_device),
        open_compiled(subject) as plain,
        under_autocast(plain) as ready,
    ):
        if resumed is not None:
            _check_same_subject(resumed, identity, ready)
        runner = measurer(ready, resumed)
        sizes, before = ready.settings.sizes, len(runner.measurements)
        try:
            with runner.place():
                for size in sizes:
                    runner.measure(size)
                    if ready.group.exchanges and ready.settings.keep is not None:
                        so_far = _collect(runner, identity)
                        if so_far is not None:
                            ready.settings.keep(so_far)
        except (KeyboardInterrupt, Exception) as stop:
            finished = _collect(runner, identity) if len(runner.measurements) > before else None
            error = stop if isinstance(stop, Exception) else None
            if error and finished is None:
                raise
            raise ProfilingStopped(finished, error) from stop
        finally:
            ready.model.zero_grad(set_to_none=True)
        profile = _collect(runner, identity)
        if profile is not None:
            return profile
        smaller = "a smaller model, or `dtype=bfloat16`"
        raise PartoptError(
            "every microbatch size ran out of memory",
            f"try {smaller if sizes[0] == 1 else 'a smaller size: `microbatch_sizes=[1]`'}",
            ANSWER_IS_NO,
            code="out-of-memory",
        )


def _collect(measurer: Measurer, identity: Model) -> Profile | None:
    """The profile of the sizes measured so far, or None where none was measured whole."""
    if all(measurement.out_of_memory for measurement in measurer.measurements):
        return None
    subject, settings = measurer.subject, measurer.subject.settings
    measurements = sorted(
        measurer.measurements, key=lambda measurement: measurement.microbatch_size
    )
    notes = [
        *measurer.notes,
        *note_uneven_layers([name for _, name in sorted(measurer.uneven.items())]),
        *note_overhead(measurements),
        *note_launch_bound(measurements, measurer.layers),
        *note_throttled(measurer.describe_environment()),
        *note_device(settings, measurer.describe_environment()),
        *note_busy_machine(subject),
    ]
    return Profile(
        model=replace(identity, tokens_per_sample=measurer.tokens_per_sample),
        device=measurer.describe_device(),
        estimated=measurer.describe_estimate(),
        environment=measurer.describe_environment(),
        dtype=settings.dtype,
        autocast=settings.autocast,
        compiled=settings.compile,
        group=Group(ranks=subject.group.ranks) if subject.group.ranks > 1 else None,
        layers=measurer.layers or (measurer.resumed.layers if measurer.resumed else []),
        measurements=measurements,
        # every one once: those of a profile that was gone on with may come again
        notes=[note for index, note in enumerate(notes) if note not in notes[:index]],
    )


def _warm_up(stepper: Stepper, device: torch.device, group: RankGroup) -> tuple[int | None, bool]:
    """Run both kinds of step untimed: the peak memory of a bare one in bytes, whether it is steady.

    The peak, the largest of the ranks, is None where the device does not report it. A device with a
    queue is steady once steps take as long as before; the host is taken to be so.
    """
    on_cuda, peak = device.type == "cuda", None
    if on_cuda:
        release_memory()
        torch.cuda.reset_peak_memory_stats(device)
    steady = not stepper.clock.queues
    for _ in range(WARM_UP_STEPS):
        stepper.bare()
    if not steady:
        steady = _warm_until_steady(stepper, group)
        stepper.clock.calibrate()
    if on_cuda:
        peak = max(group.gather(torch.cuda.max_memory_allocated(device)))
    for _ in range(2 if stepper.clock.queues else 1):  # one learns how long attaching hooks takes
        stepper.time_layers()
    return peak, steady


def _warm_until_steady(stepper: Stepper, group: RankGroup) -> bool:
    """Run bare steps until two windows of them in turn agree; False where none do for too long."""
    window, means, total_s = list[float](), list[float](), 0.0
    while len(means) < 2 or total_s < LONGEST_WARM_UP_S:
        window.append(group.agree(stepper.bare()))  # rank 0's: all take the same number
        total_s += window[-1]
        if sum(window) >= WINDOW_S:
            means.append(statistics.fmean(window))
            window = []
            if len(means) > 1 and abs(means[-1] / means[-2] - 1) < STEADY:
                return True
    return False


# --- going on with a profile that was stopped -----------------------------------------------------


def check_resume(resume: object) -> Profile | None:
    """The profile to go on with. Raises PartoptError where it is none."""
    if resume is not None and not isinstance(resume, Profile):
        what = f"of type {type(resume).__name__}, not a Profile"
        raise invalid("resume", resume, what, "give Profile.load(path), or leave it out")
    return resume


def _check_same_subject(resumed: Profile, model: Model, subject: Subject) -> None:
    """Raise PartoptError, naming every field, unless `resumed` was measured of this and like this.

    Where a model was loaded from is compared without its folder, and not at all where it is not
    known.
    """
    settings = subject.settings
    device = describe_device(settings.torch_device)
    environment = describe_environment(settings.torch_device)
    entries = [Path(entry).name for entry in (resumed.model.entry, model.entry)]
    pairs = {
        "model.entry": entries if all(entries) else ("", ""),
        "model.arguments": (resumed.model.arguments, model.arguments),
        "device.name": (resumed.device.name, device.name),
        "dtype": (resumed.dtype, settings.dtype),
        "autocast": (resumed.autocast, settings.autocast),
        "compiled": (resumed.compiled, settings.compile),
        "group.ranks": (resumed.group_ranks, subject.group.ranks),
        "environment.torch": (resumed.environment.torch, environment.torch),
        "environment.cuda": (resumed.environment.cuda, environment.cuda),
    }
    for name in SETTINGS:
        known = getattr(resumed.environment, name)
        if known is not None:
            pairs[f"environment.{name}"] = known, getattr(environment, name)
    wrong = {
        field: f"{field} is {there!r} in it and {here!r} here"
        for field, (there, here) in pairs.items()
        if there != here
    }
    if wrong:
        raise _mismatch("; ".join(wrong.values()), list(wrong))


def _check_same_layers(resumed: Sequence[Layer], found: Sequence[Layer]) -> None:
    """Raise PartoptError unless the model has the layers of the profile that is gone on with."""
    if len(resumed) != len(found):
        raise _mismatch(f"layers are {len(resumed)} in it and {len(found)} here", ["layers"])
    for index, (there, here) in enumerate(zip(resumed, found, strict=True)):
        for field in ("name", "call", "type", "parameter_bytes"):
            old, new = getattr(there, field), getattr(here, field)
            if old != new:
                path = f"layers[{index}].{field}"
                raise _mismatch(f"{path} is {old!r} in it and {new!r} here", [path])


def _mismatch(what: str, fields: list[str]) -> PartoptError:
    return PartoptError(
        f"`resume`: a profile of something else: {what}",
        "measure as it was measured, or leave out `resume`",
        code="resume-mismatch",
        option="resume",
        mismatched=fields,
    )
