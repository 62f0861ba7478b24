"""All forwards, then all backwards (GPipe); and one microbatch at a time.

GPipe: Huang et al., NeurIPS 2019, section 2.3. With re-materialisation a device computes a forward
once more before its backward, and begins while it waits for the gradient. Naive: layers spread over
devices, one of which works at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from partopt.schedules.entry import FLUSH, Bubble, Counts, Schedule
from partopt.schedules.order import Row, spell
from partopt.schedules.placement import Place


def row(place: Place) -> Row:
    """A device's row: F0 F1 .. B0 B1 .."""
    return spell("F" * place.M + ("RB" if place.recompute else "B") * place.M)


def naive_row(place: Place) -> Row:
    """A device's row: F0 B0 F1 B1 .."""
    return spell("FB" * place.M)


def _counts(s: int, replicas: Sequence[int], microbatches: int | None) -> Counts:
    """All of the ceil(M / r_s) microbatches that the first replica gets."""
    assert microbatches is not None
    forwards = -(-microbatches // replicas[s])
    return Counts(forwards, forwards, 1)


GPIPE = Schedule(
    name="gpipe",
    summary="GPipe: all forwards, then all backwards",
    row=row,
    uneven=True,
    recomputes=True,
    counts=_counts,
    bubble=FLUSH,
    data_parallel=True,
)

NAIVE = Schedule(
    name="naive",
    summary="one microbatch at a time, one device at work",
    row=naive_row,
    uneven=True,
    one_at_a_time=True,
    counts=lambda s, replicas, M: Counts(0, 1, 1),
    bubble=Bubble("M(P-1)(F+B)", lambda P, v, M, t: M * (P - 1) * (t.F + t.B)),
)
