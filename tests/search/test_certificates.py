"""A certificate beside every contiguous partition there is, at several warm-ups, all simulated."""

from collections.abc import Iterator
from itertools import combinations, product

from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.cost.price import price
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem, problem_of
from partopt.cost.tolerances import MET
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.search.contest import plan_alone
from partopt.search.warmup import WarmupTrials, warmups
from tests.examples import examples
from tests.helpers import flat, measurement, profile_of, two_level

SCHEDULES = ["pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1"]
DEPTHS = [(0.5, 0), (1, 0), (1, 1), (1, 2), (2, 1), (8, 0)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to four layers on up to four devices, with memory for one microbatch, for some or any."""
    count = draw(st.integers(2, 4))

    def drawn(*values: int) -> list[int]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    tied = draw(st.sampled_from([[], [("weight", [0, count - 1], 2)]]))
    measured = measurement(
        drawn(1, 2, 3),
        drawn(0, 2, 5),
        drawn(0, 1, 3),
        stash_groups=[((layer,), 10) for layer in range(count)],
        optimizer_s=draw(st.sampled_from([0.0, 1.0])),
    )
    name = draw(st.sampled_from(SCHEDULES))
    asynchronous = schedule(name).asynchronous
    recompute = draw(st.sampled_from(["never", "always", "auto"]))
    return problem_of(
        profile_of([measured], [size + 2 for size in drawn(0, 1, 6)], shared=tied),
        draw(
            st.sampled_from(
                [flat(3, 2.0), flat(4, 2.0, 0.5), two_level(2, 2, 4.0, 1.0, outer_latency=0.5)]
            )
        ),
        schedule=name,
        microbatches=None if asynchronous else draw(st.sampled_from([2, 3, 6])),
        optimizer="sgd",
        memory_bytes=draw(st.sampled_from([None, 40, 60, 90, 150])),
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        serial_transfers=draw(st.booleans()),
        blocking_allreduce=asynchronous and draw(st.booleans()),
    )


def partitions(problem: Problem) -> Iterator[Partition]:
    """Every contiguous partition, from every first rank, in every way to recompute."""
    N, P = problem.chain.layers, problem.topology.devices
    modes = (False, True) if problem.recompute_per_stage else (None,)
    for S in range(1, min(N, P) + 1):
        for inside, replicas in product(
            combinations(range(1, N), S - 1), product(range(1, P + 1), repeat=S)
        ):
            cuts = (0, *inside, N)
            for first in range(P - sum(replicas) + 1):
                ends = [first + sum(replicas[: s + 1]) for s in range(S)]
                for recompute in product(modes, repeat=S):
                    stages = [
                        Assignment(cuts[s], cuts[s + 1], range(ends[s] - replicas[s], ends[s]), own)
                        for s, own in enumerate(recompute)
                    ]
                    yield Partition(CONTIGUOUS, stages)


def simulated_s(partition: Partition, problem: Problem) -> Iterator[float]:
    """Seconds of an iteration or, asynchronous, a microbatch at each warm-up that fits and runs."""
    trials = WarmupTrials(price(partition, problem, "manual"))
    depths: list[list[int] | None] = [None]
    if schedule(problem.schedule).takes_warmup and trials.most is not None:
        wanted = {tuple(warmups(trials.replicas, *depth)) for depth in DEPTHS}
        depths += [[*map(min, each, trials.most)] for each in wanted]
    for depth in depths:
        found = trials.at(depth)
        if found is not None and found.fits:
            yield found.period_s * (problem.microbatches or 1)


@examples(12)
@given(problems())
def test_nothing_that_fits_is_simulated_to_less_than_a_certificates_bound(problem):
    try:
        plan = plan_alone("optimal", problem)[0]
    except PartoptError:
        plan = None
    every = [each for partition in partitions(problem) for each in simulated_s(partition, problem)]
    if plan is None:
        assert not every
        return
    assume(plan.fits)
    certificate, predicted = plan.certificate, plan.predicted
    own = predicted.period_s if predicted.iteration_s is None else predicted.iteration_s
    assert certificate.objective_s == own
    assert min([*every, own]) >= certificate.lower_bound_s * (1 - 1e-9)
    assert (certificate.status == "optimal") == (own <= certificate.lower_bound_s * (1 + MET))
