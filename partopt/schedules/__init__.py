"""Schedules: what every device does, in order. One file each, and one line in the registry here.

A schedule's file has a pure function, `row(place: Place) -> Row`, the forwards and backwards of one
device, and an entry, `SCHEDULE`, with every fact about it (`partopt.schedules.entry`). Here the
actions of rows are numbered, spread over replicas, and followed by all-reduces and optimizer steps
(`partopt.schedules.assemble`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from partopt.errors import PartoptError
from partopt.registry import Registry
from partopt.schedules.assemble import (
    Actions,
    add_updates,
    assemble,
    number_microbatches,
    shift_microbatches,
)
from partopt.schedules.entry import Schedule, StageCounts
from partopt.schedules.layout import (
    CHUNKS,
    MIRRORED,
    Chunk,
    Layout,
    Place,
    chunks_of,
    own_microbatches,
    ranks_of,
)
from partopt.schedules.order import Order

SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    Schedule,
    {
        "pipedream": "partopt.schedules.pipedream:SCHEDULE",
        "pipedream-2bw": "partopt.schedules.pipedream_2bw:SCHEDULE",
        "1f1b": "partopt.schedules.one_f_one_b:SCHEDULE",
        "1f1b-eager": "partopt.schedules.one_f_one_b_eager:SCHEDULE",
        "gpipe": "partopt.schedules.gpipe:SCHEDULE",
        "naive": "partopt.schedules.naive:SCHEDULE",
        "zb-h1": "partopt.schedules.zb_h1:SCHEDULE",
        "interleaved": "partopt.schedules.interleaved:SCHEDULE",
        "interleaved-zb": "partopt.schedules.interleaved_zb:SCHEDULE",
        "zbv": "partopt.schedules.zbv:SCHEDULE",
        "dualpipe": "partopt.schedules.dualpipe:SCHEDULE",
        "dualpipev": "partopt.schedules.dualpipev:SCHEDULE",
    },
)


def schedule(name: str) -> Schedule:
    """The schedule `name`. PartoptError where there is none."""
    return SCHEDULES.lookup(name)


def refusal(name: str, P: int, v: int, microbatches: int) -> PartoptError | None:
    """Why the schedule `name` cannot pass `microbatches` through a pipeline; None where it can.

    It is one pipeline of P devices with v chunks each.
    """
    entry = schedule(name)
    try:
        if microbatches < 1:
            raise PartoptError(
                f"`microbatches={microbatches}`: must be at least 1",
                "use `microbatches=1` or more",
                code="too-few-microbatches",
                microbatches=microbatches,
                minimum=1,
            )
        if CHUNKS.get(entry.shape, v) != v:
            raise PartoptError(
                f"`chunks={v}`: {name} puts {CHUNKS[entry.shape]} on each device",
                "interleaved takes any number of chunks",
                code="wrong-chunks",
                schedule=name,
                chunks=v,
                needed=CHUNKS[entry.shape],
            )
        layout = Layout(ranks_of(entry.shape, P, v), P, microbatches)
        entry.row(
            _place(layout, chunks_of(layout, entry.shape)[0], [0] * len(layout.ranks), entry.shape)
        )
    except PartoptError as error:
        return error
    return None


def order(name: str, layout: Layout) -> Order:
    """What every rank does under the schedule `name`.

    Raises PartoptError where the stages do not lie as it needs them, or it cannot run that number
    of microbatches.
    """
    entry = schedule(name)
    row_of = lru_cache(maxsize=None)(entry.row)
    held = chunks_of(layout, entry.shape, entry.uneven)
    warmup = layout.warmup
    if warmup is None:
        warmup = _usual_warmups(entry, layout)
    rows: list[Actions | None] = [None] * layout.devices
    # what the first of several replicas does; the others do the same with other microbatches
    alike: dict[object, tuple[int, Actions]] = {}
    for rank, chunks in held.items():
        place, k = _place(layout, chunks, warmup, entry.shape), chunks[0].k
        key = place, tuple((stage, other - k) for stage, other in chunks)
        if key in alike:
            first, actions = alike[key]
            rows[rank] = shift_microbatches(actions, k - first)
            continue
        actions = number_microbatches(row_of(place), chunks, layout)
        actions = add_updates(actions, chunks, layout, entry.asynchronous)
        rows[rank] = actions
        alike[key] = k, actions
    return assemble(rows)


def _usual_warmups(entry: Schedule, layout: Layout) -> Sequence[int]:
    """Forwards before the first backward of each stage.

    They are 0 for several stages on a device: the rows of such schedules know their own.
    """
    if not isinstance(entry.counts, StageCounts):
        return [0] * len(layout.ranks)
    return [
        entry.counts.warmup(s, layout.replicas, layout.microbatches)
        for s in range(len(layout.ranks))
    ]


def _place(layout: Layout, chunks: Sequence[Chunk], warmup: Sequence[int], shape: str) -> Place:
    """The place of the device that holds `chunks`, which must all get equally many microbatches."""
    S, v = len(layout.ranks), len(chunks)
    counts = {
        own_microbatches(layout.microbatches, len(layout.ranks[stage]), k) for stage, k in chunks
    }
    if len(counts) > 1:
        r = len(layout.ranks[chunks[0].stage])
        raise PartoptError(
            f"{layout.microbatches} microbatches do not divide among {r} replicas",
            f"use a multiple of {r} microbatches",
            code="microbatches-not-divisible",
            microbatches=layout.microbatches,
            replicas=r,
        )
    stage = chunks[0].stage
    recompute = bool(layout.recompute) and layout.recompute[stage]
    return Place(
        stage, S if shape == MIRRORED else S // v, v, counts.pop(), warmup[stage], recompute
    )
