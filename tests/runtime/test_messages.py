"""Tensors of a cut in one message; what crosses a cut is the same for both of its stages."""

from __future__ import annotations

import pytest
import torch

from partopt.runtime.actions import Route, actions_of
from partopt.runtime.messages import Packing
from partopt.runtime.stage import Crossing
from partopt.schedules.order import B, F
from partopt.simulator.execution import execute
from tests.runtime.plans import looped, straight

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


def test_a_single_tensor_is_not_copied():
    tensor = torch.randn(8)
    packing = Packing([Crossing((8,), torch.float32, True)])
    assert packing.pack([tensor], CPU).data_ptr() == tensor.data_ptr()


def test_a_message_of_nothing_is_a_byte():
    packing = Packing([])
    assert packing.pack([], CPU).shape == (1,)
    assert packing.unpack(packing.pack([], CPU)) == []


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
    orders = execute(straight("1f1b", [2, 1], 3)).order
    actions = {(each.kind, each.microbatch): each for each in actions_of(orders, 2)}
    assert actions[F, 1].receives == Route(F, 0, 1, 1, 2)
    assert actions[B, 2].sends == Route(B, 1, 2, 2, 0)
    assert actions[F, 0].sends is None
    assert actions[B, 0].receives is None


def test_stages_of_one_rank_hand_over():
    orders = execute(looped("zbv", 2, 2, 4)).order
    routes = [each.sends for each in actions_of(orders, 1) if each.sends]
    assert {route.stage for route in routes if route.is_local} == {1, 2}


def test_a_rank_without_work_has_no_actions():
    assert actions_of(execute(straight("1f1b", [1, 1], 2)).order, 5) == []


@pytest.mark.parametrize("kind", [F, B])
def test_the_receiver_of_a_route(kind: int):
    assert Route(kind, 3, 0, 0, 1).receiver == (4 if kind == F else 2)
