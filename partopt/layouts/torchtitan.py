"""torchtitan: `module_fqns_per_model_part`, the modules of every stage by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from partopt.errors import PartoptError, did_you_mean
from partopt.exporters.blocks import BLOCK, EMBEDDING, HEAD, NORM, Part
from partopt.layouts.counts import blocks_in, check_count, check_stages
from partopt.layouts.literals import find_value, read_literal
from partopt.layouts.trainer_layout import LayoutFormat, Reading

_FIELD, _SIZE = "module_fqns_per_model_part", "pipeline_parallel_degree"
_SCHEDULE = "pipeline_parallel_schedule"
_SCHEDULES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
_EXAMPLE = "tok_embeddings,layers.0 layers.1,norm,lm_head"
# `output` is what older versions call the head
_PARTS = {"tok_embeddings": EMBEDDING, "norm": NORM, "lm_head": HEAD, "output": HEAD}
_BLOCK = re.compile(r"layers\.([0-9]{1,9})")


def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """The cuts before the first module of every stage but the first."""
    stages = [[_part(name) for name in names] for names in _stages(text)]
    _check(stages, list(dict.fromkeys(parts)))
    cuts = [parts.index(own[0]) for own in stages[1:]]
    size, schedule = find_value(text, _SIZE), find_value(text, _SCHEDULE)
    return Reading(
        cuts,
        size if isinstance(size, int) else None,
        _SCHEDULES.get(schedule) if isinstance(schedule, str) else None,
    )


def _stages(text: str) -> list[list[str]]:
    """The names of the modules of each stage."""
    value: object = read_literal(text) or find_value(text, _FIELD) or text.split()
    if isinstance(value, list) and all(isinstance(own, str) for own in value):
        value = [[name for name in own.split(",") if name] for own in value]
    if not (
        isinstance(value, list)
        and value
        and all(isinstance(own, list | tuple) for own in value)
        and all(isinstance(name, str) for own in value for name in own)
    ):
        raise PartoptError(
            f"{_FIELD} is not a list of the modules of each stage",
            f"write {_EXAMPLE}",
            code="malformed-layout",
        )
    return [list(own) for own in value]


def _part(name: str) -> Part:
    """What a module is."""
    block = _BLOCK.fullmatch(name)
    if block is None and name not in _PARTS:
        raise PartoptError(
            f"{name}: no module of torchtitan's models, which would leave it out in silence",
            f"{did_you_mean(name, [*_PARTS, 'layers.0'])}",
            code="malformed-layout",
            name=name,
        )
    return Part(BLOCK, int(block[1])) if block else Part(_PARTS[name])


def _check(stages: Sequence[Sequence[Part]], there: Sequence[Part]) -> None:
    """Raise PartoptError unless the stages have the parts of the model, each once and in order."""
    check_stages([len(own) for own in stages], "modules", sum(map(len, stages)))
    said = list(itertools.chain(*stages))
    check_count(blocks_in(said), "blocks", blocks_in(there))
    for part in dict.fromkeys([*said, *there]):
        if part not in there:
            raise PartoptError(
                f"the layout has a {part}, the profile none",
                f"say which layers it is: `map=NAME={part.kind}`",
                code="other-layers",
            )
        if part not in said:
            raise PartoptError(
                f"the layout has no {part}, which torchtitan would leave out in silence",
                "add it to a stage",
                code="other-layers",
            )
    for part, expected in zip(said, [*there, None], strict=False):
        if part != expected:
            raise PartoptError(
                f"{part} stands where {expected or 'the end'} is expected",
                "name each module once, in the order of the model",
                code="parts-out-of-order",
            )


FORMAT = LayoutFormat(
    name="torchtitan",
    summary="torchtitan: module_fqns_per_model_part, or a configuration module that has it",
    example=_EXAMPLE,
    read=read,
)
