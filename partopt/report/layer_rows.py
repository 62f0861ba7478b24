"""Layers as rows of a table: what repeats once, and of very many rows the first and the last."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from partopt.report.folds import Fold, fold
from partopt.report.table import table

_MOST_ROWS = 100
_FIRST = 75  # rows of these
_LEAST_SAVED = 2  # rows, by a fold
_TIMES = 2  # the column that says how often a layer repeats


class LayerRows(NamedTuple):
    """The layer of each row, how often it repeats, and how many rows are left out after `head`."""

    layers: list[tuple[int, int]]
    head: int
    left_out: int

    @property
    def folded(self) -> bool:
        """Whether a row stands for several layers."""
        return any(times > 1 for _, times in self.layers)


def every_row(layers: int) -> LayerRows:
    """A row for each layer."""
    return LayerRows([(place, 1) for place in range(layers)], layers, 0)


def choose_rows(keys: Sequence[Hashable]) -> LayerRows:
    """Rows of layers that are alike where their `keys` are equal."""
    folds = fold(keys, _LEAST_SAVED)
    count = sum(each.length for each in folds)
    if count <= _MOST_ROWS:
        return LayerRows(list(_rows(folds)), count, 0)
    last = list(islice(_rows(folds, -1), _MOST_ROWS - _FIRST))[::-1]
    return LayerRows([*islice(_rows(folds), _FIRST), *last], _FIRST, count - _MOST_ROWS)


def _rows(folds: Sequence[Fold], step: int = 1) -> Iterator[tuple[int, int]]:
    """All rows in order or, with a `step` of -1, from the last on."""
    return ((place, own.times) for own in folds[::step] for place in own.block[::step])


def legend(rows: LayerRows, spell: Callable[[str], str]) -> Iterator[str]:
    """What is shown once, and what is not shown; options are written as `spell` does."""
    every = spell("`all_layers=True` shows each layer")
    if rows.folded:
        yield f"xN: N times, rows with the same mark in turn; {every}"
    if rows.left_out:
        yield f"{rows.left_out} rows are left out; {every}"


def layer_table(
    rows: LayerRows,
    headings: Sequence[str],
    cells: Callable[[int], Sequence[str]],
    *,
    left: Sequence[int],
    spare: Sequence[int],
    below: Sequence[Sequence[str]] = (),
) -> str:
    """A table whose first columns are the numbers of the layers and their names.

    `cells` are those of a layer from its name on, and `below` are rows without a layer, whole.
    Where layers are folded a column beside the names says how often; `left` and `spare`, as of
    `table`, do not count it.
    """
    shown = [[str(place), *cells(place)] for place, _ in rows.layers]
    if rows.left_out:
        shown.insert(rows.head, ["..", *[""] * (len(headings) - 1)])
    lines = [list(headings), *shown, *map(list, below)]
    if not rows.folded:
        return table(lines[0], lines[1:], left=left, spare=spare)
    marks = [f"x{times}" if times > 1 else "" for _, times in rows.layers]
    if rows.left_out:
        marks.insert(rows.head, "")
    for line, mark in zip(lines, ["", *marks, *[""] * len(below)], strict=True):
        line.insert(_TIMES, mark)
    left, spare = ([n + (n >= _TIMES) for n in columns] for columns in (left, spare))
    return table(lines[0], lines[1:], left=[*left, _TIMES], verdicts=[_TIMES], spare=spare)
