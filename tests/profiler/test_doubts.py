"""What is said of measurements that cannot be trusted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.errors import PartoptWarning
from tests.profiler.helpers import FakeClock, Parts, linear, structure


def checkpointed(reentrant: bool) -> nn.Module:
    """Two layers, each in a checkpoint of its own, between plain ones."""

    def forward(self: Parts, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.last(x)

    return Parts(forward, first=linear(), a=linear(), b=linear(), last=linear())


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_layers_in_reentrant_checkpoints_are_named() -> None:
    with pytest.warns(
        PartoptWarning,
        match=r"^a, b: no backward of its own is seen, its time is charged to its neighbours;",
    ) as told:
        structure(checkpointed(reentrant=True), microbatch_sizes=[1, 2])
    [message] = [str(each.message) for each in told if each.category is PartoptWarning]
    assert "use_reentrant=False" in message
    assert "--unit" in message


def test_other_checkpoints_are_measured_without_a_word() -> None:
    structure(checkpointed(reentrant=False))


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_unit_that_holds_its_checkpoint_is_measured_without_a_word() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    structure(nn.Sequential(linear(), Block(), Block()), granularity="block")


def test_a_layer_that_the_loss_does_not_need_has_no_backward_and_no_warning() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        made = self.a(x)
        self.unused(made)
        with torch.no_grad():
            self.frozen(made)
        return self.b(made)

    structure(Parts(forward, a=linear(), unused=linear(), frozen=linear(), b=linear()))


def test_a_busy_machine_is_told() -> None:
    class Busy(FakeClock):
        def idle_share(self) -> float:
            return 0.4

    with pytest.warns(PartoptWarning, match="processor and wall time differ by 40%"):
        structure(linear(), clock=Busy())
