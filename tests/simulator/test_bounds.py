"""What the formulas say of a plan is never more than the simulator finds, whatever the warm-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partopt.cost.chain import Chain
from partopt.cost.period import objective_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.planners.blocks import Block, stages_of
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.layout import STRAIGHT, ranks_of
from partopt.simulator import execute
from partopt.simulator.restate import with_conditions
from tests.examples import examples
from tests.planners.exhaustive import priced
from tests.planners.problems import problem
from tests.planners.test_optimal import clusters, stashed

NEAR = 1e-9
FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
FLAT = [name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT]
FOLDED = [name for name in SCHEDULES if name not in FLAT]


@st.composite
def problems(draw: st.DrawFn, names: list[str], devices: int = 8) -> Problem:
    """Problems under one of the schedules `names`."""
    name, model = draw(st.sampled_from(names)), draw(stashed(7))
    asynchronous = SCHEDULES[name].asynchronous
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    return problem(
        replace(model, optimizer_s=draw(st.sampled_from([0.0, 3.0]))),
        draw(clusters(devices=devices)),
        schedule=name,
        microbatches=None if asynchronous else draw(st.integers(1, 12)),
        memory_bytes=draw(st.sampled_from([None, 100, 300])),
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        serial_transfers=draw(st.booleans()),
        blocking_allreduce=asynchronous and draw(st.booleans()),
    )


@st.composite
def contiguous(draw: st.DrawFn, given: Problem) -> Partition:
    """Stages on consecutive ranks of which some may stay idle."""
    N, P, uneven = given.chain.layers, given.topology.devices, SCHEDULES[given.schedule].uneven
    S = draw(st.integers(1, min(N, P)))
    cuts = sorted(draw(st.permutations(range(1, N)))[: S - 1])
    equal = draw(st.integers(1, P // S))
    first, stages = 0, []
    for s, (start, stop) in enumerate(zip([0, *cuts], [*cuts, N], strict=True)):
        left = P - first - (S - s)
        first += draw(st.integers(0, left if uneven else 0)) if draw(st.booleans()) else 0
        left = P - first - (S - s)
        r = 1 + draw(st.integers(0, left)) if uneven else equal
        mode = draw(st.booleans()) if given.recompute_per_stage else None
        stages.append(Assignment(start, stop, range(first, first + r), mode))
        first += r
    return Partition(CONTIGUOUS, stages)


@st.composite
def nested(draw: st.DrawFn, given: Problem) -> Partition:
    """Pipelines inside the members of levels, copied on some of them."""
    sizes = [level.size for level in given.topology.levels if level.size > 1]

    def pipeline(k: int, i: int, j: int) -> list[Block]:
        blocks, first, start = [], 0, i
        while start < j:
            left = sizes[k] - first
            stop = j if left == 1 else draw(st.integers(start + 1, j))
            copies = draw(st.integers(1, left if stop == j else left - 1))
            inside = pipeline(k - 1, start, stop) if k else []
            blocks.append(Block(start, stop, first, copies, inside))
            first, start = first + copies, stop
        return blocks

    groups = [1]
    for size in sizes:
        groups.append(groups[-1] * size)
    stages = stages_of(pipeline(len(sizes) - 1, 0, given.chain.layers), groups)
    return Partition(NESTED, stages)


def check(partition: Partition, given: Problem, warmups: list[int] | None) -> None:
    """The simulated plan, at these warm-ups, takes no less than the formulas say."""
    plan = priced(given, partition)
    try:
        if warmups is not None and SCHEDULES[given.schedule].takes_warmup:
            most = given.microbatches
            own = [
                w if most is None else min(w, -(-most // stage.replicas) - 1)
                for w, stage in zip(warmups, plan.stages, strict=False)
            ]
            plan = with_conditions(plan, warmups=[max(0, w) for w in own])
        run = execute(plan)
    except PartoptError:  # it deadlocks
        assume(False)
    limit = given.memory_bytes
    assume(limit is None or (plan.fits and run.peak_memory_bytes.max() <= limit))
    seconds = run.period_s if given.microbatches is None else run.makespan_s
    settled = run.steady is None or run.steady.settled
    slack = NEAR if settled else 2e-2
    assert objective_s(partition, given) <= seconds * (1 + slack)


@pytest.mark.parametrize("name", FLAT)
@examples(300, suppress_health_check=FILTERED)
@given(st.data())
def test_no_contiguous_plan_is_simulated_to_less_than_its_bound(name, data):
    given = data.draw(problems([name]))
    partition = data.draw(contiguous(given))
    deep = st.lists(st.integers(0, 9), min_size=8, max_size=8)
    check(partition, given, data.draw(st.none() | deep))


@pytest.mark.parametrize("name", [name for name in FLAT if SCHEDULES[name].uneven])
@examples(150, suppress_health_check=FILTERED)
@given(st.data())
def test_no_nested_plan_is_simulated_to_less_than_its_bound(name, data):
    given = data.draw(problems([name]))
    assume(sum(level.size > 1 for level in given.topology.levels) > 1)
    check(data.draw(nested(given)), given, None)


@pytest.mark.parametrize("name", FOLDED)
@examples(150, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_with_several_stages_on_a_device_is_simulated_to_less_than_its_bound(name, data):
    given = data.draw(problems([name]))
    entry, M = SCHEDULES[name], given.microbatches
    assert M is not None
    v = data.draw(st.sampled_from(entry.auto_chunks))
    P = data.draw(st.integers(1, given.topology.devices))
    d = data.draw(st.integers(1, given.topology.devices // P))
    ranks = ranks_of(entry.shape, P, v, d)
    S, N = len(ranks), given.chain.layers
    assume(N >= S and M % d == 0 and not refusal(name, P, v, M // d))
    cuts = sorted(data.draw(st.permutations(range(1, N)))[: S - 1])
    stages = [
        Assignment(start, stop, own)
        for start, stop, own in zip([0, *cuts], [*cuts, N], ranks, strict=True)
    ]
    check(Partition(entry.shape, stages), replace(given, recompute_per_stage=False, chunks=v), None)


def even(cuts: list[int], weights: list[int], **options: object) -> Chain:
    """Layers of 1 s forward and 2 s backward."""
    from tests.planners.problems import chain

    return chain([1] * len(weights), [2] * len(weights), cuts, weights)


def simulated_s(given: Problem, replicas: list[int]) -> tuple[float, float]:
    """What the formulas and the simulator say of a layer a stage with so many replicas."""
    stages, first = [], 0
    for s, r in enumerate(replicas):
        stages.append(Assignment(s, s + 1, range(first, first + r)))
        first += r
    partition = Partition(CONTIGUOUS, stages)
    run = execute(priced(given, partition))
    return objective_s(partition, given), (
        run.period_s if given.microbatches is None else run.makespan_s
    )
