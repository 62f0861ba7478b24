"""`import torchvision` beside a torch that it was not built for.

Its import fails there, or that of a package that imports it, such as a model of transformers: two
operators of its compiled part are not declared. Declared without code they are enough for a model
that calls neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")

_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library lives as long as it is referred to


def with_torchvision(call: Callable[[], Made]) -> Made:
    """What `call` makes; where it fails for want of these operators it is called again."""
    try:
        return call()
    except Exception as error:
        if _declared or not _misses_operators(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for signature in _SIGNATURES:
        with contextlib.suppress(RuntimeError):  # declared by somebody else
            library.define(signature)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return call()


def _misses_operators(error: BaseException) -> bool:
    """Whether the error, or one that led to it, says that torchvision's operators are missing."""
    cause: BaseException | None = error
    while cause is not None:
        if "operator torchvision::" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
