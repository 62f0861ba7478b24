"""What all stages together send bounds every plan on a bus, as the simulator executes it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.planners.optimal import bus, refuters
from partopt.schedules import SCHEDULES
from partopt.search.warmup import simulate_with_best_warmup
from tests.examples import examples
from tests.planners.exhaustive import partitions, priced
from tests.planners.problems import chain, problem, topology
from tests.planners.test_optimal import clusters, stashed


def simulated_s(given: Problem, stages: list[tuple[int, int, range]]) -> float | None:
    """Seconds of a contiguous plan in the simulator, as `partition_s`."""
    return partition_s(given, Partition(CONTIGUOUS, [Assignment(*stage) for stage in stages]))


def partition_s(given: Problem, partition: Partition) -> float | None:
    """Seconds of a plan in the simulator at its best warm-up; None where it does not run or fit."""
    try:
        plan = simulate_with_best_warmup(priced(given, partition))
    except PartoptError:
        return None
    seconds = plan.predicted.iteration_s or plan.predicted.period_s
    return seconds if plan.fits else None


@examples(60)
@given(
    stashed(4),
    clusters(levels=2, devices=4, sizes=3),
    st.sampled_from(["pipedream", "pipedream-2bw", "1f1b", "gpipe", "zb-h1"]),
    st.sampled_from([None, 100, 300]),
    st.booleans(),
)
def test_no_plan_on_a_bus_is_simulated_to_less(model, cluster, name, memory_bytes, serial):
    given = problem(
        model,
        cluster,
        schedule=name,
        microbatches=None if SCHEDULES[name].asynchronous else 5,
        memory_bytes=memory_bytes,
        serial_transfers=serial,
    )
    bound = refuters.bound_s(given, 1e-3)
    for stages in partitions(given):
        seconds = simulated_s(given, stages)
        assert seconds is None or bound <= seconds * (1 + 1e-6)


def test_four_stages_send_their_three_cuts_over_one_bus():
    """Layers of 3 s on 4 devices: within 4 s each is a stage of its own. Three cuts of 6 bytes,
    there and back at 4 bytes/s, take 9 s, and replicas exchange 100 bytes a layer, so that
    two stages of 6 s with one cut are better.
    """
    model = chain([1] * 4, [2] * 4, [6] * 3, [100] * 4)
    on = problem(model, topology((4, 4.0), bus=True))
    refutes = bus.refuter(on)
    assert refutes(4.0) and refutes(5.9) and not refutes(6.0)
    assert refuters.bound_s(on, 3.0) == pytest.approx(6.0, rel=1e-5)
    assert not bus.refuter(replace(on, topology=topology((4, 4.0))))(4.0)


def test_replicas_of_a_stage_exchange_their_gradients_over_the_bus_too():
    """One layer of 12 s on 4 devices, and 8 bytes of parameters: 2 * 3 * 8 bytes at 4 bytes/s are
    12 s for every four microbatches, and 4 s each with three replicas, or six of two.
    """
    on = problem(chain([6], [6], [], [8]), topology((4, 4.0), bus=True))
    refutes = bus.refuter(on)
    assert not refutes(3.0)  # 3 s of compute, and 3 s of the bus
    heavy = problem(chain([6], [6], [], [16]), topology((4, 4.0), bus=True))
    assert bus.refuter(heavy)(3.0)
    assert simulated_s(heavy, [(0, 1, range(4))]) == pytest.approx(6.0)
