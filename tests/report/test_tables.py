"""Tables of plans: comparisons, numbers of devices, schedules; what they say, and that they fit."""

import pytest
from click import unstyle
from msgspec import structs

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.tables import Scaling, ScalingRow
from partopt.report.plans_text import (
    _variance,
    render_beside,
    render_comparison,
    render_layout,
    render_scaling,
    render_schedules,
)
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import MIRRORED
from partopt.search.compare import comparison_of
from partopt.search.scaling import scaling_of
from tests.helpers import measurement, profile_of
from tests.planners.problems import topology
from tests.simulator.plans import chunked, limited, plan_of

PROFILE = profile_of(
    [measurement([2.0, 1.0, 1.0], [4.0, 2.0, 2.0], output_bytes=[8, 8, 0])],
    parameter_bytes=[4, 4, 8],
)


def plans(*names):
    problem = problem_of(PROFILE, topology((2, 1e6)))
    return {name: planners.plan(name, problem) for name in names}


def test_rows_are_sorted_fastest_first_and_measured_against_data_parallelism():
    """Data parallelism takes 12 / 2 s a microbatch, two stages of 6 s as long: a tie keeps its
    order.
    """
    made = plans("gpipe", "data_parallel")
    rows = comparison_of(made, made["data_parallel"]).rows
    found = [(row.planner, row.period_s, row.speedup_over_data_parallel) for row in rows]
    assert found == [("gpipe", 6.0, 1.0), ("data_parallel", 6.0, 1.0)]
    assert rows[0].stage_variance_s2 == 0
    for limit, fits in ((None, True), (100, True), (10, False)):
        plan = limited(made["gpipe"], limit)
        assert comparison_of({"gpipe": plan}, None).rows[0].fits is fits
    for value, text in {
        0.0: "0",
        0.786: "0.786",
        99.94: "99.9",
        1536.2: "1536",
        1e5: "1e+05",
    }.items():
        assert _variance(value) == text


@pytest.mark.parametrize("limit, verdict", [(None, True), (100, True), (10, False)])
def test_what_does_not_fit_is_said(limit, verdict):
    plan = limited(plans("gpipe")["gpipe"], limit)
    assert comparison_of({"gpipe": plan}, None).rows[0].fits is verdict


def test_a_table_of_one_plan():
    """The fuller stage holds 12 bytes of weights, 12 of gradients, 24 of moments, 16 of activations
    and a buffer of 8.
    """
    made = plans("gpipe")
    assert unstyle(render_comparison(comparison_of(made, made["gpipe"]))).splitlines() == [
        "model    chain: 3 layers, microbatch 1, schedule pipedream",
        "cluster  test, 2 x device: level1 (2, 1 MB/s)",
        "",
        "PLANNER SHAPE STAGES PERIOD SAMPLES/S x ONE x DP MEMORY FITS VAR",
        "gpipe   1-1        2 6.00 s    0.1667  2.00 1.00   72 B yes    0",
        "",
        "x ONE, x DP: times one device, data parallelism. VAR: variance of stages, ms^2.",
    ]


def test_documents_are_read_back_as_they_were_saved(tmp_path):
    for live in (
        comparison_of(plans("gpipe", "data_parallel"), None),
        scaling_of([plan_of([1]), plan_of([2])]),
    ):
        live.save(str(tmp_path / f"{type(live).__name__}.json"))
        assert type(live).load(str(tmp_path / f"{type(live).__name__}.json")) == live


def test_a_faster_plan_beside_the_chosen_one_is_pointed_out():
    slow = planners.plan("manual", problem_of(PROFILE, topology((2, 1e6))))
    fast = plans("data_parallel")["data_parallel"]
    assert render_beside(slow, [fast]).endswith("faster")
    assert unstyle(render_beside(slow, [limited(fast, 10)])).endswith("does not fit")
    assert not render_beside(fast, [slow]).endswith("faster")


def as_fast(plan, factor, fits=True):
    """The plan, `factor` times as fast, on devices on which it fits or not."""
    speed = factor * plan.predicted.samples_per_s
    own = limited(plan, None if fits else plan.peak_memory_bytes - 1)
    return structs.replace(own, predicted=structs.replace(plan.predicted, samples_per_s=speed))


RECUT, BEST = "to the same stages cut at 1,2", "to the best plan found that NeMo runs"


@pytest.mark.parametrize(
    ("fits", "recut", "best", "loses"),
    [
        (True, None, None, "nothing: no plan that NeMo runs is faster"),
        (True, (1.0005, True), (1.0009, True), "nothing: no plan that NeMo runs is faster"),
        (True, (1.25, True), None, f"20.0% {RECUT}"),
        (True, None, (1.6, True), f"37.5% {BEST}"),
        (True, (1.25, True), (1.6, True), f"20.0% {RECUT}; 37.5% {BEST}"),
        (True, (1.25, False), (1.6, True), f"37.5% {BEST}"),
        (True, (1.25, True), (1.25, True), f"20.0% {RECUT}"),  # one plan, which is named once
        (False, (1.25, False), None, f"20.0% {RECUT}"),
        (False, (0.5, True), (0.25, False), "all: it does not fit, and 0.1000 samples/s do"),
        (False, (0.5, True), (1.25, True), "all: it does not fit, and 0.2500 samples/s do"),
    ],
)
def test_what_a_layout_loses_to_better_plans(fits, recut, best, loses):
    """Each of the others is so many times as fast, and fits or does not."""
    layout = as_fast(plan_of([1, 1, 1], [5.0 / 3] * 3, [10.0 / 3] * 3), 1.0, fits)
    others = [how and as_fast(layout, *how) for how in (recut, best)]
    page = unstyle(render_layout(layout, *others, "NeMo"))
    assert " ".join(page.split()).endswith(f"loses {loses}")
    beside = [own for own in dict.fromkeys((recut, best)) if own is not None]
    assert page.count("\nmanual") + page.count("\nother cuts") == len(beside)


def test_the_efficiency_is_the_speed_up_a_device():
    rows = scaling_of([plan_of([1]), plan_of([2, 1, 1], [2.0, 1.0, 2.0], [4.0, 2.0, 4.0])]).rows
    assert [(row.devices, row.shape) for row in rows] == [(1, "1"), (4, "2-1-1")]
    assert rows[0].speedup_over_one_device == rows[0].efficiency == pytest.approx(1.0)
    # 15 s on one device, 6 s on the slowest of four
    assert rows[1].efficiency == rows[1].speedup_over_one_device / 4
    assert rows[1].efficiency == pytest.approx(15.0 / 6.0 / 4)
    # the batch is the microbatch size, and how many where there are some
    synchronous = plan_of([1, 1], schedule="1f1b", microbatches=7)
    for plan, batch in ((synchronous, "1x7"), (plan_of([2]), "1")):
        assert render_scaling(scaling_of([plan])).splitlines()[1].split()[1] == batch
    plan = plan_of([2])
    for limit, verdict in ((-1, " no"), (0, " yes")):
        page = render_scaling(scaling_of([limited(plan, plan.peak_memory_bytes + limit)]))
        assert unstyle(page).endswith(verdict)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("speed", [1e-9, 0.123456789, 999999.5, 1e15])
@pytest.mark.parametrize("devices", [1, 16384, 2**20])
def test_scaling_fits_the_page_whatever_the_numbers(synchronous, speed, devices):
    row = ScalingRow(
        devices=devices,
        planner="data_parallel",
        shape="1024-1x16383-1024",
        microbatch_size=64,
        microbatches=1048576 if synchronous else None,
        period_s=1 / speed,
        samples_per_s=speed,
        speedup_over_one_device=devices * 0.987654321,
        efficiency=0.987654321,
        bound_by="microbatches in flight",
        fits=False,
    )
    other = structs.replace(row, planner="gpipe", bound_by="cut before stage 12")
    lines = unstyle(render_scaling(Scaling(rows=[row, other]))).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split()[0] == str(devices)


def lines(plans):
    return unstyle(render_schedules(plans)).splitlines()


@pytest.mark.parametrize(
    ("plan", "grid", "batch"),
    [
        (plan_of([2, 2, 2], schedule="1f1b", microbatches=4), "2x3", "1x4"),
        (plan_of([4], schedule="gpipe", microbatches=4), "4x1", "1x4"),
        (chunked("interleaved", 2, 3, 8, 2), "2x2x3", "1x8"),
        (chunked("zbv", 3, 2, 8), "1x3x2", "1x8"),
        (structs.replace(chunked("dualpipe", 2, 1, 16, 2), family=MIRRORED), "2x2x2", "1x16"),
    ],
)
def test_the_grid_multiplies_to_the_stages_on_all_devices(plan, grid, batch):
    cells = lines([plan])[1].split()
    assert cells[:4] == [plan.schedule, grid, batch, "never"]


def test_a_line_a_plan_in_the_order_that_it_is_given():
    made = [plan_of([1, 1], schedule=name, microbatches=4) for name in ("gpipe", "1f1b")]
    heading, *rows = lines([limited(plan, made[1].peak_memory_bytes) for plan in made])
    assert [row.split()[0] for row in rows] == ["gpipe", "1f1b"]
    assert [row.split()[-1] for row in rows] == ["no", "yes"]
    assert [word for word in heading.split() if word.isalpha()][:3] == ["SCHEDULE", "GRID", "BATCH"]
    again = plan_of([1, 1], schedule="1f1b", microbatches=4, recompute="always")
    assert "always" in lines([again])[1]


@pytest.mark.parametrize(
    "name", [name for name, entry in SCHEDULES.items() if not entry.asynchronous]
)
@pytest.mark.parametrize("seconds", [1e-9, 12345.678])
@pytest.mark.parametrize("size", [1, 123456789])
def test_schedules_fit_the_page_whatever_the_numbers(name, seconds, size):
    plan = plan_of([1, 1], schedule="1f1b", microbatches=4)
    predicted = structs.replace(
        plan.predicted, iteration_s=seconds, samples_per_s=1 / seconds * size, bubble=0.999
    )
    devices = [
        structs.replace(stage, ranks=list(range(s * 8192, (s + 1) * 8192)), replicas=8192)
        for s, stage in enumerate(plan.stages)
    ]
    large = structs.replace(
        plan.with_layout(schedule=name, microbatch=1024),
        predicted=predicted,
        stages=devices,
        microbatches=65536,
        family=MIRRORED if name == "dualpipe" else plan.family,
    )
    assert all(len(line) <= 80 for line in lines([large, plan]))
    assert ("4096x4" if name == "dualpipe" else "8192x2") in lines([large, plan])[1]
