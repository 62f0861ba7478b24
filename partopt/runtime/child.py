"""A process of a local run: it joins the group, runs, and reports its result or its failure."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from partopt.errors import PartoptError
from partopt.profiler.device import keep_freed_memory
from partopt.runtime.context import Context, lost_connections
from partopt.runtime.progress import FINISHED, Progress
from partopt.runtime.signals import leave_to_parent
from partopt.runtime.store import join_store

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """How a process is started: its rank of `ranks`, and what it runs."""

    rank: int
    ranks: int
    main: Callable[[Context], Any]
    backend: str
    threads: int
    parent: int  # process id


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, and when.

    `consequence` says that it only lost the connection to a rank that failed before.
    """

    rank: int
    time_ns: int
    reason: str
    hint: str = ""
    details: str = ""
    consequence: bool = False


def run_child(start: Start, pipe: Connection, memory: Any) -> None:
    """Run one rank; its result, pickled, or its `Failure` goes into `pipe`."""
    die_with_parent(start.parent)
    leave_to_parent()
    torch.set_num_threads(start.threads)
    try:
        result = _run(start, pipe.recv(), memory)
        pipe.send_bytes(b"R" + pickle.dumps(result))
    except BaseException as error:
        try:
            pipe.send_bytes(b"F" + pickle.dumps(_failure(start.rank, error)))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # to leave the group in order would be to wait for the others
            os._exit(1)


def _run(start: Start, port: int, memory: Any) -> Any:
    progress = Progress(start.ranks, memory).writer(start.rank)
    device = torch.device("cpu")
    if start.backend == "nccl":
        device = torch.device("cuda", start.rank)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with lost_connections():
        store = join_store(port)
        dist.init_process_group(
            start.backend, store=store, rank=start.rank, world_size=start.ranks, timeout=_NEVER
        )
    context = Context(start.rank, start.ranks, device, progress)
    result = start.main(context)
    progress.note(FINISHED)
    context.barrier()  # a process that ends early closes what the others still read
    dist.destroy_process_group()
    return result


# the parent sees to it that nobody waits too long
_NEVER = timedelta(days=1)


def _failure(rank: int, error: BaseException) -> Failure:
    now_ns = time.perf_counter_ns()
    details = "".join(traceback.format_exception(error))
    if isinstance(error, PartoptError):
        lost = error.code == "lost-connection"
        return Failure(rank, now_ns, error.message, error.hint, details, lost)
    reason = f"{type(error).__name__}: {error}".strip()
    full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in reason
    hint = "it ran out of memory: plan for less memory" if full else ""
    return Failure(rank, now_ns, reason.splitlines()[0], hint, details)


def die_with_parent(parent: int) -> None:
    """Let this process be killed when the process `parent`, which started it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
        return
    process = multiprocessing.parent_process()
    assert process is not None

    def wait_for_parent() -> None:
        wait([process.sentinel])
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
