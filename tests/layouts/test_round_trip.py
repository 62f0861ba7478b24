"""A plan that is written for a trainer and read again has the same cuts, for every trainer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.plan import under
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.exporters import EXPORTERS, export_plan
from partopt.exporters.blocks import Part, find_parts
from partopt.exporters.faithful import may_begin
from partopt.exporters.target import ANYWHERE, Target
from partopt.job import Job
from partopt.layouts import LAYOUTS, read_layout
from partopt.layouts.judge import plan_layout
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import LOOPED, MIRRORED, VEE
from tests.helpers import flat, uniform_profile
from tests.layouts.models import transformer


@st.composite
def plans(draw: st.DrawFn, target: Target) -> tuple[Plan, Job]:
    """A plan that the trainer can say: any cuts, chunks and replicas that it has."""
    profile = transformer(draw(st.integers(2, 9)), halves=draw(st.booleans()))
    layers = list(range(len(profile.layers)))
    starts = layers if target.cuts == ANYWHERE else may_begin(parts_in(profile), target.cuts)
    cuts = draw(
        st.lists(st.sampled_from(starts[1:]), unique=True, min_size=1, max_size=6).map(sorted)
    )
    S, loops = len(cuts) + 1, "interleaved" in (target.schedules or {})
    v = draw(st.sampled_from([v for v in (1, 2, 3) if S % v == 0 and v < S])) if loops else 1
    P, d = S // v, 1 if target.replicas == "one" else draw(st.integers(1, 2))
    schedule = "interleaved" if v > 1 else next(iter(target.schedules or ["pipedream"]))
    options = {"cuts": cuts or None, "replicas": [d] * S, "schedule": schedule}
    if schedule != "pipedream":
        options["microbatches"] = P * d * draw(st.integers(1, 2))
    if v > 1:
        options["chunks"] = v
    job = Job(profile, flat(P * d), **options)
    return planners.plan("manual", job.problem), job


def parts_in(profile: Profile) -> list[Part]:
    """What each layer of the profile is."""
    return find_parts([layer.name for layer in profile.layers])


@pytest.mark.parametrize("trainer", [name for name in LAYOUTS if name != "torch-csv"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again(trainer, data):
    plan, job = data.draw(plans(EXPORTERS[trainer]))
    size = len(plan.stages_by_rank()) // plan.stages[0].replicas
    layout = read_layout(trainer, export_plan(plan, trainer).main, job.profile)
    assert list(layout.cuts) == [stage.start for stage in plan.stages[1:]]
    assert layout.pipeline_size in (size, None)
    if layout.target.schedules:  # its own schedule and all devices give the plan that was written
        again = job.with_(**layout.options(job.topology))
        assert planners.plan("manual", again.problem) == plan


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
    again = plan_layout(layout, Job(job.profile, job.topology, **options))
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
