"""Gradients that replicas add up, against one process; how many versions of weights there are."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.runtime.completions import Completions
from partopt.runtime.processes import run_local
from partopt.runtime.tensor_memory import TensorMemory
from partopt.runtime.updates import Sum, buckets_of
from partopt.runtime.versions import DoubleBuffered, Versions

WIDTH, RANKS, MICROBATCHES = 6, 2, 3
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 8


def model():
    """Four layers, the last of which no output depends on."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))


def run_backward(layers, microbatch):
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    for layer in list(layers.children())[:3]:
        x = torch.tanh(layer(x))
    x.sum().backward()


def exchange(context):
    """By bytes of a bucket: buckets, those begun early, the sums, and when the last one ended."""
    found = {}
    for size_bytes in (1.0, LAYER_BYTES, math.inf):
        layers, times = model(), np.zeros(1, np.int64)
        parameters, completions = list(layers.parameters()), Completions()
        own = Sum(parameters, context.group(range(RANKS)), size_bytes)
        for k in range(MICROBATCHES):
            if k == MICROBATCHES - 1:
                own.watch()
            run_backward(layers, RANKS * k + context.rank)
        early = len(own.begun)
        own.take_rest()
        completions.watch(own.begin_rest(), times, 0, "exchange")
        assert all(parameter.grad is None for parameter in parameters)
        own.finish()
        completions.drain()
        gradients = [parameter.grad.clone() for parameter in parameters]
        run_backward(layers, 0)  # nobody watches any more
        found[size_bytes] = len(own.buckets), early, gradients, int(times[0])
    return found


def exchange_both(context):
    return exchange(context), exchange_used(context)


@pytest.fixture(scope="module")
def exchanged():
    """What both exchanges gave on each rank."""
    return run_local(RANKS, exchange_both)


@pytest.mark.slow
def test_sums_are_those_of_one_process_and_begin_before_the_backward_ends(exchanged):
    alone = model()
    for microbatch in range(RANKS * MICROBATCHES):
        run_backward(alone, microbatch)
    expected = [
        torch.zeros_like(each) if each.grad is None else each.grad for each in alone.parameters()
    ]
    for found, _ in exchanged:
        for _, _, gradients, ended in found.values():
            torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
            assert ended > 0
        # the unused layer, which goes first, is there when the backward has ended
        assert [(count, early) for count, early, *_ in found.values()] == [(8, 0), (4, 0), (1, 0)]


def exchange_used(context):
    """Buckets begun at each gradient of the last backward, and the sums."""
    layers = model()
    used = list(layers.parameters())[:6]
    group, seen = context.group(range(RANKS)), []
    own = Sum(used, group, LAYER_BYTES)
    own.watch()
    for parameter in used:
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(own.begun)))
    run_backward(layers, context.rank)
    own.take_rest()
    own.begin_rest()
    own.finish()
    return seen, [parameter.grad for parameter in used]


@pytest.mark.slow
def test_a_bucket_begins_when_its_gradients_are_there(exchanged):
    alone = model()
    for microbatch in range(RANKS):
        run_backward(alone, microbatch)
    expected = [each.grad for each in alone.parameters()][:6]
    for _, (seen, gradients) in exchanged:
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


class Failed:
    """A message that was not sent."""

    def wait(self):
        raise ValueError("lost")


def test_a_message_that_was_not_sent_is_told_of_at_the_end_and_to_the_next_one():
    completions, times = Completions(), np.zeros(1, np.int64)
    given = Failed(), None, times, 0, 1
    completions.keep(*given)
    for tell in (completions.drain, lambda: completions.keep(*given)):
        with pytest.raises(ValueError, match="lost"):
            tell()
    completions.close()
    assert not times.any()


def test_buckets_hold_one_format_and_the_last_parameters_first():
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds]
    numbers = {id(each): place for place, each in enumerate(parameters)}
    for size_bytes, expected in ((16, [[3, 2], [0], [1]]), (math.inf, [[3, 2, 0], [1]])):
        found = buckets_of(parameters, size_bytes)
        assert [[numbers[id(each)] for each in bucket] for bucket in found] == expected


# --- versions of weights

WEIGHTS = 1000
BYTES = 4 * WEIGHTS


@pytest.fixture
def parameter():
    return nn.Parameter(torch.zeros(WEIGHTS))


def test_a_version_is_stepped_in_place_where_no_microbatch_has_it_and_stays_else(parameter):
    step = torch.optim.SGD([parameter], lr=1.0).step
    versions, memory = Versions([parameter], step, replicas=1), parameter.data_ptr()

    def pass_through(microbatch):
        """A backward whose gradients are all 1, and the round behind it."""
        versions.use_for_backward(microbatch)
        (parameter * 1.0).sum().backward()
        versions.end_backward(microbatch)
        versions.end_round(microbatch)

    versions.use_for_forward(0)
    pass_through(0)
    assert parameter.data_ptr() == memory
    assert parameter[0].item() == -1.0
    versions.use_for_forward(1)
    versions.use_for_forward(2)
    pass_through(1)
    versions.use_for_backward(2)
    assert parameter[0].item() == -1.0  # that of its forward
    pass_through(2)
    assert parameter[0].item() == -3.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_2bw_has_two_versions_and_the_gradients_of_a_batch(parameter, replicas):
    """And beside replicas those of a round, which are added up over these before."""
    step, batch = torch.optim.SGD([parameter], lr=1.0).step, 4
    versions = DoubleBuffered([parameter], step, replicas, batch)
    values = []
    with TensorMemory([parameter]) as memory:
        for microbatch in range(0, 5 * batch, replicas):  # those of the first replica
            versions.use_for_forward(microbatch)
            values.append(parameter[0].item())
            versions.use_for_backward(microbatch)
            (parameter * 1.0).sum().backward()
            versions.end_backward(microbatch)
            versions.end_round(microbatch // replicas)
    rounds = batch // replicas
    assert values[::rounds] == [0.0, 0.0, -rounds, -2.0 * rounds, -3.0 * rounds]
    assert memory.peak_bytes < 4.1 * BYTES  # two versions, gradients of the batch and a round
