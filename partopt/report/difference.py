"""Two profiles side by side: what each layer takes in both, and where the bytes differ."""

from __future__ import annotations

from partopt.documents.difference import Difference, LayerDifference, LayerSide, Side
from partopt.printable import shorten
from partopt.report.basis import basis_of_several
from partopt.report.table import label_lines, paragraph, table
from partopt.report.width import stretch
from partopt.units import format_bytes, format_seconds

_MARKED = 3  # layers of the largest change
_LEAST = 0.01  # of the first total: a smaller change of a layer is not marked
_HEADINGS = ["#", "LAYER", "FIRST", "SHARE", "SECOND", "SHARE", "RATIO", ""]
_BYTES = ["LAYER", "BYTES OF", "FIRST", "SECOND"]
_LEGEND = "RATIO: second over first. 1 to 3: the largest changes over 1% of the first."


def render(difference: Difference) -> str:
    """The profiles, their layers in order, the largest changes marked, and bytes that differ."""
    sides = {"first": difference.first, "second": difference.second}
    head = label_lines(
        [
            *((which, _describe(side)) for which, side in sides.items()),
            ("at", f"microbatch {difference.microbatch_size}: forward and backward"),
            *basis_of_several([(which, side.estimated) for which, side in sides.items()]),
        ]
    )
    parts = [head, _layers(difference), paragraph(_LEGEND)]
    alone = [*_alone(difference, "first"), *_alone(difference, "second")]
    if alone:
        parts.append(label_lines(alone))
    if rows := _byte_rows(difference):
        parts.append(table(_BYTES, rows, left=(0, 1)))
    return "\n\n".join(parts)


def _describe(side: Side) -> str:
    compiled = ", compiled" if side.compiled else ""
    return f"{side.name}: {side.model}, {side.layers} layers, {side.device}, {side.dtype}{compiled}"


def _layers(difference: Difference) -> str:
    first, second = difference.first.seconds_s, difference.second.seconds_s
    marks = _marks(difference)
    rows = [
        [
            str(index),
            shorten(_name(layer), stretch(18)),
            *_cells(layer.first, first),
            *_cells(layer.second, second),
            _ratio(layer.ratio),
            marks.get(index, ""),
        ]
        for index, layer in enumerate(difference.layers)
    ]
    ratio = _ratio(second / first if first else None)
    rows.append(["", "all", format_seconds(first), "", format_seconds(second), "", ratio, ""])
    return table(_HEADINGS, rows, left=(1,), spare=(3, 5))


def _cells(side: LayerSide | None, total_s: float) -> list[str]:
    if side is None:
        return ["-", "-"]
    share = side.seconds_s / total_s if total_s else 0.0
    return [format_seconds(side.seconds_s), f"{share:.1%}"]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0e}"


def _name(layer: LayerDifference) -> str:
    return layer.name + (f" #{layer.call}" if layer.call else "")


def _marks(difference: Difference) -> dict[int, str]:
    """1, 2, 3 at the layers of the largest changes in seconds."""
    changes = {
        index: abs(layer.second.seconds_s - layer.first.seconds_s)
        for index, layer in enumerate(difference.layers)
        if layer.first and layer.second
    }
    largest = sorted(changes, key=lambda index: -changes[index])[:_MARKED]
    least = _LEAST * difference.first.seconds_s
    return {
        index: str(rank)
        for rank, index in enumerate(largest, start=1)
        if changes[index] >= least and changes[index]
    }


def _alone(difference: Difference, own: str) -> list[tuple[str, str]]:
    other = {"first": "second", "second": "first"}[own]
    names = [_name(layer) for layer in difference.layers if getattr(layer, other) is None]
    return [("only in", f"the {own}: {', '.join(names)}")] if names else []


def _byte_rows(difference: Difference) -> list[list[str]]:
    """Bytes that differ, of the layers in both and of all."""
    one, two = difference.first, difference.second
    found = [
        ("all", "parameters", one.parameter_bytes, two.parameter_bytes),
        ("all", "kept for the backward", one.stash_bytes, two.stash_bytes),
    ]
    for layer in difference.layers:
        if (own := layer.first) and (other := layer.second):
            name = _name(layer)
            found.append((name, "parameters", own.parameter_bytes, other.parameter_bytes))
            found.append((name, "output", own.output_bytes, other.output_bytes))
    return [
        [shorten(name, stretch(24)), what, format_bytes(first), format_bytes(second)]
        for name, what, first, second in found
        if first != second
    ]
