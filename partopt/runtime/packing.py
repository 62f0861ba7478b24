"""The tensors of a cut, packed into one message of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partopt.runtime.stage import Crossing

_ALIGNMENT = 16  # bytes: each tensor begins where its number format may


class Packing:
    """How the tensors of a cut lie in a message of `size` bytes; never none, for others wait."""

    def __init__(self, crossings: Sequence[Crossing]) -> None:
        self.crossings = list(crossings)
        self.places: list[tuple[int, int]] = []  # of each tensor its first byte and the one behind
        stop = 0
        for crossing in crossings:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + _elements(crossing) * crossing.dtype.itemsize
            self.places.append((start, stop))
        self.size = max(1, stop)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message: uint8, shape (size,). A single tensor is not copied."""
        if len(tensors) == 1 and self.places[0][1] == self.size:
            return _bytes_of(tensors[0])
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        for tensor, (start, stop) in zip(tensors, self.places, strict=True):
            message[start:stop] = _bytes_of(tensor)
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """The tensors in a message, which share its memory; it may come later.

        Each counts its own changes (`.data`), so that a stage may change one in place.
        """
        return [
            message[start:stop].view(crossing.dtype).view(crossing.shape).data
            for crossing, (start, stop) in zip(self.crossings, self.places, strict=True)
        ]


def _elements(crossing: Crossing) -> int:
    return int(torch.Size(crossing.shape).numel())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
