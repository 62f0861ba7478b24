"""A transformer's layout as its trainer runs it: the closed form, and the plan that is simulated.

A layout becomes an ordinary plan, of a profile that was computed for it: whatever takes plans takes
it, and `partopt show --verify` makes it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import UNSET, structs

from partopt import planners
from partopt.configurations.settings import read_settings
from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan, needed_bytes
from partopt.documents.profile import Profile
from partopt.documents.stage import Reserve
from partopt.documents.topology import Topology
from partopt.documents.transformer import (
    BITS,
    Calibration,
    Format,
    LayoutBeside,
    Modelled,
    Practice,
    Transformer,
)
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO, MANUAL, invalid, parse_bytes
from partopt.simulator.execution import simulate_plan
from partopt.trainer_plans.calibration import calibrate
from partopt.trainers import TRAINERS, export_plan
from partopt.trainers.others import refuse_others
from partopt.trainers.trainer import Trainer
from partopt.transformer.as_profile import profile_of, rates_of
from partopt.transformer.block import Training
from partopt.transformer.iteration import (
    FSDP_STATE,
    Degrees,
    Estimate,
    estimate,
    find_faults,
    stage_counts,
)
from partopt.transformer.layouts import Found, find_layouts, shard_of
from partopt.transformer.rates import PLANNED

# settings of a configuration that stand for parts of the question
_SEQUENCE, _BATCH = ("seq_length", "seq_len"), ("global_batch_size",)

# layouts that are simulated, the fastest that differ: some, and as many as may yet be the fastest
JUDGED, MOST_JUDGED = 4, 16
USUALLY = 0.99  # of the closed form a simulation takes that or more; or of what others do
_SWITCHES = ("sequence-parallel", "allreduce", "waits", "ends")  # facts that a flag alone changes
_NEEDING = ("tp-overlap", "exchange-overlap")  # those that not every layout can have
_SCHEDULES = ("1f1b", "interleaved")  # of a stage a device, and of several: chunks
_LETTERS = 40  # of a setting that is shown
_SHOWN, _LACKING = 9, 3  # layouts beside a plan: that fit, and that need least of those that do not


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A simulated plan, the profile that was computed for it, and the closed form beside it."""

    plan: Plan
    profile: Profile
    estimate: Estimate
    training: Training

    @property
    def seconds(self) -> float:
        """Of an iteration, simulated."""
        return self.plan.predicted.iteration_s or self.plan.predicted.period_s

    def with_about(self, **found: Any) -> Laid:
        """The same, with what else was `found` in its plan."""
        assert self.plan.transformer
        about = structs.replace(self.plan.transformer, **found)
        return dataclasses.replace(self, plan=structs.replace(self.plan, transformer=about))


@dataclass(frozen=True, kw_only=True)
class Laying:
    """The question: a transformer, on a cluster, as a trainer runs it in a layout.

    `global_batch` is in samples of `sequence` tokens; `facts` replace some of the trainer's, as
    `with_facts` and its `choices` name them; `memory` is the limit of a device, by default
    `PLANNED` of what its name says. Of a `measured` block the closed form takes the times that were
    measured, of its profile or as a plan has them. PartoptError for what the trainer, the device or
    the model does not have, and where the measured block is of another.
    """

    model: Transformer
    topology: Topology
    trainer: str
    global_batch: int
    sequence: int
    format: Format = "bfloat16"
    layout: Layout = dataclasses.field(default_factory=Layout)
    facts: Mapping[str, object]
    memory: str | int | None = None
    measured: Profile | Calibration | None = None

    @property
    def training(self) -> Training:
        """All that seconds and bytes follow from, beside the layout."""
        trainer, again = TRAINERS.lookup(self.trainer), self.layout.recompute
        if isinstance(again, int) and not self.recomputes_partly:
            what, hint = f"{self.trainer} makes all blocks again or none", "write recompute=always"
            raise invalid("layout", f"recompute={again}", what, hint)
        if self.format not in trainer.says.formats:
            what = f"{self.trainer} trains in {', '.join(trainer.says.formats)}"
            raise invalid("dtype", self.format, what, "choose one of these")
        practice, engine = _run_with(trainer, self.facts)
        return Training(
            model=self.model,
            sequence=self.sequence,
            format=self.format,
            practice=practice,
            engine=engine,
            rates=rates_of(self.topology),
            calibration=self.calibration,
            repeats_keys=trainer.says.repeats_keys,
            parts_ties=trainer.says.ties,
        )

    @property
    def calibration(self) -> Calibration | None:
        """What was measured of a block."""
        if self.measured is None or isinstance(self.measured, Calibration):
            return self.measured
        return calibrate(self.measured, self.model, self.sequence, self.format, self.topology)

    @property
    def recomputes_partly(self) -> bool:
        """Whether the trainer can make some blocks of a stage again, the first."""
        return TRAINERS.lookup(self.trainer).says.recomputed == "first"

    @property
    def fixed(self) -> Layout:
        """The parts of the layout that are fixed; what the trainer does not have is 1.

        PartoptError where more of it is asked for.
        """
        trainer, layout = TRAINERS.lookup(self.trainer), self.layout
        lacking = [name for name in ("tp", "cp", "ep") if name not in trainer.says.degrees]
        runs = [name for name in _SCHEDULES if name in (trainer.schedules or _SCHEDULES)]
        lacking += ["chunks"] * ("interleaved" not in runs)
        for name in lacking:
            if (getattr(layout, name) or 1) > 1:
                what, hint = f"{self.trainer} has no such part of a layout", f"leave {name} out"
                raise invalid("layout", f"{name}={getattr(layout, name)}", what, hint)
        if layout.schedule not in (None, AUTO, *runs):
            what = f"transformers are planned under {' and '.join(runs)} of {self.trainer}"
            raise invalid("layout", f"schedule={layout.schedule}", what, "leave schedule out")
        chosen = [name for name in ("recompute", "schedule") if getattr(layout, name) == AUTO]
        return structs.replace(layout, **dict.fromkeys(lacking, 1), **dict.fromkeys(chosen))

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that a device may need."""
        if self.memory is not None:
            return parse_bytes("memory", self.memory)
        device_bytes = self.topology.device.memory_bytes
        return None if device_bytes is None else round(PLANNED * device_bytes)

    def fill(self, training: Training) -> Layout:
        """The layout with all its parts: what is left open is 1, and devices that are left share.

        PartoptError where it does not lie on the devices, or the model or the batch cannot.
        """
        given, devices = self.fixed, self.topology.cluster.devices
        degrees = {name: getattr(given, name) or 1 for name in ("tp", "cp", "ep", "pp", "chunks")}
        pipeline = degrees["tp"] * degrees["cp"] * degrees["pp"]
        dp = given.dp or max(1, devices // pipeline)
        if dp * pipeline != devices:
            raise invalid(
                "layout",
                ",".join(f"{name}={degrees[name]}" for name in ("tp", "cp", "pp")) + f",dp={dp}",
                f"tp x cp x pp x dp are {dp * pipeline} devices, and the cluster has {devices}",
                "use all devices; ep lies within tp x cp x dp",
            )
        full = structs.replace(
            given,
            **degrees,
            dp=dp,
            microbatch=given.microbatch or 1,
            recompute=given.recompute or "never",
            shard=given.shard or shard_of(training, degrees["pp"]),
            schedule=given.schedule or _SCHEDULES[degrees["chunks"] > 1],
        )
        faults = list(find_faults(training, full, self.global_batch))
        if faults:
            raise PartoptError.together(faults)
        return full


def _run_with(trainer: Trainer, facts: Mapping[str, object]) -> tuple[Practice, Engine]:
    """As `Trainer.run_with`; PartoptError for one of which it is not known, too."""
    if trainer.practice is None:
        able = [name for name, other in TRAINERS.items() if other.practice is not None]
        raise PartoptError(
            f"how {trainer.name} runs a transformer is not known",
            f"choose {', '.join(able)}; or give a profile",
            code="target-cannot-say",
            target=trainer.name,
        )
    return trainer.run_with(facts)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The best layout's plan, with others beside it, and all that was `found`."""

    best: Laid
    found: Found


def choose(asked: Laying, progress: Progress = ignore_progress) -> Chosen:
    """The best of the layouts that have the parts that are asked for, by simulation.

    All are estimated in closed form; those of the first `JUDGED` that differ and come within `NEAR`
    of the fastest are simulated, and the best of these with its blocks cut freely, which is shown.
    Where none fits, the plan is of the layout that needs least. Raises PartoptError where there is
    none. Interrupted carries the best until then, a plan as of a question that fixes its layout.
    """
    training, devices = asked.training, asked.topology.cluster.devices
    progress("estimating layouts", 0, 1)
    limit, partly = asked.limit_bytes or math.inf, asked.recomputes_partly
    found = find_layouts(training, devices, asked.global_batch, limit, asked.fixed, partly)
    if found.least is None:
        raise _no_layout(asked, training)
    if not found.fitting:
        return Chosen(best=lay_as(asked, training, found.least.layout), found=found)
    laid, shortest = list[Laid](), USUALLY
    near = differing(found.fitting, MOST_JUDGED, ["microbatch"])

    def until_then(_: object) -> Chosen | None:
        if not laid:
            return None
        best = min(laid, key=_order)
        return Chosen(best=best.with_about(asked=best.estimate.layout), found=found)

    with found_until_then(until_then):
        for done, candidate in enumerate(near):
            fit = [simulated.seconds for simulated in laid if simulated.plan.fits]
            if done >= JUDGED and fit and candidate.seconds * shortest > min(fit):
                break
            progress("simulating layouts", done, len(near))
            laid.append(lay_as(asked, training, candidate.layout))
            shortest = min(shortest, USUALLY * laid[-1].seconds / candidate.seconds)
        laid.sort(key=_order)
        best = _cut_freely(asked, laid[0])
        best = best.with_about(tried=found.tried, beside=_others(best, laid[1:], found))
        for done, candidate in enumerate(found.left_out[:MOST_JUDGED]):
            progress("simulating layouts that are left out", done, MOST_JUDGED)
            left = lay_as(asked, training, candidate.layout)
            if left.plan.fits and left.seconds < best.seconds:
                best = best.with_about(left_out=_beside(candidate, best, left, True))
                break
    return Chosen(best=best, found=found)


def _order(laid: Laid) -> tuple[bool, float]:
    """Those that fit first, and of them the fastest."""
    return not laid.plan.fits, laid.seconds


def _no_layout(asked: Laying, training: Training) -> PartoptError:
    """Why there is no layout: the faults of parts that are fixed, or that none has all of them."""
    why, devices = "", asked.topology.cluster.devices
    try:
        asked.fill(training)
    except PartoptError as error:
        parts = {str(fault.fields.get("part", "layout")) for fault in error.parts}
        if all(getattr(asked.layout, part, asked) is not None for part in parts):
            return error
        why = f"; with what is open at 1, {error.parts[0].message}"
    return PartoptError(
        f"{asked.trainer} has no such layout of {asked.model.name} on {devices} devices{why}",
        "fix less of `layout`, or give another batch",
        ANSWER_IS_NO,
        code="no-plan",
    )


def _cut_freely(asked: Laying, laid: Laid) -> Laid:
    """The plan, which says what blocks that are cut freely take where that is less."""
    ways = TRAINERS.lookup(asked.trainer).choices.get("ends", {})
    if "free" not in ways or "ends" in asked.facts or not laid.plan.fits:
        return laid
    layout, batch = laid.estimate.layout, asked.global_batch
    practice = structs.replace(laid.training.practice, **ways["free"])
    training = dataclasses.replace(laid.training, practice=practice)
    counts, same = (
        stage_counts(work, Degrees.of(work, layout, batch)) for work in (training, laid.training)
    )
    if counts == same or any(find_faults(training, layout, batch)):
        return laid
    freely = lay_as(asked, training, layout)
    if not freely.plan.fits or freely.seconds >= laid.seconds:
        return laid
    return laid.with_about(freely_s=freely.seconds)


def _others(to: Laid, simulated: Sequence[Laid], found: Found) -> list[LayoutBeside]:
    """The layouts beside one of those that were `found`: that fit, then that do not."""
    known = {laid.estimate.layout: laid for laid in simulated}
    ranked = [
        to.estimate,
        *(candidate for candidate in found.fitting if candidate.layout != to.estimate.layout),
    ]
    faster = [candidate for candidate in found.lacking if candidate.seconds < to.seconds]
    fitting, lacking = differing(ranked, 1 + _SHOWN)[1:], differing(faster, _LACKING)
    rows = [_beside(candidate, to, known.get(candidate.layout), True) for candidate in fitting]
    rows.sort(key=lambda row: row.iteration_s)
    return rows + [_beside(candidate, to, None, False) for candidate in lacking]


def _beside(candidate: Estimate, to: Laid, simulated: Laid | None, fits: bool) -> LayoutBeside:
    """A layout beside another, `to`; its seconds are those that were `simulated`, if they were."""
    way = 1 if candidate.seconds >= to.estimate.seconds else -1
    names = dict.fromkeys([*candidate.parts, *to.estimate.parts])
    more = {
        name: candidate.parts.get(name, 0.0) - to.estimate.parts.get(name, 0.0) for name in names
    }
    part = max(more, key=lambda name: way * more[name])
    counted = round(candidate.memory_bytes)
    return LayoutBeside(
        layout=candidate.layout,
        iteration_s=simulated.seconds if simulated is not None else candidate.seconds,
        simulated=simulated is not None,
        memory_bytes=counted if simulated is None else needed_bytes(simulated.plan),
        fits=fits,
        part=part,
        part_s=more[part],
    )


def read_configuration(
    trainer: str,
    text: str,
    topology: Topology,
    arguments: Mapping[str, str] | None = None,
    *,
    function: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    format: Format | None = None,
    layout: Layout | None = None,
    facts: Mapping[str, object] | None = None,
    memory: str | int | None = None,
) -> tuple[Laying, Sequence[str]]:
    """The question that a trainer's configuration answers on a cluster, and notes on the reading.

    `text` is a script, a program or a document, which is not executed; `arguments` are values of
    its variables and of settings, `function` the one that makes the configuration; what else is
    given goes before what the text says. Raises PartoptError with all that is missing, and for what
    is not planned.
    """
    reader = TRAINERS.lookup(trainer)
    if reader.read_training is None:
        able = [name for name, other in TRAINERS.items() if other.read_training is not None]
        raise PartoptError(
            f"{trainer}: its configurations do not say a transformer's shape",
            f"give a profile; or choose {', '.join(able)}",
            code="missing-option",
            option="profile",
        )
    values = dict(arguments or {})
    for names, value in ((_SEQUENCE, sequence), (_BATCH, global_batch)):
        values |= {name: str(value) for name in names if value is not None}
    settings = read_settings(text, values, function)
    refuse_others(settings, trainer)
    if not settings.values.keys() - values.keys():
        raise PartoptError(
            "a layout alone does not say the model",
            "add `profile=FILE`, or give the script or configuration of the training",
            code="missing-option",
            option="profile",
        )
    found = reader.read_training(settings, topology.cluster.devices)
    stated = msgspec.structs.asdict(layout or Layout())
    asked = Laying(
        model=found.model,
        topology=topology,
        trainer=trainer,
        global_batch=found.global_batch,
        sequence=found.sequence,
        format=format or found.format,
        layout=structs.replace(
            found.layout, **{name: value for name, value in stated.items() if value is not None}
        ),
        facts={**found.facts, **(facts or {})},
        memory=memory,
    )
    if found.blocks is None or (asked.layout.pp or 1) == 1:
        return asked, found.notes
    return _with_ends(asked, found.blocks, found.notes)


def _with_ends(
    asked: Laying, blocks: Sequence[int], notes: Sequence[str]
) -> tuple[Laying, Sequence[str]]:
    """The question whose stages have these blocks, as near as the trainer's ways come to them."""
    trainer = TRAINERS.lookup(asked.trainer)
    usual = trainer.practice.ends if trainer.practice else ""
    others = [ends for ends in trainer.choices.get("ends", ()) if ends != usual]
    for ends in ("", *others):
        facts = {name: value for name, value in asked.facts.items() if name != "ends"}
        tried = dataclasses.replace(asked, facts=facts | ({"ends": ends} if ends else {}))
        training = tried.training
        degrees = Degrees.of(training, tried.fill(training), asked.global_batch)
        if stage_counts(training, degrees) == list(blocks):
            return tried, notes
    if others:
        ends = "-".join(map(str, blocks))
        return dataclasses.replace(asked, facts={**asked.facts, "ends": ends}), notes
    said = "-".join(map(str, blocks[:16])) + "-.." * (len(blocks) > 16)
    what = f"stages of {said} blocks are counted as the trainer shares them out by itself"
    return asked, [*notes, what]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A trainer's layout beside the best, and what of its configuration differs: old and new."""

    yours: Laid
    chosen: Chosen
    changes: Sequence[tuple[str, str, str]]

    @property
    def loses(self) -> float:
        """The share of the time of an iteration that the best saves; 0 where it is no better."""
        best = self.chosen.best
        saves = 1 - best.seconds / self.yours.seconds
        return max(0.0, saves) if best.plan.fits else 0.0


def compare_layout(asked: Laying, progress: Progress = ignore_progress) -> Compared:
    """The plan of a layout, beside the best of all layouts.

    Facts are the same, but for those that a flag alone turns on, or that a layout cannot have.

    Raises PartoptError where the layout cannot be run.
    """
    yours = lay(asked)
    facts = {name: value for name, value in asked.facts.items() if name not in _SWITCHES}
    free = dataclasses.replace(asked, layout=Layout(), facts=facts)
    chosen = choose(free, progress)
    plain = {name: value for name, value in facts.items() if name not in _NEEDING}
    if plain != facts:
        choices = [chosen, choose(dataclasses.replace(free, facts=plain), progress)]
        chosen = min(choices, key=lambda choice: (not choice.best.plan.fits, choice.best.seconds))
    best = chosen.best
    if yours.plan.fits and yours.seconds <= best.seconds:  # as where blocks lie unevenly
        chosen = dataclasses.replace(chosen, best=yours)
    else:
        first = _beside(best.estimate, yours, best, best.plan.fits)
        others = [
            other for other in _others(yours, [], chosen.found) if other.layout != first.layout
        ]
        yours = yours.with_about(tried=chosen.found.tried, beside=[first, *others])
    return Compared(
        yours=yours, chosen=chosen, changes=_changes(yours.plan, chosen.best.plan, asked.trainer)
    )


def _changes(yours: Plan, best: Plan, trainer: str) -> list[tuple[str, str, str]]:
    """What differs in the configurations of two plans, by the names that the trainer has for it."""
    words = TRAINERS.lookup(trainer).words or partial(_written, trainer=trainer)
    with suppress(PartoptError):  # a plan that the trainer cannot say
        old, new = words(yours), words(best)
        names = dict.fromkeys([*old, *new])
        return [
            (name, _shown(old.get(name)), _shown(new.get(name)))
            for name in names
            if old.get(name) != new.get(name)
        ]
    return []


def _written(plan: Plan, trainer: str) -> dict[str, object]:
    """The settings that are written of a plan, but for what holds others: fields or flags.

    Variables of the environment are called that.
    """
    settings = read_settings(export_plan(plan, trainer).main)
    names = {name: settings.show(name).removeprefix("config.") for name in settings.values}
    names |= {name: f"{name} (environment)" for name in names if name.isupper()}
    values = settings.values.items()
    holds = [name for name, value in values if isinstance(value, dict) or "--" in str(value)]
    return {names[name]: value for name, value in values if name not in holds}


def _shown(value: object) -> str:
    """A setting in few letters; `-` where there is none."""
    text = "-" if value is None else str(value)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 2]}.."


def differing(
    ranked: Sequence[Estimate], most: int, alike: Sequence[str] = ("chunks", "microbatch")
) -> list[Estimate]:
    """The first of the estimates that differ in more than the parts that may be `alike`."""
    kept: dict[Layout, Estimate] = {}
    for candidate in ranked:
        rest = structs.replace(candidate.layout, schedule=None, **dict.fromkeys(alike))
        kept.setdefault(rest, candidate)
        if len(kept) == most:
            break
    return list(kept.values())


def lay(asked: Laying) -> Laid:
    """The plan of a layout: simulated, and as many bytes reserved as the closed form counts more.

    What the layout leaves open is 1, and nothing is made again. Raises PartoptError where it cannot
    be run.
    """
    training = asked.training
    return lay_as(asked, training, asked.fill(training))


def lay_as(asked: Laying, training: Training, layout: Layout) -> Laid:
    """As `lay`, of a whole layout and of a training that may be another than the one asked for."""
    found = estimate(training, layout, asked.global_batch)
    profile = profile_of(training, layout, asked.global_batch)
    facts = asked.facts.items()
    about = Modelled(
        model=asked.model,
        sequence=asked.sequence,
        format=asked.format,
        practice=training.practice,
        layout=layout,
        asked=asked.layout,
        facts={name: value if isinstance(value, int) else str(value) for name, value in facts},
        closed_s=found.seconds,
        closed_bytes=round(found.memory_bytes),
        calibration=training.calibration or UNSET,
    )
    problem = Job(profile, asked.topology, **_options(asked, training, found)).problem
    problem = problem.with_(transformer=about)
    plan = simulate_plan(planners.plan(MANUAL, problem))
    more = max(0, round(found.memory_bytes) - plan.peak_memory_bytes)
    limit = asked.limit_bytes
    if more and limit is not None:
        reserve = Reserve(size_bytes=more, basis="computed")
        problem = problem.with_(reserve=reserve, memory_bytes=max(1, limit - more))
        plan = simulate_plan(planners.plan(MANUAL, problem))
    return Laid(plan=plan, profile=profile, estimate=found, training=training)


def _options(asked: Laying, training: Training, found: Estimate) -> dict[str, Any]:
    """The options of the job whose plan is the layout."""
    layout, memory = found.layout, found.memory
    counts = stage_counts(training, Degrees.of(training, layout, asked.global_batch))
    n, v = layout.dp or 1, layout.chunks or 1
    # of a parameter of a rank, before those that have it share it
    if "in shares" in memory:  # and what is whole in a pipeline beside it
        state = float(FSDP_STATE) - (2 + training.gradient_bytes) * (layout.pp == 1)
    else:
        state = memory["optimizer"] / (memory["parameters"] / 2)
        state *= n * (layout.cp or 1) if layout.shard == "optimizer" else 1
    facts: dict[str, Any] = {"optimizer_bytes": max(0.0, state)}
    if "in shares" in memory and BITS[training.format] < 16:
        facts["gathered_bytes"] = BITS[training.format] / 8
    if layout.scatters_early:
        facts["allreduce"] = "overlap"
    return {
        "trainer": asked.trainer,
        "engine": structs.replace(training.engine, **facts),
        "schedule": layout.schedule,
        "chunks": v if v > 1 else None,
        "planner": MANUAL,
        "cuts": [1 + count for count in accumulate(counts[:-1])],
        "replicas": [n] * len(counts),
        "microbatch_size": layout.microbatch,
        "global_batch": asked.global_batch,
        "shard": layout.shard,
        "recompute": "never",
        "memory": asked.limit_bytes,
    }
