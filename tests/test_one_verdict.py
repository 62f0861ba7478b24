"""The same layout on the same cluster gets the same answer from whatever is asked.

A split is planned by hand, by a planner, read from a trainer's own words, compared, simulated and
exported; all of these must agree on seconds, bytes, warm-ups and whether it fits.
"""

import pytest

from partopt import (
    TRAINERS,
    Job,
    Profile,
    Topology,
    compare,
    export_plan,
    job_for,
    plan_layout,
    read_layout,
    simulate,
    solve,
    verify,
)
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.trainers.parts import find_parts
from partopt.trainers.says import may_begin

# shipped profile, cluster, servers, samples of a batch, devices' memory
CASES = [
    ("llama-70b.h100-estimated.bfloat16", "dgx-h100", 4, 1024, None),
    ("llama-7b.a100-estimated.bfloat16", "dgx-a100", 1, 128, None),
    ("llama-7b.a100-estimated.bfloat16", "dgx-a100", 1, 128, "30 GB"),
    ("gpt3-6.7b.h100-estimated.bfloat16", "dgx-h100", 1, 64, "40 GB"),
    ("gpt2-small.cpu.float32", "v100-pcie", 1, 16, None),
    ("gpt2-small.cpu.float32", "v100-pcie", 2, 32, "1 GB"),
]
# schedule, devices of a pipeline, stages on a device
PIPELINES = [("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2)]
TRAINED = ["megatron", "deepspeed", "torchtitan"]


def facts(plan):
    """What every command must say alike of a layout."""
    return {
        "period_s": plan.predicted.period_s,
        "iteration_s": plan.predicted.iteration_s,
        "memory": [stage.memory.total_bytes for stage in plan.stages],
        "warmups": [stage.warmup for stage in plan.stages],
        "in_flight": [stage.in_flight for stage in plan.stages],
        "fits": plan.fits,
    }


def split(job, stages):
    """First layers of `stages` stages of about as many layers, which Megatron may begin with."""
    parts = find_parts([layer.name for layer in job.profile.layers])
    may = may_begin(parts, TRAINERS["megatron"].says.cuts)
    return [may[len(may) * s // stages] for s in range(1, stages)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "chunks"), PIPELINES)
@pytest.mark.parametrize(("name", "cluster", "servers", "batch", "memory"), CASES)
def test_every_command_says_the_same_of_a_layout(
    name, cluster, servers, batch, memory, schedule, size, chunks
):
    profile, topology = Profile.load(name), Topology.load(cluster, servers)
    job = Job(
        profile,
        topology,
        schedule=schedule,
        global_batch=batch,
        microbatch_size=profile.measured()[0].microbatch_size,
        memory=memory,
    )
    job = job_for(job, "megatron")
    S, d = size * chunks, job.topology.devices // size
    stated = {"chunks": chunks} if chunks > 1 else {}
    plan = solve(job.with_(cuts=split(job, S), replicas=[d] * S, **stated)).plan
    if schedule == "1f1b":
        assert [stage.warmup for stage in plan.stages] == [
            SCHEDULES["1f1b"].counts(s, [d] * S, plan.microbatches).warmup for s in range(S)
        ]

    text = export_plan(plan, "megatron").main
    layout = read_layout("megatron", text, profile)
    read = plan_layout(job.with_(**layout.options(job.topology, schedule)), layout)
    assert facts(read) == facts(plan)

    simulated = simulate(plan)
    assert facts(simulated.plan) == facts(plan)
    assert simulated.fits == plan.fits
    document = simulated.document
    assert document.period_s == pytest.approx(plan.predicted.period_s)
    assert max(rank.peak_memory_bytes for rank in document.ranks) == plan.peak_memory_bytes

    table, _ = compare(job, ["gpipe"], {"read": read})
    row = next(row for row in table.rows if row.planner == "read")
    assert row.period_s == pytest.approx(plan.predicted.period_s)
    assert row.fits == plan.fits

    assert verify(plan, profile).failed == ([] if plan.fits else ["memory"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "case"),
    [*((each, CASES[2]) for each in TRAINED), ("megatron", CASES[3])],
)
def test_a_plan_for_a_trainer_has_its_warmups_and_is_written(trainer, case):
    name, cluster, servers, batch, memory = case
    profile, topology = Profile.load(name), Topology.load(cluster, servers)
    job = Job(profile, topology, schedule="1f1b", global_batch=batch, memory=memory)
    try:
        plan = solve(job.with_(trainer=trainer)).plan
    except PartoptError as error:
        assert error.code in ("no-plan", "target-cannot-say")
        return
    replicas = [stage.replicas for stage in plan.stages]
    assert [stage.warmup for stage in plan.stages] == [
        SCHEDULES["1f1b"].counts(s, replicas, plan.microbatches).warmup
        for s in range(len(replicas))
    ]
    assert export_plan(plan, trainer).main
    assert facts(simulate(plan).plan) == facts(plan)
