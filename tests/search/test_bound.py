"""The bound is below every plan that the simulator runs within the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partopt.cost.pricing import under
from partopt.cost.problem import Assignment, Partition, Problem, consecutive, problem_of
from partopt.cost.ranges import RangeSum
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import STRAIGHT
from partopt.search.bound import NEAR, lower_bound_s, scope
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


# servers whose links to others are slow
SERVERS = st.builds(
    lambda d, n, rate: topology((d, 1e3), (n, rate)),
    *(st.integers(2, 3), st.integers(2, 3), st.sampled_from([0.5, 1.0, 3.0])),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
@examples(40, suppress_health_check=FILTERED)
@given(st.data())
def test_no_plan_on_servers_with_slow_links_is_faster(name, data):
    given = data.draw(problems([name], SERVERS, layers=3, microbatches=12))
    draws = [contiguous(given), *([nested(given)] if SCHEDULES[name].uneven else [])]
    partition = data.draw(st.one_of(draws))
    order = data.draw(st.just(range(given.topology.devices)) | st.permutations(range(4)))
    # ranks of the first devices in another order
    ranks = [*order, *range(len(order), given.topology.devices)]
    stages = [replace(s, ranks=tuple(ranks[r] for r in s.ranks)) for s in partition.stages]
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
    # the first server has half of the middle stage: the cut of 20 bytes costs it 10
    "a stage on both servers": (
        problem(
            chain([3, 6, 3], [7, 14, 7], [20, 0], [1000, 0, 1000]),
            topology((2, 1e3), (2, 1.0)),
            schedule="pipedream-2bw",
        ),
        (1, 2, 1),
        10.0,
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


@pytest.mark.parametrize(("name", "M"), [("pipedream-2bw", None), ("1f1b", 64)])
def test_the_server_in_the_middle_sends_over_both_of_its_cuts(name, M):
    """Six layers of 15 s, and cuts of 10 bytes, on three servers of two devices at 1 byte/s.

    Its port carries 10 bytes on and 10 of gradients back. On two servers alone a microbatch takes
    22.5 s, and exchanges of 1,000 bytes across servers longer.
    """
    given = problem(
        chain([5] * 6, [10] * 6, [10] * 5, [1000] * 6),
        topology((2, 1e3), (3, 1.0)),
        schedule=name,
        microbatches=M,
    )
    assert 20 * (1 - 2 * NEAR) < lower_bound_s(given) <= 20
    plan = priced(given, Partition("contiguous", consecutive(range(7), [1] * 6)))
    assert M or simulate_with_best_warmup(plan).predicted.period_s == pytest.approx(20)


def test_a_stage_has_room_for_all_microbatches_of_gpipe():
    """Four of 20 bytes do not fit 40: the one stage recomputes, for 10 s instead of 8."""
    model = replace(chain([1] * 2, [3] * 2, [0], [0] * 2), stash_bytes=RangeSum([10.0] * 2))
    on, asked = topology((1, 1.0)), {"schedule": "gpipe", "microbatches": 4}
    given = problem(model, on, **asked, memory_bytes=40, recompute="auto")
    again = Partition("contiguous", [Assignment(0, 2, range(1), True)])
    plan = simulate_with_best_warmup(priced(given, again))
    assert plan.fits and plan.predicted.period_s == 10
    assert lower_bound_s(given) == 10


@pytest.mark.parametrize("what", REACHED)
def test_the_bound_is_what_the_best_plan_takes(what):
    """Stages of one layer each on the first ranks; others do not fit, or take longer."""
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
