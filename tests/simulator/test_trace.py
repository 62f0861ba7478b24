import itertools
import json
from collections import defaultdict

import numpy as np
import pytest

from partopt.errors import PartoptError
from partopt.simulator import trace
from partopt.simulator.memory import base_memory_bytes, peak_memory_bytes
from tests.helpers import flat, two_level
from tests.report.timelines import example, plan_of, simulated

CASES = {
    "1f1b": lambda: example("1f1b", P=4, M=8),
    "gpipe that recomputes": lambda: example("gpipe", P=3, M=4, recompute=True),
    "interleaved": lambda: example("interleaved", P=2, M=4, v=2),
    "zbv": lambda: example("zbv", P=4, M=8),
    "dualpipe": lambda: example("dualpipe", P=4, M=8),
    "replicas": lambda: replicated("overlap"),
    "replicas that wait": lambda: replicated("blocking"),
    "two lanes": lambda: example("1f1b", P=4, M=8, topology=flat(4, 1e4, links=2), input_bytes=40),
    "latency": lambda: example(
        "1f1b", P=4, M=8, topology=two_level(2, 2, inner_latency=1e-4, outer_latency=5e-3)
    ),
}


def replicated(allreduce):
    plan = plan_of("pipedream", [[0, 1], [2]], None, parameter_bytes=10**6, allreduce=allreduce)
    return plan, simulated(plan, 8)


def events(timeline, plan):
    return json.loads(b"".join(trace.write(timeline, plan)))["traceEvents"]


def of_phase(found, phase):
    return [event for event in found if event["ph"] == phase]


@pytest.fixture(params=CASES)
def case(request):
    plan, timeline = CASES[request.param]()
    return plan, timeline, events(timeline, plan)


def test_slices_of_a_track_do_not_overlap(case):
    tracks = defaultdict(list)
    for event in of_phase(case[2], "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(first[1] <= second[0] + 1e-6 for first, second in itertools.pairwise(spans))


def test_every_track_has_one_name_of_its_own(case):
    named = [event for event in of_phase(case[2], "M") if event["name"] == "thread_name"]
    tracks = [(event["pid"], event["tid"]) for event in named]
    names = {(event["pid"], event["args"]["name"]) for event in named}
    assert len(names) == len(set(tracks)) == len(tracks)
    assert {(event["pid"], event["tid"]) for event in of_phase(case[2], "X")} <= set(tracks)


def test_every_action_is_a_slice_at_its_time(case):
    _, timeline, found = case
    order, length = timeline.order, timeline.end - timeline.start
    ranks = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    slices = [event for event in of_phase(found, "X") if event["tid"] < 100]
    drawn = {(event["pid"] - 1, event["name"]): event for event in slices}
    lasting = np.flatnonzero(length > 0)
    assert len(drawn) == len(lasting)
    for action in lasting:
        event = drawn[ranks[action], order.name(action)]
        assert event["ts"] == pytest.approx(timeline.start[action] * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(length[action] * 1e6, abs=2e-3)
        assert event["args"]["stage"] == order.stage[action]


def test_every_transfer_is_a_slice_with_its_bytes(case):
    plan, timeline, found = case
    sent = timeline.transfers
    drawn = [event for event in of_phase(found, "X") if 100 <= event["tid"] < 10_000]
    assert len(drawn) == len(sent.start)
    whole = pytest.approx(sum(sent.end - sent.start) * 1e6, abs=1e-3 * len(drawn))
    assert sum(event["dur"] for event in drawn) == whole
    sizes = {stage.input_bytes for stage in plan.stages}
    assert {event["args"]["bytes"] for event in drawn} <= sizes


def test_flows_lead_from_the_action_through_the_transfer_to_the_action(case):
    _, timeline, found = case
    sent, slices = timeline.transfers, defaultdict(list)
    for event in of_phase(found, "X"):
        slices[event["pid"], event["tid"]].append(event)
    flows = [{event["id"]: event for event in of_phase(found, phase)} for phase in "stf"]
    assert all(own.keys() == set(range(len(sent.start))) for own in flows)

    def at(event):
        return next(
            each["name"]
            for each in slices[event["pid"], event["tid"]]
            if each["ts"] <= event["ts"] < each["ts"] + max(each["dur"], 1e-3) - 1e-6
        )

    for number in range(len(sent.start)):
        start, through, end = (own[number] for own in flows)
        stage, microbatch = sent.stage[number], sent.microbatch[number]
        made = at(start)
        assert made == f"{stage}{made.lstrip('0123456789')[0]}{microbatch}"
        kind = "FB"[int(sent.kind[number])]
        assert at(through).startswith(f"{stage}{kind}{microbatch} to rank")
        assert at(end).lstrip("0123456789")[1:] == str(microbatch)
        assert start["ts"] <= through["ts"] + 1e-3 and through["ts"] <= end["ts"]


def test_counters_return_to_what_they_began_with_and_reach_the_peak(case):
    plan, timeline, found = case
    peaks, base = peak_memory_bytes(timeline.order, plan), base_memory_bytes(plan)
    counters = defaultdict(list)
    for event in of_phase(found, "C"):
        [value] = event["args"].values()
        counters[event["pid"] - 1, event["name"]].append((event["ts"], value))
    for (rank, name), points in counters.items():
        times, values = zip(*points, strict=True)
        assert list(times) == sorted(set(times))
        assert values[-1] == (base[rank] if name == "memory" else 0)
        assert name != "memory" or max(values) == peaks[rank]


def test_all_reduces_are_slices_on_every_rank_that_takes_part():
    plan, timeline = replicated("overlap")
    drawn = [event for event in of_phase(events(timeline, plan), "X") if event["tid"] >= 10_000]
    expected = [(rank, f"0A{number}") for rank in (0, 1) for number in range(4)]
    assert [(event["pid"] - 1, event["name"]) for event in drawn] == expected
    told = {"stage": 0, "round": 0, "bytes": 10**6, "replicas": 2, "tied_bytes": 0}
    assert drawn[0]["args"] == told
    plan = plan_of("1f1b", [[0]], 1, modules=['a"b\\'])
    assert of_phase(events(simulated(plan, 1), plan), "X")[0]["args"]["layers"] == 'a"b\\'


def test_ranks_and_tracks_have_names_and_their_order():
    plan, timeline = CASES["dualpipe"]()
    found = of_phase(events(timeline, plan), "M")
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found
        if event["name"] == "thread_name"
    }
    assert names[1, 1], names[1, 2] == ("compute", "compute, at the same time")
    processes = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert processes[0] == "rank 0, stage 0 (replica 0) and 3 (replica 1)"
    assert {event["pid"] for event in found} == {1, 2, 3, 4}
    assert all(event["tid"] > 0 for event in found)


def test_more_than_a_viewer_loads_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(trace, "MOST_ACTIONS", 10)
    plan, timeline = CASES["1f1b"]()
    with pytest.raises(PartoptError) as error:
        trace.write(timeline, plan)
    assert error.value.message == "a trace of 68 actions is more than a viewer can load; 10 are"
    assert error.value.hint == "simulate fewer `microbatches`"
