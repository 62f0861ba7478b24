"""What is said of a run, from records that are written by hand: a step of a few milliseconds."""

import dataclasses

import pytest

from partopt.documents.actions import B, F
from partopt.documents.engine import OF_TORCH, OWN, PARTOPT, TORCH
from partopt.documents.training_run import MachineLoad
from partopt.runtime.actions import RankRecord, actions_of
from partopt.runtime.measured import RankResult, as_run, put_together, with_measured_times
from partopt.runtime.training import PlannedTraining
from partopt.schedules import order
from partopt.schedules.placement import placement_of
from partopt.simulator.execution import execute
from tests.helpers import flat
from tests.runtime.plans import looped, straight
from tests.simulator.plans import plan_of

MS = 10**6  # in nanoseconds
M = 2
PLAN = plan_of([1], schedule="1f1b", microbatches=M, topology=flat(1))


def record(forward_ms, began_ms):
    """A step of one rank: each forward, and each backward twice as long, after the other."""
    actions = actions_of(order("1f1b", placement_of(PLAN, None)), 0)
    found = RankRecord(0, "host", 1, len(actions))
    now = found.started_ns[0] = began_ms * MS
    for action in actions:
        found.begin[0, action.place] = now
        now += {F: forward_ms, B: 2 * forward_ms}.get(action.kind, 0) * MS
        found.end[0, action.place] = found.exchanged[0, action.place] = now
    return found


def document(forwards_ms, counted_step, idle=0, before=0.0, backend="gloo"):
    """That of one rank on two cores, and of `idle` ranks without a stage."""
    steps = list(enumerate(forwards_ms))
    ranks = [[record(each, 1000 * step) for step, each in steps]]
    ranks += [[RankRecord(1 + rank, "host", 1, 0) for _ in steps] for rank in range(idle)]
    results = [
        RankResult(records, [1.0] * len(steps), [1000], counted_step, "cpu", None)
        for records in ranks
    ]
    load = MachineLoad(cores=2, before=before, after=0.0)
    return put_together(PlannedTraining(PLAN, None, M), results, load, backend).document


def step_s(forward_ms):
    return 3 * M * forward_ms * 1e-3


@pytest.mark.parametrize(
    ("forwards_ms", "counted", "forward_ms"),
    [
        # the first one warms up, and the one in which memory is counted is slower by that
        ([50, 90, 4, 4], 1, 4),
        ([50, 90, 4, 6], 1, 4),  # of two the faster
        ([50, 4, 90, 6, 8], 2, 6),
        ([50, 4, 6, 8], None, 6),
        ([50, 4], 1, 50),  # nothing else is left
        ([50], None, 50),
    ],
)
def test_the_median_leaves_out_the_first_step_and_the_counted_one(forwards_ms, counted, forward_ms):
    run = document(forwards_ms, counted)
    assert run.steps_s == pytest.approx([step_s(each) for each in forwards_ms])
    assert run.measured_s == pytest.approx(step_s(forward_ms))
    assert run.samples_per_s == pytest.approx(PLAN.microbatch_size * M / step_s(forward_ms))
    [rank], [stage] = run.ranks, run.stages
    assert rank.measured.forward_s == pytest.approx(forward_ms * 1e-3)
    assert rank.measured.backward_s == pytest.approx(2 * forward_ms * 1e-3)
    assert rank.measured.idle_s == pytest.approx(0.0, abs=1e-9)
    assert (rank.measured.peak_memory_bytes, run.counted_step) == (1000, counted)
    later = [each for step, each in enumerate(forwards_ms) if step not in (0, counted)] or [50]
    middle = sum(sorted(later)[(len(later) - 1) // 2 : len(later) // 2 + 1]) / (2 - len(later) % 2)
    assert stage.forward_s == pytest.approx(middle * 1e-3)
    assert stage.backward_s == pytest.approx(2 * middle * 1e-3)


@pytest.mark.parametrize(
    ("idle", "before", "backend", "remarks"),
    [
        (1, 3.0, "gloo", []),  # a rank for each core
        (1, 3.1, "gloo", ["the machine was busy: 3.1 processes wanted to run on 2 cores"]),
        (2, 0.0, "gloo", ["3 ranks shared 2 cores: they computed in turns"]),
        (2, 0.0, "nccl", []),
    ],
)
def test_what_makes_a_run_doubtful_is_remarked(idle, before, backend, remarks):
    found = document([4, 4], None, idle, before, backend).remarks
    assert [each.partition(" before the run")[0].partition(", and what")[0] for each in found] == (
        remarks
    )


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_own_times_of_a_run_leave_out_what_its_devices_waited(schedule):
    simulated = execute(straight(schedule, [1, 1], 8))
    timeline, steady = simulated.timeline, simulated.steady
    later = 2 * timeline.start  # between two actions, beside what the network takes
    late = dataclasses.replace(timeline, start=timeline.start + later, end=timeline.end + later)
    waited = dataclasses.replace(simulated, timeline=late)
    if steady is not None:
        slow = dataclasses.replace(steady, period_s=3 * steady.period_s)
        waited = dataclasses.replace(waited, steady=slow)
    assert waited.time_s > 2 * simulated.time_s
    assert with_measured_times(waited).time_s == pytest.approx(simulated.time_s)


SERIAL = straight("1f1b", [1] * 4, 8, cuts=[8] * 3, topology=flat(4, 50.0))
SERIAL = SERIAL.with_engine(waits=("1f1b",))
PAIRED = looped("dualpipev", 4, 2, 16)


@pytest.mark.parametrize(
    ("plan", "engine", "backend", "longer"),
    [
        (SERIAL, PARTOPT, "gloo", False),  # its own engine waits there, as the plan says
        (SERIAL, PARTOPT, "nccl", True),
        (SERIAL, TORCH, "gloo", True),
        (PAIRED, PARTOPT, "gloo", True),
        (PAIRED.with_engine(in_turn=OWN.in_turn), PARTOPT, "nccl", False),
    ],
)
def test_what_is_predicted_is_what_the_engine_issues(plan, engine, backend, longer):
    found = as_run(plan, engine, backend)
    planned_s, ran_s = execute(plan).makespan_s, execute(found).makespan_s
    assert ran_s < planned_s * 0.99 if longer else ran_s == planned_s


def test_torch_has_a_buffer_for_every_microbatch_and_exchanges_behind_the_backward():
    plan = straight("1f1b", [2, 2], 16, weights=[1000, 1000], cuts=[50]).with_engine(bucket_bytes=1)
    own, torch = (as_run(plan, engine, "nccl") for engine in (PARTOPT, TORCH))
    assert (torch.engine.allreduce, torch.engine.buffers) == (OF_TORCH.allreduce, "all")
    assert torch.peak_memory_bytes > own.peak_memory_bytes
    assert execute(torch).makespan_s > execute(own).makespan_s


def test_a_plan_for_another_engine_is_told_of():
    assert document([4, 4], None).remarks == []
    other = PLAN.with_engine(waits=("1f1b",), gradients="float32")
    results = [RankResult([record(4, 0)], [1.0], [1000], None, "cpu", None)]
    load = MachineLoad(cores=2, before=0.0, after=0.0)
    for engine, names in ((PARTOPT, "gradients"), (TORCH, "waits, gradients, allreduce, buffers")):
        [remark] = put_together(
            PlannedTraining(other, None, M, engine=engine), results, load, "gloo"
        ).document.remarks
        assert f"the plan is for partopt; this engine differs in {names}, and" in remark
