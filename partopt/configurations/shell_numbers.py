"""Whole numbers of bash, in 64 bits, and conditions; None where they are not known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from partopt.configurations.marks import UNSET, mark, marks_of
from partopt.configurations.shell_syntax import BrokenScriptError, Node, parse
from partopt.configurations.shell_values import Value, as_text

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
_ASSIGNMENT = re.compile(r"([-+*/%&|^]|<<|>>)?=")


def negate(holds: bool | None) -> bool | None:
    """Whether a condition does not hold; None where that is not known."""
    return None if holds is None else not holds


def either(found: Sequence[bool | None], decides: bool) -> bool | None:
    """Whether one of two holds, or both: either decides it where it is `decides`."""
    if decides in found:
        return decides
    return None if None in found else not decides


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


class Shell(Protocol):
    """What an expression needs of a shell: its variables, of which some are being computed."""

    named: list[str]

    def spend(self, steps: int) -> None:
        """Count steps."""

    def text(self, word: Node) -> str:
        """The text that a word expands to."""

    def value(self, name: str) -> Value | None:
        """The value of a variable; None where it is set nowhere."""

    def assign(self, name: str, value: Value) -> None:
        """Give a variable a value."""

    def assign_element(self, name: str, index: Node, text: str) -> int | None:
        """Give an element of an array a value."""


class Arithmetic:
    """Computes an expression; `marks` are of what is not known in it, `known` shapes texts."""

    def __init__(self, shell: Shell, known: Callable[[str], str]) -> None:
        self.shell, self.known, self.marks = shell, known, list[str]()

    def number(self, node: Node) -> int | None:
        """The value of an expression; None where it is not known, as of a division by zero."""
        self.shell.spend(1)
        match node:
            case {"Type": "ParenArithm", "X": inside}:
                return self.number(inside)
            case {"Type": "UnaryArithm", "Op": "++" | "--" as sign, "X": name}:
                before = self.number(name)
                after = self.set_number(name, sign[0], before, 1)
                return before if node.get("Post") else after
            case {"Type": "UnaryArithm", "Op": sign, "X": inside}:
                value = self.number(inside)
                if value is None:
                    return None
                return wrap_64_bits(
                    {"-": -value, "!": int(not value), "~": ~value}.get(sign, value)
                )
            case {"Type": "BinaryArithm", "Op": "?", "X": test, "Y": {"X": yes, "Y": no}}:
                holds = self.number(test)
                if holds is not None:
                    return self.number(yes if holds else no)
                ways = self.number(yes), self.number(no)
                return ways[0] if ways[0] == ways[1] else None
            case {"Type": "BinaryArithm", "Op": "&&" | "||" as sign, "X": one, "Y": other}:
                left = self.number(one)
                if left is not None and bool(left) == (sign == "||"):
                    return int(sign == "||")
                right = self.number(other)
                sides = [None if side is None else side != 0 for side in (left, right)]
                found = either(sides, sign == "||")
                return None if found is None else int(found)
            case {"Type": "BinaryArithm", "Op": sign, "X": name, "Y": other} if (
                assigned := _ASSIGNMENT.fullmatch(sign)
            ):
                before = self.number(name) if assigned[1] else None
                return self.set_number(name, assigned[1], before, self.number(other))
            case {"Type": "BinaryArithm", "Op": sign, "X": one, "Y": other}:
                return combine(sign, self.number(one), self.number(other))
            case {"Parts": _}:
                return self.number_of(self.known(self.shell.text(node)).strip())
        return None

    def set_number(
        self, target: Node, sign: str | None, before: int | None, operand: int | None
    ) -> int | None:
        """Assign what an operator makes of a value before, or the operand itself."""
        name, value = str(target["Written"]), combine(sign, before, operand) if sign else operand
        text = mark(name) if value is None else str(value)
        match target:
            case {"Parts": [{"Type": "ParamExp", "Param": {"Value": array}, "Index": index}]}:
                self.shell.assign_element(array, index, text)
            case _:
                self.shell.assign(name, text)
        return value

    def number_of(self, text: str) -> int | None:
        """The number that a word is, a variable of that name has, or an expression in it."""
        if literal := re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+#\w+|[0-9]+)", text):
            return parse_literal(literal[2], literal[1] == "-")
        if not text:
            return 0
        self.marks += marks_of(text)
        if marks_of(text):
            return None
        if text.isidentifier():
            if text in self.shell.named:
                return None
            self.shell.spend(20)
            self.shell.named.append(text)
            value = self.known(as_text(self.shell.value(text) or mark(text, UNSET))).strip()
            number = self.number_of(value)
            self.shell.named.remove(text)
            return number
        with suppress(BrokenScriptError):
            expression = parse(f"(({text}))")[0].get("Cmd", {}).get("X", {})
            return None if "Parts" in expression else self.number(expression)
        return None
