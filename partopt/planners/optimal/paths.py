"""The first stages of pipelines, one choice after the other: layers, recomputation, place.

A prefix is given up where it exceeds T: by the terms of its last stage, by those of
`partopt.cost.together`, or by what its messages keep ports busy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.deadline import work_in_layers_s
from partopt.cost.kernels import Layers, last_exchange_s, most_in_flight, stage_cost, step_s
from partopt.cost.links import Network, wait_s
from partopt.cost.together import end_s
from partopt.planners.optimal.places import Places
from partopt.planners.optimal.traffic import Traffic, carries, traffic_of

# [i, j)  a stage on a place with r replicas
# d       stages before it


STEPS = 32


class Searched(NamedTuple):
    """What the search knows of a problem."""

    layers: Layers
    places: Places
    network: Network
    alike: bool  # all stages have equally many replicas
    holds_all: bool  # a replica holds all of its microbatches
    # which stages are in time, shape (N+1, N+1, 2, P+1), by their start, stop, mode and replicas
    in_time: NDArray[np.bool_]
    # that the layers from each cut on take at the least, where messages of so many `step` came
    # before them, shape (STEPS, N+1)
    devices: NDArray[np.int64]
    step: NDArray[np.float64]  # s, shape (1,)


class Path(NamedTuple):
    """The stages of a pipeline in the making; entry d is of the stage with d before it."""

    start: NDArray[np.int64]  # shape (P + 2,), as all that follow
    stop: NDArray[np.int64]
    mode: NDArray[np.int64]
    place: NDArray[np.int64]
    option: NDArray[np.int64]  # the position of the place among those that may follow
    fewest: NDArray[np.int64]  # microbatches that fit, the least of all stages so far
    messages: NDArray[np.float64]  # seconds of those over cuts before the stage
    updates: NDArray[np.float64]  # seconds from its last gradient on, for the stages before
    traffic: Traffic
    depth: NDArray[np.int64]  # stages before the one that is chosen, shape (1,)


def path_of(S: int, ports: int) -> Path:
    """A path with room for S stages."""
    counts, seconds = (np.zeros((6, S + 1), dtype=kind) for kind in (np.int64, np.float64))
    kept = dict(zip(Path._fields, [*counts, *seconds[:2]], strict=False))
    return Path(**kept, traffic=traffic_of(S, ports), depth=np.zeros(1, dtype=np.int64))


@compiled()
def open_choice(searched, path, d):  # type: ignore[no-untyped-def]
    """Begin with the first choice of a stage; with none where nothing may stand there."""
    places, layers = searched.places, searched.layers
    before = path.place[d - 1] if d else len(places.replicas)
    path.option[d], path.mode[d] = places.first[before], layers.first_mode
    path.stop[d] = path.start[d] + 1
    if places.first[before] == places.first[before + 1]:
        path.stop[d] = len(layers.cuts)


@compiled()
def step(searched, path, d):  # type: ignore[no-untyped-def]
    """Go to the next choice: another place, another mode, a layer more."""
    places, layers = searched.places, searched.layers
    before = path.place[d - 1] if d else len(places.replicas)
    path.option[d] += 1
    if path.option[d] < places.first[before + 1]:
        return
    path.option[d] = places.first[before]
    path.mode[d] += 1
    if path.mode[d] > layers.last_mode:
        path.mode[d] = layers.first_mode
        path.stop[d] += 1


@compiled()
def is_possible(searched, path, d):  # type: ignore[no-untyped-def]
    """Whether a stage is in time by itself, and leaves the layers behind devices enough."""
    places, place, stop = searched.places, searched.places.next[path.option[d]], path.stop[d]
    r = places.replicas[place]
    if places.room[place] < searched.devices[0, stop]:
        return False
    if searched.alike and d > 0 and r != places.replicas[path.place[0]]:
        return False
    return searched.in_time[path.start[d], stop, path.mode[d], r]


@compiled()
def extend(searched, path, d, T):  # type: ignore[no-untyped-def]
    """Whether the stages up to one are in time together; what the next sees of them is recorded."""
    layers, places, option = searched.layers, searched.places, path.option[d]
    place = places.next[option]
    i, j, r, M = path.start[d], path.stop[d], places.replicas[place], layers.M
    stage = stage_cost(layers, i, j, path.mode[d])
    F = most_in_flight(layers, stage, r)
    fewest = min(F, path.fewest[d - 1]) if d else F
    if layers.split and fewest < min(-(-M // r), d + 1):
        return False
    wait = wait_s(searched.network, layers.traffic[i], places.gap[option])
    x, updates = path.messages[d] + wait, path.updates[d] + wait
    tail, next_tail = layers.tail[i] - layers.message[i], layers.tail[j] - layers.message[j]
    q, forward, passing = 0, 0.0, 0.0
    if d > 0:
        q, start = places.replicas[path.place[d - 1]], path.start[d - 1]
        forward = layers.forward[i] - layers.forward[start]
        passing = tail - (layers.tail[start] - layers.message[start])
    work, passed = work_s(layers, stage, F, r)
    update = update_s(layers, places, stage, place)
    seconds = end_s(M, r, work, passed, update, tail + x, updates, q, forward, passing)
    if layers.forward[i] + x + seconds > T:
        return False
    if places.room[place] < searched.devices[min(int(x / searched.step[0]), STEPS - 1), j]:
        return False
    sent, got = places.sent[option], places.got[option]
    if d > 0 and not carries(layers, path.traffic, d, sent, got, i, T):
        return False
    path.place[d], path.fewest[d], path.start[d + 1] = place, fewest, j
    path.messages[d + 1], path.updates[d + 1] = x, max(updates, update) + next_tail - tail
    return True


@compiled()
def work_s(layers, stage, F, r):  # type: ignore[no-untyped-def]
    """Seconds from a stage's first forward to its last backward, and until its last gradient."""
    work = work_in_layers_s(layers, stage, F, r, stage.round_s)
    if not layers.split:
        return work, work
    return work, -(-layers.M // r) * (stage.forward_s + stage.passing_s)


@compiled()
def update_s(layers, places, stage, place):  # type: ignore[no-untyped-def]
    """Seconds of a stage's all-reduce, its exchanges and its optimizer step."""
    exchange = last_exchange_s(layers, stage, places.ring[place], places.latency[place])
    return exchange + step_s(layers, stage, places.replicas[place]) + stage.tied_s
