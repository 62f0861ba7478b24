"""How the tensors of a cut lie in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partopt.replay.stage import Crossing

_ALIGNMENT = 16  # bytes: a tensor of a message begins where its number format may


class Packing:
    """How the tensors of a cut lie in a message of `size` bytes; never none, for others wait."""

    def __init__(self, crossings: Sequence[Crossing]) -> None:
        self.crossings = list(crossings)
        self.places: list[slice] = []  # the bytes of every tensor
        stop = 0
        for crossing in crossings:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + torch.Size(crossing.shape).numel() * crossing.dtype.itemsize
            self.places.append(slice(start, stop))
        self.size = max(1, stop)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message: uint8, shape (size,), on the device. A single tensor there is not copied."""
        placed = [tensor.detach().to(device).contiguous() for tensor in tensors]
        parts = [tensor.view(-1).view(torch.uint8) for tensor in placed]
        if len(parts) == 1 and len(parts[0]) == self.size:
            return parts[0]
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        for part, place in zip(parts, self.places, strict=True):
            message[place] = part
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """The tensors in a message, which share its memory; it may come later.

        Each counts its changes (`.data`), so that a stage may change one in place.
        """
        return [
            message[place].view(crossing.dtype).view(crossing.shape).data
            for crossing, place in zip(self.crossings, self.places, strict=True)
        ]

    def give_back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message that is there, all where their stages have them."""
        pairs = zip(tensors, self.crossings, strict=True)
        return [tensor.cpu() if crossing.on_host else tensor for tensor, crossing in pairs]
