"""Tensors of a cut in one message, and what an engine refuses before anything runs."""

import pytest
import torch

from partopt.documents.actions import B, F
from partopt.errors import PartoptError
from partopt.replay.packing import Packing
from partopt.replay.stage import Crossing
from partopt.runtime.actions import Route, actions_of
from partopt.runtime.context import Context, Progress
from partopt.runtime.engine import execute
from partopt.runtime.messages import check_cuts
from partopt.runtime.updates import Tied
from partopt.simulator.execution import execute as simulate
from tests.runtime.plans import looped, straight
from tests.runtime.sleeping import SleepingStage

CPU = torch.device("cpu")


def test_tensors_of_all_formats_come_back():
    tensors = [
        torch.tensor([[1, 2, 3]], dtype=torch.int8),
        torch.randn(2, 3, dtype=torch.float64),
        torch.tensor(True),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(0, 4),
        torch.randn(4, 4).t(),
        torch.tensor(1 + 2j),
    ]
    packing = Packing([Crossing(tuple(each.shape), each.dtype, True) for each in tensors])
    message = packing.pack(tensors, CPU)
    assert message.shape == (packing.size,)
    for found, right in zip(packing.unpack(message), tensors, strict=True):
        assert found.dtype == right.dtype
        assert torch.equal(found, right)
    alone = Packing([Crossing((2, 3), torch.float64, True)])  # is not copied
    assert alone.pack(tensors[1:2], CPU).data_ptr() == tensors[1].data_ptr()
    nothing = Packing([])
    assert nothing.pack([], CPU).shape == (1,)
    assert nothing.unpack(nothing.pack([], CPU)) == []


def test_tensors_of_a_message_change_in_place_each_for_itself():
    crossing = Crossing((2,), torch.float32, True)
    packing = Packing([crossing, crossing])
    first, second = packing.unpack(packing.pack([torch.ones(2), torch.ones(2)], CPU))
    first.requires_grad_()
    product = first * first
    second.add_(1)
    product.sum().backward()
    assert first.grad is not None
    assert torch.equal(first.grad, torch.full((2,), 2.0))


def test_messages_go_to_the_replica_that_runs_the_microbatch():
    orders = simulate(straight("1f1b", [2, 1], 3)).order
    actions = {(each.kind, each.microbatch): each for each in actions_of(orders, 2)}
    forward, back = actions[F, 1].receives, actions[B, 2].sends
    assert (forward, forward.receiver) == (Route(F, 0, 1, 1, 2), 1)
    assert (back, back.receiver) == (Route(B, 1, 2, 2, 0), 0)
    assert actions[F, 0].sends is None
    assert actions[B, 0].receives is None
    assert actions_of(orders, 5) == []  # a rank without work


def test_stages_of_one_rank_hand_over():
    orders = simulate(looped("zbv", 2, 2, 4)).order
    routes = [each.sends for each in actions_of(orders, 1) if each.sends]
    assert {route.stage for route in routes if route.is_local} == {1, 2}


SYNCHRONOUS = straight("1f1b", [2, 1], 4, cuts=[100])
ASYNCHRONOUS = straight("pipedream", [2, 1], 0)


class Alone(Context):
    """A process that hears nothing but itself."""

    def gather(self, value):
        return [value]


def alone(ranks=4):
    return Alone(0, ranks, CPU, Progress())


@pytest.mark.parametrize(
    ("plan", "ranks", "options", "code"),
    [
        (SYNCHRONOUS, 2, {}, "too-few-ranks"),
        (SYNCHRONOUS, 3, {"microbatches": 4}, "conflicting-options"),
        (ASYNCHRONOUS, 3, {}, "conflicting-options"),
        (ASYNCHRONOUS, 3, {"microbatches": 4, "tied": [Tied("w", [0, 1, 2])]}, "cannot-run"),
    ],
)
def test_what_cannot_run_is_refused(plan, ranks, options, code):
    with pytest.raises(PartoptError) as raised:
        execute(plan, lambda s: SleepingStage(plan, s), context=alone(ranks), **options)
    assert raised.value.code == code
    assert raised.value.hint


def test_stages_that_disagree_on_a_cut_are_refused():
    other = straight("1f1b", [2, 1], 4, cuts=[104])
    stages = {0: SleepingStage(SYNCHRONOUS, 0), 1: SleepingStage(other, 1)}
    with pytest.raises(PartoptError, match=r"stage 0 sends \[100\].*stage 1 receives \[104\]"):
        check_cuts(stages, alone())
    check_cuts(stages | {1: SleepingStage(SYNCHRONOUS, 1)}, alone())
