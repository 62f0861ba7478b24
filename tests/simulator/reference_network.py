"""The network of the reference simulator: ports that messages hold, and all-reduces beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partopt.cost.collectives import HIERARCHICAL
from partopt.simulator.work import Ports, Work, ports_of

Number = Callable[[Any], Any]  # float, or Fraction


def port_pair(ports: Ports, rank: int, k: int) -> tuple[int, int]:
    """The ports through which a rank sends and receives at level k; the same one on a bus."""
    if ports.bus[k - 1]:
        port = int(ports.first[k - 1] + rank // ports.sizes[k])
        return port, port
    out = int(ports.first[k - 1] + 2 * (rank // ports.sizes[k - 1]))
    return out, out + 1


class Wires:
    """The ports and their lanes.

    `busy` is the time for which transfers held each port, all of its lanes together.
    """

    def __init__(self, work: Work, number: Number) -> None:
        self.work, self.number, self.zero = work, number, number(0)
        self.ports = ports_of(work.topology)
        self.lanes = [
            [self.zero] * int(self.ports.lanes[k])
            for k in range(len(work.topology.levels))
            for _ in range(int(self.ports.first[k + 1] - self.ports.first[k]))
        ]
        self.busy = [self.zero] * self.ports.count

    def carry(
        self, size_bytes: float, source: int, destination: int, earliest: Any
    ) -> tuple[Any, Any]:
        """When a message is on the wire and when it has arrived.

        It takes a lane of the sender's port and one of the receiver's as soon as both are free.
        """
        k = self.work.topology.common_level(source, destination)
        taken = {port_pair(self.ports, source, k)[0], port_pair(self.ports, destination, k)[1]}
        lanes = {port: self._free_lane(port) for port in taken}
        begin = max(earliest, *(self.lanes[port][lane] for port, lane in lanes.items()))
        seconds = self.number(size_bytes) / self.number(self.ports.bandwidth[k - 1])
        for port, lane in lanes.items():
            self.lanes[port][lane] = begin + seconds
            self.busy[port] += seconds / len(self.lanes[port])
        return begin, begin + seconds + self.number(self.ports.latency[k - 1])

    def _free_lane(self, port: int) -> int:
        return min(range(len(self.lanes[port])), key=lambda lane: self.lanes[port][lane])

    def booked(self, port: int, now: Any) -> Any:
        """Seconds for which transfers that are known now will hold a port."""
        seconds = sum((max(self.zero, free - now) for free in self.lanes[port]), self.zero)
        return seconds / len(self.lanes[port])


class Exchanges:
    """All-reduces: whose replicas have come, who holds the ports, and what is `done`.

    `rounds` is how many each stage has exchanged; `done` are stage, round, start and end.
    """

    def __init__(self, work: Work, wires: Wires) -> None:
        S, number = len(work.ranks), wires.number
        self.work, self.wires = work, wires
        self.rings = [
            [tuple(map(int, held)) for held in zip(*wires.ports.of_ring(ranks), strict=True)]
            if size
            else []
            for ranks, size in zip(work.ranks, work.gradient_bytes, strict=True)
        ]
        self.loads = [self._loads(s) for s in range(S)]
        self.latencies = [number(reduced.latency_s) for reduced in work.allreduces]
        # of each stage: when the last backward of all replicas that have come ends
        self.ready = [wires.zero] * S
        self.joined = [0] * S  # replicas that have come to the stage's present round
        self.rounds = [0] * S
        self.waiting: list[int] = []  # stages whose replicas are all there, first come first served
        # stage -> start of its all-reduce, and what its ports had done by then
        self.running: dict[int, tuple[Any, list[Any]]] = {}
        # how much of `busy` has delayed an all-reduce, or passed before one
        self.counted = [wires.zero] * wires.ports.count
        self.done: list[tuple[Any, ...]] = []

    def _loads(self, s: int) -> dict[int, Any]:
        size, slopes = float(self.work.gradient_bytes[s]), self.work.allreduces[s].slopes
        return {k: self.wires.number(slope * size) for k, slope in slopes.items()}

    def expect(self, stage: int, end: Any) -> None:
        """The last backward of a replica of a stage ends at `end`."""
        self.ready[stage] = max(self.ready[stage], end)

    def join(self, stage: int) -> bool:
        """Count a replica at the exchange of its stage's gradients; whether it is the last.

        With the last one the stage requests the ports.
        """
        self.joined[stage] += 1
        last = self.joined[stage] == len(self.work.ranks[stage])
        if last:
            self.joined[stage] = 0
            self.waiting.append(stage)
        return last

    def begin(self, now: Any) -> list[int]:
        """Begin and return the all-reduces whose ports no other holds or requested before."""
        begun = []
        claimed = {port for stage in self.running for port, _ in self.rings[stage]}
        for stage in list(self.waiting):
            ports = {port for port, _ in self.rings[stage]}
            if not ports & claimed:
                self.waiting.remove(stage)
                self.running[stage] = (
                    now,
                    [self._passed(port, now) for port, _ in self.rings[stage]],
                )
                begun.append(stage)
            claimed |= ports
        return begun

    def _passed(self, port: int, now: Any) -> Any:
        """Seconds of transfers of a port that an all-reduce which begins now need not yield to."""
        return max(self.counted[port], self.wires.busy[port] - self.wires.booked(port, now))

    def end(self, stage: int) -> Any:
        """When the exchange of a stage ends.

        The all-reduce yields its ports to the transfers booked before it began and to those that
        came since.
        """
        (start, before), work, number = self.running[stage], self.work, self.wires.number
        in_turn = work.allreduces[stage].algorithm == HIERARCHICAL
        longest: dict[int, Any] = {}
        for (port, k), seconds in zip(self.rings[stage], before, strict=True):
            turn = k if in_turn else 0
            carried = self.loads[stage][k] + (self.wires.busy[port] - seconds)
            longest[turn] = max(longest.get(turn, self.wires.zero), carried)
        end = start + sum(longest.values(), self.wires.zero) + self.latencies[stage]
        tail = number(work.rings.tail_s[stage])
        return max(end, self.ready[stage] + tail) + number(work.tied_s[stage])

    def finish(self, stage: int, now: Any) -> None:
        """The all-reduce of a stage is done."""
        start, _ = self.running.pop(stage)
        for port, _ in self.rings[stage]:
            self.counted[port] = self.wires.busy[port]
        self.done.append((stage, self.rounds[stage], start, now))
        self.rounds[stage] += 1
