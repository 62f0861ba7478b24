"""Floating-point operations of a step: matrix products, convolutions and attention.

A multiply-add counts as two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# The attention kernels of the CPU do the same work as those whose formulas torch knows.
_SAME_WORK = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def count_flops(
    func: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any
) -> int:
    """Operations of one call of the operator `func`; 0 for one that is not counted."""
    operator = getattr(func, "overloadpacket", func)
    if str(operator) == "aten._grouped_mm":
        return _grouped_mm(arguments[0], arguments[1])
    formula = flop_registry.get(_SAME_WORK.get(str(operator), operator))
    return int(formula(*arguments, **options, out_val=result)) if formula is not None else 0


def _grouped_mm(first: Tensor, second: Tensor) -> int:
    """Operations of products in groups: rows, or columns of a shared axis, belong to one each.

    Shapes: (m, k) by (g, k, n), (m, k) by (k, n), and (g, m, k) by (g, k, n).
    """
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]
