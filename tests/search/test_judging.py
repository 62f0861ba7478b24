"""A layout on a cluster: its plan, and what stands beside it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from partopt import planners
from partopt.documents.profile import Group
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search import judging
from partopt.search.effort import SearchParams
from partopt.search.judging import judge_layout, plan_layout
from partopt.search.verify import verify
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS
from partopt.trainers.layout import read_layout
from tests.helpers import chain_profile, flat
from tests.trainers.models import transformer

# a last block that takes as long as four others
SLOW_END = [0.001, 0.001, *[0.01] * 7, 0.04, 0.001, 0.001]
NAMES = ["wte", "wpe", *(f"h.{n}" for n in range(8)), "ln_f", "lm_head"]


def uneven(**fields):
    return chain_profile(SLOW_END, parameter_bytes=[1000] * 12, names=NAMES, **fields)


def test_every_pipeline_that_the_devices_hold_runs_beside_the_others():
    layout = read_layout("megatron", "Et*6|t*6L", transformer())
    assert layout.options(flat(6)) == {
        "trainer": "megatron",
        "engine": TRAINERS["megatron"].engine,
        "schedule": "1f1b",
        "cuts": [8],
        "replicas": [3, 3],
        "block_bounds": list(range(2, 15)),
    }
    served = read_layout("vllm", "6,6", transformer())
    assert served.options(flat(6))["replicas"] == [1, 1]


def test_devices_of_groups_are_counted_as_groups():
    profile = replace(transformer(), group=Group(ranks=2))
    layout = read_layout("megatron", "Et*6|t*6L", profile)
    assert layout.options(flat(8))["replicas"] == [2, 2]


def test_stages_of_a_device_are_chunks():
    layout = read_layout("megatron", "Et*3|t*3|t*3|t*3L", transformer(), pipeline_size=2)
    options = layout.options(flat(4))
    assert (options["schedule"], options["chunks"], options["replicas"]) == (
        "interleaved",
        2,
        [2, 2, 2, 2],
    )
    job = Job(transformer(), flat(4), microbatches=8, **options)
    ranks = [list(stage.ranks) for stage in plan_layout(job, layout).stages]
    assert ranks == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("devices", "size", "schedule", "chunks", "message"),
    [
        (6, None, None, None, "6 devices are not a multiple of the 4 of a pipeline"),
        (2, None, None, None, "4 devices needed, 2 there"),
        (4, 3, "interleaved", None, "4 stages on 3 devices of a pipeline"),
        (4, 2, "1f1b", None, "4 stages on 2 devices of a pipeline: 1f1b puts 1 on each"),
        (4, 2, "interleaved", 4, "4 stages on 2 devices of a pipeline: interleaved puts 4 on each"),
        (4, None, "interleaved", None, "4 stages on an unknown number of devices"),
        (4, 4, "zbv", None, "4 stages on 4 devices of a pipeline: zbv puts 2 on each"),
        (4, None, "auto", None, "a layout is judged under one"),
    ],
)
def test_stages_and_devices_that_do_not_match(devices, size, schedule, chunks, message):
    layout = read_layout("megatron", "Et*3|t*3|t*3|t*3L", transformer(), pipeline_size=size)
    with pytest.raises(PartoptError) as raised:
        layout.options(flat(devices), schedule, chunks)
    assert message in raised.value.message


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [3, 8])
def test_what_a_layout_could_reach_by_other_cuts_is_found(microbatches):
    """Of all cuts of four stages none is faster in the simulator than the one that is shown."""
    layout = read_layout("megatron", "Ett|tt|tt|ttL", uneven())
    job = Job(uneven(), flat(4), microbatches=microbatches, **layout.options(flat(4)))
    judged = judge_layout(job, layout)
    every = [
        planners.plan("manual", job.with_(cuts=list(cuts)).problem)
        for cuts in itertools.combinations(range(2, 11), 3)
    ]
    least_s = min(simulate_plan(plan).predicted.period_s for plan in every)
    assert judged.faults == ()
    assert judged.recut.predicted.period_s == pytest.approx(least_s)
    assert judged.plan.predicted.period_s > least_s
    assert [stage.replicas for stage in judged.recut.stages] == [1, 1, 1, 1]
    assert judged.best.predicted.period_s <= least_s


def test_cuts_of_a_layout_are_where_others_are_looked_for_too(monkeypatch):
    """What planners find may be slower."""
    layout = read_layout("megatron", "Ettt|tttt|tL", uneven())
    job = Job(uneven(), flat(3), microbatches=8, **layout.options(flat(3)))
    slower = dataclasses.replace(judging.solve_profile(job.with_(cuts=[3, 4])), alternatives=())
    monkeypatch.setattr(judging, "solve_profile", lambda *_: slower)
    still = dataclasses.replace(SearchParams.at("normal"), cut_budget=0.0)
    monkeypatch.setattr(SearchParams, "at", lambda _: still)
    judged = judge_layout(job, layout)
    assert [stage.start for stage in judged.recut.stages] == [0, 5, 9]
    assert judged.recut.predicted == replace(judged.plan.predicted, allreduce_ports=UNSET)


@pytest.mark.slow
def test_the_best_is_one_that_the_trainer_runs():
    """Its stages begin with blocks or the head, and its warm-up is that of 1F1B."""
    layout = read_layout("megatron", "Ett|tt|tt|ttL", uneven(output_bytes=[10**6] * 12))
    cluster = flat(4, 1e8, latency=0.002)
    job = Job(uneven(output_bytes=[10**6] * 12), cluster, microbatches=8, **layout.options(cluster))
    judged = judge_layout(job, layout)
    assert {stage.start for stage in judged.best.stages} <= {0, *range(2, 11)}
    warmups = [stage.warmup for stage in judged.plan.stages]
    assert warmups == [3, 2, 1, 0]
    S = len(judged.best.stages)
    assert [stage.warmup for stage in judged.best.stages] == list(range(S - 1, -1, -1))


def test_what_the_trainer_does_not_do_is_told():
    layout = read_layout("deepspeed", "0,6,12", uneven())
    job = Job(uneven(), flat(2), microbatches=4, **layout.options(flat(2), "zb-h1"))
    assert judge_layout(job, layout).faults == ("the schedule is zb-h1; it runs 1f1b",)


def test_the_plan_of_a_layout_can_be_verified():
    layout = read_layout("megatron", "Ett|tt|tt|ttL", uneven())
    cluster = flat(4, 1e8, latency=0.02)
    job = Job(uneven(), cluster, microbatches=8, **layout.options(cluster))
    assert verify(plan_layout(job, layout), uneven()).verified


def test_options_that_a_split_of_ones_own_ignores_are_refused():
    layout = read_layout("megatron", "Ett|tt|tt|ttL", uneven())
    job = Job(uneven(), flat(4), microbatches=8, stages=3, **layout.options(flat(4)))
    with pytest.raises(PartoptError, match="the planner manual does not look at it"):
        judge_layout(job, layout)
