"""One set of real weights for units that are alike: memory is shared, gradients add up in it."""

from __future__ import annotations

import torch
from torch import nn

from partopt.profiler.fake import fake_mode, fake_parameters
from partopt.profiler.sharing import SharedWeights
from partopt.profiler.step import zero_gradients


def test_units_that_are_alike_share_memory_and_no_sum_of_gradients_is_held() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    device = torch.device("cpu")
    with fake_parameters(model, fake_mode(), device, torch.float32):
        shared = SharedWeights(model, [list(model)])
        with shared.in_place():
            first, second, third = (each.weight for each in model)
            arrived: list[float] = []
            for weight in (third, second, first):
                weight.register_post_accumulate_grad_hook(
                    lambda each: arrived.append(float(each.grad.abs().sum()))
                )
            model(torch.ones(2, 8)).square().sum().backward()

            assert len({id(each) for each in (first, second, third)}) == 3
            assert len({each.data_ptr() for each in (first, second, third)}) == 1
            assert first.grad is second.grad is third.grad
            # the gradient of each unit is added as it comes, in the one memory there is
            assert len(set(arrived)) == 3
            once = nn.Parameter(first.detach().clone())
            x = torch.ones(2, 8)
            for _ in range(3):
                x = x @ once.T
            x.square().sum().backward()
            torch.testing.assert_close(first.grad, once.grad)

            zero_gradients(model)
            assert not first.grad.any()


def test_weights_without_gradients_lose_them_and_others_keep_theirs() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
    device = torch.device("cpu")
    with fake_parameters(model, fake_mode(), device, torch.float32):
        shared = SharedWeights(model, [[model[0], model[1]], [model[2]]])
        with shared.in_place():
            model[1](torch.ones(1, 4)).sum().backward()
            shared.drop_unused_gradients()
            # memory is shared with the unit that got a gradient
            assert model[0].weight.grad is model[1].weight.grad is not None
            assert model[2].weight.grad is None
