"""When the actions of a rank ran on torch's pipeline runtime, noted from its calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from partopt.runtime.context import COMPUTING, EXCHANGING, RECEIVING, SENDING, Progress
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.routes import Action
from partopt.schedules.order import A, B, F, I, U

# m   number of a microbatch in its pipeline, one of d side by side


class ActionTimes:
    """The times of one rank's actions; `step` is the one that runs."""

    def __init__(
        self, record: RankRecord, progress: Progress, actions: Sequence[Action], d: int
    ) -> None:
        self.record, self.progress, self.step = record, progress, 0
        self._actions = {
            (_whole(action.kind), action.stage, action.microbatch // d): action
            for action in actions
        }
        self._waiting_since_ns: int | None = None

    def place(self, kind: int, stage: int, m: int = 0) -> int | None:
        """The place of an action in the rank's row; None where it has no such action."""
        action = self._actions.get((kind, stage, m))
        return None if action is None else action.place

    def note_receive(self, kind: int, stage: int, m: int) -> None:
        """Note that the receive of what an action needs is posted."""
        place = self._actions[kind, stage, m].place
        self.record.receive_posted[self.step, place] = time.perf_counter_ns()

    def begin_wait(self, kind: int, stage: int, m: int = 0) -> None:
        """Note that an action, the next to begin, waits for what it needs of other ranks."""
        self._act(self._actions[kind, stage, m], EXCHANGING if kind == U else RECEIVING)
        self._waiting_since_ns = time.perf_counter_ns()

    def begin(self, kind: int, stage: int, m: int = 0) -> None:
        """Note that an action begins, with what it waited for."""
        action = self._actions[_whole(kind), stage, m]
        self._act(action, EXCHANGING if kind == A else COMPUTING)
        now_ns = time.perf_counter_ns()
        self.record.begin[self.step, action.place] = now_ns
        if self._waiting_since_ns is not None:
            self.record.waited[self.step, action.place] = now_ns - self._waiting_since_ns
            self._waiting_since_ns = None
            if kind in (F, B, I):
                self.record.received[self.step, action.place] = now_ns

    def end(self, kind: int, stage: int, m: int = 0) -> None:
        """Note that an action ends."""
        place = self._actions[_whole(kind), stage, m].place
        self.record.end[self.step, place] = time.perf_counter_ns()
        self.progress.note(SENDING)

    def note_send(self, kind: int, stage: int, m: int) -> None:
        """Note that what an action made is about to be sent."""
        place = self._actions[kind, stage, m].place
        self.record.send_posted[self.step, place] = time.perf_counter_ns()

    def end_sends(self) -> None:
        """Note that all of the step is sent: torch waits for sends at its end alone."""
        posted, sent = self.record.send_posted[self.step], self.record.sent[self.step]
        sent[posted > 0] = time.perf_counter_ns()

    def _act(self, action: Action, state: int) -> None:
        self.progress.act(self.step, action.kind, action.stage, action.microbatch, state)


class Awaited(dict[Any, Any]):
    """torch's receives that wait for their use, by stage and m; notes when they come and go."""

    def __init__(self, kind: int, times: ActionTimes) -> None:
        super().__init__()
        self._kind, self._times = kind, times

    def __setitem__(self, key: tuple[int, int], works: Any) -> None:
        super().__setitem__(key, works)
        self._times.note_receive(self._kind, *key)

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        """Take the receives of an action, for which it waits next."""
        self._times.begin_wait(self._kind, *key)
        return super().pop(key, *default)


def _whole(kind: int) -> int:
    """The kind under which an action is known: a backward of inputs is where a whole one is."""
    return B if kind == I else kind
