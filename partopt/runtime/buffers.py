"""Keeping the buffers of a model, such as running statistics, while a forward runs once more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# A slot: the dictionary of a module that holds a buffer, the buffer's key there, its full name
Slot = tuple[dict[str, Tensor | None], str, str]


def buffer_slots(
    model: nn.Module, chosen: Callable[[str], bool] = lambda _name: True
) -> list[Slot]:
    """The slots of the buffers whose names are `chosen`."""
    return [
        (module._buffers, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key in module._buffers
        if module._buffers[key] is not None and chosen(f"{prefix}.{key}" if prefix else key)
    ]


class BufferState:
    """The buffers in these slots as they are now."""

    def __init__(self, slots: list[Slot]) -> None:
        self._kept = [
            (holder, key, name, buffer, buffer.detach().clone())
            for holder, key, name in slots
            if (buffer := holder[key]) is not None
        ]

    def changed(self) -> list[str]:
        """Names of the buffers that have other values since."""
        return [
            name
            for holder, key, name, buffer, before in self._kept
            if not buffer.is_meta and not _is_same(holder[key], before)
        ]

    def replaced(self) -> dict[str, Tensor]:
        """The tensors that stand where there were others, by the names of the buffers."""
        pairs = ((name, holder[key], buffer) for holder, key, name, buffer, _ in self._kept)
        return {name: now for name, now, was in pairs if now is not None and now is not was}

    def restore(self) -> None:
        """Give the slots their buffers back, and the buffers their values."""
        for holder, key, _, buffer, before in self._kept:
            holder[key] = buffer
            if not buffer.is_meta:
                buffer.data.copy_(before)  # its version stays: a backward may need it


def _is_same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and now.shape == before.shape and torch.equal(now, before)
