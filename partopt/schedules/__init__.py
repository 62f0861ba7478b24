"""Schedules: what every device does, in order. One file each, and one line in the registry here.

A schedule's file has one pure function, `row(place: Place) -> Row`: the forwards and backwards of
one device. Here they are numbered, spread over replicas, and followed by all-reduces and optimizer
steps (`partopt.schedules.assemble`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from partopt.cost.flight import warmup as usual_warmup
from partopt.errors import PartoptError, did_you_mean
from partopt.schedules.assemble import Actions, assembled, numbered, updated
from partopt.schedules.layout import (
    CHUNKS,
    LOOPED,
    MIRRORED,
    STRAIGHT,
    VEE,
    Chunk,
    Layout,
    Place,
    chunks_of,
    own_microbatches,
    ranks_of,
)
from partopt.schedules.order import Order, Row


class Schedule(NamedTuple):
    """A registered schedule: its module, what it does, in a line, and what it asks of a plan."""

    module: str
    summary: str
    shape: str = STRAIGHT  # how its stages lie on the devices
    asynchronous: bool = False  # it never flushes: there are no iterations
    split: bool = False  # its backwards are in two parts, I and W
    uneven: bool = False  # its stages may have unequal numbers of replicas
    recomputes: bool = False  # recomputation is an action of its own, R


SCHEDULES: dict[str, Schedule] = {
    "pipedream": Schedule(
        "partopt.schedules.pipedream",
        "PipeDream's 1F1B-RR: asynchronous, a weight version for every microbatch in flight",
        asynchronous=True,
        uneven=True,
    ),
    "pipedream-2bw": Schedule(
        "partopt.schedules.pipedream_2bw",
        "PipeDream-2BW: asynchronous, two weight versions",
        asynchronous=True,
        uneven=True,
    ),
    "1f1b": Schedule(
        "partopt.schedules.one_f_one_b",
        "PipeDream-flush: one forward, one backward in turn, then a flush",
        uneven=True,
    ),
    "1f1b-eager": Schedule(
        "partopt.schedules.one_f_one_b_eager",
        "1F1B with twice the warm-up, which hides the links' latency",
        uneven=True,
    ),
    "gpipe": Schedule(
        "partopt.schedules.gpipe",
        "GPipe: all forwards, then all backwards",
        uneven=True,
        recomputes=True,
    ),
    "naive": Schedule(
        "partopt.schedules.naive", "one microbatch at a time, one device at work", uneven=True
    ),
    "interleaved": Schedule(
        "partopt.schedules.interleaved",
        "1F1B over several chunks a device: a bubble as much smaller",
        LOOPED,
    ),
    "zb-h1": Schedule(
        "partopt.schedules.zb_h1",
        "1F1B with backwards in two parts: a third of its bubble",
        split=True,
    ),
    "interleaved-zb": Schedule(
        "partopt.schedules.interleaved_zb", "ZB-H1 over several chunks a device", LOOPED, split=True
    ),
    "zbv": Schedule(
        "partopt.schedules.zbv",
        "ZB-V: two chunks a device in a V, backwards in two parts, 1F1B's memory",
        VEE,
        split=True,
    ),
    "dualpipe": Schedule(
        "partopt.schedules.dualpipe",
        "DualPipe: two copies of the model, fed from both ends",
        MIRRORED,
        split=True,
    ),
    "dualpipev": Schedule(
        "partopt.schedules.dualpipev",
        "DualPipeV: DualPipe cut in half, two chunks a device in a V",
        VEE,
        split=True,
    ),
}


def schedule(name: str) -> Schedule:
    """The schedule `name`. PartoptError where there is none."""
    if name not in SCHEDULES:
        raise PartoptError(f"--schedule {name}: no such schedule", did_you_mean(name, SCHEDULES))
    return SCHEDULES[name]


def refusal(name: str, P: int, v: int, microbatches: int) -> PartoptError | None:
    """Why the schedule `name` cannot pass `microbatches` through one pipeline of P devices with v
    chunks each; None where it can.
    """
    entry = schedule(name)
    try:
        if microbatches < 1:
            raise PartoptError(f"{microbatches} microbatches are none", "choose 1 or more")
        if CHUNKS.get(entry.shape, v) != v:
            raise PartoptError(
                f"{v} chunks on each device: {name} has {CHUNKS[entry.shape]}",
                "interleaved takes any number of chunks",
            )
        layout = Layout(ranks_of(entry.shape, P, v), P, microbatches)
        _writer(entry)(
            _place(layout, chunks_of(layout, entry.shape)[0], [0] * len(layout.ranks), entry.shape)
        )
    except PartoptError as error:
        return error
    return None


def _writer(entry: Schedule) -> Callable[[Place], Row]:
    write: Callable[[Place], Row] = importlib.import_module(entry.module).row
    return write


def order(name: str, layout: Layout) -> Order:
    """What every rank does under the schedule `name`.

    Raises PartoptError where the stages do not lie as it needs them, or the number of microbatches
    is none that it can run.
    """
    entry = schedule(name)
    write = lru_cache(maxsize=None)(_writer(entry))
    held = chunks_of(layout, entry.shape, entry.uneven)
    warmup = layout.warmup
    if warmup is None:
        warmup = _usual_warmups(name, layout)
    rows: list[Actions | None] = [None] * layout.devices
    for rank, chunks in held.items():
        row = write(_place(layout, chunks, warmup, entry.shape))
        rows[rank] = updated(numbered(row, chunks, layout), chunks, layout, entry.asynchronous)
    return assembled(rows)


def _usual_warmups(name: str, layout: Layout) -> Sequence[int]:
    """Forwards before the first backward of each stage; schedules of several chunks a device have
    their own.
    """
    if schedule(name).shape != STRAIGHT:
        return [0] * len(layout.ranks)
    return [
        usual_warmup(name, s, layout.replicas, layout.microbatches)
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
            f"choose a multiple of {r}",
        )
    stage = chunks[0].stage
    recompute = bool(layout.recompute) and layout.recompute[stage]
    return Place(
        stage, S if shape == MIRRORED else S // v, v, counts.pop(), warmup[stage], recompute
    )
