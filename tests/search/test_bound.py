"""The bound is below every plan that the simulator runs within the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partopt.cost.problem import Partition, Problem
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT
from partopt.search.bound import lower_bound_s
from partopt.simulator.execution import execute
from partopt.simulator.restate import with_conditions
from tests.examples import examples
from tests.planners.problems import priced
from tests.simulator.test_bounds import contiguous, nested, problems

FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
PLANNED = [
    name for name, entry in SCHEDULES.items() if entry.shape == STRAIGHT and not entry.one_at_a_time
]


def simulated_s(partition: Partition, problem: Problem, warmups: list[int] | None) -> float:
    """Seconds of a microbatch, a hair less where a run did not settle; skips what cannot run."""
    plan, M = priced(problem, partition), problem.microbatches
    try:
        if warmups is not None and SCHEDULES[problem.schedule].takes_warmup:
            own = zip(warmups, plan.stages, strict=False)
            most = [w if M is None else min(w, -(-M // s.replicas) - 1) for w, s in own]
            plan = with_conditions(plan, warmups=[max(0, w) for w in most])
        run = execute(plan)
    except PartoptError:
        assume(False)
    limit = problem.memory_bytes
    assume(limit is None or (plan.fits and run.peak_memory_bytes.max() <= limit))
    settled = run.steady is None or run.steady.settled
    return run.period_s * (1 + (1e-9 if settled else 2e-2))


@pytest.mark.parametrize("name", PLANNED)
@examples(150, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_on_consecutive_ranks_is_faster(name, data):
    given = data.draw(problems([name]))
    deep = st.lists(st.integers(0, 9), min_size=8, max_size=8)
    partition, warmups = data.draw(contiguous(given)), data.draw(st.none() | deep)
    assert lower_bound_s(given) <= simulated_s(partition, given, warmups)


@pytest.mark.parametrize("name", [name for name in PLANNED if SCHEDULES[name].uneven])
@examples(80, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_of_pipelines_side_by_side_is_faster(name, data):
    given = data.draw(problems([name]))
    assume(sum(level.size > 1 for level in given.topology.levels) > 1)
    assert lower_bound_s(given) <= simulated_s(data.draw(nested(given)), given, None)


@pytest.mark.parametrize("name", PLANNED)
@examples(30, suppress_health_check=FILTERED)
@given(st.data())
def test_a_plan_on_ranks_in_any_order_is_not_faster(name, data):
    given = data.draw(problems([name]))
    partition = data.draw(contiguous(given))
    order = data.draw(st.permutations(range(given.topology.devices)))
    stages = [replace(own, ranks=tuple(order[r] for r in own.ranks)) for own in partition.stages]
    shuffled = Partition("nested", stages)
    assert lower_bound_s(given) <= simulated_s(shuffled, given, None)
