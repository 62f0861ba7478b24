"""Every order that is not refused is complete and runs to its end, whatever the plan; and it is
written quickly.
"""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.check import check
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.one_f_one_b import blocking_warmups
from partopt.schedules.order import KINDS
from partopt.simulator.work import Work
from tests.examples import examples
from tests.helpers import flat
from tests.schedules.executed import SECONDS, built, chunks, layout_of, straight
from tests.simulator.reference import simulate

REPLICATED = [name for name, entry in SCHEDULES.items() if entry.uneven]


def run(name, layout, serial, blocking):
    """Check and execute the schedule with transfers and all-reduces that take time; a deadlock
    raises.
    """
    S = len(layout.ranks)
    work = Work(
        ranks=layout.ranks,
        seconds=np.array([[SECONDS.get(kind, 0.5)] * S for kind in KINDS]),
        cut_bytes=np.ones(S + 1),
        gradient_bytes=np.ones(S),
        tied_s=np.zeros(S),
        topology=flat(layout.devices, bandwidth=4.0, latency=0.125),
        serial=serial,
        blocking=blocking,
    )
    written = order(name, layout)
    check(written, layout)
    simulate(written, work)


@examples(150)
@given(
    st.sampled_from(REPLICATED),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_any_replication_runs_to_its_end(name, replicas, microbatches, serial, blocking):
    warmup = blocking_warmups(replicas) if blocking and SCHEDULES[name].asynchronous else None
    run(
        name,
        straight(name, replicas, microbatches, warmup=warmup),
        serial,
        blocking and name != "naive",
    )


def test_pipedreams_warmup_can_be_too_short_for_all_reduces_that_are_waited_for():
    """1-3-1: the middle stage's round needs microbatch 5, which the first stage takes in only after
    a gradient of that round.
    """
    with pytest.raises(PartoptError, match="deadlocks: rank 3 waits at 1F5"):
        run("pipedream", straight("pipedream", [1, 3, 1], 6), serial=False, blocking=True)
    assert blocking_warmups([1, 3, 1]) == [5, 1, 0]


def test_a_naive_pipeline_with_replicas_cannot_block_in_its_all_reduce():
    """The exchange waits for the second replica, that for the next microbatch, that for the
    gradient that the exchange holds back.
    """
    with pytest.raises(PartoptError, match="deadlocks: rank 2 waits at 1F1"):
        run("naive", straight("naive", [1, 2], 2), serial=False, blocking=True)


@examples(150)
@given(
    st.sampled_from([name for name in SCHEDULES if name not in REPLICATED]),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 20),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_any_pipelines_side_by_side_run_to_their_end(name, P, v, microbatches, d, serial, blocking):
    v = v if v in chunks(name) else chunks(name)[0]
    if refusal(name, P, v, microbatches) is None:
        run(name, layout_of(name, P, v, microbatches * d, d), serial, blocking)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_quarter_of_a_million_tasks_are_written_within_seconds(name):
    start = time.perf_counter()
    written = built(name, 256, 1 if SCHEDULES[name].shape == STRAIGHT else 2, 1024)
    assert time.perf_counter() - start < 3
    assert np.count_nonzero(written.kind == 0) == 256 * 1024 * (
        1 if name == "dualpipe" else written.stage.max() // 256 + 1
    )
