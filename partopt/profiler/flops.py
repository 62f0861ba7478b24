"""Floating-point operations of the forward: matrix products, convolutions and attention.

A multiply-add counts as two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# The attention kernel of the CPU does the same work as the one whose formula torch knows.
_SAME_WORK = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention
    )
}


def count_flops(
    func: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any
) -> int:
    """Operations of one call of the operator `func`; 0 for one that is not counted."""
    operator = getattr(func, "overloadpacket", func)
    formula = flop_registry.get(_SAME_WORK.get(str(operator), operator))
    return int(formula(*arguments, **options, out_val=result)) if formula is not None else 0
