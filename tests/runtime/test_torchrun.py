"""Ranks that torchrun starts run a plan, and end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from tests.helpers import ROOT


def test_processes_that_torchrun_started_run_a_plan():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [rank_of_three(rank, port) for rank in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["done\n"] * 3


def test_ranks_end_at_once_when_told_to():
    """The first rank hangs, the others wait for it; one gets SIGTERM, and the last one sees it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [rank_of_three(rank, port, "hang") for rank in range(3)]
    first, second, third = ranks
    try:
        assert first.stdout is not None and first.stdout.readline() == "hangs\n"
        second.terminate()
        second.communicate(timeout=5)
        assert second.returncode == -signal.SIGTERM
        assert "lost the connection" in third.communicate(timeout=5)[1]
        assert third.returncode == 1
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def test_ranks_end_with_torchrun_where_it_is_killed():
    options = ["--standalone", "--nproc-per-node", "3", "-m", "tests.runtime.failures", "hang"]
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "hangs\n"
    finally:
        run.kill()
    # the pipe ends with the last of the processes that may write into it
    assert run.communicate(timeout=10)[0] == ""


def rank_of_three(rank: int, port: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A rank of `tests.runtime.failures`, as torchrun starts it."""
    own = {"RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.failures", *arguments],
        cwd=ROOT,
        env=os.environ | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
