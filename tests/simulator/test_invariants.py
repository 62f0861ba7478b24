"""What holds of every timeline, whatever the schedule, the costs and the network."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given

from partopt.cost.collectives import allreduce_over, allreduce_s
from partopt.documents.actions import A, B, F, I, W
from partopt.errors import PartoptError
from partopt.simulator.kernel import simulate
from partopt.simulator.metrics import shares
from partopt.simulator.work import ports_of
from tests.examples import examples
from tests.simulator.cases import cases, row_of, scaled
from tests.simulator.reference_network import port_pair

CLOSE = 1e-9


def ran(case):
    """The timeline of a case; those that deadlock are left out."""
    try:
        return simulate(case.order, case.work)
    except PartoptError:
        assume(False)


def everywhere(count=150, **fixed):
    """A test of random cases."""

    def decorate(test):
        return examples(count)(given(case=cases(**fixed))(test))

    return decorate


def ended_at(case, timeline, kinds):
    """When each of the actions of `kinds` ended, by stage and microbatch; with the exchange that a
    backward waits for.
    """
    times, order = {}, case.order
    for place in np.flatnonzero(np.isin(order.kind, kinds)):
        after = place + 1
        exchange = after < len(order.kind) and order.kind[after] == A
        waits = case.work.blocking and exchange and order.stage[after] == order.stage[place]
        ended = timeline.end[after if waits else place]
        times[int(order.stage[place]), int(order.microbatch[place])] = ended
    return times


def wire_s(case, transfers):
    """Seconds on the wire and of latency of every transfer."""
    levels = [
        case.work.topology.common_level(int(a), int(b))
        for a, b in zip(transfers.source, transfers.destination, strict=True)
    ]
    cuts = np.where(transfers.kind == F, transfers.stage + 1, transfers.stage)
    sizes = case.work.crossing[np.where(transfers.kind == F, 0, 1), cuts]
    found = [case.work.topology.levels[k - 1] for k in levels]
    rates, latencies = (
        [getattr(level, what) for level in found] for what in ("bandwidth_bytes_per_s", "latency_s")
    )
    return sizes / np.array(rates), np.array(latencies), np.array(levels, dtype=int)


def a_device_does_one_thing_after_the_other_for_as_long_as_each_takes(case, timeline):
    order = case.order
    taken = case.work.handling_s(order)
    handling = taken if len(taken) else np.zeros(len(order.kind))
    for rank in range(order.ranks):
        now = 0.0
        places = row_of(order, rank)
        while places:
            slot = [places.pop(0)]
            if order.joined[slot[0]]:
                slot.append(places.pop(0))
            assert len({(timeline.start[place], timeline.end[place]) for place in slot}) == 1
            assert timeline.start[slot[0]] >= now
            now = timeline.end[slot[0]]
            if order.kind[slot[0]] != A:
                seconds = sum(
                    case.work.seconds[order.kind[place], order.stage[place]] + handling[place]
                    for place in slot
                )
                assert now == timeline.start[slot[0]] + seconds


def nothing_begins_before_its_input_has_arrived(case, timeline):
    """An input made on the same rank is there when it is made; on the last stage a backward needs
    its own forward.
    """
    order, sent, S = case.order, timeline.transfers, len(case.work.ranks)
    arrived = {
        (kind == F, stage + (1 if kind == F else -1), microbatch): end
        for kind, stage, microbatch, end in zip(
            *(x.tolist() for x in (sent.kind, sent.stage, sent.microbatch, sent.end)), strict=True
        )
    }
    made = {True: ended_at(case, timeline, [F]), False: ended_at(case, timeline, [B, I])}
    for place in np.flatnonzero(np.isin(order.kind, (F, B, I))):
        forward, s, m = (
            bool(order.kind[place] == F),
            int(order.stage[place]),
            int(order.microbatch[place]),
        )
        source = s + (-1 if forward else 1)
        if 0 <= source < S:
            needed = arrived.get((forward, s, m), made[forward][source, m])
            assert timeline.start[place] >= needed >= made[forward][source, m]
        elif not forward:
            assert timeline.start[place] >= made[True][s, m]
        if order.kind[place] == I:
            weights = np.flatnonzero(
                (order.kind == W) & (order.stage == s) & (order.microbatch == m)
            )
            assert timeline.start[weights[0]] >= timeline.end[place]


def a_transfer_begins_after_its_message_was_made_and_takes_the_time_of_its_bytes(case, timeline):
    sent = timeline.transfers
    wire, latency, _ = wire_s(case, sent)
    assert np.array_equal(sent.start + wire + latency, sent.end)
    made = ended_at(case, timeline, [F]), ended_at(case, timeline, [B, I])
    for kind, stage, microbatch, start in zip(
        sent.kind.tolist(), sent.stage.tolist(), sent.microbatch.tolist(), sent.start, strict=True
    ):
        assert start >= made[kind != F][stage, microbatch]


def every_microbatch_crosses_every_cut_between_two_devices_once_each_way(case, timeline):
    sent, ranks = timeline.transfers, case.work.ranks
    G = int(case.order.microbatch[case.order.kind == F].max()) + 1
    for s in range(len(ranks) - 1):
        pairs = [
            (ranks[s][m % len(ranks[s])], ranks[s + 1][m % len(ranks[s + 1])]) for m in range(G)
        ]
        across = {m: pair for m, pair in enumerate(pairs) if pair[0] != pair[1]}
        for kind, stage, reverse in ((F, s, False), (B, s + 1, True)):
            chosen = (sent.kind == kind) & (sent.stage == stage)
            ends = zip(sent.source[chosen].tolist(), sent.destination[chosen].tolist(), strict=True)
            found = dict(zip(sent.microbatch[chosen].tolist(), ends, strict=True))
            assert found == {m: pair[::-1] if reverse else pair for m, pair in across.items()}


def a_port_carries_no_more_transfers_at_once_than_it_has_links(case, timeline):
    sent, ports = timeline.transfers, ports_of(case.work.topology)
    wire, _, levels = wire_s(case, sent)
    busy = {}
    for n, k in enumerate(levels.tolist()):
        out, into = (
            port_pair(ports, int(sent.source[n]), k)[0],
            port_pair(ports, int(sent.destination[n]), k)[1],
        )
        for port in {out, into} if wire[n] > 0 else ():
            busy.setdefault((port, k), []).append((sent.start[n], sent.start[n] + wire[n]))
    for (_, k), spans in busy.items():
        for start, _ in spans:
            assert sum(begin <= start < end for begin, end in spans) <= ports.lanes[k - 1]


@pytest.mark.slow
@everywhere(count=300, names=("pipedream", "1f1b", "gpipe", "zb-h1", "interleaved"))
def test_an_all_reduce_begins_with_its_last_replica_and_yields_its_ports_to_transfers(case):
    timeline, ports = ran(case), ports_of(case.work.topology)
    order, done, rings = case.order, timeline.collectives, case.work.rings
    came = {}
    for place in np.flatnonzero(order.kind == A):
        stage, first = int(order.stage[place]), place in order.rows
        early = rings.head_start_s[stage] > 0
        # with its last backward, though the device waits for a message yet
        at = timeline.end[place - 1] if early and not first else timeline.start[place]
        came.setdefault((stage, int(order.microbatch[place])), []).append(at)
    assert sorted(came) == list(zip(done.stage.tolist(), done.round.tolist(), strict=True))
    for stage, number, start, end in zip(
        done.stage.tolist(), done.round.tolist(), done.start, done.end, strict=True
    ):
        ranks = case.work.ranks[stage]
        seconds = allreduce_s(float(case.work.gradient_bytes[stage]), ranks, case.work.topology)
        last = max(came[stage, number])
        alone = max(seconds, last + rings.tail_s[stage] - start) + case.work.tied_s[stage]
        assert start >= last - rings.head_start_s[stage] - CLOSE
        assert end - start >= alone - CLOSE
        if not len(timeline.transfers.start):
            assert end - start == pytest.approx(alone, abs=CLOSE)
    # those that share a port do not overlap
    own = [
        set(ports.of_ring(ranks)[0].tolist()) if size else set()
        for ranks, size in zip(case.work.ranks, case.work.gradient_bytes, strict=True)
    ]
    for one, other in itertools.combinations(range(len(done.start)), 2):
        if own[done.stage[one]] & own[done.stage[other]]:
            assert done.start[one] >= done.end[other] or done.start[other] >= done.end[one]


@pytest.mark.slow
@everywhere(count=300, serial=True)
def test_serial_devices_are_idle_while_their_messages_are_on_the_wire(case):
    timeline, order = ran(case), case.order
    sent = timeline.transfers
    for rank in range(order.ranks):
        own = np.array(row_of(order, rank), dtype=int)
        acting = own[(order.kind[own] != A) & (timeline.end[own] > timeline.start[own])]
        first = ~np.concatenate([[False], order.joined[:-1]])[acting]
        spans = [(timeline.start[place], timeline.end[place]) for place in acting[first]]
        mine = (sent.source == rank) | (sent.destination == rank)
        spans += [
            (start, end)
            for start, end in zip(sent.start[mine], sent.end[mine], strict=True)
            if end > start
        ]
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def where_the_time_of_a_rank_goes_adds_up_to_all_of_it(case, timeline):
    whole = float(timeline.makespan)
    for start, end in ((0.0, whole), (whole / 3, whole / 2), (whole / 2, whole)):
        found = shares(timeline, case.work, start, end)
        parts = np.array([getattr(found, name) for name in found.__dataclass_fields__])
        assert (parts >= -CLOSE).all()
        assert parts.sum(axis=0) == pytest.approx(np.full(case.order.ranks, end - start), abs=1e-9)


@pytest.mark.slow
@everywhere()
def test_costs_twice_as_large_take_exactly_twice_as_long(case):
    once, twice = ran(case), simulate(case.order, scaled(case.work, 2.0))
    assert np.array_equal(2 * once.start, twice.start)
    assert np.array_equal(2 * once.end, twice.end)
    assert np.array_equal(2 * once.transfers.start, twice.transfers.start)
    assert np.array_equal(2 * once.collectives.end, twice.collectives.end)


def a_port_is_not_busy_for_longer_than_there_was_time(case, timeline):
    """Transfers go over its links and all-reduces over all of them: together they take no more than
    all that passed.
    """
    ports = ports_of(case.work.topology)
    sent, done = timeline.transfers, timeline.collectives
    busy = np.zeros(ports.count)
    wire, _, levels = wire_s(case, sent)
    for source, destination, k, seconds in zip(
        sent.source.tolist(), sent.destination.tolist(), levels.tolist(), wire, strict=True
    ):
        for port in {port_pair(ports, source, k)[0], port_pair(ports, destination, k)[1]}:
            busy[port] += seconds / ports.lanes[k - 1]
    for stage in done.stage.tolist():
        size = float(case.work.gradient_bytes[stage])
        slopes = allreduce_over(case.work.ranks[stage], case.work.topology).slopes
        for port, k in zip(*ports.of_ring(case.work.ranks[stage]), strict=True):
            busy[port] += slopes[k] * size
    assert busy.max(initial=0.0) <= float(timeline.makespan) + CLOSE


CHECKS = [
    a_device_does_one_thing_after_the_other_for_as_long_as_each_takes,
    nothing_begins_before_its_input_has_arrived,
    a_transfer_begins_after_its_message_was_made_and_takes_the_time_of_its_bytes,
    every_microbatch_crosses_every_cut_between_two_devices_once_each_way,
    a_port_carries_no_more_transfers_at_once_than_it_has_links,
    where_the_time_of_a_rank_goes_adds_up_to_all_of_it,
    a_port_is_not_busy_for_longer_than_there_was_time,
]


@pytest.mark.slow
@everywhere(count=200)
def test_what_holds_of_every_timeline(case):
    timeline = ran(case)
    for check in CHECKS:
        check(case, timeline)
