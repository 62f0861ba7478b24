"""A run whose rank fails or dies ends soon, says which, and leaves nothing; a slow one lives."""

import json
import signal
import time

import pytest

from tests.forked import run_forked, start_ranks
from tests.helpers import ROOT
from tests.runtime.failures import SLOW_S
from tests.runtime.launched import outcome_of, start_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = outcome_of("tests.runtime.failures", tmp_path_factory)
    return {run["name"]: run for run in found}


def first_line(run):
    return run["message"].splitlines()[0]


def test_the_rank_that_failed_first_is_named_at_once(runs):
    for name, expected in {
        "raised": "rank 1 failed at 1F3: ValueError: boom",
        "killed": "rank 1 failed at 1F3: the process was killed by signal 9 (SIGKILL)",
        "left": "rank 1 failed at 1F3: the process ended with exit code 3",
        "memory": "rank 1 failed at 1F3: MemoryError:",
        "outside": "rank 0 failed: no such model",
        "spawned": "rank 1 failed at 1F3: ValueError: boom",
    }.items():
        assert first_line(runs[name]) == expected
        assert runs[name]["code"] == "run-failed"
        assert runs[name]["seconds"] < 10 or name == "spawned"
    assert "memory" in runs["killed"]["hint"]
    assert "memory" in runs["memory"]["hint"]
    assert runs["outside"]["hint"] == "name another"
    assert runs["raised"]["hint"] == ""


def test_a_rank_that_others_waited_for_is_named_and_what_all_were_doing(runs):
    for name, rank in {"stopped": 2, "hung": 0, "hung later": 1}.items():
        reason = "it is alive, but others waited for it in vain"
        assert first_line(runs[name]) == f"rank {rank} failed at {rank}F3: {reason}"
    assert runs["hung"]["message"].splitlines()[1:] == [
        "  rank 0: 0F3 of step 0, computing",
        "  rank 1: 1F3 of step 0, waiting to receive",
        "  rank 2: 2F3 of step 0, waiting to receive",
    ]
    assert runs["raised"]["fields"]["last_actions"][1] == "1F3"


def test_a_slow_rank_is_waited_for_and_a_run_that_goes_well_gives_its_results(runs):
    assert runs["slow"]["results"] == runs["well"]["results"] == ["done"] * 3
    assert runs["slow"]["seconds"] > SLOW_S


def test_nothing_is_left_and_nobody_waits_long(runs):
    for run in runs.values():
        tracker = 1 if run["name"] == "spawned" else 0  # a pipe to multiprocessing's own process
        assert run["left"] in ([0, 0], [0, tracker]), run["name"]
        assert run["seconds"] < 60, run["name"]


def test_a_run_on_torch_that_fails_says_why_and_not_torchs_schedule():
    done = run_forked("tests.runtime.failures", ["torch"], ROOT)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    shape = "stage 0 made a tensor of [2] torch.float32, its cut has [1] torch.float32"
    assert {run["name"]: first_line(run) for run in found} == {
        "raised": "rank 1 failed at 1F3: ValueError: boom",
        "killed": "rank 1 failed at 1F3: the process was killed by signal 9 (SIGKILL)",
        "another shape execute_on_torch": f"rank 0 failed at 0F3: {shape}",
        "another shape execute": f"rank 0 failed at 0F3: {shape}",
    }
    assert [run["left"] for run in found] == [[0, found[0]["left"][1]], [0, 0], [0, 0], [0, 0]]
    assert "Schedule" not in done.stderr


# --- ranks that torchrun starts ---------------------------------------------------------------


def ranks_of_three(*arguments):
    """The ranks of `tests.runtime.failures`, as torchrun starts them."""
    return start_ranks(3, "tests.runtime.failures", arguments, ROOT)


def test_processes_that_torchrun_started_run_a_plan():
    assert [rank.wait(60).stdout for rank in ranks_of_three()] == ["done\n"] * 3


@pytest.mark.usefixtures("heeded_signals")
def test_ranks_end_at_once_when_told_to():
    """The first rank hangs, the others wait for it; one gets SIGTERM, and the last one sees it."""
    first, second, third = ranks_of_three("hang")
    while first.process.is_alive() and first.out.read_text() != "hangs\n":
        time.sleep(0.05)
    second.process.terminate()
    assert second.wait(5).returncode == -signal.SIGTERM
    ended = third.wait(5)
    assert (ended.returncode, "lost the connection" in ended.stderr) == (1, True)
    first.wait(0)


def test_ranks_end_with_torchrun_where_it_is_killed():
    options = "--standalone", "--nproc-per-node", "3", "-m", "tests.runtime.failures", "hang"
    run = start_python("-m", "torch.distributed.run", *options)
    try:
        assert run.stdout.readline() == "hangs\n"
    finally:
        run.kill()
    # the pipe ends with the last of the processes that may write into it
    assert run.communicate(timeout=10)[0] == ""
