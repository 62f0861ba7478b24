"""Watches the processes of a local run, and ends them all when one fails or nothing moves."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.runtime.child import Failure
from partopt.runtime.processes import cpu_s, is_stopped
from partopt.runtime.progress import OUTSIDE, Last, Progress

POLL_S = 0.2
PAUSE_S = 1.0  # between looks at the run, above which this process was stopped itself
STOPPED_S = 10.0  # for which a process may be stopped, whatever its actions take
COMPUTES = 0.05  # of a core: who takes less does nothing
_NS = 1e9


@dataclass(frozen=True)
class Limits:
    """How long a run may stand still, in seconds.

    Within a schedule it is stalled when no rank has begun or ended anything for `action_s`; while a
    rank is in the program around it, or computes in the first step, for `setup_s`: code may be
    compiled and memory touched for the first time. No process may be stopped for `action_s`, or
    for 10 s. After the first failure the others have `grace_s` to say why they fail.
    """

    action_s: float
    setup_s: float
    grace_s: float


class Watch:
    """The processes of a run, in the order of their ranks, and the pipes that they report by."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        pipes: Sequence[Connection],
        progress: Progress,
        limits: Limits,
    ) -> None:
        self.processes, self.pipes, self.progress = processes, pipes, progress
        self.limits = limits
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.stopped_ns: dict[int, int] = {}  # since when a rank is seen stopped
        # when each rank came to its action, when that was seen, and the processor time until then
        self.seen: dict[int, tuple[int, int, float]] = {}
        self.began_ns = self.looked_ns = time.perf_counter_ns()

    def results_of_all(self) -> list[Any]:
        """Wait for all results. Raises PartoptError that names the first failure."""
        while len(self.results) < len(self.processes):
            self._wait(POLL_S)
            if self.failures:
                self._hear_the_others()
            elif self._open():
                self._find_stall(time.perf_counter_ns())
            if self.failures:
                raise self._error()
        return [self.results[rank] for rank in range(len(self.processes))]

    def _hear_the_others(self) -> None:
        until = time.perf_counter() + self.limits.grace_s
        while (left_s := until - time.perf_counter()) > 0 and self._open():
            self._wait(min(POLL_S, left_s))

    def _open(self) -> list[int]:
        """The ranks that have neither a result nor a failure."""
        ranks = range(len(self.processes))
        return [rank for rank in ranks if rank not in self.results and rank not in self.failures]

    def _wait(self, seconds: float) -> None:
        """Wait for reports and ends of processes, and take them down."""
        open_ = self._open()
        ready = wait(
            [self.pipes[rank] for rank in open_]
            + [self.processes[rank].sentinel for rank in open_],
            seconds,
        )
        for rank in open_:
            if self.pipes[rank] in ready or self.processes[rank].sentinel in ready:
                self._take_report(rank)

    def _take_report(self, rank: int) -> None:
        now_ns = time.perf_counter_ns()
        try:
            message = self.pipes[rank].recv_bytes() if self.pipes[rank].poll() else b""
        except (EOFError, OSError):
            message = b""
        if message[:1] == b"R":
            self.results[rank] = pickle.loads(message[1:])
        elif message[:1] == b"F":
            self.failures[rank] = pickle.loads(message[1:])
        else:
            self.processes[rank].join()
            self.failures[rank] = _ended(rank, now_ns, self.processes[rank].exitcode or 0)

    def _find_stall(self, now_ns: int) -> None:
        """Take down the rank that is stopped, or where none moves the one that others wait for."""
        if now_ns - self.looked_ns > PAUSE_S * _NS:  # Ctrl-Z stops the others, too
            self.began_ns = now_ns
            self.stopped_ns.clear()
        self.looked_ns = now_ns
        open_, limits = self._open(), self.limits
        stopped = [rank for rank in open_ if is_stopped(self.processes[rank].pid)]
        self.stopped_ns = {rank: self.stopped_ns.get(rank, now_ns) for rank in stopped}
        last = {rank: self.progress.last(rank) for rank in range(len(self.processes))}
        newest_ns = max(self.began_ns, *(each.time_ns for each in last.values()))
        outside = any(
            last[rank].state == OUTSIDE or self._warms_up(rank, last[rank], now_ns)
            for rank in open_
        )
        still = now_ns - newest_ns > (limits.setup_s if outside else limits.action_s) * _NS
        for rank, since_ns in self.stopped_ns.items():
            if still or now_ns - since_ns > min(limits.action_s, STOPPED_S) * _NS:
                self._fail(rank, since_ns, "the process is stopped, for", now_ns)
                return
        if still:
            first = min(open_, key=lambda rank: (not last[rank].works, last[rank].time_ns))
            self._fail(first, newest_ns, "no progress of any rank for", now_ns)

    def _warms_up(self, rank: int, last: Last, now_ns: int) -> bool:
        """Whether a rank computes in its first step, and not only says so."""
        if not (last.works and last.step == 0):
            return False
        used_s = cpu_s(self.processes[rank].pid)
        if self.seen.get(rank, (0, 0, 0.0))[0] != last.time_ns:
            self.seen[rank] = last.time_ns, now_ns, used_s
        _, seen_ns, before_s = self.seen[rank]
        return used_s - before_s >= COMPUTES * (now_ns - seen_ns) / _NS

    def _fail(self, rank: int, since_ns: int, what: str, now_ns: int) -> None:
        reason = f"{what} {(now_ns - since_ns) / _NS:.0f} s"
        self.failures[rank] = Failure(rank, since_ns, reason)

    def _error(self) -> PartoptError:
        found = self.failures.values()
        first = min(found, key=lambda failure: (failure.consequence, failure.time_ns))
        last = [self.progress.last(rank) for rank in range(len(self.processes))]
        lines = [f"  rank {rank}: {each}" for rank, each in enumerate(last)]
        where = f" at {last[first.rank].action}" if last[first.rank].action else ""
        return PartoptError(
            "\n".join([f"rank {first.rank} failed{where}: {first.reason}", *lines]),
            first.hint,
            ANSWER_IS_NO,
            code="run-failed",
            rank=first.rank,
            reason=first.reason,
            details=first.details,
            last_actions=[each.action for each in last],
            failures=[(each.rank, each.reason) for each in found],
        )


def _ended(rank: int, now_ns: int, code: int) -> Failure:
    """The failure of a process that ended without a report."""
    if code >= 0:
        return Failure(rank, now_ns, f"the process ended with exit code {code}")
    name = signal.Signals(-code).name
    hint = ""
    if -code == signal.SIGKILL:
        hint = "the system kills a process so when memory runs out: see `dmesg`"
    return Failure(rank, now_ns, f"the process was killed by signal {-code} ({name})", hint)


def end_processes(processes: Sequence[BaseProcess], grace_s: float = 0.0) -> None:
    """Kill what still runs after `grace_s`, stopped processes too, and wait for the ends of all."""
    until = time.perf_counter() + grace_s
    for process in processes:
        process.join(max(0.0, until - time.perf_counter()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()
