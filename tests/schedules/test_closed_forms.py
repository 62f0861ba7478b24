"""The makespan of every schedule, executed in exact arithmetic, is that of its closed form."""

from fractions import Fraction
from itertools import product

import pytest

from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.entry import SLOTS, Times
from partopt.schedules.order import in_flight
from tests.schedules.executed import built, chunks, executed, layout_of, makespan


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_makespan_is_that_of_the_entry(name):
    """A finite stretch of an asynchronous schedule takes what 1F1B takes, whose actions it has.

    Where there are too few microbatches or devices for the formula it takes longer, or is refused.
    """
    entry, tried = SCHEDULES[name], 0
    formula = SCHEDULES["1f1b"] if entry.asynchronous else entry
    for P, v, M in product((1, 2, 3, 4, 6), chunks(name), (1, 2, 3, 4, 5, 6, 8, 12, 13, 16)):
        error = refusal(name, P, v, M)
        if error:
            assert name in ("interleaved", "interleaved-zb", "dualpipe", "dualpipev")
            assert error.hint
        elif entry.bubble.holds(P, v, M, SLOTS):
            assert makespan(name, P, v, M) == formula.makespan(P, v, M), (P, v, M)
            tried += 1
        elif P < 5 and M < 6:
            assert makespan(name, P, v, M) >= formula.makespan(P, v, M)
    assert tried >= 10
    if entry.asynchronous:  # it does not wait in its steady state
        assert [entry.bubble.of(P, 1, 8, SLOTS) for P in (1, 2, 4)] == [0, 0, 0]


TIMES = [
    *(Times(*t) for t in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 4, 2), (1, 1.5, 0.5)]),
    *(Times(*t) for t in [(3, 1, 2), (1, 3, 2), (2, 3, 2), (3, 2, 2), (3, 3, 3)]),
]
SIZES = ((4, 2), (2, 2), (2, 3), (2, 4), (3, 7), (4, 4), (4, 8), (6, 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_holds_at_other_times_where_it_says_so(name):
    """And where it does not say so, there are times at which it does not. Each part of a backward
    is shorter than the other and than a forward, and longer.
    """
    entry, missed = SCHEDULES[name], 0
    for t in TIMES:
        for P, M in SIZES:
            v = chunks(name)[-1]
            if refusal(name, P, v, M) is not None or entry.asynchronous:
                continue
            took = makespan(name, P, v, M, seconds=dict(t._asdict(), B=t.B))
            if entry.bubble.holds(P, v, M, t):
                assert took == entry.makespan(P, v, M, t), (P, M, t)
            missed += took != entry.makespan(P, v, M, t)
    assert bool(missed) == bool(entry.bubble.condition)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_holds_where_its_condition_says_so(name):
    bubble = SCHEDULES[name].bubble
    said = bubble.condition.replace("2P", "2*P").replace("F, I", "min(F, I)")
    for t, (P, M) in product(TIMES, SIZES):
        letters = {"P": P, "M": M} | t._asdict()
        stated = eval(said.replace("F = I = W", "F == I == W") or "True", letters)
        assert bubble.holds(P, 2, M, t) == stated, (P, M, t)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_formula_of_the_bubble_is_what_is_computed(name):
    bubble = SCHEDULES[name].bubble
    for t in TIMES:
        letters = {"P": 6, "M": 12, "FB": t.F + t.B, "B": t.B} | t._asdict()
        product = bubble.text.replace("F&B", "FB").replace("3W", "3*W").replace(")(", ")*(")
        computed = eval(product.replace("M(", "M*("), letters)
        assert computed == bubble.of(6, 2, 12, t)


def test_groups_larger_than_the_devices_keep_the_makespan_and_hold_more():
    """Six microbatches on four devices have no group of four: they pass as one group of six, or ten
    as two of five.
    """
    for M, G in ((6, 6), (10, 5)):
        assert makespan("interleaved", 4, 2, M) == 3 * (2 * M + 3)
        held = [min(2 * M, G + 2 * (3 - p) + 1) for p in range(4)]
        assert in_flight(built("interleaved", 4, 2, M)).tolist() == held
        assert makespan("interleaved-zb", 4, 2, M) == 3 * 2 * M + 3
        assert in_flight(built("interleaved-zb", 4, 2, M)).tolist() == [G + 4] * 4


def test_fewer_microbatches_than_devices_cannot_fill_an_interleaved_pipeline():
    """Chunk 1 of the first device waits for the last device: P v + M - 1 slots."""
    for P, v, M in ((3, 2, 1), (3, 2, 2), (4, 3, 2), (4, 2, 3)):
        assert makespan("interleaved", P, v, M) == 3 * (P * v + M - 1)


@pytest.mark.slow
@pytest.mark.parametrize("P, M", [(1, 3), (2, 4), (3, 9), (4, 8)])
def test_gpipe_and_eager_1f1b_pay_for_latency_once_each_way_and_1f1b_in_every_round(P, M):
    """1F1B's steady period is tF + tB + 2c(P-1)/P: P more microbatches take P periods."""
    for latency in (0.0, 0.25, 0.5):
        for name in ("gpipe", "1f1b-eager"):
            expected = 3 * (M + P - 1) + 2 * latency * (P - 1)
            assert makespan(name, P, 1, M, latency=latency) == expected
        late, later = (makespan("1f1b", P, 1, rounds * P, latency=latency) for rounds in (8, 9))
        assert (later - late) / P == Fraction(3) + Fraction(2 * latency) * (P - 1) / P


@pytest.mark.parametrize("P, M", [(1, 1), (1, 4), (2, 1), (3, 5), (4, 8)])
def test_gpipe_recomputes_before_the_gradient_comes(P, M):
    """(M+P-1)(F+B) + M R: recomputation delays the last device alone."""
    layout = layout_of("gpipe", P, 1, M, recompute=[True] * P)
    for R in (0.5, 1.0):
        found = executed(order("gpipe", layout), layout, seconds={"R": R})
        assert found.makespan == 3 * (M + P - 1) + M * R
