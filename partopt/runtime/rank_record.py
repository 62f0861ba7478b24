"""When a rank began and ended each action and message, in arrays that are written as it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]  # nanoseconds, shape (steps, actions of the rank); 0 where there is none


@dataclass(eq=False)
class RankRecord:
    """What one rank did in `steps` steps.

    Times are of `time.perf_counter_ns`, which processes of one host share; `started_ns` is when the
    barrier before each step ended. `waited` are the nanoseconds for which an action waited for its
    message, for its gradients, or for the sends before it where the plan's devices wait; they come
    before its begin. A received message is there at `received` at the latest: exactly then only
    where the action waited. The exchange that an action A begins ends at `exchanged`, while the
    rank goes on.
    """

    rank: int
    host: str
    steps: int
    actions: int
    started_ns: Times = field(init=False)
    begin: Times = field(init=False)
    end: Times = field(init=False)
    waited: Times = field(init=False)
    receive_posted: Times = field(init=False)
    received: Times = field(init=False)
    send_posted: Times = field(init=False)
    sent: Times = field(init=False)
    exchanged: Times = field(init=False)

    def __post_init__(self) -> None:
        shape = self.steps, self.actions
        self.started_ns = np.zeros(self.steps, np.int64)
        self.begin, self.end, self.waited = (np.zeros(shape, np.int64) for _ in range(3))
        self.receive_posted, self.received = (np.zeros(shape, np.int64) for _ in range(2))
        self.send_posted, self.sent = (np.zeros(shape, np.int64) for _ in range(2))
        self.exchanged = np.zeros(shape, np.int64)
