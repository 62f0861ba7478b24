"""A plan that is written for a trainer and read again is the same plan, for every trainer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import planners
from partopt.cost.pricing import under
from partopt.documents.plan import Plan
from partopt.documents.profile import Group
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import LOOPED, MIRRORED, VEE
from partopt.search.jobs import job_for
from partopt.search.judging import plan_layout
from partopt.trainers import TRAINERS, export_plan, readers, writers
from partopt.trainers.layout import read_layout
from partopt.trainers.parts import count_blocks, find_parts
from partopt.trainers.says import may_begin
from partopt.trainers.trainer import ANYWHERE, Trainer
from tests.helpers import flat, uniform_profile
from tests.trainers.models import transformer


@st.composite
def plans(draw: st.DrawFn, trainer: Trainer) -> tuple[Plan, Job]:
    """A plan that the trainer can say: all that it has, with cuts, chunks and replicas drawn."""
    says, runs = trainer.says, trainer.schedules or {}
    profile = transformer(draw(st.integers(2, 9)), halves=draw(st.booleans()))
    if "tp" in says.degrees and draw(st.booleans()):
        profile = replace(profile, group=Group(ranks=2))
    if runs and trainer.name != "torchgpipe":  # they say the size of a microbatch
        measured = [replace(profile.measurements[0], microbatch_size=size) for size in (1, 2)]
        profile = replace(profile, measurements=measured)
    layers = [layer.name for layer in profile.layers]
    parts = [] if says.cuts == ANYWHERE else find_parts(layers)
    starts = may_begin(parts or [None] * len(layers), says.cuts)
    cuts = draw(
        st.lists(st.sampled_from(starts[1:]), unique=True, min_size=1, max_size=6).map(sorted)
    )
    # torchtitan has interleaved orders as CSV, without their names
    S, loops = len(cuts) + 1, "interleaved" in runs and trainer.name != "torchtitan"
    v = draw(st.sampled_from([v for v in (1, 2, 3) if S % v == 0 and v < S])) if loops else 1
    P, d = S // v, 1 if says.replicas == "one" else draw(st.integers(1, 2))
    schedule = "interleaved" if v > 1 else next(iter(runs), "pipedream")
    options = {"cuts": cuts or None, "replicas": [d] * S, "schedule": schedule}
    if schedule != "pipedream":
        options["microbatches"] = P * d * draw(st.integers(1, 2))
        options["microbatch_size"] = draw(st.sampled_from(profile.measurements)).microbatch_size
        modes = ["never", "always"]
        if says.recomputed != "all" and trainer.engine.recomputes_blocks:
            bounds = [0, *cuts, len(layers)]
            most = max(count_blocks(parts[a:b]) for a, b in itertools.pairwise(bounds))
            modes += range(1, most)
        options["recompute"] = draw(st.sampled_from(modes))
        able = [own for own in trainer.engine.shard if d > 1 or own == "none"]
        options["shard"] = draw(st.sampled_from(able))
    if v > 1:
        options["chunks"] = v
    job = job_for(Job(profile, flat(P * d * profile.group_ranks), **options), trainer.name)
    return planners.plan("manual", job.problem), job


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*readers()} & {*writers()} - {"torch-csv"}))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again(name, data):
    """Layout, schedule, microbatches, recomputation and shards: from the text and the devices."""
    plan, job = data.draw(plans(TRAINERS[name]))
    layout = read_layout(name, export_plan(plan, name).main, job.profile)
    again = Job(job.profile, job.topology, **layout.options(job.topology))
    assert planners.plan("manual", again.problem) == plan


def test_variables_of_a_script_are_left_to_the_options():
    text = "train.py --micro-batch-size $SIZE --global-batch-size $((8 * N)) \\\n"
    text += "  --recompute-granularity $HOW --pipeline-model-parallel-layout 'E|t|t|t|L'"
    options = read_layout("megatron", text, transformer(3)).options(flat(5))
    assert (options["schedule"], options["cuts"]) == ("1f1b", [2, 3, 4, 5])
    assert not options.keys() & {"microbatch_size", "global_batch", "recompute"}


def test_an_order_in_a_file_needs_a_persons_word_for_its_schedule():
    own = {"engine": TRAINERS["torchtitan"].engine, "block_bounds": list(range(2, 11))}
    plan, job = planned("zb-h1", trainer="torchtitan", **own)
    layout = read_layout("torchtitan", export_plan(plan, "torchtitan").main, job.profile)
    with pytest.raises(PartoptError, match="its order is in a file, which names none"):
        layout.options(job.topology)
    again = Job(job.profile, job.topology, **layout.options(job.topology, "zb-h1"))
    assert planners.plan("manual", again.problem) == plan


def planned(schedule: str, **options) -> tuple[Plan, Job]:
    """Four stages of a transformer of eight blocks."""
    cuts = {"cuts": [4, 6, 8], "replicas": [1, 1, 1, 1]}
    job = Job(transformer(8), flat(4), schedule=schedule, microbatches=8, **cuts, **options)
    return planners.plan("manual", job.problem), job


DEGREES = {
    "megatron": "tensor-model-parallel-size 1",
    "megatron-bridge": "tensor_model_parallel_size = 1",
    "torchtitan": "tensor_parallel_degree = 1",
    "colossalai": "tp_size=1",
    "vllm": "vllm serve m --tensor-parallel-size 1",
    "sglang": "python -m sglang.launch_server --tp-size 1",
}


@pytest.mark.parametrize("name", DEGREES)
def test_a_layout_of_other_groups_than_the_profile_is_refused(name):
    plan, job = planned("1f1b")
    one = DEGREES[name]
    text = export_plan(plan, name).main
    text = text if one in text else f"{text.strip()} {one}"
    assert read_layout(name, text, job.profile).cuts
    with pytest.raises(PartoptError, match="groups of 8 tensor parallel ranks, the profile of 1"):
        read_layout(name, text.replace(one, f"{one[:-1]}8"), job.profile)


# stages, on how many devices, and the warm-up where it is not the schedule's own
ORDERS = [
    (name, 4, 2 if entry.shape in (LOOPED, VEE) else 4, None)
    for name, entry in SCHEDULES.items()
    if not entry.asynchronous and entry.shape != MIRRORED
]
ORDERS += [("1f1b-eager", 4, 4, [5, 3, 1, 0]), ("interleaved", 6, 2, None), ("zb-h1", 3, 3, None)]


@pytest.mark.parametrize(("schedule", "stages", "devices", "warmups"), ORDERS)
def test_an_order_that_is_written_is_read_again(schedule, stages, devices, warmups):
    cuts = [3 * s for s in range(1, stages)]
    chunks = {"chunks": stages // devices} if SCHEDULES[schedule].shape == LOOPED else {}
    job = Job(
        uniform_profile(3 * stages),
        flat(2 * devices),
        schedule=schedule,
        microbatches=16,
        cuts=cuts,
        replicas=[2] * stages,
        **chunks,
    )
    plan = under(planners.plan("manual", job.problem), warmups=warmups)
    text = export_plan(plan, "torch-csv").main
    layout = read_layout("torch-csv", text, job.profile, cuts=cuts)
    options = layout.options(job.topology)
    assert (layout.pipeline_size, options["microbatches"]) == (devices, 16)
    again = plan_layout(Job(job.profile, job.topology, **options), layout)
    assert (again.schedule, export_plan(again, "torch-csv").main) == (schedule, text)


def test_an_order_that_is_no_schedules_is_refused():
    text = "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n"
    with pytest.raises(PartoptError, match="2 stages on 2 devices is that of no schedule"):
        read_layout("torch-csv", text, uniform_profile(4), cuts=[2])


@pytest.mark.parametrize(("cuts", "code"), [(None, "missing-option"), ([1, 2], "wrong-length")])
def test_an_order_needs_its_cuts(cuts, code):
    text = "0F0,0B0\n1F0,1B0\n"
    with pytest.raises(PartoptError, match="the order is of 2 stages") as raised:
        read_layout("torch-csv", text, uniform_profile(4), cuts=cuts)
    assert raised.value.code == code
