import click
import pytest

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.report.comparison import _variance, compare, render, render_beside
from tests.helpers import measurement, profile_of
from tests.planners.problems import topology

PROFILE = profile_of(
    [measurement([2.0, 1.0, 1.0], [4.0, 2.0, 2.0], output_bytes=[8, 8, 0])],
    parameter_bytes=[4, 4, 8],
)


def plans(*names: str):
    problem = problem_of(PROFILE, topology((2, 1e6)))
    return {name: planners.plan(name, problem) for name in names}


def test_rows_are_sorted_fastest_first_and_measured_against_data_parallelism():
    """Data parallelism takes 12 / 2 s a microbatch, two stages of 6 s as long: a tie keeps its
    order.
    """
    made = plans("gpipe", "data_parallel")
    rows = compare(made, made["data_parallel"], None).rows
    assert [(row.planner, row.period_s, row.speedup_over_data_parallel) for row in rows] == [
        ("gpipe", 6.0, 1.0),
        ("data_parallel", 6.0, 1.0),
    ]
    assert rows[0].stage_variance_s2 == 0


@pytest.mark.parametrize("limit, verdict", [(None, True), (100, True), (10, False)])
def test_what_does_not_fit_is_said(limit, verdict):
    made = plans("gpipe")
    assert compare(made, made["gpipe"], limit).rows[0].fits is verdict


def test_a_table_of_one_plan():
    """The fuller stage holds 12 bytes of weights, 12 of gradients, 24 of moments, 16 of activations
    and a buffer of 8.
    """
    made = plans("gpipe")
    assert click.unstyle(render(compare(made, made["gpipe"], None))).splitlines() == [
        "PLANNER SHAPE STAGES PERIOD SAMPLES/S x ONE x DP MEMORY FITS VAR",
        "gpipe   1-1        2 6.00 s      0.17  2.00 1.00   72 B yes    0",
    ]


def test_a_faster_plan_beside_the_chosen_one_is_pointed_out():
    slow, fast = (
        planners.plan("manual", problem_of(PROFILE, topology((2, 1e6)))),
        plans("data_parallel")["data_parallel"],
    )
    assert render_beside(slow, [fast], None).endswith("faster")
    assert render_beside(slow, [fast], 10).endswith("does not fit")
    assert not render_beside(fast, [slow], None).endswith("faster")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.786, "0.786"), (99.94, "99.9"), (1536.2, "1536"), (123456.0, "1e+05")],
)
def test_variances_stay_narrow(value, text):
    assert _variance(value) == text
