"""Where stages lie: every schedule's order accepts what is placed for it, and hints are taken."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive, problem_of
from partopt.errors import PartoptError
from partopt.planners.placing import place, stage_count, stage_multiple, stages_a_device
from partopt.schedules import SCHEDULES, order, refusal, schedule
from partopt.schedules.placement import Placement
from partopt.simulator.execution import simulate_plan
from tests.helpers import flat, uniform_profile

CHUNKED = ["interleaved", "interleaved-zb", "zbv", "dualpipe", "dualpipev"]


def problem(name, layers=24, devices=8, **options):
    asynchronous = schedule(name).asynchronous
    options = ({} if asynchronous else {"microbatches": 32}) | options
    return problem_of(uniform_profile(layers), flat(devices), schedule=name, **options)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_order_of_every_schedule_accepts_what_is_placed_for_it(name, P, d, v):
    stated = problem(name, chunks=v)
    S = P * stages_a_device(stated)
    if refusal(name, P, stage_multiple(stated), 32 // d) is not None:
        pytest.skip(f"{name} has no pipeline of {P} devices")
    partition = place(Partition(CONTIGUOUS, consecutive(range(S + 1), [d] * S)), stated, "test")
    layout = Placement([list(stage.ranks) for stage in partition.stages], 8, 32)
    made = order(name, layout)
    assert sum(made.rows[1:] > made.rows[:-1]) == P * d
    assert [(stage.start, stage.stop) for stage in partition.stages] == [
        (s, s + 1) for s in range(S)
    ]


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.uneven])
def test_unequal_replicas_are_refused_where_they_cannot_run(name):
    stages = consecutive([0, 1, 2], [2, 1])
    with pytest.raises(
        PartoptError,
        match=r"cannot run stages that the planner pipedream replicates unequally, 2-1",
    ):
        place(Partition(CONTIGUOUS, stages), problem(name), "pipedream")
    assert place(Partition(CONTIGUOUS, stages), problem("1f1b"), "pipedream").stages == stages


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_a_hint_about_stages_is_a_number_that_is_taken(name, asked, layers, devices, v):
    stated = problem(name, layers, devices, chunks=v, stages=asked)
    try:
        assert stage_count(stated) == asked
        assert asked % stage_multiple(stated) == 0
    except PartoptError as error:
        named = re.search(r"`stages=(\d+)`", error.hint)
        if named is None:
            assert error.hint == "choose another schedule: `schedule=1f1b`"
            assert min(layers, devices * stages_a_device(stated)) < stage_multiple(stated)
            return
        assert stage_count(stated.with_(stages=int(named[1]))) == int(named[1])


@pytest.mark.parametrize(
    ("asked", "layers", "message", "hint"),
    [
        (7, 24, "7 stages: interleaved takes a multiple of 4", "`stages=8`"),
        (7, 7, "7 stages: interleaved takes a multiple of 4", "`stages=4`"),
        (9, 7, "9 stages for 7 layers", "ask for at most 4: `stages=4`"),
        (33, 40, "33 stages for 32 places", "ask for at most 32: `stages=32`"),
    ],
)
def test_stages_that_do_not_fill_the_devices(asked, layers, message, hint):
    with pytest.raises(PartoptError) as raised:
        stage_count(problem("interleaved", layers, chunks=4, stages=asked))
    assert (raised.value.message, raised.value.hint) == (message, hint)


@pytest.mark.parametrize(("name", "layers", "devices", "expected"), [
    ("1f1b", 24, 8, 8), ("1f1b", 5, 8, 5), ("interleaved", 24, 8, 16), ("interleaved", 11, 8, 10),
    ("zbv", 24, 8, 16), ("zbv", 7, 8, 6), ("dualpipe", 24, 8, 8), ("dualpipe", 24, 7, 6),
    ("dualpipev", 24, 7, 14),
])  # fmt: skip
def test_as_many_stages_as_the_schedule_puts_on_all_devices(name, layers, devices, expected):
    assert stage_count(problem(name, layers, devices)) == expected


def test_one_device_has_no_two_copies():
    with pytest.raises(
        PartoptError, match="dualpipe: cannot form a multiple of 2 stages on 1 devices"
    ):
        stage_count(problem("dualpipe", devices=1))


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("planner", ["gpipe", "torchgpipe", "lingvo"])
@pytest.mark.parametrize("devices", [2, 5, 8])
def test_planners_that_balance_plan_for_them(name, planner, devices):
    plan = simulate_plan(planners.plan(planner, problem(name, devices=devices, microbatches=40)))
    assert {len(stages) for stages in plan.stages_by_rank().values()} == {2}
    assert len(plan.idle_ranks) == (devices % 2 if name == "dualpipe" else 0)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("planner", ["pipedream", "straight", "data_parallel"])
def test_planners_of_one_stage_a_device_refuse_them(name, planner):
    with pytest.raises(
        PartoptError, match="puts one stage on each device, this schedule has several"
    ) as raised:
        planners.plan(planner, problem(name))
    assert raised.value.hint == ", ".join(
        ["use `planner=gpipe`", "`planner=torchgpipe`", "`planner=lingvo`", "`planner=manual`"]
    )


@pytest.mark.parametrize(
    ("name", "replicas", "ranks"),
    [
        ("interleaved", [1, 1, 1, 1], [[0], [1], [0], [1]]),
        ("interleaved", [2, 2, 2, 2], [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ("zbv", [1, 1, 1, 1], [[0], [1], [1], [0]]),
        ("zbv", [2, 2, 2, 2], [[0, 1], [2, 3], [2, 3], [0, 1]]),
        ("dualpipev", [1, 1, 1, 1], [[0], [1], [1], [0]]),
        ("dualpipe", [1, 1, 1, 1], [[0, 3], [1, 2], [2, 1], [3, 0]]),
    ],
)
def test_a_split_of_ones_own_lies_where_the_schedule_has_it(name, replicas, ranks):
    plan = planners.plan("manual", problem(name, cuts=[5, 10, 20], replicas=replicas, devices=4))
    assert [stage.ranks for stage in plan.stages] == ranks
    assert [stage.start for stage in plan.stages] == [0, 5, 10, 20]
    assert simulate_plan(plan).predicted.iteration_s


@pytest.mark.parametrize(
    ("name", "cuts", "replicas", "message"),
    [
        (
            "interleaved",
            [5, 10],
            [],
            "3 stages by the planner manual: interleaved takes a multiple of 2",
        ),
        ("zbv", [5, 10], [], "3 stages by the planner manual: zbv takes a multiple of 2"),
        ("dualpipe", [5, 10], [], "3 stages by the planner manual: dualpipe takes a multiple of 2"),
        (
            "zbv",
            [5],
            [2, 1],
            "zbv cannot run stages that the planner manual replicates unequally, 2-1",
        ),
        ("zbv", [5], [5, 5], "`replicas`: 10 devices needed, 8 there"),
        ("dualpipe", [5], [3, 3], "`replicas`: 6 devices needed, 4 there"),
    ],
)
def test_a_split_of_ones_own_that_cannot_lie_so(name, cuts, replicas, message):
    with pytest.raises(PartoptError) as raised:
        planners.plan("manual", problem(name, cuts=cuts, replicas=replicas, devices=4))
    assert raised.value.message == message
