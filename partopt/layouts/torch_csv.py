"""An order alone, as `torch.distributed.pipelining` reads it: which schedule it is.

A plan has a schedule by name. An order that is none of them can be simulated, not planned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from partopt.errors import PartoptError
from partopt.exporters.blocks import Part
from partopt.layouts.trainer_layout import KnownOrder, LayoutFormat, Reading
from partopt.schedules import SCHEDULES, order
from partopt.schedules.entry import Schedule
from partopt.schedules.layout import MIRRORED, Layout, ranks_of
from partopt.schedules.torch_csv import to_csv

_MOST = 1_000_000  # microbatches times stages of an order
_FORWARD = re.compile(r"\(?([0-9]{1,7})F[0-9]")
_ACTION = re.compile(r"([0-9]{1,7})[FBIW]([0-9]{1,7})")

# S, P, M   stages, devices and microbatches of the one pipeline that the file is of


def read(text: str, layers: Sequence[str], parts: Sequence[Part]) -> Reading:
    """P and the order; where the stages begin is not in the file."""
    rows = _rows(text)
    actions = _ACTION.findall(text)
    if not actions:
        raise PartoptError(
            "no actions",
            "a cell is a stage, one of F B I W and a microbatch, like 2F0",
            code="malformed-layout",
        )
    P, S, M = len(rows), *(max(int(each[i]) for each in actions) + 1 for i in (0, 1))
    if S * M > _MOST:
        raise PartoptError(
            f"{S} stages and {M} microbatches: more than {_MOST:,} forwards",
            "give an order of fewer microbatches",
            code="too-many-actions",
        )
    for entry, warmups in _candidates(rows, S):
        if _is_order_of(entry, rows, S, M, warmups):
            return Reading(None, P, entry.name, KnownOrder(S, M, warmups))
    raise PartoptError(
        f"the order of {S} stages on {P} devices is that of no schedule of partopt",
        "plan the stages under a schedule that places them alike, then `simulate` the plan with "
        "`schedule=FILE`",
        code="unknown-order",
    )


def _rows(text: str) -> list[list[str]]:
    """The cells of each device that are not empty."""
    lines = text.rstrip().splitlines()
    return [[cell.strip() for cell in line.split(",") if cell.strip()] for line in lines]


def _candidates(
    rows: Sequence[Sequence[str]], stages: int
) -> Iterator[tuple[Schedule, list[int] | None]]:
    """Schedules with their usual warm-ups, then those that take others with those of the rows."""
    able = [each for each in SCHEDULES.values() if not each.asynchronous and each.shape != MIRRORED]
    yield from ((each, None) for each in able)
    if len(rows) == stages:
        kinds = [[_FORWARD.match(cell) is not None for cell in row] for row in rows]
        own = [(row.index(False) if False in row else len(row)) - 1 for row in kinds]
        yield from ((each, own) for each in able if each.takes_warmup)


def _is_order_of(
    entry: Schedule,
    rows: Sequence[Sequence[str]],
    S: int,
    M: int,
    warmups: Sequence[int] | None,
) -> bool:
    """Whether the rows are those of a schedule."""
    P = len(rows)
    try:
        layout = Layout(ranks_of(entry.shape, P, S // P), P, M, warmup=warmups)
        return len(layout.ranks) == S and _rows(to_csv(order(entry.name, layout), layout)) == rows
    except PartoptError:
        return False  # it cannot run so many stages or microbatches


FORMAT = LayoutFormat(
    name="torch-csv",
    summary="torch: an order for _PipelineScheduleRuntime, with the cuts beside it",
    example="order.csv",
    read=read,
)
