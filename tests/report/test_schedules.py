"""The table of schedules: what its columns say, and that it fits the page."""

import pytest
from click import unstyle
from msgspec import structs

from partopt.report.plans import render_schedules
from partopt.schedules import SCHEDULES
from tests.simulator.plans import chunked, limited, plan_of


def lines(plans):
    return unstyle(render_schedules(plans)).splitlines()


@pytest.mark.parametrize(
    ("plan", "grid", "batch"),
    [
        (plan_of([2, 2, 2], schedule="1f1b", microbatches=4), "2x3", "1x4"),
        (plan_of([4], schedule="gpipe", microbatches=4), "4x1", "1x4"),
        (chunked("interleaved", 2, 3, 8, 2), "2x2x3", "1x8"),
        (chunked("zbv", 3, 2, 8), "1x3x2", "1x8"),
        (chunked("dualpipe", 2, 1, 16, 2), "2x2x2", "1x16"),
    ],
)
def test_the_grid_multiplies_to_the_stages_on_all_devices(plan, grid, batch):
    cells = lines([plan])[1].split()
    assert cells[:4] == [plan.schedule, grid, batch, "never"]


def test_a_line_a_plan_in_the_order_that_it_is_given():
    plans = [plan_of([1, 1], schedule=name, microbatches=4) for name in ("gpipe", "1f1b")]
    heading, *rows = lines([limited(plan, plans[1].peak_memory_bytes) for plan in plans])
    assert [row.split()[0] for row in rows] == ["gpipe", "1f1b"]
    assert [row.split()[-1] for row in rows] == ["no", "yes"]
    assert [word for word in heading.split() if word.isalpha()][:3] == ["SCHEDULE", "GRID", "BATCH"]


def test_a_plan_that_recomputes():
    plan = plan_of([1, 1], schedule="1f1b", microbatches=4, recompute=True)
    assert "always" in lines([plan])[1]


@pytest.mark.parametrize(
    "name", [name for name, entry in SCHEDULES.items() if not entry.asynchronous]
)
@pytest.mark.parametrize("seconds", [1e-9, 12345.678])
@pytest.mark.parametrize("size", [1, 123456789])
def test_it_fits_the_page_whatever_the_numbers(name, seconds, size):
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
    )
    assert all(len(line) <= 80 for line in lines([large, plan]))
    assert ("4096x4" if name == "dualpipe" else "8192x2") in lines([large, plan])[1]
