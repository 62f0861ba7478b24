"""A trainer's layout: what a configuration says, and the options of the job planned as it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from partopt.configurations.settings import read_settings
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError, invalid, unknown
from partopt.options import AUTO, MOST, Options
from partopt.schedules import schedule
from partopt.schedules.entry import Schedule
from partopt.schedules.placement import LOOPED
from partopt.trainers import TRAINERS, parts_of, readers
from partopt.trainers.parts import Part, block_bounds, describe
from partopt.trainers.trainer import Asked, Stated, Trainer

# S   stages
# P   devices of a pipeline
# v   stages on a device, S = v P
# d   pipelines side by side


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """What a configuration of `trainer` says, on the layers of a profile.

    `cuts` are the first layers of all stages but the first, `pipeline_size` is P, None where
    neither the text nor a person says it, `stated` is what else the text says, `parts` what a
    layer is where the trainer tells them apart, `described` that in words, and `group_ranks` the
    ranks of one of its devices.
    """

    trainer: Trainer
    cuts: Sequence[int]
    pipeline_size: int | None
    stated: Stated
    parts: Sequence[Part]
    described: Sequence[str]
    group_ranks: int
    # options that a text may state, and that plans which are compared have in common
    conditions: ClassVar = ("microbatch_size", "microbatches", "global_batch", "recompute", "shard")

    @property
    def stages(self) -> int:
        """S."""
        return len(self.cuts) + 1

    def options(
        self, topology: Topology, schedule_name: str | None = None, chunks: int | None = None
    ) -> dict[str, Any]:
        """The options of `Job` with which its plan is this layout, on all devices of `topology`.

        Without a `schedule_name` it is that of the text, or the one that the trainer runs on so
        many stages; `chunks` is v. With them are those of `conditions` that the text says. Raises
        PartoptError where stages and devices do not match.
        """
        said, layout = self.stated, self.stated.layout
        name = schedule_name or layout.schedule or self._usual_schedule()
        if said.stages and name != layout.schedule:
            raise invalid(
                "schedule", name, f"the order is that of {layout.schedule}", "leave it out"
            )
        if name == AUTO:
            in_file = "its order is in a file, which names none"
            what = "a layout is judged under one" if schedule_name else in_file
            raise invalid("schedule", name, what, "name it: `schedule=1f1b`")
        entry = schedule(name)
        v = self._stages_a_device(entry, chunks)
        d = self._pipelines(self.stages // v, topology.in_groups(self.group_ranks).devices)
        found: dict[str, Any] = {"trainer": self.trainer.name, "engine": self.trainer.engine}
        found |= {"schedule": name, "replicas": [d] * self.stages}
        found["cuts"] = list(self.cuts) or None
        if entry.shape == LOOPED:
            found["chunks"] = v
        if self.parts and self.trainer.engine.recomputes_blocks:
            found["block_bounds"] = block_bounds(self.parts)
        options: dict[str, Any] = {
            "microbatch_size": layout.microbatch,
            "recompute": layout.recompute,
            "shard": layout.shard,
        }
        if not entry.asynchronous:  # which has no iterations
            options["microbatches"] = said.microbatches and said.microbatches * d
            options["global_batch"] = said.batch
        return found | {option: value for option, value in options.items() if value is not None}

    def _usual_schedule(self) -> str:
        """1F1B or interleaved 1F1B where the trainer runs it, else the first that it runs."""
        runs = self.trainer.schedules
        if runs is None:
            return Options.schedule
        several = self.pipeline_size is not None and self.stages > self.pipeline_size
        usual = "interleaved" if several else "1f1b"
        return usual if usual in runs else next(iter(runs))

    def _stages_a_device(self, entry: Schedule, chunks: int | None) -> int:
        """v under a schedule. PartoptError where the devices of a pipeline contradict it."""
        S, P = self.stages, self.pipeline_size
        v = chunks if entry.shape == LOOPED else entry.stages_a_device(1)
        if P is None and v is None:
            what = f"{S} stages on an unknown number of devices"
            hint = "say how many a pipeline has: `pipeline_size=4`"
            raise invalid("schedule", entry.name, what, hint)
        P = P or S // (v or 1)
        if P == 0 or S % P or v not in (None, S // P):
            what = "a multiple of them" if v is None else f"{v} on each"
            raise PartoptError(
                f"{S} stages on {P} devices of a pipeline: {entry.name} puts {what}",
                "choose another `pipeline_size`, or `schedule=interleaved` for several stages on "
                "each device",
                code="stages-not-a-multiple",
            )
        return S // P

    def _pipelines(self, P: int, devices: int) -> int:
        """d: as many pipelines as the devices hold, one for a trainer that has no replicas."""
        if devices < P:
            raise PartoptError(
                f"{P} devices needed, {devices} there",
                "choose a larger topology",
                code="too-few-devices",
            )
        if self.trainer.says.replicas == "one":
            return 1
        if devices % P:
            raise PartoptError(
                f"{devices} devices are not a multiple of the {P} of a pipeline",
                f"choose a topology of {devices // P * P} devices",
                code="devices-not-a-multiple",
            )
        return devices // P


def read_layout(
    trainer: str,
    text: str,
    profile: Profile,
    *,
    rules: Sequence[str] = (),
    cuts: Sequence[int] | None = None,
    pipeline_size: int | None = None,
) -> TrainerLayout:
    """The layout of the trainer `trainer`, a name from `readers()`, on the layers of `profile`.

    `text` is the layout itself, as `Et*4|t*3|t*3|t*2L`, or a program or script that has it, which
    is not executed. `rules` are `GLOB=KIND` and say which layers are of which of `LAYER_KINDS`,
    where names do not; `cuts` are those of a text that has an order alone; `pipeline_size` is
    how many devices a pipeline has, where these hold several stages.

    Raises PartoptError for an unknown trainer, a text that cannot be read, one for other layers,
    and options that contradict it.
    """
    reader = TRAINERS.lookup(trainer)
    if reader.read is None:
        what = f"{trainer} has no layout to read"
        raise unknown(what, trainer, readers(), code="unknown-trainer")
    if pipeline_size is not None and not 1 <= pipeline_size <= MOST:
        raise invalid("pipeline_size", pipeline_size, "must be a number of devices", "give 1..")
    layers = [layer.name for layer in profile.layers]
    parts = parts_of(layers, reader, rules)
    stated = reader.read(read_settings(text), Asked(layers, parts))
    said, tp = stated.layout.pp, stated.layout.tp
    if None not in (said, pipeline_size) and said != pipeline_size:
        what = f"the layout itself says {said}"
        raise invalid("pipeline_size", pipeline_size, what, "leave it out")
    if tp not in (None, profile.group_ranks):
        raise PartoptError(
            f"the layout has groups of {tp} tensor parallel ranks, the profile of "
            f"{profile.group_ranks}",
            "give a profile of such a group: `partopt profile` measures or estimates one",
            code="other-group",
        )
    return TrainerLayout(
        trainer=reader,
        cuts=_cuts_of(trainer, stated, cuts),
        pipeline_size=pipeline_size if said is None else said,
        stated=stated,
        parts=parts,
        described=list(describe(layers, parts)),
        group_ranks=profile.group_ranks,
    )


def _cuts_of(trainer: str, stated: Stated, cuts: Sequence[int] | None) -> Sequence[int]:
    """The cuts that are stated, or those that a person gives where it has none."""
    if stated.cuts is not None:
        if cuts is None:
            return stated.cuts
        what = f"a layout of {trainer} itself says where stages begin"
        raise invalid("cuts", list(cuts), what, "leave them out")
    stages = stated.stages or 1
    if cuts is None or len(cuts) + 1 != stages:
        raise PartoptError(
            f"the order is of {stages} stages, and does not say where they begin",
            f"give the {stages - 1} first layers of all but the first: `cuts=[5, 9]`",
            code="missing-option" if cuts is None else "wrong-length",
            option="cuts",
        )
    return list(cuts)
