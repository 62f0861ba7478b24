"""Formulas of a stage for compiled code: sums over layers, memory, and the fewest replicas.

The formulas are those of `partopt.cost.memory`, `partopt.cost.flight` and `partopt.cost.period`;
tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import exposed_s
from partopt.cost.compiled import compiled
from partopt.cost.memory import Kept, parameters_bytes
from partopt.cost.passes import (
    NEVER,
    message_s,
    passing_prefix,
)
from partopt.cost.problem import FREE, NONE, Problem
from partopt.cost.ranges import Differences, Maxima, between, largest
from partopt.cost.tolerances import ROUNDED_BYTES
from partopt.schedules import schedule
from partopt.schedules.entry import ALL_IN_FLIGHT, DOWNSTREAM

# F      microbatches in flight
# M      microbatches of an iteration, 0 for an asynchronous schedule
# T      seconds: the period of an asynchronous schedule, the iteration of a synchronous one


class Tied(NamedTuple):
    """The tied layers, for compiled code.

    `exchanged_s` sums from them the seconds that a stage takes to exchange tied gradients.
    """

    before: NDArray[np.int64]  # members of each group before each cut, shape (groups, N+1)
    # of the exchange, by the members that a stage holds, shape (groups, most members + 1)
    seconds: NDArray[np.float64]


class Layers(NamedTuple):
    """The chain and what holds for every stage of it."""

    # seconds before each cut, shape (2, N+1): without recomputation and with it
    compute: NDArray[np.float64]
    forward: NDArray[np.float64]  # seconds before each cut, shape (N+1,)
    # backward seconds before each cut until gradients leave, shape (2, N+1): as `compute`
    passing: NDArray[np.float64]
    # the head, the round without its messages, the message and the tail of a stage that begins or
    # ends at each cut, shape (N+1,): `partopt.cost.passes.Passes`
    head: NDArray[np.float64]
    behind: NDArray[np.float64]
    message: NDArray[np.float64]
    tail: NDArray[np.float64]
    cuts: NDArray[np.float64]  # bytes of activations, shape (N+1,)
    traffic: NDArray[np.float64]  # bytes one way, the mean of both ways, shape (N+1,)
    messages: NDArray[np.float64]  # messages, likewise
    lopsided: bool  # fewer bytes come back over some cut
    trained: Differences
    frozen: Differences
    stash: Differences
    parting: NDArray[np.float64]  # bytes of `Chain.parting_prefix`; 0 where not split
    transient: Maxima
    layer: Maxima  # parameters of a layer
    # versions of its weights that a stage keeps; ALL_IN_FLIGHT: as many as it has in flight
    versions: int
    depends_on: int  # what is in flight of a stage: DOWNSTREAM, OWN or DEPTH
    any_warmup: bool  # a bound of what is in flight holds for every warm-up of 1F1B's kind
    M: int
    kept: Kept  # beside a byte of trained parameters
    memory: float  # limit in bytes of a device, infinite where there is none
    holds: bool  # messages keep devices from computing
    blocking: bool  # and for their all-reduces
    bucket: float  # bytes of gradients exchanged at once: `Problem.early_bytes`
    # backward seconds before each cut in which gradients appear, shape (N+1,)
    gradients: NDArray[np.float64]
    split: bool  # backwards are in two parts
    first_mode: int  # stages may run from `first_mode` to `last_mode`: 0 keeps activations,
    last_mode: int  # 1 recomputes them
    optimizer_rate: float  # seconds of the optimizer's step for a byte of trained parameters
    depth: int  # the most stages of a plan, where what is in flight depends on them
    bus: bool  # a level is a bus
    devices: int  # of the topology
    caution: float  # of what fits in flight, one in so many is used: `Problem.caution`
    tied: Tied


class Held(NamedTuple):
    """Bytes of a stage; all but `trained` are 0 where memory is not limited."""

    trained: float  # parameters with a gradient
    frozen: float  # parameters without one
    stash: float  # of one microbatch
    split_stash: float  # of one between the parts of its backward, beside the stash
    transient: float  # the most that layers take while they run, beside the stash
    layer: float  # parameters of the largest layer


class StageCost(NamedTuple):
    """What a stage [i, j) costs and holds, whatever its replicas and wherever it stands."""

    start: int  # i
    stop: int  # j
    held: Held
    before: float  # bytes of activations over its cuts
    after: float
    traffic_before: float  # bytes over them one way, the mean of both ways
    traffic_after: float
    mode: int
    forward_s: float
    backward_s: float  # recomputation included
    passing_s: float  # the part of it after which the gradient leaves
    round_s: float  # from the end of a forward to the arrival of its gradient
    tied_s: float  # seconds to exchange the gradients of tied parameters


def layers_of(problem: Problem) -> Layers:
    """The chain of a problem, for compiled code."""
    chain = problem.chain
    whole = chain.trained_bytes(0, chain.layers)
    entry = schedule(problem.schedule)
    assert entry.kernel is not None, "optimal plans for schedules with a kernel alone"
    first_mode = int(problem.all_recompute)
    passing = np.array([passing_prefix(problem, mode) for mode in (False, True)])
    back, forward = passing[first_mode], chain.forward_prefix
    message = np.array([message_s(problem, c) for c in range(chain.layers + 1)])
    return Layers(
        compute=np.array([chain.busy_prefix(False), chain.busy_prefix(True)]),
        forward=forward,
        passing=passing,
        head=forward + message,
        behind=(forward[-1] - forward) + (back[-1] - back),
        message=message,
        tail=back + message,
        cuts=np.asarray(chain.a, dtype=np.float64),
        traffic=chain.traffic,
        messages=problem.messages,
        lopsided=chain.lopsided,
        trained=chain.trained_bytes.differences(),
        frozen=chain.frozen_bytes.differences(),
        stash=chain.stash_bytes.differences(),
        parting=chain.parting_prefix * entry.split,
        transient=chain.transient(entry.split).maxima(),
        layer=chain.layer_bytes.maxima(),
        versions=entry.weight_versions,
        depends_on=entry.kernel.depends_on,
        any_warmup=entry.kernel.depends_on == DOWNSTREAM,
        M=problem.microbatches or 0,
        kept=problem.kept,
        memory=np.inf if problem.memory_bytes is None else float(problem.memory_bytes),
        holds=problem.messages_hold,
        blocking=problem.blocking_allreduce and problem.microbatches is None,
        bucket=problem.early_bytes,
        gradients=chain.gradients_prefix(entry.split),
        split=entry.split,
        first_mode=first_mode,
        last_mode=int(problem.recompute or problem.recompute_per_stage),
        optimizer_rate=chain.optimizer_s / whole if whole else 0.0,
        depth=0,
        bus=bool(problem.network.bus.any()),
        devices=problem.topology.devices,
        caution=problem.caution,
        tied=tied_of(problem),
    )


def tied_of(problem: Problem) -> Tied:
    """The tied layers of a problem."""
    groups, cuts = problem.chain.tied, np.arange(problem.chain.layers + 1)
    most = max((len(group.members) for group in groups), default=0)
    before, seconds = (
        np.zeros((len(groups), len(cuts)), np.int64),
        np.zeros((len(groups), most + 1)),
    )
    for g, group in enumerate(groups):
        before[g] = np.searchsorted(group.members, cuts)
        for held in range(1, len(group.members)):
            seconds[g, held] = problem.tied_s(group.size, 1 + len(group.members) - held)
    return Tied(before, seconds)


def replica_counts(problem: Problem) -> list[tuple[int, int]]:
    """Pairs of the fewest and the most replicas that every stage may have.

    One pair, or one for each count where all stages have equally many.
    """
    P = problem.topology.devices
    if problem.replication == FREE and schedule(problem.schedule).uneven:
        return [(1, P)]
    return [(1, 1)] if problem.replication == NONE else [(d, d) for d in range(1, P + 1)]


@compiled()
def held_by(layers, i, j):  # type: ignore[no-untyped-def]
    """What a stage [i, j) holds."""
    trained = between(layers.trained, i, j)
    if layers.memory == np.inf:
        return Held(trained, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Held(
        trained,
        between(layers.frozen, i, j),
        between(layers.stash, i, j),
        layers.parting[j] - layers.parting[i] if i else 0.0,
        largest(layers.transient, i, j),
        largest(layers.layer, i, j) if layers.kept.shard >= 3 else 0.0,
    )


@compiled()
def last_exchange_s(layers, stage, slope, latency):  # type: ignore[no-untyped-def]
    """Seconds of a stage's all-reduce that are left when its last backward has ended.

    The compiled form of `partopt.cost.period.allreduce_left_s`.
    """
    trained = stage.held.trained
    last = layers.gradients[stage.stop] - layers.gradients[stage.start]
    return exposed_s(slope * trained + latency, trained, last, layers.bucket)


@compiled()
def step_s(layers, stage, r):  # type: ignore[no-untyped-def]
    """Seconds of the optimizer's step of a stage: `partopt.cost.period.optimizer_step_s`."""
    return layers.optimizer_rate * stage.held.trained / (r if layers.kept.shard >= 1 else 1)


@compiled()
def exchanged_s(tied, i, j):  # type: ignore[no-untyped-def]
    """Seconds for a stage [i, j) to exchange the gradients of tied parameters.

    The compiled form of `partopt.cost.period.tied_exchange_s`.
    """
    seconds = 0.0
    for group in range(len(tied.before)):
        seconds += tied.seconds[group, tied.before[group, j] - tied.before[group, i]]
    return seconds


def exchanged_table(tied: Tied) -> NDArray[np.float64]:
    """`exchanged_s` of every i and j, shape (N+1, N+1); meaningless where j < i."""
    held = tied.before[:, None, :] - tied.before[:, :, None]
    seconds: NDArray[np.float64] = np.take_along_axis(
        tied.seconds[:, None, :], np.maximum(held, 0), axis=2
    ).sum(axis=0)
    return seconds


@compiled()
def stage_cost(layers, i, j, mode):  # type: ignore[no-untyped-def]
    """The StageCost of [i, j)."""
    held, tied = held_by(layers, i, j), exchanged_s(layers.tied, i, j)
    return cost_of(layers, i, j, mode, held, layers.cuts[j], layers.message[j], tied)


@compiled()
def cost_of(layers, i, j, mode, held, after, message, tied):  # type: ignore[no-untyped-def]
    """The StageCost of [i, j) that holds so much, with this message over the cut behind it."""
    forward = layers.forward[j] - layers.forward[i]
    return StageCost(
        i,
        j,
        held,
        layers.cuts[i],
        after,
        layers.traffic[i],
        layers.traffic[j],
        mode,
        forward,
        layers.compute[mode, j] - layers.compute[mode, i] - forward,
        layers.passing[mode, j] - layers.passing[mode, i],
        layers.behind[j] + 2 * message,
        tied,
    )


@compiled()
def memory_bytes(layers, stage, F, r):  # type: ignore[no-untyped-def]
    """Bytes on each of r devices of a stage, F in flight: `partopt.cost.memory.stage_memory`.

    With one backward begun: what it keeps at the least.
    """
    held, W, kept = stage.held, stage.held.trained, layers.kept
    own = (F if layers.versions == ALL_IN_FLIGHT else layers.versions) * W + held.frozen
    return (
        np.rint(parameters_bytes(own, held.layer, r if kept.shard >= 3 else 1))
        + np.rint(kept.gradients * W / (r if kept.shard >= 2 else 1))
        + np.rint(kept.state * W / (r if kept.shard >= 1 else 1))
        + np.rint((1 if stage.mode else F) * held.stash + held.split_stash)
        + np.rint((-(-kept.posted // r) if kept.posted else F) * (stage.before + stage.after))
        + np.rint(held.transient)
    )


@compiled()
def varies(layers):  # type: ignore[no-untyped-def]
    """Whether what a device of a stage holds depends on its replicas: then it falls with them."""
    return layers.memory < np.inf and (layers.kept.shard > 0 or layers.kept.posted > 0)


@compiled()
def most_in_flight(layers, stage, r):  # type: ignore[no-untyped-def]
    """The most microbatches in flight for which a stage with r replicas fits; 0: not even one."""
    if layers.memory == np.inf:
        return NEVER
    none = memory_bytes(layers, stage, 0, r)
    kept = 0.0 if stage.mode else stage.held.stash
    buffers = 0.0 if layers.kept.posted else stage.before + stage.after
    versions = stage.held.trained if layers.versions == ALL_IN_FLIGHT else 0.0
    versions /= r if layers.kept.shard >= 3 else 1
    each = buffers + kept + versions
    if none > layers.memory or (each == 0.0 and memory_bytes(layers, stage, 1, r) > layers.memory):
        return 0
    if each == 0.0:
        return NEVER
    F = np.int64(min((layers.memory - none + ROUNDED_BYTES) / each + 1.0, float(NEVER)))
    while F > 0 and memory_bytes(layers, stage, F, r) > layers.memory:
        F -= 1
    return np.int64(max(1.0, F / layers.caution)) if F > 0 else F
