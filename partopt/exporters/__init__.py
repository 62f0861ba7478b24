"""Exporters: plans as trainers read them. One file each, and one line in the registry here.

An exporter is a `Target`: what the trainer can say of a plan, and a function that writes it. A plan
that a trainer cannot say is refused with every reason; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.exporters.blocks import Part, describe, find_parts
from partopt.exporters.faithful import find_faults
from partopt.exporters.target import ANYWHERE, Target, Text
from partopt.registry import Registry

EXPORTERS: Registry[Target] = Registry(
    "exporter",
    Target,
    {
        name: f"partopt.exporters.{name.replace('-', '_')}:TARGET"
        for name in (
            "torch",
            "torch-csv",
            "torchtitan",
            "megatron",
            "megatron-bridge",
            "deepspeed",
            "colossalai",
            "vllm",
            "sglang",
            "torchgpipe",
            "accelerate",
            "flows",
        )
    },
)


def export_plan(
    plan: Plan,
    to: str,
    *,
    rules: Sequence[str] = (),
    stem: str = "partopt_plan",
    suffix: str | None = None,
) -> Text:
    """The plan as the trainer `to`, a name from `EXPORTERS`, reads it.

    `rules` are `GLOB=KIND` and say which layers are embedding, block, norm or head, where names do
    not; `stem` is the name of the file without its ending, for files that name each other, and
    `suffix` its ending, by which some forms are chosen.

    Raises PartoptError for an unknown trainer, for rules that do not fit the model, and with all
    reasons where the trainer cannot say the plan.
    """
    target = EXPORTERS.lookup(to)
    parts = parts_of(layers_of(plan), target, rules)
    faults = [_refused(plan, target, fault) for fault in find_faults(plan, target, parts)]
    if faults:
        raise PartoptError.together(faults)
    text = target.others.get(suffix or "", target.write)(plan, parts, stem)
    notes = [*describe(layers_of(plan), parts), *text.notes, *_differences(plan, target)]
    return Text(text.main, text.beside, notes)


def layers_of(plan: Plan) -> list[str]:
    """The names of the plan's layers, in their order."""
    return [name for stage in plan.stages for name in stage.modules]


def parts_of(layers: Sequence[str], target: Target, rules: Sequence[str]) -> list[Part]:
    """What each of the `layers` is; none where the trainer cuts anywhere."""
    if target.cuts != ANYWHERE:
        return find_parts(layers, rules)
    if rules:
        raise PartoptError(
            f"`map={rules[0]}`: {target.name} counts layers, whatever they are",
            "leave it out",
            code="unused-option",
            option="map",
        )
    return []


def _differences(plan: Plan, target: Target) -> Iterator[str]:
    """Where the trainer does not do quite what the plan counts."""
    if target.groups and plan.topology.group_ranks > 1:
        ranks = plan.topology.group_ranks
        yield f"each device is a group of {ranks} ranks, taken to be tensor parallel"
    if target.recomputes == "blocks" and any(stage.recompute for stage in plan.stages):
        yield (
            "blocks are recomputed one by one, and their inputs kept; the plan counts a whole "
            "stage that keeps its own"
        )


def _refused(plan: Plan, target: Target, fault: str) -> PartoptError:
    return PartoptError(
        f"{target.name} cannot say this plan of {plan.profile.name}: {fault}",
        code="target-cannot-say",
        target=target.name,
    )
