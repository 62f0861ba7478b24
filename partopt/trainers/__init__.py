"""Trainers: what they can say of a plan, what their engines do, what they write and read.

A trainer has a file, and a line in the registry here. A plan that a trainer cannot say is refused
with every reason; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partopt.configurations.settings import read_settings
from partopt.documents.engine import OF_LAYOUTS
from partopt.documents.plan import Plan
from partopt.errors import PartoptError, unknown
from partopt.registry import Registry
from partopt.trainers.parts import Part, describe, find_parts, missing_kinds
from partopt.trainers.read_back import find_losses
from partopt.trainers.says import find_faults
from partopt.trainers.trainer import ANYWHERE, Text, Trainer

TRAINERS: Registry[Trainer] = Registry(
    "trainer",
    Trainer,
    {
        "megatron": "partopt.trainers.megatron:MEGATRON",
        "megatron-bridge": "partopt.trainers.megatron:BRIDGE",
        "ms-swift": "partopt.trainers.dialects:MS_SWIFT",
        "verl": "partopt.trainers.dialects:VERL",
        "slime": "partopt.trainers.dialects:SLIME",
        "torchtitan": "partopt.trainers.torchtitan:TORCHTITAN",
        "deepspeed": "partopt.trainers.deepspeed:DEEPSPEED",
        "torch": "partopt.trainers.torch:TORCH",
        "torch-csv": "partopt.trainers.torch:TORCH_CSV",
        "colossalai": "partopt.trainers.colossalai:COLOSSALAI",
        "torchgpipe": "partopt.trainers.torchgpipe:TORCHGPIPE",
        "partopt": "partopt.trainers.partopt:PARTOPT",
        "vllm": "partopt.trainers.servers:VLLM",
        "sglang": "partopt.trainers.servers:SGLANG",
        "accelerate": "partopt.trainers.servers:ACCELERATE",
    },
)


def writers() -> list[str]:
    """The names of the trainers for which plans are written."""
    return [name for name, trainer in TRAINERS.items() if trainer.write is not None]


def readers() -> list[str]:
    """The names of the trainers whose configurations are read."""
    return [name for name, trainer in TRAINERS.items() if trainer.read is not None]


def export_plan(
    plan: Plan,
    to: str,
    *,
    rules: Sequence[str] = (),
    stem: str = "partopt_plan",
) -> Text:
    """The plan as the trainer `to`, a name from `writers()`, reads it.

    `rules` are `GLOB=KIND` and say which layers are of which of `LAYER_KINDS`, where names do
    not; `stem` is the name of the file without its ending, for files that name each other.

    Raises PartoptError for an unknown trainer, for rules that do not fit the model, and with all
    reasons where the trainer cannot say the plan.
    """
    trainer = TRAINERS.lookup(to)
    if trainer.write is None and trainer.words:
        what = f"{to} has changes of a script, and no other text"
        hint = f"partopt import {to} SCRIPT --topology FILE -o better.sh"
        raise PartoptError(what, hint, code="unknown-trainer", target=to)
    if trainer.write is None:
        what = f"nothing is written for {to}"
        raise unknown(what, to, writers(), code="unknown-trainer")
    layers = [name for stage in plan.stages for name in stage.modules]
    parts = parts_of(layers, trainer, rules)
    lacking = missing_kinds(parts) if trainer.says.cuts != ANYWHERE else []
    hints = [f"say which layers it is: `map=NAME={kind}`" for kind in lacking]  # no plan has it
    _refuse(plan, to, find_faults(plan, trainer, parts), *hints[:1])
    text = trainer.write(plan, parts, stem)
    lost = find_losses(plan, trainer, parts, read_settings(text.main))
    _refuse(plan, to, lost.faults)
    kinds = [] if plan.transformer else describe(layers, parts)  # layers that partopt named
    notes = [*kinds, *text.notes, *lost.notes, *_differences(plan, trainer)]
    return Text(text.main, text.beside, notes)


def _refuse(plan: Plan, to: str, faults: Iterable[str], hint: str = "") -> None:
    """Raise PartoptError with all of the faults, if there are any; of the last is the hint."""
    errors = [
        PartoptError(
            f"{to} cannot say this plan of {plan.profile.name}: {fault}",
            code="target-cannot-say",
            target=to,
        )
        for fault in faults
    ]
    if errors:
        errors[-1].hint = hint
        raise PartoptError.together(errors)


def parts_of(layers: Sequence[str], trainer: Trainer, rules: Sequence[str]) -> list[Part]:
    """What the `layers` are; none where the trainer cuts anywhere."""
    if trainer.says.cuts != ANYWHERE:
        return find_parts(layers, rules)
    if rules:
        raise PartoptError(
            f"`map={rules[0]}`: {trainer.name} counts layers, whatever they are",
            "leave it out",
            code="unused-option",
            option="map",
        )
    return []


def _differences(plan: Plan, trainer: Trainer) -> Iterator[str]:
    """Where the trainer does not do quite what the plan counts."""
    told = trainer.schedules is not None and plan.trainer != trainer.name
    if plan.transformer and trainer.read and trainer.practice:  # whose text is read again
        told = False
    engine = trainer.engine.of_layouts if plan.transformer else trainer.engine
    facts = plan.engine.find_differences(engine, plan.schedule, plan.shard) if told else []
    if plan.transformer:
        facts = [fact for fact in facts if fact not in OF_LAYOUTS]
    if facts:
        yield (
            f"the plan counts what the engine of {plan.trainer} does, which differs in "
            f"{', '.join(facts)}: `partopt plan --for {trainer.name}`"
        )
    if plan.topology.group_ranks > 1 and not plan.transformer:
        ranks = plan.topology.group_ranks
        yield f"each device is a group of {ranks} ranks, taken to be tensor parallel"
    again = any(stage.recompute for stage in plan.stages)
    if again and plan.engine.recomputes_blocks != trainer.engine.recomputes_blocks:
        ways = ("a whole stage", "blocks one by one")
        counted, run = (ways[engine.recomputes_blocks] for engine in (plan.engine, trainer.engine))
        yield f"{run} recompute, and keep their inputs; the plan counts {counted}"
