"""Orders as pictures; all that are not refused are complete, run to their end, are soon written."""

import time
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.documents.actions import KINDS
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.assemble import check
from partopt.schedules.one_f_one_b import blocking_warmups
from partopt.schedules.order import spell
from partopt.schedules.placement import STRAIGHT, Placement
from partopt.simulator.work import Work
from tests.examples import examples
from tests.helpers import flat
from tests.schedules.executed import SECONDS, built, chunks, layout_of, picture, straight
from tests.simulator.reference import simulate

PICTURES = Path(__file__).parent / "pictures"


@pytest.mark.parametrize("given", [spell("FfBb"), order("1f1b", Placement([[0], [1]], 2, 4))])
def test_arrays_are_of_the_types_that_are_declared(given):
    declared = get_type_hints(type(given))
    for name, kind in declared.items():
        [own] = get_args(get_args(kind)[1])
        assert getattr(given, name).dtype == own


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_that_of_the_picture(name):
    """`pictures/NAME.txt`: P, v and M, then a line a rank, by hand or checked against the paper."""
    path = PICTURES / f"{name}.txt"
    assert path.exists(), f"draw it by hand: {path.relative_to(PICTURES.parent)}"
    sizes, *rows = path.read_text().splitlines()
    assert picture(built(name, *map(int, sizes.split()))) == rows


OTHERS = [
    # GPipe recomputes before every backward
    (
        straight("gpipe", [1, 1], 2, recompute=[True, False]),
        "gpipe",
        ["F0 F1 R0 B0 R1 B1 U", "F0 F1 B0 B1 U"],
    ),
    # eager 1F1B takes the warm-up that it is given, and shares its own among replicas
    (
        straight("1f1b-eager", [1, 1], 3, warmup=[1, 0]),
        "1f1b-eager",
        ["F0 F1 B0 F2 B1 B2 U", "F0 B0 F1 B1 F2 B2 U"],
    ),
    (
        straight("1f1b-eager", [1, 1], 3, warmup=[2, 0]),
        "1f1b-eager",
        ["F0 F1 F2 B0 B1 B2 U", "F0 B0 F1 B1 F2 B2 U"],
    ),
    (
        straight("1f1b-eager", [2, 1], 8),
        "1f1b-eager",
        [
            "F0 F2 B0 F4 B2 F6 B4 B6 A0 U",
            "F1 F3 B1 F5 B3 F7 B5 B7 A0 U",
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 U",
        ],
    ),
    # PipeDream exchanges after every whole round, 1F1B once an iteration
    (
        straight("pipedream", [2, 1], 5),
        "pipedream",
        ["F0 F2 B0 A0 F4 B2 A1 B4", "F1 F3 B1 A0 B3 A1", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"],
    ),
    (
        straight("1f1b", [2, 1], 4),
        "1f1b",
        ["F0 F2 B0 B2 A0 U", "F1 F3 B1 B3 A0 U", "F0 B0 F1 B1 F2 B2 F3 B3 U"],
    ),
    # replicas without microbatches exchange all the same; a rank without work does nothing
    (straight("1f1b", [3], 2), "1f1b", ["F0 B0 A0 U", "F1 B1 A0 U", "A0 U"]),
    (Placement([[0], [2]], 3, 1), "1f1b", ["F0 B0 U", "", "F0 B0 U"]),
]


@pytest.mark.parametrize("layout, name, rows", OTHERS)
def test_orders_by_hand(layout, name, rows):
    assert picture(order(name, layout), updates=True) == rows


def test_interleaved_pipelines_side_by_side_take_every_other_microbatch():
    assert picture(built("interleaved", 2, 2, 4, d=2)) == [
        "0F0 0F2 2F0 2F2 2B0 2B2 2A0 0B0 0B2 0A0",
        "0F1 0F3 2F1 2F3 2B1 2B3 2A0 0B1 0B3 0A0",
        "1F0 1F2 3F0 3B0 3F2 3B2 3A0 1B0 1B2 1A0",
        "1F1 1F3 3F1 3B1 3F3 3B3 3A0 1B1 1B3 1A0",
    ]


REFUSED = [
    ("interleaved", 4, 2, 9, "9 microbatches do not divide into 2 equal groups", "tches=8`"),
    ("interleaved-zb", 2, 3, 7, "7 microbatches do not divide into 3 equal groups", "le of 2"),
    ("dualpipe", 3, 2, 12, "3 devices do not divide into two equal halves", "dualpipev"),
    ("dualpipe", 4, 2, 9, "9 microbatches do not divide among 2 replicas", "multiple of 2"),
    ("dualpipe", 4, 2, 6, "6 microbatches do not fill two copies of 4 stages", "8` or more"),
    ("dualpipev", 4, 2, 7, "7 microbatches do not fill 8 stages", "`microbatches=8` or more"),
    ("zbv", 4, 3, 8, "`chunks=3`: zbv puts 2 on each device", "interleaved"),
    ("1f1b", 4, 2, 8, "`chunks=2`: 1f1b puts 1 on each device", "interleaved"),
    ("1f1b", 4, 1, 0, "`microbatches=0`: must be at least 1", "`microbatches=1` or more"),
]


@pytest.mark.parametrize("name, P, v, microbatches, message, hint", REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_planned(
    name, P, v, microbatches, message, hint
):
    error = refusal(name, P, v, microbatches)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    "name, layout, message",
    [
        ("1f1b", Placement([[0], [0]], 1, 4), "one stage on each device"),
        ("zb-h1", Placement([[0, 1], [2]], 3, 4), "equally many replicas"),
        ("interleaved", Placement([[0], [1], [1], [0]], 2, 4), "stages s, s + P"),
        ("zbv", Placement([[0], [1], [0], [1]], 2, 4), "stages s and 2P-1-s"),
        ("dualpipe", Placement([[0], [1]], 2, 4), "two copies of every stage"),
        ("dualpipe", Placement([[0, 1], [1, 0]], 2, 5), "do not divide among 2 replicas"),
    ],
)
def test_stages_that_lie_otherwise_are_refused(name, layout, message):
    with pytest.raises(PartoptError) as found:
        order(name, layout)
    assert message in found.value.message
    assert found.value.hint


REPLICATED = [name for name, entry in SCHEDULES.items() if entry.uneven]


def run(name, layout, serial, blocking):
    """Check and execute the schedule with transfers and all-reduces that take time; a deadlock
    raises.
    """
    S = len(layout.ranks)
    work = Work(
        ranks=layout.ranks,
        seconds=np.array([[SECONDS.get(kind, 0.5)] * S for kind in KINDS]),
        cut_bytes=np.ones(S + 1),
        gradient_bytes=np.ones(S),
        tied_s=np.zeros(S),
        topology=flat(layout.devices, bandwidth=4.0, latency=0.125),
        serial=serial,
        blocking=blocking,
    )
    written = order(name, layout)
    check(written, layout)
    simulate(written, work)


@pytest.mark.slow
@examples(100)
@given(
    st.sampled_from(REPLICATED),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_any_replication_runs_to_its_end(name, replicas, microbatches, serial, blocking):
    warmup = blocking_warmups(replicas) if blocking and SCHEDULES[name].asynchronous else None
    layout = straight(name, replicas, microbatches, warmup=warmup)
    run(name, layout, serial, blocking and name != "naive")


def test_pipedreams_warmup_can_be_too_short_for_all_reduces_that_are_waited_for():
    """1-3-1: the middle stage's round needs microbatch 5, which the first stage takes in only after
    a gradient of that round.
    """
    with pytest.raises(PartoptError, match="deadlocks: rank 3 waits at 1F5"):
        run("pipedream", straight("pipedream", [1, 3, 1], 6), serial=False, blocking=True)
    assert blocking_warmups([1, 3, 1]) == [5, 1, 0]


def test_a_naive_pipeline_with_replicas_cannot_block_in_its_all_reduce():
    """The exchange waits for the second replica, that for the next microbatch, that for the
    gradient that the exchange holds back.
    """
    with pytest.raises(PartoptError, match="deadlocks: rank 2 waits at 1F1"):
        run("naive", straight("naive", [1, 2], 2), serial=False, blocking=True)


@pytest.mark.slow
@examples(150)
@given(
    st.sampled_from([name for name in SCHEDULES if name not in REPLICATED]),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 20),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_any_pipelines_side_by_side_run_to_their_end(name, P, v, microbatches, d, serial, blocking):
    v = v if v in chunks(name) else chunks(name)[0]
    if refusal(name, P, v, microbatches) is None:
        run(name, layout_of(name, P, v, microbatches * d, d), serial, blocking)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_quarter_of_a_million_tasks_are_written_within_seconds(name):
    start = time.perf_counter()
    written = built(name, 256, 1 if SCHEDULES[name].shape == STRAIGHT else 2, 1024)
    assert time.perf_counter() - start < 3
    copies = 1 if name == "dualpipe" else written.stage.max() // 256 + 1
    assert np.count_nonzero(written.kind == 0) == 256 * 1024 * copies
