"""Where random numbers stand, so that what draws them can be repeated."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomNumbers:
    """Where random numbers of torch, Python and numpy stand."""

    def __init__(self) -> None:
        numpy: Any = sys.modules.get("numpy")
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """Draw the same numbers again."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def advanced(self) -> bool:
        """Whether torch has drawn numbers since."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        pairs = zip([self._torch, *self._cuda], [torch.get_rng_state(), *cuda], strict=True)
        return not all(torch.equal(before, now) for before, now in pairs)

    @staticmethod
    def seed(seed: int) -> None:
        """Draw the numbers that follow from `seed`."""
        numpy: Any = sys.modules.get("numpy")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for all devices
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
