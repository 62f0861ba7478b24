"""What a trainer's layout says, and the options of the job that is planned as it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.exporters import EXPORTERS
from partopt.exporters.blocks import Part
from partopt.exporters.target import Target
from partopt.options import AUTO, Options, invalid
from partopt.schedules import schedule
from partopt.schedules.entry import Schedule
from partopt.schedules.layout import LOOPED, VEE

# S   stages
# P   devices of a pipeline
# v   stages on a device, S = v P
# d   pipelines side by side


@dataclass(frozen=True)
class KnownOrder:
    """What a file with the order of a schedule says: stages and microbatches of a pipeline.

    `warmups` are the forwards that stages do first, None where they are the schedule's usual ones.
    """

    stages: int
    microbatches: int
    warmups: Sequence[int] | None


@dataclass(frozen=True)
class Reading:
    """What a text says: `cuts`, the first layers of all stages but the first, P and the schedule.

    Each is None where the text does not say it, as `order` is where it has none.
    """

    cuts: Sequence[int] | None
    pipeline_size: int | None = None
    schedule: str | None = None
    order: KnownOrder | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutFormat:
    """How a trainer writes a layout: the name of its exporter, a line about it, and an example.

    `read(text, layers, parts)` reads a text on the layers of these names; `parts` say what each of
    them is, where the trainer's cuts ask for it (`partopt.exporters.target.Target`).
    """

    name: str
    summary: str
    example: str
    read: Callable[[str, Sequence[str], Sequence[Part]], Reading]


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """A layout of the trainer `trainer` on the layers of a profile.

    `cuts` are the first layers of all stages but the first, `pipeline_size` is P, None where
    neither the text nor a person says it, `schedule` and `order` those of a text which has them,
    `parts` what each layer is where the trainer tells them apart, `described` that in words, and
    `group_ranks` the ranks of one of its devices.
    """

    trainer: str
    cuts: Sequence[int]
    pipeline_size: int | None
    schedule: str | None
    order: KnownOrder | None
    parts: Sequence[Part]
    described: Sequence[str]
    group_ranks: int

    @property
    def target(self) -> Target:
        """What the trainer can say of a plan."""
        return EXPORTERS[self.trainer]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.cuts) + 1

    def options(
        self, topology: Topology, schedule_name: str | None = None, chunks: int | None = None
    ) -> dict[str, Any]:
        """The options of `Job` with which its plan is this layout, on all devices of `topology`.

        Without a `schedule_name` it is that of the text, or the one that the trainer runs on so
        many stages; `chunks` is v. Raises PartoptError where stages and devices do not match.
        """
        name = schedule_name or self.schedule or self._usual_schedule()
        if self.order and name != self.schedule:
            raise invalid("schedule", name, f"the order is that of {self.schedule}", "leave it out")
        if name == AUTO:
            raise invalid("schedule", name, "a layout is judged under one", "name it: 1f1b")
        entry = schedule(name)
        v = self._stages_a_device(entry, chunks)
        d = self._pipelines(self.stages // v, topology.in_groups(self.group_ranks).devices)
        found: dict[str, Any] = {"schedule": name, "replicas": [d] * self.stages}
        found["cuts"] = list(self.cuts) or None
        if entry.shape == LOOPED:
            found["chunks"] = v
        if self.order:
            found["microbatches"] = self.order.microbatches * d
        return found

    def _usual_schedule(self) -> str:
        """1F1B or interleaved 1F1B where the trainer runs it, else the first that it runs."""
        runs = self.target.schedules
        if runs is None:
            return Options.schedule
        several = self.pipeline_size is not None and self.stages > self.pipeline_size
        usual = "interleaved" if several else "1f1b"
        return usual if usual in runs else next(iter(runs))

    def _stages_a_device(self, entry: Schedule, chunks: int | None) -> int:
        """v under a schedule. PartoptError where the devices of a pipeline contradict it."""
        S, P = self.stages, self.pipeline_size
        own = {LOOPED: chunks, VEE: 2}.get(entry.shape, 1)
        if P is None and own is None:
            raise PartoptError(
                f"`schedule={entry.name}`: {S} stages on an unknown number of devices",
                "say how many a pipeline has: `pipeline_size=4`",
                code="missing-option",
                option="pipeline_size",
            )
        P = P or S // (own or 1)
        if P == 0 or S % P or own not in (None, S // P):
            each = "a multiple of them" if own is None else f"{own} on each"
            raise PartoptError(
                f"{S} stages on {P} devices of a pipeline: {entry.name} puts {each}",
                "choose another `pipeline_size`, or `schedule=interleaved` for several stages on "
                "each device",
                code="stages-not-a-multiple",
                stages=S,
                devices=P,
            )
        return S // P

    def _pipelines(self, P: int, devices: int) -> int:
        """d: as many pipelines as the devices hold, one for a trainer that has no replicas."""
        if devices < P:
            raise PartoptError(
                f"{P} devices needed, {devices} there",
                "choose a larger topology",
                code="too-few-devices",
                devices=devices,
                needed=P,
            )
        if self.target.replicas == "one":
            return 1
        if devices % P:
            raise PartoptError(
                f"{devices} devices are not a multiple of the {P} of a pipeline",
                f"choose a topology of {devices // P * P} devices",
                code="devices-not-a-multiple",
                devices=devices,
                multiple=P,
            )
        return devices // P
