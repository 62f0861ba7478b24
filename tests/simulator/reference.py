"""The reference simulator: discrete events, written for clarity, on any kind of number.

`partopt.simulator.kernel` does the same in compiled code, and is compared with this one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from partopt.documents.actions import A, B, F, I, U
from partopt.schedules.order import Order
from partopt.simulator.kernel import deadlock_error
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import Work
from tests.simulator.reference_network import Exchanges, Wires

# R   ranks
#
# Events are ordered by time, then by number:
# b        device b has ended its action
# R + b    look at device b again
# 2R + s   the all-reduce of stage s
# 2R + S + b   device b comes to an exchange before its backward ends


def simulate(order: Order, work: Work, exact: bool = False) -> Timeline:
    """Execute `order` at the costs of `work`; with `exact`, in rational arithmetic.

    Raises PartoptError where it deadlocks.
    """
    run = _Run(order, work, Fraction if exact else float)
    for rank in range(order.ranks):
        run.advance(rank, run.zero)
    while run.events:
        time, number = heapq.heappop(run.events)
        R, S = order.ranks, len(work.ranks)
        if number < 2 * R:
            what, which = divmod(number, R)
        else:
            what, which = (
                divmod(number - 2 * R, S) if number < 2 * R + S else (1, number - 2 * R - S)
            )
            what += 2
        (run.end_action, run.advance, run.end_exchange, run.join_early)[what](which, time)
    run.check()
    return run.timeline()


class _Run:
    def __init__(self, order: Order, work: Work, number: Callable[[Any], Any]) -> None:
        R = order.ranks
        self.order, self.work, self.number, self.zero = order, work, number, number(0)
        self.events: list[tuple[Any, int]] = []
        # the action that each device comes to
        self.next = [int(place) for place in order.rows[:-1]]
        self.free = [self.zero] * R  # when each device can begin it
        self.running = [False] * R
        # input of (kind, stage, microbatch) -> time
        self.arrived: dict[tuple[int, int, int], Any] = {}
        self.start: list[Any] = [None] * len(order.kind)
        self.end: list[Any] = [None] * len(order.kind)
        self.due = set(order.stage[order.kind == A].tolist())  # stages that have all-reduces
        self.wires = Wires(work, number)
        self.exchanges = Exchanges(work, self.wires)
        self.transfers: list[tuple[Any, ...]] = []
        self.early = [False] * R  # a device has come to an exchange before its backward ended

    def advance(self, rank: int, now: Any) -> None:
        """Let a device begin its next action, if its inputs are there or on their way."""
        if self.running[rank] or self.next[rank] == self.order.rows[rank + 1]:
            return
        place = self.next[rank]
        places = [place, place + 1] if self.order.joined[place] else [place]
        inputs = [self._input(each) for each in places]
        if None in inputs:
            return
        begin = max(now, self.free[rank], *inputs)
        if begin > now and (self.work.serial or self.order.kind[place] == A):
            # a transfer may yet come before it
            heapq.heappush(self.events, (begin, self.order.ranks + rank))
            return
        self.running[rank] = True
        for each in places:
            self.start[each] = begin
        if self.order.kind[place] == A:
            self._join(place, rank, now)
            return
        seconds = sum(self._seconds(each) for each in places)
        self.free[rank] = begin + seconds
        heapq.heappush(self.events, (begin + seconds, rank))
        self._announce(rank, begin, begin + seconds)

    def _announce(self, rank: int, begin: Any, end: Any) -> None:
        """A device comes early to the exchange that follows the backward that it begins.

        It does where gradients are exchanged in buckets.
        """
        stage = self._exchange_after(rank)
        if stage is None:
            return
        came = max(begin, end - self.number(self.work.rings.head_start_s[stage]))
        if came < end:
            self.exchanges.expect(stage, end)
            number = 2 * self.order.ranks + len(self.work.ranks) + rank
            heapq.heappush(self.events, (came, number))

    def join_early(self, rank: int, now: Any) -> None:
        """A device comes to the exchange that follows its backward, which goes on."""
        stage = self._exchange_after(rank)
        assert stage is not None
        self.early[rank] = True
        if self.exchanges.join(stage):
            self._begin_exchanges(now)

    def _exchange_after(self, rank: int) -> int | None:
        """The stage whose gradients a device exchanges behind its next action, if any."""
        after = self.next[rank] + 1 + int(self.order.joined[self.next[rank]])
        if after < self.order.rows[rank + 1] and self.order.kind[after] == A:
            return int(self.order.stage[after])
        return None

    def _seconds(self, place: int) -> Any:
        """What an action takes."""
        seconds = self.number(self.work.seconds[self.order.kind[place], self.order.stage[place]])
        if len(self.work.scale):
            seconds *= self.number(self.work.scale[place])
        return seconds + self._handling(place)

    def _handling(self, place: int) -> Any:
        """What the messages of an action take of its device: the one that comes, the one that goes.

        All replicas of a stage before or behind are asked which of them has the microbatch.
        """
        order, work, seconds = self.order, self.work, self.zero
        kind, stage, microbatch = (
            int(column[place]) for column in (order.kind, order.stage, order.microbatch)
        )
        if kind not in (F, B, I):
            return seconds
        rank = int(np.searchsorted(order.rows, place, side="right")) - 1
        for other in (stage - 1, stage + 1):
            if not 0 <= other < len(work.ranks):
                continue
            peer = work.ranks[other][microbatch % len(work.ranks[other])]
            k = work.topology.common_level(rank, peer)
            if k:
                level, way, cut = work.topology.levels[k - 1], int(kind != F), max(stage, other)
                counts = 1.0 if work.messages is None else work.messages[way, cut]
                size = self.number(work.crossing[way, cut]) * self.number(level.copy_byte_s)
                seconds += self.number(counts) * self.number(level.message_s) + size
        return seconds

    def _input(self, place: int) -> Any:
        """When the input of an action is there; None where that is not known yet."""
        kind, stage, microbatch = (
            int(column[place])
            for column in (self.order.kind, self.order.stage, self.order.microbatch)
        )
        last = len(self.work.ranks) - 1
        if (kind == F and stage > 0) or (kind in (B, I) and stage < last):
            return self.arrived.get((F if kind == F else B, stage, microbatch))
        if kind == A:
            return self.zero if self.exchanges.rounds[stage] >= microbatch else None
        if kind == U:
            return self.zero if stage not in self.due or self.exchanges.rounds[stage] == 1 else None
        return self.zero

    def end_action(self, rank: int, now: Any) -> None:
        """A device ends an action, or two joined ones: send the results, and let it go on."""
        place = self.next[rank]
        places = [place, place + 1] if self.order.joined[place] else [place]
        self.next[rank] += len(places)
        # it is free now, or when serial messages that were booked meanwhile have passed
        self.running[rank] = False
        reached = []
        for each in places:
            self.end[each] = now
            if not (
                self.work.blocking and self._comes_to_exchange(rank, int(self.order.stage[each]))
            ):
                reached += self._send_result(each, rank, now)
        for other in [*reached, rank]:
            self.advance(other, now)

    def _send_result(self, place: int, rank: int, now: Any) -> list[int]:
        """Send what an action made to the next stage; return the ranks that may now go on.

        The receiver is the replica that works on this microbatch.
        """
        kind, stage, microbatch = (
            int(column[place])
            for column in (self.order.kind, self.order.stage, self.order.microbatch)
        )
        if kind == F and stage < len(self.work.ranks) - 1:
            return self._send(F, stage, stage + 1, microbatch, rank, now)
        if kind in (B, I) and stage > 0:
            return self._send(B, stage, stage - 1, microbatch, rank, now)
        return []

    def _send(
        self, kind: int, stage: int, to: int, microbatch: int, source: int, now: Any
    ) -> list[int]:
        destination = self.work.ranks[to][microbatch % len(self.work.ranks[to])]
        if source == destination:
            self.arrived[kind, to, microbatch] = now
            return []
        earliest = now
        if self.work.serial:
            earliest = max(now, self.free[source], self.free[destination])
        size = self.work.crossing[int(to < stage), max(stage, to)]
        begin, arrival = self.wires.carry(size, source, destination, earliest)
        if self.work.serial:
            self.free[source] = self.free[destination] = arrival
        self.transfers.append((kind, stage, microbatch, source, destination, begin, arrival))
        self.arrived[kind, to, microbatch] = arrival
        return [destination]

    def _join(self, place: int, rank: int, now: Any) -> None:
        """A replica has come to the exchange of its stage's gradients."""
        if not self.work.blocking:
            self._leave(rank, now)
        stage, came = int(self.order.stage[place]), self.early[rank]
        self.early[rank] = False
        if not came:
            self.exchanges.expect(stage, now)
            if self.exchanges.join(stage):
                self._begin_exchanges(now)
        if not self.work.blocking:
            self.advance(rank, now)

    def _leave(self, rank: int, now: Any) -> None:
        self.end[self.next[rank]] = now
        self.next[rank] += 1
        self.running[rank] = False
        self.free[rank] = max(self.free[rank], now)

    def _begin_exchanges(self, now: Any) -> None:
        for stage in self.exchanges.begin(now):
            self._await_exchange(stage)

    def _await_exchange(self, stage: int) -> None:
        heapq.heappush(self.events, (self.exchanges.end(stage), 2 * self.order.ranks + stage))

    def end_exchange(self, stage: int, now: Any) -> None:
        """End the all-reduce of a stage, unless transfers have delayed it.

        Then the next one may begin, and the stage's replicas go on.
        """
        if self.exchanges.end(stage) > now:
            self._await_exchange(stage)
            return
        self.exchanges.finish(stage, now)
        self._begin_exchanges(now)
        reached = []
        for rank in self.work.ranks[stage]:
            if self.work.blocking:
                self._leave(rank, now)
                # the backward that the exchange was part of
                reached += self._send_result(self.next[rank] - 2, rank, now)
            reached.append(rank)
        for rank in reached:
            self.advance(rank, now)

    def _comes_to_exchange(self, rank: int, stage: int) -> bool:
        place = self.next[rank]
        return bool(
            place < self.order.rows[rank + 1]
            and self.order.kind[place] == A
            and self.order.stage[place] == stage
        )

    def check(self) -> None:
        """Raise PartoptError where a device has not come to the end of its row."""
        for rank in range(self.order.ranks):
            if self.next[rank] < self.order.rows[rank + 1]:
                raise deadlock_error(self.order, self.next)

    def timeline(self) -> Timeline:
        """What happened, as arrays."""
        kind = object if self.number is Fraction else float
        sent = sorted(self.transfers)
        exchanged = sorted(self.exchanges.done)
        times = [np.array([each[field] for each in sent], dtype=kind) for field in (5, 6)]
        integers = [np.array([each[field] for each in sent], dtype=np.int32) for field in range(5)]
        return Timeline(
            order=self.order,
            start=np.array(self.start, dtype=kind),
            end=np.array(self.end, dtype=kind),
            list_transfers=lambda: Transfers(integers[0].astype(np.int8), *integers[1:], *times),
            collectives=Collectives(
                *(
                    np.array([each[field] for each in exchanged], dtype=np.int32)
                    for field in (0, 1)
                ),
                *(np.array([each[field] for each in exchanged], dtype=kind) for field in (2, 3)),
            ),
        )
