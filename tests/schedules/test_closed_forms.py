"""The makespan of every schedule, executed in exact arithmetic, is that of its closed form."""

from fractions import Fraction

import pytest

from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.entry import SLOTS, Times
from partopt.schedules.order import in_flight
from tests.schedules.executed import built, chunks, executed, layout_of, makespan, straight


def slots(name, P, v, M):
    """Of one iteration by the schedule's entry; of a finite stretch of an asynchronous schedule
    what 1F1B takes, whose actions it has.
    """
    return SCHEDULES["1f1b" if SCHEDULES[name].asynchronous else name].makespan(P, v, M)


def test_an_asynchronous_schedule_does_not_wait_in_its_steady_state():
    for entry in SCHEDULES.values():
        if entry.asynchronous:
            assert [entry.bubble.of(P, 1, 8, SLOTS) for P in (1, 2, 4)] == [0, 0, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_makespan_is_that_of_the_entry(name):
    entry, tried = SCHEDULES[name], 0
    for P in (1, 2, 3, 4, 6):
        for v in chunks(name):
            for M in (1, 2, 3, 4, 5, 6, 8, 12, 13, 16):
                if entry.bubble.holds(P, v, M, SLOTS) and refusal(name, P, v, M) is None:
                    assert makespan(name, P, v, M) == slots(name, P, v, M), (P, v, M)
                    tried += 1
    assert tried >= 10


TIMES = [Times(*t) for t in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 4, 2), (1, 1.5, 0.5)]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_holds_at_other_times_where_it_says_so(name):
    """And where it does not say so, there are times at which it does not."""
    entry, missed = SCHEDULES[name], 0
    for t in [*TIMES, Times(3, 3, 3)]:
        for P, M in ((4, 2), (2, 2), (2, 4), (3, 7), (4, 4), (4, 8), (6, 12)):
            v = chunks(name)[-1]
            if refusal(name, P, v, M) is not None or entry.asynchronous:
                continue
            took = makespan(name, P, v, M, seconds=dict(t._asdict(), B=t.B))
            if entry.bubble.holds(P, v, M, t):
                assert took == entry.makespan(P, v, M, t), (P, M, t)
            missed += took != entry.makespan(P, v, M, t)
    assert bool(missed) == bool(entry.bubble.condition)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_formula_of_the_bubble_is_what_is_computed(name):
    bubble = SCHEDULES[name].bubble
    for t in TIMES:
        letters = {"P": 6, "M": 12, "FB": t.F + t.B, "B": t.B} | t._asdict()
        product = bubble.text.replace("F&B", "FB").replace("3W", "3*W").replace(")(", ")*(")
        computed = eval(product.replace("M(", "M*("), letters)
        assert computed == bubble.of(6, 2, 12, t)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_few_microbatches_or_devices_run_to_the_end_or_are_refused(name, P, M):
    for v in chunks(name):
        error = refusal(name, P, v, M)
        if error is None:
            assert makespan(name, P, v, M) >= slots(name, P, v, M)
        else:
            assert name in ("interleaved", "interleaved-zb", "dualpipe", "dualpipev")
            assert error.hint


def test_groups_larger_than_the_devices_keep_the_makespan_and_hold_more():
    """Six microbatches on four devices have no group of four: they pass as one group of six, or ten
    as two of five.
    """
    for M, G in ((6, 6), (10, 5)):
        assert makespan("interleaved", 4, 2, M) == 3 * (2 * M + 3)
        assert in_flight(built("interleaved", 4, 2, M)).tolist() == [
            min(2 * M, G + 2 * (3 - p) + 1) for p in range(4)
        ]
        assert makespan("interleaved-zb", 4, 2, M) == 3 * 2 * M + 3
        assert in_flight(built("interleaved-zb", 4, 2, M)).tolist() == [G + 4] * 4


def test_fewer_microbatches_than_devices_cannot_fill_an_interleaved_pipeline():
    """Chunk 1 of the first device waits for the last device: P v + M - 1 slots."""
    for P, v, M in ((3, 2, 1), (3, 2, 2), (4, 3, 2), (4, 2, 3)):
        assert makespan("interleaved", P, v, M) == 3 * (P * v + M - 1)


@pytest.mark.parametrize("P, M", [(2, 4), (4, 4), (4, 8), (6, 12)])
def test_share_of_the_bubble(P, M):
    def bubble(name, v=1):
        return 1 - Fraction(3 * M * v) / makespan(name, P, v, M)

    assert bubble("gpipe") == bubble("1f1b") == Fraction(P - 1, M + P - 1)
    assert bubble("naive") == 1 - Fraction(1, P)
    for v in (2, 3):
        if M % P == 0:
            assert bubble("interleaved", v) == Fraction(P - 1, v * M + P - 1)


@pytest.mark.parametrize("P, M", [(1, 3), (2, 4), (3, 9), (4, 8), (5, 25)])
@pytest.mark.parametrize("latency", [0.0, 0.25, 0.5])
def test_gpipe_and_eager_1f1b_pay_for_latency_once_on_the_way_there_and_once_on_the_way_back(
    P, M, latency
):
    expected = 3 * (M + P - 1) + 2 * latency * (P - 1)
    assert makespan("gpipe", P, 1, M, latency=latency) == expected
    assert makespan("1f1b-eager", P, 1, M, latency=latency) == expected


@pytest.mark.parametrize("P", [2, 3, 4, 5])
@pytest.mark.parametrize("latency", [0.25, 0.5])
def test_1f1b_pays_for_latency_in_every_round_of_the_pipeline(P, latency):
    """Steady period tF + tB + 2c(P-1)/P: P more microbatches take P periods."""
    late, later = (makespan("1f1b", P, 1, M, latency=latency) for M in (8 * P, 9 * P))
    assert (later - late) / P == Fraction(3) + Fraction(2 * latency) * (P - 1) / P


@pytest.mark.parametrize("P, M", [(1, 1), (1, 4), (2, 1), (3, 2), (3, 5), (4, 8)])
def test_gpipe_recomputes_before_the_gradient_comes(P, M):
    """(M+P-1)(F+B) + M R: recomputation delays the last device alone."""
    for R in (0.5, 1.0):
        layout = layout_of("gpipe", P, 1, M, recompute=[True] * P)
        assert (
            executed(order("gpipe", layout), layout, seconds={"R": R}).makespan
            == 3 * (M + P - 1) + M * R
        )


@pytest.mark.parametrize(
    "replicas",
    [[3, 1], [1, 3], [2, 1, 1], [1, 2, 1], [1, 3, 1], [5, 2, 3], [1, 1, 4, 1], [2, 2, 2]],
)
@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if entry.uneven])
def test_stages_with_unequal_replicas_run_to_the_end_and_hold_what_the_formula_says(name, replicas):
    counts = SCHEDULES[name].counts
    for M in (1, 2, 3, 7, 12, 30):
        layout = straight(name, replicas, M)
        given = order(name, layout)
        executed(given, layout)
        peaks = in_flight(given)
        for s, ranks in enumerate(layout.ranks):
            most = int(max(peaks[ranks]))
            assert most == min(counts(s, replicas, M).held, -(-M // replicas[s])), (M, s)
