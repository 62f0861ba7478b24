"""The facts of every schedule: free of contradictions, and those of its orders."""

import dataclasses
import itertools
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal, schedule
from partopt.schedules.entry import ALL_IN_FLIGHT, Counts, Schedule
from partopt.schedules.layout import STRAIGHT, VEE
from partopt.schedules.one_f_one_b import downstream
from partopt.schedules.order import B, F, I, R, W, in_flight
from tests.examples import examples
from tests.schedules.executed import built, chunks, layout_of, straight

ENTRIES = list(SCHEDULES.values())
STRAIGHTS = [entry for entry in ENTRIES if entry.shape == STRAIGHT]
CHUNKED = [entry for entry in ENTRIES if entry.shape != STRAIGHT]
FACTS = [field.name for field in dataclasses.fields(Schedule)]


def by_name(entry: Schedule) -> str:
    return entry.name


def test_entries_have_the_names_that_they_are_registered_under():
    assert [entry.name for entry in ENTRIES] == list(SCHEDULES)


def test_an_unknown_name_is_answered_with_the_nearest_known():
    with pytest.raises(PartoptError, match='unknown schedule "1f2b"') as raised:
        schedule("1f2b")
    assert (raised.value.code, raised.value.fields) == ("unknown-schedule", {"name": "1f2b"})
    assert raised.value.hint == 'did you mean "1f1b"?'


@pytest.mark.parametrize("fact", ["name", "summary", "row", "bubble"])
def test_what_no_two_schedules_share_may_not_be_left_out(fact):
    entry = schedule("1f1b")
    stated = {name: getattr(entry, name) for name in FACTS if name != fact}
    with pytest.raises(TypeError, match=f"'{fact}'"):
        Schedule(**stated)


@pytest.mark.parametrize(
    "name, facts, message",
    [
        ("1f1b", {"shape": "ring"}, "unknown shape 'ring'"),
        ("1f1b", {"shape": VEE}, "one stage on each device has `counts`"),
        (
            "zbv",
            {"shape": STRAIGHT},
            "one stage on each device has `counts`",
        ),
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


@pytest.mark.parametrize("entry", STRAIGHTS, ids=by_name)
@examples(60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 40))
def test_stages_hold_exactly_what_the_entry_says(entry, replicas, M):
    """An order of an asynchronous schedule is a finite stretch: no more passes through than M."""
    if not entry.uneven:
        replicas = replicas[:1] * len(replicas)
        assume(M % replicas[0] == 0)
    layout = straight(entry.name, replicas, M)
    peaks = in_flight(order(entry.name, layout))
    for s, ranks in enumerate(layout.ranks):
        held = entry.counts(s, replicas, None if entry.asynchronous else M).held
        assert max(peaks[ranks]) == min(held, -(-M // replicas[s]))


@pytest.mark.parametrize("entry", STRAIGHTS, ids=by_name)
@examples(60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 40))
def test_as_many_backwards_have_begun_as_the_entry_says(entry, replicas, M):
    """From the start of the R, or of the backward that recomputes, to the end of the backward."""
    if not entry.uneven:
        replicas = replicas[:1] * len(replicas)
        assume(M % replicas[0] == 0)
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


@pytest.mark.parametrize("entry", STRAIGHTS, ids=by_name)
@examples(60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 40))
def test_rows_begin_with_the_warm_up_of_the_entry(entry, replicas, M):
    if not entry.uneven:
        replicas = replicas[:1] * len(replicas)
        assume(M % replicas[0] == 0)
    layout = straight(entry.name, replicas, M)
    found = order(entry.name, layout)
    for s, ranks in enumerate(layout.ranks):
        row = found.kind[found.rows[ranks[0]] : found.rows[ranks[0] + 1]]
        first = int(np.argmax(row != F))  # forwards before the first backward
        warmup = entry.counts(s, replicas, M).warmup
        # the forward that is alternated with the first backward comes before it too
        assert first == min(warmup + 1, -(-M // replicas[s]))


@lru_cache
def possible(name: str) -> list[tuple[int, int, int]]:
    """The P, v and M, up to 6 devices and 40 microbatches, that a schedule can run."""
    sizes = itertools.product(range(1, 7), chunks(name), range(1, 41))
    return [size for size in sizes if refusal(name, *size) is None]


@pytest.mark.parametrize("entry", CHUNKED, ids=by_name)
@examples(60)
@given(st.data(), st.integers(1, 2))
def test_devices_hold_exactly_what_the_entry_says(entry, data, d):
    P, v, M = data.draw(st.sampled_from(possible(entry.name)))
    layout = layout_of(entry.name, P, v, M * d, d)
    peaks = in_flight(order(entry.name, layout))
    assert peaks.tolist() == [entry.in_flight(p, P, v, M) for p in range(P) for _ in range(d)]


@pytest.mark.parametrize(("action", "fact"), [(R, "recomputes"), (W, "split")])
@pytest.mark.parametrize("entry", ENTRIES, ids=by_name)
def test_an_order_has_an_action_where_the_entry_says_so(entry, action, fact):
    """R is one where recomputation waits for no gradient, W where backwards are in two parts."""
    v, M = chunks(entry.name)[-1], 12
    S = len(layout_of(entry.name, 2, v, M).ranks)
    found = order(entry.name, layout_of(entry.name, 2, v, M, recompute=[True] * S))
    assert bool((found.kind == action).any()) == getattr(entry, fact)


def test_weight_versions():
    held = {entry.name: entry.versions_of(3) for entry in ENTRIES}
    assert held == dict.fromkeys(SCHEDULES, 1) | {"pipedream": 3, "pipedream-2bw": 2}
    assert schedule("pipedream").weight_versions == ALL_IN_FLIGHT


def test_plans_state_the_warm_up_where_rows_follow_it():
    """One forward more than usual comes first, where there is one; else it is refused."""
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


@pytest.mark.parametrize("entry", STRAIGHTS, ids=by_name)
@pytest.mark.parametrize("M", [1, 2, 5, 12])
def test_an_order_of_fewer_microbatches_cuts_the_warm_up(entry, M):
    """A plan's warm-up is that of its own iteration; short runs have fewer microbatches."""
    replicas = [2, 1, 2] if entry.uneven else [2, 2, 2]
    usual = [entry.counts(s, replicas, 12).warmup for s in range(3)]
    short = order(entry.name, straight(entry.name, replicas, M, warmup=usual))
    assert short.names(0) == order(entry.name, straight(entry.name, replicas, M)).names(0)


def test_deeper_counts_are_multiples_of_the_devices_downstream():
    """Stages of 2, 3 and 1 replicas; downstream of the first are 4 devices: ceil(3 * 4 / 2) + 1."""
    free = [downstream(3)(s, [2, 3, 1], None) for s in range(3)]
    assert free == [Counts(6, 7, 1), Counts(1, 2, 1), Counts(0, 1, 1)]
    assert [downstream(3)(s, [2, 3, 1], 6).held for s in range(3)] == [3, 2, 1]
