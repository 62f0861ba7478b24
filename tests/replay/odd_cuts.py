"""Stages that compute nothing and check that what crosses odd cuts comes as it was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from partopt.replay.stage import Crossing
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from tests.runtime.plans import looped, straight

ONE = Crossing((1,), torch.float32, True)
CUTS = {
    "all formats": [
        Crossing((3,), torch.float64, True),
        Crossing((2,), torch.bool, False),
        Crossing((2, 2), torch.bfloat16, True),
        Crossing((), torch.float32, True),
        Crossing((3,), torch.int8, False),
        Crossing((2,), torch.complex64, True),
    ],
    "empty tensors": [Crossing((0,), torch.float32, True), Crossing((0, 3), torch.int64, False)],
    "no gradient": [Crossing((2,), torch.int64, False)],
    "nothing": [],
    "one number": [ONE],
    "one number without a gradient": [ONE._replace(gradient=False)],
}
PLANS = [
    straight("1f1b", [1, 1, 1, 1], 6),
    straight("zb-h1", [1, 1, 1], 5),
    looped("zbv", 2, 2, 6),
    looped("interleaved", 2, 2, 8),
]


class CheckingStage:
    """Stage s of S with the same `cut` on both sides; `faults` are what came otherwise than sent.

    The tensors of microbatch m are full of m + 1, their gradients of -m - 1.
    """

    def __init__(self, cut: Sequence[Crossing], s: int, S: int) -> None:
        self.receives = cut if s > 0 else []
        self.sends = cut if s < S - 1 else []
        self.parameters: list[nn.Parameter] = []
        self.faults: list[str] = []

    def prepare(self, microbatch: int) -> None:
        """There are no inputs but those that are received."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        self._check(received, self.receives, microbatch + 1)
        for each in received:
            each.zero_()  # a stage may change what it got
        return _full(self.sends, microbatch + 1)

    def recompute(self, microbatch: int) -> None:
        raise AssertionError("no stage of these plans recomputes")

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        self._check(gradients, _graded(self.sends), -microbatch - 1)
        return _full(_graded(self.receives), -microbatch - 1)

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None:
        pass

    def _check(self, found: Sequence[Tensor], crossings: Sequence[Crossing], value: int) -> None:
        right = _full(crossings, value)
        same = len(found) == len(right) and all(
            a.dtype == b.dtype and torch.equal(a, b) and not a.requires_grad
            for a, b in zip(found, right, strict=True)
        )
        if not same:
            self.faults.append(f"{found} for {right}")


def _full(crossings: Sequence[Crossing], value: int) -> list[Tensor]:
    return [torch.full(each.shape, value).to(each.dtype) for each in crossings]


def _graded(crossings: Sequence[Crossing]) -> list[Crossing]:
    return [each for each in crossings if each.gradient]


def faults_of(
    cut: Sequence[Crossing], context: Context, engine: Callable[..., RankRecord]
) -> list[str]:
    """What came to this rank otherwise than it was sent, in two steps of every plan."""
    faults = []
    for plan in PLANS:
        S = len(plan.stages)
        stages = [CheckingStage(cut, s, S) for s in range(S)]
        engine(plan, stages.__getitem__, context=context, steps=2)
        faults += [fault for stage in stages for fault in stage.faults]
    return faults
