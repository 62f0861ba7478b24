"""Schedules: what every device does, in order. Siblings share a file; one registry line each.

A schedule's file has a pure function, `row(place: Place) -> Row`, the forwards and backwards of one
device, and an entry with every fact about it (`partopt.schedules.entry`). Here the actions of rows
are numbered, spread over replicas, and followed by all-reduces and optimizer steps
(`partopt.schedules.assemble`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError
from partopt.registry import Registry
from partopt.schedules.assemble import row_of, write_rows
from partopt.schedules.entry import Replicas, Schedule
from partopt.schedules.order import Order
from partopt.schedules.placement import (
    CHUNKS,
    MIRRORED,
    STRAIGHT,
    Chunks,
    Place,
    Placement,
    chunks_of,
    ranks_of,
)

SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    Schedule,
    {
        "pipedream": "partopt.schedules.one_f_one_b:PIPEDREAM",
        "pipedream-2bw": "partopt.schedules.one_f_one_b:PIPEDREAM_2BW",
        "1f1b": "partopt.schedules.one_f_one_b:ONE_F_ONE_B",
        "1f1b-eager": "partopt.schedules.one_f_one_b:EAGER",
        "gpipe": "partopt.schedules.gpipe:GPIPE",
        "naive": "partopt.schedules.gpipe:NAIVE",
        "interleaved": "partopt.schedules.interleaved:INTERLEAVED",
        "zb-h1": "partopt.schedules.zero_bubble:ZB_H1",
        "interleaved-zb": "partopt.schedules.interleaved:INTERLEAVED_ZB",
        "zbv": "partopt.schedules.zero_bubble:ZBV",
        "dualpipe": "partopt.schedules.dualpipe:DUALPIPE",
        "dualpipev": "partopt.schedules.dualpipe:DUALPIPEV",
    },
)

ROW_LIMIT = 10_000_000  # microbatches times chunks of a device
ACTION_LIMIT = 20_000_000  # of one order: to simulate it takes some 2 GB and half a minute


def schedule(name: str) -> Schedule:
    """The schedule `name`. PartoptError where there is none."""
    return SCHEDULES.lookup(name)


def rank(name: str, stages: int) -> int:
    """The place of a schedule among all, the simplest first; 0 of one stage: data parallelism.

    They stand in that order: one stage on a device, several, forwards and backwards in parts, two
    ways at once.
    """
    return 0 if stages == 1 else 1 + list(SCHEDULES).index(name)


def refusal(name: str, P: int, v: int, microbatches: int) -> PartoptError | None:
    """Why the schedule `name` cannot pass `microbatches` through a pipeline; None where it can.

    It is one pipeline of P devices with v chunks a device.
    """
    entry = schedule(name)
    try:
        if microbatches < 1:
            raise PartoptError(
                f"`microbatches={microbatches}`: must be at least 1",
                "use `microbatches=1` or more",
                code="too-few-microbatches",
            )
        if microbatches * v > ROW_LIMIT:
            raise PartoptError(
                f"`microbatches={microbatches}`: more than a device's order can hold",
                f"use `microbatches={ROW_LIMIT // v}` or fewer",
                code="too-many-actions",
                limit=ROW_LIMIT // v,
            )
        if CHUNKS.get(entry.shape, v) != v:
            raise PartoptError(
                f"`chunks={v}`: {name} puts {CHUNKS[entry.shape]} on each device",
                "interleaved takes any number of chunks",
                code="wrong-chunks",
            )
        placement = Placement(ranks_of(entry.shape, P, v), P, microbatches)
        chunks, v = chunks_of(placement, entry.shape)
        places, which, _ = _places(placement, chunks, v, [0] * P * v, entry.shape)
        entry.row(places[which[0]])
    except PartoptError as error:
        return error
    return None


def order(name: str, placement: Placement) -> Order:
    """What every rank does under the schedule `name`.

    Raises PartoptError where the stages do not lie as it needs them, it cannot run that number of
    microbatches, or there are too many actions.
    """
    entry, M = schedule(name), placement.microbatches
    if 2 * len(placement.ranks) * M > ACTION_LIMIT:
        raise PartoptError(
            f"{M} microbatches are more than {ACTION_LIMIT:,} actions to simulate",
            "give fewer `microbatches`",
            code="too-many-actions",
            limit=ACTION_LIMIT,
        )
    chunks, v = chunks_of(placement, entry.shape, entry.uneven)
    warmup = _warmups(entry, placement)
    places, which, first = _places(placement, chunks, v, warmup, entry.shape)
    rows = []
    for place, stages in zip(places, chunks.stage.reshape(-1, v)[first].tolist(), strict=True):
        rounds = M // len(placement.ranks[place.p]) if entry.asynchronous else None
        rows.append(row_of(entry, place, tuple(map(placement.exchanges, stages)), rounds))
    return write_rows(rows, which, chunks, placement)


def _warmups(entry: Schedule, placement: Placement) -> Sequence[int]:
    """Forwards before the first backward of every stage: the stated ones, else the usual.

    They are 0 for several stages on a device: the rows of such schedules know theirs. Raises
    PartoptError where the placement states another warm-up than that of a schedule that has one.
    """
    if entry.shape != STRAIGHT:
        return [0] * len(placement.ranks)
    if placement.warmup is not None and entry.takes_warmup:
        return placement.warmup
    replicas = Replicas(placement.replicas)
    M = placement.microbatches
    usual = [entry.counts(s, replicas, M).warmup for s in range(len(replicas))]
    for s, stated in enumerate(usual if placement.warmup is None else placement.warmup):
        last = -(-M // replicas[s]) - 1  # its forward comes first in any case
        if min(stated, last) != min(usual[s], last):
            free = ", ".join(name for name, other in SCHEDULES.items() if other.takes_warmup)
            raise PartoptError(
                f"stage {s} does {stated} forwards first; under {entry.name} it does {usual[s]}",
                f"re-run `solve`; schedules whose warm-up is free: {free}",
                code="other-warmup",
            )
    return usual


def _places(
    placement: Placement, chunks: Chunks, v: int, warmup: Sequence[int], shape: str
) -> tuple[list[Place], NDArray[np.int64], NDArray[np.int64]]:
    """The places that differ, the place of every rank with work, and the first rank of every place.

    All chunks of a device must get equally many microbatches.
    """
    S, M = len(placement.ranks), placement.microbatches
    replicas = np.array(placement.replicas)
    # the first M mod r replicas get one microbatch more than the others
    fewer = (chunks.k >= M % replicas[chunks.stage]).reshape(-1, v)
    if (fewer != fewer[:, :1]).any():
        r = len(placement.ranks[0])
        raise PartoptError(
            f"{M} microbatches do not divide among {r} replicas",
            f"use a multiple of {r} microbatches",
            code="microbatches-not-divisible",
        )
    keys, first, which = np.unique(
        2 * chunks.stage[::v].astype(np.int64) + fewer[:, 0],
        return_index=True,
        return_inverse=True,
    )
    places = [
        Place(
            stage,
            S if shape == MIRRORED else S // v,
            v,
            M // len(placement.ranks[stage]) + 1 - less,
            warmup[stage],
            bool(placement.recompute) and placement.recompute[stage],
        )
        for stage, less in (divmod(key, 2) for key in keys.tolist())
    ]
    return places, which, first
