"""The bound is below every plan that the simulator runs within the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partopt.cost.pricing import under
from partopt.cost.problem import Partition, Problem, consecutive, problem_of
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import STRAIGHT
from partopt.search.bound import lower_bound_s, scope
from partopt.search.warmup import simulate_with_best_warmup
from partopt.simulator.execution import execute
from tests.cost.test_estimate_and_simulation import NESTING, contiguous, nested, problems
from tests.examples import examples
from tests.helpers import BLOCKING, WAITING, flat, uniform_profile
from tests.planners.problems import chain, priced, problem, topology

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
            plan = under(plan, warmups=[max(0, w) for w in most])
        run = execute(plan)
    except PartoptError:
        assume(False)
    limit = problem.memory_bytes
    assume(limit is None or (plan.fits and run.peak_memory_bytes.max() <= limit))
    settled = run.steady is None or run.steady.settled
    return run.period_s * (1 + (1e-9 if settled else 2e-2))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
@examples(40, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_on_consecutive_ranks_is_faster(name, data):
    given = data.draw(problems([name]))
    deep = st.lists(st.integers(0, 9), min_size=8, max_size=8)
    partition, warmups = data.draw(contiguous(given)), data.draw(st.none() | deep)
    assert lower_bound_s(given) <= simulated_s(partition, given, warmups)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANNED if SCHEDULES[name].uneven])
@examples(40, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_of_pipelines_side_by_side_is_faster(name, data):
    given = data.draw(problems([name], NESTING))
    assert lower_bound_s(given) <= simulated_s(data.draw(nested(given)), given, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
@examples(12, suppress_health_check=FILTERED)
@given(st.data())
def test_a_plan_on_ranks_in_any_order_is_not_faster(name, data):
    given = data.draw(problems([name]))
    partition = data.draw(contiguous(given))
    order = data.draw(st.permutations(range(given.topology.devices)))
    stages = [replace(own, ranks=tuple(order[r] for r in own.ranks)) for own in partition.stages]
    shuffled = Partition("nested", stages)
    assert lower_bound_s(given) <= simulated_s(shuffled, given, None)


REACHED = {
    "a port": (
        problem(
            chain([1] * 2, [1] * 2, [10], [1000] * 2),
            topology((2, 1.0)),
            schedule="pipedream-2bw",
            memory_bytes=9000,
        ),
        (1, 1),
        10.0,
    ),
    "ports of two levels": (
        problem(
            chain([1] * 3, [1] * 3, [100, 10], [1000] * 3),
            topology((2, 10.0), (2, 1.0)),
            schedule="pipedream-2bw",
            memory_bytes=9000,
        ),
        (1, 1, 1),
        10.0,
    ),
    "replicas inside a server": (
        problem(chain([2], [2], [], [20]), topology((2, 10.0), (2, 1.0))),
        (2,),
        2.0,
    ),
    "an update beside the last gradients": (
        problem(
            replace(chain([1] * 2, [1] * 2, [0], [1000, 3000]), optimizer_s=4.0),
            topology((2, 1.0)),
            schedule="1f1b",
            microbatches=1,
            memory_bytes=14_000,
        ),
        (1, 1),
        6.0,
    ),
}


@pytest.mark.parametrize("what", REACHED)
def test_the_bound_is_what_the_best_plan_takes(what):
    """Stages of one layer each on the first ranks; memory has room for no others."""
    given, counts, seconds = REACHED[what]
    partition = Partition("contiguous", consecutive(range(len(counts) + 1), counts))
    plan = simulate_with_best_warmup(priced(given, partition))
    assert plan.fits
    assert plan.predicted.period_s == pytest.approx(seconds)
    assert lower_bound_s(given) == pytest.approx(seconds)


def test_what_plans_have_to_keep_to_is_said():
    """Of each condition once with it, and once without."""
    plain = problem_of(uniform_profile(4), flat(4), schedule="1f1b", microbatches=8)
    stated = {
        "64 MB a device": plain.with_(memory_bytes=64 * 10**6),
        "2 stages": plain.with_(stages=2),
        "replication uniform": plain.with_(replication="uniform"),
        "all recomputed": plain.with_(recompute="always"),
        "serial transfers": plain.with_(engine=WAITING),
        "blocking all-reduces": plain.with_(engine=BLOCKING),
        "any warm-up": plain.with_(schedule="1f1b-eager"),
        "1 places to cut": plain.with_(cut_at=[0, 2]),
    }
    usual = scope(plain)
    assert usual == "plans under 1f1b, 8 microbatches of 1"
    assert {words for words, other in stated.items() if words in scope(other)} == set(stated)
    assert not any(words in usual for words in stated)
