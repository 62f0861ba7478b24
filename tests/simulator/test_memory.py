"""Memory over an execution: by hand, replayed layer by layer, and under other conditions."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import Job, planners, schedules, simulate, solve
from partopt.cost.chain import chain_of
from partopt.cost.pricing import under
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive, problem_of
from partopt.documents.actions import B, F, I, R, W
from partopt.documents.engine import OWN, Engine
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import STRAIGHT, Placement
from partopt.simulator.execution import execute, simulate_plan
from partopt.simulator.memory import (
    base_memory_bytes,
    in_flight_over_time,
    memory_over_time,
    peak_memory_bytes,
)
from tests.examples import examples
from tests.helpers import flat, uniform_profile, with_memory_of
from tests.planners.problems import block_bounds, priced, problem, stashed, trained
from tests.report.timelines import MEMORY, example, plan_of, simulated
from tests.schedules.executed import spelled

STRAIGHTS = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]
BASE = 370  # bytes of a stage that are there throughout


def order_of(row):
    """An order of one stage on one rank; `&` joins the two actions after it, and microbatches are
    counted.
    """
    letters = row.replace("&", "")
    names = [f"0{each}{letters[:place].count(each)}" for place, each in enumerate(letters)]
    return spelled(" ".join(names), joined=[row.index("&")] if "&" in row else ())


def test_in_flight_of_1f1b_goes_up_in_the_warm_up_and_down_at_the_end():
    _, timeline = example("1f1b", P=2, M=3)
    times, values = in_flight_over_time(timeline, 0)
    assert values.tolist() == [0, 1, 2, 1, 2, 1, 0]
    assert times.tolist() == pytest.approx([0, 0, 1e-3, 6e-3, 6e-3, 9e-3, 12e-3], abs=1e-6)


PEAKS = {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1], "naive": [1] * 4, "pipedream": [4, 3, 2, 1]}


@pytest.mark.parametrize("schedule, peaks", PEAKS.items())
def test_peaks_are_what_the_papers_say_and_memory_starts_and_ends_with_the_base(schedule, peaks):
    plan, timeline = example(schedule, P=4, M=8)
    assert [in_flight_over_time(timeline, rank).values.max() for rank in range(4)] == peaks
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 10 * peak for peak in peaks]
    for rank, peak in enumerate(peaks):
        times, values = memory_over_time(timeline, plan, rank)
        assert (values[0], values.max(), values[-1]) == (BASE, BASE + 10 * peak, BASE)
        assert (np.diff(times) >= 0).all()


def test_recomputation_keeps_the_input_alone_and_one_stash():
    """GPipe's R comes before each B: during R and B a stash of 10; the inputs are in buffers.

    Under 1F1B the backward takes its stash itself.
    """
    for schedule in ("gpipe", "1f1b"):
        plan, timeline = example(schedule, P=2, M=4, recompute=True)
        assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 10, BASE + 10]
        assert (timeline.order.kind == R).any() == (schedule == "gpipe")
        values = memory_over_time(timeline, plan, 1).values - BASE
        assert values.tolist() == [0, 10, 0, 10, 0, 10, 0, 10, 0]


def test_what_is_there_when_by_hand():
    """Split backwards give back with the weights' part, and keep 7 bytes between their parts; of
    two joined actions both take before either gives back.
    """
    plan = plan_of("1f1b", [[0]], 3)
    split = replace(plan, stages=[replace(plan.stages[0], split_stash_bytes=7)])
    for of, row, expected in (
        (plan, "FIFIWW", 20),
        (plan, "FIWFIW", 10),
        (split, "FIFIWW", 2 * (10 + 7)),
        (split, "FFIWIW", 20 + 7),
        (split, "FFBB", 20),
        (plan, "FBFB", 10),
        (plan, "F&BFB", 20),
        (plan, "F&FBB", 20),
    ):
        assert peak_memory_bytes(order_of(row), of).tolist() == [BASE + expected], row


def test_a_rank_holds_what_all_of_its_stages_hold_and_an_idle_one_nothing():
    plan = plan_of("1f1b", [[0], [0], [2]], 1)
    assert base_memory_bytes(plan).tolist() == [2 * BASE, 0, BASE]
    order = schedules.order("1f1b", Placement([[0], [2]], 3, 2))
    assert peak_memory_bytes(order, plan).tolist() == [2 * BASE + 20, 0, BASE + 10]


def test_bytes_are_counted_to_the_last():
    """A floating-point number would be of the next even byte."""
    own = replace(MEMORY, total_bytes=2**53 + 1 + MEMORY.activations_bytes)
    plan = plan_of("1f1b", [[0], [0], [2]], 1, memory=own)
    order = schedules.order("1f1b", Placement([[0], [2]], 3, 2))
    odd = 2**53 + 1
    assert base_memory_bytes(plan).tolist() == [2 * odd, 0, odd]
    assert peak_memory_bytes(order, plan).tolist() == [2 * odd + 20, 0, odd + 10]


def test_replicas_hold_what_is_theirs():
    plan = plan_of("pipedream", [[0, 1], [2]], None)
    timeline = simulated(plan, 8)
    assert peak_memory_bytes(timeline.order, plan).tolist() == [BASE + 20, BASE + 20, BASE + 10]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@examples(40)
@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 9))
def test_under_zb_h1_the_formula_says_what_the_simulation_says(recompute, S, r, turns):
    """At every stage, with weight gradients that are late and stashes that they still need."""
    profile = uniform_profile(5, stash_groups=[([0], 3 * 10**6), ([1, 2], 10**6), ([4], 7)])
    profile = with_memory_of(profile, [0] * 5, [0] * 5, split_stash_bytes=10**5)
    options = {"schedule": "zb-h1", "microbatches": turns * r, "recompute": recompute}
    options |= {"cuts": tuple(range(1, S)), "replicas": (r,) * S}
    priced = planners.plan("manual", problem_of(profile, flat(10), **options))
    simulated = simulate_plan(priced)
    for plan in (simulated, under(simulated)):
        assert [stage.memory for stage in plan.stages] == [stage.memory for stage in priced.stages]


def test_replicas_that_get_fewer_microbatches_take_nothing_from_the_fullest():
    """8 microbatches on 3 replicas under gpipe: two of them hold 3, one 2; the formula and the
    simulation say 3.
    """
    problem = problem_of(uniform_profile(4), flat(3), schedule="gpipe", microbatches=8)
    plan = planners.plan("data_parallel", problem)
    assert plan.stages[0].in_flight == 3
    simulated = simulate_plan(plan)
    assert simulated.peak_memory_bytes == plan.peak_memory_bytes
    own, other = (each.stages[0].memory.activations_bytes for each in (plan, simulated))
    assert own == other > 0


SIZES = st.integers(0, 10**7)
GROUPS = st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=3), SIZES), max_size=6)


def plan_under(name, groups, transient, recompute, engine=OWN, **options):
    """Eight layers on four devices under schedule `name`."""
    profile = uniform_profile(8, stash_groups=groups or [([0], 0)])
    profile = with_memory_of(profile, [2 * 10**5] * 8, transient)
    options |= {"microbatches": None if SCHEDULES[name].asynchronous else 8, "engine": engine}
    how = recompute
    if isinstance(recompute, bool):
        how = "always" if recompute else "never"
    problem = problem_of(profile, flat(4), schedule=name, recompute=how, **options)
    return planners.plan("gpipe", problem)


def replayed_peak(order, plan, rank, groups, transient):
    """The most bytes beside weights and buffers on a rank, its actions replayed layer by layer.

    A forward adds the stash of one layer after the other, a backward frees it in the opposite
    order, and while a layer runs it takes its transient beside all that is there.
    """
    own = slice(order.rows[rank], order.rows[rank + 1])
    live, peak = 0, 0
    rebuilds = set(order.stage[order.kind == R].tolist())

    def pass_through(layers, start, sign):
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    how = {"engine": engine, "block_bounds": bounds}
    plan = plan_under(name, groups, transient, first or "always", **how)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", STRAIGHTS)
@examples(25, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_what_is_priced_is_what_a_simulation_holds(name, data):
    """To the byte, on any replicas, that microbatches need not divide among: an action takes and
    gives back what its stage says, and buffers are those of the replica that gets most.
    """
    entry, model = SCHEDULES[name], data.draw(stashed(5))
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=model.layers))
    M = None if entry.asynchronous else data.draw(st.integers(1, 11))
    if not entry.uneven:
        replicas = replicas[:1] * len(replicas)
    options = {**data.draw(trained(M)), "recompute": data.draw(st.booleans())}
    stated = problem(model, flat(15, 10.0), schedule=name, microbatches=M, **options)
    bounds = [*range(len(replicas)), model.layers]
    plan = priced(stated, Partition(CONTIGUOUS, consecutive(bounds, replicas)))
    try:
        done = execute(plan)
    except PartoptError:  # it deadlocks
        assume(False)
    order = done.order
    for stage in plan.stages:
        most = max(walked_bytes(order, stage, rank) for rank in stage.ranks)
        assert most == stage.memory.activations_bytes
        forwards = max(int((order.kind[own_of(order, rank)] == F).sum()) for rank in stage.ranks)
        buffers = {"flight": stage.in_flight, "all": forwards, "one": 1}[plan.engine.buffers]
        inputs = max(buffers, stage.in_flight) if stage.recomputes_whole else buffers
        expected = inputs * stage.input_bytes + buffers * stage.output_bytes
        assert stage.memory.buffers_bytes == expected
    if M is not None:
        assert done.peak_memory_bytes.max() == plan.peak_memory_bytes
        assert simulate_plan(plan).peak_memory_bytes == plan.peak_memory_bytes


def own_of(order, rank):
    return slice(order.rows[rank], order.rows[rank + 1])


def walked_bytes(order, stage, rank):
    """The most bytes that a rank of one stage keeps for backwards, action by action."""
    kinds = order.kind[own_of(order, rank)].tolist()
    begins = {R} if R in kinds else {B, I}
    live = most = 0
    for kind in kinds:
        if kind in (begins if stage.recomputes_whole else {F}):
            live += stage.stash_bytes
        live += stage.split_stash_bytes * (kind == I)
        most = max(most, live)
        if kind in (B, W):
            live -= stage.stash_bytes + stage.split_stash_bytes * (kind == W)
    assert live == 0
    return most


GB = 10**9


def planned(**options):
    return solve(Job(uniform_profile(6), flat(4, memory_bytes=GB), **options)).plan


@pytest.mark.slow
def test_plans_under_other_conditions_count_memory_by_the_same_rules():
    """Buffers of a whole iteration, which need one; shares; a limit that has no reserve."""
    split = {"cuts": [2, 4], "replicas": [1, 2, 1]}
    plan = planned(schedule="1f1b", microbatches=8, facts={"buffers": "all"}, **split)
    for M, of in ((8, plan), (15, simulate(plan, microbatches=15).plan)):
        for stage, most in zip(of.stages, [M, -(-M // 2), M], strict=True):
            assert stage.memory.buffers_bytes == most * (stage.input_bytes + stage.output_bytes)
    with pytest.raises(PartoptError, match="the plan has `buffers=all`"):
        simulate(plan, schedule="pipedream")

    plan = planned(schedule="1f1b", microbatches=8, shard="optimizer", cuts=[3], replicas=[2, 2])
    for stage in simulate(plan, microbatches=16).plan.stages:
        assert stage.memory.optimizer_bytes == stage.trained_bytes  # two moments, in two shares

    plan = planned(facts={"reserve": "100 MB"})
    assert plan.memory_limit_bytes == 900 * 10**6
    other = simulate(plan, memory="500 MB").plan
    assert (other.memory_limit_bytes, other.reserve.size_bytes) == (500 * 10**6, 0)
