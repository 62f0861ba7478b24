"""Whole numbers of bash, in 64 bits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "+": operator.add, "-": operator.sub, "*": operator.mul,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, ",": lambda a, b: b,
    "<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63),
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "**": lambda a, b: pow(a, b, 2**64),
}  # fmt: skip


def combine(sign: str, left: int | None, right: int | None) -> int | None:
    """The result of an operator on two numbers, in 64 bits; None where it has none."""
    if left is None or right is None or sign not in _OPERATORS:
        return None
    if (sign in "/%" and not right) or (sign == "**" and right < 0):
        return None
    return wrap_64_bits(int(_OPERATORS[sign](left, right)))


def wrap_64_bits(number: int) -> int:
    """A number, as what it overflows to."""
    return (number + 2**63) % 2**64 - 2**63


def parse_literal(text: str, negative: bool) -> int | None:
    """The number of a literal, `12`, `010`, `0x1f` or `2#101`; None where a digit is none."""
    base, sharp, digits = text.rpartition("#")
    base = base if sharp else "8" if re.fullmatch("0[0-9]+", text) else "0"
    with suppress(ValueError):
        return wrap_64_bits(int(digits, int(base)) * (-1 if negative else 1))
    return None
