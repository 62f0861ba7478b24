"""When what a rank sends is sent, and what it exchanges exchanged, while it goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from partopt.runtime.actions import Times
from partopt.runtime.clock import RankClock
from partopt.runtime.context import Context, lost_connections


class _Begun(NamedTuple):
    """A work that is not known to be done, the memory that it needs, and where its end is noted."""

    work: Any
    memory: Any
    times: Times
    place: Any


class Completions:
    """Under gloo: a thread waits for sends in turn, and futures tell of exchanges.

    gloo tells nobody that a send is done who does not wait for it.
    """

    def __init__(self) -> None:
        self._begun: queue.Queue[_Begun | None] = queue.Queue()
        self._thread: threading.Thread | None = None  # from the first work on
        self._failure: Exception | None = None
        self._watched, self._noted = 0, threading.Semaphore(0)

    def keep(self, work: Any, memory: Any, times: Times, place: Any, line: Hashable) -> None:
        """Keep what is sent until it is, and note when that is.

        Works of one `line` end in the order in which they begin.
        """
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._begun.put(_Begun(work, memory, times, place))

    def watch(self, works: Sequence[Any], times: Times, place: Any, line: Hashable) -> None:
        """Note when the last of the works of an exchange ends, soon after that."""

        def note(_: Any) -> None:
            times[place] = time.perf_counter_ns()
            self._noted.release()

        self._watched += len(works)
        for work in works:
            work.get_future().add_done_callback(note)

    def wait_for_sends(self) -> None:
        """Wait within a step until all that is kept is sent."""
        self._begun.join()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait behind a step until all is sent, exchanged and noted."""
        self.wait_for_sends()
        for _ in range(self._watched):
            self._noted.acquire()
        self._watched = 0

    def close(self) -> None:
        """End the thread; what is not done yet is left to the process group."""
        self._begun.put(None)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                with lost_connections():
                    begun.work.wait()
                begun.times[begun.place] = time.perf_counter_ns()
            except Exception as error:
                self._failure = error
            del begun  # a message is kept no longer
            self._begun.task_done()


class StreamCompletions(Completions):
    """Under NCCL: a stream for every line waits for its works, and an event there is their end.

    `work.wait()` holds the stream that is current, which must not be the model's; the host only
    asks now and then whether memory can go.
    """

    def __init__(self, clock: RankClock, streams: dict[Hashable, Any]) -> None:
        super().__init__()
        self.clock, self._streams = clock, streams
        self._kept: deque[tuple[Any, Any]] = deque()  # events, with the memory until they come

    def keep(self, work: Any, memory: Any, times: Times, place: Any, line: Hashable) -> None:
        """Keep what is sent until its event has come, and note when that is."""
        self._kept.append((self._note(work, times, place, line), memory))
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()

    def watch(self, works: Sequence[Any], times: Times, place: Any, line: Hashable) -> None:
        """Note when the last of the works of an exchange ends."""
        for work in works[-1:]:
            self._note(work, times, place, line)

    def wait_for_sends(self) -> None:
        """Wait for nothing: a host that waits for its device may wait for another's host."""

    def drain(self) -> None:
        """Keep nothing more: the clock waits for the device at the end of a step."""
        self._kept.clear()

    def _note(self, work: Any, times: Times, place: Any, line: Hashable) -> Any:
        with torch.cuda.stream(self._streams[line]), lost_connections():
            work.wait()
            event = self.clock.now()
        self.clock.note(times, place, event)
        return event


def completions_of(context: Context, clock: RankClock) -> Completions:
    """What notes the ends of a rank's works."""
    if context.backend != "nccl":
        return Completions()
    streams = context.once("completions", lambda: defaultdict[Hashable, Any](torch.cuda.Stream))
    return StreamCompletions(clock, streams)
