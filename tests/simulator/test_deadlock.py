"""Orders in which devices wait for each other are refused by name."""

import numpy as np
import pytest

from partopt.errors import PartoptError
from partopt.schedules.order import KINDS, Order
from partopt.simulator.engine import simulate
from tests.simulator import reference
from tests.simulator.cases import case, consecutive


def order_of(*rows):
    """An order from actions as they are written: `1F0 1B0`."""
    names = [name for row in rows for name in row.split()]
    columns = (
        [KINDS.index(name[1]) for name in names],
        [int(name[0]) for name in names],
        [int(name[2:] or 0) for name in names],
    )
    kind, stage, microbatch = (
        np.array(column, kind)
        for column, kind in zip(columns, (np.int8, np.int32, np.int32), strict=True)
    )
    ends = np.cumsum([0, *(len(row.split()) for row in rows)])
    return Order(kind, stage, microbatch, np.zeros(len(names), np.bool_), ends)


STUCK = [
    (
        ["0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"],
        "rank 0 waits at 0B1 for ever; rank 1 at 1F1 wait too",
    ),
    (["0B0 0F0", "1F0 1B0"], "rank 0 waits at 0B0 for ever; rank 1 at 1F0 wait too"),
    (["0F0 0B0", ""], "rank 0 waits at 0B0 for ever"),
]


@pytest.mark.parametrize("simulator", [simulate, reference.simulate])
@pytest.mark.parametrize("rows, message", STUCK)
def test_two_ranks_that_wait_for_each_other_are_named_with_what_they_wait_at(
    simulator, rows, message
):
    work = case("naive", consecutive([1, 1]), 2).work
    with pytest.raises(PartoptError, match="deadlocks") as caught:
        simulator(order_of(*rows), work)
    assert message in str(caught.value)
    assert caught.value.hint


def test_replicas_that_wait_for_their_gradients_can_deadlock():
    """1-3-1: a replica of stage 1 waits for the others' gradients, which need forwards that stage 0
    may not begin before.
    """
    with pytest.raises(PartoptError, match="1A0"):
        stuck = case("pipedream", consecutive([1, 3, 1]), 12, blocking=True)
        simulate(stuck.order, stuck.work)
    deeper = case("pipedream", consecutive([1, 3, 1]), 12, blocking=True, warmup=[6, 1, 0])
    assert simulate(deeper.order, deeper.work).makespan > 0
