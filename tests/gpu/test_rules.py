"""No schedule stops under NCCL's rules, on either engine, whatever waits and whatever its replicas.

The programs are those that the engines run; what would stop them, were they otherwise, is told too.
"""

from __future__ import annotations

import functools
import random

import pytest

from partopt.cost.memory import COLLECTIVES, DIRECTIONS
from partopt.documents.engine import OWN
from partopt.runtime import postings
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import MIRRORED, STRAIGHT
from tests.gpu.programs import COLLECTIVE, COMPUTE, RECEIVE, SEND, posted_ahead, program_of
from tests.gpu.rules import CALLS, run
from tests.runtime.cases import Case, cases
from tests.runtime.plans import looped, straight

QUEUES = (8, 3, 32)
DRAWS = 2  # of places where hosts wait, and of the queues in which streams lie


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


def waiting(case):
    """The case planned for an engine that waits for its messages, as those of other trainers do."""
    plan = case.plan.with_engine(waits=("1f1b",), bucket_bytes=OWN.bucket_bytes)
    return case._replace(name=f"{case.name} that waits", plan=plan)


CASES = {case.name: case for case in [*cases(), *large_cases()]}
WAITING = [waiting(case) for case in CASES.values() if case.plan.schedule == "1f1b"]
CASES |= {case.name: case for case in WAITING}
ON_TORCH = [name for name, case in CASES.items() if not can_say(case.plan)]


@functools.cache
def programs(name, engine=execute):
    """The programs of all ranks in a case."""
    case = CASES[name]
    return [program_of(case, rank, engine) for rank in range(case.plan.world_size)]


def waits_of(found):
    """Where hosts wait for their devices: nowhere, everywhere, and at drawn places."""
    calls = [(r, k) for r, own in enumerate(found) for k, each in enumerate(own)]
    calls = [(r, k) for r, k in calls if found[r][k].kind in CALLS]
    yield {}
    yield {"waits": lambda *_: True}
    for first in (True, False):  # of each kind of action on each stage, or any but those
        firsts = set(first_actions(found))
        yield {"waits": lambda r, k, firsts=firsts, first=first: ((r, k) in firsts) == first}
    for seed in range(DRAWS):
        drawn = random.Random(seed)
        for share in (0.02, 0.3):
            chosen = set(drawn.sample(calls, max(1, round(share * len(calls)))))
            yield {"waits": lambda r, k, chosen=chosen: (r, k) in chosen, "seed": seed}


def first_actions(found):
    for rank, own in enumerate(found):
        seen = set()
        for place, step in enumerate(own):
            kind = step.what.rstrip("0123456789")
            if step.kind == COMPUTE and kind not in seen:
                seen.add(kind)
                yield rank, place


def check(name, engine):
    found = programs(name, engine)
    for number, options in enumerate(waits_of(found)):
        for queues in (QUEUES[number % len(QUEUES)], 1):
            assert run(found, queues, **options) == [], (queues, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_case_stops(name):
    check(name, execute)
    check_communicators(name, execute)
    check_directions(programs(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TORCH)
def test_no_case_stops_on_torch(name):
    check(name, execute_on_torch)
    check_communicators(name, execute_on_torch)
    check_directions(programs(name, execute_on_torch))


def check_directions(found):
    """A pair of ranks has a group in each direction, which is that of all its messages.

    torch tries its own group with a byte before the first step.
    """
    for rank, own in enumerate(found):
        messages = [step for step in own if step.kind in (SEND, RECEIVE) and step.what != "byte"]
        groups = {(rank, step.peer, step.kind): step.group for step in messages}
        assert len(set(groups.values())) == len(groups)
        assert all(step.group == groups[rank, step.peer, step.kind] for step in messages)


def check_communicators(name, engine):
    """The reserve counts the communicators of a rank, and that of all ranks.

    Tied parameters and shares of the optimizer have another each.
    """
    case = CASES[name]
    more = case.tied + (case.plan.shard != "none")
    for own in programs(name, engine):
        exchanging = {step.group for step in own if step.kind == COLLECTIVE}
        sending = {step.group for step in own if step.kind in (SEND, RECEIVE)} - exchanging
        assert len(exchanging) + 1 <= COLLECTIVES + more
        assert len(sending) <= DIRECTIONS


# --- what would stop a run --------------------------------------------------------------------


def stops(name, queues=None, **options):
    case = CASES[name]
    found = [program_of(case, rank, execute) for rank in range(case.plan.world_size)]
    return bool(run(found, queues, **options))


@pytest.mark.slow
def test_receives_out_of_the_sequence_stop_a_run(monkeypatch):
    """Just in time where a host waits, and a few actions ahead everywhere."""
    everywhere, moved = {"waits": lambda *_: True}, [posted_ahead(k) for k in range(4)]
    monkeypatch.setattr(postings, "postings_of", moved[0])
    assert not stops("interleaved on 2")
    assert stops("interleaved on 2", **everywhere) and stops("naive [1, 2, 1]", **everywhere)
    monkeypatch.setattr(postings, "postings_of", moved[2])
    assert stops("1f1b on 4", **everywhere)
    monkeypatch.setattr(postings, "postings_of", moved[3])
    assert not stops("1f1b on 2")
    monkeypatch.setattr(Context, "connect", lambda self: None)  # groups that nobody has used
    assert stops("1f1b on 2")


@pytest.mark.slow
def test_an_exchange_that_a_rank_begins_before_others_come_to_it_stops_a_run(monkeypatch):
    everywhere = {"waits": lambda *_: True}
    assert not stops("1f1b [1, 2, 1]", **everywhere)
    monkeypatch.setattr(postings, "_early_exchanges", lambda *_: [])
    assert stops("1f1b [1, 2, 1]", **everywhere)
