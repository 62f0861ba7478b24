"""A execution as a document and as text."""

import json
import re

import click
import numpy as np
import pytest
from msgspec.structs import replace

import partopt as po
from partopt import documents
from partopt.cost.pricing import under
from partopt.documents.simulation import SimulationDocument
from partopt.report.simulation_text import group_devices, render
from partopt.report.text import page_style
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import CHUNKS, LOOPED, ranks_of
from partopt.simulator import execute
from partopt.units import format_seconds
from partopt.what_if.advice import findings
from partopt.what_if.document import document_of, drawn_windows
from tests.helpers import flat, two_level
from tests.report.timelines import plan_of


def case(schedule="1f1b", ranks=None, microbatches=8, **fields):
    """A plan of stages that exchange 1 MB, and its execution."""
    entry = SCHEDULES[schedule]
    v = CHUNKS.get(entry.shape, 2 if entry.shape == LOOPED else 1)
    M, fields = None if entry.asynchronous else microbatches, {"output_bytes": 10**6} | fields
    plan = plan_of(schedule, ranks or ranks_of(entry.shape, 4, v), M, **fields)
    sizes = [10**6 if s else 0 for s in range(len(plan.stages))]
    pairs = zip(plan.stages, sizes, strict=True)
    plan = under(replace(plan, stages=[replace(each, input_bytes=size) for each, size in pairs]))
    return plan, execute(plan)


def document(plan, execution):
    return document_of(execution, plan, findings(execution))


def text_of(plan, execution, **how):
    with page_style(**how):
        return click.unstyle(render(document(plan, execution)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_time_of_every_rank_adds_up_to_the_window(schedule):
    found = document(*case(schedule))
    window = found.window_end_s - found.window_start_s
    for rank in found.ranks:
        whole = rank.compute_s + rank.transfer_s + rank.allreduce_s + rank.idle_s
        waiting = rank.waiting_for_activations_s + rank.waiting_for_gradients_s + rank.finished_s
        assert (whole, rank.idle_s) == pytest.approx((window, waiting))
    asynchronous = SCHEDULES[schedule].asynchronous
    expected = (None, True) if asynchronous else (found.makespan_s, None)
    assert (found.iteration_s, found.settled) == expected


def test_the_document_is_the_one_that_is_described():
    raw = json.loads(documents.encode(document(*case(topology=flat(4, 1e10, memory_bytes=10**9)))))
    assert (raw["schema"], raw["schedule"]) == ("partopt.simulation/1", "1f1b")
    assert (raw["microbatches"], raw["fits"], raw["changed"]) == (8, True, [])
    assert raw["samples_per_s"] == pytest.approx(1 / raw["period_s"])
    assert raw["period_s"] == pytest.approx(raw["makespan_s"] / 8)
    assert [rank["stages"] for rank in raw["ranks"]] == [[0], [1], [2], [3]]
    assert raw["peak_memory_bytes"] == max(rank["peak_memory_bytes"] for rank in raw["ranks"])
    small = case(topology=flat(4, 10e9, memory_bytes=100))
    assert document(*small).fits is False
    assert "DOES NOT FIT 100 B, over by" in text_of(*small)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_line_is_wider_than_the_page(schedule, width):
    plan, execution = case(schedule)
    with page_style(width=width):
        page = text_of(plan, execution)
    assert max(map(len, page.splitlines())) <= width


def test_the_bar_is_as_long_for_every_row_and_shows_the_shares():
    plan, execution = case("1f1b", topology=flat(4, 1e8))
    lines = text_of(plan, execution, ascii_only=True).splitlines()
    rows = [line for line in lines if re.match(r"\d +\d +#", line)]
    assert len(rows) == 4
    for row, compute_s in zip(rows, execution.shares.compute_s, strict=True):
        share = compute_s / execution.makespan_s
        assert row.count("#") == pytest.approx(14 * share, abs=1)
        assert f"{share:.0%}" in row
    # replicas of a stage are one row
    text = text_of(*case("1f1b", [[0, 1, 2], [3]], microbatches=12))
    assert re.search(r"^0 0-2 \(x3\) ", text, re.MULTILINE)
    waiting = case("pipedream", [[0, 1], [2]], allreduce="blocking")
    assert text_of(*waiting, ascii_only=True).isascii()


def test_columns_are_explained_where_something_is_in_them():
    # two ranks without work, which have nothing left to do
    for schedule, devices, there in (("pipedream", 6, False), ("gpipe", 4, True)):
        text = text_of(*case(schedule, topology=flat(devices, 10e9)))
        meaning = " ".join(re.search(r"Shares of .*?\.\n", text, re.DOTALL)[0].split())
        assert ("END nothing left to do." in meaning) == there


def test_a_thousand_stages_are_a_short_table():
    plan, execution = case("1f1b", [[rank] for rank in range(256)], microbatches=16)
    text = text_of(plan, execution)
    shown = r"^1[456] of 256 rows are shown, the busiest and the fullest among them\.$"
    assert re.search(shown, text, re.MULTILINE)
    assert len(text.splitlines()) < 90
    fullest = int(execution.peak_memory_bytes.argmax())
    assert re.search(rf"^{fullest} +{fullest} ", text, re.MULTILINE)


def test_what_is_drawn():
    plan, execution = case("1f1b")
    [whole] = drawn_windows(execution)
    assert (whole.what, whole.begin_s, whole.end_s) == ("all", 0.0, execution.makespan_s)
    plan, execution = case("pipedream")
    [part] = drawn_windows(execution)
    order = execution.order
    first_backward = execution.timeline.start[(order.stage == 0) & (order.kind == 1)].min()
    assert part.what == "beginning"
    assert part.begin_s == 0 < first_backward < part.end_s < execution.makespan_s
    assert "in which the pipeline fills. BUSY is of these." in text_of(plan, execution)


def test_a_level_that_is_used():
    _, execution = case("1f1b", [[0], [1], [2], [3]], topology=two_level(2, 2, 10e9, 1e9))
    use = {each.level: each for each in execution.level_use}["cluster"]
    row = rf"^cluster +1 GB/s +{use.transfer_share:.1%} +0.0% +16 MB$"
    assert re.search(row, text_of(execution.plan, execution), re.MULTILINE)
    assert np.isclose(use.sent_bytes, 2 * 8 * 10**6)


def test_what_was_changed_is_told_with_before_and_after():
    before, execution = case("1f1b")
    after = under(before, "zb-h1", 16, topology=flat(4, 2e9, latency=1e-6))
    text = text_of(before, execute(after))
    for change in (
        "schedule 1f1b -> zb-h1",
        "microbatches 8 -> 16",
        "bandwidth of all 1 GB/s -> 2 GB/s",
        "latency of all 0 s -> 1.00 us",
    ):
        assert change in text
    assert re.search(r"^period +3.00 ms +[\d.]+ ms +\+[\d.]+%$", text, re.MULTILINE)
    assert "PLANNED" not in text_of(execution.plan, execution)


SLOW, JITTER = "rank 2 takes 1.5 times as long", "action times by 5% of their mean, lognormal, "
SEED = " of 8 microbatches, seed 3"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"slow": {2: 1.5}}, SLOW),
        ({"jitter": "5%", "draws": 1, "seed": 3}, f"{JITTER}1 draw{SEED}"),
        ({"jitter": "5%", "draws": 2, "seed": 3}, f"{JITTER}2 draws{SEED}"),
        (
            {"slow": {2: 1.5}, "jitter": 0.05, "draws": 2, "seed": 3},
            f"{JITTER}2 draws{SEED}; {SLOW}",
        ),
        (
            {"slow": dict.fromkeys(range(4), 2)},
            "; ".join(f"rank {n} takes 2 times as long" for n in range(4)),
        ),
    ],
)
def test_what_varies_is_told_with_the_median_and_of_several_draws_with_the_95th(how, what):
    plan, _ = case("1f1b")
    found = po.simulate(plan, **how).document
    varied = found.variation
    median, high = (
        f"{format_seconds(seconds)} ({loss:+.1%})"
        for seconds, loss in ((varied.p50_s, varied.p50_loss), (varied.p95_s, varied.p95_loss))
    )
    outcome = median if how.get("draws", 1) == 1 else f"p50 {median}, p95 {high}"
    before = format_seconds(found.iteration_s)
    text = " ".join(click.unstyle(render(found)).split())
    assert f"varied {what} an iteration {before} -> {outcome} " in text


def test_a_warm_up_and_the_ways_of_communicating_are_changes_too():
    before, _ = case("pipedream", [[0, 1], [2]])
    after = under(before.with_engine(waits=("pipedream",), allreduce="blocking"), warmups=[3, 1])
    found = document_of(execute(after), before, [])
    assert found.changed == [
        "warm-up 1,0 -> 3,1",
        "transfers overlap -> serial",
        "all-reduces overlap -> blocking",
    ]
    assert found.planned.period_s == before.predicted.period_s


def test_a_plan_that_says_something_else_than_its_simulation():
    plan, execution = case("1f1b")
    assert f"; the plan says {3:.2f} ms" in text_of(plan, execution)
    agreeing = replace(plan, predicted=replace(plan.predicted, period_s=execution.period_s))
    assert "the plan says" not in text_of(agreeing, execution)
    without = replace(document(plan, execution), timeline=None)
    left_out = "\n\nThe timeline has too many actions to be drawn.\n\n"
    assert left_out in click.unstyle(render(without))
    times = {"forward_s": 3e-3, "backward_s": 6e-3, "backward_weight_s": 3e-3, "compute_s": 9e-3}
    page = text_of(*case("zb-h1", microbatches=16, **times))
    assert page.endswith("advice   nothing to point at")


@pytest.mark.parametrize("fullest", [0, 1, 2])
def test_a_row_of_unequal_replicas_has_the_most_of_each_and_the_mean_of_their_time(fullest):
    """Memory, microbatches in flight and work of whichever replica has most; the last but one
    stage has three.
    """
    plan, execution = case("1f1b", [[0], [1, 2, 3], [4]], microbatches=9)
    plain = document(plan, execution)
    ranks = list(plain.ranks)
    for place in range(3):
        most, own = place == fullest, ranks[1 + place]
        ranks[1 + place] = replace(
            own,
            peak_memory_bytes=700 if most else 300 + place,
            peak_in_flight=8 if most else 2 + (place + fullest) % 2,
            compute_s=plain.window_s / (2 if most else 4),
            idle_s=plain.window_s / 4,
        )
    [first, row, last] = group_devices(replace(plain, ranks=ranks))
    assert (*row.stages, row.ranks) == (1, [1, 2, 3])
    assert (row.memory_bytes, row.in_flight, row.work) == (700, 8, 0.5)
    assert row.parts[0] == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3)
    assert (first.ranks, last.ranks) == ([0], [4])
    page = click.unstyle(render(replace(plain, ranks=ranks)))
    assert "700 B" in page and "300 B" not in page


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_page_of_the_saved_document_is_that_of_the_run(schedule, tmp_path):
    plan, execution = case(schedule, allreduce="blocking", parameter_bytes=10**6)
    live = document(under(plan.with_engine(waits=(schedule,))), execution)
    live.save(str(tmp_path / "simulation.json"))
    loaded = SimulationDocument.load(str(tmp_path / "simulation.json"))
    assert loaded == live
    for how in ({}, {"colour": True}, {"ascii_only": True}):
        with page_style(**how):
            assert render(loaded) == render(live)
