"""`partopt simulate` under other circumstances than those of the plan."""

import re

import pytest

from partopt import schedules
from partopt.cost.pricing import under
from partopt.documents.plan import Plan
from partopt.schedules import SCHEDULES
from tests.helpers import flat, two_level


def test_another_schedule(partopt, synchronous):
    found = partopt("simulate", synchronous, "--schedule", "zb-h1", "--json").document
    changed = ["schedule 1f1b -> zb-h1"]
    assert (found["schedule"], found["changed"]) == ("zb-h1", changed)
    assert found["period_s"] < found["planned"]["period_s"]
    assert "PLANNED" in partopt("simulate", synchronous, "--schedule", "zb-h1").out


def test_more_microbatches(partopt, synchronous):
    found = partopt("simulate", synchronous, "--microbatches", 64, "--json").document
    assert found["microbatches"] == 64
    assert found["bubble"] < found["planned"]["bubble"]


def test_an_asynchronous_plan_with_iterations_needs_to_be_told_how_many(partopt, plan_file):
    outcome = partopt("simulate", plan_file(), "--schedule", "1f1b")
    assert (outcome.code, outcome.errors) == (
        2,
        ["--schedule 1f1b: needs a number of microbatches"],
    )
    assert (
        partopt(
            "simulate", plan_file(), "--schedule", "1f1b", "--microbatches", 16, "--json"
        ).document["microbatches"]
        == 16
    )


def test_the_network(partopt, synchronous):
    slower = partopt("simulate", synchronous, "--bandwidth", "all=0.1 GB/s", "--json").document
    faster = partopt("simulate", synchronous, "--bandwidth", "all=800 Gb/s", "--json").document
    assert faster["period_s"] < slower["period_s"]
    assert faster["changed"] == ["bandwidth of all 10 GB/s -> 100 GB/s"]
    late = partopt(
        "simulate", synchronous, "--latency", "all=1 ms", "--links", "all=2", "--json"
    ).document
    assert late["changed"] == ["latency of all 0 s -> 1.00 ms", "links of all 1 -> 2"]
    assert late["period_s"] > faster["period_s"]


def test_several_levels_at_once(partopt, plan_file):
    path = plan_file(cluster=two_level(2, 2, memory_bytes=10**10))
    found = partopt(
        "simulate", path, "--bandwidth", "server=1 GB/s", "--bandwidth", "cluster=2 GB/s", "--json"
    ).document
    assert found["changed"] == [
        "bandwidth of server 10 GB/s -> 1 GB/s",
        "bandwidth of cluster 1 GB/s -> 2 GB/s",
    ]


EAGER = ("--schedule", "1f1b-eager")


def test_the_ways_of_communicating(partopt, plan_file):
    path = plan_file("--planner", "data_parallel")
    found = partopt(
        "simulate", path, "--with", "waits=pipedream", "--with", "allreduce=blocking", "--json"
    ).document
    assert found["changed"] == [
        "transfers overlap -> serial",
        "all-reduces overlap -> blocking",
    ]
    assert found["period_s"] > found["planned"]["period_s"]


def test_the_warm_up(partopt, plan_file, synchronous):
    path = plan_file()
    own = [stage.warmup for stage in Plan.load(path).stages]
    more = ",".join(str(count + 1) for count in own)
    listed = partopt("simulate", path, "--warmup", more, "--json").document
    assert listed["changed"] == [f"warm-up {','.join(map(str, own))} -> {more}"]
    assert listed["peak_memory_bytes"] > listed["planned"]["peak_memory_bytes"]
    assert partopt("simulate", path, "--warmup", "+1", "--json").document == listed
    eager = partopt(
        "simulate", synchronous, "--schedule", "1f1b-eager", "--warmup", "5,4,2,0", "--json"
    ).document
    assert eager["ranks"][0]["peak_in_flight"] == 6


def test_a_warm_up_that_was_searched_is_kept_on_another_network(partopt, plan_file, tmp_path):
    deeper = under(Plan.load(plan_file()), warmups=[7, 5, 3, 0])
    deeper.save(str(tmp_path / "deep.json"))
    found = partopt(
        "simulate", tmp_path / "deep.json", "--bandwidth", "all=5 GB/s", "--json"
    ).document
    assert found["ranks"][0]["peak_in_flight"] == 8
    assert found["changed"] == ["bandwidth of all 10 GB/s -> 5 GB/s"]


def test_what_is_as_it_was_is_no_change(partopt, synchronous):
    same = [
        "--schedule",
        "1f1b",
        "--microbatches",
        16,
        "--bandwidth",
        "all=10 GB/s",
        "--with",
        "waits=none",
    ]
    pages = [partopt("simulate", synchronous, *given).out for given in ([], same)]
    before, after = (page.partition("\nADVICE\n")[0] for page in pages)
    assert before == after


@pytest.mark.parametrize(
    "given, error, hint",
    [
        (
            ["--bandwidth", "al=1 GB/s"],
            "--bandwidth al: the plan's cluster has no such level",
            'did you mean "all"?',
        ),
        (
            ["--bandwidth", "1 GB/s"],
            "--bandwidth 1 GB/s: not of the form LEVEL=VALUE",
            'write --bandwidth all="25 Gb/s"; the levels are all',
        ),
        (
            ["--bandwidth", "all=0 GB/s"],
            "--bandwidth all: bandwidth must be positive",
            "write what a link of that level achieves in one direction",
        ),
        (
            ["--bandwidth", "all=10"],
            "--bandwidth all: '10' has no unit",
            'write "200 Gb/s" (bits) or "200 GB/s" (bytes)',
        ),
        (["--bandwidth", "all=1 GB/s"] * 2, "--bandwidth all: given twice", "give each level once"),
        (
            ["--latency", "all=1"],
            "--latency all: '1' has no unit",
            'write "50 us", "1.5 ms" or "2 s"',
        ),
        (
            ["--links", "all=0"],
            "--links all: invalid link count '0'",
            "write a whole number from 1 to 1024",
        ),
        (
            ["--links", "all=x"],
            "--links all: invalid link count 'x'",
            "write a whole number from 1 to 1024",
        ),
        (["--schedule", "1f2b"], 'unknown schedule "1f2b"', 'did you mean "1f1b"?'),
        (
            [*EAGER, "--warmup", "1,2"],
            "--warmup 1,2: 2 numbers for 4 stages",
            "give one for each stage",
        ),
        (
            [*EAGER, "--warmup", "16,2,1,0"],
            "--warmup 16,2,1,0: 16 forwards first on stage 0",
            "use 0 to 15: each replica gets 16 microbatches",
        ),
        (["--warmup", "a"], "--warmup a: not a list of whole numbers", "write --warmup 5,9,12"),
        (
            ["--schedule", "gpipe", "--warmup", "3,2,1,0"],
            "--warmup: gpipe has a warm-up of its own",
            "drop --warmup, or choose --schedule 1f1b-eager",
        ),
        (
            ["--microbatches", "99999999"],
            "99,999,999 microbatches in 4 stages are 799,999,992 actions, more than 20,000,000",
            "--microbatches 2500000 or fewer",
        ),
        (
            ["--microbatches", "0"],
            "partopt simulate: invalid value for '--microbatches': 0 is not in the range x>=1",
            "see partopt simulate --help",
        ),
        (
            ["--schedule", "interleaved"],
            (
                "--schedule interleaved: it is for several stages on each device, "
                "and the plan has one"
            ),
            "plan again with --schedule interleaved --chunks 2",
        ),
        (
            ["--schedule", "zbv"],
            (
                "--schedule zbv: the schedule needs stages s and 2P-1-s on the same "
                "devices; the stages of the plan lie otherwise"
            ),
            "plan again with --schedule zbv",
        ),
    ],
)
def test_refusals(partopt, synchronous, given, error, hint):
    outcome = partopt("simulate", synchronous, *given)
    assert (outcome.code, outcome.out, outcome.errors, outcome.hints) == (2, "", [error], [hint])


def test_a_warm_up_with_which_devices_wait_for_each_other(partopt, plan_file):
    path = plan_file("--cuts", "3,6", "--replicas", "3,2,1", cluster=flat(6, 10e9))
    outcome = partopt("simulate", path, "--with", "allreduce=blocking", "--warmup", "0,0,0")
    assert (outcome.code, outcome.out) == (2, "")
    assert "pipedream: the schedule deadlocks: rank" in outcome.errors[0]
    assert outcome.hints == ["let more forwards come first: a deeper --warmup"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_under_every_other_is_executed_or_refused_with_a_hint(
    partopt, plan_file, schedule
):
    M = () if SCHEDULES[schedule].asynchronous else ("--microbatches", 8)
    path = plan_file("--planner", "gpipe", "--schedule", schedule, *M)
    for other in SCHEDULES:
        many = () if SCHEDULES[other].asynchronous else ("--microbatches", 16)
        outcome = partopt("simulate", path, "--schedule", other, *many, "--json")
        if SCHEDULES[other].shape == SCHEDULES[schedule].shape:
            assert (outcome.code, outcome.document["schedule"]) == (0, other)
        else:
            assert (outcome.code, outcome.out) == (2, "")
            assert outcome.hints[0].startswith(f"plan again with --schedule {other}")


def test_unequal_replicas(partopt, plan_file):
    path = plan_file("--cuts", "6", "--replicas", "3,1")
    outcome = partopt("simulate", path, "--schedule", "zb-h1", "--microbatches", 12)
    assert (outcome.code, outcome.errors) == (
        2,
        ["--schedule zb-h1: the schedule needs equally many replicas of every stage"],
    )


def test_microbatches_that_do_not_divide(partopt, plan_file):
    path = plan_file("--planner", "gpipe", "--schedule", "interleaved", "--microbatches", 8)
    outcome = partopt("simulate", path, "--microbatches", 9)
    assert outcome.code == 2
    assert outcome.errors[0].startswith(
        "interleaved: 9 microbatches do not divide into 2 equal groups"
    )


def test_so_many_that_it_takes_to_settle(partopt, plan_file, monkeypatch):
    path = plan_file()
    monkeypatch.setattr(schedules, "ACTION_LIMIT", 100)
    outcome = partopt("simulate", path)
    assert re.fullmatch(
        r"\d+ microbatches that it takes to settle in 4 stages are \d+ actions, more than 100",
        outcome.errors[0],
    )
    assert outcome.hints == ["--microbatches 12 or fewer"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 13])
@pytest.mark.parametrize(
    "given",
    [
        ("--planner", "straight"),
        ("--planner", "data_parallel"),
        ("--cuts", "6", "--replicas", "3,1"),
    ],
)
def test_the_pace_of_few_asynchronous_microbatches_is_told_with_a_warning(
    partopt, plan_file, count, given
):
    found = partopt("simulate", plan_file(*given), "--microbatches", count, "--json").document
    assert found["microbatches"] == count
    assert 0 < found["period_s"] <= found["makespan_s"]
    assert found["window_end_s"] > found["window_start_s"]
    if not found["settled"]:
        assert "unsettled" in [finding["code"] for finding in found["advice"]]
