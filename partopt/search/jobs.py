"""The job for a trainer: with its engine and schedules, or as its configuration states it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from partopt.configurations.settings import Settings, read_settings
from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import AUTO, CHOSEN_BY_AUTO, layout_with
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import LOOPED
from partopt.search.layout_questions import batch_of, fill_layout, training_for
from partopt.search.trainer_limits import check_asked, parts_of
from partopt.trainers import TRAINERS
from partopt.trainers.others import refuse_others
from partopt.trainers.parts import block_bounds
from partopt.trainers.replaced import replaced_settings
from partopt.trainers.trainer import Asked
from partopt.transformer.iteration import Degrees, settle_cut, stage_counts

_SERVERS = re.compile(r"(SLURM_(JOB_NUM_|N)|NUM_|N_?)?NODES|NHOSTS", re.I)


def job_for(job: Job, to: str, rules: Sequence[str] = ()) -> Job:
    """The job for the trainer `to`: with its engine, of which the job's facts replace some.

    `rules` are those of `export_plan`, for blocks that it makes again. Of a transformer the trainer
    alone is set. Raises PartoptError where the job asks for what the trainer cannot do.
    """
    trainer = TRAINERS.lookup(to)
    if isinstance(job.model, Transformer):
        if rules:
            what = f"`map`: {job.model.name} is a transformer's configuration, not a profile"
            raise PartoptError(what, "leave `map` out", code="unused-option", option="map")
        return job.with_(trainer=to, facts=trainer.spell_recipe(job.facts, job.model.name))
    check_asked(job, trainer)
    parts = parts_of(job, trainer, rules) if trainer.engine.recomputes_blocks else []
    bounds = block_bounds(parts) if parts else None
    return job.with_(trainer=to, engine=trainer.engine, block_bounds=bounds)


def schedule_for(
    trainers: Sequence[str], options: Mapping[str, Any], several: bool = True
) -> str | None:
    """The schedule of a job with these `options` that all `trainers` run.

    That is "auto" where the trainer's schedules may be tried, which needs `several` and no option
    that "auto" chooses itself; else the first of them. To trainers for inference schedules do not
    matter: a batch asks for a synchronous one, else it is None. Raises PartoptError where they have
    none in common.
    """
    named = [TRAINERS.lookup(name).schedules for name in trainers]
    known: list[Collection[str]] = [names for names in named if names is not None]
    if not known and not (options.get("microbatches") or options.get("global_batch")):
        return None
    known = known or [sorted(SCHEDULES, key=lambda name: name != "1f1b")]
    common = [
        name
        for name in known[0]
        if SCHEDULES[name].tried_by_auto
        and all(name in names for names in known)
        and (options.get("chunks") is None or SCHEDULES[name].shape == LOOPED)
    ]
    if not common:
        raise PartoptError(
            f"{' and '.join(trainers)} have no schedule in common",
            "give one trainer, or name the schedule",
            code="target-cannot-say",
            option="schedule",
        )
    stated = options.get("replication", "free") != "free"
    stated = stated or any(options.get(name) is not None for name in CHOSEN_BY_AUTO)
    return AUTO if several and not stated else common[0]


def read_job(
    trainer: str,
    text: str,
    topology: Topology,
    arguments: Mapping[str, str] | None = None,
    *,
    function: str | None = None,
    folder: Path | None = None,
    **options: Any,
) -> tuple[Job, Sequence[str]]:
    """The job that a trainer's configuration states on a cluster, and notes on the reading.

    `text` is a script, a program or a document, which is not executed; `arguments` are values of
    its variables and of settings, `function` the one that makes the configuration, `folder` where
    the files lie that a script sources; `options` of the job go before what the text says. Raises
    PartoptError with all that is missing, and for what is not planned.
    """
    reader = TRAINERS.lookup(trainer)
    if not reader.read or not reader.practice:
        able = [name for name, other in TRAINERS.items() if other.read and other.practice]
        raise PartoptError(
            f"{trainer}: its configurations do not say a transformer's shape",
            f"give a profile; or choose {', '.join(able)}",
            code="missing-option",
            option="profile",
        )
    options = {name: value for name, value in options.items() if value is not None}
    values = dict(arguments or {})
    stated = layout_with(options.pop("layout", Layout()), options)
    chosen = options.pop("facts", {})
    settings = read_settings(text, values, function, folder)
    settings.replaced = replaced_settings(stated, options, chosen)
    refuse_others(settings, trainer)
    if not settings.values.keys() - values.keys():
        raise PartoptError(
            "a layout alone does not say the model",
            "add `profile=FILE`, or give the script or configuration of the training",
            code="missing-option",
            option="profile",
        )
    asked = Asked(devices=topology.cluster.devices)
    found = reader.read(settings, asked)
    notes = [*found.notes]
    servers = _servers_of(settings, topology, values)
    if servers and "global_batch" not in options:
        with suppress(PartoptError):
            there = read_settings(text, values | servers, function, folder)
            there.replaced = settings.replaced
            batch = reader.read(there, asked).batch
            notes += _note_servers(settings, servers, found.batch, batch)
    assert found.model
    said: dict[str, Any] = {
        "trainer": trainer,
        "global_batch": found.batch,
        "sequence": found.sequence,
        "dtype": found.format,
    }
    graphs = {"graphs": "none"} if found.model.experts and "graphs" in reader.choices else {}
    facts = {**graphs, **found.facts, **chosen}
    parts = {name: part for name, part in structs.asdict(stated).items() if part is not None}
    whole = {"chunks": 1} if stated.pp == 1 else {}  # without a pipeline
    layout = structs.replace(found.layout, **whole | parts)
    job = Job(found.model, topology, **said | options, layout=layout, facts=facts)
    if found.blocks is None or (layout.pp or 1) == 1 or "ends" in chosen:
        return job, notes
    return _with_ends(job, found.blocks, found.further_stage, notes)


def _servers_of(settings: Settings, topology: Topology, given: Collection[str]) -> dict[str, str]:
    """The variables of a script that say other servers than the cluster has, with these."""
    servers = topology.cluster.devices // topology.cluster.levels[0].size
    return {
        name: str(servers)
        for name in sorted(settings.variables - set(given))
        if _SERVERS.fullmatch(name) and settings.known(name) not in (None, servers)
    }


def _note_servers(
    settings: Settings, servers: Mapping[str, str], batch: int | None, other: int | None
) -> Iterator[str]:
    """That a batch is made for other servers, with which it is another one."""
    if batch != other:
        was = ", ".join(f"{name}={settings.value(name)}" for name in servers)
        given = " ".join(f"{name}={count}" for name, count in servers.items())
        yield f"a batch of {batch} is of {was}: `arguments={given}` makes it {other}"


def _with_ends(
    job: Job, blocks: Sequence[int], further: int | None, notes: Sequence[str]
) -> tuple[Job, Sequence[str]]:
    """The job whose stages have these blocks, as near as the trainer's ways come to them."""
    trainer = TRAINERS.lookup(job.trainer)
    others = [*trainer.choices.get("ends", ())]
    plain = {name: value for name, value in job.facts.items() if name != "ends"}
    last = further in (None, len(blocks) - 1)  # as further tokens are by default
    for ends in ("", *others) if last else ():
        tried = job.with_(facts=plain | ({"ends": ends} if ends else {}))
        training = training_for(tried)
        layout = fill_layout(tried, training)
        training = settle_cut(training, layout, batch_of(job))
        degrees = Degrees.of(training, layout, batch_of(job))
        if stage_counts(training, degrees) == list(blocks):
            return tried, notes
    if others:
        stages = (f"{n}{'m' * (s == further and not last)}" for s, n in enumerate(blocks))
        return job.with_(facts={**job.facts, "ends": "-".join(stages)}), notes
    said = "-".join(map(str, blocks[:16])) + "-.." * (len(blocks) > 16)
    what = f"stages of {said} blocks are counted as the trainer shares them out by itself"
    return job, [*notes, what]
