"""Two profiles side by side: what each layer takes in both, and where the bytes differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from msgspec.structs import replace

from partopt.documents.difference import Difference, LayerDifference, LayerSide, Side
from partopt.printable import shorten, without_numbers
from partopt.report.basis import basis_of_several
from partopt.report.layer_rows import LayerRows, choose_rows, every_row, layer_table, legend
from partopt.report.table import label_lines, paragraph, table
from partopt.report.width import stretch
from partopt.units import format_bytes, format_seconds

_MARKED = 3  # rows of the largest change
_NAMED = 20  # layers that are in one profile only
_LEAST = 0.01  # of the first total: a smaller change of a layer is not marked
_HEADINGS = ["#", "LAYER", "FIRST", "SHARE", "SECOND", "SHARE", "RATIO", ""]
_BYTES = ["LAYER", "BYTES OF", "FIRST", "SECOND"]
_LEGEND = "RATIO: second over first. 1 to 3: the rows of the largest changes over 1% of the first."


def render(
    difference: Difference, all_layers: bool = False, spell: Callable[[str], str] = str
) -> str:
    """The profiles, their layers in order, the largest changes marked, and bytes that differ.

    Layers and blocks that repeat in both are shown once, and of very many rows the first and the
    last; each layer has a row with `all_layers`, an option that is written as `spell` does.
    """
    rows = every_row(len(difference.layers))
    if not all_layers:
        rows = choose_rows([_alike(layer) for layer in difference.layers])
    sides = {"first": difference.first, "second": difference.second}
    head = label_lines(
        [
            *((which, _describe(side)) for which, side in sides.items()),
            ("at", f"microbatch {difference.microbatch_size}: forward and backward"),
            *basis_of_several([(which, side.estimated) for which, side in sides.items()]),
        ]
    )
    notes = [_LEGEND, *legend(rows, spell)]
    parts = [head, _layers(difference, rows), *map(paragraph, notes)]
    alone = [*_alone(difference, "first"), *_alone(difference, "second")]
    if alone:
        parts.append(label_lines(alone))
    if found := _byte_rows(difference, rows):
        parts.append(table(_BYTES, found, left=(0, 1)))
    return "\n\n".join(parts)


def _describe(side: Side) -> str:
    compiled = ", compiled" if side.compiled else ""
    return f"{side.name}: {side.model}, {side.layers} layers, {side.device}, {side.dtype}{compiled}"


def _alike(layer: LayerDifference) -> Hashable:
    """Equal for layers that differ in nothing but numbers in their names."""
    sides = [side and replace(side, index=0) for side in (layer.first, layer.second)]
    return (without_numbers(layer.name), layer.type, *sides)


def _layers(difference: Difference, rows: LayerRows) -> str:
    first, second = difference.first.seconds_s, difference.second.seconds_s
    marks = _marks(difference, rows)

    def cells(place: int) -> list[str]:
        layer = difference.layers[place]
        return [
            shorten(_name(layer), stretch(18)),
            *_cells(layer.first, first),
            *_cells(layer.second, second),
            _ratio(layer.ratio),
            marks.get(place, ""),
        ]

    ratio = _ratio(second / first if first else None)
    whole = ["", "all", format_seconds(first), "", format_seconds(second), "", ratio, ""]
    return layer_table(rows, _HEADINGS, cells, left=(1,), spare=(3, 5), below=[whole])


def _cells(side: LayerSide | None, total_s: float) -> list[str]:
    if side is None:
        return ["-", "-"]
    share = side.seconds_s / total_s if total_s else 0.0
    return [format_seconds(side.seconds_s), f"{share:.1%}"]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0e}"


def _name(layer: LayerDifference) -> str:
    return layer.name + (f" #{layer.call}" if layer.call else "")


def _marks(difference: Difference, rows: LayerRows) -> dict[int, str]:
    """1, 2, 3 at the layers of the rows of the largest changes in seconds."""
    changes = {
        place: times * abs(layer.second.seconds_s - layer.first.seconds_s)
        for place, times in rows.layers
        if (layer := difference.layers[place]).first and layer.second
    }
    largest = sorted(changes, key=lambda place: -changes[place])[:_MARKED]
    least = _LEAST * difference.first.seconds_s
    return {
        place: str(rank)
        for rank, place in enumerate(largest, start=1)
        if changes[place] >= least and changes[place]
    }


def _alone(difference: Difference, own: str) -> list[tuple[str, str]]:
    other = {"first": "second", "second": "first"}[own]
    names = [_name(layer) for layer in difference.layers if getattr(layer, other) is None]
    if len(names) > _NAMED:
        names[_NAMED:] = [f"and {len(names) - _NAMED} more"]
    return [("only in", f"the {own}: {', '.join(names)}")] if names else []


def _byte_rows(difference: Difference, rows: LayerRows) -> list[list[str]]:
    """Bytes that differ, of all and of the layers in both that have a row."""
    one, two = difference.first, difference.second
    found = [
        ("all", "parameters", one.parameter_bytes, two.parameter_bytes),
        ("all", "kept for the backward", one.stash_bytes, two.stash_bytes),
    ]
    for place, times in rows.layers:
        layer = difference.layers[place]
        if (own := layer.first) and (other := layer.second):
            name = _name(layer) + (f" x{times}" if times > 1 else "")
            found.append((name, "parameters", own.parameter_bytes, other.parameter_bytes))
            found.append((name, "output", own.output_bytes, other.output_bytes))
    return [
        [shorten(name, stretch(24)), what, format_bytes(first), format_bytes(second)]
        for name, what, first, second in found
        if first != second
    ]
