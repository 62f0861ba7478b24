from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import planners, schedules
from partopt.cost.chain import chain_of
from partopt.cost.plan import under
from partopt.cost.problem import problem_of
from partopt.documents.engine import OWN, Engine
from partopt.documents.plan import Plan
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT, Layout
from partopt.schedules.order import KINDS, B, F, Order, R
from partopt.simulator.execution import execute, simulate_plan
from partopt.simulator.memory import (
    base_memory_bytes,
    in_flight_over_time,
    memory_over_time,
    peak_memory_bytes,
)
from tests.examples import examples
from tests.helpers import flat, uniform_profile, with_memory_of
from tests.planners.problems import block_bounds
from tests.report.timelines import example, plan_of, simulated

BASE = 370  # bytes of a stage that are there throughout


def order_of(*rows: str) -> Order:
    """An order of one stage a rank; `&` joins the two actions after it, and microbatches are
    counted.
    """
    kinds, joined, numbers, ends = [], [], [], [0]
    for row in rows:
        letters = row.replace("&", "")
        kinds += [KINDS.index(letter) for letter in letters]
        numbers += [letters[:place].count(letter) for place, letter in enumerate(letters)]
        joined += [
            row[place - 1 : place] == "&" for place, letter in enumerate(row) if letter != "&"
        ]
        ends.append(len(kinds))
    stages = np.repeat(np.arange(len(rows)), np.diff(ends))
    columns = (
        np.array(kinds, np.int8),
        stages.astype(np.int32),
        np.array(numbers, np.int32),
        np.array(joined, np.bool_),
    )
    return Order(*columns, np.array(ends))


def test_in_flight_of_1f1b_goes_up_in_the_warm_up_and_down_at_the_end():
    _, timeline = example("1f1b", P=2, M=3)
    times, values = in_flight_over_time(timeline, 0)
    assert values.tolist() == [0, 1, 2, 1, 2, 1, 0]
    assert times.tolist() == pytest.approx([0, 0, 1e-3, 6e-3, 6e-3, 9e-3, 12e-3], abs=1e-6)


@pytest.mark.parametrize(
    "schedule, peaks",
    [("gpipe", [8] * 4), ("1f1b", [4, 3, 2, 1]), ("naive", [1] * 4), ("pipedream", [4, 3, 2, 1])],
)
def test_peaks_are_what_the_papers_say(schedule, peaks):
    plan, timeline = example(schedule, P=4, M=8)
    assert [in_flight_over_time(timeline, rank).values.max() for rank in range(4)] == peaks
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 10 * peak for peak in peaks]


def test_memory_over_time_starts_and_ends_with_the_base_and_reaches_the_peak():
    plan, timeline = example("1f1b", P=4, M=8)
    peaks = peak_memory_bytes(timeline.order, plan)
    for rank in range(4):
        times, values = memory_over_time(timeline, plan, rank)
        assert values[0] == values[-1] == BASE
        assert values.max() == peaks[rank]
        assert (np.diff(times) >= 0).all()


def test_recomputation_keeps_the_input_alone_and_one_stash():
    """GPipe's R comes before each B: during R and B a stash of 10; the inputs are in buffers."""
    plan, timeline = example("gpipe", P=2, M=4, recompute=True)
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 10, BASE + 10]
    values = memory_over_time(timeline, plan, 1).values - BASE
    assert values.tolist() == [0, 10, 0, 10, 0, 10, 0, 10, 0]


def test_a_backward_that_recomputes_takes_its_stash_itself():
    plan, timeline = example("1f1b", P=2, M=4, recompute=True)
    assert (timeline.order.kind != KINDS.index("R")).all()
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 10, BASE + 10]


def test_split_backwards_give_back_with_the_weights_part():
    plan = plan_of("1f1b", [[0]], 2)
    assert peak_memory_bytes(order_of("FIFIWW"), plan).tolist() == [BASE + 20]
    assert peak_memory_bytes(order_of("FIWFIW"), plan).tolist() == [BASE + 10]


def test_what_a_split_backward_keeps_between_its_parts_is_there_for_as_long():
    plan = plan_of("1f1b", [[0]], 2)
    plan = replace(plan, stages=[replace(plan.stages[0], split_stash_bytes=7)])
    assert peak_memory_bytes(order_of("FIFIWW"), plan).tolist() == [BASE + 2 * (10 + 7)]
    assert peak_memory_bytes(order_of("FFIWIW"), plan).tolist() == [BASE + 20 + 7]
    assert peak_memory_bytes(order_of("FFBB"), plan).tolist() == [BASE + 20]


def test_of_two_joined_actions_both_take_before_either_gives_back():
    plan = plan_of("1f1b", [[0]], 3)
    assert peak_memory_bytes(order_of("FBFB"), plan).tolist() == [BASE + 10]
    assert peak_memory_bytes(order_of("F&BFB"), plan).tolist() == [BASE + 20]
    assert peak_memory_bytes(order_of("F&FBB"), plan).tolist() == [BASE + 20]


def test_a_rank_holds_what_all_of_its_stages_hold_and_an_idle_one_nothing():
    plan = plan_of("1f1b", [[0], [0], [2]], 1)
    assert base_memory_bytes(plan).tolist() == [2 * BASE, 0, BASE]
    order = schedules.order("1f1b", Layout([[0], [2]], 3, 2))
    assert peak_memory_bytes(order, plan).tolist() == [2 * BASE + 20, 0, BASE + 10]


def test_replicas_hold_what_is_theirs():
    plan = plan_of("pipedream", [[0, 1], [2]], None)
    timeline = simulated(plan, 8)
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 20, BASE + 20, BASE + 10]


@pytest.mark.parametrize("recompute", [False, True])
@examples(60)
@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 9))
def test_under_zb_h1_the_formula_says_what_the_simulation_says(recompute, S, r, turns):
    """At every stage, with weight gradients that are late and stashes that they still need."""
    profile = uniform_profile(5, stash_groups=[([0], 3 * 10**6), ([1, 2], 10**6), ([4], 7)])
    problem = problem_of(
        with_memory_of(profile, [0] * 5, [0] * 5, split_stash_bytes=10**5),
        flat(10),
        schedule="zb-h1",
        microbatches=turns * r,
        recompute=recompute,
        cuts=tuple(range(1, S)),
        replicas=(r,) * S,
    )
    priced = planners.plan("manual", problem)
    simulated = simulate_plan(priced)
    assert [stage.memory for stage in priced.stages] == [stage.memory for stage in simulated.stages]
    again = under(simulated)
    assert [stage.memory for stage in again.stages] == [stage.memory for stage in priced.stages]


def test_replicas_that_get_fewer_microbatches_take_nothing_from_the_fullest():
    """8 microbatches on 3 replicas under gpipe: two of them hold 3, one 2; the formula and the
    simulation say 3.
    """
    problem = problem_of(uniform_profile(4), flat(3), schedule="gpipe", microbatches=8)
    plan = planners.plan("data_parallel", problem)
    assert plan.stages[0].in_flight == 3
    assert simulate_plan(plan).peak_memory_bytes == plan.peak_memory_bytes
    assert (
        simulate_plan(plan).stages[0].memory.activations_bytes
        == plan.stages[0].memory.activations_bytes
        > 0
    )


Groups = list[tuple[list[int], int]]
SIZES = st.integers(0, 10**7)
GROUPS = st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=3), SIZES), max_size=6)


def plan_under(
    name: str, groups: Groups, transient: list[int], recompute: bool, **options: Any
) -> Plan:
    """Eight layers on four devices under schedule `name`."""
    profile = uniform_profile(8, stash_groups=groups or [([0], 0)])
    problem = problem_of(
        with_memory_of(profile, [2 * 10**5] * 8, transient),
        flat(4),
        schedule=name,
        microbatches=None if SCHEDULES[name].asynchronous else 8,
        recompute=recompute,
        **{"engine": OWN} | options,
    )
    return planners.plan("gpipe", problem)


def replayed_peak(order: Order, plan: Plan, rank: int, groups: Groups, transient: list[int]) -> int:
    """The most bytes beside weights and buffers on a rank, its actions replayed layer by layer.

    A forward adds the stash of one layer after the other, a backward frees it in the opposite
    order, and while a layer runs it takes its transient beside all that is there.
    """
    own = slice(order.rows[rank], order.rows[rank + 1])
    live, peak = 0, 0
    rebuilds = set(order.stage[order.kind == R].tolist())

    def pass_through(layers: Iterable[int], start: int, sign: int) -> None:
        nonlocal live, peak
        for layer in layers:
            firsts = [min((m for m in own if m >= start), default=8) for own, _ in groups]
            stash = sum(size for (_, size), m in zip(groups, firsts, strict=True) if m == layer)
            live += max(0, sign) * stash
            peak = max(peak, live + transient[layer])
            live += min(0, sign) * stash

    for kind, s in zip(order.kind[own], order.stage[own].tolist(), strict=True):
        stage = plan.stages[s]
        if kind == (F if not stage.recompute else R if s in rebuilds else B):
            pass_through(stage.layers, stage.start, 1)
        if kind == B:
            pass_through(reversed(stage.layers), stage.start, -1)
        peak = max(peak, live)
    assert live == 0
    return peak


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.split])
@examples(30)
@given(GROUPS, st.lists(SIZES, min_size=8, max_size=8), st.booleans())
def test_a_device_takes_what_its_layers_take_one_after_the_other(
    name, groups, transient, recompute
):
    """To the byte where it has one stage; else no more is said than the largest transient more."""
    plan = plan_under(name, groups, transient, recompute)
    done = execute(simulate_plan(plan))
    base = base_memory_bytes(done.plan)
    for rank, stages in plan.stages_by_rank().items():
        most = max(plan.stages[s].memory.transient_bytes for s in stages)
        peak = replayed_peak(done.order, plan, rank, groups, transient) + base[rank] - most
        said = done.peak_memory_bytes[rank]
        assert said == peak if len(stages) == 1 else peak <= said <= peak + most
    if SCHEDULES[name].shape == STRAIGHT:
        assert done.plan.peak_memory_bytes == plan.peak_memory_bytes


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.split])
@examples(40)
@given(
    GROUPS,
    st.lists(SIZES, min_size=8, max_size=8),
    block_bounds(8),
    st.none() | st.integers(1, 3),
)
def test_the_first_blocks_recompute_one_by_one_and_keep_their_inputs(
    name, groups, transient, bounds, first
):
    """A backward makes the stash of one block again and frees it; no R comes before it."""
    engine = Engine(recompute=("none", "blocks"))
    how = {"engine": engine, "block_bounds": bounds, "first": first}
    plan = plan_under(name, groups, transient, True, **how)
    done = execute(simulate_plan(plan))
    assert not (done.order.kind == R).any()
    base, blocks = base_memory_bytes(done.plan), list(pairwise(bounds or range(9)))
    for rank, stages in plan.stages_by_rank().items():
        most = max(plan.stages[s].memory.transient_bytes for s in stages)
        peak = replayed_blocks(done.order, plan, rank, groups, transient, blocks, first)
        said = done.peak_memory_bytes[rank] - base[rank] + most
        cut = any(a < plan.stages[s].start < b for s in stages for a, b in blocks)
        assert said == peak if len(stages) == 1 and not cut else peak <= said
        assert cut or said <= peak + most


def replayed_blocks(order, plan, rank, groups, transient, blocks, first):
    """As `replayed_peak`, of stages that make their `first` blocks again one by one."""
    own = slice(order.rows[rank], order.rows[rank + 1])
    inputs, live, peak = chain_of(uniform_profile(8)).a, 0, 0

    def stash(start: int, stop: int) -> int:
        return sum(size for members, size in groups if {*members} & {*range(start, stop)})

    def go_back(start: int, stop: int) -> None:
        nonlocal live, peak
        for layer in reversed(range(start, stop)):
            peak = max(peak, live + transient[layer])
            live -= stash(start, layer + 1) - stash(start, layer)

    for kind, s in zip(order.kind[own], order.stage[own].tolist(), strict=True):
        i, j = plan.stages[s].start, plan.stages[s].stop
        again = [(max(a, i), min(b, j)) for a, b in blocks if a < j and b > i][:first]
        p, q = (again[0][0], again[-1][1]) if again else (i, i)
        if kind == F:
            live += stash(i, p) + stash(q, j) + sum(int(inputs[a]) for a, _ in again if a > i)
        elif kind == B:
            go_back(q, j)
            for a, b in reversed(again):
                live += stash(a, b)
                go_back(a, b)
                live -= int(inputs[a]) if a > i else 0
            go_back(i, p)
        peak = max(peak, live)
    assert live == 0
    return peak


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if entry.split])
@examples(20)
@given(st.lists(SIZES, min_size=8, max_size=8), st.booleans())
def test_a_backward_in_two_parts_takes_the_largest_transient_beside_all_of_its_stash(
    name, transient, recompute
):
    groups = [([layer], 10**6) for layer in range(8)]
    plan = plan_under(name, groups, transient, recompute)
    without = plan_under(name, groups, [0] * 8, recompute)
    needs = execute(simulate_plan(plan)).peak_memory_bytes
    less = execute(simulate_plan(without)).peak_memory_bytes
    for rank, stages in plan.stages_by_rank().items():
        layers = [layer for s in stages for layer in plan.stages[s].layers]
        assert needs[rank] == less[rank] + max(transient[layer] for layer in layers)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@examples(20)
@given(GROUPS, st.lists(SIZES, min_size=8, max_size=8), st.booleans())
def test_under_another_schedule_a_plan_takes_what_one_made_for_it_takes(
    name, groups, transient, recompute
):
    plans = [plan_under(each, groups, transient, recompute) for each in ("1f1b", "zb-h1")]
    expected = [stage.memory for stage in plan_under(name, groups, transient, recompute).stages]
    for plan in plans:
        assert [stage.memory for stage in under(plan, name).stages] == expected
