"""Orders as the compute-only CSV that `torch.distributed.pipelining` executes.

A row is a rank; cells read `0F0` or `(0F3;3B1)OVERLAP_F_B`. torch runs one pipeline of its process
group and adds transfers, all-reduces and updates itself. Of pipelines side by side, equal replicas
of every stage, one is written, with its numbers of ranks and microbatches: every group gets the
same file.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import KINDS, A, R, U
from partopt.errors import PartoptError
from partopt.schedules.assemble import add_updates, check, write_rows
from partopt.schedules.order import Order, Row
from partopt.schedules.placement import Placement, held_chunks

# d   pipelines side by side; pipeline k gets the microbatches g with g mod d = k

_ACTION = r"([0-9]{1,7})([FBIW])([0-9]{1,7})"
_SINGLE = re.compile(_ACTION)
_JOINED = re.compile(rf"\({_ACTION};{_ACTION}\)OVERLAP_F_B")
_HINT = (
    "a cell is empty, or a stage, one of F B I W and a microbatch, like 2F0, or "
    "(2F1;5B0)OVERLAP_F_B"
)


def to_csv(order: Order, placement: Placement) -> str:
    """The CSV of one of the placement's pipelines.

    Recomputation, all-reduces and updates are left out. Raises PartoptError where torch could not
    execute it: unequal replicas, stages on two ranks of one pipeline, or unlike pipelines.
    """
    side_by_side = pipelines(placement)
    d = len(side_by_side)
    written = ~np.isin(order.kind, (R, A, U))
    written_order = Order(
        kind=order.kind[written],
        stage=order.stage[written],
        microbatch=order.microbatch[written] // d,
        joined=order.joined[written],
        rows=np.concatenate([[0], np.cumsum(written)])[order.rows],
    )
    texts = [
        "".join(",".join(written_order.names(rank)) + "\n" for rank in ranks)
        for ranks in side_by_side
    ]
    for k, text in enumerate(texts):
        if text != texts[0]:
            raise PartoptError(
                f"pipelines 0 and {k} of {d} have different orders",
                f"torch gives every group one order: use a multiple of {d} microbatches",
                code="unlike-pipelines",
            )
    return texts[0]


def from_csv(text: str, placement: Placement, asynchronous: bool = False) -> Order:
    """The order that a CSV spells, done by all of the placement's pipelines.

    The all-reduces and updates that follow from it are added. Raises PartoptError that names row
    and cell, counted from 1, or the rank and the action that does not fit the placement.
    """
    side_by_side = pipelines(placement)
    lines = text.splitlines()
    P, d = len(side_by_side[0]), len(side_by_side)
    while len(lines) > P and not lines[-1].strip():
        lines.pop()
    if len(lines) != P:
        raise PartoptError(
            f"{len(lines)} rows for the {P} ranks of a pipeline",
            "write one row for each rank, even an empty one",
            code="wrong-rows",
        )
    local = [_parse(line, number) for number, line in enumerate(lines, start=1)]
    rows = [np.zeros((4, 0), dtype=np.int32)] * placement.devices
    for k, ranks in enumerate(side_by_side):
        for rank, row in zip(ranks, local, strict=True):
            rows[rank] = row.copy()
            rows[rank][2] = row[2] * d + k
    kind, stage, microbatch, joined = np.concatenate(rows, axis=1)
    ends = np.cumsum([0, *(row.shape[1] for row in rows)])
    check(Order(kind.astype(np.int8), stage, microbatch, joined.astype(np.bool_), ends), placement)
    chunks, rounds = held_chunks(placement), placement.microbatches // d if asynchronous else None
    first = np.searchsorted(chunks.rank, side_by_side[0])
    updated = []
    for (kind, stage, number, joined), begin in zip(local, first.tolist(), strict=True):
        held = chunks.stage[begin:][chunks.rank[begin:] == chunks.rank[begin]]
        spelled = Row(kind.astype(np.int8), np.searchsorted(held, stage), joined.astype(np.bool_))
        updated.append(add_updates(spelled, number, [*map(placement.exchanges, held)], rounds))
    which = {rank: p for ranks in side_by_side for p, rank in enumerate(ranks)}
    return write_rows(updated, np.array([which[rank] for rank in sorted(which)]), chunks, placement)


def pipelines(placement: Placement) -> list[list[int]]:
    """The ranks of every pipeline, those of its first stages first.

    PartoptError where the placement is not of pipelines side by side.
    """
    if len(set(placement.replicas)) > 1:
        raise PartoptError(
            f"torch cannot execute unequal replicas: {'-'.join(map(str, placement.replicas))}",
            "plan with `replication=uniform` or `replication=none`",
            code="unequal-replicas",
        )
    found = [
        list(dict.fromkeys(ranks[k] for ranks in placement.ranks))
        for k in range(placement.replicas[0])
    ]
    every = [rank for ranks in found for rank in ranks]
    if len(set(every)) < len(every):
        raise PartoptError(
            "torch has each stage on one rank of a pipeline; this plan has two copies of it",
            "use `schedule=dualpipev`",
            code="two-copies",
        )
    return found


def _parse(line: str, number: int) -> NDArray[np.int32]:
    """The actions of row `number` of its file, with their microbatches as they are written.

    They are kind, stage, microbatch and joined, shape (4, actions).
    """
    actions: list[tuple[int, int, int, bool]] = []
    for place, cell in enumerate(line.split(","), start=1):
        written = cell.strip()
        if not written:
            continue
        found = _SINGLE.fullmatch(written) or _JOINED.fullmatch(written)
        if found is None:
            raise PartoptError(
                f'row {number}, cell {place}: unrecognised action "{written}"',
                _HINT,
                code="unrecognised-action",
            )
        parts = found.groups()
        for n in range(0, len(parts), 3):
            joined = n + 3 < len(parts)
            actions.append((KINDS.index(parts[n + 1]), int(parts[n]), int(parts[n + 2]), joined))
    return np.array(actions, dtype=np.int32).reshape(-1, 4).T
