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
from tests.gpu.programs import COLLECTIVE, RECEIVE, SEND, posted_ahead, program_of
from tests.gpu.rules import CALLS, run
from tests.runtime.cases import Case, cases
from tests.runtime.plans import looped, straight

# every host waits for its device at every call, and streams lie in one queue: what stops nowhere
# here stops under no rule, for what waits for less comes as far
STRICTEST = {"queues": 1, "waits": lambda *_: True}


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


def check(name, engine):
    found = programs(name, engine)
    assert run(found, **STRICTEST) == []
    check_communicators(name, engine)
    check_directions(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_case_stops(name):
    check(name, execute)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TORCH)
def test_no_case_stops_on_torch(name):
    check(name, execute_on_torch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["1f1b [1, 2, 1]", "interleaved on 2", "zb-h1 on 4", "dualpipe on 2"]
)
def test_what_stops_under_any_rules_stops_under_the_strictest(name):
    """Two calls of a rank are in the place of each other, and hosts wait at drawn places."""
    outcomes = set()
    for seed in range(60):
        drawn = random.Random(seed)
        found = swapped(programs(name), drawn)
        share = drawn.choice([0, 0.02, 0.3])
        waits = {
            (r, k) for r, own in enumerate(found) for k in range(len(own)) if drawn.random() < share
        }
        options = {"waits": lambda r, k, waits=waits: (r, k) in waits, "seed": seed}
        try:
            stops = bool(run(found, drawn.choice([1, 3, 8, 32]), **options))
        except (AssertionError, KeyError):  # a message in another's place, a work of later
            continue
        outcomes.add(stops)
        assert not stops or run(found, **STRICTEST), (seed, options)
    assert outcomes == {True, False}


def swapped(found, drawn):
    found = [list(own) for own in found]
    own = drawn.choice(found)
    places = [k for k, step in enumerate(own) if step.kind in CALLS]
    first = drawn.randrange(len(places) - 1)
    i, k = places[first], places[min(len(places) - 1, first + drawn.randint(1, 4))]
    own[i], own[k] = own[k], own[i]
    return found


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
