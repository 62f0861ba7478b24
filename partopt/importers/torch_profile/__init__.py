"""Times of layers from traces of `torch.profiler`, put into a profile in the place of its own.

A trace says how long the layers took where the model really ran. What it does not know, bytes of
parameters and activations and what crosses between layers, is the profile's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from partopt import documents
from partopt.documents.files import PathLike
from partopt.documents.plan import Plan
from partopt.documents.profile import Device, LayerMeasurement, Measurement, Profile
from partopt.errors import PartoptError
from partopt.importers.times import measurement_of, spread, with_times
from partopt.importers.torch_profile.passes import Tally, layer_passes, stage_passes
from partopt.importers.torch_profile.ranges import no_layers
from partopt.importers.torch_profile.trace import ON_DEVICE, Trace, load

_OUTSIDE = 0.05  # of the compute: noted where more of it is in no layer


def import_times(
    paths: Sequence[PathLike],
    onto: Profile,
    *,
    plan: Plan | None = None,
    microbatch_size: int | None = None,
    device: str | None = None,
) -> Profile:
    """The profile `onto` at one microbatch size, its times replaced by those of the traces.

    Each of `paths` is the trace of one process. With `plan` the traces hold the actions of its
    stages (`PP:0F0`): each stage's time is spread over its layers as it is in `onto`. Without it
    they hold ranges of the layers, by name or as modules. Times are medians over the passes, the
    first of three or more steps left out. `microbatch_size` is what ran, by default that of the
    plan, or the only one of the profile. Raises PartoptError for what is not a trace, and where
    layers or stages are missing.
    """
    measured = _measurement(onto, microbatch_size or (plan.microbatch_size if plan else None))
    traces = [load(path) for path in paths]
    tally = Tally.together(
        stage_passes(trace) if plan else layer_passes(trace, onto) for trace in traces
    )
    timed = _spread(tally, plan, measured) if plan else _timed(tally, onto, measured)
    wheres = [trace.where for trace in traces]
    optimizer_s = _median(tally.optimizer) if tally.optimizer else None
    notes = _notes(tally, wheres, onto)
    profile = with_times(onto, measured, timed, optimizer_s, _device(traces, device), notes)
    documents.refuse(profile.faults(), ", ".join(wheres))
    return profile


def _measurement(onto: Profile, microbatch_size: int | None) -> Measurement:
    """What the profile measured at the size that ran."""
    sizes = [each.microbatch_size for each in onto.measured()]
    if microbatch_size is None and len(sizes) > 1:
        raise PartoptError(
            f"the trace does not say its microbatch size, and {onto.model.name} has "
            f"{', '.join(map(str, sizes))}",
            "say what ran with `microbatch_size`",
            code="missing-option",
            option="microbatch_size",
        )
    return measurement_of(onto, microbatch_size or sizes[0])


def _timed(tally: Tally, onto: Profile, measured: Measurement) -> list[LayerMeasurement]:
    """The layers with the times of their ranges, less what a backward computes a second time."""
    forward, backward = (tally.seconds.get(kind, {}) for kind in "FB")
    missing = [layer.name for index, layer in enumerate(onto.layers) if not forward.get(index)]
    if missing:
        raise no_layers(missing)
    found = []
    for index, layer in enumerate(measured.layers):
        again = _median(forward[index]) if index in tally.again else 0.0
        found.append(
            replace(
                layer,
                forward_s=_median(forward[index]),
                backward_s=max(_median(backward[index]) - again, 0.0),
                backward_input_s=None,
                forward_stdev_s=_stdev(forward[index]),
                backward_stdev_s=_stdev(backward[index]),
            )
        )
    return found


def _spread(tally: Tally, plan: Plan, measured: Measurement) -> list[LayerMeasurement]:
    """The layers with the times of their stages, in proportion to what they took before."""
    if plan.stages[-1].stop != len(measured.layers):
        raise PartoptError(
            f"the plan has {plan.stages[-1].stop} layers, the profile {len(measured.layers)}",
            "give the plan that ran, and the profile that it was made from",
            code="plan-of-another-profile",
        )
    found: list[LayerMeasurement] = []
    stages = set().union(*tally.seconds.values())
    if stages != set(range(len(plan.stages))):
        raise _other_stages(stages, len(plan.stages))
    for number, stage in enumerate(plan.stages):
        forward, backward, weight = _stage_seconds(tally, number)
        backward = max(backward - forward, 0.0) if stage.recompute else backward
        found += spread(measured.layers[stage.start : stage.stop], forward, backward, weight)
    return found


def _other_stages(found: set[int], planned: int) -> PartoptError:
    missing = ", ".join(str(stage) for stage in sorted(set(range(planned)) - found))
    unknown = ", ".join(str(stage) for stage in sorted(found - set(range(planned))))
    what = f"no action of stage {missing}" if missing else f"the plan has no stage {unknown}"
    return PartoptError(
        f"of the plan's {planned} stages the traces have others: {what}",
        "give the traces of all ranks, and the plan that ran",
        code="stages-not-in-trace",
    )


def _stage_seconds(tally: Tally, stage: int) -> tuple[float, float, float | None]:
    """Median forward and backward of a stage, and of the latter the part for the weights.

    That is known where the trace has the two parts of a backward, which are added up.
    """
    median = {
        kind: _median(passes[stage]) for kind, passes in tally.seconds.items() if stage in passes
    }
    if "F" not in median or not ("B" in median or {"I", "W"} <= median.keys()):
        raise PartoptError(
            f"stage {stage}: the traces have no whole pass of it",
            "record whole training steps, forward and backward",
            code="no-backward-in-trace",
        )
    if "B" in median:
        return median["F"], median["B"], None
    return median["F"], median["I"] + median["W"], median["W"]


def _median(passes: list[float]) -> float:
    return statistics.median(passes)


def _stdev(passes: list[float]) -> float:
    return statistics.stdev(passes) if len(passes) > 1 else 0.0


def _device(traces: list[Trace], name: str | None) -> Device:
    """The device that computed: a GPU where there are kernels."""
    on_device = any(True for trace in traces for _ in trace.of(*ON_DEVICE))
    known = next((each for trace in traces for each in trace.devices), None)
    if not on_device:
        return Device(name=name or "CPU of a trace", type="cpu")
    if known is None:
        return Device(name=name or "GPU of a trace", type="cuda")
    return Device(name=name or known.name, type="cuda", memory_bytes=known.memory_bytes)


def _notes(tally: Tally, wheres: list[str], onto: Profile) -> list[documents.Note]:
    """Where the times are from, what was left out, and what is in no layer."""
    passes = [len(each) for each in tally.seconds["F"].values()]
    text = (
        f"times are medians of {min(passes)} passes in {', '.join(wheres)}"
        + (", the first step left out" if tally.left_out else "")
        + f"; bytes are those of {onto.model.name} on {onto.device.name}"
    )
    notes = [documents.Note(code="times-of-a-trace", text=text, fields={"traces": wheres})]
    share = tally.outside_s / tally.computed_s if tally.computed_s else 0.0
    if share > _OUTSIDE:
        text = f"{share:.0%} of what the traces computed is in no layer and not counted"
        notes.append(documents.Note(code="outside-layers", text=text, fields={"share": share}))
    if tally.again:
        text = f"{len(tally.again)} layers are recomputed in the backward: their forward is not"
        notes.append(documents.Note(code="recomputed", text=f"{text} counted twice"))
    return notes
