"""Ranks that hear of each other through a store know when the run stands still."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

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
    assert lines[0].startswith("no progress of any rank")
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


def test_the_rank_that_moved_last_the_longest_ago_is_named():
    (first, second), hearts = heartbeats(2)
    writers = first.writer(0), second.writer(1)
    for microbatch in range(2):
        writers[0].act(0, F, 0, microbatch, COMPUTING)
        if microbatch == 0:
            writers[1].act(0, F, 1, microbatch, COMPUTING)
        hearts[1].beat()
        hearts[0].beat()
    assert "of rank 1 for the longest" in hearts[0].stall(ALWAYS_S, NEVER_S)


def test_processes_that_torchrun_started_run_a_plan():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.failures"],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["done\n"] * 3
