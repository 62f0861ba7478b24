"""What the text that is written for a trainer does not say of a transformer's plan.

The text is read as that of any person is. A model, a format or a layout that comes back otherwise
is another training; facts that do are what a plan counts and a configuration does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from partopt.configurations.settings import Settings
from partopt.documents.engine import OF_LAYOUTS, STATE
from partopt.documents.plan import Plan
from partopt.documents.transformer import Modelled, Transformer
from partopt.errors import PartoptError
from partopt.trainers.parts import FURTHER, Part, count_blocks
from partopt.trainers.trainer import Asked, Stated, Trainer, batch_of
from partopt.transformer.offloading import copied_modules

_DEGREES = ("tp", "cp", "ep", "etp", "pp", "chunks", "microbatch")
# facts that change nothing without tensor parallel ranks, or without experts
_OF_GROUPS = ("sequence_parallel", "tp_overlap", "regathers")
_OF_EXPERTS = ("dispatch", "dispatch_bytes", "dispatch_overlap", "fused_experts", "routing")


class Losses(NamedTuple):
    """What makes it another training, and what a person has to know."""

    faults: Sequence[str] = ()
    notes: Sequence[str] = ()


def find_losses(plan: Plan, trainer: Trainer, parts: Sequence[Part], settings: Settings) -> Losses:
    """What a trainer's text for a plan of a transformer lacks, by reading it."""
    about = plan.transformer
    if not about or not trainer.read or not trainer.practice:
        return Losses()
    asked = Asked(devices=plan.topology.cluster.devices)
    try:
        found = trainer.read(settings, asked)
    except PartoptError as error:
        return Losses([fault.message for fault in error.parts])
    assert found.model
    faults = [
        f"{name} is {planned}, it would be {said}"
        for name, planned, said in _another_training(plan, about, found.model, parts, found)
        if planned != said
    ]
    return Losses(faults, [*_numerics(about, found.model), *_facts(plan, about, trainer, found)])


def _another_training(
    plan: Plan, about: Modelled, model: Transformer, parts: Sequence[Part], found: Stated
) -> Iterator[tuple[str, object, object]]:
    """What a training is, as it is planned and as it is said."""
    unplanned = ["name", "numerics", *([] if about.practice.images else ["tower"])]
    for name in about.model.__struct_fields__:
        if name not in unplanned:
            yield f"`{name}` of the model", getattr(about.model, name), getattr(model, name)
    yield "the format", about.format, found.format
    yield "the sequence", about.sequence, found.sequence
    yield "the batch", batch_of(plan), found.batch
    for name in _DEGREES:
        yield name, getattr(plan.layout, name) or 1, getattr(found.layout, name) or 1
    inside = [parts[stage.start : stage.stop] for stage in plan.stages]
    counts = [*map(count_blocks, inside)]
    again = plan.layout.recompute
    all_blocks = isinstance(again, int) and parts and again >= max(counts)
    yield "recomputation", "always" if all_blocks else again, found.layout.recompute
    yield "modules made again", plan.layout.modules, found.layout.modules
    yield "what replicas share", plan.shard, found.layout.shard
    if found.blocks is not None and parts:
        yield "blocks of stages", counts, list(found.blocks)
        last = len(counts) - 1
        where = [s for s, stage in enumerate(inside) if Part(FURTHER) in stage]
        said = last if found.further_stage is None else found.further_stage
        yield "the stage of further tokens", [*where, last][0], said


def _numerics(about: Modelled, model: Transformer) -> Iterator[str]:
    planned, said = about.model.numerics, model.numerics
    if planned is None:
        yield "the plan does not say norms, biases and positions of the model: plan it again"
    elif said is not None:
        for name, value in structs.asdict(planned).items():
            if value != getattr(said, name):
                what = str(value) if name == "besides" else f"{name} {value}"
                yield f"yours to add: the model has {what}, which the text does not say"


def _facts(plan: Plan, about: Modelled, trainer: Trainer, found: Stated) -> Iterator[str]:
    """Facts that the plan counts, and that the trainer does not have or cannot be told."""
    practice, engine = trainer.run_with(found.facts)
    if plan.layout.scatters_early:
        engine = structs.replace(engine, allreduce="overlap")
    differing = plan.engine.find_differences(engine.of_layouts, plan.schedule, plan.shard)
    facts = [
        name if name == "waits" else f"{name}={getattr(plan.engine, name)}"
        for name in differing
        if name not in OF_LAYOUTS
    ]
    state = about.facts.get("optimizer_bytes", STATE)
    if float(state) != found.facts.get("optimizer_bytes", STATE):
        facts.append(f"optimizer_bytes={state}")
    none = {"ends", "fsdp", *(_OF_GROUPS if (plan.layout.tp or 1) == 1 else ())}
    none |= {*(_OF_EXPERTS if not about.model.experts else ())}
    none |= {*(() if about.practice.optimizer_offload else ("offload_overlap",))}
    if practice.offload == "+".join(offloaded_modules(plan)):
        practice = structs.replace(practice, offload=about.practice.offload)
    for name in practice.__struct_fields__:
        planned = getattr(about.practice, name)
        if name not in none and planned != getattr(practice, name):
            facts.append(_fact_of(trainer, name, planned))
    if facts:
        again = f": `partopt plan --for {trainer.name}`" if plan.trainer != trainer.name else ""
        what = ", ".join(dict.fromkeys(facts))
        yield f"the plan counts {what}, and the text of {trainer.name} does not say so{again}"


def offloaded_modules(plan: Plan) -> list[str]:
    """The modules of a plan of a transformer that save in the host's memory."""
    about, again = plan.transformer, plan.layout.recomputation
    if not about or again.is_whole:
        return []
    return copied_modules(about.model, about.practice, again.modules)


def _fact_of(trainer: Trainer, field: str, planned: object) -> str:
    """What a person chooses for a field of the practice to be as planned; or the field's name."""
    ways = [
        (len(fields), f"{name}={value}")
        for name, values in trainer.choices.items()
        for value, fields in values.items()
        if field in fields and fields[field] == planned
    ]
    return min(ways)[1] if ways else field
