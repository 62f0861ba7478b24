"""No schedule stops under NCCL's rules, on either engine, whatever its replicas are.

The programs are those that the engines run; what would stop them, were they otherwise, is told too.
"""

from __future__ import annotations

import functools

import pytest

from partopt.cost.memory import COMMUNICATORS
from partopt.errors import PartoptError
from partopt.runtime import messages
from partopt.runtime.completions import Completions
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import MIRRORED, STRAIGHT
from tests.gpu.programs import COLLECTIVE, RECEIVE, SEND, program_of
from tests.gpu.rules import run
from tests.runtime.cases import Case, cases
from tests.runtime.plans import looped, straight

# those of a GPU, and the fewest in which every schedule can run; a queue for each stream only
# loosens an order in which these begin
QUEUES = (8, 3)


def large_cases():
    """Deeper pipelines, and replicas of all numbers."""
    for name, entry in SCHEDULES.items():
        if entry.shape == STRAIGHT:
            several = ([1] * 8, [1, 2, 3, 2], [8, 4, 2, 2]) if entry.uneven else ([1] * 8,)
            for replicas in several:
                M = 24 if entry.asynchronous else None
                yield Case(f"{name} {replicas}", straight(name, replicas, 24), M, 1)
        else:
            chunks = 1 if entry.shape == MIRRORED else 2
            yield Case(f"{name} large", looped(name, 4, chunks, 16, 2), None, 1)


CASES = {case.name: case for case in cases()}
LARGE = {case.name: case for case in large_cases()}


@functools.cache
def programs(name, engine=execute, pairs=True):
    """The programs of all ranks in a case."""
    case = CASES.get(name) or LARGE[name]
    return [program_of(case, rank, engine, pairs) for rank in range(case.plan.world_size)]


@pytest.fixture
def one_queue(monkeypatch):
    monkeypatch.setenv(messages.CONNECTIONS, "1")
    programs.cache_clear()
    yield
    programs.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_case_stops(name):
    for queues in QUEUES:
        assert run(programs(name), queues) == []
    check_communicators(name)
    check_directions(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not can_say(CASES[name].plan)])
def test_no_case_stops_on_torch(name):
    """In one queue all begins in the order of its call, which more queues only loosen."""
    for pairs in (True, False):
        assert run(programs(name, execute_on_torch, pairs), 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_large_case_stops(name):
    for queues in QUEUES:
        assert run(programs(name), queues) == []
    check_communicators(name)


def has_too_few(name):
    return (CASES.get(name) or LARGE[name]).plan.schedule in messages.FEWEST_QUEUES


def check_in_one_queue(name):
    if not has_too_few(name):
        assert run(programs(name), 1) == []
        return
    with pytest.raises(PartoptError, match="interleaved-zb with CUDA_DEVICE_MAX_CONNECTIONS=1"):
        programs(name)


@pytest.mark.slow
@pytest.mark.usefixtures("one_queue")
@pytest.mark.parametrize("name", CASES)
def test_in_one_queue_a_case_runs_or_is_refused(name):
    check_in_one_queue(name)


@pytest.mark.slow
@pytest.mark.usefixtures("one_queue")
@pytest.mark.parametrize("name", LARGE)
def test_in_one_queue_a_large_case_runs_or_is_refused(name):
    check_in_one_queue(name)


def stops(name, queues=None):
    case = CASES[name]
    ranks = range(case.plan.world_size)
    return bool(run([program_of(case, rank, execute) for rank in ranks], queues))


@pytest.mark.slow
def test_what_is_refused_would_stop(monkeypatch):
    monkeypatch.setattr(messages, "FEWEST_QUEUES", {})
    for queues in (1, 2):
        monkeypatch.setenv(messages.CONNECTIONS, str(queues))
        assert stops("interleaved-zb on 4", queues)


@pytest.mark.slow
def test_groups_that_are_first_used_in_a_step_stop_a_run(monkeypatch):
    monkeypatch.setattr(Context, "connect", lambda self: None)
    assert stops("dualpipe on 4")
    monkeypatch.setitem(messages.AHEAD, "nccl", 3)
    assert stops("1f1b on 2") and stops("gpipe on 4")


@pytest.mark.slow
def test_sends_that_the_stream_of_the_model_waits_for_stop_a_run(monkeypatch):
    keep = Completions.keep

    def wait(self, work, memory, note):
        work.wait()
        keep(self, work, memory, note)

    monkeypatch.setattr(Completions, "keep", wait)
    assert stops("1f1b on 4") and stops("zbv on 4") and stops("interleaved-zb on 4")
    assert not stops("gpipe on 4")


@pytest.mark.slow
@pytest.mark.parametrize("queues", [None, 8, 1])
def test_receives_ahead_stop_a_run(queues, monkeypatch):
    """A step begins with a device at rest, which one that waits for a message is not."""
    monkeypatch.setitem(messages.AHEAD, "nccl", 3)
    assert stops("one step", queues) and stops("1f1b on 4", queues)
    monkeypatch.setitem(messages.AHEAD, "nccl", 0)
    assert not stops("one step", queues)


def test_a_rank_that_waits_for_its_sends_has_posted_what_comes_next(monkeypatch):
    monkeypatch.setattr(messages.Messages, "settle", lambda own, _: own.completions.drain())
    assert stops("serial messages")


def directions(name):
    """The groups of messages on each rank."""
    every = [{step.group for step in own if step.kind in (SEND, RECEIVE)} for own in programs(name)]
    pairs = [
        {(rank, step.peer, step.kind) for step in own if step.kind in (SEND, RECEIVE)}
        for rank, own in enumerate(programs(name))
    ]
    return list(map(len, every)), list(map(len, pairs))


def check_directions(name):
    """A pair of ranks has a group in each direction."""
    groups, pairs = directions(name)
    # where the order of arrival is not that of sending, a pair has more
    assert groups == pairs or CASES[name].plan.schedule in ("zbv", "dualpipev", "interleaved-zb")


def check_communicators(name):
    """The reserve counts the communicators of a rank."""
    for own in programs(name):
        kinds = (SEND, RECEIVE, COLLECTIVE)
        made = {step.group for step in own if step.kind in kinds}
        assert len(made) + 1 <= COMMUNICATORS  # and that of all ranks
