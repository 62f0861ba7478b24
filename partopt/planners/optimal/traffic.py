"""How long the messages of the first stages of a pipeline keep each port busy.

A member of a level sends the activations of some cuts and the gradients of others by one port, and
gets the other halves by another: both are busy for the same time. A bus carries all of them.

Before a port's first message come the layers before it, and after its last those behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled

_NO_CUT = -1


class Traffic(NamedTuple):
    """What ports carry over the cuts before each stage; entry d is of the stage with d before it.

    Cuts are given by their first layers, the first and the last of those over which a member sends
    activations and of those over which it gets them; -1: none.
    """

    busy: NDArray[np.float64]  # seconds, shape (S + 1, ports), as all
    cuts: NDArray[np.int64]  # shape (S + 1, ports, 4)


def traffic_of(S: int, ports: int) -> Traffic:
    """Room for the traffic of S stages."""
    return Traffic(np.zeros((S + 1, ports)), np.full((S + 1, ports, 4), _NO_CUT))


@compiled()
def carries(layers, traffic, d, sent, got, i, T):  # type: ignore[no-untyped-def]
    """Whether all ports carry the cuts so far within T, the one before stage [i, j) added to d's.

    `sent` and `got` are seconds for a byte of each port. What is carried is recorded for d + 1.
    """
    for port in range(len(sent)):
        before, after = traffic.cuts[d, port], traffic.cuts[d + 1, port]
        for side in range(2):
            busy = sent[port] if side == 0 else got[port]
            first, last = before[2 * side], before[2 * side + 1]
            after[2 * side] = i if busy > 0.0 and first < 0 else first
            after[2 * side + 1] = i if busy > 0.0 else last
        more = (sent[port] + got[port]) * layers.cuts[i]
        traffic.busy[d + 1, port] = traffic.busy[d, port] + more
        if more > 0.0 and traffic.busy[d + 1, port] + _around_s(layers, after) > T:
            return False
    return True


@compiled()
def _around_s(layers, cuts):  # type: ignore[no-untyped-def]
    """Seconds before the first and after the last message of the port by which a member sends."""
    forward, N = layers.forward, len(layers.cuts) - 1
    first_sent, last_sent, first_got, last_got = cuts[0], cuts[1], cuts[2], cuts[3]
    if layers.bus:
        first = max(first_sent, first_got)
        if first_sent >= 0 and first_got >= 0:
            first = min(first_sent, first_got)
        return forward[first] + _back_s(layers, 0, first)
    head = forward[N] + _back_s(layers, last_got, N) if first_sent < 0 else forward[first_sent]
    if first_got < 0:
        return head + forward[N] - forward[last_sent] + _back_s(layers, 0, N)
    return head + _back_s(layers, 0, first_got)


@compiled()
def _back_s(layers, i, j):  # type: ignore[no-untyped-def]
    """Seconds in which a gradient passes layers [i, j), at the least."""
    return (layers.tail[j] - layers.message[j]) - (layers.tail[i] - layers.message[i])
