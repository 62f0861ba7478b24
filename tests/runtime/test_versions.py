"""Weight versions: whose memory they have, and how many there are at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partopt.runtime.tensor_memory import TensorMemory
from partopt.runtime.versions import DoubleBuffered, Versions

WEIGHTS = 1000
BYTES = 4 * WEIGHTS


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WEIGHTS))


def stashed(parameter: nn.Parameter) -> Versions:
    step = torch.optim.SGD([parameter], lr=1.0).step
    return Versions([parameter], step, replicas=1)


def pass_through(versions: Versions, parameter: nn.Parameter, microbatch: int) -> None:
    """The backward of a microbatch whose gradients are all 1, and the round behind it."""
    versions.use_for_backward(microbatch)
    (parameter * 1.0).sum().backward()
    versions.end_backward(microbatch)
    versions.end_round(microbatch)


def test_the_newest_version_is_stepped_in_place_where_no_microbatch_has_it(parameter):
    versions, memory = stashed(parameter), parameter.data_ptr()
    versions.use_for_forward(0)
    pass_through(versions, parameter, 0)
    assert parameter.data_ptr() == memory
    assert parameter[0].item() == -1.0


def test_a_version_that_a_microbatch_has_stays_as_it_is(parameter):
    versions = stashed(parameter)
    versions.use_for_forward(0)
    versions.use_for_forward(1)
    pass_through(versions, parameter, 0)
    versions.use_for_backward(1)
    assert parameter[0].item() == 0.0  # that of its forward
    pass_through(versions, parameter, 1)
    assert parameter[0].item() == -2.0


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
