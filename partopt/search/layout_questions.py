"""What a job asks of a transformer's layouts, and the answer in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import structs

from partopt.cost.problem import Progress, ignore_progress, share_of
from partopt.documents.engine import PARTOPT, Engine, Layout
from partopt.documents.transformer import Calibration, Format, Practice, Transformer
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then, invalid
from partopt.job import Job
from partopt.options import AUTO
from partopt.search.calibration import calibrate_kinds
from partopt.trainers import TRAINERS
from partopt.transformer.as_profile import rates_of
from partopt.transformer.block import Training
from partopt.transformer.columns import Question, shard_of
from partopt.transformer.faults import find_faults
from partopt.transformer.layouts import ROOM, Found, find_fastest, find_layouts

_FACTORS = ("tp", "cp", "pp", "dp")  # of the number of devices
_SCHEDULES = ("1f1b", "interleaved")  # of a stage a device, and of several: chunks


def training_for(job: Job) -> Training:
    """All that seconds and bytes follow from, beside the layout, of a job of a transformer.

    PartoptError for what its trainer, the device or the model does not have, and where a measured
    block is of another.
    """
    assert isinstance(job.model, Transformer) and job.sequence
    if job.trainer == PARTOPT:
        raise job.lacks("for")
    trainer, format = TRAINERS.lookup(job.trainer), format_of(job)
    if (blocks := job.layout.recomputation.blocks) and trainer.says.recomputed != "first":
        what, hint = f"{job.trainer} makes all blocks again or none", "write recompute=always"
        raise invalid("layout", f"recompute={blocks}", what, hint)
    if trainer.practice is None:
        able = [name for name, other in TRAINERS.items() if other.practice is not None]
        raise PartoptError(
            f"how {trainer.name} runs a transformer is not known",
            f"choose {', '.join(able)}; or give a profile",
            code="target-cannot-say",
            target=trainer.name,
        )
    practice, engine = run_with_facts(job)
    tokens, model = practice.images, job.model
    if tokens > (job.sequence if model.tower else 0):
        what, hint = f"a sample has {job.sequence:,} tokens in all", "give those of its pictures"
        if not model.tower:
            what, hint = f"what reads pictures of {model.name} is not known", "leave `images` out"
        raise invalid("images", tokens, what, hint)
    asked = question_of(job)
    rates, measured = rates_of(job.topology), job.calibrate
    calibration = list[Calibration]()
    if measured is not None:
        calibration = calibrate_kinds(measured, job.model, job.sequence, format, job.topology)
    return Training(
        model=job.model,
        sequence=job.sequence,
        format=format,
        practice=practice,
        engine=engine,
        rates=rates,
        calibration=calibration,
        repeats_keys=trainer.says.repeats_keys,
        parts_ties=trainer.says.ties,
        spreads_recurrences=trainer.says.spreads_recurrences,
        other_ends=_other_ends(job, practice),
        room=min(asked.limit, asked.room or math.inf),
    )


def format_of(job: Job) -> Format:
    """The number format of a job's products. PartoptError for one that its trainer lacks."""
    formats, format = TRAINERS.lookup(job.trainer).says.formats, job.dtype or "bfloat16"
    if format not in formats:
        what = f"{job.trainer} trains in {', '.join(formats)}"
        raise invalid("dtype", format, what, "choose one of these")
    return format


def _other_ends(job: Job, practice: Practice) -> Sequence[str]:
    """The ways of its trainer to share blocks out that a job leaves open, beside its usual one.

    To cut freely is a switch, and what unequal blocks have by themselves.
    """
    if "ends" in job.facts or "ends" in usual_facts(job):
        return ()
    ways = TRAINERS.lookup(job.trainer).choices.get("ends", ())
    return [ends for ends in ways if ends not in ("free", practice.ends)]


def run_with_facts(job: Job) -> tuple[Practice, Engine]:
    """How its trainer runs a job's transformer. PartoptError for facts that it does not have."""
    return TRAINERS.lookup(job.trainer).run_with({**usual_facts(job), **job.facts})


def usual_facts(job: Job) -> dict[str, str]:
    """What a plan says by itself, where its trainer can: unequal blocks are cut by their seconds.

    Attention is a flash kernel where the device is known to have one; where it lacks the trainer's,
    another of the trainer's, or one that writes its scores. Graphs hold what the host starts of
    experts' blocks, unless whole ones are made again. Where the layout asks for gradients or
    parameters in shares they may be, without such graphs.
    """
    assert isinstance(job.model, Transformer)
    trainer, again = TRAINERS.lookup(job.trainer), job.layout.recomputation
    choices, practice = trainer.choices, trainer.practice
    unequal = job.model.is_unequal or job.facts.get("images", "no") != "no"
    facts = {"ends": "free"} if unequal else {}
    if "flash2" in (kernels := rates_of(job.topology).attention):
        facts["attention"] = "flash"
    elif practice and practice.scores is None and practice.attention not in kernels:
        ways = choices.get("attention", {}).items()
        able = [way for way, sets in ways if sets.get("attention") in kernels or "scores" in sets]
        facts |= {"attention": able[0]} if able else {}
    if job.layout.shares_gradients or job.facts.get("fsdp") == "yes":
        facts["fsdp"] = "yes"
    elif job.model.experts and not again.is_whole and "moe" not in again.modules:
        facts["graphs"] = "attention"
    return {name: value for name, value in facts.items() if value in choices.get(name, {})}


def without_graphs(job: Job) -> Job | None:
    """The job without the graphs that its plan has by itself; None where that has none."""
    if "graphs" not in usual_facts(job).keys() - job.facts.keys():
        return None
    return job.with_(facts={**job.facts, "graphs": "none"})


def fixed_parts(job: Job) -> Layout:
    """The parts of the layout that are fixed; what the trainer does not have is 1.

    PartoptError where more of it is asked for.
    """
    trainer, layout = TRAINERS.lookup(job.trainer), job.layout
    lacking = [name for name in ("tp", "cp", "ep") if name not in trainer.says.degrees]
    runs = [name for name in _SCHEDULES if name in (trainer.schedules or _SCHEDULES)]
    lacking += ["chunks"] * ("interleaved" not in runs)
    unsaid = ["etp"] * ("etp" not in trainer.says.degrees)
    for name in [*lacking, *unsaid]:
        if (getattr(layout, name) or 1) > 1:
            what, hint = f"{job.trainer} has no such part of a layout", f"leave {name} out"
            raise invalid("layout", f"{name}={getattr(layout, name)}", what, hint)
    if layout.schedule not in (None, AUTO, *runs):
        what = f"transformers are planned under {' and '.join(runs)} of {job.trainer}"
        raise invalid("layout", f"schedule={layout.schedule}", what, "leave schedule out")
    chosen = [name for name in ("recompute", "schedule") if getattr(layout, name) == AUTO]
    if isinstance(job.model, Transformer) and job.model.experts:
        lacking += unsaid
    return structs.replace(layout, **dict.fromkeys(lacking, 1), **dict.fromkeys(chosen))


def fill_layout(job: Job, training: Training) -> Layout:
    """The layout with all its parts: what is left open is 1, and devices that are left share.

    PartoptError where it does not lie on the devices, or the model or the batch cannot.
    """
    given, devices = fixed_parts(job), job.topology.cluster.devices
    degrees = {name: getattr(given, name) or 1 for name in ("tp", "cp", "ep", "pp", "chunks")}
    pipeline = degrees["tp"] * degrees["cp"] * degrees["pp"]
    dp = given.dp or max(1, devices // pipeline)
    full = structs.replace(
        given,
        **degrees,
        dp=dp,
        microbatch=given.microbatch or 1,
        recompute=given.recompute or "never",
        shard=given.shard or shard_of(training, degrees["pp"]),
        schedule=given.schedule or _SCHEDULES[degrees["chunks"] > 1],
    )
    if dp * pipeline != devices:
        raise invalid(
            "layout",
            ",".join(f"{name}={getattr(full, name)}" for name in _FACTORS),
            f"tp x cp x pp x dp are {dp * pipeline} devices, and the cluster has {devices}",
            _hint_at_factors(training, full, batch_of(job), devices),
        )
    faults = list(find_faults(training, full, batch_of(job)))
    if faults:
        raise PartoptError.together(faults)
    return full


def _hint_at_factors(training: Training, layout: Layout, batch: int, devices: int) -> str:
    """What the first degree that does not divide the devices can be, of the model and of them."""
    for name in _FACTORS:
        if devices % getattr(layout, name):
            sizes = [size for size in range(1, devices + 1) if devices % size == 0]
            able = [
                str(size)
                for size in sizes
                if not any(
                    find_faults(training, structs.replace(layout, **{name: size}), batch, [name])
                )
            ]
            return f"{name} divides the devices and the model: {', '.join(able)}"
    return "use all devices; ep lies within tp x cp x dp"


def batch_of(job: Job) -> int:
    """Samples of an iteration."""
    assert job.global_batch is not None
    return job.global_batch


def estimate_layouts(job: Job, progress: Progress = ignore_progress) -> Found:
    """All layouts that have the parts that are asked for, in closed form.

    PartoptError where there is none, Interrupted with those until then.
    """
    training = training_for(job)
    report = share_of(progress, "estimating layouts", 0, 1)
    found = find_layouts(training, question_of(job), report)
    if found.least is None:
        raise _no_layout(job, training)
    return found


def choose_graphs(job: Job, progress: Progress = ignore_progress) -> tuple[Job, Found]:
    """The job and its layouts, without the graphs that a plan has by itself if one is faster so.

    Graphs hold nothing that is made again, and take memory: what frees some may be worth more.
    Interrupted with what was found until then.
    """
    with found_until_then(lambda until_then: until_then and (job, until_then)):
        found = estimate_layouts(job, progress)
    if (without := without_graphs(job)) is None:
        return job, found
    with found_until_then(lambda until_then: (without, until_then) if until_then else (job, found)):
        if found.fitting:
            first_s = found.fitting[0].seconds
            if find_fastest([training_for(without)], question_of(without), first_s) is None:
                return job, found
        return without, estimate_layouts(without, progress)


def question_of(job: Job) -> Question:
    """What layouts a job asks for; those of experts leave room where it states no memory."""
    memory_bytes = job.topology.device.memory_bytes
    experts = isinstance(job.model, Transformer) and bool(job.model.experts)
    return Question(
        devices=job.topology.cluster.devices,
        batch=batch_of(job),
        limit=job.limit_bytes or math.inf,
        fixed=fixed_parts(job),
        partly=TRAINERS.lookup(job.trainer).says.recomputed == "first",
        room=ROOM * memory_bytes if experts and job.memory is None and memory_bytes else None,
    )


def _no_layout(job: Job, training: Training) -> PartoptError:
    """Why there is no layout: the faults of parts that are fixed, or that none has all of them."""
    why, devices = "", job.topology.cluster.devices
    try:
        fill_layout(job, training)
    except PartoptError as error:
        parts = {str(fault.fields.get("part", "layout")) for fault in error.parts}
        if all(getattr(job.layout, part, job) is not None for part in parts):
            return error
        why = f"; with what is open at 1, {error.parts[0].message}"
    return PartoptError(
        f"{job.trainer} has no such layout of {training.model.name} on {devices} devices{why}",
        "fix less of `layout`, or give another batch",
        ANSWER_IS_NO,
        code="no-plan",
    )
