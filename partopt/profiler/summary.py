"""What timed steps come to: medians, and notes on what makes them doubtful."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from partopt.documents import Note
from partopt.documents.profile import Environment, Layer, LayerMeasurement, Measurement
from partopt.profiler.device import is_out_of_memory
from partopt.profiler.layer_choice import name_some
from partopt.profiler.layers import Tracker
from partopt.profiler.observation import Structure
from partopt.profiler.settings import ProfileSettings, Subject
from partopt.profiler.source import describe
from partopt.profiler.step import LayerTimes

IDLE_ABOVE = 0.10  # share of the wall time that the processor may spend elsewhere
# instrumented / bare: above it the layers' times are scaled to the bare step
RESCALE_ABOVE = 1.05
# above it the hooks cost so much that the shares of the layers themselves are in doubt
OVERHEAD_BOUND = 1.20
LAUNCH_BOUND = 0.9  # of a layer's time: the host that takes as long for its launches bounds it
SLIGHT = 0.05  # share of the step below which this is not said
# hooks make no step quicker: below it the two kinds of step met different conditions
UNEVEN_BELOW = 0.95


class TimedSteps(NamedTuple):
    """The steps of a size: seconds of bare ones, and of the layers in instrumented ones.

    `input_parts` are the seconds of every layer in backwards without gradients of weights, `issued`
    those of the host.
    """

    bare_s: Sequence[float]
    instrumented: Sequence[LayerTimes]
    input_parts: Sequence[Sequence[float]] = ()
    issued: Sequence[LayerTimes] = ()


def summarize(
    size: int,
    structure: Structure,
    steps: TimedSteps,
    optimizer_s: float | None,
    peak_bytes: int | None,
) -> Measurement:
    """The measurement of a size: medians of its steps, and what the structure shows.

    A backward without gradients of weights that took longer than the whole, by noise, is cut to it.
    """
    step_s = statistics.median(steps.bare_s)
    overhead = statistics.median(times.step_s for times in steps.instrumented) / step_s
    scale = 1 / overhead if overhead > RESCALE_ABOVE else 1.0  # back to the bare step
    layers = []
    for index in range(len(structure.layers)):
        forward_s = [times.forward_s[index] * scale for times in steps.instrumented]
        backward_s = [times.backward_s[index] * scale for times in steps.instrumented]
        inputs_s = [seconds[index] * scale for seconds in steps.input_parts]
        whole_s = statistics.median(backward_s)
        layers.append(
            LayerMeasurement(
                forward_s=statistics.median(forward_s),
                backward_s=whole_s,
                backward_input_s=min(statistics.median(inputs_s), whole_s) if inputs_s else None,
                forward_stdev_s=statistics.stdev(forward_s) if len(forward_s) > 1 else 0.0,
                backward_stdev_s=statistics.stdev(backward_s) if len(backward_s) > 1 else 0.0,
                forward_host_s=_median(times.forward_s[index] for times in steps.issued),
                backward_host_s=_median(times.backward_s[index] for times in steps.issued),
                output_bytes=structure.output_bytes.get(index, 0),
                transient_bytes=structure.transient_bytes.get(index, 0),
                split_stash_bytes=structure.split_stash_bytes.get(index, 0),
                forward_flops=structure.flops.get(index, 0),
            )
        )
    return Measurement(
        microbatch_size=size,
        step_s=step_s,
        coverage=sum(layer.forward_s + layer.backward_s for layer in layers) / step_s,
        overhead=overhead,
        overhead_bound=overhead > OVERHEAD_BOUND,
        optimizer_s=optimizer_s,
        peak_memory_bytes=peak_bytes,
        layers=layers,
        tensors=structure.tensors,
        stash_groups=structure.stash_groups,
    )


def _median(values: Iterable[float]) -> float | None:
    """The median; None of no values."""
    given = list(values)
    return statistics.median(given) if given else None


def note_launch_bound(
    measurements: Sequence[Measurement], layers: Sequence[Layer]
) -> Iterator[Note]:
    """A note for every size with layers whose launches take the host as long as all of their time.

    Forward and backward are looked at apart; their share is that of the step.
    """
    for measurement in measurements:
        names, bound_s, whole_s = list[str](), 0.0, 0.0
        for layer, found in zip(layers, measurement.layers, strict=False):
            for taken_s, host_s in (
                (found.forward_s, found.forward_host_s),
                (found.backward_s, found.backward_host_s),
            ):
                whole_s += taken_s
                if host_s is not None and 0 < LAUNCH_BOUND * taken_s <= host_s:
                    bound_s += taken_s
                    names.append(layer.name)
        if bound_s > SLIGHT * whole_s:
            share, names = bound_s / whole_s, list(dict.fromkeys(names))
            text = (
                f"microbatch {measurement.microbatch_size}: launch-bound: {share:.0%} of the step: "
                f"the host launches {name_some(names)} no faster than the device works; `compile` "
                "or a larger microbatch"
            )
            fields = {
                "microbatch_size": measurement.microbatch_size,
                "share": share,
                "layers": names,
            }
            yield Note(code="launch-bound", text=text, fields=fields)


def note_unsteady(size: int) -> Iterator[Note]:
    """A note that the steps of a size took more and less time however long it was warmed up."""
    text = f"microbatch {size}: steps did not become steady: does something else use the device?"
    yield Note(code="unsteady", text=text, fields={"microbatch_size": size})


def note_throttled(environment: Environment) -> Iterator[Note]:
    """A note where something lowered the clock rate of the device."""
    if reasons := environment.throttled_by:
        text = f"the clock rate of the device was lowered ({', '.join(reasons)})"
        if environment.sm_clock_hz is not None:
            text += f" to {environment.sm_clock_hz / 1e6:.0f} MHz"
        yield Note(code="throttled", text=text, fields={"reasons": reasons})


def note_device(settings: ProfileSettings, environment: Environment) -> Iterator[Note]:
    """Notes on a GPU that computes no bfloat16 natively, and on one that is a part of another."""
    if settings.torch_device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(settings.torch_device)
    if properties.major < 8 and "bfloat16" in (settings.dtype, settings.autocast):
        text = (
            f"compute capability {properties.major}.{properties.minor} has no units for bfloat16, "
            "which 8.0 brought: products are computed otherwise, and slower; `dtype=float16` has"
        )
        yield Note(code="emulated", text=text)
    if "MIG" in properties.name and environment.sm_clock_hz is None:
        text = "the device is a part of a GPU (MIG), which tells no clock rate: whether one was "
        yield Note(code="no-clock", text=text + "lowered is not known")


def note_busy_machine(subject: Subject) -> Iterator[Note]:
    """A note where something else used the processor during the measurement, or nothing did.

    A rank of a group waits for the others.
    """
    share = subject.clock.idle_share() if subject.group.ranks == 1 else None
    if share is not None and share > IDLE_ABOVE:
        text = (
            f"the model had the processor for {1 - share:.0%} of the time: the times are "
            f"processor time, by wall time a step took {1 / (1 - share):.1f} times as long; "
            "something else was running, or the model waits"
        )
        yield Note(code="busy-machine", text=text, fields={"idle_share": share})


def note_overhead(measurements: Sequence[Measurement]) -> Iterator[Note]:
    """A note for every size whose instrumented steps took clearly more, or less, than bare ones."""
    for measurement in measurements:
        if measurement.overhead is None or UNEVEN_BELOW <= measurement.overhead <= RESCALE_ABOVE:
            continue
        percent = measurement.overhead * 100 - 100
        if percent < 0:
            text = (
                f"steps with hooks took {-percent:.0f} % less time than bare ones: the device's "
                "speed changed meanwhile; measure again, with more `steps`"
            )
        else:
            text = f"the hooks cost {percent:.0f} % of the step: the layers' " + (
                "shares are in doubt; larger units need fewer hooks: `granularity=block`, `units`"
                if measurement.overhead_bound
                else "times are scaled to the bare step"
            )
        yield Note(
            code="uneven-steps" if percent < 0 else "hook-overhead",
            text=f"microbatch {measurement.microbatch_size}: {text}",
            fields={
                "microbatch_size": measurement.microbatch_size,
                "overhead": measurement.overhead,
            },
        )


def note_unscaled_inputs(elements: Mapping[int, Sequence[int]]) -> Iterator[Note]:
    """A note where the inputs do not depend on the microbatch size.

    `elements` holds, for every size measured, the elements of every input tensor. Of a single size,
    which no other shows to matter, one tensor at least must hold a multiple.
    """
    (size, last), *others = sorted(elements.items(), reverse=True)
    if last and (
        any(list(last) == list(other) for _, other in others)
        or (not others and all(count % size for count in last))
    ):
        text = (
            f"example_inputs({size}) does not hold {size} samples: the inputs do not grow with the "
            "microbatch size, and samples/s will be wrong"
        )
        yield Note(code="inputs-ignore-size", text=text, fields={"microbatch_size": size})


def note_missing_backwards(tracker: Tracker, instrumented: Sequence[LayerTimes]) -> Iterator[Note]:
    """A note where layers train but show no separate backward.

    A reentrant checkpoint runs its forward with gradients switched off and makes one node: the
    backward of all layers in it is charged to the first. A layer of whose parameters none has a
    gradient does not train: the loss does not depend on it.
    """
    names = [
        key.name
        for layer, key in enumerate(tracker.layers)
        if (
            layer in tracker.without_graph
            or not any(times.backward_s[layer] for times in instrumented)
        )
        and any(parameter.grad is not None for parameter in tracker.modules[key.name].parameters())
    ]
    yield from _of_layers(
        "no-backward",
        names,
        "no backward of its own is seen, its time is charged to its neighbours; checkpoint with "
        "use_reentrant=False, or choose with `units` a larger unit that holds the checkpoint",
    )


def note_uneven_layers(names: Sequence[str]) -> Iterator[Note]:
    """A note where layers do more in one forward than in another, on the same inputs."""
    yield from _of_layers(
        "runs-at-random",
        names,
        "one forward does more than another, on the same inputs: part of it runs at random, as "
        "under layer drop; times are those of the median step, memory that of one: switch it off "
        "to plan for all of it",
    )


def note_optimizer(error: Exception) -> Note:
    """The note of an optimizer step that failed, and was not timed."""
    full = is_out_of_memory(error)
    reason = "its state does not fit beside the model" if full else f"AdamW {describe(error)}"
    return Note(code="optimizer-not-timed", text=f"the optimizer step was not timed: {reason}")


def _of_layers(code: str, names: Sequence[str], text: str) -> Iterator[Note]:
    """A note about layers, if there are any."""
    if names:
        fields = {"layers": list(names)}
        yield Note(code=code, text=f"{name_some(names)}: {text}", fields=fields)
