"""The processes of a run: started here or by `torchrun`, and ended together.

A rank that raises or dies ends the run at once. One that lives may be slow: others wait for it for
`WAIT_S`, as everywhere in torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from partopt.errors import ANSWER_IS_NO, PartoptError, invalid, unknown_value
from partopt.profiler.device import keep_freed_memory
from partopt.profiler.step import USUAL_CAUSE
from partopt.runtime.context import (
    FIELDS,
    FINISHED,
    WAIT_S,
    Context,
    Progress,
    lost_connections,
)

Result = TypeVar("Result")

BACKENDS = ("auto", "gloo", "nccl")
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # signals that end a run
GRACE_S = 5.0  # for ranks to say why they fail behind the first, and to end
JOIN_S = 120.0  # until all processes have joined
# Of CUDA, for ranks: kernels are loaded before the first step and not in it, and no two streams
# share a queue of the hardware. People set one queue for Megatron.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CUDA = {"CUDA_MODULE_LOADING": "EAGER", CONNECTIONS: "32"}
_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def choose_backend(name: str, ranks_here: int) -> str:
    """`gloo` or `nccl`, for so many ranks of this host; `auto` is NCCL where torch sees a GPU.

    Raises PartoptError for one that is unknown, or cannot be taken here: a run that is meant for
    GPUs does not go to the processors unasked.
    """
    if name not in BACKENDS:
        raise unknown_value("backend", name, BACKENDS)
    built = dist.is_available() and dist.is_nccl_available()
    devices = torch.cuda.device_count() if built else 0
    if name == "gloo" or (name == "auto" and not devices):
        return "gloo"
    given = os.environ.get(CONNECTIONS, "32")
    if not (given.isdecimal() and 1 <= int(given) <= 32):
        raise PartoptError(
            f'{CONNECTIONS}="{given}" must be a number of queues from 1 to 32',
            f"unset {CONNECTIONS}: ranks take 32",
            code="invalid-environment",
            option="backend",
        )
    what, hint = "this torch was built without NCCL", "`backend=gloo` is for processors"
    if built:
        if is_under_torchrun():
            local_device(devices)
            return "nccl"
        if devices >= ranks_here:
            return "nccl"
        what = f"{ranks_here} ranks need a GPU each, torch sees {devices}"
    raise invalid("backend", name, what, hint)


def local_device(devices: int) -> int:
    """Which of the GPUs that this rank sees it computes on: LOCAL_RANK, or of one that one.

    Raises PartoptError where there is none.
    """
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    # srun may show a task its GPU alone; under torchrun what it starts may
    shown = "TORCHELASTIC_RUN_ID" not in os.environ or "CUDA_VISIBLE_DEVICES" in os.environ
    if devices == 1 and shown:
        return 0
    if number is None:
        what = f"LOCAL_RANK is not set, and torch sees {devices} GPUs"
    elif int(number) < devices:
        return int(number)
    else:
        what = f"rank {number} of this host has no GPU: torch sees {devices}"
    raise PartoptError(
        what,
        "start as many ranks on a host as it has GPUs, with LOCAL_RANK from 0 on; `backend=gloo` "
        "is for processors",
        code="no-such-device",
        option="backend",
    )


def ranks_of_host() -> int | None:
    """The ranks that the launcher has started on this host, where it says so.

    torchrun does. srun has a list such as `4(x2),3`, of which the one for all hosts counts.
    """
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    number = os.environ.get("LOCAL_WORLD_SIZE", tasks.partition("(")[0])
    return int(number) if number.isdecimal() else None


def is_under_torchrun() -> bool:
    """Whether `torchrun`, or what sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def run_ranks(main: Callable[[Context], Result], ranks: int, backend: str) -> Result:
    """Run `main` on so many ranks, as processes of this host: the result of rank 0.

    Under `torchrun` this process is one of the ranks, and the result that of this rank.
    The errors are those of `run_local`.
    """
    if is_under_torchrun():
        return run_here(main, backend)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return run_local(ranks, main, backend=backend, threads=threads, wait_s=WAIT_S)[0]


def run_here(main: Callable[[Context], Result], backend: str = "gloo") -> Result:
    """Run `main` in this process, which `torchrun` started, as one rank; its result.

    `torchrun` ends the run when a process ends, and this process ends with torchrun. SIGINT,
    SIGTERM and SIGHUP end it, too, even while it waits for a message.
    """
    with _ending_at_once():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _die_with_parent(os.getppid())
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = _take_device(backend)
        with lost_connections():
            dist.init_process_group(
                backend, timeout=timedelta(seconds=WAIT_S), device_id=_bound(device)
            )
        return _run_in_group(main, Context(rank, ranks, device, Progress(), backend=backend))


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Within the context signals end this process; a handler of Python's would wait for messages.

    What is ignored stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number in ENDING if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def run_local(
    ranks: int,
    main: Callable[[Context], Result],
    *,
    backend: str = "gloo",
    threads: int = 1,
    start: str | None = None,
    wait_s: float = WAIT_S,
) -> list[Result]:
    """Run `main` as `ranks` processes on this host; their results, in the order of ranks.

    The processes are forked, where this process has a single thread of Python and no CUDA, or
    else spawned; `start` ("fork", "spawn") says otherwise. Spawned ones need a `main` that can be
    pickled. Raises PartoptError where a rank raises, ends or is killed, or where others have waited
    for it for `wait_s`: it names the rank that failed first and the last action of all. However
    this ends, no process and no port is left.
    """
    # forking takes milliseconds, but is safe only there
    cuda = backend == "nccl" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    forks = "fork" in multiprocessing.get_all_start_methods()
    safe = "fork" if forks and threading.active_count() == 1 and not cuda else "spawn"
    starting: Any = multiprocessing.get_context(start or safe)
    memory = starting.RawArray("q", ranks * FIELDS)
    run = _LocalRun(np.frombuffer(memory, dtype=np.int64).reshape(ranks, FIELDS))
    store = None
    try:
        for rank in range(ranks):
            run.start(starting, _Child(rank, ranks, main, backend, threads, wait_s), memory)
        store = _open_store(ranks)  # after the forks: it has threads
        for pipe in run.pipes:
            pipe.send(store.port)
        results = run.results()
        run.end(GRACE_S)
        return results
    finally:
        run.end()
        # not left to the traceback of an error: a process forked later must not inherit its thread
        del store


def _open_store(ranks: int) -> Any:
    """The store by which the processes find one another, on a port of this host alone."""
    listening = socket.create_server((_HOST, 0))
    return TCPStore(
        _HOST,
        listening.getsockname()[1],
        world_size=ranks + 1,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_S),
        master_listen_fd=listening.detach(),
    )


def _take_device(backend: str, number: int | None = None) -> torch.device:
    """The device of this rank: its GPU, by default the one of a launcher's rank, or the CPU."""
    if backend == "nccl":
        for name, value in CUDA.items():  # before CUDA begins, which reads them once
            os.environ.setdefault(name, value)
        number = local_device(torch.cuda.device_count()) if number is None else number
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    keep_freed_memory()
    return torch.device("cpu")


def _bound(device: torch.device) -> torch.device | None:
    """The device that a process group is bound to, so that it is ready once it is made."""
    return device if device.type == "cuda" else None


def _run_in_group(main: Callable[[Context], Result], context: Context) -> Result:
    result = main(context)
    context.progress.note(FINISHED)
    context.barrier()  # a process that ends early closes what the others still read
    dist.destroy_process_group()
    return result


def _die_with_parent(parent: int) -> None:
    """Let this process be killed when the process `parent`, which started it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, and when.

    `lost` says that it only lost the connection to a rank that failed before, or waited for it.
    """

    rank: int
    reason: str
    hint: str = ""
    details: str = ""
    lost: bool = False
    time_s: float = 0.0

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """That of a rank that raised."""
        details, now_s = "".join(traceback.format_exception(error)), time.monotonic()
        if isinstance(error, PartoptError):
            lost = error.code == "lost-connection"
            return cls(rank, error.message, error.hint, details, lost, now_s)
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in reason
        hint = "it ran out of memory: plan for less memory" if full else ""
        if not full and "CUDA error" in reason:
            hint = f"{USUAL_CAUSE}: a profile on one GPU names the layer"
        return cls(rank, reason, hint, details, time_s=now_s)

    @classmethod
    def of_end(cls, rank: int, code: int) -> Failure:
        """That of a process that ended without a report."""
        reason, hint = f"the process ended with exit code {code}", ""
        if code < 0:
            reason = f"the process was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            hint = "the system kills a process so when memory runs out: see `dmesg`"
        return cls(rank, reason, hint, time_s=time.monotonic())


@dataclass(frozen=True)
class _Child:
    """A process of a local run: one rank of `ranks`, and what it runs."""

    rank: int
    ranks: int
    main: Callable[[Context], Any]
    backend: str
    threads: int
    wait_s: float

    def run(self, parent: int, pipe: Connection, memory: Any) -> None:
        """Run the rank; its result or its `Failure`, pickled, goes into `pipe`."""
        _die_with_parent(parent)
        # the parent gets them too, and then ends all: Ctrl-C, a hang-up
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        torch.set_num_threads(self.threads)
        try:
            result = self._run_main(pipe.recv(), memory)
            pipe.send_bytes(pickle.dumps(result))
        except BaseException as error:
            try:
                pipe.send_bytes(pickle.dumps(Failure.of(self.rank, error)))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # to leave the group in order would be to wait for the others
                os._exit(1)

    def _run_main(self, port: int, memory: Any) -> Any:
        row = np.frombuffer(memory, dtype=np.int64).reshape(self.ranks, FIELDS)[self.rank]
        device = _take_device(self.backend, self.rank)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join, limit = timedelta(seconds=JOIN_S), timedelta(seconds=self.wait_s)
        with lost_connections():
            store = TCPStore(_HOST, port, timeout=join)
            dist.init_process_group(
                self.backend,
                store=store,
                rank=self.rank,
                world_size=self.ranks,
                timeout=limit,
                device_id=_bound(device),
            )
        given = device, Progress(row), self.wait_s
        context = Context(self.rank, self.ranks, *given, backend=self.backend)
        return _run_in_group(self.main, context)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Within the context, signals wait: nothing is left half-started or half-ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _LocalRun:
    """The processes of a local run in the order of their ranks, and what they have reported."""

    def __init__(self, rows: Any) -> None:
        rows[:] = Progress().row
        self.progress = [Progress(row) for row in rows]
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.reports: dict[int, Any] = {}  # by rank: a result or a Failure

    def start(self, starting: Any, child: _Child, memory: Any) -> None:
        """Start the next rank; it is no daemon, for it may have children that load data."""
        ours, theirs = starting.Pipe()
        process = starting.Process(
            target=child.run, args=(os.getpid(), theirs, memory), name=f"rank-{child.rank}"
        )
        with _held_back():  # the child heeds no signal before it knows which
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)
        theirs.close()  # that the end of the process is the end of the pipe

    def results(self) -> list[Any]:
        """Wait for all results. Raises PartoptError that names the first failure."""
        while self._open and not self._failures:
            self._take_reports()
        until_s = time.monotonic() + GRACE_S
        # who lost another is no reason to end before that one has said why
        while all(failure.lost for failure in self._failures) and self._open:
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            self._take_reports(left_s)
        if self._failures:
            raise self._error()
        return [self.reports[rank] for rank in range(len(self.processes))]

    @property
    def _open(self) -> list[int]:
        """The ranks that have reported nothing."""
        return [rank for rank in range(len(self.processes)) if rank not in self.reports]

    @property
    def _failures(self) -> list[Failure]:
        return [report for report in self.reports.values() if isinstance(report, Failure)]

    def _take_reports(self, limit_s: float | None = None) -> None:
        """Wait until ranks report or end, or for so long, and take down what they report."""
        ends = {rank: self.processes[rank].sentinel for rank in self._open}
        ready = wait([*ends.values(), *(self.pipes[rank] for rank in ends)], limit_s)
        for rank, end in ends.items():
            process, pipe = self.processes[rank], self.pipes[rank]
            if end not in ready and pipe not in ready:
                continue
            try:
                if pipe.poll():
                    self.reports[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                pass
            if rank not in self.reports:
                process.join()
                self.reports[rank] = Failure.of_end(rank, process.exitcode)

    def _error(self) -> PartoptError:
        """What is said of the first rank that failed by itself, or that others waited for."""
        first = min(self._failures, key=lambda failure: (failure.lost, failure.time_s))
        if first.lost and (silent := self._open):
            rank = min(silent, key=lambda rank: not self.progress[rank].works)
            first = Failure(rank, "it is alive, but others waited for it in vain")
        action = self.progress[first.rank].action
        lines = [f"  rank {rank}: {progress}" for rank, progress in enumerate(self.progress)]
        where = f" at {action}" if action else ""
        return PartoptError(
            "\n".join([f"rank {first.rank} failed{where}: {first.reason}", *lines]),
            first.hint,
            ANSWER_IS_NO,
            code="run-failed",
            rank=first.rank,
            reason=first.reason,
            details=first.details,
            last_actions=[progress.action for progress in self.progress],
        )

    def end(self, grace_s: float = 0.0) -> None:
        """Kill what still runs after `grace_s`, stopped processes too, and wait for all ends."""
        until_s = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, until_s - time.monotonic()))
        with _held_back():
            for process in self.processes:
                process.kill()
            for process, pipe in zip(self.processes, self.pipes, strict=True):
                process.join()
                process.close()
                pipe.close()
            self.processes, self.pipes = [], []
