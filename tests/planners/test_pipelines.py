"""All pipelines of a small problem, beside plans that the simulator executes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.cost.ranges import RangeSum
from partopt.documents.topology import AllReduceRates, Topology
from partopt.planners.optimal import pipelines
from partopt.schedules import schedule
from partopt.search.warmup import WarmupTrials
from tests.examples import examples
from tests.planners import exhaustive
from tests.planners.exhaustive import nested, priced
from tests.planners.problems import problem
from tests.planners.test_optimal import clusters, stashed

SCHEDULES = ["1f1b", "1f1b-eager", "gpipe", "zb-h1"]
NEAR = 1e-9
SMALL = (  # what every problem here has: a model, a cluster, a schedule, M and a limit of memory
    stashed(3),
    clusters(levels=2, devices=4, sizes=4),
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.sampled_from([None, 100, 300]),
)


OPTIONS = (  # of these problems: what recomputes, which replicas, and whether devices wait
    st.sampled_from(["never", "always", "auto"]),
    st.sampled_from(["free", "uniform", "none"]),
    st.booleans(),
)


def drawn(model, cluster, name, M, memory_bytes, recompute, replication, serial):
    """The problem of what is drawn from `SMALL` and `OPTIONS`, with a step of the optimizer."""
    return problem(
        replace(model, optimizer_s=3.0),
        cluster,
        schedule=name,
        microbatches=M,
        memory_bytes=memory_bytes,
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        replication=replication,
        serial_transfers=serial,
    )


def partitions(given: Problem) -> Iterator[Partition]:
    """Every contiguous and every nested partition, in every way to recompute."""
    modes = (False, True) if given.recompute_per_stage else (None,)
    for stages in exhaustive.partitions(given):
        for chosen in product(modes, repeat=len(stages)):
            own = [Assignment(*stage, mode) for stage, mode in zip(stages, chosen, strict=True)]
            yield Partition(CONTIGUOUS, own)
    yield from nested(given)


def simulated_s(given: Problem) -> float:
    """The least iteration that any plan which fits is simulated to, at any warm-up."""
    least, M = math.inf, given.microbatches
    for partition in partitions(given):
        trials = WarmupTrials(priced(given, partition))
        deepest = [-(-M // r) for r in trials.replicas]
        warmups = [None]
        if schedule(given.schedule).takes_warmup:
            warmups = [*product(*(range(own) for own in deepest))]
        for warmup in warmups:
            found = trials.at(warmup)
            if found is not None and found.fits:
                least = min(least, found.period_s * M)
    return least


def uncontended(on: Topology) -> Topology:
    """The topology with so many links that no message waits for another, or takes of a device, and
    whose all-reduces take no time where they have no bytes.
    """
    at_once = AllReduceRates(latency_s=0.0)
    free = {"links": 64, "overhead_s": 0.0, "allreduce": at_once, "copy_bytes_per_s": msgspec.UNSET}
    return structs.replace(on, levels=[structs.replace(level, **free) for level in on.levels])


@examples(10)
@given(*SMALL, *OPTIONS)
def test_no_plan_is_simulated_to_less_than_what_is_refuted(
    model, cluster, name, M, memory_bytes, recompute, replication, serial
):
    given = drawn(model, cluster, name, M, memory_bytes, recompute, replication, serial)
    least = simulated_s(given)
    assert least == math.inf or not pipelines.refuter(given)(least * (1 + NEAR))


@examples(40)
@given(
    *SMALL,
    st.booleans(),
)
def test_without_contention_all_is_refuted_that_is_below_the_best_plan(
    model, cluster, name, M, memory_bytes, recompute
):
    """No parameters, so that no all-reduce waits for another; as much comes back as goes."""
    given = problem(
        replace(model, trained_bytes=RangeSum([0.0] * model.layers), back=model.a),
        uncontended(cluster),
        schedule=name,
        microbatches=M,
        memory_bytes=memory_bytes,
        recompute=recompute,
    )
    refutes, least = pipelines.refuter(given), simulated_s(given)
    assert refutes(least * (1 - NEAR)) and not (least < math.inf and refutes(least * (1 + NEAR)))
