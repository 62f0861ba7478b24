"""Ranks that hear of each other through a store know when the run stands still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from partopt.runtime.heartbeat import Heartbeat
from partopt.runtime.progress import COMPUTING, RECEIVING, Progress
from partopt.schedules.order import B, F
from tests.helpers import ROOT

ALWAYS_S, NEVER_S = -1.0, 1e9


def heartbeats(ranks: int) -> tuple[list[Progress], list[Heartbeat]]:
    store = dist.HashStore()
    each = [Progress(ranks) for _ in range(ranks)]
    return each, [Heartbeat(store, own, rank) for rank, own in enumerate(each)]


def test_a_stall_names_what_every_rank_did_last():
    (first, second), hearts = heartbeats(2)
    first.writer(0).act(3, F, 0, 5, COMPUTING)
    second.writer(1).act(3, B, 1, 4, RECEIVING)
    hearts[1].beat()
    hearts[0].beat()
    lines = hearts[0].stall(ALWAYS_S, NEVER_S).splitlines()
    assert lines[0].startswith("rank 0 failed at 0F5: no progress of any rank")
    assert lines[1:] == [
        "  rank 0: 0F5 of step 3, computing",
        "  rank 1: 1B4 of step 3, waiting to receive",
    ]
    assert hearts[0].stall(NEVER_S, ALWAYS_S) == ""


def test_a_rank_outside_the_schedule_may_take_longer():
    (first, second), hearts = heartbeats(2)
    first.writer(0).act(0, F, 0, 0, COMPUTING)
    second.writer(1)
    hearts[1].beat()
    hearts[0].beat()
    assert hearts[0].stall(ALWAYS_S, NEVER_S) == ""
    assert "no action yet" in hearts[0].stall(NEVER_S, ALWAYS_S)


def test_of_ranks_that_compute_the_one_that_moved_the_longest_ago_is_named():
    (first, second), hearts = heartbeats(2)
    writers = first.writer(0), second.writer(1)
    for microbatch in range(2):
        writers[0].act(1, F, 0, microbatch, COMPUTING)
        if microbatch == 0:
            writers[1].act(1, F, 1, microbatch, COMPUTING)
        hearts[1].beat()
        hearts[0].beat()
    assert "rank 1 failed at 1F0: no progress" in hearts[0].stall(ALWAYS_S, NEVER_S)


def test_a_rank_that_computes_moves_in_its_first_step_alone():
    (_, second), hearts = heartbeats(2)
    writer, moved = second.writer(1), []
    for step in (0, 1):
        writer.act(step, F, 1, 0, COMPUTING)
        for _ in range(2):
            hearts[1].beat()
            hearts[0].beat()
            moved.append(hearts[0].moved_s[1])
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                pass
    assert moved[0] < moved[1] < moved[2] == moved[3]


def test_processes_that_torchrun_started_run_a_plan():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [rank_of_three(rank, port) for rank in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["done\n"] * 3


@pytest.mark.usefixtures("heeded_signals")
def test_ranks_end_at_once_when_told_to_and_when_who_started_them_is_gone():
    """The first rank hangs, the others wait for it: one gets SIGTERM, then the store goes.

    That nobody reads what they say of it keeps none from ending.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [rank_of_three(rank, store.port, "hang", **agent) for rank in range(3)]
    first, second, third = ranks
    try:
        assert first.stdout is not None and first.stdout.readline() == "hangs\n"
        assert first.stderr is not None
        first.stderr.close()
        second.terminate()
        second.communicate(timeout=5)
        assert second.returncode == -signal.SIGTERM
        del store
        assert first.wait(timeout=5) == 1
        assert "lost the connection" in third.communicate(timeout=5)[1]
        assert third.returncode == 1
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


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
