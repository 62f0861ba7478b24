"""What an engine runs: a stage of a model, which computes on microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError


class Crossing(NamedTuple):
    """A tensor that crosses a cut, the same for every microbatch.

    Where `gradient` is true its gradient comes back, of the same shape and format. One that lies on
    the host while stages compute on a GPU crosses through the GPU, and is on the host again behind.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    on_host: bool = False


def with_gradient(crossings: Sequence[Crossing]) -> list[Crossing]:
    """Those whose gradient comes back."""
    return [crossing for crossing in crossings if crossing.gradient]


class RunnableStage(Protocol):
    """A stage on this rank.

    It keeps what a microbatch's backward needs from its forward on. Tensors come and go in the
    order of `receives` and of `sends`, gradients in the same order, of those that have one.
    """

    receives: Sequence[Crossing]  # of the cut before the stage; of the first stage none
    sends: Sequence[Crossing]  # of the cut behind it; of the last stage none
    parameters: Sequence[nn.Parameter]  # those that train, every one once

    def prepare(self, microbatch: int) -> None:
        """Have the model's inputs of a microbatch ready, whose forward comes next."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; where the stage recomputes, only its inputs are kept."""

    def recompute(self, microbatch: int) -> None:
        """Run the forward once more from the kept inputs, for a backward that comes next.

        A backward that comes without it recomputes by itself.
        """

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the whole backward: gradients of `sends` to gradients of `receives`.

        Those of the parameters add up in their `.grad`.
        """

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward of the inputs alone; `backward_weight` follows some time later."""

    def backward_weight(self, microbatch: int) -> None:
        """Run the backward of the weights alone."""


def check_made(stage: int, tensors: Sequence[Tensor], crossings: Sequence[Crossing]) -> None:
    """Refuse tensors that are not those of a cut, for which its receiver has room."""
    for tensor, crossing in zip(tensors, crossings, strict=True):
        if tensor.shape != crossing.shape or tensor.dtype != crossing.dtype:
            raise PartoptError(
                f"stage {stage} made a tensor of {list(tensor.shape)} {tensor.dtype}, its cut has "
                f"{list(crossing.shape)} {crossing.dtype}",
                "give every microbatch the same number of samples",
                code="cut-mismatch",
            )
