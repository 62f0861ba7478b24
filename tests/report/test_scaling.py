"""The table over numbers of devices: what its columns say, and that it fits the page."""

import click
import pytest
from click import unstyle
from msgspec import structs

from partopt.documents.tables import Scaling, ScalingRow
from partopt.report.plans import render_scaling as render
from partopt.search.tables import scaling_of
from tests.simulator.plans import limited, plan_of


def asynchronous(devices):
    return plan_of([devices])


def test_the_efficiency_is_the_speed_up_a_device():
    rows = scaling_of([asynchronous(1), plan_of([2, 1, 1], [2.0, 1.0, 2.0], [4.0, 2.0, 4.0])]).rows
    assert [row.devices for row in rows] == [1, 4]
    assert (rows[0].speedup_over_one_device, rows[0].efficiency) == (
        pytest.approx(1.0),
        pytest.approx(1.0),
    )
    # 15 s on one device, 6 s on the slowest of four
    assert rows[1].efficiency == pytest.approx(15.0 / 6.0 / 4)
    assert rows[1].efficiency == rows[1].speedup_over_one_device / 4
    assert [row.shape for row in rows] == ["1", "2-1-1"]


def test_the_batch_is_the_microbatch_size_and_how_many_where_there_are_some():
    synchronous = plan_of([1, 1], schedule="1f1b", microbatches=7)
    assert render(scaling_of([synchronous])).splitlines()[1].split()[1] == "1x7"
    assert render(scaling_of([asynchronous(2)])).splitlines()[1].split()[1] == "1"


def test_what_does_not_fit_is_said():
    plan = asynchronous(2)
    small = limited(plan, plan.peak_memory_bytes - 1)
    assert [row.fits for row in scaling_of([small, small]).rows] == [False, False]
    page = render(scaling_of([limited(plan, plan.peak_memory_bytes)]))
    assert click.unstyle(page).endswith(" yes")


def test_the_page_of_the_saved_document_is_that_of_the_plans(tmp_path):
    live = scaling_of([asynchronous(1), asynchronous(2)])
    live.save(str(tmp_path / "scaling.json"))
    loaded = Scaling.load(str(tmp_path / "scaling.json"))
    assert loaded.schema == "partopt.scaling/1"
    assert loaded == live
    assert render(loaded) == render(live)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("speed", [1e-9, 0.123456789, 999999.5, 1e15])
@pytest.mark.parametrize("devices", [1, 16384, 2**20])
def test_it_fits_the_page_whatever_the_numbers(synchronous, speed, devices):
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
    lines = unstyle(render(Scaling(rows=[row, other]))).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split()[0] == str(devices)
