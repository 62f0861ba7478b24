"""What the compiled simulator works on: arrays, grouped by what they are about."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# R, S, G   ranks, stages, microbatches

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Actions(NamedTuple):
    """The order, what its actions take, and when they ran."""

    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joined: NDArray[np.bool_]
    rows: Integers
    seconds: Floats  # of each kind on each stage
    scale: Floats  # times those seconds, of each action; empty where all are 1
    handling: Floats  # that messages take of the device of each action; empty where they take none
    start: Floats
    end: Floats


class Devices(NamedTuple):
    """Who works on a stage, and how far each rank is."""

    rank_of: Integers  # ranks of stage s: rank_of[replica_first[s] : replica_first[s + 1]]
    replica_first: Integers
    next: Integers  # of a rank: the action that it comes to
    free: Floats  # of a rank: when it can begin that
    running: NDArray[np.bool_]
    woken: NDArray[np.bool_]  # an event will look at the rank again
    look: Integers  # ranks to look at before the next event
    looks: Integers  # how many, shape (1,)


class Network(NamedTuple):
    """Ports and their lanes, as in `partopt.simulator.ports`, and the messages sent over them."""

    sizes: Integers
    first: Integers
    bus: NDArray[np.bool_]
    bandwidth: Floats
    latency: Floats
    lane_first: Integers  # lanes of port p: lane_free[lane_first[p] : lane_first[p + 1]]
    lane_free: Floats
    carried: Floats  # seconds for which transfers held each port
    crossing: Floats  # bytes over each cut, forward and back, shape (2, S + 1)
    # activations and gradients by the stage that they go to, shape (2, S, G);
    # infinite where not known yet
    arrived: Floats
    sent: Floats  # when they went on the wire; nan where they did not


class Rings(NamedTuple):
    """All-reduces; the ring of stage s uses port[first[s] : first[s + 1]]."""

    first: Integers
    port: Integers
    load: Floats  # seconds for which an all-reduce keeps the port busy
    turn: Integers  # ports of one turn are busy at once, one turn after the other
    # what the port had carried when the all-reduce began, less what was booked and yet to pass
    before: Floats
    # of a port: how much of what it has carried has delayed an all-reduce, or passed before one
    counted: Floats
    latency: Floats  # of a stage
    tied: Floats  # of a stage: what its exchange with other stages takes
    tail: Floats  # of a stage: what takes place after its last backward at the least
    head_start: Floats  # of a stage: by which the exchange may begin before that ends
    ready: Floats  # of a stage: when the last backward of all replicas that have come ends
    early: NDArray[np.bool_]  # of a rank: it has come to the exchange before its backward ended
    due: NDArray[np.bool_]  # of a stage: there are all-reduces of it
    came: Integers  # of a stage: replicas that have come to the round
    rounds: Integers  # of a stage: rounds exchanged
    start: Floats  # of a stage: of the all-reduce under way; nan where there is none
    waiting: Integers  # stages that wait for ports, in order
    mark: Integers  # of a port: the last search in which it was claimed
    counts: Integers  # stages that wait; all-reduces done; searches made
    done: Floats  # rows of stage, round, start, end, shape (all-reduces, 4)


# Events are in a `partopt.cost.heap.Heap`. Number b: rank b has ended its action; R + b: look at
# rank b; 2R + s: the all-reduce of stage s; 2R + S + b: rank b comes to an exchange before its
# backward ends.

WAITING, DONE, SEARCHES = range(3)
