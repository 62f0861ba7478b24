"""When what a rank sends is sent, and what it exchanges exchanged, while it goes on.

Under NCCL `work.wait()` does not wait: it makes the stream wait that is current. In the stream of
the model that would end all overlap; in one of its own the wait may lie in the same queue of the
hardware as the model, and hold it all the same, for ever where the other rank needs what comes
next. So a thread asks every work again and again whether it is done, and no stream waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from partopt.runtime.context import Context, lost_connections

POLL_S = 1e-4  # between two questions: so late may an end be noted

Note = Callable[[int], None]  # takes down a time of `time.perf_counter_ns`


class _Begun(NamedTuple):
    """A work that is not known to be done, the memory that it needs, and who is told of its end."""

    work: Any
    memory: Any
    note: Note


class Completions:
    """Under gloo: a thread waits for sends in turn, and a future tells of exchanges.

    gloo tells nobody that a send is done who does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun: queue.Queue[_Begun | None] = queue.Queue()
        self._thread: threading.Thread | None = None  # from the first work on
        self._failure: Exception | None = None

    def keep(self, work: Any, memory: Any, note: Note) -> None:
        """Keep what is sent until it is; then `note` gets the time."""
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._begun.put(_Begun(work, memory, note))

    def tell(self, work: Any, note: Note) -> None:
        """Let `note` get the time at which an exchange ends, soon after that."""
        work.get_future().add_done_callback(lambda _: note(time.perf_counter_ns()))

    def drain(self) -> None:
        """Wait until all that is kept is done."""
        self._begun.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread; what is not done yet is left to the process group."""
        self._begun.put(None)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                with lost_connections():
                    begun.work.wait()
                begun.note(time.perf_counter_ns())
            except Exception as error:
                self._failure = error
            del begun  # a message is kept no longer
            self._begun.task_done()


class PolledCompletions(Completions):
    """Under NCCL: a thread asks whether works are done, in whatever order they end."""

    def tell(self, work: Any, note: Note) -> None:
        """Let `note` get the time at which an exchange ends; a future is done at its launch."""
        self.keep(work, None, note)

    def _run(self) -> None:
        if self.device.type == "cuda":  # else the thread would open the first GPU
            torch.cuda.set_device(self.device)
        pending: list[_Begun] = []
        while True:
            try:
                begun = self._begun.get(timeout=POLL_S if pending else None)
            except queue.Empty:
                pending = [each for each in pending if not self._ends(each)]
                continue
            if begun is None:
                return
            pending.append(begun)
            del begun

    def _ends(self, begun: _Begun) -> bool:
        try:
            if not begun.work.is_completed():
                return False
            begun.note(time.perf_counter_ns())
        except Exception as error:
            self._failure = error
        self._begun.task_done()
        return True


def completions_of(context: Context) -> Completions:
    """What notes the ends of a rank's works."""
    made = PolledCompletions if context.backend == "nccl" else Completions
    return made(context.device)
