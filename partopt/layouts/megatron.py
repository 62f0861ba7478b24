"""Megatron-LM's layout (Megatron Core's `PipelineParallelLayerLayout`), and Megatron Bridge's.

Text: a segment for each stage, `|` between them; `E` is the embedding, `t` a block, `L` final norm,
head and loss; `t*4` and `(tt|)*29` repeat, commas mean nothing. Or a list of lists of names. With P
devices segment i is on device i mod P.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from partopt.errors import PartoptError
from partopt.exporters.blocks import BLOCK, EMBEDDING, HEAD, NORM, Part
from partopt.layouts.counts import blocks_in, check_count
from partopt.layouts.literals import find_value, read_literal
from partopt.layouts.trainer_layout import LayoutFormat, Reading

_LAYOUT, _SIZE = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"
_EXAMPLE = "Et*4|t*3|t*3|t*2L"
_BARE = re.compile(r"[A-Za-z0-9|(),*]+")
# what is repeated: first groups, then letters
_REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})")
_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}  # of names in lists
_SHOWN = 60  # letters of a layout in a message
_MOST = 1_000_000  # letters of a layout that is written out


def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """The cuts before the first layer of every segment but the first."""
    own, size = text.strip(), None
    value: object = own
    if not _BARE.fullmatch(own):
        value, size = read_literal(own), _number(find_value(text, _SIZE))
        value = find_value(text, _LAYOUT) if value is None else value
    segments = _segments(value)
    _check(segments, parts)
    cuts: list[int] = []
    blocks = 0
    for segment in segments[:-1]:
        blocks += segment.count("t")
        last = blocks == blocks_in(parts)
        cuts.append(_head(parts) if last else parts.index(Part(BLOCK, blocks)))
    return Reading(cuts, size)


def _segments(value: object) -> list[str]:
    """The letters of each stage."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]  # the word of a script
    if isinstance(value, str):
        return _unroll(value).split("|")
    if isinstance(value, list) and all(isinstance(row, list) for row in value):
        return ["".join(_letter(name) for name in row) for row in value]
    said = f"{_LAYOUT} is {value!r}" if value is not None else f"no layout, and no {_LAYOUT}"
    raise PartoptError(said, f"write {_EXAMPLE}", code="malformed-layout")


def _unroll(text: str) -> str:
    """A layout with what is repeated written out."""
    written = text.replace(",", "")
    for repeated in _REPEATED:
        matches = repeated.findall(written)
        if sum(len(what) * int(times) for what, times in matches) > _MOST:
            raise PartoptError(
                f"{text[:_SHOWN]!r}: more than {_MOST:,} letters",
                "check what is repeated",
                code="malformed-layout",
            )
        written = repeated.sub(lambda match: match[1] * int(match[2]), written)
    return written


def _letter(name: object) -> str:
    """The letter of a name of a list, or the name itself where there is none."""
    text = str(name).strip().lower()
    return _LETTERS.get(text, f"<{text}>")


def _check(segments: Sequence[str], parts: Sequence[Part]) -> None:
    """Raise PartoptError unless the segments are those of a model whose layers are `parts`."""
    letters = "".join(segments)
    for s, segment in enumerate(segments):
        if not segment:
            raise PartoptError(
                f"segment {s} is empty: Megatron runs a stage without layers, partopt has none",
                "leave the segment out, or move layers to it",
                code="empty-stage",
                stage=s,
            )
    if "m" in letters:
        raise PartoptError(
            "`m`: layers of multi-token prediction are in no profile",
            "leave them out, and count their time with the head: they stand before it",
            code="unsupported-layout",
        )
    unknown = re.sub(r"[EtL]", "", letters)
    if unknown:
        raise PartoptError(
            f"unknown: {unknown[:_SHOWN]}",
            "E is the embedding, t a block, L the head with the loss; (tt|)*29 is repeated",
            code="malformed-layout",
        )
    if not re.fullmatch(r"Et*L", letters):
        raise PartoptError(
            "a layout begins with its one E, and ends with its one L",
            f"write {_EXAMPLE}",
            code="malformed-layout",
        )
    _check_model(letters, parts)


def _check_model(letters: str, parts: Sequence[Part]) -> None:
    """Raise PartoptError unless a profile has embedding, head and as many blocks."""
    kinds = {part.kind for part in parts}
    for kind in (EMBEDDING, HEAD):
        if kind not in kinds:
            raise PartoptError(
                f"the profile has no {kind}",
                f"say which layers it is: `map=NAME={kind}`",
                code="other-layers",
                kind=kind,
            )
    check_count(letters.count("t"), "blocks", blocks_in(parts))


def _head(parts: Sequence[Part]) -> int:
    """The first layer of final norm and head, which are one there."""
    return next(i for i, part in enumerate(parts) if part.kind in (NORM, HEAD))


def _number(value: object) -> int | None:
    """A whole number from a program or a script; None where it is none."""
    word = str(value[0] if isinstance(value, list) and value else value)
    return int(word) if re.fullmatch(r"[1-9][0-9]{0,8}", word) else None


MEGATRON = LayoutFormat(
    name="megatron",
    summary="Megatron-LM: the layout of its pipeline, or a script that has it",
    example=_EXAMPLE,
    read=read,
)
BRIDGE = LayoutFormat(
    name="megatron-bridge",
    summary="Megatron Bridge, NeMo: pipeline_model_parallel_layout, text or lists",
    example='[["embedding", "decoder"], ["decoder", "loss"]]',
    read=read,
)
