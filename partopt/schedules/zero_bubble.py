"""Backwards in two parts: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024.

The gradient of the inputs goes upstream at once; that of the weights waits.

- `zb-h1` (section 2.1): 1F1B whose weights' gradients wait longer on later devices and fill the
  drain. Every device holds as much as 1F1B's first: P microbatches.
- `zbv` (section 6): a V of 2P half-chunks, the "V-ZB" of "Pipeline parallelism with controllable
  memory" (NeurIPS 2024), where its memory is derived from its building block. Device p holds stages
  p and 2P-1-p, so that the last stage shares a device with the first. A microbatch that has come
  back up the V is taken through its backward at once. With F = I = W and M >= 2P a device waits
  only until its first microbatch comes, and after its last.
"""

from __future__ import annotations

from collections.abc import Sequence

from partopt.schedules.entry import FILLED_DRAIN, Bubble, Counts, Schedule
from partopt.schedules.one_f_one_b import delay_weights, downstream
from partopt.schedules.order import Row, microbatch_numbers, spell
from partopt.schedules.placement import VEE, Place


def row(place: Place) -> Row:
    """A device's row: 1F1B's with I for B, and every W p backwards after its I."""
    return spell(delay_weights("F" * min(place.P - 1 - place.p, place.M), place.M, place.p))


def vee_row(place: Place) -> Row:
    """A device's row. Of fewer than 2P-1 microbatches it is what a row of 2P-1 does with those."""
    p, P, M = place.p, place.P, max(place.M, 2 * place.P - 1)
    whole = spell(
        "F" * (2 * (P - p) - 1)
        + "fF" * p
        + "fiw" * (P - p)
        + "FIWfiw" * (M - 2 * P + p + 1)
        + "IWfiw" * (P - p - 1)
        + "Ii" * p
        + "IW" * (P - p)
        + "w" * p
        + "W" * p
    )
    kept = microbatch_numbers(whole) < place.M
    return Row(whole.kind[kept], whole.chunk[kept], whole.joined[kept])


def _counts(s: int, replicas: Sequence[int], microbatches: int | None) -> Counts:
    """As many Ws are behind their Is as there are devices before a stage."""
    assert microbatches is not None
    forwards = -(-microbatches // replicas[s])
    warmup = downstream(1)(s, replicas, microbatches).warmup
    return Counts(warmup, min(forwards, len(replicas)), min(forwards, s + 1))


ZB_H1 = Schedule(
    name="zb-h1",
    summary="1F1B with backwards in two parts: a third of its bubble",
    row=row,
    split=True,
    repeats=True,
    counts=_counts,
    bubble=FILLED_DRAIN,
)

ZBV = Schedule(
    name="zbv",
    summary="ZB-V: two chunks a device in a V, backwards in two parts, 1F1B's memory",
    row=vee_row,
    shape=VEE,
    split=True,
    in_flight=lambda p, P, v, M: min(2 * M, M + 1 + p, 2 * P),
    bubble=Bubble(
        "(P-1)(F+I-W)",
        FILLED_DRAIN.of,
        "M >= 2P and F = I = W",
        lambda P, v, M, t: M >= 2 * P and t.F == t.I == t.W,
    ),
)
