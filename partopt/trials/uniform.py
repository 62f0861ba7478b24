"""A pipeline of equal stages with times of one's own, and its plan under a schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from partopt.documents.topology import Device as ClusterDevice
from partopt.documents.topology import Level, Topology
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import CHUNKS, check_count, invalid, parse_bytes
from partopt.schedules import ACTION_LIMIT, refusal, schedule
from partopt.schedules.entry import Times
from partopt.schedules.layout import CHUNKS as CHUNKS_OF
from partopt.schedules.layout import LOOPED, MIRRORED

# P   devices; v   stages on a device

STAGES_LIMIT = 1024
_MESSAGE_BYTES = 1000
_SHORTEST_S, _LONGEST_S = 1e-12, 1e6


class _Seconds(NamedTuple):
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

    @property
    def seconds(self) -> _Seconds:
        """The times in seconds."""
        forward = _seconds("forward", self.forward)
        backward = 2 * forward if self.backward is None else _seconds("backward", self.backward)
        weights = (
            backward / 2
            if self.weight_gradient is None
            else _seconds("weight_gradient", self.weight_gradient, zero=True)
        )
        return _Seconds(forward, backward, weights, _seconds("transfer", self.transfer, zero=True))

    def chunks_under(self, name: str) -> int:
        """v, the stages that a device holds under the schedule `name`."""
        return CHUNKS_OF.get(schedule(name).shape, self.chunks or CHUNKS)

    def stage_times(self, name: str) -> Times:
        """What the actions of one stage take under the schedule `name`.

        A stage of a mirrored schedule gets half of the microbatches, and is as long as a device's.
        """
        of, parts = self.seconds, self.parts_under(name)
        weights = of.weight_gradient / parts
        return Times(of.forward / parts, of.backward / parts - weights, weights)

    def stage_activations(self, name: str) -> int:
        """Bytes that one stage keeps of a microbatch under the schedule `name`."""
        return parse_bytes("activations", self.activations) // self.parts_under(name)

    def plan(self, name: str) -> Plan:
        """The plan of the pipeline under the schedule `name`.

        Raises PartoptError for an unknown schedule, or one that cannot run so.
        """
        entry, S = schedule(name), self.stages * self.parts_under(name)
        fault = refusal(name, self.stages, self.chunks_under(name), self.microbatches)
        if fault is not None:
            # here schedules are named alone, not by an option of a job
            hint = re.sub(r"`schedule=([^`]+)`", r"\1", fault.hint)
            raise PartoptError(fault.message, hint, code=fault.code, **fault.fields)
        job = Job(
            self._profile(S, self.stage_times(name), self.stage_activations(name)),
            self._topology(),
            schedule=name,
            microbatches=None if entry.asynchronous else self.microbatches,
            chunks=self.chunks if entry.shape == LOOPED else None,
            cuts=list(range(1, S)),
            recompute="always" if self.recompute else "never",
            facts=self.facts,
        )
        return planners.plan("manual", job.problem)

    def parts_under(self, name: str) -> int:
        """Into how many stages the work of a device is cut under the schedule `name`."""
        return 1 if schedule(name).shape == MIRRORED else self.chunks_under(name)

    def _profile(self, layers: int, t: Times, stash: int) -> Profile:
        size = _MESSAGE_BYTES if self.seconds.transfer else 0
        each = LayerMeasurement(
            forward_s=t.F, backward_s=t.B, backward_input_s=t.I, output_bytes=size
        )
        kept = [StashGroup(layers=[s], bytes=stash) for s in range(layers)]
        return Profile(
            model=Model(name="equal stages"),
            device=Device(name="none"),
            dtype="float32",
            layers=[Layer(name=f"stage {s}") for s in range(layers)],
            measurements=[
                Measurement(microbatch_size=1, layers=[each] * layers, stash_groups=kept)
            ],
        )

    def _topology(self) -> Topology:
        seconds = self.seconds.transfer
        rate = _MESSAGE_BYTES / seconds if seconds else 1.0
        level = Level(name="links", size=self.stages, bandwidth_bytes_per_s=rate)
        return Topology(name="equal", device=ClusterDevice(name="device"), levels=[level])


def _seconds(option: str, given: float | str, zero: bool = False) -> float:
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
