"""The facts of every schedule: free of contradictions, and those of its orders."""

import dataclasses
import itertools
import re
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt import schedules
from partopt.documents.actions import B, F, I, R, W
from partopt.documents.plan import noam
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal, schedule
from partopt.schedules.entry import Counts, Schedule
from partopt.schedules.one_f_one_b import blocking_warmups, downstream
from partopt.schedules.order import in_flight
from partopt.schedules.placement import STRAIGHT, VEE, Placement
from tests.examples import examples
from tests.schedules.executed import built, chunks, layout_of, straight

ENTRIES = list(SCHEDULES.values())
STRAIGHTS = [entry for entry in ENTRIES if entry.shape == STRAIGHT]
CHUNKED = [entry for entry in ENTRIES if entry.shape != STRAIGHT]


def test_names_and_what_no_two_schedules_share():
    assert [entry.name for entry in ENTRIES] == list(SCHEDULES)
    entry = schedule("1f1b")
    facts = {field.name: getattr(entry, field.name) for field in dataclasses.fields(Schedule)}
    for fact in ("name", "summary", "row", "bubble"):
        with pytest.raises(TypeError, match=f"'{fact}'"):
            Schedule(**{name: each for name, each in facts.items() if name != fact})
    for unknown, nearest in (("1f2b", "1f1b"), ("dualpipe-v", "dualpipev")):
        with pytest.raises(PartoptError, match=f'unknown schedule "{unknown}"') as raised:
            schedule(unknown)
        assert (raised.value.code, raised.value.fields) == ("unknown-schedule", {"name": unknown})
        assert raised.value.hint == f'did you mean "{nearest}"?'


@pytest.mark.parametrize(
    "name, facts, message",
    [
        ("1f1b", {"shape": "ring"}, "unknown shape 'ring'"),
        ("1f1b", {"shape": VEE}, "one stage on each device has `counts`"),
        ("zbv", {"shape": STRAIGHT}, "one stage on each device has `counts`"),
        ("1f1b", {"weight_versions": 3}, "weight_versions is 1, 2 or ALL_IN_FLIGHT"),
        ("1f1b", {"asynchronous": True}, '`schedule="auto"` does not try it'),
        ("zbv", {"asynchronous": True, "tried_by_auto": False}, "asynchronous: one stage on each"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(name, facts, message):
    with pytest.raises(ValueError, match=f"schedule {name}: .*{message}"):
        dataclasses.replace(schedule(name), **facts)


def test_counts_of_a_device_are_not_those_of_a_stage():
    with pytest.raises(AssertionError, match="`in_flight` counts those of a device"):
        schedule("zbv").counts(0, [1, 1], 4)
    with pytest.raises(AssertionError, match="`counts` counts those of a stage"):
        schedule("1f1b").in_flight(0, 2, 1, 4)


def with_any_replicas(count):
    """A test of a straight schedule and a layout of any replicas that it can have."""

    def decorate(test):
        @pytest.mark.parametrize("entry", STRAIGHTS, ids=[entry.name for entry in STRAIGHTS])
        @examples(count)
        @given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 40))
        def run(entry, replicas, M):
            if not entry.uneven:
                replicas = replicas[:1] * len(replicas)
                assume(M % replicas[0] == 0)
            test(entry, replicas, M)

        return run

    return decorate


@pytest.mark.slow
@with_any_replicas(60)
def test_stages_hold_exactly_what_the_entry_says(entry, replicas, M):
    """An order of an asynchronous schedule is a finite stretch: no more passes through than M."""
    layout = straight(entry.name, replicas, M)
    found = order(entry.name, layout)
    peaks = in_flight(found)
    for s, ranks in enumerate(layout.ranks):
        held = entry.counts(s, replicas, None if entry.asynchronous else M).held
        assert max(peaks[ranks]) == min(held, -(-M // replicas[s]))
        row = found.kind[found.rows[ranks[0]] : found.rows[ranks[0] + 1]]
        first = int(np.argmax(row != F))  # forwards before the first backward
        warmup = entry.counts(s, replicas, M).warmup
        # the forward that is alternated with the first backward comes before it too
        assert first == min(warmup + 1, -(-M // replicas[s]))


@pytest.mark.slow
@with_any_replicas(40)
def test_as_many_backwards_have_begun_as_the_entry_says(entry, replicas, M):
    """From the start of the R, or of the backward that recomputes, to the end of the backward."""
    layout = straight(entry.name, replicas, M, recompute=[True] * len(replicas))
    found = order(entry.name, layout)
    rebuilding = [R] if entry.recomputes else [B, I]
    for s, ranks in enumerate(layout.ranks):
        most = 0
        for rank in ranks:
            row = found.kind[found.rows[rank] : found.rows[rank + 1]]
            kept = np.cumsum(np.isin(row, rebuilding)) - np.cumsum(np.isin(row, [B, W]))
            most = max(most, int((kept + np.isin(row, [B, W])).max(initial=0)))
        assert most == entry.counts(s, replicas, None if entry.asynchronous else M).begun


@lru_cache
def possible(name):
    """The P, v and M, up to 6 devices and 40 microbatches, that a schedule can run."""
    sizes = itertools.product(range(1, 7), chunks(name), range(1, 41))
    return [size for size in sizes if refusal(name, *size) is None]


@pytest.mark.slow
@pytest.mark.parametrize("entry", CHUNKED, ids=[entry.name for entry in CHUNKED])
@examples(60)
@given(st.data(), st.integers(1, 2))
def test_devices_hold_exactly_what_the_entry_says(entry, data, d):
    P, v, M = data.draw(st.sampled_from(possible(entry.name)))
    layout = layout_of(entry.name, P, v, M * d, d)
    peaks = in_flight(order(entry.name, layout))
    assert peaks.tolist() == [entry.in_flight(p, P, v, M) for p in range(P) for _ in range(d)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_has_an_action_where_the_entry_says_so(name):
    """R is one where recomputation waits for no gradient, W where backwards are in two parts."""
    v, M = chunks(name)[-1], 12
    S = len(layout_of(name, 2, v, M).ranks)
    found = order(name, layout_of(name, 2, v, M, recompute=[True] * S)).kind
    assert bool((found == R).any()) == SCHEDULES[name].recomputes
    assert bool((found == W).any()) == SCHEDULES[name].split


def test_plans_state_the_warm_up_where_rows_follow_it():
    """One forward more than usual comes first, where there is one; else it is refused."""
    held = {entry.name: entry.versions_of(3) for entry in ENTRIES}
    assert held == dict.fromkeys(SCHEDULES, 1) | {"pipedream": 3, "pipedream-2bw": 2}
    taking = {entry.name for entry in ENTRIES if entry.takes_warmup}
    assert taking == {"pipedream", "pipedream-2bw", "1f1b-eager"}
    for entry in STRAIGHTS:
        usual = [entry.counts(s, [1, 1, 1], 12).warmup for s in range(3)]
        deeper = straight(entry.name, [1, 1, 1], 12, warmup=[count + 1 for count in usual])
        if entry.takes_warmup:
            assert order(entry.name, deeper).names(0) != built(entry.name, 3, 1, 12).names(0)
        elif usual[0] < 11:  # gpipe does all that it gets first: there is no deeper one
            with pytest.raises(PartoptError, match=r"stage 0 does .* forwards first"):
                order(entry.name, deeper)


@pytest.mark.parametrize("entry", STRAIGHTS, ids=[entry.name for entry in STRAIGHTS])
def test_an_order_of_fewer_microbatches_cuts_the_warm_up(entry):
    """A plan's warm-up is that of its own iteration; short runs have fewer microbatches."""
    replicas = [2, 1, 2] if entry.uneven else [2, 2, 2]
    usual = [entry.counts(s, replicas, 12).warmup for s in range(3)]
    for M in (1, 2, 5, 12):
        short = order(entry.name, straight(entry.name, replicas, M, warmup=usual))
        assert short.names(0) == order(entry.name, straight(entry.name, replicas, M)).names(0)


def test_deeper_counts_are_multiples_of_the_devices_downstream():
    """Stages of 2, 3 and 1 replicas; downstream of the first are 4 devices: ceil(3 * 4 / 2) + 1."""
    free = [downstream(3)(s, [2, 3, 1], None) for s in range(3)]
    assert free == [Counts(6, 7, 1), Counts(1, 2, 1), Counts(0, 1, 1)]
    assert [downstream(3)(s, [2, 3, 1], 6).held for s in range(3)] == [3, 2, 1]


# held by each stage, as the papers say
HELD = [
    ("pipedream", [1, 1, 1, 1], None, [4, 3, 2, 1]),
    ("pipedream", [3, 1], None, [2, 1]),
    ("pipedream", [2, 1, 1], None, [2, 2, 1]),
    ("pipedream", [1, 2], None, [3, 1]),
    ("pipedream-2bw", [1, 1], None, [2, 1]),
    ("1f1b", [1, 1, 1, 1], 8, [4, 3, 2, 1]),
    ("1f1b", [1, 1, 1, 1], 2, [2, 2, 2, 1]),
    ("1f1b", [2, 2], 8, [2, 1]),
    ("gpipe", [2, 2], 8, [4, 4]),
    ("naive", [1, 1], 8, [1, 1]),
    ("1f1b-eager", [1, 1, 1, 1], 16, [7, 5, 3, 1]),
    ("1f1b-eager", [1, 1, 1, 1], 4, [4, 4, 3, 1]),
    ("1f1b-eager", [2, 2, 2], 12, [5, 3, 1]),
    ("1f1b-eager", [3, 1], 12, [2, 1]),
    ("1f1b-eager", [1, 2], 12, [5, 1]),
    ("zb-h1", [1, 1, 1], 12, [3, 3, 3]),
    ("zb-h1", [1, 1, 1], 2, [2, 2, 2]),
]


def test_microbatches_in_flight_by_schedule():
    for name, replicas, microbatches, expected in HELD:
        counts = [schedule(name).counts(s, replicas, microbatches) for s in range(len(replicas))]
        assert [own.held for own in counts] == expected, (name, replicas)
    # M = 8, v = 2, S = 4: 2(S-1-s) + (v-1)S + 1, at most Mv = 16
    assert [schedule("interleaved").in_flight(p, 4, 2, 8) for p in range(4)] == [11, 9, 7, 5]
    assert schedule("interleaved").in_flight(0, 4, 2, 4) == 8
    # (v-1)S + P
    for v, M, held in ((1, 8, 4), (2, 8, 8), (3, 8, 12), (2, 2, 4)):
        assert [schedule("interleaved-zb").in_flight(p, 4, v, M) for p in range(4)] == [held] * 4


def test_devices_overlap_unless_one_microbatch_is_on_its_way_or_stages_share_them():
    straight = {entry.name for entry in STRAIGHTS}
    assert {entry.name for entry in ENTRIES if entry.overlaps} == straight - {"naive"}


def test_pipedreams_warm_up_and_noam():
    """The devices downstream, less one, over the replicas rounded down; noam rounds up."""
    for replicas in ([1, 1, 1], [3, 1], [15, 1], [2, 1, 1], [1, 2], [4, 3, 2]):
        counts = [schedule("pipedream").counts(s, replicas, None) for s in range(len(replicas))]
        expected = [(sum(replicas[s:]) - 1) // r for s, r in enumerate(replicas)]
        assert [each.warmup for each in counts] == expected
        assert (
            counts[0].held == noam(sum(replicas), replicas[0]) == -(-sum(replicas) // replicas[0])
        )


def test_waiting_for_all_reduces_may_need_a_longer_warmup():
    assert blocking_warmups([1, 1, 1]) == [2, 1, 0]
    assert blocking_warmups([2, 1, 1]) == [1, 1, 0]
    assert blocking_warmups([15, 1]) == [1, 0]
    assert blocking_warmups([1, 3, 1]) == [5, 1, 0]
    assert blocking_warmups([2, 3, 1]) == [3, 1, 0]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("d", [1, 2])
def test_orders_of_more_chunks_than_the_limit_are_refused_and_those_at_it_are_not(
    monkeypatch, name, d
):
    """Up to 48 microbatches times chunks of a device; 2 for each chunk and replica in all."""
    v = chunks(name)[-1]
    monkeypatch.setattr(schedules, "ROW_LIMIT", 48)
    assert refusal(name, 2, v, 48 // v) is None
    error = refusal(name, 2, v, 48 // v + 2)
    assert error.message == f"`microbatches={48 // v + 2}`: more than a device's order can hold"
    assert (error.code, error.fields["limit"]) == ("too-many-actions", 48 // v)
    assert error.hint == f"use `microbatches={48 // v}` or fewer"
    layout = layout_of(name, 2, v, 8 * d, d)
    actions = 2 * len(layout.ranks) * 8 * d
    monkeypatch.setattr(schedules, "ACTION_LIMIT", actions)
    assert order(name, layout).kind.size >= actions
    monkeypatch.setattr(schedules, "ACTION_LIMIT", actions - 1)
    with pytest.raises(PartoptError, match=f"more than {actions - 1} actions") as found:
        order(name, layout)
    assert found.value.hint == "give fewer `microbatches`"


@pytest.mark.parametrize(
    ("name", "sizes", "message", "hint"),
    [
        ("1f1b", (2, 1, 0), "`microbatches=0`: must be at least 1", "use `microbatches=1` or more"),
        ("1f1b", (2, 2, 4), "`chunks=2`: 1f1b puts 1 on each device", "interleaved takes any"),
        ("zbv", (2, 1, 4), "`chunks=1`: zbv puts 2 on each device", "interleaved takes any"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(name, sizes, message, hint):
    error = refusal(name, *sizes)
    assert error.message == message
    assert error.hint.startswith(hint)


def walked(given):
    """The largest number of microbatches between their forward and their backward on each rank."""
    most = []
    for rank in range(given.ranks):
        held, peak = set(), 0
        row = " ".join(given.names(rank)).replace(")OVERLAP_F_B", "")
        for name in re.split("[ (;]+", row):
            letter = next((each for each in name if each.isalpha()), " ")
            if letter == "F":
                held.add(name.replace(letter, " "))
            elif letter in "BW":
                held.remove(name.replace(letter, " "))
            peak = max(peak, len(held))
        most.append(peak)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_count_is_that_of_a_walk_through_the_rows(name):
    for (P, M), v in itertools.product(((1, 2), (2, 4), (4, 8), (4, 2)), chunks(name)):
        if refusal(name, P, v, M) is None:
            given = built(name, P, v, M)
            assert in_flight(given).tolist() == walked(given)


def test_counts_by_hand():
    """Unequal replicas; chunks of a device, together; ranks and replicas without work."""
    layout = straight("pipedream", [3, 1], 9)
    assert in_flight(order("pipedream", layout)).tolist() == [2, 2, 2, 1]
    assert in_flight(built("interleaved", 2, 2, 4)).tolist() == [5, 3]
    given = order("1f1b", Placement([[1], [3]], 5, 2))
    assert in_flight(given).tolist() == [0, 2, 0, 1, 0]
    assert in_flight(order("gpipe", straight("gpipe", [3], 2))).tolist() == [1, 1, 0]
