"""Grids of equal pipelines side by side: estimates and lower bounds of an iteration's time.

Both are closed forms. A grid costs the same for every model that is laid on it, and a partition the
same on every grid: both are computed once, and combined for each schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import allreduce_over, exposed
from partopt.cost.memory import shares
from partopt.cost.period import optimizer_step_s
from partopt.cost.problem import Problem, consecutive
from partopt.schedules import schedule
from partopt.simulator.ports import Ports

# S   stages; r   replicas of each; P   devices; M   microbatches of an iteration
# C   compute seconds of a stage for one microbatch, recomputation included

SPLIT_SHARE = 1 / 3  # of 1F1B's bubble that is left where backwards are split, with F = I = W

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stages:
    """What the stages of a partition compute and hold, each of shape (S,).

    Only `cut_bytes` and `messages`, one way over the cuts between them, have shape (S - 1,).
    """

    bounds: Sequence[int]
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats  # the part of the backward that the gradients of the weights take
    compute_s: Floats  # C
    trained_bytes: Floats  # parameters with a gradient
    step_s: Floats  # of the optimizer, on one replica
    cut_bytes: Floats  # the mean of both ways, shape (S - 1,)
    messages: Floats


def stages_between(bounds: Sequence[int], problem: Problem) -> Stages:
    """The stages between neighbouring `bounds`."""
    chain, starts, pairs = problem.chain, list(bounds[:-1]), consecutive(bounds)
    forward, backward = np.add.reduceat(chain.f, starts), np.add.reduceat(chain.g, starts)
    return Stages(
        bounds=bounds,
        forward_s=forward,
        backward_s=backward,
        weight_s=np.add.reduceat(chain.gw, starts),
        compute_s=forward + backward + (forward if problem.recompute else 0.0),
        trained_bytes=np.array([chain.trained_bytes(stage.start, stage.stop) for stage in pairs]),
        step_s=np.array([optimizer_step_s(stage, problem) for stage in pairs]),
        cut_bytes=chain.traffic[starts[1:]],
        messages=problem.messages[starts[1:]],
    )


@dataclass(frozen=True, eq=False)
class Grid:
    """The ranks that hold each stage: `ranks[s][k]` is replica k of stage s.

    Every stage has equally many replicas.
    """

    ranks: Sequence[Sequence[int]]
    ports: Ports

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """`ranks` as an array, shape (S, r)."""
        return np.array([list(ranks) for ranks in self.ranks], dtype=np.int32)

    @property
    def replicas(self) -> int:
        """How many replicas every stage has."""
        return len(self.ranks[0])

    @cached_property
    def devices(self) -> int:
        """How many devices have work."""
        return len(np.unique(self.places))

    @cached_property
    def levels(self) -> Integers:
        """The level that the messages over each cut cross, for every replica, shape (S - 1, r).

        0 where a device passes to itself.
        """
        return self.ports.levels_between(self.places[:-1], self.places[1:])

    @cached_property
    def rings(self) -> tuple[Floats, Floats]:
        """Seconds of an all-reduce of each stage, per byte and for none, shape (S,) each."""
        topology = self.ports.topology
        distinct = {tuple(ranks): ranks for ranks in self.ranks}
        reduced = {key: allreduce_over(own, topology) for key, own in distinct.items()}
        each = [reduced[tuple(ranks)] for ranks in self.ranks]
        return np.array([own.slope for own in each]), np.array([own.latency_s for own in each])

    def allreduce_s(self, stages: Stages, problem: Problem) -> Floats:
        """Seconds of each stage's all-reduce after its last backward, shape (S,)."""
        slopes, latencies = self.rings
        seconds = slopes * stages.trained_bytes + latencies
        last = stages.weight_s if schedule(problem.schedule).split else stages.backward_s
        left: Floats = exposed(seconds, stages.trained_bytes, last, problem.early_bytes)
        return left

    def update_s(self, stages: Stages, tied_s: Floats, problem: Problem) -> Floats:
        """Seconds of each stage's exchanges and optimizer step after its last backward."""
        step: Floats = stages.step_s / shares(problem.kept, self.replicas)[-1]
        return self.allreduce_s(stages, problem) + tied_s + step

    def busy_s(self, stages: Stages, M: int, problem: Problem) -> Floats:
        """Seconds for which each device is busy in an iteration, shape (P,).

        It computes, and is held by its messages.
        """
        seconds = stages.compute_s[:, None] * self.shares(M)
        if problem.messages_hold:
            exchanged = 2 * self.hold_s(stages, problem) * self.shares(M)
            seconds[1:] += exchanged
            seconds[:-1] += exchanged
        return np.bincount(
            self.places.ravel(), seconds.ravel(), minlength=self.ports.topology.devices
        ).astype(np.float64)

    def on_devices(self, of_stage: Floats) -> Floats:
        """The sum over the stages on each device, shape (P,)."""
        each = np.repeat(of_stage, self.replicas)
        sums: Floats = np.zeros(self.ports.topology.devices)
        np.add.at(sums, self.places.ravel(), each)
        return sums

    def least_on_devices(self, of_stage: Floats) -> Floats:
        """The minimum over the stages on each device, shape (P,); 0 for a device without any."""
        least = np.full(self.ports.topology.devices, np.inf)
        np.minimum.at(least, self.places.ravel(), np.repeat(of_stage, self.places.shape[1]))
        return np.where(np.isinf(least), 0.0, least)

    def shares(self, M: int) -> Integers:
        """Of M microbatches those that each replica of a stage gets, shape (r,)."""
        r = self.places.shape[1]
        shares: Integers = (M - np.arange(r) + r - 1) // r
        return shares

    def message_s(self, stages: Stages) -> Floats:
        """Seconds that a message over each cut takes, for every replica, shape (S - 1, r)."""
        k = np.maximum(self.levels, 1) - 1
        seconds = self.ports.latency[k] + stages.cut_bytes[:, None] / self.ports.bandwidth[k]
        return np.where(self.levels > 0, seconds, 0.0)

    def hold_s(self, stages: Stages, problem: Problem) -> Floats:
        """Seconds for which a message over each cut holds its devices, shape (S - 1, r)."""
        network, k = problem.network, np.maximum(self.levels, 1) - 1
        seconds = stages.messages[:, None] * network.hold[k] + network.waited[k]
        seconds = seconds + stages.cut_bytes[:, None] * network.hold_byte[k]
        return np.where(self.levels > 0, seconds, 0.0)

    def wires_s(self, stages: Stages, M: int) -> float:
        """Seconds for which an iteration's messages keep the busiest port busy."""
        ports, sent = self.ports, self.levels > 0
        k = self.levels[sent]
        seconds = (stages.cut_bytes[:, None] * self.shares(M))[sent] / (
            ports.bandwidth * ports.lanes
        )[k - 1]
        busy = np.zeros(ports.count)
        for source, destination in (
            (self.places[:-1], self.places[1:]),
            (self.places[1:], self.places[:-1]),
        ):
            np.add.at(busy, ports.of_each(source[sent], k, 0), seconds)
            np.add.at(
                busy,
                ports.of_each(destination[sent], k, 1),
                np.where(ports.bus[k - 1], 0.0, seconds),
            )
        return float(busy.max(initial=0.0))


def least_s(stages: Stages, grid: Grid, problem: Problem, tied_s: Floats) -> float:
    """A lower bound, in seconds, of an iteration on the grid.

    A device begins when its first microbatch has come through the stages before, works through all,
    and exchanges gradients, for `tied_s` seconds of each stage with other stages; where backwards
    are whole, its last one goes back through the stages before. A microbatch passes all stages,
    there and back; where one is on its way at a time, all of a pipeline's do, one after the other.
    Ports carry all messages.
    """
    entry, M = schedule(problem.schedule), problem.microbatches
    assert M is not None
    # serial ones are in what devices are busy with
    hops = grid.message_s(stages).min(axis=1) * (not problem.serial_transfers)
    update = grid.update_s(stages, tied_s, problem)
    busy = grid.busy_s(stages, M, problem)
    before = grid.least_on_devices(np.concatenate([[0.0], np.cumsum(stages.forward_s[:-1] + hops)]))
    after = grid.least_on_devices(update)
    if not entry.split:
        backward = stages.backward_s if entry.recomputes else stages.compute_s - stages.forward_s
        passing = np.concatenate([[0.0], np.cumsum(backward[:-1] + hops)])
        after = np.maximum(after, grid.least_on_devices(passing) + update[0])
    device = float((before + busy + after)[busy > 0].max(initial=0.0))
    one = _there_and_back_s(stages, problem) + 2 * float(grid.message_s(stages).min(axis=1).sum())
    passed = one * (grid.shares(M).max() if entry.one_at_a_time else 1) + float(update[0])
    return max(device, passed, grid.wires_s(stages, M))


def _there_and_back_s(stages: Stages, problem: Problem) -> float:
    """Seconds for which stages compute, one after the other, until a gradient is back at the first.

    Where backwards are split, no stage waits for the gradients of another's weights.
    """
    entry = schedule(problem.schedule)
    if entry.recomputes:
        return float((stages.forward_s + stages.backward_s).sum())
    return float((stages.compute_s - (stages.weight_s if entry.split else 0.0)).sum())


def estimate_s(stages: Stages, grid: Grid, problem: Problem, tied_s: Floats) -> float:
    """Seconds of an iteration by the closed forms of `partopt.cost.iteration.iteration_s`.

    Cuts are priced as the ports see them. A device updates its stages one after the other. With v
    stages on a device the pipeline fills in a v-th of the time, and where backwards are split, a
    third of the bubble is left.
    """
    entry, M = schedule(problem.schedule), problem.microbatches
    assert M is not None
    chunks = grid.places.size / grid.devices
    passing = stages.forward_s + stages.backward_s if entry.recomputes else stages.compute_s
    messages = grid.message_s(stages).mean(axis=1).sum()
    busy = max(grid.busy_s(stages, M, problem).max(), grid.wires_s(stages, M))
    filled = (passing.sum() - passing[int(stages.compute_s.argmax())]) / chunks
    update = grid.on_devices(grid.update_s(stages, tied_s, problem)).max()
    one = _there_and_back_s(stages, problem) + 2 * messages
    if entry.one_at_a_time:
        return float(grid.shares(M).max() * one + update)
    filled = filled * (SPLIT_SHARE if entry.split else 1.0) + 2 * messages
    return float(max(busy + filled, one) + update)
