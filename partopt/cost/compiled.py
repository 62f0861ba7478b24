"""numba's njit for kernels: cached on disk, and without counting references to arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(
    *, inner: bool = False, inline: bool = False, nogil: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """numba's njit, with its cache on disk where a folder for it can be written.

    The cache notices changes to the file of the kernel alone, so all that a kernel calls stands in
    its file. It must be called with one signature: processes that compile two at the same time can
    mix up their code. Counting references to arrays is atomic and takes most of the time of a loop
    that reads arrays out of tuples; without it a kernel makes no arrays. `inner`: kernels alone
    call it, which need neither what takes arguments from Python, half of what a small function
    takes to compile, nor a cache beside their own. `inline`: so it is, and numba copies it to where
    it is called.
    """
    options: dict[str, Any] = {
        "_nrt": False,
        "nogil": nogil,
        "inline": "always" if inline else "never",
        "no_cpython_wrapper": inner or inline,
    }

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=not (inner or inline), **options)(function)
        except RuntimeError:  # neither the package's folder nor the user's can be written
            return njit(**options)(function)

    return compile_
