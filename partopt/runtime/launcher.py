"""Starts the processes of a run, here or as `torchrun` did, and gives their results."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partopt.documents.plan import Plan
from partopt.profiler.device import keep_freed_memory
from partopt.runtime.child import Start, run_child
from partopt.runtime.context import Context
from partopt.runtime.heartbeat import Heartbeat, watching
from partopt.runtime.progress import FIELDS, FINISHED, Progress
from partopt.runtime.signals import ending_at_once, held_back
from partopt.runtime.store import open_store
from partopt.runtime.supervise import Limits, Watch, end_processes

Result = TypeVar("Result")

LEAST_LIMIT_S = 10.0  # what a loaded machine may take for nothing
LIMIT_FACTOR = 10.0  # times the longest action, as it was predicted
SETUP_S = 600.0
GRACE_S = 5.0


def stall_limit_s(plan: Plan) -> float:
    """Seconds after which a run of `plan` in which no rank moves is stalled.

    They are ten times its longest action, and no fewer than 10.
    """
    longest = max(max(s.compute_s, s.gradients_s, s.optimizer_s) for s in plan.stages)
    return max(LEAST_LIMIT_S, LIMIT_FACTOR * longest)


def is_under_torchrun() -> bool:
    """Whether `torchrun`, or what sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def run_ranks(main: Callable[[Context], Result], plan: Plan, backend: str) -> Result:
    """Run `main` on every rank of `plan`, as processes of this host: the result of rank 0.

    Under `torchrun` this process is one of the ranks, and the result its own. The errors are those
    of `run_local`.
    """
    limit_s = stall_limit_s(plan)
    if is_under_torchrun():
        return run_here(main, limit_s=limit_s, backend=backend)
    ranks = plan.world_size
    threads = max(1, (os.cpu_count() or 1) // ranks)
    start = "spawn" if backend == "nccl" else None  # CUDA and forking do not go together
    return run_local(ranks, main, limit_s=limit_s, backend=backend, threads=threads, start=start)[0]


@ending_at_once()
def run_here(
    main: Callable[[Context], Result],
    *,
    limit_s: float = LEAST_LIMIT_S,
    setup_limit_s: float = SETUP_S,
    backend: str = "gloo",
) -> Result:
    """Run `main` in this process, which `torchrun` started, as one rank; its result.

    `torchrun` ends the run when a process ends. Where none moves, as `run_local` says, or the
    store of the run is gone, every process that can tells so on standard error and ends with exit
    code 1. SIGINT, SIGTERM and SIGHUP end the process.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    dist.init_process_group(backend)
    progress = Progress(ranks)
    writer = progress.writer(rank)
    heartbeat = Heartbeat(dist.distributed_c10d._get_default_store(), progress, rank)
    context = Context(rank, ranks, device, writer, tell=heartbeat.tell)
    with watching(heartbeat, limit_s, setup_limit_s):
        result = main(context)
        context.progress.note(FINISHED)
        context.barrier()  # a process that ends early closes what the others still read
    dist.destroy_process_group()
    return result


def run_local(
    ranks: int,
    main: Callable[[Context], Result],
    *,
    limit_s: float = LEAST_LIMIT_S,
    setup_limit_s: float = SETUP_S,
    grace_s: float = GRACE_S,
    backend: str = "gloo",
    threads: int = 1,
    start: str | None = None,
) -> list[Result]:
    """Run `main` as `ranks` processes on this host; their results, in the order of ranks.

    The processes are forked, where this process has a single thread of Python and no CUDA, or
    else spawned; `start` ("fork", "spawn") says otherwise. Spawned ones need a `main` that can be
    pickled. Raises PartoptError where a rank raises, ends or is killed, or where none does
    anything for `limit_s` within a schedule (see `stall_limit_s`) or `setup_limit_s` around it:
    it names the rank that failed first and the last action of all. However this ends, no process
    and no port is left.
    """
    starting: Any = multiprocessing.get_context(start or _safe_start())
    memory = starting.RawArray("q", ranks * FIELDS)
    processes: list[Any] = []
    pipes: list[Connection] = []
    store = None
    try:
        for rank in range(ranks):
            ours, theirs = starting.Pipe()
            begun = Start(rank, ranks, main, backend, threads, os.getpid())
            process = starting.Process(  # no daemon: it may have children that load data
                target=run_child, args=(begun, theirs, memory), name=f"rank-{rank}"
            )
            with held_back():  # the child heeds no signal before it knows which
                process.start()
                processes.append(process)
                pipes.append(ours)
            theirs.close()  # that the end of the process is the end of the pipe
        store, port = open_store(ranks)  # after the forks: it has threads
        for pipe in pipes:
            pipe.send(port)
        limits = Limits(limit_s, setup_limit_s, grace_s)
        results = Watch(processes, pipes, Progress(ranks, memory), limits).results_of_all()
        end_processes(processes, grace_s)
        return results
    finally:
        with held_back():
            end_processes([process for process in processes if not process._closed])
            for pipe in pipes:
                pipe.close()
        # not left to the traceback of an error: a process forked later must not inherit its thread
        del store


def _safe_start() -> str:
    """How to start processes: forking takes milliseconds, but only where it cannot go wrong."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    alone = threading.active_count() == 1 and not cuda
    return "fork" if forks and alone else "spawn"
