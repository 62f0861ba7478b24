"""Where random numbers stand, so that a forward can draw the same ones again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch


class RandomState:
    """The state of torch on the CPU and on `device`, and of Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()

    def restore(self) -> None:
        """Draw the same numbers again."""
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)

    def advanced(self) -> bool:
        """Whether torch has drawn numbers since."""
        if not torch.equal(torch.get_rng_state(), self._host):
            return True
        return self._cuda is not None and not torch.equal(
            torch.cuda.get_rng_state(self._device), self._cuda
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The context in which the numbers that followed this state come once more."""
        now = RandomState(self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()
