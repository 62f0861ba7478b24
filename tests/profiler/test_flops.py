"""A multiplication and an addition are two operations."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.profiler.helpers import Parts, linear, structure


def flops(profile):
    return [layer.forward_flops for layer in profile.measurements[0].layers]


@pytest.mark.slow
def test_a_product_is_two_operations_for_each_weight_and_sample():
    model = nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2))
    assert flops(structure(model)) == [2 * 4 * 8, 0, 2 * 8 * 2]
    assert flops(structure(model, lambda size: torch.randn(3, 4))) == [3 * 64, 0, 3 * 32]
    convolution = nn.Sequential(nn.Conv2d(3, 5, kernel_size=2, bias=False))
    found = flops(structure(convolution, lambda size: torch.randn(1, 3, 4, 4)))
    assert found == [2 * (3 * 2 * 2) * 5 * 3 * 3]
    # attention, 6 tokens of 2 heads of 4: queries with keys, and weights with values
    found = flops(structure(Parts(attend, a=linear(8, 8)), lambda size: torch.randn(1, 6, 8)))
    assert found == [2 * 6 * 8 * 8 + 2 * (2 * 2 * 6 * 6 * 4)]


def attend(self, x):
    y = self.a(x).view(1, 6, 2, 4).transpose(1, 2)
    return functional.scaled_dot_product_attention(y, y, y)
