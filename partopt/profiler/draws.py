"""Layers that are skipped at random: every decision is made so that the most of the model runs.

Layer drop (Fan et al., ICLR 2020) and stochastic depth (Huang et al., ECCV 2016) draw one number
between 0 and 1 for every layer and compare it with a rate. Where a forward draws such numbers, all
of them are the largest or all are 0, whichever makes it do more.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from partopt.profiler.weightless import is_fake, replace_attribute

ENDS = 1 - 2**-24, 0.0  # the largest below 1 in float32


class Draws:
    """The single numbers that are drawn: whether any was `seen`, and what they are `fixed` at.

    `skips` says whether the forward does less at the other end.
    """

    def __init__(self) -> None:
        self.fixed: float | None = None
        self.seen = self.skips = self.paused = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The context in which they are noted, and fixed."""
        numpy: Any = sys.modules.get("numpy")
        places: list[tuple[Any, str]] = [(torch, "rand"), (random, "random"), (random, "uniform")]
        if numpy is not None:
            places += [(numpy.random, name) for name in ("random", "rand", "uniform")]
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                followed = self._follow(getattr(owner, name))
                stack.enter_context(replace_attribute(owner, name, followed))
            yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The context in which they come as they do."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def fix(self, measure_work: Callable[[], int]) -> None:
        """Fix them at the end at which there is more work."""
        work = {}
        for end in ENDS:
            self.fixed = end
            work[end] = measure_work()
        self.fixed = max(ENDS, key=lambda end: work[end])
        self.skips = len(set(work.values())) > 1

    def _follow(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def drawn(*arguments: Any, **options: Any) -> Any:
            made = draw(*arguments, **options)
            single = made.numel() == 1 if isinstance(made, Tensor) else isinstance(made, float)
            if self.paused or not single:
                return made
            self.seen = True
            if not isinstance(made, Tensor):
                return made if self.fixed is None else self.fixed
            if self.fixed is None and not is_fake(made):
                return made
            # a fake made of a constant has its value
            value = ENDS[0] if self.fixed is None else self.fixed
            return torch.tensor(value, dtype=made.dtype, device=made.device).view(made.shape)

        return drawn
