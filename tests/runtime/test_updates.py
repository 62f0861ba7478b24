"""Gradients that replicas add up beside their last backward, against one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.runtime.context import Context
from partopt.runtime.processes import run_local
from partopt.runtime.updates import Sum, buckets_of

WIDTH, RANKS, MICROBATCHES = 6, 2, 3
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 8


def model() -> nn.Module:
    """Four layers, the last of which no output depends on."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))


def run_backward(layers: nn.Module, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    for layer in list(layers.children())[:3]:
        x = torch.tanh(layer(x))
    x.sum().backward()


def exchange(context: Context) -> dict[float, tuple[int, int, list[Tensor], int]]:
    """By bytes of a bucket: buckets, those begun early, the sums, and the notes of their end."""
    found = {}
    for size_bytes in (1.0, LAYER_BYTES, math.inf):
        layers, ended = model(), []
        parameters = list(layers.parameters())
        own = Sum(parameters, context.group(range(RANKS)), size_bytes)
        for k in range(MICROBATCHES):
            if k == MICROBATCHES - 1:
                own.watch()
            run_backward(layers, RANKS * k + context.rank)
        early = len(own.begun)
        own.begin_rest(ended.append)
        assert all(parameter.grad is None for parameter in parameters)
        own.finish()
        gradients = [parameter.grad.clone() for parameter in parameters]
        run_backward(layers, 0)  # nobody watches any more
        found[size_bytes] = len(own.buckets), early, gradients, len(ended)
    return found


def test_sums_are_those_of_one_process_and_begin_before_the_backward_ends():
    alone = model()
    for microbatch in range(RANKS * MICROBATCHES):
        run_backward(alone, microbatch)
    expected = [
        torch.zeros_like(each) if each.grad is None else each.grad for each in alone.parameters()
    ]
    for found in run_local(RANKS, exchange):
        for _, _, gradients, ended in found.values():
            torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
            assert ended >= 1
        # the unused layer, which goes first, is there when the backward has ended
        assert [(count, early) for count, early, *_ in found.values()] == [(8, 0), (4, 0), (1, 0)]


def exchange_used(context: Context) -> tuple[list[int], list[Tensor]]:
    """Buckets begun at each gradient of the last backward, and the sums."""
    layers = model()
    used = list(layers.parameters())[:6]
    own, seen = Sum(used, context.group(range(RANKS)), LAYER_BYTES), []
    own.watch()
    for parameter in used:
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(own.begun)))
    run_backward(layers, context.rank)
    own.begin_rest(lambda _: None)
    own.finish()
    return seen, [parameter.grad for parameter in used]


def test_a_bucket_begins_when_its_gradients_are_there():
    alone = model()
    for microbatch in range(RANKS):
        run_backward(alone, microbatch)
    expected = [each.grad for each in alone.parameters()][:6]
    for seen, gradients in run_local(RANKS, exchange_used):
        assert sorted(seen) == seen
        assert set(seen) == {0, 1, 2, 3}
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)


def test_gradients_in_several_parts_are_refused():
    layer = nn.Linear(2, 2)
    own = Sum(list(layer.parameters()), None, math.inf)
    own.watch()
    weight = [layer.weight]
    torch.autograd.backward(layer(torch.ones(2)).sum(), inputs=weight)
    with pytest.raises(PartoptError, match="several parts"):
        torch.autograd.backward(layer(torch.ones(2)).sum(), inputs=weight)


def test_buckets_hold_one_format_and_the_last_parameters_first():
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds]
    numbers = {id(each): place for place, each in enumerate(parameters)}
    found = [[numbers[id(each)] for each in bucket] for bucket in buckets_of(parameters, 16)]
    assert found == [[3, 2], [0], [1]]
