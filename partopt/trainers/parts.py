"""The layers of a model as trainers of transformers name them.

A trainer knows a model as an embedding, numbered blocks, a final norm, blocks that predict further
tokens where it has some, and a head. Which layer of a
plan is which is told by names and places, and by a person's rules.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partopt.errors import PartoptError, did_you_mean, unknown
from partopt.options import LAYER_KINDS

EMBEDDING, BLOCK, NORM, FURTHER, HEAD = LAYER_KINDS

_NUMBERED = re.compile(r"(?P<series>(?:.*?[._])?)(?P<number>[0-9]{1,9})(?:\..*)?")
# of layers behind the blocks; others are the head
_NORM_NAMES = re.compile(r"norm|(^|[._])ln", re.IGNORECASE)
_FURTHER_NAMES = re.compile(r"(.*[._])?mtp")


@dataclass(frozen=True)
class Part:
    """What a layer is: of which kind, and of a block its number, counted from 0."""

    kind: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if self.kind == BLOCK else self.kind


def find_parts(layers: Sequence[str], rules: Sequence[str] = ()) -> list[Part]:
    """What the `layers` are, in their order.

    The blocks are the layers of the longest series of names with a number, `h.0`, `h.1`, or with
    more behind it, `h.0.attn`. What comes before them is the embedding; behind them, names with
    `norm` or `ln` are the final norm, `mtp` predicts further tokens, the rest is the head. Each of
    the `rules` is `GLOB=KIND` and goes before that; of a block, its number is that in its series.

    Raises PartoptError for a rule that cannot be read or matches nothing, for a model without
    blocks or with several series of them, and for parts that are not in the order of a model.
    """
    stated = _read_rules(layers, rules)
    numbers = _number_blocks(layers, stated)
    first, parts = min(numbers), []
    others = [name for i, name in enumerate(layers) if stated.get(i) == BLOCK and i not in numbers]
    if others:
        what = f"`map`: {others[0]} is no block: it has no number of the series of blocks"
        raise PartoptError(what, "name others alone", code="invalid-option", option="map")
    for i, name in enumerate(layers):
        kind = NORM if _NORM_NAMES.search(name) else HEAD
        kind = FURTHER if _FURTHER_NAMES.fullmatch(name) else kind
        if stated.get(i, BLOCK) != BLOCK:
            parts.append(Part(stated[i]))
        elif i in numbers:
            parts.append(Part(BLOCK, numbers[i]))
        else:
            parts.append(Part(EMBEDDING if i < first else kind))
    _check_order(layers, parts)
    return parts


def _read_rules(layers: Sequence[str], rules: Sequence[str]) -> dict[int, str]:
    """The kinds that the rules state, by layer; the last rule that matches a layer counts."""
    found: dict[int, str] = {}
    for rule in rules:
        pattern, _, kind = rule.rpartition("=")
        if not pattern or kind not in LAYER_KINDS:
            known = did_you_mean(kind, LAYER_KINDS)
            raise PartoptError(
                f"`map={rule}`: not a rule",
                f"write GLOB=KIND, such as `map=model.final*=norm`; {known}",
                code="invalid-option",
                option="map",
            )
        matching = [i for i, name in enumerate(layers) if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise unknown(
                f"`map={rule}`: no layer has such a name",
                pattern,
                layers,
                code="no-such-layer",
                option="map",
            )
        found.update(dict.fromkeys(matching, kind))
    return found


def _number_blocks(layers: Sequence[str], stated: dict[int, str]) -> dict[int, int]:
    """The number of the block that a layer belongs to, of the layers of the one series of blocks.

    Raises PartoptError where there is none, or are several.
    """
    found: dict[str, dict[int, int]] = {}  # by series, the numbers of its layers
    for i, name in enumerate(layers):
        match = _NUMBERED.fullmatch(name)
        if match is not None and stated.get(i, BLOCK) == BLOCK:
            found.setdefault(match["series"], {})[i] = int(match["number"])
    chosen = {i for i, kind in stated.items() if kind == BLOCK}
    several = {
        series: numbers
        for series, numbers in found.items()
        if chosen & numbers.keys() or len(set(numbers.values())) > 1
    }
    if len(several) == 1:
        [numbers] = several.values()
        least = min(numbers.values())
        return {i: number - least for i, number in numbers.items()}
    if several:
        names = [f"{series}*" for series in several]
        what = f"the model has several series of blocks: {', '.join(names)}"
        blocks = max(several, key=lambda series: len(set(several[series].values())))
        rules = [
            f"`map={series}*={EMBEDDING if min(several[series]) < min(several[blocks]) else HEAD}`"
            for series in several
            if series != blocks
        ]
        how = f"say what the others are: {' '.join(rules)}"
    else:
        what = "the model has no series of blocks, layers whose names differ in a number"
        how = "say which layers are blocks: `map=transformer.h.*=block`"
    raise PartoptError(
        what, f"trainers of transformers run one series of equal blocks; {how}", code="no-blocks"
    )


def _check_order(layers: Sequence[str], parts: Sequence[Part]) -> None:
    """Refuse parts that are not embedding, blocks from 0 in turn, norm, further tokens, head."""
    places = [(LAYER_KINDS.index(part.kind), part.number) for part in parts]
    for i, (one, other) in enumerate(itertools.pairwise(places)):
        if other < one or (other[0] == 1 and other[1] > (one[1] + 1 if one[0] == 1 else 0)):
            raise PartoptError(
                f"{layers[i + 1]} ({parts[i + 1]}) comes behind {layers[i]} ({parts[i]})",
                f"a trainer runs {', '.join(LAYER_KINDS)}; name what is otherwise: "
                f"`map={layers[i + 1]}=...`",
                code="parts-out-of-order",
            )


def missing_kinds(parts: Iterable[Part]) -> list[str]:
    """What every model has and none of the parts is."""
    there = {part.kind for part in parts}
    return [kind for kind in (EMBEDDING, HEAD) if kind not in there]


def count_blocks(parts: Iterable[Part]) -> int:
    """How many blocks there are among the parts."""
    return len({part.number for part in parts if part.kind == BLOCK})


def block_bounds(parts: Sequence[Part]) -> list[int]:
    """The first layer of every block, and the layer behind the last."""
    inside = [i for i, part in enumerate(parts) if part.kind == BLOCK]
    return [*(i for i in inside if i == 0 or parts[i - 1] != parts[i]), inside[-1] + 1]


def describe(layers: Sequence[str], parts: Sequence[Part]) -> Iterator[str]:
    """Lines that say which layers are what, runs of blocks as one; none without `parts`."""
    named = list(zip(layers, parts, strict=bool(parts)))
    for kind, run in itertools.groupby(named, key=lambda pair: pair[1].kind):
        pairs = list(run)
        numbers = sorted({part.number for _, part in pairs})
        if kind == BLOCK and len(numbers) > 1:
            yield f"{pairs[0][0]} .. {pairs[-1][0]} -> blocks {numbers[0]}-{numbers[-1]}"
        else:
            yield f"{', '.join(name for name, _ in pairs)} -> {pairs[0][1]}"
