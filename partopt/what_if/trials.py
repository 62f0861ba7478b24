"""Schedules executed on equal stages with given times, beside what their formulas say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from partopt import planners, units
from partopt.documents.plan import Plan
from partopt.documents.profile import (
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
    StashGroup,
)
from partopt.documents.simulation import ClosedForm, DrawnTimeline, Refused, TrialDocument, Tried
from partopt.documents.topology import Device as ClusterDevice
from partopt.documents.topology import Level, Topology
from partopt.errors import PartoptError, invalid
from partopt.job import Job
from partopt.options import CHUNKS, check_count, parse_bytes
from partopt.schedules import ACTION_LIMIT, SCHEDULES, refusal, schedule
from partopt.schedules.entry import Times
from partopt.schedules.placement import CHUNKS as CHUNKS_OF
from partopt.schedules.placement import LOOPED, STRAIGHT
from partopt.simulator.execution import Execution
from partopt.simulator.memory import base_memory_bytes
from partopt.units import format_seconds
from partopt.what_if.document import drawn_timeline, drawn_windows
from partopt.what_if.simulation import Simulation, simulate

# P   devices; v   stages on a device; M   microbatches
# t   times of one stage

STAGES_LIMIT = 1024
_MESSAGE_BYTES = 1000
_SHORTEST_S, _LONGEST_S = 1e-12, 1e6
_ROUNDING = 1e-9


class _Seconds(NamedTuple):
    """Of all that a device does with one microbatch, and of a message."""

    forward: float
    backward: float
    weight_gradient: float
    transfer: float


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """A pipeline of equal devices: `stages` of them, through which `microbatches` pass.

    Times are of all that a device does with one microbatch, seconds or durations such as "5 ms";
    with several stages a device, `chunks` of looped schedules, each stage takes its share. A
    backward takes twice the forward, and `weight_gradient` is the part of it that is for the
    weights, half where it is not given. `transfer` is the time of a message between two devices,
    which they wait for where `facts` of the engine say so, as those of a Job. `activations`
    is what a device keeps of one microbatch, bytes or "1 GB". Raises PartoptError for options that
    are invalid.
    """

    stages: int = 4
    microbatches: int = 8
    forward: float | str = 1.0
    backward: float | str | None = None
    weight_gradient: float | str | None = None
    transfer: float | str = 0.0
    chunks: int | None = None
    activations: int | str = 10**9
    recompute: bool = False
    facts: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "chunks"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.stages > STAGES_LIMIT:
            raise invalid("stages", self.stages, "is too large", f"give {STAGES_LIMIT:,} or less")
        chunks = self.chunks or CHUNKS
        actions = 3 * self.stages * max(chunks, CHUNKS) * self.microbatches
        if actions > ACTION_LIMIT:
            raise PartoptError(
                f"{self.stages} stages and {self.microbatches} microbatches: more than "
                f"{ACTION_LIMIT:,} actions to simulate",
                "give fewer `stages` or `microbatches`",
                code="too-many-actions",
                actions=actions,
                limit=ACTION_LIMIT,
            )
        parse_bytes("activations", self.activations, least=chunks)
        if self.seconds.weight_gradient > self.seconds.backward:
            raise invalid(
                "weight_gradient", self.weight_gradient, "longer than the backward", "give a part"
            )

    @cached_property
    def seconds(self) -> _Seconds:
        """The times in seconds."""
        forward, backward, weights = self.forward, self.backward, self.weight_gradient
        forward_s = _parse("forward", forward)
        backward_s = 2 * forward_s if backward is None else _parse("backward", backward)
        weights_s = (
            backward_s / 2 if weights is None else _parse("weight_gradient", weights, zero=True)
        )
        transfer_s = _parse("transfer", self.transfer, zero=True)
        return _Seconds(forward_s, backward_s, weights_s, transfer_s)

    def chunks_under(self, name: str) -> int:
        """v, the stages that a device holds under the schedule `name`."""
        return CHUNKS_OF.get(schedule(name).shape, self.chunks or CHUNKS)

    def parts_under(self, name: str) -> int:
        """Into how many stages the work of a device is cut under the schedule `name`.

        A stage of a mirrored schedule gets half of the microbatches, and is as long as a device's.
        """
        return schedule(name).stages_a_device(self.chunks_under(name))

    def times_under(self, name: str) -> Times:
        """What the actions of one stage take under the schedule `name`."""
        of, parts = self.seconds, self.parts_under(name)
        weights = of.weight_gradient / parts
        return Times(of.forward / parts, of.backward / parts - weights, weights)

    def plan(self, name: str) -> Plan:
        """The plan of the pipeline under the schedule `name`.

        Raises PartoptError for an unknown schedule, or one that cannot run so.
        """
        entry, parts = schedule(name), self.parts_under(name)
        S, t, transfer_s = self.stages * parts, self.times_under(name), self.seconds.transfer
        fault = refusal(name, self.stages, self.chunks_under(name), self.microbatches)
        if fault is not None:
            # here schedules are named alone, not by an option of a job
            hint = re.sub(r"`schedule=([^`]+)`", r"\1", fault.hint)
            raise PartoptError(fault.message, hint, code=fault.code, **fault.fields)
        size = _MESSAGE_BYTES if transfer_s else 0
        layer = LayerMeasurement(
            forward_s=t.F, backward_s=t.B, backward_input_s=t.I, output_bytes=size
        )
        kept_bytes = parse_bytes("activations", self.activations) // parts
        kept = [StashGroup(layers=[s], bytes=kept_bytes) for s in range(S)]
        profile = Profile(
            model=Model(name="equal stages"),
            device=Device(name="none"),
            dtype="float32",
            layers=[Layer(name=f"stage {s}") for s in range(S)],
            measurements=[Measurement(microbatch_size=1, layers=[layer] * S, stash_groups=kept)],
        )
        rate = _MESSAGE_BYTES / transfer_s if transfer_s else 1.0
        level = Level(name="links", size=self.stages, bandwidth_bytes_per_s=rate)
        job = Job(
            profile,
            Topology(name="equal", device=ClusterDevice(name="device"), levels=[level]),
            schedule=name,
            microbatches=None if entry.asynchronous else self.microbatches,
            chunks=self.chunks if entry.shape == LOOPED else None,
            cuts=list(range(1, S)),
            recompute="always" if self.recompute else "never",
            facts={"in_turn": "none"} | dict(self.facts),  # as papers have it
        )
        return planners.plan("manual", job.problem)


def _parse(option: str, given: float | str, zero: bool = False) -> float:
    """Seconds of a time, a number or a duration."""
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = units.parse_seconds(given)
        except PartoptError as error:
            raise error.at(f"`{option}`") from None
    if seconds == 0 and zero:
        return 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        sign = "0 or more" if zero else "positive"
        raise invalid(option, given, f"must be {sign}", 'write a number, or "5 ms"')
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise invalid(option, given, "is out of range", "give 1e-12 to 1e6 seconds")
    return seconds


@dataclass(frozen=True, eq=False)
class Trial:
    """The schedule `name` on a pipeline of equal stages, executed."""

    name: str
    pipeline: Uniform
    simulation: Simulation

    @cached_property
    def document(self) -> TrialDocument:
        """What it takes, beside what its formulas say, and its timeline."""
        execution = self.simulation.execution
        drawn = drawn_timeline(execution.timeline, drawn_windows(execution))
        return _document(self.pipeline, [self.tried], [], drawn)

    @property
    def tried(self) -> Tried:
        """What it takes, beside what its formulas say."""
        name, pipeline, execution = self.name, self.pipeline, self.simulation.execution
        kept = execution.peak_memory_bytes - base_memory_bytes(execution.plan)
        parts = pipeline.parts_under(name)
        whole = parse_bytes("activations", pipeline.activations) // parts * parts
        return Tried(
            schedule=name,
            asynchronous=schedule(name).asynchronous,
            chunks=pipeline.chunks_under(name),
            waits=execution.plan.waits,
            iteration_s=execution.period_s * pipeline.microbatches,
            bubble=execution.bubble,
            in_flight=execution.peak_in_flight.tolist(),
            activations=[size / whole for size in kept.tolist()],
            closed_form=closed_form(name, pipeline, execution),
            summary=schedule(name).summary,
        )

    def save(self, path: str, force: bool = False) -> None:
        """Write the timeline as `Simulation.save` does."""
        self.simulation.save(path, force)


def try_schedule(name: str, pipeline: Uniform, *, save_as: str | None = None) -> Trial:
    """Execute the schedule `name` on equal stages.

    `save_as` is where the timeline will be saved, if it will. Raises PartoptError for an unknown
    schedule, one that cannot run so, and where there is too much to simulate.
    """
    entry = schedule(name)
    if pipeline.chunks is not None and entry.shape != LOOPED:
        raise PartoptError(
            f"`chunks={pipeline.chunks}`: not for {name}",
            "drop it, or choose interleaved or interleaved-zb",
            code="conflicting-options",
            option="chunks",
        )
    return Trial(name, pipeline, simulate(pipeline.plan(name), save_as=save_as))


def try_schedules(pipeline: Uniform, names: Iterable[str] | None = None) -> TrialDocument:
    """The schedules `names`, by default all, on one pipeline of equal stages.

    Those that cannot run so are named with the reason; `chunks` are for looped ones alone.
    """
    tried: list[Tried] = []
    refused: list[Refused] = []
    for name in SCHEDULES if names is None else names:
        try:
            tried.append(Trial(name, pipeline, simulate(pipeline.plan(name))).tried)
        except PartoptError as error:
            refused.append(Refused(schedule=name, message=error.message, hint=error.hint))
    return _document(pipeline, tried, refused, None)


def _document(
    pipeline: Uniform, tried: list[Tried], refused: list[Refused], timeline: DrawnTimeline | None
) -> TrialDocument:
    seconds = pipeline.seconds
    return TrialDocument(
        stages=pipeline.stages,
        microbatches=pipeline.microbatches,
        forward_s=seconds.forward,
        backward_s=seconds.backward,
        weight_gradient_s=seconds.weight_gradient,
        transfer_s=seconds.transfer,
        recompute=pipeline.recompute,
        tried=tried,
        refused=refused,
        timeline=timeline,
    )


def closed_form(name: str, pipeline: Uniform, execution: Execution) -> ClosedForm:
    """The closed form of the schedule `name`, and whether the execution agrees with it."""
    entry, P, M = schedule(name), pipeline.stages, pipeline.microbatches
    v, t = pipeline.chunks_under(name), pipeline.times_under(name)
    again = t.F if pipeline.recompute else 0.0
    if not entry.recomputes:
        t = t._replace(I=t.I + again)  # as a part of the backward
    bubble_s = float(entry.bubble.of(P, v, M, t))
    iteration_s = entry.makespan(P, v, M, t) + (M * again if entry.recomputes else 0.0)
    if entry.shape == STRAIGHT:
        of = None if entry.asynchronous else M
        held = [entry.counts(p, [1] * P, of).held for p in range(P)]
    else:
        held = [entry.in_flight(p, P, v, M) for p in range(P)]
    agrees = all(
        math.isclose(found, expected, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        for found, expected in zip(
            [execution.bubble, *execution.peak_in_flight.tolist()],
            [bubble_s / iteration_s, *held],
            strict=True,
        )
    )
    reasons = []
    if pipeline.seconds.transfer:
        waited = ", and devices wait for them" if execution.work.serial else ""
        reasons.append(f"messages take {format_seconds(pipeline.seconds.transfer)}{waited}")
    if not entry.bubble.holds(P, v, M, t):
        reasons.append(f"the form holds where {entry.bubble.condition}")
    return ClosedForm(
        formula=entry.bubble.text,
        condition=entry.bubble.condition,
        bubble_s=bubble_s,
        bubble=bubble_s / iteration_s,
        iteration_s=iteration_s,
        in_flight=held,
        agrees=agrees,
        reason="" if agrees else "; ".join(reasons),
    )
