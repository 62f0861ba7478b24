"""Compilation of hot loops, cached on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's njit with its cache on disk; without the cache where no folder can be written, as in
    a read-only installation.
    """

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # numba finds no place for a cache
            return njit(**options)(function)

    return compile_
