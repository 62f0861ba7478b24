"""The table over numbers of devices: what its columns say, and that it fits the page."""

import pytest
from click import unstyle
from msgspec import json, structs

from partopt import documents
from partopt.report import scaling
from partopt.report.table import WIDTH
from tests.simulator.plans import plan_of


def asynchronous(devices):
    return plan_of([devices])


def test_the_efficiency_is_the_speed_up_a_device():
    rows = scaling.scaling(
        [asynchronous(1), plan_of([2, 1, 1], [2.0, 1.0, 2.0], [4.0, 2.0, 4.0])], None
    ).rows
    assert [row.devices for row in rows] == [1, 4]
    assert (rows[0].speedup_over_one_device, rows[0].efficiency) == (
        pytest.approx(1.0),
        pytest.approx(1.0),
    )
    # 15 s on one device, 6 s on the slowest of four
    assert rows[1].efficiency == pytest.approx(15.0 / 6.0 / 4)
    assert rows[1].efficiency == rows[1].speedup_over_one_device / 4
    assert [row.shape for row in rows] == ["1", "2-1-1"]


def test_microbatches_are_shown_where_there_are_some():
    synchronous = plan_of([1, 1], schedule="1f1b", microbatches=7)
    assert " M " in scaling.render(scaling.scaling([synchronous], None)).splitlines()[0]
    assert " 7 " in scaling.render(scaling.scaling([synchronous], None)).splitlines()[1]
    assert " M " not in scaling.render(scaling.scaling([asynchronous(2)], None)).splitlines()[0]


def test_what_does_not_fit_is_said():
    plan = asynchronous(2)
    assert [row.fits for row in scaling.scaling([plan, plan], plan.peak_memory_bytes - 1).rows] == [
        False,
        False,
    ]
    assert scaling.render(scaling.scaling([plan], plan.peak_memory_bytes)).endswith(" yes")


def test_the_document_is_read_back():
    found = scaling.scaling([asynchronous(1), asynchronous(2)], None)
    assert found.schema == "partopt.scaling/1"
    assert json.decode(documents.encode(found), type=scaling.Scaling) == found


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("speed", [1e-9, 0.123456789, 999999.5, 1e15])
@pytest.mark.parametrize("devices", [1, 16384, 2**20])
def test_it_fits_the_page_whatever_the_numbers(synchronous, speed, devices):
    row = scaling.Row(
        devices=devices,
        planner="data_parallel",
        shape="1024-1x16383-1024",
        microbatches=1048576 if synchronous else None,
        period_s=1 / speed,
        samples_per_s=speed,
        speedup_over_one_device=devices * 0.987654321,
        efficiency=0.987654321,
        bound_by="microbatches in flight",
        fits=False,
    )
    other = structs.replace(row, planner="gpipe", bound_by="cut before stage 12")
    lines = unstyle(scaling.render(scaling.Scaling(rows=[row, other]))).splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[1].split()[0] == str(devices)
