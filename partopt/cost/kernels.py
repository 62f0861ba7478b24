"""Formulas of a stage for compiled code: sums over layers, memory, and the fewest replicas.

The formulas are those of `partopt.cost.memory`, `partopt.cost.flight` and `partopt.cost.period`;
tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.links import tied_s
from partopt.cost.memory import optimizer_bytes
from partopt.cost.problem import FREE, NONE, Problem
from partopt.cost.ranges import Differences
from partopt.cost.tolerances import PACE, ROUNDED_BYTES
from partopt.schedules import schedule
from partopt.schedules.entry import ALL_IN_FLIGHT, DEPTH, OWN

# F      microbatches in flight
# R      devices in use behind a stage
# M      microbatches of an iteration, 0 for an asynchronous schedule
# NEVER  more replicas than any topology has

NEVER = 2**40


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
    cuts: NDArray[np.float64]  # bytes, shape (N+1,)
    weights: Differences
    stash: Differences
    # versions of its weights that a stage keeps; ALL_IN_FLIGHT: as many as it has in flight
    versions: int
    depends_on: int  # what is in flight of a stage: DOWNSTREAM, OWN or DEPTH
    factor: int  # of DOWNSTREAM: microbatches in flight for each of the devices downstream
    M: int
    optimizer: float  # bytes of state for a byte of parameters
    memory: float  # limit in bytes of a device, infinite where there is none
    serial: bool  # devices wait for their transfers
    first_mode: int  # stages may run from `first_mode` to `last_mode`: 0 keeps activations,
    last_mode: int  # 1 recomputes them
    optimizer_rate: float  # seconds of the optimizer's step for a byte of parameters
    # what recomputing adds to a pass, before each cut, shape (N+1,): zeros where it is not counted
    extra: NDArray[np.int64]
    depth: int  # the most stages of a plan, where what is in flight depends on them
    # stages that recompute keep the stash of as many microbatches as there are stages up to them
    rebuilds: bool
    # the fewest stashes that a stage from each cut on keeps after rebuilding them, shape (N+1,)
    least_rebuilt: NDArray[np.int64]
    # stages recompute while they wait, so that passing a microbatch on takes no recomputation
    recompute_is_free: bool
    tied: Tied


class StageCost(NamedTuple):
    """What a stage [i, j) costs and holds, whatever its replicas and wherever it stands."""

    weights: float  # bytes
    stash: float  # bytes of one microbatch, 0 where memory is not limited
    before: float  # bytes of its cuts
    after: float
    mode: int
    compute_s: float
    passed_s: float  # seconds in which it passes one microbatch on
    tied_s: float  # seconds to exchange the gradients of tied parameters
    rebuilt: int  # stashes that it keeps at the least after rebuilding them


def layers_of(problem: Problem) -> Layers:
    """The chain of a problem, for compiled code."""
    chain = problem.chain
    whole = chain.parameter_bytes(0, chain.layers)
    entry = schedule(problem.schedule)
    assert entry.kernel is not None, "optimal plans for schedules with a kernel alone"
    return Layers(
        compute=np.array([chain.busy_prefix(False), chain.busy_prefix(True)]),
        cuts=np.asarray(chain.a, dtype=np.float64),
        weights=chain.parameter_bytes.differences(),
        stash=chain.stash_bytes.differences(),
        versions=entry.weight_versions,
        depends_on=entry.kernel.depends_on,
        factor=entry.kernel.factor,
        M=problem.microbatches or 0,
        optimizer=float(optimizer_bytes(1.0, problem.optimizer, chain.sixteen_bit)),
        memory=np.inf if problem.memory_bytes is None else float(problem.memory_bytes),
        serial=problem.serial_transfers,
        first_mode=int(problem.recompute and not problem.recompute_per_stage),
        last_mode=int(problem.recompute or problem.recompute_per_stage),
        optimizer_rate=chain.optimizer_s / whole if whole else 0.0,
        extra=np.zeros(chain.layers + 1, np.int64),
        depth=0,
        rebuilds=entry.kernel.depends_on == DEPTH,
        least_rebuilt=np.ones(chain.layers + 1, np.int64),
        recompute_is_free=entry.recomputes,
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
            seconds[g, held] = tied_s(group.size, 1 + len(group.members) - held, problem.topology)
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
def between(sums, i, j):  # type: ignore[no-untyped-def]
    """The sum over [i, j), from the Differences of a RangeSum."""
    total = sums.end[j] - sums.begin[i]
    position = sums.open_at[i]
    while position < sums.open_at[i + 1] and sums.open_last[position] >= j:
        total -= sums.open_size[position]
        position += 1
    return total


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
def passed_s(layers, i, j, mode):  # type: ignore[no-untyped-def]
    """Seconds in which a stage [i, j) passes one microbatch on."""
    prefix = layers.compute[0 if layers.recompute_is_free else mode]
    return prefix[j] - prefix[i]


@compiled()
def stage_cost(layers, i, j, mode):  # type: ignore[no-untyped-def]
    """The StageCost of [i, j)."""
    return StageCost(
        between(layers.weights, i, j),
        0.0 if layers.memory == np.inf else between(layers.stash, i, j),
        layers.cuts[i],
        layers.cuts[j],
        mode,
        layers.compute[mode, j] - layers.compute[mode, i],
        passed_s(layers, i, j, mode),
        exchanged_s(layers.tied, i, j),
        layers.least_rebuilt[i],
    )


@compiled()
def memory_bytes(layers, stage, F, rebuilt):  # type: ignore[no-untyped-def]
    """Bytes on each device of a stage with F in flight: `partopt.cost.memory.stage_memory`.

    If it recomputes, it keeps the `rebuilt` stashes.
    """
    W, stash, before = stage.weights, stage.stash, stage.before
    versions = F if layers.versions == ALL_IN_FLIGHT else layers.versions
    kept = F * before + rebuilt * stash if stage.mode else F * stash
    return (
        np.rint(versions * W)
        + np.rint(W)
        + np.rint(layers.optimizer * W)
        + np.rint(kept)
        + np.rint(F * (before + stage.after))
    )


@compiled()
def most_in_flight(layers, stage):  # type: ignore[no-untyped-def]
    """The most microbatches in flight for which a stage fits; 0 where not even one does.

    If it recomputes, with the fewest stashes: whether it has room for those that it keeps where it
    stands, `has_room` says.
    """
    if layers.memory == np.inf:
        return NEVER
    none = memory_bytes(layers, stage, 0, stage.rebuilt)
    kept = stage.before if stage.mode else stage.stash
    versions = stage.weights if layers.versions == ALL_IN_FLIGHT else 0.0
    each = stage.before + stage.after + kept + versions
    one = memory_bytes(layers, stage, 1, stage.rebuilt)
    if none > layers.memory or (each == 0.0 and one > layers.memory):
        return 0
    if each == 0.0:
        return NEVER
    F = np.int64(min((layers.memory - none + ROUNDED_BYTES) / each + 1.0, float(NEVER)))
    while F > 0 and memory_bytes(layers, stage, F, stage.rebuilt) > layers.memory:
        F -= 1
    return F


@compiled()
def has_room(layers, stage, R, r):  # type: ignore[no-untyped-def]
    """Whether a stage of r replicas fits with all that it rebuilds, R devices behind it.

    Every stage has r replicas, so that R / r of the `layers.depth` stages are behind it.
    """
    if layers.memory == np.inf or not layers.rebuilds or stage.mode == 0:
        return True
    own = -(-layers.M // r)
    rebuilt = min(own, max(1, layers.depth - R // r))
    return memory_bytes(layers, stage, min(own, layers.depth), rebuilt) <= layers.memory


@compiled()
def replicas_to_fit(layers, F, R):  # type: ignore[no-untyped-def]
    """The fewest replicas with which a stage has at most F in flight, R devices behind it.

    Microbatches in flight are those of `partopt.cost.flight.in_flight`.
    """
    if F < 1:
        return NEVER
    if F == NEVER:
        return 1
    own = -(-layers.M // F) if layers.M else NEVER
    if layers.depends_on == OWN:
        return own
    if layers.depends_on == DEPTH:
        return 1 if layers.depth <= F else own
    downstream = 1 if R == 0 else (NEVER if F == 1 else -(-layers.factor * R // (F - 1)))
    return min(own, downstream)


@compiled()
def replicas_to_keep_pace(layers, stage, pace):  # type: ignore[no-untyped-def]
    """The fewest replicas with which the compute C of a stage keeps the pace.

    Asynchronous: C / r is at most `pace` seconds. Synchronous: ceil(M / r) C minus the seconds in
    which the stage passes one microbatch on is at most `pace`; the difference is how much longer
    the stage takes for all of its microbatches than to pass the first on.
    """
    C = stage.compute_s
    if C <= 0.0:
        return 1
    if layers.M > 0:
        turns = np.int64(min((pace + stage.passed_s) / C * (1 + PACE), float(layers.M)))
        return -(-layers.M // turns) if turns > 0 else NEVER
    if pace * NEVER < C:
        return NEVER
    r = np.int64(max(1.0, C / pace * (1 - PACE)))
    while C / r > pace:
        r += 1
    return r
