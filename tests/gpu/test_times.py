"""What the engines issue takes as long as `simulate` says, on devices and links of given speeds."""

from __future__ import annotations

import re

import pytest

from partopt.documents.actions import KINDS
from partopt.documents.engine import OWN
from partopt.runtime.engine import execute
from partopt.runtime.postings import postings_of
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import MIRRORED, STRAIGHT
from partopt.simulator.execution import execute as simulate
from tests.gpu.programs import COMPUTE, RECEIVE, SEND, program_of
from tests.gpu.rules import Replay
from tests.helpers import flat
from tests.runtime.cases import Case
from tests.runtime.plans import looped, straight

FORWARD_S, BACKWARD_S, BYTES_PER_S = 0.010, 0.020, 1e9
OFF = 0.02  # of the simulated time, at the most
# of a forward; with links that are no faster than that, a rank's messages queue up
MESSAGES = (0.0, 0.05, 0.1, 0.5)


def plan_of(name, replicas, message):
    """A pipeline whose messages take so many forwards, as the engines run it."""
    size, entry = int(message * FORWARD_S * BYTES_PER_S), SCHEDULES[name]
    if entry.shape == STRAIGHT:
        times = {
            "forward": [FORWARD_S * each for each in replicas],
            "backward": [BACKWARD_S * each for each in replicas],
            "cuts": [size] * (len(replicas) - 1),
            "topology": flat(sum(replicas), BYTES_PER_S),
        }
        return straight(name, replicas, 4 * len(replicas), **times)
    chunks = 1 if entry.shape == MIRRORED else 2
    stages = 4 * chunks
    times = {"forward": [FORWARD_S] * stages, "backward": [BACKWARD_S] * stages}
    plan = looped(name, 4, chunks, 16, **times, cuts=[size] * (stages - 1))
    return plan.with_engine(in_turn=OWN.in_turn)


def cases():
    for name, entry in SCHEDULES.items():
        several = [[1] * 6, [1, 2, 1]] if entry.uneven else [[1] * 6]
        for replicas in several if entry.shape == STRAIGHT else [[1] * 4]:
            for engine in (execute, execute_on_torch):
                if engine is execute or not can_say(plan_of(name, replicas, 0.0)):
                    yield name, replicas, engine


def seconds_of(plan, execution, programs):
    """What each step of the programs takes; of a message in parts the first has all of it."""
    computed = [each.what for own in programs for each in own if each.kind == COMPUTE]
    split = {re.sub("W", "B", each) for each in computed if "W" in each}

    def seconds(step):
        if step.kind in (SEND, RECEIVE):
            _, _, *part = step.what.split(".") if step.what != "byte" else "..1"
            return plan.stages[1].input_bytes / BYTES_PER_S if part in ([], ["0"]) else 0.0
        if step.kind != COMPUTE:
            return 0.0
        stage, kind = re.match(r"(\d+)([A-Z])", step.what).groups()
        kind = "I" if step.what in split else kind  # torch calls both halves by the whole's name
        return 0.0 if kind in "AU" else execution.work.seconds[KINDS.index(kind), int(stage)]

    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replicas", "engine"), [*cases()])
def test_what_is_issued_takes_what_is_predicted(name, replicas, engine):
    """Programs know what is posted when and whether anything crosses a cut, and not how much."""
    programs = {}
    for message in MESSAGES:
        plan = plan_of(name, replicas, message)
        microbatches = 48 if plan.microbatches is None else None
        execution = simulate(plan, microbatches)
        known = str((message > 0, postings_of(plan, execution.order)))
        if known not in programs:
            case = Case(name, plan, microbatches, 1)
            ranks = range(plan.world_size)
            programs[known] = [program_of(case, rank, engine) for rank in ranks]
        seconds = seconds_of(plan, execution, programs[known])
        replay = Replay(programs[known], seconds_of=seconds)
        assert replay.stops == []
        off = replay.makespan_s / execution.makespan_s - 1
        assert -OFF <= off <= OFF, message
