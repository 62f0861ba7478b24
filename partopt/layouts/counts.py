"""Layouts that are a number for each stage: how many blocks, or how many layers, it has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from partopt.errors import PartoptError
from partopt.exporters.blocks import BLOCK, Part
from partopt.layouts.literals import find_value
from partopt.layouts.trainer_layout import LayoutFormat, Reading

_NUMBERS = re.compile(r"[\[(]?\s*[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*,?\s*[\])]?")


def read_numbers(text: str, name: str, example: str) -> list[int]:
    """The numbers of a text that are all of it, or the value of `name` in it.

    Raises PartoptError where there are none.
    """
    own = text.strip()
    value: object = own if _NUMBERS.fullmatch(own) else find_value(text, name)
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = " ".join(value)
    if isinstance(value, str) and _NUMBERS.fullmatch(value.strip()):
        value = [int(found) for found in re.findall(r"[0-9]+", value)]
    if isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        return list(value)
    said = (
        f"{name} is {value!r}" if value is not None else f"neither numbers nor a text with {name}"
    )
    raise PartoptError(said, f"write {example}", code="malformed-layout")


def check_stages(counts: Sequence[int], what: str, there: int) -> None:
    """Raise PartoptError for a stage without any, or unless they are all that are `there`."""
    for s, count in enumerate(counts):
        if count < 1:
            raise PartoptError(
                f"stage {s} has no {what}, and a stage of a plan has some",
                "leave it out, or give it some",
                code="empty-stage",
                stage=s,
            )
    check_count(sum(counts), what, there)


def check_count(said: int, what: str, there: int) -> None:
    """Raise PartoptError unless a layout has as many blocks or layers as are `there`."""
    if said != there:
        raise PartoptError(
            f"the layout has {said} {what}, the profile {there}",
            "give the profile of the same model",
            code="other-layers",
            layout=said,
            profile=there,
        )


def blocks_in(parts: Iterable[Part]) -> int:
    """How many blocks there are among `parts`."""
    return len({part.number for part in parts if part.kind == BLOCK})


def _format(name: str, title: str, variable: str, example: str, of_layers: bool) -> LayoutFormat:
    what = "layers" if of_layers else "blocks"

    def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
        counts = read_numbers(text, variable, example)
        check_stages(counts, what, len(layers) if of_layers else blocks_in(parts))
        starts = list(itertools.accumulate(counts[:-1]))
        return Reading(starts if of_layers else [parts.index(Part(BLOCK, n)) for n in starts])

    return LayoutFormat(
        name=name,
        summary=f"{title}: {variable}, the {what} of each stage",
        example=example,
        read=read,
    )


VLLM = _format("vllm", "vLLM", "VLLM_PP_LAYER_PARTITION", "4,3,3,2", False)
SGLANG = _format("sglang", "SGLang", "SGLANG_PP_LAYER_PARTITION", "4,3,3,2", False)
COLOSSALAI = _format("colossalai", "ColossalAI", "num_layers_per_stage", "[4, 3, 3, 2]", False)
TORCHGPIPE = _format("torchgpipe", "torchgpipe", "balance", "[5, 3, 3, 3]", True)
