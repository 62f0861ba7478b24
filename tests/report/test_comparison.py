import click
import pytest

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.tables import Comparison
from partopt.report.plans import _variance, render_beside
from partopt.report.plans import render_comparison as render
from partopt.search.tables import comparison_of
from tests.helpers import measurement, profile_of
from tests.planners.problems import topology
from tests.simulator.plans import limited

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
    rows = comparison_of(made, made["data_parallel"]).rows
    assert [(row.planner, row.period_s, row.speedup_over_data_parallel) for row in rows] == [
        ("gpipe", 6.0, 1.0),
        ("data_parallel", 6.0, 1.0),
    ]
    assert rows[0].stage_variance_s2 == 0


@pytest.mark.parametrize("limit, verdict", [(None, True), (100, True), (10, False)])
def test_what_does_not_fit_is_said(limit, verdict):
    plan = limited(plans("gpipe")["gpipe"], limit)
    assert comparison_of({"gpipe": plan}, None).rows[0].fits is verdict


def test_a_table_of_one_plan():
    """The fuller stage holds 12 bytes of weights, 12 of gradients, 24 of moments, 16 of activations
    and a buffer of 8.
    """
    made = plans("gpipe")
    assert click.unstyle(render(comparison_of(made, made["gpipe"]))).splitlines() == [
        "model    chain: 3 layers, microbatch 1, schedule pipedream",
        "cluster  test, 2 x device: level1 (2, 1 MB/s)",
        "",
        "PLANNER SHAPE STAGES PERIOD SAMPLES/S x ONE x DP MEMORY FITS VAR",
        "gpipe   1-1        2 6.00 s    0.1667  2.00 1.00   72 B yes    0",
        "",
        "x ONE, x DP: times one device, data parallelism. VAR: variance of stages, ms^2.",
    ]


def test_a_faster_plan_beside_the_chosen_one_is_pointed_out():
    slow, fast = (
        planners.plan("manual", problem_of(PROFILE, topology((2, 1e6)))),
        plans("data_parallel")["data_parallel"],
    )
    assert render_beside(slow, [fast]).endswith("faster")
    assert click.unstyle(render_beside(slow, [limited(fast, 10)])).endswith("does not fit")
    assert not render_beside(fast, [slow]).endswith("faster")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.786, "0.786"), (99.94, "99.9"), (1536.2, "1536"), (123456.0, "1e+05")],
)
def test_variances_stay_narrow(value, text):
    assert _variance(value) == text


def test_the_page_of_the_saved_document_is_that_of_the_plans(tmp_path):
    live = comparison_of(plans("gpipe", "data_parallel"), None)
    live.save(str(tmp_path / "comparison.json"))
    loaded = Comparison.load(str(tmp_path / "comparison.json"))
    assert loaded == live
    assert render(loaded) == render(live)
